"""Normalized models: the size of a column makes no difference, wherever the model predicts and however it got there."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from shoal.models import Checkpointing, EarlyStopping

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

import shoal  # noqa: E402
from cluster_standin import cluster  # noqa: E402
from shoal import Batch, FactorizationMachine, LogisticRegression, cli, models  # noqa: E402
from shoal.models import LogisticRegressionGrid  # noqa: E402
from shoal.models.scales import LARGEST, OCCURRENCES, scales_name  # noqa: E402
from stores import together  # noqa: E402

ROWS = 3000
TRAINED = 2400
KINDS = (LogisticRegression, FactorizationMachine)


@pytest.fixture(scope="module")
def ads():
    """Clicks by site and price; some prices are missing, and the noise is the labels' own."""
    rng = np.random.default_rng(7)
    site = rng.integers(0, 5, ROWS)
    price = rng.normal(size=ROWS)
    click = (0.8 * site - 1.6 + price + rng.normal(size=ROWS) > 0).astype(int)
    price[::17] = np.nan
    return pandas.DataFrame({"click": click, "site": [f"site-{s}" for s in site], "price": price})


def enlarged(ads, factor):
    return ads.assign(price=ads["price"] * factor)


def fitted(kind, ads, **how):
    return kind(normalized=True, **how).fit(*learned_from(ads), epochs=3, progress=False)


def learned_from(ads):
    return ads[:TRAINED].drop(columns="click"), ads["click"][:TRAINED]


def held_out(ads):
    return ads[TRAINED:].drop(columns="click"), ads["click"][TRAINED:]


def digests(model):
    return [table.digest() for table in model.tables]


