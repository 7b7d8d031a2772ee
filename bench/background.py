"""Shared by the benchmarks: a thread that makes steps, and computing processes."""

import contextlib
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Self

__all__ = ["Steps", "computing"]


class Steps(ABC):
    """A thread that makes one step after the other. A context manager: the thread ends with the block.

    Attributes
    ----------
    failure : str
        Why the thread has ended before it was asked to; empty while it has not.
    """

    def __init__(self) -> None:
        self.failure = ""
        self._stop = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop:
                self.step()
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            self.failed()
            raise

    @abstractmethod
    def step(self) -> None:
        """Make a step."""

    def failed(self) -> None:  # noqa: B027 - an optional hook
        """Do something when a step has failed."""


@contextlib.contextmanager
def computing(processes: int) -> Iterator[None]:
    """Run processes that compute all the time."""
    with contextlib.ExitStack() as undo:
        for _ in range(processes):
            process = undo.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            undo.callback(process.kill)
        yield
