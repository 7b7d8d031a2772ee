"""A model that is calibrated: what goes through the map, what is kept, what makes it forget."""

import json

import msgspec
import numpy as np
import pytest

import shoal
from shoal import cli
from shoal.metrics import probabilities
from shoal.models import calibration, files


def clicks(seed, n=6000, keys=40):
    """Draw examples of three features out of a planted model."""
    random = np.random.default_rng(seed)
    weights = np.random.default_rng(1).normal(0, 1, keys)
    chosen = random.integers(0, keys, (n, 3))
    labels = (random.random(n) < probabilities(weights[chosen].sum(1) - 2)).astype(np.float32)
    return shoal.Batch(labels, np.arange(0, 3 * n + 1, 3), chosen.reshape(-1).astype(np.uint64), None)


def fitted():
    """Train a model that is too sure of itself: no negatives but one in five, and nobody told it."""
    batch = clicks(2)
    kept = (batch.labels == 1) | (np.arange(len(batch)) % 5 == 0)
    some = shoal.Batch(
        batch.labels[kept],
        np.arange(0, 3 * int(kept.sum()) + 1, 3),
        batch.keys.reshape(-1, 3)[kept].reshape(-1),
        None,
    )
    model = shoal.LogisticRegression(shoal.FTRL(alpha=0.05))
    model.partial_fit(some)
    model.partial_fit(some)
    return model


@pytest.mark.parametrize(("method", "fit"), [("isotonic", calibration.isotonic), ("platt", calibration.platt)])
def test_probabilities_go_through_the_map_that_was_fitted_and_come_true(method, fit):
    held_out, fresh = clicks(3), clicks(4)
    with fitted() as model:
        raw = model.decision_function(held_out)
        before = model.evaluate(fresh)
        expected = fit(raw, held_out.labels)
        assert model.calibrate([held_out], method) is model
        assert np.allclose(model.probabilities(held_out), expected.apply(raw), rtol=1e-12)
        assert np.array_equal(model.probabilities(held_out), probabilities(model.decision_function(held_out)))
        after = model.evaluate(fresh)
        assert abs(after.calibration - 1) < 0.1 < abs(before.calibration - 1)
        assert after.logloss < before.logloss
        assert abs(after.auc - before.auc) < 0.005
        again = model.probabilities(held_out)
        model.calibrate(held_out, method)  # from the margins, not from what was calibrated
        assert np.array_equal(model.probabilities(held_out), again)


def test_weights_of_held_out_examples_count():
    held_out = clicks(3)
    doubled = shoal.Batch(
        held_out.labels, held_out.indptr, held_out.keys, None, weights=1 + 4 * held_out.labels.astype(np.float32)
    )
    with fitted() as model:
        plain = model.calibrate(held_out).probabilities(held_out).mean()
        assert model.calibrate(doubled).probabilities(held_out).mean() > plain + 0.1


@pytest.mark.parametrize("method", ["isotonic", "platt"])
def test_a_calibrated_model_is_saved_and_read_to_the_bit_and_forgets_when_it_learns_on(method, tmp_path):
    held_out = clicks(3)
    with fitted() as model:
        raw = model.decision_function(held_out)
        model.calibrate(held_out, method).save(tmp_path / "ctr")
        with shoal.LogisticRegression.load(tmp_path / "ctr") as read:
            assert np.array_equal(read.decision_function(held_out), model.decision_function(held_out))
            assert not np.array_equal(read.decision_function(held_out), raw)
            seen = shoal.metrics.Accumulator()
            read.learn(held_out, read.sort(held_out), seen)
            assert read.calibration is None
        model.partial_fit(clicks(5, n=1))
        assert model.calibration is None


def test_what_cannot_be_calibrated_says_so_and_changes_nothing():
    held_out = clicks(3)
    nothing = shoal.Batch(np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(0, np.uint64), None)
    with fitted() as model:
        model.calibrate(held_out, "platt")
        before = model.probabilities(held_out)
        with pytest.raises(ValueError, match="'isotonic' or 'platt'"):
            model.calibrate(held_out, "sigmoid")
        with pytest.raises(ValueError, match="0 examples"):
            model.calibrate(nothing)
        with pytest.raises(TypeError, match="is a path"):
            model.calibrate("day_1.tsv")
        assert np.array_equal(model.probabilities(held_out), before)
    with shoal.LogisticRegression() as empty, pytest.raises(ValueError, match="not fitted yet"):
        empty.calibrate(held_out)


def test_a_map_that_cannot_be_read_is_corruption(tmp_path):
    with fitted() as model:
        model.save(tmp_path / "ctr")
        described = msgspec.structs.replace(files.read(tmp_path / "ctr"), calibration={"kind": "platt"})
        files.save(tmp_path / "other", described, model.store, [model.table], overwrite=False)
    with pytest.raises(shoal.CorruptionError, match="platt"):
        shoal.LogisticRegression.load(tmp_path / "other")


def write_libsvm(path, batch):
    rows = batch.keys.reshape(-1, 3)
    path.write_text("".join(f"{int(y)} {a}:1 {b}:1 {c}:1\n" for y, (a, b, c) in zip(batch.labels, rows, strict=True)))


def test_the_command_calibrates_on_the_held_out_file_one_model_or_a_grid(tmp_path, capsys):
    write_libsvm(tmp_path / "train", clicks(2))
    write_libsvm(tmp_path / "valid", clicks(3))
    train = ["train", "lr", "--data", str(tmp_path / "train"), "--format", "libsvm"]
    held_out = ["--valid", str(tmp_path / "valid"), "--calibrate", "platt"]
    assert cli.main([*train, *held_out, "--output", str(tmp_path / "one")]) == 0
    assert "calibrated   on --valid by Platt scaling" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "one")]) == 0
    assert "calibrated  Platt scaling" in capsys.readouterr().out
    assert cli.main([*train, *held_out, "--grid", "l1=0,1", "--output", str(tmp_path / "best"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [one["calibration"] for one in facts["grid"]] == ["platt", None]  # the best one is saved
    assert files.read(tmp_path / "best").calibration["kind"] == "platt"
    assert cli.main([*train, "--calibrate", "platt", "--output", str(tmp_path / "none")]) == 2
    assert "--calibrate requires --valid" in capsys.readouterr().err
