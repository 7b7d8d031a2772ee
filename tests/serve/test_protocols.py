"""The protocols of other servers: TensorFlow Serving's REST API, and the Open Inference Protocol by Triton's client."""

from __future__ import annotations

import json
import re
import struct

import numpy as np
import pytest

import shoal
from serving import ROWS, ask, exported, exported_columns, instances, running, sparse_data, trained
from shoal import models
from shoal.serve import ServedVersions


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    """Export a model of named columns, served as ctr: the port, and the probabilities of `ROWS`."""
    folder = tmp_path_factory.mktemp("columns")
    with ServedVersions(exported_columns(folder)) as one, running({"ctr": one}) as (port, _):
        status, body, _ = ask(port, "POST", "/models/ctr/predict", json.dumps({"instances": ROWS}))
        assert status == 200
        yield port, json.loads(body)["probabilities"]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Export a model of keys, served alone: the port, the model's examples, and their probabilities."""
    folder = tmp_path_factory.mktemp("keys")
    export = exported(trained(folder / "m", shoal.LogisticRegression), folder / "e")
    batch = sparse_data(np.random.default_rng(5), 50)
    with models.load(folder / "m") as model:
        want = model.probabilities(batch).tolist()
    with running(export) as (port, _):
        yield port, batch, want


def post(port, path, body, headers=None):
    status, answer, more = ask(port, "POST", path, body if isinstance(body, bytes) else json.dumps(body), headers)
    return status, answer if more["content-type"].startswith("application/octet") else json.loads(answer), more


# ---- TensorFlow Serving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["", "/versions/1"])
def test_rows_and_columns_of_tensorflow_serving_are_predicted_as_our_own(columns, at):
    port, want = columns
    path = f"/v1/models/ctr{at}:predict"
    status, answer, headers = post(port, path, {"signature_name": "serving_default", "instances": ROWS})
    assert (status, answer, headers["shoal-version"]) == (200, {"predictions": want}, "1")
    by_column = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    assert post(port, path, {"inputs": by_column})[:2] == (200, {"outputs": want})


def test_status_and_metadata_of_tensorflow_serving(columns):
    port, _ = columns
    status, body, _ = ask(port, "GET", "/v1/models/ctr")
    (version,) = json.loads(body)["model_version_status"]
    assert (status, version["version"], version["state"]) == (200, "1", "AVAILABLE")
    assert ask(port, "GET", "/v1/models/ctr/versions/1")[1] == body
    status, body, _ = ask(port, "GET", "/v1/models/ctr/metadata")
    described = json.loads(body)
    assert described["model_spec"] == {"name": "ctr", "signature_name": "", "version": "1"}
    signature = described["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert {name: one["dtype"] for name, one in signature["inputs"].items()} == {
        "site": "DT_STRING", "price": "DT_DOUBLE", "tags": "DT_STRING",
    }  # fmt: skip
    assert list(signature["outputs"]) == ["probability"]


def test_a_model_without_a_name_is_called_default(keys):
    port, batch, want = keys
    assert post(port, "/v1/models/default:predict", {"instances": instances(batch)})[:2] == (200, {"predictions": want})
    assert ask(port, "GET", "/v1/models/default")[0] == 200
    assert ask(port, "GET", "/v2/models/default/versions/1")[0] == 200
    for path in ("/v1/models/other", "/v1/models/default/versions/2", "/v2/models/default/versions/x"):
        assert ask(port, "GET", path)[0] == 404


