"""How soon a killed process is known, and whether a busy machine makes living ones count as dead.

    python bench/bench_detection.py server [--kills 50]              from the kill of a server to ServerLostError
    python bench/bench_detection.py worker [--kills 50]              from the kill of a worker to the others' next clock
    python bench/bench_detection.py busy [--seconds 60] [--load 10]  deaths beside computing processes: must be none
    python bench/bench_detection.py promotion [--seconds 600]        failovers there, with replicas: must be none

All with the shipped defaults (a heartbeat every 2 s), on one machine, with processes that are killed by SIGKILL at
random moments while they train under BSP. Prints median, 99th percentile and maximum in milliseconds, and the load of
the machine. For ``promotion`` a worker trains on three servers with one replica, and this process pings the servers as
the scheduler does: it reports the longest time between two answers of a server, and how many rounds of pings it was
itself too late for.
"""

import argparse
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zmq

import shoal
from background import computing
from chaos import get_status, wait_for_copies
from figures import check, conditions, spread
from shoal.cluster.launch import local_cluster
from shoal.cluster.scheduler.silence import Pinger

KEYS = np.arange(500, dtype=np.uint64)
ONES = np.ones((500, 1), np.float32)
JOIN_SECONDS = 120.0  # for processes to start on a busy machine
LATEST_SECONDS = 60.0  # a death that is not known by then is not detected


def train(store: shoal.Store, clocks: int) -> None:
    """Push, end the clock and pull: the pull waits for the other workers."""
    table = store.table("t", optimizer=shoal.SGD(lr=1.0))
    for _ in range(clocks):
        table.push(KEYS, ONES)
        store.tick()
        table.pull(KEYS)


def train_on(address: str, workers: int, rank: int) -> None:
    """Be a worker that trains until it is killed or the cluster ends."""
    with shoal.connect(address, workers=workers, rank=rank, timeout=JOIN_SECONDS) as store:
        print("joined", flush=True)
        with contextlib.suppress(shoal.ShoalError):
            while True:
                train(store, 10)


