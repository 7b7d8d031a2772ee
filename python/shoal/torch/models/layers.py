"""The building blocks of models: looked-up rows, towers, first-order terms, interactions of second order.

A *maker* creates, for a name and a dim, a module that maps keys int64[...] to rows float32[..., dim]. Models use their
sparse parts only by this interface, so the same model runs on a store's tables (`shoal.torch.tables`) and on
``torch.nn.Embedding``.

    shared       one table NAME for all fields: keys carry their field already, as readers hash (field, token)
    per field    a table NAME-0, NAME-1, ... for each field

Threads: as torch's modules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from shoal.base.scalars import plain, whole
from shoal.base.settings import check_names
from shoal.config import Feature
from shoal.models.features import Features, sides_of
from shoal.torch.activations import Activation, BatchNorm
from shoal.torch.activations import activation as make_activation
from shoal.torch.inputs import Inputs, Items
from shoal.torch.sparse import SparseModule, pull_together

Maker = Callable[[str, int], nn.Module]
_MOST_LAYERS, _MOST_WIDTH = 1 << 10, 1 << 24
WeightInit = Literal["xavier_normal", "xavier_uniform", "kaiming_normal"]


class ItemRows(NamedTuple):
    """The rows of a sequence, jagged: of each item its own, those of its side columns, and their numbers.

    They are not multiplied by the items' weights, which `Items` has.

    Attributes
    ----------
    rows : float32[nnz, width]
    items : Items
    target : tuple of int
        The fixed fields whose rows the item's and its sides' are, -1 where there is none: what an attention compares.
    """

    rows: Tensor
    items: Items
    target: tuple[int, ...]


class Vectors(NamedTuple):
    """The rows of a batch.

    Attributes
    ----------
    fields : float32[n, count, dim]
        Of the fixed fields, then of the lists, pooled, then of the sequences, if they are pooled.
    sequences : dict of ItemRows
        If they are not.
    """

    fields: Tensor
    sequences: Mapping[str, ItemRows]


class Source(NamedTuple):
    """Keys that a lookup asks one table for.

    Attributes
    ----------
    table : nn.Module
    fields : tuple of int
        The fixed fields whose keys they are.
    items : str or None
        Or else the list or sequence whose items are.
    side : str or None
        Or the side column of these items.
    """

    table: nn.Module
    fields: tuple[int, ...]
    items: str | None = None
    side: str | None = None


class Lookup(nn.Module):
    """Rows of features: one vector of each, from one table or from one for each field.

    Parameters
    ----------
    make : Maker
    name : str
        Of the table; with ``per_field`` of the tables NAME-0, NAME-1, ... in the order of fixed fields, lists,
        sequences and side columns. A feature that shares rows has them in the table of the other. A feature with a dim
        of its own has a table of its own, and a matrix that maps its rows to ``dim`` numbers.
    features : Features or int
    dim : int
    per_field : bool
    pools_sequences : bool
        Whether sequences are pooled as lists are; or else `Vectors.sequences` has their rows.
    own_dims : bool
        Whether the features' own dims count.
    dropout : float
        Of the numbers of all rows, in training.
    """

    def __init__(
        self,
        make: Maker,
        name: str,
        features: Features | int,
        dim: int,
        *,
        per_field: bool = False,
        pools_sequences: bool = True,
        own_dims: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not callable(make):
            raise TypeError(f"make is a {type(make).__name__}: pass what makes tables, shoal.torch.tables(store)")
        given, dropout = features_of(features), share_of("embedding_dropout", dropout)
        if not (given.fixed or given.lists or given.sequences):
            raise ValueError(
                "the features are numbers alone, and a model looks rows up: describe a category, a list, a bucket, or "
                "a number that is embedded"
            )
        self.features, self.dim, self.dropout = given, dim, dropout
        self.sequences = () if pools_sequences else given.sequences
        # The sources of keys, in the order in which they are asked for: fixed fields of a table, or a column of items.
        self._fixed: list[tuple[int, list[int]]] = []
        self._items: list[tuple[int, str, str | None]] = []
        self._own: dict[int, int] = {}  # the dims of tables with others
        self._places: dict[str, int] = {}  # the tables, by name
        tables: list[nn.Module] = []

        def table_of(one: Feature, number: int) -> int:
            if one.share is not None:
                one = given[one.share]
                number = names.index(one.name)
            own = one.dim if own_dims and one.dim not in (None, dim) else None
            its = f"{name}-{number}" if per_field or own is not None else name
            if its not in self._places:
                self._places[its] = len(tables)
                tables.append(make(its, own or dim))
                if own is not None:
                    self._own[self._places[its]] = own
            return self._places[its]

        ordered = (*given.fixed, *given.lists, *given.sequences)
        names = [one.name for one in ordered]
        fixed: dict[int, list[int]] = {}
        for number, one in enumerate(given.fixed):
            fixed.setdefault(table_of(one, number), []).append(number)
        self._fixed = list(fixed.items())
        asked = [column for columns in fixed.values() for column in columns]
        back = sorted(range(len(asked)), key=asked.__getitem__)
        self._back = None if back == list(range(len(asked))) else back  # from the order of the tables to the fields'
        number = len(ordered)
        for one in (*given.lists, *given.sequences):
            self._items.append((table_of(one, names.index(one.name)), one.name, None))
            for side, share in sides_of(one).items():
                found = given[share] if share in names else Feature(name=side)
                self._items.append((table_of(found, names.index(share) if share in names else number), one.name, side))
                number += 1
        self.tables = nn.ModuleList(tables)
        self.projections = nn.ModuleDict(
            {str(place): nn.Linear(own, dim, bias=False) for place, own in self._own.items()}
        )
        pooled = [one for one in self._items if one[1] not in {sequence.name for sequence in self.sequences}]
        self.queries = nn.ParameterDict(
            {_slot(*one[1:]): nn.Parameter(torch.zeros(dim)) for one in pooled if self._pooling(one[1]) == "attention"}
        )
        self.count = len(given.fixed) + len(pooled)
        for one in given.sequences if pools_sequences else ():
            if one.side_numeric:
                raise ValueError(
                    f"sequence {one.name!r} has the numbers {list(one.side_numeric)} beside it, and this model pools "
                    "sequences: leave side_numeric out, or take a model that reads them (din, bst)"
                )

    def _pooling(self, name: str) -> str:
        return self.features[name].pooling or "mean"

    def places_of(self, name: str) -> list[int]:
        """Return which of `Vectors.fields` are a feature's: that of a sequence has its side columns' as well."""
        fixed = [one.name for one in self.features.fixed]
        kept = {one.name for one in self.sequences}
        pooled_names = [item for _, item, _ in self._items if item not in kept]
        return [place for place, its in enumerate([*fixed, *pooled_names]) if its == name]

    def width(self, name: str) -> int:
        """Return the numbers of each item of a sequence."""
        one = self.features[name]
        return self.dim * (1 + len(one.side)) + len(one.side_numeric)

    @property
    def sources(self) -> list[Source]:
        """What `asked` asks for, in its order."""
        fixed = [Source(self.tables[place], tuple(columns)) for place, columns in self._fixed]
        return [*fixed, *(Source(self.tables[place], (), name, side) for place, name, side in self._items)]

    def asked(self, x: Inputs, only: nn.Module | None = None) -> list[tuple[nn.Module, Tensor]]:
        """Return the tables, or only one of them, and their keys, in an order that `answered` knows."""
        fixed = [
            (table, x.keys if len(columns) == x.keys.shape[1] else x.keys[:, columns])
            for place, columns in self._fixed
            if (table := self.tables[place]) is only or only is None
        ]
        items = [
            (table, _keys_of(_items(x, name), side))
            for place, name, side in self._items
            if (table := self.tables[place]) is only or only is None
        ]
        return [*fixed, *items]

    def answered(self, x: Inputs, rows: Sequence[Tensor]) -> Vectors:
        """Combine the rows of the requests."""
        places = [*(place for place, _ in self._fixed), *(place for place, *_ in self._items)]
        found = [self._projected(place, its) for place, its in zip(places, rows, strict=True)]
        if self.dropout:
            found = [nn.functional.dropout(its, self.dropout, self.training) for its in found]
        fixed, items = found[: len(self._fixed)], found[len(self._fixed) :]
        fields = [self._in_order(fixed, x)] if fixed else []
        sequences: dict[str, list[Tensor]] = {one.name: [] for one in self.sequences}
        for (_, name, side), its in zip(self._items, items, strict=True):
            if name in sequences:
                sequences[name].append(its)
            else:
                query = self.queries[_slot(name, side)] if self._pooling(name) == "attention" else None
                fields.append(pooled(its, _items(x, name), self._pooling(name), query).unsqueeze(1))
        return Vectors(
            fields[0] if len(fields) == 1 else torch.cat(fields, dim=1),
            {one.name: self._item_rows(one, sequences[one.name], x) for one in self.sequences},
        )

    def _projected(self, place: int, rows: Tensor) -> Tensor:
        return self.projections[str(place)](rows) if place in self._own else rows

    def _in_order(self, parts: Sequence[Tensor], x: Inputs) -> Tensor:
        """Return the rows of the fixed fields in the order of the fields, times their values."""
        rows = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
        rows = rows if self._back is None else rows[:, self._back]
        return rows if x.values is None else rows * x.values.unsqueeze(-1)

    def _item_rows(self, one: Feature, parts: list[Tensor], x: Inputs) -> ItemRows:
        items = _items(x, one.name)
        numeric = [] if items.numeric is None else [items.numeric]
        return ItemRows(torch.cat([*parts, *numeric], dim=1), items, self.target(one.name))

    def target(self, name: str) -> tuple[int, ...]:
        """Return the fixed fields whose rows a sequence's items and its side columns have, -1 where there is none."""
        one = self.features[name]
        fixed = [other.name for other in self.features.fixed]
        shared = [one.share, *sides_of(one).values()]
        return tuple(fixed.index(share) if share in fixed else -1 for share in shared)


