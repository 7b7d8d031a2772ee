"""The rows of a fit: what an int64 table "NAME-progress" says of it. Workers write them (models/progress.py).

    kind, numbers              a row of 32 whole numbers
    HEADER                     `Header`: which fit and pass, and the number of its present division among workers
    WORKER rank                what the others need to know of a worker (models/team.py)
    SHARE  half, number        owner, flags, a share of the pass (models/shares.py); as SAVED_SHARE, for a checkpoint
    SUMS   model, pass         features, malformed lines, examples learned twice, late ones; `StreamMetrics.totals`
    COUNTS model, pass, block  32 bins of `StreamMetrics.histogram`
    STATE  half, rank, block   what learning changes in one worker alone
    FILES  split, 0, block     of a folder that is followed: digests of the names of 32 files, in the order of reading
    NOTE   what, rank, block   bytes
    STOP                       the number of the division within which a stream is to end

Rows of a division are in one of two halves, in turns: those before it stay until it is complete. Those that a clock
writes are in one slot, and so on one server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import msgspec

from shoal.base.exact_sum import ExactSum

DIM = 32
SUFFIX = "-progress"  # to the name of a model, in that of its table

HEADER, WORKER, SHARE, SAVED_SHARE, SUMS, SAVED_SUMS, COUNTS, STATE, NOTE, STOP, FILES = range(1, 12)

# Fields of a row of SUMS. From AUC_EXAMPLES on: the sums over workers of n, and of AUC x n x 2^20, of the examples of
# each that it has measured an AUC of.
FEATURES, SKIPPED, REPEATED, LATE, TOTALS = range(5)
AUC_EXAMPLES, AUC_SUM = 30, 31
AUC_UNIT = 1 << 20

PASSES = 1 << 12  # whose sums have places of their own: those of a pass are erased before it begins
_TOGETHER = frozenset({HEADER, STOP, WORKER, SHARE, SAVED_SHARE, SUMS, SAVED_SUMS})


def is_progress(table: str, *, is_integer: bool) -> bool:
    """Whether a table of this name has rows of fits, which are no weights."""
    return is_integer and table.endswith(SUFFIX)


def is_together(kind: int) -> bool:
    """Whether all rows of a kind are in the first slot: what a clock writes is one message, and is read in one."""
    return kind in _TOGETHER


def place(kind: int, first: int = 0, second: int = 0, block: int = 0) -> int:
    """Return what a row's key is made of: of those in the first slot the hash, of others the key itself.

    ``first`` and ``second`` are below 2^16, ``block`` below 2^12, of rows that are not together below 2^24.
    """
    if is_together(kind):
        return kind << 44 | first << 28 | second << 12 | block
    return kind << 56 | first << 40 | second << 24 | block


class Header(msgspec.Struct, kw_only=True):
    """The first row: it is written last, so what it names is complete."""

    # job: That wrote it. fit: Number of the fit among those of the model in that job, from 1; 0: there is none.
    job: int = 0
    fit: int = 0
    is_over: int = 0
    # epoch: The pass, from 0. epochs: How many are planned.
    epoch: int = 0
    epochs: int = 0
    # Number of the division of the pass among workers, through all fits of the table.
    division: int = 0
    # shares, workers: How many shares there are, and workers that may own them.
    shares: int = 0
    workers: int = 0
    models: int = 0
    # known: Examples that the models had learned from when the pass began: the least of all.
    known: int = 0
    # meetings: The meeting of the workers that publishes this header has this number.
    meetings: int = 0
    # clock: Of the workers at that meeting, under BSP and SSP. clocks: Of the pass before it.
    clock: int = 0
    clocks: int = 0
    # Whether pushes take effect when they arrive (SSP, ASP), so that positions follow behind.
    lags: int = 0
    # Of `StreamMetrics`: 0 of two classes, else their number.
    classes: int = 0

    def to_row(self) -> list[int]:
        """Return the row."""
        values = [int(getattr(self, name)) for name in self.__struct_fields__]
        return values + [0] * (DIM - len(values))

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Self:
        """Read a row."""
        return cls(**{name: int(value) for name, value in zip(cls.__struct_fields__, row, strict=False)})


class PassMetrics(NamedTuple):
    """What a row of SUMS says of a model in a pass, all workers together."""

    # repeated: Examples that it has learned from twice.
    examples: int
    repeated: int
    # loss: The mean; None before the first example.
    loss: float | None = None
    # auc: Of two classes: the mean of the workers' own, by examples; None while no worker has one.
    auc: float | None = None
    # accuracy: Of several classes.
    accuracy: float | None = None

    @classmethod
    def from_row(cls, row: Sequence[int], classes: int) -> Self:
        """Read a row; ``classes`` is that of the header."""
        examples, repeated = max(0, row[TOTALS]), max(0, row[REPEATED])
        begins = range(TOTALS + 1, TOTALS + 1 + 3 * ExactSum.INTEGERS, ExactSum.INTEGERS)
        first, second, third = (float(ExactSum.of_whole(row[begin : begin + ExactSum.INTEGERS])) for begin in begins)
        if first <= 0:
            return cls(examples, repeated)
        if classes:  # weight, loss, weight of what is right
            return cls(examples, repeated, loss=second / first, accuracy=third / first)
        n = row[AUC_EXAMPLES]  # weight, that of positives, loss
        return cls(examples, repeated, loss=third / first, auc=row[AUC_SUM] / (n * AUC_UNIT) if n > 0 else None)
