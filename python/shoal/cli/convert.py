"""``shoal convert``: checkpoints to Parquet and back, and weights of other programs to a model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Literal

from shoal.base.machine import local_path
from shoal.base.settings import Setting
from shoal.cli.answers import Answer, naming
from shoal.cli.options import Command, Output
from shoal.config import Dir, Threads

EXAMPLES = """\
examples:
  $ shoal convert ckpt/step-1000 --output rows                  # rows/TABLE.parquet: keys, weights, state
  $ shoal convert rows --from rows --output ckpt/restored       # and back, bit for bit
  $ shoal convert ctr --output rows --weights-only
  $ vw -d day_0.vw --invert_hash ctr.txt
  $ shoal convert ctr.txt --from vw --output ctr                # a logistic regression that predicts as vw does
  $ shoal convert weights.npz --from npz --output ctr           # arrays keys and weights
"""


class Convert(Output, frozen=True, kw_only=True):
    """The options of the command."""

    path: Annotated[
        str,
        "checkpoint or model, or s3://...; with --from, a file or a directory",
        Setting(metavar="PATH", positional=True),
    ]
    output: Annotated[Dir, "directory of the Parquet files; with --from, of the checkpoint or the model, or s3://..."]
    from_: Annotated[
        Literal["rows", "vw", "npz", "parquet"] | None,
        "kind of PATH. rows: Parquet files that this command has written, which become a checkpoint; vw, npz, "
        "parquet: weights, which become a model",
    ] = None
    weights_only: Annotated[bool, "omit the optimizer state"] = False
    overwrite: Annotated[bool, "replace an existing model, checkpoint or file"] = False
    threads: Threads = None


def convert(options: Convert) -> Answer:
    """Convert in the direction of ``--from``."""
    if options.from_ == "rows":
        return _checkpoint(local_path(options.path), options.output, options)
    if options.from_ is not None:
        return _model(local_path(options.path), options.output, options)
    from shoal import checkpoint
    from shoal.models import files
    from shoal.storage.open import open_dir
    from shoal.storage.output import check_output
    from shoal.tools import convert

    source, target = open_dir(options.path), local_path(options.output)
    if source.kind() != "directory":
        raise ValueError(f"{source}: there is no such directory; for a file pass --from")
    folder, _ = files.checkpoint_in(source)
    tables = checkpoint.read_manifest(folder).tables
    names = [table.name for table in tables if table.dtype != "int64"]
    omitted = [table.name for table in tables if table.dtype == "int64"]
    if omitted and not names:
        raise ValueError(f"{source} has only tables of int64, and these files have float32: {', '.join(omitted)}")
    paths = {}
    for name in names:
        if "/" in name or name.startswith("."):
            raise ValueError(f"table {name!r}: its name cannot be the name of a file")
        paths[name] = target / f"{name}.parquet"
        check_output(paths[name], overwrite=options.overwrite)
    facts = {}
    with files.store_for(source, threads=options.threads) as store:
        store.load(folder, progress=not (options.quiet or options.json))
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".rows-", dir=target) as incomplete:  # all tables appear, or none
            for name, path in paths.items():
                with naming(str(path)):
                    rows = convert.write_parquet(
                        store.tables[name], Path(incomplete, path.name), state=not options.weights_only
                    )
                facts[name] = {"rows": rows, "file": str(path)}
            for path in paths.values():
                Path(incomplete, path.name).replace(path)
    lines = [f"{fact['file']}: {fact['rows']:,} rows" for fact in facts.values()]
    lines += [f"table {name!r} is omitted: it has int64" for name in omitted]
    return Answer("\n".join(lines), {"tables": facts, "omitted": omitted})


def _checkpoint(source: Path, target: str, options: Convert) -> Answer:
    """Write a checkpoint from tables in Parquet files."""
    from shoal.checkpoint.write import check_target
    from shoal.storage.open import open_dir
    from shoal.store.local import local
    from shoal.tools import convert

    files = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
    if not files:
        raise ValueError(f"{source} has no files NAME.parquet")
    if not all(file.is_file() for file in files):
        raise ValueError(f"{source}: there is no such file or directory")
    check_target(open_dir(target), overwrite=options.overwrite)  # before rows are read
    facts = {}
    with local(threads=options.threads) as store:
        for file in files:
            table = convert.load_parquet(store, file)
            if table.name in facts:
                raise ValueError(f"{file} contains table {table.name!r} again: choose one of the files")
            facts[table.name] = {"rows": len(table), "file": str(file)}
        store.save(target, overwrite=options.overwrite, progress=not (options.quiet or options.json))
    lines = [f"{target}: table {name!r}, {fact['rows']:,} rows" for name, fact in facts.items()]
    return Answer("\n".join(lines), {"checkpoint": target, "tables": facts})


def _model(source: Path, target: str, options: Convert) -> Answer:
    """Write a logistic regression with the weights of a file."""
    from shoal.models import BIAS_KEY, LogisticRegression
    from shoal.models import files as models_files
    from shoal.tools import convert

    models_files.check_target(target, overwrite=options.overwrite)  # before the file is read
    if options.from_ == "vw":
        keys, rows = convert.read_vw_model(source, bias_key=BIAS_KEY)
    else:
        read = convert.read_npz_rows if options.from_ == "npz" else convert.read_parquet_rows
        keys, rows = read(source)
    if not len(keys):
        raise ValueError(f"{source} has no weights")
    if rows.shape[1] != 1:
        raise ValueError(f"{source} has rows of {rows.shape[1]} weights: a logistic regression has one per key")
    with LogisticRegression() as model:
        model.table.assign(keys, rows)
        model.save(target, overwrite=options.overwrite)
    return Answer(f"{target}: {len(keys):,} weights", {"directory": target, "weights": len(keys)})


COMMANDS = (
    Command(
        "convert",
        "Convert checkpoints to Parquet and back, or the weights of other programs to a model.",
        EXAMPLES,
        Convert,
        convert,
    ),
)
