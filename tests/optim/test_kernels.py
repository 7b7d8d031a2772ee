"""Every update rule of the engine beside its float64 oracle: random runs, awkward shapes, special rows.

A float32 run of T steps may stray by 8u sqrt(T) S from the oracle (``oracle.optimizers.Run``).
"""

from __future__ import annotations

import numpy as np
import pytest

import shoal
from oracle.optimizers import Run, rule_of
from oracle.table import DictTable
from tiers import long_but

DIMS = [1, 2, 3, 4, 5, 7, 16, 17, 64, 385]
OPTIMIZERS = {
    "sgd": shoal.SGD(lr=0.1),
    "sgd with decay": shoal.SGD(lr=0.1, weight_decay=0.05),
    "momentum": shoal.Momentum(lr=0.02),
    "momentum with decay": shoal.Momentum(lr=0.02, mu=0.7, weight_decay=0.05),
    "nesterov": shoal.Momentum(lr=0.02, nesterov=True),
    "nesterov with decay": shoal.Momentum(lr=0.02, nesterov=True, weight_decay=0.05),
    "adagrad": shoal.Adagrad(lr=0.1),
    "adagrad from n0 with decay": shoal.Adagrad(lr=0.1, n0=0.1, eps=1e-5, weight_decay=0.05),
    "rowwise": shoal.RowWiseAdagrad(lr=0.1),
    "rowwise with decay": shoal.RowWiseAdagrad(lr=0.1, weight_decay=0.05),
    "rowwise decoupled": shoal.RowWiseAdagrad(lr=0.1, weight_decay=0.05, decoupled=True),
    "ftrl": shoal.FTRL(),
    "ftrl with l1 and l2": shoal.FTRL(alpha=0.3, beta=0.5, l1=0.7, l2=0.3, n0=0.1),
    "group ftrl": shoal.GroupFTRL(alpha=0.3, l1=0.1, l2=0.3, l21=0.4, n0=0.1),
    "adam": shoal.Adam(lr=0.01),
    "adam with decay": shoal.Adam(lr=0.01, b1=0.8, b2=0.99, eps=1e-5, weight_decay=0.05),
    "adam per row": shoal.Adam(lr=0.01, per_row_step=True),
    "adamw": shoal.AdamW(lr=0.01, weight_decay=0.1),
    "adagrad clipped by value": shoal.Adagrad(lr=0.1, clip_value=0.5),
    "ftrl clipped by norm": shoal.FTRL(l1=0.1, clip_norm=0.7),
    "sgd clipped by both": shoal.SGD(lr=0.1, clip_value=0.6, clip_norm=0.8),
}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def random_keys(rng, n):
    return np.unique(rng.integers(0, 2**64, 2 * n + 8, np.uint64))[:n]


def random_gradients(rng, shape):
    """Gradients of mixed sizes: what a click model sends is never of one scale."""
    size = 10.0 ** rng.uniform(-3, 0.5, (*shape[:-1], 1))
    return (rng.standard_normal(shape) * size).astype(np.float32)


def assert_within(table, keys, run):
    """Hold every column of the state and the weights to their bounds."""
    bounds = run.bounds()
    assert np.all(np.abs(table.pull(keys) - run.weights) <= bounds["w"])
    for name, got in table.state(keys).items():
        assert np.all(np.abs(got - run.state[name]) <= bounds[name]), name


def follow(store, optimizer, rng, rows, dim, steps):
    """Push random gradients to the engine and to the oracle; compare after 1, 10, 100, ... and all steps."""
    table = store.table("t", dim=dim, optimizer=optimizer, init=shoal.Uniform(0.5, seed=3), seed=11)
    keys = random_keys(rng, rows)
    run = Run(rule_of(optimizer), table.pull(keys).astype(np.float64))
    for step in range(1, steps + 1):
        grads = random_gradients(rng, (rows, dim))
        table.push(keys, grads).result()
        run.push(grads)
        if step in (1, 10, 100, steps):
            assert_within(table, keys, run)
    assert table.stats().nonfinite_rows == 0


@each_optimizer
@pytest.mark.parametrize("dim", long_but(["1", "3", "17", "385"], {str(dim): dim for dim in DIMS}))
def test_a_random_run_stays_beside_its_oracle(optimizer, dim, rng):
    with shoal.local(threads=1, slots=4) as store:
        follow(store, optimizer, rng, rows=5, dim=dim, steps=120)


