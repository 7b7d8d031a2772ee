"""Splits of the data: each is taken once while nobody dies, and all are finished in the end whoever does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.scheduler.splits import SplitTracker


@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 2**32))
def test_while_nobody_dies_every_split_is_taken_once_and_finished(count, workers, seed):
    rng = random.Random(seed)
    splits, holds, taken, now = SplitTracker(count), {}, [], 0.0
    while not splits.over:
        worker, now = rng.randrange(workers), now + rng.random()
        if worker in holds:
            assert splits.finish(worker, holds.pop(worker), now)
        split = None if splits.over else splits.take(worker, now)
        if split is not None:
            holds[worker] = split
            taken.append(split)
    assert taken == list(range(count))
    assert not holds


@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 2**32), st.sampled_from([0.0, 1.5]))
def test_whoever_dies_all_splits_are_finished_by_those_who_live(count, workers, seed, reissue):
    rng = random.Random(seed)
    splits, holds, now, names = SplitTracker(count), {}, 0.0, iter(range(10**9))
    alive = [next(names) for _ in range(workers)]
    finished, times = set(), {}
    for _ in range(100 * count):
        now += rng.random()
        worker = rng.choice(alive)
        if rng.random() < 0.2:
            alive[alive.index(worker)] = next(names)
            held = holds.pop(worker, None)
            back = splits.release(worker)
            assert set(back) <= {held}
            if rng.random() < 0.5:  # a late word of the dead one changes nothing
                assert held is None or not splits.finish(worker, held, now)
            continue
        if worker in holds:
            split = holds.pop(worker)
            first = split not in finished
            assert splits.finish(worker, split, now) == first
            finished.add(split)
        split = splits.take(worker, now, reissue=reissue)
        if split is not None:
            assert split not in finished
            holds[worker] = split
            times[split] = times.get(split, 0) + 1
    for worker in alive:
        if worker in holds:
            splits.finish(worker, holds.pop(worker), now)
    while (split := splits.take("last", now)) is not None:
        splits.finish("last", split, now)
    assert splits.over
    assert splits.finished == count


def test_a_slow_split_is_given_out_again_once_if_that_is_wanted():
    splits = SplitTracker(5)
    for split in range(3):
        assert splits.take("fast", 10.0 * split) == split
        splits.finish("fast", split, 10.0 * split + 10.0)
    assert splits.take("slow", 30.0) == 3
    assert splits.take("fast", 30.0) == 4
    splits.finish("fast", 4, 40.0)
    assert splits.take("fast", 60.0) is None
    assert splits.take("fast", 49.0, reissue=2.0) is None  # twice the mean of 10 s has not passed
    assert splits.take("slow", 60.0, reissue=2.0) is None  # it is the slow one's own
    assert splits.take("fast", 60.0, reissue=2.0) == 3
    assert splits.take("third", 100.0, reissue=2.0) is None
    assert splits.finish("fast", 3, 61.0)
    assert not splits.finish("slow", 3, 62.0)
    assert splits.over


def test_a_split_that_two_had_is_free_again_when_both_are_gone():
    splits = SplitTracker(4)
    for split in range(3):
        splits.take("a", 0.0)
        splits.finish("a", split, 1.0)
    splits.take("b", 1.0)
    assert splits.take("c", 9.0, reissue=2.0) == 3
    assert splits.release("b") == []
    assert splits.release("c") == [3]
    assert splits.take("d", 9.0) == 3


def test_a_pass_of_a_negative_number_of_splits_is_refused():
    with pytest.raises(ValueError, match="-1 splits"):
        SplitTracker(-1)
