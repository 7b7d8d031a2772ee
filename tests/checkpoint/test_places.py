"""Checkpoints where things go wrong: on S3, with another writer, on a full disk, without permission, stale.

Whatever happens to a save, the checkpoint that was there before is there after it, whole.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from cluster_fakes import Wire
from places import BUCKET, after_writes, full_disk, interrupt, options, somebody_else, uploads
from shoal.storage.base import StorageDir
from shoal.storage.open import open_dir
from stores import opened
from tiers import everywhere

pytestmark = pytest.mark.slow

KEYS = np.append(np.arange(3000, dtype=np.uint64), np.array([2**63, 2**64 - 1], np.uint64))
WAITING = np.arange(5000, 6000, dtype=np.uint64)
SLOTS = 16


def fill(store: shoal.Store, value: float) -> None:
    """Have the same number in all rows of two tables."""
    wide = store.table("wide", dim=3, optimizer=shoal.SGD(), admit=shoal.AfterCount(2), expire=shoal.TimeToLive(9))
    narrow = store.table("narrow", optimizer=shoal.Adagrad())
    wide.assign(KEYS, np.full((len(KEYS), 3), value, np.float32))
    wide.assign(KEYS, np.full((len(KEYS), 3), value, np.float32))
    wide.push(WAITING, np.ones((len(WAITING), 3), np.float32)).result()
    narrow.assign(KEYS, np.full(len(KEYS), value, np.float32))


def loaded(where: str | Path, how: dict[str, Any] | None = None) -> float:
    """Load a checkpoint in a fresh store: the one number that all its rows hold."""
    with shoal.local(slots=64) as store:
        store.load(where, storage_options=how)
        rows = np.concatenate([table.pull(KEYS).ravel() for table in store.tables.values()])
        assert len(store.tables["wide"]) == len(store.tables["narrow"]) == len(KEYS)
        assert np.all(rows == rows[0]), "rows of two moments"
        return float(rows[0])


class Where:
    """A directory, here or on S3."""

    def __init__(self, name: str | Path, how: dict[str, Any] | None = None) -> None:
        self.name, self.how = name, how

    @property
    def place(self) -> StorageDir:
        return open_dir(self.name, self.how)

    def save(self, value: float, **more: Any) -> None:
        with shoal.local(slots=SLOTS) as store:
            fill(store, value)
            store.save(self.name, storage_options=self.how, **more, overwrite=True)

    def value(self) -> float:
        return loaded(self.name, self.how)


@pytest.fixture(params=["local", "s3"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Where:
    if request.param == "local":
        return Where(tmp_path / "c")
    return Where(f"s3://{BUCKET}/{tmp_path.name}/c", options(request.getfixturevalue("s3")))


# ---- there and back --------------------------------------------------------------------------------------------------


def test_a_checkpoint_on_s3_has_the_bytes_of_one_on_a_disk(s3: str, tmp_path: Path) -> None:
    there = Where(f"s3://{BUCKET}/{tmp_path.name}/c", options(s3))
    with shoal.local(slots=SLOTS) as store:
        fill(store, 3.0)
        store.save(str(there.name), storage_options=there.how)
        store.save(tmp_path / "c")
        names = sorted(there.place.names())
        assert len(names) == len(list((tmp_path / "c").iterdir())) == 3
        strip = {name: name.split("-", 1)[-1] for name in names}
        sizes = {path.name.split("-", 1)[-1]: path.stat().st_size for path in (tmp_path / "c").iterdir()}
        for name in names:
            assert len(there.place.read(name)) == sizes[strip[name]]
    assert there.value() == loaded(tmp_path / "c") == 3.0
    for name in names:  # and is read where it is copied to
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(there.place.read(name))
    assert loaded(tmp_path / "copy") == 3.0


def test_a_cluster_saves_to_s3_and_loads_from_there(s3: str, tmp_path: Path) -> None:
    there = Where(f"s3://{BUCKET}/{tmp_path.name}/c", options(s3))
    with opened("connected", slots=SLOTS) as store:
        fill(store, 2.0)
        store.save(str(there.name), storage_options=there.how)
        fill(store, 5.0)
        store.load(str(there.name), storage_options=there.how)
        assert np.all(store.tables["narrow"].pull(KEYS) == 2.0)
    assert there.value() == 2.0


def test_a_chain_of_deltas_stands_in_one_bucket(s3: str, tmp_path: Path) -> None:
    root, how = f"s3://{BUCKET}/{tmp_path.name}", options(s3)
    with shoal.local(slots=SLOTS) as store:
        fill(store, 1.0)
        store.save(f"{root}/1", track=True, storage_options=how)
        for table in store.tables.values():
            table.assign(KEYS, np.full((len(KEYS), table.dim), 2, np.float32))
        store.save(f"{root}/deep/2", since=f"{root}/1", storage_options=how)
        with pytest.raises(ValueError, match=r"no path from .* to s3://.*: keep both on one kind of storage"):
            store.save(tmp_path / "3", since=f"{root}/deep/2", storage_options=how)
    assert not (tmp_path / "3" / "manifest.json").exists()
    assert loaded(f"{root}/deep/2", how) == 2.0
    shoal.checkpoint.compact(f"{root}/deep/2", f"{root}/whole", storage_options=how)
    with pytest.raises(ValueError, match="is part of the chain"):
        shoal.checkpoint.compact(f"{root}/deep/2", f"{root}/deep/../1/", storage_options=how)
    place = open_dir(f"{root}/1", how)
    place.remove("manifest.json")
    with pytest.raises(shoal.CorruptionError, match=f"{root}/1/manifest.json is missing: the delta in {root}/deep/2"):
        loaded(f"{root}/deep/2", how)
    assert loaded(f"{root}/whole", how) == 2.0


def test_a_save_replaces_the_checkpoint_that_is_there_and_what_a_killed_one_left(where: Where) -> None:
    where.save(1.0)
    before = set(where.place.names())
    with where.place.create("0badc0de-0-0.slots") as file:
        file.write(b"of one that was killed")
    where.save(2.0)
    after = set(where.place.names())
    assert before & after == {"manifest.json"}
    assert len(after) == len(before)
    assert where.value() == 2.0


# ---- cut off ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "count"), everywhere(2, [30, 1, 2, 9]), indirect=["where"])
def test_a_save_that_is_interrupted_leaves_what_was_there(where: Where, s3: str, tmp_path: Path, count: int) -> None:
    where.save(1.0)
    before = where.place.names()
    with after_writes(count, interrupt), pytest.raises(KeyboardInterrupt):
        where.save(2.0)
    assert where.place.names() == before
    assert uploads(s3, tmp_path.name) == []
    assert where.value() == 1.0
    where.save(3.0)
    assert where.value() == 3.0


def test_a_connection_that_is_lost_while_saving_leaves_what_was_there(s3: str, wire: Wire, tmp_path: Path) -> None:
    name = f"s3://{BUCKET}/{tmp_path.name}/c"
    near, there = Where(name, options(wire.address.replace("tcp", "http"))), Where(name, options(s3))
    near.save(1.0)
    before = there.place.names()

    def lose() -> None:
        wire.close()
        wire.break_off()

    with after_writes(7, lose), pytest.raises(shoal.errors.StorageError, match=f"{name}/.* cannot be written"):
        near.save(2.0)
    assert there.place.names() == before
    assert there.value() == 1.0
    there.save(3.0)
    assert there.value() == 3.0


def test_a_connection_that_is_lost_while_loading_loads_nothing(s3: str, wire: Wire, tmp_path: Path) -> None:
    name = f"s3://{BUCKET}/{tmp_path.name}/c"
    how = options(wire.address.replace("tcp", "http"))
    Where(name, options(s3)).save(1.0)
    with shoal.local() as store:
        fill(store, 7.0)
        wire.break_off()
        store.load(name, storage_options=how)  # connections are made again
        assert np.all(store.tables["narrow"].pull(KEYS) == 1.0)
        fill(store, 7.0)
        wire.close()
        wire.break_off()
        with pytest.raises(shoal.errors.StorageError, match=f"{name}/manifest.json cannot be read"):
            store.load(name, storage_options=how)
        assert np.all(store.tables["narrow"].pull(KEYS) == 7.0)


# ---- two writers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "there_before"), everywhere(1, [True, False]), indirect=["where"])
def test_of_two_saves_that_race_one_is_told_and_the_other_is_whole(where: Where, there_before: bool) -> None:
    if there_before:
        where.save(9.0)
    both = threading.Barrier(2)
    real = type(where.place).publish

    def publish(place: Any, *arguments: Any, **how: Any) -> None:
        both.wait(120)
        real(place, *arguments, **how)

    def save(value: float) -> str:
        try:
            where.save(value)
        except shoal.errors.SaveConflictError as error:
            return str(error)
        return ""

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(type(where.place), "publish", publish)
        reported = list(pool.map(save, (1.0, 2.0)))
    assert reported.count("") == 1
    (text,) = set(reported) - {""}
    assert f"{where.name}/manifest.json was written by another process" in text
    assert where.value() == [1.0, 2.0][reported.index("")]
    assert len(where.place.names()) == 3
    where.save(3.0)
    assert where.value() == 3.0


# ---- what a disk refuses ---------------------------------------------------------------------------------------------


def test_on_a_full_disk_a_save_is_refused_and_the_checkpoint_before_it_stays(tmp_path: Path) -> None:
    with full_disk(tmp_path, 160 << 10):
        where = Where(tmp_path / "c")
        where.save(1.0)
        before = where.place.names()
        for _ in range(2):
            with shoal.local(slots=SLOTS) as store:
                fill(store, 2.0)
                large = store.table("large", dim=16)
                large.assign(KEYS, np.ones((len(KEYS), 16), np.float32))
                with pytest.raises(shoal.errors.StorageError, match=r"/c/\w+-\d-0\.slots cannot be written: .*; "):
                    store.save(where.name, overwrite=True)
                assert np.all(large.pull(KEYS) == 1.0)
            assert where.place.names() == before
            assert where.value() == 1.0


def test_without_permission_a_save_or_a_load_names_the_file(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        where = Where(folder / "c")
        where.save(1.0)
        (folder / "c").chmod(0o555)
        slots = next(path for path in (folder / "c").iterdir() if path.suffix == ".slots")
        with somebody_else():
            with pytest.raises(shoal.errors.StorageError, match=r"/c/.* cannot be written: Permission denied; grant"):
                where.save(2.0)
            with pytest.raises(shoal.errors.StorageError, match="/d cannot be made: Permission denied"):
                Where(folder / "d").save(2.0)
        assert where.value() == 1.0
        for path, what in ((slots, slots.name), (folder / "c" / "manifest.json", "manifest.json")):
            path.chmod(0)
            with (
                somebody_else(),
                pytest.raises(shoal.errors.StorageError, match=f"/c/{what} cannot be read: Permission"),
            ):
                where.value()
            path.chmod(0o644)
        (folder / "c").chmod(0o755)
        assert where.value() == 1.0


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_a_stale_manifest_names_files_that_are_gone(where: Where, tmp_path: Path) -> None:
    where.save(1.0)
    old = where.place.read("manifest.json")
    where.save(2.0)
    place = where.place
    place.publish("manifest.json", old, before=place.version("manifest.json"))
    with pytest.raises(shoal.CorruptionError, match=r"/c/\w+-0-0\.slots is missing"):
        where.value()
    where.save(3.0)
    assert where.value() == 3.0


def test_what_is_changed_cut_exchanged_or_gone_is_named_wherever_it_is(where: Where) -> None:
    where.save(1.0)
    place = where.place
    names = [name for name in place.names() if name.endswith(".slots")]
    data = {name: place.read(name) for name in place.names()}
    second = names[1]

    def put(name: str, bytes_: bytes) -> None:
        place.remove(name)
        with place.create(name) as file:
            file.write(bytes_)

    for name in (*names, "manifest.json") if place.local is not None else (names[0], "manifest.json"):
        whole = data[name]
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 4
        some = (bytes(flipped), whole[: len(whole) // 2], data[second], whole[:-1], b"", whole + b"\0")
        for bad in some if place.local is not None else some[:3]:
            if bad == whole:
                continue
            put(name, bad)
            with pytest.raises(shoal.CorruptionError, match=f"/c/{name}"):
                where.value()
        place.remove(name)
        with pytest.raises(shoal.CorruptionError, match=f"/c/{name} is missing"):
            where.value()
        put(name, whole)
    assert where.value() == 1.0
    if place.local is not None:
        shutil.rmtree(place.local)
        with pytest.raises(FileNotFoundError, match="there is no such checkpoint"):
            where.value()
