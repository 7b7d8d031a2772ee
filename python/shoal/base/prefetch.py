"""Read-ahead: an iterator, or a function of its items, runs in a background thread ahead of the consumer.

    prefetch()       the iterator runs in a thread, a bounded number of items ahead (a bounded buffer)
    prefetch_map()   the iterator runs in the caller's thread, a function of its items in a helper thread, one ahead

Threads of `prefetch`
    The producer is one daemon thread, which owns the wrapped iterator: it alone advances and closes it. It shares
    only the channel with the consumer and holds no reference to `Prefetched`, so that dropping that ends the thread.

The end of `prefetch`
    - The wrapped iterator ends or raises: the consumer receives the items before that, then the end or the exception.
    - The consumer stops early: by `close`, by garbage collection or at the exit of the interpreter. The producer
      notices when it next yields.
    - The process forks: a child has no producer; asking for an item there raises.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# A producer may block in a read that never returns, e.g. from a lost network disk; its consumer must not wait for it.
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
        """Append an item, waiting for space; None only checks. Return False when the consumer is gone."""
        with self._changed:
            if item is not None:
                while len(self._items) >= self._depth:  # closing empties it
                    self._changed.wait()
                if not self._closed:
                    self._items.append(item)
                    self._changed.notify_all()
            return not self._closed

    def end(self, error: BaseException | None) -> None:
        """Mark the end: no item follows."""
        with self._changed:
            self._ended = True
            self._error = error
            self._changed.notify_all()

    def get(self, seconds: float | None) -> T | None:
        """Wait for the next item, or None; raise StopIteration or the producer's error when no item follows."""
        with self._changed:
            while not self._items and not self._ended and not self._closed:
                if not self._changed.wait(seconds):
                    return None
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
        """Drop the waiting items; neither side waits again."""
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
    except BaseException as error:  # of any kind: the consumer raises it
        channel.end(error)
    else:
        channel.end(None)


def _stop(channel: _Channel[T], thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: no thread to stop, and the lock may never be released
    channel.close()
    if thread is not threading.current_thread():  # garbage collection may run in any thread, including the producer
        thread.join(_JOIN_SECONDS)


class Prefetched(Iterator[T]):
    """The iterator that `prefetch` returns."""

    def __init__(self, items: Generator[T | None, None, None], depth: int, name: str) -> None:
        self._channel: _Channel[T] = _Channel(depth)
        self._pid = os.getpid()
        thread = threading.Thread(target=_produce, args=(items, self._channel), name=name, daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, _stop, self._channel, thread, self._pid)

    def __next__(self) -> T:
        """Return the next item; raise the generator's exception."""
        item = self.get(None)
        assert item is not None, "it waits until there is one"
        return item

    def get(self, seconds: float | None) -> T | None:
        """Return the next item, or None if there is none within some seconds; raise the generator's exception."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this pass over the data began in process {self._pid}, before the fork: begin a new pass in this one"
            )
        return self._channel.get(seconds)

    def close(self) -> None:
        """End the thread and wait for it; calling it again does nothing."""
        self._stop()


def prefetch(items: Generator[T | None, None, None], depth: int, name: str) -> Prefetched[T]:
    """Iterate over ``items`` in a background thread, at most ``depth`` items ahead of the consumer.

    ``next`` blocks until an item is available. One consumer at a time.
    """
    return Prefetched(items, depth, name)


def prefetch_map(
    items: Iterable[T], compute: Callable[[T], R], background: Callable[[T], Callable[[T], R] | None], name: str
) -> Generator[tuple[T, R], None, None]:
    """Yield each item with its result, which a helper thread computes while the consumer works on the item before."""
    helper: ThreadPoolExecutor | None = None
    waiting: tuple[T, Future[R]] | None = None
    iterator = iter(items)
    error: Exception | None = None
    ended = False
    try:
        while not ended:
            submitted = None
            try:
                item = next(iterator)
            except StopIteration:
                ended = True
            except Exception as raised:
                ended, error = True, raised
            else:
                task = background(item)
                if task is not None:
                    helper = helper or ThreadPoolExecutor(1, thread_name_prefix=name)
                    submitted = item, helper.submit(task, item)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = submitted
            if not ended and submitted is None:
                yield item, compute(item)
        if error is not None:
            raise error
    finally:
        if helper is not None:
            helper.shutdown(wait=True, cancel_futures=True)
