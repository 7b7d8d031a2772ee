"""Turns: the pulls and pushes of a fit's workers in the order of a record, in one store.

    ReplayStore of each worker --> calls, cut as they were --> Turns: each message waits for its turn --> one store

A message is executed by the thread that has brought its turn about. Rounding and moments depend on the step of an arc,
so that each arc of the record has a step of its own.

Threads: one for each worker; `Turns` has the lock, also of the store.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NoReturn, cast

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.checkpoint.format import Chain, ChainEntry
from shoal.checkpoint.write import SnapshotSet
from shoal.consistency import ASP, Consistency
from shoal.errors import CorruptionError, DeadlineExceededError, ShoalError
from shoal.lineage.order import Message, RecordedOrder
from shoal.store.base import Store
from shoal.store.member import Member
from shoal.table.arrays import Counts, Rows
from shoal.table.future import Waitable
from shoal.table.shard import LocalCalls, LocalShard, PendingAnswers, Shard, pull_and_expand
from shoal.table.spec import TableSpec
from shoal.table.table import Table
from shoal.user_functions import Description

if TYPE_CHECKING:
    from shoal.cluster.worker.remote_shard import RemoteShard

_LOOK_SECONDS = 1.0  # after which a thread that waits looks around


class RecordEndsError(Exception):
    """The record has no further call of a worker."""


class _Stream:
    """Messages of all workers to one endpoint about one table."""

    def __init__(self, pulls_left: npt.NDArray[np.int64]) -> None:
        self.pushed = 0
        self.pulls_left = pulls_left  # by the pushes that they include
        self.pulls: dict[int, list[tuple[_Call, Message]]] = {}
        self.pushes: dict[int, tuple[_Call, Message]] = {}

    def take(self) -> tuple[_Call, Message] | None:
        """Return a message whose turn it is."""
        if self.pulls.get(self.pushed):
            self.pulls_left[self.pushed] -= 1
            return self.pulls[self.pushed].pop()
        if self.pulls_left[self.pushed] == 0 and self.pushed + 1 in self.pushes:
            self.pulls.pop(self.pushed, None)
            self.pushed += 1
            return self.pushes.pop(self.pushed)
        return None


class Turns:
    """The order of a record, in which the calls of several threads are executed."""

    def __init__(self, order: RecordedOrder, store: Store, workers: int, name: str) -> None:
        self.store = store
        self.workers = workers
        # Messages that wait for their turn.
        self.waiting = 0
        # Whether a worker has come to the end of the record.
        self.has_ended = False
        self.failed: BaseException | None = None
        self._order = order
        self._name = name
        self._indices = {table: index for index, table in enumerate(order.tables)}
        self._streams = [_Stream(pulls.copy()) for pulls in order.pulls]
        self._steps = order.steps()  # of each arc, by table
        self._changed = threading.Condition()
        self._alive = set(range(workers))  # whose threads have not ended
        self._sleeping: list[Callable[[], bool]] = []  # what each of those that wait waits for
        self._pending = [0] * workers
        self._arrived, self._meetings = 0, 0
        self._pool = _core.ThreadPool(1)
        self._one_computes = threading.Lock()
        self._computes: int | None = None  # thread

    # ---- calls -------------------------------------------------------------------------------------------------------

    def is_ordered(self, table: str) -> bool:
        """Whether the record has the order of a table."""
        return table in self._indices

    def submit(
        self,
        rank: int,
        table: Table,
        batch: _core.KeyBatch | _core.SummedBatch,
        rows: Rows,
        counts: Counts | None,
        *,
        is_push: bool,
    ) -> _Call:
        """Begin the next pull or push of a worker in a table."""
        with self._changed:
            self._check()
            messages = self._order.take(rank, self._indices[table.name], is_push=is_push)
            if messages is None:
                self.has_ended = True
                raise RecordEndsError
            offsets = batch.offsets
            keys = sum(int(offsets[one.end] - offsets[one.first]) for one in messages)
            if keys != len(batch.hashes):
                raise CorruptionError(
                    f"worker {rank} {'pushes' if is_push else 'pulls'} {len(batch.hashes)} keys of table "
                    f"{table.name!r}, and {keys} of them are in slots of the record in {self._name}: it is the record "
                    "of other data, or was made by another version of shoal"
                )
            call = _Call(self, rank, table, batch, rows, counts, is_push, len(messages))
            self._pending[rank] += 1
            self.waiting += len(messages)
            for one in messages:
                stream = self._streams[one.stream]
                if is_push:
                    stream.pushes[one.number] = call, one
                else:
                    stream.pulls.setdefault(one.number, []).append((call, one))
            for one in messages:
                while (due := self._streams[one.stream].take()) is not None:
                    self._execute(*due)
            return call

    def _execute(self, call: _Call, message: Message) -> None:
        ranges = [(message.first, message.end, 0)]
        if call.is_push:
            ranges = [
                (max(first, message.first), min(end, message.end), arc)
                for arc, (first, end) in enumerate(self._order.arcs)
                if first < message.end and message.first < end
            ]
        offsets = call.batch.offsets
        for first, end, arc in ranges:
            begin, stop = int(offsets[first]), int(offsets[end])
            if begin == stop:
                continue
            keys = _core.KeyBatch(_core.unmix(call.batch.hashes[begin:stop]), self.store.slots, self._pool)
            rows = call.rows[begin:stop]
            if call.is_push:
                self._push(call.table, arc, keys, rows, None if call.counts is None else call.counts[begin:stop])
            else:
                _wait(call.table.shard.pull(keys, rows))
        self.waiting -= 1
        call.left -= 1
        if not call.left:
            self._pending[call.rank] -= 1
            self._changed.notify_all()

    def _push(self, table: Table, arc: int, keys: _core.KeyBatch, rows: Rows, counts: Counts | None) -> None:
        """Push as the next step of an arc of the fit, whatever arcs the store has."""
        steps, shard = self._steps[table.name], table.shard
        steps[arc] += 1
        if not isinstance(shard, LocalShard):
            _wait(cast("RemoteShard", shard).push_as(steps[arc], keys, rows, counts))
            return
        most = shard.step
        shard.step = steps[arc] - 1
        try:
            _wait(shard.push(keys, rows, counts))
        finally:
            shard.step = max(most, steps[arc])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude all calls: of what the record has no order of."""
        with self._changed:
            self._check()
            yield

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, is_due: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait for something that another thread does."""
        with self._set_aside(), self._changed:
            self._sleeping.append(is_due)
            try:
                while not is_due():
                    self._check()
                    self._check_stuck()
                    if not self._changed.wait(_LOOK_SECONDS if timeout is None else timeout) and timeout is not None:
                        raise DeadlineExceededError(f"a call of the replay is not done after {timeout} seconds")
            finally:
                self._sleeping.remove(is_due)
            self._check()

    def flush(self, rank: int) -> None:
        """Wait for all calls of a worker."""
        self.wait(lambda: self._pending[rank] == 0)

    def meet(self, rank: int) -> None:
        """Wait for all workers."""
        self.flush(rank)
        with self._changed:
            meeting = self._meetings
            self._arrived += 1
            if self._arrived == self.workers:
                self._arrived, self._meetings = 0, meeting + 1
                self._changed.notify_all()
        self.wait(lambda: self._meetings > meeting)

    def leave(self, rank: int) -> None:
        """Record that the thread of a worker has ended."""
        with self._changed:
            self._alive.discard(rank)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Have all threads end by an error."""
        with self._changed:
            self.failed = self.failed or error
            self._changed.notify_all()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Have torch's generator of random numbers within the block, but for the waits: a process has one."""
        with self._one_computes:
            self._computes = threading.get_ident()
            try:
                yield
            finally:
                self._computes = None

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Let other threads compute within the block, in which this one waits."""
        if self._computes != threading.get_ident():
            yield
            return
        torch = sys.modules["torch"]
        drawn, self._computes = torch.get_rng_state(), None
        self._one_computes.release()
        try:
            yield
        finally:
            self._one_computes.acquire()
            self._computes = threading.get_ident()
            torch.set_rng_state(drawn)

    def _check(self) -> None:
        if self.failed is not None:
            raise RecordEndsError from self.failed

    def _check_stuck(self) -> None:
        """Fail if all threads wait for each other."""
        if len(self._sleeping) < len(self._alive) or any(is_due() for is_due in self._sleeping):
            return
        if not self.has_ended:
            self.fail(
                CorruptionError(
                    f"all {len(self._alive)} workers wait for each other by the record in {self._name}: it is that "
                    "of another fit, or was made by another version of shoal"
                )
            )
            self._check()
        raise RecordEndsError


class _Call:
    """A pull or a push: a `Waitable`."""

    def __init__(
        self,
        turns: Turns,
        rank: int,
        table: Table,
        batch: _core.KeyBatch | _core.SummedBatch,
        rows: Rows,
        counts: Counts | None,
        is_push: bool,
        left: int,
    ) -> None:
        self.rank = rank
        self.table = table
        self.batch = batch
        self.rows = rows
        self.counts = counts
        self.is_push = is_push
        # Messages that were not executed.
        self.left = left
        self._turns = turns

    def done(self) -> bool:
        """Whether all of it was executed."""
        return not self.left

    def result(self, timeout: float | None = None) -> None:
        """Wait until all of it was executed."""
        self._turns.wait(self.done, timeout)

    def add_done_callback(self, fn: Callable[[object], object], /) -> None:
        """Wait, and call the function: nobody who waits here has anything else to do."""
        self.result()
        fn(self)


def _wait(started: Waitable | int | None) -> None:
    if started is not None and not isinstance(started, int):
        started.result()


# ---- a worker --------------------------------------------------------------------------------------------------------


class ReplayStore(Store):
    """The store of one worker of a replay."""

    def __init__(self, turns: Turns, rank: int, job: str) -> None:
        super().__init__(threads=1, slots=turns.store.slots)
        self.turns = turns
        self.member = Member(job=1, job_name=job)
        self.order = _ReplayOrder()
        self._rank = rank
        self._clock = 0

    @property
    def rank(self) -> int:
        """Of the worker."""
        return self._rank

    @property
    def num_workers(self) -> int:
        """Of the recorded fit."""
        return self.turns.workers

    @property
    def consistency(self) -> Consistency:
        """ASP: what a pull sees is in the record."""
        return ASP()

    @property
    def clock(self) -> int:
        """Number of ticks so far."""
        return self._clock

    def tick(self) -> None:
        """Count."""
        self._clock += 1

    def computing(self) -> AbstractContextManager[None]:
        """Exclude the other workers, which are threads of this process."""
        return self.turns.computing()

    def flush(self, timeout: float | None = None) -> None:
        """Wait for all calls of this worker."""
        self._check_usable()
        self.turns.flush(self._rank)

    def meet(self, name: str, timeout: float | None = None) -> frozenset[int]:
        """Wait for all workers."""
        self._check_usable()
        self.turns.meet(self._rank)
        self.member.passed(name)
        return frozenset()

    def _take_splits(self, count: int, digest: str, reissue: float) -> NoReturn:
        raise ShoalError("a replay has no loop over splits")

    def _end(self, *, failed: bool) -> None:
        pass

    def _make_shard(self, spec: TableSpec) -> _ReplayShard:
        with self.turns.alone():
            table = self.turns.store.table(
                spec.name,
                dim=spec.dim,
                optimizer=spec.optimizer,
                init=spec.init,
                dtype=spec.dtype,
                seed=spec.seed,
                admit=spec.admit,
                expire=spec.expire,
            )
        return _ReplayShard(self, table, self._workers)

    @contextmanager
    def _snapshots(self, tables: list[tuple[Table, str]], base: ChainEntry | None) -> Iterator[SnapshotSet]:
        store = self.turns.store
        with (
            self.turns.alone(),
            store._snapshots([(store.tables[one.name], kind) for one, kind in tables], base) as its,
        ):
            yield its

    def _load(self, chain: Chain, *, track: bool, progress: bool) -> None:
        self.turns.meet(self._rank)
        if self._rank == 0:
            with self.turns.alone():
                self.turns.store._load(chain, track=track, progress=progress)
        self.turns.meet(self._rank)
        for spec in (table.spec() for table in chain[-1].manifest.tables):
            if spec.name not in self._tables:
                self._add(spec, self._make_shard(spec))


class _ReplayOrder:
    """The `Order` of a worker of a replay: within divisions its calls have turns."""

    id = ""
    every: int | None = None
    has_meetings = False
    is_on = False

    def begin(self, division: int) -> None:
        """Begin to learn."""
        self.is_on = True

    def end(self) -> None:
        """End it: what follows is executed at once."""
        self.is_on = False

    def met(self) -> None:
        """Do nothing."""

    def rest(self, examples: int) -> None:
        """Do nothing."""


class _ReplayShard(LocalCalls):
    """The rows of a table of the store behind all workers, as one of them sees them."""

    def __init__(self, store: ReplayStore, table: Table, workers: _core.ThreadPool) -> None:
        self._store = store
        self._turns = store.turns
        self._table = table
        self._workers = workers

    @property
    def _shard(self) -> Shard:
        return self._table.shard  # a load replaces it

    @property
    def _is_ordered(self) -> bool:
        return cast(_ReplayOrder, self._store.order).is_on and self._turns.is_ordered(self._table.name)

    @property
    def retains_arrays(self) -> bool:
        """True: a push waits for its turn."""
        return True

    def __len__(self) -> int:
        with self._turns.alone():
            return len(self._shard)

    def make_locations(self, batch: _core.KeyBatch, /) -> None:  # type: ignore[override]
        """Return None: calls are cut."""

    def reads_ahead(self) -> bool:
        """Return False: rows are read when their turn comes."""
        return False

    def prefetch(self, batch: _core.KeyBatch, locations: _core.RowLocations | None = None, /) -> None:
        """Do nothing."""

    def reserve(self, rows: Sequence[int], /) -> None:
        """Do nothing."""

    def pull(
        self, batch: _core.KeyBatch, rows: Rows, locations: _core.RowLocations | None = None, /
    ) -> Waitable | None:
        """Read the row of each unique key."""
        if self._is_ordered:
            return self._turns.submit(self._store.rank, self._table, batch, rows, None, is_push=False)
        with self._turns.alone():
            _wait(self._shard.pull(batch, rows))
        return None

    def pull_per_key(
        self, batch: _core.KeyBatch, rows: Rows, locations: _core.RowLocations | None = None, /
    ) -> Waitable | None:
        """Read the row of each key as given."""
        return pull_and_expand(self.pull, batch, rows, self._workers)

    def push(
        self,
        batch: _core.KeyBatch | _core.SummedBatch,
        grads: Rows,
        counts: Counts | None = None,
        clock: int = 0,
        locations: _core.RowLocations | None = None,
        /,
    ) -> Waitable | int:
        """Apply one step with a gradient for each unique key."""
        if self._is_ordered:
            return self._turns.submit(self._store.rank, self._table, batch, grads, counts, is_push=True)
        with self._turns.alone():
            _wait(self._shard.push(batch, grads, counts, clock))
        return 0

    def push_per_key(
        self,
        batch: _core.KeyBatch,
        grads: Rows,
        counts: Counts | None = None,
        clock: int = 0,
        locations: _core.RowLocations | None = None,
        /,
    ) -> Waitable | int:
        """Apply one step with a gradient for each key as given, summed here."""
        dim = grads.shape[1]
        sums = np.empty((len(batch), dim), np.float32)
        batch.sum(grads, dim, sums, self._workers, self._table.spec.is_integer)
        return self.push(batch, sums, counts, clock)

    # ---- at once -----------------------------------------------------------------------------------------------------

    def assign(self, batch: _core.KeyBatch, rows: Rows, clock: int = 0, /) -> None:
        """Set weights."""
        with self._turns.alone():
            self._shard.assign(batch, rows, clock)

    def erase(self, batch: _core.KeyBatch, /) -> int:
        """Remove rows; return how many existed."""
        with self._turns.alone():
            return self._shard.erase(batch)

    def contains(self, batch: _core.KeyBatch, /) -> npt.NDArray[np.uint8]:
        """Return which rows exist."""
        with self._turns.alone():
            return self._shard.contains(batch)

    def read_slot(self, slot: int, /) -> tuple[npt.NDArray[np.uint64], Rows]:
        """Read hashes and weights of a slot."""
        with self._turns.alone():
            return self._shard.read_slot(slot)

    def columns(self) -> list[str]:
        """Names of the columns."""
        return self._shard.columns()

    def state(self, batch: _core.KeyBatch, column: int, /) -> Rows:
        """Read one column."""
        with self._turns.alone():
            return self._shard.state(batch, column)

    def metadata_names(self) -> list[str]:
        """Names of the row metadata."""
        return self._shard.metadata_names()

    def metadata(self, batch: _core.KeyBatch, k: int, /) -> npt.NDArray[np.uint32]:
        """Read row metadata."""
        with self._turns.alone():
            return self._shard.metadata(batch, k)

    def marks_clock(self, store_clock: int, /) -> int:
        """Return the table's clock."""
        return self._shard.marks_clock(store_clock)

    def reduce(self, function: int, parameters: npt.NDArray[np.float64], /) -> npt.NDArray[np.float64]:
        """Evaluate a function of all rows."""
        with self._turns.alone():
            return self._shard.reduce(function, parameters)

    def run_function(  # type: ignore[override]
        self, function: int, description: Description, hashes: npt.NDArray[np.uint64] | None, /
    ) -> PendingAnswers | list[npt.NDArray[np.float64]]:
        """Call a function of a user."""
        with self._turns.alone():
            return self._shard.run_function(function, description, hashes)

    def sweep(self, rules: npt.NDArray[np.float64], clock: int = 0, /, *, dry_run: bool) -> npt.NDArray[np.uint64]:
        """Drop the rows that expiry rules select."""
        with self._turns.alone():
            return self._shard.sweep(rules, clock, dry_run=dry_run)

    def stats(self) -> dict[str, int]:
        """Read the statistics."""
        with self._turns.alone():
            return self._shard.stats()
