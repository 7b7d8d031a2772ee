"""Tables: rows by 64-bit key, with the optimizer that updates them.

Over 600 lines: one public class, two thirds of which are docstrings.

Threads: any number; a row is never read half written.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.errors import ClosedError
from shoal.lifecycle import (
    Expiry,
    TableSweep,
    read_sweep,
    rules_native,
)
from shoal.optim import Init, Optimizer
from shoal.table import reductions
from shoal.table.arrays import AnyRows, Counts, Keys, Rows, as_counts, as_floats, as_keys, as_out, as_rows
from shoal.table.future import After, Future, no_op, requests_of
from shoal.table.key_batch import KeyBatch
from shoal.table.rwlock import RwLock
from shoal.table.sections import section, sighted
from shoal.table.shard import LocalShard, Shard, ShardReader, pull_and_expand
from shoal.table.spec import TableSpec
from shoal.table.stats import TableStats, tier_stats
from shoal.user_functions import counted, describe, merged

# A pull of rows of at least this many floats, of keys of which at least this share is unique, writes rows directly to
# their positions: 0.6 to 0.9 of the CPU time (docs/decisions/0022-local-pull.md).
_ONE_PASS_DIM = 32
_ONE_PASS_UNIQUE = 5 / 6

_DEVIATIONS = 3  # standard ones above the mean: room for the rows of almost every slot
_MOST_KEYS = 1 << 22  # of a function of rows: they are sent in one message

AnyReader = TypeVar("AnyReader", bound=ShardReader)


class Table:
    """Rows of ``dim`` weights by 64-bit key, with the optimizer that updates them. Made by ``store.table(...)``.

    A table of ``dtype="int64"`` has rows of integers: wherever float32 is written below, its rows are int64, and what
    is pushed is added (`Add`).

    All keys are valid, including 0 and 2**64 - 1; a call may have duplicates. Every method may be called from any
    thread: a row is never seen half written. Calls block until they are done and release the GIL while they work.

    Examples
    --------
    >>> import shoal
    >>> store = shoal.local()
    >>> table = store.table("user", dim=2, optimizer=shoal.SGD(lr=0.5))
    >>> keys = np.array([7, 7, 3], np.uint64)
    >>> table.push(keys, np.ones((3, 2), np.float32)).result()
    >>> table.pull(keys).tolist()
    [[-1.0, -1.0], [-1.0, -1.0], [-0.5, -0.5]]
    """

    def __init__(
        self,
        spec: TableSpec,
        reader: ShardReader,
        slots: int,
        workers: _core.ThreadPool,
        rwlock: RwLock,
        clock: Callable[[], int],
    ) -> None:
        self._spec = spec
        self._clock = clock
        self._reader: ShardReader | None = reader
        self._slots = slots
        self._workers = workers
        self._rwlock = rwlock
        self._floats = spec.floats
        self._is_integer = spec.is_integer
        self._needs_counts = spec.needs_counts
        self._number: np.dtype[Any] = np.dtype(np.int64 if spec.is_integer else np.float32)
        self._grads = "amounts" if spec.is_integer else "grads"  # what is pushed to a table of integers is no gradient

    def __repr__(self) -> str:
        return f"Table({self.name!r}, dim={self.dim}, optimizer={self.optimizer}, dtype={self.spec.dtype!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"table {self.name!r} cannot be passed to another process: make or connect a store there, and ask "
            f"it for the "
            "table"
        )

    @property
    def spec(self) -> TableSpec:
        """Description of the table."""
        return self._spec

    @property
    def clock(self) -> int:
        """The store's clock."""
        return self._clock()

    @property
    def name(self) -> str:
        """Its name in the store."""
        return self._spec.name

    @property
    def dim(self) -> int:
        """Weights per row."""
        return self._spec.dim

    @property
    def optimizer(self) -> Optimizer:
        """The rule that a push applies."""
        return self._spec.optimizer

    @property
    def init(self) -> Init:
        """Initializer of new rows."""
        return self._spec.init

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the rows that are pulled and pushed: float32, or int64. How they are stored is ``spec.dtype``."""
        return self._number

    @property
    def seed(self) -> int:
        """Seed of the rounding."""
        return self._spec.seed

    @property
    def reader(self) -> ShardReader:
        """The rows, for reading by key: the engine's object, or a client of the servers. A load may replace it.

        Raises
        ------
        ClosedError
            The store was closed.
        WrongProcessError
            The store was made before a fork, by the parent.
        """
        reader = self._reader
        if reader is None:
            raise ClosedError(f"table {self.name!r} belongs to a store that was closed: make a new store")
        self._rwlock.check_process()
        return reader

    @property
    def shard(self) -> Shard:
        """The rows, for reading and updating.

        Raises
        ------
        ValueError
            The table is of an export, which is read-only.
        ClosedError, WrongProcessError
            As for :attr:`reader`.
        """
        return self.reader.as_shard()

    @property
    def workers(self) -> _core.ThreadPool:
        """The store's threads, for the kernels that take them."""
        return self._workers

    def key_batch(self, keys: Keys, workers: _core.ThreadPool | None = None) -> KeyBatch:
        """Sort keys once, as the store's ``key_batch`` does, with ``workers`` in place of the store's threads."""
        return KeyBatch(keys, self._slots, self._workers if workers is None else workers)

    def _check_usable(self) -> None:
        """Raise before any work if the store was closed or is read-only."""
        _ = self.shard

    def replace_shard(self, shard: Shard | None) -> None:
        """Replace the rows: done by a load, under the exclusive lock, and by `close`."""
        self._reader = shard

    def _rows(self, values: npt.ArrayLike, n: int, what: str) -> Rows:
        return as_floats(as_rows(values, (n, self._spec.dim), self._spec.name, what, self._number))

    def _out(self, out: AnyRows | None, n: int) -> AnyRows:
        return as_out(out, (n, self._spec.dim), self._spec.name, self._number)

    def _batch(self, keys: Keys) -> KeyBatch:
        return KeyBatch(keys, self._slots, self._workers)

    def pull(self, keys: Keys, *, out: AnyRows | None = None) -> AnyRows:
        """Read the rows of ``keys``.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            Any order, duplicates allowed. An unseen key reads its initial row and is not created. Narrower integers
            are widened; negative ones are reinterpreted bit for bit as int64.
        out : float32[n, dim], optional
            Filled and returned instead of a new array.

        Returns
        -------
        float32[n, dim]

        Examples
        --------
        >>> import shoal
        >>> shoal.local().table("t", dim=16).pull(np.array([7, 7], np.uint64)).shape
        (2, 16)
        """
        return self.pull_async(keys, out=out).result()

    def pull_async(self, keys: Keys, *, out: AnyRows | None = None, after: After = ()) -> Future[AnyRows]:
        """Start reading the rows of ``keys``; on a cluster, the caller can compute while the servers answer.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            As for :meth:`pull`.
        out : float32[n, dim], optional
            Filled by the time ``result()`` returns.
        after : Future, or list or tuple of Future, optional
            As for :meth:`push`.

        Returns
        -------
        Future
            ``result()`` returns float32[n, dim].
        """
        reader = _after(self.reader, after)
        batch = self._batch(keys)
        rows = self._out(out, batch.input_size)
        return self._pull_into(reader, batch, rows)

    def _pull_into(self, reader: ShardReader, batch: KeyBatch, rows: AnyRows) -> Future[AnyRows]:
        # One pass needs no buffer of unique rows, but its writes are scattered.
        floats = as_floats(rows)
        is_sparse = self._floats >= _ONE_PASS_DIM and len(batch) >= _ONE_PASS_UNIQUE * batch.input_size
        if is_sparse or reader.is_remote:
            return Future(reader.pull_per_key(batch.native, floats), lambda: rows)
        return pull_and_expand(reader.pull, batch.native, floats, self._workers, rows)

    def push(self, keys: Keys, grads: AnyRows, *, after: After = ()) -> Future[None]:
        """Apply one optimizer step to the rows of ``keys``, creating missing rows.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            Duplicates allowed: their gradients are summed first, in order of occurrence, then ONE step is applied.
        grads : float32[n, dim], at dim 1 also float32[n]
            A row whose sum is all zeros keeps every bit. A row whose sum, or whose result, is not finite is left
            unchanged and counted in ``stats().nonfinite_rows``.
        after : Future, or list or tuple of Future, optional
            Futures of ``push``, ``pull_async`` and ``push_pull`` of any tables of this store. The call is executed when
            they are done, on all servers, and the caller does not wait. If one of them fails, the call is not executed
            and fails with a `DependencyError`. The time that it is held counts towards the store's timeout.

        Returns
        -------
        Future
            ``result()`` returns once the push is applied, under BSP once all its servers keep it for its clock's end.

        Notes
        -----
        Without ``after``, calls are sent in order, but no server waits for another one: a call may be executed on one
        server before an earlier call is executed on another, or before an earlier message that was lost and is sent
        again. A clock does not end before the calls that were made in it.

        On a cluster the servers may not have received the push when this returns; ``grads`` may still be changed.
        Under BSP a push is visible once every worker has ended the clock with ``store.tick()``.
        """
        self._check_usable()
        checked = as_keys(keys)
        rows = self._rows(grads, len(checked), self._grads)
        counting = self._needs_counts
        batch = _core.SummedBatch(checked, rows, self._floats, self._slots, self._workers, counting, self._is_integer)
        return self._push(batch, batch.sums, batch.counts() if counting else None, after=after)

    def _push(
        self,
        batch: _core.KeyBatch | _core.SummedBatch,
        grads: Rows,
        counts: Counts | None,
        locations: _core.RowLocations | None = None,
        after: After = (),
    ) -> Future[None]:
        push = self._rwlock.shared(
            lambda: _after(self.shard, after).push(batch, grads, counts, self._clock(), locations)
        )
        return Future(None if isinstance(push, int) else push, no_op)

    def push_pull(
        self, keys: Keys, grads: AnyRows, *, out: AnyRows | None = None, after: After = ()
    ) -> Future[AnyRows]:
        """Push, and read the rows of the same keys after that push.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            As for :meth:`push`.
        grads : float32[n, dim], at dim 1 also float32[n]
            As for :meth:`push`.
        out : float32[n, dim], optional
            Filled by the time ``result()`` returns.
        after : Future, or list or tuple of Future, optional
            As for :meth:`push`.

        Returns
        -------
        Future
            ``result()`` returns float32[n, dim]: the rows including this push; under BSP on a cluster, where only pulls
            of the next clock see a push, the rows of this clock. The keys are sorted once for both.

        Examples
        --------
        >>> import shoal
        >>> table = shoal.local().table("t", optimizer=shoal.SGD(lr=1.0))
        >>> table.push_pull(np.array([7, 3], np.uint64), np.array([2.0, 1.0], np.float32)).result().tolist()
        [[-2.0], [-1.0]]
        """
        self._check_usable()
        batch = self._batch(keys)
        rows = self._out(out, batch.input_size)
        summed = as_floats(batch.sum(as_rows(grads, rows.shape, self.name, self._grads, self._number)))
        counts = batch.counts() if self._needs_counts else None

        def both() -> Future[AnyRows]:
            shard = _after(self.shard, after)
            pushed = shard.push(batch.native, summed, counts, self._clock())
            if isinstance(pushed, int):
                return self._pull_into(shard, batch, rows)
            return Future(shard.pull_after(pushed, batch.native, as_floats(rows)), lambda: rows)

        return self._rwlock.shared(both)

    def prefetch(self, keys: Keys | KeyBatch) -> None:
        """Begin to read the rows of a later call that are on disk, and return.

        Parameters
        ----------
        keys : uint64[n], int64[n] or KeyBatch
            Those of the call, or from this store's ``key_batch``.

        Notes
        -----
        For tables with a storage (:class:`shoal.Tiered`), and for servers with a tier, to which it sends the keys
        without waiting for an answer; others do nothing. The first call on a cluster asks the servers whether they
        have one, and blocks until they answer. No result depends on it, and no page is read twice. Rows that were read
        take up to an eighth of the storage's memory, in addition to it, until a call uses them or the keys of 8 later
        calls were prefetched; rows without room are read by their call. An error of the disk is raised by the call
        that needs the rows. Fits and :class:`shoal.torch.Pipeline` do this themselves. Safe from any thread.

        Examples
        --------
        >>> import shoal
        >>> with shoal.local() as store:
        ...     table = store.table("t")
        ...     for keys in np.arange(6, dtype=np.uint64).reshape(2, 3):
        ...         table.prefetch(keys)
        """
        reader = self.reader
        if reader.reads_ahead():
            batch = keys if isinstance(keys, KeyBatch) else self._batch(keys)
            reader.prefetch(batch.native)

    def pull_unique(self, batch: KeyBatch, *, out: AnyRows | None = None) -> AnyRows:
        """Read the rows of a batch's unique keys, in hash order.

        Parameters
        ----------
        batch : KeyBatch
            From this store's ``key_batch``.
        out : float32[m, dim], optional

        Returns
        -------
        float32[m, dim]
        """
        return self.begin_pull(batch, out=out).result()

    def begin_pull(self, batch: KeyBatch, *, out: AnyRows | None = None, ahead: int = 0) -> Future[AnyRows]:
        """Begin `pull_unique`; ``ahead``: for so many clocks later, 1 if ``shard.pulls_early``."""
        rows = self._out(out, len(batch))
        reader = self.shard.for_later(ahead) if ahead else self.reader
        return Future(reader.pull(batch.native, as_floats(rows)), lambda: rows)

    def push_unique(
        self,
        batch: KeyBatch,
        grads: AnyRows,
        *,
        counts: Counts | None = None,
        copy: bool = True,
        locations: _core.RowLocations | None = None,
    ) -> Future[None]:
        """Apply one optimizer step to a batch's unique keys.

        Parameters
        ----------
        batch : KeyBatch
            From this store's ``key_batch``.
        grads : float32[m, dim], at dim 1 also float32[m]
            Summed per unique key, in hash order.
        counts : uint32[m], optional
            Occurrences of each key, at least 1, for tables with rules that count them. Default: its occurrences in the
            batch.
        copy : bool
            False promises that ``grads`` will not be changed before the push is done, and saves a cluster's worker a
            copy. A local store does not use ``grads`` after the call.
        locations : optional
            The row locations that a pull of the same batch has found; ignored by a cluster.

        Returns
        -------
        Future
        """
        rows = self._rows(grads, len(batch), self._grads)
        if copy and self.shard.retains_arrays:
            rows = rows.copy()
        if not self._needs_counts:
            counts = None
        elif counts is None:
            counts = batch.counts()
        else:
            counts = as_counts(counts, len(batch))
        return self._push(batch.native, rows, counts, locations)

    def push_per_key(
        self, batch: KeyBatch, grads: AnyRows, *, locations: _core.RowLocations | None = None
    ) -> Future[None]:
        """Apply one optimizer step to a batch's keys, from a gradient for each input key.

        Equal to :meth:`push_unique` of ``batch.sum(grads)``; a local store computes the sums during the step.

        Parameters
        ----------
        batch : KeyBatch
            From this store's ``key_batch``.
        grads : float32[n, dim], at dim 1 also float32[n]
            One row for every input key.
        locations : optional
            The row locations that a pull of the same batch has found; ignored by a cluster.

        Returns
        -------
        Future
        """
        rows = self._rows(grads, batch.input_size, self._grads)
        counts = batch.counts() if self._needs_counts else None
        push = self._rwlock.shared(
            lambda: self.shard.push_per_key(batch.native, rows, counts, self._clock(), locations)
        )
        return Future(None if isinstance(push, int) else push, no_op)

    def assign(self, keys: Keys, rows: AnyRows) -> None:
        """Set the weights of ``keys``, creating missing rows.

        Existing rows keep their optimizer state; new rows get an initial one. FTRL and GroupFTRL, which store z,
        return the assigned weights up to float32 rounding.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            Each key once.
        rows : float32[n, dim], at dim 1 also float32[n]
            Finite.
        """
        self._check_usable()
        batch = self._batch(keys)
        if len(batch) != batch.input_size:
            twice = batch.keys[batch.counts() > 1][0]
            raise ValueError(
                f"assign to table {self.name!r} takes each key once, {batch.input_size - len(batch)} of "
                f"{batch.input_size} are repeated, first {twice}: drop the duplicates"
            )
        checked = self._rows(rows, batch.input_size, "rows")
        in_order = np.empty_like(checked)
        in_order[batch.inverse] = checked
        self._rwlock.shared(lambda: self.shard.assign(batch.native, in_order, self._clock()))

    def wait_for_clock(self) -> None:
        """Wait until all servers have ended the clocks of all workers that this one has ended, under BSP."""
        begins = [(slot << 64) // self._slots for slot in range(self._slots)]
        self.pull(_core.unmix(np.array(begins, np.uint64)))  # a key of every slot

    def restore(self, keys: Keys, state: Mapping[str, AnyRows], *, step: int | None = None) -> None:
        """Create rows with their optimizer state: what `state` has read, or another program's.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            Each key once, and none that has a row.
        state : mapping of float32[n, dim]
            The columns of docs/optimizers.md by name, all of them, e.g. ``w`` and ``n`` for Adagrad; one number per
            row (RowWiseAdagrad's ``m``) is float32[n, 1].
        step : int, optional
            Number of the table's pushes so far, from which Adam computes its bias corrections. Default: unchanged.

        Raises
        ------
        ValueError
            The table is on servers: save a local store that has the rows, and load that checkpoint there. Or columns
            are missing or have another shape, a key has a row or occurs twice, or a weight is not finite or no number
            of the table's dtype. Nothing has changed.

        Notes
        -----
        The rows are admitted whatever the table's rules are, as if they had occurred once, now.

        Examples
        --------
        >>> import shoal
        >>> table = shoal.local().table("user", optimizer=shoal.Adagrad(lr=1.0))
        >>> table.restore(np.array([7], np.uint64), {"w": np.float32([[0.5]]), "n": np.float32([[3.0]])})
        >>> table.push(np.array([7], np.uint64), np.float32([1.0])).result()
        >>> table.state(np.array([7], np.uint64))
        {'w': array([[0.]], dtype=float32), 'n': array([[4.]], dtype=float32)}
        """
        shard = self.shard
        if not isinstance(shard, LocalShard):
            raise ValueError(
                f"the rows of table {self.name!r} are on servers, which take no optimizer state: restore them in a "
                "local store, save() it, and load() that checkpoint on the cluster"
            )
        if self.spec.is_integer:
            raise ValueError(f"table {self.name!r} has int64, which have no optimizer state: use assign()")
        batch = self._batch(keys)
        if len(batch) != batch.input_size or shard.contains(batch.native).any():
            raise ValueError(f"a key of table {self.name!r} occurs twice or has a row: restore makes new rows")
        empty = self.state(np.zeros(0, np.uint64))
        if set(state) != set(empty):
            raise ValueError(f"table {self.name!r} has the columns {', '.join(empty)}, got {', '.join(state)}")
        columns = [np.asarray(state[name]) for name in empty]
        for (name, none), column in zip(empty.items(), columns, strict=True):
            if column.dtype != np.float32 or column.shape != (len(batch), none.shape[1]):
                raise ValueError(
                    f"{name!r} of table {self.name!r} is float32[{len(batch)}, {none.shape[1]}], got "
                    f"{column.dtype}{list(column.shape)}"
                )
        order = np.empty(len(batch), np.int64)
        order[batch.inverse] = np.arange(len(batch))
        clock = shard.marks_clock(self._clock())
        marks = {name: sighted(name, len(batch), clock) for name in shard.metadata_names()}
        try:
            rows = section(self._spec, batch.hashes, [column[order] for column in columns], marks)
        except ValueError as error:
            raise ValueError(f"table {self.name!r}: {error}") from None

        def restore() -> None:
            shard.restore(len(batch), rows)
            if step is not None:
                shard.step = step

        self._rwlock.shared(restore)

    def reserve(self, rows: int) -> None:
        """Make room for rows that are to be created: a table that does not grow inserts new keys twice as fast.

        Parameters
        ----------
        rows : int
            Rows that the table will have in total. It grows as usual beyond them.

        Raises
        ------
        ValueError
            ``rows`` is negative, or needs more memory than is free.
        MemoryBudgetExceededError
            The store's memory budget has no room for them; nothing has changed.

        Notes
        -----
        The memory is taken at once, about as much as the rows will need (`docs/sizing.md`). Nothing depends on it but
        time. For tables on servers and for tiered ones it has no effect.

        Examples
        --------
        >>> table = shoal.local().table("ctr")
        >>> table.reserve(100_000)
        >>> len(table)
        0
        """
        self._check_usable()
        if rows < 0:
            raise ValueError(f"rows is {rows}: pass the number of rows that the table will have")
        mean = rows / self._slots
        of_slot = math.ceil(mean + _DEVIATIONS * math.sqrt(mean))  # keys are distributed over slots at random
        self._rwlock.shared(lambda: self.shard.reserve([of_slot] * self._slots))

    def erase(self, keys: Keys) -> int:
        """Remove the rows of ``keys``; memory is returned to the system.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            Keys without a row are ignored.

        Returns
        -------
        int
            Number of rows removed.
        """
        self._check_usable()
        batch = self._batch(keys)
        return self._rwlock.shared(lambda: self.shard.erase(batch.native))

    def contains(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which of ``keys`` have a row.

        Parameters
        ----------
        keys : uint64[n] or int64[n]

        Returns
        -------
        bool[n]
        """
        reader = self.reader
        batch = self._batch(keys)
        return reader.contains(batch.native).view(np.bool_)[batch.inverse]

    def state(self, keys: Keys) -> dict[str, AnyRows]:
        """Read weights and optimizer state as they are stored.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            A key without a row reads its initial row.

        Returns
        -------
        dict of float32[n, dim]
            By the names of ``docs/optimizers.md``, e.g. ``z`` and ``n`` for FTRL; one number per row (RowWiseAdagrad's
            ``m``, Adam's own ``t``) is float32[n, 1].
        """
        shard = self.shard
        batch = self._batch(keys)
        return {
            name: batch.expand(shard.state(batch.native, k).view(self._number))
            for k, name in enumerate(shard.columns())
        }

    def items(self, batch_size: int = 65536) -> Iterator[tuple[npt.NDArray[np.uint64], AnyRows]]:
        """Iterate over all rows, in hash order.

        Parameters
        ----------
        batch_size : int
            Maximum number of rows in a batch. A slot with fewer rows is not divided between batches.

        Yields
        ------
        (uint64[k], float32[k, dim])
            Keys and weights. Each slot is read at one moment: it includes the pushes applied by then.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        reader = self.reader
        waiting: list[tuple[npt.NDArray[np.uint64], AnyRows]] = []
        count = 0
        for slot in range(self._slots):
            hashes, floats = reader.read_slot(slot)
            rows = floats.view(self._number)
            for start in range(0, len(hashes), batch_size):
                piece = (_core.unmix(hashes[start : start + batch_size]), rows[start : start + batch_size])
                if count + len(piece[0]) > batch_size:
                    yield _joined(waiting)
                    waiting, count = [], 0
                waiting.append(piece)
                count += len(piece[0])
        if waiting:
            yield _joined(waiting)

    def sum(self) -> npt.NDArray[np.float64]:
        """Add up the weights of all rows, in the process that holds them.

        Returns
        -------
        float64[dim], of a table of integers int64[dim]
            One sum for each weight of a row (one in total for `Proximal`), in float64, in hash order, slot by slot:
            the bits do not depend on threads or servers. Integers are added modulo 2^64.

        Examples
        --------
        >>> import shoal
        >>> with shoal.local() as store:
        ...     table = store.table("t", dim=2)
        ...     table.assign(np.array([7, 9], np.uint64), np.array([[1, 2], [3, 4]], np.float32))
        ...     table.sum().tolist()
        [4.0, 6.0]
        """
        return reductions.total(self.shard, self._slots, integers=self._spec.is_integer)

    def norm(self, order: float = 2) -> float:
        """Compute the norm of all weights of the table, as one vector, in the process that holds them.

        Parameters
        ----------
        order : {1, 2, inf}
            Sum of absolute values, Euclidean norm, or largest absolute value.

        Returns
        -------
        float
            0 for an empty table. As for :meth:`sum`, the bits do not depend on threads or servers.
        """
        return reductions.norm(self.shard, order)

    def count(self, *, above: float = 0.0) -> int:
        """Count the rows whose Euclidean norm is above a threshold: by default, rows that are not all zeros.

        Parameters
        ----------
        above : float
            0 or more. ``len(table)`` counts all rows.

        Returns
        -------
        int
        """
        return reductions.count(self.shard, above)

    def topk(self, k: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]:
        """Find the rows with the largest Euclidean norms, in the process that holds them.

        Parameters
        ----------
        k : int
            1 to 2^20.

        Returns
        -------
        keys : uint64[<= k]
            In descending order of norm, then in ascending order of key. All keys if the table has fewer rows.
        norms : float64[<= k]

        Examples
        --------
        >>> import shoal
        >>> with shoal.local() as store:
        ...     table = store.table("t")
        ...     table.assign(np.array([7, 9, 8], np.uint64), np.array([1, -2, 1], np.float32))
        ...     keys, norms = table.topk(2)
        ...     keys.tolist(), norms.tolist()
        ([9, 7], [2.0, 1.0])
        """
        return reductions.topk(self.shard, k)

    def digest(self) -> str:
        """Compute a digest of all rows, weights and optimizer state, in the process that holds them.

        Returns
        -------
        str
            32 hexadecimal digits. Tables with the same description and digest have the same rows, bit for bit, except
            with probability 2^-128; it detects accidental changes, not deliberate ones. It does not depend on
            slots, servers or the history of the rows: a table that was saved and loaded has the same digest.

        Notes
        -----
        Uses no additional memory. The digest does not cover keys that wait for admission, the table's clock and its
        number of pushes. Each slot is read at one moment: it includes the pushes applied by then.

        Examples
        --------
        >>> import shoal
        >>> digests = set()
        >>> for slots in (2, 1024):
        ...     with shoal.local(slots=slots) as store:
        ...         table = store.table("t")
        ...         table.push(np.array([7, 9], np.uint64), np.ones(2, np.float32)).result()
        ...         digests.add(table.digest())
        >>> len(digests)
        1
        """
        return reductions.digest(self.shard, self._slots)

    def decay(self, factor: float) -> int:
        """Multiply all weights by a factor, in the process that holds them; the optimizer's state is unchanged.

        Parameters
        ----------
        factor : float
            Above 0, at most 1.

        Returns
        -------
        int
            How many rows changed.

        Notes
        -----
        The product is rounded once, to the nearest: a weight whose change is below half a unit in its last place
        is unchanged. Weights of 16 bits are rounded stochastically, with bits that change with every push. FTRL and
        GroupFTRL, which store z, keep n and return the new weights up to the rounding of z; weights that are 0 keep
        their z. Initial rows of keys without a row are unchanged.
        """
        return self._rwlock.shared(lambda: reductions.changed(self.shard, reductions.Function.DECAY, factor))

    def scale_rate(self, factor: float) -> None:
        """Set the factor of the learning rate of later pushes: the rate is ``lr``, times its schedule, times this.

        Parameters
        ----------
        factor : float
            Above 0; of a new table 1. It replaces the one before.

        Raises
        ------
        ValueError
            The optimizer has no learning rate that can change (FTRL, GroupFTRL, Proximal, Add, a class of one's own),
            or a cache of this worker makes its steps.

        Notes
        -----
        Takes effect on arrival: with several workers, call it between clocks, after a barrier. Servers that take over
        slots have it too. A checkpoint does not: set it again after a load.

        Examples
        --------
        >>> import shoal
        >>> table = shoal.local().table("t", optimizer=shoal.SGD(lr=1.0))
        >>> table.scale_rate(0.25)
        >>> table.push(np.array([7], np.uint64), np.array([[-1.0]], np.float32)).result()
        >>> table.pull(np.array([7], np.uint64))
        array([[0.25]], dtype=float32)
        """
        self._rwlock.shared(lambda: reductions.changed(self.shard, reductions.Function.RATE, factor))

    def shrink(self, l1: float) -> int:
        """Soft-threshold all weights, in the process that holds them.

        ``w = sgn(w) * max(|w| - l1, 0)``: the proximal step of an L1 penalty.

        Parameters
        ----------
        l1 : float
            0 or more.

        Returns
        -------
        int
            How many rows changed.

        Notes
        -----
        Rounded as by :meth:`decay`. Under FTRL and GroupFTRL a weight that becomes 0 gets the nearest z whose weight is
        0. Rows of zeros stay in the table with their optimizer state.
        """
        return self._rwlock.shared(lambda: reductions.changed(self.shard, reductions.Function.SHRINK, l1))

    def reduce(
        self,
        fn: Callable[..., Any],
        combine: Callable[[Any, Any], Any],
        keys: Keys | None = None,
        *,
        initial: Any = None,
        params: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute a value from all rows, with a function that the processes that hold them call.

        Parameters
        ----------
        fn : callable
            ``fn(keys, weights, state, **params)`` returns a number or an array of float64 or int64, of one shape for
            all calls. It is called for each slot that has rows, with all of its rows in hash order: keys uint64[n],
            weights float32[n, dim], and state, a dict of the other columns by the names of `state`, each
            float32[n, dim] or float32[n, 1]. On a cluster a function of a module, or one marked by `by_source`.
        combine : callable
            ``combine(a, b)`` returns the value of two. It is called in this process, in the order of the slots: the
            values of slots 0 and 1, then that result and the value of slot 2.
        keys : uint64[n] or int64[n], optional
            Only their rows; keys without a row are left out, and duplicates count once. Default: all rows.
        initial : object, optional
            Combined with the first value; the result if there are no rows.
        params : mapping of str to number, str or bool, optional
            Passed to ``fn`` by name.

        Returns
        -------
        object
            Bits are the same for any number of threads and servers, whatever ``combine`` is. Another number of slots
            divides the rows otherwise: the result is the same if ``combine`` is associative without rounding.

        Raises
        ------
        UserCodeError
            ``fn`` has failed, on a server too: the message has its traceback. Or a server may not run it.
        ValueError
            Values of different shapes or types, or servers cannot import ``fn``.

        Notes
        -----
        Each slot is read at one moment. On a cluster a call takes effect as a pull does.

        Examples
        --------
        >>> import shoal
        >>> def highest(keys, weights, state):
        ...     return weights.max(axis=0)
        >>> with shoal.local() as store:
        ...     table = store.table("t", dim=2)
        ...     table.assign(np.array([7, 9], np.uint64), np.array([[1, 2], [3, -4]], np.float32))
        ...     table.reduce(highest, np.maximum).tolist()
        [3.0, 2.0]
        """
        answers = self._run_function(reductions.Function.MAP, fn, keys, params, ()).result()
        return merged(answers, combine, initial)

    def apply(
        self,
        fn: Callable[..., None],
        keys: Keys | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        after: After = (),
    ) -> Future[int]:
        """Change all rows, with a function that the processes that hold them call.

        Parameters
        ----------
        fn : callable
            ``fn(keys, weights, state, **params)`` changes ``weights`` and ``state`` in place and returns None. Its
            arguments are those of :meth:`reduce`. It must be deterministic: copies of the rows execute it too.
        keys : uint64[n] or int64[n], optional
            As for :meth:`reduce`. Rows are neither created nor removed.
        params : mapping of str to number, str or bool, optional
            Passed to ``fn`` by name.
        after : Future, or list or tuple of Future, optional
            As for :meth:`push`.

        Returns
        -------
        Future
            ``result()`` returns how many rows changed. The change is made exactly once, also if servers die and their
            copies take over.

        Raises
        ------
        UserCodeError
            By ``result()``: ``fn`` has failed, and the message has its traceback; or a server may not run it. Rows of
            a slot are changed together or not at all: slots that were processed before the failure stay changed.
        ValueError
            Servers cannot import ``fn``, or the optimizer is `Proximal`.

        Notes
        -----
        A row that would not be finite is left unchanged and counted in ``stats().nonfinite_rows``. Under FTRL and
        GroupFTRL, which derive weights from z and n, changed weights move z as by :meth:`assign`; weights that keep
        their bits follow from the z and n that ``fn`` leaves. Weights of 16 bits are rounded stochastically. Pushes
        that other workers make at the same time take effect before or after it; under BSP it is made between two
        steps. Other writers of the table wait meanwhile, and a server thread serves nothing else.

        Examples
        --------
        >>> import shoal
        >>> def forget(keys, weights, state, factor):
        ...     state["v"] *= factor
        >>> with shoal.local() as store:
        ...     table = store.table("t", optimizer=shoal.Momentum(lr=1.0))
        ...     table.push(np.array([7], np.uint64), np.array([2], np.float32)).result()
        ...     print(table.apply(forget, params={"factor": 0.5}).result(), table.state(np.array([7], np.uint64))["v"])
        1 [[1.]]
        """
        answers = self._rwlock.shared(lambda: self._run_function(reductions.Function.APPLY, fn, keys, params, after))
        return Future(answers, lambda: counted(answers.result()))

    def _run_function(
        self,
        function: reductions.Function,
        fn: Callable[..., Any],
        keys: Keys | None,
        params: Mapping[str, Any] | None,
        after: After,
    ) -> Future[list[npt.NDArray[np.float64]]]:
        shard = _after(self.shard, after)
        hashes = None if keys is None else self._batch(keys).native.hashes
        if hashes is not None and len(hashes) > _MOST_KEYS:
            raise ValueError(f"a function of rows takes {_MOST_KEYS} different keys at most, got {len(hashes)}")
        started = shard.run_function(function, describe(fn, params), hashes)
        return Future(None, lambda: started) if isinstance(started, list) else Future(started, started.result)

    def __len__(self) -> int:
        """Count the rows; on a cluster, the servers are asked."""
        return len(self.reader)

    def __bool__(self) -> bool:
        """Return True, also for a table without rows: a truth value asks no server."""
        return True

    def stats(self) -> TableStats:
        """Read the table's statistics."""
        native = self.shard.stats()
        tier = tier_stats(native)
        rows, size, cells = native["rows"], native["bytes"], native["cells"]
        return TableStats(
            step=native["step"],
            rows=rows,
            bytes=size,
            bytes_per_row=size / rows if rows else float("nan"),
            load=(rows if tier is None else tier.rows_in_memory) / cells if cells else 0.0,
            pulls=native["pulls"],
            pushes=native["pushes"],
            keys_pulled=native["rows_pulled"],
            keys_pushed=native["rows_pushed"],
            rows_created=native["rows_created"],
            rows_erased=native["rows_erased"],
            nonfinite_rows=native["nonfinite_rows"],
            refused=native["refused"],
            waiting=native["waiting"],
            expired={name: native[f"expired_by_{name}"] for name in (type(rule).__name__ for rule in self.spec.expire)},
            tier=tier,
        )

    def sweep(self, *rules: Expiry, dry_run: bool = False) -> TableSweep:
        """Drop the rows that expiry rules select, as :meth:`shoal.Store.sweep` does in all tables.

        Parameters
        ----------
        *rules : Expiry
            Rules that use only metadata kept in the rows; default: those of the table.
        dry_run : bool
            Whether only to report what would be dropped.

        Returns
        -------
        TableSweep
            How many rows each rule drops, their share of recent occurrences (`shoal.lifecycle.Dropped` defines
            "recent"); of a dry run also the same at other thresholds.

        Raises
        ------
        ValueError
            A rule needs metadata that the table's rows do not keep.

        Examples
        --------
        >>> import shoal
        >>> with shoal.local() as store:
        ...     table = store.table("t", expire=shoal.TimeToLive(9))
        ...     table.push(np.array([7, 9], np.uint64), np.ones(2, np.float32)).result()
        ...     for _ in range(20):
        ...         store.tick()
        ...     table.push(np.array([9], np.uint64), np.ones(1, np.float32)).result()
        ...     print(table.sweep(dry_run=True).dropped[0].rows)
        1
        """
        chosen = rules or self.spec.expire
        for rule in chosen:
            if not isinstance(rule, Expiry):
                raise TypeError(f"table {self.name!r} is swept by rules such as shoal.TimeToLive(9), got {rule!r}")
        numbers = rules_native(chosen)

        def ask() -> npt.NDArray[np.uint64]:
            return self.shard.sweep(numbers, self._clock(), dry_run=dry_run)

        return read_sweep(self.name, chosen, ask() if dry_run else self._rwlock.shared(ask), dry_run=dry_run)


def _after(reader: AnyReader, after: After) -> AnyReader:
    if after == ():
        return reader
    requests = requests_of(after)
    return reader.after(requests) if requests else reader


def _joined(pieces: list[tuple[npt.NDArray[np.uint64], AnyRows]]) -> tuple[npt.NDArray[np.uint64], AnyRows]:
    return np.concatenate([keys for keys, _ in pieces]), np.concatenate([rows for _, rows in pieces])
