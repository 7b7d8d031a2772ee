"""Models fitted on, and asked about, arrays, sparse matrices and frames."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pandas
import pyarrow
import pytest
from scipy import sparse

import shoal
from shoal import FTRL, Adagrad, FactorizationMachine, LogisticRegression, _core, models
from shoal.models import Checkpointing
from stores import opened

ROWS, COLUMNS = 400, 12


@pytest.fixture
def planted():
    """A matrix with many zeros, and labels that a line separates but for some noise."""
    rng = np.random.default_rng(20260101)
    X = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    X[rng.random(X.shape) < 0.5] = 0
    return X, (X @ rng.normal(size=COLUMNS) + 0.3 * rng.normal(size=ROWS) > 0).astype(int)


@pytest.fixture
def ads():
    """A frame with texts, numbers, whole numbers that are names, and cells that hold nothing."""
    rng = np.random.default_rng(7)
    site = rng.integers(0, 5, ROWS)
    price = rng.normal(size=ROWS)
    click = (0.8 * site - 1.6 + price > 0).astype(int)
    price[::17] = np.nan
    texts = [f"site-{s}" for s in site]
    return pandas.DataFrame({"click": click, "site": texts, "price": price, "user": rng.integers(0, 9, ROWS)})


KINDS = (LogisticRegression, FactorizationMachine)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_sparse_matrices_and_lists_give_the_same_model_to_the_bit(kind, planted):
    X, y = planted
    reported = {}
    forms = {"dense": X, "csr": sparse.csr_array(X), "csc": sparse.csc_matrix(X), "lil": sparse.lil_array(X)}
    for name, form in (forms | {"list": X.tolist(), "float64": X.astype(np.float64)}).items():
        with kind() as model:
            assert model.fit(form, y, progress=False) is model
            reported[name] = model.table.digest()
            p = model.predict_proba(form)
            assert p.shape == (ROWS, 2)
            assert np.allclose(p.sum(axis=1), 1)
            assert model.predict(form).tolist() == (p[:, 1] > 0.5).astype(int).tolist()
            assert model.score(form, y) == np.mean(model.predict(form) == y) > 0.9
            assert model.evaluate(form, y).examples == ROWS
    assert len(set(reported.values())) == 1


def test_columns_of_an_array_have_the_keys_of_libsvm_text(planted, tmp_path):
    X, y = planted
    with (tmp_path / "same.libsvm").open("w") as file:
        for row, label in zip(X, y, strict=True):
            print(label, *(f"{j}:{float(row[j])!r}" for j in np.flatnonzero(row)), file=file)
    reader = shoal.read_libsvm(tmp_path / "same.libsvm")
    with LogisticRegression() as model, LogisticRegression() as other:
        model.fit(X, y, epochs=1, shuffle=False, progress=False)
        other.fit(reader, progress=False)
        assert model.table.digest() == other.table.digest()
        assert model.probabilities(reader).tolist() == other.predict_proba(X)[:, 1].tolist()


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([False, True], [False, True]),
        ([-1, 1], [-1, 1]),
        (["no", "yes"], ["no", "yes"]),
        ([3, 7], [3, 7]),
        ([0.0, 1.0], [0, 1]),
    ],
)
def test_labels_of_any_two_classes_come_back_as_they_were(labels, classes, planted, tmp_path):
    X, y = planted
    named = np.array(labels)[y]
    with LogisticRegression() as model:
        model.fit(X, named, progress=False)
        assert model.classes_.tolist() == classes
        assert model.score(X, named) > 0.9
        assert set(model.predict(X).tolist()) == set(classes)
        model.save(tmp_path / "model")
        with shoal.load(tmp_path / "model") as loaded:
            assert loaded.predict(X).tolist() == model.predict(X).tolist()
            assert loaded.evaluate(X, named).logloss == model.evaluate(X, named).logloss
            with pytest.raises(ValueError, match=r"y has the label '(no|perhaps)': the model's classes are"):
                loaded.fit(X, np.where(y, "perhaps", "no"), progress=False)


def test_a_frame_has_the_keys_of_the_readers(ads, tmp_path):
    ads.to_csv(tmp_path / "ads.csv", index=False)
    how = {"label": "click", "numeric": ["price"]}
    with LogisticRegression() as model, LogisticRegression() as other:
        model.fit(ads.drop(columns="click"), ads["click"], epochs=1, shuffle=False, progress=False)
        other.fit(shoal.read_csv(tmp_path / "ads.csv", **how), progress=False)
        assert model.schema | {"label": "click"} == how | {"categorical": ["site", "user"]} == other.schema
        assert model.table.digest() == other.table.digest()
        text = other.probabilities(shoal.read_csv(tmp_path / "ads.csv", **how))
        assert model.predict_proba(ads)[:, 1].tolist() == text.tolist()  # the labels are passed over
        assert other.predict_proba(ads.drop(columns="click"))[:, 1].tolist() == text.tolist()
        X, y = ads.drop(columns="click"), ads["click"]
        assert other.score(ads) == other.score(X, y) == model.score(X, y)
        assert model.evaluate(X, y) == other.evaluate(ads)  # whose labels are a column, as it has learned


def test_frames_of_every_library_and_labels_beside_them_give_the_same_model(ads):
    features = ads.drop(columns="click")
    shuffled = features.set_index(np.arange(ROWS)[::-1] + 1000)  # rows' names are no feature
    numbers = pyarrow.Table.from_pandas(features, preserve_index=False)
    frames = {
        "pandas": features,
        "index": shuffled,
        "pyarrow": numbers,
        "category": features.astype({"site": "category"}),
    }
    reported = set()
    for frame in frames.values():
        with LogisticRegression() as model:
            model.fit(frame, ads["click"], valid=(frame, ads["click"]), epochs=3, progress=False)
            assert [done.valid.examples for done in model.history.passes] == [ROWS] * 3
            assert model.schema == {"numeric": ["price"], "categorical": ["site", "user"]}
            reported.add(model.table.digest())
    assert len(reported) == 1
    named = shoal.read_arrow(ads.set_index(shuffled.index), label="click", numeric=["price"])
    assert max(np.diff(batch.indptr).max() for batch in named) == 3


def test_polars_frames_are_frames(ads):
    polars = pytest.importorskip("polars")
    with LogisticRegression() as model, LogisticRegression() as other:
        X, y = ads.drop(columns="click"), ads["click"]
        model.fit(polars.from_pandas(X), y, progress=False)
        other.fit(X, y, progress=False)
        assert model.table.digest() == other.table.digest()
        assert model.score(polars.from_pandas(X), y) == other.score(X, y)


@pytest.mark.slow
def test_weights_of_examples_and_of_classes_multiply(planted):
    X, y = planted
    weights = np.random.default_rng(1).random(ROWS).astype(np.float32)
    share = {0: ROWS / (2 * np.sum(y == 0)), 1: ROWS / (2 * np.sum(y == 1))}
    reported = []
    for how in (
        {"sample_weight": weights * np.array([2.0, 0.5], np.float32)[y]},
        {"sample_weight": weights, "class_weight": {0: 2.0, 1: 0.5}},
        {"class_weight": "balanced"},
        {"class_weight": share},
    ):
        with LogisticRegression(class_weight=how.get("class_weight")) as model:
            reported.append(model.fit(X, y, sample_weight=how.get("sample_weight"), progress=False).table.digest())
            assert model.history.fits[-1].plan.class_weight == (
                None
                if len(reported) == 1
                else pytest.approx((2.0, 0.5) if len(reported) == 2 else (share[0], share[1]))
            )
    assert reported[0] == reported[1] != reported[2] == reported[3]
    batches = [shoal.Batch(y.astype(np.float32), np.arange(ROWS + 1), np.zeros(ROWS, np.uint64), None)]
    with (
        LogisticRegression(bias=False, class_weight={1: 9.0}) as rare,
        LogisticRegression(bias=False) as plain,
    ):
        rare.fit(batches, progress=False)
        plain.fit(batches, progress=False)
        assert rare.probabilities(batches)[0] > plain.probabilities(batches)[0]
    for wrong, says in (
        ("balanced", "'balanced' counts the labels before the first batch"),
        ({2: 1.0}, "class_weight names the class 2: the classes are 0 and 1"),
        ({1: -1}, "class_weight of 1 is -1: pass a finite number"),
    ):
        with LogisticRegression(class_weight=wrong) as model, pytest.raises(ValueError, match=says):
            model.fit(batches)


def test_callbacks_see_every_pass_and_every_batch(planted):
    X, y = planted
    passes, batches = [], []

    class Both(models.Callback):
        def batch_done(self, progress):
            batches.append((progress.pass_number, progress.batches, progress.examples, progress.metrics.examples))

        def pass_done(self, progress):
            passes.append((progress.pass_number, progress.examples, progress.valid.examples))

    curve = []
    with LogisticRegression(warm_up=False) as model:
        model.fit(
            X,
            y,
            epochs=2,
            batch_size=100,
            valid=(X, y),
            progress=False,
            callbacks=[Both(), lambda progress: curve.append(progress.metrics.logloss)],
        )
        assert passes == [(1, ROWS, ROWS), (2, 2 * ROWS, ROWS)]
        assert batches == [(1 + b // 4, b + 1, 100 * (b + 1), 100 * (b % 4 + 1)) for b in range(8)]
        assert curve == [done.metrics.logloss for done in model.history.passes]

        def stop(progress):
            raise StopAsyncIteration

        with pytest.raises(StopAsyncIteration):
            model.fit(X, y, epochs=5, progress=False, callbacks=stop)
        assert model.examples == 3 * ROWS == sum(done.metrics.examples for done in model.history.passes)
        assert model.score(X, y) > 0.8
        with pytest.raises(TypeError, match="callbacks is None: pass a list of callbacks, empty for none"):
            model.fit(X, y, progress=False, callbacks=None)
        with pytest.raises(TypeError, match="a callback is 3: pass a function of one argument"):
            model.fit(X, y, callbacks=[3])


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_predicts_and_learns_on_with_the_same_bits_and_leaves_the_original_alone(kind, again, planted):
    X, y = planted
    rules = {"admit": shoal.AfterCount(2), "expire": shoal.TimeToLive(1000), "seed": 5}
    with kind(store=shoal.local(slots=16, memory=1 << 26), **rules) as model:
        model.fit(X, y, epochs=2, progress=False)
        model.calibrate(X, "platt", y=y)
        before = model.table.digest()
        with again(model) as other:
            assert (other.store.slots, other.store.memory) == (16, 1 << 26)
            assert other.predict_proba(X).tobytes() == model.predict_proba(X).tobytes()
            assert (other.history, other.examples, other.schema) == (model.history, model.examples, model.schema)
            other.fit(X, y, epochs=1, progress=False)
            assert model.table.digest() == before != other.table.digest()
            model.fit(X, y, epochs=1, progress=False)
            assert [t.digest() for t in model.tables] == [t.digest() for t in other.tables]
        assert model.predict(X).shape == (ROWS,)


def test_a_model_that_was_not_fitted_and_one_of_the_solver_are_copied_whole():
    with LogisticRegression(solver=shoal.models.DBPG(l1=0.5, blocks=3)) as model, copy.deepcopy(model) as other:
        assert (other.solver, other.examples, len(other.table)) == (model.solver, 0, 0)


def test_a_model_on_a_cluster_is_not_pickled(planted):
    with opened("connected") as store:
        model = LogisticRegression(store=store)
        model.fit(*planted, epochs=1, progress=False)
        with pytest.raises(TypeError, match=r"on a cluster and cannot be pickled: save the model"):
            pickle.dumps(model)
        assert model.score(*planted) > 0.8


def test_load_reads_a_model_of_any_kind_and_says_what_else_a_directory_holds(planted, tmp_path):
    X, y = planted
    for kind in KINDS:
        with kind() as model:
            model.fit(X, y, progress=False).save(tmp_path / "model", overwrite=True)
            with shoal.load(str(tmp_path / "model")) as loaded:
                assert type(loaded) is kind
                assert loaded.score(X, y) == model.score(X, y)
            model.store.save(tmp_path / "checkpoint")
            model.store.export(tmp_path / "export")
        with pytest.raises(ValueError, match=r"is a checkpoint of tables.*store\.load"):
            shoal.load(tmp_path / "checkpoint")
        with pytest.raises(ValueError, match=r"is an export.*shoal\.export\.open"):
            shoal.load(tmp_path / "export")
        for name in ("checkpoint", "export"):
            for path in sorted((tmp_path / name).rglob("*")):
                path.unlink()
    with pytest.raises(ValueError, match="there is no such directory"):
        shoal.load(tmp_path / "nowhere")


def test_what_makes_no_sense_of_an_array_is_refused_and_nothing_is_learned(planted, ads):
    X, y = planted
    bad = X.copy()
    bad[3, 2] = np.nan
    batch = shoal.Batch(np.ones(1, np.float32), np.array([0, 1]), np.array([7], np.uint64), None)
    with LogisticRegression(FTRL()) as model:
        for call, error, said in [
            (lambda: model.fit(X), ValueError, "an array has no labels"),
            (lambda: model.fit(X, y[:-1]), ValueError, r"X has 400 rows, and y 399"),
            (lambda: model.fit(bad, y), ValueError, "row 3 of X holds nan"),
            (lambda: model.fit(sparse.csr_array(bad), y), ValueError, "row 3 of X holds nan"),
            (lambda: model.fit(X, np.arange(ROWS)), ValueError, "y has 400 classes, such as 0, 1, 2"),
            (lambda: model.fit(X, ["a"] * ROWS), ValueError, "there is only one class, 'a'"),
            (lambda: model.fit(X, [None] * ROWS), ValueError, "labels that are missing"),
            (lambda: model.fit(X[0], y), ValueError, r"X has shape \(12,\)"),
            (lambda: model.fit(X.astype(str), y), TypeError, "pass a frame, whose columns of text"),
            (lambda: model.fit(X, y, sample_weight=-np.ones(ROWS)), ValueError, r"sample_weight\[0\] is -1.0"),
            (lambda: model.fit(X, y, batch_size=0), ValueError, "batch_size is 0"),
            (lambda: model.fit(ads), ValueError, "a frame needs labels: pass them, as in"),
            (lambda: model.fit(ads, "click"), ValueError, 'read_arrow\\(frame, label="click"'),
            (lambda: model.fit(ads["price"], y), TypeError, "a Series is one column, not a table: pass a frame"),
            (lambda: model.fit(np.ma.array(X, mask=X > 0), y), ValueError, "X is a masked array"),
            (lambda: model.calibrate(X, y), TypeError, r"as in calibrate\(X, y=y\)"),
            (lambda: model.fit(ads, y[:5]), ValueError, "the frame has 400 rows, and y 5"),
            (lambda: model.fit([batch], y), ValueError, "y is for arrays and frames"),
            (lambda: model.partial_fit(X), ValueError, "an array has no labels"),
            (lambda: model.predict(X), ValueError, "not fitted yet"),
        ]:
            with pytest.raises(error, match=said):
                call()
        assert (model.examples, len(model.table), model.classes_.tolist()) == (0, 0, [0, 1])
        model.fit(X, y, progress=False)
        for call, said in [
            (lambda: model.predict(X[:, 1:]), "X has 11 columns, and this model learned from 12"),
            (lambda: model.predict(ads), "pass an array, as frame"),
            (lambda: model.evaluate(X), r"evaluate\(X, y\)"),
            (lambda: model.fit(ads.drop(columns="click"), ads["click"]), "its keys have no meaning for arrow"),
        ]:
            with pytest.raises(ValueError, match=said):
                call()
        assert model.predict_proba(X[:0]).shape == (0, 2)
    with LogisticRegression() as model:
        model.fit(ads.drop(columns="click"), ads["click"], progress=False)
        with pytest.raises(ValueError, match="whose columns have names: pass a frame"):
            model.predict(X)
        with pytest.raises(ValueError, match=r"column '(price|user)' is not there"):
            model.predict(ads[["site"]])


def test_partial_fit_of_arrays_and_frames_makes_one_step(planted, ads):
    X, y = planted
    with LogisticRegression(Adagrad(lr=0.5)) as model:
        for _ in range(20):
            model.partial_fit(X, y)
        assert (model.table.stats().step, model.examples) == (20, 20 * ROWS)
        assert model.score(X, y) > 0.9
    with LogisticRegression() as model:
        X, y = ads.drop(columns="click"), ads["click"]
        first = model.partial_fit(X, y)
        assert model.partial_fit(X, y) < first


def test_a_fit_on_an_array_goes_on_after_a_checkpoint_with_the_same_bits(planted, tmp_path):
    X, y = planted
    named = np.where(y, "yes", "no")
    with LogisticRegression() as whole:
        whole.fit(X, named, epochs=4, progress=False)
        with LogisticRegression() as begun:

            def crash(progress):
                if progress.pass_number == 2:
                    raise RuntimeError

            with pytest.raises(RuntimeError):
                begun.fit(X, named, epochs=4, progress=False, callbacks=crash, checkpoint=Checkpointing(tmp_path / "m"))
        with LogisticRegression() as gone_on:
            gone_on.fit(X, named, epochs=4, progress=False, checkpoint=Checkpointing(tmp_path / "m", resume=True))
            assert gone_on.table.digest() == whole.table.digest()
            assert gone_on.classes_.tolist() == ["no", "yes"]


@pytest.mark.slow
def test_a_model_that_explodes_is_warned_of_with_the_feature_that_does_it(ads, caplog):
    with LogisticRegression() as model:
        model.fit(ads.assign(price=ads["price"] * 1e6).drop(columns="click"), ads["click"], progress=False)
        assert sum(done.metrics.normalized_entropy > 3 for done in model.history.passes) > 1
    (message,) = [record.message for record in caplog.records]
    assert "the predictions of pass 1 are far worse than the base rate alone; values reach" in message
    assert (
        "(feature 'price'): scale numeric features to about 1, train with normalized=True (--normalized), or" in message
    )
    caplog.clear()
    with LogisticRegression() as model:
        model.fit(ads.drop(columns="click"), ads["click"], progress=False)
        model.fit(ads.assign(price=1.0).drop(columns="click"), ads["click"], progress=False)
    assert not caplog.records
    X = np.zeros((100, 3))
    X[:, 1], X[:, 2] = np.arange(100), np.where(np.arange(100) % 3, -1e9, 3e8)
    with LogisticRegression() as model:
        model.fit(X, np.arange(100) % 2, epochs=1, progress=False)
    assert "values reach 1e+09 (feature 2)" in caplog.records[0].message


def test_models_and_metrics_show_themselves_in_notebooks(planted):
    X, y = planted
    with LogisticRegression(table="<b>") as model:
        assert "<th>examples</th><td>0</td>" in model._repr_html_()
        model.fit(X, y, valid=(X, y), epochs=1, progress=False)
        shown = model._repr_html_()
        assert "&lt;b&gt;</th><td>13 rows of 1, FTRL(alpha=0.1)" in shown
        assert "<th>validation</th>" in shown
        assert f"<th>AUC</th><td>{model.evaluate(X, y).auc:.6f}</td>" in model.evaluate(X, y)._repr_html_()
    assert str(shoal.metrics.Metrics(logloss=0.7, auc=0.5, calibration=1, examples=1, base_rate=0.5)).endswith(
        "(1 example, 50.00 % positive)"
    )


def test_dir_shows_what_is_public():
    assert set(shoal.__all__) <= set(dir(shoal))
    assert {"torch", "sklearn", "serve", "checkpoint", "__version__"} <= set(dir(shoal))
    assert all(getattr(shoal, name) is not None for name in shoal.__all__)
    assert not [name for name in dir(shoal) if name.startswith("_") and name != "__version__"]


@pytest.mark.parametrize(
    ("indptr", "rows", "message"),
    [
        ([0, 2, 3], [2], "there is no row 2 of 2"),
        ([0, 2, 3], [-1], "there is no row -1 of 2"),
        ([0, 2, 1], [1], "row 1 is from 2 to 1"),
        ([0, 2, 4], [0, 1], "row 1 is from 2 to 4, of 3 keys and 3 values"),
        ([-1, 2], [0], "row 0 is from -1 to 2"),
    ],
)
def test_rows_that_a_matrix_does_not_have_are_refused(indptr, rows, message):
    keys, values = np.array([7, 8, 9], np.uint64), np.array([1, 2, 3], np.float32)
    some = _core.gather_rows(np.array([0, 2, 3]), keys, values, np.array([1, 0, 1]))
    assert [array.tolist() for array in some] == [[0, 1, 3, 4], [9, 7, 8, 9], [3, 1, 2, 3]]
    with pytest.raises(ValueError, match=message):
        _core.gather_rows(np.array(indptr), keys, values, np.array(rows))
