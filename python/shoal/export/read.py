"""Reading exports: lookups in mapped files, and the swap to a newer version while readers continue.

Threads: any number of readers; `Export.refresh` replaces the version atomically.
"""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.machine import cores
from shoal.base.scalars import period, plain
from shoal.errors import ClosedError, CorruptionError, ShoalError
from shoal.export import manifest as manifests
from shoal.export.cache import Cache
from shoal.export.layers import Layers, read_layers
from shoal.export.manifest import TableEntry
from shoal.storage.base import StorageDir
from shoal.storage.open import open_dir
from shoal.table.arrays import Keys, Rows, as_keys, as_out
from shoal.table.key_batch import KeyBatch

_log = logging.getLogger(__name__)

_MODEL_FILE = "model.json"  # of a directory that holds a model


class ExportTable:
    """A table of one version of an export. Read-only; every method may be called from any thread.

    Examples
    --------
    >>> import tempfile
    >>> import shoal
    >>> with tempfile.TemporaryDirectory() as directory, shoal.local() as store:
    ...     table = store.table("user", dim=2, optimizer=shoal.SGD(lr=0.5))
    ...     table.push(np.array([7], np.uint64), np.ones((1, 2), np.float32)).result()
    ...     _ = store.export(directory, dtype="float16")
    ...     with shoal.export.open(directory) as export:
    ...         export.table("user").pull(np.array([7, 8], np.uint64)).tolist()
    [[-0.5, -0.5], [0.0, 0.0]]
    """

    def __init__(
        self, forms: list[TableEntry], native: _core.ExportReader, slots: int, workers: _core.ThreadPool
    ) -> None:
        self._forms = forms  # of its layers, the oldest first
        self._form = forms[-1]
        self._native = native
        self._slots = slots
        self._workers = workers

    def __repr__(self) -> str:
        return f"ExportTable({self.name!r}, dim={self.dim}, dtype={self._form.dtype!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"table {self.name!r} cannot be passed to another process: open its export there")

    @property
    def name(self) -> str:
        """Its name in the exported store."""
        return self._form.name

    @property
    def dim(self) -> int:
        """Weights per row."""
        return self._form.dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the weights that are returned: float32. How they are stored is ``form.dtype``."""
        return np.dtype(np.float32)

    @property
    def native(self) -> _core.ExportReader:
        """The engine's object."""
        return self._native

    @property
    def workers(self) -> _core.ThreadPool:
        """The export's threads, for the kernels that take them."""
        return self._workers

    @property
    def nbytes(self) -> int:
        """Bytes of its files, all layers included."""
        return sum(file.bytes for form in self._forms for file in form.files)

    @property
    def rows_written(self) -> int:
        """Rows of all layers. With one layer this is the number of rows of the table."""
        return sum(form.rows for form in self._forms)

    @property
    def form(self) -> TableEntry:
        """Its entry in the manifest of the newest layer."""
        return self._form

    @property
    def largest_error(self) -> float:
        """Largest rounding error of a weight in the newest layer."""
        return self._form.largest_error

    @property
    def rms_error(self) -> float:
        """Root mean square of the rounding errors in the newest layer."""
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
        Releases the GIL. Pages that are not in memory are read from disk.
        """
        checked = as_keys(keys)
        rows = as_out(out, (len(checked), self.dim), self.name)
        self._native.pull(checked, rows, self._workers)
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
        if not isinstance(batch, KeyBatch):
            raise TypeError(f"batch is a {type(batch).__name__}: pass key_batch(keys), or pull(keys)")
        rows = as_out(out, (len(batch), self.dim), self.name)
        self._native.pull(batch.hashes, rows, self._workers, hashed=True)
        return rows

    def key_batch(self, keys: Keys) -> KeyBatch:
        """Sort keys once, as a store's ``key_batch`` does."""
        return KeyBatch(keys, self._slots, self._workers)

    def contains(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which of ``keys`` have a row here; an export omits rows that are equal to their initial rows.

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
            The index is damaged; only if the export was opened with ``verify=False``.
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
    """The tables of one version of an export: for a reader that uses several of them together."""

    def __init__(self, storage_dir: StorageDir, layers: Layers, workers: _core.ThreadPool) -> None:
        self._layers = layers
        self._workers = workers
        self.storage_dir = storage_dir
        self.version = layers.number
        self.tables: Mapping[str, ExportTable] = MappingProxyType(
            {
                name: ExportTable(layers.forms_of(name), native, layers.slots, workers)
                for name, native in layers.natives.items()
            }
        )

    def __repr__(self) -> str:
        return f"ExportVersion({self.version}, tables={list(self.tables)})"

    def is_of(self, copies: manifests.Copies) -> bool:
        """Return whether this is that export, in one of its directories."""
        return copies.digest == self.layers.digest and any(
            directory.is_same(self.storage_dir) for directory in copies.directories
        )

    @property
    def layers(self) -> Layers:
        """The mapped files."""
        return self._layers

    @property
    def workers(self) -> _core.ThreadPool:
        """The export's threads."""
        return self._workers

    @property
    def directory(self) -> Path:
        """Directory of its files on this machine; for an export at a URL, that of the copies in the cache."""
        return self._layers.mapped[-1].directory

    @property
    def slots(self) -> int:
        """Number of parts of the hash space."""
        return self._layers.slots

    @property
    def model(self) -> dict[str, Any] | None:
        """Description of the model that the tables belong to, if it was exported with one."""
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
            raise ValueError(f"{self.storage_dir} has no table {name!r}: it has {list(self.tables)}")
        return table


class ExportFolder:
    """The exports of a directory: the directory itself, or those below it."""

    def __init__(self, storage_dir: StorageDir) -> None:
        self.storage_dir = storage_dir
        self._found: manifests.Found = {}
        self._known_damage: dict[str, str] = {}  # directories that `ignore_damage` has noted

    def read(self) -> dict[int, manifests.Copies | CorruptionError]:
        """Find the exports, one at least; see :func:`shoal.export.manifest.by_number`. The highest number comes first.

        Manifests that are unchanged since the last call are not read again. Damaged exports are left out.
        """
        names = self.storage_dir.names()
        if manifests.MANIFEST in names:
            self._found = {}
            manifest, digest = manifests.read(self.storage_dir)
            return {manifest.number: manifests.Copies(digest, [self.storage_dir])}
        self._found = manifests.numbers(self.storage_dir, self._found)
        exports = manifests.by_number(self.storage_dir, self._found)
        if not exports:
            raise self._nothing(names)
        return dict(sorted(exports.items(), reverse=True))

    def _nothing(self, names: list[str]) -> Exception:
        where = self.storage_dir
        if where.kind() is None:
            return FileNotFoundError(errno.ENOENT, "there is no such export", str(where))
        if _MODEL_FILE in names:
            return ValueError(f"{where} is a model, not an export: write one with `shoal export {where} --output DIR`")
        damaged = next((what for _, what in self._found.values() if isinstance(what, ShoalError)), None)
        return damaged or CorruptionError(
            f"{where.address(manifests.MANIFEST)} is missing: this is not an export, has no exports in it, or was "
            "interrupted while it was written"
        )

    def damage(self) -> list[ShoalError]:
        """Return the errors of directories that were damaged, or appeared, after `ignore_damage` was called."""
        return [
            what
            for name, (mark, what) in self._found.items()
            if isinstance(what, ShoalError) and self._known_damage.get(name) != mark
        ]

    def ignore_damage(self, errors: Sequence[Exception] = ()) -> None:
        """Log ``errors`` and the damage, as of exports that are skipped; `damage` does not return it again."""
        for error in (*errors, *self.damage()):
            _log.warning("an export is skipped: %s", " ".join(str(error).split()))
        self._known_damage = {name: mark for name, (mark, what) in self._found.items() if isinstance(what, ShoalError)}


def newest(storage_dir: StorageDir) -> StorageDir:
    """Return the export in a directory that has the highest number; errors as of :meth:`ExportFolder.read`."""
    highest = next(iter(ExportFolder(storage_dir).read().values()))
    if isinstance(highest, ShoalError):
        raise highest
    return highest.directories[-1]


class Export:
    """An open export: the current version of its tables. Made by :func:`shoal.export.open`; a context manager.

    Safe from any thread. ``refresh`` replaces the version atomically: readers that hold a table or a version continue
    with it.
    """

    def __init__(
        self,
        storage_dir: StorageDir,
        *,
        threads: int | None,
        verify: bool,
        cache: Cache,
        check: Callable[[ExportVersion], object] | None = None,
    ) -> None:
        """Open it; ``check`` raises for a version that is not to become the current one."""
        threads = plain(threads)
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads must be at least 1, got {threads!r}")
        self._storage_dir = storage_dir
        self._cache = cache
        self._folder = ExportFolder(storage_dir)
        self._verify = verify
        self._check = check
        self._workers = _core.ThreadPool(threads or cores())
        self._refreshing = threading.Lock()  # serialises refreshes
        self._swapping = threading.Lock()  # held while `_now` changes
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        self._now: ExportVersion | None = self._read(None)

    def _read(self, now: ExportVersion | None) -> ExportVersion | None:
        """Read the highest version that can be read, if that is another than the current one."""
        exports = self._folder.read()
        errors: list[Exception] = []
        for number, copies in exports.items():
            if now is not None and errors and number < now.version:
                break  # the current version is better than a lower one
            if isinstance(copies, ShoalError):
                errors.append(copies)
                continue
            if now is not None and now.is_of(copies):
                break
            where = copies.directories[-1]
            known = None if now is None else now.layers
            try:
                layers = read_layers(where, verify=self._verify, known=known, cache=self._cache)
                version = ExportVersion(where, layers, self._workers)
                if self._check is not None:
                    self._check(version)
            except Exception as error:
                errors.append(error)
                continue
            self._folder.ignore_damage(errors)
            return version
        if errors := [*errors, *self._folder.damage()]:
            raise errors[0]
        return None

    def __repr__(self) -> str:
        now = self._now
        return f"Export({str(self._storage_dir)!r}, {'closed' if now is None else f'version={now.version}'})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an export cannot be passed to another process: open it there, which is cheap")

    def __enter__(self) -> Self:
        _ = self.now
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def now(self) -> ExportVersion:
        """The current version.

        Raises
        ------
        ClosedError
            The export was closed.
        """
        now = self._now
        if now is None:
            raise ClosedError(f"the export {self._storage_dir} was closed: open it again")
        return now

    @property
    def version(self) -> int:
        """Its number."""
        return self.now.version

    @property
    def tables(self) -> Mapping[str, ExportTable]:
        """The tables by name, of the loaded version."""
        return self.now.tables

    def table(self, name: str) -> ExportTable:
        """Get a table of the loaded version.

        The table keeps reading that version after a refresh: call this again for the newer one.

        Raises
        ------
        ValueError
            There is none of that name.
        """
        return self.now.table(name)

    def refresh(self) -> bool:
        """Swap to a newer version if there is one.

        Returns
        -------
        bool
            Whether there was a newer version.

        Raises
        ------
        CorruptionError, StorageError
            The newer version is damaged or cannot be read; the loaded version is kept.

        Notes
        -----
        The new files are read and checked before the swap, which is immediate. Files of layers that are kept are not
        read again, so the time is proportional to the size of the delta.
        """
        with self._refreshing:
            now = self.now
            fresh = self._read(now)
            if fresh is None:
                return False
            with self._swapping:
                if self._now is None:
                    fresh.layers.close()
                    raise ClosedError(f"the export {self._storage_dir} was closed: open it again")
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
        """Refresh periodically, in a thread that ends when the export is closed.

        Parameters
        ----------
        seconds : float
            Between checks; a check lists the directory and reads the manifests that are new.
        on_swap : callable, optional
            Called in that thread with the number of each newly loaded version.
        on_error : callable, optional
            Called in that thread with the exception of a failed refresh; the version is kept, and the next check tries
            again. Default: a warning is logged.

        Raises
        ------
        ValueError
            The export is already watched, or ``seconds`` is not above 0.
        """
        seconds = period(seconds)
        if self._watcher is not None:
            raise ValueError(f"the export {self._storage_dir} is watched already")
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
                        _log.warning("the export %s is not refreshed: %s", self._storage_dir, error)
                    else:
                        on_error(error)

        self._watcher = threading.Thread(target=look, name="shoal-export-watch", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Close the export. Its files are unmapped when no table refers to them."""
        self._closed.set()
        with self._swapping:
            now, self._now = self._now, None
        if now is not None:
            now.layers.close()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()


def open(
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
        An export; or a directory of exports and deltas: the one with the highest number is opened.
    threads : int, optional
        Threads that share the work of one call; default: the cores that this process may use.
    verify : bool
        Whether to read every byte and compare checksums, which also brings the files into memory. If False, the export
        opens at once, pages are read when they are needed, and damage is not detected. Lookups never read outside of
        the files.
    cache : path, optional
        Directory to which files of a URL are copied, once for all processes of the machine. Default:
        ``~/.cache/shoal``. Downloaded files are always verified.
    storage_options : mapping, optional
        Options of the file system of a URL, such as ``{"endpoint_url": ...}``.

    Returns
    -------
    Export

    Raises
    ------
    CorruptionError
        A file is missing, truncated or changed: the message names it.
    StorageError
        A file cannot be read, or fetched into the cache.
    """
    return Export(open_dir(directory, storage_options), threads=threads, verify=verify, cache=Cache(cache))
