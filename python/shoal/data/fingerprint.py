"""Fingerprints of data, which are names, sizes and first bytes of files, and positions in it: what a fit resumes by."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.data.files import File
from shoal.data.rebatch import Cursor
from shoal.data.settings import Settings
from shoal.errors import CorruptionError

_HEAD_BYTES = 1 << 16


def difference(
    earlier: Mapping[str, Any], now: Mapping[str, Any], current: Sequence[File], *, appended: bool
) -> str | None:
    """Name the first difference between two fingerprints of readers; see `shoal.data.Reader.changes`."""
    for name in ("format", "schema", "batch_size", "shard"):
        if earlier[name] != now[name]:
            return f"{'split' if name == 'shard' else name} was {earlier[name]!r}, and is {now[name]!r}"
    if any(earlier.get(name) != now.get(name) for name in ("without", "without_lines")):
        return "the examples that are left out (without) were others"
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


def place_of(position: Mapping[str, Any], form: str, paths: list[str]) -> dict[str, Any]:
    """Return the settings of a reader that begins at a position; see `shoal.data.Reader.resume`."""
    try:
        its_form, files, split, cursor = (position[name] for name in ("format", "files", "shard", "place"))
        names, sizes = [name for name, _ in files], tuple(size for _, size in files)
        file, offset, rows, skipped = map(operator.index, cursor)
        begin = Cursor(file, offset, rows, skipped)
        order = position.get("order")
        order = None if order is None else tuple(operator.index(number) for number in order)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{position!r} is not a position: pass what position() returned") from error
    if its_form != form or names != paths:
        raise ValueError(
            f"the position belongs to {its_form} data of {first_of(names)}, and this reader reads {form} data of "
            f"{first_of(paths)}: make the reader of the same files"
        )
    if min(begin) < 0 or begin.file >= len(names):
        raise ValueError(f"the position {list(begin)} is not in {len(names)} files: pass what position() returned")
    if order is not None and sorted(order) != list(range(len(names))):
        raise ValueError(f"{list(order)} is not a permutation of {len(names)} files: pass what position() returned")
    rank, num_splits = split
    return {"rank": rank, "num_splits": num_splits, "begin": begin, "sizes": sizes, "order": order}


def check_sizes(settings: Settings, files: Sequence[File], sizes: Sequence[int | None]) -> None:
    """Check that files have the sizes that they had when they were split, and when the position was taken."""
    if len(files) < settings.num_splits:
        for file, size, noted in zip(files, sizes, settings.split_sizes or sizes, strict=True):
            if size != noted:
                raise CorruptionError(
                    f"{file.name} has {size} bytes, and had {noted} when it was split: splits of a file that "
                    f"changes repeat or lose lines; make a reader of the present file, and split that"
                )
    for file, size, noted in zip(files, sizes, settings.sizes or sizes, strict=True):
        if size != noted:
            raise ValueError(
                f"{file.name} has {size} bytes, and had {noted} when the position was taken: begin a new pass over "
                f"the present files"
            )


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
