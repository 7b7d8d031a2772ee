"""Checkpoints, exports and models from others: what is no regular file, and what claims more than it holds."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import zipfile

import numpy as np
import pytest

import shoal
from shoal import cli, models
from shoal.serve import ServedModel
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


READ = {"export": shoal.export.open, "checkpoint": load_checkpoint, "model": models.load}


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


@pytest.mark.parametrize("what", ["export", "checkpoint", "model"])
def test_a_description_is_not_read_if_it_is_larger_than_any(folder, tmp_path, what):
    shutil.copytree(folder / what, tmp_path / what)
    name = "model.json" if what == "model" else "manifest.json"
    os.truncate(tmp_path / what / name, 1 << 36)  # a file without blocks
    with pytest.raises(shoal.errors.StorageError, match=f"{name} cannot be read: it has 68719476736 bytes, and at"):
        READ[what](tmp_path / what)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_watched_export_is_replaced_beside_what_is_no_file(folder, tmp_path, kind):
    shutil.copytree(folder / "export", tmp_path / "1")
    with shoal.export.open(tmp_path) as export:
        shutil.copytree(folder / "export", tmp_path / "0")
        replaced(tmp_path / "0" / "manifest.json", kind)
        with pytest.raises(shoal.errors.StorageError, match="not a file"):
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
    with shoal.export.open(tmp_path) as export:
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
    with shoal.export.open(tmp_path / "e") as export:
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
        shoal.export.open(tmp_path / "e")


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


# ---- the dense part of a click model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def click_model(tmp_path_factory):
    pytest.importorskip("torch")
    where = tmp_path_factory.mktemp("click")
    rows = "".join(f"{k % 2},s{k % 5},u{k % 7}\n" for k in range(100))
    (where / "log.csv").write_text("click,site,user\n" + rows)
    (where / "c.toml").write_text(
        f'[data]\ndata = ["{where}/log.csv"]\nformat = "csv"\nlabel = "click"\ncategorical = ["site", "user"]\n'
        f'[model]\nname = "deepfm"\ndim = 4\nhidden = [8]\n[train]\nepochs = 1\n[output]\noutput = "{where}/m"\n'
    )
    assert cli.main(["train", "ctr", "--config", str(where / "c.toml"), "--quiet"]) == 0
    return where / "m"


def with_tower(folder, to, change, configure=lambda click: None):
    """Copy a click model with another dense part and configuration, under new checksums."""
    shutil.copytree(folder, to)
    (file,) = to.glob("tower-*.pt")
    file.write_bytes(change(file.read_bytes()))

    def describe(body):
        body["tower_crc32c"] = f"{shoal._core.crc32c(file.read_bytes()):08x}"
        configure(body["click"]["model"])

    rewritten(to, describe, "model.json")
    return to


def compressed(data):
    """Return a dense part of 8 MB of zeros, compressed."""
    import torch

    raw, packed = io.BytesIO(), io.BytesIO()
    torch.save({"module": {"a": torch.zeros(2 << 20)}, "optimizer": None, "random": None}, raw)
    with zipfile.ZipFile(raw) as before, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as after:
        for name in before.namelist():
            after.writestr(name, before.read(name))
    assert len(packed.getvalue()) < 1 << 16
    return packed.getvalue()


def expanded(data):
    """Return a dense part whose tensor has one number, and claims 10 ** 12."""
    import torch

    file = io.BytesIO()
    torch.save({"module": {"a": torch.zeros(1).expand(10**6, 10**6)}}, file)
    return file.getvalue()


def calling(data):
    """Return a dense part that makes a bytearray of 1 TB."""
    content = b"\x80\x02}X\x06\x00\x00\x00modulecbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85Rs."
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(file, "w") as after:
        for name in before.namelist():
            after.writestr(name, content if name.endswith(".pkl") else before.read(name))
    return file.getvalue()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[: len(data) // 2], "damaged: it is not the dense part"),
        (lambda data: b"x" * 100, "damaged: it is not the dense part"),
        (lambda data: b"", "damaged: it is not the dense part"),
        (compressed, "its files are compressed"),
        (expanded, "its tensors are larger than the file"),
        (calling, "it names builtins bytearray"),
    ],
)
def test_a_dense_part_that_is_damaged_or_claims_more_than_it_has_is_refused(click_model, tmp_path, change, reason):
    folder = with_tower(click_model, tmp_path / "m", change)
    with pytest.raises(shoal.CorruptionError, match=rf"tower-\w+\.pt is damaged.*{reason}|{reason}"):
        shoal.torch.load(folder)
    assert cli.main(["export", str(folder), "--output", str(tmp_path / "e"), "--quiet"]) == 0
    with pytest.raises(shoal.CorruptionError, match=reason):
        ServedModel(tmp_path / "e")


@pytest.mark.parametrize(
    "settings",
    [{"hidden": [100_000, 100_000]}, {"hidden": [1] * 200_000}, {"hidden": [9]}, {"hidden": "x"}, {"name": "x"}],
)
def test_a_configuration_of_another_size_is_refused_before_memory_is_taken(click_model, tmp_path, settings):
    folder = with_tower(click_model, tmp_path / "m", lambda data: data, lambda model: model.update(settings))
    with pytest.raises(shoal.CorruptionError, match=r"tower-\w+\.pt (is .* part of another|describes no model)"):
        shoal.torch.load(folder)


@pytest.mark.parametrize("change", [{"kind": "x"}, {"more_tables": 5}, {"schema": 3, "format": "csv"}, {"table": [1]}])
def test_a_description_that_is_none_of_a_model_is_a_damaged_export(folder, tmp_path, change):
    assert cli.main(["export", str(folder / "model"), "--output", str(tmp_path / "e"), "--quiet"]) == 0
    rewritten(tmp_path / "e", lambda body: body["model"].update(change))
    with pytest.raises((shoal.CorruptionError, ValueError), match=r"of its model is|has no table|is not made of"):
        ServedModel(tmp_path / "e")


def test_inspect_names_an_export_whose_model_is_none(folder, tmp_path, capsys):
    assert cli.main(["export", str(folder / "model"), "--output", str(tmp_path / "e"), "--quiet"]) == 0
    rewritten(tmp_path / "e", lambda body: body.update(model={}))
    assert cli.main(["inspect", str(tmp_path / "e")]) == 1
    assert "manifest.json cannot be read: its model has no 'kind'" in capsys.readouterr().err


MAKES_NONE = [{"optimizer": None}, {"staleness": ""}, {"features": 5}, {"model": 5}, {"tables": {"init": 1}}]


@pytest.mark.parametrize("change", MAKES_NONE)
def test_a_configuration_that_makes_no_model_is_damage(click_model, tmp_path, change):
    shutil.copytree(click_model, tmp_path / "m")
    rewritten(tmp_path / "m", lambda body: body["click"].update(change), "model.json")
    with pytest.raises(shoal.CorruptionError, match="describes no model"):
        shoal.torch.load(tmp_path / "m")


@pytest.mark.slow
def test_a_damaged_click_model_keeps_no_good_version_from_being_served(click_model, tmp_path):
    for number, folder in ((1, click_model), (2, click_model)):
        assert cli.main(["export", str(folder), "--output", str(tmp_path / "s" / str(number)), "--quiet"]) == 0
    with ServedModel(tmp_path / "s") as served:
        damaged = with_tower(click_model, tmp_path / "m", compressed)
        assert cli.main(["export", str(damaged), "--output", str(tmp_path / "s" / "9"), "--quiet"]) == 0
        with pytest.raises(shoal.CorruptionError, match="compressed"):
            served.reload()
        assert cli.main(["export", str(click_model), "--output", str(tmp_path / "new"), "--quiet"]) == 0
        rewritten(tmp_path / "new", lambda body: body.update(number=3))
        shutil.copytree(tmp_path / "new", tmp_path / "s" / "3")
        rewritten(tmp_path / "s" / "9", lambda body: body.update(number=9))
        with contextlib.suppress(shoal.CorruptionError):
            served.reload()
        assert served.now.version == 3
