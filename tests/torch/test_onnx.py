"""The dense part of click models as ONNX: every kind has torch's margins, and is served without PyTorch."""

import functools
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import types
import urllib.request
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="click models are torch modules")
onnx = pytest.importorskip("onnx", reason="graphs are written by onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="graphs are run by onnxruntime")
pytest.importorskip("onnxscript", reason="torch writes graphs by onnxscript")

import c_library  # noqa: E402
import shoal  # noqa: E402
from paths import SUPPORT  # noqa: E402
from shoal import Batch  # noqa: E402
from shoal.cli import main  # noqa: E402
from shoal.errors import CorruptionError  # noqa: E402
from shoal.models.onnx_predictor import OnnxPredictor, find_runtime  # noqa: E402
from shoal.serve import ServedModel  # noqa: E402
from shoal.serve.bodies import JSON, examples  # noqa: E402
from shoal.serve.inputs import InputSpec  # noqa: E402
from shoal.serve.limits import Account, Budget, Limits  # noqa: E402
from shoal.serve.served import Model as Current  # noqa: E402
from shoal.torch import ClickModel, Features, Model, onnx_tower, tables  # noqa: E402
from shoal.torch.config import build, parse, schema_of  # noqa: E402
from shoal.torch.models import MODELS, Lookup, look_up  # noqa: E402

SEVERAL, DENSELESS = ("mmoe", "ple", "esmm"), ("lr", "fm", "fwfm")


(RUNTIME,) = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")
USUAL = ("mmoe", "two_tower")  # of every border between rows and network, with DIN and DeepFM below


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    """Clicks of users on ads, with lists of tags, which may be empty, and sequences with numbers beside them."""
    random = np.random.default_rng(8)
    rows = []
    for _ in range(200):
        user, ad = (int(one) for one in random.integers(0, 9, 2))
        seen = [f"a{one}" for one in random.integers(0, 9, random.integers(0, 6))]
        ages = [f"{one:.2f}" for one in random.random(len(seen))]
        tags = [f"t{one}" for one in random.integers(0, 5, random.integers(0, 4))]
        click = int(random.random() < 0.5)
        row = [
            click,
            int(click and ad > 4),
            f"u{user}",
            f"a{ad}",
            *map("|".join, (tags, seen, ages)),
            f"{random.random():.3f}",
        ]
        rows.append(",".join(map(str, row)))
    path = tmp_path_factory.mktemp("log") / "log.csv"
    path.write_text("\n".join(["click,conv,user,ad,tags,seen,ages,price", *rows]) + "\n")
    return path


def configuration(log: Path, name: str, *, pooling: str = "mean", **settings) -> dict:
    attends = name in ("din", "bst")
    seen = {"name": "seen", "type": "sequence", "share": "ad", "max_len": 4}
    features = [
        {"name": "user"},
        {"name": "ad"},
        {"name": "tags", "type": "list", "pooling": pooling},
        seen | ({"side_numeric": ["ages"]} if attends else {"pooling": pooling}),
    ]
    if name not in DENSELESS:
        features.append({"name": "price", "type": "number"})
    model = {"name": name} | ({} if name == "lr" else {"dim": 4}) | ({} if name in DENSELESS else {"hidden": [8]})
    if name == "two_tower":
        model |= {"user": ["user", "seen", "tags"], "item": ["ad", "price"]}
    labels = {"labels": {"ctr": "click", "cvr": "conv"}} if name in SEVERAL else {"label": "click"}
    return {
        "data": {"format": "csv", "data": [str(log)], **labels},
        "features": features,
        "model": model | settings,
        "tables": {"optimizer": {"name": "Adagrad", "lr": 0.1}},
        "train": {"seed": 4, "optimizer": {"name": "Adam", "lr": 0.01}},
    }


def reader_of(log: Path, described: dict, batch_size: int = 50):
    return shoal.read_csv(log, label="click", batch_size=batch_size, **schema_of(parse(described))).with_fields()


def fitted(log: Path, described: dict, store):
    return build(parse(described), store).fit(reader_of(log, described), epochs=1, progress=False)


def agree(found, expected) -> None:
    assert np.all(np.abs(found - expected) <= 1e-6 * np.maximum(1, np.abs(expected)))


def check_served(log: Path, described: dict, directory: Path) -> None:
    """Export a model with a graph: what is served by it has the model's margins, of many examples and of one."""
    with shoal.local() as store:
        model = fitted(log, described, store)
        model.export(directory, onnx=True)
        with ServedModel(directory) as served:
            predictor = served.now.predictor
            assert isinstance(predictor, OnnxPredictor)
            one_each = itertools.islice(reader_of(log, described, 1), 30)
            for batch in itertools.chain(reader_of(log, described), one_each):
                agree(predictor.decision_function(batch), model.decision_function(batch))
            check_c_library(log, described, directory, served.now)


def check_c_library(log: Path, described: dict, directory: Path, now: Current) -> None:
    """The C library gives the bits of the server, of many rows and of one."""
    header, *rows = log.read_text().splitlines()
    with c_library.Predictor(directory, onnx_runtime=RUNTIME) as alone:
        assert (alone.info.kind, alone.info.outputs) == (b"click model", 1)
        for size in (50, 1):
            reader = itertools.islice(reader_of(log, described, size), 30)
            for first, batch in zip(range(0, len(rows), size), reader, strict=False):
                found = alone.lines("\n".join([header, *rows[first : first + size]]).encode())[:, 0]
                np.testing.assert_array_equal(found, now.probabilities(batch))
                np.testing.assert_array_equal(found, now.predictor.probabilities(batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
def test_every_kind_of_model_has_the_same_margins_by_onnx(name, log, tmp_path):
    check_served(log, configuration(log, name), tmp_path / "export")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("lr", {"pooling": "max"}),
        ("fm", {"pooling": "attention", "per_field": True}),
        ("deepfm", {"pooling": "sqrtn", "activation": "dice", "batch_norm": True}),
        ("wide_deep", {"pooling": "sum", "activation": "gelu", "layer_norm": True}),
        ("din", {"softmax": True, "per_field": True}),
        ("autoint", {"wide": True}),
    ],
)
def test_settings_of_a_model_are_in_its_graph(name, settings, log, tmp_path):
    check_served(log, configuration(log, name, **settings), tmp_path / "export")


@pytest.mark.slow
def test_a_feature_with_a_dim_of_its_own_and_no_lists(log, tmp_path):
    described = configuration(log, "deepfm")
    described["features"] = [
        {"name": "user", "dim": 2},
        {"name": "ad"},
        {"name": "price", "type": "number", "embed": True},
    ]
    check_served(log, described, tmp_path / "export")


@pytest.mark.slow
def test_features_of_every_type(log, tmp_path):
    described = configuration(log, "deepfm")
    described["features"] = [
        {"name": "user"},
        {"name": "ad"},
        {"name": "conv"},
        {"name": "tags", "type": "list", "max_len": 2},
        {"name": "pairs", "type": "cross", "of": ["user", "ad"]},
        {"name": "tagged", "type": "cross", "of": ["tags", "ad", "conv"]},
        {"name": "dear", "type": "bucket", "column": "price", "edges": [0.25, 0.5, 0.75]},
        {"name": "price", "type": "number", "log": True},
        {"name": "cost", "type": "number", "column": "price", "embed": True},
        {"name": "seen", "type": "sequence", "share": "ad", "weights": "ages", "max_len": 3, "keep": "first"},
    ]
    check_served(log, described, tmp_path / "export")


@pytest.fixture(scope="module")
def din(log, tmp_path_factory):
    """A model of DIN: its configuration, its directory, an export with a graph, and its margins of the log."""
    folder = tmp_path_factory.mktemp("din")
    described = configuration(log, "din")
    with shoal.local() as store:
        model = fitted(log, described, store).calibrate(reader_of(log, described), "platt")
        model.save(folder / "model")
        assert main(["export", str(folder / "model"), "--output", str(folder / "export"), "--onnx", "--quiet"]) == 0
        yield described, folder / "model", folder / "export", model.decision_function(reader_of(log, described))


@pytest.mark.slow
def test_the_graph_names_its_inputs_and_has_any_number_of_examples(din):
    _, _, export, _ = din
    (path,) = export.glob("*-tower.onnx")
    graph = onnx.load(path)
    onnx.checker.check_model(graph)
    assert [one.version for one in graph.opset_import] == [onnx_tower.OPSET]
    shapes = {
        one.name: [its.dim_param or its.dim_value for its in one.type.tensor_type.shape.dim]
        for one in (*graph.graph.input, *graph.graph.output)
    }
    assert shapes == {
        "rows/embedding": ["examples", 2, 4],
        "rows/embedding/tags": ["items/tags", 4],
        "rows/embedding/seen": ["items/seen", 4],
        "values": ["examples", 2],
        "dense": ["examples", 1],
        "offsets/tags": ["examples + 1"],
        "weights/tags": ["items/tags"],
        "offsets/seen": ["examples + 1"],
        "weights/seen": ["items/seen"],
        "numeric/seen": ["items/seen", 1],
        "margins/label": ["examples"],
    }
    (metadata,) = graph.metadata_props
    assert metadata.key == "shoal.rows"
    assert json.loads(metadata.value) == {
        "rows/embedding": {"table": "embedding", "fields": ["user", "ad"]},
        "rows/embedding/tags": {"table": "embedding", "items": "tags"},
        "rows/embedding/seen": {"table": "embedding", "items": "seen"},
    }
    assert b"site-packages" not in path.read_bytes()
    assert b"shoal/torch" not in path.read_bytes()


@pytest.mark.slow
def test_the_c_library_answers_json_and_refuses_what_it_cannot_compute(din, tmp_path):
    _, _, export, _ = din
    instance = {"user": "u1", "ad": "a2", "tags": ["t1"], "seen": ["a3", "a2"], "ages": [0.5, 1], "price": 2}
    with c_library.Predictor(export, onnx_runtime=RUNTIME) as model, ServedModel(export) as served:
        body = json.dumps({"instances": [instance, {}]}).encode()
        predictor = served.now.predictor
        with Account(Budget(Limits())) as account:
            expected = predictor.probabilities(examples(body, JSON, InputSpec(predictor), account))
        np.testing.assert_array_equal(model.json(body)[:, 0], expected)
        np.testing.assert_array_equal(model.columns(instance), expected[:1])
        with pytest.raises(c_library.PredictError, match="instance 1 has 2 items in 'seen' and 1 in 'ages'") as refused:
            model.json(json.dumps({"instances": [instance, instance | {"ages": [1]}]}).encode())
        assert (refused.value.status, refused.value.example) == (c_library.INVALID, 1)
        with pytest.raises(c_library.PredictError, match="the field of each key") as refused:
            model.keys(np.array([0, 1], np.int64), np.array([7], np.uint64))
        assert refused.value.status == c_library.UNSUPPORTED
    alone = "import c_library, sys; c_library.Predictor(sys.argv[1]).json(b'{}')"  # nothing has loaded the library
    command = [sys.executable, "-c", alone, str(export)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "a click model needs libonnxruntime.so, and there is none" in done.stderr
    with pytest.raises(c_library.PredictError, match="cannot be opened"):
        c_library.Predictor(export, onnx_runtime=tmp_path / "none.so")
    with pytest.raises(c_library.PredictError, match="is no ONNX Runtime"):
        c_library.Predictor(export, onnx_runtime=c_library.PATH)


def test_the_c_library_refuses_a_damaged_graph(din, tmp_path):
    _, _, export, _ = din
    for damage in ("cut", "flipped", "missing"):
        shutil.copytree(export, where := tmp_path / damage)
        (path,) = where.glob("*-tower.onnx")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data[:-1] if damage == "cut" else data)
        if damage == "missing":
            path.unlink()
        with pytest.raises(c_library.PredictError, match=r"tower\.onnx") as refused:
            c_library.Predictor(where, onnx_runtime=RUNTIME)
        assert refused.value.status == c_library.DAMAGED


@pytest.mark.slow
def test_the_command_serves_a_graph_without_loading_torch(din, log):
    described, _, export, expected = din
    command = [sys.executable, "-X", "importtime", "-m", "shoal", "serve", str(export), "--port", "0"]
    body = {
        "instances": [{"user": "u1", "ad": "a2", "tags": ["t1"], "seen": ["a3", "a2"], "ages": [0.5, 1], "price": 2}]
    }
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        address = None
        while address is None:
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines[-20:])
            address = re.search(r"http://[\d.:]+", lines[-1])
        request = urllib.request.Request(f"{address[0]}/predict", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            (found,) = json.load(answer)["probabilities"]
        process.terminate()
        lines += process.stderr.readlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert not {name for name in imported if name.partition(".")[0] in ("torch", "onnxruntime")}
    with ServedModel(export) as served:
        assert 0 < found < 1
        agree(served.now.predictor.decision_function(reader_of(log, described)), expected)


def test_without_onnx_runtime_torch_serves_the_same_margins(din, log, monkeypatch):
    described, _, export, expected = din
    monkeypatch.setattr("shoal.serve.served.find_runtime", lambda: None)
    with ServedModel(export) as served:
        assert isinstance(served.now.predictor, ClickModel)
        agree(served.now.predictor.decision_function(reader_of(log, described)), expected)


@pytest.mark.slow
def test_a_delta_has_a_graph_of_its_own_or_none(log, tmp_path):
    described = configuration(log, "lr")
    with shoal.local() as store:
        model = fitted(log, described, store)
        for number, onnx_too in enumerate([True, False, True]):
            before = None if number == 0 else tmp_path / str(number - 1)
            model.export(tmp_path / str(number), onnx=onnx_too, since=before)
            with ServedModel(tmp_path / str(number)) as served:
                assert isinstance(served.now.predictor, OnnxPredictor) == onnx_too
                batch = next(iter(reader_of(log, described)))
                agree(served.now.predictor.decision_function(batch), model.decision_function(batch))
            model.fit(reader_of(log, described), epochs=1, progress=False)


@pytest.mark.slow
def test_a_graph_with_other_margins_is_not_written(log, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_tower, "TOLERANCE", -1.0)
    with shoal.local() as store:
        model = fitted(log, configuration(log, "lr"), store)
        with pytest.raises(ValueError, match=r"margins/label of 1 random examples differs by \S+ times"):
            model.export(tmp_path / "export", onnx=True)
    assert not (tmp_path / "export").exists()


def test_a_missing_package_is_named(log, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with shoal.local() as store:
        model = fitted(log, configuration(log, "lr"), store)
        with pytest.raises(ImportError, match=r"pip install 'shoal\[onnx\]'"):
            model.export(tmp_path / "export", onnx=True)
    assert not (tmp_path / "export").exists()


def test_a_damaged_graph_is_refused(din):
    _, _, export, _ = din
    with ServedModel(export) as served:
        version, tables = served.now.exported, served.now.predictor.tables
        made = functools.partial(
            OnnxPredictor, version.model, runtime=find_runtime(), tables=tables, workers=version.workers
        )
        with pytest.raises(CorruptionError, match=r"tower\.onnx is not the dense part"):
            made(b"nothing", natives=version.layers.natives)
        with pytest.raises(CorruptionError, match="the export has no table 'embedding'"):
            made(version.layers.extra("tower.onnx"), natives={})


def test_a_library_that_is_not_onnx_runtime_is_named(tmp_path, monkeypatch):
    package = tmp_path / "onnxruntime"
    (package / "capi").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace(origin=package / "__init__.py"))
    find = find_runtime.__wrapped__
    (package / "capi" / "libonnxruntime.so.1.2").write_bytes(b"nothing")
    with pytest.raises(ImportError, match=r"libonnxruntime\.so\.1\.2.*pip install --upgrade onnxruntime"):
        find()


class OfKeys(Model):
    """A model that computes with keys, which are no input of a graph."""

    def __init__(self, make, features):
        super().__init__(features)
        self.embedding = Lookup(make, "embedding", self.features, 1)

    def forward(self, x):
        (rows,) = look_up(x, self.embedding)
        return rows.fields.sum(dim=(1, 2)) + (x.keys % 2).sum(dim=1)


class OwnInputs(OfKeys):
    """A model that arranges batches in a way of its own."""

    def inputs(self, batch):
        return super().inputs(batch)


class OwnTable(OfKeys):
    """A model with a table that is no lookup's."""

    def __init__(self, make, features):
        super().__init__(make, features)
        self.gates = make("gates", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [(OfKeys, "other margins than torch"), (OwnInputs, "has inputs"), (OwnTable, "table 'gates' is no Lookup's")],
)
def test_a_module_that_no_graph_can_stand_for_is_refused(kind, message):
    with shoal.local() as store:
        module = kind(tables(store), Features(["user", "ad"]))
        with pytest.raises(ValueError, match=message):
            onnx_tower.onnx_tower(module, module.features)


def test_models_without_a_dense_part_are_refused(tmp_path, capsys):
    batch = Batch(np.array([1, 0], np.float32), np.arange(3), np.array([7, 8], np.uint64), None)
    with shoal.LogisticRegression() as model:
        model.partial_fit(batch)
        model.save(tmp_path / "model")
        with pytest.raises(ValueError, match="no dense part"):
            model.export(tmp_path / "export", onnx=True)
    assert main(["export", str(tmp_path / "model"), "--output", str(tmp_path / "export"), "--onnx"]) == 2
    assert "--onnx writes the dense part of a click model" in capsys.readouterr().err
    assert not (tmp_path / "export").exists()
