"""A billion keys in one process: created, pushed, pulled, trained on, saved, verified, loaded.

    python bench/bench_billion.py --keys 1e8                     all steps, in separate processes; then tables
    python bench/bench_billion.py --keys 1e9 --dir /large/disk   20.0 GB of memory, 16.1 GB of disk
    python bench/bench_billion.py --keys fit --kind rowwise      16 weights in bfloat16, as many rows as fit in 21 GB
    python bench/bench_billion.py --keys 1e7 --steps create lr   some steps in this process

    raw       read random cache lines of a region of the table's size, before there is a table
    create    push every key once, 65,536 at a time, into an empty table; each push is timed
    traffic   pull and push Zipf traffic over all keys, compared with raw memory
    pull      the same with uniformly distributed keys
    lr        train logistic regression on examples whose features cover all keys (FTRL only)
    save      compute the digest, and write a full checkpoint
    verify    check every byte of the checkpoint
    load      load the checkpoint in a process that holds nothing else; its digest must be the same

The steps of one process share its table; steps after ``load`` use the loaded table. Every step checks its results and
reports the peak of its resident set. Figures are kept in DIR/figures.json, the checkpoint in DIR/checkpoint.

Checks. After create, a sample of rows must be what one push leaves, to the bit, and keys that were never pushed must be
absent. Traffic must create no row, and must leave n of the 256 hottest keys at the sum of their squared gradients. The
trained model must order unseen examples. The engine's invariants hold, and no row has become infinite. The loaded table
must have the digest of the saved one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from billion.stream import BATCH, EXAMPLES, HEADS, TAILS, Keys, Stream, first_gradients
from billion.watch import PROGRAM, Growth, Raw, distribution, resident, step
from figures import check, spread
from shoal import checkpoint

BYTES = {"ftrl": 20.0, "rowwise": 53.5}  # bytes of memory a key, by kind of table
STEPS = ("raw", "create", "traffic", "pull", "lr", "save", "verify", "load")
PROCESSES = (("raw",), ("create", "traffic", "pull", "lr", "save"), ("verify",), ("load", "pull"))
HOT = 256
SMALL_REGION = 1 << 30
LIMIT = 21_000_000_000
BESIDE = 700_000_000  # bytes of memory: Python, batches, pieces of a checkpoint
SAMPLE = 100_000
FEW, MANY = 20_000_000, 400_000_000  # keys up to which invariants are checked after every step; once


class Run:
    """Steps in one process, and the table that they share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.n = options.keys
        self.kind = options.kind
        self.threads = options.threads
        self.rounds = options.rounds
        self.with_raw = options.raw
        self.deep = options.deep
        self.directory = Path(options.dir)
        self.stream = Stream(self.n)
        self.figures: dict[str, Any] = {}
        self.squares = np.zeros(HOT)  # sums of the squared gradients of the hottest keys
        self.store: shoal.Store | None = None
        self._logged_at = 0.0

    def __call__(self, names: list[str]) -> None:
        """Do some steps."""
        for name in names:
            self.log(f"{name}: begins")
            label = name if name not in self.figures else f"{name} again"
            with step(self.figures, label) as results:
                getattr(self, name)(results)
            done = self.figures[label]
            self.log(f"{name}: {done['seconds']:.1f} s, peak {done['peak_bytes'] / 1e9:.2f} GB")

    def log(self, what: str) -> None:
        """Write a line for those who wait."""
        print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)

    def progress(self, what: str, done: int, of: int, began: float) -> None:
        """Report the progress of a step every five seconds."""
        now = time.perf_counter()
        if now - self._logged_at > 5:
            self._logged_at = now
            rate = done / (now - began) / 1e6
            self.log(f"{what}: {done / of:.0%}, {rate:.2f} M/s, {resident() / 1e9:.2f} GB")

    # ---- the table ---------------------------------------------------------------------------------------------------

    @property
    def table(self) -> shoal.Table:
        """The table; created if it does not exist."""
        if self.store is None:
            self.store = shoal.local(threads=self.threads)
        return self.store.table("keys", **description(self.kind))

    def gradients(self, each: np.ndarray) -> np.ndarray:
        """Give every element of a row the same gradient."""
        return np.ascontiguousarray(np.broadcast_to(each[:, None], (len(each), self.table.dim)))

    def regions(self) -> list[int]:
        """Choose sizes for raw memory: a small region, and one of the table's size if there is room for it."""
        if not self.with_raw:
            return []
        own = self.table.stats().bytes
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return [SMALL_REGION, own] if 3 * own < total else [SMALL_REGION]

    def check_table(self, last: bool = False) -> None:
        """Check invariants that always hold; those of the engine, which require sorting, as often as time allows."""
        table = self.table
        if self.n <= (MANY if last else FEW) or (last and self.deep):
            broken = table.shard.verify()
            check(broken == "", broken)
        check(table.stats().nonfinite_rows == 0, "some row became infinite")

    def hot(self) -> np.ndarray:
        """Read n of the hottest keys."""
        return self.table.state(self.stream.of(np.arange(HOT, dtype=np.uint64)))["n"][:, 0].astype(np.float64)

    def start_hot_check(self) -> None:
        """Begin to add up what the hottest keys are pushed at what they have."""
        if self.kind == "ftrl":
            self.squares = self.hot()

    def check_hot(self) -> None:
        """Check that every push to the hottest keys was applied once: n is the sum of their squares."""
        if self.kind == "ftrl":
            check(bool(np.allclose(self.hot(), self.squares, rtol=1e-3)), "a push to a hot key was lost or made twice")

    # ---- steps -------------------------------------------------------------------------------------------------------

    def raw(self, results: dict[str, Any]) -> None:
        """Measure random lines in a region as large as the table will be, and in a small one."""
        size = int(self.n * BYTES[self.kind])
        with Raw(self.threads, [SMALL_REGION, size]) as raw:
            rates = [raw.rates() for _ in range(self.rounds)]
        results |= {"regions": raw.regions, "rates": rates, "touch_gb_per_second": raw.touch_gb_per_second}

    def create(self, results: dict[str, Any]) -> None:
        """Push every key once."""
        table = self.table
        check(len(table) == 0, "the table already exists")
        growth = Growth(lambda: table.shard.stats())
        began = time.perf_counter()
        for begin, end in self.stream.batches():
            keys = self.stream.keys(begin, end)
            grads = self.gradients(first_gradients(keys))
            start = time.perf_counter()
            table.push(keys, grads).result()
            growth.pushed(time.perf_counter() - start)
            self.progress("create", end, self.n, began)
        stats = table.stats()
        pushing = sum(growth.seconds)
        results |= {
            "inserts_per_second": self.n / pushing,
            "pushing_seconds": pushing,
            "bytes_per_key": stats.bytes_per_row,
            "load": stats.load,
            **growth.summary(),
        }
        self.check_created()
        self.start_hot_check()

    def check_created(self) -> None:
        """Check a sample of rows to the bit, and that keys that were never pushed are absent."""
        table, random = self.table, np.random.default_rng(1)
        check(len(table) == self.n, f"{self.n} keys made {len(table)} rows")
        keys = self.stream.of(self.stream.uniform(random, min(SAMPLE, self.n)))
        grads = first_gradients(keys)
        state = table.state(keys)
        if self.kind == "ftrl":
            check(bool((state["z"][:, 0] == grads).all()), "z is not the first gradient")
        squares = state["n" if self.kind == "ftrl" else "m"][:, 0]
        check(bool((squares == grads * grads).all()), "the accumulator is not the square of the first gradient")
        others = self.stream.of(np.arange(self.n, self.n + 1000, dtype=np.uint64))
        check(not table.contains(others).any(), "a key exists that was never pushed")
        self.check_table()

    def traffic(self, results: dict[str, Any]) -> None:
        """Pull and push keys with the frequencies of clicks."""
        self._measure(results, "traffic", self.stream.zipf)

    def pull(self, results: dict[str, Any]) -> None:
        """Pull and push uniformly distributed keys."""
        self._measure(results, "pull", self.stream.uniform)

    def _measure(
        self, results: dict[str, Any], name: str, draw: Callable[[np.random.Generator, int], Keys], calls: int = 16
    ) -> None:
        table, store = self.table, self.store
        assert store is not None
        rows = len(table)
        random = np.random.default_rng([3, len(self.figures)])
        rows_of = np.empty((BATCH, table.dim), np.float32)
        turns: list[dict[str, Any]] = []
        latencies = []
        with Raw(self.threads, self.regions()) as raw:
            for turn in range(self.rounds + 1):
                spent = dict.fromkeys(("sort", "pull", "push", "call"), 0.0)
                unique = 0
                for _ in range(calls):
                    numbers = draw(random, BATCH)
                    keys = self.stream.of(numbers)
                    start = time.perf_counter()
                    batch = store.key_batch(keys)
                    sorted_at = time.perf_counter()
                    table.pull_unique(batch, out=rows_of[: len(batch)])
                    spent["pull"] += time.perf_counter() - sorted_at
                    spent["sort"] += sorted_at - start
                    unique += len(batch)
                for _ in range(calls):
                    numbers, each = self._drawn(random, draw)
                    batch = store.key_batch(self.stream.of(numbers))
                    summed = batch.sum(self.gradients(each))
                    start = time.perf_counter()
                    table.push_unique(batch, summed).result()
                    spent["push"] += time.perf_counter() - start
                    unique += len(batch)
                for _ in range(calls):
                    numbers, each = self._drawn(random, draw)
                    keys, grads = self.stream.of(numbers), self.gradients(each)
                    start = time.perf_counter()
                    table.push(keys, grads).result()
                    latencies.append(time.perf_counter() - start)
                    spent["call"] += latencies[-1]
                if turn:  # the first turn is a warm-up
                    turns.append(
                        {
                            "sort": calls * BATCH / spent["sort"] / 1e6,
                            "pull": unique / 2 / spent["pull"] / 1e6,
                            "push": unique / 2 / spent["push"] / 1e6,
                            "call": calls * BATCH / spent["call"] / 1e6,
                            "unique": unique / 2 / calls / BATCH,
                            "raw": raw.rates(),
                        }
                    )
                    self.log(f"{name}: round {turn} of {self.rounds}")
        results |= {"regions": raw.regions, "rounds": turns, "push_ms": distribution(np.array(latencies))}
        check(len(table) == rows, f"traffic over existing keys made {len(table) - rows} rows")
        self.check_hot()
        self.check_table()

    def _drawn(
        self, random: np.random.Generator, draw: Callable[[np.random.Generator, int], Keys]
    ) -> tuple[Keys, np.ndarray]:
        """Draw numbers and small gradients, and record the gradients of the hottest keys."""
        numbers = draw(random, BATCH)
        each = np.where(random.random(BATCH) < 0.5, np.float32(-(2.0**-10)), np.float32(2.0**-10))
        hot = numbers < HOT
        self.squares += np.bincount(numbers[hot].astype(np.int64), weights=each[hot], minlength=HOT) ** 2
        return numbers, each

    def lr(self, results: dict[str, Any]) -> None:
        """Train on examples whose tails contain every key once."""
        if self.kind != "ftrl":
            results["left_out"] = "a row of 16 weights is no logistic regression's"
            return
        table, store, stream = self.table, self.store, self.stream
        batches = stream.example_batches()
        model = shoal.LogisticRegression(optimizer(), store=store, table="keys")
        began = time.perf_counter()

        def examples() -> Iterator[shoal.Batch]:
            for number in range(batches):
                yield stream.examples(number)
                self.progress("lr", (number + 1) * EXAMPLES, batches * EXAMPLES, began)

        fresh = [stream.examples(batches + k) for k in range(8)]
        model.fit(examples(), progress=False)
        seconds = time.perf_counter() - began
        found = model.evaluate(fresh)
        results |= {
            "examples": batches * EXAMPLES,
            "examples_per_second": batches * EXAMPLES / seconds,
            "features_per_second": batches * EXAMPLES * (HEADS + TAILS) / seconds,
            "logloss": found.logloss,
            "auc": found.auc,
        }
        self.start_hot_check()
        check(self.n <= len(table) <= self.n + 1, "training made rows for existing keys")  # and the bias
        check(found.auc > 0.6, f"the model did not learn: an AUC of {found.auc}")
        self.check_table()

    def save(self, results: dict[str, Any]) -> None:
        """Take the digest and write a checkpoint."""
        start = time.perf_counter()
        digest = self.table.digest()
        results["digest_seconds"] = time.perf_counter() - start
        start = time.perf_counter()
        assert self.store is not None
        self.store.save(self.directory / "checkpoint", overwrite=True, progress=sys.stderr.isatty())
        seconds = time.perf_counter() - start
        size = sum(file.stat().st_size for file in (self.directory / "checkpoint").iterdir())
        results |= {
            "digest": digest,
            "rows": len(self.table),
            "saving_seconds": seconds,
            "checkpoint_bytes": size,
            "gb_per_second": size / seconds / 1e9,
        }

    def verify(self, results: dict[str, Any]) -> None:
        """Check every byte of the checkpoint."""
        start = time.perf_counter()
        manifest = checkpoint.verify(self.directory / "checkpoint", self.threads, progress=sys.stderr.isatty())
        results |= {
            "rows": sum(table.rows for table in manifest.tables),
            "verifying_seconds": time.perf_counter() - start,
        }

    def load(self, results: dict[str, Any]) -> None:
        """Load the checkpoint and compare the digest."""
        check(self.store is None, "load comes first in its process")
        self.store = shoal.local(threads=self.threads)
        start = time.perf_counter()
        self.store.load(self.directory / "checkpoint", progress=sys.stderr.isatty())
        seconds = time.perf_counter() - start
        stats = self.table.stats()
        results |= {
            "loading_seconds": seconds,
            "rows_per_second": stats.rows / seconds,
            "bytes_per_key": stats.bytes_per_row,
            "digest": self.table.digest(),
        }
        saved = figures_of(self.directory).get("steps", {}).get("save")
        if saved is not None:
            check(stats.rows == saved["rows"], f"{saved['rows']} rows were saved, {stats.rows} loaded")
            check(results["digest"] == saved["digest"], "the loaded table differs from the saved one")
        self.check_table(last=True)
        self.start_hot_check()


