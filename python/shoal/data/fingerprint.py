"""Fingerprints of data: names, sizes and first bytes of files, so that a fit resumes on the data that it began with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.data.files import File

_HEAD_BYTES = 1 << 16


def difference(
    earlier: Mapping[str, Any], now: Mapping[str, Any], current: Sequence[File], *, appended: bool
) -> str | None:
    """Name the first difference between two fingerprints of readers; see `shoal.data.Reader.changes`."""
    for name in ("format", "schema", "batch_size", "shard"):
        if earlier[name] != now[name]:
            return f"{'split' if name == 'shard' else name} was {earlier[name]!r}, and is {now[name]!r}"
    then, files = earlier["files"], now["files"]
    for old, new, file in zip(then, files, current, strict=False):
        if old["name"] != new["name"]:
            return f"{old['name']} was read there, and {new['name']} is given in its place"
        before, size = old.get("size"), new.get("size")
        if size != before and (before is None or size is None or size < before or not appended):
            return f"{old['name']} had {_bytes(before)}, and has {_bytes(size)}"
        if "head" in old and _head(file, min(before, _HEAD_BYTES)) != old["head"]:
            return f"{old['name']} is another file: its first {_bytes(min(before, _HEAD_BYTES))} differ"
    if len(files) < len(then):
        return f"{then[len(files)]['name']} was part of the data and is missing now"
    if len(files) > len(then) and not appended:
        return f"{files[len(then)]['name']} was not part of the data"
    if appended and files != then and now["shard"][1] > 1:
        return "files have grown, so the split begins elsewhere"
    return None


def file_fingerprint(file: File, *, headed: bool) -> dict[str, Any]:
    """Describe a file by name, size and, if ``headed``, a digest of its first 64 KiB."""
    size = file.size()
    known: dict[str, Any] = {"name": file.name} if size is None else {"name": file.name, "size": size}
    if headed and size is not None and (head := _head(file, min(size, _HEAD_BYTES))) is not None:
        known["head"] = head
    return known


def _head(file: File, size: int) -> str | None:
    """Digest the first bytes; None of what has no bytes."""
    try:
        opened = file.open()
    except TypeError:  # a table in memory
        return None
    digest = hashlib.blake2b(digest_size=8)
    with opened:
        while size and (some := opened.read(size)):
            digest.update(some)
            size -= len(some)
    return digest.hexdigest()


def _bytes(size: int | None) -> str:
    return "an unknown number of bytes" if size is None else f"{size:,} bytes"


def first_of(names: list[str]) -> str:
    """Return the first of several names and how many more there are, for messages."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"
