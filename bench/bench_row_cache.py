"""What a worker's cache itself costs, without a network: CPU time of its calls for each unique key of a batch.

    python bench/bench_row_cache.py                             100,000 ids, FTRL, one weight
    python bench/bench_row_cache.py --rows 26000
    python bench/bench_row_cache.py --dim 16 --optimizer Adagrad

One process does what a worker does in each clock: it reads the rows of a batch, keeps those that would have been
fetched, makes a step, and takes the changes that are due after eight clocks. The batches are those of bench_cache.py.
The first ten clocks fill the cache and are not counted. Least and median of the rounds, each with an empty cache.
"""

import argparse
import statistics
import time

import numpy as np

import shoal
from ctr.draw import Draw
from figures import conditions
from shoal import _core
from shoal.table.spec import TableRecord, TableSpec

STALENESS = 8
BATCHES = 20
CLOCKS = 60
SLOTS = 256
STAGES = ("reading", "keeping what was fetched", "steps", "sending")
OPTIMIZERS = {
    "FTRL": shoal.FTRL(alpha=0.14, beta=1.0, l1=0.1),
    "Adagrad": shoal.Adagrad(lr=0.1),
    "RowWiseAdagrad": shoal.RowWiseAdagrad(lr=0.1),
    "SGD": shoal.SGD(lr=0.1),
}


def run(arguments: argparse.Namespace, batches: list[np.ndarray]) -> dict[str, float]:
    """Return the nanoseconds of each stage for a key, and those of a change that is sent."""
    rule, dim = OPTIMIZERS[arguments.optimizer], arguments.dim
    spec = TableSpec(name="t", dim=dim, optimizer=rule, init=shoal.Zeros(), dtype="float32", seed=0)
    cache = _core.RowCache(TableRecord.of(spec).native(), arguments.cache_rows, local_steps=True)
    rng = np.random.default_rng(1)
    most = max(map(len, batches))
    grads = rng.normal(size=(most, dim)).astype(np.float32)
    whole = np.abs(rng.normal(size=(most, cache.width))).astype(np.float32)
    weights = np.empty((most, dim), np.float32)
    spent = dict.fromkeys(STAGES, 0)
    keys = sent = 0
    for clock in range(CLOCKS):
        hashes = batches[clock % BATCHES]
        rows = weights[: len(hashes)]
        marks = [time.thread_time_ns()]
        positions, fetched = cache.read(hashes, max(0, clock - STALENESS), clock + 1, True, rows, SLOTS)[:2]
        marks.append(time.thread_time_ns())
        answer = whole[: len(fetched)]
        cache.fill(fetched, clock + 1, clock, True, answer)
        cache.copy_weights_of(answer, positions, rows)
        marks.append(time.thread_time_ns())
        cache.add(hashes, grads[: len(hashes)], None, clock, SLOTS)
        marks.append(time.thread_time_ns())
        due = cache.send_older(clock - STALENESS, SLOTS) if clock >= STALENESS else None
        marks.append(time.thread_time_ns())
        if clock >= 10:
            for stage, begin, end in zip(STAGES, marks[:-1], marks[1:], strict=True):
                spent[stage] += end - begin
            keys += len(hashes)
            sent += 0 if due is None else len(due[0])
    found = {stage: of / keys for stage, of in spent.items()}
    return {**found, "all": sum(found.values()), "a change that is sent": spent["sending"] / max(sent, 1)}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, metavar="N", help="ids (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=1, metavar="N")
    parser.add_argument("--optimizer", default="FTRL", choices=OPTIMIZERS)
    parser.add_argument("--cache-rows", type=int, default=400_000, metavar="N")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    arguments = parser.parse_args()
    draw = Draw(arguments.rows)
    ids = [np.unique(draw.batch(2 * number).ids.ravel().astype(np.uint64)) for number in range(BATCHES)]
    batches = [np.sort(_core.mix(some)) for some in ids]
    rounds = [run(arguments, batches) for _ in range(arguments.rounds)]
    print(conditions())
    for stage in rounds[0]:
        found = [one[stage] for one in rounds]
        print(f"{stage}: {min(found):.1f} ({statistics.median(found):.1f}) ns")


if __name__ == "__main__":
    main()
