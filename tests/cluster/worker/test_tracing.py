"""Traces of calls: which spans there are, what they say, and that there are none where none are wanted."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest

import shoal
from channel_peer import ME, Peer, answer, eventually, push
from cluster_fakes import TIMEOUT
from cluster_standin import cluster
from forks import in_child
from maps import map_of
from shoal._core import Op, Policy, Status
from shoal.cli import main
from shoal.cluster.worker.channel import Channel, Role
from stores import joined

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry is an extra: pip install 'shoal[otel]'")

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import SpanKind, StatusCode

from shoal.cluster.worker import tracing
from shoal.cluster.worker.tracing import CallTracer

KEYS = np.arange(1000, dtype=np.uint64)
ONES = np.ones(1000, np.float32)
SGD = {"optimizer": shoal.SGD(lr=1.0)}


class _Sampler(Sampler):
    """One that a test can change: the provider of a process cannot be replaced."""

    root: Sampler = ALWAYS_ON

    def should_sample(self, *arguments, **named):
        return ParentBased(self.root).should_sample(*arguments, **named)

    def get_description(self):
        return "of the tests"


class _Ends(SpanProcessor):
    """Calls a function of a test with each span that ends."""

    def __init__(self):
        self.call = None

    def on_end(self, span):
        if self.call is not None:
            self.call(span)


EXPORTER, SAMPLER, ENDS = InMemorySpanExporter(), _Sampler(), _Ends()


class Spans:
    """The spans that have ended."""

    @property
    def all(self):
        return EXPORTER.get_finished_spans()

    def named(self, name):
        return [span for span in self.all if span.name == f"shoal {name}"]

    def one(self, name):
        (span,) = self.named(name)
        return span

    def below(self, span):
        """The children, in the order of their servers."""
        found = [one for one in self.all if one.parent is not None and one.parent.span_id == span.context.span_id]
        return sorted(found, key=lambda one: one.attributes.get("shoal.server", 0))

    def clear(self):
        EXPORTER.clear()


@pytest.fixture
def spans():
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        provider = TracerProvider(sampler=SAMPLER, shutdown_on_exit=False)
        provider.add_span_processor(ENDS)
        provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
        trace.set_tracer_provider(provider)
    EXPORTER.clear()
    yield Spans()
    SAMPLER.root, ENDS.call = ALWAYS_ON, None


def connect(address, **how):
    return shoal.connect(address, timeout=TIMEOUT, threads=1, tracing=True, **how)


@contextlib.contextmanager
def traced(*peers, others=(), resend_after=TIMEOUT):
    """A traced channel to these peers; they and others end with it."""
    tracer = CallTracer()
    role = Role(ME, map_of(1, *(peer.range for peer in peers)))
    policy = Policy(resend_after=resend_after, pause=0.001)
    with contextlib.ExitStack() as stack:
        for peer in (*peers, *others):
            stack.callback(peer.close)
        yield stack.enter_context(contextlib.closing(Channel(role, timeout=TIMEOUT, policy=policy, tracer=tracer)))


def is_within(span, outer):
    return outer.start_time <= span.start_time <= span.end_time <= outer.end_time


# ---- what there is ---------------------------------------------------------------------------------------------------


def test_a_call_by_way_of_a_cache_has_the_spans_of_what_was_sent_for_it(spans):
    cache = shoal.Cache(rows=4000, staleness=3)
    with cluster(2) as made, connect(made.address, consistency=shoal.ASP(), cache=cache) as store:
        table = store.table("user", dim=1, **SGD)
        for requests in (2, 0):
            table.pull(KEYS)
            assert spans.one("pull").attributes["shoal.requests"] == requests
            assert len(spans.below(spans.one("pull"))) == len(spans.named("request")) == requests
            spans.clear()
        table.push(KEYS, ONES[:, None]).result()
        assert spans.one("push").attributes["shoal.requests"] == 0
        spans.clear()
        store.flush()
        table.push(KEYS[:5], ONES[:5, None]).result()
        assert spans.one("push").attributes["shoal.requests"] == len(spans.below(spans.one("push"))) > 0


def test_a_pull_of_two_servers_has_a_span_for_itself_each_request_each_server_and_its_rows(spans):
    with cluster(2) as made, connect(made.address, consistency=shoal.ASP()) as store:
        table = store.table("user", dim=3, **SGD)
        table.push(KEYS, np.ones((1000, 3), np.float32)).result()
        spans.clear()
        sent, received = (store.metrics()[name] for name in ("bytes_sent", "bytes_received"))
        table.pull(KEYS)
        sent, received = store.metrics()["bytes_sent"] - sent, store.metrics()["bytes_received"] - received
    call = spans.one("pull")
    assert (call.kind, call.status.status_code) == (SpanKind.INTERNAL, StatusCode.UNSET)
    assert dict(call.attributes) == {
        "shoal.table": "user",
        "shoal.keys": 1000,
        "shoal.clock": 0,
        "shoal.worker": 0,
        "shoal.job": call.attributes["shoal.job"],
        "shoal.requests": 2,
        "shoal.bytes": sent + received,
    }
    requests = spans.below(call)
    assert [one.name for one in requests] == ["shoal request"] * 2
    assert [one.attributes["shoal.server"] for one in requests] == [0, 1]
    assert sum(one.attributes["shoal.keys"] for one in requests) == 1000
    assert sum(one.attributes["shoal.request.bytes"] for one in requests) == sent
    assert sum(one.attributes["shoal.reply.bytes"] for one in requests) == received
    for request in requests:
        assert (request.kind, request.events, request.status.status_code) == (SpanKind.CLIENT, (), StatusCode.UNSET)
        assert request.attributes["server.address"] == "127.0.0.1"
        assert request.attributes["server.port"] > 0
        (server,) = spans.below(request)
        (shard,) = spans.below(server)
        assert (server.name, server.kind, shard.name) == ("shoal server", SpanKind.SERVER, "shoal shard")
        assert server.attributes["shoal.server"] == request.attributes["shoal.server"]
        assert is_within(request, call)
        assert is_within(server, request)
        assert is_within(shard, server)
        assert shard.start_time < shard.end_time
    assert len(spans.all) == 7


def test_the_span_of_the_caller_is_the_parent_also_if_the_call_ends_in_another_thread(spans):
    tracer = trace.get_tracer("test")
    with cluster() as made, connect(made.address, consistency=shoal.ASP()) as store:
        table = store.table("t", **SGD)
        spans.clear()
        with tracer.start_as_current_span("step") as step:
            future = table.pull_async(KEYS)
        thread = threading.Thread(target=future.result)
        thread.start()
        thread.join()
        with tracer.start_as_current_span("next") as following:
            table.pull(KEYS)
    parents = [span.parent.span_id for span in spans.named("pull")]
    assert parents == [step.get_span_context().span_id, following.get_span_context().span_id]


def test_a_push_that_is_not_waited_for_has_ended_after_a_flush_and_by_itself(spans):
    with cluster() as made, connect(made.address, consistency=shoal.ASP()) as store:
        table = store.table("t", **SGD)
        table.push(KEYS, ONES)
        store.flush()
        assert len(spans.named("push")) == 1
        table.push(KEYS, ONES)
        eventually(lambda: len(spans.named("push")) == 2)
        table.push(KEYS, ONES)
    assert len(spans.named("push")) == 3


def test_under_bsp_the_last_tick_has_the_time_of_the_step_and_a_pull_that_waited_says_so(spans):
    with cluster() as made, joined(made.address, 2, consistency=shoal.BSP(), tracing=True) as (one, two):
        table, _ = one.table("t", **SGD), two.table("t", **SGD)
        spans.clear()
        table.push(KEYS, ONES).result()
        one.tick()
        one.flush()
        ahead = table.pull_async(KEYS)
        eventually(lambda: one.metrics().get("deferred") == 1)
        two.tick()
        two.flush()
        ahead.result()
    (kept,) = spans.below(spans.below(spans.one("push"))[0])
    assert spans.below(kept) == []  # the rows were not touched yet
    ticks = {span.attributes["shoal.worker"]: span for span in spans.named("tick")}
    for rank, steps in ((0, 0), (1, 1)):
        assert "shoal.table" not in ticks[rank].attributes
        (request,) = spans.below(ticks[rank])
        (server,) = spans.below(request)
        assert len(spans.below(server)) == steps
    pull = spans.one("pull")
    assert pull.attributes["shoal.clock"] == 1
    (request,) = spans.below(pull)
    assert [event.name for event in request.events] == ["deferred"]
    (server,) = spans.below(request)
    # It was there from before the first reply until after the tick had begun.
    waited = ticks[1].start_time - request.events[0].timestamp
    assert waited > 0
    assert server.end_time - server.start_time >= waited * 1023 // 1024
    (shard,) = spans.below(server)
    assert shard.end_time == server.end_time


def test_other_calls_have_spans_without_the_times_of_servers(spans):
    with cluster() as made, connect(made.address, consistency=shoal.ASP()) as store:
        table = store.table("t", **SGD)
        table.assign(KEYS, ONES)
        spans.clear()
        table.erase(KEYS[:3])
        table.contains(KEYS)
        table.stats()
    assert spans.below(spans.below(spans.one("erase"))[0]) == []
    assert spans.below(spans.below(spans.one("stats"))[0]) == []
    assert [one.name for one in spans.below(spans.below(spans.one("contains"))[0])] == ["shoal server"]


def test_a_reader_is_traced_without_a_rank(spans):
    with cluster() as made, connect(made.address, consistency=shoal.ASP()) as store:
        store.table("t", **SGD).push(KEYS, ONES).result()
        with connect(made.address, mode="read") as reader:
            spans.clear()
            reader.table("t").pull(KEYS)
    call = spans.one("pull")
    assert "shoal.worker" not in call.attributes
    assert call.attributes["shoal.table"] == "t"


def test_a_launched_cluster_is_traced(spans):
    with shoal.launch(tracing=True, timeout=TIMEOUT) as store:
        table = store.table("t", **SGD)
        table.push(KEYS, ONES).result()
        table.pull(KEYS)
    (server,) = spans.below(spans.below(spans.one("pull"))[0])
    assert server.name == "shoal server"


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_message_that_was_lost_is_an_event_of_its_request(spans):
    peer = Peer(0, 16, lambda number, asked: [] if number == 1 else None)
    with traced(peer, resend_after=0.05) as channel:
        push(channel, [1, 2, 3]).result()
    (request,) = spans.below(spans.one("push"))
    assert {event.name for event in request.events} == {"resent"}
    assert all(request.start_time <= event.timestamp <= request.end_time for event in request.events)
    assert request.status.status_code == StatusCode.UNSET
    assert len({bytes(asked.hashes) for asked in peer.asked}) == 1
    assert spans.below(request) == []  # this service has no clock


@pytest.mark.slow
def test_the_span_of_a_server_is_in_the_middle_of_the_message_that_it_answered(spans):
    def script(number, asked):
        if number == 1:
            return []
        time.sleep(0.01)
        return answer(asked, Status.OK, timed=True, aux=300 << 16 | 1000)

    peer = Peer(0, 16, script)
    with traced(peer, resend_after=0.5) as channel:
        push(channel, [1]).result()
    (request,) = spans.below(spans.one("push"))
    (server,) = spans.below(request)
    (shard,) = spans.below(server)
    resent = request.events[-1]
    assert server.end_time - server.start_time == 1000
    assert shard.end_time - shard.start_time == 300
    assert shard.end_time == server.end_time
    before, after = server.start_time - resent.timestamp, request.end_time - server.end_time
    assert abs(before - after) <= 1


def test_times_that_are_longer_than_the_request_are_cut_to_it(spans):
    peer = Peer(0, 16, lambda number, asked: answer(asked, Status.OK, timed=True, aux=0xFFFFFFFF))
    with traced(peer) as channel:
        push(channel, [1]).result()
    (request,) = spans.below(spans.one("push"))
    (server,) = spans.below(request)
    (shard,) = spans.below(server)
    for span in (server, shard):
        assert (span.start_time, span.end_time) == (request.start_time, request.end_time)


def test_a_call_that_fails_has_its_error_and_so_have_its_requests_without_an_answer(spans):
    silent, other = Peer(0, 8, lambda *_: []), Peer(8, 16)
    with traced(silent, other) as channel:
        future = push(channel, range(100))
        eventually(lambda: channel.metrics().get("answers") == 1)
        channel.fail(shoal.NotConnectedError("the scheduler is gone"))
        with pytest.raises(shoal.NotConnectedError, match="is gone"):
            future.result()
        call = spans.one("push")
        assert call.status.status_code == StatusCode.ERROR
        assert call.attributes["error.type"] == "NotConnectedError"
        (event,) = call.events
        assert event.name == "exception"
        assert event.attributes["exception.message"] == call.status.description
        requests = {one.attributes["server.port"]: one.status for one in spans.below(call)}
        ports = [int(peer.address.rpartition(":")[2]) for peer in (silent, other)]
        assert requests[ports[0]].description == "there was no answer"
        assert requests[ports[1]].status_code == StatusCode.UNSET


@pytest.mark.slow
def test_a_refused_call_has_the_text_of_the_server(spans):
    with cluster() as made, connect(made.address, consistency=shoal.ASP()) as store:
        table = store.table("t", dim=2, **SGD)
        batch = store.key_batch(KEYS)
        wide = np.ones((1000, 3), np.float32)
        future = store.channel.begin(
            Op.PUSH, table.shard.number, hashes=batch.hashes, begins=batch.native.offsets, values=wide, dim=3
        )
        with pytest.raises(shoal.errors.ProtocolError, match="has dim 2"):
            future.result()
        assert "has dim 2" in spans.one("push").status.description
        assert {event.name for event in spans.below(spans.one("push"))[0].events} == {"bad request", "resent"}


def test_a_call_that_cannot_begin_has_a_span_with_its_error(spans):
    peer = Peer(0, 16)
    with traced(peer) as channel:
        with pytest.raises(ValueError, match="needs hashes"):
            channel.begin(Op.PUSH, 0, dim=2)
        assert spans.one("push").attributes["error.type"] == "ValueError"


def test_slots_that_are_elsewhere_end_a_request_and_begin_another_one(spans):
    old, new = Peer(0, 16), Peer(0, 16)
    old.endpoint.set_map(2, [])
    new.endpoint.set_map(2, [(0, 16)])
    with traced(old, others=[new]) as channel:
        future = push(channel, [1, 2, 3])
        eventually(lambda: channel.metrics().get("refused"))
        channel.set_map(map_of(2, new.range))
        future.result()
    call = spans.one("push")
    assert call.status.status_code == StatusCode.UNSET
    refused, taken = sorted(spans.below(call), key=lambda one: one.start_time)
    assert [event.name for event in refused.events] == ["wrong epoch"]
    assert refused.events[0].timestamp == refused.end_time <= taken.start_time
    assert refused.status.status_code == StatusCode.UNSET
    assert taken.events == ()


def test_what_fails_at_the_end_of_a_span_is_logged_once_and_fails_no_call(spans, caplog):
    def fail(span):
        raise RuntimeError("no exporter")

    peer = Peer(0, 16)
    with traced(peer) as channel:
        ENDS.call = fail
        for _ in range(2):
            push(channel, [1]).result()
        ENDS.call = None
        push(channel, [1]).result()
    assert len(spans.named("push")) == 1
    assert [record.getMessage() for record in caplog.records if record.name == "shoal.tracing"] == [
        "spans are lost, this is reported once: RuntimeError('no exporter')"
    ]


def test_what_is_called_at_the_end_of_a_span_may_call_the_store(spans):
    with cluster() as made, connect(made.address, consistency=shoal.ASP()) as store:
        table = store.table("t", **SGD)
        table.push(KEYS, ONES).result()
        seen = []

        def read(span):
            if span.name == "shoal pull" and not seen:
                seen.append(None)
                seen.append(float(table.pull(KEYS[:1])[0, 0]))

        ENDS.call = read
        table.pull(KEYS)
        eventually(lambda: len(seen) == 2)
        assert seen == [None, -1.0]


# ---- what there is not -----------------------------------------------------------------------------------------------


def test_a_call_that_is_not_sampled_has_no_spans_and_asks_for_no_times(spans):
    peer = Peer(0, 16)
    with traced(peer) as channel:
        SAMPLER.root = ALWAYS_OFF
        push(channel, [1]).result()
        channel.tick().result()
        SAMPLER.root = ALWAYS_ON
        push(channel, [1]).result()
    assert [asked.timed for asked in peer.asked] == [False, False, True]
    assert [span.name for span in spans.all if span.parent is None] == ["shoal push"]


@pytest.mark.slow
def test_without_tracing_nothing_of_it_is_used_and_opentelemetry_is_not_imported(true_starts):
    program = """
