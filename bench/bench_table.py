"""The table compared with raw memory: runs build/release/bench/cpp/shoal_bench at the sizes of bench/table.md.

    make bench                                     everything
    python bench/bench_table.py --keys 1e6 1e7     some sizes, FTRL at dim 1
    python bench/bench_table.py --wide             dim 16 and 64, Adagrad and RowWiseAdagrad

Each line is a separate process; within it raw reads, raw updates, pulls and pushes take turns. Rates are millions a
second, median (minimum-maximum) of the rounds; ratios are taken round by round.
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from figures import spread

PROGRAM = Path(__file__).parent.parent / "build" / "release" / "bench" / "cpp" / "shoal_bench"


def measure(keys: int, threads: int, batch: int, dim: int, optimizer: str, rounds: int) -> dict[str, Any]:
    """Run one measurement; the program checks its own results and fails if they are wrong."""
    command = [str(PROGRAM), *map(str, (keys, threads, batch, dim)), optimizer, str(rounds)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", nargs="+", type=float, default=[1e6, 1e7, 1e8])
    parser.add_argument("--batch", nargs="+", type=int, default=[65536, 1048576])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wide", action="store_true", help="only dim 16 and 64")
    options = parser.parse_args()
    if not PROGRAM.exists():
        parser.error(
            f"{PROGRAM} is missing: run `make bench`, or `cmake --preset release && cmake --build --preset release`"
        )
    if not options.wide:
        print("| keys | threads | batch | raw read / update, same size | the same in 4 GiB | pull | push |", end="")
        print(" pull/raw, push/raw, same size | the same, 4 GiB | insert | slowest ms | B/key, RSS, peak RSS |")
        print("|" + "---|" * 12)
        for keys in map(int, options.keys):
            for batch in options.batch:
                for threads in options.threads:
                    row = measure(keys, threads, batch, 1, "FTRL", options.rounds)
                    print(
                        f"| {keys:.0e} | {threads} | {batch} | {spread(row['raw_read'])} / {spread(row['raw_update'])} "
                        f"| {spread(row['raw_read_4g'])} / {spread(row['raw_update_4g'])} "
                        f"| {spread(row['pull'])} | {spread(row['push'])} "
                        f"| {spread(row['pull_ratio'], 2)}, {spread(row['push_ratio'], 2)} "
                        f"| {spread(row['pull_ratio_4g'], 2)}, {spread(row['push_ratio_4g'], 2)} "
                        f"| {row['insert']:.1f} | {row['slowest_insert_ms']:.0f} "
                        f"| {row['bytes_per_key']:.2f}, {row['resident_per_key']:.2f}, {row['peak_per_key']:.2f} |",
                        flush=True,
                    )
        print()
    print("| dim | optimizer | keys | threads | pull | push | pull GB/s | insert | row B, B/key, RSS |")
    print("|" + "---|" * 9)
    for dim, keys in ((16, 5_000_000), (64, 1_500_000)):
        for optimizer, row_bytes in (("Adagrad", 8 * dim), ("RowWiseAdagrad", 4 * dim + 4)):
            for threads in options.threads:
                row = measure(keys, threads, 65536, dim, optimizer, options.rounds)
                print(
                    f"| {dim} | {optimizer} | {keys:.1e} | {threads} "
                    f"| {spread(row['pull'], 1)} | {spread(row['push'], 1)} "
                    f"| {row['pull'][0] * 4 * dim / 1e3:.1f} | {row['insert']:.1f} "
                    f"| {row_bytes}, {row['bytes_per_key']:.1f}, {row['resident_per_key']:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
