"""Deltas: a chain comes to the bits of a full save of the same moment, whatever happened between its links."""

from __future__ import annotations

import json
import shutil

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import shoal
from oracle import checkpoint as document
from shoal import checkpoint
from shoal.cli import main
from shoal.storage import transaction
from shoal.storage.local import LocalDir
from snapshots import RULES, Script, contents
from tiers import rounds

KEYS = np.arange(5000, dtype=np.uint64)


def ones(n):
    return np.ones(n, np.float32)


def filled(store, name="t", **how):
    table = store.table(name, **({"optimizer": shoal.SGD(lr=1.0)} | how))
    table.assign(KEYS, ones(len(KEYS)))
    return table


@pytest.fixture
def chain(tmp_path):
    """A full save and two deltas, and the store that they are of."""
    with shoal.local(slots=16, threads=2) as store:
        table = filled(store)
        store.save(tmp_path / "0", track=True)
        table.push(KEYS[:50], ones(50)).result()
        table.erase(KEYS[4000:])
        store.save(tmp_path / "1", since=tmp_path / "0")
        table.push(np.array([0, 2**64 - 1], np.uint64), ones(2)).result()
        store.save(tmp_path / "2", since=tmp_path / "1")
        yield store


def size(folder):
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix == ".slots")


def same_as_now(store, folder, **how):
    """Whether a checkpoint loads into what the store has."""
    with shoal.local(**({"slots": 64} | how)) as other:
        other.load(folder)
        assert set(other.tables) == set(store.tables)
        for name, table in store.tables.items():
            loaded = other.tables[name]
            assert (len(loaded), loaded.stats().step) == (len(table), table.stats().step)
            for (keys, rows), (more_keys, more_rows) in zip(table.items(), loaded.items(), strict=True):
                np.testing.assert_array_equal(keys, more_keys)
                np.testing.assert_array_equal(rows.view(np.uint32), more_rows.view(np.uint32))
            assert loaded.shard.verify() == ""


@pytest.mark.parametrize("slots", [2, 16, 1024])
def test_a_chain_loads_into_any_cut(chain, slots, tmp_path):
    same_as_now(chain, tmp_path / "2", slots=slots, threads=2)


def test_every_link_of_a_chain_is_a_checkpoint_of_its_moment(chain, tmp_path):
    with shoal.local() as store:
        for link, rows, value in (("2", 4001, -1), ("0", 5000, 1), ("1", 4000, 0)):
            store.load(tmp_path / link)
            assert (len(store.tables["t"]), store.tables["t"].pull(KEYS[:1])[0, 0]) == (rows, value)


def test_a_reader_made_from_the_document_alone_reads_chains(tmp_path):
    with shoal.local(slots=8) as store:
        rules = {"admit": shoal.AfterCount(2), "expire": shoal.TimeToLive(3)}
        plain = store.table("plain", dim=3, optimizer=shoal.Adagrad())
        waits = store.table("waits", dim=1, optimizer=shoal.FTRL(), **rules)
        rng = np.random.default_rng(4)
        for link in range(4):
            keys = rng.integers(0, 300, 200 if link % 2 == 0 else 5, np.uint64)
            for table in (plain, waits):
                table.push(keys, rng.standard_normal((len(keys), table.dim)).astype(np.float32)).result()
            plain.erase(np.arange(link * 10, link * 10 + 10, dtype=np.uint64))
            store.tick()
            store.sweep()
            store.save(tmp_path / str(link), **({"since": tmp_path / str(link - 1)} if link else {"track": True}))
        filters: dict[str, dict[int, bytes]] = {}
        for name, columns in document.read(tmp_path / "3", filters).items():
            hashes = columns["hash"].ravel().astype(np.uint64)
            assert len(hashes) == len(store.tables[name])
            for column, values in store.tables[name].state(shoal.data.unmix(hashes)).items():
                np.testing.assert_array_equal(columns[column].reshape(values.shape), values)
        shard = waits.shard
        for slot in range(8):
            assert filters["waits"].get(slot, b"") == shard.filter(slot).tobytes()


