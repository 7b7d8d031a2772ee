"""Exports: lookups compared with the raw limit of random reads in the same file, bytes per key, and sharing.

    python bench/bench_export.py                       1e5, 1e6, 1e7 keys at dim 1, 1e5, 2e6 at dim 16, every dtype
    python bench/bench_export.py --keys 1e8 --dtype float32 --dim 1 --batch 65536

In every round random lines of the export's files are read (bench/cpp/lines_bench.cc, a process that maps the same
pages), then random keys are looked up, then keys that are absent from the export. The figures are medians and ranges of
the rounds, the ratios are taken round by round. "raw" is lines prefetched 16 ahead into the L1 cache, or 64 and 128
ahead into the L2 cache; "pairs" is two lines, where the address of the second depends on the first, 64 ahead. Then two
more processes open the export, and the kernel reports how much of its memory is private to each, and in huge pages.
"""

import argparse
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from figures import check, spread

PROGRAM = Path(__file__).parent.parent / "build" / "release" / "bench" / "cpp" / "lines_bench"

READS = 2_000_000  # a round

READER = """
import sys, numpy as np, shoal
export = shoal.export.open(sys.argv[1], threads=1)
keys = np.arange(int(sys.argv[2]), dtype=np.uint64)
for start in range(0, len(keys), 65536):
    export.tables["t"].pull(keys[start:start + 65536])
print("ready", flush=True)
sys.stdin.readline()
private = pss = rss = huge = 0
ours = False
for line in open("/proc/self/smaps"):
    if "-" in line.split(" ")[0] and not line.split(" ")[0].endswith(":"):
        ours = line.rstrip().endswith(".frozen")
    elif ours:
        name, value = line.split()[:2]
        if name == "Pss:": pss += int(value)
        if name == "Rss:": rss += int(value)
        if name in ("Private_Clean:", "Private_Dirty:"): private += int(value)
        if name == "FilePmdMapped:": huge += int(value)
print(rss, pss, private, huge, flush=True)
sys.stdin.readline()
"""


def fill(keys: int, dim: int, directory: Path, dtypes: list[str]) -> dict[str, Any]:
    """Export a table of keys 0..keys-1 with normal weights, in each dtype: seconds, and the written export."""
    exports = {}
    with shoal.local() as store:
        table = store.table("t", dim=dim, optimizer=shoal.SGD())
        rng = np.random.default_rng(1)
        for start in range(0, keys, 1 << 20):
            some = np.arange(start, min(start + (1 << 20), keys), dtype=np.uint64)
            table.assign(some, rng.standard_normal((len(some), dim), np.float32))
        for dtype in dtypes:
            began = time.perf_counter()
            exported = store.export(directory / dtype, dtype=dtype).tables["t"]
            exports[dtype] = (time.perf_counter() - began, exported)
            check(exported.rows + exported.dropped == keys, "not every key with a nonzero weight is exported")
            sample = rng.integers(0, keys, 10_000).astype(np.uint64)
            with shoal.export.open(directory / dtype, verify=False) as export:
                off = np.abs(export.table("t").pull(sample) - table.pull(sample)).max()
            check(off <= exported.largest_error, "the error of a weight exceeds that stated by the export")
    return exports


