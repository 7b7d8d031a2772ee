"""Examples per second that a dataset of Ray feeds to a worker, compared with shoal's own reader of the same files.

    pip install 'shoal[ray]' psutil                (without Ray a message says that the benchmark is left out)
    python bench/bench_ray_data.py                 400,000 examples of 13 numbers and 26 categories; three rounds
    python bench/bench_ray_data.py --examples 100000 --rounds 1

The same Parquet files are read in turns:

    read_parquet       shoal's reader: the worker reads and hashes, in a thread of its own
    hashed by worker   ray.data reads blocks in its tasks; the worker hashes them (Hash.read of the dataset)
    hashed by tasks    ray.data reads and hashes blocks in its tasks (map_batches); the worker takes its keys

and once more with a pass of logistic regression over them, whose digest must be the same. A rate is examples divided by
elapsed seconds; CPU seconds are those of this process and of all processes of Ray. Starting Ray is not counted, and the
first pass of each way, which starts Ray's processes, is not either.
"""

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from figures import check, conditions, spread

INTEGERS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
ROLES: dict[str, Any] = {"label": "label", "categorical": CATEGORIES, "numeric": INTEGERS}
FILES = 8


def draw(folder: Path, examples: int) -> None:
    """Write the files."""
    import pyarrow
    import pyarrow.parquet

    rng = np.random.default_rng(1)
    for number in range(FILES):
        rows = examples // FILES
        columns: dict[str, Any] = {"label": rng.integers(0, 2, rows)}
        columns |= {name: pyarrow.array(rng.random(rows), mask=rng.random(rows) < 0.2) for name in INTEGERS}
        for name in CATEGORIES:
            texts = np.char.mod("%08x", (rng.zipf(1.3, rows) % 100_000 * 2_654_435_761) % 2**32)
            columns[name] = pyarrow.array(texts, mask=rng.random(rows) < 0.1)
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"part_{number}.parquet", row_group_size=25_000)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all that have been started from it."""
    import psutil

    found = 0.0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        found += times.user + times.system
    return found


def feed(reader: shoal.data.Reader) -> tuple[int, int]:
    """Make a pass that takes the batches: examples, and the sum of all keys."""
    examples, keys = 0, 0
    for batch in reader:
        examples += len(batch)
        keys = (keys + int(batch.keys.sum(dtype=np.uint64))) % 2**64
    return examples, keys


def learn(reader: shoal.data.Reader) -> tuple[int, str]:
    """Make a pass of logistic regression: examples, and the digest of the weights."""
    with shoal.LogisticRegression(shoal.FTRL(alpha=0.1)) as model:
        model.fit(reader, progress=False)
        return model.examples, model.table.digest()


def measure(
    work: Callable[[shoal.data.Reader], tuple[int, Any]], readers: dict[str, shoal.data.Reader], rounds: int
) -> None:
    """Run the ways in turns, and print their rates."""
    rates: dict[str, list[float]] = {name: [] for name in readers}
    cpu: dict[str, list[float]] = {name: [] for name in readers}
    results = set()
    for count in range(rounds + 1):
        for name, reader in readers.items():
            before, begin = cpu_seconds(), time.perf_counter()
            done = work(reader)
            seconds = time.perf_counter() - begin
            results.add(done)
            if count:
                rates[name].append(done[0] / seconds)
                cpu[name].append((cpu_seconds() - before) / done[0] * 1e6)
    check(len(results) == 1, f"all ways have the same examples, got {results}")
    for name, found in rates.items():
        print(f"    {name:18} {spread(found):>30} examples/s {spread(cpu[name], 2):>22} CPU seconds per million")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=400_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        import ray
        import ray.data
    except ImportError:
        print("Ray is left out: pip install 'shoal[ray]'")
        return
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        draw(folder, arguments.examples)
        hashed = shoal.ray.Hash(**ROLES)
        dataset = ray.data.read_parquet([str(path) for path in sorted(folder.iterdir())])
        by_tasks = dataset.map_batches(hashed, batch_format="pyarrow", zero_copy_batch=True)
        readers = {
            "read_parquet": shoal.read_parquet(folder / "*.parquet", **ROLES),
            "hashed by worker": hashed.read(dataset),
            "hashed by tasks": hashed.read(by_tasks),
        }
        print(
            f"Ray {ray.__version__}, {os.cpu_count()} cores, {arguments.examples:,} examples; a pass that takes batches"
        )
        measure(feed, readers, arguments.rounds)
        print("a pass of logistic regression")
        measure(learn, readers, arguments.rounds)
        print(conditions())
    ray.shutdown()


if __name__ == "__main__":
    main()
