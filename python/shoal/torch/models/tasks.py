"""The parts of models of several tasks: what they need of the features, towers of tasks, and mixtures of experts.

Threads: as torch's modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.models.features import Features
from shoal.torch.models.layers import Deep, has_tower, tower


def tasks_of(features: Features, model: str) -> tuple[str, ...]:
    """Return the tasks of a model that needs two or more."""
    if len(features.tasks) < 2:
        raise ValueError(
            f"{model} learns several tasks, and there are {len(features.tasks)} named labels: name two or more, as in "
            'labels = { ctr = "click", cvr = "conv" }'
        )
    return features.tasks


class Gate(nn.Module):
    """The mean of experts by weights that are the softmax of a linear function of x: float32[n, width]."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weights = nn.Linear(width, experts, bias=False)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """Mix float32[n, width, experts]."""
        return (experts @ torch.softmax(self.weights(x), dim=1).unsqueeze(2)).squeeze(2)


class TaskTowers(nn.Module):
    """A tower for each task and a linear output on top of it; with empty ``hidden`` the output alone."""

    def __init__(self, tasks: Sequence[str], width: int, deep: Deep) -> None:
        super().__init__()
        self.tasks = tuple(tasks)
        is_deep = has_tower(deep)

        def made() -> nn.Module:
            if not is_deep:
                return nn.Linear(width, 1)
            its = tower(width, **deep)
            return nn.Sequential(its, nn.Linear(its.width, 1))

        self.towers = nn.ModuleList(made() for _ in tasks)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the logits float32[n] of each task from its input."""
        towers = zip(self.tasks, self.towers, strict=True)
        return {task: its(inputs[task]).squeeze(1) for task, its in towers}
