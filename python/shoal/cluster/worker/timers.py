"""The times at which parts are sent again and calls pass their deadlines: a heap whose stale entries are skipped.

Threads: one at a time; the owner locks.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from shoal.cluster.worker.calls import Call, RequestPart


class Timers:
    """Times of parts and calls. The entry of a part is stale unless it is the part's present `due`."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, RequestPart | Call]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, time: float, what: RequestPart | Call) -> None:
        """Add a time."""
        self._added += 1
        heappush(self._entries, (time, self._added, what))

    def take_due(self, now: float) -> Iterator[tuple[RequestPart | Call, float]]:
        """Remove and yield the entries up to ``now``, also those that are added meanwhile; some may be stale."""
        while self._entries and self._entries[0][0] <= now:
            time, _, what = heappop(self._entries)
            yield what, time

    def next_time(self, pending: int) -> float | None:
        """Return the first time that is not stale; None if there is none. ``pending`` bounds the size of the heap."""
        if len(self._entries) > 64 + 2 * pending:
            self._entries = [entry for entry in self._entries if _is_current(entry)]
            heapify(self._entries)
        while self._entries and not _is_current(self._entries[0]):
            heappop(self._entries)
        return self._entries[0][0] if self._entries else None


def _is_current(entry: tuple[float, int, RequestPart | Call]) -> bool:
    time, _, what = entry
    return not what.done if isinstance(what, Call) else what.due == time