def rates(directory: Path, keys: int, dim: int, threads: int, batch: int, rounds: int, clock: str) -> list[list[float]]:
    """Measure lines_bench, lookups and absent keys in turns: millions a second."""
    files = sorted(map(str, directory.glob("*.frozen")))
    figures: list[list[float]] = []
    rng = np.random.default_rng(2)

    def seconds() -> float:
        return time.perf_counter() if clock == "wall" else time.process_time() / threads

    out = np.empty((batch, dim), np.float32)
    with (
        shoal.export.open(directory, threads=threads) as export,
        subprocess.Popen(
            [str(PROGRAM), str(threads), str(READS), clock, *files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as probe,
    ):
        assert probe.stdin is not None
        assert probe.stdout is not None
        table = export.table("t")
        there = [rng.integers(0, keys, batch).astype(np.uint64) for _ in range(max(1, READS // batch))]
        absent = [some + np.uint64(keys) for some in there]
        for _ in range(rounds + 1):  # the first round is a warm-up
            probe.stdin.write("go\n")
            probe.stdin.flush()
            figures.append(list(map(float, probe.stdout.readline().split())))
            for batches in (there, absent):
                began = seconds()
                for some in batches:
                    table.pull(some, out=out)
                figures[-1].append(batch * len(batches) / (seconds() - began) / 1e6)
        check(not out.any(), "an absent key does not read as zeros")
        probe.stdin.close()
    return figures[1:]


def shares(directory: Path, keys: int) -> tuple[int, ...]:
    """Open it in two processes: resident, proportional, private and huge KiB of the first one's mappings."""
    command = [sys.executable, "-c", READER, str(directory), str(keys)]
    readers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for reader in readers:
        assert reader.stdout is not None
        check(reader.stdout.readline() == "ready\n", "a second process cannot read the export")
    figures = []
    for reader in readers:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write("\n")
        reader.stdin.flush()
        figures.append(tuple(map(int, reader.stdout.readline().split())))
    for reader in readers:
        reader.communicate("\n")
    return figures[0]


def main() -> None:
    """Measure and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", nargs="+", type=float, help="default: 1e5, 1e6, 1e7 at dim 1, 1e5, 2e6 above")
    parser.add_argument("--dim", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--dtype", nargs="+", default=["float32", "float16", "bfloat16", "int8"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batch", nargs="+", type=int, default=[65536])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: if other processes use the same cores"
    )
    parser.add_argument("--directory", type=Path, help="where exports are written; default: a temporary one")
    options = parser.parse_args()
    if not PROGRAM.exists():
        parser.error(f"{PROGRAM} is missing: cmake --preset release && cmake --build --preset release")
    print(
        "| dim | keys | dtype | B/key | threads | batch | raw 16 | raw 64 | raw 128 | pairs | lookups | absent "
        "| lookups / raw 16 | / raw 64 | / raw 128 | / pairs |"
    )
    print("|" + "---|" * 16)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for dim in options.dim:
            for count in options.keys or ([1e5, 1e6, 1e7] if dim == 1 else [1e5, 2e6]):
                measure(int(count), dim, Path(folder), options)


def measure(keys: int, dim: int, folder: Path, options: argparse.Namespace) -> None:
    """Measure exports of one size."""
    place = folder / f"{dim}-{keys}"
    written = fill(keys, dim, place, options.dtype)
    for dtype, (_, export) in written.items():
        for threads in options.threads:
            for batch in options.batch:
                # In a process without a store, as is usual for readers of exports.
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                    how = place / dtype, keys, dim, threads, batch, options.rounds, options.clock
                    rounds = fresh.submit(rates, *how).result()
                *raw, there, absent = (list(column) for column in zip(*rounds, strict=True))
                ratios = [[a / b for a, b in zip(there, some, strict=True)] for some in raw]
                print(
                    f"| {dim} | {keys:.0e} | {dtype} | {export.bytes / keys:.2f} | {threads} | {batch} | "
                    + " | ".join(spread(some) for some in (*raw, there, absent))
                    + " | "
                    + " | ".join(spread(some, 2) for some in ratios)
                    + " |",
                    flush=True,
                )
    seconds, export = written[options.dtype[0]]
    rss, pss, private, huge = shares(place / options.dtype[0], keys)
    print(
        f"\ntwo processes, {keys:.0e} keys, dim {dim}, {options.dtype[0]}: {rss / 1024:.0f} MiB resident in each, "
        f"{pss / 1024:.0f} MiB its share, {private / 1024:.0f} MiB its own, {huge / 1024:.0f} MiB in huge pages; "
        f"written in {seconds:.1f} s, largest and rms error {export.largest_error:.2g}, {export.rms_error:.2g}\n",
        flush=True,
    )
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
