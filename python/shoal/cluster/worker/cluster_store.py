"""The store of a cluster's worker: the calls of :class:`shoal.Store`, executed by servers.

A table is the same class here and in one process. It uses a :class:`.RemoteShard`, which translates the methods of the
engine's shard into hashes, slots and operations of the wire protocol. The :class:`.Channel` carries these to the
servers; the :class:`.SchedulerClient` carries rare requests to the scheduler.

    table.pull(keys) -- KeyBatch --> RemoteShard.pull(hashes, rows) --> Channel         --> endpoint of each slot range
    store.table(..), barrier(), map of slots                        --> SchedulerClient --> scheduler

Reads other than pulls (contains, state, items, len, stats, a save) see what a pull of the same clock sees, and wait
as a pull does.

Over 600 lines: the calls of one object, each with its documentation.

Threads: as for any store. Fork: a child's copy raises WrongProcessError; a child that needs the tables connects as a
worker of its own, with its own rank.
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
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import zmq

from shoal import checkpoint
from shoal.cluster.protocol.address import own_host
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
    MapChanged,
    MetricsReply,
    ServerGone,
    SplitReply,
    TableRecord,
    TableReply,
    TakeSplit,
    WorkerGone,
)
from shoal.cluster.protocol.metrics import WORKER
from shoal.cluster.protocol.scheduler_client import PendingRequest, SchedulerClient
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.protocol.status import as_dict
from shoal.cluster.protocol.tasks import STALL_SECONDS
from shoal.cluster.worker.calls import WorkerIdentity
from shoal.cluster.worker.channel import Channel
from shoal.cluster.worker.filters import Filter, Filters, choose
from shoal.cluster.worker.load import ServerLoad
from shoal.cluster.worker.remote_load import RemoteLoadTarget
from shoal.cluster.worker.remote_shard import NO_DELTAS, RemoteShard, UnsynchronizedSnapshot
from shoal.cluster.worker.requests import Requests
from shoal.cluster.worker.save import ServerSnapshotSet
from shoal.consistency import Consistency
from shoal.errors import DeadlineExceededError, ShoalError
from shoal.storage.base import StoragePath
from shoal.storage.open import open_dir
from shoal.store.base import Store
from shoal.store.description import check_same
from shoal.table.spec import TableSpec
from shoal.table.table import Table

if TYPE_CHECKING:
    from shoal.cluster.protocol.health import HealthServer

__all__ = ["ClusterStore"]

_log = logging.getLogger("shoal.cluster")

_SPLIT_POLL_SECONDS = 0.1  # until the scheduler is asked for a split again
_LEAVE_SECONDS = 2.0
_MAP_SECONDS = 2.0  # to wait for a map
_MIN_LOAD_ROWS_PER_SECOND = 1e5  # a slower load has failed
_MAX_SOCKETS = 1 << 14  # three for each endpoint: its connection, and both ends of its monitor


class ClusterStore(Store):
    """All tables of a cluster, as one of its workers sees them. Made by :func:`shoal.connect` and :func:`shoal.launch`.

    ``on_close`` is called once, when the store is closed and has left, or when it could not be made. ``supervise`` is
    called with a function that has all further calls of the store raise the error that it is passed.
    """

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
        shared_storage: bool = True,
        metrics_port: str | None = None,
        on_close: Callable[[], None] | None = None,
        supervise: Callable[[Callable[[ShoalError], None]], None] = lambda fail: None,
    ) -> None:
        self._filters = dict(filters) if isinstance(filters, Mapping) else filters
        self._filtered: dict[str, Filter] = {}
        self._shared_storage = shared_storage
        with contextlib.ExitStack() as undo:  # run when the store is closed, last to first
            if on_close is not None:
                undo.callback(on_close)
            for table in self._filters if isinstance(self._filters, dict) else [""]:
                choose(self._filters, table)  # raises a TypeError for another type
                if not isinstance(table, str):
                    raise TypeError(f"filters are given for each table's name, got {table!r}")
                table.encode()  # raises a ValueError for a name that no table can have
            health = None if metrics_port is None else undo.enter_context(_answer_probes(metrics_port))
            turn = (lambda: True) if health is None else health.turn
            self._connect(address, undo, consistency, workers, rank, timeout, threads, curve, turn)
            if health is not None:
                ref = weakref.ref(self)
                health.watch(lambda: _unready(ref()), "worker", WORKER, lambda: _counters(ref()), self.rank)
            self._closing = undo.pop_all()
        # Neither the threads nor their callbacks hold the store: dropping it without closing it leaves the cluster too.
        what = f"ClusterStore({address!r}, worker {self.rank} of {self.num_workers})"
        self._finalizer = weakref.finalize(self, _abandon, self._scheduler, self._closing, what, os.getpid())
        self._finalizer.atexit = False  # see _leave_at_exit
        _open_stores.add(self)
        supervise(_weakly(self._scheduler.fail))

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
        turn: Callable[[], bool],
    ) -> None:
        if not isinstance(consistency, Consistency):
            raise TypeError(f"consistency is one of BSP(), SSP(staleness) and ASP(), got {consistency!r}")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
            raise ValueError(f"timeout must be a number of seconds above 0, got {timeout!r}")
        if not isinstance(self._shared_storage, bool):
            raise TypeError(f"shared_storage is True or False, got {self._shared_storage!r}")
        workers = _bounded("workers", workers, 1, MAX_WORKERS)
        rank = _bounded("rank", rank, 0, MAX_WORKERS - 1)
        secure, secure_scheduler = _security(curve)
        self._splits_loops = 0
        self._lost_workers: frozenset[int] = frozenset()
        self._newest_map: ClusterMap | None = None  # of the last event
        self._consistency = consistency
        self._timeout = float(timeout)
        self._passes = 0  # calls of `splits`
        self._open_barriers: dict[str, PendingRequest] = {}  # barriers that this worker has reached and not passed
        self._channel: Channel | None = None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        undo.callback(_end_context, context, os.getpid())
        self._scheduler = undo.enter_context(
            SchedulerClient(
                address,
                "worker",
                on_event=_weakly(self._on_event),
                on_fault=_weakly(self._on_fault),
                clock=_clock_of(weakref.ref(self), turn),
                context=context,
                **secure_scheduler,
            )
        )
        welcome = self._scheduler.hello(timeout=timeout)
        super().__init__(threads=threads, slots=welcome.slots)
        self._joined: JoinReply = self._scheduler.join(
            timeout=timeout, rank=rank, workers=workers, consistency=consistency
        )
        worker = WorkerIdentity(self._joined.rank, self._joined.incarnation, self._joined.job)
        self._channel = Channel(
            Requests(worker, self._joined.map, atomic_clocks=consistency.is_bulk),
            clock=self._joined.clock,
            timeout=self._timeout,
            refresh=functools.partial(_ask_map, self._scheduler),
            secure=secure,
            context=context,
        )
        undo.callback(self._channel.close)
        self._follow_map()
        if self._scheduler.fault is not None:  # it came before there was a channel
            raise copy_error(self._scheduler.fault)

    def __repr__(self) -> str:
        return (
            f"ClusterStore({self._scheduler.address!r}, worker {self.rank} of {self.num_workers}, {self._consistency}, "
            f"tables={list(self._tables)})"
        )

    # ---- properties --------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of this worker among all of the job, from 0."""
        return self._joined.rank

    @property
    def num_workers(self) -> int:
        """Number of workers of the job."""
        return self._joined.num_workers

    @property
    def host(self) -> str:
        """Address of this machine on the network of the scheduler."""
        return own_host(self._scheduler.address)

    @property
    def consistency(self) -> Consistency:
        """What a pull may see of other workers' pushes."""
        return self._consistency

    @property
    def timeout(self) -> float:
        """Seconds after which a call that is not done fails."""
        return self._timeout

    @property
    def clock(self) -> int:
        """Number of completed ticks; a worker that replaces a dead one begins at the clock of the others."""
        return self.channel.clock

    @property
    def channel(self) -> Channel:
        """The connections to the servers."""
        assert self._channel is not None
        return self._channel

    @property
    def taking_splits(self) -> bool:
        """Whether this worker is in a loop over :meth:`shoal.Store.splits`."""
        return self._splits_loops > 0

    @property
    def lost_workers(self) -> frozenset[int]:
        """Ranks of workers that were declared dead since this one connected."""
        return self._lost_workers

    @property
    def joined_at(self) -> int:
        """Clock at which this worker joined its job: above 0 if it replaced a dead worker."""
        return self._joined.clock

    def metrics(self) -> dict[str, int]:
        """Return counts of messages and bytes of this worker since it connected."""
        self._check_usable()
        return self.channel.metrics()

    def filter_metrics(self) -> dict[str, dict[str, float]]:
        """Return, for each table that has filters, what they saved and changed: see `docs/filters.md`."""
        self._check_usable()
        return {table: filter.metrics() for table, filter in self._filtered.items()}

    def sends_exactly(self, table: str) -> bool:
        """Whether gradients and weights of a table of this name are sent completely and unrounded."""
        filters = choose(self._filters, table)
        return filters is None or filters.exact

    def server_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of the servers.

        Returns
        -------
        list of dict
            One for each endpoint, in the order of their slots: ``server``, ``address``, and its counters, among them
            the observed staleness: ``pull_staleness``, clocks between a pull and the slowest worker when it was
            answered, and ``push_staleness``, pushes of others between a worker's pull and its push, each as a histogram
            ``{lower bound of the bucket: count}``.

        Notes
        -----
        Blocks for a round trip by way of the scheduler. Safe from any thread.
        """
        self._check_usable()
        reply = self._get_metrics()
        return [{"server": one.server, "address": one.address, **one.figures} for one in reply.endpoints]

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
        return dict(self._get_metrics().scheduler)

    def cluster(self) -> dict[str, Any]:
        """Return the status of the cluster: its members, its job and the scheduler.

        Returns
        -------
        dict
            What ``shoal cluster ADDRESS status --json`` prints; see `docs/cluster.md`.

        Notes
        -----
        Blocks for a round trip to the scheduler. Safe from any thread.
        """
        self._check_usable()
        return as_dict(self._scheduler.status(timeout=self._timeout))

    def drain(self, server: int) -> str:
        """Request that the slots of a server move to the others, and that it then ends.

        Parameters
        ----------
        server : int
            Its rank.

        Returns
        -------
        str
            What follows.

        Raises
        ------
        ValueError
            The cluster has no such server, or the others are too few for its replicas.
        ServerLostError
            A server was lost with its rows.

        Notes
        -----
        Blocks for a round trip to the scheduler, not until the server is empty: :meth:`cluster` shows how far it is.
        Pulls and pushes continue meanwhile. Safe from any thread.
        """
        self._check_usable()
        return self._scheduler.drain(server, timeout=self._timeout)

    def rebalance(self, by: str = "slots") -> str:
        """Request that slots move until all endpoints have about equally much.

        Parameters
        ----------
        by : {"slots", "rows", "bytes", "load"}
            Of what: slots, rows, bytes of rows, or rows that were read or changed in about the last 20 heartbeats.

        Returns
        -------
        str
            What follows.

        Raises
        ------
        ServerLostError
            A server was lost with its rows.
        ValueError
            For another ``by``.

        Notes
        -----
        Blocks for a round trip to the scheduler, not until the slots have moved: :meth:`cluster` shows where they are.
        Pulls and pushes continue meanwhile. Safe from any thread.
        """
        self._check_usable()
        return self._scheduler.rebalance(by=by, timeout=self._timeout)

    def _get_metrics(self) -> MetricsReply:
        return self._scheduler.call(
            GetMetrics(), MetricsReply, timeout=self._timeout, doing="asking the servers for their metrics"
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
        """Wait for all workers. After a timeout this worker stays at the barrier: the next call continues to wait."""
        asked = self._open_barriers.pop(name, None) or self._scheduler.ask(Barrier(name))
        try:
            self._scheduler.answer(asked, BarrierReply, timeout=timeout, doing=f"waiting for all workers at the {name}")
        except DeadlineExceededError:
            self._open_barriers[name] = asked
            raise
        except BaseException:
            self._scheduler.forget(asked)
            raise
        self._scheduler.forget(asked)

    # ---- splits of the data ------------------------------------------------------------------------------------------

    def _take_splits(self, count: int, digest: str, reissue: float) -> Iterator[int]:
        with self._locked():
            number, self._passes = self._passes, self._passes + 1
        return self._take_splits_of(number, count, digest, reissue)

    def _take_splits_of(self, number: int, count: int, digest: str, reissue: float) -> Iterator[int]:
        self._splits_loops += 1
        try:
            yield from self._request_splits(number, count, digest, reissue)
        finally:
            self._splits_loops -= 1

    def _request_splits(self, number: int, count: int, digest: str, reissue: float) -> Iterator[int]:
        finished = -1
        while True:
            self._check_usable()
            self.channel.drain(self._timeout)  # the pushes for the finished split have arrived
            self.channel.raise_unobserved()
            take = TakeSplit(number, count, digest, finished, reissue, self.clock)
            found = self._scheduler.call(
                take, SplitReply, timeout=self._timeout, doing="requesting a split of the data"
            )
            finished = -1
            if found.split is not None:
                yield found.split
                finished = found.split
            elif found.end is None:
                self._tick_along()
            else:
                while self.clock < found.end:
                    self.tick()
                return

    def _tick_along(self) -> None:
        """Let one clock of the other workers pass."""
        if self._consistency.mode == "asp" or not self._tables:
            time.sleep(_SPLIT_POLL_SECONDS)
            return
        table = next(iter(self._tables.values()))
        table.pull(np.zeros(1, np.uint64))  # answered when the others have reached this worker's clock
        self.tick()

    # ---- tables ------------------------------------------------------------------------------------------------------

    def _find(self, spec: TableSpec) -> int:
        """Have the servers make a table, if they have not: its number."""
        found = self._scheduler.call(
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
        return RemoteShard(
            self.channel,
            number,
            spec,
            self._filtered.get(spec.name),
            workers=self._workers,
            is_bulk=self._consistency.is_bulk,
        )

    @contextlib.contextmanager
    def _snapshots(
        self, tables: list[tuple[Table, str]], base: checkpoint.ChainEntry | None
    ) -> Iterator[checkpoint.SnapshotSet]:
        shards = [(cast(RemoteShard, table.shard), table.spec, kind) for table, kind in tables]
        with contextlib.ExitStack() as held:
            # New pushes of this process wait until the snapshot is taken, and the snapshot waits for pending ones.
            # Under BSP pushes of other workers cannot interfere: none is applied before this worker's next tick.
            with contextlib.ExitStack() as paused:
                paused.enter_context(self._rwlock.exclusive())
                self.channel.drain(self._timeout)
                self.channel.raise_unobserved()
                if self._shared_storage and shards:
                    numbered = [(shard.number, spec, kind) for shard, spec, kind in shards]
                    snapshots: checkpoint.SnapshotSet = held.enter_context(
                        ServerSnapshotSet(self.channel, numbered, base, lambda: self.lost_workers)
                    )
                else:
                    if any(kind != "plain" for _, _, kind in shards):
                        raise ValueError(NO_DELTAS)
                    table_snapshots = [
                        checkpoint.TableSnapshot(spec, UnsynchronizedSnapshot(shard), kind)
                        for shard, spec, kind in shards
                    ]
                    snapshots = checkpoint.LocalSnapshotSet(table_snapshots, self._slots, self.threads, self.clock)
                    held.enter_context(paused.pop_all())  # pushes wait until all rows are written
            yield snapshots

    def check_storage(self, directory: StoragePath, *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Check that all servers may write a save there: see :meth:`shoal.Store.check_storage`."""
        self._check_usable()
        storage_dir = open_dir(directory, storage_options)
        tables = [(table, "plain") for table in self._tables.values()][:1]
        if self._shared_storage and tables:
            with self._saving, self._snapshots(tables, None) as snapshots:
                cast(ServerSnapshotSet, snapshots).check(storage_dir)

    def _load(self, chain: checkpoint.Chain, *, track: bool, progress: bool) -> None:
        """Load as worker 0 while the other workers wait: the servers read their rows, or this worker sends them."""
        manifest = chain[-1].manifest
        self.channel.drain(self._timeout)
        self._wait_at_barrier("begin of a load", self._timeout)

        def make(spec: TableSpec) -> RemoteLoadTarget:
            base = chain[-1].digest if track else ""
            return RemoteLoadTarget(self.channel, self._find(spec), spec, self._slots, base)

        def by_servers(tables: list[RemoteLoadTarget], on_progress: Callable[[int], None]) -> list[int]:
            with ServerLoad(self.channel, [table.number for table in tables]) as loading:
                return loading.read(chain[-1], self._slots, on_progress)

        restore = by_servers if self._shared_storage and manifest.tables else None
        rows = sum(table.rows for link in chain for table in link.manifest.tables)
        enough = max(self._timeout, STALL_SECONDS) + rows / _MIN_LOAD_ROWS_PER_SECOND
        with self._locked(), self._rwlock.exclusive():
            for spec in (table.spec() for table in manifest.tables):
                if spec.name not in self._tables:
                    self._add(spec, self._make_shard(spec))
            try:
                if self.rank == 0:
                    for _, fresh in checkpoint.load(chain, make, self.threads, progress=progress, restore=restore):
                        fresh.finish()
            finally:  # also after an error: the other workers check the result themselves
                self._wait_at_barrier("end of a load", enough)
            for table in manifest.tables:
                shard = self._tables[table.name].shard
                if (len(shard), shard.step) != (table.size, table.step):
                    raise ShoalError(
                        f"{chain[-1].storage_dir} was not loaded: table {table.name!r} has {len(shard)} rows instead "
                        f"of {table.size}; see the error of worker 0"
                    )

    # ---- closing, and events from the scheduler ----------------------------------------------------------------------

    def _end(self, *, failed: bool) -> None:
        self._finalizer.detach()
        _open_stores.discard(self)
        if not self._rwlock.is_ours:
            self._closing.pop_all()  # a forked child closes nothing of its parent's
            return
        with self._closing:
            try:
                if not failed:
                    self.channel.drain(self._timeout)
            finally:
                with contextlib.suppress(ShoalError):
                    self._scheduler.leave(timeout=_LEAVE_SECONDS)
            if not failed:
                self.channel.raise_unobserved()
                if self._consistency.is_bulk and self.channel.has_pushed:
                    _log.warning(
                        "pushes of worker %d in clock %d are dropped, because it did not end that clock: call tick() "
                        "before the store is closed",
                        self.rank,
                        self.clock,
                    )

    def _on_event(self, event: Event) -> None:
        if isinstance(event, ServerGone) and self._channel is not None:
            self._channel.lose(event.rank, event.why)
        elif isinstance(event, MapChanged):
            self._newest_map = event.map  # it may come before there is a channel
            self._follow_map()
        elif isinstance(event, WorkerGone):
            self._lost_workers = self._lost_workers | {event.rank}

    def _follow_map(self) -> None:
        if self._newest_map is not None and self._channel is not None:
            self._channel.set_map(self._newest_map)

    def _on_fault(self, error: ShoalError) -> None:
        if self._channel is not None:
            self._channel.fail(error)


