"""Checkpoints: the rows of a store in a directory. ``docs/checkpoint-format.md`` has the bytes.

A checkpoint is what its manifest says, and the manifest is published last, all at once, in place of the one that was
there when the save began. So a save that is cut off leaves the checkpoint that was there before, or none; never half of
one. Of two that race for one directory one gets through, and the other is told.

A directory is a place (storage.py), of this machine or of an object store: nothing here opens a file by itself.

    full     all rows
    delta    what has changed since another checkpoint, its base, which the manifest names by its place and its digest

A delta with its base, that one's base and so on, up to a full one, are a chain: a list of links, the full one first.

    Moment       tables as they are at one moment: whoever has them writes their slot files (write_slots), and
    write        puts the manifest, which names all of them, behind; so servers may write side by side, each its slots

    History      what a chain says of a table, of all slots or of some: whoever reads these fills rows with it (fill)
    load         has rows made, filled and checked; so servers may read side by side, too
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from shoal import _core
from shoal.base.machine import cores
from shoal.errors import CorruptionError
from shoal.storage.base import FileReader, StorageDir, StoragePath
from shoal.storage.open import open_dir
from shoal.storage.transaction import PieceFile, PieceWriter, Replacement, check_replaceable, in_order
from shoal.table.shard import Snapshot
from shoal.table.spec import TableRecord, TableSpec

__all__ = [
    "MANIFEST",
    "Fresh",
    "Held",
    "History",
    "Link",
    "Manifest",
    "Moment",
    "SavedTable",
    "Taken",
    "compact",
    "fill",
    "histories",
    "joined",
    "load",
    "read_chain",
    "read_manifest",
    "snapshots",
    "verify",
    "write",
    "write_slots",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]

MANIFEST = "manifest.json"
FORMAT = "shoal checkpoint"
# The second where a table has rules of a lifecycle, the third for deltas: older readers would lose what they say.
VERSIONS = (1, 2, 3)

_MAGIC = b"SHOALSLT"
_HEADER_BYTES = 64
_ALIGNMENT = 64  # of what is in a file
SLOT_FILE = ".slots"
_AHEAD = 4  # tasks per thread that are done ahead of the disk
_TASK_BYTES = 1 << 20  # of sections that one task makes: 1024 small ones, handed over one by one, took a third longer
_NOTHING = np.empty(0, np.uint8)


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


class SavedRanges(msgspec.Struct, frozen=True, array_like=True):
    """Which parts of a slot a delta replaces: a piece of a slot file, of which ``size`` bytes count."""

    slot: int
    file: int
    offset: int
    bytes: int
    size: int
    bits: int
    count: int
    crc32c: int


class SavedTable(TableRecord, frozen=True, kw_only=True):
    """A table's description and where its rows are."""

    step: int
    rows: int
    files: list[PieceFile]
    sections: list[Section]
    filters: tuple[SavedFilter, ...] = ()
    clock: int = 0
    delta: bool = False
    total: int = 0  # rows of the table, where it is a delta
    ranges: tuple[SavedRanges, ...] = ()

    @property
    def size(self) -> int:
        """Rows that the table had."""
        return self.total if self.delta else self.rows


class Base(msgspec.Struct, frozen=True):
    """The checkpoint that a delta is of: where it is, seen from the delta's directory, and its digest."""

    path: str
    digest: str


