"""Click models that several workers train: one worker's losses with the whole batch, one end for all, one model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="click models are torch modules")


import shoal  # noqa: E402
from click_config import ADAGRAD, click_config  # noqa: E402
from cluster_fakes import TIMEOUT  # noqa: E402
from cluster_standin import cluster  # noqa: E402
from shoal.cluster.launch import local_cluster  # noqa: E402
from shoal.errors import WorkerLostError  # noqa: E402
from shoal.models import Callback, Checkpointing, EarlyStopping, files  # noqa: E402
from shoal.torch.click_model import ClickModel  # noqa: E402
from shoal.torch.config import build, parse  # noqa: E402
from stores import one_by_one, together  # noqa: E402
from tiers import long_after  # noqa: E402

BATCH, COLUMNS = 60, {"label": "click", "categorical": ["user", "ad"], "numeric": ["price"]}

DRAWING = threading.Lock()  # torch's random numbers are the process's, and workers are threads here

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log in which users like some ads: train.csv of 600 examples, valid.csv of 250, and a configuration."""
    folder = tmp_path_factory.mktemp("clicks")
    random = np.random.default_rng(8)
    for name, count in (("train", 600), ("valid", 250)):
        rows = ["click,user,ad,price"]
        for _ in range(count):
            user, ad, price = random.integers(0, 12), random.integers(0, 9), 10 * random.random()
            margin = 0.9 * (user % 3) + 0.5 * (ad % 4) - 3 + 2.5 * ((7 * user + 3 * ad) % 5 == 0) + 0.1 * price
            rows.append(f"{int(random.random() < 1 / (1 + np.exp(-margin)))},{user},{ad},{price:.3f}")
        (folder / f"{name}.csv").write_text("\n".join(rows) + "\n")
    (folder / "ctr.toml").write_text(
        click_config(
            folder / "train.csv",
            folder / "valid.csv",
            price=True,
            data={"group": "user"},
            tables=ADAGRAD,
            train={"batch_size": BATCH // 2, "seed": 3, "epochs": 2},
        )
    )
    return folder


def read(clicks: Path, name: str = "train", batch_size: int = BATCH) -> shoal.data.Reader:
    return shoal.read_csv(clicks / f"{name}.csv", batch_size=batch_size, **COLUMNS)


def made(clicks: Path, store: shoal.Store, dense: str, **train: Any) -> ClickModel:
    optimizer = {"name": "SGD", "lr": 0.5}
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
        "model": {"name": "deepfm", "dim": 4, "hidden": [8]},
        "tables": {"optimizer": {"name": "SGD", "lr": 0.5}},
        "train": {"optimizer": optimizer, "seed": 3, "dense": dense, **train},
    }
    with DRAWING:
        return build(parse(raw), store)


class Half:
    """Each batch of a reader, cut among workers: the k-th batches of all are one of the reader's."""

    def __init__(self, reader: shoal.data.Reader, rank: int, workers: int) -> None:
        self._reader, self._rank, self._workers = reader, rank, workers

    def __iter__(self) -> Iterator[shoal.Batch]:
        from shoal.models.preprocessing import take

        for batch in self._reader.with_fields():
            yield take(batch, np.arange(self._rank, len(batch), self._workers))


