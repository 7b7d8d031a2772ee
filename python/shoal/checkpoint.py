"""Checkpoints: all rows of a store in a directory. ``docs/checkpoint-format.md`` has the bytes.

A checkpoint is what its manifest says, and the manifest is written last and put in place by one rename. So a save that
is cut off leaves the checkpoint that was there before, or none; never half of one.
"""

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
VERSIONS = (1, 2)  # the second where a table has rules of a lifecycle: older readers would lose what they count

_MAGIC = b"SHOALSLT"
_HEADER_BYTES = 64
_ALIGNMENT = 64  # of sections and filters in their file
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


class SavedFilter(msgspec.Struct, frozen=True, array_like=True):
    """What a slot's admission has counted: a piece of a slot file, of which ``size`` bytes count."""

    slot: int
    file: int
    offset: int
    bytes: int
    size: int
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
    filters: tuple[SavedFilter, ...] = ()
    clock: int = 0


def _header(version: int) -> bytes:
    """Return the start of every slot file."""
    return (_MAGIC + version.to_bytes(4, "little")).ljust(_HEADER_BYTES, b"\0")


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

    def __init__(self, directory: Path, stem: str, version: int, *, durable: bool) -> None:
        self._directory = directory
        self._stem = stem
        self._header = _header(version)
        self._durable = durable
        self._file: BinaryIO | None = None
        self.files: list[SlotFile] = []
        self.sections: list[Section] = []
        self.filters: list[SavedFilter] = []

    def add(self, slot: int, rows: int, section: np.ndarray[Any, Any], crc32c: int) -> None:
        """Add the rows of a slot."""
        self.sections.append(Section(slot, *self._append(section), section.nbytes, rows, crc32c))

    def add_filter(self, slot: int, size: int, padded: np.ndarray[Any, Any], crc32c: int) -> None:
        """Add what a slot's admission has counted."""
        self.filters.append(SavedFilter(slot, *self._append(padded), padded.nbytes, size, crc32c))

    def _append(self, data: np.ndarray[Any, Any]) -> tuple[int, int]:
        """Write it: the number of the file, and where it stands there."""
        if self._file is None:
            name = f"{self._stem}-{len(self.files)}.slots"
            self.files.append(SlotFile(name, 0))
            self._file = (self._directory / name).open("xb")
            self._file.write(self._header)
        file, offset = len(self.files) - 1, self._file.tell()
        self._file.write(data.data)
        if self._file.tell() >= _FILE_BYTES:
            self.finish_file()
        return file, offset

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
    directory: Path,
    tables: list[Table],
    slots: int,
    threads: int,
    *,
    clock: int = 0,
    progress: bool = False,
    durable: bool = True,
) -> None:
    """Write a full checkpoint of ``tables``; see :meth:`shoal.store.Store.save`. ``clock`` is the store's.

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
            version = 2 if any(spec.has_rules for spec, _ in frozen) else 1
            writers = [_SlotWriter(directory, f"{stem}-{k}", version, durable=durable) for k in range(len(frozen))]
            saved = [
                _save_table(writer, spec, shard, slots, threads, clock, bar)
                for writer, (spec, shard) in zip(writers, frozen, strict=True)
            ]
        if durable:
            sync_directory(directory)
        body = msgspec.json.encode(Manifest(FORMAT, version, slots, saved))
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
    writer: _SlotWriter, spec: TableSpec, shard: Shard, slots: int, threads: int, clock: int, bar: Any
) -> SavedTable:
    def make(some: range) -> list[tuple[int, int, np.ndarray[Any, Any], int, int, np.ndarray[Any, Any], int]]:
        made = []
        for slot in some:
            rows, section, filter = shard.section(slot)
            padded = np.zeros(-(-filter.nbytes // _ALIGNMENT) * _ALIGNMENT, np.uint8)
            padded[: filter.nbytes] = filter
            made.append((slot, rows, section, _core.crc32c(section), filter.nbytes, padded, _core.crc32c(padded)))
        return made

    step = max(1, slots * _TASK_BYTES // max(_TASK_BYTES, shard.stats()["bytes"]))
    tasks = [range(first, min(first + step, slots)) for first in range(0, slots, step)]
    try:
        with ThreadPoolExecutor(threads) as pool:
            for made in _in_order(pool, make, tasks, threads * _AHEAD):
                for slot, rows, section, crc32c, size, padded, filter_crc32c in made:
                    if rows:
                        writer.add(slot, rows, section, crc32c)
                        bar.update(rows)
                    if size:
                        writer.add_filter(slot, size, padded, filter_crc32c)
        writer.finish_file()
    finally:
        writer.close()
    return SavedTable(
        **msgspec.structs.asdict(TableForm.of(spec)),
        step=shard.step,
        rows=sum(section.rows for section in writer.sections),
        files=writer.files,
        sections=writer.sections,
        filters=tuple(writer.filters),
        clock=shard.table_clock(clock) if spec.has_rules else 0,
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
        if not isinstance(head, dict) or head.get("format") != FORMAT or head.get("version") not in VERSIONS:
            raise CorruptionError(
                f"{path} is no checkpoint of version {VERSIONS[0]} to {VERSIONS[-1]}: load it with a newer shoal"
            )
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
    if not 0 <= table.clock < 2**32:
        raise ValueError(f"table {table.name!r} has a clock of {table.clock}")
    _check_places(slots, table, table.filters)
    for filter in table.filters:
        if not 0 < filter.size <= filter.bytes:
            raise ValueError(f"table {table.name!r}, slot {filter.slot}: a filter of {filter.size} bytes")
    _check_places(slots, table, table.sections)
    for section in table.sections:
        if section.rows < 0 or section.rows * 8 > section.bytes:
            raise ValueError(f"table {table.name!r}, slot {section.slot}: {section.rows} rows do not fit in its bytes")
    if table.step < 0:
        raise ValueError(f"table {table.name!r} has a step of {table.step}")
    if table.rows != sum(section.rows for section in table.sections):
        raise ValueError(f"table {table.name!r}: {table.rows} rows are not the sum of its sections")


def _check_places(slots: int, table: SavedTable, pieces: Sequence[Section | SavedFilter]) -> None:
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


def _check_files(directory: Path, table: SavedTable, version: int) -> None:
    header = _header(version)
    for file in table.files:
        path = directory / file.name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise CorruptionError(f"{path} is missing") from None
        if size != file.bytes:
            raise CorruptionError(f"{path} has {size} bytes instead of {file.bytes}")
        with path.open("rb") as opened:
            if opened.read(len(header)) != header:
                raise CorruptionError(f"{path} is damaged: it does not start as a slot file does")


_Piece = TypeVar("_Piece", Section, SavedFilter)


def _pieces(
    directory: Path, table: SavedTable, pieces: Sequence[_Piece], threads: int
) -> Iterator[tuple[_Piece, np.ndarray[Any, Any]]]:
    """Read sections or filters of a table, each checked against its checksum."""
    with ExitStack() as opened, ThreadPoolExecutor(threads) as pool:
        descriptors = [
            opened.enter_context((directory / file.name).open("rb", buffering=0)).fileno() for file in table.files
        ]

        def read(section: Section | SavedFilter) -> np.ndarray[Any, Any]:
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

        yield from zip(pieces, _in_order(pool, read, pieces, threads * _AHEAD), strict=True)


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
            _check_files(directory, table, manifest.version)
            for section, _ in _pieces(directory, table, table.sections, threads):
                bar.update(section.rows)
            for _ in _pieces(directory, table, table.filters, threads):
                pass
    return manifest


class Fresh(Protocol):
    """Rows of a table while they are loaded."""

    step: int

    def reserve(self, rows: list[int], /) -> None:
        """Make room for that many rows in each slot of the checkpoint's cut."""

    def restore(self, rows: int, section: np.ndarray[Any, Any], /) -> None:
        """Add the rows of a section."""

    def restore_filter(self, slots: int, slot: int, filter: np.ndarray[Any, Any], /) -> None:
        """Add what admission has counted in a slot of so many."""

    def set_clock(self, table_clock: int, store_clock: int, /) -> None:
        """Let the table's clock go on at ``table_clock``, where the store's is ``store_clock``."""


