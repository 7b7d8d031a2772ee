"""Record batches of Arrow as examples: each cell is a feature, or as many as it has items.

    record batch    one array a column, some rows each
    features        a matrix of keys, rows x columns, and a mask of those present; read row by row it is a batch

A cell has the key of its text, which docs/readers.md defines for every type, so the number 17 has the key of the text
"17": the keys are those of a CSV of the same table.

Threads: pure functions, but for ``warned`` and the names, to which they add.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal import _reader
from shoal.data.batch import Batch
from shoal.data.columns import CATEGORICAL, LIST, NUMERIC, VECTOR, Columns, missing_numbers
from shoal.data.hashing import MISSING_TEXT, hash_cells, hash_strings, number_fault
from shoal.data.interactions import field_of, interact
from shoal.data.names import FeatureNames
from shoal.data.spelling import of_column

_EXCERPT = 80
_CELLS = 1 << 16  # of which texts are made at a time
_EXACT = {16: 2**11, 32: 2**24, 64: 2**53}  # by the bits of a float: from here it cannot hold every whole number
_MOST_WARNED = 100  # columns: requests may name any

_log = logging.getLogger(__name__)


def pyarrow() -> Any:
    """Import pyarrow."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet and Arrow require pyarrow: pip install 'shoal[arrow]'") from error
    return pyarrow


class RowError(ValueError):
    """Something is wrong in a cell; ``remedy`` is for those who read it from a file."""

    def __init__(self, what: str, row: int, column: str, remedy: str = "") -> None:
        super().__init__(what)
        self.row = row
        self.column = column
        self.remedy = remedy


def featured(
    table: Any,
    columns: Columns,
    named: FeatureNames | None,
    *,
    fielded: bool,
    labelled: bool,
    classes: int = 0,
    missing: Sequence[str] = (),
    warned: set[str] | None = None,
) -> Batch:
    """Turn the rows of a record batch into examples; cells with the texts ``missing`` hold nothing.

    Columns whose numbers were probably rounded are warned of in the log, unless ``warned`` has their names or is None.
    """
    names = table.schema.names
    kinds = dict(zip(names, columns.kinds_of(names, labelled=labelled), strict=True))
    rows = table.num_rows
    features = [name for name, kind in kinds.items() if kind in (NUMERIC, CATEGORICAL)]
    keys = np.empty((rows, len(features)), np.uint64)
    there = np.empty((rows, len(features)), np.bool_)
    has_numbers = bool(columns.numeric or columns.vectors or columns.labels)
    values = np.ones((rows, len(features)), np.float32) if has_numbers else None
    fields = np.array([field_of(name) for name in features], np.uint64)
    for i, name in enumerate(features):
        if kinds[name] == NUMERIC:
            numbers = _numbers(table.column(name), name, missing=missing)
            keys[:, i] = hash_strings([""], int(fields[i]))[0]
            there[:, i] = ~np.isnan(numbers)
            assert values is not None
            values[:, i] = numbers
            if named is not None and np.any(there[:, i]):
                named.add(keys[:1, i], [name])
        else:
            keys[:, i], there[:, i] = keys_of(table.column(name), int(fields[i]), name, named, missing, warned=warned)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(there.sum(axis=1, dtype=np.int64))])
    labels, weights = np.full(rows, np.nan, np.float32), None
    if labelled:
        labels = _labels(table, columns, classes)
        weights = None if columns.weight is None else _weights(table.column(columns.weight), columns.weight)
    flat, products = keys[there], None if values is None else values[there]
    of = np.broadcast_to(fields, keys.shape)[there] if columns.pairs or fielded else None
    lists = [
        _vector(table.column(name), name, named, missing)
        if kind == VECTOR
        else _list(table.column(name), columns.lists[name], name, named, missing, warned)
        for name, kind in kinds.items()
        if kind in (LIST, VECTOR)
    ]
    if lists:
        indptr, flat, products, of = _with_items(there, features, list(kinds), lists, flat, products, of)
    if columns.pairs:
        assert of is not None
        pairs = np.array(columns.pairs, np.uint64).reshape(-1)
        indptr, flat, products = interact(indptr, flat, products, of, pairs, named)
    return Batch(labels, indptr, flat, products, weights, of if fielded else None)


