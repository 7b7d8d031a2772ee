"""The training loop: weights, negatives left out, shuffles, early stopping, sorting ahead, many models at once."""

import itertools
import math
import signal
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal import Batch, LogisticRegression
from shoal.metrics import Accumulator, measure
from shoal.models import EarlyStopping, LogisticRegressionGrid, preprocessing
from shoal.models.history import Record, Standing, Windows
from textbook import PressesCtrlC, Textbook, cut, make_batch


def weighted(batch, weights):
    return Batch(batch.labels, batch.indptr, batch.keys, batch.values, np.asarray(weights, np.float32))


def draw_weights(rng, n):
    weights = rng.choice([0, 0.25, 1, 3, 10], n) * rng.uniform(0.5, 2, n)
    return weights.astype(np.float32)


def parts(batch):
    """Every example as a value that can be compared."""
    values = np.ones(batch.nnz, np.float32) if batch.values is None else batch.values
    weights = np.ones(len(batch), np.float32) if batch.weights is None else batch.weights
    return [
        (float(y), tuple(batch.keys[a:b].tolist()), tuple(values[a:b].tolist()), float(v))
        for y, v, (a, b) in zip(batch.labels, weights, itertools.pairwise(batch.indptr), strict=True)
    ]


def bits(model, batches):
    keys, weights = model.weights()
    margins = np.concatenate([model.decision_function(batch) for batch in batches])
    return keys.tobytes(), weights.tobytes(), model.bias, margins.tobytes(), model.examples, model.table.stats().step


def recorded(model):
    """What is recorded, but for the time it took."""
    history = model.history
    return repr([history.points, [(p.number, p.metrics, p.valid, p.complete) for p in history.passes]])


class WeightedTextbook(Textbook):
    def learn(self, batch):
        gradient = {}
        for i, a in enumerate(self.margins(batch)):
            p = 1 / (1 + math.exp(-a))
            for key, x in self.features(batch, i):
                gradient[key] = gradient.get(key, 0.0) + float(batch.weights[i]) * (p - batch.labels[i]) * x
        self.step += 1
        for key, g in gradient.items():
            state = self.states.get(key) or self.rule.start(np.zeros(1))
            self.states[key] = self.rule.push(state, np.array([g]), self.step)


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.combined(2)
@pytest.mark.parametrize("optimizer", [shoal.FTRL(alpha=0.1, l1=0.3, l2=0.2), shoal.Adagrad(lr=0.1)], ids=str)
@pytest.mark.parametrize("size", [1, 33])
@pytest.mark.parametrize("values", [True, False])
def test_weighted_examples_are_learned_as_the_float64_oracle_learns_them(rng, optimizer, size, values):
    whole = make_batch(rng, 330, values=values)
    weights = draw_weights(rng, 330)
    oracle = WeightedTextbook(optimizer)
    with LogisticRegression(optimizer) as model:
        for i, one in enumerate(cut(whole, size)):
            batch = weighted(one, weights[i * size : i * size + len(one)])
            expected = measure(batch.labels, oracle.margins(batch), batch.weights).logloss
            assert model.partial_fit(batch) == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)
            oracle.learn(batch)
        keys = sorted(key for key in oracle.states if key != "bias")
        got = model.table.pull(np.array(keys, np.uint64))[:, 0]
        np.testing.assert_allclose(got, [oracle.weight(key) for key in keys], rtol=2e-3, atol=3e-5)
        assert model.bias == pytest.approx(oracle.weight("bias"), rel=2e-3, abs=3e-5)


def test_a_weight_of_two_is_the_example_twice(rng):
    batch = make_batch(rng, 50)
    twice = preprocessing.take(batch, np.repeat(np.arange(50), 2))
    with LogisticRegression(shoal.SGD(lr=0.1)) as one, LogisticRegression(shoal.SGD(lr=0.1)) as other:
        assert one.partial_fit(weighted(batch, [2] * 50)) == pytest.approx(other.partial_fit(twice))
        np.testing.assert_allclose(one.decision_function(batch), other.decision_function(batch), rtol=1e-5, atol=1e-7)


