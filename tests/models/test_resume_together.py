"""Fits of several workers that stop within a pass and go on: the same number to the same bits, others with the rest."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT
from cluster_standin import cluster
from shoal.cluster.protocol.messages import WorkerGone
from shoal.cluster.worker.cluster_store import ClusterStore
from shoal.models import Checkpointing, EarlyStopping, files, fit_checkpoints
from stores import one_by_one, together
from tiers import long_after, long_but

BATCH, EXAMPLES = 20, 800


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libsvm file of 800 examples; the value of key 1000 is the number of the example."""
    random = np.random.default_rng(5)
    weights = random.normal(size=400)
    lines = []
    for number in range(EXAMPLES):
        keys = np.unique(np.where(random.random(6) < 0.7, random.integers(0, 40, 6), random.integers(0, 400, 6)))
        label = int(random.random() < 1 / (1 + np.exp(-weights[keys].sum())))
        lines.append(f"{label} " + " ".join(f"{key}:1" for key in keys) + f" 1000:{number * 1e-3:g}")
    path = tmp_path_factory.mktemp("log") / "log.libsvm"
    path.write_text("\n".join(lines) + "\n")
    return path


def reader(log: Path) -> shoal.data.Reader:
    return shoal.read_libsvm(log, batch_size=BATCH)


# ---- fits that are cut off -------------------------------------------------------------------------------------------


class Cut(Exception):
    pass


def logistic(store: shoal.Store, *, warm_up: bool = False) -> Any:
    return shoal.LogisticRegression(shoal.FTRL(alpha=0.3, l1=0.3), store=store, seed=3, warm_up=warm_up)


def warming_up(store: shoal.Store) -> Any:
    return logistic(store, warm_up=True)


def machine(store: shoal.Store) -> Any:
    return shoal.FactorizationMachine(4, store=store, seed=3, warm_up=False)


def classes(store: shoal.Store) -> Any:
    return shoal.models.MulticlassRegression(3, store=store, seed=3, warm_up=False)


def digests(model: Any) -> list[Any]:
    return [table.digest() for table in model.tables]


def fit_of(
    make: Any,
    log: Path,
    directory: Path,
    *,
    until: int | None = None,
    resume: bool = False,
    batches: Any = None,
    **how: Any,
) -> Any:
    """Return the work of a worker: it fits, or is cut off together with all others after some batches."""

    def work(store: shoal.Store) -> Any:
        model = make(store)
        left = [until]

        class Count(shoal.models.Callback):
            def batch_done(self, progress: Any) -> None:
                if batches is not None:
                    batches[store.rank] = batches.get(store.rank, 0) + 1
                if left[0] is not None:
                    left[0] -= 1
                    if left[0] == 0:
                        raise Cut

        data = reader(log).split(store.rank, store.num_workers)
        try:
            model.fit(
                data,
                valid=reader(log).split(store.rank, store.num_workers),
                progress=False,
                callbacks=[Count()],
                **{"epochs": 2, **how},
                checkpoint=Checkpointing(directory, every=3, resume=resume),
            )
        except (Cut, shoal.ShoalError):
            assert until is not None
            return None
        store.barrier()
        return digests(model), model.examples, [(p.metrics, p.valid, p.features) for p in model.history.passes]

    return work


