"""Compaction: a chain of deltas, of checkpoints or of exports, as one that is whole."""

import os
from collections.abc import Mapping
from typing import Any

from shoal import checkpoint
from shoal.export import manifest as exported
from shoal.export.compact import compact_export
from shoal.storage.open import open_dir

__all__ = ["compact", "has_export"]


def has_export(directory: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> bool:
    """Tell whether a directory is an export, or one of exports."""
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
    overwrite: bool = True,
    threads: int | None = None,
    progress: bool = False,
    cache: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write what a chain of deltas comes to as one full checkpoint, or as one whole export.

    Parameters
    ----------
    directory : path or URL
        The checkpoint or the export at the chain's end, from where what it is a delta of is found; or a directory of
        exports, of which the newest is meant.
    out : path or URL
        Made if it is not there. None of the chain's.
    overwrite : bool
        Whether a checkpoint or an export that is there is replaced, at the very end. Anything else never is.
    threads : int, optional
        Default: the cores that this process may use.
    progress : bool
        Whether to show a progress bar.
    cache : path, optional
        Where exports of a URL are copied to, to be read: see :func:`shoal.open_export`.
    storage_options : mapping, optional
        Of the file system that URLs are opened by.

    Raises
    ------
    CorruptionError
        A file of the chain is missing, cut short or changed, or a base is another than that of its delta.
    StorageError
        A file cannot be read or written.
    SaveConflictError
        Another process has written there since this one began. What it wrote stays.
    ValueError
        ``out`` is a directory of the chain, or holds something else, or what may not be replaced.

    Notes
    -----
    Reads and writes slot by slot: memory is that of a few slots. The result is the full checkpoint that a save without
    a base would have written at that moment, or the whole export of the same weights, to the byte of its data files;
    int8 weights are rounded once more, to at most half a step. A compacted export has the next number, and the model
    of the chain.
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
