"""The prediction server: what it answers beside the model, and that nothing fails while versions change."""

from __future__ import annotations

import http.client
import io
import json
import logging
import shutil
import threading
import urllib.request

import numpy as np
import pytest

import shoal
from shoal import cli, models

pa = pytest.importorskip("pyarrow")

from serving import ask, exported, instances, predict, running, sparse_data, trained  # noqa: E402
from shoal.serve import Limits, ServedModel, ServedVersions  # noqa: E402
from shoal.serve.bodies import ARROW  # noqa: E402
from shoal.serve.store import ExportStore  # noqa: E402


@pytest.mark.parametrize("kind", [shoal.LogisticRegression, shoal.FactorizationMachine])
def test_answers_are_the_models_own_to_the_bit(tmp_path, kind):
    folder = exported(trained(tmp_path / "m", kind), tmp_path / "e")
    batch = sparse_data(np.random.default_rng(5), 50)
    with models.load(tmp_path / "m") as model:
        want = model.probabilities(batch)
        ones = model.probabilities(shoal.Batch(batch.labels, batch.indptr, batch.keys, None))
    with running(folder) as (port, _):
        np.testing.assert_array_equal(predict(port, instances(batch)), want)
        np.testing.assert_array_equal(predict(port, instances(batch, values=False)), ones)
        lists = {
            "keys": pa.array([row["keys"] for row in instances(batch)], pa.list_(pa.uint64())),
            "values": pa.array([row["values"] for row in instances(batch)], pa.list_(pa.float32())),
        }
        sink = io.BytesIO()
        table = pa.table(lists)
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        status, body, headers = ask(port, "POST", "/predict", sink.getvalue(), {"Content-Type": ARROW})
        assert (status, headers["shoal-version"]) == (200, "1")
        reported = pa.ipc.open_stream(body).read_all()
        np.testing.assert_array_equal(reported["probability"].to_numpy(), want)
        assert reported.schema.metadata == {b"version": b"1"}


def test_columns_are_read_as_the_training_data_was(tmp_path):
    frame = pa.table(
        {"click": [1.0, 0.0, 1.0, 0.0] * 20, "site": ["a", "b", "c", "b"] * 20, "price": [0.5, 2.0, None, 1.0] * 20}
    )
    how = {"label": "click", "categorical": ["site"], "numeric": ["price"], "interactions": [("site", "price")]}
    with shoal.LogisticRegression() as model:
        model.fit(shoal.read_arrow(frame, **how), progress=False)
        model.calibrate(shoal.read_arrow(frame, **how), "platt")
        model.save(tmp_path / "m")
        want = model.probabilities(shoal.read_arrow(frame, **how))[:4]
    with running(exported(tmp_path / "m", tmp_path / "e")) as (port, _):
        rows = frame.slice(0, 4).to_pylist()
        np.testing.assert_array_equal(predict(port, rows), want)
        for row in rows:
            del row["click"]
        del rows[2]["price"]
        np.testing.assert_array_equal(predict(port, rows), want)
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, frame.schema) as writer:
            writer.write_table(frame.slice(0, 4))
        headers = {"Content-Type": ARROW, "Accept": "application/json"}
        status, body, _ = ask(port, "POST", "/predict", sink.getvalue(), headers)
        assert status == 200
        np.testing.assert_array_equal(json.loads(body)["probabilities"], want)


