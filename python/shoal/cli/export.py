"""``shoal export``: write the weights of a model or a checkpoint for read-only use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import structs

from shoal.base.settings import Setting
from shoal.cli.answers import Answer, warn
from shoal.cli.options import Command, Output
from shoal.cli.reading import Cache as CacheOption
from shoal.config import Dir, Threads

if TYPE_CHECKING:
    from shoal.storage.base import StorageDir
    from shoal.store.local import LocalStore

EXAMPLES = """\
examples:
  $ shoal export ctr --output serve/ctr/1 --dtype float16
  $ shoal export ctr --output serve/ctr/2 --since serve/ctr/1      # only the changes
  $ shoal export clicks --output serve/clicks/1 --onnx             # predicts without PyTorch too
  $ shoal export ckpt/step-1000 --output serve/user --table user=int8 --table ad
  $ shoal export ctr --output s3://models/ctr/7 --since s3://models/ctr/6

`shoal.export.open` and `shoal serve` read an export; `shoal inspect` describes it. An existing export in DIR is
replaced only with --overwrite, atomically and at the end; a directory that holds anything else is never written to.
"""


class Export(Output, frozen=True, kw_only=True):
    """The options of the command."""

    path: Annotated[str, "model or checkpoint, or s3://...", Setting(metavar="MODEL", positional=True)]
    output: Annotated[Dir, "directory of the export, or s3://...; created if it does not exist"]
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "int8"] | None,
        "type of the stored weights (default: float32, or as in --since)",
    ] = None
    since: Annotated[Dir | None, "earlier export of the same model: write only the changes since"] = None
    table: Annotated[
        tuple[str, ...],
        "table to write, optionally with a dtype of its own; repeatable (default: all)",
        Setting(metavar="NAME[=DTYPE]"),
    ] = ()
    version: Annotated[int | None, "version number of the export (default: the next one)", Setting(metavar="N")] = None
    overwrite: Annotated[bool, "replace an existing export"] = False
    onnx: Annotated[bool, "write the dense part of a click model also as ONNX ('shoal[onnx]')"] = False
    cache: CacheOption = None
    threads: Threads = None


def export(options: Export) -> Answer:
    """Export a checkpoint or a model."""
    from shoal.base.fit_rows import is_progress
    from shoal.export.cache import Cache
    from shoal.export.write import TableSource, UnsynchronizedTables, check_target, write_export
    from shoal.models import files
    from shoal.models.scales import scales_name
    from shoal.storage.open import open_dir

    model: dict[str, Any] | None = None
    extras: dict[str, bytes] = {}
    folder, described = files.checkpoint_in(options.path)
    if described is not None:
        if described.model == files.CLICK and not described.click:
            warn(
                f"the module of {options.path} was not made by a configuration (shoal train ctr): shoal serve cannot "
                "rebuild it; shoal.export.open reads its tables"
            )
        model, extras = files.for_export(options.path, described)
    if options.onnx:
        extras[files.ONNX_TOWER] = _onnx_of(options.path, model, extras)
    target = open_dir(options.output)
    check_target(target, overwrite=options.overwrite)  # before rows are read
    chosen = dict(name.partition("=")[::2] for name in options.table)
    dtypes = {name: dtype for name, dtype in chosen.items() if dtype}
    progress = not (options.quiet or options.json)
    since = None if options.since is None else open_dir(options.since)
    with _store(options, since) as store:
        store.load(folder, progress=progress)
        names = list(chosen) or [
            name for name, table in store.tables.items() if not is_progress(name, is_integer=table.spec.is_integer)
        ]
        for name in names:
            if name not in store.tables:
                raise ValueError(f"{folder} has no table {name!r}: it has {list(store.tables)}")
        if options.dtype is not None:
            dtypes = dict.fromkeys(names, options.dtype) | dtypes
        if described is not None and described.normalized:
            _keep_exact(scales_name(described.table), names, chosen, dtypes)
        tables = [store.tables[name] for name in names]
        table_sources = [TableSource(table.spec, len(table), table.reader.read_slot) for table in tables]
        written = write_export(
            target,
            UnsynchronizedTables(table_sources, store.slots),
            dtype=dtypes,
            since=since,
            version=options.version,
            overwrite=options.overwrite,
            model=model,
            extras=extras,
            threads=store.threads,
            progress=progress,
            cache=Cache(options.cache),
        )
    lines = [f"{options.output}: version {written.version}"]
    for name, table in written.tables.items():
        per_row = f" ({table.bytes / table.rows:.1f} a row)" if table.rows else ""
        lines.append(
            f"    table {name!r}: {table.rows:,} rows, {table.dropped:,} omitted, {table.bytes:,} bytes{per_row}"
        )
        if table.largest_error:
            lines.append(f"        largest weight error {table.largest_error:.3g}, rms {table.rms_error:.3g}")
    facts = {
        "directory": options.output,
        "version": written.version,
        "tables": {name: structs.asdict(table) for name, table in written.tables.items()},
    }
    return Answer("\n".join(lines), facts)


def _store(options: Export, since: StorageDir | None) -> LocalStore:
    """Make a store with as many slots as the export that a delta is of, or as the checkpoint."""
    from shoal.export import manifest
    from shoal.models import files
    from shoal.store.local import local

    if since is None or not manifest.is_export(since):
        return files.store_for(options.path, threads=options.threads)
    return local(threads=options.threads, slots=manifest.read(since)[0].slots)


def _onnx_of(path: str, model: dict[str, Any] | None, extras: dict[str, bytes]) -> bytes:
    """Return the dense part of a click model as ONNX."""
    if model is None or "tower.pt" not in extras:
        what = "a checkpoint" if model is None else f"a {model['kind']}"
        raise ValueError(f"--onnx writes the dense part of a click model, and {path} is {what}: leave it out")
    try:
        from shoal.torch.config import onnx_of
    except ImportError:
        raise ValueError("click models require PyTorch: pip install 'shoal[torch]'") from None
    return onnx_of(model, extras["tower.pt"])


def _keep_exact(scales: str, names: list[str], chosen: dict[str, str], dtypes: dict[str, str]) -> None:
    """Store the scales of a normalized model as float32: they are not representable in 16 bits."""
    if chosen.get(scales) not in (None, "", "float32"):
        raise ValueError(f"--table {scales}={chosen[scales]}: the scales of a model are stored as float32")
    if scales in names:
        dtypes[scales] = "float32"


COMMANDS = (Command("export", "Write the weights of a model for serving.", EXAMPLES, Export, export),)
