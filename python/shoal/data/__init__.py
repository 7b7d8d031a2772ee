"""Data: files of examples, read into batches of arrays.

    files.files_of (paths, patterns, URLs, streams) -> source.Lines (decompressed, blocks of whole lines)
         -> fill.fill (one Cython call a block, or a pool of threads) -> Batch
         -> base.prefetch (all of that in one background thread) -> Reader (iterated by the user)

    batch.py, rebatch.py    a batch; batches split and joined, and the position after each
    readers.py              the read_* functions; the only module that knows all formats
    reader.py, settings.py  Reader: passes, splits, positions, progress; the options of a reader
    fingerprint.py          whether data is that of an earlier fit
    text.py, fill.py        text formats: the reader, and blocks into batches
    rows.py                 the arrays that a parser fills, and the description of a format
    csv.py, columns.py      named columns, and the header of CSV
    arrow.py, arrays.py     Parquet and Arrow streams; arrays and frames in memory
    criteo.py               the buckets of Criteo's integers
    guess.py                the format of a file from its first line and its name
    files.py, source.py, unpack.py    opening files; blocks of lines; decompression
    hashing.py, interactions.py       keys of text and of pairs
    names.py, collisions.py           the texts of keys; texts that share a key
    formats/                the parsers, in Cython

``docs/readers.md`` defines the formats, the hash and the rules of splitting.
"""

from shoal.data.batch import Batch
from shoal.data.collisions import Audit, audit
from shoal.data.folder import Following
from shoal.data.hashing import hash_strings
from shoal.data.key_names import key_of_name
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
from shoal.data.stream import read_kafka
from shoal.table.arrays import mix, unmix

__all__ = [
    "Audit",
    "Batch",
    "FeatureNames",
    "Following",
    "Reader",
    "audit",
    "hash_strings",
    "key_of_name",
    "mix",
    "read_arrow",
    "read_criteo",
    "read_csv",
    "read_kafka",
    "read_libffm",
    "read_libsvm",
    "read_parquet",
    "read_vw",
    "unmix",
]
