"""Servers as processes, with their scheduler in a thread of the test, which can declare them dead at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster_fakes import TIMEOUT, scheduler
from shoal.cluster.launch.child import ChildProcess
from shoal.cluster.launch.local_cluster import LocalCluster
from shoal.cluster.scheduler.scheduler import Scheduler


@dataclass
class ServerProcesses:
    """The running scheduler and servers."""

    scheduler: Scheduler
    servers: list[ChildProcess]

    @property
    def address(self) -> str:
        return self.scheduler.address


@contextlib.contextmanager
def server_processes(
    servers: int, *, workers: int = 1, storage_roots: Sequence[Path] = ()
) -> Iterator[ServerProcesses]:
    """Run a scheduler in a thread and servers in processes, which all have joined."""
    with scheduler(servers, workers=workers) as one:
        roots = [f"--storage-root={root}" for root in storage_roots]
        started = LocalCluster()
        try:
            for rank in range(servers):
                command = ["server", "--connect", one.address, "--rank", str(rank), *roots]
                started.servers.append(started._role(f"server {rank}", command))
            deadline = time.monotonic() + TIMEOUT
            started._wait_for_lines(started.servers, r"(server \d+ serves slots)", deadline, TIMEOUT)
            yield ServerProcesses(one, started.servers)
        finally:
            started.stop()
