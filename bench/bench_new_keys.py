"""New keys: a table that grows as they come, compared with one for which `Table.reserve` has made room.

    python bench/bench_new_keys.py                          1e7 keys, FTRL of dim 1, one and two threads: a minute
    python bench/bench_new_keys.py --keys 1e6 --dim 16 --rounds 5

Random keys are pushed in batches of 65,536 into an empty table of a local store; then as many keys that the table does
not have are pulled. Both kinds take turns, each in a process of its own. Rates are million keys a second by the clock,
median (minimum-maximum); CPU time is in nanoseconds a key; bytes a key are those of the full table, and the peak is
that of the process less the keys and what it had before.

Checked: both tables have equal digests, and pulls of absent keys create none.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from dataclasses import dataclass

import numpy as np

import shoal
from figures import check, conditions, spread

BATCH = 65_536
KINDS = ("grows", "has room")


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one process."""

    rate: float
    cpu: float
    absent: float
    bytes: float
    peak: float
    digest: str


def peak() -> int:
    """Return the peak resident set of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def insert(kind: str, count: int, dim: int, threads: int) -> Found:
    """Fill a table."""
    keys = np.random.default_rng(1).integers(0, 2**64, count // BATCH * BATCH, np.uint64)
    optimizer = shoal.FTRL(l1=1.0) if dim == 1 else shoal.Adagrad(lr=0.1)
    gradient = np.ones((BATCH, dim), np.float32)
    with shoal.local(threads=threads) as store:
        table = store.table("t", dim=dim, optimizer=optimizer)
        before, wall, cpu = peak(), time.perf_counter(), time.process_time()
        if kind == KINDS[1]:
            table.reserve(len(keys))
        for begin in range(0, len(keys), BATCH):
            table.push(keys[begin : begin + BATCH], gradient)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        rows, full = len(table), peak()
        others = ~keys
        absent = time.process_time()
        for begin in range(0, len(keys), BATCH):
            table.pull(others[begin : begin + BATCH])
        absent = time.process_time() - absent
        check(len(table) == rows, "a pull has created rows")
        return Found(
            len(keys) / wall / 1e6,
            cpu / len(keys) * 1e9,
            absent / len(keys) * 1e9,
            table.stats().bytes / rows,
            (full - before) / rows,
            table.digest(),
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=float, default=1e7)
    parser.add_argument("--dim", type=int, default=1, help="1: FTRL; else Adagrad (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print("| threads | table | M keys/s | CPU ns a key | bytes a key | peak, bytes a key | absent keys, CPU ns a key |")
    print("|---|---|---|---|---|---|---|")
    for threads in given.threads:
        found: dict[str, list[Found]] = {kind: [] for kind in KINDS}
        for _ in range(given.rounds):
            for kind in KINDS:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    found[kind].append(pool.apply(insert, (kind, int(given.keys), given.dim, threads)))
        check(len({one.digest for some in found.values() for one in some}) == 1, "the tables differ")
        for kind, some in found.items():
            columns = (
                spread([one.rate for one in some], 1),
                spread([one.cpu for one in some], 0),
                f"{some[0].bytes:.1f}",
                f"{max(one.peak for one in some):.1f}",
                spread([one.absent for one in some], 0),
            )
            print(f"| {threads} | {kind} | {' | '.join(columns)} |")
    print(conditions())


if __name__ == "__main__":
    main()
