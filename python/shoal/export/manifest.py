"""The manifest of an export: its contents, with a checksum. It is written last."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.decoders import json_decoder
from shoal.base.defaults import SLOTS
from shoal.errors import CorruptionError, ShoalError, StorageError
from shoal.storage.base import MAX_JSON_BYTES, StorageDir, StoragePath
from shoal.storage.checksummed_json import UNREADABLE, decode_checksummed
from shoal.storage.open import open_dir
from shoal.storage.transaction import DataFile
from shoal.table.spec import RowRecord, TableRecord, check_table_count

MANIFEST = "manifest.json"
FORMAT = "shoal export"
_TAG = f'"format":"{FORMAT}"'.encode()
VERSION = 1
DTYPES = ("float32", "float16", "bfloat16", "int8")
FILES = ".frozen"  # suffix of data files
MAGIC = b"SHOALFRZ"
_OF_MODEL = {"kind": str, "table": str, "more_tables": list}  # the part of its description that all models have
_INDEX_BYTES = 64  # of memory for a slot of a table that has rows
_FREE_INDEX_BYTES = 256 << 20  # for any export; others have data in proportion
HEADER = (MAGIC + VERSION.to_bytes(4, "little")).ljust(64, b"\0")


class Section(msgspec.Struct, frozen=True, array_like=True):
    """The location of the rows of one slot in a data file."""

    slot: int
    file: int
    offset: int
    bytes: int
    rows: int
    homes: int
    lines: int
    reach: int
    width: int
    crc32c: int


class Extra(msgspec.Struct, frozen=True):
    """A file of the model."""

    name: str
    bytes: int
    crc32c: int


class TableEntry(RowRecord, frozen=True, kw_only=True):
    """A table's description and the locations of its rows."""

    rows: int
    dropped: int
    largest_error: float
    rms_error: float
    files: list[DataFile]
    sections: list[Section]

    def sections_of(self, file: int) -> npt.NDArray[np.uint64]:
        """Return the sections of a file in the engine's format."""
        words = [
            (s.slot, s.offset, s.bytes, s.rows, s.homes, s.lines, s.reach, s.width)
            for s in self.sections
            if s.file == file
        ]
        return np.array(words, np.uint64).reshape(-1, 8)


def make_reader(form: RowRecord, slots: int) -> _core.ExportReader:
    """Make the engine's table, still without layers."""
    return _core.ExportReader(TableRecord.of(form.spec()).native(), form.dtype, slots)


