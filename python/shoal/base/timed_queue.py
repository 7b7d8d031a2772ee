"""TimedQueue: a queue of one consumer, whose ``get`` never waits longer than it was told to.

``queue.SimpleQueue.get(timeout=)`` of CPython computes the time that is left after each wake-up, and takes a negative
one, after a signal or a pre-emption at the wrong moment, as no limit: it then waits for the next item, however long
that takes. ``queue.Queue`` has no such defect, but an interrupt inside of its lock leaves that locked for ever.

    put    append, then open the gate                    an item that was appended is found even if the gate was
    get    take an item, else pass the gate, and again   passed for an earlier one: the gate only ends a sleep

A signal that comes just before the main thread sleeps does not wake it, and its handler would run whenever something
else does: so the main thread looks up every ``LOOK_SECONDS``.

Threads: any number may put, one may get. ``put`` takes no lock that a signal handler or a finalizer could find taken.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from typing import Generic, TypeVar

LOOK_SECONDS = 0.2  # of sleep of the main thread, at most

T = TypeVar("T")


class TimedQueue(Generic[T]):
    """An unbounded queue: see the module."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._gate = threading.Lock()
        self._gate.acquire()

    def put(self, item: T) -> None:
        """Append an item."""
        self._items.append(item)
        with contextlib.suppress(RuntimeError):  # it is open
            self._gate.release()

    def get(self, timeout: float | None = None) -> T:
        """Return the next item, and wait for it at most ``timeout`` seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        is_main = threading.current_thread() is threading.main_thread()
        longest = LOOK_SECONDS if is_main else threading.TIMEOUT_MAX
        while True:
            with contextlib.suppress(IndexError):
                return self._items.popleft()
            left = deadline - time.monotonic()
            if left <= 0:
                raise queue.Empty
            self._gate.acquire(timeout=min(left, longest))

    def empty(self) -> bool:
        """Whether no item is there."""
        return not self._items
