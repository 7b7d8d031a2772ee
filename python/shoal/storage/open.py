"""Open a directory by its path or URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.base.machine import local_path
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.local import LocalDir
from shoal.storage.object_store import RemoteDir


def open_dir(where: StoragePath, options: Mapping[str, Any] | None = None) -> StorageDir:
    """Open a directory, which need not exist.

    Examples
    --------
    >>> open_dir("ckpt").address("manifest.json")
    'ckpt/manifest.json'
    """
    if isinstance(where, StorageDir):
        return where
    if isinstance(where, str) and "://" in where:
        return RemoteDir(where, options or {})
    return LocalDir(local_path(where))
