"""What workers have servers do with the files of a checkpoint: side by side, each with its own slots.

    worker                                       each endpoint
    SAVE_BEGIN                     ----------->  holds the tables; a thread waits for words
    a task                         ----------->  looks whether it sees the place: "ready"
    "go", once all are ready       ----------->  does it, and tells how far it is: "done"
    SAVE_END                       ----------->  lets go of the tables

What is said in between is a `Task` to the endpoint and a `Report` from it, each the whole truth and said again and
again (SAVE_POLL), so it does not matter which of them is lost, or comes late. What there is to do stands in saving.py
and loading.py.

Invariants
    T1  Nothing is done before every endpoint has seen the place.
    T2  Every wait ends: a worker that is not heard for `Task.patience` seconds, or was dismissed, is not waited for;
        nor is an endpoint that makes no progress, or whose server is lost.

Threads: :class:`TaskRunner` has one for each endpoint, and one for each task under way there; a
:class:`TaskCoordinator` is used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self

import msgspec
import numpy as np

from shoal import _core
from shoal.checkpoint.checkpoint import SavedTable
from shoal.cluster.protocol.slot_map import Endpoint
from shoal.cluster.worker.channel import Channel
from shoal.errors import (
    CorruptionError,
    DeadlineExceededError,
    MemoryBudgetExceededError,
    ProtocolError,
    ShoalError,
    StorageError,
)
from shoal.storage.base import StorageDir
from shoal.storage.open import open_dir
from shoal.storage.roots import StorageRoots

__all__ = [
    "LONGEST",
    "SEEING",
    "STANDSTILL",
    "Report",
    "Task",
    "TaskCoordinator",
    "TaskRunner",
    "encode",
    "name_of",
    "words_of",
]

Op = _core.Op

_log = logging.getLogger("shoal.tasks")

STANDSTILL = 300.0  # seconds in which a disk takes a file of a GiB, if it takes 4 MB a second
SEEING = 2.0  # seconds until a network's file system shows what another machine has written
LONGEST = 0.1  # seconds between two words
_SHORTEST = 0.001
_PATIENCE = 60.0  # seconds, at least, that an endpoint waits for a worker: it may be publishing the manifest
_LONGEST_PATIENCE = 86400.0  # whatever a worker asks for
_ENDING = 2.0  # seconds for a server to hear that it is given up


class Report(msgspec.Struct, frozen=True):
    """How far an endpoint is: "ready", "working", "done" or "failed"."""

    state: str
    rows: int = 0  # written, or read
    saved: list[SavedTable] = []
    loaded: list[int] = []  # rows of each table
    kind: str = ""  # of error
    text: str = ""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker wants of an endpoint; of every kind there is one that is tagged."""

    place: str
    options: dict[str, Any]
    patience: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    go: bool = False  # else only look

    def look(self, place: StorageDir, save: _core.CheckpointSession) -> Any:
        """Find out whether this is the place that the worker means: what `do` needs to know of it."""
        raise NotImplementedError

    def do(self, place: StorageDir, save: _core.CheckpointSession, seen: Any, told: Callable[[int], None]) -> Report:
        """Do it, and tell how many rows, now and then: what that raises ends the work."""
        raise NotImplementedError


_ERRORS: dict[str, type[Exception]] = {
    "storage": StorageError,
    "corruption": CorruptionError,
    "lost": _core.SnapshotLostError,
    "memory": MemoryBudgetExceededError,
    "import": ImportError,
    "input": ValueError,
}


def _kind_of(error: Exception) -> str:
    return next((kind for kind, of in _ERRORS.items() if isinstance(error, of)), "")


def words_of(digest: str) -> list[int]:
    """Write a digest as the numbers of a message."""
    words: list[int] = np.frombuffer(bytes.fromhex(digest), np.uint64).tolist()
    return words


def name_of(endpoint: Endpoint) -> str:
    """Name an endpoint for people."""
    return f"server {endpoint.server} at {endpoint.address}"


# ---- the worker's side -----------------------------------------------------------------------------------------------


