"""Launching: all processes of a cluster on one machine, and none of them left behind.

    running      a scheduler and servers, for as long as a block of code runs
    launch       the same, with a store that ends them when it is closed
    run_workers  a program, several times, as the workers of such a cluster
    run_part     one process's part in a group that mpirun or srun has started: scheduler, server or worker

Every child leads a process group of its own, so that what it starts ends with it, and a terminal's Ctrl-C reaches this
process alone, which passes it on to the workers: servers live until those have saved. Roles check from their first line
on whether the process that started them is still there (``--parent``); a worker's program has a keeper around it that
does (keeper.py). What a child says is read by a thread for each, which keeps the last lines.

Threads: objects of this module are used by one.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.base.interrupts import Terminated, at_boundaries, held_back
from shoal.cluster.launch.environment import PORT, ProcessIdentity, find_keys
from shoal.cluster.protocol.address import is_loopback, join_address, split
from shoal.consistency import BSP, Consistency
from shoal.errors import DeadlineExceededError, ShoalError
from shoal.storage.roots import CREDENTIALS, StorageRoots
from shoal.store.description import make_budget

if TYPE_CHECKING:
    from shoal.cluster.protocol.curve import Keys
    from shoal.cluster.worker.cluster_store import ClusterStore
    from shoal.cluster.worker.filters import Filters

__all__ = [
    "GRACE",
    "ChildProcess",
    "LocalCluster",
    "ProcessFailedError",
    "launch",
    "run_part",
    "run_workers",
    "running",
    "status_of",
]

GRACE = 60.0  # seconds for workers to save what they have learned, once they are asked to end

_LAST_LINES = 40
_PATIENCE = 5.0  # seconds between asking a process to end and killing it
_PAUSE = 0.2  # seconds between two looks at whether the cluster is still there
_BSP = BSP()
_SLOTS = 1024  # of a cluster that mpirun or srun has started

_SUPERVISOR = Path(__file__).with_name("supervisor.py")


class ChildProcess:
    """A process that was started, and the last lines that it said.

    Parameters
    ----------
    name : str
    command : sequence of str
    environment : mapping
        What is added to this process's.
    ended : queue
        Gets this object when the process is gone.
    say : callable, optional
        Is given every line, from a thread.
    news : Condition, optional
        Notified of every line and of the end; guards ``last`` and ``ended_at``.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        ended: queue.SimpleQueue[ChildProcess],
        say: Callable[[str], None] | None = None,
        news: threading.Condition | None = None,
    ) -> None:
        self.name = name
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        self.ended_at = math.inf  # as time.monotonic() tells it
        self._ended = ended
        self._say = say
        self._news = threading.Condition() if news is None else news
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            process_group=0,
        )
        self._thread = threading.Thread(target=self._listen, name=f"shoal-{name}", daemon=True)
        self._thread.start()
        self._waiter = threading.Thread(target=self._wait, name=f"shoal-{name}-end", daemon=True)
        self._waiter.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        # A bar draws over itself: each time is a line here, and the return that it begins with is none.
        with io.TextIOWrapper(self.process.stdout, errors="replace", newline="") as lines:
            for line in lines:
                if line == "\r":
                    continue
                with self._news:
                    self.last.append(line.rstrip("\r\n"))
                    self._news.notify_all()
                if self._say is not None:
                    self._say(line.rstrip("\r\n"))

    def _wait(self) -> None:
        self.process.wait()
        with self._news:
            self.ended_at = time.monotonic()
            self._news.notify_all()
        self._ended.put(self)

    def find(self, pattern: str) -> str | None:
        """Return the first group of what matches in the last lines; the caller holds the condition."""
        found = next((found for line in self.last if (found := re.search(pattern, line)) is not None), None)
        return None if found is None else str(found[1])

    def how_it_ended(self) -> str:
        """Say with which status, or by which signal, and what it said last."""
        # What it said is heard to the end, unless something that it left behind keeps the pipe open.
        self._thread.join(1.0)
        status = self.process.returncode
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{how}; it said last: {self.told()}"

    def told(self) -> str:
        """Return the last lines."""
        with self._news:
            return "\n".join(["", *self.last]) if self.last else "nothing"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; to all that it started too where that is to kill it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)

    def end(self, deadline: float) -> None:
        """Wait until a moment for the process to end, then kill it and what it has left behind."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        self.signal(signal.SIGKILL)
        self.process.wait()
        self._waiter.join()
        self._thread.join(1.0)


def _end_all(children: Sequence[ChildProcess], patience: float) -> None:
    """Ask processes to end, and kill them if they do not; at once if that is interrupted."""
    try:
        for child in children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + patience
        for child in children:
            child.end(deadline)
    except BaseException:
        for child in children:
            child.end(0.0)
        raise


class ProcessFailedError(ShoalError):
    """A process of a cluster ended before the cluster was there."""

    def __init__(self, child: ChildProcess) -> None:
        super().__init__(f"{child.name} {child.how_it_ended()}")
        self.status = status_of(child)


def status_of(child: ChildProcess) -> int:
    """Return the exit status to pass on: that of the process, as a shell tells it."""
    code = child.process.returncode
    return code if code >= 0 else 128 - code


class LocalCluster:
    """The processes of a cluster on this machine."""

    def __init__(self) -> None:
        self.ended: queue.SimpleQueue[ChildProcess] = queue.SimpleQueue()
        self.scheduler: ChildProcess | None = None
        self.servers: list[ChildProcess] = []
        self.address = ""
        self.curve: str | None = None
        self._news = threading.Condition()
        self._stopped = False

    @property
    def roles(self) -> list[ChildProcess]:
        """All that were started."""
        return [*([self.scheduler] if self.scheduler else []), *self.servers]

    def start(
        self,
        servers: int,
        *,
        workers: int = 1,
        threads: int = 1,
        memory: int | None = None,
        slots: int = 1024,
        heartbeat: float = 2.0,
        timeout: float = 60.0,
        curve: str | None = None,
        storage_roots: Sequence[str | os.PathLike[str]] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the scheduler, then the servers, and wait until they have joined.

        Raises
        ------
        ProcessFailedError
            One of them ended: the first that did.
        DeadlineExceededError
            They were not there in time.
        """
        share = _slot_memory(memory, slots)
        bound = [] if share is None else ["--slot-memory", str(share)]
        bound += _storage_arguments(storage_roots, storage_options)
        self.curve = curve
        deadline = time.monotonic() + timeout
        counts = ["--servers", str(servers), "--workers", str(workers), "--slots", str(slots)]
        beats = ["--heartbeat", str(heartbeat)]
        with held_back():
            self.scheduler = self._role("scheduler", ["scheduler", "--bind", "tcp://127.0.0.1:*", *counts, *beats])
        (self.address,) = self._said([self.scheduler], r"scheduler at (tcp://[^\s,]+)", deadline, timeout)
        for rank in range(servers):
            command = ["server", "--connect", self.address, "--rank", str(rank), "--threads", str(threads), *bound]
            with held_back():
                self.servers.append(self._role(f"server {rank}", command))
        self._said(self.servers, r"(server \d+ has slots)", deadline, timeout)

    def _role(self, name: str, arguments: Sequence[str]) -> ChildProcess:
        keys = [] if self.curve is None else ["--curve", self.curve]
        command = [sys.executable, "-m", "shoal", *arguments, *keys, "--parent", str(os.getpid())]
        return ChildProcess(name, command, {}, self.ended, news=self._news)

    def _said(self, children: Sequence[ChildProcess], pattern: str, deadline: float, timeout: float) -> list[str]:
        """Wait for a line of each; for the end of any process too, which is what went wrong then."""
        while True:
            with self._news:
                found = {child: child.find(pattern) for child in children}
                missing = [child for child in children if found[child] is None]
                first = min(self.roles, key=lambda child: child.ended_at)
                if first.ended_at == math.inf:
                    if not missing:
                        return [text for text in found.values() if text is not None]
                    if self._news.wait(max(0.0, deadline - time.monotonic())) or time.monotonic() < deadline:
                        continue
            if first.ended_at < math.inf:
                raise ProcessFailedError(first)
            late = "; ".join(f"{child.name} was not ready, and said: {child.told()}" for child in missing)
            raise DeadlineExceededError(f"the cluster was not there after {timeout:g} s: {late}")

    def stop(self) -> None:
        """End all processes; returns when they are gone."""
        if self._stopped:
            return
        self._stopped = True
        _end_all(self.roles, _PATIENCE)


