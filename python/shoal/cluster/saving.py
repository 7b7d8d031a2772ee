"""A save on a cluster: servers write their slots side by side, the worker that saves puts the manifest behind.

    worker                                       each endpoint
    SAVE_BEGIN, at its clock    ------------->   the moment: csrc/net/save.h holds the tables; pushes go on
    a file with random bytes, and its name   ->  reads it there, and tries whether it may write: "ready"
    "write", once all are ready    ---------->   its slot files, and where in them each slot is: "done"
    the manifest, once all are done
    SAVE_END, with its digest    ------------>   lets go of the moment; later deltas are of that digest

What is said in between is a `Task` to the endpoint and a `Report` from it, each the whole truth and said again and
again (SAVE_TELL), so it does not matter which of them is lost, or comes late.

Invariants
    A1  Nothing is written before every endpoint has seen the place, but the file that it is seen by.
    A2  The manifest is there only if every endpoint has written and committed all of its slots, of one clock.
    A3  An endpoint that has not said "done" leaves none of its files; one that has leaves them to the worker, whose
        manifest may name them by then.
    A4  Every wait ends: a worker that is not heard for `Task.patience` seconds, or was dismissed, is not waited for;
        nor is an endpoint that makes no progress, or whose server is lost.

Threads: :class:`Writing` has one for each endpoint, and one for each save under way there; a :class:`Saving` is used by
one thread at a time.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

import msgspec
import numpy as np

from shoal import _core
from shoal.checkpoint import SLOT_FILE, Link, SavedTable, Taken, no_base, write_slots
from shoal.checkpoint import joined as join_parts
from shoal.errors import DeadlineExceeded, ProtocolError, SaveConflict, ShoalError, StorageError
from shoal.rpc.channel import Channel
from shoal.rpc.map import Endpoint
from shoal.storage import Place, place_of
from shoal.table import TableForm, TableSpec

__all__ = ["Saving", "Writing", "words_of"]

Op = _core.Op

_log = logging.getLogger("shoal.saving")

_KINDS = ("plain", "base", "delta")  # as SAVE_BEGIN numbers them
_FIGURES = 4  # of a table, in the answer
_BUSY, _NO_BASE = 1, 2  # answers that begin nothing
_WORDS = 4  # numbers that a digest has
_STANDSTILL = 300.0  # seconds in which a disk takes a file of a GiB, if it takes 4 MB a second
_PATIENCE = 60.0  # seconds, at least, that an endpoint waits for a worker: it may be publishing the manifest
_SEEING = 2.0  # seconds until a network's file system shows what another machine has written
_SHORTEST, _LONGEST = 0.001, 0.1  # seconds between two words
_ENDING = 2.0  # seconds for a server to hear that a save is given up


class Task(msgspec.Struct, frozen=True):
    """What a worker wants of an endpoint."""

    place: str
    options: dict[str, Any]
    token: str  # the name of a file there
    content: bytes  # its bytes
    stem: str
    version: int
    durable: bool
    tables: list[TableForm]
    kinds: list[str]
    patience: float
    write: bool = False  # else only look


class Report(msgspec.Struct, frozen=True):
    """How far an endpoint is: "ready", "writing", "done" or "failed"."""

    state: str
    rows: int = 0  # written
    tables: list[SavedTable] = []
    kind: str = ""  # of error
    text: str = ""


_ERRORS: dict[str, type[Exception]] = {
    "storage": StorageError,
    "lost": _core.SnapshotLost,
    "import": ImportError,
    "input": ValueError,
}


def _kind_of(error: Exception) -> str:
    return next((kind for kind, of in _ERRORS.items() if isinstance(error, of)), "")


# ---- the worker's side -----------------------------------------------------------------------------------------------


class _Busy(Exception):
    """A server holds the tables for another worker's save."""

    def __init__(self, endpoint: Endpoint, worker: int) -> None:
        super().__init__(
            f"worker {worker} is saving these tables, as {_who(endpoint)} says: let one worker save, or one after the "
            "other"
        )
        self.worker = worker


