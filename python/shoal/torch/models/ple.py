"""PLE: experts of each task beside shared ones, in layers that extract what tasks have in common step by step.

H. Tang et al., Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model for Personalized
Recommendations, RecSys 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.model import Model
from shoal.torch.models.layers import Deep, Lookup, Maker, count_of, flat, look_up, tower, widths_of
from shoal.torch.models.tasks import Gate, TaskTowers, tasks_of


class Extraction(nn.Module):
    """One layer: the input of each task and, last, the shared one, to the mixtures that their gates make.

    A task's gate mixes its own experts and the shared ones, the shared gate all experts (section 4.2). The last layer
    has no shared gate.
    """

    def __init__(self, width: int, tasks: int, experts: int, shared: int, deep: Deep, *, is_last: bool) -> None:
        super().__init__()
        own = [[tower(width, **deep) for _ in range(experts)] for _ in range(tasks)]
        common = [tower(width, **deep) for _ in range(shared)]
        self.own = nn.ModuleList(nn.ModuleList(its) for its in own)
        self.shared = nn.ModuleList(common)
        self.gates = nn.ModuleList(Gate(width, experts + shared) for _ in range(tasks))
        self.shared_gate = None if is_last else Gate(width, tasks * experts + shared)
        self.width = common[0].width

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Compute float32[n, width] for each task, and the shared one unless this layer is the last."""
        *tasks, common = inputs
        own = [
            [expert(x) for expert in its]  # type: ignore[attr-defined]
            for x, its in zip(tasks, self.own, strict=True)
        ]
        shared = [expert(common) for expert in self.shared]
        out = [
            gate(x, torch.stack([*its, *shared], dim=2)) for gate, x, its in zip(self.gates, tasks, own, strict=True)
        ]
        if self.shared_gate is None:
            return out
        every = [one for its in own for one in its] + shared
        return [*out, self.shared_gate(common, torch.stack(every, dim=2))]


class PLE(Model):
    """Layers of experts, of which each task has some of its own and shares others, and a tower for each task.

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``.
    features : Features
        What it reads, with two labels or more.
    dim : int
    per_field : bool
        Whether each field has a table of its own.
    layers : int
        Layers of experts; 1 is the paper's CGC.
    experts, shared : int
        Experts of each task in a layer, and shared ones.
    task_hidden : sequence of int
        Widths of the layers of each task's tower.
    embedding_dropout : float
        Of the numbers of rows.
    **deep
        Settings of the experts: see `Deep`. Those but ``hidden`` are also of the tasks' towers.
    """

    def __init__(
        self,
        make: Maker,
        features: Features | int,
        *,
        dim: int = 16,
        per_field: bool = False,
        layers: int = 2,
        experts: int = 2,
        shared: int = 2,
        task_hidden: Sequence[int] = (64,),
        embedding_dropout: float = 0.0,
        **deep: Unpack[Deep],
    ) -> None:
        super().__init__(features)
        tasks = tasks_of(self.features, "PLE")
        task_hidden = widths_of("task_hidden", task_hidden)
        layers, experts, shared = count_of("layers", layers), count_of("experts", experts), count_of("shared", shared)
        self.embedding = Lookup(make, "embedding", self.features, dim, per_field=per_field, dropout=embedding_dropout)
        width = self.embedding.count * dim + self.features.dense_width
        made: list[Extraction] = []
        for number in range(layers):
            made.append(Extraction(width, len(tasks), experts, shared, deep, is_last=number == layers - 1))
            width = made[-1].width
        self.layers = nn.ModuleList(made)
        self.towers = TaskTowers(tasks, width, {**deep, "hidden": task_hidden})

    def forward(self, x: Inputs) -> dict[str, Tensor]:
        """Compute the logits float32[n] of each task."""
        (rows,) = look_up(x, self.embedding)
        wide = flat(rows.fields, x.dense)
        inputs = [wide] * (len(self.towers.tasks) + 1)
        for layer in self.layers:
            inputs = layer(inputs)
        return self.towers(dict(zip(self.towers.tasks, inputs, strict=True)))
