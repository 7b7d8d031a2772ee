"""The Open Inference Protocol over gRPC: a thread with an event loop, beside the server of HTTP.

    gRPC           connections, HTTP/2, sizes of messages, clients that leave
    this module    the time of a call, how many are in progress, and the memory of their messages
    Handler        answers, as it does over HTTP

A call is a stream of one message each way, which a client cannot tell from a plain call: so the times in which the
request must arrive and the reply be accepted are the server's.

Threads: a GrpcServer is safe from any thread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from prometheus_client import Counter, Histogram

from shoal import _core
from shoal.serve.asgi import Dispatcher
from shoal.serve.limits import Account, RequestError, UnavailableError
from shoal.serve.open_inference import INFER, METHODS, SERVICE, answer

if TYPE_CHECKING:
    from concurrent.futures import Future

    from shoal.serve.app import Handler

_log = logging.getLogger(__name__)

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_ROUTE_KEY = "shoal-route"
_LOOK_SECONDS = 0.02
_QUIET_SECONDS = 0.2
_LAST_SECONDS = 2.0
_DETAILS = 1000  # characters of an error: clients accept 8 KiB with all headers


class _SlowError(RequestError):
    """A call whose message did not arrive in time."""

    status = 408


class GrpcServer:
    """Answers calls until it is stopped.

    Parameters
    ----------
    handler : Handler
    host, port, reuse_port
        As for `shoal.serve.serve`.

    Attributes
    ----------
    port : int

    Raises
    ------
    OSError
        The address is in use, or is not an address of this machine.
    """

    def __init__(self, handler: Handler, *, host: str, port: int, reuse_port: bool) -> None:
        self._handler = handler
        self._limits = handler.budget.limits
        self._pending = 0
        self._arrived = 0.0  # the last call
        self._is_stopping = False
        more: dict[str, Any] = {"registry": handler.registry}
        self._calls = Counter("shoal_serve_grpc_requests", "Predictions over gRPC, by status", ["code"], **more)
        self._seconds = Histogram(
            "shoal_serve_grpc_seconds", "Seconds from complete message to answer", buckets=_core.HTTP_SECONDS, **more
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="shoal-serve-grpc")
        self._thread.start()
        try:
            self.port = self._soon(self._start(host, port, reuse_port)).result()
        except BaseException:
            self._end()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for task in (left := asyncio.all_tasks(self._loop)):
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _soon(self, what: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _start(self, host: str, port: int, reuse_port: bool) -> int:
        limits = self._limits
        self._dispatcher = Dispatcher(is_live=self._handler.is_live)
        most = min(limits.body_bytes, limits.in_flight_bytes)
        self._reading = asyncio.Semaphore(max(1, limits.in_flight_bytes // most))  # their messages fit into memory
        milliseconds = int(limits.request_seconds * 1000)
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", most),
                ("grpc.max_allowed_incoming_connections", limits.connections),
                ("grpc.max_connection_idle_ms", milliseconds),
                ("grpc.server_handshake_timeout_ms", milliseconds),
                ("grpc.so_reuseport", int(reuse_port)),
            ],
        )
        methods = {name: grpc.stream_stream_rpc_method_handler(functools.partial(self._call, name)) for name in METHODS}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        try:
            bound: int = self._server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError:
            raise OSError(
                f"{host}:{port}: gRPC cannot listen there, the address is in use or not of this machine"
            ) from None
        await self._server.start()
        return bound

    def stop(self, seconds: float) -> Future[Any]:
        """Refuse further calls, and complete those in progress for so many seconds; a later call may shorten them."""
        return self._soon(self._drain(seconds))

    def close(self) -> None:
        """Stop at once, and release everything."""
        self._soon(self._server.stop(0.0)).result()
        self._end()

    async def _drain(self, seconds: float) -> None:
        self._is_stopping = True
        ends = time.monotonic() + seconds
        while self._pending and time.monotonic() < ends:
            await asyncio.sleep(_LOOK_SECONDS)
        # gRPC would cancel calls that it has received and not yet passed on: so it stops once none arrives.
        ends = min(ends, time.monotonic() + _LAST_SECONDS)
        while time.monotonic() < min(ends, self._arrived + _QUIET_SECONDS):
            await asyncio.sleep(_LOOK_SECONDS)
        # The last replies are on their way. A connection without a call would be waited for, too.
        await self._server.stop(min(seconds, _QUIET_SECONDS))

    # ---- calls, in the event loop ----

    async def _call(self, method: str, _: Any, context: Any) -> None:
        self._pending += 1
        self._arrived = time.monotonic()
        code, details = grpc.StatusCode.OK, ""
        try:
            await self._answer(method, context)
        except RequestError as error:
            code, details = _CODES.get(error.status, grpc.StatusCode.INTERNAL), str(error)
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception:
            _log.exception("%s", method)
            code, details = grpc.StatusCode.INTERNAL, "an internal error, which the server has logged"
        finally:
            self._pending -= 1
            if method == INFER:
                self._calls.labels(code.name).inc()
        if code is not grpc.StatusCode.OK:
            await context.abort(code, details if len(details) <= _DETAILS else f"{details[:_DETAILS]}...")

    async def _answer(self, method: str, context: Any) -> None:
        limits = self._limits
        if self._is_stopping:
            raise UnavailableError("the server is stopping: try again later")
        if self._pending > limits.connections:
            raise UnavailableError(f"{limits.connections} calls are in progress: try again later")
        try:
            async with asyncio.timeout(limits.request_seconds), self._reading:
                message = await context.read()
        except TimeoutError:
            raise _SlowError(f"the request did not arrive within {limits.request_seconds:g} s") from None
        if message is grpc.aio.EOF:
            raise RequestError("a call without a message")
        began = time.perf_counter()
        reply = await asyncio.shield(self._replied(method, message, context))
        if method == INFER:
            self._seconds.observe(time.perf_counter() - began)
        try:
            async with asyncio.timeout(limits.request_seconds):
                await context.write(reply)
        except TimeoutError:
            raise _SlowError(f"the client did not accept the answer within {limits.request_seconds:g} s") from None

    async def _replied(self, method: str, message: bytes, context: Any) -> bytes:
        """Compute a reply; the message is counted until that is done, even if the client has left."""
        headers = {name: value for name, value in context.invocation_metadata() if name == _ROUTE_KEY}
        with Account(self._handler.budget) as account:
            account.body(len(message))
            return await self._dispatcher.run(len(message), answer, self._handler, method, message, headers)