def optimizer() -> shoal.FTRL:
    """Return the optimizer of the keys' table and of the model that uses it."""
    return shoal.FTRL(alpha=0.1, beta=1.0, l1=1.0, l2=0.1)


def description(kind: str) -> dict[str, Any]:
    """Describe the table of a kind."""
    if kind == "ftrl":
        return {"optimizer": optimizer()}
    return {
        "dim": 16,
        "dtype": "bfloat16",
        "optimizer": shoal.RowWiseAdagrad(lr=0.01),
        "init": shoal.Uniform(0.01, seed=7),
    }


def fitting(options: argparse.Namespace) -> int:
    """Find the number of keys, in millions, whose table leaves enough memory below the limit for the other steps."""
    most = int(options.limit or LIMIT) - BESIDE
    fits, too_many = 1, 1 << 20
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if shoal.tools.estimate(middle * 1_000_000, **description(options.kind)).table_bytes <= most:
            fits = middle
        else:
            too_many = middle
    return fits * 1_000_000


# --- figures ----------------------------------------------------------------------------------------------------------


def figures_of(directory: Path) -> dict[str, Any]:
    """Read the figures of earlier processes of a run."""
    path = directory / "figures.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(run: Run) -> None:
    """Add the figures of a process, replacing earlier figures of the same steps."""
    found = figures_of(run.directory)
    if found.get("keys") != run.n or found.get("kind") != run.kind:
        found = {}
    steps = found.get("steps", {})
    for name, figures in run.figures.items():
        label = f"{name}, loaded" if "load" in run.figures and name != "load" else name
        steps[label] = figures
    found |= {"keys": run.n, "kind": run.kind, "threads": run.threads, "steps": steps}
    (run.directory / "figures.json").write_text(json.dumps(found, indent=1))


