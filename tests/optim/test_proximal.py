"""Proximal, the rule whose rows and gradients are pairs, against its formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from oracle.optimizers import rule_of
from tiers import rounds

KEYS = np.arange(300, dtype=np.uint64)


def table(store, **settings):
    return store.table("t", dim=2, optimizer=shoal.Proximal(**settings))


def test_the_example_of_the_document():
    with shoal.local() as store:
        one = table(store, lr=1.0, l1=0.1)
        one.push(KEYS[:1], np.array([[0.5, 2.0]], np.float32)).result()
        assert one.pull(KEYS[:1]).tolist() == [[np.float32(-0.2), 0.5]]


@pytest.mark.slow
@settings(max_examples=rounds(40), deadline=None)
@given(st.integers(0, 2**32), st.floats(0.05, 1.0), st.floats(0.0, 3.0))
def test_steps_are_those_of_the_formula(seed, lr, l1):
    random = np.random.default_rng(seed)
    with shoal.local(threads=1, slots=4) as store:
        one = table(store, lr=lr, l1=l1)
        rule = rule_of(one.optimizer)
        for step in range(5):
            before = one.pull(KEYS).astype(np.float64)
            pairs = random.normal(size=(300, 2)).astype(np.float32)
            pairs[:, 1] = np.where(random.random(300) < 0.1, 0, np.exp(3 * pairs[:, 1]))
            one.push(KEYS, pairs).result()
            wanted = np.stack([rule.push({"w": w}, g, step)["w"] for w, g in zip(before, pairs, strict=True)])
            size = np.abs(before[:, :1]) + np.abs(wanted) + 1e-30
            assert np.all(np.abs(one.pull(KEYS) - wanted) <= 2.0**-23 * size)


def test_pairs_of_several_workers_add_up_to_one_step():
    with shoal.local() as store:
        one, two = table(store, l1=0.25), store.table("s", dim=2, optimizer=shoal.Proximal(l1=0.25))
        parts = np.array([[1.0, 2.0], [0.5, 1.0]], np.float32)
        one.push(np.array([7, 7], np.uint64), parts).result()
        two.push(np.array([7], np.uint64), parts.sum(axis=0, keepdims=True)).result()
        assert one.pull(KEYS[7:8]).tolist() == two.pull(KEYS[7:8]).tolist() == [[np.float32((0.25 - 1.5) / 3), 1.5]]


def test_a_row_without_curvature_stays():
    with shoal.local() as store:
        one = table(store)
        one.push(KEYS[:3], np.array([[9, 1], [9, 1], [9, 1]], np.float32)).result()
        before = one.pull(KEYS[:3]).tolist()
        one.push(KEYS[:3], np.array([[5, 0], [5, -1], [np.nan, 1]], np.float32)).result()
        assert one.pull(KEYS[:3]).tolist() == before
        assert one.stats().nonfinite_rows == 1


def test_functions_look_at_the_weights_alone_and_change_nothing():
    with shoal.local() as store:
        one = table(store, l1=1.0)
        one.push(KEYS[:4], np.array([[-3, 1], [0.5, 1], [6, 1], [0.25, 1]], np.float32)).result()
        assert one.pull(KEYS[:4])[:, 0].tolist() == [2.0, 0.0, -5.0, 0.0]
        assert (one.sum().tolist(), one.norm(1), one.count()) == ([-3.0], 7.0, 2)
        assert [part.tolist() for part in one.topk(2)] == [[2, 0], [5.0, 2.0]]
        for change in (lambda: one.decay(0.5), lambda: one.shrink(0.5)):
            with pytest.raises(ValueError, match="only a step may change them"):
                change()


def test_what_makes_no_pairs_is_refused():
    with shoal.local() as store:
        for dim in (1, 3):
            with pytest.raises(ValueError, match="dim must be 2"):
                store.table("t", dim=dim, optimizer=shoal.Proximal())
    with pytest.raises(ValueError, match="takes no clip"):
        shoal.Proximal(clip_norm=1.0)
    with pytest.raises(ValueError, match="lr > 0"):
        shoal.Proximal(lr=0.0)
    with pytest.raises(ValueError, match="l1 >= 0"):
        shoal.Proximal(l1=-1.0)
