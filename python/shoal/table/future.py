"""Futures: the results of calls that continue after they returned.

    request        a request to servers, or a background thread; None if the call is already complete
    make_result    computes the result, once, when it is first asked for after the request is complete

Threads: any number may wait for one future.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar, cast

from shoal.errors import DeadlineExceededError

_log = logging.getLogger("shoal")

Result = TypeVar("Result")


def no_op() -> None:
    """Return nothing: the result of a push or a save."""


class Waitable(Protocol):
    """A request in progress, with these methods of a :class:`Future`."""

    def done(self) -> bool:
        """Whether it has completed or failed. Never blocks."""

    def result(self, timeout: float | None = None) -> object:
        """Wait for completion; raise the request's error, or DeadlineExceededError after ``timeout`` seconds."""

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call ``fn`` with the request, or with a part of it, once all of it has completed or failed."""


class BackgroundTask:
    """A :class:`Waitable` that runs in a non-daemon thread: the interpreter waits for its end."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._ended = threading.Event()
        self._lock = threading.Lock()  # of a callback that is added while the work ends
        self._callbacks: list[Callable[[Any], object]] = []
        self._was_observed = False
        self._error: BaseException | None = None
        self._work = work
        self._name = name
        threading.Thread(target=self._run, name=f"shoal {name}").start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised by `result`
            self._error = error
        finally:
            del self._work  # releases what it references
            with self._lock:
                self._ended.set()
        for fn in self._callbacks:
            fn(self)

    def done(self) -> bool:
        """Whether it has completed or failed. Never blocks."""
        return self._ended.is_set()

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call ``fn`` when it has ended, in its thread."""
        with self._lock:
            if not self.done():
                self._callbacks.append(fn)
                return
        fn(self)

    @property
    def has_unobserved_error(self) -> bool:
        """Whether it failed and no caller has received the error."""
        return self.done() and self._error is not None and not self._was_observed

    def result(self, timeout: float | None = None) -> None:
        """Wait for completion; raise its error, or DeadlineExceededError after ``timeout`` seconds."""
        if not self._ended.wait(timeout):
            raise DeadlineExceededError(f"the {self._name} was not done after {timeout:g} s and continues")
        self._was_observed = True
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait for completion; raise the error if no caller has received it."""
        self._ended.wait()
        if self.has_unobserved_error:
            self.result()


class Future(Generic[Result]):
    """A call in progress, with the methods of :class:`concurrent.futures.Future` except those that cancel.

    In a local store it is complete when the call returns. Safe from any thread.

    The error of a push, an ``apply`` or a save whose future was dropped without `result` or `exception` is not lost: it
    is raised by the store's next ``flush``, ``tick``, ``barrier``, ``save`` or ``close``. The error of a pull that
    nobody asks for is only logged.

    Examples
    --------
    >>> import numpy as np
    >>> import shoal
    >>> table = shoal.local().table("t", dim=2)
    >>> future = table.pull_async(np.array([7], np.uint64))
    >>> future.result(timeout=1.0).tolist()
    [[0.0, 0.0]]
    """

    __slots__ = ("_lock", "_make_result", "_request", "_result")

    _result: Result

    def __init__(self, request: Waitable | None, make_result: Callable[[], Result]) -> None:
        self._request = request
        self._lock = threading.Lock()
        self._make_result: Callable[[], Result] | None = make_result
        if request is None:
            self._result = make_result()
            self._make_result = None

    def done(self) -> bool:
        """Return whether :meth:`result` returns or raises at once. Never blocks."""
        return self._request is None or self._request.done()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result.

        A push is complete when it is applied, or, under BSP, received by every server that owns one of its keys.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; the call itself continues. Default: the store's deadline.

        Returns
        -------
        None for a push; float32[n, dim] for a pull

        Raises
        ------
        DeadlineExceededError
            The result was not complete within that time. It is a :class:`TimeoutError` too.
        NotConnectedError
            A server that owns one of its keys is no longer connected.
        """
        if self._request is not None:
            self._request.result(timeout)
        return self._resolve()

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait for the call, and return the error that :meth:`result` raises; None if it succeeds.

        Parameters
        ----------
        timeout : float, optional
            As for :meth:`result`.

        Returns
        -------
        Exception or None

        Raises
        ------
        DeadlineExceededError
            The call was not complete within that time.
        """
        try:
            self.result(timeout)
        except Exception:
            if not self.done():
                raise
        try:
            self.result()  # complete: it says the same from now on
        except Exception as error:
            return error
        return None

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Call a function once the call has completed or failed, or at once if it has already.

        Parameters
        ----------
        fn : callable
            Called with this future, in a background thread of the store, which it may use. What it raises is logged
            and ignored.
        """
        if self._request is None:
            self._call(fn)
        else:
            self._request.add_done_callback(lambda _: self._call(fn))

    def _call(self, fn: Callable[[Self], object]) -> None:
        try:
            fn(self)
        except Exception:
            _log.exception("a callback of a future has failed")

    def _resolve(self) -> Result:
        if self._make_result is None:  # read first without the lock, which a fork may have copied while it was held
            return self._result
        with self._lock:
            if self._make_result is not None:
                self._result = self._make_result()
                self._make_result = None
            return self._result


# What a call comes after: futures of pushes and pulls.
After: TypeAlias = Future[Any] | list[Future[Any]] | tuple[Future[Any], ...]


def requests_of(after: After) -> list[Waitable]:
    """Return the requests behind futures of pushes and pulls; calls that were complete when they returned have none.

    Raises TypeError if one is something else, such as the future of a save.
    """
    requests = []
    futures = after if isinstance(after, list | tuple) else [after]
    for future in futures:
        request: object = future
        while isinstance(request, Future):
            request = request._request
        if not isinstance(future, Future) or isinstance(request, BackgroundTask):
            what = "that of a save or a load" if isinstance(future, Future) else repr(future)
            raise TypeError(f"after takes futures of push, pull_async and push_pull, got {what}: wait for it instead")
        if request is not None:
            requests.append(cast("Waitable", request))
    return requests
