"""Logistic regression: the textbook algorithm, against a float64 oracle that is written as the paper prints it."""

import hashlib
import logging
import math
import signal
import threading

import numpy as np
import pytest

import shoal
from shoal import Batch, LogisticRegression
from shoal.metrics import measure
from shoal.models import BIAS_KEY
from textbook import (
    PressesCtrlC,
    Textbook,
    cut,
    make_batch,
)
from tiers import long_after

OPTIMIZERS = [
    shoal.FTRL(alpha=0.3, beta=1.0, l1=0.3, l2=0.2),
    shoal.SGD(lr=0.05),
    shoal.Adagrad(lr=0.2),
    shoal.RowWiseAdagrad(lr=0.2),
    shoal.Momentum(lr=0.02, mu=0.8, nesterov=True),
    shoal.GroupFTRL(alpha=0.3, l1=0.1, l21=0.1),
    shoal.Adam(lr=0.01),
    shoal.AdamW(lr=0.01, weight_decay=0.01),
]


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.combined
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("size", long_after(1, [7, 1, 64]))
@pytest.mark.parametrize("values", [True, False])
def test_every_optimizer_learns_what_the_float64_oracle_learns(rng, optimizer, size, values):
    batches = cut(make_batch(rng, 300, values=values), size)
    oracle = Textbook(optimizer)
    with LogisticRegression(optimizer) as model:
        for batch in batches:
            expected = measure(batch.labels, oracle.margins(batch)).logloss
            assert model.partial_fit(batch) == pytest.approx(expected, rel=1e-3, abs=1e-5)
            oracle.learn(batch)
        keys = sorted(key for key in oracle.states if key != "bias")
        got = model.table.pull(np.array(keys, np.uint64))[:, 0]
        np.testing.assert_allclose(got, [oracle.weight(key) for key in keys], rtol=2e-3, atol=3e-5)
        assert model.bias == pytest.approx(oracle.weight("bias"), rel=2e-3, abs=3e-5)


@pytest.mark.slow
def test_batches_of_one_are_the_textbook_algorithm_to_float32_accuracy(rng):
    optimizer = shoal.FTRL(alpha=0.1, beta=1.0, l1=0.1, l2=1.0)
    batch = make_batch(rng, 2000)
    oracle = Textbook(optimizer)
    with LogisticRegression(optimizer) as model:
        model.fit(cut(batch, 1), progress=False)
        for one in cut(batch, 1):
            oracle.learn(one)
        np.testing.assert_allclose(model.decision_function(batch), oracle.margins(batch), rtol=1e-4, atol=2e-5)


def test_two_features_by_hand():
    batch = Batch(
        np.array([1], np.float32), np.array([0, 2]), np.array([5, 6], np.uint64), np.array([1, 2], np.float32)
    )
    with LogisticRegression(shoal.SGD(lr=1.0), bias=False) as model:
        assert model.partial_fit(batch) == pytest.approx(math.log(2))
        assert model.table.pull(batch.keys).ravel().tolist() == [0.5, 1.0]  # lr (y - p) x
        assert model.decision_function(batch).tolist() == [2.5]
        assert model.probabilities(batch)[0] == pytest.approx(1 / (1 + math.exp(-2.5)), rel=1e-15)


def test_a_batch_sums_its_gradients_and_makes_one_step():
    labels = np.array([1, 1, 0, 1], np.float32)
    batch = Batch(labels, np.arange(5), np.full(4, 7, np.uint64), None)
    with LogisticRegression(shoal.SGD(lr=1.0), bias=False) as model:
        model.partial_fit(batch)
        assert model.table.pull(np.array([7], np.uint64))[0, 0] == 1.0  # three times -0.5 and once 0.5
        assert model.table.stats().step == 1


def test_the_bias_is_a_row_of_its_own_and_learns_the_base_rate(rng):
    labels = (rng.random(4000) < 0.2).astype(np.float32)
    batch = Batch(labels, np.zeros(4001, np.int64), np.empty(0, np.uint64), None)
    with LogisticRegression(shoal.FTRL(alpha=0.1)) as model:
        model.fit(cut(batch, 100), epochs=20, progress=False)
        p = labels.mean()
        assert model.bias == pytest.approx(math.log(p / (1 - p)), abs=0.1)
        assert len(model.table) == 1
        assert [len(part) for part in model.weights()] == [0, 0]


