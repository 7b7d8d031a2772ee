"""Keeper: a small process around a worker's program, which sees to it that nothing of it outlives who started it.

    python -I -S keeper.py PARENT PROGRAM ...

It leads the program's process group and ends as the program does. When its parent is gone, or it is told to end
(SIGTERM), it ends the whole group: all that the program has started, wherever it is in its own work. The program itself
is killed with the keeper. Both need the kernel's word of a parent's death (Linux).

Run as a file, with nothing of shoal imported: it starts in a few milliseconds. Threads: one.
"""

from __future__ import annotations

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
    signal.signal(signal.SIGALRM, kill_group)
    signal.alarm(PATIENCE)
    os.killpg(0, signal.SIGTERM)


def main() -> int:
    """Run the program; returns its status."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, end_group)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(signal.SIGKILL)
        try:
            os.execvp(program[0], program)
        except OSError as error:
            sys.stderr.write(f"{program[0]} cannot be run: {error.strerror}\n")
            sys.stderr.flush()
            os._exit(127)
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