def compared(lookup: Lookup, model: str) -> tuple[Feature, ...]:
    """Return the sequences of a model that compares their items with one at hand, which each of them must have."""
    if not lookup.sequences:
        raise ValueError(f"{model} reads sequences, and there is none: describe a feature of the type sequence")
    for one in lookup.sequences:
        if max(lookup.target(one.name)) < 0:
            raise ValueError(
                f"sequence {one.name!r} shares the rows of no category, so there is no item that it is compared with: "
                "name it, as in share = 'ad'"
            )
    return lookup.sequences


def features_of(features: Features | int) -> Features:
    """Return features, of a number that many categories."""
    return features if isinstance(features, Features) else Features.numbered(features)


def _slot(name: str, side: str | None) -> str:
    return (name if side is None else f"{name}/{side}").replace(".", "/")


def _items(x: Inputs, name: str) -> Items:
    found = x.lists.get(name) or x.sequences.get(name)
    if found is None:
        raise ValueError(f"the inputs have no list or sequence {name!r}: pass those of the model's features")
    return found


def _keys_of(items: Items, side: str | None) -> Tensor:
    return items.keys if side is None else items.side[side]


def pooled(rows: Tensor, items: Items, pooling: str, query: Tensor | None = None) -> Tensor:
    """Pool the rows of each example's items: float32[n, dim] of float32[nnz, dim]; zeros of none.

    With weights w: sum of w v; mean: that over the sum of w; sqrtn: over the root of the sum of w squared; max: of w v;
    attention: sum of p w v, where p is the softmax of <query, v> over the items.
    """
    n, example, weights = items.offsets.shape[0] - 1, items.example, items.weights
    scaled = rows if weights is None else rows * weights.unsqueeze(1)
    if pooling == "max":
        largest = torch.segment_reduce(scaled, "max", offsets=items.offsets, axis=0, unsafe=True)
        return torch.where((items.lengths == 0).unsqueeze(1), 0.0, largest)
    if pooling == "attention":
        assert query is not None
        scaled = scaled * softmax_of(rows @ query, example, n).unsqueeze(1)
    total = rows.new_zeros(n, rows.shape[1]).index_add(0, example, scaled)
    if pooling == "mean":
        size = items.lengths.to(rows.dtype) if weights is None else rows.new_zeros(n).index_add(0, example, weights)
    elif pooling == "sqrtn":
        square = None if weights is None else rows.new_zeros(n).index_add(0, example, weights.square())
        size = items.lengths.to(rows.dtype).sqrt() if square is None else square.sqrt()
    else:
        return total
    return total / torch.where(size == 0, 1.0, size).unsqueeze(1)