def _clock_of(ref: weakref.ref[ClusterStore], turn: Callable[[], bool]) -> Callable[[], int]:
    def clock() -> int:
        turn()  # this thread is the one whose heartbeats keep the worker alive
        store = ref()
        return 0 if store is None or store._channel is None else store._channel.clock

    return clock


def _answer_probes(port: str) -> HealthServer:
    from shoal.cluster.protocol.health import HealthServer, parse_listen  # takes a tenth of a second

    health = HealthServer(parse_listen(port))
    _log.info("probes are answered at %s", health.address)
    return health


def _unready(store: ClusterStore | None) -> list[str]:
    """Return why all calls of a store fail; empty if they do not."""
    fault = None if store is None else store._scheduler.fault
    return [] if fault is None else [str(fault)]


def _counters(store: ClusterStore | None) -> dict[str, int]:
    """Return the values of the metrics `WORKER`."""
    with contextlib.suppress(ShoalError):  # it is being closed
        if store is not None:
            return {"clock": store.clock, **store.channel.metrics()}
    return {}


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
        if store._finalizer.detach() is not None:  # otherwise the finalizer has run already
            store._scheduler.abandon(store._closing.close)
    deadline = time.monotonic() + _LEAVE_SECONDS + 1
    for store in stores:
        store._scheduler.wait_for_end(max(0.0, deadline - time.monotonic()))


def _weakly(method: Callable[[_Argument], None]) -> Callable[[_Argument], None]:
    """Return a function that calls a method while its object exists."""
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
    # A short timeout, since the request is repeated while a map is needed: the channel's background thread, which makes
    # it, must not be blocked for long.
    return link.call(GetMap(), GetMapReply, timeout=_MAP_SECONDS, doing="asking for the map of slots").map


def _end_context(context: zmq.Context[zmq.Socket[bytes]], process: int) -> None:
    if os.getpid() == process:
        context.term()


def _security(
    curve: str | os.PathLike[str] | None,
) -> tuple[Callable[[zmq.Socket[bytes]], None] | None, dict[str, Any]]:
    """Return the function that secures a data socket, and the arguments that secure the scheduler's client."""
    if curve is None:
        return None, {}
    from shoal.cluster.protocol.curve import Keys

    keys = Keys.load(curve, "worker")
    return keys.client_of("server"), {"keys": keys}