class Saving:
    """Tables of servers as they are at this worker's clock: a :class:`shoal.checkpoint.Moment`. A context manager.

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
    SaveConflict
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
        self._channel = channel
        self._endpoints = endpoints
        self._open = False
        self.specs = [spec for _, spec, _ in tables]
        self._kinds = [kind for _, _, kind in tables]
        digest = words_of(base.digest) if base is not None else [0] * _WORDS
        numbers = [*digest, *(number | _KINDS.index(kind) << 32 for number, _, kind in tables)]
        deadline = time.monotonic() + channel.timeout
        while True:
            try:
                self._begin(numbers, tables, base)
                return
            except _Busy as busy:
                # All servers hear that a worker is dead, but not all of them as soon as this worker does.
                if busy.worker not in lost() or time.monotonic() > deadline:
                    raise SaveConflict(str(busy)) from None
            time.sleep(_LONGEST)

    def _begin(self, numbers: list[int], tables: Sequence[tuple[int, TableSpec, str]], base: Link | None) -> None:
        begun = self._channel.begin(Op.SAVE_BEGIN, 0, payload=[np.array(numbers, np.uint64)], count=len(numbers))
        self._open = True
        self._number = begun.call.sequence
        self.clock = begun.call.clock
        self.rows = 0
        try:
            for endpoint, figures in zip(self._endpoints, begun.result(), strict=True):
                self._add(endpoint, figures.tolist(), tables, base)
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
            raise _Busy(endpoint, figures[1])
        if len(figures) == 2 and figures[0] == _NO_BASE:
            name = next(spec.name for number, spec, _ in tables if number == figures[1])
            raise no_base(name, base)
        raise ShoalError(f"{_who(endpoint)} has given up the save before it began")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(
        self, place: Place, stem: str, version: int, *, durable: bool, told: Callable[[int], None]
    ) -> list[SavedTable]:
        """Have all endpoints write; see :class:`shoal.checkpoint.Moment`.

        Raises
        ------
        StorageError
            A server does not see the place, or may not write there, or its disk refuses: the message names it.
        SnapshotLost
            A server had too much to keep.
        ServerLost, DeadlineExceeded
            A server is gone, or makes no progress.
        """
        where, options = place.told()
        token = f"{stem}-look{SLOT_FILE}"
        task = Task(
            place=where,
            options=dict(options),
            token=token,
            content=secrets.token_bytes(16),
            stem=stem,
            version=version,
            durable=durable,
            tables=[TableForm.of(spec) for spec in self.specs],
            kinds=self._kinds,
            patience=max(self._channel.timeout, _PATIENCE),
        )
        _encode_task(task)  # a TypeError comes before anything is written
        try:
            with place.create(token, durable=False) as file:
                file.write(task.content)
            self._until("ready", task, lambda rows: None)
        finally:
            place.remove(token)
        reports = self._until("done", msgspec.structs.replace(task, write=True), told)
        return join_parts([report.tables for report in reports])

    def _until(self, state: str, task: Task, told: Callable[[int], None]) -> list[Report]:
        """Say the same until all endpoints are so far."""
        words = _encode_task(task)
        heard: dict[int, Report] = {}
        moved = dict.fromkeys(range(len(self._endpoints)), time.monotonic())
        rows, pause = 0, _SHORTEST
        while True:
            for k, report in enumerate(self._tell(words)):
                if report is not None and report != heard.get(k):
                    heard[k] = report
                    moved[k] = time.monotonic()
            if len(heard) == len(self._endpoints) and all(report.state == state for report in heard.values()):
                told(sum(report.rows for report in heard.values()) - rows)
                return [heard[k] for k in range(len(self._endpoints))]
            now = sum(report.rows for report in heard.values())
            told(now - rows)
            rows = now
            for k, at in moved.items():
                still = time.monotonic() - at
                if (k not in heard or heard[k].state != state) and still > max(_STANDSTILL, self._channel.timeout):
                    raise DeadlineExceeded(
                        f"{_who(self._endpoints[k])} has made no progress with the save for {still:.0f} s: does its "
                        f"disk, or {task.place}, still answer?"
                    )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _tell(self, words: bytes) -> list[Report | None]:
        numbers = np.array([self._number], np.uint64)
        calls = [
            self._channel.begin(Op.SAVE_TELL, 0, slot=endpoint.first_slot, payload=[numbers, words], count=1)
            for endpoint in self._endpoints
        ]
        return [self._read(endpoint, *call.result()) for endpoint, call in zip(self._endpoints, calls, strict=True)]

    def _read(self, endpoint: Endpoint, known: bool, words: bytes) -> Report | None:
        if not known:
            raise ShoalError(
                f"{_who(endpoint)} has given up the save: it had not heard of this worker for a while, or the "
                "scheduler took it for dead; what was there before stays"
            )
        if not words:
            return None
        try:
            report = msgspec.msgpack.decode(words, type=Report)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{_who(endpoint)} tells of the save what nobody reads ({error})") from None
        if report.state == "failed":
            raise _ERRORS.get(report.kind, ShoalError)(f"{_who(endpoint)}: {report.text}")
        return report

    def done(self, digest: str) -> None:
        """Let the servers know what they were saved as: the next delta may be of it."""
        try:
            self._end([self._number, *words_of(digest)], None)
        except ShoalError as error:
            # What is written is whole all the same; where nobody heard of it a delta of it will be refused.
            _log.warning("the save is written, but not all servers have heard so: %s", error)

    def close(self) -> None:
        """Give up what was not done."""
        with contextlib.suppress(ShoalError):
            self._end([self._number], _ENDING)

    def _end(self, numbers: list[int], timeout: float | None) -> None:
        if not self._open:
            return
        self._open = False
        calls = [
            self._channel.begin(
                Op.SAVE_END, 0, slot=endpoint.first_slot, payload=[np.array(numbers, np.uint64)], count=len(numbers)
            )
            for endpoint in self._endpoints
        ]
        errors = []
        for call in calls:
            try:
                call.wait(timeout)
            except ShoalError as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _encode_task(task: Task) -> bytes:
    try:
        return msgspec.msgpack.encode(task)
    except TypeError as error:
        raise TypeError(
            f"storage_options are sent to the servers, which write there too: pass plain values ({error})"
        ) from None


def words_of(digest: str) -> list[int]:
    """Write a digest as the numbers of a message."""
    words: list[int] = np.frombuffer(bytes.fromhex(digest), np.uint64).tolist()
    return words


def _who(endpoint: Endpoint) -> str:
    return f"server {endpoint.server} at {endpoint.address}"


# ---- the server's side -----------------------------------------------------------------------------------------------


class Writing:
    """Writes what workers save of an endpoint, until it is stopped.

    Parameters
    ----------
    service : _core.Service
    """

    def __init__(self, service: _core.Service) -> None:
        self._service = service
        self._threads: list[threading.Thread] = []
        self._main = threading.Thread(target=self._run, name="shoal-saves", daemon=True)
        self._main.start()

    def _run(self) -> None:
        while (save := self._service.next_save()) is not None:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=_write, args=(save,), name="shoal-save", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Give up what is under way; a thread that waits for a disk is not waited for long."""
        self._service.close_saves()
        self._main.join()
        for thread in self._threads:
            thread.join(_ENDING)