def softmax_of(scores: Tensor, example: Tensor, n: int) -> Tensor:
    """Compute the softmax of float32[nnz] scores over the items of each of n examples."""
    largest = scores.new_full((n,), -torch.inf).scatter_reduce(0, example, scores.detach(), "amax")
    power = (scores - largest[example]).exp()
    return power / scores.new_zeros(n).index_add(0, example, power)[example]


def pull(asked: Sequence[tuple[nn.Module, Tensor]]) -> list[Tensor]:
    """Look up keys of several tables: float32[..., dim] of each request's keys int64[...].

    A table with several requests is called once, so that backward sums all its gradients into one step. All pulls from
    a store's tables are begun before one is waited for.
    """
    of = _by_table(asked)
    together = all(isinstance(table, SparseModule) for table in of)
    calls = [(table, _together(asked, some)) for table, some in of.items()]
    found = pull_together(calls) if together else [table(some_keys) for table, some_keys in calls]
    out: list[Tensor] = [torch.empty(0)] * len(asked)
    for some, rows in zip(of.values(), found, strict=True):
        if len(some) == 1:
            out[some[0]] = rows
            continue
        keys = [asked[number][1] for number in some]
        parts = rows.split([its.numel() for its in keys])
        for number, its, part in zip(some, keys, parts, strict=True):
            out[number] = part.unflatten(0, its.shape)
    return out


