"""Counts of refused messages and connections by reason, with rate-limited log lines.

The first refusal of a reason is logged at once. Those that follow within `INTERVAL` seconds are only counted, and the
next line of that reason has their number.

Threads: any number.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

INTERVAL = 10.0  # seconds between two lines of one reason
_MAX_LINE_LENGTH = 500


class Refusals:
    """Counts refusals, and logs some of them.

    Examples
    --------
    >>> refusals = Refusals(logging.getLogger("shoal.example"))
    >>> refusals.add("garbage", "127.0.0.1: not a message")
    >>> refusals.counts()
    {'garbage': 1}
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, tuple[float, int]] = {}  # by reason: when, and how many there were then

    def add(
        self,
        reason: str,
        text: str,
        *,
        level: int = logging.WARNING,
        trace: bool = False,
        ids: Mapping[str, Any] | None = None,
    ) -> None:
        """Count a refusal, and log ``text`` unless the reason was logged within `INTERVAL`."""
        with self._lock:
            self._counts[reason] += 1
            count, now = self._counts[reason], self._clock()
            at, before = self._logged.get(reason, (-INTERVAL, 0))
            if now - at < INTERVAL and before:
                return
            self._logged[reason] = (now, count)
        more = f" (and {count - before - 1} more of this kind since the last such line)" if count - before > 1 else ""
        line = "".join(letter if letter.isprintable() else "?" for letter in text[:_MAX_LINE_LENGTH])
        self._log.log(level, "%s%s", line, more, exc_info=trace, extra=ids)

    def counts(self) -> dict[str, int]:
        """Return how often each reason occurred."""
        with self._lock:
            return dict(self._counts)
