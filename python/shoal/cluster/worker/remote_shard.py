"""The rows of a table that servers hold, with the methods of the engine's shard.

Threads: any number of callers.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self, cast

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.cluster.worker.calls import Call
from shoal.cluster.worker.channel import CallFuture, Channel, PendingCalls
from shoal.cluster.worker.filters import Filter
from shoal.table.arrays import Counts, Rows
from shoal.table.future import Waitable
from shoal.table.reductions import CHANGES_ROWS
from shoal.table.shard import OTHER_STORE, LocalShard, pull_and_expand
from shoal.table.spec import TableSpec
from shoal.table.stats import TIER_NUMBERS
from shoal.user_functions import Description, failure

Op = _core.Op

NO_DELTAS = (
    "deltas are written by servers, into storage that they share: this store was connected with shared_storage=False, "
    "so save all rows, without since and track"
)

# The metrics of a table in the servers' order, after the step and before the clock. "tiers" are arcs with a tier; the
# numbers after it are sums over them.
_METRICS = (
    *(name for name, _, _ in _core.STATISTICS["shard"]),
    "tiers",
    *(f"tier_{name}" for name in TIER_NUMBERS),
)


class PushCallFuture(CallFuture):
    """A push that has been submitted."""

    __slots__ = ("_after", "_is_bulk", "_mark", "_workers")

    def __init__(
        self,
        channel: Channel,
        call: Call,
        mark: int | None,
        workers: _core.ThreadPool,
        *,
        is_bulk: bool,
        after: Sequence[Call],
    ) -> None:
        self.channel = channel
        self.call = call
        self._after = after
        self._mark = mark  # Channel.repetitions before the push; None: a filter may change it on its way
        self._workers = workers
        self._is_bulk = is_bulk  # then no pull of this clock sees it

    def pull_per_key(self, batch: _core.KeyBatch, rows: Rows, /) -> Waitable:
        """Read the row of each key as given, as it is after this push."""
        return pull_and_expand(self._pull, batch, rows, self._workers)

    def _pull(self, batch: _core.KeyBatch, rows: Rows, /) -> Waitable:
        def pull() -> CallFuture:
            return _pull(self.channel, self.call.table, batch, rows, self.call.filter, self._after)

        return pull() if self._is_bulk else PullAfterPush(self, self._mark, pull)


class PullAfterPush(PendingCalls):
    """A pull that sees the effect of a push.

    It is sent directly after the push. If nothing was sent again since, each endpoint took the two in this order;
    otherwise the pull is repeated, by whoever asks whether it is done or waits for it.
    """

    def __init__(self, push: PushCallFuture, mark: int | None, pull: Callable[[], CallFuture]) -> None:
        super().__init__(push.channel)
        self._push = push
        self._mark = mark
        self._pull = pull
        self._pulled = None if mark is None else pull()
        self._lock = threading.Lock()  # guards _mark and _pulled

    @property
    def calls(self) -> list[Call]:
        """The calls that a later one comes after: a pull that is repeated may see more than the push."""
        return [self._push.call] if self._pulled is None else [self._push.call, self._pulled.call]

    def next_call(self) -> Call | None:
        """Return a call that this one waits for, after repeating the pull where it has to be; None: it is done."""
        if not self._push.call.done:
            return self._push.call
        with self._lock:
            is_last = self._mark is None or self._mark == self.channel.repetitions
            if self._pulled is None or (self._pulled.done() and not is_last and self._push.call.error is None):
                self._mark = None
                self._pulled = self._pull()
            return self._pulled.next_call()

    def result(self, timeout: float | None = None) -> None:
        """Wait for the pulls, one after another, and for the push."""
        self._wait(timeout)
        self._push.result()
        assert self._pulled is not None
        self._pulled.result()


def _pull(
    channel: Channel,
    table: int,
    batch: _core.KeyBatch,
    rows: Rows,
    filter: Filter | None,
    after: Sequence[Call],
) -> CallFuture:
    dim = rows.shape[1] if rows.ndim > 1 else 1
    channel.call_metrics.count_keys(batch.input_size, len(batch))
    return channel.begin(
        Op.PULL, table, hashes=batch.hashes, begins=batch.offsets, out=rows, dim=dim, filter=filter, after=after
    )


class RemoteShard:
    """The rows of one table that the servers hold: :class:`shoal.table.shard.Shard` of a cluster.

    Threads: any number of callers. Every method but `columns` sends requests to the servers; all but `pull`,
    `push` and `prefetch` block until they answer.
    """

    def __init__(
        self,
        channel: Channel,
        table: int,
        spec: TableSpec,
        filter: Filter | None = None,
        *,
        workers: _core.ThreadPool | None = None,
        is_bulk: bool = False,
    ) -> None:
        self._channel = channel
        self._workers = workers = _core.ThreadPool(1) if workers is None else workers
        self._is_bulk = is_bulk
        self.number = table  # the number of the table on the servers
        self._filter = filter
        self._is_integer = spec.is_integer
        self._after: Sequence[Call] = ()  # what pulls and pushes come after
        self._reads_ahead: bool | None = None  # None: not known yet
        # An empty shard of the engine has the names and widths of the columns.
        self._pattern = pattern = LocalShard.of(spec, 2, workers)
        nothing = _core.KeyBatch(np.empty(0, np.uint64), 2, workers)
        self._columns = {name: pattern.state(nothing, column).shape[1] for column, name in enumerate(pattern.columns())}

    def as_shard(self) -> Self:
        """Return itself."""
        return self

    def after(self, requests: Sequence[Waitable], /) -> Self:
        """Return a view of the same rows, whose pulls and pushes begin when these requests have succeeded."""
        calls: list[Call] = []
        for request in requests:
            if not isinstance(request, PendingCalls) or request.channel is not self._channel:
                raise ValueError(OTHER_STORE)
            calls += request.calls
        view = copy.copy(self)
        view._after = calls
        return view

    @property
    def retains_arrays(self) -> bool:
        """True: a push may be sent again."""
        return True

    def make_locations(self, batch: _core.KeyBatch, /) -> None:
        """Return None: the rows are not in this process."""

    def reads_ahead(self) -> bool:
        """Whether servers have rows on disk. Blocks the first time, to ask them: with a key in each slot."""
        if self._reads_ahead is None:
            slots = self._channel.map.slots
            hashes = np.arange(slots, dtype=np.uint64) << np.uint64(64 - (slots - 1).bit_length())
            begins = np.arange(slots + 1, dtype=np.uint64)
            future = self._channel.begin(Op.PREFETCH, self.number, hashes=hashes, begins=begins)
            self._reads_ahead = bool(future.result())
        return self._reads_ahead

    def prefetch(self, batch: _core.KeyBatch, locations: _core.RowLocations | None = None, /) -> None:
        """Tell the servers the keys of a later call; does not wait for their answers."""
        self._channel.begin(Op.PREFETCH, self.number, hashes=batch.hashes, begins=batch.offsets, filter=self._filter)

    def reserve(self, rows: Sequence[int], /) -> None:
        """Do nothing: servers grow their slots by themselves."""

    def pull(self, batch: _core.KeyBatch, rows: Rows, locations: _core.RowLocations | None = None, /) -> CallFuture:
        """Read the row of each unique key."""
        return _pull(self._channel, self.number, batch, rows, self._filter, self._after)

    def pull_per_key(
        self, batch: _core.KeyBatch, rows: Rows, locations: _core.RowLocations | None = None, /
    ) -> Waitable:
        """Read the row of each key as given."""
        return pull_and_expand(self.pull, batch, rows, self._workers)

    def push_per_key(
        self,
        batch: _core.KeyBatch,
        grads: Rows,
        counts: Counts | None = None,
        clock: int = 0,
        locations: _core.RowLocations | None = None,
        /,
    ) -> PushCallFuture:
        """Apply one step with a gradient for each key as given, summed here."""
        sums = np.empty((len(batch), grads.shape[1]), np.float32)
        batch.sum(grads, grads.shape[1], sums, self._workers, self._is_integer)
        return self.push(batch, sums, counts)

    def push(
        self,
        batch: _core.KeyBatch | _core.SummedBatch,
        grads: Rows,
        counts: Counts | None = None,
        clock: int = 0,
        locations: _core.RowLocations | None = None,
        /,
    ) -> PushCallFuture:
        """Apply one step with a gradient for each unique key."""
        mark = self._channel.repetitions if self._filter is None else None
        future = self._channel.begin(
            Op.PUSH,
            self.number,
            hashes=batch.hashes,
            begins=batch.offsets,
            values=grads,
            counts=counts,
            dim=grads.shape[1],
            filter=self._filter,
            after=self._after,
        )
        return PushCallFuture(self._channel, future.call, mark, self._workers, is_bulk=self._is_bulk, after=self._after)

    def _begin(self, op: int, **what: Any) -> CallFuture:
        """Start a call other than a pull or a push."""
        return self._channel.begin(op, self.number, **what)

    def assign(self, batch: _core.KeyBatch, rows: Rows, clock: int = 0, /) -> None:
        """Set weights."""
        if not self._is_integer and not np.isfinite(rows).all():  # before any server applies a part of it
            raise ValueError(f"weights must be finite: one of them is {rows[~np.isfinite(rows)][0]}")
        self._begin(
            Op.ASSIGN,
            hashes=batch.hashes,
            begins=batch.offsets,
            values=rows,
            dim=rows.shape[1],
            after=self._after,
        ).result()

    def erase(self, batch: _core.KeyBatch, /) -> int:
        """Remove rows; return how many existed."""
        return int(self._begin(Op.ERASE, hashes=batch.hashes, begins=batch.offsets).result())

    def contains(self, batch: _core.KeyBatch, /) -> npt.NDArray[np.uint8]:
        """Return which rows exist."""
        there = np.zeros(len(batch), np.uint8)
        self._begin(Op.CONTAINS, hashes=batch.hashes, begins=batch.offsets, out=there).result()
        return there

    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self._columns)

    def state(self, batch: _core.KeyBatch, column: int, /) -> Rows:
        """Read one column."""
        width = list(self._columns.values())[column]
        values = np.empty((len(batch), width), np.float32)
        self._begin(Op.STATE, hashes=batch.hashes, begins=batch.offsets, out=values, aux=column, dim=width).result()
        return values

    def metadata_names(self) -> list[str]:
        """Return nothing: row metadata cannot be read from servers."""
        return []

    def metadata(self, batch: _core.KeyBatch, k: int, /) -> NoReturn:
        """Refuse."""
        raise ValueError("row metadata cannot be read from servers")

    def marks_clock(self, store_clock: int, /) -> int:
        """Return 0: row metadata cannot be read from servers."""
        return 0

    def read_slot(self, slot: int, /) -> tuple[npt.NDArray[np.uint64], Rows]:
        """Read hashes and weights of a slot."""
        return cast("tuple[npt.NDArray[np.uint64], Rows]", self._begin(Op.SLOT, slot=slot).result())

    def section(self, slot: int, /) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Read a slot in the format of checkpoints: number of rows, their bytes, the admission filter."""
        rows, section, filter = self._begin(Op.SECTION, slot=slot).result()
        edge = len(section) - int(filter)
        return int(rows), section[:edge], section[edge:]

    def reduce(self, function: int, parameters: npt.NDArray[np.float64], /) -> npt.NDArray[np.float64]:
        """Evaluate a function of all rows, in slot order; a function that changes rows does so exactly once."""
        self._pattern.reduce(function, parameters)  # raises the errors that the servers would raise
        answers = self._begin(
            Op.REDUCE,
            aux=function,
            payload=[parameters],
            count=len(parameters),
            write=function in CHANGES_ROWS,
        ).result()
        return np.concatenate(answers)

    def run_function(
        self, function: int, description: Description, hashes: npt.NDArray[np.uint64] | None, /
    ) -> CallFuture:
        """Call a function of a user on all servers; one that changes rows does so exactly once."""
        if description.unsendable:
            raise ValueError(description.unsendable)
        parameters = description.parameters(hashes)
        return self._begin(
            Op.REDUCE,
            aux=function,
            payload=[parameters],
            count=len(parameters),
            write=function in CHANGES_ROWS,
            after=self._after,
            find_error=failure,
        )

    def sweep(self, rules: npt.NDArray[np.float64], clock: int = 0, /, *, dry_run: bool) -> npt.NDArray[np.uint64]:
        """Drop the rows that expiry rules select, or only count them; return the sums over the endpoints."""
        answers = self._begin(Op.SWEEP, aux=int(dry_run), payload=[rules], count=len(rules), write=not dry_run).result()
        return np.asarray(np.sum(answers, axis=0, dtype=np.uint64))

    def table_clock(self, store_clock: int, /) -> int:
        """Return the table's own clock at this worker's clock."""
        return int(self.endpoint_stats()[0][len(_METRICS) + 1])

    def endpoint_stats(self) -> list[npt.NDArray[np.uint64]]:
        """Return, for each endpoint: step, `_METRICS`, the table's clock."""
        return cast("list[npt.NDArray[np.uint64]]", self._begin(Op.STATS).result())

    def __len__(self) -> int:
        return sum(int(numbers[1]) for numbers in self.endpoint_stats())

    def stats(self) -> dict[str, int]:
        """Return the sums of the servers' metrics. A request to several endpoints is counted by each.

        The step is the maximum: under SSP and ASP arcs differ.
        """
        steps, *numbers, _ = zip(*self.endpoint_stats(), strict=True)
        totals = (sum(map(int, of_endpoints)) for of_endpoints in numbers)
        return {"step": int(max(steps)), **dict(zip(_METRICS, totals, strict=True))}


class UnsynchronizedSnapshot:
    """A table that a worker reads while nothing changes it: a :class:`shoal.table.shard.Snapshot`."""

    def __init__(self, shard: RemoteShard) -> None:
        numbers = shard.endpoint_stats()
        self.section = shard.section
        self.step = max(int(figure[0]) for figure in numbers)
        self.table_clock = int(numbers[0][len(_METRICS) + 1])
        self.rows, self.bytes = (
            sum(int(figure[1 + _METRICS.index(name)]) for figure in numbers) for name in ("rows", "bytes")
        )

    def changes(self, slot: int, /) -> NoReturn:
        """Raise: changes are known to the servers only."""
        raise ValueError(NO_DELTAS)

    def done(self, name: str, /) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
