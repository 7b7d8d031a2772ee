"""Traces of calls for OpenTelemetry: a span for a call, for each of its requests, and for the server's part of it.

    shoal pull                       from the call, before its keys are sorted, until all of it is answered
        shoal request                from the first message to an endpoint until its answer
            shoal server             as long as the answer says that the server took
                shoal shard          as long as it says that the server spent in the rows

A server makes no spans: its times come with the answers (docs/wire-format.md), and the worker places them. Clocks of
machines are not compared: the span of a server is in the middle of what it answered, that of the shard at the end of
the server's.

What happens to a traced call is recorded under the lock of its channel, as numbers. Spans are made from it later,
without the lock, by the thread that waited for the call or by the background thread: what ends with a span is code of
the user, which may be slow.

A store that is not traced uses :class:`.Channel` and :class:`.Requests` themselves, and none of this module.

Invariants
    T1  A call is traced only if its span is recorded: the sampler decides. Otherwise it has no other spans, and asks
        servers for no times.
    T2  A span of a call ends once, when the call is settled, with its error if it has failed. Spans of a call that was
        waited for have ended when the wait returns.
    T3  Errors of OpenTelemetry are logged, and change nothing else.

Threads: any number. `opentelemetry` is imported when a traced store is made.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points, version
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shoal import _core
from shoal.cluster.protocol.ping import NO_WORKER
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.worker.calls import HEADER_BYTES, OPS_WITHOUT_TABLE, Call, CallTrace, RequestPart, WorkerIdentity
from shoal.cluster.worker.channel import CallFuture, Channel
from shoal.cluster.worker.requests import Requests
from shoal.errors import ShoalError
from shoal.table.shard import ShardReader
from shoal.table.spec import TableSpec
from shoal.table.table import Table

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_log = logging.getLogger("shoal.tracing")

Op = _core.Op
Status = _core.Status

_TIMED_OPS = frozenset({Op.PULL, Op.PUSH, Op.TICK, Op.ASSIGN, Op.CONTAINS})  # whose answers can have times
_EXTRA = "pip install 'shoal[otel]'"


class _RequestTrace:
    """What happened to one request of a traced call."""

    __slots__ = ("begun", "bytes", "ended", "events", "is_answered", "keys", "part", "received_bytes", "sent", "times")

    def __init__(self, part: RequestPart) -> None:
        self.part = part
        self.begun = self.sent = time.time_ns()  # first and last time that it was sent
        self.ended = 0
        self.is_answered = False
        self.events: list[tuple[str, int]] = []
        self.times: tuple[int, int] | None = None
        self.keys = part.end - part.begin
        self.bytes = 0  # of all messages
        self.received_bytes = 0


class RecordedCall:
    """A call that is traced: :class:`.CallTrace`."""

    __slots__ = ("_tracer", "context", "ended", "error", "requests", "span")

    def __init__(self, tracer: CallTracer, span: Span, context: Any) -> None:
        self._tracer = tracer
        self.span = span
        self.context = context
        self.requests: dict[RequestPart, _RequestTrace] = {}
        self.ended = 0
        self.error: BaseException | None = None

    def sent(self, part: RequestPart) -> None:
        """Record that a request was sent: for the first time, or again."""
        request = self.requests.get(part)
        if request is None:
            request = self.requests[part] = _RequestTrace(part)
        else:
            request.sent = time.time_ns()
            request.events.append(("resent", request.sent))
        request.bytes += sum(memoryview(frame).nbytes for frame in part.message or ())

    def replied(self, part: RequestPart, status: _core.Status) -> None:
        """Record a reply that is not the answer."""
        request = self.requests.get(part)
        if request is not None:  # which may have ended by it
            request.events.append((status.name.lower().replace("_", " "), request.ended or time.time_ns()))

    def answered(self, part: RequestPart, reply: Any) -> None:
        """Record the answer."""
        request = self.requests[part]
        request.ended = time.time_ns()
        request.is_answered = True
        request.times = reply.times
        request.received_bytes = HEADER_BYTES + reply.payload_bytes

    def given_up(self, part: RequestPart) -> None:
        """Record that no answer is awaited any more: the slots are elsewhere, or the call has failed."""
        request = self.requests.get(part)
        if request is not None and not request.ended:
            request.ended = time.time_ns()

    def settled(self, error: BaseException | None) -> None:
        """Record the end of the call; its spans are made later."""
        if self.ended:
            return
        self.ended = time.time_ns()
        self.error = error
        for part in self.requests:
            self.given_up(part)
        self._tracer.settled(self)


class CallTracer:
    """Makes the spans of a store's calls."""

    def __init__(self) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise ImportError(f"traces require opentelemetry: {_EXTRA}") from error
        self._trace = trace
        self._tracer = trace.get_tracer("shoal", version("shoal"))
        # Names of tables, by their numbers.
        self.table_names: dict[int, str] = {}
        self._settled: deque[RecordedCall] = deque()
        self._thread = threading.local()
        self._ending = threading.RLock()  # held while spans are made: a wait returns when its own are
        self._has_failed = False

    def make_requests(self, worker: WorkerIdentity, map: ClusterMap, *, atomic_clocks: bool) -> Requests:
        """Return requests that record what happens to traced calls."""
        return TracedRequests(worker, map, atomic_clocks=atomic_clocks)

    def make_channel(self, requests: Requests, **options: Any) -> Channel:
        """Return a channel whose calls are traced by this tracer."""
        return TracedChannel(requests, tracer=self, **options)

    def make_table(self, spec: TableSpec, reader: ShardReader, *others: Any) -> Table:
        """Return a table whose calls begin before their keys are sorted."""
        table = TracedTable(spec, reader, *others)
        table.tracer = self
        return table

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Have the first call of this thread in a ``with`` block begin with the block."""
        self._thread.begun = time.time_ns()
        try:
            yield
        finally:
            self._thread.begun = None

    def begin(self, op: int, table: int, clock: int, keys: int | None, worker: WorkerIdentity) -> RecordedCall | None:
        """Begin the span of a call, under the current span of this thread; None: it is not recorded."""
        try:
            attributes: dict[str, str | int] = {"shoal.clock": clock, "shoal.job": worker.job}
            if worker.rank != NO_WORKER:
                attributes["shoal.worker"] = worker.rank
            if op not in OPS_WITHOUT_TABLE:
                attributes["shoal.table"] = self.table_names.get(table, str(table))
            if keys is not None:
                attributes["shoal.keys"] = keys
            begun = getattr(self._thread, "begun", None)
            self._thread.begun = None
            name = f"shoal {Op(op).name.lower().replace('_', ' ')}"
            span = self._tracer.start_span(name, attributes=attributes, start_time=begun)
            if not span.is_recording():
                return None
            return RecordedCall(self, span, self._trace.set_span_in_context(span))
        except Exception as error:
            self._failed(error)
            return None

    def settled(self, trace: RecordedCall) -> None:
        """Keep a call whose spans are to be made."""
        self._settled.append(trace)

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

    def _end(self, trace: RecordedCall) -> None:
        for request in trace.requests.values():
            self._make_request(trace, request)
        span = trace.span
        requests = trace.requests.values()
        span.set_attribute("shoal.requests", len(requests))
        span.set_attribute("shoal.bytes", sum(one.bytes + one.received_bytes for one in requests))
        if trace.error is not None:
            self._set_error(span, trace.error, trace.ended)
        span.end(trace.ended)

    def _set_error(self, span: Span, error: BaseException, at: int) -> None:
        span.record_exception(error, timestamp=at)
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(error)))

    def _make_request(self, trace: RecordedCall, request: _RequestTrace) -> None:
        part = request.part
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
            attributes["shoal.keys"] = request.keys
        kinds = self._trace.SpanKind
        span = self._tracer.start_span(
            "shoal request", trace.context, kinds.CLIENT, attributes, start_time=request.begun
        )
        for name, at in request.events:
            span.add_event(name, timestamp=at)
        if trace.error is not None and not request.is_answered:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, "there was no answer"))
        if request.times is not None:
            begin, end, shard = _place(request, *request.times)
            context = self._trace.set_span_in_context(span)
            server = self._tracer.start_span(
                "shoal server", context, kinds.SERVER, {"shoal.server": part.server}, start_time=begin
            )
            if shard < end:
                context = self._trace.set_span_in_context(server)
                self._tracer.start_span("shoal shard", context, kinds.INTERNAL, start_time=shard).end(end)
            server.end(end)
        span.end(request.ended)


def _place(request: _RequestTrace, server_ns: int, shard_ns: int) -> tuple[int, int, int]:
    """Return begin and end of the server's span, and the begin of the shard's, all within the request.

    The message that was answered is the last one, unless the server had the request for longer.
    """
    sent = request.sent if server_ns <= request.ended - request.sent else request.begun
    server_ns = min(server_ns, request.ended - sent)
    begin = sent + (request.ended - sent - server_ns) // 2
    return begin, begin + server_ns, begin + server_ns - min(shard_ns, server_ns)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _calling(method: _Method) -> _Method:
    @functools.wraps(method)
    def call(self: TracedTable, *arguments: Any, **named: Any) -> Any:
        with self.tracer.calling():
            return method(self, *arguments, **named)

    return cast("_Method", call)


class TracedTable(Table):
    """A table whose calls begin, for their spans, before their keys are sorted."""

    tracer: CallTracer

    pull_async = _calling(Table.pull_async)
    push = _calling(Table.push)
    push_pull = _calling(Table.push_pull)
    assign = _calling(Table.assign)
    erase = _calling(Table.erase)
    contains = _calling(Table.contains)
    state = _calling(Table.state)


class TracedRequests(Requests):
    """Requests that record what happens to the parts of traced calls. It uses the class's own hooks, and no others."""

    def __init__(self, worker: WorkerIdentity, map: ClusterMap, *, atomic_clocks: bool = True) -> None:
        super().__init__(worker, map, atomic_clocks=atomic_clocks)
        self._without_times: set[str] = set()  # addresses of endpoints that do not know the flag

    def _send(self, part: RequestPart, now: float) -> None:
        trace = part.call.trace
        if trace is not None and part.message is None:
            part.timed = part.call.op in _TIMED_OPS and not part.doubts and part.address not in self._without_times
        super()._send(part, now)
        if trace is not None:
            trace.sent(part)

    def receive(self, address: str, frames: Sequence[Any] | _core.ReceivedMessage, now: float) -> bool:
        """As :meth:`.Requests.receive`."""
        name = _core.peek(frames)
        part = None if name is None else self._parts.get((address, *name))
        trace = None if part is None else part.call.trace
        if part is None or trace is None:
            return super().receive(address, frames, now)
        before, part.last = part.last, Status.OK
        is_whole = super().receive(address, frames, now)
        if part.last == Status.OK:
            part.last = before  # answered, or the message was not for it
        elif not part.call.done:
            trace.replied(part, part.last)
            if part.last == Status.BAD_REQUEST and part.timed:
                part.message = None  # the server may not know the flag: sent again without
        return is_whole

    def _answer(self, part: RequestPart, reply: Any, now: float) -> None:
        trace = part.call.trace
        if trace is not None:
            trace.answered(part, reply)
            if part.doubts and not part.timed and part.call.op in _TIMED_OPS:
                self._without_times.add(part.address)
        super()._answer(part, reply, now)

    def _forget(self, part: RequestPart) -> None:
        super()._forget(part)
        if part.call.trace is not None:
            part.call.trace.given_up(part)

    def _settle(self, call: Call, now: float, error: ShoalError | None = None, *, pump: bool = True) -> Call:
        trace = call.trace
        if trace is not None and not call.done:
            call.trace = None
            trace.settled(error)
        return super()._settle(call, now, error, pump=pump)


