"""Fits of several classes by the loop of all models: workers, checkpoints, early stopping, callbacks, reports."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from scipy.special import log_softmax

import shoal
from cluster_standin import cluster
from paths import GOLDEN
from shoal import cli
from shoal.data import Batch
from shoal.metrics import Accumulator, MulticlassAccumulator, accumulator_from_dict
from shoal.models import Callback, Checkpointing, EarlyStopping, MulticlassRegression
from shoal.models.multiclass import MultiClass
from shoal.models.plan import Metric
from shoal.models.preprocessing import take
from shoal.tracking import Tracker
from stores import together

CLASSES, COLUMNS, EXAMPLES, BATCH = 4, 30, 480, 40
LOSSES: list[MultiClass] = ["multinomial", "ovr"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libsvm file of 480 examples of four classes, with values."""
    random = np.random.default_rng(7)
    W = random.normal(size=(COLUMNS, CLASSES))
    lines = []
    for _ in range(EXAMPLES):
        keys = np.unique(random.integers(0, COLUMNS, 5))
        values = random.choice([0.5, 1.0, 2.0], len(keys))
        label = int((values @ W[keys] + random.gumbel(size=CLASSES)).argmax())
        lines.append(f"{label} " + " ".join(f"{key}:{value:g}" for key, value in zip(keys, values, strict=True)))
    path = tmp_path_factory.mktemp("log") / "log.libsvm"
    path.write_text("\n".join(lines) + "\n")
    return path


def reader(log: Path, batch_size: int = BATCH) -> shoal.data.Reader:
    return shoal.read_libsvm(log, batch_size=batch_size)


def oracle(labels: Any, margins: Any, weights: Any, loss: str) -> tuple[float, float]:
    """Log-loss and accuracy in float64, the obvious way."""
    a = np.asarray(margins, np.float64)
    logs = log_softmax(a, axis=1)
    if loss == "ovr":
        s = 1 / (1 + np.exp(-a))
        logs = np.log(s / s.sum(axis=1, keepdims=True))
    y, w = np.asarray(labels).astype(int), np.asarray(weights, np.float64)
    own = logs[np.arange(len(y)), y]
    return -(own @ w) / w.sum(), ((a.argmax(axis=1) == y) @ w) / w.sum()