def test_a_delta_is_as_large_as_what_has_changed(chain, tmp_path):
    assert size(tmp_path / "2") < size(tmp_path / "1") < size(tmp_path / "0")
    manifest = checkpoint.read_manifest(tmp_path / "2")
    (table,) = manifest.tables
    assert (manifest.version, table.delta, table.total) == (3, True, 4001)
    assert 2 <= table.rows < 20
    chain.save(tmp_path / "3", since=tmp_path / "2")  # nothing has changed
    assert size(tmp_path / "3") == 0
    same_as_now(chain, tmp_path / "3")


def test_a_full_save_with_tracking_has_the_version_and_bytes_of_one_without(chain, tmp_path):
    chain.save(tmp_path / "plain")
    chain.save(tmp_path / "base", track=True)
    assert contents(tmp_path / "plain") == contents(tmp_path / "base")
    assert checkpoint.read_manifest(tmp_path / "base").version == 1


def test_a_save_without_tracking_leaves_the_chain_as_it_was(chain, tmp_path):
    chain.tables["t"].push(KEYS[100:200], ones(100)).result()
    chain.save(tmp_path / "aside")
    chain.save(tmp_path / "3", since=tmp_path / "2")
    same_as_now(chain, tmp_path / "3")


def test_a_delta_that_fails_is_no_link_and_the_next_one_has_it_all(chain, tmp_path, monkeypatch):
    table = chain.tables["t"]
    table.push(KEYS[100:200], ones(100)).result()
    real = LocalDir.publish

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalDir, "publish", full_disk)
    with pytest.raises(OSError, match="No space"):
        chain.save(tmp_path / "3", since=tmp_path / "2")
    with pytest.raises(OSError, match="No space"):
        chain.save(tmp_path / "3", track=True)
    monkeypatch.setattr(LocalDir, "publish", real)
    table.push(KEYS[200:300], ones(100)).result()
    chain.save(tmp_path / "3", since=tmp_path / "2")
    same_as_now(chain, tmp_path / "3")


def test_a_load_goes_on_with_the_chain_where_changes_are_tracked(chain, tmp_path):
    with shoal.local(slots=16) as store:
        store.load(tmp_path / "1", track=True)
        store.tables["t"].push(KEYS[:10], ones(10)).result()
        store.save(tmp_path / "fork", since=tmp_path / "1")
        assert size(tmp_path / "fork") < size(tmp_path / "1")
        same_as_now(store, tmp_path / "fork")


def test_tables_that_came_later_are_whole_in_a_delta_and_others_may_be_left_out(chain, tmp_path):
    filled(chain, "late", dim=1, optimizer=shoal.FTRL())
    chain.save(tmp_path / "3", since=tmp_path / "2")
    chain.tables["late"].push(KEYS[:9], ones(9)).result()
    chain.save(tmp_path / "4", since=tmp_path / "3")
    assert [table.delta for table in checkpoint.read_manifest(tmp_path / "3").tables] == [True, False]
    assert [table.delta for table in checkpoint.read_manifest(tmp_path / "4").tables] == [True, True]
    same_as_now(chain, tmp_path / "4")
    chain.save(tmp_path / "5", since=tmp_path / "4", tables=["late"])
    with shoal.local() as store:
        store.load(tmp_path / "5")
        assert set(store.tables) == {"late"}


def test_what_no_delta_can_be_of_is_refused_and_nothing_is_written(chain, tmp_path):
    def refused(what, out="new", **how):
        with pytest.raises(ValueError, match=what):
            chain.save(tmp_path / out, overwrite=True, **how)
        assert not (tmp_path / "new").exists()

    refused(r"the changes of table 't' since the save in .*/1 are not known", since=tmp_path / "1")
    refused("is part of the chain that ends with", out="2", since=tmp_path / "2")
    refused("is part of the chain that ends with", out="0", since=tmp_path / "2")
    with pytest.raises(FileNotFoundError, match=r"there is no such checkpoint: '.*/no'"):
        chain.save(tmp_path / "new", since=tmp_path / "no")
    with shoal.local(slots=32) as store:
        store.load(tmp_path / "2", track=True)
        with pytest.raises(ValueError, match="has 16 slots and this store 32"):
            store.save(tmp_path / "new", since=tmp_path / "2")
    chain.load(tmp_path / "2")  # untracked: other rows have taken the place of those that were watched
    refused("are not known", since=tmp_path / "2")
    same_as_now(chain, tmp_path / "2")


