"""Click models whose dense part is ONNX, as the server answers them: in one call from body to answer."""

from __future__ import annotations

import csv
import io
import itertools
import json
import shutil
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="click models are torch modules")
pytest.importorskip("onnx", reason="graphs are written by onnx")
pytest.importorskip("onnxruntime", reason="graphs are run by onnxruntime")
pytest.importorskip("onnxscript", reason="torch writes graphs by onnxscript")

import shoal
from serving import ask, predict, running
from shoal.data.readers import field_number
from shoal.serve import Limits, ServedModel, ServedVersions
from shoal.serve.app import Handler, Request
from shoal.serve.bodies import JSON, examples
from shoal.serve.limits import Account, Budget, RequestError
from shoal.serve.versions import Settings
from shoal.torch.config import build, parse, schema_of
from tiers import rounds

NAMES = ["click", "user", "site", "tags", "price", "dwell", "seen", "place", "ages"]
FEATURES = [
    {"name": "user"},
    {"name": "site"},
    {"name": "tags", "type": "list", "max_len": 2},
    {"name": "both", "type": "cross", "of": ["user", "site"]},
    {"name": "all_tags", "type": "list", "column": "tags"},
    {"name": "tagged", "type": "cross", "of": ["all_tags", "seen"]},
    {"name": "dear", "type": "bucket", "column": "price", "edges": [0.25, 1]},
    {"name": "price", "type": "number", "log": True},
    {"name": "dwell", "type": "vector", "size": 2},
    {"name": "seen", "type": "sequence", "share": "site", "side": ["place"], "side_numeric": ["ages"]},
]
FULL = {
    "user": 3, "site": "b", "tags": ["x", "y", "x"], "price": 0.5, "dwell": [1, 0.25],
    "seen": ["a", "c d"], "place": ["top", "end"], "ages": [0.5, 2],
}  # fmt: skip


def text_of(cell) -> str:
    """What a cell of JSON is in a csv file."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return "|".join(map(text_of, cell)) if isinstance(cell, list) else str(cell)


def table_of(rows) -> bytes:
    """Write rows as csv."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(NAMES)
    writer.writerows([1, *(text_of(row.get(name)) for name in NAMES[1:])] for row in rows)
    return out.getvalue().encode()


class Asked:
    """A model, its export, and what reads its data."""

    def __init__(self, folder, model, schema):
        self.folder, self.model, self.schema = folder, model, schema

    def reader(self, rows):
        (self.folder / "asked.csv").write_bytes(table_of(rows))
        return shoal.read_csv(self.folder / "asked.csv", label="click", **self.schema).with_fields()


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("click")
    random = np.random.default_rng(5)
    rows = []
    for _ in range(200):
        n = int(random.integers(0, 5))
        rows.append(
            {
                "user": int(random.integers(9)),
                "site": str(random.choice(["a", "b", "c d", "5"])),
                "tags": [str(random.choice(["x", "y", "5"])) for _ in range(random.integers(0, 4))],
                "price": float(random.choice([0, 0.5, 2, -1.25])),
                "dwell": [0.5, float(random.integers(4))],
                "seen": [str(random.choice(["a", "b"])) for _ in range(n)],
                "place": [str(random.choice(["top", "end"])) for _ in range(n)],
                "ages": [float(random.integers(9)) for _ in range(n)],
            }
        )
    (folder / "log.csv").write_bytes(table_of(rows))
    described = {
        "data": {"format": "csv", "data": [str(folder / "log.csv")], "label": "click"},
        "features": FEATURES,
        "model": {"name": "din", "dim": 4, "hidden": [8]},
        "tables": {"optimizer": {"name": "Adagrad", "lr": 0.1}},
    }
    schema = schema_of(parse(described))
    with shoal.local() as store:
        reader = shoal.read_csv(folder / "log.csv", label="click", batch_size=50, **schema).with_fields()
        model = build(parse(described), store).fit(reader, epochs=1, progress=False)
        model.export(folder / "versions" / "1", onnx=True)
        yield Asked(folder, model, schema)


