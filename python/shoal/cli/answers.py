"""Output of commands: text or JSON on standard output; progress bars, warnings and errors on standard error.

This is the only module of the package that prints.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import msgspec

from shoal.base import logs
from shoal.base.streams import TROUBLE, escape_json, escape_lines, write_stderr, write_text

DONE, FAILED, WRONG_INPUT = 0, 1, 2

_log = logging.getLogger("shoal.cli")


class Answer(msgspec.Struct, frozen=True):
    """The result of a command: ``text`` for people, or ``facts`` as JSON, both empty if there is none; exit status."""

    text: str
    facts: dict[str, Any]
    status: int = DONE


def _print(line: str) -> None:
    """Write a line in one call: unbuffered, ``print`` writes the line end apart, and lines of threads would mix."""
    write_text(sys.stdout, line + "\n")


def emit(answer: Answer, *, json: bool, quiet: bool) -> None:
    """Print the answer as JSON, or as text unless it is to be quiet."""
    if json and answer.facts:
        _print(escape_json(msgspec.json.encode(answer.facts).decode()))
    elif answer.text and not (json or quiet):
        _print(escape_lines(answer.text))


def log_events(role: str, form: Literal["text", "json"] | None, *, quiet: bool) -> AbstractContextManager[None]:
    """Log to standard error for the length of a ``with`` block; as a role of a cluster, if the command has one."""
    chosen = (form or logs.find_log_format(os.environ) or "text") if role else "text"
    # Of a command that prints its results, only warnings are of interest to people.
    level = logging.INFO if chosen == "json" or role not in ("", "worker") else logging.WARNING
    return logs.logging_to_stderr(chosen, level=logging.ERROR if quiet else level, role=role or "worker")


def clear_screen() -> None:
    """Clear the terminal, if standard output is one."""
    if sys.stdout is not None and sys.stdout.isatty():
        write_text(sys.stdout, "\x1b[H\x1b[2J")


def log_line(line: str) -> None:
    """Print a line during the work, or log it if the log is JSON. Thread-safe."""
    if logs.is_json():
        _log.info("%s", line)
    else:
        _print(escape_lines(line))


class WorkerOutput:
    """The output of workers, printed line by line as it is. What cannot be written is dropped, and they continue.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._is_lost = False

    def print_output(self, line: str) -> None:
        """Print a line of standard output."""
        try:
            _print(line)
        except TROUBLE as error:
            was_lost, self._is_lost = self._is_lost, True
            if not was_lost and not isinstance(error, BrokenPipeError):  # else the reader has closed the pipe
                warn(f"standard output: {one_line(error)}: output of the workers is lost")

    @staticmethod
    def print_error_output(line: str) -> None:
        """Print a line of standard error there."""
        write_stderr(line + "\n")

    def status(self, status: int) -> int:
        """Return the exit status of a command whose program has ended with ``status``: 0 only if no output was lost."""
        return status or (FAILED if self._is_lost else DONE)


def warn(what: str, level: int = logging.WARNING) -> None:
    """Print a warning or an error, or log it if the log is JSON; ignored if it cannot be written. Thread-safe."""
    if logs.is_json():
        _log.log(level, "%s", what)
    else:
        write_stderr(f"shoal: {escape_lines(what)}\n")


def one_line(error: BaseException, options: Collection[str] = ()) -> str:
    """Describe an error in one line, naming the options of a command instead of keyword arguments."""
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    else:
        text = str(error)
    return in_options(" ".join(text.split()), options) or type(error).__name__


def in_options(text: str, options: Collection[str]) -> str:
    """Replace keyword arguments in a message of the package by the options of a command.

    >>> in_options("on_error='skip' skips such lines", {"on_error", "checkpoint_every"})
    '--on-error skip skips such lines'
    >>> in_options("checkpoint_every is 0: pass 1 or more", {"on_error", "checkpoint_every"})
    '--checkpoint-every is 0: pass 1 or more'
    >>> in_options("pass resume='appended' to learn more", {"resume"})
    'pass --resume appended to learn more'
    >>> in_options("pass sep=';' (--sep)", {"sep"})
    "pass --sep ';'"
    >>> in_options("pass --curve DIR (curve=) or --insecure (insecure=True)", {"curve", "insecure"})
    'pass --curve DIR or --insecure'
    """
    if not options:
        return text
    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))

    def option(found: re.Match[str]) -> str:
        value = f" {shlex.quote(found['value'])}" if found["value"] else ""
        return "--" + found["name"].replace("_", "-") + value

    text = re.sub(r"(=True|='[^']*') \(--[\w-]+\)", r"\1", text)  # some messages name the option too
    text = re.sub(r"(--[\w-]+(?: [A-Z]+)?) \(\w+=(?:True)?\)", r"\1", text)  # or the keyword
    keyword = rf"(?<![\w-])(?P<name>{names})=(?:True\b|'(?P<value>[^']+)'|(?=[\s),;:?]|$))"
    text = re.sub(keyword, option, text)
    return re.sub(rf"^(?P<name>{names})(?P<value>)(?=(?: (?:is|holds|must) |: ))", option, text)


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Add the file or the address to errors of the operating system that do not name one."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has closed the pipe, which is not an error
    except OSError as error:
        if error.filename is None and error.strerror:
            error.filename = what
        raise
