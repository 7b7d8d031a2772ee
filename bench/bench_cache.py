"""Caches at the workers: bytes, CPU time and log-loss of logistic regression by staleness, on a Zipf(1.05) click log.

    python bench/bench_cache.py                                 three rounds: about ten minutes
    python bench/bench_cache.py --rows 26000                    a smaller vocabulary
    python bench/bench_cache.py --dim 16 --optimizer Adagrad    rows of 16 weights

Workers make the steps of the optimizer in the rows that they keep; "sums" are settings where they send sums of
gradients instead. An example has one id of each of 26 fields, drawn by Zipf's law with exponent 1.05
(bench/ctr/draw.py); its label is drawn from a planted logistic model. Each worker learns batches of 4096 examples with
FTRL or another optimizer, one clock each, then both evaluate examples that nobody has learned. The workers and servers
are processes of this machine with one thread each, and the batches are drawn before the time begins. The settings take
turns.

CPU is that of the worker's process in its loop, less that of the same loop without a table, for each unique key of its
batches; servers' CPU is that of their processes. All figures are medians (ranges) of the rounds. Each round checks that
every gradient arrived: the sum of a table of SGD with a rate of 1, which gets a gradient of 1 for each id, is exact.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from figures import check, conditions, cpu_seconds, spread
from shoal.cluster.launch.local_cluster import running


class Setting(NamedTuple):
    """How the job runs, and what its workers keep."""

    bound: int  # the staleness of the job
    held: int | None = None  # that of the cache; None: there is none
    local_steps: bool = True
    numbers: str = "float32"  # as which weights and gradients, or whole rows and their changes, are sent


SETTINGS = {
    "SSP(16), no cache": Setting(16),
    "SSP(16), no cache, bfloat16": Setting(16, numbers="bfloat16"),
    "SSP(16), s = 0": Setting(16, 0),
    "SSP(16), s = 2": Setting(16, 2),
    "SSP(8), s = 4": Setting(8, 4),
    "SSP(16), s = 8": Setting(16, 8),
    "SSP(24), s = 8": Setting(24, 8),
    "SSP(24), s = 8, bfloat16": Setting(24, 8, numbers="bfloat16"),
    "SSP(16), s = 2, sums": Setting(16, 2, local_steps=False),
    "SSP(24), s = 8, sums": Setting(24, 8, local_steps=False),
}

# A worker prints one line of JSON.
WORKER = """
import json, sys, time
import numpy as np
import shoal
from ctr.draw import BATCH, FIELDS, Draw
address, workers, rows, dim, batches, alpha, optimizer, room, counts, *setting = json.loads(sys.argv[1])
staleness, held, steps, numbers = setting
how = {} if held is None else {"cache": shoal.Cache(rows=room, staleness=held, local_steps=steps)}
if not counts:
    how["filters"] = shoal.Filters(gradients=numbers, weights=numbers)
draw = Draw(rows)

def loss_of(labels, margins):
    return np.logaddexp(0.0, np.where(labels > 0, -margins, margins)).mean()

def learn(made, pull, push, tick):
    total = 0.0
    for ids, labels in made:
        weights = pull(ids)
        margins = weights.reshape(BATCH, FIELDS, dim).sum(axis=(1, 2), dtype=np.float64)
        total += loss_of(labels, margins)
        slopes = (1 / (1 + np.exp(-margins)) - labels).astype(np.float32)
        push(ids, np.repeat(np.repeat(slopes, FIELDS)[:, None], dim, axis=1))
        tick()
    return total / len(made)

def used(work):
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - wall, time.process_time() - cpu

with shoal.connect(
    address, workers=workers, threads=1, timeout=300, consistency=shoal.SSP(staleness), **how
) as store:
    if counts:
        table = store.table("counts", dim=dim, optimizer=shoal.SGD(lr=1.0))
    else:
        rule = shoal.FTRL(alpha=alpha, beta=1.0, l1=0.1) if optimizer == "FTRL" else getattr(shoal, optimizer)(lr=alpha)
        table = store.table("clicks", dim=dim, optimizer=rule)
    mine = [draw.batch(store.rank + workers * number) for number in range(batches)]
    made = [(one.ids.ravel().astype(np.uint64), one.labels) for one in mine]
    unique = sum(len(np.unique(ids)) for ids, _ in made)
    nothing = np.zeros((BATCH * FIELDS, dim), np.float32)
    _, _, idle = used(lambda: learn(made, lambda ids: nothing, lambda ids, grads: None, lambda: None))
    store.barrier()
    before = store.metrics()
    if counts:
        for ids, _ in made:
            table.pull(ids)
            table.push(ids, np.full((len(ids), dim), -1.0, np.float32))
            store.tick()
        store.barrier()
        report = {"exact": bool((table.sum() == workers * batches * BATCH * FIELDS).all())}
    else:
        progressive, seconds, cpu = used(lambda: learn(made, table.pull, table.push, store.tick))
        store.flush()
        after = store.metrics()
        store.barrier()
        test = [draw.batch(1_000_000 + number) for number in range(10)]
        losses = []
        for one in test:
            weights = table.pull(one.ids.ravel().astype(np.uint64))
            losses.append(loss_of(one.labels, weights.reshape(BATCH, FIELDS, dim).sum(axis=(1, 2), dtype=np.float64)))
        report = {
            "rank": store.rank, "seconds": seconds, "cpu": cpu - idle, "keys": unique, "progressive": progressive,
            "logloss": float(np.mean(losses)), "cache": store.cache_metrics().get("clicks", {}),
            "bytes": sum(after[name] - before[name] for name in ("bytes_sent", "bytes_received")),
        }
    store.barrier()
