"""Arrow bodies to examples: the lengths in a stream are checked before any memory is allocated by them.

    metadata   decoded bytes of record batches, added to the request's account; buffers lie in their message, and do
               not overlap
    schema     columns of the types below, and not too many
    batches    validate(full=True) of each, before any of its values is used

Arrow's own decoder trusts lengths of compressed buffers and allocates them, and its kernels trust offsets and indices.
So all three are checked first.

Threads: pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import structs

from shoal.data import Batch
from shoal.data.columns import LIST, PASSED_OVER, VECTOR
from shoal.data.rebatch import joined
from shoal.data.record_batch import RowError, featured, pyarrow
from shoal.serve.inputs import MOST_COLUMNS, Examples, InputSpec, to_batch
from shoal.serve.limits import Account, RequestError

_MOST_BATCHES = 10_000
_COLUMN_BYTES = 4096  # for a column of a batch, even a short one: it takes as much time as this many bytes of text
_CELL_BYTES = 32  # of a cell while its column is hashed
_PREFIX_BYTES = 8  # of a compressed buffer: its length, or -1 if it is stored uncompressed
_VIEW_BYTES = 16  # of a text in a view
_ROWS = 1 << 14  # that are read at a time


def decode_arrow(body: bytes | bytearray, spec: InputSpec, account: Account, unknown: set[str]) -> Batch:
    """Make a batch of an Arrow stream, and add the columns that the model does not know to ``unknown``."""
    arrow = pyarrow()
    try:
        return _decode(arrow.py_buffer(body), spec, account, unknown)
    except (arrow.ArrowException, MemoryError, OSError, struct.error, OverflowError, UnicodeError) as error:
        raise RequestError(f"not an Arrow stream that can be used: {error}") from None


def _decode(body: Any, spec: InputSpec, account: Account, unknown: set[str]) -> Batch:
    arrow = pyarrow()
    _check_messages(body, account)
    with arrow.ipc.open_stream(body) as stream:
        names = stream.schema.names
        if len(names) > MOST_COLUMNS:
            raise RequestError(f"{len(names)} columns: at most {MOST_COLUMNS} are accepted")
        by_keys = "keys" in names and spec.role("keys") == spec.others and _is_list(stream.schema.field("keys").type)
        taken = [name for name in names if name in ("keys", "values", "fields")] if by_keys else _features(names, spec)
        unknown.update(name for name in spec.unknown(names) if name not in taken)
        for name in taken:
            if "\0" in name:  # in Arrow's C interface it would end the name
                raise RequestError(f"column {name!r} has a NUL in its name")
            if names.count(name) > 1:
                raise RequestError(f"column {name!r} is there {names.count(name)} times")
            _check_type(name, stream.schema.field(name).type, spec)
        batches = []
        for batch in stream:
            batch.validate(full=True)
            small = batch.select(taken)
            cells = batch.num_rows * (1 + len(taken)) + sum(_elements(column) for column in small.columns)
            account.decoded(cells * _CELL_BYTES + len(taken) * _COLUMN_BYTES + small.get_total_buffer_size())
            batches.append(small)
    rows = sum(batch.num_rows for batch in batches)
    if rows == 0:
        raise RequestError("no rows: send at least one")
    if by_keys:
        return to_batch([spec.batch(_of_keys(batches, spec), account)], rows)
    return to_batch([spec.batch(_of_columns(batches, rows, spec), account, crossed=False)], rows)


# ---- metadata of the messages ----------------------------------------------------------------------------------------


def _check_messages(body: Any, account: Account) -> None:
    """Bound the decoded bytes of the record batches and dictionaries of a stream."""
    arrow = pyarrow()
    count = 0
    for message in arrow.ipc.MessageReader.open_stream(body):
        count += 1
        if count > _MOST_BATCHES:
            raise RequestError(f"more than {_MOST_BATCHES} messages: send larger record batches")
        if message.type not in ("record batch", "dictionary"):
            continue
        data = message.body
        size = 0 if data is None else data.size
        stored = 0
        for offset, length, compressed in _buffers(memoryview(message.metadata)):
            if offset < 0 or length < 0 or offset + length > size:
                raise RequestError(f"a buffer of {length} bytes at {offset} is outside of its message")
            stored += length
            if compressed and length >= _PREFIX_BYTES:
                (decoded,) = struct.unpack_from("<q", data, offset)
                if decoded < -1:
                    raise RequestError(f"a compressed buffer declares {decoded} bytes")
                account.decoded(max(decoded, 0))
        if stored > size:
            raise RequestError("buffers of a record batch overlap")


def _buffers(message: memoryview) -> Iterator[tuple[int, int, bool]]:
    """Iterate over the buffers of a record batch or dictionary: offset, length, and whether they are compressed.

    ``message`` is a flatbuffer ``Message`` of Arrow's ``format/Message.fbs``, which Arrow has verified.
    """
    root = _u32(message, 0)
    kind = _field(message, root, 1)
    header = _table(message, root, 2)
    if kind is None or header is None:
        return
    if message[kind] == 2:  # DictionaryBatch: its data is a record batch
        header = _table(message, header, 1)
        if header is None:
            return
    compressed = _field(message, header, 3) is not None
    vector = _table(message, header, 2)
    if vector is None:
        return
    for i in range(_u32(message, vector)):
        offset, length = struct.unpack_from("<qq", message, vector + 4 + 16 * i)
        yield offset, length, compressed


def _field(message: memoryview, table: int, number: int) -> int | None:
    """Return the position of a field of a flatbuffer table; None if it is absent."""
    (back,) = struct.unpack_from("<i", message, table)
    vtable = table - back
    if vtable < 0:
        raise RequestError("the metadata of a message is damaged")
    (size,) = struct.unpack_from("<H", message, vtable)
    if 4 + 2 * number >= size:
        return None
    (at,) = struct.unpack_from("<H", message, vtable + 4 + 2 * number)
    return None if at == 0 else table + at


def _table(message: memoryview, table: int, number: int) -> int | None:
    """Return the position of the table or vector that a field refers to."""
    field = _field(message, table, number)
    return None if field is None else field + _u32(message, field)


def _u32(message: memoryview, at: int) -> int:
    found: int = struct.unpack_from("<I", message, at)[0]
    return found


# ---- types -----------------------------------------------------------------------------------------------------------


def _is_list(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_plain(kind: Any) -> bool:
    """Whether a type is accepted: numbers, or texts whose bytes are not shared."""
    types = pyarrow().types
    tests = (
        types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_decimal, types.is_temporal,
        types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary,
    )  # fmt: skip
    return any(test(kind) for test in tests)


def _is_view(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_string_view(kind) or types.is_binary_view(kind))


def _check_type(name: str, kind: Any, spec: InputSpec) -> None:
    inner = kind
    if _is_list(inner):
        inner = inner.value_type
    if pyarrow().types.is_dictionary(inner):
        inner = inner.value_type
    if spec.role(name) in (LIST, VECTOR) and not _is_list(kind):
        raise RequestError(f"column {name!r} holds {kind}: this model takes lists there")
    if not _is_plain(inner) and not _is_view(kind):
        raise RequestError(f"column {name!r} holds {kind}: send numbers, texts, dictionaries of them, or lists of them")


def _elements(column: Any) -> int:
    """Return the number of elements of lists, or of blocks of 32 bytes that the texts of a view use once copied."""
    if _is_list(column.type):
        return len(column.values)
    if _is_view(column.type):
        # A view begins with its length; two of them may share bytes.
        lengths = np.frombuffer(column.buffers()[1], np.int32)[:: _VIEW_BYTES // 4][column.offset :][: len(column)]
        there = column.is_valid().to_numpy(zero_copy_only=False)
        return int(lengths[there].sum(dtype=np.int64)) // _CELL_BYTES
    return 0


# ---- by keys ---------------------------------------------------------------------------------------------------------


def _of_keys(batches: list[Any], spec: InputSpec) -> Examples:
    lengths, keys = _flat(batches, "keys", np.uint64)
    there = batches[0].schema.names

    def parallel_column(name: str, dtype: Any) -> Any:
        counts, flat = _flat(batches, name, dtype)
        if not np.array_equal(lengths, counts):
            bad = int(np.flatnonzero(lengths != counts)[0])
            raise RequestError(f"instance {bad}: {lengths[bad]} keys and {counts[bad]} {name}: send one for each key")
        return flat

    values = parallel_column("values", np.float32) if "values" in there else None
    if values is not None and not np.isfinite(values).all():
        raise RequestError("column 'values': values must be finite as float32")
    if "fields" in there and not spec.needs_fields:
        raise RequestError("column 'fields': this model takes no fields, send keys and values alone")
    if "fields" not in there and spec.needs_fields:
        raise RequestError(f"no column 'fields', and this model needs the field of each key: {spec}")
    fields = parallel_column("fields", np.uint64) if spec.needs_fields else None
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    return Examples(np.arange(len(lengths)), indptr, keys, values, fields)


def _flat(batches: list[Any], name: str, dtype: Any) -> tuple[Any, Any]:
    """Return the lengths of a column's lists, and their elements."""
    arrow = pyarrow()
    lengths, flats = [], []
    for batch in batches:
        column = batch.column(name)
        if not _is_list(column.type):
            raise RequestError(f"column {name!r} holds {column.type}: send lists of numbers")
        if column.null_count:
            raise RequestError(f"column {name!r} has nulls: send empty lists")
        elements = column.flatten()
        if elements.null_count:
            raise RequestError(f"column {name!r} has nulls in its lists: leave them out")
        flat = elements.cast(arrow.from_numpy_dtype(dtype)).to_numpy(zero_copy_only=False)
        lengths.append(arrow.compute.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64))
        flats.append(np.ascontiguousarray(flat, dtype))
    return np.concatenate(lengths), np.concatenate(flats)


