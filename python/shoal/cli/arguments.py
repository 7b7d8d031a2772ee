"""The parsers of commands, and the options that several commands share."""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from shoal.base import logs
from shoal.base.defaults import BATCH_SIZE
from shoal.base.sizes import parse_size
from shoal.base.suggest import nearest
from shoal.cli.answers import Answer, warn

if TYPE_CHECKING:
    from shoal.data import FeatureNames, Reader

PLAIN_FORMATS = ("libsvm", "libffm", "vw", "criteo")  # formats without options for columns
COLUMN_FORMATS = ("csv", "tsv", "parquet")
FORMATS = (*PLAIN_FORMATS, *COLUMN_FORMATS)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with a suggestion for a misspelled word."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Report unknown options with the help of the command that received them."""
        found, more = super().parse_known_args(args, namespace)
        unknown = [word for word in more if word.startswith("-")]
        if more:
            named = [name for action in self._actions for name in action.option_strings]
            meant = _meant(unknown[0].partition("=")[0], named) if unknown else ""
            self.error(f"unrecognized arguments: {' '.join(more)}{meant}")
        return found, more

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit with status 2."""
        wrong = _CHOICE.search(message)
        if wrong is not None:
            message += _meant(wrong[1], [word.strip("' ") for word in wrong[2].split(",")])
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


def _meant(word: str, words: Sequence[str]) -> str:
    near = nearest(word, words)
    return "" if near is None else f": did you mean {near}?"


def command(
    among: Any, name: str, what: str, examples: str, run: Callable[[argparse.Namespace], Answer] | None = None
) -> argparse.ArgumentParser:
    """Create the parser of a command; its help ends with examples that work."""
    described: dict[str, Any] = {
        "description": what,
        "epilog": examples,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    parser: argparse.ArgumentParser = among.add_parser(name.split()[-1], help=what, **described)
    parser.set_defaults(run=run)
    return parser


def reading(parser: argparse.ArgumentParser) -> None:
    """Add the options of reading files."""
    parser.add_argument(
        "--batch-size",
        type=int,
        default=BATCH_SIZE,
        metavar="N",
        help="examples per batch (default: %(default)s)",
    )
    parser.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="fail on a malformed line, or skip it (default: raise)",
    )
    parser.add_argument(
        "--reader-threads",
        type=int,
        default=1,
        metavar="N",
        help="threads that parse the files (default: 1, which is the fastest unless there are many interactions)",
    )


def columns(parser: argparse.ArgumentParser) -> None:
    """Add the options that name columns; a model saves them as its schema."""
    named = parser.add_argument_group("columns of csv, tsv and parquet")
    named.add_argument("--label", metavar="NAME", help="column of the labels")
    named.add_argument(
        "--categorical", type=_names, metavar="A,B,...", help="columns of text (default: all other columns)"
    )
    named.add_argument("--numeric", type=_names, metavar="A,B,...", help="columns of numbers (default: none)")
    named.add_argument("--ignore", type=_names, metavar="A,B,...", help="columns that are not features (default: none)")
    named.add_argument("--weight", metavar="NAME", help="column of the example weights")
    named.add_argument("--positive", metavar="TEXT", help="text of the positive label (default: labels are numbers)")
    named.add_argument("--sep", type=_separator, metavar="C", help=r"separator of csv: ';', tab (default: ,)")
    named.add_argument(
        "--columns", type=_names, metavar="A,B,...", help="names of the columns of files without a header"
    )
    named.add_argument("--na-values", type=_names, metavar="A,B,...", help="additional texts that mark a missing value")
    parser.add_argument(
        "--interactions",
        action="append",
        type=_names,
        metavar="A,B",
        help="add the pairs of these fields as features: columns, namespaces of vw, numbers of libffm, I1 to C26 of "
        "criteo; repeatable",
    )


def admission(text: str) -> Any:
    """Parse an admission policy."""
    return _rule("parse_admission", text)


def expiry(text: str) -> Any:
    """Parse an expiry policy."""
    return _rule("parse_expiry", text)


def _rule(parser: str, text: str) -> Any:
    from shoal import lifecycle

    try:
        return getattr(lifecycle, parser)(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds(text: str) -> float:
    """Parse a number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number


