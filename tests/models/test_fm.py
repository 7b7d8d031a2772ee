"""Factorization machine: against a float64 oracle over all pairs, torch, and logistic regression on planted pairs."""

import itertools
import json
import math

import numpy as np
import pytest

import shoal
from oracle import initial
from oracle.optimizers import rule_of
from shoal import FTRL, SGD, Adagrad, Batch, FactorizationMachine, LogisticRegression, Normal, cli, models
from shoal.metrics import measure
from shoal.models import BIAS_KEY, EarlyStopping
from textbook import cut, make_batch
from tiers import long_after


class Oracle:
    """A factorization machine in plain float64: dicts of rows, every pair by itself."""

    def __init__(self, dim, optimizer, factors, init):
        self.dim, self.rules, self.init = dim, (rule_of(optimizer), rule_of(factors)), init
        self.w, self.v, self.step = {}, {}, 0

    def features(self, batch, i):
        entries = range(batch.indptr[i], batch.indptr[i + 1])
        return [(int(batch.keys[e]), 1.0 if batch.values is None else float(batch.values[e])) for e in entries]

    def weight(self, key):
        return float(self.rules[0].weights(self.w[key])[0]) if key in self.w else 0.0

    def start(self, key):
        return initial.normal(self.init.std, self.init.seed, key, self.dim).astype(np.float64)

    def factors(self, key):
        return self.rules[1].weights(self.v[key]) if key in self.v else self.start(key)

    def margin(self, features):
        linear = self.weight("bias") + sum(self.weight(k) * x for k, x in features)
        pairs = itertools.combinations(features, 2)
        return linear + sum(float(self.factors(k) @ self.factors(m)) * x * z for (k, x), (m, z) in pairs)

    def margins(self, batch):
        return [self.margin(self.features(batch, i)) for i in range(len(batch))]

    def learn(self, batch):
        weights = np.ones(len(batch)) if batch.weights is None else batch.weights.astype(np.float64)
        gw, gv = {}, {}
        for i, a in enumerate(self.margins(batch)):
            features = self.features(batch, i)
            slope = weights[i] * (1 / (1 + math.exp(-a)) - batch.labels[i])
            gw["bias"] = gw.get("bias", 0.0) + slope
            for e, (key, x) in enumerate(features):
                others = sum((self.factors(m) * z for f, (m, z) in enumerate(features) if f != e), np.zeros(self.dim))
                gw[key] = gw.get(key, 0.0) + slope * x
                gv[key] = gv.get(key, 0.0) + slope * x * others
        self.step += 1
        for key, g in gw.items():
            state = self.w.get(key) or self.rules[0].start(np.zeros(1))
            self.w[key] = self.rules[0].push(state, np.array([g]), self.step)
        for key, g in gv.items():
            state = self.v.get(key) or self.rules[1].start(self.start(key))
            self.v[key] = self.rules[1].push(state, g, self.step)


def planted_pairs(rng, n, fields=4, each=12, linear=0.3):
    """Draw examples of one key from each field; the label is of pairs of the first three, hardly of single keys."""
    v = rng.normal(size=(fields, each, 3))
    w = rng.normal(size=(fields, each)) * linear
    drawn = rng.integers(0, each, (n, fields))
    at = [v[f, drawn[:, f]] for f in range(3)]
    margins = sum((a * b).sum(1) for a, b in itertools.combinations(at, 2)) + sum(
        w[f, drawn[:, f]] for f in range(fields)
    )
    labels = (rng.random(n) < 1 / (1 + np.exp(-margins))).astype(np.float32)
    keys = (drawn + np.arange(fields) * each).astype(np.uint64).reshape(-1)
    return Batch(labels, np.arange(0, n * fields + 1, fields), keys, None), margins


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.combined
@pytest.mark.parametrize("size", long_after(1, [7, 1, 64]))
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("dim", [1, 3, 8])
def test_it_learns_what_the_float64_oracle_learns(rng, size, values, dim):
    optimizer, factors, init = FTRL(alpha=0.3, l1=0.1), Adagrad(lr=0.05, n0=0.1), Normal(0.2, seed=5)
    whole = make_batch(rng, 200, values=values)
    weights = rng.integers(0, 4, 200).astype(np.float32) / 2
    batches = [
        Batch(b.labels, b.indptr, b.keys, b.values, weights[i * size : (i + 1) * size])
        for i, b in enumerate(cut(whole, size))
    ]
    oracle = Oracle(dim, optimizer, factors, init)
    with FactorizationMachine(dim, optimizer=optimizer, factors=factors, init=init) as model:
        for batch in batches:
            expected = measure(batch.labels, oracle.margins(batch), batch.weights).logloss
            assert model.partial_fit(batch) == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)
            oracle.learn(batch)
        keys = sorted(oracle.v)
        got = model.factors.pull(np.array(keys, np.uint64))
        np.testing.assert_allclose(got, [oracle.factors(key) for key in keys], rtol=2e-3, atol=1e-4)
        got = model.table.pull(np.array(keys, np.uint64))[:, 0]
        np.testing.assert_allclose(got, [oracle.weight(key) for key in keys], rtol=2e-3, atol=1e-4)
        assert model.bias == pytest.approx(oracle.weight("bias"), rel=2e-3, abs=1e-4)


