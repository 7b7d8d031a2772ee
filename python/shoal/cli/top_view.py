"""What ``shoal top`` writes of the view of a cluster: lines, curves and tables of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shoal.base.streams import escape_text

__all__ = ["CURVES", "Curve", "Section", "describe", "sections", "sparkline", "summary"]

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 60


class Section(NamedTuple):
    """A table of the display."""

    title: str
    heads: list[str]
    rows: list[list[str]]


def summary(view: dict[str, Any]) -> list[str]:
    """Return the lines about the cluster as a whole."""
    total, job = view["total"], view["job"]
    count = len(view["workers"])
    workers = f"{count} worker{'' if count == 1 else 's'}" + (f", {job['consistency']}" if job else "")
    workers += "".join(f", job {escape_text(one['name'])} {one['consistency']}" for one in view["jobs"])
    pull, push = (f"{_time(total[f'{op}_p50'])} / {_time(total[f'{op}_p99'])}" for op in ("pull", "push"))
    return [
        f"cluster {view['cluster']}: epoch {view['epoch']}, {len(view['servers'])} of {view['num_servers']} servers, "
        f"{workers}, up {view['uptime_seconds']:.0f} s",
        *([f"broken: {escape_text(view['lost'])}"] if view["lost"] else []),
        f"rows {_short(total['rows'])}, memory {_bytes(total['memory_bytes'])}, "
        f"{_short(total['keys_per_second'])} keys/s; p50 / p99: pull {pull}, push {push}",
        f"{_short(total['examples_per_second'])} examples/s, loss {_loss(total['loss'])}, AUC {_loss(total['auc'])}",
    ]


def sections(view: dict[str, Any]) -> list[Section]:
    """Return the tables of the display, also those without rows."""
    return [
        section._replace(rows=[[escape_text(cell) for cell in row] for row in section.rows])
        for section in _sections(view)
    ]


def _sections(view: dict[str, Any]) -> list[Section]:
    servers = [
        [
            str(one["rank"]), _last_seen(one), str(one["slots"]), str(one["arcs"]), str(one["copies"]),
            _short(one["rows"]), _bytes(one["memory_bytes"]), _short(one["keys_per_second"]),
            _time(one["pull"]["p50"]), _time(one["pull"]["p99"]), _time(one["push"]["p99"]),
            _short(one["staleness"]["p99"]), _time(one["lag_seconds"]),
        ]
        for one in view["servers"]
    ]  # fmt: skip
    workers = [
        [
            str(one["rank"]), _last_seen(one), str(one["clock"]), _short(one["clocks_per_second"]),
            _short(one["examples"]), _short(one["examples_per_second"]), _loss(one["loss"]), _loss(one["auc"]),
            str(one["under_way"]), _time(one["pull"]["p50"]), _time(one["pull"]["p99"]),
        ]
        for one in view["workers"]
    ]  # fmt: skip
    tables = [[one["name"], _short(one["rows"]), _bytes(one["memory_bytes"])] for one in view["tables"]]
    slots = [
        [f"{one['first_slot']}-{one['end_slot'] - 1}", str(one["server"]), _short(one["load"]), _short(one["rows"])]
        for one in view["hottest"]
    ]
    keys = [
        [
            one["key"], one["table"], str(one["server"]), _short(one["requests_per_second"]),
            f"{100 * one['share']:.2f} %",
        ]
        for one in view["hottest_keys"]
    ]  # fmt: skip
    copies = [
        [
            one["source"], one["target"], ", ".join(f"{first}-{end - 1}" for first, end in one["arriving"]),
            f"{_bytes(one['copied_bytes'])} of {_bytes(one['total_bytes'])}",
        ]
        for one in view["copies"]
    ]  # fmt: skip
    failovers = [
        [str(one["server"]), one["about"], f"{one['ago_seconds']:.0f} s", one["why"]] for one in view["failovers"]
    ]
    return [
        Section(
            "Servers",
            [
                "SERVER", "LAST SEEN", "SLOTS", "ARCS", "COPIES", "ROWS", "MEMORY", "KEYS/S", "PULL P50", "P99",
                "PUSH P99", "STALE P99", "LAG",
            ],
            servers,
        ),
        Section(
            "Workers",
            [
                "WORKER", "LAST SEEN", "CLOCK", "CLOCKS/S", "EXAMPLES", "EXAMPLES/S", "LOSS", "AUC", "CALLS",
                "PULL P50", "P99",
            ],
            workers,
        ),
        Section("Tables", ["TABLE", "ROWS", "MEMORY"], tables),
        Section("Hottest slots", ["HOTTEST SLOTS", "SERVER", "USED LATELY", "ROWS"], slots),
        Section("Hottest keys", ["HOTTEST KEYS", "TABLE", "SERVER", "REQUESTS/S", "SHARE"], keys),
        Section("Copies", ["COPIED FROM", "TO", "SLOTS", "COPIED"], copies),
        Section("Failovers", ["LOST SERVER", "WAS", "AGO", "WHY"], failovers),
    ]  # fmt: skip


def describe(view: dict[str, Any]) -> str:
    """Return the view as text."""
    lines = summary(view)
    curves = {name: sparkline(view["history"][name]) for name in CURVES}
    lines += [f"{CURVES[name].title:<12} {curve}" for name, curve in curves.items() if curve]
    for section in sections(view):
        lines += _table(section)
    return "\n".join(lines)


def sparkline(values: Sequence[float | None]) -> str:
    """Return a line of blocks, as high as the last values are.

    Examples
    --------
    >>> sparkline([0.0, 1.0, None, 2.0])
    '▁▄ █'
    """
    shown = list(values)[-_SPARK_WIDTH:]
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(_SPARKS) - 1
    return "".join(" " if one is None else _SPARKS[int((one - low) / span * top) if span else 0] for one in shown)


def _table(section: Section) -> list[str]:
    if not section.rows:
        return []
    widths = [max(map(len, column)) for column in zip(section.heads, *section.rows, strict=True)]
    lines = (
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [section.heads, *section.rows]
    )
    return ["", *lines]


def _last_seen(one: dict[str, Any]) -> str:
    return f"{one['heard_seconds']:.1f} s" if one["is_connected"] else "cut off"


def _short(number: float | None) -> str:
    if number is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.1f} {unit}"
    return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _loss(number: float | None) -> str:
    return "-" if number is None else f"{number:.4f}"


class Curve(NamedTuple):
    """A line of the history: its title, and how its values are written."""

    title: str
    write: Callable[[float | None], str]


CURVES = {
    "keys_per_second": Curve("keys/s", _short),
    "examples_per_second": Curve("examples/s", _short),
    "pull_p99": Curve("pull p99", _time),
    "loss": Curve("loss", _loss),
    "auc": Curve("AUC", _loss),
}
