"""Count-min sketches, compared with an oracle on Python's integers: in this process and on a cluster."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from cluster_standin import cluster
from oracle import sketches
from shoal import _core
from stores import KINDS, joined, opened, together
from tiers import rounds

MOST = 2**64 - 1
keys_of = st.sampled_from([0, 1, 7, 2**63, MOST]) | st.integers(0, MOST)
updates = st.lists(st.lists(st.tuples(keys_of, st.integers(0, 2**40)), max_size=20), max_size=4)


@pytest.fixture(scope="module", params=KINDS)
def store(request):
    with opened(request.param, slots=16) as made:
        yield made


def uint64(*keys):
    return np.array(keys, np.uint64)


@settings(max_examples=rounds(25), deadline=None)
@given(updates, st.sampled_from([(1, 1), (3, 2), (300, 3), (2000, 7)]), st.integers(0, 5))
def test_counters_and_estimates_are_those_of_the_oracle(store, given_updates, shape, seed):
    width, depth = shape
    sketch = shoal.sketches.CountMin(store, f"property {shape} {seed}", width=width, depth=depth, seed=seed)
    sketch.table.erase(np.arange(100))
    oracle = sketches.CountMin(seed, depth, width)
    truth = {0: 0, 5: 0}
    for number, pairs in enumerate(given_updates):
        sketch.update(uint64(*(key for key, _ in pairs)), np.array([count for _, count in pairs], np.int64))
        oracle.update(pairs)
        for key, count in pairs:
            truth[key] = truth.get(key, 0) + count
        if number % 2:
            sketch.flush()
    assert sketch.counters().tolist() == oracle.counters
    estimates = sketch.query(uint64(*truth)).tolist()
    assert estimates == [oracle.query(key) for key in truth]
    assert all(estimate >= count for estimate, count in zip(estimates, truth.values(), strict=True))
    assert sketch.total() == sum(truth.values())
    few = list(truth)[:1]
    assert sketch.query(uint64(*few)).tolist() == estimates[:1]


def test_errors_are_within_the_bounds(store):
    random = np.random.default_rng(1)
    keys = random.zipf(1.2, 200_000).astype(np.uint64)
    sketch = shoal.sketches.CountMin(store, "bounds", epsilon=1e-3, delta=1e-2)
    sketch.update(keys)
    sketch.flush().result()
    asked, counts = np.unique(keys, return_counts=True)
    errors = sketch.query(asked) - counts
    assert errors.min() >= 0
    assert (errors > sketch.epsilon * len(keys)).mean() <= sketch.delta
    assert errors.max() > 0
    assert sketch.total() == len(keys)
    assert sketch.epsilon <= 1e-3
    assert sketch.delta <= 1e-2


def test_a_query_of_few_keys_reads_few_blocks(store):
    sketch = shoal.sketches.CountMin(store, "few", width=100_000, depth=4)
    keys = np.arange(1000)
    sketch.update(keys, np.arange(1000) + 1)
    sketch.flush().result()
    before = sketch.table.stats().keys_pulled
    few = sketch.query(keys[:3])
    assert sketch.table.stats().keys_pulled - before <= 12
    np.testing.assert_array_equal(few, sketch.query(keys)[:3])
    assert (few >= [1, 2, 3]).all()


def test_blocks_without_counts_are_not_sent():
    with shoal.local() as store:
        sketch = shoal.sketches.CountMin(store, "s", width=10_000, depth=3)
        sketch.flush().result()
        assert len(sketch.table) == 0
        sketch.update(uint64(7))
        sketch.flush().result()
        sketch.flush().result()
        assert (len(sketch.table), sketch.table.stats().keys_pushed) == (3, 3)


def test_negative_counts_take_back_earlier_ones(store):
    sketch = shoal.sketches.CountMin(store, "window", width=50, depth=3)
    old, new = np.arange(30), np.arange(20, 60)
    sketch.update(old)
    sketch.flush().result()
    sketch.update(new)
    sketch.update(old, -np.ones(30, np.int64))
    sketch.flush().result()
    other = shoal.sketches.CountMin(store, "new", width=50, depth=3)
    other.update(new)
    np.testing.assert_array_equal(sketch.counters(), other.counters())


def test_threads_do_not_change_the_counters():
    keys = np.random.default_rng(2).integers(0, MOST, 20_000, np.uint64, endpoint=True)
    counts = np.arange(20_000)
    found = []
    for threads in (1, 4):
        counters = np.zeros(5 * 321, np.int64)
        pool = _core.ThreadPool(threads)
        _core.count_min_add(keys, counts, 9, 5, 321, counters, pool)
        found.append((counters.tolist(), _core.count_min_positions(keys, 9, 5, 321, pool).tolist()))
    assert found[0] == found[1]
    plain = np.zeros(5 * 321, np.int64)
    np.add.at(plain, np.array(found[0][1]).ravel(), np.tile(counts, 5))
    assert plain.tolist() == found[0][0]


def test_threads_that_update_flush_and_read_lose_and_double_nothing():
    with shoal.local(threads=1) as store:
        sketch = shoal.sketches.CountMin(store, "s", width=64, depth=2)
        seen: list[int] = []

        def count():
            for _ in range(200):
                sketch.update(np.arange(50))
                sketch.flush()

        def read():
            seen.extend(sketch.total() for _ in range(200))

        threads = [threading.Thread(target=work) for work in (count, count, read)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sketch.total() == 2 * 200 * 50
        assert seen == sorted(seen)
        assert all(total % 50 == 0 for total in seen)


@pytest.mark.parametrize("consistency", [shoal.BSP(), shoal.ASP()])
def test_workers_share_a_sketch(consistency):
    def work(store):
        sketch = shoal.sketches.CountMin(store, "s", width=500, depth=4)
        sketch.update(np.arange(1000) * (store.rank + 1))
        sketch.flush().result()
        store.tick()
        store.barrier()
        return sketch.counters()

    with cluster(2, 2, slots=16) as made:
        first, second, third = together(made.address, 3, work, consistency=consistency)
    oracle = sketches.CountMin(0, 4, 500)
    oracle.update((key * times, 1) for times in (1, 2, 3) for key in range(1000))
    assert first.tolist() == second.tolist() == third.tolist() == oracle.counters


def test_a_sketch_of_another_shape_is_refused_on_every_store(store, tmp_path):
    shoal.sketches.CountMin(store, "shape", width=1000, depth=3, seed=4)
    shoal.sketches.CountMin(store, "shape", width=1000, depth=3, seed=4)
    for how in ({"width": 1000, "depth": 3}, {"width": 750, "depth": 4, "seed": 4}):
        with pytest.raises(ValueError, match="sketch 'shape' exists with width 1000, depth 3 and seed 4, not"):
            shoal.sketches.CountMin(store, "shape", **how)


def test_another_worker_with_another_shape_is_refused():
    with cluster(1, 1, slots=16) as made, joined(made.address, 2, consistency=shoal.ASP()) as (first, second):
        shoal.sketches.CountMin(first, "s", width=1000, depth=3)
        with pytest.raises(ValueError, match="sketch 's' exists with width 1000, depth 3 and seed 0, not 999, 3"):
            shoal.sketches.CountMin(second, "s", width=999, depth=3)


def test_checkpoints_keep_sketches(tmp_path):
    with shoal.local(slots=16) as store:
        sketch = shoal.sketches.CountMin(store, "s", width=1000, depth=3)
        sketch.update(np.arange(5000))
        sketch.flush().result()
        store.save(tmp_path / "c")
        expected = sketch.counters()
    with shoal.local(slots=64) as store:
        store.load(tmp_path / "c")
        sketch = shoal.sketches.CountMin(store, "s", width=1000, depth=3)
        np.testing.assert_array_equal(sketch.counters(), expected)
        sketch.update(np.arange(5000))
        np.testing.assert_array_equal(sketch.counters(), 2 * expected)


def test_sketches_are_merged(store):
    with shoal.local() as other_store:
        first = shoal.sketches.CountMin(store, "first", width=300, depth=3)
        second = shoal.sketches.CountMin(other_store, "second", width=300, depth=3)
        both = shoal.sketches.CountMin(store, "both", width=300, depth=3)
        for sketch, keys in ((first, np.arange(50)), (second, np.arange(25, 90))):
            sketch.update(keys)
            both.update(keys)
        second.flush().result()
        first.merge(second)
        first.flush().result()
        np.testing.assert_array_equal(first.counters(), both.counters())
        assert second.total() == 65
        first.merge(first)
        np.testing.assert_array_equal(first.counters(), 2 * both.counters())
        with pytest.raises(ValueError, match="cannot be merged"):
            first.merge(shoal.sketches.CountMin(store, "others", width=301, depth=3))
        with pytest.raises(TypeError, match="merges another CountMin, got dict"):
            first.merge({})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "takes epsilon and delta, or width and depth: pass both of a pair"),
        ({"epsilon": 0.1}, "pass both of a pair"),
        ({"width": 3, "depth": 3, "delta": 0.1}, "pass both of a pair"),
        ({"epsilon": 0.0, "delta": 0.1}, "needs epsilon above 0 and below 1, got 0.0"),
        ({"epsilon": 0.1, "delta": 1}, "needs delta above 0 and below 1, got 1"),
        ({"epsilon": float("nan"), "delta": 0.1}, "needs epsilon above 0 and below 1, got nan"),
        ({"epsilon": 1e-12, "delta": 0.1}, "needs a width from 1 to 17179869184"),
        ({"epsilon": 0.1, "delta": 1e-30}, "needs a depth from 1 to 63, got 70"),
        ({"width": 0, "depth": 3}, "needs a width from 1"),
        ({"width": 2.0, "depth": 3}, "needs a width from 1 .*, got 2.0"),
        ({"width": 2, "depth": True}, "needs a depth from 1 to 63, got True"),
        ({"width": 2, "depth": 2, "seed": 2**24}, "needs a seed from 0 to 16777215"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(how, message):
    with shoal.local() as store:
        with pytest.raises(ValueError, match=message):
            shoal.sketches.CountMin(store, "s", **how)
        assert not store.tables


def test_wrong_arguments_are_refused_and_count_nothing():
    with shoal.local() as store:
        sketch = shoal.sketches.CountMin(store, "s", width=10, depth=2)
        for counts in (np.ones(2), np.ones(2, np.int32), ["a", "b"]):
            with pytest.raises(TypeError, match="takes counts as int64, got"):
                sketch.update(np.arange(2), counts)
        with pytest.raises(ValueError, match="for 2 keys"):
            sketch.update(np.arange(2), np.ones(3, np.int64))
        with pytest.raises(TypeError, match="keys must be integers"):
            sketch.update(np.ones(2))
        with pytest.raises(ValueError, match="one dimension"):
            sketch.query(np.ones((2, 2), np.int64))
        sketch.update([])
        assert sketch.query([]).tolist() == []
        assert sketch.total() == 0
        store.table("floats", dim=256)
        with pytest.raises(ValueError, match="table 'floats' exists with optimizer"):
            shoal.sketches.CountMin(store, "floats", width=10, depth=2)
    for call in (lambda: sketch.update([1]), sketch.flush, sketch.total):
        with pytest.raises(shoal.errors.ClosedError):
            call()


def test_the_native_functions_check_their_arguments():
    pool = _core.ThreadPool(1)
    keys = uint64(1, 2)
    counters = np.zeros(6, np.int64)
    for depth, width in ((0, 3), (3, 0), (2, 4), (2**40, 2**40)):
        with pytest.raises(ValueError, match=r"row|memory|8 numbers"):
            _core.count_min_add(keys, None, 0, depth, width, counters, pool)
    with pytest.raises(ValueError, match="one number for each key"):
        _core.count_min_add(keys, np.zeros(0, np.int64), 0, 2, 3, counters, pool)
    with pytest.raises(TypeError):
        _core.count_min_add(keys, None, 0, 2, 3, counters.astype(np.float64), pool)
    counters.flags.writeable = False
    with pytest.raises(ValueError, match="writ"):
        _core.count_min_add(keys, None, 0, 2, 3, counters, pool)


def test_a_sketch_that_does_not_fit_into_memory_leaves_no_table():
    with shoal.local(threads=1) as store:
        with pytest.raises(MemoryError):
            shoal.sketches.CountMin(store, "huge", width=1 << 34, depth=63)
        assert "huge" not in store.tables


def test_a_query_of_few_keys_reads_few_blocks_and_estimates_the_same(rng, monkeypatch):
    with shoal.local(threads=1) as store:
        sketch = shoal.sketches.CountMin(store, "clicks", width=1 << 14, depth=3)
        keys = rng.integers(0, 2**64, 100_000, dtype=np.uint64)
        sketch.update(keys)
        sketch.flush().result()
        estimates = sketch.query(keys)
        assert estimates.mean() > 2, "most counters have more than one key"
        asked = []
        pull = sketch.table.pull
        monkeypatch.setattr(type(sketch.table), "pull", lambda table, blocks: asked.append(len(blocks)) or pull(blocks))
        assert sketch.query(keys[:20]).tolist() == estimates[:20].tolist()
        assert 3 < asked[0] <= 60