def _header(version: int) -> bytes:
    """Return the start of every slot file."""
    return (_MAGIC + version.to_bytes(4, "little")).ljust(_HEADER_BYTES, b"\0")


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a checkpoint holds."""

    format: str
    version: int
    slots: int
    tables: list[SavedTable]
    base: Base | None = None
    clock: int = 0  # of the store, at the moment of all tables


class Link(NamedTuple):
    """A checkpoint of a chain."""

    place: StorageDir
    manifest: Manifest
    digest: str

    def table(self, name: str) -> SavedTable | None:
        """Find a table by its name."""
        return next((table for table in self.manifest.tables if table.name == name), None)


Chain: TypeAlias = list[Link]


# --- saving -------------------------------------------------------------------------------------------------------


class _Padded(NamedTuple):
    """Bytes of a file: ``size`` that count, and zeros up to a multiple of the alignment."""

    data: Bytes
    size: int
    crc32c: int

    @classmethod
    def of(cls, data: Bytes) -> Self:
        padded = np.zeros(-(-data.nbytes // _ALIGNMENT) * _ALIGNMENT, np.uint8)
        padded[: data.nbytes] = data
        return cls(padded, data.nbytes, _core.crc32c(padded))


class _Piece(NamedTuple):
    """What is to be written of a slot: of a delta only what is another than the base's."""

    slot: int
    rows: int
    section: Bytes
    crc32c: int
    filter: _Padded | None
    ranges: tuple[_Padded, int, int] | None = None  # with bits and count


class _Written:
    """What was written of one table: where each slot's pieces are."""

    def __init__(self, writer: PieceWriter) -> None:
        self.writer = writer
        self.sections: list[Section] = []
        self.filters: list[SavedFilter] = []
        self.ranges: list[SavedRanges] = []

    def add(self, piece: _Piece) -> None:
        """Write what there is of a slot."""
        slot, append = piece.slot, self.writer.append
        if piece.rows:
            at = append(piece.section)
            self.sections.append(Section(slot, *at, piece.section.nbytes, piece.rows, piece.crc32c))
        if piece.filter is not None:
            data, size, crc32c = piece.filter
            self.filters.append(SavedFilter(slot, *append(data), data.nbytes, size, crc32c))
        if piece.ranges is not None:
            (data, size, crc32c), bits, count = piece.ranges
            self.ranges.append(SavedRanges(slot, *append(data), data.nbytes, size, bits, count, crc32c))


class Taken(NamedTuple):
    """A table that is to be saved."""

    spec: TableSpec
    snapshot: Snapshot
    kind: str  # "plain", "base", "delta": see csrc/shard/snapshot.h


@contextmanager
def snapshots(
    tables: Iterable[tuple[TableSpec, _core.Shard, str]], clock: int, purpose: str = "save"
) -> Iterator[list[tuple[TableSpec, _core.Snapshot, str]]]:
    """Hold tables as they are at one moment, for which changes wait, each for its kind. ``clock`` is the store's.

    The ``purpose`` is "save" or "export": each knows what has changed since its own base alone.
    """
    with ExitStack() as held:
        with ExitStack() as still:
            shards = [(spec, still.enter_context(_frozen(shard)), kind) for spec, shard, kind in tables]
            taken = [
                (spec, held.enter_context(closing(shard.snapshot(clock, kind, purpose=purpose))), kind)
                for spec, shard, kind in shards
            ]
        yield taken


def no_base(table: str, base: Link | None) -> ValueError:
    """Make the error of a delta of which nobody knows what it has to hold."""
    return ValueError(
        f"nobody knows what has changed in table {table!r} since the save in {base and base.place}: a delta is of this "
        f"store's last save that tracked changes, or of what it loaded so; save all rows, with track=True"
    )


@contextmanager
def _frozen(shard: _core.Shard) -> Iterator[_core.Shard]:
    shard.freeze()
    try:
        yield shard
    finally:
        shard.thaw()


@dataclass(frozen=True, slots=True)
class _Job:
    """A table that is to be written."""

    form: TableRecord
    step: int
    clock: int
    rows: int  # of the table
    bytes: int  # about
    delta: bool
    make: Callable[[int], _Piece | None]  # of a slot


class Moment(Protocol):
    """Tables as they are at one moment, wherever their rows are."""

    @property
    def specs(self) -> Sequence[TableSpec]:
        """Their descriptions."""

    @property
    def clock(self) -> int:
        """The store's clock then."""

    @property
    def rows(self) -> int:
        """How many will be written, of deltas none: for a progress bar."""

    def write(
        self, place: StorageDir, stem: str, version: int, *, durable: bool, told: Callable[[int], None]
    ) -> list[SavedTable]:
        """Write slot files whose names begin with ``stem``, and tell how many rows, now and then; once."""

    def done(self, digest: str) -> None:
        """Hear that the manifest is in place, and its digest."""


