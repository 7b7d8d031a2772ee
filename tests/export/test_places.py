"""Exports that are elsewhere: the same bytes, fetched once for all readers of a machine, checked, removed in time."""

from __future__ import annotations

import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from cluster_fakes import Wire
from places import BUCKET, options
from shoal import cli
from shoal.errors import CorruptionError, SaveConflictError, StorageError
from shoal.export import cache
from shoal.storage.base import StorageDir
from shoal.storage.local import LocalDir
from shoal.storage.object_store import RemoteDir
from shoal.storage.open import open_dir

KEYS = np.arange(500, dtype=np.uint64)


class There:
    """A folder of exports on S3, and a cache."""

    def __init__(self, s3: str, tmp_path: Path) -> None:
        self.how = options(s3) | {"skip_instance_cache": False}  # connections take longer than what is sent
        self.url = f"s3://{BUCKET}/{tmp_path.name}/serve"
        self.cache = tmp_path / "cache"

    def becomes_the_default(self, monkeypatch: Any) -> None:
        """Have the commands find the object store without options."""
        import s3fs

        monkeypatch.setenv("AWS_ENDPOINT_URL", self.how["endpoint_url"])
        s3fs.S3FileSystem.clear_instance_cache()  # another test may have made one with the default of then

    def at(self, name: str) -> str:
        return f"{self.url}/{name}"

    def place(self, name: str) -> StorageDir:
        return open_dir(self.at(name), self.how)

    def open(self, name: str = "", **more: Any) -> shoal.export.Export:
        where = self.at(name) if name else self.url
        return shoal.export.open(where, cache=self.cache, storage_options=self.how, threads=1, **more)

    def export(self, store: shoal.Store, name: str, since: str | None = None, **more: Any) -> Any:
        reported = None if since is None else self.at(since)
        return store.export(
            self.at(name), since=reported, cache=self.cache, storage_options=self.how, **more, overwrite=True
        )

    def copies(self) -> list[Path]:
        return sorted(path for path in self.cache.glob("*/*") if path.is_dir())

    def data_file(self, name: str) -> str:
        return next(file for file in self.place(name).names() if file.endswith(".frozen"))


@pytest.fixture
def there(s3: str, tmp_path: Path) -> There:
    return There(s3, tmp_path)


def filled(store: shoal.Store, value: float) -> shoal.Table:
    table = store.table("t", dim=2, optimizer=shoal.SGD())
    table.assign(KEYS, np.full((len(KEYS), 2), value, np.float32))
    return table


def value(export: shoal.export.Export) -> float:
    rows = export.table("t").pull(KEYS)
    assert np.all(rows == rows[0, 0])
    return float(rows[0, 0])


def put(place: StorageDir, name: str, data: bytes) -> None:
    place.remove(name)
    with place.create(name) as file:
        file.write(data)


# ---- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_export_on_s3_has_the_bytes_of_one_on_a_disk_and_is_read_as_that(there: There, tmp_path: Path) -> None:
    with shoal.local(slots=4) as store:
        table = store.table("t", dim=3)
        table.assign(KEYS, np.random.default_rng(1).normal(size=(500, 3)).astype("f"))
        reported = there.export(store, "1", dtype="float16")
        store.export(tmp_path / "here", dtype="float16")
        assert reported.tables["t"].rows == 500
    here = sorted(tmp_path.glob("here/*.frozen"))
    assert [path.read_bytes() for path in here] == [there.place("1").read(there.data_file("1"))]
    with there.open("1") as export, shoal.export.open(tmp_path / "here") as same:
        assert (export.version, export.now.directory.parent.parent) == (1, there.cache)
        np.testing.assert_array_equal(export.table("t").pull(KEYS), same.table("t").pull(KEYS))


@pytest.mark.slow
def test_files_are_fetched_once_for_all_who_open_an_export(there: There) -> None:
    with shoal.local(slots=4) as store:
        filled(store, 1)
        there.export(store, "1")
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: there.open(), range(4)))
    assert len(there.copies()) == 1
    there.place("1").remove(there.data_file("1"))  # nobody asks for it again
    opened.append(there.open())
    assert [value(export) for export in opened] == [1] * 5
    for export in opened:
        export.close()


