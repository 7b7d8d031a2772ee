"""Futures: a request is waited for by any thread and its result is computed once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import shoal
from shoal.table.future import Future

KEYS = np.array([7, 3, 7], np.uint64)


class Slow:
    """Something pending that ends when it is told to."""

    def __init__(self):
        self.ended = threading.Event()
        self.error = None

    def done(self):
        return self.ended.is_set()

    def result(self, timeout=None):
        if not self.ended.wait(timeout):
            raise shoal.DeadlineExceededError("not yet")
        if self.error is not None:
            raise self.error


def test_a_handle_is_done_when_what_it_waits_for_is():
    slow, answers = Slow(), []
    handle = Future(slow, lambda: answers.append(1) or "answer")
    assert not handle.done()
    with pytest.raises(shoal.DeadlineExceededError):
        handle.result(0.01)
    slow.ended.set()
    assert handle.done()
    assert handle.result() == handle.result(1.0) == "answer"
    assert answers == [1]


def test_many_threads_get_one_answer():
    slow, answers = Slow(), []
    handle = Future(slow, lambda: answers.append(1) or object())
    with ThreadPoolExecutor(8) as pool:
        got = [pool.submit(handle.result, 30.0) for _ in range(8)]
        slow.ended.set()
        assert len({id(one.result()) for one in got}) == 1
    assert answers == [1]


def test_what_went_wrong_is_raised_by_every_wait_and_nothing_is_answered():
    slow, answers = Slow(), []
    slow.error = shoal.ServerLostError("gone")
    slow.ended.set()
    handle = Future(slow, lambda: answers.append(1))
    for _ in range(2):
        with pytest.raises(shoal.ServerLostError, match="gone"):
            handle.result()
    assert handle.done()
    assert not answers


def test_an_error_is_returned_by_exception_and_a_wait_that_is_too_short_raises():
    slow = Slow()
    handle = Future(slow, lambda: "answer")
    with pytest.raises(TimeoutError):
        handle.exception(0.01)
    slow.ended.set()
    assert handle.exception() is None
    slow.error = shoal.DeadlineExceededError("no answer in 60 s")
    assert handle.exception() is slow.error


def test_a_local_stores_handles_are_done():
    with shoal.local() as store:
        table = store.table("t", dim=2, optimizer=shoal.SGD(lr=1.0))
        pushed = table.push(KEYS, np.ones((3, 2), np.float32))
        assert pushed.done()
        assert pushed.result() is None
        out = np.empty((3, 2), np.float32)
        pulled = table.pull_async(KEYS, out=out)
        assert pulled.done()
        assert pulled.result(0.0) is out
        both = table.push_pull(KEYS, np.ones((3, 2), np.float32))
        np.testing.assert_array_equal(both.result(), [[-4, -4], [-2, -2], [-4, -4]])


def test_push_pull_refuses_what_push_and_pull_refuse():
    with shoal.local() as store:
        table = store.table("t", dim=2, optimizer=shoal.SGD(lr=1.0))
        with pytest.raises(ValueError, match="grads"):
            table.push_pull(KEYS, np.ones((2, 2), np.float32))
        with pytest.raises(ValueError, match="out"):
            table.push_pull(KEYS, np.ones((3, 2), np.float32), out=np.empty((2, 2), np.float32))
        assert len(table) == table.stats().step == 0


def test_a_local_store_is_a_job_of_one_worker():
    with shoal.local() as store:
        assert (store.rank, store.num_workers, store.clock) == (0, 1, 0)
        assert store.consistency == shoal.ASP()
        store.tick()
        store.tick()
        store.barrier()
        store.barrier(timeout=0.0)
        assert store.clock == 2
    for call in (store.tick, store.barrier):
        with pytest.raises(shoal.errors.ClosedError):
            call()


@pytest.mark.parametrize("kind", ["local", "cluster"])
def test_a_callback_is_called_with_the_future_and_may_use_the_store(kind):
    made = shoal.local() if kind == "local" else shoal.launch(consistency=shoal.ASP(), timeout=60.0)
    with made as store:
        table = store.table("t", dim=2, optimizer=shoal.SGD(lr=1.0))
        ended, seen = threading.Event(), []

        def read(future):
            seen.append((future, table.pull(KEYS[:2]).tolist()))
            ended.set()

        pushed = table.push(KEYS, np.ones((3, 2), np.float32))
        pushed.add_done_callback(read)
        assert ended.wait(60)
        assert seen == [(pushed, [[-2, -2], [-1, -1]])]
        called = []
        pushed.add_done_callback(called.append)  # it is done: at once
        assert called == [pushed]
        both = table.push_pull(KEYS, np.ones((3, 2), np.float32))
        ended.clear()
        both.add_done_callback(lambda future: (seen.append(future.result().tolist()), ended.set()))
        assert ended.wait(60)
        assert seen[1] == [[-4, -4], [-2, -2], [-4, -4]]


def test_what_a_callback_raises_is_logged_and_the_others_are_called(tmp_path, caplog):
    with shoal.local() as store:
        store.table("t")
        saved = store.save(tmp_path / "saved", wait=False)
        ended = threading.Event()
        saved.add_done_callback(lambda _: 1 / 0)
        saved.add_done_callback(lambda _: ended.set())
        assert saved.exception(60) is None
        assert ended.wait(60)
    assert [record.getMessage() for record in caplog.records] == ["a callback of a future has failed"]
