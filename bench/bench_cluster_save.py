"""The cost of saves and loads on a cluster, compared with local ones: seconds, and how long steps are delayed.

    python bench/bench_cluster_save.py [--keys 10000000] [--rounds 3] [--directory DIR]

These take turns: a local store; one server; two servers that write in parallel; and two servers whose rows all go
through the worker (shared_storage=False). Each saves, and loads the local store's checkpoint. A step is a push of
20,000 keys, a tick, and a pull that waits for both. Each checkpoint, and each loaded table, is compared with the local
one by the digest of its table.
"""

import argparse
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

import shoal

BATCH = 20_000


def fill(store: shoal.Store, keys: np.ndarray) -> shoal.Table:
    """Create the rows."""
    table = store.table("t", optimizer=shoal.FTRL())
    for first in range(0, len(keys), 1 << 19):
        some = keys[first : first + (1 << 19)]
        table.push(some, np.ones(len(some), np.float32)).result()
        store.tick()
    len(table)  # waits for the last push
    return table


def steps(store: shoal.Store, keys: np.ndarray, until) -> np.ndarray:
    """Return milliseconds of each step until ``until()``."""
    table, took, at = store.tables["t"], [], 0
    while not until():
        some = keys[at * BATCH % len(keys) :][:BATCH]
        began = time.perf_counter()
        table.push(some, np.ones(len(some), np.float32))
        store.tick()
        table.pull(some[:1])
        took.append((time.perf_counter() - began) * 1e3)
        at += 1
    return np.array(took)


def spread(took: np.ndarray) -> str:
    """Format percentiles."""
    p50, p99 = np.percentile(took, (50, 99))
    return f"{p50:.1f} / {p99:.1f} / {took.max():.1f}"


def main() -> None:
    """Run the rounds and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where to save; default: the system's for temporary files")
    asked = parser.parse_args()
    keys = np.random.default_rng(1).integers(0, 2**64, asked.keys, np.uint64)
    with tempfile.TemporaryDirectory(dir=asked.directory) as made, ExitStack() as stack:
        folder = Path(made)
        stores: dict[str, shoal.Store] = {"local": stack.enter_context(shoal.local(threads=1))}
        for servers in (1, 2):
            stores[f"{servers} server{'s' * (servers > 1)}"] = stack.enter_context(
                shoal.launch(servers=servers, storage_roots=[folder])
            )
        for store in stores.values():
            fill(store, keys)
        through = "2, through the worker"
        seconds: dict[str, list[float]] = {name: [] for name in [*stores, through]}
        loads: dict[str, list[float]] = {name: [] for name in seconds}
        digests = set()
        for number in range(asked.rounds):
            for name in seconds:
                store = stores.get(name, stores["2 servers"])
                if name == through:
                    store._shared_storage = False
                save = partial(store.save, overwrite=True)
                for call, path, took in ((save, name, seconds), (store.load, "local", loads)):
                    began = time.perf_counter()
                    call(folder / path)
                    took[name].append(time.perf_counter() - began)
                if name == through:
                    store._shared_storage = True
                if number == 0:
                    digests.add(store.tables["t"].digest())
        for name in seconds:
            with shoal.local(threads=1) as other:
                other.load(folder / name)
                digests.add(other.tables["t"].digest())
        assert len(digests) == 1, "not the same rows"
        size = sum(path.stat().st_size for path in (folder / "local").iterdir())
        print(f"{asked.keys:,} rows of FTRL, dim 1: a checkpoint of {size / 1e6:.0f} MB")
        for what, figures in (("save", seconds), ("load", loads)):
            for name, took in figures.items():
                rate = size / np.median(took) / 1e6
                print(f"{what} {name:22} {np.median(took):.2f} s ({min(took):.2f}-{max(took):.2f}), {rate:.0f} MB/s")
        print("a step, ms (p50 / p99 / longest), alone and during saves:")
        for name, store in stores.items():
            stop = time.perf_counter() + 2
            alone = steps(store, keys, lambda stop=stop: time.perf_counter() > stop)
            during = []
            for number in range(asked.rounds):
                saving = store.save(folder / f"{name} {number}", wait=False)
                during.append(steps(store, keys, lambda saving=saving: saving.done()))
                saving.result()
            print(f"{name:22} {spread(alone):22} {spread(np.concatenate(during))}")


if __name__ == "__main__":
    main()
