"""Futures: the results of calls that continue after they returned.

    request        a request to servers, or a background thread; None if the call is already complete
    make_result    computes the result, once, in the first `wait` that finds the request complete

Threads: any number may wait for one future.
"""

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

from shoal.errors import DeadlineExceededError

Result = TypeVar("Result")


def no_op() -> None:
    """Return nothing: the result of a push or a save."""


class Waitable(Protocol):
    """A request in progress."""

    @property
    def done(self) -> bool:
        """Whether it has completed or failed. Never blocks."""

    def wait(self, timeout: float | None = None) -> object:
        """Wait for completion; raise the request's error, or DeadlineExceededError after ``timeout`` seconds."""


class BackgroundTask:
    """A :class:`Waitable` that runs in a non-daemon thread: the interpreter waits for its end."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._ended = threading.Event()
        self._was_observed = False
        self._error: BaseException | None = None
        self._work = work
        self._name = name
        threading.Thread(target=self._run, name=f"shoal {name}").start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised by `wait`
            self._error = error
        finally:
            del self._work  # releases what it references
            self._ended.set()

    @property
    def done(self) -> bool:
        """Whether it has completed or failed. Never blocks."""
        return self._ended.is_set()

    @property
    def has_unobserved_error(self) -> bool:
        """Whether it failed and no caller has received the error."""
        return self.done and self._error is not None and not self._was_observed

    def wait(self, timeout: float | None = None) -> None:
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
            self.wait()


class Future(Generic[Result]):
    """A call in progress. In a local store it is complete when the call returns.

    Safe from any thread. An error of a future that is dropped without `wait` is raised by the store's next ``flush``,
    ``tick``, ``barrier``, ``save`` or ``close``.

    Examples
    --------
    >>> import numpy as np
    >>> import shoal
    >>> table = shoal.local().table("t", dim=2)
    >>> future = table.pull_async(np.array([7], np.uint64))
    >>> future.wait(timeout=1.0).tolist()
    [[0.0, 0.0]]
    """

    __slots__ = ("_lock", "_make_result", "_request", "_result")

    _result: Result

    def __init__(self, request: Waitable | None, make_result: Callable[[], Result]) -> None:
        self._request = request
        self._make_result: Callable[[], Result] | None = make_result
        self._lock = threading.Lock()
        if request is None:
            self._resolve()

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` returns or raises at once."""
        return self._request is None or self._request.done

    def wait(self, timeout: float | None = None) -> Result:
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
            The result was not complete within that time.
        NotConnectedError
            A server that owns one of its keys is no longer connected.
        """
        if self._request is not None:
            self._request.wait(timeout)
        return self._resolve()

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
    """Return the requests behind futures of pushes and pulls; calls that were complete when they returned have none."""
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