def test_two_features_by_hand():
    batch = Batch(
        np.array([1], np.float32), np.array([0, 2]), np.array([5, 6], np.uint64), np.array([1, 2], np.float32)
    )
    with FactorizationMachine(2, optimizer=SGD(lr=1.0), factors=SGD(lr=0.5), bias=False) as model:
        model.factors.assign(batch.keys, np.array([[1, 0], [0.5, 3]], np.float32))
        p = 1 / (1 + math.exp(-1))  # the margin is (1 x 0.5 + 0 x 3) x 1 x 2
        assert model.partial_fit(batch) == pytest.approx(-math.log(p))
        g = (p - 1) * 2
        want = [[1 - 0.5 * g * 0.5, 0 - 0.5 * g * 3], [0.5 - 0.5 * g * 1, 3]]
        np.testing.assert_allclose(model.factors.pull(batch.keys), want, rtol=1e-6)
        np.testing.assert_allclose(model.table.pull(batch.keys)[:, 0], [1 - p, 2 * (1 - p)], rtol=1e-6)


def test_the_gradients_are_those_of_torch(rng):
    torch = pytest.importorskip("torch", reason="torch is an oracle here: requirements/torch.txt says how to get it")
    batch = make_batch(rng, 64)
    batch = Batch(batch.labels, batch.indptr, batch.keys, batch.values, rng.random(64).astype(np.float32))
    with FactorizationMachine(5, optimizer=SGD(lr=1.0), factors=SGD(lr=1.0), init=Normal(0.3)) as model:
        keys = np.unique(batch.keys)
        before = model.factors.pull(keys)
        model.partial_fit(batch)
        moved = [model.table.pull(keys), model.factors.pull(keys) - before, model.bias]
    w, v = torch.zeros(len(keys), 1, dtype=torch.float64), torch.tensor(before, dtype=torch.float64)
    b = torch.zeros(1, dtype=torch.float64)
    for leaf in (w, v, b):
        leaf.requires_grad_()
    x = torch.zeros(64, batch.nnz, dtype=torch.float64)  # a column for each entry
    for i, (begin, end) in enumerate(itertools.pairwise(batch.indptr)):
        x[i, begin:end] = torch.tensor(batch.values[begin:end])
    at = np.searchsorted(keys, batch.keys)
    sums, squares = x @ v[at], (x**2) @ (v[at] ** 2)
    margins = b + (x @ w[at])[:, 0] + 0.5 * (sums**2 - squares).sum(1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        margins, torch.tensor(batch.labels, dtype=torch.float64), torch.tensor(batch.weights), reduction="sum"
    )
    loss.backward()
    for got, leaf in zip(moved, (w, v, b), strict=True):
        np.testing.assert_allclose(got, -leaf.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1, 64, 5000])
def test_threads_and_slots_change_no_bit(rng, size):
    batches = cut(make_batch(rng, 5000 if size > 1 else 200, keys=500), size)
    results = []
    for threads, slots in [(1, 1024), (2, 1024), (3, 16)]:
        with shoal.local(threads=threads, slots=slots) as store:
            model = FactorizationMachine(19, optimizer=FTRL(l1=0.1), factors=Adagrad(), store=store, seed=5)
            model.fit(batches, progress=False)
            margins = np.concatenate([model.decision_function(batch) for batch in batches])
            rows = [rows.tobytes() for table in model.tables for _, rows in table.items()]
            results.append((margins.tobytes(), *rows))
    assert len({repr(result) for result in results}) == 1


