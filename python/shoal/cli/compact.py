"""``shoal compact``: a chain of deltas as one full checkpoint, or one whole export."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from shoal.cli.answers import Answer
from shoal.cli.arguments import cached, command, machine

EXAMPLES = """\
examples:
  $ shoal compact ckpt/step-3000 ckpt/whole-3000
  $ shoal inspect ckpt/whole-3000
  $ shoal compact serve/ctr serve/ctr/8          # the newest export there, and what it stands upon
  $ shoal compact s3://models/ctr/7 s3://models/ctr/8

Reads step-3000, the checkpoint that it is a delta of, that one's, and so on. They are not needed by the result.
"""


def add(commands: Any) -> None:
    """Add the command."""
    make = command(
        commands, "compact", "Write what a chain of deltas comes to as one checkpoint or export.", EXAMPLES, compact
    )
    make.add_argument("directory", metavar="DIR", help="the checkpoint or the export at the chain's end")
    make.add_argument("out", metavar="OUT", help="where to put the whole one; made if it is not there")
    make.add_argument("--overwrite", action="store_true", help="replace a checkpoint or an export that is there")
    cached(make)
    machine(make)


def compact(arguments: argparse.Namespace) -> Answer:
    """Write what a chain of deltas comes to as one checkpoint or export."""
    from shoal import checkpoint
    from shoal.export.compact import compact_export
    from shoal.tools import compact

    progress = not arguments.quiet and sys.stderr.isatty()
    if compact.has_export(arguments.directory):
        done, links = compact_export(
            arguments.directory,
            arguments.out,
            overwrite=arguments.overwrite,
            threads=arguments.threads,
            progress=progress,
            cache=arguments.cache,
        )
        rows, size = (sum(getattr(table, what) for table in done.tables.values()) for what in ("rows", "bytes"))
        of = "exports"
    else:
        links = len(checkpoint.read_chain(arguments.directory))
        checkpoint.compact_checkpoint(
            arguments.directory,
            arguments.out,
            overwrite=arguments.overwrite,
            threads=arguments.threads,
            progress=progress,
        )
        tables = checkpoint.read_manifest(arguments.out).tables
        rows = sum(table.rows for table in tables)
        size = sum(file.bytes for table in tables for file in table.files)
        of = "checkpoints"
    facts = {"directory": arguments.out, "links": links, "rows": rows, "bytes": size}
    return Answer(f"{arguments.out}: {rows:,} rows, {size:,} bytes, of {links} {of}", facts)
