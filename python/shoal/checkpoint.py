"""Checkpoints: all rows of a store in a directory. ``docs/checkpoint-format.md`` has the bytes.

A checkpoint is what its manifest says, and the manifest is written last and put in place by one rename. So a save that
is cut off leaves the checkpoint that was there before, or none; never half of one.
"""

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import msgspec
import numpy as np
from tqdm import tqdm

from shoal import _core
from shoal.errors import CorruptionError
from shoal.sealed import make_directory, read_sealed, sync_directory, write_sealed
from shoal.table import Shard, Table, TableForm, TableSpec

__all__ = ["MANIFEST", "Manifest", "load", "read_manifest", "save", "verify"]

Item = TypeVar("Item")
Result = TypeVar("Result")

MANIFEST = "manifest.json"
FORMAT = "shoal checkpoint"
VERSION = 1

_HEADER = b"SHOALSLT" + (VERSION).to_bytes(4, "little") + bytes(52)  # the start of every slot file
_SLOT_FILES = "*.slots"
_FILE_BYTES = 1 << 30  # a slot file is closed once it is this long
_AHEAD = 4  # tasks per thread that are done ahead of the disk
_TASK_BYTES = 1 << 20  # of sections that one task makes: 1024 small ones, handed over one by one, took a third longer


class Section(msgspec.Struct, frozen=True, array_like=True):
    """The rows of one slot: a piece of a slot file."""

    slot: int
    file: int
    offset: int
    bytes: int
    rows: int
    crc32c: int


class SlotFile(msgspec.Struct, frozen=True):
    """A file of sections."""

    name: str
    bytes: int


class SavedTable(TableForm, frozen=True, kw_only=True):
    """A table's description and where its rows are."""

    step: int
    rows: int
    files: list[SlotFile]
    sections: list[Section]


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint holds."""

    format: str
    version: int
    slots: int
    tables: list[SavedTable]


def _in_order(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """Do ``work`` on the items in the pool, ``ahead`` of them before the consumer; the results in the items' order."""
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


# --- saving -------------------------------------------------------------------------------------------------------


class _SlotWriter:
    """Appends sections to slot files of one table."""

    def __init__(self, directory: Path, stem: str, *, durable: bool) -> None:
        self._directory = directory
        self._stem = stem
        self._durable = durable
        self._file: BinaryIO | None = None
        self.files: list[SlotFile] = []
        self.sections: list[Section] = []

    def add(self, slot: int, rows: int, section: np.ndarray[Any, Any], crc32c: int) -> None:
        if self._file is None:
            name = f"{self._stem}-{len(self.files)}.slots"
            self.files.append(SlotFile(name, 0))
            self._file = (self._directory / name).open("xb")
            self._file.write(_HEADER)
        offset = self._file.tell()
        self._file.write(section.data)
        self.sections.append(Section(slot, len(self.files) - 1, offset, section.nbytes, rows, crc32c))
        if self._file.tell() >= _FILE_BYTES:
            self.finish_file()

    def finish_file(self) -> None:
        if self._file is not None:
            self._file.flush()
            if self._durable:
                os.fsync(self._file.fileno())
            self.files[-1] = SlotFile(self.files[-1].name, self._file.tell())
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def save(
    directory: Path, tables: list[Table], slots: int, threads: int, *, progress: bool = False, durable: bool = True
) -> None:
    """Write a full checkpoint of ``tables``; see :meth:`shoal.store.Store.save`.

    One that is not ``durable`` is whole as long as the machine runs, and waits for no disk: for what is gone with the
    process anyway. Its directory must be there.
    """
    if durable:
        make_directory(directory)
    stem = secrets.token_hex(4)  # no file of an earlier checkpoint is touched before the new manifest is in place
    try:
        with ExitStack() as still:
            # Writers wait, so that all tables are of one moment.
            frozen = [(table.spec, still.enter_context(_frozen(table.shard))) for table in tables]
            total = sum(len(shard) for _, shard in frozen)
            bar = still.enter_context(
                tqdm(total=total, desc="save", unit=" rows", unit_scale=True, disable=not progress)
            )
            saved = [
                _save_table(directory, f"{stem}-{k}", spec, shard, slots, threads, bar, durable=durable)
                for k, (spec, shard) in enumerate(frozen)
            ]
        if durable:
            sync_directory(directory)
        body = msgspec.json.encode(Manifest(FORMAT, VERSION, slots, saved))
        write_sealed(directory / MANIFEST, body, durable=durable)
    except BaseException:
        if not _names_files_of(directory, stem):  # else the new manifest is in place, and the files are the checkpoint
            for left in directory.glob(f"{stem}-{_SLOT_FILES}"):
                left.unlink(missing_ok=True)
        raise
    used = {file.name for table in saved for file in table.files}
    for old in directory.glob(_SLOT_FILES):
        if old.name not in used:
            old.unlink(missing_ok=True)


