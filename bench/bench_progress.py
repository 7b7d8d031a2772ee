"""What it costs a fit on a cluster that its progress is rows: time, CPU seconds of the workers, bytes.

    python bench/bench_progress.py                      lr and ctr, on two servers and two workers: about five minutes
    python bench/bench_progress.py lr --rounds 9
    python bench/bench_progress.py lr --against ../other/python       another build of shoal takes turns with this one
    python bench/bench_progress.py death                how long a fit waits for the replacement of a killed worker

Draws a click log (39 features an example, as `make demo` does), and makes one pass over its text in two worker
processes, one thread each: logistic regression with batches of 1,024 and of 16,384, and a DeepFM of dim 16 over tables
of its own with a dense part on the servers. "without" makes the same fit, but for the rows that a worker pushes with
each batch: they are left out, and all metrics are pushed at the end. All take turns; a figure is the median
(minimum-maximum) of the rounds, and a ratio that of the rounds' ratios. Each round checks that all examples were
learned from, and that the rows are the same bits with and without.

"death" launches the same fits (`shoal launch --worker-restarts`), kills worker 1 after a third of its batches, and
reports the longest time between two clocks of worker 0, and when the new process had started, connected and learned
from its first batch: seconds after the kill. Under BSP each round checks that the rows are those of an undisturbed fit.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from figures import check, spread
from shoal.cluster.launch.local_cluster import running
from shoal.tools.planted import PlantedModel, write_log

SERVERS, WORKERS = 2, 2
KINDS = {"lr": (1_024, 16_384), "ctr": (2_048,)}
FIELDS = [*(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]


def model_of(kind: str, store: shoal.Store) -> Any:
    """Make the model of a worker."""
    if kind == "lr":
        return shoal.LogisticRegression(shoal.FTRL(alpha=0.1, beta=1.0, l1=0.5), store=store, warm_up=False)
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(7)
    make = shoal.torch.tables(store, shoal.Adagrad(lr=0.05), seed=7)
    features = shoal.torch.Features(FIELDS, form="criteo")
    module = shoal.torch.models.DeepFM(make, features, dim=16, hidden=(128, 64))
    return shoal.torch.ClickModel(module, store=store, dense="servers")


class Stamps(shoal.models.Callback):
    """Writes a line after each batch: the time. Worker 1 is killed after ``last`` batches, before it is replaced."""

    def __init__(self, path: Path, last: int) -> None:
        self._file, self._last = path.open("a"), last

    def batch_done(self, progress: shoal.models.FitProgress) -> None:
        """Write the time."""
        self._file.write(f"batch {time.time()}\n")
        self._file.flush()
        if progress.batches == self._last:
            self._file.write(f"killed {time.time()}\n")
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)


def work_and_die(kind: str, log: str, batch_size: int, folder: str, last: int) -> None:
    """Fit as one worker of a launched cluster, noting times in a file; ``last`` is 0 in an undisturbed fit."""
    started = time.time()
    with shoal.connect(threads=1, timeout=120) as store:
        with Path(folder, f"{store.rank}.txt").open("a") as file:
            file.write(f"started {started}\nconnected {time.time()}\n")
        model = model_of(kind, store)
        dies = store.rank == 1 and not store.member.is_replacement
        stamps = Stamps(Path(folder, f"{store.rank}.txt"), last if dies else 0)
        share = shoal.read_criteo(log, batch_size=batch_size).split(store.rank, WORKERS)
        model.fit(share, progress=False, callbacks=[stamps])
        store.barrier()
        Path(folder, "digest.txt").write_text("".join(table.digest() for table in model.tables))
        store.barrier()


def survived(kind: str, log: Path, batch_size: int, last: int) -> tuple[dict[str, float], str]:
    """Launch a fit of which a worker is killed; return the seconds after that, and the digest of the rows."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shoal", "launch", "--servers", str(SERVERS), "--workers", str(WORKERS)]
        command += ["--worker-restarts", "1", sys.executable, __file__, "--die", kind, str(log), str(batch_size)]
        ran = subprocess.run([*command, folder, str(last)], capture_output=True, text=True)
        check(ran.returncode == 0, f"the launched fit failed: {ran.stdout}{ran.stderr}")
        digest = Path(folder, "digest.txt").read_text()
        if not last:
            return {}, digest
        first, second = (
            [line.split() for line in Path(folder, f"{rank}.txt").read_text().splitlines()] for rank in range(2)
        )
        killed = next(i for i, (what, _) in enumerate(second) if what == "killed")
        since = float(second[killed][1])
        after = {what: float(moment) - since for what, moment in reversed(second[killed + 1 :])}
        times = [float(moment) for what, moment in first if what == "batch"]
        after["without a clock"] = max(late - early for early, late in pairwise(times))
        return after, digest


