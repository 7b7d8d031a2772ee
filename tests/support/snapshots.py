"""A script of changes between saves, and what a checkpoint holds."""

from __future__ import annotations

import contextlib

import numpy as np

import shoal
from shoal import checkpoint


def contents(folder):
    """The rows of a checkpoint: its slot files in order, whose names are random."""
    manifest = checkpoint.read_manifest(folder)
    return [
        (table.name, table.step, table.clock, table.rows, [(folder / file.name).read_bytes() for file in table.files])
        for table in manifest.tables
    ]


RULES = {
    "none": {},
    "count": {"admit": shoal.AfterCount(2, within=2, capacity=200), "expire": shoal.TimeToLive(2)},
    "bloom": {"admit": shoal.AfterBloom(2, capacity=2000, within=2), "expire": shoal.DecayedScore(0.5, floor=0.2)},
    "most": {"expire": shoal.MaxRows(150)},
}


class Script:
    """Changes of a store, drawn beforehand."""

    def __init__(self, store, seed):
        self.rng = np.random.default_rng(seed)
        self.store = store

    def step(self):
        for table in self.store.tables.values():
            keys = self.rng.integers(0, 2000, int(self.rng.integers(0, 500)), np.uint64)
            keys[:2] = (0, 2**64 - 1) if self.rng.integers(2) and len(keys) > 1 else keys[:2]
            rows = self.rng.standard_normal((len(keys), table.dim)).astype(np.float32)
            with contextlib.suppress(shoal.MemoryBudgetExceededError):
                self.change(table, keys, rows)
        match self.rng.integers(4):
            case 0:
                self.store.tick()
            case 1:
                self.store.sweep()

    def change(self, table, keys, rows):
        match self.rng.integers(6):
            case 0 | 1 | 2:
                table.push(keys, rows).result()
            case 3:
                unique = np.unique(keys)
                table.assign(unique, rows[: len(unique)])
            case 4:
                table.erase(keys[::2])
            case 5:
                table.decay(0.75)
