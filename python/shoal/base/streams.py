"""The standard streams of a process. What standard error cannot take, since it is full or closed, ends no work.

Names of columns, tables and features come from data. Before they are printed, characters that control a terminal, or
the direction of text, are escaped.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

_UNSAFE = (*range(127, 160), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_IN_JSON = {c: f"\\u{c:04x}" for c in _UNSAFE}
_IN_TEXT = {c: f"\\x{c:02x}" if c < 256 else f"\\u{c:04x}" for c in (*range(32), *_UNSAFE)}
_IN_TEXT |= {9: "\\t", 10: "\\n", 13: "\\r"}
_IN_LINES = {c: text for c, text in _IN_TEXT.items() if c not in (9, 10)}

# What writing to a stream raises if it is full, closed, or a pipe or terminal that has gone.
TROUBLE = (OSError, ValueError)


def escape_text(text: str) -> str:
    r"""Return text for one line: without characters that control a terminal.

    >>> escape_text("a\x1b[2J\nb")
    'a\\x1b[2J\\nb'
    """
    return text.translate(_IN_TEXT)


def escape_lines(text: str) -> str:
    r"""Return text of several lines, whose line ends and tabs stay.

    >>> escape_lines("a\x1b[2J\nb\r")
    'a\\x1b[2J\nb\\r'
    """
    return text.translate(_IN_LINES)


def escape_json(text: str) -> str:
    r"""Return JSON with the same values, whose texts have no characters that control a terminal.

    >>> escape_json('["\x9b2J"]')
    '["\\u009b2J"]'
    """
    return text.translate(_IN_JSON)


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
