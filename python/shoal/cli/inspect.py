"""``shoal inspect``: describe and verify a model, a checkpoint or an export."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from shoal.base.plural import counted
from shoal.base.settings import Setting
from shoal.base.streams import escape_text
from shoal.cli.answers import Answer
from shoal.cli.options import Command, Imports, Output
from shoal.cli.reading import Cache as CacheOption
from shoal.config import Number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shoal.checkpoint.format import SavedTable
    from shoal.export.cache import Cache
    from shoal.models.files import ModelFile
    from shoal.storage.base import StorageDir
    from shoal.table.table import Table

EXAMPLES = """\
examples:
  $ shoal inspect ctr
  $ shoal inspect ctr --top 20              # the largest weights, with names if trained with --names
  $ shoal inspect ctr --row C1=68fd1e64 --row I1=3     # weights, optimizer state, last use
  $ shoal inspect ctr/checkpoint-* --json
  $ shoal inspect ctr --forecast ttl:1000 --forecast norm:0.001     # which rows a policy would remove

The command verifies the checksum of every file. Damage is reported by file name, with exit status 1.
"""

PASSES = 10  # to show; --json has all


class Inspect(Output, frozen=True, kw_only=True):
    """The options of the command."""

    path: Annotated[str, "model, checkpoint or export, or s3://...", Setting(metavar="PATH", positional=True)]
    import_: Imports = ()
    forecast: Annotated[
        tuple[str, ...],
        "count the rows that an expiry policy would remove: ttl:CLOCKS, norm:FLOOR, ...; repeatable",
        Setting(metavar="RULE", check="shoal.lifecycle:parse_expiry"),
    ] = ()
    top: Annotated[Number, "number of weights to list; of a click model rows, by their norms"] = 0
    row: Annotated[
        tuple[str, ...],
        "show the rows of a feature: COLUMN=TEXT, a column of numbers, COLUMN=TEXT * COLUMN=TEXT of two that are "
        "combined, or the number of a key; repeatable",
        Setting(metavar="FEATURE"),
    ] = ()
    cache: CacheOption = None


def inspect(options: Inspect) -> Answer:
    """Describe a model or a checkpoint, and verify every byte of it."""
    from shoal import checkpoint
    from shoal.export import manifest as exported
    from shoal.export.cache import Cache
    from shoal.models import files
    from shoal.storage.open import open_dir

    directory = open_dir(options.path)
    if exported.is_export(directory):
        if options.row or options.top:
            raise ValueError("an export has no optimizer state, and --row and --top read a model: name the model")
        return _export(directory, Cache(options.cache))
    folder, described = files.checkpoint_in(directory)
    facts: dict[str, Any] = {"directory": str(directory), "kind": "checkpoint"}
    lines: list[str] = []
    if described is not None:
        more_facts, lines = _model(directory, described)
        facts |= more_facts
        if options.top:
            facts["top"], more = (_top_rows if described.model == files.CLICK else _top)(directory, options.top)
            lines += more
    manifest = checkpoint.verify(folder)
    if manifest.base is not None:
        facts["base"] = {"path": manifest.base.path, "digest": manifest.base.digest}
        lines.append(f"{folder}: the changes since {manifest.base.path}")
    lines.append(f"{folder}: checkpoint of {counted(len(manifest.tables), 'table')} in {manifest.slots:,} slots")
    tables = []
    for table in manifest.tables:
        found, more = _table(table)
        tables.append(found)
        lines += more
    if options.row:
        facts["rows"], more = _rows(folder, described, options.row)
        lines += more
    if options.forecast:
        facts["forecast"], more = _forecast(folder, options.forecast)
        lines += more
    facts |= {"checkpoint": str(folder), "slots": manifest.slots, "tables": tables, "verified": True}
    lines.append("every checksum matches")
    return _answer(lines, facts)


def _model(directory: StorageDir, described: ModelFile) -> tuple[dict[str, Any], list[str]]:
    """Describe a model without its tables, as facts and as lines."""
    from shoal.data import columns
    from shoal.models import calibration, files

    facts: dict[str, Any] = {
        "kind": described.model,
        "trained_on": described.format,
        "schema": described.schema,
        "examples": described.examples,
        "bias": described.bias,
        "normalized": described.normalized,
        **(described.multiclass or {}),
        "calibration": described.calibration,
        "passes": described.history.passes,
        "best_pass": described.history.best_pass,
        "fits": described.history.fits,
    }
    lines = [f"{directory}: {described.model}, trained on {counted(described.examples, 'example')}"]
    lines.append(f"    format      {described.format or 'unknown'}")
    lines += [f"    {name:<11} {value}" for name, value in columns.schema_items(described.schema)]
    lines.append(f"    bias        {'yes' if described.bias else 'no'}")
    if described.multiclass is not None:
        lines += [f"    {name:<11} {value}" for name, value in described.multiclass.items()]
    if described.normalized:
        lines.append("    normalized  yes: values are divided by learned scales")
    if described.calibration is not None:
        lines.append(f"    calibrated  {calibration.from_dict(described.calibration)}")
    for fit in described.history.fits[-1:]:
        files_of = [*([fit.data] if fit.data else []), *([f"held out {fit.valid}"] if fit.valid else [])]
        if files_of:
            lines.append(f"    data        {', '.join(files_of)}")
        lines.append(f"    fit         {', '.join(f'{name} {value}' for name, value in fit.settings())}")
    passes = described.history.passes
    if len(passes) > PASSES:
        lines.append(f"    passes      {len(passes):,}, the latest:")
    progressive = {fit.first_pass for fit in described.history.fits}
    for done in passes[-PASSES:]:
        note = "" if done.number in progressive else ", of examples seen before"
        cut = "" if done.complete else " (interrupted)"
        lines.append(f"    pass {done.number:<6} {done.metrics}{note}{cut}")
        if done.valid is not None:
            lines.append(f"    {'valid':<11} {done.valid}")
    named = files.load_names(directory)
    if named is not None:
        facts["names"] = len(named)
        lines.append(f"    names       {len(named):,} features")
    return facts, lines


def _table(table: SavedTable) -> tuple[dict[str, Any], list[str]]:
    """Describe a table of a checkpoint, as facts and as lines."""
    size = sum(file.bytes for file in table.files)
    facts: dict[str, Any] = {
        "name": table.name,
        "dim": table.dim,
        "dtype": table.dtype,
        "optimizer": table.optimizer,
        "params": table.params,
        "init": table.init,
        "seed": table.seed,
        "step": table.step,
        "rows": table.rows,
        "total": table.size,
        "bytes": size,
        "files": table.files,
        "admit": table.admit,
        "expire": table.expire,
        "clock": table.clock,
    }
    spec = table.spec()
    params = ", ".join(f"{name}={value:g}" for name, value in table.params.items())
    whole = f" of {table.size:,}" if table.delta else ""
    per_row = f" ({size / table.rows:.1f} per row)" if table.rows else ""
    lines = [
        f"    table {table.name!r}: {table.rows:,} rows{whole}, dim {table.dim}, {table.dtype}, seed {table.seed}",
        f"        {table.optimizer}({params}), initial rows {table.init}, {table.step:,} pushes",
    ]
    if spec.has_rules:
        admits = f"admits {spec.admit}, " if spec.admit is not None else ""
        expires = f"removes {', '.join(map(str, spec.expire))}, " if spec.expire else ""
        lines.append(f"        {admits}{expires}at clock {table.clock:,}")
    lines.append(f"        {size:,} bytes{per_row} in {counted(len(table.files), 'file')}")
    lines += [f"            {file.name}  {file.bytes:,} bytes" for file in table.files]
    return facts, lines


def _answer(lines: list[str], facts: dict[str, Any]) -> Answer:
    """Return the answer; names come from data, and no name has a line of its own."""
    return Answer("\n".join(map(escape_text, lines)), facts)


def _export(directory: StorageDir, cache: Cache) -> Answer:
    """Describe an export and the exports that it is a delta of, and verify every byte of them."""
    from shoal.export.layers import read_layers

    layers = read_layers(directory, cache=cache)
    lines = [f"{directory}: export, version {layers.number}, in {layers.slots:,} slots"]
    of = layers.model
    if of is not None:
        lines.append(f"    model       {of['kind']}")
    chain = []
    for one in reversed(layers.mapped):
        what = "full" if one.manifest.base is None else f"delta of {one.manifest.base.path}"
        lines.append(f"    {one.storage_dir.name}: version {one.manifest.number}, {what}")
        tables = []
        for table in one.manifest.tables:
            size = sum(file.bytes for file in table.files)
            per_row = f" ({size / table.rows:.1f} per row)" if table.rows else ""
            tables.append(
                {"name": table.name, "dim": table.dim, "dtype": table.dtype, "rows": table.rows, "bytes": size}
                | {"largest_error": table.largest_error, "rms_error": table.rms_error, "dropped": table.dropped}
            )
            lines.append(f"        table {table.name!r}: {table.rows:,} rows, dim {table.dim}, {table.dtype}")
            lines.append(
                f"            {size:,} bytes{per_row}; largest weight error {table.largest_error:.3g}, "
                f"rms {table.rms_error:.3g}"
            )
        chain.append({"directory": str(one.storage_dir), "version": one.manifest.number, "tables": tables})
    lines.append("every checksum matches")
    facts = {"directory": str(directory), "kind": "export", "version": layers.number, "slots": layers.slots}
    return _answer(lines, facts | {"model": of, "layers": chain, "verified": True})


def _forecast(directory: StorageDir, rules: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Count the rows that policies would remove from each table, as facts and as lines."""
    from shoal.lifecycle import parse_expiry
    from shoal.models import files

    facts: dict[str, Any] = {}
    lines = []
    with files.store_for(directory) as store:
        store.load(directory)
        for name, table in store.tables.items():
            try:
                found = table.sweep(*map(parse_expiry, rules), dry_run=True)
            except ValueError as error:
                facts[name] = None
                lines.append(f"forecast of table {name!r}: {error}")
                continue
            facts[name] = [
                {"rule": str(dropped.rule), "rows": dropped.rows, "bytes": dropped.bytes, "share": dropped.share}
                for dropped in found.dropped
            ]
            lines += [f"forecast of table {line}" for line in str(found).splitlines()[:1]]
            lines += [f"    {line}" for line in str(found).splitlines()[1:]]
    return facts, lines


