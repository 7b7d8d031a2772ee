"""The life of a click model after its first fit: resumed, taught further, fine-tuned, exported and published."""

import json
import os
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="click models are torch modules")

import shoal  # noqa: E402
from dropped import kept  # noqa: E402
from shoal.cli import main  # noqa: E402
from shoal.errors import ShoalError  # noqa: E402
from shoal.models import Checkpointing, PublishDelta  # noqa: E402
from shoal.torch.config import build, parse  # noqa: E402


@pytest.fixture
def days(tmp_path, rng):
    """Two days of clicks."""
    for day in range(2):
        rows = [f"{int(rng.random() < user / 9)},u{user},a{ad}" for user, ad in rng.integers(0, 9, (400, 2))]
        (tmp_path / f"day{day}.csv").write_text("\n".join(["click,user,ad", *rows]) + "\n")
    return tmp_path


def reader(days, day: int = 0, size: int = 50):
    return shoal.read_csv(days / f"day{day}.csv", label="click", categorical=["user", "ad"], batch_size=size)


def config(days, **tables):
    return {
        "data": {"data": [str(days / "day0.csv")], "format": "csv", "label": "click"},
        "features": [{"name": "user"}, {"name": "ad"}],
        "model": {"name": "deepfm", "dim": 4, "hidden": [8]},
        "tables": {"optimizer": {"name": "Adam", "lr": 0.05}, **tables},
        "train": {"batch_size": 50, "optimizer": {"name": "Adam", "lr": 0.01}},
    }


def made(days, store, **tables):
    return build(parse(config(days, **tables)), store)


def state(model) -> tuple:
    dense = {name: one.detach().numpy().tobytes() for name, one in model.module.named_parameters()}
    return {table.name: table.digest() for table in model.tables}, dense


@pytest.mark.slow
def test_a_model_that_is_loaded_to_be_resumed_trains_as_without_a_break(days, tmp_path):
    with shoal.local(threads=1) as store:
        model = made(days, store)
        model.fit(reader(days), progress=False).save(tmp_path / "m")
        model.fit(reader(days, 1), progress=False)
        expected = state(model)
    found = []
    for resume in (True, False):
        with shoal.torch.load(tmp_path / "m", resume=resume) as model:
            assert model.examples == 400
            found.append(state(model.fit(reader(days, 1), progress=False)))
    assert found[0] == expected != found[1]


def test_partial_fit_makes_the_steps_of_a_fit(days):
    with shoal.local(threads=1) as store:
        expected = state(made(days, store).fit(reader(days), progress=False))
    with shoal.local(threads=1) as store:
        model = made(days, store)
        losses = [model.partial_fit(batch) for batch in reader(days).with_fields()]
        assert (state(model), model.examples, store.clock) == (expected, 400, 8)
        assert losses[-1] < losses[0]
        empty = shoal.data.rebatch.rows_of(next(iter(reader(days).with_fields())), 0, 0)
        assert np.isnan(model.partial_fit(empty))
        assert model.examples == 400


@pytest.mark.slow
def test_an_export_has_rows_and_dense_part_of_one_moment(days, tmp_path):
    with shoal.local(threads=1) as store:
        model = made(days, store)
        with pytest.raises(ValueError, match="not trained yet"):
            model.export(tmp_path / "none")
        model.fit(reader(days), progress=False)
        model.export(tmp_path / "1", track=True)
        first = model.probabilities(reader(days, 1))
        model.partial_fit(next(iter(reader(days, 1).with_fields())))
        done = model.export(tmp_path / "2", since=tmp_path / "1")
        second = model.probabilities(reader(days, 1))
        assert done.tables["embedding"].rows <= 18
        with pytest.raises(ValueError, match="has a model with a dense part, which new rows do not match: call model"):
            store.export(tmp_path / "3", since=tmp_path / "1")
    assert not np.array_equal(first, second)
    for name, expected in (("1", first), ("2", second)):
        assert served(tmp_path / name, days) == pytest.approx(expected, abs=1e-12)


def served(export, days) -> list[float]:
    """The predictions of an export for the second day, as a server computes them."""
    from shoal.serve import ServedModel

    with ServedModel(export) as model:
        return model.now.predictor.probabilities(reader(days, 1)).tolist()


def test_a_linear_model_is_exported_as_well(days, tmp_path):
    with shoal.LogisticRegression() as model:
        model.fit(reader(days), progress=False).calibrate(reader(days, 1))
        model.export(tmp_path / "1")
        expected = model.probabilities(reader(days, 1))
    assert served(tmp_path / "1", days) == pytest.approx(expected)


