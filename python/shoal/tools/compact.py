"""Compaction: merge a chain of checkpoint or export deltas into one full checkpoint or export."""

import os
from collections.abc import Mapping
from typing import Any

from shoal import checkpoint
from shoal.export import manifest as exported
from shoal.export.compact import compact_export
from shoal.storage.open import open_dir


def has_export(directory: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> bool:
    """Return whether a directory is an export or contains exports."""
    storage_dir = open_dir(directory, storage_options)
    if exported.MANIFEST in storage_dir.names():
        return exported.is_export(storage_dir)
    return any(
        exported.is_export(storage_dir.child(name)) for name in storage_dir.subdirectories_with(exported.MANIFEST)
    )


def compact(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    threads: int | None = None,
    progress: bool = False,
    cache: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Merge a chain of deltas into one full checkpoint or export.

    Parameters
    ----------
    directory : path or URL
        The checkpoint or export at the end of the chain, which names its base; or a directory of
        exports, whose newest is used.
    out : path or URL
        Created if missing. Not a directory of the chain.
    overwrite : bool
        Whether an existing checkpoint or export is replaced, at the end. Anything else is never replaced.
    threads : int, optional
        Default: the cores that this process may use.
    progress : bool
        Whether to show a progress bar.
    cache : path, optional
        Local directory for copies of exports of a URL: see :func:`shoal.open_export`.
    storage_options : mapping, optional
        Options of the file system of URLs.

    Raises
    ------
    CorruptionError
        A file of the chain is missing, truncated or changed, or a base was replaced since its delta.
    StorageError
        A file cannot be read or written.
    SaveConflictError
        Another process has written there since this one began; its result is kept.
    ValueError
        ``out`` is a directory of the chain, or holds anything that may not be replaced.

    Notes
    -----
    Reads and writes slot by slot: it needs memory for a few slots. The data files are byte for byte those of a save
    without a base at that moment, or of a full export of the same weights; int8 weights are rounded once more, with an
    error of at most half a step. A compacted export has the next number, and the model of the chain.
    """
    if has_export(directory, storage_options):
        compact_export(
            directory,
            out,
            overwrite=overwrite,
            threads=threads,
            progress=progress,
            cache=cache,
            storage_options=storage_options,
        )
    else:
        checkpoint.compact_checkpoint(
            directory, out, overwrite=overwrite, threads=threads, progress=progress, storage_options=storage_options
        )
