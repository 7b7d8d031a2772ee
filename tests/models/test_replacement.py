"""A worker that dies in a fit is replaced: each example counts once, under BSP to the bits of the undisturbed fit."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT, declare_dead
from cluster_standin import Cluster, cluster
from killed_workers import SERVERS, Calls, KilledError, run, worker_of
from shoal.models import Checkpointing, EarlyStopping, takeover
from tiers import long_but

EXAMPLES, BATCH = 600, 20


class Found(NamedTuple):
    """What a worker returns: the rows, the examples, and of each pass its examples and its validation."""

    digest: str
    examples: int
    measured: list[int]
    unmeasured: list[int]
    repeated: list[int]
    valid: list[float]
    features: list[int]

    @property
    def result(self) -> tuple[Any, ...]:
        """What a replaced worker does not change under BSP."""
        learned = [one + other for one, other in zip(self.measured, self.unmeasured, strict=True)]
        return self.digest, self.examples, learned, self.valid, self.features


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(5)
    weights = draw.normal(size=400)
    lines = []
    for _ in range(EXAMPLES):
        keys = np.unique(np.where(draw.random(6) < 0.7, draw.integers(0, 40, 6), draw.integers(0, 400, 6)))
        label = int(draw.random() < 1 / (1 + np.exp(-weights[keys].sum())))
        lines.append(f"{label} " + " ".join(f"{key}:1" for key in keys))
    path = tmp_path_factory.mktemp("log") / "log.libsvm"
    path.write_text("\n".join(lines) + "\n")
    return path


def learn(store: shoal.Store, log: Path, *, classes: int = 2, warm_up: bool = True, **how: Any) -> Found:
    part = shoal.read_libsvm(log, batch_size=BATCH).split(store.rank, store.num_workers)
    optimizer = shoal.FTRL(alpha=0.1)
    model: shoal.models.Model = shoal.LogisticRegression(optimizer, store=store, warm_up=warm_up)
    if classes > 2:
        model = shoal.models.MulticlassRegression(classes, optimizer=optimizer, store=store, warm_up=warm_up)
    with model:
        model.fit(part, valid=part, progress=False, **{"epochs": 2, "shuffle": 4} | how)
        passes = model.history.passes
        assert len(model.history.fits) == 1
        assert [done.number for done in passes] == list(range(1, len(passes) + 1))
        store.barrier()
        return Found(
            model.table.digest(),
            model.examples,
            [done.metrics.examples for done in passes],
            [done.unmeasured for done in passes],
            [done.repeated for done in passes],
            [done.valid.logloss for done in passes if done.valid is not None],
            [done.features for done in passes],
        )


PLANS = {
    "batches": {"warm_up": False, "shuffle": False},
    "shuffled": {},
    "checkpoints": {"warm_up": False, "shuffle": False},
    "early stopping": {"epochs": 5, "early_stopping": EarlyStopping(1)},
    "classes": {"classes": 3, "warm_up": False, "shuffle": False},
}


def programs(name: str, log: Path, folder: Path) -> Callable[[shoal.Store], Found]:
    folder.mkdir()  # a worker that dies here is a thread: a fit that fails removes an empty directory that it has made
    how = dict(PLANS[name])
    if name in ("checkpoints", "early stopping"):
        how["checkpoint"] = Checkpointing(folder, every=3 if name == "checkpoints" else None)
    return lambda store: learn(store, log, **how)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(["batches", "shuffled", "classes"], PLANS.keys()))
def test_under_bsp_a_replaced_worker_changes_no_bit(
    name: str, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call of whichever worker is its last, in a batch or between passes, also of two workers."""
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    monkeypatch.setattr(takeover, "_SECONDS", draw.choice([0.0, 5.0]))
    whole = run(2, {}, programs(name, log, tmp_path / "whole"))
    assert [found.examples for found, _ in whole] == [EXAMPLES * len(whole[0][0].measured)] * 2
    calls = [count for _, count in whole]
    deaths = {rank: draw.randrange(1, calls[rank]) for rank in draw.choice([[0], [1], [0, 1]])}
    killed = run(2, deaths, programs(name, log, tmp_path / "killed"))
    assert [found.result for found, _ in killed] == [found.result for found, _ in whole], deaths
    assert not any(any(found.repeated) for found, _ in killed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [shoal.SSP(2), shoal.ASP()], ids=str)
