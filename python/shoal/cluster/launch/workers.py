"""The workers of a launched cluster: a program, run several times, each under a supervisor.

    run_workers  all workers of a cluster on this machine
    run_member   one process of a group that mpirun or srun has started: the scheduler, a server or a worker

Ctrl-C and SIGTERM are forwarded to the workers; servers run until the workers have saved. A worker's program runs under
a supervisor (supervisor.py), which ends it when the launcher has ended.

Threads: functions of this module are called by one.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.base.interrupts import Terminated, at_boundaries, held_back
from shoal.base.logs import worker_line
from shoal.base.plural import counted
from shoal.base.timed_queue import TimedQueue
from shoal.cluster.launch.child import ChildProcess, end_all, exit_status
from shoal.cluster.launch.local_cluster import PATIENCE_SECONDS, LocalCluster, slot_memory
from shoal.cluster.protocol.address import is_loopback, join_address, split
from shoal.cluster.protocol.environment import PORT, ProcessIdentity
from shoal.errors import WorkerLostError

if TYPE_CHECKING:
    from shoal.cluster.protocol.curve import Keys
    from shoal.table.tiered import Tiered

GRACE_SECONDS = 60.0  # for workers to save their state after they are asked to end

_POLL_SECONDS = 0.2  # between two checks of the connection to the scheduler
_SLOTS = 1024  # of a cluster that mpirun or srun has started
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


def no_op(line: str) -> None:
    """Ignore a message."""


def supervised(command: Sequence[str]) -> list[str]:
    """Return the command line of a program that ends with this process; a ``.py`` file is run by this Python."""
    supervisor = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid())]
    return [*supervisor, *([sys.executable] if command[0].endswith(".py") else []), *command]


def _start_worker(
    command: Sequence[str],
    address: str,
    rank: int,
    workers: int | tuple[int, int],
    ended: TimedQueue[ChildProcess],
    emit: Callable[[str], None],
    emit_error: Callable[[str], None],
    curve: str | os.PathLike[str] | None,
) -> ChildProcess:
    identity = {"SHOAL_SCHEDULER": address}
    if isinstance(workers, tuple):  # ranks are those of a job, and the program may take part in several
        identity |= {"SHOAL_RANK": "", "SHOAL_WORKERS": "{}:{}".format(*workers)}
        workers = workers[1]
    else:
        identity |= {"SHOAL_RANK": str(rank), "SHOAL_WORKERS": str(workers)}
    if curve is not None:
        identity["SHOAL_CURVE"] = os.path.abspath(curve)
    return ChildProcess(
        f"worker {rank}",
        supervised(command),
        identity,
        ended,
        lambda line: emit(worker_line(line, rank, workers)),
        emit_error=lambda line: emit_error(worker_line(line, rank, workers)),
    )


def run_workers(
    cluster: LocalCluster,
    command: Sequence[str],
    workers: int | tuple[int, int],
    emit: Callable[[str], None],
    emit_error: Callable[[str], None],
    *,
    restarts: int = 0,
    grace: float = GRACE_SECONDS,
    warn: Callable[[str], None] = no_op,
) -> ChildProcess | None:
    """Run a program as all workers of a cluster."""
    children: list[ChildProcess] = []

    def kill_dead(rank: int, process: int) -> None:
        """Kill the process of a worker that was declared dead: it may be stopped."""
        for child in children if isinstance(workers, tuple) else children[rank : rank + 1]:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                if os.getpgid(process) == child.process.pid:
                    warn(f"{child.name} was declared dead, but its process {process} exists: it is killed")
                    child.signal(signal.SIGKILL)

    cluster.on_dead_worker = kill_dead
    patience = PATIENCE_SECONDS
    try:
        while len(children) < (workers[0] if isinstance(workers, tuple) else workers):
            rank = len(children)
            with held_back():
                children.append(
                    _start_worker(
                        command, cluster.address, rank, workers, cluster.ended, emit, emit_error, cluster.curve
                    )
                )
        going = set(children)
        killed: list[ChildProcess] = []
        failed: list[ChildProcess] = []  # of a range those that were started again
        again: set[ChildProcess] = set()
        has_ended = False  # whether one has ended with status 0: it has finished, or it has left
        is_range = isinstance(workers, tuple)

        def has_finished() -> bool:
            return has_ended and cluster.outcome() not in ("unfinished", "moving")

        while going:
            child = cluster.ended.get()
            status = child.process.returncode
            if child in going and status < 0 and restarts > 0 and not (is_range and has_finished()):
                restarts -= 1
                rank = children.index(child)
                warn(
                    f"{child.name} was killed by signal {-status} and starts again, "
                    f"{counted(restarts, 'restart')} left (--worker-restarts)"
                )
                with held_back():
                    children[rank] = _start_worker(
                        command, cluster.address, rank, workers, cluster.ended, emit, emit_error, cluster.curve
                    )
                going.remove(child)
                going.add(children[rank])
                again.add(children[rank])
                continue
            if child in going and status < 0 and is_range:
                others = "others have finished" if has_finished() else "the others go on without it"
                warn(f"{child.name} was killed by signal {-status}; {others}")
                killed.append(child)
                going.remove(child)
                continue
            if child in again and status != 0 and is_range:  # the job may have ended before it could take part
                warn(f"{child.name}, which was started again, ended with status {status}")
                failed.append(child)
                going.remove(child)
                continue
            if child not in going or status != 0:
                return child
            has_ended = True
            going.remove(child)
        while is_range and cluster.has_workers():
            with contextlib.suppress(queue.Empty):  # a server or the scheduler
                return cluster.ended.get(timeout=_POLL_SECONDS)
        is_told = False
        while names := cluster.named_jobs():  # of programs that others have started
            if not is_told:
                warn(f"the workers have ended; the cluster goes on until its other jobs end: {', '.join(names)}")
            is_told = True
            with contextlib.suppress(queue.Empty):
                return cluster.ended.get(timeout=_POLL_SECONDS)
        if is_range and cluster.outcome() == "unfinished":
            if not (failed or killed):
                raise WorkerLostError(
                    "all workers have left the fit before its end, and none has continued it: start it again, with "
                    "resume=True (--resume) if it writes checkpoints"
                )
            return (failed or killed)[0]
        if failed and not has_ended:
            return failed[0]
        return killed[0] if len(killed) == len(children) else None
    except KeyboardInterrupt as interrupt:
        patience = 0.0
        _forward(interrupt, children, grace, warn, as_interrupt=isinstance(workers, tuple))
        raise
    finally:
        cluster.on_dead_worker = None
        end_all(children, patience)


def _forward(
    interrupt: KeyboardInterrupt,
    children: Sequence[ChildProcess],
    grace: float,
    warn: Callable[[str], None],
    *,
    as_interrupt: bool = False,
) -> None:
    """Forward the received signal to the workers, and wait ``grace`` seconds for them to end.

    With ``as_interrupt`` they receive SIGINT: a SIGTERM makes one of them leave a fit that the others continue.
    """
    terminated = isinstance(interrupt, Terminated)
    for child in children:
        child.signal(signal.SIGTERM if terminated and not as_interrupt else signal.SIGINT)
    warn(
        f"{'terminated (SIGTERM)' if terminated else 'interrupted'}: the workers have {grace:g} s to save what they "
        f"have learned (--grace); {'the signal' if terminated else 'Ctrl-C'} again ends them at once"
    )
    deadline = time.monotonic() + grace
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            warn(f"{child.name} had not ended after {grace:g} s and is killed: --grace gives it more time")


def _within_grace(interrupted: Callable[[], KeyboardInterrupt | None], grace: float) -> Callable[[], bool]:
    """Return a function that is true until ``grace`` seconds after an interrupt; a second interrupt raises."""
    deadline = math.inf

    def in_time() -> bool:
        nonlocal deadline
        if interrupted() is not None:
            deadline = min(deadline, time.monotonic() + grace)
        return time.monotonic() < deadline

    return in_time


def run_member(
    process: ProcessIdentity,
    servers: int,
    command: Sequence[str],
    emit: Callable[[str], None],
    emit_error: Callable[[str], None],
    *,
    address: str | None = None,
    threads: int = 1,
    memory: int | str | None = None,
    tier: Tiered | None = None,
    heartbeat: float = 2.0,
    timeout: float = 60.0,
    keys: Callable[[str], Keys | None] = lambda role: None,
    insecure: bool = False,
    storage_roots: Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    allow_code: Sequence[str] = (),
    grace: float = GRACE_SECONDS,
    warn: Callable[[str], None] = no_op,
) -> tuple[int, str]:
    """Run one process of a cluster that mpirun or srun has started: the same command everywhere.

    Process 0 is the scheduler, the next ones are the servers, all others run the program as workers.
    """
    from shoal.cluster.protocol.scheduler_client import SchedulerClient
    from shoal.cluster.scheduler.scheduler import Scheduler
    from shoal.cluster.server.server import Server

    workers = process.size - servers - 1
    if workers < 1:
        counted = "a server" if servers == 1 else f"{servers} servers"
        raise ValueError(
            f"{process.launcher} has started {process.size} processes: a scheduler, {counted} and a worker are "
            f"{servers + 2} at least"
        )
    if address is None:
        if process.host is None:
            raise ValueError(
                f"{process.launcher} does not provide the machine of process 0: pass --connect tcp://HOST:{PORT}, "
                "its name or address"
            )
        address = join_address(process.host, PORT)
    share = slot_memory(memory, _SLOTS)
    if process.rank == 0:
        host, port = split(address)
        bind = join_address(host if is_loopback(host) else "*", port)
        with (
            Scheduler(
                bind,
                servers=servers,
                workers=workers,
                slots=_SLOTS,
                heartbeat=heartbeat,
                keys=keys("scheduler"),
                insecure=insecure,
            ) as scheduler,
            at_boundaries() as interrupted,
        ):
            members = scheduler.membership
            in_time = _within_grace(interrupted, grace)

            def goes_on() -> bool:
                works = members.launchers.done < workers or bool(members.named_jobs)
                return works and not members.launchers.failed and in_time()

            scheduler.run(goes_on)
            if (interrupt := interrupted()) is not None:
                raise interrupt
            return members.launchers.status, members.launchers.failed
    if process.rank <= servers:
        with (
            Server(
                address,
                rank=process.rank - 1,
                threads=threads,
                slot_memory=share,
                tier=tier,
                timeout=timeout,
                keys=keys("server"),
                insecure=insecure,
                storage_roots=storage_roots,
                storage_options=storage_options,
                allow_code=allow_code,
            ) as server,
            at_boundaries() as interrupted,
        ):
            server.run(_within_grace(interrupted, grace))
            if (interrupt := interrupted()) is not None:
                raise interrupt
        return 0, ""
    rank = process.rank - servers - 1
    about = f"worker {rank} (process {os.getpid()} on {socket.gethostname()})"
    own = keys("worker")
    with SchedulerClient(address, "launcher", about=about, keys=own) as client:
        client.hello(timeout=timeout)
        ended: TimedQueue[ChildProcess] = TimedQueue()
        patience = PATIENCE_SECONDS
        children: list[ChildProcess] = []
        try:
            with held_back():
                children.append(
                    _start_worker(
                        command, address, rank, workers, ended, emit, emit_error, own.directory if own else None
                    )
                )
            while client.fault is None:
                with contextlib.suppress(queue.Empty):
                    ended.get(timeout=_POLL_SECONDS)
                    break
        except KeyboardInterrupt as interrupt:
            patience = 0.0
            _forward(interrupt, children, grace, warn)
            client.leave(timeout=timeout, status=0)  # not a failure: the scheduler waits for the others
            raise
        finally:
            end_all(children, patience)
        (child,) = children
        if client.fault is not None:
            return 1, str(client.fault)
        client.leave(timeout=timeout, status=exit_status(child))
    return exit_status(child), ""
