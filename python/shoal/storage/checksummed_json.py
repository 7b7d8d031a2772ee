"""Checksummed JSON: small files that are written atomically and whose corruption is detected.

    {"crc32c": "<eight hex digits>", "body": <any JSON value>}

The checksum covers the bytes of ``body`` in the file.

Threads: no state.
"""

import os
import secrets
from pathlib import Path

import msgspec

from shoal import _core
from shoal.base.decoders import json_decoder
from shoal.errors import CorruptionError

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # of bytes that are not the expected JSON


class _Checksummed(msgspec.Struct, frozen=True):
    crc32c: str
    body: msgspec.Raw


_decoder = json_decoder(_Checksummed)


def sync_directory(directory: Path) -> None:
    """Return once the names in ``directory`` are on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Make ``directory`` and its missing parents; return once the new names are on disk."""
    if not directory.is_dir():
        if not directory.parent.exists():
            make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace the file at ``path`` by ``data`` atomically.

    If ``durable``, wait until the file is on disk; otherwise a power failure may undo the replacement.

    One writer at a time: temporary files of writers that were killed are removed.
    """
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        left.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_directory(path.parent)


def encode_checksummed(body: bytes) -> bytes:
    """Encode ``body``, one JSON value, with its checksum: the bytes of a file."""
    return msgspec.json.encode(_Checksummed(f"{_core.crc32c(body):08x}", msgspec.Raw(body)))


def decode_checksummed(raw: bytes, address: object) -> bytes:
    """Return the body of a checksummed file; ``address`` names the file in messages."""
    try:
        decoded = _decoder.decode(raw)
    except UNREADABLE as error:
        raise CorruptionError(f"{address} is damaged: {error}") from None
    body = bytes(decoded.body)
    if raw != msgspec.json.encode(decoded) or decoded.crc32c != f"{_core.crc32c(body):08x}":
        raise CorruptionError(f"{address} is damaged: its checksum does not match")
    return body