def test_the_key_of_the_bias_is_fixed_forever():
    assert int(hashlib.sha256(b"shoal bias").hexdigest()[:16], 16) == BIAS_KEY


def test_a_model_without_bias_has_none(rng):
    with LogisticRegression(bias=False) as model:
        model.partial_fit(make_batch(rng, 50))
        assert model.bias == 0.0
        assert not model.table.contains(np.array([BIAS_KEY], np.uint64))[0]


def test_all_keys_are_legal(rng):
    keys = np.array([0, 2**64 - 1, 2**63, BIAS_KEY], np.uint64)
    batch = Batch(np.array([1, 0, 1, 0], np.float32), np.arange(5), keys, None)
    with LogisticRegression(shoal.SGD(lr=1.0)) as model:
        model.partial_fit(batch)
        assert model.table.pull(keys[:3]).ravel().tolist() == [0.5, -0.5, 0.5]


def test_weights_are_those_that_are_not_zero(rng):
    with LogisticRegression(shoal.FTRL(alpha=0.5, l1=2.0)) as model:
        model.fit(cut(make_batch(rng, 500), 50), progress=False)
        keys, weights = model.weights()
        assert 0 < len(keys) < len(model.table)
        assert np.all(weights != 0)
        assert BIAS_KEY not in keys
        np.testing.assert_array_equal(model.table.pull(keys)[:, 0], weights)
        assert np.all(np.diff(shoal.data.mix(keys)) > 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LogisticRegression(shoal.FTRL(alpha=0.5, l1=2.0)),
        lambda: LogisticRegression(shoal.FTRL(alpha=0.5, l1=1e9)),  # also the bias is 0
        lambda: LogisticRegression(shoal.Adagrad(), bias=False),
        lambda: LogisticRegression(shoal.FTRL(alpha=0.5, l1=2.0), normalized=True),
        lambda: LogisticRegression(solver=shoal.models.DBPG(l1=2.0)),
        lambda: shoal.FactorizationMachine(4, optimizer=shoal.FTRL(alpha=0.5, l1=2.0)),
    ],
)
def test_weights_that_are_not_zero_are_counted_where_the_rows_are(rng, make):
    with make() as model:
        assert model.count_nonzero() == 0
        model.fit(cut(make_batch(rng, 500), 50), progress=False)
        assert model.count_nonzero() == len(model.weights()[0])


def test_an_empty_batch_changes_nothing(rng):
    empty = Batch(np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(0, np.uint64), None)
    with LogisticRegression() as model:
        assert math.isnan(model.partial_fit(empty))
        model.partial_fit(make_batch(rng, 10))
        before = model.weights()
        model.partial_fit(empty)
        assert [a.tolist() for a in model.weights()] == [a.tolist() for a in before]
        assert model.probabilities(empty).shape == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 64])
def test_threads_and_slots_change_no_bit(rng, size):
    batches = cut(make_batch(rng, 3000 if size > 1 else 300, keys=500), size)
    results = []
    for threads, slots in [(1, 1024), (2, 1024), (3, 16), (1, 4096)]:
        with shoal.local(threads=threads, slots=slots) as store:
            model = LogisticRegression(shoal.FTRL(l1=0.1), store=store, seed=5).fit(batches, progress=False)
            margins = np.concatenate([model.decision_function(batch) for batch in batches])
            keys, weights = model.weights()
            results.append((margins.tobytes(), keys.tobytes(), weights.tobytes()))
    assert len(set(results)) == 1


def test_learning_makes_predictions_better(rng):
    train, test = make_batch(rng, 5000), make_batch(rng, 2000)
    with LogisticRegression(shoal.FTRL(alpha=0.3)) as model:
        model.fit(cut(train, 100), progress=False)
        m = model.evaluate(test)
    assert m.auc > 0.85
    assert m.normalized_entropy < 0.7
    assert 0.9 < m.calibration < 1.1


