"""deploy/triton: the model of Triton's Python backend, over a stand-in of what Triton gives it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types

import numpy as np
import pytest

import shoal
from paths import ROOT
from serving import ROWS, ask, exported, exported_columns, running, sparse_data, trained
from shoal import models

FOLDER = ROOT / "deploy" / "triton" / "ctr"


class Tensor:
    """As pb_utils.Tensor; texts are bytes in an array of objects."""

    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class Error:
    def __init__(self, message):
        self._message = message

    def message(self):
        return self._message


class Answer:
    def __init__(self, output_tensors, error=None):
        self.outputs, self.error = output_tensors, error


class Asked:
    def __init__(self, **arrays):
        self._inputs = [Tensor(name, array) for name, array in arrays.items()]

    def inputs(self):
        return self._inputs


class Config:
    """As pb_utils.ModelConfig: what is added to config.pbtxt."""

    def __init__(self, given):
        self._given = {"input": [], "output": []} | given

    def as_dict(self):
        return self._given

    def add_input(self, tensor):
        assert tensor.keys() <= {"name", "data_type", "dims", "optional"}
        self._given["input"].append(tensor)

    def add_output(self, tensor):
        assert tensor.keys() == {"name", "data_type", "dims"}
        self._given["output"].append(tensor)


def parameters(export, watch=""):
    """The parameters of config.pbtxt, as Triton gives them."""
    found = dict(re.findall(r'parameters: \{ key: "(\w+)" value: \{ string_value: "([^"]*)" \} \}', config_text()))
    assert found.keys() == {"export", "watch"}
    return {
        "parameters": {name: {"string_value": value} for name, value in (("export", str(export)), ("watch", watch))}
    }


def config_text():
    return (FOLDER / "config.pbtxt").read_text()


@pytest.fixture
def backend(monkeypatch):
    stand_in = types.ModuleType("triton_python_backend_utils")
    stand_in.Tensor, stand_in.TritonError, stand_in.InferenceResponse = Tensor, Error, Answer
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    spec = importlib.util.spec_from_file_location("triton_model", FOLDER / "1" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonPythonModel


def opened(backend, export, watch=""):
    model = backend()
    model.initialize({"model_config": json.dumps(parameters(export, watch))})
    return model


def test_columns_are_inputs_and_answered_as_by_the_prediction_server(backend, tmp_path):
    export = exported_columns(tmp_path)
    config = backend.auto_complete_config(Config(parameters(export))).as_dict()
    assert {one["name"]: (one["data_type"], one["dims"], one["optional"]) for one in config["input"]} == {
        "site": ("TYPE_STRING", [-1], True),
        "price": ("TYPE_FP64", [-1], True),
        "tags": ("TYPE_STRING", [-1, -1], True),
    }
    assert config["output"] == [{"name": "probability", "data_type": "TYPE_FP64", "dims": [-1]}]
    rows = [{"site": row["site"], "price": row["price"]} for row in ROWS]
    with running(export) as (port, _):
        want = json.loads(ask(port, "POST", "/predict", json.dumps({"instances": rows}))[1])["probabilities"]
    site = np.array([row["site"].encode() for row in rows], object)
    price = np.array([row["price"] for row in rows])
    model = opened(backend, export)
    good, wrong, unequal = model.execute(
        [Asked(site=site, price=price), Asked(price=site), Asked(site=site, price=price[:2])]
    )
    (output,) = good.outputs
    assert (good.error, output.name(), output.as_numpy().tolist()) == (None, "probability", want)
    assert re.search("instance 0, column 'price'", wrong.error.message())
    assert re.search("different numbers of instances", unequal.error.message())
    model.finalize()


def test_keys_are_inputs_and_a_newer_version_is_found(backend, tmp_path):
    folder = tmp_path / "e"
    exported(trained(tmp_path / "m"), folder / "1")
    config = backend.auto_complete_config(Config(parameters(folder))).as_dict()
    assert {one["name"]: (one["data_type"], one["dims"]) for one in config["input"]} == {
        "keys": ("TYPE_UINT64", [-1]), "values": ("TYPE_FP64", [-1]), "offsets": ("TYPE_INT64", [-1]),
    }  # fmt: skip
    batch = sparse_data(np.random.default_rng(5), 50)
    asked = Asked(offsets=batch.indptr, keys=batch.keys, values=batch.values)
    model = opened(backend, folder, watch="0.05")
    with models.load(tmp_path / "m") as one:
        want = one.probabilities(batch)
    assert np.array_equal(model.execute([asked])[0].outputs[0].as_numpy(), want)
    exported(trained(tmp_path / "m2", seed=2), folder / "2", "--version", 2)
    with models.load(tmp_path / "m2") as one:
        newer = one.probabilities(batch)
    assert not np.array_equal(newer, want)
    found = want
    while not np.array_equal(found, newer):  # the test has a timeout
        found = model.execute([asked])[0].outputs[0].as_numpy()
        assert np.array_equal(found, want) or np.array_equal(found, newer)
    model.finalize()


def test_several_classes_are_answered_by_rows(backend, tmp_path):
    data = sparse_data(np.random.default_rng(1))
    with models.MulticlassRegression(3) as model:
        model.partial_fit(shoal.Batch((np.arange(400) % 3).astype(np.float32), data.indptr, data.keys, data.values))
        want = model.probabilities(data)
        model.save(tmp_path / "m")
    model = opened(backend, exported(tmp_path / "m", tmp_path / "e"))
    (answer,) = model.execute([Asked(offsets=data.indptr, keys=data.keys, values=data.values)])
    assert np.array_equal(answer.outputs[0].as_numpy(), want)
    model.finalize()
