"""DIN: attention over a user's sequences, whose weights depend on the candidate item.

G. Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.model import Model
from shoal.torch.models.layers import (
    Deep,
    ItemRows,
    Lookup,
    Maker,
    compared,
    flat,
    look_up,
    softmax_of,
    tower,
    widths_of,
)


class Interest(nn.Module):
    """The sum of a sequence's vectors, each times a weight that it has for the item: float32[n, width].

    The weight is the output of a small tower for (h, i, h - i, h * i), h being a vector of the sequence and i the
    item's; of h the last two have the numbers that i has as well. By default it is not normalized over the sequence
    (section 4.3), so that many similar items mean strong interest; with ``softmax`` the weights of an example add up
    to 1. An item with the weight w counts as w items.
    """

    def __init__(self, dim: int, width: int, target: Sequence[int], hidden: Sequence[int], *, softmax: bool) -> None:
        super().__init__()
        self.softmax = softmax
        self.target = list(target)  # the fixed field of each part of h, -1: none
        self.dim = dim
        at_hand = sum(field >= 0 for field in target) * dim
        self.tower = nn.Sequential(score := tower(width + 3 * at_hand, hidden), nn.Linear(score.width, 1))

    def forward(self, fields: Tensor, history: ItemRows) -> Tensor:
        """Pool a sequence, by the items among the rows of the fixed fields, float32[n, fields, dim]."""
        rows, example = history.rows, history.items.example
        item = torch.cat([fields[:, field] for field in self.target if field >= 0], dim=1)[example]
        parts = torch.split(rows, self.dim, dim=1)
        same = torch.cat([part for part, field in zip(parts, self.target, strict=False) if field >= 0], dim=1)
        weights = self.tower(torch.cat([rows, item, same - item, same * item], dim=1))
        if self.softmax:
            weights = softmax_of(weights.squeeze(1), example, fields.shape[0]).unsqueeze(1)
        if history.items.weights is not None:
            weights = weights * history.items.weights.unsqueeze(1)
        return rows.new_zeros(fields.shape[0], rows.shape[1]).index_add(0, example, weights * rows)


class DIN(Model):
    """A tower over the fields' vectors and the interests that the sequences imply.

    A sequence's items have their rows in the item's table: ``share`` names the item's field, and that of a side column
    its own (`shoal.torch.Features`). If an example has no items, its interest is 0.

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``.
    features : Features
        What it reads, with one sequence or more.
    dim : int
    attention : sequence of int
        Widths of the layers of the tower that weighs the items.
    softmax : bool
        Whether the weights of an example's items are normalized.
    per_field : bool
        Whether each field has a table of its own.
    embedding_dropout : float
        Of the numbers of rows.
    **deep
        Settings of the tower: see `Deep`.
    """

    def __init__(
        self,
        make: Maker,
        features: Features | int,
        *,
        dim: int = 16,
        attention: Sequence[int] = (80, 40),
        softmax: bool = False,
        per_field: bool = False,
        embedding_dropout: float = 0.0,
        **deep: Unpack[Deep],
    ) -> None:
        super().__init__(features)
        attention = widths_of("attention", attention)
        self.embedding = Lookup(
            make,
            "embedding",
            self.features,
            dim,
            per_field=per_field,
            pools_sequences=False,
            dropout=embedding_dropout,
        )
        sequences = compared(self.embedding, "DIN")
        widths = [self.embedding.width(one.name) for one in sequences]
        self.interests = nn.ModuleList(
            Interest(dim, width, self.embedding.target(one.name), attention, softmax=softmax)
            for one, width in zip(sequences, widths, strict=True)
        )
        self.tower = tower(sum(widths) + self.embedding.count * dim + self.features.dense_width, **deep)
        self.last = nn.Linear(self.tower.width, 1)

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        (rows,) = look_up(x, self.embedding)
        histories = rows.sequences.values()
        interests = [
            interest(rows.fields, history) for interest, history in zip(self.interests, histories, strict=True)
        ]
        return self.last(self.tower(torch.cat([*interests, flat(rows.fields, x.dense)], dim=1))).squeeze(1)