@pytest.mark.slow
def test_it_finds_planted_pairs_that_logistic_regression_cannot(rng):
    whole, margins = planted_pairs(rng, 50_000)
    train, test = (
        Batch(whole.labels[a:b], whole.indptr[: b - a + 1], whole.keys[4 * a : 4 * b], None)
        for a, b in ((0, 40_000), (40_000, 50_000))
    )
    best = measure(test.labels, margins[40_000:])
    with (
        LogisticRegression(FTRL(alpha=0.1)) as lr,
        FactorizationMachine(4, optimizer=FTRL(alpha=0.1), factors=Adagrad(lr=0.1)) as fm,
    ):
        for model in (lr, fm):
            model.fit(cut(train, 128), epochs=6, progress=False)
        linear, pairs = lr.evaluate(test), fm.evaluate(test)
    assert linear.logloss > best.logloss + 0.15
    assert pairs.logloss < best.logloss + 0.02
    assert pairs.auc > linear.auc + 0.1


def test_the_bias_has_no_factors_that_move(rng):
    with FactorizationMachine(3, init=Normal(0.1, seed=2)) as model:
        bias = np.array([BIAS_KEY], np.uint64)
        before = model.factors.pull(bias)
        model.fit(cut(make_batch(rng, 500), 50), progress=False)
        np.testing.assert_array_equal(model.factors.pull(bias), before)
        assert model.bias != 0.0


def test_examples_of_one_feature_are_logistic_regression_to_the_bit(rng):
    batch = Batch(
        (rng.random(500) < 0.3).astype(np.float32),
        np.arange(501),
        rng.integers(0, 40, 500).astype(np.uint64),
        rng.normal(size=500).astype(np.float32),
    )
    with LogisticRegression() as lr, FactorizationMachine(8, factors=Adagrad(lr=0.1)) as fm:
        for model in (lr, fm):
            model.fit(cut(batch, 50), progress=False)
        np.testing.assert_array_equal(fm.decision_function(batch), lr.decision_function(batch))
        start = initial.normal(0.01, 0, 7, 8)
        np.testing.assert_allclose(fm.factors.pull(np.array([7], np.uint64))[0], start, rtol=1e-5)


def test_empty_examples_and_empty_batches_are_fine(rng):
    empty = Batch(np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(0, np.uint64), None)
    bare = Batch(np.ones(3, np.float32), np.zeros(4, np.int64), np.empty(0, np.uint64), None)
    for bias in (True, False):
        with FactorizationMachine(4, bias=bias) as model:
            assert math.isnan(model.partial_fit(empty))
            assert model.partial_fit(bare) == pytest.approx(math.log(2))
            model.partial_fit(make_batch(rng, 10))
            assert model.probabilities(bare).shape == (3,)


def test_predicting_creates_no_rows(rng):
    with FactorizationMachine(4) as model:
        model.partial_fit(make_batch(rng, 50))
        before = [(len(table), table.stats().step) for table in model.tables]
        unseen = Batch(np.zeros(1, np.float32), np.array([0, 2]), np.array([10**6, 10**7], np.uint64), None)
        assert model.probabilities(unseen).shape == (1,)
        assert [(len(table), table.stats().step) for table in model.tables] == before


# ---- the shared loop, keeping, the command line ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_model_predicts_and_learns_on_bit_for_bit(rng, tmp_path, dtype):
    first, second = make_batch(rng, 200), make_batch(rng, 200)
    init = Normal(0.05, seed=11)
    with FactorizationMachine(
        6, optimizer=SGD(lr=0.1), factors=Adagrad(lr=0.1), init=init, table="mine", seed=3, dtype=dtype
    ) as model:
        model.fit([first], valid=[second], progress=False)
        model.save(tmp_path / "m")
        with models.load(tmp_path / "m") as again:
            assert isinstance(again, FactorizationMachine)
            assert (again.dim, again.factors.init, again.factors.spec.dtype) == (6, init, dtype)
            assert [table.spec for table in again.tables] == [table.spec for table in model.tables]
            assert (again.history, again.examples) == (model.history, 200)
            np.testing.assert_array_equal(again.decision_function(second), model.decision_function(second))
            for one in (model, again):
                one.fit([second], progress=False)
            np.testing.assert_array_equal(again.decision_function(first), model.decision_function(first))
        with pytest.raises(ValueError, match="is a factorization machine, not a logistic regression"):
            LogisticRegression.load(tmp_path / "m")


