"""Ahead: an iterator that works in a thread of its own, a bounded number of items ahead of its consumer.

Threads
    The producer is one daemon thread, which owns the wrapped iterator: it alone advances and closes it. It shares
    nothing with the consumer but the channel, and holds no reference to the Ahead, so that dropping the Ahead ends it.

How it ends
    - The wrapped iterator ends or raises: the consumer sees the items before that, then the end or the exception.
    - The consumer stops early: `close`, by name, by garbage collection or at the exit of the interpreter. The producer
      notices when it next yields.
    - The process forks: a child has no producer; asking for an item there raises.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

# A producer that sits in a read which does not return, say on a lost network disk, must not hold up its consumer.
_JOIN_SECONDS = 5.0


class _Channel(Generic[T]):
    """A bounded queue of one producer and one consumer that either side can end."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[T] = deque()
        self._closed = False
        self._ended = False
        self._error: BaseException | None = None
        # Re-entrant, since a garbage collection inside a locked region may close a channel.
        self._changed = threading.Condition(threading.RLock())

    def put(self, item: T | None) -> bool:
        """Hand on an item, waiting for room, or nothing but the question: False when the consumer is gone."""
        with self._changed:
            if item is not None:
                while len(self._items) >= self._depth:  # closing empties it
                    self._changed.wait()
                if not self._closed:
                    self._items.append(item)
                    self._changed.notify_all()
            return not self._closed

    def end(self, error: BaseException | None) -> None:
        """Tell the consumer that nothing follows."""
        with self._changed:
            self._ended = True
            self._error = error
            self._changed.notify_all()

    def get(self) -> T:
        """Wait for the next item; StopIteration or the producer's error when nothing follows."""
        with self._changed:
            while not self._items and not self._ended and not self._closed:
                self._changed.wait()
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is None:
            raise StopIteration
        try:
            raise error
        finally:
            del error  # its traceback names this frame: a cycle

    def close(self) -> None:
        """Drop what waits, and let neither side wait again."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def _produce(items: Generator[T | None, None, None], channel: _Channel[T]) -> None:
    try:
        with contextlib.closing(items):
            for item in items:
                if not channel.put(item):
                    break
    except BaseException as error:  # whatever it is, the consumer raises it
        channel.end(error)
    else:
        channel.end(None)


def _stop(channel: _Channel[T], thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: no thread to stop, and a lock that may be held for ever
    channel.close()
    if thread is not threading.current_thread():  # garbage is collected in any thread, the producer too
        thread.join(_JOIN_SECONDS)


class Ahead(Iterator[T]):
    """Iterate ``items`` in a background thread, at most ``depth`` items ahead.

    Parameters
    ----------
    items : generator
        Advanced and closed in the thread. It yields None when there is no item yet, so that it can be ended.
    depth : int
        Items that may wait.
    name : str
        The thread's.

    Notes
    -----
    ``next`` blocks until an item is there. One consumer at a time.
    """

    def __init__(self, items: Generator[T | None, None, None], depth: int, name: str) -> None:
        self._channel: _Channel[T] = _Channel(depth)
        self._pid = os.getpid()
        thread = threading.Thread(target=_produce, args=(items, self._channel), name=name, daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, _stop, self._channel, thread, self._pid)

    def __next__(self) -> T:
        """Return the next item; raises what the generator raised."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this pass over the data began in process {self._pid}, before the fork: begin a new pass in this one"
            )
        return self._channel.get()

    def close(self) -> None:
        """End the thread and wait for it; again does nothing."""
        self._stop()
