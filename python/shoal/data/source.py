r"""Lines: a file, or one shard of it, as blocks of whole lines in bounded memory.

    file        ....................................................................
    block       |---- 256 KiB ----|---- 256 KiB ----|-- as much as there is --|
    text        ~~~~~~~~~~~~~~~~\n~~~~ carried over, in front of the next block

One buffer is used again and again. The part of a line behind the last newline is carried over to its front; a line is
held whole, so it has a limit.

Shards. Each line is in exactly one of the n shards.
    plain       Shard r holds the lines whose first byte lies in [size * r // n, size * (r + 1) // n).
    compressed  Offsets in the text are not known beforehand, so every shard reads the whole file, and shard r keeps
                the lines that end in the blocks r, r + n, r + 2n, ... of the text, 256 KiB each; an unended last line
                ends where the text does.

Threads. An iteration belongs to one thread; any number of them may run at a time.
"""

from __future__ import annotations

import bz2
import lzma
import os
import stat
import zlib
from collections.abc import Iterator
from io import FileIO
from typing import NamedTuple, Protocol

BLOCK_BYTES = 1 << 18
LINE_LIMIT_BYTES = 16 << 20

# How a compressed file begins. No line of a format read here begins so.
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
_PACKED_BYTES = 1 << 18
_TAIL_BYTES = 1 << 16
_NEWLINE = 10


class Block(NamedTuple):
    """Whole lines of a file.

    Parameters
    ----------
    text : memoryview
        Ends with a newline, or is empty; good until the next block is asked for.
    offset : int
        Where the text begins, in the file or in what it decompresses to.
    passed : int
        Lines in front of the text that belong to other shards.
    fraction : float
        How much of the bytes on the disk has been consumed, the text of this block included.
    """

    text: memoryview
    offset: int
    passed: int
    fraction: float


class LineTooLong(Exception):
    """The line behind all that was yielded passes the limit."""

    def __init__(self, offset: int, limit: int) -> None:
        super().__init__(f"the line is longer than {limit} bytes, the most that is read as one")
        self.offset = offset


class Lines:
    """The lines of a file, or those of one of its shards.

    Parameters
    ----------
    path : str
        A regular file; plain, or of gzip, bzip2 or xz, as its first bytes tell.
    rank, shards : int
        Which shard of how many.
    block_bytes, line_limit_bytes : int
        How much is read at a time, and how long a line may be, its newline not counted. Blocks must not be longer than
        lines may be.

    Raises
    ------
    LineTooLong, ValueError, OSError
        While iterating: a line passes the limit, the compression is damaged, the file cannot be read.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        shards: int,
        *,
        block_bytes: int = BLOCK_BYTES,
        line_limit_bytes: int = LINE_LIMIT_BYTES,
    ) -> None:
        self.path = path
        self._rank = rank
        self._shards = shards
        self._block_bytes = block_bytes
        self._line_limit_bytes = line_limit_bytes
        self._first = 0

    def __iter__(self) -> Iterator[Block]:
        """Yield a block for each read, empty ones too, so that whoever wants no more can say so between two."""
        with open_regular(self.path) as file:
            kind = _kind_of(file)
            size = os.fstat(file.fileno()).st_size
            if kind is None:
                yield from self._range(file, size * self._rank // self._shards, size * (self._rank + 1) // self._shards)
            else:
                yield from self._stripes(_Unpacked(file, kind, self.path), size)

    def newlines_before(self) -> Iterator[int]:
        """Count the lines in front of the first one of a plain file's shard, as numbers to be added up."""
        with open_regular(self.path) as file:
            left = self._first
            while left > 0 and (data := file.read(min(left, self._block_bytes))):
                left -= len(data)
                yield data.count(b"\n")

    def _range(self, file: FileIO, begin: int, end: int) -> Iterator[Block]:
        """Yield the lines of a plain file that begin in [begin, end)."""
        if begin > 0:
            at = begin - 1  # a line begins behind each newline
            file.seek(at)
            newline = -1
            while newline < 0 and at < end - 1:
                data = file.read(min(self._block_bytes, end - 1 - at))
                if not data:
                    return
                newline = data.find(b"\n")
                at += newline + 1 if newline >= 0 else len(data)
                yield Block(memoryview(b""), at, 0, 0.0)
            if newline < 0:
                return
            file.seek(at)
            self._first = begin = at
        window = _Window(begin, self._line_limit_bytes)
        at = begin
        while at < end and (got := window.fill(file, min(self._block_bytes, end - at))):
            at += got
            text, offset = window.whole_lines()
            yield Block(text, offset, 0, (at - begin) / (end - begin))
        # The line that holds the last byte of the range ends behind it.
        while window.carried and window.fill(file, min(self._block_bytes, _TAIL_BYTES)):
            text, offset = window.first_line()
            yield Block(text, offset, 0, 1.0)
            if text:
                return
        if window.carried:
            text, offset = window.rest()
            yield Block(text, offset, 0, 1.0)

    def _stripes(self, stream: _Unpacked, size: int) -> Iterator[Block]:
        """Yield every `shards`-th block of a text whose length is not known."""
        window = _Window(0, self._line_limit_bytes)
        stripe = 0
        more = True
        while more:
            more = window.fill(stream, self._block_bytes) == self._block_bytes
            text, offset = window.whole_lines() if more else window.rest()
            passed = 0
            if stripe % self._shards != self._rank:
                passed = window.buffer.count(b"\n", 0, len(text))
                text = text[:0]
            yield Block(text, offset, passed, stream.consumed() / size)
            stripe += 1