@pytest.mark.slow
def test_a_chain_on_s3_is_followed_and_copies_that_it_does_not_need_are_removed(there: There) -> None:
    with shoal.local(slots=4) as store:
        table = filled(store, 1)
        there.export(store, "1")
        with there.open() as export:
            assert value(export) == 1
            assert not export.refresh()
            old = export.table("t")
            table.assign(KEYS[:9], np.full((9, 2), 3, np.float32))
            assert there.export(store, "2", "1").tables["t"].rows == 9
            before = len(there.copies())
            assert export.refresh()
            assert (export.version, export.now.storage_dir.name) == (2, "2")
            assert export.table("t").pull(KEYS[:10])[:, 0].tolist() == [3] * 9 + [1]
            assert (before, len(there.copies())) == (1, 2)
            table.assign(KEYS, np.full((500, 2), 4, np.float32))
            there.export(store, "3")
            assert export.refresh()
            assert (value(export), len(there.copies())) == (4, 1)
            assert float(old.pull(KEYS[:1])[0, 0]) == 1  # who holds a table goes on with it
            there.export(store, "3")  # in the same place
            assert export.refresh()
            assert (export.version, len(there.copies())) == (4, 1)


@pytest.mark.slow
def test_a_manifest_that_is_the_same_is_not_read_again(there: There, monkeypatch: pytest.MonkeyPatch) -> None:
    with shoal.local(slots=4) as store:
        filled(store, 1)
        for name in ("1", "2", "3"):
            there.export(store, name)
    read: list[str] = []
    real = RemoteDir.read
    with there.open() as export:
        monkeypatch.setattr(RemoteDir, "read", lambda place, name: read.append(place.name) or real(place, name))
        assert not export.refresh()
    assert read == []


@pytest.mark.slow
def test_an_export_that_is_watched_on_s3_follows_what_is_published(there: There) -> None:
    with shoal.local(slots=4) as store:
        table = filled(store, 1)
        there.export(store, "1")
        swapped = threading.Event()
        with there.open() as export:
            export.watch(0.05, on_swap=lambda version: swapped.set())
            table.assign(KEYS, np.full((500, 2), 2, np.float32))
            there.export(store, "2", "1")
            assert swapped.wait(120)
            assert value(export) == 2


@pytest.mark.slow
def test_the_commands_take_urls(there: There, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    there.becomes_the_default(monkeypatch)
    with shoal.local(slots=4) as store:
        filled(store, 1)
        store.save(tmp_path / "c")
        filled(store, 2)
        store.save(f"{there.url}-checkpoint", storage_options=there.how)
    copies = ["--cache", str(there.cache)]
    assert cli.main(["export", str(tmp_path / "c"), "--output", there.at("1"), *copies]) == 0
    assert (
        cli.main(["export", f"{there.url}-checkpoint", "--output", there.at("2"), "--since", there.at("1"), *copies])
        == 0
    )
    assert cli.main(["compact", there.url, "--output", there.at("3"), *copies]) == 0
    assert "500 rows" in capsys.readouterr().out
    assert cli.main(["inspect", there.at("2"), *copies]) == 0
    assert "version 1, full" in capsys.readouterr().out
    with there.open() as export:
        assert (export.version, value(export)) == (3, 2)


@pytest.mark.slow
def test_a_model_is_served_from_s3(there: There, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from shoal.serve import ServedModel

    there.becomes_the_default(monkeypatch)
    with shoal.LogisticRegression() as model:
        for version in ("1", "2"):
            model.table.assign(KEYS, np.full(500, float(version), np.float32))
            model.save(tmp_path / version)
    assert cli.main(["export", str(tmp_path / "1"), "--output", there.at("1")]) == 0
    with ServedModel(there.url, cache=there.cache, storage_options=there.how) as served:
        assert served.now.version == 1
        assert served.now.exported.directory.is_relative_to(there.cache)
        assert cli.main(["export", str(tmp_path / "2"), "--output", there.at("2")]) == 0
        assert served.reload()
        assert served.now.version == 2


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["here", "there"])
def test_of_two_exports_that_race_one_is_told_and_the_other_is_whole(
    there: There, tmp_path: Path, kind: str, monkeypatch: Any
) -> None:
    where, how = (tmp_path / "x", None) if kind == "here" else (there.at("x"), there.how)
    both = threading.Barrier(2)
    place = LocalDir if kind == "here" else RemoteDir
    real = place.publish

    def publish(self: StorageDir, name: str, data: bytes, **more: Any) -> None:
        both.wait(120)
        real(self, name, data, **more)

    monkeypatch.setattr(place, "publish", publish)

    def export(number: int) -> Exception | None:
        with shoal.local(slots=4) as store:
            filled(store, number)
            try:
                store.export(where, storage_options=how)
            except SaveConflictError as error:
                return error
            return None

    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(export, [1, 2]))
    assert sorted(error is None for error in errors) == [False, True]
    with shoal.export.open(where, cache=there.cache, storage_options=how) as export:
        assert value(export) == 1 + errors.index(None)
    assert len(open_dir(where, how).names()) == 2


