"""The oracles themselves: against the reference vectors to 1e-12, against hand-worked numbers, against torch.

A kernel test is worth what its oracle is worth, so these run without the engine.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from oracle import others
from oracle.hashing import LAST_KEY, mix, neighbours, one_per_slot, one_slot, unmix
from oracle.optimizers import FTRL, SGD, Adagrad, Adam, AdamW, GroupFTRL, Momentum, RowWiseAdagrad
from oracle.table import DictTable, summed
from paths import GOLDEN

VECTORS = json.loads((GOLDEN / "optimizers.json").read_text())
EXACT = {"rtol": 0, "atol": 1e-12}


def run(rule, w0, gradients):
    """Return the weights after every step, and the last state."""
    state = rule.start(np.atleast_1d(np.asarray(w0, np.float64)))
    weights = []
    for t, g in enumerate(gradients, 1):
        state = rule.push(state, np.atleast_1d(g), t)
        weights.append(rule.weights(state))
    return np.array(weights), state


def hyper(vector, *names):
    return {name: vector[name] for name in names}


@pytest.mark.parametrize("vector", [VECTORS["ftrl_hand3"], *VECTORS["ftrl_runs"]])
def test_ftrl_meets_its_reference_vectors(vector):
    rule = FTRL(**hyper(vector, "alpha", "beta", "l1", "l2"), n0=vector.get("n0", 0.0))
    weights, state = run(rule, 0.0, vector["g"])
    np.testing.assert_allclose(weights[:, 0], vector["w"], **EXACT)
    np.testing.assert_allclose([state["z"][0], state["n"][0]], [vector["z"], vector["n"]], **EXACT)


def test_group_ftrl_meets_its_reference_vector():
    vector = VECTORS["group_ftrl_hand"]
    rule = GroupFTRL(alpha=vector["lr"], l2=2 * vector["l2_tf"], **hyper(vector, "beta", "l1", "l21", "n0"))
    weights, state = run(rule, np.zeros(3), vector["g"])
    np.testing.assert_allclose(weights, vector["w"], **EXACT)
    np.testing.assert_allclose(state["z"], vector["z"], **EXACT)
    np.testing.assert_allclose(state["n"], vector["n"], **EXACT)


def test_adagrad_meets_its_reference_vector():
    vector = VECTORS["adagrad_torch"]
    weights, _ = run(Adagrad(**hyper(vector, "lr", "eps", "n0")), vector["w0"], vector["g"])
    np.testing.assert_allclose(weights[:, 0], vector["w"], **EXACT)


def test_rowwise_adagrad_meets_its_reference_vector():
    vector = VECTORS["rowwise_hand"]
    weights, state = run(RowWiseAdagrad(**hyper(vector, "lr", "eps")), np.full(4, vector["w0"]), vector["g"])
    np.testing.assert_allclose(weights[-1], vector["w"], **EXACT)
    np.testing.assert_allclose(state["m"], [vector["m"]], **EXACT)


def test_adam_meets_the_reference_vector_of_sparse_adam_and_tensorflow():
    vector = VECTORS["adam_sparseadam_tf"]
    weights, _ = run(Adam(**hyper(vector, "lr", "b1", "b2", "eps")), vector["w0"], vector["g"])
    np.testing.assert_allclose(weights[:, 0], vector["w"], **EXACT)


@pytest.mark.parametrize("per_row_step", [False, True])
def test_lazy_adam_meets_its_reference_vector(per_row_step):
    rule = Adam(lr=0.01, per_row_step=per_row_step)
    state = rule.start(np.zeros(1))
    for t in (1, 5):
        state = rule.push(state, np.ones(1), t)
    expected = VECTORS["lazy_adam_hand"]["per_row_step" if per_row_step else "global_step"]
    np.testing.assert_allclose(rule.weights(state), [expected], **EXACT)


def test_the_variants_of_other_systems_meet_their_reference_vectors():
    keras, dense, paddle = (VECTORS[k] for k in ("adagrad_keras", "adam_torch_dense", "paddle_sparse_adagrad"))
    got = others.keras_adagrad(keras["w0"], keras["g"], **hyper(keras, "n0", "lr", "eps"))
    np.testing.assert_allclose(list(got), keras["w"], **EXACT)
    got = others.torch_dense_adam(dense["w0"], dense["g"], **hyper(dense, "lr", "b1", "b2", "eps"))
    np.testing.assert_allclose(list(got), dense["w"], **EXACT)
    steps = list(others.paddle_sparse_adagrad(np.full(4, 0.1), paddle["g"], paddle["lr"], paddle["initial_g2sum"]))
    np.testing.assert_allclose([w for w, _ in steps], paddle["w"], **EXACT)
    np.testing.assert_allclose(steps[-1][1], paddle["g2sum"], **EXACT)


def test_keras_adagrad_is_our_adagrad_with_eps_moved_into_n0():
    vector = VECTORS["adagrad_keras"]
    rule = Adagrad(lr=vector["lr"], n0=vector["n0"] + vector["eps"], eps=0.0)
    weights, _ = run(rule, vector["w0"], vector["g"])
    np.testing.assert_allclose(weights[:, 0], vector["w"], **EXACT)


def test_torch_dense_adam_differs_from_lazy_adam_by_where_eps_stands_and_no_more():
    dense, sparse = VECTORS["adam_torch_dense"], VECTORS["adam_sparseadam_tf"]
    difference = np.abs(np.subtract(dense["w"], sparse["w"]))
    assert difference.max() < 1e-8  # below the last bit of a float32 near 0.3
    assert difference.min() > 1e-12  # and yet another rule: no setting of ours gives it exactly
    without = list(others.torch_dense_adam(0.3, dense["g"], lr=dense["lr"], eps=0.0))
    weights, _ = run(Adam(lr=dense["lr"], eps=0.0), 0.3, dense["g"])
    np.testing.assert_allclose(weights[:, 0], without, **EXACT)


def test_paddle_sparse_adagrad_has_no_counterpart():
    # Its first step does not divide by the gradient at all: twice the gradient, twice the step. Ours, whatever its
    # settings, has the new sum under the root, so twice the gradient is less than twice the step.
    one, two = (next(others.paddle_sparse_adagrad([0.0], [[g]]))[0][0] for g in (1.0, 2.0))
    np.testing.assert_allclose(two, 2 * one, **EXACT)
    for rule in (Adagrad(lr=0.05, n0=3.0), RowWiseAdagrad(lr=0.05, eps=1.0), RowWiseAdagrad(lr=0.05)):
        one, two = (run(rule, 0.0, [g])[0][0, 0] for g in (1.0, 2.0))
        assert abs(two) < 1.9 * abs(one)


def test_keras_ftrl_is_our_ftrl_with_half_its_l2_from_weight_zero():
    g = VECTORS["ftrl_runs"][0]["g"]
    theirs = list(others.keras_ftrl(0.0, g, lr=0.1, beta=1.0, l1=0.3, l2=0.25, n0=0.1))
    weights, _ = run(FTRL(alpha=0.1, beta=1.0, l1=0.3, l2=0.5, n0=0.1), 0.0, g)
    np.testing.assert_allclose(weights[:, 0], theirs, **EXACT)


def test_tensorflow_ftrl_without_beta_is_ours_with_beta_paid_by_l2():
    # (beta + sqrt(n)) / alpha + l2 is sqrt(n) / alpha + 2 * l2_tf  for  2 * l2_tf = l2 + beta / alpha
    g = VECTORS["ftrl_runs"][0]["g"]
    theirs = list(others.keras_ftrl(0.0, g, lr=0.2, beta=0.0, l1=0.3, l2=(0.5 + 1.0 / 0.2) / 2, n0=0.1))
    weights, _ = run(FTRL(alpha=0.2, beta=1.0, l1=0.3, l2=0.5, n0=0.1), 0.0, g)
    np.testing.assert_allclose(weights[:, 0], theirs, **EXACT)


def test_keras_ftrl_throws_a_nonzero_start_away_and_ours_keeps_it():
    rule = FTRL(alpha=0.05, beta=1.0, l1=0.3, l2=0.2, n0=0.1)
    kept, _ = run(rule, 0.7, [0.01])
    thrown = next(others.keras_ftrl(0.7, [0.01], lr=0.05, beta=1.0, l1=0.3, l2=0.1, n0=0.1))
    assert kept[0, 0] == pytest.approx(0.7, abs=1e-3)
    assert thrown == 0


def test_ftrl_starts_a_nonzero_weight_where_the_formula_reads_it_back():
    rule = FTRL(alpha=0.05, beta=1.0, l1=0.3, l2=0.2, n0=0.1)
    state = rule.start(np.array([0.7]))
    assert state["z"][0] == pytest.approx(-18.8671887, abs=5e-8)
    np.testing.assert_allclose(rule.weights(state), [0.7], **EXACT)


def test_group_ftrl_starts_a_nonzero_row_where_the_formula_reads_it_back():
    rule = GroupFTRL(alpha=0.05, l1=0.3, l2=0.2, l21=0.7, n0=0.1)
    w0 = np.array([[0.7, -0.2, 0.0], [0.01, 0.02, -0.03]])
    np.testing.assert_allclose(rule.weights(rule.start(w0)), w0, **EXACT)


def test_hand_worked_steps_of_sgd_and_momentum():
    np.testing.assert_allclose(run(SGD(lr=0.1), 1.0, [0.5])[0], [[0.95]], **EXACT)
    np.testing.assert_allclose(run(Momentum(lr=0.1, mu=0.9), 0.0, [1, 1])[0][:, 0], [-0.1, -0.29], **EXACT)
    nesterov = Momentum(lr=0.1, mu=0.9, nesterov=True)
    np.testing.assert_allclose(run(nesterov, 0.0, [1, 1])[0][:, 0], [-0.19, -0.461], **EXACT)


def test_hand_worked_steps_of_adagrad_and_adamw():
    got = run(Adagrad(lr=0.1), 1.0, [0.5, -0.25])[0][:, 0]
    np.testing.assert_allclose(got, [0.9, 0.944721360], rtol=0, atol=5e-10)
    got = run(AdamW(lr=0.01, weight_decay=0.1), 1.0, [0.5, -0.25, 1])[0][:, 0]
    np.testing.assert_allclose(got, [0.9890000063, 0.9853476374, 0.9777811756], rtol=0, atol=5e-11)


def test_duplicates_are_summed_first_and_step_once():
    table = DictTable(2, Adagrad(lr=0.1), lambda key: np.full(2, 0.3))
    table.push([1, 2, 1], np.array([[1, 2], [3, 4], [10, 20]], np.float32))
    np.testing.assert_allclose(table.pull([1, 2]), np.full((2, 2), 0.2), rtol=0, atol=1e-9)


def test_the_sum_of_duplicates_is_taken_in_float64_and_rounded_once():
    tiny = np.float32(2**-25)
    grads = np.array([[1], [tiny], [tiny], [tiny], [tiny]], np.float32)
    assert summed([7] * 5, grads)[7] == np.float32(1 + 2**-23)  # float32 partial sums would stay at 1


@pytest.mark.parametrize("key", [0, 1, LAST_KEY, 2**63, 2**63 - 1, 0x9E3779B97F4A7C15, 123456789])
def test_unmix_undoes_mix(key):
    assert unmix(mix(key)) == key
    assert mix(unmix(key)) == key


def test_mix_is_the_published_splitmix64():
    # The first outputs of SplitMix64 seeded with 1234567, as listed with its reference implementation.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    gamma = 0x9E3779B97F4A7C15
    assert [mix((1234567 + i * gamma) % 2**64) for i in range(3)] == expected


def test_adversarial_keys_meet_as_promised():
    hashes = [mix(int(k)) for k in neighbours(100)]
    assert hashes == list(range(hashes[0], hashes[0] + 100))
    assert {mix(int(k)) >> 52 for k in one_slot(50)} == {0}
    assert [mix(int(k)) >> 58 for k in one_per_slot(64)] == list(range(64))
