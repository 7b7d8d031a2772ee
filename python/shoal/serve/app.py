"""The routes of the prediction server.

    POST /predict    examples in, probabilities out, by the first model
    POST /reload     check for newer versions now
    GET  /healthz    200 while a model is loaded
    GET  /versions   the current version, the exports it is based on, and the inputs of its model
    GET  /metrics    counters and latencies for Prometheus
    GET  /models                    names, versions and labels of all models
    GET  /models/NAME               versions, labels, split, inputs and outputs of a model
    POST /models/NAME               change versions, labels or split
    POST /models/NAME/predict       examples in, probabilities out; by the split, if there is one
    POST /models/NAME/versions/N/predict, /models/NAME/labels/LABEL/predict
    /v1/models/NAME...              as TensorFlow Serving's REST API
    /v2/...                         as the Open Inference Protocol of KServe and Triton

What is served is changed by a request of an operator only: /reload and POST /models/NAME are refused (403) to web pages
of other origins, and under names that are not this machine's.

Threads: requests wait in the event loop. Small ones are predicted there, large ones and Arrow bodies in as many threads
as there are cores; those of a live model, which wait for servers, in more. A reload runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.base.exposition import render
from shoal.base.machine import cores
from shoal.errors import ShoalError
from shoal.serve import protocols
from shoal.serve.bodies import ARROW, JSON, check_usable
from shoal.serve.limits import Account, Budget, Limits, RequestError, TooLargeError, UnavailableError
from shoal.serve.live import LiveModel
from shoal.serve.served import ServedModel
from shoal.serve.versions import ServedVersions, UnknownVersionError, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from shoal.models.predictor import Predictor
    from shoal.serve.served import Model

_SMALL = 8 << 10  # bytes; a smaller body is predicted in the event loop
_LIVE_THREADS = 32
_VERSION_DIGITS = 20
_ONLY = "default"  # the name of a model that was given none, in the protocols of other servers
_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class _Metrics:
    """The Prometheus metrics of one server."""

    def __init__(self, served: Served, budget: Budget) -> None:
        self.registry = CollectorRegistry()
        more: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("shoal_serve_requests", "Prediction requests, by status", ["code"], **more)
        self.examples = Counter("shoal_serve_examples", "Predicted examples", **more)
        self.seconds = Histogram(
            "shoal_serve_seconds", "Seconds from complete body to answer", buckets=_BUCKETS, **more
        )
        self.answers = Counter(
            "shoal_serve_answers", "Answered requests, by model and version", ["model", "version"], **more
        )
        self.unknown = Counter(
            "shoal_serve_unknown_columns",
            "Columns of requests that the model does not know, by model",
            ["model"],
            **more,
        )
        self.closed = Counter("shoal_serve_closed", "Connections closed at a limit, by reason", ["reason"], **more)
        for name, what, read in (
            ("version", "The loaded version", lambda: served.now.version),
            ("reloads", "Versions loaded after the first", lambda: served.reloads),
            ("reload_failures", "Versions that could not be loaded", lambda: served.failures),
            ("held_bytes", "Memory of the requests in progress, in bytes", lambda: budget.held),
        ):
            Gauge(f"shoal_serve_{name}", what, **more).set_function(read)


def one_line(error: Exception) -> str:
    """Describe an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _returned(predictor: Predictor) -> str:
    """Describe the probabilities of an instance."""
    if predictor.is_multiclass:
        return f"of each instance the probabilities of the classes 0 to {predictor.num_classes - 1}"
    return "the probability of label 1 of each instance"


def _json(what: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(what), status, media_type=JSON)


Served = ServedModel | ServedVersions | LiveModel


class _NotFoundError(RequestError):
    """There is no such model, version or label."""

    status = 404


class _ForeignError(RequestError):
    """A change that a web page of another origin may have asked for."""

    status = 403


def _check_origin(request: Request, names: Collection[str]) -> None:
    """Raise _ForeignError if a browser may have sent the request for a page that is not of this server.

    A page of another server has its own Origin. A page whose name was made to lead here (DNS rebinding) has that
    name as Host; numeric addresses and names of this machine cannot be such.
    """
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise _ForeignError(f"a page of {origin[:80]} cannot change what is served: send the request without a browser")
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        name = host
    if name in ("", "localhost") or name.endswith(".localhost") or name in names:
        return
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return
    raise _ForeignError(
        f"what is served cannot be changed at the name {name[:80]!r}: use localhost or a numeric address, or start the "
        "server with --allow-host NAME"
    )