@contextlib.contextmanager
def running(
    servers: int,
    *,
    workers: int = 1,
    threads: int = 1,
    memory: int | None = None,
    slots: int = 1024,
    heartbeat: float = 2.0,
    timeout: float = 60.0,
    curve: str | None = None,
    storage_roots: Sequence[str | os.PathLike[str]] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[LocalCluster]:
    """Run a scheduler and servers on this machine for the length of a ``with`` block.

    Parameters
    ----------
    servers : int
    workers : int
        How many a job has, where they do not say.
    threads : int
        Endpoints of each server.
    memory : int, optional
        Bytes that the rows of all of them may take.
    slots : int
    heartbeat : float
        Seconds.
    timeout : float
        Seconds for all to be there.
    curve : str, optional
        Directory of the keys of all of them.
    storage_roots, storage_options
        As :class:`shoal.cluster.server.server.Server`.

    Yields
    ------
    LocalCluster
        ``address`` is the scheduler's.
    """
    cluster = LocalCluster()
    try:
        cluster.start(
            servers,
            workers=workers,
            threads=threads,
            memory=memory,
            slots=slots,
            heartbeat=heartbeat,
            timeout=timeout,
            curve=curve,
            storage_roots=storage_roots,
            storage_options=storage_options,
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
    memory: int | None = None,
    slots: int = 1024,
    timeout: float = 60.0,
    filters: Filters | Mapping[str, Filters] | None = None,
    storage_roots: Sequence[str | os.PathLike[str]] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ClusterStore:
    """Start a cluster of one worker, this process; see :func:`shoal.launch`."""
    from shoal.cluster.worker import cluster_store

    cluster = LocalCluster()
    curve = find_keys(os.environ)
    try:
        cluster.start(
            servers,
            threads=server_threads,
            memory=memory,
            slots=slots,
            timeout=timeout,
            curve=curve,
            storage_roots=storage_roots,
            storage_options=storage_options,
        )
    except BaseException:
        cluster.stop()
        raise
    return cluster_store.connect(
        cluster.address,
        consistency=consistency,
        workers=1,
        rank=0,
        timeout=timeout,
        threads=threads,
        curve=curve,
        filters=filters,
        on_close=cluster.stop,
    )


def _storage_arguments(roots: Sequence[str | os.PathLike[str]] | None, options: Mapping[str, Any] | None) -> list[str]:
    """Write what `shoal server` is to know of storage, but for credentials: whoever saves sends those."""
    StorageRoots(roots, options)  # or it says what is wrong with them
    shown = {name: value for name, value in (options or {}).items() if name not in CREDENTIALS}
    return [
        *(f"--storage-root={os.fspath(root)}" for root in roots or ()),
        *(f"--storage-option={name}={msgspec.json.encode(value).decode()}" for name, value in shown.items()),
    ]


def _slot_memory(memory: int | None, slots: int) -> int | None:
    if memory is None:
        return None
    make_budget(memory, slots)  # or it says what is wrong with it
    return memory // slots


def program(command: Sequence[str]) -> list[str]:
    """Make the command line of a program: a ``.py`` file is run by this Python."""
    return [sys.executable, *command] if command[0].endswith(".py") else list(command)


def _start_worker(
    command: Sequence[str],
    address: str,
    rank: int,
    workers: int,
    ended: queue.SimpleQueue[ChildProcess],
    say: Callable[[str], None],
    curve: str | os.PathLike[str] | None,
) -> ChildProcess:
    place = {"SHOAL_SCHEDULER": address, "SHOAL_RANK": str(rank), "SHOAL_WORKERS": str(workers)}
    if curve is not None:
        place["SHOAL_CURVE"] = os.path.abspath(curve)
    kept = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid())]
    prefix = f"[{rank}] " if workers > 1 else ""
    return ChildProcess(f"worker {rank}", [*kept, *program(command)], place, ended, lambda line: say(prefix + line))


