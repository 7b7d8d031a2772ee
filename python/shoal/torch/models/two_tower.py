"""Two towers: a vector of the user and one of the item, whose product is the logit, for the retrieval of items.

X. Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations, RecSys 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from shoal.base.scalars import whole
from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.losses import Loss
from shoal.torch.model import LABEL, Model
from shoal.torch.models.layers import Deep, Lookup, Maker, Vectors, look_up, positive, tower, width_of

USERS, ITEMS = "user vectors", "item vectors"  # outputs in training, which the loss is of
_DEPTH = 4
_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)  # odd


class Frequencies(nn.Module):
    """Counts of the items of a stream: a count-min sketch of four rows, as `shoal.sketches.CountMin`.

    The counters are a buffer of the module, so that a checkpoint has them, a fit that is resumed has the same bits, and
    a model needs no store of its own. A row's hash is the highest bits of the key times an odd number (Dietzfelbinger
    et al., J. Algorithms 1997).
    """

    counts: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        if not 2 <= width <= 1 << 30 or width & (width - 1):
            raise ValueError(f"counters is {width}: pass a power of two, 2 to {1 << 30}")
        self.register_buffer("counts", torch.zeros(_DEPTH, width, dtype=torch.int64))
        self._shift = 64 - (width.bit_length() - 1)

    def _places(self, keys: Tensor) -> Tensor:
        factors = torch.tensor([_signed(factor) for factor in _FACTORS]).unsqueeze(1)
        return (keys * factors >> self._shift) & (self.counts.shape[1] - 1)  # the shift is that of a signed number

    def add(self, keys: Tensor) -> None:
        """Count keys int64[n]."""
        self.counts.scatter_add_(1, self._places(keys), torch.ones(_DEPTH, len(keys), dtype=torch.int64))

    def log(self, keys: Tensor) -> Tensor:
        """Estimate the log of each key's share of all that was counted, float32[n]."""
        counts = self.counts.gather(1, self._places(keys)).amin(dim=0)
        return (counts.double() / self.counts[0].sum()).log().float()


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def sampled_softmax(scores: Tensor, log_q: Tensor, items: Tensor) -> Tensor:
    """Compute the loss of each of n pairs with the items of the others as negatives, float32[n].

    Pair i's is -s_ii + log of the sum over j of exp(s_ij), s_ij being the score of user i and item j less log Q(j), the
    log of the probability that j is in a batch (section 4). An item that is the pair's own is no negative.
    """
    corrected = scores - log_q
    same = items.unsqueeze(1) == items
    others = corrected.masked_fill(same.fill_diagonal_(False), -torch.inf)
    return others.logsumexp(dim=1) - others.diagonal()


