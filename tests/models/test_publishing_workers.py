"""Exports of a fit of several workers while it trains: each is of one clock of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from cluster_standin import cluster
from shoal.models import Checkpointing, PublishDelta, files
from shoal.serve.versions import ServedVersions
from stores import one_by_one

EXAMPLES, KEYS, BATCH = 1200, 300, 40


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(3)
    lines = [
        f"{random.integers(0, 2)} " + " ".join(f"{key}:1" for key in np.unique(random.integers(0, KEYS, 5)))
        for _ in range(EXAMPLES)
    ]
    path = tmp_path_factory.mktemp("log") / "log.libsvm"
    path.write_text("\n".join(lines) + "\n")
    return path


def fit(log: Path, folder: Path, consistency: Any, workers: int = 2) -> None:
    def work(store: shoal.Store) -> None:
        model = shoal.LogisticRegression(shoal.FTRL(alpha=0.3), store=store)
        model.fit(
            shoal.read_libsvm(log, batch_size=BATCH).split(store.rank, workers),
            progress=False,
            checkpoint=Checkpointing(folder / "model", every=1, keep=True),
            callbacks=PublishDelta(folder / "exports", every=1e-9, full_every=4),
        )

    with cluster(2, 1) as made:
        one_by_one(made.address, workers, work, consistency=consistency)


@pytest.mark.slow
def test_each_export_is_of_one_clock_of_all_workers(log: Path, tmp_path: Path) -> None:
    fit(log, tmp_path, shoal.BSP())
    kept, keys = files.kept(tmp_path / "model"), np.arange(KEYS, dtype=np.uint64)
    seen = []
    for place in sorted((tmp_path / "exports").iterdir()):
        with ServedVersions(place) as served:
            exported = served.now.exported
            assert exported.model is not None
            seen.append(exported.model["examples"])
            rows = exported.table("lr").pull(keys)
        with shoal.load(kept[seen[-1]]) as model:
            assert np.array_equal(rows, model.table.pull(keys))
    assert len(seen) > 4
    assert seen == sorted(set(seen))
    assert seen[-1] == EXAMPLES


def test_rows_of_no_one_moment_are_not_exported(log: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="under ssp:1 the rows of several workers are not of one moment"):
        fit(log, tmp_path, shoal.SSP(1))
    assert not (tmp_path / "exports").exists()
