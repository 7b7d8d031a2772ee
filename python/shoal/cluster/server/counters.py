"""The metrics of a server: those of its endpoints together.

Counts of tables are part of the state of an arc and move with it. A counter of a process must not decrease, so this
module adds up by how much those of each arc have risen since it was seen here first.

Threads: any; one lock.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shoal import _core
from shoal.cluster.protocol.messages import Figures
from shoal.cluster.protocol.metrics import Durations, Values
from shoal.cluster.server.fits import FitReader

_BUSY_SECONDS = 0.01  # that a reader of metrics waits for an endpoint that is executing a request
_MAX_SAMPLES = 1024
_MAX_HOT_KEYS = 16  # of an endpoint
_LEAST_HOT = 4  # samples of a key that is not there by chance
_REPORTED = ("rows", "row_bytes", "budget_bytes", "replication_lag", "deferred_reads", "messages")


def _reported(struct: str, prefix: str = "") -> dict[str, str]:
    """Return the kinds of the statistics that are reported, by name."""
    return {prefix + name: kind for name, kind, _ in _core.STATISTICS[struct] if kind}


# Of tables, by their names in what the engine returns.
_TABLE = _reported("shard")
_TIER = _reported("tier", "tier_")
_COUNTERS = [name for name, kind in (_TABLE | _TIER).items() if kind == "counter"]
_GAUGES = [name for name, kind in (_TABLE | _TIER).items() if kind == "gauge"]


class ReplicationLag:
    """How long ago the first record was written that a backup has not acknowledged, from samples of positions.

    Examples
    --------
    >>> lag = ReplicationLag()
    >>> [lag.update(now, sent, done) for now, sent, done in [(1.0, 5, 5), (2.0, 6, 5), (2.5, 8, 5), (3.0, 8, 6)]]
    [0.0, 0.0, 0.5, 0.5]
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # when a position was seen first

    def update(self, now: float, sent: int, acknowledged: int) -> float:
        """Note the positions of a stream; return its lag in seconds, to the precision of the samples."""
        while self._samples and self._samples[0][1] <= acknowledged:
            self._samples.popleft()
        if acknowledged >= sent:
            return 0.0
        if not self._samples or (self._samples[-1][1] < sent and len(self._samples) < _MAX_SAMPLES):
            self._samples.append((now, sent))
        return now - self._samples[0][0]


