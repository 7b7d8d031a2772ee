"""Processes of a cluster that get signals."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

from cluster_fakes import TIMEOUT
from shoal.cluster.launch.child import ChildProcess, end_all
from shoal.cluster.launch.local_cluster import LocalCluster


class Processes(LocalCluster):
    """A scheduler and servers that nobody starts again."""

    def __init__(self, *settings: str, servers: int) -> None:
        super().__init__()
        self.settings = ["--servers", str(servers), *settings]
        self.children: list[ChildProcess] = []
        self.scheduler = self.run("scheduler", "--bind", "tcp://127.0.0.1:*", *self.settings)
        self.wait_for(self.scheduler, r"scheduler at (\S+),")
        self.address = self.scheduler.find(r"scheduler at (\S+),") or ""

    def run(self, *arguments: str) -> ChildProcess:
        made = self._role(f"{arguments[0]} {len(self.children)}", arguments)
        self.children.append(made)
        return made

    def server(self, *arguments: str) -> ChildProcess:
        return self.run("server", "--connect", self.address, *arguments)

    def wait_for(self, child: ChildProcess, pattern: str) -> None:
        self._wait_for_lines([child], pattern, time.monotonic() + TIMEOUT, TIMEOUT)

    def end(self, child: ChildProcess, number: signal.Signals) -> int:
        child.signal(number)
        return child.process.wait(TIMEOUT)


@contextlib.contextmanager
def processes(*settings: str, servers: int) -> Iterator[Processes]:
    made = Processes(*settings, servers=servers)
    try:
        yield made
    finally:
        end_all(made.children, 0.0)
