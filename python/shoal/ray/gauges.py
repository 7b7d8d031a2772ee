"""ServerGauges: the counters of a server as metrics of Ray, which Prometheus scrapes from the nodes of Ray.

Threads: used by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ray.util.metrics import Gauge

from shoal.cluster.protocol.metrics import SERVER, Values

_REPORT_SECONDS = 5.0  # between two reports


class ServerGauges:
    """The gauges ``ray_shoal_server_*`` of a server, with the tag ``server``."""

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._gauges = {
            key: Gauge(f"shoal_server_{key}", one.help, ("server",)) for key, one in SERVER.items() if one.is_single
        }
        self._tags = {"server": name}
        self._clock = clock
        self._due = clock()

    def report(self, counters: Callable[[], Values]) -> None:
        """Report the counters that a function returns, unless the last report was a moment ago."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + _REPORT_SECONDS
        found = counters()
        for key, gauge in self._gauges.items():
            gauge.set(found.get(key, 0), self._tags)
