"""A local store: its tables, its end, its memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import shoal

KEYS = np.array([1, 2, 3], np.uint64)


def test_a_table_is_made_once_and_found_again():
    with shoal.local() as store:
        description = {"dim": 4, "optimizer": shoal.Adagrad(lr=0.1), "init": shoal.Uniform(0.1, seed=2), "seed": 5}
        table = store.table("user", **description)
        table.push(KEYS, np.ones((3, 4), np.float32)).result()
        again = store.table("user", **description)
        assert again is table
        assert len(again) == 3
        assert dict(store.tables) == {"user": table}
        assert (table.name, table.dim, table.dtype, table.seed) == ("user", 4, "float32", 5)
        assert (table.optimizer, table.init) == (shoal.Adagrad(lr=0.1), shoal.Uniform(0.1, seed=2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 5}, "dim 4 instead of 5"),
        ({"optimizer": shoal.Adagrad(lr=0.2)}, "lr=0.1.* instead of .*lr=0.2"),
        ({"optimizer": shoal.SGD(lr=0.1)}, "Adagrad.* instead of SGD"),
        ({"init": shoal.Constant(0.5)}, r"Zeros\(\) instead of Constant"),
        ({"dtype": "float16"}, "'float32' instead of 'float16'"),
        ({"seed": 1}, "seed 0 instead of 1"),
    ],
    ids=lambda x: str(x)[:30] if isinstance(x, dict) else "",
)
def test_a_table_of_that_name_with_another_description_is_refused(change, words):
    with shoal.local() as store:
        description = {"dim": 4, "optimizer": shoal.Adagrad(lr=0.1)}
        table = store.table("user", **description)
        with pytest.raises(ValueError, match=words) as caught:
            store.table("user", **(description | change))
        assert "'user'" in str(caught.value)
        assert store.table("user", **description) is table


def test_the_mapping_of_tables_is_read_only():
    with shoal.local() as store:
        store.table("t")
        with pytest.raises(TypeError):
            store.tables["u"] = store.tables["t"]
        with pytest.raises(TypeError):
            del store.tables["t"]


@pytest.mark.parametrize("slots", [0, 1, 3, -2, 1000, 2**20, 2.0, "2", None])
def test_a_number_of_slots_that_cuts_no_hash_space_is_refused(slots):
    with pytest.raises((ValueError, TypeError), match="slots"):
        shoal.local(slots=slots)


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", 10**6])
def test_a_number_of_threads_that_cannot_work_is_refused(threads):
    with pytest.raises((ValueError, TypeError), match="threads"):
        shoal.local(threads=threads)


@pytest.mark.parametrize("name", ["", None, 7, b"bytes"])
def test_a_table_needs_a_name(name):
    with shoal.local() as store:
        with pytest.raises((ValueError, TypeError), match="name"):
            store.table(name)
        assert not store.tables


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "a"])
def test_a_seed_of_more_than_64_bits_is_refused(seed):
    with shoal.local() as store, pytest.raises((ValueError, TypeError), match="seed"):
        store.table("t", seed=seed)


@pytest.mark.parametrize("slots", [2, 1024, 16384])
@pytest.mark.parametrize("threads", [1, 2, 16])
def test_any_number_of_slots_and_threads_serves(slots, threads):
    with shoal.local(threads=threads, slots=slots) as store:
        table = store.table("t", dim=2, optimizer=shoal.SGD(lr=1.0))
        keys = np.arange(20_000, dtype=np.uint64)
        table.push(keys, np.ones((20_000, 2), np.float32)).result()
        assert np.all(table.pull(keys) == -1)
        assert len(table) == 20_000


AFTER_CLOSE = {
    "pull": lambda store, table, batch: table.pull(KEYS),
    "push": lambda store, table, batch: table.push(KEYS, np.ones(3, np.float32)),
    "pull_unique": lambda store, table, batch: table.pull_unique(batch),
    "push_unique": lambda store, table, batch: table.push_unique(batch, np.ones((3, 1), np.float32)),
    "assign": lambda store, table, batch: table.assign(KEYS, np.ones(3, np.float32)),
    "erase": lambda store, table, batch: table.erase(KEYS),
    "contains": lambda store, table, batch: table.contains(KEYS),
    "state": lambda store, table, batch: table.state(KEYS),
    "items": lambda store, table, batch: list(table.items()),
    "len": lambda store, table, batch: len(table),
    "stats": lambda store, table, batch: table.stats(),
    "step": lambda store, table, batch: table.stats().step,
    "table": lambda store, table, batch: store.table("t"),
    "key_batch": lambda store, table, batch: store.key_batch(KEYS),
    "with": lambda store, table, batch: store.__enter__(),
}


@pytest.mark.parametrize("call", AFTER_CLOSE.values(), ids=AFTER_CLOSE.keys())
def test_after_close_every_call_says_so(call):
    store = shoal.local()
    table = store.table("t")
    batch = store.key_batch(KEYS)
    table.push(KEYS, np.ones(3, np.float32)).result()
    store.close()
    with pytest.raises(shoal.ShoalError, match="closed"):
        call(store, table, batch)
    store.close()  # twice is once


def test_a_closed_store_neither_saves_nor_loads(tmp_path):
    with shoal.local() as store:
        store.table("t")
        store.save(tmp_path / "a")
    with pytest.raises(shoal.ShoalError, match="closed"):
        store.save(tmp_path / "b")
    with pytest.raises(shoal.ShoalError, match="closed"):
        store.load(tmp_path / "a")
    assert not (tmp_path / "b").exists()


def test_what_was_pulled_before_close_stays():
    with shoal.local() as store:
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        table.push(KEYS, np.ones(3, np.float32)).result()
        rows = table.pull(KEYS)
        batch = store.key_batch(KEYS)
        hashes = batch.hashes
    assert np.all(rows == -1)
    np.testing.assert_array_equal(np.sort(hashes), np.sort(shoal.data.mix(KEYS)))


def test_a_store_that_was_never_closed_is_collected_quietly():
    code = """
