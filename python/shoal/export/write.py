"""Writing exports: slot by slot, from the rows of a store or a checkpoint."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.progress import rows_bar
from shoal.base.scalars import plain
from shoal.errors import CorruptionError
from shoal.export import manifest as manifests
from shoal.export.cache import Cache
from shoal.export.layers import Layers, read_layers
from shoal.export.manifest import Base, Extra, Manifest, Section, TableEntry
from shoal.storage.base import StorageDir
from shoal.storage.transaction import DataFileWriter, ManifestTransaction, check_replaceable, map_in_order
from shoal.table.spec import RowRecord, TableRecord, TableSpec

_SLOTS_A_TASK = 8
_AHEAD = 2  # tasks per thread that are done ahead of the disk


_Rows: TypeAlias = tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]  # hashes, ascending, and weights
_Changes: TypeAlias = tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32], int, int, npt.NDArray[np.uint8]]


class TableSource(NamedTuple):
    """A table to be exported."""

    spec: TableSpec
    rows: int  # to be read
    read_slot: Callable[[int], _Rows]
    largest_error: float = 0.0  # of the source's weights
    rms_error: float = 0.0
    # If changes since the base are recorded, used in place of read_slot: the rows in the changed ranges, and
    # these ranges: bits, count, and their bytes (docs/checkpoint-format.md).
    read_changes: Callable[[int], _Changes] | None = None
    done: Callable[[str], None] | None = None  # called with the digest of the published export


class ExportTables(Protocol):
    """The tables of an export, local or on servers."""

    @property
    def specs(self) -> Sequence[TableSpec]:
        """Their descriptions."""

    @property
    def slots(self) -> int:
        """Number of slots of each table."""

    def know(self, base: Layers) -> bool:
        """Return whether changes since ``base`` are recorded for all tables."""

    def take(self, base: Layers | None) -> AbstractContextManager[Sequence[TableSource]]:
        """Return the sources as of now, in the order of the descriptions; called after ``base`` was read."""


class UnsynchronizedTables(NamedTuple):
    """:class:`ExportTables` that are read slot by slot while updates continue, without a record of changes."""

    sources: Sequence[TableSource]
    slots: int

    @property
    def specs(self) -> Sequence[TableSpec]:
        """Their descriptions."""
        return [table.spec for table in self.sources]

    def know(self, base: Layers) -> bool:
        """Return False: changes are not recorded."""
        return False

    def take(self, base: Layers | None) -> AbstractContextManager[Sequence[TableSource]]:
        """Return the sources."""
        return nullcontext(self.sources)


class ExportedTable(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of an exported table.

    Parameters
    ----------
    rows : int
        Number of rows in the export; in a delta, the changed ones, including removed ones.
    dropped : int
        Rows equal to their initial row, which were left out. 0 in a delta.
    bytes : int
        Size of its files.
    largest_error : float
        Largest absolute rounding error of a weight.
    rms_error : float
        Root mean square of the rounding errors.
    """

    rows: int
    dropped: int
    bytes: int
    largest_error: float
    rms_error: float


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of an export.

    Parameters
    ----------
    version : int
        The export's number.
    tables : dict of ExportedTable
        By name.
    """

    version: int
    tables: Mapping[str, ExportedTable]


def write_export(
    storage_dir: StorageDir,
    tables: ExportTables,
    *,
    dtype: str | Mapping[str, str] | None = None,
    since: StorageDir | None = None,
    version: int | None = None,
    overwrite: bool = False,
    model: dict[str, Any] | None = None,
    extras: Mapping[str, bytes] | None = None,
    threads: int = 1,
    progress: bool = False,
    cache: Cache | None = None,
) -> Exported:
    """Write an export, or a delta of another; see :meth:`shoal.Store.export`."""
    version = plain(version)
    if version is not None and (isinstance(version, bool) or not isinstance(version, int) or version < 0):
        raise ValueError(f"version must be a number from 0 on, got {version!r}")
    check_target(storage_dir, overwrite=overwrite)
    with ExitStack() as opened:
        base = None if since is None else opened.enter_context(closing(_read_base(since, tables, cache)))
        _check_request(tables.specs, tables.slots, dtype, storage_dir, since, base)
        if base is not None and since is not None:
            model = _model_of(model, tables.specs, storage_dir, since, base)
        new = opened.enter_context(ManifestTransaction(storage_dir, manifests.MANIFEST, _is_ours))
        sources = opened.enter_context(tables.take(base))
        with rows_bar("export", sum(table.rows for table in sources), show=progress) as on_progress:
            saved = [
                _write_table(
                    DataFileWriter(storage_dir, f"{new.stem}-{k}", manifests.FILES, manifests.HEADER),
                    table,
                    tables.slots,
                    _described(table.spec, dtype, base),
                    base,
                    threads,
                    on_progress,
                )
                for k, table in enumerate(sources)
            ]
        described = [_write_extra(storage_dir, f"{new.stem}-{name}", data) for name, data in (extras or {}).items()]
        body = msgspec.json.encode(
            Manifest(
                format=manifests.FORMAT,
                version=manifests.VERSION,
                number=manifests.next_number(storage_dir, 0 if base is None else base.number)
                if version is None
                else version,
                slots=tables.slots,
                tables=saved,
                base=None if base is None or since is None else _base_of(storage_dir, since, base),
                model=model,
                extras=described,
            )
        )
        new.publish(body)
        for table in sources:
            if table.done is not None:
                table.done(manifests.digest_of(body))
    manifest = msgspec.json.decode(body, type=Manifest)
    return Exported(version=manifest.number, tables={table.name: _told(table) for table in saved})


def _read_base(since: StorageDir, tables: ExportTables, cache: Cache | None) -> Layers:
    """Map the base of a delta; it is read and checked in full unless the tables have recorded the changes since it."""
    # Tables that have recorded the changes wrote the base themselves, from checked layers.
    base = read_layers(since, verify=False, cache=cache)
    if tables.know(base):
        return base
    base.close()
    return read_layers(since, cache=cache)


def check_target(storage_dir: StorageDir, *, overwrite: bool) -> None:
    """Raise ValueError if an export may not be written to a directory; nothing is changed."""
    check_replaceable(
        storage_dir, manifests.MANIFEST, "an export", _is_ours, overwrite=overwrite, form=manifests.FORMAT
    )


def _is_ours(name: str) -> bool:
    """Whether a file name has the form of an export's data file: eight random digits first."""
    return len(name) > 9 and name[8] == "-" and not set(name[:8]) - set("0123456789abcdef")


