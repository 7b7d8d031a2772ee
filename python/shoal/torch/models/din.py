"""DIN: attention over a user's history, whose weights depend on the candidate item.

G. Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.torch.fields import Inputs
from shoal.torch.models.layers import Lookup, Maker, flat, pull, tower


class Interest(nn.Module):
    """The sum of a history's vectors, each times a weight that it has for the item: float32[n, dim].

    The weight is the output of a small tower for (h, i, h - i, h * i), h being a vector of the history and i the
    item's. It is not normalized over the history (section 4.3), so that many similar items mean strong interest.
    """

    def __init__(self, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.tower = nn.Sequential(tower(4 * dim, hidden), nn.Linear(hidden[-1], 1))

    def forward(self, item: Tensor, history: Tensor, offsets: Tensor, values: Tensor | None = None) -> Tensor:
        """Pool a jagged history, float32[nnz, dim] with int64[n + 1], by the items, float32[n, dim].

        An event with a value v, of float32[nnz], counts as v events.
        """
        example = torch.repeat_interleave(offsets.diff(), output_size=history.shape[0])
        at_hand = item[example]
        weights = self.tower(torch.cat([history, at_hand, history - at_hand, history * at_hand], dim=1))
        if values is not None:
            weights = weights * values.unsqueeze(1)
        return torch.zeros_like(item).index_add(0, example, weights * history)


class DIN(nn.Module):
    """A tower over the fields' vectors and the interest in the item that the history implies.

    The history's keys have their rows in the item's table: the reader hashes them in the item's field
    (`shoal.torch.Fields`). If an example has no history, its interest is 0.

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``.
    fields : int
    item : int
        Index of the item's field, from 0.
    dim : int
    hidden : sequence of int
        Widths of the tower's layers.
    attention : sequence of int
        Widths of the layers of the tower that weighs the history.
    per_field : bool
        Whether each field has a table of its own.
    dense : int
        Dense columns, which enter the tower.
    dropout : float
    """

    def __init__(
        self,
        make: Maker,
        fields: int,
        *,
        item: int = 0,
        dim: int = 16,
        hidden: Sequence[int] = (400, 400, 400),
        attention: Sequence[int] = (80, 40),
        per_field: bool = False,
        dense: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not 0 <= item < fields:
            raise ValueError(f"item is {item}: pass the number of one of {fields} fields, 0 to {fields - 1}")
        self.item = item
        self.embedding = Lookup(make, "embedding", fields, dim, per_field=per_field)
        self.interest = Interest(dim, attention)
        self.tower = tower((fields + 1) * dim + dense, hidden, dropout=dropout)
        self.last = nn.Linear(hidden[-1], 1)

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        if x.history is None:
            raise ValueError("DIN needs a history: pass Inputs with history=(keys, offsets)")
        keys, offsets = x.history
        *found, history = pull([*self.embedding.asked(x.keys), (self.embedding.table_of(self.item), keys)])
        rows = self.embedding.answered(found)
        interest = self.interest(rows[:, self.item], history, offsets, x.history_values)
        if x.values is not None:
            rows = rows * x.values.unsqueeze(-1)
        return self.last(self.tower(torch.cat([interest, flat(rows, x.dense)], dim=1))).squeeze(1)
