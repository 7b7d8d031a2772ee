"""From Criteo's text to a saved model: where the CPU time of ``shoal train lr`` goes.

    python bench/bench_text_to_model.py                              a million examples: two minutes, 3 GB of memory
    python bench/bench_text_to_model.py --examples 100000 --rounds 1
    python bench/bench_text_to_model.py --peer /path/to/other/.venv/bin/shoal     two builds in turns

Draws a log of a million examples from the planted model of bench_vw.py, in Criteo's format: 13 integers and 26
categories of 8 hexadecimal digits, every column present, 4.7 million distinct features. `shoal train lr` trains on it
as a whole process, from its start to its end; its CPU time is user + system of all threads, from the kernel. With
--peer, the command of another installation takes turns with it, and the two saved tables must be equal.

A second table has the CPU time of each stage, executed one after the other in one thread: each batch is read, sorted,
pulled, computed, and pushed to a new table (which creates its rows) and to one that has all rows; the difference of the
two pushes is the cost of new rows. "Floor" is a minimal program in C (needs a C compiler) that moves the same
bytes: it finds the tabs of the text and mixes the eight bytes behind each; writes a hash and its position to one of 256
groups; reads, or reads and writes, one line of a table for each unique key; writes all rows to fresh memory; reads or
adds one float for each feature; writes the bytes of the saved rows; starts Python with NumPy. "The rest" is the whole
process less the stages: threads, queues, cache misses that they cause each other, the small batches of the warm-up.
"""

import argparse
import collections
import ctypes
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from bench_vw import CHUNK, FIELDS, HYPER, draw
from figures import check, conditions, spread
from shoal import _core
from shoal.metrics import Accumulator
from shoal.tools.planted import DrawnLog, criteo_text

INTEGERS = 13
STAGES = (
    "start and end",
    "parse",
    "sort",
    "pull",
    "margins",
    "loss",
    "metrics",
    "gradient",
    "push",
    "new rows",
    "save",
)

FLOORS = r"""
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
static uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
uint64_t parse(const uint8_t* text, uint64_t n, uint64_t* keys) {
  uint64_t k = 0;
  for (uint64_t i = 0; i + 40 < n; i += 32) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)(text + i));
    uint32_t found = (uint32_t)_mm256_movemask_epi8(_mm256_or_si256(
        _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(9)), _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(10))));
    for (; found != 0; found &= found - 1) {
      uint64_t word;
      memcpy(&word, text + i + __builtin_ctz(found) + 1, 8);
      keys[k++ & 0xFFFFF] = mix(word);
    }
  }
  return k;
}
void sort(const uint64_t* keys, uint64_t n, uint64_t* hashes, uint32_t* positions) {
  uint32_t next[256] = {0};
  uint32_t sum = 0;
  for (uint64_t i = 0; i < n; ++i) ++next[mix(keys[i]) >> 56];
  for (int v = 0; v < 256; ++v) { uint32_t c = next[v]; next[v] = sum; sum += c; }
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t hash = mix(keys[i]);
    const uint32_t to = next[hash >> 56]++;
    hashes[to] = hash;
    positions[to] = (uint32_t)i;
  }
}
float lines(float* table, uint64_t count, const uint64_t* hashes, uint64_t n, int writes) {
  float sum = 0;
  for (uint64_t i = 0; i < n; ++i) {
    if (i + 16 < n) __builtin_prefetch(table + 16 * (uint64_t)(((__uint128_t)hashes[i + 16] * count) >> 64));
    float* const line = table + 16 * (uint64_t)(((__uint128_t)hashes[i] * count) >> 64);
    sum += *line;
    if (writes) *line += 1;
  }
  return sum;
}
float gather(const float* weights, const uint32_t* inverse, uint64_t n) {
  float sum = 0;
  for (uint64_t i = 0; i < n; ++i) sum += weights[inverse[i]];
  return sum;
}
void scatter(float* sums, const uint32_t* inverse, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) sums[inverse[i]] += 1;
}
"""