def test_unknown_columns_are_counted_by_model_and_refused_if_asked(tmp_path):
    frame = pa.table({"click": [1.0, 0.0] * 20, "site": ["a", "b"] * 20, "user": ["u", "v"] * 20})
    with shoal.LogisticRegression() as model:
        model.fit(shoal.read_arrow(frame, label="click", categorical=["site", "user"]), progress=False)
        model.save(tmp_path / "m")
    export = exported(tmp_path / "m", tmp_path / "e")
    body = json.dumps({"instances": [{"site": "a", "usr": "u"}, {"usr": "v", "x": 1}, {"click": 1}]})
    csv = {"Content-Type": "text/csv"}
    with ServedVersions(export) as one, running({"ctr": one}) as (port, _):
        status, answer, _ = ask(port, "POST", "/models/ctr/predict", body)
        assert (status, len(json.loads(answer)["probabilities"])) == (200, 3)
        assert ask(port, "POST", "/predict", "user,site,when\nu,a,1\n", csv)[0] == 200
        assert b'shoal_serve_unknown_columns_total{model="ctr"} 3.0' in ask(port, "GET", "/metrics")[1]
    with running(export, refuse_unknown_columns=True) as (port, _):
        names = "columns 'usr', 'x' are not known to the model: its columns are 'site', 'user'"
        status, answer, _ = ask(port, "POST", "/predict", body)
        assert (status, json.loads(answer)) == (400, {"error": names})
        status, answer, _ = ask(port, "POST", "/predict", "user,site,when\nu,a,1\n", csv)
        assert (status, json.loads(answer)["error"][:45]) == (400, "column 'when' is not known to the model: its ")
        assert ask(port, "POST", "/predict", '{"instances": [{"site": "a"}, {"click": 0}]}')[0] == 200
        long = json.dumps({"instances": [{"x" * 100_000: 1}]})
        assert len(ask(port, "POST", "/predict", long)[1]) < 200
        assert b'shoal_serve_unknown_columns_total{model=""} 4.0' in ask(port, "GET", "/metrics")[1]


def test_a_body_from_curl_is_json(tmp_path):
    with running(exported(trained(tmp_path / "m"), tmp_path / "e")) as (port, _):
        body = json.dumps({"instances": [{"keys": [1, 2]}]})
        answers = {
            kind: ask(port, "POST", "/predict", body, {"Content-Type": kind})[:2]
            for kind in ("application/json", "application/json; charset=utf-8", "application/x-www-form-urlencoded")
        }
        assert len(set(answers.values())) == 1
        assert answers["application/json"][0] == 200
        assert ask(port, "POST", "/predict", body, {"Content-Type": "text/csv"})[0] == 400


@pytest.mark.slow
def test_a_click_model_predicts_with_its_tower(tmp_path):
    torch = pytest.importorskip("torch")
    del torch
    rng = np.random.default_rng(2)
    lines = ["click,site,user"] + [f"{rng.integers(2)},s{rng.integers(9)},u{rng.integers(30)}" for _ in range(300)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "c.toml").write_text(
        f"""
[data]
data = ["{tmp_path / "log.csv"}"]
format = "csv"
label = "click"
categorical = ["site", "user"]
[model]
name = "deepfm"
dim = 4
hidden = [8]
[train]
epochs = 1
batch_size = 64
[output]
output = "{tmp_path / "m"}"
"""
    )
    status = cli.main(["train", "ctr", "--config", str(tmp_path / "c.toml"), "--quiet"])
    assert status == 0
    from shoal.torch import config

    reader = shoal.read_csv(tmp_path / "log.csv", label="click", categorical=["site", "user"])
    with config.load(tmp_path / "m") as model:
        want = model.probabilities(model.reading(reader))
    rows = [dict(zip(("site", "user"), line.split(",")[1:], strict=True)) for line in lines[1:]]
    with running(exported(tmp_path / "m", tmp_path / "e")) as (port, _):
        np.testing.assert_allclose(predict(port, rows), want, rtol=1e-6)
        status, body, _ = ask(port, "POST", "/predict", '{"instances": [{"keys": [1]}]}')
        assert status == 400, body
        reported = json.loads(ask(port, "GET", "/versions")[1])
        assert reported["model"] == "click model"
        assert reported["takes"]["columns"] == {"site": "text", "user": "text"}
        assert "fields" in reported["takes"]["keys"]
    _refuses_rows_alone(tmp_path, "dense part", 1024)


def _refuses_rows_alone(folder, part, slots):
    """Check that no delta has new rows of the model `m` beside the older `part` of the export `e`."""
    (rows,) = (folder / "m").glob("checkpoint-*")
    message = f"has a model with a {part}, which new rows do not match: call model.export, or save the model and export"
    with shoal.local(slots=slots) as store:
        store.load(rows)
        with pytest.raises(ValueError, match=message):
            store.export(folder / "e2", since=folder / "e")
    assert cli.main(["export", str(rows), "--output", str(folder / "e2"), "--since", str(folder / "e")]) == 2
    assert not (folder / "e2").exists()


