"""What a key costs in batches of different sizes: sort, pull and push of distinct keys, one thread.

    python bench/bench_batch_sizes.py                     1e6 rows of FTRL, batches of 64 to 1e6 keys: a minute
    python bench/bench_batch_sizes.py --rows 1e7

The keys of a batch are drawn anew for each call from those of the table. "sort" is `store.key_batch`; pull and push
sort as well. CPU nanoseconds a key, median (minimum-maximum) of the rounds.

Checked: every pull of a row that one push has made is equal to the row of the first pull.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

import shoal
from figures import check, conditions, spread

Keys = npt.NDArray[np.uint64]
MOST_KEYS = 400_000  # of the calls of a round together, unless one call has more


def cost(call: Callable[[Keys], object], batches: Sequence[Keys]) -> float:
    """Return the CPU nanoseconds of a key."""
    begun = time.process_time()
    for keys in batches:
        call(keys)
    return (time.process_time() - begun) / sum(map(len, batches)) * 1e9


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=1e6)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024, 4096, 65_536, 1_000_000])
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    random = np.random.default_rng(1)
    keys = np.unique(random.integers(0, 2**64, int(given.rows), np.uint64))
    with shoal.local(threads=1) as store:
        table = store.table("t", optimizer=shoal.FTRL(alpha=0.1, l1=1.0))
        table.reserve(len(keys))
        table.push(keys, np.full((len(keys), 1), 3.0, np.float32))
        row = table.pull(keys[:1])
        check(bool(np.all(table.pull(keys) == row)) and row.item() != 0, "rows differ")
        print("| keys a batch | sort | pull | push |\n|---|---|---|---|")
        for size in given.sizes:
            ones = np.zeros((size, 1), np.float32)  # a push that changes no row
            calls: dict[str, Callable[[Keys], object]] = {
                "sort": store.key_batch,
                "pull": table.pull,
                "push": lambda some, ones=ones: table.push(some, ones),
            }
            found: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(given.rounds):
                for name, call in calls.items():
                    count = max(1, MOST_KEYS // size)
                    batches = [random.choice(keys, size, replace=size > len(keys)) for _ in range(count)]
                    found[name].append(cost(call, batches))
            print(f"| {size:,} | {' | '.join(spread(some, 1) for some in found.values())} |", flush=True)
        check(bool(np.all(table.pull(keys) == row)), "rows have changed")
    print(conditions())


if __name__ == "__main__":
    main()