def test_under_ssp_and_asp_a_replaced_worker_repeats_few_examples_and_counts_them(mode: Any, log: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    whole = run(2, {}, lambda store: learn(store, log, **PLANS["batches"]), mode)
    deaths = {1: draw.randrange(1, whole[1][1])}
    for found, _ in run(2, deaths, lambda store: learn(store, log, **PLANS["batches"]), mode):
        assert found.examples == 2 * EXAMPLES
        assert [one + other for one, other in zip(found.measured, found.unmeasured, strict=True)] == [EXAMPLES] * 2
        assert sum(found.repeated) <= 4 * BATCH


def test_the_metrics_of_a_pass_lack_what_was_not_published_and_say_so(log: Path) -> None:
    """With a state of the beginning of the pass alone, the batches before the death are counted, not measured."""
    whole = run(2, {}, lambda store: learn(store, log, **PLANS["batches"]))
    half = whole[1][1] // 4
    (first, _), (second, _) = run(2, {1: half}, lambda store: learn(store, log, **PLANS["batches"]))
    assert first.unmeasured == second.unmeasured
    assert 0 < first.unmeasured[0] <= EXAMPLES // 2
    assert first.measured == [EXAMPLES - first.unmeasured[0], EXAMPLES]
    assert first.result == whole[0][0].result


def test_without_a_replacement_the_others_go_on_after_a_while(log: Path) -> None:
    """The batches of the dead worker that were not counted are not learned from."""
    gone = threading.Event()

    def program(store: shoal.Store) -> int:
        part = shoal.read_libsvm(log, batch_size=BATCH).split(store.rank, store.num_workers)
        with shoal.LogisticRegression(shoal.FTRL(alpha=0.1), store=store) as model:
            model.fit(part, progress=False)
            return model.examples

    def die(made: Cluster) -> None:
        store = shoal.connect(made.address, workers=2, rank=1, threads=1, timeout=TIMEOUT)
        Calls(store, 40)
        with contextlib.suppress(KilledError), store:
            program(store)
        store._scheduler.close()
        declare_dead(made.scheduler, "worker", 1)
        gone.set()

    def stay(made: Cluster) -> tuple[int, frozenset[int]]:
        with shoal.connect(made.address, workers=2, rank=0, threads=1, timeout=TIMEOUT) as store:
            return program(store), store.member.lost_workers

    with cluster(SERVERS, 1, replacement_seconds=0.5) as made, ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(stay, made), pool.submit(die, made)]
        ends[1].result(TIMEOUT)
        examples, lost = ends[0].result(TIMEOUT)
    assert gone.is_set()
    assert lost == {1}
    assert EXAMPLES // 2 <= examples < EXAMPLES


def learn_grid(store: shoal.Store, log: Path) -> list[tuple[Any, ...]]:
    part = shoal.read_libsvm(log, batch_size=BATCH).split(store.rank, store.num_workers)
    grid = shoal.models.LogisticRegressionGrid({"alpha": [0.1, 0.2, 0.4]}, store=store)
    grid.fit(part, valid=part, epochs=2, progress=False)
    store.barrier()
    return [
        (
            model.table.digest(),
            model.examples,
            [done.metrics.examples + done.unmeasured for done in model.history.passes],
            [done.valid.logloss for done in model.history.passes if done.valid is not None],
        )
        for model in grid.models
    ]


@pytest.mark.slow
def test_a_replacement_continues_all_models_of_a_grid(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    monkeypatch.setattr(takeover, "_SECONDS", draw.choice([0.0, 5.0]))
    whole = run(2, {}, lambda store: learn_grid(store, log))
    deaths = {rank: draw.randrange(1, whole[rank][1]) for rank in draw.choice([[0], [1], [0, 1]])}
    killed = run(2, deaths, lambda store: learn_grid(store, log))
    assert [found for found, _ in killed] == [found for found, _ in whole], deaths
    assert all(found[0][2] == [EXAMPLES] * 2 for found, _ in whole)


@pytest.mark.slow
@pytest.mark.usefixtures("true_starts")
@pytest.mark.skipif(sys.platform != "linux", reason="finds a process as Linux shows it")
@pytest.mark.parametrize("more", [[], ["--classes", "3"]])
def test_killed_worker_processes_are_started_again_and_the_fit_has_the_same_bits(
    log: Path, tmp_path: Path, more: list[str]
) -> None:
    """SIGKILL at random moments, of random workers."""
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    results = []
    for kills in (0, 2):
        out = tmp_path / f"{kills}"
        shoal_command = [sys.executable, "-m", "shoal"]
        command = [*shoal_command, "launch", "--servers", "2", "--workers", "2", "--worker-restarts", "2"]
        command += [*shoal_command, "train", "lr", "--cluster", "--data", str(log), "--format", "libsvm"]
        command += ["--output", str(out)]
        command += ["--batch-size", "4", "--epochs", "6", "--checkpoint-every", "20", "--resume", "--quiet"]
        command += more
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(kills):
            victim = None
            while victim is None and process.poll() is None:
                time.sleep(draw.uniform(0.2, 1.0))
                victim = worker_of(out, draw.randrange(2))
            if victim is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        output, _ = process.communicate(timeout=4 * TIMEOUT)
        assert process.returncode == 0, output
        with shoal.models.load(out) as model:
            results.append((model.table.digest(), model.examples))
    assert results[0] == results[1]
    assert results[0][1] == 6 * EXAMPLES


STOPS_ITSELF = """
import os, signal
import numpy as np
import shoal

with shoal.connect() as store:
    table = store.table("steps", dim=1, optimizer=shoal.SGD(lr=1.0))
    for step in range(store.member.joined_at, 30):
        if store.rank == 1 and step == 10 and not store.member.is_replacement:
            os.kill(os.getpid(), signal.SIGSTOP)
        table.push(np.array([7], np.uint64), np.full((1, 1), -1.0, np.float32)).result()
        store.tick()
    store.barrier()
    print("steps", table.pull(np.array([7], np.uint64)).item())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("true_starts")
def test_a_worker_process_that_is_stopped_is_killed_and_started_again(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STOPS_ITSELF)
    command = [sys.executable, "-m", "shoal", "launch", "--workers", "2", "--worker-restarts", "5"]
    command += ["--heartbeat", "0.5", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=4 * TIMEOUT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"worker 1 was declared dead, but its process \d+ exists: it is killed", done.stderr), done.stderr
    assert done.stdout.count("steps 60.0") == 2, done.stdout
