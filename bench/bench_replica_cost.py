"""The cost of a replica: throughput, CPU time of each process and memory, with no copies and with one.

    python bench/bench_replica_cost.py [--rounds 7] [--rows 2000000]

Three clusters of two servers and two workers take turns on the same generated batches under BSP: without replicas,
with one, and with one and twice the threads, since a replica makes servers execute each push twice. In each round every
cluster does two things:

    train   logistic regression (FTRL): the workers pull, compute, push and tick; keys are those pulled and pushed
    push    the workers push gradients to the same keys and tick: no pull, no model

CPU time is in nanoseconds per key of all workers together, for each process, and for the busiest thread of a server.
The largest time of a worker or of a server's thread limits the throughput of a cluster with a core for each of these:
what a replica costs there is the ratio of these limits. Where all processes share two cores, their sum counts. Bytes
per key are those by which the resident sets of both servers grow while the rows are created, and the tables' own count.
At the end the tables of all clusters must have the same digest: BSP gives the same bits with a replica.
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

import numpy as np

import shoal
from chaos import wait_for_copies
from figures import check, conditions, cpu_seconds, resident_bytes, spread, thread_seconds
from shoal.cluster.launch import local_cluster
from shoal.cluster.launch.local_cluster import LocalCluster

SERVERS, WORKERS = 2, 2
FEATURES = 39  # of an example
POOL = 8  # batches of a worker, repeated
WAYS = ("train", "push")
SIDES = {"0": (0, 1), "1": (1, 1), "1, two threads": (1, 2)}  # replicas, threads of each server


# ---- a worker --------------------------------------------------------------------------------------------------------


def batches(rank: int, rows: int, batch_size: int) -> list[shoal.Batch]:
    """Draw a worker's batches: keys by Zipf's law, labels that depend on them."""
    rng = np.random.default_rng([7, rank])
    made = []
    for _ in range(POOL):
        ranks = np.minimum(rng.zipf(1.2, (batch_size, FEATURES)), rows) - 1
        keys = (ranks * 2654435761 + np.arange(FEATURES) * 15485863) % rows
        labels = (rng.random(batch_size) < 0.1 + 0.4 * (keys[:, 0] % 2)).astype(np.float32)
        indptr = np.arange(0, FEATURES * batch_size + 1, FEATURES, dtype=np.int64)
        made.append(shoal.Batch(labels, indptr, keys.astype(np.uint64).ravel(), None))
    return made


def work(address: str, rank: int, rows: int, batch_size: int) -> None:
    """Do what the lines of standard input say: ``train N`` or ``push N``, a number of batches."""
    pool = batches(rank, rows, batch_size)
    unique = [np.unique(batch.keys) for batch in pool]
    with shoal.connect(address, workers=WORKERS, rank=rank, threads=1, timeout=300.0) as store:
        model = shoal.LogisticRegression(shoal.FTRL(alpha=0.1), store=store, bias=False)
        (table,) = model.tables
        print(json.dumps({}), flush=True)
        for line in sys.stdin:
            what, count = line.split()
            keys, cpu, start = 0, time.process_time(), time.perf_counter()
            for first in range(0, rows if what == "create" and rank == 0 else 0, 1 << 16):
                some = np.arange(first, min(rows, first + (1 << 16)), dtype=np.uint64)
                table.push(some, np.ones((len(some), 1), np.float32)).result()
            for k in itertools.islice(itertools.cycle(range(POOL)), int(count)):
                keys += len(unique[k])
                if what == "train":
                    model.partial_fit(pool[k])
                else:
                    table.push(unique[k], np.full((len(unique[k]), 1), 1e-3, np.float32)).result()
                    store.tick()
            if what == "create":
                store.tick()
            table.pull(unique[0][:1])  # waits for all that was pushed
            store.barrier()
            found: dict[str, Any] = {"seconds": time.perf_counter() - start, "keys": keys}
            found |= {"cpu": time.process_time() - cpu, "examples": int(count) * batch_size}
            if what == "create":
                found["bytes_per_row"], found["rows"] = table.stats().bytes_per_row, len(table)
            if what == "digest":
                found["digest"] = table.digest()
            print(json.dumps(found), flush=True)


# ---- the clusters ----------------------------------------------------------------------------------------------------


class Side:
    """A cluster, its workers, and the figures of its rounds."""

    def __init__(self, cluster: LocalCluster, arguments: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        assert cluster.scheduler is not None
        self.pids = {"scheduler": cluster.scheduler.process.pid}
        self.pids |= {f"server {k}": child.process.pid for k, child in enumerate(cluster.servers)}
        self.figures: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.workers = []
        for rank in range(WORKERS):
            command = [sys.executable, __file__, "--work", cluster.address, str(rank)]
            command += ["--rows", str(arguments.rows), "--batch-size", str(arguments.batch_size)]
            worker = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(worker.kill)
            self.workers.append(worker)
        self.read()

    def read(self) -> list[dict[str, Any]]:
        """Read a line of each worker."""
        lines = [worker.stdout.readline() for worker in self.workers if worker.stdout]
        check(all(lines), "a worker has ended")
        return [json.loads(line) for line in lines]

    def do(self, what: str, count: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Let the workers do something; return what each reports, and the CPU seconds of each process."""
        before = {name: cpu_seconds(pid) for name, pid in self.pids.items()}
        threads = {name: thread_seconds(pid) for name, pid in self.pids.items() if name.startswith("server")}
        for worker in self.workers:
            assert worker.stdin is not None
            print(what, count, file=worker.stdin, flush=True)
        found = self.read()
        cpu = {name: cpu_seconds(pid) - before[name] for name, pid in self.pids.items()}
        for name, old in threads.items():
            new = thread_seconds(self.pids[name])
            cpu[f"thread of {name}"] = max(new[thread] - old.get(thread, 0.0) for thread in new)
        return found, cpu | {f"worker {rank}": one["cpu"] for rank, one in enumerate(found)}

    def create(self) -> None:
        """Create the rows, and measure the memory."""
        resident = [resident_bytes(self.pids[f"server {k}"]) for k in range(SERVERS)]
        found, _ = self.do("create", 0)
        grown = sum(resident_bytes(self.pids[f"server {k}"]) - resident[k] for k in range(SERVERS))
        self.memory = grown / found[0]["rows"], found[0]["bytes_per_row"]

    def measure(self, what: str, count: int) -> None:
        """Do a round."""
        found, cpu = self.do(what, count)
        keys, seconds = sum(one["keys"] for one in found), max(one["seconds"] for one in found)
        for name, spent in cpu.items():
            self.figures[what, name].append(spent / keys * 1e9)
        server = max(cpu[f"server {k}"] for k in range(SERVERS))
        thread = max(cpu[f"thread of server {k}"] for k in range(SERVERS))
        worker = max(cpu[f"worker {k}"] for k in range(WORKERS))
        self.figures[what, "all"].append(sum(cpu[name] for name in [*self.pids, "worker 0", "worker 1"]) / keys * 1e9)
        self.figures[what, "limit"].append(max(worker, thread) / keys * 1e9)
        self.figures[what, "server"].append(server / keys * 1e9)
        self.figures[what, "thread"].append(thread / keys * 1e9)
        self.figures[what, "worker"].append(worker / keys * 1e9)
        self.figures[what, "keys/s"].append(keys / seconds)
        self.figures[what, "examples/s"].append(sum(one["examples"] for one in found) / seconds)


