"""Initial rows: a pure function of (seed, key, element), read before a row exists and kept when it does."""

from __future__ import annotations

import json
from math import erf, sqrt

import numpy as np
import pytest

import shoal
from oracle import initial as formula
from oracle.hashing import LAST_KEY, neighbours

RANDOM = {"uniform": shoal.Uniform(0.05, seed=7), "normal": shoal.Normal(0.05, seed=7)}
each_random = pytest.mark.parametrize("init", RANDOM.values(), ids=RANDOM.keys())
KEYS = np.concatenate([np.arange(200, dtype=np.uint64), neighbours(50), np.array([2**63, LAST_KEY], np.uint64)])


def initial(init, keys=KEYS, *, dim=4, seed=0, threads=1, slots=64, optimizer=None):
    with shoal.local(threads=threads, slots=slots) as store:
        return store.table("t", dim=dim, optimizer=optimizer or shoal.SGD(), init=init, seed=seed).pull(keys)


def distance(sample, cdf):
    """Kolmogorov and Smirnov's D times sqrt(n): above 1.95 once in a thousand."""
    x = np.sort(sample)
    n = len(x)
    below = np.array([cdf(v) for v in x])
    return sqrt(n) * max(np.max(below - np.arange(n) / n), np.max(np.arange(1, n + 1) / n - below))


def test_zeros_and_constants_are_what_they_say():
    assert np.all(initial(shoal.Zeros()).view(np.uint32) == 0)
    assert np.all(initial(shoal.Constant(-0.3)) == np.float32(-0.3))


def test_the_default_is_zeros():
    with shoal.local() as store:
        assert store.table("t").init == shoal.Zeros()


def test_golden_rows_are_read_for_ever(golden):
    for case in json.loads((golden / "initial_rows.json").read_text()):
        init = getattr(shoal, case["init"])(case["parameter"], seed=case["seed"])
        rows = initial(init, np.array(case["keys"], np.uint64), dim=case["dim"])
        expected = np.array([[float.fromhex(x) for x in row] for row in case["rows"]], np.float32)
        np.testing.assert_array_equal(rows, expected)


def test_rows_are_what_the_formula_says_element_by_element():
    for key, row in zip(KEYS, initial(shoal.Uniform(0.05, seed=7), dim=17), strict=True):
        np.testing.assert_array_equal(row, formula.uniform(0.05, 7, int(key), 17))
    for key, row in zip(KEYS, initial(shoal.Normal(0.05, seed=7), dim=17), strict=True):
        # The C library's logarithm may differ in its last bit from the engine's own.
        np.testing.assert_allclose(row, formula.normal(0.05, 7, int(key), 17), rtol=2e-7, atol=0)


@each_random
def test_neither_threads_nor_slots_nor_the_optimizer_change_a_row(init):
    first = initial(init)
    for threads, slots in ((1, 2), (2, 1024), (4, 4096)):
        np.testing.assert_array_equal(initial(init, threads=threads, slots=slots), first)
    for optimizer in (shoal.Adagrad(), shoal.RowWiseAdagrad(), shoal.Adam(), shoal.Momentum()):
        np.testing.assert_array_equal(initial(init, optimizer=optimizer), first)


@each_random
def test_an_element_does_not_depend_on_the_rest_of_the_row_or_of_the_batch(init):
    wide = initial(init, dim=16)
    np.testing.assert_array_equal(initial(init, dim=3), wide[:, :3])
    np.testing.assert_array_equal(initial(init, KEYS[::-1].copy(), dim=16), wide[::-1])
    np.testing.assert_array_equal(initial(init, KEYS[5:6], dim=16), wide[5:6])


@each_random
def test_each_seed_gives_other_rows_and_the_seed_of_the_rounding_does_not(init):
    first = initial(init)
    assert np.mean(initial(type(init)(0.05, seed=8)) == first) < 0.01
    np.testing.assert_array_equal(initial(init, seed=1), first)


