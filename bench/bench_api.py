"""Measure the Python API: key batches, pull and push, saving and loading, training from text.

    python bench/bench_api.py [--rows 10000000] [--threads 1 2]

Rates are millions of keys (or examples) a second, median (minimum-maximum). Every measurement checks its result.
"""

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import shoal
from figures import check, spread
from shoal.tools.planted import PlantedModel, write_log


def rates(work: Callable[[], int], rounds: int) -> str:
    """Time ``work``, which returns the number of items processed, after one warm-up round."""
    work()
    figures = []
    for _ in range(rounds):
        start = time.perf_counter()
        count = work()
        figures.append(count / (time.perf_counter() - start) / 1e6)
    return spread(figures, 1)


def bench_batches(threads: int, rounds: int) -> None:
    """Sort uniform keys."""
    random = np.random.default_rng(1)
    with shoal.local(threads=threads) as store:
        for n in (4096, 65_536, 320_000, 1_000_000, 10_000_000):
            keys = random.integers(0, 2**63, n).astype(np.uint64)
            repeats = max(1, 2_000_000 // n)

            def sort(keys: np.ndarray = keys, repeats: int = repeats) -> int:
                for _ in range(repeats):
                    store.key_batch(keys)
                return repeats * len(keys)

            check(store.key_batch(keys).native.verify(), "a key batch breaks its invariants")
            print(f"| key batch of {n:,} | {threads} | {rates(sort, rounds)} M keys/s |", flush=True)


def bench_pull_push(threads: int, rounds: int, rows: int) -> Path:
    """Pull and push existing keys, by key and by batch; writes a checkpoint."""
    random = np.random.default_rng(2)
    folder = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    with shoal.local(threads=threads) as store:
        table = store.table("bench", optimizer=shoal.FTRL(l1=1.0))
        for start in range(0, rows, 1 << 20):
            keys = np.arange(start, min(start + (1 << 20), rows), dtype=np.uint64)
            table.push(keys, np.full((len(keys), 1), 0.3, np.float32)).result()
        check(len(table) == rows, "rows are missing")
        for n in (65_536, 1_000_000):
            repeats = max(1, 1_000_000 // n)
            batches = [random.integers(0, rows, n).astype(np.uint64) for _ in range(2 * repeats)]
            grads = np.full((n, 1), 0.1, np.float32)
            out = np.empty((n, 1), np.float32)

            def pull(batches: list[np.ndarray] = batches[:repeats], out: np.ndarray = out) -> int:
                for keys in batches:
                    table.pull(keys, out=out)
                return sum(map(len, batches))

            def push(batches: list[np.ndarray] = batches[repeats:], grads: np.ndarray = grads) -> int:
                for keys in batches:
                    table.push(keys, grads).result()
                return sum(map(len, batches))

            print(f"| pull(keys), {rows:,} rows, batches of {n:,} | {threads} | {rates(pull, rounds)} M keys/s |")
            print(f"| push(keys, grads), the same | {threads} | {rates(push, rounds)} M keys/s |", flush=True)
        probe = random.integers(0, rows, 1000).astype(np.uint64)
        before = table.pull(probe)
        start = time.perf_counter()
        store.save(folder / "checkpoint")
        seconds = time.perf_counter() - start
        size = sum(file.stat().st_size for file in (folder / "checkpoint").iterdir())
        print(f"| save {rows:,} rows, {size / 1e6:.0f} MB | {threads} | {size / 1e6 / seconds:.0f} MB/s |")
    with shoal.local(threads=threads) as store:
        start = time.perf_counter()
        store.load(folder / "checkpoint")
        seconds = time.perf_counter() - start
        check(len(store.tables["bench"]) == rows, "rows were lost on disk")
        check(np.array_equal(store.tables["bench"].pull(probe), before), "rows changed on disk")
        print(f"| load the same | {threads} | {size / 1e6 / seconds:.0f} MB/s |", flush=True)
    return folder


def bench_training(threads: int, rounds: int, folder: Path) -> None:
    """Train logistic regression from Criteo text, parsing included."""
    train = folder / "train.tsv"
    if not train.exists():
        write_log(train, PlantedModel(), 300_000, 0)
    for batch_size in (1024, 8192):

        def fit(batch_size: int = batch_size) -> int:
            model = shoal.LogisticRegression(
                optimizer=shoal.FTRL(alpha=0.08, l1=1.0), store=shoal.local(threads=threads)
            )
            model.fit(shoal.read_criteo(train, batch_size=batch_size), progress=False)
            check(0.3 < model.history.passes[-1].metrics.logloss < 0.69, "the model did not learn")
            return model.examples

        print(f"| fit from text, batches of {batch_size} | {threads} | {rates(fit, rounds)} M examples/s |", flush=True)


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("| what | threads | rate |\n|---|---|---|")
    for threads in options.threads:
        bench_batches(threads, options.rounds)
        folder = bench_pull_push(threads, options.rounds, options.rows)
        try:
            bench_training(threads, options.rounds, folder)
        finally:
            shutil.rmtree(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\nPeak RSS {peak:.0f} MB.")


if __name__ == "__main__":
    main()
