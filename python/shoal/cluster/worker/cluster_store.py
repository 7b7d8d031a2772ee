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

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from shoal import _core
from shoal.base.defaults import MAX_WORKERS
from shoal.base.logs import identify_store
from shoal.checkpoint.format import Chain, ChainEntry
from shoal.checkpoint.read import load as load_checkpoint
from shoal.checkpoint.write import LocalSnapshotSet, SnapshotSet, TableSnapshot
from shoal.cluster.protocol.messages import (
    AcceptedReply,
    Barrier,
    BarrierReply,
    CreateTable,
    Drain,
    GetMetrics,
    HandOver,
    JobConsistency,
    Join,
    JoinReply,
    MetricsReply,
    Rebalance,
    SplitReply,
    TableReply,
    TakeSplit,
    WorkerGone,
    WorkersChange,
)
from shoal.cluster.protocol.metrics import Values
from shoal.cluster.protocol.records import Event
from shoal.cluster.protocol.scheduler_client import PendingRequest
from shoal.cluster.protocol.status import GetStatus, StatusReply
from shoal.cluster.protocol.tasks import STALL_SECONDS
from shoal.cluster.worker.cache import Cache, choose_cache
from shoal.cluster.worker.cached_shard import CachedShard
from shoal.cluster.worker.channel import Role, WorkerIdentity
from shoal.cluster.worker.connected_store import ConnectedStore, ask_map, bounded
from shoal.cluster.worker.filters import Filters, choose, make_filter
from shoal.cluster.worker.load import ServerLoad
from shoal.cluster.worker.remote_load import RemoteLoadTarget
from shoal.cluster.worker.remote_shard import NO_DELTAS, RemoteShard, UnsynchronizedSnapshot
from shoal.cluster.worker.save import ServerSnapshotSet
from shoal.consistency import Consistency, as_consistency
from shoal.errors import ClusterChangedError, DeadlineExceededError, ProtocolError, ShoalError
from shoal.storage.base import StoragePath
from shoal.storage.open import open_dir
from shoal.store.description import check_same
from shoal.store.member import Member
from shoal.store.order import Parts, Placement
from shoal.table.spec import TableRecord, TableSpec
from shoal.table.table import Table

_log = logging.getLogger("shoal.cluster")

_JOB_NAME = re.compile(r"[A-Za-z0-9._-]{0,64}")
_SPLIT_POLL_SECONDS = 0.1  # until the scheduler is asked for a split again
_SILENT_SECONDS = 5.0  # that a scheduler may take to answer, before a checkpoint
_MIN_LOAD_ROWS_PER_SECOND = 1e5  # a slower load has failed


