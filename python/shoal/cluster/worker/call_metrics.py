"""CallMetrics: how long the calls of a worker took, and how many keys its pulls had.

Threads: used under the lock of its owner, apart from `count_keys`, whose numbers may be short by a concurrent call.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from shoal import _core
from shoal.cluster.protocol.metrics import Durations


class CallMetrics:
    """Counters, by operation."""

    def __init__(self) -> None:
        self.keys = self.unique_keys = 0
        self._seconds: defaultdict[int, float] = defaultdict(float)
        self._durations: defaultdict[int, Counter[int]] = defaultdict(Counter)  # by powers of two of nanoseconds

    def count_keys(self, given: int, unique: int) -> None:
        """Count the keys of a pull: as they were given, and without repetitions."""
        self.keys += given
        self.unique_keys += unique

    def settled(self, op: int, seconds: float) -> None:
        """Count a call that was answered, or has failed."""
        self._seconds[op] += seconds
        self._durations[op][1 << int(seconds * 1e9 + 1).bit_length() - 1] += 1

    def durations(self) -> dict[str, Durations]:
        """Return how long calls took, by the name of their operation."""
        return {
            _core.Op(op).name.lower().replace("_", " "): Durations(self._seconds[op], dict(counts))
            for op, counts in self._durations.items()
        }
