"""The C library predicts with the bits of the exports' models, follows versions, and survives any bytes."""

from __future__ import annotations

import ctypes
import json
import random
import shutil
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

import c_library
import shoal
from c_library import DAMAGED, INVALID, UNSUPPORTED, PredictError, Predictor

GOLDEN = Path(__file__).parent.parent / "golden" / "predictions"
CASES = [json.loads(line) for line in (GOLDEN / "conformance.jsonl").read_text().splitlines()]

pytestmark = pytest.mark.skipif(not c_library.PATH.exists(), reason=f"{c_library.PATH} was not built")


def bits(probabilities: np.ndarray) -> list[str]:
    return [struct.pack(">d", p).hex() for p in probabilities.reshape(-1)]


@pytest.mark.parametrize("name", sorted({case["export"] for case in CASES}))
def test_golden_exports_predict_their_bits(name):
    with Predictor(GOLDEN / name) as model:
        for case in (case for case in CASES if case["export"] == name):
            if "keys" in case:
                offsets = np.array([0, len(case["keys"])], np.int64)
                keys, values = np.array(case["keys"], np.uint64), np.array(case["values"], np.float32)
                found = model.keys(offsets, keys, values)
            elif "line" in case:
                found = model.lines(case["line"].encode())
            else:
                found = model.columns(case["columns"])
                asked = json.dumps({"instances": [case["columns"]]}).encode()
                assert bits(model.json(asked)) == case["bits"]
            assert bits(found) == case["bits"], case


def test_rows_and_keys_are_those_of_python(tmp_path):
    with shoal.local() as store:
        table = store.table("user", dim=3, optimizer=shoal.SGD(lr=1.0), init=shoal.Uniform(0.1), seed=7)
        keys = np.array([7, 8, 2**64 - 1], np.uint64)
        table.push(keys[:2], np.ones((2, 3), np.float32)).result()
        store.export(tmp_path / "rows")
        expected = table.pull(keys)
    with Predictor(tmp_path / "rows") as rows:
        np.testing.assert_array_equal(rows.pull("user", keys), expected)
        assert (rows.info.outputs, rows.info.kind) == (0, b"")
        with pytest.raises(PredictError, match="tables without a model") as refused:
            rows.keys(np.array([0, 1], np.int64), keys)
        assert refused.value.status == UNSUPPORTED
        with pytest.raises(PredictError, match="no table 'item'"):
            rows.pull("item", keys)
    text = "ä.com".encode()
    assert c_library.library().shoal_key(text, ctypes.c_size_t(len(text)), ctypes.c_uint64(14)) == int(
        shoal.hash_strings(["ä.com"], field=14)[0]
    )
    assert c_library.library().shoal_version().decode() == shoal.__version__


def batch_of(rng):
    keys = rng.integers(0, 50, 300).astype(np.uint64)
    return shoal.Batch(rng.integers(0, 2, 100).astype(np.float32), np.arange(0, 301, 3, dtype=np.int64), keys, None)


@pytest.mark.slow
def test_threads_predict_while_versions_are_followed(tmp_path):
    """Each answer is of one version throughout, and the version after the last refresh is the newest one."""
    rng = np.random.default_rng(1)
    asked = batch_of(rng)
    wrong, over = [], threading.Event()
    with shoal.LogisticRegression(shoal.Adagrad(lr=0.5)) as trained:
        trained.partial_fit(batch_of(rng))
        trained.export(tmp_path / "1", track=True)
        known = [trained.probabilities(asked)]
        with Predictor(tmp_path) as model:

            def predict():
                while not over.is_set():
                    found = model.keys(asked.indptr, asked.keys)[:, 0]
                    if not any(np.array_equal(found, one) for one in list(known)):
                        wrong.append(found)

            threads = [threading.Thread(target=predict) for _ in range(3)]
            for thread in threads:
                thread.start()
            for number in range(2, 12):
                trained.partial_fit(batch_of(rng))
                known.append(trained.probabilities(asked))
                trained.export(tmp_path / str(number), since=tmp_path / str(number - 1))
                assert (model.refresh(), model.refresh()) == (True, False)
                assert model.info.version == number
            over.set()
            for thread in threads:
                thread.join()
            np.testing.assert_array_equal(model.keys(asked.indptr, asked.keys)[:, 0], known[-1])
    assert not wrong


