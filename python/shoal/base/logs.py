"""Log events of a process: one line each, as text or as JSON.

    text    shoal: the scheduler was started again from its journal
    json    {"time":"2026-11-24T15:54:26.123Z","level":"warning","logger":"shoal.server","message":...,"role":...}

`configure_logging` sets up the handler of the process, `identify` states which process of a cluster it is, and a module
that logs passes the numbers of the call as ``extra``. ``docs/monitoring.md`` lists the keys.

Invariant: an event is one line, whatever its message and its exception contain; a line of JSON is ASCII.

Threads: any.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

from shoal.base.streams import escape_text, write_stderr

FORMATS: tuple[Literal["text"], Literal["json"]] = ("text", "json")
LOG_FORMAT = "SHOAL_LOG_FORMAT"  # the environment variable

# Keys of an event in addition to those that every event has: which process of a cluster it is, and which call.
_OF_PROCESS = ("role", "rank", "cluster", "job")
_OF_CALL = ("worker", "incarnation", "call", "sequence", "op", "table", "clock")
_FIRST_KEY = '{"time":"'

_identity: dict[str, Any] = {}


class JsonFormatter(logging.Formatter):
    """Formats an event as one JSON object.

    Examples
    --------
    >>> record = logging.LogRecord("shoal.server", logging.INFO, "", 0, "slot %d has moved", (7,), None)
    >>> event = json.loads(JsonFormatter().format(record))
    >>> event["level"], event["logger"], event["message"]
    ('info', 'shoal.server', 'slot 7 has moved')
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        event: dict[str, Any] = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **_identity,
            "pid": record.process,
        }
        found = vars(record)
        event |= {key: found[key] for key in (*_OF_PROCESS, *_OF_CALL) if found.get(key) is not None}
        if text := _exception(self, record):
            event["exception"] = text
        return json.dumps(event, separators=(",", ":"), default=str)


