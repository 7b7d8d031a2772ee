"""Room for the rows that the rest of a pass will create, by how their number has grown.

    share of the pass       1/16          1/8
    examples, rows          e1, n1        e2, n2        b = log(n2 / n1) / log(e2 / e1), at most 1
    room for                0.95 n2 8^b rows

Rows grow like a power of the examples where their keys follow Zipf's law (Heaps' law). A table that has room for them
inserts a new key two to three times as fast as one that grows meanwhile; what is wrong in the forecast costs time, or
some memory until the end of the pass, and changes no result.

Threads: that of the fit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from shoal.store.base import Store
from shoal.store.local import LocalStore

__all__ = ["RoomForRows", "forecast"]

log = logging.getLogger(__name__)

_FIRST, _SECOND = 1 / 16, 1 / 8
_LEAST_ROWS = 50_000  # of a table that has not outgrown the caches, growth takes no time
_SAFETY = 0.95


def forecast(first: tuple[int, int], second: tuple[int, int], share: float) -> int:
    """Forecast the rows at the end of a pass from (examples, rows) at two moments; ``share`` is that of the second."""
    (e1, n1), (e2, n2) = first, second
    if not 0 < e1 < e2 or not 0 < n1 < n2:
        return n2
    power = min(1.0, math.log(n2 / n1) / math.log(e2 / e1))
    return int(_SAFETY * n2 * share**-power)


class RoomForRows:
    """The tables of a store while a model learns in one pass.

    Only of tables in the memory of this process that have no bound: no memory budget, tier or rule of expiry.

    Parameters
    ----------
    stores : sequence of Store
    reader : object
        Its ``progress()`` is the share of the pass that has been read; without that method nothing is forecast.
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
        self._before: dict[str, tuple[int, int]] = {}

    def learned(self, examples: int) -> None:
        """Count the examples of a batch, and make room when an eighth of the pass is over."""
        if self._share is None:
            return
        self._examples += examples
        share = self._share()
        if share < _FIRST:
            return
        if share < _SECOND:
            if not self._before:
                self._before = {table.name: (self._examples, len(table)) for table in self._tables}
            return
        self._share = None
        for table in self._tables:
            now = (self._examples, len(table))
            rows = forecast(self._before.get(table.name, now), now, share)
            if now[1] < _LEAST_ROWS or rows <= now[1]:
                continue
            try:
                table.reserve(rows)
            except ValueError as error:  # more than the memory that is free: it grows as it goes
                log.debug("no room for the %d rows that table %r may have: %s", rows, table.name, error)
