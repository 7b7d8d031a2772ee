"""Kill the servers of a cluster while it trains, and find every push in the rows exactly once.

    python examples/replicas.py                          # 3 servers, each slot on two of them; 3 kills
    python examples/replicas.py --servers 4 --kills 5 --keys 100000

Each clock pushes gradients of 1 to random keys of a table whose optimizer subtracts gradients, so a row is the negative
count of its pushes. Meanwhile servers are killed (SIGKILL, without any cleanup), one after the other: each time when
all slots have two copies again. Another server serves the slots of the dead one, and a new server is started.
"""

import argparse
import os
import random
import signal
import time
from typing import Any

import numpy as np

import shoal

LIMIT_SECONDS = 60  # from one kill to the next


def is_whole(status: dict[str, Any], servers: int) -> bool:
    """Whether there are as many servers as at the start, and each slot is on two of them."""
    return len(status["servers"]) == servers and all(arc["copies"] for arc in status["arcs"])


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--kills", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--keys", type=int, default=10_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, help="of keys and moments (default: a new one each time)")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(10**6)
    rng = np.random.default_rng(seed)
    counts = np.zeros(arguments.keys, np.int64)
    with shoal.launch(servers=arguments.servers, replicas=1) as store:
        table = store.table("counts", dim=1, optimizer=shoal.SGD(lr=1.0))
        clocks = kills = 0
        calm = 20  # clocks between two kills, at least
        slowest, deadline = 0.0, time.monotonic() + LIMIT_SECONDS
        while kills < arguments.kills or calm:
            start = time.perf_counter()
            picked = rng.integers(arguments.keys, size=1000)
            table.push(picked.astype(np.uint64), np.ones((1000, 1), np.float32))
            store.tick()
            table.pull(picked.astype(np.uint64))
            slowest = max(slowest, time.perf_counter() - start)
            np.add.at(counts, picked, 1)
            clocks += 1
            calm = max(0, calm - 1)
            if time.monotonic() > deadline:
                raise SystemExit(f"after {LIMIT_SECONDS} s the lost copies have not been made again: {store.cluster()}")
            if kills < arguments.kills and not calm and is_whole(store.cluster(), arguments.servers):
                victim = random.Random(seed + kills).choice(store.cluster()["servers"])
                _, process = victim["about"].split(maxsplit=1)
                os.kill(int(process.split()[0]), signal.SIGKILL)
                kills, calm, deadline = kills + 1, 20, time.monotonic() + LIMIT_SECONDS
                print(f"clock {clocks}: server {victim['rank']} killed, seed {seed}")
        rows = table.pull(np.arange(arguments.keys, dtype=np.uint64))[:, 0]
        if not np.array_equal(rows, -counts):
            raise SystemExit(f"{np.count_nonzero(rows != -counts)} of {arguments.keys} rows are wrong, seed {seed}")
        print(f"{counts.sum():,} gradients in {clocks:,} clocks: all rows are exact; slowest clock {slowest:.2f} s")


if __name__ == "__main__":
    main()
