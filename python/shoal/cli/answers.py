"""What commands say, and how: text or JSON on standard output, bars, notes and errors on standard error.

Of the package this module alone prints.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Collection, Iterator
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


def one_line(error: BaseException, options: Collection[str] = ()) -> str:
    """Say in one line what went wrong, in the words of a command with these options."""
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    else:
        text = str(error)
    return in_options(" ".join(text.split()), options) or type(error).__name__


def in_options(text: str, options: Collection[str]) -> str:
    """Say a message of the package in the words of the shell.

    The package names keywords of its functions, as Python's users write them. Where an option has the same name it is
    the option that a command's user can change.

    >>> in_options("on_error='skip' leaves such lines out", {"on_error", "every"})
    '--on-error skip leaves such lines out'
    >>> in_options("every is 0: pass 1 or more", {"on_error", "every"})
    '--every is 0: pass 1 or more'
    """
    if not options:
        return text
    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))

    def option(found: re.Match[str]) -> str:
        value = f" {found['value']}" if found["value"] else ""
        return "--" + found["name"].replace("_", "-") + value

    text = re.sub(r"(?<==True) \(--[\w-]+\)", "", text)  # some messages have said the option themselves
    keyword = rf"(?<![\w-])(?P<name>{names})=(?:True\b|'(?P<value>[\w-]+)'|(?=[\s),;:?]|$))"
    text = re.sub(keyword, option, text)
    return re.sub(rf"^(?P<name>{names})(?P<value>)(?= (?:is|holds|must) )", option, text)


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Have an error of the operating system name the file, or the address, that it is about."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever read has gone, which is no error
    except OSError as error:
        if error.filename is None and error.strerror:
            error.filename = what
        raise
