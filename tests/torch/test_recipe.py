"""The recipe of a click model: clipping, schedules and plateaus, against torch and by hand; bits of resumed fits."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="click models are torch modules")

from torch import nn  # noqa: E402

import shoal  # noqa: E402
from cluster_standin import cluster  # noqa: E402
from shoal.models import Callback, Checkpointing, EarlyStopping, Plateau  # noqa: E402
from shoal.models.preprocessing import take  # noqa: E402
from shoal.torch.click_model import ClickModel  # noqa: E402
from shoal.torch.config import build, parse  # noqa: E402
from shoal.torch.recipe import DenseSteps, Recipe, recipe_of  # noqa: E402
from stores import together  # noqa: E402
from tiers import long_after, long_but  # noqa: E402

BATCH = 60
CLIPPED = 0.02  # below the norms of the gradients of most steps
SCHEDULE = {"name": "Cosine", "clocks": 30, "floor": 0.1, "warmup": 7}
PLATEAU = {"factor": 0.5, "patience": 0}

DRAWING = threading.Lock()  # torch's random numbers are the process's, and workers are threads here


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log in which users like some ads: train.csv of 600 examples, valid.csv of 250."""
    folder = tmp_path_factory.mktemp("clicks")
    random = np.random.default_rng(8)
    for name, count in (("train", 600), ("valid", 250)):
        rows = ["click,user,ad,price"]
        for _ in range(count):
            user, ad, price = random.integers(0, 12), random.integers(0, 9), random.random()
            margin = 0.9 * (user % 3) + 0.5 * (ad % 4) - 3 + 2.5 * ((7 * user + 3 * ad) % 5 == 0) + price
            rows.append(f"{int(random.random() < 1 / (1 + np.exp(-margin)))},{user},{ad},{price:.3f}")
        (folder / f"{name}.csv").write_text("\n".join(rows) + "\n")
    return folder


def read(clicks: Path, name: str = "train") -> shoal.data.Reader:
    columns = {"label": "click", "categorical": ["user", "ad"], "numeric": ["price"]}
    return shoal.read_csv(clicks / f"{name}.csv", batch_size=BATCH, **columns)


def made(store: shoal.Store, *, tables: dict[str, Any] | None = None, **train: Any) -> ClickModel:
    raw = {
        "data": {
            "format": "csv",
            "data": ["unused"],
            "label": "click",
            "categorical": ["user", "ad"],
            "numeric": ["price"],
            "dense": ["price"],
            "group": "user",
        },
        "model": {"name": "deepfm", "dim": 4, "hidden": [8], "dropout": 0.3},
        "tables": {"optimizer": {"name": "Adagrad", "lr": 0.6}, **(tables or {})},
        "train": {"optimizer": {"name": "Adam", "lr": 0.01}, "seed": 3, **train},
    }
    with DRAWING:
        return build(parse(raw), store)


def bits(model: ClickModel) -> tuple[Any, ...]:
    return (
        [table.digest() for table in model.tables],
        [parameter.detach().numpy().tobytes() for parameter in model.module.parameters()],
        [(one.number, one.metrics, one.valid, one.grouped) for one in model.history.passes],
        model.examples,
    )


def rate(model: ClickModel) -> float:
    return model._dense.optimizer.param_groups[0]["lr"]


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_gradients_are_clipped_as_by_torch():
    torch.manual_seed(1)
    own, torchs = nn.Linear(5, 3), nn.Linear(5, 3)
    torchs.load_state_dict(own.state_dict())
    steps = DenseSteps(Recipe(clip_norm=0.25), list(own.parameters()))
    first, second = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (own, torchs))
    for _ in range(3):
        x = torch.randn(7, 5)
        for one, optimizer in ((own, first), (torchs, second)):
            optimizer.zero_grad()
            one(x).square().mean().backward()
        steps.step(first)
        nn.utils.clip_grad_norm_(torchs.parameters(), 0.25)
        second.step()
        for a, b in zip(own.parameters(), torchs.parameters(), strict=True):
            assert torch.equal(a, b)


