"""PassCoordinator: lets the workers of a cluster that train one model, each on its split, end each pass together.

A worker's clock is a batch. Splits differ in length, and under BSP and SSP a worker that stops ticking blocks the
others: a worker at the end of its split therefore ticks empty clocks until all have reached the end of theirs.

    worker 0    batch  batch  batch  batch  ended                       a row for each worker counts the passes that
    worker 1    batch  batch  ended  empty  empty                       it has ended, by a push within the clock

Under BSP all workers see the same rows at the same clock, and so leave the pass at the same clock. Under SSP they see
them at different clocks, and continue to a common clock, which each computes from the rows.

Rows, in a table of the model's name and "-team"
    2^32 + rank       passes that this worker has ended in this fit, and the clock of the last one's end: three numbers
                      of 10 bits, since floats are exact up to 2^24, and BSP's mean multiplies by the number of workers
    2^33 + rank       number of the last fit that this worker has begun: one that left before takes no part in this one

If the number of workers changes, a worker that is within its pass hands over its state (takeover.py) and writes that it
has moved. It has not ended its pass then, so all others are within it or wait for its end, see this, and move as well.

If a worker dies and their number may change, the others move as well: those that are within the pass after their batch,
and those that wait at a barrier all at the same one. Each pass begins at a barrier, at which all have published their
states. So all others move within the same pass, and the dead one has published a state of that pass.

Otherwise they do not wait for a worker that leaves a fit early, which it announces, nor for one that died or left the
job before the fit began; a fit that needs all of them (`needs_all`) raises WorkerLostError. If the job waits for a
replacement of a worker that died, that one continues from the state that its predecessor has published (takeover.py):
it is *behind* while it repeats clocks that have counted. Otherwise a worker that joins in the middle of a job has not
seen the agreements of the others: its fit is refused.

Without other workers there is no table and no message. The same holds in a loop over `Store.splits`, where workers do
not wait for each other.

Threads: the one that fits.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary, WeakSet

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.consistency import ASP, BSP, SSP
from shoal.errors import DeadlineExceededError, ShoalError, WorkerLostError, WorkersChangedError
from shoal.models.worker_messages import Exchanged, WorkerMessages
from shoal.optim import SGD
from shoal.store.base import Store
from shoal.table.table import Table

_ENDED = np.uint64(1 << 32)
_BEGUN = np.uint64(1 << 33)
_NEVER = 1e9  # number of passes that a worker writes when it makes no more
_MOVED = 2e9  # that it writes when it has handed over its state
_LIMBS, _LIMB_BITS = 3, 10  # of a clock in a row; MAX_WORKERS is 2^14
START_AGAIN = "start the fit again, with resume=True (--resume) if it writes checkpoints"
_LONGEST_SECONDS = 86400.0  # to wait while others measure; a worker that dies meanwhile is not waited for


_fits: WeakKeyDictionary[Store, Counter[str]] = WeakKeyDictionary()  # begun in each store, by name of the model
_learning: WeakSet[Store] = WeakSet()  # in which all workers have published a state, if their number may change


def _row(passes: float, clock: int = 0) -> npt.NDArray[np.float32]:
    """Return a row of the table: each of its numbers is exact."""
    limbs = [clock >> bits for bits in range(0, _LIMBS * _LIMB_BITS, _LIMB_BITS)]
    limbs[:-1] = [limb % (1 << _LIMB_BITS) for limb in limbs[:-1]]
    return np.array([[passes, *limbs]], np.float32)


def _latest_clock(rows: npt.NDArray[np.float32]) -> int:
    """Return the greatest clock of some rows."""
    return int((rows[:, 1:].astype(np.int64) << np.arange(0, _LIMBS * _LIMB_BITS, _LIMB_BITS)).sum(axis=1).max())


class WorkersMoveError(Exception):
    """The workers hand over their states: raised within a pass, after a clock."""


class Position(msgspec.Struct, frozen=True):
    """How far a worker is in a program that all workers run: see `PassCoordinator.continue_from`."""

    # Number of the model's fit, from 1.
    fit: int
    # clock, pass_clock: Of the worker, and that at which its pass began, or was resumed.
    clock: int
    pass_clock: int
    # Made so far.
    exchanges: int
    # `Member.barriers`.
    barriers: dict[str, int]
    # passes, last_clock: That this worker has ended in the fit, and the clock of the last one's end.
    passes: int
    last_clock: int


class Tolerance(NamedTuple):
    """What a kind of fit withstands; ``remedy`` names one that withstands more."""

    replacement: bool = False  # another worker continues that of one that died, if the job waits for one
    change: bool = False  # of the number of workers, to which states are handed over
    loss: bool = True  # of a worker, in a fit whose number of workers may change
    needs_all: bool = False  # it ends with an error when one of the workers is lost or leaves
    remedy: str = ""


_NOTHING = Tolerance()


class PassCoordinator:
    """The agreement of the workers of a store about passes while they fit a model."""

    def __init__(self, store: Store, name: str, tolerance: Tolerance = _NOTHING) -> None:
        self._store = store
        remedy = tolerance.remedy
        # Whether the number of workers may change in this fit.
        self.may_change = store.member.workers_range is not None and not store.member.takes_splits
        # Whether it changes, too, if one of them dies.
        self.may_lose = self.may_change and tolerance.loss
        if store.member.workers_range is not None and not tolerance.change:
            raise ShoalError(
                f"the job may have {store.member.workers_range[0]} to {store.member.workers_range[1]} workers, and "
                f"this kind of fit needs a fixed number{remedy}: pass one number of workers (--workers "
                f"{store.num_workers})"
            )
        # Whether the fit ends with an error when one of the workers is lost or leaves.
        self.needs_all = tolerance.needs_all
        self._absent: frozenset[int] = frozenset()  # workers that left the job before this fit began
        self._is_alone = store.num_workers == 1 or store.member.takes_splits
        self._ranks = np.arange(store.num_workers, dtype=np.uint64)
        self._passes = 0
        self._last_clock = 0  # the clock of the last pass's end
        self._pass_clock = store.clock
        self._behind = 0  # clocks to repeat that have counted
        # What the predecessor of this worker has published of its last counted clock, by `publish_change`.
        self.change: bytes | None = None
        # Whether a replacement continues this fit.
        self.can_replace = (
            tolerance.replacement and store.member.replacement_seconds > 0 and not store.member.takes_splits
        )
        # Whether the fit publishes states.
        self.publishes = self.can_replace or self.may_lose
        self._name = name
        self._fits = _fits.setdefault(store, Counter())
        self._fits[name] += 1
        # Number of this fit among those of the model in this store, from 1.
        self.fit = self._fits[name]
        if store.member.is_replacement and not store.member.takes_splits and not self.can_replace:
            raise ShoalError(
                f"worker {store.rank} has replaced a worker that died, at clock {store.member.joined_at}, and fits of "
                f"this kind cannot be continued by another worker{remedy}: end all workers, and resume from the last "
                "checkpoint"
            )
        if not self._is_alone and store.member.joined_at > 0 and not store.member.is_replacement:
            raise ShoalError(
                f"worker {store.rank} replaced a worker that had died, at clock {store.member.joined_at}: the others "
                "may have begun this fit before, and would wait for it forever; end this process, and they continue "
                "without it. If workers may join later, share the data by store.splits(reader)"
            )
        # Several jobs may fit models of one name, on the same table, and have the same ranks.
        shared = f"{name}@{store.member.job_name}" if store.member.job_name else name
        if not self._is_alone:
            self._table: Table = store.table(f"{shared}-team", dim=1 + _LIMBS, optimizer=SGD(lr=1.0))
        if not self._is_alone or self.can_replace or self.may_change:
            self._messages = WorkerMessages(store, shared, self.wait_for_all)

    @property
    def is_alone(self) -> bool:
        """Whether this worker waits for no others."""
        return self._is_alone

    @contextlib.contextmanager
    def fitting(self, settings: Mapping[str, object]) -> Iterator[Self]:
        """Begin a fit, all workers together and with the same settings; announce an error that ends it."""
        with self.handing_over():
            try:
                self._begin(settings)
            except BaseException:
                self._fits[self._name] -= 1  # none has begun: the next one has its number
                raise
            self._store.member.leaves_early = False
            try:
                yield self
            except (WorkersChangedError, WorkersMoveError):
                raise
            except BaseException:
                self.abandon()
                raise

    def _begin(self, settings: Mapping[str, object]) -> None:
        """Begin a fit, all workers together."""
        if not self._is_alone:
            self._last_clock = 0
            encoded = msgspec.json.encode(
                settings, enc_hook=lambda one: one.item() if isinstance(one, np.generic) else str(one)
            )
            was_past = self.is_past
            if not was_past:
                self._messages.publish_settings(self.fit, encoded)
                self._table.assign(self._mine + _ENDED, _row(0))
                self._table.assign(self._mine + _BEGUN, _row(self.fit))
            self._store.barrier()
            self._check_lost()
            self._check_settings(encoded, was_past=was_past)
            begun = self._table.pull(self._ranks + _BEGUN)[:, 0]
            self._absent = frozenset(self._ranks[begun < self.fit].tolist())  # a replacement may be behind
            self._messages.absent = self._absent

    def _check_settings(self, settings: bytes, *, was_past: bool) -> None:
        """Raise ValueError, on all workers, if they begin this fit with different settings."""
        encoded = self._messages.settings(self.fit) | {self._store.rank: settings}
        first, *others = sorted((rank, msgspec.json.decode(one)) for rank, one in encoded.items())
        for rank, theirs in others:
            for name, ours in first[1].items():
                if theirs.get(name) == ours:
                    continue
                if not was_past:
                    with contextlib.suppress(DeadlineExceededError):
                        self._store.barrier()  # none begins again while others read
                raise ValueError(
                    f"{name} is {ours!r} on worker {first[0]} and {theirs.get(name)!r} on worker {rank}: pass all "
                    "workers of a fit the same settings"
                )

    # ---- the replacement of a worker ---------------------------------------------------------------------------------

    @property
    def is_past(self) -> bool:
        """Whether all others, and the predecessor of this worker, have passed the barrier that comes next."""
        return self._store.member.is_past()

    @property
    def is_behind(self) -> bool:
        """Whether this worker repeats clocks of its predecessor that have counted."""
        return self._behind > 0

    @property
    def clocks_of_pass(self) -> int:
        """Clocks of this pass so far, since the fit was resumed."""
        return self.clock - self._pass_clock

    @property
    def clock(self) -> int:
        """Clock of this worker in its program, which is behind that of its predecessor while it repeats clocks."""
        return self._store.clock - self._behind

    def begin_pass(self) -> None:
        """Begin a pass, or resume one."""
        self._pass_clock = self.clock

    def repeat_clock(self) -> None:
        """Repeat a clock that has counted."""
        self._behind -= 1

    def tick(self) -> None:
        """End a clock, or repeat one."""
        if self._behind:
            self.repeat_clock()
        else:
            self._store.tick()

    def position(self) -> Position:
        """Return how far this worker is."""
        exchanges = self._messages.number
        return Position(
            self.fit,
            self.clock,
            self._pass_clock,
            exchanges,
            dict(self._store.member.barriers),
            self._passes,
            self._last_clock,
        )

    def publish(self, state: bytes) -> None:
        """Publish the state of this worker for its replacement."""
        self._messages.publish(state)

    def published(self) -> bytes | None:
        """Return the last state that the predecessor of this worker has published."""
        return self._messages.published() if self.can_replace and self._store.member.is_replacement else None

    def publish_change(self, change: bytes) -> None:
        """Publish what the clock that is about to end has changed outside of tables."""
        self._messages.publish_change(self.clock, change)

    def continue_from(self, position: Position) -> None:
        """Continue where the predecessor of this worker was, and repeat what it has done since."""
        self._passes, self._last_clock, self._pass_clock = position.passes, position.last_clock, position.pass_clock
        self._messages.number = position.exchanges
        self._store.member.barriers = dict(position.barriers)
        self._behind = max(0, self._store.member.joined_at - position.clock)
        self.change = self._messages.published_change(position.clock, self._store.member.joined_at)

    # ---- another number of workers -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def handing_over(self, is_told_to_leave: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """End the job, for the next one to continue, if the workers move outside of a pass: their states are there."""
        try:
            yield
        except WorkersMoveError:
            leaves = is_told_to_leave()
            self._store.hand_over(returns=not leaves, begun=self._store in _learning)
            what = "this worker leaves the fit, and the others continue it" if leaves else "a worker has died"
            raise WorkersChangedError(what, leaves=leaves) from None

    def begin_learning(self) -> None:
        """Wait until all workers have published their states of the beginning of a pass, if their number may change.

        Each may hand over its state from now on.
        """
        if self.may_change:
            self.wait_for_all()
            _learning.add(self._store)

    @property
    def continued(self) -> bool:
        """Whether the workers of another job have handed over their states to this one."""
        return self.may_change and self._store.member.continued is not None

    @property
    def workers_change(self) -> bool:
        """Whether the workers are to hand over their states, within a pass and after a clock."""
        return self.may_change and self._store.member.workers_change

    def hand_over(self, state: bytes, *, returns: bool) -> None:
        """Hand over the state of this worker; nothing of the fit may follow. The others need not wait for it."""
        self._messages.publish(state)
        if not self._is_alone:
            self._table.assign(self._mine + _ENDED, _row(_MOVED))
        self._store.hand_over(returns=returns)

    def handed_over(self) -> list[list[bytes]]:
        """Return the last states of the workers of the job before, the last one of each first; that is handed over."""
        assert self._store.member.continued is not None
        return self._messages.published_in(*self._store.member.continued)

    @property
    def lost(self) -> dict[int, tuple[int, int]]:
        """The workers of the job before that died: see `Member.continued_lost`."""
        return self._store.member.continued_lost

    @property
    def has_lost(self) -> bool:
        """Whether a worker has died, and the others are to hand over their states."""
        return self.may_lose and bool(self._store.member.lost_workers)

    def _check_lost(self) -> None:
        """Raise WorkersMoveError if the last barrier was passed without a worker that has died."""
        if self.may_lose and self._store.member.lost_at_barrier:
            raise WorkersMoveError

    def _check_moved(self, rows: npt.NDArray[np.float32]) -> None:
        """Raise WorkersMoveError if one of the others has handed over its state."""
        if np.any(rows[:, 0] >= _MOVED):
            raise WorkersMoveError

    # ---- passes ------------------------------------------------------------------------------------------------------

    def end_pass(self, empty_clock: Callable[[], None] = lambda: None, meet: Callable[[], bool] = lambda: True) -> None:
        """Mark the end of this worker's pass, and return when all workers have ended theirs."""
        self._passes += 1
        if self._is_alone:
            return
        if isinstance(self._store.consistency, ASP):
            while not meet():
                pass
            self.wait_for_all()  # ends no clock
            self._check_moved(self._table.pull(self._ranks + _ENDED))
            return
        self._mark_end()
        self.tick()
        empty_clock()
        staleness = self._store.consistency.staleness if isinstance(self._store.consistency, SSP) else 0
        if self._behind:
            # The predecessor had left the pass, or seen that others had not ended.
            rows = self._table.pull(self._ranks + _ENDED)
            all_ended = not np.any(rows[:, 0] < self._passes)
            last = _latest_clock(rows) + staleness + 1 if all_ended else self._store.clock
            while self._behind and self.clock < last:
                self.tick()
                empty_clock()
        while True:
            rows = self._table.pull(self._ranks + _ENDED)
            self._check_moved(rows)
            self._check(self._ranks[rows[:, 0] >= _NEVER].tolist())
            behind, lost = set(self._ranks[rows[:, 0] < self._passes].tolist()), self._store.member.lost_workers
            if self.may_lose and behind & lost:
                raise WorkersMoveError
            if behind <= lost | self._absent:
                break
            self.tick()
            empty_clock()
        if isinstance(self._store.consistency, SSP):
            # A worker that was ahead may wait in its pull for this one's clock. All continue to a clock that none has
            # passed: while a worker had not ended, no pull was answered more than `staleness` clocks ahead of it.
            last = _latest_clock(rows) + staleness + 1
            while self.clock < last:
                self.tick()
                empty_clock()

    def _mark_end(self) -> None:
        """Count the end of a pass of this worker, within the clock that ends."""
        before, self._last_clock = self._last_clock, self.clock
        if self._behind:
            return
        if isinstance(self._store.consistency, SSP):  # a push might take effect a second time, for a replacement
            self._table.assign(self._mine + _ENDED, _row(self._passes, self._last_clock))
            return
        mean = isinstance(self._store.consistency, BSP) and self._store.consistency.reduce == "mean"
        ended = _row(self._passes - 1, before) - _row(self._passes, self._last_clock)
        self._table.push(self._mine + _ENDED, ended * np.float32(len(self._ranks) if mean else 1))

    def wait_for_all(self) -> None:
        """Wait for workers that do more between two passes, such as measuring: longer than for any other call."""
        if self._is_alone:
            return
        last = time.monotonic() + _LONGEST_SECONDS
        while True:
            try:
                self._store.barrier()
                self._check_lost()
                if self.needs_all:
                    self._check(self._left())
                return
            except DeadlineExceededError:
                left = self._left()
                self._check(left)
                if left or time.monotonic() > last:
                    raise

    def _left(self) -> list[int]:
        """Return the ranks of the workers that have left this fit."""
        rows = self._table.pull(self._ranks + _ENDED)
        return [int(rank) for rank in self._ranks[(rows[:, 0] >= _NEVER) & (rows[:, 0] < _MOVED)]]

    def _check(self, left: Iterable[int] = ()) -> None:
        """Raise WorkerLostError if this fit needs all workers, and one was lost, has left, or has not begun it."""
        if not self.needs_all:
            return
        reasons = (
            (self._store.member.lost_workers if not self.may_lose else (), "was lost"),
            (self._absent, "left before this fit began"),
            (left, "has ended this fit early, by an error"),
        )
        for ranks, what in reasons:
            for rank in ranks:
                raise WorkerLostError(
                    f"worker {rank} {what}, and the other {len(self._ranks) - 1} cannot complete this fit without it: "
                    f"{START_AGAIN}"
                )

    def exchange(self, message: bytes = b"", *, flag: int = 0, to: int | None = None) -> Exchanged:
        """Exchange messages with the other workers: see `WorkerMessages.exchange`.

        A call of all workers, at the same clock.
        """
        if self._is_alone:
            return Exchanged([flag], [message])
        found = self._messages.exchange(message, flag=flag, to=to)
        if not found.is_past and any(flag is None for flag in found.flags):
            self._check_moved(self._table.pull(self._ranks + _ENDED))
            self._check(rank for rank, flag in enumerate(found.flags) if flag is None)
        return found

    @property
    def rank(self) -> int:
        """Of this worker."""
        return self._store.rank

    def abandon(self) -> None:
        """Announce, if the servers can be reached, that the others need not wait for this worker in this fit."""
        self._store.member.leaves_early = True
        if not self._is_alone:
            with contextlib.suppress(ShoalError):
                self._table.assign(self._mine + _ENDED, _row(_NEVER))

    @property
    def _mine(self) -> npt.NDArray[np.uint64]:
        return self._ranks[self._store.rank : self._store.rank + 1]
