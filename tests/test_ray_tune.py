"""Trials of Ray Tune that fit a `ShoalTrainer` each, as docs/ray.md shows."""

import sys

import numpy as np
import pytest

pytest.importorskip("ray.tune", reason="ray is an extra: pip install 'shoal[ray]'")

import ray.train
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

import shoal

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings(r"ignore::Warning:ray\..*")]

# The workers of Ray cannot import this file.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def loop(settings):
    rng = np.random.default_rng(1)
    with shoal.LogisticRegression(shoal.FTRL(alpha=settings["alpha"]), shoal.ray.store()) as model:
        for _ in range(30):
            keys = rng.integers(0, 20, 100).astype(np.uint64)
            labels = (rng.random(100) < 1 / (1 + np.exp(-3 * np.sin(keys)))).astype(np.float32)
            loss = model.partial_fit(shoal.Batch(labels, np.arange(101), keys, np.ones(100, np.float32)))
        ray.train.report({"logloss": loss})


def trial(settings):
    shoal.ray.ShoalTrainer(
        loop,
        train_loop_config=settings,
        run_config=ray.train.RunConfig(storage_path=settings["storage"], callbacks=[TuneReportCallback()]),
    ).fit()


def test_tune_finds_the_better_rate(ray_cluster, tmp_path):
    results = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.1}),
        param_space={"storage": str(tmp_path / "runs"), "alpha": tune.grid_search([0.0001, 0.2])},
        tune_config=tune.TuneConfig(metric="logloss", mode="min", max_concurrent_trials=2),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    ).fit()
    assert [result.error for result in results] == [None, None]
    assert results.get_best_result().config["alpha"] == 0.2