import sys, numpy as np, shoal
with shoal.launch() as store:
    table = store.table("t")
    table.push(np.arange(9, dtype=np.uint64), np.ones(9, np.float32)).result()
    store.tick()
    table.pull(np.arange(9, dtype=np.uint64))
print(sorted(name for name in sys.modules if "opentelemetry" in name or name.endswith("worker.tracing")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert done.stdout.splitlines() == ["[]"]


def test_an_untraced_store_sends_no_flag():
    peer = Peer(0, 16)
    channel = Channel(Role(ME, map_of(1, peer.range)), timeout=TIMEOUT)
    push(channel, [1]).result()
    channel.close()
    peer.close()
    assert not peer.asked[0].timed


def test_a_fork_of_a_traced_store_raises_as_that_of_any_other_also_while_spans_are_made(spans):
    with cluster() as made, connect(made.address, consistency=shoal.ASP()) as store:
        table = store.table("t", **SGD)
        future = table.pull_async(KEYS)
        is_making, may_end = threading.Event(), threading.Event()

        def make(span):
            is_making.set()
            may_end.wait(TIMEOUT)

        ENDS.call = make
        thread = threading.Thread(target=future.result)
        thread.start()
        assert is_making.wait(TIMEOUT)

        def use():
            with pytest.raises(shoal.errors.WrongProcessError):
                table.pull(KEYS)
            future.result()  # it was done before the fork
            return "raised"

        try:
            assert in_child(use) == "raised"
        finally:
            may_end.set()
            thread.join(TIMEOUT)


# ---- how it is asked for ---------------------------------------------------------------------------------------------


def test_wrong_settings_are_refused(monkeypatch):
    with pytest.raises(TypeError, match="tracing is True or False, got 'yes'"):
        shoal.connect("tcp://127.0.0.1:1", tracing="yes")
    monkeypatch.setenv("SHOAL_TRACING", "yes")
    with pytest.raises(ValueError, match="SHOAL_TRACING='yes' in the environment: set it to 1"):
        shoal.connect("tcp://127.0.0.1:1")


def test_without_opentelemetry_the_error_names_the_extra(monkeypatch):
    for name in ("opentelemetry", "opentelemetry.trace"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"traces require opentelemetry: pip install 'shoal\[otel\]'"):
        shoal.connect("tcp://127.0.0.1:1", tracing=True)
    monkeypatch.setenv("SHOAL_TRACING", "1")
    with pytest.raises(ImportError, match=r"requires the SDK .* pip install 'shoal\[otel\]'"):
        shoal.connect("tcp://127.0.0.1:1")


def set_up(variables):
    """Set up the SDK in a child with a provider of its own; return what it is."""

    def work():
        trace._TRACER_PROVIDER, trace._TRACER_PROVIDER_SET_ONCE._done = None, False
        os.environ.update(variables)
        try:
            tracing.set_up_exporter(os.environ)
        except (ImportError, ValueError) as error:
            return json.dumps(str(error))
        provider = trace.get_tracer_provider()
        processors = provider._active_span_processor._span_processors
        exporters = [type(one.span_exporter).__name__ for one in processors]
        tracing.set_up_exporter({"OTEL_TRACES_EXPORTER": "nonsense"})  # changes nothing: there is one
        return json.dumps([provider.resource.attributes["service.name"], exporters])

    return json.loads(in_child(work))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, ["shoal", ["OTLPSpanExporter"]]),
        ({"OTEL_SERVICE_NAME": "ads"}, ["ads", ["OTLPSpanExporter"]]),
        ({"OTEL_TRACES_EXPORTER": "console"}, ["shoal", ["ConsoleSpanExporter"]]),
        ({"OTEL_TRACES_EXPORTER": "none"}, ["shoal", []]),
        (
            {"OTEL_TRACES_EXPORTER": "zipkin"},
            "the exporter zipkin of traces is not installed: pip install 'opentelemetry-exporter-zipkin'",
        ),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=http/json: pass http/protobuf or grpc",
        ),
    ],
)
def test_the_environment_chooses_the_exporter_unless_the_program_has(variables, found):
    assert set_up(variables) == found


