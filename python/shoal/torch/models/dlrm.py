"""DLRM: a bottom tower over dense columns, dot products of all pairs of vectors, a top tower.

M. Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, arXiv:1906.00091,
2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.model import Model
from shoal.torch.models.layers import Deep, Lookup, Maker, look_up, tower, widths_of


def dots(vectors: Tensor) -> Tensor:
    """Compute the products of all pairs (1, 0), (2, 0), (2, 1), ..: float32[n, f (f - 1) / 2] of float32[n, f, dim]."""
    products = vectors @ vectors.transpose(1, 2)
    row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1, device=vectors.device)
    return products[:, row, column]


class DLRM(Model):
    """Dot products of all pairs of vectors: those of the keys, and the bottom tower's output for the dense columns.

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``.
    features : Features or int
        What it reads; a number: that many categories.
    dim : int
    per_field : bool
        Whether each field has a table of its own, as in the paper.
    bottom : sequence of int
        Widths of the bottom tower's layers; a last one of width ``dim`` is appended. Without numbers there is none.
    embedding_dropout : float
        Of the numbers of rows.
    **deep
        Settings of the top tower: see `Deep`.
    """

    def __init__(
        self,
        make: Maker,
        features: Features | int,
        *,
        dim: int = 16,
        per_field: bool = False,
        bottom: Sequence[int] = (64,),
        embedding_dropout: float = 0.0,
        **deep: Unpack[Deep],
    ) -> None:
        super().__init__(features)
        bottom = widths_of("bottom", bottom)
        self.embedding = Lookup(make, "embedding", self.features, dim, per_field=per_field, dropout=embedding_dropout)
        dense = self.features.dense_width
        self.bottom = tower(dense, [*bottom, dim]) if dense else None
        vectors = self.embedding.count + bool(dense)
        width = vectors * (vectors - 1) // 2 + (dim if dense else 0)
        self.tower = tower(width, **deep)
        self.last = nn.Linear(self.tower.width, 1)

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        (rows,) = look_up(x, self.embedding)
        if self.bottom is None:
            out = dots(rows.fields)
        else:
            dense = self.bottom(x.dense)
            out = torch.cat([dense, dots(torch.cat([dense.unsqueeze(1), rows.fields], dim=1))], dim=1)
        return self.last(self.tower(out)).squeeze(1)
