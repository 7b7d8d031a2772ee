"""Team: the workers of a store that fit one model together. They meet at barriers, and end passes at a common clock.

A worker's clock is a batch. Under BSP and SSP a worker that stops ticking blocks the others, and splits differ in
length: a worker at the end of its own batches therefore ticks empty clocks until all others have ended theirs.

    worker 0    batch  batch  batch  batch  ended                         each pushes, within the clock, what it has
    worker 1    batch  batch  ended  empty  empty     |meeting            ended, and how many deaths it knows of

Under BSP all see the same rows at the same clock, and so leave at the same clock. Under SSP they see them at different
clocks, and continue to a common clock, which each computes from the rows. Under ASP they meet.

A worker that has died, or has ended its fit early, is *gone*. All learn of deaths in one order, so their number says
which ones a worker knows of: the others leave the pass at the clock by which all but the first n of the gone have ended
and know of these n. At a meeting the scheduler tells all who was absent. The least of those present *leads*: it alone
does what is done once.

If the number of workers may change, a change ends the job, and another one continues the fit from its rows: at each
clock and after each meeting a worker that is told of one leaves by `WorkersMoveError`.

Without other workers nobody is waited for; nor in a loop over `Store.splits`, where each fits its split by itself.

Threads: the one that fits.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from shoal.base.fit_rows import DIM, WORKER
from shoal.consistency import SSP
from shoal.errors import DeadlineExceededError, ShoalError, WorkerLostError, WorkersChangedError
from shoal.models.progress_rows import ProgressRows, Row, key
from shoal.store.base import Store

START_AGAIN = "start the fit again, with resume=True (--resume) if it writes checkpoints"
_LONGEST_SECONDS = 86400.0  # to wait while others measure; a worker that dies meanwhile is not waited for

# Fields of a worker's row; they are valid in its job.
_JOB, _ENDED, _CLOCK, _GONE, _SWEPT = range(5)

_fits: WeakKeyDictionary[Store, Counter[str]] = WeakKeyDictionary()  # begun in each store, by name of the model


class WorkersMoveError(Exception):
    """The number of workers changes, or one has died: the job that follows continues from the rows."""


class Tolerance(NamedTuple):
    """What a kind of fit withstands; ``remedy`` names one that withstands more."""

    loss: bool = True  # of a worker: the others learn from what it has left
    replacement: bool = True  # of one that died, by a process that continues where it was
    change: bool = True  # of the number of workers
    remedy: str = ""


class Team:
    """The workers of a store that fit a model together."""

    def __init__(self, store: Store, name: str, tolerance: Tolerance) -> None:
        member, job_name = store.member, store.member.job_name
        is_split = member.takes_splits
        # Several jobs may fit models of one name, on the same tables, and have the same ranks.
        self.rows = ProgressRows(store, f"{name}@{job_name}" if job_name else name)
        self.store = store
        # Whether this worker waits for no others.
        self.is_alone = store.num_workers == 1 or is_split
        self.may_change = member.workers_range is not None and not is_split
        # Whether others can continue this fit, or watch it: that of a worker of a cluster.
        self.can_continue = not is_split and member.job > 0
        self._loss = tolerance.loss
        self._meeting = f"fit of {name}"
        self._absent: frozenset[int] = frozenset()
        self._row: Row | None = None  # of this worker; None: not read yet
        if self.may_change and not tolerance.change:
            least, most = member.workers_range or (1, 1)
            raise ShoalError(
                f"the job may have {least} to {most} workers, and this kind of fit needs a fixed number"
                f"{tolerance.remedy}: pass one number of workers (--workers {store.num_workers})"
            )
        if member.is_replacement and not is_split and not tolerance.replacement:
            raise ShoalError(
                f"worker {store.rank} has replaced a worker that died, at clock {member.joined_at}, and fits of this "
                f"kind cannot be continued by another worker{tolerance.remedy}: end all workers, and resume from the "
                "last checkpoint"
            )
        if not self.is_alone and member.joined_at > 0 and not member.is_replacement:
            raise ShoalError(
                f"worker {store.rank} replaced a worker that had died, at clock {member.joined_at}: the others "
                "continue their fit without it, so end this process. If workers may join later, pass their least and "
                "greatest number (--workers 2:8), or share the data by store.splits(reader)"
            )
        self._fits = _fits.setdefault(store, Counter())
        self._name = name
        # Number of this fit among those of the model in this store, from 1.
        self.number = self._fits[name] + 1

    def begun(self) -> None:
        """Record that all workers have begun the fit; before that an error leaves its number to the next one."""
        self._fits[self._name] = self.number

    # ---- who is there ------------------------------------------------------------------------------------------------

    @property
    def present(self) -> list[int]:
        """The ranks of those that were at the last meeting."""
        if self.is_alone:
            return [self.store.rank]
        return [rank for rank in range(self.store.num_workers) if rank not in self._absent]

    @property
    def leads(self) -> bool:
        """Whether this worker does what is done once for all."""
        return self.present[0] == self.store.rank

    @property
    def workers_change(self) -> bool:
        """Whether all are to leave the job, after a clock: another one continues."""
        return self.may_change and self.store.member.workers_change

    @contextlib.contextmanager
    def fitting(self, hand_over: Callable[[], bool], is_told_to_leave: Callable[[], bool]) -> Iterator[None]:
        """Leave the job if the workers move; announce an error that ends the fit early.

        ``hand_over`` returns whether the job that follows has anything to continue.
        """
        self.store.member.leaves_early = False
        try:
            yield
        except WorkersMoveError:
            begun, leaves = hand_over(), is_told_to_leave()
            self.store.hand_over(returns=not leaves, begun=begun)
            what = "the number of workers changes"
            if leaves:
                what = "this worker leaves the fit, and the others continue from its position"
            raise WorkersChangedError(what, leaves=leaves) from None
        except BaseException:
            self.store.member.leaves_early = True
            raise

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Make one pass together with the others: meet them, and announce an error that ends it early."""
        self.meet(patiently=False)
        self.begun()
        self.store.member.leaves_early = False
        try:
            yield
        except BaseException:
            self.store.member.leaves_early = True
            raise

    # ---- meetings ----------------------------------------------------------------------------------------------------

    @property
    def meetings(self) -> int:
        """How many this worker has come to, in all fits of the model in this job."""
        return self.store.member.barriers.get(self._meeting, 0)

    def came_to(self, meetings: int, barriers: dict[str, int], present: Sequence[int]) -> None:
        """Continue as a worker that has come to so many meetings, and has passed these other barriers."""
        self.store.member.barriers = {**barriers, self._meeting: meetings}
        self._absent = frozenset(range(self.store.num_workers)) - frozenset(present)

    @property
    def is_past(self) -> bool:
        """Whether all others, and the predecessor of this worker, have been at the next meeting."""
        return self.store.member.is_past(self._meeting)

    def meet(self, *, patiently: bool = True) -> None:
        """Wait for all workers; ``patiently``: longer than for any other call, since they may be measuring."""
        if self.is_alone:
            self.store.member.passed(self._meeting)
            self._check_change()
            return
        last = time.monotonic() + (_LONGEST_SECONDS if patiently else 0.0)
        while True:
            try:
                absent = self.store.meet(self._meeting)
                break
            except DeadlineExceededError:
                if time.monotonic() >= last:
                    raise
        self._absent |= absent
        self._check_change()
        if absent and not self._loss:
            self._raise_lost(absent)

    def _check_change(self) -> None:
        """Raise WorkersMoveError if others have left the job, for another one to continue."""
        if self.workers_change or (self.may_change and self._absent):
            self.check_lost()
            raise WorkersMoveError

    def check_lost(self) -> None:
        """Raise WorkerLostError if a worker is gone without which this kind of fit cannot be completed."""
        if not self._loss and self.store.member.lost_workers:
            self._raise_lost(self.store.member.lost_workers)

    def _raise_lost(self, ranks: frozenset[int]) -> None:
        rank, others = min(ranks), self.store.num_workers - 1
        raise WorkerLostError(
            f"worker {rank} was lost or has ended this fit early, and the other {others} cannot complete this kind of "
            f"fit without it: {START_AGAIN}"
        )

    # ---- clocks ------------------------------------------------------------------------------------------------------

    def end_clocks(self, number: int, empty_clock: Callable[[], None] = lambda: None) -> None:
        """Return when all workers have ended ``number``, which grows from call to call, and then meet them."""
        self.rows.push()
        self.rows.settle()
        if self.can_continue and self.store.consistency.mode != "asp":
            if self._own_row()[_ENDED] < number:  # otherwise the predecessor of this worker has ended that clock
                self._set_row(_ENDED, number)
                self._set_row(_CLOCK, self.store.clock)
                self._end_clock(empty_clock)
            rows = self._pull()
            while not self._all_ended(rows, number):
                self._end_clock(empty_clock)
                rows = self._pull()
            if isinstance(self.store.consistency, SSP):
                # A worker that was ahead may wait in its pull for this one's clock. All continue to a clock that none
                # has passed: while a worker had not ended, no pull was answered more than `staleness` clocks ahead.
                is_own = (rows[:, _JOB] == self.store.member.job) & (rows[:, _ENDED] >= number)
                last = int(rows[is_own, _CLOCK].max()) + self.store.consistency.staleness + 1
                while self.store.clock < last:
                    self._end_clock(empty_clock)
        self.meet()

    def _end_clock(self, empty_clock: Callable[[], None]) -> None:
        """End a clock without a batch."""
        self._set_row(_GONE, len(self.store.member.gone_in_order))
        self.rows.push()
        self.rows.settle()
        self.store.tick()
        empty_clock()
        if self.workers_change:
            raise WorkersMoveError

    def _own_row(self) -> Row:
        """Return the row of this worker, or of its predecessor."""
        if self._row is None:
            at, job = key(WORKER, 0, self.store.rank), self.store.member.job
            self._row = self.rows.pull([at])[0]
            self.rows.knows(at, self._row.copy())
            if self._row[_JOB] != job:
                self._row = np.zeros(DIM, np.int64)
                self._row[_JOB] = job
        return self._row

    def _set_row(self, field: int, value: int) -> None:
        """Set a field of this worker's row, within this clock."""
        row = self._own_row()
        row[field] = value
        self.rows.set(key(WORKER, 0, self.store.rank), row.copy())

    def _pull(self) -> Row:
        """Return the rows of all workers, as they are at this clock."""
        return self.rows.pull([key(WORKER, 0, rank) for rank in range(self.store.num_workers)])

    def _all_ended(self, rows: Row, number: int) -> bool:
        """Whether all have ended, but for some that all others know to be gone."""
        gone = self.store.member.gone_in_order
        self.check_lost()
        has_ended = (rows[:, _JOB] == self.store.member.job) & (rows[:, _ENDED] >= number)
        for known in range(len(gone) + 1):
            others = [rank for rank in self.present if rank not in gone[:known]]
            if np.all(has_ended[others] & (rows[others, _GONE] >= known)):
                return True
        return False

    def sweep(self, number: int, store: Store) -> None:
        """Have the leader drop expired rows of a store after a pass, and end a clock of all, once."""
        if not self.is_alone:
            if self._own_row()[_SWEPT] >= number:
                return  # the predecessor of this worker has ended that clock
            self._set_row(_SWEPT, number)
            self.rows.push()
        if self.leads:
            store.sweep()
        store.tick()
