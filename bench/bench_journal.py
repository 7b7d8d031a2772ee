"""What the scheduler's journal costs, and how long a scheduler is away that is killed.

    python bench/bench_journal.py commit [--directory DIR] [--inputs 20000]    inputs a second with fsync, bytes of each
    python bench/bench_journal.py replay [--directory DIR] [--inputs 100000]   seconds until a scheduler continues
    python bench/bench_journal.py kill [--kills 20]                            pushes and barriers during restarts

The inputs are those of 16 workers on 4 servers that take the splits of a pass and wait at barriers; one commit holds
those of 1, 16 or 256 messages. The disk is that of DIR, by default of the directory for temporary files: each line of
`commit` also has the time of a bare write and fsync of as many bytes to the same disk, measured in turns. Prints
medians with ranges, and the load of the machine.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

import shoal
from figures import check
from shoal.cluster.launch import local_cluster, supervisor
from shoal.cluster.protocol.messages import (
    Barrier,
    Hello,
    JobConsistency,
    Join,
    Message,
    Order,
    OrderReply,
    Request,
    TakeSplit,
)
from shoal.cluster.protocol.records import RequestBody
from shoal.cluster.scheduler.inputs import Input
from shoal.cluster.scheduler.journal import Journal
from shoal.cluster.scheduler.membership import Membership
from shoal.cluster.scheduler.peers import Outgoing
from shoal.cluster.scheduler.recovery import recover
from shoal.cluster.scheduler.state import new_state
from shoal.config import ClusterConfig

SERVERS, WORKERS = 4, 16
ROUNDS = 5
BSP = JobConsistency("bsp", 0, False)
SETTINGS = ClusterConfig(servers=SERVERS, workers=WORKERS, heartbeat=1e6)


class Traffic:
    """Messages of a cluster, without sockets."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.inputs = 0
        self.membership = recover(journal, new_state(SETTINGS, bytes(16)), partial(Membership, record=self.record))
        self.numbers: dict[bytes, int] = {}
        servers = [b"server %d" % rank for rank in range(SERVERS)]
        for rank, sender in enumerate(servers):
            self.ask(sender, Hello("server", "s"))
            self.ask(sender, Join(rank, (f"tcp://127.0.0.1:{6000 + rank}",)))
        while self.membership.probes:
            self.obey(self.membership.probed(self.membership.probes.popleft(), None, 0.0))
        self.workers = [b"worker %d" % rank for rank in range(WORKERS)]
        for rank, sender in enumerate(self.workers):
            self.ask(sender, Hello("worker", "w"))
            self.ask(sender, Join(rank, (), WORKERS, BSP))
        check(len(self.membership.workers) == WORKERS, "the job has begun")

    def record(self, entry: Input) -> None:
        """Append an input."""
        self.inputs += 1
        self.journal.append(entry)

    def handle(self, sender: bytes, message: Message) -> None:
        """Process a message."""
        self.obey(self.membership.handle(sender, "127.0.0.1", message, 0.0))

    def obey(self, outgoing: Outgoing) -> None:
        """Acknowledge all orders."""
        for route, message in outgoing:
            if isinstance(message, Order):
                self.handle(route, OrderReply(route, message.number))

    def ask(self, sender: bytes, body: RequestBody) -> None:
        """Process a request."""
        number = self.numbers[sender] = self.numbers.get(sender, 0) + 1
        self.handle(sender, Request(sender, number, body, number, (number,)))

    def messages(self) -> Iterator[None]:
        """Process messages, one for each step, without end."""
        clock, finished = 0, dict.fromkeys(self.workers, -1)
        while True:
            for taken, sender in enumerate(self.workers):
                self.ask(sender, TakeSplit(0, 1 << 23, "digest", finished[sender], 0.0, clock))
                finished[sender] = clock * WORKERS + taken
                yield
            clock += 1
            if clock % 10 == 0:
                for sender in self.workers:
                    self.ask(sender, Barrier(f"b{clock}"))
                    yield


