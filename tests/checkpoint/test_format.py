"""The checkpoint format: an independent reader finds what the document says; forged manifests are refused.

A forged manifest has a right seal: some other writer made it, with a fault of its own.
"""

from __future__ import annotations

import copy
import shutil

import numpy as np
import pytest

import shoal
from oracle import checkpoint as document

KEYS = np.arange(60, dtype=np.uint64)
TABLES = {
    "sgd": {"dim": 2, "optimizer": shoal.SGD()},
    "momentum": {"dim": 1, "optimizer": shoal.Momentum(nesterov=True)},
    "adagrad": {"dim": 5, "optimizer": shoal.Adagrad(clip_norm=1.0), "dtype": "float16"},
    "rowwise": {"dim": 3, "optimizer": shoal.RowWiseAdagrad(), "dtype": "bfloat16"},
    "ftrl": {"dim": 1, "optimizer": shoal.FTRL(l1=0.1)},
    "group": {"dim": 7, "optimizer": shoal.GroupFTRL(), "init": shoal.Constant(0.5)},
    "adam": {"dim": 3, "optimizer": shoal.Adam(per_row_step=True), "init": shoal.Normal(0.1, seed=2**64 - 1)},
    "adamw": {"dim": 2, "optimizer": shoal.AdamW(), "seed": 2**64 - 1},
    "ünï ✓": {"dim": 16, "optimizer": shoal.SGD()},
    "empty": {},
}


def test_the_seal_is_the_published_crc32c():
    """RFC 3720, appendix B.4."""
    assert document.crc32c(bytes(32)) == 0x8A9136AA
    assert document.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert document.crc32c(bytes(range(32))) == 0x46DD794E
    assert document.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("slots", [2, 64])
def test_a_reader_made_from_the_document_alone_reads_what_was_saved(slots, rng, tmp_path):
    with shoal.local(slots=slots) as store:
        for name, description in TABLES.items():
            table = store.table(name, **description)
            if name != "empty":
                table.push(KEYS, rng.standard_normal((60, table.dim)).astype(np.float32)).result()
        store.save(tmp_path / "c")
        read = document.read(tmp_path / "c")
        assert list(read) == list(TABLES)
        for name, columns in read.items():
            hashes = columns.pop("hash").ravel()
            np.testing.assert_array_equal(hashes, np.sort(shoal.data.mix(KEYS)) if name != "empty" else [])
            state = store.tables[name].state(shoal.data.unmix(hashes.astype(np.uint64)))
            assert columns.keys() == state.keys()
            for column, values in columns.items():
                np.testing.assert_array_equal(values.reshape(state[column].shape), state[column], err_msg=name)