import numpy as np, shoal
store = shoal.local(threads=4)
table = store.table("t", dim=8)
table.push(np.arange(10000, dtype=np.uint64), np.ones((10000, 8), np.float32))
iterator = table.items()
next(iterator)
print("done")
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_bytes_grow_with_rows_and_fall_when_they_are_erased():
    with shoal.local(slots=64) as store:
        for dim in (1, 32):
            table = store.table(f"t{dim}", dim=dim, optimizer=shoal.Adagrad())
            keys = np.arange(200_000 // dim, dtype=np.uint64)
            empty = table.stats().bytes
            table.push(keys, np.ones((len(keys), dim), np.float32)).result()
            full = table.stats().bytes
            assert full - empty > len(keys) * 8 * dim
            table.erase(keys[: len(keys) * 3 // 4])
            quarter = table.stats().bytes
            assert quarter < empty + 0.6 * (full - empty)
            table.erase(keys)
            assert table.stats().bytes < empty + 0.1 * (full - empty)
            table.push(keys, np.ones((len(keys), dim), np.float32)).result()
            assert table.stats().bytes <= 1.1 * full


MEMORY = """
import sys
import numpy as np, shoal

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

dim, rows, optimizer = int(sys.argv[1]), int(sys.argv[2]), getattr(shoal, sys.argv[3])()
with shoal.local(threads=1, slots=int(sys.argv[4])) as store:
    table = store.table("t", dim=dim, optimizer=optimizer)
    grads = np.ones((10_000, dim), np.float32)
    for start in range(0, 20_000, 10_000):  # warm up what the first batches allocate once
        table.push(np.arange(start, start + 10_000, dtype=np.uint64) + np.uint64(2**40), grads)
    table.erase(np.arange(20_000, dtype=np.uint64) + np.uint64(2**40))
    before = resident()
    for start in range(0, rows, 10_000):
        table.push(np.arange(start, start + 10_000, dtype=np.uint64), grads)
    grown, told = resident() - before, table.stats().bytes
    for start in range(0, rows, 10_000):
        table.erase(np.arange(start, start + 10_000, dtype=np.uint64))
    print(grown, told, resident() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "rows", "optimizer", "row_bytes", "slots"),
    [(1, 1_000_000, "FTRL", 8, 256), (64, 50_000, "Adagrad", 512, 64)],
)
def test_the_process_grows_by_what_stats_tell_and_shrinks_again(dim, rows, optimizer, row_bytes, slots):
    command = [sys.executable, "-c", MEMORY, str(dim), str(rows), optimizer, str(slots)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    grown, reported, left = map(int, done.stdout.split())
    assert grown < 1.1 * reported + 2**22
    assert reported < 1.1 * grown + 2**22
    assert reported < rows * (row_bytes + 16) * 1.1  # the hash, the slack of growth, page rounding
    assert left < 0.2 * grown


def test_stats_tell_a_load_between_the_thresholds_of_growth():
    with shoal.local(slots=16) as store:
        table = store.table("t")
        for start in range(0, 500_000, 20_000):
            table.push(np.arange(start, start + 20_000, dtype=np.uint64), np.ones(20_000, np.float32)).result()
        stats = table.stats()
        assert 0.7 < stats.load < 0.95
        assert stats.bytes_per_row < 24
        assert stats.rows_created == stats.rows == 500_000


def test_a_handle_waits_with_or_without_a_deadline():
    with shoal.local() as store:
        handle = store.table("t").push(KEYS, np.ones(3, np.float32))
        assert handle.result() is None
        assert handle.result(timeout=0.1) is None


def test_what_is_wrong_in_the_world_is_a_shoal_error_and_no_bad_input():
    for kind in (shoal.CorruptionError, shoal.errors.ClosedError, shoal.errors.WrongProcessError):
        assert issubclass(kind, shoal.ShoalError)
        assert not issubclass(kind, ValueError)
