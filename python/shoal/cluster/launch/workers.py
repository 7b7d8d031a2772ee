"""The workers of a launched cluster: a program, run several times, each under a small process that ends it.

    run_workers  all workers of a cluster, on this machine or on Ray
    run_member   one process of a group that mpirun or srun has started: the scheduler, a server or a worker

The programs start while the roles do, where the address of the scheduler is known: what they print is shown once the
cluster is complete, and if it does not come about they are killed, and never seen.

Ctrl-C and SIGTERM are forwarded to the workers; servers run until the workers have saved. A worker's program runs under
guard.py, which ends it when the launcher has ended.

Threads: functions of this module are called by one.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import structs

from shoal.base.interrupts import Terminated, at_boundaries, held_back
from shoal.base.logs import worker_line
from shoal.base.plural import counted
from shoal.base.timed_queue import TimedQueue
from shoal.cluster.launch.child import ChildProcess, Process, end_all
from shoal.cluster.launch.supervisor import PATIENCE_SECONDS, Supervisor
from shoal.cluster.protocol.address import is_loopback, join_address, split
from shoal.cluster.protocol.environment import PORT, ProcessIdentity, find_metrics_port, shift_metrics_port
from shoal.cluster.protocol.reports import pid_of, process_name
from shoal.config import SchedulerConfig, ServerConfig
from shoal.errors import ShoalError, WorkerLostError

GRACE_SECONDS = 60.0  # for workers to save their state after they are asked to end

_POLL_SECONDS = 0.2  # between two checks of the connection to the scheduler
_GUARD = Path(__file__).with_name("guard.py")

Emit = Callable[[str], None]  # takes a line, from any thread
Workers = int | tuple[int, int]  # their number, or the least and the greatest one


def no_op(line: str) -> None:
    """Ignore a message."""


def guarded(command: Sequence[str]) -> list[str]:
    """Return the command line of a program that ends with this process; a ``.py`` file is run by this Python."""
    guard = [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid())]
    return [*guard, *([sys.executable] if command[0].endswith(".py") else []), *command]


def worker_environment(
    address: str, rank: int, workers: Workers, curve: str | os.PathLike[str] | None
) -> dict[str, str]:
    """Return the variables from which `shoal.connect` in a worker's program knows its cluster."""
    environment = {"SHOAL_SCHEDULER": address, "SHOAL_RANK": str(rank), "SHOAL_WORKERS": str(workers)}
    if isinstance(workers, tuple):  # ranks are those of a job, and the program may take part in several
        environment |= {"SHOAL_RANK": "", "SHOAL_WORKERS": "{}:{}".format(*workers)}
    if curve is not None:
        environment["SHOAL_CURVE"] = os.path.abspath(curve)
    return environment


def start_worker(
    rank: int,
    command: Sequence[str],
    workers: Workers,
    environment: dict[str, str],
    ended: TimedQueue[Process],
    emit: Emit,
    emit_error: Emit,
) -> ChildProcess:
    """Start a program as a worker on this machine, whose end is put into a queue."""
    most = workers[1] if isinstance(workers, tuple) else workers
    port = find_metrics_port(os.environ)
    if port is not None:  # workers of one machine cannot share it
        environment = environment | {"SHOAL_METRICS_PORT": shift_metrics_port(port, rank)}
    return ChildProcess(
        f"worker {rank}",
        guarded(command),
        environment,
        lambda process, _: ended.put(process),
        lambda line: emit(worker_line(line, rank, most)),
        lambda line: emit_error(worker_line(line, rank, most)),
    )


