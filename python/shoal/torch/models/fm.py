"""Factorization machine of second order.

S. Rendle, Factorization Machines, ICDM 2010.
"""

from __future__ import annotations

from torch import Tensor, nn

from shoal.torch.fields import Inputs
from shoal.torch.models.layers import Linear, Lookup, Maker, look_up, pairs


class FM(nn.Module):
    """A weight and a vector for each key: logit = b + sum of w_i x_i + sum over pairs of <v_i, v_j> x_i x_j.

    Parameters
    ----------
    make : Maker
        Makes the tables ``linear`` of dim 1 and ``embedding`` of dim ``dim``.
    fields : int
    dim : int
    per_field : bool
        Whether each field has tables of its own.
    """

    def __init__(self, make: Maker, fields: int, *, dim: int = 16, per_field: bool = False) -> None:
        super().__init__()
        self.weights = Lookup(make, "linear", fields, 1, per_field=per_field)
        self.factors = Lookup(make, "embedding", fields, dim, per_field=per_field)
        self.linear = Linear()

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        weights, factors = look_up(x, self.weights, self.factors)
        return self.linear(weights) + pairs(factors)