def test_the_rate_of_a_step_is_that_of_the_settings_times_schedule_and_plateau():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.3)
    schedule = shoal.schedules.Linear(4, floor=0.5, warmup=2)
    steps = DenseSteps(Recipe(schedule=schedule), [weight])
    rates = []
    for step in range(8):
        if step == 6:
            steps.scale_rate(0.25, Plateau(min_rate=0.1))
        optimizer.zero_grad()
        weight.sum().backward()
        before = weight.item()
        steps.step(optimizer)
        rates.append(before - weight.item())
    expected = [0.3 * schedule.at(step) * (1 if step < 6 else 1 / 3) for step in range(8)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_parameters_are_averaged_as_by_torch():
    torch.manual_seed(1)
    module = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps = DenseSteps(Recipe(ema=0.9), list(module.parameters()))
    expected = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(5):
        optimizer.zero_grad()
        module(torch.randn(7, 5)).square().mean().backward()
        steps.step(optimizer)
        expected.update_parameters(module)
        own = [one.detach().clone() for one in module.parameters()]
        with steps.averaged():
            for average, its in zip(module.parameters(), expected.module.parameters(), strict=True):
                assert torch.equal(average, its)
        assert all(torch.equal(a, b) for a, b in zip(own, module.parameters(), strict=True))


@pytest.mark.slow
def test_averages_predict_and_are_saved_and_the_parameters_learn(clicks, tmp_path):
    with shoal.local(threads=1) as store:
        model = made(store, ema=0.9)
        model.fit(read(clicks), valid=read(clicks, "valid"), progress=False, checkpoint=Checkpointing(tmp_path))
        valid = model.reading(read(clicks, "valid"))
        expected, measured = model.decision_function(valid), model.history.passes[-1].valid
        assert model.evaluate(valid) == measured
        learned = [one.detach().clone() for one in model.module.parameters()]
    with shoal.torch.load(tmp_path) as loaded:
        assert np.array_equal(loaded.decision_function(loaded.reading(read(clicks, "valid"))), expected)
        averages = list(loaded.module.parameters())
        assert not any(torch.equal(a, b) for a, b in zip(averages, learned, strict=True) if a.numel())
    with shoal.local(threads=1) as store:
        plain = made(store)
        plain.fit(read(clicks), progress=False)
        for one, other in zip(learned, plain.module.parameters(), strict=True):
            assert torch.equal(one, other)


def test_a_dense_part_on_servers_is_not_averaged():
    with shoal.local(threads=1) as store, pytest.raises(ValueError, match="no worker makes all steps"):
        made(store, dense="servers", ema=0.999)


# ---- plateaus --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patience", "gains", "reductions"),
    [
        (0, [], 0),
        (0, [1.0, 2.0], 0),
        (0, [1.0, 1.0, 0.5, 2.0], 2),
        (1, [1.0, 1.0, 0.5], 1),
        (1, [1.0, 0.9, 1.2, 0.9, 1.0, 1.0, 1.0], 2),  # the count begins again after an improvement and a reduction
        (0, [float("nan"), 1.0, float("nan")], 2),
        (0, [1.0, 1.05], 1),  # below min_delta
    ],
)
def test_rates_fall_after_more_than_patience_passes_without_an_improvement(patience, gains, reductions):
    plateau = Plateau(factor=0.5, patience=patience, min_delta=0.1)
    assert plateau.scale(gains) == 0.5**reductions


def test_no_rate_falls_below_the_least_one():
    plateau = Plateau(min_rate=0.01)
    assert plateau.scale_of(1.0, 0.1) == 0.1
    assert plateau.scale_of(0.05, 0.1) == 0.01 / 0.05
    assert plateau.scale_of(0.001, 0.1) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["allreduce", "servers"])
def test_rates_of_dense_part_and_tables_fall_together_and_come_back(clicks, dense, monkeypatch):
    scaled: list[tuple[str, float]] = []
    scale_rate = shoal.Table.scale_rate
    monkeypatch.setattr(
        shoal.Table, "scale_rate", lambda self, factor: scaled.append((self.name, factor)) or scale_rate(self, factor)
    )
    tables = {"linear_optimizer": {"name": "FTRL"}}  # has no rate that changes
    with shoal.local(threads=1) as store:
        model = made(store, dense=dense, plateau=PLATEAU, tables=tables)
        rates = []

        class Watch(Callback):
            def pass_done(self, progress: Any) -> None:
                rates.append(scaled[-1][1])

        how = {"valid": read(clicks, "valid"), "epochs": 6, "progress": False, "callbacks": [Watch()]}
        model.fit(read(clicks), **how)
        losses = [one.valid.logloss for one in model.history.passes]
        best, expected = np.inf, [1.0]
        for loss in losses:
            expected.append(expected[-1] * (1.0 if loss < best else 0.5))
            best = min(best, loss)
        assert rates == expected[1:]
        assert rates[-1] < 1.0
        names = ["embedding", "dense"] if dense == "servers" else ["embedding"]
        assert {name for name, _ in scaled} == set(names)
        assert [factor for _, factor in scaled[-len(names) :]] == [1.0] * len(names)
        if dense == "allreduce":
            assert rate(model) == pytest.approx(0.01 * expected[-2])
        scaled.clear()
        model.fit(read(clicks), valid=read(clicks, "valid"), progress=False)
        assert scaled[0] == ("embedding", 1.0)


