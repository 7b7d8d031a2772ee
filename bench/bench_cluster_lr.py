"""Logistic regression on a cluster compared with one process: examples/s, bytes an example, and the effect of filters.

    python bench/bench_cluster_lr.py                             300,000 examples: about two minutes
    python bench/bench_cluster_lr.py --examples 50000 --rounds 1 --servers 1 --workers 1
    python bench/bench_cluster_lr.py --rounds 1 --thresholds 0.1 0.5 --factors 16    a factorization machine instead

Draws a click log (39 features an example, as `make demo` does), and trains one pass over its text: in one process with
two threads, and with servers and workers that are processes of this machine, one thread each, on shares of the same
file. All take turns. The time is from before the reader is opened until the last worker's fit has ended. Each round
checks that all examples were learned, that exact filters give the same bits as no filter, and that one worker gives the
bits of one process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from figures import check, spread
from shoal.cluster.launch.local_cluster import running
from shoal.tools.planted import PlantedModel, write_log

OPTIMIZER = shoal.FTRL(alpha=0.1, beta=1.0, l1=0.5)
SETTINGS: dict[str, dict[str, Any]] = {
    "no filter": {},
    "key caching": {"key_caching": True},
    "zeros": {"zeros": True},
    "key caching, zeros": {"key_caching": True, "zeros": True},
    "bfloat16 gradients": {"gradients": "bfloat16"},
    "bfloat16 both ways": {"gradients": "bfloat16", "weights": "bfloat16"},
    "threshold 0.1, zeros": {"threshold": 0.1, "zeros": True},
    "all": {"key_caching": True, "zeros": True, "gradients": "bfloat16", "weights": "bfloat16", "threshold": 0.1},
}
EXACT = ("no filter", "key caching", "zeros", "key caching, zeros")

# A worker prints one line of JSON.
WORKER = """
import hashlib, json, sys, time
import shoal
address, workers, path, test, batch_size, factors, filters = json.loads(sys.argv[1])
where = {"filters": shoal.Filters(**filters)} if filters else {}
with shoal.connect(address, workers=workers, threads=1, timeout=300, **where) as store:
    optimizer = shoal.FTRL(alpha=0.1, beta=1.0, l1=0.5)
    model = (
        shoal.FactorizationMachine(factors, optimizer=optimizer, store=store)
        if factors
        else shoal.LogisticRegression(optimizer, store=store)
    )
    share = shoal.read_criteo(path, batch_size=batch_size).split(store.rank, workers)
    store.barrier()
    before, start = store.metrics(), time.perf_counter()
    model.fit(share, progress=False)
    store.barrier()
    seconds, after = time.perf_counter() - start, store.metrics()
    report = {"seconds": seconds, "examples": model.examples, "rank": store.rank}
    report |= {name: after.get(name, 0) - before.get(name, 0) for name in ("bytes_sent", "bytes_received")}
    if store.rank == 0:
        margins = model.decision_function(shoal.read_criteo(test))
        report |= {"logloss": model.evaluate(shoal.read_criteo(test)).logloss}
        report |= {"bits": hashlib.sha256(margins.tobytes()).hexdigest()}
    store.barrier()
print(json.dumps(report))
"""

# The same in one process, without a cluster.
ALONE = """
import hashlib, json, sys, time
import shoal
path, test, batch_size, factors = json.loads(sys.argv[1])
with shoal.local(threads=2) as store:
    optimizer = shoal.FTRL(alpha=0.1, beta=1.0, l1=0.5)
    model = (
        shoal.FactorizationMachine(factors, optimizer=optimizer, store=store)
        if factors
        else shoal.LogisticRegression(optimizer, store=store)
    )
    start = time.perf_counter()
    model.fit(shoal.read_criteo(path, batch_size=batch_size), progress=False)
    seconds = time.perf_counter() - start
    margins = model.decision_function(shoal.read_criteo(test))
    logloss = model.evaluate(shoal.read_criteo(test)).logloss
    report = {"seconds": seconds, "examples": model.examples, "logloss": logloss}
    print(json.dumps(report | {"bits": hashlib.sha256(margins.tobytes()).hexdigest()}))
