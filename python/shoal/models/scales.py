"""Scales of features: the numbers by which a normalized model divides values.

The length of a step of FTRL or Adagrad hardly depends on the magnitude of x, so a column in cents needs other settings
than one in dollars. A normalized model learns from x_k / s_k, where s_k is the root mean square of the key's values:

    s_k = sqrt(sum of v x_k^2 / sum of v)      v the example's weight; over the occurrences of key k so far

    table NAME-scales    dim 2    (sum of v, sum of v x^2 times 2^-40); a row for keys whose values are not all 1

When s_k grows, the weight of one unit of x_k shrinks by as much, which is the correction of the normalized updates of
Ross, Mineiro, Langford (UAI 2013, Algorithm 2, lines 4 to 6); their s_k is the greatest |x_k|. A mean square is a sum,
so it is pushed like a gradient: the workers of a cluster sum into one table, and checkpoints and exports, which have
the tables of a model, have its scales. A rare outlier changes it less.

Invariants
    I1  The scales of a batch include its own values: |x_k / s_k| <= sqrt(n) at the n-th occurrence, at first 1.
    I2  A key's scale is fixed after OCCURRENCES occurrences: later steps use the same unit, and sums stay where float32
        additions are accurate.
    I3  A key gets its row in the first batch in which its squares are not 1 on average; until then, and always if
        all its values are 1, they stay unchanged, to the bit.
    I4  Values that are all 2^k times as large give the same bits, unless a batch has only ones: sums scale exactly.

Threads: immutable; those of the table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import structs

from shoal.data import Batch
from shoal.optim import SGD
from shoal.store.base import Store
from shoal.table.arrays import Rows
from shoal.table.key_batch import KeyBatch
from shoal.table.table import Table

OCCURRENCES = 2**20
# Squares are stored times this: values from 1e-12 to LARGEST then have sums within float32, of 10^12 occurrences.
_SHRINK = 2.0**-40
LARGEST = 2.0**63

Sums = npt.NDArray[np.float64]


def scales_name(table: str) -> str:
    """Return the name of the table of scales that belongs to a table of linear weights."""
    return table + "-scales"


def make_table(store: Store, name: str, seed: int) -> Table:
    """Make the table of the scales that belongs to a table of linear weights, or find it."""
    own = scales_name(name)
    if not store.sends_exactly(own):
        raise ValueError(
            f"filters that round or drop would change table {own!r}, by which a normalized model divides: leave out "
            f"gradients, weights and threshold, or set filters for the other tables by name"
        )
    there = store.tables.get(own)
    # A table of an export is only read: its rule is unknown.
    rule = there.optimizer if there is not None and isinstance(there.optimizer, SGD) else SGD(1.0)
    return store.table(own, dim=2, optimizer=rule, seed=seed)


class Scales:
    """The scales of a model's features."""

    __slots__ = ("table",)

    def __init__(self, table: Table) -> None:
        self.table = table

    @staticmethod
    def normalized(batch: Batch, keys: KeyBatch, rows: Rows) -> Batch:
        """Return a batch with values divided by their scales, from the table's rows; the same batch if each is 1."""
        return _divided(batch, keys, _scales_of(rows.astype(np.float64)))

    @staticmethod
    def learn(batch: Batch, keys: KeyBatch, rows: Rows) -> tuple[Batch, Sums]:
        """As `normalized`, with scales that include this batch; also return its sums, for `push`."""
        known = rows.astype(np.float64)
        added = _sums_of(batch, keys)
        is_fixed = known[:, 0] >= OCCURRENCES
        has_scale = (known[:, 0] > 0) | (added[:, 1] != added[:, 0] * _SHRINK)
        added[is_fixed | ~has_scale] = 0
        return _divided(batch, keys, _scales_of(known + added)), added

    def push(self, keys: KeyBatch, added: Sums) -> None:
        """Add sums to the scales; only keys that need a row get one."""
        some = np.flatnonzero(added[:, 0])
        if len(some):
            self.table.push(keys.keys[some], -added[some].astype(np.float32))  # the tick raises its error

    def items(self) -> tuple[npt.NDArray[np.uint64], Sums]:
        """Read the known scales: keys in hash order, and the divisors of their values."""
        keys, scales = [np.empty(0, np.uint64)], [np.empty(0)]
        for some_keys, rows in self.table.items():
            keys.append(some_keys)
            scales.append(_scales_of(rows.astype(np.float64)))
        return np.concatenate(keys), np.concatenate(scales)


def _sums_of(batch: Batch, keys: KeyBatch) -> Sums:
    """Sum weights, and weighted squares of values, of each unique key: float64[m, 2]."""
    which = keys.inverse[: batch.nnz]
    times = None if batch.weights is None else np.repeat(batch.weights.astype(np.float64), np.diff(batch.indptr))
    counts = np.bincount(which, times, len(keys)).astype(np.float64)
    if batch.values is None:
        return np.stack([counts, counts * _SHRINK], axis=1)
    values = batch.values.astype(np.float64)
    if len(values) and max(values.max(), -values.min()) > LARGEST:
        at = int(np.argmax(np.abs(values)))
        raise ValueError(
            f"the value {values[at]:.4g} of key {batch.keys[at]} is too large to be normalized: divide the feature by "
            f"a constant, so that it stays below {LARGEST:.2g}"
        )
    squares = values * values
    return np.stack([counts, np.bincount(which, squares if times is None else times * squares, len(keys)) * _SHRINK], 1)


def _scales_of(sums: Sums) -> Sums:
    """Compute the scale of each row of sums; 1 for an empty row."""
    is_known = (sums[:, 0] > 0) & (sums[:, 1] > 0)
    squares = np.divide(sums[:, 1], sums[:, 0], out=np.full(len(sums), _SHRINK), where=is_known)
    scales: Sums = np.sqrt(squares / _SHRINK)
    return scales


def _divided(batch: Batch, keys: KeyBatch, scales: Sums) -> Batch:
    if np.all(scales == 1):
        return batch
    each = scales[keys.inverse[: batch.nnz]]
    values = np.float64(1) / each if batch.values is None else batch.values / each
    return structs.replace(batch, values=values.astype(np.float32))
