"""What a call costs a worker of a cluster, compared with messages of the same sizes over raw libzmq.

    python bench/bench_client.py                       every mode: about five minutes; needs a C++ compiler, and torch
    python bench/bench_client.py lone pushes --turns 9
    python bench/bench_client.py --json client.json
    python bench/bench_client.py lone --against ../other/python        another build of shoal takes turns with this one
    python bench/bench_client.py --compare before.json after.json

The worker is this process, and uses the public interface of shoal alone: the same file measures any build that
PYTHONPATH names. One server with one thread, dim 1, SGD, a million rows, unless a mode says otherwise. Modes:

    lone     one pull after the other, of 10 to 100,000 keys in random order
    pushes   four pushes in flight; the oldest is awaited before the next one begins
    keys     CPU time for each key of calls of 100,000, with their keys sorted by the call, and sorted in advance
    rates    keys a second of pulls and pushes of 1,000 and 100,000 keys, dim 1 and 16, one and four in flight
    ways     a step of a pull, a push, its result and a tick with 1,000 keys each: BSP, SSP, ASP, two servers, CURVE
             keys, filters, a cache, a replica
    deepfm   a step of DeepFM under BSP, 2,048 examples of ten fields, each with tables of its own (an embedding of
             dim 16 and a linear weight): on the cluster, on a local store, and the network alone with fixed rows.
             "rows" is what is left of a step without that of the network
    train    `shoal train lr` over a million lines of Criteo's format as a whole process, with one thread: alone, and
             as the worker of `shoal launch --servers 1 --workers 1`

The peers of the first four modes are described in client/peers.py: pyzmq, and C++ on both sides. All take turns; a
figure is the median (minimum-maximum) of the turns, and a percentile is that of the calls of a turn. CPU time is that
of all threads of this process for each call, that of libzmq included; "others" is that of the processes which answer.
"local" is a table in this process with the same rows: what a call costs without a network. The kernel chooses the
cores, or with --pin the worker has one core and all other processes a second one, except in the mode "train".

Checks: every row is what was pushed to it, exactly, also by way of filters and caches; DeepFM has the same losses on a
cluster as on a local store, and so has `shoal train lr`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil

import shoal
from client.peers import Calls, Seconds, System, TableCalls, peers, timed
from client.results import Results
from figures import check, conditions, cpu_seconds

ROWS = 1_000_000
LONE, PUSHES, MANY = (10, 100, 1_000, 100_000), (10, 1_000, 100_000), 100_000
RATES_KEYS, RATES_DIMS = (1_000, 100_000), (1, 16)
FIELDS, EXAMPLES, DIM, HIDDEN = 10, 2_048, 16, (128, 64)  # of DeepFM
IDS = 100_000  # of a field
LINES, BATCHES = 1_000_000, (1_024, 16_384)  # of `shoal train lr`
WAYS: dict[str, dict[str, Any]] = {
    "ASP": {},
    "BSP": {"consistency": shoal.BSP()},
    "SSP(4)": {"consistency": shoal.SSP(4)},
    "two servers": {"servers": 2},
    "CURVE keys": {"curve": True},
    "key caching": {"filters": shoal.Filters(key_caching=True)},
    "key caching, zeros, bfloat16": {
        "filters": shoal.Filters(key_caching=True, zeros=True, gradients="bfloat16", weights="bfloat16")
    },
    "SSP(8), cache": {"consistency": shoal.SSP(8), "cache": shoal.Cache(rows=100_000, staleness=4)},
    "two servers, a replica": {"servers": 2, "replicas": 1},
}


@dataclass(frozen=True, slots=True)
class Spent:
    """The calls of a turn."""

    latencies: Seconds
    seconds: float
    cpu: float  # seconds of this process
    others: float  # and of those that answer


class Bench:
    """The options of a run and its results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results = Results()
        cores = sorted(os.sched_getaffinity(0))
        self.cores = cores[:2] if options.pin and len(cores) > 1 else []

    @property
    def turns(self) -> range:
        """The turns; the first one is not counted."""
        return range(-1, self.options.turns)

    def pin(self) -> None:
        """Give this process one core, and its children another one."""
        if not self.cores:
            return
        for pid, core in [(os.getpid(), self.cores[0]), *((one, self.cores[1]) for one in children())]:
            for thread in Path("/proc", str(pid), "task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), {core})

    @contextlib.contextmanager
    def store(self, servers: int = 1, *, curve: bool = False, **settings: Any) -> Iterator[shoal.Store]:
        """Launch a cluster, pinned; ASP unless the settings say otherwise."""
        with contextlib.ExitStack() as stack:
            if curve:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                keys = os.path.join(folder, "keys")
                subprocess.run(
                    [sys.executable, "-m", "shoal", "keygen", "--output", keys], check=True, stdout=subprocess.DEVNULL
                )
                stack.enter_context(mock.patch.dict(os.environ, {"SHOAL_CURVE": keys}))
            settings = {"consistency": shoal.ASP(), "threads": 1, "timeout": 120.0, **settings}
            store = stack.enter_context(shoal.launch(servers, **settings))
            self.pin()
            yield store

    def spent(self, others: list[int], run: Callable[[float], Seconds], turn: int) -> Spent:
        """Make calls for a turn: how many, and what they have cost."""
        there, here, start = cpu_of(others), time.process_time(), time.perf_counter()
        latencies = run(self.options.seconds if turn >= 0 else 0.1)
        seconds, here, there = time.perf_counter() - start, time.process_time() - here, cpu_of(others) - there
        return Spent(latencies, seconds, here, there)

    def measure(self, mode: str, case: str, system: System, calls: Calls, turn: int) -> None:
        """Make calls for a turn, and note what each has taken."""
        spent = self.spent(system.others(), functools.partial(system.measure, calls), turn)
        if turn < 0:
            return
        number = len(spent.latencies)
        if calls.depth == 1:
            p10, p50, p90 = np.percentile(spent.latencies, [10, 50, 90]) * 1e6
            self.results.add(mode, case, system.name, p10_us=p10, p50_us=p50, p90_us=p90)
        else:
            self.results.add(mode, case, system.name, calls_per_s=number / spent.seconds)
        each = 1e6 / number
        self.results.add(mode, case, system.name, CPU_us=spent.cpu * each, others_us=spent.others * each)

    # ---- calls of a table beside raw messages ------------------------------------------------------------------------

    def lone(self) -> None:
        """Measure pulls, one after the other."""
        self._beside_peers("lone", [(f"pull, {n:,} keys", Calls("pull", n)) for n in LONE])

    def pushes(self) -> None:
        """Measure pushes with four in flight."""
        self._beside_peers("pushes", [(f"push, {n:,} keys", Calls("push", n, depth=4)) for n in PUSHES])

    @contextlib.contextmanager
    def _tables(self, dim: int = 1) -> Iterator[list[System]]:
        """Make the table of a cluster, both peers, and a local table; check the tables at the end."""
        with self.store() as store, shoal.local(threads=1) as near, peers() as raw:
            table, local = (
                TableCalls(name, one.table("t", dim=dim, optimizer=shoal.SGD(lr=1.0)), self.options.rows)
                for name, one in (("table", store), ("local", near))
            )
            self.pin()
            yield [table, *raw, local]
            table.check()
            local.check()

    def _beside_peers(self, mode: str, what: Sequence[tuple[str, Calls]]) -> None:
        with self._tables() as systems:
            for turn in self.turns:
                for case, calls in what:
                    for system in in_turn(systems, turn):
                        self.measure(mode, case, system, calls, turn)
                    if turn >= 0:
                        self._ratios(mode, case)
        self.results.show(mode)

    def _ratios(self, mode: str, case: str) -> None:
        """Note what the table's calls take compared with those of the peers in the same turn."""
        found = {name: self.results.last(mode, case, name) for name in ("table", "pyzmq", "C++", "local")}
        figure = "p50 us" if "p50 us" in found["table"] else "calls/s"
        of = {name: figures[figure] for name, figures in found.items()}
        if figure == "p50 us":
            of["C++ + local"] = of["C++"] + of["local"]
        ratios = {f"{figure} / {peer}": of["table"] / of[peer] for peer in of if peer not in ("table", "local")}
        self.results.add(mode, case, "table", **ratios)

    def keys(self) -> None:
        """Measure the CPU time of a key."""
        with self.store() as store, peers() as raw:
            far = store.table("t", optimizer=shoal.SGD(lr=1.0))
            table = TableCalls("table", far, self.options.rows)
            self.pin()
            pool = table.pool(MANY)
            sorted_pool = [store.key_batch(keys) for keys in pool]
            grads, out = np.full((MANY, 1), 2.0**-6, np.float32), np.empty((MANY, 1), np.float32)
            ways: dict[str, Callable[[int], Any]] = {
                "sort": lambda k: store.key_batch(pool[k]),
                "pull": lambda k: far.pull(pool[k]),
                "push": lambda k: far.push(pool[k], grads).result(),
                "pull, sorted": lambda k: far.pull_unique(sorted_pool[k], out=out),
                "push, sorted": lambda k: far.push_unique(sorted_pool[k], grads).result(),
            }
            for turn in self.turns:
                for name, call in ways.items():

                    def begin(number: int, call: Callable[[int], Any] = call) -> Callable[[], Any]:
                        return functools.partial(call, number % len(pool))

                    number = self._of_a_key(name, table, turn, functools.partial(timed, begin, 1))
                    if name.startswith("push"):
                        table.count(MANY, number)
                for peer in raw:
                    for op in ("pull", "push"):
                        self._of_a_key(op, peer, turn, functools.partial(peer.measure, Calls(op, MANY)))
            table.check()
        self.results.show("keys")

    def _of_a_key(self, case: str, system: System, turn: int, run: Callable[[float], Seconds]) -> int:
        """Make calls for a turn, and note the CPU time of a key; return their number."""
        spent = self.spent(system.others(), run, turn)
        each = 1e9 / len(spent.latencies) / MANY
        if turn >= 0:
            cpu, others = spent.cpu * each, spent.others * each
            self.results.add("keys", case, system.name, CPU_ns_per_key=cpu, others_ns_per_key=others)
        return len(spent.latencies)

    def rates(self) -> None:
        """Measure keys a second of wide and narrow rows, with one call and with four in flight."""
        for dim in RATES_DIMS:
            with self._tables(dim) as systems:
                for n, op, depth, turn in itertools.product(RATES_KEYS, ("pull", "push"), (1, 4), self.turns):
                    case = f"{op}, dim {dim}, {n:,} keys, {depth} in flight"
                    calls, found = Calls(op, n, depth, dim), dict[str, float]()
                    for system in in_turn(systems, turn):
                        spent = self.spent(system.others(), functools.partial(system.measure, calls), turn)
                        keys = n * len(spent.latencies)
                        found[system.name] = keys / spent.seconds
                        if turn >= 0:
                            rate, cpu, others = (
                                keys / spent.seconds / 1e6,
                                spent.cpu / keys * 1e9,
                                spent.others / keys * 1e9,
                            )
                            self.results.add("rates", case, system.name, million_keys_per_s=rate, CPU_ns_per_key=cpu,
                                             others_ns_per_key=others)  # fmt: skip
                    if turn >= 0:
                        self.results.add("rates", case, "table", of_pyzmq=found["table"] / found["pyzmq"])
        self.results.show("rates")

    def ways(self) -> None:
        """Measure steps under every consistency, with keys, filters, a cache, a replica."""
        for case, settings in WAYS.items():
            with self.store(**settings) as store:
                self._way(case, store)
        self.results.show("ways")

    def _way(self, case: str, store: shoal.Store) -> None:
        n, rows, rounds = 1_000, 20_000, 8
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        random = np.random.default_rng(6)
        pool = [random.choice(rows, n, replace=False).astype(np.uint64) for _ in range(rounds)]
        grads = np.full((n, 1), 2.0**-6, np.float32)  # whole numbers of these, below 256, are exact in bfloat16
        pulls: list[float] = []
        pushes: list[float] = []

        def steps(seconds: float) -> Seconds:
            clock = time.perf_counter
            pulls.clear()
            pushes.clear()
            end = clock() + seconds
            while clock() < end:
                for sign in (grads, -grads):  # their sums are 0
                    for keys in pool:
                        start = clock()
                        table.pull(keys)
                        middle = clock()
                        table.push(keys, sign).result()
                        store.tick()
                        pulls.append(middle - start)
                        pushes.append(clock() - middle)
            return np.add(pulls, pushes, dtype=np.float64)

        others = children()
        for turn in self.turns:
            spent = self.spent(others, steps, turn)
            if turn >= 0:
                pull, push, each = np.median(pulls) * 1e6, np.median(pushes) * 1e6, 1e6 / len(pulls)
                self.results.add("ways", case, "table", pull_p50_us=pull, push_and_tick_p50_us=push,
                                 CPU_us=spent.cpu * each, others_us=spent.others * each)  # fmt: skip
        times = np.zeros((rows, 1), np.float32)
        for keys in pool:
            table.push(keys, grads).result()
            times[keys] += 1
        store.tick()
        store.flush()
        far = table.pull(np.arange(rows, dtype=np.uint64))
        check(np.array_equal(far, -times * grads[0, 0]), f"{case}: the rows are not what was pushed")

    # ---- models ------------------------------------------------------------------------------------------------------

    def deepfm(self) -> None:
        """Measure a step of DeepFM with tables for each field."""
        import torch

        torch.set_num_threads(1)
        random = np.random.default_rng(8)
        ids = random.zipf(1.05, (32, EXAMPLES, FIELDS)) * 7_368_787 % IDS + np.arange(FIELDS) * IDS
        clicks = (random.random((32, EXAMPLES)) < 0.1 + 0.4 * (ids[:, :, 0] % 2)).astype(np.float32)
        with self.store(consistency=shoal.BSP()) as far, shoal.local(threads=1) as near:
            steps = {"cluster": deepfm_step(far), "local": deepfm_step(near), "network alone": deepfm_step(None)}
            self.pin()
            others, losses = children(), dict[str, list[float]]()
            for turn in self.turns:
                for name in in_turn(list(steps), turn):
                    there, here, start = cpu_of(others), time.process_time(), time.perf_counter()
                    losses.setdefault(name, []).extend(
                        steps[name](torch.from_numpy(ids[k]), torch.from_numpy(clicks[k])) for k in range(len(ids))
                    )
                    spent, here = time.perf_counter() - start, time.process_time() - here
                    if turn >= 0:
                        self.results.add(
                            "deepfm", "a step", name, ms=spent / len(ids) * 1e3, CPU_ms=here / len(ids) * 1e3,
                            others_ms=(cpu_of(others) - there) / len(ids) * 1e3,
                        )  # fmt: skip
                if turn >= 0:
                    alone = self.results.last("deepfm", "a step", "network alone")
                    for name in ("cluster", "local"):
                        whole = self.results.last("deepfm", "a step", name)
                        rows, cpu = (whole[figure] - alone[figure] for figure in ("ms", "CPU ms"))
                        self.results.add("deepfm", "a step", name, rows_ms=rows, rows_CPU_ms=cpu)
            is_same = np.allclose(losses["cluster"], losses["local"], atol=1e-6)
            check(is_same, "the losses are not those of a local store")
            check(np.mean(losses["local"][-32:]) < np.mean(losses["local"][:32]), "the loss has not fallen")
        self.results.show("deepfm")

    def train(self) -> None:
        """Measure `shoal train lr`, alone and as a worker."""
        from shoal.tools.planted import PlantedModel, write_log

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            log = Path(self.options.log or folder / "log.tsv").absolute()
            if not log.exists():
                write_log(log, PlantedModel(seed=1), LINES, 0)
            for turn in range(self.options.turns):
                for size in BATCHES:
                    case = f"batches of {size:,}"
                    metrics = {}
                    for system in in_turn(["alone", "cluster"], turn):
                        found, metrics[system] = trained(folder, log, size, on_cluster=system == "cluster")
                        self.results.add("train", case, system, **found)
                    check(len(set(metrics.values())) == 1, f"the metrics differ: {metrics}")
                    cluster, alone = (self.results.last("train", case, system) for system in ("cluster", "alone"))
                    self.results.add("train", case, "cluster", CPU_of_alone=cluster["CPU s"] / alone["CPU s"])
        self.results.show("train")


MODES: dict[str, Callable[[Bench], None]] = {
    name: getattr(Bench, name) for name in ("lone", "pushes", "keys", "rates", "ways", "deepfm", "train")
}


# ---- parts -----------------------------------------------------------------------------------------------------------


def in_turn(what: list[Any], turn: int) -> list[Any]:
    """Rotate: another one begins in each turn."""
    first = turn % len(what)
    return what[first:] + what[:first]


def children() -> list[int]:
    """Return the descendants of this process."""
    return [child.pid for child in psutil.Process().children(recursive=True)]


def cpu_of(pids: list[int]) -> float:
    """Return the CPU seconds of processes."""
    return sum(cpu_seconds(pid) for pid in pids)


def deepfm_step(store: shoal.Store | None) -> Callable[[Any, Any], float]:
    """Make DeepFM over tables of a store, or over fixed rows, and return the function that makes a step of it."""
    import torch
    from torch import Tensor, nn

    class Fixed(nn.Module):
        """Rows that require a gradient, as those of a table."""

        def __init__(self, dim: int) -> None:
            super().__init__()
            self.rows = torch.randn(EXAMPLES, dim) / 100

        def forward(self, keys: Tensor) -> Tensor:
            return self.rows.detach().requires_grad_()

    def make_fixed(name: str, dim: int) -> nn.Module:
        return Fixed(dim)

    torch.manual_seed(7)
    make = make_fixed if store is None else shoal.torch.tables(store, shoal.Adagrad(lr=0.05), seed=7)
    module = shoal.torch.models.DeepFM(make, FIELDS, dim=DIM, hidden=HIDDEN, per_field=True)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.001, fused=True)
    loss_of = nn.BCEWithLogitsLoss()

    def step(keys: Tensor, labels: Tensor) -> float:
        loss = loss_of(module(shoal.torch.Inputs(keys)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if store is not None:
            store.tick()
        return float(loss.detach())

    return step


def trained(folder: Path, log: Path, batch_size: int, *, on_cluster: bool) -> tuple[dict[str, float], str]:
    """Run `shoal train lr` in a folder; return what its process has used, and its metrics as printed."""
    used = folder / "used.json"
    command = [sys.executable, "-m", "shoal", "train", "lr", "--data", str(log), "--format", "criteo", "--threads", "1"]
    command += ["--batch-size", str(batch_size), "--output", "model", *(["--cluster"] if on_cluster else [])]
    command = [sys.executable, str(Path(__file__).absolute()), "--watch", str(used), *command]
    if on_cluster:
        command = [sys.executable, "-m", "shoal", "launch", "--servers", "1", "--workers", "1", *command]
    shutil.rmtree(folder / "model", ignore_errors=True)
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    check(ran.returncode == 0, f"`shoal train` has failed: {ran.stderr[-2000:]}")
    metrics = re.search(r"logloss .* examples,", ran.stdout)
    if metrics is None:
        raise SystemExit(f"no metrics in {ran.stdout!r}")
    return json.loads(used.read_text()), metrics[0]


def watch(path: str, *command: str) -> None:
    """Run a command; write its CPU seconds, its seconds by the clock and its peak memory in MB."""
    start = time.perf_counter()
    child = subprocess.Popen(command)
    _, status, used = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    found = {"CPU s": used.ru_utime + used.ru_stime, "s": seconds, "peak RSS MB": used.ru_maxrss / 1024}
    Path(path).write_text(json.dumps(found))
    sys.exit(os.waitstatus_to_exitcode(status))


def against(options: argparse.Namespace, modes: list[str]) -> None:
    """Let two builds take turns, each in processes of its own, and compare them."""
    here = str(Path(shoal.__file__).parent.parent)
    sides = {here: Results(), options.against: Results()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "turn.json")
        log = options.log or f"{folder}/log.tsv"
        for turn in range(options.turns):
            for mode in modes:
                for python, results in list(sides.items())[:: 1 if turn % 2 else -1]:
                    command = [sys.executable, __file__, mode, "--turns", "1", "--seconds", str(options.seconds)]
                    command += ["--json", str(path), "--log", log, *(["--pin"] if options.pin else [])]
                    command += ["--rows", str(options.rows)]
                    subprocess.run(
                        command, env=os.environ | {"PYTHONPATH": python}, check=True, stdout=subprocess.DEVNULL
                    )
                    results.load(path)
    sides[here].compare(sides[options.against])


def main() -> None:
    """Run from the command line."""
    if sys.argv[1:2] == ["--watch"]:
        watch(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=f"{', '.join(MODES)} (default: all)")
    parser.add_argument("--turns", type=int, default=5, metavar="N")
    parser.add_argument("--seconds", type=float, default=0.4, metavar="S", help="of each case in a turn (default: 0.4)")
    parser.add_argument("--rows", type=int, default=ROWS, metavar="N", help="of the table (default: 1000000)")
    parser.add_argument("--pin", action="store_true", help="the worker on one core, all others on another one")
    parser.add_argument("--log", metavar="FILE", help="of the mode train; drawn if it does not exist")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures of each turn")
    parser.add_argument("--against", metavar="DIR", help="directory of another build of the package shoal")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="compare two files of --json")
    options = parser.parse_args()
    if unknown := [mode for mode in options.modes if mode not in MODES]:
        parser.error(f"no mode {unknown[0]!r}: pass {', '.join(MODES)}")
    modes = options.modes or list(MODES)
    if options.compare:
        before, after = Results(), Results()
        before.load(options.compare[0])
        after.load(options.compare[1])
        after.compare(before)
        return
    start = time.perf_counter()
    if options.against:
        against(options, modes)
    else:
        bench = Bench(options)
        for mode in modes:
            MODES[mode](bench)
    used = resource.getrusage(resource.RUSAGE_SELF)
    about = (
        f"{time.perf_counter() - start:.0f} s, this process: {used.ru_utime + used.ru_stime:.0f} CPU seconds, peak "
        f"{used.ru_maxrss / 1024:.0f} MB; {conditions()}; cores {'' if options.pin else 'not '}pinned"
    )
    print(f"\n{about}")
    if options.json and not options.against:
        bench.results.save(options.json, about)


if __name__ == "__main__":
    main()
