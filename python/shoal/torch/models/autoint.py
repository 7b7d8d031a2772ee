"""AutoInt: fields attend to each other, in several layers of several heads.

W. Song et al., AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks, CIKM 2019.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.model import Model
from shoal.torch.models.layers import Deep, Linear, Lookup, Maker, count_of, flat, has_tower, look_up, tower, width_of


class Attention(nn.Module):
    """One interacting layer: ReLU(the heads' sums side by side + W_res e), float32[n, f, width] of [n, f, dim].

    A head's weight of field k for field m is the softmax over k of <W_query e_m, W_key e_k> (equations 5 to 8), divided
    by the root of the head's width if ``scale``.
    """

    def __init__(self, dim: int, width: int, heads: int, *, scale: bool) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"width is {width}, which {heads} heads cannot share: pass a multiple of heads")
        self.heads = heads
        self.scale = (width // heads) ** -0.5 if scale else 1.0
        self.query = nn.Linear(dim, width, bias=False)
        self.key = nn.Linear(dim, width, bias=False)
        self.value = nn.Linear(dim, width, bias=False)
        self.residual = nn.Linear(dim, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the attention of each field to all fields."""
        query, key, value = (
            layer(rows).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3)
        weights = torch.softmax(scores if self.scale == 1.0 else scores * self.scale, dim=3)
        seen = (weights @ value).transpose(1, 2).flatten(start_dim=2)
        return torch.relu(seen + self.residual(rows))


class AutoInt(Model):
    """Layers of attention over the keys' vectors; with ``hidden`` also a tower (the paper's AutoInt+).

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``, and with ``wide`` the table ``linear`` of dim 1.
    features : Features or int
        What it reads; a number: that many categories.
    dim : int
    per_field : bool
        Whether each field has tables of its own.
    layers, heads, width : int
        Interacting layers, heads of each, and numbers of output for each field.
    scale : bool
        Whether the products of queries and keys are divided by the root of a head's width.
    wide : bool
        Whether there is a weight for each key besides.
    embedding_dropout : float
        Of the numbers of rows.
    **deep
        Settings of the tower: see `Deep`. An empty ``hidden``: no tower.
    """

    def __init__(
        self,
        make: Maker,
        features: Features | int,
        *,
        dim: int = 16,
        per_field: bool = False,
        layers: int = 3,
        heads: int = 2,
        width: int = 32,
        scale: bool = False,
        wide: bool = False,
        embedding_dropout: float = 0.0,
        **deep: Unpack[Deep],
    ) -> None:
        super().__init__(features)
        layers, heads, width = count_of("layers", layers, 0), count_of("heads", heads), width_of("width", width)
        dense, is_deep = self.features.dense_width, has_tower(deep)
        if dense and not is_deep:
            raise ValueError(f"{dense} dense columns enter the tower, and there is none: pass hidden, or no numbers")
        self.weights = Lookup(make, "linear", self.features, 1, per_field=per_field, own_dims=False) if wide else None
        self.embedding = Lookup(make, "embedding", self.features, dim, per_field=per_field, dropout=embedding_dropout)
        self.linear = Linear() if wide else None
        self.attention = nn.Sequential(
            *(Attention(width if i else dim, width, heads, scale=scale) for i in range(layers))
        )
        self.last = nn.Linear(self.embedding.count * (width if layers else dim), 1)
        self.tower = tower(self.embedding.count * dim + dense, **deep) if is_deep else None
        self.deep = None if self.tower is None else nn.Linear(self.tower.width, 1, bias=False)

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        lookups = [self.embedding] if self.weights is None else [self.embedding, self.weights]
        rows, *weights = look_up(x, *lookups)
        out = self.last(self.attention(rows.fields).flatten(start_dim=1)).squeeze(1)
        if self.linear is not None:
            out = out + self.linear(weights[0].fields)
        if self.tower is None or self.deep is None:
            return out
        return out + self.deep(self.tower(flat(rows.fields, x.dense))).squeeze(1)