def test_versions_of_a_model_without_a_name_are_called_default_too(tmp_path):
    export = exported(trained(tmp_path / "m", shoal.LogisticRegression), tmp_path / "e")
    with ServedVersions(export) as one, running(one) as (port, _):
        body = {"instances": [{"keys": [1]}]}
        want = post(port, "/predict", body)[1]["probabilities"]
        for at in ("", "/versions/1"):
            assert post(port, f"/v1/models/default{at}:predict", body)[:2] == (200, {"predictions": want})
            assert ask(port, "GET", f"/v1/models/default{at}")[0] == 200
        assert post(port, "/v1/models/default/versions/2:predict", body)[0] == 404


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, 'send either "instances"'),
        ({"instances": ROWS, "inputs": {}}, 'send either "instances"'),
        ({"instances": []}, "no instances"),
        ({"inputs": {}}, "a list for each column"),
        ({"inputs": {"site": "a"}}, "'site' is no list"),
        ({"inputs": {"site": ["a"], "price": [1, 2]}}, "different lengths"),
        ({"instances": [{"price": "much"}]}, "instance 0, column 'price'"),
        ({"instances": [3]}, "instance 0"),
        ({"rows": []}, "rows"),
        (b"{", "incomplete JSON"),
        (b"[" * 5000, "nested|Expected|a list"),
    ],
)
def test_what_is_wrong_with_a_body_for_tensorflow_serving_is_said(columns, body, why):
    port, _ = columns
    status, answer, _ = post(port, "/v1/models/ctr:predict", body)
    assert status == 400
    assert re.search(why, answer["error"])


# ---- Open Inference Protocol -----------------------------------------------------------------------------------------


def tensors(binary):
    """The columns of `ROWS`, of which those of one length for all instances are taken, as tensors, and raw data."""
    site = [row["site"] for row in ROWS]
    price = np.array([row["price"] for row in ROWS], np.float64)
    if not binary:
        return [
            {"name": "site", "shape": [3], "datatype": "BYTES", "data": site},
            {"name": "price", "shape": [3, 1], "datatype": "FP64", "data": [[one] for one in price.tolist()]},
        ], b""
    texts = b"".join(struct.pack("<I", len(one)) + one.encode() for one in site)
    raw = texts + price.tobytes()
    return [
        {"name": "site", "shape": [3], "datatype": "BYTES", "parameters": {"binary_data_size": len(texts)}},
        {"name": "price", "shape": [3], "datatype": "FP64", "parameters": {"binary_data_size": price.nbytes}},
    ], raw


def infer(port, body, raw=b"", path="/v2/models/ctr/infer"):
    text = json.dumps(body).encode()
    return post(port, path, text + raw, {"Inference-Header-Content-Length": str(len(text))} if raw else None)


@pytest.mark.parametrize("binary", [False, True])
def test_tensors_are_predicted_as_instances(columns, binary):
    port, _ = columns
    rows = [{"site": row["site"], "price": row["price"]} for row in ROWS]
    want = post(port, "/models/ctr/predict", {"instances": rows})[1]["probabilities"]
    inputs, raw = tensors(binary)
    status, answer, _ = infer(port, {"id": "7", "inputs": inputs}, raw)
    assert status == 200
    output = {"name": "probability", "shape": [3], "datatype": "FP64", "data": want}
    assert answer == {"model_name": "ctr", "model_version": "1", "id": "7", "outputs": [output]}
    asked = {"inputs": inputs, "outputs": [{"name": "probability", "parameters": {"binary_data": True}}]}
    status, answer, headers = infer(port, asked, raw)
    length = int(headers["inference-header-content-length"])
    (output,) = json.loads(answer[:length])["outputs"]
    assert output["parameters"] == {"binary_data_size": 24}
    assert np.frombuffer(answer[length:], np.float64).tolist() == want


