"""The store of a cluster's worker: the calls of :class:`shoal.Store`, answered by servers.

Idea. A table is the same class here and in one process; it stands on a :class:`RemoteShard`, which says in hashes,
slots and operations of the wire what the engine's shard is told in arrays. The :class:`.Channel`
carries that to the servers, the :class:`.SchedulerClient` carries what is rare to the scheduler.

    table.pull(keys) -- KeyBatch --> RemoteShard.pull(hashes, rows) --> Channel --> an endpoint for each range of slots
    store.table(..), barrier(), map of slots                        --> SchedulerClient    --> the scheduler

Reads that are no pulls (contains, state, items, len, stats, a save) see what a pull of the same clock sees, and wait
for it alike.

Threads: as for any store. Fork: a child's copy raises WrongProcessError; whoever needs the tables there connects
anew, as a
worker of a rank of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import operator
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import numpy.typing as npt
import zmq

from shoal import _core
from shoal.checkpoint import checkpoint
from shoal.cluster.protocol.errors import copy_error
from shoal.cluster.protocol.messages import (
    MAX_WORKERS,
    Barrier,
    BarrierReply,
    CreateTable,
    Event,
    GetMap,
    GetMapReply,
    GetMetrics,
    JoinReply,
    MetricsReply,
    ServerGone,
    SplitReply,
    TableRecord,
    TableReply,
    TakeSplit,
    WorkerGone,
)
from shoal.cluster.protocol.scheduler_client import PendingRequest, SchedulerClient
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.protocol.tasks import STALL_SECONDS, digest_words
from shoal.cluster.worker.channel import CallFuture, Channel
from shoal.cluster.worker.filters import Filter, Filters, choose
from shoal.cluster.worker.load import ServerLoad
from shoal.cluster.worker.requests import Call, Requests, WorkerIdentity
from shoal.cluster.worker.save import ServerSnapshotSet
from shoal.consistency import BSP, Consistency
from shoal.errors import DeadlineExceededError, ShoalError
from shoal.storage.base import StoragePath
from shoal.storage.open import open_dir
from shoal.store.local import Store, check_same
from shoal.table.arrays import Counts, Rows
from shoal.table.future import Waitable
from shoal.table.reductions import Function
from shoal.table.spec import TableSpec
from shoal.table.table import Table

__all__ = ["ClusterStore", "RemoteShard", "connect"]

Op = _core.Op

_log = logging.getLogger("shoal.cluster")

_PAUSE = 0.1  # seconds until it is asked again whether a part has come free
_LEAVING = 2.0  # seconds to say goodbye in
_ASKING = 2.0  # seconds to wait for a map
_SLOWEST_LOAD = 1e5  # rows a second: whoever is slower has failed
_MOST_SOCKETS = 1 << 14  # three for each endpoint: its connection, and both ends of what observes that
_SECTION_BYTES = 16 << 20  # of rows that are loaded in one message


def connect(
    address: str,
    *,
    consistency: Consistency | None = None,
    workers: int | None = None,
    rank: int | None = None,
    timeout: float = 60.0,
    threads: int | None = None,
    curve: str | os.PathLike[str] | None = None,
    filters: Filters | Mapping[str, Filters] | None = None,
    shared_storage: bool = True,
    on_close: Callable[[], None] | None = None,
) -> ClusterStore:
    """Join a cluster as a worker; see :func:`shoal.cluster.connect`.

    ``on_close`` is called once, when the store is closed and has left, or when it could not be made.
    """
    return ClusterStore(
        address,
        consistency=BSP() if consistency is None else consistency,
        workers=workers,
        rank=rank,
        timeout=timeout,
        threads=threads,
        curve=curve,
        filters=filters,
        shared_storage=shared_storage,
        on_close=on_close,
    )


class ClusterStore(Store):
    """All tables of a cluster, as one of its workers sees them. Made by :func:`shoal.connect`."""

    def __init__(
        self,
        address: str,
        *,
        consistency: Consistency,
        workers: int | None,
        rank: int | None,
        timeout: float,
        threads: int | None,
        curve: str | os.PathLike[str] | None,
        filters: Filters | Mapping[str, Filters] | None,
        shared_storage: bool,
        on_close: Callable[[], None] | None,
    ) -> None:
        self._filters = dict(filters) if isinstance(filters, Mapping) else filters
        self._filtered: dict[str, Filter] = {}
        self._shared_storage = shared_storage
        for table in self._filters if isinstance(self._filters, dict) else [""]:
            choose(self._filters, table)  # what is no description is refused at once
            if not isinstance(table, str):
                raise TypeError(f"filters are given for each table's name, got {table!r}")
            table.encode()  # a name that no table can have is a ValueError
        with contextlib.ExitStack() as undo:  # what is to be done when the store is closed, last to first
            if on_close is not None:
                undo.callback(on_close)
            self._connect(address, undo, consistency, workers, rank, timeout, threads, curve)
            self._closing = undo.pop_all()
        # Neither the threads nor what they call hold the store: who drops it without a word leaves all the same.
        what = f"ClusterStore({address!r}, worker {self.rank} of {self.num_workers})"
        self._finalizer = weakref.finalize(self, _abandon, self._link, self._closing, what, os.getpid())
        self._finalizer.atexit = False  # see _leave_at_exit
        _open_stores.add(self)

    def _connect(
        self,
        address: str,
        undo: contextlib.ExitStack,
        consistency: Consistency,
        workers: int | None,
        rank: int | None,
        timeout: float,
        threads: int | None,
        curve: str | os.PathLike[str] | None,
    ) -> None:
        if not isinstance(consistency, Consistency):
            raise TypeError(f"consistency is one of BSP(), SSP(staleness) and ASP(), got {consistency!r}")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
            raise ValueError(f"timeout must be a number of seconds above 0, got {timeout!r}")
        if not isinstance(self._shared_storage, bool):
            raise TypeError(f"shared_storage is True or False, got {self._shared_storage!r}")
        workers = _bounded("workers", workers, 1, MAX_WORKERS)
        rank = _bounded("rank", rank, 0, MAX_WORKERS - 1)
        secure, secure_link = _security(curve)
        self._taking_parts = 0
        self._lost_workers: frozenset[int] = frozenset()
        self._consistency = consistency
        self._timeout = float(timeout)
        self._passes = 0  # calls of `parts`
        self._open_barriers: dict[str, PendingRequest] = {}  # barriers that this worker has come to, and not passed
        self._channel: Channel | None = None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        undo.callback(_end_context, context, os.getpid())
        self._link = undo.enter_context(
            SchedulerClient(
                address,
                "worker",
                on_event=_weakly(self._on_event),
                on_fault=_weakly(self._on_fault),
                context=context,
                **secure_link,
            )
        )
        welcome = self._link.hello(timeout=timeout)
        super().__init__(threads=threads, slots=welcome.slots)
        self._joined: JoinReply = self._link.join(timeout=timeout, rank=rank, workers=workers, consistency=consistency)
        worker = WorkerIdentity(self._joined.rank, self._joined.incarnation, self._joined.job)
        self._channel = Channel(
            Requests(worker, self._joined.map, atomic_clocks=consistency.is_bulk),
            clock=self._joined.clock,
            timeout=self._timeout,
            refresh=functools.partial(_ask_map, self._link),
            secure=secure,
            context=context,
        )
        undo.callback(self._channel.close)
        if self._link.fault is not None:  # it came before there was a channel to tell
            raise copy_error(self._link.fault)

    def __repr__(self) -> str:
        return (
            f"ClusterStore({self._link.address!r}, worker {self.rank} of {self.num_workers}, {self._consistency}, "
            f"tables={list(self._tables)})"
        )

    # ---- what it is --------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of this worker among all of the job, from 0."""
        return self._joined.rank

    @property
    def num_workers(self) -> int:
        """How many workers the job has."""
        return self._joined.num_workers

    @property
    def consistency(self) -> Consistency:
        """What a pull may see of other workers' pushes."""
        return self._consistency

    @property
    def timeout(self) -> float:
        """Seconds in which every call is done, or fails."""
        return self._timeout

    @property
    def clock(self) -> int:
        """How many ticks this worker has completed; one that takes a dead one's place begins at the others' clock."""
        return self.channel.clock

    @property
    def channel(self) -> Channel:
        """The connections to the servers."""
        assert self._channel is not None
        return self._channel

    @property
    def taking_parts(self) -> bool:
        """Whether this worker is in a loop over :meth:`shoal.Store.parts`."""
        return self._taking_parts > 0

    @property
    def lost_workers(self) -> frozenset[int]:
        """Ranks of workers that were taken for dead since this one connected."""
        return self._lost_workers

    @property
    def joined_at(self) -> int:
        """Clock at which this worker joined its job: above 0, it took the place of one that had died."""
        return self._joined.clock

    def metrics(self) -> dict[str, int]:
        """Count messages and bytes of this worker since it connected."""
        self._check_usable()
        return self.channel.metrics()

    def filter_metrics(self) -> dict[str, dict[str, float]]:
        """Count, for each table that has filters, what they saved and changed: see `docs/filters.md`."""
        self._check_usable()
        return {table: filter.metrics() for table, filter in self._filtered.items()}

    def sends_exactly(self, table: str) -> bool:
        """Whether a table of this name gets gradients, and gives weights, as they are, unrounded and all."""
        filters = choose(self._filters, table)
        return filters is None or filters.exact

    def server_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of the servers.

        Returns
        -------
        list of dict
            One for each endpoint, in the order of their slots: ``server``, ``address``, and its figures, among them the
            staleness that was seen: ``pull_staleness``, clocks between a pull and the slowest worker when it was
            answered, and ``push_staleness``, pushes of others between a worker's pull and its push, each as a histogram
            ``{least of the bucket: how many}``.

        Notes
        -----
        Blocks for a round trip by way of the scheduler. Safe from any thread.
        """
        self._check_usable()
        told = self._ask_figures()
        return [{"server": one.server, "address": one.address, **one.figures} for one in told.endpoints]

    def scheduler_metrics(self) -> dict[str, int]:
        """Return how often the scheduler has refused something, by reason.

        Returns
        -------
        dict of int
            See :meth:`shoal.cluster.scheduler.scheduler.Scheduler.refused`; reasons that did not occur are left out.

        Notes
        -----
        Blocks for a round trip to the scheduler and the servers. Safe from any thread.
        """
        self._check_usable()
        return dict(self._ask_figures().scheduler)

    def _ask_figures(self) -> MetricsReply:
        return self._link.call(
            GetMetrics(), MetricsReply, timeout=self._timeout, doing="asking the servers what they have counted"
        )

    # ---- clocks ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End this worker's clock: see :meth:`shoal.Store.tick`."""
        self._check_usable()
        self.channel.tick()
        self.channel.raise_unobserved()

    def barrier(self, timeout: float | None = None) -> None:
        """Wait for all workers of the job: see :meth:`shoal.Store.barrier`."""
        self._check_usable()
        seconds = self._timeout if timeout is None else timeout
        self.flush(seconds)
        self._wait_at_barrier("barrier", seconds)

    def flush(self, timeout: float | None = None) -> None:
        """Wait for all pushes of this worker: see :meth:`shoal.Store.flush`."""
        self._check_usable()
        self.channel.drain(self._timeout if timeout is None else timeout)
        self.channel.raise_unobserved()

    def _wait_at_barrier(self, name: str, timeout: float) -> None:
        """Wait for all workers. One that gave up waiting has come all the same: it goes on where it was."""
        asked = self._open_barriers.pop(name, None) or self._link.ask(Barrier(name))
        try:
            self._link.answer(asked, BarrierReply, timeout=timeout, doing=f"waiting for all workers at the {name}")
        except DeadlineExceededError:
            self._open_barriers[name] = asked
            raise
        except BaseException:
            self._link.forget(asked)
            raise
        self._link.forget(asked)

    # ---- parts of the data -------------------------------------------------------------------------------------------

    def _take_parts(self, count: int, digest: str, reissue: float) -> Iterator[int]:
        with self._locked():
            number, self._passes = self._passes, self._passes + 1
        return self._take_those_of(number, count, digest, reissue)

    def _take_those_of(self, number: int, count: int, digest: str, reissue: float) -> Iterator[int]:
        self._taking_parts += 1
        try:
            yield from self._parts_of(number, count, digest, reissue)
        finally:
            self._taking_parts -= 1

    def _parts_of(self, number: int, count: int, digest: str, reissue: float) -> Iterator[int]:
        finished = -1
        while True:
            self._check_usable()
            self.channel.drain(self._timeout)  # what was pushed for the part that is finished has arrived
            self.channel.raise_unobserved()
            take = TakeSplit(number, count, digest, finished, reissue, self.clock)
            found = self._link.call(take, SplitReply, timeout=self._timeout, doing="taking a part of the data")
            finished = -1
            if found.part is not None:
                yield found.part
                finished = found.part
            elif found.end is None:
                self._tick_along()
            else:
                while self.clock < found.end:
                    self.tick()
                return

    def _tick_along(self) -> None:
        """Do nothing for one clock of the others."""
        if self._consistency.mode == "asp" or not self._tables:
            time.sleep(_PAUSE)
            return
        table = next(iter(self._tables.values()))
        table.pull(np.zeros(1, np.uint64))  # is answered when the others are where this worker is
        self.tick()

    # ---- tables ------------------------------------------------------------------------------------------------------

    def _find(self, spec: TableSpec) -> int:
        """Have the servers make a table, if they have not: its number."""
        found = self._link.call(
            CreateTable(TableRecord.of(spec)), TableReply, timeout=self._timeout, doing=f"making table {spec.name!r}"
        )
        check_same(found.form.spec(), spec)
        return found.id

    def _make_shard(self, spec: TableSpec) -> RemoteShard:
        number = self._find(spec)
        filters = choose(self._filters, spec.name)
        if filters is not None and spec.name not in self._filtered:
            joined = self._joined
            self._filtered[spec.name] = Filter(filters, joined.rank, joined.incarnation, joined.job)
        return RemoteShard(self.channel, number, spec, self._filtered.get(spec.name), is_bulk=self._consistency.is_bulk)

    @contextlib.contextmanager
    def _snapshots(self, tables: list[tuple[Table, str]], base: checkpoint.Link | None) -> Iterator[checkpoint.Moment]:
        shards = [(cast(RemoteShard, table.shard), table.spec, kind) for table, kind in tables]
        with contextlib.ExitStack() as held:
            # This process's pushes wait for the moment, as those under way are waited for. Those of others do not come
            # between under BSP, where nothing is applied before this worker's next tick.
            with contextlib.ExitStack() as still:
                still.enter_context(self._rwlock.exclusive())
                self.channel.drain(self._timeout)
                self.channel.raise_unobserved()
                if self._shared_storage and shards:
                    numbered = [(shard.number, spec, kind) for shard, spec, kind in shards]
                    moment: checkpoint.Moment = held.enter_context(
                        ServerSnapshotSet(
                            self.channel, self._joined.map.endpoints, numbered, base, lambda: self.lost_workers
                        )
                    )
                else:
                    if any(kind != "plain" for _, _, kind in shards):
                        raise ValueError(_NO_DELTAS)
                    taken = [
                        checkpoint.Taken(spec, UnsynchronizedSnapshot(shard), kind) for shard, spec, kind in shards
                    ]
                    moment = checkpoint.Held(taken, self._slots, self.threads, self.clock)
                    held.enter_context(still.pop_all())  # until all is written
            yield moment

    def check_storage(self, directory: StoragePath, *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Check that all servers may write a save there: see :meth:`shoal.Store.check_storage`."""
        self._check_usable()
        place = open_dir(directory, storage_options)
        tables = [(table, "plain") for table in self._tables.values()][:1]
        if self._shared_storage and tables:
            with self._saving, self._snapshots(tables, None) as moment:
                cast(ServerSnapshotSet, moment).check(place)

    def _load(self, chain: checkpoint.Chain, *, track: bool, progress: bool) -> None:
        """Have servers read their rows, or send them all, while other workers wait: a load is a call of all."""
        manifest = chain[-1].manifest
        self.channel.drain(self._timeout)
        self._wait_at_barrier("begin of a load", self._timeout)

        def make(spec: TableSpec) -> RemoteLoadTarget:
            base = chain[-1].digest if track else ""
            return RemoteLoadTarget(self.channel, self._find(spec), spec, self._slots, base)

        def by_servers(tables: list[RemoteLoadTarget], told: Callable[[int], None]) -> list[int]:
            with ServerLoad(self.channel, self._joined.map.endpoints, [table.number for table in tables]) as loading:
                return loading.read(chain[-1], self._slots, told)

        filled = by_servers if self._shared_storage and manifest.tables else None
        rows = sum(table.rows for link in chain for table in link.manifest.tables)
        enough = max(self._timeout, STALL_SECONDS) + rows / _SLOWEST_LOAD
        with self._locked(), self._rwlock.exclusive():
            for spec in (table.spec() for table in manifest.tables):
                if spec.name not in self._tables:
                    self._add(spec, self._make_shard(spec))
            try:
                if self.rank == 0:
                    for _, fresh in checkpoint.load(chain, make, self.threads, progress=progress, filled=filled):
                        fresh.finish()
            finally:  # they look for themselves whether it went well
                self._wait_at_barrier("end of a load", enough)
            for table in manifest.tables:
                shard = self._tables[table.name].shard
                if (len(shard), shard.step) != (table.size, table.step):
                    raise ShoalError(
                        f"{chain[-1].place} was not loaded: table {table.name!r} has {len(shard)} rows instead of "
                        f"{table.size}; the error of worker 0 says why"
                    )

    # ---- the end, and what the scheduler tells -----------------------------------------------------------------------

    def _end(self, *, failed: bool) -> None:
        self._finalizer.detach()
        _open_stores.discard(self)
        if not self._rwlock.is_ours:
            self._closing.pop_all()  # nothing of it is a child's to close
            return
        with self._closing:
            try:
                if not failed:
                    self.channel.drain(self._timeout)
            finally:
                with contextlib.suppress(ShoalError):
                    self._link.leave(timeout=_LEAVING)
            if not failed:
                self.channel.raise_unobserved()
                if self._consistency.is_bulk and self.channel.has_pushed:
                    _log.warning(
                        "what worker %d pushed in clock %d is dropped, since it did not end that clock: call tick() "
                        "before the store is closed",
                        self.rank,
                        self.clock,
                    )

    def _on_event(self, event: Event) -> None:
        if isinstance(event, ServerGone) and self._channel is not None:
            self._channel.lose(event.rank, event.why)
        elif isinstance(event, WorkerGone):
            self._lost_workers = self._lost_workers | {event.rank}

    def _on_fault(self, error: ShoalError) -> None:
        if self._channel is not None:
            self._channel.fail(error)


_open_stores: weakref.WeakSet[ClusterStore] = weakref.WeakSet()
_Argument = TypeVar("_Argument")


def _abandon(link: SchedulerClient, closing: contextlib.ExitStack, what: str, process: int) -> None:
    """Leave the cluster for a store that was dropped without being closed."""
    if os.getpid() == process:
        link.abandon(closing.close)
        warnings.warn(f"unclosed {what}: use it in a with statement, or call close()", ResourceWarning, stacklevel=2)


@atexit.register
def _leave_at_exit() -> None:
    """Leave for all stores that are open when the interpreter ends, while threads still run."""
    stores = list(_open_stores)
    for store in stores:
        if store._finalizer.detach() is not None:  # so late, a finalizer that is called does nothing any more
            store._link.abandon(store._closing.close)
    deadline = time.monotonic() + _LEAVING + 1
    for store in stores:
        store._link.wait_for_end(max(0.0, deadline - time.monotonic()))


def _weakly(method: Callable[[_Argument], None]) -> Callable[[_Argument], None]:
    """Return what calls a method as long as there is its object."""
    ref = weakref.WeakMethod(method)

    def call(argument: _Argument) -> None:
        found = ref()
        if found is not None:
            found(argument)

    return call


def _bounded(name: str, given: int | None, least: int, most: int) -> int | None:
    if given is None:
        return None
    number = None if isinstance(given, bool) else operator.index(given)
    if number is None or not least <= number <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {given!r}")
    return number


def _ask_map(link: SchedulerClient) -> ClusterMap:
    # Asked again while it is wanted: the keeper, which asks, has other things to do as well.
    return link.call(GetMap(), GetMapReply, timeout=_ASKING, doing="asking for the map of slots").map


def _end_context(context: zmq.Context[zmq.Socket[bytes]], process: int) -> None:
    if os.getpid() == process:
        context.term()


def _security(
    curve: str | os.PathLike[str] | None,
) -> tuple[Callable[[zmq.Socket[bytes]], None] | None, dict[str, Any]]:
    """Return what makes a data socket secure, and what makes the link so."""
    if curve is None:
        return None, {}
    from shoal.cluster.protocol.curve import Keys

    keys = Keys.load(curve, "worker")
    return keys.client_of("server"), {"keys": keys}


class PushCallFuture(CallFuture):
    """A push under way."""

    __slots__ = ("_is_bulk", "_mark")

    def __init__(self, channel: Channel, call: Call, mark: int | None, *, is_bulk: bool) -> None:
        super().__init__(channel, call)
        self._mark = mark  # how often anything was sent again before this push was sent; None: it may change on its way
        self._is_bulk = is_bulk  # no pull of this clock sees it

    def pull(self, batch: _core.KeyBatch, rows: Rows, /) -> Waitable:
        """Fill ``rows`` as they are behind this push."""
        if self._is_bulk:
            return _pull(self.channel, self.call.table, batch, rows, self.call.filter)
        return PullAfterPush(
            self, self._mark, lambda: _pull(self.channel, self.call.table, batch, rows, self.call.filter)
        )


class PullAfterPush:
    """A pull that sees what a push did.

    It is sent right behind the push. If nothing was sent again since, each endpoint took the two in that order; else
    the pull is made anew.
    """

    def __init__(self, push: PushCallFuture, mark: int | None, pull: Callable[[], CallFuture]) -> None:
        self._push = push
        self._mark = mark
        self._pull = pull
        self._pulled = None if mark is None else pull()

    @property
    def _is_last(self) -> bool:
        """Whether no other pull is to follow this one."""
        return self._mark is None or self._mark == self._push.channel.repetitions

    @property
    def done(self) -> bool:
        return self._push.done and self._pulled is not None and self._pulled.done and self._is_last

    def wait(self, timeout: float | None = None) -> None:
        self._push.wait(timeout)
        if self._pulled is not None:
            self._pulled.wait(timeout)
        if self._pulled is None or not self._is_last:
            self._mark = None
            self._pulled = self._pull()
            self._pulled.wait(timeout)


def _pull(channel: Channel, table: int, batch: _core.KeyBatch, rows: Rows, filter: Filter | None) -> CallFuture:
    dim = rows.shape[1] if rows.ndim > 1 else 1
    return channel.begin(Op.PULL, table, hashes=batch.hashes, begins=batch.begins, out=rows, dim=dim, filter=filter)


class RemoteShard:
    """The rows of one table that the servers hold: :class:`shoal.table.shard.Shard` of a cluster.

    Threads: any number of callers. Every method asks the servers but `columns`, and blocks until they answer but
    `pull` and `push`.
    """

    def __init__(
        self, channel: Channel, table: int, spec: TableSpec, filter: Filter | None = None, *, is_bulk: bool = False
    ) -> None:
        self._channel = channel
        self._is_bulk = is_bulk
        self.number = table  # by which the servers know the table
        self._filter = filter
        # An empty one of the engine's knows what is stored, and how wide it is.
        workers = _core.Workers(1)
        self._pattern = pattern = spec.shard(2, workers)
        nothing = _core.KeyBatch(np.empty(0, np.uint64), 2, workers)
        self._columns = {name: pattern.state(nothing, column).shape[1] for column, name in enumerate(pattern.columns())}

    def pull(self, batch: _core.KeyBatch, rows: Rows, /) -> CallFuture:
        """Fill ``rows``."""
        return _pull(self._channel, self.number, batch, rows, self._filter)

    def push(
        self, batch: _core.KeyBatch | _core.SummedBatch, grads: Rows, counts: Counts | None = None, clock: int = 0, /
    ) -> PushCallFuture:
        """Apply one step."""
        mark = self._channel.repetitions if self._filter is None else None
        begun = self._write(Op.PUSH, batch, grads, counts)
        return PushCallFuture(self._channel, begun.call, mark, is_bulk=self._is_bulk)

    def _write(
        self, op: int, batch: _core.KeyBatch | _core.SummedBatch, values: Rows, counts: Counts | None = None
    ) -> CallFuture:
        return self._channel.begin(
            op,
            self.number,
            hashes=batch.hashes,
            begins=batch.begins,
            values=values,
            counts=counts,
            dim=values.shape[1],
            filter=self._filter,
        )

    def assign(self, batch: _core.KeyBatch, rows: Rows, clock: int = 0, /) -> None:
        """Set weights."""
        if not np.isfinite(rows).all():  # no server is asked to do half of it
            raise ValueError(f"weights must be finite: one of them is {rows[~np.isfinite(rows)][0]}")
        self._write(Op.ASSIGN, batch, rows).wait()

    def erase(self, batch: _core.KeyBatch, /) -> int:
        """Remove rows: how many there were."""
        return int(self._channel.begin(Op.ERASE, self.number, hashes=batch.hashes, begins=batch.begins).result())

    def contains(self, batch: _core.KeyBatch, /) -> npt.NDArray[np.uint8]:
        """Tell which rows there are."""
        there = np.zeros(len(batch), np.uint8)
        self._channel.begin(Op.CONTAINS, self.number, hashes=batch.hashes, begins=batch.begins, out=there).wait()
        return there

    def columns(self) -> list[str]:
        """Names of what is stored."""
        return list(self._columns)

    def state(self, batch: _core.KeyBatch, column: int, /) -> Rows:
        """Read one column."""
        width = list(self._columns.values())[column]
        values = np.empty((len(batch), width), np.float32)
        self._channel.begin(
            Op.STATE, self.number, hashes=batch.hashes, begins=batch.begins, out=values, aux=column, dim=width
        ).wait()
        return values

    def read_slot(self, slot: int, /) -> tuple[npt.NDArray[np.uint64], Rows]:
        """Read hashes and weights of a slot."""
        return cast(
            "tuple[npt.NDArray[np.uint64], Rows]", self._channel.begin(Op.SLOT, self.number, slot=slot).result()
        )

    def section(self, slot: int, /) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Read a slot as a checkpoint keeps it: how many rows, their bytes, and what its admission has counted."""
        rows, section, filter = self._channel.begin(Op.SECTION, self.number, slot=slot).result()
        edge = len(section) - int(filter)
        return int(rows), section[:edge], section[edge:]

    def reduce(self, function: int, parameters: npt.NDArray[np.float64], /) -> npt.NDArray[np.float64]:
        """Answer a function of all rows, in slot order; one that changes rows does so exactly once."""
        self._pattern.reduce(function, parameters)  # it refuses what the servers would refuse
        answers = self._channel.begin(
            Op.REDUCE,
            self.number,
            aux=function,
            payload=[parameters],
            count=len(parameters),
            write=function in (Function.DECAY, Function.SHRINK),
        ).result()
        return np.concatenate(answers)

    def sweep(self, rules: npt.NDArray[np.float64], clock: int = 0, /, *, dry_run: bool) -> npt.NDArray[np.uint64]:
        """Drop what expiry rules name, or only count it: the sums of what the endpoints tell."""
        answers = self._channel.begin(
            Op.SWEEP, self.number, aux=int(dry_run), payload=[rules], count=len(rules), write=not dry_run
        ).result()
        return np.asarray(np.sum(answers, axis=0, dtype=np.uint64))

    def table_clock(self, store_clock: int, /) -> int:
        """Return the table's own clock, at this worker's."""
        return int(self.figures()[0][len(_FIGURES) + 1])

    def figures(self) -> list[npt.NDArray[np.uint64]]:
        """Ask each endpoint: step, `_FIGURES`, the table's clock."""
        return cast("list[npt.NDArray[np.uint64]]", self._channel.begin(Op.STATS, self.number).result())

    @property
    def step(self) -> int:
        """Number of the last push: under SSP and ASP of the endpoint that had most."""
        return max(int(figures[0]) for figures in self.figures())

    def __len__(self) -> int:
        return sum(int(figures[1]) for figures in self.figures())

    def stats(self) -> dict[str, int]:
        """Add up the figures of the servers. A request that concerns several endpoints is counted by each."""
        totals = [sum(map(int, figures)) for figures in zip(*self.figures(), strict=True)]
        return dict(zip(_FIGURES, totals[1:-1], strict=True))


_NO_DELTAS = (
    "deltas are written by servers, into storage that they share: this store was connected with shared_storage=False, "
    "so save all rows, without since and track"
)


class UnsynchronizedSnapshot:
    """A table of servers, read by a worker while it is kept still: a :class:`shoal.table.shard.Snapshot`."""

    def __init__(self, shard: RemoteShard) -> None:
        figures = shard.figures()
        self.section = shard.section
        self.step = max(int(figure[0]) for figure in figures)
        self.table_clock = int(figures[0][len(_FIGURES) + 1])
        self.rows, self.bytes = (
            sum(int(figure[1 + _FIGURES.index(name)]) for figure in figures) for name in ("rows", "bytes")
        )

    def changes(self, slot: int, /) -> NoReturn:
        """Refuse: it is not known here."""
        raise ValueError(_NO_DELTAS)

    def done(self, name: str, /) -> None:
        """Do nothing: nobody remembers it."""

    def close(self) -> None:
        """Do nothing: nothing was taken."""


# Behind the step and before the clock: what the servers tell of a table, in this order.
_FIGURES = (
    "rows",
    "cells",
    "bytes",
    "pulls",
    "pushes",
    "rows_pulled",
    "rows_pushed",
    "rows_created",
    "rows_erased",
    "nonfinite_rows",
    "refused",
    "waiting",
    "expired_by_TimeToLive",
    "expired_by_DecayedScore",
    "expired_by_MinNorm",
    "expired_by_MaxRows",
)


class RemoteLoadTarget:
    """Rows of a table that the servers put in place of what they have at :meth:`finish`.

    They read them themselves (cluster/loading.py), or are sent them where no storage is shared. A section of a
    checkpoint that was cut into other slots is then cut anew here, by an empty shard of the engine's: in messages
    servers take the rows of one slot at a time.
    """

    def __init__(self, channel: Channel, table: int, spec: TableSpec, slots: int, base: str) -> None:
        self._channel = channel
        self._base = digest_words(base) if base else []  # of what changes from then on
        self.number = table  # by which the servers know the table
        self._spec = spec
        self._slots = slots
        self._sent: list[CallFuture] = []
        self.step = 0
        self._clock = 0

    def reserve(self, rows: list[int], /) -> None:
        """Begin: that many rows will come in each slot of the checkpoint's cut."""
        given = np.asarray(rows, np.uint64)
        if len(given) >= self._slots:
            room = given.reshape(self._slots, -1).sum(axis=1, dtype=np.uint64)
        else:
            share = self._slots // len(given)
            room = np.repeat((given + np.uint64(share - 1)) // np.uint64(share), share)
        self._begin(Op.LOAD_BEGIN, [room], count=len(room)).wait()

    def restore(self, rows: int, section: npt.NDArray[np.uint8], /) -> int:
        """Send the rows of a section: all of them. Returns while they are under way."""
        hashes = section[: 8 * rows].view(np.uint64)
        shift = np.uint64(64 - self._slots.bit_length() + 1)
        first, last = (hashes[[0, -1]] >> shift).tolist()
        if first == last and section.nbytes <= _SECTION_BYTES:
            self._send(first, rows, section)
            return rows
        for slot, some, piece in _cut_anew(self._spec, rows, section, self._slots):
            self._send(slot, some, piece)
        return rows

    def restore_filter(self, slots: int, slot: int, filter: npt.NDArray[np.uint8], /) -> None:
        """Send what the admission of a slot of so many has counted. Returns while it is under way."""
        cut = _cut_for(self._slots, slots, filter.nbytes)
        if cut <= slots:
            self._send_filter(slots, slot, filter)
            return
        scratch = self._spec.shard(cut, _core.Workers(1))
        scratch.restore_filter(slots, slot, filter)
        for mine in range(slot * cut // slots, (slot + 1) * cut // slots):
            _, _, piece = scratch.section(mine)
            if len(piece):
                self._send_filter(cut, mine, piece)

    def set_clock(self, table_clock: int, store_clock: int, /) -> None:
        """Let the table's clock go on at ``table_clock``, from this worker's clock of the end of the load."""
        self._clock = table_clock

    def _send_filter(self, cut: int, slot: int, filter: npt.NDArray[np.uint8]) -> None:
        at = slot * self._slots // cut
        self._add(self._begin(Op.LOAD_FILTER, [filter], count=cut, slot=at, aux=slot))

    def _send(self, slot: int, rows: int, section: npt.NDArray[np.uint8]) -> None:
        self._add(self._begin(Op.LOAD_ROWS, [section], count=rows, slot=slot))

    def _add(self, begun: CallFuture) -> None:
        for call in [call for call in self._sent if call.done]:
            call.wait()  # raises what went wrong
            self._sent.remove(call)
        self._sent.append(begun)

    def _begin(self, op: int, payload: list[Any], **what: Any) -> CallFuture:
        return self._channel.begin(op, self.number, payload=payload, **what)

    def finish(self) -> None:
        """Put the rows in place."""
        for call in self._sent:
            call.wait()
        numbers = [self.step, self._clock, *self._base]
        self._begin(Op.LOAD_END, [np.array(numbers, np.uint64)], count=len(numbers)).wait()


def _cut_for(own: int, slots: int, size: int) -> int:
    """Return how finely to cut what has a size in one of ``slots`` slots: as the store is, or finer."""
    finest = 1 << 14
    cut = own
    while cut < finest and size * slots > _SECTION_BYTES * cut:
        cut *= 2
    return cut


def _cut_anew(
    spec: TableSpec, rows: int, section: npt.NDArray[np.uint8], slots: int
) -> list[tuple[int, int, npt.NDArray[np.uint8]]]:
    """Cut a section at the borders of ``slots`` slots, and finer where a piece would be too long for a message."""
    cut = _cut_for(slots, slots, section.nbytes)
    scratch = spec.shard(cut, _core.Workers(1))
    hashes = section[: 8 * rows].view(np.uint64)
    mine = (hashes >> np.uint64(64 - cut.bit_length() + 1)).astype(np.int64)
    scratch.reserve(np.bincount(mine, minlength=cut).tolist())
    scratch.restore(rows, section)
    pieces = ((int(slot) * slots // cut, *scratch.section(int(slot))[:2]) for slot in np.unique(mine))
    return list(pieces)
