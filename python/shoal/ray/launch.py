"""``shoal launch --engine ray``: a program, run several times, on a cluster of Ray.

Each worker is an actor that requests one CPU and runs the program as a child process, in the directory of the launcher
if its node has one of that name. The lines of its output are sent to the launcher in batches.

Threads: `run_workers` is called by one; a thread for each worker receives its output.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from shoal.base.interrupts import Terminated
from shoal.base.logs import LOG_FORMAT, find_log_format, worker_line
from shoal.base.plural import counted
from shoal.base.timed_queue import TimedQueue
from shoal.cluster.launch.child import ChildProcess, exit_status
from shoal.cluster.launch.local_cluster import PATIENCE_SECONDS
from shoal.cluster.launch.workers import GRACE_SECONDS, no_op, supervised
from shoal.errors import DeadlineExceededError
from shoal.ray.config import ShoalConfig
from shoal.ray.connection import Connection
from shoal.ray.demand import Demand, wait_for_nodes
from shoal.ray.errors import unwrap
from shoal.ray.servers import RayCluster

_POLL_SECONDS = 0.2  # between two checks of the servers
_LINES = 1000  # in a batch, at most
_WORKER = {"CPU": 1.0}  # resources of a worker
_KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How the program of a worker has ended."""

    name: str
    status: int
    text: str


class ProgramActor:
    """Runs a program as one worker."""

    def __init__(self, rank: int, log_format: str | None) -> None:
        self._log_format = log_format
        self._name = f"worker {rank}"
        self._rank = rank
        self._child: ChildProcess | None = None

    def __repr__(self) -> str:
        return f"shoal {self._name}"

    def ready(self) -> None:
        """Return as soon as the actor runs."""

    def run(
        self, command: Sequence[str], connection: Connection, workers: int, directory: str
    ) -> Iterator[list[str] | ProgramEnd]:
        """Run the program; yield the lines of its output, and its end last."""
        with contextlib.suppress(OSError):
            os.chdir(directory)
        lines: TimedQueue[str | None] = TimedQueue()
        ended: TimedQueue[ChildProcess] = TimedQueue()

        def finish() -> None:
            ended.get().describe_end()  # reads its output to the end
            lines.put(None)

        with connection.environment(self._rank, workers) as environment:
            if self._log_format is not None:
                environment = {**environment, LOG_FORMAT: self._log_format}
            self._child = child = ChildProcess(self._name, supervised(command), environment, ended, lines.put)
            threading.Thread(target=finish, daemon=True).start()
            going = True
            while going:
                batch = [lines.get()]
                while len(batch) < _LINES and not lines.empty():
                    batch.append(lines.get())
                going = None not in batch
                yield [line for line in batch if line is not None]
            child.signal(signal.SIGKILL)  # and what it has started
            yield ProgramEnd(self._name, exit_status(child), child.describe_end())

    def signal(self, number: int) -> None:
        """Send a signal to the program."""
        if self._child is not None:
            self._child.signal(signal.Signals(number))


@contextlib.contextmanager
def connected(config: ShoalConfig, workers: int) -> Iterator[None]:
    """Connect to the cluster of Ray that RAY_ADDRESS names or that runs on this machine, or start one for the block.

    One that is started has as many CPUs as all processes request, or those of this machine if they are more.
    """
    demand = Demand([("servers", config.servers, config.resources_per_server), ("workers", workers, _WORKER)])
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init("auto", **quiet)
    except ConnectionError:
        cpus = config.servers * config.resources_per_server.get("CPU", 0) + workers * _WORKER["CPU"]
        ray.init(
            "local",
            num_cpus=max(math.ceil(cpus), os.cpu_count() or 1),
            include_dashboard=False,
            _system_config={"worker_niceness": 0},  # as of processes that shoal launches; the default is 15
            **quiet,
        )
    signal.signal(signal.SIGTERM, before)  # Ray's own ends the process
    try:
        wait_for_nodes(demand, config.timeout)
        yield
    finally:
        ray.shutdown()


