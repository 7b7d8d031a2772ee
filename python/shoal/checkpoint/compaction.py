"""Compaction: merge a chain of deltas into one full checkpoint.

Threads: a pool reads and merges slots; the calling thread writes.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from shoal import _core
from shoal.base.machine import cores
from shoal.checkpoint.format import FORMAT, Manifest, SavedTable, version_of
from shoal.checkpoint.read import History, read_chain
from shoal.checkpoint.write import Padded, SlotData, TableJob, check_apart, check_target, publish, write_jobs
from shoal.storage.open import open_dir
from shoal.table.spec import TableRecord


def compact(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    threads: int | None = None,
    progress: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Merge a chain of deltas into one full checkpoint.

    Parameters
    ----------
    directory : path or URL
        The checkpoint at the end of the chain, which names its base.
    output : path or URL
        Created if missing. Not a directory of the chain.
    overwrite : bool
        Whether an existing checkpoint is replaced, at the end. Anything else is never replaced.
    threads : int, optional
        Default: the cores that this process may use.
    progress : bool
        Whether to show a progress bar.
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
        ``output`` is a directory of the chain, or holds anything that may not be replaced.

    Notes
    -----
    Reads and writes slot by slot: it needs memory for a few slots. The files are byte for byte those of a save
    without a base at that moment.
    """
    chain = read_chain(directory, storage_options)
    target = open_dir(output, storage_options)
    check_apart(target, chain)
    check_target(target, overwrite=overwrite)
    slots = chain[-1].manifest.slots
    with ExitStack() as opened:
        jobs = []
        for table in chain[-1].manifest.tables:
            history = opened.enter_context(History(chain, table.name))
            jobs.append(
                TableJob(
                    TableRecord.of(table.spec()),
                    table.step,
                    table.clock,
                    history.last.size,
                    sum(file.bytes for file in history.first.files),
                    False,
                    partial(_merged, history),
                )
            )
        version = version_of(table.spec() for table in chain[-1].manifest.tables)

        def save(stem: str, on_progress: Callable[[int], None]) -> list[SavedTable]:
            stems = [f"{stem}-{k}" for k in range(len(jobs))]
            return write_jobs(
                target, stems, version, jobs, range(slots), threads or cores(), durable=True, on_progress=on_progress
            )

        about = Manifest(FORMAT, version, slots, [], None, chain[-1].manifest.clock)
        publish(target, about, save, sum(job.rows for job in jobs), progress=progress, durable=True)


def _merged(history: History, slot: int) -> SlotData:
    rows, section = history.section(slot)
    filter = history.filter(slot)
    return SlotData(slot, rows, section, _core.crc32c(section), Padded.of(filter) if filter.nbytes else None)
