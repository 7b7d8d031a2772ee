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
from msgspec import structs

import fork_server
import shoal
from cluster_fakes import TIMEOUT, declare_dead
from cluster_standin import Cluster, cluster
from killed_workers import SERVERS, Calls, KilledError, run, worker_of
from shoal.models import Checkpointing, EarlyStopping
from shoal.models.pass_rows import PassRows
from shoal.models.progress import Progress
from shoal.models.progress_rows import ProgressRows
from shoal.models.shares import Share
from shoal.models.team import Team
from tiers import long_but

EXAMPLES, BATCH = 600, 20


class Found(NamedTuple):
    """What a worker returns: the rows, the examples, and of each pass its examples and its validation."""

    digest: str
    examples: int
    measured: list[int]
    losses: list[float]
    unmeasured: list[int]
    repeated: list[int]
    valid: list[float]
    features: list[int]

    @property
    def result(self) -> tuple[Any, ...]:
        """What a replaced worker does not change under BSP."""
        return self.digest, self.examples, self.measured, self.losses, self.valid, self.features


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
            [done.metrics.logloss for done in passes],
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
def test_under_bsp_a_replaced_worker_changes_no_bit(name: str, log: Path, tmp_path: Path) -> None:
    """Whichever call of whichever worker is its last, in a batch or between passes, also of two workers."""
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
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
        assert found.measured == [EXAMPLES] * 2
        assert sum(found.repeated) <= 4 * BATCH


@pytest.mark.slow
def test_the_auc_of_a_pass_lacks_what_was_not_pushed_and_says_so(log: Path) -> None:
    """Counts of the histogram are pushed less often than sums: those of a worker that died before are not there."""
    whole = run(2, {}, lambda store: learn(store, log, **PLANS["batches"]))
    half = whole[1][1] // 4
    (first, _), (second, _) = run(2, {1: half}, lambda store: learn(store, log, **PLANS["batches"]))
    assert first.unmeasured == second.unmeasured
    assert 0 < first.unmeasured[0] <= EXAMPLES // 2
    assert first.measured == [EXAMPLES, EXAMPLES]
    assert first.result == whole[0][0].result


@pytest.mark.slow
def test_without_a_replacement_the_others_go_on_after_a_while(log: Path) -> None:
    """They learn from the batches of the dead worker that were not counted."""
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
    assert examples == EXAMPLES


def learn_grid(store: shoal.Store, log: Path) -> list[tuple[Any, ...]]:
    part = shoal.read_libsvm(log, batch_size=BATCH).split(store.rank, store.num_workers)
    grid = shoal.models.LogisticRegressionGrid({"alpha": [0.1, 0.2, 0.4]}, store=store)
    grid.fit(part, valid=part, epochs=2, progress=False)
    store.barrier()
    return [
        (
            model.table.digest(),
            model.examples,
            [done.metrics.examples for done in model.history.passes],
            [done.valid.logloss for done in model.history.passes if done.valid is not None],
        )
        for model in grid.models
    ]


