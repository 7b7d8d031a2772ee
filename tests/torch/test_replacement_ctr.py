"""A worker that dies while click models are trained is replaced: under BSP to the bits of the undisturbed fit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="click models are torch modules")


import shoal  # noqa: E402
from click_config import ADAGRAD, ADAM, click_config  # noqa: E402
from cluster_fakes import TIMEOUT, declare_dead  # noqa: E402
from cluster_standin import Cluster, cluster  # noqa: E402
from killed_workers import Calls, KilledError, run, worker_of  # noqa: E402
from shoal.models import Checkpointing  # noqa: E402
from shoal.torch.click_model import ClickModel  # noqa: E402
from shoal.torch.config import build, parse  # noqa: E402
from shoal.torch.models import DeepFM  # noqa: E402
from tiers import long_after  # noqa: E402

EXAMPLES, BATCH = 480, 20

DRAWING = threading.Lock()  # torch's random numbers are the process's, and workers are threads here


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    draw = np.random.default_rng(8)
    rows = ["click,user,ad,price"]
    for _ in range(EXAMPLES):
        user, ad, price = draw.integers(0, 12), draw.integers(0, 9), 10 * draw.random()
        margin = 0.9 * (user % 3) + 0.5 * (ad % 4) - 3 + 0.1 * price
        rows.append(f"{int(draw.random() < 1 / (1 + np.exp(-margin)))},{user},{ad},{price:.3f}")
    (folder / "train.csv").write_text("\n".join(rows) + "\n")
    return folder


def configuration(clicks: Path, dropout: float = 0, **train: Any) -> str:
    usual = {"batch_size": BATCH, "seed": 3, "epochs": 2, "dense": "servers", **ADAM}
    log = clicks / "train.csv"
    return click_config(log, log, price=True, model={"dropout": dropout}, tables=ADAGRAD, train={**usual, **train})


def learn(store: shoal.Store, model: ClickModel, clicks: Path, folder: Path | None = None) -> tuple[Any, ...]:
    reader = shoal.read_csv(
        clicks / "train.csv", batch_size=BATCH, label="click", categorical=["user", "ad"], numeric=["price"]
    ).split(store.rank, store.num_workers)
    checkpoint = None if folder is None else Checkpointing(folder, every=3)
    model.fit(reader, valid=reader, epochs=3, shuffle=False if folder else 4, progress=False, checkpoint=checkpoint)
    store.barrier()
    passes = model.history.passes
    return (
        {name: table.digest() for name, table in store.tables.items() if not name.endswith("-progress")},
        model.examples,
        [(done.metrics.examples, done.repeated) for done in passes],
        [done.valid.logloss for done in passes if done.valid is not None],
        [parameter.detach().numpy().tobytes() for parameter in model.module.parameters()],
        [buffer.numpy().tobytes() for buffer in model.module.buffers()],
    )


def configured(store: shoal.Store, clicks: Path, **settings: Any) -> ClickModel:
    with DRAWING:
        return build(parse(tomllib.loads(configuration(clicks, **settings))), store)


class Normed(torch.nn.Module):
    """A model with a buffer that each worker changes by itself, like those of a BatchNorm, for batches of any size."""

    def __init__(self, store: shoal.Store) -> None:
        super().__init__()
        self.inner = DeepFM(shoal.torch.tables(store, shoal.Adagrad(lr=0.1)), 2, dim=4, hidden=(8,))
        self.register_buffer("mean", torch.zeros(40))

    def forward(self, batch: Any) -> torch.Tensor:
        logits = self.inner(batch)
        if self.training:
            self.mean.lerp_(logits.detach().mean(), 0.1)
        return logits - self.mean.mean()


def normed(store: shoal.Store, clicks: Path) -> ClickModel:
    with DRAWING:
        torch.manual_seed(1)
        module = Normed(store)
    features = shoal.torch.Features(["user", "ad"])
    return ClickModel(module, features=features, store=store, dense="servers", optimizer=shoal.Adam(lr=0.01))


@pytest.mark.slow
@pytest.mark.parametrize("make", [configured, normed])
@pytest.mark.parametrize("checkpoints", long_after(1, [False, True]))
def test_under_bsp_a_replaced_worker_changes_no_bit_of_rows_and_dense_part(
    checkpoints: bool, make: Callable[[shoal.Store, Path], ClickModel], clicks: Path, tmp_path: Path
) -> None:
    """Whichever call of whichever worker is its last, also one that makes the dense part; and of its buffers."""
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    folders = [(tmp_path / name) if checkpoints else None for name in ("whole", "killed")]
    for folder in folders:
        if folder is not None:
            folder.mkdir()
    whole = run(2, {}, lambda store: learn(store, make(store, clicks), clicks, folders[0]))
    assert [found[2] for found, _ in whole] == [[(EXAMPLES, 0)] * 3] * 2
    assert make is configured or whole[0][0][5] != whole[1][0][5]
    calls = [count for _, count in whole]
    deaths = {rank: draw.randrange(1, calls[rank]) for rank in draw.choice([[0], [1], [0, 1]])}
    killed = run(2, deaths, lambda store: learn(store, make(store, clicks), clicks, folders[1]))
    assert [found for found, _ in killed] == [found for found, _ in whole], deaths


@pytest.mark.slow
def test_a_replacement_draws_the_random_numbers_of_the_batches_that_are_left(clicks: Path) -> None:
    """With dropout."""

    def program(store: shoal.Store) -> tuple[Any, ...]:
        return learn(store, configured(store, clicks, dropout=0.4), clicks)

    whole = run(1, {}, program)
    killed = run(1, {0: whole[0][1] // 3}, program)
    assert killed[0][0] == whole[0][0]


def test_a_fit_whose_dense_part_the_dead_worker_had_cannot_be_continued_by_another(clicks: Path) -> None:
    def program(store: shoal.Store) -> bool:
        if not store.member.is_replacement:
            learn(store, configured(store, clicks, dense="allreduce"), clicks)
            return False
        with pytest.raises(shoal.ShoalError, match=r'cannot be continued .* one with dense="servers" can'):
            learn(store, configured(store, clicks, dense="allreduce"), clicks)
        return True

    assert run(1, {0: 40}, program)[0][0]


@pytest.mark.slow
def test_the_others_set_a_dense_part_that_worker_0_did_not_live_to_set(clicks: Path) -> None:
    """Nor does anybody replace it."""

    def program(store: shoal.Store) -> int:
        model = configured(store, clicks)
        learn(store, model, clicks)
        return model.examples

    def die(made: Cluster) -> None:
        store = shoal.connect(made.address, workers=2, rank=0, threads=1, timeout=TIMEOUT)
        Calls(store, 12)
        with pytest.raises(KilledError), store:
            program(store)
        store._scheduler.close()
        declare_dead(made.scheduler, "worker", 0)

    def stay(made: Cluster) -> int:
        with shoal.connect(made.address, workers=2, rank=1, threads=1, timeout=TIMEOUT) as store:
            return program(store)

    with cluster(2, 1) as made, ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(die, made), pool.submit(stay, made)]
        assert [end.result(TIMEOUT) for end in ends] == [None, 3 * EXAMPLES]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("true_starts")
@pytest.mark.skipif(sys.platform != "linux", reason="finds a process as Linux shows it")
def test_killed_worker_processes_are_started_again_with_their_random_numbers(clicks: Path, tmp_path: Path) -> None:
    """SIGKILL at random moments of a fit with dropout: each batch draws the numbers that it would have drawn."""
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    config = tmp_path / "ctr.toml"
    config.write_text(configuration(clicks, dropout=0.4, batch_size=4, epochs=8))
    results = []
    for kills in (0, 2):
        out = tmp_path / f"{kills}"
        shoal_command = [sys.executable, "-m", "shoal"]
        command = [*shoal_command, "launch", "--servers", "2", "--workers", "2", "--worker-restarts", "2"]
        command += [*shoal_command, "train", "ctr", "--cluster", "--config", str(config), "--output", str(out)]
        command += ["--quiet"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        killed = 0
        while killed < kills and process.poll() is None:
            # The output directory exists: worker 0 trains.
            time.sleep(draw.uniform(0.1, 0.6))
            victim = worker_of(out, draw.choice([0, 1])) if out.exists() else None
            if victim is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    killed += 1
        output, _ = process.communicate(timeout=4 * TIMEOUT)
        assert process.returncode == 0, output
        with shoal.load(out) as model:
            parameters = [parameter.detach().numpy().tobytes() for parameter in model.module.parameters()]
            results.append(([table.digest() for table in model.tables], model.examples, parameters))
    assert results[0] == results[1]
    assert results[0][1] == 8 * EXAMPLES