def test_lists_keys_and_offsets_are_tensors_too(columns, keys):
    port, _ = columns
    want = post(port, "/models/ctr/predict", {"instances": [{"tags": ["x", "y"]}, {"tags": ["z", "z"]}]})[1]
    given = {"name": "tags", "shape": [2, 2], "datatype": "BYTES", "data": [["x", "y"], ["z", "z"]]}
    assert infer(port, {"inputs": [given]})[1]["outputs"][0]["data"] == want["probabilities"]
    port, batch, want = keys
    path = "/v2/models/default/versions/1/infer"

    def named(name, datatype, array):
        return {"name": name, "shape": list(array.shape), "datatype": datatype, "data": array.tolist()}

    ragged = [
        named("offsets", "INT64", batch.indptr),
        named("keys", "UINT64", batch.keys),
        named("values", "FP32", batch.values),
    ]
    assert infer(port, {"inputs": ragged}, path=path)[1]["outputs"][0]["data"] == want
    two = [{"keys": [3, 4]}, {"keys": [5, 6]}]
    want = post(port, "/predict", {"instances": two})[1]["probabilities"]
    dense = [named("keys", "UINT64", np.array([[3, 4], [5, 6]], np.uint64))]
    assert infer(port, {"inputs": dense}, path=path)[1]["outputs"][0]["data"] == want


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"datatype": "TEXT"}, "is of 'TEXT'"),
        ({"shape": [4]}, "4 elements, and 3 are there"),
        ({"shape": []}, "first dimension"),
        ({"shape": [-3]}, "'shape' is not a whole number"),
        ({"data": None}, "'data' is not a list"),
        ({"data": ["a", ["b"], "c"]}, "no array|not an array"),
        ({"name": "price"}, "twice"),
        ({"parameters": {"binary_data_size": 99}}, "99 bytes of data, and 0 are left"),
        ({"data": ["a", "b"], "shape": [2]}, "different numbers of instances"),
    ],
)
def test_what_is_wrong_with_a_tensor_is_said(columns, change, why):
    port, _ = columns
    inputs, _ = tensors(binary=False)
    inputs[0] |= change
    status, answer, _ = infer(port, {"inputs": inputs})
    assert status == 400
    assert re.search(why, answer["error"])


def test_raw_data_that_does_not_fit_is_refused(columns):
    port, _ = columns
    inputs, raw = tensors(binary=True)
    random = np.random.default_rng(3)
    assert infer(port, {"inputs": inputs}, raw + b"\0")[0] == 400
    for _ in range(200):
        bad = bytearray(raw)
        for place in random.integers(0, len(bad), 3):
            bad[place] ^= int(random.integers(1, 256))
        assert infer(port, {"inputs": inputs}, bytes(bad[: random.integers(1, len(bad) + 1)]))[0] in (200, 400)
    text = json.dumps({"inputs": inputs}).encode() + raw
    for length in ("x", "-1", "99999", "9" * 30, "5"):
        assert post(port, "/v2/models/ctr/infer", text, {"Inference-Header-Content-Length": length})[0] == 400


def test_tritons_client_finds_the_server_and_its_models_and_predicts(columns, keys):
    http = pytest.importorskip("tritonclient.http")
    port, _ = columns
    with http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("ctr")
        assert not client.is_model_ready("none")
        assert client.get_server_metadata()["name"] == "shoal"
        described = client.get_model_metadata("ctr", "1")
        assert {one["name"]: one["datatype"] for one in described["inputs"]} == {
            "site": "BYTES", "price": "FP64", "tags": "BYTES",
        }  # fmt: skip
        want = post(port, "/models/ctr/predict", {"instances": [{"site": row["site"]} for row in ROWS]})[1]
        for binary in (True, False):
            site = http.InferInput("site", [3], "BYTES")
            site.set_data_from_numpy(np.array([row["site"] for row in ROWS], object), binary_data=binary)
            for outputs in (None, [http.InferRequestedOutput("probability", binary_data=not binary)]):
                found = client.infer("ctr", [site], outputs=outputs).as_numpy("probability")
                assert found.tolist() == want["probabilities"]
    port, batch, want = keys
    with http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        inputs = []
        for name, datatype, array in (
            ("offsets", "INT64", batch.indptr), ("keys", "UINT64", batch.keys), ("values", "FP32", batch.values),
        ):  # fmt: skip
            one = http.InferInput(name, list(array.shape), datatype)
            one.set_data_from_numpy(array)
            inputs.append(one)
        assert client.infer("default", inputs).as_numpy("probability").tolist() == want
