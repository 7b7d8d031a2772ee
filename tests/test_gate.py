"""The gate: changes side by side, a load alone, no change lost on either side of it."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.table.rwlock import Gate

SOON = 0.05  # long enough for a thread to get as far as it can
DEADLINE = 30.0


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def entered(gate, threads, release):
    """Begin a change that lasts until ``release``; return its future once it is under way."""
    inside = threading.Event()

    def work():
        inside.set()
        assert release.wait(DEADLINE)
        return "changed"

    future = threads.submit(gate.change, work)
    assert inside.wait(DEADLINE)
    return future


def shut(gate, began, release):
    with gate.shut():
        began.set()
        assert release.wait(DEADLINE)


def test_changes_run_side_by_side_and_give_their_results(threads):
    gate, release = Gate(), threading.Event()
    changes = [entered(gate, threads, release) for _ in range(3)]  # each begins while the others last
    release.set()
    assert [change.result(DEADLINE) for change in changes] == ["changed"] * 3


def test_shutting_waits_for_the_changes_under_way_and_keeps_later_ones_out(threads):
    gate, first, later = Gate(), threading.Event(), threading.Event()
    under_way = entered(gate, threads, first)
    began, ended = threading.Event(), threading.Event()
    loading = threads.submit(shut, gate, began, ended)
    assert not began.wait(SOON)
    after = threads.submit(gate.change, lambda: later.set() or began.is_set())
    assert not later.wait(SOON), "a change went before the load that was waiting"
    first.set()
    assert began.wait(DEADLINE)
    assert under_way.result(DEADLINE) == "changed"
    assert not later.wait(SOON)
    ended.set()
    assert after.result(DEADLINE) is True
    loading.result(DEADLINE)


def test_two_that_shut_it_take_turns(threads):
    gate = Gate()
    alone = []

    def work():
        for _ in range(50):
            with gate.shut():
                alone.append(1)
                time.sleep(0.0001)
                assert len(alone) == 1
                alone.pop()

    for future in [threads.submit(work) for _ in range(3)]:
        future.result(DEADLINE)
    assert gate.change(lambda: 5) == 5


def test_an_error_inside_is_passed_on_and_leaves_the_gate_open():
    gate = Gate()

    def fail():
        raise KeyError("inside")

    for _ in range(3):
        with pytest.raises(KeyError, match="inside"):
            gate.change(fail)
        with pytest.raises(KeyError, match="inside"), gate.shut():
            fail()
    assert gate.change(lambda: 5) == 5
    with gate.shut():
        pass


def test_an_interruption_while_it_waits_leaves_the_gate_open(threads, monkeypatch):
    gate, release = Gate(), threading.Event()
    under_way = entered(gate, threads, release)

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(gate._moved, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt), gate.shut():
        pytest.fail("a change is still under way")
    monkeypatch.undo()
    assert gate.change(lambda: 5) == 5
    release.set()
    assert under_way.result(DEADLINE) == "changed"
    with gate.shut():
        monkeypatch.setattr(gate._moved, "wait", interrupt)
        for waiting in (gate.shut, lambda: contextlib.nullcontext(gate.change(lambda: 5))):
            with pytest.raises(KeyboardInterrupt), waiting():
                pytest.fail("it is shut")
        assert gate._shut
        monkeypatch.undo()
    with gate.shut():
        pass
