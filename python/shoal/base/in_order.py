"""In order: several threads work on the items of an iterator, and the results are joined in the order of the items.

    take   one thread at a time, from the iterator
    work   each thread on its item
    join   one thread at a time: whichever has the item that is next joins it, and those behind it that are ready

No thread waits for another one's item while there is room for more.

Invariants
    I1  Items are numbered as they are taken, and joined by these numbers, each once.
    I2  At most an item for each thread and `_ITEMS_AHEAD` others are taken and not joined; few results wait.
    I3  Nothing is joined behind the end of the items, or behind the first error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
W = TypeVar("W")
R = TypeVar("R")

_ITEMS_AHEAD = 2
_RESULTS_AHEAD = 2
_LOOK_SECONDS = 0.05  # after which who waits for a result looks whether it is still wanted


class _Steps(Generic[T, W, R]):
    """What the threads share."""

    def __init__(
        self, items: Generator[T, None, None], work: Callable[[T], W], join: Callable[[W], R | None], threads: int
    ) -> None:
        self._items = items
        self._work = work
        self._join = join
        self._most = threads + _ITEMS_AHEAD
        self._taking = threading.Lock()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._made = threading.Condition(self._lock)
        self._taken = 0
        self._joined = 0
        self._joining = False
        self._worked: dict[int, tuple[Any, BaseException | None]] = {}  # by the items' numbers
        self._results: deque[R] = deque()
        self._ended = False
        self._error: BaseException | None = None

    def step(self) -> bool:
        """Take an item, work on it, and join what is next; False if there is none."""
        with self._taking:
            with self._lock:
                while not self._ended and (
                    len(self._results) >= _RESULTS_AHEAD or self._taken - self._joined >= self._most
                ):
                    self._room.wait()
                if self._ended:
                    return False
            number = self._taken
            self._taken += 1
            item, error = _attempt(next, self._items)
        worked = _attempt(self._work, item) if error is None else (None, error)
        with self._lock:
            self._worked[number] = worked
            if self._joining:
                return error is None
            self._joining = True
        made = None
        while True:
            with self._lock:
                if made is not None:
                    self._results.append(made)
                    self._made.notify()
                if self._ended or self._joined not in self._worked:
                    self._joining = False
                    return error is None
                joined, failed = self._worked.pop(self._joined)
                self._joined += 1
                self._room.notify()
            made, failed = (None, failed) if failed is not None else _attempt(self._join, joined)
            if failed is not None:
                self.end(failed)

    def work(self) -> None:
        """Take steps until there is nothing more to do."""
        while self.step():
            pass

    def end(self, error: BaseException | None = None) -> None:
        """Join nothing more: because of an error, the end of the items, or since nobody wants the results."""
        with self._lock:
            self._ended = True
            self._error = error
            self._room.notify_all()
            self._made.notify_all()

    def result(self, seconds: float) -> tuple[R | None, bool]:
        """Wait for a result; returns whether there may be more of them. Raises the error behind the last one."""
        with self._lock:
            if seconds and not self._results and not self._ended:
                self._made.wait(seconds)
            if self._results:
                self._room.notify()
                return self._results.popleft(), True
            if not self._ended:
                return None, True
            error, self._error = self._error, None
        if error is None or isinstance(error, StopIteration):
            return None, False
        try:
            raise error
        finally:
            del error  # its traceback names this frame: a cycle


def _attempt(function: Callable[..., W], *arguments: object) -> tuple[W | None, BaseException | None]:
    try:
        return function(*arguments), None
    except StopIteration as end:
        return None, end.with_traceback(None)  # whose frames would keep the items, in a cycle
    except BaseException as error:  # of any kind: the consumer raises it
        return None, error


def in_order(
    items: Generator[T, None, None], work: Callable[[T], W], join: Callable[[W], R | None], threads: int, name: str
) -> Generator[R | None, None, None]:
    """Yield what ``join`` returns for each item, in their order, but None: which is yielded at any time.

    ``threads`` threads are started for it; with one, the caller's does it all.
    """
    steps = _Steps(items, work, join, threads)
    helpers: list[threading.Thread] = []
    try:
        for _ in range(threads if threads > 1 else 0):
            helper = threading.Thread(target=steps.work, name=name, daemon=True)
            helper.start()
            helpers.append(helper)
        more = True
        while more:
            if not helpers:
                steps.step()
            result, more = steps.result(_LOOK_SECONDS if helpers else 0)
            yield result
    finally:
        steps.end()
        for helper in helpers:
            helper.join()
        items.close()
