"""Inputs: a batch's features as tensors, the input of models.

    batch     row 0:  site=a  ad=7  price:0.5  clicked=3  clicked=9          CSR, a key and a field for each feature
              row 1:  site=b        price:2.0

    inputs    keys     [[a, 7], [b, missing in ad]]                          fixed fields, in the order of the features
              dense    [[0.5], [2.0]]
              sequences["clicked"]   keys [3, 9], offsets [0, 2, 2]          jagged

Invariants
    I1  Every example has one key for each fixed field. More than one feature of a fixed field is an error.
    I2  Columns beside the items of a list or sequence have as many items, in the same order.
    I3  Features of other columns are ignored.

Threads: an `Arrangement` is immutable, its `inputs` a pure function, safe from any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal import _core
from shoal.config import Feature
from shoal.data import Batch, hash_strings
from shoal.data.hashing import MISSING_TEXT
from shoal.torch.features import Features, column_of, examples_of, fields_of, sides_of

Places: TypeAlias = npt.NDArray[np.int64]


class Padded(NamedTuple):
    """A sequence of which every example has the same number of places.

    Attributes
    ----------
    keys : int64[n, L]
        0 behind the items of an example.
    mask : bool[n, L]
        Where there is an item.
    side : dict of int64[n, L]
        The keys of the side columns of texts.
    numeric : float32[n, L, k] or None
        Those of numbers.
    """

    keys: Tensor
    mask: Tensor
    side: Mapping[str, Tensor]
    numeric: Tensor | None


class Items(NamedTuple):
    """The items of a list or sequence, jagged.

    Attributes
    ----------
    keys : int64[nnz]
    offsets : int64[n + 1]
        Where the items of each example begin, and the number of all.
    weights : float32[nnz] or None
        The factors of their rows; None: 1.
    side : dict of int64[nnz]
        The keys of the side columns of texts.
    numeric : float32[nnz, k] or None
        The numbers of the side columns of numbers.
    """

    keys: Tensor
    offsets: Tensor
    weights: Tensor | None = None
    side: Mapping[str, Tensor] = {}
    numeric: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """Items of each example, int64[n]."""
        return self.offsets.diff()

    @property
    def example(self) -> Tensor:
        """The example of each item, int64[nnz]."""
        return torch.repeat_interleave(self.lengths, output_size=self.keys.shape[0])

    def padded(self, max_len: int) -> Padded:
        """Return ``max_len`` places for each example: its last items, in their order, from place 0."""
        place, mask = self.places(max_len)
        filled = [_filled(one, place, mask) for one in (self.keys, *self.side.values())]
        numeric = None if self.numeric is None else _filled(self.numeric, place, mask)
        return Padded(filled[0], mask, dict(zip(self.side, filled[1:], strict=True)), numeric)

    def places(self, max_len: int) -> tuple[Tensor, Tensor]:
        """Return the item of each place, int64[n, L], and whether there is one, bool[n, L]."""
        step = torch.arange(max_len)
        mask = step < self.lengths.unsqueeze(1)
        first = self.offsets[1:] - self.lengths.clamp(max=max_len)
        return torch.where(mask, first.unsqueeze(1) + step, 0), mask


def _filled(given: Tensor, place: Tensor, mask: Tensor) -> Tensor:
    if not given.shape[0]:
        return given.new_zeros((*place.shape, *given.shape[1:]))
    found = given[place]
    return found.masked_fill(~mask.reshape(*mask.shape, *[1] * (found.dim() - mask.dim())), 0)


class Inputs(NamedTuple):
    """A batch of examples, the input of `shoal.torch.models`.

    Attributes
    ----------
    keys : int64[n, fields]
        One key for each fixed field, the 64 bits of the reader's uint64.
    values : float32[n, fields] or None
        The factor of the row of each key; None: 1.
    dense : float32[n, d] or None
        Numbers, which have no rows.
    lists : dict of Items
        By the names of the features.
    sequences : dict of Items
    labels : dict of float32[n]
        Those of the tasks but the first, by their names; NaN where an example has none.
    """

    keys: Tensor
    values: Tensor | None = None
    dense: Tensor | None = None
    lists: Mapping[str, Items] = {}
    sequences: Mapping[str, Items] = {}
    labels: Mapping[str, Tensor] = {}


def inputs(batch: Batch, features: int | Features) -> Inputs:
    """Arrange a batch's features as tensors.

    Parameters
    ----------
    batch : Batch
    features : Features or int
        The description of the features, which needs the batch's fields (`shoal.data.Reader.with_fields`). A number:
        every example has this many features, and the i-th one is that of field i.

    Returns
    -------
    Inputs
        ``values`` is None if all are 1.

    Raises
    ------
    ValueError
        The batch has no fields, an example has two features of a fixed field, the columns beside a sequence have
        another number of items, or a vector another size: the message names example and feature. With a number: an
        example has another number of features.
    """
    if isinstance(features, Features):
        return _arrangement(features).inputs(batch)
    lengths = np.diff(batch.indptr)
    if len(bad := np.flatnonzero(lengths != features)):
        raise ValueError(
            f"example {bad[0]} has {lengths[bad[0]]} features, and the model {features} fields: read the fields "
            f"(reader.with_fields()), and pass Features in place of {features}"
        )
    return Inputs(_keys(batch.keys.reshape(-1, features)), _factors(batch.values, features))


class Arrangement:
    """The columns of features, by their numbers."""

    def __init__(self, features: Features) -> None:
        self.features = features
        numbers = np.array([features.number(column) for column in features.places], np.uint64)
        self._order = np.argsort(numbers).astype(np.int16)
        self._sorted = numbers[self._order]
        shares = {share for one in features.all for share in sides_of(one).values()}
        self.missing = {share: self._missing_in(features.hashed_as(share)) for share in shares}
        self.buckets = {one.name: self._keys_of(one) for one in features.all if one.type == "bucket" and one.edges}

    def _keys_of(self, one: Feature) -> npt.NDArray[np.uint64]:
        """Return the key of each interval."""
        return hash_strings([str(i) for i in range(len(one.edges) + 1)], self.features.number(column_of(one)))

    def _missing_in(self, column: str) -> np.uint64:
        """Return the key of a missing text in a column."""
        return np.uint64(hash_strings([MISSING_TEXT], self.features.number(column))[0])

    def inputs(self, batch: Batch) -> Inputs:
        """Arrange a batch."""
        if self.features.needs_data:
            raise ValueError("the intervals of a bucket by quantiles are not known: call features.fitted(batches)")
        seen = _Seen(self, batch)
        features = self.features
        keys = np.tile(features.missing, (len(batch), 1))
        values = None
        for j, one in enumerate(features.fixed):
            example, its, factors = seen.single(one)
            keys[example, j] = its
            if factors is not None:
                values = np.ones(keys.shape, np.float32) if values is None else values
                values[example, j] = factors
        return Inputs(
            _keys(keys),
            _factors(values, len(features)),
            seen.dense(features.dense) if features.dense else None,
            {one.name: seen.items(one) for one in features.lists},
            {one.name: seen.items(one) for one in features.sequences},
            {name: seen.label(task.column) for name, task in list(features.labels.items())[1:]},
        )

    def columns_of(self, fields: npt.NDArray[np.uint64]) -> npt.NDArray[np.int16]:
        """Find the column of each feature; -1: none."""
        if not len(self._sorted):
            return np.full(len(fields), -1, np.int16)
        at = np.minimum(np.searchsorted(self._sorted, fields), len(self._sorted) - 1)
        return np.where(self._sorted[at] == fields, self._order[at], np.int16(-1))


@functools.lru_cache(maxsize=64)
def _arrangement(features: Features) -> Arrangement:
    return Arrangement(features)


class _Seen:
    """A batch whose features are found by column."""

    def __init__(self, arrangement: Arrangement, batch: Batch) -> None:
        self.arrangement = arrangement
        self.batch = batch
        self.n = len(batch)
        self.example = examples_of(batch)
        column = arrangement.columns_of(fields_of(batch))
        self._order = np.argsort(column, kind="stable")  # 16 bits: by counting
        counts = np.bincount(column.astype(np.int64) + 1, minlength=len(arrangement.features.places) + 1)
        self._ends = np.cumsum(counts)
        self._kept: dict[str, Items] = {}

    def at(self, column: str) -> Places:
        """Return the places of a column's features in the batch, ascending."""
        number = self.arrangement.features.places[column]
        return self._order[self._ends[number] : self._ends[number + 1]]

    def single(self, one: Feature) -> tuple[Places, npt.NDArray[np.uint64], npt.NDArray[np.float32] | None]:
        """Return the examples with a feature of a fixed field, its keys, and its factors if they are not 1."""
        if one.type == "cross":
            offsets, keys = self._crossed(one)
            return np.repeat(np.arange(self.n), np.diff(offsets)), keys, None
        at = self.at(column_of(one))
        example = self.example[at]
        self._check_single(one, example)
        values = None if self.batch.values is None else self.batch.values[at]
        if one.type == "bucket":
            if values is None:
                raise ValueError(f"{one.name!r} is a bucket of numbers, and this batch has none: read it as numeric")
            return example, self._bucketed(one, values), None
        return example, self.batch.keys[at], None if values is None or np.all(values == 1) else values

    def _bucketed(self, one: Feature, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint64]:
        places = np.searchsorted(np.array(one.edges), values.astype(np.float64), side="right")
        return self.arrangement.buckets[one.name][places]

    def _check_single(self, one: Feature, example: Places) -> None:
        if len(example) > 1 and len(repeated := np.flatnonzero(example[1:] == example[:-1])):
            first = int(example[repeated[0]])
            raise ValueError(
                f"example {first} has {np.count_nonzero(example == first)} features of {column_of(one)!r}, and a "
                f"{one.type} has one: make it a list, or leave it out"
            )

    def dense(self, features: tuple[Feature, ...]) -> Tensor:
        """Return the numbers, float32[n, d]."""
        values = self.batch.values
        if values is None:
            raise ValueError("dense columns are numbers, and this batch has none: name them as numeric to the reader")
        columns = []
        for one in features:
            at = self.at(column_of(one))
            example = self.example[at]
            if one.type == "vector":
                numbers = self._vector(one, example, values[at])
            else:
                self._check_single(one, example)
                numbers = np.zeros((self.n, 1), np.float32)
                numbers[example, 0] = values[at]
            columns.append(np.sign(numbers) * np.log1p(np.abs(numbers)) if one.log else numbers)
        return torch.from_numpy(np.concatenate(columns, axis=1))

    def _vector(self, one: Feature, example: Places, numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        size = one.size or 1
        counts = np.bincount(example, minlength=self.n)
        if len(bad := np.flatnonzero((counts != size) & (counts != 0))):
            raise ValueError(
                f"example {bad[0]} has {counts[bad[0]]} numbers in vector {column_of(one)!r}, whose size is {size}"
            )
        out = np.zeros((self.n, size), np.float32)
        out[counts == size] = numbers.reshape(-1, size)
        return out

    def label(self, column: str) -> Tensor:
        """Return a column of labels, float32[n], NaN where there is none."""
        at = self.at(column)
        out = np.full(self.n, np.nan, np.float32)
        out[self.example[at]] = 1.0 if self.batch.values is None else self.batch.values[at]
        return torch.from_numpy(out)

    def items(self, one: Feature) -> Items:
        """Return the items of a list or a sequence."""
        if one.name not in self._kept:
            self._kept[one.name] = self._items(one)
        return self._kept[one.name]

    def _items(self, one: Feature) -> Items:
        if one.type == "cross":
            offsets, keys = self._crossed(one)
            return Items(_keys(keys), torch.from_numpy(offsets))
        at = self.at(column_of(one))
        counts = np.bincount(self.example[at], minlength=self.n)
        values = self.batch.values
        beside = {
            column: self._aligned(one, column, counts)
            for column in (*([] if one.weights is None else [one.weights]), *sides_of(one), *one.side_numeric)
        }
        if one.max_len is not None and len(counts) and counts.max() > one.max_len:
            kept = _kept(counts, one.max_len, from_end=one.keep == "last")
            at, counts = at[kept], np.minimum(counts, one.max_len)
            beside = {column: its[kept] for column, its in beside.items()}
        offsets = np.zeros(self.n + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        weights = None
        if values is not None:
            weights = values[at] if one.weights is None else self._numbers(beside[one.weights])
        numeric = None
        if one.side_numeric:
            numeric = torch.from_numpy(np.stack([self._numbers(beside[name]) for name in one.side_numeric], axis=1))
        return Items(
            _keys(self.batch.keys[at]),
            torch.from_numpy(offsets),
            None if weights is None or np.all(weights == 1) else torch.from_numpy(weights),
            {column: self._side(beside[column], share) for column, share in sides_of(one).items()},
            numeric,
        )

    def _aligned(self, one: Feature, column: str, counts: npt.NDArray[np.int64]) -> Places:
        """Return the places of a column that has one for each item; -1 for those of an example without any."""
        at = self.at(column)
        its = np.bincount(self.example[at], minlength=self.n)
        if len(bad := np.flatnonzero((its != counts) & (its != 0))):
            raise ValueError(
                f"example {bad[0]} has {counts[bad[0]]} items in {one.name!r} and {its[bad[0]]} in {column!r}, which "
                "has one for each: write a missing one as an empty item"
            )
        if len(at) == counts.sum():
            return at
        out = np.full(counts.sum(), -1, np.int64)
        out[np.repeat(its != 0, counts)] = at
        return out

    def _numbers(self, at: Places) -> npt.NDArray[np.float32]:
        """Return the numbers of these places, 0 where there is none."""
        if self.batch.values is None or not len(self.batch.values):
            return np.zeros(len(at), np.float32)
        return np.where(at < 0, np.float32(0), self.batch.values[at])

    def _side(self, at: Places, share: str) -> Tensor:
        """Return the keys of these places, that of a missing text where there is none."""
        missing = self.arrangement.missing[share]
        if not len(self.batch.keys):
            return _keys(np.full(len(at), missing, np.uint64))
        return _keys(np.where(at < 0, missing, self.batch.keys[at]))

    def _crossed(self, one: Feature) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return the combinations of the features of a cross, jagged."""
        offsets, keys = self._source(one.of[0])
        for name in one.of[1:]:
            other, others = self._source(name)
            offsets, keys = _pairs(offsets, keys, other, others)
        return offsets, keys

    def _source(self, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        one = self.arrangement.features[name]
        if one.type in ("list", "sequence"):
            items = self.items(one)
            return items.offsets.numpy(), items.keys.numpy().view(np.uint64)
        example, keys, _ = self.single(one)
        offsets = np.zeros(self.n + 1, np.int64)
        np.cumsum(np.bincount(example, minlength=self.n), out=offsets[1:])
        return offsets, keys


def _pairs(
    first: npt.NDArray[np.int64],
    keys: npt.NDArray[np.uint64],
    second: npt.NDArray[np.int64],
    others: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Return the pairs of each example's keys and others, with the keys of interactions."""
    before, after = np.diff(first), np.diff(second)
    indptr = first + second
    is_other = np.repeat(np.tile(np.array([False, True]), len(before)), np.stack([before, after], axis=1).reshape(-1))
    both = np.empty(len(is_other), np.uint64)
    both[~is_other], both[is_other] = keys, others
    made, all_keys, _ = _core.interact(indptr, both, None, is_other.astype(np.uint64), np.array([0, 1], np.uint64))
    counts = before * after
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    begins = made[1:] - counts  # behind the features themselves
    at = np.repeat(begins - offsets[:-1], counts) + np.arange(offsets[-1])
    return offsets, all_keys[at]


def _kept(counts: npt.NDArray[np.int64], most: int, *, from_end: bool) -> npt.NDArray[np.bool_]:
    """Return which items of examples of these lengths are among the first or last."""
    begins = np.cumsum(counts) - counts
    rank = np.arange(counts.sum()) - np.repeat(begins, counts)
    kept: npt.NDArray[np.bool_] = rank >= np.repeat(counts - most, counts) if from_end else rank < most
    return kept


def _keys(keys: npt.NDArray[np.uint64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(keys).view(np.int64))


def _factors(values: npt.NDArray[Any] | None, columns: int) -> Tensor | None:
    """Return values as a tensor of so many columns; None if all are 1."""
    if values is None or np.all(values == 1):
        return None
    return torch.from_numpy(np.ascontiguousarray(values.reshape(-1, columns)))
