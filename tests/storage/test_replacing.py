"""Checkpoints and exports take the place of their own kind, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from places import BUCKET, options
from shoal import cli
from shoal.storage.base import StorageDir
from shoal.storage.open import open_dir
from stores import KINDS, opened

KEYS = np.arange(9, dtype=np.uint64)
WRITERS = ("save", "export", "save in the background", "compact a checkpoint", "compact an export")


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> StorageDir:
    """An empty directory of this machine, or one of an object store."""
    if request.param == "local":
        return open_dir(tmp_path / "root")
    address = request.getfixturevalue("s3")
    return open_dir(f"s3://{BUCKET}/{tmp_path.name}", options(address))


def where(place: StorageDir) -> tuple[Any, dict[str, Any]]:
    """What calls take for a place."""
    given, how = place.to_spec()
    return given, ({"storage_options": how} if how else {})


def contents(place: StorageDir) -> dict[str, bytes]:
    here = {name: place.read(name) for name in place.names()}
    for folder in place.subdirectories():
        here |= {f"{folder}/{name}": data for name, data in contents(place.child(folder)).items()}
    return here


def fill(place: StorageDir, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        folder, _, name = path.rpartition("/")
        target = place.child(folder) if folder else place
        target.make()
        with target.create(name) as file:
            file.write(data)


def writers(store: shoal.Store, root: StorageDir) -> dict[str, Callable[..., Any]]:
    """Everything that writes a checkpoint or an export, by name; each takes a place and whether to overwrite."""
    table = store.table("t", dim=2, optimizer=shoal.SGD(lr=1.0))
    table.push(KEYS, np.ones((len(KEYS), 2), np.float32))
    store.save(where(root.child("base"))[0], **where(root)[1])
    store.export(where(root.child("exported"))[0], **where(root)[1])

    def call(name: str) -> Callable[..., Any]:
        def write(place: StorageDir, **how: Any) -> None:
            given, options = where(place)
            if name == "export":
                store.export(given, **how, **options)
            elif name == "save":
                store.save(given, **how, **options)
            elif name == "save in the background":
                store.save(given, wait=False, **how, **options).result()
            else:
                source = root.child("base" if name == "compact a checkpoint" else "exported")
                compact = shoal.checkpoint.compact if name == "compact a checkpoint" else shoal.export.compact
                compact(where(source)[0], given, **how, **options)

        return write

    # What they ask of an object store is the same for all of them, and slow.
    return {name: call(name) for name in (WRITERS if root.local is not None else WRITERS[:2])}


OTHERS = {
    "a thesis": {"chapter.tex": b"x"},
    "a manifest of something else": {"manifest.json": b'{"name":"my app"}', "icon.svg": b"<svg/>"},
    "an empty manifest": {"manifest.json": b""},
    "a model": {"model.json": b"{}", "checkpoint-00000001/manifest.json": b"{}"},
    "a folder": {"1/manifest.json": b"{}"},
}


@pytest.mark.slow
def test_a_directory_that_holds_something_else_is_refused_and_stays_as_it_is(root: StorageDir) -> None:
    with opened("local", slots=4) as store:
        made = writers(store, root)
        for number, (what, files) in enumerate(OTHERS.items()):
            place = root.child(f"other-{number}")
            fill(place, files)
            for name, write in made.items():
                for overwrite in ({}, {"overwrite": True}):
                    with pytest.raises(ValueError, match=r"other-\d (is neither empty nor|holds a manifest.json that)"):
                        write(place, **overwrite)
                assert place.local is None or contents(place) == files, (what, name)
            assert contents(place) == files, what


@pytest.mark.slow
def test_one_of_the_same_kind_is_replaced_only_on_request(root: StorageDir) -> None:
    with opened("local", slots=4) as store:
        made = writers(store, root)
        for name, write in made.items():
            place = root.child(name.replace(" ", "-"))
            write(place)  # there is nothing yet
            before = contents(place)
            with pytest.raises(ValueError, match=r"holds an? (checkpoint|export) already: pass overwrite=True"):
                write(place)
            assert contents(place) == before
            write(place, overwrite=True)
            assert len(contents(place)) == len(before)
            other = made["save" if "export" in name else "export"]
            with pytest.raises(ValueError, match=r"a manifest\.json that does not belong to an? (checkpoint|export)"):
                other(place)


@pytest.mark.slow
def test_what_a_killed_writer_left_behind_is_no_hindrance(root: StorageDir) -> None:
    with opened("local", slots=4) as store:
        made = writers(store, root)
        for name, left in (("save", "0123abcd-0-0.slots"), ("export", "0123abcd-0-0.frozen")):
            place = root.child(f"left-{name}")
            fill(place, {left: b"x", ".manifest.json.0123abcd.tmp": b"{"})
            made[name](place, overwrite=False)
            assert left not in contents(place)


@pytest.mark.slow
def test_deltas_go_on_as_they_did(root: StorageDir) -> None:
    with opened("local", slots=4) as store:
        made = writers(store, root)
        one, two = root.child("1"), root.child("2")
        for _ in range(2):
            made["save"](one, track=True, overwrite=True)
            made["save"](two, since=where(one)[0], overwrite=True)
    with shoal.local(slots=4) as store:
        store.load(where(two)[0], **where(two)[1])
        assert len(store.tables["t"]) == len(KEYS)


@pytest.mark.parametrize("kind", KINDS)
def test_stores_of_every_kind_refuse_it(kind: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis").write_text("x")
    with opened(kind, slots=4) as store:
        store.table("t", dim=1).push(KEYS, np.ones((len(KEYS), 1), np.float32))
        for write in (store.save, store.export):
            with pytest.raises(ValueError, match=r"d is neither empty nor an? (checkpoint|export), it holds thesis"):
                write(tmp_path / "d")
        store.save(tmp_path / "c")
        with pytest.raises(ValueError, match="holds a checkpoint already"):
            store.save(tmp_path / "c")
        store.save(tmp_path / "c", overwrite=True)
    assert (tmp_path / "d" / "thesis").read_text() == "x"


def test_on_the_command_line_replacing_has_to_be_asked_for(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log").write_text("1 3:1\n0 4:1\n")
    assert cli.main(["train", "lr", "--data", "log", "--format", "libsvm", "--output", "m4", "--quiet"]) == 0
    before = contents(open_dir(tmp_path / "m4"))
    for target in ("m4", "m4/" + open_dir(tmp_path / "m4").subdirectories()[0]):
        for more in ([], ["--overwrite"]):
            assert cli.main(["export", "m4", "--output", target, *more]) == 2
            assert f"{target} " in capsys.readouterr().err
    assert contents(open_dir(tmp_path / "m4")) == before
    assert cli.main(["export", "m4", "--output", "e"]) == 0
    for source, out in ((["export", "m4"], "e"), (["compact", "e"], "f")):
        assert cli.main([*source, "--output", out, "--quiet", *(["--overwrite"] if out == "f" else [])]) == (
            0 if out == "f" else 2
        )
        assert cli.main([*source, "--output", out, "--quiet"]) == 2
        assert "holds an export already: pass --overwrite, or choose another name" in capsys.readouterr().err
        assert cli.main([*source, "--output", out, "--quiet", "--overwrite"]) == 0
