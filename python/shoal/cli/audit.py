"""``shoal audit``: hash collisions of the features of a file, with 64-bit keys and with tables of 2^b weights."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from shoal.base.streams import escape_text
from shoal.cli.answers import Answer
from shoal.cli.arguments import (
    FORMATS,
    columns,
    command,
    format_of,
    machine,
    open_reader,
    reading,
    schema_of,
    with_known_columns,
)

_SHOWN = 10  # shared keys in the text; --json has all

EXAMPLES = """\
examples:
  $ shoal audit --data day_0.tsv --format criteo
  $ shoal audit --data day_0.tsv --format criteo --interactions C1,C2 --bits 18,24 --examples 2000

Keys have 64 bits, so practically every feature has its own weight. For comparison the command counts the features that
would share one of 2^bits weights, as in programs that hash into a table of fixed size: of the distinct features,
and of all occurrences. It reads whole batches until it has the number of examples; more data has more collisions.
"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(commands, "audit", "Count the hash collisions of the features of a file.", EXAMPLES, audit)
    parser.add_argument(
        "--data", required=True, nargs="+", metavar="FILE", help="examples: files, patterns, URLs, or -"
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="format of the files (default: detected from the first line and the name)"
    )
    parser.add_argument(
        "--examples", type=int, default=100_000, metavar="N", help="number of examples to read (default: %(default)s)"
    )
    parser.add_argument(
        "--bits",
        type=_bits,
        default=(18, 22, 24),
        metavar="A,B,...",
        help="table sizes to compare with, as powers of two (default: 18,22,24)",
    )
    columns(parser)
    reading(parser)
    machine(parser, threads=False)


def audit(arguments: argparse.Namespace) -> Answer:
    """Count the collisions in a sample."""
    from shoal import data

    form = format_of(arguments, arguments.data)
    reader = open_reader(arguments.data, form, arguments, schema_of(arguments))
    reader = with_known_columns(reader, arguments.ignore or ())
    found = data.audit(reader, examples=arguments.examples, bits=arguments.bits)
    lines = [
        f"{'examples':<12} {found.examples:,}",
        f"{'features':<12} {found.features:,}, {found.texts:,} distinct",
        f"{'64 bits':<12} {_shared(len(found.shared))}; {found.expected:.2g} pairs expected",
    ]
    for key, texts in list(found.shared.items())[:_SHOWN]:
        lines.append(f"{'':<12} {key}: {escape_text(', '.join(texts))}")
    lines += [
        f"{f'{cells.bits} bits':<12} {100 * cells.distinct_share:.4g} % of the distinct features share a weight "
        f"({100 * cells.expected_share:.4g} % expected), {100 * cells.feature_share:.4g} % of all occurrences"
        for cells in found.cells
    ]
    return Answer("\n".join(lines), dataclasses.asdict(found))


def _shared(keys: int) -> str:
    if keys == 0:
        return "no two features share a key"
    return f"{keys:,} {'key is' if keys == 1 else 'keys are'} shared"


def _bits(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers: write it as 18,22,24") from None
