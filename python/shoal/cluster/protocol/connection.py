"""A DEALER socket that is replaced whenever its connection ends.

libzmq reconnects by itself after a connection was cut, but not after it has refused received data: its session then
ends permanently, and a socket without a session accepts no messages. In neither case does it report that answers may be
lost. So a socket monitor observes every end, the socket is closed, and its owner opens another one and sends all
unanswered requests again at once. Messages that waited in the old socket are dropped, so nothing is sent twice over one
connection.

    open --event: disconnected--> ended --owner: drop--> closed until `open_at` --owner: open--> open

Connections are opened as fast as they end, but not in a busy loop: each lives for `_SHORTEST` seconds at least, and for
twice as long as the one before where nothing was received. libzmq repeats refused connection attempts.

Threads: one at a time; the owner locks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import struct
from collections.abc import Callable
from typing import TypeAlias

import zmq

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"

_SHORTEST = 0.01  # seconds from one opening to the next
_LONGEST = 0.1
_LONGEST_UNGREETED = 1.0  # where there is no common handshake
_HANDSHAKE_MS = 5000
_HEARTBEAT_MS = 2000
_SILENCE_MS = 10000

# Events of failed handshakes are not requested: when libzmq 4.3.5 reports one, it overwrites the error that it handles,
# treats the connection as full, and ends the process at its next heartbeat.
_ENDED = int(zmq.EVENT_DISCONNECTED)
_GREETED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_names = itertools.count()


class Connection:
    """A connection to one address."""

    def __init__(
        self, context: Context, poller: zmq.Poller, address: str, prepare: Callable[[Socket], None], now: float
    ) -> None:
        self.address = address
        # socket, monitor: None between :meth:`drop` and :meth:`open`. The monitor is read by :attr:`has_ended` alone.
        self.socket: Socket | None = None
        self.monitor: Socket | None = None
        # Why the last connection ended; empty if none has ended.
        self.reason = ""
        # When to call :meth:`open`; infinite while it is open.
        self.open_at = now
        self._context = context
        self._poller = poller
        self._prepare = prepare
        self.is_greeted = False  # the handshake is done
        self._opened = -math.inf
        self._fruitless = 0  # connections in a row over which nothing was received
        self.open(now)

    def open(self, now: float) -> Socket:
        """Connect."""
        self._opened, self.open_at, self.is_greeted = now, math.inf, False
        self._fruitless += 1
        try:
            self.socket = opened = self._context.socket(zmq.DEALER)
            opened.setsockopt(zmq.LINGER, 0)
            opened.setsockopt(zmq.RCVHWM, 0)  # a connection that is cut while libzmq does not read ends the process
            opened.setsockopt(zmq.RECONNECT_IVL, 20)  # milliseconds, both
            opened.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
            opened.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
            opened.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            opened.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
            opened.setsockopt(zmq.IPV6, int("[" in self.address))
            self._prepare(opened)
            name = f"inproc://shoal-connection-{os.getpid()}-{next(_names)}"
            opened.monitor(name, _ENDED | _GREETED)
            self.monitor = self._context.socket(zmq.PAIR)
            self.monitor.setsockopt(zmq.LINGER, 0)
            self.monitor.setsockopt(zmq.RCVHWM, 0)  # an idle owner reads no events, and libzmq's thread would block
            self.monitor.connect(name)
            opened.connect(self.address)
        except BaseException as error:
            self.drop(f"no socket could be opened: {error}", now)
            raise
        self._poller.register(opened, zmq.POLLIN)
        self._poller.register(self.monitor, zmq.POLLIN)
        return opened

    def received(self) -> None:
        """Record that a message has arrived over this connection."""
        self._fruitless = 0

    @property
    def has_ended(self) -> bool:
        """Whether the connection has ended since it was opened. Messages from before the end can still be received."""
        ended = False
        while self.monitor is not None:
            try:
                (event,) = struct.unpack_from("=H", self.monitor.recv_multipart(zmq.DONTWAIT)[0])
            except zmq.Again:
                break
            self.is_greeted |= event == _GREETED
            ended |= event == _ENDED
        return ended

    def drop(self, reason: str, now: float) -> None:
        """Close the socket; it may be opened again at :attr:`open_at`."""
        was_greeted = self.is_greeted
        self.close()
        self.reason = reason or (
            "the process at its other end has ended, or it was cut or damaged on the way"
            if was_greeted
            else "there was no common handshake"
        )
        longest = _LONGEST if was_greeted else _LONGEST_UNGREETED
        self.open_at = max(now, self._opened + min(_SHORTEST * 2 ** min(self._fruitless, 30), longest))

    def close(self) -> None:
        """Close the socket for good."""
        if self.socket is not None:
            with contextlib.suppress(zmq.ContextTerminated):
                self.socket.disable_monitor()  # first: an unread event would block libzmq's thread
        for socket in (self.socket, self.monitor):
            if socket is not None:
                if socket in self._poller:
                    self._poller.unregister(socket)
                socket.close(linger=0)
        self.socket = self.monitor = None
        self.is_greeted = False
