"""Calls that come after others: when they leave, what a clock waits for, and how they fail."""

import random

import numpy as np
import pytest

from maps import map_of
from requests_by_hand import MAP, SLOTS, A, B, Op, Status, pull, push, requests, taken
from shoal import _core
from shoal.errors import ClosedError, DeadlineExceededError, DependencyError, ServerLostError


def answer(r, asked, now, status=Status.OK):
    for one in asked:
        good = status == Status.OK
        r.receive(one.address, one.rows(1) if good and one.message.op == Op.PULL else one.answer(status), now)


def test_a_call_leaves_when_all_that_it_comes_after_is_answered_by_all_servers():
    r = requests()
    first, second = pull(r), push(r)
    asked = taken(r)
    last = push(r, after=[first, second])
    other = pull(r)  # is not held up
    assert [one.message.op for one in taken(r)] == [Op.PULL] * 2
    answer(r, asked[:3], 0.1)
    assert (first.done(), second.done(), taken(r)) == (True, False, [])
    answer(r, asked[3:], 0.2)
    released = taken(r)
    assert [one.message.op for one in released] == [Op.PUSH] * 2
    answer(r, released, 0.3)
    assert last.done()
    assert not other.done()


def test_a_call_after_settled_calls_leaves_at_once_unless_one_has_failed():
    r = requests()
    good = push(r)
    answer(r, taken(r), 0.1)
    bad = push(r)
    answer(r, taken(r), 0.2, Status.NO_TABLE)
    push(r, after=[good])
    assert len(taken(r)) == 2
    refused = push(r, after=[good, bad])
    with pytest.raises(DependencyError, match=r"push of table 1 .* not executed: the push of table 1 .* no such table"):
        refused.get()
    assert taken(r) == []


@pytest.mark.slow
def test_a_failure_reaches_a_long_chain_and_nothing_of_it_is_sent():
    r = requests()
    call = first = push(r)
    chain = [call := push(r, 1, after=[call]) for _ in range(2000)]
    answer(r, taken(r)[:1], 0.1, Status.NO_TABLE)
    assert first.done()
    assert all(isinstance(one.error, DependencyError) for one in chain)
    assert taken(r) == []
    assert r.next_time() is None


def test_a_chain_of_calls_without_keys_is_settled_at_once():
    r = requests()
    call = first = pull(r)
    chain = [call := pull(r, 0, after=[call]) for _ in range(5000)]
    answer(r, taken(r), 0.1)
    assert first.get().shape == (40, 2)
    assert all(one.get().shape == (0, 2) for one in chain)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_clock_ends_after_its_held_calls_and_names_them(atomic):
    r = requests(atomic)
    first = pull(r)
    asked = taken(r)
    held, tick, next_clock = push(r, after=[first]), r.tick(0, [1], 0.0, 9.0), pull(r, clock=1)
    answer(r, asked[:1], 0.1)
    assert taken(r) == []
    answer(r, asked[1:], 0.2)
    released = taken(r)
    for address in (A, B):
        ops = [one.message.op for one in released if one.address == address]
        assert ops == ([Op.PUSH] if atomic else [Op.PUSH, Op.TICK, Op.PULL])
    answer(r, [one for one in released if one.message.op == Op.PUSH], 0.3)
    ticks = [one for one in [*released, *taken(r)] if one.message.op == Op.TICK]
    assert {one.address for one in ticks} == {A, B}
    answer(r, ticks, 0.4)
    assert held.done()
    assert tick.done()
    assert tick.error is None
    assert not next_clock.done()


def test_a_held_call_is_cut_for_the_newest_map_and_stays_before_its_tick():
    r = requests()
    first = pull(r)
    asked = taken(r)
    held = push(r, after=[first])
    tick = r.tick(0, [1], 0.0, 9.0)
    r.set_map(map_of(2, (0, SLOTS, B, 1)), 0.1)
    answer(r, asked[1:], 0.2)
    answer(r, taken(r), 0.2)  # the slots that were A's, at B
    released = taken(r)
    assert [(one.address, one.message.op) for one in released[:1]] == [(B, Op.PUSH)]
    answer(r, released, 0.3)
    answer(r, taken(r), 0.4)
    assert held.done()
    assert tick.done()
    assert tick.error is None


