"""The cost of a save: how long pushes are delayed, memory, and bandwidth compared with ``dd``.

    python bench/bench_checkpoint.py [--keys 10000000] [--rounds 5] [--directory DIR]

These take turns, --rounds times: pushes of 65,536 keys alone; a save during pushes; a save without pushes, timed;
another one, whose memory is measured; ``dd`` of as many bytes with the same sync at the end (conv=fsync), through the
page cache and bypassing it (oflag=direct, as saves write; blocks of 1 MiB and 2 MiB). The first save is checked against
the rows at that moment. Memory is the peak of the resident set during a save minus its level before, sampled a thousand
times a second. Finally deltas are saved and compacted.
"""

import argparse
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Self

import numpy as np

import shoal

BATCH = 65536
DD = {"dd": ["bs=1M"], "dd, direct": ["bs=2M", "oflag=direct"]}


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """The highest resident set while the context is open."""

    def __enter__(self) -> Self:
        self.before = self.most = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.most = max(self.most, resident())

    @property
    def extra(self) -> int:
        """Bytes above the level at the beginning."""
        return self.most - self.before


def pushes(table: shoal.Table, batches: list, grads: np.ndarray, until) -> np.ndarray:
    """Return milliseconds of each push until ``until()``."""
    took = []
    at = 0
    while not until():
        batch = batches[at % len(batches)]
        began = time.perf_counter()
        table.push_unique(batch, grads[: len(batch)])
        took.append((time.perf_counter() - began) * 1e3)
        at += 1
    return np.array(took)


def spread(took: np.ndarray) -> str:
    """Return percentiles of the pushes of all rounds."""
    p50, p99 = np.percentile(took, (50, 99))
    return f"{p50:6.1f} {p99:6.1f} {took.max():6.1f}  ({len(took)} pushes)"


def size(directory: Path) -> int:
    """Return the bytes of a checkpoint."""
    return sum(path.stat().st_size for path in directory.iterdir())


def fill(table: shoal.Table, count: int, rng: np.random.Generator) -> None:
    """Create the rows."""
    for first in range(0, count, 1_000_000):
        keys = np.arange(first, min(first + 1_000_000, count), dtype=np.uint64)
        table.push(keys, rng.standard_normal((len(keys), table.dim), np.float32)).result()


def changed(store: shoal.Store, table: shoal.Table, folder: Path, rng: np.random.Generator) -> list[str]:
    """Save deltas of some rows, and compact them."""
    count = len(table)
    began = time.perf_counter()
    store.save(folder / "base", track=True)
    full, took = size(folder / "base"), time.perf_counter() - began
    last, lines = folder / "base", []
    for share in (0.001, 0.01, 0.1):
        keys = rng.integers(0, count, int(count * share), np.uint64)
        table.push(keys, np.ones((len(keys), table.dim), np.float32)).result()
        began = time.perf_counter()
        store.save(folder / str(share), since=last)
        seconds = time.perf_counter() - began
        last = folder / str(share)
        lines.append(
            f"a delta of {share:.1%} of the rows: {size(last) / 1e6:.1f} MB, {size(last) / full:.3f} of a full one; "
            f"{seconds:.2f} s, a full one {took:.2f} s"
        )
    began = time.perf_counter()
    shoal.checkpoint.compact(last, folder / "compacted")
    seconds = time.perf_counter() - began
    store.save(folder / "whole")
    assert size(folder / "compacted") == size(folder / "whole"), "not what a full save writes"
    lines.append(f"compacting these four: {seconds:.2f} s")
    return lines


def median(values: list[float]) -> str:
    """Format the median and the range."""
    return f"{np.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def dd(path: Path, total: int, flags: list[str]) -> float:
    """Return MB/s of ``dd`` to a new file, which is removed."""
    size = int(flags[0].removeprefix("bs=").removesuffix("M")) << 20
    began = time.perf_counter()
    command = ["dd", "if=/dev/zero", f"of={path}", f"count={total // size}", "conv=fsync", *flags]
    subprocess.run(command, check=True, capture_output=True)
    took = time.perf_counter() - began
    path.unlink()
    return total // size * size / took / 1e6


def main() -> None:
    """Run the rounds and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=1, help="1: FTRL; else Adagrad")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--directory", type=Path, help="where to save; default: the system's for temporary files")
    asked = parser.parse_args()
    rng = np.random.default_rng(1)
    folder = Path(tempfile.mkdtemp(dir=asked.directory))
    try:
        with shoal.local(threads=asked.threads) as store:
            optimizer = shoal.FTRL() if asked.dim == 1 else shoal.Adagrad()
            table = store.table("t", dim=asked.dim, optimizer=optimizer)
            fill(table, asked.keys, rng)
            batches = [store.key_batch(rng.integers(0, asked.keys, BATCH, np.uint64)) for _ in range(64)]
            grads = np.ones((BATCH, asked.dim), np.float32)
            sample = np.arange(0, asked.keys, max(1, asked.keys // 100_000), dtype=np.uint64)
            alone, during, seconds, extras, rates, quiet = [], [], [], [], [], []
            dd_rates: dict[str, list[float]] = {name: [] for name in DD}
            for number in range(asked.rounds):
                stop = time.perf_counter() + 2
                alone.append(pushes(table, batches, grads, lambda stop=stop: time.perf_counter() > stop))
                for state in ("pushed", "timed", "watched"):
                    here = folder / f"{number}-{state}"
                    before = table.pull(sample)
                    with nullcontext() if state == "timed" else Peak() as peak:
                        began = time.perf_counter()
                        save = store.save(here, wait=False)
                        if state == "pushed":
                            during.append(pushes(table, batches, grads, lambda save=save: save.done()))
                        save.result(600)
                        took = time.perf_counter() - began
                    total = size(here)
                    if number == 0:
                        with shoal.local(slots=64) as other:
                            other.load(here)
                            assert np.array_equal(other.tables["t"].pull(sample), before), "not the rows of the moment"
                            assert len(other.tables["t"]) == asked.keys
                    shutil.rmtree(here)
                    if peak is None:
                        rates.append(total / took / 1e6)
                        continue
                    (extras if state == "pushed" else quiet).append(peak.extra / 2**20)
                    if state == "pushed":
                        seconds.append(took)
                for name, flags in DD.items():
                    dd_rates[name].append(dd(folder / "dd", total, flags))
            stats = table.stats()
            deltas = changed(store, table, folder, rng)
        mib = stats.bytes >> 20, total >> 20
        print(f"{asked.keys:,} rows of dim {asked.dim}, {mib[0]} MiB; a checkpoint of {mib[1]} MiB")
        print(f"a push of {BATCH} keys, ms (p50, p99, longest): alone       {spread(np.concatenate(alone))}")
        print(f"                                             with a save {spread(np.concatenate(during))}")
        print(f"seconds of a save during pushes: {median(seconds)}; extra memory, MiB: {median(extras)}")
        print(f"alone: MB/s {median(rates)}; extra memory, MiB: {median(quiet)}")
        print("\n".join(deltas))
        for name, its in dd_rates.items():
            print(f"{name}, fsync, MB/s: {median(its)}; ratio {np.median(np.array(rates) / np.array(its)):.2f}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
