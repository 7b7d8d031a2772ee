"""Fits that go on, or end with an error, where a worker has left the job before they began."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT, declare_dead
from cluster_standin import cluster
from killed_workers import Calls, KilledError, run
from shoal.errors import WorkerLostError
from shoal.models import Checkpointing
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
            fitted(store, checkpoint=Checkpointing(tmp_path / "model", every=2))
        return True

    with cluster(slots=16) as made:
        assert one_by_one(made.address, 2, work) == [True, None]


SOLVER = shoal.models.DBPG(l1=0.5, blocks=4, tolerance=0, passes=30)


def solved(store):
    with shoal.LogisticRegression(store=store, solver=SOLVER) as model:
        model.fit(batches(store.rank), progress=False)
        return model.solved.passes


def test_a_solver_does_not_find_the_optimum_of_fewer_workers():
    """A worker dies in the second pass: without its gradients the others would fit their own examples alone."""

    def die(made):
        store = shoal.connect(made.address, workers=2, rank=1, threads=1, timeout=TIMEOUT)
        Calls(store, 60)
        with contextlib.suppress(KilledError), store:
            pytest.fail(f"it was to die, and made {solved(store)} passes")
        store._scheduler.close()
        declare_dead(made.scheduler, "worker", 1)

    def stay(made):
        with shoal.connect(made.address, workers=2, rank=0, threads=1, timeout=TIMEOUT) as store:
            with pytest.raises(WorkerLostError, match=r"worker 1 was lost.*start the fit again"):
                solved(store)
            return store.clock

    with cluster(slots=16) as made, ThreadPoolExecutor(2) as pool:
        dead, living = pool.submit(die, made), pool.submit(stay, made)
        dead.result(TIMEOUT)
        assert living.result(TIMEOUT) < 30 * SOLVER.blocks


def test_workers_that_leave_at_once_after_a_solver_has_ended_disturb_nobody():
    with cluster(slots=16) as made:
        assert one_by_one(made.address, 3, solved) == [30, 30, 30]


def test_a_worker_that_replaces_one_of_a_solver_says_what_to_do():
    def program(store):
        if store.member.is_replacement:
            with pytest.raises(
                shoal.ShoalError, match=r"worker 1 has replaced.*end all workers, and start the fit again"
            ):
                solved(store)
            return "refused"
        with pytest.raises(WorkerLostError, match=r"worker 1 .* start the fit again"):
            solved(store)
        return "ended"

    found = run(2, {1: 60}, program)
    assert [one for one, _ in found] == ["ended", "refused"]
