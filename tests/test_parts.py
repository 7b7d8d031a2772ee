"""Parts of the data: each is taken once while nobody dies, and all are finished in the end whoever does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.scheduler.splits import Parts


@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 2**32))
def test_while_nobody_dies_every_part_is_taken_once_and_finished(count, workers, seed):
    rng = random.Random(seed)
    parts, holds, taken, now = Parts(count), {}, [], 0.0
    while not parts.over:
        worker, now = rng.randrange(workers), now + rng.random()
        if worker in holds:
            assert parts.finish(worker, holds.pop(worker), now)
        part = None if parts.over else parts.take(worker, now)
        if part is not None:
            holds[worker] = part
            taken.append(part)
    assert taken == list(range(count))
    assert not holds


@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 2**32), st.sampled_from([0.0, 1.5]))
def test_whoever_dies_all_parts_are_finished_by_those_who_live(count, workers, seed, reissue):
    rng = random.Random(seed)
    parts, holds, now, names = Parts(count), {}, 0.0, iter(range(10**9))
    alive = [next(names) for _ in range(workers)]
    finished, times = set(), {}
    for _ in range(100 * count):
        now += rng.random()
        worker = rng.choice(alive)
        if rng.random() < 0.2:
            alive[alive.index(worker)] = next(names)
            held = holds.pop(worker, None)
            back = parts.release(worker)
            assert set(back) <= {held}
            if rng.random() < 0.5:  # a late word of the dead one changes nothing
                assert held is None or not parts.finish(worker, held, now)
            continue
        if worker in holds:
            part = holds.pop(worker)
            first = part not in finished
            assert parts.finish(worker, part, now) == first
            finished.add(part)
        part = parts.take(worker, now, reissue=reissue)
        if part is not None:
            assert part not in finished
            holds[worker] = part
            times[part] = times.get(part, 0) + 1
    for worker in alive:
        if worker in holds:
            parts.finish(worker, holds.pop(worker), now)
    while (part := parts.take("last", now)) is not None:
        parts.finish("last", part, now)
    assert parts.over
    assert parts.finished == count


def test_a_slow_part_is_given_out_again_once_if_that_is_wanted():
    parts = Parts(5)
    for part in range(3):
        assert parts.take("fast", 10.0 * part) == part
        parts.finish("fast", part, 10.0 * part + 10.0)
    assert parts.take("slow", 30.0) == 3
    assert parts.take("fast", 30.0) == 4
    parts.finish("fast", 4, 40.0)
    assert parts.take("fast", 60.0) is None
    assert parts.take("fast", 49.0, reissue=2.0) is None  # twice the mean of 10 s has not passed
    assert parts.take("slow", 60.0, reissue=2.0) is None  # it is the slow one's own
    assert parts.take("fast", 60.0, reissue=2.0) == 3
    assert parts.take("third", 100.0, reissue=2.0) is None
    assert parts.finish("fast", 3, 61.0)
    assert not parts.finish("slow", 3, 62.0)
    assert parts.over


def test_a_part_that_two_had_is_free_again_when_both_are_gone():
    parts = Parts(4)
    for part in range(3):
        parts.take("a", 0.0)
        parts.finish("a", part, 1.0)
    parts.take("b", 1.0)
    assert parts.take("c", 9.0, reissue=2.0) == 3
    assert parts.release("b") == []
    assert parts.release("c") == [3]
    assert parts.take("d", 9.0) == 3


def test_a_pass_of_a_negative_number_of_parts_is_refused():
    with pytest.raises(ValueError, match="-1 parts"):
        Parts(-1)