def write(path: Path, examples: int) -> int:
    """Write the log; return the number of its distinct categories."""
    seen = np.zeros(20_000_000, np.bool_)
    with path.open("wb") as file:
        for begin in range(0, examples, CHUNK):
            ids, margins, labels = draw(1_000_000 + begin, min(CHUNK, examples - begin))
            categories, integers = ids[:, : FIELDS - INTEGERS], ids[:, FIELDS - INTEGERS :]
            seen[categories.reshape(-1) - 10_000_000] = True
            # An odd factor modulo 2^32 is a bijection: the tokens are as distinct as the ids.
            tokens = (categories.astype(np.uint64) * np.uint64(0x9E3779B1)).astype(np.uint32)
            ranks = integers - integers.min(axis=0)
            file.write(criteo_text(DrawnLog(labels, ranks, tokens, np.zeros(tokens.shape, np.bool_), margins)))
    return int(seen.sum())


def process(command: list[str]) -> tuple[float, float, float]:
    """Run a process; return its seconds by the clock, of the CPU, and its greatest resident set in MB."""
    start = time.perf_counter()
    child = subprocess.Popen(command)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    check(child.returncode == 0, f"{command[0]} ends with status {child.returncode}")
    return time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def compiled(folder: Path) -> Any:
    """Compile the floors."""
    source, library = folder / "floors.c", folder / "floors.so"
    source.write_text(FLOORS)
    compiler = os.environ.get("CC", sysconfig.get_config_var("CC") or "cc").split()[0]
    subprocess.run([compiler, "-O3", "-mavx2", "-shared", "-fPIC", "-o", library, source], check=True)
    native = ctypes.CDLL(str(library))
    native.lines.restype = native.gather.restype = ctypes.c_float
    native.parse.restype = ctypes.c_uint64
    return native


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    """Return the address of an array's first element."""
    return ctypes.c_void_p(array.ctypes.data)


