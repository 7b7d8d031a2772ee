"""Workers with a cache: the real CachedRows of csrc/client between a simulated worker and its requests."""

from dataclasses import dataclass

import numpy as np

from shoal import _core
from shoal._core import CachedRowsDefect, RowCacheDefect
from table_specs import native


@dataclass(frozen=True)
class CachePlan:
    """The cache of every worker: so small that rows are replaced all the time."""

    rows: int = 16
    staleness: int = 1
    local_steps: bool = False
    row_defect: RowCacheDefect = RowCacheDefect.NONE
    defect: CachedRowsDefect = CachedRowsDefect.NONE


class Pull:
    """A pull of a worker, to be yielded by its program."""

    def __init__(self, call, answered):
        self._call = call
        self._answered = answered
        self.is_settled = False

    def done(self):
        if not self.is_settled and self._call.done():
            self.is_settled = True
            if self._call.error is None:
                self._answered()
        return self.is_settled

    @property
    def error(self):
        return self._call.error


class HeldPush:
    """A push of a worker: done when nothing of it is held back or unacknowledged."""

    def __init__(self, record):
        self.record = record
        self.calls = None  # with which the last of it was sent
        self.is_done = False
        self.error = None

    def done(self):
        return self.is_done


class CachedTable:
    """What a simulated worker does with a table through a cache."""

    def __init__(self, client, plan, table):
        self.client, self.table, self.staleness = client, table, plan.staleness
        cluster = client.cluster
        self.rows = _core.SimulatedRows(
            client.requests, table, native(cluster.tables[table]), rows=plan.rows, slots=cluster.slots,
            staleness=plan.staleness, waits=cluster.staleness if cluster.mode == "ssp" else None,
            local_steps=plan.local_steps, filter=client.filter, clock=client.clock, patience=client.patience,
            row_defect=plan.row_defect, defect=plan.defect,
        )  # fmt: skip
        self.pulls = []
        self.held = []  # pushes

    def pull(self, batch, out, answered):
        rows = np.full((len(batch), out.shape[1]), np.nan, np.float32)

        def expand():
            batch.expand(rows, out.shape[1], out, _THREAD)
            answered()

        pull = Pull(self.rows.pull(batch.hashes, rows, self.client.now), expand)
        self.pulls.append(pull)
        return pull

    def push(self, batch, summed, record):
        """Push; what is returned is done when all that was sent at once is acknowledged."""
        self.held.append(HeldPush(record))
        return self.rows.push(batch.hashes, summed, self.client.now)

    def end_clock(self):
        self.rows.end_clock(self.client.now)
        self._mark(self.client.clock - self.staleness)

    def flush(self):
        """Send all; return the pushes, which are done when they are acknowledged."""
        self.rows.flush(self.client.now)
        self._mark(self.client.clock)
        return list(self.held)

    def _mark(self, clock):
        for push in self.held:
            if push.calls is None and push.record.clock <= clock:
                push.calls = self.rows.unacknowledged

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
