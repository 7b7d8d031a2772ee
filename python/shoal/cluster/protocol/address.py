"""Addresses, ``tcp://host:port`` or ``ipc:///path``: parsed, completed, and probed before they are used.

The address that a process binds is not always one that others can reach: 0.0.0.0 stands for all interfaces, 127.0.0.1
for the process's own machine. So a server's endpoints are completed with the host of its connection to the scheduler,
or with the one that its user passed, and then probed: by the scheduler before the server joins, by a worker before it
starts.
An endpoint answers a connection with the first bytes of ZeroMQ's greeting.

An ``ipc`` address is the path of a socket of this machine (AF_UNIX). Whoever may enter the socket's directory may
connect; a private directory (cluster/protocol/private.py) is its user's alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import time
from collections.abc import Sequence

from shoal.cluster.protocol.private import is_private

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|(?:(?![\[\]:/])[!-~])*):(?P<port>\d{1,9}|\*)", re.ASCII)
_IPC = re.compile(r"ipc://(?P<path>/[^\x00-\x1f\x7f]*[^\x00-\x1f\x7f/])")
_ANYWHERE = {"", "*", "0.0.0.0", "::"}
_BUSY_SECONDS = 0.01  # between two attempts to connect to a socket whose queue is full


def socket_path(address: str) -> str | None:
    """Return the path of the socket of an ``ipc`` address; None: it is of another kind.

    Examples
    --------
    >>> socket_path("ipc:///tmp/shoal-1/scheduler"), socket_path("tcp://127.0.0.1:5570")
    ('/tmp/shoal-1/scheduler', None)
    """
    found = _IPC.fullmatch(address) if isinstance(address, str) else None
    return None if found is None else found["path"]


def check(address: str) -> None:
    """Raise an error if an address is none that can be connected to."""
    if socket_path(address) is None:
        split(address)


def split(address: str, *, wildcard: bool = False) -> tuple[str, int]:
    """Split a ``tcp`` address into host and port."""
    if not isinstance(address, str):
        raise TypeError(f"an address is a str, tcp://HOST:PORT or ipc:///PATH, got {address!r}")
    found = _TCP.fullmatch(address)
    if found is None:
        raise ValueError(f"{address!r} is not an address: write tcp://HOST:PORT or ipc:///PATH")
    host = found["host"].strip("[]")
    port = 0 if found["port"] == "*" else int(found["port"])
    if port > 65535:
        raise ValueError(f"{address!r}: port {port} is out of range: pass 1 to 65535, or * for any free port")
    if not wildcard and (host in _ANYWHERE or port == 0):
        raise ValueError(f"{address!r} cannot be connected to: write tcp://HOST:PORT of the machine to reach")
    return host, port


def join_address(host: str, port: int) -> str:
    """Make an address of host and port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def complete(address: str, host: str) -> str:
    """Insert ``host`` into an address that has none.

    Examples
    --------
    >>> complete("tcp://0.0.0.0:5571", "10.0.0.7"), complete("tcp://node3:5571", "10.0.0.7")
    ('tcp://10.0.0.7:5571', 'tcp://node3:5571')
    """
    if socket_path(address) is not None:
        return address
    own_host, port = split(address, wildcard=True)
    return join_address(host if own_host in _ANYWHERE else own_host, port)


def bindable(host: str) -> str:
    """Return the host as a socket can be bound to it: a number, or ``*`` for all interfaces."""
    if host in _ANYWHERE:
        return host if host == "::" else "*"
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror:
        raise ValueError(
            f"the name {host!r} cannot be resolved here: bind an IP address of this machine, or *"
        ) from None


def unknown_host(address: str) -> str | None:
    """Say that the host of an address has no known name, if it has none; this may ask a name server."""
    if socket_path(address) is not None:
        return None
    host, port = split(address)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return f"the name {host!r} cannot be resolved ({error.strerror})"
    return None


def is_local(address: str) -> bool:
    """Whether an address can be reached only from its own machine."""
    return socket_path(address) is not None or is_loopback(split(address, wildcard=True)[0])


