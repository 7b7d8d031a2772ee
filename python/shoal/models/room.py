"""Room for the rows that the next part of a pass will create, by how their number has grown.

    share of the pass       s / 2         s            2 s            s = 1/8, 1/4, 1/2
    examples, rows          e1, n1        e2, n2       room for 0.95 n2 2^b rows, b = log(n2 / n1) / log(e2 / e1) <= 1

Rows grow like a power of the examples where their keys follow Zipf's law (Heaps' law). A table that has room for them
inserts a new key two to three times as fast as one that grows meanwhile. No forecast is for more than twice the rows
that are there, so that a wrong one costs no more memory than doubling does; and none changes a result.

Threads: that of the fit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from shoal.store.base import Store
from shoal.store.local import LocalStore

log = logging.getLogger(__name__)

_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
_LEAST_ROWS = 50_000  # of a table that has not outgrown the caches, growth takes no time
_SAFETY = 0.95


def forecast(first: tuple[int, int], second: tuple[int, int]) -> int:
    """Forecast the rows after twice the examples of the second of two moments, (examples, rows) each."""
    (e1, n1), (e2, n2) = first, second
    if not 0 < e1 < e2 or not 0 < n1 < n2:
        return n2
    power = min(1.0, math.log(n2 / n1) / math.log(e2 / e1))
    return max(n2, int(_SAFETY * n2 * 2.0**power))


class RoomForRows:
    """The tables of stores while a model learns in one pass.

    Only of tables in the memory of this process that have no bound: no memory budget and no rule of expiry.
    """

    def __init__(self, stores: Sequence[Store], reader: object) -> None:
        self._share: Callable[[], float] | None = getattr(reader, "progress", None)
        self._tables = [
            table
            for store in stores
            if isinstance(store, LocalStore) and store.memory is None
            for table in store.tables.values()
            if not table.spec.expire
        ]
        self._examples = 0
        self._step = 0  # number of the next of _SHARES
        self._before: dict[str, tuple[int, int]] = {}

    def learned(self, examples: int) -> None:
        """Count the examples of a batch; make room when a share of the pass is over."""
        if self._share is None or self._step == len(_SHARES):
            return
        self._examples += examples
        share = self._share()
        if share < _SHARES[self._step]:
            return
        passed = sum(share >= one for one in _SHARES)
        is_next = passed == self._step + 1  # else the moments are not a factor of two apart
        self._step = passed
        for table in self._tables:
            now = (self._examples, len(table))
            before = self._before.get(table.name, now)
            self._before[table.name] = now
            rows = forecast(before, now)
            if not is_next or now[1] < _LEAST_ROWS or rows == now[1]:
                continue
            try:
                table.reserve(rows)
            except ValueError as error:  # more than the memory that is free: it grows as it goes
                log.debug("no room for the %d rows that table %r may have: %s", rows, table.name, error)
