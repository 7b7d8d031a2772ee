r"""Lines: a file, or one split of it, as blocks of whole lines in bounded memory.

    file        ....................................................................
    block       |---- 512 KiB ----|---- 512 KiB ----|-- as much as there is --|
    text        ~~~~~~~~~~~~~~~~\n~~~~ carried over, in front of the next block

The incomplete line after the last newline is carried over to the front of the next block; a whole line is held in
memory, so its length is limited. Buffers are reused once they are handed back.

Splits. Each line is in exactly one of the n splits.
    plain       Split r holds the lines whose first byte lies in [size * r // n, size * (r + 1) // n).
    compressed  Offsets in the text are not known beforehand, so every split reads the whole file, and split r keeps
                the lines that end in the blocks r, r + n, r + 2n, ... of the text, 512 KiB each; an unended last line
                ends where the text does.
    stream      Cannot be split, as it is read once.

Starts. Lines before an offset of the text can be skipped: a plain file is read from there on, any other from its
beginning. A header, the first line, is skipped likewise, and kept.

Threads. An iteration belongs to one thread; any number of them may run at a time.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Generator, Iterator
from io import BufferedIOBase, FileIO, UnsupportedOperation
from typing import NamedTuple, Protocol

from shoal.data.files import File, Opened
from shoal.data.unpack import HEAD_BYTES, DecompressedStream, kind_of
from shoal.errors import CorruptionError

BLOCK_BYTES = 1 << 19
WAIT_SECONDS = 0.05  # for more of a stream, before the consumer can look at what there is
LINE_LIMIT_BYTES = 16 << 20

_TAIL_BYTES = 1 << 16
_NEWLINE = 10


class Block(NamedTuple):
    """Whole lines of a file."""

    # Ends with a newline, or is empty; valid until it is handed back.
    text: memoryview
    # Where the text begins, in the file or in what it decompresses to.
    offset: int
    # Lines in front of the text that belong to other splits.
    passed: int
    # How much of the bytes on the disk has been consumed, the text of this block included; 0 where their number is
    # not known.
    fraction: float


class LineTooLongError(Exception):
    """The line after the last yielded block exceeds the limit."""

    def __init__(self, offset: int, limit: int) -> None:
        super().__init__(f"the line is longer than {limit} bytes, the most that is read as one")
        self.offset = offset


class Lines:
    """The lines of a file, or those of one of its splits."""

    def __init__(
        self,
        file: File,
        rank: int = 0,
        num_splits: int = 1,
        *,
        size: int | None = None,
        start: int = 0,
        headed: bool = False,
        block_bytes: int = BLOCK_BYTES,
        line_limit_bytes: int = LINE_LIMIT_BYTES,
    ) -> None:
        self.file = file
        # The first line, known before a block with text is yielded; None where the file is empty or not headed.
        self.header: bytes | None = None
        # Whether the newline of the last line is none of the file; known once that line is yielded.
        self.unended = False
        self._rank = rank
        self._num_splits = num_splits
        self._size = size
        self._start = start
        self._headed = headed
        self._block_bytes = block_bytes
        self._line_limit_bytes = line_limit_bytes
        self._first = 0
        self._free: list[bytearray] = []

    def hand_back(self, text: memoryview) -> None:
        """Let the memory of a block's text be used for the next ones; any thread may do so."""
        if isinstance(text.obj, bytearray) and text:
            self._free.append(text.obj)

    def __iter__(self) -> Generator[Block]:
        """Yield a block for each read, empty ones too, so that the consumer can stop between two of them."""
        size = self.file.size() if self._size is None else self._size
        with self.file.open() as file:
            if not self.file.seekable:
                yield from self._stream(file)
                return
            kind = kind_of(file.read(HEAD_BYTES))
            file.seek(0)
            if kind is not None:
                yield from self._stripes(DecompressedStream(file, kind, self.file.name), size)
            elif size:
                begin, end = size * self._rank // self._num_splits, size * (self._rank + 1) // self._num_splits
                yield from self._range(file, begin, end, size)

    def newlines_before(self) -> Iterator[int]:
        """Count the lines in front of the first one of what was read of a plain file, as numbers to be added up."""
        if self._first == 0:
            return
        with self.file.open() as file:
            left = self._first
            while left > 0 and (data := file.read(min(left, self._block_bytes))):
                left -= len(data)
                yield data.count(b"\n")

    def _range(self, file: Opened, begin: int, end: int, size: int) -> Iterator[Block]:
        """Yield the lines of a plain file of a size that begin in [begin, end)."""
        if self._headed:
            self._start = max(self._start, self._read_header(file))
        if self._start > begin:
            at = self._start
            if at >= end:
                return
        elif begin > 0:
            at = begin - 1  # a line begins after each newline
            file.seek(at)
            newline = -1
            while newline < 0 and at < end - 1:
                data = file.read(min(self._block_bytes, end - 1 - at))
                if not data:
                    raise self._shrunk(at, size)
                newline = data.find(b"\n")
                at += newline + 1 if newline >= 0 else len(data)
                yield Block(memoryview(b""), at, 0, 0.0)
            if newline < 0:
                return
        else:
            at = 0
        file.seek(at)
        self._first = begin = at
        window = _Window(begin, self._line_limit_bytes, self._free)
        while at < end and (got := window.fill(file, min(self._block_bytes, end - at))):
            at += got
            text, offset = window.whole_lines()
            yield Block(text, offset, 0, (at - begin) / (end - begin))
        if at < end:
            raise self._shrunk(at, size)
        # The line that holds the last byte of the range may end after it.
        while window.carried and (got := window.fill(file, min(self._block_bytes, _TAIL_BYTES))):
            at += got
            text, offset = window.first_line()
            yield Block(text, offset, 0, 1.0)
            if text:
                return
        if window.carried:
            if at < size:
                raise self._shrunk(at, size)
            self.unended = window.unended
            text, offset = window.rest()
            yield Block(text, offset, 0, 1.0)

    def _shrunk(self, end: int, size: int) -> CorruptionError:
        return CorruptionError(
            f"{self.file.name} ends after {end} bytes, and had {size} when the pass began: it was truncated or "
            f"replaced while it was read; write data under another name, and rename it when it is complete"
        )

    def _read_header(self, file: Opened) -> int:
        """Take the first line of a plain file; returns where the next one begins."""
        file.seek(0)
        window = _Window(0, self._line_limit_bytes, self._free)
        text, _ = window.whole_lines()
        while not text and window.fill(file, self._block_bytes):
            text, _ = window.first_line()
        if not text:
            text, _ = window.rest()
        if text:
            self.header = bytes(text[:-1])
        return len(text)

    def _stream(self, file: Opened) -> Iterator[Block]:
        """Yield all lines of a file that cannot be read again."""
        whole = _Prefixed(file)
        front = whole.front()
        kind = kind_of(front)
        stream = whole if kind is None else DecompressedStream(whole, kind, self.file.name)
        yield from self._stripes(stream, None, eager=True)

    def _stripes(self, stream: _Stream, size: int | None, *, eager: bool = False) -> Iterator[Block]:
        """Yield every `num_splits`-th block of a text whose length is not known.

        ``eager``: a block is what has arrived, if that is less, so that lines of a slow producer do not wait.
        """
        window = _Window(0, self._line_limit_bytes, self._free)
        stripe = 0
        more = True
        while more:
            try:
                more = window.fill(stream, self._block_bytes, eager=eager) >= (1 if eager else self._block_bytes)
            except _NothingYetError:
                yield Block(memoryview(b""), window.offset, 0, 0.0)
                continue
            self.unended = not more and window.unended
            text, offset = window.whole_lines() if more else window.rest()
            passed = 0
            if text and self._headed and self.header is None:
                begin = window.buffer.index(b"\n") + 1
                self.header = bytes(text[: begin - 1])
                self._start = max(self._start, begin)
            if stripe % self._num_splits != self._rank:
                passed = window.buffer.count(b"\n", 0, len(text))
                text = text[:0]
            elif offset < self._start:
                begin = min(len(text), self._start - offset)
                passed = window.buffer.count(b"\n", 0, begin)
                text, offset = text[begin:], offset + begin
            yield Block(text, offset, passed, stream.consumed() / size if size else 0.0)
            stripe += 1


