"""The prediction server: the engine's HTTP server, and threads that answer the requests which it hands out.

    the engine's I/O thread    connections, HTTP, limits: csrc/http
    "predictions"              a thread for each core; of a live model, whose predictions wait for servers, more
    "reads"                    one thread: what it answers takes no time, and no prediction holds it up
    "changes"                  one thread: a reload may take minutes
    "grpc"                     if there is a port for it: `shoal.serve.grpc_server`

Requests that arrive too slowly, are too large or too many never reach Python. The main thread waits for signals, and
logs what the engine has counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from shoal import _core
from shoal.base.machine import cores
from shoal.base.scalars import whole
from shoal.serve.app import PREDICTIONS, Handler, Request, names_of, path_of
from shoal.serve.asgi import LIVE_THREADS
from shoal.serve.limits import Account, Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from shoal.serve.app import Served
    from shoal.serve.grpc_server import GrpcServer
    from shoal.serve.versions import ServedVersions

_log = logging.getLogger(__name__)

_RESERVED_DESCRIPTORS = 48  # for files, sockets and pipes other than connections
_TAKE_SECONDS = 60.0
_MOST_PORT = (1 << 16) - 1
_LOOK_SECONDS = 1.0
_QUIET_SECONDS = 60.0  # between two lines of a kind
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Figures(Collector):
    """What the engine's server has counted, for Prometheus."""

    def __init__(self, native: _core.HttpServer) -> None:
        self._native = native

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        found = self._native.counters()
        requests = CounterMetricFamily("shoal_serve_requests", "Prediction requests, by status", labels=["code"])
        for status, count in found["requests"].items():
            requests.add_metric([str(status)], count)
        yield requests
        closed = CounterMetricFamily(
            "shoal_serve_closed", "Connections closed at a limit, by reason", labels=["reason"]
        )
        for reason, count in found["closed"].items():
            closed.add_metric([reason], count)
        yield closed
        buckets, below = [], 0
        for bound, count in zip((*map(str, _core.HTTP_SECONDS), "+Inf"), found["buckets"], strict=True):
            below += count
            buckets.append((bound, below))
        seconds = HistogramMetricFamily("shoal_serve_seconds", "Seconds from complete body to answer")
        seconds.add_metric([], buckets, found["seconds"])
        yield seconds


class _Notices:
    """Logs what happens to connections, once a minute for each kind."""

    def __init__(self) -> None:
        self._seen = {"no_descriptors": 0, "bad": 0}
        self._logged = dict.fromkeys(self._seen, -_QUIET_SECONDS)

    def look(self, native: _core.HttpServer) -> None:
        """Log what is new."""
        found = native.counters()
        if self._is_due("no_descriptors", found["no_descriptors"]):
            _log.warning(
                "new connections wait: %s; raise the limit (ulimit -n) or lower --max-connections",
                os.strerror(found["descriptor_error"]),
            )
        bad = self._seen["bad"]
        if self._is_due("bad", found["closed"]["bad"]):
            _log.warning("%d requests were not HTTP/1.1: answered 400", found["closed"]["bad"] - bad)

    def _is_due(self, kind: str, count: int) -> bool:
        now = time.monotonic()
        if count == self._seen[kind] or now - self._logged[kind] < _QUIET_SECONDS:
            return False
        self._seen[kind], self._logged[kind] = count, now
        return True


def usable_connections(wanted: int) -> int:
    """Return the number of connections that the process has descriptors for, at most ``wanted``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    usable = max(1, min(wanted, soft - _RESERVED_DESCRIPTORS))
    if usable < wanted:
        _log.warning("%d connections at a time: the process may open few files (ulimit -n)", usable)
    return usable


def _work(native: _core.HttpServer, handler: Handler, lane: str) -> None:
    """Answer the requests of a lane until the server has stopped."""
    while not native.stopped:
        taken = native.take(lane, _TAKE_SECONDS)
        if taken is None:
            continue
        number, method, target, headers, body = taken
        with Account(handler.budget, received=len(body)) as account:
            response = handler.answer(Request(method, path_of(target), headers, body, account))
        try:
            native.answer(number, response.status, response.headers, response.body)
        except ValueError:  # a header that would be two
            _log.exception("the answer to %s %s", method, target[:200])
            native.answer(number, 500, {}, b"")


@contextlib.contextmanager
def _signals(ended: threading.Event, hurry: threading.Event) -> Iterator[None]:
    """Have Ctrl-C and SIGTERM set the first event, then the second; they take their effect at the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def catch(number: int, frame: Any) -> None:
        caught.append(number)
        (hurry if ended.is_set() else ended).set()

    before = {number: signal.signal(number, catch) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])


