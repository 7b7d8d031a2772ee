"""Traces of calls for OpenTelemetry: a span for a call, for each of its requests, and for the server's part of it.

    shoal pull                       from the call until all of it is answered
        shoal request                from the first message to an endpoint until its answer
            shoal server             as long as the answer says that the server took
                shoal shard          as long as it says that the server spent in the rows

A server makes no spans: its times come with the answers (docs/wire-format.md), and the worker places them. Clocks of
machines are not compared: the span of a server is in the middle of what it answered, that of the shard at the end of
the server's.

The client keeps the times of a traced call (csrc/client). Spans are made from them once it is settled, without a lock
of the client, by the thread that waited for the call or by the background thread: what ends with a span is code of the
user, which may be slow.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points, version
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal import _core
from shoal.cluster.protocol.address import socket_path
from shoal.cluster.protocol.ping import NO_WORKER

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from shoal.errors import ShoalError
    from shoal.table.arrays import Counts, Rows

_log = logging.getLogger("shoal.tracing")

_OPS_WITHOUT_TABLE = frozenset({_core.Op.TICK, _core.Op.SAVE_BEGIN, _core.Op.SAVE_POLL, _core.Op.SAVE_END})
_EXTRA = "pip install 'shoal[otel]'"


class _Request(NamedTuple):
    """One request of a traced call, as `_core.Client.take_traced` has it. Times are of time.monotonic()."""

    address: str
    server: int
    keys: int
    begun: float  # first time that it was sent
    sent: float  # last time
    ended: float
    bytes: int  # of all messages
    received_bytes: int
    is_answered: bool
    times: tuple[int, int] | None  # nanoseconds in the server, of those in the shard
    events: list[tuple[str, float]]


def _place(begun: int, sent: int, ended: int, server_ns: int, shard_ns: int) -> tuple[int, int, int]:
    """Return begin and end of the server's span, and the begin of the shard's, all within the request.

    The message that was answered is the last one, unless the server had the request for longer.
    """
    sent = sent if server_ns <= ended - sent else begun
    server_ns = min(server_ns, ended - sent)
    begin = sent + (ended - sent - server_ns) // 2
    return begin, begin + server_ns, begin + server_ns - min(shard_ns, server_ns)


class _Trace:
    """The span of a call that is not settled."""

    def __init__(self, span: Span, context: Any, has_keys: bool) -> None:
        self.span = span
        self.context = context  # with the span, for those of its requests
        self.has_keys = has_keys
        self._offset = time.time_ns() - time.monotonic_ns()

    def ns(self, now: float) -> int:
        """Return a time of the client as OpenTelemetry has it."""
        return int(now * 1e9) + self._offset


class TracedCalls:
    """The calls of a client, each in a span: the methods of ``_core.Client`` that submit calls."""

    def __init__(self, client: _core.Client, tracer: CallTracer, rank: int, job: int) -> None:
        self._client = client
        self._tracer = tracer
        self._rank = rank
        self._job = job

    def of_rows(self, rows: _core.CachedRows, table: int) -> TracedRows:
        """Return the calls of a cache, each in a span."""
        return TracedRows(self, rows, table)

    def in_span(self, op: int, table: int, keys: int | None, submit: Callable[[bool], _core.Call]) -> _core.Call:
        """Submit a call, traced or not, in a span if it is recorded."""
        trace = self._tracer.begin(op, table, self._client.clock, keys, self._rank, self._job)
        try:
            call = submit(trace is not None)
        except BaseException as error:
            if trace is not None:
                self._tracer.refused(trace, error)
            raise
        if trace is not None:
            self._tracer.submitted(trace, call.serial)
        return call

    def pull(
        self,
        table: int,
        batch: _core.KeyBatch,
        rows: Rows,
        dim: int,
        filter: _core.Filter | None = None,
        after: Iterable[_core.Call] = (),
        ahead: int = 0,
    ) -> _core.Call:
        """Read the row of each unique key."""
        submit = partial(self._client.pull, table, batch, rows, dim, filter, after, ahead)
        return self.in_span(_core.Op.PULL, table, len(batch), submit)

    def pull_per_key(
        self,
        table: int,
        batch: _core.KeyBatch,
        rows: Rows,
        dim: int,
        pool: _core.ThreadPool,
        filter: _core.Filter | None = None,
        after: Iterable[_core.Call] = (),
        follows: _core.Call | None = None,
    ) -> _core.Call:
        """Read the row of each key as given."""
        submit = partial(self._client.pull_per_key, table, batch, rows, dim, pool, filter, after, follows)
        return self.in_span(_core.Op.PULL, table, len(batch), submit)

    def push(
        self,
        table: int,
        batch: _core.KeyBatch | _core.SummedBatch,
        grads: Rows,
        dim: int,
        counts: Counts | None = None,
        filter: _core.Filter | None = None,
        after: Iterable[_core.Call] = (),
    ) -> _core.Call:
        """Apply one step with a gradient for each unique key."""
        submit = partial(self._client.push, table, batch, grads, dim, counts, filter, after)
        return self.in_span(_core.Op.PUSH, table, len(batch), submit)

    def push_per_key(
        self,
        table: int,
        batch: _core.KeyBatch,
        grads: Rows,
        dim: int,
        pool: _core.ThreadPool,
        integers: bool = False,
        counts: Counts | None = None,
        filter: _core.Filter | None = None,
        after: Iterable[_core.Call] = (),
    ) -> _core.Call:
        """Apply one step with a gradient for each key as given."""
        submit = partial(self._client.push_per_key, table, batch, grads, dim, pool, integers, counts, filter, after)
        return self.in_span(_core.Op.PUSH, table, len(batch), submit)

    def begin(self, op: int, table: int, *, after: Iterable[_core.Call] = (), **what: Any) -> _core.Call:
        """Start any other call."""
        hashes = what.get("hashes")
        keys = None if hashes is None else len(hashes)
        return self.in_span(
            op, table, keys, lambda traced: self._client.begin(op, table, after=after, traced=traced, **what)
        )

    def tick(self) -> _core.Call:
        """End the clock."""
        return self.in_span(_core.Op.TICK, 0, None, self._client.tick)


class TracedRows:
    """The calls of a cache, each in a span: the methods of ``_core.CachedRows`` that submit calls."""

    def __init__(self, calls: TracedCalls, rows: _core.CachedRows, table: int) -> None:
        self._rows = rows
        self._pull = partial(calls.in_span, _core.Op.PULL, table)
        self._push = partial(calls.in_span, _core.Op.PUSH, table)

    def pull(self, batch: _core.KeyBatch, rows: Rows, after: Iterable[_core.Call] = ()) -> _core.Call:
        """Read the row of each unique key."""
        return self._pull(len(batch), partial(self._rows.pull, batch, rows, after, False))

    def pull_per_key(
        self,
        batch: _core.KeyBatch,
        rows: Rows,
        pool: _core.ThreadPool,
        after: Iterable[_core.Call] = (),
        fresh: bool = False,
    ) -> _core.Call:
        """Read the row of each key as given."""
        return self._pull(len(batch), partial(self._rows.pull_per_key, batch, rows, pool, after, fresh))

    def push(
        self,
        batch: _core.KeyBatch | _core.SummedBatch,
        grads: Rows,
        counts: Counts | None = None,
        after: Iterable[_core.Call] = (),
    ) -> _core.Call:
        """Apply one step with a gradient for each unique key."""
        return self._push(len(batch), partial(self._rows.push, batch, grads, counts, after))

    def push_per_key(
        self,
        batch: _core.KeyBatch,
        grads: Rows,
        pool: _core.ThreadPool,
        counts: Counts | None = None,
        after: Iterable[_core.Call] = (),
    ) -> _core.Call:
        """Apply one step with a gradient for each key as given."""
        return self._push(len(batch), partial(self._rows.push_per_key, batch, grads, pool, counts, after))


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
        self._lock = threading.RLock()  # held while spans are made: a wait returns when its own are
        self._under_way: dict[int, _Trace] = {}  # by the serials of their calls
        # Settled before they were known here: the end, the error, the messages.
        self._early: dict[int, tuple[float, ShoalError | None, list[_core._PartTrace]]] = {}
        self._has_failed = False

    def traced(self, client: _core.Client, rank: int, job: int) -> TracedCalls:
        """Return the calls of a worker's client, each in a span."""
        return TracedCalls(client, self, rank, job)

    def begin(self, op: int, table: int, clock: int, keys: int | None, rank: int, job: int) -> _Trace | None:
        """Begin the span of a call, under the current span of this thread; None: it is not recorded."""
        try:
            attributes: dict[str, str | int] = {"shoal.clock": clock, "shoal.job": job}
            if rank != NO_WORKER:
                attributes["shoal.worker"] = rank
            has_table = op not in _OPS_WITHOUT_TABLE
            if has_table:
                attributes["shoal.table"] = self.table_names.get(table, str(table))
            if keys is not None:
                attributes["shoal.keys"] = keys
            span = self._tracer.start_span(
                f"shoal {_core.Op(op).name.lower().replace('_', ' ')}", attributes=attributes
            )
            return _Trace(span, self._trace.set_span_in_context(span), has_table) if span.is_recording() else None
        except Exception as error:
            self._failed(error)
            return None

    def submitted(self, trace: _Trace, serial: int) -> None:
        """Keep the span of a call until it is settled."""
        with self._lock:
            early = self._early.pop(serial, None)
            if early is None:
                self._under_way[serial] = trace
            else:
                self._try_to_end(trace, *early)

    def refused(self, trace: _Trace, error: BaseException) -> None:
        """End the span of a call that was not submitted."""
        self._try_to_end(trace, time.monotonic(), error, [])

    def make_spans(self, settled: Sequence[_core._CallTrace]) -> None:
        """Make the spans of calls that are settled.

        Not to be called with a lock that a span's end may need.
        """
        with self._lock:
            for serial, at, error, parts in settled:
                trace = self._under_way.pop(serial, None)
                if trace is None:
                    self._early[serial] = at, error, parts
                else:
                    self._try_to_end(trace, at, error, parts)

    def _failed(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.warning("spans are lost, this is reported once: %r", error)

    def _try_to_end(self, trace: _Trace, at: float, error: BaseException | None, parts: list[_core._PartTrace]) -> None:
        try:
            self._end(trace, at, error, [_Request(*part) for part in parts])
        except Exception as failed:
            self._failed(failed)

    def _end(self, trace: _Trace, at: float, error: BaseException | None, requests: list[_Request]) -> None:
        for request in requests:
            self._make_request(trace, at, error, request)
        span, ended = trace.span, trace.ns(at)
        span.set_attribute("shoal.requests", len(requests))
        span.set_attribute("shoal.bytes", sum(request.bytes + request.received_bytes for request in requests))
        if error is not None:
            span.record_exception(error, timestamp=ended)
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(error)))
        span.end(ended)

    def _make_request(self, trace: _Trace, settled: float, error: BaseException | None, request: _Request) -> None:
        path = socket_path(request.address)
        host, _, port = request.address.removeprefix("tcp://").rpartition(":")
        attributes: dict[str, str | int] = {
            "shoal.server": request.server,
            "server.address": host.strip("[]") if path is None else path,
            "shoal.request.bytes": request.bytes,
            "shoal.reply.bytes": request.received_bytes,
        }
        if path is None and port.isdigit():
            attributes["server.port"] = int(port)
        if trace.has_keys:
            attributes["shoal.keys"] = request.keys
        begun, sent, ended = (trace.ns(at) for at in (request.begun, request.sent, request.ended or settled))
        kinds = self._trace.SpanKind
        span = self._tracer.start_span("shoal request", trace.context, kinds.CLIENT, attributes, start_time=begun)
        for name, at in request.events:
            span.add_event(name, timestamp=trace.ns(at))
        if error is not None and not request.is_answered:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, "there was no answer"))
        if request.times is not None:
            begin, end, shard = _place(begun, sent, ended, *request.times)
            context = self._trace.set_span_in_context(span)
            server = self._tracer.start_span(
                "shoal server", context, kinds.SERVER, {"shoal.server": request.server}, start_time=begin
            )
            if shard < end:
                context = self._trace.set_span_in_context(server)
                self._tracer.start_span("shoal shard", context, kinds.INTERNAL, start_time=shard).end(end)
            server.end(end)
        span.end(ended)


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
