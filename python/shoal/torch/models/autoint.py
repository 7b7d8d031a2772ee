"""AutoInt: fields attend to each other, in several layers of several heads.

W. Song et al., AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks, CIKM 2019.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.torch.fields import Inputs
from shoal.torch.models.layers import Lookup, Maker, flat, look_up, tower


class Attention(nn.Module):
    """One interacting layer: ReLU(the heads' sums side by side + W_res e), float32[n, f, width] of [n, f, dim].

    A head's weight of field k for field m is the softmax over k of <W_query e_m, W_key e_k> (equations 5 to 8; the
    product is not scaled).
    """

    def __init__(self, dim: int, width: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"width is {width}, which {heads} heads cannot share: pass a multiple of heads")
        self.heads = heads
        self.query = nn.Linear(dim, width, bias=False)
        self.key = nn.Linear(dim, width, bias=False)
        self.value = nn.Linear(dim, width, bias=False)
        self.residual = nn.Linear(dim, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the attention of each field to all fields."""
        query, key, value = (
            layer(rows).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        weights = torch.softmax(query @ key.transpose(2, 3), dim=3)
        seen = (weights @ value).transpose(1, 2).flatten(start_dim=2)
        return torch.relu(seen + self.residual(rows))


class AutoInt(nn.Module):
    """Layers of attention over the keys' vectors; with ``hidden`` also a tower (the paper's AutoInt+).

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``.
    fields : int
    dim : int
    hidden : sequence of int
        Widths of the tower's layers; empty: no tower.
    per_field : bool
        Whether each field has a table of its own.
    dense : int
        Dense columns, which enter the tower.
    layers, heads, width : int
        Interacting layers, heads of each, and numbers of output for each field.
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
        layers: int = 3,
        heads: int = 2,
        width: int = 32,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dense and not hidden:
            raise ValueError(f"{dense} dense columns enter the tower, and there is none: pass hidden, or no dense")
        self.embedding = Lookup(make, "embedding", fields, dim, per_field=per_field)
        self.attention = nn.Sequential(*(Attention(width if i else dim, width, heads) for i in range(layers)))
        self.last = nn.Linear(fields * (width if layers else dim), 1)
        self.tower = tower(fields * dim + dense, hidden, dropout=dropout) if hidden else None
        self.deep = nn.Linear(hidden[-1], 1, bias=False) if hidden else None

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        (rows,) = look_up(x, self.embedding)
        out = self.last(self.attention(rows).flatten(start_dim=1)).squeeze(1)
        if self.tower is None or self.deep is None:
            return out
        return out + self.deep(self.tower(flat(rows, x.dense))).squeeze(1)
