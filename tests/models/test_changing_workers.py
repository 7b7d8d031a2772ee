"""Workers join a fit and leave it while it runs: each example of a pass counts once."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import numpy as np
import psutil
import pytest

import shoal
from changing_workers import (
    Pace,
    first_pace,
)
from cluster_fakes import TIMEOUT, HeldPort
from cluster_standin import Cluster, cluster
from killed_workers import Boundaries
from shoal.base.interrupts import Terminated, at_boundaries
from shoal.cli.answers import Answer
from shoal.cli.train_options import TrainOptions
from shoal.cli.train_run import restarted_with_workers
from shoal.cluster.launch.local_cluster import LocalCluster
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.status import GetStatus, StatusReply
from shoal.config import ConnectConfig
from shoal.models import Checkpointing, fitting
from shoal.models.model import Model
from tiers import long_after, long_but

EXAMPLES, BATCH, SERVERS = 480, 8, 2


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every example has one key of its own: its row shows how often it was learned from."""
    path = tmp_path_factory.mktemp("log") / "log.libsvm"
    path.write_text("".join(f"{number % 2} {number}:1\n" for number in range(EXAMPLES)))
    return path


class Counting:
    """Counts the occurrences of keys in the batches that a model learns from, over all workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: np.ndarray[Any, Any] = np.zeros(EXAMPLES, np.int64)
        self._lock = threading.Lock()
        learn = shoal.LogisticRegression.learn

        def counted(model: Any, batch: Any, *arguments: Any) -> Any:
            result = learn(model, batch, *arguments)
            with self._lock:
                np.add.at(self.counts, batch.keys.astype(np.int64), 1)
            return result

        monkeypatch.setattr(shoal.LogisticRegression, "learn", counted)


class Found:
    """What a worker returns: the metrics of its fit, and the numbers of workers of its jobs."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.examples = 0
        self.measured: list[int] = []
        self.valid: list[int] = []
        self.digest = ""
        self.left = False


def work(
    made: Cluster, log: Path, react: Callable[[int], None], mode: Any, span: tuple[int, int], how: dict[str, Any]
) -> Found:
    """Run the program of a worker, again whenever the number of workers has changed."""
    found = Found()
    pace = Pace(react)
    while True:
        try:
            with shoal.connect(made.address, workers=span, threads=1, timeout=TIMEOUT, consistency=mode) as store:
                found.sizes.append(store.num_workers)
                part = shoal.read_libsvm(log, batch_size=BATCH).split(store.rank, store.num_workers)
                how = dict(how)
                warm_up = how.pop("warm_up", True)
                with shoal.LogisticRegression(shoal.FTRL(alpha=0.1), store=store, warm_up=warm_up) as model:
                    model.fit(part, progress=False, callbacks=pace, **{"epochs": 2, "valid": part} | how)
                    store.barrier()
                    passes = model.history.passes
                    found.examples, found.digest = model.examples, model.table.digest()
                    found.measured = [done.metrics.examples for done in passes]
                    found.valid = [done.valid.examples for done in passes if done.valid is not None]
                    assert len(model.history.fits) == 1
                    return found
        except shoal.errors.WorkersChangedError as change:
            if change.leaves:
                found.left = True
                return found