@pytest.mark.slow
def test_a_fit_stops_and_lowers_rates_by_gauc(clicks):
    how = {"valid": read(clicks, "valid"), "epochs": 12, "progress": False}
    with shoal.local(threads=1) as store:
        model = made(store, plateau={"factor": 0.9}, metric="gauc")
        model.fit(read(clicks), **how, early_stopping=EarlyStopping(2, metric="gauc"))
        found = [one.grouped.gauc for one in model.history.passes]
        assert len(found) < 12
        assert model.history.best_pass == int(np.argmax(found)) + 1 == len(found) - 2
        assert [one.valid.auc for one in model.history.passes] != found
        assert model.history.fits[-1].plan.plateau == Plateau(factor=0.9, metric="gauc")


@pytest.mark.slow
def test_a_grid_has_a_recipe_and_is_compared_by_gauc(clicks):
    raw = {
        "data": {"format": "csv", "data": [], "label": "click", "categorical": ["user", "ad"], "group": "user"},
        "model": {"name": "deepfm", "dim": 4, "hidden": [8]},
        "train": {"epochs": 3, "plateau": PLATEAU, "metric": "gauc", "clip_norm": CLIPPED},
        "tables": {"optimizer": {"name": "Adagrad", "lr": 0.6}},
    }
    with shoal.torch.ClickModelGrid(raw, {"model.dim": [2, 4]}) as grid:
        grid.fit(read(clicks), valid=read(clicks, "valid"), progress=False)
        for model, config in zip(grid.models, grid.configs, strict=True):
            with shoal.local() as store, DRAWING:
                alone = build(config, store)
                alone.fit(read(clicks), valid=read(clicks, "valid"), epochs=3, progress=False)
                assert bits(alone) == bits(model)
        results = grid.results("gauc")
        assert results[0].grouped.gauc > results[1].grouped.gauc


def test_gauc_needs_groups(clicks):
    raw = {"data": {"format": "csv", "data": ["unused"], "label": "click", "categorical": ["user"]}}
    with pytest.raises(ValueError, match=r"\[train\] metric is gauc, and \[data\] names no group"):
        parse({**raw, "model": {"name": "lr"}, "train": {"metric": "gauc"}})
    with (
        shoal.models.LogisticRegression() as model,
        pytest.raises(ValueError, match="metric is 'gauc', and nothing names the groups"),
    ):
        model.fit(read(clicks), valid=read(clicks, "valid"), early_stopping=EarlyStopping(1, metric="gauc"))