def _stop(native: _core.HttpServer, rpc: GrpcServer | None, seconds: float, hurry: threading.Event) -> None:
    """Complete the requests in progress, until the time is over or the event is set."""
    stopping = threading.Thread(target=native.stop, args=(seconds,), name="shoal-serve-stop")
    stopping.start()
    calls = None if rpc is None else rpc.stop(seconds)
    while stopping.is_alive() or (calls is not None and not calls.done()):
        stopping.join(0.1)
        if hurry.is_set():
            native.stop(0.0)
            calls = None
    stopping.join()
    if rpc is not None:
        rpc.close()


def _start_grpc(handler: Handler, host: str, port: int, reuse_port: bool) -> GrpcServer:
    try:
        from shoal.serve.grpc_server import GrpcServer
    except ImportError as error:
        raise ImportError("gRPC requires grpcio and protobuf: pip install 'shoal[grpc]'") from error
    return GrpcServer(handler, host=host, port=port, reuse_port=reuse_port)


def serve(
    served: Served | Mapping[str, ServedVersions],
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    grpc_port: int | None = None,
    reuse_port: bool = False,
    limits: Limits | None = None,
    hosts: Collection[str] = (),
    refuse_unknown_columns: bool = False,
    ready: Callable[[str, int, int | None], object] | None = None,
    until: threading.Event | None = None,
) -> None:
    """Answer requests until Ctrl-C or SIGTERM; pending requests are completed first.

    Parameters
    ----------
    served : ServedModel, ServedVersions, LiveModel, or mapping of str to ServedVersions
        As for `make_app`.
    host, port
        Where to listen; port 0 is any that is free.
    grpc_port : int, optional
        Where the Open Inference Protocol is answered over gRPC, too. Needs the extra ``grpc``.
    reuse_port : bool
        Whether several processes may listen on this port: the system distributes connections among them. They share the
        pages of the files.
    limits : Limits, optional
        Limits of requests and connections. Pending requests have ``request_seconds`` to be completed at the end; a
        second signal closes them.
    hosts : collection of str, optional
        As for `make_app`; ``host`` is one of them.
    refuse_unknown_columns : bool
        As for `make_app`.
    ready : callable, optional
        Called with host, port and port of gRPC once connections are accepted.
    until : threading.Event, optional
        Ends the server, as a signal does, when it is set.

    Raises
    ------
    OSError
        The address is in use, or is not an address of this machine.
    ImportError
        The extra ``grpc`` is missing.
    """
    limits, ended, hurry = limits or Limits(), until or threading.Event(), threading.Event()
    for name, number in (("port", port), ("grpc_port", grpc_port)):
        if number is not None and whole(name, number) > _MOST_PORT:
            raise ValueError(f"{name} is {number}: pass 0 to {_MOST_PORT}")
    handler = Handler(
        served, limits=limits, hosts=(*names_of(hosts), host), refuse_unknown_columns=refuse_unknown_columns
    )
    native = _core.HttpServer(
        handler.budget.native,
        host=host,
        port=port,
        reuse_port=reuse_port,
        connections=usable_connections(limits.connections),
        body_bytes=limits.body_bytes,
        request_seconds=limits.request_seconds,
        threads=cores(),
        predictions=PREDICTIONS,
    )
    handler.registry.register(_Figures(native))
    handler.when_changed(lambda: native.set_fast(handler.native()))
    native.set_fast(handler.native())
    rpc = None if grpc_port is None else _start_grpc(handler, host, grpc_port, reuse_port)
    lanes = ["predictions"] * (LIVE_THREADS if handler.is_live else cores()) + ["reads", "changes"]
    threads = [
        threading.Thread(target=_work, args=(native, handler, lane), name=f"shoal-serve-{lane}") for lane in lanes
    ]
    notices = _Notices()
    with _signals(ended, hurry):
        try:
            for thread in threads:
                thread.start()
            if ready is not None:
                ready(host, native.port, None if rpc is None else rpc.port)
            while not ended.wait(_LOOK_SECONDS):
                notices.look(native)
        finally:
            _stop(native, rpc, limits.request_seconds, hurry)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