class TaskCoordinator:
    """What a worker has all endpoints do. A context manager that gives up what was not done.

    Parameters
    ----------
    channel : Channel
    endpoints : sequence of Endpoint
        All of them.
    what : str
        "save" or "load".
    """

    def __init__(self, channel: Channel, endpoints: Sequence[Endpoint], what: str) -> None:
        self._channel = channel
        self._endpoints = endpoints
        self._what = what
        self._open = False
        self._number = 0
        self.clock = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, numbers: list[int]) -> list[list[int]]:
        """Begin it, of the tables that are named: what each endpoint answers."""
        begun = self._channel.begin(Op.SAVE_BEGIN, 0, payload=[np.array(numbers, np.uint64)], count=len(numbers))
        self._open = True
        self._number = begun.call.sequence
        self.clock = begun.call.clock
        return [figures.tolist() for figures in begun.result()]

    def _given_up(self, endpoint: Endpoint) -> ShoalError:
        return ShoalError(f"{name_of(endpoint)} has given up the {self._what} before it began")

    def _patience(self) -> float:
        return max(self._channel.timeout, _PATIENCE)

    def _until(self, state: str, task: Task, told: Callable[[int], None] = lambda rows: None) -> list[Report]:
        """Say the same until all endpoints are so far."""
        words = encode(task)
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
                if (k not in heard or heard[k].state != state) and still > max(STANDSTILL, self._channel.timeout):
                    raise DeadlineExceededError(
                        f"{name_of(self._endpoints[k])} has made no progress with the {self._what} for {still:.0f} s: "
                        f"does its disk, or {task.place}, still answer?"
                    )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)

    def _tell(self, words: bytes) -> list[Report | None]:
        numbers = np.array([self._number], np.uint64)
        calls = [
            self._channel.begin(Op.SAVE_POLL, 0, slot=endpoint.first_slot, payload=[numbers, words], count=1)
            for endpoint in self._endpoints
        ]
        return [self._read(endpoint, *call.result()) for endpoint, call in zip(self._endpoints, calls, strict=True)]

    def _read(self, endpoint: Endpoint, known: bool, words: bytes) -> Report | None:
        if not known:
            raise ShoalError(
                f"{name_of(endpoint)} has given up the {self._what}: it had not heard of this worker for a while, or "
                "the scheduler took it for dead; what was there before stays"
            )
        if not words:
            return None
        try:
            report = msgspec.msgpack.decode(words, type=Report)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{name_of(endpoint)} tells of the {self._what} what nobody reads ({error})") from None
        if report.state == "failed":
            raise _ERRORS.get(report.kind, ShoalError)(f"{name_of(endpoint)}: {report.text}")
        return report

    def close(self) -> None:
        """Give up what was not done."""
        with contextlib.suppress(ShoalError):
            self._end("", _ENDING)

    def _end(self, digest: str, timeout: float | None = None) -> None:
        """Let the servers know that it is done, of the checkpoint of that digest; without one, that it is given up."""
        if not self._open:
            return
        self._open = False
        numbers = [self._number, *words_of(digest)]
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


def encode(task: Task) -> bytes:
    """Write a task as words."""
    try:
        return msgspec.msgpack.encode(task)
    except TypeError as error:
        raise TypeError(
            f"storage_options are sent to the servers, which open files there too: pass plain values ({error})"
        ) from None


# ---- the server's side -----------------------------------------------------------------------------------------------


class TaskRunner:
    """Does what workers have an endpoint do, until it is stopped.

    Parameters
    ----------
    service : _core.Service
    kinds : type
        Of tasks, a union.
    roots : StorageRoots, optional
        Where files may be read and written; default: wherever a worker says.
    """

    def __init__(self, service: _core.Service, kinds: Any, roots: StorageRoots | None = None) -> None:
        self._service = service
        self._kinds = kinds
        self._roots = roots
        self._threads: list[threading.Thread] = []
        self._main = threading.Thread(target=self._run, name="shoal-tasks", daemon=True)
        self._main.start()

    def _run(self) -> None:
        while (save := self._service.next_session()) is not None:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            line = TaskSession(save, self._kinds)
            thread = threading.Thread(target=_work, args=(save, line, self._roots), name="shoal-task", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Give up what is under way; a thread that waits for a disk is not waited for long."""
        self._service.close_sessions()
        self._main.join()
        for thread in self._threads:
            thread.join(_ENDING)


class _OverError(Exception):
    """Nobody wants it any more."""


class TaskSession:
    """What an endpoint's thread hears of the worker, and tells it."""

    def __init__(self, save: _core.CheckpointSession, kinds: Any) -> None:
        self._save = save
        self._kinds = kinds
        self._times = 0
        self._at = time.monotonic()
        self._patience = _PATIENCE
        self.task: Task | None = None

    def say(self, report: Report) -> None:
        self._save.set_status(msgspec.msgpack.encode(report))

    def listen(self, seconds: float = 0.0) -> None:
        """Wait for a word, at most so long; raise if there will be none."""
        times, words = self._save.wait_request(self._times, seconds)
        if self._save.ended:
            raise _OverError
        now = time.monotonic()
        if times > self._times:
            self._times, self._at = times, now
            try:
                self.task = msgspec.msgpack.decode(words, type=self._kinds)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                _log.warning("a save or load is given up: what its worker says cannot be read (%s)", error)
                self._save.cancel()
                raise _OverError from None
            self._patience = min(self.task.patience, _LONGEST_PATIENCE) if self.task.patience > 0 else _PATIENCE
        elif now - self._at > self._patience:
            _log.warning("a save or load is given up: its worker was not heard for %.0f s", now - self._at)
            self._save.cancel()
            raise _OverError

    def until(self, is_so: Callable[[Task], bool]) -> Task:
        while self.task is None or not is_so(self.task):
            self.listen(1.0)
        return self.task

    def to_the_end(self) -> None:
        while True:
            self.listen(1.0)


def _work(save: _core.CheckpointSession, line: TaskSession, roots: StorageRoots | None) -> None:
    with contextlib.suppress(_OverError):
        try:
            report = _look_and_do(save, line, roots)
        except _OverError:
            raise
        except Exception as error:
            if save.ended:
                return
            kind = _kind_of(error)
            if not kind:
                _log.exception("a save or load failed")
            report = Report("failed", kind=kind, text=str(error) if kind else f"{type(error).__name__}: {error}")
        line.say(report)
        line.to_the_end()


def _look_and_do(save: _core.CheckpointSession, line: TaskSession, roots: StorageRoots | None) -> Report:
    task = line.until(lambda task: True)
    place = (open_dir if roots is None else roots.open)(task.place, task.options)
    seen = task.look(place, save)
    line.say(Report("ready"))
    task = line.until(lambda task: task.go)
    rows, said = 0, time.monotonic()

    def told(more: int) -> None:
        nonlocal rows, said
        rows += more
        if time.monotonic() - said > LONGEST:
            said = time.monotonic()
            line.say(Report("working", rows))
        line.listen()

    return task.do(place, save, seen, told)
