"""Stores: the interface that local stores and clusters share.

    local()       the rows of this process                      (local.py)
    connect()     the rows of a cluster's servers               (shoal.cluster)

A program for one worker runs unchanged on both: in a local store `tick` only counts and `barrier` returns at once.

Threads: any number. After a fork the child's copy raises WrongProcessError.
"""

import hashlib
import math
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeVar

import numpy as np

from shoal import _core
from shoal.base.dtypes import Dtype, dtype_name
from shoal.base.machine import cores
from shoal.base.scalars import check_slots, plain, whole
from shoal.consistency import Consistency
from shoal.errors import ClosedError
from shoal.lifecycle import Admission, Expiry, SweepReport
from shoal.optim import FTRL, SGD, Add, Init, Optimizer, Zeros
from shoal.store.activity import Activity
from shoal.store.description import check_same
from shoal.store.files import StoreFiles
from shoal.store.member import BARRIER, Member
from shoal.store.order import Order, Parts, Placement
from shoal.table.arrays import Keys
from shoal.table.dense import BLOCK, DenseTable, shape_of
from shoal.table.future import BackgroundTask
from shoal.table.key_batch import KeyBatch
from shoal.table.rwlock import RwLock
from shoal.table.shard import ShardReader
from shoal.table.spec import TableSpec, check_table_count
from shoal.table.table import Table
from shoal.table.tiered import Tiered

_ZEROS = Zeros()
_ADD = Add()
_FTRL = FTRL()
_SGD = SGD()
Data = TypeVar("Data")
Data_co = TypeVar("Data_co", covariant=True)


class Splittable(Protocol[Data_co]):
    """Data that can be divided into splits: a :class:`shoal.data.Reader`."""

    def splits(self, split_bytes: int) -> Sequence[Data_co]:
        """Divide the files into splits of about this many bytes."""

    def position(self) -> dict[str, Any]:
        """Return the files and their sizes."""


