"""Schedulers and servers as processes that nobody starts again, and what they report."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_fakes import HEARTBEAT, TIMEOUT, scheduler
from shoal.cluster.launch.child import ChildProcess, Process, end_all
from shoal.cluster.launch.local_cluster import LocalCluster, start_role
from shoal.cluster.protocol.reports import Joined, Report
from shoal.cluster.scheduler.scheduler import Scheduler
from shoal.config import SchedulerConfig, ServerConfig


class Processes(LocalCluster):
    """The processes that were started here. A context manager that ends them."""

    def __init__(self) -> None:
        super().__init__()
        self.children: list[ChildProcess] = []
        self._changed = threading.Condition()

    def start_scheduler(self, **settings: Any) -> ChildProcess:
        """Start a scheduler, and wait until it serves."""
        config = SchedulerConfig(**{"bind": self.address or "tcp://127.0.0.1:*", **settings})
        made = self._add(f"scheduler {len(self.children)}", config)
        self.address = self.wait_for(made)[0].address
        return made

    def start_server(self, **settings: Any) -> ChildProcess:
        """Start a server of the scheduler."""
        config = ServerConfig(**{"scheduler": self.address, "timeout": TIMEOUT, **settings})
        return self._add(f"server {len(self.children)}", config)

    def _add(self, name: str, config: SchedulerConfig | ServerConfig) -> ChildProcess:
        made = start_role(name, config, self.notify)
        self.children.append(made)
        return made

    def notify(self, process: Process, report: Report | None) -> None:
        """Note that a process has joined or ended."""
        with self._changed:
            if isinstance(report, Joined):
                process.joined = report
            self._changed.notify_all()

    def wait_for(self, *children: ChildProcess) -> list[Joined]:
        """Wait until processes have joined."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(child.joined is not None or child.returncode is not None for child in children), TIMEOUT
            )
        joined = [child.joined for child in children if child.joined is not None]
        assert len(joined) == len(children), [child.last_output() for child in children if child.joined is None]
        return joined

    def end(self, child: ChildProcess, number: signal.Signals) -> int:
        """Send a signal, and return the status of the process."""
        child.signal(number)
        return child.process.wait(TIMEOUT)

    def stop(self) -> None:
        """Kill all processes."""
        end_all(self.children, 0.0)


@contextlib.contextmanager
def processes(**settings: Any) -> Iterator[Processes]:
    """Run a scheduler with these settings, and the servers that are started in the block."""
    with Processes() as made:
        made.start_scheduler(**settings)
        yield made


@dataclass
class ServerProcesses:
    """A scheduler in a thread of the test, which can declare servers dead at once, and servers as processes."""

    scheduler: Scheduler
    servers: list[ChildProcess]

    @property
    def address(self) -> str:
        return self.scheduler.address


@contextlib.contextmanager
def server_processes(
    servers: int, *, workers: int = 1, storage_roots: Sequence[Path] | None = None, heartbeat: float = HEARTBEAT
) -> Iterator[ServerProcesses]:
    """Run a scheduler in a thread and servers in processes, which all have joined."""
    with scheduler(servers, workers=workers, heartbeat=heartbeat) as one, Processes() as started:
        started.address = one.address
        roots = None if storage_roots is None else tuple(map(str, storage_roots))
        made = [started.start_server(rank=rank, storage_roots=roots) for rank in range(servers)]
        started.wait_for(*made)
        yield ServerProcesses(one, made)
