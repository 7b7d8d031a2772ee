"""Checkpoints, exports and models from others: what is no regular file, and what claims more than it holds."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

import shoal
from shoal import models
from shoal.storage.checksummed_json import encode_checksummed

pytestmark = pytest.mark.timeout(120)  # a pipe that is opened waits for its writer

KEYS = np.arange(200, dtype=np.uint64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An export, a checkpoint and a model."""
    where = tmp_path_factory.mktemp("files")
    with shoal.local(slots=4) as store:
        store.table("t", dim=4, optimizer=shoal.SGD()).assign(KEYS, np.ones((200, 4), np.float32))
        store.export(where / "export")
        store.save(where / "checkpoint")
    with shoal.LogisticRegression() as model:
        model.partial_fit(shoal.Batch(np.ones(2, np.float32), np.arange(3), KEYS[:2], None))
        model.save(where / "model")
    return where


def load_checkpoint(path):
    with shoal.local() as store:
        store.load(path)


READ = {"export": shoal.open_export, "checkpoint": load_checkpoint, "model": models.load}


def replaced(path, kind):
    """Put something else in place of a file."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


def rewritten(folder, change, name="manifest.json"):
    """Change the body of a checksummed file."""
    body = json.loads((folder / name).read_bytes())["body"]
    change(body)
    (folder / name).write_bytes(encode_checksummed(json.dumps(body, separators=(",", ":")).encode()))


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
@pytest.mark.parametrize(
    ("what", "files"),
    [
        ("export", "manifest.json"),
        ("export", "*.frozen"),
        ("checkpoint", "manifest.json"),
        ("checkpoint", "*.slots"),
        ("model", "model.json"),
    ],
)
def test_what_is_no_regular_file_is_refused_without_reading_it(folder, tmp_path, what, files, kind):
    shutil.copytree(folder / what, tmp_path / what)
    (file,) = (tmp_path / what).glob(files)
    replaced(file, kind)
    with pytest.raises(shoal.ShoalError, match=f"{file.name} (cannot be read: it is a {kind}, not a file|is missing)"):
        READ[what](tmp_path / what)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_watched_export_is_replaced_beside_what_is_no_file(folder, tmp_path, kind):
    shutil.copytree(folder / "export", tmp_path / "1")
    with shoal.open_export(tmp_path) as export:
        shutil.copytree(folder / "export", tmp_path / "0")
        replaced(tmp_path / "0" / "manifest.json", kind)
        with pytest.raises(shoal.StorageError, match="not a file"):
            export.refresh()
        shutil.copytree(folder / "export", tmp_path / "2")
        rewritten(tmp_path / "2", lambda body: body.update(number=2))
        assert export.refresh()
        assert export.version == 2


@pytest.mark.parametrize("depth", [900, 990, 1100, 100_000])
def test_nested_json_is_a_damaged_file(folder, tmp_path, depth):
    shutil.copytree(folder / "export", tmp_path / "1")
    nested = b'{"format":"shoal export","version":1,"model":' + b"[" * depth + b"]" * depth + b"}"
    for what, name in (("export", "manifest.json"), ("checkpoint", "manifest.json"), ("model", "model.json")):
        shutil.copytree(folder / what, tmp_path / what)
        raw = b'{"crc32c":"%08x","body":%s}' % (shoal._core.crc32c(nested), nested)
        (tmp_path / what / name).write_bytes(raw)
        with pytest.raises(shoal.CorruptionError, match=name):
            READ[what](tmp_path / what)
    with shoal.open_export(tmp_path) as export:
        assert export.version == 1


@pytest.mark.parametrize("what", ["export", "checkpoint"])
def test_a_store_has_a_bounded_number_of_tables(folder, tmp_path, what):
    shutil.copytree(folder / what, tmp_path / what)
    rewritten(tmp_path / what, lambda body: body.update(
        tables=[body["tables"][0] | {"name": f"t{k}", "rows": 0, "sections": [], "files": []} for k in range(1025)]
    ))  # fmt: skip
    with pytest.raises(shoal.CorruptionError, match="1025 tables: a store has at most 1024"):
        READ[what](tmp_path / what)


def test_tables_without_rows_take_no_memory_in_an_export(folder, tmp_path):
    shutil.copytree(folder / "export", tmp_path / "e")
    rewritten(tmp_path / "e", lambda body: body.update(slots=16384, tables=[
        body["tables"][0] | {"name": f"t{k}", "rows": 0, "sections": [], "files": []} for k in range(1000)
    ]))  # fmt: skip
    before = _resident()
    with shoal.open_export(tmp_path / "e") as export:
        table = export.table("t999")
        assert not table.contains(KEYS).any()
        assert not table.pull(KEYS).any()
        assert len(table) == 0
    assert _resident() - before < 200 << 20


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_tables_of_few_rows_take_memory_in_proportion_to_their_data(folder, tmp_path):
    shutil.copytree(folder / "export", tmp_path / "e")
    (data,) = (tmp_path / "e").glob("*.frozen")

    def change(body):
        (table,) = body["tables"]
        section = table["sections"][0]
        body["slots"] = 16384
        body["tables"] = []
        for k in range(1000):
            os.link(data, data.with_name(f"{k}.frozen"))
            file = {"name": f"{k}.frozen", "bytes": data.stat().st_size}
            body["tables"].append(table | {"name": f"t{k}", "rows": section[4], "sections": [section], "files": [file]})

    rewritten(tmp_path / "e", change)
    with pytest.raises(shoal.CorruptionError, match="16384 slots take 1048576000 bytes of memory"):
        shoal.open_export(tmp_path / "e")


def test_rows_that_do_not_fit_in_their_bytes_are_refused_before_memory_is_reserved(folder, tmp_path):
    shutil.copytree(folder / "checkpoint", tmp_path / "c")

    def change(body):
        (table,) = body["tables"]
        for section in table["sections"]:
            section[4] = section[3] // 8  # as if a row were its hash alone
        table["rows"] = sum(section[4] for section in table["sections"])

    rewritten(tmp_path / "c", change)
    with pytest.raises(shoal.CorruptionError, match="rows do not fit in its bytes"):
        load_checkpoint(tmp_path / "c")


def test_a_store_refuses_more_tables_and_longer_names():
    with shoal.local(slots=2) as store:
        for k in range(1024):
            store.table(f"t{k}")
        with pytest.raises(ValueError, match="1025 tables: a store has at most 1024"):
            store.table("one more")
        assert store.table("t7") is store.table("t7")
        with pytest.raises(ValueError, match="a table's name has 1024 characters at most, got 20000000"):
            store.table("x" * 20_000_000)
