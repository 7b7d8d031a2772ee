"""Compressed files: recognized by their first bytes, decompressed incrementally."""

from __future__ import annotations

import bz2
import contextlib
import functools
import importlib
import lzma
import zlib
from typing import Any, Protocol

from shoal.errors import CorruptionError

# Magic numbers of compressed files. No line of a supported text format begins with one, but of bzip2, "BZh": see below.
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_NOT_READ = {b"PK\x03\x04": "zip", b"7z\xbc\xaf": "7-Zip", b"Rar!\x1a\x07": "RAR", b"\x04\x22\x4d\x18": "LZ4"}
_BLOCKS_OF_BZIP2 = (b"1AY&SY", b"\x17rE8P\x90")  # how the first block, and the end of an empty stream, begin
HEAD_BYTES = 10
_PACKED_BYTES = 1 << 18


def kind_of(head: bytes) -> str | None:
    """Name the compression of a file by its first `HEAD_BYTES` bytes; None: plain."""
    kind = next((kind for magic, kind in (_MAGIC | _NOT_READ).items() if head.startswith(magic)), None)
    if kind == "bzip2" and not (head[3:4].isdigit() and any(b.startswith(head[4:]) for b in _BLOCKS_OF_BZIP2)):
        return None  # a name in a table
    return kind


class _CompressedFile(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def tell(self) -> int: ...


class _Decompressor(Protocol):
    """The common interface of zlib, bz2 and lzma."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class DecompressedStream:
    """The decompressed contents of a file, its concatenated streams included, read incrementally.

    It has larger buffers than the file objects of the standard library, and distinguishes truncation from damage.
    """

    def __init__(self, file: _CompressedFile, kind: str, path: str) -> None:
        self._file = file
        self._kind = kind
        self._path = path
        self._engine: _Decompressor | None = None
        self._packed = b""  # read, and not yet passed to the decompressor

    def consumed(self) -> int:
        """Bytes of the file read so far."""
        return self._file.tell()

    def readinto(self, view: memoryview) -> int:
        """Put the next bytes into `view`; 0 when there are no more."""
        while True:
            if self._engine is None:
                # Streams may be padded with zeros after their ends.
                while not self._packed and (data := self._file.read(_PACKED_BYTES)):
                    self._packed = data.lstrip(b"\0")
                if not self._packed:
                    return 0
                self._engine = _engine(self._kind, self._path)
            starved = not self._packed and getattr(self._engine, "needs_input", True)
            if starved:
                self._packed = self._file.read(_PACKED_BYTES)
            try:
                text = self._engine.decompress(self._packed, len(view))
            except _damage() as error:
                raise CorruptionError(
                    f"{self._path}: damaged {self._kind} data before byte {self._file.tell()} of the file ({error}): "
                    f"fetch or make the file again"
                ) from error
            if self._engine.eof:
                self._packed = self._engine.unused_data.lstrip(b"\0")
                self._engine = None
            elif starved and not self._packed and not text:
                raise CorruptionError(
                    f"{self._path}: the {self._kind} data is truncated after {self._file.tell()} bytes of the "
                    f"file: fetch or make the file again"
                )
            else:
                self._packed = getattr(self._engine, "unconsumed_tail", b"")
            view[: len(text)] = text
            if text:
                return len(text)


def _engine(kind: str, path: str) -> _Decompressor:
    if kind == "gzip":
        return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    if kind == "bzip2":
        return bz2.BZ2Decompressor()
    if kind == "xz":
        return lzma.LZMADecompressor(format=lzma.FORMAT_XZ)
    if kind == "zstd":
        engine: _Decompressor = _zstd().ZstdDecompressor()
        return engine
    raise ValueError(f"{path} is a {kind} file, which is not read: unpack it, or pack it with gzip, bzip2, xz or zstd")


@functools.cache
def _zstd() -> Any:
    """Find the module of Zstandard: Python's own from 3.14 on, else the package that brings it to older ones."""
    for name in ("compression.zstd", "backports.zstd"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise ImportError("Zstandard files require backports.zstd: pip install 'shoal[zstd]'")


def _damage() -> tuple[type[Exception], ...]:
    """Return what the engines raise for damaged data."""
    engines = (zlib.error, lzma.LZMAError, OSError, ValueError, EOFError)
    return (*engines, _zstd().ZstdError) if _zstd.cache_info().currsize else engines