def _rows(
    folder: StorageDir, described: ModelFile | None, names: Sequence[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Read the rows of features in all tables, as facts and as lines."""
    import numpy as np

    from shoal.cli.features import keys_by
    from shoal.models import files

    key_of = keys_by(described)
    keys = [np.array([key_of(name)], np.uint64) for name in names]
    facts: list[dict[str, Any]] = []
    lines = []
    with files.store_for(folder) as store:
        store.load(folder)
        for name, key in zip(names, keys, strict=True):
            found = {table.name: _row(table, key) for table in store.tables.values() if table.contains(key)[0]}
            facts.append({"name": name, "key": int(key[0]), "tables": found})
            lines.append(f"row {name}: key {key[0]}" + ("" if found else f", in none of {', '.join(store.tables)}"))
            for table_name, row in found.items():
                lines.append(f"    table {table_name!r}: weights {_numbers(row['weights'])}")
                lines += [f"        {column:<9} {_numbers(numbers)}" for column, numbers in row["state"].items()]
                lines += [f"        {mark:<9} {value}" for mark, value in row["marks"].items()]
                if "clock" in row["marks"]:
                    lines.append(f"        of the table's clocks up to {row['clock']:,}")
    return facts, lines


def _row(table: Table, key: NDArray[np.uint64]) -> dict[str, Any]:
    """Return what a table has of a key."""
    from shoal.table.sections import MARKS

    shard = table.shard
    batch = table.key_batch(key).native
    marks = {
        name: shard.metadata(batch, k).view(MARKS[name])[0].item() for k, name in enumerate(shard.metadata_names())
    }
    return {
        "weights": table.pull(key)[0].tolist(),
        "state": {name: numbers[0].tolist() for name, numbers in table.state(key).items() if name != "w"},
        "marks": marks,
        "clock": table.clock,
    }


def _numbers(numbers: Sequence[float]) -> str:
    """Write numbers, of many their norm and the first."""
    shown = " ".join(f"{number:.6g}" for number in numbers[:_NUMBERS])
    if len(numbers) <= _NUMBERS:
        return shown
    return f"of norm {math.hypot(*numbers):.6g}, the first of {len(numbers):,}: {shown}"


_NUMBERS = 16  # to show


def _top_rows(directory: StorageDir, most: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Read the largest linear weights of a click model, or else its rows of the largest norms."""
    from shoal.cli.features import names_of
    from shoal.models import files

    with files.store_for(directory) as store:
        described = files.load(directory, store)
        names = names_of(directory, described)
        linear = [table for table in store.tables.values() if table.name == "linear" and table.dim == 1]
        table = linear[0] if linear else store.tables[described.table]
        keys, norms = table.topk(most)
        sizes = table.pull(keys)[:, 0] if linear else norms
    what = "weight" if linear else "norm"
    facts: list[dict[str, Any]] = [
        {"key": key, "name": names.get(key), "table": table.name, what: size}
        for key, size in zip(keys.tolist(), sizes.tolist(), strict=True)
    ]
    form = "<+11.4f" if linear else "<11.4f"
    lines = [f"    {fact[what]:{form}} {fact['name'] or fact['key']}" for fact in facts]
    return facts, [f"    the largest {what}s of table {table.name!r}", *lines]


def _top(directory: StorageDir, most: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Read the largest linear weights of a model, as facts and as lines."""
    from shoal import models
    from shoal.models import files

    names: Mapping[int, str] = models.load_names(directory) or {}
    with files.store_for(directory) as store:
        model = models.load(directory, store=store)
        keys, weights = model.top(most)
    facts = [
        {"key": key, "name": names.get(key), "weight": weight}
        for key, weight in zip(keys.tolist(), weights.tolist(), strict=True)
    ]
    lines = []
    for fact in facts:
        weight, of = fact["weight"], ""
        if model.is_multiclass:  # weight is a list, of which the largest is shown
            largest = max(range(model.num_classes), key=lambda k: abs(weight[k]))
            weight, of = weight[largest], f", class {model.classes_[largest]}"
        lines.append(f"    {weight:<+11.4f} {fact['name'] or fact['key']}{of}")
    return facts, lines


COMMANDS = (Command("inspect", "Describe and verify a model, a checkpoint or an export.", EXAMPLES, Inspect, inspect),)