_Fresh = TypeVar("_Fresh", bound=Fresh)


@contextmanager
def _damage(directory: Path, table: SavedTable, piece: Section | SavedFilter) -> Iterator[None]:
    """Say in which file it is that the engine refuses."""
    try:
        yield
    except ValueError as error:
        path = directory / table.files[piece.file].name
        raise CorruptionError(f"{path}, slot {piece.slot}: {error}") from None


def load(
    directory: Path,
    manifest: Manifest,
    make: Callable[[TableSpec], _Fresh],
    threads: int,
    *,
    clock: int = 0,
    progress: bool = False,
) -> list[tuple[TableSpec, _Fresh]]:
    """Read what ``manifest`` names into what ``make`` makes for each table; see :meth:`shoal.store.Store.load`.

    ``clock`` is the store's.
    """
    for table in manifest.tables:
        _check_files(directory, table, manifest.version)
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
            for section, data in _pieces(directory, table, table.sections, threads):
                with _damage(directory, table, section):
                    shard.restore(section.rows, data)
                bar.update(section.rows)
            for filter, data in _pieces(directory, table, table.filters, threads):
                with _damage(directory, table, filter):
                    shard.restore_filter(manifest.slots, filter.slot, data[: filter.size])
            shard.step = table.step
            shard.set_clock(table.clock, clock)
            loaded.append((spec, shard))
    return loaded
