"""A worker of a fit dies, and the others continue what it had left of the pass, of any number or a fixed one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import shoal
from changing_workers import CountedRegression, Program, Span, run
from click_config import click_config
from cluster_fakes import TIMEOUT
from killed_workers import Boundaries, Calls, KilledError, workers_of
from shoal.base.fit_rows import HEADER
from shoal.base.interrupts import Terminated
from shoal.cluster.worker.cluster_store import ClusterStore
from shoal.models import Checkpointing, EarlyStopping, fitting
from shoal.models.progress import Progress
from shoal.models.progress_rows import ProgressRows, key
from shoal.models.team import Team
from tiers import long_after, long_but

EXAMPLES, BATCH, EPOCHS = 240, 8, 2


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every example has one key of its own: its row shows how often it was learned from."""
    path = tmp_path_factory.mktemp("log") / "log.libsvm"
    path.write_text("".join(f"{number % 2} {number}:1\n" for number in range(EXAMPLES)))
    return path


class Found(NamedTuple):
    """What a worker returns: how often each example's row has changed, and of each pass its examples."""

    counts: list[float]
    examples: int
    measured: list[int]
    unmeasured: list[int]
    repeated: list[int]
    valid: list[int]
    sizes: list[int]


def learn(store: shoal.Store, log: Path, sizes: list[int], **how: Any) -> Found:
    reader = shoal.read_libsvm(log, batch_size=BATCH)
    part = reader.split(store.rank, store.num_workers)
    with CountedRegression(shoal.SGD(lr=1.0), store=store, bias=False, warm_up=False) as model:
        model.fit(part, valid=part, progress=False, **{"epochs": EPOCHS} | how)
        store.barrier()
        passes = model.history.passes
        assert len(model.history.fits) == 1
        assert [done.number for done in passes] == list(range(1, len(passes) + 1))
        return Found(
            model.table.pull(np.arange(EXAMPLES, dtype=np.uint64)).reshape(-1).tolist(),
            model.examples,
            [done.metrics.examples for done in passes],
            [done.unmeasured for done in passes],
            [done.repeated for done in passes],
            [done.valid.examples for done in passes if done.valid is not None],
            sizes,
        )


PLANS = {
    "batches": {},
    "shuffled": {"shuffle": 4},
    "checkpoints": {},
    "early stopping": {"epochs": 4, "early_stopping": EarlyStopping(1)},
}


def programs(name: str, log: Path, folder: Path) -> Program:
    folder.mkdir()
    how = dict(PLANS[name])
    if name in ("checkpoints", "early stopping"):
        every = 3 if name == "checkpoints" else None
        how["checkpoint"] = Checkpointing(folder, every=every, overwrite=True)
    return lambda store, sizes: learn(store, log, sizes, **how)


def drawn() -> random.Random:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    return random.Random(seed)


@pytest.mark.combined
@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(["batches", "shuffled"], PLANS.keys()))
@pytest.mark.parametrize("dying", [1, 2])
def test_under_bsp_each_example_of_a_pass_counts_once(name: str, dying: int, log: Path, tmp_path: Path) -> None:
    """Whichever call of whichever worker is its last, in a batch, between passes, or while the fit begins."""
    draw = drawn()
    whole = run(4, {}, programs(name, log, tmp_path / "whole"), shoal.BSP(), (2, 4))
    deaths = {rank: draw.randrange(1, whole[rank][1]) for rank in draw.sample(range(4), dying)}
    killed = run(4, deaths, programs(name, log, tmp_path / "killed"), shoal.BSP(), (2, 4))
    check([found for found, _ in killed], whole[0][0], 4 - dying, deaths)


def check(killed: list[Found | None], whole: Found, alive: int, deaths: dict[int, int]) -> None:
    found = [one for one in killed if one is not None]
    assert len(found) >= alive, deaths
    for one in found:
        assert one.counts == whole.counts, deaths
        assert one.examples == whole.examples, deaths
        assert one.measured == whole.measured, deaths
        assert not any(one.repeated), deaths
        assert one.valid == whole.valid, deaths


