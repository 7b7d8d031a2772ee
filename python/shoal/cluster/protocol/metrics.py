"""The metrics of the roles: what each number is called and what it means, wherever it is reported.

``--metrics-port`` reports them to Prometheus as ``shoal_ROLE_NAME``, counters with ``_total``; Ray reports the single
numbers of servers as ``ray_shoal_server_NAME``. deploy/prometheus and deploy/grafana use them.

Threads: constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

__all__ = ["SCHEDULER", "SERVER", "WORKER", "Metric", "RoleMetrics", "Values"]


class Metric(NamedTuple):
    """A metric of a role.

    Attributes
    ----------
    kind : {"counter", "gauge", "histogram"}
        The value of a histogram is how often numbers from each key on, up to the next one, occurred.
    help : str
    label : str
        If it is not empty, the metric has a number for each value of this label.
    """

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""

    @property
    def is_single(self) -> bool:
        """Whether its value is one number."""
        return not self.label and self.kind != "histogram"


RoleMetrics = Mapping[str, Metric]
Values = Mapping[str, float | Mapping[str, float] | Mapping[int, int]]  # of a role's metrics, by name

SCHEDULER: RoleMetrics = {
    "epoch": Metric("gauge", "Epoch of the map of slots; 0 until all servers have joined"),
    "servers": Metric("gauge", "Servers of the map of slots"),
    "workers": Metric("gauge", "Workers of the job"),
    "refused": Metric("counter", "Refused messages and connections"),
    "failovers": Metric("counter", "Servers whose slots others have taken over"),
    "rows_lost": Metric("gauge", "Whether all copies of some slots are lost, which ends the job"),
    "slots_without_copies": Metric("gauge", "Slots that have fewer copies than --replicas"),
    "slots_under_way": Metric("gauge", "Slots that are being copied to a server"),
    "worker_clock": Metric("gauge", "Ticks completed by each worker, as the scheduler has heard", "worker"),
    "worker_silent_seconds": Metric("gauge", "Seconds since the last message of each worker", "worker"),
    "server_silent_seconds": Metric("gauge", "Seconds since the last message of each server", "server"),
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
    "rows": Metric("gauge", "Rows of the slots that it serves"),
    "row_bytes": Metric("gauge", "Bytes of these rows with their index"),
    "copied_slots": Metric("gauge", "Slots of other servers of which it has copies"),
    "unacknowledged_bytes": Metric("gauge", "Bytes that servers with copies of its slots have not acknowledged"),
    "held_replies": Metric("gauge", "Replies that wait for these acknowledgements"),
    "requests": Metric("counter", "Requests received, by kind", "op"),
    "push_staleness": Metric("histogram", "Pushes of others to a table since the worker's last pull of it"),
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
