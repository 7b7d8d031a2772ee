"""Which connections of the scheduler's socket have ended.

The kernel closes the connections of a process that ends, so libzmq knows of its death within milliseconds, while a
process that computes, or whose Python threads cannot run, keeps its connection. libzmq reports an end by the number of
the file descriptor, to the socket's monitor; a message reports the descriptor that it came from. A number may be used
again before the report is read, so every report is checked: a ROUTER refuses to send over a route that has ended
(ZMQ_ROUTER_MANDATORY, EHOSTUNREACH). The event is reported shortly before the route ends; the check is repeated.

    observe   route and descriptor of a message
    ended     the routes that have ended since the last call

Threads: one, the one of the socket.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections import deque
from typing import TypeAlias

import zmq

from shoal.cluster.protocol.messages import Events, encode

_Socket: TypeAlias = "zmq.Socket[bytes]"

_FIRST_CHECK_SECONDS = 0.002
_MAX_CHECKS = 9  # each after twice the time of the one before: half a second in all
_NO_EVENTS = encode(Events(0, ()))  # a message without an effect
_names = itertools.count()


class ConnectionMonitor:
    """The ends of a ROUTER's connections."""

    def __init__(self, context: zmq.Context[_Socket], router: _Socket) -> None:
        self._router = router
        self._routes: dict[int, set[bytes]] = {}  # by descriptor
        self._checks: deque[tuple[float, int, int, bytes]] = deque()  # when, number, descriptor, route
        name = f"inproc://shoal-connections-{os.getpid()}-{next(_names)}"
        # Events of failed handshakes are not requested: see protocol/connection.py.
        router.monitor(name, int(zmq.EVENT_DISCONNECTED))
        # To poll: it is readable when a connection has ended.
        self.socket: _Socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)  # libzmq's thread would block while it is not read
        self.socket.connect(name)

    def observe(self, route: bytes, frame: zmq.Frame) -> None:
        """Record the descriptor that a message came from."""
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except (zmq.ZMQError, ValueError):
            return
        routes = self._routes.get(descriptor)
        if routes is None:
            self._routes[descriptor] = {route}
        elif route not in routes:
            routes.add(route)

    def ended(self, now: float) -> list[bytes]:
        """Return the routes that have ended."""
        while True:
            try:
                _, descriptor = struct.unpack_from("=HI", self.socket.recv_multipart(zmq.DONTWAIT)[0])
            except zmq.Again:
                break
            for route in self._routes.get(descriptor, ()):
                self._checks.append((now, 0, descriptor, route))
        ended = []
        for _ in range(len(self._checks)):
            at, number, descriptor, route = self._checks.popleft()
            routes = self._routes.get(descriptor, set())
            if at > now:
                self._checks.append((at, number, descriptor, route))
            elif route in routes and self._has_ended(route):
                routes.discard(route)
                if not routes:
                    del self._routes[descriptor]
                ended.append(route)
            elif route in routes and number < _MAX_CHECKS:  # otherwise another connection has the descriptor
                self._checks.append((now + _FIRST_CHECK_SECONDS * 2**number, number + 1, descriptor, route))
        return ended

    @property
    def next_time(self) -> float | None:
        """When to call :meth:`ended` next, unless the socket is readable before; None: there is nothing to check."""
        return min((check[0] for check in self._checks), default=None)

    def _has_ended(self, route: bytes) -> bool:
        try:
            self._router.send_multipart([route, *_NO_EVENTS], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno == zmq.EAGAIN:  # full
                return False
            if error.errno == zmq.EHOSTUNREACH:
                return True
            raise
        return False

    def close(self) -> None:
        """Close the monitor, before the socket is closed."""
        self._router.disable_monitor()
        self.socket.close(linger=0)
