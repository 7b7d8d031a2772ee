"""The Open Inference Protocol over gRPC: by Triton's client, and what a client may do to the server."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import shoal
from cluster_fakes import HeldPort
from serving import ROWS, ask, exported, exported_columns, instances, running, sparse_data, trained
from shoal import models
from shoal.serve import Limits, ServedVersions, Settings

grpc = pytest.importorskip("grpc")
pytest.importorskip("google.protobuf")
triton = pytest.importorskip("tritonclient.grpc")

from shoal.serve.open_inference import MESSAGES, SERVICE  # noqa: E402

pb = triton.service_pb2
Code = grpc.StatusCode
SITES = [{"site": row["site"], "price": row["price"]} for row in ROWS]
TIMEOUT = 120


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    """Serve a model of named columns as ctr: the ports, and the probabilities of `SITES`."""
    folder = exported_columns(tmp_path_factory.mktemp("columns"))
    with ServedVersions(folder) as one, running({"ctr": one}, grpc_port=0) as ((port, at), _):
        status, body, _ = ask(port, "POST", "/models/ctr/predict", json.dumps({"instances": SITES}))
        assert status == 200
        yield port, at, json.loads(body)["probabilities"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("keys")
    return exported(trained(where / "m", shoal.LogisticRegression), where / "e")


@contextlib.contextmanager
def called(at, method="ModelInfer", **how):
    """A method of the server at a port, which takes and returns messages as bytes."""
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{at}", options, **how) as channel:
        yield channel.unary_unary(f"/{SERVICE}/{method}")


def infer(at, message):
    """The reply to a request, or the status and the details of the error."""
    with called(at) as call:
        try:
            data = message if isinstance(message, bytes) else message.SerializeToString()
            return pb.ModelInferResponse.FromString(call(data, timeout=TIMEOUT))
        except grpc.RpcError as error:
            return error.code(), error.details()


def request(name="ctr", **more):
    """A request for `SITES`, whose elements are contents."""
    made = pb.ModelInferRequest(model_name=name, id="7", **more)
    site = made.inputs.add(name="site", datatype="BYTES", shape=[3])
    site.contents.bytes_contents.extend(row["site"].encode() for row in SITES)
    price = made.inputs.add(name="price", datatype="FP64", shape=[3, 1])
    price.contents.fp64_contents.extend(row["price"] for row in SITES)
    return made


def raw_request(name="ctr"):
    made = request(name)
    for one in made.inputs:
        one.ClearField("contents")
    texts = (row["site"].encode() for row in SITES)
    made.raw_input_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in texts))
    made.raw_input_contents.append(np.array([row["price"] for row in SITES]).tobytes())
    return made


def keys_request(batch, name="default"):
    made = pb.ModelInferRequest(model_name=name)
    for column, datatype, array in (
        ("offsets", "INT64", batch.indptr), ("keys", "UINT64", batch.keys), ("values", "FP32", batch.values),
    ):  # fmt: skip
        made.inputs.add(name=column, datatype=datatype, shape=array.shape)
        made.raw_input_contents.append(array.tobytes())
    return made


def metrics(port):
    return ask(port, "GET", "/metrics")[1].decode().splitlines()


def wait_for(line, port):
    end = time.monotonic() + TIMEOUT
    while line not in (found := metrics(port)):
        assert time.monotonic() < end, found
        time.sleep(0.01)


# ---- predictions -----------------------------------------------------------------------------------------------------


def test_our_messages_have_the_bytes_of_those_that_are_generated_from_the_specification(columns):
    _, at, _ = columns
    for made in (request(), raw_request()):
        found = MESSAGES["ModelInferRequest"].FromString(made.SerializeToString())
        assert [MESSAGES["Tensor"].FromString(one).name for one in found.inputs] == ["site", "price"]
        assert found.raw_input_contents == made.raw_input_contents
        assert MESSAGES["ModelInferResponse"].FromString(infer(at, made).SerializeToString()).outputs[0].shape == [3]
    for name in ("ModelMetadataResponse", "ServerMetadataResponse", "ModelInferResponse"):
        theirs = getattr(pb, name).DESCRIPTOR.fields_by_name
        for field in MESSAGES[name].DESCRIPTOR.fields:
            assert (theirs[field.name].number, theirs[field.name].type) == (field.number, field.type)
    theirs = pb.InferTensorContents.DESCRIPTOR.fields_by_name
    for field in MESSAGES["Contents"].DESCRIPTOR.fields:
        assert (theirs[field.name].number, theirs[field.name].type) == (field.number, field.type)


@pytest.mark.parametrize("version", ["", "1"])
def test_contents_are_answered_as_contents_and_raw_ones_raw_with_the_bits_of_http(columns, version):
    _, at, want = columns
    for made in (request(), raw_request()):
        made.model_version = version
        made.outputs.add(name="probability")
        reply = infer(at, made)
        assert (reply.model_name, reply.model_version, reply.id) == ("ctr", "1", "7")
        (output,) = reply.outputs
        assert (output.name, output.datatype, list(output.shape)) == ("probability", "FP64", [3])
        if made.raw_input_contents:
            (raw,) = reply.raw_output_contents
            assert np.frombuffer(raw).tolist() == want
            assert not output.HasField("contents")
        else:
            assert output.contents.fp64_contents == want
            assert not reply.raw_output_contents


@pytest.mark.parametrize(
    ("datatype", "field", "numbers"),
    [
        ("BOOL", "bool_contents", [True, False, True]),
        ("INT8", "int_contents", [-128, 0, 127]),
        ("INT16", "int_contents", [-300, 0, 300]),
        ("INT32", "int_contents", [-70000, 0, 70000]),
        ("INT64", "int64_contents", [-(2**40), 0, 3]),
        ("UINT8", "uint_contents", [255, 0, 1]),
        ("UINT16", "uint_contents", [65535, 0, 1]),
        ("UINT32", "uint_contents", [2**32 - 1, 0, 1]),
        ("UINT64", "uint64_contents", [2**40, 0, 1]),
        ("FP32", "fp32_contents", [0.1, -2.5, 3]),
        ("FP64", "fp64_contents", [0.1, -2.5, 3]),
    ],
)
def test_each_type_of_elements_is_read_as_over_http(columns, datatype, field, numbers):
    port, at, _ = columns
    made = pb.ModelInferRequest(model_name="ctr")
    getattr(made.inputs.add(name="price", datatype=datatype, shape=[3]).contents, field).extend(numbers)
    sent = list(getattr(made.inputs[0].contents, field))  # rounded to the type
    rows = {"instances": [{"price": number} for number in sent]}
    want = json.loads(ask(port, "POST", "/models/ctr/predict", json.dumps(rows))[1])["probabilities"]
    assert infer(at, made).outputs[0].contents.fp64_contents == want


def test_tritons_client_finds_the_server_and_its_models_and_predicts(columns):
    _, at, want = columns
    with triton.InferenceServerClient(f"127.0.0.1:{at}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("ctr")
        assert client.is_model_ready("ctr", "1")
        assert not client.is_model_ready("ctr", "2")
        assert not client.is_model_ready("none")
        about = client.get_server_metadata()
        assert (about.name, about.version) == ("shoal", shoal.__version__)
        described = client.get_model_metadata("ctr")
        assert {one.name: (one.datatype, list(one.shape)) for one in described.inputs} == {
            "site": ("BYTES", [-1]), "price": ("FP64", [-1]), "tags": ("BYTES", [-1, -1]),
        }  # fmt: skip
        assert list(described.versions) == ["1"]
        with pytest.raises(triton.InferenceServerException, match="there is no model 'none'"):
            client.get_model_metadata("none")
        site, price = triton.InferInput("site", [3], "BYTES"), triton.InferInput("price", [3], "FP64")
        site.set_data_from_numpy(np.array([row["site"] for row in SITES], object))
        price.set_data_from_numpy(np.array([row["price"] for row in SITES], np.float64))
        for outputs in (None, [triton.InferRequestedOutput("probability")]):
            assert client.infer("ctr", [site, price], outputs=outputs).as_numpy("probability").tolist() == want


# In a process of its own: kserve's messages and Triton's cannot be loaded into one.
KSERVE = """
import asyncio, json, sys
import kserve, numpy as np
port, at, rows = json.loads(sys.argv[1])