def port(text: str) -> int:
    """Parse a port."""
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: pass 0 to 65535")
    return int(text)


def size(text: str) -> int:
    """Parse a number of bytes: 8GiB, 8G, 1.5g, 512 MB or 100000; units are powers of 1024."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_MOST = 1e15  # of things: beyond, bytes of rows do not fit into 64 bits


def count(text: str) -> int:
    """Parse a number of things, such as 2e9 or 2000000000."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: write it as 2e9 or 2000000000") from None
    if not (0 <= number <= _MOST and number == int(number)):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 to {_MOST:.0e}")
    return int(text) if text.isdigit() else int(number)


def workers_number(text: str) -> int | tuple[int, int]:
    """Parse a number of workers, or the least and the greatest one: 4, 2:8."""
    from shoal.cluster.protocol.environment import parse_workers

    try:
        return parse_workers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def overwriting(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option without which nothing is replaced."""
    parser.add_argument("--overwrite", action="store_true", help=f"replace an existing {what}")


def cached(parser: argparse.ArgumentParser) -> None:
    """Add the option of the cache of remote exports."""
    parser.add_argument(
        "--cache", metavar="DIR", help="directory for local copies of remote exports (default: ~/.cache/shoal)"
    )


def scheduler_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that asks a scheduler."""
    parser.add_argument("--curve", metavar="DIR", help="directory of the cluster's keys")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=10.0,
        metavar="S",
        help="seconds to wait for the scheduler (default: %(default)s)",
    )


def log_options(parser: argparse.ArgumentParser, role: str) -> None:
    """Add the option of the log of a role of a cluster; `log_events` applies it."""
    parser.add_argument(
        "--log-format",
        choices=logs.FORMATS,
        help="format of log events on standard error, one a line; with json all messages are events (default: "
        "SHOAL_LOG_FORMAT, or text)",
    )
    parser.set_defaults(log_role=role)


def log_events(arguments: argparse.Namespace) -> AbstractContextManager[None]:
    """Log to standard error, as the arguments of a role ask for, for the length of a ``with`` block."""
    if "log_role" not in arguments:
        return nullcontext()
    form = arguments.log_format or logs.find_log_format(os.environ) or "text"
    # Of a command that prints its results, only warnings are of interest to people.
    level = logging.INFO if form == "json" or arguments.log_role != "worker" else logging.WARNING
    return logs.logging_to_stderr(form, level=logging.ERROR if arguments.quiet else level, role=arguments.log_role)


def machine(parser: argparse.ArgumentParser, *, threads: bool = True) -> None:
    """Add the options of every command."""
    if threads:
        parser.add_argument("--threads", type=int, metavar="N", help="threads that compute (default: all cores)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output instead of text")
    parser.add_argument("--quiet", action="store_true", help="print neither progress nor text")


def format_of(arguments: argparse.Namespace, path: str | Sequence[str]) -> str:
    """Return the format of the option, or detect it."""
    if arguments.format is not None:
        return str(arguments.format)
    from shoal.data.guess import guess_format

    try:
        form = guess_format(path)
    except ValueError as error:
        raise ValueError(f"{error}, as in --format libsvm") from None
    if not arguments.quiet:
        warn(f"detected format {form}; pass --format to choose another one")
    arguments.format = form
    return form


def format_for_model(arguments: argparse.Namespace, model: object, form: str | None) -> str:
    """Return the format of ``arguments.data`` for a model, named ``model`` in errors, that learned from ``form``.

    A column's text has the same key in a text file, in Parquet and in memory: there the files decide.
    """
    if arguments.format is not None:
        return str(arguments.format)
    if form is None:
        raise ValueError(f"{model} does not record the format of its training data: pass --format")
    if form not in (*COLUMN_FORMATS, "arrow"):
        return form
    from shoal.data.guess import guess_format

    try:
        found = guess_format(arguments.data)
    except (OSError, ValueError):
        return form  # the reader says what is wrong
    is_other = form == "arrow" or "parquet" in (form, found)
    return found if is_other and found in COLUMN_FORMATS else form