class ServerCounters:
    """The metrics of a server's endpoints."""

    def __init__(self, endpoints: Mapping[str, _core.Endpoint], names: Callable[[], Mapping[int, str]]) -> None:
        self._endpoints = dict(endpoints)
        self._names = names
        self._fits = FitReader(self._endpoints, names)
        self._lock = threading.Lock()
        self._metrics: dict[str, dict[str, Any] | None] = {}  # by address: what was found last, as in the next ones
        self._held: dict[str, dict[str, int]] = {}
        self._gauges: dict[str, dict[str, Counter[int]]] = {}  # of tables, by address
        self._arcs: dict[str, dict[int, dict[int, dict[str, int]]]] = {}  # by address, first slot and table
        self._risen: dict[str, Counter[int]] = {name: Counter() for name in _COUNTERS}  # of tables
        self._lags: dict[int, ReplicationLag] = {}  # by stream
        self._lag: dict[int, float] = {}

    def note_stream(self, stream: int, now: float, sent: int, acknowledged: int) -> None:
        """Note how far a stream is, and how far its backup."""
        with self._lock:
            lag = self._lags.setdefault(stream, ReplicationLag())
            self._lag[stream] = lag.update(now, sent, acknowledged)

    def keep_streams(self, streams: set[int]) -> None:
        """Forget all other streams."""
        with self._lock:
            for stream in self._lags.keys() - streams:
                del self._lags[stream]
                self._lag.pop(stream, None)

    def read(self, loops: Iterable[_core.DataLoop]) -> Values:
        """Return the values of the metrics ``shoal.cluster.protocol.metrics.SERVER``.

        Those of an endpoint that has been executing a request for a moment are as they were before.
        """
        with self._lock:
            return self._read(loops)

    def figures(self, loops: Iterable[_core.DataLoop]) -> Figures:
        """Return what heartbeats report of these metrics, of the hottest keys and of fits. From one thread."""
        found: Any = self.read(loops)
        numbers = {name: float(found[name]) for name in _REPORTED if name in found}
        numbers["keys"] = float(sum(sum(found[f"table_rows_{kind}"].values()) for kind in ("pulled", "pushed")))
        numbers |= {f"rows:{table}": float(rows) for table, rows in found["table_rows"].items()}
        numbers |= {f"bytes:{table}": float(size) for table, size in found["table_bytes"].items()}
        numbers |= {f"hot:{key}:{table}": share for (table, key), share in self.hot_keys().items()}
        histograms = {op: dict(one.counts) for op, one in found["request_duration"].items() if op in ("pull", "push")}
        return Figures(numbers, {**histograms, "staleness": dict(found["push_staleness"])}, self._fits.read())

    def hot_keys(self) -> dict[tuple[str, int], float]:
        """Return shares of the keys that requests have named lately, by table and key: those of the greatest shares.

        They are of a sample, and too low by less than 1e-4. Those of an endpoint that has been executing a request for
        a moment are left out.
        """
        names = self._names()
        counts: Counter[tuple[str, int]] = Counter()
        sampled = 0
        for endpoint in self._endpoints.values():
            found = endpoint.hot_keys(_MAX_HOT_KEYS, _BUSY_SECONDS)
            if found is not None:
                keys, samples = found
                sampled += samples
                counts.update({(names[table], key): count for table, key, count in keys if table in names})
        return {key: count / sampled for key, count in counts.items() if count >= _LEAST_HOT}

    def _read(self, loops: Iterable[_core.DataLoop]) -> Values:
        total: Counter[str] = Counter()
        error = 0.0
        requests: Counter[str] = Counter()
        push_staleness: Counter[int] = Counter()
        pull_staleness: Counter[int] = Counter()
        for address, endpoint in self._endpoints.items():
            found = self._metrics[address] = endpoint.metrics(_BUSY_SECONDS) or self._metrics.get(address)
            if found is None:
                continue
            total.update({name: count for name, count in found.items() if isinstance(count, int)})
            requests.update(found["requests"])
            push_staleness.update(found["push_staleness"])
            pull_staleness.update(found["pull_staleness"])
            error += found["narrowed_squared_error"]
            loads, streams = endpoint.table_loads(_BUSY_SECONDS), endpoint.replication(_BUSY_SECONDS)
            if loads is not None and streams is not None:
                self._note(address, loads)
                self._held[address] = {
                    "rows": sum(load["rows"] for _, _, load in loads),
                    "row_bytes": sum(load["bytes"] for _, _, load in loads),
                    "copied_slots": sum(end - first for one in streams["replicas"] for first, end in one["in_sync"]),
                    "unacknowledged_bytes": sum(one["bytes"] for one in streams["streams"]),
                    "held_replies": streams["held"],
                }
            total.update(self._held.get(address, {}))
        return {
            **total,
            "weight_squared_error": error,
            "requests": requests,
            "request_duration": _durations(loops),
            "push_staleness": push_staleness,
            "pull_staleness": pull_staleness,
            "replication_lag": max(self._lag.values(), default=0.0),
            **self._tables(),
        }

    def _note(self, address: str, loads: list[tuple[int, int, dict[str, int]]]) -> None:
        """Add what the tables of an endpoint have done since they were seen here last."""
        former = self._arcs.get(address, {})
        arcs: dict[int, dict[int, dict[str, int]]] = {first: {} for first in former}
        for first, table, load in loads:
            arcs.setdefault(first, {})[table] = load
            if first in former:  # else the arc has come from elsewhere, and its counts with it
                before = former[first].get(table, {})
                for name in _COUNTERS:
                    self._risen[name][table] += max(0, load.get(name, 0) - before.get(name, 0))
        present = {first for first, _, _ in loads}
        served = self._endpoints[address].arc_loads(_BUSY_SECONDS)
        if served is not None:  # arcs without tables too: what a table does there later is new
            present |= {first for first, *_ in served}
        self._arcs[address] = {first: arcs.get(first, {}) for first in present}
        gauges: dict[str, Counter[int]] = {name: Counter() for name in _GAUGES}
        for _, table, load in loads:
            for name in load.keys() & gauges.keys():
                gauges[name][table] += load[name]
        self._gauges[address] = gauges

    def _tables(self) -> dict[str, dict[str, float]]:
        counts: dict[str, Counter[int]] = {name: Counter() for name in _GAUGES} | self._risen
        for gauges in self._gauges.values():
            for name, found in gauges.items():
                counts[name].update(found)
        names = self._names()
        tiered = {table: name for table, name in names.items() if table in counts["tier_disk_bytes"]}
        of_tables: dict[str, dict[str, float]] = {
            f"table_{name}": {names[id]: counts[name][id] for id in names} for name in _TABLE
        }
        return of_tables | {name: {tiered[id]: counts[name][id] for id in tiered} for name in _TIER}


def _durations(loops: Iterable[_core.DataLoop]) -> dict[str, Durations]:
    seconds: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for loop in loops:
        for op, (total, found) in loop.durations().items():
            seconds[op] += total
            counts[op].update(found)
    return {op: Durations(seconds[op], found) for op, found in counts.items()}