class Fails(Callback):
    """A callback that raises after some calls: as good as a kill, since nothing is tidied up."""

    def __init__(self, after: int) -> None:
        self.left = after

    def batch_done(self, progress: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the power failed")

    def pass_done(self, progress: Any) -> None:
        self.batch_done(progress)


RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped and scheduled": ({"clip_norm": CLIPPED, "schedule": SCHEDULE}, {}),
    "plateau": ({"plateau": PLATEAU, "schedule": SCHEDULE}, {}),
    "plateau on servers": ({"plateau": PLATEAU, "schedule": SCHEDULE, "clip_norm": CLIPPED, "dense": "servers"}, {}),
    "averages": ({"ema": 0.8, "plateau": PLATEAU}, {}),
    "averages and patience": ({"ema": 0.8}, {"early_stopping": EarlyStopping(4)}),
    "plateau and patience": ({"plateau": {"factor": 0.3}}, {"early_stopping": EarlyStopping(4)}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", long_but(["clipped and scheduled", "plateau on servers", "averages and patience"], list(RECIPES))
)
@pytest.mark.parametrize("stop", long_after(1, [25, 9, 47]))  # within passes 3, 1 and 5
def test_a_resumed_fit_has_the_bits_of_one_that_never_stopped(clicks, tmp_path, recipe, stop):
    train, how = RECIPES[recipe]

    def run(directory: Path, stop: int | None, *, resume: bool = False) -> tuple[Any, ...]:
        with shoal.local(threads=1) as store:
            model = made(store, **train)
            model.fit(
                read(clicks),
                valid=read(clicks, "valid"),
                progress=False,
                checkpoint=Checkpointing(directory, every=4, resume=resume),
                callbacks=[] if stop is None else [Fails(stop)],
                epochs=6,
                **how,
            )
            return bits(model)

    expected = run(tmp_path / "whole", None)
    assert expected != _plain(clicks, **how)
    with pytest.raises(RuntimeError, match="the power failed"):
        run(tmp_path / "cut", stop)
    assert run(tmp_path / "cut", None, resume=True) == expected


def _plain(clicks: Path, **how: Any) -> tuple[Any, ...]:
    with shoal.local(threads=1) as store:
        model = made(store)
        model.fit(read(clicks), valid=read(clicks, "valid"), progress=False, epochs=6, **how)
        return bits(model)


def test_another_plateau_is_not_resumed(clicks, tmp_path):
    how = {"valid": read(clicks, "valid"), "epochs": 2, "progress": False}
    with shoal.local(threads=1) as store, pytest.raises(RuntimeError):
        made(store, plateau=PLATEAU).fit(
            read(clicks), **how, checkpoint=Checkpointing(tmp_path, every=2), callbacks=[Fails(5)]
        )
    with shoal.local(threads=1) as store, pytest.raises(ValueError, match="the fit was begun with plateau="):
        made(store).fit(read(clicks), **how, checkpoint=Checkpointing(tmp_path, every=2, resume=True))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"optimizer": {"name": "Adam", "lr": 0.5}}, r"optimizer.lr=0\.01, now it is 0\.5"),
        ({"optimizer": {"name": "SGD", "lr": 0.01}}, "optimizer='Adam', now it is 'SGD'"),
        ({"clip_norm": 1.0}, r"clip_norm=0\.02, now it is 1\.0"),
        ({"clip_norm": None}, r"clip_norm=0\.02, now it is None"),
        (
            {"schedule": SCHEDULE | {"floor": 0.2}},
            r"schedule='Cosine\(.*floor=0\.1.* now it is .*floor=0\.2",
        ),
        ({"ema": 0.9}, r"ema=None, now it is 0\.9"),
        ({"loss": "focal"}, "loss=\"'bce'\", now it is \"'focal'\""),
        ({"precision": "bfloat16"}, "precision='float32', now it is 'bfloat16'"),
        ({"dense": "servers"}, "dense='allreduce', now it is 'servers'"),
    ],
)
def test_a_fit_is_not_resumed_with_another_recipe_or_optimizer(stopped, change, says):
    settings = {"clip_norm": CLIPPED, "schedule": SCHEDULE, **change}
    with shoal.local(threads=1) as store:
        model = made(store, **{name: value for name, value in settings.items() if value is not None})
        before = bits(model)
        with pytest.raises(ValueError, match=f"was begun with {says}.*: pass the same to resume, or begin another fit"):
            model.fit(read(stopped.parent), progress=False, checkpoint=Checkpointing(stopped, resume=True))
        assert bits(model) == before


@pytest.fixture(scope="module")
def stopped(clicks: Path) -> Path:
    """A checkpoint within the first pass."""
    folder = clicks / "stopped"
    how = {"progress": False, "checkpoint": Checkpointing(folder, every=2), "callbacks": [Fails(5)]}
    with shoal.local(threads=1) as store, pytest.raises(RuntimeError):
        made(store, clip_norm=CLIPPED, schedule=SCHEDULE).fit(read(clicks), **how)
    return folder


def test_a_plateau_needs_something_to_measure(clicks):
    with shoal.local(threads=1) as store, pytest.raises(ValueError, match="a plateau needs something to measure"):
        made(store, plateau=PLATEAU).fit(read(clicks), progress=False)


# ---- several workers -------------------------------------------------------------------------------------------------


class Half:
    """Each batch of a reader, cut among workers: the k-th batches of all are one of the reader's."""

    def __init__(self, reader: shoal.data.Reader, rank: int, workers: int) -> None:
        self._reader, self._rank, self._workers = reader, rank, workers

    def __iter__(self) -> Iterator[shoal.Batch]:
        for batch in self._reader.with_fields():
            yield take(batch, np.arange(self._rank, len(batch), self._workers))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.slow
