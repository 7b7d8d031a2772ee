"""How shoal's work scales with the cores of a machine: text to model, batches in memory, a table, a cluster.

    python bench/bench_scaling.py                                  powers of two up to all cores: some minutes
    python bench/bench_scaling.py --cores 1 2 --examples 200000 --rows 1000000 --rounds 1
    python bench/bench_scaling.py --only text memory

Each measurement runs in processes that may use the first c cores only, with c threads. All numbers of cores take turns.

text      `shoal train lr` as a whole process, Criteo's text of bench_text_to_model.py, with one thread that parses and
          with one for every four cores. The saved tables must be equal.
memory    one pass of the same examples from batches in memory, into a table that has their rows
table     batches of 2^20 given keys (sorted inside the call) of a table of FTRL rows: pull, push; "raw" is the reading
          of one random line of 64 bytes a key, prefetched, from as much memory, by a program in C (needs a C compiler)
cluster   workers of one thread each on shares of the text and half as many servers, BSP; all processes share c cores
"""

import argparse
import concurrent.futures
import ctypes
import hashlib
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

import shoal
from bench_cluster_lr import output_of, started
from bench_text_to_model import compiled, pointer, process, write
from bench_vw import HYPER
from figures import check, conditions, spread
from shoal.base.plural import counted
from shoal.cluster.launch.local_cluster import running

BATCH = 16384
KEYS = 1 << 20

MEMORY = """
import json, sys, time
import shoal
path, threads, hyper, batch_size = json.loads(sys.argv[1])
with shoal.local(threads=threads) as store:
    batches = list(shoal.read_criteo(path, batch_size=batch_size))
    model = shoal.LogisticRegression(shoal.FTRL(**hyper), store=store)
    model.fit(batches, progress=False)
    start, used = time.perf_counter(), time.process_time()
    model.fit(batches, progress=False)
    print(json.dumps([time.perf_counter() - start, time.process_time() - used, model.table.digest()]))
"""

TABLE = """
import json, sys, time
import numpy as np
import shoal
rows, threads, keys, calls = json.loads(sys.argv[1])
random = np.random.default_rng(3)
with shoal.local(threads=threads) as store:
    table = store.table("t", optimizer=shoal.FTRL(l1=1.0))
    table.reserve(rows)
    for begin in range(0, rows, keys):
        some = np.arange(begin, min(begin + keys, rows), dtype=np.uint64)
        table.push(some, np.full((len(some), 1), 0.3, np.float32)).result()
    batches = [random.integers(0, rows, keys).astype(np.uint64) for _ in range(calls)]
    grads = np.full((keys, 1), 0.01, np.float32)
    found = {}
    for name, call in (("pull", table.pull), ("push", lambda batch: table.push(batch, grads).result())):
        call(batches[0])
        start = time.perf_counter()
        for batch in batches:
            call(batch)
        found[name] = time.perf_counter() - start
    print(json.dumps([found, table.digest(), table.stats().bytes]))
"""

WORKER = """
import json, sys, time
import shoal
address, workers, path, batch_size, hyper = json.loads(sys.argv[1])
with shoal.connect(address, workers=workers, threads=1, timeout=300) as store:
    model = shoal.LogisticRegression(shoal.FTRL(**hyper), store=store)
    share = shoal.read_criteo(path, batch_size=batch_size).split(store.rank, workers)
    store.barrier()
    start = time.perf_counter()
    model.fit(share, progress=False)
    store.barrier()
    print(json.dumps([time.perf_counter() - start, model.examples]))
"""