class Store(StoreFiles):
    """Tables, and the calls that every kind of store has. A context manager that closes the store.

    Safe from any thread. After a fork the child's copy raises :class:`shoal.errors.WrongProcessError`: create a
    new store there.
    """

    # Lock order: _lock, which guards _tables and _open; then _rwlock, which updates and saves share and a load takes
    # exclusively. A forked child touches neither.

    def __init__(self, *, threads: int | None, slots: int) -> None:
        count, slots = cores() if threads is None else whole("threads", threads), plain(slots)
        if not 1 <= count <= 1024:
            raise ValueError(f"threads must be from 1 to 1024, got {threads!r}")
        check_slots(slots)
        self._slots = slots
        self._workers = _core.ThreadPool(count)
        self._rwlock = RwLock()
        self._begin_locks()
        self._tables: dict[str, Table] = {}
        self.activity = Activity()
        self.member = Member()
        # Of the pulls and pushes of a fit, while it is recorded or made again.
        self.order: Order | None = None
        self._open = True

    def _begin_locks(self) -> None:
        self._lock = threading.Lock()
        self._saving = threading.Lock()  # before _rwlock; released by the thread that writes
        self._saves: list[BackgroundTask] = []

    # ---- implemented by each kind of store ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def rank(self) -> int:
        """Index of this worker among the workers of the job, from 0."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Number of workers of the job."""

    def sends_exactly(self, table: str) -> bool:
        """Whether gradients and weights of a table are transferred exactly, without rounding or filters."""
        return True

    @property
    def placement(self) -> Placement:
        """Where the rows are."""
        return Placement(0, [(0, self._slots, 0)])

    def computing(self) -> AbstractContextManager[None]:
        """Return a block in which no other worker computes, where workers are threads that share a generator."""
        return nullcontext()

    def log_order(self, tables: Sequence[str]) -> None:
        """Keep, from now on, where servers execute the pulls and pushes of these tables; without tables no more.

        Raises ValueError if their order is not that of messages.
        """
        if tables:
            raise ValueError(
                "there is no order to record: this store is in one process, whose fits are the same each time; leave "
                "out record (--record)"
            )

    def take_order(self, tables: Sequence[str]) -> Parts:
        """Return what was kept since the last time; ``tables`` as for `log_order`."""
        return np.empty((0, 6), np.uint64)

    def arc_steps(self, table: str) -> list[int]:
        """Return the number of steps of each arc of `placement` in a table."""
        return [self._tables[table].stats().step]

    def hand_over(self, *, returns: bool, begun: bool = True) -> None:
        """Announce that this worker has handed over its state, and whether it takes part in the job that continues.

        Without ``begun`` it had none, as all others: the next job begins as this one did.
        """

    @property
    def host(self) -> str:
        """Address of this machine, by which the other workers of the job can reach it."""
        return "127.0.0.1"

    @property
    @abstractmethod
    def consistency(self) -> Consistency:
        """Consistency model: which pushes of other workers a pull may see."""

    @property
    @abstractmethod
    def clock(self) -> int:
        """Number of ticks this worker has completed."""

    @abstractmethod
    def tick(self) -> None:
        """End this worker's clock: its pushes so far belong to the clock that ends, later ones to the next.

        Under BSP they are applied once every worker has ended that clock. Waits for the servers for at most a
        millisecond; a pull of the next clock waits as long as necessary.

        Raises
        ------
        ShoalError
            A push failed whose future was dropped without waiting.
        """

    def _clock_reader(self) -> Callable[[], int]:
        """Return what tables read the clock by."""
        return lambda: self.clock

    @property
    def counted_clock(self) -> int:
        """Clock before which all servers have the pushes of this worker, except for what its caches hold back."""
        return self.clock

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker of the job has called `barrier` and all earlier requests of this one are complete.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; default: the store's deadline.

        Raises
        ------
        DeadlineExceededError
            Not all workers arrived in time: the message names the number that did.
        """
        self.meet(BARRIER, timeout)

    def meet(self, name: str, timeout: float | None = None) -> frozenset[int]:
        """Wait, as at `barrier`, until every worker of the job has called `meet` with this name.

        Returns the ranks of the job that took no part: they have died, left or handed over.
        """
        self._check_usable()
        self.member.passed(name)
        return frozenset()

    def hear_of_losses(self) -> bool:
        """Wait until `member` knows of all workers without which a clock has ended; False: the scheduler is silent."""
        return True

    @abstractmethod
    def flush(self, timeout: float | None = None) -> None:
        """Wait until every push of this worker is complete; raise the error of one that failed.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; default: the store's deadline. The pushes themselves continue.

        Raises
        ------
        DeadlineExceededError
            They were not complete within that time.
        ShoalError
            The first push that failed and whose future was dropped without waiting. It is raised once.

        Notes
        -----
        Under BSP a push is complete when every server that owns one of its keys has received it; it is visible once
        all workers have ended the clock.
        Safe from any thread.
        """

    def splits(self, reader: Splittable[Data], *, split_bytes: int = 64 << 20, reissue: float = 0.0) -> Iterator[Data]:
        """Yield the splits of the data that the scheduler assigns to this worker, one after another.

        Parameters
        ----------
        reader : Reader
            The same on every worker: the same files, of the same sizes, in the same order.
        split_bytes : int
            Approximate size of a split; see :meth:`shoal.data.Reader.splits`.
        reissue : float
            If positive, a split that takes longer than this many times the mean is also assigned to a second worker,
            once, when no other split is left. Its examples may then be trained on twice.

        Returns
        -------
        iterator of Reader
            A split counts as trained on when the next one is requested.

        Raises
        ------
        ValueError
            The workers do not have the same data and ``split_bytes``.

        Notes
        -----
        While no worker dies, and without ``reissue``, every split is yielded to exactly one worker. The split of a
        worker that dies is assigned to another from its beginning, so some of its examples are trained on twice. The
        k-th call is the k-th pass for every worker; it ends when all splits of the pass have been trained on, at the
        same clock for all workers. Until then a worker that gets no split keeps ticking, so that the others need not
        wait for it. A worker has one split at a time. Blocks for a round trip to the scheduler between splits.

        Examples
        --------
        ::

            with shoal.connect("tcp://scheduler:5570", consistency=shoal.SSP(staleness=4)) as store:
                model = shoal.LogisticRegression(store=store)
                for split in store.splits(train):
                    model.fit(split)
        """
        if not hasattr(reader, "splits"):
            raise TypeError(f"the data of store.splits is a shoal.data.Reader, got {reader!r}")
        reissue = plain(reissue)
        if isinstance(reissue, bool) or not isinstance(reissue, (int, float)) or not 0 <= reissue < 1e9:
            raise ValueError(f"reissue must be a number from 0, got {reissue!a:.100}")
        splits = reader.splits(split_bytes)
        files = [(os.path.basename(name), size) for name, size in reader.position()["files"]]
        digest = hashlib.sha256(repr((files, split_bytes)).encode()).hexdigest()
        return (splits[number] for number in self._take_splits(len(splits), digest, reissue))

    @abstractmethod
    def _take_splits(self, count: int, digest: str, reissue: float) -> Iterator[int]:
        """Yield the numbers of the splits that are assigned to this worker."""

    @abstractmethod
    def _make_shard(self, spec: TableSpec) -> ShardReader:
        """Make the shard of a new table, or find the servers' or an export's one."""

    @abstractmethod
    def _end(self, *, failed: bool) -> None:
        """Release the store's resources other than its tables; if it ``failed``, without waiting."""

    # ---- properties --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=error is not None)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a store cannot be passed to another process: make or connect one there")

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError("this store was closed: make a new one")

    def _check_usable(self) -> None:
        self._check_open()
        self._rwlock.check_process()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other calls that make tables or close the store."""
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
        """Number of parts of the hash space."""
        return self._slots

    @property
    def workers(self) -> _core.ThreadPool:
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
        optimizer: Optimizer | None = None,
        init: Init = _ZEROS,
        dtype: Dtype = "float32",
        seed: int = 0,
        admit: Admission | None = None,
        expire: Expiry | Iterable[Expiry] | None = None,
        storage: Tiered | None = None,
    ) -> Table:
        """Create a table, or return the existing one with the same description.

        Parameters
        ----------
        name : str
            Unique in the store, which has at most 1024 tables; 1 to 1024 characters.
        dim : int
            Numbers per row, 1 to 4096; of int64 up to 2048.
        optimizer : Optimizer, optional
            The rule that pushes apply. Default: `FTRL`; of int64 `Add`, the only one.
        init : Init
            Initializer of new rows.
        dtype : numpy.dtype or its name: float32, float16, int64, or "bfloat16", which NumPy does not have
            How weights are stored; 16 bits from dim 2, for optimizers that store weights, stochastically rounded.
            int64: rows are integers, to which pushes add (`docs/counters.md`).
        seed : int
            Of the rounding of accumulators and 16-bit weights.
        admit : AfterCount, AfterBloom or WithProbability, optional
            Which keys get a row; default: all that are pushed. Others wait: they read their initial row.
        expire : TimeToLive, DecayedScore, MinNorm or MaxRows, or several of them, optional
            Rows that a sweep drops; default: none.
        storage : Tiered, optional
            Where rows are that do not fit in memory; default: all rows are in memory. Only for local stores.

        Returns
        -------
        Table

        Raises
        ------
        ValueError
            A table of that name has another description, or another storage; or storage does not suit it.
        StorageError
            The storage cannot be made.
        TypeError
            ``storage`` is something else.
        """
        if storage is not None and not isinstance(storage, Tiered):
            raise TypeError(
                f"storage must be a shoal.Tiered, got {storage!r}: pass shoal.Tiered({storage!r}, memory=...)"
            )
        if optimizer is None:
            optimizer = _ADD if dtype_name(dtype) == "int64" else _FTRL
        rules = () if expire is None else tuple(expire) if isinstance(expire, Iterable) else (expire,)
        spec = TableSpec(
            name=name,
            dim=dim,
            optimizer=optimizer,
            init=init,
            dtype=dtype_name(dtype),
            seed=seed,
            admit=admit,
            expire=rules,
        )
        with self._locked():
            known = self._tables.get(name)
            if known is None:
                check_table_count(len(self._tables) + 1)
                known = self._add(spec, self._make_shard(spec) if storage is None else self._make_tiered(spec, storage))
            elif storage is not None and storage != self._storage_of(name):
                raise ValueError(
                    f"table {name!r} exists with storage {self._storage_of(name)!r} instead of {storage!r}: make it "
                    f"with its storage first, and then load or train"
                )
        check_same(known.spec, spec)
        return known

    def _make_tiered(self, spec: TableSpec, storage: Tiered) -> ShardReader:
        """Make the rows of a table that are on disk as well."""
        raise ValueError(
            f"table {spec.name!r} cannot have {storage!r} here: a storage is that of a table of shoal.local(); "
            f"start the servers of a cluster with --tier DIR:SIZE, or leave storage out"
        )

    def _storage_of(self, name: str) -> Tiered | None:
        """Return where the rows of a table are that do not fit in memory."""
        return None

    def _add(self, spec: TableSpec, reader: ShardReader) -> Table:
        table = self._tables[spec.name] = Table(
            spec, reader, self._slots, self._workers, self._rwlock, self._clock_reader()
        )
        return table

    def dense(
        self,
        name: str,
        shape: int | Sequence[int],
        *,
        optimizer: Optimizer | None = None,
        init: Init = _ZEROS,
        block: int = BLOCK,
        dtype: Dtype = "float32",
        seed: int = 0,
    ) -> DenseTable:
        """Create an array of parameters, divided into blocks that are the rows of a table of that name.

        Parameters
        ----------
        name : str
            Unique among the store's tables.
        shape : int or sequence of int
        optimizer : Optimizer, optional
            The rule that pushes apply. Default: `SGD`; of int64 `Add`, the only one.
        init : Init
            Initializer of the numbers; `DenseTable.assign` sets them one by one.
        block : int
            Numbers in a block, 1 to 4096; of int64 up to 2048. Blocks are spread over the servers. A smaller array is
            one block.
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
        >>> with shoal.local() as store:
        ...     store.dense("mlp", (3, 500)).pull().shape
        (3, 500)
        """
        sizes = shape_of(name, shape)
        dim = min(block, math.prod(sizes))
        if optimizer is None:
            optimizer = _ADD if dtype_name(dtype) == "int64" else _SGD
        return DenseTable(self.table(name, dim=dim, optimizer=optimizer, init=init, dtype=dtype, seed=seed), sizes)

    def sweep(self, *, dry_run: bool = False) -> SweepReport:
        """Drop the rows that the tables' expiry rules select, and return their memory to the system.

        Parameters
        ----------
        dry_run : bool
            Whether only to report what would be dropped, now and at other thresholds.

        Returns
        -------
        SweepReport
            One entry for every table that has rules. ``print`` shows it.

        Notes
        -----
        Only `fit` of a model sweeps by itself, after each pass, and before the checkpoints of a stream without an end.
        In other programs call this at intervals of clocks, on one worker. Waiting keys that have expired by the
        admission rule are removed too. Slots are locked one by one while other calls continue. On a cluster under BSP
        rows are dropped at the end of the clock.

        Examples
        --------
        >>> import numpy as np
        >>> import shoal
        >>> with shoal.local() as store:
        ...     table = store.table("t", expire=shoal.TimeToLive(9))
        ...     table.push(np.array([7, 9], np.uint64), np.ones(2, np.float32)).result()
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
            An additional key, 0 to 2^64 - 1, appended without a copy of the others: the key of a bias.

        Returns
        -------
        KeyBatch
        """
        self._check_open()
        return KeyBatch(keys, self._slots, self._workers, last)

    def close(self) -> None:
        """Release all memory. Afterwards tables of the store raise :class:`shoal.errors.ClosedError`.

        Waits for background saves, and raises the error of one whose future was dropped without waiting.
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
