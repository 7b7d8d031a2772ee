"""A save on a cluster: servers write their slots side by side, the worker that saves puts the manifest behind.

    worker                                       each endpoint
    SAVE_BEGIN, at its clock    ------------->   the moment: the server holds the tables; pushes go on
    a file with random bytes, and its name   ->  reads it there, and tries whether it may write: "ready"
    "go", once all are ready       ---------->   its slot files, and where in them each slot is: "done"
    the manifest, once all are done
    SAVE_END, with its digest    ------------>   lets go of the moment; later deltas are of that digest

How the two speak: tasks.py.

Invariants
    A1  Nothing is written before every endpoint has seen the place, but the file that it is seen by.
    A2  The manifest is there only if every endpoint has written and committed all of its slots, of one clock.
    A3  An endpoint that has not said "done" leaves none of its files; one that has leaves them to the worker, whose
        manifest may name them by then.

Threads: a :class:`ServerSnapshotSet` is used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from shoal import _core
from shoal.checkpoint.checkpoint import SLOT_FILE, Link, SavedTable, Taken, no_base, write_slots
from shoal.checkpoint.checkpoint import joined as join_parts
from shoal.cluster.protocol import tasks
from shoal.cluster.protocol.slot_map import Endpoint
from shoal.cluster.protocol.tasks import Report, Task, TaskCoordinator, encode, name_of, words_of
from shoal.cluster.worker.channel import Channel
from shoal.errors import SaveConflictError, ShoalError, StorageError
from shoal.storage.base import StorageDir
from shoal.table.spec import TableRecord, TableSpec

__all__ = ["ServerSnapshotSet", "WriteTask"]

_log = logging.getLogger("shoal.saving")

_KINDS = ("plain", "base", "delta")  # as SAVE_BEGIN numbers them
_FIGURES = 4  # of a table, in the answer
_BUSY, _NO_BASE = 1, 2  # answers that begin nothing
_WORDS = 4  # numbers that a digest has


# ---- the worker's side -----------------------------------------------------------------------------------------------


class _BusyError(Exception):
    """A server holds the tables for another worker's save."""

    def __init__(self, endpoint: Endpoint, worker: int) -> None:
        super().__init__(
            f"worker {worker} is saving these tables, as {name_of(endpoint)} says: let one worker save, or one after "
            "the other"
        )
        self.worker = worker


class ServerSnapshotSet(TaskCoordinator):
    """Tables of servers as they are at this worker's clock: a :class:`.Moment`. A context manager.

    Parameters
    ----------
    channel : Channel
    endpoints : sequence of Endpoint
        All of them.
    tables : sequence of (int, TableSpec, str)
        The servers' number of each table, and whether it is saved "plain", as a "base" of deltas, or as a "delta".
    base : Link, optional
        What deltas are of.
    lost : callable, optional
        Which workers are dead, as far as this one knows: what a server holds for one of them is waited for until that
        server knows it too, at most as long as a call may take.

    Raises
    ------
    ValueError
        A server does not know what has changed since ``base``.
    SaveConflictError
        Another worker is saving one of the tables.
    ShoalError
        As of any call.

    Notes
    -----
    Waits, as a pull does, for this worker's clock; then the moment is there.
    """

    def __init__(
        self,
        channel: Channel,
        endpoints: Sequence[Endpoint],
        tables: Sequence[tuple[int, TableSpec, str]],
        base: Link | None = None,
        lost: Callable[[], Collection[int]] = tuple,
    ) -> None:
        super().__init__(channel, endpoints, "save")
        self.specs = [spec for _, spec, _ in tables]
        self.rows = 0
        self._kinds = [kind for _, _, kind in tables]
        digest = words_of(base.digest) if base is not None else [0] * _WORDS
        numbers = [*digest, *(number | _KINDS.index(kind) << 32 for number, _, kind in tables)]
        deadline = time.monotonic() + channel.timeout
        while True:
            try:
                self._take(numbers, tables, base)
                return
            except _BusyError as busy:
                # All servers hear that a worker is dead, but not all of them as soon as this worker does.
                if busy.worker not in lost() or time.monotonic() > deadline:
                    raise SaveConflictError(str(busy)) from None
            time.sleep(tasks.LONGEST)

    def _take(self, numbers: list[int], tables: Sequence[tuple[int, TableSpec, str]], base: Link | None) -> None:
        self.rows = 0
        try:
            for endpoint, figures in zip(self._endpoints, self._begin(numbers), strict=True):
                self._add(endpoint, figures, tables, base)
        except BaseException:
            self.close()
            raise

    def _add(
        self,
        endpoint: Endpoint,
        figures: list[int],
        tables: Sequence[tuple[int, TableSpec, str]],
        base: Link | None,
    ) -> None:
        if len(figures) == _FIGURES * len(tables):
            rows = figures[2::_FIGURES]
            self.rows += sum(some for some, kind in zip(rows, self._kinds, strict=True) if kind != "delta")
            return
        if len(figures) == 2 and figures[0] == _BUSY:
            raise _BusyError(endpoint, figures[1])
        if len(figures) == 2 and figures[0] == _NO_BASE:
            name = next(spec.name for number, spec, _ in tables if number == figures[1])
            raise no_base(name, base)
        raise self._given_up(endpoint)

    def write(
        self, place: StorageDir, stem: str, version: int, *, durable: bool, told: Callable[[int], None]
    ) -> list[SavedTable]:
        """Have all endpoints write; see :class:`shoal.checkpoint.checkpoint.Moment`.

        Raises
        ------
        StorageError
            A server does not see the place, or may not write there, or its disk refuses: the message names it.
        SnapshotLostError
            A server had too much to keep.
        ServerLostError, DeadlineExceededError
            A server is gone, or makes no progress.
        """
        task = self._seen(place, stem, version, durable=durable)
        reports = self._until("done", msgspec.structs.replace(task, go=True), told)
        return join_parts([report.saved for report in reports])

    def check(self, place: StorageDir) -> None:
        """Find out whether all endpoints would write there: raises what `write` would, and writes nothing."""
        self._seen(place, f"check-{secrets.token_hex(8)}", 0, durable=False)

    def _seen(self, place: StorageDir, stem: str, version: int, *, durable: bool) -> WriteTask:
        """Have all endpoints look at the place, and return the task that they are ready for."""
        where, options = place.to_spec()
        task = WriteTask(
            place=where,
            options=dict(options),
            patience=self._patience(),
            token=f"{stem}-look{SLOT_FILE}",
            content=secrets.token_bytes(16),
            stem=stem,
            version=version,
            durable=durable,
            tables=[TableRecord.of(spec) for spec in self.specs],
            kinds=self._kinds,
        )
        encode(task)  # a TypeError comes before anything is written
        try:
            with place.create(task.token, durable=False) as file:
                file.write(task.content)
            self._until("ready", task)
        finally:
            place.remove(task.token)
        return task

    def done(self, digest: str) -> None:
        """Let the servers know what they were saved as: the next delta may be of it."""
        try:
            self._end(digest)
        except ShoalError as error:
            # What is written is whole all the same; where nobody heard of it a delta of it will be refused.
            _log.warning("the save is written, but not all servers have heard so: %s", error)


