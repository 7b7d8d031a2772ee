"""Probes and metrics of the roles over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import prometheus_client.parser
import pytest
from prometheus_client.openmetrics import parser as openmetrics

import shoal
from cluster_fakes import TIMEOUT, FakeServer, HeldPort, scheduler
from http_probe import (
    get,
    until,
)
from shoal.base.exposition import accepts_openmetrics
from shoal.cli import main
from shoal.cluster.launch.local_cluster import running
from shoal.cluster.protocol import metrics as metrics_of
from shoal.cluster.protocol.health import _MAX_CONNECTIONS, _MAX_REPLIES, HealthServer, parse_listen
from shoal.cluster.protocol.messages import Leave, LeaveReply
from shoal.cluster.protocol.metrics import Durations
from shoal.cluster.protocol.slot_map import Arc, ClusterMap, Endpoint, Stream
from shoal.cluster.server.assignment import ServerControl


def metrics(url: str) -> dict[str, float]:
    """Return the samples of `/metrics`, labels included in their names."""
    status, text = get(f"{url}/metrics")
    assert status == 200
    families = prometheus_client.parser.text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {f"{one.name}{''.join(f'|{value}' for value in one.labels.values())}": one.value for one in samples}


@pytest.fixture
def health():
    with HealthServer("tcp://127.0.0.1:*", clock=lambda: now[0]) as made:
        now = [0.0]
        made.now = now
        yield made


def test_a_role_that_starts_is_alive_and_not_ready(health):
    health.now[0] = 1e6
    assert get(f"{health.address}/healthz") == (200, "ok\n")
    assert get(f"{health.address}/readyz") == (503, "it has not joined the cluster\n")
    assert get(f"{health.address}/other") == (404, "there are /healthz, /readyz and /metrics\n")


def test_the_paths_of_a_page_are_named_where_it_is(health):
    health.watch(list, "scheduler", metrics_of.SCHEDULER, dict, view=dict)
    assert get(f"{health.address}/other") == (404, "there are /, /view.json, /healthz, /readyz and /metrics\n")


@pytest.mark.parametrize(("path", "status"), [("/healthz", 200), ("/readyz", 503), ("/other", 404)])
def test_head_is_answered_as_get_without_the_body(health, path, status):
    replies = []
    for method in ("GET", "HEAD"):
        connection = http.client.HTTPConnection(health.address.removeprefix("http://"), timeout=TIMEOUT)
        with contextlib.closing(connection):
            connection.request(method, path)
            reply = connection.getresponse()
            replies.append((reply.status, reply.headers["Content-Length"], reply.headers["Content-Type"]))
            assert bool(reply.read()) == (method == "GET")
    assert replies[0] == replies[1]
    assert replies[0][0] == status


def test_a_role_is_alive_while_its_main_loop_turns(health):
    health.watch(list, "server", metrics_of.SERVER, dict)
    health.now[0] = 60.0
    assert get(f"{health.address}/healthz") == (200, "ok\n")
    health.now[0] = 61.0
    assert get(f"{health.address}/healthz?x=1") == (503, "the main loop has not turned for 61 s\n")
    assert health.turn()
    assert get(f"{health.address}/healthz") == (200, "ok\n")


def test_each_reason_has_a_line(health):
    reasons = ["a", "b"]
    health.watch(lambda: reasons, "server", metrics_of.SERVER, dict)
    assert get(f"{health.address}/readyz") == (503, "a\nb\n")
    reasons.clear()
    assert get(f"{health.address}/readyz") == (200, "ready\n")


def test_metrics_are_read_when_they_are_asked_for(health):
    assert "process_cpu_seconds_total" in metrics(health.address)  # of a role that has not joined yet
    reasons, values = ["a"], {"messages": 3, "pending_bytes": 5, "another": 7}
    health.watch(lambda: reasons, "server", metrics_of.SERVER, lambda: values, rank=2)
    found = {name: value for name, value in metrics(health.address).items() if name.startswith("shoal_server")}
    assert found.pop("shoal_server_ready|2") == 0
    assert found.pop("shoal_server_messages_total|2") == 3
    assert found.pop("shoal_server_pending_bytes|2") == 5
    single = [one.full_name("server", key) for key, one in metrics_of.SERVER.items() if one.is_single]
    assert len(found) == sum(name.startswith("shoal_server") for name in single) - 2
    assert set(found.values()) == {0}
    values["messages"] = 4
    reasons.clear()
    found = metrics(health.address)
    assert found["shoal_server_messages_total|2"] == 4
    assert found["shoal_server_ready|2"] == 1
    with urllib.request.urlopen(f"{health.address}/metrics", timeout=TIMEOUT) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=")
        assert "# TYPE shoal_server_messages_total counter" in reply.read().decode()


def test_the_number_of_workers_is_described_as_that_of_all_jobs(health):
    health.watch(list, "scheduler", metrics_of.SCHEDULER, lambda: {"workers": 3})
    text = get(f"{health.address}/metrics")[1]
    assert "# HELP shoal_scheduler_workers Workers of all jobs\n" in text
    assert "\nshoal_scheduler_workers 3.0\n" in text


PROMETHEUS_ACCEPTS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


def test_a_scraper_that_accepts_openmetrics_gets_it(health):
    durations = {"pull": Durations(0.5, {1 << 20: 3})}
    values = {"messages": 3, "request_duration": durations, "push_staleness": {0: 2}, "table_rows": {'a "b"': 7}}
    health.watch(list, "server", metrics_of.SERVER, lambda: values, rank=2)
    request = urllib.request.Request(f"{health.address}/metrics", headers={"Accept": PROMETHEUS_ACCEPTS})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
        assert reply.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        text = reply.read().decode()
    assert text.endswith("# EOF\n")
    families = {family.name: family for family in openmetrics.text_string_to_metric_families(text)}
    assert families["shoal_server_messages"].samples[0].value == 3
    assert families["shoal_server_request_duration_seconds"].type == "histogram"
    assert "shoal_push_staleness_steps" in families
    plain = {name.partition("|")[0] for name in metrics(health.address)}
    assert plain == {sample.name for family in families.values() for sample in family.samples}


@pytest.mark.parametrize(
    "accept",
    ["", "*/*", "text/plain", "application/openmetrics-text;version=99.0.0", "application/openmetrics-text;q=0",
     "application/openmetrics-text;q=x", ";;,=,", "text/plain;version=zz,application/openmetrics-text;q=0.5"],
)  # fmt: skip
def test_others_get_the_text_format(accept):
    assert not accepts_openmetrics(accept)


def opened(health, data: bytes = b"") -> socket.socket:
    """Return a connection to the port that has sent `data`."""
    host, port = re.fullmatch(r"http://(.*):(\d+)", health.address).groups()
    connection = socket.create_connection((host, int(port)), TIMEOUT)
    connection.sendall(data)
    return connection


def received(connection: socket.socket) -> bytes:
    """Return what the port sends until it closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            data += part
    return data


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nX-a: "])
def test_connections_that_wait_for_their_client_keep_no_probe_from_an_answer(health, sent):
    with contextlib.ExitStack() as held:
        for _ in range(40):
            held.enter_context(opened(health, sent))
        for _ in range(20):
            assert get(f"{health.address}/healthz") == (200, "ok\n")


