"""DLRM: a bottom tower over dense columns, dot products of all pairs of vectors, a top tower.

M. Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, arXiv:1906.00091,
2019.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.torch.fields import Inputs
from shoal.torch.models.layers import Lookup, Maker, look_up, tower


def dots(vectors: Tensor) -> Tensor:
    """Compute the products of all pairs (1, 0), (2, 0), (2, 1), ..: float32[n, f (f - 1) / 2] of float32[n, f, dim]."""
    products = vectors @ vectors.transpose(1, 2)
    row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1, device=vectors.device)
    return products[:, row, column]


class DLRM(nn.Module):
    """Dot products of all pairs of vectors: those of the keys, and the bottom tower's output for the dense columns.

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``.
    fields : int
    dim : int
    hidden : sequence of int
        Widths of the top tower's layers.
    per_field : bool
        Whether each field has a table of its own, as in the paper.
    dense : int
        Dense columns; without any there is no bottom tower.
    bottom : sequence of int
        Widths of the bottom tower's layers; a last one of width ``dim`` is appended.
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
        bottom: Sequence[int] = (64,),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = Lookup(make, "embedding", fields, dim, per_field=per_field)
        self.bottom = tower(dense, [*bottom, dim]) if dense else None
        vectors = fields + bool(dense)
        width = vectors * (vectors - 1) // 2 + (dim if dense else 0)
        self.tower = tower(width, hidden, dropout=dropout)
        self.last = nn.Linear(hidden[-1], 1)

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        (rows,) = look_up(x, self.embedding)
        if self.bottom is None:
            out = dots(rows)
        else:
            dense = self.bottom(x.dense)
            out = torch.cat([dense, dots(torch.cat([dense.unsqueeze(1), rows], dim=1))], dim=1)
        return self.last(self.tower(out)).squeeze(1)