class Bench:
    """The measurements, each of which appends to ``found[title][cores]`` and returns what must be equal in all runs."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.log = options, folder, folder / "train.tsv"
        self.found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, title: str, cores: int, figure: float) -> None:
        """Record a figure."""
        self.found[title][cores].append(figure)

    def text(self, cores: int) -> str:
        """Measure whole processes."""
        shell, digests = str(Path(sys.executable).with_name("shoal")), set()
        command = [shell] if os.path.exists(shell) else [sys.executable, "-m", "shoal"]
        tail = [word for key, value in HYPER.items() for word in (f"--{key}", str(value))]
        for readers in dict.fromkeys((1, max(1, cores // 4))):
            output = self.folder / "model"
            command_line = [*command, "train", "lr", "--data", str(self.log), "--output", str(output), "--overwrite"]
            command_line += ["--format", "criteo", "--quiet", "--batch-size", str(BATCH), "--threads", str(cores)]
            seconds, used, _ = process([*command_line, "--reader-threads", str(readers), *tail])
            title = "one thread parses" if readers == 1 else "more threads parse"
            self.add(f"text, {title}: k examples/s", cores, self.options.examples / seconds / 1e3)
            self.add(f"text, {title}: CPU s", cores, used)
            (slots,) = output.glob("*/*.slots")
            digests.add(hashlib.sha256(slots.read_bytes()).hexdigest())
        check(len(digests) == 1, "threads that parse change bits")
        return digests.pop()

    def memory(self, cores: int) -> str:
        """Measure a pass over batches in memory."""
        seconds, used, digest = output_of(started(MEMORY, [str(self.log), cores, HYPER, BATCH]))
        self.add("memory: k examples/s", cores, self.options.examples / seconds / 1e3)
        self.add("memory: CPU s", cores, used)
        return str(digest)

    def table(self, cores: int) -> str:
        """Measure pulls and pushes, and the reading of lines."""
        calls = 16
        found, digest, used = output_of(started(TABLE, [self.options.rows, cores, KEYS, calls]))
        for name, seconds in found.items():
            self.add(f"table, {name}: M keys/s", cores, calls * KEYS / seconds / 1e6)
        native, lines = compiled(self.folder), used // 64
        memory = np.ones((lines, 16), np.float32)
        hashes = np.random.default_rng(4).integers(0, 2**64, (cores, KEYS), dtype=np.uint64)

        def read(own: np.ndarray) -> None:
            for _ in range(calls):
                native.lines(pointer(memory), ctypes.c_uint64(lines), pointer(own), ctypes.c_uint64(KEYS), 0)

        with concurrent.futures.ThreadPoolExecutor(cores) as pool:
            list(pool.map(read, hashes))
            start = time.perf_counter()
            list(pool.map(read, hashes))
        self.add("raw lines: M lines/s", cores, cores * calls * KEYS / (time.perf_counter() - start) / 1e6)
        return str(digest)

    def cluster(self, cores: int) -> str:
        """Measure a pass by the workers of a cluster."""
        workers = max(1, cores // 2)
        with running(max(1, workers // 2), workers=workers) as one:
            what = [one.address, workers, str(self.log), BATCH // workers, HYPER]
            done = [output_of(child) for child in [started(WORKER, what) for _ in range(workers)]]
        check(all(examples == self.options.examples for _, examples in done), "examples were lost")
        self.add("cluster: k examples/s", cores, self.options.examples / max(seconds for seconds, _ in done) / 1e3)
        return ""


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usable = sorted(os.sched_getaffinity(0))
    powers = [1 << k for k in range(len(usable).bit_length())]
    parser.add_argument("--cores", type=int, nargs="+", default=powers)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=("text", "memory", "table", "cluster"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-scaling-") as name:
        bench = Bench(options, Path(name))
        write(bench.log, options.examples)
        print("| | " + " | ".join(counted(cores, "core") for cores in options.cores) + " |")
        print("|---" * (len(options.cores) + 1) + "|")
        for kind in options.only or ("text", "memory", "table", "cluster"):
            equal = set()
            for _ in range(options.rounds):
                for cores in options.cores:
                    os.sched_setaffinity(0, usable[:cores])  # children inherit it
                    equal.add(getattr(bench, kind)(cores))
                    os.sched_setaffinity(0, usable)
            check(len(equal) == 1, f"{kind}: the number of threads changes bits")
            for title, by_cores in bench.found.items():
                digits = 2 if title.endswith(" s") else 0
                cells = [spread(by_cores[cores], digits) if cores in by_cores else "" for cores in options.cores]
                print(f"| {title} | " + " | ".join(cells) + " |", flush=True)
            bench.found.clear()
    print(f"\nshoal {shoal.__version__}, {conditions()}")


if __name__ == "__main__":
    main()
