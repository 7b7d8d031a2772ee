"""The keys of one batch, sorted by hash and deduplicated once for any number of requests.

Threads: a batch is immutable; any number of readers.
"""

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.table.arrays import AnyRows, Keys, as_floats, as_keys, as_out


class KeyBatch:
    """The keys of one batch in hash order, each once: sort once, then pull and push many times.

    Made by ``store.key_batch(keys)``; fits every table of that store. Immutable; safe from any thread.

    Examples
    --------
    >>> import shoal
    >>> with shoal.local() as store:
    ...     batch = store.key_batch(np.array([7, 3, 7], np.uint64))
    ...     batch.sum(np.array([[1.0], [5.0], [2.0]], np.float32))[batch.inverse].ravel().tolist()
    [3.0, 5.0, 3.0]
    """

    __slots__ = ("_native", "_workers")

    def __init__(self, keys: Keys, slots: int, workers: _core.ThreadPool, last: int | None = None) -> None:
        self._native = _core.KeyBatch(as_keys(keys), slots, workers, last)
        self._workers = workers

    @classmethod
    def of(cls, native: _core.KeyBatch, workers: _core.ThreadPool) -> "KeyBatch":
        """Wrap an existing engine object, with the threads of its store."""
        batch = cls.__new__(cls)
        batch._native = native
        batch._workers = workers
        return batch

    def __len__(self) -> int:
        """Count the unique keys."""
        return len(self._native)

    @property
    def native(self) -> _core.KeyBatch:
        """The engine's object, for the kernels that take one."""
        return self._native

    @property
    def input_size(self) -> int:
        """Number of input keys, duplicates counted."""
        return self._native.input_size

    @property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """Hashes uint64[m], strictly ascending. Read-only."""
        return self._native.hashes

    @property
    def keys(self) -> npt.NDArray[np.uint64]:
        """Unique keys uint64[m] in hash order."""
        return _core.unmix(self._native.hashes)

    @property
    def inverse(self) -> npt.NDArray[np.uint32]:
        """Index of the unique key of every input key: uint32[n]. Read-only."""
        return self._native.inverse

    @property
    def offsets(self) -> npt.NDArray[np.uint64]:
        """Offsets of each slot's hashes: uint64[slots + 1]. Read-only."""
        return self._native.offsets

    def counts(self) -> npt.NDArray[np.uint32]:
        """Count the occurrences of each unique key: uint32[m]."""
        return self._native.counts()

    def is_of(self, keys: Keys) -> bool:
        """Return whether it was made from exactly these keys, in this order; much faster than sorting them again.

        Parameters
        ----------
        keys : uint64[n] or int64[n]

        Returns
        -------
        bool
        """
        return self._native.is_of(as_keys(keys), self._workers)

    def sum(self, grads: AnyRows) -> AnyRows:
        """Add up the rows of each unique key: floats in order of occurrence, in float64, rounded once.

        Parameters
        ----------
        grads : float32[n, dim] or int64[n, dim]
            One row for every input key. Sums of integers are modulo 2^64.

        Returns
        -------
        float32[m, dim] or int64[m, dim]
        """
        array = np.asarray(grads)
        if array.dtype not in (np.float32, np.int64) or array.ndim != 2 or len(array) != self.input_size:
            raise ValueError(f"sum takes float32[{self.input_size}, dim], got {array.dtype}{list(array.shape)}")
        sums = np.empty((len(self), array.shape[1]), array.dtype)
        floats = as_floats(np.ascontiguousarray(array))
        self._native.sum(floats, floats.shape[1], as_floats(sums), self._workers, array.dtype == np.int64)
        return sums

    def expand(self, rows: AnyRows, *, out: AnyRows | None = None) -> AnyRows:
        """Copy the row of each unique key to every input key.

        Parameters
        ----------
        rows : float32[m, dim] or int64[m, dim]
        out : array of that type [n, dim], optional

        Returns
        -------
        float32[n, dim] or int64[n, dim]
        """
        array = np.asarray(rows)
        if array.dtype not in (np.float32, np.int64) or array.ndim != 2 or len(array) != len(self):
            raise ValueError(f"expand takes float32[{len(self)}, dim], got {array.dtype}{list(array.shape)}")
        expanded = as_out(out, (self.input_size, array.shape[1]), "expand", array.dtype)
        floats = as_floats(np.ascontiguousarray(array))
        self._native.expand(floats, floats.shape[1], as_floats(expanded), self._workers)
        return expanded
