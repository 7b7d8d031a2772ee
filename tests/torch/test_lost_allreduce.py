"""A worker that ends in a fit with dense="allreduce" ends it for all, soon; resumed, the fit has the undisturbed bits.

The workers are processes, which get SIGKILL or SIGSTOP at a point of the fit (allreduce_worker.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paths import SUPPORT

torch = pytest.importorskip("torch", reason="click models are torch modules")

import fork_server  # noqa: E402
import shoal  # noqa: E402
from allreduce_worker import EPOCHS, POINTS  # noqa: E402
from click_config import ADAGRAD, ADAM, click_config  # noqa: E402
from cluster_fakes import TIMEOUT, declare_dead  # noqa: E402
from cluster_standin import Cluster, cluster  # noqa: E402
from killed_workers import worker_of  # noqa: E402
from tiers import long_but  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo"),
]

EXAMPLES = 310  # unequal splits: the last steps have no batch of some worker


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    draw = np.random.default_rng(8)
    rows = ["click,user,ad,price"]
    for _ in range(EXAMPLES):
        user, ad, price = draw.integers(0, 12), draw.integers(0, 9), 10 * draw.random()
        margin = 0.9 * (user % 3) + 0.5 * (ad % 4) - 3 + 0.1 * price
        rows.append(f"{int(draw.random() < 1 / (1 + np.exp(-margin)))},{user},{ad},{price:.3f}")
    (folder / "train.csv").write_text("\n".join(rows) + "\n")
    (folder / "ctr.toml").write_text(
        click_config(
            folder / "train.csv",
            folder / "train.csv",
            price=True,
            model={"hidden": [64, 32], "dropout": 0.3},
            tables=ADAGRAD,
            train={"batch_size": 20, "seed": 3, "epochs": 8, **ADAM},
            output={"checkpoint_every": 3},
        )
    )
    return folder / "ctr.toml"


class Workers:
    """The processes of all workers of a fit, some of which end at a point."""

    def __init__(self, made: Cluster, config: Path, out: Path, workers: int, points: Mapping[int, str]) -> None:
        self.scheduler = made.scheduler
        worker = str(SUPPORT / "allreduce_worker.py")
        self.running = [
            subprocess.Popen(
                [sys.executable, worker, made.address, f"{rank}", f"{workers}", config, out, points.get(rank, "")],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(workers)
        ]

    def results(self) -> list[Any]:
        ended = [process.communicate(timeout=TIMEOUT) for process in self.running]
        assert not any(process.returncode for process in self.running), [error for _, error in ended]
        return [json.loads(output) for output, _ in ended]

    def has_lost(self, rank: int) -> None:
        """Wait until a worker has ended, and tell the scheduler."""
        self.running[rank].wait(TIMEOUT)
        declare_dead(self.scheduler, "worker", rank)

    def error(self, rank: int) -> str:
        """Return the last line of a worker that ends by an error."""
        _, error = self.running[rank].communicate(timeout=TIMEOUT)
        assert self.running[rank].returncode == 1, error
        return error.strip().splitlines()[-1]


@contextlib.contextmanager
def started(config: Path, out: Path, workers: int, points: Mapping[int, str], **settings: Any) -> Iterator[Workers]:
    with cluster(2, 1, **settings) as made:
        found = Workers(made, config, out, workers, points)
        try:
            yield found
        finally:
            for process in found.running:
                process.kill()
                if process.stdout is not None and not process.stdout.closed:
                    process.communicate()


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two workers learn, neither of which ends early."""
    with started(config, tmp_path_factory.mktemp("whole") / "out", 2, {}) as running:
        found = running.results()
    assert [one["counted"] for one in found] == [[EXAMPLES] * EPOCHS] * 2
    return found


SHORT = ["0 connect", "1 within gradients", "0 after gradients", "1 ticked"]
DEATHS = {f"{rank} {point}": (rank, point) for point in POINTS for rank in (0, 1)}
for _never in ("1 checkpoint", "1 after a checkpoint"):  # worker 0 writes
    del DEATHS[_never]


