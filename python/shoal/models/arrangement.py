"""Arranged: a batch's features as arrays, by the description of the features.

    batch     row 0:  site=a  ad=7  price:0.5  clicked=3  clicked=9          CSR, a key and a field for each feature
              row 1:  site=b        price:2.0

    arranged  keys     [[a, 7], [b, missing in ad]]                          fixed fields, in the order of the features
              dense    [[0.5], [2.0]]
              sequences["clicked"]   keys [3, 9], offsets [0, 2, 2]          jagged

Invariants
    I1  Every example has one key for each fixed field. More than one feature of a fixed field is an error.
    I2  Columns beside the items of a list or sequence have as many items, in the same order.
    I3  Features of other columns are ignored.

Threads: an `Arrangement` is immutable, its `arrange` a pure function, safe from any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.config import Feature
from shoal.data import Batch, hash_strings
from shoal.data.hashing import MISSING_TEXT
from shoal.models.features import Features, column_of, examples_of, fields_of, sides_of

Places: TypeAlias = npt.NDArray[np.int64]


class ArrangedItems(NamedTuple):
    """The items of a list or sequence: as `shoal.torch.Items`, of arrays."""

    keys: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None = None
    side: Mapping[str, npt.NDArray[np.int64]] = {}
    numeric: npt.NDArray[np.float32] | None = None


class Arranged(NamedTuple):
    """A batch: as `shoal.torch.Inputs`, of arrays."""

    keys: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32] | None
    dense: npt.NDArray[np.float32] | None
    lists: Mapping[str, ArrangedItems]
    sequences: Mapping[str, ArrangedItems]
    labels: Mapping[str, npt.NDArray[np.float32]]


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

    def arrange(self, batch: Batch) -> Arranged:
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
        return Arranged(
            keys_of(keys),
            factors_of(values, len(features)),
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


def arrange(batch: Batch, features: Features) -> Arranged:
    """Arrange a batch's features, which it has with their fields."""
    return _arrangement(features).arrange(batch)


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
        self._kept: dict[str, ArrangedItems] = {}

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

    def dense(self, features: tuple[Feature, ...]) -> npt.NDArray[np.float32]:
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
        return np.concatenate(columns, axis=1)

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

    def label(self, column: str) -> npt.NDArray[np.float32]:
        """Return a column of labels, float32[n], NaN where there is none."""
        at = self.at(column)
        out = np.full(self.n, np.nan, np.float32)
        out[self.example[at]] = 1.0 if self.batch.values is None else self.batch.values[at]
        return out

    def items(self, one: Feature) -> ArrangedItems:
        """Return the items of a list or a sequence."""
        if one.name not in self._kept:
            self._kept[one.name] = self._items(one)
        return self._kept[one.name]

    def _items(self, one: Feature) -> ArrangedItems:
        if one.type == "cross":
            offsets, keys = self._crossed(one)
            return ArrangedItems(keys_of(keys), offsets)
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
            numeric = np.stack([self._numbers(beside[name]) for name in one.side_numeric], axis=1)
        return ArrangedItems(
            keys_of(self.batch.keys[at]),
            offsets,
            None if weights is None or np.all(weights == 1) else weights,
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

    def _side(self, at: Places, share: str) -> npt.NDArray[np.int64]:
        """Return the keys of these places, that of a missing text where there is none."""
        missing = self.arrangement.missing[share]
        if not len(self.batch.keys):
            return keys_of(np.full(len(at), missing, np.uint64))
        return keys_of(np.where(at < 0, missing, self.batch.keys[at]))

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
            return items.offsets, items.keys.view(np.uint64)
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


def keys_of(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return keys as the signed numbers of the same bits."""
    return np.ascontiguousarray(keys).view(np.int64)


def factors_of(values: npt.NDArray[Any] | None, columns: int) -> npt.NDArray[np.float32] | None:
    """Return values as an array of so many columns; None if all are 1."""
    if values is None or np.all(values == 1):
        return None
    return np.ascontiguousarray(values.reshape(-1, columns))
