"""A scheduler and servers on this machine.

Over 600 lines: the start, the supervision and the end of the processes share their state, under one lock.

    running      for the length of a ``with`` block
    launch       the same, with a store that ends them when it is closed

The processes check from their start whether the process that started them still exists (``--parent``). A scheduler that
dies is started again with its journal at the same address. With replicas another server is started in the place of one
that dies; it joins the cluster as a new server. Both happen at most `_MAX_RESTARTS` times in `_RESTART_SECONDS`; then
the cluster has failed, which is logged, and further calls of the store of `launch` raise the error. A server that the
scheduler has declared dead and that still exists, because it was stopped, is killed: the scheduler's log names its
process.

Threads: objects of this module are used by one; a thread of their own waits for the scheduler's end, and one reads its
log.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.base.interrupts import held_back
from shoal.base.logs import forward
from shoal.base.scalars import whole
from shoal.base.sizes import memory_bytes
from shoal.base.timed_queue import TimedQueue
from shoal.cluster.launch.child import ChildProcess, ProcessFailedError, end_all
from shoal.cluster.protocol.environment import find_keys
from shoal.cluster.protocol.messages import GRACE_SECONDS
from shoal.cluster.scheduler.inputs import Settings
from shoal.cluster.scheduler.journal import Journal
from shoal.cluster.scheduler.membership import COPY_RATE
from shoal.cluster.server.code import code_arguments
from shoal.consistency import BSP, Consistency
from shoal.errors import DeadlineExceededError, NotConnectedError, ServerLostError, ShoalError
from shoal.storage.roots import CREDENTIALS, StorageRoots
from shoal.store.description import make_budget
from shoal.table.tiered import Tiered

if TYPE_CHECKING:
    from shoal.cluster.protocol.scheduler_client import SchedulerClient
    from shoal.cluster.worker.cache import Cache
    from shoal.cluster.worker.cluster_store import ClusterStore
    from shoal.cluster.worker.filters import Filters

_log = logging.getLogger("shoal.launch")

PATIENCE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_MAX_RESTARTS = 5  # of the scheduler, and of servers, within
_RESTART_SECONDS = 60.0
_FAILOVER_SECONDS = 0.5  # until another server is started: it would take the CPU from those that take over its slots
_DECLARED_DEAD = re.compile(r"server \d+ at .* \(process (\d+) on .*\) is dead, ")  # as the scheduler logs it
_LOST = re.compile(
    r"server \d+ at .* \(process (\d+) on .*\), which had the last copy of slots (.*), is lost with its rows"
)
_WORKER_DEAD = re.compile(r"worker (\d+) \(process (\d+) on .*\) is dead, .*: the job waits ")
_BSP = BSP()


class LocalCluster:
    """The processes of a cluster on this machine."""

    def __init__(self) -> None:
        # Called with the rank and the process of a worker whose replacement the job awaits. From a thread.
        self.on_dead_worker: Callable[[int, int], None] | None = None
        self.ended: TimedQueue[ChildProcess] = TimedQueue()
        self.scheduler: ChildProcess | None = None
        self.servers: list[ChildProcess] = []
        self.address = ""
        self.curve: str | None = None
        self._changed = threading.Condition()
        self._stopped = False
        self._lock = threading.Lock()  # guards scheduler, servers and _stopped
        self._scratch: str | None = None  # directory of the journal, unless one was passed
        self._watched: TimedQueue[Any] = TimedQueue()  # roles that have ended, or None
        self._watcher: threading.Thread | None = None
        self._failure: ShoalError | None = None  # that a role has ended too often; guarded by _lock
        self._fail: Callable[[ShoalError], None] | None = None  # guarded by _lock
        self._lost_slots = ""  # of which there is no copy left: no server is replaced any more; guarded by _lock

    @property
    def roles(self) -> list[ChildProcess]:
        """The scheduler and the servers that were started."""
        return [*([self.scheduler] if self.scheduler else []), *self.servers]

    def start(
        self,
        servers: int,
        *,
        workers: int = 1,
        threads: int = 1,
        memory: int | str | None = None,
        tier: Tiered | None = None,
        slots: int = 1024,
        heartbeat: float = 2.0,
        timeout: float = 60.0,
        replicas: int = 0,
        copy_rate: int | None = None,
        replacement_seconds: float = 0.0,
        curve: str | None = None,
        storage_roots: Sequence[str | os.PathLike[str]] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        allow_code: Sequence[str | os.PathLike[str]] = (),
        journal: str | os.PathLike[str] | None = None,
        restart: bool = True,
    ) -> None:
        """Start the scheduler, then the servers, and wait until they have joined.

        Parameters are those of `running`.
        """
        servers, workers, slots = whole("servers", servers, 1), whole("workers", workers, 1), whole("slots", slots)
        replicas = whole("replicas", replicas)
        Settings(  # raises if they are invalid
            servers=servers,
            workers=workers,
            slots=slots,
            heartbeat=heartbeat,
            grace=GRACE_SECONDS,
            replicas=replicas,
            copy_rate=COPY_RATE if copy_rate is None else copy_rate,
            replacement_seconds=replacement_seconds,
        )
        share = slot_memory(memory, slots)
        bound = [] if share is None else ["--slot-memory", str(share)]
        if tier is not None:
            if share is not None:
                raise ValueError("servers have a memory budget or a tier: leave memory= or tier= out")
            bound += ["--tier", f"{os.path.abspath(tier.path)}:{tier.memory_bytes}"]
        bound += _storage_arguments(storage_roots, storage_options) + code_arguments(allow_code)
        self.curve = curve
        deadline = time.monotonic() + timeout
        counts = ["--servers", str(servers), "--workers", str(workers), "--slots", str(slots)]
        options = [*counts, "--heartbeat", str(heartbeat), "--replicas", str(replicas)]
        if copy_rate is not None:
            options += ["--copy-rate", str(copy_rate)]
        if replacement_seconds:
            options += ["--replacement-seconds", str(replacement_seconds)]
        if restart:
            if journal is None:
                journal = self._scratch = tempfile.mkdtemp(prefix="shoal-journal-")
            with Journal(journal) as former:
                former.clear()  # the processes of its cluster are not these
            options += ["--journal", os.path.abspath(journal)]
        with held_back():
            self.scheduler = self._start_scheduler("tcp://127.0.0.1:*", options)
        (self.address,) = self._wait_for_lines([self.scheduler], r"scheduler at (tcp://[^\s,]+)", deadline, timeout)
        server = ["server", "--connect", self.address, "--threads", str(threads), *bound]
        for rank in range(servers):
            with held_back():
                self.servers.append(self._role(f"server {rank}", [*server, "--rank", str(rank)]))
        self._wait_for_lines(self.servers, r"(server \d+ serves slots)", deadline, timeout)
        watcher = threading.Thread(
            target=self._watch,
            args=(options if restart else None, server if replicas else None),
            name="shoal-roles-end",
            daemon=True,
        )
        watcher.start()
        self._watcher = watcher

    def _start_scheduler(self, bind: str, options: Sequence[str]) -> ChildProcess:
        return self._role("scheduler", ["scheduler", "--bind", bind, *options], self._read_log)

    def _read_log(self, line: str) -> None:
        """Kill the process of a server that the scheduler has declared dead: it may be stopped. Report a worker."""
        forward(line)
        worker = _WORKER_DEAD.search(line)
        if worker is not None and self.on_dead_worker is not None:
            self.on_dead_worker(int(worker[1]), int(worker[2]))
        lost = _LOST.search(line)
        found = lost or _DECLARED_DEAD.search(line)
        if found is None:
            return
        with self._lock:
            if lost is not None:
                self._lost_slots = lost[2]
            for child in self.servers:
                if child.process.pid == int(found[1]) and child.process.poll() is None and not self._stopped:
                    _log.warning("%s was declared dead, but its process %s exists: it is killed", child.name, found[1])
                    child.signal(signal.SIGKILL)

    def supervise(self, fail: Callable[[ShoalError], None]) -> None:
        """Have a function called, once, with the error that the scheduler or a server has ended too often."""
        with self._lock:
            self._fail = fail
            failure = self._failure
        if failure is not None:
            fail(failure)

    def _give_up(self, child: ChildProcess, why: str) -> None:
        """Report that a role has ended and is not started again."""
        is_server = child is not self.scheduler
        name = child.name if is_server else "the scheduler"
        remedy = "remove the cause, start the cluster again and load a checkpoint"
        text = f"{name} (process {child.process.pid}) {why}: {remedy}"
        _log.error("%s", text)
        error = ServerLostError(text) if is_server else NotConnectedError(text)
        with self._lock:
            self._failure = error
            fail = self._fail
        if fail is not None:
            fail(error)
        self.ended.put(child)

    def _watch(self, scheduler: Sequence[str] | None, server: Sequence[str] | None) -> None:
        """Start roles again that die; without arguments for one, or if it dies too often, put it into ``ended``.

        A role that ends with status 0 was asked to end. The cluster goes on without a server that was asked to, if
        there are replicas or if it has been drained.
        """
        restarts: tuple[deque[float], deque[float]] = deque(maxlen=_MAX_RESTARTS), deque(maxlen=_MAX_RESTARTS)
        later: deque[ChildProcess] = deque()  # servers whose slots are being taken over
        while True:
            try:
                left = max(0.0, later[0].ended_at + _FAILOVER_SECONDS - time.monotonic()) if later else None
                child, is_due = self._watched.get(left), False
            except queue.Empty:
                child, is_due = later.popleft(), True
            if child is None:
                return
            status = child.process.returncode
            how = f"was killed by signal {-status}" if status < 0 else child.describe_end()
            fault = ""
            with self._lock:
                if self._stopped:
                    return
                is_server = child is not self.scheduler
                if is_server and status == 0 and (server is not None or "has been drained" in how):
                    self.servers.remove(child)
                    _log.info("%s has ended, as it was asked to", child.name)
                    continue
                arguments = server if is_server else scheduler
                if arguments is None or status == 0:
                    self.ended.put(child)
                    continue
                recent = restarts[is_server]
                role = "a server" if is_server else "the scheduler"
                if is_server and self._lost_slots:
                    fault = f"The last copy of slots {self._lost_slots} is lost"
                elif len(recent) == _MAX_RESTARTS and time.monotonic() - recent[0] < _RESTART_SECONDS:
                    fault = f"It is end number {_MAX_RESTARTS + 1} of {role} within {_RESTART_SECONDS:g} s"
                elif is_server and not is_due:
                    later.append(child)
                    continue
                else:
                    recent.append(time.monotonic())
                    try:
                        self._replace(child, arguments)
                    except (OSError, RuntimeError) as error:
                        why = error.strerror if isinstance(error, OSError) else error
                        fault = f"No other process can be started ({why})"
            if fault:
                self._give_up(child, f"{how}. {fault}, and it is not replaced")
                continue
            what = "Another server is started" if is_server else "It is started again and continues from its journal"
            _log.warning("%s %s. %s", child.name if is_server else "the scheduler", how, what)

    def _replace(self, child: ChildProcess, arguments: Sequence[str]) -> None:
        """Start a role again; the caller holds the lock."""
        if child is self.scheduler:
            self.scheduler = self._start_scheduler(self.address, arguments)
        else:
            self.servers[self.servers.index(child)] = self._role(child.name, arguments)

    def _role(self, name: str, arguments: Sequence[str], emit: Callable[[str], None] | None = None) -> ChildProcess:
        keys = [] if self.curve is None else ["--curve", self.curve]
        command = [sys.executable, "-m", "shoal", *arguments, *keys, "--parent", str(os.getpid())]
        return ChildProcess(name, command, {}, self._watched, emit or forward, self._changed)

    def _wait_for_lines(
        self, children: Sequence[ChildProcess], pattern: str, deadline: float, timeout: float
    ) -> list[str]:
        """Wait until each child has printed a matching line; raise if any process ends before."""
        while True:
            with self._changed:
                found = {child: child.find(pattern) for child in children}
                missing = [child for child in children if found[child] is None]
                first = min(self.roles, key=lambda child: child.ended_at)
                if first.ended_at == math.inf:
                    if not missing:
                        return [text for text in found.values() if text is not None]
                    if self._changed.wait(max(0.0, deadline - time.monotonic())) or time.monotonic() < deadline:
                        continue
            if first.ended_at < math.inf:
                raise ProcessFailedError(first)
            late = "; ".join(f"{child.name} was not ready; its output: {child.last_output()}" for child in missing)
            raise DeadlineExceededError(f"the cluster was not complete after {timeout:g} s: {late}")

    def drain(self, server: int, *, timeout: float = 60.0) -> str:
        """Request that the slots of a server move to the others, and that it then ends."""
        with self._observe() as client:
            return client.drain(server, timeout=timeout)

    def _observe(self) -> SchedulerClient:
        """Connect to the scheduler as a process that is no member."""
        from shoal.cluster.protocol.curve import Keys
        from shoal.cluster.protocol.scheduler_client import SchedulerClient

        keys = None if self.curve is None else Keys.load(self.curve, "worker")
        return SchedulerClient(self.address, "observer", keys=keys)

    def has_workers(self, *, timeout: float = 60.0) -> bool:
        """Return whether there are workers, in a job or waiting for one, or expected to return to one."""
        with self._observe() as client:
            status = client.status(timeout=timeout)
            return bool(status.workers) or status.outcome == "moving"

    def outcome(self, *, timeout: float = 60.0) -> str:
        """Return whether a job whose number of workers may change has finished: see `.StatusReply`."""
        with self._observe() as client:
            return client.status(timeout=timeout).outcome

    def named_jobs(self, *, timeout: float = 5.0) -> list[str]:
        """Return the names of the named jobs; none if the scheduler does not answer."""
        with contextlib.suppress(ShoalError), self._observe() as client:
            return [job.name for job in client.status(timeout=timeout).jobs]
        return []

    def stop(self) -> None:
        """End all processes; returns when they have ended."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        try:
            if self.scheduler is not None:
                self.scheduler.signal(signal.SIGINT)  # ends the cluster; after SIGTERM alone the servers would wait
            end_all(self.roles, PATIENCE_SECONDS)
        finally:
            self._watched.put(None)
            if self._watcher is not None:
                self._watcher.join()
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)


