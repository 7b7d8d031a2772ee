"""Reloadable: what is served until something newer replaces it, on request or at intervals."""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Self

from shoal.base.scalars import period
from shoal.errors import ClosedError

_log = logging.getLogger(__name__)


class Reloadable(ABC):
    """Something that is served and replaced by `reload`. A context manager that closes itself.

    Attributes
    ----------
    reloads : int
        How often it was replaced.
    failures : int
        How often a replacement could not be used.
    changed : callable
        Called after each change of what is served.
    """

    changed: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.reloads = 0
        self.failures = 0
        self._turn = threading.Lock()  # held by a change, and by the release
        self._stopped = threading.Event()
        self._watcher: threading.Thread | None = None
        self._failure = ""  # that was logged last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        self.close()

    @abstractmethod
    def reload(self) -> bool:
        """Check for something newer; return whether there was."""

    @abstractmethod
    def _release(self) -> None:
        """Release what is served, once no request reads it."""

    def watch(self, seconds: float) -> None:
        """Reload every ``seconds``, in a thread that ends with `close`."""
        seconds = period(seconds)

        def look() -> None:
            while not self._stopped.wait(seconds):
                with contextlib.suppress(Exception):  # `reload` has logged it
                    self.reload()

        self._watcher = threading.Thread(target=look, name="shoal-serve-watch", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Stop watching, and release what is served once no request reads it."""
        self._stopped.set()
        if self._watcher is not None:
            self._watcher.join()
        with self._turn:
            self._release()

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Hold the lock of changes; raise ClosedError once `close` was called, so that nothing is opened after it."""
        with self._turn:
            if self._stopped.is_set():
                raise ClosedError("what is served was closed: open it again")
            yield

    def _has_reloaded(self, text: str, *values: object) -> None:
        """Count and log a replacement."""
        self.reloads += 1
        self._failure = ""
        _log.info(text, *values)

    def _has_failed(self, kept: str, error: Exception) -> None:
        """Count a replacement that cannot be used, and log why what is ``kept`` stays: once for each reason."""
        self.failures += 1
        failure = " ".join(str(error).split()) or type(error).__name__
        if failure != self._failure:
            self._failure = failure
            _log.warning("%s kept: %s", kept, failure)
