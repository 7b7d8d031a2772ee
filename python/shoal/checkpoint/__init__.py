"""Checkpoints: the rows of a store in a directory, which ``store.save`` writes and ``store.load`` reads.

``docs/checkpoint-format.md`` describes the bytes.

- ``format.py``: the manifest, and the slot files it names.
- ``write.py``: full checkpoints and deltas, from consistent snapshots of tables.
- ``read.py``: chains of deltas, verification and loading.
- ``compaction.py``: a chain as one full checkpoint.
"""

from shoal.checkpoint.compaction import compact
from shoal.checkpoint.format import Manifest
from shoal.checkpoint.read import read_manifest, verify

__all__ = ["Manifest", "compact", "read_manifest", "verify"]
