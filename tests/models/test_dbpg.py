"""The delayed block proximal gradient against a plain proximal gradient in float64."""

from __future__ import annotations

import doctest
import functools
import logging
from itertools import pairwise

import numpy as np
import pytest

import shoal
from oracle import proximal
from paths import ROOT
from shoal.models import BIAS_KEY, EarlyStopping
from tiers import long_after

FEATURES = 120


@functools.cache
def data(valued, weighted, seed=1):
    """600 examples of a few of 120 features, some far more frequent, a few of them twice; labels planted."""
    random = np.random.default_rng(seed)
    n = 600
    share = 1 / (5 + np.arange(FEATURES))
    chosen = [random.choice(FEATURES, random.integers(0, 12), replace=False, p=share / share.sum()) for _ in range(n)]
    chosen = [np.append(some, some[:1]) if i % 20 == 0 else some for i, some in enumerate(chosen)]
    lengths = [len(some) for some in chosen]
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    columns = np.concatenate(chosen)
    values = random.normal(size=len(columns)).astype(np.float32) if valued else None
    dense = np.zeros((n, FEATURES + 1))
    np.add.at(dense, (np.repeat(np.arange(n), lengths), columns), 1 if values is None else values)
    dense[:, FEATURES] = 1
    true = random.normal(size=FEATURES + 1) * (random.random(FEATURES + 1) < 0.5)
    labels = (random.random(n) < 1 / (1 + np.exp(-dense @ true))).astype(np.float32)
    weights = random.integers(0, 4, size=n).astype(np.float32) if weighted else None
    keys = (columns * 7919 + 3).astype(np.uint64)
    return shoal.Batch(labels, indptr, keys, values, weights), dense


@functools.cache
def oracle(valued, weighted, l1):
    batch, dense = data(valued, weighted)
    v = np.ones(len(batch)) if batch.weights is None else batch.weights.astype(np.float64)
    x, y = dense, batch.labels.astype(np.float64)
    return x, y, v, proximal.optimum(x, y, v, l1)


def weights_of(model):
    keys = np.arange(FEATURES + 1, dtype=np.uint64) * np.uint64(7919) + np.uint64(3)
    keys[FEATURES] = BIAS_KEY
    return model.table.pull(keys)[:, 0].astype(np.float64)


def cut(batch, parts=7):
    ends = np.linspace(0, len(batch), parts + 1).astype(int)
    for begin, end in pairwise(ends):
        yield shoal.data.rebatch.rows_of(batch, begin, end)


@pytest.mark.combined
@pytest.mark.slow
@pytest.mark.parametrize("delay", long_after(2, [0, 3, 1, 15]))
@pytest.mark.parametrize(("valued", "weighted"), [(False, False), (True, True)])
def test_it_goes_to_the_optimum_of_the_plain_proximal_gradient(valued, weighted, delay):
    l1 = 3.0
    batch, _ = data(valued, weighted)
    x, y, v, best = oracle(valued, weighted, l1)
    solver = shoal.models.DBPG(l1=l1, blocks=16, delay=delay, tolerance=1e-5, passes=1500)
    with shoal.LogisticRegression(solver=solver) as model:
        model.fit(list(cut(batch)))
        w = weights_of(model)
        assert model.solved.converged, model.solved
        assert model.bias == np.float32(w[-1])
    assert proximal.objective(x, y, v, w, l1) <= proximal.objective(x, y, v, best, l1) * (1 + 1e-6)
    assert np.max(proximal.violations(x, y, v, w, l1)) <= 1e-2
    assert np.max(np.abs(w - best)) <= 5e-3
    assert 10 < np.count_nonzero(best) < 100


@pytest.mark.parametrize("delay", [0, 5])
def test_no_pass_makes_the_objective_worse(delay):
    l1 = 2.0
    batch, _ = data(True, False)
    x, y, v, _ = oracle(True, False, l1)
    with shoal.LogisticRegression(solver=shoal.models.DBPG(l1=l1, blocks=8, delay=delay, passes=1)) as model:
        found = [proximal.objective(x, y, v, weights_of(model), l1)]
        for _ in range(15):
            model.fit([batch])
            found.append(proximal.objective(x, y, v, weights_of(model), l1))
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(found))
    assert found[-1] < 0.9 * found[0]


