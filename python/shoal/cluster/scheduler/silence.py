"""Detection of servers that do not answer although no connection was refused: stopped, or cut off.

A ping-based failure detector. The data endpoints of the servers are pinged in rounds; an endpoint that has left
`_MISSED` pings in a row unanswered is silent if its connection has ended as well. libzmq's own thread in the server
keeps the connection alive (ZMTP heartbeats), so an endpoint that executes a long request is not silent.

A round in which this process was late, because it was stopped or the machine is busy, counts nothing: the answers may
wait in its own sockets. An endpoint is observed from its first answer on.

    SilenceDetector   the rules: no socket, no clock
    Pinger            a DEALER for each endpoint

Threads: one, that of the scheduler.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import zmq

from shoal.cluster.protocol.connection import Connection, Context, Socket
from shoal.cluster.protocol.ping import encode_ping, ping_number

PING_SECONDS = 0.25  # from one round to the next
_MISSED = 4  # unanswered pings in a row
_LATE_SECONDS = 0.1  # a round that begins later than this is not counted
_SILENCE_MS = 750  # without a heartbeat of libzmq's; then the connection ends


@dataclass
class _Endpoint:
    rank: int
    number: int = 0  # of the last ping
    answered: int = 0  # the last one that was answered
    heard: float = math.nan  # when; NaN: never
    missed: int = 0  # pings in a row that were not answered in their round


class SilenceDetector:
    """Decides which endpoints are silent."""

    def __init__(self) -> None:
        # When the next round begins; infinite while no endpoint is observed.
        self.next_time = math.inf
        self._endpoints: dict[str, _Endpoint] = {}
        self.longest = 0.0  # seconds between two answers of an endpoint
        self.uncounted = 0  # rounds

    def watch(self, endpoints: Mapping[str, int], now: float) -> None:
        """Observe these endpoints: the rank of the server, by address. Others are forgotten."""
        self._endpoints = {
            address: self._endpoints.get(address, _Endpoint(rank)) for address, rank in endpoints.items()
        }
        self.next_time = min(self.next_time, now) if self._endpoints else math.inf

    def answered(self, address: str, number: int, now: float) -> None:
        """Record the answer to a ping."""
        endpoint = self._endpoints.get(address)
        if endpoint is None or not endpoint.answered < number <= endpoint.number:
            return
        if not math.isnan(endpoint.heard):
            self.longest = max(self.longest, now - endpoint.heard)
        endpoint.answered, endpoint.heard = number, now
        if number == endpoint.number:
            endpoint.missed = 0

    def begin_round(
        self, now: float, connected: Collection[str]
    ) -> tuple[dict[str, int], list[tuple[int, str, float]]]:
        """Begin a round, once all answers that have arrived are recorded."""
        counts = now - self.next_time <= _LATE_SECONDS
        self.uncounted += not counts
        self.next_time = now + PING_SECONDS
        silent: dict[int, tuple[int, str, float]] = {}
        pings = {}
        for address, endpoint in self._endpoints.items():
            if counts and endpoint.answered and endpoint.answered < endpoint.number:
                endpoint.missed += 1
            if endpoint.missed >= _MISSED and address not in connected:
                seconds = now - endpoint.heard
                why = (
                    f"it is silent: {address} has not answered for {seconds:.1f} s ({endpoint.missed} pings) and its "
                    "connection has ended"
                )
                silent[endpoint.rank] = endpoint.rank, why, seconds
            endpoint.number += 1
            pings[address] = endpoint.number
        return pings, list(silent.values())


class Pinger:
    """Pings the endpoints of the servers."""

    def __init__(self, context: Context, poller: zmq.Poller, secure: Callable[[Socket], None]) -> None:
        self.detector = SilenceDetector()
        self._context = context
        self._poller = poller
        self._secure = secure
        self._connections: dict[str, Connection] = {}
        self._watched: Mapping[str, int] = {}

    def watch(self, endpoints: Mapping[str, int], now: float) -> None:
        """Ping these endpoints: the rank of the server, by address."""
        if endpoints == self._watched:
            return
        self._watched = dict(endpoints)
        self.detector.watch(endpoints, now)
        for address in self._connections.keys() - endpoints.keys():
            self._connections.pop(address).close()

    @property
    def next_time(self) -> float:
        """When to call :meth:`turn` next, unless a socket is readable before."""
        return min(self.detector.next_time, *(one.open_at for one in self._connections.values()), math.inf)

    def turn(self, now: float) -> list[tuple[int, str, float]]:
        """Receive answers, replace connections that have ended, send pings; return silent servers as the detector."""
        for address in self._watched.keys() - self._connections.keys():
            with contextlib.suppress(zmq.ZMQError):  # no further socket: tried again
                self._connections[address] = Connection(self._context, self._poller, address, self._prepare, now)
        for address, connection in self._connections.items():
            self._receive(address, connection, now)
            if connection.has_ended:
                connection.drop("", now)
            if connection.socket is None and connection.open_at <= now:
                with contextlib.suppress(zmq.ZMQError):
                    connection.open(now)
        if now < self.detector.next_time:
            return []
        alive = {address for address, connection in self._connections.items() if connection.is_greeted}
        pings, silent = self.detector.begin_round(now, alive)
        for address, number in pings.items():
            to = self._connections.get(address)
            if to is not None and to.socket is not None and to.is_greeted:
                with contextlib.suppress(zmq.ZMQError):
                    to.socket.send(encode_ping(number), zmq.DONTWAIT)
        return silent

    def _prepare(self, socket: Socket) -> None:
        socket.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * PING_SECONDS))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        self._secure(socket)

    def _receive(self, address: str, connection: Connection, now: float) -> None:
        while connection.socket is not None:
            try:
                frames = connection.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.ZMQError:
                return
            connection.received()
            number = ping_number(frames)
            if number is not None:
                self.detector.answered(address, number, now)

    def close(self) -> None:
        """Close all sockets."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._watched = {}