@each_optimizer
def test_a_thousand_steps_stay_beside_their_oracle(optimizer, rng):
    with shoal.local(threads=1, slots=4) as store:
        follow(store, optimizer, rng, rows=4, dim=6, steps=1000)


@pytest.mark.combined
@each_optimizer
@pytest.mark.parametrize("dim", [1, 3, 16])
def test_many_rows_stay_beside_their_oracle(optimizer, dim, rng):
    with shoal.local(threads=2, slots=64) as store:
        follow(store, optimizer, rng, rows=3001, dim=dim, steps=4)


@pytest.mark.combined
@each_optimizer
@pytest.mark.parametrize("dim", [1, 3])
def test_rows_touched_now_and_then_stay_beside_a_dict(optimizer, dim, rng):
    """Gaps, duplicates and fresh rows: only touched rows move, Adam's t is the table's push number."""
    with shoal.local(threads=2, slots=16) as store:
        table = store.table("t", dim=dim, optimizer=optimizer, init=shoal.Normal(0.1, seed=1))
        pool = random_keys(rng, 40)
        initial = dict(zip(map(int, pool), table.pull(pool), strict=True))
        oracle = DictTable(dim, rule_of(optimizer), initial.__getitem__)
        for _ in range(60):
            keys = rng.choice(pool, rng.integers(0, 30))
            grads = random_gradients(rng, (len(keys), dim))
            table.push(keys, grads).result()
            oracle.push(keys, grads)
        assert table.stats().step == oracle.step == 60
        assert len(table) == len(oracle)
        np.testing.assert_allclose(table.pull(pool), oracle.pull(pool), rtol=2e-5, atol=2e-5)


@each_optimizer
def test_a_gradient_of_zeros_keeps_every_bit(optimizer, rng):
    """Also one that sums to zero, or is minus zero: no decay, no momentum."""
    with shoal.local() as store:
        table = store.table("t", dim=3, optimizer=optimizer, init=shoal.Uniform(0.5))
        keys = random_keys(rng, 50)
        table.push(keys, random_gradients(rng, (50, 3))).result()
        before, weights = table.state(keys), table.pull(keys)
        one = rng.standard_normal((50, 3)).astype(np.float32)
        table.push(keys, np.zeros((50, 3), np.float32)).result()
        table.push(keys, np.full((50, 3), -0.0, np.float32)).result()
        table.push(np.concatenate([keys, keys]), np.concatenate([one, -one])).result()
        for name, column in table.state(keys).items():
            np.testing.assert_array_equal(column.view(np.uint32), before[name].view(np.uint32))
        np.testing.assert_array_equal(table.pull(keys).view(np.uint32), weights.view(np.uint32))
        assert table.stats().step == 4


def test_zero_elements_of_a_moving_row_follow_the_equations():
    with shoal.local() as store:
        table = store.table("t", dim=2, optimizer=shoal.Momentum(lr=0.5, mu=0.5))
        key = np.array([1], np.uint64)
        table.push(key, np.array([[1, 1]], np.float32)).result()
        table.push(key, np.array([[0, 1]], np.float32)).result()
        np.testing.assert_array_equal(table.pull(key), [[-0.75, -1.25]])


@each_optimizer
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
def test_a_gradient_that_is_not_finite_leaves_its_row_whole_and_is_counted(optimizer, bad, rng):
    with shoal.local() as store:
        table = store.table("t", dim=3, optimizer=optimizer, init=shoal.Uniform(0.5))
        keys = random_keys(rng, 40)
        table.push(keys, random_gradients(rng, (40, 3))).result()
        before, weights = table.state(keys), table.pull(keys)
        grads = random_gradients(rng, (40, 3)) + np.float32(1)
        grads[7, 1] = grads[23, 2] = bad
        table.push(keys, grads).result()
        after, moved = table.state(keys), table.pull(keys)
        assert table.stats().nonfinite_rows == 2
        for row in (7, 23):
            np.testing.assert_array_equal(moved[row], weights[row])
            for name in after:
                np.testing.assert_array_equal(after[name][row], before[name][row])
        others = np.delete(np.arange(40), [7, 23])
        state = "z" if "z" in after else "w"
        assert np.all(np.any(after[state][others] != before[state][others], axis=1))


