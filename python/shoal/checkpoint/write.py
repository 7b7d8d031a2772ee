"""Writing checkpoints: consistent snapshots of tables, written slot by slot.

    SnapshotSet    tables at one moment; the process that holds the rows writes their slot files (write_slots)
    write          writes the slot files, then publishes the manifest, which names all of them

The manifest is published last and atomically, in place of the one that was there when the save began. An interrupted
save therefore leaves the previous checkpoint or none, never part of one. Of two saves that race for one directory one
succeeds, and the other raises SaveConflictError. Servers write in parallel, each its own slots.

Threads: a pool reads slots; the calling thread writes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from operator import attrgetter
from typing import NamedTuple, Protocol, Self

import msgspec
import numpy as np

from shoal import _core
from shoal.base.progress import rows_bar
from shoal.checkpoint.format import (
    FORMAT,
    MANIFEST,
    SLOT_FILE,
    TASKS_AHEAD,
    AnyExtent,
    Base,
    Bytes,
    Chain,
    ChainEntry,
    Manifest,
    SavedFilter,
    SavedRanges,
    SavedTable,
    Section,
    digest_of,
    file_header,
    version_of,
)
from shoal.storage.base import StorageDir
from shoal.storage.transaction import DataFile, DataFileWriter, ManifestTransaction, check_replaceable, map_in_order
from shoal.table.shard import LocalShard, Snapshot
from shoal.table.spec import TableRecord, TableSpec

_ALIGNMENT = 64  # of sections in a file
_TASK_BYTES = 1 << 20  # of sections that one task makes, so that small slots do not cost a task each


class Padded(NamedTuple):
    """Bytes of a file: ``size`` bytes of content, and zeros up to a multiple of the alignment."""

    data: Bytes
    size: int
    crc32c: int

    @classmethod
    def of(cls, data: Bytes) -> Self:
        """Pad ``data`` and compute the checksum of all bytes."""
        padded = np.zeros(-(-data.nbytes // _ALIGNMENT) * _ALIGNMENT, np.uint8)
        padded[: data.nbytes] = data
        return cls(padded, data.nbytes, _core.crc32c(padded))


class SlotData(NamedTuple):
    """The contents of a slot to be written; for a delta, only what differs from the base."""

    slot: int
    rows: int
    section: Bytes
    crc32c: int
    filter: Padded | None
    ranges: tuple[Padded, int, int] | None = None  # with bits and count


class _Written:
    """The locations of the written pieces of one table's slots."""

    def __init__(self, writer: DataFileWriter) -> None:
        self.writer = writer
        self.sections: list[Section] = []
        self.filters: list[SavedFilter] = []
        self.ranges: list[SavedRanges] = []

    def add(self, piece: SlotData) -> None:
        """Write the pieces of a slot."""
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


class TableSnapshot(NamedTuple):
    """A snapshot of a table to be saved."""

    spec: TableSpec
    snapshot: Snapshot
    kind: str  # "plain", "base", "delta": see csrc/shard/snapshot.h


@contextmanager
def snapshots(
    tables: Iterable[tuple[TableSpec, LocalShard, str]], clock: int, purpose: str = "save"
) -> Iterator[list[tuple[TableSpec, _core.Snapshot, str]]]:
    """Take a consistent snapshot of tables, each of its own kind; updates wait meanwhile. ``clock`` is the store's.

    The ``purpose`` is "save" or "export": changes are tracked separately for each.
    """
    with ExitStack() as held:
        with ExitStack() as still:
            shards = [(spec, still.enter_context(_frozen(shard)), kind) for spec, shard, kind in tables]
            result = [
                (spec, held.enter_context(closing(shard.snapshot(clock, kind, purpose=purpose))), kind)
                for spec, shard, kind in shards
            ]
        yield result


def unknown_base(table: str, base: ChainEntry | None) -> ValueError:
    """Make the error of a delta whose changes were not tracked."""
    return ValueError(
        f"the changes of table {table!r} since the save in {base and base.storage_dir} are not known: a delta needs "
        f"this store's last save or load with track=True as its base; save all rows, with track=True"
    )