@pytest.mark.slow
def test_a_replacement_continues_all_models_of_a_grid(log: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    whole = run(2, {}, lambda store: learn_grid(store, log))
    deaths = {rank: draw.randrange(1, whole[rank][1]) for rank in draw.choice([[0], [1], [0, 1]])}
    killed = run(2, deaths, lambda store: learn_grid(store, log))
    assert [found for found, _ in killed] == [found for found, _ in whole], deaths
    assert all(found[0][2] == [EXAMPLES] * 2 for found, _ in whole)


@pytest.mark.long
@pytest.mark.slow
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
        command += ["--batch-size", "4", "--epochs", "6", "--checkpoint-every", "20", "--quiet"]
        command += more
        with fork_server.true_starts() if kills else contextlib.nullcontext():
            process = subprocess.Popen(
                command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
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


# ---- planted bugs ----------------------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def late_rows(patch: pytest.MonkeyPatch) -> None:
    """Rows are pushed one clock after the gradients that they account for."""
    push = ProgressRows.push

    def late(self: ProgressRows) -> None:
        now, self._single = self._single, getattr(self, "before", {})
        self.before = now  # type: ignore[attr-defined]
        push(self)

    patch.setattr(ProgressRows, "push", late)


def early_rows(patch: pytest.MonkeyPatch) -> None:
    """A position says that the batch after the last one was learned from too."""
    learned = PassRows.learned

    def ahead(self: PassRows, data: Any, *more: Any) -> None:
        took = data.learned

        def taken() -> tuple[int, Share]:
            index, share = took()
            return index, structs.replace(share, next=share.next + share.step)

        data.learned = taken
        try:
            learned(self, data, *more)
        finally:
            data.learned = took

    patch.setattr(PassRows, "learned", ahead)


def lost_sums(patch: pytest.MonkeyPatch) -> None:
    """The metrics of a pass are pushed at its end alone."""
    add = PassRows._add_metrics

    def seldom(self: PassRows, trainers: Any, *, with_counts: bool) -> None:
        if with_counts:
            add(self, trainers, with_counts=True)

    patch.setattr(PassRows, "_add_metrics", seldom)


def other_place(patch: pytest.MonkeyPatch) -> None:
    """A replacement begins with the whole of its split."""
    read = PassRows.read

    def whole(self: PassRows, header: Any) -> None:
        read(self, header)
        self.shares = [Share(rank=share.rank, workers=share.workers) for share in self.shares]

    patch.setattr(PassRows, "read", whole)


def other_records(patch: pytest.MonkeyPatch) -> None:
    """A replacement does not read what the models have learned before."""
    take = Progress._take_records

    def nothing(self: Progress) -> Any:
        before = [(model.record.passes, model.record.examples) for model in self._models]
        records = take(self)
        if self._team.store.member.is_replacement:
            for model, (passes, examples) in zip(self._models, before, strict=True):
                model.record.passes, model.record.examples = passes, examples
        return records

    patch.setattr(Progress, "_take_records", nothing)


PLANTED: dict[str, tuple[Plant, float]] = {  # and after which part of a worker's calls it dies
    "late rows": (late_rows, 0.3),
    "early rows": (early_rows, 0.3),
    "lost sums": (lost_sums, 0.3),
    "other place": (other_place, 0.3),
    "other records": (other_records, 0.8),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_changes_what_a_fit_with_a_replaced_worker_gives(
    name: str,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program(store: shoal.Store) -> Found:
        return learn(store, log, warm_up=False, shuffle=False)

    plant, part = PLANTED[name]
    whole = run(2, {}, program)
    deaths = {1: int(part * whole[1][1])}
    (sound, _), _ = run(2, deaths, program)
    assert sound.result == whole[0][0].result
    assert sound.measured == [EXAMPLES] * 2
    plant(monkeypatch)
    try:
        killed = run(2, deaths, program)
    except ValueError:  # the data seems to have changed
        return
    assert [found.result for found, _ in killed] != [found.result for found, _ in whole]


@pytest.mark.slow
def test_a_planted_bug_of_what_is_in_flight_is_found(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without saying which batches were begun, what counts twice under ASP is not reported."""

    def program(store: shoal.Store) -> Found:
        return learn(store, log, warm_up=False, shuffle=False)

    deaths = {1: int(0.3 * run(2, {}, program, shoal.ASP())[1][1])}
    assert any(sum(found.repeated) for found, _ in run(2, deaths, program, shoal.ASP()))
    monkeypatch.setattr(PassRows, "begin_batch", lambda *_: None)
    assert not any(sum(found.repeated) for found, _ in run(2, deaths, program, shoal.ASP()))


def test_a_planted_bug_of_who_is_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All leave a pass at the same clock, since rows say of how many deaths each worker knows."""
    rows = np.zeros((3, 32), np.int64)
    rows[:, 0], rows[:, 1] = 7, [5, 5, 4]  # the job; worker 2 has not ended
    member = type("Member", (), {"job": 7, "gone_in_order": [2]})()
    team = Team.__new__(Team)
    team.store = type("Store", (), {"member": member, "num_workers": 3})()  # type: ignore[assignment]
    team.is_alone, team._loss, team._absent = False, True, frozenset()
    assert not team._all_ended(rows, 5)  # this worker knows of the death, and the others may not
    rows[:2, 3] = 1
    assert team._all_ended(rows, 5)
    member.gone_in_order = [1, 2]
    assert not team._all_ended(rows, 5)
