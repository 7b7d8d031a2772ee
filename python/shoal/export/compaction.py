"""Compaction: merge a chain of exports into one."""

import math
import os
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from shoal.base.machine import cores
from shoal.base.scalars import whole
from shoal.export import manifest as manifests
from shoal.export.cache import Cache
from shoal.export.layers import Layers, read_layers
from shoal.export.read import newest
from shoal.export.write import Exported, TableSource, UnsynchronizedTables, write_export
from shoal.storage.open import open_dir


def compact(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    threads: int | None = None,
    progress: bool = False,
    cache: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[Exported, int]:
    """Merge a chain of deltas into one full export.

    Parameters
    ----------
    directory : path or URL
        The export at the end of the chain, which names its base; or a directory of exports, whose newest is used.
    output : path or URL
        Created if missing. Not a directory of the chain.
    overwrite : bool
        Whether an existing export is replaced, at the end. Anything else is never replaced.
    threads : int, optional
        Default: the cores that this process may use.
    progress : bool
        Whether to show a progress bar.
    cache : path, optional
        Local directory for copies of exports of a URL: see :func:`shoal.export.open`.
    storage_options : mapping, optional
        Options of the file system of URLs.

    Returns
    -------
    (Exported, int)
        What was written, and the number of exports that were merged.

    Raises
    ------
    CorruptionError
        A file of the chain is missing, truncated or changed, or a base was replaced since its delta.
    StorageError
        A file cannot be read or written.
    SaveConflictError
        Another process has written there since this one began; its result is kept.
    ValueError
        ``output`` is a directory of the chain, or holds anything that may not be replaced.

    Notes
    -----
    Reads and writes slot by slot: it needs memory for a few slots. The files are byte for byte those of a full
    export of the same weights; int8 weights are rounded once more, with an error of at most half a step. The result has
    the next number, and the model of the chain.
    """
    threads = cores() if threads is None else whole("threads", threads, 1)
    copies = Cache(cache)
    target = open_dir(output, storage_options)
    with closing(read_layers(newest(open_dir(directory, storage_options)), cache=copies)) as layers:
        for one in layers.mapped:
            if target.is_same(one.storage_dir):
                raise ValueError(f"{target} is part of the chain that ends with {directory}: choose another directory")
        tables = [_source(name, layers) for name in layers.tables]
        done = write_export(
            target,
            UnsynchronizedTables(tables, layers.slots),
            dtype={name: table.dtype for name, table in layers.tables.items()},
            version=manifests.next_number(target, layers.number),
            overwrite=overwrite,
            model=layers.model,
            extras={name: layers.extra(name) for name in layers.extras},
            threads=threads,
            progress=progress,
        )
        return done, len(layers.mapped)


def _source(name: str, layers: Layers) -> TableSource:
    """Return a source of a table's rows, merged from all layers."""
    forms = layers.forms_of(name)
    rows = [table.rows + table.dropped for table in forms]
    squares = sum(count * table.rms_error**2 for count, table in zip(rows, forms, strict=True))
    return TableSource(
        forms[-1].spec(),
        sum(table.rows for table in forms),
        layers.natives[name].read_slot,
        max(table.largest_error for table in forms),
        math.sqrt(squares / max(1, sum(rows))),
    )