def losses(history: Any) -> list[float]:
    return [value for done in history.passes for value in (done.metrics.logloss, done.valid.logloss)]


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["allreduce", "servers"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_workers_at_parts_of_a_batch_have_the_losses_of_one_at_the_whole(clicks: Path, dense: str, reduce: str) -> None:
    """Gradients of parts are summed in another order than those of the whole: to float32 noise."""

    def learn(store: shoal.Store) -> Any:
        model = made(clicks, store, dense)
        rank, workers = store.rank, store.num_workers
        valid = read(clicks, "valid").split(rank, workers)
        model.fit(Half(read(clicks), rank, workers), valid=valid, epochs=2, progress=False)
        store.barrier()
        parameters = np.concatenate([p.detach().numpy().ravel() for p in model.module.parameters()])
        return model.history, model.examples, parameters

    with shoal.local(threads=1) as store:
        (alone, examples, parameters) = learn(store)
    with cluster(2, 1) as servers:
        found = together(servers.address, 2, learn, consistency=shoal.BSP(reduce=reduce))
    for history, its_examples, its_parameters in found:
        assert its_examples == examples == 1200
        np.testing.assert_allclose(losses(history), losses(alone), rtol=2e-5)
        np.testing.assert_allclose(its_parameters, parameters, rtol=2e-4, atol=2e-5)
        for mine, whole in zip(history.passes, alone.passes, strict=True):
            assert mine.valid.examples == whole.valid.examples == 250
            assert mine.valid.auc == pytest.approx(whole.valid.auc, abs=1e-3)
            assert mine.metrics.examples == whole.metrics.examples
            assert mine.metrics.auc == pytest.approx(whole.metrics.auc, abs=2e-3)
            assert mine.grouped.groups == whole.grouped.groups
            assert mine.features == whole.features
    assert found[0][2].tobytes() == found[1][2].tobytes()


@pytest.mark.slow
@pytest.mark.combined
@pytest.mark.parametrize("dense", ["allreduce", "servers"])
@pytest.mark.parametrize("consistency", long_after(2, [shoal.BSP(), shoal.ASP(), shoal.SSP(2)]), ids=str)
def test_workers_with_unequal_shares_end_together(clicks: Path, dense: str, consistency: shoal.Consistency) -> None:
    whole = list(read(clicks).with_fields())
    shares = [whole, whole[:3], []]

    def learn(store: shoal.Store) -> Any:
        model = made(clicks, store, dense)
        valid = read(clicks, "valid") if store.rank == 1 else None
        model.fit(shares[store.rank], valid=valid, epochs=2, progress=False)
        store.barrier()
        return model.examples, model.history.passes[-1].valid

    with cluster(2, 1) as servers:
        found = together(servers.address, 3, learn, consistency=consistency)
    assert [examples for examples, _ in found] == [2 * (600 + 180)] * 3
    assert found[0][1] == found[1][1] == found[2][1]
    assert found[0][1].logloss < 0.69


def test_a_worker_that_fails_ends_the_others_with_an_error_that_names_it(clicks: Path) -> None:
    whole = list(read(clicks).with_fields())

    def broken() -> Iterator[shoal.Batch]:
        yield from whole[:2]
        raise OSError("the disk is gone")

    def learn(store: shoal.Store) -> str:
        model = made(clicks, store, "allreduce")
        try:
            model.fit(broken() if store.rank else whole, progress=False)
        except (OSError, WorkerLostError) as error:
            return str(error)
        return "ended"

    with cluster(1, 1) as servers:
        first, second = one_by_one(servers.address, 2, learn)
    assert second == "the disk is gone"
    assert "worker" in first
    assert "again, with resume=True (--resume)" in first


@pytest.mark.slow
def test_early_stopping_restores_the_weights_of_the_best_pass_on_all_workers(clicks: Path, tmp_path: Path) -> None:
    def learn(store: shoal.Store) -> Any:
        model = made(clicks, store, "servers", optimizer={"name": "SGD", "lr": 3.0})
        rank, workers = store.rank, store.num_workers
        train, valid = (read(clicks, name).split(rank, workers) for name in ("train", "valid"))
        checkpoint = Checkpointing(tmp_path / "m")
        model.fit(train, valid=valid, epochs=30, progress=False, checkpoint=checkpoint, early_stopping=EarlyStopping(2))
        store.barrier()
        return model.history.best_pass, len(model.history.passes), model.evaluate(read(clicks, "valid")).logloss

    with cluster(1, 1) as servers:
        first, second = together(servers.address, 2, learn)
    assert first == second
    best, passes, logloss = first
    assert passes == best + 2 < 30
    with shoal.torch.load(tmp_path / "m") as model:
        assert model.history.passes[best - 1].valid.logloss == pytest.approx(logloss, rel=1e-6)
        assert model.evaluate(read(clicks, "valid")).logloss == pytest.approx(logloss, rel=1e-6)


class Cut(Exception):
    pass


class CutOff(Callback):
    """Ends the fit of each worker after some of its batches."""

    def __init__(self, until: int) -> None:
        self._until = until

    def batch_done(self, progress: Any) -> None:
        if progress.batches == self._until:
            raise Cut


def resumable(
    clicks: Path, directory: Path, dense: str, *, until: int = 10**6, resume: bool = False, staleness: int = 0
) -> Any:
    def work(store: shoal.Store) -> Any:
        model = made(clicks, store, dense, optimizer={"name": "Adagrad", "lr": 0.05}, staleness=staleness)
        rank, workers = store.rank, store.num_workers
        train, valid = (read(clicks, name, BATCH // 2).split(rank, workers) for name in ("train", "valid"))
        checkpoint = Checkpointing(directory, every=2, resume=resume)
        try:
            model.fit(train, valid=valid, epochs=2, progress=False, checkpoint=checkpoint, callbacks=CutOff(until))
        except (Cut, WorkerLostError):
            return None
        digests = [table.digest() for table in model.tables]
        parameters = [parameter.detach().numpy().tobytes() for parameter in model.module.parameters()]
        return digests, parameters, model.examples, [(p.metrics, p.valid, p.grouped) for p in model.history.passes]

    return work


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["allreduce", "servers"])
@pytest.mark.parametrize("until", long_after(1, [13, 5]))  # one of them ends first, and the other writes none then
def test_a_fit_that_goes_on_has_the_bits_of_one_that_never_stopped(
    clicks: Path, tmp_path: Path, dense: str, until: int
) -> None:
    with cluster(2, 1) as servers:
        expected = one_by_one(servers.address, 2, resumable(clicks, tmp_path / "whole", dense))
    with cluster(2, 1) as servers:
        one_by_one(servers.address, 2, resumable(clicks, tmp_path / "cut", dense, until=until))
    fit_state = files.read(tmp_path / "cut").fit_state
    assert fit_state is not None
    with cluster(1, 1) as servers:
        found = one_by_one(servers.address, 2, resumable(clicks, tmp_path / "cut", dense, resume=True))
    assert found == expected
    assert found[0] == found[1]
    with shoal.torch.load(tmp_path / "cut") as model:
        assert [p.detach().numpy().tobytes() for p in model.module.parameters()] == expected[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["allreduce", "servers"])
@pytest.mark.parametrize(("before", "after"), long_after(1, [(2, 3), (1, 2), (2, 1)]))
def test_a_fit_goes_on_with_another_number_of_workers(
    clicks: Path, tmp_path: Path, dense: str, before: int, after: int
) -> None:
    with cluster(2, 1) as servers:
        one_by_one(servers.address, before, resumable(clicks, tmp_path / "m", dense, until=5))
    assert files.read(tmp_path / "m").examples == before * 4 * BATCH // 2
    with cluster(1, 1) as servers:
        found = one_by_one(servers.address, after, resumable(clicks, tmp_path / "m", dense, resume=True))
    for _, parameters, examples, passes in found:
        assert parameters == found[0][1]
        assert examples == 1200
        assert [progressive.examples for progressive, _, _ in passes] == [600, 600]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), long_after(2, [(2, 2), (1, 2), (2, 1)]))
