"""Pieces in files, the manifest that names them, and what is left when writing ends otherwise."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shoal.errors import SaveConflictError, StorageError
from shoal.storage import transaction
from shoal.storage.checksummed_json import decode_checksummed
from shoal.storage.local import LocalDir
from shoal.storage.transaction import DataFileWriter, ManifestTransaction, map_in_order

HEADER = b"H" * 64


def is_ours(name):
    return name.endswith(".part")


def piece(size, fill):
    return np.full(size, fill, np.uint8)


def replace(place, sizes, fail=None):
    with ManifestTransaction(place, "manifest.json", is_ours) as new:
        writer = DataFileWriter(place, f"{new.stem}-0", ".part", HEADER)
        at = [writer.append(piece(size, k)) for k, size in enumerate(sizes)]
        writer.finish()
        if fail is not None:
            fail(new)
        new.publish(f'"{writer.files[0].name}"'.encode())
    return writer.files, at


def test_pieces_stand_where_they_are_said_to_and_a_long_file_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(transaction, "_FILE_BYTES", 200)
    files, at = replace(LocalDir(tmp_path), [64, 128, 64, 500, 0])
    assert at == [(0, 64), (0, 128), (1, 64), (1, 128), (2, 64)]
    assert [file.bytes for file in files] == [256, 628, 64]
    for k, (number, offset) in enumerate(at):
        data = (tmp_path / files[number].name).read_bytes()
        assert len(data) == files[number].bytes
        assert data.startswith(HEADER)
        size = [64, 128, 64, 500, 0][k]
        assert data[offset : offset + size] == bytes([k]) * size
    assert decode_checksummed((tmp_path / "manifest.json").read_bytes(), "") == f'"{files[0].name}"'.encode()


def test_what_is_replaced_is_removed_and_what_is_not_ours_stays(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "aborted.part").write_text("of a writer that was killed")
    replace(LocalDir(tmp_path), [64])
    files, _ = replace(LocalDir(tmp_path), [64])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([files[0].name, "manifest.json", "notes.txt"])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_one_that_fails_leaves_what_was_there(tmp_path, error):
    def fail(new):
        raise error

    replace(LocalDir(tmp_path), [64])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(error):
        replace(LocalDir(tmp_path), [64], fail)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_one_that_is_interrupted_behind_its_manifest_stays_whole(tmp_path):
    def patch(new):
        publish = new.publish

        def interrupted(body):
            publish(body)
            raise KeyboardInterrupt

        new.publish = interrupted

    with pytest.raises(KeyboardInterrupt):
        replace(LocalDir(tmp_path), [64], patch)
    assert len(list(tmp_path.glob("*.part"))) == 1


def test_what_cannot_be_removed_is_logged_and_left_to_the_next_one(tmp_path, monkeypatch, caplog):
    place = LocalDir(tmp_path)
    (old,), _ = replace(place, [64])

    def refuse(place, name):
        raise StorageError(f"{name} cannot be removed: not now")

    with monkeypatch.context() as patch:
        patch.setattr(LocalDir, "remove", refuse)
        (new,), _ = replace(place, [128])
    assert (
        f"manifest.json was published, but not all files that it replaces could be removed: {old.name} cannot be"
        in caplog.text
    )
    assert place.names() == sorted([old.name, new.name, "manifest.json"])
    (last,), _ = replace(place, [128])
    assert place.names() == sorted([last.name, "manifest.json"])


def test_directories_are_replaced_where_a_manifest_names_them(tmp_path):
    place = LocalDir(tmp_path)

    def once():
        with ManifestTransaction(place, "manifest.json", lambda name: name != "other", with_subdirectories=True) as new:
            inner = place.child(f"folder-{new.stem}")
            inner.make()
            with inner.create("x") as file:
                file.write(b"1")
            new.publish(b"{}")

    place.child("other").make()
    once()
    first = place.subdirectories()
    once()
    assert len(place.subdirectories()) == 2
    assert set(place.subdirectories()) & set(first) == {"other"}


def test_of_two_that_race_the_second_is_told_and_leaves_the_first(tmp_path):
    done = []

    def other_is_faster(new):
        done.append(replace(LocalDir(tmp_path), [64])[0][0].name)

    with pytest.raises(SaveConflictError, match="another process"):
        replace(LocalDir(tmp_path), [64], other_is_faster)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*done, "manifest.json"])


def test_work_in_a_pool_comes_in_order_and_stops_with_its_consumer():
    begun = []

    def work(item):
        begun.append(item)
        return item * item

    with ThreadPoolExecutor(2) as pool:
        assert list(map_in_order(pool, work, range(9), 3)) == [k * k for k in range(9)]
        begun.clear()
        results = map_in_order(pool, work, iter(range(100)), 2)
        assert next(results) == 0
        results.close()
    assert len(begun) <= 4
