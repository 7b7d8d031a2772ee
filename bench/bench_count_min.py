"""Count-min sketches: inserts a second of CPU time, with the pushes that send the counts, and the errors of estimates.

    python bench/bench_count_min.py                  two minutes, 1.5 GB

One worker thread counts keys, a million an update, flushes after as many inserts as the sketch has counters, but at
least a million, and waits, so that what is measured includes all work until the counts are in the table. The tables are
in the process (``local``), or in a server process (``cluster``), whose CPU time counts too. The keys are 64-bit
numbers, uniform or of a Zipf distribution (exponent 1.1).

The rate is inserts / (CPU time of the worker and the server), of a core. For comparison, ``numpy.add.at`` adds at the
same positions, without computing them.

Checks: counters equal those that NumPy computes at the positions, no estimate is below the true count, and at most
the share delta of the keys has an error above epsilon.
"""

import argparse
import time

import numpy as np
import numpy.typing as npt

import shoal
from figures import check, conditions, cpu_seconds, spread
from shoal import _core
from shoal.cluster.launch import local_cluster

PAPER = 1.15  # million inserts a second and core: Li et al., OSDI'14, section 5.3
EPSILONS = (1e-4, 1e-6)
DELTA = 0.01


def draw(kind: str, size: int, seed: int) -> npt.NDArray[np.uint64]:
    """Draw keys of a distribution."""
    random = np.random.default_rng(seed)
    if kind == "uniform":
        return random.integers(0, 2**64, size, dtype=np.uint64)
    return random.zipf(1.1, size).astype(np.uint64)


def check_results(sketch: shoal.sketches.CountMin, keys: npt.NDArray[np.uint64], times: int) -> float:
    """Check the counters and the errors of estimates of keys, each of which was counted some times.

    Returns the largest error as a share of epsilon N.
    """
    pool = _core.ThreadPool(1)
    plain = np.zeros(sketch.depth * sketch.width, np.int64)
    for begin in range(0, len(keys), 1 << 20):
        positions = _core.count_min_positions(
            keys[begin : begin + (1 << 20)], sketch.seed, sketch.depth, sketch.width, pool
        )
        plain += times * np.bincount(positions.reshape(-1), minlength=len(plain))
    check(np.array_equal(sketch.counters().reshape(-1), plain), "counters differ from those of NumPy")
    asked, counts = np.unique(keys, return_counts=True)
    errors = sketch.query(asked) - times * counts
    bound = sketch.epsilon * times * len(keys)
    check(int(errors.min()) >= 0, "an estimate is below the true count")
    check(float((errors > bound).mean()) <= sketch.delta, "more errors above epsilon than delta allows")
    check(sketch.total() == times * len(keys), "the total is not the number of inserts")
    return float(errors.max()) / bound


def numpy_seconds(sketch: shoal.sketches.CountMin, keys: npt.NDArray[np.uint64]) -> float:
    """Measure NumPy's additions at the positions of keys."""
    positions = _core.count_min_positions(keys, sketch.seed, sketch.depth, sketch.width, _core.ThreadPool(1))
    counters = np.zeros(sketch.depth * sketch.width, np.int64)
    begin = time.process_time()
    np.add.at(counters, positions.reshape(-1), 1)
    return time.process_time() - begin


def measure(store: shoal.Store, server: int | None, kind: str, epsilon: float, rounds: int, size: int) -> str:
    """Measure one cell; return its line of the table."""
    sketch = shoal.sketches.CountMin(store, f"{kind} {epsilon}", epsilon=epsilon, delta=DELTA)
    batches = [draw(kind, size, seed) for seed in range(rounds + 1)]
    rates, updates, ratios = [], [], []
    times = max(1, round(sketch.depth * sketch.width / size))  # updates before a flush
    for number, keys in enumerate(batches):
        of_server = cpu_seconds(server) if server is not None else 0.0
        begin = time.process_time()
        for _ in range(times):
            sketch.update(keys)
        updated = time.process_time()
        sketch.flush().result()
        seconds = time.process_time() - begin
        if server is not None:
            seconds += cpu_seconds(server) - of_server
        if number:  # the first one makes the rows
            rates.append(times * len(keys) / seconds / 1e6)
            updates.append(times * len(keys) / (updated - begin) / 1e6)
            ratios.append(times * numpy_seconds(sketch, keys) / (updated - begin))
    worst = check_results(sketch, np.concatenate(batches), times)
    where = "local" if server is None else "cluster"
    return (
        f"| {where} | {kind} | {epsilon:g} | {sketch.depth} x {sketch.width:,} | {spread(rates, 1)} | "
        f"{min(rates) / PAPER:.0f} | {spread(updates, 1)} | {spread(ratios, 1)} | {worst:.2f} |"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keys", type=int, default=1_000_000, help="of one update and flush")
    args = parser.parse_args()
    print(conditions())
    print(
        "| tables | keys | epsilon | counters | million inserts / CPU second | times the 1.15 of OSDI'14, least | "
        "update alone | numpy.add.at / update | largest error / (epsilon N) |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for epsilon in EPSILONS:
        for kind in ("uniform", "zipf"):
            with shoal.local(threads=1) as store:
                print(measure(store, None, kind, epsilon, args.rounds, args.keys), flush=True)
            with (
                local_cluster.running(1) as cluster,
                shoal.connect(cluster.address, consistency=shoal.ASP(), threads=1) as store,
            ):
                process = cluster.servers[0].process
                print(measure(store, process.pid, kind, epsilon, args.rounds, args.keys), flush=True)


if __name__ == "__main__":
    main()
