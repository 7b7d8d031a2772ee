"""ESMM: conversion after a click, learned from all impressions, through the probability of both.

X. Ma et al., Entire Space Multi-Task Model: An Effective Approach for Estimating Post-Click Conversion Rate, SIGIR
2018.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor

from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.losses import OF_NUMBERS, Loss, name_of
from shoal.torch.model import Model, loss_of_tasks
from shoal.torch.models.layers import Deep, Lookup, Maker, flat, look_up
from shoal.torch.models.tasks import TaskTowers, tasks_of

CTCVR = "ctcvr"  # the output beside those of the tasks


def both(first: Tensor, second: Tensor) -> Tensor:
    """Compute the logit of the product of two probabilities from their logits a and b.

    p / (1 - p) with p = sigmoid(a) sigmoid(b) is 1 / (exp(-a) + exp(-b) + exp(-a - b)): nothing cancels.
    """
    return -torch.logsumexp(torch.stack([-first, -second, -first - second]), dim=0)


class ESMM(Model):
    """A tower for clicks and one for conversions over the same vectors; pCTCVR = pCTR pCVR.

    The first label is the click, the second the conversion. The output of the second task is the conversion of an
    example that is clicked; ``ctcvr`` is the output of click and conversion, which the model predicts but has no label
    for. Further tasks have towers of their own.

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``.
    features : Features
        What it reads, with two labels or more.
    dim : int
    per_field : bool
        Whether each field has a table of its own.
    embedding_dropout : float
        Of the numbers of rows.
    **deep
        Settings of the towers: see `Deep`.

    Notes
    -----
    The loss of the conversion is that of ``ctcvr`` and of click times conversion, over all examples (equation 5): where
    there is no click it is that of label 0, whatever the conversion's cell. A click whose conversion is missing does
    not count for it. A ``mask`` counts when the conversion is measured, and not in the loss.
    """

    def __init__(
        self,
        make: Maker,
        features: Features | int,
        *,
        dim: int = 16,
        per_field: bool = False,
        embedding_dropout: float = 0.0,
        **deep: Unpack[Deep],
    ) -> None:
        super().__init__(features)
        tasks = tasks_of(self.features, "ESMM")
        if CTCVR in tasks:
            raise ValueError(f"a label is named {CTCVR!r}, as ESMM's output of click and conversion: name it otherwise")
        if (loss := name_of(self.features.labels[tasks[1]].loss)) in OF_NUMBERS:
            raise ValueError(f"the loss of label {tasks[1]!r} is {loss!r}, and a conversion is 0 or 1: put it behind")
        self.embedding = Lookup(make, "embedding", self.features, dim, per_field=per_field, dropout=embedding_dropout)
        width = self.embedding.count * dim + self.features.dense_width
        self.towers = TaskTowers(tasks, width, deep)

    def forward(self, x: Inputs) -> dict[str, Tensor]:
        """Compute the logits float32[n] of each task, and of click and conversion."""
        (rows,) = look_up(x, self.embedding)
        wide = flat(rows.fields, x.dense)
        tasks = self.towers.tasks
        outputs = self.towers(dict.fromkeys(tasks, wide))
        return {**outputs, CTCVR: both(outputs[tasks[0]], outputs[tasks[1]])}

    def loss(
        self,
        outputs: Mapping[str, Tensor],
        x: Inputs,
        labels: Mapping[str, Tensor],
        weights: Tensor | None,
        losses: Mapping[str, Loss],
    ) -> Tensor:
        """Compute the sum of the losses of the click, of click and conversion, and of further tasks."""
        click, conversion, *_ = self.towers.tasks
        others = {name: one for name, one in outputs.items() if name != conversion}
        clicked, converted = labels[click] == 1, labels[conversion]
        known = ~(clicked & torch.isnan(converted))
        label = torch.where(clicked & known, converted, 0.0)
        counted = known.to(label.dtype) if weights is None else weights * known
        both_loss = losses[conversion](outputs[CTCVR], label, counted)
        rest = loss_of_tasks(self.features, others, labels, weights, losses)
        return rest + self.features.labels[conversion].weight * both_loss
