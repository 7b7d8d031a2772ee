"""Dense parameters against plain NumPy, and against the rules in float64, whatever the shape and the blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from oracle.optimizers import Run, rule_of
from tiers import rounds

SHAPES = [(), (1,), (7,), (3, 5, 7), (1024,), (1025,), (40, 100), (2, 4096)]
OPTIMIZERS = [
    shoal.SGD(lr=0.1),
    shoal.Momentum(lr=0.1, mu=0.8, nesterov=True),
    shoal.Adagrad(lr=0.1),
    shoal.Adam(lr=0.01),
    shoal.AdamW(lr=0.01, weight_decay=0.1),
    shoal.FTRL(alpha=0.1, l1=0.2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sgd_is_that_of_numpy_to_the_bit(shape):
    random = np.random.default_rng(1)
    weights = random.normal(size=shape).astype(np.float32)
    with shoal.local() as store:
        table = store.dense("w", shape, optimizer=shoal.SGD(lr=0.5))
        assert table.pull().tolist() == np.zeros(shape, np.float32).tolist()
        table.assign(weights)
        for _ in range(5):
            grad = random.normal(size=shape).astype(np.float32)
            table.push(grad).result()
            weights = weights - np.float32(0.5) * grad
            assert table.pull().tobytes() == weights.tobytes()
        assert (table.pull().shape, table.shape, table.size) == (shape, shape, math.prod(shape))
        assert len(table.table) == -(-table.size // 1024)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("block", [1, 10, 64])
def test_every_rule_follows_its_formula_whatever_the_blocks(optimizer, block):
    random = np.random.default_rng(2)
    with shoal.local(slots=16) as store:
        table = store.dense("w", (11, 17), optimizer=optimizer, block=block, init=shoal.Constant(0.25))
        run = Run(rule_of(optimizer), np.full((11, 17), 0.25))
        for _ in range(30):
            grad = random.normal(size=(11, 17)).astype(np.float32)
            table.push(grad).result()
            run.push(grad)
        assert np.all(np.abs(table.pull() - run.weights) <= run.bounds()["w"] + 1e-9)


@settings(max_examples=rounds(50), deadline=None)
@given(st.integers(1, 3000), st.integers(1, 400), st.integers(0, 2**32))
def test_what_was_assigned_is_pulled_and_the_padding_stays_out(size, block, seed):
    values = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    with shoal.local(threads=1, slots=2) as store:
        table = store.dense("w", size, block=block)
        table.assign(values)
        assert table.pull().tobytes() == values.tobytes()
        assert len(table.table) == -(-size // min(block, size))
        assert table.table.norm(1) == pytest.approx(np.abs(values.astype(np.float64)).sum())


def test_an_array_that_is_not_contiguous_is_taken_as_it_reads():
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    with shoal.local() as store:
        table = store.dense("w", (4, 3), optimizer=shoal.SGD(lr=1.0), block=5)
        table.assign(values.T)
        table.push(values.T).result()
        assert table.pull().tolist() == np.zeros((4, 3)).tolist()


def test_push_pull_and_pull_async_give_the_array():
    with shoal.local() as store:
        table = store.dense("w", (2, 3), optimizer=shoal.SGD(lr=1.0), block=4)
        assert table.push_pull(np.ones((2, 3), np.float32)).result().tolist() == [[-1.0] * 3] * 2
        handle = table.pull_async()
        assert handle.done()
        assert handle.result(timeout=1.0).tolist() == [[-1.0] * 3] * 2
        handle.result()[:] = 5  # a copy
        assert table.pull().tolist() == [[-1.0] * 3] * 2


def test_a_checkpoint_brings_the_array_back_with_its_momentum(tmp_path):
    grad = np.ones((3, 1000), np.float32)
    with shoal.local() as store:
        table = store.dense("w", (3, 1000), optimizer=shoal.Momentum())
        table.push(grad).result()
        store.save(tmp_path / "c")
        table.push(grad).result()
        expected = table.pull()
    with shoal.local(slots=8) as store:
        store.load(tmp_path / "c")
        table = store.dense("w", (3, 1000), optimizer=shoal.Momentum())
        table.push(grad).result()
        assert table.pull().tobytes() == expected.tobytes()


def test_a_block_whose_gradient_is_not_finite_stays_whole():
    with shoal.local() as store:
        table = store.dense("w", 8, optimizer=shoal.SGD(lr=1.0), block=4)
        grad = np.ones(8, np.float32)
        grad[6] = np.nan
        table.push(grad).result()
        assert table.pull().tolist() == [-1.0] * 4 + [0.0] * 4
        assert table.table.stats().nonfinite_rows == 1


def test_the_initial_row_is_read_before_the_first_push():
    with shoal.local() as store:
        first = store.dense("a", (50, 50), init=shoal.Normal(0.1, seed=3)).pull()
        assert first.std() == pytest.approx(0.1, rel=0.1)
        assert store.dense("b", (50, 50), init=shoal.Normal(0.1, seed=3)).pull().tobytes() == first.tobytes()


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (lambda store: store.dense("w", (3, 0)), "positive whole numbers"),
        (lambda store: store.dense("w", -1), "positive whole numbers"),
        (lambda store: store.dense("w", (2.5,)), "positive whole numbers"),
        (lambda store: store.dense("w", 5000, block=5000), "dim from 1 to 4096"),
        (lambda store: store.dense("w", 5000, block=0), "dim from 1 to 4096"),
        (lambda store: store.dense("v", (3, 5000)), "dim 10 instead of 1024"),
        (lambda store: store.dense("v", 10), "more blocks than the 1 of shape"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(make, reported):
    with shoal.local() as store:
        store.dense("v", (3, 7), block=10).assign(np.ones((3, 7), np.float32))
        with pytest.raises(ValueError, match=reported):
            make(store)


def test_arrays_that_do_not_fit_are_refused_and_change_nothing():
    with shoal.local() as store:
        table = store.dense("w", (2, 3))
        with pytest.raises(ValueError, match=r"shape \(2, 3\), got grad \(3, 2\)"):
            table.push(np.ones((3, 2), np.float32))
        with pytest.raises(TypeError, match=r"grad as float32, got float64"):
            table.push(np.ones((2, 3)))
        with pytest.raises(ValueError, match="finite"):
            table.assign(np.full((2, 3), np.inf, np.float32))
        assert table.pull().tolist() == [[0.0] * 3] * 2
        assert len(table.table) == 0


# --- as an array ----------------------------------------------------------------------------------------------------

INDICES = [
    0, -1, np.int64(3), slice(None), slice(2, 5), slice(-2, None), slice(4, 1, -1), slice(None, None, 3), slice(5, 2),
    (2, 1), (slice(1, 4), 2), (slice(3, None), slice(None), -1), (1, ...), ..., (..., 0), None, (0, None, 2),
    [0, 3], (slice(2), [1, 2]), ([0, 1], 2), np.arange(7) % 2 == 0, (slice(6, 0, -2), 1, slice(1, 3)),
]  # fmt: skip


@pytest.mark.parametrize("block", [1, 4, 13, 1024])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_parts_are_those_of_a_numpy_array(index, block):
    values = np.random.default_rng(5).normal(size=(7, 3, 4)).astype(np.float32)
    with shoal.local() as store:
        table = store.dense("w", values.shape, block=block)
        table.assign(values)
        part = table[index]
        assert part.shape == values[index].shape
        assert part.tobytes() == values[index].tobytes()
        np.asarray(part)[...] = 0
        assert table.pull().tobytes() == values.tobytes()


def test_a_row_reads_its_blocks_only(monkeypatch):
    with shoal.local() as store:
        table = store.dense("w", (100, 64), block=64)
        asked = []
        pull = shoal.Table.pull
        monkeypatch.setattr(shoal.Table, "pull", lambda self, keys: asked.append(keys.tolist()) or pull(self, keys))
        assert table[7].shape == (64,)
        assert table[97:, 3].shape == (3,)
        assert table[5:5].shape == (0, 64)
        assert asked == [[7], [97, 98, 99], []]


@pytest.mark.parametrize("index", [7, -8, (0, 3), (slice(None), 0, 0, 0)], ids=str)
def test_an_index_outside_of_the_array_is_refused(index):
    with shoal.local() as store, pytest.raises(IndexError):
        store.dense("w", (7, 3))[index]


def test_numpy_takes_it_as_an_array():
    with shoal.local() as store:
        table = store.dense("w", (2, 3), optimizer=shoal.SGD(lr=1.0))
        table += -np.arange(6, dtype=np.float32).reshape(2, 3)
        assert np.asarray(table).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert np.asarray(table, np.float64).dtype == np.float64
        assert (len(table), table.ndim, table.dtype) == (2, 2, np.float32)
        assert (table @ [1, 1, 1]).tolist() == [3, 12]
        assert ([1, 1] @ table).tolist() == [3, 5, 7]
        assert (np.ones((4, 2), np.float32) @ table).shape == (4, 3)
        assert np.add(table, 1).tolist() == [[1, 2, 3], [4, 5, 6]]
        with pytest.raises(ValueError, match="cannot be read without a copy"):
            np.asarray(table, copy=False)


def test_what_would_change_a_part_is_refused():
    with shoal.local() as store:
        table = store.dense("w", (2, 3))
        with pytest.raises(TypeError, match="push a gradient, or assign"):
            table[0] = 1.0
        with pytest.raises(TypeError, match=r"is changed by \+= gradient"):
            table -= np.ones((2, 3), np.float32)
        with pytest.raises(ValueError, match=r"shape \(2, 3\), got grad \(2,\)"):
            table += np.ones(2, np.float32)
        with pytest.raises(TypeError, match="is a single number"):
            len(store.dense("n", ()))
        assert table.pull().tolist() == [[0.0] * 3] * 2
