"""A load by the servers: they read their slots in parallel; one worker has checked the manifests and commits it.

    worker 0, or the next one that is there      each endpoint
    LOAD_BEGIN, of each table      ---------->   creates empty rows next to the existing ones
    SAVE_BEGIN, of those rows      ---------->   opens a session over them (csrc/endpoint/checkpoint_session.h)
    the directory, and a digest    ---------->   finds that checkpoint, and the files of its own slots: "ready"
    "go", once all are ready       ---------->   restores its slots and reports the number of rows: "done"
    SAVE_END, with the digest      ---------->   releases them
    LOAD_END, of each table, once the numbers are right   ->  they replace the existing rows

The exchange is described in protocol/tasks.py, the server's side is server/load_task.py. Where no storage is shared the
worker sends the rows instead of the four lines in the middle (remote_load.py).

Invariants
    L1  No row of any table is changed before every endpoint has read all of its slots, of all tables.
    L2  A load that fails leaves none of its rows on any endpoint that can be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from shoal.checkpoint.format import ChainEntry
from shoal.cluster.protocol.tasks import ReadTask, digest_words
from shoal.cluster.worker.channel import Channel
from shoal.cluster.worker.tasks import TaskCoordinator

_KIND = 3  # in SAVE_BEGIN: the session is for the rows of a load


class ServerLoad(TaskCoordinator):
    """Tables whose loads have begun, and whose rows the servers read. A context manager."""

    def __init__(self, channel: Channel, tables: Sequence[int]) -> None:
        super().__init__(channel, "load")
        self._tables = tables

    def read(self, link: ChainEntry, slots: int, on_progress: Callable[[int], None]) -> list[int]:
        """Have all endpoints read the tables of a checkpoint."""
        directory, options = link.storage_dir.to_spec()
        task = ReadTask(
            directory=directory, options=dict(options), patience=self._patience(), digest=link.digest, slots=slots
        )
        numbers = [*digest_words(link.digest), *(number | _KIND << 32 for number in self._tables)]
        answers = self._begin(numbers)
        for endpoint, figures in zip(self._endpoints, answers, strict=True):
            if not figures:
                raise self._abandoned(endpoint)
        self._run_until("ready", task)
        reports = self._run_until("done", msgspec.structs.replace(task, go=True), on_progress)
        self._end(link.digest)
        return [sum(rows) for rows in zip(*(report.loaded for report in reports), strict=True)]
