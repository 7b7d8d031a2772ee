"""DCN-V2: cross layers, each of which raises the degree of the interactions by one, and a tower.

R. Wang et al., DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems,
WWW 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from shoal.torch.fields import Inputs
from shoal.torch.models.layers import Lookup, Maker, flat, look_up, tower


class Cross(nn.Module):
    """Cross layers: x_(l+1) = x_0 * (W_l x_l + b_l) + x_l, with W_l = U_l V_l of low rank if a rank is given."""

    def __init__(self, width: int, layers: int, rank: int | None) -> None:
        super().__init__()
        self.weights = nn.ModuleList(
            nn.Linear(width, width)
            if rank is None
            else nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))
            for _ in range(layers)
        )

    def forward(self, first: Tensor) -> Tensor:
        """Cross float32[n, width] with itself."""
        x = first
        for weight in self.weights:
            x = first * weight(x) + x
        return x


class DCNV2(nn.Module):
    """Cross layers and a tower over the keys' vectors, stacked or in parallel.

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``.
    fields : int
    dim : int
    hidden : sequence of int
        Widths of the tower's layers.
    per_field : bool
        Whether each field has a table of its own.
    dense : int
        Dense columns, which are appended to the vectors.
    cross : int
        Cross layers.
    rank : int or None
        Rank of their matrices; None: full.
    structure : {"stacked", "parallel"}
        Whether the input of the tower is the output of the cross layers, or their input.
    dropout : float
    """

    def __init__(
        self,
        make: Maker,
        fields: int,
        *,
        dim: int = 16,
        hidden: Sequence[int] = (400, 400, 400),
        per_field: bool = False,
        dense: int = 0,
        cross: int = 3,
        rank: int | None = None,
        structure: Literal["stacked", "parallel"] = "stacked",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if structure not in ("stacked", "parallel"):
            raise ValueError(f"structure is {structure!r}: pass 'stacked' or 'parallel'")
        width = fields * dim + dense
        self.stacked = structure == "stacked"
        self.embedding = Lookup(make, "embedding", fields, dim, per_field=per_field)
        self.cross = Cross(width, cross, rank)
        self.tower = tower(width, hidden, dropout=dropout)
        self.last = nn.Linear(hidden[-1] if self.stacked else hidden[-1] + width, 1)

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        (rows,) = look_up(x, self.embedding)
        first = flat(rows, x.dense)
        crossed = self.cross(first)
        deep = self.tower(crossed if self.stacked else first)
        return self.last(deep if self.stacked else torch.cat([crossed, deep], dim=1)).squeeze(1)
