"""From training to serving: the time from a push until a reader in another process looks up the new weights.

    python bench/bench_fresh.py                     1e7 keys, of which 1 % change, dims 1 and 16 (2e6 keys), float16
    python bench/bench_fresh.py --keys 1e8 --dim 1 --changed 0.001

In every round a share of the keys is pushed, a delta is exported on top of the last export, and a process that polls
the directory 20 times a second loads it. The round ends when that process has looked up the first of the pushed keys
and seen its new weight; then all of them are compared. Medians and ranges of the rounds.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import shoal
from figures import check, spread

READER = """
import sys, time, numpy as np, shoal
export = shoal.export.open(sys.argv[1], threads=1)
export.watch(0.05)
key, before, count = np.zeros(1, np.uint64), None, 0
print("ready", flush=True)
for line in sys.stdin:
    key[0], old = int(line.split()[0]), float(line.split()[1])
    while export.table("t").pull(key)[0, 0] == old:
        time.sleep(0.001)
    print(export.version, float(export.table("t").pull(key)[0, 0]), time.monotonic(), flush=True)
"""


def measure(keys: int, dim: int, dtype: str, changed: float, rounds: int, directory: Path) -> None:
    """Print a row of the table."""
    random = np.random.default_rng(3)
    with shoal.local() as store:
        table = store.table("t", dim=dim, optimizer=shoal.FTRL() if dim == 1 else shoal.Adagrad())
        for begin in range(0, keys, 65536):
            some = np.arange(begin, min(begin + 65536, keys), dtype=np.uint64)
            table.push(some, random.standard_normal((len(some), dim)).astype(np.float32)).result()
        store.export(directory / "0", dtype=dtype, track=True)
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert reader.stdin is not None
        assert reader.stdout is not None
        check(reader.stdout.readline() == "ready\n", "the reader has not opened the export")
        times: list[list[float]] = [[], [], [], []]
        for k in range(1, rounds + 1):
            some = random.choice(keys, int(keys * changed), replace=False).astype(np.uint64)
            with shoal.export.open(directory / str(k - 1), threads=1, verify=False) as export:
                old = float(export.table("t").pull(some[:1])[0, 0])
            grads = np.sign(random.standard_normal((len(some), dim))).astype(np.float32)
            reader.stdin.write(f"{some[0]} {old!r}\n")
            reader.stdin.flush()
            began = time.monotonic()
            for first in range(0, len(some), 65536):
                table.push(some[first : first + 65536], grads[first : first + 65536]).result()
            pushed = time.monotonic()
            delta = store.export(directory / str(k), since=directory / str(k - 1))
            exported = time.monotonic()
            version, _, seen = reader.stdout.readline().split()
            check(int(version) == delta.version, "the reader has another version than the exported one")
            check(0 < delta.tables["t"].rows <= len(some), "the delta does not have the changed rows")
            for kept, seconds in zip(
                times, (pushed - began, exported - pushed, float(seen) - exported, float(seen) - began), strict=True
            ):
                kept.append(seconds)
        with shoal.export.open(directory, threads=1) as export:
            given = table.pull(some)
            off = float(np.abs(export.table("t").pull(some) - given).max())
        check(off <= 2.0**-10 * float(np.abs(given).max()), "a served weight is not the learned one, rounded")
        reader.stdin.close()
        reader.wait(30)
    print(
        f"| {keys:,} | {dim} | {dtype} | {len(some):,} | " + " | ".join(spread(kept, 2) for kept in times) + " |",
        flush=True,
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=float, help="default: 1e7 at dim 1, 2e6 above")
    parser.add_argument("--dim", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--dtype", default="float16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--changed", type=float, default=0.01, help="share of the keys (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where exports are written; default: a temporary one")
    options = parser.parse_args()
    print("| keys | dim | dtype | changed | push s | delta export s | until it is read s | total s |")
    print("|---|---|---|---|---|---|---|---|")
    for dim in options.dim:
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            keys = int(options.keys or (1e7 if dim == 1 else 2e6))
            measure(keys, dim, options.dtype, options.changed, options.rounds, Path(folder))


if __name__ == "__main__":
    main()
