"""A child process of a launcher: started in its own process group, its output read by a thread.

Each child leads a process group, so that all that it starts ends with it, and Ctrl-C in a terminal reaches the launcher
alone.

Threads: a :class:`ChildProcess` is used by one; it has two of its own.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from shoal.base.timed_queue import TimedQueue
from shoal.errors import ShoalError

_LAST_LINES = 40


class ChildProcess:
    """A child process and the last lines of its output."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        ended: TimedQueue[ChildProcess],
        emit: Callable[[str], None] | None = None,
        changed: threading.Condition | None = None,
        emit_error: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        self.ended_at = math.inf  # by time.monotonic()
        self._ended = ended
        self._changed = threading.Condition() if changed is None else changed
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
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
        self._waiter = threading.Thread(target=self._wait, name=f"shoal-{name}-end", daemon=True)
        try:
            for thread in self._readers.values():
                thread.start()
            self._waiter.start()
        except RuntimeError:  # no thread can be started: nobody would read its output, or notice its end
            self.signal(signal.SIGKILL)
            self.process.wait()
            for pipe, thread in self._readers.items():
                if thread.ident is None:
                    pipe.close()
            raise

    def _read(self, pipe: IO[bytes], emit: Callable[[str], None] | None) -> None:
        # A progress bar redraws itself: each state is a line here, and the return that begins it is not a line.
        with io.TextIOWrapper(pipe, errors="replace", newline="") as lines:
            for line in lines:
                if line == "\r":
                    continue
                with self._changed:
                    self.last.append(line.rstrip("\r\n"))
                    self._changed.notify_all()
                if emit is not None:
                    emit(line.rstrip("\r\n"))

    def _wait(self) -> None:
        self.process.wait()
        with self._changed:
            self.ended_at = time.monotonic()
            self._changed.notify_all()
        self._ended.put(self)

    def find(self, pattern: str) -> str | None:
        """Return the first group of the first match in the last lines; the caller holds the condition."""
        found = next((found for line in self.last if (found := re.search(pattern, line)) is not None), None)
        return None if found is None else str(found[1])

    def describe_end(self) -> str:
        """Return the exit status or signal, and the last lines."""
        # Read the output to its end, unless a process that it has started keeps the pipe open.
        self._join_readers()
        status = self.process.returncode
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{how}; its last output: {self.last_output()}"

    def last_output(self) -> str:
        """Return the last lines."""
        with self._changed:
            return "\n".join(["", *self.last]) if self.last else "none"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; SIGKILL also to all processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)

    def end(self, deadline: float) -> None:
        """Wait until ``deadline`` for the process to end, then kill it and the processes that it has started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        self.signal(signal.SIGKILL)
        self.process.wait()
        self._waiter.join()
        self._join_readers()

    def _join_readers(self) -> None:
        for thread in self._readers.values():
            thread.join(1.0)


def end_all(children: Sequence[ChildProcess], patience: float) -> None:
    """Terminate processes, and kill them after ``patience`` seconds, or at once after an interrupt."""
    try:
        for child in children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + patience
        for child in children:
            child.end(deadline)
    except BaseException:
        for child in children:
            child.end(0.0)
        raise


class ProcessFailedError(ShoalError):
    """A process of a cluster ended before the cluster was complete."""

    def __init__(self, child: ChildProcess) -> None:
        super().__init__(f"{child.name} {child.describe_end()}")
        self.status = exit_status(child)


def exit_status(child: ChildProcess) -> int:
    """Return the exit status of a process as a shell does: 128 + the signal for one that was killed."""
    code = child.process.returncode
    return code if code >= 0 else 128 - code
