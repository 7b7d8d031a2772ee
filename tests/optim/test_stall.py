"""Accumulators must not stall: FTRL's z and n, Adagrad's n, RowWiseAdagrad's m.

A float32 near 2^22 has a spacing of 1/2, so adding 1/4 rounds to nearest back to where it was, for ever. They are
rounded stochastically instead, with bits that also hash the step number: the mean over many rows is exact. (Ten
million steps of one row are run in C++.)
"""

from __future__ import annotations

import numpy as np
import pytest

import shoal

ROWS = 100_000
START = 2.0**22  # reached by one gradient of 2^11
SPACING = 0.5
ACCUMULATORS = {
    "ftrl": (shoal.FTRL(), "n"),
    "group ftrl": (shoal.GroupFTRL(l21=0.1), "n"),
    "adagrad": (shoal.Adagrad(), "n"),
    "rowwise": (shoal.RowWiseAdagrad(), "m"),
}
each_accumulator = pytest.mark.parametrize(("optimizer", "name"), ACCUMULATORS.values(), ids=ACCUMULATORS.keys())


@pytest.fixture
def store():
    with shoal.local(slots=64) as opened:
        yield opened


def push_all(table, keys, g, times):
    grads = np.full((len(keys), table.dim), g, np.float32)
    for _ in range(times):
        table.push(keys, grads).result()


@pytest.mark.combined
@each_accumulator
@pytest.mark.parametrize("g", [0.5, 0.3, 0.1])
def test_the_mean_over_many_rows_grows_as_it_should(store, optimizer, name, g):
    keys = np.arange(ROWS, dtype=np.uint64)
    table = store.table("t", optimizer=optimizer)
    push_all(table, keys, 2.0**11, 1)
    np.testing.assert_array_equal(table.state(keys)[name], START)
    steps, square = 30, float(np.float32(g)) ** 2
    push_all(table, keys, g, steps)
    grown = table.state(keys)[name].astype(np.float64) - START
    assert np.all(grown % SPACING == 0)
    # Each step's variance is (x - lo) * (hi - x).
    deviation = np.sqrt(steps * square * (SPACING - square) / ROWS)
    assert abs(grown.mean() - steps * square) <= 5 * deviation
    assert grown.var() == pytest.approx(steps * square * (SPACING - square), rel=0.05)


@each_accumulator
def test_a_single_row_does_not_stall(store, optimizer, name):
    """The same key, the same bits, the same gradient: only the step number differs."""
    key = np.array([7], np.uint64)
    table = store.table("t", optimizer=optimizer)
    push_all(table, key, 2.0**11, 1)
    steps = 4000
    push_all(table, key, 0.5, steps)
    deviation = np.sqrt(steps * 0.25 * (SPACING - 0.25))
    assert abs(float(table.state(key)[name][0, 0]) - START - steps * 0.25) <= 5 * deviation


def test_z_of_a_heavy_key_does_not_stall(store):
    """An l1 above |z| keeps the weight at zero, so that z is the plain sum of the gradients."""
    keys = np.arange(ROWS, dtype=np.uint64)
    table = store.table("t", optimizer=shoal.FTRL(l1=1e9))
    push_all(table, keys, START, 1)
    g, steps = float(np.float32(0.1)), 30
    push_all(table, keys, g, steps)
    grown = table.state(keys)["z"].astype(np.float64) - START
    assert abs(grown.mean() - steps * g) <= 5 * np.sqrt(steps * g * (SPACING - g) / ROWS)


def test_rounding_is_independent_between_elements_of_a_row_and_between_neighbouring_keys(store):
    keys = np.arange(20_000, dtype=np.uint64)
    table = store.table("t", dim=8, optimizer=shoal.Adagrad())
    push_all(table, keys, 2.0**11, 1)
    push_all(table, keys, 0.5, 1)
    coin = 2 * (table.state(keys)["n"] > START) - 1.0  # fair: 0.25 is half way
    n = len(keys)
    pairs = coin.T @ coin / n - np.diag(np.mean(coin**2, axis=0))
    assert np.abs(pairs).max() < 5 / np.sqrt(n)
    assert np.abs(np.mean(coin[1:] * coin[:-1], axis=0)).max() < 5 / np.sqrt(n)
    assert np.abs(coin.mean(axis=0)).max() < 5 / np.sqrt(n)


def test_rounding_depends_on_the_seed_and_on_nothing_that_runs_beside_it():
    def grown(threads, slots, seed):
        keys = np.arange(500, dtype=np.uint64)
        with shoal.local(threads=threads, slots=slots) as store:
            table = store.table("t", optimizer=shoal.Adagrad(), seed=seed)
            push_all(table, keys, 2.0**11, 1)
            push_all(table, keys, 0.5, 3)
            return table.state(keys)["n"].copy()

    first = grown(1, 2, seed=5)
    for threads, slots in ((1, 4096), (2, 64), (4, 1024)):
        np.testing.assert_array_equal(grown(threads, slots, seed=5), first)
    assert np.any(grown(1, 2, seed=6) != first)
