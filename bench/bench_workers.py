"""Fits on several workers: speed, the cost of checkpoints, and quality on real data.

    python bench/bench_workers.py speed        [--rounds 3]   DeepFM and DLRM with one and two workers
    python bench/bench_workers.py checkpoints  [--rounds 3]   a step of two workers, with checkpoints and without
    python bench/bench_workers.py quality      [--model lr]   AUC of 1, 2 and 4 workers under BSP, SSP(2) and ASP

Workers are processes of one job on a launched cluster. A step of the job has one batch, of which each of W workers
takes every W-th example: under BSP a fit without warm-up is that of one worker with whole batches. ``speed`` and
``checkpoints`` use the click log of bench_ctr.py: 26 ids an example, rows of dim 16, a network of 400, 400, 400 and one
output, dense parameters by all-reduce; CPU time is that of the workers and the servers. ``quality`` needs SHOAL_DATA,
the directory of the data sets.

Checks: each example was trained once; losses have fallen; under BSP the AUC of several workers is that of one, within
0.001. If it is not, the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import shoal
from ctr.draw import BATCH, FIELDS, Draw
from figures import check, conditions, cpu_seconds, spread
from quality.sets import SETS, batches
from shoal.cluster.launch import local_cluster
from shoal.models import Checkpointing
from shoal.models.preprocessing import take

ALLOWED = 0.001  # of AUC, under BSP
CONSISTENCIES = {"BSP": shoal.BSP(), "SSP(2)": shoal.SSP(2), "ASP": shoal.ASP()}
QUALITY_SETS = ("a9a", "ijcnn1", "movielens_tags")  # of LR
CLICK_SETS = ("movielens_tags", "flights_nyc2017", "criteo_attribution")  # of DeepFM: as many keys in each example
ROWS = 1_000_000  # of the click log
WARM, STEPS, EVERY = 5, 40, 8  # steps: before the measured ones, measured, from one checkpoint to the next


# ---- a worker --------------------------------------------------------------------------------------------------------


def share(examples: list[shoal.Batch], rank: int, workers: int) -> list[shoal.Batch]:
    """Return every ``workers``-th example of each batch."""
    return [take(batch, np.arange(rank, len(batch), workers)) for batch in examples]


@contextlib.contextmanager
def stamps(store: shoal.Store) -> Iterator[list[float]]:
    """Note when each clock ends: a step of the fit."""
    times: list[float] = []
    tick = store.tick

    def stamped() -> None:
        tick()
        times.append(time.perf_counter())

    with mock.patch.object(store, "tick", stamped):
        yield times


def clicks(first: int, count: int) -> list[shoal.Batch]:
    """Draw batches of the click log."""
    draw = Draw(ROWS)
    indptr = np.arange(0, BATCH * FIELDS + 1, FIELDS, dtype=np.int64)
    drawn = (draw.batch(first + k) for k in range(count))
    return [shoal.Batch(one.labels, indptr, one.ids.astype(np.uint64).ravel(), None) for one in drawn]


def network(name: str, store: shoal.Store, fields: int, dim: int, hidden: tuple[int, ...]) -> Any:
    """Make a click model with its dense part in torch; the same initial values on all workers."""
    import torch

    torch.manual_seed(7)
    torch.set_num_threads(1)
    tables = shoal.torch.tables(store, shoal.Adagrad(lr=0.05), init=shoal.Normal(0.01, seed=7))
    kind = {"deepfm": shoal.torch.models.DeepFM, "dlrm": shoal.torch.models.DLRM}[name]
    module = kind(tables, fields, dim=dim, hidden=hidden)
    return module, torch.optim.Adam(module.parameters(), lr=0.002)


def fit_clicks(store: shoal.Store, task: dict[str, Any]) -> dict[str, Any]:
    """Train on the click log, warmed up, and report time, CPU time, bytes and the time of each step."""
    module, optimizer = network(task["model"], store, FIELDS, 16, (400, 400, 400))
    model = shoal.torch.ClickModel(module, store=store, optimizer=optimizer)
    model.fit(share(clicks(0, WARM), store.rank, store.num_workers), progress=False)
    data = share(clicks(WARM, STEPS), store.rank, store.num_workers)
    checkpoint = Checkpointing(task["directory"], every=EVERY) if task["directory"] else None
    store.barrier()
    before, cpu, start = store.metrics(), time.process_time(), time.perf_counter()
    with stamps(store) as times:
        model.fit(data, progress=False, checkpoint=checkpoint)
    store.barrier()
    return {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
        "bytes": sum(store.metrics()[name] - before[name] for name in ("bytes_sent", "bytes_received")),
        "examples": model.history.passes[-1].metrics.examples,
        "logloss": model.history.passes[-1].metrics.logloss,
        "steps": np.diff(times).tolist(),
    }


def fit_real(store: shoal.Store, task: dict[str, Any]) -> dict[str, Any]:
    """Train on a real set; worker 0 reports the AUC of its test part."""
    split = SETS[task["set"]](Path(os.environ["SHOAL_DATA"]))
    rows = np.random.default_rng(3).permutation(len(split.train))
    train = batches(take(split.train, rows), task["batch"])
    mine = share(train, store.rank, store.num_workers)
    if task["model"] == "lr":
        model: Any = shoal.LogisticRegression(
            shoal.FTRL(alpha=0.1, beta=1.0, l1=0.1), store=store, warm_up=task["warm_up"]
        )
        model.fit(mine, epochs=task["epochs"], progress=False)
    else:
        keys = len(split.train.keys) // len(split.train)
        module, optimizer = network("deepfm", store, keys, 8, (64,))
        model = shoal.torch.ClickModel(module, store=store, optimizer=optimizer)
        model.fit(mine, epochs=task["epochs"], progress=False)
    store.barrier()
    found = {"examples": model.history.passes[-1].metrics.examples}
    if store.rank == 0:
        found["auc"] = model.evaluate(batches(split.test, 4096)).auc
    return found


def work(address: str, rank: int, workers: int, consistency: str, task: dict[str, Any]) -> None:
    """Take part in a job, and print what was found as a line of JSON."""
    with shoal.connect(
        address,
        workers=workers,
        rank=rank,
        consistency=CONSISTENCIES[consistency],
        threads=1,
        timeout=300.0,
    ) as store:
        print(json.dumps((fit_real if "set" in task else fit_clicks)(store, task)), flush=True)
        store.barrier()


# ---- jobs ------------------------------------------------------------------------------------------------------------


def job(servers: int, workers: int, consistency: str, task: dict[str, Any]) -> tuple[list[dict[str, Any]], float]:
    """Run a job on a cluster of its own; return what each worker reports, and the CPU seconds of the servers."""
    roots = [tempfile.gettempdir()]
    with (
        local_cluster.running(
            servers,
            workers=workers,
            timeout=120.0,
            storage_roots=roots,
        ) as cluster,
        contextlib.ExitStack() as stack,
    ):

        def start(rank: int) -> subprocess.Popen[str]:
            command = [sys.executable, __file__, "--work", cluster.address, str(rank), str(workers), consistency]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            process = stack.enter_context(
                subprocess.Popen([*command, json.dumps(task)], stdout=subprocess.PIPE, text=True, env=env)
            )
            stack.callback(process.kill)
            return process

        running = [start(rank) for rank in range(workers)]
        lines = [process.stdout.readline() for process in running if process.stdout]
        check(all(lines), "a worker has failed")
        spent = sum(cpu_seconds(child.process.pid) for child in cluster.servers)
        check(not any(process.wait() for process in running), "a worker has failed")
        return [json.loads(line) for line in lines], spent


def checked(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check what the workers of a click fit report: the same merged metrics."""
    check({one["examples"] for one in found} == {STEPS * BATCH}, f"not {STEPS * BATCH:,} examples: {found}")
    check(all(one["logloss"] < np.log(2) for one in found), "the log-loss is not below that of a coin")
    return found