def test_the_manifest_has_the_fields_of_the_document(tmp_path):
    with shoal.local(slots=8) as store:
        optimizer = shoal.Momentum(lr=0.5, nesterov=True, clip_value=2.0)
        table = store.table("t", dim=2, optimizer=optimizer, init=shoal.Uniform(0.25, seed=9), dtype="float16", seed=3)
        table.push(KEYS, np.ones((60, 2), np.float32)).result()
        store.save(tmp_path / "c")
    body = document.manifest(tmp_path / "c")
    assert list(body) == ["format", "version", "slots", "tables"]
    (found,) = body["tables"]
    described = {key: found[key] for key in list(found)[:11]}
    assert described == {
        "name": "t",
        "dim": 2,
        "dtype": "float16",
        "seed": 3,
        "optimizer": "Momentum",
        "params": {"lr": 0.5, "mu": 0.9, "nesterov": 1.0, "weight_decay": 0.0, "clip_value": 2.0},
        "init": "Uniform",
        "init_parameter": 0.25,
        "init_seed": 9,
        "step": 1,
        "rows": 60,
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "c"
    with shoal.local(slots=4) as store:
        for name in ("a", "b"):
            store.table(name, dim=2, optimizer=shoal.SGD(lr=1.0)).push(KEYS, np.ones((60, 2), np.float32)).result()
        store.save(folder)
    return folder


@pytest.fixture
def forged(whole, tmp_path):
    """Return a function that loads a copy of the checkpoint with a changed manifest under a right seal."""

    def load(change, store):
        folder = shutil.copytree(whole, tmp_path / "c", dirs_exist_ok=True)
        body = copy.deepcopy(document.manifest(whole))
        change(body)
        (folder / "manifest.json").write_bytes(document.sealed(body))
        store.load(folder)

    return load


def test_fields_that_a_reader_does_not_know_are_passed_over(forged):
    def change(body):
        body["written_by"] = {"name": "shoal 9", "when": [2026, 11]}
        body["tables"][0]["admission"] = None

    with shoal.local() as store:
        forged(change, store)
        assert np.all(store.tables["a"].pull(KEYS) == -1)


def on_table(**fields):
    return lambda body: body["tables"][0].update(fields)


def on_section(place, value):
    return lambda body: body["tables"][0]["sections"][1].__setitem__(place, value)


def on_params(**params):
    return lambda body: body["tables"][0]["params"].update(params)


FORGERIES = {
    "another version": lambda body: body.update(version=2),
    "another format": lambda body: body.update(format="shoal model"),
    "no version": lambda body: body.pop("version"),
    "a version that is text": lambda body: body.update(version="1"),
    "no tables": lambda body: body.pop("tables"),
    "tables that are a number": lambda body: body.update(tables=7),
    "3 slots": lambda body: body.update(slots=3),
    "0 slots": lambda body: body.update(slots=0),
    "10^15 slots": lambda body: body.update(slots=10**15),
    "-4 slots": lambda body: body.update(slots=-4),
    "a name given twice": lambda body: body["tables"][1].update(name="a"),
    "an empty name": on_table(name=""),
    "dim 0": on_table(dim=0),
    "dim 3": on_table(dim=3),
    "dim 10^6": on_table(dim=10**6),
    "dtype float64": on_table(dtype="float64"),
    "dtype float16": on_table(dtype="float16"),
    "an unknown optimizer": on_table(optimizer="Lion"),
    "an optimizer that is the name of something else": on_table(optimizer="Uniform"),
    "an optimizer with other columns": on_table(
        optimizer="Adagrad", params={"lr": 1.0, "eps": 0.0, "n0": 0.0, "weight_decay": 0.0}
    ),
    "an unknown parameter": on_params(speed=1.0),
    "a parameter out of range": on_params(lr=-1.0),
    "an unknown initializer": on_table(init="Xavier"),
    "an initializer out of range": on_table(init="Uniform", init_parameter=-1.0),
    "a negative seed": on_table(seed=-1),
    "a seed of 65 bits": on_table(seed=2**64),
    "a negative step": on_table(step=-1),
    "a step that is no integer": on_table(step=0.5),
    "another number of rows": on_table(rows=61),
    "a file outside": lambda body: body["tables"][0]["files"][0].update(name="../c/manifest.json"),
    "a file of another length": lambda body: body["tables"][0]["files"][0].update(bytes=64),
    "a slot too large": on_section(0, 4),
    "a negative slot": on_section(0, -1),
    "a slot given twice": on_section(0, 0),
    "a file that is not there": on_section(1, 1),
    "a negative file": on_section(1, -1),
    "an offset beyond the end": on_section(2, 10**9),
    "a negative offset": on_section(2, -64),
    "an offset beside": on_section(2, 64),
    "a length beyond the end": on_section(3, 10**9),
    "a negative length": on_section(3, -1),
    "a length that is shorter": on_section(3, 64),
    "another checksum": on_section(5, 1),
    "a section of three numbers": lambda body: body["tables"][0]["sections"].__setitem__(0, [0, 0, 64]),
    "more rows than bytes": lambda body: (
        on_section(4, 10**6)(body),
        body["tables"][0].update(rows=sum(s[4] for s in body["tables"][0]["sections"])),
    ),
    "2^60 rows": lambda body: (
        on_section(4, 2**60)(body),
        body["tables"][0].update(rows=sum(s[4] for s in body["tables"][0]["sections"])),
    ),
    "the same rows twice": lambda body: (
        body["tables"][0]["sections"].__setitem__(1, [1, *body["tables"][0]["sections"][0][1:]]),
        body["tables"][0].update(rows=sum(s[4] for s in body["tables"][0]["sections"])),
    ),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forged_manifest_is_refused_and_nothing_is_loaded(change, forged):
    with shoal.local() as store:
        table = store.table("b", dim=2, optimizer=shoal.SGD(lr=1.0))
        table.push(KEYS[:5], np.ones((5, 2), np.float32)).result()
        with pytest.raises(shoal.CorruptionError):
            forged(change, store)
        assert set(store.tables) == {"b"}
        assert len(table) == 5


def test_sections_whose_hashes_do_not_ascend_are_refused(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "c")
    body = document.manifest(whole)
    table = body["tables"][0]
    section = table["sections"][0]
    path = folder / table["files"][section[1]]["name"]
    data = bytearray(path.read_bytes())
    start = section[2]
    data[start : start + 8], data[start + 8 : start + 16] = data[start + 8 : start + 16], data[start : start + 8]
    path.write_bytes(data)
    section[5] = document.crc32c(bytes(data[start : start + section[3]]))
    (folder / "manifest.json").write_bytes(document.sealed(body))
    with shoal.local() as store:
        with pytest.raises(shoal.CorruptionError, match="ascend") as caught:
            store.load(folder)
        assert path.name in str(caught.value)
        assert not store.tables
