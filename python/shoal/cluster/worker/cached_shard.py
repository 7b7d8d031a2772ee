"""The rows of a table that servers hold, some of which this worker keeps: a :class:`.RemoteShard` with a cache.

Pulls and pushes go through ``_core.CachedRows`` (csrc/client/cached_rows.h). Everything else is done by the servers,
after all gradients that are held back were sent; what changes rows in another way than by a push removes the copies
too.

Threads: any number of callers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.cluster.worker.cache import Cache
from shoal.cluster.worker.channel import Channel
from shoal.cluster.worker.remote_shard import RemoteShard
from shoal.consistency import Consistency
from shoal.table.arrays import Counts, Rows
from shoal.table.future import Waitable
from shoal.table.reductions import CHANGES_ROWS, Function
from shoal.table.spec import TableRecord, TableSpec
from shoal.user_functions import Description


class CachedShard(RemoteShard):
    """The rows of one table that the servers hold, with those that this worker keeps.

    ``cache`` and ``consistency`` say how long; the other parameters are those of :class:`.RemoteShard`.
    """

    def __init__(
        self,
        channel: Channel,
        table: int,
        spec: TableSpec,
        filter: _core.Filter | None = None,
        *,
        workers: _core.ThreadPool,
        cache: Cache,
        consistency: Consistency,
        slots: int,
    ) -> None:
        super().__init__(channel, table, spec, filter, workers=workers)
        self._has_steps = cache.makes_steps(spec.optimizer, spec.floats)
        self.rows = _core.CachedRows(
            channel.client,
            table,
            TableRecord.of(spec).native(),
            rows=cache.rows,
            slots=slots,
            staleness=cache.staleness,
            waits=consistency.waits if consistency.mode == "ssp" else None,
            local_steps=self._has_steps,
            filter=filter,
        )
        self._cached = channel.traced_rows(self.rows, table)

    def after(self, requests: Sequence[Waitable], /) -> Self:
        """Return a view of the same rows, whose pulls and pushes begin when these requests have succeeded."""
        held_back = self.rows.flush()
        view = super().after(requests)
        view._after = [*held_back, *view._after]
        return view

    @property
    def pulls_early(self) -> bool:
        """False: the present clock bounds what a cache may read."""
        return False

    # --- pulls and pushes -------------------------------------------------------------------------------------------

    def pull(self, batch: _core.KeyBatch, rows: Rows, locations: _core.RowLocations | None = None, /) -> Waitable:
        """Read the row of each unique key."""
        return self._cached.pull(batch, rows, self._after)

    def pull_per_key(
        self, batch: _core.KeyBatch, rows: Rows, locations: _core.RowLocations | None = None, /
    ) -> Waitable:
        """Read the row of each key as given."""
        return self._cached.pull_per_key(batch, rows, self._workers, self._after)

    def pull_after(self, push: Waitable, batch: _core.KeyBatch, rows: Rows, /) -> Waitable:
        """Read the row of each key as given, as it is after a push."""
        after = [*self._after, *self.rows.flush()]
        return self._cached.pull_per_key(batch, rows, self._workers, after, True)

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
        return self._cached.push_per_key(batch, grads, self._workers, counts, self._after)

    def push(
        self,
        batch: _core.KeyBatch | _core.SummedBatch,
        grads: Rows,
        counts: Counts | None = None,
        clock: int = 0,
        locations: _core.RowLocations | None = None,
        /,
    ) -> Waitable:
        """Apply one step with a gradient for each unique key, some of them later."""
        return self._cached.push(batch, grads, counts, self._after)

    # --- everything else --------------------------------------------------------------------------------------------

    def _begin(self, op: int, **what: Any) -> _core.Call:
        after = [*what.pop("after", ()), *self.rows.flush()]
        return super()._begin(op, after=after, **what)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep no copy of how rows were before a change."""
        try:
            yield
        finally:
            self.rows.forget()

    def assign(self, batch: _core.KeyBatch, rows: Rows, clock: int = 0, /) -> None:
        """Set weights."""
        with self._changing():
            super().assign(batch, rows, clock)

    def erase(self, batch: _core.KeyBatch, /) -> int:
        """Remove rows; return how many existed."""
        with self._changing():
            return super().erase(batch)

    def reduce(self, function: int, parameters: npt.NDArray[np.float64], /) -> npt.NDArray[np.float64]:
        """Evaluate a function of all rows, in slot order; a function that changes rows does so exactly once."""
        if function == Function.RATE and self._has_steps:
            raise ValueError(
                "the cache of this worker makes the steps of its rows, by a learning rate that does not change: pass "
                'a cache of sums, cache="ROWS:STALENESS:sums", or none'
            )
        with self._changing() if function in CHANGES_ROWS else contextlib.nullcontext():
            return super().reduce(function, parameters)

    def run_function(
        self, function: int, description: Description, hashes: npt.NDArray[np.uint64] | None, /
    ) -> _core.Call:
        """Call a function of a user on all servers; one that changes rows does so exactly once."""
        call = super().run_function(function, description, hashes)
        if function in CHANGES_ROWS:
            self.rows.forget_after(call)
        return call

    def sweep(self, rules: npt.NDArray[np.float64], clock: int = 0, /, *, dry_run: bool) -> npt.NDArray[np.uint64]:
        """Drop the rows that expiry rules select, or only count them; return the sums over the endpoints."""
        with contextlib.nullcontext() if dry_run else self._changing():
            return super().sweep(rules, clock, dry_run=dry_run)
