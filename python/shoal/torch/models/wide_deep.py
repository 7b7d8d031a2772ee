"""Wide & Deep: logistic regression, which memorizes, and a tower over embeddings, which generalizes.

H.-T. Cheng et al., Wide & Deep Learning for Recommender Systems, DLRS 2016.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.model import Model
from shoal.torch.models.layers import Deep, Linear, Lookup, Maker, flat, look_up, tower


class WideAndDeep(Model):
    """The sum of two logits: of a weight for each key, and of a tower over the keys' vectors, concatenated.

    The paper's wide part has products of some fields; here the reader makes such fields.

    Parameters
    ----------
    make : Maker
        Makes the tables ``linear`` of dim 1 and ``embedding`` of dim ``dim``.
    features : Features or int
        What it reads; a number: that many categories.
    dim : int
    per_field : bool
        Whether each field has tables of its own.
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
        embedding_dropout: float = 0.0,
        **deep: Unpack[Deep],
    ) -> None:
        super().__init__(features)
        self.weights = Lookup(make, "linear", self.features, 1, per_field=per_field, own_dims=False)
        self.embedding = Lookup(make, "embedding", self.features, dim, per_field=per_field, dropout=embedding_dropout)
        self.linear = Linear()
        self.tower = tower(self.embedding.count * dim + self.features.dense_width, **deep)
        self.deep = nn.Linear(self.tower.width, 1, bias=False)  # the linear part has the bias

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        weights, rows = look_up(x, self.weights, self.embedding)
        return self.linear(weights.fields) + self.deep(self.tower(flat(rows.fields, x.dense))).squeeze(1)
