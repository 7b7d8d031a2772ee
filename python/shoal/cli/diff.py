"""``shoal diff``: compare two models, checkpoints or exports."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

from shoal.base.plural import counted
from shoal.base.settings import Setting
from shoal.base.streams import escape_text
from shoal.cli.answers import Answer
from shoal.cli.options import Command, Output
from shoal.cli.reading import Cache as CacheOption
from shoal.config import Number, Threads

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shoal.export import ExportTable
    from shoal.models.files import ModelFile
    from shoal.table.table import Table

EXAMPLES = """\
examples:
  $ shoal diff monday tuesday
  $ shoal diff ctr/checkpoint-* serve/ctr/7 --top 3
  $ shoal diff monday tuesday --json

Of each table: the rows that only one of the two has, those that differ, the norms of all weights and of the difference
of the rows that both have, and the largest changes, with names if these were saved (shoal train --names). Of each dense
tensor: the largest change of a value, divided by the largest absolute value in the first model. An export leaves out
rows that are equal to their initial rows.
"""


class Diff(Output, frozen=True, kw_only=True):
    """The options of the command."""

    first: Annotated[str, "model, checkpoint or export, or s3://...", Setting(metavar="A", positional=True)]
    second: Annotated[str, "the one to compare with it", Setting(metavar="B", positional=True)]
    top: Annotated[Number, "number of the largest changes to list, of each table"] = 10
    cache: CacheOption = None
    threads: Threads = None


class _Opened(NamedTuple):
    """A model, checkpoint or export: its tables, dense tensors, names and settings."""

    path: str
    kind: str
    tables: Mapping[str, Table | ExportTable]
    dense: Mapping[str, Any]
    names: Mapping[int, str]
    settings: dict[str, Any]
    examples: int | None = None
    metrics: Any = None  # of the last pass
    valid: Any = None


def diff(options: Diff) -> Answer:
    """Compare two models, checkpoints or exports."""
    with ExitStack() as opened:
        first, second = (opened.enter_context(_open(path, options)) for path in (options.first, options.second))
        settings = _different(first.settings, second.settings)
        tables = {}
        for name in dict.fromkeys([*first.tables, *second.tables]):
            one, other = first.tables.get(name), second.tables.get(name)
            tables[name] = _compared(one, other, options.top, lambda key: second.names.get(key, first.names.get(key)))
        dense = _dense(first.dense, second.dense)
    facts = {
        "first": _facts(first),
        "second": _facts(second),
        "settings": settings,
        "tables": tables,
        "dense": dense,
    }
    lines = [*_head("A", first), *_head("B", second)]
    if settings:
        width = max(map(len, settings))
        lines.append("settings that differ")
        lines += [f"    {name:<{width}}  {_short(a)} | {_short(b)}" for name, (a, b) in settings.items()]
    for name, table in tables.items():
        lines += _table_lines(name, table)
    if dense:
        lines.append("dense part: the largest change of a value, relative to the largest value in A")
        for name, found in dense.items():
            change = found.get("change")
            what = found.get("shapes") or ("was 0" if change is None else f"{100 * change:.4g} %")
            lines.append(f"    {what if isinstance(what, str) else _short(what):<11} {name}")
    return Answer("\n".join(map(escape_text, lines)), facts)


# ---- opening ---------------------------------------------------------------------------------------------------------


@contextmanager
def _open(path: str, options: Diff) -> Iterator[_Opened]:
    from shoal import checkpoint, export
    from shoal.cli.features import names_of
    from shoal.export.manifest import has_export
    from shoal.models import files
    from shoal.storage.open import open_dir

    directory = open_dir(path)
    if not files.is_model(directory) and has_export(directory):
        with export.open(path, threads=options.threads, cache=options.cache) as opened:
            version = opened.now
            model = version.model or {}
            tower = version.layers.extra("tower.pt") if "tower.pt" in version.layers.extras else None
            dense = _tensors(tower, path)
            settings = _flat({name: value for name, value in model.items() if name not in _NO_SETTINGS})
            yield _Opened(path, "export", version.tables, dense, {}, settings, model.get("examples"))
        return
    folder, described = files.checkpoint_in(directory)
    records = checkpoint.read_manifest(folder).tables
    of_tables = ("dim", "dtype", "optimizer", "params", "init", "seed", "admit", "expire")
    specs = {f"table {one.name}": {name: getattr(one, name) for name in of_tables} for one in records}
    with files.store_for(directory, threads=options.threads) as store:
        store.load(folder)
        if described is None:
            yield _Opened(path, "checkpoint", store.tables, {}, {}, _flat(specs))
            return
        last = described.history.passes[-1] if described.history.passes else None
        yield _Opened(
            path,
            described.model,
            {name: store.tables[name] for name in (described.table, *described.more_tables)},
            {} if described.tower is None else _tensors(files.read_tower(directory, described), path),
            names_of(directory, described),
            _flat({**_settings(described), **specs}),
            described.examples,
            None if last is None else last.metrics,
            None if last is None else last.valid,
        )


_NO_SETTINGS = ("examples", "calibration", "table", "more_tables")


def _settings(described: ModelFile) -> dict[str, Any]:
    from shoal.models import files

    found = {name: value for name, value in files.describe(described).items() if name not in _NO_SETTINGS}
    fits = described.history.fits
    return {**found, "seed": described.seed, "fit": dict(fits[-1].settings()) if fits else {}}


def _tensors(tower: bytes | None, path: str) -> dict[str, Any]:
    if tower is None:
        return {}
    import torch

    from shoal.torch.tower import read_tower

    state = read_tower(tower, f"the dense part of {path}")["module"]
    return {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}


def _flat(settings: Any, before: str = "") -> dict[str, Any]:
    """Return nested settings by dotted names; those of a list by the names of its members."""
    if (
        isinstance(settings, list | tuple)
        and settings
        and all(isinstance(one, dict) and "name" in one for one in settings)
    ):
        settings = {one["name"]: one for one in settings}
    if not isinstance(settings, Mapping):
        return {before: settings}
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value, f"{before}.{name}" if before else name)
    return found


# ---- comparing -------------------------------------------------------------------------------------------------------


def _different(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, of sections that both have."""
    sections = {name.partition(".")[0] for name in first} & {name.partition(".")[0] for name in second}
    names = [name for name in dict.fromkeys([*first, *second]) if name.partition(".")[0] in sections]
    pairs = {name: (first.get(name), second.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class _Sums:
    """Sums over the rows of two tables, and the rows that differ most."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.rows = self.only = self.changed = 0
        self.square = self.square_of_difference = 0.0
        self.largest: list[tuple[float, int, list[float], list[float]]] = []  # a heap

    def add(self, keys: NDArray[np.uint64], rows: Any, other: Table | ExportTable | None) -> None:
        """Add rows of the one table; ``other`` is the one to compare them with, None to count only those it lacks."""
        import numpy as np

        self.rows += len(keys)
        values = rows.astype(np.float64)
        self.square += float(np.square(values).sum())
        if other is None:
            return
        both = other.contains(keys)
        self.only += int(np.count_nonzero(~both))
        keys, values = keys[both], values[both]
        others = other.pull(keys).astype(np.float64)
        norms = np.sqrt(np.square(others - values).sum(axis=1))
        self.changed += int(np.count_nonzero(norms))
        self.square_of_difference += float(np.square(norms).sum())
        order = np.lexsort((keys, -norms))[: self.most]
        for i in order[norms[order] > 0].tolist():
            found = (float(norms[i]), -int(keys[i]), values[i].tolist(), others[i].tolist())
            (heapq.heappush if len(self.largest) < self.most else heapq.heappushpop)(self.largest, found)


def _compared(
    first: Table | ExportTable | None,
    second: Table | ExportTable | None,
    most: int,
    name_of: Callable[[int], str | None],
) -> dict[str, Any]:
    """Compare two tables, a batch of rows at a time."""
    if first is None or second is None:
        return {"only_in": "A" if second is None else "B", "rows": len(cast("Table", first or second))}
    if first.dim != second.dim:
        return {"dims": [first.dim, second.dim], "rows": [len(first), len(second)]}
    ours, theirs, only_theirs = _Sums(most), _Sums(0), 0
    for keys, rows in first.items():
        ours.add(keys, rows, second)
    for keys, rows in second.items():
        theirs.add(keys, rows, None)
        only_theirs += len(keys) - int(first.contains(keys).sum())
    norm, change = math.sqrt(ours.square), math.sqrt(ours.square_of_difference)
    return {
        "rows": [ours.rows, theirs.rows],
        "only_in_first": ours.only,
        "only_in_second": only_theirs,
        "changed": ours.changed,
        "equal": ours.rows - ours.only - ours.changed,
        "norms": [norm, math.sqrt(theirs.square)],
        "norm_of_difference": change,
        "largest": [
            {"key": -key, "name": name_of(-key), "change": size, "weights": [before, after]}
            for size, key, before, after in sorted(ours.largest, reverse=True)
        ],
    }


def _dense(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Compare dense tensors, by their names; the largest change first."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys([*first, *second]) if first and second else ():
        shapes = [list(one[name].shape) if name in one else None for one in (first, second)]
        if shapes[0] != shapes[1]:
            found[name] = {"shapes": shapes}
        elif first[name].numel():
            before, after = first[name].double(), second[name].double()
            change, size = float((after - before).abs().max()), float(before.abs().max())
            found[name] = {"change": change / size if size else (None if change else 0.0)}
    return dict(sorted(found.items(), key=lambda item: -(item[1].get("change", math.inf) or 0.0)))


# ---- showing ---------------------------------------------------------------------------------------------------------


def _facts(one: _Opened) -> dict[str, Any]:
    return {"path": one.path, "kind": one.kind, "examples": one.examples, "metrics": one.metrics, "valid": one.valid}


def _head(letter: str, one: _Opened) -> list[str]:
    examples = "" if one.examples is None else f", of {counted(one.examples, 'example')}"
    lines = [f"{letter}: {one.path}, {one.kind}{examples}"]
    lines += [] if one.metrics is None else [f"    last pass  {one.metrics}"]
    return lines + ([] if one.valid is None else [f"    valid      {one.valid}"])


def _table_lines(name: str, table: dict[str, Any]) -> list[str]:
    if "only_in" in table:
        return [f"table {name!r}: only in {table['only_in']}, {counted(table['rows'], 'row')}"]
    if "dims" in table:
        return [f"table {name!r}: dim {table['dims'][0]} in A, {table['dims'][1]} in B"]
    (rows, others), norms = table["rows"], table["norms"]
    share = f", {100 * table['norm_of_difference'] / norms[0]:.4g} % of A's" if norms[0] else ""
    lines = [
        f"table {name!r}: {counted(rows, 'row')} in A, {others:,} in B; {table['only_in_first']:,} only in A, "
        f"{table['only_in_second']:,} only in B, {table['changed']:,} changed, {table['equal']:,} equal",
        f"    norm {norms[0]:.6g} in A, {norms[1]:.6g} in B; of the difference of common rows "
        f"{table['norm_of_difference']:.6g}{share}",
    ]
    for row in table["largest"]:
        before, after = row["weights"]
        if len(before) == 1:
            moved = f"{before[0]:+.4f} to {after[0]:+.4f}"
        else:
            moved = f"norm {math.hypot(*before):.4f} to {math.hypot(*after):.4f}"
        lines.append(f"    {row['change']:<11.4f} {row['name'] or row['key']}  ({moved})")
    return lines


def _short(value: Any) -> str:
    return "none" if value is None else str(value)


COMMANDS = (Command("diff", "Compare two models, checkpoints or exports.", EXAMPLES, Diff, diff),)