def test_weights_of_one_change_no_bit_and_weights_of_zero_teach_nothing(rng):
    batch = make_batch(rng, 50)
    with LogisticRegression() as one, LogisticRegression() as other:
        one.partial_fit(batch)
        other.partial_fit(weighted(batch, np.ones(50)))
        assert bits(one, [batch]) == bits(other, [batch])
        assert math.isnan(other.partial_fit(weighted(batch, np.zeros(50))))
        assert bits(one, [batch])[:4] == bits(other, [batch])[:4]


def test_all_that_is_reported_goes_by_weight(rng):
    whole = make_batch(rng, 400)
    weights = draw_weights(rng, 400)
    batches = [weighted(one, weights[i * 40 : i * 40 + 40]) for i, one in enumerate(cut(whole, 40))]
    with LogisticRegression() as by_hand:
        by_hand.partial_fit(preprocessing.take(batches[0], np.empty(0, np.int64)))  # learns the bias's row, at 0
        seen = [(by_hand.decision_function(batch), by_hand.partial_fit(batch)) for batch in batches]
    margins = np.concatenate([a for a, _ in seen])
    with LogisticRegression(warm_up=False) as model:
        model.fit(batches, valid=batches, progress=False)
        (done,) = model.history.passes
        expected = measure(whole.labels, margins, weights)
        assert done.metrics.weight == pytest.approx(weights.sum(dtype=np.float64))
        assert done.metrics.logloss == pytest.approx(expected.logloss)
        assert done.metrics.auc == pytest.approx(expected.auc, abs=done.auc_error + 1e-12)
        assert done.metrics.calibration == pytest.approx(expected.calibration)
        assert [p.window_logloss for p in model.history.points] == pytest.approx([loss for _, loss in seen])
        final = np.concatenate([model.decision_function(b) for b in batches])
        assert done.valid == measure(whole.labels, final, weights) == model.evaluate(batches)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_none_is_refused_and_nothing_is_learned(rng, wrong):
    batch = weighted(make_batch(rng, 3), [1, wrong, 1])
    with LogisticRegression() as model:
        with pytest.raises(ValueError, match=r"weights must be finite and not negative, got .* at position 1"):
            model.partial_fit(batch)
        assert (len(model.table), model.examples) == (0, 0)


