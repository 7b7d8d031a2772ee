"""Deltas and hot swaps: an export and its deltas read as the store did, and readers never see half of a version."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import shoal
from oracle import export as oracle
from shoal import cli
from shoal.export import manifest, write
from shoal.storage.local import LocalDir
from snapshots import RULES, Script
from tiers import rounds

KEYS = np.arange(2000, dtype=np.uint64)


def rows_now(table, keys, dtype):
    want = table.pull(keys)
    return want if dtype == "float32" else oracle.rounded(want, dtype)


@pytest.mark.combined(2)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("init", [shoal.Zeros(), shoal.Uniform(0.5, seed=2)])
@pytest.mark.parametrize("dim", [1, 5])
def test_a_chain_of_deltas_reads_what_a_whole_export_reads(tmp_path, dtype, init, dim):
    rng = np.random.default_rng(3)
    with shoal.local(slots=16) as store:
        table = store.table("t", dim=dim, optimizer=shoal.SGD(lr=1.0), init=init)
        table.assign(KEYS, rng.standard_normal((2000, dim)).astype(np.float32))
        store.export(tmp_path / "0", dtype=dtype)
        for k in range(1, 5):
            some = rng.choice(3000, 100, replace=False).astype(np.uint64)
            table.push(some, rng.standard_normal((100, dim)).astype(np.float32)).result()
            gone = rng.choice(3000, 50, replace=False).astype(np.uint64)
            table.erase(gone)
            reported = store.export(tmp_path / str(k), since=tmp_path / str(k - 1))
            assert reported.version == k + 1
            assert reported.tables["t"].rows <= 150
            assert reported.tables["t"].dropped == 0
            beside = tmp_path / "else" / "whole"
            store.export(beside, dtype=dtype, overwrite=True)
            asked = np.arange(3500, dtype=np.uint64)
            with (
                shoal.export.open(tmp_path / str(k)) as export,
                shoal.export.open(beside) as whole,
            ):
                one, other = export.table("t"), whole.table("t")
                np.testing.assert_array_equal(one.contains(asked), other.contains(asked))
                np.testing.assert_array_equal(one.pull(asked), other.pull(asked))
                assert len(one) == len(other)
                pairs = zip(one.items(), other.items(), strict=True)
                for (keys, rows), (other_keys, other_rows) in pairs:
                    np.testing.assert_array_equal(keys, other_keys)
                    np.testing.assert_array_equal(rows, other_rows)
        removed = [key for key, row in oracle.rows_of(tmp_path / "4", "t").items() if row is None]
        assert removed
        assert not table.contains(np.array(removed, np.uint64)).any() or init == shoal.Zeros()


@pytest.mark.parametrize("dim", [1, 4])
def test_an_int8_delta_has_the_rows_that_moved_by_more_than_half_a_step(tmp_path, dim):
    rng = np.random.default_rng(3)
    with shoal.local(slots=4) as store:
        table = store.table("t", dim=dim, optimizer=shoal.SGD(lr=1.0))
        weights = rng.standard_normal((2000, dim)).astype(np.float32)
        table.assign(KEYS, weights)
        store.export(tmp_path / "a", dtype="int8")
        assert store.export(tmp_path / "same", since=tmp_path / "a").tables["t"].rows == 0
        table.assign(KEYS[:100], weights[:100] + np.float32(0.3))
        table.assign(KEYS[100:200], weights[100:200] + np.float32(1e-6))
        reported = store.export(tmp_path / "b", since=tmp_path / "a").tables["t"]
        assert 100 <= reported.rows < 110
        with shoal.export.open(tmp_path / "b") as export:
            assert export.table("t").form.dtype == "int8"
            off = np.abs(export.table("t").pull(KEYS) - table.pull(KEYS))
            assert off.max() < np.abs(weights).max() / 127


@pytest.mark.slow
@settings(max_examples=rounds(40))
@given(
    versions=st.lists(
        st.dictionaries(st.integers(0, 40), st.sampled_from([0.0, 1.0, -2.5, 1e-9, 3.0]), max_size=20),
        min_size=2,
        max_size=5,
    )
)
def test_any_history_of_rows_reads_as_its_last_state(tmp_path_factory, versions):
    folder = tmp_path_factory.mktemp("h")
    asked = shoal.data.unmix(np.arange(50, dtype=np.uint64))  # neighbours
    with shoal.local(slots=2, threads=1) as store:
        table = store.table("t", optimizer=shoal.SGD())
        for k, rows in enumerate(versions):
            table.erase(asked)
            if rows:
                table.assign(asked[list(rows)], np.array(list(rows.values()), np.float32))
            store.export(folder / str(k), dtype="float16", since=folder / str(k - 1) if k else None)
            with shoal.export.open(folder / str(k), threads=1) as export:
                want = np.array([rows.get(i, 0.0) for i in range(50)], np.float32)
                got = export.table("t").pull(asked).ravel()
                np.testing.assert_array_equal(got, oracle.rounded(want, "float16"))
                np.testing.assert_array_equal(export.table("t").contains(asked), got != 0)


@pytest.fixture
def looked(monkeypatch):
    """Tell how many rows the exports since the last call have read."""
    rows = []
    real = write._to_write

    def counted(*how):
        read = real(*how)
        rows.append(read[0])
        return read

    monkeypatch.setattr(write, "_to_write", counted)

    def since_last():
        count = sum(rows)
        rows.clear()
        return count

    return since_last


def compared(store, folder, since, **how):
    """Write a delta by comparing every row."""
    given = [write.TableSource(table.spec, len(table), table.shard.read_slot) for table in store.tables.values()]
    return write.write_export(
        LocalDir(folder), write.UnsynchronizedTables(given, store.slots), since=LocalDir(since), **how
    )


def written(folder):
    """What an export holds: its tables, and the bytes of their files, whose names are random."""
    found = manifest.read(LocalDir(folder))[0]
    return [
        (
            table.description(),
            (table.rows, table.dropped, table.largest_error, table.rms_error),
            [(folder / file.name).read_bytes() for file in table.files],
            table.sections,
        )
        for table in found.tables
    ]


@pytest.mark.slow
@settings(max_examples=rounds(25), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rules=st.sampled_from(sorted(RULES)),
    dim=st.sampled_from([1, 3]),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
    slots=st.sampled_from([2, 64]),
    memory=st.sampled_from([None, 400_000]),
    steps=st.lists(st.sampled_from(["few", "many", "save", "whole", "nothing"]), min_size=3, max_size=8),
)
def test_a_delta_of_what_has_changed_is_that_of_every_row_to_the_byte(
    tmp_path_factory, seed, rules, dim, dtype, slots, memory, steps
):
    folder = tmp_path_factory.mktemp("d")
    rng = np.random.default_rng(seed)
    with shoal.local(slots=slots, threads=2, memory=memory) as store:
        store.table("t", dim=dim, optimizer=shoal.FTRL(l1=0.1) if dim == 1 else shoal.SGD(), **RULES[rules])
        script = Script(store, seed)
        for _ in range(3):
            script.step()
        store.export(folder / "0", dtype=dtype, track=True)
        last, saved = folder / "0", None
        for k, step in enumerate(steps, 1):
            now = folder / str(k)
            if step == "many":
                script.step()
            elif step == "few":
                keys = rng.integers(0, 2000, 3, np.uint64)
                with contextlib.suppress(shoal.MemoryBudgetExceededError):
                    store.tables["t"].push(keys, np.ones((3, dim), np.float32)).result()
                store.tables["t"].erase(rng.integers(0, 2000, 2, np.uint64))
                store.tick()
                store.sweep()
            elif step == "save":  # which has its own base
                there = folder / f"saved{k}"
                if saved is None:
                    store.save(there, track=True)
                else:
                    store.save(there, since=saved)
                saved = there
            elif step == "whole":  # for somebody else, of which no delta is made
                store.export(folder / f"whole{k}")
            base = manifest.read(LocalDir(last))[1]
            assert [table.shard.base("export") for table in store.tables.values()] == [base]
            reported = store.export(now, since=last)
            assert reported.tables == compared(store, folder / f"compared{k}", last).tables
            assert written(now) == written(folder / f"compared{k}")
            with shoal.export.open(now) as export:
                asked = np.arange(2500, dtype=np.uint64)
                if dtype == "float32":
                    np.testing.assert_array_equal(export.table("t").pull(asked), store.tables["t"].pull(asked))
            last = now
        if saved is not None:
            store.save(folder / "end", since=saved)
            with shoal.local(slots=8) as other:
                other.load(folder / "end")
                assert other.tables["t"].digest() == store.tables["t"].digest()


def test_a_delta_upon_the_last_tracked_export_looks_at_what_has_changed_alone(looked, tmp_path):
    with shoal.local(slots=16) as store:
        table = store.table("t", optimizer=shoal.SGD())
        table.assign(KEYS, np.ones(2000, np.float32))
        store.export(tmp_path / "0")
        table.assign(KEYS[:5], np.full(5, 2, np.float32))
        looked()
        store.export(tmp_path / "1", since=tmp_path / "0")  # upon one that was not tracked
        assert looked() == 2000
        table.assign(KEYS[:5], np.full(5, 3, np.float32))
        table.erase(KEYS[1000:1005])
        store.table("new", optimizer=shoal.SGD()).assign(KEYS[:7], np.ones(7, np.float32))
        reported = store.export(tmp_path / "2", since=tmp_path / "1")
        assert {name: table.rows for name, table in reported.tables.items()} == {"t": 10, "new": 7}
        assert 12 <= looked() < 60
        assert store.export(tmp_path / "3", since=tmp_path / "2").tables["t"].rows == 0
        assert looked() == 0
        store.export(tmp_path / "whole", track=True)
        assert looked() == 2002
        table.assign(KEYS[:5], np.full(5, 4, np.float32))
        store.export(tmp_path / "4", since=tmp_path / "whole")
        assert 5 <= looked() < 30
        store.export(tmp_path / "5", since=tmp_path / "2")  # not the last one
        assert looked() == 2002
    for name, want in (("3", [3, 1, 0]), ("4", [4, 1, 0]), ("5", [4, 1, 0])):
        with shoal.export.open(tmp_path / name) as export:
            assert export.table("t").pull(KEYS[[0, 500, 1000]]).ravel().tolist() == want


def test_a_table_that_an_export_between_left_out_is_known_upon_the_one_that_has_it(looked, tmp_path):
    with shoal.local(slots=4) as store:
        for name in "ab":
            store.table(name, optimizer=shoal.SGD()).assign(KEYS, np.ones(2000, np.float32))
        store.export(tmp_path / "0", track=True)
        for k in (1, 2, 3):
            for table in store.tables.values():
                table.assign(KEYS[k : k + 1], np.full(1, 9, np.float32))
            looked()
            names = {1: ["b"], 2: ["a"], 3: ["a", "b"]}[k]
            reported = store.export(tmp_path / str(k), since=tmp_path / str(k - 1), tables=names)
            assert {name: table.rows for name, table in reported.tables.items()} == [
                {"b": 1},
                {"a": 2},
                {"a": 1, "b": 2},
            ][k - 1]
            assert looked() < 30
    with shoal.export.open(tmp_path / "3") as export:
        for name in "ab":
            assert export.table(name).pull(KEYS[:5]).ravel().tolist() == [1, 9, 9, 9, 1]


def test_what_is_not_known_of_a_base_is_found_by_comparing_and_the_base_is_checked(looked, tmp_path):
    with shoal.local(slots=16) as store:
        table = store.table("t", optimizer=shoal.SGD())
        table.assign(KEYS, np.ones(2000, np.float32))
        store.save(tmp_path / "saved")
        store.export(tmp_path / "0", track=True)
        table.assign(KEYS[:5], np.full(5, 2, np.float32))
        store.load(tmp_path / "saved", track=True)  # which knows what has changed since the save
        table.assign(KEYS[5:7], np.full(2, 2, np.float32))
        looked()
        assert store.export(tmp_path / "1", since=tmp_path / "0").tables["t"].rows == 2
        assert looked() == 2000
        shutil.rmtree(tmp_path / "1")
        with shoal.local(slots=16) as other:  # another process's, of the same number, in the same place
            other.table("t", optimizer=shoal.SGD()).assign(KEYS, np.full(2000, 2, np.float32))
            other.export(tmp_path / "1", version=2)
        looked()
        assert store.export(tmp_path / "2", since=tmp_path / "1").tables["t"].rows == 1998
        assert looked() == 2000
        table.assign(KEYS[:1], np.full(1, 5, np.float32))
        path = next((tmp_path / "1").glob("*.frozen"))
        good = path.read_bytes()
        path.write_bytes(good[:-1] + b"x")
        with pytest.raises(shoal.CorruptionError, match="checksum"):
            store.export(tmp_path / "3", since=tmp_path / "1")
        path.write_bytes(good[:-1])  # and who knows what has changed finds that a file is cut short
        with pytest.raises(shoal.CorruptionError, match="bytes instead of"):
            store.export(tmp_path / "3", since=tmp_path / "2")
        path.write_bytes(good[:64] + np.random.default_rng(1).bytes(len(good) - 64))  # or that there are no rows
        table.assign(KEYS, table.pull(KEYS))
        with pytest.raises(shoal.CorruptionError, match=r"'t' of the base: line .* has no ascending hashes"):
            store.export(tmp_path / "3", since=tmp_path / "2")
        path.write_bytes(good)
        assert store.export(tmp_path / "3", since=tmp_path / "2").tables["t"].rows == 1  # nothing was forgotten
    with shoal.export.open(tmp_path / "3") as export:
        assert export.table("t").pull(KEYS[:7]).ravel().tolist() == [5, 1, 1, 1, 1, 2, 2]


def test_an_export_that_fails_is_no_base_and_what_had_changed_before_counts_still(looked, tmp_path, monkeypatch):
    with shoal.local(slots=16) as store:
        table = store.table("t", optimizer=shoal.SGD())
        table.assign(KEYS, np.ones(2000, np.float32))
        store.export(tmp_path / "0", track=True)
        table.assign(KEYS[:5], np.full(5, 2, np.float32))
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(OSError):  # noqa: PT011 - which one depends on the system
            store.export(tmp_path / "file", since=tmp_path / "0")
        with monkeypatch.context() as broken:

            def full(replacement, body):
                table.assign(KEYS[5:6], np.full(1, 2, np.float32))
                raise OSError(28, "no space left")

            broken.setattr(write.ManifestTransaction, "publish", full)
            for how in ({"since": tmp_path / "0"}, {"track": True}):
                with pytest.raises(OSError, match="no space"):
                    store.export(tmp_path / "1", **how)
        table.assign(KEYS[6:7], np.full(1, 2, np.float32))
        looked()
        assert store.export(tmp_path / "1", since=tmp_path / "0").tables["t"].rows == 7
        assert looked() < 40


def test_a_delta_is_of_one_moment_and_the_next_has_what_was_pushed_meanwhile(held, looked, tmp_path):
    with shoal.local(slots=16, threads=2) as store:
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        table.assign(KEYS, np.ones(2000, np.float32))
        held.go.set()
        store.export(tmp_path / "0", track=True)
        table.assign(KEYS[:200], np.full(200, 2, np.float32))
        held.came.clear()
        held.go.clear()
        one = threading.Thread(target=store.export, args=(tmp_path / "1",), kwargs={"since": tmp_path / "0"})
        one.start()
        assert held.came.wait(120)
        table.assign(KEYS[100:300], np.full(200, 3, np.float32))
        table.erase(KEYS[:10])
        table.assign(np.arange(5000, 5010, dtype=np.uint64), np.ones(10, np.float32))
        held.go.set()
        one.join(120)
        looked()
        assert store.export(tmp_path / "2", since=tmp_path / "1").tables["t"].rows == 220
        assert looked() < 1000
    asked = np.append(KEYS, np.arange(5000, 5010, dtype=np.uint64))
    with shoal.export.open(tmp_path / "1") as export:
        want = [2] * 200 + [1] * 1800 + [0] * 10
        assert export.table("t").pull(asked).ravel().tolist() == want
    with shoal.export.open(tmp_path / "2") as export:
        want = [0] * 10 + [2] * 90 + [3] * 200 + [1] * 1710
        assert export.table("t").pull(asked).ravel().tolist() == want


def test_a_delta_that_does_not_fit_is_refused_and_writes_nothing(tmp_path):
    with shoal.local(slots=4) as store:
        store.table("t", dim=2).assign(KEYS[:9], np.ones((9, 2), np.float32))
        store.export(tmp_path / "a", dtype="int8")
        with pytest.raises(ValueError, match="needs another directory"):
            store.export(tmp_path / "a", since=tmp_path / "a", overwrite=True)
        with pytest.raises(ValueError, match="has dtype 'int8', now it has dtype 'float32'"):
            store.export(tmp_path / "b", since=tmp_path / "a", dtype="float32")
        with pytest.raises(FileNotFoundError, match="there is no such export"):
            store.export(tmp_path / "b", since=tmp_path / "nowhere")
    with shoal.local(slots=8) as store:
        store.table("t", dim=2)
        with pytest.raises(ValueError, match="4 slots, this one has 8"):
            store.export(tmp_path / "b", since=tmp_path / "a")
    assert not (tmp_path / "b").exists()


def test_tables_may_come_with_a_delta(tmp_path):
    with shoal.local(slots=4) as store:
        store.table("a").assign(KEYS[:9], np.ones(9, np.float32))
        store.export(tmp_path / "1")
        store.table("b").assign(KEYS[:5], np.ones(5, np.float32))
        store.export(tmp_path / "2", since=tmp_path / "1", tables=["b"])
    with shoal.export.open(tmp_path / "2") as export:
        assert (len(export.table("a")), len(export.table("b"))) == (9, 5)


def test_a_moved_chain_is_read_where_it_is(tmp_path):
    with shoal.local(slots=4) as store:
        table = store.table("a", optimizer=shoal.SGD())
        table.assign(KEYS[:9], np.ones(9, np.float32))
        store.export(tmp_path / "x" / "1")
        table.assign(KEYS[:2], np.zeros(2, np.float32))
        store.export(tmp_path / "x" / "2", since=tmp_path / "x" / "1")
    shutil.move(tmp_path / "x", tmp_path / "y")
    with shoal.export.open(tmp_path / "y" / "2") as export:
        assert len(export.table("a")) == 7


def test_the_newest_of_a_folder_of_exports_is_opened_and_refreshed_to(tmp_path):
    with shoal.local(slots=4) as store:
        table = store.table("t", optimizer=shoal.SGD())
        table.assign(KEYS, np.ones(2000, np.float32))
        store.export(tmp_path / "9")
        with shoal.export.open(tmp_path) as export:
            assert export.version == 1
            assert not export.refresh()
            old = export.table("t")
            table.assign(KEYS[:5], np.full(5, 2, np.float32))
            store.export(tmp_path / "10", since=tmp_path / "9")
            (tmp_path / "11").mkdir()  # under way
            assert export.refresh()
            assert (export.version, export.now.directory.name) == (2, "10")
            assert export.table("t").pull(KEYS[:6]).ravel().tolist() == [2] * 5 + [1]
            assert old.pull(KEYS[:6]).ravel().tolist() == [1] * 6  # who holds a table goes on with it
            assert not export.refresh()


def test_a_damaged_new_version_leaves_the_old_one_in_place(tmp_path):
    with shoal.local(slots=4) as store:
        table = store.table("t", optimizer=shoal.SGD())
        table.assign(KEYS, np.ones(2000, np.float32))
        store.export(tmp_path / "1")
        with shoal.export.open(tmp_path) as export:
            table.assign(KEYS, np.full(2000, 2, np.float32))
            store.export(tmp_path / "2", since=tmp_path / "1")
            path = next((tmp_path / "2").glob("*.frozen"))
            good = path.read_bytes()
            path.write_bytes(good[:-1] + b"x")
            with pytest.raises(shoal.CorruptionError, match=path.name):
                export.refresh()
            assert (export.version, export.table("t").pull(KEYS[:1]).item()) == (1, 1.0)
            path.write_bytes(good)
            assert export.refresh()
            assert (export.version, export.table("t").pull(KEYS[:1]).item()) == (2, 2.0)


@pytest.mark.slow
def test_readers_go_on_while_versions_change_and_see_one_version_each(tmp_path):
    with shoal.local(slots=8) as store:
        tables = [store.table(name, optimizer=shoal.SGD()) for name in ("a", "b")]

        def publish(k):
            for table in tables:
                table.assign(KEYS, np.full(2000, k, np.float32))
            where = tmp_path / str(k)
            store.export(where, since=tmp_path / str(k - 1) if k % 4 else None)

        publish(0)
        seen, errors, stop = set(), [], threading.Event()
        with shoal.export.open(tmp_path, threads=1) as export:

            def read():
                try:
                    while not stop.is_set():
                        now = export.now
                        values = {float(v) for t in now.tables.values() for v in np.unique(t.pull(KEYS))}
                        assert values == {float(now.directory.name)}, values
                        seen.add(now.version)
                except BaseException as error:
                    errors.append(error)

            readers = [threading.Thread(target=read) for _ in range(3)]
            for reader in readers:
                reader.start()
            for k in range(1, 10):
                publish(k)
                assert export.refresh()
                assert export.version == k + 1
            stop.set()
            for reader in readers:
                reader.join()
        assert not errors
        assert seen


def test_an_export_that_is_watched_follows_what_is_published(tmp_path):
    with shoal.local(slots=4) as store:
        table = store.table("t", optimizer=shoal.SGD())
        table.assign(KEYS, np.ones(2000, np.float32))
        store.export(tmp_path / "1")
        swapped = threading.Event()
        with shoal.export.open(tmp_path) as export:
            failed = []
            export.watch(0.01, on_swap=lambda version: swapped.set(), on_error=failed.append)
            with pytest.raises(ValueError, match="watched"):
                export.watch(0.01)
            (tmp_path / "2").mkdir()
            (tmp_path / "2" / "manifest.json").write_text('{"crc32c":"00000000","body":{"format":"shoal export"}}')
            while not failed:
                time.sleep(0.01)
            assert isinstance(failed[0], shoal.CorruptionError)
            assert export.version == 1
            store.export(tmp_path / "2", since=tmp_path / "1", overwrite=True)
            assert swapped.wait(120)
            assert export.version == 2
        with pytest.raises(ValueError, match="seconds"):
            shoal.export.open(tmp_path).watch(0)
        with shoal.export.open(tmp_path) as export:
            with pytest.raises(TypeError, match=r"batch is a list: pass key_batch\(keys\)"):
                export.table("t").pull_unique([1])
            export.watch(10**30)  # at most what a thread can wait for
            assert "shoal-export-watch" in [thread.name for thread in threading.enumerate()]


def test_the_command_exports_checkpoints_and_inspect_tells_what_is_there(tmp_path, capsys):
    with shoal.local(slots=4) as store:
        for name in ("a", "b"):
            store.table(name, optimizer=shoal.SGD()).assign(
                KEYS, np.random.default_rng(1).normal(size=2000).astype("f")
            )
        store.save(tmp_path / "c1")
        store.tables["a"].assign(KEYS[:3], np.full(3, 9, np.float32))
        store.save(tmp_path / "c2")
    one, two = str(tmp_path / "1"), str(tmp_path / "2")
    assert (
        cli.main(["export", str(tmp_path / "c1"), "--output", one, "--table", "a=int8", "--table", "b", "--quiet"]) == 0
    )
    assert cli.main(["export", str(tmp_path / "c2"), "--output", two, "--since", one]) == 0
    assert "3 rows" in capsys.readouterr().out
    assert cli.main(["inspect", two]) == 0
    reported = capsys.readouterr().out
    for part in (
        "version 2, delta of ../1",
        "version 1, full",
        "'a': 3 rows, dim 1, int8",
        "every checksum matches",
    ):
        assert part in reported
    with shoal.export.open(two) as export:
        assert export.table("a").pull(KEYS[:3]).ravel() == pytest.approx([9, 9, 9], abs=0.05)
    assert cli.main(["export", str(tmp_path / "c1"), "--output", one, "--table", "z", "--overwrite"]) == 2
    assert "no table 'z'" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "nowhere"), "--output", one, "--overwrite"]) == 2
