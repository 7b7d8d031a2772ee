"""The metrics of the roles: what each number is called and what it means, wherever it is reported.

``--metrics-port`` reports them to Prometheus as ``shoal_ROLE_NAME``, counters with ``_total``; Ray reports those of
servers as ``ray_shoal_server_NAME``.

Threads: constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

__all__ = ["SCHEDULER", "SERVER", "WORKER", "Metric", "RoleMetrics"]


class Metric(NamedTuple):
    """A number of a role."""

    kind: Literal["counter", "gauge"]
    help: str


RoleMetrics = Mapping[str, Metric]

SCHEDULER: RoleMetrics = {
    "epoch": Metric("gauge", "Epoch of the map of slots; 0 until all servers have joined"),
    "servers": Metric("gauge", "Servers of the map of slots"),
    "workers": Metric("gauge", "Workers of the job"),
    "refused": Metric("counter", "Refused messages and connections"),
}

SERVER: RoleMetrics = {
    "messages": Metric("counter", "Requests received"),
    "replies": Metric("counter", "Replies sent"),
    "bytes_in": Metric("counter", "Bytes received"),
    "bytes_out": Metric("counter", "Bytes sent"),
    "duplicates": Metric("counter", "Pushes that had been received before"),
    "failed_steps": Metric("counter", "Steps that could not be applied"),
    "deferred_bytes": Metric("gauge", "Bytes of pulls that wait for pushes of other workers"),
    "pending_bytes": Metric("gauge", "Bytes of pushes that wait for those of other workers"),
}

WORKER: RoleMetrics = {
    "clock": Metric("gauge", "Ticks completed"),
    "sent": Metric("counter", "Requests sent"),
    "resent": Metric("counter", "Requests sent again"),
    "answers": Metric("counter", "Replies received"),
    "bytes_sent": Metric("counter", "Bytes sent"),
    "bytes_received": Metric("counter", "Bytes received"),
    "under_way": Metric("gauge", "Requests that wait for replies"),
}
