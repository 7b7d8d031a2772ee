"""Saves of a cluster's tables, and their pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import shoal
from shoal import checkpoint

KEYS = np.append(np.arange(3000, dtype=np.uint64), np.array([2**63, 2**64 - 1], np.uint64))


RULES = {"admit": shoal.AfterBloom(2, capacity=2000), "expire": shoal.TimeToLive(5)}


SLOTS = 32


def tables_of(store: shoal.Store) -> list[shoal.Table]:
    return [
        store.table("wide", dim=3, optimizer=shoal.Adagrad(lr=0.1), init=shoal.Uniform(0.1, seed=3)),
        store.table("ruled", optimizer=shoal.SGD(lr=1.0), **RULES),
        store.table("empty"),
    ]


def clocks(store: shoal.Store, first: int, end: int) -> None:
    """Push other keys in each clock, and erase some of them behind it."""
    wide, ruled, _ = tables_of(store)
    for clock in range(first, end):
        rng = np.random.default_rng(clock)
        keys = rng.choice(KEYS, 700)
        wide.push(keys, rng.standard_normal((700, 3)).astype(np.float32))
        ruled.push(keys[:300], rng.integers(1, 9, 300).astype(np.float32))
        store.tick()
        wide.erase(keys[:20])
        wide.pull(keys[:1])


def chain(store: shoal.Store, folder: Path) -> None:
    """Save a full checkpoint, 0, and two deltas, 1 and 2."""
    clocks(store, 0, 3)
    store.save(folder / "0", track=True)
    clocks(store, 3, 5)
    store.save(folder / "1", since=folder / "0")
    store.sweep()
    clocks(store, 5, 7)
    store.save(folder / "2", since=folder / "1")


def pieces_of(folder: Path) -> dict[Any, Any]:
    """What each slot has in a checkpoint, to the byte, wherever it stands."""
    manifest = checkpoint.read_manifest(folder)
    found: dict[Any, Any] = {"clock": manifest.clock, "version": manifest.version}
    for table in manifest.tables:
        found[table.name] = (table.rows, table.total, table.step, table.clock, table.delta)
        files = [(folder / file.name).read_bytes() for file in table.files]
        for kind in ("sections", "filters", "ranges"):
            for piece in getattr(table, kind):
                found[table.name, kind, piece.slot] = files[piece.file][piece.offset : piece.offset + piece.bytes]
    return found