def _numbers(column: Any, name: str, remedy: str | None = None, missing: Sequence[str] = ()) -> NDArray[np.float32]:
    """Return the numbers of a column, NaN where there is none; texts are read as csv reads them."""
    arrow = pyarrow()
    types = arrow.types
    if remedy is None:
        is_nested = types.is_nested(column.type)
        remedy = (_list_remedy(column.type, name) or "leave it out") if is_nested else "name the column as categorical"
    if types.is_dictionary(column.type):
        return _numbers_of_dictionary(column, name, remedy, missing)
    if types.is_string_view(column.type):
        column = column.cast(arrow.large_string())  # for `is_in`
    if types.is_string(column.type) or types.is_large_string(column.type):
        return _numbers_of_texts(column, name, remedy, missing)
    try:
        wide = _doubles(column)
    except arrow.ArrowException:
        raise ValueError(f"column {name!r} holds {column.type}, not numbers: {remedy}") from None
    if missing:
        wide = np.where(np.isin(wide, missing_numbers(missing)), np.nan, wide)
    with np.errstate(over="ignore"):
        numbers = wide.astype(np.float32)
    if len(bad := np.flatnonzero(np.isinf(numbers))):
        raise RowError(f"{wide[bad[0]]} is not a finite float32 number", int(bad[0]), name)
    return numbers


def _numbers_of_dictionary(column: Any, name: str, remedy: str, missing: Sequence[str]) -> NDArray[np.float32]:
    """Read each value that occurs once: repeated, long texts take more memory than the column."""
    arrow = pyarrow()
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    places = column.indices.fill_null(0).to_numpy(zero_copy_only=False)[rows]
    used, first, which = np.unique(places, return_index=True, return_inverse=True)
    order = np.argsort(first)  # so that the first value at fault is that of the first row at fault
    found = np.empty(len(used), np.float32)
    try:
        found[order] = _numbers(column.dictionary.take(arrow.array(used[order])), name, remedy, missing)
    except RowError as error:
        raise RowError(str(error), int(rows[first[order[error.row]]]), name, error.remedy) from None
    numbers = np.full(len(column), np.nan, np.float32)
    numbers[rows] = found[which]
    return numbers


def _numbers_of_texts(column: Any, name: str, remedy: str, missing: Sequence[str]) -> NDArray[np.float32]:
    arrow = pyarrow()
    texts, ends = _texts(column, name)
    there: NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    if missing:
        empty = arrow.compute.is_in(column, value_set=arrow.array(missing, column.type))
        there &= ~empty.to_numpy(zero_copy_only=False)
    numbers = np.empty(len(column), np.float32)
    bad, fault = _reader.read_numbers(texts, ends, there, numbers)
    if bad >= 0:
        raise RowError(f"{column[bad].as_py()[:_EXCERPT]!r} {number_fault(fault)}", bad, name, remedy)
    return numbers


