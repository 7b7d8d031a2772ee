"""What commands say, and how: text or JSON on standard output, bars, notes and errors on standard error.

Of the package this module alone prints.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any, TextIO

DONE, FAILED, WRONG_INPUT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command has to say: ``text`` for people, or ``facts`` as JSON; and the exit status."""

    text: str
    facts: dict[str, Any]
    status: int = DONE


def _write(text: str, to: TextIO) -> None:
    """Write a line at once: where output is not buffered, ``print`` writes its end apart, and lines of threads meet."""
    to.write(text + "\n")
    to.flush()


def tell(answer: Answer, arguments: argparse.Namespace) -> None:
    """Print the answer as the arguments want it."""
    if arguments.json:
        import msgspec

        _write(msgspec.json.encode(answer.facts).decode(), sys.stdout)
    elif answer.text and not arguments.quiet:
        _write(answer.text, sys.stdout)


def say(line: str) -> None:
    """Print a line for people while the work goes on. Safe from any thread."""
    _write(line, sys.stdout)


def nothing(line: str) -> None:
    """Say nothing."""


def complain(what: str) -> None:
    """Print a note or an error. Safe from any thread."""
    _write(f"shoal: {what}", sys.stderr)


def one_line(error: BaseException) -> str:
    """Say in one line what went wrong."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
