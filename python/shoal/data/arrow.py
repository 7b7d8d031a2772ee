"""TableReader: Parquet files and Arrow streams, whose columns have names and types, in batches.

`record_batch` makes the features. Needs pyarrow (extra: arrow), for whose objects there are no types: they are `Any`
here.

Threads: as `shoal.data.reader`.
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from msgspec import structs

from shoal.data.batch import Batch, marked
from shoal.data.columns import PASSED_OVER, Columns, Texts, texts_of
from shoal.data.files import File, Opened
from shoal.data.reader import Reader
from shoal.data.rebatch import BatchGroup, BatchGroups, BatchQueue, Cursor
from shoal.data.record_batch import RowError, featured, pyarrow
from shoal.data.settings import FileSplit, Settings
from shoal.errors import CorruptionError

_ROWS = 1 << 14  # of a record batch that is asked for


class ArrowSource:
    """An object in memory with an Arrow stream: a `File` of rows.

    What has a length can be read again; a stream has one pass.
    """

    def __init__(self, data: Any, name: str | None = None) -> None:
        self.name = name or f"{type(data).__module__.partition('.')[0]} {type(data).__name__}"
        self.seekable = hasattr(data, "__len__")
        self._data = data
        self._taken = False

    def size(self) -> int | None:
        """Rows."""
        return len(self._data) if self.seekable else None

    def stream(self) -> Any:
        """Begin a pass: a RecordBatchReader."""
        if self._taken and not self.seekable:
            raise ValueError(f"{self.name} was read already, and a stream has one pass: pass a table, or write a file")
        self._taken = True
        data = table_of(self._data) if _is_pandas(self._data) else self._data
        arrow = pyarrow()
        try:
            return arrow.RecordBatchReader.from_stream(data)
        except arrow.ArrowInvalid:
            raise _one_column(self._data) from None

    def open(self) -> Opened:
        """Refuse: it has no bytes."""
        raise TypeError(f"{self.name} is not a binary file")


def table_of(frame: Any) -> Any:
    """Convert a frame, or any object with an Arrow stream, to a table of pyarrow."""
    arrow = pyarrow()
    if not _is_pandas(frame):
        try:
            return frame if isinstance(frame, arrow.Table) else arrow.table(frame)
        except (arrow.ArrowException, TypeError):
            raise _one_column(frame) from None
    # The rows' index says where a row was, not what it is: pandas would hand it out as one column more.
    named = frame.set_axis([str(name) for name in frame.columns], axis=1)
    trouble = (arrow.ArrowException, TypeError, OverflowError)  # not all of these name the column
    try:
        return arrow.Table.from_pandas(named, preserve_index=False)
    except trouble:
        for k, column in enumerate(named.columns):
            try:
                arrow.Table.from_pandas(named.iloc[:, [k]], preserve_index=False)
            except trouble as error:
                raise ValueError(
                    f"column {column!r} cannot be read ({error.args[0]}): its values are of several types, or of one "
                    f"that Arrow lacks. Convert it, as in frame.astype({{{column!r}: str}})"
                ) from None
        raise


def _one_column(data: Any) -> TypeError:
    name = type(data).__name__
    return TypeError(f"a {name} is one column, not a table: pass a frame, as in {name}.to_frame()")


def _is_pandas(frame: Any) -> bool:
    return hasattr(frame, "set_axis") and hasattr(frame, "columns")


class TableReader(Reader):
    """Parquet files or an Arrow stream, in batches; see `Reader`."""

    def __init__(
        self, files: tuple[File, ...], name: str, columns: Columns, settings: Settings, na_values: Texts = ()
    ) -> None:
        self._missing = texts_of(na_values)
        schema = columns.schema()
        super().__init__(
            files, name, {**schema, "na_values": list(self._missing)} if self._missing else schema, settings
        )
        self._columns = columns
        self._warned: set[str] = set()  # of rounded numbers in these columns; shared with copies
        pyarrow()

    def with_columns(self, categorical: Sequence[str] | None = None) -> Reader:
        """Return this reader for the same columns in every file; see `Reader.with_columns`."""
        if self._columns.categorical is not None:
            return self
        if categorical is None:
            names = _column_names(self._files[0])
            if names is None:
                return self
            categorical = self._columns.resolved(names)
        reader = copy.copy(self)
        reader._columns, reader._original = structs.replace(self._columns, categorical=list(categorical)), self
        reader._schema = {**self._schema, "categorical": list(categorical)}
        return reader

    def _kinds_of(self, names: Sequence[str]) -> list[int]:
        kinds = self._columns.kinds_of(names, labelled=self._labelled)
        if self._columns.categorical is None:
            self._note_columns(self._columns.resolved(names))
        return kinds

    def with_fields(self) -> Reader:
        """Return this reader with batches with the field of each feature; see `Reader.with_fields`."""
        if self._columns.pairs:
            raise ValueError("an interaction belongs to no field: leave out the interactions or the fields")
        return super().with_fields()

    def _batch_groups(self) -> BatchGroups:
        settings, begin = self._settings, self._settings.begin
        queue = BatchQueue(settings.batch_size, keeps=True, max_delay=settings.max_delay)
        cursor = begin
        fraction = 0.0
        for split in self._file_splits():
            if split is None:
                late = queue.overdue()
                yield None if late is None else BatchGroup([(late, cursor)], 0, fraction)
                continue
            without = settings.lines_without(split.file)
            for first, consumed, table in self._tables(split):
                rows = table.num_rows
                fraction = split.before + split.fraction * consumed
                start = max(0, begin.offset - first) if split.number == begin.file else 0
                if start >= rows:
                    yield None
                    continue
                made = self._batch(split.file, table, first)
                if without is not None:
                    made = marked(made, np.arange(first + 1, first + rows + 1), without)
                done = [(batch, Cursor(split.number, first + end)) for batch, end in queue.add(made, start)]
                cursor = Cursor(split.number, first + rows)
                yield BatchGroup(done, 0, fraction) if done else None
        rest = queue.rest()
        yield BatchGroup([] if rest is None else [(rest, cursor)], 0, 1.0)

    def _parse_values(self, values: Sequence[bytes]) -> tuple[Batch, int]:
        arrow = pyarrow()
        from pyarrow import json

        how = json.ReadOptions(block_size=1 << 30)  # one: a type is that of all of its values
        try:
            table = json.read_json(io.BytesIO(b"\n".join(values)), how)
        except arrow.ArrowException as error:
            raise ValueError(f"a value is no JSON object, or not of the type of the others ({error})") from None
        names = _asked(self._files[0], self._kinds_of, table.column_names)
        (rows,) = table.select(names).combine_chunks().to_batches() or [None]
        return self._batch(self._files[0], rows, 0), 0

    def _of_labels(self) -> Reader | None:
        if self._columns.label is None:
            return None
        reader = copy.copy(self)
        reader._columns = Columns(label=None, categorical=[self._columns.label])
        return reader

    @property
    def _labelled(self) -> bool:
        return self._settings.labelled and self._columns.label is not None

    def _tables(self, split: FileSplit) -> Generator[tuple[int, float, Any]]:
        """Yield record batches: the number of the first row, which part of all rows was seen, and the batch."""
        file = split.file
        read = _in_memory if isinstance(file, ArrowSource) else _parquet
        tables = read(file, self._kinds_of)
        total = next(tables)
        if total is None:
            total = sys.maxsize
        begin, end = total * split.rank // split.num_splits, total * (split.rank + 1) // split.num_splits
        first = 0
        for table in tables:
            low, high = max(begin - first, 0), min(end - first, table.num_rows)
            if low < high:
                yield first + low, (first + high - begin) / (end - begin), table.slice(low, high - low)
            first += table.num_rows
            if first >= end:
                break

    def _batch(self, file: File, table: Any, first: int) -> Batch:
        """Turn a record batch into features."""
        settings = self._settings
        try:
            return featured(
                table,
                self._columns,
                self.names,
                fielded=settings.fielded,
                labelled=self._labelled,
                classes=settings.classes,
                missing=self._missing,
                warned=self._warned,
            )
        except RowError as error:
            remedy = f": {error.remedy}" if error.remedy else ""
            raise ValueError(
                f"{file.name}, row {first + error.row}, column {error.column!r}: {error}{remedy}"
            ) from None
        except ValueError as error:
            raise ValueError(f"{file.name}: {error}") from None


KindsOf = Callable[[Sequence[str]], list[int]]


def _in_memory(file: Any, kinds_of: KindsOf) -> Generator[Any]:
    """Yield the number of rows, then the record batches with the columns that are asked for."""
    with file.stream() as stream:
        names = _asked(file, kinds_of, stream.schema.names)
        yield file.size()
        for table in stream:
            small = table.select(names)
            for first in range(0, small.num_rows, _ROWS):
                yield small.slice(first, _ROWS)


def _parquet(file: File, kinds_of: KindsOf) -> Generator[Any]:
    """Yield the number of rows, then the record batches with the columns that are asked for."""
    arrow = pyarrow()
    with file.open() as opened:
        try:
            with arrow.parquet.ParquetFile(opened) as table:
                names = _asked(file, kinds_of, table.schema_arrow.names)
                yield table.metadata.num_rows
                yield from table.iter_batches(_ROWS, columns=names, use_threads=False)
        except (arrow.ArrowException, OSError) as error:
            raise CorruptionError(
                f"{file.name} is not a Parquet file, or is damaged ({error}): fetch or write it again"
            ) from error


def _column_names(file: File) -> list[str] | None:
    """Return the names of the columns of a file or a table; None of a stream, which is read once."""
    if not file.seekable:
        return None
    found: list[str] = []

    def note(names: Sequence[str]) -> list[int]:
        found.extend(names)
        return [PASSED_OVER] * len(names)

    with closing((_in_memory if isinstance(file, ArrowSource) else _parquet)(file, note)) as tables:
        next(tables)
    return found


def _asked(file: File, kinds_of: KindsOf, names: Sequence[str]) -> list[str]:
    try:
        kinds = kinds_of(names)
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from None
    return [name for name, kind in zip(names, kinds, strict=True) if kind != PASSED_OVER]