def _told(table: TableEntry) -> ExportedTable:
    return ExportedTable(
        rows=table.rows,
        dropped=table.dropped,
        bytes=sum(file.bytes for file in table.files),
        largest_error=table.largest_error,
        rms_error=table.rms_error,
    )


def _check_request(
    specs: Sequence[TableSpec],
    slots: int,
    dtype: str | Mapping[str, str] | None,
    storage_dir: StorageDir,
    since: StorageDir | None,
    base: Layers | None,
) -> None:
    names = [spec.name for spec in specs]
    for spec in specs:
        if spec.is_integer:
            raise ValueError(
                f"table {spec.name!r} has int64, and exports have weights: name the tables to export (tables=, or "
                "--table), and save() this one"
            )
    if isinstance(dtype, Mapping):
        for name in dtype:
            if name not in names:
                raise ValueError(f"dtype names a table {name!r}, which is not exported: {names} are")
    for one in dtype.values() if isinstance(dtype, Mapping) else [] if dtype is None else [dtype]:
        if one not in manifests.DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(manifests.DTYPES)}, got {one!r}")
    if base is None or since is None:
        return
    if storage_dir.is_same(since):
        raise ValueError(f"a delta based on {since} needs another directory, got the same")
    if base.slots != slots:
        raise ValueError(
            f"{since} was exported from a store of {base.slots} slots, this one has {slots}: write a full export, "
            "without since="
        )
    for spec in specs:
        known = base.tables.get(spec.name)
        if known is None:
            continue
        there, now = known.description(), _described(spec, dtype, base)
        if there != now:
            fields = there.differing(now)
            raise ValueError(
                f"table {spec.name!r} of {since} has {there.values(fields)}, now it has {now.values(fields)}: write a "
                "full export, without since="
            )
    storage_dir.path_to(since)  # raises if there is no relative path