@contextmanager
def _frozen(shard: LocalShard) -> Iterator[LocalShard]:
    shard.pause_writers()
    try:
        yield shard
    finally:
        shard.resume_writers()


class TableJob(msgspec.Struct, frozen=True):
    """A table to be written."""

    form: TableRecord
    step: int
    clock: int
    rows: int  # of the table
    bytes: int  # approximate
    delta: bool
    make: Callable[[int], SlotData | None]  # of a slot


class SnapshotSet(Protocol):
    """A consistent snapshot of tables, local or on servers."""

    @property
    def specs(self) -> Sequence[TableSpec]:
        """Their descriptions."""

    @property
    def clock(self) -> int:
        """The store's clock at the snapshot."""

    @property
    def rows(self) -> int:
        """Number of rows to be written, 0 for deltas: for a progress bar."""

    def write(
        self, storage_dir: StorageDir, stem: str, version: int, *, durable: bool, on_progress: Callable[[int], None]
    ) -> list[SavedTable]:
        """Write slot files whose names begin with ``stem``, reporting progress in rows; called once."""

    def done(self, digest: str) -> None:
        """Record that the manifest with this digest was published."""


class LocalSnapshotSet(NamedTuple):
    """A :class:`SnapshotSet` of this process."""

    snapshots: list[TableSnapshot]
    slots: int
    threads: int
    clock: int

    @property
    def specs(self) -> Sequence[TableSpec]:
        """Descriptions of the tables."""
        return [spec for spec, _, _ in self.snapshots]

    @property
    def rows(self) -> int:
        """Number of rows to be written in full."""
        return sum(snapshot.rows for _, snapshot, kind in self.snapshots if kind != "delta")

    def write(
        self, storage_dir: StorageDir, stem: str, version: int, *, durable: bool, on_progress: Callable[[int], None]
    ) -> list[SavedTable]:
        """Write all slots."""
        stems = [f"{stem}-{k}" for k in range(len(self.snapshots))]
        return write_slots(
            storage_dir,
            stems,
            version,
            self.snapshots,
            range(self.slots),
            self.threads,
            durable=durable,
            on_progress=on_progress,
        )

    def done(self, digest: str) -> None:
        """Record in the tables that the manifest with this digest was published."""
        for _, snapshot, _ in self.snapshots:
            snapshot.done(digest)


def write_checkpoint(
    storage_dir: StorageDir,
    moment: SnapshotSet,
    slots: int,
    *,
    base: ChainEntry | None = None,
    progress: bool = False,
    durable: bool = True,
) -> None:
    """Write a checkpoint of a consistent snapshot; see :meth:`shoal.Store.save`.

    Without ``durable`` it does not wait for the disk, and a power failure may corrupt it: for temporary checkpoints.
    """
    version = 3 if base is not None else version_of(moment.specs)
    named = None if base is None else Base(storage_dir.path_to(base.storage_dir), base.digest)

    def save(stem: str, on_progress: Callable[[int], None]) -> list[SavedTable]:
        return moment.write(storage_dir, stem, version, durable=durable, on_progress=on_progress)

    about = Manifest(FORMAT, version, slots, [], named, moment.clock)
    moment.done(publish(storage_dir, about, save, moment.rows, progress=progress, durable=durable))


def write_slots(
    storage_dir: StorageDir,
    stems: Sequence[str],
    version: int,
    taken: Sequence[TableSnapshot],
    slots: Sequence[int],
    threads: int,
    *,
    durable: bool,
    on_progress: Callable[[int], None],
) -> list[SavedTable]:
    """Write slot files of some slots of some tables."""
    return write_jobs(
        storage_dir,
        stems,
        version,
        [_job(*one) for one in taken],
        slots,
        threads,
        durable=durable,
        on_progress=on_progress,
    )


def write_jobs(
    storage_dir: StorageDir,
    stems: Sequence[str],
    version: int,
    jobs: Sequence[TableJob],
    slots: Sequence[int],
    threads: int,
    *,
    durable: bool,
    on_progress: Callable[[int], None],
) -> list[SavedTable]:
    """Write slot files of tables from functions that produce their slots; see `write_slots`."""
    header = file_header(version)
    saved = []
    for stem, job in zip(stems, jobs, strict=True):
        writer = DataFileWriter(storage_dir, stem, SLOT_FILE, header, durable=durable, cached=False)
        saved.append(_save_table(writer, job, slots, threads, on_progress))
    return saved