@pytest.mark.parametrize(
    "optimizer",
    [shoal.Adagrad(), shoal.RowWiseAdagrad(), shoal.FTRL(), shoal.GroupFTRL(), shoal.Adam(), shoal.AdamW()],
    ids=lambda x: type(x).__name__,
)
def test_a_gradient_whose_square_overflows_leaves_its_row_whole(optimizer):
    with shoal.local() as store:
        table = store.table("t", dim=2, optimizer=optimizer, init=shoal.Constant(0.25))
        keys = np.array([1, 2, 3], np.uint64)
        table.push(keys, np.array([[1, 1], [1, 1e20], [1, 1]], np.float32)).result()
        rows = table.pull(keys)
        assert table.stats().nonfinite_rows == 1
        np.testing.assert_array_equal(rows[1], table.pull(np.array([999], np.uint64))[0])
        assert np.all(rows[[0, 2]] != rows[1])


def test_a_sum_of_duplicates_that_overflows_is_not_finite_but_one_that_cancels_is():
    with shoal.local() as store:
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        big = np.float32(3e38)
        table.push(np.array([1, 1, 2, 2, 2], np.uint64), np.array([big, big, big, big, -big], np.float32)).result()
        assert table.stats().nonfinite_rows == 1
        np.testing.assert_array_equal(table.pull(np.array([1, 2], np.uint64)), [[0], [-big]])


def test_a_weight_that_would_overflow_stays():
    with shoal.local() as store:
        table = store.table("t", optimizer=shoal.SGD(lr=100.0))
        key = np.array([1], np.uint64)
        table.push(key, np.array([3e38], np.float32)).result()
        assert table.pull(key)[0, 0] == 0
        assert table.stats().nonfinite_rows == 1


def test_clip_value_cuts_each_element_and_clip_norm_scales_the_row():
    key = np.array([1], np.uint64)
    with shoal.local() as store:
        by_value = store.table("value", dim=2, optimizer=shoal.SGD(lr=1.0, clip_value=0.5))
        by_norm = store.table("norm", dim=2, optimizer=shoal.SGD(lr=1.0, clip_norm=2.5))
        both = store.table("both", dim=2, optimizer=shoal.SGD(lr=1.0, clip_value=3.0, clip_norm=0.3))
        for table in (by_value, by_norm, both):
            table.push(key, np.array([[3, -4]], np.float32)).result()
        np.testing.assert_array_equal(by_value.pull(key), [[-0.5, 0.5]])
        np.testing.assert_allclose(by_norm.pull(key), [[-1.5, 2.0]], rtol=1e-6)
        np.testing.assert_allclose(both.pull(key), 0.3 * np.sqrt(0.5) * np.array([[-1, 1]]), rtol=1e-6)


def test_clipping_bounds_the_sum_of_duplicates_and_not_each_of_them():
    with shoal.local() as store:
        table = store.table("t", optimizer=shoal.SGD(lr=1.0, clip_value=1.0))
        key = np.array([5, 5, 5], np.uint64)
        table.push(key, np.array([3, 3, -5.5], np.float32)).result()
        assert table.pull(key[:1])[0, 0] == -0.5


def test_clipping_does_not_let_an_infinite_gradient_in():
    with shoal.local() as store:
        table = store.table("t", optimizer=shoal.SGD(lr=1.0, clip_value=1.0, clip_norm=1.0))
        key = np.array([5], np.uint64)
        table.push(key, np.array([np.inf], np.float32)).result()
        assert table.pull(key)[0, 0] == 0
        assert table.stats().nonfinite_rows == 1


def test_weight_decay_pulls_each_rule_in_its_own_way():
    """One step from w = 2 with g = 1, decay 0.5: L2 adds 1 to the gradient, AdamW scales the weight first."""
    key = np.array([1], np.uint64)
    expected = {
        shoal.SGD(lr=0.1, weight_decay=0.5): 2 - 0.1 * 2,
        shoal.Momentum(lr=0.1, weight_decay=0.5): 2 - 0.1 * 2,
        shoal.Adagrad(lr=0.1, n0=5.0, weight_decay=0.5): 2 - 0.1 * 2 / 3,
        shoal.RowWiseAdagrad(lr=0.1, weight_decay=0.5): (1 - 0.05 * 0.5) * 2 - 0.05,
        shoal.RowWiseAdagrad(lr=0.1, weight_decay=0.5, decoupled=True): (1 - 0.1 * 0.5) * 2 - 0.1,
        shoal.Adam(lr=0.1, weight_decay=0.5): 2 - 0.1,
        shoal.AdamW(lr=0.1, weight_decay=0.5): (1 - 0.1 * 0.5) * 2 - 0.1,
    }
    with shoal.local() as store:
        for number, (optimizer, weight) in enumerate(expected.items()):
            table = store.table(str(number), optimizer=optimizer, init=shoal.Constant(2.0))
            table.push(key, np.ones(1, np.float32)).result()
            assert table.pull(key)[0, 0] == pytest.approx(weight, rel=3e-7), optimizer


