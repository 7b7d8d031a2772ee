"""Fits that go on, or end with an error, where a worker has left the job before they began."""

import numpy as np
import pytest

import shoal
from cluster_standin import cluster
from shoal.errors import WorkerLostError
from stores import one_by_one


def batches(rank):
    rng, indptr = np.random.default_rng(rank), np.arange(0, 33, 4)
    return [
        shoal.Batch(rng.integers(0, 2, 8).astype(np.float32), indptr, rng.integers(0, 50, 32).astype(np.uint64), None)
        for _ in range(3 + rank)
    ]


def fitted(store, **how):
    model = shoal.LogisticRegression(optimizer=shoal.FTRL(), store=store)
    model.fit(batches(store.rank), progress=False, **how)
    return model.examples


@pytest.mark.parametrize("consistency", [shoal.BSP(), shoal.SSP(2), shoal.ASP()], ids=str)
def test_a_fit_does_not_wait_for_a_worker_that_left_before(consistency):
    def work(store):
        return None if store.rank == 1 else fitted(store)

    with cluster(slots=16) as made:
        found = one_by_one(made.address, 3, work, consistency=consistency)
    assert found == [64, None, 64]  # examples of both workers


@pytest.mark.parametrize("consistency", [shoal.BSP(), shoal.SSP(2)], ids=str)
def test_a_second_fit_does_not_wait_for_a_worker_that_left_after_the_first_one(consistency):
    def work(store):
        first = fitted(store)
        return first if store.rank == 1 else (first, fitted(store))

    with cluster(slots=16) as made:
        assert one_by_one(made.address, 2, work, consistency=consistency) == [(56, 24), 56]


def test_a_fit_that_needs_all_workers_names_the_one_that_left_before(tmp_path):
    def work(store):
        if store.rank == 1:
            return None
        with pytest.raises(WorkerLostError, match=r"worker 1 left before this fit began.*resume"):
            fitted(store, directory=tmp_path / "model", checkpoint_every=2)
        return True

    with cluster(slots=16) as made:
        assert one_by_one(made.address, 2, work) == [True, None]