def request(binary):
    site = kserve.InferInput("site", [3], "BYTES")
    site.set_data_from_numpy(np.array([row["site"] for row in rows], object), binary_data=binary)
    price = kserve.InferInput("price", [3], "FP64")
    price.set_data_from_numpy(np.array([row["price"] for row in rows], np.float64), binary_data=binary)
    return kserve.InferRequest(model_name="ctr", infer_inputs=[site, price])

async def ask_both():
    over_grpc = kserve.InferenceGRPCClient(f"127.0.0.1:{at}")
    over_http = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2"))
    url = f"http://127.0.0.1:{port}"
    assert await over_grpc.is_server_ready()
    assert await over_grpc.is_model_ready("ctr")
    assert await over_http.is_server_live(url)
    assert await over_http.is_model_ready(url, "ctr")
    replies = [await over_grpc.infer(request(binary)) for binary in (False, True)]
    replies.append(await over_http.infer(url, request(True), model_name="ctr"))
    await over_grpc.close()
    await over_http.close()
    return [reply.outputs[0].as_numpy().tolist() for reply in replies]

print(json.dumps(asyncio.run(ask_both())))
"""


@pytest.mark.slow
def test_kserves_clients_predict(columns):
    if importlib.util.find_spec("kserve") is None:
        pytest.skip("kserve is not installed: it needs older versions of pandas and psutil than other tests")
    port, at, want = columns
    command = [sys.executable, "-c", KSERVE, json.dumps([port, at, SITES])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [want] * 3


@pytest.mark.slow
def test_a_large_request_of_keys_and_several_classes_are_predicted(folder, tmp_path):
    batch = sparse_data(np.random.default_rng(5), 5000)
    with running(folder, grpc_port=0) as ((port, at), _):
        rows = json.dumps({"instances": instances(batch)})
        want = json.loads(ask(port, "POST", "/predict", rows)[1])["probabilities"]
        (raw,) = infer(at, keys_request(batch)).raw_output_contents
        assert np.frombuffer(raw).tolist() == want
        wait_for('shoal_serve_grpc_requests_total{code="OK"} 1.0', port)
        lines = metrics(port)
    assert "shoal_serve_examples_total 10000.0" in lines
    assert 'shoal_serve_answers_total{model="default",version="1"} 1.0' in lines
    assert "shoal_serve_grpc_seconds_count 1.0" in lines
    with models.MulticlassRegression(3) as model:
        data = sparse_data(np.random.default_rng(1))
        model.partial_fit(shoal.Batch((np.arange(400) % 3).astype(np.float32), data.indptr, data.keys, data.values))
        model.save(tmp_path / "m")
    with running(exported(tmp_path / "m", tmp_path / "e"), grpc_port=0) as ((port, at), _):
        want = json.loads(ask(port, "POST", "/predict", json.dumps({"instances": [{"keys": [1]}, {"keys": [2]}]}))[1])
        made = pb.ModelInferRequest(model_name="default")
        made.inputs.add(name="keys", datatype="UINT64", shape=[2, 1]).contents.uint64_contents.extend([1, 2])
        (output,) = infer(at, made).outputs
        assert (output.name, list(output.shape)) == ("probabilities", [2, 3])
        assert output.contents.fp64_contents == np.concatenate(want["probabilities"]).tolist()


@pytest.mark.slow
def test_a_route_key_chooses_the_version_as_over_http(tmp_path):
    exported(trained(tmp_path / "m"), tmp_path / "e" / "1")
    exported(trained(tmp_path / "n", seed=2), tmp_path / "e" / "2", "--version", 2)
    settings = Settings(latest=2, labels={"a": 1, "b": 2}, split={"a": 0.5, "b": 0.5})
    made = pb.ModelInferRequest(model_name="ctr")
    made.inputs.add(name="keys", datatype="UINT64", shape=[1, 1]).contents.uint64_contents.append(5)
    with ServedVersions(tmp_path / "e", settings) as one, running({"ctr": one}, grpc_port=0) as ((port, at), _):
        for key in map(str, range(20)):
            body = b'{"instances": [{"keys": [5]}]}'
            _, _, headers = ask(port, "POST", "/models/ctr/predict", body, {"shoal-route": key})
            with called(at) as call:
                reply = call(made.SerializeToString(), metadata=[("shoal-route", key)], timeout=TIMEOUT)
            assert pb.ModelInferResponse.FromString(reply).model_version == headers["shoal-version"]
        one.change(Settings(latest=1))  # takes effect for the next call
        assert infer(at, made).model_version == "2"


# ---- errors ----------------------------------------------------------------------------------------------------------


def with_input(**change):
    made = request()
    for name, value in change.items():
        if name == "shape":
            made.inputs[0].shape[:] = value
        else:
            setattr(made.inputs[0], name, value)
    return made


def with_contents(datatype, **contents):
    made = pb.ModelInferRequest(model_name="ctr")
    made.inputs.add(name="price", datatype=datatype, shape=[1], contents=pb.InferTensorContents(**contents))
    return made


@pytest.mark.parametrize(
    ("made", "code", "why"),
    [
        (request("none"), Code.NOT_FOUND, "there is no model 'none': the models are ctr"),
        (request(""), Code.NOT_FOUND, "there is nothing at"),
        (request("ctr/versions/9"), Code.NOT_FOUND, "version 9 is not served"),
        (request(model_version="2"), Code.NOT_FOUND, "version 2 is not served: the versions are 1"),
        (request(model_version="x"), Code.NOT_FOUND, "'x' is not a version"),
        (pb.ModelInferRequest(model_name="ctr"), Code.INVALID_ARGUMENT, "no inputs"),
        (with_input(datatype="TEXT"), Code.INVALID_ARGUMENT, "'site' is of 'TEXT': send BYTES, BOOL"),
        (with_input(datatype=""), Code.INVALID_ARGUMENT, "is of ''"),
        (with_input(datatype="FP32"), Code.INVALID_ARGUMENT, "has bytes_contents: send fp32_contents"),
        (with_input(shape=[4]), Code.INVALID_ARGUMENT, "a shape of 4 elements, and 3 are there"),
        (with_input(shape=[-3]), Code.INVALID_ARGUMENT, "'shape' is not a whole number"),
        (with_input(shape=[]), Code.INVALID_ARGUMENT, "0 dimensions"),
        (with_input(shape=[1] * 9), Code.INVALID_ARGUMENT, "9 dimensions"),
        (with_input(shape=[2**62, 2**62]), Code.INVALID_ARGUMENT, "too many elements"),
        (with_input(name="price"), Code.INVALID_ARGUMENT, "'price' is there twice"),
        (with_contents("INT8", int_contents=[300]), Code.INVALID_ARGUMENT, "a number that is not of INT8"),
        (with_contents("UINT16", uint_contents=[2**20]), Code.INVALID_ARGUMENT, "a number that is not of UINT16"),
        (with_contents("FP16", fp32_contents=[1]), Code.INVALID_ARGUMENT, "send raw_input_contents"),
        (with_contents("FP64", fp64_contents=[1], fp32_contents=[1]), Code.INVALID_ARGUMENT, "and nothing else"),
        (with_contents("FP64"), Code.INVALID_ARGUMENT, "a shape of 1 elements, and 0 are there"),
        (with_contents("BYTES", bytes_contents=[b"x"]), Code.INVALID_ARGUMENT, "instance 0, column 'price'"),
        (with_contents("FP64", fp64_contents=[float("inf")]), Code.INVALID_ARGUMENT, "instance 0, column 'price'"),
        (b"\x00\x01\x02", Code.INVALID_ARGUMENT, "not a ModelInferRequest"),
        (b"\x0a\x01\xff", Code.INVALID_ARGUMENT, "not a ModelInferRequest"),  # a name that is not UTF-8
        (b"\x0a\x03ctr\x2a\x02\x00\x01", Code.INVALID_ARGUMENT, "not a ModelInferRequest"),  # in an input
        (b"\x0a\x03ctr" + b"\x2a\x00" * 10001, Code.RESOURCE_EXHAUSTED, "10001 inputs"),
        (b"\x0a\x03ctr" + b"\x32\x00" * 10001, Code.RESOURCE_EXHAUSTED, "10001 outputs"),
    ],
)
def test_an_error_has_the_code_and_the_words_of_http(columns, made, code, why):
    _, at, want = columns
    found, details = infer(at, made)
    assert found is code
    assert re.search(re.escape(why), details)
    assert infer(at, request()).outputs[0].contents.fp64_contents == want


def test_raw_elements_that_do_not_fit_are_refused(columns):
    _, at, _ = columns
    made = raw_request()
    del made.raw_input_contents[1]
    assert infer(at, made) == (Code.INVALID_ARGUMENT, "2 inputs, and 1 raw_input_contents: send one for each")
    made = raw_request()
    made.inputs[0].contents.bytes_contents.append(b"a.com")
    assert "send raw_input_contents, and nothing else" in infer(at, made)[1]
    made = raw_request()
    made.outputs.add(name="other")
    assert "there is no output 'other': it is 'probability'" in infer(at, made)[1]
    for raw in (b"\xff\xff\xff\xff", b"\x01", b"\x05\x00\x00\x00a.com"):
        made = raw_request()
        made.raw_input_contents[0] = raw
        assert infer(at, made)[0] is Code.INVALID_ARGUMENT


def test_a_method_that_is_not_there_is_unimplemented(columns):
    _, at, _ = columns
    with called(at, "RepositoryIndex") as call, pytest.raises(grpc.RpcError) as raised:
        call(b"", timeout=TIMEOUT)
    assert raised.value.code() is Code.UNIMPLEMENTED


def test_a_long_error_is_cut_so_that_clients_accept_it(folder, monkeypatch):
    def fail(*_):
        raise ValueError("\x80" * 5000)

    with running(folder, grpc_port=0) as ((_, at), served):
        monkeypatch.setattr(type(served.now), "probabilities", fail)
        made = keys_request(sparse_data(np.random.default_rng(5), 5))
        assert infer(at, made) == (Code.INVALID_ARGUMENT, "\x80" * 1000 + "...")


@pytest.mark.slow
def test_a_message_that_is_too_large_or_compressed_is_refused(folder):
    limits = Limits(body_bytes=10_000, decoded_bytes=10_000_000)
    with running(folder, limits=limits, grpc_port=0) as ((port, at), _):
        large = pb.ModelInferRequest(model_name="default", raw_input_contents=[b"x" * 20_000])
        assert infer(at, large)[0] is Code.RESOURCE_EXHAUSTED
        # Numbers that take eight times the memory once they are decoded.
        made = pb.ModelInferRequest(model_name="default")
        made.inputs.add(name="keys", datatype="UINT64", shape=[9000]).contents.uint64_contents.extend([1] * 9000)
        assert len(made.SerializeToString()) < 10_000
        code, details = infer(at, made)
        assert code is Code.RESOURCE_EXHAUSTED
        assert re.fullmatch(r"a body of \d+ bytes or more: at most 10000 are accepted", details)
        with called(at, compression=grpc.Compression.Gzip) as call, pytest.raises(grpc.RpcError) as raised:
            call(b"\x3a\x80\xe1\xeb\x17" + bytes(50_000_000), timeout=TIMEOUT)  # small once it is compressed
        assert raised.value.code() in (Code.UNIMPLEMENTED, Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED)
        assert "shoal_serve_held_bytes 0.0" in metrics(port)


# ---- clients that misbehave ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_bytes_at_random_on_the_port_harm_no_one_else(columns, seed):
    _, at, want = columns
    drawn = random.Random(seed)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    for _ in range(60):
        data = drawn.randbytes(drawn.randrange(300))
        if drawn.random() < 0.7:  # frames
            kind, flags, stream = drawn.randrange(12), drawn.randrange(256), drawn.randrange(8)
            data = preface + struct.pack(">I", len(data))[1:] + struct.pack(">BBI", kind, flags, stream) + data
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", at), timeout=TIMEOUT) as one:
            one.sendall(data)
            one.shutdown(socket.SHUT_WR)
            while one.recv(1 << 16):
                pass
    assert infer(at, request()).outputs[0].contents.fp64_contents == want


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_messages_with_random_changes_are_answered_or_refused(columns, seed):
    port, at, want = columns
    drawn = random.Random(seed)
    codes = set()
    with called(at) as call:
        for _ in range(300):
            data = bytearray((request() if drawn.random() < 0.5 else raw_request()).SerializeToString())
            for _ in range(drawn.randint(1, 4)):
                place = drawn.randrange(len(data))
                if drawn.random() < 0.3:
                    del data[place : place + drawn.randint(1, 9)]
                else:
                    data[place] = drawn.randrange(256)
            try:
                call(bytes(data), timeout=TIMEOUT)
                codes.add(Code.OK)
            except grpc.RpcError as error:
                codes.add(error.code())
    assert codes <= {Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.RESOURCE_EXHAUSTED}
    assert infer(at, request()).outputs[0].contents.fp64_contents == want
    assert "shoal_serve_held_bytes 0.0" in metrics(port)


@pytest.mark.slow
def test_a_client_that_sends_no_message_or_not_all_of_it_ends_at_the_timeout(folder):
    limits = Limits(request_seconds=0.5)
    with running(folder, limits=limits, grpc_port=0) as ((port, at), _):
        stop = threading.Event()
        with grpc.insecure_channel(f"127.0.0.1:{at}") as channel:
            call = channel.stream_stream(f"/{SERVICE}/ModelInfer")(iter(stop.wait, True), timeout=TIMEOUT)
            assert call.code() is Code.DEADLINE_EXCEEDED
            assert call.details() == "the request did not arrive within 0.5 s"
            stop.set()
            assert channel.stream_stream(f"/{SERVICE}/ModelInfer")(iter(()), timeout=TIMEOUT).code() is (
                Code.INVALID_ARGUMENT
            )
        wait_for('shoal_serve_grpc_requests_total{code="DEADLINE_EXCEEDED"} 1.0', port)


def frame(kind, flags, data, stream=1):
    return struct.pack(">I", len(data))[1:] + struct.pack(">BBI", kind, flags, stream) + data


@pytest.mark.slow
def test_a_client_that_does_not_read_its_answer_ends_at_the_timeout(folder):
    made = pb.ModelInferRequest(model_name="default", raw_input_contents=[bytes(8)])
    made.inputs.add(name="keys", datatype="UINT64", shape=[1, 1])
    message = made.SerializeToString()
    headers = {
        ":method": "POST", ":scheme": "http", ":path": f"/{SERVICE}/ModelInfer", ":authority": "x",
        "content-type": "application/grpc", "te": "trailers",  # codespell:ignore te
    }  # fmt: skip
    literals = [bytes([0, len(a)]) + a.encode() + bytes([len(b)]) + b.encode() for a, b in headers.items()]
    settings, head, data, end_stream, end_headers = 4, 1, 0, 1, 4
    with running(folder, limits=Limits(request_seconds=1), grpc_port=0) as ((port, at), _):
        with socket.create_connection(("127.0.0.1", at), timeout=TIMEOUT) as one:
            one.sendall(
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                + frame(settings, 0, struct.pack(">HI", 4, 0), stream=0)  # nothing may be sent to this client
                + frame(head, end_headers, b"".join(literals))
                + frame(data, end_stream, b"\0" + struct.pack(">I", len(message)) + message)
            )
            wait_for('shoal_serve_grpc_requests_total{code="DEADLINE_EXCEEDED"} 1.0', port)
        wait_for("shoal_serve_held_bytes 0.0", port)
        assert infer(at, made).raw_output_contents


def held_up(monkeypatch, served):
    """Have predictions wait for an event, after another is set."""
    begun, go_on = threading.Event(), threading.Event()
    before = type(served.now).probabilities

    def wait(*arguments):
        begun.set()
        assert go_on.wait(TIMEOUT)
        return before(*arguments)

    monkeypatch.setattr(type(served.now), "probabilities", wait)
    return begun, go_on


def test_the_memory_of_a_client_that_has_left_is_held_until_its_prediction_ends(folder, monkeypatch):
    batch = sparse_data(np.random.default_rng(5), 5000)
    with running(folder, grpc_port=0) as ((port, at), served):
        begun, go_on = held_up(monkeypatch, served)
        with called(at) as call:
            running_call = call.future(keys_request(batch).SerializeToString(), timeout=TIMEOUT)
            assert begun.wait(TIMEOUT)
            (held,) = (line for line in metrics(port) if line.startswith("shoal_serve_held_bytes "))
            running_call.cancel()
        wait_for('shoal_serve_grpc_requests_total{code="CANCELLED"} 1.0', port)
        assert held in metrics(port)
        go_on.set()
        wait_for("shoal_serve_held_bytes 0.0", port)
        assert infer(at, keys_request(batch)).outputs


def test_calls_above_the_limit_are_unavailable(folder, monkeypatch):
    data = keys_request(sparse_data(np.random.default_rng(5), 5000)).SerializeToString()
    with running(folder, limits=Limits(connections=3), grpc_port=0) as ((_, at), served):
        begun, go_on = held_up(monkeypatch, served)
        with called(at) as call:
            first = [call.future(data, timeout=TIMEOUT) for _ in range(3)]
            assert begun.wait(TIMEOUT)
            code = None
            while code is not Code.UNAVAILABLE:  # until all three have arrived
                with pytest.raises(grpc.RpcError) as raised:
                    call(b"", timeout=0.2)
                code = raised.value.code()
            assert raised.value.details() == "3 calls are in progress: try again later"
            go_on.set()
            assert all(one.result() for one in first)


# ---- beginning and end -----------------------------------------------------------------------------------------------


def test_an_address_in_use_is_an_error(folder):
    with running(folder, grpc_port=0) as ((_, at), served), pytest.raises(OSError, match=str(at)):
        shoal.serve.serve(served, port=0, grpc_port=at, until=threading.Event())


def test_an_extra_that_is_missing_is_named(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "shoal.serve.grpc_server", raising=False)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'shoal[grpc]'")), running(folder) as (_, served):
        shoal.serve.serve(served, port=0, grpc_port=0)


@pytest.mark.slow
def test_a_signal_under_load_loses_no_call(folder):
    """Each call is answered, or refused as UNAVAILABLE."""
    data = keys_request(sparse_data(np.random.default_rng(5), 2000)).SerializeToString()
    with HeldPort() as taken:
        command = [sys.executable, "-m", "shoal", "serve", str(folder), "--port", str(taken.port), "--grpc-port", "0"]
        command += ["--request-timeout", "3000"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert "http" in process.stderr.readline()
                at = int(process.stderr.readline().rpartition(":")[2])
                idle = socket.create_connection(("127.0.0.1", at), timeout=TIMEOUT)  # is not waited for
                codes, enough = [], threading.Semaphore(0)

                def load():
                    with called(at) as call:
                        while True:
                            try:
                                call(data, timeout=TIMEOUT)
                                codes.append(Code.OK)
                                enough.release()
                            except grpc.RpcError as error:
                                codes.append(error.code())
                                return

                threads = [threading.Thread(target=load) for _ in range(4)]
                for one in threads:
                    one.start()
                for _ in range(50):
                    assert enough.acquire(timeout=TIMEOUT)
                process.send_signal(signal.SIGTERM)
                for one in threads:
                    one.join(TIMEOUT)
                assert process.wait(TIMEOUT) == 143
                idle.close()
                assert set(codes) == {Code.OK, Code.UNAVAILABLE}
                assert codes.count(Code.UNAVAILABLE) == 4
            finally:
                process.kill()
