"""Processes of a cluster that are drained, join, move slots, are killed and stopped while a worker trains.

What the worker does is a function of a seed and of the number of rounds, and is done in a local store afterwards: the
answers of all calls, and the digest at the end, are the same.
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT
from relay import has_copies
from shoal import checkpoint
from shoal.cluster.launch import supervisor
from shoal.cluster.launch.child import ChildProcess
from shoal.cluster.launch.local_cluster import LocalCluster, running
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.status import GetStatus, StatusReply
from shoal.cluster.worker.cluster_store import ClusterStore
from shoal.config import ServerConfig
from tiers import long_after, long_but

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="stops processes as Linux does"),
]

KEYS = 3000
MAX_DRAINS = 4


def until(what: Callable[[], Any], seconds: float = TIMEOUT, about: Callable[[], Any] = str) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, f"it did not happen within {seconds:.0f} s {about()}"
        time.sleep(0.02)
    return found


def do_everything(store: shoal.Store, seed: int, rounds: Iterable[int]) -> list[Any]:
    """Do every kind of call that changes rows, under ASP; return the answers and the digest.

    Numbers are whole, or halves of such, and small: sums and products are exact.
    """
    rng = np.random.default_rng(seed)
    table = store.table("t", dim=2, optimizer=shoal.SGD(lr=1.0), expire=shoal.TimeToLive(9), init=shoal.Zeros())
    answers: list[Any] = []
    for number in rounds:
        keys = np.unique(rng.integers(0, KEYS, 400)).astype(np.uint64)
        grads = rng.integers(-3, 4, (len(keys), 2)).astype(np.float32)
        table.push(keys, grads).result()
        store.tick()
        some = np.unique(rng.integers(0, KEYS, 100)).astype(np.uint64)
        match number % 6:
            case 0:
                answers.append(table.erase(some))
            case 1:
                answers.append(store.sweep().rows_dropped)
            case 2:
                answers.append(table.decay(0.5) if number < 60 else len(table))  # at most 2^-10, or 2^-11
            case 3:
                answers.append(table.sum().tolist())
                table.scale_rate(0.5 if number % 4 == 3 else 1.0)
            case 4:
                table.assign(some, np.full((len(some), 2), number, np.float32))
            case _:
                answers.append(table.pull(some).tolist())
    return [*answers, len(table), table.digest()]


def train(store: shoal.Store, seed: int, rounds: Iterable[int]) -> list[Any]:
    """Train under BSP with gradients that depend on the weights; return the digest."""
    rng = np.random.default_rng(seed)
    table = store.table("t", dim=2, optimizer=shoal.Adagrad(lr=0.1))
    for _ in rounds:
        keys = rng.integers(0, KEYS, 200).astype(np.uint64)
        table.push(keys, np.tanh(table.pull(keys)) + rng.normal(size=(200, 2)).astype(np.float32))
        store.tick()
    return [table.digest()]


Work = Callable[[shoal.Store, int, Iterable[int]], list[Any]]
WORKS: dict[str, tuple[Work, shoal.Consistency]] = {
    "bsp": (train, shoal.BSP()),
    "asp": (do_everything, shoal.ASP()),
}


@dataclass
class Run:
    """A worker that works in a thread, on a cluster, until it is asked to end."""

    cluster: LocalCluster
    store: ClusterStore
    seed: int
    rng: random.Random
    storage_roots: tuple[Path, ...] = ()
    count: int = 0  # rounds begun
    is_ending: bool = False
    results: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    thread: threading.Thread | None = None
    work: Work = train

    def begin(self, work: Work) -> None:
        def rounds() -> Iterator[int]:
            while not self.is_ending:
                self.count += 1
                yield self.count - 1

        def run() -> None:
            try:
                self.results += work(self.store, self.seed, rounds())
            except BaseException as error:
                self.error = error

        self.work = work
        self.thread = threading.Thread(target=run)
        self.thread.start()
        self.wait_for_rounds(3)

    def wait_for_rounds(self, most: int) -> None:
        """Let the worker go on for some rounds."""
        target = self.count + self.rng.randint(1, most)
        until(lambda: self.count >= target or self.error is not None)
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """End the worker, and compare its answers with those of a local store."""
        self.wait_for_rounds(5)
        self.is_ending = True
        assert self.thread is not None
        self.thread.join(TIMEOUT)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        print(f"{self.count} rounds")
        with shoal.local() as store:
            expected = self.work(store, self.seed, range(self.count))
        pairs = zip(range(len(expected)), expected, self.results, strict=True)
        wrong = [f"answer {number} is {got}, not {local}" for number, local, got in pairs if got != local]
        assert not wrong, f"of {len(expected)}: {'; '.join(wrong)[:2000]}"

    def status(self) -> dict[str, Any]:
        return self.store.cluster()

    def serving(self) -> set[int]:
        return {arc["server"] for arc in self.status()["arcs"]}

    def has_copies(self, servers: int) -> bool:
        """Whether so many servers are members, each slot has its copy, and nothing is being copied."""
        status = self.status()
        return len(status["servers"]) == servers and has_copies(status)

    def is_settled(self, servers: int) -> bool:
        """Whether copies exist, and so many servers serve equally many slots: nothing will move."""
        counts = [0] * servers
        for place, server in zip(range(servers), sorted(self.serving()), strict=False):
            counts[place] = sum(arc["server"] == server for arc in self.status()["arcs"])
        return self.has_copies(servers) and max(counts) - min(counts) <= 1

    def wait_for_copies(self, servers: int) -> None:
        """Wait until so many servers serve slots, and each slot has its copy."""
        until(lambda: self.has_copies(servers), about=self.status)

    def processes(self) -> dict[int, int]:
        """Return the ranks of the servers, by process."""
        return {int(one["about"].split()[1]): one["rank"] for one in self.status()["servers"]}

    def child_of(self, rank: int) -> ChildProcess:
        return next(child for child in self.cluster.servers if self.processes().get(child.process.pid) == rank)

    def wait_for_slots(self, name: str) -> ChildProcess:
        """Wait until a server that joins serves slots; returns it, or the one that was started in its place.

        A process that gets no processor for a second is declared dead, and the launcher replaces it.
        """

        def serving() -> ChildProcess | None:
            child = next(child for child in self.cluster.servers if child.name == name)
            return child if self.processes().get(child.process.pid) in self.serving() else None

        return cast(ChildProcess, until(serving, seconds=3 * TIMEOUT, about=self.status))

    def begin_drain(self, rank: int) -> ChildProcess:
        """Request a server to be drained; returns its process."""
        child = self.child_of(rank)
        assert self.store.drain(rank) == f"server {rank} ends when other servers have all of its slots"
        return child

    def end_drain(self, rank: int, child: ChildProcess) -> None:
        """Wait until a server has been drained and has ended with status 0.

        If it was declared dead before, as one that gets no processor for a second, the server in its place is drained.
        """
        for _ in range(MAX_DRAINS):
            status = child.process.wait(TIMEOUT)
            if status == 0:
                until(lambda child=child: child not in self.cluster.servers)
                assert rank not in self.serving()
                return
            how = child.describe_end()
            assert status == -signal.SIGKILL or "was declared dead" in how, f"server {rank} {how}"  # by the launcher
            rank = self.processes()[self.wait_for_slots(child.name).process.pid]
            child = self.begin_drain(rank)
        pytest.fail(f"{MAX_DRAINS} servers were declared dead while they were drained: {self.status()}")

    def wait_for_end(self, child: ChildProcess) -> None:
        """Wait until a server is no member any more."""
        until(lambda: child.process.pid not in self.processes())

    def kill(self, child: ChildProcess) -> None:
        child.signal(signal.SIGKILL)
        self.wait_for_end(child)

    def join(self) -> ChildProcess:
        """Start a further server, and wait until it serves slots."""
        name = f"another server, number {len(self.cluster.servers)}"
        roots = tuple(map(str, self.storage_roots)) or None
        self.cluster.servers.append(
            self.cluster._start(name, ServerConfig(scheduler=self.cluster.address, storage_roots=roots))
        )
        return self.wait_for_slots(name)


@contextlib.contextmanager
def a_run(
    servers: int, replicas: int, consistency: shoal.Consistency, seed: int, *storage_roots: Path
) -> Iterator[Run]:
    print(f"seed {seed}")
    with (
        running(servers, replicas=replicas, timeout=TIMEOUT, storage_roots=storage_roots or None) as cluster,
        shoal.connect(cluster.address, consistency=consistency, timeout=TIMEOUT) as store,
    ):
        run = Run(cluster, store, seed, random.Random(seed), storage_roots)
        try:
            yield run
        finally:
            run.is_ending = True
            if run.thread is not None:
                run.thread.join(TIMEOUT)


@pytest.mark.parametrize(("mode", "replicas"), long_after(2, [("asp", 0), ("bsp", 1), ("bsp", 0), ("asp", 1)]))
def test_a_server_is_drained_while_a_worker_trains(mode: str, replicas: int) -> None:
    work, consistency = WORKS[mode]
    with a_run(3, replicas, consistency, 11 + replicas) as run:
        run.begin(work)
        run.wait_for_rounds(20)
        run.end_drain(1, run.begin_drain(1))
        assert len(run.serving()) == 2
        run.end()
        assert len(run.cluster.servers) == 2


@pytest.mark.parametrize("mode", long_but(["asp"], WORKS.keys()))
def test_a_server_joins_while_a_worker_trains_and_slots_move_to_it(mode: str) -> None:
    work, consistency = WORKS[mode]
    with a_run(2, 1, consistency, 21) as run:
        run.begin(work)
        run.wait_for_rounds(20)
        run.join()
        run.store.rebalance()
        run.wait_for_rounds(20)
        first = min(run.serving())
        run.end_drain(first, run.begin_drain(first))
        run.end()
        run.wait_for_copies(2)


@pytest.mark.parametrize(("mode", "seed"), long_after(1, [("bsp", 31), ("asp", 40), ("bsp", 32)]))
def test_servers_are_killed_and_stopped_at_random_moments(
    mode: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MAX_RESTARTS", 1000)
    work, consistency = WORKS[mode]
    with a_run(3, 1, consistency, seed) as run:
        run.begin(work)
        done = []
        for _ in range(4):
            run.wait_for_rounds(25)
            victim = run.rng.choice(run.cluster.servers)
            what = run.rng.choice(["killed", "stopped", "paused", "scheduler"])
            if what == "killed":
                run.kill(victim)
            elif what == "scheduler":
                assert run.cluster.scheduler is not None
                run.cluster.scheduler.signal(signal.SIGKILL)
            else:
                victim.signal(signal.SIGSTOP)
            if what == "paused":  # it may be declared dead meanwhile, and is then killed
                time.sleep(run.rng.uniform(0.05, 1.2))
                victim.signal(signal.SIGCONT)
            elif what == "stopped":
                victim.process.wait(TIMEOUT)  # the launcher kills it
                run.wait_for_end(victim)
            done.append(what)
            run.wait_for_copies(3)
        print(done)
        run.end()


def test_moves_and_deaths_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_MAX_RESTARTS", 1000)
    with a_run(3, 1, shoal.ASP(), 41) as run:
        run.begin(do_everything)
        run.wait_for_rounds(15)
        run.join()  # the first slots have moved
        run.kill(run.child_of(min(run.serving())))  # another server is started in its place
        run.wait_for_copies(4)
        rank, other = sorted(run.serving())[:2]
        leaving = run.begin_drain(rank)
        run.kill(run.child_of(other))
        run.end_drain(rank, leaving)
        run.wait_for_copies(3)
        run.end()


class Begun:
    """Counts the snapshots that the saves of a store take: repeated ones take several."""

    def __init__(self, store: ClusterStore) -> None:
        self.count = 0
        self._take = store._snapshots
        store._snapshots = self._counted  # type: ignore[method-assign]

    def _counted(self, *arguments: Any) -> Any:
        self.count += 1
        return self._take(*arguments)


def interrupt_saves(run: Run, directory: Path, disturb: Callable[[], Callable[[], bool]]) -> None:
    """Save again and again until a disturbance has made saves fail, and check what stands after each one.

    Every other save is in the background, where it fails; one that is waited for is repeated and succeeds.

    ``disturb`` is called when a save has begun to write. It returns a function that returns whether its effects are
    over: then the next save is disturbed anew.
    """
    store, saved = run.store, directory / "saved"
    table = store.table("t", optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros())
    keys = np.arange(500_000, dtype=np.uint64)
    steps = 0

    begun = Begun(store)

    def save() -> None:
        nonlocal steps
        table.push(keys, -np.ones((len(keys), 1), np.float32))
        store.tick()
        steps += 1
        if steps % 2 == 0:
            store.save(saved, overwrite=True)
        else:
            store.save(saved, wait=False, overwrite=True).result()

    def check(expected: int) -> None:
        with shoal.local() as other:
            other.load(saved)
            rows = other.table("t", optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros()).pull(keys)
            assert np.array_equal(rows, np.full_like(rows, expected))

    save()
    stands = steps
    failures: list[str] = []
    while not failures or begun.count == steps:
        assert steps < 60, f"no save was interrupted: {len(failures)} in the background, {begun.count} of {steps} begun"
        before = set(saved.iterdir())

        def wait_and_disturb(before: set[Path] = before) -> Callable[[], bool]:
            until(lambda: set(saved.iterdir()) - before)
            return disturb()

        with ThreadPoolExecutor(1) as threads:
            disturbing = threads.submit(wait_and_disturb)
            is_over: Callable[[], bool] | None = None
            while is_over is None or not is_over():  # at least once
                try:
                    save()
                    stands = steps
                except shoal.errors.ClusterChangedError as error:
                    assert steps % 2 == 1, "a save that is waited for fails"
                    failures.append(str(error))
                    check(stands)
                if disturbing.done():
                    is_over = disturbing.result()  # raises what the thread has raised
    save()
    check(steps)
    print(f"{len(failures)} of {steps} saves failed, and {begun.count - steps} were repeated")
    reason = re.compile("slots have moved .* during the save .*the former data is kept, save again")
    assert all(reason.search(failure) for failure in failures), failures
    manifest = checkpoint.read_manifest(saved)
    assert {path.name for path in saved.iterdir() if path.suffix == ".slots"} == {
        file.name for table in manifest.tables for file in table.files
    }


@pytest.mark.parametrize("number", long_but(["killed"], {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}))
def test_a_save_whose_server_dies_fails_whole_and_the_next_one_succeeds(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MAX_RESTARTS", 1000)
    with a_run(3, 1, shoal.BSP(), 51, tmp_path) as run:

        def disturb() -> Callable[[], bool]:
            victim = run.rng.choice(run.cluster.servers)
            pid = victim.process.pid
            time.sleep(run.rng.uniform(0, 0.05))
            victim.signal(number)
            return lambda: pid not in run.processes() and run.is_settled(3)

        interrupt_saves(run, tmp_path, disturb)


def test_a_save_while_slots_move_fails_whole_or_succeeds(tmp_path: Path) -> None:
    with a_run(2, 1, shoal.BSP(), 61, tmp_path) as run:

        def move() -> Callable[[], bool]:
            status = run.status()
            ranks = [server["rank"] for server in status["servers"]]
            if len(ranks) < len(status["arcs"]):
                run.join()
                return lambda: run.is_settled(len(ranks) + 1)
            run.store.drain(max(ranks))  # a further server would get no slots
            return lambda: run.is_settled(len(ranks) - 1)

        interrupt_saves(run, tmp_path, move)


def test_when_both_copies_of_a_slot_are_gone_calls_raise_an_error_that_names_the_slots() -> None:
    with (
        running(3, replicas=1, timeout=TIMEOUT) as cluster,
        shoal.connect(cluster.address, timeout=TIMEOUT) as store,
    ):
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        keys = np.arange(KEYS, dtype=np.uint64)
        for server in cluster.servers[:2]:
            server.signal(signal.SIGSTOP)  # so that both die at the same time for the others
        for server in cluster.servers[:2]:
            server.signal(signal.SIGKILL)
        lost = r"server \d at ipc.* the last copy of slots \d[\d to,]+.*start the cluster again and load"
        with pytest.raises(shoal.ServerLostError, match=lost):
            until(lambda: table.pull(keys) is None)
        with pytest.raises(shoal.ServerLostError, match=lost):
            store.drain(2)
        with SchedulerClient(cluster.address, "observer") as client:
            assert "which had the last copy of slots" in client.call(GetStatus(), StatusReply, TIMEOUT).lost
        with contextlib.suppress(shoal.ServerLostError):
            store.close()