def join_tables(parts: Sequence[Sequence[SavedTable]]) -> list[SavedTable]:
    """Join descriptions of the same tables that were written in parallel, each with slots that no other one has."""
    return [_join(tables) for tables in zip(*parts, strict=True)]


def _behind(files: int, piece: AnyExtent) -> AnyExtent:
    return msgspec.structs.replace(piece, file=piece.file + files)


def _join(parts: Sequence[SavedTable]) -> SavedTable:
    files: list[DataFile] = []
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
        sections=sorted(sections, key=attrgetter("slot")),
        filters=tuple(sorted(filters, key=attrgetter("slot"))),
        total=sum(part.total for part in parts),
        ranges=tuple(sorted(ranges, key=attrgetter("slot"))),
    )


def _job(spec: TableSpec, snapshot: Snapshot, kind: str) -> TableJob:
    return TableJob(
        TableRecord.of(spec),
        snapshot.step,
        snapshot.table_clock if spec.keeps_clock else 0,
        snapshot.rows,
        snapshot.bytes,
        kind == "delta",
        partial(_changes if kind == "delta" else _all, snapshot),
    )


def _all(snapshot: Snapshot, slot: int) -> SlotData:
    rows, section, filter = snapshot.section(slot)
    return SlotData(slot, rows, section, _core.crc32c(section), Padded.of(filter) if filter.nbytes else None)


def _changes(snapshot: Snapshot, slot: int) -> SlotData:
    rows, section, filter, bits, count, ranges = snapshot.changes(slot)
    return SlotData(
        slot,
        rows,
        section,
        _core.crc32c(section),
        None if filter is None else Padded.of(filter),
        (Padded.of(ranges), bits, count) if count else None,
    )


def publish(
    storage_dir: StorageDir,
    about: Manifest,
    save: Callable[[str, Callable[[int], None]], list[SavedTable]],
    rows: int,
    *,
    progress: bool,
    durable: bool,
) -> str:
    """Write a checkpoint, its tables by ``save(stem, on_progress)``, and return its digest."""
    with ManifestTransaction(storage_dir, MANIFEST, is_ours, durable=durable) as new:
        with rows_bar("save", rows, show=progress) as on_progress:
            saved = save(new.stem, on_progress)
        body = msgspec.json.encode(msgspec.structs.replace(about, tables=saved))
        new.publish(body)
    return digest_of(body)


def _save_table(
    writer: DataFileWriter, job: TableJob, slots: Sequence[int], threads: int, on_progress: Callable[[int], None]
) -> SavedTable:
    def make(some: Sequence[int]) -> list[SlotData]:
        return [piece for piece in map(job.make, some) if piece is not None]

    step = max(1, len(slots) * _TASK_BYTES // max(_TASK_BYTES, job.bytes))
    tasks = [slots[first : first + step] for first in range(0, len(slots), step)]
    written = _Written(writer)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for made in map_in_order(pool, make, tasks, threads * TASKS_AHEAD):
                for piece in made:
                    written.add(piece)
                on_progress(sum(piece.rows for piece in made))
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


def check_target(storage_dir: StorageDir, *, overwrite: bool) -> None:
    """Raise ValueError if a checkpoint may not be written to a directory; nothing is changed."""
    check_replaceable(storage_dir, MANIFEST, "a checkpoint", is_ours, overwrite=overwrite, form=FORMAT)


def is_ours(name: str) -> bool:
    """Return whether a manifest may name such a file."""
    return name.endswith(SLOT_FILE)


def check_apart(out: StorageDir, chain: Chain) -> None:
    """Raise ValueError if a new checkpoint would replace one that it is built from."""
    for link in chain:
        if out.is_same(link.storage_dir):
            raise ValueError(
                f"{out} is part of the chain that ends with {chain[-1].storage_dir}: choose another directory"
            )