def test_rows_pulled_ahead_are_pulled_anew_by_workers_that_resume(
    clicks: Path, tmp_path: Path, before: int, after: int
) -> None:
    """Those in a checkpoint of one process are of batches that each of several workers has not."""
    with cluster(1, 1) as servers:
        one_by_one(servers.address, before, resumable(clicks, tmp_path / "m", "servers", until=5, staleness=2))
    with cluster(1, 1) as servers:
        found = one_by_one(
            servers.address, after, resumable(clicks, tmp_path / "m", "servers", resume=True, staleness=2)
        )
    for _, _, examples, passes in found:
        assert examples == 1200
        assert [progressive.examples for progressive, _, _ in passes] == [600, 600]


@pytest.mark.parametrize(
    ("dense", "optimizer", "text"),
    [
        ("allreduce", shoal.Adagrad(), "which servers apply"),
        ("servers", torch.optim.Adam, "pass an optimizer of shoal.optim"),
        ("nowhere", None, "dense is 'nowhere'"),
    ],
)
def test_an_optimizer_must_fit_where_the_dense_part_is(clicks: Path, dense: Any, optimizer: Any, text: str) -> None:
    with shoal.local() as store:
        model = made(clicks, store, "allreduce")
        with pytest.raises(ValueError, match=text):
            ClickModel(model.module, store=store, optimizer=optimizer, dense=dense)


def run(clicks: Path, out: Path, *more: str, dense: str = "allreduce", workers: int = 2) -> list[dict[str, Any]]:
    config = clicks / f"{dense}.toml"
    config.write_text((clicks / "ctr.toml").read_text() + f'dense = "{dense}"\n')
    launch = [sys.executable, "-m", "shoal", "launch", "--servers", "2", "--workers", str(workers)]
    command = [sys.executable, "-m", "shoal", "train", "ctr", "--cluster", "--config", str(config), "--json"]
    done = subprocess.run(
        [*launch, *command, "--output", str(out), "--quiet", *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT * 2,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_torchrun_starts_the_workers(clicks: Path, tmp_path: Path) -> None:
    with local_cluster.running(1, timeout=TIMEOUT, storage_roots=[str(tmp_path)]) as servers:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shoal"]
        command = ["train", "ctr", "--cluster", servers.address, "--config", str(clicks / "ctr.toml")]
        done = subprocess.run(
            [*launch, *command, "--output", str(tmp_path / "m")],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT * 2,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker 0 of 2 saves it" in done.stdout
    with shoal.torch.load(tmp_path / "m") as model:
        assert model.examples == 1200


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["allreduce", "servers"])
def test_the_command_trains_on_two_workers_and_the_first_one_saves(clicks: Path, tmp_path: Path, dense: str) -> None:
    reported = sorted(run(clicks, tmp_path / "m", dense=dense), key=lambda one: one["worker"])
    assert [one["worker"] for one in reported] == [0, 1]
    assert [one["examples"] for one in reported] == [1200, 1200]
    metrics = [[(done["metrics"], done["valid"], done["grouped"]) for done in one["passes"]] for one in reported]
    assert metrics[0] == metrics[1]
    assert reported[0]["passes"][1]["valid"]["examples"] == 250
    assert [one["model"] for one in reported] == [str(tmp_path / "m"), None]
    with shoal.torch.load(tmp_path / "m") as model:
        found = model.evaluate(read(clicks, "valid"))
        assert found.logloss == pytest.approx(reported[0]["passes"][1]["valid"]["logloss"], rel=1e-6)
