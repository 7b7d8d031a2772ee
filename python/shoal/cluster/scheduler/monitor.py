"""Monitor: what a cluster does now and has done lately, from the figures that its members report with their heartbeats.

Counters become rates over the last `_WINDOW_SECONDS`, and histograms quantiles over the same time. The history has a
point every `_STEP_SECONDS`, the last `_MAX_POINTS` of them. The page of the scheduler's metrics port displays the view.

Threads: one; a view is not changed once it is made.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from shoal.cluster.protocol.messages import Figures
from shoal.cluster.protocol.status import ArcStatus, StatusReply, as_dict

_WINDOW_SECONDS = 10.0
_STEP_SECONDS = 2.0
_MAX_POINTS = 450
_MAX_HOT = 8
_MAX_HOT_KEYS = 16
_QUANTILES = (("p50", 0.5), ("p99", 0.99))
_CURVES = ("keys_per_second", "examples_per_second", "pull_p50", "pull_p99", "push_p99", "loss", "auc")


class MemberFigures(NamedTuple):
    """The last figures of a member, and when they came."""

    key: bytes  # of the process
    role: str
    rank: int
    at: float
    figures: Figures
    job: str = ""  # the name of a worker's job


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """Return a quantile of a histogram with buckets that begin at the keys; None if it is empty.

    A bucket is taken to end a quarter above its beginning.

    Examples
    --------
    >>> quantile({1000: 1, 2000: 2}, 0.5)
    2125.0
    """
    total = sum(counts.values())
    if total <= 0:
        return None
    left = share * total
    for least, count in sorted(counts.items()):
        if count >= left:
            return least + least / 4 * left / count
        left -= count
    return float(max(counts))


class Monitor:
    """Keeps the figures of the last seconds of each member, and the history of their sums."""

    def __init__(self) -> None:
        self._samples: dict[bytes, deque[MemberFigures]] = {}
        self._fits: dict[str, deque[tuple[float, int]]] = {}  # of the first model: when it had learned from how many
        self._history: deque[dict[str, Any]] = deque(maxlen=_MAX_POINTS)
        self._view: dict[str, Any] = {}

    @property
    def view(self) -> dict[str, Any]:
        """What is displayed; empty before the first call of :meth:`observe`."""
        return self._view

    def observe(self, status: StatusReply, members: Iterable[MemberFigures], now: float) -> None:
        """Make a new view."""
        newest = {one.key: one for one in members}
        self._samples = {key: self._samples.get(key, deque()) for key in newest}
        for key, one in newest.items():
            samples = self._samples[key]
            if not samples or samples[-1].at < one.at:
                samples.append(one)
            while len(samples) > 2 and samples[1].at < now - _WINDOW_SECONDS:
                samples.popleft()
        found = {(one.role, one.job, one.rank): self._samples[key] for key, one in newest.items()}
        plain = as_dict(status)
        servers = [self._server(one, plain["arcs"], found.get(("server", "", one["rank"]))) for one in plain["servers"]]
        workers = [
            self._worker(one, found.get(("worker", one["job"], one["rank"])))
            for one in plain["workers"]
            if one["rank"] is not None
        ]
        fits = self._observe_fits(plain["fits"], now)
        total = self._total(servers, workers, fits, found)
        if not self._history or now - self._history[-1]["at"] >= _STEP_SECONDS:
            self._history.append({"at": now, **{name: total[name] for name in _CURVES}})
        kept = ("cluster", "generation", "uptime_seconds", "epoch", "slots", "num_servers", "replicas", "lost")
        self._view = {
            **{name: plain[name] for name in kept},
            "job": plain["job"],
            "jobs": plain["jobs"],
            "total": total,
            "tables": self._tables(found),
            "servers": servers,
            "workers": workers,
            "fits": fits,
            "hottest": _hottest(status.arcs),
            "hottest_keys": _hottest_keys(servers, found),
            "copies": [one for one in plain["streams"] if one["arriving"]],
            "failovers": plain["failovers"],
            "history": {
                "seconds": [round(point["at"] - now, 1) for point in self._history],
                **{name: [point[name] for point in self._history] for name in _CURVES},
            },
        }

    def _observe_fits(self, fits: list[dict[str, Any]], now: float) -> list[dict[str, Any]]:
        self._fits = {one["name"]: self._fits.get(one["name"], deque()) for one in fits}
        for one in fits:
            samples = self._fits[one["name"]]
            samples.append((now, one["known"] + one["models"][0]["examples"]))
            while len(samples) > 2 and samples[1][0] < now - _WINDOW_SECONDS:
                samples.popleft()
            (first, before), (last, after) = samples[0], samples[-1]
            one["examples_per_second"] = max(0.0, (after - before) / (last - first)) if last > first else 0.0
        return fits

    def _server(
        self, one: dict[str, Any], arcs: list[dict[str, Any]], samples: deque[MemberFigures] | None
    ) -> dict[str, Any]:
        rank = one["rank"]
        mine = [arc for arc in arcs if arc["server"] == rank]
        numbers: Mapping[str, float] = samples[-1].figures.numbers if samples else {}
        return {
            "rank": rank,
            "about": one["about"],
            "host": one["host"],
            "is_connected": one["is_connected"],
            "heard_seconds": one["heard_seconds"],
            "arcs": len(mine),
            "slots": sum(arc["end_slot"] - arc["first_slot"] for arc in mine),
            "copies": sum(rank in arc["copies"] for arc in arcs),
            "rows": int(numbers.get("rows", 0)),
            "memory_bytes": int(numbers.get("row_bytes", 0)),
            "budget_bytes": int(numbers.get("budget_bytes", 0)),
            "lag_seconds": numbers.get("replication_lag", 0.0),
            "deferred": int(numbers.get("deferred_reads", 0)),
            "keys_per_second": _rate(samples, "keys"),
            "requests_per_second": _rate(samples, "messages"),
            "staleness": _quantiles(_since(samples, "staleness"), 1.0),
            "pull": _quantiles(_since(samples, "pull"), 1e-9),
            "push": _quantiles(_since(samples, "push"), 1e-9),
        }

    def _worker(self, one: dict[str, Any], samples: deque[MemberFigures] | None) -> dict[str, Any]:
        numbers: Mapping[str, float] = samples[-1].figures.numbers if samples else {}
        kept = ("about", "host", "clock", "is_connected", "heard_seconds")
        return {
            "rank": f"{one['job']}/{one['rank']}" if one["job"] else one["rank"],
            **{name: one[name] for name in kept},
            "clocks_per_second": _rate(samples, "clock"),
            "examples": int(numbers.get("examples", 0)),
            "examples_per_second": _rate(samples, "examples"),
            "loss": numbers.get("loss"),
            "auc": numbers.get("auc"),
            "under_way": int(numbers.get("under_way", 0)),
            "pull": _quantiles(_since(samples, "pull"), 1e-9),
        }

    def _total(
        self,
        servers: list[dict[str, Any]],
        workers: list[dict[str, Any]],
        fits: list[dict[str, Any]],
        found: Mapping[tuple[str, str, int], deque[MemberFigures]],
    ) -> dict[str, Any]:
        spent: dict[str, Counter[int]] = {"pull": Counter(), "push": Counter()}
        for (role, *_), samples in found.items():
            if role == "server":
                for op, counts in spent.items():
                    counts.update(_since(samples, op))
        pull, push = (_quantiles(counts, 1e-9) for counts in spent.values())
        learning = [model for fit in fits if fit["state"] == "running" for model in fit["models"]] + workers
        return {
            "rows": sum(one["rows"] for one in servers),
            "memory_bytes": sum(one["memory_bytes"] for one in servers),
            "keys_per_second": sum(one["keys_per_second"] for one in servers),
            "requests_per_second": sum(one["requests_per_second"] for one in servers),
            "examples_per_second": sum(one["examples_per_second"] for one in workers),
            "pull_p50": pull["p50"],
            "pull_p99": pull["p99"],
            "push_p50": push["p50"],
            "push_p99": push["p99"],
            "loss": _mean([one["loss"] for one in learning]),
            "auc": _mean([one["auc"] for one in learning]),
        }

    def _tables(self, found: Mapping[tuple[str, str, int], deque[MemberFigures]]) -> list[dict[str, Any]]:
        rows: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for samples in found.values():
            for name, value in samples[-1].figures.numbers.items():
                kind, _, table = name.partition(":")
                if table and kind == "rows":
                    rows[table] += int(value)
                elif table and kind == "bytes":
                    sizes[table] += int(value)
        return [{"name": name, "rows": rows[name], "memory_bytes": sizes[name]} for name in sorted(rows)]


def _rate(samples: deque[MemberFigures] | None, name: str) -> float:
    """Return by how much a number has risen per second; 0 if that is not known."""
    if not samples or len(samples) < 2:
        return 0.0
    first, last = samples[0], samples[-1]
    risen = last.figures.numbers.get(name, 0) - first.figures.numbers.get(name, 0)
    return max(0.0, risen / (last.at - first.at))


def _since(samples: deque[MemberFigures] | None, name: str) -> dict[int, int]:
    """Return what a histogram has counted in the window; all, if there is one sample."""
    if not samples:
        return {}
    now = samples[-1].figures.histograms.get(name, {})
    before = samples[0].figures.histograms.get(name, {}) if len(samples) > 1 else {}
    return {least: count - before.get(least, 0) for least, count in now.items() if count > before.get(least, 0)}


def _quantiles(counts: Mapping[int, int], unit: float) -> dict[str, float | None]:
    found = {name: quantile(counts, share) for name, share in _QUANTILES}
    return {name: None if value is None else value * unit for name, value in found.items()}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _hottest_keys(
    servers: list[dict[str, Any]], found: Mapping[tuple[str, str, int], deque[MemberFigures]]
) -> list[dict[str, Any]]:
    """Return the keys that requests name most often per second, as text: JavaScript has no integers of 64 bits."""
    hot = []
    for server in servers:
        samples = found.get(("server", "", server["rank"]))
        for name, share in samples[-1].figures.numbers.items() if samples else ():
            kind, _, rest = name.partition(":")
            if kind == "hot":
                key, _, table = rest.partition(":")
                requests = share * server["keys_per_second"]
                hot.append(
                    {
                        "table": table,
                        "key": key,
                        "server": server["rank"],
                        "share": share,
                        "requests_per_second": requests,
                    }
                )
    return sorted(hot, key=lambda one: (one["requests_per_second"], one["share"]), reverse=True)[:_MAX_HOT_KEYS]


def _hottest(arcs: Iterable[ArcStatus]) -> list[dict[str, Any]]:
    """Return the ranges of slots with the most load per slot."""
    hot = sorted(arcs, key=lambda arc: arc.load / max(1, arc.end_slot - arc.first_slot), reverse=True)[:_MAX_HOT]
    kept = ("first_slot", "end_slot", "server", "load", "rows")
    return [{name: getattr(one, name) for name in kept} for one in hot if one.load]