@contextlib.contextmanager
def running(
    servers: int,
    *,
    workers: int = 1,
    threads: int = 1,
    memory: int | str | None = None,
    tier: Tiered | None = None,
    slots: int = 1024,
    heartbeat: float = 2.0,
    timeout: float = 60.0,
    replicas: int = 0,
    copy_rate: int | None = None,
    replacement_seconds: float = 0.0,
    curve: str | None = None,
    storage_roots: Sequence[str | os.PathLike[str]] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    allow_code: Sequence[str | os.PathLike[str]] = (),
    journal: str | os.PathLike[str] | None = None,
    restart: bool = True,
) -> Iterator[LocalCluster]:
    """Run a scheduler and servers on this machine for the length of a ``with`` block."""
    cluster = LocalCluster()
    try:
        cluster.start(
            servers,
            workers=workers,
            threads=threads,
            memory=memory,
            tier=tier,
            slots=slots,
            heartbeat=heartbeat,
            timeout=timeout,
            replicas=replicas,
            copy_rate=copy_rate,
            replacement_seconds=replacement_seconds,
            curve=curve,
            storage_roots=storage_roots,
            storage_options=storage_options,
            allow_code=allow_code,
            journal=journal,
            restart=restart,
        )
        yield cluster
    finally:
        cluster.stop()


