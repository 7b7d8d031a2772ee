"""Stores: where tables live. ``local`` keeps them in this process; ``shoal.connect`` uses those of a cluster.

Whatever keeps the rows, a store has the same calls, those of :class:`Store`. With one worker, what is written for one
kind runs on the other: ``tick`` ends a clock, ``barrier`` waits for the other workers, and both are next to nothing
where there are none.
"""

import hashlib
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MappingProxyType, TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, Self, TypeVar, cast, overload

from shoal import _core
from shoal.base.machine import cores
from shoal.checkpoint import checkpoint
from shoal.consistency import ASP, Consistency
from shoal.errors import ClosedError
from shoal.export import Exported
from shoal.export.cache import Cache
from shoal.export.read import Layers
from shoal.export.write import Given, Still, Tables
from shoal.export.write import write as write_export
from shoal.lifecycle import Admission, Expiry, SweepReport
from shoal.optim import FTRL, SGD, Init, Optimizer, Zeros
from shoal.storage.base import StoragePath
from shoal.storage.open import open_dir
from shoal.table.arrays import Keys
from shoal.table.dense import BLOCK, DenseTable, shape_of
from shoal.table.future import BackgroundTask, Future, no_op
from shoal.table.key_batch import KeyBatch
from shoal.table.rwlock import RwLock
from shoal.table.shard import Shard
from shoal.table.spec import TableSpec
from shoal.table.table import Table

__all__ = ["LocalStore", "Store", "local"]

_ZEROS = Zeros()
_FTRL = FTRL()
_SGD = SGD()

Data = TypeVar("Data")
Data_co = TypeVar("Data_co", covariant=True)


class Splittable(Protocol[Data_co]):
    """Data in files that can be cut: a :class:`shoal.Reader`."""

    def splits(self, split_bytes: int) -> Sequence[Data_co]:
        """Cut the files into parts."""

    def position(self) -> dict[str, Any]:
        """Tell the files, with their sizes."""


def local(*, threads: int | None = None, slots: int = 1024, memory: int | None = None) -> "LocalStore":
    """Make a store in this process.

    Parameters
    ----------
    threads : int, optional
        Threads that share the work of one call; default: the cores that this process may use.
    slots : int
        Into how many parts the hash space is cut: a power of two from 2 to 16384. The default serves from a few rows to
        billions; results do not depend on it, but for limits, of which each slot has its share.
    memory : int, optional
        Bytes that the tables may take: index, rows and keys that wait. Never exceeded: each slot has its share, and a
        push or assignment that needs more evicts rows by the first of the table's expiry rules, those that it would
        drop first; where the table has no rule, or the push brings more new keys than can be evicted,
        :class:`shoal.MemoryBudgetExceededError` is raised and nothing has changed. Default: no bound. What a call
        works in
        is not counted, nor up to 2 MiB a table of pages that its rows do not fill yet.

    Returns
    -------
    LocalStore

    Examples
    --------
    >>> with local(threads=2) as store:
    ...     table = store.table("user", dim=16)
    """
    return LocalStore(threads=threads, slots=slots, memory=memory)


