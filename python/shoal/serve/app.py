"""The routes of the prediction server, and what answers them: requests in, responses out, without a transport.

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

Threads: a Handler answers in any number of threads. The transport, `shoal.serve.server` or `shoal.serve.asgi`, counts
requests and measures their time, and adds these figures to the registry of the handler.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from shoal import _core
from shoal.base.exposition import render
from shoal.errors import ShoalError
from shoal.models.files import EVENT_TIME
from shoal.serve import protocols
from shoal.serve.bodies import JSON, check_usable
from shoal.serve.limits import Account, Budget, Limits, RequestError, TooLargeError, UnavailableError
from shoal.serve.live import LiveModel
from shoal.serve.native import make_handler
from shoal.serve.served import Model, ServedModel
from shoal.serve.versions import ServedVersions, UnknownVersionError, settings_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from shoal.models.predictor import Predictor
    from shoal.serve.served import Model

_log = logging.getLogger(__name__)

PREDICTIONS = ("/predict", ":predict", "/infer")  # what the path of a prediction ends with; its method is POST
_SETTINGS_BYTES = 8 << 10
_VERSION_DIGITS = 20
_ONLY = "default"  # the name of a model that was given none, in the protocols of other servers

Served = ServedModel | ServedVersions | LiveModel


class Request(NamedTuple):
    """A request that has arrived; the names of its headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | bytearray
    account: Account


_At = Mapping[str, str | None]  # what the pattern of a path has found


class Response(NamedTuple):
    """An answer."""

    status: int
    headers: dict[str, str]
    body: bytes


def path_of(target: str) -> str:
    """Return the path of the target of a request."""
    return unquote(target.partition("?")[0])


def _age(model: Model) -> float:
    """Return the seconds since the latest event that a model has learned from."""
    description = (None if model.exported is None else model.exported.model) or {}
    at = description.get(EVENT_TIME, 0)
    return time.time() - at / 1000 if isinstance(at, int) and at > 0 else math.nan


def _json(what: Any, status: int = 200) -> Response:
    return Response(status, {"content-type": JSON}, msgspec.json.encode(what))


def refusal(error: RequestError) -> Response:
    """Answer with an error."""
    response = _json({"error": str(error)}, error.status)
    if isinstance(error, UnavailableError):
        response.headers["retry-after"] = "1"
    return response


class _NotFoundError(RequestError):
    """There is no such path, model, version or label."""

    status = 404


class _ForeignError(RequestError):
    """A change that a web page of another origin may have asked for."""

    status = 403