def test_a_delta_of_rows_is_served_with_their_own_calibration_only(tmp_path):
    rng = np.random.default_rng(8)
    batch, held_out, later = (sparse_data(rng) for _ in range(3))
    with shoal.LogisticRegression() as model:
        model.partial_fit(batch)
        model.calibrate(held_out, "platt").save(tmp_path / "m")
        exported(tmp_path / "m", tmp_path / "e")
        _refuses_rows_alone(tmp_path, "calibration", 64)
        model.partial_fit(later)
        model.calibrate(held_out, "platt").save(tmp_path / "m", overwrite=True)
        exported(tmp_path / "m", tmp_path / "e2", "--since", tmp_path / "e")
        with running(tmp_path / "e2") as (port, _):
            np.testing.assert_array_equal(predict(port, instances(held_out)), model.probabilities(held_out))


def test_a_delta_of_rows_is_served_with_the_model_of_its_base(tmp_path):
    batch = sparse_data(np.random.default_rng(8))
    with shoal.local() as store, shoal.LogisticRegression(store=store) as model:
        model.partial_fit(batch)
        model.save(tmp_path / "m")
        exported(tmp_path / "m", tmp_path / "e")
        model.partial_fit(batch)
        store.export(tmp_path / "e2", since=tmp_path / "e")
        shutil.copytree(tmp_path / "e2", tmp_path / "e3")
        with running(tmp_path / "e3") as (port, _):
            np.testing.assert_array_equal(predict(port, instances(batch)), model.probabilities(batch))


def test_a_delta_of_a_model_has_all_of_its_tables(tmp_path, capsys):
    folder = exported(trained(tmp_path / "m", shoal.FactorizationMachine, dim=2), tmp_path / "e")
    with shoal.export.open(folder) as export:
        first, *_ = export.tables
    more = ["--since", str(folder), "--table", first]
    assert cli.main(["export", str(tmp_path / "m"), "--output", str(tmp_path / "e2"), *more]) == 2
    assert "a model predicts with tables of one moment: export all tables" in capsys.readouterr().err
    assert not (tmp_path / "e2").exists()


@pytest.mark.slow
def test_no_request_fails_while_versions_come(tmp_path):
    serving = tmp_path / "serving"
    batch = sparse_data(np.random.default_rng(5), 20)
    want = {}
    for number in (1, 2, 3, 4):
        model = trained(tmp_path / f"m{number}", seed=number)
        with models.load(model) as loaded:
            want[number] = loaded.probabilities(batch)
    exported(tmp_path / "m1", serving / "1")
    seen, errors, stop = set(), [], threading.Event()
    with running(serving) as (port, served):

        def load():
            body = json.dumps({"instances": instances(batch)})
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            try:
                while not stop.is_set():
                    connection.request("POST", "/predict", body)
                    response = connection.getresponse()
                    reported = json.loads(response.read())
                    assert response.status == 200, reported
                    np.testing.assert_array_equal(reported["probabilities"], want[reported["version"]])
                    seen.add(reported["version"])
            except BaseException as error:
                errors.append(error)
            finally:
                connection.close()

        clients = [threading.Thread(target=load) for _ in range(3)]
        for client in clients:
            client.start()
        for number, more in ((2, ["--since", serving / "1"]), (3, []), (4, ["--since", serving / "3"])):
            exported(tmp_path / f"m{number}", serving / str(number), *more)
            status, body, _ = ask(port, "POST", "/reload")
            assert (status, json.loads(body)) == (200, {"version": number, "reloaded": True})
            shutil.rmtree(serving / str(number - 1), ignore_errors=number == 4)
            if number in (2, 4):
                exported(
                    tmp_path / f"m{number}", serving / str(number), "--version", number, "--overwrite"
                )  # its base is gone
                assert served.reload()
        stop.set()
        for client in clients:
            client.join()
        assert not errors
        assert 4 in seen or seen
        assert json.loads(ask(port, "GET", "/healthz")[1]) == {"status": "ok", "version": 4}
        metrics = ask(port, "GET", "/metrics")[1].decode()
        assert 'shoal_serve_requests_total{code="200"}' in metrics
        assert "shoal_serve_version 4.0" in metrics
        headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
            assert reply.read().endswith(b"# EOF\n")
        assert "shoal_serve_reloads 5.0" in metrics


