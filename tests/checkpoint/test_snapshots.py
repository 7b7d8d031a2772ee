"""Saves beside changes: what is written is of one moment, and nobody waits for the disk."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import shoal
from shoal.storage import transaction
from snapshots import (
    RULES,
    Script,
    contents,
)
from tiers import rounds

KEYS = np.arange(4000, dtype=np.uint64)
ONES = np.ones(len(KEYS), np.float32)


def filled(store, name="t", **how):
    table = store.table(name, optimizer=shoal.SGD(lr=1.0), **how)
    table.assign(KEYS, ONES)
    return table


def value(folder, name="t"):
    with shoal.local(slots=8) as store:
        store.load(folder)
        rows = store.tables[name].pull(KEYS)
        assert len(store.tables[name]) == len(KEYS)
        assert rows.min() == rows.max()
        return float(rows[0, 0])


def test_changes_go_on_while_a_save_waits_for_the_disk_and_are_not_in_it(held, tmp_path):
    with shoal.local(slots=16, threads=2) as store:
        tables = [filled(store, name) for name in ("t", "u")]
        save = store.save(tmp_path / "c", wait=False)
        assert held.came.wait(120)
        for table in tables:
            table.push(KEYS, ONES * 2).result()
            table.assign(np.arange(10**6, 10**6 + 9000, dtype=np.uint64), np.ones(9000, np.float32))
            table.erase(KEYS[::2])
            assert table.decay(0.5) == 11000
        assert not save.done()
        with pytest.raises(shoal.DeadlineExceededError, match="the save was not done after"):
            save.result(0.01)
        held.go.set()
        save.result(120)
        assert save.done()
        assert [table.shard.verify() for table in tables] == ["", ""]
    assert [value(tmp_path / "c", name) for name in ("t", "u")] == [1, 1]


def test_a_load_does_not_wait_for_a_save_and_what_is_saved_are_the_rows_of_before(held, tmp_path):
    with shoal.local(slots=16) as store:
        table = filled(store)
        held.go.set()
        store.save(tmp_path / "ones")
        table.assign(KEYS, ONES * 5)
        held.go.clear()
        held.came.clear()
        save = store.save(tmp_path / "fives", wait=False)
        assert held.came.wait(120)
        store.load(tmp_path / "ones")
        assert table.pull(KEYS).max() == 1
        held.go.set()
        save.result(120)
    assert value(tmp_path / "fives") == 5


def test_saves_come_one_after_the_other_each_of_its_own_moment(held, tmp_path):
    with shoal.local(slots=16) as store:
        table = filled(store)
        first = store.save(tmp_path / "1", wait=False)
        assert held.came.wait(120)
        table.assign(KEYS, ONES * 2)
        second = threading.Thread(target=lambda: store.save(tmp_path / "2"))
        second.start()
        second.join(0.1)
        assert second.is_alive()  # its moment comes when the first is done
        table.assign(KEYS, ONES * 3)
        held.go.set()
        second.join(120)
        assert first.done()
        table.assign(KEYS, ONES * 4)
    assert (value(tmp_path / "1"), value(tmp_path / "2")) == (1, 3)


def test_a_background_save_that_fails_is_told_to_who_waits_or_else_by_close(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    store = shoal.local(slots=16)
    table = filled(store)
    heard = store.save(tmp_path / "file", wait=False)
    with pytest.raises(OSError):  # noqa: PT011 - which one depends on the system
        heard.result(120)
    table.push(KEYS, ONES).result()  # nothing is held any more
    store.save(tmp_path / "fine")
    store.save(tmp_path / "file", wait=False)
    with pytest.raises(OSError):  # noqa: PT011
        store.close()
    store.close()
    assert value(tmp_path / "fine") == 0


def test_a_store_that_is_closed_waits_for_its_saves(held, tmp_path):
    store = shoal.local(slots=16)
    filled(store)
    store.save(tmp_path / "c", wait=False)
    assert held.came.wait(120)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    held.go.set()
    closing.join(120)
    assert value(tmp_path / "c") == 1


def test_rows_that_change_faster_than_they_are_written_end_the_save_and_not_the_push(monkeypatch, tmp_path):
    with shoal.local(slots=16) as store:
        table = filled(store)
        store.save(tmp_path / "c")
        shard = table.shard
        with pytest.raises(TypeError):
            shard.snapshot(0, 1000)
        with pytest.raises(ValueError, match="no snapshot whole"):
            shard.snapshot(0, "whole")
        shard.pause_writers()
        snapshot = shard.snapshot(0, "plain", 1000)
        shard.resume_writers()
        for _ in range(3):
            table.push(KEYS, ONES).result()
        with pytest.raises(shoal.errors.SnapshotLostError, match="faster than they were written"):
            snapshot.section(0)
        with pytest.raises(ValueError, match="one save at a time"):
            shard.snapshot()
        snapshot.close()
        with pytest.raises(ValueError, match="taken already"):
            snapshot.section(1)
        with pytest.raises(ValueError, match="no slot 16"):
            snapshot.section(16)
        assert table.pull(KEYS).max() == -2
        store.save(tmp_path / "d")
    assert value(tmp_path / "d") == -2


@given(
    seed=st.integers(0, 2**32),
    rules=st.sampled_from(list(RULES)),
    dim=st.sampled_from([1, 3, 20]),
    slots=st.sampled_from([2, 16, 64]),
    memory=st.sampled_from([None, 3_000_000]),
)
@settings(max_examples=rounds(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_save_beside_any_changes_has_the_bytes_of_one_without(seed, rules, dim, slots, memory, tmp_path):
    with shoal.local(threads=2, slots=slots, memory=memory) as store, pytest.MonkeyPatch.context() as patch:
        for name in ("a", "b"):
            optimizer = shoal.FTRL() if dim == 1 else shoal.Adagrad()
            store.table(name, dim=dim, optimizer=optimizer, init=shoal.Uniform(0.1, seed=3), **RULES[rules])
        script = Script(store, seed)
        for _ in range(5):
            script.step()
        store.save(tmp_path / "still", overwrite=True)
        real = transaction.DataFileWriter.append
        changed = []

        def append(writer, data):
            if len(changed) < 10:
                changed.append(None)
                script.step()
            return real(writer, data)

        patch.setattr(transaction.DataFileWriter, "append", append)
        patch.setattr("shoal.checkpoint.write.TASKS_AHEAD", 0)
        patch.setattr("shoal.checkpoint.write._TASK_BYTES", 1)
        store.save(tmp_path / "moving", overwrite=True)
        assert contents(tmp_path / "moving") == contents(tmp_path / "still")
        assert all(table.shard.verify() == "" for table in store.tables.values())