def run_workers(
    cluster: LocalCluster,
    command: Sequence[str],
    workers: int,
    say: Callable[[str], None],
    *,
    grace: float = GRACE,
    note: Callable[[str], None] = lambda line: None,
) -> ChildProcess | None:
    """Run a program as all workers of a cluster.

    Parameters
    ----------
    cluster : LocalCluster
    command : sequence of str
        The program and its arguments.
    workers : int
    say : callable
        Is given every line that a worker says, from threads.
    grace : float
        Seconds that workers have to end by themselves after Ctrl-C or SIGTERM.
    note : callable
        Is told what is waited for meanwhile.

    Returns
    -------
    ChildProcess or None
        The first process that failed, a server or the scheduler among them; None when all workers ended well.

    Raises
    ------
    KeyboardInterrupt
        Ctrl-C or SIGTERM: the workers got it too, and have ended. A second one does not wait for them.
    """
    children: list[ChildProcess] = []
    patience = _PATIENCE
    try:
        while len(children) < workers:
            rank = len(children)
            with held_back():
                children.append(
                    _start_worker(command, cluster.address, rank, workers, cluster.ended, say, cluster.curve)
                )
        going = set(children)
        while going:
            child = cluster.ended.get()
            if child not in going or child.process.returncode != 0:
                return child
            going.remove(child)
        return None
    except KeyboardInterrupt as interrupt:
        patience = 0.0
        _pass_on(interrupt, children, grace, note)
        raise
    finally:
        _end_all(children, patience)