def test_a_chain_may_be_moved_together_and_says_what_is_missing_or_another(chain, tmp_path):
    (tmp_path / "moved").mkdir()
    for link in "012":
        shutil.copytree(tmp_path / link, tmp_path / "moved" / link)
    same_as_now(chain, tmp_path / "moved" / "2")
    shutil.rmtree(tmp_path / "moved" / "0")
    with shoal.local() as store:
        with pytest.raises(shoal.CorruptionError, match=r"moved/0/manifest.json is missing: the delta in .*/1"):
            store.load(tmp_path / "moved" / "2")
        chain.save(tmp_path / "moved" / "0")
        with pytest.raises(shoal.CorruptionError, match=r"moved/0 is not the checkpoint that .*moved/1 is a delta of"):
            store.load(tmp_path / "moved" / "2")
        assert not store.tables


@pytest.mark.parametrize("link", ["0", "1", "2"])
def test_every_byte_of_a_chain_is_checked(chain, link, tmp_path):
    for path in sorted((tmp_path / link).iterdir()):
        whole = path.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 20)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            with pytest.raises(shoal.CorruptionError, match=str(tmp_path / link)):
                checkpoint.verify(tmp_path / "2")
            if at % 3 == 0:
                with shoal.local() as store, pytest.raises(shoal.CorruptionError):
                    store.load(tmp_path / "2")
        path.write_bytes(whole)
    checkpoint.verify(tmp_path / "2")


def test_compacting_gives_the_bytes_of_a_full_save(chain, tmp_path, capsys):
    chain.save(tmp_path / "whole")
    shoal.checkpoint.compact(tmp_path / "2", tmp_path / "compacted")
    assert contents(tmp_path / "compacted") == contents(tmp_path / "whole")
    assert main(["compact", str(tmp_path / "2"), "--output", str(tmp_path / "by command"), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["links"], reported["rows"]) == (3, 4001)
    assert contents(tmp_path / "by command") == contents(tmp_path / "whole")
    for link in "012":
        with pytest.raises(ValueError, match="is part of the chain"):
            shoal.checkpoint.compact(tmp_path / "2", tmp_path / link)
    for link in "012":
        shutil.rmtree(tmp_path / link)
    same_as_now(chain, tmp_path / "compacted")


def test_inspect_tells_of_what_a_delta_is(chain, tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "2")]) == 0
    reported = capsys.readouterr().out
    assert "the changes since ../1" in reported
    assert "rows of 4,001" in reported


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32),
    rules=st.sampled_from(list(RULES)),
    dim=st.sampled_from([1, 3, 20]),
    slots=st.sampled_from([2, 64]),
    links=st.integers(1, 4),
)
@settings(max_examples=rounds(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_chain_comes_to_a_full_save(seed, rules, dim, slots, links, tmp_path):
    for left in tmp_path.iterdir():
        shutil.rmtree(left)
    with shoal.local(threads=2, slots=slots) as store, pytest.MonkeyPatch.context() as patch:
        optimizer = shoal.FTRL() if dim == 1 else shoal.Adagrad()
        for name in ("a", "b"):
            store.table(name, dim=dim, optimizer=optimizer, init=shoal.Uniform(0.1, seed=3), **RULES[rules])
        script = Script(store, seed)
        real = transaction.DataFileWriter.append

        def append(writer, data):
            if script.rng.integers(8) == 0:
                script.step()
            return real(writer, data)

        patch.setattr("shoal.checkpoint.write.TASKS_AHEAD", 0)
        for link in range(links + 1):
            for _ in range(int(script.rng.integers(4))):
                script.step()
            store.save(tmp_path / f"full {link}")
            patch.setattr(transaction.DataFileWriter, "append", append)
            before = {"track": True} if link == 0 else {"since": tmp_path / str(link - 1)}
            store.save(tmp_path / str(link), **before)
            patch.setattr(transaction.DataFileWriter, "append", real)
            shoal.checkpoint.compact(tmp_path / str(link), tmp_path / f"compacted {link}", threads=2)
            assert contents(tmp_path / f"compacted {link}") == contents(tmp_path / f"full {link}")
