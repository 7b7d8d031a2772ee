"""BatchQueue: converts batches of any sizes to batches of one size, with the position at the end of each."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.data.batch import Batch

_ROWS_AHEAD = 1 << 17  # for which room is made at once
_KEYS_AHEAD = 1 << 22
_LARGE_KEYS = 1 << 16
_SPARE_ROOMS = 2


class Cursor(NamedTuple):
    """Position of a pass after the last example of a batch."""

    # Index of the file.
    file: int = 0
    # Of a line's first byte in its text.
    offset: int = 0
    # Examples from there on that were returned already.
    rows: int = 0
    # Malformed lines that were left out before the offset.
    skipped: int = 0


class BatchGroup(NamedTuple):
    """The batches that were completed by the blocks read since the previous group."""

    # Those that the last of them completed.
    batches: list[tuple[Batch, Cursor]]
    # Malformed lines so far.
    skipped: int
    # Of the bytes of all sources.
    fraction: float


BatchGroups = Generator[BatchGroup | None, None, None]


class BatchQueue:
    """Makes batches of ``size`` examples of batches of any size, in order.

    Examples are copied, unless ``keeps`` says that what is given stays as it is: then a batch that lies within one of
    them, without weights, shows a part of it.

    Room for a batch is made by what its first examples take, and more if that was too little. Batches of about one size
    get the same room: then the memory of earlier ones fits.
    """

    def __init__(self, size: int, *, keeps: bool = False, max_delay: float | None = None) -> None:
        self._size = size
        self._max_delay = math.inf if max_delay is None else max_delay
        self._since = math.inf  # when the oldest example that waits was added
        self._keeps = keeps
        self._part: Batch | None = None  # of what was given last, not copied yet
        self._row_room = self._key_room = 0
        self._spare: deque[tuple[NDArray[np.uint64], NDArray[np.float32] | None]] = deque()
        self._begin()

    def _begin(self) -> None:
        self._rows = self._nnz = 0
        self._labels: NDArray[np.float32] | None = None
        self._begins: NDArray[np.int64] | None = None
        self._keys: NDArray[np.uint64] | None = None
        self._values: NDArray[np.float32] | None = None
        if self._spare:
            self._keys, self._values = self._spare.popleft()
        self._weights: NDArray[np.float32] | None = None
        self._fields: NDArray[np.uint64] | None = None

    def make_room(self) -> None:
        """Allocate a later batch's large arrays. Of several threads that call `add`, one does so for all.

        An allocator keeps freed memory for the thread that had it: of many, each would touch memory of its own.
        """
        if self._key_room >= _LARGE_KEYS and len(self._spare) < _SPARE_ROOMS:
            values = None if self._values is None else np.empty(self._key_room, np.float32)
            self._spare.append((np.empty(self._key_room, np.uint64), values))

    def add(self, batch: Batch, first: int = 0) -> Iterator[tuple[Batch, int]]:
        """Append the examples from ``first`` on; yields each batch that they complete, and the row behind its last."""
        while first < len(batch):
            if self._part is not None:
                part, self._part = self._part, None
                self._append(part, 0, len(part))
            elif self._rows == 0:
                self._since = time.monotonic()
            last = min(len(batch), first + self._size - self._rows)
            if self._keeps and self._rows == 0 and batch.weights is None:
                part = rows_of(batch, first, last)
                if len(part) == self._size:
                    yield part, last
                else:
                    self._part = part
            else:
                self._append(batch, first, last)
                if self._rows == self._size:
                    yield self._take(), last
            first = last

    def overdue(self) -> Batch | None:
        """Return the examples that wait, if they have for longer than ``max_delay`` seconds."""
        return self.rest() if time.monotonic() - self._since >= self._max_delay else None

    def rest(self) -> Batch | None:
        """Return the examples that wait, if any."""
        self._since = math.inf
        if self._part is not None:
            part, self._part = self._part, None
            return part
        return self._take() if self._rows else None

    def _append(self, batch: Batch, first: int, last: int) -> None:
        begin, end = int(batch.indptr[first]), int(batch.indptr[last])
        row, nnz = self._rows, self._nnz
        self._rows, self._nnz = rows, size = row + last - first, nnz + end - begin
        if rows > self._row_room:
            self._row_room = min(self._size, max(rows, _ROWS_AHEAD, 2 * self._row_room))
        expected = size * self._row_room // rows
        if size > self._key_room or (row == 0 and not expected <= self._key_room <= expected + expected // 4):
            self._key_room = max(size, min(expected + expected // 8, max(_KEYS_AHEAD, 2 * self._key_room)))
        self._labels = _put(self._labels, batch.labels[first:last], row, rows, self._row_room)
        self._begins = _put(self._begins, batch.indptr[first:last] + (nnz - begin), row, rows, self._row_room + 1)
        self._weights = _put(
            self._weights, None if batch.weights is None else batch.weights[first:last], row, rows, self._row_room
        )
        self._keys = _put(self._keys, batch.keys[begin:end], nnz, size, self._key_room)
        self._values = _put(
            self._values, None if batch.values is None else batch.values[begin:end], nnz, size, self._key_room
        )
        self._fields = _put(
            self._fields, None if batch.fields is None else batch.fields[begin:end], nnz, size, self._key_room
        )

    def _take(self) -> Batch:
        rows, nnz, weights = self._rows, self._nnz, self._weights
        assert self._labels is not None, "there are rows"
        assert self._begins is not None, "there are rows"
        assert self._keys is not None, "there are rows"
        self._begins[rows] = nnz
        batch = Batch(
            _fitted(self._labels, rows),
            _fitted(self._begins, rows + 1),
            _fitted(self._keys, nnz),
            None if self._values is None else _fitted(self._values, nnz),
            None if weights is None or np.all(weights[:rows] == 1) else _fitted(weights, rows),
            None if self._fields is None else _fitted(self._fields, nnz),
        )
        self._begin()
        return batch


Scalar = TypeVar("Scalar", bound=np.generic)


def _put(
    array: NDArray[Scalar] | None, given: NDArray[Scalar] | None, begin: int, end: int, room: int
) -> NDArray[Scalar] | None:
    """Append what is given, with room for more; None represents ones."""
    if array is None:
        if given is None:
            return None
        array = np.empty(room, given.dtype)
        array[:begin] = 1
    elif len(array) < room:
        array = longer(array, room)
    array[begin:end] = 1 if given is None else given
    return array


def longer(array: NDArray[Scalar], size: int) -> NDArray[Scalar]:
    """Copy into an array with room for more."""
    larger = np.empty((size, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


def _fitted(array: NDArray[Scalar], size: int) -> NDArray[Scalar]:
    """Show the first elements, or copy them if they are less than four fifths."""
    return array[:size] if len(array) <= size + size // 4 else array[:size].copy()


def rows_of(batch: Batch, begin: int, end: int) -> Batch:
    """Show some rows of a batch."""
    if begin == 0 and end == len(batch):
        return batch
    first, last = batch.indptr[begin], batch.indptr[end]
    return Batch(
        batch.labels[begin:end],
        batch.indptr[begin : end + 1] - first,
        batch.keys[first:last],
        None if batch.values is None else batch.values[first:last],
        None if batch.weights is None else batch.weights[begin:end],
        None if batch.fields is None else batch.fields[first:last],
    )


def joined(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches into new arrays; weights that are all 1 are left out."""
    ends = np.cumsum([0, *(batch.nnz for batch in batches)])
    indptr = [batch.indptr[1:] + end for batch, end in zip(batches, ends[:-1], strict=True)]
    weights = joined_or_none([batch.weights for batch in batches], [len(batch) for batch in batches])
    return Batch(
        np.concatenate([batch.labels for batch in batches]),
        np.concatenate([np.zeros(1, np.int64), *indptr]),
        np.concatenate([batch.keys for batch in batches]),
        joined_or_none([batch.values for batch in batches], [batch.nnz for batch in batches]),
        None if weights is None or np.all(weights == 1) else weights,
        _joined_fields([batch.fields for batch in batches]),
    )


def _joined_fields(arrays: Sequence[NDArray[np.uint64] | None]) -> NDArray[np.uint64] | None:
    given = [array for array in arrays if array is not None]
    if given and len(given) < len(arrays):
        raise ValueError("some batches have the fields of their features, and some do not: take all from one reader")
    return np.concatenate(given) if given else None


def joined_or_none(arrays: Sequence[NDArray[np.float32] | None], lengths: Sequence[int]) -> NDArray[np.float32] | None:
    """Concatenate arrays, where None represents ones of that length; None if all are None."""
    if all(array is None for array in arrays):
        return None
    given = [np.ones(n, np.float32) if array is None else array for array, n in zip(arrays, lengths, strict=True)]
    return np.concatenate(given)
