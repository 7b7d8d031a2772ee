"""FTRL and GroupFTRL where they are special: at zero, at the threshold, at their limits."""

from __future__ import annotations

import numpy as np
import pytest

import shoal

KEY = np.array([42], np.uint64)


@pytest.fixture
def store():
    with shoal.local(threads=1, slots=4) as opened:
        yield opened


def random_keys(rng, n):
    return np.unique(rng.integers(0, 2**64, 2 * n + 8, np.uint64))[:n]


def is_plus_zero(x):
    return x.view(np.uint32) == 0


@pytest.mark.parametrize("g", [0.5, -0.5])
def test_at_the_threshold_the_weight_is_plus_zero(store, g):
    table = store.table("t", optimizer=shoal.FTRL(l1=0.5))
    table.push(KEY, np.array([g], np.float32)).result()
    assert table.state(KEY)["z"][0, 0] == g  # |z| == l1
    assert is_plus_zero(table.pull(KEY)[0, 0])


@pytest.mark.parametrize("z", [0.5000001, -0.5000001])
def test_just_above_the_threshold_the_weight_is_small_and_against_z(store, z):
    table = store.table("t", optimizer=shoal.FTRL(l1=0.5))
    table.push(KEY, np.array([z], np.float32)).result()
    weight = table.pull(KEY)[0, 0]
    assert 0 < -np.sign(z) * weight < 1e-7


def test_a_denominator_of_zero_reads_plus_zero(store):
    """Where beta = l2 = n0 = 0, an untouched weight is 0 / 0, and so is a non-zero start."""
    zeros = store.table("zeros", optimizer=shoal.FTRL(beta=0.0))
    start = store.table("start", optimizer=shoal.FTRL(beta=0.0, l1=0.1), init=shoal.Constant(0.7))
    group = store.table("group", dim=2, optimizer=shoal.GroupFTRL(beta=0.0, l21=0.1), init=shoal.Constant(0.7))
    for table in (zeros, start, group):
        assert np.all(is_plus_zero(table.pull(KEY)))
    group.push(KEY, np.array([[1, 0]], np.float32)).result()  # the second element stays at n = 0
    assert group.pull(KEY)[0, 0] < 0
    assert is_plus_zero(group.pull(KEY)[0, 1])
    assert group.stats().nonfinite_rows == 0


@pytest.mark.parametrize(
    "optimizer", [shoal.FTRL(l1=0.3, l2=0.2), shoal.GroupFTRL(l1=0.3, l2=0.2, l21=0.1)], ids=["ftrl", "group"]
)
def test_signs_are_symmetric(store, optimizer, rng):
    """Minus the gradients give minus the weights: n bit for bit unlike (it is rounded), both within its tolerance."""
    keys = random_keys(rng, 60)
    one, two = (store.table(name, dim=3, optimizer=optimizer) for name in ("one", "two"))
    for _ in range(30):
        grads = rng.standard_normal((60, 3)).astype(np.float32)
        one.push(keys, grads).result()
        two.push(keys, -grads).result()
    np.testing.assert_allclose(one.pull(keys), -two.pull(keys), rtol=1e-4, atol=1e-6)


def test_more_l1_gives_no_fewer_zeros(store, rng):
    keys = random_keys(rng, 3000)
    strengths = [0.0, 0.1, 0.3, 1.0, 3.0, 10.0]
    tables = [store.table(f"l1={l1}", optimizer=shoal.FTRL(l1=l1)) for l1 in strengths]
    for _ in range(10):
        grads = rng.standard_normal(3000).astype(np.float32)
        for table in tables:
            table.push(keys, grads).result()
    zeros = [int(np.sum(table.pull(keys) == 0)) for table in tables]
    assert zeros == sorted(zeros)
    assert zeros[0] == 0
    assert 300 < zeros[3] < 2700
    assert zeros[-1] > 2900


def test_without_l1_and_l2_it_is_adagrad_with_alpha_and_beta(store, rng):
    """w -= alpha * g / (beta + sqrt(n')), from w = 0."""
    keys = random_keys(rng, 50)
    table = store.table("t", optimizer=shoal.FTRL(alpha=0.2, beta=0.7))
    w, n = np.zeros((50, 1)), np.zeros((50, 1))
    for _ in range(200):
        grads = rng.standard_normal((50, 1)).astype(np.float32)
        table.push(keys, grads).result()
        n += grads.astype(np.float64) ** 2
        w -= 0.2 * grads / (0.7 + np.sqrt(n))
    np.testing.assert_allclose(table.pull(keys), w, rtol=1e-4, atol=1e-5)


