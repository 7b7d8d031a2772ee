"""Click models trained from readers: the loop, configurations, checkpoints, logs, the command line."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from paths import ROOT

torch = pytest.importorskip("torch", reason="click models are torch modules")


import shoal  # noqa: E402
from click_config import toml  # noqa: E402
from places import BUCKET, options  # noqa: E402
from shoal.cli import main  # noqa: E402
from shoal.cli.train import CTR_EXAMPLES  # noqa: E402
from shoal.data.rebatch import rows_of as rows_of_batch  # noqa: E402
from shoal.metrics import gauc, logloss  # noqa: E402
from shoal.models import (  # noqa: E402
    Checkpointing,
    EarlyStopping,
    files,
)
from shoal.models.callbacks import Callback  # noqa: E402
from shoal.models.features import Features  # noqa: E402
from shoal.storage.base import StorageDir  # noqa: E402
from shoal.storage.open import open_dir  # noqa: E402
from shoal.torch.click_model import ClickModel  # noqa: E402
from shoal.torch.config import build, features_of, load, parse, read  # noqa: E402
from shoal.torch.models import MODELS, DeepFM  # noqa: E402
from tiers import long_after, long_but  # noqa: E402

COLUMNS = {"label": "click", "categorical": ["user", "ad", "site"], "numeric": ["price"], "lists": {"seen": "ad"}}
FIELDS = Features(["user", "ad", "site", {"name": "price", "type": "number"}], group="user")


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> Path:
    """A log in which users like some ads: train.csv of 1000 examples, valid.csv of 400."""
    folder = tmp_path_factory.mktemp("clicks")
    random = np.random.default_rng(8)
    for name, count in (("train", 1000), ("valid", 400)):
        rows = ["click,user,ad,site,price,seen"]
        for _ in range(count):
            user, ad, site = random.integers(0, 12), random.integers(0, 9), random.integers(0, 4)
            seen = [str(x) for x in random.integers(0, 9, random.integers(0, 4))]
            price = 10 * random.random()
            likes = (7 * user + 3 * ad) % 5 == 0
            margin = 0.9 * (user % 3) + 0.5 * (ad % 4) - 3 + 2.5 * likes + 1.5 * (str(ad) in seen) + 0.1 * price
            click = int(random.random() < 1 / (1 + np.exp(-margin)))
            rows.append(f"{click},{user},{ad},{site or ''},{price:.3f},{'|'.join(seen)}")
        (folder / f"{name}.csv").write_text("\n".join(rows) + "\n")
    return folder


def reader(clicks: Path, name: str = "train", **how):
    return shoal.read_csv(clicks / f"{name}.csv", **{**COLUMNS, "batch_size": 100, **how})


def configured(clicks: Path, kind: str = "deepfm", **sections) -> dict:
    data = {
        "format": "csv",
        "data": [str(clicks / "train.csv")],
        "valid": [str(clicks / "valid.csv")],
        "label": "click",
        "categorical": ["user", "ad", "site"],
        "numeric": ["price"],
        "group": "user",
    }
    if kind not in ("lr", "fm"):
        data["dense"] = ["price"]
    if kind == "din":
        data |= {"history": "seen", "item": "ad"}
    settings = {"name": kind, **({} if kind == "lr" else {"dim": 4})}
    settings |= {} if kind in ("lr", "fm") else {"hidden": [8]}
    base = {
        "data": data,
        "model": settings,
        "tables": {"optimizer": {"name": "Adagrad", "lr": 0.1}},
        "train": {"batch_size": 100, "optimizer": {"name": "Adam", "lr": 0.01}, "seed": 3},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return base


def rows_of(model: ClickModel) -> dict[str, tuple[bytes, bytes]]:
    """All rows of all tables, bit for bit."""
    out = {}
    for table in model.tables:
        pieces = list(table.items())
        keys = np.concatenate([keys for keys, _ in pieces])
        rows = np.concatenate([rows for _, rows in pieces])
        state = table.state(keys)
        out[table.name] = (keys.tobytes(), rows.tobytes() + b"".join(state[name].tobytes() for name in state))
    return out


def dense_of(model: ClickModel) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in model.module.parameters()]


def same(one: ClickModel, other: ClickModel) -> bool:
    return rows_of(one) == rows_of(other) and dense_of(one) == dense_of(other)


def untimed(history):
    return [(p.number, p.metrics, p.valid, p.grouped, p.features, p.complete) for p in history.passes], [
        p for p in history.points if p.auc == p.auc
    ]


def made(store, raw: dict) -> ClickModel:
    return build(parse(raw), store)


# ---- the loop --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lr", "fm", "wide_deep", "deepfm", "dcnv2", "dlrm", "din", "autoint"])
def test_a_model_learns_from_a_reader_by_columns_of_roles(clicks, model):
    with shoal.local(threads=1) as store:
        click = made(store, configured(clicks, model))
        click.fit(reader(clicks), valid=reader(clicks, "valid"), epochs=4, progress=False)
        passes = click.history.passes
        assert click.examples == 4000
        assert passes[-1].metrics.logloss < passes[0].metrics.logloss - 0.01
        assert passes[-1].valid.auc > 0.52
        assert passes[-1].grouped.groups == 12
        assert len(passes[-1].curves.deciles) == 10


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_and_another_others(clicks):
    models = []
    for seed in (3, 3, 4):
        with shoal.local(threads=2) as store:
            click = made(store, configured(clicks, train={"seed": seed}))
            click.fit(reader(clicks), progress=False)
            models.append((rows_of(click), dense_of(click), untimed(click.history)))
    assert models[0] == models[1]
    assert models[0][0] != models[2][0]
    assert models[0][1] != models[2][1]


@pytest.mark.slow
def test_a_click_model_takes_a_module_of_ones_own(clicks):
    torch.manual_seed(1)
    with shoal.local(threads=1) as store:
        make = shoal.torch.tables(store, shoal.Adagrad(lr=0.1), linear_optimizer=shoal.FTRL(alpha=2.0))
        module = DeepFM(make, FIELDS, dim=4, hidden=(8,))
        model = ClickModel(module, store=store)
        model.fit(reader(clicks), valid=reader(clicks, "valid"), epochs=2, progress=False)
        assert type(store.tables["linear"].optimizer) is shoal.FTRL
        assert len(model.history.passes) == 2
        whole = list(model.reading(reader(clicks, "valid")))
        labels = np.concatenate([batch.labels for batch in whole])
        margins = model.decision_function(whole)
        groups = np.concatenate([FIELDS.groups(batch) for batch in whole])
        last = model.history.passes[-1]
        assert last.valid.logloss == logloss(labels, margins)
        assert last.grouped == gauc(labels, margins, groups)
        assert model.evaluate(whole) == last.valid
        rows = rows_of(model)
        model.probabilities(whole)
        assert rows_of(model) == rows  # predicting pushes nothing


def test_the_loss_is_the_mean_by_weight(clicks):
    """One step of SGD on logistic regression, by hand."""
    keys = np.array([1, 2, 1, 3], np.uint64)
    batch = shoal.Batch(np.array([1, 0], np.float32), np.array([0, 2, 4]), keys, None, np.array([3, 1], np.float32))
    with shoal.local(threads=1) as store:
        make = shoal.torch.tables(store, shoal.SGD(lr=1.0))
        module = shoal.torch.models.LR(make, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        model = ClickModel(module, store=store, optimizer=optimizer).fit([batch], progress=False)
        # d/dw of (3 l1 + l2) / 2 at margin 0: -3/4 for the first example, +1/4 for the second.
        assert store.tables["linear"].pull(np.array([1, 2, 3], np.uint64))[:, 0].tolist() == [0.5, 0.75, -0.25]
        assert module.linear.bias.item() == 0.5
        assert model.history.passes[0].metrics.weight == 4


def test_a_label_that_is_none_changes_nothing(clicks):
    batch = shoal.Batch(np.array([2], np.float32), np.array([0, 1]), np.array([5], np.uint64), None)
    with shoal.local(threads=1) as store:
        module = shoal.torch.models.LR(shoal.torch.tables(store), 1)
        with pytest.raises(ValueError, match="label"):
            ClickModel(module, store=store).fit([batch], progress=False)
        assert len(store.tables["linear"]) == 0


@pytest.mark.slow
def test_early_stopping_goes_back_to_the_best_pass(clicks, tmp_path):
    with shoal.local(threads=1) as store:
        click = made(store, configured(clicks, tables={"optimizer": {"name": "Adagrad", "lr": 0.5}}))
        click.fit(
            reader(clicks),
            valid=reader(clicks, "valid"),
            epochs=30,
            progress=False,
            checkpoint=Checkpointing(tmp_path / "out"),
            early_stopping=EarlyStopping(2),
        )
        history = click.history
        best = min(range(len(history.passes)), key=lambda i: history.passes[i].valid.logloss) + 1
        assert history.best_pass == best == len(history.passes) - 2
        assert click.evaluate(click.reading(reader(clicks, "valid"))) == history.passes[best - 1].valid
        assert click.examples == 1000 * best
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        [files.read(tmp_path / "out").checkpoint, files.read(tmp_path / "out").tower, "model.json"]
    )


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class Fails(Callback):
    """A callback that raises after some calls: as good as a kill, since nothing is tidied up."""

    def __init__(self, after: int) -> None:
        self.left = after

    def batch_done(self, progress) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the power failed")

    def pass_done(self, progress) -> None:
        self.batch_done(progress)


TWO_RULES = ["ttl:3", "score:0.9:2.0"]
PLANS = {
    "plain": ({}, {}),
    "shuffled": ({"shuffle": 3}, {"train": {"seed": 5}}),
    "sampled": ({}, {"train": {"negative_rate": 0.5}}),
    "patient": (
        {"early_stopping": EarlyStopping(1), "epochs": 6},
        {"tables": {"optimizer": {"name": "Adagrad", "lr": 0.6}}},
    ),
    "dropping out": ({}, {"model": {"dropout": 0.3}}),
    "rounded": ({}, {"tables": {"dtype": "bfloat16"}}),
    "expiring": ({}, {"tables": {"admit": "count:3", "expire": TWO_RULES}}),
    "stale": ({}, {"train": {"staleness": 2}}),
    "stale, shuffled": ({"shuffle": 3}, {"train": {"staleness": 3}}),
    "in bfloat16": ({}, {"train": {"precision": "bfloat16"}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_but(["patient", "stale, shuffled", "expiring"], list(PLANS)))
@pytest.mark.parametrize("stop", long_after(1, [11, 4, 15]))  # within the first pass, behind it, within the second
def test_a_fit_that_goes_on_has_the_bits_of_one_that_never_stopped(clicks, tmp_path, kind, stop):
    how, sections = PLANS[kind]
    raw = configured(clicks, **sections)

    def run(directory: Path, stop: int | None, *, resume: bool = False):
        with shoal.local(threads=1) as store:
            click = made(store, raw)
            click.fit(
                reader(clicks),
                valid=reader(clicks, "valid"),
                progress=False,
                checkpoint=Checkpointing(directory, every=4, resume=resume),
                callbacks=[] if stop is None else [Fails(stop)],
                **{"epochs": 2, **how},
            )
            return rows_of(click), dense_of(click), untimed(click.history), click.examples

    expected = run(tmp_path / "whole", None)
    with pytest.raises(RuntimeError, match="the power failed"):
        run(tmp_path / "cut", stop)
    described = files.read(tmp_path / "cut")
    assert described.fit_state is not None
    assert described.examples < 2000
    assert run(tmp_path / "cut", None, resume=True) == expected
    assert files.read(tmp_path / "cut").fit_state is None
    assert not list((tmp_path / "cut").glob("best-*"))


@pytest.mark.slow
def test_resume_begins_where_there_is_nothing_and_refuses_what_is_over_or_other(clicks, tmp_path):
    with shoal.local(threads=1) as store:
        click = made(store, configured(clicks))
        begun, resumed = (Checkpointing(tmp_path / "out", every=3, resume=resume) for resume in (False, True))
        with pytest.raises(RuntimeError):
            click.fit(reader(clicks), progress=False, checkpoint=begun, callbacks=[Fails(8)])
        with pytest.raises(ValueError, match="holds a model already"):
            click.fit(reader(clicks), progress=False, checkpoint=begun)
        click.fit(reader(clicks), progress=False, checkpoint=resumed)
        assert click.examples == 1000
        with pytest.raises(ValueError, match="has finished"):
            click.fit(reader(clicks), progress=False, checkpoint=resumed)
    with shoal.local(threads=1) as store:
        other = made(store, configured(clicks, train={"seed": 9}))
        with pytest.raises(ValueError, match="has finished, and was begun with seed=3, now it is 9"):
            other.fit(reader(clicks), progress=False, checkpoint=resumed)


@pytest.mark.slow
def test_a_model_is_loaded_with_the_bits_that_were_saved(clicks, tmp_path):
    with shoal.local(threads=1) as store:
        click = made(store, configured(clicks, "din"))
        click.fit(reader(clicks), progress=False, checkpoint=Checkpointing(tmp_path / "out"))
        expected = click.decision_function(click.reading(reader(clicks, "valid")))
        before = torch.get_rng_state()
    with shoal.torch.load(tmp_path / "out") as loaded:
        assert torch.equal(torch.get_rng_state(), before)
        assert np.array_equal(loaded.decision_function(loaded.reading(reader(clicks, "valid"))), expected)
        assert loaded.examples == 1000
        assert repr(loaded) == "ClickModel(DIN, examples=1000)"
        loaded.calibrate(loaded.reading(reader(clicks, "valid")), "platt").save(tmp_path / "calibrated")
        calibrated = loaded.probabilities(loaded.reading(reader(clicks, "valid")))
    with shoal.torch.load(tmp_path / "calibrated") as loaded:
        assert np.array_equal(loaded.probabilities(loaded.reading(reader(clicks, "valid"))), calibrated)


def test_damage_is_named(clicks, tmp_path):
    with shoal.local(threads=1) as store:
        click = made(store, configured(clicks))
        click.fit(reader(clicks), progress=False, checkpoint=Checkpointing(tmp_path / "out"))
    (tower,) = (tmp_path / "out").glob("tower-*.pt")
    whole = tower.read_bytes()
    tower.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(shoal.CorruptionError, match=r"tower-\w+\.pt is damaged"):
        shoal.torch.load(tmp_path / "out")
    tower.unlink()
    with pytest.raises(shoal.CorruptionError, match=r"tower-\w+\.pt is missing"):
        shoal.torch.load(tmp_path / "out")
    with pytest.raises(ValueError, match=r"load it with shoal\.torch\.load"):
        shoal.models.load(tmp_path / "out")


# ---- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "given", "says"),
    [
        ("trains", {}, r"no key 'trains': did you mean 'train'"),
        ("train", {"epoch": 3}, r"\[train\] has no key 'epoch': did you mean 'epochs'"),
        ("train", {"epochs": "3"}, r"\[train\] epochs is '3': pass a whole number, 1 or more"),
        ("train", {"batch_size": 0}, r"\[train\] batch_size is 0: pass 1 or more"),
        ("train", {"optimizer": {"name": "Adan"}}, r"\[train\] optimizer has no kind 'Adan': did you mean 'Adam"),
        ("train", {"optimizer": {"name": "Adam", "rate": 1}}, r"\[train\] optimizer Adam has no key 'rate'"),
        ("train", {"optimizer": {"name": "Adam", "lr": -1.0}}, r"\[train\] optimizer: Invalid learning rate"),
        ("train", {"optimizer": {"lr": 1.0}}, r"\[train\] optimizer has no name"),
        ("data", {"labels": "click"}, r"\[data\] labels is 'click': pass a table"),
        ("data", {"labelx": "click"}, r"\[data\] has no key 'labelx': did you mean 'label'"),
        ("data", {"format": "libsvm"}, r"\[data\] format is libsvm, which has no fields: it is one of libffm, vw"),
        ("train", {"dense": "both"}, r"\[train\] dense is 'both': it is one of allreduce, servers"),
        ("tables", {"dtype": "int8"}, r"\[tables\] dtype is 'int8': it is one of float32, float16"),
        ("data", {"label": None}, r"\[data\] has no label"),
        ("data", {"group": "usr"}, r"\[data\] group has 'usr', none of the columns .* did you mean 'user'\?"),
        ("data", {"fields": ["user", "at"]}, r"\[data\] features has 'at', none of .* There are 'user', 'ad', 'site'"),
        ("data", {"dense": ["site"]}, r"\[data\] column 'site' is read as categorical, and its feature needs numeric"),
        ("model", {"name": "deepfn"}, r"\[model\] has no model 'deepfn': did you mean 'deepfm'"),
        ("model", {"cross": 2}, r"\[model\] of deepfm has no key 'cross'"),
        ("model", {"hidden": 400}, r"\[model\] hidden: expected `array`, got `int`"),
        ("tables", {"optimiser": {}}, r"\[tables\] has no key 'optimiser': did you mean 'optimizer'"),
        ("tables", {"rules": {"linear": {"lr": 1}}}, r"\[tables.rules.linear\] has no key 'lr'"),
        ("tables", {"rules": {"wide": {"dtype": "float16"}}}, r"\[tables.rules\] has no key 'wide': there are linear"),
        ("data", {"interactions": [["a", "b"]]}, r"\[data\] interactions is .*: pass a list of str"),
        ("model", {"batch_nom": True}, r"\[model\] of deepfm has no key 'batch_nom': "),
        ("train", {"learning_rate": 0.1}, r"\[train\] has no key 'learning_rate': there are "),
        ("train", {"optimizer": {"name": "Adam", "learning_rate": 0.1}}, r"no key 'learning_rate': did you mean 'lr'"),
        ("tables", {"optimizer": {"name": "Adagrad", "alpha": 1}}, r"\[tables\] optimizer Adagrad has no key 'alpha'"),
        ("tables", {"optimizer": {"name": "Adagrad", "lr": -1.0}}, r"\[tables\] optimizer: .*lr"),
        ("tables", {"init": {"name": "Normal", "scale": 1.0}}, r"\[tables\] init Normal has no key 'scale'"),
        ("logging", {"tensorbord": "x"}, r"did you mean 'tensorboard'"),
        ("output", {"folder": "x"}, r"\[output\] has no key 'folder'"),
    ],
)
def test_what_is_wrong_in_a_configuration_is_told(clicks, section, given, says):
    raw = configured(clicks)
    raw[section] = {k: v for k, v in {**raw.get(section, {}), **given}.items() if v is not None}
    with pytest.raises(ValueError, match=says):
        parse(raw)


def test_one_file_needs_no_brackets(clicks):
    raw = configured(clicks)
    raw["data"] = {**raw["data"], "data": "a.csv", "valid": "b.csv"}
    data = parse(raw).data
    assert (data.data, data.valid) == (("a.csv",), ("b.csv",))


def test_a_group_that_the_data_does_not_have_is_said_before_anything_is_learned(clicks, tmp_path):
    path = tmp_path / "log.vw"
    path.write_text("".join(f"{2 * (i % 2) - 1} |user u{i % 3} |ad a{i % 5}\n" for i in range(60)))
    with shoal.local(threads=1) as store:
        for group, form in (("usr", "vw"), ("user", "vw"), ("usr", "csv")):
            fields = Features(["user", "ad"], form=form, group=group)
            data = shoal.read_vw(path) if form == "vw" else reader(clicks)
            module = DeepFM(shoal.torch.tables(store), fields, dim=2, hidden=[2])
            if group == "user":
                click = ClickModel(module, store=store).fit(data, valid=data, progress=False)
                assert click.history.passes[-1].grouped.groups == 3
                click.features = Features(["user", "ad"], form=form, group="usr")
                with pytest.raises(ValueError, match="group is 'usr', and no example"):
                    click.evaluate(click.reading(data))
                continue
            says = "group is 'usr', and no example" if form == "vw" else "group has 'usr', none .* mean 'user'"
            click = ClickModel(module, store=store)
            with pytest.raises(ValueError, match=says):
                click.fit(data, valid=data, progress=False, checkpoint=Checkpointing(tmp_path / "m"))
            assert not files.is_model(tmp_path / "m")


def test_a_model_is_refused_what_it_does_not_take(clicks):
    with shoal.local(threads=1) as store:
        with pytest.raises(ValueError, match="LR has no dense part, which 'price' is an input of: embed it"):
            made(store, configured(clicks, "lr", data={"dense": ["price"]}))
        raw = configured(clicks, "din")
        del raw["data"]["history"], raw["data"]["item"]
        with pytest.raises(ValueError, match="DIN reads sequences, and there is none"):
            made(store, raw)


def test_a_table_of_its_own_may_have_rules_of_its_own(clicks):
    tables = {
        "linear_optimizer": {"name": "FTRL", "alpha": 0.5},
        "rules": {
            "embedding": {"dtype": "float16"},
            "embedding-1": {"optimizer": {"name": "SGD", "lr": 0.5}, "init": {"name": "Uniform", "scale": 0.2}},
        },
    }
    raw = configured(clicks, tables=tables)
    raw["model"]["per_field"] = True
    with shoal.local(threads=1) as store:
        made(store, raw)
        found = dict(store.tables)
        assert [name for name in found if name.startswith("linear")] == ["linear-0", "linear-1", "linear-2"]
        assert all(type(found[f"linear-{i}"].optimizer) is shoal.FTRL for i in range(3))
        assert [found[f"embedding-{i}"].spec.dtype for i in range(3)] == ["float16", "float32", "float16"]
        assert found["embedding-1"].init == shoal.Uniform(0.2, seed=3)
        assert found["embedding-0"].init == shoal.Normal(0.01, seed=3)


def test_a_table_admits_by_a_rule(clicks):
    rules = {"admit": "count:2", "rules": {"linear": {"admit": "probability:0.5"}}}
    with shoal.local(threads=1) as store:
        click = made(store, configured(clicks, tables=rules))
        assert store.tables["embedding"].spec.admit == shoal.AfterCount(2)
        assert store.tables["linear"].spec.admit == shoal.WithProbability(0.5)
        click.fit(reader(clicks), progress=False)
        assert 0 < len(store.tables["embedding"]) <= 12 + 9 + 4
    with pytest.raises(
        ValueError, match=r"\[tables\] admit: 'counts:2' is not an admission rule: write one of count:N"
    ):
        parse(configured(clicks, tables={"admit": "counts:2"}))


def test_rows_of_a_table_expire_when_a_pass_ends(clicks):
    rules = {"expire": ["ttl:2"], "rules": {"linear": {"expire": []}}}
    with shoal.local(threads=1) as store:
        click = made(store, configured(clicks, tables=rules))
        assert store.tables["embedding"].spec.expire == (shoal.TimeToLive(2),)
        assert store.tables["linear"].spec.expire == ()
        click.fit(reader(clicks), progress=False)
        every, late = (
            {int(key) for batch in batches for key in click.prepare(batch).keys.numpy().view(np.uint64).ravel()}
            for whole in [list(click.reading(reader(clicks)))]
            for batches in (whole, whole[-3:])
        )
        assert store.tables["linear"].contains(np.array(sorted(every), np.uint64)).all()
        kept = {int(key) for keys, _ in store.tables["embedding"].items() for key in keys}
        assert kept == late
    with pytest.raises(ValueError, match=r"\[tables\] expire: 'ttk:2' is not an expiry rule: write one of ttl:CLOCKS"):
        parse(configured(clicks, tables={"expire": ["ttk:2"]}))
    with pytest.raises(ValueError, match=r"\[tables\.rules\.linear\] expire: 'ttl:clock=3' is not an expiry rule"):
        parse(configured(clicks, tables={"rules": {"linear": {"expire": ["ttl:clock=3"]}}}))
    with pytest.raises(ValueError, match=r"\[tables\] expire is 'ttl:3': pass a list"):
        parse(configured(clicks, tables={"expire": "ttl:3"}))


@pytest.mark.slow
def test_bfloat16_rounds_the_products_of_training_alone(clicks, tmp_path):
    found = {}
    for precision in ("float32", "bfloat16"):
        raw = configured(clicks, train={"precision": precision})
        with shoal.local(threads=1) as store:
            click = made(store, raw)
            assert click.precision == precision
            click.fit(reader(clicks), progress=False)
            found[precision] = click.history.passes[0].metrics.logloss
            assert all(parameter.dtype == torch.float32 for parameter in click.module.parameters())
            batch = next(iter(click.reading(reader(clicks, "valid"))))
            with torch.no_grad():
                expected = click.module.eval()(click.prepare(batch)).double().sigmoid().numpy()
            assert np.allclose(click.probabilities([batch]), expected, rtol=1e-12)
            if precision == "bfloat16":
                click.save(tmp_path / "model")
    assert 0 < abs(found["bfloat16"] - found["float32"]) < 2e-3
    with load(tmp_path / "model") as click:
        assert click.precision == "bfloat16"
    with pytest.raises(
        ValueError, match=r"\[train\] precision is 'float16': did you mean 'bfloat16'\? It is one of float32, bf"
    ):
        parse(configured(clicks, train={"precision": "float16"}))
    with shoal.local(threads=1) as store:
        click = made(store, configured(clicks))
        with pytest.raises(ValueError, match="precision is 'half': pass one of float32, bfloat16"):
            ClickModel(click.module, store=store, precision="half")


def test_staleness_is_refused_where_keys_are_not_known_ahead_and_must_be_that_of_the_checkpoint(clicks, tmp_path):
    with shoal.local(threads=1) as store:
        embedding = shoal.torch.Embedding(store.table("own", dim=1))
        with pytest.raises(ValueError, match=r"staleness is 1, and the keys that Embedding looks up are not known"):
            ClickModel(embedding, features=1, store=store, staleness=1)
    with pytest.raises(ValueError, match=r"\[train\] staleness is -1: pass 0 or more"):
        parse(configured(clicks, train={"staleness": -1}))
    begun, resumed = (Checkpointing(tmp_path / "out", every=3, resume=resume) for resume in (False, True))
    for staleness in (2, 1):
        with shoal.local(threads=1) as store:
            click = made(store, configured(clicks, train={"staleness": staleness}))
            if staleness == 2:
                with pytest.raises(RuntimeError):
                    click.fit(reader(clicks), callbacks=[Fails(8)], checkpoint=begun, progress=False)
                fresh = dense_of(click)
            else:
                before = dense_of(click)
                with pytest.raises(ValueError, match="begun with staleness=2, now it is 1: pass the same to resume"):
                    click.fit(reader(clicks), checkpoint=resumed, progress=False)
                assert dense_of(click) == before != fresh
                assert len(store.tables["embedding"]) == 0


@pytest.mark.slow
def test_a_fit_on_other_batches_than_its_checkpoint_is_refused_where_rows_were_pulled_ahead(clicks, tmp_path):
    begun, resumed = (Checkpointing(tmp_path / "out", every=3, resume=resume) for resume in (False, True))
    how = {"shuffle": 2, "progress": False}
    with shoal.local(threads=1) as store:
        click = made(store, configured(clicks, train={"staleness": 2}))
        batches = list(reader(clicks).with_fields())  # of which a checkpoint knows nothing, unlike of a reader
        with pytest.raises(RuntimeError):
            click.fit(batches, callbacks=[Fails(8)], checkpoint=begun, **how)
        with pytest.raises(ValueError, match="not those of the resumed fit"):
            click.fit([replace(batch, keys=batch.keys % 2) for batch in batches], checkpoint=resumed, **how)
        with pytest.raises(ValueError, match=r"learned from 900 examples of this pass in 9 batches, .* have 630 now"):
            click.fit([rows_of_batch(batch, 0, 70) for batch in batches], checkpoint=resumed, **how)


def test_the_help_lists_every_model():
    listed = CTR_EXAMPLES.split("architectures: ")[1].split(", or your own")[0]
    assert listed.replace("\n", " ").split(", ") == list(MODELS)


def test_the_document_lists_the_settings_of_every_model():
    text = (ROOT / "docs" / "ctr.md").read_text()
    models = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| (.+) \|$", text.split("`[model]` has")[1].split("`dim`, of")[0], re.MULTILINE
    )
    from shoal.torch.config import _takes
    from shoal.torch.models import Deep

    assert {name: re.findall(r"`(\w+)`", keys) for name, keys in models} == {
        name: [
            one for one in _takes(kind) if one not in ("dim", "per_field", "embedding_dropout", *Deep.__annotations__)
        ]
        for name, kind in MODELS.items()
    }
    assert set(Deep.__annotations__) <= set(re.findall(r"`(\w+)`", text.split("`dim`, of")[1].split("##")[0]))


@pytest.mark.slow
def test_the_configuration_of_the_document_trains(clicks, tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "ctr.md").read_text()
    example, *_ = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    lines = (clicks / "train.csv").read_text().splitlines()
    for i in (0, 1):
        (tmp_path / f"clicks_{i}.csv").write_text("\n".join([lines[0], *lines[1 + i :: 2]]) + "\n")
    (tmp_path / "clicks_2.csv").write_text((clicks / "valid.csv").read_text())
    (tmp_path / "ctr.toml").write_text(example)
    assert read("ctr.toml").model == tomllib.loads(example)["model"]
    assert main(["train", "ctr", "--config", "ctr.toml", "--quiet", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kind"] == "din"
    assert facts["passes"][-1]["grouped"]["groups"] == 12
    assert set(facts["rows"]) == {"embedding"}


# ---- the command line ------------------------------------------------------------------------------------------------


def written(tmp_path: Path, raw: dict) -> str:
    path = tmp_path / "ctr.toml"
    path.write_text(toml(raw))
    return str(path)


@pytest.mark.slow
def test_a_model_of_the_command_line_is_measured_used_and_reported(clicks, tmp_path, capsys):
    config, out = written(tmp_path, configured(clicks)), str(tmp_path / "out")
    assert main(["train", "ctr", "--config", config, "--output", out, "--epochs", "2", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    again = [
        "train",
        "ctr",
        "--config",
        config,
        "--output",
        out,
        "--set",
        "train.optimizer.lr=0.02",
        "--set",
        "model.dim=2",
    ]
    assert main([*again, "--quiet"]) == 2
    assert "holds a model already" in capsys.readouterr().err
    assert main([*again, "--overwrite", "--progress", "500"]) == 0
    said = capsys.readouterr()
    assert re.search(r"progressive +logloss .*\nvalid +logloss .*\n +GAUC 0\.\d+ +\(12 groups", said.out)
    assert "table        embedding: " in said.out
    valid = str(clicks / "valid.csv")
    assert main(["evaluate", out, "--data", valid, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    with shoal.torch.load(out) as model:
        assert facts["logloss"] == model.history.passes[-1].valid.logloss
        assert facts["gauc"] == model.history.passes[-1].grouped.gauc
        assert model.made_by["model"]["dim"] == 2
        assert model.made_by["optimizer"] == {"name": "Adam", "lr": 0.02}
        expected = model.probabilities(model.reading(reader(clicks, "valid", lists={})))
    assert main(["evaluate", out, "--data", valid]) == 0
    assert "GAUC" in capsys.readouterr().out
    assert main(["predict", out, "--data", valid, "--output", str(tmp_path / "p")]) == 0
    assert [float(line) for line in (tmp_path / "p").read_text().split()] == expected.tolist()
    capsys.readouterr()
    assert main(["report", out]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    for text in ("deepfm", "GAUC", "dense parameters", "Calibration and ROC", "table &#x27;linear&#x27;"):
        assert text in page


@pytest.mark.slow
def test_a_whole_command_does_not_import_the_compiler_of_torch(clicks, tmp_path):
    code = """
        import sys
        import shoal.cli
        assert shoal.cli.main(["train", "ctr", "--config", sys.argv[1], "--output", sys.argv[2], "--quiet"]) == 0
        assert "torch" in sys.modules and "torch._dynamo" not in sys.modules
    """
    config = written(tmp_path, configured(clicks))
    command = [sys.executable, "-c", textwrap.dedent(code), config, tmp_path / "m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_model_that_only_predicts_makes_no_dense_optimizer(clicks, tmp_path):
    with build(parse(configured(clicks)), shoal.local()) as model:
        model.fit(reader(clicks, lists={}), progress=False)
        model.save(tmp_path / "m")
    code = """
        import sys
        import shoal.cli
        for words in (["evaluate"], ["predict", "--output", sys.argv[3]]):
            assert shoal.cli.main([words[0], sys.argv[1], "--data", sys.argv[2], *words[1:]]) == 0
        assert "torch" in sys.modules and "torch._dynamo" not in sys.modules
    """
    valid, out = clicks / "valid.csv", tmp_path / "p"
    command = [sys.executable, "-c", textwrap.dedent(code), tmp_path / "m", valid, out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(out.read_text().split()) == 400


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--output", "x", "--set", "model.name=deepfn"], "did you mean 'deepfm'"),
        (["--patience", "1", "--valid"], None),
        ([], "the model needs a directory: pass --output DIR"),
        (["--output", "x", "--data", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_the_command_line_tells_what_is_wrong(clicks, tmp_path, capsys, arguments, says):
    if says is None:
        with pytest.raises(SystemExit):
            main(["train", "ctr", "--config", "x", *arguments])
        return
    assert main(["train", "ctr", "--config", written(tmp_path, configured(clicks)), *arguments]) == 2
    assert says in capsys.readouterr().err


def command(clicks: Path, folder: Path, out: str, *more: str) -> list[str]:
    raw = configured(clicks, "dcnv2", train={"epochs": 200, "batch_size": 50}, output={"checkpoint_every": 3})
    path = folder / "long.toml"
    path.write_text(toml(raw))
    return [sys.executable, "-m", "shoal", "train", "ctr", "--config", str(path), "--output", out, "--quiet", *more]


def until_it_stands(out: Path | StorageDir, process: subprocess.Popen, examples: int) -> None:
    """Wait for a checkpoint within a pass."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if files.is_model(out) and files.read(out).examples > examples:
            return
        time.sleep(0.05)
    pytest.fail("no checkpoint came")