class TextFormatter(logging.Formatter):
    r"""Formats an event as one line for people; characters that control a terminal are escaped.

    Examples
    --------
    >>> record = logging.LogRecord("shoal.server", logging.INFO, "", 0, "two\nlines", (), None)
    >>> print(TextFormatter().format(record))
    shoal: two\nlines
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = f"shoal: {_message(record)}"
        if text := _exception(self, record):
            line += f" [{' | '.join(part.strip() for part in text.splitlines())}]"
        return escape_text(line)


class _StderrHandler(logging.Handler):
    """Writes each event to the current standard error in one call, so that lines of processes do not mix."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write(self.format(record))
        except Exception:
            self.handleError(record)

    def write(self, line: str) -> None:
        """Write a line."""
        write_stderr(line + "\n")

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore that an event cannot be written: the process goes on without its log."""


_handler = _StderrHandler()


def configure_logging(format: Literal["text", "json"] = "text", *, level: int = logging.INFO) -> None:
    """Write log events of this process to standard error, one a line.

    Parameters
    ----------
    format : {"text", "json"}
        With "json" warnings of Python and exceptions that end a thread or the process are events too.
    level : int
        The lowest level of events that are written, a number of the module `logging`.

    Raises
    ------
    ValueError
        The format is unknown.

    Notes
    -----
    Replaces the handler of an earlier call. Other handlers of the program are kept. A program that sets up `logging`
    itself does not need this function.

    Examples
    --------
    >>> configure_logging("xml")
    Traceback (most recent call last):
        ...
    ValueError: the log format is 'xml': pass text or json
    """
    if format not in FORMATS:
        raise ValueError(f"the log format is {format!r}: pass text or json")
    _handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    if _handler not in root.handlers:
        root.addHandler(_handler)
    root.setLevel(max(level, logging.WARNING))  # of other libraries
    logging.getLogger("shoal").setLevel(level)
    logging.captureWarnings(format == "json")
    if format == "json":
        sys.excepthook, threading.excepthook = _log_uncaught, _log_thread


@contextlib.contextmanager
def logging_to_stderr(format: Literal["text", "json"], *, level: int, role: str) -> Iterator[None]:
    """Apply `configure_logging` and `identify` for the length of a ``with`` block."""
    hooks = sys.excepthook, threading.excepthook
    levels = {name: logging.getLogger(name).level for name in ("shoal", "shoal.cli")}
    _identity.clear()
    configure_logging(format, level=level)
    logging.getLogger("shoal.cli").setLevel(logging.INFO)  # what a command prints, also with --quiet
    if role != "worker":  # a store that joins a job does it
        identify(role=role)
    try:
        yield
    finally:
        root = logging.getLogger()
        root.removeHandler(_handler)
        root.setLevel(logging.WARNING)
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)
        logging.captureWarnings(False)
        sys.excepthook, threading.excepthook = hooks
        _handler.setFormatter(None)
        _identity.clear()


def is_json() -> bool:
    """Whether the events of this process are JSON."""
    return isinstance(_handler.formatter, JsonFormatter)


def find_log_format(environment: Mapping[str, str]) -> Literal["text", "json"] | None:
    """Find the format in the environment: SHOAL_LOG_FORMAT."""
    name = environment.get(LOG_FORMAT)
    if not name:
        return None
    for form in FORMATS:
        if name == form:
            return form
    raise ValueError(f"{LOG_FORMAT}={name!r} in the environment is not a log format: set text or json")


def identify(**fields: Any) -> None:
    """State which process of a cluster this is: ``role``, ``rank``, ``cluster`` and ``job`` of its further events."""
    _identity.update({name: value for name, value in fields.items() if value is not None})


def identify_store(role: str, **fields: Any) -> None:
    """As `identify`, for a store that has connected: in a process with another role it changes nothing."""
    if _identity.get("role", role) == role:
        identify(role=role, **fields)


def is_log_line(line: str) -> bool:
    """Whether a line is an event as JSON."""
    return line.startswith(_FIRST_KEY) and line.endswith("}")


def worker_line(line: str, rank: int, workers: int) -> str:
    """Return a line of the output of a worker, as its launcher prints it.

    That is the line with the rank of the worker, if there are several; an object as JSON stays as it is. If the log of
    this process is JSON, the line is an event: as it is, or as one of the logger ``shoal.output``.

    Examples
    --------
    >>> worker_line("pass 1", 3, 4)
    '[3] pass 1'
    """
    if not is_json():
        is_object = line.startswith("{") and line.endswith("}")
        return f"[{rank}] {line}" if workers > 1 and not is_object else line
    if is_log_line(line):
        return line
    record = logging.LogRecord("shoal.output", logging.INFO, "", 0, "%s", (line,), None)
    vars(record).update(role="worker", rank=rank)
    return JsonFormatter().format(record)


def forward(line: str) -> None:
    """Write an event of a child process that is JSON, if those of this process are: other lines are ignored."""
    if is_json() and is_log_line(line):
        _handler.write(line)


def _time(seconds: float) -> str:
    """Return a time of the epoch as RFC 3339 in UTC.

    >>> _time(0.25)
    '1970-01-01T00:00:00.250Z'
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # its arguments do not fit: the event is kept
        return f"{record.msg} (with arguments that do not fit: {error})"


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[0] is None:
        return record.exc_text or ""
    return formatter.formatException(record.exc_info)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    traced = None if issubclass(kind, KeyboardInterrupt) else (kind, error, trace)
    text = "".join(traceback.format_exception_only(kind, error)).strip()
    logging.getLogger("shoal").critical("the process ends: %s", text, exc_info=traced)


def _log_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread is not None else "unknown"
    error = args.exc_value if args.exc_value is not None else args.exc_type()
    traced = (args.exc_type, error, args.exc_traceback)
    logging.getLogger("shoal").error("the thread %s ends: %r", name, error, exc_info=traced)