def make_app(
    served: Served | Mapping[str, ServedVersions],
    *,
    limits: Limits | None = None,
    hosts: Collection[str] = (),
    refuse_unknown_columns: bool = False,
) -> Starlette:
    """Make the ASGI application of open models.

    Parameters
    ----------
    served : ServedModel, ServedVersions, LiveModel, or mapping of str to ServedVersions
        What to serve; the caller closes it. A mapping has models by name, the first of which also answers ``/predict``.
    limits : Limits, optional
        Limits of requests. The limits of connections and of time are enforced by `serve`, or by the server that runs
        the application.
    hosts : collection of str, optional
        Names at which ``POST /reload`` and ``POST /models/NAME`` are accepted, besides numeric addresses, localhost and
        this machine's own name. Predictions are answered at any.
    refuse_unknown_columns : bool
        Whether a request with columns that the model does not know is refused (400). They are counted in any case.

    Returns
    -------
    starlette.applications.Starlette
    """
    budget = Budget(limits or Limits())
    named: Mapping[str, ServedVersions] = {} if isinstance(served, Served) else served
    first: Served = served if isinstance(served, Served) else next(iter(served.values()))
    small = 0 if isinstance(first, LiveModel) else _SMALL  # a prediction that waits for servers holds up no other one
    figures = _Metrics(first, budget)
    names = {name.lower().rstrip(".") for name in (*hosts, socket.gethostname())}
    # More threads that compute would slow down the event loop.
    large = asyncio.Semaphore(_LIVE_THREADS if isinstance(first, LiveModel) else cores())

    def chosen(request: Request) -> Model:
        """Return the model of a request: one version throughout."""
        key = request.headers.get("shoal-route")
        if "name" not in request.path_params:
            return first.choose(key=key) if isinstance(first, ServedVersions) else first.now
        label = request.path_params.get("label")
        try:
            one = first if is_only(request) else model_named(request)
            if isinstance(one, ServedVersions):
                return one.choose(version=version_of(request), label=label, key=key)
            if label is not None or version_of(request) not in (None, one.now.version):
                raise UnknownVersionError(f"version {one.now.version} is served, without labels")
            return one.now
        except UnknownVersionError as error:
            raise _NotFoundError(str(error)) from None

    def is_only(request: Request) -> bool:
        return not named and request.path_params["name"] == _ONLY

    def version_of(request: Request) -> int | None:
        text = request.path_params.get("version")
        if text is None or (text.isascii() and text.isdigit() and len(text) < _VERSION_DIGITS):
            return None if text is None else int(text)
        raise UnknownVersionError(f"{text[:80]!r} is not a version: write a number, as in versions/3")

    def model_named(request: Request) -> ServedVersions:
        name = request.path_params["name"]
        if name not in named:
            raise _NotFoundError(f"there is no model {name[:80]!r}: the models are {', '.join(named) or 'not named'}")
        return named[name]

    def predict_now(request: Request, body: bytearray, account: Account, read: protocols.Reader) -> Response:
        model = chosen(request)
        name = request.path_params.get("name", next(iter(named), ""))
        unknown: set[str] = set()
        try:
            batch, write = read(protocols.Request(body, request.headers, name, model, account, unknown))
        except RequestError:
            raise
        except (ValueError, TypeError, OverflowError) as error:  # the message of a reader
            raise RequestError(str(error)) from None
        if unknown:
            figures.unknown.labels(name).inc(len(unknown))
            if refuse_unknown_columns:
                model.inputs.check_known(unknown)
        try:
            predictions = model.predictor.probabilities(batch)
        except ValueError as error:
            raise RequestError(str(error)) from None
        except ShoalError as error:
            if not isinstance(first, LiveModel):
                raise
            first.failed()
            raise UnavailableError(one_line(error)) from None
        check_usable(predictions)
        answer = write(model.version, predictions)
        figures.examples.inc(len(batch))
        figures.answers.labels(name, str(model.version)).inc()
        headers = {"shoal-version": str(model.version), **answer.headers}
        return Response(answer.data, media_type=answer.kind, headers=headers)

    async def predict(request: Request, read: protocols.Reader = protocols.native) -> Response:
        try:
            with Account(budget) as account:
                response = await answered(request, account, read)
        except RequestError as error:
            response = _json({"error": str(error)}, error.status)
            if isinstance(error, UnavailableError):
                response.headers["retry-after"] = "1"
            if not request.scope.get("shoal.received"):
                response.headers["connection"] = "close"  # the rest of the body is not read
        except ClientDisconnect:
            response = Response(status_code=499)  # for the counter only: the client has disconnected
        except Exception:
            figures.requests.labels("500").inc()
            raise
        figures.requests.labels(str(response.status_code)).inc()
        return response

    async def answered(request: Request, account: Account, read: protocols.Reader) -> Response:
        length = request.headers.get("content-length", "0")
        most = budget.limits.body_bytes
        if not length.isdecimal() or int(length[:20]) > most:
            raise TooLargeError(f"a body of {length[:20]} bytes: at most {most} are accepted")
        body = bytearray()
        async for part in request.stream():
            account.body(len(part))
            body += part
        request.scope["shoal.received"] = True
        began = time.perf_counter()
        types = request.headers.get("content-type", "") + request.headers.get("accept", "")
        if len(body) <= small and ARROW not in types:
            response = predict_now(request, body, account, read)
        else:
            async with large:
                response = await run_in_threadpool(predict_now, request, body, account, read)
        figures.seconds.observe(time.perf_counter() - began)
        return response

    async def reload(request: Request) -> Response:
        try:
            _check_origin(request, names)
        except RequestError as error:
            return _json({"error": str(error)}, error.status)
        fresh, failure = False, ""
        for one in named.values() or [first]:
            try:
                fresh |= await run_in_threadpool(one.reload)
            except Exception as error:  # the current version stays; `reload` has logged the error
                failure = one_line(error)
        if failure:
            return _json({"version": first.now.version, "error": failure}, 500)
        return _json({"version": first.now.version, "reloaded": fresh})

    async def healthz(request: Request) -> Response:
        return _json({"status": "ok", "version": first.now.version})

    async def models(request: Request) -> Response:
        found = {
            name: {"versions": [model.version for model in one.models], "labels": one.settings.labels}
            for name, one in named.items()
        }
        return _json({"models": found})

    def described(name: str, one: ServedVersions) -> dict[str, Any]:
        settings, now = one.settings, one.now
        return {
            "name": name,
            "versions": [{"version": model.version, "model": model.kind} for model in one.models],
            "policy": {"latest": settings.latest} if settings.versions is None else {"versions": settings.versions},
            "labels": settings.labels,
            "split": settings.split,
            "takes": now.inputs.describe(),
            "returns": {"probabilities": _returned(now.predictor), "version": "whole number"},
        }

    async def model(request: Request) -> Response:
        try:
            one = model_named(request)
            if request.method == "POST":
                _check_origin(request, names)
                body = bytearray()
                async for part in request.stream():
                    body += part
                    if len(body) > _SMALL:
                        raise TooLargeError(f"settings of more than {_SMALL} bytes")
                try:
                    await run_in_threadpool(one.change, settings_of(bytes(body), one.settings))
                except (ValueError, TypeError, ShoalError) as error:
                    raise RequestError(one_line(error)) from None
            return _json(described(request.path_params["name"], one))
        except RequestError as error:
            return _json({"error": str(error)}, error.status)

    async def versions(request: Request) -> Response:
        now = first.now
        mapped = () if now.exported is None else now.exported.layers.mapped
        layers = [{"directory": one.storage_dir.name, "version": one.manifest.number} for one in mapped]
        tables: dict[str, dict[str, Any]] = {
            table.name: {"dim": table.dim, "dtype": table.spec.dtype} for table in now.predictor.tables
        }
        if now.exported is not None:
            tables = {
                name: {"dim": table.dim, "dtype": table.form.dtype, "bytes": table.nbytes}
                for name, table in now.exported.tables.items()
            }
        takes = now.inputs.describe()
        what = {"version": now.version, "model": now.kind, "layers": layers, "tables": tables, "takes": takes}
        return _json(what)

    def versions_of(request: Request) -> list[int]:
        asked = version_of(request)
        one = first if is_only(request) else model_named(request)
        there = [model.version for model in one.models] if isinstance(one, ServedVersions) else [one.now.version]
        if asked is not None and asked not in there:
            raise UnknownVersionError(f"version {asked} is not loaded: {', '.join(map(str, there))} are")
        return there if asked is None else [asked]

    def told(describe: Callable[[str, list[int], Model], Any]) -> Callable[[Request], Any]:
        """Answer with what is known of a model, or 404."""

        async def endpoint(request: Request) -> Response:
            try:
                return _json(describe(request.path_params["name"], versions_of(request), chosen(request)))
            except (RequestError, UnknownVersionError) as error:
                return _json({"error": str(error)}, 404)

        return endpoint

    def predicts(read: protocols.Reader) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return await predict(request, read)

        return endpoint

    async def server(request: Request) -> Response:
        return _json(protocols.server_metadata())

    async def live(request: Request) -> Response:
        return _json({"live": True})

    async def ready(request: Request) -> Response:
        return _json({"ready": True})

    status = told(lambda name, versions, model: protocols.model_status(versions))
    signature = told(lambda name, versions, model: protocols.model_signature(name, model))
    metadata = told(protocols.model_metadata)
    readiness = told(lambda name, versions, model: {"name": name, "ready": True})
    tensorflow = [
        route
        for at in ("", "/versions/{version}", "/labels/{label}")
        for route in (
            Route(f"/v1/models/{{name}}{at}:predict", predicts(protocols.tensorflow), methods=["POST"]),
            Route(f"/v1/models/{{name}}{at}/metadata", signature),
            Route(f"/v1/models/{{name}}{at}", status),
        )
    ]
    inference = [
        route
        for at in ("", "/versions/{version}")
        for route in (
            Route(f"/v2/models/{{name}}{at}/infer", predicts(protocols.inference), methods=["POST"]),
            Route(f"/v2/models/{{name}}{at}/ready", readiness),
            Route(f"/v2/models/{{name}}{at}", metadata),
        )
    ]

    async def metrics(request: Request) -> Response:
        body, kind = render(figures.registry, ",".join(request.headers.getlist("accept")))
        return Response(body, media_type=kind)

    app = Starlette(
        routes=[
            Route("/predict", predict, methods=["POST"]),
            Route("/reload", reload, methods=["POST"]),
            Route("/healthz", healthz),
            Route("/versions", versions),
            Route("/metrics", metrics),
            Route("/models", models),
            Route("/models/{name}", model, methods=["GET", "POST"]),
            Route("/models/{name}/predict", predict, methods=["POST"]),
            Route("/models/{name}/versions/{version}/predict", predict, methods=["POST"]),
            Route("/models/{name}/labels/{label}/predict", predict, methods=["POST"]),
            *tensorflow,
            Route("/v2", server),
            Route("/v2/health/live", live),
            Route("/v2/health/ready", ready),
            *inference,
        ]
    )
    app.state.closed = lambda reason: figures.closed.labels(reason).inc()
    return app


