"""Traces of calls for OpenTelemetry: a span for a call, for each of its requests, and for the server's part of it.

    shoal pull                       from the call until all of it is answered
        shoal request                from the first message to an endpoint until its answer
            shoal server             as long as the answer says that the server took
                shoal shard          as long as it says that the server spent in the rows

A server makes no spans: its times come with the answers (docs/wire-format.md), and the worker places them. Clocks of
machines are not compared: the span of a server is in the middle of what it answered, that of the shard at the end of
the server's.

The requests note in `Call.trace` what happens to a traced call, under the lock of their channel. Spans are made from
these notes later, without the lock, by the thread that waited for the call or by the background thread: what ends with
a span is code of the user, which may be slow. A call that is not traced has no `Call.trace`.

Invariants
    T1  A call is traced only if its span is recorded: the sampler decides. Otherwise it has no other spans, and asks
        servers for no times.
    T2  A span of a call ends once, when the call is settled, with its error if it has failed. Spans of a call that was
        waited for have ended when the wait returns.
    T3  Errors of OpenTelemetry are logged, and change nothing else.

Threads: any number. `opentelemetry` is imported when a traced store is made.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from importlib.metadata import entry_points, version
from typing import TYPE_CHECKING, Any

from shoal import _core
from shoal.cluster.protocol.ping import NO_WORKER
from shoal.cluster.worker.calls import HEADER_BYTES, OPS_WITHOUT_TABLE, RequestPart, WorkerIdentity

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_log = logging.getLogger("shoal.tracing")

_EXTRA = "pip install 'shoal[otel]'"


class _Request:
    """What happened to one request of a traced call. Times are nanoseconds of `Trace.ns`."""

    def __init__(self, begun: int) -> None:
        self.begun = self.sent = begun  # first and last time that it was sent
        self.ended = 0  # 0: with its call
        self.events: list[tuple[str, int]] = []
        self.bytes = self.received_bytes = 0  # of all messages
        self.times: tuple[int, int] | None = None  # of the server
        self.is_answered = False

    def place(self, server_ns: int, shard_ns: int) -> tuple[int, int, int]:
        """Return begin and end of the server's span, and the begin of the shard's, all within the request.

        The message that was answered is the last one, unless the server had the request for longer.
        """
        sent = self.sent if server_ns <= self.ended - self.sent else self.begun
        server_ns = min(server_ns, self.ended - sent)
        begin = sent + (self.ended - sent - server_ns) // 2
        return begin, begin + server_ns, begin + server_ns - min(shard_ns, server_ns)


class Trace:
    """A traced call: :class:`.CallTrace`."""

    def __init__(self, span: Span, context: Any, settled: deque[Trace]) -> None:
        self.span = span
        self.context = context  # with the span, for those of its requests
        self.requests: dict[RequestPart, _Request] = {}
        self.ended = 0
        self.error: BaseException | None = None
        self._settled = settled
        self._offset = time.time_ns() - time.monotonic_ns()

    def ns(self, now: float) -> int:
        """Return a time of the requests as OpenTelemetry has it."""
        return int(now * 1e9) + self._offset

    def note(self, part: RequestPart, what: str, now: float, detail: Any = None) -> None:
        """Note that a request was "sent" (the frames), "answered" (the reply) or "ended", or another reply's status."""
        at = self.ns(now)
        request = self.requests.get(part)
        if what == "sent":
            if request is None:
                request = self.requests[part] = _Request(at)
            else:
                request.sent = at
                request.events.append(("resent", at))
            request.bytes += sum(memoryview(frame).nbytes for frame in detail)
        elif request is None:
            pass  # it was never sent
        elif what == "answered":
            request.is_answered, request.times = True, detail.times
            request.received_bytes = HEADER_BYTES + detail.payload_bytes
        elif what == "ended":
            request.ended = at
        else:
            request.events.append((what, at))

    def end(self, error: BaseException | None, now: float) -> None:
        """Note the end of the call; its spans are made later."""
        self.ended, self.error = self.ns(now), error
        for request in self.requests.values():
            request.ended = request.ended or self.ended
        self._settled.append(self)


