"""Connections: their number, and the timeout of silent ones.

    silent     no request yet, or the next one has not begun       closed after the keep-alive time, or request_seconds
    arriving   a request has begun                                 408 and closed after request_seconds
    answered   the request is whole                                as long as the prediction takes
    stalled    the client does not take what is sent               closed after request_seconds

Above the limit of connections the oldest silent one makes room, then the oldest one that is arriving or stalled: slow
clients keep no others out.

uvicorn closes a connection that is silent after a request; the other states are handled here, in a protocol that wraps
either of uvicorn's. At the limit of descriptors, asyncio calls accept() once for each place in the backlog and logs
each time: `Listener` fails once, and then reports no waiting connection until asyncio polls again.

Threads: all of this runs in the event loop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from shoal.serve.limits import Limits

_Protocol: Any = AutoHTTPProtocol  # either of uvicorn's
_log = logging.getLogger("shoal.serve")

_HEAD_BYTES = 64 << 10
_END_OF_HEAD = b"\r\n\r\n"
_RESERVED_DESCRIPTORS = 48  # for files, sockets and pipes other than connections
_MOST_REFUSED = 16
_REFUSED_SECONDS = 1.0
_ACCEPT_PAUSE = 0.9  # seconds; asyncio polls again after one
_QUIET_SECONDS = 60.0
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class RateLimit(logging.Filter):
    """A log filter that passes one line of a kind each minute, with the number of dropped ones."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is the first of its kind in a minute."""
        kind, now = str(record.msg), time.monotonic()
        since, left_out = self._seen.get(kind, (-_QUIET_SECONDS, 0))
        if now - since < _QUIET_SECONDS:
            self._seen[kind] = since, left_out + 1
            return False
        self._seen[kind] = now, 0
        if left_out:
            record.msg, record.args = f"{record.getMessage().rstrip()} ({left_out} more since the last line)", ()
        return True


_RATE_LIMIT = RateLimit()


class Listener(socket.socket):
    """A listening socket that backs off when no descriptors are left."""

    _until = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; see `socket.socket.accept`."""
        if time.monotonic() < self._until:
            raise BlockingIOError
        try:
            return super().accept()
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                self._until = time.monotonic() + _ACCEPT_PAUSE
                _log.warning(
                    "new connections wait: %s; raise the limit (ulimit -n) or lower --max-connections", error.strerror
                )
            raise


def usable_connections(wanted: int) -> int:
    """Return the number of connections that the process has descriptors for, at most ``wanted``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - _RESERVED_DESCRIPTORS))


class Server(uvicorn.Server):
    """uvicorn's server, whose event loop leaves the limit of descriptors to `Listener`."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()

        def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if not (isinstance(error, OSError) and error.errno in _OUT_OF_DESCRIPTORS and "socket" in context):
                loop.default_exception_handler(context)

        loop.set_exception_handler(handle)
        for name in ("uvicorn.error", _log.name):
            logging.getLogger(name).addFilter(_RATE_LIMIT)
        await super().startup(sockets)


def protocol(limits: Limits, count: Callable[[str], object]) -> type[asyncio.Protocol]:
    """Make the protocol of connections with these limits, for uvicorn's ``http=``."""
    most, seconds = usable_connections(limits.connections), limits.request_seconds
    if most < limits.connections:
        _log.warning("%d connections at a time: the process may open few files (ulimit -n)", most)

    refused: set[Any] = set()  # connections that wait until their client has read the refusal

    class Connection(_Protocol):  # type: ignore[misc]
        _arrival: asyncio.TimerHandle | None = None
        _stall: asyncio.TimerHandle | None = None
        _refused = False
        _waits_since = 0.0
        _head = 0  # bytes of the current request's headers
        _head_end = b""  # the last of them

        @property
        def _idle(self) -> bool:
            """Whether there is no current request: none has begun, or its headers are not complete."""
            return self.cycle is None or self.cycle.response_complete

        @property
        def _awaits_client(self) -> bool:
            """Whether the current request or its answer waits for the client."""
            return bool(self.cycle.more_body or self.transport.get_write_buffer_size())

        def _expect(self) -> None:
            """Start the timeout of the next request."""
            self._expect_nothing()
            self._arrival = self.loop.call_later(seconds, self._expired)

        def _expect_nothing(self) -> None:
            if self._arrival is not None:
                self._arrival.cancel()
                self._arrival = None

        def _watch_writes(self) -> None:
            """Abort the connection if the client reads nothing of the answer."""
            left = self.transport.get_write_buffer_size()
            if left and self._stall is None:
                self._stall = self.loop.call_later(seconds, self._stalled, left)

        def _stalled(self, before: int) -> None:
            self._stall = None
            if self.transport.get_write_buffer_size() < before:
                self._watch_writes()
            else:
                count("stalled")
                self.transport.abort()

        def _close(self, reason: str) -> None:
            count(reason)
            self.transport.close()
            self._watch_writes()

        def _refuse(self, status: str, message: str, reason: str) -> None:
            """Answer without the application, and close."""
            body = msgspec.json.encode({"error": message})
            head = (
                f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
                "connection: close\r\n\r\n"
            )
            self._refused = True
            self.transport.write(head.encode() + body)
            if len(refused) >= _MOST_REFUSED:
                self._close(reason)
                return
            # Closed at once, with bytes unread, the connection would be reset, and the answer lost.
            count(reason)
            refused.add(self)
            self.transport.write_eof()
            self._stall = self.loop.call_later(_REFUSED_SECONDS, self.transport.abort)

        def connection_made(self, transport: Any) -> None:
            if len(self.connections) >= most:
                replaceable = [one for one in self.connections if one._idle]
                replaceable = replaceable or [one for one in self.connections if one._awaits_client]
                if not replaceable:
                    self.transport = transport
                    self._refuse("503 Service Unavailable", f"{most} requests are being answered: try again", "full")
                    return
                oldest = min(replaceable, key=lambda one: one._waits_since)
                self.connections.discard(oldest)
                oldest._close("full")
            super().connection_made(transport)
            self._waits_since = time.monotonic()
            self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            self._expect_nothing()
            refused.discard(self)
            if self._stall is not None:
                self._stall.cancel()
            if self.flow is not None:
                super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._refused or self.transport.is_closing():
                return
            if self._idle:
                if self._arrival is None:
                    self._expect()
                end = (self._head_end + data).find(_END_OF_HEAD)
                self._head += len(data) if end < 0 else end - len(self._head_end)
                self._head_end = data[1 - len(_END_OF_HEAD) :]
                if self._head > _HEAD_BYTES:
                    what = f"more than {_HEAD_BYTES} bytes of headers"
                    self._refuse("431 Request Header Fields Too Large", what, "head")
                    return
            super().data_received(data)
            if not self._idle:
                self._head, self._head_end = 0, b""
                if not self.cycle.more_body:
                    self._expect_nothing()

        def on_response_complete(self) -> None:
            self._expect_nothing()
            self._head, self._head_end = 0, b""
            self._waits_since = time.monotonic()
            self._watch_writes()
            super().on_response_complete()
            if not self._idle and self.cycle.more_body:  # a request that followed the last one
                self._expect()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_writes()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._watch_writes()

        def _expired(self) -> None:
            """Close a connection whose request did not arrive in time."""
            self._arrival = None
            if self.transport.is_closing():
                return
            if self._idle and self._head == 0:
                self._close("silent")
            elif self._idle or not self.cycle.response_started:
                what = f"the request did not arrive within {seconds:g} seconds"
                self._refuse("408 Request Timeout", what, "slow")
            else:
                count("slow")
                self.transport.abort()

    return Connection