def stages(path: Path, folder: Path, batch_size: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the CPU seconds of each stage and of its floor."""
    spent: dict[str, float] = dict.fromkeys(STAGES, 0.0)
    floors: dict[str, float] = dict.fromkeys(STAGES, 0.0)

    def clocked(to: dict[str, float], stage: str, call: Callable[..., Any], *given: Any) -> Any:
        start = time.thread_time()
        out = call(*given)
        to[stage] += time.thread_time() - start
        return out

    native = compiled(folder)
    text = np.fromfile(path, np.uint8)
    found = clocked(floors, "parse", native.parse, pointer(text), len(text), pointer(np.empty(1 << 20, np.uint64)))
    check(found >= FIELDS, "the floor of the parser finds no columns")
    del text
    store = shoal.local(threads=1)
    model, seen = shoal.LogisticRegression(shoal.FTRL(**HYPER), store=store), Accumulator()
    table, memory = model.table, np.ones((0, 16), np.float32)
    for known in (False, True):
        others = time.process_time() - time.thread_time()  # the thread that parses, see below
        batches = iter(shoal.read_criteo(str(path), batch_size=batch_size))
        while True:
            to = collections.Counter() if known else spent
            batch = clocked(to, "parse", next, batches, None)
            if batch is None:
                to["parse"] += time.process_time() - time.thread_time() - others
                break
            keys = clocked(to, "sort", model.sort, batch)
            rows = clocked(to, "pull", table.pull_unique, keys)
            margins, own = clocked(to, "margins", model._forward, batch, keys, [rows])
            loss, slopes = clocked(
                to, "loss", _core.logistic_losses, margins, batch.labels, batch.weights, store.workers
            )
            sums = loss, float(slopes.sum() + batch.labels.sum())
            clocked(to, "metrics", lambda: seen.update(batch.labels, margins, sums=sums))  # noqa: B023
            (gradient,) = clocked(to, "gradient", model._backward, batch, keys, [rows], slopes, own)
            clocked(
                spent,
                "push" if known else "new rows",
                lambda: table.push_unique(keys, gradient).result(),  # noqa: B023
            )
            if known:
                continue
            if len(memory) < table.stats().bytes / 64:
                memory = np.ones((2 * int(table.stats().bytes / 64), 16), np.float32)
            n, unique = keys.input_size, len(keys)
            hashes, positions = np.empty(n, np.uint64), np.empty(n, np.uint32)
            floats, inverse = np.ones(unique, np.float32), pointer(keys.inverse)
            hashes[:], positions[:] = 1, 1  # no fresh pages
            lines = pointer(memory), int(table.stats().bytes / 64), pointer(keys.hashes), unique
            clocked(floors, "sort", native.sort, pointer(batch.keys), batch.nnz, pointer(hashes), pointer(positions))
            clocked(floors, "pull", native.lines, *lines, 0)
            clocked(floors, "push", native.lines, *lines, 1)
            clocked(floors, "margins", native.gather, pointer(floats), inverse, n)
            clocked(floors, "gradient", native.scatter, pointer(floats), inverse, n)
    spent["new rows"] -= spent["push"]
    before = time.process_time()  # other threads write, too
    model.save(str(folder / "stages"), overwrite=True)
    spent["save"] = time.process_time() - before
    rows = clocked(floors, "new rows", np.full, 2 * len(table), 1.0)
    clocked(floors, "save", rows.tofile, folder / "rows")
    return spent, floors


def main() -> None:
    """Measure and print two Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--peer", metavar="SHOAL", help="the command `shoal` of another installation, to take turns with"
    )
    parser.add_argument("--no-stages", action="store_true", help="whole processes only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-text-") as name:
        folder = Path(name)
        path, few = folder / "train.tsv", folder / "few.tsv"
        distinct = write(path, options.examples)
        with path.open("rb") as file:
            few.write_bytes(b"".join(file.readline() for _ in range(100)))
        features = options.examples * FIELDS
        print(f"{options.examples:,} examples, {path.stat().st_size / 1e6:.0f} MB, {distinct:,} categories\n")
        commands = {"shoal": str(Path(sys.executable).with_name("shoal"))}
        if options.peer is not None:
            commands["peer"] = options.peer
        whole: dict[str, list[tuple[float, float, float]]] = {title: [] for title in commands}
        starts: dict[str, list[float]] = {title: [] for title in commands}
        saved: dict[str, bytes] = {}
        tail = ["--format", "criteo", "--threads", "2", "--quiet", "--batch-size", str(options.batch_size)]
        tail += [word for key, value in HYPER.items() for word in (f"--{key}", str(value))]
        for _ in range(options.rounds):
            for title, shell in commands.items():
                for data, output in ((few, "few"), (path, "out")):
                    target = folder / f"{output}-{title}"
                    used = process(
                        [shell, "train", "lr", "--data", str(data), "--output", str(target), "--overwrite", *tail]
                    )
                    if data is few:
                        starts[title].append(used[1])
                    else:
                        whole[title].append(used)
                (slots,) = (folder / f"out-{title}").glob("*/*.slots")
                check(saved.setdefault("table", slots.read_bytes()) == slots.read_bytes(), "two tables differ")
        print("| process | CPU s | s by the clock | k examples/s | start and end, CPU s | peak RSS, MB |")
        print("|---|---|---|---|---|---|")
        for title, runs in whole.items():
            clock, used, peak = zip(*runs, strict=True)
            rate = spread([options.examples / seconds / 1e3 for seconds in clock])
            print(
                f"| {title} | {spread(used, 2)} | {spread(clock, 2)} | {rate} | {spread(starts[title], 2)} "
                f"| {spread(peak)} |"
            )
        if options.peer is not None:
            ratios = [own[1] / other[1] for own, other in zip(whole["shoal"], whole["peer"], strict=True)]
            print(f"\nCPU time, shoal / peer: {spread(ratios, 3)}")
        if not options.no_stages:
            spent, floors = stages(path, folder, options.batch_size)
            spent["start and end"] = statistics.median(starts["shoal"])
            floors["start and end"] = statistics.median(
                process([sys.executable, "-c", "import numpy"])[1] for _ in range(options.rounds)
            )
            total = statistics.median(run[1] for run in whole["shoal"])
            print("\n| stage | ns a feature | floor | left |")
            print("|---|---|---|---|")
            for stage in STAGES:
                own, floor = spent[stage] / features * 1e9, floors[stage] / features * 1e9
                print(f"| {stage} | {own:.2f} | {floor:.2f} | {own - floor:.2f} |")
            rest = (total - sum(spent.values())) / features * 1e9
            print(f"| the rest | {rest:.2f} | | {rest:.2f} |")
            print(f"| whole process | {total / features * 1e9:.2f} | {sum(floors.values()) / features * 1e9:.2f} | |")
        print(f"\n{conditions()}")


if __name__ == "__main__":
    main()