FITS = {
    "lr": (logistic, {}),
    "lr, shuffled and warmed up": (warming_up, {"shuffle": 3}),
    "lr, patient": (logistic, {"early_stopping": EarlyStopping(1), "epochs": 4}),
    "fm": (machine, {}),
    "classes": (classes, {"early_stopping": EarlyStopping(1), "epochs": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_but(["lr, patient"], FITS.keys()))
def test_a_fit_of_two_workers_that_goes_on_has_the_bits_of_one_that_never_stopped(
    log: Path, tmp_path: Path, kind: str
) -> None:
    make, how = FITS[kind]
    with cluster(2, 1) as servers:
        expected = together(servers.address, 2, fit_of(make, log, tmp_path / "whole", **how))
    assert expected[0] == expected[1]
    for until in (8, 26):  # within the first pass of about 20 batches each, and within the second
        cut = tmp_path / f"cut-{until}"
        with cluster(2, 1) as servers:
            one_by_one(servers.address, 2, fit_of(make, log, cut, until=until, **how))
        fit_state = files.read(cut).fit_state
        assert fit_state is not None
        assert fit_state.is_within
        with cluster(1, 2) as servers:  # another number of servers
            found = together(servers.address, 2, fit_of(make, log, cut, resume=True, **how))
        assert found == expected, until
        assert files.read(cut).fit_state is None


@pytest.mark.slow
@pytest.mark.parametrize("consistency", [shoal.SSP(2), shoal.ASP()], ids=str)
def test_checkpoints_of_workers_at_different_clocks_name_every_example_once(
    log: Path, tmp_path: Path, consistency: shoal.Consistency, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_checkpoints, "_HELD_SECONDS", 0.0)  # one of them may be cut off long before the other one
    with cluster(2, 1) as servers:
        work = fit_of(logistic, log, tmp_path / "m", until=8)
        one_by_one(servers.address, 2, work, consistency=consistency)
    assert 3 * BATCH <= files.read(tmp_path / "m").examples <= 2 * 8 * BATCH
    with cluster(2, 1) as servers:
        found = together(
            servers.address, 2, fit_of(logistic, log, tmp_path / "m", resume=True), consistency=consistency
        )
    assert [(examples, passes[0][0].examples) for _, examples, passes in found] == [(2 * EXAMPLES, EXAMPLES)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "make"),
    long_after(2, [(2, 1, logistic), (2, 3, classes), (3, 2, logistic), (1, 2, logistic), (3, 1, classes)]),
)
def test_a_fit_goes_on_with_another_number_of_workers(
    log: Path, tmp_path: Path, before: int, after: int, make: Any
) -> None:
    with cluster(2, 1) as servers:
        one_by_one(servers.address, before, fit_of(make, log, tmp_path / "m", until=8))
    learned = files.read(tmp_path / "m").examples
    assert learned == before * 6 * BATCH
    batches: dict[int, int] = {}
    with cluster(1, 1) as servers:
        work = fit_of(make, log, tmp_path / "m", resume=True, batches=batches)
        found = together(servers.address, after, work)
    for _, examples, passes in found:
        assert examples == 2 * EXAMPLES
        assert [progressive.examples for progressive, _, _ in passes] == [EXAMPLES, EXAMPLES]
    assert len(batches) == after  # each has learned from some


@pytest.mark.slow
def test_no_checkpoint_is_written_without_a_worker_whose_loss_the_leader_has_not_heard_of(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = ClusterStore._on_event

    def hear_late(store: ClusterStore, event: Any) -> None:
        if isinstance(event, WorkerGone):
            time.sleep(0.5)
        heard(store, event)

    monkeypatch.setattr(ClusterStore, "_on_event", hear_late)

    def work(store: shoal.Store) -> Any:
        until = 7 if store.rank else 18  # the leader goes on alone for a few batches
        return fit_of(logistic, log, tmp_path / "m", until=until)(store)

    with cluster(2, 1) as servers:
        one_by_one(servers.address, 2, work)
    assert files.read(tmp_path / "m").examples == 2 * 6 * BATCH


def test_what_another_worker_cannot_begin_ends_all(log: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine.txt").write_text("keep")

    def work(store: shoal.Store) -> str:
        with pytest.raises((ValueError, shoal.ShoalError)) as caught:
            logistic(store).fit(
                reader(log).split(store.rank, 2), progress=False, checkpoint=Checkpointing(tmp_path / "m")
            )
        return str(caught.value)

    with cluster(1, 1) as servers:
        first, second = together(servers.address, 2, work)
    assert "worker 0" not in first
    assert second == f"worker 0 cannot begin the fit: {first}"


def test_a_loop_over_splits_writes_no_checkpoints(log: Path, tmp_path: Path) -> None:
    def work(store: shoal.Store) -> None:
        model = logistic(store)
        for split in store.splits(reader(log)):
            with pytest.raises(ValueError, match=r"a loop over store.splits fits each split by itself"):
                model.fit(split, progress=False, checkpoint=Checkpointing(tmp_path / "m"))

    with cluster(1, 1) as servers:
        together(servers.address, 2, work)


# ---- processes -------------------------------------------------------------------------------------------------------


def command(log: Path, out: Path, workers: int, *more: str) -> list[str]:
    launch = [sys.executable, "-m", "shoal", "launch", "--servers", "2", "--workers", str(workers)]
    train = ["shoal", "train", "lr", "--cluster", "--data", str(log), "--format", "libsvm", "--batch-size", str(BATCH)]
    train += ["--epochs", "10", "--checkpoint-every", "5", "--output", str(out), "--quiet", "--resume", *more]
    return [*launch, sys.executable, "-m", *train]


def end(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=2 * TIMEOUT)
    assert process.returncode == 0, out + errors
    return out


def start(arguments: list[str], cwd: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        arguments,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def worker_of(out: Path, rank: int) -> int | None:
    """Find the process of a worker, not its supervisor."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            identity = f"SHOAL_RANK={rank}".encode()
            if (
                str(out).encode() in words
                and not any(word.endswith(b"guard.py") for word in words)
                and identity in (process / "environ").read_bytes().split(b"\0")
            ):
                return int(process.name)
    return None


@pytest.mark.long
@pytest.mark.usefixtures("true_starts")  # Linux shows the environment that a process was started with
@pytest.mark.skipif(sys.platform != "linux", reason="finds a process as Linux shows it")
def test_a_worker_that_dies_costs_no_example_under_restarts(log: Path, tmp_path: Path) -> None:
    end(start(command(log, tmp_path / "whole", 2), tmp_path))
    launch = command(log, tmp_path / "killed", 2)
    launch[launch.index("--servers") : launch.index("--servers")] = ["--restarts", "1"]
    process = start(launch, tmp_path)
    wait_for_checkpoint(process, tmp_path / "killed")
    victim = worker_of(tmp_path / "killed", 1)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=2 * TIMEOUT)
    assert process.returncode == 0, errors
    assert "all processes start again, restart 1 of 1 (--restarts)" in errors
    (_, examples, passes), (_, expected, others) = saved(tmp_path / "killed"), saved(tmp_path / "whole")
    assert examples == expected
    assert [one.examples for one in passes] == [one.examples for one in others]


def wait_for_checkpoint(process: subprocess.Popen[str], out: Path) -> None:
    """Wait for a checkpoint within the second pass or later."""
    deadline = time.monotonic() + TIMEOUT
    while not (files.is_model(out) and files.read(out).examples > EXAMPLES):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def saved(out: Path) -> Any:
    with shoal.LogisticRegression.load(out) as model:
        return digests(model), model.examples, [done.metrics for done in model.history.passes]


@pytest.mark.slow
def test_all_processes_are_killed_and_the_command_goes_on_to_the_same_bits(log: Path, tmp_path: Path) -> None:
    end(start(command(log, tmp_path / "whole", 2), tmp_path))
    process = start(command(log, tmp_path / "killed", 2), tmp_path)
    wait_for_checkpoint(process, tmp_path / "killed")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=TIMEOUT)
    left = files.read(tmp_path / "killed")
    assert left.fit_state is not None
    assert left.examples < 10 * EXAMPLES
    end(start(command(log, tmp_path / "killed", 2), tmp_path))
    found = saved(tmp_path / "killed")
    assert found == saved(tmp_path / "whole")
    assert found[1] == 10 * EXAMPLES
    end(start(command(log, tmp_path / "killed", 1), tmp_path))  # what is over is over for any number of workers
    assert saved(tmp_path / "killed") == found


@pytest.mark.slow
def test_a_checkpoint_at_the_end_of_a_pass_has_the_examples_of_all_workers(log: Path, tmp_path: Path) -> None:
    def work(store: shoal.Store) -> None:
        data = reader(log).split(store.rank, store.num_workers)
        logistic(store).fit(data, epochs=2, progress=False, checkpoint=Checkpointing(tmp_path / "model", keep=True))

    with cluster(1, 2) as made:
        one_by_one(made.address, 2, work)
    assert list(files.kept(tmp_path / "model")) == [0, EXAMPLES, 2 * EXAMPLES]
