"""The server's side of a load: an endpoint reads the rows of its own slots.

Threads: functions of their arguments.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal import _core
from shoal.checkpoint.format import Bytes
from shoal.checkpoint.read import History, histories, read_chain, restore_tables
from shoal.cluster.protocol import tasks
from shoal.cluster.protocol.tasks import ReadTask, Report
from shoal.errors import CorruptionError, StorageError
from shoal.storage.base import StorageDir


def prepare(task: ReadTask, directory: StorageDir, session: _core.CheckpointSession) -> list[History]:
    """Find the checkpoint in the directory, and the files of these slots."""
    deadline = time.monotonic() + tasks.VISIBILITY_SECONDS
    while True:
        try:
            return _find(task, directory, session)
        # The worker has found the checkpoint: this is another directory, or its files are not visible here yet.
        except (CorruptionError, FileNotFoundError) as error:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"it does not see the checkpoint that worker 0 has found in {task.directory} ({error}): each "
                    "server reads its own rows, so load from a directory that all machines share by that path, or "
                    "from an object store (s3://...), or connect with shared_storage=False and let worker 0 read "
                    "them all"
                ) from None
        directory.names()  # makes a network file system refresh its listing
        time.sleep(tasks.MAX_POLL_SECONDS)


def _find(task: ReadTask, directory: StorageDir, session: _core.CheckpointSession) -> list[History]:
    chain = read_chain(directory)
    if chain[-1].digest != task.digest:
        raise CorruptionError(f"{directory} contains another checkpoint, with digest {chain[-1].digest}")
    return histories(chain, session.slots, task.slots)


def execute(
    task: ReadTask,
    directory: StorageDir,
    session: _core.CheckpointSession,
    prepared: list[History],
    progress: Callable[[int], None],
) -> Report:
    """Read the slots; an exception of ``progress`` ends the work."""
    loaded = restore_tables(prepared, [_SessionLoadTarget(session, k) for k in range(len(prepared))], 1, progress)
    return Report("done", sum(loaded), loaded=loaded)


class _SessionLoadTarget:
    """A table that is being loaded. The endpoint keeps the restored rows of its own slots."""

    def __init__(self, session: _core.CheckpointSession, table: int) -> None:
        self._session = session
        self._table = table

    def restore(self, rows: int, section: Bytes, /) -> int:
        """Add the rows of a section; returns how many belong to these slots."""
        return self._session.restore(self._table, rows, section)

    def restore_filter(self, slots: int, slot: int, filter: Bytes, /) -> None:
        """Add the admission filter of a slot, cut into ``slots`` slots."""
        self._session.restore_filter(self._table, slots, slot, filter)
