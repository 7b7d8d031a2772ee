"""``shoal cluster ADDRESS status|drain|rebalance|stop``: the members of a running cluster, its slots, its end."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec.structs import replace

from shoal.base.interrupts import status_of
from shoal.base.settings import Setting, from_environment
from shoal.base.streams import escape_text
from shoal.base.suggest import nearest
from shoal.cli.answers import FAILED, Answer, clear_screen, emit, naming, warn
from shoal.cli.options import Command, Output
from shoal.config import Address, Curve, Seconds

if TYPE_CHECKING:
    from shoal.cluster.protocol.scheduler_client import SchedulerClient
    from shoal.cluster.protocol.status import EndpointStatus, FitModelStatus, StatusReply

EXAMPLES = """\
examples:
  $ shoal cluster tcp://10.0.0.1:5570 status --curve keys
  $ shoal cluster tcp://10.0.0.1:5570 status --watch
  $ shoal cluster tcp://10.0.0.1:5570 status --json
  $ shoal cluster tcp://10.0.0.1:5570 drain 2
  $ shoal cluster tcp://10.0.0.1:5570 rebalance
  $ shoal cluster tcp://10.0.0.1:5570 rebalance --by load
  $ shoal cluster tcp://10.0.0.1:5570 stop

drain moves all slots of the server of this rank to others; then its process ends. rebalance moves slots until all
endpoints have about equal amounts of what --by names, as of now. Both return at once; status shows the progress.
stop ends the cluster: the scheduler and the servers end, and calls of workers raise an error.
The scheduler prints its address when it starts. The exit status is 1 if a server was lost. status --watch ends by
Ctrl-C; while the scheduler does not answer, it continues to ask. With --json it prints an object in each interval.
"""


_ACTIONS = ("status", "drain", "rebalance", "stop")


class Cluster(Output, frozen=True, kw_only=True):
    """The options of the command."""

    address: Annotated[Address, "tcp://HOST:PORT or ipc:///PATH of the scheduler", Setting(positional=True)]
    action: Annotated[
        str,
        "print the status; move the slots of a server away and end it; distribute slots evenly; end the cluster; it "
        "may also come before ADDRESS",
        Setting(metavar="status|drain|rebalance|stop", positional=True),
    ]
    server: Annotated[int | None, "rank of the server to drain", Setting(ge=0, metavar="SERVER", positional=True)] = (
        None
    )
    by: Annotated[
        Literal["slots", "rows", "bytes", "load"] | None,
        "what rebalance makes equal: slots, rows, bytes of rows, or load, the rows read or changed in the last 20 "
        "heartbeats (default: slots)",
        Setting(metavar="WHAT"),
    ] = None
    watch: Annotated[
        Seconds | None,
        "print the status again and again, with this pause (without a number: 2), until Ctrl-C",
        Setting(const=2.0),
    ] = None
    curve: Curve = None
    timeout: Annotated[Seconds, "seconds to wait for the scheduler"] = 10.0


def run(options: Cluster) -> Answer:
    """Ask the scheduler for the status, and describe it; or ask it to move slots, or to end the cluster."""
    if options.address in _ACTIONS:
        options = replace(options, address=options.action, action=options.address)
    if options.action not in _ACTIONS:
        near = nearest(options.action, _ACTIONS)
        hint = "" if near is None else f": did you mean {near}?"
        raise ValueError(f"{options.action!r} is none of {', '.join(_ACTIONS)}{hint}")
    if (options.action == "drain") != (options.server is not None):
        raise ValueError("drain takes the rank of a server, and the other actions take none: write drain 2, or status")
    if options.by is not None and options.action != "rebalance":
        raise ValueError(f"--by is for rebalance: remove it from {options.action}")
    if options.watch is not None and options.action != "status":
        raise ValueError(f"--watch is for status: remove it from {options.action}")
    if options.action == "status":
        return _status(options) if options.watch is None else _watch(options)
    from shoal.cluster.protocol.messages import AcceptedReply, Drain, Rebalance, StopCluster
    from shoal.cluster.protocol.status import GetStatus, StatusReply

    with _connect(options) as client:
        if options.action == "drain":
            command: Drain | Rebalance | StopCluster = Drain(options.server or 0)
        elif options.action == "rebalance":
            command = Rebalance.of(options.by or "slots", client.call(GetStatus(), StatusReply, options.timeout))
        else:
            command = StopCluster()
        text = client.call(command, AcceptedReply, options.timeout).text
    return Answer(text, {"text": text})


def _connect(options: Cluster) -> SchedulerClient:
    from shoal.cluster.protocol.curve import Keys
    from shoal.cluster.protocol.scheduler_client import SchedulerClient

    directory = from_environment(options, os.environ).curve
    keys = None if directory is None else Keys.load_any(directory)
    return SchedulerClient(options.address, "observer", keys=keys)


def _status(options: Cluster) -> Answer:
    from shoal.cluster.protocol.status import GetStatus, StatusReply, as_dict

    with _connect(options) as client:
        status = client.call(GetStatus(), StatusReply, options.timeout)
    return Answer(_text(options.address, status), as_dict(status), FAILED if status.lost else 0)


def _watch(options: Cluster) -> Answer:
    """Print the status until the user ends that; only the first request must be answered.

    Each request has a connection of its own, which works with whatever scheduler has this address by then.
    """
    from shoal.errors import DeadlineExceededError, NotConnectedError

    try:
        answer: Answer | None = _status(options)
        while True:
            if answer is not None:
                if not (options.json or options.quiet):
                    clear_screen()
                with naming("standard output"):
                    emit(answer, json=options.json, quiet=options.quiet)
            time.sleep(options.watch or 0.0)
            try:
                answer = _status(options)
            except (NotConnectedError, DeadlineExceededError) as error:
                if answer is not None:
                    warn(f"{error}; asking again until it answers")
                answer = None
    except KeyboardInterrupt as interrupt:
        return Answer("", {}, status_of(interrupt))


def _endpoint(endpoint: EndpointStatus) -> str:
    slots = ", ".join(f"{first}-{end - 1}" for first, end in endpoint.slots)
    return f"{endpoint.address} slots {slots or 'none'}"


def _fits(status: StatusReply) -> list[str]:
    lines = []
    for fit in status.fits:
        state = {"running": "", "stopped": " has stopped", "over": " is over"}[fit.state]
        head = f"fit of {fit.name}{state}: pass {fit.pass_number} of {fit.passes}"
        found = [_measured(model) for model in fit.models]
        if fit.num_models == 1:
            lines += [f"{head}, {model}" for model in found]
            continue
        lines.append(f"{head}, {fit.num_models} models")
        lines += [f"  model {number}: {model}" for number, model in enumerate(found)]
    return lines


def _measured(model: FitModelStatus) -> str:
    named = (("loss", model.loss), ("AUC", model.auc), ("accuracy", model.accuracy))
    repeated = f" ({model.repeated} of them twice)" if model.repeated else ""
    return ", ".join(
        [f"{model.examples} examples{repeated}", *(f"{name} {value:.4f}" for name, value in named if value is not None)]
    )


def _replication(status: StatusReply) -> list[str]:
    """Describe copies, moves and failovers; nothing of it concerns a cluster without replicas that is at rest."""
    lines = []
    if status.replicas:
        missing = sum(arc.end_slot - arc.first_slot for arc in status.arcs if len(arc.copies) < status.replicas)
        state = f"{missing} slots lack copies" if missing else "all slots have their copies"
        lag = sum(stream.lag_bytes for stream in status.streams)
        lines.append(f"replicas {status.replicas}: {state}, {lag} bytes behind")
    lines += [f"server {rank} is drained" for rank in status.draining]
    for stream in status.streams:
        for first, end in stream.arriving:
            done = f"{stream.copied_bytes} of {stream.total_bytes} bytes"
            lines.append(f"slots {first}-{end - 1} are copied from {stream.source} to {stream.target}: {done}")
    for one in status.failovers:
        lines.append(f"server {one.server} ({one.about}) died {one.ago_seconds:.0f} s ago, {one.why}")
        if one.seconds is None:
            lines.append(f"  its slots {one.slots} are not served yet")
            continue
        lines.append(
            f"  its slots {one.slots} were not served for {one.silent_seconds + one.seconds:.3f} s: "
            f"{one.silent_seconds:.3f} s until it was declared dead, {one.seconds:.3f} s until others served them"
        )
        if one.copied_seconds is not None:
            lines.append(f"  all slots had their copies again {one.copied_seconds:.3f} s after it was declared dead")
    return lines


def _text(address: str, status: StatusReply) -> str:
    up = f"scheduler up {status.uptime_seconds:.0f} s, generation {status.generation}"
    lines = [f"cluster {status.cluster} at {address}: epoch {status.epoch}, {status.slots} slots; {up}"]
    if status.lost:
        lines.append(f"broken: {status.lost}")
    jobs = [*([] if status.job is None else [status.job]), *status.jobs]
    for job in jobs:
        left = sum(worker.rank is not None and worker.job == job.name for worker in status.workers)
        vacant = f", vacant ranks {', '.join(map(str, job.vacant))}" if job.vacant else ""
        named = f" {job.name!r}" if job.name else ""
        lines.append(f"job {job.number}{named}: {job.consistency}, {left} of {job.size} workers{vacant}")
        lines += [f"  it waits for a replacement for {one.seconds:.0f} s: {one.why}" for one in job.awaited]
    if not jobs:
        lines.append("no job")
    lines.append(f"tables: {', '.join(status.tables) if status.tables else 'none'}")
    lines += _fits(status)
    lines += _replication(status)
    lines = [*map(escape_text, lines), ""]
    rows: list[Sequence[str]] = [("ROLE", "RANK", "HEARD", "HOST", "PROCESS", "")]
    for server in status.servers:
        ports = "; ".join(_endpoint(one) for one in server.endpoints)
        state = _heard(server.is_connected, server.heard_seconds)
        is_known = not server.node or server.about.endswith(f" on {server.node}")
        about = server.about if is_known else f"{server.about}, node {server.node}"
        rows.append(("server", str(server.rank), state, server.host, about, ports or "waits for other servers"))
    for worker in status.workers:
        state = _heard(worker.is_connected, worker.heard_seconds)
        if worker.rank is None:
            place = f"a place in job {worker.job!r}" if worker.job else "a place"
            rows.append(("worker", "-", state, worker.host, worker.about, f"waits for {place}"))
        else:
            clock = f"clock {worker.clock}, incarnation {worker.incarnation}"
            rank = f"{worker.job}/{worker.rank}" if worker.job else str(worker.rank)
            rows.append(("worker", rank, state, worker.host, worker.about, clock))
    rows += [
        ("launcher", "-", _heard(one.is_connected, one.heard_seconds), one.host, one.about, "")
        for one in status.launchers
    ]
    rows = [[escape_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    missing = status.num_servers - len(status.servers)
    if missing:
        lines.append(f"{missing} of {status.num_servers} servers are missing")
    return "\n".join(lines)


def _heard(is_connected: bool, heard: float) -> str:
    return f"{heard:.1f} s ago" if is_connected else f"{heard:.1f} s ago, disconnected"


COMMANDS = (
    Command("cluster", "Show the members of a running cluster, move its slots, or end it.", EXAMPLES, Cluster, run),
)
