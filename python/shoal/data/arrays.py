"""Arrays and frames in memory as batches: ``X`` and ``y`` of scikit-learn.

    array, sparse matrix   the number of a column is its key, as in libsvm text; a value of 0 is not a feature
    frame                  the columns of `shoal.read_arrow`, with the same keys; labels and weights are passed apart

Labels are of two or more classes with any names: `class_labels` turns them into 0, 1, ...

Threads: a `MatrixReader` is immutable, except its random numbers; an iteration belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal import _core
from shoal.base.defaults import BATCH_SIZE
from shoal.base.scalars import whole
from shoal.data.arrow import ArrowSource, TableReader, table_of
from shoal.data.batch import Batch
from shoal.data.columns import PLACE, Columns
from shoal.data.record_batch import pyarrow
from shoal.data.settings import Settings

Classes = tuple[Any, ...]

_LABEL = f"{PLACE}label"  # names that no column has: private use, by Unicode
_WEIGHT = f"{PLACE}weight"


def is_array(data: object) -> bool:
    """Return whether this is an array, a sparse matrix, or rows of numbers in a list."""
    if isinstance(data, np.ndarray) or hasattr(data, "tocsr"):
        return True
    rows = isinstance(data, list | tuple) and len(data) > 0
    return rows and all(isinstance(row, list | tuple) for row in data)  # type: ignore[attr-defined]


def is_frame(data: object) -> bool:
    """Return whether this has named columns: a frame of pandas or polars, a table of pyarrow, an Arrow stream."""
    return hasattr(data, "__arrow_c_stream__")


class MatrixReader:
    """The rows of a matrix as batches."""

    format = "libsvm"  # whose keys mean the same

    def __init__(
        self,
        X: Any,
        labels: NDArray[np.float32] | None = None,
        weights: NDArray[np.float32] | None = None,
        batch_size: int = BATCH_SIZE,
        rng: Any = None,
    ) -> None:
        whole("batch_size", batch_size, 1)
        self._indptr, self._keys, self._values, self.columns = _compressed(X)
        n = len(self._indptr) - 1
        self._labels = np.zeros(n, np.float32) if labels is None else labels
        self._weights = weights
        self.batch_size = batch_size
        self._rng = rng
        for name, array in (("y", self._labels), ("sample_weight", weights)):
            if array is not None and len(array) != n:
                raise ValueError(f"X has {n:,} rows, and {name} {len(array):,}: pass one for each row")

    @property
    def labels(self) -> NDArray[np.float32]:
        """Of all rows."""
        return self._labels

    @property
    def weights(self) -> NDArray[np.float32] | None:
        """Of all rows; None: each is 1."""
        return self._weights

    def __len__(self) -> int:
        """Rows."""
        return len(self._labels)

    def __iter__(self) -> Iterator[Batch]:
        order = None if self._rng is None else self._rng.permutation(len(self))
        for begin in range(0, len(self), self.batch_size):
            end = min(begin + self.batch_size, len(self))
            yield self._slice(begin, end) if order is None else self._rows(order[begin:end])

    def _slice(self, begin: int, end: int) -> Batch:
        indptr = self._indptr[begin : end + 1]
        entries = slice(indptr[0], indptr[-1])
        weights = None if self._weights is None else self._weights[begin:end]
        return Batch(self._labels[begin:end], indptr - indptr[0], self._keys[entries], self._values[entries], weights)

    def _rows(self, rows: NDArray[np.int64]) -> Batch:
        weights = None if self._weights is None else self._weights[rows]
        return Batch(self._labels[rows], *_core.gather_rows(self._indptr, self._keys, self._values, rows), weights)


class FrameReader(TableReader):
    """The rows of a frame as batches; see `shoal.read_arrow`, whose keys it has."""

    def __init__(
        self,
        frame: Any,
        labels: NDArray[np.float32] | None,
        weights: NDArray[np.float32] | None,
        schema: dict[str, Any],
        batch_size: int = BATCH_SIZE,
        na_values: Sequence[str] = (),
    ) -> None:
        table = table_of(frame)
        for name in (schema.get("label"), schema.get("weight")):
            if name is not None and name in table.column_names:
                table = table.drop_columns([name])
        rows = table.num_rows
        self.labels = np.zeros(rows, np.float32) if labels is None else labels
        self.weights = weights
        for name, place, array in (("y", _LABEL, self.labels), ("sample_weight", _WEIGHT, weights)):
            if array is not None and len(array) != rows:
                raise ValueError(f"the frame has {rows:,} rows, and {name} {len(array):,}: pass one for each row")
            if array is not None:
                table = table.append_column(place, pyarrow().array(array))
        columns = Columns(
            label=_LABEL,
            weight=None if weights is None else _WEIGHT,
            categorical=schema.get("categorical"),
            numeric=schema.get("numeric", ()),
            lists=schema.get("lists", {}),
            vectors=schema.get("vectors", ()),
            interactions=schema.get("interactions", ()),
        )
        file = ArrowSource(table, name=_kind_of(frame))
        super().__init__((file,), "arrow", columns, Settings(batch_size), na_values)
        asked = columns.schema()
        self._schema = {name: asked[name] for name in asked if name not in ("label", "weight")}
        self._schema |= {name: schema[name] for name in ("label", "weight") if name in schema}

    def __len__(self) -> int:
        """Rows."""
        return len(self.labels)


def column_of_frame(frame: Any, name: str) -> NDArray[Any]:
    """Return a column of a frame as an array."""
    table = table_of(frame)
    if table.column_names.count(name) != 1:
        raise ValueError(f"column {name!r} is not there: the columns are {', '.join(map(repr, table.column_names))}")
    column = table.column(name)
    if column.null_count:
        raise ValueError(f"column {name!r} has {column.null_count:,} missing values: drop those rows")
    array: NDArray[Any] = column.to_numpy()
    return array


def float_columns(frame: Any, but: Sequence[str]) -> list[str]:
    """Return the columns of a frame that hold floating-point numbers: those that are numeric if nothing is said."""
    fields = table_of(frame).schema
    floating = pyarrow().types.is_floating
    return [field.name for field in fields if floating(field.type) and field.name not in but]


def class_labels(y: Any, known: Classes | None = None, count: int = 2) -> tuple[NDArray[np.float32], Classes]:
    """Turn labels of classes into their numbers, 0, 1, ..."""
    array = np.asarray(y)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise ValueError(f"y has shape {array.shape}: pass one label for each row")
    if array.dtype.kind == "O" and any(label is None or label != label for label in array):
        raise ValueError("y has labels that are missing: drop those rows")
    if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
        raise ValueError("y has labels that are not finite: drop those rows")
    try:
        found = np.unique(array).tolist()
    except TypeError:
        raise ValueError("y has labels of several types, which have no order: pass labels of one type") from None
    classes = known if known is not None else _classes(found, array.dtype.kind, count)
    numbers = {label: number for number, label in enumerate(classes)}
    strange = [label for label in found if label not in numbers]
    if strange:
        which = " and ".join(map(repr, classes)) if len(classes) == 2 else f"{classes[0]!r}, ..., {classes[-1]!r}"
        raise ValueError(f"y has the label {strange[0]!r}: the model's classes are {which}")
    if count == 2:
        return (array == classes[1]).astype(np.float32), classes
    of_found = np.array([numbers[label] for label in found], np.float32)
    return of_found[np.searchsorted(np.array(found, array.dtype), array)], classes


def _classes(found: list[Any], kind: str, count: int) -> Classes:
    if kind == "b":
        if count > 2:
            raise ValueError(f"y is boolean, and the model has {count:,} classes: pass their numbers, or names")
        return (False, True)
    for usual in (tuple(range(count)), *([(-1, 1)] if count == 2 else [])):
        if set(found) <= set(usual):
            return usual
    if len(found) == count:
        return tuple(found)
    if count > 2:
        raise ValueError(
            f"y has {len(found):,} classes, such as {', '.join(map(repr, found[:3]))}, and the model {count:,}: pass "
            f"labels of all, or their numbers, 0 to {count - 1}"
        )
    if len(found) == 1:
        raise ValueError(f"there is only one class, {found[0]!r}: pass examples of two")
    raise ValueError(
        f"y has {len(found):,} classes, such as {', '.join(map(repr, found[:3]))}: pass labels of two, for example "
        f"y == {found[0]!r}; or train a shoal.models.MulticlassRegression({len(found)})"
    )


def sample_weights(weights: Any) -> NDArray[np.float32]:
    """Return weights of examples as float32."""
    array = np.asarray(weights)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise ValueError(f"sample_weight is {array.dtype}{list(array.shape)}: pass one number for each row")
    with np.errstate(over="ignore"):
        numbers: NDArray[np.float32] = array.astype(np.float32)
    bad = np.flatnonzero(~(np.isfinite(numbers) & (numbers >= 0)))
    if len(bad):
        raise ValueError(f"sample_weight[{bad[0]}] is {array[bad[0]]!s}: weights are finite, 0 or more")
    return numbers


def _compressed(X: Any) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.float32], int]:
    """Return row offsets, keys, values and the number of columns of a matrix."""
    if hasattr(X, "tocsr"):
        rows = X.tocsr()
        if len(rows.shape) != 2:
            raise ValueError(f"X has shape {rows.shape}: pass a matrix of shape (examples, columns)")
        values = _finite(np.asarray(rows.data), lambda i: (int(np.searchsorted(rows.indptr, i, "right")) - 1, i))
        return rows.indptr.astype(np.int64), rows.indices.astype(np.uint64), values, int(rows.shape[1])
    if np.ma.isMaskedArray(X):
        raise ValueError("X is a masked array, whose masked elements have no value: pass X.filled(0), or a frame")
    try:
        array = np.asarray(X)
    except ValueError:
        raise ValueError("the rows of X have different lengths: pass a matrix of shape (examples, columns)") from None
    if array.ndim != 2:
        raise ValueError(
            f"X has shape {array.shape}: pass a matrix of shape (examples, columns), as in X.reshape(1, -1)"
        )
    columns = array.shape[1]
    values = _finite(array.reshape(-1), lambda i: divmod(i, columns)).reshape(array.shape)
    row, column = np.nonzero(values)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(row, minlength=len(array)))])
    return indptr.astype(np.int64), column.astype(np.uint64), values[row, column], columns


def _finite(values: NDArray[Any], place: Any) -> NDArray[np.float32]:
    if values.dtype.kind == "O":
        try:
            values = values.astype(np.float64)
        except (TypeError, ValueError):
            raise TypeError(
                "X holds objects that are not numbers: pass a frame, whose columns of text are categories"
            ) from None
    if values.dtype.kind not in "biuf":
        raise TypeError(f"X holds {values.dtype}, not numbers: pass a frame, whose columns of text are categories")
    with np.errstate(over="ignore"):
        numbers: NDArray[np.float32] = values.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(numbers))
    if len(bad):
        row, _ = place(int(bad[0]))
        raise ValueError(
            f"row {row} of X holds {values[bad[0]]!s}, which is not a finite float32 number: replace it, or omit it "
            f"from a sparse matrix or frame, where a missing value is not a feature"
        )
    return numbers


def _kind_of(frame: Any) -> str:
    return f"{type(frame).__module__.partition('.')[0]} {type(frame).__name__}"