def print_tables(found: dict[str, Any], limit: float) -> None:
    """Print Markdown tables of a run, and fail where memory went beyond its limit."""
    steps, keys = found["steps"], found["keys"]
    print(f"\n{keys:.3g} keys, {found['kind']}, {found['threads']} threads\n")
    print("| step | seconds | peak GB | B/key at the peak | what |")
    print("|---|---|---|---|---|")
    for name, figures in steps.items():
        peak = figures["peak_bytes"]
        print(f"| {name} | {figures['seconds']:.0f} | {peak / 1e9:.2f} | {peak / keys:.2f} | {_what(name, figures)} |")
    measured = [(name, figures) for name, figures in steps.items() if figures.get("rounds")]
    if measured:
        print("\n| keys drawn | unique | sort | pull | push | call | raw GB: read / update | pull / raw, push / raw |")
        print("|" + "---|" * 8)
    for name, figures in measured:
        turns = figures["rounds"]
        column = {key: [turn[key] for turn in turns] for key in ("sort", "pull", "push", "call", "unique")}
        raws, ratios = [], []
        for r, size in enumerate(figures["regions"]):
            reads, updates = zip(*(turn["raw"][r] for turn in turns), strict=True)
            raws.append(f"{size / 1e9:.1f}: {spread(reads)} / {spread(updates)}")
            pulls = [p / q for p, q in zip(column["pull"], reads, strict=True)]
            pushes = [p / q for p, q in zip(column["push"], updates, strict=True)]
            ratios.append(f"{spread(pulls, 2)}, {spread(pushes, 2)}")
        print(
            f"| {name} | {np.median(column['unique']):.2f} | {spread(column['sort'])} | {spread(column['pull'])} "
            f"| {spread(column['push'])} | {spread(column['call'])} | {'; '.join(raws)} | {'; '.join(ratios)} |"
        )
    if "create" in steps:
        made = steps["create"]
        print("\n| pushes of 65,536 new keys, ms | p50 | p90 | p99 | p99.9 | max |")
        print("|---|---|---|---|---|---|")
        for what, named in (
            ("the whole call", "push_ms"),
            ("of it moving cells, both threads added up", "growing_ms"),
            ("of it waiting for memory of the system, added up", "memory_ms"),
        ):
            print(f"| {what} | {' | '.join(str(x) for x in made[named].values())} |")
        print(
            f"\n{made['growths']:,} growths, the longest moved cells for {made['longest_move_ms']:.1f} ms; the slowest "
            f"pushes:"
        )
        for slow in made["slowest"][:5]:
            print(
                f"    {slow['push_ms']:.1f} ms: {slow['growths']} growths moved cells for {slow['growing_ms']:.1f} ms "
                f"and waited {slow['memory_ms']:.1f} ms for memory"
            )
    for name, figures in steps.items():
        if name not in ("raw", "verify"):
            check(
                figures["peak_bytes"] <= limit, f"{name} took {figures['peak_bytes']:,} bytes, more than {limit:,.0f}"
            )


