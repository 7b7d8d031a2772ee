"""Reading exports: lookups over mapped files, and the swap to a newer version while readers go on."""

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.machine import cores
from shoal.errors import ClosedError, CorruptionError, ShoalError
from shoal.export import manifest as form
from shoal.export.cache import Cache, Held
from shoal.export.manifest import Extra, FrozenTable, Manifest
from shoal.storage.base import StorageDir
from shoal.storage.open import open_dir
from shoal.table.arrays import Keys, Rows, as_keys, as_out
from shoal.table.key_batch import KeyBatch

__all__ = ["Export", "ExportTable", "ExportVersion", "Layers", "open_export", "read_layers"]

_log = logging.getLogger(__name__)

_LONGEST_CHAIN = 64
_MODEL_FILE = "model.json"  # of a directory that holds a model
_TRIES = 3  # of opening an export that is replaced meanwhile
_Files: TypeAlias = list[list[npt.NDArray[np.uint8]]]  # by table

_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


class _Mapped:
    """The files of one export, mapped and checked; one that is elsewhere through a copy in the cache."""

    def __init__(self, place: StorageDir, manifest: Manifest, digest: str, *, verify: bool, cache: Cache) -> None:
        self.place = place
        self.manifest = manifest
        self.digest = digest
        self._held: Held | None = None
        if place.local is not None:
            self.directory = place.local
            self.files = _map_all(manifest, place.local, place.address, verify=verify)
            return
        held = self._copy(cache)
        try:
            self.files = self._map_copy(held.directory, verify=verify)
        except CorruptionError as error:
            _log.warning("the copy of an export is fetched again: %s", error)
            held.release()
            cache.drop(place, digest)
            held = self._copy(cache)
            self.files = self._map_copy(held.directory, verify=verify)
        self._held = held
        self.directory = held.directory

    def _copy(self, cache: Cache) -> Held:
        sizes = {file.name: file.bytes for table in self.manifest.tables for file in table.files}
        sizes |= {extra.name: extra.bytes for extra in self.manifest.extras}

        def check(directory: Path) -> None:
            self._map_in(directory, self.place.address, verify=True)

        return cache.hold(self.place, self.digest, sizes, check)

    def _map_copy(self, directory: Path, *, verify: bool) -> _Files:
        return self._map_in(directory, lambda name: str(directory / name), verify=verify)

    def _map_in(self, directory: Path, address: Callable[[str], str], *, verify: bool) -> _Files:
        """Map the files of a copy; with ``verify`` look at the model's too."""
        files = _map_all(self.manifest, directory, address, verify=verify)
        for extra in self.manifest.extras if verify else ():
            _read_extra(directory, extra, address)
        return files

    def release(self) -> None:
        """Let others remove its copy. What is mapped stays mapped."""
        if self._held is not None:
            self._held.release()

    def let_go(self, cache: Cache) -> None:
        """Remove its copy, unless somebody else maps it too: there is a newer export."""
        self.release()
        if self.place.local is None:
            cache.let_go(self.place, self.digest)

    def extra(self, name: str) -> bytes:
        """Read and check one of the model's files."""
        for extra in self.manifest.extras:
            if extra.name.partition("-")[2] == name:
                return _read_extra(self.directory, extra, lambda name: str(self.directory / name))
        raise CorruptionError(f"{self.place} has no file {name!r} of its model")


def _map_all(manifest: Manifest, directory: Path, address: Callable[[str], str], *, verify: bool) -> _Files:
    """Map the data files of an export, whose names for people ``address`` tells."""
    files = [[_map(directory / file.name, file.bytes, address(file.name)) for file in t.files] for t in manifest.tables]
    if verify:
        for table, mapped in zip(manifest.tables, files, strict=True):
            for section in table.sections:
                data = mapped[section.file][section.offset : section.offset + section.bytes]
                if _core.crc32c(data) != section.crc32c:
                    path = address(table.files[section.file].name)
                    raise CorruptionError(f"{path} is damaged: the checksum of slot {section.slot} does not match")
    return files


def _read_extra(directory: Path, extra: Extra, address: Callable[[str], str]) -> bytes:
    try:
        data = (directory / extra.name).read_bytes()
    except FileNotFoundError:
        raise CorruptionError(f"{address(extra.name)} is missing") from None
    if len(data) != extra.bytes or _core.crc32c(data) != extra.crc32c:
        raise CorruptionError(f"{address(extra.name)} is damaged: its checksum does not match")
    return data


