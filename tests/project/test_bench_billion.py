"""The run that shows a billion keys, at a million, and at ten for their memory: it checks its own results."""

import json
import subprocess
import sys

import numpy as np
import pytest

import shoal
from paths import ROOT

BENCH = ROOT / "bench"


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    from billion import stream

    return stream


def bench(directory, *arguments):
    """Run it."""
    command = [sys.executable, BENCH / "bench_billion.py", "--no-raw", "--dir", directory, "--rounds", "1", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


@pytest.mark.long
def test_ten_million_keys_are_created_within_their_memory(tmp_path):
    done = bench(tmp_path, "--keys", "1e7", "--steps", "create")
    assert done.returncode == 0, done.stderr
    created = json.loads((tmp_path / "figures.json").read_text())["steps"]["create"]
    assert 18 < created["bytes_per_key"] < 20
    assert created["growths"] > 10_000


@pytest.mark.slow
def test_a_million_keys_are_created_trained_on_saved_and_loaded(tmp_path):
    done = bench(tmp_path, "--keys", "1e6")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    steps = found["steps"]
    assert list(steps) == ["create", "traffic", "pull", "lr", "save", "verify", "load", "pull, loaded"]
    assert steps["load"]["digest"] == steps["save"]["digest"]
    assert steps["verify"]["rows"] == 1_000_001  # the bias
    assert not (tmp_path / "checkpoint").exists()
    assert "digest as saved" in done.stdout


@pytest.mark.long
def test_rows_of_16_weights_in_16_bits_are_created_saved_and_loaded(tmp_path):
    done = bench(tmp_path, "--keys", "3e5", "--kind", "rowwise")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "figures.json").read_text())["steps"]["load"]["rows_per_second"] > 0


@pytest.mark.slow
def test_a_checkpoint_of_other_rows_fails_the_run(tmp_path):
    assert bench(tmp_path, "--keys", "1e5", "--steps", "create", "save").returncode == 0
    with shoal.local() as store:
        store.load(tmp_path / "checkpoint")
        store.tables["keys"].push(np.array([7], np.uint64), np.ones(1, np.float32)).result()
        store.save(tmp_path / "checkpoint", overwrite=True)
    done = bench(tmp_path, "--keys", "1e5", "--steps", "load")
    assert done.returncode != 0
    assert "100000 rows were saved, 100001 loaded" in done.stderr


@pytest.mark.slow
def test_the_stream_has_every_key_once_and_its_examples_cover_them(stream):
    for n in (1, 70_000, 300_000):
        made = stream.Stream(n)
        keys = np.concatenate([made.keys(begin, end) for begin, end in made.batches()])
        assert len(np.unique(keys)) == n
        tails = [
            made.examples(number).keys.reshape(-1, stream.HEADS + stream.TAILS)[:, stream.HEADS :]
            for number in range(made.example_batches())
        ]
        assert np.array_equal(np.unique(tails), np.sort(keys))
        heads = made.examples(0).keys.reshape(-1, stream.HEADS + stream.TAILS)[:, : stream.HEADS]
        assert np.isin(heads, keys).all()
        assert np.array_equal(made.examples(3).keys, made.examples(3).keys)


def test_traffic_is_zipf_over_all_numbers(stream):
    made = stream.Stream(1_000_000)
    drawn = made.zipf(np.random.default_rng(1), 200_000)
    counts = np.bincount(drawn.astype(np.int64), minlength=1_000_000)
    assert drawn.max() > 900_000
    for rank in (1, 3, 7):  # beside rank 0: (1 / 2)^1.05 and so on, as integrals over a unit
        low, high = (np.array([rank + 1.0, rank + 2.0]) ** -0.05)[[0, 1]]
        assert counts[rank] / counts[0] == pytest.approx((low - high) / (1 - 2**-0.05), rel=0.1)


def test_first_gradients_have_exact_squares(stream):
    grads = stream.first_gradients(np.arange(1000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    assert ((grads.astype(np.float64) ** 2).astype(np.float32) == grads * grads).all()
    assert (np.abs(grads) > 0).all()
    assert len(np.unique(grads)) > 50
