"""What commands share: how their parsers are made, and the arguments that several take."""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from shoal.cli.answers import Answer, complain
from shoal.data.batch import DEFAULT_BATCH_SIZE

if TYPE_CHECKING:
    from shoal.data import FeatureNames, Reader

PLAIN_FORMATS = ("libsvm", "libffm", "vw", "criteo")  # which need no word about columns
COLUMN_FORMATS = ("csv", "tsv", "parquet")
FORMATS = (*PLAIN_FORMATS, *COLUMN_FORMATS)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and name what was meant by a word that is nearly right."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options where they are known best: at the command that they were given to."""
        found, more = super().parse_known_args(args, namespace)
        unknown = [word for word in more if word.startswith("-")]
        if more:
            named = [name for action in self._actions for name in action.option_strings]
            meant = _meant(unknown[0].partition("=")[0], named) if unknown else ""
            self.error(f"unrecognized arguments: {' '.join(more)}{meant}")
        return found, more

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, with status 2."""
        wrong = _CHOICE.search(message)
        if wrong is not None:
            message += _meant(wrong[1], [word.strip("' ") for word in wrong[2].split(",")])
        self.exit(2, f"{self.prog}: error: {message}; {self.prog} --help shows how it is called\n")


_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


def _meant(word: str, words: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f": did you mean {near[0]}?" if near else ""


def command(
    among: Any, name: str, what: str, examples: str, run: Callable[[argparse.Namespace], Answer] | None = None
) -> argparse.ArgumentParser:
    """Make the parser of a command: its help ends with worked examples."""
    described: dict[str, Any] = {
        "description": what,
        "epilog": examples,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    if among is None:
        return Parser(prog=name, **described)
    parser: argparse.ArgumentParser = among.add_parser(name.split()[-1], help=what, **described)
    parser.set_defaults(run=run)
    return parser


def reading(parser: argparse.ArgumentParser) -> None:
    """Add how files are read."""
    parser.add_argument(
        "--batch-size",
        type=int,
        default=DEFAULT_BATCH_SIZE,
        metavar="N",
        help="examples of a step (default: %(default)s)",
    )
    parser.add_argument(
        "--on-error", choices=("raise", "skip"), default="raise", help="what a malformed line does (default: raise)"
    )
    parser.add_argument(
        "--parsers", type=int, default=1, metavar="N", help="threads that parse; more where cores idle (default: 1)"
    )


def columns(parser: argparse.ArgumentParser) -> None:
    """Add what is what in the data; a model remembers it."""
    named = parser.add_argument_group("columns of csv, tsv and parquet")
    named.add_argument("--label", metavar="NAME", help="the column of labels")
    named.add_argument("--categorical", type=_names, metavar="A,B,...", help="texts (default: all other columns)")
    named.add_argument("--numeric", type=_names, metavar="A,B,...", help="numbers (default: none)")
    named.add_argument("--weight", metavar="NAME", help="the examples' weights")
    named.add_argument("--positive", metavar="TEXT", help="the label that is 1 (default: labels are numbers)")
    named.add_argument("--sep", type=_separator, metavar="C", help=r"between the cells of csv: ';', tab (default: ,)")
    named.add_argument("--columns", type=_names, metavar="A,B,...", help="the columns of files without a header")
    named.add_argument("--na-values", type=_names, metavar="A,B,...", help="more texts of cells that hold nothing")
    parser.add_argument(
        "--interactions",
        action="append",
        type=_names,
        metavar="A,B",
        help="features of two fields: columns, namespaces of vw, numbers of libffm, I1 to C26 of criteo; of three and "
        "more all pairs; again for more",
    )


def admission(text: str) -> Any:
    """Read a rule of admission."""
    return _rule("parse_admission", text)


def expiry(text: str) -> Any:
    """Read a rule of expiry."""
    return _rule("parse_expiry", text)


def _rule(parser: str, text: str) -> Any:
    from shoal import lifecycle

    try:
        return getattr(lifecycle, parser)(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds(text: str) -> float:
    """Read a number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number