@pytest.mark.slow
def test_an_exporter_for_grpc_that_is_missing_is_named():
    found = set_up({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert found == ["shoal", ["OTLPSpanExporter"]] or "pip install 'opentelemetry-exporter-otlp-proto-grpc'" in found


class Collector(http.server.BaseHTTPRequestHandler):
    """Receives spans by OTLP over HTTP."""

    names: ClassVar[list[tuple[str, str]]] = []  # of the service, of the span

    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_spans:
            (service,) = [one.value.string_value for one in resource.resource.attributes if one.key == "service.name"]
            self.names += [(service, span.name) for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_variables_of_the_environment_are_enough_to_export_what_a_launched_program_does(tmp_path, true_starts):
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, shoal\n"
        "with shoal.connect(consistency=shoal.ASP()) as store:\n"
        "    store.table('t').pull(np.arange(9, dtype=np.uint64))\n"
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        port = collector.server_address[1]
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_SERVICE_NAME": "ads"}
        command = [sys.executable, "-m", "shoal", "launch", "--tracing", "--threads", "1", str(program)]
        done = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        collector.shutdown()
    assert (done.returncode, done.stderr) == (0, "")
    found = Counter(Collector.names)
    assert {found["ads", f"shoal {name}"] for name in ("pull", "request", "server", "shard")} == {1}


def test_the_command_line_refuses_traces_without_a_cluster(tmp_path, capsys):
    data = tmp_path / "examples.libsvm"
    data.write_text("1 3:1\n0 4:1\n" * 10)
    assert main(["train", "lr", "--data", str(data), "--output", str(tmp_path / "model"), "--tracing"]) == 2
    assert "--tracing requires --cluster" in capsys.readouterr().err
    assert main(["launch", "--engine", "ray", "--tracing", "program.py"]) == 2
    assert "set SHOAL_TRACING=1 there" in capsys.readouterr().err
