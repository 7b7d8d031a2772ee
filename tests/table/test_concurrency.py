"""Many Python threads on one table: nothing is lost, no row is torn, nobody waits for ever."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import shoal
from oracle.hashing import neighbours

RATE = 2.0**-6  # SGD by this and small integers is exact in float32, in any order


@pytest.fixture(autouse=True)
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def together(*works):
    """Run each work in a thread of its own, from one start; the first exception is raised."""
    barrier = threading.Barrier(len(works))

    def begin(work):
        barrier.wait(120)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(begin, work) for work in works]]


def sgd(store, dim=4, name="t"):
    return store.table(name, dim=dim, optimizer=shoal.SGD(lr=RATE))


@pytest.mark.combined
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("slots", [2, 64, 1024])
def test_no_gradient_is_lost_when_all_push_the_same_keys(threads, slots):
    with shoal.local(threads=threads, slots=slots) as store:
        table = sgd(store)
        pool = np.concatenate([np.arange(300, dtype=np.uint64), neighbours(100)])

        def pusher(seed):
            def work():
                rng = np.random.default_rng(seed)
                total = np.zeros((len(pool), 4))
                for _ in range(60):
                    picks = rng.integers(0, len(pool), 250)
                    grads = rng.integers(-4, 5, (250, 4)).astype(np.float32)
                    np.add.at(total, picks, grads)
                    table.push(pool[picks], grads).result()
                return total

            return work

        totals = together(*(pusher(seed) for seed in range(6)))
        np.testing.assert_array_equal(table.pull(pool), -RATE * sum(totals))
        assert table.stats().step == table.stats().pushes == 360
        assert table.shard.verify() == ""


def test_large_batches_of_many_callers_share_the_workers(rng):
    """Above the size from which a batch is cut into parts for the pool's threads."""
    with shoal.local(threads=3) as store:
        table = sgd(store)
        keys = rng.permutation(np.arange(40_000, dtype=np.uint64))

        def work():
            for part in np.array_split(keys, 2):
                for _ in range(3):
                    table.push(part, np.ones((len(part), 4), np.float32)).result()
                    assert np.all(table.pull(part) <= -RATE)

        together(*[work] * 4)
        np.testing.assert_array_equal(table.pull(keys), np.full((40_000, 4), -12 * RATE))


@pytest.mark.parametrize("dim", [2, 16, 400])
def test_no_row_is_ever_seen_half_written(dim):
    """All elements get the same gradients, so all of a row are equal at every moment."""
    with shoal.local(threads=2, slots=4) as store:
        table = sgd(store, dim=dim)
        keys = np.arange(64, dtype=np.uint64)
        pulls = [0, 0]  # by each of two threads
        done = threading.Event()

        def push():
            grads = np.ones((64, dim), np.float32)
            deadline = time.monotonic() + 120
            while min(pulls) < 50 and time.monotonic() < deadline:
                table.push(keys, grads)
            done.set()

        def pull(me):
            last = np.zeros(64)
            while not done.is_set():
                rows = table.pull(keys)
                assert np.all(rows == rows[:, :1]), "torn"
                assert np.all(rows[:, 0] <= last), "a row went back"
                last = rows[:, 0]
                pulls[me] += 1

        together(push, lambda: pull(0), lambda: pull(1))
        assert min(pulls) >= 50
        assert np.all(table.pull(keys) == -RATE * table.stats().step)


def test_items_see_whole_rows_while_others_push():
    with shoal.local(threads=2, slots=16) as store:
        table = sgd(store, dim=8)
        keys = np.arange(2000, dtype=np.uint64)
        stop = threading.Event()

        def push():
            for _ in range(60):
                table.push(keys, np.ones((2000, 8), np.float32))
            stop.set()

        def walk():
            while not stop.is_set():
                for some, rows in table.items(batch_size=100):
                    assert len(np.unique(some)) == len(some)
                    assert np.all(rows == rows[:, :1])

        together(push, walk)


def test_rows_stay_while_the_table_grows_under_them():
    with shoal.local(threads=2, slots=8) as store:
        for dim in (1, 16):
            table = sgd(store, dim=dim, name=str(dim))
            old = np.arange(500, dtype=np.uint64)
            table.push(old, np.arange(500 * dim, dtype=np.float32).reshape(500, dim)).result()
            expected = table.pull(old)
            stop = threading.Event()

            def grow(table=table, dim=dim, stop=stop):
                for i in range(1, 101):
                    table.push(np.arange(500, dtype=np.uint64) + np.uint64(500 * i), np.ones((500, dim), np.float32))
                stop.set()

            def read(table=table, old=old, expected=expected, stop=stop):
                while not stop.is_set():
                    np.testing.assert_array_equal(table.pull(old), expected)
                    assert table.contains(old).all()

            together(grow, read, read)
            assert len(table) == 101 * 500
            assert table.shard.verify() == ""


