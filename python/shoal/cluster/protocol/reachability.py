"""Whether the processes of a cluster can be reached from here, and how fast they answer.

Threads: none of its own; a call belongs to one thread.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from shoal.cluster.protocol.address import answers
from shoal.cluster.protocol.connection import Connection, Context, Socket
from shoal.cluster.protocol.curve import Keys
from shoal.cluster.protocol.libzmq import backend
from shoal.cluster.protocol.ping import encode_ping, ping_number

_PINGS = 5
_CONNECT_SECONDS = 1.0


class Reached(NamedTuple):
    """What became of the pings of an endpoint."""

    address: str
    # Median time to an answer; None: it has not answered in time.
    seconds: float | None
    # Whether its port accepts connections.
    accepts: bool


def is_shared() -> bool:
    """Whether pyzmq's libzmq can be used by the engine, which servers need."""
    return hasattr(ctypes.CDLL(backend()), "zmq_msg_init")


def reach(addresses: Sequence[str], *, keys: Keys | None, timeout: float) -> list[Reached]:
    """Ping data endpoints of servers, one after the other."""
    context: Context = zmq.Context()
    try:
        return [_reach(context, address, keys, timeout) for address in addresses]
    finally:
        context.destroy(linger=0)


def _reach(context: Context, address: str, keys: Keys | None, timeout: float) -> Reached:
    poller = zmq.Poller()
    secure = _no_keys if keys is None else keys.client_of("server")
    end = time.monotonic() + timeout
    connection = Connection(context, poller, address, secure, time.monotonic())
    waits: list[float] = []
    try:
        number = 0
        sent = 0.0
        while len(waits) < _PINGS and time.monotonic() < end:
            if connection.has_ended:
                connection.drop("", time.monotonic())
            if connection.socket is None:
                if connection.open_at > time.monotonic():
                    time.sleep(max(0.0, min(connection.open_at, end) - time.monotonic()))
                    continue
                connection.open(time.monotonic())
                sent = 0.0
            assert connection.socket is not None
            if not sent:
                number += 1
                connection.socket.send(encode_ping(number))
                sent = time.perf_counter()
            poller.poll(max(1, min(100, round(1000 * (end - time.monotonic())))))
            try:
                frames = connection.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                continue
            connection.received()
            if ping_number(frames) == number:
                waits.append(time.perf_counter() - sent)
                sent = 0.0
        if waits:
            return Reached(address, statistics.median(waits), accepts=True)
        return Reached(address, None, answers(address, _CONNECT_SECONDS))
    finally:
        connection.close()


def _no_keys(_: Socket) -> None:
    """Prepare a socket without keys."""