class ClusterStore(ConnectedStore):
    """All tables of a cluster, as one of its workers sees them. Made by :func:`shoal.connect` and :func:`shoal.launch`.

    ``tracing``, ``on_close`` and ``supervise`` are those of :class:`.ConnectedStore`.
    """

    def __init__(
        self,
        address: str,
        *,
        consistency: Consistency | str,
        workers: int | tuple[int, int] | None,
        rank: int | None,
        timeout: float,
        threads: int | None,
        curve: str | os.PathLike[str] | None,
        filters: Filters | Mapping[str, Filters] | None,
        cache: Cache | Mapping[str, Cache] | None = None,
        shared_storage: bool = True,
        metrics_port: str | None = None,
        tracing: bool = False,
        job: str | None = None,
        on_close: Callable[[], None] | None = None,
        supervise: Callable[[Callable[[ShoalError], None]], None] = lambda fail: None,
    ) -> None:
        self._job_name = "" if job is None else job
        self._filters = dict(filters) if isinstance(filters, Mapping) else filters
        self._filtered: dict[str, _core.Filter] = {}
        self._cache = dict(cache) if isinstance(cache, Mapping) else cache
        self._cached: dict[str, CachedShard] = {}  # by the table's name
        self._saved_bytes: dict[str, float] = {}  # by the filters of each table
        self._shared_storage = shared_storage
        self._consistency = as_consistency(consistency)
        self._workers_wanted, self._most_workers = workers if isinstance(workers, tuple) else (workers, 0)
        self._wanted_rank = rank
        self._gone: dict[tuple[int, int], None] = {}  # workers that were lost: job and rank, in order
        self._changing: set[int] = set()  # jobs whose number of workers is to change
        self._passes = 0  # calls of `splits`
        self._ticks: dict[int, _core.Call] = {}  # by clock: those that do not count yet; unused under BSP
        self._counting = threading.Lock()  # guards _counted_clock
        self._open_barriers: dict[str, PendingRequest] = {}  # barriers that this worker has reached and not passed
        self._tracked = ""  # digest of the checkpoint since which changes are tracked, as far as this worker knows
        super().__init__(
            address,
            "worker",
            timeout=timeout,
            threads=threads,
            curve=curve,
            metrics_port=metrics_port,
            tracing=tracing,
            on_close=on_close,
            supervise=supervise,
        )

    def _check_arguments(self) -> None:
        for table in self._filters if isinstance(self._filters, dict) else [""]:
            choose(self._filters, table)  # raises a TypeError for another type
            if not isinstance(table, str):
                raise TypeError(f"filters are given for each table's name, got {table!r}")
            table.encode()  # raises a ValueError for a name that no table can have
        for table in self._cache if isinstance(self._cache, dict) else [""]:
            cache = choose_cache(self._cache, table)
            if cache is not None:
                cache.check(self._consistency)
        if not isinstance(self._shared_storage, bool):
            raise TypeError(f"shared_storage is True or False, got {self._shared_storage!r}")
        if not isinstance(self._job_name, str):
            raise TypeError(f"job is the name of a job, got {self._job_name!r}")
        if not _JOB_NAME.fullmatch(self._job_name):
            raise ValueError(
                f"a job's name has up to 64 letters, digits, dots, dashes and underscores, got {self._job_name!r:.80}"
            )
        if self._job_name and self._most_workers:
            raise ValueError(
                f"the number of workers of job {self._job_name!r} cannot change, got workers="
                f"{(self._workers_wanted, self._most_workers)}: pass one number, or join the job without a name"
            )
        if self._job_name and self._workers_wanted is None:
            raise ValueError(
                f"job {self._job_name!r} needs its number of workers: pass workers=N (--workers N), the same for each "
                "of its workers"
            )
        self._workers_wanted = bounded("workers", self._workers_wanted, 1, MAX_WORKERS)
        self._wanted_rank = bounded("rank", self._wanted_rank, 0, MAX_WORKERS - 1)
        if self._most_workers:
            least = self._workers_wanted or 1
            self._most_workers = bounded("the greatest number of workers", self._most_workers, least, MAX_WORKERS) or 0
            if self._wanted_rank is not None:
                raise ValueError(
                    f"the number of workers may change, and ranks with it: leave out rank={self._wanted_rank}"
                )

    def _join(self) -> Role:
        wanted = Join(
            self._wanted_rank,
            workers=self._workers_wanted,
            rules=JobConsistency.of(self._consistency),
            most=self._most_workers,
            job=self._job_name,
        )
        self._joined: JoinReply = self._scheduler.join(wanted, self._timeout)
        identify_store("worker", rank=self._joined.rank, job=self._joined.job)
        joined = self._joined
        self._counted_clock = joined.clock
        self._gone.update(dict.fromkeys((joined.job, rank) for rank in joined.gone))
        self.member = Member(
            job=joined.job,
            job_name=self._job_name,
            joined_at=joined.clock,
            is_replacement=joined.replaces,
            replacement_seconds=joined.replacement_seconds,
            workers_range=(self._workers_wanted or 1, self._most_workers) if self._most_workers else None,
            continued=joined.continues or None,
            past_barriers=joined.passed,
            gone=self._gone,
            changing=self._changing,
        )
        worker = WorkerIdentity(joined.rank, joined.incarnation, joined.job)
        return Role(worker, joined.map, joined.clock, self._consistency.is_bulk)

    @property
    def _about(self) -> str:
        job = f" of job {self._job_name!r}" if self._job_name else ""
        return f"{self._scheduler.address!r}, worker {self.rank} of {self.num_workers}{job}"

    def __repr__(self) -> str:
        return f"ClusterStore({self._about}, {self._consistency}, tables={list(self._tables)})"

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
    def consistency(self) -> Consistency:
        """What a pull may see of other workers' pushes."""
        return self._consistency

    @property
    def clock(self) -> int:
        """Number of completed ticks; a worker that replaces a dead one begins at the clock of the others."""
        return self.channel.clock

    @property
    def counted_clock(self) -> int:
        """Number of ticks that all servers have confirmed; under BSP a clock counts on all of them or on none."""
        self._check_usable()
        return self.clock if self._consistency.is_bulk else self._count_ticks()

    @property
    def placement(self) -> Placement:
        """Where the rows are."""
        map = self.channel.map
        return Placement(map.epoch, [(arc.first_slot, arc.end_slot, arc.primary) for arc in map.arcs])

    def log_order(self, tables: Sequence[str]) -> None:
        """Keep where servers execute pulls and pushes: see :meth:`shoal.Store.log_order`."""
        self._check_usable()
        if tables and self._consistency.is_bulk:
            raise ValueError(
                "under BSP a fit is the same each time, and needs no record of an order: leave out record (--record)"
            )
        for name in tables:
            if name in self._cached or not self.sends_exactly(name) or self._tracer is not None:
                what = "a cache" if name in self._cached else "traces" if self._tracer else "filters that round or drop"
                raise ValueError(
                    f"table {name!r} has {what}, with which a fit cannot be recorded: leave out that, or record "
                    "(--record)"
                )
        self.channel.client.log_order({cast(RemoteShard, self._tables[name].shard).number for name in tables})

    def arc_steps(self, table: str) -> list[int]:
        """Return the number of steps of each arc in a table. Blocks for a round trip to all servers."""
        self._check_usable()
        steps = cast(RemoteShard, self._tables[table].shard).arc_steps()
        return [steps[first] for first, _, _ in self.placement.arcs]

    def take_order(self, tables: Sequence[str]) -> Parts:
        """Return what was kept since the last time: see :meth:`shoal.Store.take_order`."""
        parts = self.channel.client.take_order()
        if not tables:
            return parts
        numbers = [cast(RemoteShard, self._tables[name].shard).number for name in tables]
        if len(parts):
            order = np.argsort(numbers)
            parts[:, 1] = order[np.searchsorted(numbers, parts[:, 1], sorter=order)]
        return parts

    def hand_over(self, *, returns: bool, begun: bool = True) -> None:
        """Announce that this worker has handed over its state: see :meth:`shoal.Store.hand_over`."""
        self._check_usable()
        if self._cached:
            self.flush()  # what caches hold back belongs to this job
        self._scheduler.call(HandOver(returns, begun), AcceptedReply, self._timeout)

    def filter_metrics(self) -> dict[str, dict[str, float]]:
        """Return, for each table that has filters, what they saved and changed: see `docs/filters.md`."""
        self._check_usable()
        return {table: filter.metrics() for table, filter in self._filtered.items()}

    def cache_metrics(self) -> dict[str, dict[str, int]]:
        """Return, for each table that has a cache, what it has read, added up and sent: see `docs/cache.md`."""
        self._check_usable()
        return {table: shard.rows.metrics() for table, shard in self._cached.items()}

    def counters(self) -> Values:
        """As :meth:`.ConnectedStore.counters`, with what the filters of tables save and change."""
        for table, filter in list(self._filtered.items()):
            counts = filter.metrics()
            saved = sum(counts.get(f"{kind}_bytes_saved", 0) for kind in ("key", "gradient", "weight"))
            self._saved_bytes[table] = max(
                saved, self._saved_bytes.get(table, 0)
            )  # less after a list was sent after all
        errors = {table: filter.metrics()["gradient_error"] for table, filter in list(self._filtered.items())}
        return {**super().counters(), "filter_bytes_saved": dict(self._saved_bytes), "filter_squared_error": errors}

    def sends_exactly(self, table: str) -> bool:
        """Whether gradients and weights of a table of this name are sent completely and unrounded."""
        filters = choose(self._filters, table)
        return filters is None or filters.exact

    def server_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of the servers.

        Blocks for a round trip by way of the scheduler. Safe from any thread.
        """
        self._check_usable()
        reply = self._get_metrics()
        return [{"server": one.server, "address": one.address, **one.figures} for one in reply.endpoints]

    def scheduler_metrics(self) -> dict[str, int]:
        """Return how often the scheduler has refused something, by reason.

        Blocks for a round trip to the scheduler and the servers. Safe from any thread.
        """
        self._check_usable()
        return dict(self._get_metrics().scheduler)

    def drain(self, server: int) -> str:
        """Request that the slots of a server move to the others, and that it then ends.

        Blocks for a round trip to the scheduler, not until the server is empty: :meth:`cluster` shows the progress.
        Pulls and pushes continue meanwhile. Safe from any thread.
        """
        self._check_usable()
        return self._scheduler.call(Drain(server), AcceptedReply, self._timeout).text

    def rebalance(self, by: str = "slots") -> str:
        """Request that slots move until all endpoints have about equal numbers of slots, or of what ``by`` names.

        Blocks for a round trip to the scheduler, not until the slots have moved: :meth:`cluster` shows the progress.
        Pulls and pushes continue meanwhile. Safe from any thread.
        """
        self._check_usable()
        status = self._scheduler.call(GetStatus(), StatusReply, self._timeout)
        return self._scheduler.call(Rebalance.of(by, status), AcceptedReply, self._timeout).text

    def _get_metrics(self) -> MetricsReply:
        return self._scheduler.call(GetMetrics(), MetricsReply, self._timeout)

    # ---- clocks ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End this worker's clock: see :meth:`shoal.Store.tick`."""
        self._check_usable()
        tick = self.channel.tick()
        if not self._consistency.is_bulk:
            self._ticks[tick.clock] = tick
            self._count_ticks()
        self.channel.raise_unobserved()

    def _count_ticks(self) -> int:
        with self._counting:
            while (tick := self._ticks.get(self._counted_clock)) is not None and tick.done() and tick.error is None:
                del self._ticks[self._counted_clock]
                self._counted_clock += 1
            return self._counted_clock

    def flush(self, timeout: float | None = None) -> None:
        """Send what caches hold back, and wait for all calls of this process: see :meth:`shoal.Store.flush`."""
        self._check_usable()
        self.channel.client.flush_caches()
        super().flush(timeout)

    def meet(self, name: str, timeout: float | None = None) -> frozenset[int]:
        """Wait for all workers of the job: see :meth:`shoal.Store.meet`."""
        self._check_usable()
        seconds = self._timeout if timeout is None else timeout
        begun = time.monotonic()
        self.flush(seconds)
        try:
            return self._wait_at_barrier(name, seconds, begun)
        finally:
            self.channel.client.forget_rows()  # all workers agree on what came before

    def _wait_at_barrier(self, name: str, timeout: float, begun: float | None = None) -> frozenset[int]:
        """Wait for all workers. After a timeout this worker stays at the barrier: the next call continues to wait."""
        if self.member.is_past(name):
            self.member.passed(name)
            return frozenset()
        asked = self._open_barriers.pop(name, None) or self._scheduler.ask(Barrier(name))
        try:
            passed = self._scheduler.answer(asked, BarrierReply, timeout, begun=begun)
        except DeadlineExceededError:
            self._open_barriers[name] = asked
            raise
        except BaseException:
            self._scheduler.forget(asked)
            raise
        self._scheduler.forget(asked)
        self.member.passed(name)
        return frozenset(passed.absent)

    def hear_of_losses(self) -> bool:
        """Wait for the scheduler, which announces a loss before it has servers end clocks without the worker."""
        try:
            self._scheduler.call(GetStatus(), StatusReply, min(self._timeout, _SILENT_SECONDS))
        except DeadlineExceededError:
            return False
        except ShoalError:
            pass  # it was restarted without a journal: no clock ends without a worker
        return True

    # ---- splits of the data ------------------------------------------------------------------------------------------

    def _take_splits(self, count: int, digest: str, reissue: float) -> Iterator[int]:
        with self._locked():
            number, self._passes = self._passes, self._passes + 1
        return self._take_splits_of(number, count, digest, reissue)

    def _take_splits_of(self, number: int, count: int, digest: str, reissue: float) -> Iterator[int]:
        self.member.splits_loops += 1
        try:
            yield from self._request_splits(number, count, digest, reissue)
        finally:
            self.member.splits_loops -= 1

    def _request_splits(self, number: int, count: int, digest: str, reissue: float) -> Iterator[int]:
        finished = -1
        while True:
            self._check_usable()
            self.channel.client.flush_caches()
            self.channel.drain(self._timeout)  # the pushes for the finished split have arrived
            self.channel.raise_unobserved()
            take = TakeSplit(number, count, digest, finished, reissue, self.clock)
            found = self._scheduler.call(take, SplitReply, self._timeout)
            finished = -1
            if found.split is not None:
                yield found.split
                finished = found.split
            elif found.end is None:
                self._tick_with_others()
            else:
                while self.clock < found.end:
                    self.tick()
                return

    def _tick_with_others(self) -> None:
        """Let one clock of the other workers pass."""
        if self._consistency.mode == "asp" or not self._tables:
            time.sleep(_SPLIT_POLL_SECONDS)
            return
        table = next(iter(self._tables.values()))
        # Answered when the others have reached this worker's clock; a cache takes no such small pull.
        table.pull(np.zeros(1, np.uint64))
        self.tick()

    # ---- tables ------------------------------------------------------------------------------------------------------

    def _find(self, spec: TableSpec) -> int:
        """Have the servers make a table, if they have not: its number."""
        found = self._scheduler.call(CreateTable(TableRecord.of(spec)), TableReply, self._timeout)
        check_same(found.form.spec(), spec)
        self._name_table(found.id, spec.name)
        return found.id

    def _make_shard(self, spec: TableSpec) -> RemoteShard:
        number = self._find(spec)
        filters = choose(self._filters, spec.name)
        if filters is not None and spec.is_integer:
            filters = filters.exact_part()
        if filters is not None and spec.name not in self._filtered:
            joined = self._joined
            self._filtered[spec.name] = make_filter(filters, joined.rank, joined.incarnation, joined.job)
        filter = self._filtered.get(spec.name)
        is_bulk = self._consistency.is_bulk
        cache = choose_cache(self._cache, spec.name)
        if cache is None or is_bulk or spec.is_integer:  # under BSP every row changes with the clock
            return RemoteShard(self.channel, number, spec, filter, workers=self._workers, is_bulk=is_bulk)
        shard = self._cached[spec.name] = CachedShard(
            self.channel,
            number,
            spec,
            filter,
            workers=self._workers,
            cache=cache,
            consistency=self._consistency,
            slots=self._slots,
        )
        return shard

    @contextlib.contextmanager
    def _snapshots(self, tables: list[tuple[Table, str]], base: ChainEntry | None) -> Iterator[SnapshotSet]:
        shards = [(cast(RemoteShard, table.shard), table.spec, kind) for table, kind in tables]
        with contextlib.ExitStack() as held:
            # New pushes of this process wait until the snapshot is taken, and the snapshot waits for pending ones.
            # Under BSP pushes of other workers cannot interfere: none is applied before this worker's next tick.
            with contextlib.ExitStack() as paused:
                paused.enter_context(self._rwlock.exclusive())
                self.channel.client.flush_caches()
                self.channel.drain(self._timeout)
                self.channel.raise_unobserved()
                if self._shared_storage and shards:
                    numbered = [(shard.number, spec, kind) for shard, spec, kind in shards]
                    snapshots: SnapshotSet = held.enter_context(
                        ServerSnapshotSet(
                            self.channel,
                            numbered,
                            base,
                            lambda: self.member.lost_workers,
                            last=self._tracked,
                            on_done=self._set_tracked,
                        )
                    )
                else:
                    if any(kind != "plain" for _, _, kind in shards):
                        raise ValueError(NO_DELTAS)
                    table_snapshots = [
                        TableSnapshot(spec, UnsynchronizedSnapshot(shard), kind) for shard, spec, kind in shards
                    ]
                    snapshots = LocalSnapshotSet(table_snapshots, self._slots, self.threads, self.clock)
                    held.enter_context(paused.pop_all())  # pushes wait until all rows are written
            yield snapshots

    def _set_tracked(self, digest: str) -> None:
        self._tracked = digest

    def check_storage(self, directory: StoragePath, *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Check that all servers may write a save there: see :meth:`shoal.Store.check_storage`."""
        self._check_usable()
        storage_dir = open_dir(directory, storage_options)
        tables = [(table, "plain") for table in self._tables.values()][:1]
        if self._shared_storage and tables:
            with self._saving, self._snapshots(tables, None) as snapshots:
                cast(ServerSnapshotSet, snapshots).check(storage_dir)

    def _load(self, chain: Chain, *, track: bool, progress: bool) -> None:
        """Load while the others wait, as the least worker there: servers read their rows, or this worker sends them."""
        manifest = chain[-1].manifest
        self.channel.client.flush_caches()
        self.channel.drain(self._timeout)
        absent = self._wait_at_barrier("begin of a load", self._timeout)

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
            self._tracked = ""

            def load() -> None:
                with self._naming_changes("load"):
                    for _, fresh in load_checkpoint(chain, make, self.threads, progress=progress, restore=restore):
                        fresh.finish()

            try:
                loaded_by = self._done_by_one(load, absent, "end of a load", enough)
                if self.rank != loaded_by:
                    self._check_loaded(chain[-1], loaded_by)
            finally:  # no worker pushes before all have counted the rows
                self._wait_at_barrier("check of a load", self._timeout)
                self.channel.client.forget_rows()
            self._tracked = chain[-1].digest if track else ""

    @contextlib.contextmanager
    def _naming_changes(self, what: str) -> Iterator[None]:
        """Name as the reason of an error that slots have moved: servers refuse what is not under way in new slots."""
        before = self.channel.map.epoch
        try:
            yield
        except ShoalError as error:
            if type(error) not in (ProtocolError, ShoalError):
                raise
            epoch = before
            with contextlib.suppress(ShoalError):  # the scheduler does not answer: the error stands
                epoch = ask_map(self._scheduler, self._timeout).epoch
            if epoch == before:
                raise
            raise ClusterChangedError(
                f"slots have moved to other endpoints during the {what} (the map had epoch {before} and has epoch "
                f"{epoch}): {what} again ({error})"
            ) from error

    def _done_by_one(self, work: Callable[[], None], absent: frozenset[int], barrier: str, timeout: float) -> int:
        """Have the least worker that is there do something, the next one if it dies; return its rank after a barrier.

        Its error reaches no other worker.
        """
        while True:
            rank = min(rank for rank in range(self.num_workers) if rank not in absent)
            try:
                if self.rank == rank:
                    work()
            finally:
                absent |= self._wait_at_barrier(barrier, timeout)
            if rank not in absent:
                return rank

    def _check_loaded(self, entry: ChainEntry, rank: int) -> None:
        """Check what the worker of a rank has loaded."""
        for table in entry.manifest.tables:
            stats = self._tables[table.name].shard.stats()
            if (stats["rows"], stats["step"]) != (table.size, table.step):
                raise ShoalError(
                    f"{entry.storage_dir} was not loaded: table {table.name!r} has {stats['rows']} rows instead "
                    f"of {table.size}; see the error of worker {rank}"
                )

    # ---- closing, and events from the scheduler ----------------------------------------------------------------------

    def _drain(self) -> None:
        self.channel.client.flush_caches()
        # Unless others repeat what this worker has pushed since its last tick: see `_check_left`.
        if (
            self._consistency.is_bulk
            and self.channel.client.has_pushed
            and not (self.member.leaves_early and self._most_workers)
        ):
            self.channel.tick()
        super()._drain()

    def _check_left(self) -> None:
        super()._check_left()
        if self._consistency.is_bulk and self.channel.client.has_pushed:
            _log.warning(
                "pushes of worker %d in clock %d are dropped: %s",
                self.rank,
                self.clock,
                "it has left its fit early, and the others continue it at the end of its last clock"
                if self.member.leaves_early
                else "other threads made them while the store was closed",
            )

    def _on_event(self, event: Event) -> None:
        if isinstance(event, WorkerGone):
            self._gone[event.job, event.rank] = None
        elif isinstance(event, WorkersChange):
            self._changing.add(event.job)
        else:
            super()._on_event(event)