# ---- negatives left out ----------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=4)), max_size=30),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.integers(0, 2**64 - 1),
    st.booleans(),
)
def test_sampling_keeps_all_positives_and_scales_the_negatives_it_keeps(examples, rate, seed, has_weights):
    indptr = np.cumsum([0, *(len(keys) for _, keys in examples)]).astype(np.int64)
    keys = np.array([key for _, some in examples for key in some], np.uint64)
    labels = np.array([y for y, _ in examples], np.float32)
    weights = np.arange(len(examples), dtype=np.float32) if has_weights else None
    batch = Batch(labels, indptr, keys, None, weights)
    sampling = preprocessing.Sampling(rate, seed)
    kept = parts(sampling.apply(batch, 5))
    chosen = sampling.chosen(5, len(batch))
    scale = float(np.float32(1 / rate))
    expected = [
        (y, k, x, v if y else float(np.float32(v * scale)))
        for (y, k, x, v), negative in zip(parts(batch), chosen, strict=True)
        if y or negative
    ]
    assert kept == expected
    # The choice is by the number of the example, not by how the data was cut.
    halves = [sampling.chosen(5, len(batch) // 2), sampling.chosen(5 + len(batch) // 2, len(batch) - len(batch) // 2)]
    assert np.concatenate(halves).tolist() == chosen.tolist()


@pytest.mark.slow
def test_the_expected_gradient_of_sampled_negatives_is_that_of_all(rng):
    # One SGD step from zero: the weight is minus the gradient times lr.
    batch = make_batch(rng, 400, keys=4)
    keys = np.arange(4, dtype=np.uint64)

    def gradient(some):
        with LogisticRegression(shoal.SGD(lr=1.0)) as model:
            model.partial_fit(some)
            return np.append(model.table.pull(keys)[:, 0], model.bias)

    truth = gradient(batch)
    drawn = np.array([gradient(preprocessing.Sampling(0.2, seed).apply(batch, 0)) for seed in range(300)])
    error = drawn.std(axis=0) / math.sqrt(len(drawn))
    assert np.all(np.abs(drawn.mean(axis=0) - truth) < 5 * error)
    assert np.all(error > 0)


def test_metrics_of_sampled_data_are_those_of_all_of_it(rng):
    n = 20_000
    labels = (rng.random(n) < 0.1).astype(np.float32)
    batch = Batch(labels, np.arange(n + 1), rng.integers(0, 50, n).astype(np.uint64), None)
    margins = rng.normal(-2, 1, n)
    with (
        LogisticRegression(shoal.FTRL(alpha=0.1), warm_up=False) as all_of_it,
        LogisticRegression(shoal.FTRL(alpha=0.1), negative_rate=0.25, warm_up=False, seed=3) as some,
    ):
        all_of_it.fit(cut(batch, 500), progress=False)
        some.fit(cut(batch, 500), progress=False)
        a, b = all_of_it.history.passes[0].metrics, some.history.passes[0].metrics
    assert b.examples < n / 2
    assert b.weight == pytest.approx(n, rel=0.03)
    assert b.base_rate == pytest.approx(a.base_rate, rel=0.03)
    assert b.logloss == pytest.approx(a.logloss, rel=0.05)
    kept = preprocessing.Sampling(0.25, 3).chosen(0, n) | (labels == 1)
    scale = np.where(labels == 1, 1, 4.0)
    assert measure(labels[kept], margins[kept], scale[kept]).logloss == pytest.approx(
        measure(labels, margins).logloss, rel=0.03
    )


def test_other_negatives_are_left_out_in_each_pass_and_for_each_seed(rng):
    plan = shoal.models.Plan(negative_rate=0.3, seed=1)
    batches = cut(make_batch(rng, 200), 50)
    first, again, second = ([parts(b) for b, _ in plan.batches(batches, e, 0)] for e in (0, 0, 1))
    other = [parts(b) for b, _ in shoal.models.Plan(negative_rate=0.3, seed=2).batches(batches, 0, 0)]
    assert first == again
    assert first != second
    assert first != other


# ---- shuffling -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 7), max_size=12), st.integers(1, 5), st.integers(0, 2**64 - 1), st.booleans())
def test_a_shuffle_gives_each_example_once_within_its_buffer(sizes, buffer, seed, has_values):
    number = itertools.count()
    batches = []
    for size in sizes:
        keys = np.array([next(number) for _ in range(2 * size)], np.uint64)
        values = keys.astype(np.float32) if has_values else None
        labels = (np.arange(size) % 2).astype(np.float32)
        weights = np.full(size, 2, np.float32) if size % 2 else None
        batches.append(Batch(labels, np.arange(0, 2 * size + 1, 2), keys, values, weights))
    plan = shoal.models.Plan(shuffle=buffer, seed=seed, warm_up=False)
    got = [batch for batch, _ in plan.batches(batches, 0, 0)]
    assert [len(b) for b in got] == sizes
    for i in range(0, len(sizes), buffer):
        there, here = batches[i : i + buffer], got[i : i + buffer]
        assert sorted(p for b in there for p in parts(b)) == sorted(p for b in here for p in parts(b))
    again = [parts(b) for b, _ in plan.batches(batches, 0, 0)]
    assert again == [parts(b) for b in got]


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 400), max_size=8),
    learned=st.sampled_from([0, 5, 319, 320, 5000]),
)
def test_a_warm_up_gives_each_example_once_in_order_in_batches_that_grow_with_what_was_learned(sizes, learned):
    rng = np.random.default_rng(sum(sizes))
    batches = [make_batch(rng, size) for size in sizes]
    got = list(preprocessing.warmed_up(batches, learned))
    assert [example for b in got for example in parts(b)] == [example for b in batches for example in parts(b)]
    seen = learned
    ends = set(np.cumsum(sizes).tolist())
    for batch in got:
        most = max(32, seen // 10)
        assert len(batch) <= most
        seen += len(batch)
        assert len(batch) == most or seen - learned in ends  # cut only where it must be


@pytest.mark.parametrize("workers", [2, 3, 4, 64])
def test_batches_of_workers_that_warm_up_together_are_those_of_one(rng, workers):
    sizes = [len(batch) for batch in preprocessing.warmed_up([make_batch(rng, 960)], 0, workers)]
    learned = 0
    for size in sizes[:-1]:
        most = max(32, learned // 10)  # of one worker
        assert size == max(1, most // workers)
        learned += workers * size
    assert sum(sizes) == 960


def test_a_warm_up_leaves_a_model_that_knows_much_alone_and_helps_one_that_knows_nothing(rng):
    batches = cut(make_batch(rng, 4000), 2000)
    assert list(preprocessing.warmed_up(batches, 20_000)) == batches
    losses = {}
    for warm_up in (False, True):
        with shoal.LogisticRegression(shoal.FTRL(alpha=0.3), warm_up=warm_up) as model:
            model.fit(batches, progress=False)
            losses[warm_up] = model.evaluate(batches[0]).logloss
            before = model.weights()[1].copy()
        with shoal.LogisticRegression(
            shoal.FTRL(alpha=0.3), warm_up=warm_up
        ) as twin:  # the order of calls is no matter
            twin.fit(batches[:1], progress=False)
            twin.fit(batches[1:], progress=False)
            assert twin.weights()[1].tobytes() == before.tobytes()
    assert losses[True] < losses[False]


def test_each_pass_has_another_order_and_the_same_seed_the_same_bits(rng):
    batches = cut(make_batch(rng, 600), 50)
    plan = shoal.models.Plan(epochs=2, shuffle=4, seed=9)
    orders = [[parts(b) for b, _ in plan.batches(batches, epoch, 0)] for epoch in (0, 1)]
    assert orders[0] != orders[1]
    assert [parts(b) for b in batches] not in orders
    results = []
    for seed in (1, 1, 2):
        with LogisticRegression(seed=seed) as model:
            model.fit(batches, epochs=2, shuffle=True, progress=False)
            assert model.examples == 1200
            results.append(bits(model, batches))
    assert results[0] == results[1]
    assert results[0][1] != results[2][1]


def test_several_files_come_in_another_order_each_pass(tmp_path):
    paths = [tmp_path / f"{i}.libsvm" for i in range(6)]
    for i, path in enumerate(paths):
        path.write_text("".join(f"{j % 2} {100 * i + j}:1\n" for j in range(10)))
    reader = shoal.read_libsvm(paths, batch_size=10)

    def files(plan, epoch, of=reader):
        firsts = [batch.keys // 100 for batch, _ in plan.batches(plan.source(of, epoch), epoch, 0)]
        assert all(len(set(first.tolist())) == 1 for first in firsts)  # a buffer of one batch: files stay together
        return [int(first[0]) for first in firsts]

    plan = shoal.models.Plan(epochs=3, shuffle=1, seed=5)
    orders = [files(plan, epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert orders == [files(plan, epoch) for epoch in range(3)]
    assert orders[0] != files(shoal.models.Plan(shuffle=1, seed=6), 0)
    assert files(shoal.models.Plan(), 0) == list(range(6))
    iterator = iter(reader)
    next(iterator)
    iterator.close()
    assert files(plan, 1, reader.resume(reader.position())) == list(range(1, 6))
    (paths[0]).write_text("1 3:1\nbad\n")
    with LogisticRegression() as model:
        model.fit(shoal.read_libsvm(paths, on_error="skip"), epochs=2, shuffle=True, progress=False)
        assert [(done.metrics.examples, done.skipped) for done in model.history.passes] == [(51, 1), (51, 1)]


def test_sorted_data_is_learned_better_when_it_is_shuffled(rng):
    whole = make_batch(rng, 4000)
    ordered = cut(preprocessing.take(whole, np.argsort(whole.labels, kind="stable")), 50)
    test = make_batch(rng, 1000)
    results = []
    for shuffle in (0, 80):
        with LogisticRegression(shoal.FTRL(alpha=0.3)) as model:
            results.append(model.fit(ordered, shuffle=shuffle, progress=False).evaluate(test).logloss)
    assert results[1] < results[0]


def test_batches_before_an_error_are_learned_from_though_they_wait_in_the_buffer(rng):
    batches = cut(make_batch(rng, 500), 50)

    def fails():
        yield from batches[:7]
        raise ValueError("line 351")

    with LogisticRegression() as model:
        with pytest.raises(ValueError, match="line 351"):
            model.fit(fails(), shuffle=5, progress=False)
        assert model.examples == 350
        assert not model.history.passes[0].complete


# ---- early stopping --------------------------------------------------------------------------------------------------


@pytest.fixture
def overfits(rng):
    """Little data, many keys, a high rate: the second pass is worse than the first."""
    train = make_batch(rng, 60, keys=400, nnz=20)
    test = make_batch(rng, 300, keys=400, nnz=20)
    return cut(train, 10), [test], shoal.FTRL(alpha=3.0)


@pytest.mark.parametrize("metric", ["logloss", "auc"])
def test_it_stops_after_patience_and_has_the_weights_of_the_best_pass(overfits, metric):
    train, valid, optimizer = overfits
    with LogisticRegression(optimizer) as long:
        long.fit(train, epochs=12, valid=valid, progress=False)
        gains = [-p.valid.logloss if metric == "logloss" else p.valid.auc for p in long.history.passes]
    expected_best = expected_last = 0
    for i, gain in enumerate(gains):
        if gain > gains[expected_best]:
            expected_best = i
        expected_last = i
        if i - expected_best >= 2:
            break
    assert expected_last < 11, "this data should overfit"
    with LogisticRegression(optimizer) as model, LogisticRegression(optimizer) as twin:
        model.fit(train, epochs=12, valid=valid, progress=False, early_stopping=EarlyStopping(2, metric=metric))
        assert len(model.history.passes) == expected_last + 1
        assert model.history.best_pass == expected_best + 1
        twin.fit(train, epochs=expected_best + 1, progress=False)
        assert bits(model, valid) == bits(twin, valid)
        assert model.evaluate(valid) == model.history.passes[expected_best].valid
        model.fit(train, progress=False)  # and learns on from there
        twin.fit(train, progress=False)
        assert bits(model, valid) == bits(twin, valid)
        assert model.history.best_pass is None


def test_a_difference_of_less_than_min_delta_is_no_progress(rng):
    train, valid = cut(make_batch(rng, 200), 20), [make_batch(rng, 200)]
    with LogisticRegression(shoal.FTRL(alpha=0.001)) as model:
        model.fit(train, epochs=9, valid=valid, progress=False, early_stopping=EarlyStopping(1, min_delta=10.0))
        assert (len(model.history.passes), model.history.best_pass, model.examples) == (2, 1, 200)
    with LogisticRegression(shoal.FTRL(alpha=0.001)) as model:
        model.fit(train, epochs=3, valid=valid, progress=False, early_stopping=EarlyStopping(1))
        assert (len(model.history.passes), model.history.best_pass, model.examples) == (3, 3, 600)


def test_the_best_pass_is_saved_with_the_model(overfits, tmp_path):
    train, valid, optimizer = overfits
    with LogisticRegression(optimizer) as model:
        model.fit(train, epochs=12, valid=valid, progress=False, early_stopping=EarlyStopping(1)).save(tmp_path / "m")
        with LogisticRegression.load(tmp_path / "m") as again:
            assert again.history == model.history
            assert bits(again, valid) == bits(model, valid)


def test_stopping_leaves_nothing_in_the_temporary_directory(overfits, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    train, valid, optimizer = overfits
    with LogisticRegression(optimizer) as model:
        model.fit(train, epochs=5, valid=valid, progress=False, early_stopping=EarlyStopping(1))
        with pytest.raises(KeyboardInterrupt):
            model.fit(PressesCtrlC(train, 3), epochs=5, valid=valid, progress=False, early_stopping=EarlyStopping(1))
    assert list(tmp_path.iterdir()) == []


def test_the_best_weights_do_not_wait_for_the_disk(overfits, tmp_path, monkeypatch):
    train, valid, optimizer = overfits
    syncs = []
    monkeypatch.setattr("os.fsync", syncs.append)
    with LogisticRegression(optimizer) as model:
        model.fit(train, epochs=12, valid=valid, progress=False, early_stopping=EarlyStopping(1))
        assert model.history.best_pass < len(model.history.passes), "this data should overfit"
        assert not syncs
        model.save(tmp_path / "m")
        assert syncs


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (lambda: {"early_stopping": EarlyStopping(2)}, "pass valid="),
        (lambda: {"early_stopping": EarlyStopping(0)}, "patience is 0"),
        (lambda: {"early_stopping": EarlyStopping(1, min_delta=-1.0)}, "min_delta is -1"),
        (lambda: {"early_stopping": EarlyStopping(1, min_delta=math.nan)}, "min_delta is nan"),
        (lambda: {"early_stopping": EarlyStopping(1, metric="accuracy")}, "metric is 'accuracy'"),
        (lambda: {"shuffle": -1}, "shuffle is -1"),
    ],
)
def test_settings_of_a_fit_that_make_no_sense_are_refused(rng, settings, says):
    with LogisticRegression() as model:
        with pytest.raises(ValueError, match=says):
            model.fit([make_batch(rng, 10)], progress=False, **settings())
        assert model.examples == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"negative_rate": 0.0}, "negative_rate is 0"),
        ({"negative_rate": 1.5}, "negative_rate is 1.5"),
        ({"negative_rate": math.nan}, "negative_rate is nan"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_of_a_model_that_make_no_sense_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        LogisticRegression(**settings)


# ---- sorting ahead ---------------------------------------------------------------------------------------------------


@pytest.fixture
def sorts_ahead(monkeypatch):
    """Small batches are worth a thread."""
    monkeypatch.setattr(preprocessing, "WORTH_A_THREAD", 60)
    return monkeypatch


def test_sorting_ahead_changes_no_bit_and_no_order(rng, sorts_ahead):
    sizes = [0, 1, 30, 2, 40, 50, 1, 60, 150, 170, 45]  # some are worth a thread, some too small
    whole = make_batch(rng, sum(sizes))
    rows = np.split(np.arange(len(whole)), np.cumsum(sizes)[:-1])
    batches = [preprocessing.take(whole, some) for some in rows]
    threads = set()
    sort = LogisticRegression.sort_ahead

    def watched(self, batch):
        threads.add(threading.current_thread().name)
        return sort(self, batch)

    sorts_ahead.setattr(LogisticRegression, "sort_ahead", watched)
    results = []
    for count in (1, 2):  # one thread does not sort ahead
        with shoal.local(threads=count) as store:
            model = LogisticRegression(shoal.FTRL(l1=0.1), store=store).fit(
                batches, epochs=2, valid=batches, progress=False
            )
            results.append((bits(model, batches), recorded(model)))
            assert any(name.startswith("shoal sort") for name in threads) == (count == 2)
    assert results[0] == results[1]
    assert not any(thread.name.startswith("shoal sort") for thread in threading.enumerate())


def test_a_failure_while_sorting_ahead_comes_after_what_was_there_before(rng, sorts_ahead):
    batches = cut(make_batch(rng, 500), 50)

    def fails():
        yield from batches[:3]
        raise OSError("gone")

    with shoal.local(threads=2) as store:
        model = LogisticRegression(store=store)
        with pytest.raises(OSError, match="gone"):
            model.fit(fails(), progress=False)
        assert model.examples == 150
        with pytest.raises(TypeError, match="a batch is a int"):
            model.fit([*batches[:2], 7], progress=False)
        assert model.examples == 250
        assert not any(thread.name.startswith("shoal sort") for thread in threading.enumerate())


def test_ctrl_c_while_the_next_batch_is_sorted_leaves_a_whole_model(rng, sorts_ahead, tmp_path):
    batches = cut(make_batch(rng, 1000), 100)
    with shoal.local(threads=2) as store, LogisticRegression(warm_up=False) as twin:
        model = LogisticRegression(store=store, warm_up=False)
        with pytest.raises(KeyboardInterrupt):
            model.fit(PressesCtrlC(batches, 4), progress=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert (model.examples, model.table.stats().step) == (400, 4)
        twin.fit(batches[:4], progress=False)
        assert bits(model, batches) == bits(twin, batches)
        model.save(tmp_path / "m")
        assert not any(thread.name.startswith("shoal sort") for thread in threading.enumerate())


# ---- many models at once ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_each_model_of_a_grid_is_the_one_trained_alone_to_the_bit(rng, sorts_ahead, threads):
    train, valid = cut(make_batch(rng, 600), 50), cut(make_batch(rng, 200), 64)
    how = {"epochs": 3, "valid": valid, "shuffle": 3, "progress": False}
    learning = {"negative_rate": 0.7, "seed": 7}
    with shoal.local(threads=threads) as store:
        grid = LogisticRegressionGrid(
            {"alpha": [0.05, 0.5], "l1": [0, 0.3]}, optimizer=shoal.FTRL(beta=2.0), store=store, **learning
        )
        assert grid.fit(train, **how) is grid
        assert len(grid) == 4
        for result in grid.results():
            with LogisticRegression(shoal.FTRL(beta=2.0, **result.settings), **learning) as alone:
                alone.fit(train, **how)
                assert result.model.optimizer == alone.optimizer
                assert bits(result.model, valid) == bits(alone, valid)
                assert recorded(result.model) == recorded(alone)
                assert result.progressive == alone.history.passes[0].metrics
                assert result.valid == alone.evaluate(valid)


@pytest.mark.slow
def test_models_of_a_grid_stop_early_each_by_itself(overfits):
    train, valid, _ = overfits
    how = {"epochs": 8, "valid": valid, "early_stopping": EarlyStopping(1), "progress": False}
    lengths = set()
    with LogisticRegressionGrid({"alpha": [3.0, 0.002]}) as grid:
        for result in grid.fit(train, **how).results():
            with LogisticRegression(shoal.FTRL(**result.settings)) as alone:
                alone.fit(train, **how)
                assert bits(result.model, valid) == bits(alone, valid)
                assert recorded(result.model) == recorded(alone)
                assert result.model.history.best_pass == alone.history.best_pass
                lengths.add(len(alone.history.passes))
        assert len(lengths) == 2
        assert grid.examples == max(model.examples for model in grid.models)


def test_the_best_of_a_grid_comes_first(rng, tmp_path):
    train, valid = cut(make_batch(rng, 800), 50), [make_batch(rng, 300)]
    with LogisticRegressionGrid({"alpha": [1e-6, 0.3, 1e-5]}) as grid:
        with pytest.raises(ValueError, match="not fitted yet"):
            grid.results()
        grid.fit(train, progress=False)
        assert grid.results()[0].valid is None
        grid.fit(train, valid=valid, progress=False)
        for metric in ("logloss", "auc"):
            ordered = [getattr(result.valid, metric) for result in grid.results(metric)]
            assert ordered == sorted(ordered, reverse=metric == "auc")
        assert grid.results()[0].settings == {"alpha": 0.3}
        assert grid.best() is grid.models[1]
        grid.best().save(tmp_path / "m")
        with LogisticRegression.load(tmp_path / "m") as again:
            assert bits(again, valid) == bits(grid.best(), valid)
        with pytest.raises(ValueError, match="metric is 'f1'"):
            grid.results("f1")


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ({}, "the grid is empty"),
        ({"alfa": [1]}, "FTRL has no setting 'alfa': choose from .*alpha"),
        ({"alpha": []}, "no value for 'alpha'"),
        ({"alpha": [0.1, 0.2, 0.1]}, "'alpha' twice"),
        ({"alpha": [0.1, -1]}, "alpha > 0"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(grid, says):
    with pytest.raises(ValueError, match=says):
        LogisticRegressionGrid(grid)


def test_the_bar_of_a_grid_tells_how_many_models(rng, capsys):
    with LogisticRegressionGrid({"alpha": [0.1, 0.2]}) as grid:
        grid.fit(cut(make_batch(rng, 300), 50))
    assert "2 models, best logloss 0." in capsys.readouterr().err


# ---- looking at the weights ------------------------------------------------------------------------------------------


def test_the_largest_weights_come_first(rng):
    with LogisticRegression(shoal.FTRL(alpha=0.5, l1=0.5)) as model:
        model.fit(cut(make_batch(rng, 500), 50), progress=False)
        keys, weights = model.weights()
        order = np.lexsort((keys, -np.abs(weights)))
        assert len(keys) + 5 < 1000
        for n in (0, 1, 7, len(keys), len(keys) + 5, 1000, 1001):
            top_keys, top_weights = model.top(n)
            assert top_keys.tolist() == keys[order[:n]].tolist()
            assert top_weights.tolist() == weights[order[:n]].tolist()
        with pytest.raises(ValueError, match="n is -1"):
            model.top(-1)
        names = shoal.data.FeatureNames()
        names.add(keys[order[1:3]], ["site=a.com", "user=7"])
        texts, top_weights = model.top(4, names=names)
        assert texts == [str(keys[order[0]]), "site=a.com", "user=7", str(keys[order[3]])]
        assert top_weights.tolist() == weights[order[:4]].tolist()
        assert model.top(1, names={})[0] == [str(keys[order[0]])]


@pytest.mark.slow
def test_a_curve_of_weighted_windows_keeps_its_sums(rng):
    batches = [weighted(b, draw_weights(rng, len(b))) for b in cut(make_batch(rng, 1200), 2)]
    with LogisticRegression() as model:
        model.fit(batches, progress=False)
        points, (done,) = model.history.points, model.history.passes
    assert len(points) <= 256
    total = sum(p.window_logloss * p.window_weight for p in points if p.window_weight)
    assert total / done.metrics.weight == pytest.approx(done.metrics.logloss)


def test_a_curve_of_more_passes_than_points_can_be_sent_to_other_workers():
    record = Record()
    for number in range(1, 400):
        record.curve.add(8, 8.0, 1.0, total=8 * number, pass_number=number, progress=Accumulator())
        record.curve.close_window(total=8 * number, pass_number=number, progress=Accumulator())
    standing = Standing.of(record)
    assert len(standing.history.points) == 399
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(standing.windows), type=Windows) == standing.windows


# ---- real data -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def a9a(shoal_data):
    """Four fifths of the training file, its last fifth, and the test file."""
    path = shoal_data / "libsvm" / "a9a.xz"
    if not path.is_file():
        pytest.skip("SHOAL_DATA has no libsvm/a9a.xz")
    batches = list(shoal.read_libsvm(path, batch_size=32))
    cut_at = len(batches) * 4 // 5
    return batches[:cut_at], batches[cut_at:], list(shoal.read_libsvm(path.with_name("a9a.t.xz")))


@pytest.mark.slow
def test_a9a_stopped_early_reaches_the_reference(a9a):
    train, valid, test = a9a
    with LogisticRegression(shoal.FTRL(alpha=0.1), seed=1) as model:
        model.fit(train, epochs=8, valid=valid, shuffle=64, progress=False, early_stopping=EarlyStopping(1))
        losses = [done.valid.logloss for done in model.history.passes]
        assert model.history.best_pass == np.argmin(losses) + 1
        m = model.evaluate(test)
    assert m.auc >= 0.9015
    assert m.logloss <= 0.3255


@pytest.mark.slow
def test_a9a_with_a_third_of_its_negatives_is_nearly_as_good_and_calibrated(a9a):
    train, valid, test = a9a
    with LogisticRegression(shoal.FTRL(alpha=0.1), negative_rate=1 / 3) as model:
        model.fit([*train, *valid], epochs=2, progress=False)
        assert model.examples < 2 * 32_561 * 0.55
        m = model.evaluate(test)
    assert m.auc >= 0.900
    assert abs(m.calibration - 1) < 0.04
