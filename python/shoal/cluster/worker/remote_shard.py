"""The rows of a table that servers hold, with the methods of the engine's shard.

Threads: any number of callers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, NoReturn, Self, cast

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.cluster.worker.channel import Channel
from shoal.table.arrays import Counts, Rows
from shoal.table.future import Waitable
from shoal.table.reductions import CHANGES_ROWS, OF_ANY_LENGTH
from shoal.table.shard import OTHER_STORE, LocalShard
from shoal.table.spec import TableSpec
from shoal.table.stats import TIER_NUMBERS
from shoal.user_functions import Description

Op = _core.Op

_log = logging.getLogger("shoal.worker")

_MOST_PUSHES = 1000  # under BSP, within a clock, before a warning

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
        filter: _core.Filter | None = None,
        *,
        workers: _core.ThreadPool | None = None,
        is_bulk: bool = False,
    ) -> None:
        self._channel = channel
        self._calls = channel.calls
        self._name = spec.name
        self._floats = spec.floats
        self._workers = workers = _core.ThreadPool(1) if workers is None else workers
        self._is_bulk = is_bulk
        self.number = table  # the number of the table on the servers
        self._filter = filter
        self._is_integer = spec.is_integer
        self._after: Sequence[_core.Call] = ()  # what pulls and pushes come after
        self._pushes = 0  # under BSP, since it was at the clock below; negative: it has warned
        self._clock = channel.clock
        self._ahead = 0  # clocks by which pulls are for a later one
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
        calls: list[_core.Call] = []
        for request in requests:
            if isinstance(request, _core.Call) and request.is_of(self._channel.client):
                calls.append(request)
            else:
                raise ValueError(OTHER_STORE)
        view = copy.copy(self)
        view._after = calls
        return view

    @property
    def retains_arrays(self) -> bool:
        """True: a push may be sent again."""
        return True

    @property
    def is_remote(self) -> bool:
        """True."""
        return True

    @property
    def pulls_early(self) -> bool:
        """True, unless it has to see the pushes of the clock before it."""
        return not self._is_bulk

    def for_later(self, clocks: int, /) -> Self:
        """Return a view of the same rows, whose pulls wait as those of a later clock do."""
        view = copy.copy(self)
        view._ahead = clocks
        return view

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

    def pull(self, batch: _core.KeyBatch, rows: Rows, locations: _core.RowLocations | None = None, /) -> Waitable:
        """Read the row of each unique key."""
        return self._calls.pull(self.number, batch, rows, self._floats, self._filter, self._after, self._ahead)

    def pull_per_key(
        self, batch: _core.KeyBatch, rows: Rows, locations: _core.RowLocations | None = None, /
    ) -> Waitable:
        """Read the row of each key as given."""
        return self._calls.pull_per_key(
            self.number, batch, rows, self._floats, self._workers, self._filter, self._after
        )

    def pull_after(self, push: Waitable, batch: _core.KeyBatch, rows: Rows, /) -> Waitable:
        """Read the row of each key as given, as it is after a push; under BSP no pull of its clock sees it."""
        return self._calls.pull_per_key(
            self.number,
            batch,
            rows,
            self._floats,
            self._workers,
            self._filter,
            self._after,
            None if self._is_bulk else cast("_core.Call", push),
        )

    def push_per_key(
        self,
        batch: _core.KeyBatch,
        grads: Rows,
        counts: Counts | None = None,
        clock: int = 0,
        locations: _core.RowLocations | None = None,
        /,
    ) -> Waitable:
        """Apply one step with a gradient for each key as given, summed here."""
        self._count_push()
        return self._calls.push_per_key(
            self.number,
            batch,
            grads,
            self._floats,
            self._workers,
            self._is_integer,
            counts,
            self._filter,
            self._after,
        )

    def push(
        self,
        batch: _core.KeyBatch | _core.SummedBatch,
        grads: Rows,
        counts: Counts | None = None,
        clock: int = 0,
        locations: _core.RowLocations | None = None,
        /,
    ) -> Waitable:
        """Apply one step with a gradient for each unique key."""
        self._count_push()
        return self._calls.push(self.number, batch, grads, self._floats, counts, self._filter, self._after)

    def push_as(self, step: int, batch: _core.KeyBatch, grads: Rows, counts: Counts | None) -> Waitable:
        """Apply a gradient for each unique key as a step of this number, in all arcs; not under BSP."""
        return self._begin(
            Op.PUSH,
            aux=step,
            hashes=batch.hashes,
            begins=batch.offsets,
            values=grads,
            dim=self._floats,
            counts=counts,
        )

    def _count_push(self) -> None:
        """Warn, once, of many pushes in a clock that does not end."""
        if not self._is_bulk or self._pushes < 0:
            return
        self._pushes += 1
        if self._pushes >= _MOST_PUSHES:
            ended, self._clock = self._channel.clock > self._clock, self._channel.clock
            self._pushes = 0 if ended else -1
            if not ended:
                _log.warning(
                    "%s pushes to table %r in clock %d, which has not ended: under BSP none of them counts before "
                    "store.tick(), which every worker calls after each step",
                    f"{_MOST_PUSHES:,}",
                    self._name,
                    self._clock,
                )

    def _begin(self, op: int, **what: Any) -> _core.Call:
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
            per_slot=function not in OF_ANY_LENGTH,
        ).result()
        return np.concatenate(answers)

    def run_function(
        self, function: int, description: Description, hashes: npt.NDArray[np.uint64] | None, /
    ) -> _core.Call:
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
            user_function=True,
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

    def arc_steps(self) -> dict[int, int]:
        """Return the number of steps of each arc, by its first slot."""
        answers = self._begin(Op.STATS, aux=1).result()
        return {int(first): int(step) for numbers in answers for first, step in numbers.reshape(-1, 2)}

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
