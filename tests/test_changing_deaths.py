"""A worker dies in a fit whose number of workers may change: the others continue what it had left of the pass."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT, declare_dead
from cluster_standin import Cluster, cluster
from killed_workers import SERVERS, Calls, KilledError
from shoal.models import takeover
from tiers import long_but

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


class CountedRegression(shoal.LogisticRegression):
    """The rule adds 1 to the row of a key for each gradient of 1, which each of its examples pushes."""

    def _backward(self, *arguments: Any) -> Any:
        return [np.full(gradient.shape, -1.0, np.float32) for gradient in super()._backward(*arguments)]


def learn(store: shoal.Store, log: Path, sizes: list[int], **how: Any) -> Found:
    reader = shoal.read_libsvm(log, batch_size=BATCH)
    part = reader.split(store.rank, store.num_workers)
    with CountedRegression(shoal.SGD(lr=1.0), store, bias=False) as model:
        model.fit(part, valid=part, progress=False, **{"epochs": EPOCHS, "warm_up": False} | how)
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


Program = Callable[[shoal.Store, list[int]], Any]


def work(
    made: Cluster, last: int | None, program: Program, mode: Any, span: tuple[int, int], returns: bool
) -> tuple[Any, int]:
    """Run a program as a worker, again whenever the number of workers has changed; it dies before a call of its first.

    Returns
    -------
    (result, calls)
        Of one that has died and not come back None, and the calls of its first job.
    """
    sizes: list[int] = []
    counted = None
    while True:
        with contextlib.suppress(shoal.WorkersChangedError):
            store = shoal.connect(made.address, workers=span, threads=1, timeout=TIMEOUT, consistency=mode)
            calls = Calls(store, last if counted is None else None)
            counted = counted or calls
            sizes.append(store.num_workers)
            try:
                with store:
                    return program(store, sizes), counted.count
            except KilledError:
                rank = store.rank
                store._scheduler.close()
                declare_dead(made.scheduler, "worker", rank)
                if not returns:
                    return None, counted.count


def run(
    workers: int, deaths: dict[int, int], program: Program, mode: Any, span: tuple[int, int], *, returns: bool = False
) -> list[tuple[Any, int]]:
    with cluster(SERVERS, 1) as made, ThreadPoolExecutor(workers) as pool:
        ends = [pool.submit(work, made, deaths.get(one), program, mode, span, returns) for one in range(workers)]
        errors = [error for end in ends if (error := end.exception(2 * TIMEOUT)) is not None]
        if errors and all("workers have died, and none has handed over its state" in str(error) for error in errors):
            pytest.skip("all workers of the first job have died before the others came")
        if errors:  # all of them: one of the workers has failed first
            raise BaseExceptionGroup(str(deaths), errors)
        return [end.result() for end in ends]


PLANS = {
    "batches": {},
    "shuffled": {"shuffle": 4},
    "checkpoints": {"checkpoint_every": 3},
    "early stopping": {"epochs": 4, "patience": 1},
}


def programs(name: str, log: Path, folder: Path) -> Program:
    folder.mkdir()
    how = PLANS[name] | ({"directory": folder, "overwrite": True} if name in ("checkpoints", "early stopping") else {})
    return lambda store, sizes: learn(store, log, sizes, **how)


def drawn() -> random.Random:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    return random.Random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(["batches", "shuffled"], PLANS.keys()))
@pytest.mark.parametrize("dying", [1, 2])
def test_under_bsp_each_example_of_a_pass_counts_once(
    name: str, dying: int, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call of whichever worker is its last, in a batch, between passes, or while the fit begins."""
    draw = drawn()
    monkeypatch.setattr(takeover, "_SECONDS", draw.choice([0.0, 5.0]))
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
        measured = [seen + other for seen, other in zip(one.measured, one.unmeasured, strict=True)]
        assert measured == whole.measured, deaths
        assert not any(one.repeated), deaths
        assert one.valid == whole.valid, deaths
