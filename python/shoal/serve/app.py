"""The routes of the prediction server.

    POST /predict    examples in, probabilities out
    POST /reload     look for a newer version now
    GET  /healthz    200 while a model is in place
    GET  /versions   the version in place, and what it stands upon
    GET  /metrics    counters and latencies for Prometheus

Threads: requests wait in the event loop; small ones are predicted there, large ones in threads. A reload runs beside
them, in a thread of its own.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.errors import ShoalError
from shoal.serve.bodies import JSON, BadRequest, answer, examples

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.serve.served import Served

__all__ = ["make_app", "serve"]

_SMALL = 8 << 10  # bytes of a body that is worth no thread
_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class _Figures:
    """What Prometheus is told, of one server."""

    def __init__(self, served: Served) -> None:
        self.registry = CollectorRegistry()
        more: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("shoal_serve_requests", "Requests of predictions, by status", ["code"], **more)
        self.examples = Counter("shoal_serve_examples", "Examples that were predicted", **more)
        self.seconds = Histogram("shoal_serve_seconds", "From a whole body to its answer", buckets=_BUCKETS, **more)
        for name, what, read in (
            ("version", "The version in place", lambda: served.now.version),
            ("reloads", "Versions that were put in place after the first", lambda: served.reloads),
            ("reload_failures", "Versions that could not be used", lambda: served.failures),
        ):
            Gauge(f"shoal_serve_{name}", what, **more).set_function(read)


def _json(what: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(what), status, media_type=JSON)


def make_app(served: Served, *, most_bytes: int = 64 << 20) -> Starlette:
    """Make the application, an ASGI one, of a model that is open.

    Parameters
    ----------
    served : Served
        Closed by whoever opened it.
    most_bytes : int
        Of a body; a larger one is refused before it is read.

    Returns
    -------
    starlette.applications.Starlette
    """
    figures = _Figures(served)

    def predict_now(body: bytes, content_type: str, accept: str) -> Response:
        model = served.now  # one version throughout
        batch = examples(body, content_type, model.predictor)
        told = model.predictor.predict_proba(batch)
        data, kind = answer(model.version, told, accept)
        figures.examples.inc(len(batch))
        return Response(data, media_type=kind, headers={"shoal-version": str(model.version)})

    async def predict(request: Request) -> Response:
        response = await answered(request)
        figures.requests.labels(str(response.status_code)).inc()
        return response

    async def answered(request: Request) -> Response:
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > most_bytes:
            return _json({"error": f"a body of {length} bytes: at most {most_bytes} are taken"}, 413)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most_bytes:
                return _json({"error": f"a body of more than {most_bytes} bytes"}, 413)
        began = time.perf_counter()
        sent = request.headers.get("content-type", JSON)
        accept = request.headers.get("accept", "")
        accept = sent if accept in ("", "*/*") else accept
        try:
            if len(body) <= _SMALL:
                response = predict_now(bytes(body), sent, accept)
            else:
                response = await run_in_threadpool(predict_now, bytes(body), sent, accept)
        except BadRequest as error:
            return _json({"error": str(error)}, 400)
        figures.seconds.observe(time.perf_counter() - began)
        return response

    async def reload(request: Request) -> Response:
        try:
            fresh = await run_in_threadpool(served.reload)
        except (ShoalError, ValueError, ImportError) as error:
            return _json({"version": served.now.version, "error": str(error)}, 500)
        return _json({"version": served.now.version, "reloaded": fresh})

    async def healthz(request: Request) -> Response:
        return _json({"status": "ok", "version": served.now.version})

    async def versions(request: Request) -> Response:
        now = served.now
        layers = [{"directory": one.place.name, "version": one.manifest.number} for one in now.exported.layers.mapped]
        tables = {
            name: {"dim": table.dim, "dtype": table.dtype, "bytes": table.nbytes}
            for name, table in now.exported.tables.items()
        }
        return _json({"version": now.version, "model": now.kind, "layers": layers, "tables": tables})

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(figures.registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/predict", predict, methods=["POST"]),
            Route("/reload", reload, methods=["POST"]),
            Route("/healthz", healthz),
            Route("/versions", versions),
            Route("/metrics", metrics),
        ]
    )


def serve(
    served: Served,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    reuse_port: bool = False,
    most_bytes: int = 64 << 20,
    ready: Callable[[str, int], object] | None = None,
    until: Callable[[Any], object] | None = None,
) -> None:
    """Answer requests until the process is told to stop (Ctrl-C, SIGTERM): those under way are ended first.

    Parameters
    ----------
    served : Served
    host, port
        Where to listen; port 0 takes any that is free.
    reuse_port : bool
        Whether several processes may listen there: the system hands connections to each. They share the files' pages.
    most_bytes : int
        Of a body.
    ready : callable, optional
        Called with host and port once connections are taken.
    until : callable, optional
        Given uvicorn's server before it runs, for who wants to end it (``server.should_exit = True``).

    Raises
    ------
    OSError
        The address is taken, or not this machine's.
    """
    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named TCP: the event loop turns off the waiting for more to send (Nagle) where it sees that; else answers take 40
    # ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((host, port))
        listening.listen(1024)
        app = make_app(served, most_bytes=most_bytes)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        if until is not None:
            until(server)
        if ready is not None:
            ready(host, listening.getsockname()[1])
        server.run(sockets=[listening])