@pytest.mark.parametrize("dense", ["allreduce", "servers"])
def test_two_workers_learn_what_one_does_and_lower_their_rates_together(clicks, dense):
    """On servers gradients are clipped before they are summed, and a meeting of workers takes clocks of a schedule."""
    train: dict[str, Any] = {"plateau": PLATEAU, "dense": dense}
    optimizers: dict[str, Any] = {"optimizer": {"name": "SGD", "lr": 0.5}}
    if dense == "allreduce":
        train |= {"clip_norm": 0.1, "schedule": SCHEDULE, "ema": 0.9}

    def learn(store: shoal.Store) -> tuple[list[float], np.ndarray]:
        model = made(store, **train, **optimizers, tables={"optimizer": {"name": "SGD", "lr": 2.0}})
        model.module.tower[2].p = 0.0  # workers draw their own
        rank, workers = store.rank, store.num_workers
        model.fit(
            Half(read(clicks), rank, workers),
            valid=read(clicks, "valid").split(rank, workers),
            epochs=5,
            progress=False,
        )
        store.barrier()
        parameters = np.concatenate([one.detach().numpy().ravel() for one in model.module.parameters()])
        return [one.valid.logloss for one in model.history.passes], parameters

    with shoal.local(threads=1) as store:
        losses, parameters = learn(store)
    assert any(after >= before for before, after in itertools.pairwise(losses))
    with cluster(2, 1) as servers:
        found = together(servers.address, 2, learn)
    for its_losses, its_parameters in found:
        np.testing.assert_allclose(its_losses, losses, rtol=2e-5)
        np.testing.assert_allclose(its_parameters, parameters, rtol=2e-4, atol=2e-5)
    assert found[0][1].tobytes() == found[1][1].tobytes()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_workers_of_a_fit_have_one_recipe(clicks):
    def learn(store: shoal.Store) -> None:
        model = made(store, clip_norm=1.0 + store.rank)
        with pytest.raises(ValueError, match=r"recipe is .*'clip_norm': 1.0.* on worker 0 and .*'clip_norm': 2.0"):
            model.fit(read(clicks).split(store.rank, store.num_workers), progress=False)

    with cluster(1, 1) as servers:
        together(servers.address, 2, learn)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_of_a_dense_part_on_servers_are_clipped_by_each_worker_to_its_share(clicks, reduce):
    """By SGD the norm of a step is at most the rate times clip_norm."""
    optimizer = {"optimizer": {"name": "SGD", "lr": 1.0}}

    def learn(store: shoal.Store) -> list[float]:
        model = made(store, dense="servers", clip_norm=CLIPPED, **optimizer)
        steps: list[float] = []
        before: list[np.ndarray] = []

        class Watch(Callback):
            def batch_done(self, progress: Any) -> None:
                model._dense.refresh()
                now = np.concatenate([one.detach().numpy().ravel() for one in model.module.parameters()])
                if before:
                    steps.append(float(np.linalg.norm(now - before[-1])))
                before.append(now)

        model.fit(Half(read(clicks), store.rank, store.num_workers), progress=False, callbacks=[Watch()])
        return steps

    with cluster(1, 1) as servers:
        found = together(servers.address, 2, learn, consistency=shoal.BSP(reduce=reduce))
    for steps in found:
        assert len(steps) == 9
        assert 0.5 * CLIPPED < max(steps) <= CLIPPED * (1 + 1e-5)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"schedule": {"name": "Warmup", "warm": 7}}, r"\[train\] schedule Warmup has no key 'warm': did you mean"),
        ({"schedule": {"name": "Warm"}}, r"\[train\] schedule has no kind 'Warm': did you mean 'Warmup'"),
        ({"schedule": {"warmup": 7}}, "schedule has no name: it is one of Warmup, Steps, Linear"),
        ({"schedule": {"name": "Warmup", "warmup": -1}}, r"\[train\] schedule: "),
        ({"plateau": {"factr": 0.5}}, r"\[train\] plateau has no key 'factr': did you mean 'factor'"),
        ({"plateau": {"factor": 1.5}}, "factor of a plateau is 1.5: pass a number above 0 and below 1"),
        ({"plateau": {"patience": -1}}, "patience of a plateau is -1"),
        ({"plateau": {"min_rate": "low"}}, r"\[train\] plateau: Expected `float`, got `str`"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0: pass a number above 0"),
        ({"ema": 1.0}, "ema is 1.0: pass a number above 0 and below 1"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_told(given, says):
    with pytest.raises(ValueError, match=says):
        recipe_of(given)


def test_a_dense_part_on_servers_has_one_schedule():
    optimizer = {"name": "Adam", "lr": 0.1, "schedule": SCHEDULE}
    with shoal.local(threads=1) as store:
        model = made(store, dense="servers", schedule=SCHEDULE)
        assert model._dense._rule == shoal.Adam(lr=0.01, schedule=recipe_of({"schedule": SCHEDULE}).schedule)
    with shoal.local(threads=1) as store, pytest.raises(ValueError, match="pass one of them"):
        made(store, dense="servers", optimizer=optimizer, schedule={"name": "Warmup", "warmup": 3})