def keys_of(
    column: Any,
    field: int,
    name: str,
    named: FeatureNames | None = None,
    missing: Sequence[str] = (),
    *,
    shared: str | None = None,
    warned: set[str] | None = None,
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return the keys of a column's cells, and which of them are there; name them, those of a dictionary all.

    Cells whose text is one of ``missing`` are not. The bytes of a column of texts are read where they are, without a
    copy. Messages are about the column ``name``; the names of its keys are those of ``shared``, by default the same.
    ``warned`` is as for `featured`.
    """
    arrow = pyarrow()
    keys_in = functools.partial(
        keys_of, field=field, name=name, named=named, missing=missing, shared=shared, warned=warned
    )
    if len(column) == 0:
        return np.empty(0, np.uint64), np.empty(0, np.bool_)
    if len(column) > _CELLS:
        parts = [keys_in(column.slice(i, _CELLS)) for i in range(0, len(column), _CELLS)]
        return np.concatenate([keys for keys, _ in parts]), np.concatenate([there for _, there in parts])
    there: NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    if arrow.types.is_dictionary(column.type):
        keys, known = keys_in(column.dictionary)
        if len(keys) == 0:
            return np.zeros(len(column), np.uint64), there
        places = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return keys[places], there & known[places]
    if arrow.types.is_floating(column.type):
        numbers = _doubles(column)
        if warned is not None:
            _warn_of_rounded(numbers, column.type, name, warned)
        there = there & ~np.isnan(numbers)
        ends = np.empty(len(column) + 1, np.int64)
        texts = np.frombuffer(_reader.number_texts(numbers, ends), np.uint8)
    else:
        texts, ends = _texts(column, name)
    keys = np.empty(len(column), np.uint64)
    _reader.hash_cells(texts, ends, field, keys)
    if missing:
        there = there & ~np.isin(keys, hash_cells(missing, field))
    if named is not None:
        fields = np.broadcast_to(np.uint64(field), int(there.sum()))
        spans = np.column_stack([ends[:-1], ends[1:]])[there]
        named.note(texts.data, keys[there], fields, spans, functools.partial(of_column, shared or name))
    return keys, there


def _warn_of_rounded(numbers: NDArray[np.float64], kind: Any, name: str, warned: set[str]) -> None:
    """Warn once of a column with floats of a magnitude at which not every whole number has one."""
    if name in warned or len(warned) >= _MOST_WARNED:
        return
    least = _EXACT[kind.bit_width]
    large = numbers[np.abs(numbers) >= least]
    large = large[np.isfinite(large)]
    if len(large):
        warned.add(name)
        _log.warning(
            "column %.99r holds %s, such as %.20g: from %d on, these cannot hold every whole number, so ids were "
            "probably rounded, and their keys differ from those of the same ids as integers or text; read the column "
            "as integers or text (pandas: dtype={%.99r: 'Int64'}, pyarrow: column_types={%.99r: pyarrow.int64()})",
            *(name, kind, large[0], least, name, name),
        )


def _doubles(column: Any) -> NDArray[np.float64]:
    """Return the numbers of a column, NaN for those that are not there."""
    numbers = column.cast(pyarrow().float64(), safe=False).to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(numbers, np.float64)


def _texts(column: Any, name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the texts of a column that holds no floats, one after the other, and where each begins and ends."""
    arrow = pyarrow()
    types = arrow.types
    kind = column.type
    no_text = f"column {name!r} holds {kind}, which has no text"
    remedy = "leave it out, or convert it to text"
    if types.is_nested(kind):
        raise ValueError(f"{no_text}: {_list_remedy(kind, name) or remedy}")
    if types.is_timestamp(kind):
        column = column.view(arrow.timestamp(kind.unit))  # in UTC
    elif types.is_duration(kind):
        column = column.view(arrow.int64()).cast(arrow.string())
        power = {"s": "", "ms": "E-3", "us": "E-6", "ns": "E-9"}[kind.unit]
        column = arrow.compute.binary_join_element_wise(column, power, "")
    try:
        text = column.cast(arrow.large_binary() if _is_binary(column.type) else arrow.large_string())
    except arrow.ArrowException:
        raise ValueError(f"{no_text}: {remedy}") from None
    _, offsets, data = text.buffers()
    ends = np.frombuffer(offsets, np.int64)[text.offset : text.offset + len(text) + 1]
    texts = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    if types.is_decimal(kind) or types.is_duration(kind):
        plain_ends = np.empty(len(ends), np.int64)
        return np.frombuffer(_reader.plain_texts(texts, ends, plain_ends), np.uint8), plain_ends
    return texts, ends


def _is_binary(kind: Any) -> bool:
    types = pyarrow().types
    tests = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    return any(test(kind) for test in tests)


def _is_list(kind: Any) -> bool:
    types = pyarrow().types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests)


def _list_remedy(kind: Any, name: str) -> str | None:
    """Return how a column of lists is named; None if there is no way to read it."""
    types = pyarrow().types
    if not _is_list(kind) or types.is_nested(kind.value_type):
        return None
    are_numbers = any(test(kind.value_type) for test in (types.is_integer, types.is_floating, types.is_decimal))
    as_vector = f", or as a vector of numbers, vectors=[{name!r}]" if are_numbers else ""
    return f"name it as a list, {_as_list(name)}{as_vector}, or leave it out"


def _as_list(name: str) -> str:
    return f"lists={{{name!r}: {name!r}}}"


class _Items(NamedTuple):
    """The features of a column of lists: how many each row has, their keys and values; values None: all 1."""

    column: str
    lengths: NDArray[np.int64]
    keys: NDArray[np.uint64]
    values: NDArray[np.float32] | None


def _items(column: Any, name: str, remedy: str) -> tuple[NDArray[np.int64], Any]:
    """Return the lengths of a column's lists, and their items."""
    arrow = pyarrow()
    kind = column.type
    if not _is_list(kind):
        remedy = "leave it out" if arrow.types.is_nested(kind) else remedy
        raise ValueError(f"column {name!r} holds {kind}, not lists: {remedy}")
    if arrow.types.is_nested(kind.value_type):
        raise ValueError(f"column {name!r} holds {kind}, not lists of texts or numbers: leave it out")
    lengths = arrow.compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64), arrow.compute.list_flatten(column)


