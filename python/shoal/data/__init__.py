"""Data: files of examples into batches of arrays.

    files.files_of (paths, patterns, URLs, streams) -> source.Lines (unpacked, blocks of whole lines)
         -> fill.fill (one Cython call a block, or a pool of them) -> Batch
         -> prefetch (all of that in one background thread) -> Reader (what a user iterates)

What is where:
    batch.py, rebatch.py    a batch; batches cut and put together
    readers.py               the functions that users call; the only place that knows all formats
    reader.py                what all readers do: splits, positions, progress
    text.py, fill.py         files of lines: the reader, and blocks into batches
    rows.py                  arrays that are being filled, and what a format is
    csv.py, columns.py       named columns, and the header of CSV
    arrow.py                 Parquet and Arrow streams
    criteo.py                the buckets of Criteo's integers
    files.py, source.py, unpack.py    where bytes come from; lines out of them; decompression
    hashing.py, interactions.py       keys of text and of pairs
    names.py, collisions.py           what keys stood for; which features share one

The formats, the hash and the rules of splitting are in ``docs/readers.md``.
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
