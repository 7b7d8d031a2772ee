"""After a fork the child has a clear error for the parent's store and a working store of its own; never a hang.

Threads do not survive a fork, and locks are copied as they were: what waits for either would wait for ever. So every
child here has a deadline.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import shoal
from forks import DEADLINE, expecting_forks, in_child

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")

KEYS = np.arange(20_000, dtype=np.uint64)  # enough for a batch to be shared between threads
ONES = np.ones((20_000, 2), np.float32)


def made(store):
    table = store.table("t", dim=2, optimizer=shoal.SGD(lr=1.0))
    table.push(KEYS, ONES).result()
    return table


CALLS = {
    "pull": lambda store, table, folder: table.pull(KEYS),
    "push": lambda store, table, folder: table.push(KEYS, ONES),
    "assign": lambda store, table, folder: table.assign(KEYS, ONES),
    "erase": lambda store, table, folder: table.erase(KEYS),
    "contains": lambda store, table, folder: table.contains(KEYS),
    "state": lambda store, table, folder: table.state(KEYS),
    "items": lambda store, table, folder: list(table.items()),
    "len": lambda store, table, folder: len(table),
    "stats": lambda store, table, folder: table.stats(),
    "step": lambda store, table, folder: table.stats().step,
    "pull_unique": lambda store, table, folder: table.pull_unique(store.key_batch(KEYS)),
    "push_unique": lambda store, table, folder: table.push_unique(store.key_batch(KEYS), ONES),
    "table": lambda store, table, folder: store.table("t", dim=2, optimizer=shoal.SGD(lr=1.0)),
    "a new table": lambda store, table, folder: store.table("new"),
    "save": lambda store, table, folder: store.save(folder / "child"),
    "load": lambda store, table, folder: store.load(folder / "parent"),
}


def says_whose_store_it_is(call):
    try:
        call()
    except shoal.ShoalError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_the_parents_table_says_in_the_child_whose_it_is(call, tmp_path):
    with shoal.local(threads=2) as store:
        table = made(store)
        store.save(tmp_path / "parent")
        answer = in_child(lambda: says_whose_store_it_is(lambda: call(store, table, tmp_path)))
        assert answer.startswith("WrongProcessError")
        assert "fork" in answer
        assert np.all(table.pull(KEYS) == -1)  # the parent goes on
        assert set(store.tables) == {"t"}
        assert not (tmp_path / "child" / "manifest.json").exists()


def test_the_child_can_make_and_use_a_store_of_its_own(tmp_path):
    def work():
        with shoal.local(threads=2) as own:
            table = made(own)
            for _ in range(5):
                table.push(KEYS, ONES).result()
            assert np.all(table.pull(KEYS) == -6)
            own.save(tmp_path / "own")
            with shoal.local(threads=2) as again:
                again.load(tmp_path / "own")
                assert np.all(again.tables["t"].pull(KEYS) == -6)
        return "worked"

    with shoal.local(threads=2) as store:
        made(store)
        assert in_child(work) == "worked"


def test_the_child_can_close_and_drop_the_parents_store():
    def work():
        store.close()
        return "closed"

    with shoal.local(threads=4) as store:
        table = made(store)
        assert in_child(work) == "closed"
        assert np.all(table.pull(KEYS) == -1)

    holder = [shoal.local(threads=4)]
    made(holder[0])

    def drop():
        holder.clear()
        gc.collect()
        return "dropped"

    assert in_child(drop) == "dropped"
    assert np.all(holder[0].tables["t"].pull(KEYS) == -1)


def test_a_batch_of_the_parent_is_an_error_or_works_in_the_child_but_does_not_hang():
    with shoal.local(threads=2) as store:
        table = made(store)
        batch = store.key_batch(KEYS)

        def work():
            assert says_whose_store_it_is(lambda: table.pull_unique(batch)).startswith("WrongProcessError")
            try:
                total = batch.sum(ONES)
            except shoal.ShoalError:
                return "refused"
            assert np.all(total == 1)
            return "worked"

        assert in_child(work) in {"refused", "worked"}


@pytest.mark.slow
def test_forks_in_the_midst_of_other_threads_pushes_never_hang():
    """The child may copy any lock in any state: fork many times while four threads push, pull and grow."""
    with shoal.local(threads=2, slots=4) as store:
        table = made(store)
        stop = threading.Event()

        def busy(seed):
            rng = np.random.default_rng(seed)
            while not stop.is_set():
                keys = rng.integers(0, 2**64, 20_000, np.uint64)
                table.push(keys, ONES)
                table.pull(keys)
                table.erase(keys)
                store.key_batch(keys).sum(ONES)

        def work():
            assert says_whose_store_it_is(lambda: table.pull(KEYS)).startswith("WrongProcessError")
            assert says_whose_store_it_is(lambda: len(table)).startswith("WrongProcessError")
            store.key_batch(KEYS).sum(ONES)
            with shoal.local(threads=2) as own:
                made(own)
            store.close()
            gc.collect()
            return "fine"

        threads = [threading.Thread(target=busy, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                assert in_child(work) == "fine"
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert np.all(table.pull(KEYS) == -1)


@pytest.mark.slow
def test_a_fork_in_the_midst_of_a_save_never_hangs(tmp_path):
    with shoal.local(threads=2) as store:
        table = made(store)
        stop = threading.Event()

        def busy():
            while not stop.is_set():
                store.save(tmp_path / "parent", overwrite=True)

        thread = threading.Thread(target=busy)
        thread.start()
        try:
            for _ in range(5):
                answer = in_child(lambda: says_whose_store_it_is(lambda: table.push(KEYS, ONES)))
                assert answer.startswith("WrongProcessError")
        finally:
            stop.set()
            thread.join()
        table.push(KEYS, ONES).result()


def square(i):
    """Runs in a pool's child: a store of its own, and the parent's that it must not use."""
    with shoal.local(threads=2) as store:
        table = made(store)
        for _ in range(i):
            table.push(KEYS, ONES).result()
        own = float(-table.pull(KEYS[:1])[0, 0])
    answer = says_whose_store_it_is(lambda: PARENT["table"].pull(KEYS)) if PARENT else "no parent"
    return own, answer.split(":")[0]


PARENT: dict[str, shoal.Table] = {}


@pytest.mark.slow
def test_a_fork_in_the_midst_of_a_load_never_hangs(tmp_path):
    """The thread that loads may hold the store's locks at the moment of the fork."""
    with shoal.local(threads=2, slots=4) as store:
        table = store.table("t")
        store.save(tmp_path / "empty")
        stop = threading.Event()

        def load():
            while not stop.is_set():
                store.load(tmp_path / "empty")

        def push():
            while not stop.is_set():
                table.push(KEYS[:10], np.ones(10, np.float32))

        def work():
            for call in (lambda: table.push(KEYS, ONES[:, 0]), lambda: store.table("new"), lambda: table.stats().step):
                assert says_whose_store_it_is(call).startswith("WrongProcessError")
            store.close()
            return "fine"

        threads = [threading.Thread(target=work) for work in (load, push)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                assert in_child(work) == "fine"
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@pytest.mark.slow
def test_a_multiprocessing_pool_by_fork_works():
    with shoal.local(threads=2) as store:
        PARENT["table"] = made(store)
        try:
            with expecting_forks(), multiprocessing.get_context("fork").Pool(3) as pool:
                got = pool.map_async(square, range(6)).get(timeout=DEADLINE)
        finally:
            PARENT.clear()
        assert got == [(i + 1.0, "WrongProcessError") for i in range(6)]


SCRIPT = """
import multiprocessing, os, sys, warnings
warnings.filterwarnings("ignore", category=DeprecationWarning)
import numpy as np, shoal

store = shoal.local(threads=4)
table = store.table("t")
keys = np.arange(50_000, dtype=np.uint64)
table.push(keys, np.ones(50_000, np.float32))
child = os.fork()
if child == 0:
    sys.exit(0)  # the interpreter's whole end, with a store that is not its own
_, status = os.waitpid(child, 0)
assert status == 0, status
table.pull(keys)
print("both ended")
"""


def test_an_interpreter_that_holds_its_parents_store_ends():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout) == (0, "both ended\n"), done.stderr
