"""``shoal doctor``: examine this machine, and a cluster as it is seen from here."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shoal.base.machine import available_bytes, local_path, temporary_root
from shoal.base.settings import Setting, from_environment
from shoal.cli.answers import DONE, FAILED, Answer
from shoal.cli.estimate import Dim, Directory, OptimizerName, optimizer_of
from shoal.cli.estimate import Keys as KeyCount
from shoal.cli.options import Command, Output
from shoal.config import Address, Count, Curve, Replicas, Seconds

if TYPE_CHECKING:
    from shoal.cluster.protocol.curve import Keys
    from shoal.cluster.protocol.status import StatusReply
    from shoal.tools.doctor import Finding

EXAMPLES = """\
examples:
  $ shoal doctor                                                # this machine
  $ shoal doctor --keys 1e9 --dim 16 --optimizer adagrad --servers 4    # and what each of four servers needs
  $ shoal doctor tcp://10.0.0.1:5570 --curve keys               # and whether the cluster is reached from here

Run the command on each machine of a cluster, and with the address of the scheduler once the scheduler runs. A problem
stops or endangers a job; a note is slow or risky; each has its remedy. The exit status is 1 if there is a problem. The
command writes 256 MiB to --dir for some seconds, and changes nothing else.
"""


class Doctor(Output, frozen=True, kw_only=True):
    """The options of the command."""

    address: Annotated[Address | None, "tcp://HOST:PORT or ipc:///PATH of a scheduler", Setting(positional=True)] = None
    keys: KeyCount | None = None
    dim: Dim = 1
    optimizer: OptimizerName = "ftrl"
    servers: Annotated[Count, "servers, on machines like this one"] = 1
    replicas: Replicas = 0
    curve: Curve = None
    dir: Directory = None
    timeout: Annotated[Seconds, "seconds to wait for the scheduler, and for each endpoint"] = 5.0


def doctor(options: Doctor) -> Answer:
    """Examine this machine and a cluster."""
    from shoal.cluster.protocol.address import check
    from shoal.tools import doctor as tools

    if options.replicas >= options.servers:
        raise ValueError(
            f"--servers {options.servers} --replicas {options.replicas}: pass 1 server or more, and fewer replicas"
        )
    where = Path(temporary_root()) if options.dir is None else local_path(options.dir)
    if not where.is_dir():
        raise ValueError(f"--dir {where}: there is no such directory")
    if options.address is not None:
        check(options.address)
    findings = [*tools.versions(), *_libzmq(), *tools.processor(), *tools.memory(), *tools.limits(), *tools.clock()]
    disk, speed = tools.disk(where)
    findings += disk
    if options.keys is not None:
        state = os.statvfs(where)
        plan = tools.Job(
            keys=options.keys,
            dim=options.dim,
            optimizer=optimizer_of(options.optimizer),
            servers=options.servers,
            replicas=options.replicas,
        )
        findings += tools.job(
            plan,
            free_bytes=available_bytes(),
            disk_bytes=state.f_bavail * state.f_frsize,
            disk_speed=speed,
        )
    directory = from_environment(options, os.environ).curve
    keys: Keys | None = None
    if directory is not None:
        found, keys = _keys(directory)
        findings += found
    if options.address is not None and (directory is None or keys is not None):
        findings += _cluster(options.address, keys, options.timeout)
    problems = sum(one.level == "problem" for one in findings)
    lines = []
    for one in findings:
        lines.append(f"{one.level:<8} {one.topic:<10} {one.text}")
        if one.remedy:
            lines.append(f"{'':<8} {'':<10} remedy: {one.remedy}")
    facts = {
        "problems": problems,
        "findings": [
            {"topic": one.topic, "level": one.level, "text": one.text, "remedy": one.remedy} for one in findings
        ],
    }
    return Answer("\n".join(lines), facts, FAILED if problems else DONE)


def _libzmq() -> list[Finding]:
    import zmq

    from shoal.cluster.protocol.reachability import is_shared
    from shoal.tools.doctor import Finding

    text = f"libzmq {zmq.zmq_version()}, {'with' if zmq.has('curve') else 'without'} CURVE"
    if not is_shared():
        return [
            Finding(
                topic="versions",
                level="problem",
                text=f"{text}, which this pyzmq keeps to itself: servers cannot start here",
                remedy="install pyzmq's wheel: pip install --force-reinstall --only-binary :all: pyzmq",
            )
        ]
    if not zmq.has("curve"):
        return [
            Finding(
                topic="versions",
                level="note",
                text=f"{text}: keys (--curve) cannot be used here",
                remedy="install pyzmq's wheel: pip install --force-reinstall --only-binary :all: pyzmq",
            )
        ]
    return [Finding(topic="versions", level="ok", text=text)]


def _keys(directory: str) -> tuple[list[Finding], Keys | None]:
    """Examine a directory of keys; return those of a worker, or of the first role that is there."""
    from shoal.cluster.protocol.curve import ROLES, Keys, allowed
    from shoal.tools.doctor import Finding

    if not local_path(directory).is_dir():
        remedy = f"make keys with: shoal keygen --output {directory}, or copy them here"
        return [Finding(topic="keys", level="problem", text=f"{directory}: no such directory", remedy=remedy)], None
    findings = []
    own = {}
    for role in ROLES:
        if (local_path(directory) / f"{role}.key_secret").exists():
            try:
                own[role] = Keys.load(directory, role)
            except (ValueError, OSError) as error:
                text, _, remedy = str(error).partition(": chmod ")
                remedy = f"chmod {remedy}" if remedy else "copy the file again, or make keys with shoal keygen"
                findings.append(Finding(topic="keys", level="problem", text=text, remedy=remedy))
    names = sorted(allowed(directory).values())
    if own:
        text = f"{directory}: secret keys of {', '.join(own)}; accepts {', '.join(names) or 'no other key'}"
        findings.append(Finding(topic="keys", level="ok", text=text))
    elif not findings:
        text = f"{directory} has no secret key of {', '.join(ROLES)}: no process can authenticate itself"
        findings.append(
            Finding(topic="keys", level="problem", text=text, remedy="copy the .key_secret file of its role here")
        )
    return findings, own.get("worker") or next(iter(own.values()), None)


def _cluster(address: str, keys: Keys | None, timeout: float) -> list[Finding]:
    """Examine a cluster, from the scheduler to the endpoints of its servers."""
    from shoal.cluster.protocol.address import socket_path, unknown_host
    from shoal.cluster.protocol.reachability import reach
    from shoal.cluster.protocol.scheduler_client import SchedulerClient
    from shoal.cluster.protocol.status import GetStatus, StatusReply
    from shoal.errors import ShoalError
    from shoal.tools.doctor import Finding

    if (unknown := unknown_host(address)) is not None:
        remedy = "write the address of the scheduler's machine, or add its name to DNS or /etc/hosts"
        return [Finding(topic="scheduler", level="problem", text=unknown, remedy=remedy)]
    is_path = socket_path(address) is not None
    try:
        with SchedulerClient(address, "observer", keys=keys) as client:
            status = client.call(GetStatus(), StatusReply, timeout)
    except ShoalError as error:
        remedy = (
            "start it, as the same user of the same machine"
            if is_path
            else f"start it with --bind {address}, open its port in the firewall, pass --curve to both or to neither"
        )
        return [Finding(topic="scheduler", level="problem", text=str(error).partition(": is it")[0], remedy=remedy)]
    findings = _members(address, status)
    addresses = [endpoint.address for server in status.servers for endpoint in server.endpoints]
    for one in reach(addresses, keys=keys, timeout=timeout):
        if one.seconds is not None:
            text = f"{one.address} answers after {1e3 * one.seconds:.2f} ms"
            findings.append(Finding(topic="servers", level="ok", text=text))
            continue
        what = "accepts the connection but does not answer" if one.accepts else "cannot be reached from here"
        remedy = (
            "the server is stopped or overloaded: look at its log and its CPU"
            if one.accepts
            else "open its port in the firewall (shoal server --bind tcp://HOST:PORT chooses it), and let the server "
            "name an address that is valid here (--advertise HOST)"
        )
        findings.append(Finding(topic="servers", level="problem", text=f"{one.address} {what}", remedy=remedy))
    return findings if is_path else [*findings, *_back(address)]


def _members(address: str, status: StatusReply) -> list[Finding]:
    from shoal.tools.doctor import Finding

    there = f"{len(status.servers)} of {status.num_servers} servers"
    text = f"{address}: {there}, {len(status.workers)} workers, up for {status.uptime_seconds:,.0f} s"
    findings = [Finding(topic="scheduler", level="ok", text=text)]
    if status.lost:
        remedy = "start the cluster again and load the last checkpoint"
        findings.append(Finding(topic="scheduler", level="problem", text=status.lost, remedy=remedy))
    elif len(status.servers) < status.num_servers and not status.arcs:
        remedy = "start the missing servers with --scheduler " + address
        findings.append(Finding(topic="scheduler", level="problem", text=f"only {there} have joined", remedy=remedy))
    for server in status.servers:
        if not server.is_connected or server.heard_seconds > status.dead_after_seconds:
            text = f"server {server.rank} ({server.about}) was not heard for {server.heard_seconds:.1f} s"
            remedy = "look at its log; with replicas others take over its slots"
            findings.append(Finding(topic="servers", level="note", text=text, remedy=remedy))
    missing = sum(arc.end_slot - arc.first_slot for arc in status.arcs if len(arc.copies) < status.replicas)
    if missing:
        remedy = "wait until they are made (shoal cluster ADDRESS status), or start another server"
        findings.append(Finding(topic="servers", level="note", text=f"{missing:,} slots lack copies", remedy=remedy))
    return findings


def _back(address: str) -> list[Finding]:
    """Examine the way back: whether a port of this machine's address accepts connections, as other processes need."""
    from shoal.cluster.protocol.address import split
    from shoal.tools.doctor import Finding

    host, port = split(address)
    try:
        family, kind, _, _, to = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(to)  # sends nothing: it only chooses the route
            here = probe.getsockname()[0]
        with socket.create_server((here, 0), family=family) as server:
            socket.create_connection(server.getsockname()[:2], timeout=1.0).close()
    except OSError as error:
        remedy = "let servers here --bind to an address of this machine, and open its ports in the local firewall"
        text = f"a port of this machine could not be reached at the address that leads to the scheduler: {error}"
        return [Finding(topic="network", level="problem", text=text, remedy=remedy)]
    text = f"this machine is {here} for the scheduler, and its ports accept connections; from others, ask there"
    return [Finding(topic="network", level="ok", text=text)]


COMMANDS = (Command("doctor", "Examine this machine and a cluster, and name remedies.", EXAMPLES, Doctor, doctor),)
