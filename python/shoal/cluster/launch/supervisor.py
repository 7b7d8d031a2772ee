"""The supervisor of a cluster: starts the scheduler and the servers, starts them again when they die, and ends them.

    LocalCluster (local_cluster.py)   processes of this machine
    RayCluster (shoal.ray.servers)    actors of Ray

What a death means is decided here. A scheduler that dies is started again with its journal at the same address. With
replicas another server is started in the place of one that dies; it joins the cluster as a new server. Both happen at
most `_MAX_RESTARTS` times in `_RESTART_SECONDS`; then the cluster has failed, which is logged, and `supervise` has a
function called with the error. A server that ends with status 0 was asked to end: the cluster continues without it if
it has been drained or if there are replicas. A process that the scheduler has declared dead and that still exists,
because it was stopped, is killed. Detection and promotion of copies are the scheduler's: no worker waits for what is
done here.

Threads: an object is used by one; a thread of its own handles what processes report.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
import signal
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

from msgspec import structs

from shoal.base.interrupts import held_back
from shoal.base.machine import temporary_root
from shoal.base.sizes import memory_bytes
from shoal.base.timed_queue import TimedQueue
from shoal.cluster.launch.child import Process, ProcessFailedError, end_all
from shoal.cluster.protocol.reports import Drained, Joined, NamedJobs, Report, ServerDied, WorkerDied, pid_of
from shoal.config import SchedulerConfig, ServerConfig
from shoal.errors import DeadlineExceededError, NotConnectedError, ServerLostError, ShoalError

if TYPE_CHECKING:
    from shoal.cluster.protocol.scheduler_client import SchedulerClient

_log = logging.getLogger("shoal.launch")

PATIENCE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_MAX_RESTARTS = 5  # of the scheduler, and of servers, within
_RESTART_SECONDS = 60.0
_FAILOVER_SECONDS = 0.5  # until another server is started: it would take the CPU from those that take over its slots
_REMEDY = "remove the cause, start the cluster again and load a checkpoint"


class Supervisor(ABC):
    """A cluster whose processes are started and ended here. A context manager that ends them.

    ``on_dead_worker`` is called, in a thread, with the rank and the process of a worker that was declared dead and
    whose replacement its job awaits. ``ended`` receives workers that have ended, and the role whose end is that of the
    cluster.
    """

    def __init__(self) -> None:
        self.on_dead_worker: Callable[[int, int], None] | None = None
        self.ended: TimedQueue[Process] = TimedQueue()
        self.scheduler: Process | None = None
        self.servers: list[Process] = []
        self.address = ""
        self.has_named_jobs = False
        self.curve: str | None = None  # the directory of the keys
        self._closing = contextlib.ExitStack()  # after the processes have ended
        self._reports: TimedQueue[tuple[Process, Report | None] | None] = TimedQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards the roles and what follows
        self._stopped = False
        self._fault: ShoalError | None = None
        self._fail: Callable[[ShoalError], None] | None = None
        self._missing: tuple[SchedulerConfig, ServerConfig, int] | None = None  # what `complete` starts
        self._timeout = self._deadline = 0.0  # of the start
        self._scheduler_config: SchedulerConfig | None = None
        self._server_config: ServerConfig | None = None  # of those that replace others; None: none does
        self._drained: set[Process] = set()
        self._lost_slots = ""  # of which there is no copy left: no server is replaced any more

    @abstractmethod
    def _start(self, name: str, config: SchedulerConfig | ServerConfig, former: Process | None = None) -> Process:
        """Start a role, in the place of another one if there was one."""

    @abstractmethod
    def _start_ahead(self, names: Sequence[str]) -> None:
        """Start servers that `_start` will give their configurations, where that is possible."""

    def _make_journal(self) -> str:
        """Return the directory of a journal that nobody else needs: it is new, or can be made."""
        made = tempfile.mkdtemp(prefix="shoal-journal-", dir=temporary_root())
        self._closing.callback(shutil.rmtree, made, ignore_errors=True)
        return made

    @abstractmethod
    def prepare_workers(self, count: int) -> None:
        """Find a place for so many workers."""

    @abstractmethod
    def start_worker(
        self,
        rank: int,
        command: Sequence[str],
        workers: int | tuple[int, int],
        emit: Callable[[str], None],
        emit_error: Callable[[str], None],
    ) -> Process:
        """Start a program as a worker, whose end is put into ``ended``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def roles(self) -> list[Process]:
        """The scheduler and the servers that were started."""
        with self._lock:
            return [*([self.scheduler] if self.scheduler else []), *self.servers]

    @property
    def fault(self) -> ShoalError | None:
        """Why the cluster cannot continue; None as long as it can."""
        return self._fault

    def supervise(self, fail: Callable[[ShoalError], None]) -> None:
        """Have a function called, once, with the error that the cluster cannot continue."""
        with self._lock:
            self._fail = fail
        if self._fault is not None:
            fail(self._fault)

    # ---- starting ----------------------------------------------------------------------------------------------------

    def start(self, scheduler: SchedulerConfig, server: ServerConfig, *, timeout: float, spares: int = 0) -> None:
        """Start the scheduler and the servers, and wait until they have joined; spare servers join later."""
        self.begin(scheduler, server, timeout=timeout, spares=spares)
        self.complete()

    def begin(self, scheduler: SchedulerConfig, server: ServerConfig, *, timeout: float, spares: int = 0) -> None:
        """Start the scheduler, and what does not wait for it; returns when ``address`` is known."""
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self.curve = scheduler.curve
        if scheduler.journal is None:
            scheduler = structs.replace(scheduler, journal=self._make_journal())
        else:
            from shoal.cluster.scheduler.journal import Journal

            with Journal(scheduler.journal) as former:
                former.clear()  # the processes of its cluster are not these
        with held_back():
            self.scheduler = self._start("scheduler", scheduler)
        self._start_ahead([f"server {rank}" for rank in range(scheduler.servers)])
        self._missing = scheduler, server, spares
        if not self.address:
            self.address = self._wait_for([self.scheduler])[0].address

    def complete(self) -> None:
        """Start the rest, and wait until all have joined; do nothing if they have, or if nothing has begun."""
        if self._missing is None:
            return
        (scheduler, server, spares), self._missing = self._missing, None
        assert self.scheduler is not None
        self.address = self._wait_for([self.scheduler])[0].address
        scheduler = structs.replace(scheduler, bind=self.address)
        server = structs.replace(server, scheduler=self.address)
        for rank in range(scheduler.servers):
            with held_back():
                self.servers.append(self._start(f"server {rank}", structs.replace(server, rank=rank)))
        self._wait_for(self.servers)
        for rank in range(scheduler.servers, scheduler.servers + spares):
            self.servers.append(self._start(f"server {rank}", structs.replace(server, spare=True)))
        self._scheduler_config, self._server_config = scheduler, server if scheduler.replicas else None
        self._thread = threading.Thread(target=self._supervise, name="shoal-supervisor", daemon=True)
        self._thread.start()

    def notify(self, process: Process, report: Report | None) -> None:
        """Take the report of a role, or its end. From any thread."""
        self._reports.put((process, report))

    def _wait_for(self, processes: Sequence[Process]) -> list[Joined]:
        """Wait until processes have joined; raise if any ends before, or if it takes too long."""
        while True:
            joined = [process.joined for process in processes if process.joined is not None]
            if len(joined) == len(processes):
                return joined
            try:
                found = self._reports.get(max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                late = "; ".join(
                    f"{process.name} was not ready; its output: {process.last_output()}"
                    for process in processes
                    if process.joined is None
                )
                raise DeadlineExceededError(f"the cluster was not complete after {self._timeout:g} s: {late}") from None
            assert found is not None
            process, report = found
            if report is None:
                raise ProcessFailedError(process)
            self._take(process, report)

    # ---- supervising -------------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        restarts: dict[bool, deque[float]] = {is_server: deque(maxlen=_MAX_RESTARTS) for is_server in (False, True)}
        later: deque[tuple[float, Process]] = deque()  # servers that have died, and when they are replaced
        while True:
            try:
                found = self._reports.get(max(0.0, later[0][0] - time.monotonic()) if later else None)
            except queue.Empty:
                self._end_of(later.popleft()[1], restarts[True])
                continue
            if found is None:
                return
            process, report = found
            if report is not None:
                self._take(process, report)
            elif process is self.scheduler:
                self._end_of(process, restarts[False])
            elif process.returncode == 0:
                self._end_as_asked(process)
            else:
                later.append((time.monotonic() + _FAILOVER_SECONDS, process))

    def _take(self, process: Process, report: Report) -> None:
        """Note what a process reports."""
        if isinstance(report, Joined):
            process.joined = report
        elif isinstance(report, NamedJobs):
            self.has_named_jobs = bool(report.names)
        elif isinstance(report, Drained):
            self._drained.add(process)
        elif isinstance(report, WorkerDied):
            if self.on_dead_worker is not None:
                self.on_dead_worker(report.rank, pid_of(report.process))
        elif isinstance(report, ServerDied):
            self._lost_slots = self._lost_slots or report.lost_slots
            with self._lock:
                for server in self.servers:
                    is_it = server.joined is not None and server.joined.process == report.process
                    if is_it and server.returncode is None and not self._stopped:
                        _log.warning("%s was declared dead, but its process exists: it is killed", server.describe())
                        server.signal(signal.SIGKILL)

    def _end_as_asked(self, server: Process) -> None:
        with self._lock:
            if self._stopped:
                return
            continues = self._server_config is not None or server in self._drained
            if continues:
                self.servers.remove(server)
        if continues:
            _log.info("%s has ended, as it was asked to", server.name)
        else:
            self._give_up(server, "has ended as it was asked to. Its rows are lost, since the cluster has no replicas")

    def _end_of(self, process: Process, recent: deque[float]) -> None:
        """Start a role again that has died, or give up."""
        is_server = process is not self.scheduler
        config = self._server_config if is_server else self._scheduler_config
        status = process.returncode
        how = process.describe_end() if status is None or status > 0 else process.how_ended()
        fault = ""
        with self._lock:
            if self._stopped:
                return
            if not is_server and status == 0:
                fault = "The cluster was ended"
            elif config is None:
                fault = "Its rows are lost, since the cluster has no replicas"
            elif is_server and self._lost_slots:
                fault = f"The last copy of slots {self._lost_slots} is lost"
            elif len(recent) == _MAX_RESTARTS and time.monotonic() - recent[0] < _RESTART_SECONDS:
                role = "a server" if is_server else "the scheduler"
                fault = f"It is end number {_MAX_RESTARTS + 1} of {role} within {_RESTART_SECONDS:g} s"
            else:
                recent.append(time.monotonic())
                try:
                    started = self._start(process.name, config, process)
                except Exception as error:  # of any kind: nobody else would notice that it is not started again
                    why = error.strerror if isinstance(error, OSError) else error
                    fault = f"No other process can be started ({why})"
                else:
                    if is_server:
                        self.servers[self.servers.index(process)] = started
                    else:
                        self.scheduler = started
        if fault:
            self._give_up(process, f"{how}. {fault}, and it is not replaced")
            return
        what = "Another server is started" if is_server else "It is started again and continues from its journal"
        _log.warning("%s %s. %s", process.name if is_server else "the scheduler", how, what)

    def _give_up(self, process: Process, why: str) -> None:
        """Report that a role has ended and is not started again."""
        is_server = process is not self.scheduler
        text = f"{process.describe() if is_server else f'the {process.describe()}'} {why}: {_REMEDY}"
        _log.error("%s", text)
        error = ServerLostError(text) if is_server else NotConnectedError(text)
        with self._lock:
            fail = self._fail if self._fault is None else None  # of several ends the first one is the cause
            self._fault = self._fault or error
        if fail is not None:
            fail(error)
        self.ended.put(process)

    # ---- requests to the scheduler -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _client(self) -> Iterator[SchedulerClient]:
        """Connect to the scheduler as a process that is no member."""
        from shoal.cluster.protocol.curve import Keys
        from shoal.cluster.protocol.scheduler_client import SchedulerClient

        keys = None if self.curve is None else Keys.load(self.curve, "worker")
        with SchedulerClient(self.address, "observer", keys=keys) as client:
            yield client

    def status(self, *, timeout: float = 60.0) -> dict[str, Any]:
        """Return the status of the cluster, as ``store.cluster()`` of a connected worker does."""
        from shoal.cluster.protocol.status import GetStatus, StatusReply, as_dict

        with self._client() as client:
            return as_dict(client.call(GetStatus(), StatusReply, timeout))

    def drain(self, server: int, *, timeout: float = 60.0) -> str:
        """Request that the slots of a server, by its rank, move to the others, and that it then ends."""
        from shoal.cluster.protocol.messages import AcceptedReply, Drain

        with self._client() as client:
            return client.call(Drain(server), AcceptedReply, timeout).text

    # ---- ending ------------------------------------------------------------------------------------------------------

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
            self._reports.put(None)
            if self._thread is not None:
                self._thread.join()
            self._closing.close()


def slot_memory(memory: int | str | None, slots: int) -> int | None:
    """Return the share of a slot in a limit for all rows."""
    if memory is None:
        return None
    from shoal.store.description import make_budget

    found = memory_bytes(memory)
    make_budget(found, slots)  # raises if it is too small
    return found // slots
