"""``shoal audit``: which features of a file share a key, and how many would in a table of 2^b rows."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from shoal.cli.answers import Answer
from shoal.cli.arguments import FORMATS, columns, command, format_of, machine, open_reader, reading, schema_of

TOLD = 10  # keys that are shared; --json has all

EXAMPLES = """\
examples:
  $ shoal audit --data day_0.tsv --format criteo
  $ shoal audit --data day_0.tsv --format criteo --interactions C1,C2 --bits 18,24 --examples 2000

A key has 64 bits, so that features have weights of their own. The table tells what share of the features would not, if
there were 2^bits weights, as with other systems: of the distinct ones, and of all of them as often as they occur. Whole
batches are read until there are so many examples; more data has more features, which share more.
"""


def add(commands: Any) -> None:
    """Add the command."""
    look = command(commands, "audit", "Tell which features of a file share a key.", EXAMPLES, audit)
    look.add_argument("--data", required=True, nargs="+", metavar="FILE", help="the examples")
    look.add_argument("--format", choices=FORMATS, help="of the data (default: guessed from a line and the name)")
    look.add_argument("--examples", type=int, default=100_000, metavar="N", help="to read (default: %(default)s)")
    look.add_argument(
        "--bits", type=_bits, default=(18, 22, 24), metavar="A,B,...", help="sizes of tables (default: 18,22,24)"
    )
    columns(look)
    reading(look)
    machine(look, threads=False)


def audit(arguments: argparse.Namespace) -> Answer:
    """Audit a sample."""
    from shoal import data

    form = format_of(arguments, arguments.data)
    reader = open_reader(arguments.data, form, arguments, schema_of(arguments))
    found = data.audit(reader, examples=arguments.examples, bits=arguments.bits)
    lines = [
        f"{'examples':<12} {found.examples:,}",
        f"{'features':<12} {found.features:,}, {found.texts:,} distinct",
        f"{'64 bits':<12} {_shared(len(found.shared))}; {found.expected:.2g} pairs are expected to",
    ]
    for key, texts in list(found.shared.items())[:TOLD]:
        lines.append(f"{'':<12} {key}: {', '.join(texts)}")
    lines += [
        f"{f'{cells.bits} bits':<12} {100 * cells.distinct_share:.4g} % of the distinct share a row "
        f"({100 * cells.expected_share:.4g} % expected), {100 * cells.feature_share:.4g} % of all"
        for cells in found.cells
    ]
    return Answer("\n".join(lines), dataclasses.asdict(found))


def _shared(keys: int) -> str:
    if keys == 0:
        return "no two share a key"
    return f"{keys:,} {'key is' if keys == 1 else 'keys are'} shared"


def _bits(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers: write it as 18,22,24") from None
