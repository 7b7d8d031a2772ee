"""How long a worker's pushes are interrupted when a server of a cluster with replicas dies.

    python bench/bench_failover.py killed [--faults 30]     a server is killed with SIGKILL
    python bench/bench_failover.py stopped [--faults 5]     a server is stopped with SIGSTOP; the launcher kills it
    python bench/bench_failover.py scheduler [--faults 30]  the scheduler is killed with SIGKILL
    python bench/bench_failover.py killed --faults 70 --seed 1 --csv FILE    several runs with one result

A worker pushes all the time, one push after the other, to a launched cluster with the shipped defaults. At random
moments a process of a randomly chosen server is killed or stopped. The interruption lasts from the signal to the reply
to the first push that was begun after the signal. Before the next fault the program waits until there are as many
servers and copies as at the start; the slowest push that had its reply between the signal and then is reported as well.

The optimizer subtracts gradients, which are small whole numbers, so a row is the negative sum of what was pushed: after
each fault all rows are compared with a ledger. Prints median, 99th percentile and maximum in milliseconds, the load of
the machine, and the CPU time of this process and its children. With ``--csv`` the faults are appended to a file, and
the figures are of all faults of their kind in it.
"""

import argparse
import csv
import os
import random
import signal
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np

import shoal
from background import Steps
from chaos import wait_for_copies
from figures import check, conditions
from shoal.cluster.launch import local_cluster, supervisor
from shoal.consistency import Consistency

KEYS = 2000  # on all servers
BATCH = 500
JOIN_SECONDS = 120.0  # for processes to start on a busy machine
LATEST_SECONDS = 60.0  # an interruption that lasts longer has no end
MODES: dict[str, Consistency] = {"bsp": shoal.BSP(), "ssp": shoal.SSP(2), "asp": shoal.ASP()}


class Pusher(Steps):
    """A thread that pushes, and the ledger of what it has pushed."""

    def __init__(self, store: shoal.Store, seed: int) -> None:
        super().__init__()
        self._store = store
        self._table = store.table("failover", optimizer=shoal.SGD(lr=1.0))
        self._rng = np.random.default_rng(seed)
        self._sums = np.zeros(KEYS)
        self._changed = threading.Condition()
        self._last = (0.0, 0.0)  # when the last push was begun, and when its reply arrived
        self._since = 0.0  # rows are to be compared after a push that was begun later; 0: they have been
        self._pushes: deque[tuple[float, float]] = deque(maxlen=1_000_000)  # when replied, and after how many seconds

    def failed(self) -> None:
        """Wake who waits for a push."""
        with self._changed:
            self._changed.notify_all()

    def step(self) -> None:
        """Push, and compare all rows after the first push that was begun when asked to."""
        which = self._rng.integers(KEYS, size=BATCH)
        amounts = self._rng.integers(1, 4, BATCH).astype(np.float32)
        begun = time.monotonic()
        self._table.push(which.astype(np.uint64), amounts[:, None]).result()
        replied = time.monotonic()
        self._pushes.append((replied, replied - begun))
        np.add.at(self._sums, which, amounts)
        self._store.tick()
        if 0 < self._since <= begun:
            rows = self._table.pull(np.arange(KEYS, dtype=np.uint64))[:, 0]
            check(np.array_equal(rows, -self._sums), f"{np.count_nonzero(rows != -self._sums)} rows are wrong")
            with self._changed:
                self._since, self._last = 0.0, (begun, replied)
                self._changed.notify_all()

    def interruption(self, began: float) -> float:
        """Return the seconds from a moment to the reply to the first push that was begun after it."""
        with self._changed:
            self._since = began
            self._changed.wait_for(lambda: self._since == 0 or self.failure, LATEST_SECONDS)
            check(not self.failure, f"the worker has ended: {self.failure}")
            check(self._since == 0, f"no push had a reply within {LATEST_SECONDS:.0f} s")
            return self._last[1] - began

    def slowest(self, since: float) -> float:
        """Return the seconds of the slowest push that has had its reply since a moment."""
        found = 0.0
        for replied, seconds in reversed(self._pushes.copy()):
            if replied < since:
                break
            found = max(found, seconds)
        return found


def interrupt(
    what: str, faults: int, servers: int, consistency: Consistency, rng: random.Random
) -> list[tuple[float, float]]:
    """Return the seconds of the interruptions, and of the slowest push of each until all copies were back."""
    supervisor._MAX_RESTARTS = 10**6  # as often as there are faults
    found = []
    with (
        local_cluster.running(servers, replicas=1, timeout=JOIN_SECONDS) as cluster,
        shoal.connect(cluster.address, consistency=consistency, timeout=LATEST_SECONDS) as store,
        Pusher(store, rng.randrange(10**6)) as pusher,
    ):
        wait_for_copies(cluster.address, servers, 1)
        for _ in range(faults):
            time.sleep(rng.uniform(0.2, 1.0))
            victim = cluster.scheduler if what == "scheduler" else rng.choice(cluster.servers)
            assert victim is not None
            began = time.monotonic()
            victim.process.send_signal(signal.SIGSTOP if what == "stopped" else signal.SIGKILL)
            if what == "stopped":
                os.waitid(os.P_PID, victim.process.pid, os.WSTOPPED | os.WNOWAIT)  # until then it may still reply
            seconds = pusher.interruption(began)
            if what == "scheduler":
                victim.process.wait()
            wait_for_copies(cluster.address, servers, 1)
            found.append((seconds, pusher.slowest(began)))
    return found


def accumulate(path: Path, what: str, found: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Append faults to a file; return all of their kind in it."""
    with path.open("a", newline="") as file:
        csv.writer(file).writerows((what, *one) for one in found)
    with path.open(newline="") as file:
        return [(float(seconds), float(slowest)) for kind, seconds, slowest in csv.reader(file) if kind == what]


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["killed", "stopped", "scheduler"], default="killed")
    parser.add_argument("--faults", type=int, metavar="N", help="default: 30, or 5 stops")
    parser.add_argument("--servers", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--consistency", choices=MODES, default="asp", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="collects the faults of several runs")
    given = parser.parse_args()
    faults = given.faults or (5 if given.what == "stopped" else 30)
    consistency = MODES[given.consistency]
    found = interrupt(given.what, faults, given.servers, consistency, random.Random(given.seed))
    if given.csv is not None:
        found = accumulate(given.csv, given.what, found)
    for name, seconds in zip(("interruption", "slowest push"), zip(*found, strict=True), strict=True):
        ms = np.sort(seconds) * 1000
        print(
            f"{given.what}: {len(ms)} faults, {name} median {np.median(ms):.0f} ms, p99 {np.percentile(ms, 99):.0f}, "
            f"minimum {ms[0]:.0f}, maximum {ms[-1]:.0f}"
        )
    used = os.times()
    print(
        f"all rows were exact after each fault; seed {given.seed}, {given.consistency}, {conditions()}, "
        f"{used.user + used.system:.0f} s of CPU here, {used.children_user + used.children_system:.0f} s in processes "
        "that have ended"
    )


if __name__ == "__main__":
    main()
