"""A table far larger than its memory, from the first push to a loaded checkpoint, and the memory of the process.

    python bench/bench_tiered_large.py --rows 3e7 --memory 512MiB      4 GB of disk for the tier, 4 for the checkpoint
    python bench/bench_tiered_large.py --rows 1e9 --memory 16GiB       the same at scale: 280 GB of disk
    python bench/bench_tiered_large.py --rows 5e8 --memory 4GiB --optimizer rowwise_adagrad        78 GB of disk

    build   pushes every key once, in random order (dim 16)
    train   steps of 8192 Zipf keys (exponent 1.05), prefetched one step ahead
    save    a full checkpoint
    load    the checkpoint into another store with a tier of its own, when the first one is closed

Checks. The table has all rows, a sample of them is in the checkpoint as it is in the table, and the store that has
loaded it has as many rows.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import shoal
from bench_tiered import ADAGRAD, DIM, load
from figures import check, conditions, resident_bytes
from shoal.base.sizes import parse_size

OPTIMIZERS = {"adagrad": (ADAGRAD, DIM), "rowwise_adagrad": (shoal.RowWiseAdagrad(lr=0.1), 1)}  # with floats of state


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=3e7)
    parser.add_argument("--memory", type=parse_size, default=parse_size("512MiB"))
    parser.add_argument("--seconds", type=float, default=30, help="of training")
    parser.add_argument("--slots", type=int, default=4096)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adagrad")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    rows = int(args.rows)
    optimizer, state = OPTIMIZERS[args.optimizer]
    row = 4 * (DIM + state) + 8  # bytes on disk, with the hash
    rng = np.random.default_rng(1)
    before = resident_bytes(os.getpid())
    print(f"{rows:,} rows, {rows * row / 1e9:.1f} GB, {args.memory / 1e9:.1f} GB of memory; {conditions()}")

    def timed(what: str, act: Callable[[], object], rows_done: Callable[[], int]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        act()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        print(
            f"{what}: {wall:.1f} s, {rows_done() / wall:,.0f} rows/s, {cpu:.1f} s of CPU time; peak of the resident "
            f"set {peak / 1e9:.2f} GB above an empty process; {conditions()}",
            flush=True,
        )

    storage = shoal.Tiered(args.dir, memory=args.memory)
    with tempfile.TemporaryDirectory(dir=args.dir) as made:
        folder = Path(made) / "checkpoint"
        with shoal.local(slots=args.slots) as store:
            table = store.table("t", dim=DIM, optimizer=optimizer, storage=storage)
            timed("build", lambda: load(table, rows, rng), lambda: rows)
            check(len(table) == rows, "rows are missing")
            keys = 0

            def draw(n: int) -> np.ndarray:  # by the inverse of the distribution, which takes no memory for each row
                return (((1 - rng.random(n) * (1 - rows**-0.05)) ** -20.0) - 1).astype(np.uint64)

            def train() -> None:
                nonlocal keys
                following = table.key_batch(draw(8192))
                end = time.perf_counter() + args.seconds
                while time.perf_counter() < end:
                    batch, following = following, table.key_batch(draw(8192))
                    table.prefetch(following)
                    table.push_unique(batch, np.full_like(table.pull_unique(batch), 0.5)).result()
                    keys += len(batch)

            timed("train", train, lambda: keys)
            timed("save", lambda: store.save(folder, overwrite=True), lambda: rows)
            sample = rng.integers(0, rows, 10_000).astype(np.uint64)
            expected = table.pull(sample)
            tier = table.stats().tier
            assert tier is not None
            print(
                f"tier: {tier.memory_bytes / 1e9:.2f} GB of memory, {tier.index_bytes / rows:.2f} bytes of index a "
                f"row, {tier.rows_in_memory:,} rows in memory, {tier.disk_bytes / 1e9:.1f} GB on disk, "
                f"{tier.bytes_written / (rows * row):.2f} bytes written for each byte of rows; "
                f"{shutil.disk_usage(args.dir).free / 1e9:.0f} GB free",
                flush=True,
            )
        with shoal.local(slots=args.slots) as store:
            copy = store.table("t", dim=DIM, optimizer=optimizer, storage=storage)
            timed("load", lambda: store.load(folder), lambda: rows)
            check(len(copy) == rows and np.array_equal(copy.pull(sample), expected), "the loaded rows differ")


if __name__ == "__main__":
    main()