def run_workers(
    cluster: Supervisor,
    command: Sequence[str],
    workers: Workers,
    emit: Emit,
    emit_error: Emit,
    *,
    restarts: int = 0,
    grace: float = GRACE_SECONDS,
    warn: Callable[[str], None] = no_op,
) -> Process | None:
    """Run a program as all workers of a cluster; return the first process that failed, also a server or the scheduler.

    The cluster has begun, and is completed here. If that fails, or is interrupted, nothing of the program is seen.
    Of a range the least number is started, and others may join. Returns when they have ended too, and so have the named
    jobs, whose workers others have started. Of a range one that is killed by a signal has not failed: the others
    continue without it, or wait for another one if they are too few. Once one has finished, a killed one is not started
    again; one that was started again before has not failed if another one finishes. One that has left, with status 0,
    has not finished. ``restarts`` is how often a worker that was killed by a signal is started again, of all together.
    """
    output = _Output()

    def start(rank: int) -> Process:
        with held_back():
            return cluster.start_worker(rank, command, workers, output.held(emit), output.held(emit_error))

    started = _StartedWorkers(cluster, start, warn, is_range=isinstance(workers, tuple), restarts=restarts)
    cluster.on_dead_worker = started.kill_dead
    patience = 0.0  # until the cluster is complete: no worker has learned anything
    try:
        least = workers[0] if isinstance(workers, tuple) else workers
        cluster.prepare_workers(least)
        started.start(least)
        cluster.complete()
        output.show()
        patience = PATIENCE_SECONDS
        if isinstance(workers, tuple):
            warn(f"more workers may join: SHOAL_SCHEDULER={cluster.address} SHOAL_WORKERS={workers[0]}:{workers[1]}")
        return started.wait() or started.wait_for_others() or started.find_failed()
    except KeyboardInterrupt as interrupt:
        if output.is_shown:
            patience = 0.0
            started.forward(interrupt, grace)
        raise
    finally:
        cluster.on_dead_worker = None
        output.drop()
        end_all(started.children, patience)


class _StartedWorkers:
    """The workers that `run_workers` starts: which of them run, and how the others have ended.

    Threads: `kill_dead` is called by any.
    """

    def __init__(
        self,
        cluster: Supervisor,
        start: Callable[[int], Process],
        warn: Callable[[str], None],
        *,
        is_range: bool,
        restarts: int,
    ) -> None:
        self.children: list[Process] = []  # by rank, those that were started last
        self._cluster = cluster
        self._start = start
        self._warn = warn
        self._is_range = is_range
        self._restarts = restarts  # that are left
        self._going: set[Process] = set()
        self._again: set[Process] = set()  # that were started again
        self._killed: list[Process] = []
        self._failed: list[Process] = []  # of a range those that were started again
        self._has_ended = False  # whether one has ended with status 0: it has finished, or it has left

    def start(self, count: int) -> None:
        """Start so many workers."""
        while len(self.children) < count:
            self.children.append(self._start(len(self.children)))
        self._going.update(self.children)

    def _start_again(self, child: Process) -> None:
        assert child.returncode is not None
        self._restarts -= 1
        rank = self.children.index(child)
        self._warn(
            f"{child.name} was killed by signal {-child.returncode} and starts again, "
            f"{counted(self._restarts, 'restart')} left (--worker-restarts)"
        )
        self.children[rank] = self._start(rank)
        self._going.discard(child)
        self._going.add(self.children[rank])
        self._again.add(self.children[rank])

    def kill_dead(self, rank: int, process: int) -> None:
        """Kill the process of a worker that was declared dead: it may be stopped."""
        for child in self.children if self._is_range else self.children[rank : rank + 1]:
            if child.has(process):
                self._warn(f"{child.name} was declared dead, but its process {process} exists: it is killed")
                child.signal(signal.SIGKILL)

    def _has_finished(self) -> bool:
        return self._has_ended and self._cluster.status()["outcome"] not in ("unfinished", "moving")

    def wait(self) -> Process | None:
        """Wait until all workers have ended; return the first process that failed, also a server or the scheduler."""
        while self._going:
            child = self._cluster.ended.get()
            code = child.returncode
            assert code is not None
            is_going = child in self._going
            if is_going and code < 0 and self._restarts > 0 and not (self._is_range and self._has_finished()):
                self._start_again(child)
                continue
            if is_going and code < 0 and self._is_range:
                others = "others have finished" if self._has_finished() else "the others go on without it"
                self._warn(f"{child.name} was killed by signal {-code}; {others}")
                self._killed.append(child)
                self._going.remove(child)
                continue
            if child in self._again and code != 0 and self._is_range:  # the job may have ended before it took part
                self._warn(f"{child.name}, which was started again, ended with status {code}")
                self._failed.append(child)
                self._going.remove(child)
                continue
            if not is_going or code != 0:
                return child
            self._has_ended = True
            self._going.remove(child)
        return None

    def wait_for_others(self) -> Process | None:
        """Wait for workers that others have started, of a range and of named jobs; return a process that failed."""
        cluster = self._cluster
        while self._is_range and ((status := cluster.status())["workers"] or status["outcome"] == "moving"):
            with contextlib.suppress(queue.Empty):  # a server or the scheduler
                return cluster.ended.get(timeout=_POLL_SECONDS)
        is_told = False
        while cluster.has_named_jobs and (names := _named_jobs(cluster)):
            if not is_told:
                self._warn(f"the workers have ended; the cluster goes on until its other jobs end: {', '.join(names)}")
            is_told = True
            with contextlib.suppress(queue.Empty):
                return cluster.ended.get(timeout=_POLL_SECONDS)
        return None

    def find_failed(self) -> Process | None:
        """Return a worker that failed, now that all have ended; None: the program has done what it was started for."""
        if self._is_range and self._cluster.status()["outcome"] == "unfinished":
            if not (self._failed or self._killed):
                raise WorkerLostError(
                    "all workers have left the fit before its end, and none has continued it: start it again, with "
                    "resume=True (--resume) if it writes checkpoints"
                )
            return (self._failed or self._killed)[0]
        if self._failed and not self._has_ended:
            return self._failed[0]
        return self._killed[0] if len(self._killed) == len(self.children) else None

    def forward(self, interrupt: KeyboardInterrupt, grace: float) -> None:
        """Forward the received signal to the workers, and wait ``grace`` seconds for them to end."""
        if self._is_range:
            _forward(interrupt, self.children, grace, self._warn, as_interrupt=True)
        else:  # the others wait for one that was killed: it ends the clock with them before it ends
            _forward(
                interrupt,
                self.children,
                grace,
                self._warn,
                replace=lambda child: self._start_again(child) if self._restarts > 0 else None,
                is_ready=lambda child: child not in self._again or _has_joined(self._cluster, child),
            )


