"""The two ways of a local pull: rows of unique keys into a buffer that is expanded, or one pass over the input keys.

    python bench/bench_pull.py                                    pairs in one process: two minutes
    python bench/bench_pull.py --instructions                     the same under callgrind (valgrind, a C compiler)
    python bench/bench_pull.py --dim 24 32 --repeats 1 1.2 1.5    other cells

A table of Adagrad with a million rows, one thread. A batch has ``--batch`` keys in random order, each ``--repeats``
times on average. The keys are sorted before, since both ways need that. As in ``Table.pull``, the result is a new array
in each call, and so is the buffer of unique rows.

The ways take turns, batch by batch, each with a new batch, so that the other way has not read its rows, and what else
the machine does affects both alike. The ratio is the median over pairs of CPU time of one pass / CPU time with the
buffer, with quartiles.

Checks: both ways give the same bits.
"""

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

import shoal
from figures import check
from shoal.table.arrays import Rows
from shoal.table.key_batch import KeyBatch
from shoal.table.shard import pull_and_expand
from shoal.table.table import Table

ROWS = 1_000_000
COUNTER = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char* name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""

Way = Callable[[Table, KeyBatch], Rows]


def buffered(table: Table, batch: KeyBatch) -> Rows:
    """Read the rows of the unique keys, then copy each to its keys."""
    rows = np.empty((batch.input_size, table.dim), np.float32)
    pull_and_expand(table.reader.pull, batch.native, rows, table.workers).result()
    return rows


def one_pass(table: Table, batch: KeyBatch) -> Rows:
    """Read each row and write it to its keys."""
    rows = np.empty((batch.input_size, table.dim), np.float32)
    table.reader.pull_per_key(batch.native, rows)
    return rows


def draw(random: np.random.Generator, size: int, repeats: float) -> npt.NDArray[np.uint64]:
    """Draw a batch of keys: ``size / repeats`` different ones, each at least once."""
    unique = random.choice(ROWS, max(1, round(size / repeats)), replace=False)
    keys = np.concatenate([unique, unique[random.integers(0, len(unique), size - len(unique))]])
    random.shuffle(keys)
    return keys.astype(np.uint64)


def make_table(store: shoal.Store, dim: int) -> Table:
    """Make a full table."""
    table = store.table(f"dim{dim}", dim=dim, optimizer=shoal.Adagrad())
    random = np.random.default_rng(dim)
    for begin in range(0, ROWS, 1 << 16):
        keys = np.arange(begin, min(begin + (1 << 16), ROWS), dtype=np.uint64)
        table.assign(keys, random.random((len(keys), dim), np.float32))
    return table


def cpu_seconds(way: Way, table: Table, batch: KeyBatch) -> float:
    """Measure one call."""
    start = time.thread_time()
    way(table, batch)
    return time.thread_time() - start


def measure(table: Table, batch_size: int, repeats: float, pairs: int) -> str:
    """Measure one cell; returns a line of the table."""
    random = np.random.default_rng([3, table.dim, round(repeats * 100)])
    ratios, seconds = [], ([], [])
    for turn in range(pairs + 2):
        batches = [table.key_batch(draw(random, batch_size, repeats)) for _ in range(2)]
        if turn < 2:
            for batch in batches:
                check(np.array_equal(buffered(table, batch), one_pass(table, batch)), "the two ways differ")
            continue
        order = (buffered, one_pass) if turn % 2 else (one_pass, buffered)
        spent = {way: cpu_seconds(way, table, batch) for way, batch in zip(order, batches, strict=True)}
        ratios.append(spent[one_pass] / spent[buffered])
        for k, way in enumerate((buffered, one_pass)):
            seconds[k].append(spent[way] / batch_size * 1e9)
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return (
        f"| {table.dim} | {repeats:g} | {np.median(seconds[0]):.1f} | {np.median(seconds[1]):.1f} "
        f"| {middle:.2f} ({low:.2f}-{high:.2f}) |"
    )


def count(counter: ctypes.CDLL, table: Table, batch_size: int, repeats: float) -> None:
    """Let callgrind count the instructions of one call of each way; the first call of each is a warm-up."""
    random = np.random.default_rng([3, table.dim, round(repeats * 100)])
    batch = table.key_batch(draw(random, batch_size, repeats))
    for way in (buffered, one_pass):
        way(table, batch)
        counter.begin()
        way(table, batch)
        counter.end(f"{way.__name__} {table.dim} {repeats:g}".encode())


def count_instructions(options: argparse.Namespace) -> None:
    """Run this script under callgrind, and print the instructions per key of all cells."""
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory) / "counter.c", Path(directory) / "counter.so"
        source.write_text(COUNTER)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={directory}/out"]
        command += [sys.executable, __file__, "--counter", str(library), "--batch", str(options.batch)]
        command += ["--dim", *map(str, options.dim), "--repeats", *map(str, options.repeats)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONMALLOC": "malloc"})
        counts: dict[str, float] = {}
        for file in Path(directory).glob("out.*"):
            text = file.read_text()
            name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
            total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
            if name and total:
                counts[name[1]] = int(total[1]) / options.batch
    print("| dim | keys per unique key | instructions per key, buffer | one pass | ratio |\n|---|---|---|---|---|")
    for dim in options.dim:
        for repeats in options.repeats:
            before, after = (counts[f"{way.__name__} {dim} {repeats:g}"] for way in (buffered, one_pass))
            print(f"| {dim} | {repeats:g} | {before:.1f} | {after:.1f} | {after / before:.2f} |")


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", nargs="+", type=int, default=[1, 8, 16, 32, 64])
    parser.add_argument("--repeats", nargs="+", type=float, default=[1, 2, 50], help="keys per unique key")
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--counter", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.instructions:
        count_instructions(options)
        return
    if options.counter is None:
        print("| dim | keys per unique key | ns of CPU per key, buffer | one pass | ratio |\n|---|---|---|---|---|")
    for dim in options.dim:
        with shoal.local(threads=1) as store:
            table = make_table(store, dim)
            for repeats in options.repeats:
                if options.counter is None:
                    print(measure(table, options.batch, repeats, options.pairs), flush=True)
                else:
                    count(ctypes.CDLL(options.counter), table, options.batch, repeats)


if __name__ == "__main__":
    main()