def run_workers(
    cluster: RayCluster,
    command: Sequence[str],
    workers: int,
    emit: Callable[[str], None],
    *,
    grace: float = GRACE_SECONDS,
    warn: Callable[[str], None] = no_op,
) -> ProgramEnd | None:
    """Run a program as all workers of a cluster."""
    options = {"num_cpus": _WORKER["CPU"], "max_concurrency": 2, "scheduling_strategy": "SPREAD"}
    log_format = find_log_format(os.environ)
    actors = [
        ray.remote(ProgramActor).options(name=f"{cluster.name}-worker-{rank}", **options).remote(rank, log_format)
        for rank in range(workers)
    ]
    try:
        ready, missing = ray.wait(
            [actor.ready.remote() for actor in actors], num_returns=workers, timeout=cluster.config.timeout
        )
        if missing:
            raise DeadlineExceededError(
                f"Ray has found a place for {len(ready)} of {counted(workers, 'worker')} with 1 CPU each in "
                f"{cluster.config.timeout:g} s: {ray.available_resources().get('CPU', 0):g} CPUs are free; pass less "
                "with --workers or --servers"
            )
        ends: TimedQueue[ProgramEnd] = TimedQueue()
        for rank, actor in enumerate(actors):
            lines = actor.run.options(num_returns="streaming").remote(
                list(command), cluster.connection, workers, str(Path.cwd())
            )
            threading.Thread(target=_receive, args=(rank, lines, workers, emit, ends), daemon=True).start()
        running = _Running(workers, ends)
        try:
            failed = running.wait(cluster)
        except KeyboardInterrupt as interrupt:
            _forward(interrupt, actors, running, grace, warn)
            raise
        if failed is not None and running.count:
            _signal(actors, signal.SIGTERM)
            running.wait_seconds(PATIENCE_SECONDS)
        return failed
    finally:
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.get(actor.signal.remote(signal.SIGKILL), timeout=1.0)
            with contextlib.suppress(Exception):
                ray.kill(actor)


def _receive(rank: int, lines: Any, workers: int, emit: Callable[[str], None], ends: TimedQueue[ProgramEnd]) -> None:
    """Emit the output of a worker, and put its end into the queue."""
    end = None
    try:
        for reference in lines:
            got = ray.get(reference)
            if isinstance(got, ProgramEnd):
                end = got
                break
            for line in got:
                emit(worker_line(line, rank, workers))
    except RayError as error:
        first_line = str(unwrap(error)).strip().partition("\n")[0]
        end = ProgramEnd(f"worker {rank}", _KILLED, f"has died: {first_line}")
    ends.put(end or ProgramEnd(f"worker {rank}", _KILLED, "has ended without a status"))


class _Running:
    """How many workers run, and the queue of the ends of the others."""

    def __init__(self, count: int, ends: TimedQueue[ProgramEnd]) -> None:
        self.count = count
        self._ends = ends

    def wait(self, cluster: RayCluster) -> ProgramEnd | None:
        """Wait for all workers, or for the first that fails."""
        while self.count:
            try:
                end = self._ends.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if cluster.fault is not None:
                    raise cluster.fault from None
                continue
            self.count -= 1
            if end.status != 0:
                return end
        return None

    def wait_seconds(self, seconds: float) -> bool:
        """Wait for all workers, so many seconds at most; return whether they have ended."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while self.count:
                self._ends.get(timeout=max(0.0, deadline - time.monotonic()))
                self.count -= 1
        return self.count == 0


def _signal(actors: Sequence[Any], number: signal.Signals) -> None:
    for actor in actors:
        actor.signal.remote(number)


def _forward(
    interrupt: KeyboardInterrupt,
    actors: Sequence[Any],
    running: _Running,
    grace: float,
    warn: Callable[[str], None],
) -> None:
    """Forward the received signal to the workers, and wait ``grace`` seconds for them to end."""
    terminated = isinstance(interrupt, Terminated)
    _signal(actors, signal.SIGTERM if terminated else signal.SIGINT)
    warn(
        f"{'terminated (SIGTERM)' if terminated else 'interrupted'}: the workers have {grace:g} s to save what they "
        f"have learned (--grace); {'the signal' if terminated else 'Ctrl-C'} again ends them at once"
    )
    if not running.wait_seconds(grace):
        warn(f"not all workers had ended after {grace:g} s; they are killed: --grace gives them more time")