# ---- metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [1, 7, 385])
def test_merged_metrics_are_those_of_the_whole_to_the_bit_and_the_oracles(n: int, weighted: bool) -> None:
    random = np.random.default_rng(n)
    labels, margins = random.integers(0, 5, n), random.normal(scale=2, size=(n, 5)).round()  # with ties
    weights = random.choice([0.0, 0.5, 3.0], n) + 0.25 if weighted else None
    parts = [MulticlassAccumulator(5) for _ in range(3)]
    for begin in range(0, n, 10):
        rows = slice(begin, begin + 10)
        some = None if weights is None else weights[rows]
        parts[begin // 10 % 3].update(labels[rows], margins[rows], some)
    merged = []
    for order in ([0, 1, 2], [2, 0, 1]):
        seen = parts[0].empty()
        for k in order:
            seen.merge(accumulator_from_dict(json.loads(json.dumps(parts[k].to_dict()))))  # type: ignore[arg-type]
        merged.append(seen)
    assert merged[0].to_dict() == merged[1].to_dict()
    logloss, accuracy = oracle(labels, margins, np.ones(n) if weights is None else weights, "multinomial")
    found = merged[0].result()
    assert found == merged[1].result()
    assert (found.logloss, found.accuracy) == (pytest.approx(logloss, rel=1e-13), pytest.approx(accuracy, rel=1e-13))
    assert (found.examples, found.weight) == (n, pytest.approx(n if weights is None else weights.sum()))
    assert re.fullmatch(r"logloss [\d.]+  accuracy [\d.]+  \(\d+ examples?( of weight [\d.]+)?\)", str(found))


def test_what_is_no_batch_or_no_accumulator_of_several_classes_is_refused() -> None:
    seen = MulticlassAccumulator(3)
    margins = np.zeros((2, 3))
    for arguments, text in (
        (([0, 3], margins), "label 3 at 1"),
        (([0, 0.5], margins), "label 0.5 at 1"),
        (([0, 1], margins[:, :2]), r"margins \(2, 2\): pass float64\[2, 3\]"),
        (([0, 1], margins, [1, -1]), "weight -1.0 at 1"),
        (([0, 1], margins * np.nan), r"margins \[nan, nan, nan\] at 0"),
    ):
        with pytest.raises(ValueError, match=text):
            seen.update(*arguments)
    assert seen.examples == 0
    assert np.isnan(seen.logloss)
    with pytest.raises(ValueError, match="classes are 3 and 4"):
        seen.merge(MulticlassAccumulator(4))
    described = seen.to_dict()
    assert isinstance(accumulator_from_dict(Accumulator().to_dict()), Accumulator)
    for change in ({"version": 2}, {"classes": 1}, {"examples": -1}, {"sums": {}}):
        with pytest.raises(ValueError, match=r"version 1|classes is 1|examples is -1|lacks something"):
            accumulator_from_dict(described | change)


# ---- several workers -------------------------------------------------------------------------------------------------


class Half:
    """Each batch of a reader, cut among workers: the k-th batches of all are one of the reader's."""

    def __init__(self, log: Path, rank: int, workers: int) -> None:
        self._log, self._rank, self._workers = log, rank, workers

    def __iter__(self) -> Iterator[Batch]:
        for batch in reader(self._log).with_classes(CLASSES):
            yield take(batch, np.arange(self._rank, len(batch), self._workers))


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_workers_at_halves_of_a_batch_learn_what_one_learns_from_the_whole(log: Path, loss: MultiClass) -> None:
    """Gradients of halves are summed in another order than those of the whole: to float32 noise."""
    keys = np.arange(COLUMNS, dtype=np.uint64)

    def learn(store: shoal.Store) -> Any:
        with MulticlassRegression(
            CLASSES, optimizer=shoal.FTRL(alpha=0.3), store=store, loss=loss, warm_up=False
        ) as model:
            half = Half(log, store.rank, store.num_workers)
            valid = reader(log).split(store.rank, store.num_workers)
            model.fit(half, valid=valid, epochs=2, progress=False)
            found = model.table.pull(keys), model.bias, model.history.passes, model.examples
            store.barrier()
            return found

    with shoal.local(threads=1) as store:
        weights, bias, alone, _ = learn(store)
    with cluster(2, 1) as made:
        found = together(made.address, 2, learn)
    whole = next(iter(reader(log, EXAMPLES).with_classes(CLASSES)))
    assert whole.values is not None
    X = np.zeros((EXAMPLES, COLUMNS))
    X[np.repeat(np.arange(EXAMPLES), np.diff(whole.indptr)), whole.keys.astype(int)] = whole.values
    for its_weights, its_bias, passes, examples in found:
        np.testing.assert_allclose(its_weights, weights, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(its_bias, bias, rtol=1e-4, atol=1e-5)
        assert examples == 2 * EXAMPLES
        for mine, one in zip(passes, alone, strict=True):
            assert mine.metrics.examples == one.metrics.examples == EXAMPLES
            assert mine.metrics.logloss == pytest.approx(one.metrics.logloss, rel=1e-5)
            assert mine.metrics.accuracy == pytest.approx(one.metrics.accuracy, abs=2 / EXAMPLES)
        margins = X @ its_weights.astype(np.float64) + its_bias
        logloss, accuracy = oracle(whole.labels, margins, np.ones(EXAMPLES), loss)
        assert passes[1].valid.logloss == pytest.approx(logloss, rel=1e-6)
        assert passes[1].valid.accuracy == pytest.approx(accuracy, abs=1e-12)
        assert passes[1].valid.accuracy > 0.5
    assert str(found[0][2][1].valid) == str(found[1][2][1].valid)
    assert found[0][0].tobytes() == found[1][0].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("consistency", [shoal.SSP(2), shoal.ASP()], ids=str)
def test_workers_with_unequal_shares_end_together(log: Path, consistency: shoal.Consistency) -> None:
    batches = list(reader(log).with_classes(CLASSES))

    def learn(store: shoal.Store) -> Any:
        with MulticlassRegression(CLASSES, store=store) as model:
            own = [batches[:9], batches[9:]][store.rank]
            model.fit(own, valid=batches if store.rank == 1 else None, epochs=2, progress=False)
            store.barrier()
            return model.examples, [done.metrics for done in model.history.passes], model.history.passes[-1].valid

    with cluster(2, 1) as made:
        first, second = together(made.address, 2, learn, consistency=consistency)
    assert first == second
    assert first[0] == 2 * EXAMPLES
    assert first[1][0].examples == first[2].examples == EXAMPLES
    assert first[2].logloss < np.log(CLASSES)


def test_splits_of_the_scheduler_are_learned_from_once(log: Path) -> None:
    def learn(store: shoal.Store) -> tuple[int, Any]:
        with MulticlassRegression(CLASSES, store=store) as model:
            for split in store.splits(reader(log), split_bytes=2000):
                model.fit(split, progress=False)
            store.barrier()
            return model.examples, model.evaluate(reader(log)).accuracy

    with cluster(1, 1) as made:
        found = together(made.address, 2, learn)
    assert sum(examples for examples, _ in found) == EXAMPLES
    assert found[0][1] > 0.4


# ---- checkpoints and early stopping ----------------------------------------------------------------------------------


class Cut(Exception):
    pass


class CutAfter(Callback):
    """Ends the fit after some batches."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def batch_done(self, progress: Any) -> None:
        if progress.batches == self._batches:
            raise Cut


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_fit_that_resumes_has_the_bits_of_one_that_never_stopped(log: Path, tmp_path: Path, loss: MultiClass) -> None:
    def fit(folder: Path, *, resume: bool = False, **how: Any) -> Any:
        optimizer = shoal.FTRL(alpha=0.3, l1=0.1)
        with MulticlassRegression(CLASSES, optimizer=optimizer, loss=loss, warm_up=False) as model:
            checkpoint = Checkpointing(folder, every=4, resume=resume)
            model.fit(reader(log), valid=reader(log), epochs=3, progress=False, checkpoint=checkpoint, **how)
            passes = [(done.metrics, done.valid, done.features) for done in model.history.passes]
            return model.table.digest(), model.examples, passes, model.history.points

    expected = fit(tmp_path / "whole")
    for after in (7, 14):  # within the first pass of twelve batches, and within the second
        with pytest.raises(Cut):
            fit(tmp_path / f"{after}", callbacks=CutAfter(after))
        found = fit(tmp_path / f"{after}", resume=True)
        assert found[:3] == expected[:3]
        assert [point.accuracy for point in found[3]] == [point.accuracy for point in expected[3]]
    with pytest.raises(ValueError, match="has finished"):
        fit(tmp_path / "whole", resume=True)


def test_a_fit_of_other_classes_or_another_loss_is_not_resumed(log: Path, tmp_path: Path) -> None:
    data = reader(log)
    with MulticlassRegression(CLASSES) as model, pytest.raises(Cut):
        model.fit(data, progress=False, callbacks=CutAfter(5), checkpoint=Checkpointing(tmp_path / "m", every=2))
    for classes, loss in ((CLASSES, "ovr"), (CLASSES + 1, "multinomial")):
        with (
            MulticlassRegression(classes, loss=loss) as other,  # type: ignore[arg-type]
            pytest.raises(ValueError, match=rf"classes=4, loss='multinomial', this is a .*={classes}, loss='{loss}'"),
        ):
            other.fit(data, progress=False, checkpoint=Checkpointing(tmp_path / "m", every=2, resume=True))


@pytest.mark.parametrize("metric", ["logloss", "accuracy"])
def test_early_stopping_restores_the_weights_of_the_best_pass(log: Path, metric: Metric) -> None:
    batches = list(reader(log).with_classes(CLASSES))
    # Validated on three batches with other labels: what is learned from the rest makes it worse, after a while.
    valid = [replace(batch, labels=(batch.labels + (np.arange(BATCH) % 3 == 0)) % CLASSES) for batch in batches[:3]]
    with MulticlassRegression(CLASSES, optimizer=shoal.FTRL(alpha=1.0)) as model:
        model.fit(batches[3:], valid=valid, epochs=40, progress=False, early_stopping=EarlyStopping(2, metric=metric))
        sign = -1 if metric == "logloss" else 1
        gains = [sign * getattr(done.valid, metric) for done in model.history.passes]
        best = model.history.best_pass
        assert best is not None
        assert len(gains) == best + 2 < 40
        assert gains[best - 1] == max(gains)
        assert sign * getattr(model.evaluate(valid), metric) == pytest.approx(max(gains), rel=1e-12)


def test_what_is_for_two_classes_is_refused(log: Path) -> None:
    with MulticlassRegression(CLASSES) as model:
        with pytest.raises(ValueError, match="metric is 'auc', which is of two classes: pass 'logloss' or 'accuracy'"):
            model.fit(reader(log), progress=False, early_stopping=EarlyStopping(1, metric="auc"))
        assert len(model.table) == 0
        with pytest.raises(ValueError, match="calibration is of two classes, and this model has 4"):
            model.calibrate(reader(log))
    batch = Batch(np.array([0, 1], np.float32), np.arange(3), np.array([7, 8], np.uint64), None)
    grid = shoal.models.LogisticRegressionGrid({"alpha": [0.1, 0.2]})
    for binary in (shoal.LogisticRegression(), grid):
        with (
            binary,
            pytest.raises(ValueError, match="metric is 'accuracy', which is of several classes: pass 'logloss'"),
        ):
            binary.fit([batch], valid=[batch], progress=False, early_stopping=EarlyStopping(1, metric="accuracy"))


# ---- callbacks, tracking, progress, reports --------------------------------------------------------------------------


class Written(Tracker):
    """Keeps what a tracker writes."""

    def __init__(self) -> None:
        super().__init__(log_every=3)
        self.settings: dict[str, Any] = {}
        self.numbers: dict[str, list[float]] = {}

    def begin_run(self, settings: Any) -> None:
        self.settings = dict(settings)

    def write(self, examples: int, numbers: Any) -> None:
        for name, number in numbers.items():
            self.numbers.setdefault(name, []).append(number)

    def end_run(self, model: Any, saved: Any, error: Any) -> None:
        pass


def test_trackers_and_callbacks_see_the_log_loss_and_the_accuracy(log: Path) -> None:
    tracker, seen = Written(), []
    with MulticlassRegression(CLASSES, loss="ovr") as model:
        model.fit(
            reader(log), valid=reader(log), progress=False, callbacks=[tracker, lambda one: seen.append(one.valid)]
        )
        (done,) = model.history.passes
        later = Written()
        later.log_fitted(model)
    assert seen == [done.valid]
    names = {"logloss", "accuracy"}
    assert tracker.numbers.keys() == {
        *(f"{group}/{name}" for group in ("progressive", "pass", "valid") for name in names),
        "progressive/examples_per_second",
        "rows/multiclass",
    }
    assert done.valid is not None
    for written in (tracker, later):
        assert written.numbers["pass/accuracy"] == [done.metrics.accuracy]
        assert written.numbers["valid/logloss"] == [done.valid.logloss]
        assert (written.settings["kind"], written.settings["classes"]) == ("multiclass regression", CLASSES)
        assert written.settings["loss"] == "ovr"


def test_a_pass_far_worse_than_equal_probabilities_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    values = np.full(60, 1e4, np.float32)
    keys = np.random.default_rng(0).integers(0, 5, 60).astype(np.uint64)
    batch = Batch((np.arange(60) % 3).astype(np.float32), np.arange(61), keys, values)
    with MulticlassRegression(3, optimizer=shoal.SGD(lr=1.0)) as model:
        model.fit([batch], epochs=2, progress=False)
    assert re.search(r"relative log-loss \S+: the predictions of pass 1 are far worse than equal", caplog.text)
    assert "normalized=True" in caplog.text


def test_values_of_any_scale_are_normalized_and_rules_apply_to_rows(log: Path) -> None:
    found = []
    for scale in (8.0, 2.0**20):
        with MulticlassRegression(CLASSES, normalized=True, admit=shoal.AfterCount(2)) as model:
            batches = list(reader(log).with_classes(CLASSES))
            one = np.full(1, 0.7, np.float32)
            rare = Batch(np.zeros(1, np.float32), np.arange(2), np.array([99], np.uint64), one)
            for b in [*batches, rare]:
                assert b.values is not None
                values = (b.values * scale).astype(np.float32)
                model.partial_fit(Batch(b.labels, b.indptr, b.keys, values))
            assert not model.table.contains(np.array([99], np.uint64))[0]
            assert len(model.scales()[0]) == COLUMNS + 1
            found.append(model.table.pull(np.arange(COLUMNS, dtype=np.uint64)))
    np.testing.assert_array_equal(found[0], found[1])


def test_weights_of_which_some_are_zero_are_read_and_the_largest_found() -> None:
    keys, rows = np.array([7, 8, 9], np.uint64), np.array([[1, 0, 0], [0, -5, 2], [0, 0, 0]], np.float32)
    with MulticlassRegression(3, optimizer=shoal.SGD(lr=1.0)) as model:
        model.table.push(keys, -rows).result()
        found = dict(zip(*(array.tolist() for array in model.weights()), strict=True))
        assert found == {7: [1, 0, 0], 8: [0, -5, 2]}
        assert model.count_nonzero() == 3
        assert [array.tolist() for array in model.top(1)] == [[8], [[0, -5, 2]]]
        assert model.top(names={7: "a=b"})[0] == ["8", "a=b"]


def run(capsys: Any, *arguments: object) -> tuple[str, str]:
    assert cli.main([str(one) for one in arguments]) == 0
    reported = capsys.readouterr()
    return reported.out, reported.err


@pytest.mark.slow
def test_the_command_resumes_tracks_reports_and_inspects(log: Path, tmp_path: Path, capsys: Any) -> None:
    train = ["train", "lr", "--data", log, "--format", "libsvm", "--valid", log, "--classes", CLASSES, "--epochs", 2]
    train += ["--output", tmp_path / "m", "--checkpoint-every", 5, "--resume", "--batch-size", BATCH]
    out, err = run(capsys, *train, "--progress", 100)
    assert re.search(r"progressive +logloss [\d.]+  accuracy [\d.]+  \(480 examples\)", out)
    assert re.search(r"table +31 rows of 4", out)
    assert re.search(r"weights +\d+ are not zero, of 4 classes", out)
    assert "accuracy\n" in err
    assert re.search(r"^[\d.]+ +[\d.]+ +480 +480 +0\.\d+$", err, re.MULTILINE)
    assert "has finished already" in run(capsys, *train)[0]
    out, _ = run(capsys, "inspect", tmp_path / "m", "--top", 3)
    assert re.search(r"classes +4\n +loss +multinomial", out)
    assert len(re.findall(r"^    [+-][\d.]+ +\d+, class [0-3]$", out, re.MULTILINE)) == 3
    reported = json.loads(run(capsys, "inspect", tmp_path / "m", "--top", 1, "--json")[0])
    assert len(reported["top"][0]["weight"]) == CLASSES
    for more in ([], ["--data", log]):
        run(capsys, "report", tmp_path / "m", *more)
        page = (tmp_path / "m" / "report.html").read_text()
        assert "Progressive accuracy over" in page
        pictures = [base64.b64decode(data).decode() for data in re.findall(r"base64,([^\"]+)", page)]
        assert any("equal probabilities: 1.3863" in picture for picture in pictures)
        assert ", class 2</td>" in page
        assert "AUC" not in page
        assert not re.search(r"\bnan\b", page)


@pytest.mark.slow
def test_two_classes_of_softmax_and_a_pass_without_examples_are_shown_as_of_several(
    tmp_path: Path, capsys: Any
) -> None:
    batch = Batch(np.array([0, 1], np.float32), np.arange(3), np.array([7, 8], np.uint64), None)
    with MulticlassRegression(2) as model:
        with pytest.raises(ValueError, match="nothing was learned"):
            model.fit([], progress=False)
        model.fit([batch], progress=False).save(tmp_path / "m")
    with shoal.load(tmp_path / "m") as loaded:
        empty, done = (str(one.metrics) for one in loaded.history.passes)
        assert empty == "logloss nan  accuracy nan  (0 examples)"
        assert done == "logloss 0.693147  accuracy 0.500000  (2 examples)"
    assert "AUC" not in run(capsys, "inspect", tmp_path / "m", "--top", 2)[0]
    run(capsys, "report", tmp_path / "m")
    page = (tmp_path / "m" / "report.html").read_text()
    assert "Progressive accuracy over" in page
    assert "AUC" not in page


# ---- arrays and frames -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_arrays_and_frames_have_labels_of_any_names(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    X = random.normal(size=(300, 3))
    numbers = X.argmax(axis=1)
    y = np.array(["left", "mid", "right"])[numbers]
    weights = np.array([1.0, 2.0, 0.5])
    with MulticlassRegression(3, class_weight={"mid": 2.0, "right": 0.5}) as model, MulticlassRegression(3) as weighted:
        model.fit(X, y, valid=(X, y), progress=False)
        assert model.classes_.tolist() == ["left", "mid", "right"]
        assert np.mean(model.predict(X) == y) > 0.8
        assert model.predict_proba(X).shape == (300, 3)
        assert model.score(X, y) == model.evaluate(X, y).accuracy > 0.8
        model.save(tmp_path / "m")
        with shoal.load(tmp_path / "m") as loaded:
            assert loaded.predict(X).tolist() == model.predict(X).tolist()
        weighted.fit(X, numbers, sample_weight=weights[numbers], progress=False)
        assert weighted.classes_.tolist() == [0, 1, 2]
        np.testing.assert_array_equal(weighted.decision_function(X), model.decision_function(X))
        for wrong, text in ((["up"] * 300, "the label 'up': the model's classes are 'left', ..., 'right'"),):
            with pytest.raises(ValueError, match=text):
                model.fit(X, wrong)
    with MulticlassRegression(3, class_weight="balanced") as model:
        for wrong, text in (
            (y[:299], "300 rows, and y 299"),
            (np.where(numbers == 2, "mid", y), "y has 2 classes, such as 'left', 'mid', and the model 3"),
            (numbers == 1, "y is boolean, and the model has 3 classes"),
        ):
            with pytest.raises(ValueError, match=text):
                model.fit(X, wrong, progress=False)
        with pytest.raises(ValueError, match=r"class_weight='balanced' needs examples of all 3 classes: .* none of 2"):
            model.fit(X, np.minimum(numbers, 1))
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2]})
        model.fit(frame, y, progress=False)
        each = {side: 100 / np.count_nonzero(y == side) for side in ("left", "mid", "right")}
        with MulticlassRegression(3, class_weight=each) as same:
            same.fit(frame, y, progress=False)
            np.testing.assert_array_equal(same.decision_function(frame), model.decision_function(frame))
        assert model.score(frame, y) > 0.8
        assert np.mean(model.predict(frame) == y) > 0.8


# ---- files of earlier versions ---------------------------------------------------------------------------------------


def test_a_directory_of_the_first_version_is_read_for_ever(tmp_path: Path) -> None:
    golden = GOLDEN
    expected = json.loads((golden / "multiclass-v1.json").read_text())
    keys = np.array(expected["keys"], np.uint64)
    batch = Batch(np.zeros(6, np.float32), np.arange(0, 13, 2), keys, None)
    with shoal.load(golden / "multiclass-v1") as model:
        assert isinstance(model, MulticlassRegression)
        assert (model.classes, model.loss, model.examples) == (3, "ovr", expected["examples"])
        np.testing.assert_allclose(model.predict_proba(batch), expected["probabilities"], rtol=1e-12)
        model.partial_fit(batch)
        model.save(tmp_path / "m")
    with shoal.models.load(tmp_path / "m") as again:
        assert again.examples == expected["examples"] + 6
