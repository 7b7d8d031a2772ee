"""Processes of a cluster that are drained, join, move slots, are killed and stopped while a worker trains.

What the worker does is a function of a seed and of the number of rounds, and is done in a local store afterwards: the
answers of all calls, and the digest at the end, are the same.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT
from shoal.cluster.launch import local_cluster
from shoal.cluster.launch.child import ChildProcess
from shoal.cluster.launch.local_cluster import LocalCluster, running
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.worker.cluster_store import ClusterStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="stops processes as Linux does"),
]

KEYS = 3000


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + TIMEOUT
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
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
        table.push(keys, grads).wait()
        store.tick()
        some = np.unique(rng.integers(0, KEYS, 100)).astype(np.uint64)
        match number % 6:
            case 0:
                answers.append(table.erase(some))
            case 1:
                answers.append(store.sweep().rows_dropped)
            case 2:
                answers.append(table.decay(0.5) if number < 60 else len(table))  # at most 2^-10
            case 3:
                answers.append(table.sum().tolist())
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

    def wait_for_copies(self, servers: int) -> None:
        """Wait until so many servers serve slots, and each slot has its copy."""

        def is_so() -> bool:
            status = self.status()
            return (
                len(status["servers"]) == servers
                and all(len(arc["copies"]) >= status["replicas"] for arc in status["arcs"])
                and not any(stream["arriving"] for stream in status["streams"])
            )

        until(is_so)

    def processes(self) -> dict[int, int]:
        """Return the ranks of the servers, by process."""
        return {int(one["about"].split()[1]): one["rank"] for one in self.status()["servers"]}

    def child_of(self, rank: int) -> ChildProcess:
        return next(child for child in self.cluster.servers if self.processes().get(child.process.pid) == rank)

    def wait_for_slots(self, child: ChildProcess) -> None:
        """Wait until a server that has joined serves slots."""
        until(lambda: self.processes().get(child.process.pid) in self.serving())

    def wait_for_end(self, child: ChildProcess) -> None:
        """Wait until a server is no member any more."""
        until(lambda: child.process.pid not in self.processes())

    def kill(self, child: ChildProcess) -> None:
        child.signal(signal.SIGKILL)
        self.wait_for_end(child)

    def join(self) -> ChildProcess:
        """Start a further server, and wait until it serves slots."""
        child = self.cluster._role("another server", ["server", "--connect", self.cluster.address])
        self.cluster.servers.append(child)
        self.wait_for_slots(child)
        return child


@contextlib.contextmanager
def a_run(servers: int, replicas: int, consistency: shoal.Consistency, seed: int) -> Iterator[Run]:
    print(f"seed {seed}")
    with (
        running(servers, replicas=replicas, timeout=TIMEOUT) as cluster,
        shoal.connect(cluster.address, consistency=consistency, timeout=TIMEOUT) as store,
    ):
        run = Run(cluster, store, seed, random.Random(seed))
        try:
            yield run
        finally:
            run.is_ending = True
            if run.thread is not None:
                run.thread.join(TIMEOUT)


@pytest.mark.parametrize("mode", WORKS)
@pytest.mark.parametrize("replicas", [0, 1])
def test_a_server_is_drained_while_a_worker_trains(mode: str, replicas: int) -> None:
    work, consistency = WORKS[mode]
    with a_run(3, replicas, consistency, 11 + replicas) as run:
        run.begin(work)
        run.wait_for_rounds(20)
        drained = run.child_of(1)
        assert run.store.drain(1) == "server 1 ends when other servers have all of its slots"
        assert drained.process.wait(TIMEOUT) == 0
        assert run.serving() == {0, 2}
        run.end()
        until(lambda: drained not in run.cluster.servers)
        assert len(run.cluster.servers) == 2


@pytest.mark.parametrize("mode", WORKS)
def test_a_server_joins_while_a_worker_trains_and_slots_move_to_it(mode: str) -> None:
    work, consistency = WORKS[mode]
    with a_run(2, 1, consistency, 21) as run:
        run.begin(work)
        run.wait_for_rounds(20)
        run.join()
        run.store.rebalance()
        run.wait_for_rounds(20)
        run.store.drain(0)
        assert run.cluster.servers[0].process.wait(TIMEOUT) == 0
        run.end()
        run.wait_for_copies(2)


@pytest.mark.parametrize("seed", range(2))
def test_servers_are_killed_and_stopped_at_random_moments(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "_MAX_RESTARTS", 1000)
    with a_run(3, 1, shoal.BSP(), 31 + seed) as run:
        run.begin(train)
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
        lost = r"server \d at tcp.* the last copy of slots \d[\d to,]+.*start the cluster again and load"
        with pytest.raises(shoal.ServerLostError, match=lost):
            until(lambda: table.pull(keys) is None)
        with pytest.raises(shoal.ServerLostError, match=lost):
            store.drain(2)
        with SchedulerClient(cluster.address, "observer") as client:
            assert "which had the last copy of slots" in client.status(timeout=TIMEOUT).lost
        with contextlib.suppress(shoal.ServerLostError):
            store.close()