print(json.dumps(report))
"""


def run(arguments: argparse.Namespace, setting: Setting, *, counts: bool) -> list[dict[str, Any]]:
    """Run the workers on a cluster of their own: what they report."""
    with running(arguments.servers, workers=arguments.workers) as cluster:
        batches = min(arguments.batches, 20) if counts else arguments.batches
        what = [cluster.address, arguments.workers, arguments.rows, arguments.dim, batches, arguments.alpha]
        what.append(arguments.optimizer)
        command = [sys.executable, "-c", WORKER, json.dumps([*what, arguments.cache_rows, counts, *setting])]
        children = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
            for _ in range(arguments.workers)
        ]
        found = []
        for child in children:
            out = child.communicate()[0]
            check(child.returncode == 0, "a worker failed")
            found.append(json.loads(out))
        mine = {child.pid for child in children}
        servers = [one.pid for one in psutil.Process().children(recursive=True) if one.pid not in mine]
        found[0]["servers_cpu"] = sum(map(cpu_seconds, servers))
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, default=100_000, metavar="N", help="ids of all fields (default: %(default)s)"
    )
    parser.add_argument("--dim", type=int, default=1, metavar="N")
    parser.add_argument("--batches", type=int, default=120, metavar="N", help="of each worker (default: %(default)s)")
    parser.add_argument("--optimizer", default="FTRL", choices=["FTRL", "Adagrad", "RowWiseAdagrad", "SGD"])
    parser.add_argument("--alpha", type=float, default=0.14, metavar="A", help="its rate (default: %(default)s)")
    parser.add_argument("--cache-rows", type=int, default=400_000, metavar="N", help="of each worker's cache")
    parser.add_argument("--servers", type=int, default=2, metavar="N")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS, metavar="NAME")
    arguments = parser.parse_args()
    settings = {name: SETTINGS[name] for name in arguments.settings}
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in settings}
    print(conditions(), flush=True)
    for _ in range(arguments.rounds):
        for name, setting in settings.items():
            found[name].append(run(arguments, setting, counts=False))
    for name, setting in settings.items():
        check(all(one["exact"] for one in run(arguments, setting, counts=True)), f"{name}: gradients were lost")
    print(conditions(), flush=True)

    examples = arguments.batches * arguments.workers * 4096
    first = next(iter(settings))

    def of(name: str, what: str) -> list[float]:
        return [sum(one[what] for one in some) for some in found[name]]

    print("| | bytes an example | fewer | thousand examples/s | ns a key: workers | servers | log-loss | more |")
    print("|---|---|---|---|---|---|---|---|")
    plain = sorted(some[0]["logloss"] for some in found[first])[arguments.rounds // 2]
    for name, rounds in found.items():
        ratios = [1 - a / b for a, b in zip(of(name, "bytes"), of(first, "bytes"), strict=True)]
        rates = [examples / max(one["seconds"] for one in some) / 1e3 for some in rounds]
        keys = of(name, "keys")
        cpu = [1e9 * a / b for a, b in zip(of(name, "cpu"), keys, strict=True)]
        servers = [1e9 * some[0]["servers_cpu"] / b for some, b in zip(rounds, keys, strict=True)]
        losses = [some[0]["logloss"] for some in rounds]
        bytes_each = spread([a / examples for a in of(name, "bytes")])
        more = 1e4 * (sorted(losses)[len(losses) // 2] - plain)
        cells = [name, bytes_each, f"{spread([100 * one for one in ratios], 1)} %", spread(rates), spread(cpu)]
        print("|", " | ".join([*cells, spread(servers), spread(losses, 5), f"{more:+.2f}e-4"]), "|")
    for name, rounds in found.items():
        print(f"{name}: {rounds[0][0]['cache']}")


if __name__ == "__main__":
    main()
