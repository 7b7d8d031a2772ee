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

    @property
    def done(self):
        return self.ended.is_set()

    def wait(self, timeout=None):
        if not self.ended.wait(timeout):
            raise shoal.DeadlineExceededError("not yet")
        if self.error is not None:
            raise self.error


def test_a_handle_is_done_when_what_it_waits_for_is():
    slow, answers = Slow(), []
    handle = Future(slow, lambda: answers.append(1) or "answer")
    assert not handle.done
    with pytest.raises(shoal.DeadlineExceededError):
        handle.wait(0.01)
    slow.ended.set()
    assert handle.done
    assert handle.wait() == handle.wait(1.0) == "answer"
    assert answers == [1]


def test_many_threads_get_one_answer():
    slow, answers = Slow(), []
    handle = Future(slow, lambda: answers.append(1) or object())
    with ThreadPoolExecutor(8) as pool:
        got = [pool.submit(handle.wait, 30.0) for _ in range(8)]
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
            handle.wait()
    assert handle.done
    assert not answers


def test_a_local_stores_handles_are_done():
    with shoal.local() as store:
        table = store.table("t", dim=2, optimizer=shoal.SGD(lr=1.0))
        pushed = table.push(KEYS, np.ones((3, 2), np.float32))
        assert pushed.done
        assert pushed.wait() is None
        out = np.empty((3, 2), np.float32)
        pulled = table.pull_async(KEYS, out=out)
        assert pulled.done
        assert pulled.wait(0.0) is out
        both = table.push_pull(KEYS, np.ones((3, 2), np.float32))
        np.testing.assert_array_equal(both.wait(), [[-4, -4], [-2, -2], [-4, -4]])


def test_push_pull_refuses_what_push_and_pull_refuse():
    with shoal.local() as store:
        table = store.table("t", dim=2, optimizer=shoal.SGD(lr=1.0))
        with pytest.raises(ValueError, match="grads"):
            table.push_pull(KEYS, np.ones((2, 2), np.float32))
        with pytest.raises(ValueError, match="out"):
            table.push_pull(KEYS, np.ones((3, 2), np.float32), out=np.empty((2, 2), np.float32))
        assert len(table) == table.step == 0


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
        with pytest.raises(shoal.ClosedError):
            call()
