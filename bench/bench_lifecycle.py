"""The memory that admission rules save and what they cost: logistic regression with and without them.

    python bench/bench_lifecycle.py [--examples 400000]

Compare with McMahan et al., "Ad click prediction: a view from the trenches", KDD'13, table 1: memory saved and relative
increase of 1 - AUC for Bloom filters (which there admit a key that occurred more than n times before), and for
admission with a probability. The log is generated: keys with heavy tails under a planted model, so most keys occur once
and add nothing to the model. Each run trains on the same examples in one pass; AUC is that of the second half, each
example predicted before it is learned. Memory is that of rows, index and waiting keys.
"""

import argparse
import time

import numpy as np

import shoal
from shoal.metrics import auc
from shoal.table.stats import TableStats

FIELDS = 16
BATCH = 4096
CAPACITY = 1_500_000  # about the number of waiting keys

RULES = {
    "all": None,
    "Bloom, n = 1": shoal.AfterBloom(2, capacity=CAPACITY, error=0.02),
    "Bloom, n = 2": shoal.AfterBloom(3, capacity=CAPACITY, error=0.02),
    "count, n = 1": shoal.AfterCount(2),
    "count, n = 2": shoal.AfterCount(3),
    "coin, p = .1": shoal.WithProbability(0.1, seed=1),
    "coin, p = .03": shoal.WithProbability(0.03, seed=1),
}


def click_log(examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return keys uint64[examples, FIELDS], field by field, and labels: heavy tails, a constant weight for each key."""
    rng = np.random.default_rng(7)
    keys = np.empty((examples, FIELDS), np.uint64)
    margin = np.full(examples, -1.5)
    for field in range(FIELDS):
        # Every power of two of ranks is equally likely: there are always new keys.
        rank = (2.0 ** (rng.random(examples) * (8 + 2 * field))).astype(np.uint64)
        keys[:, field] = rank * np.uint64(FIELDS) + np.uint64(field)
        bits = shoal.data.mix(keys[:, field]) >> np.uint64(11)
        margin += (bits.astype(np.float64) * 2.0**-53 - 0.5) * 1.2
    return keys, (rng.random(examples) < 1 / (1 + np.exp(-margin))).astype(np.float32)


def trained(keys: np.ndarray, labels: np.ndarray, admit) -> tuple[TableStats, float, float]:
    """Return figures of the table, AUC of the second half, seconds."""
    began = time.perf_counter()
    margins = np.empty(len(labels))
    with shoal.local() as store:
        table = store.table("w", optimizer=shoal.FTRL(alpha=0.05), admit=admit)
        for start in range(0, len(labels), BATCH):
            some = keys[start : start + BATCH]
            flat = some.ravel()
            batch = store.key_batch(flat)
            weights = table.pull_unique(batch)[batch.inverse].reshape(some.shape)
            margin = weights.sum(axis=1, dtype=np.float64)
            margins[start : start + BATCH] = margin
            error = (1 / (1 + np.exp(-margin)) - labels[start : start + BATCH]).astype(np.float32)
            table.push_unique(batch, batch.sum(np.repeat(error, FIELDS)[:, None])).result()
            store.tick()
        stats = table.stats()
    half = len(labels) // 2
    return stats, auc(labels[half:], margins[half:]), time.perf_counter() - began


def main() -> None:
    """Train with each rule and print its memory and cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=400_000)
    keys, labels = click_log(parser.parse_args().examples)
    unique = len(np.unique(keys))
    print(f"{len(labels):,} examples, {keys.size:,} keys, {unique:,} of them distinct")
    print(f"{'rule':15} {'rows':>10} {'MB':>7} {'saved':>7} {'AUC':>8} {'1-AUC':>8} {'seconds':>8}")
    whole = None
    for name, admit in RULES.items():
        stats, found, seconds = trained(keys, labels, admit)
        whole = whole or (stats.bytes, found)
        print(
            f"{name:15} {stats.rows:10,} {stats.bytes / 1e6:7.1f} {1 - stats.bytes / whole[0]:7.1%} {found:8.5f} "
            f"{(whole[1] - found) / (1 - whole[1]):+8.3%} {seconds:8.1f}"
        )


if __name__ == "__main__":
    main()
