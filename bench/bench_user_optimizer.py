"""The cost of an optimizer in Python: a push with a user's optimizer compared with the engine's own rule.

    python bench/bench_user_optimizer.py                1e6 keys, pushes of 65,536 of them, dims 1, 16 and 64
    python bench/bench_user_optimizer.py --keys 1e5 --dims 16 --threads 1

Two tables with the same keys are pushed the same batches in turns, A B A B, once they have all rows. Medians and ranges
of milliseconds of wall time and of CPU time of the process, and the ratio of speeds. SGD ends with the same bits in
both tables. The engine's Adagrad rounds its sum stochastically, NumPy's does not: their weights agree to 1 %.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np

import shoal
from figures import check, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(shoal.UserOptimizer):
    """As `shoal.SGD`."""

    lr: float = 0.01

    def step(self, weights, state, grads, steps):
        """Subtract the scaled gradients."""
        grads *= self.lr
        weights -= grads


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad(shoal.UserOptimizer):
    """As `shoal.Adagrad`."""

    lr: float = 0.01
    eps: float = 1e-10

    def initial_state(self):
        """Start the sum of squares."""
        return {"n": 0.0}

    def step(self, weights, state, grads, steps):
        """Add the squares, then subtract the scaled gradients."""
        (n,) = state
        n += grads * grads
        root = np.sqrt(n)
        root += self.eps
        grads *= self.lr
        grads /= root
        weights -= grads


RULES = (("SGD", shoal.SGD(0.01), SGD()), ("Adagrad", shoal.Adagrad(0.01), Adagrad()))


def measure(name: str, ours: shoal.optim.Optimizer, theirs: shoal.UserOptimizer, dim: int, arguments) -> None:
    """Print a row of the table."""
    random = np.random.default_rng(3)
    keys = int(arguments.keys)
    with shoal.local(threads=arguments.threads) as store:
        tables = [store.table("ours", dim=dim, optimizer=ours), store.table("theirs", dim=dim, optimizer=theirs)]
        for first in range(0, keys, arguments.rows):
            some = np.arange(first, min(first + arguments.rows, keys), dtype=np.uint64)
            grads = random.standard_normal((len(some), dim)).astype(np.float32)
            for table in tables:
                table.push(some, grads).result()
        wall: list[list[float]] = [[], []]
        cpu: list[list[float]] = [[], []]
        for _ in range(arguments.rounds):
            some = random.choice(keys, arguments.rows, replace=False).astype(np.uint64)
            grads = random.standard_normal((len(some), dim)).astype(np.float32)
            for table, walls, cpus in zip(tables, wall, cpu, strict=True):
                began, used = time.perf_counter(), time.process_time()
                table.push(some, grads).result()
                walls.append((time.perf_counter() - began) * 1e3)
                cpus.append((time.process_time() - used) * 1e3)
        rows = [table.pull(some) for table in tables]
        same = np.array_equal(*rows) if name == "SGD" else np.allclose(*rows, rtol=0.01, atol=1e-4)
        check(same, "the weights differ")
    ratios = [statistics.median(kind[0]) / statistics.median(kind[1]) for kind in (wall, cpu)]
    figures = " | ".join(spread(kept, 2) for kept in (*wall, *cpu))
    print(f"| {name} | {dim} | {figures} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


def main() -> None:
    """Measure each rule at each dim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=float, default=1e6)
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--dims", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    print(
        "| rule | dim | engine, ms | user's, ms | engine, CPU ms | user's, CPU ms | speed, user's / engine | by CPU |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name, ours, theirs in RULES:
        for dim in arguments.dims:
            measure(name, ours, theirs, dim, arguments)


if __name__ == "__main__":
    main()