class _NothingYetError(Exception):
    """Nothing has arrived; the next read waits again."""


class _Prefixed:
    """A stream whose first bytes are read to determine its format. Reads raise _NothingYetError on an idle pipe."""

    def __init__(self, file: Opened) -> None:
        self._front = b""
        self._file = file
        self._consumed = 0
        self._poll: select.poll | None = None

    def front(self) -> bytes:
        """Return the first bytes, as many as tell the format; they are read again."""
        front = b""
        # A newline is in none of the magic numbers, and a line may be all that arrives for long.
        while len(front) < HEAD_BYTES and b"\n" not in front and (data := self.read(BLOCK_BYTES)):
            front += data
        self._front, self._consumed = front, 0
        raw = getattr(self._file, "raw", self._file)
        if isinstance(raw, FileIO):  # what else has a descriptor may have bytes that this does not show, as TLS has
            if not os.get_blocking(raw.fileno()):
                raise _does_not_block()
            self._poll = select.poll()
            self._poll.register(raw, select.POLLIN)
        return front

    def consumed(self) -> int:
        """Bytes read so far."""
        return self._consumed

    tell = consumed

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes; none at the end."""
        data, self._front = self._front[:size], self._front[size:]
        if not data and self._poll is not None and not self._poll.poll(WAIT_SECONDS * 1000):
            raise _NothingYetError
        if not data and isinstance(self._file, BufferedIOBase):
            with contextlib.suppress(UnsupportedOperation):
                data = self._file.read1(size)  # what is there; nothing at the end, and of a stream that does not block
        if not data:
            got = self._file.read(size)
            if got is None:
                raise _does_not_block()
            data = got
        self._consumed += len(data)
        return data

    def readinto(self, view: memoryview) -> int:
        """Put the next bytes into ``view``; 0 when there are no more."""
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


def _does_not_block() -> BlockingIOError:
    return BlockingIOError("the stream is non-blocking: pass one that blocks")


class _Readable(Protocol):
    def readinto(self, view: memoryview, /) -> int | None: ...


class _Stream(_Readable, Protocol):
    def consumed(self) -> int: ...


class _Window:
    """The buffer: what was carried over, then what was read last.

    buffer[:carried] is the beginning of one line, buffer[carried:filled] is new, buffer[:taken] has been returned. If
    something was, the next bytes are read into another buffer, which may be one of the ``free`` ones.
    """

    def __init__(self, offset: int, limit: int, free: list[bytearray]) -> None:
        self.buffer = bytearray()
        self._limit = limit
        self._free = free
        self._offset = offset  # of buffer[0]
        self._new = 0
        self._filled = 0
        self._taken = 0

    @property
    def offset(self) -> int:
        """Where what is returned next begins."""
        return self._offset + self._taken

    @property
    def carried(self) -> int:
        """Bytes read and not returned."""
        return self._filled - self._taken

    @property
    def unended(self) -> bool:
        """Whether the last byte read is no newline."""
        return self.carried > 0 and self.buffer[self._filled - 1] != _NEWLINE

    def fill(self, stream: _Readable, want: int, *, eager: bool = False) -> int:
        """Read until there are `want` more bytes, or the stream ends; returns how many there are.

        ``eager``: read once.
        """
        carried = self.carried
        self._offset += self._taken
        needed = carried + want
        if self._taken > 0 or len(self.buffer) < needed:
            buffer = self._free.pop() if self._free else bytearray()
            if len(buffer) < needed:
                buffer = bytearray(max(needed, min(2 * len(self.buffer), self._limit)))
            with memoryview(buffer) as view:  # the same buffer, maybe
                view[:carried] = memoryview(self.buffer)[self._taken : self._filled]
            self.buffer = buffer
        self._taken = 0
        self._new = self._filled = carried
        with memoryview(self.buffer) as view:
            while want > 0 and (got := stream.readinto(view[self._filled : self._filled + want])):
                self._filled += got
                want = 0 if eager else want - got
        if self._filled > self._limit:
            newline = self.buffer.find(b"\n", self._new, self._filled)
            if (self._filled if newline < 0 else newline) > self._limit:
                raise LineTooLongError(self._offset, self._limit)
        return self._filled - self._new

    def whole_lines(self) -> tuple[memoryview, int]:
        """Take the text up to the last newline, and its offset."""
        return self._take(self.buffer.rfind(b"\n", self._new, self._filled) + 1)

    def first_line(self) -> tuple[memoryview, int]:
        """Take the text up to the first newline, and its offset."""
        return self._take(self.buffer.find(b"\n", self._new, self._filled) + 1)

    def rest(self) -> tuple[memoryview, int]:
        """Take all that is left, with a newline at its end, and its offset; only after a fill that fell short."""
        if self.unended:
            self.buffer[self._filled] = _NEWLINE
            self._filled += 1
        return self._take(self._filled)

    def _take(self, size: int) -> tuple[memoryview, int]:
        self._taken = size
        return memoryview(self.buffer)[:size], self._offset