def test_pushing_and_erasing_the_same_keys_keeps_the_table_whole():
    with shoal.local(threads=2, slots=4) as store:
        for dim in (1, 16):
            table = sgd(store, dim=dim, name=str(dim))
            keys = np.concatenate([np.arange(1500, dtype=np.uint64), neighbours(500)])
            kept = np.arange(10_000, 10_500, dtype=np.uint64)
            table.push(kept, np.ones((500, dim), np.float32)).result()

            def push(table=table, dim=dim, keys=keys):
                for _ in range(60):
                    table.push(keys, np.ones((2000, dim), np.float32))

            def erase(table=table, keys=keys):
                rng = np.random.default_rng(5)
                for _ in range(60):
                    table.erase(rng.permutation(keys)[:1500])

            def read(table=table, kept=kept, keys=keys):
                for _ in range(60):
                    assert np.all(table.pull(kept) == -RATE)
                    rows = table.pull(keys)
                    assert np.all(rows == rows[:, :1])
                    assert 500 <= len(table) <= 2500

            together(push, erase, read)
            assert table.shard.verify() == ""
            table.erase(keys)
            assert len(table) == 500
            assert np.all(table.pull(kept) == -RATE)


def test_a_push_gets_its_turn_between_pulls_that_never_stop():
    with shoal.local(threads=2, slots=2) as store:
        table = sgd(store, dim=8)
        keys = np.arange(20_000, dtype=np.uint64)
        table.push(keys, np.ones((20_000, 8), np.float32)).result()
        stop = threading.Event()
        deadline = time.monotonic() + 300

        def pull():
            while not stop.is_set():
                assert time.monotonic() < deadline, "no push gets its turn"
                table.pull(keys)

        def push():
            try:
                for _ in range(20):
                    table.push(keys[:10], np.ones((10, 8), np.float32)).result()
            finally:
                stop.set()

        together(*[pull] * 8, push)


def test_a_save_gets_its_turn_and_is_of_one_moment(tmp_path):
    """Each push moves all keys by one: in a checkpoint all of a push is there, or nothing, its number too."""
    with shoal.local(threads=2, slots=64) as store:
        table = sgd(store, dim=2)
        keys = np.arange(3000, dtype=np.uint64)
        stop = threading.Event()

        def push():
            while not stop.is_set():
                table.push(keys, np.ones((3000, 2), np.float32))

        def save():
            try:
                for i in range(5):
                    store.save(tmp_path / str(i))
            finally:
                stop.set()

        together(push, push, save)
        for i in range(5):
            with shoal.local() as other:
                other.load(tmp_path / str(i))
                table = other.tables["t"]
                assert np.all(
                    table.pull(keys) == -RATE * table.stats().step
                )  # the step counts just the pushes that are in it


def test_many_threads_get_the_same_table():
    for _ in range(20):
        with shoal.local() as store:
            tables = together(*[lambda store=store: store.table("t", dim=3)] * 8)
            assert len({id(table) for table in tables}) == 1


def test_one_key_batch_serves_many_threads():
    with shoal.local(threads=2) as store:
        table = sgd(store)
        keys = np.arange(10_000, dtype=np.uint64) % np.uint64(700)
        batch = store.key_batch(keys)
        grads = np.ones((10_000, 4), np.float32)

        def work():
            for _ in range(10):
                table.push_unique(batch, batch.sum(grads)).result()
                table.pull_unique(batch)

        together(*[work] * 4)
        counts = np.bincount(keys.astype(np.int64))
        np.testing.assert_array_equal(table.pull(np.arange(700, dtype=np.uint64))[:, 0], -RATE * 40 * counts)


@pytest.mark.slow
def test_a_long_call_lets_other_python_threads_run():
    with shoal.local(threads=1) as store:
        table = sgd(store, dim=1)
        keys = np.random.default_rng(3).integers(0, 2**64, 3_000_000, np.uint64)
        grads = np.ones(len(keys), np.float32)
        done = threading.Event()
        wakes = 0

        def work():
            table.push(keys, grads)
            table.pull(keys)
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        while not done.is_set():
            time.sleep(0.001)
            wakes += 1
        thread.join()
        assert wakes > 10  # were the GIL held in the two calls, there would be one before, between and after them


def test_closing_while_others_work_ends_them_with_an_error_and_nothing_worse():
    for _ in range(5):
        store = shoal.local(threads=2)
        table = sgd(store)
        keys = np.arange(5000, dtype=np.uint64)

        def work(table=table, keys=keys):
            try:
                while True:
                    table.push(keys, np.ones((5000, 4), np.float32))
                    table.pull(keys)
            except shoal.errors.ClosedError:
                return True

        def close(store=store):
            time.sleep(0.05)
            store.close()
            return True

        assert all(together(work, work, work, close))
