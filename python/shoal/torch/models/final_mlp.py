"""FinalMLP: two towers over differently gated features, whose outputs meet in a bilinear form.

K. Mao et al., FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction, AAAI 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack, cast

import torch
from torch import Tensor, nn

from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.model import Model
from shoal.torch.models.layers import Deep, Lookup, Maker, count_of, flat, look_up, tower, widths_of


class FeatureGate(nn.Module):
    """A factor between 0 and 2 for each number of an example: 2 sigmoid(tower(context)) (equations 5 and 6).

    The context is the vectors of some fields, or a vector that is learned.
    """

    def __init__(self, places: Sequence[int], dim: int, width: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.places = list(places)
        self.context = None if places else nn.Parameter(torch.zeros(1, dim))
        before = dim * max(1, len(places))
        layers = [tower(before, hidden)] if hidden else []
        self.gate = nn.Sequential(*layers, nn.Linear(hidden[-1] if hidden else before, width))

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the factors from the vectors float32[n, count, dim]; one line, if the context is of no field."""
        fields = [rows[:, place] for place in self.places]
        context = torch.cat(fields, dim=1) if self.context is None else self.context
        return 2 * torch.sigmoid(self.gate(context))


class Fusion(nn.Module):
    """b + <w_1, o_1> + <w_2, o_2> + sum over heads h of o_1h W_h o_2h, float32[n] (equation 11)."""

    def __init__(self, first: int, second: int, heads: int) -> None:
        super().__init__()
        self.first = nn.Linear(first, 1)
        self.second = nn.Linear(second, 1, bias=False)
        self.between = nn.Parameter(torch.empty(heads, first // heads, second // heads))
        for matrix in self.between.data:
            nn.init.xavier_normal_(matrix)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Join the outputs of two towers."""
        heads, width, other_width = self.between.shape
        one = first.reshape(-1, heads, width).transpose(0, 1)
        other = second.reshape(-1, heads, other_width).transpose(0, 1)
        crossed = ((one @ self.between) * other).sum(dim=(0, 2))
        return (self.first(first) + self.second(second)).squeeze(1) + crossed


class FinalMLP(Model):
    """Two towers over the keys' vectors, each times a gate of its own, and a bilinear fusion of their outputs.

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``.
    features : Features or int
        What it reads; a number: that many categories.
    dim : int
    per_field : bool
        Whether each field has a table of its own.
    hidden_2 : sequence of int, optional
        Widths of the layers of the second tower; default: those of the first, ``hidden``.
    heads : int
        Parts that the outputs of the towers are cut into.
    gates : bool
        Whether the features are gated.
    gate_hidden : sequence of int
        Widths of the layers of the gates' towers.
    context, context_2 : sequence of str
        The features, with one key each, whose vectors the gate of the first or second tower depends on, such as those
        of users for the one and of items for the other; default: none, the gate is the same for all examples.
    embedding_dropout : float
        Of the numbers of rows.
    **deep
        Settings of the towers: see `Deep`.
    """

    def __init__(
        self,
        make: Maker,
        features: Features | int,
        *,
        dim: int = 16,
        per_field: bool = False,
        hidden_2: Sequence[int] | None = None,
        heads: int = 1,
        gates: bool = True,
        gate_hidden: Sequence[int] = (),
        context: Sequence[str] = (),
        context_2: Sequence[str] = (),
        embedding_dropout: float = 0.0,
        **deep: Unpack[Deep],
    ) -> None:
        super().__init__(features)
        heads, gate_hidden = count_of("heads", heads), widths_of("gate_hidden", gate_hidden)
        if (context or context_2) and not gates:
            raise ValueError("context is of gates, and gates is false: leave one of them out")
        self.embedding = Lookup(make, "embedding", self.features, dim, per_field=per_field, dropout=embedding_dropout)
        width = self.embedding.count * dim + self.features.dense_width
        contexts = [[self.features.index_of(name) for name in names] for names in (context, context_2)]
        self.gates = nn.ModuleList(FeatureGate(its, dim, width, gate_hidden) for its in contexts if gates)
        second = deep if hidden_2 is None else cast("Deep", {**deep, "hidden": widths_of("hidden_2", hidden_2)})
        self.first, self.second = tower(width, **deep), tower(width, **second)
        if self.first.width % heads or self.second.width % heads:
            raise ValueError(
                f"the last layers are {self.first.width} and {self.second.width} wide, which {heads} heads cannot "
                "share: pass multiples of heads"
            )
        self.fusion = Fusion(self.first.width, self.second.width, heads)

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        (rows,) = look_up(x, self.embedding)
        whole = flat(rows.fields, x.dense)
        first, second = [gate(rows.fields) * whole for gate in self.gates] or [whole, whole]
        return self.fusion(self.first(first), self.second(second))
