"""Model directories: a model comes back bit for bit, a cut-off save costs nothing, damage is named."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from msgspec import structs

import shoal
from shoal import Batch, CorruptionError, LogisticRegression, models
from shoal.checkpoint.format import MANIFEST
from shoal.data import FeatureNames
from shoal.models import EarlyStopping, Fit, Plan, files
from shoal.models.plan import Learning
from shoal.storage.checksummed_json import decode_checksummed, encode_checksummed
from shoal.storage.local import LocalDir

OPTIMIZERS = [
    shoal.FTRL(alpha=0.3, l1=0.3, clip_value=1.0),
    shoal.SGD(lr=0.05),
    shoal.Momentum(nesterov=True),
    shoal.RowWiseAdagrad(decoupled=True, weight_decay=0.1),
    shoal.Adam(per_row_step=True),
]


def make_batch(rng, n=200, keys=50):
    return Batch(
        (rng.random(n) < 0.3).astype(np.float32),
        np.arange(0, 3 * n + 1, 3),
        rng.integers(0, keys, 3 * n).astype(np.uint64),
        rng.normal(size=3 * n).astype(np.float32),
    )


@pytest.fixture
def batch(rng):
    return make_batch(rng)


@pytest.fixture
def saved(batch, tmp_path):
    with LogisticRegression() as model:
        model.fit([batch, batch], valid=[batch], progress=False)
        return model.save(tmp_path / "model")


def predictions(directory, batch):
    with LogisticRegression.load(directory) as model:
        return model.probabilities(batch)


def held(directory):
    """What lies there, without the digits that each save draws."""
    return sorted(re.sub(r"-[0-9a-f]{8}\b", "", name) for name in os.listdir(directory))


def refusing(monkeypatch, name, error):
    """Let a file of a directory never be put in place."""
    publish = LocalDir.publish

    def fail(place, what, *how, **more):
        if what == name:
            raise error
        publish(place, what, *how, **more)

    monkeypatch.setattr(LocalDir, "publish", fail)


def snapshot(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("bias", [True, False])
def test_a_loaded_model_predicts_and_learns_on_bit_for_bit(rng, tmp_path, optimizer, bias):
    first, second = make_batch(rng), make_batch(rng)
    with LogisticRegression(optimizer, bias=bias, seed=3, table="mine") as model:
        model.fit([first], progress=False)
        model.save(tmp_path / "m")
        with LogisticRegression.load(tmp_path / "m") as again:
            assert (again.optimizer, again.has_bias, again.table.name) == (optimizer, bias, "mine")
            assert (again.table.seed, again.examples, again.history) == (3, model.examples, model.history)
            np.testing.assert_array_equal(again.decision_function(second), model.decision_function(second))
            model.fit([second], progress=False)
            again.fit([second], progress=False)
            np.testing.assert_array_equal(again.decision_function(first), model.decision_function(first))
            assert [a.tolist() for a in again.weights()] == [a.tolist() for a in model.weights()]


def test_what_was_not_a_number_comes_back_so(tmp_path):
    one_class = Batch(np.ones(4, np.float32), np.arange(5), np.arange(4, dtype=np.uint64), None)
    with LogisticRegression() as model:
        model.fit([one_class], progress=False)
        model.save(tmp_path / "m")
    with LogisticRegression.load(tmp_path / "m") as again:
        (done,) = again.history.passes
        assert np.isnan(done.metrics.auc)
        assert np.isnan(again.history.points[0].auc)
        assert done.valid is None


def test_the_curves_of_the_validation_are_kept_and_may_be_missing(saved, batch, tmp_path):
    with LogisticRegression.load(saved) as model:
        (done,) = model.history.passes
        assert done.curves == shoal.metrics.curves(batch.labels, model.decision_function(batch))
    body = json.loads(decode_checksummed((saved / "model.json").read_bytes(), "model.json"))
    for old in body["history"]["passes"]:
        del old["curves"], old["metrics"]["weight"], old["valid"]["weight"]
    (saved / "model.json").write_bytes(encode_checksummed(json.dumps(body).encode()))
    with LogisticRegression.load(saved) as model:
        (again,) = model.history.passes
        assert again == structs.replace(done, curves=None)


@pytest.mark.slow
def test_the_settings_of_each_fit_are_kept_and_may_be_missing(batch, tmp_path):
    path = tmp_path / "a.libsvm"
    path.write_text("1 3:1\n0 4:1\n")
    learning = {"negative_rate": 0.9, "seed": 3, "warm_up": False, "class_weight": {0: 1.0, 1: 2.0}}
    learned = learning | {"class_weight": (1.0, 2.0)}
    with LogisticRegression(**learning) as model:
        model.fit([batch], progress=False)
        model.fit(
            shoal.read_libsvm(path, batch_size=7),
            valid=[batch],
            epochs=2,
            shuffle=True,
            early_stopping=EarlyStopping(1, metric="auc"),
            progress=False,
        )
        model.save(tmp_path / "m")
        threads = model.store.threads
    expected = (
        Fit(first_pass=1, plan=Plan(**learned), data=None, valid=None, batch_size=None, threads=threads),
        Fit(
            first_pass=2,
            plan=Plan(**learned, epochs=2, shuffle=True, patience=1, metric="auc"),
            data=str(path),
            valid=None,
            batch_size=7,
            threads=threads,
        ),
    )
    with LogisticRegression.load(tmp_path / "m") as model:
        assert model.history.fits == expected
        assert model._learning == Learning(**learning)  # it would learn further as before
        assert [done.features for done in model.history.passes[1:]] == [2] * (len(model.history.passes) - 1)
    body = json.loads(decode_checksummed((tmp_path / "m" / "model.json").read_bytes(), "model.json"))
    del body["history"]["fits"]
    for old in body["history"]["passes"]:
        del old["features"]
    (tmp_path / "m" / "model.json").write_bytes(encode_checksummed(json.dumps(body).encode()))
    with LogisticRegression.load(tmp_path / "m") as model:
        assert model.history.fits == ()
        assert {done.features for done in model.history.passes} == {0}
    assert shoal.tools.report(tmp_path / "m").exists()


def test_the_format_of_the_reader_is_kept(tmp_path):
    path = tmp_path / "a.libsvm"
    path.write_text("1 3:1\n0 4:1\n")
    with LogisticRegression() as model:
        model.fit(shoal.read_libsvm(path), progress=False).save(tmp_path / "m")
    with LogisticRegression.load(tmp_path / "m") as again:
        assert again.format == "libsvm"


def test_a_store_with_other_slots_and_threads_reads_the_same_model(saved, batch):
    expected = predictions(saved, batch)
    for threads, slots in [(1, 2), (2, 4096)]:
        with shoal.local(threads=threads, slots=slots) as store:
            model = LogisticRegression.load(saved, store=store)
            np.testing.assert_array_equal(model.probabilities(batch), expected)


def test_only_the_models_own_table_is_saved(batch, tmp_path):
    with shoal.local() as store:
        store.table("other", dim=8)
        model = LogisticRegression(store=store)
        model.partial_fit(batch)
        model.save(tmp_path / "m")
    with shoal.local() as store:
        LogisticRegression.load(tmp_path / "m", store=store)
        assert list(store.tables) == ["lr"]


def test_loading_never_overwrites_a_table_of_the_store(saved):
    with shoal.local() as store:
        store.table("lr", dim=2)
        with pytest.raises(TypeError, match="store is a str: pass a store"):
            shoal.load(saved, store="local")
        with pytest.raises(ValueError, match="the store has a table 'lr' already"):
            LogisticRegression.load(saved, store=store)
        assert store.tables["lr"].dim == 2


# ---- replacing -------------------------------------------------------------------------------------------------------


def test_saving_again_replaces_the_model_and_leaves_nothing_behind(saved, batch):
    with LogisticRegression.load(saved) as model:
        model.partial_fit(batch)
        model.save(saved, overwrite=True)
        np.testing.assert_array_equal(predictions(saved, batch), model.probabilities(batch))
    assert held(saved) == ["checkpoint", "model.json"]


def test_a_model_is_kept_if_overwriting_is_not_allowed(saved, batch):
    before = snapshot(saved)
    with LogisticRegression.load(saved) as model, pytest.raises(ValueError, match="holds a model already"):
        model.save(saved, overwrite=False)
    assert snapshot(saved) == before


def test_a_directory_or_file_that_is_no_model_is_never_written_to(batch, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with LogisticRegression() as model:
        model.partial_fit(batch)
        with pytest.raises(ValueError, match="neither empty nor a model"):
            model.save(tmp_path)
        with pytest.raises(ValueError, match="is a file"):
            model.save(tmp_path / "thesis.tex")
        (tmp_path / "empty").mkdir()
        model.save(tmp_path / "empty")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


class CutOffError(Exception):
    pass


@pytest.mark.parametrize("where", ["at the checkpoint", "within the checkpoint", "at the description"])
def test_a_save_that_fails_leaves_the_model_that_was_there(saved, batch, monkeypatch, where):
    before, expected = snapshot(saved), predictions(saved, batch)

    def fail(*_, **__):
        raise CutOffError

    if where == "at the checkpoint":
        monkeypatch.setattr("shoal.store.files.write_checkpoint", fail)
    elif where == "within the checkpoint":
        monkeypatch.setattr("shoal.checkpoint.write._save_table", fail)
    else:
        refusing(monkeypatch, files.MODEL_FILE, CutOffError)
    with LogisticRegression.load(saved) as model:
        model.partial_fit(batch)
        with pytest.raises(CutOffError):
            model.save(saved, overwrite=True)
    assert held(saved) == ["checkpoint", "model.json"]
    assert snapshot(saved) == before
    np.testing.assert_array_equal(predictions(saved, batch), expected)


def test_what_a_killed_save_left_behind_is_no_hindrance(saved, batch):
    expected = predictions(saved, batch)
    shutil.copytree(saved / files.read(saved).checkpoint, saved / "checkpoint-0badcafe")
    (saved / "checkpoint-0badcafe" / MANIFEST).unlink()
    (saved / "tower-0badcafe.pt").write_bytes(b"half")
    (saved / ".model.json.0badcafe.tmp").write_bytes(b"{")
    np.testing.assert_array_equal(predictions(saved, batch), expected)
    with LogisticRegression.load(saved) as model:
        model.save(saved, overwrite=True)
    assert held(saved) == ["checkpoint", "model.json"]
    np.testing.assert_array_equal(predictions(saved, batch), expected)


def test_the_first_save_killed_early_leaves_a_directory_that_can_be_saved_to(batch, tmp_path):
    (tmp_path / "m" / "checkpoint-0badcafe").mkdir(parents=True)
    (tmp_path / "m" / ".model.json.0badcafe.tmp").touch()
    with pytest.raises(CorruptionError, match=r"model\.json is missing"):
        LogisticRegression.load(tmp_path / "m")
    with LogisticRegression() as model:
        model.partial_fit(batch)
        model.save(tmp_path / "m")
        np.testing.assert_array_equal(predictions(tmp_path / "m", batch), model.probabilities(batch))


def test_a_load_that_a_save_overtakes_reads_the_new_model(saved, batch, monkeypatch):
    old = files.read(saved)
    with LogisticRegression.load(saved) as model:
        model.partial_fit(batch)
        model.save(saved, overwrite=True)
        expected = model.probabilities(batch)
    answers = iter([old])
    whole = files.read
    monkeypatch.setattr(files, "read", lambda directory: next(answers, None) or whole(directory))
    np.testing.assert_array_equal(predictions(saved, batch), expected)


# ---- names of features -----------------------------------------------------------------------------------------------


@pytest.fixture
def named():
    names = FeatureNames()
    names.add(np.array([3, 2**64 - 1], np.uint64), ["site=a.com", "ünï"])
    return names


def test_names_are_kept_with_the_model_and_replaced_with_it(saved, batch, named):
    assert models.load_names(saved) is None
    with LogisticRegression.load(saved) as model:
        model.save(saved, names=named, overwrite=True)
        assert held(saved) == ["checkpoint", "model.json", "names.names"]
        assert models.load_names(saved) == named
        named.add([4], ["site=b.com"])
        model.save(saved, names=named, overwrite=True)
        assert held(saved) == ["checkpoint", "model.json", "names.names"]
        assert models.load_names(saved) == named
        expected = model.probabilities(batch)
    np.testing.assert_array_equal(predictions(saved, batch), expected)
    with LogisticRegression.load(saved) as model:
        model.save(saved, overwrite=True)
    assert held(saved) == ["checkpoint", "model.json"]
    assert models.load_names(saved) is None


@pytest.mark.parametrize("where", ["at the names", "behind them"])
def test_a_save_with_names_that_fails_leaves_model_and_names(saved, batch, named, monkeypatch, where):
    with LogisticRegression.load(saved) as model:
        model.save(saved, names=named, overwrite=True)
    before = snapshot(saved)

    def fail(*_, **__):
        raise CutOffError

    if where == "at the names":
        monkeypatch.setattr(FeatureNames, "to_parts", fail)
    else:
        refusing(monkeypatch, files.MODEL_FILE, CutOffError)
    with LogisticRegression.load(saved) as model:
        model.partial_fit(batch)
        with pytest.raises(CutOffError):
            model.save(saved, names=named, overwrite=True)
    assert snapshot(saved) == before
    assert held(saved) == ["checkpoint", "model.json", "names.names"]


def test_names_that_a_killed_save_left_behind_are_removed(named, batch, tmp_path):
    directory = tmp_path / "m"
    directory.mkdir()
    named.save(directory / "names-0badcafe.json")
    with LogisticRegression() as model:
        model.partial_fit(batch)
        model.save(directory)
        (directory / "names-0badcafe.json").write_bytes(b"{")
        model.save(directory, overwrite=True, names=named)
    assert held(directory) == ["checkpoint", "model.json", "names.names"]
    assert models.load_names(directory) == named


def test_damaged_names_are_said_and_the_model_still_loads(saved, batch, named):
    with LogisticRegression.load(saved) as model:
        model.save(saved, names=named, overwrite=True)
    expected = predictions(saved, batch)
    (path,) = saved.glob("names-*.names")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + b"x" + whole[-8:])
    with pytest.raises(CorruptionError, match=f"{path.name} is damaged"):
        models.load_names(saved)
    with pytest.raises(CorruptionError, match=f"{path.name} is damaged"):
        shoal.tools.report(saved)
    path.unlink()
    with pytest.raises(CorruptionError, match=f"{path.name} is missing"):
        models.load_names(saved)
    np.testing.assert_array_equal(predictions(saved, batch), expected)
    body = json.loads(decode_checksummed((saved / "model.json").read_bytes(), "model.json")) | {
        "names": "../elsewhere.json"
    }
    (saved / "model.json").write_bytes(encode_checksummed(json.dumps(body).encode()))
    with pytest.raises(CorruptionError, match=r"names .*elsewhere.*, which is not a file of feature names"):
        models.load_names(saved)


def test_names_that_a_save_overtakes_are_the_new_ones(saved, named, monkeypatch):
    with LogisticRegression.load(saved) as model:
        model.save(saved, names=named, overwrite=True)
        old = files.read(saved)
        named.add([4], ["site=b.com"])
        model.save(saved, names=named, overwrite=True)
    answers = iter([old])
    whole = files.read
    monkeypatch.setattr(files, "read", lambda directory: next(answers, None) or whole(directory))
    assert models.load_names(saved) == named


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_flipped_byte_of_the_description_is_noticed(saved):
    path = saved / files.MODEL_FILE
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CorruptionError, match=r"model\.json"):
            files.read(saved)
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptionError, match=r"model\.json is damaged"):
            files.read(saved)


def test_damaged_weights_are_named_and_not_loaded(saved):
    (path,) = saved.glob("checkpoint-*/*.slots")
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with shoal.local() as store:
        with pytest.raises(CorruptionError, match=path.name):
            LogisticRegression.load(saved, store=store)
        assert not store.tables
    path.unlink()
    with pytest.raises(CorruptionError, match=f"{path.name} is missing"):
        LogisticRegression.load(saved)


def test_a_newer_version_is_not_guessed_at(saved):
    path = saved / files.MODEL_FILE
    body = json.loads(path.read_bytes())["body"]
    body["version"] = 2
    text = json.dumps(body, separators=(",", ":")).encode()
    path.write_bytes(b'{"crc32c":"%08x","body":%s}' % (shoal._core.crc32c(text), text))
    with pytest.raises(CorruptionError, match="newer shoal"):
        LogisticRegression.load(saved)


class OfAnotherLoss(LogisticRegression):
    """A model of two classes with a setting that other kinds lack."""

    @property
    def kind_settings(self):
        return {"loss": "hinge"}


def test_a_setting_of_a_kind_is_saved_and_compared_and_leaves_the_metrics_those_of_two_classes(batch, tmp_path):
    with OfAnotherLoss() as model, LogisticRegression() as other:
        directory = model.fit([batch], valid=[batch], progress=False).save(tmp_path / "model")
        (measured,) = files.read(directory).history.passes
        assert (measured.metrics, measured.valid) == (model.history.passes[0].metrics, model.history.passes[0].valid)
        with pytest.raises(ValueError, match=r"loss='hinge'.*make it with the same settings"):
            other.restore(directory)
        model.restore(directory)


def test_a_directory_that_is_no_model_or_not_there_is_said(tmp_path):
    with pytest.raises(CorruptionError, match=r"model\.json is missing"):
        LogisticRegression.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no such model"):
        LogisticRegression.load(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(CorruptionError, match="is a file where a directory should be"):
        LogisticRegression.load(tmp_path / "file")


SAVES_FOR_EVER = """
import sys, numpy as np
from shoal import LogisticRegression
with LogisticRegression.load(sys.argv[1]) as model:
    print("saving", flush=True)
    while True:
        model.save(sys.argv[1])
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_saves_leaves_the_model(saved, batch, rng):
    expected = predictions(saved, batch)
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", SAVES_FOR_EVER, str(saved)], stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"saving\n"
            time.sleep(rng.uniform(0, 0.1))
        finally:
            process.kill()
            process.communicate()
        np.testing.assert_array_equal(predictions(saved, batch), expected)
    with LogisticRegression.load(saved) as model:
        model.save(saved, overwrite=True)
    assert len(os.listdir(saved)) == 2
