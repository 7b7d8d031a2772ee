"""Arrays for the native parsers to fill, cut out of larger ones, so that a write outside of them is detected."""

from __future__ import annotations

import numpy as np

CANARY = 0x5EED5EED5EED5EED


class Arrays:
    """What `shoal._reader` calls ``arrays``, with room for this many rows and features."""

    def __init__(
        self,
        rows: int,
        nnz: int,
        *,
        valued: bool = True,
        weighted: bool = True,
        fielded: bool = True,
        spanned: bool = False,
        labelled: bool = True,
    ) -> None:
        self.labelled = labelled
        self.classes = 0
        self._guarded: list[np.ndarray] = []
        self.labels = self._cut(rows, np.float32)
        self.weights = self._cut(rows, np.float32) if weighted else None
        self.indptr = self._cut(rows + 1, np.int64)
        self.keys = self._cut(nnz, np.uint64)
        self.values = self._cut(nnz, np.float32) if valued else None
        self.fields = self._cut(nnz, np.uint64) if fielded else None
        self.spans = self._cut((nnz, 2), np.int64) if spanned else None
        self.ends = self._cut((rows, 2), np.int64)
        self.indptr[0] = 0
        self.row = 0

    def _cut(self, shape: int | tuple[int, int], dtype: type) -> np.ndarray:
        size, *width = (shape,) if isinstance(shape, int) else shape
        array = np.full((size + 2, *width), -7 if dtype is np.float32 else CANARY, dtype)
        self._guarded.append(array)
        return array[1:-1]

    def parse(self, parse, block, start: int = 0, *, skip: bool = False) -> tuple[int, int, int, int, int, int]:
        """Let one of the parsers append to the arrays, and check for writes outside of them."""
        got = parse(block, start, self, skip)
        self.row = got[2]
        for array in self._guarded:
            canary = -7 if array.dtype == np.float32 else CANARY
            assert array.item(0) == canary
            assert array.item(-1) == canary
        return got

    def larger(self, rows: int, nnz: int) -> Arrays:
        """Copy the contents into arrays with this much more room."""
        has = {
            "valued": self.values is not None,
            "weighted": self.weights is not None,
            "fielded": self.fields is not None,
            "spanned": self.spans is not None,
            "labelled": self.labelled,
        }
        new = Arrays(len(self.labels) + rows, len(self.keys) + nnz, **has)
        new.row = self.row
        for name in ("labels", "weights", "indptr", "keys", "values", "fields", "spans", "ends"):
            old = getattr(self, name)
            if old is not None:
                getattr(new, name)[: len(old)] = old
        return new

    def rows(self) -> list:
        """Return the rows in the form of the slow parsers: (label or (label, weight), [(key, value, field), ...])."""
        labels = self.labels[: self.row].tolist()
        heads = labels if self.weights is None else zip(labels, self.weights[: self.row].tolist(), strict=True)
        nnz = self.indptr[self.row]
        columns = [self.keys[:nnz].tolist(), np.ones(nnz, np.float32) if self.values is None else self.values[:nnz]]
        if self.fields is not None:
            columns.append(self.fields[:nnz].tolist())
        features = list(zip(*columns, strict=True))
        ends = self.indptr[: self.row + 1].tolist()
        return [(head, features[a:b]) for head, a, b in zip(heads, ends[:-1], ends[1:], strict=True)]