def _what(name: str, figures: dict[str, Any]) -> str:
    if name == "raw":
        reads = [f"{size / 1e9:.1f} GB" for size in figures["regions"]]
        rates = [
            f"{np.median([turn[r][0] for turn in figures['rates']]):.0f} / "
            f"{np.median([turn[r][1] for turn in figures['rates']]):.0f}"
            for r in range(len(reads))
        ]
        text = ", ".join(f"{size}: {rate} M lines/s read / updated" for size, rate in zip(reads, rates, strict=True))
        return f"{text}; first touch {figures['touch_gb_per_second']:.2f} GB/s"
    if name == "create":
        return (
            f"{figures['inserts_per_second'] / 1e6:.1f} M new keys/s, {figures['bytes_per_key']:.2f} B/key, "
            f"{figures['memory_seconds']:.0f} s of threads waited for memory"
        )
    if name == "lr" and "auc" in figures:
        return (
            f"{figures['examples']:,} examples, {figures['examples_per_second'] / 1e3:.0f} k/s, "
            f"AUC {figures['auc']:.3f}, logloss {figures['logloss']:.3f}"
        )
    if name == "save":
        return (
            f"{figures['checkpoint_bytes'] / 1e9:.2f} GB in {figures['saving_seconds']:.0f} s, "
            f"{figures['gb_per_second']:.2f} GB/s; digest in {figures['digest_seconds']:.1f} s"
        )
    if name == "load":
        return f"{figures['rows_per_second'] / 1e6:.1f} M rows/s, {figures['bytes_per_key']:.2f} B/key, digest as saved"
    if "rounds" in figures:
        return f"push of 65,536 keys: p50 {figures['push_ms']['p50']} ms, max {figures['push_ms']['max']} ms"
    return figures.get("left_out", "")


