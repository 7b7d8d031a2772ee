"""Sixteen-bit weights: stochastic rounding between grid neighbours, unbiased, and still for what fits."""

from __future__ import annotations

import numpy as np
import pytest

import shoal
from oracle.rounding import LARGEST, neighbours, on_grid, spacing

DTYPES = ["float16", "bfloat16"]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
VALUES = [1.0001, -1.0001, 0.3, 1 / 3, -7.77, 1e-3, 3e-5, -1e-6, 2.9e-8, 123.456, 60000.7, 1e-7]


@pytest.fixture
def store():
    with shoal.local(slots=64) as opened:
        yield opened


def rounded(store, dtype, x, keys, name="t"):
    """Return x as rounded for each key: one SGD step of rate 1 by -x from zero."""
    table = store.table(name, dim=4, optimizer=shoal.SGD(lr=1.0), dtype=dtype)
    table.push(keys, np.full((len(keys), 4), -x, np.float32)).result()
    return table.pull(keys)


@each_dtype
@pytest.mark.parametrize("x", VALUES)
def test_the_mean_is_the_number_and_the_variance_that_of_a_coin(store, dtype, x):
    keys = np.arange(25_000, dtype=np.uint64)
    x = float(np.float32(x))
    lo, hi = neighbours(dtype, x)
    got = rounded(store, dtype, x, keys).astype(np.float64).ravel()
    assert set(np.unique(got)) <= {lo, hi}
    n = len(got)
    assert abs(got.mean() - x) <= 5 * (hi - lo) / (2 * np.sqrt(n))
    share, p = np.mean(got == hi), (x - lo) / (hi - lo)
    assert abs(share - p) <= 5 * np.sqrt(p * (1 - p) / n)
    assert got.var() <= (hi - lo) ** 2 / 4


@each_dtype
def test_a_number_that_fits_never_moves(store, dtype):
    keys = np.arange(1000, dtype=np.uint64)
    numbers = [1.0, -0.5, 3.0, 2.0**-14, -(2.0**-20), 1.0 + spacing(dtype, 1.0), LARGEST[dtype], -LARGEST[dtype]]
    for i, x in enumerate(numbers):
        got = rounded(store, dtype, x, keys, name=str(i))
        assert np.all(got == np.float32(x)), x


@each_dtype
def test_elements_whose_gradient_is_zero_keep_their_bits_in_a_moving_row(store, dtype):
    table = store.table("t", dim=2, optimizer=shoal.SGD(lr=1.0), init=shoal.Uniform(1.0), dtype=dtype)
    keys = np.arange(500, dtype=np.uint64)
    before = table.pull(keys)
    for _ in range(5):
        table.push(keys, np.tile(np.array([[0, 0.01]], np.float32), (500, 1))).result()
    after = table.pull(keys)
    np.testing.assert_array_equal(after[:, 0], before[:, 0])
    assert np.mean(after[:, 1] != before[:, 1]) > 0.9


@each_dtype
def test_overflow_clamps_to_the_largest_finite_number(store, dtype):
    keys = np.arange(10, dtype=np.uint64)
    table = store.table("t", dim=2, optimizer=shoal.SGD(lr=1.0), dtype=dtype)
    most = np.finfo(np.float32).max
    table.push(keys, np.tile(np.array([[most, -most]], np.float32), (10, 1))).result()
    largest = np.float32(LARGEST[dtype])
    np.testing.assert_array_equal(table.pull(keys), np.tile(np.array([[-largest, largest]], np.float32), (10, 1)))
    assert table.stats().nonfinite_rows == 0


@each_dtype
def test_what_is_pulled_lies_on_the_grid(store, dtype, rng):
    keys = np.arange(100, dtype=np.uint64)
    for i, optimizer in enumerate((shoal.SGD(lr=0.1), shoal.Adagrad(lr=0.1), shoal.RowWiseAdagrad(), shoal.Adam())):
        table = store.table(str(i), dim=3, optimizer=optimizer, init=shoal.Normal(0.1), dtype=dtype)
        assert on_grid(dtype, table.pull(keys))
        for _ in range(3):
            table.push(keys, rng.standard_normal((100, 3)).astype(np.float32)).result()
        assert on_grid(dtype, table.pull(keys))
        table.assign(keys, rng.standard_normal((100, 3)).astype(np.float32))
        assert on_grid(dtype, table.pull(keys))


@pytest.mark.slow
@each_dtype
def test_many_steps_far_below_the_spacing_arrive_on_average(store, dtype):
    """Adding 5e-5 forty thousand times gives 2; rounding to nearest would stop on the way."""
    keys = np.arange(4, dtype=np.uint64)
    dim, steps, change = 64, 40_000, float(np.float32(5e-5))
    table = store.table("t", dim=dim, optimizer=shoal.SGD(lr=1.0), dtype=dtype)
    grads = np.full((4, dim), -change, np.float32)
    for _ in range(steps):
        table.push(keys, grads)
    got = table.pull(keys).astype(np.float64)
    # Variance: 5e-5 times the spacing, per step; the spacing grows to that just below 2.
    deviation = np.sqrt(steps * change * spacing(dtype, 1.99))
    assert abs(got.mean() - steps * change) <= 5 * deviation / np.sqrt(got.size)
    assert got.std() < 2 * deviation
    assert np.all(got > 1.0)


@each_dtype
def test_training_in_sixteen_bits_stays_near_float32(store, dtype, rng):
    keys = np.arange(200, dtype=np.uint64)
    tables = [store.table(d, dim=8, optimizer=shoal.Adagrad(lr=0.05), dtype=d) for d in (dtype, "float32")]
    target = rng.standard_normal((200, 8)).astype(np.float32)
    for _ in range(300):
        for table in tables:
            table.push(keys, table.pull(keys) - target).result()
    errors = [float(np.mean((table.pull(keys) - target) ** 2)) for table in tables]
    assert errors[0] < 1.02 * errors[1] + 4 * spacing(dtype, 1.0) ** 2


@each_dtype
def test_rounding_depends_on_the_seed_and_on_nothing_that_runs_beside_it(dtype, rng):
    grads = rng.standard_normal((5, 300, 3)).astype(np.float32)
    keys = np.arange(300, dtype=np.uint64)

    def weights(threads, slots, seed):
        with shoal.local(threads=threads, slots=slots) as store:
            table = store.table("t", dim=3, optimizer=shoal.Adagrad(), dtype=dtype, seed=seed)
            for g in grads:
                table.push(keys, g).result()
            return table.pull(keys)

    first = weights(1, 2, 5)
    for threads, slots in ((1, 4096), (2, 64), (4, 1024)):
        np.testing.assert_array_equal(weights(threads, slots, 5), first)
    assert np.any(weights(1, 2, 6) != first)


@each_dtype
def test_sixteen_bits_need_two_weights_a_row(store, dtype):
    with pytest.raises(ValueError, match="dim"):
        store.table("t", dim=1, optimizer=shoal.SGD(), dtype=dtype)


def test_an_unknown_dtype_is_refused_by_name(store):
    with pytest.raises(ValueError, match="float64"):
        store.table("t", dim=2, dtype="float64")
