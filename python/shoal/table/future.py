"""Handles: what a call that goes on after it returned can be asked.

    begun    what was asked of the servers, or of a thread in the background; nothing where it is done already
    finish   what makes the answer of it, run once, by the first `wait` that finds it done

Threads: any number may wait for one handle.
"""

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from shoal.errors import DeadlineExceededError

__all__ = ["Background", "Future", "Pending"]

Result = TypeVar("Result")


class Pending(Protocol):
    """Something that was asked of servers and is under way."""

    @property
    def done(self) -> bool:
        """Whether it has come to its end, good or bad. Never blocks."""

    def wait(self, timeout: float | None = None) -> object:
        """Return when it is done; raise what went wrong, or DeadlineExceededError after ``timeout`` seconds."""


class Background:
    """Work that goes on in a thread of its own, whose end the interpreter waits for. :class:`Pending`."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._ended = threading.Event()
        self._heard = False
        self._error: BaseException | None = None
        self._work = work
        self._name = name
        threading.Thread(target=self._run, name=f"shoal {name}").start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # told to who waits
            self._error = error
        finally:
            del self._work  # and what it holds
            self._ended.set()

    @property
    def done(self) -> bool:
        """Whether it has come to its end, good or bad. Never blocks."""
        return self._ended.is_set()

    @property
    def settled(self) -> bool:
        """Whether it is done, and nobody needs to hear of it any more."""
        return self.done and (self._heard or self._error is None)

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is done; raise what went wrong, or DeadlineExceededError after ``timeout`` seconds."""
        if not self._ended.wait(timeout):
            raise DeadlineExceededError(f"the {self._name} was not done after {timeout:g} s: it goes on")
        self._heard = True
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Wait; raise what went wrong, if nobody has heard of it."""
        self._ended.wait()
        if not self.settled:
            self.wait()


class Future(Generic[Result]):
    """A call under way. In a local store it is done when the call returns.

    Safe from any thread. Whoever drops a handle unwaited hears of a failure from the store's next ``flush``,
    ``tick``, ``barrier``, ``save`` or ``close``.

    Examples
    --------
    >>> import numpy as np
    >>> import shoal
    >>> table = shoal.local().table("t", dim=2)
    >>> handle = table.pull_async(np.array([7], np.uint64))
    >>> handle.wait(timeout=1.0).tolist()
    [[0.0, 0.0]]
    """

    __slots__ = ("_begun", "_finish", "_lock", "_result")

    _result: Result

    def __init__(self, begun: Pending | None, finish: Callable[[], Result]) -> None:
        self._begun = begun
        self._finish: Callable[[], Result] | None = finish
        self._lock = threading.Lock()
        if begun is None:
            self._answer()

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` returns or raises at once."""
        return self._begun is None or self._begun.done

    def wait(self, timeout: float | None = None) -> Result:
        """Return once it is done: a push that is applied, or, under BSP, that every server it concerns has.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; the call itself goes on. Default: the store's deadline.

        Returns
        -------
        None of a push; float32[n, dim] of a pull

        Raises
        ------
        DeadlineExceededError
            It was not done in that time.
        NotConnectedError
            A server that it needs is gone.
        """
        if self._begun is not None:
            self._begun.wait(timeout)
        return self._answer()

    def _answer(self) -> Result:
        if self._finish is None:  # asked first without the lock, which a fork may have copied as it was held
            return self._result
        with self._lock:
            if self._finish is not None:
                self._result = self._finish()
                self._finish = None
            return self._result
