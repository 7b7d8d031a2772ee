"""The prediction server as an application of ASGI, to be mounted in another one.

Small bodies are answered in the event loop, large ones and Arrow bodies in as many threads as there are cores; those of
a live model, which wait for servers, in more. Whatever changes what is served has a thread of its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from prometheus_client import Counter, Histogram

from shoal import _core
from shoal.base.machine import cores
from shoal.serve.app import PREDICTIONS, Handler, Request, Response, refusal
from shoal.serve.bodies import ARROW
from shoal.serve.limits import Account, Limits, RequestError, TooLargeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from shoal.serve.app import Served
    from shoal.serve.versions import ServedVersions

    Scope = Mapping[str, Any]
    Receive = Callable[[], Awaitable[Mapping[str, Any]]]
    Send = Callable[[dict[str, Any]], Awaitable[None]]

P = ParamSpec("P")
T = TypeVar("T")

_SMALL = 8 << 10  # bytes; a smaller body is predicted in the event loop
LIVE_THREADS = 32


class _DisconnectedError(Exception):
    """The client has left before its request was complete."""


def make_app(
    served: Served | Mapping[str, ServedVersions],
    *,
    limits: Limits | None = None,
    hosts: Collection[str] = (),
    refuse_unknown_columns: bool = False,
) -> Application:
    """Make the ASGI application of open models.

    Parameters
    ----------
    served : ServedModel, ServedVersions, LiveModel, or mapping of str to ServedVersions
        What to serve; the caller closes it. A mapping has models by name, the first of which also answers ``/predict``.
    limits : Limits, optional
        Limits of requests. Those of connections and of time are the business of the server that runs the application.
    hosts : collection of str, optional
        Names at which ``POST /reload`` and ``POST /models/NAME`` are accepted, besides numeric addresses, localhost and
        this machine's own name. Predictions are answered at any.
    refuse_unknown_columns : bool
        Whether a request with columns that the model does not know is refused (400). They are counted in any case.

    Returns
    -------
    callable
        An application of ASGI 3: ``await app(scope, receive, send)``.
    """
    handler = Handler(served, limits=limits or Limits(), hosts=hosts, refuse_unknown_columns=refuse_unknown_columns)
    return Application(handler)


class Dispatcher:
    """Where a prediction is computed: in the event loop, or in a thread."""

    def __init__(self, *, is_live: bool) -> None:
        self._small = -1 if is_live else _SMALL  # one that waits for servers holds up no other one
        # More threads that compute would slow down the event loop.
        self._large = asyncio.Semaphore(LIVE_THREADS if is_live else cores())

    async def run(self, size: float, answer: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Call a function for a body of so many bytes."""
        if size <= self._small:
            return answer(*given, **named)
        async with self._large:
            return await asyncio.to_thread(answer, *given, **named)


class Application:
    """A Handler behind ASGI."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._dispatcher = Dispatcher(is_live=handler.is_live)
        more: dict[str, Any] = {"registry": handler.registry}
        self._requests = Counter("shoal_serve_requests", "Prediction requests, by status", ["code"], **more)
        self._seconds = Histogram(
            "shoal_serve_seconds", "Seconds from complete body to answer", buckets=_core.HTTP_SECONDS, **more
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what a scope is about: requests of HTTP, and that the application starts and ends."""
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            raise ValueError(f"a scope of type {scope['type']!r}: only http and lifespan are answered")

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope["path"])
        path = path.removeprefix(scope.get("root_path", "")) or "/"
        is_prediction = scope["method"] == "POST" and path.endswith(PREDICTIONS)
        try:
            response = await self._answered(scope, path, receive, is_prediction)
        except _DisconnectedError:
            if is_prediction:
                self._requests.labels("499").inc()
            return
        if is_prediction:
            self._requests.labels(str(response.status)).inc()
        headers = [(name.encode(), value.encode("latin-1")) for name, value in response.headers.items()]
        headers.append((b"content-length", b"%d" % len(response.body)))
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else response.body})

    async def _answered(self, scope: Scope, path: str, receive: Receive, is_prediction: bool) -> Response:
        headers: dict[str, str] = {}
        for raw_name, raw_value in scope["headers"]:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        with Account(self._handler.budget) as account:
            try:
                body = await _body(headers, receive, account)
            except RequestError as error:
                response = refusal(error)
                response.headers["connection"] = "close"  # the rest of the body is not read
                return response
            began = time.perf_counter()
            request = Request(scope["method"], path, headers, body, account)
            if is_prediction:
                size = math.inf if _is_arrow(headers) else len(body)
                response = await self._dispatcher.run(size, self._handler.answer, request)
            elif scope["method"] in ("GET", "HEAD"):
                response = self._handler.answer(request)
            else:
                response = await asyncio.to_thread(self._handler.answer, request)
            if is_prediction:
                self._seconds.observe(time.perf_counter() - began)
            return response


def _is_arrow(headers: Mapping[str, str]) -> bool:
    return ARROW in headers.get("content-type", "") or ARROW in headers.get("accept", "")


async def _body(headers: Mapping[str, str], receive: Receive, account: Account) -> bytearray:
    length, most = headers.get("content-length", "0"), account.most
    if not length.isdecimal() or int(length[:20]) > most:
        raise TooLargeError(f"a body of {length[:20]} bytes: at most {most} are accepted")
    body, is_complete = bytearray(), False
    while not is_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _DisconnectedError
        part = message.get("body", b"")
        account.body(len(part))
        body += part
        is_complete = not message.get("more_body", False)
    return body
