"""Workers that are killed and started again: threads of a test that send nothing any more, and real processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import shoal
from cluster_fakes import TIMEOUT, declare_dead
from cluster_standin import Cluster, cluster
from shoal.cli import cluster_status
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.status import GetStatus, StatusReply
from shoal.cluster.worker.cluster_store import ClusterStore

SERVERS = 2


class KilledError(BaseException):
    """The thread that plays a worker has been killed: nothing of it is sent any more."""


class Boundaries:
    """Interrupts of one thread, as `at_boundaries` reports those of the process: the attribute ``interrupt``."""

    def __init__(self, leaving: threading.local) -> None:
        self._leaving = leaving

    def __enter__(self) -> Callable[[], Any]:
        return lambda: getattr(self._leaving, "interrupt", None)

    def __exit__(self, *error: object) -> None:
        pass


class Calls:
    """Counts what a store sends, and kills it before a call of some number. Made before its tables, which keep it."""

    def __init__(self, store: ClusterStore, last: int | None) -> None:
        self.count = 0
        self._last = last
        calls = store.channel.calls
        for name in ("pull", "pull_per_key", "push", "push_per_key", "begin", "tick"):
            setattr(self, name, self._counted(getattr(calls, name)))
        store.channel.calls = self
        store._scheduler.ask = self._counted(store._scheduler.ask)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            self.count += 1
            if self._last is not None and self.count >= self._last:
                raise KilledError
            return call(*arguments, **more)

        return counted


def work(
    made: Cluster, rank: int, workers: int, last: int | None, program: Callable[[shoal.Store], Any], mode: Any
) -> tuple[Any, int]:
    """Run a program as a worker, killed before its call ``last`` and started again; return the calls of the first."""

    def connect() -> ClusterStore:
        return shoal.connect(made.address, workers=workers, rank=rank, threads=1, timeout=TIMEOUT, consistency=mode)

    store = connect()
    calls = Calls(store, last)
    try:
        with store:
            return program(store), calls.count
    except KilledError:
        store._scheduler.close()
        declare_dead(made.scheduler, "worker", rank)
        with SchedulerClient(made.address, "observer") as observer:
            status = observer.call(GetStatus(), StatusReply, TIMEOUT)
        (why,) = [one.why for one in status.job.awaited if one.rank == rank]
        assert f"worker {rank} (" in why
        assert "it waits for a replacement for" in cluster_status._text(made.address, status)
    with connect() as again:
        assert again.member.is_replacement
        return program(again), calls.count


def run(
    workers: int, deaths: dict[int, int], program: Callable[[shoal.Store], Any], mode: Any = None
) -> list[tuple[Any, int]]:
    mode = shoal.BSP() if mode is None else mode
    with cluster(SERVERS, 1, replacement_seconds=TIMEOUT) as made, ThreadPoolExecutor(workers) as pool:
        ends = [pool.submit(work, made, rank, workers, deaths.get(rank), program, mode) for rank in range(workers)]
        return [end.result(2 * TIMEOUT) for end in ends]


def workers_of(out: Path, rank: int | None = None) -> list[int]:
    """Return the processes that are workers, or that of a rank, as Linux shows them; without a rank in a range."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            identity = f"SHOAL_RANK={'' if rank is None else rank}".encode()
            if (
                str(out).encode() in words
                and not any(word.endswith(b"guard.py") for word in words)
                and identity in (process / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(process.name))
    return found


def worker_of(out: Path, rank: int) -> int | None:
    """Return the process that is the worker of a rank, as Linux shows it."""
    return next(iter(workers_of(out, rank)), None)
