"""Probes and metrics of a role over HTTP: whether its process runs, whether it is ready, and its counters.

    GET /healthz    200, or 503 if the main loop of the role has not turned for `_STUCK_SECONDS`: start it again
    GET /readyz     200, or 503 while the role does not do all of its work: a line for each reason
    GET /metrics    its metrics (metrics.py) and those of its process, for Prometheus: as OpenMetrics if it accepts that
    GET /           of the scheduler: a page that displays the cluster (view.html), from /view.json

The body is text; a HEAD request gets the same reply without it. While a role starts, for which it has deadlines of its
own, it counts as running. It calls :meth:`HealthServer.turn` in its main loop; everything else happens in threads of
this module, so a probe costs the role nothing.

/healthz decides whether the role is started again, so no client can keep others from it: a request has one deadline
and `_HEAD_BYTES`, a connection above `_MAX_CONNECTIONS` replaces the oldest one, and /healthz waits for no lock of the
role. Of the other replies `_MAX_REPLIES` are made at a time.

Threads: every method may be called from any thread.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Self

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.registry import Collector

from shoal import _core
from shoal.base.exposition import render
from shoal.cluster.protocol.address import bindable, join_address, split
from shoal.cluster.protocol.metrics import COUNTS, NANOSECONDS, Bounds, Metric, RoleMetrics, Values

_log = logging.getLogger(__name__)

_STUCK_SECONDS = 60.0
_MAX_CONNECTIONS = 16
_MAX_REPLIES = 16
_HEAD_BYTES = 16 << 10  # request line and headers together
_PAGE = Path(__file__).with_name("view.html")
_TEXT = "text/plain; charset=utf-8"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_REQUEST_SECONDS = 5.0  # for a client to send its request, and again to receive the reply


def parse_listen(place: int | str) -> str:
    """Return the address that a port or HOST:PORT stands for; a port alone is one of the loopback interface.

    Examples
    --------
    >>> parse_listen(9100), parse_listen("0.0.0.0:9100")
    ('tcp://127.0.0.1:9100', 'tcp://0.0.0.0:9100')
    """
    text = str(place)
    address = f"tcp://{text}" if ":" in text else f"tcp://127.0.0.1:{text}"
    try:
        split(address, wildcard=True)
    except ValueError:
        raise ValueError(f"{text!r} is neither PORT nor HOST:PORT") from None
    return address


class HealthServer:
    """Answers probes from its creation on. A context manager that closes itself."""

    def __init__(self, listen: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turned_at: float | None = None  # the main loop has not begun
        self._unready: Callable[[], Sequence[str]] = _not_joined
        self._view: Callable[[], Mapping[str, Any]] | None = None
        self._metrics = CollectorRegistry()
        ProcessCollector(registry=self._metrics)
        host, port = split(listen, wildcard=True)
        host = bindable(host)
        try:
            self._server = _Server(("" if host == "*" else host, port), self)
        except OSError as error:
            raise ValueError(f"no probes can be answered at {listen}: {error.strerror}; pass another port") from None
        # `http://host:port`.
        self.address = join_address(host, self._server.server_address[1]).replace("tcp://", "http://", 1)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="shoal-health", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def turn(self) -> bool:
        """Note that the main loop turns; returns True."""
        self._turned_at = self._clock()
        return True

    def watch(
        self,
        unready: Callable[[], Sequence[str]],
        role: str,
        metrics: RoleMetrics,
        read: Callable[[], Values],
        rank: int | str | None = None,
        view: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Take the functions of a role that has joined; they are called in other threads."""
        self._view = view
        self._unready = unready
        self._metrics.register(_RoleCollector(unready, role, metrics, read, rank))
        self.turn()

    def reply(self, path: str, accept: str) -> tuple[int, bytes, str]:
        """Return status, body and content type of the reply to a request with this header Accept."""
        if self._view is not None and path == "/":
            return 200, _PAGE.read_bytes(), "text/html; charset=utf-8"
        if self._view is not None and path == "/view.json":
            return 200, msgspec.json.encode(self._view()), "application/json"
        if path == "/metrics":
            return 200, *render(self._metrics, accept)
        status, text = self.answer(path)
        return status, text.encode(), _TEXT

    def answer(self, path: str) -> tuple[int, str]:
        """Return the status and the text of the reply to a probe."""
        if path == "/healthz":
            still = 0.0 if self._turned_at is None else self._clock() - self._turned_at
            if still > _STUCK_SECONDS:
                return 503, f"the main loop has not turned for {still:.0f} s\n"
            return 200, "ok\n"
        if path == "/readyz":
            reasons = self._unready()
            return (503, "".join(f"{reason}\n" for reason in reasons)) if reasons else (200, "ready\n")
        page = "" if self._view is None else "/, /view.json, "
        return 404, f"there are {page}/healthz, /readyz and /metrics\n"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _not_joined() -> list[str]:
    return ["it has not joined the cluster"]


