"""A lone pull over a socket of this machine (ipc) and over its loopback interface (tcp).

    python bench/bench_sockets.py                    half a minute

One worker process is connected to two clusters of one server, which differ in their addresses alone, and pulls the same
keys of dim 16 from each in turns, a few hundred at a time, under ASP. It prints the median time of a pull and the CPU
time of the worker's process, in us, as medians (and extremes) of the turns.

Checks: both clusters return the same rows.
"""

import argparse
import statistics
import time
from contextlib import ExitStack

import numpy as np

import shoal
from figures import check, conditions, spread
from shoal.cluster.launch.local_cluster import running

ROWS, DIM = 100_000, 16
ADDRESSES = {"tcp": "tcp://127.0.0.1:*", "ipc": None}


def turn(table: shoal.Table, batches: list[np.ndarray], calls: int) -> tuple[float, float]:
    """Pull so often; return the median time and the CPU time of a pull, in us."""
    waits = []
    cpu = time.process_time()
    for k in range(calls):
        begun = time.perf_counter()
        table.pull(batches[k % len(batches)])
        waits.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(waits), 1e6 * (time.process_time() - cpu) / calls


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[10, 1000, 100_000])
    parser.add_argument("--turns", type=int, default=20)
    arguments = parser.parse_args()
    rng = np.random.default_rng(1)
    print(conditions())
    with ExitStack() as open_ones:
        tables = {}
        for kind, address in ADDRESSES.items():
            cluster = open_ones.enter_context(running(1, address=address))
            check(cluster.address.startswith(kind), f"{cluster.address} is of {kind}")
            store = open_ones.enter_context(shoal.connect(cluster.address, workers=1, rank=0, consistency="asp"))
            tables[kind] = store.table("t", dim=DIM, optimizer=shoal.SGD(lr=1.0))
            tables[kind].push(np.arange(ROWS, dtype=np.uint64), np.ones((ROWS, DIM), np.float32)).result()
        for count in arguments.keys:
            batches = [rng.integers(0, ROWS, count).astype(np.uint64) for _ in range(50)]
            first, second = (table.pull(batches[0]) for table in tables.values())
            check(bool((first == -1).all() and (second == -1).all()), "the rows are those that were pushed")
            calls = max(20, min(400, 2_000_000 // count))
            found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in tables}
            for number in range(arguments.turns + 1):
                for kind in list(tables)[:: 1 if number % 2 else -1]:
                    one = turn(tables[kind], batches, calls)
                    if number:  # the first turns warm up
                        found[kind].append(one)
            for kind, turns in found.items():
                waits, cpu = zip(*turns, strict=True)
                print(f"{count:>8,} keys, {kind}: p50 {spread(waits, 1)}, CPU {spread(cpu, 1)}")


if __name__ == "__main__":
    main()
