"""Ctrl-C and SIGTERM: both end work in the same way, and a loop over batches at the end of a batch.

    terminable       a command: SIGTERM raises `Terminated`, as Ctrl-C raises KeyboardInterrupt
    at_boundaries    a loop: the first signal is recorded and checked at the end of a batch; a second one raises
    held_back        a critical section: signals that arrive are raised at its end

A SIGTERM within a second of another is the same request: ``timeout``, service managers and batch systems send it to a
process and to its group.

Threads: Python delivers signals to the main thread; in any other thread these functions do nothing.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["Terminated", "at_boundaries", "held_back", "status_of", "terminable"]

_SAME = 1.0  # seconds within which a SIGTERM repeats the previous one


class Terminated(KeyboardInterrupt, SystemExit):
    """SIGTERM. Caught like Ctrl-C; if it is not caught, the process ends without a message, with status 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.code = 128 + signal.SIGTERM


def status_of(interrupt: KeyboardInterrupt) -> int:
    """Return the exit status of a process that was interrupted: 130 or 143."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


class _Terminate:
    """A handler of SIGTERM that raises."""

    def __init__(self) -> None:
        self._at = -math.inf

    def is_new(self) -> bool:
        """Record a signal; return whether it is not a repetition of the previous one."""
        now = time.monotonic()
        if now - self._at < _SAME:
            return False
        self._at = now
        return True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_new():
            raise Terminated


class _Note:
    """A handler that records the first signal, and raises a second one."""

    def __init__(self, terminate: _Terminate) -> None:
        self.came: KeyboardInterrupt | None = None
        self._terminate = terminate

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and not self._terminate.is_new():
            return
        interrupt = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        if self.came is not None:
            raise interrupt
        self.came = interrupt


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM raise `Terminated`, unless the program has its own handler."""
    if not _is_main() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _Terminate())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def at_boundaries() -> Iterator[Callable[[], KeyboardInterrupt | None]]:
    """Defer the first Ctrl-C or SIGTERM to the end of a batch; a second one raises at once.

    Only if Ctrl-C would have raised KeyboardInterrupt, and SIGTERM would have raised `Terminated` or ended the
    process: the program's own handlers are kept. Within another block of this function the signal is the same for both.
    """
    outer = signal.getsignal(signal.SIGTERM) if _is_main() else None
    if isinstance(outer, _Note):
        yield lambda: outer.came
        return
    before: dict[int, Any] = {}
    terminate = _Terminate()
    if _is_main():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            before[signal.SIGINT] = signal.default_int_handler
        found = signal.getsignal(signal.SIGTERM)
        if isinstance(found, _Terminate):
            terminate = found
        if found is signal.SIG_DFL or isinstance(found, _Terminate):
            before[signal.SIGTERM] = found

    note = _Note(terminate)
    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: note.came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM to the end of the block, if Python handles them."""
    if not _is_main():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    mine = {number: handler for number, handler in before.items() if callable(handler)}
    for number in mine:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in mine.items():
            signal.signal(number, handler)
    for raised in came:
        signal.raise_signal(raised)