CELL = st.one_of(
    st.sampled_from(["a", "b", "c d", 'q"uote', "x,y", "5", "true", "é"]), st.integers(0, 9), st.booleans(),
    st.none(), st.just("NA"), st.just(""), st.sampled_from([0.5, 17.0, -2.25]),
)  # fmt: skip
NUMBER = st.sampled_from([0.5, 2, -1.25, "2", " 0.5 ", None, "", "NA", 0, -3])
# A list of one missing item is no list in csv.
TEXTS = st.lists(CELL, max_size=4).filter(lambda cells: len(cells) != 1 or text_of(cells) not in ("", "NA"))


@st.composite
def instances(draw):
    """Draw an instance, with columns beside the sequence that have as many items, or are missing."""
    cells = {"user": CELL, "site": CELL, "price": NUMBER, "tags": TEXTS | st.none(),
             "dwell": st.lists(NUMBER, min_size=2, max_size=2) | st.none(), "click": st.just(1)}  # fmt: skip
    row = draw(st.fixed_dictionaries({}, optional=cells))
    if draw(st.booleans()):
        row["seen"] = draw(TEXTS)
        n = len(row["seen"])
        for name, items in (("place", CELL), ("ages", NUMBER)):
            beside = draw(st.lists(items, min_size=n, max_size=n))
            if n != 1 or text_of(beside) not in ("", "NA"):
                row[name] = beside
    return row


@pytest.mark.slow
@settings(max_examples=rounds(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(instances(), min_size=1, max_size=6))
def test_json_and_csv_give_the_features_that_the_reader_gives(asked, rows):
    (batch,) = asked.reader(rows)
    with ServedModel(asked.folder / "versions") as served:
        model = served.now
        want = model.probabilities(batch)
        np.testing.assert_allclose(want, asked.model.probabilities(batch), rtol=1e-6)
        for body, kind in ((json.dumps({"instances": rows}).encode(), JSON), (table_of(rows), "text/csv")):
            with Account(Budget(Limits())) as account:
                found = model.probabilities(examples(body, kind, model.inputs, account))
            np.testing.assert_array_equal(found, want)


def test_every_form_of_a_request_is_answered_without_python(asked, monkeypatch):
    monkeypatch.setattr(Handler, "answer", None)
    rows = [FULL, {}, {"user": 1, "seen": ["a"]}]
    (batch,) = asked.reader(rows)
    with running(asked.folder / "versions") as (port, served):
        want = served.now.probabilities(batch).tolist()
        assert predict(port, rows).tolist() == want
        status, body, headers = ask(port, "POST", "/predict", table_of(rows), {"content-type": "text/csv"})
        assert (status, headers["shoal-version"]) == (200, "1")
        assert json.loads(body)["probabilities"] == want
        names = {field_number("csv", name): name for name in NAMES}
        cut = [slice(a, b) for a, b in itertools.pairwise(batch.indptr)]
        fields = [[names[int(one)] for one in batch.fields[c]] for c in cut]
        sparse = [
            {"keys": batch.keys[c].tolist(), "values": batch.values[c].tolist(), "fields": named}
            for c, named in zip(cut, fields, strict=True)
        ]
        assert predict(port, sparse).tolist() == want
        body = json.dumps({"instances": [{"user": "3", "site": "b"}]})
        status, body, _ = ask(port, "POST", "/v1/models/default:predict", body)
        (one,) = json.loads(body)["predictions"]
        assert one == predict(port, [{"user": 3, "site": "b"}])[0]
        raw = b"".join(struct.pack("<I", len(text)) + text for text in (b"b", b"a"))
        tensor = {"name": "site", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(raw)}}
        head = json.dumps({"inputs": [tensor]}).encode()
        at, sizes = "/v2/models/default/infer", {"inference-header-content-length": str(len(head))}
        status, body, _ = ask(port, "POST", at, head + raw, sizes)
        assert json.loads(body)["outputs"][0]["data"] == predict(port, [{"site": "b"}, {"site": "a"}]).tolist()


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        ({"place": ["top"]}, "instance 1 has 2 items in 'seen' and 1 in 'place'"),
        ({"ages": [1, 2, 3]}, "instance 1 has 2 items in 'seen' and 3 in 'ages'"),
        ({"dwell": [1]}, "instance 1 has 1 numbers in vector 'dwell', whose size is 2"),
        ({"dwell": [1, "x"]}, "instance 1, column 'dwell': 'x' is not a number"),
        ({"price": 1e39}, "instance 1, column 'price': 1e+39 is not finite as float32"),
        ({"seen": "a|b"}, "instance 1, column 'seen': 'a|b' is not a list"),
        ({"site": ["a"]}, "instance 1, column 'site': a list is not a cell"),
    ],
)
def test_an_instance_that_cannot_be_taken_is_named(asked, instance, message):
    with running(asked.folder / "versions") as (port, served):
        body = json.dumps({"instances": [FULL, FULL | instance]}).encode()
        status, answer, _ = ask(port, "POST", "/predict", body)
        assert (status, message in json.loads(answer)["error"]) == (400, True), answer
        fields = [{"keys": [1, 2], "fields": ["site", "site"]}]
        status, answer, _ = ask(port, "POST", "/predict", json.dumps({"instances": [FULL, *fields]}))
        assert "instance 1 has more than one feature of 'site'" in json.loads(answer)["error"]
        with pytest.raises((RequestError, ValueError), match="instance 1"), Account(Budget(Limits())) as account:
            served.now.probabilities(examples(body, JSON, served.now.inputs, account))


