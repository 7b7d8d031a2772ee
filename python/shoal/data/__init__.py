"""Data: files of examples into batches of arrays.

    files.files_of (paths, patterns, URLs, streams) -> source.Lines (unpacked, blocks of whole lines)
         -> fill.fill (one Cython call a block, or a pool of them) -> Batch
         -> ahead.Ahead (all of that in one background thread) -> Reader (what a user iterates)

The formats, the hash and the rules of sharding are in ``docs/readers.md``.
"""

from shoal.data.batch import Batch
from shoal.data.collisions import Audit, audit
from shoal.data.hashing import hash_strings
from shoal.data.names import FeatureNames
from shoal.data.reader import Reader
from shoal.data.readers import (
    read_arrow,
    read_criteo,
    read_csv,
    read_libffm,
    read_libsvm,
    read_parquet,
    read_vw,
)

__all__ = [
    "Audit",
    "Batch",
    "FeatureNames",
    "Reader",
    "audit",
    "hash_strings",
    "read_arrow",
    "read_criteo",
    "read_csv",
    "read_libffm",
    "read_libsvm",
    "read_parquet",
    "read_vw",
]
