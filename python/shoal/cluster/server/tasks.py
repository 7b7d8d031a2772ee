"""The server's side of a save or load: threads that execute the tasks of workers.

The exchange is described in protocol/tasks.py. save_task.py and load_task.py hold the work itself.

Threads: :class:`TaskRunner` has one for each endpoint, and one for each running task.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import msgspec

from shoal import _core
from shoal.base.decoders import msgpack_decoder
from shoal.cluster.protocol.tasks import (
    MAX_POLL_SECONDS,
    MIN_PATIENCE_SECONDS,
    ReadTask,
    Report,
    Task,
    WriteTask,
    error_kind,
)
from shoal.cluster.server import load_task, save_task
from shoal.storage.open import open_dir
from shoal.storage.roots import StorageRoots

_log = logging.getLogger("shoal.tasks")

_MAX_PATIENCE_SECONDS = 86400.0  # whatever a worker asks for
_JOIN_SECONDS = 2.0

_task: msgspec.msgpack.Decoder[WriteTask | ReadTask] = msgpack_decoder(WriteTask | ReadTask)


class TaskRunner:
    """Executes the tasks that workers send to an endpoint, until it is stopped."""

    def __init__(self, endpoint: _core.Endpoint, roots: StorageRoots | None = None) -> None:
        self._endpoint = endpoint
        self._roots = roots
        self._threads: list[threading.Thread] = []
        self._main = threading.Thread(target=self._run, name="shoal-tasks", daemon=True)
        self._main.start()

    def _run(self) -> None:
        while (session := self._endpoint.next_session()) is not None:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            mailbox = _TaskMailbox(session)
            thread = threading.Thread(
                target=_work, args=(session, mailbox, self._roots), name="shoal-task", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # no thread can be started: a later task may find one
                mailbox.report(Report("failed", text=f"the server cannot begin a save or load: {error}"))
            else:
                self._threads.append(thread)

    def stop(self) -> None:
        """Cancel the running tasks; a thread that is blocked by a disk is not waited for long."""
        self._endpoint.close_sessions()
        self._main.join()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)


class _SessionEndedError(Exception):
    """The session has ended, or was cancelled."""


class _TaskMailbox:
    """The tasks that arrive over a session, and the reports that go back."""

    def __init__(self, session: _core.CheckpointSession) -> None:
        self._session = session
        self.ids = dict(zip(("worker", "incarnation", "sequence"), session.call, strict=True))  # of its call, in events
        self._received = 0
        self._received_at = time.monotonic()
        self._patience = MIN_PATIENCE_SECONDS
        self.task: WriteTask | ReadTask | None = None

    def report(self, report: Report) -> None:
        self._session.set_status(msgspec.msgpack.encode(report))

    def receive(self, seconds: float = 0.0) -> None:
        """Receive the latest task, waiting at most ``seconds``; raise if the session has ended."""
        received, encoded = self._session.wait_request(self._received, seconds)
        if self._session.ended:
            raise _SessionEndedError
        now = time.monotonic()
        if received > self._received:
            self._received, self._received_at = received, now
            try:
                self.task = _task.decode(encoded)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                _log.warning(
                    "a save or load is cancelled: the task that its worker sent cannot be read (%s)",
                    error,
                    extra=self.ids,
                )
                self._session.cancel()
                raise _SessionEndedError from None
            patience = min(self.task.patience, _MAX_PATIENCE_SECONDS)
            self._patience = patience if patience > 0 else MIN_PATIENCE_SECONDS
        elif now - self._received_at > self._patience:
            _log.warning(
                "a save or load is cancelled: its worker has sent nothing for %.0f s",
                now - self._received_at,
                extra=self.ids,
            )
            self._session.cancel()
            raise _SessionEndedError

    def wait_for(self, accepts: Callable[[Task], bool]) -> WriteTask | ReadTask:
        while self.task is None or not accepts(self.task):
            self.receive(1.0)
        return self.task

    def wait_for_end(self) -> None:
        while True:
            self.receive(1.0)


def _work(session: _core.CheckpointSession, mailbox: _TaskMailbox, roots: StorageRoots | None) -> None:
    with contextlib.suppress(_SessionEndedError):
        try:
            report = _execute(session, mailbox, roots)
        except _SessionEndedError:
            raise
        except Exception as error:
            if session.ended:
                return
            kind = error_kind(error)
            if not kind:
                _log.exception("a save or load failed", extra=mailbox.ids)
            report = Report("failed", kind=kind, text=str(error) if kind else f"{type(error).__name__}: {error}")
        mailbox.report(report)
        mailbox.wait_for_end()


def _execute(session: _core.CheckpointSession, mailbox: _TaskMailbox, roots: StorageRoots | None) -> Report:
    task = mailbox.wait_for(lambda task: True)
    directory = (open_dir if roots is None else roots.open)(task.directory, task.options)
    prepared = None
    if isinstance(task, ReadTask):
        prepared = load_task.prepare(task, directory, session)
    else:
        save_task.prepare(task, directory, session)
    mailbox.report(Report("ready"))
    task = mailbox.wait_for(lambda task: task.go)
    rows, reported = 0, time.monotonic()

    def progress(more: int) -> None:
        nonlocal rows, reported
        rows += more
        if time.monotonic() - reported > MAX_POLL_SECONDS:
            reported = time.monotonic()
            mailbox.report(Report("working", rows))
        mailbox.receive()

    if isinstance(task, ReadTask):
        return load_task.execute(task, directory, session, prepared or [], progress)
    return save_task.execute(task, directory, session, progress)
