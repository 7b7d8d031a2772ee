"""Parse the lines of files into batches of one size, with the position after each batch.

    read    one thread at a time takes the next block of whole lines
    parse   each thread its block, into arrays that stay in its cache
    join    one thread at a time, in the order of the blocks: copy the rows into the batch that is being filled

So batches and positions are the same for any number of threads, bit for bit. Batches continue from one file to the
next.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from shoal import _reader
from shoal.base.in_order import in_order
from shoal.data.batch import Batch, marked
from shoal.data.csv import CR_ALONE
from shoal.data.interactions import interact, pair_numbers
from shoal.data.names import Spelled
from shoal.data.rebatch import BatchGroup, BatchGroups, BatchQueue, Cursor
from shoal.data.rows import Format, Parse, RowBuffer
from shoal.data.source import Block, Lines, LineTooLongError

_NO_LABEL = "the label is not a number"  # one of FAULTS
_EXCERPT_BYTES = 80


class TextSource(NamedTuple):
    """A file, or a split of it, among those that a pass reads."""

    # Of the file, as places count.
    number: int
    # What is read of it.
    lines: Lines
    # before, fraction: Of the bytes of all: those before it, and its own; 0 where they are not known.
    before: float = 0.0
    fraction: float = 1.0
    # Spans of lines whose examples are left out.
    without: NDArray[np.int64] | None = None


def fill(
    sources: Iterable[TextSource | None],
    form: Format,
    batch_size: int,
    skip: bool,
    begin: Cursor | None = None,
    reader_threads: int = 1,
    max_delay: float | None = None,
) -> BatchGroups:
    """Read the lines into batches of ``batch_size`` rows; smaller are the last one, and those that wait too long."""
    return _Pass(form, batch_size, skip, begin or Cursor(), max_delay).batch_groups(sources, reader_threads)


class _ReadBlock(NamedTuple):
    """A block, and what parses it; None while there is no text, or no source."""

    source: TextSource | None
    block: Block
    parse: Parse | None


_NO_BLOCK = _ReadBlock(None, Block(memoryview(b""), 0, 0, 0.0), None)


class _ParsedRows(NamedTuple):
    """The rows of a text up to its end or a malformed line."""

    batch: Batch
    lines: int
    skipped: int
    end: int
    fault: int  # of the line at the end, 0 if there is none, and its faulty byte
    at: int


class _ParsedBlock(NamedTuple):
    """A block, and the arrays that hold its rows; None: it has no text."""

    read: _ReadBlock
    rows: RowBuffer | None
    parsed: _ParsedRows | None
    spelled: Spelled
    # Of each row, from 0 in the block, if lines are left out of the file.
    lines: NDArray[np.int64] | None


class _BlockEndsError(Exception):
    """A malformed line ends the pass: with the batches of its block, and what is wrong."""

    def __init__(self, group: BatchGroup, what: str) -> None:
        super().__init__(what)
        self.group = group


class _Pass:
    """The steps of a pass. What is joined belongs to one thread at a time, and so does what is read."""

    def __init__(
        self, form: Format, batch_size: int, skip: bool, begin: Cursor, max_delay: float | None = None
    ) -> None:
        self._form = form
        self._skip = skip
        self._free: list[RowBuffer] = []
        # Read.
        self._opened: Lines | None = None
        # Joined.
        self._queue = BatchQueue(batch_size, max_delay=max_delay)
        self._lines: Lines | None = None
        self._line = 1  # the number of the next one, counted from the first that is read
        self._above: int | None = None  # lines before that one, if they were counted
        self._drop = begin.rows
        self._skipped = begin.skipped
        self._cursor = begin
        self._fraction = 0.0

    def batch_groups(self, sources: Iterable[TextSource | None], threads: int) -> BatchGroups:
        """Make a pass; a malformed line is reported behind the batches before it."""
        try:
            for group in in_order(self._read(sources), self._parse, self._join, threads, "shoal parser"):
                if group is not None and threads > 1:
                    self._queue.make_room()
                yield group
        except LineTooLongError as error:
            group, what = BatchGroup([], self._skipped, self._fraction), _too_long(error)
            self._enter(self._opened)
        except _BlockEndsError as error:
            group, what = error.group, str(error)
        else:
            rest = self._queue.rest()
            yield BatchGroup([] if rest is None else [(rest, self._cursor)], self._skipped, 1.0)
            return
        yield group
        assert self._lines is not None, "a file has the line"
        yield from _raise_at(self._lines, self._line, what)

    def _read(self, sources: Iterable[TextSource | None]) -> Generator[_ReadBlock, None, None]:
        for source in sources:
            if source is None:
                yield _NO_BLOCK
                continue
            lines = self._opened = source.lines
            parse = self._form.parse
            for block in lines:
                if block.text and parse is None:
                    parse = _bound(self._form, lines)
                if block.offset == 0 and lines.unended:
                    _check_line_ends(block.text, lines.file.name)
                yield _ReadBlock(source, block, parse)
            if parse is None and lines.header is not None:
                _bound(self._form, lines)  # a file of nothing else is checked too

    def _parse(self, read: _ReadBlock) -> _ParsedBlock:
        text = read.block.text
        if read.source is None or read.parse is None or not text:
            return _ParsedBlock(read, None, None, None, None)
        rows = self._free.pop() if self._free else self._form.rows()
        parsed = _parse(read.parse, self._form, text, rows, self._skip)
        spelled = _spelled(self._form, text, rows)
        lines = None if read.source.without is None else _lines_of(text, rows)
        if not parsed.fault:
            read.source.lines.hand_back(text)
        return _ParsedBlock(read, rows, parsed, spelled, lines)

    def _join(self, block: _ParsedBlock) -> BatchGroup | None:
        (source, (text, offset, passed, consumed), _), rows, parsed, spelled, lines = block
        if source is None:
            return self._overdue()
        self._enter(source.lines)
        self._line += passed
        self._fraction = source.before + consumed * source.fraction
        if rows is None or parsed is None:
            return self._overdue()
        form = self._form
        _note_names(form, rows, parsed.batch, spelled)
        batch_of_block = parsed.batch
        if lines is not None and source.without is not None:
            if self._above is None:
                self._above = sum(source.lines.newlines_before())
            batch_of_block = marked(parsed.batch, self._above + self._line + lines, source.without)
        first = min(self._drop, rows.row)
        self._drop -= first
        done = []
        for batch, row in self._queue.add(batch_of_block, first):
            end, skipped = rows.ends[row - 1].tolist()
            done.append((batch, Cursor(source.number, offset + end, 0, self._skipped + skipped)))
        self._line += parsed.lines
        self._skipped += parsed.skipped
        self._cursor = Cursor(source.number, offset + parsed.end, 0, self._skipped)
        group = BatchGroup(done, self._skipped, self._fraction)
        if parsed.fault:
            rest, at = bytes(text[parsed.end :]), parsed.at - parsed.end  # not handed back
            raise _BlockEndsError(
                group, _malformed(rest, at, parsed.fault, offset + parsed.end, named=form.header is not None)
            )
        self._free.append(rows)
        return group if done else self._overdue()

    def _overdue(self) -> BatchGroup | None:
        """Return the incomplete batch, if its examples have waited long enough."""
        rest = self._queue.overdue()
        return None if rest is None else BatchGroup([(rest, self._cursor)], self._skipped, self._fraction)

    def _enter(self, lines: Lines | None) -> None:
        if self._lines is not lines:
            self._lines, self._line, self._above = lines, 1, None


def _parse(parse: Parse, form: Format, text: memoryview, rows: RowBuffer, skip: bool) -> _ParsedRows:
    """Parse a text into arrays, which the result shows; features of two are made in addition."""
    rows.row = 0
    end = lines = skipped = fault = at = 0
    while end < len(text) and not fault:
        before = rows.row
        end, count, rows.row, left_out, fault, at = parse(text, end, rows, skip)
        if skipped:
            rows.ends[before : rows.row, 1] += skipped
        lines += count
        skipped += left_out
        if end < len(text) and not fault:
            rows.grow()
    batch = rows.batch()
    if form.pairs and batch.fields is not None:
        made = interact(batch.indptr, batch.keys, batch.values, batch.fields, pair_numbers(form.pairs), None)
        batch = Batch(batch.labels, *made, batch.weights)
    elif not form.fielded and batch.fields is not None:
        batch = structs.replace(batch, fields=None)
    return _ParsedRows(batch, lines, skipped, end, fault, at)


def _lines_of(text: memoryview, rows: RowBuffer) -> NDArray[np.int64]:
    """Return the line of each row, from 0 in the text."""
    newlines = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
    return np.searchsorted(newlines, rows.ends[: rows.row, 0] - 1)


def _spelled(form: Format, text: memoryview, rows: RowBuffer) -> Spelled:
    """Find the names of the features of rows, if they are asked for."""
    if form.names is None or rows.fields is None or rows.spans is None:
        return None
    fields, spans, nnz = rows.fields, rows.spans, rows.indptr[rows.row]
    return form.names.spelled(rows.keys[:nnz], lambda some: form.spell(text, spans[some], fields[some]))


def _note_names(form: Format, rows: RowBuffer, made: Batch, spelled: Spelled) -> None:
    """Take the names of the features of rows, and of the pairs that were made of them."""
    if form.names is None:
        return
    form.names.add_spelled(spelled)
    own = rows.batch()
    if form.pairs and own.fields is not None:
        pairs = pair_numbers(form.pairs)
        form.names.note_pairs(own.indptr, own.keys, own.fields, pairs, made.indptr, made.keys)


def parse_values(form: Format, values: Sequence[bytes], *, skip: bool) -> tuple[Batch, int]:
    """Read values, each a line or several, as lines of a file of a format that needs no header."""
    assert form.parse is not None, "it needs no header"
    text = memoryview(b"\n".join(values) + b"\n")
    rows = form.rows()
    parsed = _parse(form.parse, form, text, rows, skip)
    _note_names(form, rows, parsed.batch, _spelled(form, text, rows))
    if parsed.fault:
        rest, at = bytes(text[parsed.end :]), parsed.at - parsed.end
        raise ValueError(f"line {parsed.lines + 1} of a batch" + _malformed(rest, at, parsed.fault, None, named=False))
    return parsed.batch, parsed.skipped


def _bound(form: Format, lines: Lines) -> Parse:
    """Find what parses the lines of a file with a header."""
    assert form.header is not None, "a format has a parser, or a header that selects one"
    try:
        return form.header(lines.header or b"", form.labelled)
    except ValueError as error:
        raise ValueError(f"{lines.file.name}, line 1: {error}") from None


def _check_line_ends(text: memoryview, name: str) -> None:
    """Refuse a text whose only newline was added at its end, with line ends of another kind inside."""
    first, _, rest = bytes(text).partition(b"\n")
    if not rest and b"\r" in first.rstrip(b"\r"):
        raise ValueError(f"{name}: {CR_ALONE}")


def _raise_at(lines: Lines, line: int, what: str) -> Generator[None, None, None]:
    """Raise, once the line's number in the file is known."""
    for newlines in lines.newlines_before():
        line += newlines
        yield None
    raise ValueError(f"{lines.file.name}, line {line}{what}")


def _too_long(error: LineTooLongError) -> str:
    return f": {error}: split the line, or is this a text file with newlines at the ends of its lines?"


def _malformed(text: bytes, at: int, fault: int, offset: int | None, *, named: bool) -> str:
    """Describe the fault in the first line of `text`, at its byte `at`, with an excerpt around it.

    ``offset``: where it is in its file. ``named``: the format's columns have names.
    """
    text = text.partition(b"\n")[0].rstrip(b"\r")
    begin = max(0, min(at - _EXCERPT_BYTES // 2, len(text) - _EXCERPT_BYTES))
    shown = text[begin : begin + _EXCERPT_BYTES].decode("utf-8", "backslashreplace")
    before, behind = "..." if begin > 0 else "", "..." if begin + _EXCERPT_BYTES < len(text) else ""
    what: str = _reader.FAULTS[fault]
    # Only csv supports text labels, so most of these lines are correct there.
    where = "" if offset is None else f" (the line begins at byte {offset})"
    texts = "positive= names the text that is 1; " if named and what == _NO_LABEL else ""
    return (
        f", column {at + 1}{where}: {what}: "
        f"{before + shown + behind!r}; {texts}on_error='skip' leaves such lines out and counts them"
    )
