"""BatchQueue: converts batches of any sizes to batches of one size, with the position at the end of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.data.batch import Batch


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
    """A queue of examples: batches of any size go in, batches of a given size come out, in order."""

    def __init__(self) -> None:
        self.rows = 0  # that wait
        self._queue: deque[Batch] = deque()

    def add(self, batch: Batch) -> None:
        """Append the examples of a batch."""
        if len(batch):
            self._queue.append(batch)
            self.rows += len(batch)

    def take(self, rows: int) -> Batch:
        """Remove and return the first ``rows`` examples; there are as many.

        They are copied, unless they are of one batch, without weights.
        """
        taken: list[Batch] = []
        self.rows -= rows
        while rows:
            first = self._queue.popleft()
            if len(first) > rows:
                self._queue.appendleft(rows_of(first, rows, len(first)))
                first = rows_of(first, 0, rows)
            taken.append(first)
            rows -= len(first)
        alone = taken[0] if len(taken) == 1 else None
        return joined(taken) if alone is None or alone.weights is not None else alone


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
