"""FwFM: a factorization machine in which each pair of fields has a weight.

J. Pan et al., Field-weighted Factorization Machines for Click-Through Rate Prediction in Display Advertising, WWW 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.model import Model
from shoal.torch.models.layers import Linear, Lookup, Maker, look_up


class FwFM(Model):
    """First order, and all pairs of fields' vectors by weight: logit = b + sum w_i + sum over i < j of r_ij <v_i, v_j>.

    The weights r of pairs of fields start at 1, as a factorization machine.

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``, and unless ``field_vectors`` the table ``linear`` of dim 1.
    features : Features or int
        What it reads; a number: that many categories.
    dim : int
    per_field : bool
        Whether each field has tables of its own.
    field_vectors : bool
        Whether the weight of a key is <v_i, w_F> with a vector of its field (the paper's FwFM_FiLV) instead of a number
        of its own.
    embedding_dropout : float
        Of the numbers of rows.
    """

    def __init__(
        self,
        make: Maker,
        features: Features | int,
        *,
        dim: int = 16,
        per_field: bool = False,
        field_vectors: bool = False,
        embedding_dropout: float = 0.0,
    ) -> None:
        super().__init__(features)
        self.refuse_dense()
        self.weights = (
            None if field_vectors else Lookup(make, "linear", self.features, 1, per_field=per_field, own_dims=False)
        )
        self.embedding = Lookup(make, "embedding", self.features, dim, per_field=per_field, dropout=embedding_dropout)
        count = self.embedding.count
        self.linear = Linear()
        self.fields = nn.Parameter(torch.zeros(count, dim)) if field_vectors else None
        self.pairs = nn.Parameter(torch.ones(count, count))  # above the diagonal

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        lookups = [self.embedding] if self.weights is None else [self.embedding, self.weights]
        rows, *weights = look_up(x, *lookups)
        order = weights[0].fields if self.fields is None else rows.fields * self.fields
        others = self.pairs.triu(1) @ rows.fields  # of each field the sum of the later ones, by weight
        return self.linear(order) + (rows.fields * others).sum(dim=(1, 2))
