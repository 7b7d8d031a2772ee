"""Storage roots: what a peer names is opened below them alone, by a server too."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import shoal
from places import BUCKET, object_store, options
from shoal.cli import main
from shoal.cluster.launch import local_cluster
from shoal.errors import StorageError
from shoal.storage.local import LocalDir
from shoal.storage.roots import StorageRoots

TIMEOUT = 120.0
KEYS = np.arange(100, dtype=np.uint64)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a directory, beside one that a link leads to."""
    for name in ("root/in", "beside"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "beside" / "secret").write_text("secret")
    (tmp_path / "root" / "out").symlink_to(tmp_path / "beside")
    (tmp_path / "root" / "back").symlink_to(tmp_path / "root" / "in")
    (tmp_path / "root" / "loop").symlink_to("loop")
    (tmp_path / "root" / "in" / "file").symlink_to(tmp_path / "beside" / "secret")
    return tmp_path / "root"


@pytest.mark.parametrize("inside", ["", "in", "in/../in", "new/deep", "back", "in/./x"])
def test_a_place_below_a_root_is_opened(root: Path, inside: str) -> None:
    place = StorageRoots([root]).open(str(root / inside), {})
    assert isinstance(place.child("x"), LocalDir)


@pytest.mark.parametrize(
    "outside", ["/", "/etc", "{root}/..", "{root}/../beside", "{root}/out", "{root}/out/x", "{root}2", "{root}/loop",
                "{root}/in/../../beside", "{root}\0", "", "file://{root}", "s3://bucket/x"]
)  # fmt: skip
def test_a_place_outside_of_the_roots_is_refused_with_the_remedy(root: Path, outside: str) -> None:
    with pytest.raises(StorageError, match=r"is outside of .*root, where .* --storage-roots DIR"):
        StorageRoots([root]).open(outside.format(root=root), {})


def test_no_path_leads_out_of_a_place_and_no_file_is_a_link_out_of_it(root: Path) -> None:
    place = StorageRoots([root]).open(str(root / "in"), {})
    assert str(place.child("../back")) == str(root / "back")
    for path in ("../..", "../out", "/etc", "../../beside"):
        with pytest.raises(StorageError, match="is outside of"):
            place.child(path)
    for use in (place.read, place.create, place.remove, place.version):
        with pytest.raises(StorageError, match="is outside of"):
            use("file")
    with pytest.raises(StorageError, match="is outside of"), place.open("file"):
        pass
    assert (root.parent / "beside" / "secret").read_text() == "secret"


@pytest.mark.parametrize(
    ("where", "opened"),
    [
        ("memory://bucket/ctr", "memory://bucket/ctr"),
        ("memory://bucket/ctr/a/../b/", "memory://bucket/ctr/b"),
        ("memory://bucket/x/../ctr/a", "memory://bucket/ctr/a"),  # opened as it was compared
        ("memory://bucket/other", None),
        ("memory://bucket/ctr2", None),
        ("memory://bucket/ctr/../../ctr/a", "memory://bucket/ctr/a"),  # above a host is nothing
        ("memory://bucket/ctr/../other", None),
        ("memory://elsewhere/ctr", None),
        ("s3://bucket/ctr", None),
        ("simplecache::memory://bucket/ctr", None),
        ("memory://bucket/ctr::file:///etc/passwd", None),
        ("memory://bucket/ctr/x::memory", None),
        ("file:///etc", None),
        ("/etc", None),
    ],
)
def test_a_url_is_below_a_root_of_its_own_protocol_and_host_or_refused(where: str, opened: str | None) -> None:
    pytest.importorskip("fsspec")
    roots = StorageRoots(["memory://bucket/ctr/"])
    if opened is None:
        with pytest.raises(StorageError, match=r"is outside of memory://bucket/ctr, where"):
            roots.open(where, {})
    else:
        place = roots.open(where, {})
        assert str(place) == opened
        with pytest.raises(StorageError, match="is outside of"):
            place.child("../../other")


