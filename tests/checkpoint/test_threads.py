"""Loads and saves beside other threads: pushes are before a load or after it, saves are of one moment."""

from __future__ import annotations

import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import shoal
from shoal.checkpoint.read import load, read_chain
from threads import refuse_threads

NAMES = [f"t{i}" for i in range(12)]


@pytest.fixture(autouse=True)
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run(*works):
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(work) for work in works]]


def filled(store, value, names=NAMES):
    for name in names:
        table = store.table(name, optimizer=shoal.SGD(lr=1.0))
        table.assign(np.arange(20, dtype=np.uint64), np.full(20, value, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("change", ["push", "push_unique", "assign"])
def test_changes_of_one_thread_are_lost_to_a_load_up_to_one_moment_and_kept_from_it_on(change, tmp_path):
    """Each thread makes keys one after the other, each in the next table: what stays is the end of that sequence."""
    ones = np.ones(1, np.float32)
    with shoal.local(threads=1, slots=2) as store:
        tables = [store.table(name, optimizer=shoal.SGD()) for name in NAMES]
        store.save(tmp_path / "empty")
        stop = threading.Event()

        def make(table, keys):
            if change == "push_unique":
                table.push_unique(store.key_batch(keys), ones)
            else:
                getattr(table, change)(keys, ones)

        def changing(first):
            def work():
                for i in itertools.count():
                    last = stop.is_set()  # asked first: this one is made when all loads are done
                    make(tables[i % len(tables)], np.array([first + i], np.uint64))
                    if last:
                        return i + 1
                return None

            return work

        def load():
            try:
                for _ in range(30):
                    store.load(tmp_path / "empty")
            finally:
                stop.set()

        firsts = [0, 10**9]
        counts = run(*map(changing, firsts), load)[:2]
        for first, count in zip(firsts, counts, strict=True):
            left = [tables[i % len(tables)].contains(np.array([first + i], np.uint64))[0] for i in range(count)]
            assert left[-1]
            assert left == sorted(left), f"a change was lost after its load, of {count}"


@pytest.mark.slow
def test_erases_of_one_thread_are_undone_by_a_load_up_to_one_moment_and_stay_from_it_on(tmp_path):
    with shoal.local(threads=1, slots=2) as store:
        filled(store, 1)
        store.save(tmp_path / "full")
        stop = threading.Event()

        def cell(i):
            return store.tables[NAMES[i % len(NAMES)]], np.array([i // len(NAMES) % 20], np.uint64)

        def erase():
            for i in itertools.count():
                table, key = cell(i)
                last = stop.is_set()
                assert table.erase(key) in {0, 1}
                if last:
                    return i + 1
            return None

        def load():
            try:
                for _ in range(30):
                    store.load(tmp_path / "full")
            finally:
                stop.set()

        count, _ = run(erase, load)
        last = range(max(0, count - 20 * len(NAMES)), count)  # the last erase of every key
        there = [table.contains(key)[0] for table, key in map(cell, last)]
        assert not there[-1]
        assert there == sorted(there, reverse=True), "an erase was undone after its load"


def test_a_push_under_way_is_done_before_the_load_and_one_that_comes_later_is_made_to_what_was_loaded(tmp_path):
    key = np.arange(1, dtype=np.uint64)
    with shoal.local(threads=1) as store, ThreadPoolExecutor(3) as pool:
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        table.assign(key, np.full(1, 100, np.float32))
        store.save(tmp_path / "c")
        old = table.shard
        old.pause_writers()
        try:
            first = pool.submit(table.push, key, np.ones(1, np.float32))
            loading = pool.submit(store.load, tmp_path / "c")
            with pytest.raises(TimeoutError):
                loading.result(0.2)
            second = pool.submit(table.push, key, np.full(1, 7, np.float32))
            with pytest.raises(TimeoutError):
                second.result(0.05)
            assert table.shard is old
            assert table.pull(key)[0, 0] == 100  # reading waits for nobody
        finally:
            old.resume_writers()
        for future in (first, loading, second):
            future.result(120)
        assert table.pull(key)[0, 0] == 93
        assert table.stats().step == 1


@pytest.mark.slow
def test_a_save_beside_loads_is_of_one_moment(tmp_path):
    with shoal.local(threads=1, slots=2) as store:
        for value in (1, 2):
            filled(store, value)
            store.save(tmp_path / str(value))
        stop = threading.Event()

        def load():
            for value in itertools.cycle((1, 2)):
                store.load(tmp_path / str(value))
                if stop.is_set():
                    return

        def save():
            try:
                for i in range(40):
                    store.save(tmp_path / f"saved{i}")
            finally:
                stop.set()

        run(load, save)
    seen = set()
    for i in range(40):
        with shoal.local(threads=1) as store:
            store.load(tmp_path / f"saved{i}")
            keys = np.arange(20, dtype=np.uint64)
            values = set(np.concatenate([table.pull(keys).ravel() for table in store.tables.values()]).tolist())
            assert len(values) == 1, values
            seen |= values
    assert seen == {1, 2}


def test_a_save_between_reading_the_manifest_and_the_rows_is_said_and_loads_nothing(tmp_path, monkeypatch):
    """The descriptions that were checked are those of the rows: the manifest is read once."""
    with shoal.local() as other, shoal.local() as store:
        filled(other, 1, ["t"])
        other.save(tmp_path / "c")
        filled(store, 5, ["t"])
        real = read_chain

        def overtaken(directory, *options):
            chain = real(directory, *options)
            monkeypatch.undo()
            with shoal.local() as third:
                third.table("t", dim=3)  # another description
                third.save(directory, overwrite=True)
            return chain

        monkeypatch.setattr("shoal.store.files.read_chain", overtaken)
        with pytest.raises(shoal.CorruptionError, match="is missing"):
            store.load(tmp_path / "c")
        table = store.tables["t"]
        assert (table.dim, float(table.pull(np.zeros(1, np.uint64))[0, 0])) == (1, 5)
        with pytest.raises(ValueError, match=r"has dim 3,.* in the checkpoint, and dim 1,"):
            store.load(tmp_path / "c")


def test_a_table_made_while_a_load_reads_is_not_given_rows_of_another_description(tmp_path, monkeypatch):
    with shoal.local() as store:
        filled(store, 1, ["s", "t"])
        store.save(tmp_path / "c")
    with shoal.local() as store:
        real = load

        def overtaken(*args, **kwargs):
            store.table("t", dim=3)
            return real(*args, **kwargs)

        monkeypatch.setattr("shoal.store.local.load_checkpoint", overtaken)
        with pytest.raises(ValueError, match=r"has dim 1,.* in the checkpoint, and dim 3,"):
            store.load(tmp_path / "c")
        assert set(store.tables) == {"t"}
        assert store.tables["t"].pull(np.zeros(1, np.uint64)).shape == (1, 3)


def test_a_store_closed_while_a_load_reads_stays_closed(tmp_path, monkeypatch):
    with shoal.local() as store:
        filled(store, 1, ["t"])
        store.save(tmp_path / "c")
        real = load

        def overtaken(*args, **kwargs):
            loaded = real(*args, **kwargs)
            store.close()
            return loaded

        monkeypatch.setattr("shoal.store.local.load_checkpoint", overtaken)
        with pytest.raises(shoal.errors.ClosedError):
            store.load(tmp_path / "c")
        assert not store.tables


def test_a_save_whose_thread_cannot_start_leaves_nothing_locked(tmp_path, monkeypatch):
    with shoal.local(threads=1) as store:
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        table.push(np.array([7], np.uint64), np.array([1], np.float32)).result()
        with monkeypatch.context() as patched:
            refuse_threads(patched)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                store.save(tmp_path / "model", wait=False)
        store.save(tmp_path / "model", wait=False).result(60.0)
        table.push(np.array([7], np.uint64), np.array([1], np.float32)).result()
        assert store.sweep() is not None
    with shoal.local(threads=1) as store:
        store.load(tmp_path / "model")
        assert store.tables["t"].pull(np.array([7], np.uint64)).tolist() == [[-1]]
