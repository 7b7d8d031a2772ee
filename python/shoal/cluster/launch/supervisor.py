"""Keeper: a small process around a worker's program, which sees to it that nothing of it outlives who started it.

    python -I -S keeper.py PARENT PROGRAM ...

It leads the program's process group and ends as the program does. SIGINT it passes on to the group, as a terminal does,
SIGTERM to the program alone: a loader process that ends first would keep it from saving. When its parent is gone it
ends the whole group: all that the program has started, wherever it is in its own work. The program itself is
killed with the keeper. Both need the kernel's word of a parent's death (Linux).

Run as a file, with nothing of shoal imported: it starts in a few milliseconds. Threads: one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from types import FrameType

PATIENCE = 5  # seconds between asking the group to end and killing it


def die_with_parent(number: int) -> None:
    """Let the kernel send this process a signal when its parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)


def kill_group(number: int, frame: FrameType | None) -> None:
    """Kill the group, this process included."""
    os.killpg(0, signal.SIGKILL)


def end_group(number: int, frame: FrameType | None) -> None:
    """Ask the group to end, and kill it if it does not."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, kill_group)
    signal.alarm(PATIENCE)
    os.killpg(0, signal.SIGTERM)


def pass_on(program: int, number: int) -> None:
    """Give the program a signal that this process got."""
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGTERM:
            os.kill(program, number)
            return
        handler = signal.signal(number, signal.SIG_IGN)
        os.killpg(0, number)
        signal.signal(number, handler)


def main() -> int:
    """Run the program; returns its status."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGHUP, end_group)
    die_with_parent(signal.SIGHUP)
    if os.getppid() != parent:
        return 1
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # by who started all of it, in the background
    passed_on = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until both sides of the fork know what to do with them
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        try:
            os.execvp(program[0], program)
        except OSError as error:
            sys.stderr.write(f"{program[0]} cannot be run: {error.strerror}\n")
            sys.stderr.flush()
            os._exit(127)
    for number in passed_on:
        signal.signal(number, lambda number, frame: pass_on(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if os.getppid() != parent:
        os.killpg(0, signal.SIGKILL)
    if code < 0:  # die as it did
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
