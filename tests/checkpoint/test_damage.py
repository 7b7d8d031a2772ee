"""Damaged checkpoints: every cut, every changed byte, every missing file is found and named, and nothing is loaded."""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pytest

import shoal

KEYS = np.arange(150, dtype=np.uint64)
DESCRIPTIONS = {
    "user": {"dim": 3, "optimizer": shoal.Adagrad(), "init": shoal.Normal(0.1)},
    "ad": {"dim": 1, "optimizer": shoal.FTRL(l1=0.1)},
    "half": {"dim": 5, "optimizer": shoal.RowWiseAdagrad(), "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint of three tables over few slots."""
    folder = tmp_path_factory.mktemp("whole") / "c"
    rng = np.random.default_rng(7)
    with shoal.local(slots=4) as store:
        for name, description in DESCRIPTIONS.items():
            table = store.table(name, **description)
            table.push(KEYS, rng.standard_normal((150, table.dim)).astype(np.float32)).result()
        store.save(folder)
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "c")


@pytest.fixture(scope="module")
def store():
    """A store with one of the checkpoint's tables in it; no damaged load may change it."""
    with shoal.local(slots=8) as opened:
        table = opened.table("user", **DESCRIPTIONS["user"])
        table.push(KEYS[:7], np.ones((7, 3), np.float32)).result()
        yield opened


def assert_refused(store, folder, name):
    table = store.tables["user"]
    before = table.pull(KEYS)
    with pytest.raises(shoal.CorruptionError) as caught:
        store.load(folder)
    assert str(folder / name) in str(caught.value), caught.value
    assert set(store.tables) == {"user"}
    assert store.tables["user"] is table
    assert (len(table), table.stats().step) == (7, 1)
    np.testing.assert_array_equal(table.pull(KEYS), before)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_whole_checkpoint_loads(whole):
    with shoal.local() as fresh:
        fresh.load(whole)
        assert {name: len(table) for name, table in fresh.tables.items()} == dict.fromkeys(DESCRIPTIONS, 150)


def test_every_missing_file_is_named(store, copy):
    for name in names(copy):
        kept = (copy / name).read_bytes()
        (copy / name).unlink()
        assert_refused(store, copy, name)
        (copy / name).write_bytes(kept)
    with shoal.local() as fresh:
        fresh.load(copy)


@pytest.mark.slow
def test_every_cut_is_named(store, copy):
    """At each of the first and last bytes, and at every 97th between."""
    for name in names(copy):
        data = (copy / name).read_bytes()
        cuts = {*range(0, len(data), 97), *range(70), *range(len(data) - 70, len(data))}
        for size in sorted(cuts & set(range(len(data)))):
            (copy / name).write_bytes(data[:size])
            assert_refused(store, copy, name)
        (copy / name).write_bytes(data)


@pytest.mark.slow
def test_every_flipped_bit_is_named(store, copy):
    """Each byte of the first and last forty, and every 97th between; a different bit each time."""
    for name in names(copy):
        data = bytearray((copy / name).read_bytes())
        places = {*range(0, len(data), 97), *range(40), *range(len(data) - 40, len(data))}
        for place in sorted(places & set(range(len(data)))):
            data[place] ^= 1 << place % 8
            (copy / name).write_bytes(data)
            assert_refused(store, copy, name)
            data[place] ^= 1 << place % 8
        (copy / name).write_bytes(data)


def test_bytes_put_behind_the_end_are_named(store, copy):
    for name in names(copy):
        data = (copy / name).read_bytes()
        for more in (b"\0", b"\n", b" ", bytes(64)):
            (copy / name).write_bytes(data + more)
            assert_refused(store, copy, name)
        (copy / name).write_bytes(data)


@pytest.mark.slow
def test_pages_of_zeros_are_named(store, copy):
    """What a file system leaves behind when the power fails."""
    for name in names(copy):
        data = (copy / name).read_bytes()
        for start in range(0, len(data), 512):
            page = data[start : start + 512]
            if page != bytes(len(page)):
                (copy / name).write_bytes(data[:start] + bytes(len(page)) + data[start + 512 :])
                assert_refused(store, copy, name)
        (copy / name).write_bytes(bytes(len(data)))
        assert_refused(store, copy, name)
        (copy / name).write_bytes(data)


def test_exchanged_files_are_named(store, copy):
    slot_files = [name for name in names(copy) if not name.endswith(".json")]
    assert len(slot_files) >= 3
    for name, other in itertools.pairwise(slot_files):
        kept = (copy / name).read_bytes()
        (copy / name).write_bytes((copy / other).read_bytes())
        assert_refused(store, copy, name)
        (copy / name).write_bytes(kept)


@pytest.mark.slow
def test_exchanged_slots_of_one_file_are_named(store, copy, rng):
    """Both halves keep their bytes and their checksums; only their places differ."""
    for name in names(copy):
        if name.endswith(".json"):
            continue
        data = (copy / name).read_bytes()
        blocks = [data[i : i + 64] for i in range(64, len(data), 64)]
        for _ in range(10):
            a, b = rng.choice(len(blocks), 2, replace=False)
            if blocks[a] != blocks[b]:
                swapped = blocks.copy()
                swapped[a], swapped[b] = swapped[b], swapped[a]
                (copy / name).write_bytes(data[:64] + b"".join(swapped))
                assert_refused(store, copy, name)
        (copy / name).write_bytes(data)


def test_files_of_others_beside_a_checkpoint_do_not_matter(whole, copy):
    (copy / "notes.txt").write_text("which run was this?")
    (copy / "folder").mkdir()
    (copy / "extra.slots").write_bytes(b"left by somebody")
    (copy / ".manifest.json.1234.tmp").write_bytes(b"left by a cut-off save")
    with shoal.local() as fresh:
        fresh.load(copy)
        assert len(fresh.tables) == 3
        fresh.save(copy, overwrite=True)
    assert (copy / "notes.txt").read_text() == "which run was this?"
    assert (copy / "folder").is_dir()


@pytest.mark.parametrize("what", ["nothing", "an empty directory", "a file"])
def test_what_is_no_checkpoint_is_named(store, tmp_path, what):
    folder = tmp_path / "c"
    if what == "an empty directory":
        folder.mkdir()
    elif what == "a file":
        folder.write_bytes(b"hello")
    with pytest.raises(FileNotFoundError if what == "nothing" else shoal.CorruptionError) as caught:
        store.load(folder)
    assert str(folder) in str(caught.value)
    assert len(store.tables["user"]) == 7


def test_a_slot_file_that_is_a_directory_is_named(store, copy):
    for name in names(copy):
        kept = (copy / name).read_bytes()
        (copy / name).unlink()
        (copy / name).mkdir()
        with pytest.raises((shoal.CorruptionError, OSError)) as caught:
            store.load(copy)
        assert name in str(caught.value)
        assert len(store.tables["user"]) == 7
        (copy / name).rmdir()
        (copy / name).write_bytes(kept)
