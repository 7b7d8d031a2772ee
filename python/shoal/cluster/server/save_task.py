"""The server's side of a save: an endpoint writes the files of its own slots.

Invariants
    A3  An endpoint that has not reported "done" leaves none of its files; one that has leaves them to the worker, whose
        manifest may name them by then (A1 and A2: worker/save.py).

Threads: functions of their arguments.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from shoal import _core
from shoal.checkpoint.format import SLOT_FILE
from shoal.checkpoint.write import TableSnapshot, write_slots
from shoal.cluster.protocol import tasks
from shoal.cluster.protocol.tasks import Report, WriteTask
from shoal.errors import StorageError
from shoal.storage.base import StorageDir


def prepare(task: WriteTask, directory: StorageDir, session: _core.CheckpointSession) -> None:
    """Check that this is the directory that the worker means, and that this process may write there."""
    deadline = time.monotonic() + tasks.VISIBILITY_SECONDS
    while not _sees_token(task, directory):
        if time.monotonic() > deadline:
            raise StorageError(
                f"it does not see {task.directory}, where the worker that saves has written {task.token}: each server "
                "writes its own rows, so save to a directory that all machines share by that path, or to an object "
                "store (s3://...), or connect with shared_storage=False and let the worker write them all"
            )
        time.sleep(tasks.MAX_POLL_SECONDS)
    directory.create(f"{task.stem}-{session.slots[0]}-look{SLOT_FILE}", durable=False).abort()


def _sees_token(task: WriteTask, directory: StorageDir) -> bool:
    try:
        return directory.read(task.token) == task.content
    except FileNotFoundError:
        directory.names()  # makes a network file system refresh its listing
        return False


def execute(
    task: WriteTask,
    directory: StorageDir,
    session: _core.CheckpointSession,
    progress: Callable[[int], None],
) -> Report:
    """Write the slots; an exception of ``progress`` ends the work."""
    stems = [f"{task.stem}-{k}-{session.slots[0]}" for k in range(len(task.tables))]
    taken = [
        TableSnapshot(form.spec(), _SessionSnapshot(session, k), kind)
        for k, (form, kind) in enumerate(zip(task.tables, task.kinds, strict=True))
    ]
    try:
        saved = write_slots(
            directory,
            stems,
            task.version,
            taken,
            session.slots,
            1,
            durable=task.durable,
            on_progress=progress,
        )
    except BaseException:
        with contextlib.suppress(StorageError):
            for name in directory.names():
                if name.startswith(tuple(f"{stem}-" for stem in stems)):
                    directory.remove(name)
        raise
    return Report("done", sum(table.rows for table in saved), msgspec.Raw(msgspec.msgpack.encode(saved)))


class _SessionSnapshot:
    """A table of a checkpoint session: a :class:`shoal.table.shard.Snapshot`."""

    def __init__(self, session: _core.CheckpointSession, table: int) -> None:
        self._session = session
        self._table = table
        self.step, self.table_clock, self.rows, self.bytes = session.summaries[table]

    def section(self, slot: int, /) -> Any:
        """Return the rows of a slot."""
        return self._session.section(self._table, slot)

    def changes(self, slot: int, /) -> Any:
        """Return the changes of a slot."""
        return self._session.changes(self._table, slot)

    def done(self, name: str, /) -> None:
        """Do nothing: the worker reports the end to the endpoint."""

    def close(self) -> None:
        """Do nothing: the endpoint closes the session."""
