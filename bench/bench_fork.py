"""A fork of a store: the time until the child has its rows, and the memory that it takes by what it changes.

    python bench/bench_fork.py                 1e8 keys, FTRL, dim 1
    python bench/bench_fork.py --keys 1e7

The child pushes to a share of all keys; its own memory is what no other process shares (smaps_rollup), before and
after. The parent's rows are the same afterwards, which is checked.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

import shoal

BLOCK = 1 << 22


def own_bytes() -> int:
    """Memory of this process that no other one shares."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def push(table: shoal.Table, keys: int, step: int) -> None:
    """Push to each of so many keys, or to one of some."""
    for start in range(0, keys, BLOCK):
        some = np.arange(start, min(start + BLOCK, keys), step, dtype=np.uint64)
        table.push(some, np.ones(len(some), np.float32)).result()


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=float, default=1e8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    keys = int(options.keys)
    with shoal.local() as store:
        table = store.table("t", optimizer=shoal.FTRL())
        push(table, keys, 1)
        digest = table.digest()
        print(f"{keys:,} keys, {table.stats().bytes / 2**30:.2f} GiB\n")
        print("| keys that the child changes | fork, s | until its first pull, s | its memory, MiB |")
        print("|---|---|---|---|")
        for share in (0.0, 0.001, 0.01, 0.1, 1.0):
            forks, firsts, memory = [], [], []
            for _ in range(options.rounds if share == 0 else 1):

                def work(begin: float, share: float = share) -> tuple[float, int]:
                    assert table.contains(np.array([5], np.uint64))[0]
                    first, before = time.time() - begin, own_bytes()
                    if share:
                        push(table, keys, round(1 / share))
                    return first, own_bytes() - before

                begin = time.time()
                future = store.fork(lambda begin=begin, work=work: work(begin))
                forks.append(time.time() - begin)
                first, more = future.result(600)
                firsts.append(first)
                memory.append(more / 2**20)
            spread = f" ({min(forks):.3f}-{max(forks):.3f})" if len(forks) > 1 else ""
            print(
                f"| {100 * share:g} % | {statistics.median(forks):.3f}{spread} | {statistics.median(firsts):.3f} "
                f"| {statistics.median(memory):,.1f} |"
            )
        assert table.digest() == digest, "the parent's rows have changed"


if __name__ == "__main__":
    main()