def _model_of(
    model: dict[str, Any] | None, specs: Sequence[TableSpec], storage_dir: StorageDir, since: StorageDir, base: Layers
) -> dict[str, Any] | None:
    """Return the description of the model of a delta: the given one, or that of its base."""
    if model is None and base.model is not None:
        model, parts = base.model, ["dense part"] * bool(base.extras)
        if model.get("calibration") is not None:
            parts.append("calibration")
        if parts:
            raise ValueError(
                f"{since} has a model with a {' and a '.join(parts)}, which new rows do not match: call "
                f"model.export, or save the model and export its directory (shoal export MODEL --output {storage_dir} "
                f"--since {since})"
            )
    names = {spec.name for spec in specs}
    if model is not None and (left_out := [name for name in base.tables if name not in names]):
        raise ValueError(
            f"the export leaves out {', '.join(map(repr, left_out))}, and a model predicts with tables of one moment: "
            f"export all tables of {since}"
        )
    return model


def _described(spec: TableSpec, dtype: str | Mapping[str, str] | None, base: Layers | None) -> RowRecord:
    """Return the description of an exported table."""
    form = TableRecord.of(spec)
    if isinstance(dtype, str):
        return form.description(dtype)
    if dtype is not None and spec.name in dtype:
        return form.description(dtype[spec.name])
    known = None if base is None else base.tables.get(spec.name)
    return form.description("float32" if known is None else known.dtype)


def _base_of(storage_dir: StorageDir, since: StorageDir, base: Layers) -> Base:
    return Base(storage_dir.real().path_to(since.real()), base.digest)


def _write_extra(storage_dir: StorageDir, name: str, data: bytes) -> Extra:
    with storage_dir.create(name) as file:
        file.write(data)
    return Extra(name, len(data), _core.crc32c(data))


def _to_write(
    table: TableSource, under: _core.ExportReader | None, slot: int
) -> tuple[int, npt.NDArray[np.uint64], npt.NDArray[np.float32]]:
    """Return the number of rows of a slot that were read, and the rows to export."""
    if under is not None and table.read_changes is not None:
        hashes, weights, bits, count, ranges = table.read_changes(slot)
        read = len(hashes)
        if count:
            try:
                hashes, weights = under.difference_in(slot, hashes, weights, bits, count, ranges)
            except ValueError as error:
                raise CorruptionError(f"table {table.spec.name!r} of the base: {error}") from None
        return read, hashes, weights
    hashes, weights = table.read_slot(slot)
    read = len(hashes)
    if under is not None:
        hashes, weights = under.difference(slot, hashes, weights)
    return read, hashes, weights


_Packed = tuple[npt.NDArray[np.uint8], tuple[int, int, int, int, int], int, tuple[float, float, float]]


def _write_table(
    writer: DataFileWriter,
    table: TableSource,
    slots: int,
    form: RowRecord,
    base: Layers | None,
    threads: int,
    on_progress: Callable[[int], None],
) -> TableEntry:
    packer = manifests.make_reader(form, slots)
    under = None if base is None else base.natives.get(form.name)

    def make(some: range) -> list[tuple[int, int, _Packed, int]]:
        made = []
        for slot in some:
            read_rows, hashes, weights = _to_write(table, under, slot)
            packed = packer.pack(slot, hashes, weights)
            made.append((slot, read_rows, packed, _core.crc32c(packed[0]) if packed[0].nbytes else 0))
        return made

    tasks = [range(first, min(first + _SLOTS_A_TASK, slots)) for first in range(0, slots, _SLOTS_A_TASK)]
    sections: list[Section] = []
    dropped, largest, squares, weights = 0, 0.0, 0.0, 0
    try:
        with ThreadPoolExecutor(threads) as pool:
            for made in map_in_order(pool, make, tasks, threads * _AHEAD):
                for slot, read_rows, (data, (rows, homes, lines, reach, width), left_out, errors), crc32c in made:
                    on_progress(read_rows)
                    dropped += left_out
                    largest = max(largest, errors[0])
                    squares += errors[1]
                    weights += (rows + left_out) * form.dim
                    if rows:
                        file, offset = writer.append(data)
                        sections.append(
                            Section(slot, file, offset, data.nbytes, rows, homes, lines, reach, width, crc32c)
                        )
        writer.finish()
    finally:
        writer.close()
    return TableEntry(
        **msgspec.structs.asdict(form),
        rows=sum(section.rows for section in sections),
        dropped=dropped,
        largest_error=table.largest_error + largest,
        rms_error=math.hypot(table.rms_error, math.sqrt(squares / weights) if weights else 0.0),
        files=writer.files,
        sections=sections,
    )
