"""A worker that dies in a fit with dense="allreduce" is replaced, wherever it dies: to the bits of the undisturbed fit.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paths import SUPPORT

torch = pytest.importorskip("torch", reason="click models are torch modules")

from allreduce_worker import EPOCHS, POINTS  # noqa: E402
from cluster_fakes import TIMEOUT, declare_dead  # noqa: E402
from cluster_standin import Cluster, cluster  # noqa: E402
from tiers import long_but  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo"),
]

EXAMPLES = 310  # unequal splits: the last steps have no batch of some worker
CONFIG = """
[data]
train = ["{folder}/train.csv"]
format = "csv"
label = "click"
categorical = ["user", "ad"]
numeric = ["price"]
dense = ["price"]
[model]
name = "deepfm"
dim = 4
hidden = [64, 32]
dropout = 0.3
[tables]
optimizer = {{ name = "Adagrad", lr = 0.1 }}
[train]
batch_size = 20
seed = 3
optimizer = {{ name = "Adam", lr = 0.01 }}
"""


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
    (folder / "ctr.toml").write_text(CONFIG.format(folder=folder))
    return folder / "ctr.toml"


class Workers:
    """Processes of workers, of which some end at a point and are started again."""

    def __init__(self, made: Cluster, config: Path, out: Path, workers: int) -> None:
        self.scheduler = made.scheduler
        self._arguments = [str(workers), str(config), str(out)]
        self.running: dict[int, subprocess.Popen[str]] = {}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, rank: int, point: str = "") -> subprocess.Popen[str]:
        worker = str(SUPPORT / "allreduce_worker.py")
        command = [
            sys.executable,
            worker,
            self.scheduler.address,
            str(rank),
            *self._arguments,
            *([point] if point else []),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.running[rank] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.started.append(self.running[rank])
        return self.running[rank]

    def replace(self, rank: int, point: str = "") -> None:
        """Wait for a worker's end by SIGKILL, and start another one."""
        process = self.running[rank]
        _, error = process.communicate(timeout=TIMEOUT)
        assert process.returncode == -signal.SIGKILL, error
        declare_dead(self.scheduler, "worker", rank)
        self.start(rank, point)

    def wait_until_stopped(self, rank: int) -> None:
        """Wait until a worker has got SIGSTOP."""
        deadline = time.monotonic() + TIMEOUT
        while "State:\tT" not in Path(f"/proc/{self.running[rank].pid}/status").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def results(self) -> list[Any]:
        found = []
        for _, process in sorted(self.running.items()):
            output, error = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, error
            found.append(json.loads(output))
        return found

    def errors(self, ranks: Sequence[int]) -> list[str]:
        """Return the last lines of workers that end by an error."""
        found = []
        for rank in ranks:
            _, error = self.running[rank].communicate(timeout=TIMEOUT)
            assert self.running[rank].returncode == 1, error
            found.append(error.strip().splitlines()[-1])
        return found


@contextlib.contextmanager
def started(config: Path, out: Path, workers: int, points: Mapping[int, str], **settings: Any) -> Iterator[Workers]:
    with cluster(2, 1, **{"replacement_seconds": TIMEOUT, **settings}) as made:
        found = Workers(made, config, out, workers)
        try:
            for rank in range(workers):
                found.start(rank, points.get(rank, ""))
            yield found
        finally:
            for process in found.started:
                process.kill()
                if process.stdout is not None and not process.stdout.closed:
                    process.communicate()


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """What workers learn that none of them dies, by their number."""
    found = {}
    for workers in (2, 3):
        with started(config, tmp_path_factory.mktemp("whole") / "out", workers, {}) as running:
            found[workers] = running.results()
        assert [one["counted"] for one in found[workers]] == [[EXAMPLES] * (EPOCHS + 1)] * workers
    return found


SHORT = [
    "0 connect",
    "1 within gradients",
    "0 after gradients",
    "1 ticked",
    "0 checkpoint",
    "1 validation",
    "0 last state",
    "1 second fit",
]
REPLACEMENT = ["after gradients", "address", "joined", "sizes", "end"]
DEATHS = {f"{rank} {point}": (rank, point) for point in POINTS for rank in (0, 1)}
for _never in ("1 checkpoint", "1 after a checkpoint"):  # worker 0 writes
    del DEATHS[_never]


