"""Copies of files that are never changed: on one disk the copy is another name of the same bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from shoal.storage.base import StorageDir, storage_errors

_PIECE = 1 << 24
_NOT_SHARED = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP}  # another disk, or one without links


def share_files(source: StorageDir, target: StorageDir, names: Iterable[str] | None = None) -> None:
    """Copy files that are there, all of them without ``names``, into a directory, which is made."""
    there = set(source.names())
    target.make(durable=False)
    for name in sorted(there if names is None else there.intersection(names)):
        if not _has_linked(source, target, name):
            _copy(source, target, name)


def _has_linked(source: StorageDir, target: StorageDir, name: str) -> bool:
    if source.local is None or target.local is None:
        return False
    with storage_errors("written", target.address(name)):
        try:
            os.link(source.local / name, target.local / name)
        except OSError as error:
            if error.errno in _NOT_SHARED:
                return False
            raise
    return True


def _copy(source: StorageDir, target: StorageDir, name: str) -> None:
    with source.open(name) as file, target.create(name, cached=False) as out:
        piece = memoryview(bytearray(min(_PIECE, max(1, file.size))))
        at = 0
        while count := file.read_into(piece, at):
            out.write(piece[:count])
            at += count