def port(text: str) -> int:
    """Read a port."""
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: pass 0 to 65535")
    return int(text)


_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE)


def size(text: str) -> int:
    """Read a number of bytes: 8GiB, 8G, 1.5g, 512 MB or 100000; each letter is 1024 times the one before it."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it as 8GiB, 512M or 100000")
    number, unit = found.groups()
    return int(float(number) * 1024 ** (" kmgt".index((unit or " ").lower())))


def cached(parser: argparse.ArgumentParser) -> None:
    """Add where exports that are elsewhere are copied to."""
    parser.add_argument(
        "--cache", metavar="DIR", help="where exports of s3://... are copied to, to be mapped (default: ~/.cache/shoal)"
    )


def machine(parser: argparse.ArgumentParser, *, threads: bool = True) -> None:
    """Add what every command takes."""
    if threads:
        parser.add_argument("--threads", type=int, metavar="N", help="default: all cores")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else there")
    parser.add_argument("--quiet", action="store_true", help="neither bar nor text")


def format_of(arguments: argparse.Namespace, path: str | Sequence[str]) -> str:
    """Return the format that was named, or guess it."""
    if arguments.format is not None:
        return str(arguments.format)
    from shoal.data.guess import guess_format

    try:
        form = guess_format(path)
    except ValueError as error:
        raise ValueError(f"{error}, as in --format libsvm") from None
    if not arguments.quiet:
        complain(f"the data looks like {form}, and is read so: --format says otherwise")
    arguments.format = form
    return form


def schema_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what `columns` says, as the functions that make readers take it."""
    named = ("label", "categorical", "numeric", "weight", "positive", "sep", "columns", "na_values")
    schema = {name: value for name in named if (value := getattr(arguments, name)) is not None}
    if arguments.format not in COLUMN_FORMATS:
        for name in schema:
            option, formats = f"--{name.replace('_', '-')}", ", ".join(COLUMN_FORMATS)
            raise ValueError(f"{option} is for {formats}, not for {arguments.format}: leave it out")
    elif "sep" in schema and arguments.format != "csv":
        raise ValueError(f"--sep is for csv, not for {arguments.format}: leave it out")
    elif "label" not in schema:
        raise ValueError(f"{arguments.format} needs --label, the name of a column")
    if arguments.interactions:
        if arguments.format == "libsvm":
            raise ValueError("libsvm has no fields: --interactions is for the other formats")
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
) -> Reader:
    """Make the reader of some files, which fills names of features if they are given."""
    from shoal.data.readers import READERS

    if form == "tsv":
        form, schema = "csv", {"sep": "\t", **schema}
    if form == "arrow":
        raise ValueError("the model learned from a table in memory: pass --format csv, tsv or parquet")
    if form in COLUMN_FORMATS and "label" not in schema:
        raise ValueError(f"{form} needs to know which column is the label: the model did not learn from {form}")
    how: dict[str, Any] = {"batch_size": arguments.batch_size, "names": names}
    if form == "parquet":
        schema = {name: value for name, value in schema.items() if name not in _OF_TEXT}
    else:
        if arguments.parsers < 1:
            raise ValueError(f"--parsers is {arguments.parsers}: pass 1 or more")
        how |= {"on_error": arguments.on_error, "reader_threads": arguments.parsers}
    return READERS[form](path, **schema, **how)


_OF_TEXT = ("sep", "list_separator", "columns", "na_values", "keep_default_na")


def _separator(text: str) -> str:
    """Read one character; a tab by its name or escape too."""
    character = {"tab": "\t", r"\t": "\t"}.get(text, text)
    if len(character) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no separator: pass one character, or tab")
    return character


def _names(text: str) -> list[str]:
    return text.split(",")