class Held(NamedTuple):
    """A :class:`Moment` of this process."""

    taken: list[Taken]
    slots: int
    threads: int
    clock: int

    @property
    def specs(self) -> Sequence[TableSpec]:
        """Descriptions of the tables."""
        return [spec for spec, _, _ in self.taken]

    @property
    def rows(self) -> int:
        """How many will be written in full."""
        return sum(snapshot.rows for _, snapshot, kind in self.taken if kind != "delta")

    def write(
        self, place: StorageDir, stem: str, version: int, *, durable: bool, told: Callable[[int], None]
    ) -> list[SavedTable]:
        """Write all slots."""
        stems = [f"{stem}-{k}" for k in range(len(self.taken))]
        return write_slots(
            place, stems, version, self.taken, range(self.slots), self.threads, durable=durable, told=told
        )

    def done(self, digest: str) -> None:
        """Let the tables know what they were saved as."""
        for _, snapshot, _ in self.taken:
            snapshot.done(digest)


def write(
    place: StorageDir,
    moment: Moment,
    slots: int,
    *,
    base: Link | None = None,
    progress: bool = False,
    durable: bool = True,
) -> None:
    """Write a checkpoint of one moment; see :meth:`shoal.Store.save`.

    One that is not ``durable`` is whole as long as the machine runs, and waits for no disk: for what is gone with the
    process anyway.
    """
    version = 3 if base is not None else _version(moment.specs)
    named = None if base is None else Base(place.path_to(base.place), base.digest)

    def save(stem: str, told: Callable[[int], None]) -> list[SavedTable]:
        return moment.write(place, stem, version, durable=durable, told=told)

    about = Manifest(FORMAT, version, slots, [], named, moment.clock)
    moment.done(_write(place, about, save, moment.rows, progress=progress, durable=durable))


def write_slots(
    place: StorageDir,
    stems: Sequence[str],
    version: int,
    taken: Sequence[Taken],
    slots: range,
    threads: int,
    *,
    durable: bool,
    told: Callable[[int], None],
) -> list[SavedTable]:
    """Write slot files of some slots of some tables.

    Parameters
    ----------
    place : StorageDir
    stems : sequence of str
        What the names of each table's files begin with.
    version : int
        The manifest's.
    taken : sequence of Taken
    slots : range
    threads : int
        That take slots; one writes.
    durable : bool
        Whether to wait for the disk.
    told : callable
        Is told how many rows were written, now and then. What it raises ends the work.

    Returns
    -------
    list of SavedTable
        Each with the rows of these slots alone.

    Raises
    ------
    StorageError
        A file cannot be written.
    SnapshotLostError
        The moment could not be kept.
    """
    return _write_jobs(place, stems, version, [_job(*one) for one in taken], slots, threads, durable=durable, told=told)


def _write_jobs(
    place: StorageDir,
    stems: Sequence[str],
    version: int,
    jobs: Sequence[_Job],
    slots: range,
    threads: int,
    *,
    durable: bool,
    told: Callable[[int], None],
) -> list[SavedTable]:
    header = _header(version)
    saved = []
    for stem, job in zip(stems, jobs, strict=True):
        writer = PieceWriter(place, stem, SLOT_FILE, header, durable=durable, cached=False)
        saved.append(_save_table(writer, job, slots, threads, told))
    return saved


def joined(parts: Sequence[Sequence[SavedTable]]) -> list[SavedTable]:
    """Put together what was written of the same tables side by side: parts of disjoint slots, in their order."""
    return [_join(tables) for tables in zip(*parts, strict=True)]


_Located = TypeVar("_Located", Section, SavedFilter, SavedRanges)


def _behind(files: int, piece: _Located) -> _Located:
    return msgspec.structs.replace(piece, file=piece.file + files)