def one_line(error: Exception) -> str:
    """Describe an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _returned(predictor: Predictor) -> str:
    """Describe the probabilities of an instance."""
    if predictor.is_multiclass:
        return f"of each instance the probabilities of the classes 0 to {predictor.num_classes - 1}"
    return "the probability of label 1 of each instance"


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


def _version_of(at: _At) -> int | None:
    text = at.get("version")
    if text is None or (text.isascii() and text.isdigit() and len(text) < _VERSION_DIGITS):
        return None if text is None else int(text)
    raise UnknownVersionError(f"{text[:80]!r} is not a version: write a number, as in versions/3")


class _Predictions(Collector):
    """What was predicted, by the engine and in Python, for Prometheus."""

    def __init__(self, counters: _core.PredictionCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily("shoal_serve_examples", "Predicted examples", value=self._counters.examples)
        what = "Answered requests, by model and version"
        answers = CounterMetricFamily("shoal_serve_answers", what, labels=["model", "version"])
        for (name, number), count in self._counters.answers().items():
            if count:
                answers.add_metric([name, str(number)], count)
        yield answers
        what = "Columns of requests that the model does not know, by model"
        unknown = CounterMetricFamily("shoal_serve_unknown_columns", what, labels=["model"])
        for name, count in self._counters.unknown().items():
            unknown.add_metric([name], count)
        yield unknown


def names_of(hosts: Any) -> tuple[str, ...]:
    """Return the names of hosts."""
    if isinstance(hosts, str) or not isinstance(hosts, Iterable) or not all(isinstance(one, str) for one in hosts):
        raise TypeError(f"hosts is {hosts!r:.80}: pass a list of names, such as ['predict.example.com']")
    return tuple(hosts)


class Handler:
    """Answers the requests of a prediction server.

    Parameters
    ----------
    served, hosts, refuse_unknown_columns
        As for `shoal.serve.make_app`.
    limits : Limits

    Attributes
    ----------
    budget : Budget
        Of the memory of all requests in progress.
    registry : prometheus_client.CollectorRegistry
        The metrics; a transport adds its own.
    is_live : bool
        Whether a prediction waits for the servers of a cluster.
    """

    def __init__(
        self,
        served: Served | Mapping[str, ServedVersions],
        *,
        limits: Limits,
        hosts: Collection[str] = (),
        refuse_unknown_columns: bool = False,
    ) -> None:
        if not isinstance(limits, Limits):
            raise TypeError(f"limits is {limits!r:.80}: pass shoal.serve.Limits(), or None")
        if not isinstance(served, Served) and not (
            isinstance(served, Mapping) and served and all(isinstance(one, ServedVersions) for one in served.values())
        ):
            raise TypeError(
                f"served is {served!r:.80}: pass a ServedModel, a ServedVersions, a LiveModel, or a mapping of names "
                "to ServedVersions"
            )
        self.budget = Budget(limits)
        self.registry = CollectorRegistry()
        self._named: Mapping[str, ServedVersions] = {} if isinstance(served, Served) else served
        self._first: Served = served if isinstance(served, Served) else next(iter(served.values()))
        self.is_live = isinstance(self._first, LiveModel)
        self._hosts = {name.lower().rstrip(".") for name in (*names_of(hosts), socket.gethostname())}
        self._refuses = refuse_unknown_columns
        self._counters = _core.PredictionCounters()
        self._register_metrics()

    def native(self) -> _core.PredictionHandler | None:
        """Make what answers predictions without Python, of all that is served now; None: nothing does."""
        if isinstance(self._first, LiveModel):
            return None
        return make_handler(
            self._named or {"": self._first},
            only=_ONLY,
            decoded_bytes=self.budget.limits.decoded_bytes,
            refuse_unknown=self._refuses,
            counters=self._counters,
            budget=self.budget.native,
        )

    def when_changed(self, call: Callable[[], None]) -> None:
        """Have a function called after each change of what is served."""
        for one in self._named.values() or [self._first]:
            one.changed = call

    def _register_metrics(self) -> None:
        self.registry.register(_Predictions(self._counters))
        more: dict[str, Any] = {"registry": self.registry}
        for name, what, read in (
            ("version", "The loaded version", lambda: self._first.now.version),
            ("reloads", "Versions loaded after the first", lambda: self._first.reloads),
            ("reload_failures", "Versions that could not be loaded", lambda: self._first.failures),
            ("held_bytes", "Memory of the requests in progress, in bytes", lambda: self.budget.held),
        ):
            Gauge(f"shoal_serve_{name}", what, **more).set_function(read)
        what = "Seconds since the latest event that the served model has learned from; NaN: its time is not known"
        Gauge("shoal_freshness_seconds", what, **more).set_function(lambda: _age(self._first.now))

    def answer(self, request: Request) -> Response:
        """Answer a request; an error is an answer, too."""
        try:
            return self._routed(request)
        except RequestError as error:
            return refusal(error)
        except Exception:
            _log.exception("%s %s", request.method, request.path[:200])
            return _json({"error": "an internal error, which the server has logged"}, 500)

    def _routed(self, request: Request) -> Response:
        for pattern, methods in _ROUTES:
            if found := pattern.fullmatch(request.path):
                endpoint = methods.get("GET" if request.method == "HEAD" else request.method)
                if endpoint is None:
                    allowed = ", ".join(methods)
                    response = _json({"error": f"{request.method[:20]} is not answered there: use {allowed}"}, 405)
                    response.headers["allow"] = allowed
                    return response
                return endpoint(self, request, found.groupdict())
        raise _NotFoundError(f"there is nothing at {request.path[:200]}")

    # ---- models ----

    def _chosen(self, request: Request, at: _At) -> Model:
        """Return the model of a request: one version throughout."""
        first, key = self._first, request.headers.get("shoal-route")
        if "name" not in at:
            return first.choose(key=key) if isinstance(first, ServedVersions) else first.now
        label = at.get("label")
        try:
            one = self._served_at(at)
            if isinstance(one, ServedVersions):
                return one.choose(version=_version_of(at), label=label, key=key)
            if label is not None or _version_of(at) not in (None, one.now.version):
                raise UnknownVersionError(f"version {one.now.version} is served, without labels")
            return one.now
        except UnknownVersionError as error:
            raise _NotFoundError(str(error)) from None

    def _served_at(self, at: _At) -> Served:
        return self._first if not self._named and at["name"] == _ONLY else self._named_at(at)

    def _named_at(self, at: _At) -> ServedVersions:
        name = at["name"] or ""
        if name not in self._named:
            known = ", ".join(self._named) or "not named"
            raise _NotFoundError(f"there is no model {name[:80]!r}: the models are {known}")
        return self._named[name]

    def _versions_at(self, at: _At) -> list[int]:
        asked = _version_of(at)
        one = self._served_at(at)
        there = [model.version for model in one.models] if isinstance(one, ServedVersions) else [one.now.version]
        if asked is not None and asked not in there:
            raise UnknownVersionError(f"version {asked} is not loaded: {', '.join(map(str, there))} are")
        return there if asked is None else [asked]

    # ---- predictions ----

    def _predict(self, request: Request, at: _At, read: protocols.Reader) -> Response:
        model = self._chosen(request, at)
        name = at.get("name") or next(iter(self._named), "")
        unknown: set[str] = set()
        try:
            batch, write = read(protocols.Request(request.body, request.headers, name, model, request.account, unknown))
        except RequestError:
            raise
        except (ValueError, TypeError, OverflowError) as error:  # the message of a reader
            raise RequestError(str(error)) from None
        if unknown:
            self._counters.add_unknown(name, len(unknown))
            if self._refuses:
                model.inputs.check_known(unknown)
        request.account.decoded(model.bytes(batch))
        try:
            predictions = model.probabilities(batch)
        except ValueError as error:
            raise RequestError(str(error)) from None
        except ShoalError as error:
            if not isinstance(self._first, LiveModel):
                raise
            self._first.failed()
            raise UnavailableError(one_line(error)) from None
        check_usable(predictions)
        answer = write(model.version, predictions)
        self._counters.add(name, model.version, len(batch))
        return Response(
            200, {"content-type": answer.kind, "shoal-version": str(model.version), **answer.headers}, answer.data
        )

    # ---- what is served ----

    def _reload(self, request: Request, at: _At) -> Response:
        _check_origin(request, self._hosts)
        fresh, failure = False, ""
        for one in self._named.values() or [self._first]:
            try:
                fresh |= one.reload()
            except Exception as error:  # the current version stays; `reload` has logged the error
                failure = one_line(error)
        if failure:
            return _json({"version": self._first.now.version, "error": failure}, 500)
        return _json({"version": self._first.now.version, "reloaded": fresh})

    def _healthz(self, request: Request, at: _At) -> Response:
        return _json({"status": "ok", "version": self._first.now.version})

    def _models(self, request: Request, at: _At) -> Response:
        found = {
            name: {"versions": [model.version for model in one.models], "labels": one.settings.labels}
            for name, one in self._named.items()
        }
        return _json({"models": found})

    def _model(self, request: Request, at: _At) -> Response:
        one = self._named_at(at)
        settings, now = one.settings, one.now
        return _json(
            {
                "name": at["name"],
                "versions": [{"version": model.version, "model": model.kind} for model in one.models],
                "policy": {"latest": settings.latest} if settings.versions is None else {"versions": settings.versions},
                "labels": settings.labels,
                "split": settings.split,
                "takes": now.inputs.describe(),
                "returns": {"probabilities": _returned(now.predictor), "version": "whole number"},
            }
        )

    def _change(self, request: Request, at: _At) -> Response:
        one = self._named_at(at)
        _check_origin(request, self._hosts)
        if len(request.body) > _SETTINGS_BYTES:
            raise TooLargeError(f"settings of more than {_SETTINGS_BYTES} bytes")
        try:
            one.change(settings_of(bytes(request.body), one.settings))
        except (ValueError, TypeError, ShoalError) as error:
            raise RequestError(one_line(error)) from None
        return self._model(request, at)

    def _versions(self, request: Request, at: _At) -> Response:
        now = self._first.now
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

    def _metrics(self, request: Request, at: _At) -> Response:
        body, kind = render(self.registry, request.headers.get("accept", ""))
        return Response(200, {"content-type": kind}, body)

    def _told(self, request: Request, at: _At, describe: Callable[[str, list[int], Model], Any]) -> Response:
        """Answer with what is known of a model, or 404."""
        try:
            return _json(describe(at["name"] or "", self._versions_at(at), self._chosen(request, at)))
        except (RequestError, UnknownVersionError) as error:
            raise _NotFoundError(str(error)) from None


_Endpoint = Callable[[Handler, Request, _At], Response]


def _predicts(read: protocols.Reader) -> dict[str, _Endpoint]:
    return {"POST": lambda handler, request, at: handler._predict(request, at, read)}


def _tells(describe: Callable[[str, list[int], Model], Any]) -> dict[str, _Endpoint]:
    return {"GET": lambda handler, request, at: handler._told(request, at, describe)}


def _says(what: Callable[[], Any]) -> dict[str, _Endpoint]:
    return {"GET": lambda handler, request, at: _json(what())}


_NAME = "/models/(?P<name>[^/]+)"
_VERSION = "(?:/versions/(?P<version>[^/]+))?"
_WHICH = "(?:/versions/(?P<version>[^/]+)|/labels/(?P<label>[^/]+))?"
# Patterns of paths, and what answers a method there; of several the first. HEAD is answered as GET is.
_TABLE: tuple[tuple[str, dict[str, _Endpoint]], ...] = (
    ("/predict", _predicts(protocols.native)),
    (f"{_NAME}{_WHICH}/predict", _predicts(protocols.native)),
    (f"/v1{_NAME}{_WHICH}:predict", _predicts(protocols.tensorflow)),
    (f"/v2{_NAME}{_VERSION}/infer", _predicts(protocols.inference)),
    ("/healthz", {"GET": Handler._healthz}),
    ("/metrics", {"GET": Handler._metrics}),
    ("/versions", {"GET": Handler._versions}),
    ("/reload", {"POST": Handler._reload}),
    ("/models", {"GET": Handler._models}),
    (_NAME, {"GET": Handler._model, "POST": Handler._change}),
    (f"/v1{_NAME}{_WHICH}/metadata", _tells(lambda name, _, model: protocols.model_signature(name, model))),
    (f"/v1{_NAME}{_WHICH}", _tells(lambda _, versions, model: protocols.model_status(versions))),
    ("/v2", _says(protocols.server_metadata)),
    ("/v2/health/live", _says(lambda: {"live": True})),
    ("/v2/health/ready", _says(lambda: {"ready": True})),
    (f"/v2{_NAME}{_VERSION}/ready", _tells(lambda name, _, model: {"name": name, "ready": True})),
    (f"/v2{_NAME}{_VERSION}", _tells(protocols.model_metadata)),
)
_ROUTES = [(re.compile(pattern), methods) for pattern, methods in _TABLE]
