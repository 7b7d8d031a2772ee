"""A table of ten times the memory that it may use, compared with the disk's random reads and with RocksDB.

    python bench/bench_tiered.py --rows 5e6                       Adagrad, dim 16: 680 MB on disk, 72 MB of memory
    python bench/bench_tiered.py --rows 2e7 --seconds 60 --peer   with RocksDB, if rocksdb_bench was built

    probe     reads random pages of a file of the same size, with the same queues, by build/release/bench/cpp/read_probe
    resident  pulls and pushes a table that fits in memory, with a tier and without one, in turn
    load      pushes every key once, in random order
    pull      pulls uniform keys: misses are random reads, hardly any is a hit
    absent    asks for keys that are not there
    steps     pulls and pushes uniform keys and Zipf keys, a step timed at a time
    ahead     the same with a computation between pull and push (--compute), with a prefetch of the next keys or not
    save      writes a checkpoint while the steps go on, compared with the steps before and after it
    peer      the same steps by MultiGet and WriteBatch in RocksDB, with as much memory

Checks. After the load the table has all rows, a sample of them is what one push leaves, and keys that were never pushed
are absent. A checkpoint has the rows as they were when its save began. In the end the engine's invariants hold, among
them that rows in memory that have not changed equal those on disk.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from figures import check, conditions

DIM = 16
ROW = 8 * DIM + 8  # bytes on disk: weights, squares, hash
PROGRAMS = Path(__file__).parents[1] / "build" / "release" / "bench" / "cpp"
ADAGRAD = shoal.Adagrad(lr=0.1)


class Counted:
    """What a table and its disk did from one moment to another."""

    def __init__(self, table: shoal.Table) -> None:
        self._table = table
        self._first = self._now()

    def _now(self) -> dict[str, Any]:
        tier = self._table.stats().tier
        assert tier is not None
        return {name: getattr(tier, name) for name in tier.__slots__} | {
            "cpu": time.process_time(),
            "wall": time.perf_counter(),
        }

    def __call__(self) -> dict[str, float]:
        """Return the differences."""
        now = self._now()
        return {name: now[name] - self._first[name] for name in now}


def zipf(rows: int, s: float, rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    """Return a function that draws keys; of s = 0 uniform ones."""
    if s == 0:
        return lambda n: rng.integers(0, rows, n).astype(np.uint64)
    below = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -s)
    return lambda n: np.searchsorted(below, rng.random(n) * below[-1]).astype(np.uint64)


def load(table: shoal.Table, rows: int, rng: np.random.Generator) -> None:
    """Push every key once, in random order: a permutation of blocks, and of each block."""
    block = 8192
    for first in rng.permutation(-(-rows // block)):
        keys = np.arange(first * block, min(rows, (first + 1) * block), dtype=np.uint64)
        table.push(rng.permutation(keys), np.ones((len(keys), DIM), np.float32)).result()


def steps(table: shoal.Table, draw: Callable[[int], np.ndarray], batch: int, seconds: float) -> list[float]:
    """Pull and push until the time is over, at least once; return the seconds of each step."""
    took: list[float] = []
    end = time.perf_counter() + seconds
    while not took or time.perf_counter() < end:
        keys = draw(batch)
        begun = time.perf_counter()
        sorted_keys = table.key_batch(keys)
        rows = table.pull_unique(sorted_keys)
        table.push_unique(sorted_keys, np.full_like(rows, 0.5)).result()
        took.append(time.perf_counter() - begun)
    return took


def saving(
    store: shoal.Store, draw: Callable[[int], np.ndarray], args: argparse.Namespace, s: float, rows: int
) -> None:
    """Save while steps go on."""
    table = store.tables["t"]
    folder = Path(tempfile.mkdtemp(prefix="shoal-save-", dir=args.dir))
    before = steps(table, draw, args.batch, args.seconds)
    expected = table.digest()
    begun = time.perf_counter()
    cpu = time.process_time()
    save = store.save(folder, wait=False)
    during: list[float] = []
    while not save.done():
        during += steps(table, draw, args.batch, 0)
    save.result()
    took, cpu = time.perf_counter() - begun, time.process_time() - cpu
    after = steps(table, draw, args.batch, args.seconds)
    with shoal.local(slots=args.slots) as other:
        loaded = other.table("t", dim=DIM, optimizer=ADAGRAD)
        other.load(folder)
        check(loaded.digest() == expected, "the checkpoint has other rows than there were")
    shutil.rmtree(folder)
    text = ", ".join(
        f"{title} {args.batch * len(each) / sum(each):,.0f} keys/s, p50 {np.median(each) * 1e3:.1f} ms, p99 "
        f"{np.quantile(each, 0.99) * 1e3:.1f}, longest {max(each) * 1e3:.1f}"
        for title, each in (("before", before), ("during", during), ("after", after))
    )
    print(f"save, {named(s)}: {took:.1f} s for {rows * ROW / 1e6:,.0f} MB, {cpu:.1f} s of CPU time; steps {text}")


def compare_ahead(table: shoal.Table, draw: Callable[[int], np.ndarray], args: argparse.Namespace, s: float) -> None:
    """Compare steps with a computation, with a prefetch of the keys of the next one and without, 40 steps in turn."""
    matrix = np.ones((256, 256), np.float32)

    def compute() -> None:
        end = time.perf_counter() + args.compute / 1e3
        while time.perf_counter() < end:
            _ = matrix @ matrix

    took: dict[bool, list[float]] = {False: [], True: []}
    cpu = {False: 0.0, True: 0.0}
    reads = {False: 0.0, True: 0.0}
    missed = {False: 0.0, True: 0.0}
    merges = {False: 0.0, True: 0.0}
    behind = {False: 0.0, True: 0.0}
    end = time.perf_counter() + 2 * args.seconds
    while time.perf_counter() < end:
        for ahead in (False, True):
            following = table.key_batch(draw(args.batch))
            counted = Counted(table)
            for _ in range(40):
                keys, following = following, table.key_batch(draw(args.batch))
                begun = time.perf_counter()
                if ahead:
                    table.prefetch(following)
                rows = table.pull_unique(keys)
                compute()
                table.push_unique(keys, np.full_like(rows, 0.5)).result()
                took[ahead].append(time.perf_counter() - begun)
            did = counted()
            cpu[ahead] += did["cpu"]
            reads[ahead] += did["reads"]
            missed[ahead] += did["misses"]
            merges[ahead] += did["merges"]
            behind[ahead] += did["background_merges"]
    for ahead in (False, True):
        ms = np.array(took[ahead]) * 1e3
        print(
            f"{args.compute} ms computed, {named(s)}, {'' if ahead else 'not '}ahead: p50 {np.median(ms):.1f} ms, p99 "
            f"{np.quantile(ms, 0.99):.1f} ms, mean {ms.mean():.1f} ms, {len(ms)} steps, "
            f"{cpu[ahead] / len(ms) * 1e3:.1f} ms of CPU time each, {behind[ahead] / max(1, merges[ahead]):.2f} of "
            f"{merges[ahead] / len(ms):.1f} merges each between calls, "
            f"{reads[ahead] / max(1, missed[ahead]):.3f} reads a miss; {conditions()}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=5e6)
    parser.add_argument("--times", type=float, default=10, help="bytes of rows for each byte of memory")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--zipf", type=float, nargs="*", default=[0.0, 1.05, 1.2])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--compute", type=float, default=20, help="milliseconds between a pull and its push")
    parser.add_argument("--servers", type=int, default=0, help="measure look-ahead alone, with so many servers")
    parser.add_argument("--peer", action="store_true")
    args = parser.parse_args()
    rows = int(args.rows)
    memory = int(rows * ROW / args.times)
    rng = np.random.default_rng(1)
    print(f"{rows:,} rows of {ROW} bytes, {memory / 1e6:,.0f} MB of memory, batches of {args.batch}; {conditions()}")

    if args.servers:
        on_servers(args, rows, memory, rng)
        return
    raw = None
    if (PROGRAMS / "read_probe").exists():
        raw = probe(args.dir, rows * ROW)
    resident(args.dir, min(rows, 1_000_000))
    with shoal.local(slots=args.slots) as store:
        table = store.table("t", dim=DIM, optimizer=ADAGRAD, storage=shoal.Tiered(args.dir, memory=memory))
        counted = Counted(table)
        load(table, rows, rng)
        did = counted()
        check(len(table) == rows, f"{len(table)} rows instead of {rows}")
        print(
            f"load: {rows / did['wall']:,.0f} rows/s, {did['cpu']:.1f} s of CPU time in {did['wall']:.1f} s; "
            f"{did['bytes_written'] / (rows * ROW):.2f} bytes written for each byte of rows"
        )
        sample = rng.integers(0, rows, 1000).astype(np.uint64)
        one = shoal.local(slots=2).table("t", dim=DIM, optimizer=ADAGRAD)
        one.push(sample[:1], np.ones((1, DIM), np.float32)).result()
        expected = np.repeat(one.pull(sample[:1]), len(sample), 0)
        check(bool(np.array_equal(table.pull(sample), expected)), "rows are not those of one push")

        draw = zipf(rows, 0, rng)
        counted = Counted(table)
        end = time.perf_counter() + args.seconds
        while time.perf_counter() < end:
            table.pull_unique(table.key_batch(draw(args.batch)))
        did = counted()
        of_raw = "" if raw is None else f", {did['reads'] / did['wall'] / raw:.2f} of the disk's"
        print(
            f"pull: {(did['hits'] + did['misses']) / did['wall']:,.0f} rows/s, in memory "
            f"{did['hits'] / (did['hits'] + did['misses']):.2f}, "
            f"{did['reads'] / did['misses']:.3f} reads a miss, {did['reads'] / did['wall']:,.0f} reads/s{of_raw}, "
            f"{did['cpu'] / did['misses'] * 1e6:.2f} us of CPU time a miss"
        )
        counted = Counted(table)
        absent = rng.integers(1 << 40, 1 << 41, 200_000).astype(np.uint64)
        check(not table.contains(absent).any(), "keys are there that were never pushed")
        did = counted()
        print(f"absent: {did['absent_reads'] / did['absent']:.4f} reads a key")

        for s in args.zipf:
            draw = zipf(rows, s, rng)
            steps(table, draw, args.batch, args.seconds / 4)  # until the hot rows are in memory
            counted = Counted(table)
            took = steps(table, draw, args.batch, args.seconds)
            did = counted()
            keys = did["rows_changed"]
            of_raw = "" if raw is None else f" ({did['reads'] / did['wall'] / raw:.2f} of the disk's)"
            print(
                f"steps, {named(s)}: {keys / sum(took):,.0f} rows/s, p50 "
                f"{np.median(took) * 1e3:.1f} ms, p99 {np.quantile(took, 0.99) * 1e3:.1f} ms, "
                f"in memory {1 - did['misses'] / keys:.2f}, "
                f"{did['reads'] / max(1, did['misses']):.3f} reads a miss, {did['reads'] / did['wall']:,.0f} reads/s"
                f"{of_raw}, {did['bytes_written'] / (keys * ROW):.2f} bytes written a changed byte, "
                f"CPU {did['cpu']:.1f} of {did['wall']:.1f} s"
            )
        for s in args.zipf:
            draw = zipf(rows, s, rng)
            steps(table, draw, args.batch, args.seconds / 4)
            compare_ahead(table, draw, args, s)
        for s in args.zipf:
            draw = zipf(rows, s, rng)
            steps(table, draw, args.batch, args.seconds / 4)
            saving(store, draw, args, s, rows)
        tier = table.stats().tier
        assert tier is not None
        print(
            f"memory: {tier.memory_bytes / 1e6:,.1f} MB for {tier.rows_in_memory:,} rows, of which "
            f"{tier.index_bytes / rows:.2f} bytes a row on disk; "
            f"file {tier.disk_bytes / (rows * ROW):.2f} of the rows; direct {tier.is_direct}, io_uring {tier.is_async}"
        )
        check(len(table) == rows and table.shard.verify() == "", "the table is broken")
    print(conditions())
    if args.peer:
        for s in args.zipf:
            peer(args, rows, memory, s)


def on_servers(args: argparse.Namespace, rows: int, memory: int, rng: np.random.Generator) -> None:
    """Measure look-ahead where the rows are on servers, which share the memory; CPU time is the worker's."""
    tier = shoal.Tiered(args.dir, memory=memory // args.servers)
    with shoal.launch(servers=args.servers, slots=args.slots, tier=tier, consistency=shoal.ASP()) as store:
        table = store.table("t", dim=DIM, optimizer=ADAGRAD)
        load(table, rows, rng)
        for s in args.zipf:
            draw = zipf(rows, s, rng)
            steps(table, draw, args.batch, args.seconds / 4)
            compare_ahead(table, draw, args, s)
        check(len(table) == rows, f"{len(table)} rows instead of {rows}")
    print(conditions())


def resident(directory: Path, rows: int) -> None:
    """Compare steps of a tiered table whose rows are all in memory with those of a table without a tier."""
    rng = np.random.default_rng(2)
    with shoal.local() as plain, shoal.local() as tiered:
        tables = [
            plain.table("t", dim=DIM, optimizer=ADAGRAD),
            tiered.table(
                "t", dim=DIM, optimizer=ADAGRAD, storage=shoal.Tiered(directory, memory=400 * rows + (1 << 26))
            ),
        ]
        for table in tables:
            load(table, rows, rng)
        for n in (100, 1000, 8192, 65536):
            took: list[list[float]] = [[], []]
            for _ in range(60):
                keys = rng.integers(0, rows, n).astype(np.uint64)
                for table, seconds in zip(tables, took, strict=True):
                    batch = table.key_batch(keys)
                    grads = np.full((len(batch), DIM), 0.5, np.float32)
                    begun = time.process_time()
                    table.pull_unique(batch)
                    table.push_unique(batch, grads).result()
                    seconds.append(time.process_time() - begun)
            without, with_tier = (np.median(seconds) * 1e6 for seconds in took)
            print(
                f"resident, {n} keys: {with_tier:,.0f} us of CPU time a step, {without:,.0f} without a tier: "
                f"{with_tier / without:.2f}"
            )
        check(tables[0].digest() == tables[1].digest(), "the tables differ")


def named(s: float) -> str:
    """Name a distribution of keys."""
    return f"Zipf {s}" if s else "uniform"


def probe(directory: Path, size: int) -> float:
    """Measure the random reads a second of the disk."""
    out = subprocess.run(
        [PROGRAMS / "read_probe", directory, str(size), "4096", "2", "10"], capture_output=True, text=True, check=True
    ).stdout.split()
    rate = float(out[0])
    print(f"probe: {rate:,.0f} reads/s of 4096 bytes, {out[1]} MB/s written, io_uring {out[2]}, direct {out[3]}")
    return rate


def peer(args: argparse.Namespace, rows: int, memory: int, s: float) -> None:
    """Run RocksDB."""
    directory = args.dir / "rocksdb-bench"
    shutil.rmtree(directory, ignore_errors=True)
    out = subprocess.run(
        [PROGRAMS / "rocksdb_bench", directory, str(rows), str(memory), str(args.batch), str(args.seconds), str(s)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    shutil.rmtree(directory)
    written = float(out[5]) / (float(out[7]) * ROW)
    print(
        f"RocksDB, {named(s)}: load {float(out[0]):,.0f} rows/s; {float(out[1]):,.0f} rows/s, p50 {out[2]} ms, "
        f"p99 {out[3]} ms, hits of blocks {out[4]}, {written:.2f} bytes written a changed byte, files "
        f"{float(out[6]) / (rows * ROW):.2f} of the rows; {conditions()}"
    )


if __name__ == "__main__":
    main()
