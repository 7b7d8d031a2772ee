"""Parse the lines of files into batches of one size, with the position after each batch.

    one thread      block -> rows, which become a batch when they are complete
    several         block -> a pool of threads, each block into rows of its own -> put together in the order of the
                    blocks, cut where the batches end

Both make the same batches, bit for bit. Batches continue from one file to the next.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from shoal import _reader
from shoal.data.batch import Batch
from shoal.data.csv import CR_ALONE
from shoal.data.rebatch import BatchGroup, BatchGroups, BatchQueue, Cursor, rows_of
from shoal.data.rows import Format, Parse
from shoal.data.source import BLOCK_BYTES, Block, Lines, LineTooLongError

_NO_LABEL = "the label is not a number"  # one of FAULTS
_EXCERPT_BYTES = 80
_BLOCK_ROWS = 1 << 30  # more than a block has
_BLOCKS_AHEAD = 2  # for each thread
_FULL_BLOCK_BYTES = BLOCK_BYTES // 2


class TextSource(NamedTuple):
    """A file, or a split of it, among those that a pass reads."""

    # Of the file, as places count.
    number: int
    # What is read of it.
    lines: Lines
    # before, fraction: Of the bytes of all: those before it, and its own; 0 where they are not known.
    before: float = 0.0
    fraction: float = 1.0


def fill(
    sources: Iterable[TextSource],
    form: Format,
    batch_size: int,
    skip: bool,
    begin: Cursor | None = None,
    reader_threads: int = 1,
) -> BatchGroups:
    """Read the lines into batches of ``batch_size`` rows, the last one smaller."""
    begin = begin or Cursor()
    if reader_threads > 1:
        return _ParallelParser(form, batch_size, skip, begin).batch_groups(sources, reader_threads)
    return _direct(sources, form, batch_size, skip, begin)


def _direct(sources: Iterable[TextSource], form: Format, batch_size: int, skip: bool, begin: Cursor) -> BatchGroups:
    rows = form.rows(begin.rows or batch_size)
    dropping = begin.rows > 0
    skipped = begin.skipped
    cursor = begin
    fraction = 0.0
    for source in sources:
        line = 1  # the number of the next one, counted from the first that is read
        parse = form.parse
        try:
            for text, offset, passed, consumed in source.lines:
                if text and parse is None:
                    parse = _bound(form, source.lines)
                if offset == 0 and source.lines.unended:
                    _check_line_ends(text, source.lines.file.name)
                line += passed
                fraction = source.before + consumed * source.fraction
                done = []
                end = 0
                while parse is not None and end < len(text):
                    end, count, rows.row, left_out, fault, at = parse(text, end, rows, skip)
                    rows.note(text)
                    line += count
                    skipped += left_out
                    cursor = Cursor(source.number, offset + end, 0, skipped)
                    if rows.full and dropping:
                        rows, dropping = form.rows(batch_size), False
                    elif rows.full:
                        done.append((rows.take(), cursor))
                    elif fault:
                        yield BatchGroup(done, skipped, fraction)
                        what = _malformed(
                            bytes(text[end:]), at - end, fault, offset + end, named=form.header is not None
                        )
                        yield from _raise_at(source.lines, line, what)
                    elif end < len(text):
                        rows.grow()
                yield BatchGroup(done, skipped, fraction) if done else None
            if parse is None and source.lines.header is not None:
                _bound(form, source.lines)  # a file of nothing else is checked too
        except LineTooLongError as error:
            yield BatchGroup([], skipped, fraction)
            yield from _raise_at(source.lines, line, _too_long(error))
    yield BatchGroup([(rows.take(), cursor)] if rows.row and not dropping else [], skipped, 1.0)


class _ParsedBlock(NamedTuple):
    """A parsed block and its results."""

    batch: Batch | None
    lines: int
    skipped: int
    end: int
    bad: tuple[bytes, int, int] | None  # the malformed line at the end, its faulty byte and its fault code


class _PendingBlock(NamedTuple):
    """A block that is being parsed."""

    source: TextSource
    offset: int
    passed: int
    fraction: float
    parsed: Future[_ParsedBlock]


class _ParallelParser:
    """Parses the blocks of a pass in a pool, and joins them into batches."""

    def __init__(self, form: Format, batch_size: int, skip: bool, begin: Cursor) -> None:
        self._form = form
        self._batch_size = batch_size
        self._skip = skip
        self._drop = begin.rows
        self._skipped = begin.skipped
        self._queue = BatchQueue()
        self._source: TextSource | None = None
        self._line = 1
        self._cursor = begin

    def batch_groups(self, sources: Iterable[TextSource], threads: int) -> BatchGroups:
        fraction = 0.0
        waiting: deque[_PendingBlock] = deque()
        with ThreadPoolExecutor(threads, "shoal parser") as pool, contextlib.ExitStack() as stack:
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            for source in sources:
                parse = self._form.parse
                try:
                    for block in source.lines:
                        if block.text and parse is None:
                            parse = _bound(self._form, source.lines)
                        if block.offset == 0 and source.lines.unended:
                            _check_line_ends(block.text, source.lines.file.name)
                        fraction = source.before + block.fraction * source.fraction
                        waiting.append(self._submit(pool, parse, source, block, fraction))
                        # What a stream delivers in small pieces does not wait for more.
                        most = _BLOCKS_AHEAD * threads if len(block.text) >= _FULL_BLOCK_BYTES else 0
                        while len(waiting) > most or (waiting and waiting[0].parsed.done()):
                            yield from self._assemble(waiting.popleft())
                        yield None
                    if parse is None and source.lines.header is not None:
                        _bound(self._form, source.lines)
                except LineTooLongError as error:
                    while waiting:
                        yield from self._assemble(waiting.popleft())
                    line = self._line if self._source is source else 1
                    yield BatchGroup([], self._skipped, fraction)
                    yield from _raise_at(source.lines, line, _too_long(error))
            while waiting:
                yield from self._assemble(waiting.popleft())
        rest = [(self._queue.take(self._queue.rows), self._cursor)] if self._queue.rows else []
        yield BatchGroup(rest, self._skipped, 1.0)

    def _submit(
        self, pool: ThreadPoolExecutor, parse: Parse | None, source: TextSource, block: Block, fraction: float
    ) -> _PendingBlock:
        text = bytes(block.text)  # a copy: the next block overwrites it
        parsed = pool.submit(_parse, parse, self._form, text, self._skip)
        return _PendingBlock(source, block.offset, block.passed, fraction, parsed)

    def _assemble(self, block: _PendingBlock) -> BatchGroups:
        if self._source is not block.source:
            self._source, self._line = block.source, 1
        parsed = block.parsed.result()
        self._line += block.passed + parsed.lines
        done = []
        if parsed.batch is not None:
            # Skipped lines of this block count from its beginning, for any row.
            first = min(self._drop, len(parsed.batch))
            self._drop -= first
            self._queue.add(rows_of(parsed.batch, first, len(parsed.batch)))
            while self._queue.rows >= self._batch_size:
                batch = self._queue.take(self._batch_size)
                rows = len(parsed.batch) - self._queue.rows
                done.append((batch, Cursor(block.source.number, block.offset, rows, self._skipped)))
            self._cursor = Cursor(block.source.number, block.offset, len(parsed.batch), self._skipped)
        self._skipped += parsed.skipped
        if parsed.bad is not None:
            yield BatchGroup(done, self._skipped, block.fraction)
            what = _malformed(*parsed.bad, block.offset + parsed.end, named=self._form.header is not None)
            yield from _raise_at(block.source.lines, self._line, what)
        elif done:
            yield BatchGroup(done, self._skipped, block.fraction)


def _parse(parse: Parse | None, form: Format, text: bytes, skip: bool) -> _ParsedBlock:
    rows = form.rows(_BLOCK_ROWS)
    end = lines = skipped = 0
    bad = None
    while parse is not None and end < len(text):
        end, count, rows.row, left_out, fault, at = parse(memoryview(text), end, rows, skip)
        rows.note(text)
        lines += count
        skipped += left_out
        if fault:
            bad = (text[end:], at - end, fault)
            break
        if end < len(text):
            rows.grow()
    return _ParsedBlock(rows.take() if rows.row else None, lines, skipped, end, bad)


class MalformedLineError(ValueError):
    """A line of a text that cannot be read: the examples before it, the byte of it that is wrong, and the line."""

    def __init__(self, what: str, number: int, at: int, line: bytes) -> None:
        super().__init__(what)
        self.number = number
        self.at = at
        self.line = line


def parse_text(form: Format, text: bytes) -> Batch | None:
    """Read a text in memory as a file of the format is read; None: it holds no example."""
    if not text.endswith(b"\n"):
        text += b"\n"
        if form.header is None:
            _check_line_ends(text)
    parse = form.parse
    if form.header is not None:
        header, _, text = text.partition(b"\n")
        parse = form.header(header, form.labelled)
    parsed = _parse(parse, form, text, skip=False)
    if parsed.bad is not None:
        rest, at, fault = parsed.bad
        number = 0 if parsed.batch is None else len(parsed.batch)
        raise MalformedLineError(_reader.FAULTS[fault], number, at, rest.partition(b"\n")[0])
    return parsed.batch


def _bound(form: Format, lines: Lines) -> Parse:
    """Find what parses the lines of a file with a header."""
    assert form.header is not None, "a format has a parser, or a header that selects one"
    try:
        return form.header(lines.header or b"", form.labelled)
    except ValueError as error:
        raise ValueError(f"{lines.file.name}, line 1: {error}") from None


def _check_line_ends(text: bytes | memoryview, name: str = "") -> None:
    """Refuse a text whose only newline was added at its end, with line ends of another kind inside."""
    first, _, rest = bytes(text).partition(b"\n")
    if not rest and b"\r" in first.rstrip(b"\r"):
        raise ValueError(f"{name}: {CR_ALONE}" if name else CR_ALONE)


def _raise_at(lines: Lines, line: int, what: str) -> Generator[None, None, None]:
    """Raise, once the line's number in the file is known."""
    for newlines in lines.newlines_before():
        line += newlines
        yield None
    raise ValueError(f"{lines.file.name}, line {line}{what}")


def _too_long(error: LineTooLongError) -> str:
    return f": {error}: split the line, or is this a text file with newlines at the ends of its lines?"


def _malformed(text: bytes, at: int, fault: int, offset: int, *, named: bool) -> str:
    """Describe the fault in the first line of `text`, at its byte `at`, with an excerpt around it.

    ``named``: the format's columns have names.
    """
    text = text.partition(b"\n")[0].rstrip(b"\r")
    begin = max(0, min(at - _EXCERPT_BYTES // 2, len(text) - _EXCERPT_BYTES))
    shown = text[begin : begin + _EXCERPT_BYTES].decode("utf-8", "backslashreplace")
    before, behind = "..." if begin > 0 else "", "..." if begin + _EXCERPT_BYTES < len(text) else ""
    what: str = _reader.FAULTS[fault]
    # Only csv supports text labels, so most of these lines are correct there.
    texts = "positive= names the text that is 1; " if named and what == _NO_LABEL else ""
    return (
        f", column {at + 1} (the line begins at byte {offset}): {what}: "
        f"{before + shown + behind!r}; {texts}on_error='skip' leaves such lines out and counts them"
    )