def _map(path: Path, size: int, address: str) -> npt.NDArray[np.uint8]:
    """Map a data file: its pages are the system's, whoever reads them."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise CorruptionError(f"{address} is missing") from None
    try:
        found = os.fstat(descriptor).st_size
        if found != size:
            raise CorruptionError(f"{address} has {found} bytes instead of {size}")
        if size < len(form.HEADER):
            raise CorruptionError(f"{address} is damaged: {size} bytes are no data file")
        mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(descriptor)
    if _HUGE_PAGES is not None:
        with suppress(OSError):  # advice: a refusal costs speed, nothing else
            mapped.madvise(_HUGE_PAGES)
    data = np.frombuffer(mapped, np.uint8)
    if data[: len(form.HEADER)].tobytes() != form.HEADER:
        raise CorruptionError(f"{address} is damaged: it does not start as a data file does")
    return data


class Layers:
    """An export and what it stands upon, the oldest first: the engine's tables over their files."""

    def __init__(self, mapped: list[_Mapped]) -> None:
        self.mapped = mapped
        newest = mapped[-1]
        self.digest = newest.digest
        self.number = newest.manifest.number
        self.slots = newest.manifest.slots
        self.tables: dict[str, FrozenTable] = {}
        self.natives: dict[str, _core.Frozen] = {}
        for one in mapped:
            if one.manifest.slots != self.slots:
                raise CorruptionError(f"{one.place} has {one.manifest.slots} slots, {newest.place} {self.slots}")
            for table, files in zip(one.manifest.tables, one.files, strict=True):
                known = self.tables.get(table.name)
                if known is not None and known.description() != table.description():
                    raise CorruptionError(
                        f"table {table.name!r} of {one.place} has another description than that of its base"
                    )
                self.tables[table.name] = table
                native = self.natives.setdefault(table.name, table.native(self.slots))
                native.add_layer()
                for k, file in enumerate(files):
                    try:
                        native.add(file, table.sections_of(k))
                    except ValueError as error:
                        raise CorruptionError(f"{one.place.address(table.files[k].name)}: {error}") from None

    def close(self) -> None:
        """Let others remove copies of its files. What is mapped stays mapped."""
        for one in self.mapped:
            one.release()

    @property
    def model(self) -> dict[str, Any] | None:
        """What the newest of them says of its model."""
        return next((one.manifest.model for one in reversed(self.mapped) if one.manifest.model is not None), None)

    @property
    def extras(self) -> list[str]:
        """Names of the model's files, of the newest that has any."""
        found = next((one.manifest.extras for one in reversed(self.mapped) if one.manifest.extras), [])
        return [extra.name.partition("-")[2] for extra in found]

    def extra(self, name: str) -> bytes:
        """Read a file of the model, the newest."""
        for one in reversed(self.mapped):
            if one.manifest.extras:
                return one.extra(name)
        raise CorruptionError(f"{self.mapped[-1].place} has no file {name!r} of its model")

    def digest_of(self, name: str) -> str | None:
        """Return the digest of the newest that has a table, which reads here as it reads there; None: none has it."""
        return next(
            (one.digest for one in reversed(self.mapped) if any(table.name == name for table in one.manifest.tables)),
            None,
        )

    def forms_of(self, name: str) -> list[FrozenTable]:
        """Return what each of them tells of a table."""
        return [table for one in self.mapped for table in one.manifest.tables if table.name == name]


def read_layers(
    place: StorageDir, *, verify: bool = True, known: Layers | None = None, cache: Cache | None = None
) -> Layers:
    """Map an export and those that it stands upon; files that ``known`` has mapped are not mapped again.

    Raises
    ------
    CorruptionError
        A file is missing, cut short or changed, or the base of a delta is not the one that it was made upon.
    StorageError
        A file cannot be read.
    """
    copies = cache or Cache()
    there = {} if known is None else {(str(one.place), one.digest): one for one in known.mapped}

    def mapped(where: StorageDir, manifest: Manifest, digest: str) -> _Mapped:
        return there.get((str(where), digest)) or _Mapped(where, manifest, digest, verify=verify, cache=copies)

    for attempt in range(_TRIES):
        manifest, digest = form.read(place, what="export")
        try:
            return Layers(_chain(place.real(), manifest, digest, mapped))
        except CorruptionError:
            # It may have been replaced since its manifest was read.
            if attempt == _TRIES - 1 or form.read(place)[1] == digest:
                raise
    raise AssertionError("the last try returns or raises")


