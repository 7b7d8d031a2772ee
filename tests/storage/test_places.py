"""Places: the same calls on this machine, in memory and on S3; what is cut off, raced for, refused or lost."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from cluster_fakes import Wire
from places import full_disk, options, somebody_else, uploads
from shoal.cluster.protocol.curve import Keys
from shoal.cluster.scheduler.journal import Journal
from shoal.errors import CorruptionError, SaveConflictError, StorageError
from shoal.storage.base import StorageDir
from shoal.storage.checksummed_json import encode_checksummed
from shoal.storage.open import open_dir
from shoal.table.tiered import parse_tier
from shoal.tracking.tensorboard import TensorBoard

PART = 6 << 20  # S3 takes no smaller parts than 5 MiB, but the last


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StorageDir:
    if request.param == "local":
        made: StorageDir = open_dir(tmp_path / "a" / "b")
    elif request.param == "memory":
        pytest.importorskip("fsspec")
        made = open_dir(f"memory://{tmp_path.name}/b")
    else:
        made = open_dir(f"s3://places/{tmp_path.name}/b", options(request.getfixturevalue("s3")))
    made.make()
    return made


def put(place: StorageDir, name: str, *pieces: bytes, then: BaseException | None = None, cached: bool = True) -> None:
    with place.create(name, cached=cached) as file:
        for piece in pieces:
            file.write(piece)
        if then is not None:
            raise then


# ---- the calls -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_created_is_read_whole_and_in_ranges(place: StorageDir) -> None:
    data = np.random.default_rng(1).bytes(100_000)
    assert place.names() == []
    with place.create("x.slots") as file:
        file.write(data[:10])
        assert file.tell() == 10
        file.write(memoryview(data)[10:])
    put(place, "empty")
    assert place.names() == ["empty", "x.slots"]
    assert place.read("x.slots") == data
    assert place.read("empty") == b""
    with place.open("x.slots") as opened:
        assert opened.size == len(data)
        for offset, size in ((0, 64), (99_990, 64), (5, 0), (100_000, 3), (7, 99_993), (200_000, 1)):
            got = bytearray(size)
            assert opened.read_into(memoryview(got), offset) == len(data[offset : offset + size])
            assert got[: len(data[offset : offset + size])] == data[offset : offset + size]
    place.remove("x.slots")
    place.remove("x.slots")
    assert place.names() == ["empty"]


@pytest.mark.slow
def test_directories_are_told_from_files_and_cleared_with_all_that_is_in_them(place: StorageDir) -> None:
    above = place.child("..")
    assert place.child("a").kind() is None
    assert place.subdirectories() == []
    for name in ("a", "b"):
        inner = place.child(name)
        inner.make()
        put(inner, "x", b"1")
        inner.child("deep").make()
        put(inner.child("deep"), "y", b"2")
    put(place, "aa", b"3")
    assert (place.subdirectories(), place.names()) == (["a", "b"], ["aa"])
    assert (place.child("a").kind(), place.child("aa").kind()) == ("directory", "file")
    place.child("a").clear()
    assert (place.subdirectories(), place.names()) == (["b"], ["aa"])
    assert place.child("a").kind() is None
    assert place.child("b").child("deep").read("y") == b"2"
    place.child("a").clear()  # nothing is no error
    place.clear()
    assert (place.kind(), place.subdirectories(), place.names()) == (None, [], [])
    assert place.name not in above.subdirectories()


def test_an_object_that_stands_for_a_directory_is_none_of_its_files(s3: str, tmp_path: Path) -> None:
    import boto3

    place = open_dir(f"s3://places/{tmp_path.name}/b", options(s3))
    boto3.client("s3", endpoint_url=s3).put_object(Bucket="places", Key=f"{tmp_path.name}/b/", Body=b"")
    assert (place.kind(), place.names(), place.subdirectories()) == ("directory", [], [])


def test_a_place_within_a_linked_directory_is_where_the_system_has_it(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    put(open_dir(tmp_path / "real"), "x", b"1")
    place = open_dir(tmp_path / "link" / ".." / ".." / "real")
    place.child("a").make()
    assert (tmp_path / "real" / "a").is_dir()
    assert place.read("x") == b"1"
    other = open_dir(tmp_path / "link" / "..")
    other.child("b").make()
    assert (tmp_path / "real" / "b").is_dir()


def test_the_error_of_a_damaged_checksummed_file_names_the_cause(place: StorageDir) -> None:
    place.publish("m", encode_checksummed(b'{"a":1}'), before=None)
    assert place.read_checksummed("m", missing="never mind") == b'{"a":1}'
    with pytest.raises(CorruptionError, match="b/n is missing: it was never written"):
        place.read_checksummed("n", missing="it was never written")
    with pytest.raises(CorruptionError, match="b/m is a file where a directory should be"):
        place.child("m").read_checksummed("n", missing="")
    put(place, "o", b"{")
    with pytest.raises(CorruptionError, match="b/o is damaged"):
        place.read_checksummed("o", missing="")


def test_what_is_missing_is_a_file_not_found_error_and_a_directory_that_is_missing_is_empty(place: StorageDir) -> None:
    with pytest.raises(FileNotFoundError):
        place.read("nothing")
    with pytest.raises(FileNotFoundError), place.open("nothing"):
        pass
    assert place.version("nothing") is None
    assert place.child("nowhere").names() == []
    for name in ("", "a/b", "..", "."):
        with pytest.raises(ValueError, match="not the name of a file"):
            place.read(name)


def test_directories_are_named_by_their_paths_from_each_other(place: StorageDir) -> None:
    other = place.child("../c")
    other.make()
    put(other, "y", b"1")
    assert str(other) == str(place).removesuffix("b") + "c"
    assert other.address("y") == f"{other}/y"
    assert place.child("../c").read("y") == b"1"
    assert other.child("../b").names() == place.names() == []


def test_directories_that_hold_a_file_are_found_and_show_when_it_changes(place: StorageDir) -> None:
    assert place.subdirectories_with("m") == {}
    assert place.child("nowhere").subdirectories_with("m") == {}
    put(place, "m", b"not in a directory of its own")
    for path in ("one", "two", "three/deeper"):
        place.child(path).make()
        put(place.child(path), "m", b"1")
        put(place.child(path), "other", b"1")
    first = place.subdirectories_with("m")
    assert list(first) == ["one", "two"]
    assert place.subdirectories_with("m") == first
    place.child("two").remove("m")
    put(place.child("two"), "m", b"2")
    put(place.child("one"), "more", b"1")
    second = place.subdirectories_with("m")
    assert second["one"] == first["one"]
    assert second["two"] != first["two"]


@pytest.mark.parametrize("unit", [1, mmap.PAGESIZE // 64])  # the second: what goes to the disk past the cache
@pytest.mark.parametrize("cached", [True, False])
def test_what_is_written_in_pieces_of_any_size_is_whole(
    place: StorageDir, cached: bool, unit: int, monkeypatch: Any
) -> None:
    for module in ("local", "direct_io"):
        monkeypatch.setattr(f"shoal.storage.{module}.WRITE_BYTES", 64 * unit)
    rng = np.random.default_rng(2)
    pieces = [rng.bytes(int(size)) for size in rng.choice([0, 1, 5, 63, 64, 65, 128, 1000], 60) * unit]
    pieces.append(b"the end")
    with place.create("x", cached=cached) as file:
        for k, piece in enumerate(pieces):
            file.write(piece if k % 2 else memoryview(np.frombuffer(piece, np.uint8)))
            assert file.tell() == sum(map(len, pieces[: k + 1]))
    assert place.read("x") == b"".join(pieces)


@pytest.mark.parametrize("cached", [True, False])
def test_a_file_that_is_given_up_is_not_there(place: StorageDir, cached: bool) -> None:
    for size in (10, PART * 3):
        with pytest.raises(KeyError):
            put(place, "half", bytes(size), then=KeyError(), cached=cached)
        if not str(place).startswith("memory"):  # which shows a file once it is begun
            assert place.names() == []
    put(place, "half", b"whole")
    assert place.read("half") == b"whole"


def test_a_published_file_replaces_the_version_that_was_told_and_no_other(place: StorageDir) -> None:
    place.publish("m", b"one", before=None)
    one = place.version("m")
    with pytest.raises(SaveConflictError, match="was written by another process after this one began"):
        place.publish("m", b"other", before=None)
    assert place.read("m") == b"one"
    place.publish("m", b"two", before=one)
    with pytest.raises(SaveConflictError, match="/m was written by another"):
        place.publish("m", b"other", before=one)
    assert place.read("m") == b"two"
    two = place.version("m")
    place.remove("m")
    with pytest.raises(SaveConflictError):
        place.publish("m", b"other", before=two)
    assert place.names() == []
    place.publish("m", b"three", before=None, durable=False)
    assert place.read("m") == b"three"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "s3"])
def test_of_writers_that_race_for_one_version_exactly_one_gets_through(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def opened() -> StorageDir:  # each as a process of its own would
        if kind == "local":
            return open_dir(tmp_path)
        return open_dir(f"s3://places/{tmp_path.name}", options(request.getfixturevalue("s3")))

    places = [opened() for _ in range(6)]
    begin = threading.Barrier(len(places))
    before: str | None = None
    for turn in range(4):

        def write(number: int, turn: int = turn, before: str | None = before) -> bool:
            begin.wait()
            try:
                places[number].publish("m", f"{turn} {number}".encode(), before=before)
            except SaveConflictError:
                return False
            return True

        with ThreadPoolExecutor(len(places)) as pool:
            won = list(pool.map(write, range(len(places))))
        assert won.count(True) == 1
        assert places[0].read("m") == f"{turn} {won.index(True)}".encode()
        before = places[0].version("m")


@pytest.mark.slow
def test_a_put_whose_answer_was_lost_and_that_met_itself_is_done(s3: str, tmp_path: Path) -> None:
    place: Any = open_dir(f"s3://places/{tmp_path.name}", options(s3))
    real = place._system.pipe_file
    for k, error in enumerate((FileExistsError(), ConnectionError("lost"))):

        def put(path: str, data: bytes, error: Exception = error, **how: Any) -> None:
            real(path, data, **how)
            raise error

        place._system.pipe_file = put
        place.publish("m", f"new {k}".encode(), before=place.version("m"))
        assert place.read("m") == f"new {k}".encode()


# ---- interrupted uploads and lost connections ------------------------------------------------------------------------


@pytest.mark.slow
def test_an_upload_that_is_interrupted_leaves_no_object_and_no_parts(s3: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("shoal.storage.object_store._PART_BYTES", PART)
    place = open_dir(f"s3://places/{tmp_path.name}", options(s3))
    with contextlib.suppress(KeyboardInterrupt), place.create("large") as file:
        file.write(bytes(PART * 2 + 5))
        assert len(uploads(s3, tmp_path.name)) == 1
        raise KeyboardInterrupt
    assert place.names() == []
    assert uploads(s3, tmp_path.name) == []
    put(place, "large", bytes(PART), b"1" * PART, b"end")
    assert place.read("large") == bytes(PART) + b"1" * PART + b"end"


@pytest.mark.slow
def test_connections_that_break_off_are_made_again(s3: str, wire: Wire, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("shoal.storage.object_store._PART_BYTES", PART)
    place = open_dir(f"s3://places/{tmp_path.name}", options(wire.address.replace("tcp", "http")))
    with place.create("large") as file:
        for k in range(3):
            file.write(bytes([k]) * PART)
            wire.break_off()
    place.publish("m", b"1", before=None)
    wire.break_off()
    assert place.read("large") == b"".join(bytes([k]) * PART for k in range(3))
    wire.break_off()
    place.publish("m", b"2", before=place.version("m"))
    assert place.read("m") == b"2"


@pytest.mark.slow
def test_a_connection_that_is_lost_for_good_is_an_error_that_names_the_file_and_changes_nothing(
    s3: str, wire: Wire, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("shoal.storage.object_store._PART_BYTES", PART)
    name = f"s3://places/{tmp_path.name}"
    place = open_dir(name, options(wire.address.replace("tcp", "http")))
    place.publish("m", b"1", before=None)
    known = place.version("m")
    file = place.create("large")
    file.write(bytes(PART + 1))
    wire.close()
    wire.break_off()
    with pytest.raises(StorageError, match=f"{name}/large cannot be written"):
        file.write(bytes(PART * 2))
    for call, what in (
        (lambda: place.publish("m", b"2", before=known), "m cannot be"),
        (lambda: place.read("m"), "m cannot be read"),
        (place.names, " cannot be read"),
    ):
        with pytest.raises(StorageError, match=what):
            call()  # type: ignore[operator]
    there = open_dir(name, options(s3))
    assert there.names() == ["m"]
    assert there.read("m") == b"1"


def test_a_bucket_that_is_missing_is_said_so(s3: str) -> None:
    place = open_dir("s3://no-such-bucket/c", options(s3))
    assert place.names() == []
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/c/m cannot be written: The specified bucket does not"):
        place.publish("m", b"1", before=None)
    with pytest.raises(StorageError, match="s3://no-such-bucket/c/x cannot be written"):
        put(place, "x", b"1")
    with pytest.raises(ValueError, match="nothing"):
        open_dir("nothing://a/b")


# ---- what a disk refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False])
def test_a_full_disk_is_named_and_what_was_there_stays(tmp_path: Path, cached: bool) -> None:
    with full_disk(tmp_path, 64 << 10):
        place = open_dir(tmp_path)
        place.publish("m", b"one", before=None)
        for size in (1 << 20, 200_000):
            with pytest.raises(StorageError, match=r"/x cannot be written: .*; ") as caught:
                put(place, "x", *[bytes(1000)] * (size // 1000), cached=cached)
            assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
        with pytest.raises(StorageError, match="/m cannot be written"):
            place.publish("m", bytes(100_000), before=place.version("m"))
        assert place.names() == ["m"]
        assert place.read("m") == b"one"
        place.publish("m", b"two", before=place.version("m"))


def test_where_no_file_goes_past_the_cache_it_goes_through(tmp_path: Path, monkeypatch: Any) -> None:
    really = os.open

    def refuses(path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = really(path, flags & ~os.O_DIRECT, mode)
        if flags & os.O_DIRECT:
            os.close(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return descriptor

    monkeypatch.setattr("shoal.storage.direct_io.os.open", refuses)
    place = open_dir(tmp_path)
    data = np.random.default_rng(3).bytes(5 << 20)
    with place.create("x", cached=False) as file:
        file.write(data)
    assert place.read("x") == data


def test_a_disk_that_fails_behind_the_writer_is_named_and_the_file_is_gone(tmp_path: Path, monkeypatch: Any) -> None:
    def fails(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("shoal.storage.direct_io.os.pwrite", fails)
    place = open_dir(tmp_path)
    for data in (bytes(20 << 20), b"only the end"):
        with pytest.raises(StorageError, match=r"x cannot be written: Input/output error; the disk reports errors"):
            put(place, "x", data, cached=False)
    assert place.names() == []


def test_without_permission_it_is_said_what_for() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        place = open_dir(folder)
        place.publish("m", b"one", before=None)
        (folder / "m").chmod(0)
        folder.chmod(0o555)
        with somebody_else():
            for call, what in (
                (lambda: put(place, "x", b"1"), "/x cannot be written: Permission denied; grant this user"),
                (lambda: place.read("m"), "/m cannot be read: Permission denied; grant this user"),
                (lambda: place.publish("n", b"2", before=None), "/n cannot be written: Permission denied"),
                (lambda: place.remove("m"), "/m cannot be removed: Permission denied"),
                (lambda: place.child("deeper").make(), "/deeper cannot be made: Permission denied"),
            ):
                with pytest.raises(StorageError, match=what) as caught:
                    call()
                assert isinstance(caught.value, OSError)
                assert caught.value.errno == errno.EACCES
        folder.chmod(0o755)
        (folder / "m").chmod(0o600)
        assert place.names() == ["m"]
        assert place.read("m") == b"one"


def test_a_file_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    place = open_dir(tmp_path)
    put(place, "x", b"1")
    with pytest.raises(StorageError, match="/x cannot be written: File exists"):
        place.create("x")
    assert place.read("x") == b"1"


def test_a_link_to_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("missing")
    match = "/link cannot be made: File exists; a file, or a symbolic link to what is missing, has this name"
    with pytest.raises(StorageError, match=match):
        open_dir(tmp_path / "link").make()


@pytest.mark.parametrize(
    "use",
    [
        lambda url: shoal.Tiered(url, memory="1MiB"),
        lambda url: shoal.export.open("no", cache=url),
        lambda url: Journal(url),
        lambda url: Keys.load(url, "worker"),
        lambda url: parse_tier(f"{url}:1MiB"),
        lambda url: TensorBoard(url),
    ],
    ids=["tier", "cache", "journal", "keys", "tier of a cluster", "event files"],
)
def test_what_is_local_only_refuses_a_url_and_makes_no_folder_of_that_name(
    use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="s3://bucket/x is a URL, and this is read and written on this machine only"):
        use("s3://bucket/x")
    assert not list(tmp_path.iterdir())


def test_a_tier_expands_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shoal.Tiered("~/tier", memory=4096).path == str(tmp_path / "tier")
