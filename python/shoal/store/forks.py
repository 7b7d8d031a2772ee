"""Work in a fork of this process, whose result comes back: a copy of its memory that shares pages until they change.

Threads: that of the caller; another one waits for the child.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from shoal.errors import ShoalError
from shoal.table.future import BackgroundTask, Future

Result = TypeVar("Result")

_LOOK_SECONDS = 0.5  # after which a child looks for its parent


def forked(work: Callable[[], Result], adopt: Callable[[], None]) -> Future[Result]:
    """Fork, call ``adopt`` and then ``work`` in the child, and return the future of its result."""
    reading, writing = os.pipe()
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()  # else the child would write it again
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
            child = os.fork()
    except BaseException:
        os.close(reading)
        os.close(writing)
        raise
    if child == 0:
        _work(work, adopt, parent, reading, writing)
    os.close(writing)
    answer: list[bytes] = []

    def wait() -> None:
        with os.fdopen(reading, "rb") as pipe:
            answer.append(pipe.read())
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != 0:
            raise ShoalError(f"the fork, process {child}, has ended without a result: {_ended(status)}")

    def result() -> Result:
        is_good, made = pickle.loads(answer[0])
        if not is_good:
            raise made
        found: Result = made
        return found

    return Future(BackgroundTask(wait, f"fork {child}"), result)


def _work(work: Callable[[], Any], adopt: Callable[[], None], parent: int, reading: int, writing: int) -> None:
    """Run in the child, which ends here whatever happens."""
    status = 1
    try:
        os.close(reading)
        # The system's own signal of a parent's death comes when the thread ends that has forked.
        threading.Thread(target=_watch, args=(parent,), name="shoal fork", daemon=True).start()
        adopt()
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(_answer(work))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(status)


def _watch(parent: int) -> None:
    """End the child once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _answer(work: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps((True, work()))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        error.add_note(f"in a fork:\n{text}")
        try:
            answer = pickle.dumps((False, error))
            pickle.loads(answer)  # some exceptions can be written, and not read
        except Exception:
            return pickle.dumps((False, ShoalError(f"in a fork: {text}")))
        return answer


def _ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