def test_a_new_connection_replaces_the_oldest_one(health):
    limit = _MAX_CONNECTIONS
    with contextlib.ExitStack() as held:
        connections = [held.enter_context(opened(health, b"GET /healthz HTTP/1.0\r\n")) for _ in range(limit + 3)]
        assert [received(connection) for connection in connections[:3]] == [b""] * 3
        for connection in connections[3:]:
            connection.sendall(b"\r\n")
            assert received(connection).endswith(b"\r\n\r\nok\n")


@pytest.mark.slow
def test_bytes_that_arrive_one_by_one_do_not_extend_the_deadline_of_a_request(health, monkeypatch):
    monkeypatch.setattr("shoal.cluster.protocol.health._REQUEST_SECONDS", 0.3)
    with opened(health, b"GET /healthz HTTP/1.1\r\nX-a: ") as connection:
        connection.settimeout(0.02)
        deadline = time.monotonic() + TIMEOUT
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                connection.sendall(b"a")
                with contextlib.suppress(TimeoutError):
                    assert connection.recv(1) == b""
                    break
        assert time.monotonic() < deadline


def test_headers_are_bounded_together(health):
    accept = b"Accept: " + b"a," * 4000 + b"\r\n"
    request = b"GET /metrics HTTP/1.1\r\n"
    with opened(health, request + accept + b"\r\n") as connection:
        assert received(connection).startswith(b"HTTP/1.0 200 OK\r\n")
    with opened(health) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request + accept * 100)
        assert received(connection) in (b"", b"HTTP/1.0 431 Request Header Fields Too Large\r\n\r\n")


