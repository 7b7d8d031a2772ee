"""Workers with a cache: the real :class:`CachedRows` between a simulated worker and its requests."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oracle import row_cache
from shoal import _core
from shoal.cluster.worker.cached_rows import CachedRows
from sim.history import RATE

Op = _core.Op


@dataclass(frozen=True)
class CachePlan:
    """The cache of every worker: so small that rows are replaced all the time."""

    rows: int = 16
    staleness: int = 1
    local_steps: bool = False
    make_cache: Callable = _core.RowCache
    make_rows: Callable = CachedRows


TWIN = CachePlan(make_cache=row_cache.RowCache)


class Pull:
    """A pull of a worker, to be yielded by its program."""

    def __init__(self, pull, answered):
        self._pull = pull
        self._answered = answered
        self.is_settled = False

    def done(self):
        if not self.is_settled and self._pull.done:
            self.is_settled = True
            if self._pull.error is None:
                self._answered()
        return self.is_settled

    @property
    def error(self):
        return self._pull.error


class HeldPush:
    """A push of a worker: done when nothing of it is held back or unacknowledged."""

    def __init__(self, record):
        self.record = record
        self.calls = None  # with which the last of it was sent
        self.is_done = False
        self.error = None

    def done(self):
        return self.is_done


class _Nothing:
    """A push that was held back as a whole."""

    error = None

    def done(self):
        return True


class CachedTable:
    """What a simulated worker does with a table through a cache."""

    def __init__(self, client, plan, table):
        self.client, self.table, self.staleness = client, table, plan.staleness
        cluster = client.cluster
        dim = cluster.dims[table]
        steps = ("SGD", {"lr": RATE, "weight_decay": 0.0}) if plan.local_steps else ()
        self.rows = plan.make_rows(
            plan.make_cache(plan.rows, dim, False, *steps), dim=dim, slots=cluster.slots, staleness=plan.staleness,
            local_steps=plan.local_steps,
            waits=cluster.staleness if cluster.mode == "ssp" else None, submit=self.submit,
            clock=lambda: client.clock, repetitions=lambda: client.requests.repetitions,
        )  # fmt: skip
        self.pulls = []
        self.held = []  # pushes

    def submit(self, op, *, after=(), **what):
        client = self.client
        if op == Op.PUSH:
            client.pushed.add(self.table)
        deadline = client.now + client.patience
        return client.requests.submit(
            op, self.table, client.clock, client.now, deadline, filter=client.filter, after=after, **what
        )

    def pull(self, batch, out, answered):
        rows = np.full((len(batch), out.shape[1]), np.nan, np.float32)

        def expand():
            batch.expand(rows, out.shape[1], out, _THREAD)
            answered()

        pull = Pull(self.rows.pull(batch.hashes, rows), expand)
        self.pulls.append(pull)
        return pull

    def push(self, batch, summed, record):
        """Push; what is returned is done when all that was sent at once is acknowledged."""
        self.held.append(HeldPush(record))
        return self.rows.push(batch.hashes, summed, None) or _Nothing()

    def end_clock(self):
        self.rows.end_clock()
        self._mark(self.client.clock - self.staleness)

    def flush(self):
        """Send all; return the pushes, which are done when they are acknowledged."""
        self.rows.flush()
        self._mark(self.client.clock)
        return list(self.held)

    def _mark(self, clock):
        for push in self.held:
            if push.calls is None and push.record.clock <= clock:
                push.calls = list(self.rows._unacknowledged)

    def go(self):
        """Go on with all that can."""
        self.pulls = [pull for pull in self.pulls if not pull.done()]
        for push in self.held:
            if push.calls is not None and all(call.done() for call in push.calls):
                push.is_done = True
                push.error = next((call.error for call in push.calls if call.error is not None), None)
                self.client.cluster.history.acknowledged(push.record, push.error)
        self.held = [push for push in self.held if not push.is_done]


_THREAD = _core.ThreadPool(1)