def speed(rounds: int) -> None:
    """Measure examples/s of one and two workers in turns."""
    figures: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for turn in range(rounds):
        for model in ("deepfm", "dlrm"):
            for workers in (1, 2) if turn % 2 else (2, 1):
                found, servers = job(1, workers, "BSP", {"model": model, "directory": ""})
                checked(found)
                examples = found[0]["examples"]
                figures[model, workers, "rate"].append(examples / max(one["seconds"] for one in found) / 1e3)
                cpu = sum(one["cpu"] for one in found)
                figures[model, workers, "cpu"].append(cpu / examples * 1e6)
                # Those of the servers include the warm-up.
                figures[model, workers, "servers"].append(servers / (examples * (1 + WARM / STEPS)) * 1e6)
                figures[model, workers, "bytes"].append(sum(one["bytes"] for one in found) / examples)
    print("| model | workers | thousand examples/s | CPU s per million: workers | servers | bytes of rows an example |")
    print("|---|---|---|---|---|---|")
    for model, workers in dict.fromkeys((model, workers) for model, workers, _ in figures):
        cells = [spread(figures[model, workers, name], 1) for name in ("rate", "cpu", "servers")]
        print(f"| {model} | {workers} | {' | '.join(cells)} | {spread(figures[model, workers, 'bytes'])} |")
    for model in ("deepfm", "dlrm"):
        pairs = zip(figures[model, 1, "rate"], figures[model, 2, "rate"], strict=True)
        print(f"{model}: two workers have {spread([b / a for a, b in pairs], 2)} times the examples/s of one")