@pytest.mark.slow
def test_the_filter_passes_keys_over_and_ends_at_the_same_optimum():
    batch, _ = data(True, True)
    ends = {}
    for slack in (None, 0.0, 0.1, 0.5):
        solver = shoal.models.DBPG(l1=8.0, slack=slack, tolerance=1e-5, passes=1500)
        with shoal.LogisticRegression(solver=solver) as model:
            solved = model.fit([batch]).solved
            assert solved.converged
            ends[slack] = solved, weights_of(model)
    keys = np.unique(batch.keys).size + 1
    for solved, w in ends.values():
        assert solved.sent + solved.passed_over == keys * solved.passes
        np.testing.assert_allclose(w, ends[None][1], atol=2e-3)
        assert np.array_equal(w == 0, ends[None][1] == 0)
    assert ends[None][0].passed_over == 0
    assert ends[0.1][0].passed_over > ends[0.5][0].passed_over > 0
    assert ends[0.1][0].sent < ends[None][0].sent / 2


@pytest.mark.slow
def test_threads_and_slots_change_no_bit_of_it_and_a_second_run_repeats_it():
    batch, _ = data(True, True)
    bits = []
    for threads in (1, 3, 3):
        with (
            shoal.local(threads=threads) as store,
            shoal.LogisticRegression(solver=shoal.models.DBPG(delay=2, passes=20), store=store) as model,
        ):
            model.fit(list(cut(batch)))
            bits.append((model.solved, weights_of(model).tobytes()))
    assert bits[0] == bits[1] == bits[2]