def batch_of(values, *, key=7, labels=None, weights=None):
    n = len(values)
    given = np.arange(n) % 2 if labels is None else labels
    return Batch(
        np.asarray(given, np.float32),
        np.arange(n + 1),
        np.full(n, key, np.uint64),
        np.asarray(values, np.float32),
        None if weights is None else np.asarray(weights, np.float32),
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_price_in_millionths_trains_to_the_loss_of_one_in_sensible_units(kind, ads, caplog):
    X, y = held_out(ads)
    with fitted(kind, ads) as model, kind().fit(*learned_from(ads), epochs=3, progress=False) as plain:
        expected = model.evaluate(X, y).logloss
        probabilities = model.probabilities(X)
        first = digests(model)[0]
        assert expected == pytest.approx(plain.evaluate(X, y).logloss, abs=1e-3)  # the spread is about 1 here
    for factor in (1e6, 1e-6, 1e12, 3.7e-9):
        with fitted(kind, enlarged(ads, factor)) as model:
            measured = model.evaluate(held_out(enlarged(ads, factor))[0], y)
            assert measured.logloss == pytest.approx(expected, abs=2e-6), factor
    with fitted(kind, enlarged(ads, 2.0**20)) as model:  # a power of two: the same bits
        assert digests(model)[0] == first
        assert model.probabilities(held_out(enlarged(ads, 2.0**20))[0]).tobytes() == probabilities.tobytes()
        (scale,) = model.scales()[1]
        assert scale == pytest.approx(2.0**20 * np.sqrt(np.nanmean(ads["price"][:TRAINED] ** 2)), rel=1e-6)
    assert not caplog.records
    with kind().fit(*learned_from(enlarged(ads, 1e6)), epochs=3, progress=False) as model:
        assert not model.evaluate(held_out(enlarged(ads, 1e6))[0], y).logloss < 100
    assert "train with normalized=True (--normalized), or use a smaller" in caplog.records[0].message


def test_a_normalized_model_that_explodes_is_told_of_its_steps_alone(caplog):
    rng = np.random.default_rng(3)
    with LogisticRegression(shoal.SGD(1e4), normalized=True) as model:
        model.fit(rng.normal(size=(400, 3)) * 1e6, rng.integers(0, 2, 400), epochs=1, progress=False)
    assert "steps are too long: use a smaller learning rate" in caplog.records[0].message


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_to_predict_agree_with_the_model_and_none_leaves_its_scales_out(kind, ads, tmp_path, capsys):
    served = pytest.importorskip("shoal.serve", reason="needs the serve extra")
    large = enlarged(ads, 1e6)
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    large[:TRAINED].to_csv(train, index=False)
    large[TRAINED:].to_csv(test, index=False)
    model_kind = "lr" if kind is LogisticRegression else "fm"
    reading = ["--format", "csv", "--label", "click", "--numeric", "price"]
    command = ["train", model_kind, "--data", str(train), *reading, "--normalized", "--quiet"]
    assert cli.main([*command, "--output", str(tmp_path / "m")]) == 0
    output = tmp_path / "probabilities"
    paths = [str(tmp_path / "m"), "--data", str(test), "--output", str(output)]
    assert cli.main(["predict", *paths, "--quiet"]) == 0
    reported = np.loadtxt(output)
    assert cli.main(["inspect", str(tmp_path / "m")]) == 0
    assert "normalized  yes" in capsys.readouterr().out
    reader = shoal.read_csv(test, label="click", numeric=["price"])
    with shoal.load(tmp_path / "m") as model:
        assert model.is_normalized
        assert "normalized=True" in repr(model)
        expected = model.probabilities(reader)
        np.testing.assert_allclose(reported, expected, rtol=1e-6)
        copied = copy.deepcopy(pickle.loads(pickle.dumps(model)))
        assert copied.probabilities(reader).tobytes() == expected.tobytes()
        copied.close()
        # Weights without the scales are those of a price a million times as large.
        batch = next(iter(reader))
        keys = model.sort(batch)
        rows = [table.pull_unique(keys) for table in model.tables[:-1]]
        assert np.abs(model._forward(batch, keys, rows)[0]).max() > 1e4
        for dtype in ("float32", "float16"):
            export = tmp_path / dtype
            assert cli.main(["export", str(tmp_path / "m"), "--output", str(export), "--dtype", dtype, "--quiet"]) == 0
            with served.ServedModel(export) as now:
                found = now.now.predictor.probabilities(reader)
                assert now.now.predictor.scales()[1].tolist() == model.scales()[1].tolist()
            if dtype == "float32":
                assert found.tobytes() == expected.tobytes()
            np.testing.assert_allclose(found, expected, atol=2e-3)
    scales = scales_name(model_kind)
    assert (
        cli.main(["export", str(tmp_path / "m"), "--output", str(tmp_path / "x"), "--table", f"{scales}=float16"]) != 0
    )
    assert "the scales of a model are stored as float32" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_normalized_fit_goes_on_after_a_checkpoint_with_the_same_bits(kind, ads, tmp_path):
    X, y = learned_from(enlarged(ads, 1e6))

    def crash(progress):
        if progress.pass_number == 2:
            raise RuntimeError

    how = {"epochs": 3, "progress": False, "batch_size": 100}
    resumed = how | {"checkpoint": Checkpointing(tmp_path / "m", resume=True)}
    with kind(normalized=True) as begun, pytest.raises(RuntimeError):
        begun.fit(X, y, callbacks=crash, checkpoint=Checkpointing(tmp_path / "m"), **how)
    with kind() as plain, pytest.raises(ValueError, match=r"-scales with bias=True.*make it with the same settings"):
        plain.fit(X, y, **resumed)
    with kind(normalized=True) as gone_on, kind(normalized=True) as whole:
        gone_on.fit(X, y, **resumed)
        whole.fit(X, y, **how)
        assert digests(gone_on) == digests(whole)


def test_early_stopping_gives_back_the_scales_of_the_best_pass():
    rng = np.random.default_rng(5)
    first, noise = batch_of(rng.normal(size=500) * 50), batch_of(rng.normal(size=500) * 50)
    with LogisticRegression(shoal.SGD(5.0), normalized=True, warm_up=False) as model:
        model.fit([first], epochs=9, valid=[noise], progress=False, early_stopping=EarlyStopping(2))
        best = model.history.best_pass
        with LogisticRegression(shoal.SGD(5.0), normalized=True, warm_up=False) as again:
            again.fit([first], epochs=best, progress=False)
            assert digests(again) == digests(model)


@pytest.mark.parametrize("values", [None, np.ones(60, np.float32)])
def test_features_that_are_there_or_not_stay_as_they_are_to_the_bit(values):
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 20).astype(np.float32)
    weights = rng.uniform(0, 3, 20).astype(np.float32)
    batch = Batch(labels, np.arange(0, 61, 3), rng.integers(0, 9, 60).astype(np.uint64), values, weights)
    with LogisticRegression(normalized=True) as model, LogisticRegression() as plain:
        for each in (model, plain):
            each.fit([batch] * 3, progress=False)
        assert model.table.digest() == plain.table.digest()
        assert len(model.tables[-1]) == 0 == len(model.scales()[0])


def test_scales_count_weights_and_are_fixed_once_a_key_was_seen_often_enough():
    with LogisticRegression(normalized=True) as model:
        model.partial_fit(batch_of([3, 4, 100], weights=[1, 1, 0]))
        assert model.scales()[0].tolist() == [7]
        assert model.scales()[1].tolist() == pytest.approx([np.sqrt(12.5)])
        model.partial_fit(batch_of([2, 2], weights=[OCCURRENCES, 1]))
        (fixed,) = model.scales()[1]
        assert fixed == pytest.approx(2, rel=1e-4)
        before = digests(model)
        model.partial_fit(batch_of([1e6, 1e6], weights=[1, 1]))
        assert model.scales()[1].tolist() == [fixed]
        assert digests(model)[1] == before[1]
        assert digests(model)[0] != before[0]
        model.partial_fit(batch_of([1e6, 5], key=8))  # others are not
        assert len(model.scales()[0]) == 2