class Base(msgspec.Struct, frozen=True):
    """The base of a delta."""

    path: str
    digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The contents of an export."""

    format: str = msgspec.field(default="")
    version: int = 0
    number: int = 0
    slots: int = 0
    tables: list[TableEntry] = []
    base: Base | None = None
    model: dict[str, Any] | None = None
    extras: list[Extra] = []


_manifest = json_decoder(Manifest)


def is_export(where: StoragePath) -> bool:
    """Return whether a directory has the manifest of an export."""
    try:
        return _TAG in open_dir(where).read(MANIFEST, limit=MAX_JSON_BYTES)[:200]
    except (FileNotFoundError, StorageError):
        return False


def has_export(where: StoragePath) -> bool:
    """Return whether a directory is an export or contains exports."""
    storage_dir = open_dir(where)
    if MANIFEST in storage_dir.names():
        return is_export(storage_dir)
    return any(is_export(storage_dir.child(name)) for name in storage_dir.subdirectories_with(MANIFEST))


class Listed(NamedTuple):
    """An export of a directory of exports."""

    number: int
    digest: str


class Copies(NamedTuple):
    """The directories of one export: usually one."""

    digest: str
    directories: list[StorageDir]


Found = dict[str, tuple[str, Listed | ShoalError | None]]  # by directory: its version in storage, and what it is


def numbers(storage_dir: StorageDir, known: Found | None = None) -> Found:
    """Find the exports in a directory."""
    found: Found = {}
    for name, mark in storage_dir.subdirectories_with(MANIFEST).items():
        before, what = ("", None) if known is None else known.get(name, ("", None))
        is_known = before == mark and not isinstance(what, StorageError)
        found[name] = mark, what if is_known else _listed(storage_dir.child(name))
    return found


def _listed(storage_dir: StorageDir) -> Listed | ShoalError | None:
    """Return what a directory is; None: it is not an export; an error: it may be a damaged export."""
    try:
        raw = storage_dir.read(MANIFEST, limit=MAX_JSON_BYTES)
        if _TAG in raw[:200]:
            manifest, digest = read(storage_dir)
            return Listed(manifest.number, digest)
        head = msgspec.json.decode(raw)
        if isinstance(head, dict) and "crc32c" in head:
            decode_checksummed(raw, storage_dir.address(MANIFEST))  # of a checkpoint
    except FileNotFoundError:
        return None
    except (CorruptionError, StorageError) as error:
        return error
    except UNREADABLE as error:
        return CorruptionError(f"{storage_dir.address(MANIFEST)} is damaged: {error}")
    return None


def by_number(storage_dir: StorageDir, found: Found) -> dict[int, Copies | CorruptionError]:
    """Return the exports of a directory by number; an error, if several have it."""
    numbered: dict[int, dict[str, str]] = {}
    for name, (_, what) in sorted(found.items()):
        if isinstance(what, Listed):
            numbered.setdefault(what.number, {})[name] = what.digest
    result: dict[int, Copies | CorruptionError] = {}
    for number, digests in numbered.items():
        first, *others = set(digests.values())
        if others:
            result[number] = CorruptionError(
                f"{' and '.join(digests)} in {storage_dir} are different exports, and each is version {number}: export "
                "the newer one again with a higher --version, or remove the other one"
            )
        else:
            result[number] = Copies(first, [storage_dir.child(name) for name in digests])
    return result


def next_number(storage_dir: StorageDir, above: int = 0) -> int:
    """Return a number for a new export.

    It is larger than ``above``, the number of a replaced export, and those of all exports in the parent directory.
    """
    known = [above]
    siblings = numbers(storage_dir.real().child(".."))
    known += [what.number for _, what in siblings.values() if isinstance(what, Listed)]  # damaged ones are ignored
    return max(known) + 1


def read(storage_dir: StorageDir, *, what: str | None = None) -> tuple[Manifest, str]:
    """Read and check the manifest of an export."""
    path = storage_dir.address(MANIFEST)
    body = storage_dir.read_checksummed(
        MANIFEST, missing="the directory is not an export, or its export was interrupted", what=what
    )
    try:
        head = msgspec.json.decode(body)
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise CorruptionError(
                f"{path} is not the manifest of an export: it begins {str(body[:60], 'utf-8', 'replace')}..."
            )
        if head.get("version") != VERSION:
            raise CorruptionError(f"{path} is of version {head.get('version')}: read it with a newer shoal")
        manifest = _manifest.decode(body)
        _check(manifest)
    except (*UNREADABLE, ValueError, TypeError) as error:
        raise CorruptionError(f"{path} cannot be read: {error}") from None
    except KeyError as error:
        raise CorruptionError(f"{path} cannot be read: its model has no {error}") from None
    return manifest, digest_of(body)


def digest_of(body: bytes) -> str:
    """Return the digest by which a delta names its base."""
    return hashlib.sha256(body).hexdigest()


def _check(manifest: Manifest) -> None:
    """Raise if a description refers to bytes outside of its files, before any file is opened or memory is allocated."""
    if manifest.slots not in SLOTS:
        raise ValueError(f"{manifest.slots} slots: the number is not a power of two from 2 to 16384")
    if manifest.number < 0:
        raise ValueError(f"a number of {manifest.number}")
    check_table_count(len(manifest.tables))
    names = [table.name for table in manifest.tables]
    if len(set(names)) != len(names):
        raise ValueError("two tables have the same name")
    if manifest.model is not None:
        for name, kind in _OF_MODEL.items():
            if not isinstance(value := manifest.model[name], kind):
                raise ValueError(f"{name} of its model is {value!r:.80}")
    for extra in manifest.extras:
        if Path(extra.name).name != extra.name:
            raise ValueError(f"{extra.name!r} is not a file name")
    files = [file for table in manifest.tables for file in table.files]
    if len({file.name for file in files}) != len(files):
        raise ValueError("two tables have the same file")
    index_bytes = _INDEX_BYTES * manifest.slots * sum(bool(table.sections) for table in manifest.tables)
    if index_bytes > _FREE_INDEX_BYTES + 16 * sum(file.bytes for file in files):
        raise ValueError(
            f"its tables have few rows, and their {manifest.slots} slots take {index_bytes} bytes of memory: export "
            "them from a store of fewer slots"
        )
    for table in manifest.tables:
        make_reader(table, manifest.slots)
        table.spec()
        for file in table.files:
            if Path(file.name).name != file.name or not file.name.endswith(FILES):
                raise ValueError(f"table {table.name!r} has a file {file.name!r}, which is not the name of a data file")
        last = -1
        for section in table.sections:
            where = f"table {table.name!r}, slot {section.slot}"
            if not last < section.slot < manifest.slots:
                raise ValueError(f"{where} comes after slot {last} of {manifest.slots}")
            last = section.slot
            if min(msgspec.structs.astuple(section)) < 0:
                raise ValueError(f"{where} has a number below 0")
            if section.file >= len(table.files):
                raise ValueError(f"{where}: there is no file {section.file}")
            if section.offset % 64 or section.offset + section.bytes > table.files[section.file].bytes:
                raise ValueError(f"{where}: its rows lie outside of their file")
        if table.rows != sum(section.rows for section in table.sections):
            raise ValueError(f"table {table.name!r}: {table.rows} rows are not the sum of its sections")