def _names_files_of(directory: Path, stem: str) -> bool:
    try:
        manifest = read_manifest(directory)
    except CorruptionError:
        return False
    return any(file.name.startswith(stem) for table in manifest.tables for file in table.files)


@contextmanager
def _frozen(shard: Shard) -> Iterator[Shard]:
    shard.freeze()
    try:
        yield shard
    finally:
        shard.thaw()


def _save_table(
    directory: Path,
    stem: str,
    spec: TableSpec,
    shard: Shard,
    slots: int,
    threads: int,
    bar: Any,
    *,
    durable: bool,
) -> SavedTable:
    def make(some: range) -> list[tuple[int, int, np.ndarray[Any, Any], int]]:
        made = [(slot, *shard.section(slot)) for slot in some]
        return [(slot, rows, section, _core.crc32c(section)) for slot, rows, section in made]

    step = max(1, slots * _TASK_BYTES // max(_TASK_BYTES, shard.stats()["bytes"]))
    tasks = [range(first, min(first + step, slots)) for first in range(0, slots, step)]
    writer = _SlotWriter(directory, stem, durable=durable)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for made in _in_order(pool, make, tasks, threads * _AHEAD):
                for slot, rows, section, crc32c in made:
                    if rows:
                        writer.add(slot, rows, section, crc32c)
                        bar.update(rows)
        writer.finish_file()
    finally:
        writer.close()
    return SavedTable(
        **msgspec.structs.asdict(TableForm.of(spec)),
        step=shard.step,
        rows=sum(section.rows for section in writer.sections),
        files=writer.files,
        sections=writer.sections,
    )


# --- reading ------------------------------------------------------------------------------------------------------


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises
    ------
    CorruptionError
        It is missing, changed, or of a version that this one does not know.
    """
    path = directory / MANIFEST
    body = read_sealed(path, missing="this is no checkpoint, or its save was cut off")
    try:
        head = msgspec.json.decode(body)
        if not isinstance(head, dict) or head.get("format") != FORMAT or head.get("version") != VERSION:
            raise CorruptionError(f"{path} is no checkpoint of version {VERSION}: load it with a newer shoal")
        manifest = msgspec.json.decode(body, type=Manifest, strict=True)
        if manifest.slots not in {1 << bits for bits in range(1, 15)}:
            raise ValueError(f"{manifest.slots} slots are no power of two from 2 to 16384")
        if len({table.name for table in manifest.tables}) != len(manifest.tables):
            raise ValueError("two tables have one name")
        for table in manifest.tables:
            table.spec()
            _check_sections(manifest.slots, table)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise CorruptionError(f"{path} cannot be read: {error}") from None
    return manifest


def _check_sections(slots: int, table: SavedTable) -> None:
    """Refuse a description that leads outside of its files: nothing is opened or allocated by unchecked numbers."""
    for file in table.files:
        if Path(file.name).name != file.name or not file.name.endswith(_SLOT_FILES[1:]):
            raise ValueError(f"table {table.name!r} has a file {file.name!r}, which is no name of a slot file")
    last = -1
    for section in table.sections:
        if not last < section.slot < slots:
            raise ValueError(f"table {table.name!r} has rows of slot {section.slot} after slot {last} of {slots}")
        last = section.slot
        if not 0 <= section.file < len(table.files):
            raise ValueError(f"table {table.name!r}, slot {section.slot}: there is no file {section.file}")
        if min(section.offset, section.bytes, section.rows) < 0 or section.rows * 8 > section.bytes:
            raise ValueError(f"table {table.name!r}, slot {section.slot}: {section.rows} rows do not fit in its bytes")
        if section.offset + section.bytes > table.files[section.file].bytes:
            raise ValueError(f"table {table.name!r}, slot {section.slot}: its rows lie outside of their file")
    if table.step < 0:
        raise ValueError(f"table {table.name!r} has a step of {table.step}")
    if table.rows != sum(section.rows for section in table.sections):
        raise ValueError(f"table {table.name!r}: {table.rows} rows are not the sum of its sections")


def _check_files(directory: Path, table: SavedTable) -> None:
    for file in table.files:
        path = directory / file.name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise CorruptionError(f"{path} is missing") from None
        if size != file.bytes:
            raise CorruptionError(f"{path} has {size} bytes instead of {file.bytes}")
        with path.open("rb") as opened:
            if opened.read(len(_HEADER)) != _HEADER:
                raise CorruptionError(f"{path} is damaged: it does not start as a slot file does")


def _sections(directory: Path, table: SavedTable, threads: int) -> Iterator[tuple[Section, np.ndarray[Any, Any]]]:
    """Read the sections of a table, each checked against its checksum."""
    with ExitStack() as opened, ThreadPoolExecutor(threads) as pool:
        descriptors = [
            opened.enter_context((directory / file.name).open("rb", buffering=0)).fileno() for file in table.files
        ]

        def read(section: Section) -> np.ndarray[Any, Any]:
            data = bytearray(section.bytes)
            path = directory / table.files[section.file].name
            left, offset = memoryview(data), section.offset
            while left:  # one call moves at most 2 GiB
                got = os.preadv(descriptors[section.file], [left], offset)
                if got == 0:
                    raise CorruptionError(f"{path} ends within the rows of slot {section.slot}")
                left, offset = left[got:], offset + got
            if _core.crc32c(data) != section.crc32c:
                raise CorruptionError(f"{path} is damaged: the checksum of slot {section.slot} does not match")
            return np.frombuffer(data, np.uint8)

        yield from zip(table.sections, _in_order(pool, read, table.sections, threads * _AHEAD), strict=True)


def verify(directory: Path, threads: int = 1, *, progress: bool = False) -> Manifest:
    """Check every byte of a checkpoint.

    Returns
    -------
    Manifest

    Raises
    ------
    CorruptionError
        Something is missing, cut short or changed: the message names the file.
    """
    manifest = read_manifest(directory)
    total = sum(table.rows for table in manifest.tables)
    with tqdm(total=total, desc="verify", unit=" rows", unit_scale=True, disable=not progress) as bar:
        for table in manifest.tables:
            _check_files(directory, table)
            for section, _ in _sections(directory, table, threads):
                bar.update(section.rows)
    return manifest


class Fresh(Protocol):
    """Rows of a table while they are loaded."""

    step: int

    def reserve(self, rows: list[int], /) -> None:
        """Make room for that many rows in each slot of the checkpoint's cut."""

    def restore(self, rows: int, section: np.ndarray[Any, Any], /) -> None:
        """Add the rows of a section."""


_Fresh = TypeVar("_Fresh", bound=Fresh)


def load(
    directory: Path,
    manifest: Manifest,
    make: Callable[[TableSpec], _Fresh],
    threads: int,
    *,
    progress: bool = False,
) -> list[tuple[TableSpec, _Fresh]]:
    """Read what ``manifest`` names into what ``make`` makes for each table; see :meth:`shoal.store.Store.load`."""
    for table in manifest.tables:
        _check_files(directory, table)
    loaded: list[tuple[TableSpec, _Fresh]] = []
    total = sum(table.rows for table in manifest.tables)
    with tqdm(total=total, desc="load", unit=" rows", unit_scale=True, disable=not progress) as bar:
        for table in manifest.tables:
            spec = table.spec()
            shard = make(spec)
            rows = [0] * manifest.slots
            for section in table.sections:
                rows[section.slot] = section.rows
            shard.reserve(rows)
            for section, data in _sections(directory, table, threads):
                try:
                    shard.restore(section.rows, data)
                except ValueError as error:
                    path = directory / table.files[section.file].name
                    raise CorruptionError(f"{path}, slot {section.slot}: {error}") from None
                bar.update(section.rows)
            shard.step = table.step
            loaded.append((spec, shard))
    return loaded
