"""Checkpoints: the rows of a store in a directory. ``docs/checkpoint-format.md`` describes the bytes.

- ``format.py``: the manifest, and the slot files it names.
- ``write.py``: full checkpoints and deltas, from consistent snapshots of tables.
- ``read.py``: chains of deltas, verification and loading.
- ``compact.py``: a chain as one full checkpoint.
"""

from shoal.checkpoint.compact import compact_checkpoint
from shoal.checkpoint.format import MANIFEST, Chain, ChainEntry, Manifest
from shoal.checkpoint.read import load, read_chain, read_manifest, verify
from shoal.checkpoint.write import (
    LocalSnapshotSet,
    SnapshotSet,
    TableSnapshot,
    check_apart,
    check_target,
    snapshots,
    unknown_base,
    write_checkpoint,
)

__all__ = [
    "MANIFEST",
    "Chain",
    "ChainEntry",
    "LocalSnapshotSet",
    "Manifest",
    "SnapshotSet",
    "TableSnapshot",
    "check_apart",
    "check_target",
    "compact_checkpoint",
    "load",
    "read_chain",
    "read_manifest",
    "snapshots",
    "unknown_base",
    "verify",
    "write_checkpoint",
]