def _list(
    column: Any, shared: str, name: str, named: FeatureNames | None, missing: Sequence[str], warned: set[str] | None
) -> _Items:
    """Return the features of a column of lists of texts; keys are those of the column it shares."""
    lengths, items = _items(column, name, "name it as categorical")
    keys, there = keys_of(items, field_of(shared), name, named, missing, shared=shared, warned=warned)
    keys[~there] = hash_strings([MISSING_TEXT], field_of(shared))[0]
    return _Items(name, lengths, keys, None)


def _vector(column: Any, name: str, named: FeatureNames | None, missing: Sequence[str]) -> _Items:
    """Return the features of a column of lists of numbers."""
    lengths, items = _items(column, name, "name it as numeric")
    keys = np.full(len(items), hash_strings([""], field_of(name))[0])
    if len(items) == 0:
        return _Items(name, lengths, keys, np.empty(0, np.float32))
    try:
        numbers = _numbers(items, name, f"name it as a list, {_as_list(name)}", ["", *missing])
    except RowError as error:
        row = int(np.searchsorted(np.cumsum(lengths), error.row, "right"))
        raise RowError(str(error), row, name, error.remedy) from None
    if named is not None:
        named.add(keys[:1], [name])
    return _Items(name, lengths, keys, np.where(np.isnan(numbers), np.float32(0), numbers))


def _with_items(
    there: NDArray[np.bool_],
    features: Sequence[str],
    columns: Sequence[str],
    lists: Sequence[_Items],
    keys: NDArray[np.uint64],
    values: NDArray[np.float32] | None,
    fields: NDArray[np.uint64] | None,
) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.float32] | None, NDArray[np.uint64] | None]:
    """Put the features of lists among the others, each row's in the order of its columns."""
    counts = np.zeros((len(there), len(columns)), np.int64)
    places = [columns.index(name) for name in features]
    counts[:, places] = there
    for one in lists:
        counts[:, columns.index(one.column)] = one.lengths
    ends = np.cumsum(counts).reshape(counts.shape)
    begins = ends - counts
    indptr = np.concatenate([np.zeros(1, np.int64), ends[:, -1]])
    at = [begins[:, places][there]]
    for one in lists:
        before = begins[:, columns.index(one.column)] - np.cumsum(one.lengths) + one.lengths
        at.append(np.repeat(before, one.lengths) + np.arange(len(one.keys)))

    def merged(others: NDArray[Any], items: list[Any]) -> NDArray[Any]:
        found = np.empty(indptr[-1], others.dtype)
        for where, some in zip(at, [others, *items], strict=True):
            found[where] = some
        return found

    return (
        indptr,
        merged(keys, [one.keys for one in lists]),
        None if values is None else merged(values, [1 if one.values is None else one.values for one in lists]),
        None if fields is None else merged(fields, [field_of(one.column) for one in lists]),
    )


def _labels(table: Any, columns: Columns, classes: int) -> NDArray[np.float32]:
    name = columns.label
    assert name is not None, "a reader with labels has a column of them"
    column = table.column(name)
    _complete(column, name)
    if columns.positive is not None:
        keys, _ = keys_of(column, 0, name)
        equal: NDArray[np.bool_] = keys == hash_cells([str(columns.positive)], 0)[0]
        return equal.astype(np.float32)
    numbers = _numbers(column, name, "this is the label, pass positive= with the text that is 1")
    if classes:
        if len(bad := np.flatnonzero(~((numbers >= 0) & (numbers < classes) & (numbers == np.floor(numbers))))):
            which = f"0 to {classes - 1} are the numbers of the classes"
            raise RowError(f"the label is {numbers[bad[0]]:g}, and {which}", int(bad[0]), name)
        return numbers.astype(np.float32)
    if len(bad := np.flatnonzero(~np.isin(numbers, (-1, 0, 1)))):
        raise RowError(f"the label is {numbers[bad[0]]:g}, neither 0/1 nor -1/+1", int(bad[0]), name)
    labels: NDArray[np.float32] = (numbers == 1).astype(np.float32)
    return labels


def _weights(column: Any, name: str) -> NDArray[np.float32] | None:
    _complete(column, name)
    weights = _numbers(column, name, "weights are numbers of 0 or more")
    if len(bad := np.flatnonzero(~(weights >= 0))):
        raise RowError(f"the weight is {weights[bad[0]]:g}: it must be 0 or more", int(bad[0]), name)
    return None if np.all(weights == 1) else weights


def _complete(column: Any, name: str) -> None:
    if column.null_count:
        missing = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
        raise RowError("the label or the weight is missing", int(missing[0]), name)
