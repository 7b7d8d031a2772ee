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


def compact_checkpoint(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    threads: int | None = None,
    progress: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Merge a chain of deltas into one full checkpoint; see :func:`shoal.compact`."""
    chain = read_chain(directory, storage_options)
    target = open_dir(out, storage_options)
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