def checkpoints(rounds: int) -> None:
    """Measure the steps of two workers, with and without checkpoints."""
    steps: dict[bool, list[float]] = {False: [], True: []}
    medians: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds):
        for kept in (False, True) if turn % 2 else (True, False):
            with tempfile.TemporaryDirectory() as folder:
                directory = f"{folder}/model" if kept else ""
                found, _ = job(1, 2, "BSP", {"model": "deepfm", "directory": directory})
            taken = [1e3 * seconds for one in checked(found) for seconds in one["steps"]]
            steps[kept] += taken
            medians[kept].append(float(np.median(taken)))
    print("| checkpoints | a step, ms: median of each round | p50 | p95 | max |")
    print("|---|---|---|---|---|")
    for kept, taken in steps.items():
        p50, p95, top = np.percentile(taken, [50, 95, 100])
        text = f"every {EVERY} steps" if kept else "none"
        print(f"| {text} | {spread(medians[kept], 1)} | {p50:.1f} | {p95:.1f} | {top:.1f} |")


def quality(model: str, *, warm_up: bool) -> bool:
    """Measure the AUC for each number of workers and each consistency; return whether BSP is within the mark."""
    print("| set | workers | " + " | ".join(CONSISTENCIES) + " |")
    print("|---" * (2 + len(CONSISTENCIES)) + "|")
    fine = True
    for name in QUALITY_SETS if model == "lr" else CLICK_SETS:
        task = {"model": model, "set": name, "batch": 512, "epochs": 4 if model == "lr" else 1}
        task["warm_up"] = warm_up
        one = job(2, 1, "BSP", task)[0][0]["auc"]
        print(f"| {name} | 1 | {one:.4f} | | |", flush=True)
        for workers in (2, 4):
            cells = []
            for consistency in CONSISTENCIES:
                auc = job(2, workers, consistency, task)[0][0]["auc"]
                fine &= consistency != "BSP" or abs(auc - one) <= ALLOWED
                cells.append(f"{auc:.4f} ({auc - one:+.4f})")
            print(f"| {name} | {workers} | {' | '.join(cells)} |", flush=True)
    return fine


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("speed", "checkpoints", "quality"))
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--model", choices=("lr", "deepfm"), default="lr", help="of quality (default: lr)")
    parser.add_argument("--warm-up", action="store_true", help="as fit does by default, for quality of lr")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        address, rank, workers, consistency, task = asked.work
        work(address, int(rank), int(workers), consistency, json.loads(task))
        return
    if asked.what in (None, "speed"):
        speed(asked.rounds)
    if asked.what in (None, "checkpoints"):
        checkpoints(asked.rounds)
    if asked.what in (None, "quality"):
        if not os.environ.get("SHOAL_DATA"):
            print("SHOAL_DATA, the directory of the data sets, is not set: quality is not measured")
        elif not quality(asked.model, warm_up=asked.warm_up):
            raise SystemExit(f"under BSP an AUC is more than {ALLOWED} from that of one worker")
    print(conditions())


if __name__ == "__main__":
    main()