def test_replies_that_do_not_end_leave_the_probe_of_liveness(health):
    go_on = threading.Event()

    def values():
        assert go_on.wait(TIMEOUT)
        return {}

    health.watch(list, "server", metrics_of.SERVER, values)
    with contextlib.ExitStack() as held:
        held.callback(go_on.set)
        for _ in range(_MAX_REPLIES):
            held.enter_context(opened(health, b"GET /metrics HTTP/1.0\r\n\r\n"))
        busy = (503, f"{_MAX_REPLIES} requests are being answered: try again\n")
        until(lambda: get(f"{health.address}/readyz") == busy)
        assert get(f"{health.address}/healthz") == (200, "ok\n")
    until(lambda: get(f"{health.address}/readyz") == (200, "ready\n"))


def test_a_thread_that_cannot_start_leaves_the_port_as_it_was(health, monkeypatch):
    start = threading.Thread.start
    refusals = iter([True] * (2 * _MAX_CONNECTIONS))

    def refuse(thread):
        if next(refusals, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(2 * _MAX_CONNECTIONS):
            with opened(health, b"GET /healthz HTTP/1.0\r\n\r\n") as connection:
                assert received(connection) == b""
    assert get(f"{health.address}/healthz") == (200, "ok\n")


def test_a_port_in_use_and_what_is_no_port_are_refused(health, capsys):
    with pytest.raises(ValueError, match=r"no probes can be answered at .*: Address already in use; pass another port"):
        HealthServer(health.address.replace("http", "tcp"))
    for text in ("", "x", "a:b:c", "99999"):
        with pytest.raises(ValueError, match="is neither PORT nor HOST:PORT"):
            parse_listen(text)
    assert main(["server", "--metrics-port", "x"]) == 2
    assert "--metrics-port: 'x' is neither PORT nor HOST:PORT" in capsys.readouterr().err


def test_a_scheduler_is_ready_when_all_servers_have_joined_and_none_is_lost():
    with scheduler(2) as one, FakeServer(one.address) as first:
        until(lambda: one.unready() == ("1 of 2 servers have joined",))
        with FakeServer(one.address) as second:
            assert first.joined.wait(TIMEOUT)
            assert second.joined.wait(TIMEOUT)
            until(lambda: one.unready() == ())
            second.link.call(Leave(), LeaveReply, TIMEOUT)
            (why,) = until(one.unready)
            assert "is lost with its rows" in why


def test_a_server_lacks_what_its_map_does_not_have():
    def map_of(epoch: int, *streams: Stream) -> ClusterMap:
        ends = (Endpoint(0, "tcp://a:1", 0), Endpoint(1, "tcp://b:1", 1))
        return ClusterMap(epoch, ends, (Arc(0, 8, 0, 1), Arc(8, 16, 1, 1)), streams)

    class Service:
        def retired(self) -> bool:
            return True

        def assign(self, *_: object) -> None:
            pass

    control = ServerControl({"tcp://a:1": Service()}, b"s")
    assert control.unready(1) == ["it has no map"]
    for streams, replicas, lacks in [
        ((), 0, []),
        ((), 1, ["8 slots that it serves lack copies"]),
        ((Stream(1, 0, 1, (0,)),), 1, []),
        ((Stream(1, 0, 1, (0,)),), 2, ["8 slots that it serves lack copies"]),
        ((Stream(1, 0, 1, (), (0,)),), 1, ["8 slots that it serves lack copies"]),
        ((Stream(1, 0, 1, (0,)), Stream(2, 1, 0, (), (1,))), 1, ["8 slots are being copied to it"]),
    ]:
        control._map = map_of(3, *streams)
        control._unconfirmed = False
        assert control.unready(replicas) == lacks
    control._unconfirmed = True
    assert control.unready(0)[0] == "the map of epoch 3 is not carried out yet"


@pytest.mark.slow
def test_the_roles_answer_probes_while_a_cluster_forms_and_runs():
    from processes import processes

    with HeldPort() as held, processes(metrics_port="*", replicas=1, servers=2) as cluster:
        port = held.port
        urls = {"scheduler": cluster.children[0].joined.probes}
        until(lambda: get(f"{urls['scheduler']}/readyz") == (503, "0 of 2 servers have joined\n"))
        servers = [cluster.start_server(rank=rank, metrics_port="127.0.0.1:*") for rank in range(2)]
        urls |= {f"server {joined.rank}": joined.probes for joined in cluster.wait_for(*servers)}
        for url in urls.values():
            assert get(f"{url}/healthz") == (200, "ok\n")
            until(lambda url=url: get(f"{url}/readyz") == (200, "ready\n"))
        found = metrics(urls["scheduler"])
        assert {name: found[f"shoal_scheduler_{name}"] for name in ("ready", "servers", "workers")} == {
            "ready": 1,
            "servers": 2,
            "workers": 0,
        }
        with shoal.connect(cluster.address, timeout=TIMEOUT, metrics_port=port) as store:
            found = metrics(f"http://127.0.0.1:{port}")
            assert (found["shoal_worker_ready|0"], found["shoal_worker_clock|0"]) == (1, 0)
            assert metrics(urls["scheduler"])["shoal_scheduler_workers"] == 1
            table = store.table("t", optimizer=shoal.SGD(lr=1.0))
            table.push(np.arange(9, dtype=np.uint64), np.ones((9, 1), np.float32)).result()
            store.tick()
            found = metrics(f"http://127.0.0.1:{port}")
            assert found["shoal_worker_clock|0"] == 1
            assert (
                0
                < found["shoal_worker_sent_total|0"]
                <= sum(metrics(urls[f"server {rank}"])[f"shoal_server_messages_total|{rank}"] for rank in range(2))
            )
            servers[0].signal(9)  # no other server is left for copies
            url = urls["server 1"]
            lost = until(lambda: (found := get(f"{url}/readyz"))[0] == 503 and found)
            assert re.search(r"\d+ slots that it serves lack copies", lost[1])
            cluster.wait_for(cluster.start_server())
            until(lambda: get(f"{url}/readyz") == (200, "ready\n"))


def test_a_worker_answers_while_its_store_is_open(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setenv("SHOAL_METRICS_PORT", str(port))
        with pytest.raises(ValueError, match="Address already in use; pass another port"):
            shoal.connect("tcp://127.0.0.1:1", timeout=TIMEOUT)
        with pytest.raises(ValueError, match="'x' is neither PORT nor HOST:PORT"):
            shoal.connect("tcp://127.0.0.1:1", timeout=TIMEOUT, metrics_port="x")
    with HeldPort() as held, running(1, timeout=TIMEOUT) as cluster:
        url = f"http://127.0.0.1:{held.port}"
        monkeypatch.setenv("SHOAL_METRICS_PORT", str(held.port))
        with shoal.connect(cluster.address, timeout=TIMEOUT) as store:
            assert get(f"{url}/healthz") == (200, "ok\n")
            assert get(f"{url}/readyz") == (200, "ready\n")
            assert metrics(url)["shoal_worker_clock|0"] == 0
            store._scheduler.fail(shoal.ServerLostError("server 3 has died"))
            assert get(f"{url}/readyz") == (503, "server 3 has died\n")
            assert metrics(url)["shoal_worker_ready|0"] == 0
        with pytest.raises(urllib.error.URLError, match="refused"):
            get(f"{url}/healthz")