def test_a_nonzero_start_is_read_before_and_after_the_row_exists(store):
    optimizer = shoal.FTRL(alpha=0.05, beta=1.0, l1=0.3, l2=0.2, n0=0.1)
    table = store.table("t", optimizer=optimizer, init=shoal.Constant(0.7))
    assert table.pull(KEY)[0, 0] == pytest.approx(0.7, rel=1e-6)
    before = table.pull(KEY)
    table.push(KEY, np.zeros(1, np.float32)).result()
    np.testing.assert_array_equal(table.pull(KEY), before)
    state = table.state(KEY)
    assert state["z"][0, 0] == pytest.approx(-18.8671887, rel=1e-7)
    assert state["n"][0, 0] == np.float32(0.1)
    table.push(KEY, np.array([0.01], np.float32)).result()
    assert table.pull(KEY)[0, 0] == pytest.approx(0.7, abs=1e-3)  # TF and Keras read 0 here


def test_group_ftrl_reads_a_nonzero_start_back(store):
    optimizer = shoal.GroupFTRL(l1=0.3, l2=0.2, l21=0.7, n0=0.1)
    table = store.table("t", dim=16, optimizer=optimizer, init=shoal.Uniform(0.5, seed=3))
    plain = store.table("p", dim=16, optimizer=shoal.SGD(), init=shoal.Uniform(0.5, seed=3))
    keys = np.arange(100, dtype=np.uint64)
    np.testing.assert_allclose(table.pull(keys), plain.pull(keys), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dim", [1, 3, 16, 17])
@pytest.mark.parametrize("init", [shoal.Zeros(), shoal.Uniform(0.3)], ids=["zeros", "uniform"])
def test_group_ftrl_without_l21_is_ftrl_bit_for_bit(store, dim, init, rng):
    keys = random_keys(rng, 80)
    shared = {"alpha": 0.3, "beta": 0.5, "l1": 0.2, "l2": 0.1, "n0": 0.05}
    group = store.table("group", dim=dim, optimizer=shoal.GroupFTRL(**shared), init=init)
    plain = store.table("plain", dim=dim, optimizer=shoal.FTRL(**shared), init=init)
    for _ in range(40):
        grads = rng.standard_normal((80, dim)).astype(np.float32)
        group.push(keys, grads).result()
        plain.push(keys, grads).result()
        np.testing.assert_array_equal(group.pull(keys).view(np.uint32), plain.pull(keys).view(np.uint32))
    for name in ("z", "n"):
        np.testing.assert_array_equal(group.state(keys)[name], plain.state(keys)[name])


def test_group_ftrl_of_dim_one_is_ftrl_with_both_thresholds(store, rng):
    keys = random_keys(rng, 80)
    group = store.table("group", optimizer=shoal.GroupFTRL(l1=0.3, l21=0.4, l2=0.1))
    plain = store.table("plain", optimizer=shoal.FTRL(l1=0.7, l2=0.1))
    for _ in range(40):
        grads = rng.standard_normal(80).astype(np.float32)
        group.push(keys, grads).result()
        plain.push(keys, grads).result()
    np.testing.assert_allclose(group.pull(keys), plain.pull(keys), rtol=1e-4, atol=1e-6)


def test_group_ftrl_zeroes_a_row_as_one(store, rng):
    keys = random_keys(rng, 500)
    table = store.table("t", dim=8, optimizer=shoal.GroupFTRL(l21=1.4))
    for _ in range(2):
        table.push(keys, rng.standard_normal((500, 8)).astype(np.float32)).result()
    zeros = np.sum(table.pull(keys) == 0, axis=1)
    assert set(np.unique(zeros)) == {0, 8}
    assert 50 < np.sum(zeros == 8) < 450


def test_state_of_zero_weights_is_kept(store):
    table = store.table("t", optimizer=shoal.FTRL(l1=10.0))
    for _ in range(3):
        table.push(KEY, np.array([0.5], np.float32)).result()
    assert table.pull(KEY)[0, 0] == 0
    assert table.contains(KEY)[0]
    np.testing.assert_array_equal([table.state(KEY)["z"][0, 0], table.state(KEY)["n"][0, 0]], [1.5, 0.75])