@pytest.mark.parametrize("death", long_but(SHORT, DEATHS))
def test_a_fit_resumed_after_a_death_has_the_bits_of_the_undisturbed_one(
    death: tuple[int, str], config: Path, tmp_path: Path, undisturbed: list[Any]
) -> None:
    """Rows, dense part with dropout, its optimizer, validation; each example counts once."""
    rank, point = death
    with started(config, tmp_path / "out", 2, {rank: point}) as running:
        running.has_lost(rank)
        assert re.search(r"(WorkerLost|Shoal)Error: .*(--resume|dense=.servers)", running.error(1 - rank))
    with started(config, tmp_path / "out", 2, {}) as running:
        assert running.results() == undisturbed


@pytest.mark.parametrize("late", [0, 1])
def test_a_worker_that_is_late_after_a_restore_resumes_as_the_others(
    late: int, config: Path, tmp_path: Path, undisturbed: list[Any]
) -> None:
    """It may find on the servers what the leader has written since."""
    with started(config, tmp_path / "out", 2, {1: "ticked"}) as running:
        running.has_lost(1)
        running.error(0)
    with started(config, tmp_path / "out", 2, {late: "restored-late"}) as running:
        assert running.results() == undisturbed


@pytest.mark.parametrize("replacement_seconds", [0.0, 10.0])
def test_a_death_in_a_step_ends_the_others_before_the_scheduler_notices_it(
    replacement_seconds: float, config: Path, tmp_path: Path
) -> None:
    """The connections of a process end with it, whether or not the job waits for another worker in its place."""
    with started(config, tmp_path / "out", 3, {1: "gradients"}, replacement_seconds=replacement_seconds) as running:
        for rank in (0, 2):
            assert re.search(r"WorkerLostError: .*--resume.* --restarts .*servers", running.error(rank))


def test_an_error_of_a_worker_ends_the_fit_of_the_others(config: Path, tmp_path: Path) -> None:
    with started(config, tmp_path / "out", 2, {1: "gradients-error"}) as running:
        assert "ValueError: gradients" in running.error(1)
        assert re.search(r"WorkerLostError: .*--resume", running.error(0))


def test_a_worker_that_hangs_in_a_step_is_noticed_by_its_heartbeats(config: Path, tmp_path: Path) -> None:
    """The connections of a stopped process stay: no sum fails by itself."""
    with started(config, tmp_path / "out", 3, {1: "gradients-stop"}) as running:
        deadline = time.monotonic() + TIMEOUT
        while "State:\tT" not in Path(f"/proc/{running.running[1].pid}/status").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        declare_dead(running.scheduler, "worker", 1)
        for rank in (0, 2):
            assert re.search(r"WorkerLostError: worker 1 of 3 .*--resume", running.error(rank))


@pytest.mark.long  # 35 s of processes that import torch; each of its parts is in a shorter test
@pytest.mark.skipif(sys.platform != "linux", reason="finds a process as Linux shows it")
def test_launch_restarts_a_fit_whose_worker_was_killed_from_its_checkpoint(config: Path, tmp_path: Path) -> None:
    results = []
    for is_killed in (False, True):
        out = tmp_path / f"{is_killed}"
        command = [sys.executable, "-m", "shoal"]
        launch = [*command, "launch", "--servers", "2", "--workers", "2", "--restarts", "1"]
        train = [*command, "train", "ctr", "--cluster", "--config", str(config), "--output", str(out), "--quiet"]
        train += ["--resume"]
        with fork_server.true_starts() if is_killed else contextlib.nullcontext():
            process = subprocess.Popen(
                [*launch, *train], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        while is_killed and not (out / "model.json").exists():
            assert process.poll() is None
            time.sleep(0.02)
        if is_killed:
            victim = worker_of(out, 1)
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
        output, _ = process.communicate(timeout=2 * TIMEOUT)
        assert process.returncode == 0, output
        assert ("all processes start again" in output) == is_killed
        with shoal.load(out) as model:
            parameters = [parameter.detach().numpy().tobytes() for parameter in model.module.parameters()]
            results.append(([table.digest() for table in model.tables], model.examples, parameters))
    assert results[0] == results[1]
    assert results[0][1] == 8 * EXAMPLES
