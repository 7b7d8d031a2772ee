"""Work in forked children, with a deadline: a child that needs a lock held at the fork would wait forever."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
import warnings

import pytest

DEADLINE = 120.0


@contextlib.contextmanager
def expecting_forks():
    """Ignore the warning of Python 3.12 about forks in a process with threads, which these tests need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        yield


def in_child(work):
    """Run ``work`` in a forked child; return what it printed, or fail when it did not end in time."""
    reading, writing = os.pipe()
    with expecting_forks():
        child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            answer = str(work())
            status = 0
        except BaseException:
            answer = traceback.format_exc()
        os.write(writing, answer[:4000].encode())
        os._exit(status)
    os.close(writing)
    deadline = time.monotonic() + DEADLINE
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hung")
        time.sleep(0.002)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    assert status == 0, answer
    return answer
