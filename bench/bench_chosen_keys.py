"""Keys that an adversary has chosen to collide, compared with as many random keys: seconds for each call.

    python bench/bench_chosen_keys.py [--keys 200000] [--dim 1 16] [--rounds 3]

All chosen keys have one home in one slot of the table and one second bucket. Every call checks its result.
"""

import argparse
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

import shoal
from figures import check, spread
from shoal import _core


def chosen(count: int) -> np.ndarray:
    """Keys whose hashes are neighbours in steps of 64: the last six bits choose the second bucket."""
    return _core.unmix(np.uint64(0x1234 << 48) + np.arange(count, dtype=np.uint64) * np.uint64(64))


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def one_round(keys: np.ndarray, dim: int, folder: Path) -> dict[str, float]:
    """Take a table through its calls; returns the seconds of each."""
    took = {}
    grads = np.full((len(keys), dim), -1.0, np.float32)
    optimizer = shoal.SGD(lr=1.0)
    half = keys[::2]
    with shoal.local(threads=1) as store:
        table = store.table("rows", dim=dim, optimizer=optimizer)
        took["push, new keys"] = seconds(lambda: table.push(keys, grads).result())
        took["push"] = seconds(lambda: table.push(keys, grads).result())
        took["pull"] = seconds(lambda: check(bool((table.pull(keys) == 2).all()), "a pull returned wrong rows"))
        took["save"] = seconds(lambda: store.save(folder / "save", overwrite=True))
        took["export"] = seconds(lambda: store.export(folder / "export", overwrite=True))
        took["erase half"] = seconds(lambda: table.erase(half))
        check(len(table) == len(keys) - len(half), "erased rows are still there")
    with shoal.local(threads=1) as store:
        took["load"] = seconds(lambda: store.load(folder / "save"))
        check(bool((store.tables["rows"].pull(keys) == 2).all()), "a checkpoint has other rows")
    with shoal.export.open(folder / "export") as export:
        rows = export.tables["rows"]
        took["lookup in the export"] = seconds(
            lambda: check(bool((rows.pull(keys) == 2).all()), "an export has other rows")
        )
    return took


def main() -> None:
    """Print one line for each call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--dim", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    random_keys = np.random.default_rng(1).integers(0, 2**63, options.keys).astype(np.uint64)
    kinds = {"random": random_keys, "chosen": chosen(options.keys)}
    print("| call | dim | random keys, s | chosen keys, s |\n|---|---|---|---|")
    for dim in options.dim:
        figures: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(options.rounds):
            for kind, keys in kinds.items():
                folder = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
                try:
                    for call, took in one_round(keys, dim, folder).items():
                        figures[call, kind].append(took)
                finally:
                    shutil.rmtree(folder)
        for call in dict.fromkeys(call for call, _ in figures):
            print(f"| {call} | {dim} | {spread(figures[call, 'random'], 3)} | {spread(figures[call, 'chosen'], 3)} |")


if __name__ == "__main__":
    main()
