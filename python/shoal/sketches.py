"""Sketches: approximate counts of more keys than tables could hold, in memory that does not depend on their number.

    keys, counts --add--> buffer of this worker --flush--> int64 table, in blocks --pull--> estimates

Threads: safe from any thread.
"""

import math
import re
import threading
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.scalars import plain
from shoal.table.arrays import Keys, as_keys, as_rows
from shoal.table.future import Future, no_op
from shoal.table.table import Table

if TYPE_CHECKING:
    from shoal.store.base import Store

__all__ = ["CountMin"]

Integers = npt.NDArray[np.int64]

# 2 KB: a hash adds 0.4 % on the wire, and a query of a few keys reads little more than it needs.
_BLOCK = 256
_CHUNK = 1 << 14  # keys whose positions are computed at a time

# The seed, the depth and the width are the seed of the table, which its description keeps wherever the table goes.
_SEED_BITS, _DEPTH_BITS, _WIDTH_BITS = 24, 6, 34


class CountMin:
    """A count-min sketch on a store: counts of keys that are never too small, and rarely much too large.

    The sketch has ``depth`` rows of ``width`` counters, and each row a hash function. An update adds to one counter of
    each row, and the least of a key's counters estimates its count. With counts that add up to N, an estimate exceeds
    the true count by at most ``epsilon * N``, except with probability ``delta`` for each key, where
    ``epsilon = e / width`` and ``delta = exp(-depth)`` (Cormode, Muthukrishnan, J. Algorithms 2005).

    Parameters
    ----------
    store : Store
    name : str
        Of the sketch's table, unique in the store. Workers that name the same sketch share it, and a loaded table is
        used as it is.
    epsilon, delta : float, optional
        Above 0 and below 1; the smallest width and depth with this error are chosen.
    width, depth : int, optional
        In place of ``epsilon`` and ``delta``: 1 to 2^34 and 1 to 63.
    seed : int
        Of the hash functions, 0 to 2^24 - 1.

    Raises
    ------
    ValueError
        The table exists with another width, depth or seed.

    Notes
    -----
    Updates are added up in a buffer of the sketch's size in this process. :meth:`flush` pushes the buffer;
    :meth:`query` includes it even before. Under BSP flushed counts are visible from the next clock on.

    Examples
    --------
    >>> import shoal
    >>> with shoal.local() as store:
    ...     sketch = shoal.sketches.CountMin(store, "clicks", epsilon=1e-3, delta=1e-2)
    ...     sketch.update(np.array([7, 9, 7]))
    ...     sketch.update(np.array([7, 8]), np.array([10, 1]))
    ...     sketch.flush().result()
    ...     print(sketch.query(np.array([7, 8, 9, 10])).tolist(), sketch.total(), sketch.width, sketch.depth)
    [12, 1, 1, 0] 14 2719 5
    """

    def __init__(
        self,
        store: "Store",
        name: str,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        width: int | None = None,
        depth: int | None = None,
        seed: int = 0,
    ) -> None:
        if epsilon is not None and delta is not None and width is None and depth is None:
            for what, bound in (("epsilon", epsilon), ("delta", delta)):
                if not 0 < bound < 1:
                    raise ValueError(f"sketch {name!r} needs {what} above 0 and below 1, got {bound!r}")
            width, depth = math.ceil(math.e / epsilon), math.ceil(-math.log(delta))
        elif epsilon is not None or delta is not None or width is None or depth is None:
            raise ValueError(f"sketch {name!r} takes epsilon and delta, or width and depth: pass both of a pair")
        self._width = _checked(name, "width", width, 1, (1 << _WIDTH_BITS) + 1)
        self._depth = _checked(name, "depth", depth, 1, 1 << _DEPTH_BITS)
        self._seed = _checked(name, "seed", seed, 0, 1 << _SEED_BITS)
        self._name = name
        self._blocks = -(-self._width * self._depth // _BLOCK)
        self._lock = threading.Lock()  # guards the buffer
        # Before _lock: a reader finds each count in the buffer or in the table, not in both.
        self._flush_lock = threading.Lock()
        self._buffer: Integers = np.zeros(self._blocks * _BLOCK, np.int64)  # fails before there is a table
        self._table = self._find_table(store)
        self._flushing: Future[None] | None = None

    def __repr__(self) -> str:
        return f"CountMin({self._name!r}, width={self._width}, depth={self._depth}, seed={self._seed})"

    def _find_table(self, store: "Store") -> Table:
        packed = (self._width - 1) << (_DEPTH_BITS + _SEED_BITS) | self._depth << _SEED_BITS | self._seed
        try:
            return store.table(self._name, dim=_BLOCK, dtype="int64", seed=packed)
        except ValueError as error:
            found = re.search(f"exists with seed ([0-9]+) instead of {packed}:", str(error))
            if found is None:
                raise
            known = int(found[1])
            raise ValueError(
                f"sketch {self._name!r} exists with width {(known >> (_DEPTH_BITS + _SEED_BITS)) + 1}, depth "
                f"{known >> _SEED_BITS & ((1 << _DEPTH_BITS) - 1)} and seed {known & ((1 << _SEED_BITS) - 1)}, "
                f"not {self._width}, {self._depth} and {self._seed}: pass these, or choose another name"
            ) from error

    @property
    def name(self) -> str:
        """Its name in the store, which is also its table's name."""
        return self._name

    @property
    def width(self) -> int:
        """Counters in a row."""
        return self._width

    @property
    def depth(self) -> int:
        """Number of rows."""
        return self._depth

    @property
    def epsilon(self) -> float:
        """Error of an estimate as a share of the sum of all counts, exceeded with probability `delta`."""
        return math.e / self._width

    @property
    def delta(self) -> float:
        """Probability that an estimate's error is above `epsilon` of the sum of all counts."""
        return math.exp(-self._depth)

    @property
    def seed(self) -> int:
        """Seed of the hash functions."""
        return self._seed

    @property
    def table(self) -> Table:
        """The table of the counters: keys 0, 1, 2, ... are blocks of 256 counters, row by row of the sketch."""
        return self._table

    def update(self, keys: Keys, counts: npt.ArrayLike | None = None) -> None:
        """Count keys, in the buffer of this process.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            Any order, duplicates allowed.
        counts : int64[n], optional
            What to add for each key; default: 1. Negative counts subtract earlier ones: the bounds of estimates hold as
            long as no key's true count is negative.

        Notes
        -----
        Sums are modulo 2^64. One call at a time adds; it divides the rows among the store's threads.
        """
        checked = as_keys(keys)
        amounts: Integers | None = None
        if counts is not None:
            amounts = as_rows(counts, (len(checked), 1), self._name, "counts", np.int64).reshape(-1)
        _ = self._table.shard  # raises if the store was closed or is read-only
        with self._lock:
            _core.count_min_add(
                checked, amounts, self._seed, self._depth, self._width, self._buffer, self._table.workers
            )

    def flush(self) -> Future[None]:
        """Push what was counted since the last call; blocks without a count are not sent.

        Returns
        -------
        Future
            ``result()`` returns once it is added: exactly once, as every push.
        """
        _ = self._table.shard
        with self._flush_lock, self._lock:
            blocks = self._buffer.reshape(-1, _BLOCK)
            keys = np.flatnonzero(blocks.any(axis=1))
            if len(keys) == 0:
                return Future(None, no_op)
            pushed = self._table.push(keys, blocks[keys])
            blocks[keys] = 0
            self._flushing = pushed
            return pushed

    def query(self, keys: Keys) -> Integers:
        """Estimate the counts of keys.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            Duplicates allowed.

        Returns
        -------
        int64[n]
            Not below the true counts of what has been flushed and is visible under the store's consistency, plus what
            this sketch has counted since its last flush.

        Notes
        -----
        Reads the blocks that the keys need; from half of the blocks on, all of them.
        """
        checked = as_keys(keys)
        if 2 * len(checked) * self._depth < self._blocks:
            positions = self._positions(checked)
            blocks, index = np.unique(positions // _BLOCK, return_inverse=True)
            rows = self._read(blocks)
            return np.asarray(rows[index.reshape(positions.shape), positions % _BLOCK].min(axis=0))
        counters = self._read(np.arange(self._blocks)).reshape(-1)
        estimates = np.empty(len(checked), np.int64)
        for begin in range(0, len(checked), _CHUNK):
            end = begin + _CHUNK
            counters[self._positions(checked[begin:end])].min(axis=0, out=estimates[begin:end])
        return estimates

    def counters(self) -> Integers:
        """Read all counters.

        Returns
        -------
        int64[depth, width]
            As for :meth:`query`, with what this sketch has counted since its last flush.
        """
        counters = self._read(np.arange(self._blocks)).reshape(-1)
        return counters[: self._depth * self._width].reshape(self._depth, self._width)

    def total(self) -> int:
        """Return the sum of all counts, N of the error bound."""
        blocks = np.arange(-(-self._width // _BLOCK))  # those of the first row, to which every count was added
        return int(self._read(blocks).reshape(-1)[: self._width].sum())

    def merge(self, other: "CountMin") -> None:
        """Count what another sketch has counted, such as one of another day or another store.

        Parameters
        ----------
        other : CountMin
            Of the same width, depth and seed. It is read and not changed.
        """
        if not isinstance(other, CountMin):
            raise TypeError(f"sketch {self._name!r} merges another CountMin, got {type(other).__name__}")
        if (other.width, other.depth, other.seed) != (self._width, self._depth, self._seed):
            raise ValueError(f"sketches of different width, depth or seed cannot be merged: {self} and {other}")
        counters = other.counters().reshape(-1)
        with self._lock:
            self._buffer[: len(counters)] += counters

    def _positions(self, keys: npt.NDArray[np.uint64]) -> Integers:
        return _core.count_min_positions(keys, self._seed, self._depth, self._width, self._table.workers)

    def _read(self, blocks: Integers) -> Integers:
        """Read blocks with what is not flushed: int64[n, 256]."""
        with self._flush_lock:
            if self._flushing is not None:
                self._flushing.result()  # a pull could overtake it
            rows: Integers = self._table.pull(blocks)
            with self._lock:
                rows += self._buffer.reshape(-1, _BLOCK)[blocks]
        return rows


def _checked(name: str, what: str, number: int, least: int, end: int) -> int:
    number = plain(number)
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number < end:
        raise ValueError(f"sketch {name!r} needs a {what} from {least} to {end - 1}, got {number!r}")
    return number
