"""``shoal audit``: hash collisions of the features of a file, with 64-bit keys and with tables of 2^b weights."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.base.defaults import BATCH_SIZE
from shoal.base.settings import Setting
from shoal.base.streams import escape_text
from shoal.cli.answers import Answer
from shoal.cli.options import Command, Output
from shoal.cli.reading import Reading, format_of, open_reader, schema_of, with_known_columns
from shoal.config import BatchSize, Count, ReaderConfig

_SHOWN = 10  # shared keys in the text; --json has all

EXAMPLES = """\
examples:
  $ shoal audit --data day_0.tsv --format criteo
  $ shoal audit --data day_0.tsv --format criteo --interactions C1,C2 --bits 18,24 --examples 2000

Keys have 64 bits, so practically every feature has its own weight. For comparison the command counts the features that
would share one of 2^bits weights, as in programs that hash into a table of fixed size: of the distinct features,
and of all occurrences. It reads whole batches until it has the number of examples; more data has more collisions.
"""


class Audit(Output, frozen=True, kw_only=True):
    """The options of the command."""

    data: ReaderConfig = ReaderConfig()
    batch_size: BatchSize = BATCH_SIZE
    examples: Annotated[Count, "number of examples to read"] = 100_000
    bits: Annotated[
        tuple[int, ...], "table sizes to compare with, as powers of two (default: 18,22,24)", Setting(metavar="A,B,...")
    ] = (18, 22, 24)


def audit(options: Audit) -> Answer:
    """Count the collisions in a sample."""
    from shoal import data

    config = options.data
    form = format_of(config.data, config.format, quiet=options.quiet)
    reader = open_reader(config.data, form, Reading.of(config, options.batch_size), schema_of(config, form))
    reader = with_known_columns(reader, config.ignore)
    found = data.audit(reader, examples=options.examples, bits=options.bits)
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
    return Answer("\n".join(lines), msgspec.to_builtins(found))


def _shared(keys: int) -> str:
    if keys == 0:
        return "no two features share a key"
    return f"{keys:,} {'key is' if keys == 1 else 'keys are'} shared"


COMMANDS = (Command("audit", "Count the hash collisions of the features of a file.", EXAMPLES, Audit, audit),)
