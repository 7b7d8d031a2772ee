"""Conversion of rows: tables to Parquet and back; Vowpal Wabbit's readable models and npz to rows.

    write_parquet(table, path)    key, weights, optimizer state and occurrences of every row
    load_parquet(store, path)     restore such a table, bit for bit
    read_parquet_rows(path)       ┐
    read_npz_rows(path)           │  keys and weights, for `Table.assign`
    read_vw_model(path)           ┘

The last three read weights only: the optimizer's state is initialized, as described for `Table.assign`.

A file that `write_parquet` wrote has the table's description in its schema's metadata, under "shoal" as JSON:

    {"version": 1, "step": count, "clock": count, "table": {...}}      the table as in a checkpoint's manifest

Threads: any number of callers.
"""

from __future__ import annotations

import os
import re
import zipfile
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.machine import local_path
from shoal.data import hash_strings
from shoal.data.record_batch import pyarrow
from shoal.storage.output import check_output, replacing
from shoal.store.description import check_same
from shoal.table.sections import MARKS, section, sighted
from shoal.table.spec import TableRecord

if TYPE_CHECKING:
    from shoal.store.local import LocalStore
    from shoal.table.arrays import Rows
    from shoal.table.spec import TableSpec
    from shoal.table.table import Table

Keys = npt.NDArray[np.uint64]

# In the head of a readable model: counts of old versions, options of new ones.
_COMBINED = re.compile(r"^[1-9]\d* (pairs|triples|interactions):.*|(?<!\S)(-q|--(quadratic|cubic|interactions))\b.*")
_PRODUCT = re.compile(r"\*[^*]*\^")  # in a name: a^x*b^y
VW_CONSTANT = 11650396  # Vowpal Wabbit's index of the bias, before it is masked to the model's bits
_ROW_GROUP = 1 << 20
_ABOUT = b"shoal"  # in a schema's metadata
_VERSION = 1


def write_parquet(table: Table, path: str | os.PathLike[str], *, state: bool = True, overwrite: bool = False) -> int:
    """Write every row of a table: key, weights, state and the data of its rules, in one column each.

    Parameters
    ----------
    table : Table
    path : path
        The file appears when it is complete.
    state : bool
        Whether to write the state and the data of rules; otherwise only ``key`` and ``weights``.
    overwrite : bool
        Whether to replace an existing file.

    Returns
    -------
    int
        Number of rows.

    Raises
    ------
    ImportError
        pyarrow is not installed (extra ``arrow``).
    ValueError
        The file exists, and ``overwrite`` is False; or it belongs to a model; or the table has integers.

    Notes
    -----
    ``key`` is uint64; the others are float32 at dim 1, else fixed-size lists of float32. ``weights`` is what
    `Table.pull` reads; state has the names of docs/optimizers.md, where FTRL's z stands for its weights. A table of a
    local store with rules also has ``count`` and ``clock`` (uint32) and ``score`` (float32), as far as its rows store
    them (docs/checkpoint-format.md). Rows are in hash order.
    """
    if table.spec.is_integer:
        raise ValueError(
            f"table {table.name!r} has int64, and these files have float32: read items(), or save() the store"
        )
    arrow = pyarrow()
    check_output(path, overwrite=overwrite)
    target = local_path(path)
    names: list[str] = []
    if state:
        names = [name for name in table.state(np.zeros(0, np.uint64)) if name != "w"]

    def type_of(width: int) -> Any:
        return arrow.float32() if width == 1 else arrow.list_(arrow.float32(), width)

    def column(rows: Rows) -> Any:
        flat = arrow.array(np.ascontiguousarray(rows).reshape(-1))
        return flat if rows.shape[1] == 1 else arrow.FixedSizeListArray.from_arrays(flat, rows.shape[1])

    shard = table.shard
    marks = {name: getattr(arrow, MARKS[name])() for name in shard.metadata_names()} if state else {}
    empty = table.state(np.zeros(0, np.uint64)) if state else {}
    fields = [("key", arrow.uint64()), ("weights", type_of(table.dim))]
    fields += [(name, type_of(empty[name].shape[1])) for name in names]
    fields += marks.items()
    clock = shard.marks_clock(table.clock) if state else 0
    description = _Description(version=_VERSION, step=table.stats().step, clock=clock, table=TableRecord.of(table.spec))
    schema = arrow.schema(
        fields,
        metadata={"table": table.name, "optimizer": str(table.optimizer), _ABOUT: msgspec.json.encode(description)},
    )
    count = 0
    with replacing(target) as temporary, arrow.parquet.ParquetWriter(temporary, schema) as writer:
        for keys, weights in table.items(_ROW_GROUP):
            more = table.state(keys) if names else {}
            arrays = [arrow.array(keys), column(weights), *(column(more[name]) for name in names)]
            if marks:
                batch = table.key_batch(keys).native  # keeps their order: it is that of the hashes
                arrays += [arrow.array(shard.metadata(batch, k).view(MARKS[name])) for k, name in enumerate(marks)]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
            count += len(keys)
    return count