class Beats(shoal.models.Callback):
    """Lets time pass between batches."""

    def batch_done(self, progress):
        time.sleep(0.011)


@pytest.mark.slow
def test_a_fit_publishes_what_has_changed_every_few_seconds(days, tmp_path, capsys):
    with shoal.local(threads=1) as store:
        model = made(days, store)
        publish = PublishDelta(tmp_path / "out", every=0.01, full_every=3)
        model.fit(reader(days), epochs=2, progress=False, callbacks=[Beats(), publish])
        folders = sorted(os.listdir(tmp_path / "out"))
        # Of 16 batches 1, 4, ..., 16 are full: those before the full one that is older than the newest are removed.
        assert folders == [f"{number:06}" for number in range(13, 17)]
        expected = model.probabilities(reader(days, 1))
        assert served(tmp_path / "out" / "000016", days) == pytest.approx(expected, abs=1e-12)
        capsys.readouterr()
        for folder, exports in (("000013", 1), ("000014", 2), ("000015", 3), ("000016", 1)):
            assert main(["inspect", str(tmp_path / "out" / folder), "--json"]) == 0
            assert len(json.loads(capsys.readouterr().out)["layers"]) == exports
        model.fit(reader(days, 1), progress=False, callbacks=PublishDelta(tmp_path / "out", every=1e9))
        assert sorted(os.listdir(tmp_path / "out"))[-1] == "000017"
        expected = model.probabilities(reader(days, 1))
        assert served(tmp_path / "out" / "000017", days) == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
def test_an_export_that_fails_does_not_end_a_fit(days, tmp_path, caplog, monkeypatch):
    with shoal.local(threads=1) as store:
        model = made(days, store)
        publish = PublishDelta(tmp_path / "out", every=0.01)
        failures = [OSError("no space left"), ShoalError("refused")]
        export = model.export

        def failing(directory, **how):
            if failures:
                raise failures.pop()
            return export(directory, **how)

        monkeypatch.setattr(model, "export", failing)
        model.fit(reader(days), progress=False, callbacks=[Beats(), publish])
        assert "the model was not exported to" in caplog.text
        newest = sorted(os.listdir(tmp_path / "out"))[-1]
        expected = model.probabilities(reader(days, 1))
        assert served(tmp_path / "out" / newest, days) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ValueError, match="every is 0: pass a number of seconds"):
        PublishDelta("out", every=0)


def trained(days, tmp_path, *more: str) -> None:
    assert main(["train", "ctr", "--config", str(tmp_path / "c.toml"), "--quiet", *more]) == 0


@pytest.mark.slow
def test_a_model_begins_with_the_weights_of_another(days, tmp_path):
    text = config(days)
    features = text.pop("features")
    lines = [f"[{name}]\n" + "".join(_line(*one) for one in section.items()) for name, section in text.items()]
    lines += ["[[features]]\n" + "".join(_line(*pair) for pair in one.items()) for one in features]
    (tmp_path / "c.toml").write_text("".join(lines))
    day0, day1, other = (str(tmp_path / name) for name in ("m0", "m1", "other"))
    trained(days, tmp_path, "--output", day0)
    trained(days, tmp_path, "--init-from", day0, "--data", str(days / "day1.csv"), "--output", day1)
    with shoal.torch.load(day0, resume=True) as model:
        expected = state(model.fit(reader(days, 1), progress=False))
    with shoal.torch.load(day1) as model:
        assert (state(model), model.examples) == (expected, 400)
    # With another rule the rows begin anew: weights alone.
    trained(days, tmp_path, "--init-from", day0, "--set", "tables.optimizer.lr=1e-30", "--data", str(days / "day1.csv"),
            "--output", other)  # fmt: skip
    with shoal.torch.load(other) as model, shoal.torch.load(day0) as first:
        table, before = (one.store.tables["embedding"] for one in (model, first))
        keys = np.concatenate([keys for keys, _ in before.items()])
        np.testing.assert_array_equal(table.pull(keys), before.pull(keys))
        assert table.stats().step == before.stats().step == 8
        assert state(model)[1] != state(first)[1]


def _line(name: str, value) -> str:
    if isinstance(value, dict):
        value = "{ " + ", ".join(f"{key} = {json.dumps(one)}" for key, one in value.items()) + " }"
    else:
        value = json.dumps(value)
    return f"{name} = {value}\n"