class Store(ABC):
    """Tables, wherever their rows are: the calls that every kind of store has. A context manager that closes itself.

    Safe from any thread. After a fork the child's copy raises :class:`shoal.errors.WrongProcessError`: make a store
    there.
    """

    # Locks, in this order: _lock, which guards _tables and _open; _rwlock, through which changes and saves pass, and
    # which a load shuts while it swaps. A child touches neither.

    def __init__(self, *, threads: int | None, slots: int) -> None:
        count = cores() if threads is None else threads
        if not isinstance(count, int) or not 1 <= count <= 1024:
            raise ValueError(f"threads must be from 1 to 1024, got {threads!r}")
        if not isinstance(slots, int) or slots not in {1 << bits for bits in range(1, 15)}:
            raise ValueError(f"slots must be a power of two from 2 to 16384, got {slots!r}")
        self._slots = slots
        self._workers = _core.Workers(count)
        self._rwlock = RwLock()
        self._lock = threading.Lock()
        self._saving = threading.Lock()  # before _rwlock; released by the thread that writes
        self._saves: list[BackgroundTask] = []
        self._tables: dict[str, Table] = {}
        self._open = True

    # ---- what a kind of store says -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this worker among all of the job, from 0."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """How many workers the job has."""

    def sends_exactly(self, table: str) -> bool:
        """Whether a table of this name gets gradients, and gives weights, as they are, unrounded and all."""
        return True

    @property
    def taking_parts(self) -> bool:
        """Whether this worker is in a loop over :meth:`parts`, where no two workers need do as much."""
        return False

    @property
    def lost_workers(self) -> frozenset[int]:
        """Ranks of workers that were taken for dead since this one connected."""
        return frozenset()

    @property
    def joined_at(self) -> int:
        """Clock at which this worker joined its job: above 0, it took the place of one that had died."""
        return 0

    @property
    @abstractmethod
    def consistency(self) -> Consistency:
        """What a pull may see of other workers' pushes."""

    @property
    @abstractmethod
    def clock(self) -> int:
        """How many ticks this worker has completed."""

    @abstractmethod
    def tick(self) -> None:
        """End this worker's clock: its pushes so far belong to the clock that ends, later ones to the next.

        Under BSP they are applied once every worker has ended that clock. Waits for the servers for a millisecond at
        most: a pull of the next clock waits as long as it must.

        Raises
        ------
        ShoalError
            A push whose handle nobody waited for had failed.
        """

    @abstractmethod
    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker of the job is here, and all that this one asked for before is done.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; default: the store's deadline.

        Raises
        ------
        DeadlineExceededError
            Some worker did not come in time: the message says how many did.
        """

    @abstractmethod
    def flush(self, timeout: float | None = None) -> None:
        """Wait until every push that this worker has begun is done; raise what went wrong with one.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; default: the store's deadline. The pushes themselves go on.

        Raises
        ------
        DeadlineExceededError
            They were not done in that time.
        ShoalError
            The first push that failed and whose handle nobody waited for. It is told once.

        Notes
        -----
        Under BSP a push is done when every server it concerns has it: it is seen once all workers have ended the clock.
        Safe from any thread.
        """

    def parts(self, reader: Splittable[Data], *, part_bytes: int = 64 << 20, reissue: float = 0.0) -> Iterator[Data]:
        """Share the data out among the workers of the job: yields one part after another for this worker to train on.

        Parameters
        ----------
        reader : Reader
            The same on every worker: the same files, of the same sizes, in the same order.
        part_bytes : int
            About how long a part is; see :meth:`shoal.Reader.splits`.
        reissue : float
            Where more than 0: a part that takes more than this many times the mean is given to a second worker too,
            once, when no other is left. Its examples may then be trained on twice.

        Returns
        -------
        iterator of Reader
            The parts. One counts as trained on when the next one is asked for.

        Raises
        ------
        ValueError
            The workers do not cut the same data alike.

        Notes
        -----
        While no worker dies, and without ``reissue``, every part is yielded to exactly one worker. The part of a worker
        that dies is given to another from its beginning, so some of its examples are trained on twice. The k-th call is
        the k-th pass for every worker; it ends when all parts of the pass were trained on, for all workers at the same
        clock. Until then a worker that finds none left ticks along with the others, so that they need not wait for it.
        A worker has one part at a time. Blocks for a round trip to the scheduler between parts.

        Examples
        --------
        ::

            with shoal.connect("tcp://scheduler:5570", consistency=shoal.SSP(staleness=4)) as store:
                model = shoal.LogisticRegression(store=store)
                for part in store.parts(train):
                    model.fit(part)
        """
        if not hasattr(reader, "cut"):
            raise TypeError(f"the data of store.parts is a shoal.Reader, got {reader!r}")
        if isinstance(reissue, bool) or not isinstance(reissue, (int, float)) or not 0 <= reissue < 1e9:
            raise ValueError(f"reissue must be a number from 0, got {reissue!a:.100}")
        parts = reader.splits(part_bytes)
        files = [(os.path.basename(name), size) for name, size in reader.position()["files"]]
        digest = hashlib.sha256(repr((files, part_bytes)).encode()).hexdigest()
        return (parts[number] for number in self._take_parts(len(parts), digest, reissue))

    @abstractmethod
    def _take_parts(self, count: int, digest: str, reissue: float) -> Iterator[int]:
        """Yield the numbers of the parts that this worker is to train on."""

    @abstractmethod
    def _make_shard(self, spec: TableSpec) -> Shard:
        """Make the rows of a new table, or find those that the servers have."""

    def check_storage(self, directory: StoragePath, *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Check that a save into a directory will find it, before the hours of work that it is to keep.

        On a cluster each server checks whether it sees the directory and may write there. The directory is there
        already; nothing is left in it.

        Parameters
        ----------
        directory : path or URL
        storage_options : mapping, optional
            As for :meth:`save`.

        Raises
        ------
        ImportError
            A URL, and what opens it is not installed.
        StorageError
            A server does not see it, may not write there, or was told to keep out (``--storage-root``).
        """
        open_dir(directory, storage_options)

    @abstractmethod
    def _snapshots(
        self, tables: list[tuple[Table, str]], base: checkpoint.Link | None
    ) -> AbstractContextManager[checkpoint.Moment]:
        """Hold tables as they are at one moment, whatever a load puts in place of their rows."""

    @contextmanager
    def _to_export(self, tables: list[Table], *, track: bool) -> Iterator[Tables]:
        """Give the rows of tables to an export, slot by slot as they are when they are read."""
        yield Still([Given(table.spec, len(table.shard), table.shard.read_slot) for table in tables], self._slots)

    @abstractmethod
    def _load(self, chain: checkpoint.Chain, *, track: bool, progress: bool) -> None:
        """Put the rows of a checkpoint in place."""

    @abstractmethod
    def _end(self, *, failed: bool) -> None:
        """Give back what the store has beside its tables; if it ``failed``, without waiting for anything."""

    # ---- what it is --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=error is not None)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a store is not passed to another process: make or connect one there")

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError("this store was closed: make a new one")

    def _check_usable(self) -> None:
        self._check_open()
        self._rwlock.check_process()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let nobody else make tables or close the store."""
        self._check_usable()
        with self._lock:
            self._check_open()
            yield

    @property
    def threads(self) -> int:
        """Threads that share the work of one call."""
        return self._workers.threads

    @property
    def slots(self) -> int:
        """Parts that the hash space is cut into."""
        return self._slots

    @property
    def workers(self) -> _core.Workers:
        """The engine's threads, for the kernels that take them."""
        return self._workers

    @property
    def tables(self) -> Mapping[str, Table]:
        """The tables by name. Read-only."""
        return MappingProxyType(self._tables)

    def table(
        self,
        name: str,
        *,
        dim: int = 1,
        optimizer: Optimizer = _FTRL,
        init: Init = _ZEROS,
        dtype: str = "float32",
        seed: int = 0,
        admit: Admission | None = None,
        expire: Expiry | Iterable[Expiry] | None = None,
    ) -> Table:
        """Make a table, or get the one that was made by the same description.

        Parameters
        ----------
        name : str
            Unique in the store.
        dim : int
            Weights per row, 1 to 4096.
        optimizer : Optimizer
            The rule that pushes apply.
        init : Init
            Where rows start.
        dtype : {"float32", "float16", "bfloat16"}
            How weights are stored; 16 bits from dim 2, for optimizers that store weights, stochastically rounded.
        seed : int
            Of the rounding of accumulators and 16-bit weights.
        admit : AfterCount, AfterBloom or WithProbability, optional
            Which keys get a row; default: all that are pushed. Others wait: they read their initial row.
        expire : TimeToLive, DecayedScore, MinNorm or MaxRows, or several of them, optional
            Which rows a sweep drops; default: none.

        Returns
        -------
        Table

        Raises
        ------
        ValueError
            A table of that name has another description.
        """
        rules = () if expire is None else (expire,) if isinstance(expire, Expiry) else tuple(expire)
        spec = TableSpec(
            name=name, dim=dim, optimizer=optimizer, init=init, dtype=dtype, seed=seed, admit=admit, expire=rules
        )
        with self._locked():
            known = self._tables.get(name)
            if known is None:
                known = self._add(spec, self._make_shard(spec))
        check_same(known.spec, spec)
        return known

    def _add(self, spec: TableSpec, shard: Shard) -> Table:
        table = self._tables[spec.name] = Table(
            spec, shard, self._slots, self._workers, self._rwlock, lambda: self.clock
        )
        return table

    def dense(
        self,
        name: str,
        shape: int | Sequence[int],
        optimizer: Optimizer = _SGD,
        *,
        init: Init = _ZEROS,
        block: int = BLOCK,
        dtype: str = "float32",
        seed: int = 0,
    ) -> DenseTable:
        """Make an array of parameters, cut into blocks that are the rows of a table of that name.

        Parameters
        ----------
        name : str
            Unique among the store's tables.
        shape : int or sequence of int
        optimizer : Optimizer
            The rule that pushes apply.
        init : Init
            Where the numbers start; `DenseTable.assign` sets them one by one.
        block : int
            Numbers in a block, 1 to 4096. Blocks are spread over the servers. A smaller array is one block.
        dtype, seed
            As for `table`.

        Returns
        -------
        DenseTable

        Raises
        ------
        ValueError
            A table of that name has another description, or more blocks.

        Examples
        --------
        >>> with local() as store:
        ...     store.dense("mlp", (3, 500)).pull().shape
        (3, 500)
        """
        sizes = shape_of(name, shape)
        dim = min(block, math.prod(sizes))
        return DenseTable(self.table(name, dim=dim, optimizer=optimizer, init=init, dtype=dtype, seed=seed), sizes)

    def sweep(self, *, dry_run: bool = False) -> SweepReport:
        """Drop the rows that the tables' expiry rules name, and give their memory back.

        Parameters
        ----------
        dry_run : bool
            Whether only to say what would be dropped, and what at other thresholds.

        Returns
        -------
        SweepReport
            Of every table that has rules. ``print`` shows it.

        Notes
        -----
        Nothing sweeps by itself: call it every so many clocks, on one worker. Waiting keys that their admission rule no
        longer remembers are forgotten too. Slots are locked one by one while other calls go on. On a cluster under BSP
        rows go at the end of the clock.

        Examples
        --------
        >>> import numpy as np
        >>> import shoal
        >>> with shoal.local() as store:
        ...     table = store.table("t", expire=shoal.TimeToLive(9))
        ...     table.push(np.array([7, 9], np.uint64), np.ones(2, np.float32)).wait()
        ...     for _ in range(10):
        ...         store.tick()
        ...     store.sweep().rows_dropped
        2
        """
        self._check_usable()
        tables = [table for table in self._tables.values() if table.spec.has_rules]
        return SweepReport(dry_run, tuple(table.sweep(dry_run=dry_run) for table in tables))

    def key_batch(self, keys: Keys, *, last: int | None = None) -> KeyBatch:
        """Sort keys once, for pulls and pushes on any table of this store.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            Any order, duplicates allowed.
        last : int, optional
            One key more, 0 to 2^64 - 1, behind the others: that of a bias, without copying them all.

        Returns
        -------
        KeyBatch
        """
        self._check_open()
        return KeyBatch(keys, self._slots, self._workers, last)

    @overload
    def save(
        self,
        directory: StoragePath,
        *,
        tables: Iterable[str] | None = None,
        since: StoragePath | None = None,
        track: bool = False,
        overwrite: bool = True,
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
        overwrite: bool = True,
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
        overwrite: bool = True,
        wait: bool = True,
        durable: bool = True,
        progress: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Future[None] | None:
        """Write a checkpoint of all tables, or of some, as they are now: a full one, or a delta.

        All rows are of one moment, that of the call. A checkpoint that is already in ``directory`` is replaced at the
        very end, at one moment: a save that is cut off leaves it whole. A directory that holds anything else is never
        written to.

        Parameters
        ----------
        directory : path or URL
            Made if it is not there. ``"s3://bucket/step-1000"``, and whatever else fsspec opens (extra: fsspec).
        tables : iterable of str, optional
            Names of the tables to write; all of them if not given.
        since : path or URL, optional
            Another checkpoint: only what has changed since is written, in ranges of hashes of about a row each. It must
            be the last one that this store saved with ``track`` or ``since``, or loaded with ``track``, and stays
            needed: the new one names it by its place as seen from there. Tables that it does not have are written in
            full.
        track : bool
            Whether what changes from now on is remembered, so that the next save can be a delta of this one; always so
            where ``since`` is given. That takes an eighth of a byte a row, up to a sixth.
        overwrite : bool
            Whether a checkpoint that is there may be replaced.
        wait : bool
            Whether to return when it is written; else at once, and it is written in the background.
        durable : bool
            Whether to wait for the disk: else a power cut may spoil it.
        progress : bool
            Whether to show a progress bar.
        storage_options : mapping, optional
            Of the file system that a URL is opened by, such as ``{"endpoint_url": ...}``.

        Returns
        -------
        Future
            Where ``wait`` is False: ``wait()`` returns once it is written, or raises what went wrong. A failure that
            nobody waited for is raised by `close`.

        Raises
        ------
        ValueError
            The store has no table of such a name, or it is not known what has changed since ``since``, or that has
            another number of slots; or ``directory`` holds something else than a checkpoint, or one that may not be
            replaced. Nothing was written.
        CorruptionError
            ``since``, or what it is a delta of, is no checkpoint.
        SnapshotLostError
            Rows changed so much faster than they were written that the save was given up.
        SaveConflictError
            Another process has written a checkpoint there since the rows began to be written. That one stays. On a
            cluster also: another worker is saving.
        StorageError
            A file cannot be written: the disk is full, the connection lost, a server does not see the directory, ...
            The message names it. What was there before stays.
        ServerLostError, DeadlineExceededError
            A server was lost, or did not answer. What was there before stays.

        Notes
        -----
        Pushes go on while rows are written: they wait for the moment, and for the copy of a slot, a thousandth of the
        table. What they change before it is written is kept in memory: where that comes to 64 MiB, or a sixteenth of
        the table if that is more, each push waits for up to 50 ms. Saves come one after the other: the next begins when
        the one before has ended.

        On a cluster the servers write, side by side, each its own rows: ``directory`` is one that all of them see, by
        that path, or of an object store, and ``storage_options`` are sent to them. All rows are of this worker's clock,
        for which the save waits as a pull does. One worker saves at a time. Where there is no storage that machines
        share, :func:`shoal.connect` takes ``shared_storage=False``.
        """
        chosen = self._chosen(tables, "save")
        where = open_dir(directory, storage_options)
        checkpoint.check_target(where, overwrite=overwrite)
        with ExitStack() as held:
            held.enter_context(self._saving)
            base = None
            if since is not None:
                chain = checkpoint.read_chain(since, storage_options)
                checkpoint.check_apart(where, chain)
                base = chain[-1]
                if base.manifest.slots != self._slots:
                    raise ValueError(
                        f"{since} has {base.manifest.slots} slots and this store {self._slots}: save all rows, with "
                        f"track=True"
                    )
            kinds = [self._kind(table.name, base, track=track) for table in chosen]
            moment = held.enter_context(self._snapshots(list(zip(chosen, kinds, strict=True)), base))
            then = held.pop_all()

        def write() -> None:
            with then:
                checkpoint.write(where, moment, self._slots, base=base, progress=progress, durable=durable)

        if wait:
            write()
            return None
        task = BackgroundTask(write, "save")
        with self._lock:
            self._saves = [save for save in self._saves if not save.done or save.has_unobserved_error] + [task]
        return Future(task, no_op)

    @staticmethod
    def _kind(name: str, base: checkpoint.Link | None, *, track: bool) -> str:
        if base is not None:
            return "delta" if base.table(name) is not None else "base"
        return "base" if track else "plain"

    def export(
        self,
        directory: StoragePath,
        *,
        dtype: str | Mapping[str, str] | None = None,
        since: StoragePath | None = None,
        track: bool = False,
        tables: Iterable[str] | None = None,
        version: int | None = None,
        overwrite: bool = True,
        progress: bool = False,
        cache: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Exported:
        """Write the weights of all tables, or of some, for processes that only read: :func:`shoal.open_export`.

        In a local store all rows are of one moment. Rows that read what a key without a row reads are left out. An
        export that is already in ``directory`` is replaced at the very end; who has it open goes on reading it. A
        directory that holds anything else is never written to.

        Parameters
        ----------
        directory : path or URL
            Made if it is not there. ``"s3://bucket/serve/1"``, and whatever else fsspec opens (extra: fsspec).
        dtype : {"float32", "float16", "bfloat16", "int8"} or dict of them by table, optional
            How weights are stored, rounded to the nearest; ``int8`` with a scale for each row, at dim 1 for each line
            of about ten. Default: float32; in a delta that of its base.
        since : path or URL, optional
            Another export of the same tables: write a delta, which has only what has changed since, and is read
            together with it. The other one must stay where it is.
        track : bool
            Whether a local store remembers from then on what changes, as it does after an export with ``since``: a
            delta upon this export then looks at that alone, any other at every row. Both have the same rows.
        tables : iterable of str, optional
            Names of the tables to write; all of them if not given.
        version : int, optional
            The export's number; default: one more than that of ``since``, of the export that is replaced, and of those
            beside it, for which the directory above is looked through.
        overwrite : bool
            Whether an export that is there may be replaced.
        progress : bool
            Whether to show a progress bar.
        cache : path, optional
            Where ``since`` is copied to if it is a URL: see :func:`shoal.open_export`.
        storage_options : mapping, optional
            Of the file system that URLs are opened by, such as ``{"endpoint_url": ...}``.

        Returns
        -------
        Exported
            Rows, bytes and rounding errors of each table.

        Raises
        ------
        ValueError
            The store has no table of such a name; or it does not fit upon ``since``; or ``directory`` holds something
            else than an export, or one that may not be replaced. Nothing was written.
        CorruptionError
            ``since`` is damaged. Who looks at what has changed alone does not read all of it: that is left to readers.
        SnapshotLostError
            Rows changed so much faster than they were written that the export was given up.
        SaveConflictError
            Another process has written an export there since this one began. That one stays.
        StorageError
            A file cannot be written: the message names it. What was there before stays.

        Notes
        -----
        In a local store pushes go on while rows are written, as with `save`, and exports and saves come one after the
        other. On a cluster slots are read one by one while all workers go on: a row is whole, but two rows may be of
        two moments. Export a checkpoint (``shoal export``) where they must not be.
        """
        chosen = self._chosen(tables, "export")
        with self._to_export(chosen, track=track or since is not None) as given:
            return write_export(
                open_dir(directory, storage_options),
                given,
                dtype=dtype,
                since=None if since is None else open_dir(since, storage_options),
                version=version,
                overwrite=overwrite,
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
        """Read a checkpoint: its tables are made, or take the place of the rows of tables that are there.

        It may have been written with any number of slots and threads; a delta is laid over what it is a delta of, which
        must be where it was, seen from ``directory``. Tables that it does not name stay. All tables get
        their rows at one moment: a push from another thread is done before it, or is made to the rows that were loaded.

        Parameters
        ----------
        directory : path or URL
        track : bool
            Whether what changes from then on is remembered, so that the next save can be a delta of this checkpoint.
        progress : bool
            Whether to show a progress bar.
        storage_options : mapping, optional
            Of the file system that a URL is opened by: see `save`.

        Raises
        ------
        CorruptionError
            A file is missing, cut short or changed, or a base is another than that of its delta. Nothing was loaded.
        StorageError
            A file cannot be read: no permission, a lost connection, a server does not see the directory, ... The
            message names it. Nothing was loaded.
        ValueError
            A table of the store has another description than the checkpoint's. Nothing was loaded.
        MemoryBudgetExceededError
            There is no room for the rows, beside those that are there. Nothing was loaded.
        ServerLostError, DeadlineExceededError
            A server was lost, or did not answer.
        ShoalError
            Of workers of a cluster but worker 0: it was not loaded. The error of worker 0 says why.

        Notes
        -----
        On a cluster it is a call of all workers. The servers read, side by side, each its own rows: ``directory`` is
        one that all of them see, by that path, or of an object store, and ``storage_options`` are sent to them. Where
        there is no storage that machines share, :func:`shoal.connect` takes ``shared_storage=False``.
        """
        self._check_usable()
        chain = checkpoint.read_chain(directory, storage_options)
        self._check_known(table.spec() for table in chain[-1].manifest.tables)  # before the rows, which take a while
        self._load(chain, track=track, progress=progress)

    def _chosen(self, tables: Iterable[str] | None, what: str) -> list[Table]:
        """Find tables by name, all of them where there are no names."""
        with self._locked():
            names = list(self._tables if tables is None else dict.fromkeys(tables))
            unknown = [name for name in names if name not in self._tables]
            if unknown:
                raise ValueError(f"the store has no table {unknown[0]!r} to {what}: it has {list(self._tables)}")
            return [self._tables[name] for name in names]

    def _check_known(self, specs: Iterable[TableSpec]) -> None:
        for spec in specs:
            known = self._tables.get(spec.name)
            if known is not None:
                check_same(known.spec, spec, "the checkpoint")

    def close(self) -> None:
        """Give all memory back. Tables of the store raise :class:`shoal.errors.ClosedError` from then on.

        Waits for saves that are written in the background, and raises what went wrong with one that nobody waited for.
        """
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        with self._lock if self._rwlock.is_ours else nullcontext():
            was_open, self._open = self._open, False
            for table in self._tables.values():
                table.replace_shard(None)
            self._tables.clear()
        if was_open:
            try:
                if not failed and self._rwlock.is_ours:
                    for save in self._saves:
                        save.join()
            finally:
                self._end(failed=failed)


class SingleProcessStore(Store):
    """A store whose only worker is this process, and which has nothing but its tables."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def num_workers(self) -> int:
        """Always 1."""
        return 1

    @property
    def consistency(self) -> Consistency:
        """``ASP()``: pushes are seen as they are made."""
        return ASP()

    def barrier(self, timeout: float | None = None) -> None:
        """Return: there are no other workers."""
        self._check_usable()

    def flush(self, timeout: float | None = None) -> None:
        """Return: a push is done, or has raised, when its call returns."""
        self._check_usable()

    def _end(self, *, failed: bool) -> None:
        pass


class LocalStore(SingleProcessStore):
    """All tables of one process. Made by :func:`local`.

    Its only worker is this process: ``tick`` counts, ``barrier`` returns at once, a push is seen when it returns.
    """

    def __init__(self, *, threads: int | None = None, slots: int = 1024, memory: int | None = None) -> None:
        super().__init__(threads=threads, slots=slots)
        self._budget = None if memory is None else make_budget(memory, slots)
        self._memory = memory
        self._clock = 0

    def __repr__(self) -> str:
        return f"LocalStore(threads={self.threads}, slots={self._slots}, tables={list(self._tables)})"

    @property
    def memory(self) -> int | None:
        """Bytes that the tables may take; None: no bound."""
        return self._memory

    @property
    def clock(self) -> int:
        """How many ticks there were."""
        return self._clock

    def tick(self) -> None:
        """Count: every push is applied when it returns."""
        with self._locked():
            self._clock += 1

    def _take_parts(self, count: int, digest: str, reissue: float) -> Iterator[int]:
        for number in range(count):
            self._check_usable()
            yield number

    def _make_shard(self, spec: TableSpec) -> _core.Shard:
        return spec.shard(self._slots, self._workers, self._budget)

    @contextmanager
    def _snapshots(self, tables: list[tuple[Table, str]], base: checkpoint.Link | None) -> Iterator[checkpoint.Moment]:
        # The lock is held only while the snapshot is taken: it keeps its rows when a load replaces them.
        with ExitStack() as held:

            def take() -> list[checkpoint.Taken]:
                shards = [(table.spec, cast("_core.Shard", table.shard), kind) for table, kind in tables]
                for spec, shard, kind in shards:
                    if kind == "delta" and (base is None or shard.base() != base.digest):
                        raise checkpoint.no_base(spec.name, base)
                return [checkpoint.Taken(*one) for one in held.enter_context(checkpoint.snapshots(shards, self._clock))]

            yield checkpoint.Held(self._rwlock.shared(take), self._slots, self.threads, self._clock)

    @contextmanager
    def _to_export(self, tables: list[Table], *, track: bool) -> Iterator[Tables]:
        with self._saving:
            shards = self._rwlock.shared(lambda: [(table.spec, cast("_core.Shard", table.shard)) for table in tables])
            yield _Followed(shards, self._slots, track)

    def _load(self, chain: checkpoint.Chain, *, track: bool, progress: bool) -> None:
        loaded = checkpoint.load(chain, self._make_shard, self.threads, clock=self._clock, progress=progress)
        if track:
            for _, shard in loaded:
                shard.track(chain[-1].digest)
        self.adopt(loaded)

    def new_rows(self, spec: TableSpec) -> _core.Shard:
        """Make empty rows for a table, within the store's memory, to be filled and then adopted."""
        return self._make_shard(spec)

    def adopt(self, loaded: Sequence[tuple[TableSpec, _core.Shard]]) -> None:
        """Put rows of tables in place at one moment: they are made, or get these rows instead of what they have.

        Parameters
        ----------
        loaded : sequence of (TableSpec, shard)
            Of as many slots as the store has.

        Raises
        ------
        ValueError
            A table of the store has another description. Nothing was put in place.
        """
        with self._locked(), self._rwlock.exclusive():
            self._check_known(spec for spec, _ in loaded)  # tables may have been made meanwhile
            for spec, shard in loaded:
                known = self._tables.get(spec.name)
                if known is None:
                    self._add(spec, shard)
                else:
                    known.replace_shard(shard)


class _Followed(NamedTuple):
    """Tables of this process that are exported: the rows that they had when that began, whatever a load puts in place.

    The store's other saves and exports wait meanwhile, so what is known stays known.
    """

    shards: list[tuple[TableSpec, _core.Shard]]
    slots: int
    track: bool

    @property
    def specs(self) -> list[TableSpec]:
        return [spec for spec, _ in self.shards]

    def know(self, base: Layers) -> bool:
        return all(base.digest_of(spec.name) in (None, shard.base("export")) for spec, shard in self.shards)

    def _kind(self, spec: TableSpec, shard: _core.Shard, base: Layers | None) -> str:
        if base is not None and shard.base("export") == base.digest_of(spec.name):
            return "delta"
        return "base" if self.track else "plain"

    @contextmanager
    def take(self, base: Layers | None) -> Iterator[list[Given]]:
        kinds = [(spec, shard, self._kind(spec, shard, base)) for spec, shard in self.shards]
        with checkpoint.snapshots(kinds, 0, "export") as taken:  # no clock is written
            yield [
                Given(spec, 0, snapshot.read_slot, read_changes=snapshot.read_changes, done=snapshot.done)
                if kind == "delta"
                else Given(spec, snapshot.rows, snapshot.read_slot, done=snapshot.done)
                for spec, snapshot, kind in taken
            ]


def make_budget(memory: int, slots: int) -> _core.Budget:
    if isinstance(memory, bool) or not isinstance(memory, int) or not 0 < memory < 2**63:
        raise ValueError(f"memory must be a number of bytes above 0, got {memory!r}")
    return _core.Budget(slots, memory)


def check_same(known: TableSpec, spec: TableSpec, read_from: str | None = None) -> None:
    """Raise ValueError if a table is not as one that is asked for, or is to be read from somewhere."""
    if known != spec:
        names = [
            name
            for name in ("dim", "optimizer", "init", "dtype", "seed", "admit", "expire")
            if getattr(known, name) != getattr(spec, name)
        ]
        if read_from is not None:
            there, here = (", ".join(f"{name} {getattr(one, name)!r}" for name in names) for one in (spec, known))
            raise ValueError(
                f"table {spec.name!r} has {there} in {read_from}, and was made with {here} here: make it as it is "
                f"there, or under another name"
            )
        differ = [f"{name} {getattr(known, name)!r} instead of {getattr(spec, name)!r}" for name in names]
        raise ValueError(
            f"table {spec.name!r} is there with {', '.join(differ)}: choose another name or that description"
        )
