"""What the prediction server refuses or closes: bodies that grow, slow and silent connections, and too many of them."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import shoal
from cluster_fakes import HeldPort
from paths import SUPPORT
from shoal import cli

pa = pytest.importorskip("pyarrow")

from serving import ask, exported, running, trained  # noqa: E402
from shoal.serve import Limits, ServedModel  # noqa: E402
from shoal.serve.bodies import ARROW, JSON, examples  # noqa: E402
from shoal.serve.inputs import InputSpec  # noqa: E402
from shoal.serve.limits import Account, Budget, RequestError, TooLargeError  # noqa: E402

REQUEST_SECONDS = 1.5  # that a busy machine does not take from a connection to its first bytes
BODY = '{"instances": [{"keys": [1, 2]}]}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("limits")
    return exported(trained(where / "m"), where / "e")


def decode(model, body, kind=JSON, **limits):
    budget = Budget(Limits(**limits))
    try:
        with Account(budget) as account:
            return examples(body, kind, InputSpec(model), account)
    finally:
        assert budget.held == 0


def stream(table, **options):
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue()


@pytest.fixture(scope="module")
def named_model():
    with shoal.LogisticRegression() as model:
        frame = pa.table({"y": [1, 0], "site": ["a", "b"]})
        model.fit(shoal.read_arrow(frame, label="y"), progress=False)
        del model.record.schema["categorical"]  # of all columns, as a model that does not know which they were
        yield model


@pytest.fixture(scope="module")
def vw_model():
    with shoal.LogisticRegression() as model:
        model.fit(shoal.read_vw(io.BytesIO(b"1 |a x |b y\n"), interactions=[("a", "b")]), progress=False)
        yield model


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_arrow_is_bounded_by_what_it_decodes_to(folder, codec):
    with ServedModel(folder) as served:
        model = served.now.predictor
        small = pa.table({"keys": pa.array([[7] * 1000], pa.list_(pa.uint64()))})
        assert decode(model, stream(small, compression=codec), ARROW).nnz == 1000
        bomb = stream(pa.table({"keys": pa.array([np.zeros(1 << 21, np.uint64)], pa.list_(pa.uint64()))}),
                      compression=codec)  # fmt: skip
        assert len(bomb) < 1 << 17
        with pytest.raises(TooLargeError, match="send fewer examples"):
            decode(model, bomb, ARROW, decoded_bytes=8 << 20)


@pytest.mark.parametrize(
    ("make", "kind", "error"),
    [
        (lambda: stream(pa.table({"site": pa.nulls((1 << 31) - 1)})), ARROW, TooLargeError),
        (lambda: stream(pa.table({f"c{i}": pa.nulls(1) for i in range(10_001)})), ARROW, RequestError),
        (lambda: stream(pa.table({"keys": pa.ListArray.from_arrays([0, 1 << 30], pa.nulls(1 << 30))})), ARROW,
         TooLargeError),
        (lambda: stream(pa.concat_tables([pa.table({f"c{i}": ["a"] for i in range(1000)})] * 3)), ARROW, TooLargeError),
        (lambda: b'{"instances":[' + b"{}," * 200_000 + b"{}]}", JSON, TooLargeError),
        (lambda: b'{"instances":[{"keys":[' + b"1," * 800_000 + b"1]}]}", JSON, TooLargeError),
    ],
    ids=["rows without bytes", "columns", "lists without bytes", "columns of short batches", "empty instances", "keys"],
)  # fmt: skip
def test_bodies_that_grow_are_refused_before_they_are_decoded(named_model, make, kind, error):
    with pytest.raises(error, match="at most"):
        decode(named_model, make(), kind, decoded_bytes=8 << 20)


def test_a_request_that_never_fits_is_too_large_and_not_asked_to_come_again(named_model):
    body = json.dumps({"instances": [{"keys": list(range(1000))}]}).encode()
    with pytest.raises(TooLargeError, match="more than 5000 bytes"):
        decode(named_model, body, in_flight_bytes=5000)


def test_interactions_are_counted_before_they_are_made(vw_model):
    line = b"|a " + b" ".join(b"%d" % i for i in range(2000)) + b" |b " + b" ".join(b"%d" % i for i in range(2000))
    with pytest.raises(TooLargeError, match="decoded"):
        decode(vw_model, line, "text/plain", decoded_bytes=32 << 20)
    assert decode(vw_model, b"|a 1 2 3 |b 1 2", "text/plain").nnz == 5 + 6


@pytest.mark.parametrize("depth", [1_000, 100_000])
@pytest.mark.parametrize(
    "frame", [b'{"instances": [%s]}', b'{"instances": [{"keys": %s}]}', b'{"instances": %s}', b"%s"]
)
def test_deep_json_is_refused(named_model, vw_model, frame, depth):
    body = frame % (b"[" * depth + b"]" * depth)
    for model in (named_model, vw_model):
        with pytest.raises(
            RequestError, match=r"nested too deeply|a list within|is not a cell|an instance is|the body is an object"
        ):
            decode(model, body)


def test_unknown_columns_cost_what_their_bytes_do(named_model):
    body = json.dumps({"instances": [{f"c{i}": i} for i in range(80_000)]}).encode()
    assert decode(named_model, body).nnz == 80_000
    body = json.dumps({"instances": [{f"c{i}": i} for i in range(20_000)]}).encode()
    assert decode(named_model, body, decoded_bytes=16 << 20).nnz == 20_000  # of 20,000 x 20,000 cells


@pytest.mark.slow
def test_mutated_bodies_are_answered_or_refused(tmp_path):
    script = SUPPORT / "serve_fuzz.py"
    done = subprocess.run(
        [sys.executable, str(script), "--seed", "7", "--count", "4000"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    reported = json.loads(done.stdout)
    assert reported["answered"] > 50
    assert reported["peak_mib"] < 500


def connect(port):
    one = socket.create_connection(("127.0.0.1", port), timeout=120)
    one.settimeout(120)
    return one


def closed(one):
    """What a connection says until the server closes it."""
    said = b""
    with one, contextlib.suppress(ConnectionResetError):
        while some := one.recv(1 << 16):
            said += some
    return said


@pytest.mark.slow
def test_silent_and_slow_connections_are_closed(folder):
    with running(folder, limits=Limits(request_seconds=REQUEST_SECONDS)) as (port, _):
        silent, headers, body = connect(port), connect(port), connect(port)
        headers.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\n")
        body.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        assert closed(silent) == b""
        assert b"408 Request Timeout" in closed(headers)
        assert b"408 Request Timeout" in closed(body)
        # Over one connection, requests may take longer together than one may.
        kept = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        for _ in range(4):
            kept.request("POST", "/predict", BODY)
            assert kept.getresponse().read()
            time.sleep(REQUEST_SECONDS * 0.4)
        kept.close()
        metrics = ask(port, "GET", "/metrics")[1].decode()
        assert 'shoal_serve_closed_total{reason="silent"} 1.0' in metrics
        assert 'shoal_serve_closed_total{reason="slow"} 2.0' in metrics


@pytest.mark.slow
def test_a_client_that_takes_no_answers_is_cut_off(folder):
    with running(folder, limits=Limits(request_seconds=REQUEST_SECONDS)) as (port, _):
        greedy = socket.socket()
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.connect(("127.0.0.1", port))
        greedy.settimeout(120)
        instances = json.dumps({"instances": [{"keys": [1]}] * 2000}).encode()
        request = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(instances), instances)
        end = time.monotonic() + 120
        cut_off = False
        while not cut_off:
            assert time.monotonic() < end
            try:
                greedy.sendall(request)
            except (ConnectionResetError, BrokenPipeError):
                cut_off = True
        greedy.close()
        assert 'reason="stalled"} 1.0' in ask(port, "GET", "/metrics")[1].decode()


def test_connections_without_a_request_make_room_for_new_ones(folder):
    with running(folder, limits=Limits(connections=8)) as (port, _):
        held = [connect(port) for _ in range(40)]
        assert ask(port, "POST", "/predict", BODY)[0] == 200
        assert 'reason="full"} 0.0' not in ask(port, "GET", "/metrics")[1].decode()
        for one in held:
            one.close()
        slow = []
        for _ in range(40):
            slow.append(connect(port))
            slow[-1].sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
            assert ask(port, "GET", "/healthz")[0] == 200
        for one in slow:
            one.close()


def test_a_connection_too_many_is_refused_while_all_requests_are_being_answered(folder, monkeypatch):
    go_on = threading.Event()
    with running(folder, limits=Limits(connections=4)) as (port, served):
        predict = type(served.now).probabilities

        def held_up(*arguments):
            assert go_on.wait(120)
            return predict(*arguments)

        monkeypatch.setattr(type(served.now), "probabilities", held_up)
        large = json.dumps({"instances": [{"keys": list(range(9000))}]}).encode()
        head = b"POST /predict HTTP/1.1\r\nhost: x\r\naccept: %b\r\ncontent-length: %%d\r\n\r\n" % ARROW.encode()
        busy, end = [], time.monotonic() + 120
        while (answer := ask(port, "GET", "/healthz"))[0] != 503:
            assert time.monotonic() < end, answer
            busy.append(connect(port))
            busy[-1].sendall(head % len(large) + large)
        assert json.loads(answer[1])["error"] == "4 requests are being answered: try again"
        go_on.set()
        answered = 0
        for one in busy:
            with one, contextlib.suppress(ConnectionResetError):  # replaced before its request had arrived
                answered += b" 200 OK" in one.recv(1 << 16)
        assert answered == 4


@pytest.mark.parametrize(
    ("lines", "size", "status"),
    [(1, 60_000, 200), (60, 1000, 200), (1, 66_000, 431), (100, 1000, 431), (1, 300_000, 431), (1000, 1000, 431)],
)
def test_headers_are_bounded_together(folder, lines, size, status):
    with running(folder) as (port, _):
        head = b"".join(b"x-%d: %s\r\n" % (i, b"x" * size) for i in range(lines))
        with connect(port) as one:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                one.sendall(b"GET /healthz HTTP/1.1\r\nconnection: close\r\nhost: x\r\n" + head + b"\r\n")
            assert closed(one).startswith(b"HTTP/1.1 %d " % status)
        assert ask(port, "GET", "/healthz")[0] == 200


def test_headers_and_bodies_are_told_apart_however_they_are_cut(folder):
    with running(folder) as (port, _), connect(port) as one:
        body = BODY.encode() + b" " * 200_000
        for at in (*range(-5, 6), 100):
            head = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            request = head + body
            one.sendall(request[: len(head) + at])
            one.sendall(request[len(head) + at :])
            said = b""
            while not said.endswith(b"]}"):
                said += one.recv(1 << 16)
            assert said.startswith(b"HTTP/1.1 200 "), at


def test_requests_that_do_not_fit_beside_others_are_answered_503(folder):
    limits = Limits(in_flight_bytes=100_000)
    with running(folder, limits=limits) as (port, _):
        held = connect(port)
        held.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 99000\r\n\r\n" + b" " * 98_000)
        end = time.monotonic() + 120
        body = json.dumps({"instances": [{"keys": list(range(100))}]})
        while (answer := ask(port, "POST", "/predict", body))[0] != 503:
            assert time.monotonic() < end, answer
        assert "try again later" in json.loads(answer[1])["error"]
        assert answer[2]["retry-after"] == "1"
        held.close()
        while (answer := ask(port, "POST", "/predict", body))[0] != 200:
            assert time.monotonic() < end, answer
        assert "shoal_serve_held_bytes 0.0" in ask(port, "GET", "/metrics")[1].decode()


def test_a_client_that_leaves_leaves_no_trace_but_a_count(folder, caplog):
    with running(folder) as (port, _), caplog.at_level(logging.INFO):
        for _ in range(20):
            one = connect(port)
            one.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
            one.close()
        end = time.monotonic() + 120
        while 'code="499"} 20.0' not in ask(port, "GET", "/metrics")[1].decode():
            assert time.monotonic() < end
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
def test_garbage_is_logged_once_a_minute(folder, caplog):
    with running(folder) as (port, _), caplog.at_level(logging.WARNING):
        for _ in range(50):
            one = connect(port)
            one.sendall(b"\x01\x00\x02\x00A\r\n\r\n")
            closed(one)
        assert ask(port, "GET", "/healthz")[0] == 200
        end = time.monotonic() + 120
        while not (lines := [record for record in caplog.records if "not HTTP/1.1" in record.getMessage()]):
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(2.5)  # it looks each second
        assert 'reason="bad"} 50.0' in ask(port, "GET", "/metrics")[1].decode()
    assert len(lines) == 1


@pytest.mark.slow
def test_out_of_descriptors_it_waits_with_one_line_and_goes_on(folder):
    taken = HeldPort()
    port = taken.port
    command = [sys.executable, "-m", "shoal", "serve", str(folder), "--port", str(port), "--request-timeout", "60"]
    with taken, subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        assert process.stderr is not None
        reader = threading.Thread(target=lambda: lines.extend(process.stderr))
        try:
            assert process.stderr.readline()  # that it serves
            reader.start()
            ask(port, "GET", "/healthz")
            used = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[1]
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used + 10, hard))
            held = [connect(port) for _ in range(60)]
            end = time.monotonic() + 120
            while not lines:
                assert time.monotonic() < end
                time.sleep(0.05)
            time.sleep(2.5)  # it looks again each second
            for one in held:
                one.close()
            while True:
                try:
                    assert ask(port, "POST", "/predict", BODY)[0] == 200
                    break
                except (OSError, http.client.HTTPException):
                    assert time.monotonic() < end
        finally:
            process.terminate()
            process.wait(120)
            if reader.ident is not None:
                reader.join(120)
    lines = [line for line in lines if "interrupted" not in line]  # by the signal that ended it
    assert len(lines) == 1, lines[:5]
    assert "new connections wait: Too many open files" in lines[0]


@pytest.mark.parametrize("limit", ["body_bytes", "decoded_bytes", "in_flight_bytes", "connections", "request_seconds"])
def test_a_limit_is_above_zero(limit):
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"{limit} is .*: pass a number above 0"):
            Limits(**{limit: value})
    for value in (float("nan"), float("inf"), "8 MiB"):
        with pytest.raises((TypeError, ValueError), match=f"{limit} is .*: pass a"):
            Limits(**{limit: value})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max-body", "0", ": 0 is not a size above 0"),
        ("--max-decoded", "much", ": 'much' is not a size"),
        ("--max-in-flight", "-1", ": -1 is not a size"),
        ("--max-connections", "0", " is 0: pass 1 or more"),
        ("--request-timeout", "nan", " is nan: pass a number above 0"),
    ],
)
def test_an_option_out_of_range_is_named(folder, capsys, option, value, message):
    assert cli.main(["serve", str(folder), f"{option}={value}"]) == 2
    assert f"{option}{message}" in capsys.readouterr().err
