"""The metrics of the roles: what each number is called and what it means, wherever it is reported.

``--metrics-port`` reports them to Prometheus, counters with ``_total``: those that a server, worker or scheduler has
of itself as ``shoal_ROLE_NAME``, the others by the names stated here. Ray reports the single numbers of servers as
``ray_shoal_server_NAME``. deploy/prometheus and deploy/grafana use them, and docs/monitoring.md lists them.

Threads: constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from shoal import _core

# Upper bounds of the buckets of a histogram: the first number that is above a bucket, and how its bound is written.
Bounds = tuple[tuple[int, str], ...]

COUNTS: Bounds = tuple((1 << bits, str((1 << bits) - 1)) for bits in range(11))
NANOSECONDS: Bounds = tuple((1 << bits, repr((1 << bits) / 1e9)) for bits in range(10, 36))  # 1 microsecond to 34 s


class Durations(NamedTuple):
    """How long something took: the sum, and how often a number of nanoseconds from each key on occurred."""

    seconds: float
    counts: Mapping[int, int]


class Metric(NamedTuple):
    """A metric of a role."""

    # The value of a histogram is how often numbers from each key on, up to the next one, occurred; of one with
    # `label` it is a :class:`Durations` for each.
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    # If it is not empty, the metric has a number for each value of this label.
    label: str = ""
    # What Prometheus calls it, without `shoal_`; default: the role and the name.
    name: str = ""
    # Whether it is omitted while it has no value; otherwise it is 0.
    is_optional: bool = False

    @property
    def is_single(self) -> bool:
        """Whether its value is one number."""
        return not self.label and self.kind != "histogram"

    def full_name(self, role: str, key: str) -> str:
        """Return its name in Prometheus, without the suffix of a counter."""
        return f"shoal_{self.name or f'{role}_{key}'}"


RoleMetrics = Mapping[str, Metric]
Value = float | Mapping[str, float] | Mapping[int, int] | Mapping[str, Durations]
Values = Mapping[str, Value]  # of a role's metrics, by name

SCHEDULER: RoleMetrics = {
    "epoch": Metric("gauge", "Epoch of the map of slots; 0 until all servers have joined"),
    "servers": Metric("gauge", "Servers of the map of slots"),
    "workers": Metric("gauge", "Workers of all jobs"),
    "refused": Metric("counter", "Refused messages and connections"),
    "failovers": Metric("counter", "Servers whose slots others have taken over", name="failovers"),
    "rows_lost": Metric("gauge", "Whether all copies of some slots are lost, which ends the job"),
    "slots_without_copies": Metric("gauge", "Slots that have fewer copies than --replicas"),
    "slots_under_way": Metric("gauge", "Slots that are being copied to a server"),
    "worker_clock": Metric("gauge", "Ticks completed by each worker, as of its last heartbeat", "worker"),
    "worker_silent_seconds": Metric("gauge", "Seconds since the last message of each worker", "worker"),
    "server_silent_seconds": Metric("gauge", "Seconds since the last message of each server", "server"),
    "fit_pass": Metric("gauge", "Pass of each fit, from 1", "model", "fit_pass"),
    "fit_passes": Metric("gauge", "Planned passes of each fit", "model", "fit_passes"),
    "fit_examples": Metric("gauge", "Examples of the pass so far, of all workers", "model", "fit_examples"),
    "fit_loss": Metric("gauge", "Mean loss of the pass so far", "model", "fit_loss"),
    "fit_auc": Metric("gauge", "AUC of the pass so far: the mean of the workers' own", "model", "fit_auc"),
    "fit_accuracy": Metric("gauge", "Accuracy of the pass so far, of several classes", "model", "fit_accuracy"),
}


def _statistics(struct: str, label: str = "") -> dict[str, Metric]:
    """Return the metrics that servers report of a struct of statistics of the engine, whose table names them."""
    prefix = f"{label}_" if label else ""
    return {
        prefix + name: Metric(kind, help, "table" if label else "", prefix + name if label else "")
        for name, kind, help in _core.STATISTICS[struct]
        if kind
    }


SERVER: RoleMetrics = {
    **_statistics("service"),
    "requests": Metric("counter", "Requests received, by kind", "op"),
    "request_duration": Metric(
        "histogram", "Time to execute a request, by kind", "op", name="server_request_duration_seconds"
    ),
    "push_staleness": Metric(
        "histogram", "Pushes of others to a table since the worker's last pull of it", name="push_staleness_steps"
    ),
    "pull_staleness": Metric(
        "histogram", "Clocks between a pull and the slowest worker when it was answered", name="pull_staleness_clocks"
    ),
    "rows": Metric("gauge", "Rows of the slots that it serves"),
    "row_bytes": Metric("gauge", "Bytes of these rows with their index"),
    "copied_slots": Metric("gauge", "Slots of other servers of which it has copies"),
    "unacknowledged_bytes": Metric("gauge", "Bytes that servers with copies of its slots have not acknowledged"),
    "held_replies": Metric("gauge", "Replies that wait for these acknowledgements"),
    "replication_lag": Metric(
        "gauge", "Age of the oldest change that a server with copies lacks", name="replication_lag_seconds"
    ),
    "weight_squared_error": Metric("counter", "Sum of the squared errors of weights that were sent in 16 bits"),
    **_statistics("shard", "table"),
    **_statistics("tier", "tier"),
}

WORKER: RoleMetrics = {
    "clock": Metric("gauge", "Ticks completed"),
    "sent": Metric("counter", "Requests sent"),
    "resent": Metric("counter", "Requests sent again"),
    "answers": Metric("counter", "Replies received"),
    "bytes_sent": Metric("counter", "Bytes sent"),
    "bytes_received": Metric("counter", "Bytes received"),
    "under_way": Metric("gauge", "Calls that wait for replies"),
    "call_duration_seconds": Metric("histogram", "Time from a call until its replies are there, by kind", "op"),
    "keys": Metric("counter", "Keys of pulls as given, with repetitions"),
    "unique_keys": Metric("counter", "Keys of pulls without repetitions, which are sent"),
    "examples": Metric("counter", "Examples learned from"),
    "late_examples": Metric("counter", "Examples of a stream that were late, and learned from as any other"),
    "loss": Metric("gauge", "Mean loss of the pass so far", is_optional=True),
    "auc": Metric("gauge", "AUC of the pass so far", is_optional=True),
    "filter_bytes_saved": Metric("counter", "Bytes that filters have not sent", "table", name="filter_bytes_saved"),
    "filter_squared_error": Metric(
        "counter", "Sum of the squared errors of gradients by filters", "table", name="filter_squared_error"
    ),
    "checkpoint_age": Metric(
        "gauge", "Seconds since the last checkpoint of this process", name="checkpoint_age_seconds", is_optional=True
    ),
    "checkpoint_duration": Metric(
        "gauge", "Seconds that it took", name="checkpoint_duration_seconds", is_optional=True
    ),
}
