"""A relay of TCP between the processes of a cluster: links that are cut, delayed, or carry nothing for a while.

A relay listens at 127.0.0.2 and forwards to the same port of 127.0.0.1, so all others reach a server that advertises
127.0.0.2 through it. A link has a source, the process that connected, and a target, a role; the source is found by the
local address of the connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TIMEOUT = 120.0
NEAR, FAR = "127.0.0.2", "127.0.0.1"
_ATTEMPTS = 20  # to find the source of a connection, in two seconds
# Of linux/netlink.h and linux/sock_diag.h.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_ALL_STATES = _ANY_COOKIE = 0xFFFFFFFF
_FIRST_PORT, _LAST_PORT = 20000, 32000  # not those that the system gives to connections


@dataclass
class Fault:
    """What happens on some links: the connections of a source, or of all (empty), to a target."""

    source: str
    target: str
    kind: str  # "cut": its connections are closed, and new ones too; "hole": it carries nothing; "delay": it is slow
    seconds: float = 0.0  # of a delay

    def concerns(self, source: str, target: str) -> bool:
        return self.source in ("", source) and self.target in ("", target)


@dataclass(eq=False)
class _Connection:
    source: str
    target: str
    ends: tuple[socket.socket, socket.socket]

    def close(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@dataclass
class Relays:
    """All relays of a cluster, and the faults at present.

    ``sources`` has the process number of each role that connects to others.
    """

    sources: dict[str, int] = field(default_factory=dict)
    connections: list[_Connection] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _listeners: list[socket.socket] = field(default_factory=list)
    _is_open: bool = True

    def listen(self, target: str, port: int = 0) -> int:
        """Relay to a target; returns the port, a free one of both addresses if none is given."""
        ports = [port] if port else range(_FIRST_PORT + len(self._listeners) * 97, _LAST_PORT)
        for one in ports:
            # Held for the role that will listen there; bound without a listener, which SO_REUSEADDR permits.
            held = socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                if not port:
                    held.bind((FAR, one))
                listener = socket.create_server((NEAR, one))
            except OSError:
                held.close()
                continue
            self._listeners += [listener, held]
            threading.Thread(target=self._accept, args=(listener, target, one), daemon=True).start()
            return one
        raise AssertionError("no port is free")

    def _accept(self, listener: socket.socket, target: str, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, client = listener.accept()
                threading.Thread(target=self._connect, args=(near, client, target, port), daemon=True).start()

    def _connect(self, near: socket.socket, client: tuple[str, int], target: str, port: int) -> None:
        source = self._find(client, port)
        if self._kind(source, target) == "cut":
            near.close()
            return
        try:
            far = socket.create_connection((FAR, port))
        except OSError:
            near.close()
            return
        made = _Connection(source, target, (near, far))
        with self._changed:
            self.connections.append(made)
        carriers = [
            threading.Thread(target=self._carry, args=(made, *pair), daemon=True) for pair in ((near, far), (far, near))
        ]
        for carrier in carriers:
            carrier.start()
        for carrier in carriers:
            carrier.join()
        with self._changed:
            self.connections.remove(made)
        near.close()
        far.close()

    def _find(self, client: tuple[str, int], port: int) -> str:
        """Return the role of the process that has the connection from a local address to the relay at a port."""
        for attempt in range(_ATTEMPTS):
            if (link := _socket_of(client, (NEAR, port))) is not None:
                for role, pid in list(self.sources.items()):  # roles are added meanwhile
                    if link in _links(pid):
                        return role
            time.sleep(0.01 * attempt)
        return "unknown"

    def _fault(self, source: str, target: str) -> Fault | None:
        return next((fault for fault in self.faults if fault.concerns(source, target)), None)

    def _kind(self, source: str, target: str) -> str:
        fault = self._fault(source, target)
        return "" if fault is None else fault.kind

    def _carry(self, connection: _Connection, source: socket.socket, target: socket.socket) -> None:
        names = connection.source, connection.target
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._changed:
                    self._changed.wait_for(lambda: self._kind(*names) != "hole" or not self._is_open)
                    fault = self._fault(*names)
                if fault is not None and fault.kind == "delay":
                    time.sleep(fault.seconds)
                target.sendall(data)
        connection.close()

    def begin(self, fault: Fault) -> None:
        """Begin a fault."""
        with self._changed:
            self.faults.append(fault)
            concerned = [one for one in self.connections if fault.concerns(one.source, one.target)]
            self._changed.notify_all()
        if fault.kind == "cut":
            for one in concerned:
                one.close()

    def mend(self) -> None:
        """End all faults."""
        with self._changed:
            self.faults.clear()
            self._changed.notify_all()

    def links(self) -> set[tuple[str, str]]:
        """Return source and target of all connections."""
        with self._changed:
            return {(one.source, one.target) for one in self.connections}

    def close(self) -> None:
        """Close all connections and ports."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
            connections = list(self.connections)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for one in connections:
            one.close()


def _socket_of(client: tuple[str, int], relay: tuple[str, int]) -> str | None:
    """Return what the file descriptor of a client's end of a connection links to.

    The kernel is asked for this connection alone (sock_diag(7)): to list all of them takes it milliseconds.
    """
    ends = struct.pack("!HH", client[1], relay[1])
    for host, _ in (client, relay):
        ends += socket.inet_aton(host).ljust(16, b"\0")
    request = struct.pack("=BBBxI", socket.AF_INET, socket.IPPROTO_TCP, 0, _ALL_STATES) + ends
    request += struct.pack("=III", 0, _ANY_COOKIE, _ANY_COOKIE)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + request)
        reply = kernel.recv(4096)
    (kind,) = struct.unpack_from("=H", reply, 4)
    if kind != _SOCK_DIAG_BY_FAMILY:
        return None
    (inode,) = struct.unpack_from("=I", reply, 16 + 68)
    return f"socket:[{inode}]"


def _links(pid: int) -> set[str]:
    """Return what the file descriptors of a process link to."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(descriptor.path))
    return found


def has_copies(status: dict[str, Any]) -> bool:
    """Whether each slot has its copies by the status of a cluster, and nothing is being copied."""
    return all(len(arc["copies"]) >= status["replicas"] for arc in status["arcs"]) and not any(
        stream["arriving"] for stream in status["streams"]
    )


def wait_until(what: Callable[[], object], why: str) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + TIMEOUT
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.02)