def _parquet_of(path: str | os.PathLike[str]) -> Any:
    arrow = pyarrow()
    try:
        return arrow.parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{os.fspath(path)} is not a Parquet file, or is damaged: {error}") from None


def load_parquet(store: LocalStore, path: str | os.PathLike[str]) -> Table:
    """Restore a table from a file that `write_parquet` wrote with state.

    Parameters
    ----------
    store : LocalStore
        An existing table of that name gets these rows in place of its own.
    path : path

    Returns
    -------
    Table

    Raises
    ------
    ValueError
        The file does not describe a table, or was written without state; a column is missing, has another type or
        width, or has nulls or values that the table's dtype cannot represent; a key occurs twice; or the store's
        table has another description. The store is unchanged.
    ImportError
        pyarrow is not installed (extra ``arrow``).

    Notes
    -----
    The table is bit-identical to the one that was written: `Table.digest` is the same, and training continues exactly
    as it would have. Reads a million rows at a time, in any order. For a cluster: save the store, and load the
    checkpoint there.

    Where the table has rules, all rows of the file are admitted. Their counts, clocks and scores are those of the
    file's columns; without these columns, each row counts as having occurred once, now. Keys that waited for admission
    are not in the file and are counted from zero.
    """
    arrow = pyarrow()
    where = os.fspath(path)
    with _parquet_of(path) as file:
        description = _read_description(where, (file.schema_arrow.metadata or {}).get(_ABOUT))
        spec = description.table.spec()
        known = store.tables.get(spec.name)
        if known is not None:
            check_same(known.spec, spec, where)
        shard = store.new_rows(spec)
        nothing = _core.KeyBatch(np.empty(0, np.uint64), store.slots, store.workers)
        widths = {name: shard.state(nothing, k).shape[1] for k, name in enumerate(shard.columns())}
        columns = {"key": arrow.uint64()} | {
            "weights" if name == "w" else name: arrow.float32() if width == 1 else arrow.list_(arrow.float32(), width)
            for name, width in widths.items()
        }
        marks = shard.metadata_names()
        columns |= {name: getattr(arrow, MARKS[name])() for name in marks if name in file.schema_arrow.names}
        for name, kind in columns.items():
            _check_column(where, spec, file.schema_arrow, name, kind)
        shard.reserve([-(-file.metadata.num_rows // store.slots)] * store.slots)
        last = -1
        for batch in file.iter_batches(_ROW_GROUP, columns=list(columns)):
            for name in columns:
                if batch.column(name).null_count:
                    raise ValueError(f"{where}: column {name!r} holds nulls")
            cells = {name: _numbers(batch.column(name)) for name in columns}
            keys = np.ascontiguousarray(cells.pop("key"))
            hashes = _core.mix(keys)
            order = np.argsort(hashes)
            hashes = hashes[order]
            once = {name: sighted(name, len(keys), description.clock) for name in marks if name not in cells}
            is_behind = not len(hashes) or int(hashes[0]) > last  # write_parquet writes rows in hash order
            if np.any(hashes[1:] == hashes[:-1]) or not (
                is_behind or not shard.contains(_core.KeyBatch(keys, store.slots, store.workers)).any()
            ):
                raise ValueError(f"{where}: a key of table {spec.name!r} occurs twice")
            last = max(last, int(hashes[-1])) if len(hashes) else last
            try:
                rows = section(
                    spec,
                    hashes,
                    [cells[name][order] for name in cells if name not in MARKS],
                    {name: (cells | once)[name][order] for name in marks},
                )
            except ValueError as error:
                raise ValueError(f"{where}, table {spec.name!r}: {error}") from None
            shard.restore(len(hashes), rows)
    shard.step = description.step
    shard.set_clock(description.clock, store.clock)
    store.adopt([(spec, shard)])
    return store.tables[spec.name]


class _Description(msgspec.Struct, frozen=True):
    """The description of a table in a file."""

    version: int
    step: int
    table: TableRecord
    clock: int = 0  # of the table, for the occurrences of its rows


def _read_description(where: str, description: bytes | None) -> _Description:
    if description is None:
        raise ValueError(f"{where} does not describe a table: it was not written by shoal.tools.convert.write_parquet")
    try:
        found = msgspec.json.decode(description, type=_Description)
        found.table.spec()
        if not 0 <= found.clock < 2**32:
            raise ValueError(f"a clock of {found.clock}")
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ValueError(f"{where} has a description of its table that cannot be read: {error}") from None
    if found.version != _VERSION:
        raise ValueError(f"{where} is of version {found.version}: read it with a newer shoal")
    return found


def _check_column(where: str, spec: TableSpec, schema: Any, name: str, kind: Any) -> None:
    if name not in schema.names:
        raise ValueError(
            f"{where} has no column {name!r}, which table {spec.name!r} has by {type(spec.optimizer).__name__}: it was "
            "written with weights only, or changed"
        )
    found = schema.field(name).type
    if found != kind:
        raise ValueError(f"{where}: column {name!r} is {found} instead of {kind}, which table {spec.name!r} has")


def _numbers(cells: Any) -> npt.NDArray[Any]:
    """Return the numbers of a column as they are: n, or n x width."""
    width = getattr(cells.type, "list_size", 1)
    numbers: npt.NDArray[Any] = (cells.flatten() if width > 1 else cells).to_numpy(zero_copy_only=False)
    return numbers.reshape(-1, width) if width > 1 else numbers


def read_parquet_rows(path: str | os.PathLike[str], *, key: str = "key", weights: str = "weights") -> tuple[Keys, Rows]:
    """Read keys and weights of a Parquet file.

    Parameters
    ----------
    path : path
    key : str
        A column of integers; int64 is reinterpreted bit for bit.
    weights : str
        A column of numbers, or of lists of one length.

    Returns
    -------
    uint64[n], float32[n, dim]

    Raises
    ------
    ValueError
        A column is missing or has nulls, or its lists differ in length.
    ImportError
        pyarrow is not installed (extra ``arrow``).
    """
    arrow = pyarrow()
    with _parquet_of(path) as file:
        known = file.schema_arrow.names
        for name in (key, weights):
            if name not in known:
                raise ValueError(f"{os.fspath(path)} has no column {name!r}: it has {known}")
        table = file.read(columns=[key, weights])
    for name in (key, weights):
        if table.column(name).null_count:
            raise ValueError(f"{os.fspath(path)}: column {name!r} holds nulls")
    keys = table.column(key).combine_chunks()
    if not arrow.types.is_integer(keys.type):
        raise ValueError(f"{os.fspath(path)}: column {key!r} is {keys.type}: keys are integers")
    cells = table.column(weights).combine_chunks()
    dim = 1
    if arrow.types.is_nested(cells.type):
        lengths = np.unique(cells.value_lengths().to_numpy(zero_copy_only=False)) if len(cells) else np.ones(1)
        if len(lengths) != 1 or lengths[0] < 1:
            raise ValueError(
                f"{os.fspath(path)}: lists of column {weights!r} have {lengths.tolist()} numbers: not one dim"
            )
        dim = int(lengths[0])
        cells = cells.flatten()
    numbers = cells.cast(arrow.float32()).to_numpy(zero_copy_only=False).reshape(-1, dim)
    return _checked(path, _bits(keys.to_numpy(zero_copy_only=False)), numbers)


def read_npz_rows(path: str | os.PathLike[str], *, key: str = "keys", weights: str = "weights") -> tuple[Keys, Rows]:
    """Read keys and weights of an archive of NumPy arrays.

    Parameters
    ----------
    path : path
    key : str
        The name of an array of n integers; int64 is reinterpreted bit for bit.
    weights : str
        The name of an array of n numbers, or of n rows of them.

    Returns
    -------
    uint64[n], float32[n, dim]

    Raises
    ------
    ValueError
        The file is not such an archive, or the arrays do not match.
    """
    path = local_path(path)
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as _, np.load(path, allow_pickle=False) as archive:
            for name in (key, weights):
                if name not in archive:
                    raise ValueError(f"{os.fspath(path)} has no array {name!r}: it has {list(archive)}")
            keys, rows = archive[key], archive[weights]
    except zipfile.BadZipFile as error:
        raise ValueError(f"{os.fspath(path)} is not an npz file: {error}") from None
    if keys.dtype.kind not in "iu" or keys.ndim != 1 or rows.dtype.kind not in "fiu" or rows.ndim not in (1, 2):
        raise ValueError(
            f"{os.fspath(path)}: {key!r} must be integers [n] and {weights!r} numbers [n] or [n, dim], they are "
            f"{keys.dtype}{list(keys.shape)} and {rows.dtype}{list(rows.shape)}"
        )
    if len(keys) != len(rows):
        raise ValueError(f"{os.fspath(path)}: {len(keys)} keys and {len(rows)} rows of weights")
    with np.errstate(over="ignore"):  # infinite results are refused
        numbers = rows.reshape(len(rows), 1 if rows.ndim == 1 else rows.shape[1]).astype(np.float32)
    return _checked(path, _bits(keys), numbers)


def _bits(keys: npt.NDArray[Any]) -> Keys:
    wide = keys.astype(np.int64) if keys.dtype.kind == "i" else keys.astype(np.uint64)
    return np.ascontiguousarray(wide).view(np.uint64)


def _checked(path: str | os.PathLike[str], keys: Keys, rows: Rows) -> tuple[Keys, Rows]:
    if not np.isfinite(rows).all():
        raise ValueError(f"{os.fspath(path)}: {(~np.isfinite(rows)).sum()} weights are not finite in float32")
    return keys, np.ascontiguousarray(rows)


def read_vw_model(path: str | os.PathLike[str], *, bias_key: int) -> tuple[Keys, Rows]:
    """Read a readable model of Vowpal Wabbit: linear weights.

    Parameters
    ----------
    path : path
        Written by ``vw --invert_hash FILE`` (lines ``namespace^name:index:weight``) or by ``vw --readable_model FILE``
        (lines ``index:weight``).
    bias_key : int
        The key of Vowpal Wabbit's constant: `shoal.models.BIAS_KEY`, which shoal's models use for their bias.

    Returns
    -------
    uint64[n], float32[n, 1]
        With names the keys are those that `shoal.read_vw` gives to the same features, so the model predicts from the
        same files. Without names the keys are the indices, which match only data hashed in the same way.

    Raises
    ------
    ValueError
        The file is not such a model, has no weights, or has more than linear weights of single features; the message
        names the line.

    Notes
    -----
    Reads line by line, a few million a minute.
    """
    names: list[str] = []
    fields: list[str] = []
    indices: list[int] = []
    weights: list[float] = []
    constant: float | None = None
    bits: int | None = None
    named: bool | None = None
    in_weights = False
    with local_path(path).open(encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            text = line.rstrip("\n")
            where = f"{os.fspath(path)}, line {number}"
            if not in_weights:
                if number == 1 and not text.startswith("Version"):
                    raise ValueError(
                        f"{where}: a readable model of Vowpal Wabbit starts with its version: {text[:60]!r}"
                    )
                if text.startswith("bits:"):
                    bits = int(text[5:])
                if (combined := _COMBINED.search(text)) is not None:
                    raise ValueError(f"{where}: {_combined(combined[0].strip())}")
                in_weights = text == ":0"
                continue
            *name, index, weight = text.rsplit(":", 2)
            if named is None:
                named = bool(name)
            if bool(name) != named:
                raise ValueError(f"{where}: unlike the lines before it: {text[:60]!r}")
            try:
                at, value = int(index), float(weight)
            except ValueError:
                raise ValueError(
                    f"{where}: not index:weight: {text[:60]!r}; write the model without --save_resume"
                ) from None
            if (named and name[0] == "Constant") or (not named and bits is not None and at == VW_CONSTANT % 2**bits):
                constant = value
                continue
            weights.append(value)
            if named:
                if _PRODUCT.search(name[0]) is not None:
                    raise ValueError(f"{where}: {_combined(name[0])}")
                field, mark, feature = name[0].partition("^")
                fields.append(field if mark else "")
                names.append(feature if mark else name[0])
            else:
                indices.append(at)
    if not in_weights:
        raise ValueError(f"{os.fspath(path)}: no line ':0' before weights: it is not a readable model, or is truncated")
    if not weights and constant is None:
        raise ValueError(f"{os.fspath(path)}: no weights after the line ':0': the model is empty, or is truncated")
    keys = _keys_of(fields, names) if named else np.array(indices, np.uint64)
    if constant is not None:
        keys, weights = np.append(keys, np.uint64(bias_key)), [*weights, constant]
    return _checked(path, keys, np.array(weights, np.float32).reshape(-1, 1))


def _combined(what: str) -> str:
    return (
        f"the model has combined features ({what[:60]}), whose weights would match nothing: train it without them, or "
        "train here, with the pairs of namespaces as interactions"
    )


def _keys_of(fields: list[str], names: list[str]) -> Keys:
    """Return the keys that `read_vw` assigns to features."""
    keys = np.empty(len(names), np.uint64)
    grouped: dict[str, list[int]] = {}
    for at, field in enumerate(fields):
        grouped.setdefault(field, []).append(at)
    for field, places in grouped.items():
        number = int(hash_strings([field.encode("utf-8", "surrogateescape")])[0])
        some = [names[at].encode("utf-8", "surrogateescape") for at in places]
        keys[places] = hash_strings(some, field=number)
    return keys
