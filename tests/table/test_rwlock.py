"""The readers-writer lock: changes side by side, a load alone, no change lost on either side of it."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.table.rwlock import RwLock

SOON = 0.05  # long enough for a thread to get as far as it can
DEADLINE = 120.0


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def entered(rwlock, threads, release):
    """Begin a change that lasts until ``release``; return its future once it is under way."""
    inside = threading.Event()

    def work():
        inside.set()
        assert release.wait(DEADLINE)
        return "changed"

    future = threads.submit(rwlock.shared, work)
    assert inside.wait(DEADLINE)
    return future


def shut(rwlock, began, release):
    with rwlock.exclusive():
        began.set()
        assert release.wait(DEADLINE)


def test_changes_run_side_by_side_and_give_their_results(threads):
    rwlock, release = RwLock(), threading.Event()
    changes = [entered(rwlock, threads, release) for _ in range(3)]  # each begins while the others last
    release.set()
    assert [change.result(DEADLINE) for change in changes] == ["changed"] * 3


def test_shutting_waits_for_the_changes_under_way_and_keeps_later_ones_out(threads):
    rwlock, first, later = RwLock(), threading.Event(), threading.Event()
    under_way = entered(rwlock, threads, first)
    began, ended = threading.Event(), threading.Event()
    loading = threads.submit(shut, rwlock, began, ended)
    assert not began.wait(SOON)
    after = threads.submit(rwlock.shared, lambda: later.set() or began.is_set())
    assert not later.wait(SOON), "a change went before the load that was waiting"
    first.set()
    assert began.wait(DEADLINE)
    assert under_way.result(DEADLINE) == "changed"
    assert not later.wait(SOON)
    ended.set()
    assert after.result(DEADLINE) is True
    loading.result(DEADLINE)


def test_two_that_shut_it_take_turns(threads):
    rwlock = RwLock()
    alone = []

    def work():
        for _ in range(50):
            with rwlock.exclusive():
                alone.append(1)
                time.sleep(0.0001)
                assert len(alone) == 1
                alone.pop()

    for future in [threads.submit(work) for _ in range(3)]:
        future.result(DEADLINE)
    assert rwlock.shared(lambda: 5) == 5


def test_an_error_inside_is_passed_on_and_releases_the_lock():
    rwlock = RwLock()

    def fail():
        raise KeyError("inside")

    for _ in range(3):
        with pytest.raises(KeyError, match="inside"):
            rwlock.shared(fail)
        with pytest.raises(KeyError, match="inside"), rwlock.exclusive():
            fail()
    assert rwlock.shared(lambda: 5) == 5
    with rwlock.exclusive():
        pass


def test_an_interruption_while_it_waits_releases_the_lock(threads, monkeypatch):
    rwlock, release = RwLock(), threading.Event()
    under_way = entered(rwlock, threads, release)

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(rwlock._changed, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt), rwlock.exclusive():
        pytest.fail("a change is still under way")
    monkeypatch.undo()
    assert rwlock.shared(lambda: 5) == 5
    release.set()
    assert under_way.result(DEADLINE) == "changed"
    with rwlock.exclusive():
        monkeypatch.setattr(rwlock._changed, "wait", interrupt)
        for waiting in (rwlock.exclusive, lambda: contextlib.nullcontext(rwlock.shared(lambda: 5))):
            with pytest.raises(KeyboardInterrupt), waiting():
                pytest.fail("it is shut")
        assert rwlock._exclusive
        monkeypatch.undo()
    with rwlock.exclusive():
        pass