def test_crosses_of_long_lists_are_bounded_and_hold_up_no_other_request(asked, monkeypatch):
    passed_on = []
    answer = Handler.answer
    monkeypatch.setattr(Handler, "answer", lambda self, request: passed_on.append(1) or answer(self, request))
    body = json.dumps({"instances": [{"tags": ["x"] * 700, "seen": ["a"] * 700}]}, separators=(",", ":"))
    with running(asked.folder / "versions") as (port, _):
        status, found, _ = ask(port, "POST", "/predict", body)  # a small body, whose prediction takes long
        assert (status, passed_on) == (200, [1]), found
        assert len(predict(port, [FULL])) == 1
        assert passed_on == [1]
    with running(asked.folder / "versions", limits=Limits(decoded_bytes=1 << 20)) as (port, served):
        status, found, _ = ask(port, "POST", "/predict", body)
        assert (status, "send fewer examples" in json.loads(found)["error"]) == (413, True), found
        handler = Handler(served, limits=Limits(decoded_bytes=1 << 20))  # as over gRPC and in another application
        with Account(handler.budget) as account:
            response = answer(handler, Request("POST", "/predict", {}, body.encode(), account))
        assert response.status == 413
        assert handler.budget.held == 0


def test_a_batch_without_fields_is_refused(asked):
    with ServedModel(asked.folder / "versions") as served:
        native, workers = served.now.native, served.now.exported.workers
        with pytest.raises(ValueError, match="one field for each key"):
            native.probabilities(np.array([0, 1]), np.zeros(1, np.uint64), None, None, workers)
        with pytest.raises(TypeError):
            native.probabilities(np.array([0, 1]), np.zeros(1, np.float32), None, None, workers)
        none = np.zeros(0, np.uint64)
        assert native.probabilities(np.zeros(1, np.int64), none, None, none, workers).shape == (0,)


def test_versions_of_a_click_model_are_swapped_and_labelled_without_python(asked, tmp_path):
    where = tmp_path / "versions"
    shutil.copytree(asked.folder / "versions" / "1", where / "1")
    labelled = Settings(versions="all", labels={"stable": 1})
    with ServedVersions(where, labelled) as served, running({"ctr": served}) as (port, _):
        first = predict(port, [FULL])
        asked.model.export(where / "2", onnx=True, since=where / "1")
        assert served.reload()
        status, body, headers = ask(port, "POST", "/predict", json.dumps({"instances": [FULL]}))
        assert (status, headers["shoal-version"]) == (200, "2")
        assert json.loads(body)["probabilities"] == first.tolist()
        at = "/models/ctr/labels/stable/predict"
        _, _, headers = ask(port, "POST", at, json.dumps({"instances": [FULL]}))
        assert headers["shoal-version"] == "1"
        status, answer, _ = ask(port, "GET", "/metrics")
        assert 'shoal_serve_answers_total{model="ctr",version="2"}' in answer.decode()
