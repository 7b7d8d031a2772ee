"""The start of a cluster: programs and servers that are started before it is complete."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cluster_fakes import TIMEOUT, scheduler
from shoal.cluster.launch.local_cluster import LocalCluster
from shoal.cluster.launch.workers import run_workers
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.errors import ShoalError

PROGRAM = """\
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
print("it runs", flush=True)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
"""


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Begun(LocalCluster):
    """A cluster that has begun, and whose completion waits for the program."""

    def __init__(self, running: Path, end: BaseException | None) -> None:
        super().__init__()
        self.address = "tcp://127.0.0.1:1"
        self._running = running
        self._end = end

    def complete(self) -> None:
        until(self._running.exists)
        if self._end is not None:
            raise self._end


@pytest.mark.parametrize("end", [ShoalError("a role has failed"), KeyboardInterrupt()], ids=["fails", "interrupted"])
def test_programs_of_a_cluster_that_does_not_come_about_are_killed_and_never_seen(
    tmp_path: Path, end: BaseException
) -> None:
    program, running = tmp_path / "program.py", tmp_path / "running"
    program.write_text(f"{PROGRAM}time.sleep(600)\n")
    seen: list[str] = []
    with pytest.raises(type(end)):
        run_workers(Begun(running, end), [str(program), str(running)], 1, seen.append, seen.append, warn=seen.append)
    assert seen == []
    until(lambda: not runs(int(running.read_text())))


def test_what_programs_print_is_shown_once_the_cluster_is_complete(tmp_path: Path) -> None:
    program, running = tmp_path / "program.py", tmp_path / "running"
    program.write_text(PROGRAM)
    seen: list[str] = []
    held: list[list[str]] = []
    cluster = Begun(running, None)
    complete = cluster.complete

    def look() -> None:
        complete()
        held.append(list(seen))

    cluster.complete = look  # type: ignore[method-assign]
    assert run_workers(cluster, [str(program), str(running)], 1, seen.append, seen.append) is None
    assert (held, seen) == ([[]], ["it runs"])


def test_servers_that_wait_for_a_configuration_are_ended_with_their_cluster() -> None:
    cluster = LocalCluster()
    cluster._start_ahead(["server 0", "server 1"])
    waiting = list(cluster._ahead.values())
    assert [child.returncode for child in waiting] == [None, None]
    cluster.stop()
    assert [child.returncode for child in waiting] == [-signal.SIGKILL] * 2


def test_a_server_is_roused_by_its_stop_and_by_the_end_of_its_scheduler() -> None:
    with scheduler(1) as one, SchedulerClient(one.address, "server") as link:
        link.hello(TIMEOUT)
        for end in (link.rouse, one.stop):
            threading.Timer(0.05, end).start()
            begun = time.monotonic()
            assert link.next_order(TIMEOUT) is None
            assert time.monotonic() - begun < TIMEOUT / 2
        assert link.stopped