def _chain(
    where: StorageDir, manifest: Manifest, digest: str, mapped: Callable[[StorageDir, Manifest, str], _Mapped]
) -> list[_Mapped]:
    """Map the files of an export and of those that it stands upon, the oldest first."""
    chain: list[_Mapped] = []
    while True:
        chain.append(mapped(where, manifest, digest))
        if manifest.base is None:
            return chain[::-1]
        if len(chain) == _LONGEST_CHAIN:
            raise CorruptionError(f"{chain[0].place} stands upon more than {_LONGEST_CHAIN} exports")
        base, wanted = where.child(manifest.base.path).real(), manifest.base.digest
        manifest, digest = form.read(base)
        if digest != wanted:
            raise CorruptionError(
                f"{base} is not the export that the delta {where} was made upon: it was replaced; export the whole "
                "again, or a delta upon what is there now"
            )
        where = base


class ExportTable:
    """A table of an export, as one version has it. Read-only; every method may be called from any thread.

    Examples
    --------
    >>> import tempfile
    >>> import shoal
    >>> with tempfile.TemporaryDirectory() as directory, shoal.local() as store:
    ...     table = store.table("user", dim=2, optimizer=shoal.SGD(lr=0.5))
    ...     table.push(np.array([7], np.uint64), np.ones((1, 2), np.float32)).wait()
    ...     _ = store.export(directory, dtype="float16")
    ...     with open_export(directory) as export:
    ...         export.table("user").pull(np.array([7, 8], np.uint64)).tolist()
    [[-0.5, -0.5], [0.0, 0.0]]
    """

    def __init__(self, forms: list[FrozenTable], native: _core.Frozen, slots: int, workers: _core.Workers) -> None:
        self._forms = forms  # of its layers, the oldest first
        self._form = forms[-1]
        self._native = native
        self._slots = slots
        self._workers = workers

    def __repr__(self) -> str:
        return f"ExportTable({self.name!r}, dim={self.dim}, dtype={self.dtype!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"table {self.name!r} is not passed to another process: open the export there, which is cheap")

    @property
    def name(self) -> str:
        """Its name in the store that it was exported from."""
        return self._form.name

    @property
    def dim(self) -> int:
        """Weights per row."""
        return self._form.dim

    @property
    def dtype(self) -> str:
        """How weights are stored."""
        return self._form.dtype

    @property
    def native(self) -> _core.Frozen:
        """The engine's object."""
        return self._native

    @property
    def workers(self) -> _core.Workers:
        """The export's threads, for the kernels that take them."""
        return self._workers

    @property
    def nbytes(self) -> int:
        """Bytes of its files, those of all layers."""
        return sum(file.bytes for form in self._forms for file in form.files)

    @property
    def rows_written(self) -> int:
        """Rows of all layers: as many as the table has, where there is one layer."""
        return sum(form.rows for form in self._forms)

    @property
    def form(self) -> FrozenTable:
        """What the newest layer tells of it."""
        return self._form

    @property
    def largest_error(self) -> float:
        """How far a weight is off the one that was exported, at most; of the newest layer."""
        return self._form.largest_error

    @property
    def rms_error(self) -> float:
        """The same, as the root of the mean of squares."""
        return self._form.rms_error

    def pull(self, keys: Keys, *, out: Rows | None = None) -> Rows:
        """Read the rows of ``keys``.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            Any order, duplicates allowed. A key without a row reads its initial row, as in the store.
        out : float32[n, dim], optional
            Filled and returned instead of a new array.

        Returns
        -------
        float32[n, dim]

        Notes
        -----
        Releases the GIL. A page that is not in memory is read from disk meanwhile.
        """
        given = as_keys(keys)
        rows = as_out(out, (len(given), self.dim), self.name)
        self._native.pull(given, rows, self._workers)
        return rows

    def pull_unique(self, batch: KeyBatch, *, out: Rows | None = None) -> Rows:
        """Read the rows of a batch's unique keys, in hash order.

        Parameters
        ----------
        batch : KeyBatch
            From any store, or from :meth:`key_batch`.
        out : float32[m, dim], optional

        Returns
        -------
        float32[m, dim]
        """
        rows = as_out(out, (len(batch), self.dim), self.name)
        self._native.pull(batch.hashes, rows, self._workers, hashed=True)
        return rows

    def key_batch(self, keys: Keys) -> KeyBatch:
        """Sort keys once, as a store's ``key_batch`` does."""
        return KeyBatch(keys, self._slots, self._workers)

    def contains(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Tell which of ``keys`` have a row here: those that read as if they had none were left out.

        Parameters
        ----------
        keys : uint64[n] or int64[n]

        Returns
        -------
        bool[n]
        """
        return self._native.contains(as_keys(keys), self._workers).view(np.bool_)

    def items(self) -> Iterator[tuple[npt.NDArray[np.uint64], Rows]]:
        """Iterate over all rows, in hash order, a slot at a time.

        Yields
        ------
        (uint64[k], float32[k, dim])
            Keys and weights.

        Raises
        ------
        CorruptionError
            The index is damaged; only where the export was opened with ``verify=False``.
        """
        for slot in range(self._slots):
            try:
                hashes, rows = self._native.read_slot(slot)
            except ValueError as error:
                raise CorruptionError(f"table {self.name!r}: {error}") from None
            if len(hashes):
                yield _core.unmix(hashes), rows

    def __len__(self) -> int:
        """Count the rows: reads the whole index of an export with deltas."""
        return sum(len(keys) for keys, _ in self.items())


class ExportVersion:
    """The tables of one version of an export: what a reader that looks into several of them holds on to."""

    def __init__(self, place: StorageDir, layers: Layers, workers: _core.Workers) -> None:
        self._layers = layers
        self.place = place
        self.version = layers.number
        self.tables: Mapping[str, ExportTable] = MappingProxyType(
            {
                name: ExportTable(layers.forms_of(name), native, layers.slots, workers)
                for name, native in layers.natives.items()
            }
        )

    def __repr__(self) -> str:
        return f"ExportVersion({self.version}, tables={list(self.tables)})"

    @property
    def layers(self) -> Layers:
        """The files beneath."""
        return self._layers

    @property
    def directory(self) -> Path:
        """Where its files are on this machine: those of an export that is elsewhere are copies in a cache."""
        return self._layers.mapped[-1].directory

    @property
    def slots(self) -> int:
        """Parts that the hash space is cut into."""
        return self._layers.slots

    @property
    def model(self) -> dict[str, Any] | None:
        """What model the tables belong to, if it was exported with one."""
        return self._layers.model

    def table(self, name: str) -> ExportTable:
        """Get a table.

        Raises
        ------
        ValueError
            There is none of that name.
        """
        table = self.tables.get(name)
        if table is None:
            raise ValueError(f"{self.place} has no table {name!r}: it has {list(self.tables)}")
        return table


def newest(place: StorageDir, known: form.Found | None = None) -> StorageDir:
    """Return the export that a directory stands for: itself, or the one with the highest number in it.

    What is damaged beside it is passed over. ``known`` is what was found before, and becomes what is found now: see
    :func:`shoal.export.manifest.numbers`.

    Raises
    ------
    CorruptionError, StorageError
        It is none, and has none.
    FileNotFoundError
        There is no such directory.
    ValueError
        It is a model, which has not been exported.
    """
    names = place.names()
    if form.MANIFEST in names:
        return place
    found = form.numbers(place, known)
    if known is not None:
        known.clear()
        known.update(found)
    best = max(((number, name) for name, (_, number) in found.items() if isinstance(number, int)), default=None)
    if best is None:
        if place.kind() is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such export", str(place))
        if _MODEL_FILE in names:
            raise ValueError(f"{place} is a model, not an export: write one with `shoal export {place} DIR`")
        damaged = next((error for _, error in found.values() if isinstance(error, ShoalError)), None)
        raise damaged or CorruptionError(
            f"{place.address(form.MANIFEST)} is missing: this is no export, it has none, or it was cut off while it "
            "was written"
        )
    return place.child(best[1])


class Export:
    """An export that is open: the newest version of its tables. Made by :func:`open_export`; a context manager.

    Safe from any thread. ``refresh`` puts a newer version in place at one moment: readers that hold a table, or a
    version, go on with what they hold.
    """

    def __init__(self, place: StorageDir, *, threads: int | None, verify: bool, cache: Cache) -> None:
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads must be at least 1, got {threads!r}")
        self._place = place
        self._cache = cache
        self._found: form.Found = {}
        self._damaged: dict[str, str] = {}  # which directories were damaged when the version in place was found
        self._verify = verify
        self._workers = _core.Workers(threads or cores())
        self._turn = threading.Lock()  # of refreshes
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        self._now: ExportVersion | None = self._read(None)

    def _read(self, known: ExportVersion | None) -> ExportVersion:
        where = newest(self._place, self._found)
        layers = read_layers(
            where, verify=self._verify, known=None if known is None else known.layers, cache=self._cache
        )
        for name, error in self._newly_damaged().items():
            _log.warning("%s is passed over: %s", name, error)
        self._damaged = {n: mark for n, (mark, what) in self._found.items() if isinstance(what, ShoalError)}
        return ExportVersion(where, layers, self._workers)

    def _newly_damaged(self) -> dict[str, ShoalError]:
        """Return what is wrong with directories that came, or were damaged, after the version in place."""
        return {
            name: what
            for name, (mark, what) in self._found.items()
            if isinstance(what, ShoalError) and self._damaged.get(name) != mark
        }

    def __repr__(self) -> str:
        now = self._now
        return f"Export({str(self._place)!r}, {'closed' if now is None else f'version={now.version}'})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an export is not passed to another process: open it there, which is cheap")

    def __enter__(self) -> Self:
        _ = self.now
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def now(self) -> ExportVersion:
        """The version in place.

        Raises
        ------
        ClosedError
            The export was closed.
        """
        now = self._now
        if now is None:
            raise ClosedError(f"the export {self._place} was closed: open it again")
        return now

    @property
    def version(self) -> int:
        """Its number."""
        return self.now.version

    @property
    def tables(self) -> Mapping[str, ExportTable]:
        """The tables by name, of the version in place."""
        return self.now.tables

    def table(self, name: str) -> ExportTable:
        """Get a table of the version in place.

        It goes on reading that version after a refresh: ask again for the newer one.

        Raises
        ------
        ValueError
            There is none of that name.
        """
        return self.now.table(name)

    def refresh(self) -> bool:
        """Look for a newer version, and put it in place.

        Returns
        -------
        bool
            Whether there was one.

        Raises
        ------
        CorruptionError, StorageError
            There is one, but it is damaged, or cannot be read: the version in place stays.

        Notes
        -----
        Reads and checks the new files before the swap, which takes no time. Files of layers that stay are not read
        again, so a delta costs what it is long.
        """
        with self._turn:
            now = self.now
            where = newest(self._place, self._found)
            if where.is_same(now.place) and form.read(where)[1] == now.layers.digest:
                for error in self._newly_damaged().values():
                    raise error
                return False
            fresh = self._read(now)
            if self._now is None:
                raise ClosedError(f"the export {self._place} was closed: open it again")
            self._now = fresh
            for one in now.layers.mapped:
                if one not in fresh.layers.mapped:
                    one.let_go(self._cache)
            return True

    def watch(
        self,
        seconds: float,
        *,
        on_swap: Callable[[int], object] | None = None,
        on_error: Callable[[Exception], object] | None = None,
    ) -> None:
        """Refresh every so many seconds, in a thread that ends when the export is closed.

        Parameters
        ----------
        seconds : float
            Between looks; a look that finds nothing new reads one manifest.
        on_swap : callable, optional
            Called in that thread with the number of a version that was put in place.
        on_error : callable, optional
            Called in that thread with what refreshing raised; the version in place stays, and the next look tries
            again. Default: a warning is logged.

        Raises
        ------
        ValueError
            It is watched already, or ``seconds`` is not above 0.
        """
        if not seconds > 0:
            raise ValueError(f"watch looks every so many seconds, more than 0, got {seconds!r}")
        if self._watcher is not None:
            raise ValueError(f"the export {self._place} is watched already")
        _ = self.now

        def look() -> None:
            while not self._closed.wait(seconds):
                try:
                    if self.refresh() and on_swap is not None:
                        on_swap(self.version)
                except ClosedError:
                    return
                except Exception as error:
                    if on_error is None:
                        _log.warning("the export %s is not refreshed: %s", self._place, error)
                    else:
                        on_error(error)

        self._watcher = threading.Thread(target=look, name="shoal-export-watch", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Let go of the files: they are unmapped once nobody holds a table of them any more."""
        self._closed.set()
        now, self._now = self._now, None
        if now is not None:
            now.layers.close()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()


def open_export(
    directory: str | os.PathLike[str],
    *,
    threads: int | None = None,
    verify: bool = True,
    cache: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Export:
    """Open an export for reading.

    Parameters
    ----------
    directory : path or URL
        An export; or a directory of exports and deltas, of which the one with the highest number is opened.
    threads : int, optional
        Threads that share the work of one call; default: the cores that this process may use.
    verify : bool
        Whether to read every byte and compare checksums, which also brings the files into memory. False opens at once:
        pages are read as they are needed, and damage is not found. Nothing outside of the files is read either way.
    cache : path, optional
        Where files of a URL are copied to, to be mapped: once for all processes of the machine. Default:
        ``~/.cache/shoal``. What is fetched is checked, whatever ``verify`` says.
    storage_options : mapping, optional
        Of the file system that a URL is opened by, such as ``{"endpoint_url": ...}``.

    Returns
    -------
    Export

    Raises
    ------
    CorruptionError
        A file is missing, cut short or changed: the message names it.
    StorageError
        A file cannot be read, or fetched into the cache.
    """
    return Export(open_dir(directory, storage_options), threads=threads, verify=verify, cache=Cache(cache))
