"""Shared by the benchmarks: a cluster of this machine, each process behind a link of a given rate if there is one.

A link is a network namespace of its own and a pair of virtual interfaces, joined by a bridge, each of which sends
through the token bucket of ``tc tbf``. That takes root, and iproute2.
"""

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import check
from shoal.cluster.launch.child import ChildProcess
from shoal.cluster.launch.local_cluster import running, start_role
from shoal.config import SchedulerConfig, ServerConfig

__all__ = ["Place", "inside", "placed"]

BRIDGE, NETWORK = "shoal-bridge", "10.211.0"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET

Place = str | None  # the namespace of a process


def run(line: str) -> None:
    """Run a command of iproute2."""
    subprocess.run(line.split(), check=True)


@contextlib.contextmanager
def links(count: int, rate: str) -> Iterator[list[str]]:
    """Make so many namespaces behind links of a rate, such as 1gbit; the bridge has the address of this process."""
    with contextlib.ExitStack() as undo:
        run(f"ip link add {BRIDGE} type bridge")
        undo.callback(run, f"ip link del {BRIDGE}")
        run(f"ip addr add {NETWORK}.254/24 dev {BRIDGE}")
        run(f"ip link set {BRIDGE} up")
        names = [f"shoal-{k}" for k in range(count)]
        for k, name in enumerate(names):
            run(f"ip netns add {name}")
            undo.callback(run, f"ip netns del {name}")
            run(f"ip link add {name} type veth peer name end netns {name}")
            undo.callback(run, f"ip link del {name}")
            run(f"ip link set {name} master {BRIDGE} up")
            run(f"ip -n {name} addr add {NETWORK}.{k + 1}/24 dev end")
            run(f"ip -n {name} link set lo up")
            run(f"ip -n {name} link set end up")
            for where in (f"tc qdisc add dev {name}", f"tc -n {name} qdisc add dev end"):
                run(f"{where} root tbf rate {rate} burst 1mb latency 50ms")
        yield names


@contextlib.contextmanager
def inside(place: Place) -> Iterator[None]:
    """Be in a namespace: this thread, and the processes that it starts."""
    if place is None:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net", "rb") as own, Path("/run/netns", place).open("rb") as other:
        check(libc.setns(other.fileno(), NEW_NETWORK) == 0, f"{place}: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            libc.setns(own.fileno(), NEW_NETWORK)


@contextlib.contextmanager
def placed(servers: int, workers: int, threads: int, rate: str | None) -> Iterator[tuple[str, list[int], list[Place]]]:
    """Run a cluster; yields its address, the processes of its servers, and where its workers are to run."""
    if rate is None:
        with running(servers, workers=workers, threads=threads) as one:
            yield one.address, [child.process.pid for child in one.servers], [None] * workers
        return
    joined: queue.Queue[Any] = queue.Queue()
    roles: list[ChildProcess] = []
    with tempfile.TemporaryDirectory() as journal, links(servers + workers, rate) as names:
        bind = f"tcp://{NETWORK}.254:*"
        config = SchedulerConfig(bind=bind, servers=servers, workers=workers, journal=journal, insecure=True)
        try:
            roles.append(start_role("scheduler", config, lambda _, report: joined.put(report)))
            address = joined.get(timeout=60).address
            for k in range(servers):
                with inside(names[k]):
                    own = f"tcp://{NETWORK}.{k + 1}:*"
                    server = ServerConfig(scheduler=address, bind=own, threads=threads, insecure=True)
                    roles.append(start_role(f"server {k}", server, lambda *_: None))
            yield address, [role.process.pid for role in roles[1:]], list(names[servers:])
        finally:
            for role in roles:
                role.signal(signal.SIGKILL)
