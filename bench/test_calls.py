"""The cost of one call, from a few keys to a batch: for serving, and for learning example by example.

    pytest bench/test_calls.py                            print the table
    pytest bench/test_calls.py --benchmark-autosave       keep it as well, for pytest-benchmark compare

A table of a million FTRL rows; keys are drawn from them, and each benchmark checks the result of its last call.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shoal

ROWS = 1_000_000
SIZES = (1, 40, 1000, 40_000)

# pytest-benchmark's fixture: calls a function again and again, and returns what it returned.
Benchmark = Callable[..., Any]


@pytest.fixture(scope="module")
def store() -> Iterator[shoal.Store]:
    """Return a store whose table holds the keys 0 to ROWS - 1, each pushed once."""
    with shoal.local(threads=1) as store:
        table = store.table("ctr", optimizer=shoal.FTRL(alpha=0.1, l1=0.0))
        table.push(np.arange(ROWS, dtype=np.uint64), np.ones((ROWS, 1), np.float32)).result()
        yield store


def keys_of(size: int) -> np.ndarray:
    """Draw distinct keys, in random order."""
    return np.random.default_rng(size).choice(ROWS, size, replace=False).astype(np.uint64)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="key_batch")
def test_key_batch(benchmark: Benchmark, store: shoal.Store, size: int) -> None:
    """Sort a batch."""
    keys = keys_of(size)
    batch = benchmark(store.key_batch, keys)
    assert np.array_equal(np.sort(shoal.data.unmix(batch.hashes)), np.sort(keys))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="pull")
def test_pull(benchmark: Benchmark, store: shoal.Store, size: int) -> None:
    """Pull rows by key: each was stepped by the same gradients, so all are equal and below 0."""
    rows = benchmark(store.tables["ctr"].pull, keys_of(size))
    assert rows.shape == (size, 1)
    assert (rows < 0).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="push")
def test_push(benchmark: Benchmark, store: shoal.Store, size: int) -> None:
    """Push gradients of 0, which change nothing."""
    table = store.tables["ctr"]
    keys = keys_of(size)
    before = table.pull(keys)
    grads = np.zeros((size, 1), np.float32)
    benchmark(lambda: table.push(keys, grads).result())
    assert np.array_equal(table.pull(keys), before)
