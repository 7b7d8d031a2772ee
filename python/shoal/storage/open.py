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
    """Name a directory, which need not be there.

    Parameters
    ----------
    where : path, URL or StorageDir
        Of this machine, or "s3://bucket/folder" and whatever else fsspec knows. A place stays as it is.
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
