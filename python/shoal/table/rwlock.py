"""A readers-writer lock for the tables of a store: updates and saves share it, a load takes it exclusively.

    shared(work)    run work(); any number of threads at once
    exclusive()     wait for shared work to end and exclude new work for the length of a `with` block

A push therefore either completes before a load replaces the rows, or is applied to the loaded rows; all tables of the
store are replaced at the same moment. Pulls do not take the lock.

Writers have preference: a thread that waits in `exclusive` precedes shared work that arrives later. `exclusive` is not
re-entrant and must not be called from shared work.

Threads: any number.
Fork: the child's copy raises WrongProcessError before it touches the mutex, which a thread of the parent may have held.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from shoal.errors import WrongProcessError

Result = TypeVar("Result")


class RwLock:
    """A readers-writer lock with writer preference that belongs to one process."""

    __slots__ = ("_changed", "_exclusive", "_mutex", "_pid", "_shared")

    def __init__(self) -> None:
        self.adopt()

    def adopt(self) -> None:
        """Begin as a lock of this process that nobody holds: also in a fork by the thread that held it alone."""
        self._pid = os.getpid()
        self._mutex = threading.Lock()  # guards _shared and _exclusive
        self._changed = threading.Condition(self._mutex)
        self._shared = 0
        self._exclusive = False

    @property
    def is_ours(self) -> bool:
        """Whether this process made the lock: False in a child after a fork."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise in a child after a fork."""
        if os.getpid() != self._pid:
            raise WrongProcessError(
                "this store was made before a fork and belongs to the parent process: make a new store in the "
                "child, or start children with the 'spawn' method"
            )

    def shared(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` under the shared lock."""
        self.check_process()
        acquired = False
        try:
            with self._mutex:
                while self._exclusive:
                    self._changed.wait()
                self._shared += 1
                acquired = True
            return work()
        finally:
            if acquired:
                with self._mutex:
                    self._shared -= 1
                    if self._exclusive and self._shared == 0:
                        self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the exclusive lock for the length of a ``with`` block."""
        self.check_process()
        acquired = False
        try:
            with self._mutex:
                while self._exclusive:
                    self._changed.wait()
                self._exclusive = acquired = True
                while self._shared:
                    self._changed.wait()
            yield
        finally:
            if acquired:
                with self._mutex:
                    self._exclusive = False
                    self._changed.notify_all()