def _join(parts: Sequence[SavedTable]) -> SavedTable:
    files: list[PieceFile] = []
    sections: list[Section] = []
    filters: list[SavedFilter] = []
    ranges: list[SavedRanges] = []
    for part in parts:
        behind = partial(_behind, len(files))
        files += part.files
        sections += map(behind, part.sections)
        filters += map(behind, part.filters)
        ranges += map(behind, part.ranges)
    return msgspec.structs.replace(
        parts[0],
        step=max(part.step for part in parts),
        rows=sum(part.rows for part in parts),
        files=files,
        sections=sections,
        filters=tuple(filters),
        total=sum(part.total for part in parts),
        ranges=tuple(ranges),
    )


def _job(spec: TableSpec, snapshot: Snapshot, kind: str) -> _Job:
    return _Job(
        TableRecord.of(spec),
        snapshot.step,
        snapshot.table_clock if spec.keeps_clock else 0,
        snapshot.rows,
        snapshot.bytes,
        kind == "delta",
        partial(_changes if kind == "delta" else _all, snapshot),
    )


def _version(specs: Iterable[TableSpec]) -> int:
    return 2 if any(spec.keeps_clock for spec in specs) else 1


def _all(snapshot: Snapshot, slot: int) -> _Piece:
    rows, section, filter = snapshot.section(slot)
    return _Piece(slot, rows, section, _core.crc32c(section), _Padded.of(filter) if filter.nbytes else None)


def _changes(snapshot: Snapshot, slot: int) -> _Piece:
    rows, section, filter, bits, count, ranges = snapshot.changes(slot)
    return _Piece(
        slot,
        rows,
        section,
        _core.crc32c(section),
        None if filter is None else _Padded.of(filter),
        (_Padded.of(ranges), bits, count) if count else None,
    )