# ---- the server's side -----------------------------------------------------------------------------------------------


class WriteTask(Task, frozen=True, kw_only=True, tag="write"):
    """What an endpoint is to write."""

    token: str  # the name of a file there
    content: bytes  # its bytes
    stem: str
    version: int
    durable: bool
    tables: list[TableRecord]
    kinds: list[str]

    def look(self, place: StorageDir, save: _core.CheckpointSession) -> None:
        """Find out whether this is the place that the worker means, and whether it may be written."""
        deadline = time.monotonic() + tasks.SEEING
        while not self._sees(place):
            if time.monotonic() > deadline:
                raise StorageError(
                    f"it does not see {self.place}, where the worker that saves has written {self.token}: each server "
                    "writes its own rows, so save to a directory that all machines share by that path, or to an object "
                    "store (s3://...), or connect with shared_storage=False and let the worker write them all"
                )
            time.sleep(tasks.LONGEST)
        place.create(f"{self.stem}-{save.first_slot}-look{SLOT_FILE}", durable=False).abort()

    def _sees(self, place: StorageDir) -> bool:
        try:
            return place.read(self.token) == self.content
        except FileNotFoundError:
            place.names()  # has a network's file system look anew
            return False

    def do(self, place: StorageDir, save: _core.CheckpointSession, seen: None, told: Callable[[int], None]) -> Report:
        """Write the slots."""
        stems = [f"{self.stem}-{k}-{save.first_slot}" for k in range(len(self.tables))]
        taken = [
            Taken(form.spec(), SessionSnapshot(save, k), kind)
            for k, (form, kind) in enumerate(zip(self.tables, self.kinds, strict=True))
        ]
        slots = range(save.first_slot, save.end_slot)
        try:
            saved = write_slots(place, stems, self.version, taken, slots, 1, durable=self.durable, told=told)
        except BaseException:
            with contextlib.suppress(StorageError):
                for name in place.names():
                    if name.startswith(tuple(f"{stem}-" for stem in stems)):
                        place.remove(name)
            raise
        return Report("done", sum(table.rows for table in saved), saved)


class SessionSnapshot:
    """A table of a save: a :class:`shoal.table.shard.Snapshot`."""

    def __init__(self, save: _core.CheckpointSession, table: int) -> None:
        self._save = save
        self._table = table
        self.step, self.table_clock, self.rows, self.bytes = save.summaries[table]

    def section(self, slot: int, /) -> Any:
        """Take a slot."""
        return self._save.section(self._table, slot)

    def changes(self, slot: int, /) -> Any:
        """Take what has changed there."""
        return self._save.changes(self._table, slot)

    def done(self, name: str, /) -> None:
        """Do nothing: the worker tells the endpoint."""

    def close(self) -> None:
        """Do nothing: the endpoint lets go of it."""
