"""MMoE: experts that all tasks share, and for each task a gate that mixes them.

J. Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts, KDD 2018.
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


class MMoE(Model):
    """Experts, which are towers over the keys' vectors; each task has a tower over its own mixture of them.

    Task k: y_k = h_k(sum over i of g_k(x)_i f_i(x)), g_k(x) = softmax(W_k x) (section 4.2).

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``.
    features : Features
        What it reads, with two labels or more.
    dim : int
    per_field : bool
        Whether each field has a table of its own.
    experts : int
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
        experts: int = 4,
        task_hidden: Sequence[int] = (64,),
        embedding_dropout: float = 0.0,
        **deep: Unpack[Deep],
    ) -> None:
        super().__init__(features)
        tasks = tasks_of(self.features, "MMoE")
        experts, task_hidden = count_of("experts", experts), widths_of("task_hidden", task_hidden)
        self.embedding = Lookup(make, "embedding", self.features, dim, per_field=per_field, dropout=embedding_dropout)
        width = self.embedding.count * dim + self.features.dense_width
        made = [tower(width, **deep) for _ in range(experts)]
        self.experts = nn.ModuleList(made)
        self.gates = nn.ModuleList(Gate(width, experts) for _ in tasks)
        self.towers = TaskTowers(tasks, made[0].width, {**deep, "hidden": task_hidden})

    def forward(self, x: Inputs) -> dict[str, Tensor]:
        """Compute the logits float32[n] of each task."""
        (rows,) = look_up(x, self.embedding)
        wide = flat(rows.fields, x.dense)
        experts = torch.stack([expert(wide) for expert in self.experts], dim=2)
        return self.towers(
            {task: gate(wide, experts) for task, gate in zip(self.towers.tasks, self.gates, strict=True)}
        )
