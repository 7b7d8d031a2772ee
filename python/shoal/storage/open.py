"""Open a directory by its path or URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.base.machine import local_path
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.local import LocalDir
from shoal.storage.object_store import RemoteDir

__all__ = ["open_dir"]


def open_dir(where: StoragePath, options: Mapping[str, Any] | None = None) -> StorageDir:
    """Open a directory, which need not exist.

    Parameters
    ----------
    where : path, URL or StorageDir
        A local path, "s3://bucket/folder", or any other URL that fsspec supports. A StorageDir is returned
        unchanged.
    options : mapping, optional
        Of the file system that a URL is opened by, such as ``{"endpoint_url": ...}``.

    Raises
    ------
    ImportError
        A URL, and fsspec, or what it takes for that kind of URL, is not installed.
    ValueError
        fsspec knows no such kind of URL.

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