def test_what_is_wrong_with_a_batch_is_said_before_any_scale_has_changed():
    with LogisticRegression(normalized=True) as model:
        model.partial_fit(batch_of([3, 4]))
        before = digests(model)
        for wrong, reported in (
            (batch_of([1, 2 * LARGEST]), r"the value 1\.845e\+19 of key 7 is too large to be normalized: divide"),
            (batch_of([1, -2 * LARGEST]), "too large to be normalized"),
            (batch_of([1, 5], labels=[0, 2]), "labels must be 0 or 1"),
            (batch_of([1, 5], weights=[1, -1]), "not negative"),
            (batch_of([1, np.inf]), "inf"),
        ):
            with pytest.raises(ValueError, match=reported):
                model.partial_fit(wrong)
            assert digests(model) == before
        model.partial_fit(batch_of([]))
        model.partial_fit(batch_of([1e-30, 0.0], key=9))  # too small to be squared: as they are
        assert np.isfinite(model.probabilities(batch_of([1e-30, 0.0, 3e38], key=9))).all()


def test_each_model_of_a_grid_is_the_normalized_one_that_would_be_trained_alone(ads):
    batches = list(shoal.read_arrow(enlarged(ads, 1e6), label="click", numeric=["price"], categorical=["site"]))
    with LogisticRegressionGrid({"alpha": [0.05, 0.2]}, normalized=True) as grid:
        grid.fit(batches, progress=False)
        for settings, model in zip(grid.settings, grid.models, strict=True):
            with LogisticRegression(shoal.FTRL(**settings), normalized=True) as alone:
                alone.fit(batches, progress=False)
                assert digests(alone) == digests(model)


def test_the_solver_that_goes_to_the_optimum_refuses_to_normalize(tmp_path, capsys):
    with pytest.raises(ValueError, match="leave out normalized"):
        LogisticRegression(solver="dbpg", normalized=True)
    arguments = ["train", "lr", "--data", "x.libsvm", "--output", str(tmp_path / "m"), "--solver", "dbpg"]
    assert cli.main([*arguments, "--normalized"]) != 0
    assert "--normalized does not apply to --solver dbpg" in capsys.readouterr().err


@pytest.mark.slow
def test_the_workers_of_a_cluster_learn_one_table_of_scales_and_one_has_the_bits_of_a_local_store():
    rng = np.random.default_rng(9)

    def drawn(n):
        keys = rng.integers(0, 30, 3 * n).astype(np.uint64)
        values = (rng.lognormal(size=3 * n) * 10.0 ** (keys % 12)).astype(np.float32)
        return Batch(rng.integers(0, 2, n).astype(np.float32), np.arange(0, 3 * n + 1, 3), keys, values)

    batches = [drawn(n) for n in (40, 1, 300, 77, 120, 64)]

    def learn(store):
        model = LogisticRegression(store=store, normalized=True, warm_up=False)
        model.fit(batches[store.rank :: store.num_workers], epochs=2, progress=False)
        keys = np.arange(30, dtype=np.uint64)
        return [table.pull(keys).tobytes() for table in model.tables], model.probabilities(batches[2]).tobytes()

    with shoal.local() as store:
        expected = learn(store)
        sums = store.tables["lr-scales"].pull(np.arange(30, dtype=np.uint64))
    found = {}
    for servers, workers in ((1, 1), (1, 2), (2, 2)):
        with cluster(servers, 1) as made:
            found[servers, workers] = together(made.address, workers, learn)
    assert found[1, 1] == [expected]
    assert found[1, 2] == found[2, 2]
    assert found[1, 2][0] == found[1, 2][1]
    np.testing.assert_allclose(np.frombuffer(found[1, 2][0][0][1], np.float32), sums.ravel(), rtol=1e-5)


def test_filters_that_round_are_kept_from_the_scales_or_refused():
    rounding = shoal.Filters(gradients="bfloat16")
    with cluster(1, 1) as made, shoal.connect(made.address, workers=1, threads=1, filters=rounding) as store:
        with pytest.raises(ValueError, match=r"filters that round or drop would change table 'lr-scales'.*by name"):
            LogisticRegression(store=store, normalized=True)
        assert store.tables.get("lr-scales") is None
    with cluster(1, 1) as made:
        filters = {"lr": rounding, "lr-scales": shoal.Filters(key_caching=True, zeros=True)}
        with shoal.connect(made.address, workers=1, threads=1, filters=filters) as store:
            model = LogisticRegression(store=store, normalized=True)
            model.fit([batch_of([3, 4])], progress=False)
            assert model.scales()[1].tolist() == pytest.approx([np.sqrt(12.5)])


def test_exports_that_do_not_tell_are_not_normalized():
    reported = {
        "kind": "logistic regression",
        "table": "lr",
        "more_tables": [],
        "bias": True,
        "format": None,
        "schema": {},
        "calibration": None,
        "examples": 1,
    }
    with shoal.local() as store:
        store.table("lr", dim=1, optimizer=shoal.FTRL())
        assert not models.exported(reported, store).is_normalized
