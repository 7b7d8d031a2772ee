"""How shoal's work scales with the cores of a machine: text to model, batches in memory, a table, a cluster.

    python bench/bench_scaling.py                                  powers of two up to all cores: half an hour
    python bench/bench_scaling.py --cores 1 2 --examples 200000 --rows 1000000 --rounds 1
    python bench/bench_scaling.py --only text memory --weak        the examples grow with the cores
    python bench/bench_scaling.py --only cluster --servers 8 16 --workers 8 4        8 + 8, and 16 + 4 processes
    python bench/bench_scaling.py --only command --examples 4000000
    python bench/bench_scaling.py --only cluster command --peer /path/to/other/python      two builds in turns

Each measurement runs in processes that may use the first c cores only, with c threads. All numbers of cores take turns.
Efficiency is the rate divided by that of the least number of cores, and by the ratio of the cores.

text      `shoal train lr` as a whole process, Criteo's text of bench_text_to_model.py, with one thread that parses and
          with one for every four cores
memory    one pass of the same examples from batches in memory, into a table that has their rows
fm        the same of a factorization machine with 8 factors, from a quarter of the examples
deepfm    the same of DeepFM in PyTorch (dim 8, one hidden layer of 64), from a twentieth of them
table     batches of 2^20 given keys (sorted inside the call) of a table of FTRL rows: pull, push; "raw" is the reading
          of one random line of 64 bytes a key, prefetched, from as much memory, by a program in C (needs a C compiler)
cluster   the fit of workers of one thread each on shares of the text, under BSP, SSP(2) and ASP; all processes share c
          cores. Without --servers and --workers, half as many workers as cores, and half as many servers as workers.
          CPU s is that of all workers in their fits, and of all servers
command   `shoal launch --servers 1 --workers 1 -- shoal train lr --cluster` as a whole command: its time divided by the
          CPU time of its busiest process
skew      4 servers, 2 workers in batches of 8,192 examples whose 39 keys are drawn by Zipf's law with exponent 1.2, so
          that one key is a sixth of all: CPU time, bytes and rows of the busiest server, divided by those of the mean
network   one server and one worker without links, and each behind a link of 10 and of 1 Gbit/s (needs root): with
          filters, and under ASP with a cache; not by default

Checks: every example was learned once. The same examples give the same bits for each number of cores and in each round,
except in a cluster of several workers under SSP and ASP, and of DeepFM, whose products torch cuts by its threads. Under
SSP and ASP one worker has the same bits in each round.
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import shoal
from bench_cluster_lr import output_of, started
from bench_monitoring import counted as counted_at
from bench_monitoring import ports_of
from bench_text_to_model import compiled, pointer, process, write
from bench_vw import HYPER
from figures import check, conditions, cpu_seconds, spread
from network import inside, placed
from shoal.base.plural import counted
from shoal.cluster.launch.local_cluster import running

BATCH = 16384
KEYS = 1 << 20
SHARE = {"memory": 1, "fm": 4, "deepfm": 20}  # of the examples: one in so many
CONSISTENCIES = {"BSP": "bsp", "SSP(2)": "ssp:2", "ASP": "asp"}
Case = Callable[[], None]
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {  # filters and cache
    "": ({}, None),
    "key caching": ({"key_caching": True}, None),
    "zeros": ({"zeros": True}, None),
    "bfloat16": ({"gradients": "bfloat16", "weights": "bfloat16"}, None),
    "all three": ({"key_caching": True, "zeros": True, "gradients": "bfloat16", "weights": "bfloat16"}, None),
    "cache": ({}, {"rows": 2_000_000, "staleness": 8}),
}
EXACT = ("", "key caching", "zeros")
KINDS = ("text", "memory", "fm", "deepfm", "table", "cluster", "command", "skew", "network")
COUNTERS = {  # of a server
    "bytes": ("shoal_server_bytes_in_total", "shoal_server_bytes_out_total"),
    "rows pulled and pushed": ("shoal_table_rows_pulled_total", "shoal_table_rows_pushed_total"),
    "rows": ("shoal_server_rows",),
}

MEMORY = """
import json, sys, time
import shoal
kind, path, threads, hyper, batch_size = json.loads(sys.argv[1])
with shoal.local(threads=threads) as store:
    reader = shoal.read_criteo(path, batch_size=batch_size)
    batches = list(reader.with_fields() if kind == "deepfm" else reader)
    if kind == "memory":
        model = shoal.LogisticRegression(shoal.FTRL(**hyper), store=store)
    elif kind == "fm":
        model = shoal.FactorizationMachine(8, optimizer=shoal.FTRL(**hyper), store=store)
    else:
        import torch
        torch.manual_seed(7)
        torch.set_num_threads(threads)
        names = [f"C{k}" for k in range(1, 27)]
        tables = shoal.torch.tables(store, shoal.Adagrad(lr=0.05), init=shoal.Normal(0.01, seed=7))
        features = shoal.torch.Features(names, form="criteo")
        module = shoal.torch.models.DeepFM(tables, features, dim=8, hidden=(64,))
        optimizer = torch.optim.Adam(module.parameters(), lr=0.002)
        model = shoal.torch.ClickModel(module, store=store, optimizer=optimizer)
    model.fit(batches, progress=False)
    start, used = time.perf_counter(), time.process_time()
    model.fit(batches, progress=False)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    found = model.history.passes[-1].metrics
    print(json.dumps([seconds, used, found.examples, found.logloss, [one.digest() for one in model.tables]]))
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
        start, used = time.perf_counter(), time.process_time()
        for batch in batches:
            call(batch)
        found[name] = time.perf_counter() - start, time.process_time() - used
    print(json.dumps([found, table.digest(), table.stats().bytes]))
