"""DCN-V2: cross layers, each of which raises the degree of the interactions by one, and a tower.

R. Wang et al., DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems,
WWW 2021.
"""

from __future__ import annotations

from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.model import Model
from shoal.torch.models.layers import Deep, Lookup, Maker, count_of, flat, look_up, tower, width_of


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


class Mixture(nn.Module):
    """Cross layers of experts of low rank: x_(l+1) = sum over i of g_i x_0 * (U_i tanh(C_i tanh(V_i x_l)) + b) + x_l.

    The gates g are the softmax of a linear function of x_l (equations 3 and 4 of section 3.3).
    """

    def __init__(self, width: int, layers: int, rank: int, experts: int) -> None:
        super().__init__()

        def expert() -> nn.Module:
            return nn.Sequential(
                nn.Linear(width, rank, bias=False),
                nn.Tanh(),
                nn.Linear(rank, rank, bias=False),
                nn.Tanh(),
                nn.Linear(rank, width),
            )

        self.experts = nn.ModuleList(nn.ModuleList(expert() for _ in range(experts)) for _ in range(layers))
        self.gates = nn.ModuleList(nn.Linear(width, experts, bias=False) for _ in range(layers))

    def forward(self, first: Tensor) -> Tensor:
        """Cross float32[n, width] with itself."""
        x = first
        for experts, gate in zip(self.experts, self.gates, strict=True):
            outs = torch.stack([expert(x) for expert in experts], dim=2)  # type: ignore[attr-defined]
            x = first * (outs @ torch.softmax(gate(x), dim=1).unsqueeze(2)).squeeze(2) + x
        return x


class DCNV2(Model):
    """Cross layers and a tower over the keys' vectors, stacked or in parallel.

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``.
    features : Features or int
        What it reads; a number: that many categories.
    dim : int
    per_field : bool
        Whether each field has a table of its own.
    cross : int
        Cross layers.
    rank : int or None
        Rank of their matrices; None: full.
    experts : int
        Experts of each cross layer, which a gate mixes; more than one need a rank.
    structure : {"stacked", "parallel"}
        Whether the input of the tower is the output of the cross layers, or their input.
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
        per_field: bool = False,
        cross: int = 3,
        rank: int | None = None,
        experts: int = 1,
        structure: Literal["stacked", "parallel"] = "stacked",
        embedding_dropout: float = 0.0,
        **deep: Unpack[Deep],
    ) -> None:
        super().__init__(features)
        if structure not in ("stacked", "parallel"):
            raise ValueError(f"structure is {structure!r}: pass 'stacked' or 'parallel'")
        cross, experts = count_of("cross", cross, 0), count_of("experts", experts)
        rank = None if rank is None else width_of("rank", rank)
        if experts > 1 and rank is None:
            raise ValueError(f"experts is {experts}, and a mixture is of low rank: pass rank as well")
        self.stacked = structure == "stacked"
        self.embedding = Lookup(make, "embedding", self.features, dim, per_field=per_field, dropout=embedding_dropout)
        width = self.embedding.count * dim + self.features.dense_width
        self.cross = Cross(width, cross, rank) if experts == 1 or rank is None else Mixture(width, cross, rank, experts)
        self.tower = tower(width, **deep)
        self.last = nn.Linear(self.tower.width if self.stacked else self.tower.width + width, 1)

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        (rows,) = look_up(x, self.embedding)
        first = flat(rows.fields, x.dense)
        crossed = self.cross(first)
        deep = self.tower(crossed if self.stacked else first)
        return self.last(deep if self.stacked else torch.cat([crossed, deep], dim=1)).squeeze(1)
