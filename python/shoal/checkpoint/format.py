"""The format of a checkpoint: a manifest, and the slot files that it names.

    full     all rows
    delta    what changed since another checkpoint, its base, which the manifest names by relative path and digest

A delta and its successive bases, down to a full checkpoint, form a chain: a list of entries, the full
checkpoint first. ``docs/checkpoint-format.md`` describes the bytes.

Every number of a manifest is checked before it is used to open a file or to allocate memory.

Threads: immutable.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.storage.base import StorageDir
from shoal.storage.transaction import DataFile
from shoal.table.spec import TableRecord, TableSpec

Bytes: TypeAlias = npt.NDArray[np.uint8]
MANIFEST = "manifest.json"
FORMAT = "shoal checkpoint"
# Version 2 for tables with lifecycle rules, 3 for deltas: older readers would ignore these.
VERSIONS = (1, 2, 3)
_MAGIC = b"SHOALSLT"
_HEADER_BYTES = 64
SLOT_FILE = ".slots"
_WEIGHT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
TASKS_AHEAD = 4  # tasks per thread that are done ahead of the disk
EMPTY = np.empty(0, np.uint8)


class Section(msgspec.Struct, frozen=True, array_like=True):
    """The location of the rows of one slot in a slot file."""

    slot: int
    file: int
    offset: int
    bytes: int
    rows: int
    crc32c: int


class SavedFilter(msgspec.Struct, frozen=True, array_like=True):
    """The location of a slot's admission counters in a slot file: ``size`` bytes, then padding."""

    slot: int
    file: int
    offset: int
    bytes: int
    size: int
    crc32c: int


class SavedRanges(msgspec.Struct, frozen=True, array_like=True):
    """The location of the ranges of a slot that a delta replaces: ``size`` bytes, then padding."""

    slot: int
    file: int
    offset: int
    bytes: int
    size: int
    bits: int
    count: int
    crc32c: int


AnyExtent = TypeVar("AnyExtent", Section, SavedFilter, SavedRanges)


class SavedTable(TableRecord, frozen=True, kw_only=True):
    """A table's description and the locations of its rows."""

    step: int
    rows: int
    files: list[DataFile]
    sections: list[Section]
    filters: tuple[SavedFilter, ...] = ()
    clock: int = 0
    delta: bool = False
    total: int = 0  # rows of the table, for a delta
    ranges: tuple[SavedRanges, ...] = ()

    @property
    def size(self) -> int:
        """Number of rows of the table."""
        return self.total if self.delta else self.rows


class Base(msgspec.Struct, frozen=True):
    """The base of a delta: its path relative to the delta's directory, and its digest."""

    path: str
    digest: str


def file_header(version: int) -> bytes:
    """Return the start of every slot file."""
    return (_MAGIC + version.to_bytes(4, "little")).ljust(_HEADER_BYTES, b"\0")


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The contents of a checkpoint."""

    format: str
    version: int
    slots: int
    tables: list[SavedTable]
    base: Base | None = None
    clock: int = 0  # of the store, at the snapshot


class ChainEntry(NamedTuple):
    """A checkpoint of a chain."""

    storage_dir: StorageDir
    manifest: Manifest
    digest: str

    def table(self, name: str) -> SavedTable | None:
        """Find a table by its name."""
        return next((table for table in self.manifest.tables if table.name == name), None)


Chain: TypeAlias = list[ChainEntry]


def digest_of(body: bytes) -> str:
    """Return the digest by which a delta names its base."""
    return hashlib.sha256(body).hexdigest()


def version_of(specs: Iterable[TableSpec]) -> int:
    """Return the lowest format version that describes these tables in full."""
    return 2 if any(spec.keeps_clock for spec in specs) else 1


def check_extents(slots: int, table: SavedTable) -> None:
    """Raise if a description refers to bytes outside of its files, before any file is opened or memory is allocated."""
    for file in table.files:
        if os.path.basename(file.name) != file.name or not file.name.endswith(SLOT_FILE):
            raise ValueError(f"table {table.name!r} has a file {file.name!r}, which is not the name of a slot file")
    if not 0 <= table.clock < 2**32:
        raise ValueError(f"table {table.name!r} has a clock of {table.clock}")
    _check_places(slots, table, table.filters)
    for filter in table.filters:
        if not (0 if table.delta else 1) <= filter.size <= filter.bytes:
            raise ValueError(f"table {table.name!r}, slot {filter.slot}: a filter of {filter.size} bytes")
    _check_places(slots, table, table.ranges)
    for ranges in table.ranges:
        if not 0 < ranges.size <= ranges.bytes or ranges.bits < 0 or ranges.count < 1:
            raise ValueError(f"table {table.name!r}, slot {ranges.slot}: {ranges.count} ranges of {ranges.size} bytes")
    if table.delta and not {section.slot for section in table.sections} <= {ranges.slot for ranges in table.ranges}:
        raise ValueError(f"table {table.name!r} has rows in a slot without changed ranges")
    _check_places(slots, table, table.sections)
    for section in table.sections:
        if section.rows < 0 or section.rows * (8 + _WEIGHT_BYTES[table.dtype] * table.dim) > section.bytes:
            raise ValueError(f"table {table.name!r}, slot {section.slot}: {section.rows} rows do not fit in its bytes")
    if not 0 <= table.step < 2**63:
        raise ValueError(f"table {table.name!r} has a step of {table.step}")
    if table.total < 0 or (table.total and not table.delta):
        raise ValueError(f"table {table.name!r} has {table.total} rows in all and {table.rows} here")
    if table.rows != sum(section.rows for section in table.sections):
        raise ValueError(f"table {table.name!r}: {table.rows} rows are not the sum of its sections")


def _check_places(slots: int, table: SavedTable, pieces: Sequence[Section | SavedFilter | SavedRanges]) -> None:
    last = -1
    for section in pieces:
        if not last < section.slot < slots:
            raise ValueError(f"table {table.name!r} has rows of slot {section.slot} after slot {last} of {slots}")
        last = section.slot
        if not 0 <= section.file < len(table.files):
            raise ValueError(f"table {table.name!r}, slot {section.slot}: there is no file {section.file}")
        if min(section.offset, section.bytes) < 0:
            raise ValueError(f"table {table.name!r}, slot {section.slot}: {section.bytes} bytes at {section.offset}")
        if section.offset + section.bytes > table.files[section.file].bytes:
            raise ValueError(f"table {table.name!r}, slot {section.slot}: its rows lie outside of their file")