# ---- passes and history ----------------------------------------------------------------------------------------------


def test_the_progressive_loss_is_that_of_predicting_each_batch_first(rng):
    batches = cut(make_batch(rng, 640), 64)
    with LogisticRegression() as by_hand:
        losses = [by_hand.partial_fit(batch) for batch in batches]
    with LogisticRegression(warm_up=False) as model:
        model.fit(batches, progress=False)
        (done,) = model.history.passes
        points = model.history.points
    assert done.metrics.logloss == pytest.approx(np.mean(losses), rel=1e-12)
    assert done.metrics.examples == 640
    assert [p.window_logloss for p in points] == pytest.approx(losses)
    assert [p.examples for p in points] == list(range(64, 641, 64))
    assert points[-1].logloss == pytest.approx(done.metrics.logloss, rel=1e-12)
    assert points[-1].auc == done.metrics.auc


@pytest.mark.slow
def test_a_long_curve_stays_short_and_keeps_its_sums(rng):
    batches = cut(make_batch(rng, 2000), 1)
    with LogisticRegression(warm_up=False) as model:
        model.fit(batches, progress=False)
        points, (done,) = model.history.points, model.history.passes
    assert 100 < len(points) <= 256
    assert sum(p.window_examples for p in points) == 2000
    total = sum(p.window_logloss * p.window_examples for p in points)
    assert total / 2000 == pytest.approx(done.metrics.logloss, rel=1e-12)
    assert points[-1].examples == 2000


def test_several_passes_and_validation_are_recorded(rng):
    train, test = cut(make_batch(rng, 300), 50), make_batch(rng, 200)
    with LogisticRegression() as model:
        assert model.fit(train, epochs=3, valid=[test], progress=False) is model
        passes = model.history.passes
        assert [p.number for p in passes] == [1, 2, 3]
        assert passes[-1].valid == model.evaluate(test)
        assert passes[2].metrics.logloss < passes[0].metrics.logloss
        assert model.examples == 900
        model.fit(train, progress=False)
        assert model.history.passes[-1].number == 4
        assert model.history.points[-1].examples == 1200


def test_the_bar_tells_examples_loss_and_auc(rng, capsys):
    with LogisticRegression() as model:
        model.fit(cut(make_batch(rng, 300), 50), epochs=2)
    said = capsys.readouterr()
    assert said.out == ""
    assert "pass 2/2" in said.err
    assert "300 examples, " in said.err
    assert "logloss 0." in said.err
    assert "AUC 0." in said.err


def test_a_number_for_progress_writes_lines_in_place_of_the_bar(rng, capsys):
    with LogisticRegression(warm_up=False) as model:
        model.fit(cut(make_batch(rng, 300), 50), epochs=2, progress=2.0)
        first, second = model.history.passes
        points = model.history.points
    said = capsys.readouterr().err.splitlines()
    rows = [line.split() for line in said if line[:1].isdigit()]
    assert [row[2] for row in rows] == ["50", "100", "150", "300"] * 2
    assert (said[0], said[7]) == ("pass 1/2", "pass 2/2")
    assert [row[0] for row in rows[3::4]] == [f"{done.metrics.logloss:.6f}" for done in (first, second)]
    assert rows[0][1] == f"{points[0].window_logloss:.6f}"
    assert float(rows[3][1]) == pytest.approx(np.mean([p.window_logloss for p in points[3:6]]), abs=1e-6)


def test_gradients_that_are_not_finite_are_dropped_and_said(caplog):
    huge = np.full(4, 3e38, np.float32)
    batch = Batch(np.ones(4, np.float32), np.arange(5), np.full(4, 7, np.uint64), huge)
    with LogisticRegression(shoal.SGD(lr=1.0)) as model, caplog.at_level(logging.WARNING):
        model.fit([batch], progress=False)
        assert model.table.pull(np.array([7], np.uint64))[0, 0] == 0.0
    assert "gradients were not finite" in caplog.text