class _RoleCollector(Collector):
    """The metrics of a role, read when they are asked for."""

    def __init__(
        self,
        unready: Callable[[], Sequence[str]],
        role: str,
        metrics: RoleMetrics,
        read: Callable[[], Values],
        rank: int | str | None,
    ) -> None:
        self._unready = unready
        self._role = role
        self._metrics = metrics
        self._read = read
        self._labels = {} if rank is None else {"rank": str(rank)}

    def collect(self) -> Iterator[Family]:
        values = self._read()
        yield _build()
        yield self._family("ready", Metric("gauge", "Whether /readyz answers 200"), not self._unready())
        for name, metric in self._metrics.items():
            if name in values or not metric.is_optional:
                yield self._family(name, metric, values.get(name, 0 if metric.is_single else {}))

    def _family(self, name: str, metric: Metric, value: Any) -> Family:
        name, own = metric.full_name(self._role, name), list(self._labels.values())
        labels = [*self._labels, *([metric.label] if metric.label else [])]
        if metric.kind == "histogram":
            histogram = HistogramMetricFamily(name, metric.help, labels=labels)
            if not metric.label and value:
                histogram.add_metric(own, _cumulative(value, COUNTS), sum_value=None)
            for label, found in value.items() if metric.label else ():
                histogram.add_metric([*own, label], _cumulative(found.counts, NANOSECONDS), sum_value=found.seconds)
            return histogram
        make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = make(name, metric.help, labels=labels)
        for label, number in value.items() if metric.label else [("", value)]:
            family.add_metric([*own, str(label)] if metric.label else own, number)
        return family


def _build() -> Family:
    """Return the metric that names the version; joined with others it distinguishes versions."""
    compiled = _core.build_info()
    facts = {"version": importlib.metadata.version("shoal"), "compiler": str(compiled["compiler"])}
    return InfoMetricFamily("shoal_build", "The version of shoal and the compiler of its engine", value=facts)


def _cumulative(counts: Mapping[int, int], bounds: Bounds) -> list[tuple[str, float]]:
    """Return the buckets of a histogram from how often numbers from each key on, up to a power of two, occurred.

    Examples
    --------
    >>> _cumulative({0: 5, 2: 1, 16: 3}, COUNTS)[:4]
    [('0', 5.0), ('1', 5.0), ('3', 6.0), ('7', 6.0)]
    """
    found, total, rest = [], 0, sorted(counts.items(), reverse=True)
    for end, text in bounds:
        while rest and rest[-1][0] < end:
            total += rest.pop()[1]
        found.append((text, float(total)))
    return [*found, ("+Inf", float(sum(counts.values())))]


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], health: HealthServer) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.health = health
        self.replies = threading.BoundedSemaphore(_MAX_REPLIES)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # the oldest first
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= _MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):  # the client has ended it
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # no connection is shut down whose descriptor belongs to another by now
            self._open.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that end their connections, or are too slow."""
        if not isinstance(error := sys.exc_info()[1], OSError):
            _log.error("a request to the metrics port failed", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def handle(self) -> None:
        head = self._receive()
        self.connection.settimeout(_REQUEST_SECONDS)
        if head is None:
            self.connection.sendall(b"HTTP/1.0 431 Request Header Fields Too Large\r\n\r\n")
        else:
            self.rfile = io.BytesIO(head)
            super().handle()

    def _receive(self) -> bytes | None:
        """Receive a request line and headers; return None if there are too many."""
        head, deadline = bytearray(), time.monotonic() + _REQUEST_SECONDS
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self.connection.settimeout(left)
            part = self.connection.recv(_HEAD_BYTES + 1 - len(head))
            if not part:
                raise ConnectionResetError
            head += part
            if len(head) > _HEAD_BYTES:
                return None
        return bytes(head)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        status, body, kind = self._reply(path)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if path == "/":
            self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reply(self, path: str) -> tuple[int, bytes, str]:
        reply, accept = self.server.health.reply, ",".join(self.headers.get_all("Accept", []))
        if path == "/healthz":
            return reply(path, accept)
        if not self.server.replies.acquire(blocking=False):
            return 503, b"%d requests are being answered: try again\n" % _MAX_REPLIES, _TEXT
        try:
            return reply(path, accept)
        finally:
            self.server.replies.release()

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests: probes come every few seconds."""
