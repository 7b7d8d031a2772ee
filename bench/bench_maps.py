"""The store compared with absl::flat_hash_map and boost::unordered_flat_map: runs build/release/bench/cpp/maps_bench.

    apt-get install libabsl-dev libboost1.81-dev     (without them nothing is measured)
    make bench                                       everything; or, for this alone:
    cmake --preset release && cmake --build --preset release && python bench/bench_maps.py
    python bench/bench_maps.py --keys 1e7 --threads 2 --pages stock

One process for each number of keys and threads holds all three, and they take turns. Rates are millions of keys a
second, median (minimum-maximum) of the rounds; ratios are taken round by round. The head of the program describes what
is measured.
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from figures import spread

PROGRAM = Path(__file__).parent.parent / "build" / "release" / "bench" / "cpp" / "maps_bench"


def measure(keys: int, threads: int, rounds: int, pages: str) -> dict[str, Any]:
    """Run one measurement; the program checks its own results and fails if they are wrong."""
    command = [str(PROGRAM), str(keys), str(threads), str(rounds), pages]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", nargs="+", type=float, default=[1e7, 5e7])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--pages", choices=["huge", "stock"], default="huge", help="memory of the two maps")
    options = parser.parse_args()
    if not PROGRAM.exists():
        print(
            f"{PROGRAM} is missing: it is built by `cmake --preset release && cmake --build --preset release` where "
            "both peers are installed (Debian: apt-get install libabsl-dev libboost1.81-dev). Left out."
        )
        return
    filled = []
    print("| keys | threads | keys drawn | batch, distinct | work ", end="")
    print("| shoal | absl | boost | shoal / absl | shoal / boost |")
    print("|" + "---|" * 10)
    for keys in map(int, options.keys):
        for threads in options.threads:
            result = measure(keys, threads, options.rounds, options.pages)
            for row in result["pushes"]:
                print(
                    f"| {keys:.0e} | {threads} | {row['draw']} | {row['batch']}, {row['distinct']:.2f} | {row['kind']} "
                    f"| {spread(row['shoal'])} | {spread(row['absl'])} | {spread(row['boost'])} "
                    f"| {spread(row['beside_absl'], 2)} | {spread(row['beside_boost'], 2)} |",
                    flush=True,
                )
            filled.append((keys, threads, result["fill"]))
    print("\n| keys | threads | table | insert, M keys/s | allocated, B/key | peak | resident |\n|" + "---|" * 7)
    for keys, threads, tables in filled:
        for name, row in tables.items():
            print(
                f"| {keys:.0e} | {threads} | {name} | {row['insert']:.1f} | {row['bytes_per_key']:.1f} "
                f"| {row['peak_per_key']:.1f} | {row['resident_per_key']:.1f} |"
            )


if __name__ == "__main__":
    main()