def test_a_reader_that_fails_leaves_what_was_learned(rng, tmp_path):
    path = tmp_path / "torn.libsvm"
    path.write_text("1 3:1\n0 4:1\n" * 10 + "1 oops\n")
    with LogisticRegression() as model:
        with pytest.raises(ValueError, match="line 21"):
            model.fit(shoal.read_libsvm(path, batch_size=4), progress=False)
        assert model.examples == 20
        assert not model.history.passes[0].complete
        assert model.probabilities(shoal.read_libsvm(path, on_error="skip")).shape == (20,)


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_stops_at_the_end_of_a_batch_and_leaves_a_whole_model(rng, tmp_path):
    batches = cut(make_batch(rng, 1000), 100)
    with LogisticRegression(warm_up=False) as model, LogisticRegression(warm_up=False) as twin:
        with pytest.raises(KeyboardInterrupt):
            model.fit(PressesCtrlC(batches, 4), progress=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert model.examples == 500
        assert model.table.stats().step == 5
        assert not model.history.passes[0].complete
        twin.fit(batches[:5], progress=False)
        np.testing.assert_array_equal(model.probabilities(batches[9]), twin.probabilities(batches[9]))
        model.save(tmp_path / "m")


def test_sigterm_stops_as_ctrl_c_does_however_often_it_comes_at_once(rng):
    batches = cut(make_batch(rng, 1000), 100)
    with LogisticRegression(warm_up=False) as model:
        with pytest.raises(KeyboardInterrupt) as caught:
            model.fit(PressesCtrlC(batches, 4, times=2, number=signal.SIGTERM), progress=False)
        assert isinstance(caught.value, SystemExit)
        assert caught.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert (model.examples, model.table.stats().step) == (500, 5)


def test_a_second_ctrl_c_does_not_wait(rng):
    with LogisticRegression() as model, pytest.raises(KeyboardInterrupt):
        model.fit(PressesCtrlC(cut(make_batch(rng, 1000), 100), 4, times=2), progress=False)
    assert model.examples == 400


def test_other_threads_and_other_handlers_are_left_alone(rng):
    batches = cut(make_batch(rng, 200), 100)
    with LogisticRegression() as model:
        thread = threading.Thread(target=model.fit, args=(batches,), kwargs={"progress": False})
        thread.start()
        thread.join()
        assert model.examples == 200
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(1))
    try:
        with LogisticRegression() as model:
            model.fit(PressesCtrlC(batches, 0), progress=False)
            assert (model.examples, came) == (200, [1])
    finally:
        signal.signal(signal.SIGINT, before)


# ---- predicting ------------------------------------------------------------------------------------------------------


def test_predicting_creates_no_rows_and_changes_no_weight(rng):
    with LogisticRegression() as model:
        model.partial_fit(make_batch(rng, 50))
        rows, step, weights = len(model.table), model.table.stats().step, model.weights()
        unseen = Batch(np.zeros(3, np.float32), np.arange(4), np.array([10**6, 10**7, 10**8], np.uint64), None)
        p = model.probabilities(unseen)
        model.evaluate(unseen)
        np.testing.assert_allclose(p, 1 / (1 + math.exp(-model.bias)))
        assert (len(model.table), model.table.stats().step) == (rows, step)
        assert [a.tolist() for a in model.weights()] == [a.tolist() for a in weights]


def test_predictions_of_a_reader_are_those_of_its_batches(rng):
    batch = make_batch(rng, 101)
    with LogisticRegression() as model:
        model.partial_fit(batch)
        p = model.probabilities(batch)
        assert p.dtype == np.float64
        assert p.shape == (101,)
        np.testing.assert_array_equal(model.probabilities(cut(batch, 7)), p)
        assert model.evaluate(cut(batch, 7)) == model.evaluate(batch)
        assert model.evaluate(batch) == measure(batch.labels, model.decision_function(batch))
        assert model.probabilities([]).shape == (0,)
        with pytest.raises(ValueError, match="the data has no examples: nothing was measured"):
            model.evaluate([])


# ---- misuse ----------------------------------------------------------------------------------------------------------