def test_options_that_lead_elsewhere_are_those_that_the_server_was_started_with() -> None:
    pytest.importorskip("fsspec")
    roots = StorageRoots(["memory://bucket"], {"endpoint_url": "http://minio:9000"})
    place = roots.open("memory://bucket/a", {"key": "k", "endpoint_url": "http://minio:9000"})
    assert place.to_spec()[1] == {"endpoint_url": "http://minio:9000", "key": "k"}
    for given in ({"endpoint_url": "http://evil"}, {"client_kwargs": {}}, {"target_options": {}}, {"profile": "x"}):
        with pytest.raises(StorageError, match=r"storage option '\w+' may lead to another storage.*--storage-options"):
            roots.open("memory://bucket/a", given)


def test_roots_that_make_no_sense_are_refused() -> None:
    for wrong in ([""], ["file:///etc"], ["simplecache::s3://bucket"]):
        with pytest.raises(ValueError, match="storage root"):
            StorageRoots(wrong)
    with pytest.raises(TypeError, match="pass \\['/models'\\]"):
        StorageRoots("/models")


def test_the_default_is_the_current_directory_but_never_the_whole_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(StorageRoots()) == str(tmp_path)
    StorageRoots().open("ckpt", {})
    monkeypatch.chdir("/")
    with pytest.raises(StorageError, match="is outside of every directory"):
        StorageRoots().open("/etc", {})


@pytest.mark.slow
def test_a_peer_makes_an_endpoint_neither_write_nor_read_outside(root: Path) -> None:
    beside = root.parent / "beside"
    with shoal.local() as alone:
        alone.table("t").assign(KEYS, np.ones((100, 1), np.float32))
        alone.save(beside / "there")
        alone.save(root / "there", track=True)
        alone.save(beside / "base", track=True)
        alone.table("t").assign(KEYS[:1], np.zeros((1, 1), np.float32))
        alone.save(root / "delta", since=beside / "base")
    examples = root / "train.libsvm"
    examples.write_text("1 3:1\n0 4:1\n")
    before = sorted(beside.rglob("*"))
    with (
        local_cluster.running(2, timeout=TIMEOUT, storage_roots=[root]) as launched,
        shoal.connect(launched.address, timeout=TIMEOUT) as store,
    ):
        store.load(root / "there")
        for where in (beside / "new", root / "out" / "new"):
            where.mkdir(exist_ok=True)
            with pytest.raises(
                StorageError, match=r"server [01] at .* is outside of .*root, where .*--storage-roots DIR"
            ):
                store.check_storage(where)
            with pytest.raises(StorageError, match="is outside of"):
                store.save(where)
        (beside / "new").rmdir()
        for where in (beside / "there", root / "delta"):
            with pytest.raises(StorageError, match="is outside of"):
                store.load(where)
        store.check_storage(root)
        assert os.listdir(root / "in") == ["file"]
        store.save(root / "here")
    assert sorted(beside.rglob("*")) == before


@pytest.mark.slow
def test_servers_write_below_an_object_store_root_by_the_options_that_they_were_started_with() -> None:
    with object_store() as address:
        how = options(address)
        root = f"s3://{BUCKET}/rooted"
        with shoal.launch(servers=2, timeout=TIMEOUT, storage_roots=[root], storage_options=how) as store:
            store.table("t").assign(KEYS, np.ones((100, 1), np.float32))
            store.save(f"{root}/a", storage_options=how | {"key": "testing", "secret": "testing"})
            store.load(f"{root}/a", storage_options=how)
            with pytest.raises(StorageError, match="is outside of"):
                store.save(f"s3://{BUCKET}/other", storage_options=how)
            with pytest.raises(StorageError, match="storage option 'config_kwargs' may lead"):
                store.save(f"{root}/b", storage_options=how | {"config_kwargs": {}})


@pytest.mark.slow
def test_a_fit_whose_model_the_servers_may_not_write_ends_before_the_first_batch(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = root / "train.libsvm"
    examples.write_text("1 3:1\n0 4:1\n" * 1000)
    train = ["train", "lr", "--data", str(examples), "--format", "libsvm", "--progress", "1"]
    with local_cluster.running(1, timeout=TIMEOUT, storage_roots=[root]) as launched:
        for kept in ([], ["--resume"]):
            outside = [*train, "--cluster", launched.address, "--output", str(root.parent / "m"), *kept]
            assert main(outside) == 1
            errors = capsys.readouterr().err
            assert len(errors.splitlines()) == 1
            assert "--storage-roots DIR" in errors
        assert main([*train, "--cluster", launched.address, "--output", str(root / "m")]) == 0
