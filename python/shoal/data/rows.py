"""RowBuffer: the arrays that a parser fills with the rows of a block. Format: the description of a format.

The arrays grow as needed, and are used for one block after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from shoal import _reader
from shoal.data.batch import Batch
from shoal.data.criteo import buckets
from shoal.data.interactions import Field, Interactions, Pairs, named_pairs, pairs_of
from shoal.data.names import FeatureNames
from shoal.data.rebatch import longer
from shoal.data.spelling import Spell, of_criteo, of_numbers, of_vw

_FIRST_ROWS = 1 << 10
_FIRST_KEYS = 1 << 16


class RowBuffer:
    """The arrays that are being filled: what `shoal._reader` calls ``arrays``."""

    def __init__(
        self,
        *,
        valued: bool,
        weighted: bool = False,
        origins: bool = False,
        spans: bool = False,
        labelled: bool = True,
        classes: int = 0,
    ) -> None:
        self.row = 0
        self.labelled = labelled
        self.classes = classes
        self.labels = np.empty(_FIRST_ROWS, np.float32)
        self.weights = np.empty(_FIRST_ROWS, np.float32) if weighted else None
        self.indptr = np.zeros(_FIRST_ROWS + 1, np.int64)
        self.ends = np.empty((_FIRST_ROWS, 2), np.int64)
        self.keys = np.empty(_FIRST_KEYS, np.uint64)
        self.values = np.empty(_FIRST_KEYS, np.float32) if valued else None
        self.fields = np.empty(_FIRST_KEYS, np.uint64) if origins else None
        self.spans = np.empty((_FIRST_KEYS, 2), np.int64) if spans else None

    def grow(self) -> None:
        """Double the arrays that are too small for the next line."""
        if self.row == len(self.labels):
            rows = 2 * self.row
            self.labels = longer(self.labels, rows)
            self.weights = None if self.weights is None else longer(self.weights, rows)
            self.indptr = longer(self.indptr, rows + 1)
            self.ends = longer(self.ends, rows)
        else:
            size = 2 * len(self.keys)
            self.keys = longer(self.keys, size)
            self.values = None if self.values is None else longer(self.values, size)
            self.fields = None if self.fields is None else longer(self.fields, size)
            self.spans = None if self.spans is None else longer(self.spans, size)

    def batch(self) -> Batch:
        """Show the rows. Weights that are all 1 are left out."""
        rows = self.row
        nnz = self.indptr[rows]
        weights = None if self.weights is None or np.all(self.weights[:rows] == 1) else self.weights[:rows]
        values = None if self.values is None else self.values[:nnz]
        fields = None if self.fields is None else self.fields[:nnz]
        return Batch(self.labels[:rows], self.indptr[: rows + 1], self.keys[:nnz], values, weights, fields)


Parse = Callable[[memoryview, int, RowBuffer, bool], tuple[int, int, int, int, int, int]]


def _parse_criteo(text: memoryview, start: int, rows: RowBuffer, skip: bool) -> tuple[int, int, int, int, int, int]:
    table = buckets()
    return _reader.parse_criteo(text, start, rows, table.floors, table.cells, table.small, table.numbers, skip)


class Format(msgspec.Struct, frozen=True):
    """Description of a line format."""

    # As the command line and messages call it.
    name: str
    # One of the walks of `shoal._reader` into a `RowBuffer`.
    parse: Parse | None
    # Whether a feature has a value.
    valued: bool
    # Whether an example has a weight.
    weighted: bool = False
    # Takes the first line of each file, which is no example, and whether a label is needed, and returns what parses
    # that file's other lines, instead of `parse`; its errors are ValueErrors that say what is wrong with the line.
    header: Callable[[bytes, bool], Parse] | None = None
    # The fields whose features interact.
    pairs: Pairs = ()
    # Makes the names of features.
    spell: Spell = of_numbers
    # Gets a name for each feature that is read.
    names: FeatureNames | None = None
    # What was asked of the function that made the reader, as JSON: models remember it.
    schema: Mapping[str, Any] = msgspec.field(default_factory=dict)
    # Whether batches have the fields of their features.
    fielded: bool = False
    # Whether lines have labels.
    labelled: bool = True
    # The number of classes, if labels are their numbers.
    classes: int = 0
    # Returns the format in which the texts of the labels are the only features, where labels are texts.
    of_labels: Callable[[], Format] | None = None
    # Takes the first line of a file, None where files have no header, and returns the columns of which nothing is
    # said, and which are therefore read.
    others: Callable[[bytes | None], list[str]] | None = None
    # Takes such columns, and returns the format that reads them in every file.
    with_columns: Callable[[Sequence[str]], Format] | None = None

    def rows(self) -> RowBuffer:
        """Make the arrays for the rows of a block."""
        return RowBuffer(
            valued=self.valued,
            weighted=self.weighted,
            origins=bool(self.pairs) or self.fielded or self.names is not None,
            spans=self.names is not None,
            labelled=self.labelled,
            classes=self.classes,
        )

    def with_interactions(self, interactions: Interactions, number: Callable[[Field], int]) -> Format:
        """Add the features of pairs of fields, whose numbers ``number`` finds."""
        pairs = pairs_of(interactions, number)
        if not pairs:
            return self
        written = [list(pair) for pair in named_pairs(interactions)]
        return structs.replace(self, pairs=pairs, schema={**self.schema, "interactions": written})


LIBSVM = Format("libsvm", _reader.parse_libsvm, valued=True)
LIBFFM = Format("libffm", _reader.parse_libffm, valued=True)
CRITEO = Format("criteo", _parse_criteo, valued=False, spell=of_criteo)
VW = Format("vw", _reader.parse_vw, valued=True, weighted=True, spell=of_vw)