class _Output:
    """The output of programs: held until it is shown, or dropped if it is not."""

    def __init__(self) -> None:
        self.is_shown = False
        self._decided = threading.Event()

    def show(self) -> None:
        """Show what was held, and what comes."""
        self.is_shown = True
        self._decided.set()

    def drop(self) -> None:
        """Drop what is held; without effect on what is shown."""
        self._decided.set()

    def held(self, emit: Emit) -> Emit:
        """Return a function that waits until it is known whether to emit a line."""

        def emit_or_drop(line: str) -> None:
            self._decided.wait()
            if self.is_shown:
                emit(line)

        return emit_or_drop


def _named_jobs(cluster: Supervisor) -> list[str]:
    """Return the names of the named jobs; none if the scheduler does not answer."""
    with contextlib.suppress(ShoalError):
        return [job["name"] for job in cluster.status(timeout=5.0)["jobs"]]
    return []


def _has_joined(cluster: Supervisor, worker: Process) -> bool:
    """Whether a worker's process is a member of the cluster; false if the scheduler does not answer."""
    with contextlib.suppress(ShoalError):
        members = cluster.status(timeout=5.0)["workers"]
        return any(one["rank"] is not None and worker.has(pid_of(one["about"])) for one in members)
    return False


def _forward(
    interrupt: KeyboardInterrupt,
    workers: Sequence[Process],
    grace: float,
    warn: Callable[[str], None],
    *,
    as_interrupt: bool = False,
    replace: Callable[[Process], None] = lambda worker: None,
    is_ready: Callable[[Process], bool] = lambda worker: True,
) -> None:
    """Forward the received signal to the workers, and wait ``grace`` seconds for them to end.

    With ``as_interrupt`` they receive SIGINT: a SIGTERM makes one of them leave a fit that the others continue. Those
    that another signal has killed are replaced, and a replacement receives the signal once it is ready.
    """
    terminated = isinstance(interrupt, Terminated)
    number = signal.SIGTERM if terminated and not as_interrupt else signal.SIGINT
    told: set[Process] = set()
    deadline = math.inf
    while True:
        for worker in list(workers):
            if worker.returncode is None and worker not in told and is_ready(worker):
                worker.signal(number)
                told.add(worker)
            elif (worker.returncode or 0) < 0 and not (worker in told and worker.returncode == -number):
                replace(worker)
        if deadline == math.inf:
            warn(
                f"{'terminated (SIGTERM)' if terminated else 'interrupted'}: the workers have {grace:g} s to save what "
                f"they have learned (--grace); {'the signal' if terminated else 'Ctrl-C'} again ends them at once"
            )
            deadline = time.monotonic() + grace
        running = [worker for worker in workers if worker.returncode is None]
        seconds = deadline - time.monotonic()
        if not running or seconds <= 0:
            break
        running[0].wait(min(_POLL_SECONDS, seconds))
    for worker in running:
        warn(f"{worker.name} had not ended after {grace:g} s and is killed: --grace gives it more time")


