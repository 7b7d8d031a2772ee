"""The gate of a store: changes of its tables and saves pass through it, and a load shuts it to put other rows in place.

    change(work)    runs work(); any number of them at once
    shut()          waits for those under way, keeps new ones waiting, and lets them in at its end

So a push is done before a load puts its rows in place, or it is made to the rows that were loaded; in every table of
the store from the same moment on. Pulls do not wait.

Threads: any number. A thread that waits in `shut` goes before changes that come after it. `shut` is not called from a
change, nor twice by one thread.
Fork: a child's copy raises WrongProcessError before it touches the lock, which a thread of the parent may have held.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from shoal.errors import WrongProcessError

__all__ = ["Gate"]

Result = TypeVar("Result")


class Gate:
    """Lets changes in side by side, or keeps all of them out. A save counts as a change."""

    __slots__ = ("_inside", "_lock", "_moved", "_pid", "_shut")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the two below
        self._moved = threading.Condition(self._lock)
        self._inside = 0
        self._shut = False

    @property
    def is_ours(self) -> bool:
        """Whether this process made the gate: False in a child after a fork."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise in a child after a fork.

        Raises
        ------
        WrongProcessError
            The gate, and the store that it belongs to, are the parent's.
        """
        if not self.is_ours:
            raise WrongProcessError(
                "this store was made before a fork and belongs to the parent process: make a store of its own in the "
                "child, or start children with the 'spawn' method"
            )

    def change(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` while the gate is open; wait until it is."""
        self.check_process()
        inside = False
        try:
            with self._lock:
                while self._shut:
                    self._moved.wait()
                self._inside += 1
                inside = True
            return work()
        finally:
            if inside:
                with self._lock:
                    self._inside -= 1
                    if self._shut and self._inside == 0:
                        self._moved.notify_all()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Keep changes out for the length of a ``with`` block, which begins when none is under way."""
        self.check_process()
        mine = False
        try:
            with self._lock:
                while self._shut:
                    self._moved.wait()
                self._shut = mine = True
                while self._inside:
                    self._moved.wait()
            yield
        finally:
            if mine:
                with self._lock:
                    self._shut = False
                    self._moved.notify_all()
