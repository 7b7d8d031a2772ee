"""The guard of a worker's program: a small process that ends the program when the launcher has ended.

    python -I -S guard.py PARENT PROGRAM ...

It leads the program's process group and ends with the program's status. It forwards SIGINT to the group, as a terminal
does, and SIGTERM to the program alone: a data loader process that ends first would prevent it from saving. When its
parent has ended, it ends the whole group, that is, all that the program has started. The program itself is killed
together with the guard. Both use the parent-death signal of Linux (prctl).

Run as a file that imports nothing of shoal: it starts in a few milliseconds. Threads: one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from types import FrameType

PATIENCE_SECONDS = 5  # between SIGTERM and SIGKILL


def die_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)


def kill_group(number: int, frame: FrameType | None) -> None:
    """Kill the group, this process included."""
    os.killpg(0, signal.SIGKILL)


def end_group(number: int, frame: FrameType | None) -> None:
    """Terminate the group, and kill it if it does not end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, kill_group)
    signal.alarm(PATIENCE_SECONDS)
    os.killpg(0, signal.SIGTERM)


def forward(program: int, number: int) -> None:
    """Forward a signal to the program."""
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGTERM:
            os.kill(program, number)
            return
        handler = signal.signal(number, signal.SIG_IGN)
        os.killpg(0, number)
        signal.signal(number, handler)


def execute(program: list[str]) -> None:
    """Become a program. One that is not on the path may lie beside this Python (an environment not activated)."""
    try:
        os.execvp(program[0], program)
    except FileNotFoundError:
        beside = os.path.join(os.path.dirname(sys.executable), program[0])
        if os.sep in program[0] or not os.access(beside, os.X_OK):
            raise
        os.execv(beside, program)


def main() -> int:
    """Run the program; returns its status."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGHUP, end_group)
    die_with_parent(signal.SIGHUP)
    if os.getppid() != parent:
        return 1
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # the launcher runs in the background
    forwarded = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)  # until both processes have set their handlers
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        # Python ignores the last two, and a program inherits what is ignored: `zcat FILE | head` would print an error.
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
        try:
            execute(program)
        except OSError as error:
            sys.stderr.write(f"{program[0]} cannot be run: {error.strerror}\n")
            sys.stderr.flush()
            os._exit(127)
    for number in forwarded:
        signal.signal(number, lambda number, frame: forward(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if os.getppid() != parent:
        os.killpg(0, signal.SIGKILL)
    if code < 0:  # end by the same signal
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