@contextlib.contextmanager
def worker_process(address: str, workers: int, rank: int) -> Iterator[subprocess.Popen[str]]:
    """Run `train_on` in a process."""
    command = [sys.executable, __file__, "train", address, str(workers), str(rank)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def kill_servers(kills: int, rng: random.Random) -> list[float]:
    """Return the seconds from each kill to the error of a worker's call."""
    seconds = []
    for _ in range(kills):
        with (
            contextlib.suppress(shoal.ServerLostError),  # of the calls that no thread waited for
            local_cluster.running(2, timeout=JOIN_SECONDS) as cluster,
            shoal.connect(cluster.address, timeout=LATEST_SECONDS) as store,
        ):
            train(store, rng.randrange(10, 200))
            started = time.monotonic()
            rng.choice(cluster.servers).process.kill()
            try:
                while time.monotonic() < started + LATEST_SECONDS:
                    train(store, 1)
            except shoal.ServerLostError as error:
                seconds.append(time.monotonic() - started)
                check("its process has ended" in str(error), f"another reason: {error}")
    check(len(seconds) == kills, f"{kills - len(seconds)} kills were not known")
    return seconds


def kill_workers(kills: int, rng: random.Random) -> list[float]:
    """Return the seconds from each kill to the end of the next clock of the other worker."""
    seconds: list[float] = []
    with contextlib.ExitStack() as undo:
        cluster = undo.enter_context(local_cluster.running(1, workers=2, timeout=JOIN_SECONDS))
        store: shoal.Store | None = None
        while len(seconds) < kills:
            with worker_process(cluster.address, 2, 1) as other:
                if store is None:
                    store = undo.enter_context(
                        shoal.connect(cluster.address, workers=2, rank=0, timeout=LATEST_SECONDS)
                    )
                assert other.stdout is not None
                check(other.stdout.readline() == "joined\n", "a worker has not joined")
                train(store, rng.randrange(10, 200))
                started = time.monotonic()
                other.kill()
                train(store, 3)  # one clock may have been complete, and the killed process ahead by another
                seconds.append(time.monotonic() - started)
    return seconds


def stay_alive(seconds: float, load: int) -> None:
    """Train on two workers and two servers beside computing processes."""
    with contextlib.ExitStack() as undo:
        undo.enter_context(computing(load))
        cluster = undo.enter_context(local_cluster.running(2, workers=2, timeout=JOIN_SECONDS))
        undo.enter_context(worker_process(cluster.address, 2, 1))
        store = undo.enter_context(shoal.connect(cluster.address, workers=2, rank=0, timeout=LATEST_SECONDS))
        started = time.monotonic()
        longest = 0.0
        while time.monotonic() < started + seconds:
            before = time.monotonic()
            train(store, 1)  # raises ServerLostError, FencedError or DeadlineExceededError for a wrong death
            longest = max(longest, time.monotonic() - before)
        check(not store.member.lost_workers, f"a worker that lives was declared dead: {store.member.lost_workers}")
        print(f"no process was declared dead in {seconds:.0f} s, {store.clock} clocks, longest {1000 * longest:.0f} ms")


def stay_promoted(seconds: float, load: int) -> None:
    """Train on three servers with a replica beside computing processes, and ping the servers."""
    with contextlib.ExitStack() as undo:
        undo.enter_context(computing(load))
        cluster = undo.enter_context(local_cluster.running(3, replicas=1, timeout=JOIN_SECONDS))
        wait_for_copies(cluster.address, 3, 1)
        worker = undo.enter_context(worker_process(cluster.address, 1, 0))
        assert worker.stdout is not None
        check(worker.stdout.readline() == "joined\n", "the worker has not joined")
        context, poller = zmq.Context(), zmq.Poller()
        undo.callback(context.term)
        pinger = Pinger(context, poller, lambda socket: None)
        undo.callback(pinger.close)
        first = get_status(cluster.address)
        now = started = time.monotonic()
        pinger.watch({one.address: server.rank for server in first.servers for one in server.endpoints}, now)
        silent: list[tuple[int, str]] = []
        runnable: list[int] = []
        asked = now
        while now < started + seconds:
            poller.poll(1000 * max(0.0, pinger.next_time - now))
            now = time.monotonic()
            silent += pinger.turn(now)
            if now > asked + 0.5:
                asked = now
                runnable.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]))
        last = get_status(cluster.address)
        check(worker.poll() is None, "the worker has ended")
        check(last.failovers == (), f"failovers: {last.failovers}")
        check([one.about for one in last.servers] == [one.about for one in first.servers], "other servers")
        check(not silent, f"this process found servers silent: {silent}")
        clocks = last.workers[0].clock - first.workers[0].clock
        print(
            f"no failover in {seconds:.0f} s, {clocks} clocks of the worker; longest time between two answers to "
            f"pings {1000 * pinger.detector.longest:.0f} ms, {pinger.detector.uncounted} rounds too late; runnable "
            f"{spread(runnable)}"
        )


def report(what: str, seconds: list[float]) -> None:
    """Print the distribution."""
    ms = np.sort(np.array(seconds)) * 1000
    print(
        f"{what}: {len(ms)} kills, median {np.median(ms):.0f} ms, p99 {np.percentile(ms, 99):.0f}, "
        f"minimum {ms[0]:.0f}, maximum {ms[-1]:.0f}"
    )


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["server", "worker", "busy", "promotion", "train"], default="server")
    parser.add_argument("of", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="default: 60, or 600 for promotion")
    parser.add_argument("--load", type=int, default=10)
    given = parser.parse_args()
    if given.what == "train":
        train_on(given.of[0], int(given.of[1]), int(given.of[2]))
        return
    rng = random.Random(given.seed)
    if given.what == "server":
        report("server killed to ServerLostError", kill_servers(given.kills, rng))
    elif given.what == "worker":
        report("worker killed to the others' next clock", kill_workers(given.kills, rng))
    elif given.what == "busy":
        stay_alive(given.seconds or 60.0, given.load)
    else:
        stay_promoted(given.seconds or 600.0, given.load)
    print(f"seed {given.seed}, {conditions()}")


if __name__ == "__main__":
    main()