@pytest.mark.slow
@pytest.mark.parametrize("where", long_after(1, ["local", "s3"]))
def test_a_process_that_is_killed_goes_on_to_the_same_bits(clicks, tmp_path, request, where):
    out, more = open_dir(tmp_path / "killed"), {}
    if where == "s3":
        address = request.getfixturevalue("s3")
        out = open_dir(f"s3://{BUCKET}/{tmp_path.name}/killed", options(address))
        more["FSSPEC_S3_ENDPOINT_URL"] = address  # fsspec's own configuration
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    process = subprocess.Popen(command(clicks, tmp_path, str(out)), env=environment)
    until_it_stands(out, process, 1000)
    process.send_signal(signal.SIGKILL)
    process.wait(240)
    left = files.read(out)
    assert left.fit_state is not None
    # A little further than where it was killed: in a fit that goes on, and in one that nobody killed.
    epochs = left.examples // 1000 + 2
    raw = configured(clicks, "dcnv2", train={"epochs": 200, "batch_size": 50}, output={"checkpoint_every": 3})
    got = []
    for directory, resume in ((out, True), (tmp_path / "whole", False)):
        with shoal.local() as store:
            click = made(store, raw)
            train, valid = (reader(clicks, name, batch_size=50, lists={}) for name in ("train", "valid"))
            checkpoint = Checkpointing(directory, resume=resume)
            click.fit(train, valid=valid, epochs=epochs, progress=False, checkpoint=checkpoint)
            got.append((rows_of(click), dense_of(click), untimed(click.history)))
    assert got[0] == got[1]
    described = files.read(out)
    assert sorted([*out.names(), *out.subdirectories()]) == sorted(
        [described.checkpoint, "model.json", described.tower]
    )
    with shoal.torch.load(out) as loaded:
        assert dense_of(loaded) == got[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_keep_a_checkpoint_and_end_with_130_and_143(clicks, tmp_path, number, status):
    out = tmp_path / "interrupted"
    process = subprocess.Popen(
        command(clicks, tmp_path, str(out), "--json"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    until_it_stands(out, process, 100)
    process.send_signal(number)
    said, complained = process.communicate(timeout=240)
    assert process.returncode == status, complained
    facts = json.loads(said)
    assert facts["interrupted"] is True
    assert b"--resume continues" in complained
    described = files.read(out)
    assert described.fit_state is not None
    assert described.examples == facts["examples"]


# ---- tracking --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_ctr_writes_its_run_by_the_callbacks_of_other_models(clicks, tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    raw = configured(clicks, logging={"mlflow": "mlruns", "log_every": 5, "experiment": "clicks"})
    command = ["train", "ctr", "--config", written(tmp_path, raw), "--output", "out", "--quiet"]
    assert main([*command, "--register", "clicks", "--tensorboard", "runs"]) == 0
    client = MlflowClient(tracking_uri="sqlite:///mlruns/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("clicks").experiment_id])
    assert (run.info.run_name, run.info.status) == ("out", "FINISHED")
    assert run.data.params["model.name"] == "deepfm"
    assert run.data.params["train.batch_size"] == "100"
    assert run.data.params["module"] == "DeepFM"
    history = client.get_metric_history(run.info.run_id, "progressive/logloss")
    assert [metric.step for metric in history] == [500, 1000]
    stored = tmp_path / "mlruns" / "artifacts" / run.info.run_id / "artifacts" / "model"
    with shoal.torch.load(stored) as model, shoal.torch.load("out") as saved:
        assert model.history.passes[0].valid.auc == run.data.metrics["valid/auc"]
        assert model.history.passes[0].grouped.gauc == run.data.metrics["valid/gauc"]
        assert (rows_of(model), dense_of(model)) == (rows_of(saved), dense_of(saved))
    assert client.get_model_version("clicks", "1").run_id == run.info.run_id
    assert [one.name for one in Path("runs").iterdir()] == ["out-1"]


# ---- on a cluster ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("staleness", long_after(1, [2, 0]))
def test_one_worker_of_a_cluster_trains_the_bits_of_a_local_store(clicks, tmp_path, staleness):
    raw = configured(clicks, train={"staleness": staleness}, tables={"expire": TWO_RULES})
    got = []
    for store in (shoal.local(threads=1), shoal.launch(servers=2, threads=1, storage_roots=[tmp_path])):
        with store:
            click = made(store, raw)
            checkpoint = Checkpointing(tmp_path / type(store).__name__, every=4)
            click.fit(reader(clicks), valid=reader(clicks, "valid"), progress=False, checkpoint=checkpoint)
            got.append((rows_of(click), dense_of(click), untimed(click.history)))
    assert got[0] == got[1]


@pytest.mark.slow
def test_a_model_in_the_directory_is_replaced_only_on_request(clicks, tmp_path):
    for overwrite in (False, True, False):
        with shoal.local(threads=1) as store:
            module = DeepFM(shoal.torch.tables(store), Features(["user", "ad"]), dim=2, hidden=[2])
            click = ClickModel(module, store=store)
            checkpoint = Checkpointing(tmp_path / "m", overwrite=overwrite)
            if files.is_model(tmp_path / "m") and not overwrite:
                with pytest.raises(ValueError, match="holds a model already: pass overwrite=True"):
                    click.fit(reader(clicks), progress=False, checkpoint=checkpoint)
            else:
                assert click.fit(reader(clicks), progress=False, checkpoint=checkpoint).examples == 1000


def test_an_export_that_cannot_be_served_is_said(clicks, tmp_path, capsys):
    with shoal.local(threads=1) as store:
        module = DeepFM(shoal.torch.tables(store), Features(["user", "ad"]), dim=2, hidden=[2])
        click = ClickModel(module, store=store)
        click.fit(reader(clicks), progress=False, checkpoint=Checkpointing(tmp_path / "m"))
    assert main(["export", str(tmp_path / "m"), "--output", str(tmp_path / "e")]) == 0
    assert "was not made by a configuration (shoal train ctr): shoal serve cannot rebuild it" in capsys.readouterr().err


def test_a_file_without_categorical_columns_takes_all_others_but_the_ignored_ones(clicks, tmp_path, capsys):
    raw = '[data]\nformat = "csv"\ndata = ["{}"]\nlabel = "click"\nnumeric = ["price"]\nhistory = "seen"\nitem = "ad"\n'
    rest = '[model]\nname = "din"\ndim = 2\nhidden = [4]\nattention = [2]\n'
    path = tmp_path / "c.toml"
    path.write_text(raw.format(clicks / "train.csv") + 'ignore = ["site"]\n' + rest)
    config = read(path)
    assert config.data.categorical == ("user", "ad")
    assert [one.name for one in features_of(config).all] == ["user", "ad", "price", "seen"]
    assert main(["train", "ctr", "--config", str(path), "--output", str(tmp_path / "m")]) == 0
    assert "columns: label click; categorical user, ad; numeric price; lists {'seen': 'ad'}" in capsys.readouterr().err
    path.write_text(raw.format(clicks / "train.csv") + 'ignore = ["sight"]\n' + rest)
    with pytest.raises(ValueError, match=r"ignore has 'sight', none of the other columns: user, ad, site"):
        read(path)
    path.write_text(raw.format(tmp_path / "none.csv") + rest)
    with pytest.raises(FileNotFoundError, match=r"none\.csv"):
        read(path)
