"""Admission, expiry, sweeps and budgets at a data loop's engine: counts, clocks, and each thing once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shoal
from endpoint_peer import Reply, Worker, deliver
from shoal import _core
from shoal._core import Op, Status
from table_specs import native_spec

SLOTS = 16
WIDTH = 1 << 60  # hashes of a slot
NOBODY = Worker(rank=0xFFFFFFFF, incarnation=0)
COUNT2 = shoal.AfterCount(2)
TTL3 = shoal.TimeToLive(3)


def served(mode: str = "asp", *, workers: int = 1, memory: int | None = None, **rules: Any) -> _core.Endpoint:
    """All slots, one table with rules, ``workers`` admitted at clock 0."""
    endpoint = _core.Endpoint(SLOTS, [(0, SLOTS)])
    if memory is not None:
        endpoint.set_memory(memory)
    endpoint.add_table(0, native_spec(**rules))
    endpoint.start_job(1, mode)
    for rank in range(workers):
        endpoint.admit(rank, 1, 0)
    return endpoint


def one(replies: list[Reply]) -> Reply:
    assert len(replies) == 1
    return replies[0]


def done(replies: list[Reply]) -> Reply:
    reply = one(replies)
    assert reply.status == Status.OK, reply.text
    return reply


def weights(endpoint: _core.Endpoint, *hashes: int) -> list[float]:
    return done(deliver(endpoint, NOBODY.pull(hashes))).values.ravel().tolist()  # type: ignore[no-any-return]


def there(endpoint: _core.Endpoint, *hashes: int) -> list[int]:
    return done(deliver(endpoint, NOBODY.keys(Op.CONTAINS, hashes))).values.tolist()  # type: ignore[no-any-return]


def tick(endpoint: _core.Endpoint, clock: int, *workers: Worker) -> None:
    for worker in workers:
        assert deliver(endpoint, worker.tick(clock))[0].status == Status.OK


def test_a_push_tells_how_often_each_key_occurred() -> None:
    endpoint = served(admit=COUNT2)
    a = Worker()
    done(deliver(endpoint, a.push([5, 6, 7], [1, 1, 1], sequence=1, counts=[2, 1, 700])))
    assert there(endpoint, 5, 6, 7) == [1, 0, 1]
    assert weights(endpoint, 5, 6, 7) == [-1, 0, -1]
    done(deliver(endpoint, a.push([6], [1], sequence=2)))  # without counts: once
    assert weights(endpoint, 6) == [-1]


def test_occurrences_are_counted_once_however_often_a_push_comes() -> None:
    endpoint = served(admit=shoal.AfterCount(4))
    a = Worker()
    for _ in range(3):
        done(deliver(endpoint, a.push([5, 6], [1, 1], sequence=1, counts=[1, 3])))
    assert there(endpoint, 5, 6) == [0, 0]
    done(deliver(endpoint, a.push([6], [1], sequence=2)))
    assert there(endpoint, 5, 6) == [0, 1]


def test_counts_go_with_the_slots_that_have_not_seen_a_push() -> None:
    endpoint = served(admit=COUNT2)
    endpoint.set_map(1, [(0, 2)])
    a, hashes = Worker(), [1, WIDTH, WIDTH + 1, 3 * WIDTH, 3 * WIDTH + 1]
    message = a.push(hashes, [1] * 5, sequence=1, counts=[1, 1, 2, 1, 2])
    refused = one(deliver(endpoint, message))
    assert (refused.status, refused.slots) == (Status.WRONG_EPOCH, (3,))
    endpoint.set_map(2, [(0, 4)])
    done(deliver(endpoint, message))
    assert there(endpoint, *hashes) == [0, 0, 1, 0, 1]


def test_a_push_with_counts_to_a_table_that_has_no_use_for_them_is_refused() -> None:
    endpoint = served(expire=(TTL3,))
    reply = one(deliver(endpoint, Worker().push([5], [1], sequence=1, counts=[2])))
    assert reply.status == Status.BAD_REQUEST
    assert "table 0 has no rule that counts occurrences" in reply.text
    done(deliver(endpoint, Worker().push([5], [1], sequence=1)))


def test_under_bsp_the_occurrences_of_all_workers_are_added_up() -> None:
    endpoint = served("bsp", workers=2, admit=shoal.AfterCount(3))
    a, b = Worker(0), Worker(1)
    done(deliver(endpoint, b.push([5, 6, 7], [1, 1, 1], sequence=1, counts=[2, 1, 1])))
    done(deliver(endpoint, a.push([5, 6], [2, 2], sequence=1)))
    tick(endpoint, 0, a, b)
    assert there(endpoint, 5, 6, 7) == [1, 0, 0]
    assert weights(endpoint, 5, 6, 7) == [-3, 0, 0]
    done(deliver(endpoint, a.push([6], [2], sequence=2, clock=1)))  # the only one: no merge
    tick(endpoint, 1, a, b)
    assert weights(endpoint, 5, 6, 7) == [-3, -2, 0]


def test_under_bsp_pushes_without_counts_are_still_added_up() -> None:
    endpoint = served("bsp", workers=2, admit=COUNT2)
    a, b = Worker(0), Worker(1)
    done(deliver(endpoint, a.push([5], [1], sequence=1)))
    done(deliver(endpoint, b.push([5], [1], sequence=1)))
    tick(endpoint, 0, a, b)
    assert weights(endpoint, 5) == [-2]


def test_rows_know_the_clock_of_the_push_that_came() -> None:
    endpoint = served(expire=(TTL3,))
    a = Worker()
    done(deliver(endpoint, a.push([5, 6], [1, 1], sequence=1, clock=0)))
    for clock in range(5):
        tick(endpoint, clock, a)
    done(deliver(endpoint, a.push([6], [1], sequence=2, clock=5)))
    swept = done(deliver(endpoint, a.sweep(sequence=3, clock=5)))
    assert swept.values[0] == 2
    assert there(endpoint, 5, 6) == [0, 1]


def test_a_sweep_is_done_once_and_its_answer_repeated() -> None:
    endpoint = served(expire=(TTL3,))
    a = Worker()
    done(deliver(endpoint, a.push([5], [1], sequence=1)))
    for clock in range(5):
        tick(endpoint, clock, a)
    first = done(deliver(endpoint, a.sweep(sequence=2, clock=5)))
    assert there(endpoint, 5) == [0]
    done(deliver(endpoint, a.assign([5], [9], sequence=3)))  # at clock 0: a second sweep would drop it
    again = done(deliver(endpoint, a.sweep(sequence=2, clock=5)))
    assert again.values == first.values
    assert there(endpoint, 5) == [1]
    assert endpoint.metrics()["duplicates"] == 1


def test_a_dry_run_drops_nothing_and_anybody_may_ask_for_one() -> None:
    endpoint = served(expire=(TTL3,))
    a = Worker()
    done(deliver(endpoint, a.push([5], [1], sequence=1)))
    for clock in range(5):
        tick(endpoint, clock, a)
    forecast = done(deliver(endpoint, NOBODY.sweep(dry_run=True, clock=5))).values
    assert forecast[38] == 1  # rows of the first rule
    assert there(endpoint, 5) == [1]
    assert one(deliver(endpoint, NOBODY.sweep(clock=5))).status == Status.BAD_REQUEST
    # Another rule, and rules that are none.
    assert done(deliver(endpoint, a.sweep([1, 9, 0], dry_run=True, clock=5))).values[38] == 0
    assert done(deliver(endpoint, a.sweep([3, 2, 0], dry_run=True, clock=5))).values[38] == 1
    for rules in ([1, 0, 0], [5, 1, 1], [1, 3], [float("nan"), 1, 0], [2, 0.9, 0.5]):
        assert one(deliver(endpoint, a.sweep(rules, dry_run=True, clock=5))).status == Status.BAD_REQUEST, rules


def test_under_bsp_a_sweep_waits_for_its_clock_and_acts_at_its_end() -> None:
    endpoint = served("bsp", workers=2, expire=(shoal.MinNorm(1.5),))
    a, b = Worker(0), Worker(1)
    done(deliver(endpoint, a.push([5, 6], [1, 2], sequence=1)))
    tick(endpoint, 0, a)
    assert one(deliver(endpoint, a.sweep(sequence=2, clock=1))).status == Status.DEFERRED
    assert there(endpoint, 5, 6) == [0, 0]
    answers = deliver(endpoint, b.tick(0))
    swept = next(reply for reply in answers if reply.op == Op.SWEEP)
    assert swept.values[38] == 1
    # Everybody's pulls of clock 1 see the row, and a push of it comes too late to save it.
    assert done(deliver(endpoint, b.pull([5], clock=1))).values.tolist() == [[-1]]
    done(deliver(endpoint, b.push([5], [4], sequence=1, clock=1)))
    assert done(deliver(endpoint, a.sweep(sequence=2, clock=1))).values == swept.values
    tick(endpoint, 1, b, a)
    assert weights(endpoint, 5, 6) == [-4, -2]  # begun anew
    tick(endpoint, 2, a, b)
    too_late = one(deliver(endpoint, a.sweep(sequence=3, clock=2)))
    assert (too_late.status, "came after its end" in too_late.text) == (Status.BAD_REQUEST, True)


def test_the_sweep_of_a_worker_that_is_gone_is_forgotten() -> None:
    endpoint = served("bsp", workers=2, expire=(shoal.MinNorm(1.5),))
    a, b = Worker(0), Worker(1)
    done(deliver(endpoint, a.push([5], [1], sequence=1)))
    tick(endpoint, 0, a, b)
    done(deliver(endpoint, b.sweep(sequence=1, clock=1)))
    endpoint.dismiss(1, 1)
    tick(endpoint, 1, a)
    assert weights(endpoint, 5) == [-1]


def test_a_tables_clock_goes_on_over_jobs() -> None:
    endpoint = served(expire=(TTL3,))
    a = Worker()
    done(deliver(endpoint, a.push([5, 6], [1, 1], sequence=1)))
    tick(endpoint, 0, a)
    tick(endpoint, 1, a)
    assert endpoint.dismiss(0, 1) == 2
    endpoint.start_job(2, "asp", before=2)
    endpoint.admit(0, 2, 0)
    b = Worker(incarnation=2, job=2)
    done(deliver(endpoint, b.push([6], [1], sequence=1)))
    tick(endpoint, 0, b)
    done(deliver(endpoint, b.sweep(sequence=2, clock=1)))
    assert there(endpoint, 5, 6) == [1, 1]  # 3 clocks
    tick(endpoint, 1, b)
    done(deliver(endpoint, b.sweep(sequence=3, clock=2)))
    assert there(endpoint, 5, 6) == [0, 1]


def sent_to(endpoint: _core.Endpoint, other: _core.Endpoint, *, cut: int = SLOTS) -> None:
    """Load what one endpoint has into another, slot by slot."""
    a, b = Worker(), Worker()
    done(deliver(other, b.numbers(Op.LOAD_BEGIN, [0] * SLOTS, sequence=1)))
    sequence = 1
    for slot in range(SLOTS):
        reply = _core.decode(endpoint.handle(b"", a.bare(Op.SECTION, aux=slot, sequence=1 << 63))[0][1])
        edge = len(reply.values) - reply.aux
        rows, filter = reply.values[:edge].copy(), reply.values[edge:].copy()
        sequence += 2
        done(deliver(other, b.section(reply.count, rows, sequence=sequence)))
        done(deliver(other, b.filter(SLOTS, slot, filter, sequence=sequence + 1)))
    clock = done(deliver(endpoint, a.bare(Op.STATS, clock=4, sequence=1 << 63))).values[-1]
    done(deliver(other, b.numbers(Op.LOAD_END, [3, clock], sequence=sequence + 2, clock=1)))


@pytest.mark.parametrize(
    "admit",
    [shoal.AfterCount(3), shoal.AfterBloom(3, capacity=1000, error=0.001)],
    ids=["count", "bloom"],
)
def test_what_waits_and_the_clock_are_loaded(admit: Any) -> None:
    rules = {"admit": admit, "expire": (TTL3,)}
    endpoint, other = served(**rules), served(**rules)
    a = Worker()
    hashes = np.arange(0, 16, dtype=np.uint64) * np.uint64(WIDTH) + np.uint64(5)
    done(deliver(endpoint, a.push(hashes, np.ones(16), sequence=1, counts=[1, 2] * 8)))
    done(deliver(endpoint, a.push([7], [1], sequence=2, counts=[3])))
    for clock in range(4):
        tick(endpoint, clock, a)
    sent_to(endpoint, other)
    tick(other, 0, Worker())
    for each, clock in ((endpoint, 4), (other, 1)):
        done(deliver(each, a.push(hashes, np.ones(16), sequence=99, clock=clock)))
        assert there(each, *hashes.tolist()) == [0, 1] * 8
        done(deliver(each, a.sweep(sequence=100, clock=clock)))  # the row of 7 is 4 clocks old
        assert there(each, 7) == [0]


def test_a_filter_is_refused_where_it_does_not_belong() -> None:
    endpoint = served(admit=COUNT2)
    a = Worker()
    nothing = np.empty(0, np.uint8)
    assert "no load of this worker" in one(deliver(endpoint, a.filter(SLOTS, 0, nothing, sequence=1))).text
    done(deliver(endpoint, a.numbers(Op.LOAD_BEGIN, [0] * SLOTS, sequence=1)))
    for cut, slot, filter, what in (
        (8, 0, nothing, "no slot 0 of 8 in one of 16"),
        (SLOTS, 16, nothing, "no slot 16 of 16"),
        (17, 0, nothing, "power of two"),
        (SLOTS, 0, np.ones(15, np.uint8), ""),
    ):
        reply = one(deliver(endpoint, a.filter(cut, slot, filter, sequence=2)))
        assert reply.status == Status.BAD_REQUEST
        assert what in reply.text
    endpoint.set_map(1, [(0, 8)])
    refused = one(deliver(endpoint, a.filter(64, 63, nothing, sequence=2)))
    assert (refused.status, refused.slots) == (Status.WRONG_EPOCH, (15,))
    done(deliver(endpoint, a.filter(64, 31, nothing, sequence=2)))
    done(deliver(endpoint, a.filter(64, 31, nothing, sequence=2)))
    assert endpoint.metrics()["duplicates"] == 1


def grow(endpoint: _core.Endpoint, worker: Worker, clock: int = 0, first: int = 1) -> Reply:
    """Push new keys of slot 0 until that fails."""
    for sequence in range(first, first + 60):
        hashes = np.arange(200, dtype=np.uint64) * np.uint64(1 << 40) + np.uint64(sequence)
        reply = deliver(endpoint, worker.push(hashes, np.ones(200), sequence=sequence, clock=clock))[0]
        if reply.status != Status.OK:
            return reply
    raise AssertionError("the budget was never met")


def test_a_push_beyond_the_budget_is_refused_and_changes_nothing() -> None:
    endpoint = served(memory=20_000)
    a = Worker()
    refused = grow(endpoint, a)
    assert refused.status == Status.RESOURCE_EXHAUSTED
    assert "bytes" in refused.text
    before = done(deliver(endpoint, a.bare(Op.STATS, sequence=1 << 63))).values
    hashes = np.arange(200, dtype=np.uint64) * np.uint64(1 << 40) + np.uint64(refused.sequence)
    assert there(endpoint, *hashes.tolist()) == [0] * 200
    assert (
        one(deliver(endpoint, a.push(hashes, np.ones(200), sequence=refused.sequence))).status
        == Status.RESOURCE_EXHAUSTED
    )
    assert done(deliver(endpoint, a.bare(Op.STATS, sequence=1 << 63))).values == before
    old = np.arange(200, dtype=np.uint64) * np.uint64(1 << 40) + np.uint64(1)
    done(deliver(endpoint, a.push(old, np.ones(200), sequence=refused.sequence + 1)))  # rows that are there
    done(deliver(endpoint, a.keys(Op.ERASE, old, sequence=refused.sequence + 2)))
    done(deliver(endpoint, a.push(hashes, np.ones(200), sequence=refused.sequence)))  # now there is room


def test_under_bsp_a_step_beyond_the_budget_is_told_to_whoever_comes_next() -> None:
    endpoint = served("bsp", workers=2, memory=20_000)
    a, b = Worker(0), Worker(1)
    sequence = 0
    for clock in range(60):
        sequence += 1
        hashes = np.arange(200, dtype=np.uint64) * np.uint64(1 << 40) + np.uint64(sequence)
        reply = one(deliver(endpoint, a.push(hashes, np.ones(200), sequence=sequence, clock=clock)))
        if reply.status != Status.OK:
            break
        tick(endpoint, clock, a, b)
    assert reply.status == Status.RESOURCE_EXHAUSTED
    assert one(deliver(endpoint, b.pull([5], clock=clock))).status == Status.RESOURCE_EXHAUSTED
    assert there(endpoint, *(hashes - np.uint64(1)).tolist()) == [0] * 200  # the step that failed
    old = np.arange(200, dtype=np.uint64) * np.uint64(1 << 40) + np.uint64(1)
    done(deliver(endpoint, b.keys(Op.ERASE, old, sequence=1, clock=clock)))
    done(deliver(endpoint, b.pull([5], clock=clock)))
    done(deliver(endpoint, a.push(hashes, np.ones(200), sequence=sequence, clock=clock)))
    tick(endpoint, clock, a, b)
    assert there(endpoint, *hashes.tolist()) == [1] * 200


def test_what_a_table_took_of_the_budget_is_free_as_soon_as_it_is_dropped_or_replaced() -> None:
    endpoint = served(memory=20_000)
    a = Worker()
    fits = grow(endpoint, a).sequence - 1
    for first in range(100, 1000, 100):
        if first % 200:
            endpoint.drop_table(0)
            endpoint.add_table(0, native_spec())
        else:
            done(deliver(endpoint, a.numbers(Op.LOAD_BEGIN, [0] * SLOTS, sequence=first)))
            done(deliver(endpoint, a.numbers(Op.LOAD_END, [7], sequence=first + 1)))
        assert grow(endpoint, a, first=first + 2).sequence - (first + 2) == fits


@pytest.mark.parametrize(("memory", "taken"), [(None, 6), (1 << 20, 5)])
def test_pushes_that_wait_for_their_clock_are_bounded_by_the_budget(memory: int | None, taken: int) -> None:
    endpoint = served("bsp", workers=2, memory=memory)
    hashes = np.arange(1_000_000, dtype=np.uint64) << np.uint64(44)
    ones = np.ones(len(hashes), np.float32)
    got = [one(deliver(endpoint, Worker().push(hashes, ones, sequence=k))) for k in range(1, 7)]
    assert [reply.status for reply in got] == [Status.OK] * taken + [Status.BAD_REQUEST] * (6 - taken)
    if memory is not None:
        assert "the limit is 67108864" in got[-1].text  # 64 MiB, since a quarter of the budget is less
