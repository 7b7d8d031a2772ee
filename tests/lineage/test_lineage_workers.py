"""Parts of fits of several workers made again, by as many: explained rows, a broken batch, models without examples."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shoal
from click_days import write_days
from cluster_standin import cluster
from shoal.cluster.launch.child import ProcessFailedError
from shoal.cluster.protocol.reports import pid_of
from shoal.data import key_of_name
from shoal.lineage import again, bisect, explain, forget
from shoal.lineage.again import Moment, Watcher
from shoal.lineage.past import Past
from shoal.models import Callback, Checkpointing, EarlyStopping, Model, files
from stores import one_by_one
from tiers import long_after

BATCH, FILES, ROWS = 100, 3, 500
USER = "user=u17"  # occurs late in the second file, and in the third
KEY = key_of_name("csv", USER)


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    def user(random: np.random.Generator, day: int, row: int) -> int:
        is_it = (day == 1 and row > 400 and row % 9 == 5) or (day == 2 and row % 97 == 90)
        return 17 if is_it else 100 + row % 60

    return write_days(tmp_path_factory.mktemp("days"), FILES, ROWS, user)


def reader(days: Sequence[str]) -> shoal.data.Reader:
    return shoal.read_csv(days, label="click", numeric=["price"], batch_size=BATCH)


def logistic(store: shoal.Store, **how: Any) -> Model:
    return shoal.LogisticRegression(shoal.FTRL(alpha=0.3, l1=0.3), store=store, **how)


class Stopped(Exception):
    """In place of kill -9: nothing is saved after it."""


class Stops(Callback):
    """Ends the fit of a worker after some batches of its own."""

    def __init__(self, batches: int | None) -> None:
        self.left = batches

    def batch_done(self, progress: Any) -> None:
        if self.left is not None:
            self.left -= 1
            if not self.left:
                raise Stopped


def fitted(
    place: Path,
    data: shoal.data.Reader,
    workers: int = 2,
    make: Callable[..., Model] = logistic,
    *,
    valid: shoal.data.Reader | None = None,
    every: int | None = 2,
    resume: bool = False,
    connect: dict[str, Any] | None = None,
    stop_after: int | None = None,
    **how: Any,
) -> None:
    """Fit a model together, on two servers, and keep its checkpoints."""

    def work(store: shoal.Store) -> None:
        held_out = None if valid is None else valid.split(store.rank, workers)
        make(store).fit(
            data.split(store.rank, workers),
            valid=held_out,
            progress=False,
            checkpoint=Checkpointing(place, every=every, keep=True, resume=resume),
            callbacks=[Stops(stop_after)],
            **how,
        )

    with cluster(2, 1) as made:
        one_by_one(made.address, workers, work, **({"consistency": shoal.BSP()} | (connect or {})))


def digests(place: Path) -> dict[str, str]:
    with shoal.load(place) as model:
        return {table.name: table.digest() for table in model.tables}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, days: list[str]) -> Path:
    """A model of two workers that has kept its checkpoints, which stays as it is."""
    place = tmp_path_factory.mktemp("kept") / "model"
    fitted(place, reader(days))
    return place


SHUFFLED = {"epochs": 2, "shuffle": 3}
CASES = long_after(
    2,
    [
        (4, lambda store: logistic(store, negative_rate=0.5), SHUFFLED, {"connect": {"job": "night"}}),
        (2, logistic, {}, {}),
        (3, lambda store: logistic(store, normalized=True), {"epochs": 2}, {}),
        (2, lambda store: shoal.FactorizationMachine(4, store=store), SHUFFLED, {}),
        (2, logistic, {}, {"connect": {"consistency": shoal.BSP("mean")}}),
        (1, logistic, {"epochs": 2}, {"connect": {"job": "night"}}),
    ],
)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "make", "how", "more"), CASES)
def test_what_workers_have_forgotten_they_never_learned(
    workers: int, make: Any, how: dict[str, Any], more: dict[str, Any], tmp_path: Path, days: list[str]
) -> None:
    fitted(tmp_path / "model", reader(days), workers, make, **how, **more)
    certificate = forget(tmp_path / "model", [USER], tmp_path / "other")
    fitted(tmp_path / "fresh", reader(days).without([KEY]), workers, make, **how, **more)
    assert digests(tmp_path / "fresh") == digests(tmp_path / "other") == certificate.rows_after
    assert certificate.rows_before == digests(tmp_path / "model") != certificate.rows_after
    if "shuffle" not in how:
        assert 0 < certificate.made_again_from <= certificate.first


@pytest.mark.slow
def test_the_steps_of_workers_lead_to_a_weight(kept: Path, days: list[str]) -> None:
    (life,) = explain(kept, [USER], steps=10**6)
    steps = sorted(life.steps, key=lambda step: step.begin)
    assert steps[0].before == {}
    assert all(one.after == other.before for one, other in itertools.pairwise(steps))
    with shoal.load(kept) as model:
        assert steps[-1].after["lr"][0] == model.table.pull(np.array([life.key], np.uint64))[0, 0]
    assert sum(step.examples for step in steps) == sum(one.examples for one in life.files)
    assert life.first.file == days[1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_the_batches_of_workers_that_break_a_model_are_found(
    workers: int, kept: Path, tmp_path: Path, days: list[str]
) -> None:
    """Four workers share the files: each reads a part of each."""
    if workers != 2:
        kept = tmp_path / "model"
        fitted(kept, reader(days), workers)
    (life,) = explain(kept, [USER], steps=10**6)
    wanted = min(life.steps, key=lambda step: step.begin)

    def is_good(place: str) -> bool:
        with shoal.load(place) as model:
            return not model.table.contains(np.array([KEY], np.uint64))[0]

    found = bisect(kept / "kept-000000000000", kept, is_good)
    assert (found.begin, found.end) == (wanted.begin, wanted.end)
    assert len(found.spans) >= workers - 1
    spans = [span for span in found.spans if span.file == days[1]]
    text = Path(days[1]).read_text().splitlines()
    assert sum(",u17," in line for span in spans for line in text[span.first : span.last + 1]) == wanted.examples
    assert sum(span.last - span.first + 1 for span in found.spans) == found.end - found.begin


@pytest.mark.slow
def test_a_fit_that_was_resumed_by_as_many_workers_is_made_again(tmp_path: Path, days: list[str]) -> None:
    how = {"valid": reader(days[2:]), "epochs": 4, "early_stopping": EarlyStopping(1)}
    with pytest.raises(Stopped):
        fitted(tmp_path / "model", reader(days[:2]), stop_after=7, **how)
    fitted(tmp_path / "model", reader(days[:2]), resume=True, **how)
    fitted(tmp_path / "whole", reader(days[:2]), **how)
    assert digests(tmp_path / "model") == digests(tmp_path / "whole")
    certificate = forget(tmp_path / "model", [USER], tmp_path / "other")
    assert certificate.rows_after == forget(tmp_path / "whole", [USER], tmp_path / "more").rows_after
    assert certificate.rows_after != certificate.rows_before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("connect", "why"),
    [
        ({"consistency": shoal.SSP(2)}, "by 2 workers under ssp:2, where weights depend on when pushes arrive"),
        ({"filters": shoal.Filters(gradients="bfloat16")}, "made again: filters have rounded or dropped"),
    ],
)
def test_what_no_workers_can_make_again_says_why(
    connect: dict[str, Any], why: str, tmp_path: Path, days: list[str]
) -> None:
    fitted(tmp_path / "model", reader(days), connect=connect)
    with pytest.raises(ValueError, match=why):
        explain(tmp_path / "model", [USER])


@pytest.mark.slow
def test_a_fit_of_other_workers_than_began_it_is_not_made_again(tmp_path: Path, days: list[str]) -> None:
    with pytest.raises(Stopped):
        fitted(tmp_path / "model", reader(days), stop_after=5)
    fitted(tmp_path / "model", reader(days), 3, resume=True)
    with pytest.raises(ValueError, match="by 3 workers, and cannot be made again: it was resumed by 3 workers"):
        explain(tmp_path / "model", [USER])


class Killer(Watcher):
    """Kills the other worker after a clock."""

    process = 0

    def reached(self, moment: Moment) -> None:
        if moment == (0, 1):
            self.process = pid_of(self.model.store.cluster()["workers"][1]["about"])
            os.kill(self.process, signal.SIGKILL)


@pytest.mark.slow
def test_a_part_is_not_made_without_a_worker(kept: Path) -> None:
    """The others would continue without it, and make another model."""
    past, killer = Past(kept), Killer()
    killed = pytest.raises(ProcessFailedError, match="worker 1 was killed by signal 9")
    with killed, past.made_again(past.kept[0], watchers=[killer]):
        pass
    assert not Path(f"/proc/{killer.process}").exists()


@pytest.mark.slow
def test_a_worker_that_cannot_begin_is_named(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "_TIMEOUT_SECONDS", 3.0)
    monkeypatch.setattr(again, "sys", SimpleNamespace(executable="/bin/false"))
    past = Past(kept)
    with pytest.raises(ProcessFailedError, match="worker 1 ended with status 1"), past.made_again(past.kept[0]):
        pass


@pytest.mark.slow
def test_a_fit_that_has_lost_a_worker_is_not_made_again(tmp_path: Path, days: list[str]) -> None:
    def work(store: shoal.Store) -> None:
        how, end = Checkpointing(tmp_path / "model", every=2, keep=True), Stops(5 if store.rank else None)
        with contextlib.suppress(Stopped):
            logistic(store).fit(reader(days).split(store.rank, 2), progress=False, checkpoint=how, callbacks=[end])

    with cluster(2, 1) as made:
        one_by_one(made.address, 2, work, consistency=shoal.BSP())
    assert files.read(tmp_path / "model").examples == FILES * ROWS
    with pytest.raises(ValueError, match="by 2 workers, and cannot be made again: a worker was lost, and the others"):
        explain(tmp_path / "model", [USER])
    began = next(iter(files.kept(tmp_path / "model").values()))
    assert not files.read(began).history.fits[-1].irregular
