"""DeepFM: a factorization machine and a tower that share their embeddings.

H. Guo et al., DeepFM: A Factorization-Machine based Neural Network for CTR Prediction, IJCAI 2017.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from shoal.torch.fields import Inputs
from shoal.torch.models.layers import Linear, Lookup, Maker, flat, look_up, pairs, tower


class DeepFM(nn.Module):
    """The sum of three logits: first order, all pairs, and a tower over the same vectors, concatenated.

    Parameters
    ----------
    make : Maker
        Makes the tables ``linear`` of dim 1 and ``embedding`` of dim ``dim``.
    fields : int
    dim : int
    hidden : sequence of int
        Widths of the tower's layers.
    per_field : bool
        Whether each field has tables of its own.
    dense : int
        Dense columns, which enter the tower.
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
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.weights = Lookup(make, "linear", fields, 1, per_field=per_field)
        self.embedding = Lookup(make, "embedding", fields, dim, per_field=per_field)
        self.linear = Linear()
        self.tower = tower(fields * dim + dense, hidden, dropout=dropout)
        self.deep = nn.Linear(hidden[-1], 1, bias=False)  # the linear part has the bias

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        weights, rows = look_up(x, self.weights, self.embedding)
        deep = self.deep(self.tower(flat(rows, x.dense))).squeeze(1)
        return self.linear(weights) + pairs(rows) + deep
