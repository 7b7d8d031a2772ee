"""The prediction server as its clients see it: paths, methods, metrics, bytes at random, and its end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from cluster_fakes import HeldPort
from serving import ask, exported, running, trained
from shoal.serve.bodies import ARROW

BODY = b'{"instances": [{"keys": [1, 2]}]}'
POST = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
CHUNKED = b"POST /predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (
    len(BODY), BODY,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("http")
    return exported(trained(where / "m"), where / "e")


@pytest.fixture(scope="module")
def port(folder):
    with running(folder) as (port, _):
        yield port


def test_paths_and_methods_that_are_not_answered_are_errors_with_words(port):
    status, body, _ = ask(port, "GET", "/nowhere")
    assert (status, json.loads(body)) == (404, {"error": "there is nothing at /nowhere"})
    status, body, headers = ask(port, "PUT", "/healthz", b"x")
    assert (status, headers["allow"]) == (405, "GET")
    assert json.loads(body) == {"error": "PUT is not answered there: use GET"}
    assert ask(port, "GET", "/predict")[0] == 405
    assert ask(port, "GET", "/healthz?a=b")[0] == 200
    assert ask(port, "GET", "/v2/models/de%66ault/ready")[0] == 200
    status, body, headers = ask(port, "HEAD", "/healthz")
    assert (status, body, headers["content-length"]) == (200, b"", str(len(ask(port, "GET", "/healthz")[1])))
    assert headers["date"].endswith(" GMT")


def test_an_error_of_the_server_is_logged_and_answered(folder, caplog, monkeypatch):
    with running(folder) as (port, served):
        monkeypatch.setattr(type(served.now.inputs), "describe", lambda self: 1 / 0)
        status, body, _ = ask(port, "GET", "/versions")
        assert (status, json.loads(body)) == (500, {"error": "an internal error, which the server has logged"})
        assert [record.getMessage() for record in caplog.records if record.exc_info] == ["GET /versions"]
        assert ask(port, "GET", "/healthz")[0] == 200


def test_predictions_are_counted_and_timed_by_the_server(folder):
    with running(folder) as (port, _):
        for _ in range(3):
            assert ask(port, "POST", "/predict", BODY)[0] == 200
        assert ask(port, "POST", "/v1/models/default:predict", b"x")[0] == 400
        assert ask(port, "POST", "/reload")[0] == 200
        lines = ask(port, "GET", "/metrics")[1].decode().splitlines()
    assert 'shoal_serve_requests_total{code="200"} 3.0' in lines
    assert 'shoal_serve_requests_total{code="400"} 1.0' in lines
    assert 'shoal_serve_seconds_bucket{le="+Inf"} 4.0' in lines
    assert "shoal_serve_seconds_count 4.0" in lines
    counts = [float(line.split()[1]) for line in lines if line.startswith("shoal_serve_seconds_bucket")]
    assert len(counts) == 14
    assert counts == sorted(counts)
    assert 'shoal_serve_closed_total{reason="silent"} 0.0' in lines


def test_a_probe_is_answered_beside_predictions_and_a_reload_that_wait(folder, monkeypatch):
    go_on = threading.Event()
    with running(folder) as (port, served):
        for kind, name in ((type(served.now), "probabilities"), (type(served), "reload")):
            before = getattr(kind, name)

            def held_up(*arguments, before=before):
                assert go_on.wait(120)
                return before(*arguments)

            monkeypatch.setattr(kind, name, held_up)
        results = []
        waiting = [
            threading.Thread(target=lambda what=what: results.append(ask(port, "POST", *what, {"accept": ARROW})[0]))
            for what in [("/predict", BODY)] * 8 + [("/reload", None)] * 2
        ]
        for one in waiting:
            one.start()
        for _ in range(20):
            assert ask(port, "GET", "/healthz")[0] == 200
        go_on.set()
        for one in waiting:
            one.join()
    assert results == [200] * 10


def sent(port, parts):
    """What a connection answers until it is closed, after these bytes and their end."""
    said = b""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as one:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                one.sendall(part)
            one.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while some := one.recv(1 << 16):
                said += some
    return said


@pytest.mark.parametrize("seed", range(4))
def test_bytes_at_random_are_answered_or_refused(folder, seed):
    drawn = random.Random(seed)
    with running(folder) as (port, _):
        answered = 0
        for _ in range(250):
            data = bytearray(
                b"".join(drawn.choices((POST, CHUNKED, b"GET /healthz HTTP/1.1\r\n\r\n"), k=drawn.randint(1, 4)))
            )
            for _ in range(drawn.choice((0, 0, 1, 3, 20))):
                at = drawn.randrange(len(data))
                what = drawn.randrange(4)
                if what == 0:
                    data[at] = drawn.randrange(256)
                elif what == 1:
                    del data[at : at + drawn.randint(1, 30)]
                elif what == 2:
                    data[at:at] = bytes(drawn.choices(b"\r\n :;0aF\x00\xff", k=drawn.randint(1, 10)))
                else:
                    data[at:at] = data[at : at + 200]
                data = data or bytearray(b"\r")
            cuts = sorted(drawn.randrange(len(data) + 1) for _ in range(drawn.randint(0, 5)))
            said = sent(port, [bytes(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)])
            assert said == b"" or said.startswith(b"HTTP/1.1 ")
            answered += b" 200 OK\r\n" in said
        assert answered > 50
        lines = ask(port, "GET", "/metrics")[1].decode().splitlines()
        assert "shoal_serve_held_bytes 0.0" in lines


def served_alone(folder, port, *more):
    command = [sys.executable, "-m", "shoal", "serve", str(folder), "--port", str(port), *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_completes_the_request_that_has_begun(folder, number, status):
    with HeldPort() as taken, served_alone(folder, taken.port) as process:
        try:
            assert process.stderr.readline()  # that it serves
            address = ("127.0.0.1", taken.port)
            idle = http.client.HTTPConnection(*address, timeout=120)
            with contextlib.closing(idle), socket.create_connection(address, timeout=120) as begun:
                idle.request("GET", "/healthz")
                assert idle.getresponse().read()
                begun.sendall(POST[:-5])
                end = time.monotonic() + 120
                while "held_bytes 0.0" in ask(taken.port, "GET", "/metrics")[1].decode():
                    assert time.monotonic() < end
                os.kill(process.pid, number)
                assert idle.sock.recv(1) == b""
                with pytest.raises(ConnectionError):
                    ask(taken.port, "GET", "/healthz")
                begun.sendall(POST[-5:])
                said = b""
                while some := begun.recv(1 << 16):
                    said += some
            assert said.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"connection: close\r\n" in said
            assert process.wait(120) == status
        finally:
            process.kill()


@pytest.mark.slow
def test_a_second_signal_waits_for_nothing(folder):
    with HeldPort() as taken, served_alone(folder, taken.port, "--request-timeout", "3000") as process:
        try:
            assert process.stderr.readline()
            with socket.create_connection(("127.0.0.1", taken.port), timeout=120) as begun:
                begun.sendall(POST[:-5])
                while "held_bytes 0.0" in ask(taken.port, "GET", "/metrics")[1].decode():
                    pass
                os.kill(process.pid, signal.SIGTERM)
                time.sleep(0.5)
                assert process.poll() is None
                os.kill(process.pid, signal.SIGTERM)
                assert process.wait(120) == 143
                with contextlib.suppress(ConnectionResetError):
                    assert begun.recv(1) == b""
        finally:
            process.kill()
