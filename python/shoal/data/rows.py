"""RowBuffer: the arrays that a parser fills, block after block. Format: the description of a format.

The arrays grow as needed. A batch is a copy of their contents or, where they are large and nearly full, the arrays
themselves. So a batch ends at its number of rows and not at the end of a block, and it owns its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from shoal import _reader
from shoal.data.batch import Batch
from shoal.data.criteo import buckets
from shoal.data.interactions import Field, Interactions, Pairs, interact, named_pairs, pairs_of
from shoal.data.names import FeatureNames
from shoal.data.spelling import Spell, of_criteo, of_numbers, of_vw

_FIRST_ROWS = 1 << 10
_FIRST_KEYS = 1 << 16


class RowBuffer:
    """The arrays that are being filled: what `shoal._reader` calls ``arrays``."""

    def __init__(
        self,
        most: int,
        *,
        valued: bool,
        weighted: bool = False,
        pairs: Pairs = (),
        names: FeatureNames | None = None,
        spell: Spell = of_numbers,
        fielded: bool = False,
        labelled: bool = True,
        classes: int = 0,
    ) -> None:
        self.row = 0
        self.labelled = labelled
        self.classes = classes
        self._names = names
        self._noted = 0  # features
        self._spell = spell
        self._most = most
        first = min(most, _FIRST_ROWS)
        self.labels = np.empty(first, np.float32)
        self.weights = np.empty(first, np.float32) if weighted else None
        self.indptr = np.zeros(first + 1, np.int64)
        self.keys = np.empty(_FIRST_KEYS, np.uint64)
        self.values = np.empty(_FIRST_KEYS, np.float32) if valued else None
        self.fields = np.empty(_FIRST_KEYS, np.uint64) if pairs or fielded or names is not None else None
        self.spans = np.empty((_FIRST_KEYS, 2), np.int64) if names is not None else None
        self._pairs = np.array(pairs, np.uint64).reshape(-1)
        self._fielded = fielded

    @property
    def full(self) -> bool:
        """Whether a batch is complete."""
        return self.row == self._most

    def grow(self) -> None:
        """Double the arrays that are too small for the next line."""
        if self.row == len(self.labels):
            rows = min(2 * self.row, self._most)
            self.labels = _longer(self.labels, rows)
            self.weights = None if self.weights is None else _longer(self.weights, rows)
            self.indptr = _longer(self.indptr, rows + 1)
        else:
            size = 2 * len(self.keys)
            self.keys = _longer(self.keys, size)
            self.values = None if self.values is None else _longer(self.values, size)
            self.fields = None if self.fields is None else _longer(self.fields, size)
            self.spans = None if self.spans is None else _longer(self.spans, size)

    def note(self, text: memoryview | bytes) -> None:
        """Name the features parsed from ``text``: called after each parse if names are collected."""
        if self._names is None or self.fields is None or self.spans is None:
            return
        begin, end = self._noted, int(self.indptr[self.row])
        self._names.note(text, self.keys[begin:end], self.fields[begin:end], self.spans[begin:end], self._spell)
        self._noted = end

    def take(self) -> Batch:
        """Copy the rows out, with the interactions, and begin again. Weights that are all 1 are left out."""
        rows, self.row = self.row, 0
        self._noted = 0
        nnz = self.indptr[rows]
        labels, indptr, keys = self.labels[:rows].copy(), self.indptr[: rows + 1], self.keys[:nnz]
        values = None if self.values is None else self.values[:nnz]
        weights = None if self.weights is None or np.all(self.weights[:rows] == 1) else self.weights[:rows].copy()
        if self.fields is not None and len(self._pairs):
            made = interact(indptr, keys, values, self.fields[:nnz], self._pairs, self._names)
            return Batch(labels, *made, weights)
        indptr = indptr.copy()
        if self.fields is not None and self._fielded:
            copied = None if values is None else values.copy()
            return Batch(labels, indptr, keys.copy(), copied, weights, self.fields[:nnz].copy())
        if self.fields is not None or nnz < _FIRST_KEYS:
            return Batch(labels, indptr, keys.copy(), None if values is None else values.copy(), weights)
        return Batch(labels, indptr, *self._given_away(int(nnz)), weights)

    def _given_away(self, nnz: int) -> tuple[NDArray[np.uint64], NDArray[np.float32] | None]:
        """Return keys and values without a copy if at most a fifth of the arrays is unused, and continue with new ones.

        Batches of one file are about as long: the next ones fit with a little room. The others are copied out.
        """
        room = nnz + nnz // 16
        keys, values = self.keys[:nnz], None if self.values is None else self.values[:nnz]
        if len(self.keys) > nnz + nnz // 4:
            keys, values = keys.copy(), None if values is None else values.copy()
        self.keys = np.empty(room, np.uint64)
        self.values = None if self.values is None else np.empty(room, np.float32)
        return keys, values


Scalar = TypeVar("Scalar", bound=np.generic)


def _longer(array: NDArray[Scalar], size: int) -> NDArray[Scalar]:
    larger = np.empty((size, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


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

    def rows(self, most: int) -> RowBuffer:
        """Make the arrays of a pass in batches of ``most`` rows."""
        return RowBuffer(
            most,
            valued=self.valued,
            weighted=self.weighted,
            pairs=self.pairs,
            names=self.names,
            spell=self.spell,
            fielded=self.fielded,
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