def test_early_stopping_goes_back_in_both_tables(rng):
    train, held_out = cut(make_batch(rng, 300), 20), make_batch(rng, 300)
    with FactorizationMachine(8, factors=Adagrad(lr=0.3), init=Normal(0.1)) as model:
        model.fit(train, valid=[held_out], epochs=40, progress=False, early_stopping=EarlyStopping(2))
        best = model.history.best_pass
        assert best is not None
        assert best < len(model.history.passes) < 40
        assert model.evaluate(held_out) == model.history.passes[best - 1].valid
        with FactorizationMachine(8, factors=Adagrad(lr=0.3), init=Normal(0.1)) as twin:
            twin.fit(train, epochs=best, progress=False)
            np.testing.assert_array_equal(twin.decision_function(held_out), model.decision_function(held_out))


@pytest.mark.slow
def test_the_command_trains_measures_and_inspects_it(rng, tmp_path, capsys):
    batch, _ = planted_pairs(rng, 3000)
    lines = [f"{int(y)} " + " ".join(f"{k}:1" for k in sorted(row)) for y, row in
             zip(batch.labels, batch.keys.reshape(-1, 4), strict=True)]  # fmt: skip
    (tmp_path / "train.libsvm").write_text("\n".join(lines) + "\n")
    where = ["--data", str(tmp_path / "train.libsvm"), "--format", "libsvm"]
    common = [*where, "--dim", "3", "--factors-lr", "0.1", "--factors-n0", "0.5", "--factors-l2", "0.001"]
    settings = ["--init-std", "0.05", "--seed", "4", "--alpha", "0.2", "--batch-size", "64", "--quiet"]
    for name in ("a", "b"):
        assert cli.main(["train", "fm", *common, *settings, "--output", str(tmp_path / name), "--epochs", "3"]) == 0
    with models.load(tmp_path / "a") as a, models.load(tmp_path / "b") as b:
        assert a.factors.optimizer == Adagrad(lr=0.1, n0=0.5, weight_decay=0.001)
        assert (a.dim, a.factors.init, a.optimizer) == (3, Normal(0.05, seed=4), FTRL(alpha=0.2))
        np.testing.assert_array_equal(a.decision_function(batch), b.decision_function(batch))
        want = a.evaluate(batch)
    capsys.readouterr()
    data = [str(tmp_path / "a"), "--data", str(tmp_path / "train.libsvm")]
    assert cli.main(["evaluate", *data, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["logloss"] == want.logloss
    assert cli.main(["predict", *data, "--output", str(tmp_path / "p.txt"), "--quiet"]) == 0
    assert len((tmp_path / "p.txt").read_text().splitlines()) == 3000
    assert cli.main(["inspect", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    assert "factorization machine, trained on 9,000 examples" in said
    assert "table 'fm-factors': 49 rows, dim 3" in said
    assert cli.main(["report", str(tmp_path / "a"), "--quiet"]) == 0


def test_misuse_is_explained():
    with pytest.raises(ValueError, match="factors start at 0"):
        FactorizationMachine(init=shoal.Zeros())
    with pytest.raises(TypeError, match=r"needs an optimizer such as shoal.FTRL\(\), got \{\}"):
        FactorizationMachine(optimizer={})
    with pytest.raises(ValueError, match="needs a dim from 1 to 4096, got 0"):
        FactorizationMachine(0)
    with shoal.local() as store:
        FactorizationMachine(4, store=store)
        with pytest.raises(ValueError, match="fm-factors"):
            FactorizationMachine(8, store=store)


# ---- real data -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_pairs_of_ijcnn1_tell_what_its_features_alone_do_not(shoal_data):
    train = shoal_data / "libsvm" / "ijcnn1.trn.bz2"
    test = shoal_data / "libsvm" / "ijcnn1.tst.bz2"
    if not (train.exists() and test.exists()):
        pytest.skip("no libsvm/ijcnn1")
    read = shoal.read_libsvm(train, batch_size=32)
    held_out = shoal.read_libsvm(test)
    with (
        LogisticRegression(FTRL(alpha=0.1)) as lr,
        FactorizationMachine(8, optimizer=FTRL(alpha=0.1), factors=Adagrad(lr=0.1, n0=1.0)) as fm,
    ):
        for model in (lr, fm):
            model.fit(read, epochs=3, shuffle=True, progress=False)
        linear, pairs = lr.evaluate(held_out), fm.evaluate(held_out)
    print(f"logistic regression {linear}\nfactorization machine {pairs}")
    assert pairs.auc > linear.auc + 0.03
    assert pairs.logloss < linear.logloss - 0.05