def serve(
    served: Served | Mapping[str, ServedVersions],
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    reuse_port: bool = False,
    limits: Limits | None = None,
    hosts: Collection[str] = (),
    refuse_unknown_columns: bool = False,
    ready: Callable[[str, int], object] | None = None,
    until: Callable[[Any], object] | None = None,
) -> None:
    """Answer requests until Ctrl-C or SIGTERM; pending requests are completed first.

    Parameters
    ----------
    served : ServedModel, ServedVersions, LiveModel, or mapping of str to ServedVersions
        As for `make_app`.
    host, port
        Where to listen; port 0 is any that is free.
    reuse_port : bool
        Whether several processes may listen on this port: the system distributes connections among them. They share the
        pages of the files.
    limits : Limits, optional
        Limits of requests and connections.
    hosts : collection of str, optional
        As for `make_app`; ``host`` is one of them.
    refuse_unknown_columns : bool
        As for `make_app`.
    ready : callable, optional
        Called with host and port once connections are accepted.
    until : callable, optional
        Called with uvicorn's server before it runs, to end it (``server.should_exit = True``).

    Raises
    ------
    OSError
        The address is in use, or is not an address of this machine.
    """
    try:
        import uvicorn
    except ModuleNotFoundError as error:
        raise ImportError(f"shoal.serve requires {error.name}: pip install 'shoal[serve]'") from error

    from shoal.serve.connections import Listener, Server, protocol

    limits = limits or Limits()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named TCP: only then does the event loop turn off Nagle's algorithm, which delays answers by up to
    # 40 ms.
    with Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((host, port))
        listening.listen(1024)
        app = make_app(served, limits=limits, hosts=(*hosts, host), refuse_unknown_columns=refuse_unknown_columns)
        config = uvicorn.Config(
            app,
            http=protocol(limits, app.state.closed),
            loop="asyncio",  # uvloop accepts connections by itself, without `Listener`
            ws="none",
            log_level="warning",
            log_config=None,
            access_log=False,
            lifespan="off",
        )
        server = Server(config)
        if until is not None:
            until(server)
        if ready is not None:
            ready(host, listening.getsockname()[1])
        server.run(sockets=[listening])
