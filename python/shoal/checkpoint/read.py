"""Reading checkpoints: chains of deltas, verification and loading.

    History    a table of a chain, for all slots or for some; `restore_tables` restores rows from histories
    load       creates the tables, restores their rows and checks the counts; servers may restore in parallel

A slot's rows are those of the full checkpoint with the ranges of each delta replaced in order (copy-on-write merge).

Threads: a pool reads; the calling thread restores.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, Self, TypeVar

import msgspec
import numpy as np

from shoal import _core
from shoal.base.decoders import json_decoder
from shoal.base.defaults import SLOTS
from shoal.base.progress import rows_bar
from shoal.checkpoint.format import (
    EMPTY,
    FORMAT,
    MANIFEST,
    TASKS_AHEAD,
    VERSIONS,
    AnyExtent,
    Bytes,
    Chain,
    ChainEntry,
    Manifest,
    SavedFilter,
    SavedRanges,
    SavedTable,
    Section,
    check_extents,
    digest_of,
    file_header,
)
from shoal.errors import CorruptionError
from shoal.storage.base import FileReader, StorageDir, StoragePath
from shoal.storage.checksummed_json import UNREADABLE
from shoal.storage.open import open_dir
from shoal.storage.transaction import map_in_order
from shoal.table.shard import LocalShard
from shoal.table.spec import TableSpec, check_table_count

_manifest = json_decoder(Manifest)


def read_manifest(where: StoragePath) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises
    ------
    CorruptionError
        It is missing, changed, or of an unknown version.
    """
    return _read(
        open_dir(where), "the directory is not a checkpoint, or its save was interrupted", "checkpoint"
    ).manifest


def read_chain(where: StoragePath, options: Mapping[str, Any] | None = None) -> Chain:
    """Read and check the manifests of a checkpoint and of the checkpoints on which it is based.

    Returns
    -------
    list of ChainEntry
        From the full checkpoint to that of ``where``.

    Raises
    ------
    CorruptionError
        One is missing, changed, or not the base of the next one.
    """
    chain = [
        _read(open_dir(where, options), "the directory is not a checkpoint, or its save was interrupted", "checkpoint")
    ]
    while (base := chain[0].manifest.base) is not None:
        link = chain[0]
        found = _read(link.storage_dir.child(base.path), f"the delta in {link.storage_dir} is based on it")
        if found.digest != base.digest:
            raise CorruptionError(
                f"{found.storage_dir} is not the checkpoint that {link.storage_dir} is a delta of: its digest is "
                f"{found.digest} instead of {base.digest}"
            )
        if found.manifest.slots != link.manifest.slots:
            raise CorruptionError(
                f"{link.storage_dir} has {link.manifest.slots} slots, and {found.storage_dir}, which it is a delta of, "
                f"{found.manifest.slots}"
            )
        for table in link.manifest.tables:
            known = found.table(table.name)
            if table.delta and (known is None or known.spec() != table.spec()):
                raise CorruptionError(
                    f"{link.storage_dir} has a delta of table {table.name!r} that does not match {found.storage_dir}"
                )
        chain.insert(0, found)
    return chain


def _read(storage_dir: StorageDir, missing: str, what: str | None = None) -> ChainEntry:
    path = storage_dir.address(MANIFEST)
    body = storage_dir.read_checksummed(MANIFEST, missing=missing, what=what)
    try:
        head = msgspec.json.decode(body)
        form = head.get("format") if isinstance(head, dict) else None
        if isinstance(form, str) and form != FORMAT:
            raise CorruptionError(f"{path} is that of a {form}, not of a {FORMAT}: name a checkpoint or a model")
        if form != FORMAT or head.get("version") not in VERSIONS:
            raise CorruptionError(
                f"{path} is not a checkpoint of version {VERSIONS[0]} to {VERSIONS[-1]}: load it with a newer shoal"
            )
        manifest = _manifest.decode(body)
        if manifest.slots not in SLOTS:
            raise ValueError(f"{manifest.slots} slots: the number is not a power of two from 2 to 16384")
        check_table_count(len(manifest.tables))
        if len({table.name for table in manifest.tables}) != len(manifest.tables):
            raise ValueError("two tables have the same name")
        if manifest.version < 3 and manifest.base is not None:
            raise ValueError(f"a checkpoint of version {manifest.version} has a base")
        for table in manifest.tables:
            table.spec()
            if manifest.base is None and (table.delta or table.ranges):
                raise ValueError(f"table {table.name!r} is a delta without a base")
            check_extents(manifest.slots, table)
    except (*UNREADABLE, ValueError, TypeError) as error:
        raise CorruptionError(f"{path} cannot be read: {error}") from None
    return ChainEntry(storage_dir, manifest, digest_of(body))