def test_misuse_is_explained(rng, tmp_path):
    batch = make_batch(rng, 10)
    with LogisticRegression() as model:
        for call in (model.probabilities, model.decision_function, model.evaluate):
            with pytest.raises(ValueError, match="not fitted yet: call fit"):
                call(batch)
        with pytest.raises(
            TypeError, match=r"reader is a path: pass a reader of it, such as shoal\.read_libsvm\('a\.txt'\)"
        ):
            model.fit("a.txt")
        with pytest.raises(TypeError, match="valid is a path"):
            model.fit([batch], valid=tmp_path)
        with pytest.raises(TypeError, match=r"reader is a Batch: .* partial_fit"):
            model.fit(batch)
        with pytest.raises(TypeError, match="reader is a int"):
            model.fit(7)
        with pytest.raises(TypeError, match="a batch is a ndarray"):
            model.fit([batch.labels], progress=False)
        with pytest.raises(TypeError, match="a batch is a list"):
            model.partial_fit([batch])
        with pytest.raises(ValueError, match="epochs is 0"):
            model.fit([batch], epochs=0)
        with pytest.raises(ValueError, match="iterator and ends after one pass of 2"):
            model.fit(iter([batch]), epochs=2)
        assert model.examples == 0
    with pytest.raises(TypeError, match="store is a str"):
        LogisticRegression(store="here")
    with pytest.raises(TypeError, match="optimizer"):
        LogisticRegression("ftrl")


def test_labels_other_than_0_and_1_are_refused_and_nothing_is_learned(rng):
    wrong = Batch(np.array([1, 2], np.float32), np.array([0, 1, 2]), np.array([5, 6], np.uint64), None)
    with LogisticRegression() as model:
        with pytest.raises(ValueError, match="0 or 1"):
            model.partial_fit(wrong)
        assert len(model.table) == 0
        model.partial_fit(make_batch(rng, 10))
        with pytest.raises(ValueError, match="0 or 1"):
            model.evaluate(wrong)
        assert model.probabilities(wrong).shape == (2,)


@pytest.mark.parametrize("indptr", [[0, 3, 1, 4], [0, -1, 2, 4], [0, 2**62, 2, 4]], ids=str)
def test_examples_whose_features_go_back_are_refused_and_nothing_is_learned(rng, indptr):
    with LogisticRegression() as model:
        model.partial_fit(make_batch(rng, 20))
        before, rows, step, seen = model.weights(), len(model.table), model.table.stats().step, model.examples
        labels, keys = np.array([0, 1, 0], np.float32), np.array([3, 1000, 1001, 7], np.uint64)
        for call in (model.partial_fit, model.probabilities, model.evaluate):
            with pytest.raises(ValueError, match=r"indptr.*\d"):
                call(Batch(labels, np.array(indptr, np.int64), keys, None))
        for a, b in zip(before, model.weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        assert (rows, step, seen) == (len(model.table), model.table.stats().step, model.examples)


def test_data_of_another_format_than_the_models_is_refused(rng, tmp_path):
    libsvm, criteo = tmp_path / "a.libsvm", tmp_path / "a.tsv"
    libsvm.write_text("1 3:1\n0 4:1\n")
    criteo.write_text("1\t5" + "\t" * 38 + "\n")
    with LogisticRegression() as model:
        model.fit(shoal.read_libsvm(libsvm), progress=False)
        for call in (model.fit, model.evaluate, model.probabilities):
            with pytest.raises(ValueError, match="learned from libsvm data, its keys have no meaning for criteo"):
                call(shoal.read_criteo(criteo))
        assert model.examples == 2


def test_a_closed_model_says_so(rng):
    model = LogisticRegression()
    model.partial_fit(make_batch(rng, 10))
    model.close()
    model.close()
    with pytest.raises(shoal.errors.ClosedError):
        model.probabilities(make_batch(rng, 10))


def test_a_store_that_was_passed_in_stays_open_and_may_hold_two_models(rng):
    batch = make_batch(rng, 100)
    with shoal.local() as store:
        with LogisticRegression(store=store) as one, LogisticRegression(store=store, table="two") as two:
            one.partial_fit(batch)
            assert len(two.table) == 0
        assert one.probabilities(batch).shape == (100,)
        with pytest.raises(ValueError, match="'lr'"):
            LogisticRegression(shoal.SGD(), store=store)