@pytest.mark.slow
def test_the_others_wait_for_a_dead_worker_without_which_there_are_too_few(log: Path, tmp_path: Path) -> None:
    draw = drawn()
    whole = run(2, {}, programs("batches", log, tmp_path / "whole"), shoal.BSP(), (2, 4))
    deaths = {draw.randrange(2): draw.randrange(1, min(calls for _, calls in whole))}
    killed = run(2, deaths, programs("batches", log, tmp_path / "killed"), shoal.BSP(), (2, 4), returns=True)
    check([found for found, _ in killed], whole[0][0], 2, deaths)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 10))
def test_a_worker_that_is_told_to_leave_while_it_waits_for_a_dead_one_does_not_return(
    number: int, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and between passes: the last of three workers completes the fit, and waits for neither of the others."""
    leaving = threading.local()
    told = threading.Event()
    waits: Counter[shoal.Store] = Counter()
    meet = Team.meet
    returned: list[bool] = []
    hand_over = ClusterStore.hand_over

    def meeting(self: Team, **how: Any) -> None:
        waits[self.store] += 1
        if waits[self.store] == number and self.store.num_workers == 3 and self.store.rank == 1:
            assert told.wait(TIMEOUT)  # else the death could end the job of the other one before
            Calls(self.store, last=0)  # the next call and all others are not made
        if waits[self.store] == number and self.store.num_workers == 3 and self.store.rank == 0:
            leaving.interrupt = Terminated()
            told.set()
        meet(self, **how)

    def handing_over(self: ClusterStore, *, returns: bool, begun: bool = True) -> None:
        if self.num_workers == 3:
            returned.append(returns)
        hand_over(self, returns=returns, begun=begun)

    monkeypatch.setattr(fitting, "at_boundaries", lambda: Boundaries(leaving))
    monkeypatch.setattr(Team, "meet", meeting)
    monkeypatch.setattr(ClusterStore, "hand_over", handing_over)
    found = run(3, {}, programs("batches", log, tmp_path / "model"), shoal.BSP(), (1, 3))
    assert sorted(returned) == [False, True]
    (alone,) = (one for one, _ in found if one is not None)
    assert alone.sizes[-2:] == [3, 1]
    assert alone.counts == [EPOCHS] * EXAMPLES
    assert alone.examples == EPOCHS * EXAMPLES


@pytest.mark.combined
@pytest.mark.slow
@pytest.mark.parametrize("dying", [1, 2])
@pytest.mark.parametrize("name", long_but(["batches", "early stopping"], PLANS.keys()))
def test_a_fixed_number_of_workers_learns_from_what_dead_ones_had_left(
    name: str, dying: int, log: Path, tmp_path: Path
) -> None:
    """Of their validation data, of which the others have none, nothing is measured."""
    draw = drawn()
    whole = run(3, {}, programs(name, log, tmp_path / "whole"), shoal.BSP(), 3)
    deaths = {rank: draw.randrange(1, min(calls for _, calls in whole)) for rank in draw.sample(range(3), dying)}
    killed = run(3, deaths, programs(name, log, tmp_path / "killed"), shoal.BSP(), 3)
    check([found and found._replace(valid=whole[0][0].valid) for found, _ in killed], whole[0][0], 3 - dying, deaths)


@pytest.mark.combined
@pytest.mark.slow
@pytest.mark.parametrize("mode", [shoal.ASP(), shoal.SSP(2)], ids=str)
@pytest.mark.parametrize("span", [(2, 4), 3], ids=["any number", "a fixed number"])
def test_without_bsp_examples_that_count_twice_are_bounded_by_what_is_reported(
    span: Span, mode: Any, log: Path, tmp_path: Path
) -> None:
    draw = drawn()
    whole = run(3, {}, programs("batches", log, tmp_path / "whole"), mode, span)
    deaths = {one: draw.randrange(1, min(calls for _, calls in whole)) for one in draw.sample(range(3), 1)}
    found = [one for one, _ in run(3, deaths, programs("batches", log, tmp_path / "killed"), mode, span) if one]
    assert len(found) >= 2
    for one in found:
        assert one.examples == EPOCHS * EXAMPLES, deaths
        assert min(one.counts) >= EPOCHS, deaths
        assert sum(one.counts) - EPOCHS * EXAMPLES <= sum(one.repeated), deaths


@pytest.mark.slow
def test_workers_that_read_late_what_the_leader_has_written_meet_as_often(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a fit follows that of its last pass at once: they may find both in the rows."""
    pull = Progress._pull_header

    def late(self: Progress) -> Any:
        if not self._team.leads:
            time.sleep(0.05)
        return pull(self)

    monkeypatch.setattr(Progress, "_pull_header", late)
    for found, _ in run(3, {}, programs("batches", log, tmp_path / "model"), shoal.BSP(), 3):
        assert found.examples == EPOCHS * EXAMPLES


@pytest.mark.parametrize("written", [False, True], ids=["before its header", "after its header"])
def test_a_leader_that_dies_in_a_second_fit_leaves_it_to_the_next(
    written: bool, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it has written the first division or not: the header of the first fit is not that of the second."""
    assign = ProgressRows.assign

    def dying(self: ProgressRows, keys: Any, rows: Any) -> None:
        is_last = self._store.rank == 0 and list(keys) == [key(HEADER)] and rows[0].tolist()[1:3] == [2, 0]
        if is_last and not written:
            raise KilledError
        assign(self, keys, rows)
        if is_last:
            raise KilledError

    def program(store: shoal.Store, _: list[int]) -> tuple[int, int]:
        part = shoal.read_libsvm(log, batch_size=BATCH).split(store.rank, store.num_workers)
        with shoal.LogisticRegression(shoal.SGD(lr=1.0), store=store, warm_up=False) as model:
            model.fit(part, progress=False)
            model.fit(part, progress=False)
            return model.examples, len(model.history.passes)

    monkeypatch.setattr(ProgressRows, "assign", dying)
    found = [one for one, _ in run(3, {}, program, shoal.BSP(), 3)]
    assert sorted(found, key=str) == [(2 * EXAMPLES, 2), (2 * EXAMPLES, 2), None]


@pytest.mark.slow
@pytest.mark.usefixtures("true_starts")
@pytest.mark.skipif(sys.platform != "linux", reason="finds a process as Linux shows it")
@pytest.mark.parametrize("what", long_after(1, ["lr", "ctr"]))
def test_a_killed_process_is_started_again_and_each_example_counts_once(what: str, log: Path, tmp_path: Path) -> None:
    """SIGKILL at a random moment, of either of the two workers that there must be."""
    if what == "ctr":
        pytest.importorskip("torch", reason="click models are torch modules")
    draw = drawn()
    out, config, clicks = tmp_path / "model", tmp_path / "ctr.toml", tmp_path / "clicks.csv"
    clicks.write_text("click,user,ad\n" + "".join(f"{one % 3 == 0:d},{one},{one % 7}\n" for one in range(EXAMPLES)))
    config.write_text(click_config(clicks, train={"batch_size": 4, "epochs": 12, "dense": "servers"}))
    shoal_command = [sys.executable, "-m", "shoal"]
    command = [*shoal_command, "launch", "--servers", "2", "--workers", "2:3", "--worker-restarts", "1"]
    command += [*shoal_command, "train", what, "--cluster", "--output", str(out), "--resume", "--quiet"]
    if what == "lr":
        command += ["--data", str(log), "--format", "libsvm", "--batch-size", "4", "--epochs", "12"]
    else:
        command += ["--config", str(config)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    killed = 0
    while not killed and process.poll() is None:
        time.sleep(draw.uniform(0.2, 2.0))
        if found := workers_of(out):
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(found), signal.SIGKILL)
                killed = 1
    output, _ = process.communicate(timeout=4 * TIMEOUT)
    assert process.returncode == 0, output
    assert output.count("starts again") == killed, output
    with shoal.load(out) if what == "ctr" else shoal.models.load(out) as model:
        assert model.examples == 12 * EXAMPLES, output