class _Stream(Protocol):
    def readinto(self, view: memoryview, /) -> int | None: ...


class _Window:
    """The buffer: what was carried over, then what was read last.

    buffer[:carried] is the beginning of one line, buffer[carried:filled] is new, buffer[:taken] has been handed out.
    """

    def __init__(self, offset: int, limit: int) -> None:
        self.buffer = bytearray()
        self._limit = limit
        self._offset = offset  # of buffer[0]
        self._new = 0
        self._filled = 0
        self._taken = 0

    @property
    def carried(self) -> int:
        """Bytes read and not handed out."""
        return self._filled - self._taken

    def fill(self, stream: _Stream, want: int) -> int:
        """Read until there are `want` more bytes, or the stream ends; returns how many there are."""
        carried = self.carried
        self._offset += self._taken
        needed = carried + want
        if len(self.buffer) < needed:
            larger = bytearray(max(needed, min(2 * len(self.buffer), self._limit)))
            larger[:carried] = memoryview(self.buffer)[self._taken : self._filled]
            self.buffer = larger
        elif self._taken > 0:
            with memoryview(self.buffer) as view:
                view[:carried] = view[self._taken : self._filled]
        self._taken = 0
        self._new = self._filled = carried
        with memoryview(self.buffer) as view:
            while want > 0 and (got := stream.readinto(view[self._filled : self._filled + want])):
                self._filled += got
                want -= got
        if self._filled > self._limit:
            newline = self.buffer.find(b"\n", self._new, self._filled)
            if (self._filled if newline < 0 else newline) > self._limit:
                raise LineTooLong(self._offset, self._limit)
        return self._filled - self._new

    def whole_lines(self) -> tuple[memoryview, int]:
        """Take the text up to the last newline, and its offset."""
        return self._take(self.buffer.rfind(b"\n", self._new, self._filled) + 1)

    def first_line(self) -> tuple[memoryview, int]:
        """Take the text up to the first newline, and its offset."""
        return self._take(self.buffer.find(b"\n", self._new, self._filled) + 1)

    def rest(self) -> tuple[memoryview, int]:
        """Take all there is, with a newline at its end, and its offset; only behind a fill that fell short."""
        if self.carried and self.buffer[self._filled - 1] != _NEWLINE:
            self.buffer[self._filled] = _NEWLINE
            self._filled += 1
        return self._take(self._filled)

    def _take(self, size: int) -> tuple[memoryview, int]:
        self._taken = size
        return memoryview(self.buffer)[:size], self._offset


def open_regular(path: str) -> FileIO:
    """Open a file for reading; a pipe or a device is refused, since a second pass could not read it again."""
    # Non-blocking, as the mere opening of a pipe waits for its other end. It means nothing to a regular file.
    file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path!r} is not a regular file: write the data to a file, each pass reads it anew")
    return file


def _kind_of(file: FileIO) -> str | None:
    """Name the compression of a file by its first bytes; leaves it at its beginning."""
    head = file.read(max(map(len, _MAGIC)))
    file.seek(0)
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)


class _Engine(Protocol):
    """What zlib, bz2 and lzma have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Unpacked:
    """What a compressed file holds, all of its streams one behind the other, some bytes at a time.

    Half as fast again as the file objects of the standard library, whose buffers are small, and an end in the middle
    of a stream is told apart from damage.
    """

    def __init__(self, file: FileIO, kind: str, path: str) -> None:
        self._file = file
        self._kind = kind
        self._path = path
        self._engine: _Engine | None = None
        self._packed = b""  # read, and not yet given to the engine

    def consumed(self) -> int:
        """Bytes of the file read so far."""
        return self._file.tell()

    def readinto(self, view: memoryview) -> int:
        """Put the next bytes into `view`; 0 when there are no more."""
        while True:
            if self._engine is None:
                # Streams may be padded with zeros behind their ends.
                while not self._packed and (data := self._file.read(_PACKED_BYTES)):
                    self._packed = data.lstrip(b"\0")
                if not self._packed:
                    return 0
                self._engine = _engine(self._kind)
            starved = not self._packed and getattr(self._engine, "needs_input", True)
            if starved:
                self._packed = self._file.read(_PACKED_BYTES)
            try:
                text = self._engine.decompress(self._packed, len(view))
            except (zlib.error, lzma.LZMAError, OSError, ValueError) as error:
                raise ValueError(
                    f"{self._path}: damaged {self._kind} data before byte {self._file.tell()} of the file ({error}): "
                    f"fetch or make the file again"
                ) from error
            if self._engine.eof:
                self._packed = self._engine.unused_data.lstrip(b"\0")
                self._engine = None
            elif starved and not self._packed and not text:
                raise ValueError(
                    f"{self._path}: the {self._kind} data ends in its middle, after {self._file.tell()} bytes of the "
                    f"file: fetch or make the file again"
                )
            else:
                self._packed = getattr(self._engine, "unconsumed_tail", b"")
            view[: len(text)] = text
            if text:
                return len(text)


def _engine(kind: str) -> _Engine:
    if kind == "gzip":
        return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    return bz2.BZ2Decompressor() if kind == "bzip2" else lzma.LZMADecompressor(format=lzma.FORMAT_XZ)