"""


def started(code: str, arguments: list[Any]) -> subprocess.Popen[str]:
    """Start a child process."""
    return subprocess.Popen([sys.executable, "-c", code, json.dumps(arguments)], stdout=subprocess.PIPE, text=True)


def output_of(child: subprocess.Popen[str]) -> Any:
    """Wait for a child: the JSON that it printed."""
    out = child.communicate()[0]
    check(child.returncode == 0, "a child failed")
    return json.loads(out)


def on_cluster(arguments: argparse.Namespace, log: Path, test: Path, filters: dict[str, Any]) -> dict[str, Any]:
    """Train on a cluster of its own: the figures of all workers together."""
    with running(arguments.servers, workers=arguments.workers) as cluster:
        what = [
            cluster.address,
            arguments.workers,
            str(log),
            str(test),
            arguments.batch_size,
            arguments.factors,
            filters,
        ]
        found = [output_of(child) for child in [started(WORKER, what) for _ in range(arguments.workers)]]
    whole: dict[str, Any] = next(one for one in found if one["rank"] == 0)
    for name in ("bytes_sent", "bytes_received"):  # the examples are those of all workers
        whole[name] = sum(one[name] for one in found)
    whole["seconds"] = max(one["seconds"] for one in found)
    return whole


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=300_000, metavar="N")
    parser.add_argument("--batch-size", type=int, default=8192, metavar="N", help="of each worker (default: 8192)")
    parser.add_argument("--servers", type=int, default=2, metavar="N")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--factors", type=int, default=0, metavar="DIM", help="a factorization machine of this dim")
    parser.add_argument("--thresholds", nargs="+", type=float, metavar="T", help="only no filter, zeros, and these")
    arguments = parser.parse_args()
    settings = SETTINGS
    if arguments.thresholds is not None:
        settings = {name: SETTINGS[name] for name in ("no filter", "zeros")}
        settings |= {f"threshold {t:g}, zeros": {"threshold": t, "zeros": True} for t in arguments.thresholds}
    alone, found = [], {name: [] for name in settings}  # type: ignore[var-annotated]
    with tempfile.TemporaryDirectory() as scratch:
        log, test = Path(scratch, "train.tsv"), Path(scratch, "test.tsv")
        planted = PlantedModel(seed=1)
        write_log(log, planted, arguments.examples, 0)
        write_log(test, planted, 20_000, 1 << 40)
        for _ in range(arguments.rounds):
            alone.append(output_of(started(ALONE, [str(log), str(test), arguments.batch_size, arguments.factors])))
            for name, filters in settings.items():
                found[name].append(on_cluster(arguments, log, test, filters))
    every = [*alone, *(one for some in found.values() for one in some)]
    check(all(one["examples"] == arguments.examples for one in every), "not every example was learned once")
    exact = {one["bits"] for name in EXACT for one in found.get(name, [])}
    check(len(exact) == 1, "an exact filter changed bits")
    check(arguments.workers > 1 or exact == {alone[0]["bits"]}, "one worker does not have the bits of one process")

    def rate(some: list[dict[str, Any]]) -> str:
        return spread([one["examples"] / one["seconds"] / 1e3 for one in some])

    where = f"{arguments.servers} servers, {arguments.workers} workers"
    print("| where | thousand examples/s | bytes an example, to and from the servers | held-out log-loss |")
    print("|---|---|---|---|")
    print(f"| one process, 2 threads | {rate(alone)} | 0 | {alone[0]['logloss']:.6f} |")
    for name, some in found.items():
        ways = ("bytes_sent", "bytes_received")
        sent, received = (np.median([one[way] / one["examples"] for one in some]) for way in ways)
        print(f"| {where}: {name} | {rate(some)} | {sent:.0f} + {received:.0f} | {some[0]['logloss']:.6f} |")


if __name__ == "__main__":
    main()