def _pass_on(
    interrupt: KeyboardInterrupt, children: Sequence[ChildProcess], grace: float, note: Callable[[str], None]
) -> None:
    """Give workers the signal that this process got, and time to end by themselves."""
    terminated = isinstance(interrupt, Terminated)
    for child in children:
        child.signal(signal.SIGTERM if terminated else signal.SIGINT)
    note(
        f"{'told to end (SIGTERM)' if terminated else 'interrupted'}: the workers have {grace:g} s to save what they "
        f"have learned (--grace); {'the signal' if terminated else 'Ctrl-C'} again ends them at once"
    )
    deadline = time.monotonic() + grace
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            note(f"{child.name} had not ended after {grace:g} s, and is killed: --grace gives it longer")


def _within_grace(interrupted: Callable[[], KeyboardInterrupt | None], grace: float) -> Callable[[], bool]:
    """Make what says whether to go on: until so long after an interrupt, or a second one, which raises."""
    deadline = math.inf

    def in_time() -> bool:
        nonlocal deadline
        if interrupted() is not None:
            deadline = min(deadline, time.monotonic() + grace)
        return time.monotonic() < deadline

    return in_time


def run_part(
    place: ProcessIdentity,
    servers: int,
    command: Sequence[str],
    say: Callable[[str], None],
    *,
    address: str | None = None,
    threads: int = 1,
    memory: int | None = None,
    timeout: float = 60.0,
    keys: Callable[[str], Keys | None] = lambda role: None,
    insecure: bool = False,
    storage_roots: Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    grace: float = GRACE,
    note: Callable[[str], None] = lambda line: None,
) -> tuple[int, str]:
    """Be one process of a cluster that mpirun or srun has started: the same command everywhere.

    Process 0 is the scheduler, those behind it are the servers, all others run the program as workers.

    Parameters
    ----------
    place : ProcessIdentity
        Which process this is.
    servers : int
    command : sequence of str
        The program and its arguments.
    say : callable
        Is given every line that the program says.
    address : str, optional
        Of the scheduler; default: port 5570 of the machine of process 0, where the launcher says which that is.
    threads : int
        Endpoints of each server.
    memory : int, optional
        Bytes that the rows of all servers may take.
    timeout : float
        Seconds for all to be there.
    keys : callable
        Gives the keys of a role.
    insecure : bool
        Do without keys also where other machines reach the cluster.
    storage_roots, storage_options
        As :class:`shoal.cluster.server.server.Server`.
    grace, note
        As `run_workers`. The scheduler and the servers, which get the signal too, go on until the workers have ended.

    Returns
    -------
    (status, str)
        What to end with, and what went wrong elsewhere; empty if nothing did.

    Raises
    ------
    ValueError
        The group is too small, or nobody knows where the scheduler is.
    """
    from shoal.cluster.protocol.scheduler_client import SchedulerClient
    from shoal.cluster.scheduler.scheduler import Scheduler
    from shoal.cluster.server.server import Server

    workers = place.size - servers - 1
    if workers < 1:
        counted = "a server" if servers == 1 else f"{servers} servers"
        raise ValueError(
            f"{place.launcher} has started {place.size} processes: a scheduler, {counted} and a worker are "
            f"{servers + 2} at least"
        )
    if address is None:
        if place.host is None:
            raise ValueError(
                f"{place.launcher} does not say on which machine process 0 is: pass --connect tcp://HOST:{PORT}, "
                "its name or address"
            )
        address = join_address(place.host, PORT)
    slot_memory = _slot_memory(memory, _SLOTS)
    if place.rank == 0:
        host, port = split(address)
        bind = join_address(host if is_loopback(host) else "*", port)
        with (
            Scheduler(
                bind, servers=servers, workers=workers, slots=_SLOTS, keys=keys("scheduler"), insecure=insecure
            ) as scheduler,
            at_boundaries() as interrupted,
        ):
            members = scheduler.membership
            in_time = _within_grace(interrupted, grace)
            scheduler.run(lambda: members.launchers_done < workers and not members.failed and in_time())
            if (interrupt := interrupted()) is not None:
                raise interrupt
            return members.status, members.failed
    if place.rank <= servers:
        with (
            Server(
                address,
                rank=place.rank - 1,
                threads=threads,
                slot_memory=slot_memory,
                timeout=timeout,
                keys=keys("server"),
                insecure=insecure,
                storage_roots=storage_roots,
                storage_options=storage_options,
            ) as server,
            at_boundaries() as interrupted,
        ):
            server.run(_within_grace(interrupted, grace))
            if (interrupt := interrupted()) is not None:
                raise interrupt
        return 0, ""
    rank = place.rank - servers - 1
    about = f"worker {rank} (process {os.getpid()} on {socket.gethostname()})"
    own = keys("worker")
    with SchedulerClient(address, "launcher", about=about, keys=own) as link:
        link.hello(timeout=timeout)
        ended: queue.SimpleQueue[ChildProcess] = queue.SimpleQueue()
        patience = _PATIENCE
        children: list[ChildProcess] = []
        try:
            with held_back():
                children.append(
                    _start_worker(command, address, rank, workers, ended, say, own.directory if own else None)
                )
            while link.fault is None:
                with contextlib.suppress(queue.Empty):
                    ended.get(timeout=_PAUSE)
                    break
        except KeyboardInterrupt as interrupt:
            patience = 0.0
            _pass_on(interrupt, children, grace, note)
            link.leave(timeout=timeout, status=0)  # no failure: the scheduler waits for the others
            raise
        finally:
            _end_all(children, patience)
        (child,) = children
        if link.fault is not None:
            return 1, str(link.fault)
        link.leave(timeout=timeout, status=status_of(child))
    return status_of(child), ""
