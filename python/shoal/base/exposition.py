"""The formats of metrics: OpenMetrics for a scraper that accepts it, else the text format of Prometheus.

Threads: functions of their arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

_OPENMETRICS = "application/openmetrics-text"
_TEXT = "text/plain"


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the metrics of a registry, and their content type."""
    if accepts_openmetrics(accept):
        from prometheus_client.openmetrics import exposition as openmetrics

        encode: Callable[[CollectorRegistry], bytes] = openmetrics.generate_latest  # which has no types
        return encode(registry), f"{_OPENMETRICS}; version=1.0.0; charset=utf-8"
    from prometheus_client import generate_latest

    return generate_latest(registry), f"{_TEXT}; version=0.0.4; charset=utf-8"


def accepts_openmetrics(accept: str) -> bool:
    """Whether a header Accept prefers OpenMetrics 1.0 to the text format; one that cannot be parsed does not.

    Examples
    --------
    >>> accepts_openmetrics("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1")
    True
    >>> accepts_openmetrics("text/plain, application/openmetrics-text;q=0.5"), accepts_openmetrics("*/*")
    (False, False)
    """
    quality = {_OPENMETRICS: 0.0, _TEXT: 0.0}
    for one in accept.split(","):
        kind, *options = (part.strip().lower() for part in one.split(";"))
        found = dict(option.partition("=")[::2] for option in options)
        if kind in quality and (kind == _TEXT or found.get("version", "1.0.0").strip('"') == "1.0.0"):
            try:
                quality[kind] = max(quality[kind], float(found.get("q", "1")))
            except ValueError:
                continue
    return 0 < quality[_OPENMETRICS] >= quality[_TEXT]