def _write(
    place: StorageDir,
    about: Manifest,
    save: Callable[[str, Callable[[int], None]], list[SavedTable]],
    rows: int,
    *,
    progress: bool,
    durable: bool,
) -> str:
    """Write a checkpoint, its tables by ``save(stem, told)``, and return its digest."""
    with Replacement(place, MANIFEST, _is_ours, durable=durable) as new:
        with tqdm(total=rows or None, desc="save", unit=" rows", unit_scale=True, disable=not progress) as bar:
            saved = save(new.stem, bar.update)
        body = msgspec.json.encode(msgspec.structs.replace(about, tables=saved))
        new.publish(body)
    return _digest(body)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _save_table(writer: PieceWriter, job: _Job, slots: range, threads: int, told: Callable[[int], None]) -> SavedTable:
    def make(some: range) -> list[_Piece]:
        return [piece for piece in map(job.make, some) if piece is not None]

    step = max(1, len(slots) * _TASK_BYTES // max(_TASK_BYTES, job.bytes))
    tasks = [slots[first : first + step] for first in range(0, len(slots), step)]
    written = _Written(writer)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for made in in_order(pool, make, tasks, threads * _AHEAD):
                for piece in made:
                    written.add(piece)
                told(sum(piece.rows for piece in made))
        writer.finish()
    finally:
        writer.close()
    return SavedTable(
        **msgspec.structs.asdict(job.form),
        step=job.step,
        rows=sum(section.rows for section in written.sections),
        files=writer.files,
        sections=written.sections,
        filters=tuple(written.filters),
        clock=job.clock,
        delta=job.delta,
        total=job.rows if job.delta else 0,
        ranges=tuple(written.ranges),
    )


# --- reading ------------------------------------------------------------------------------------------------------


def read_manifest(where: StoragePath) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises
    ------
    CorruptionError
        It is missing, changed, or of a version that this one does not know.
    """
    return _read(open_dir(where), "this is no checkpoint, or its save was cut off", "checkpoint").manifest


def read_chain(where: StoragePath, options: Mapping[str, Any] | None = None) -> Chain:
    """Read and check the manifests of a checkpoint and of all that it is a delta of.

    Returns
    -------
    list of Link
        The full one first, that of ``where`` last.

    Raises
    ------
    CorruptionError
        One is missing, changed, or another than the one that the next was made of.
    """
    chain = [_read(open_dir(where, options), "this is no checkpoint, or its save was cut off", "checkpoint")]
    while (base := chain[0].manifest.base) is not None:
        link = chain[0]
        found = _read(link.place.child(base.path), f"the delta in {link.place} is of this one")
        if found.digest != base.digest:
            raise CorruptionError(
                f"{found.place} is not the checkpoint that {link.place} is a delta of: its digest is "
                f"{found.digest} instead of {base.digest}"
            )
        if found.manifest.slots != link.manifest.slots:
            raise CorruptionError(
                f"{link.place} has {link.manifest.slots} slots, and {found.place}, which it is a delta of, "
                f"{found.manifest.slots}"
            )
        for table in link.manifest.tables:
            known = found.table(table.name)
            if table.delta and (known is None or known.spec() != table.spec()):
                raise CorruptionError(
                    f"{link.place} has a delta of table {table.name!r}, which {found.place} does not have so"
                )
        chain.insert(0, found)
    return chain


def _read(place: StorageDir, missing: str, what: str | None = None) -> Link:
    path = place.address(MANIFEST)
    body = place.read_sealed(MANIFEST, missing=missing, what=what)
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
        if manifest.version < 3 and manifest.base is not None:
            raise ValueError(f"a checkpoint of version {manifest.version} has a base")
        for table in manifest.tables:
            table.spec()
            if manifest.base is None and (table.delta or table.ranges):
                raise ValueError(f"table {table.name!r} is a delta of nothing")
            _check_sections(manifest.slots, table)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise CorruptionError(f"{path} cannot be read: {error}") from None
    return Link(place, manifest, _digest(body))


def _check_sections(slots: int, table: SavedTable) -> None:
    """Refuse a description that leads outside of its files: nothing is opened or allocated by unchecked numbers."""
    for file in table.files:
        if os.path.basename(file.name) != file.name or not file.name.endswith(SLOT_FILE):
            raise ValueError(f"table {table.name!r} has a file {file.name!r}, which is no name of a slot file")
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
        raise ValueError(f"table {table.name!r} has rows of a slot of which no range has changed")
    _check_places(slots, table, table.sections)
    for section in table.sections:
        if section.rows < 0 or section.rows * 8 > section.bytes:
            raise ValueError(f"table {table.name!r}, slot {section.slot}: {section.rows} rows do not fit in its bytes")
    if table.step < 0:
        raise ValueError(f"table {table.name!r} has a step of {table.step}")
    if table.total < 0 or (table.total and not table.delta):
        raise ValueError(f"table {table.name!r} has {table.total} rows beside its {table.rows}")
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


def _check_files(place: StorageDir, table: SavedTable, version: int) -> None:
    header = _header(version)
    for file in table.files:
        path = place.address(file.name)
        try:
            with place.open(file.name) as opened:
                if opened.size != file.bytes:
                    raise CorruptionError(f"{path} has {opened.size} bytes instead of {file.bytes}")
                start = bytearray(len(header))
                if opened.read_into(memoryview(start), 0) != len(header) or start != header:
                    raise CorruptionError(f"{path} is damaged: it does not start as a slot file does")
        except FileNotFoundError:
            raise CorruptionError(f"{path} is missing") from None


class _Reader:
    """Reads pieces of a table's files, each checked against its checksum. Any number of threads."""

    def __init__(self, place: StorageDir, table: SavedTable) -> None:
        self.table = table
        self._place = place
        self._opened = ExitStack()
        self._files: list[FileReader] = []

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            self._files = [opened.enter_context(self._place.open(file.name)) for file in self.table.files]
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def read(self, piece: Section | SavedFilter | SavedRanges) -> Bytes:
        data = bytearray(piece.bytes)
        path = self.path(piece)
        if self._files[piece.file].read_into(memoryview(data), piece.offset) < piece.bytes:
            raise CorruptionError(f"{path} ends within the rows of slot {piece.slot}")
        if _core.crc32c(data) != piece.crc32c:
            raise CorruptionError(f"{path} is damaged: the checksum of slot {piece.slot} does not match")
        return np.frombuffer(data, np.uint8)

    def path(self, piece: Section | SavedFilter | SavedRanges) -> str:
        return self._place.address(self.table.files[piece.file].name)

    @contextmanager
    def damage(self, piece: Section | SavedFilter | SavedRanges) -> Iterator[None]:
        """Say in which file it is that the engine refuses."""
        try:
            yield
        except ValueError as error:
            raise CorruptionError(f"{self.path(piece)}, slot {piece.slot}: {error}") from None


def _by_slot(pieces: Iterable[_Located]) -> dict[int, _Located]:
    return {piece.slot: piece for piece in pieces}


class History:
    """A table of a chain: the full save of it, and its deltas. A context manager that holds the files open."""

    def __init__(self, chain: Chain, name: str) -> None:
        readers: list[_Reader] = []
        for link in reversed(chain):
            table = link.table(name)
            assert table is not None, "read_chain has looked"
            _check_files(link.place, table, link.manifest.version)
            readers.insert(0, _Reader(link.place, table))
            if not table.delta:
                break
        self.last = readers[-1].table
        self.first = readers[0].table
        self.cut = chain[0].manifest.slots
        self._readers = readers
        self._opened = ExitStack()
        self._sections = [_by_slot(reader.table.sections) for reader in readers]
        self._ranges = [_by_slot(reader.table.ranges) for reader in readers]
        # The newest that there is of a slot.
        self.filters = {filter.slot: (reader, filter) for reader in readers for filter in reader.table.filters}
        self.slots = sorted(set().union(*self._sections))
        self._layout = self.last.spec().shard(2, _core.Workers(1))  # which knows what rows look like

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            for reader in self._readers:
                opened.enter_context(reader)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def section(self, slot: int) -> tuple[int, Bytes]:
        """Read the rows of a slot as they were at the last save."""
        rows, data = 0, _NOTHING
        for reader, sections, changed in zip(self._readers, self._sections, self._ranges, strict=True):
            piece = sections.get(slot)
            fresh_rows, fresh = (0, _NOTHING) if piece is None else (piece.rows, reader.read(piece))
            if not reader.table.delta:
                rows, data = fresh_rows, fresh
            elif slot in changed:
                ranges = changed[slot]
                named = reader.read(ranges)[: ranges.size]
                with reader.damage(piece or ranges):
                    rows, data = self._layout.merge(
                        self.cut, rows, data, fresh_rows, fresh, ranges.bits, ranges.count, named
                    )
        return rows, data

    def filter(self, slot: int) -> Bytes:
        """Read what admission had counted in a slot then."""
        if slot not in self.filters:
            return _NOTHING
        reader, filter = self.filters[slot]
        return reader.read(filter)[: filter.size]

    @contextmanager
    def damage(self, slot: int) -> Iterator[None]:
        """Say in which file it is that the engine refuses: of the newest that has rows of the slot."""
        for reader, sections in zip(reversed(self._readers), reversed(self._sections), strict=True):
            if slot in sections:
                with reader.damage(sections[slot]):
                    yield
                return


def verify(where: StoragePath, threads: int = 1, *, progress: bool = False) -> Manifest:
    """Check every byte of a checkpoint, and of those that it is a delta of.

    Returns
    -------
    Manifest

    Raises
    ------
    CorruptionError
        Something is missing, cut short or changed: the message names the file.
    """
    chain = read_chain(where)
    total = sum(table.rows for link in chain for table in link.manifest.tables)
    with tqdm(total=total, desc="verify", unit=" rows", unit_scale=True, disable=not progress) as bar:
        for link in chain:
            for table in link.manifest.tables:
                _check_files(link.place, table, link.manifest.version)
                pieces: list[Section | SavedFilter | SavedRanges] = [*table.sections, *table.filters, *table.ranges]
                with _Reader(link.place, table) as reader, ThreadPoolExecutor(threads) as pool:
                    for piece, _ in zip(pieces, in_order(pool, reader.read, pieces, threads * _AHEAD), strict=True):
                        bar.update(piece.rows if isinstance(piece, Section) else 0)
    return chain[-1].manifest


class Filled(Protocol):
    """Rows of a table that sections are restored into: of all slots, or of some."""

    def restore(self, rows: int, section: Bytes, /) -> int:
        """Add the rows of a section that belong here: how many they are."""

    def restore_filter(self, slots: int, slot: int, filter: Bytes, /) -> None:
        """Add what admission has counted in a slot of so many."""


class Fresh(Filled, Protocol):
    """Rows of a table while they are loaded."""

    step: int

    def reserve(self, rows: list[int], /) -> None:
        """Make room for that many rows in each slot of the checkpoint's cut."""

    def set_clock(self, table_clock: int, store_clock: int, /) -> None:
        """Let the table's clock go on at ``table_clock``, where the store's is ``store_clock``."""


_Fresh = TypeVar("_Fresh", bound=Fresh)


def load(
    chain: Chain,
    make: Callable[[TableSpec], _Fresh],
    threads: int,
    *,
    clock: int = 0,
    progress: bool = False,
    filled: Callable[[list[_Fresh], Callable[[int], None]], list[int]] | None = None,
) -> list[tuple[TableSpec, _Fresh]]:
    """Read the tables of a chain's last link into what ``make`` makes for each; see :meth:`shoal.Store.load`.

    ``clock`` is the store's. Others than this process may read the rows: ``filled`` is given what was made, and whom to
    tell how many rows, now and then; it returns how many each table got.
    """
    manifest = chain[-1].manifest
    known = histories(chain)
    loaded = [(spec, make(spec)) for spec in (table.spec() for table in manifest.tables)]
    shards = [shard for _, shard in loaded]
    for history, shard in zip(known, shards, strict=True):
        rows = [0] * manifest.slots
        for section in history.first.sections:
            rows[section.slot] = section.rows
        shard.reserve(rows)
    total = sum(table.size for table in manifest.tables)
    with tqdm(total=total, desc="load", unit=" rows", unit_scale=True, disable=not progress) as bar:
        found = fill(known, shards, threads, bar.update) if filled is None else filled(shards, bar.update)
    for table, shard, count in zip(manifest.tables, shards, found, strict=True):
        if count != table.size:
            raise CorruptionError(
                f"{chain[-1].place}: table {table.name!r} comes to {count} rows instead of {table.size}"
            )
        shard.step = table.step
        shard.set_clock(table.clock, clock)
    return loaded


def histories(chain: Chain, some: range | None = None, slots: int = 1) -> list[History]:
    """Find the files of a chain's tables, those of its last link: all, or what concerns ``some`` of so many slots.

    Raises
    ------
    CorruptionError
        One is missing, or is not what the manifest says.
    """
    if some is not None:
        cut = chain[-1].manifest.slots
        mine = range(some.start * cut // slots, -(-some.stop * cut // slots))
        chain = [_part_of(link, mine) for link in chain]
    return [History(chain, table.name) for table in chain[-1].manifest.tables]


def _part_of(link: Link, slots: range) -> Link:
    tables = [_only(table, slots) for table in link.manifest.tables]
    return link._replace(manifest=msgspec.structs.replace(link.manifest, tables=tables))


def _only(table: SavedTable, slots: range) -> SavedTable:
    """Leave out what is of other slots, and files that hold nothing else."""
    pieces = (table.sections, table.filters, table.ranges)
    used = sorted({piece.file for kind in pieces for piece in kind if piece.slot in slots})
    number = {file: k for k, file in enumerate(used)}

    def kept(some: Iterable[_Located]) -> list[_Located]:
        return [msgspec.structs.replace(piece, file=number[piece.file]) for piece in some if piece.slot in slots]

    sections = kept(table.sections)
    return msgspec.structs.replace(
        table,
        rows=sum(section.rows for section in sections),
        files=[table.files[file] for file in used],
        sections=sections,
        filters=tuple(kept(table.filters)),
        ranges=tuple(kept(table.ranges)),
    )


def fill(
    histories: Sequence[History], tables: Sequence[Filled], threads: int, told: Callable[[int], None]
) -> list[int]:
    """Read the rows of tables, and what their admission has counted.

    Parameters
    ----------
    histories : sequence of History
    tables : sequence of Filled
        What is filled with each.
    threads : int
        That read; one restores.
    told : callable
        Is told how many rows were restored, slot by slot. What it raises ends the work.

    Returns
    -------
    list of int
        Rows of each table.

    Raises
    ------
    CorruptionError
        A file is damaged: the message names it.
    MemoryBudgetExceededError
        There is no room for the rows.
    """
    return [_fill(*one, threads, told) for one in zip(histories, tables, strict=True)]


def _fill(history: History, table: Filled, threads: int, told: Callable[[int], None]) -> int:
    rows = 0
    with history, ThreadPoolExecutor(threads) as pool:
        read = in_order(pool, history.section, history.slots, threads * _AHEAD)
        for slot, (count, data) in zip(history.slots, read, strict=True):
            restored = 0
            if count:
                with history.damage(slot):
                    restored = table.restore(count, data)
            rows += restored
            told(restored)
        for slot, (reader, filter) in sorted(history.filters.items()):
            if filter.size:
                with reader.damage(filter):
                    table.restore_filter(history.cut, slot, history.filter(slot))
            told(0)
    return rows


# --- compacting ---------------------------------------------------------------------------------------------------


def compact(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    overwrite: bool = True,
    threads: int | None = None,
    progress: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write what a chain of deltas comes to as one full checkpoint; see :func:`shoal.compact`."""
    chain = read_chain(directory, storage_options)
    target = open_dir(out, storage_options)
    check_apart(target, chain)
    check_target(target, overwrite=overwrite)
    slots = chain[-1].manifest.slots
    with ExitStack() as opened:
        jobs = []
        for table in chain[-1].manifest.tables:
            history = opened.enter_context(History(chain, table.name))
            jobs.append(
                _Job(
                    TableRecord.of(table.spec()),
                    table.step,
                    table.clock,
                    history.last.size,
                    sum(file.bytes for file in history.first.files),
                    False,
                    partial(_merged, history),
                )
            )
        version = _version(table.spec() for table in chain[-1].manifest.tables)

        def save(stem: str, told: Callable[[int], None]) -> list[SavedTable]:
            stems = [f"{stem}-{k}" for k in range(len(jobs))]
            return _write_jobs(target, stems, version, jobs, range(slots), threads or cores(), durable=True, told=told)

        about = Manifest(FORMAT, version, slots, [], None, chain[-1].manifest.clock)
        _write(target, about, save, sum(job.rows for job in jobs), progress=progress, durable=True)


def _merged(history: History, slot: int) -> _Piece:
    rows, section = history.section(slot)
    filter = history.filter(slot)
    return _Piece(slot, rows, section, _core.crc32c(section), _Padded.of(filter) if filter.nbytes else None)


def check_target(place: StorageDir, *, overwrite: bool) -> None:
    """Raise ValueError if a checkpoint may not be written to a directory; nothing is changed."""
    check_replaceable(place, MANIFEST, "a checkpoint", _is_ours, overwrite=overwrite, form=FORMAT)


def _is_ours(name: str) -> bool:
    """Tell whether this is something that a manifest may name."""
    return name.endswith(SLOT_FILE)


def check_apart(out: StorageDir, chain: Chain) -> None:
    """Raise ValueError if a new checkpoint would take the place of one that it is made of."""
    for link in chain:
        if out.is_same(link.place):
            raise ValueError(f"{out} is part of the chain that ends with {chain[-1].place}: choose another directory")
