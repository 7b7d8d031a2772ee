"""Processes of a cluster whose connections to each other are cut, slow, or carry nothing.

A worker pushes whole numbers all the time and compares what it pulls with its ledger after every clock.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT
from processes import Processes
from relay import FAR, NEAR, Fault, Relays, has_copies, wait_until
from shoal.cluster.launch.child import ChildProcess
from tiers import long_after

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has all of 127.0.0.0/8"),
]

KEYS = np.arange(600, dtype=np.uint64)
HEARTBEAT = 1.0  # seconds; a process without one for five of them is dead
SERVERS = 3


@dataclass
class Cluster:
    """Processes that reach each other through relays."""

    relays: Relays
    roles: Processes
    address: str

    def server(self, rank: int) -> ChildProcess:
        return self.roles.children[1 + rank]


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    with contextlib.closing(Relays({"worker": os.getpid()})) as relays, Processes() as roles:
        port = relays.listen("scheduler")
        scheduler = roles.start_scheduler(bind=f"tcp://{FAR}:{port}", heartbeat=HEARTBEAT, servers=SERVERS, replicas=1)
        relays.sources["scheduler"] = scheduler.process.pid
        roles.address = f"tcp://{NEAR}:{port}"
        for rank in range(SERVERS):
            own = f"tcp://{FAR}:{relays.listen(f'server {rank}')}"
            server = roles.start_server(bind=own, advertise=NEAR, rank=rank)
            relays.sources[f"server {rank}"] = server.process.pid
        roles.wait_for(*roles.children)
        yield Cluster(relays, roles, roles.address)


class Worker:
    """A thread that trains and keeps the ledger. A context manager that ends it, and raises its error."""

    def __init__(self, store: shoal.Store, seed: int) -> None:
        self.store = store
        self.table = store.table("t", optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros())
        self.sums = np.zeros(len(KEYS), np.float32)
        self.steps = 0
        self.error: BaseException | None = None
        self._rng = np.random.default_rng(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.step()
        except BaseException as error:
            self.error = error

    def step(self) -> None:
        which = np.unique(self._rng.integers(0, len(KEYS), 100))
        amounts = self._rng.integers(1, 4, len(which)).astype(np.float32)
        self.table.push(KEYS[which], -amounts[:, None])
        self.sums[which] += amounts
        self.store.tick()
        self.compare()
        self.steps += 1

    def compare(self) -> None:
        rows = self.table.pull(KEYS)[:, 0]
        wrong = np.flatnonzero(rows != self.sums)
        assert not len(wrong), f"key {wrong[0]} has {rows[wrong[0]]}, not {self.sums[wrong[0]]}"

    def wait_for_steps(self, count: int = 3) -> None:
        target = self.steps + count
        wait_until(lambda: self.steps >= target or self.error is not None, f"no step: {self.steps} of {target}")
        if self.error is not None:
            raise self.error

    def wait_for_copies(self) -> None:
        """Wait until another server has what each server has: on a busy machine a stalled copy is made again."""
        wait_until(lambda: has_copies(self.store.cluster()), "some slots have no copy")

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_for_steps()
        self.wait_for_copies()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        if kind is None and self.error is not None:
            raise self.error


LINKS = [
    ("worker", "server 1"),
    ("server 0", "server 1"),
    ("server 1", "scheduler"),
    ("scheduler", "server 1"),
    ("worker", "scheduler"),
]


@contextlib.contextmanager
def training(made: Cluster, consistency: shoal.Consistency, seed: int = 1) -> Iterator[Worker]:
    print(f"seed {seed}")
    with (
        shoal.connect(made.address, timeout=TIMEOUT, consistency=consistency) as store,
        Worker(store, seed) as worker,
    ):
        yield worker


@pytest.mark.parametrize("kind", long_after(1, ["hole", "cut", "delay"]))
def test_training_goes_on_when_a_link_fails_for_a_while(kind: str) -> None:
    with cluster() as made, training(made, shoal.ASP()) as worker:
        for link in LINKS:
            wait_until(lambda link=link: link in made.relays.links(), f"{link} is not connected")
            worker.wait_for_copies()
            made.relays.begin(Fault(*link, kind, 0.05))
            time.sleep(0.5 if kind == "cut" else 2.0)
            made.relays.mend()
            worker.wait_for_steps()
            print(f"{kind} {link}: {worker.steps} steps, {worker.store.cluster()['failovers']}")
            if link == ("scheduler", "server 1"):
                break  # with a hole server 1 has been declared dead
        worker.wait_for_copies()
        made.relays.begin(Fault("worker", "scheduler", kind, 0.05))
        time.sleep(0.5)
        made.relays.mend()
        worker.wait_for_steps()


def test_a_server_that_is_cut_off_from_all_is_replaced_by_its_copies_and_ends() -> None:
    with cluster() as made, training(made, shoal.BSP()) as worker:
        alone = made.server(1)
        made.relays.begin(Fault("server 1", "", "hole"))
        made.relays.begin(Fault("", "server 1", "hole"))
        wait_until(lambda: worker.store.cluster()["failovers"], "server 1 is not known to be dead")
        worker.wait_for_steps()
        assert alone.process.poll() is None
        made.relays.mend()
        worker.wait_for_steps()
        assert alone.process.wait(TIMEOUT) not in (0, -9)
        assert "was declared dead" in alone.last_output()
        (failover,) = worker.store.cluster()["failovers"]
        # By its pings; by its heartbeats on a machine so busy that rounds of pings are late, which do not count.
        assert "has not answered for" in failover["why"] or "silent for" in failover["why"]
        assert failover["silent_seconds"] >= 0.75


def test_a_server_that_cannot_reach_the_scheduler_is_replaced_and_answers_nothing_afterwards() -> None:
    with cluster() as made, training(made, shoal.ASP()) as worker:
        made.relays.begin(Fault("server 2", "scheduler", "hole"))  # pings still arrive
        wait_until(lambda: worker.store.cluster()["failovers"], "server 2 is not known to be dead")
        worker.wait_for_steps(10)
        (failover,) = worker.store.cluster()["failovers"]
        assert "it has been silent for" in failover["why"]


def test_a_call_to_a_server_that_cannot_be_reached_ends_at_its_deadline() -> None:
    with cluster() as made, shoal.connect(made.address, timeout=3.0, consistency=shoal.ASP()) as store:
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        table.push(KEYS, np.ones((len(KEYS), 1), np.float32)).result()
        made.relays.begin(Fault("worker", "server 1", "hole"))
        before = time.monotonic()
        with pytest.raises(shoal.DeadlineExceededError, match="server 1"):
            table.pull(KEYS)
        assert time.monotonic() - before < TIMEOUT
        made.relays.mend()
        wait_until(lambda: table.pull(KEYS).sum() == -len(KEYS), "the rows are wrong")


def test_a_worker_that_cannot_reach_the_scheduler_is_fenced_and_another_takes_its_place() -> None:
    with cluster() as made:
        with contextlib.suppress(shoal.ShoalError), shoal.connect(made.address, timeout=TIMEOUT) as store:
            worker = Worker(store, 1)
            worker.step()
            made.relays.begin(Fault("worker", "scheduler", "hole"))
            with pytest.raises(shoal.errors.FencedError):
                wait_until(worker.step, "it goes on")
            made.relays.mend()
        with shoal.connect(made.address, timeout=TIMEOUT) as store:
            other = Worker(store, 2)
            other.sums[:] = other.table.pull(KEYS)[:, 0]
            assert (other.sums <= worker.sums).all()  # its last clock may be dropped
            assert (other.sums >= worker.sums - 3).all()
            other.step()


@pytest.mark.parametrize("seed", long_after(1, range(2)))
def test_training_goes_on_over_links_that_fail_at_random(seed: int) -> None:
    rng = random.Random(seed)
    roles = ["scheduler", *(f"server {rank}" for rank in range(SERVERS))]
    with cluster() as made, training(made, rng.choice([shoal.BSP(), shoal.ASP()]), seed) as worker:
        for _ in range(8):
            time.sleep(rng.uniform(0.0, 0.2))
            worker.wait_for_copies()
            for _ in range(rng.randint(1, 3)):
                source, target = rng.sample(["worker", *roles], 2)
                fault = Fault(source, target, rng.choice(["cut", "hole", "delay"]), rng.uniform(0.0, 0.05))
                print(fault)
                made.relays.begin(fault)
            time.sleep(rng.uniform(0.05, 0.6))
            made.relays.mend()
            worker.wait_for_steps()
