"""TextReader: files of lines, in batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from msgspec import structs

from shoal.base.machine import cores
from shoal.data.batch import Batch
from shoal.data.files import File, Wheres, files_of
from shoal.data.fill import TextSource, fill, parse_values
from shoal.data.reader import Reader
from shoal.data.rebatch import BatchGroups
from shoal.data.rows import LIBSVM, Format, Parse
from shoal.data.settings import Settings
from shoal.data.source import Lines
from shoal.data.unpack import HEAD_BYTES, kind_of

# The other cores compute: four threads parse more than 16 cores learn from.
_CORES_PER_THREAD = 4
_MOST_THREADS = 8


class TextReader(Reader):
    """Files of lines, in batches."""

    def __init__(
        self, path: Wheres, form: Format, settings: Settings, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(files_of(path, storage_options), form.name, form.schema, settings)
        self._form = form

    def _bound_form(self) -> Format:
        """Return the format as it is read by a pass."""
        settings = self._settings
        return structs.replace(
            self._form,
            names=settings.names,
            fielded=settings.fielded,
            labelled=self._form.labelled and settings.labelled,
            classes=settings.classes,
            header=None if self._form.header is None else self._noting(self._form.header),
        )

    def _parse_values(self, values: Sequence[bytes]) -> tuple[Batch, int]:
        return parse_values(self._bound_form(), values, skip=self._settings.on_error == "skip")

    def _batch_groups(self) -> BatchGroups:
        settings, form = self._settings, self._bound_form()
        skip = settings.on_error == "skip"
        threads = settings.reader_threads or min(max(1, cores() // _CORES_PER_THREAD), _MOST_THREADS)
        return fill(self._sources(), form, settings.batch_size, skip, settings.begin, threads, settings.max_delay)

    def with_columns(self, categorical: Sequence[str] | None = None) -> Reader:
        """Return this reader for the same columns in every file; see `Reader.with_columns`."""
        others, made = self._form.others, self._form.with_columns
        if others is None or made is None:
            return self
        if categorical is None:
            line = None if self._form.header is None else self._first_line()
            if line is None and self._form.header is not None:
                return self
            categorical = others(line)
        reader = copy.copy(self)
        reader._form, reader._original = made(categorical), self
        reader._schema = reader._form.schema
        return reader

    def _first_line(self) -> bytes | None:
        """Return the first line of the first file that has one; None of a stream, which is read once."""
        for file in self._files:
            if not file.seekable:
                return None
            lines = Lines(file, headed=True)
            with closing(iter(lines)) as blocks:
                for _ in blocks:
                    if lines.header is not None:
                        return lines.header
        return None

    def _noting(self, header: Callable[[bytes, bool], Parse]) -> Callable[[bytes, bool], Parse]:
        """Return a header that also notes the columns of which nothing is said."""

        def parse(line: bytes, labelled: bool) -> Parse:
            found = header(line, labelled)
            if self._form.others is not None:
                self._note_columns(self._form.others(line))
            return found

        return parse

    def with_fields(self) -> Reader:
        """Return this reader with batches with the field of each feature; see `Reader.with_fields`."""
        if self._form.name == LIBSVM.name:
            raise ValueError("libsvm has no fields: write libffm, or a format with named columns")
        if self._form.pairs:
            raise ValueError("an interaction belongs to no field: leave out the interactions or the fields")
        return super().with_fields()

    def _of_labels(self) -> Reader | None:
        if self._form.of_labels is None:
            return None
        reader = copy.copy(self)
        reader._form = self._form.of_labels()
        return reader

    def _can_begin_anywhere(self, file: File) -> bool:
        with file.open() as opened:
            return kind_of(opened.read(HEAD_BYTES) or b"") is None

    def _sources(self) -> Iterator[TextSource | None]:
        begin = self._settings.begin
        headed = self._form.header is not None
        for split in self._file_splits():
            if split is None:
                yield None
                continue
            start = begin.offset if split.number == begin.file else 0
            lines = Lines(split.file, split.rank, split.num_splits, size=split.size, start=start, headed=headed)
            without = self._settings.lines_without(split.file)
            yield TextSource(split.number, lines, split.before, split.fraction, without)
