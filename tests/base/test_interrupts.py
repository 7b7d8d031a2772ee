"""Ctrl-C and SIGTERM, as a command, a loop and a few lines that must not be cut in two take them."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from shoal.base.interrupts import Terminated, at_boundaries, held_back, status_of, terminable


@pytest.fixture(autouse=True)
def _own_handlers():
    """Give each test the handlers of a new process."""
    yield
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def test_sigterm_raises_once_however_often_it_comes_at_once():
    came = []
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a test before may have been told to end, and keeps its handler
    with terminable():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with terminable():
        for _ in range(3):
            try:
                signal.raise_signal(signal.SIGTERM)
            except KeyboardInterrupt as interrupt:
                came.append(status_of(interrupt))
    signal.raise_signal(signal.SIGTERM)  # while the command ends: it does not end the process before
    assert came == [143]


def test_a_sigterm_after_a_loop_that_noted_one_is_the_same():
    with terminable():
        with at_boundaries() as interrupted:
            assert interrupted() is None
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert isinstance(interrupted(), Terminated)
        signal.raise_signal(signal.SIGTERM)


def test_a_second_sigterm_that_comes_later_raises_in_a_loop(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with terminable(), at_boundaries() as interrupted:
        for _ in range(3):  # however many come in between: the second is counted from the first
            signal.raise_signal(signal.SIGTERM)
            now[0] += 0.4
        assert interrupted() is not None
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)


def test_one_of_each_is_two():
    with terminable(), at_boundaries() as interrupted:
        signal.raise_signal(signal.SIGTERM)
        assert interrupted() is not None
        with pytest.raises(KeyboardInterrupt) as caught:
            signal.raise_signal(signal.SIGINT)
        assert status_of(caught.value) == 130


def test_one_that_comes_after_the_loop_last_looked_is_raised_behind_it():
    passed = []

    def loop() -> None:
        with at_boundaries() as interrupted:
            assert interrupted() is None
            signal.raise_signal(signal.SIGINT)
            passed.append("the last lines")

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert passed == ["the last lines"]


def test_what_is_held_back_is_raised_behind_lines_that_fail():
    def fail() -> None:
        with held_back():
            signal.raise_signal(signal.SIGINT)
            raise ValueError

    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    assert isinstance(caught.value.__context__, ValueError)


def test_what_is_held_back_is_raised_behind_the_lines():
    lines = []

    def cut() -> None:
        with held_back():
            signal.raise_signal(signal.SIGINT)
            lines.append("all")
        lines.append("more")

    with pytest.raises(KeyboardInterrupt):
        cut()
    assert lines == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_the_program_and_other_threads_are_left_alone():
    def handler(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with terminable(), at_boundaries() as interrupted:
            assert signal.getsignal(signal.SIGTERM) is handler
            signal.raise_signal(signal.SIGTERM)
            assert interrupted() is None
    finally:
        signal.signal(signal.SIGTERM, before)
    entered = []

    def elsewhere() -> None:
        with terminable(), at_boundaries(), held_back():
            entered.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert entered == [signal.SIG_DFL]


@pytest.mark.slow
def test_a_program_that_does_not_catch_it_ends_silently_with_143():
    text = """
        import os, signal
        from shoal.base.interrupts import at_boundaries
        with at_boundaries() as interrupted:
            os.kill(os.getpid(), signal.SIGTERM)
            print("whole")
            raise interrupted()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (143, "whole\n", "")