def test_a_held_call_fails_at_its_deadline_with_what_it_waits_for():
    r = requests()
    first = pull(r, deadline=60.0)
    taken(r)
    held = push(r, deadline=5.0, after=[first])
    tick = r.tick(0, [1], 0.0, 60.0)
    assert r.next_time() <= 5.0
    r.on_time(5.0)
    with pytest.raises(DeadlineExceededError, match=r"the push of table 1 .* the pull of table 1 .* took 5.0 s"):
        held.get()
    assert (first.done(), tick.done()) == (False, False)


def test_all_that_is_held_fails_when_the_requests_are_closed():
    r = requests()
    first = pull(r)
    held = push(r, after=[first])
    r.close(ClosedError("closed"), 0.1)
    for call in (first, held, push(r, after=[held])):
        assert isinstance(call.error, ClosedError | DependencyError)
    assert isinstance(held.error, ClosedError)
    assert r.next_time() is None


def test_a_held_call_for_a_lost_server_fails_when_it_would_begin():
    r = requests()
    b = _core.KeyBatch(np.arange(40, dtype=np.uint64), SLOTS, _core.ThreadPool(1))
    only_at_a = b.hashes[: int(b.offsets[SLOTS // 2])]
    begins = np.minimum(b.offsets, len(only_at_a))
    first = r.submit(Op.ERASE, 1, 0, 0.0, 60.0, hashes=only_at_a, begins=begins)
    asked = taken(r)
    held = push(r, after=[first])
    r.lose(1, "silent", 0.1)
    answer(r, asked, 0.2)
    assert first.error is None
    assert isinstance(held.error, ServerLostError)


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_leave_in_the_order_that_they_ask_for(seed):
    choose = random.Random(seed)
    r = requests(choose.random() < 0.5)
    maps = [MAP, map_of(2, (0, SLOTS, A, 0)), map_of(3, (0, 4, B, 1), (4, SLOTS, A, 0))]
    after, calls, asked, left, clock, now = {}, [], [], set(), 0, 0.0

    def leave():
        for one in taken(r):
            if one.message.op in (Op.PUSH, Op.PULL):
                name = (one.message.op, int(one.message.table))
                left.add(name)
                assert all(other.done() and other.error is None for other in after[name]), name
            asked.append(one)

    for k in range(60):
        now += 0.01
        kind = choose.random()
        if kind < 0.1:
            calls.append(r.tick(clock, [1], now, now + 60))
            clock += 1
        else:
            op = choose.choice([Op.PUSH, Op.PULL])
            others = [one for one in choose.sample(calls, min(len(calls), choose.randrange(4))) if one.op != Op.TICK]
            b = _core.KeyBatch(np.arange(choose.randrange(1, 30), dtype=np.uint64), SLOTS, _core.ThreadPool(1))
            rows = np.zeros((len(b), 1), np.float32)
            after[op, k] = others
            what = {"values" if op == Op.PUSH else "out": rows, "hashes": b.hashes, "begins": b.offsets, "dim": 1}
            calls.append(r.submit(op, k, clock, now, now + 60, after=others, **what))
        leave()
        while asked and choose.random() < 0.7:
            answer(r, [asked.pop(choose.randrange(len(asked)))], now)
            leave()
        if choose.random() < 0.03 and r.epoch < 3:
            r.set_map(maps[r.epoch], now)
            leave()
    while asked:
        answer(r, [asked.pop(choose.randrange(len(asked)))], now)
        leave()
        if not asked:
            now += 1.0
            r.on_time(now)
            leave()
        assert now < 50
    assert all(call.done() and call.error is None for call in calls)
    assert left == after.keys()
