"""A store whose rows are in this process.

Threads: any number.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, cast

from shoal.base.sizes import memory_bytes
from shoal.checkpoint.format import Chain, ChainEntry
from shoal.checkpoint.read import load as load_checkpoint
from shoal.checkpoint.write import LocalSnapshotSet, SnapshotSet, TableSnapshot, snapshots, unknown_base
from shoal.consistency import ASP, Consistency
from shoal.export.layers import Layers
from shoal.export.write import ExportTables, TableSource
from shoal.store.base import Store
from shoal.store.description import make_budget
from shoal.store.forks import forked
from shoal.table.future import Future, Result
from shoal.table.shard import LocalShard
from shoal.table.spec import TableSpec
from shoal.table.table import Table
from shoal.table.tiered import Tiered


def local(*, threads: int | None = None, slots: int = 1024, memory: int | str | None = None) -> "LocalStore":
    """Make a store in this process.

    Parameters
    ----------
    threads : int, optional
        Threads that share the work of one call; default: the cores that this process may use.
    slots : int
        Number of parts of the hash space: a power of two from 2 to 16384. The default suits a few rows to
        billions; results do not depend on it, except that limits are divided equally among slots.
    memory : int or str, optional
        Bytes that the tables may use: index, rows and keys that wait for admission. Never exceeded: each slot has its
        share, and a push or assignment that needs more evicts the rows that the first of the table's expiry rules would
        drop first. If the table has no rule, or the push has more new keys than rows can be evicted,
        :class:`shoal.MemoryBudgetExceededError` is raised and nothing has changed. Default: no bound. Working memory of
        calls is not counted, nor up to 2 MiB per table of allocated pages that rows do not fill yet.

    Returns
    -------
    LocalStore

    Examples
    --------
    >>> with local(threads=2) as store:
    ...     table = store.table("user", dim=16)
    """
    return LocalStore(threads=threads, slots=slots, memory=memory)


class _Clock:
    """The clock of a store; its tables read it without holding the store, whose memory is free once it is dropped."""

    def __init__(self) -> None:
        self.now = 0


class SingleProcessStore(Store):
    """A store whose only worker is this process."""

    def __init__(self, *, threads: int | None, slots: int) -> None:
        super().__init__(threads=threads, slots=slots)
        self._clock = _Clock()

    @property
    def clock(self) -> int:
        """Number of ticks so far."""
        return self._clock.now

    def _clock_reader(self) -> Callable[[], int]:
        clock = self._clock
        return lambda: clock.now

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
        """``ASP()``: pushes are visible at once."""
        return ASP()

    def flush(self, timeout: float | None = None) -> None:
        """Return: a push is complete, or has raised, when its call returns."""
        self._check_usable()

    def _end(self, *, failed: bool) -> None:
        pass


class LocalStore(SingleProcessStore):
    """All tables of one process. Made by `shoal.local`.

    Its only worker is this process: ``tick`` counts, ``barrier`` returns at once, a push is visible when it returns.
    """

    def __init__(self, *, threads: int | None = None, slots: int = 1024, memory: int | str | None = None) -> None:
        super().__init__(threads=threads, slots=slots)
        self._memory = None if memory is None else memory_bytes(memory)
        self._budget = None if self._memory is None else make_budget(self._memory, self._slots)
        self._storages: dict[str, Tiered] = {}

    def __repr__(self) -> str:
        return f"LocalStore(threads={self.threads}, slots={self._slots}, tables={list(self._tables)})"

    @property
    def memory(self) -> int | None:
        """Bytes that the tables may use; None: no bound."""
        return self._memory

    def tick(self) -> None:
        """Increment the clock: every push is applied when it returns."""
        with self._locked():
            self._clock.now += 1

    def _take_splits(self, count: int, digest: str, reissue: float) -> Iterator[int]:
        for number in range(count):
            self._check_usable()
            yield number

    def fork(self, work: Callable[[], Result]) -> Future[Result]:
        """Call a function in a fork of this process, which shares the memory of all rows until they change.

        For several settings from one state: each fork trains, measures or saves, and takes the memory that it changes.

        Parameters
        ----------
        work : callable
            Called without arguments in the child, where this store, its tables and models over them are copies: what it
            changes there is seen by no one else. Its result, which has to be picklable, is the future's.

        Returns
        -------
        Future
            Raises what ``work`` raises, or `shoal.ShoalError` if the child was killed.

        Raises
        ------
        ValueError
            A table has rows on a disk (`shoal.Tiered`), whose files belong to one process, or is being saved.

        Notes
        -----
        Blocks for the calls that are under way, and for the copy of page tables: about 10 ms for each GB. A child ends
        with its parent, which waits for it at its own end. Threads of other libraries do not exist in the child, where
        they may wait for ever: with PyTorch call ``torch.set_num_threads(1)`` before its first use.

        Examples
        --------
        >>> import numpy as np
        >>> with local() as store:
        ...     table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        ...     key = np.array([7], np.uint64)
        ...     def step(size):
        ...         table.push(key, np.array([size], np.float32)).result()
        ...         return float(table.pull(key)[0, 0])
        ...     futures = [store.fork(lambda: step(1.0)), store.fork(lambda: step(2.0))]
        ...     [future.result() for future in futures], float(table.pull(key)[0, 0])
        ([-1.0, -2.0], 0.0)
        """
        if not callable(work):
            raise TypeError(f"work is {work!r}: pass a function without arguments")
        with self._locked(), self._saving, self._rwlock.exclusive():
            shards = [(table.name, cast("LocalShard", table.shard)) for table in self._tables.values()]
            for name, shard in shards:
                if name in self._storages:
                    raise ValueError(f"table {name!r} has rows on a disk, whose files belong to one process: no fork")
                if shard.is_being_saved:
                    raise ValueError(f"table {name!r} is being saved: fork before the save, or after it")

            def adopt() -> None:
                for _, shard in shards:
                    shard.adopt_after_fork()
                self._workers.restart_after_fork()
                self._begin_locks()  # this thread held them
                self._rwlock.adopt()

            return forked(work, adopt)

    def _make_shard(self, spec: TableSpec) -> LocalShard:
        return LocalShard.of(spec, self._slots, self._workers, self._budget, self._storages.get(spec.name))

    def _make_tiered(self, spec: TableSpec, storage: Tiered) -> LocalShard:
        if self._budget is not None:
            raise ValueError(
                f"table {spec.name!r} cannot have a storage in a store with a memory budget: make the store without "
                f"memory=, and bound the table by Tiered(..., memory=)"
            )
        shard = LocalShard.of(spec, self._slots, self._workers, storage=storage)
        self._storages[spec.name] = storage
        return shard

    def _storage_of(self, name: str) -> Tiered | None:
        return self._storages.get(name)

    @contextmanager
    def _snapshots(self, tables: list[tuple[Table, str]], base: ChainEntry | None) -> Iterator[SnapshotSet]:
        # The lock is held only while the snapshot is taken: it keeps its rows when a load replaces them.
        with ExitStack() as held:

            def take() -> list[TableSnapshot]:
                shards = [(table.spec, cast("LocalShard", table.shard), kind) for table, kind in tables]
                for spec, shard, kind in shards:
                    if kind == "delta" and (base is None or shard.base() != base.digest):
                        raise unknown_base(spec.name, base)
                return [TableSnapshot(*one) for one in held.enter_context(snapshots(shards, self.clock))]

            yield LocalSnapshotSet(self._rwlock.shared(take), self._slots, self.threads, self.clock)

    @contextmanager
    def _to_export(self, tables: list[Table], *, track: bool) -> Iterator[ExportTables]:
        with self._saving:
            shards = self._rwlock.shared(lambda: [(table.spec, cast("LocalShard", table.shard)) for table in tables])
            yield _TrackedTables(shards, self._slots, track)

    def _load(self, chain: Chain, *, track: bool, progress: bool) -> None:
        loaded = load_checkpoint(chain, self._make_shard, self.threads, clock=self.clock, progress=progress)
        if track:
            for _, shard in loaded:
                shard.track(chain[-1].digest)
        self.adopt(loaded)

    def new_rows(self, spec: TableSpec) -> LocalShard:
        """Make an empty shard for a table, within the store's memory budget, to be filled and then adopted."""
        return self._make_shard(spec)

    def adopt(self, loaded: Sequence[tuple[TableSpec, LocalShard]]) -> None:
        """Create tables with loaded rows, or replace the rows of existing ones, all at one moment.

        Parameters
        ----------
        loaded : sequence of (TableSpec, shard)
            Each with the store's number of slots.

        Raises
        ------
        ValueError
            A table of the store has another description. Nothing was replaced.
        """
        with self._locked(), self._rwlock.exclusive():
            self._check_known(spec for spec, _ in loaded)  # tables may have been made meanwhile
            for spec, shard in loaded:
                known = self._tables.get(spec.name)
                if known is None:
                    self._add(spec, shard)
                else:
                    known.replace_shard(shard)