def test_a_version_that_cannot_be_used_leaves_the_one_in_place(tmp_path):
    serving = tmp_path / "serving"
    exported(trained(tmp_path / "m"), serving / "1")
    with running(serving) as (port, served):
        with shoal.local() as store:
            store.table("t").assign(np.array([1], np.uint64), np.ones(1, np.float32))
            store.export(serving / "2")
        status, body, _ = ask(port, "POST", "/reload")
        assert status == 500
        assert "export of tables" in json.loads(body)["error"]
        assert served.now.version == 1
        assert predict(port, [{"keys": [1]}]).shape == (1,)
        assert "shoal_serve_reload_failures 1.0" in ask(port, "GET", "/metrics")[1].decode()
        exported(tmp_path / "m", serving / "3")
        served.watch(0.01)
        while served.now.version != 3:
            threading.Event().wait(0.01)


def break_manifest(folder, how):
    path = folder / "manifest.json"
    body = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": body[:200], "other": body.replace(b"shoal export", b"shoal expert")}[how])


def break_data(folder, how):
    path = next(path for path in folder.iterdir() if path.suffix == ".frozen")
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


@pytest.mark.parametrize("how", ["empty", "cut", "other", "data"])
def test_a_damaged_version_is_reported_kept_out_and_logged_once(tmp_path, caplog, how):
    serving = tmp_path / "serving"
    exported(trained(tmp_path / "m"), serving / "1")
    with running(serving) as (port, served), caplog.at_level(logging.INFO, "shoal"):
        assert json.loads(ask(port, "POST", "/reload")[1]) == {"version": 1, "reloaded": False}
        exported(tmp_path / "m", serving / "2")
        (break_data if how == "data" else break_manifest)(serving / "2", how)
        for _ in range(3):
            status, body, _ = ask(port, "POST", "/reload")
            assert (status, json.loads(body)["version"]) == (500, 1), body
            assert str(serving / "2") in json.loads(body)["error"]
            assert "is damaged" in json.loads(body)["error"]
        assert predict(port, [{"keys": [1]}]).shape == (1,)
        assert [record.getMessage()[:18] for record in caplog.records] == ["version 1 is kept:"]
        exported(tmp_path / "m", serving / "3", "--version", 3)
        assert json.loads(ask(port, "POST", "/reload")[1]) == {"version": 3, "reloaded": True}
        assert json.loads(ask(port, "POST", "/reload")[1]) == {"version": 3, "reloaded": False}
        assert "version 3 replaces version 1" in caplog.text
        checkpoint = serving / "other"
        with shoal.local() as store:
            store.table("t")
            store.save(checkpoint)
        assert json.loads(ask(port, "POST", "/reload")[1]) == {"version": 3, "reloaded": False}
    with running(serving) as (_, served):  # beside what is damaged
        assert served.now.version == 3


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        ("{", {}, 400, "incomplete JSON"),
        ("[]", {}, 400, "the body is an object"),
        ('{"instances": []}', {}, 400, "at least one"),
        ('{"instances": [7]}', {}, 400, "an instance is an object"),
        ('{"instances": [{"keys": [-1]}]}', {}, 400, ""),
        ('{"instances": [{"keys": [18446744073709551616]}]}', {}, 400, ""),
        ('{"instances": [{"keys": [1.5]}]}', {}, 400, "1.5 is not a key"),
        ('{"instances": [{"keys": [1, 2], "values": [1]}]}', {}, 400, "2 keys and 1 values"),
        ('{"instances": [{"keys": [1], "values": [1e39]}]}', {}, 400, "finite"),
        ('{"instances": [{"keys": [1]}, {"site": "a"}]}', {}, 400, "site"),
        ('{"instances": [{"site": "a"}]}', {}, 400, "send keys"),
        ("x", {"Content-Type": "text/csv"}, 400, "this model has no columns"),
        ("x", {"Content-Type": "text/html"}, 400, "text/html"),
        ("0 1:1", {"Content-Type": "text/plain"}, 400, "send keys"),
        ("x", {"Content-Type": ARROW}, 400, ""),
        (b"x" * 2000, {}, 413, "2000 bytes"),
    ],
)
def test_what_cannot_be_predicted_from_is_refused_with_words(bad_port, body, headers, status, message):
    got, reported, _ = ask(bad_port, "POST", "/predict", body, headers)
    assert got == status, reported
    assert message in json.loads(reported)["error"]
    assert predict(bad_port, [{"keys": [2**64 - 1, 0]}]).shape == (1,)


