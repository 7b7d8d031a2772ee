"""Logistic regression over the fields' keys, the baseline of all other models.

H. B. McMahan et al., Ad Click Prediction: a View from the Trenches, KDD 2013.
"""

from __future__ import annotations

from torch import Tensor

from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.model import Model
from shoal.torch.models.layers import Linear, Lookup, Maker, look_up


class LR(Model):
    """A weight for each key: logit = b + sum of w_i x_i.

    Parameters
    ----------
    make : Maker
        Makes the table ``linear`` of dim 1.
    features : Features or int
        What it reads; a number: that many categories.
    per_field : bool
        Whether each field has a table of its own.
    """

    def __init__(self, make: Maker, features: Features | int, *, per_field: bool = False) -> None:
        super().__init__(features)
        self.refuse_dense()
        self.weights = Lookup(make, "linear", self.features, 1, per_field=per_field, own_dims=False)
        self.linear = Linear()

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        (weights,) = look_up(x, self.weights)
        return self.linear(weights.fields)
