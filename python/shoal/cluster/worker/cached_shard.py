"""The rows of a table that servers hold, some of which this worker keeps: a :class:`.RemoteShard` with a cache.

Pulls and pushes go through :class:`.CachedRows`. Everything else is done by the servers, after all gradients that are
held back were sent; what changes rows in another way than by a push removes the copies too.

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
from shoal.cluster.worker.cached_rows import CachedPull, CachedRows
from shoal.cluster.worker.channel import Channel
from shoal.cluster.worker.remote_shard import PendingCalls, RemoteShard
from shoal.consistency import Consistency
from shoal.table.arrays import Counts, Rows
from shoal.table.future import Waitable
from shoal.table.reductions import CHANGES_ROWS
from shoal.table.shard import pull_and_expand
from shoal.table.spec import TableSpec
from shoal.user_functions import Description

Op = _core.Op

MIN_KEYS = 16  # a call with fewer goes to the servers


class PullFuture(PendingCalls):
    """A pull that was begun."""

    def __init__(self, channel: Channel, pull: CachedPull) -> None:
        super().__init__(channel)
        self._pull = pull

    @property
    def calls(self) -> list[_core.Call]:
        """The calls that a later one comes after."""
        return self._pull.calls

    def next_call(self) -> _core.Call | None:
        """Do what can be done; return a call that the pull waits for."""
        return self._pull.advance()

    def result(self, timeout: float | None = None) -> None:
        """Wait for the rows; raise the error of the pull."""
        self._wait(timeout)
        if self._pull.error is not None:
            raise self._pull.error


class PushFuture(PendingCalls):
    """A push of which some gradients may be held back; waiting for it waits for the others."""

    def __init__(self, channel: Channel, pushes: list[_core.Call]) -> None:
        super().__init__(channel)
        self._pushes = pushes

    @property
    def calls(self) -> list[_core.Call]:
        """The calls that a later one comes after."""
        return self._pushes

    def next_call(self) -> _core.Call | None:
        """Return the first call that is not settled."""
        return next((call for call in self._pushes if not call.done()), None)

    def result(self, timeout: float | None = None) -> None:
        """Wait until what was sent is acknowledged; raise its error."""
        self._wait(timeout)
        for call in self._pushes:
            call.result()


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
        self._changes: list[_core.Call] = []  # begun calls that change rows other than by a push
        has_steps = cache.makes_steps(spec.optimizer, spec.floats)
        steps = (spec.optimizer.rule, spec.optimizer.engine_params()) if has_steps else ()
        self.rows = CachedRows(
            _core.RowCache(cache.rows, spec.floats, spec.needs_counts, *steps),
            dim=spec.floats,
            slots=slots,
            local_steps=has_steps,
            staleness=cache.staleness,
            waits=consistency.waits if consistency.mode == "ssp" else None,
            submit=self._submit,
            clock=lambda: channel.clock,
            repetitions=lambda: channel.client.repetitions,
        )

    def _submit(self, op: int, *, after: Sequence[_core.Call] = (), **what: Any) -> _core.Call:
        return self._channel.begin(op, self.number, filter=self._filter, after=after, **what)

    def after(self, requests: Sequence[Waitable], /) -> Self:
        """Return a view of the same rows, whose pulls and pushes begin when these requests have succeeded."""
        held_back = self.rows.flush()
        view = super().after(requests)
        view._after = [*held_back, *view._after]
        return view

    # --- pulls and pushes -------------------------------------------------------------------------------------------

    def _forget_changed(self) -> None:
        """Keep no copy of how rows were before calls that have ended, whether or not anyone has waited for them."""
        ended = [call for call in self._changes if call.done()]
        if ended:
            self.rows.forget()
            for call in ended:
                with contextlib.suppress(ValueError):  # another thread has removed it
                    self._changes.remove(call)

    def pull(self, batch: _core.KeyBatch, rows: Rows, locations: _core.RowLocations | None = None, /) -> Waitable:
        """Read the row of each unique key."""
        self._channel.client.check()
        self._forget_changed()
        if len(batch) < MIN_KEYS or self._after or not rows.flags.c_contiguous:
            return self.pull_from_servers(batch, rows)
        return PullFuture(self._channel, self.rows.pull(batch.hashes, rows))

    def pull_from_servers(self, batch: _core.KeyBatch, rows: Rows, after: Sequence[_core.Call] = ()) -> Waitable:
        """Read the row of each unique key from the servers."""
        pull = self.rows.pull_from_servers(batch.hashes, batch.offsets, rows, [*self._after, *after])
        return PullFuture(self._channel, pull)

    def pull_per_key(
        self, batch: _core.KeyBatch, rows: Rows, locations: _core.RowLocations | None = None, /
    ) -> Waitable:
        """Read the row of each key as given."""
        return pull_and_expand(self.pull, batch, rows, self._workers)

    def pull_after(self, push: Waitable, batch: _core.KeyBatch, rows: Rows, /) -> Waitable:
        """Read the row of each key as given, as it is after a push."""
        return pull_and_expand(
            lambda batch, rows: self.pull_from_servers(batch, rows, self.rows.flush()), batch, rows, self._workers
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
    ) -> Waitable:
        """Apply one step with a gradient for each unique key, some of them later."""
        self._channel.client.check()
        self._forget_changed()
        if len(batch) < MIN_KEYS or self._after:
            pushes = self.rows.push_to_servers(batch.hashes, grads, counts, self._after)
        else:
            push = self.rows.push(batch.hashes, grads, counts)
            pushes = [] if push is None else [push]
        return PushFuture(self._channel, pushes)

    # --- everything else --------------------------------------------------------------------------------------------

    def _begin(self, op: int, **what: Any) -> _core.Call:
        self._channel.client.check()
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
        with self._changing() if function in CHANGES_ROWS else contextlib.nullcontext():
            return super().reduce(function, parameters)

    def run_function(
        self, function: int, description: Description, hashes: npt.NDArray[np.uint64] | None, /
    ) -> _core.Call:
        """Call a function of a user on all servers; one that changes rows does so exactly once."""
        future = super().run_function(function, description, hashes)
        if function in CHANGES_ROWS:
            self._changes.append(future)
        return future

    def sweep(self, rules: npt.NDArray[np.float64], clock: int = 0, /, *, dry_run: bool) -> npt.NDArray[np.uint64]:
        """Drop the rows that expiry rules select, or only count them; return the sums over the endpoints."""
        with contextlib.nullcontext() if dry_run else self._changing():
            return super().sweep(rules, clock, dry_run=dry_run)
