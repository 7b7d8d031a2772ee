"""Models of several classes from files: labels of every format, fits, directories, the command line, serving."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, log_loss

import shoal
from cluster_fakes import TIMEOUT
from cluster_standin import cluster
from serving import ask, exported, predict, running
from shoal import cli
from shoal.errors import CorruptionError
from shoal.models import MulticlassRegression
from shoal.serve import LiveModel
from stores import joined

CLASSES, ROWS = 4, 600
FORMATS = ["libsvm", "libffm", "vw", "criteo", "csv", "parquet"]


def lines(form: str, labels: list[str]) -> str:
    rng = np.random.default_rng(2)
    rows = ["y,kind,size"] if form == "csv" else []
    for label in labels:
        kind = int(label) if rng.random() < 0.7 and label.isdigit() else int(rng.integers(CLASSES))
        size = int(rng.integers(1, 30))
        if form == "criteo":
            rows.append("\t".join([label, *[""] * 13, f"{kind:08x}", f"{size:08x}", *[""] * 24]))
        else:
            rows.append(
                {
                    "libsvm": f"{label} {kind}:1 {10 + size}:0.5",
                    "libffm": f"{label} 0:{kind}:1 1:{10 + size}:0.5",
                    "vw": f"{label} |kind k{kind} |size s{size}:0.5",
                    "csv": f"{label},k{kind},{size / 4}",
                }[form]
            )
    return "".join(f"{row}\n" for row in rows)


def drawn() -> list[str]:
    return [str(label) for label in np.random.default_rng(1).integers(0, CLASSES, ROWS)]


def reader(form: str, path: Path, labels: list[str], **how: Any) -> shoal.data.Reader:
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(
            pyarrow.table({"y": [float(label) for label in labels], "kind": [f"k{label}" for label in labels]}), path
        )
        return shoal.read_parquet(path, label="y", **how)
    path.write_text(lines(form, labels))
    if form == "csv":
        return shoal.read_csv(path, label="y", categorical=["kind"], numeric=["size"], **how)
    found: shoal.Reader = getattr(shoal, f"read_{form}")(path, **how)
    return found


@pytest.mark.parametrize("form", FORMATS)
def test_labels_of_every_format_may_be_numbers_of_classes(form: str, tmp_path: Path) -> None:
    labels = drawn()
    data = reader(form, tmp_path / "data", labels, batch_size=100)
    found = np.concatenate([batch.labels for batch in data.with_classes(CLASSES)])
    np.testing.assert_array_equal(found, np.array(labels, np.float32))
    assert found.dtype == np.float32
    with pytest.raises(ValueError, match=r"neither 0/1 nor -1/\+1"):
        list(data)
    for bad in ("4", "-1", "1.5", *(() if form == "parquet" else ("1e99",))):
        wrong = reader(form, tmp_path / "wrong", ["0", "3", bad]).with_classes(CLASSES)
        with pytest.raises(ValueError, match=r"number of a class|numbers of the classes"):
            list(wrong)
    if form != "parquet":
        skipping = reader(form, tmp_path / "wrong", ["0", "3", "7", "2"], on_error="skip").with_classes(CLASSES)
        assert [batch.labels.tolist() for batch in skipping] == [[0, 3, 2]]
        assert skipping.skipped == 1


def test_a_reader_with_a_text_as_its_positive_label_has_no_classes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("y,x\nyes,1\n")
    data = shoal.read_csv(tmp_path / "a.csv", label="y", positive="yes")
    with pytest.raises(ValueError, match="leave positive"):
        data.with_classes(3)
    for classes in (1, 0, -2):
        with pytest.raises(ValueError, match=f"classes is {classes}"):
            shoal.read_csv(tmp_path / "a.csv", label="y").with_classes(classes)


@pytest.mark.parametrize("loss", ["multinomial", "ovr"])
def test_a_fit_is_its_batches_in_turn_and_its_metrics_are_scikit_learns(loss: Any, tmp_path: Path) -> None:
    data = reader("libsvm", tmp_path / "data", drawn(), batch_size=64)
    with (
        MulticlassRegression(CLASSES, loss=loss, warm_up=False) as one,
        MulticlassRegression(CLASSES, loss=loss) as other,
    ):
        one.fit(data, valid=data, epochs=2, progress=False)
        before = []
        for epoch in range(2):
            for batch in data.with_classes(CLASSES):
                if epoch:
                    before.append(other.probabilities(batch))
                other.partial_fit(batch)
        whole = next(iter(reader("libsvm", tmp_path / "data", drawn(), batch_size=ROWS).with_classes(CLASSES)))
        p = other.probabilities(whole)
        np.testing.assert_array_equal(one.probabilities(whole), p)
        assert one.examples == other.examples == 2 * ROWS
        done = one.history.passes[1]
        assert (done.metrics.examples, done.complete, done.skipped) == (ROWS, True, 0)
        assert done.metrics.logloss == pytest.approx(log_loss(whole.labels, np.concatenate(before)), rel=1e-6)
        assert done.valid == one.evaluate(data)
        weights = np.random.default_rng(3).random(ROWS).astype(np.float32)
        weighted = shoal.Batch(whole.labels, whole.indptr, whole.keys, whole.values, weights)
        found = one.evaluate(weighted)
        assert found.logloss == pytest.approx(log_loss(whole.labels, p, sample_weight=weights), rel=1e-6)
        assert found.accuracy == pytest.approx(accuracy_score(whole.labels, p.argmax(1), sample_weight=weights))
        assert found.accuracy > 0.6
        with pytest.raises(ValueError, match="nothing was measured"):
            one.evaluate([])


def test_a_saved_model_predicts_and_learns_as_before(tmp_path: Path) -> None:
    data = reader("csv", tmp_path / "data", drawn(), batch_size=100)
    batch = next(iter(data.with_classes(CLASSES)))
    with MulticlassRegression(CLASSES, optimizer=shoal.FTRL(l1=0.1), loss="ovr", bias=False, seed=3) as model:
        with pytest.raises(ValueError, match="not fitted yet"):
            model.predict(batch)
        model.fit(data, progress=False)
        model.save(tmp_path / "m")
        with shoal.load(tmp_path / "m") as loaded, pickle.loads(pickle.dumps(model)) as pickled:
            assert isinstance(loaded, MulticlassRegression)
            for same in (loaded, pickled):
                assert (same.classes, same.loss, same.examples) == (CLASSES, "ovr", ROWS)
                assert (same.format, same.schema) == ("csv", data.schema)
                np.testing.assert_array_equal(same.probabilities(batch), model.probabilities(batch))
            model.partial_fit(batch)
            loaded.partial_fit(batch)
            np.testing.assert_array_equal(loaded.decision_function(batch), model.decision_function(batch))
            with pytest.raises(ValueError, match="learned from csv data"):
                loaded.fit(reader("vw", tmp_path / "vw", drawn()))
        with pytest.raises(ValueError, match="overwrite"):
            model.save(tmp_path / "m", overwrite=False)
    with shoal.LogisticRegression() as binary:
        binary.partial_fit(shoal.Batch(np.ones(1, np.float32), np.arange(2), np.zeros(1, np.uint64), None))
        binary.save(tmp_path / "b")
    with pytest.raises(ValueError, match=r"load it with shoal\.models\.load"):
        MulticlassRegression.load(tmp_path / "b")
    text = (tmp_path / "m" / "model.json").read_text()
    (tmp_path / "m" / "model.json").write_text(text.replace('"classes":4', '"classes":5'))
    with pytest.raises(CorruptionError):
        shoal.load(tmp_path / "m")


def run(capsys: Any, *arguments: object) -> Any:
    assert cli.main([str(one) for one in arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("form", ["libsvm", "csv"])
def test_the_commands_train_measure_predict_and_serve(form: str, tmp_path: Path, capsys: Any) -> None:
    data = reader(form, tmp_path / "data", drawn())
    columns = ["--label", "y", "--categorical", "kind", "--numeric", "size"] if form == "csv" else []
    how = ["--data", tmp_path / "data", "--format", form, *columns, "--classes", CLASSES, "--epochs", 2]
    out = run(
        capsys, "train", "lr", *how, "--valid", tmp_path / "data", "--output", tmp_path / "m", "--json", "--quiet"
    )
    reported = json.loads(out)
    assert (reported["classes"], reported["loss"], reported["examples"]) == (CLASSES, "multinomial", 2 * ROWS)
    assert reported["passes"][1]["valid"]["accuracy"] > 0.6
    with shoal.load(tmp_path / "m") as model:
        whole = list(data.with_classes(CLASSES))
        assert model.evaluate(whole).logloss == pytest.approx(reported["passes"][1]["valid"]["logloss"])
        p = np.concatenate([model.probabilities(batch) for batch in whole])
    measured = json.loads(run(capsys, "evaluate", tmp_path / "m", "--data", tmp_path / "data", "--json"))
    assert measured["accuracy"] == reported["passes"][1]["valid"]["accuracy"]
    assert "accuracy 0." in run(capsys, "evaluate", tmp_path / "m", "--data", tmp_path / "data")
    rows = run(capsys, "predict", tmp_path / "m", "--data", tmp_path / "data", "--output", "-").splitlines()
    np.testing.assert_array_equal(np.array([row.split("\t") for row in rows], float), p)
    with running(exported(tmp_path / "m", tmp_path / "e")) as (port, served):
        text = (tmp_path / "data").read_text().splitlines()
        instances: list[Any] = text[:50]
        if form == "csv":
            instances = [dict(zip(("kind", "size"), line.split(",")[1:], strict=True)) for line in text[1:51]]
        np.testing.assert_allclose(predict(port, instances), p[:50], rtol=1e-12)
        body = json.dumps({"instances": instances})
        arrow = "application/vnd.apache.arrow.stream"
        pyarrow = pytest.importorskip("pyarrow")
        _, answer, _ = ask(port, "POST", "/predict", body, {"Accept": arrow})
        column = pyarrow.ipc.open_stream(answer).read_all().column("probability")
        np.testing.assert_allclose(column.to_pylist(), p[:50], rtol=1e-12)
        assert json.loads(ask(port, "GET", "/versions")[1])["model"] == "multiclass regression"
        description = served.now.exported.model
    with cluster(1, 1, slots=16) as made, joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        live = MulticlassRegression(CLASSES, store=store, normalized=form == "csv")  # as the command does
        live.fit(whole, progress=False)
        store.flush()
        with LiveModel(lambda: shoal.connect(made.address, mode="read", timeout=TIMEOUT), description) as serving:
            np.testing.assert_array_equal(serving.now.predictor.probabilities(whole[0]), live.probabilities(whole[0]))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--classes", 1], "--classes is 1: pass 2 or more"),
        (["--classes", 4, "--grid", "l1=0,1"], "--grid is for two classes and does not apply to --classes"),
        (["--classes", 4, "--calibrate", "platt"], "--calibrate is for two classes"),
        (["--classes", 4, "--negative-rate", 0.5], "--negative-rate is for two classes"),
        (["--classes", 4, "--passes", 5], "--passes requires --solver dbpg"),
        (["--classes", 4, "--metric", "auc"], "--metric auc is for two classes: pass --metric logloss or accuracy"),
        (["--multi-class", "ovr"], "--multi-class requires --classes of 3 or more"),
        (["--classes", 3], "not the number of a class"),
    ],
)
def test_what_several_classes_do_not_support_is_refused(
    more: list[Any], text: str, tmp_path: Path, capsys: Any
) -> None:
    reader("libsvm", tmp_path / "data", drawn())
    command = ["train", "lr", "--data", tmp_path / "data", "--format", "libsvm", "--output", tmp_path / "m", "--quiet"]
    assert cli.main([str(one) for one in [*command, *more]]) != 0
    assert re.search(re.escape(text), capsys.readouterr().err)
    assert not (tmp_path / "m").exists()
