"""Workers of a job whose number may change that are killed when it ends: run_workers with programs that only wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.base.timed_queue import TimedQueue
from shoal.cluster.launch import workers as launched
from shoal.cluster.launch.local_cluster import LocalCluster
from shoal.cluster.launch.workers import run_workers

# The first process to come is "one", the next one "two", and one that is started again "again". Each does what follows
# its name, until the test's time is over.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
for name in ("one", "two", "again"):
    try:
        (folder / name).open("x").close()
        break
    except FileExistsError:
        pass
def wait_for(other):
    deadline = time.monotonic() + 60
    while not (folder / other).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
def end(status):
    (folder / f"{name} ends").touch()
    sys.exit(status)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(
    tmp_path: Path, workers: Any, acts: dict[str, str], outcome: Callable[[], str] = lambda: ""
) -> tuple[Any, list[str]]:
    """Run the program; return the failed process and the messages."""
    program = tmp_path / "program.py"
    cases = "".join(f"if name == {name!r}:\n    {act}\n" for name, act in acts.items())
    program.write_text(PROGRAM + cases)
    said: list[str] = []
    cluster = LocalCluster()
    cluster.address = "tcp://127.0.0.1:1"
    cluster.status = lambda *, timeout=0.0: {"workers": [], "jobs": [], "outcome": outcome()}
    failed = run_workers(
        cluster,
        [str(program), str(tmp_path)],
        workers,
        lambda line: None,
        lambda line: None,
        restarts=5,
        warn=said.append,
    )
    if isinstance(workers, tuple):
        assert "more workers may join: SHOAL_SCHEDULER=tcp://127.0.0.1:1" in said.pop(0)
    return failed, said


@pytest.mark.slow
def test_a_worker_that_is_killed_after_another_has_finished_is_not_started_again(tmp_path: Path) -> None:
    acts = {"one": "wait_for('two'); end(0)", "two": "wait_for('one ends'); time.sleep(1); die()"}
    failed, said = run(tmp_path, (2, 3), acts)
    assert failed is None
    assert len(said) == 1
    assert "was killed by signal 9; others have finished" in said[0]
    assert not (tmp_path / "again").exists()


def test_a_worker_that_finds_no_job_after_its_restart_has_not_failed_if_another_one_finishes(tmp_path: Path) -> None:
    acts = {"one": "wait_for('again ends'); end(0)", "two": "wait_for('one'); die()", "again": "end(2)"}
    failed, said = run(tmp_path, (2, 3), acts)
    assert failed is None
    assert "starts again, 4 restarts left" in said[0]
    assert said[1].endswith("which was started again, ended with status 2")


@pytest.mark.slow
def test_a_worker_that_fails_after_its_restart_has_failed_if_none_finishes(tmp_path: Path) -> None:
    acts = {"one": "wait_for('again ends'); time.sleep(1); end(3)", "two": "wait_for('one'); die()", "again": "end(2)"}
    failed, _ = run(tmp_path, (2, 3), acts)
    assert failed.process.returncode == 3


@pytest.mark.slow
@pytest.mark.parametrize("again", ["end(0)", "end(2)"])
def test_with_a_fixed_number_each_worker_has_to_finish(tmp_path: Path, again: str) -> None:
    acts = {"one": "wait_for('two'); end(0)", "two": "wait_for('one ends'); time.sleep(1); die()", "again": again}
    failed, _ = run(tmp_path, 2, acts)
    assert (tmp_path / "again").exists()
    assert (failed is None) == (again == "end(0)")


@pytest.mark.slow
def test_a_worker_that_is_killed_after_another_has_left_is_started_again(tmp_path: Path) -> None:
    """One that leaves a fit has the status 0 of one that has finished: the scheduler knows that none has."""
    acts = {"one": "wait_for('two'); end(0)", "two": "wait_for('one ends'); time.sleep(1); die()", "again": "end(0)"}
    failed, said = run(
        tmp_path, (2, 3), acts, lambda: "finished" if (tmp_path / "again ends").exists() else "unfinished"
    )
    assert failed is None
    assert [line.partition(", ")[0][len("worker 1 ") :] for line in said] == ["was killed by signal 9 and starts again"]


@pytest.mark.slow
def test_a_fit_that_no_worker_has_finished_has_failed(tmp_path: Path) -> None:
    acts = {"one": "end(0)", "two": "wait_for('one ends'); time.sleep(1); die()", "again": "end(2)"}
    failed, _ = run(tmp_path, (2, 3), acts, lambda: "unfinished")
    assert failed.process.returncode == 2


def test_a_fit_that_all_workers_have_left_has_failed(tmp_path: Path) -> None:
    with pytest.raises(
        shoal.errors.WorkerLostError, match=r"^all workers have left the fit before its end, .* resume=True"
    ):
        run(tmp_path, (2, 3), {"one": "end(0)", "two": "end(0)"}, lambda: "unfinished")


def test_each_worker_of_a_launch_has_a_metrics_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(launched, "ChildProcess", lambda name, command, environment, *_: started.append(environment))
    for text in ("0.0.0.0:9100", "*", "127.0.0.1:0"):
        monkeypatch.setenv("SHOAL_METRICS_PORT", text)
        for rank in range(2):
            launched.start_worker(rank, ["x"], 2, {}, TimedQueue(), str, str)
    assert [environment["SHOAL_METRICS_PORT"] for environment in started] == [
        *("0.0.0.0:9100", "0.0.0.0:9101"),
        *("*", "*"),
        *("127.0.0.1:0", "127.0.0.1:0"),
    ]
    monkeypatch.delenv("SHOAL_METRICS_PORT")
    launched.start_worker(1, ["x"], 2, {}, TimedQueue(), str, str)
    assert not started[-1]
