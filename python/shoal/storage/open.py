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
        Options of the file system of a URL, such as ``{"endpoint_url": ...}``.

    Raises
    ------
    ImportError
        ``where`` is a URL, and fsspec or its package for that kind of URL is not installed.
    ValueError
        fsspec does not support that kind of URL.

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