@pytest.mark.slow
def test_what_is_damaged_or_missing_there_is_named_and_no_copy_is_kept(there: There) -> None:
    with shoal.local(slots=4) as store:
        filled(store, 1)
        there.export(store, "1")
    place, name = there.place("1"), there.data_file("1")
    good = place.read(name)
    for data, message in (
        (good[:-1] + b"x", "is damaged: the checksum"),
        (good[:-64], f"bytes instead of {len(good)}"),
        (None, "is missing"),
    ):
        place.remove(name)
        if data is not None:
            put(place, name, data)
        with pytest.raises(CorruptionError, match=f"{there.at('1')}/{name}.*{message}"):
            there.open(verify=False)  # what is fetched is always checked
        assert not there.copies()
    put(place, name, good)
    there.open().close()


@pytest.mark.slow
def test_a_copy_that_is_damaged_is_fetched_again(there: There) -> None:
    with shoal.local(slots=4) as store:
        filled(store, 1)
        there.export(store, "1")
    there.open().close()
    (copy,) = there.copies()
    path = next(copy.glob("*.frozen"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with there.open() as export:
        assert value(export) == 1
    assert len(there.copies()) == 1


@pytest.mark.slow
def test_the_files_of_a_model_are_fetched_and_checked_too(there: There) -> None:
    from shoal.export.write import TableSource, UnsynchronizedTables, write_export

    with shoal.local(slots=4) as store:
        table = filled(store, 1)
        given = [TableSource(table.spec, 500, table.shard.read_slot)]
        write_export(
            there.place("1"),
            UnsynchronizedTables(given, 4),
            model={"kind": "x", "table": "t", "more_tables": []},
            extras={"tower.pt": b"dense"},
        )
    name = next(file for file in there.place("1").names() if file.endswith("tower.pt"))
    with there.open() as export:
        assert export.now.layers.extra("tower.pt") == b"dense"
        (export.now.directory / name).write_bytes(b"Dense")
    with there.open() as export:
        assert export.now.layers.extra("tower.pt") == b"dense"
    shoal.export.compact(there.url, there.at("2"), cache=there.cache, storage_options=there.how)
    with there.open("2") as export:
        assert (export.now.model, export.now.layers.extra("tower.pt")) == (
            {"kind": "x", "table": "t", "more_tables": []},
            b"dense",
        )
    put(there.place("2"), next(file for file in there.place("2").names() if file.endswith("tower.pt")), b"Dense")
    for copy in there.copies():
        shutil.rmtree(copy)
    with pytest.raises(CorruptionError, match=r"tower\.pt is damaged"):
        there.open("2")


@pytest.mark.slow
def test_a_connection_that_is_lost_while_fetching_leaves_no_copy(there: There, wire: Wire) -> None:
    with shoal.local(slots=4) as store:
        filled(store, 1)
        there.export(store, "1")
    cut = options(wire.address.replace("tcp", "http"))
    real = cache._copy

    def copy(*how: Any) -> None:
        wire.close()
        real(*how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_copy", copy)
        with pytest.raises(StorageError, match=r"\.frozen"):
            shoal.export.open(there.at("1"), cache=there.cache, storage_options=cut)
    assert not there.copies()
    there.open().close()


@pytest.mark.slow
def test_what_a_killed_process_left_and_what_nobody_opens_is_removed_and_what_is_held_stays(there: There) -> None:
    with shoal.local(slots=4) as store:
        for name in ("1", "2", "3"):
            filled(store, float(name))
            there.export(store, name)
    held = there.open("1")
    there.open("2").close()
    group = there.copies()[0].parent
    (group / ".fetch-00000000").mkdir()
    (group / ".fetch-00000000" / "x").write_bytes(b"x")
    long_ago = time.time() - 2 * 86400
    for copy in there.copies():
        os.utime(copy, (long_ago, long_ago))
    with there.open("3") as export:
        assert value(export) == 3
    assert len(there.copies()) == 2
    assert held.now.directory in there.copies()
    held.close()


def test_a_cache_that_cannot_be_written_is_named(there: There, tmp_path: Path) -> None:
    with shoal.local(slots=4) as store:
        filled(store, 1)
        there.export(store, "1")
    (tmp_path / "file").write_text("")
    there.cache = tmp_path / "file" / "cache"
    with pytest.raises(StorageError, match=r"cannot be kept in .*--cache"):
        there.open()


def test_a_delta_must_stand_where_its_base_does(there: There, tmp_path: Path) -> None:
    with shoal.local(slots=4) as store:
        filled(store, 1)
        there.export(store, "1")
        with pytest.raises(ValueError, match="no path from"):
            store.export(tmp_path / "2", since=there.at("1"), cache=there.cache, storage_options=there.how)
    assert not (tmp_path / "2").exists()


# ---- compacting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("dim", [1, 5])
def test_a_compacted_chain_has_the_bytes_of_a_whole_export(tmp_path: Path, dtype: str, dim: int) -> None:
    rng = np.random.default_rng(5)
    with shoal.local(slots=8) as store:
        table = store.table("t", dim=dim, optimizer=shoal.SGD(), init=shoal.Uniform(0.1, seed=3))
        store.table("empty")
        for k in range(4):
            table.assign(
                KEYS[: 400 + k], rng.normal(size=(400 + k, dim)).astype("f") if k == 0 else table.pull(KEYS[: 400 + k])
            )
            table.erase(KEYS[20 * k : 20 * k + 10])
            table.assign(KEYS[50 * k : 50 * k + 30], rng.normal(size=(30, dim)).astype("f"))
            store.export(tmp_path / str(k), dtype=dtype, since=tmp_path / str(k - 1) if k else None)
        store.export(tmp_path / "elsewhere" / "whole", dtype=dtype)
        want = table.pull(KEYS)
    shoal.export.compact(tmp_path, tmp_path / "out", threads=2)
    with shoal.export.open(tmp_path) as export:  # the compacted one is the newest
        assert (export.version, export.now.storage_dir.name, len(export.now.layers.mapped)) == (5, "out", 1)
        form = export.table("t").form
        got = export.table("t").pull(KEYS)
    with shoal.export.open(tmp_path / "elsewhere") as export:
        same, rows = export.table("t").pull(KEYS), export.table("t").form.rows
    assert np.abs(got - want).max() <= form.largest_error + 1e-7
    if dtype == "int8":
        return
    np.testing.assert_array_equal(got, same)
    assert form.rows == rows
    files = [sorted(p.read_bytes() for p in (tmp_path / f).glob("*.frozen")) for f in ("out", "elsewhere/whole")]
    assert files[0] == files[1]


def test_a_compacted_model_is_still_one_and_a_chain_does_not_replace_itself(tmp_path: Path, capsys: Any) -> None:
    with shoal.LogisticRegression() as model:
        for version in (1, 2):
            model.table.assign(KEYS, np.full(500, version, np.float32))
            model.save(tmp_path / "m", overwrite=True)
            more = ["--since", str(tmp_path / "s" / "1")] if version == 2 else []
            assert cli.main(["export", str(tmp_path / "m"), "--output", str(tmp_path / "s" / str(version)), *more]) == 0
    with pytest.raises(ValueError, match="part of the chain"):
        shoal.export.compact(tmp_path / "s", tmp_path / "s" / "1")
    for threads, error in ((float("nan"), TypeError), (1.5, TypeError), (0, ValueError)):
        with pytest.raises(error, match=r"threads is (nan|1\.5|0): pass "):
            shoal.export.compact(tmp_path / "s", tmp_path / "x", threads=threads)
    capsys.readouterr()
    assert cli.main(["compact", str(tmp_path / "s" / "2"), "--output", str(tmp_path / "s" / "3")]) == 0
    assert "of 2 exports" in capsys.readouterr().out
    with shoal.export.open(tmp_path / "s") as export:
        assert export.version == 3
        assert export.now.model["kind"] == "logistic regression"
        assert np.all(export.table(export.now.model["table"]).pull(KEYS) == 2)
    with pytest.raises(FileNotFoundError, match="no such export"):
        shoal.export.compact(tmp_path / "nowhere", tmp_path / "x")
