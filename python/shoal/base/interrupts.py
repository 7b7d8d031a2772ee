"""Ctrl-C, SIGTERM and SIGHUP: all end work in the same way, and a loop over batches at the end of a batch.

    terminable       a command: SIGTERM and SIGHUP raise `Terminated`, as Ctrl-C raises KeyboardInterrupt
    at_boundaries    a loop: the first signal is recorded and checked at the end of a batch; a second one raises
    held_back        a critical section: signals that arrive are raised at its end

SIGHUP, which a process receives when its terminal or its connection ends, acts like SIGTERM unless it is ignored
(``nohup``). Either of them within a second of another is the same request: ``timeout``, service managers and batch
systems send signals to a process and to its group, and some send both.

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

_ENDING: tuple[int, ...] = (signal.SIGTERM, signal.SIGHUP)
_SAME = 1.0  # seconds within which one of them repeats the previous one


class Terminated(KeyboardInterrupt, SystemExit):
    """SIGTERM or SIGHUP. Caught like Ctrl-C; if it is not caught, the process ends silently, with status 143 or 129."""

    code: int

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(128 + number)
        self.code = 128 + number


def status_of(interrupt: KeyboardInterrupt) -> int:
    """Return the exit status of a process that was interrupted: 130, 143 or 129."""
    return interrupt.code if isinstance(interrupt, Terminated) else 128 + signal.SIGINT


class _Terminate:
    """A handler of SIGTERM and SIGHUP that raises."""

    def __init__(self) -> None:
        self._at = -math.inf

    def is_new(self) -> bool:
        """Record a signal; return whether it is not a repetition of the previous one."""
        now = time.monotonic()
        if now - self._at < _SAME:
            return False
        self._at = now
        return True

    def is_unused(self) -> bool:
        """Whether no signal has come."""
        return self._at == -math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_new():
            raise Terminated(number)


class _Note:
    """A handler that records the first signal, and raises a second one."""

    def __init__(self, terminate: _Terminate) -> None:
        self._came: KeyboardInterrupt | None = None
        self._terminate = terminate
        self._is_told = False

    def look(self) -> KeyboardInterrupt | None:
        """Return the first signal, if any has come."""
        self._is_told = self._came is not None
        return self._came

    def raise_untold(self) -> None:
        """Raise the first signal if nobody has looked since it came."""
        if self._came is not None and not self._is_told:
            raise self._came

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number in _ENDING and not self._terminate.is_new():
            return
        interrupt = Terminated(number) if number in _ENDING else KeyboardInterrupt()
        if self._came is not None:
            raise interrupt
        self._came = interrupt


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `Terminated`, unless the program has its own handler or ignores them.

    After one has come they stay: it may be repeated while the process ends.
    """
    mine = [number for number in _ENDING if _is_main() and signal.getsignal(number) is signal.SIG_DFL]
    terminate = _Terminate()
    for number in mine:
        signal.signal(number, terminate)
    try:
        yield
    finally:
        for number in mine if terminate.is_unused() else ():
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def at_boundaries() -> Iterator[Callable[[], KeyboardInterrupt | None]]:
    """Defer the first Ctrl-C, SIGTERM or SIGHUP to the end of a batch; a second one raises at once.

    The loop calls the function to look for it. One that comes after it last looked is raised at the end of the block.

    Only if Ctrl-C would have raised KeyboardInterrupt, and the others would have raised `Terminated` or ended the
    process: the program's own handlers are kept. Within another block of this function the signal is the same for both.
    """
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, *_ENDING)] if _is_main() else []
    outer = next((handler for handler in handlers if isinstance(handler, _Note)), None)
    if outer is not None:
        yield outer.look
        return
    before: dict[int, Any] = {}
    terminate = _Terminate()
    if _is_main():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            before[signal.SIGINT] = signal.default_int_handler
        for number in _ENDING:
            found = signal.getsignal(number)
            if isinstance(found, _Terminate):
                terminate = found
            if found is signal.SIG_DFL or isinstance(found, _Terminate):
                before[number] = found

    note = _Note(terminate)
    try:
        for number in before:
            signal.signal(number, note)
        yield note.look
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    note.raise_untold()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Defer Ctrl-C, SIGTERM and SIGHUP to the end of the block, if Python handles them."""
    if not _is_main():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDING)}
    mine = {number: handler for number, handler in before.items() if callable(handler)}
    try:
        for number in mine:
            signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in mine.items():
            signal.signal(number, handler)
        for raised in came:
            signal.raise_signal(raised)
