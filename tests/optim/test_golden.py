"""The engine against the reference vectors and against numbers worked by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

import shoal
from oracle import others
from oracle.optimizers import Run, rule_of
from paths import GOLDEN

KEY = np.array([42], np.uint64)


@pytest.fixture(scope="module")
def vectors():

    return json.loads((GOLDEN / "optimizers.json").read_text())


@pytest.fixture
def steps():
    """Return a function that pushes gradients to one key and returns the weights after each, and the table."""
    with shoal.local(threads=1, slots=2) as store:

        def run(optimizer, w0, gradients):
            gradients = np.array(gradients, np.float32).reshape(len(gradients), 1, -1)
            table = store.table("t", dim=gradients.shape[2], optimizer=optimizer, init=shoal.Constant(w0))
            weights = []
            for g in gradients:
                table.push(KEY, g).result()
                weights.append(table.pull(KEY)[0])
            return np.array(weights), table

        yield run


def assert_close(actual, expected, optimizer, w0, gradients):
    """Hold the weights after every step to the kernel tolerance; the numbers given are float64."""
    run = Run(rule_of(optimizer), np.full(np.shape(expected)[1:], w0))
    for got, want, g in zip(actual, expected, gradients, strict=True):
        run.push(g)
        # One more bound for the inputs, which the vectors do not round to float32.
        assert np.all(np.abs(got - want) <= 2 * run.bounds()["w"]), (run.steps, got, want)


def column(values):
    return np.reshape(values, (len(values), -1))


@pytest.mark.parametrize("index", range(5))
def test_ftrl_meets_its_reference_vectors(steps, vectors, index):
    vector = [vectors["ftrl_hand3"], *vectors["ftrl_runs"]][index]
    optimizer = shoal.FTRL(
        alpha=vector["alpha"], beta=vector["beta"], l1=vector["l1"], l2=vector["l2"], n0=vector.get("n0", 0.0)
    )
    weights, table = steps(optimizer, 0.0, vector["g"])
    assert_close(weights, column(vector["w"]), optimizer, 0.0, column(vector["g"]))
    state = table.state(KEY)
    assert state["z"][0, 0] == pytest.approx(vector["z"], rel=1e-5)
    assert state["n"][0, 0] == pytest.approx(vector["n"], rel=1e-5)
    for got, want in zip(weights[:, 0], vector["w"], strict=True):
        assert (got == 0) == (want == 0)


def test_group_ftrl_meets_its_reference_vector(steps, vectors):
    vector = vectors["group_ftrl_hand"]
    optimizer = shoal.GroupFTRL(
        alpha=vector["lr"],
        beta=vector["beta"],
        l1=vector["l1"],
        l2=2 * vector["l2_tf"],
        l21=vector["l21"],
        n0=vector["n0"],
    )
    weights, table = steps(optimizer, 0.0, vector["g"])
    assert_close(weights, np.array(vector["w"]), optimizer, 0.0, vector["g"])
    np.testing.assert_allclose(table.state(KEY)["z"][0], vector["z"], rtol=1e-5)
    np.testing.assert_allclose(table.state(KEY)["n"][0], vector["n"], rtol=1e-5)


def test_adagrad_meets_its_reference_vector(steps, vectors):
    vector = vectors["adagrad_torch"]
    optimizer = shoal.Adagrad(lr=vector["lr"], eps=vector["eps"], n0=vector["n0"])
    weights, _ = steps(optimizer, vector["w0"], vector["g"])
    assert_close(weights, column(vector["w"]), optimizer, vector["w0"], column(vector["g"]))


def test_keras_adagrad_is_met_by_adagrad_with_eps_moved_into_n0(steps, vectors):
    vector = vectors["adagrad_keras"]
    optimizer = shoal.Adagrad(lr=vector["lr"], eps=0.0, n0=vector["n0"] + vector["eps"])
    weights, _ = steps(optimizer, vector["w0"], vector["g"])
    assert_close(weights, column(vector["w"]), optimizer, vector["w0"], column(vector["g"]))


def test_rowwise_adagrad_meets_its_reference_vector(steps, vectors):
    vector = vectors["rowwise_hand"]
    optimizer = shoal.RowWiseAdagrad(lr=vector["lr"], eps=vector["eps"])
    weights, table = steps(optimizer, vector["w0"], vector["g"])
    np.testing.assert_allclose(weights[-1], vector["w"], rtol=0, atol=1e-7)
    np.testing.assert_array_equal(table.state(KEY)["m"], [[np.float32(vector["m"])]])


def test_adam_meets_the_reference_vector_of_sparse_adam_and_tensorflow(steps, vectors):
    vector = vectors["adam_sparseadam_tf"]
    optimizer = shoal.Adam(lr=vector["lr"], b1=vector["b1"], b2=vector["b2"], eps=vector["eps"])
    weights, _ = steps(optimizer, vector["w0"], vector["g"])
    assert_close(weights, column(vector["w"]), optimizer, vector["w0"], column(vector["g"]))


def test_torch_dense_adam_is_met_within_float32(steps, vectors):
    vector = vectors["adam_torch_dense"]
    optimizer = shoal.Adam(lr=vector["lr"], b1=vector["b1"], b2=vector["b2"], eps=vector["eps"])
    weights, _ = steps(optimizer, vector["w0"], vector["g"])
    assert_close(weights, column(vector["w"]), optimizer, vector["w0"], column(vector["g"]))


def test_paddle_sparse_adagrad_has_no_counterpart(steps, vectors):
    vector = vectors["paddle_sparse_adagrad"]
    weights, _ = steps(shoal.RowWiseAdagrad(lr=vector["lr"]), 0.1, vector["g"])
    assert np.abs(weights - vector["w"]).max() > 0.01


@pytest.mark.parametrize(("per_row_step", "name"), [(False, "global_step"), (True, "per_row_step")])
def test_lazy_adam_counts_the_pushes_of_its_table_or_the_steps_of_its_row(vectors, per_row_step, name):
    with shoal.local(threads=1) as store:
        table = store.table("t", optimizer=shoal.Adam(lr=0.01, per_row_step=per_row_step))
        other = np.array([43], np.uint64)
        for key in (KEY, other, other, other, KEY):
            table.push(key, np.ones(1, np.float32)).result()
        assert table.stats().step == 5
        assert table.pull(KEY)[0, 0] == pytest.approx(vectors["lazy_adam_hand"][name], rel=1e-6)
        if per_row_step:
            np.testing.assert_array_equal(table.state(np.array([42, 43], np.uint64))["t"].ravel(), [2, 3])


@pytest.mark.parametrize(
    ("optimizer", "w0", "gradients", "expected"),
    [
        (shoal.SGD(lr=0.1), 1.0, [0.5], [0.95]),
        (shoal.Momentum(lr=0.1, mu=0.9), 0.0, [1, 1], [-0.1, -0.29]),
        (shoal.Momentum(lr=0.1, mu=0.9, nesterov=True), 0.0, [1, 1], [-0.19, -0.461]),
        (shoal.Adagrad(lr=0.1), 1.0, [0.5, -0.25], [0.9, 0.944721360]),
        (shoal.FTRL(alpha=0.1, l1=0.1, l2=1.0), 0.0, [0.5, -0.25, 1], [-0.025, -0.00993083550, -0.0544614928]),
        (shoal.AdamW(lr=0.01, weight_decay=0.1), 1.0, [0.5, -0.25, 1], [0.9890000063, 0.9853476374, 0.9777811756]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_numbers_worked_by_hand(steps, optimizer, w0, gradients, expected):
    weights, _ = steps(optimizer, w0, gradients)
    np.testing.assert_allclose(weights[:, 0], expected, rtol=2e-7, atol=2e-8)


def test_duplicates_are_summed_first_and_step_once():
    with shoal.local() as store:
        table = store.table("t", dim=2, optimizer=shoal.Adagrad(lr=0.1), init=shoal.Constant(0.3))
        table.push(np.array([1, 2, 1], np.uint64), np.array([[1, 2], [3, 4], [10, 20]], np.float32)).result()
        np.testing.assert_allclose(table.pull(np.array([1, 2], np.uint64)), np.full((2, 2), 0.2), rtol=0, atol=3e-8)
        np.testing.assert_array_equal(table.state(np.array([1], np.uint64))["n"], [[121, 484]])


def test_every_default_is_the_published_one():
    described = {
        shoal.SGD(): {"lr": 0.01, "weight_decay": 0.0},
        shoal.Momentum(): {"lr": 0.01, "mu": 0.9, "nesterov": False, "weight_decay": 0.0},
        shoal.Adagrad(): {"lr": 0.01, "eps": 1e-10, "n0": 0.0, "weight_decay": 0.0},
        shoal.RowWiseAdagrad(): {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.0},
        shoal.FTRL(): {"alpha": 0.1, "beta": 1.0, "l1": 0.0, "l2": 0.0, "n0": 0.0},
        shoal.GroupFTRL(): {"alpha": 0.1, "beta": 1.0, "l1": 0.0, "l2": 0.0, "l21": 0.0, "n0": 0.0},
        shoal.Adam(): {"lr": 0.001, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "per_row_step": False},
        shoal.AdamW(): {"lr": 0.001, "b1": 0.9, "b2": 0.999, "eps": 1e-8},
    }
    for optimizer, defaults in described.items():
        assert {name: getattr(optimizer, name) for name in defaults} == defaults
        assert optimizer.clip_value is None
        assert optimizer.clip_norm is None


def test_keras_ftrl_is_met_with_twice_its_l2(steps, vectors):
    g = vectors["ftrl_runs"][0]["g"]
    optimizer = shoal.FTRL(alpha=0.1, beta=1.0, l1=0.3, l2=0.5, n0=0.1)
    weights, _ = steps(optimizer, 0.0, g)
    theirs = list(others.keras_ftrl(0.0, g, lr=0.1, beta=1.0, l1=0.3, l2=0.25, n0=0.1))
    assert_close(weights, column(theirs), optimizer, 0.0, column(g))
