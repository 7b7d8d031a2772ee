"""``shoal compact``: merge a chain of deltas into one full checkpoint or export."""

from __future__ import annotations

from typing import Annotated

from shoal.base.settings import Setting
from shoal.cli.answers import Answer
from shoal.cli.options import Command, Output
from shoal.cli.reading import Cache
from shoal.config import Dir, Threads

EXAMPLES = """\
examples:
  $ shoal compact ckpt/step-3000 --output ckpt/full-3000
  $ shoal inspect ckpt/full-3000
  $ shoal compact serve/ctr --output serve/ctr/8          # the newest export in the directory
  $ shoal compact s3://models/ctr/7 --output s3://models/ctr/8

The command reads step-3000, the checkpoint that it is based on, and so on up to a full checkpoint. The result does not
depend on any of them.
"""


class Compact(Output, frozen=True, kw_only=True):
    """The options of the command."""

    path: Annotated[
        str, "checkpoint or export at the end of the chain, or s3://...", Setting(metavar="PATH", positional=True)
    ]
    output: Annotated[Dir, "directory of the result; created if it does not exist"]
    overwrite: Annotated[bool, "replace an existing checkpoint or export"] = False
    cache: Cache = None
    threads: Threads = None


def compact(options: Compact) -> Answer:
    """Merge a chain of deltas into one full checkpoint or export."""
    from shoal import checkpoint, export
    from shoal.checkpoint.read import read_chain
    from shoal.export.manifest import has_export

    progress = not (options.quiet or options.json)
    if has_export(options.path):
        done, links = export.compact(
            options.path,
            options.output,
            overwrite=options.overwrite,
            threads=options.threads,
            progress=progress,
            cache=options.cache,
        )
        rows, size = (sum(getattr(table, what) for table in done.tables.values()) for what in ("rows", "bytes"))
        of = "exports"
    else:
        links = len(read_chain(options.path))
        checkpoint.compact(
            options.path,
            options.output,
            overwrite=options.overwrite,
            threads=options.threads,
            progress=progress,
        )
        tables = checkpoint.read_manifest(options.output).tables
        rows = sum(table.rows for table in tables)
        size = sum(file.bytes for table in tables for file in table.files)
        of = "checkpoints"
    facts = {"directory": options.output, "links": links, "rows": rows, "bytes": size}
    return Answer(f"{options.output}: {rows:,} rows, {size:,} bytes, of {links} {of}", facts)


COMMANDS = (
    Command("compact", "Merge a chain of deltas into one full checkpoint or export.", EXAMPLES, Compact, compact),
)
