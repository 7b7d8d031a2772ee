"""The files of a store: checkpoints and exports of its tables.

Threads: any number. Saves and exports of one store are serialised; updates continue while rows are written.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, overload

from shoal.base.dtypes import Dtype, dtype_name
from shoal.base.fit_rows import is_progress
from shoal.checkpoint.format import Chain, ChainEntry
from shoal.checkpoint.read import read_chain
from shoal.checkpoint.write import SnapshotSet, check_apart, check_target, write_checkpoint
from shoal.errors import ClusterChangedError
from shoal.export import Exported as Exported
from shoal.export.cache import Cache
from shoal.export.write import ExportTables, TableSource, UnsynchronizedTables, write_export
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.open import open_dir
from shoal.store.activity import Activity
from shoal.store.description import check_same
from shoal.table.future import BackgroundTask, Future, no_op
from shoal.table.spec import TableSpec, check_table_count
from shoal.table.table import Table

_REPEAT_SECONDS = 300.0  # in which a save is repeated while slots move
_PAUSE_SECONDS = 0.5


class ModelParts(NamedTuple):
    """What an export has of a model besides its tables."""

    description: dict[str, Any]
    files: dict[str, bytes]


class StoreFiles(ABC):
    """Base class of :class:`~shoal.store.base.Store`: its methods that read and write directories."""

    _slots: int
    _lock: threading.Lock
    _saving: threading.Lock
    _saves: list[BackgroundTask]
    activity: Activity
    _tables: dict[str, Table]

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads that share the work of one call."""

    @abstractmethod
    def _check_usable(self) -> None: ...

    @abstractmethod
    def _locked(self) -> AbstractContextManager[None]: ...

    def check_storage(self, directory: StoragePath, *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Check that a directory can be saved to, before a long computation.

        On a cluster each server checks whether it sees the directory and may write there. The directory must
        exist; no file is left in it.

        Parameters
        ----------
        directory : path or URL
        storage_options : mapping, optional
            As for :meth:`save`.

        Raises
        ------
        ImportError
            ``directory`` is a URL whose file system is not installed.
        StorageError
            A server does not see the directory or may not write there (``--storage-roots``).
        """
        open_dir(directory, storage_options)

    @abstractmethod
    def _snapshots(
        self, tables: list[tuple[Table, str]], base: ChainEntry | None
    ) -> AbstractContextManager[SnapshotSet]:
        """Take a consistent snapshot of tables, which a later load does not affect."""

    @contextmanager
    def _to_export(self, tables: list[Table], *, track: bool) -> Iterator[ExportTables]:
        """Open tables for an export, which reads them slot by slot; ``track``: record changes from now on."""
        sources = [TableSource(table.spec, len(table), table.reader.read_slot) for table in tables]
        yield UnsynchronizedTables(sources, self._slots)

    @abstractmethod
    def _load(self, chain: Chain, *, track: bool, progress: bool) -> None:
        """Replace the rows of tables by those of a checkpoint."""

    @overload
    def save(
        self,
        directory: StoragePath,
        *,
        tables: Iterable[str] | None = None,
        since: StoragePath | None = None,
        track: bool = False,
        overwrite: bool = False,
        wait: Literal[True] = True,
        durable: bool = True,
        progress: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None: ...

    @overload
    def save(
        self,
        directory: StoragePath,
        *,
        tables: Iterable[str] | None = None,
        since: StoragePath | None = None,
        track: bool = False,
        overwrite: bool = False,
        wait: Literal[False],
        durable: bool = True,
        progress: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Future[None]: ...

    def save(
        self,
        directory: StoragePath,
        *,
        tables: Iterable[str] | None = None,
        since: StoragePath | None = None,
        track: bool = False,
        overwrite: bool = False,
        wait: bool = True,
        durable: bool = True,
        progress: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Future[None] | None:
        """Write a checkpoint of all tables, or of some, as they are now: a full one, or a delta.

        All rows are saved as of the call. An existing checkpoint in ``directory`` is replaced only with
        ``overwrite``, atomically at the end: an interrupted save leaves it unchanged. A directory that holds anything
        else is never written to.

        Parameters
        ----------
        directory : path or URL
            Created if missing. ``"s3://bucket/step-1000"``, or any other URL that fsspec supports (extra: fsspec).
        tables : iterable of str, optional
            Names of the tables to write; all of them if not given.
        since : path or URL, optional
            Another checkpoint: only the changes since that checkpoint are written, in ranges of hashes of about a row
            each. It must be the last one that this store saved with ``track`` or ``since``, or loaded with ``track``,
            and must be kept: the new checkpoint refers to it by its relative path. Tables that it does not have are
            written in full.
        track : bool
            Whether to record changes from now on, so that the next save can be a delta of this one; implied by
            ``since``. The record takes 1/8 to 1/6 byte per row.
        overwrite : bool
            Whether an existing checkpoint may be replaced.
        wait : bool
            Whether to return when it is written; otherwise it is written in the background.
        durable : bool
            Whether to wait for the disk; without this a power failure may corrupt the checkpoint.
        progress : bool
            Whether to show a progress bar.
        storage_options : mapping, optional
            Options of the file system of a URL, such as ``{"endpoint_url": ...}``.

        Returns
        -------
        Future
            Where ``wait`` is False: ``result()`` returns once it is written, or raises the error. The error of a
            future that was dropped without waiting is raised by `close`.

        Raises
        ------
        ValueError
            The store has no table of such a name; or changes since ``since`` were not recorded, or it has
            another number of slots; or ``directory`` holds anything but a checkpoint, or one that may not be
            replaced. Nothing was written.
        CorruptionError
            ``since``, or a base of it, is not a checkpoint.
        SnapshotLostError
            Rows changed so much faster than they were written that the save was abandoned.
        SaveConflictError
            Another process has written a checkpoint there since the save began; it is kept. On a
            cluster also: another worker is saving.
        StorageError
            A file cannot be written: the disk is full, the connection lost, a server does not see the directory, ...
            The message names it. An earlier checkpoint is unchanged.
        ServerLostError, DeadlineExceededError
            A server was lost, or did not answer. An earlier checkpoint is unchanged.
        ClusterChangedError
            Slots of a cluster have moved to other servers, because one of them died or joined. An earlier checkpoint is
            unchanged. A save that is waited for is repeated by itself, for five minutes.

        Notes
        -----
        Pushes continue while rows are written: they wait for the start of the snapshot, and for the copy of a slot, by
        default a thousandth of the table. The previous values of rows that change before they are written are kept in
        memory: once these exceed 64 MiB, or a sixteenth of the table if that is more, each push waits for up to 50 ms.
        Saves are serialised.

        On a cluster the servers write their own rows in parallel: ``directory`` must be a path that all of them can
        access, or a URL of an object store, and ``storage_options`` are sent to them. All rows are of this worker's
        clock, for which the save waits as a pull does. One worker saves at a time. Without shared storage, connect with
        ``shared_storage=False`` (:func:`shoal.connect`).
        """
        chosen = self._chosen(tables, "save")
        where = open_dir(directory, storage_options)
        check_target(where, overwrite=overwrite)
        with ExitStack() as held:
            held.enter_context(self._saving)
            base = None if since is None else self._base(since, where, storage_options)
            kinds = [(table, self._kind(table.name, base, track=track)) for table in chosen]

            def write(then: ExitStack, moment: SnapshotSet, begun_at: float) -> None:
                with then:
                    write_checkpoint(where, moment, self._slots, base=base, progress=progress, durable=durable)
                self.activity.saved(begun_at)

            until = time.monotonic() + _REPEAT_SECONDS
            while wait:
                then = ExitStack()
                try:
                    write(then, then.enter_context(self._snapshots(kinds, base)), self.activity.now())
                except ClusterChangedError:  # the former checkpoint stands
                    if time.monotonic() > until:
                        raise
                    time.sleep(_PAUSE_SECONDS)
                else:
                    return None
            moment = held.enter_context(self._snapshots(kinds, base))
            then = held.pop_all()
            try:
                task = BackgroundTask(partial(write, then, moment, self.activity.now()), "save")
            except RuntimeError:  # no thread can be started
                then.close()
                raise
        with self._lock:
            self._saves = [save for save in self._saves if not save.done() or save.has_unobserved_error] + [task]
        return Future(task, no_op)

    def _base(self, since: StoragePath, where: StorageDir, storage_options: Mapping[str, Any] | None) -> ChainEntry:
        """Return the checkpoint that a delta refers to."""
        chain = read_chain(since, storage_options)
        check_apart(where, chain)
        base = chain[-1]
        if base.manifest.slots != self._slots:
            raise ValueError(
                f"{since} has {base.manifest.slots} slots and this store {self._slots}: save all rows, with track=True"
            )
        return base

    @staticmethod
    def _kind(name: str, base: ChainEntry | None, *, track: bool) -> str:
        if base is not None:
            return "delta" if base.table(name) is not None else "base"
        return "base" if track else "plain"

    def export(
        self,
        directory: StoragePath,
        *,
        dtype: Dtype | Mapping[str, Dtype] | None = None,
        since: StoragePath | None = None,
        track: bool = False,
        tables: Iterable[str] | None = None,
        version: int | None = None,
        overwrite: bool = False,
        progress: bool = False,
        cache: str | os.PathLike[str] | None = None,
        model: ModelParts | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Exported:
        """Write the weights of all tables, or of some, for processes that only read: :func:`shoal.export.open`.

        In a local store all rows are exported as of the call. Rows equal to their initial row are left out. An
        existing export in ``directory`` is replaced only with ``overwrite``, atomically at the end; processes that
        have it open keep reading the old one. A directory that holds anything else is never written to.

        Parameters
        ----------
        directory : path or URL
            Created if missing. ``"s3://bucket/serve/1"``, or any other URL that fsspec supports (extra: fsspec).
        dtype : numpy.dtype or its name (float32, float16, int8, "bfloat16"), or dict of them by table, optional
            How weights are stored, rounded to the nearest; ``int8`` with a scale for each row, at dim 1 for each line
            of about ten. Default: float32; for a delta, the dtype of its base.
        since : path or URL, optional
            Another export of the same tables: write a delta, which has only the changes since it and is read
            together with it. The base must stay where it is. If it has a model, the delta has all of its tables; a
            model with a dense part or a calibration is exported by its own method ``export`` instead.
        track : bool
            Whether a local store records changes from now on, as it does after an export with ``since``: a
            delta of this export then reads only the changed rows; any other reads every row. The results are equal.
        tables : iterable of str, optional
            Names of the tables to write; if not given all of them, but for the progress of fits (``NAME-progress``).
        version : int, optional
            The export's number; default: one more than that of ``since``, of the export that is replaced, and of the
            other exports in the parent directory.
        overwrite : bool
            Whether an existing export may be replaced.
        progress : bool
            Whether to show a progress bar.
        cache : path, optional
            Local directory for a copy of ``since`` if that is a URL: see :func:`shoal.export.open`.
        model : ModelParts, optional
            What predicts with the tables, of this moment: models have it, see their method ``export``.
        storage_options : mapping, optional
            Options of the file system of URLs, such as ``{"endpoint_url": ...}``.

        Returns
        -------
        Exported
            Rows, bytes and rounding errors of each table.

        Raises
        ------
        ValueError
            The store has no table of such a name; or it does not match ``since``; or ``directory`` holds anything
            but an export, or one that may not be replaced. Nothing was written.
        CorruptionError
            ``since`` is damaged. It is checked in full only if every row is compared with it.
        SnapshotLostError
            Rows changed so much faster than they were written that the export was abandoned.
        SaveConflictError
            Another process has written an export there since this one began; it is kept.
        StorageError
            A file cannot be written: the message names it. An earlier export is unchanged.

        Notes
        -----
        In a local store pushes continue while rows are written, as with `save`, and exports and saves are serialised.
        On a cluster slots are read one by one while all workers continue: each row is consistent, but rows of different
        slots may be of different moments. For a consistent export, export a checkpoint (``shoal export``).
        """
        chosen = self._chosen(tables, "export")
        if tables is None:
            chosen = [one for one in chosen if not is_progress(one.name, is_integer=one.spec.is_integer)]
        stored: str | dict[str, str] | None = None
        if isinstance(dtype, Mapping):
            stored = {name: dtype_name(one) for name, one in dtype.items()}
        elif dtype is not None:
            stored = dtype_name(dtype)
        with self._to_export(chosen, track=track or since is not None) as sources:
            return write_export(
                open_dir(directory, storage_options),
                sources,
                dtype=stored,
                since=None if since is None else open_dir(since, storage_options),
                version=version,
                overwrite=overwrite,
                model=None if model is None else model.description,
                extras=None if model is None else model.files,
                threads=self.threads,
                progress=progress,
                cache=Cache(cache),
            )

    def load(
        self,
        directory: StoragePath,
        *,
        track: bool = False,
        progress: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Read a checkpoint: create its tables, or replace the rows of existing ones.

        It may have been written with any number of slots and threads. A delta is applied to its base, which must be at
        the same path relative to ``directory`` as when it was saved. Tables that the checkpoint does not name are
        unchanged. The rows of all tables are replaced at one moment: a concurrent push completes before it, or is
        applied to the loaded rows.

        Parameters
        ----------
        directory : path or URL
        track : bool
            Whether to record changes from then on, so that the next save can be a delta of this checkpoint.
        progress : bool
            Whether to show a progress bar.
        storage_options : mapping, optional
            Options of the file system of a URL: see `save`.

        Raises
        ------
        CorruptionError
            A file is missing, truncated or changed, or a base was replaced since its delta. Nothing was loaded.
        StorageError
            A file cannot be read: no permission, a lost connection, a server does not see the directory, ... The
            message names it. Nothing was loaded.
        ValueError
            A table of the store has another description than the checkpoint's. Nothing was loaded.
        MemoryBudgetExceededError
            There is no memory for the rows in addition to the present ones. Nothing was loaded.
        ServerLostError, DeadlineExceededError
            A server was lost, or did not answer.
        ShoalError
            On other workers of a cluster than the one that loads: it was not loaded. The error of that one says why.

        Notes
        -----
        On a cluster all workers must call it. The servers read their own rows in parallel: ``directory`` must be a path
        that all of them can access, or a URL of an object store, and ``storage_options`` are sent to them. Without
        shared storage, connect with ``shared_storage=False`` (:func:`shoal.connect`).
        """
        self._check_usable()
        chain = read_chain(directory, storage_options)
        self._check_known(table.spec() for table in chain[-1].manifest.tables)  # before the rows, which take a while
        self._load(chain, track=track, progress=progress)

    def _chosen(self, tables: Iterable[str] | None, what: str) -> list[Table]:
        """Find tables by name; without names, all of them."""
        with self._locked():
            names = list(self._tables if tables is None else dict.fromkeys(tables))
            unknown = [name for name in names if name not in self._tables]
            if unknown:
                raise ValueError(f"the store has no table {unknown[0]!r} to {what}: it has {list(self._tables)}")
            return [self._tables[name] for name in names]

    def _check_known(self, specs: Iterable[TableSpec]) -> None:
        specs = list(specs)
        check_table_count(len(self._tables.keys() | {spec.name for spec in specs}))
        for spec in specs:
            known = self._tables.get(spec.name)
            if known is not None:
                check_same(known.spec, spec, "the checkpoint")
