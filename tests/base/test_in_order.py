"""In order: any number of threads work, and what comes out is what one after the other makes."""

from __future__ import annotations

import random
import threading
import time

import pytest

from shoal.base import in_order as module
from shoal.base.in_order import in_order

COUNTS = [1, 2, 5]


def threads_of() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "in order"]


def results_of(items, work, join, threads) -> list:
    return [result for result in in_order(items, work, join, threads, "in order") if result is not None]


def jittered(rng: random.Random):
    def work(item: int) -> int:
        time.sleep(rng.random() * 1e-3)
        return item * item

    return work


@pytest.mark.parametrize("threads", COUNTS)
def test_results_come_in_the_order_of_the_items_and_one_at_a_time(threads):
    joining = threading.Lock()
    joined = []

    def join(square: int) -> int | None:
        assert joining.acquire(blocking=False)
        joined.append(square)
        joining.release()
        return square if square % 2 else None  # nothing is yielded for the others

    assert results_of((i for i in range(100)), jittered(random.Random(threads)), join, threads) == [
        i * i for i in range(100) if i % 2
    ]
    assert joined == [i * i for i in range(100)]
    assert threads_of() == []


@pytest.mark.parametrize("threads", COUNTS)
@pytest.mark.parametrize("where", ["items", "work", "join"])
def test_an_error_is_raised_behind_the_results_before_it_and_nothing_is_joined_behind_it(threads, where):
    def fail(item: int, here: str) -> int:
        if item == 20 and here == where:
            raise KeyError(item)
        return item

    joined: list[int] = []

    def join(item: int) -> int:
        joined.append(fail(item, "join"))
        return item

    closed = []

    def items():
        try:
            yield from (fail(i, "items") for i in range(1000))
        finally:
            closed.append(True)

    seen = []
    with pytest.raises(KeyError, match="20"):
        seen.extend(
            result for result in in_order(items(), lambda i: fail(i, "work"), join, threads, "in order") if result
        )
    assert seen == list(range(1, 20))
    assert joined == list(range(20))
    assert closed == [True]
    assert threads_of() == []


@pytest.mark.parametrize("threads", COUNTS)
def test_few_items_are_taken_ahead_of_the_consumer(threads):
    taken = 0

    def items():
        nonlocal taken
        for i in range(200):
            taken += 1
            yield i

    seen = 0
    for result in in_order(items(), lambda i: i, lambda i: i, threads, "in order"):
        seen += result is not None
        if seen == 5:
            time.sleep(0.05)
        assert taken <= seen + threads + module._ITEMS_AHEAD + 2 * module._RESULTS_AHEAD
    assert seen == 200


@pytest.mark.parametrize("threads", COUNTS)
def test_who_waits_is_asked_now_and_then_and_an_early_end_ends_the_threads(threads):
    release, closed = threading.Event(), []

    def items():
        try:
            yield 1
            release.wait(0 if threads == 1 else 60)
            while True:
                yield 2
        finally:
            closed.append(True)

    results = in_order(items(), lambda i: i, lambda i: None, threads, "in order")
    assert [next(results) for _ in range(3)] == [None] * 3
    release.set()
    results.close()
    assert threads_of() == []
    assert closed == [True]


@pytest.mark.parametrize("threads", [2, 5])
def test_a_result_does_not_wait_for_the_item_that_is_being_taken(threads):
    release = threading.Event()

    def items():
        yield 1
        assert release.wait(60)
        yield 2

    results = in_order(items(), lambda i: i, lambda i: i, threads, "in order")
    assert next(result for result in results if result is not None) == 1
    release.set()
    assert [result for result in results if result is not None] == [2]
