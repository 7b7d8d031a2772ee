"""The standard streams of a process. What standard error cannot take, since it is full or closed, ends no work."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

__all__ = ["TROUBLE", "open_closed_streams", "stderr_is_terminal", "write_stderr", "write_text"]

# What writing to a stream raises if it is full, closed, or a pipe or terminal that has gone.
TROUBLE = (OSError, ValueError)


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed.

    Otherwise Python has no object for it, and the next file that is opened, such as one of a model, gets its number:
    libraries that write to standard error would write into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)  # gets the lowest free number: this one
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def write_text(stream: TextIO | None, text: str) -> None:
    """Write text in one call, with escapes for characters that the stream's encoding lacks, and flush it.

    None, what Python has in place of a closed stream, takes everything.
    """
    if stream is None:
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def stderr_is_terminal() -> bool:
    """Return whether standard error is a terminal."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except TROUBLE:
        return False


def write_stderr(text: str) -> None:
    """Write text to standard error, if there is one that takes it."""
    with contextlib.suppress(*TROUBLE):
        write_text(sys.stderr, text)