def test_one_pass_is_that_of_the_formula():
    """Two blocks, delay 1: each block's gradient is at the start, as the other's update is not seen."""
    batch, x = data(True, True)
    y, v = batch.labels.astype(np.float64), batch.weights.astype(np.float64)
    l1 = 1.5
    # An example may have a feature more than once: the bound takes their sizes apart.
    owners = np.repeat(np.arange(len(batch)), np.diff(batch.indptr))
    columns = ((batch.keys - np.uint64(3)) // np.uint64(7919)).astype(int)
    sizes = np.zeros_like(x)
    np.add.at(sizes, (owners, columns), np.abs(batch.values))
    sizes[:, FEATURES] = 1
    curvature = 0.25 * (sizes.T * v) @ sizes.sum(axis=1)
    g = proximal.gradient(x, y, v, np.zeros(FEATURES + 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = -g / curvature
        wanted = np.sign(moved) * np.maximum(np.abs(moved) - l1 / curvature, 0)
    wanted = np.where(curvature > 0, wanted, 0)
    with shoal.LogisticRegression(solver=shoal.models.DBPG(l1=l1, blocks=2, delay=1, passes=1)) as model:
        model.fit([batch])
        np.testing.assert_allclose(weights_of(model), wanted, rtol=1e-5, atol=1e-7)
        assert not model.solved.converged


@pytest.mark.slow
def test_it_starts_from_where_it_is():
    batch, _ = data(True, False)
    with shoal.LogisticRegression(solver=shoal.models.DBPG(l1=2.0, tolerance=1e-3, passes=300)) as model:
        model.fit([batch])
        losses = [one.metrics.logloss for one in model.history.passes]
        w = weights_of(model)
        model.fit([batch])
        assert model.solved.converged
        assert np.max(np.abs(weights_of(model) - w)) < 0.05
        assert abs(model.history.passes[len(losses)].metrics.logloss - losses[-1]) < 1e-3 < losses[0] - losses[-1]
        assert model.examples == len(batch) * len(model.history.passes)


@pytest.mark.slow
def test_the_model_predicts_measures_saves_and_loads(tmp_path):
    batch, x = data(True, False)
    solver = shoal.models.DBPG(l1=1.0, lr=0.9, passes=30)
    with shoal.LogisticRegression(solver=solver) as model:
        model.fit([batch], valid=[batch])
        margins = model.decision_function(batch)
        np.testing.assert_allclose(margins, x @ weights_of(model), rtol=1e-6, atol=1e-6)
        last = model.history.passes[-1]
        assert last.metrics.logloss == pytest.approx(last.valid.logloss, rel=1e-6)
        assert last.metrics.examples == len(batch)
        losses = [one.metrics.logloss for one in model.history.passes]
        assert losses[-1] < losses[0]
        keys, weights = model.weights()
        assert len(keys) == model.table.count() - (model.bias != 0)
        assert abs(weights).sum() + abs(model.bias) == pytest.approx(model.table.norm(1))
        model.save(tmp_path / "m")
    with shoal.models.load(tmp_path / "m") as loaded:
        assert loaded.decision_function(batch).tobytes() == margins.tobytes()
        assert (loaded.solver.l1, loaded.solver.lr) == (1.0, 0.9)
        loaded.fit([batch])


def test_a_worker_without_examples_and_a_key_without_values_do_no_harm():
    with shoal.LogisticRegression(solver="dbpg") as model:
        assert model.fit([]).solved.converged
        flat = shoal.Batch(
            np.array([1, 0], np.float32), np.array([0, 1, 2]), np.array([7, 8], np.uint64), np.zeros(2, np.float32)
        )
        model.fit([flat])
        assert model.table.pull(np.array([7, 8], np.uint64)).tolist() == [[0.0, 0.0]] * 2


def test_it_says_when_it_did_not_get_there(caplog):
    batch, _ = data(True, False)
    with (
        caplog.at_level(logging.WARNING, "shoal"),
        shoal.LogisticRegression(solver=shoal.models.DBPG(passes=2, l1=0.1)) as model,
    ):
        model.fit([batch])
        assert "no optimum within 2 passes" in caplog.text
        assert (model.solved.passes, model.solved.converged) == (2, False)


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (lambda: shoal.models.DBPG(l1=-1.0), "l1 >= 0"),
        (lambda: shoal.models.DBPG(lr=1.5), "safe up to 1"),
        (lambda: shoal.models.DBPG(blocks=0), "blocks is 0"),
        (lambda: shoal.models.DBPG(blocks=4, delay=4), "pass 0 to 3"),
        (lambda: shoal.models.DBPG(slack=1.5), "slack is 1.5"),
        (lambda: shoal.models.DBPG(tolerance=-1.0), "tolerance is -1.0"),
        (lambda: shoal.models.DBPG(passes=0), "passes is 0"),
        (lambda: shoal.LogisticRegression(solver="newton"), "solver is 'newton'"),
        (lambda: shoal.LogisticRegression(shoal.FTRL(), solver="dbpg"), "its own update rule"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, reported):
    with pytest.raises(ValueError, match=reported):
        make()


def test_the_example_of_the_document_runs():
    text = (ROOT / "docs" / "dbpg.md").read_text(encoding="utf-8")
    test = doctest.DocTestParser().get_doctest(text.replace("```", ""), {}, "dbpg.md", "dbpg.md", 0)
    runner = doctest.DocTestRunner()
    runner.run(test)
    assert (runner.failures, runner.tries) == (0, 6)


def test_what_belongs_to_learning_online_is_refused():
    batch, _ = data(True, False)
    with shoal.LogisticRegression(solver="dbpg") as model:
        for settings in ({"epochs": 2}, {"shuffle": True}, {"early_stopping": EarlyStopping(1), "valid": [batch]}):
            with pytest.raises(ValueError, match="holds the data and stops by itself"):
                model.fit([batch], **settings)
        with pytest.raises(ValueError, match="all examples at once"):
            model.partial_fit(batch)
        with pytest.raises(TypeError, match="Batch"):
            model.fit(batch)
        assert len(model.table) == 0
    for solver, reported in (
        (shoal.models.DBPG(blocks=5), "the store has 4 slots"),
        (shoal.models.DBPG(delay=4), "pass 0 to 3"),
    ):
        with (
            shoal.local(slots=4) as store,
            shoal.LogisticRegression(solver=solver, store=store) as model,
            pytest.raises(ValueError, match=reported),
        ):
            model.fit([batch])


def test_by_default_there_are_no_more_blocks_than_slots():
    batch, _ = data(True, False)
    found = []
    for slots, blocks in ((4, None), (4, 4), (1024, None), (1024, 128)):
        with (
            shoal.local(slots=slots) as store,
            shoal.LogisticRegression(solver=shoal.models.DBPG(blocks=blocks, passes=3), store=store) as model,
        ):
            model.fit([batch])
            found.append(weights_of(model).tobytes())
    assert found[0] == found[1] != found[2] == found[3]