def launch(
    servers: int = 1,
    *,
    consistency: Consistency = _BSP,
    threads: int | None = None,
    server_threads: int = 1,
    memory: int | str | None = None,
    tier: Tiered | None = None,
    slots: int = 1024,
    timeout: float = 60.0,
    filters: Filters | Mapping[str, Filters] | None = None,
    cache: Cache | Mapping[str, Cache] | None = None,
    storage_roots: Sequence[str | os.PathLike[str]] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    allow_code: Sequence[str | os.PathLike[str]] = (),
    journal: str | os.PathLike[str] | None = None,
    replicas: int = 0,
    copy_rate: int | None = None,
    tracing: bool | None = None,
) -> ClusterStore:
    """Start a cluster on this machine, with this process as its one worker.

    Parameters
    ----------
    servers : int
        Number of server processes.
    consistency : Consistency
    threads : int, optional
        Threads that sort and sum this worker's batches; default: the cores that this process may use.
    server_threads : int
        Threads of each server.
    memory : int or str, optional
        Bytes that the rows of all servers together may use, an equal share for each slot; default: no limit. If they
        would use more, the expiry rules drop rows, or :class:`shoal.MemoryBudgetExceededError` is raised.
    tier : Tiered, optional
        Keep the rows of each server that do not fit in ``tier.memory`` in a directory of its own below ``tier.path``:
        tables larger than memory, with the same results. Not with ``memory``. Default: all rows are in memory.
    slots : int
        Number of slots of the hash space: a power of two from 2 to 16384.
    timeout : float
        Seconds for all processes to join, and the deadline of the store's calls.
    filters : Filters, or one for each table's name, optional
        As in :func:`shoal.connect`.
    cache : Cache, or one for each table's name, optional
        As in :func:`shoal.connect`.
    storage_roots : sequence of path or URL, optional
        Directories and URLs below which the servers may read and write the files of ``save`` and ``load``; a save or
        load elsewhere raises `StorageError`. Default: the current directory, since any process that can connect to a
        port of this machine can request a save (``docs/security.md``); with keys, whose directory the environment
        names, all paths.
    storage_options : mapping, optional
        Options of the file systems of URLs among ``storage_roots``, such as ``{"endpoint_url": ...}``.
    allow_code : sequence of str or path
        Directories and names of modules from which the servers may import and run the optimizers of tables
        (`shoal.UserOptimizer`) and functions of rows; ``"source"`` allows functions that are sent as their source
        (`shoal.by_source`). Default: none.
    journal : path, optional
        Directory of the scheduler's journal, from which it continues if it dies and is started again; an earlier
        journal there is removed. Default: a temporary directory.
    replicas : int
        Copies of each slot on other servers, fewer than ``servers``. If a server dies, another one that has a copy
        serves its slots, without losing a push, and a new server is started. Default: the loss of a server ends the
        job (``docs/replication.md``).
    copy_rate : int, optional
        Bytes per second that each thread of a server sends at most to make a new copy; default: 32 MiB.
    tracing : bool, optional
        Whether the calls of the store are traced by OpenTelemetry, as in :func:`shoal.connect`.

    Returns
    -------
    ClusterStore
        A context manager: the processes end with it, and also when this process ends, for whatever reason.

    Examples
    --------
    >>> import numpy as np
    >>> import shoal
    >>> with shoal.launch(servers=2) as store:
    ...     table = store.table("user", dim=2, optimizer=shoal.SGD(lr=1.0))
    ...     table.push(np.array([7], np.uint64), np.ones((1, 2), np.float32)).result()
    ...     store.tick()
    ...     table.pull(np.array([7], np.uint64)).tolist()
    [[-1.0, -1.0]]
    """
    from shoal.cluster.worker.connect import traces

    is_traced = traces(tracing)
    cluster = LocalCluster()
    curve = find_keys(os.environ)
    try:
        cluster.start(
            servers,
            threads=whole("server_threads", server_threads, 1),
            memory=memory,
            tier=tier,
            slots=slots,
            timeout=timeout,
            replicas=replicas,
            copy_rate=copy_rate,
            curve=curve,
            storage_roots=storage_roots,
            storage_options=storage_options,
            allow_code=allow_code,
            journal=journal,
        )
    except BaseException:
        cluster.stop()
        raise
    from shoal.cluster.worker.cluster_store import ClusterStore

    return ClusterStore(
        cluster.address,
        consistency=consistency,
        workers=1,
        rank=0,
        timeout=timeout,
        threads=threads,
        curve=curve,
        filters=filters,
        cache=cache,
        tracing=is_traced,
        on_close=cluster.stop,
        supervise=cluster.supervise,
    )


def _storage_arguments(roots: Sequence[str | os.PathLike[str]] | None, options: Mapping[str, Any] | None) -> list[str]:
    """Return the storage arguments of `shoal server`, without credentials: the worker that saves sends those."""
    StorageRoots(roots, options)  # raises if they are invalid
    shown = {name: value for name, value in (options or {}).items() if name not in CREDENTIALS}
    return [
        *(f"--storage-root={os.fspath(root)}" for root in roots or ()),
        *(f"--storage-option={name}={msgspec.json.encode(value).decode()}" for name, value in shown.items()),
    ]


def slot_memory(memory: int | str | None, slots: int) -> int | None:
    """Return the share of a slot in a limit for all rows."""
    if memory is None:
        return None
    found = memory_bytes(memory)
    make_budget(found, slots)  # raises if it is too small
    return found // slots