def deaths(log: Path, rounds: int, examples: int) -> None:
    """Print how long fits wait for replacements."""
    print("| fit | started | connected | first batch | worker 0 without a clock |\n|---|---|---|---|---|")
    for kind, sizes in KINDS.items():
        size = sizes[0]
        expected = survived(kind, log, size, 0)[1]
        found = []
        for _ in range(rounds):
            seconds, digest = survived(kind, log, size, examples // WORKERS // size // 3)
            check(digest == expected, "the rows differ from those of the undisturbed fit")
            found.append(seconds)
        columns = [
            spread([one[what] for one in found], 2) for what in ("started", "connected", "batch", "without a clock")
        ]
        print(f"| {kind}, batches of {size:,} | {' | '.join(columns)} |", flush=True)


def work(kind: str, address: str, log: str, batch_size: int, with_rows: bool) -> None:
    """Fit as one worker, and print what it took."""
    if not with_rows:
        from shoal.models import pass_rows

        rows: Any = pass_rows.PassRows
        rows.begin_batch = lambda *_: None
        rows.learned = lambda _, data, *__: data.learned()
    with shoal.connect(address, workers=WORKERS, threads=1, timeout=300) as store:
        model = model_of(kind, store)
        share = shoal.read_criteo(log, batch_size=batch_size).split(store.rank, WORKERS)
        store.barrier()
        before, start, cpu = store.metrics(), time.perf_counter(), time.process_time()
        model.fit(share, progress=False)
        store.barrier()
        seconds, cpu, after = time.perf_counter() - start, time.process_time() - cpu, store.metrics()
        size = sum(after.get(name, 0) - before.get(name, 0) for name in ("bytes_sent", "bytes_received"))
        digest = hashlib.sha256("".join(table.digest() for table in model.tables).encode()).hexdigest()
        store.barrier()
    print(json.dumps({"s": seconds, "CPU s": cpu, "bytes": size, "examples": model.examples, "bits": digest}))


def fitted(kind: str, log: Path, batch_size: int, python: str, *, with_rows: bool) -> dict[str, Any]:
    """Fit on a cluster of its own; return the figures of the workers together."""
    with running(SERVERS, workers=WORKERS) as cluster:
        what = [sys.executable, __file__, "--work", kind, cluster.address, str(log), str(batch_size), str(with_rows)]
        environment = os.environ | {"PYTHONPATH": python, "OMP_NUM_THREADS": "1"}
        children = [subprocess.Popen(what, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(WORKERS)]
        outputs = [child.communicate()[0] for child in children]
    check(all(child.returncode == 0 for child in children), "a worker failed")
    found = [json.loads(output) for output in outputs]
    check(found[0]["bits"] == found[1]["bits"], "the workers see different rows")
    return {
        "s": max(one["s"] for one in found),
        "CPU s": sum(one["CPU s"] for one in found),
        "bytes": sum(one["bytes"] for one in found),
        "examples": found[0]["examples"],
        "bits": found[0]["bits"],
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS, "death"], default=[], help="default: lr and ctr")
    parser.add_argument("--examples", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--against", metavar="PYTHON", help="the folder of another build, in place of 'without'")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--die", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        kind, address, log, size, with_rows = options.work
        work(kind, address, log, int(size), with_rows == "True")
        return
    if options.die:
        kind, log, size, folder, last = options.die
        work_and_die(kind, log, int(size), folder, int(last))
        return
    here = str(Path(shoal.__file__).parent.parent)
    other = options.against or here
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "train.tsv")
        write_log(log, PlantedModel(seed=1), options.examples, 0)
        if "death" in options.kinds:
            deaths(log, options.rounds, options.examples)
            return
        print("| fit | rows | s | CPU s of the workers | bytes an example |\n|---|---|---|---|---|")
        for kind in options.kinds or KINDS:
            for size in KINDS[kind]:
                found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
                for number in range(options.rounds + 1):
                    for with_rows in (True, False) if number % 2 else (False, True):
                        python = here if with_rows else other
                        has_rows = with_rows or options.against is not None
                        one = fitted(kind, log, size, python, with_rows=has_rows)
                        check(one["examples"] == options.examples, "not every example was learned once")
                        if number:  # the first round warms the machine up
                            found[with_rows].append(one)
                check(len({one["bits"] for some in found.values() for one in some}) == 1, "the rows differ")
                show(f"{kind}, batches of {size:,}", found, options.examples, options.against)


def show(what: str, found: dict[bool, list[dict[str, Any]]], examples: int, against: str | None) -> None:
    """Print the figures of a fit, and the ratios of the rounds."""
    for with_rows, some in found.items():
        name = "with" if with_rows else against or "without"
        columns = [[one[column] for one in some] for column in ("s", "CPU s")]
        size = np.median([one["bytes"] for one in some]) / examples
        print(f"| {what} | {name} | {spread(columns[0], 2)} | {spread(columns[1], 2)} | {size:.1f} |")
    ratios = [
        spread([one[column] / its[column] for one, its in zip(found[True], found[False], strict=True)], 3)
        for column in ("s", "CPU s", "bytes")
    ]
    print(f"| {what} | ratio | {ratios[0]} | {ratios[1]} | {ratios[2]} |", flush=True)


if __name__ == "__main__":
    main()