def main() -> None:
    """Run the rounds and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--rows", type=int, default=2_000_000, metavar="N", help="of the table (default: 2000000)")
    parser.add_argument("--batch-size", type=int, default=8192, metavar="N", help="of each worker (default: 8192)")
    parser.add_argument("--batches", type=int, default=16, metavar="N", help="of each worker and round (default: 16)")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked.work[0], int(asked.work[1]), asked.rows, asked.batch_size)
        return
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, (replicas, threads) in SIDES.items():
            cluster = stack.enter_context(
                local_cluster.running(SERVERS, workers=WORKERS, replicas=replicas, threads=threads, timeout=120.0)
            )
            wait_for_copies(cluster.address, SERVERS, replicas)
            sides[name] = Side(cluster, asked, stack)
            sides[name].create()
        for turn in range(-1, asked.rounds):  # the first one is not counted
            for what in WAYS:
                for name in SIDES if turn % 2 else reversed(SIDES):
                    if turn < 0:
                        sides[name].do(what, asked.batches)
                    else:
                        sides[name].measure(what, asked.batches)
        digests = {side.do("digest", 0)[0][0]["digest"] for side in sides.values()}
        check(len(digests) == 1, "the rows differ")
    for what in WAYS:
        print(f"\n{what}: CPU ns per key, median (minimum-maximum) of {asked.rounds} rounds")
        print(f"\n| replicas | {'million keys/s' if what == 'push' else 'thousand examples/s'} | ", end="")
        print("busiest worker | busiest server | its busiest thread | scheduler | ", end="")
        print("all processes | limit |")
        print("|---|---|---|---|---|---|---|---|")
        for name, side in sides.items():
            scale, unit = (1e6, "keys/s") if what == "push" else (1e3, "examples/s")
            rate = spread([one / scale for one in side.figures[what, unit]], 1 if what == "train" else 2)
            cells = [
                spread(side.figures[what, n], 1) for n in ("worker", "server", "thread", "scheduler", "all", "limit")
            ]
            print(f"| {name} | {rate} | {' | '.join(cells)} |")
        for text, figure, inverse in (
            ("throughput on this machine", "keys/s", False),
            ("throughput where each worker and each thread of a server has a core", "limit", True),
        ):
            for name in list(SIDES)[1:]:
                pairs = zip(sides["0"].figures[what, figure], sides[name].figures[what, figure], strict=True)
                lost = [100 * (1 - (a / b if inverse else b / a)) for a, b in pairs]
                print(f"{text}, replicas {name}: {spread(lost, 1)} % less")
    for name, side in sides.items():
        resident, counted = side.memory
        print(f"replicas {name}: {resident:.1f} resident bytes a key on both servers, the tables count {counted:.1f}")
    print(f"{asked.rows:,} rows, the same digest with and without replica; {conditions()}")


if __name__ == "__main__":
    main()