def _check_files(storage_dir: StorageDir, table: SavedTable, version: int) -> None:
    header = file_header(version)
    for file in table.files:
        path = storage_dir.address(file.name)
        try:
            with storage_dir.open(file.name) as opened:
                if opened.size != file.bytes:
                    raise CorruptionError(f"{path} has {opened.size} bytes instead of {file.bytes}")
                start = bytearray(len(header))
                if opened.read_into(memoryview(start), 0) != len(header) or start != header:
                    raise CorruptionError(f"{path} is damaged: it does not begin with the header of a slot file")
        except FileNotFoundError:
            raise CorruptionError(f"{path} is missing") from None


class _Reader:
    """Reads pieces of a table's files, each checked against its checksum. Any number of threads."""

    def __init__(self, storage_dir: StorageDir, table: SavedTable) -> None:
        self.table = table
        self._storage_dir = storage_dir
        self._opened = ExitStack()
        self._files: list[FileReader] = []

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            self._files = [opened.enter_context(self._storage_dir.open(file.name)) for file in self.table.files]
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
        return self._storage_dir.address(self.table.files[piece.file].name)

    @contextmanager
    def damage(self, piece: Section | SavedFilter | SavedRanges) -> Iterator[None]:
        """Add the file's name to an error of the engine."""
        try:
            yield
        except ValueError as error:
            raise CorruptionError(f"{self.path(piece)}, slot {piece.slot}: {error}") from None


def _by_slot(pieces: Iterable[AnyExtent]) -> dict[int, AnyExtent]:
    return {piece.slot: piece for piece in pieces}


class History:
    """A table of a chain: its full checkpoint and its deltas. A context manager that holds the files open."""

    def __init__(self, chain: Chain, name: str) -> None:
        readers: list[_Reader] = []
        for link in reversed(chain):
            table = link.table(name)
            assert table is not None, "read_chain has looked"
            _check_files(link.storage_dir, table, link.manifest.version)
            readers.insert(0, _Reader(link.storage_dir, table))
            if not table.delta:
                break
        self.last = readers[-1].table
        self.first = readers[0].table
        self.cut = chain[0].manifest.slots
        self._readers = readers
        self._opened = ExitStack()
        self._sections = [_by_slot(reader.table.sections) for reader in readers]
        self._ranges = [_by_slot(reader.table.ranges) for reader in readers]
        # The newest version of each slot.
        self.filters = {filter.slot: (reader, filter) for reader in readers for filter in reader.table.filters}
        self.slots = sorted(set().union(*self._sections))
        self._layout = LocalShard.of(self.last.spec(), 2, _core.ThreadPool(1))  # for the layout of rows

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
        rows, data = 0, EMPTY
        for reader, sections, changed in zip(self._readers, self._sections, self._ranges, strict=True):
            piece = sections.get(slot)
            fresh_rows, fresh = (0, EMPTY) if piece is None else (piece.rows, reader.read(piece))
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
        """Read the admission counters of a slot at the last save."""
        if slot not in self.filters:
            return EMPTY
        reader, filter = self.filters[slot]
        return reader.read(filter)[: filter.size]

    @contextmanager
    def damage(self, slot: int) -> Iterator[None]:
        """Add a file's name to an error of the engine: the newest file that has rows of the slot."""
        for reader, sections in zip(reversed(self._readers), reversed(self._sections), strict=True):
            if slot in sections:
                with reader.damage(sections[slot]):
                    yield
                return


def verify(where: StoragePath, threads: int = 1, *, progress: bool = False) -> Manifest:
    """Check every byte of a checkpoint and of its bases.

    Returns
    -------
    Manifest

    Raises
    ------
    CorruptionError
        A file is missing, truncated or changed: the message names it.
    """
    chain = read_chain(where)
    total = sum(table.rows for link in chain for table in link.manifest.tables)
    with rows_bar("verify", total, show=progress) as on_progress:
        for link in chain:
            for table in link.manifest.tables:
                _check_files(link.storage_dir, table, link.manifest.version)
                pieces: list[Section | SavedFilter | SavedRanges] = [*table.sections, *table.filters, *table.ranges]
                with _Reader(link.storage_dir, table) as reader, ThreadPoolExecutor(threads) as pool:
                    for piece, _ in zip(
                        pieces, map_in_order(pool, reader.read, pieces, threads * TASKS_AHEAD), strict=True
                    ):
                        on_progress(piece.rows if isinstance(piece, Section) else 0)
    return chain[-1].manifest


