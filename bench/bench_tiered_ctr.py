"""DeepFM whose embeddings are on disk, with 1/4 and 1/10 of their rows in memory, compared with all of them in memory.

    python bench/bench_tiered_ctr.py --rows 2e6                  a few minutes, 300 MB of disk for each tier
    python bench/bench_tiered_ctr.py --rows 2e7 --rounds 9

An example has 26 ids, one for each field, drawn by Zipf's law (exponent 1.05) within its field; all rows, of dim 16
under Adagrad, exist from the start. The table of dim 1 is in memory: it is too narrow for a tier. Batches of 4096 come
through `shoal.torch.Pipeline`, which sorts their keys and has their rows read ahead. The three sides take turns, each
of --steps batches, in rotating order; all use the same batches.

Checks: the tables and the losses of all sides are equal, bit for bit.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import shoal
from figures import check, conditions, spread
from shoal.torch.models import DeepFM

FIELDS, DIM, BATCH = 26, 16, 4096
ROW = 8 * DIM
RULE = shoal.Adagrad(lr=0.02)
SIDES = {"in memory": None, "1/4": 4, "1/10": 10}


class Side:
    """A model with its store."""

    def __init__(self, directory: Path, rows: int, share: int | None) -> None:
        torch.manual_seed(1)
        self.store = shoal.local()
        if share is not None:
            memory = int(rows / share * (ROW + 40) + 2 * rows + (1 << 22))
            self.store.table(
                "embedding",
                dim=DIM,
                optimizer=RULE,
                init=shoal.Normal(0.01),
                storage=shoal.Tiered(directory, memory=memory),
            )
        self.model = DeepFM(shoal.torch.tables(self.store, RULE), FIELDS, dim=DIM)
        self.table = self.store.tables["embedding"]
        for first in range(0, rows, 8192):
            keys = np.arange(first, min(rows, first + 8192), dtype=np.uint64)
            self.table.push(keys, np.zeros((len(keys), DIM), np.float32)).result()
        self.dense = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.cpu = 0.0
        self.steps: list[float] = []

    def turn(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Train on some batches."""
        lookups = {module: (lambda batch: batch[0]) for module in self.model.modules() if hasattr(module, "table")}
        begun, cpu = time.perf_counter(), time.process_time()
        last = begun
        for keys, labels in shoal.torch.Pipeline(batches, lookups):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(shoal.torch.Inputs(keys)), labels)
            loss.backward()
            self.dense.step()
            self.dense.zero_grad()
            self.losses.append(loss.item())
            now = time.perf_counter()
            self.steps.append(now - last)
            last = now
        self.rates.append(len(batches) * BATCH / (time.perf_counter() - begun))
        self.cpu += time.process_time() - cpu


def draws(rows: int, rng: np.random.Generator, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw batches: ids of each field from a range of its own, and labels."""
    each = rows // FIELDS
    below = np.cumsum(np.arange(1, each + 1, dtype=np.float64) ** -1.05)
    batches = []
    for _ in range(count):
        ids = np.searchsorted(below, rng.random((BATCH, FIELDS)) * below[-1]) + np.arange(FIELDS) * each
        labels = torch.from_numpy((rng.random(BATCH) < 0.3).astype(np.float32))
        batches.append((torch.from_numpy(ids.astype(np.int64)), labels))
    return batches


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=2e6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm", type=int, default=60, help="batches before, until hot rows are in memory")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    rows = int(args.rows)
    rng = np.random.default_rng(1)
    print(f"{rows:,} rows, {conditions()}")
    sides = {name: Side(args.dir, rows, share) for name, share in SIDES.items()}
    warm = draws(rows, rng, args.warm)
    for side in sides.values():
        side.turn(warm)
        side.rates, side.cpu, side.steps = [], 0.0, []
    names = list(sides)
    before = {name: side.table.stats().tier for name, side in sides.items()}
    for number in range(args.rounds):
        batches = draws(rows, rng, args.steps)
        for name in names[number % 3 :] + names[: number % 3]:
            sides[name].turn(batches)
    check(len({tuple(side.losses) for side in sides.values()}) == 1, "losses differ")
    check(len({side.table.digest() for side in sides.values()}) == 1, "tables differ")
    base = sides["in memory"].rates
    for name, side in sides.items():
        ms = np.array(side.steps) * 1e3
        ratios = [a / b for a, b in zip(side.rates, base, strict=True)]
        text = (
            f"{name}: {spread(side.rates)} examples/s, {spread(ratios, 2)} of those in memory; "
            f"step p50 {np.median(ms):.1f} ms, p99 {np.quantile(ms, 0.99):.1f}; "
            f"{side.cpu / len(ms) * 1e3:.1f} ms of CPU time a step"
        )
        tier, then = side.table.stats().tier, before[name]
        if tier is not None and then is not None:
            hits, misses = tier.hits - then.hits, tier.misses - then.misses
            text += (
                f"; {tier.memory_bytes / 1e6:.0f} MB for {tier.rows_in_memory / rows:.3f} of the rows, misses "
                f"{misses / len(ms):,.0f} a step, {misses / max(1, hits + misses):.3f} of the keys, "
                f"{(tier.prefetched - then.prefetched) / max(1, misses):.2f} of them read ahead"
            )
        print(text)
    print(conditions())


if __name__ == "__main__":
    main()
