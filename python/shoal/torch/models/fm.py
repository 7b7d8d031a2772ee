"""Factorization machine of second order.

S. Rendle, Factorization Machines, ICDM 2010.
"""

from __future__ import annotations

from torch import Tensor

from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.model import Model
from shoal.torch.models.layers import Linear, Lookup, Maker, look_up, pairs


class FM(Model):
    """A weight and a vector for each key: logit = b + sum of w_i x_i + sum over pairs of <v_i, v_j> x_i x_j.

    Parameters
    ----------
    make : Maker
        Makes the tables ``linear`` of dim 1 and ``embedding`` of dim ``dim``.
    features : Features or int
        What it reads; a number: that many categories.
    dim : int
    per_field : bool
        Whether each field has tables of its own.
    """

    def __init__(self, make: Maker, features: Features | int, *, dim: int = 16, per_field: bool = False) -> None:
        super().__init__(features)
        self.refuse_dense()
        self.weights = Lookup(make, "linear", self.features, 1, per_field=per_field, own_dims=False)
        self.factors = Lookup(make, "embedding", self.features, dim, per_field=per_field)
        self.linear = Linear()

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        weights, factors = look_up(x, self.weights, self.factors)
        return self.linear(weights.fields) + pairs(factors.fields)
