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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeVar

from shoal import _core, checkpoint
from shoal.consistency import ASP, Consistency
from shoal.dense import BLOCK, DenseTable, shape_of
from shoal.errors import ClosedError
from shoal.gate import Gate
from shoal.lifecycle import Admission, Expiry, SweepReport
from shoal.optim import FTRL, SGD, Init, Optimizer, Zeros
from shoal.table import KeyBatch, Keys, Shard, Table, TableSpec

__all__ = ["LocalStore", "Store", "local"]

_ZEROS = Zeros()
_FTRL = FTRL()
_SGD = SGD()

Data = TypeVar("Data")
Data_co = TypeVar("Data_co", covariant=True)


class Cuttable(Protocol[Data_co]):
    """Data in files that can be cut: a :class:`shoal.Reader`."""

    def cut(self, part_bytes: int) -> Sequence[Data_co]:
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
        :class:`shoal.MemoryBudgetExceeded` is raised and nothing has changed. Default: no bound. What a call works in
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

    Safe from any thread. After a fork the child's copy raises :class:`shoal.errors.WrongProcess`: make a store there.
    """

    # Locks, in this order: _lock, which guards _tables and _open; _gate, through which changes and saves pass, and
    # which a load shuts while it swaps. A child touches neither.

    def __init__(self, *, threads: int | None, slots: int) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = cores if threads is None else threads
        if not isinstance(count, int) or not 1 <= count <= 1024:
            raise ValueError(f"threads must be from 1 to 1024, got {threads!r}")
        if not isinstance(slots, int) or slots not in {1 << bits for bits in range(1, 15)}:
            raise ValueError(f"slots must be a power of two from 2 to 16384, got {slots!r}")
        self._slots = slots
        self._workers = _core.Workers(count)
        self._gate = Gate()
        self._lock = threading.Lock()
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

        Under BSP they are applied once every worker has ended that clock. Does not wait for the servers: a pull of the
        next clock does, if it must.

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
        DeadlineExceeded
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
        DeadlineExceeded
            They were not done in that time.
        ShoalError
            The first push that failed and whose handle nobody waited for. It is told once.

        Notes
        -----
        Under BSP a push is done when every server it concerns has it: it is seen once all workers have ended the clock.
        Safe from any thread.
        """

    def parts(self, reader: Cuttable[Data], *, part_bytes: int = 64 << 20, reissue: float = 0.0) -> Iterator[Data]:
        """Share the data out among the workers of the job: yields one part after another for this worker to train on.

        Parameters
        ----------
        reader : Reader
            The same on every worker: the same files, of the same sizes, in the same order.
        part_bytes : int
            About how long a part is; see :meth:`shoal.Reader.cut`.
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
        parts = reader.cut(part_bytes)
        files = [(os.path.basename(name), size) for name, size in reader.position()["files"]]
        digest = hashlib.sha256(repr((files, part_bytes)).encode()).hexdigest()
        return (parts[number] for number in self._take_parts(len(parts), digest, reissue))

    @abstractmethod
    def _take_parts(self, count: int, digest: str, reissue: float) -> Iterator[int]:
        """Yield the numbers of the parts that this worker is to train on."""

    @abstractmethod
    def _make_shard(self, spec: TableSpec) -> Shard:
        """Make the rows of a new table, or find those that the servers have."""

    @abstractmethod
    def _undisturbed(self, save: Callable[[], None]) -> None:
        """Save while no load puts other rows in place, and no push of this process comes between two tables."""

    @abstractmethod
    def _load(self, directory: Path, manifest: checkpoint.Manifest, *, progress: bool) -> None:
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
        self._gate.check_process()

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
        table = self._tables[spec.name] = Table(spec, shard, self._slots, self._workers, self._gate, lambda: self.clock)
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

    def save(
        self, directory: str | os.PathLike[str], *, tables: Iterable[str] | None = None, progress: bool = False
    ) -> None:
        """Write a full checkpoint of all tables, or of some.

        All rows are of one moment: pushes from other threads wait until it is written; pulls go on. A checkpoint that
        is already in ``directory`` is replaced at the very end, by one rename: a save that is cut off leaves it whole.

        Parameters
        ----------
        directory : path
            Made if it is not there.
        tables : iterable of str, optional
            Names of the tables to write; all of them if not given.
        progress : bool
            Whether to show a progress bar.

        Raises
        ------
        ValueError
            The store has no table of such a name. Nothing was written.
        """
        with self._locked():
            names = list(self._tables if tables is None else dict.fromkeys(tables))
            unknown = [name for name in names if name not in self._tables]
            if unknown:
                raise ValueError(f"the store has no table {unknown[0]!r} to save: it has {list(self._tables)}")
            chosen = [self._tables[name] for name in names]

        self._undisturbed(
            lambda: checkpoint.save(
                Path(directory), chosen, self._slots, self.threads, clock=self.clock, progress=progress
            )
        )

    def load(self, directory: str | os.PathLike[str], *, progress: bool = False) -> None:
        """Read a checkpoint: its tables are made, or take the place of the rows of tables that are there.

        It may have been written with any number of slots and threads. Tables that it does not name stay. All tables get
        their rows at one moment: a push from another thread is done before it, or is made to the rows that were loaded.

        Parameters
        ----------
        directory : path
        progress : bool
            Whether to show a progress bar.

        Raises
        ------
        CorruptionError
            A file is missing, cut short or changed. Nothing was loaded.
        ValueError
            A table of the store has another description than the checkpoint's. Nothing was loaded.
        """
        self._check_usable()
        manifest = checkpoint.read_manifest(Path(directory))
        self._check_known(table.spec() for table in manifest.tables)  # before the rows, which take a while
        self._load(Path(directory), manifest, progress=progress)

    def _check_known(self, specs: Iterable[TableSpec]) -> None:
        for spec in specs:
            known = self._tables.get(spec.name)
            if known is not None:
                check_same(known.spec, spec)

    def close(self) -> None:
        """Give all memory back. Tables of the store raise :class:`shoal.errors.ClosedError` from then on."""
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        with self._lock if self._gate.is_ours else nullcontext():
            was_open, self._open = self._open, False
            for table in self._tables.values():
                table.replace_shard(None)
            self._tables.clear()
        if was_open:
            self._end(failed=failed)


class LocalStore(Store):
    """All tables of one process. Made by :func:`local`.

    Its only worker is this process: ``tick`` counts, ``barrier`` returns at once, a push is seen when it returns.
    """

    def __init__(self, *, threads: int | None = None, slots: int = 1024, memory: int | None = None) -> None:
        super().__init__(threads=threads, slots=slots)
        if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int) or not 0 < memory < 2**63):
            raise ValueError(f"memory must be a number of bytes above 0, got {memory!r}")
        self._budget = None if memory is None else _core.Budget(slots, memory)
        self._clock = 0

    def __repr__(self) -> str:
        return f"LocalStore(threads={self.threads}, slots={self._slots}, tables={list(self._tables)})"

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

    @property
    def clock(self) -> int:
        """How many ticks there were."""
        return self._clock

    def tick(self) -> None:
        """Count: every push is applied when it returns."""
        with self._locked():
            self._clock += 1

    def barrier(self, timeout: float | None = None) -> None:
        """Return: there are no other workers."""
        self._check_usable()

    def flush(self, timeout: float | None = None) -> None:
        """Return: a push is done, or has raised, when its call returns."""
        self._check_usable()

    def _take_parts(self, count: int, digest: str, reissue: float) -> Iterator[int]:
        for number in range(count):
            self._check_usable()
            yield number

    def _make_shard(self, spec: TableSpec) -> _core.Shard:
        return spec.shard(self._slots, self._workers, self._budget)

    def _undisturbed(self, save: Callable[[], None]) -> None:
        self._gate.change(save)  # pushes are kept away by the shards, all of which `save` freezes first

    def _load(self, directory: Path, manifest: checkpoint.Manifest, *, progress: bool) -> None:
        loaded = checkpoint.load(
            directory, manifest, self._make_shard, self.threads, clock=self._clock, progress=progress
        )
        with self._locked(), self._gate.shut():
            self._check_known(spec for spec, _ in loaded)  # tables may have been made meanwhile
            for spec, shard in loaded:
                known = self._tables.get(spec.name)
                if known is None:
                    self._add(spec, shard)
                else:
                    known.replace_shard(shard)

    def _end(self, *, failed: bool) -> None:
        pass


def check_same(known: TableSpec, spec: TableSpec) -> None:
    if known != spec:
        differ = [
            f"{name} {getattr(known, name)!r} instead of {getattr(spec, name)!r}"
            for name in ("dim", "optimizer", "init", "dtype", "seed", "admit", "expire")
            if getattr(known, name) != getattr(spec, name)
        ]
        raise ValueError(
            f"table {spec.name!r} is there with {', '.join(differ)}: choose another name or that description"
        )