class TwoTower(Model):
    """A tower for users and one for items, to vectors of length 1; the logit is their product over a temperature.

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``.
    features : Features
        What it reads.
    user, item : sequence of str
        The features of users and those of items, each feature in one of them. The first of ``item`` is a category that
        identifies the item.
    dim : int
    out : int
        Numbers of a vector.
    temperature : float
        Above 0: what products are divided by.
    correct : bool
        Whether scores are corrected by the items' frequencies (logQ).
    counters : int
        Counters of their estimate in each of four rows, a power of two. On a cluster those that change are sent to the
        servers in every step.
    per_field : bool
        Whether each field has a table of its own.
    embedding_dropout : float
        Of the numbers of rows.
    **deep
        Settings of the towers: see `Deep`. A linear layer with ``out`` outputs follows.

    Notes
    -----
    It learns from the examples with label 1: for each of them, that its item is among those of the other ones in the
    batch (`sampled_softmax`). Frequencies are counted among these examples, that of the batch included. Examples with
    label 0 are measured and not learned from. The logits rank items for a user; they are not log odds of a click.

    `shoal.torch.retrieval` has the vectors of all items, and recall.
    """

    def __init__(
        self,
        make: Maker,
        features: Features | int,
        *,
        user: Sequence[str] = (),
        item: Sequence[str] = (),
        dim: int = 16,
        out: int = 32,
        temperature: float = 0.1,
        correct: bool = True,
        counters: int = 1 << 14,
        per_field: bool = False,
        embedding_dropout: float = 0.0,
        **deep: Unpack[Deep],
    ) -> None:
        super().__init__(features)
        out, counters = width_of("out", out), whole("counters", counters, 1)
        temperature = positive("temperature", temperature)
        self._check(user, item)
        self.out, self.temperature, self.correct = out, temperature, correct
        self.embedding = Lookup(make, "embedding", self.features, dim, per_field=per_field, dropout=embedding_dropout)
        self.identity = self.features.index_of(item[0])
        self.user, self.item = Side(self.embedding, user, out, deep), Side(self.embedding, item, out, deep)
        self.frequencies = Frequencies(counters)

    def _check(self, user: Sequence[str], item: Sequence[str]) -> None:
        for name, given in (("user", user), ("item", item)):
            if not given:
                raise ValueError(f"{name} is empty: name the features of the {name}s")
        named, known = [*user, *item], [one.name for one in self.features.all]
        if sorted(named) != sorted(known):
            wrong = [name for name in dict.fromkeys([*named, *known]) if named.count(name) != known.count(name)]
            raise ValueError(
                f"user and item name {', '.join(map(repr, wrong))} wrongly: each feature is in one of them, and there "
                f"are {', '.join(known)}"
            )

    def forward(self, x: Inputs) -> Tensor | dict[str, Tensor]:
        """Compute the logits float32[n]; in training also the vectors of both towers, which the loss is of."""
        (rows,) = look_up(x, self.embedding)
        users, items = self.user(rows, x.dense), self.item(rows, x.dense)
        logits = (users * items).sum(dim=1) / self.temperature
        first, *_ = self.features.tasks or (LABEL,)
        return {first: logits, USERS: users, ITEMS: items} if self.training else logits

    def user_vectors(self, x: Inputs) -> Tensor:
        """Compute the vectors of the examples' users, float32[n, out]."""
        (rows,) = look_up(x, self.embedding)
        return self.user(rows, x.dense)

    def item_vectors(self, x: Inputs) -> Tensor:
        """Compute the vectors of the examples' items, float32[n, out]."""
        (rows,) = look_up(x, self.embedding)
        return self.item(rows, x.dense)

    def loss(
        self,
        outputs: Mapping[str, Tensor],
        x: Inputs,
        labels: Mapping[str, Tensor],
        weights: Tensor | None,
        losses: Mapping[str, Loss],
    ) -> Tensor:
        """Compute the sum of `sampled_softmax` over the examples with label 1, over the number of all."""
        clicked = next(iter(labels.values())) == 1
        items = x.keys[clicked, self.identity]
        self.frequencies.add(items)
        users, vectors = outputs[USERS][clicked], outputs[ITEMS][clicked]
        scores = users @ vectors.T / self.temperature
        log_q = self.frequencies.log(items) if self.correct else scores.new_zeros(len(items))
        each = sampled_softmax(scores, log_q, items)
        return (each if weights is None else each * weights[clicked]).sum() / len(clicked)


class Side(nn.Module):
    """The tower of users or of items: their features, by name, to vectors of length 1."""

    def __init__(self, lookup: Lookup, names: Sequence[str], out: int, deep: Deep) -> None:
        super().__init__()
        features = lookup.features
        self.places = [place for name in names for place in lookup.places_of(name)]
        self.columns: list[int] = []
        begin = 0
        for one in features.dense:
            end = begin + (one.size or 1)
            self.columns += range(begin, end) if one.name in names else []
            begin = end
        self.tower = tower(len(self.places) * lookup.dim + len(self.columns), **deep)
        self.last = nn.Linear(self.tower.width, out)

    def forward(self, rows: Vectors, dense: Tensor | None) -> Tensor:
        """Compute float32[n, out]."""
        parts = [rows.fields[:, place] for place in self.places]
        if self.columns and dense is not None:
            parts.append(dense[:, self.columns])
        return nn.functional.normalize(self.last(self.tower(torch.cat(parts, dim=1))), dim=1)