def test_damaged_version_leaves_the_current_one(tmp_path):
    shutil.copytree(GOLDEN / "delta" / "1", tmp_path / "1")
    with Predictor(tmp_path) as model:
        before = model.keys(np.array([0, 1], np.int64), np.array([17], np.uint64))
        shutil.copytree(GOLDEN / "delta" / "2", tmp_path / "2")
        data = next((tmp_path / "2").glob("*.frozen"))
        data.write_bytes(data.read_bytes()[:-64])
        with pytest.raises(PredictError, match="instead of") as refused:
            model.refresh()
        assert (refused.value.status, model.info.version) == (DAMAGED, 1)
        np.testing.assert_array_equal(model.keys(np.array([0, 1], np.int64), np.array([17], np.uint64)), before)
        shutil.rmtree(tmp_path / "2")
        shutil.copytree(GOLDEN / "delta" / "2", tmp_path / "2")
        assert (model.refresh(), model.info.version) == (True, 2)


@pytest.mark.slow
@pytest.mark.parametrize("skip_checksums", [False, True])
def test_exports_of_any_bytes_are_refused_or_read(tmp_path, skip_checksums):
    draw = random.Random(1)
    keys = np.array([0, 7, 2**64 - 1, *range(20)], np.uint64)
    offsets = np.array([0, len(keys)], np.int64)
    refused = 0
    for attempt in range(300):
        where = tmp_path / str(attempt)
        shutil.copytree(GOLDEN / draw.choice(["fm", "lr", "fm-int8", "columns"]), where)
        file = draw.choice(sorted(where.iterdir()))
        data = bytearray(file.read_bytes())
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(data))
            kind = draw.randrange(3)
            if kind == 0:
                data[at] = draw.randrange(256)
            elif kind == 1:
                del data[at:]
            else:
                data[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(9)))
            data = data or bytearray(b"{")
        if file.name == "manifest.json" and draw.random() < 0.7:  # with a checksum that fits
            from shoal import _core

            body = bytes(data[29:-1])
            data = bytearray(b'{"crc32c":"%08x","body":%s}' % (_core.crc32c(body), body))
        file.write_bytes(data)
        try:
            with Predictor(where, skip_checksums=skip_checksums) as model:
                model.pull("lr", keys)
                model.keys(offsets, keys)
        except PredictError as error:
            refused += bool(str(error))
        shutil.rmtree(where)
    assert refused > 100


def test_wrong_arguments_are_errors_with_a_reason(tmp_path):
    error = c_library.Error()
    lib = c_library.library()
    assert lib.shoal_open(None, None, None, ctypes.byref(error)) == INVALID
    assert lib.shoal_open(str(tmp_path / "none").encode(), None, ctypes.byref(ctypes.c_void_p()), None) == DAMAGED
    with pytest.raises(PredictError, match="there is no such export"):
        Predictor(tmp_path / "none")
    with pytest.raises(PredictError, match="is not an export"):
        Predictor(tmp_path)
    assert lib.shoal_refresh(None, None, ctypes.byref(error)) == INVALID
    assert b"NULL" in error.message
    with Predictor(GOLDEN / "lr") as model:
        keys = np.arange(4, dtype=np.uint64)
        with pytest.raises(PredictError, match="offsets must begin with 0"):
            model.keys(np.array([1, 2], np.int64), keys)
        with pytest.raises(PredictError, match="fall from 3 to 2") as fallen:
            model.keys(np.array([0, 3, 2], np.int64), keys)
        assert fallen.value.example == 1
        huge = np.full(2, np.float32(3e38))
        with pytest.raises(PredictError, match="instance"):
            model.json(b'{"instances": [{"keys": [1]}, {"keys": ["x"]}]}')
        with pytest.raises(PredictError, match="3 examples, and room for 2"):
            model.json(b'{"instances": [{"keys": [1]}, {"keys": []}, {"keys": []}]}', room=2)
        model.keys(np.array([0, 2], np.int64), keys, huge)
        with pytest.raises(PredictError, match="lines of text"):
            model.lines(b"0 1:1\n")
        assert model.keys(np.array([0, 0], np.int64), keys).shape == (1, 1)
        assert model.keys(np.array([0], np.int64), keys).shape == (0, 1)