class _OverError(Exception):
    """Nobody wants the save any more."""


class _Then:
    """A table of a save: a :class:`shoal.table.Snapshot`."""

    def __init__(self, save: _core.Save, table: int) -> None:
        self._save = save
        self._table = table
        self.step, self.table_clock, self.rows, self.bytes = save.figures[table]

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


class _Line:
    """What an endpoint's thread hears of the worker."""

    def __init__(self, save: _core.Save) -> None:
        self._save = save
        self._times = 0
        self._at = time.monotonic()
        self._patience = _PATIENCE
        self.task: Task | None = None

    def listen(self, seconds: float = 0.0) -> None:
        """Wait for a word, at most so long; raise if there will be none."""
        times, words = self._save.heard(self._times, seconds)
        if self._save.ended:
            raise _OverError
        now = time.monotonic()
        if times > self._times:
            self._times, self._at = times, now
            self.task = msgspec.msgpack.decode(words, type=Task)
            self._patience = self.task.patience
        elif now - self._at > self._patience:
            _log.warning("a save is given up: its worker was not heard for %.0f s", now - self._at)
            self._save.drop()
            raise _OverError

    def until(self, is_so: Callable[[Task], bool]) -> Task:
        while self.task is None or not is_so(self.task):
            self.listen(1.0)
        return self.task

    def to_the_end(self) -> None:
        while True:
            self.listen(1.0)


def _write(save: _core.Save) -> None:
    line = _Line(save)
    with contextlib.suppress(_OverError):
        try:
            report = _work(save, line)
        except _OverError:
            raise
        except Exception as error:
            if save.ended:
                return
            kind = _kind_of(error)
            if not kind:
                _log.exception("a save failed")
            report = Report("failed", kind=kind, text=str(error) if kind else f"{type(error).__name__}: {error}")
        save.say(msgspec.msgpack.encode(report))
        line.to_the_end()


def _work(save: _core.Save, line: _Line) -> Report:
    task = line.until(lambda task: True)
    place = place_of(task.place, task.options)
    _look(place, task, save.first_slot)
    save.say(msgspec.msgpack.encode(Report("ready")))
    line.until(lambda task: task.write)
    rows, said = 0, time.monotonic()

    def told(more: int) -> None:
        nonlocal rows, said
        rows += more
        if time.monotonic() - said > _LONGEST:
            said = time.monotonic()
            save.say(msgspec.msgpack.encode(Report("writing", rows)))
        line.listen()

    stems = [f"{task.stem}-{k}-{save.first_slot}" for k in range(len(task.tables))]
    taken = [
        Taken(form.spec(), _Then(save, k), kind)
        for k, (form, kind) in enumerate(zip(task.tables, task.kinds, strict=True))
    ]
    slots = range(save.first_slot, save.end_slot)
    try:
        saved = write_slots(place, stems, task.version, taken, slots, 1, durable=task.durable, told=told)
    except BaseException:
        with contextlib.suppress(StorageError):
            for name in place.names():
                if name.startswith(tuple(f"{stem}-" for stem in stems)):
                    place.remove(name)
        raise
    return Report("done", rows, saved)


def _look(place: Place, task: Task, number: int) -> None:
    """Find out whether this is the place that the worker means, and whether it may be written."""
    deadline = time.monotonic() + _SEEING
    while not _sees(place, task):
        if time.monotonic() > deadline:
            raise StorageError(
                f"it does not see {task.place}, where the worker that saves has written {task.token}: each server "
                "writes its own rows, so save to a directory that all machines share by that path, or to an object "
                "store (s3://...), or connect with shared_storage=False and let the worker write them all"
            )
        time.sleep(_LONGEST)
    place.create(f"{task.stem}-{number}-look{SLOT_FILE}", durable=False).abort()


def _sees(place: Place, task: Task) -> bool:
    try:
        return place.read(task.token) == task.content
    except FileNotFoundError:
        place.names()  # has a network's file system look anew
        return False
