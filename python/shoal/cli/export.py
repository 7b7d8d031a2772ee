"""``shoal export``: write the weights of a model or a checkpoint for read-only use."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from shoal.cli.answers import Answer, warn
from shoal.cli.arguments import cached, command, machine, overwriting

if TYPE_CHECKING:
    from shoal.storage.base import StorageDir
    from shoal.store.local import LocalStore

EXAMPLES = """\
examples:
  $ shoal export ctr --output serve/ctr/1 --dtype float16
  $ shoal export ctr --output serve/ctr/2 --since serve/ctr/1      # only the changes
  $ shoal export ckpt/step-1000 --output serve/user --table user=int8 --table ad
  $ shoal export ctr --output s3://models/ctr/7 --since s3://models/ctr/6

`shoal.open_export` and `shoal serve` read an export; `shoal inspect` describes it. An existing export in DIR is
replaced only with --overwrite, atomically and at the end; a directory that holds anything else is never written to.
"""


def add(commands: Any) -> None:
    """Add the command."""
    write = command(commands, "export", "Write the weights of a model for serving.", EXAMPLES, export)
    write.add_argument("path", metavar="MODEL", help="model or checkpoint, or s3://...")
    write.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="directory of the export, or s3://...; created if it does not exist",
    )
    write.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16", "int8"),
        help="type of the stored weights (default: float32, or as in --since)",
    )
    write.add_argument("--since", metavar="DIR", help="earlier export of the same model: write only the changes since")
    write.add_argument(
        "--table",
        action="append",
        metavar="NAME[=DTYPE]",
        help="table to write, optionally with a dtype of its own; repeatable (default: all)",
    )
    write.add_argument("--version", type=int, metavar="N", help="version number of the export (default: the next one)")
    overwriting(write, "export")
    cached(write)
    machine(write)


def export(arguments: argparse.Namespace) -> Answer:
    """Export a checkpoint or a model."""
    from shoal.export.cache import Cache
    from shoal.export.write import TableSource, UnsynchronizedTables, check_target, write_export
    from shoal.models import files
    from shoal.models.scales import scales_name
    from shoal.storage.open import open_dir

    model: dict[str, Any] | None = None
    extras: dict[str, bytes] = {}
    folder, described = files.checkpoint_in(arguments.path)
    if described is not None:
        if described.model == files.CLICK and not described.click:
            warn(
                f"the module of {arguments.path} was not made by a configuration (shoal train ctr): shoal serve cannot "
                "rebuild it; shoal.open_export reads its tables"
            )
        model, extras = files.for_export(arguments.path, described)
    target = open_dir(arguments.output)
    check_target(target, overwrite=arguments.overwrite)  # before rows are read
    chosen = dict(name.partition("=")[::2] for name in arguments.table or ())
    dtypes = {name: dtype for name, dtype in chosen.items() if dtype}
    progress = not (arguments.quiet or arguments.json)
    since = None if arguments.since is None else open_dir(arguments.since)
    with _store(arguments, since) as store:
        store.load(folder, progress=progress)
        names = list(chosen or store.tables)
        for name in names:
            if name not in store.tables:
                raise ValueError(f"{folder} has no table {name!r}: it has {list(store.tables)}")
        if arguments.dtype is not None:
            dtypes = dict.fromkeys(names, arguments.dtype) | dtypes
        if described is not None and described.normalized:
            _keep_exact(scales_name(described.table), names, chosen, dtypes)
        tables = [store.tables[name] for name in names]
        table_sources = [TableSource(table.spec, len(table), table.reader.read_slot) for table in tables]
        written = write_export(
            target,
            UnsynchronizedTables(table_sources, store.slots),
            dtype=dtypes,
            since=since,
            version=arguments.version,
            overwrite=arguments.overwrite,
            model=model,
            extras=extras,
            threads=store.threads,
            progress=progress,
            cache=Cache(arguments.cache),
        )
    lines = [f"{arguments.output}: version {written.version}"]
    for name, table in written.tables.items():
        per_row = f" ({table.bytes / table.rows:.1f} a row)" if table.rows else ""
        lines.append(
            f"    table {name!r}: {table.rows:,} rows, {table.dropped:,} omitted, {table.bytes:,} bytes{per_row}"
        )
        if table.largest_error:
            lines.append(f"        largest weight error {table.largest_error:.3g}, rms {table.rms_error:.3g}")
    facts = {
        "directory": arguments.output,
        "version": written.version,
        "tables": {name: dataclasses.asdict(table) for name, table in written.tables.items()},
    }
    return Answer("\n".join(lines), facts)


def _store(arguments: argparse.Namespace, since: StorageDir | None) -> LocalStore:
    """Make a store with as many slots as the export that a delta is of, or as the checkpoint."""
    from shoal.export import manifest
    from shoal.models import files
    from shoal.store.local import local

    if since is None or not manifest.is_export(since):
        return files.store_for(arguments.path, threads=arguments.threads)
    return local(threads=arguments.threads, slots=manifest.read(since)[0].slots)


def _keep_exact(scales: str, names: list[str], chosen: dict[str, str], dtypes: dict[str, str]) -> None:
    """Store the scales of a normalized model as float32: they are not representable in 16 bits."""
    if chosen.get(scales) not in (None, "", "float32"):
        raise ValueError(f"--table {scales}={chosen[scales]}: the scales of a model are stored as float32")
    if scales in names:
        dtypes[scales] = "float32"