@pytest.fixture(scope="module")
def bad_port(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    with running(exported(trained(folder / "m"), folder / "e"), limits=Limits(body_bytes=1000)) as (port, _):
        yield port


def test_a_body_without_a_length_is_bounded_too(bad_port):
    connection = http.client.HTTPConnection("127.0.0.1", bad_port, timeout=120)
    connection.request(
        "POST",
        "/predict",
        iter([b"x" * 600, b"x" * 600]),
        encode_chunked=True,
        headers={"Transfer-Encoding": "chunked"},
    )
    assert connection.getresponse().status == 413
    connection.close()


def test_an_export_of_tables_is_no_model_to_serve(tmp_path, capsys):
    with shoal.local() as store:
        store.table("t")
        store.export(tmp_path)
    assert cli.main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "export of tables, not of a model" in capsys.readouterr().err


def test_nothing_is_pushed_into_an_export(tmp_path):
    with ServedModel(exported(trained(tmp_path / "m"), tmp_path / "e")) as served:
        model = served.now.predictor
        with pytest.raises(ValueError, match="read-only"):
            model.tables[0].push(np.array([1], np.uint64), np.ones(1, np.float32))
        with pytest.raises(ValueError, match="read-only"):
            model.store.tick()


def test_a_table_of_an_export_answers_reads_by_key_and_refuses_the_rest(tmp_path):
    keys = np.arange(1, 40, dtype=np.uint64)
    with shoal.local(slots=8) as store:
        table = store.table("t", dim=3, optimizer=shoal.SGD(1.0), init=shoal.Uniform(0.5, seed=2))
        table.push(keys, np.ones((len(keys), 3), np.float32)).result()
        store.export(tmp_path)
        want = table.pull(keys[::-1])
    with shoal.export.open(tmp_path) as export, ExportStore(export.now) as store:
        table = store.exported("t")
        np.testing.assert_array_equal(table.pull(keys[::-1]), want)
        assert len(table) == len(keys)
        assert table.contains(np.array([1, 40, 1], np.uint64)).tolist() == [True, False, True]
        assert sorted(key for some, _ in table.items() for key in some.tolist()) == keys.tolist()
        refused = [
            lambda: table.push(keys, np.ones((len(keys), 3), np.float32)),
            lambda: table.push_pull(keys, np.ones((len(keys), 3), np.float32)),
            lambda: table.push_unique(table.key_batch(keys), np.ones((len(keys), 3), np.float32)),
            lambda: table.push_per_key(table.key_batch(keys), np.ones((len(keys), 3), np.float32)),
            lambda: table.assign(keys, np.ones((len(keys), 3), np.float32)),
            lambda: table.erase(keys),
            lambda: table.state(keys),
            lambda: table.sum(),
            lambda: table.digest(),
            lambda: table.decay(0.5),
            lambda: table.stats(),
            lambda: table.sweep(shoal.MinNorm(0.1), dry_run=True),
            lambda: table.shard,
        ]
        for call in refused:
            with pytest.raises(ValueError, match="table 't' is of an export, which is read-only"):
                call()
        np.testing.assert_array_equal(table.pull(keys[::-1]), want)


def test_a_model_whose_table_differs_from_the_exported_one_is_refused(tmp_path):
    with shoal.local(slots=8) as store:
        store.table("t", dim=3, init=shoal.Uniform(0.5, seed=2))
        store.export(tmp_path)
    with shoal.export.open(tmp_path) as export, ExportStore(export.now) as store:
        with pytest.raises(ValueError, match="is exported with dim 3, and the model takes dim 2"):
            store.table("t", dim=2, init=shoal.Uniform(0.5, seed=2))
        with pytest.raises(ValueError, match="exported with init_seed 2, and the model takes init_seed 1"):
            store.table("t", dim=3, init=shoal.Uniform(0.5, seed=1))