@pytest.mark.parametrize("death", long_but(SHORT, DEATHS))
def test_a_replaced_worker_changes_no_bit(
    death: tuple[int, str], config: Path, tmp_path: Path, undisturbed: dict[int, list[Any]]
) -> None:
    """Rows, dense part, its optimizer, random numbers, validation; each example counts once."""
    rank, point = death
    with started(config, tmp_path / "out", 2, {rank: point}) as running:
        running.replace(rank)
        assert running.results() == undisturbed[2]


PAIRS = [
    "0 ticked, 1 tick",
    "0 after gradients, 1 after gradients",
    "1 within gradients, 2 within gradients",
    "0 gradients, 2 gradients",
    "2 joined, 0 first sizes",
    "0 ticked, 1 validation",
]


@pytest.mark.parametrize("deaths", long_but(PAIRS[:1], PAIRS))
def test_two_of_three_workers_die(deaths: str, config: Path, tmp_path: Path, undisturbed: dict[int, list[Any]]) -> None:
    points = {int(one[0]): one[2:] for one in deaths.split(", ")}
    with started(config, tmp_path / "out", 3, points) as running:
        for rank in points:
            running.replace(rank)
        assert running.results() == undisturbed[3]


@pytest.mark.parametrize("point", long_but(REPLACEMENT[:1], REPLACEMENT))
def test_the_replacement_dies_too(point: str, config: Path, tmp_path: Path, undisturbed: dict[int, list[Any]]) -> None:
    with started(config, tmp_path / "out", 2, {0: "gradients"}) as running:
        running.replace(0, point)
        running.replace(0)
        assert running.results() == undisturbed[2]


def test_a_slow_worker_is_not_taken_for_a_dead_one(
    config: Path, tmp_path: Path, undisturbed: dict[int, list[Any]]
) -> None:
    """The sums of the others end, and all form another group when it comes."""
    points = {0: "gradients-impatient", 1: "gradients-slow", 2: "gradients-impatient"}
    with started(config, tmp_path / "out", 3, points) as running:
        assert running.results() == undisturbed[3]


def test_a_worker_that_hangs_in_a_step_is_replaced_and_ends_when_it_goes_on(
    config: Path, tmp_path: Path, undisturbed: dict[int, list[Any]]
) -> None:
    """The connections of a stopped process stay: no sum fails by itself."""
    with started(config, tmp_path / "out", 3, {1: "gradients-stop"}) as running:
        stopped = running.running[1]
        running.wait_until_stopped(1)
        declare_dead(running.scheduler, "worker", 1)
        running.start(1)
        stopped.send_signal(signal.SIGCONT)
        assert running.results() == undisturbed[3]
        _, error = stopped.communicate(timeout=TIMEOUT)
        assert "FencedError" in error, error


def test_a_replacement_that_does_not_come_ends_the_fit_of_the_others(config: Path, tmp_path: Path) -> None:
    with started(config, tmp_path / "out", 3, {2: "gradients"}, replacement_seconds=1.0) as running:
        running.running[2].wait(TIMEOUT)
        declare_dead(running.scheduler, "worker", 2)
        for error in running.errors([0, 1]):
            assert re.search(r"WorkerLostError: worker 2 .* was not replaced within 1 s, .*--resume", error)


def test_an_error_of_a_worker_ends_the_fit_of_the_others_without_waiting(config: Path, tmp_path: Path) -> None:
    with started(config, tmp_path / "out", 2, {1: "gradients-error"}) as running:
        first, second = running.errors([0, 1])
    assert "ValueError: gradients" in second
    assert re.search(r"WorkerLostError: worker 1 .* by an error, .*--resume", first)


def test_without_replacement_a_worker_that_hangs_is_noticed_by_its_heartbeats(config: Path, tmp_path: Path) -> None:
    with started(config, tmp_path / "out", 3, {1: "gradients-stop"}, replacement_seconds=0.0) as running:
        running.wait_until_stopped(1)
        declare_dead(running.scheduler, "worker", 1)
        for error in running.errors([0, 2]):
            assert re.search(r"WorkerLostError: worker 1 of 3 .*--resume", error)


def test_the_dense_part_is_lost_with_the_last_worker_that_had_it(config: Path, tmp_path: Path) -> None:
    with started(config, tmp_path / "out", 2, {0: "gradients", 1: "gradients"}) as running:
        running.replace(0)
        running.replace(1)
        first, second = running.errors([0, 1])
    assert re.search(r"WorkerLostError: all 2 workers have died, .*--resume", first)
    assert re.search(r"WorkerLostError: worker 0 of 2 has ended this fit early, .*--resume", second)
