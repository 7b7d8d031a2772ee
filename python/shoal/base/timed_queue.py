"""TimedQueue: a queue of one consumer, whose ``get`` never waits longer than it was told to.

``queue.SimpleQueue.get(timeout=)`` of CPython computes the time that is left after each wake-up, and takes a negative
one, after a signal or a pre-emption at the wrong moment, as no limit: it then waits for the next item, however long
that takes. ``queue.Queue`` has no such defect, but an interrupt inside of its lock leaves that locked for ever.

    put    append, then open the gate                    an item that was appended is found even if the gate was
    get    take an item, else pass the gate, and again   passed for an earlier one: the gate only ends a sleep

Threads: any number may put, one may get. ``put`` takes no lock that a signal handler or a finalizer could find taken.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from typing import Generic, TypeVar

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
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with contextlib.suppress(IndexError):
                return self._items.popleft()
            if deadline is None:
                self._gate.acquire()
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                raise queue.Empty
            self._gate.acquire(timeout=min(left, threading.TIMEOUT_MAX))

    def empty(self) -> bool:
        """Whether no item is there."""
        return not self._items