def main() -> None:
    """Run the requested steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", default="1e7", help="a number, or `fit`: as many as fit within the limit")
    parser.add_argument(
        "--kind", choices=list(BYTES), default="ftrl", help="FTRL at dim 1, or RowWiseAdagrad at 16, bfloat16"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5, help="of traffic and pulls compared with raw memory")
    parser.add_argument("--dir", default="build/billion", help="directory of the checkpoint; removed at the end")
    parser.add_argument("--keep", action="store_true", help="do not remove the checkpoint")
    parser.add_argument("--limit", type=float, help="bytes of memory that a step may take; default: 21e9 or less")
    parser.add_argument("--deep", action="store_true", help="check the engine's invariants at any size: minutes")
    parser.add_argument("--no-raw", dest="raw", action="store_false", help="leave out the raw limit of memory")
    parser.add_argument(
        "--steps", nargs="+", choices=STEPS, metavar="STEP", help=f"in this process: {', '.join(STEPS)}"
    )
    options = parser.parse_args()
    options.keys = fitting(options) if options.keys == "fit" else int(float(options.keys))
    if options.raw and not PROGRAM.exists():
        parser.error(f"{PROGRAM} is missing: `cmake --preset release && cmake --build --preset release`, or --no-raw")
    directory = Path(options.dir)
    directory.mkdir(parents=True, exist_ok=True)
    if options.steps:
        run = Run(options)
        run(options.steps)
        keep(run)
        return
    (directory / "figures.json").unlink(missing_ok=True)
    began = time.perf_counter()
    arguments = [word for word in sys.argv[1:] if word != "--keep"]
    for steps in PROCESSES:
        if options.raw or steps != ("raw",):
            subprocess.run([sys.executable, __file__, *arguments, "--steps", *steps], check=True)
    if not options.keep:
        shutil.rmtree(directory / "checkpoint")
    # Python and batches take most of the memory of a small run.
    limit = options.limit or min(LIMIT, BYTES[options.kind] * options.keys + BESIDE)
    print_tables(figures_of(directory), limit)
    print(f"\n{time.perf_counter() - began:.0f} s in total")


if __name__ == "__main__":
    main()
