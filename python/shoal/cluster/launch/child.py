"""A child process of a launcher: started in its own process group, its output read by a thread.

Each child leads a process group, so that all that it starts ends with it, and Ctrl-C in a terminal reaches the launcher
alone. A child that is a scheduler or a server has a socket as standard input: it receives two lines of JSON there, what
it is, at once, and its configuration, once that is known; and sends its reports (protocol/reports.py).

Threads: a :class:`ChildProcess` is used by one; it has two or three of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TypeAlias

import msgspec

from shoal.base.decoders import json_decoder
from shoal.base.timed_queue import LOOK_SECONDS
from shoal.cluster.protocol.reports import Joined, Report
from shoal.errors import ShoalError

_LAST_LINES = 40
_REPORT = json_decoder(Report)


class Process(ABC):
    """A scheduler, a server or a worker: a child process, or an actor of Ray.

    ``joined`` is what a scheduler or server has reported, ``last`` the last lines of the output.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.joined: Joined | None = None
        self.last: deque[str] = deque(maxlen=_LAST_LINES)

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that killed it."""

    @property
    def status(self) -> int:
        """The exit status, once it has ended, as a shell has it: 128 + the signal for one that was killed."""
        code = self.returncode
        assert code is not None
        return code if code >= 0 else 128 - code

    @abstractmethod
    def describe(self) -> str:
        """Return its name, and where it runs."""

    def has(self, pid: int) -> bool:
        """Whether it, or what it has started, has this number on this machine."""
        return False

    def how_ended(self) -> str:
        """Return how it has ended."""
        code = self.returncode
        assert code is not None
        return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"

    def describe_end(self) -> str:
        """Return how it has ended, and its last lines."""
        return f"{self.how_ended()}; its last output: {self.last_output()}"

    def last_output(self) -> str:
        """Return the last lines of its output."""
        return "\n".join(["", *list(self.last)]) if self.last else "none"

    @abstractmethod
    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; SIGKILL also to all processes that it has started."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Wait so many seconds for the end; return whether it has ended."""

    @abstractmethod
    def end(self, deadline: float) -> None:
        """Wait until ``deadline`` for the end, then kill it and the processes that it has started."""


# Called in a thread with each report of a process, and with None when it has ended.
Notify: TypeAlias = Callable[[Process, Report | None], None]


class ChildProcess(Process):
    """A child process of this one.

    ``emit`` is called in a thread with every line of output, ``emit_error`` in another one with those of standard
    error, which without it is part of the output. A scheduler or server is sent ``start``, and later its configuration.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        notify: Notify,
        emit: Callable[[str], None] | None = None,
        emit_error: Callable[[str], None] | None = None,
        start: msgspec.Struct | None = None,
    ) -> None:
        super().__init__(name)
        self._notify = notify
        self._over = threading.Event()  # it has ended
        own, its = (None, None) if start is None else socket.socketpair()
        with its or contextlib.nullcontext():
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if its is None else its.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if emit_error is None else subprocess.PIPE,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                process_group=0,
            )
        pipes = [(self.process.stdout, emit), (self.process.stderr, emit_error)]
        self._readers = {
            pipe: threading.Thread(target=self._read, args=(pipe, call), name=f"shoal-{name}", daemon=True)
            for pipe, call in pipes
            if pipe is not None
        }
        self._control = own
        self._control_lock = threading.Lock()  # nothing is sent while it is closed
        self._follower = threading.Thread(target=self._follow, name=f"shoal-{name}-end", daemon=True)
        try:
            if start is not None:
                self.tell(start)
            for thread in self._readers.values():
                thread.start()
            self._follower.start()
        except RuntimeError:  # no thread can be started: nobody would read its output, or notice its end
            self.signal(signal.SIGKILL)
            self.process.wait()
            for pipe, thread in self._readers.items():
                if thread.ident is None:
                    pipe.close()
            if own is not None:
                own.close()
            raise

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message to a scheduler or a server."""
        assert self._control is not None
        with self._control_lock, contextlib.suppress(OSError):  # it has ended before it has read
            self._control.sendall(msgspec.json.encode(message) + b"\n")

    def _read(self, pipe: IO[bytes], emit: Callable[[str], None] | None) -> None:
        # A progress bar redraws itself: each state is a line here, and the return that begins it is not a line.
        with io.TextIOWrapper(pipe, errors="replace", newline="") as lines:
            for line in lines:
                if line == "\r":
                    continue
                self.last.append(line.rstrip("\r\n"))
                if emit is not None:
                    emit(line.rstrip("\r\n"))

    def _follow(self) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError), self._control.makefile("rb") as lines:
                for line in lines:
                    self._notify(self, _REPORT.decode(line))
            with self._control_lock:
                self._control.close()
        self.process.wait()
        self._over.set()
        self._notify(self, None)

    @property
    def returncode(self) -> int | None:
        """See `Process`."""
        return self.process.returncode

    def describe(self) -> str:
        """See `Process`."""
        return f"{self.name} (process {self.process.pid})"

    def has(self, pid: int) -> bool:
        """See `Process`."""
        try:
            return os.getpgid(pid) == self.process.pid
        except ProcessLookupError:
            return False

    def describe_end(self) -> str:
        """See `Process`."""
        # Read the output to its end, unless a process that it has started keeps the pipe open.
        self._join_readers()
        return super().describe_end()

    def signal(self, number: signal.Signals) -> None:
        """See `Process`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """See `Process`."""
        deadline = time.monotonic() + seconds
        while not self._over.wait(max(0.0, min(LOOK_SECONDS, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
        return True

    def end(self, deadline: float) -> None:
        """See `Process`."""
        self.wait(deadline - time.monotonic())
        self.signal(signal.SIGKILL)
        self.process.wait()
        self._follower.join(1.0)
        self._join_readers()

    def _join_readers(self) -> None:
        for thread in self._readers.values():
            thread.join(1.0)


def end_all(processes: Sequence[Process], patience: float) -> None:
    """Terminate processes, and kill them after ``patience`` seconds, or at once after an interrupt."""
    try:
        for process in processes:
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + patience
        for process in processes:
            process.end(deadline)
    except BaseException:
        for process in processes:
            process.end(0.0)
        raise


class ProcessFailedError(ShoalError):
    """A process of a cluster ended before the cluster was complete."""

    def __init__(self, process: Process) -> None:
        super().__init__(f"{process.name} {process.describe_end()}")
        self.status = process.status
