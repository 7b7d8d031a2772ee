"""A save by the servers: they write their slots in parallel, then the worker that saves writes the manifest.

    worker                                       each endpoint
    SAVE_BEGIN, at its clock    ------------->   snapshots the tables; pushes continue
    a file with random bytes, and its name   ->  reads the file, checks that it may write there: "ready"
    "go", once all are ready       ---------->   writes its slot files, reports the place of each slot: "done"
    the manifest, once all are done
    SAVE_END, with its digest    ------------>   releases the snapshot; later deltas refer to that digest

The exchange is described in protocol/tasks.py, the server's side is server/save_task.py.

Invariants
    A1  Nothing but the file with random bytes is written before every endpoint has seen the directory.
    A2  The manifest exists only if every endpoint has written and committed all of its slots, of one clock.
    A3  An endpoint that has not reported "done" leaves none of its files; one that has leaves them to the worker, whose
        manifest may name them by then.

Threads: a :class:`ServerSnapshotSet` is used by one thread at a time.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from shoal.base.decoders import msgpack_decoder
from shoal.checkpoint.format import SLOT_FILE, ChainEntry, SavedTable
from shoal.checkpoint.write import join_tables, unknown_base
from shoal.cluster.protocol.slot_map import Endpoint
from shoal.cluster.protocol.tasks import MAX_POLL_SECONDS, Report, WriteTask, digest_words, encode
from shoal.cluster.worker.channel import Channel
from shoal.cluster.worker.tasks import TaskCoordinator
from shoal.errors import ClusterChangedError, ProtocolError, SaveConflictError, ShoalError, SnapshotLostError
from shoal.storage.base import StorageDir
from shoal.table.spec import TableRecord, TableSpec

_log = logging.getLogger("shoal.saving")

_KINDS = ("plain", "base", "delta")  # as SAVE_BEGIN numbers them
_NUMBERS_PER_TABLE = 4  # in the answer
_BUSY, _NO_BASE = 1, 2  # first number of an answer that refuses
_DIGEST_WORDS = 4

_saved = msgpack_decoder(list[SavedTable])


class _BusyError(Exception):
    """A server holds the tables for another worker's save; ``job`` is the number of its job if it is another one."""

    def __init__(self, endpoint: Endpoint, worker: int, job: int | None = None) -> None:
        of_job = "" if job is None else f" of another job, number {job},"
        super().__init__(
            f"worker {worker}{of_job} is saving these tables, as {endpoint.label} reports: let one worker save, or one "
            "after the other"
        )
        self.worker = worker if job is None else None


class ServerSnapshotSet(TaskCoordinator):
    """Snapshots of the servers' tables at this worker's clock. A context manager.

    Waits for this worker's clock, as a pull does.
    """

    def __init__(
        self,
        channel: Channel,
        tables: Sequence[tuple[int, TableSpec, str]],
        base: ChainEntry | None = None,
        lost: Callable[[], Collection[int]] = tuple,
        *,
        last: str = "",
        on_done: Callable[[str], None] = lambda digest: None,
    ) -> None:
        super().__init__(channel, "save")
        self._last = last
        self._on_done = on_done
        self.specs = [spec for _, spec, _ in tables]
        self.rows = 0
        self._kinds = [kind for _, _, kind in tables]
        digest = digest_words(base.digest) if base is not None else [0] * _DIGEST_WORDS
        numbers = [*digest, *(number | _KINDS.index(kind) << 32 for number, _, kind in tables)]
        deadline = time.monotonic() + channel.client.timeout
        while True:
            try:
                self._take(numbers, tables, base)
                return
            except _BusyError as busy:
                # The servers are informed of a dead worker too, but some of them later than this worker.
                if busy.worker not in lost() or time.monotonic() > deadline:
                    raise SaveConflictError(str(busy)) from None
            except ClusterChangedError:  # nothing has been written
                if time.monotonic() > deadline:
                    raise
            time.sleep(MAX_POLL_SECONDS)

    def _take(self, numbers: list[int], tables: Sequence[tuple[int, TableSpec, str]], base: ChainEntry | None) -> None:
        self.rows = 0
        try:
            answers = self._begin(numbers)
            for endpoint, figures in zip(self._endpoints, answers, strict=True):
                self._add(endpoint, figures, tables, base)
        except BaseException:
            self.close()
            raise

    def _add(
        self,
        endpoint: Endpoint,
        figures: list[int],
        tables: Sequence[tuple[int, TableSpec, str]],
        base: ChainEntry | None,
    ) -> None:
        if len(figures) == _NUMBERS_PER_TABLE * len(tables):
            rows = figures[2::_NUMBERS_PER_TABLE]
            self.rows += sum(some for some, kind in zip(rows, self._kinds, strict=True) if kind != "delta")
            return
        if len(figures) in (2, 3) and figures[0] == _BUSY:
            raise _BusyError(endpoint, *figures[1:])
        if len(figures) == 2 and figures[0] == _NO_BASE:
            name = next(spec.name for number, spec, _ in tables if number == figures[1])
            if base is not None and base.digest == self._last:
                raise SnapshotLostError(
                    f"{endpoint.label} does not know the changes of table {name!r} since the save in "
                    f"{base.storage_dir} any more: it has taken the slots of a server that has ended, or another "
                    "worker has saved or loaded this table; save all rows, with track=True"
                )
            raise unknown_base(name, base)
        raise self._abandoned(endpoint)

    def write(
        self, directory: StorageDir, stem: str, version: int, *, durable: bool, on_progress: Callable[[int], None]
    ) -> list[SavedTable]:
        """Have all endpoints write; see :class:`shoal.checkpoint.write.SnapshotSet`."""
        task = self._prepare(directory, stem, version, durable=durable)
        reports = self._run_until("done", msgspec.structs.replace(task, go=True), on_progress)
        return join_tables([_decode_saved(*pair) for pair in zip(self._endpoints, reports, strict=True)])

    def check(self, directory: StorageDir) -> None:
        """Check that all endpoints could write there: raises what `write` would raise, writes no slots."""
        self._prepare(directory, f"check-{secrets.token_hex(8)}", 0, durable=False)

    def _prepare(self, directory: StorageDir, stem: str, version: int, *, durable: bool) -> WriteTask:
        """Have all endpoints check the directory; return the task that they are ready for."""
        path, options = directory.to_spec()
        task = WriteTask(
            directory=path,
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
        encode(task)  # raises a TypeError before anything is written
        try:
            with directory.create(task.token, durable=False) as file:
                file.write(task.content)
            self._run_until("ready", task)
        finally:
            directory.remove(task.token)
        return task

    def done(self, digest: str) -> None:
        """Send the servers the digest of the checkpoint: the next delta may refer to it."""
        try:
            self._end(digest)
            if any(kind != "plain" for kind in self._kinds):
                self._on_done(digest)
        except ShoalError as error:
            # The checkpoint is complete all the same; a server that did not receive this refuses a delta of it.
            _log.warning("the checkpoint is written, but not all servers have received its digest: %s", error)


def _decode_saved(endpoint: Endpoint, report: Report) -> list[SavedTable]:
    try:
        return _saved.decode(report.saved)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{endpoint.label} sent a report of the save that cannot be read ({error})") from None