def schema_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `columns` as keyword arguments of the functions that create readers."""
    named = ("label", "categorical", "numeric", "weight", "positive", "sep", "columns", "na_values")
    schema = {name: value for name in named if (value := getattr(arguments, name)) is not None}
    if arguments.format not in COLUMN_FORMATS:
        for name in (*schema, *(["ignore"] if arguments.ignore else [])):
            option, formats = f"--{name.replace('_', '-')}", ", ".join(COLUMN_FORMATS)
            raise ValueError(f"{option} applies to {formats}, not to {arguments.format}: leave it out")
    elif "sep" in schema and arguments.format != "csv":
        raise ValueError(f"--sep applies to csv, not to {arguments.format}: leave it out")
    elif "label" not in schema:
        raise ValueError(f"{arguments.format} requires --label, the name of a column")
    if arguments.interactions:
        if arguments.format == "libsvm":
            raise ValueError("libsvm has no fields: --interactions applies to the other formats")
        for names in arguments.interactions:
            if len(names) < 2:
                raise ValueError(f"--interactions {','.join(names)}: name two or more, as in site,user")
        schema["interactions"] = [pair for names in arguments.interactions for pair in itertools.combinations(names, 2)]
    return schema


def open_reader(
    path: str | Sequence[str],
    form: str,
    arguments: argparse.Namespace,
    schema: Mapping[str, Any],
    names: FeatureNames | None = None,
    learned: str | None = None,
) -> Reader:
    """Create the reader of files; it collects the names of features into ``names``, if passed.

    ``schema`` is that of data of the format ``learned``, if it is not of this one.
    """
    from shoal.data.columns import missing_texts
    from shoal.data.readers import READERS

    if form == "tsv":
        form, schema = "csv", {"sep": "\t", **schema}
    if form == "arrow":
        raise ValueError("the model was trained on a table in memory: pass --format csv, tsv or parquet")
    if form in COLUMN_FORMATS and "label" not in schema:
        raise ValueError(f"{form} requires the column of the label: the model was not trained on {form}")
    how: dict[str, Any] = {"batch_size": arguments.batch_size, "names": names}
    if form == "parquet":
        missing = missing_texts(learned, schema)
        schema = {name: value for name, value in schema.items() if name not in _OF_TEXT}
        if missing:
            schema["na_values"] = missing
    else:
        if arguments.reader_threads < 1:
            raise ValueError(f"--reader-threads is {arguments.reader_threads}: pass 1 or more")
        how |= {"on_error": arguments.on_error, "reader_threads": arguments.reader_threads}
    return READERS[form](path, **schema, **how)


def with_known_columns(data: Reader, ignored: Sequence[str]) -> Reader:
    """Return a reader of the same columns in every file, without the ignored ones."""
    known = data.with_columns()
    if not ignored:
        return known
    taken = known.schema.get("categorical")
    if taken is None or "categorical" in data.schema:
        why = "the columns of a stream are not known before it is read" if taken is None else "--categorical names them"
        raise ValueError(f"--ignore leaves out columns of which nothing is said, and {why}: leave it out")
    for name in ignored:
        if name not in taken:
            raise ValueError(
                f"--ignore {name}: there is no such column, or it has a role; the others are {', '.join(taken)}"
            )
    return data.with_columns([name for name in taken if name not in ignored])


_OF_TEXT = ("sep", "list_separator", "columns", "na_values", "keep_default_na")


def _separator(text: str) -> str:
    """Parse one character; a tab also by its name or escape."""
    character = {"tab": "\t", r"\t": "\t"}.get(text, text)
    if len(character) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a separator: pass one character, or tab")
    return character


def _names(text: str) -> list[str]:
    return text.split(",")