class RestoreTarget(Protocol):
    """A table that sections are restored into, for all slots or for some."""

    def restore(self, rows: int, section: Bytes, /) -> int:
        """Add the rows of a section that belong here; return their number."""

    def restore_filter(self, slots: int, slot: int, filter: Bytes, /) -> None:
        """Add the admission counters of slot number ``slot`` of ``slots``."""


class LoadTarget(RestoreTarget, Protocol):
    """A table while it is loaded."""

    step: int

    def reserve(self, rows: list[int], /) -> None:
        """Reserve memory for that many rows in each slot of the checkpoint."""

    def set_clock(self, table_clock: int, store_clock: int, /) -> None:
        """Set the table's clock to ``table_clock`` when the store's is ``store_clock``."""


_Target = TypeVar("_Target", bound=LoadTarget)


def load(
    chain: Chain,
    make: Callable[[TableSpec], _Target],
    threads: int,
    *,
    clock: int = 0,
    progress: bool = False,
    restore: Callable[[list[_Target], Callable[[int], None]], list[int]] | None = None,
) -> list[tuple[TableSpec, _Target]]:
    """Read the tables of a chain's last entry; see :meth:`shoal.Store.load`.

    Parameters
    ----------
    chain : Chain
    make : callable
        Makes the empty rows of a table.
    threads : int
    clock : int
        The store's.
    progress : bool
    restore : callable, optional
        Restores the rows of all tables in other processes. Called with what ``make`` returned and a function that
        takes a number of restored rows; returns the rows of each table.

    Returns
    -------
    list of (TableSpec, object)
        The tables, with what ``make`` returned for each.
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
    with rows_bar("load", total, show=progress) as on_progress:
        found = restore_tables(known, shards, threads, on_progress) if restore is None else restore(shards, on_progress)
    for table, shard, count in zip(manifest.tables, shards, found, strict=True):
        if count != table.size:
            raise CorruptionError(
                f"{chain[-1].storage_dir}: table {table.name!r} adds up to {count} rows instead of {table.size}"
            )
        shard.step = table.step
        shard.set_clock(table.clock, clock)
    return loaded


def histories(chain: Chain, some: Collection[int] | None = None, slots: int = 1) -> list[History]:
    """Find the files of the tables of a chain's last entry: for all slots, or for ``some`` of ``slots`` slots."""
    if some is not None:
        cut = chain[-1].manifest.slots
        mine = {k for slot in some for k in range(slot * cut // slots, -(-(slot + 1) * cut // slots))}
        chain = [_part_of(link, mine) for link in chain]
    return [History(chain, table.name) for table in chain[-1].manifest.tables]


def _part_of(link: ChainEntry, slots: Collection[int]) -> ChainEntry:
    tables = [_only(table, slots) for table in link.manifest.tables]
    return link._replace(manifest=msgspec.structs.replace(link.manifest, tables=tables))


def _only(table: SavedTable, slots: Collection[int]) -> SavedTable:
    """Leave out other slots, and files without any of these slots."""
    pieces = (table.sections, table.filters, table.ranges)
    used = sorted({piece.file for kind in pieces for piece in kind if piece.slot in slots})
    number = {file: k for k, file in enumerate(used)}

    def kept(some: Iterable[AnyExtent]) -> list[AnyExtent]:
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


def restore_tables(
    histories: Sequence[History], tables: Sequence[RestoreTarget], threads: int, on_progress: Callable[[int], None]
) -> list[int]:
    """Read the rows of tables and their admission counters."""
    return [_restore(*one, threads, on_progress) for one in zip(histories, tables, strict=True)]


def _restore(history: History, table: RestoreTarget, threads: int, on_progress: Callable[[int], None]) -> int:
    rows = 0
    with history, ThreadPoolExecutor(threads) as pool:
        read = map_in_order(pool, history.section, history.slots, threads * TASKS_AHEAD)
        for slot, (count, data) in zip(history.slots, read, strict=True):
            restored = 0
            if count:
                with history.damage(slot):
                    restored = table.restore(count, data)
            rows += restored
            on_progress(restored)
        for slot, (reader, filter) in sorted(history.filters.items()):
            if filter.size:
                with reader.damage(filter):
                    table.restore_filter(history.cut, slot, history.filter(slot))
            on_progress(0)
    return rows