class CallTracer:
    """Makes the spans of a store's calls. ``table_names`` are the names of tables, by their numbers."""

    def __init__(self) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise ImportError(f"traces require opentelemetry: {_EXTRA}") from error
        self._trace = trace
        self._tracer = trace.get_tracer("shoal", version("shoal"))
        self.table_names: dict[int, str] = {}
        self._settled: deque[Trace] = deque()
        self._ending = threading.RLock()  # held while spans are made: a wait returns when its own are
        self._has_failed = False

    def begin(self, op: int, table: int, clock: int, keys: int | None, worker: WorkerIdentity) -> Trace | None:
        """Begin the span of a call, under the current span of this thread; None: it is not recorded."""
        try:
            attributes: dict[str, str | int] = {"shoal.clock": clock, "shoal.job": worker.job}
            if worker.rank != NO_WORKER:
                attributes["shoal.worker"] = worker.rank
            if op not in OPS_WITHOUT_TABLE:
                attributes["shoal.table"] = self.table_names.get(table, str(table))
            if keys is not None:
                attributes["shoal.keys"] = keys
            span = self._tracer.start_span(
                f"shoal {_core.Op(op).name.lower().replace('_', ' ')}", attributes=attributes
            )
            return Trace(span, self._trace.set_span_in_context(span), self._settled) if span.is_recording() else None
        except Exception as error:
            self._failed(error)
            return None

    def make_spans(self, *, wait: bool = True) -> None:
        """Make the spans of the calls that were settled; without `wait`, not while another thread does.

        Not to be called with a lock that a span's end may need.
        """
        if not self._ending.acquire(wait):
            return
        try:
            while self._settled:
                try:
                    self._end(self._settled.popleft())
                except Exception as error:
                    self._failed(error)
        finally:
            self._ending.release()

    def _failed(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.warning("spans are lost, this is reported once: %r", error)

    def _end(self, trace: Trace) -> None:
        for part, request in trace.requests.items():
            self._make_request(trace, part, request)
        span, requests = trace.span, trace.requests.values()
        span.set_attribute("shoal.requests", len(requests))
        span.set_attribute("shoal.bytes", sum(request.bytes + request.received_bytes for request in requests))
        if trace.error is not None:
            span.record_exception(trace.error, timestamp=trace.ended)
            span.set_attribute("error.type", type(trace.error).__name__)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(trace.error)))
        span.end(trace.ended)

    def _make_request(self, trace: Trace, part: RequestPart, request: _Request) -> None:
        host, _, port = part.address.removeprefix("tcp://").rpartition(":")
        attributes: dict[str, str | int] = {
            "shoal.server": part.server,
            "server.address": host.strip("[]"),
            "shoal.request.bytes": request.bytes,
            "shoal.reply.bytes": request.received_bytes,
        }
        if port.isdigit():
            attributes["server.port"] = int(port)
        if part.call.op not in OPS_WITHOUT_TABLE:
            attributes["shoal.keys"] = part.end - part.begin
        kinds = self._trace.SpanKind
        span = self._tracer.start_span(
            "shoal request", trace.context, kinds.CLIENT, attributes, start_time=request.begun
        )
        for name, at in request.events:
            span.add_event(name, timestamp=at)
        if trace.error is not None and not request.is_answered:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, "there was no answer"))
        if request.times is not None:
            begin, end, shard = request.place(*request.times)
            context = self._trace.set_span_in_context(span)
            server = self._tracer.start_span(
                "shoal server", context, kinds.SERVER, {"shoal.server": part.server}, start_time=begin
            )
            if shard < end:
                context = self._trace.set_span_in_context(server)
                self._tracer.start_span("shoal shard", context, kinds.INTERNAL, start_time=shard).end(end)
            server.end(end)
        span.end(request.ended)


def set_up_exporter(environment: Mapping[str, str] = os.environ) -> None:
    """Set up the SDK of OpenTelemetry from its environment variables, unless the program has."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ImportError(f"exporting traces requires the SDK of OpenTelemetry and an exporter: {_EXTRA}") from error
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return
    exporter = _find_exporter(environment)
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "shoal"}))
    provider = TracerProvider(resource=resource)
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def _find_exporter(environment: Mapping[str, str]) -> Any:
    name = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if name == "none":
        return None
    if name == "otlp":
        variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
        protocol = next((environment[one] for one in variables if environment.get(one)), "http/protobuf")
        if protocol not in ("http/protobuf", "grpc"):
            raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: pass http/protobuf or grpc")
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    package = "shoal[otel]" if name == "otlp_proto_http" else f"opentelemetry-exporter-{name.replace('_', '-')}"
    for entry in entry_points(group="opentelemetry_traces_exporter", name=name):
        try:
            return entry.load()()
        except ImportError as error:
            raise ImportError(f"the exporter {name} of traces cannot be imported: pip install '{package}'") from error
    raise ImportError(f"the exporter {name} of traces is not installed: pip install '{package}'")
