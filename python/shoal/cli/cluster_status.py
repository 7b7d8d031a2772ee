"""``shoal cluster ADDRESS status``: the members of a running cluster."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.cli.answers import FAILED, Answer
from shoal.cli.arguments import command, machine, seconds

if TYPE_CHECKING:
    from shoal.cluster.protocol.status import EndpointStatus, StatusReply

EXAMPLES = """\
examples:
  $ shoal cluster tcp://10.0.0.1:5570 status --curve keys
  $ shoal cluster tcp://10.0.0.1:5570 status --json

The scheduler prints its address when it starts. The exit status is 1 if a server was lost.
"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(commands, "cluster", "Show the members of a running cluster.", EXAMPLES, run)
    parser.add_argument("address", metavar="ADDRESS", help="tcp://HOST:PORT of the scheduler")
    parser.add_argument("action", metavar="status", choices=["status"], help="print the status of the cluster")
    parser.add_argument("--curve", metavar="DIR", help="directory of the cluster's keys")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=10.0,
        metavar="S",
        help="seconds to wait for the scheduler (default: %(default)s)",
    )
    machine(parser, threads=False)


def run(arguments: argparse.Namespace) -> Answer:
    """Ask the scheduler for the status, and describe it."""
    from shoal.cluster.protocol.curve import Keys
    from shoal.cluster.protocol.environment import find_keys
    from shoal.cluster.protocol.scheduler_client import SchedulerClient
    from shoal.cluster.protocol.status import as_dict

    directory = arguments.curve or find_keys(os.environ)
    keys = None if directory is None else Keys.load(directory, "worker")
    with SchedulerClient(arguments.address, "observer", keys=keys) as client:
        status = client.status(timeout=arguments.timeout)
    return Answer(_text(arguments.address, status), as_dict(status), FAILED if status.lost else 0)


def _endpoint(endpoint: EndpointStatus) -> str:
    slots = ", ".join(f"{first}-{end - 1}" for first, end in endpoint.slots)
    return f"{endpoint.address} slots {slots or 'none'}"


def _text(address: str, status: StatusReply) -> str:
    up = f"scheduler up {status.uptime_seconds:.0f} s, generation {status.generation}"
    lines = [f"cluster {status.cluster} at {address}: epoch {status.epoch}, {status.slots} slots; {up}"]
    if status.lost:
        lines.append(f"broken: {status.lost}")
    if status.job is None:
        lines.append("no job")
    else:
        left = sum(worker.rank is not None for worker in status.workers)
        vacant = f", vacant ranks {', '.join(map(str, status.job.vacant))}" if status.job.vacant else ""
        lines.append(f"job {status.job.number}: {status.job.consistency}, {left} of {status.job.size} workers{vacant}")
    lines.append(f"tables: {', '.join(status.tables) if status.tables else 'none'}")
    lines.append("")
    rows: list[Sequence[str]] = [("ROLE", "RANK", "HEARD", "HOST", "PROCESS", "")]
    for server in status.servers:
        ports = "; ".join(_endpoint(one) for one in server.endpoints)
        state = _heard(server.is_connected, server.heard_seconds)
        rows.append(("server", str(server.rank), state, server.host, server.about, ports or "waits for other servers"))
    for worker in status.workers:
        state = _heard(worker.is_connected, worker.heard_seconds)
        if worker.rank is None:
            rows.append(("worker", "-", state, worker.host, worker.about, "waits for a place"))
        else:
            clock = f"clock {worker.clock}, incarnation {worker.incarnation}"
            rows.append(("worker", str(worker.rank), state, worker.host, worker.about, clock))
    rows += [
        ("launcher", "-", _heard(one.is_connected, one.heard_seconds), one.host, one.about, "")
        for one in status.launchers
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    missing = status.num_servers - len(status.servers)
    if missing:
        lines.append(f"{missing} of {status.num_servers} servers are missing")
    return "\n".join(lines)


def _heard(is_connected: bool, heard: float) -> str:
    return f"{heard:.1f} s ago" if is_connected else f"{heard:.1f} s ago, disconnected"