def keys_for(x: Inputs, lookup: Lookup, table: nn.Module) -> Tensor:
    """Return the keys that `look_up` passes to a table of a lookup."""
    asked = lookup.asked(x, table)
    return _together(asked, range(len(asked)))


def _by_table(asked: Sequence[tuple[nn.Module, Tensor]]) -> dict[nn.Module, list[int]]:
    of: dict[nn.Module, list[int]] = {}
    for number, (table, _) in enumerate(asked):
        of.setdefault(table, []).append(number)
    return of


def _together(asked: Sequence[tuple[nn.Module, Tensor]], some: Sequence[int]) -> Tensor:
    return asked[some[0]][1] if len(some) == 1 else torch.cat([asked[number][1].flatten() for number in some])


def look_up(x: Inputs, *lookups: Lookup) -> list[Vectors]:
    """Look up the rows of several lookups at once, of the same features."""
    _check(x, lookups[0].features)
    asked = [lookup.asked(x) for lookup in lookups]
    rows = iter(pull([one for some in asked for one in some]))
    return [lookup.answered(x, [next(rows) for _ in some]) for lookup, some in zip(lookups, asked, strict=True)]


def _check(x: Inputs, features: Features) -> None:
    """Raise an error if these are not inputs of the features."""
    if not isinstance(x, Inputs):
        raise TypeError(f"x is a {type(x).__name__}: pass Inputs, as shoal.torch.inputs(batch, features) makes them")
    fields, dense = len(features.fixed), features.dense_width
    if x.keys.dim() != 2 or x.keys.shape[1] != fields:
        raise ValueError(f"the keys are {tuple(x.keys.shape)}, and the model has {fields} fields: pass [n, {fields}]")
    if (0 if x.dense is None else x.dense.shape[-1]) != dense:
        got = "None" if x.dense is None else tuple(x.dense.shape)
        raise ValueError(f"the dense numbers are {got}, and the model has {dense} columns of them: pass [n, {dense}]")


class Linear(nn.Module):
    """First order: a bias plus the sum of each example's weights, float32[n] of float32[n, fields, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, weights: Tensor) -> Tensor:
        """Sum the weights and add the bias."""
        return self.bias + weights.sum(dim=(1, 2))


def pairs(rows: Tensor) -> Tensor:
    """Sum the products of all pairs of fields, float32[n] of float32[n, fields, dim].

    sum over i < j of <v_i, v_j> = (|sum v|^2 - sum |v|^2) / 2 (Rendle, Factorization Machines, ICDM 2010, lemma 3.1).
    """
    return 0.5 * (rows.sum(dim=1).square() - rows.square().sum(dim=1)).sum(dim=1)


class Deep(TypedDict, total=False):
    """The settings of a tower.

    Attributes
    ----------
    hidden : sequence of int
        Widths of its layers; default: (400, 400, 400).
    dropout : float
        Of each layer's output; default: 0.
    batch_norm, layer_norm : bool
        Whether each layer's numbers are normalized over the batch, or over the layer; default: False.
    activation : {"relu", "prelu", "dice", "gelu", "silu", "leaky_relu", "tanh", "sigmoid", "identity"}
        Default: "relu".
    init : {"xavier_normal", "xavier_uniform", "kaiming_normal"}
        How its weights are drawn, with biases of 0; default: as torch draws them.
    """

    hidden: Sequence[int]
    dropout: float
    batch_norm: bool
    layer_norm: bool
    activation: Activation
    init: WeightInit | None


class Tower(nn.Sequential):
    """Fully connected layers; ``width`` is the number of outputs."""

    def __init__(self, layers: Iterable[nn.Module], width: int) -> None:
        super().__init__(*layers)
        self.width = width


def count_of(name: str, given: int, least: int = 1) -> int:
    """Return a number of layers, experts, ..."""
    return _bounded(name, given, least, _MOST_LAYERS)


def width_of(name: str, given: int) -> int:
    """Return the width of a layer."""
    return _bounded(name, given, 1, _MOST_WIDTH)


def _bounded(name: str, given: int, least: int, most: int) -> int:
    number = whole(name, given, least, f"a whole number from {least} to {most}")
    if number > most:
        raise ValueError(f"{name} is {number}: pass at most {most}")
    return number


def widths_of(name: str, given: Any) -> tuple[int, ...]:
    """Return the widths of layers."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name} is {given!r:.80}: pass a list of widths, such as (400, 400)")
    return tuple(width_of(f"a width in {name}", one) for one in given)