class TracedChannel(Channel):
    """A channel whose calls are traced."""

    def __init__(self, requests: Requests, *, tracer: CallTracer, **options: Any) -> None:
        self._tracer = tracer
        super().__init__(requests, **options)

    def begin(self, op: int, table: int, **what: Any) -> CallFuture:
        """As :meth:`.Channel.begin`."""
        hashes = what.get("hashes")
        keys = None if hashes is None else len(hashes)
        return self._traced(op, table, keys, lambda trace: Channel.begin(self, op, table, trace=trace, **what))

    def tick(self, trace: CallTrace | None = None) -> CallFuture:
        """As :meth:`.Channel.tick`."""
        return self._traced(Op.TICK, 0, None, lambda trace: Channel.tick(self, trace))

    def _traced(
        self, op: int, table: int, keys: int | None, begin: Callable[[CallTrace | None], CallFuture]
    ) -> CallFuture:
        self.check()
        trace = self._tracer.begin(op, table, self._clock, keys, self._requests.worker)
        try:
            return begin(trace)
        except BaseException as error:
            if trace is not None:
                trace.settled(error)
                self._make_spans()
            raise

    def _make_spans(self) -> None:
        if os.getpid() == self._pid:  # a fork may have copied the lock while it was held
            self._tracer.make_spans()

    def wait(self, call: Call, timeout: float | None = None) -> None:
        """As :meth:`.Channel.wait`; the spans of the call have ended."""
        try:
            super().wait(call, timeout)
        finally:
            self._make_spans()

    def drain(self, timeout: float | None = None) -> None:
        """As :meth:`.Channel.drain`; the spans of the calls have ended."""
        try:
            super().drain(timeout)
        finally:
            self._make_spans()

    def poll(self) -> bool:
        """As :meth:`.Channel.poll`."""
        is_open = super().poll()
        self._tracer.make_spans(wait=False)  # `close` waits for this thread
        return is_open

    def close(self) -> None:
        """As :meth:`.Channel.close`; all spans have ended."""
        super().close()
        self._make_spans()


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