@each_random
@pytest.mark.parametrize("optimizer", [shoal.SGD(), shoal.FTRL(l1=0.1), shoal.Adam()], ids=["sgd", "ftrl", "adam"])
def test_creating_a_row_changes_nothing_that_is_read(init, optimizer):
    with shoal.local() as store:
        table = store.table("t", dim=4, optimizer=optimizer, init=init)
        before = table.pull(KEYS)
        table.push(KEYS, np.zeros((len(KEYS), 4), np.float32)).result()
        assert len(table) == len(KEYS)
        np.testing.assert_array_equal(table.pull(KEYS).view(np.uint32), before.view(np.uint32))


@each_random
def test_an_erased_key_reads_its_initial_row_again(init):
    with shoal.local() as store:
        table = store.table("t", dim=4, optimizer=shoal.SGD(), init=init)
        before = table.pull(KEYS)
        table.push(KEYS, np.ones((len(KEYS), 4), np.float32)).result()
        table.erase(KEYS)
        np.testing.assert_array_equal(table.pull(KEYS), before)


def test_uniform_is_uniform_on_a_half_open_interval():
    scale = np.float32(0.05)
    x = initial(shoal.Uniform(0.05), np.arange(25_000, dtype=np.uint64)).ravel().astype(np.float64)
    assert x.min() >= -scale
    assert x.max() < scale
    n = len(x)
    assert abs(x.mean()) < 5 * scale / sqrt(3 * n)
    assert x.var() == pytest.approx(scale**2 / 3, rel=5 * sqrt(0.8 / n))
    assert distance(x, lambda v: (v / scale + 1) / 2) < 1.95


def test_normal_is_normal():
    x = initial(shoal.Normal(0.5), np.arange(25_000, dtype=np.uint64)).ravel().astype(np.float64) / 0.5
    n = len(x)
    assert abs(x.mean()) < 5 / sqrt(n)
    assert x.var() == pytest.approx(1, rel=5 * sqrt(2 / n))
    assert distance(x, lambda v: (1 + erf(v / sqrt(2))) / 2) < 1.95
    assert 4.0 < np.abs(x).max() < 6.0


@each_random
def test_elements_neighbouring_keys_and_neighbouring_seeds_are_uncorrelated(init):
    keys = np.arange(20_000, dtype=np.uint64)
    x = initial(init, keys, dim=8).astype(np.float64)
    x /= x.std()
    n = len(keys)
    correlation = x.T @ x / n - np.eye(8)
    assert np.abs(correlation - np.diag(np.diag(correlation))).max() < 5 / sqrt(n)
    assert np.abs(np.mean(x[1:] * x[:-1], axis=0)).max() < 5 / sqrt(n)
    other = initial(type(init)(0.05, seed=8), keys, dim=8).astype(np.float64)
    assert np.abs(np.mean(x * other / other.std(), axis=0)).max() < 5 / sqrt(n)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@each_random
def test_a_sixteen_bit_row_reads_the_same_before_and_after_it_exists(init, dtype):
    with shoal.local() as store:
        table = store.table("t", dim=4, optimizer=shoal.SGD(), init=init, dtype=dtype)
        before = table.pull(KEYS)
        table.push(KEYS, np.zeros((len(KEYS), 4), np.float32)).result()
        np.testing.assert_array_equal(table.pull(KEYS), before)


@pytest.mark.parametrize("make", [shoal.Uniform, shoal.Normal, shoal.Constant], ids=lambda x: x.__name__)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
def test_a_parameter_that_is_not_finite_is_refused(make, bad):
    with pytest.raises(ValueError, match="finite"), shoal.local() as store:
        store.table("t", init=make(bad))


@pytest.mark.parametrize("make", [shoal.Uniform, shoal.Normal], ids=lambda x: x.__name__)
def test_a_negative_size_is_refused(make):
    with pytest.raises(ValueError, match="-1"), shoal.local() as store:
        store.table("t", init=make(-1.0))
