"""``shoal top ADDRESS``: what a running cluster does, refreshed, once, or as JSON."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from shoal.cli.answers import FAILED, Answer, log_line
from shoal.cli.arguments import command, machine, scheduler_options, seconds

EXAMPLES = """\
examples:
  $ shoal top tcp://10.0.0.1:5570 --curve keys
  $ shoal top tcp://10.0.0.1:5570 --once
  $ shoal top tcp://10.0.0.1:5570 --json

Rates and times are those of the last 10 seconds. Ctrl-C ends it. The exit status is 1 if a server was lost with its
rows.
"""

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 60
_CLEAR = "\x1b[H\x1b[2J"


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(commands, "top", "Show what the servers and workers of a running cluster do.", EXAMPLES, run)
    parser.add_argument("address", metavar="ADDRESS", help="tcp://HOST:PORT of the scheduler")
    parser.add_argument("--once", action="store_true", help="print it once; also if the output is no terminal")
    parser.add_argument(
        "--interval",
        type=seconds,
        default=2.0,
        metavar="S",
        help="seconds between two refreshes (default: %(default)s)",
    )
    scheduler_options(parser)
    machine(parser, threads=False)


def run(arguments: argparse.Namespace) -> Answer:
    """Ask the scheduler for the view, and describe it; repeat that on a terminal."""
    from shoal.cluster.protocol.curve import Keys
    from shoal.cluster.protocol.environment import find_keys
    from shoal.cluster.protocol.scheduler_client import SchedulerClient

    directory = arguments.curve or find_keys(os.environ)
    keys = None if directory is None else Keys.load(directory, "worker")
    is_once = arguments.once or arguments.json or not sys.stdout.isatty()
    with SchedulerClient(arguments.address, "observer", keys=keys) as client:
        view = client.view(timeout=arguments.timeout)
        while not is_once:
            log_line(f"{_CLEAR}{describe(view)}")
            time.sleep(arguments.interval)
            view = client.view(timeout=arguments.timeout)
    return Answer(describe(view), view, FAILED if view["lost"] else 0)


def describe(view: dict[str, Any]) -> str:
    """Return the view as text."""
    total, job = view["total"], view["job"]
    count = len(view["workers"])
    workers = f"{count} worker{'' if count == 1 else 's'}" + (f", {job['consistency']}" if job else "")
    pull, push = (f"{_time(total[f'{op}_p50'])} / {_time(total[f'{op}_p99'])}" for op in ("pull", "push"))
    lines = [
        f"cluster {view['cluster']}: epoch {view['epoch']}, {len(view['servers'])} of {view['num_servers']} servers, "
        f"{workers}, up {view['uptime_seconds']:.0f} s",
        *([f"broken: {view['lost']}"] if view["lost"] else []),
        f"rows {_short(total['rows'])}, memory {_bytes(total['memory_bytes'])}, "
        f"{_short(total['keys_per_second'])} keys/s; p50 / p99: pull {pull}, push {push}",
        f"{_short(total['examples_per_second'])} examples/s, loss {_loss(total['loss'])}, AUC {_loss(total['auc'])}",
    ]
    curves = {name: sparkline(view["history"][name]) for name in ("keys_per_second", "loss", "auc")}
    lines += [f"{name:<16} {curve}" for name, curve in curves.items() if curve]
    lines += _table(
        [
            "SERVER", "LAST SEEN", "SLOTS", "ARCS", "COPIES", "ROWS", "MEMORY", "KEYS/S", "PULL P50", "P99", "PUSH P99",
            "STALE P99", "LAG",
        ],
        [
            [
                str(one["rank"]), _last_seen(one), str(one["slots"]), str(one["arcs"]), str(one["copies"]),
                _short(one["rows"]), _bytes(one["memory_bytes"]), _short(one["keys_per_second"]),
                _time(one["pull"]["p50"]), _time(one["pull"]["p99"]), _time(one["push"]["p99"]),
                _short(one["staleness"]["p99"]), _time(one["lag_seconds"]),
            ]
            for one in view["servers"]
        ],
    )  # fmt: skip
    lines += _table(
        [
            "WORKER", "LAST SEEN", "CLOCK", "CLOCKS/S", "EXAMPLES", "EXAMPLES/S", "LOSS", "AUC", "CALLS", "PULL P50",
            "P99",
        ],
        [
            [
                str(one["rank"]), _last_seen(one), str(one["clock"]), _short(one["clocks_per_second"]),
                _short(one["examples"]), _short(one["examples_per_second"]), _loss(one["loss"]), _loss(one["auc"]),
                str(one["under_way"]), _time(one["pull"]["p50"]), _time(one["pull"]["p99"]),
            ]
            for one in view["workers"]
        ],
    )  # fmt: skip
    lines += _table(
        ["TABLE", "ROWS", "MEMORY"],
        [[one["name"], _short(one["rows"]), _bytes(one["memory_bytes"])] for one in view["tables"]],
    )
    lines += _table(
        ["HOTTEST SLOTS", "SERVER", "USED LATELY", "ROWS"],
        [
            [f"{one['first_slot']}-{one['end_slot'] - 1}", str(one["server"]), _short(one["load"]), _short(one["rows"])]
            for one in view["hottest"]
        ],
    )
    for one in view["copies"]:
        slots = ", ".join(f"{first}-{end - 1}" for first, end in one["arriving"])
        done = f"{_bytes(one['copied_bytes'])} of {_bytes(one['total_bytes'])}"
        lines.append(f"slots {slots} are copied from {one['source']} to {one['target']}: {done}")
    for one in view["failovers"]:
        lines.append(f"server {one['server']} ({one['about']}) died {one['ago_seconds']:.0f} s ago, {one['why']}")
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


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [heads, *rows])
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
