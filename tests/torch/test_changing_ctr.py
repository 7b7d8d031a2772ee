"""Workers join and leave a fit of a click model. If its dense part is in the workers, all move after the same step."""

from __future__ import annotations

import random
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="click models are torch modules")


import shoal  # noqa: E402
from changing_workers import Pace, first_pace  # noqa: E402
from click_config import ADAGRAD, ADAM, click_config  # noqa: E402
from cluster_fakes import TIMEOUT  # noqa: E402
from cluster_standin import Cluster, cluster  # noqa: E402
from killed_workers import Boundaries  # noqa: E402
from shoal.base.interrupts import Terminated  # noqa: E402
from shoal.models import fitting, training  # noqa: E402
from shoal.torch.click_model import ClickModel  # noqa: E402
from shoal.torch.config import build, parse  # noqa: E402
from tiers import long_after  # noqa: E402

EXAMPLES, BATCH, SERVERS = 480, 8, 2
DRAWING = threading.Lock()  # torch's random numbers are the process's, and workers are threads here


def configured(clicks: Path, dense: str, staleness: int) -> str:
    train = {"batch_size": 8, "seed": 3, "epochs": 2, "dense": dense, "staleness": staleness, **ADAM}
    return click_config(clicks, tables=ADAGRAD, train=train)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every example has a user of its own."""
    path = tmp_path_factory.mktemp("clicks") / "train.csv"
    rows = (f"{number % 3 == 0:d},{number},{number % 7}" for number in range(EXAMPLES))
    path.write_text("click,user,ad\n" + "\n".join(rows) + "\n")
    return path


class Seen:
    """Counts the examples that click models learn from, over all workers, by their first key."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[int, int] = {}
        lock = threading.Lock()
        learn = ClickModel.learn

        def counted(model: Any, batch: Any, *arguments: Any) -> Any:
            result = learn(model, batch, *arguments)
            with lock:
                for key in batch.keys[batch.indptr[:-1]].tolist():
                    self.counts[key] = self.counts.get(key, 0) + 1
            return result

        monkeypatch.setattr(ClickModel, "learn", counted)


class Found:
    """What a worker returns."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.examples = 0
        self.measured: list[int] = []
        self.dense: list[bytes] = []
        self.steps: set[float] = set()
        self.left = False


def work(
    made: Cluster,
    clicks: Path,
    react: Any,
    span: tuple[int, int],
    mode: Any,
    dense: str = "allreduce",
    staleness: int = 0,
) -> Found:
    """Run the program of a worker, again whenever the number of workers has changed."""
    found, pace = Found(), Pace(react)
    while True:
        try:
            with shoal.connect(made.address, workers=span, threads=1, timeout=TIMEOUT, consistency=mode) as store:
                found.sizes.append(store.num_workers)
                with DRAWING:
                    model = build(parse(tomllib.loads(configured(clicks, dense, staleness))), store)
                reader = shoal.read_csv(clicks, batch_size=BATCH, label="click", categorical=["user", "ad"])
                reader = reader.split(store.rank, store.num_workers)
                model.fit(reader, epochs=2, progress=False, callbacks=pace)
                store.barrier()
                model._dense.refresh()
                found.examples = model.examples
                found.measured = [done.metrics.examples for done in model.history.passes]
                found.dense = [parameter.detach().numpy().tobytes() for parameter in model.module.parameters()]
                if dense == "allreduce":
                    states = model._dense.optimizer.state_dict()["state"].values()
                    found.steps = {float(state["step"]) for state in states}
                return found
        except shoal.errors.WorkersChangedError as change:
            if change.leaves:
                found.left = True
                return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dense", "least", "mode", "staleness"),
    long_after(
        3,
        [
            ("allreduce", 1, shoal.BSP(), 2),
            ("allreduce", 2, shoal.ASP(), 0),
            ("servers", 1, shoal.BSP(), 2),
            ("allreduce", 1, shoal.BSP(), 0),
            ("allreduce", 2, shoal.BSP(), 0),
            ("servers", 1, shoal.BSP(), 0),
        ],
    ),
    ids=str,
)
def test_workers_that_join_take_part_and_the_dense_part_goes_on(
    dense: str, least: int, mode: Any, staleness: int, clicks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    batch = random.Random(seed).randrange(1, EXAMPLES // BATCH // 2)
    seen = Seen(monkeypatch)
    joined = threading.Event()
    with cluster(SERVERS, 1) as made, ThreadPoolExecutor(3) as pool:

        def join() -> Found:
            assert joined.wait(TIMEOUT)
            return work(made, clicks, lambda batches: None, (least, 3), mode, dense, staleness)

        pace = first_pace(made, joined, batch, 3 - least)
        ends = [pool.submit(work, made, clicks, pace, (least, 3), mode, dense, staleness) for _ in range(least)]
        ends += [pool.submit(join) for _ in range(3 - least)]
        found = [end.result(2 * TIMEOUT) for end in ends]
    assert {one.examples for one in found} == {2 * EXAMPLES}
    assert all(one.measured == [EXAMPLES] * 2 for one in found)
    assert sorted(seen.counts.values()) == [2] * EXAMPLES
    assert found[0].sizes[0] == least
    assert {one.sizes[-1] for one in found} == {3}
    assert all(one.dense == found[0].dense for one in found)
    if dense == "servers":
        return
    assert len(set.union(*(one.steps for one in found))) == 1
    assert min(found[0].steps) > 2 * EXAMPLES / BATCH / 3, "the optimizer has begun anew"


@pytest.mark.slow
def test_a_worker_that_is_told_to_leave_moves_with_the_others(clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    leaving = threading.local()
    for module in (fitting, training):
        monkeypatch.setattr(module, "at_boundaries", lambda: Boundaries(leaving))

    def leave(batches: int) -> None:
        if batches == 6:
            leaving.interrupt = Terminated()

    with cluster(SERVERS, 1) as made, ThreadPoolExecutor(3) as pool:
        paces: list[Any] = [leave, lambda batches: None, lambda batches: None]
        ends = [pool.submit(work, made, clicks, react, (2, 3), shoal.BSP()) for react in paces]
        left, *stayed = [end.result(2 * TIMEOUT) for end in ends]
    assert left.left
    assert {one.examples for one in stayed} == {2 * EXAMPLES}
    assert all(one.measured == [EXAMPLES] * 2 for one in stayed)
    assert sorted(seen.counts.values()) == [2] * EXAMPLES
    assert stayed[0].dense == stayed[1].dense
    assert stayed[0].sizes[-1] == 2
