"""What commands share: how their parsers are made, and the arguments that several take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.cli.answers import Answer

if TYPE_CHECKING:
    from shoal.data import Reader

FORMATS = ("libsvm", "libffm", "vw", "criteo")


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
        return argparse.ArgumentParser(prog=name, **described)
    parser: argparse.ArgumentParser = among.add_parser(name.split()[-1], help=what, **described)
    parser.set_defaults(run=run)
    return parser


def reading(parser: argparse.ArgumentParser) -> None:
    """Add how files are read."""
    parser.add_argument("--batch-size", type=int, default=1024, metavar="N", help="examples (default: %(default)s)")
    parser.add_argument(
        "--on-error", choices=("raise", "skip"), default="raise", help="what a malformed line does (default: raise)"
    )


def machine(parser: argparse.ArgumentParser, *, threads: bool = True) -> None:
    """Add what every command takes."""
    if threads:
        parser.add_argument("--threads", type=int, metavar="N", help="default: all cores")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else there")
    parser.add_argument("--quiet", action="store_true", help="neither bar nor text")


def open_reader(path: str, form: str, arguments: argparse.Namespace) -> Reader:
    """Make the reader of a file."""
    from shoal.data.readers import READERS

    return READERS[form](path, batch_size=arguments.batch_size, on_error=arguments.on_error)
