"""Damaged exports: every changed byte, every cut, every missing or exchanged file is found and named."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import shoal
from oracle import export as oracle

KEYS = np.arange(400, dtype=np.uint64)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An export of two tables, and a delta upon it."""
    folder = tmp_path_factory.mktemp("whole")
    rng = np.random.default_rng(7)
    with shoal.local(slots=4) as store:
        for name, dim in (("narrow", 1), ("wide", 5)):
            store.table(name, dim=dim, optimizer=shoal.SGD()).assign(KEYS, rng.standard_normal((400, dim)).astype("f"))
        store.export(folder / "base")
        store.table("narrow", optimizer=shoal.SGD()).push(KEYS[:50], np.ones(50, np.float32)).result()
        store.export(folder / "delta", since=folder / "base")
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "c")


def refused(folder, name):
    with pytest.raises(shoal.CorruptionError) as caught:
        shoal.export.open(folder)
    assert name in str(caught.value), caught.value


def data_files(folder):
    return sorted(folder.glob("*.frozen"))


@pytest.mark.slow
def test_a_changed_byte_anywhere_is_found(whole, tmp_path):
    for path in [*data_files(whole / "base"), *data_files(whole / "delta")]:
        good = path.read_bytes()
        for at in [*range(0, 64, 5), *np.random.default_rng(4).integers(64, len(good), 30).tolist(), len(good) - 1]:
            copied = shutil.copytree(whole, tmp_path / f"{path.name}-{at}")
            damaged = copied / path.parent.name / path.name
            damaged.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
            refused(copied / "delta", path.name)
            shutil.rmtree(copied)


def test_a_changed_byte_of_the_manifest_is_found(copy):
    path = copy / "base" / "manifest.json"
    good = path.read_bytes()
    for at in range(0, len(good), 7):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x01]) + good[at + 1 :])
        refused(copy / "base", "manifest.json")


def test_a_cut_or_longer_file_is_found(copy):
    for path in [*data_files(copy / "base"), copy / "base" / "manifest.json"]:
        good = path.read_bytes()
        for size in (0, 1, 63, 64, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:size])
            refused(copy / "delta", path.name)
        path.write_bytes(good + b"\0")
        refused(copy / "base", path.name)
        path.write_bytes(good)


def test_a_missing_file_is_found(copy):
    for path in [*data_files(copy / "base"), *data_files(copy / "delta"), copy / "base" / "manifest.json"]:
        good = path.read_bytes()
        path.unlink()
        refused(copy / "delta", path.name)
        path.write_bytes(good)
    shoal.export.open(copy / "delta").close()


def test_exchanged_files_are_found(copy):
    one, other = data_files(copy / "base")
    one.rename(copy / "x")
    other.rename(one)
    (copy / "x").rename(other)
    refused(copy / "base", one.name)


def test_a_base_that_was_replaced_is_found(copy):
    with shoal.local(slots=4) as store:
        store.table("narrow", optimizer=shoal.SGD()).assign(KEYS, np.ones(400, np.float32))
        store.export(copy / "base", overwrite=True)
    refused(copy / "delta", "was replaced")


def test_a_checkpoint_and_an_empty_folder_are_no_exports(tmp_path):
    with shoal.local() as store:
        store.save(tmp_path / "checkpoint")
    refused(tmp_path / "checkpoint", "is not the manifest of an export")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "manifest.json is missing")
    with pytest.raises(FileNotFoundError, match="there is no such export"):
        shoal.export.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(version=2), "newer shoal"),
        (lambda body: body.update(slots=3), "power of two"),
        (lambda body: body["tables"].append(body["tables"][0]), "the same name"),
        (lambda body: body["tables"][0].update(dtype="int4"), "no dtype int4"),
        (lambda body: body["tables"][0].update(init="Ones"), "Ones"),
        (lambda body: body["tables"][0]["files"][0].update(name="../x.frozen"), "not the name of a data file"),
        (lambda body: body["tables"][0]["sections"][0].__setitem__(2, 2**50), "outside of their file"),
        (lambda body: body["tables"][0]["sections"][0].__setitem__(1, 7), "no file 7"),
        (lambda body: body["tables"][0]["sections"][0].__setitem__(2, -64), "below 0"),
        (lambda body: body["tables"][0]["sections"][0].__setitem__(4, 1), "not the sum"),
        (lambda body: body["tables"][0]["sections"][0].__setitem__(5, 2**40), "are not"),
        (lambda body: body["tables"][0]["sections"][0].__setitem__(8, 5), "do not distinguish the hashes of a line"),
        (lambda body: body["tables"][0]["sections"].reverse(), "after slot"),
        (lambda body: body["tables"][0].pop("dim"), "dim"),
    ],
)
def test_a_forged_manifest_leads_nowhere(copy, change, message):
    path = copy / "base" / "manifest.json"
    body = oracle.body(copy / "base")
    change(body)
    path.write_bytes(oracle.seal(json.dumps(body, separators=(",", ":")).encode()))
    refused(copy / "base", message)


def test_lookups_in_unverified_garbage_stay_within_it(copy):
    rng = np.random.default_rng(11)
    keys = rng.integers(0, 2**64, 5000, np.uint64)
    for _ in range(20):
        for path in data_files(copy / "base"):
            good = path.read_bytes()
            path.write_bytes(good[:64] + rng.bytes(len(good) - 64))
        with shoal.export.open(copy / "base", verify=False) as export:
            for table in export.tables.values():
                table.pull(np.concatenate([KEYS, keys]))
                with pytest.raises(shoal.CorruptionError, match="ascending"):
                    len(table)
