"""Pieces: batches of any sizes into batches of one size, and where in the data each of them ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.data.batch import Batch


class Place(NamedTuple):
    """Where a pass goes on: behind the last example of a batch.

    Parameters
    ----------
    file : int
        Index of the file.
    offset : int
        Of a line's first byte in its text.
    rows : int
        Examples from there on that were handed out already.
    skipped : int
        Malformed lines that were left out before the offset.
    """

    file: int = 0
    offset: int = 0
    rows: int = 0
    skipped: int = 0


class Part(NamedTuple):
    """What the blocks since the part before came to.

    Parameters
    ----------
    batches : list of (Batch, Place)
        Those that the last of them completed.
    skipped : int
        Malformed lines so far.
    fraction : float
        Of the bytes of all sources.
    """

    batches: list[tuple[Batch, Place]]
    skipped: int
    fraction: float


Parts = Generator[Part | None, None, None]


class Pieces:
    """A queue of examples: pieces go in, batches come out, in order."""

    def __init__(self) -> None:
        self.rows = 0  # that wait
        self._pieces: deque[Batch] = deque()

    def add(self, piece: Batch) -> None:
        """Put in."""
        if len(piece):
            self._pieces.append(piece)
            self.rows += len(piece)

    def take(self, rows: int) -> Batch:
        """Take out the first rows, of those that there are."""
        taken: list[Batch] = []
        self.rows -= rows
        while rows:
            piece = self._pieces.popleft()
            if len(piece) > rows:
                self._pieces.appendleft(rows_of(piece, rows, len(piece)))
                piece = rows_of(piece, 0, rows)
            taken.append(piece)
            rows -= len(piece)
        return joined(taken)


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


def joined(pieces: Sequence[Batch]) -> Batch:
    """Put batches together in arrays of their own; weights that are all 1 are left out."""
    ends = np.cumsum([0, *(piece.nnz for piece in pieces)])
    indptr = [piece.indptr[1:] + end for piece, end in zip(pieces, ends[:-1], strict=True)]
    weights = joined_or_none([piece.weights for piece in pieces], [len(piece) for piece in pieces])
    return Batch(
        np.concatenate([piece.labels for piece in pieces]),
        np.concatenate([np.zeros(1, np.int64), *indptr]),
        np.concatenate([piece.keys for piece in pieces]),
        joined_or_none([piece.values for piece in pieces], [piece.nnz for piece in pieces]),
        None if weights is None or np.all(weights == 1) else weights,
        _joined_fields([piece.fields for piece in pieces]),
    )


def _joined_fields(arrays: Sequence[NDArray[np.uint64] | None]) -> NDArray[np.uint64] | None:
    given = [array for array in arrays if array is not None]
    if given and len(given) < len(arrays):
        raise ValueError("some batches tell the fields of their features, and some do not: take all from one reader")
    return np.concatenate(given) if given else None


def joined_or_none(arrays: Sequence[NDArray[np.float32] | None], lengths: Sequence[int]) -> NDArray[np.float32] | None:
    """Join arrays, of which None stands for so many ones; None if all do."""
    if all(array is None for array in arrays):
        return None
    given = [np.ones(n, np.float32) if array is None else array for array, n in zip(arrays, lengths, strict=True)]
    return np.concatenate(given)