def shown(values: list[float], digits: int = 1) -> str:
    """Return median and range."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def commit(directory: Path, inputs: int) -> None:
    """Measure commits of several sizes, in turns with bare writes."""
    for batch in (1, 16, 256):
        rates, bare, sizes = [], [], 0.0
        for turn in range(ROUNDS):
            count = max(1, inputs // ROUNDS // max(batch, 10))
            with Journal(directory / f"{batch}-{turn}") as journal:
                traffic = Traffic(journal)
                journal.commit()
                steps, before, begin = traffic.messages(), journal._log_bytes, traffic.inputs
                start = time.perf_counter()
                for _ in range(count):
                    for _ in range(batch):
                        next(steps)
                    journal.commit()
                seconds = time.perf_counter() - start
                made, sizes = traffic.inputs - begin, (journal._log_bytes - before) / (traffic.inputs - begin)
                rates.append(made / seconds)
            data = bytes(int(sizes * batch))
            with (directory / "bare").open("ab", buffering=0) as file:
                start = time.perf_counter()
                for _ in range(count):
                    file.write(data)
                    os.fsync(file.fileno())
                bare.append((time.perf_counter() - start) / count * 1e6)
        print(
            f"{batch:4d} inputs a commit: {shown(rates, 0)} inputs/s, {sizes:.0f} bytes each; "
            f"a bare write and fsync {shown(bare, 0)} us"
        )


def replay(directory: Path, inputs: int) -> None:
    """Measure how long a scheduler reads and replays a log."""
    with Journal(directory / "replay") as journal:
        traffic = Traffic(journal)
        steps = traffic.messages()
        while traffic.inputs < inputs:
            for _ in range(256):
                next(steps)
            journal.commit()
        size, state = journal._log_bytes, traffic.membership.save()
    seconds, work = [], []
    for _ in range(ROUNDS):
        with Journal(directory / "replay") as journal:
            start, cpu = time.perf_counter(), time.process_time()
            again = recover(journal, new_state(SETTINGS, bytes(16)))
            seconds.append(time.perf_counter() - start)
            work.append(time.process_time() - cpu)
        check(again.save() == state, "the replayed state is the same")
    print(
        f"{traffic.inputs} inputs, {size / 1e6:.1f} MB: {shown(seconds, 2)} s to replay, {shown(work, 2)} s of a core"
    )


def kill(kills: int) -> None:
    """Kill the scheduler of a launched cluster while a worker pushes and another thread waits at barriers."""
    keys, ones = np.arange(100, dtype=np.uint64), np.ones((100, 1), np.float32)
    rng = random.Random(7)
    supervisor._MAX_RESTARTS = kills + 1
    with local_cluster.running(1) as cluster, shoal.connect(cluster.address, timeout=120.0) as store:
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        pushes: list[tuple[float, float]] = []
        done = threading.Event()

        def push() -> None:
            while not done.is_set():
                start = time.perf_counter()
                table.push(keys, ones).result()
                store.tick()
                pushes.append((start, time.perf_counter() - start))

        thread = threading.Thread(target=push)
        thread.start()
        away, near = [], []
        for _ in range(kills):
            time.sleep(0.5 + rng.random())
            start = time.perf_counter()
            cluster.scheduler.signal(signal.SIGKILL)
            store.barrier()
            end = time.perf_counter()
            away.append(end - start)
            near += [seconds for at, seconds in pushes if start - 0.05 < at < end]
        done.set()
        thread.join()
        rest = sorted(seconds for _, seconds in pushes)
        check(len(pushes) == -int(table.pull(keys[:1])[0, 0]), "every push counts once")
    late = 1000 * max(near)
    print(f"{kills} kills: a barrier is answered {shown([1000 * one for one in away], 0)} ms after the kill")
    print(
        f"{len(near)} pushes meanwhile, the slowest {late:.1f} ms; all {len(rest)}: median "
        f"{1000 * statistics.median(rest):.2f} ms, slowest {1000 * rest[-1]:.1f} ms"
    )


def main() -> None:
    """Run the measurement that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["commit", "replay", "kill"], default="commit")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--inputs", type=int)
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    with contextlib.ExitStack() as ends:
        directory = Path(ends.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory)))
        if arguments.what == "commit":
            commit(directory, arguments.inputs or 20000)
        elif arguments.what == "replay":
            replay(directory, arguments.inputs or 100000)
        else:
            kill(arguments.kills)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
