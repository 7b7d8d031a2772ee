"""TimedQueue: timed waits that end in time, whatever interrupts them."""

import queue
import signal
import threading
import time

import pytest

from shoal.base.timed_queue import TimedQueue

PATIENCE = 30.0


def rescue(items):
    """Put an item long after the wait should have ended."""
    timer = threading.Timer(PATIENCE, items.put, ["far too late"])
    timer.daemon = True
    timer.start()
    return timer


def test_items_come_in_order():
    items = TimedQueue()
    assert items.empty()
    for number in range(3):
        items.put(number)
    assert not items.empty()
    assert [items.get(), items.get(timeout=0.0), items.get(timeout=1.0)] == [0, 1, 2]


@pytest.mark.parametrize("timeout", [-1.0, 0.0, 0.001])
def test_a_wait_whose_time_is_over_ends(timeout):
    items = TimedQueue()
    items.put("taken")
    assert items.get() == "taken"  # the gate is still open
    timer = rescue(items)
    with pytest.raises(queue.Empty):
        items.get(timeout=timeout)
    timer.cancel()


@pytest.mark.slow
def test_a_signal_that_takes_longer_than_the_wait_ends_it():
    items = TimedQueue()
    handled = []

    def handle(number, frame):
        time.sleep(0.1)
        handled.append(number)

    before = signal.signal(signal.SIGALRM, handle)
    timer = rescue(items)
    try:
        for _ in range(5):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(queue.Empty):
                items.get(timeout=0.05)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        timer.cancel()
    assert len(handled) == 5


def test_an_interrupt_within_a_wait_loses_nothing():
    class Interrupted(Exception):
        pass

    def handle(number, frame):
        items.put("from the handler")
        raise Interrupted

    items = TimedQueue()
    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Interrupted):
            items.get(timeout=PATIENCE)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert items.get(timeout=0.0) == "from the handler"


def test_a_consumer_receives_all_items_of_several_producers():
    items = TimedQueue()
    producers = [threading.Thread(target=lambda: [items.put(1) for _ in range(2000)]) for _ in range(3)]
    for producer in producers:
        producer.start()
    assert sum(items.get(timeout=PATIENCE) for _ in range(6000)) == 6000
    for producer in producers:
        producer.join()
    assert items.empty()


def test_a_signal_that_does_not_wake_the_main_thread_is_handled_soon() -> None:
    """As one does that comes just before the thread sleeps: here another thread receives it."""

    def stop(number: int, frame: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        threading.Timer(0.05, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)).start()
        with pytest.raises(InterruptedError):
            TimedQueue[int]().get(60.0)
    finally:
        signal.signal(signal.SIGUSR1, before)