# ---- by columns ------------------------------------------------------------------------------------------------------


def _features(names: list[str], spec: InputSpec) -> list[str]:
    """Return the columns that are features; as in a file, none may be missing."""
    if spec.columns is None:
        raise RequestError(f"columns {', '.join(map(repr, names[:9]))}: {spec}")
    kinds = spec.columns.kinds_of(names, labelled=False)
    return [name for name, kind in zip(names, kinds, strict=True) if kind != PASSED_OVER]


def _of_columns(batches: list[Any], rows: int, spec: InputSpec) -> Examples:
    """Read named columns as the reader of Arrow does."""
    assert spec.columns is not None
    columns = structs.replace(spec.columns, interactions=())
    missing = sorted(spec.missing)
    made, first = [], 0
    for batch in batches:
        for begin in range(0, batch.num_rows, _ROWS):
            piece = _without_views(batch.slice(begin, _ROWS))
            try:
                one = featured(piece, columns, None, fielded=True, labelled=False, missing=missing, warned=spec.rounded)
            except RowError as error:
                raise RequestError(f"instance {first + error.row}, column {error.column!r}: {error}") from None
            made.append(one)
            first += piece.num_rows
    one = joined(made)
    return Examples(np.arange(rows), one.indptr, one.keys, one.values, one.fields)


def _without_views(batch: Any) -> Any:
    """Turn views into texts: not by a cast, which also follows the views of nulls, which are not validated."""
    arrow = pyarrow()
    if not any(_is_view(column.type) for column in batch.columns):
        return batch
    arrays = []
    for column in batch.columns:
        if _is_view(column.type):
            kind = arrow.large_string() if arrow.types.is_string_view(column.type) else arrow.large_binary()
            column = arrow.array(column.to_pylist(), kind)
        arrays.append(column)
    return arrow.RecordBatch.from_arrays(arrays, names=batch.schema.names)