PLANS = {
    "batches": {"warm_up": False},
    "shuffled": {"shuffle": 4},
    "checkpoints": {"warm_up": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", [shoal.BSP(), shoal.SSP(2), shoal.ASP()], ids=str)
@pytest.mark.parametrize("name", long_after(1, PLANS))
def test_workers_that_join_take_part_and_each_example_counts_once(
    name: str, mode: Any, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    batch = random.Random(seed).randrange(1, EXAMPLES // BATCH // 2)
    counting = Counting(monkeypatch)
    how = PLANS[name] | ({"checkpoint": Checkpointing(tmp_path / "model", every=3)} if name == "checkpoints" else {})
    joined = threading.Event()
    with cluster(SERVERS, 1) as made, ThreadPoolExecutor(4) as pool:

        def join(_: int) -> Found:
            assert joined.wait(TIMEOUT)
            return work(made, log, lambda batches: None, mode, (2, 4), how)

        pace = first_pace(made, joined, batch, 2)
        ends = [pool.submit(work, made, log, pace, mode, (2, 4), how) for _ in range(2)]
        ends += [pool.submit(join, number) for number in range(2)]
        found = [end.result(2 * TIMEOUT) for end in ends]
    assert {one.examples for one in found} == {2 * EXAMPLES}
    assert all(one.measured == [EXAMPLES] * 2 and one.valid == [EXAMPLES] * 2 for one in found)
    assert len({one.digest for one in found}) == 1
    assert counting.counts.tolist() == [2] * EXAMPLES
    assert {one.sizes[-1] for one in found} == {4}
    assert found[0].sizes[0] == 2


def made_machine(store: shoal.Store) -> Any:
    return shoal.FactorizationMachine(2, store=store, warm_up=False)


def made_classes(store: shoal.Store) -> Any:
    return shoal.models.MulticlassRegression(3, store=store, warm_up=False)


def made_grid(store: shoal.Store) -> Any:
    return shoal.models.LogisticRegressionGrid({"alpha": [0.05, 0.1]}, store=store, warm_up=False)


@pytest.mark.slow
@pytest.mark.parametrize("make", [made_machine, made_classes, made_grid])
def test_fits_of_other_models_are_joined_as_well(
    make: Callable[[shoal.Store], Any], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = threading.Event()
    own = threading.local()
    learn = Model.learn

    def paced(model: Any, *arguments: Any) -> Any:
        result = learn(model, *arguments)
        own.batches += 1
        own.react(own.batches)
        return result

    monkeypatch.setattr(Model, "learn", paced)

    def run(made: Cluster, react: Callable[[int], None]) -> tuple[int, list[str]]:
        own.batches, own.react = 0, react
        while True:
            with (
                contextlib.suppress(shoal.errors.WorkersChangedError),
                shoal.connect(made.address, workers=(1, 2), threads=1, timeout=TIMEOUT) as store,
                make(store) as model,
            ):
                part = shoal.read_libsvm(log, batch_size=BATCH).split(store.rank, store.num_workers)
                model.fit(part, progress=False, epochs=2)
                store.barrier()
                tables = [table for name, table in store.tables.items() if "-" not in name]
                return model.examples, [table.digest() for table in tables]

    with cluster(SERVERS, 1) as made, ThreadPoolExecutor(2) as pool:

        def join() -> tuple[int, list[str]]:
            assert joined.wait(TIMEOUT)
            return run(made, lambda batches: None)

        first, second = pool.submit(run, made, first_pace(made, joined, 5, 1)), pool.submit(join)
        assert first.result(2 * TIMEOUT) == second.result(2 * TIMEOUT)
        assert first.result()[0] == 2 * EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("mode", [shoal.BSP(), shoal.ASP()], ids=str)
def test_a_worker_that_is_told_to_leave_hands_over_its_share(
    mode: Any, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker leaves, and with the least number left another one that is told to is interrupted as usual."""
    counting = Counting(monkeypatch)
    leaving = threading.local()
    monkeypatch.setattr(fitting, "at_boundaries", lambda: Boundaries(leaving))

    def leave(batches: int) -> None:
        if batches == 6:
            leaving.interrupt = Terminated()

    with cluster(SERVERS, 1) as made, ThreadPoolExecutor(3) as pool:
        paces: list[Callable[[int], None]] = [leave, lambda batches: None, lambda batches: None]
        how = {"warm_up": False}

        def begin(react: Callable[[int], None]) -> Found:
            return work(made, log, react, mode, (2, 3), how)

        ends = [pool.submit(begin, react) for react in paces]
        left, *stayed = [end.result(2 * TIMEOUT) for end in ends]
    assert left.left
    assert {one.examples for one in stayed} == {2 * EXAMPLES}
    assert all(one.measured == [EXAMPLES] * 2 for one in stayed)
    assert counting.counts.tolist() == [2] * EXAMPLES
    assert stayed[0].sizes[-1] == 2


@pytest.mark.slow
@pytest.mark.combined
@pytest.mark.parametrize("mode", [shoal.BSP(), shoal.ASP()], ids=str)
@pytest.mark.parametrize("batches", [6, 30, 36], ids=["in a pass", "at its end", "in the next pass"])
def test_what_an_interrupted_worker_had_left_is_continued(
    batches: int, mode: Any, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the least number is interrupted: the other one waits until another one joins."""
    counting = Counting(monkeypatch)
    leaving = threading.local()
    monkeypatch.setattr(fitting, "at_boundaries", lambda: Boundaries(leaving))

    def interrupt(done: int) -> None:
        if done == batches:
            leaving.interrupt = Terminated()

    with cluster(SERVERS, 1) as made, ThreadPoolExecutor(3) as pool:
        how = {"warm_up": False, "valid": None}

        def begin(react: Callable[[int], None]) -> Found:
            leaving.interrupt = None
            return work(made, log, react, mode, (2, 3), how)

        remains = pool.submit(begin, lambda done: None)
        interrupted = pool.submit(begin, interrupt)
        assert isinstance(interrupted.exception(TIMEOUT), Terminated)
        joins = pool.submit(begin, lambda done: None)
        found = [end.result(2 * TIMEOUT) for end in (remains, joins)]
    assert {one.examples for one in found} == {2 * EXAMPLES}
    assert all(one.measured == [EXAMPLES] * 2 for one in found)
    assert counting.counts.tolist() == [2] * EXAMPLES
    assert found[0].sizes == [2, 2]


@pytest.mark.slow
def test_a_worker_that_comes_after_the_end_of_a_fit_does_not_begin_it_again(log: Path) -> None:
    how = {"warm_up": False}
    with cluster(SERVERS, 1) as made:
        assert work(made, log, lambda batches: None, shoal.BSP(), (1, 3), how).examples == 2 * EXAMPLES
        with pytest.raises(ValueError, match=r"has finished its fit here, .* \(1 instead of 1:3\), or use a new"):
            work(made, log, lambda batches: None, shoal.BSP(), (1, 3), how)
        with shoal.connect(made.address, workers=1, threads=1, timeout=TIMEOUT) as store:
            assert store.cluster()["outcome"] == "finished"


def test_a_job_whose_workers_have_ended_early_is_begun_again(log: Path) -> None:
    with cluster(SERVERS, 1) as made:
        for _ in range(2):

            def fail(batches: int) -> None:
                raise ArithmeticError("at a batch")

            with pytest.raises(ArithmeticError):
                work(made, log, fail, shoal.BSP(), (1, 3), {"warm_up": False})
        with SchedulerClient(made.address, "observer") as observer:
            assert observer.call(GetStatus(), StatusReply, TIMEOUT).outcome == "unfinished"


def test_a_launcher_waits_for_workers_that_are_between_two_jobs() -> None:
    """A worker that has handed over its state closes its connection and connects again: no worker may be there."""
    launched_here = LocalCluster()
    with cluster(1, 1) as made, ThreadPoolExecutor(1) as pool:
        launched_here.address = made.address

        def join() -> Any:
            return shoal.connect(made.address, workers=(1, 2), threads=1, timeout=TIMEOUT)

        with join() as store:
            store.hand_over(returns=True)
        assert launched_here.status()["outcome"] == "moving"
        with pool.submit(join).result(TIMEOUT):
            assert launched_here.status()["outcome"] == "unfinished"
        assert launched_here.status()["workers"] == []
        assert launched_here.status()["outcome"] == "finished"


def test_a_fit_that_cannot_hand_over_its_state_is_refused(log: Path) -> None:
    with (
        cluster(1, 1) as made,
        shoal.connect(made.address, workers=(1, 2), threads=1, timeout=TIMEOUT) as store,
        shoal.LogisticRegression(store=store, solver=shoal.models.DBPG()) as model,
        pytest.raises(shoal.ShoalError, match=r"may have 1 to 2 workers, and this kind of fit needs a fixed number"),
    ):
        model.fit(shoal.read_libsvm(log), progress=False)


def test_workers_that_ask_for_other_numbers_or_a_rank_are_refused() -> None:
    with cluster(1, 1) as made, shoal.connect(made.address, workers=(1, 3), threads=1, timeout=TIMEOUT):
        for workers, text in (((1, 2), "1 to 3 workers, and .* asks for 1 to 2 workers"), (2, "asks for 2 workers")):
            with pytest.raises(ValueError, match=text):
                shoal.connect(made.address, workers=workers, threads=1, timeout=TIMEOUT)
        with pytest.raises(ValueError, match="leave out rank=0"):
            shoal.connect(made.address, workers=(1, 3), rank=0, threads=1, timeout=TIMEOUT)
        with pytest.raises(ValueError, match="greatest number of workers must be from 3"):
            shoal.connect(made.address, workers=(3, 2), threads=1, timeout=TIMEOUT)


def test_a_worker_that_waits_for_a_job_that_ends_is_told() -> None:
    with cluster(1, 1) as made, ThreadPoolExecutor(1) as pool:
        with shoal.connect(made.address, workers=(1, 2), threads=1, timeout=TIMEOUT) as store:
            waits = pool.submit(shoal.connect, made.address, workers=(1, 2), threads=1, timeout=TIMEOUT)
            while not store.member.workers_change:
                time.sleep(0.01)
        with pytest.raises(ValueError, match="the job that this worker waited to take part in has ended"):
            waits.result(TIMEOUT)


# Slow until the test lets it run.
PROGRAM = """
import pathlib, sys, time
import shoal
from shoal.cli import main

learn = shoal.LogisticRegression.learn

def slowed(*arguments):
    if not pathlib.Path("go").exists():
        time.sleep(0.1)
    return learn(*arguments)

shoal.LogisticRegression.learn = slowed
sys.exit(main(sys.argv[1:]))
"""


def wait_for_workers(address: str, count: int) -> None:
    deadline = time.monotonic() + 2 * TIMEOUT
    with SchedulerClient(address, "observer") as client:
        while (job := client.call(GetStatus(), StatusReply, TIMEOUT).job) is None or job.size != count:
            assert time.monotonic() < deadline, f"the job has not had {count} workers in time: {job}"
            time.sleep(0.05)


def kill_scheduler(launcher: int, after: float) -> None:
    """Kill the scheduler that a process has launched, after some seconds."""
    time.sleep(after)
    (scheduler,) = (one for one in psutil.Process(launcher).children() if "scheduler" in one.cmdline())
    scheduler.kill()


@contextlib.contextmanager
def launched(folder: Path, log: Path, workers: str, *options: str) -> Iterator[tuple[Popen, dict[str, str], list[str]]]:
    """Launch a slow fit: its process, the variables of workers that join, and their command."""
    (folder / "program.py").write_text(PROGRAM)
    train = ["program.py", "train", "lr", "--cluster", "--data", str(log), "--format", "libsvm", "--quiet"]
    train += ["--output", "model", "--batch-size", "1", "--no-warm-up", "--epochs", "2", "--resume", *options]
    with HeldPort() as held:
        launch = [sys.executable, "-m", "shoal", "launch", "--scheduler", held.address, "--workers", workers, *train]
        with Popen(launch, cwd=folder, stdout=PIPE, stderr=STDOUT, text=True) as process:
            wait_for_workers(held.address, int(workers[0]))
            yield process, {"SHOAL_SCHEDULER": held.address, "SHOAL_WORKERS": workers}, [sys.executable, *train]


def check_examples(model: Path) -> None:
    with shoal.LogisticRegression.load(model) as trained:
        assert trained.examples == 2 * EXAMPLES
        assert [done.metrics.examples for done in trained.history.passes] == [EXAMPLES] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("true_starts")
def test_processes_join_a_launched_fit_and_leave_it_by_sigterm(log: Path, tmp_path: Path) -> None:
    """The scheduler is killed while they come, and while one leaves; the launcher starts it again."""
    with launched(tmp_path, log, "1:3", "--checkpoint-every", "50") as (process, variables, train):
        piped: dict[str, Any] = {"cwd": tmp_path, "stdout": PIPE, "stderr": STDOUT, "text": True}
        others = [Popen(train, env={**os.environ, **variables}, **piped) for _ in range(2)]
        kill_scheduler(process.pid, after=random.uniform(0, 1))
        wait_for_workers(variables["SHOAL_SCHEDULER"], 3)
        others[0].send_signal(signal.SIGTERM)
        kill_scheduler(process.pid, after=random.uniform(0, 0.1))
        wait_for_workers(variables["SHOAL_SCHEDULER"], 2)
        assert others[0].wait(2 * TIMEOUT) == 0
        (tmp_path / "go").touch()
        outputs = [other.communicate(timeout=2 * TIMEOUT)[0] for other in others]
        outputs.append(process.communicate(timeout=2 * TIMEOUT)[0])
    assert [other.returncode for other in others] == [0, 0], outputs
    assert process.returncode == 0, outputs
    check_examples(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.usefixtures("true_starts")
@pytest.mark.skipif(sys.platform != "linux", reason="finds a process as Linux shows it")
@pytest.mark.parametrize(
    "workers", long_but(["enough are left"], {"enough are left": "1:2", "too few are left": "2:2"})
)
def test_a_launched_fit_goes_on_when_one_of_its_workers_is_killed(workers: str, log: Path, tmp_path: Path) -> None:
    """With one of 1:2 left it goes on by itself; with one of 2:2 left when another one comes."""
    piped: dict[str, Any] = {"cwd": tmp_path, "stdout": PIPE, "stderr": STDOUT, "text": True}
    with launched(tmp_path, log, workers) as (process, variables, train):
        others = []
        if workers == "1:2":
            others.append(Popen(train, env={**os.environ, **variables}, **piped))
        wait_for_workers(variables["SHOAL_SCHEDULER"], 2)
        own = [one for one in psutil.Process(process.pid).children(recursive=True) if "program.py" in one.cmdline()]
        os.kill(next(one.pid for one in own if "guard.py" not in " ".join(one.cmdline())), signal.SIGKILL)
        if workers == "2:2":
            others.append(Popen(train, env={**os.environ, **variables}, **piped))
        (tmp_path / "go").touch()
        outputs = [other.communicate(timeout=4 * TIMEOUT)[0] for other in others]
        outputs.append(process.communicate(timeout=2 * TIMEOUT)[0])
    assert [other.returncode for other in others] == [0], outputs
    assert process.returncode == (137 if workers == "1:2" else 0), outputs
    assert "was killed by signal 9; the others go on without it" in outputs[-1]
    check_examples(tmp_path / "model")


def test_a_command_says_what_to_do_when_the_others_do_not_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [
        shoal.errors.WorkersChangedError("a worker has died", leaves=False),
        shoal.DeadlineExceededError("1 of 2 joined"),
    ]

    def run(_: TrainOptions) -> Answer:
        raise calls.pop(0)

    monkeypatch.setenv("SHOAL_WORKERS", "2:3")
    command = restarted_with_workers(run)
    with pytest.raises(shoal.DeadlineExceededError, match=r"^1 of 2 joined: start more of them .*, with --resume"):
        command(TrainOptions(cluster=ConnectConfig(cluster="")))
    assert "a worker has died: this one connects again and continues the fit" in capsys.readouterr().err
    calls.append(shoal.DeadlineExceededError("0 of 2 joined"))
    with pytest.raises(shoal.DeadlineExceededError, match=r"^0 of 2 joined$"):
        command(TrainOptions(cluster=ConnectConfig(cluster="")))


def test_a_signal_that_comes_while_the_workers_change_counts_for_the_fit_that_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def run(_: TrainOptions) -> Answer:
        with at_boundaries() as interrupted:
            seen.append(interrupted())
            if len(seen) == 1:
                signal.raise_signal(signal.SIGINT)
                raise shoal.errors.WorkersChangedError("a worker has died", leaves=False)
            return Answer("", {})

    monkeypatch.setenv("SHOAL_WORKERS", "2:3")
    restarted_with_workers(run)(TrainOptions(cluster=ConnectConfig(cluster="")))
    assert seen[0] is None
    assert type(seen[1]) is KeyboardInterrupt


@pytest.mark.parametrize("leaves", [True, False])
def test_a_change_of_workers_reaches_another_process(leaves: bool) -> None:
    change = shoal.errors.WorkersChangedError("a worker has died", leaves=leaves)
    again = pickle.loads(pickle.dumps(change))
    assert (str(again), again.what, again.leaves) == (str(change), change.what, leaves)
