"""Threads that cannot start, as at a process's limit."""

import threading
from collections.abc import Callable

import pytest


def refuse_threads(
    patched: pytest.MonkeyPatch, which: Callable[[threading.Thread], bool] = lambda thread: True
) -> None:
    """Let the start of some threads fail, until the patch is undone."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if which(thread):
            raise RuntimeError("can't start new thread")
        start(thread)

    patched.setattr(threading.Thread, "start", refuse)
