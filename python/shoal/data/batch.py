"""Batch: some examples as arrays, features row by row (CSR)."""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

_LEFT_OUT = np.float32(-np.inf)  # the label of an example that is left out of its batch, once that is cut


class Batch(msgspec.Struct, frozen=True, eq=False):
    """Some examples, each with a label and any number of (key, value) features.

    Example ``i`` has the features ``keys[indptr[i]:indptr[i + 1]]``.

    Parameters
    ----------
    labels : float32[n]
        0 or 1. NaN from a reader without labels (`shoal.data.Reader.unlabelled`), whose batches can only be predicted.
    indptr : int64[n + 1]
        From 0 to nnz, never falling.
    keys : uint64[nnz]
        Any keys, in any order, duplicates allowed.
    values : float32[nnz] or None
        None: every value is 1.
    weights : float32[n] or None, optional
        Importance of each example, 0 or more; None: all 1.
    fields : uint64[nnz] or None, optional
        The field of each feature, from a reader with fields (`shoal.data.Reader.with_fields`).

    Raises
    ------
    ValueError
        An array has a wrong dtype or length.

    Notes
    -----
    The batch owns its arrays: the reader that made them does not use them again.

    Examples
    --------
    >>> import numpy as np
    >>> batch = Batch(np.array([1, 0], np.float32), np.array([0, 2, 3]), np.array([7, 9, 7], np.uint64), None)
    >>> len(batch), batch.nnz
    (2, 3)
    """

    labels: NDArray[np.float32]
    indptr: NDArray[np.int64]
    keys: NDArray[np.uint64]
    values: NDArray[np.float32] | None
    weights: NDArray[np.float32] | None = None
    fields: NDArray[np.uint64] | None = None

    def __post_init__(self) -> None:
        _check("labels", self.labels, np.dtype(np.float32))
        _check("indptr", self.indptr, np.dtype(np.int64), len(self.labels) + 1)
        _check("keys", self.keys, np.dtype(np.uint64))
        if self.values is not None:
            _check("values", self.values, np.dtype(np.float32), len(self.keys))
        if self.weights is not None:
            _check("weights", self.weights, np.dtype(np.float32), len(self.labels))
        if self.fields is not None:
            _check("fields", self.fields, np.dtype(np.uint64), len(self.keys))
        if self.indptr[0] != 0 or self.indptr[-1] != len(self.keys):
            raise ValueError(
                f"indptr runs from {self.indptr[0]} to {self.indptr[-1]}: it must run from 0 to {len(self.keys)}, the "
                f"number of keys"
            )

    def __len__(self) -> int:
        """Examples in the batch."""
        return len(self.labels)

    @property
    def nnz(self) -> int:
        """Features in the batch, all examples together."""
        return len(self.keys)


def take(batch: Batch, rows: NDArray[np.int64]) -> Batch:
    """Return the examples ``rows`` of a batch, in that order, with their features and weights."""
    begins = batch.indptr[rows]
    lengths = batch.indptr[rows + 1] - begins  # of these rows only: a shuffle selects few at a time from a large batch
    indptr = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    entries = np.repeat(begins - indptr[:-1], lengths)
    entries += np.arange(len(entries))
    return Batch(
        batch.labels[rows],
        indptr,
        batch.keys[entries],
        None if batch.values is None else batch.values[entries],
        None if batch.weights is None else batch.weights[rows],
        None if batch.fields is None else batch.fields[entries],
    )


def rows_with(batch: Batch, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the examples, ascending, that have any of some keys."""
    entries = np.flatnonzero(np.isin(batch.keys, keys))
    return np.unique(np.searchsorted(batch.indptr, entries, side="right") - 1)


def marked(batch: Batch, lines: NDArray[np.int64], spans: NDArray[np.int64]) -> Batch:
    """Mark the examples of lines in any of some spans, each its first and its last line, for `left_out`."""
    before = np.searchsorted(spans[:, 0], lines, side="right") - 1
    found = (before >= 0) & (lines <= spans[before, 1])
    return structs.replace(batch, labels=np.where(found, _LEFT_OUT, batch.labels)) if found.any() else batch


def left_out(batch: Batch, keys: NDArray[np.uint64]) -> Batch:
    """Return a batch without the examples that are `marked`, or have any of some keys."""
    found = np.union1d(rows_with(batch, keys), np.flatnonzero(batch.labels == _LEFT_OUT))
    return take(batch, np.delete(np.arange(len(batch)), found)) if len(found) else batch


def _check(name: str, array: NDArray[np.generic], dtype: np.dtype[np.generic], length: int | None = None) -> None:
    if array.dtype != dtype or array.ndim != 1 or (length is not None and len(array) != length):
        want = f"{dtype}[{'any length' if length is None else length}]"
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}: pass {want}")