@contextlib.contextmanager
def _until_interrupted(grace: float) -> Iterator[Callable[[], bool]]:
    """Yield a function that is true until ``grace`` seconds after an interrupt, which the end of the block raises."""
    deadline = math.inf

    def in_time() -> bool:
        nonlocal deadline
        if interrupted() is not None:
            deadline = min(deadline, time.monotonic() + grace)
        return time.monotonic() < deadline

    with at_boundaries() as interrupted:
        yield in_time
        if (interrupt := interrupted()) is not None:
            raise interrupt


def run_member(
    process: ProcessIdentity,
    scheduler: SchedulerConfig,
    server: ServerConfig,
    command: Sequence[str],
    emit: Emit,
    emit_error: Emit,
    *,
    address: str | None = None,
    grace: float = GRACE_SECONDS,
    warn: Callable[[str], None] = no_op,
) -> tuple[int, str]:
    """Run one process of a cluster that mpirun or srun has started: the same command everywhere.

    Process 0 is the scheduler, the next ones are the servers, all others run the program as workers. Returns the exit
    status, and the failure of another process, "" if there was none.
    """
    from shoal.cluster.protocol.curve import Keys
    from shoal.cluster.protocol.messages import Leave, LeaveReply
    from shoal.cluster.protocol.scheduler_client import SchedulerClient
    from shoal.cluster.scheduler.scheduler import Scheduler
    from shoal.cluster.server.server import Server

    servers = scheduler.servers
    workers = process.size - servers - 1
    if workers < 1:
        raise ValueError(
            f"{process.launcher} has started {process.size} processes: a scheduler, "
            f"{'a server' if servers == 1 else f'{servers} servers'} and a worker are {servers + 2} at least"
        )
    if address is None:
        if process.host is None:
            raise ValueError(
                f"{process.launcher} does not provide the machine of process 0: pass --scheduler tcp://HOST:{PORT}, "
                "its name or address"
            )
        address = join_address(process.host, PORT)
    if process.rank == 0:
        host, port = split(address)
        bind = join_address(host if is_loopback(host) else "*", port)
        config = structs.replace(scheduler, bind=bind, workers=workers)
        with Scheduler(config) as made, _until_interrupted(grace) as in_time:
            members = made.membership

            def goes_on() -> bool:
                works = members.state.launchers.done < workers or bool(members.named_jobs)
                return works and not members.state.launchers.failed and in_time()

            made.run(goes_on)
        return members.state.launchers.status, members.state.launchers.failed
    if process.rank <= servers:
        server = structs.replace(server, scheduler=address, rank=process.rank - 1)
        with Server(server) as made_server, _until_interrupted(grace) as in_time:
            made_server.run(in_time)
        return 0, ""
    rank = process.rank - servers - 1
    keys = None if server.curve is None else Keys.load(server.curve, "worker")
    about = f"worker {rank} ({process_name()})"
    with SchedulerClient(address, "launcher", about=about, keys=keys) as client:
        client.hello(server.timeout)
        ended: TimedQueue[Process] = TimedQueue()
        patience = PATIENCE_SECONDS
        children: list[Process] = []
        try:
            environment = worker_environment(address, rank, workers, server.curve)
            with held_back():
                children.append(start_worker(rank, command, workers, environment, ended, emit, emit_error))
            while client.fault is None:
                with contextlib.suppress(queue.Empty):
                    ended.get(timeout=_POLL_SECONDS)
                    break
        except KeyboardInterrupt as interrupt:
            patience = 0.0
            _forward(interrupt, children, grace, warn)
            client.call(Leave(), LeaveReply, server.timeout)  # not a failure: the scheduler waits for the others
            raise
        finally:
            end_all(children, patience)
        (child,) = children
        if client.fault is not None:
            return 1, str(client.fault)
        client.call(Leave(child.status), LeaveReply, server.timeout)
    return child.status, ""