class Ends(shoal.models.Callback):
    """Ends a fit after some batches."""

    def batch_done(self, progress):
        if progress.batches == 4:
            raise RuntimeError("enough")


@pytest.mark.slow
def test_a_fit_is_resumed_only_with_the_features_and_the_model_that_it_was_begun_with(days, tmp_path):
    begun = Checkpointing(tmp_path / "m", every=2)
    with shoal.local(threads=1) as store, pytest.raises(RuntimeError, match="enough"):
        made(days, store).fit(reader(days), progress=False, callbacks=Ends(), checkpoint=begun)
    resumed = Checkpointing(tmp_path / "m", every=2, resume=True)
    for change, says in (
        ({"features": [{"name": "user"}, {"name": "ad", "share": "user"}]}, r"of features: it was {'name': 'ad'}, and"),
        (
            {"model": {"name": "deepfm", "dim": 4, "hidden": [8], "dropout": 0.1}},
            r"of model: .* and is {'dropout': 0.1}",
        ),
    ):
        with shoal.local(threads=1) as store:
            model = build(parse(config(days) | change), store)
            with pytest.raises(ValueError, match=says):
                model.fit(reader(days), progress=False, checkpoint=resumed)
    with shoal.local(threads=1) as store:
        assert made(days, store).fit(reader(days), progress=False, checkpoint=resumed).examples == 400


def test_what_a_model_cannot_begin_with_is_told(days, tmp_path):
    with shoal.local(threads=1) as store:
        made(days, store).fit(reader(days), progress=False).save(tmp_path / "m")
    with shoal.LogisticRegression() as linear:
        linear.fit(reader(days), progress=False).save(tmp_path / "lr")
    for change, says in (
        ({"dim": 8}, r"table 'embedding' has dim 8, and .* has dim 4|parameter 'tower.0.weight' has the shape"),
        ({"hidden": [9]}, r"parameter 'tower.0.weight' has the shape \[9, 8\], in .* \[8, 8\]"),
    ):
        raw = config(days)
        raw["model"] |= change
        with shoal.local(threads=1) as store:
            model = build(parse(raw), store)
            before = state(model)
            for take in (model.init_from, model.restore):
                with pytest.raises(ValueError, match=says):
                    take(tmp_path / "m")
                assert state(model) == before
    with shoal.local(threads=1) as store, pytest.raises(ValueError, match="is a logistic regression: load it with"):
        made(days, store).restore(tmp_path / "lr")
    with shoal.local(threads=1) as store, pytest.raises(ValueError, match="a click model begins with another click"):
        made(days, store).init_from(tmp_path / "lr")


@pytest.mark.slow
def test_all_rows_shrink_after_a_pass_by_a_callback(days):
    """Also those that no batch of the pass has: an L2 penalty of all rows."""
    with shoal.local(threads=1) as store:
        model = made(days, store).fit(reader(days), progress=False)
        table = store.tables["embedding"]
        table.assign(np.array([12345], np.uint64), np.full((1, 4), 2.0, np.float32))
        shrinks = lambda progress: [one.decay(0.5) for one in progress.model.tables]  # noqa: E731
        model.fit(reader(days, 1), epochs=2, progress=False, callbacks=shrinks)
        assert table.pull(np.array([12345], np.uint64)).tolist() == [[0.5] * 4]


def test_frozen_rows_stay_while_the_rest_learns(days, tmp_path):
    with shoal.local(threads=1) as store:
        made(days, store).fit(reader(days), progress=False).save(tmp_path / "m")
    with shoal.local(threads=1) as store:
        model = made(days, store, rules={"embedding": {"frozen": True}})
        model.init_from(tmp_path / "m")
        before = state(model)
        after = state(model.fit(reader(days, 1), progress=False))
        assert after[0]["embedding"] == before[0]["embedding"]
        assert after[0]["linear"] != before[0]["linear"]
        assert after[1] != before[1]


@pytest.mark.parametrize("staleness", [0, 2])
def test_nothing_keeps_a_model_that_is_dropped_after_its_fit(days, staleness):
    def fitted():
        settings = config(days)
        settings["train"]["staleness"] = staleness
        model = build(parse(settings), shoal.local())
        model.fit(reader(days), valid=reader(days, 1), epochs=2, progress=False)
        model.evaluate(reader(days))
        return model, model.store, model.module, *model.tables, *(table.shard for table in model.tables)

    assert kept(fitted) == []