class _TrackedTables(NamedTuple):
    """The tables of an export of this process, with the rows they had when it began, also after a load.

    Other saves and exports of the store wait, so the record of changes is not reset meanwhile.
    """

    shards: list[tuple[TableSpec, LocalShard]]
    slots: int
    track: bool

    @property
    def specs(self) -> list[TableSpec]:
        return [spec for spec, _ in self.shards]

    def know(self, base: Layers) -> bool:
        return all(base.digest_of(spec.name) in (None, shard.base("export")) for spec, shard in self.shards)

    def _kind(self, spec: TableSpec, shard: LocalShard, base: Layers | None) -> str:
        if base is not None and shard.base("export") == base.digest_of(spec.name):
            return "delta"
        return "base" if self.track else "plain"

    @contextmanager
    def take(self, base: Layers | None) -> Iterator[list[TableSource]]:
        kinds = [(spec, shard, self._kind(spec, shard, base)) for spec, shard in self.shards]
        with snapshots(kinds, 0, "export") as table_snapshots:  # no clock is written
            yield [
                TableSource(spec, 0, snapshot.read_slot, read_changes=snapshot.read_changes, done=snapshot.done)
                if kind == "delta"
                else TableSource(spec, snapshot.rows, snapshot.read_slot, done=snapshot.done)
                for spec, snapshot, kind in table_snapshots
            ]
