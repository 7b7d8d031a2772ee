"""``shoal compact``: merge a chain of deltas into one full checkpoint or export."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.cli.answers import Answer
from shoal.cli.arguments import cached, command, machine, overwriting

EXAMPLES = """\
examples:
  $ shoal compact ckpt/step-3000 --output ckpt/full-3000
  $ shoal inspect ckpt/full-3000
  $ shoal compact serve/ctr --output serve/ctr/8          # the newest export in the directory
  $ shoal compact s3://models/ctr/7 --output s3://models/ctr/8

The command reads step-3000, the checkpoint that it is based on, and so on up to a full checkpoint. The result does not
depend on any of them.
"""


def add(commands: Any) -> None:
    """Add the command."""
    make = command(
        commands, "compact", "Merge a chain of deltas into one full checkpoint or export.", EXAMPLES, compact
    )
    make.add_argument("path", metavar="PATH", help="checkpoint or export at the end of the chain, or s3://...")
    make.add_argument(
        "--output", required=True, metavar="DIR", help="directory of the result; created if it does not exist"
    )
    overwriting(make, "checkpoint or export")
    cached(make)
    machine(make)


def compact(arguments: argparse.Namespace) -> Answer:
    """Merge a chain of deltas into one full checkpoint or export."""
    from shoal import checkpoint
    from shoal.export.compact import compact_export
    from shoal.tools import compact

    progress = not (arguments.quiet or arguments.json)
    if compact.has_export(arguments.path):
        done, links = compact_export(
            arguments.path,
            arguments.output,
            overwrite=arguments.overwrite,
            threads=arguments.threads,
            progress=progress,
            cache=arguments.cache,
        )
        rows, size = (sum(getattr(table, what) for table in done.tables.values()) for what in ("rows", "bytes"))
        of = "exports"
    else:
        links = len(checkpoint.read_chain(arguments.path))
        checkpoint.compact_checkpoint(
            arguments.path,
            arguments.output,
            overwrite=arguments.overwrite,
            threads=arguments.threads,
            progress=progress,
        )
        tables = checkpoint.read_manifest(arguments.output).tables
        rows = sum(table.rows for table in tables)
        size = sum(file.bytes for table in tables for file in table.files)
        of = "checkpoints"
    facts = {"directory": arguments.output, "links": links, "rows": rows, "bytes": size}
    return Answer(f"{arguments.output}: {rows:,} rows, {size:,} bytes, of {links} {of}", facts)