def is_loopback(host: str) -> bool:
    """Whether a host can be reached only from its own machine."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def own_host(address: str) -> str:
    """Return the address of this machine on the way to another one; nothing is sent."""
    if socket_path(address) is not None:
        return "127.0.0.1"
    host, port = split(address)
    family, kind, _, _, there = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:
        route.connect(there)
        return str(route.getsockname()[0])


def check_bind(bind: str, *, secured: bool, insecure: bool) -> None:
    """Refuse to listen where others can connect, unless peers must have keys or the user allows it."""
    if secured or insecure:
        return
    path = socket_path(bind)
    if path is not None:
        directory = os.path.dirname(path)
        if not is_private(directory):
            raise ValueError(
                f"{bind}: without keys every peer may read and change every row, and other users may enter "
                f"{directory}: choose a directory of your own of mode 0700, or pass --curve DIR (curve=) or --insecure "
                "(insecure=True)"
            )
    elif not is_loopback(split(bind, wildcard=True)[0]):
        raise ValueError(
            f"{bind} is reached from other machines, and without keys every peer may read and change every row: "
            "make keys with shoal keygen --output DIR and pass --curve DIR (curve=), or listen at 127.0.0.1, or pass "
            "--insecure (insecure=True) in a network that you trust"
        )


def open_connection(address: str, timeout: float) -> socket.socket:
    """Connect to an address, without ZeroMQ.

    Blocks for ``timeout`` at most. Each address of a host is tried: the error is an ExceptionGroup if none answers.
    """
    path = socket_path(address)
    if path is None:
        return socket.create_connection(split(address), timeout, all_errors=True)
    deadline = time.monotonic() + timeout
    while True:
        tried = socket.socket(socket.AF_UNIX)
        try:
            tried.settimeout(timeout)
            tried.connect(path)
        except BlockingIOError:  # its queue of connections is full
            tried.close()
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(_BUSY_SECONDS)
        except OSError:
            tried.close()
            raise
        else:
            return tried


def try_out(address: str, timeout: float) -> str | None:
    """Connect to an address and wait for ZeroMQ's greeting.

    Blocks for ``timeout`` at most.
    """
    check(address)
    deadline = time.monotonic() + timeout
    try:
        with contextlib.closing(open_connection(address, timeout)) as tried:
            tried.settimeout(max(0.01, deadline - time.monotonic()))
            first = tried.recv(1)
    except (OSError, UnicodeError, ExceptionGroup) as raised:
        error = raised.exceptions[-1] if isinstance(raised, ExceptionGroup) else raised
        if isinstance(error, TimeoutError):
            return f"no answer in {timeout:g} s"
        if isinstance(error, (socket.gaierror, UnicodeError)):
            return f"the name {split(address)[0]!r} cannot be resolved here"
        assert isinstance(error, OSError)
        return (error.strerror or str(error)).lower()
    return None if first == b"\xff" else "the program that listens there is not a server of shoal"


def answers(address: str, timeout: float) -> bool:
    """Whether a connection to an address is accepted."""
    try:
        open_connection(address, timeout).close()
    except (OSError, UnicodeError, ExceptionGroup):
        return False
    return True


def try_all(addresses: Sequence[str], timeout: float) -> tuple[str, str] | None:
    """Probe addresses; returns the first that does not answer and the reason, or None."""
    for address in addresses:
        fault = try_out(address, timeout)
        if fault is not None:
            return address, fault
    return None


def all_refuse(addresses: Sequence[str], timeout: float) -> bool:
    """Whether connections to all addresses are refused: their machine runs, and no process listens there.

    Blocks, until the first address that does not refuse.
    """
    for address in addresses:
        try:
            open_connection(address, timeout).close()
        except ConnectionRefusedError:
            continue
        except ExceptionGroup as errors:  # one for each address of the name
            if not all(isinstance(error, ConnectionRefusedError) for error in errors.exceptions):
                return False
        except (OSError, UnicodeError):
            return False
        else:
            return False
    return True
