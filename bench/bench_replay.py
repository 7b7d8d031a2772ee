"""What the record of a fit under ASP costs: time, CPU seconds of workers and servers, bytes; and what a replay takes.

    python bench/bench_replay.py                        two servers and two workers, six rounds
    python bench/bench_replay.py --rounds 20 --batch-size 1024

Draws a click log (39 features an example, as `make demo` does), and makes one pass of logistic regression over its text
in two worker processes, one thread each, on two servers of one thread, into a model: with a record and without, in
turns. A figure is the median (minimum-maximum) of the rounds, and a ratio that of the two fits of a round. "in the
recorder" is the CPU time that a worker's thread spends in the calls of `shoal.models.recording.Recorder`, which write
the model before the first batch and the files. Each record is replayed in the same round, and the rows have to be those
of the fit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

import shoal
from figures import check, conditions, spread
from shoal.cluster.launch.local_cluster import running
from shoal.lineage import replay
from shoal.models import Checkpointing
from shoal.models.recording import Recorder
from shoal.tools.planted import PlantedModel, write_log

SERVERS, WORKERS = 2, 2


def timed(method: Any, spent: list[float]) -> Any:
    """Return a method that adds up the CPU time of its thread."""

    def call(*given: Any, **named: Any) -> Any:
        start = time.thread_time()
        try:
            return method(*given, **named)
        finally:
            spent.append(time.thread_time() - start)

    return call


def work(address: str, log: str, batch_size: int, folder: str, record: str) -> None:
    """Fit as one worker, and print what it took."""
    spent: list[float] = []
    for name in ("check", "start", "begin", "end", "met", "rest", "complete"):
        setattr(Recorder, name, timed(getattr(Recorder, name), spent))
    with shoal.connect(address, workers=WORKERS, threads=1, timeout=300, consistency="asp") as store:
        model = shoal.LogisticRegression(shoal.FTRL(alpha=0.1, beta=1.0, l1=0.5), store=store)
        share = shoal.read_criteo(log, batch_size=batch_size).split(store.rank, WORKERS)
        checkpoint = Checkpointing(Path(folder, "model"), record=record or None)
        store.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        model.fit(share, progress=False, checkpoint=checkpoint)
        store.barrier()
        print(
            json.dumps(
                {
                    "s": time.perf_counter() - start,
                    "CPU s": time.process_time() - cpu,
                    "in the recorder": sum(spent),
                    "examples": model.examples,
                }
            )
        )


def children_seconds() -> float:
    """Return the CPU time of all living processes below this one."""
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))


def fitted(log: Path, batch_size: int, folder: Path, record: str) -> dict[str, float]:
    """Fit on a cluster of its own; return the figures of the workers and the servers together."""
    with running(SERVERS, workers=WORKERS) as cluster:
        before = children_seconds()
        what = [sys.executable, __file__, "--work", cluster.address, str(log), str(batch_size), str(folder), record]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        children = [subprocess.Popen(what, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(WORKERS)]
        found = [json.loads(child.communicate()[0]) for child in children]
        servers = children_seconds() - before
    check(all(child.returncode == 0 for child in children), "a worker failed")
    return {
        "s": max(one["s"] for one in found),
        "CPU s": sum(one["CPU s"] for one in found) + servers,
        "in the recorder": sum(one["in the recorder"] for one in found),
        "examples": found[0]["examples"],
    }


def digests(directory: Path) -> list[str]:
    """Return the digests of the rows of a model."""
    with shoal.load(directory) as model:
        return [table.digest() for table in model.tables]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=500_000, metavar="N")
    parser.add_argument("--batch-size", type=int, default=2048, metavar="N")
    parser.add_argument("--rounds", type=int, default=6, metavar="N")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        address, log_path, size, folder, record = options.work
        work(address, log_path, int(size), folder, record)
        return
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    replays: list[Any] = []
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "train.tsv")
        write_log(log, PlantedModel(seed=1), options.examples, 0)
        for number in range(options.rounds + 1):
            for is_recorded in (True, False) if number % 2 else (False, True):
                with tempfile.TemporaryDirectory(dir=scratch) as place:
                    folder = Path(place)
                    record = str(folder / "record") if is_recorded else ""
                    one = fitted(log, options.batch_size, folder, record)
                    check(one["examples"] == options.examples, "not every example was learned once")
                    if not number:  # the first round warms the machine up
                        continue
                    found[is_recorded].append(one)
                    if is_recorded:
                        start = time.perf_counter()
                        made = replay(record, folder / "again")
                        seconds = time.perf_counter() - start
                        check(digests(folder / "model") == digests(folder / "again"), "the replay has other rows")
                        size = sum(file.stat().st_size for file in Path(record).glob("order-*"))
                        replays.append((seconds, size / made.messages, made.messages))
    print(f"{options.examples:,} examples, batches of {options.batch_size:,}; {conditions()}")
    print("| fit | s | CPU s of workers and servers |\n|---|---|---|")
    for is_recorded, name in ((False, "without a record"), (True, "recorded")):
        columns = [spread([one[what] for one in found[is_recorded]], 2) for what in ("s", "CPU s")]
        print(f"| {name} | {' | '.join(columns)} |")
    ratios = [
        spread([mine[what] / its[what] for mine, its in zip(found[True], found[False], strict=True)], 3)
        for what in ("s", "CPU s")
    ]
    print(f"| ratio | {' | '.join(ratios)} |")
    shares = [100 * one["in the recorder"] / one["CPU s"] for one in found[True]]
    print(
        f"in the recorder {spread([1000 * one['in the recorder'] for one in found[True]], 1)} CPU ms of both workers, "
    )
    print(f"{spread(shares, 2)} % of the CPU time")
    seconds, size, messages = zip(*replays, strict=True)
    print(f"replay {spread(seconds, 2)} s; {spread(messages)} messages of {spread(size, 2)} bytes each")


if __name__ == "__main__":
    main()