@pytest.mark.parametrize(
    "optimizer",
    [
        shoal.SGD(lr=0.3, weight_decay=0.1),
        shoal.Momentum(nesterov=True),
        shoal.Adagrad(lr=0.3),
        shoal.Adam(),
        shoal.AdamW(),
    ],
    ids=lambda x: type(x).__name__,
)
def test_every_element_of_a_row_gets_the_bits_of_a_row_of_dim_one(optimizer):
    """Vector bodies and scalar tails are one formula. (Squares of 1/2 and 3 need no rounding of n.)"""
    key = np.array([9], np.uint64)
    with shoal.local(threads=1) as store:
        tables = [
            store.table(str(dim), dim=dim, optimizer=optimizer, init=shoal.Constant(0.7))
            for dim in [*range(1, 35), 63, 64, 65, 385, 4096]
        ]
        for g in (0.5, -3.0, 0.5):
            for table in tables:
                table.push(key, np.full((1, table.dim), g, np.float32)).result()
            one = tables[0].state(key)
            for table in tables:
                for name, column in table.state(key).items():
                    np.testing.assert_array_equal(column, np.broadcast_to(one[name], column.shape), err_msg=table.name)


@pytest.mark.parametrize(
    "optimizer",
    [shoal.Adagrad(eps=0.0), shoal.RowWiseAdagrad(eps=0.0), shoal.Adam(eps=0.0), shoal.AdamW(eps=0.0)],
    ids=lambda x: type(x).__name__,
)
def test_without_eps_a_weight_without_slope_stays(optimizer):
    """Its step would be 0 / 0."""
    with shoal.local() as store:
        table = store.table("t", dim=2, optimizer=optimizer, init=shoal.Constant(0.5))
        key = np.array([1], np.uint64)
        table.push(key, np.array([[1, 0]], np.float32)).result()
        assert table.stats().nonfinite_rows == 0
        assert table.pull(key)[0, 0] < 0.5
        assert table.pull(key)[0, 1] == 0.5


def test_subnormal_numbers_are_kept():
    with shoal.local() as store:
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        key = np.array([1], np.uint64)
        table.push(key, np.array([1e-40], np.float32)).result()
        assert table.pull(key)[0, 0] == -np.float32(1e-40)


def test_rowwise_adagrad_of_dim_one_is_adagrad(rng):
    keys = random_keys(rng, 100)
    with shoal.local() as store:
        row = store.table("row", optimizer=shoal.RowWiseAdagrad(lr=0.1, eps=1e-8), init=shoal.Constant(0.5))
        one = store.table("one", optimizer=shoal.Adagrad(lr=0.1, eps=1e-8), init=shoal.Constant(0.5))
        for _ in range(50):
            grads = random_gradients(rng, (100, 1))
            row.push(keys, grads).result()
            one.push(keys, grads).result()
        np.testing.assert_allclose(row.pull(keys), one.pull(keys), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(row.state(keys)["m"], one.state(keys)["n"], rtol=1e-5)


def test_momentum_keeps_the_speed_of_rows_it_does_not_touch():
    key, other = np.array([1], np.uint64), np.array([2], np.uint64)
    with shoal.local() as store:
        table = store.table("t", optimizer=shoal.Momentum(lr=1.0, mu=0.5))
        for k in (key, other, other, other, key):
            table.push(k, np.ones(1, np.float32)).result()
        assert table.pull(key)[0, 0] == -2.5  # 1, then 0.5 * 1 + 1: the three pushes between did not count


def test_the_step_of_a_table_counts_its_pushes_empty_ones_too():
    with shoal.local() as store:
        table = store.table("t", dim=2)
        assert table.stats().step == 0
        table.push(np.empty(0, np.uint64), np.empty((0, 2), np.float32)).result()
        table.push(np.array([1], np.uint64), np.ones((1, 2), np.float32)).result()
        assert table.stats().step == 2
