"""What commands say, and how: text or JSON on standard output, bars, notes and errors on standard error.

Of the package this module alone prints.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command has to say: ``text`` for people, or ``facts`` as JSON; and the exit status."""

    text: str
    facts: dict[str, Any]
    status: int = DONE


def tell(answer: Answer, arguments: argparse.Namespace) -> None:
    """Print the answer as the arguments want it."""
    if arguments.json:
        import msgspec

        print(msgspec.json.encode(answer.facts).decode(), flush=True)
    elif answer.text and not arguments.quiet:
        print(answer.text, flush=True)


def say(line: str) -> None:
    """Print a line for people while the work goes on."""
    print(line, flush=True)


def nothing(line: str) -> None:
    """Say nothing."""


def complain(what: str) -> None:
    """Print a note or an error."""
    print(f"shoal: {what}", file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    """Say in one line what went wrong."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