"""

WORKER = """
import json, sys, time
import shoal
from figures import cpu_seconds
address, workers, servers, path, batch_size, hyper, consistency, filters, cache = json.loads(sys.argv[1])
how = {"filters": shoal.Filters(**filters)} if filters else {}
if cache:
    how["cache"] = shoal.Cache(**cache)
with shoal.connect(address, workers=workers, threads=1, timeout=300, consistency=consistency, **how) as store:
    model = shoal.LogisticRegression(shoal.FTRL(**hyper), store=store)
    share = shoal.read_criteo(path, batch_size=batch_size).split(store.rank, workers)
    store.barrier()
    start, used, served = time.perf_counter(), time.process_time(), list(map(cpu_seconds, servers))
    before = store.metrics()
    model.fit(share, progress=False)
    used, after = time.process_time() - used, store.metrics()
    sent = sum(after[name] - before[name] for name in ("bytes_sent", "bytes_received"))
    store.barrier()
    seconds = time.perf_counter() - start
    served = [cpu_seconds(pid) - spent for pid, spent in zip(servers, served)]
    digest = model.table.digest()
    store.barrier()
    print(json.dumps([seconds, used, served, sent, model.examples, model.history.passes[-1].metrics.logloss, digest]))
"""

SKEW = """
import json, sys
import numpy as np
import shoal
address, rank, examples, consistency = json.loads(sys.argv[1])
random = np.random.default_rng([7, rank])
indptr = np.arange(0, 39 * 8192 + 1, 39)
batches, first, distinct = [], 0, 0
for _ in range(examples // 16384):
    keys = np.minimum(random.zipf(1.2, 39 * 8192), 10_000_000).astype(np.uint64)
    batches.append(shoal.Batch((keys[::39] == 1).astype(np.float32), indptr, keys, None))
    first, distinct = first + (keys == 1).mean(), distinct + len(np.unique(keys)) / len(keys)
with shoal.connect(address, workers=2, rank=rank, threads=1, timeout=300, consistency=consistency) as store:
    model = shoal.LogisticRegression(shoal.FTRL(alpha=0.01), store=store)
    store.barrier()
    model.fit(batches, progress=False)
    store.barrier()
    print(json.dumps([model.examples, first / len(batches), distinct / len(batches)]))
"""


def command(*arguments: object) -> list[str]:
    """Return the command `shoal` of this installation, with arguments."""
    shell = str(Path(sys.executable).with_name("shoal"))
    return [*([shell] if os.path.exists(shell) else [sys.executable, "-m", "shoal"]), *map(str, arguments)]


def hyper() -> list[str]:
    """Return the options of FTRL."""
    return [word for key, value in HYPER.items() for word in (f"--{key}", str(value))]


def descendants(pid: int) -> list[int]:
    """Return a process and all that it and its own have started and that have not ended."""
    found = [pid]
    for one in found:
        for task in Path("/proc", str(one), "task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                found += map(int, task.read_text().split())
    return found


def processes(line: list[str]) -> tuple[float, list[float]]:
    """Run a command; return its seconds, and the CPU seconds of each of its processes, read 50 times a second."""
    spent: dict[int, float] = {}
    start = time.perf_counter()
    child = subprocess.Popen(line)
    while child.poll() is None:
        for pid in descendants(child.pid):
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                spent[pid] = times.user + times.system
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.02)
    check(child.returncode == 0, f"{line[0]} ends with status {child.returncode}")
    return time.perf_counter() - start, sorted(spent.values())


class Bench:
    """The measurements, each of which appends to ``found[title][cores]``."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.bits: dict[tuple[object, ...], object] = {}
        self.build = ""
        self.chosen = [(name, CONSISTENCIES[name]) for name in options.consistency]
        most = self.examples(max(options.cores))
        write(self.log(most), most)

    def examples(self, cores: int) -> int:
        """Return the number of examples for so many cores."""
        return int(self.options.examples) * (cores if self.options.weak else 1)

    def log(self, examples: int) -> Path:
        """Return the file of the first examples."""
        path, most = (self.folder / f"{n}.tsv" for n in (examples, self.examples(max(self.options.cores))))
        if not path.exists() and most.exists():
            with most.open("rb") as whole, path.open("wb") as part:
                part.writelines(islice(whole, examples))
        return path

    def cases(self, kind: str, cores: int) -> list[Case]:
        """Return the measurements of a kind, each of which takes turns with that of another build."""
        several: dict[str, Callable[[int], list[Case]]] = {"cluster": self.cluster, "command": self.command}
        several |= {"skew": self.skew, "network": self.network}
        if kind in several:
            return several[kind](cores)
        return [partial(self.memory, cores, kind) if kind in SHARE else partial(getattr(self, kind), cores)]

    def add(self, title: str, cores: int, figure: float) -> None:
        """Record a figure."""
        self.found[self.build + title][cores].append(figure)

    def same(self, bits: object, *what: object) -> None:
        """Check that the bits of a result are those of the first time."""
        check(self.bits.setdefault(what, bits) == bits, f"{what}: the bits differ")

    def train(self, log: Path, output: Path, batch_size: int, *more: object) -> list[str]:
        """Return the command that trains on a log."""
        line = command("train", "lr", "--data", log, "--output", output, "--overwrite", "--format", "criteo", "--quiet")
        return [*line, "--batch-size", str(batch_size), *hyper(), *map(str, more)]

    def digest(self, output: Path) -> str:
        """Return the digest of a saved model's table, however many files servers have written."""
        with shoal.LogisticRegression.load(output) as model:
            return model.table.digest()

    def text(self, cores: int) -> None:
        """Measure whole processes."""
        examples, output = self.examples(cores), self.folder / "model"
        for readers in dict.fromkeys((1, max(1, cores // 4))):
            line = self.train(self.log(examples), output, BATCH, "--threads", cores, "--reader-threads", readers)
            seconds, used, _ = process(line)
            title = "text, one thread parses" if readers == 1 else "text, more threads parse"
            self.add(f"{title}: k examples/s", cores, examples / seconds / 1e3)
            self.add(f"{title}: CPU s", cores, used)
            self.same(self.digest(output), "text", examples)

    def memory(self, cores: int, kind: str) -> None:
        """Measure a pass over batches in memory."""
        examples = self.examples(cores) // SHARE[kind]
        what = [kind, str(self.log(examples)), cores, HYPER, 4096 if kind == "deepfm" else BATCH]
        seconds, used, learned, logloss, digest = output_of(started(MEMORY, what))
        check(learned == examples, f"{kind}: {learned} of {examples} examples were learned")
        self.same(round(logloss, 2) if kind == "deepfm" else digest, kind, examples)
        self.add(f"{kind}: k examples/s", cores, examples / seconds / 1e3)
        self.add(f"{kind}: CPU s", cores, used)

    def table(self, cores: int) -> None:
        """Measure pulls and pushes, and the reading of lines."""
        calls = 16 * (cores if self.options.weak else 1)
        found, digest, size = output_of(started(TABLE, [self.options.rows, cores, KEYS, calls]))
        self.same(digest, "table", calls)
        for name, (seconds, used) in found.items():
            self.add(f"table, {name}: M keys/s", cores, calls * KEYS / seconds / 1e6)
            self.add(f"table, {name}: CPU s", cores, used)
        native, lines = compiled(self.folder), size // 64
        memory = np.ones((lines, 16), np.float32)
        hashes = np.random.default_rng(4).integers(0, 2**64, (cores, KEYS), dtype=np.uint64)

        def read(own: np.ndarray) -> None:
            for _ in range(16):
                native.lines(pointer(memory), ctypes.c_uint64(lines), pointer(own), ctypes.c_uint64(KEYS), 0)

        with concurrent.futures.ThreadPoolExecutor(cores) as pool:
            list(pool.map(read, hashes))
            start = time.perf_counter()
            list(pool.map(read, hashes))
        self.add("raw lines: M lines/s", cores, cores * 16 * KEYS / (time.perf_counter() - start) / 1e6)

    def cluster(self, cores: int) -> list[Case]:
        """Return the measurements of a pass by the workers of clusters."""
        examples, own = self.examples(cores), max(1, cores // 2)
        sizes = list(zip(self.options.servers or [max(1, own // 2)], self.options.workers or [own], strict=True))
        return [
            partial(self.fit, cores, examples, *size, name, (str(self.log(examples)), batch_size, HYPER, consistency))
            for size in sizes
            for batch_size in self.options.batch_sizes
            for name, consistency in self.chosen
        ]

    def network(self, cores: int) -> list[Case]:
        """Return the measurements of one server and one worker behind links."""
        examples = self.examples(cores)
        return [
            partial(self.fit, cores, examples, 1, 1, name, what, (rate, way))
            for batch_size in self.options.batch_sizes
            for name, consistency in self.chosen
            for what in [(str(self.log(examples)), batch_size, HYPER, consistency)]
            for rate in (None, *self.options.rates)
            for way in WAYS
            if consistency == "asp" or WAYS[way][1] is None
        ]

    def fit(
        self,
        cores: int,
        examples: int,
        servers: int,
        workers: int,
        name: str,
        what: tuple[Any, ...],
        link: tuple[str | None, str] = (None, ""),
    ) -> None:
        """Measure one fit on a cluster of its own."""
        rate, way = link
        with placed(servers, workers, self.options.server_threads, rate) as (address, pids, places):
            children = []
            for place in places:
                with inside(place):
                    children.append(started(WORKER, [address, workers, pids, *what, *WAYS[way]]))
            seconds, used, served, sent, learned, losses, digests = zip(*map(output_of, children), strict=True)
        check(set(learned) == {examples}, f"{learned} of {examples} examples were learned")
        if (workers == 1 or name == "BSP") and way in EXACT:
            self.same(set(digests), "" if name == "BSP" else self.build + name, workers, examples, what[1])
        where = ", ".join(filter(None, (f"{servers} + {workers}", name, f"batches of {what[1]:,}", rate, way)))
        self.add(f"{where}: k examples/s", cores, examples / max(seconds) / 1e3)
        self.add(f"{where}: log-loss", cores, losses[0])
        self.add(f"{where}: workers CPU s", cores, sum(used))
        self.add(f"{where}: servers CPU s", cores, max(map(sum, served)))
        if rate or way:
            self.add(f"{where}: bytes an example", cores, sum(sent) / examples)

    def skew(self, cores: int) -> list[Case]:
        """Return the measurements of servers under skewed keys."""
        return [partial(self.skewed, cores, name, consistency) for name, consistency in self.chosen]

    def skewed(self, cores: int, name: str, consistency: str) -> None:
        """Measure how evenly servers are busy."""
        with running(4, workers=2, metrics_port="*") as one:
            ports, pids = ports_of(one)[1:], [child.process.pid for child in one.servers]
            before = [cpu_seconds(pid) for pid in pids]
            children = [started(SKEW, [one.address, k, self.examples(cores), consistency]) for k in range(2)]
            examples, first, distinct = zip(*map(output_of, children), strict=True)
            figures = {"CPU": [cpu_seconds(pid) - spent for pid, spent in zip(pids, before, strict=True)]}
            for what, counters in COUNTERS.items():
                figures[what] = [sum(counted_at(port, counter) for counter in counters) for port in ports]
        check(set(examples) == {self.examples(cores) // 16384 * 16384}, "examples were lost")
        self.add(f"skew, {name}: share of the first key", cores, first[0])
        self.add(f"skew, {name}: share of distinct keys in a batch", cores, distinct[0])
        for what, each in figures.items():
            self.add(f"skew, {name}: {what}, busiest / mean", cores, max(each) / statistics.mean(each))

    def command(self, cores: int) -> list[Case]:
        """Return the measurements of whole commands that launch a cluster."""
        return [
            partial(self.launch, cores, batch_size, name, consistency)
            for batch_size in self.options.batch_sizes
            for name, consistency in self.chosen
        ]

    def launch(self, cores: int, batch_size: int, name: str, consistency: str) -> None:
        """Measure one command."""
        examples, output = self.examples(cores), self.folder / "model"
        more = "--threads", 1, "--cluster", "--consistency", consistency
        line = self.train(self.log(examples), output, batch_size, *more)
        seconds, used = processes([*command("launch", "--servers", 1, "--workers", 1, "--"), *line])
        threads = 0 if name == "BSP" else cores  # a server's default: SSP and ASP round by the pushes of each
        self.same(self.digest(output), self.build, "command", name, examples, batch_size, threads)
        where = f"command, {name}, batches of {batch_size:,}"
        self.add(f"{where}: k examples/s", cores, examples / seconds / 1e3)
        self.add(f"{where}: CPU s", cores, sum(used))
        self.add(f"{where}: busiest process CPU s", cores, used[-1])
        self.add(f"{where}: time / CPU of the busiest", cores, seconds / used[-1])


def report(found: dict[str, dict[int, list[float]]], cores: list[int]) -> None:
    """Print the rows of a kind, and the efficiency behind each rate."""
    for title, rounds in found.items():
        digits = 5 if title.endswith("log-loss") else 0 if title.endswith("/s") else 2
        cells = [spread(rounds[c], digits) if c in rounds else "" for c in cores]
        print(f"| {title} | " + " | ".join(cells) + " |", flush=True)
        if title.endswith("/s") and len(rounds) > 1:
            rates = {c: statistics.median(some) / c for c, some in rounds.items()}
            cells = [f"{rates[c] / rates[min(rates)]:.2f}" if c in rates else "" for c in cores]
            print(f"| {title.rpartition(':')[0]}: efficiency | " + " | ".join(cells) + " |")


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usable = sorted(os.sched_getaffinity(0))
    powers = [1 << k for k in range(len(usable).bit_length())]
    parser.add_argument("--cores", type=int, nargs="+", default=powers)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--weak", action="store_true", help="so many examples for each core")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS[:-1])
    parser.add_argument("--servers", type=int, nargs="+", help="of each cluster")
    parser.add_argument("--workers", type=int, nargs="+", help="of each cluster")
    parser.add_argument("--server-threads", type=int, default=1)
    parser.add_argument("--consistency", nargs="+", choices=CONSISTENCIES, default=list(CONSISTENCIES))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4096, BATCH], help="of a cluster's worker")
    parser.add_argument("--rates", nargs="+", default=["10gbit", "1gbit"], help="of links")
    parser.add_argument("--peer", metavar="DIR", help="the directory `python` of another build, for its processes")
    options = parser.parse_args()
    if len(options.servers or [0]) != len(options.workers or [0]):
        parser.error("--servers and --workers: as many numbers of both")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parent)]))
    own, builds = os.environ["PYTHONPATH"], [""] if options.peer is None else ["peer: ", "shoal: "]
    with tempfile.TemporaryDirectory(prefix="shoal-scaling-") as name:
        bench = Bench(options, Path(name))
        print("| | " + " | ".join(counted(cores, "core") for cores in options.cores) + " |")
        print("|---" * (len(options.cores) + 1) + "|")
        for kind in options.only:
            for _ in range(options.rounds):
                for cores in options.cores:
                    os.sched_setaffinity(0, usable[:cores])  # children inherit it
                    for case, build in product(bench.cases(kind, cores), builds):
                        os.environ["PYTHONPATH"] = f"{options.peer}{os.pathsep}{own}" if build == "peer: " else own
                        bench.build = build
                        case()
                    os.sched_setaffinity(0, usable)
            report(bench.found, options.cores)
            bench.found.clear()
    print(f"\nshoal {shoal.__version__}, {conditions()}")


if __name__ == "__main__":
    main()