def has_tower(deep: Deep) -> bool:
    """Whether the settings of a tower have layers."""
    return "hidden" not in deep or len(widths_of("hidden", deep["hidden"])) > 0


def share_of(name: str, given: float) -> float:
    """Return a probability below 1."""
    number = _number(name, given, what := "a number from 0, below 1")
    if not 0 <= number < 1:
        raise ValueError(f"{name} is {number}: pass {what}")
    return number


def positive(name: str, given: float) -> float:
    """Return a finite number above 0."""
    number = _number(name, given, what := "a number above 0")
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {number}: pass {what}")
    return number


def _number(name: str, given: float, what: str) -> float:
    number = plain(given)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"{name} is {given!r:.80}: pass {what}")
    return number


def tower(
    width: int,
    hidden: Sequence[int] = (400, 400, 400),
    *,
    dropout: float = 0.0,
    batch_norm: bool = False,
    layer_norm: bool = False,
    activation: Activation = "relu",
    init: WeightInit | None = None,
) -> Tower:
    """Make fully connected layers from ``width`` numbers to ``hidden[-1]``.

    Each layer is followed by a normalization over the batch or over its units, the activation, and dropout, in this
    order. ``init`` is that of `initialize`.
    """
    hidden, dropout = widths_of("hidden", hidden), share_of("dropout", dropout)
    if not hidden:
        raise ValueError("hidden is empty: pass the width of one layer or more")
    if batch_norm and layer_norm:
        raise ValueError("batch_norm and layer_norm normalize the same numbers: pass one of them")
    layers: list[nn.Module] = []
    for before, after in pairwise([width, *hidden]):
        layers.append(nn.Linear(before, after))
        if batch_norm:
            layers.append(BatchNorm(after))
        if layer_norm:
            layers.append(nn.LayerNorm(after))
        layers.append(make_activation(activation, after))
        if dropout > 0:
            layers.append(nn.Dropout(dropout))
    made = Tower(layers, hidden[-1])
    initialize(made, init)
    return made


def initialize(module: nn.Module, init: WeightInit | None) -> None:
    """Draw the weights of a module's fully connected layers anew, with biases of 0; None: leave those of torch.

    With a width of n before a layer and of m after it: "xavier_normal" has the variance 2 / (n + m), "xavier_uniform"
    the same (Glorot, Bengio, AISTATS 2010), "kaiming_normal" 2 / n (He et al., ICCV 2015).
    """
    if init is None:
        return
    check_names([init], list(_WEIGHT_INITS), "a tower", "init")
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            _WEIGHT_INITS[init](layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


_WEIGHT_INITS: dict[str, Callable[[Tensor], Tensor]] = {
    "xavier_normal": nn.init.xavier_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "kaiming_normal": functools.partial(nn.init.kaiming_normal_, nonlinearity="relu"),
}


def flat(rows: Tensor, dense: Tensor | None) -> Tensor:
    """Concatenate the rows of each example, then its dense columns: float32[n, fields * dim + d]."""
    wide = rows.flatten(start_dim=1)
    return wide if dense is None else torch.cat([wide, dense], dim=1)
