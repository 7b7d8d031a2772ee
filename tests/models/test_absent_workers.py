"""Fits that go on, or end with an error, where a worker has left the job before they began."""

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT, declare_dead
from cluster_standin import cluster
from killed_workers import Calls, KilledError, run
from shoal.cluster.worker import connected_store
from shoal.errors import WorkerLostError
from shoal.models import Checkpointing
from stores import one_by_one
from tiers import long_after


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


def test_a_fit_does_not_wait_for_a_worker_that_was_interrupted_while_it_connected(monkeypatch):
    channel = connected_store.Channel

    def interrupted(role, **how):
        if role.worker.rank == 1:
            raise KeyboardInterrupt
        return channel(role, **how)

    monkeypatch.setattr(connected_store, "Channel", interrupted)

    def connect(rank):
        with contextlib.suppress(KeyboardInterrupt):
            return shoal.connect(made.address, workers=2, rank=rank, threads=1, timeout=TIMEOUT)

    with cluster(replacement_seconds=10 * TIMEOUT) as made, ThreadPoolExecutor(2) as pool:
        store, none = pool.map(connect, range(2))
        assert none is None
        with store:
            assert fitted(store) == 24


def split(store, path):
    return shoal.read_libsvm(path, batch_size=8).split(store.rank, store.num_workers)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.libsvm"
    path.write_text("".join(f"{number % 2} {number}:1\n" for number in range(200)))
    return path


@pytest.mark.slow
@pytest.mark.combined
@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("consistency", [shoal.BSP(), shoal.SSP(2), shoal.ASP()], ids=str)
def test_the_others_learn_from_the_split_of_a_worker_that_left_before(consistency, every, log, tmp_path):
    def work(store):
        if store.rank == 1:
            return None
        model = shoal.LogisticRegression(optimizer=shoal.FTRL(), store=store)
        how = {} if every is None else {"checkpoint": Checkpointing(tmp_path / "model", every=every)}
        model.fit(split(store, log), epochs=2, progress=False, **how)
        store.barrier()
        rows = model.table.pull(np.arange(200, dtype=np.uint64))
        return model.examples, [done.metrics.examples for done in model.history.passes], np.count_nonzero(rows)

    with cluster(slots=16) as made:
        found = one_by_one(made.address, 3, work, consistency=consistency)
    assert found == [(400, [200, 200], 200), None, (400, [200, 200], 200)]


def die_after(made, calls, program):
    """Run a program as worker 1 of 2, up to a call."""
    store = shoal.connect(made.address, workers=2, rank=1, threads=1, timeout=TIMEOUT)
    Calls(store, calls)
    with contextlib.suppress(KilledError), store:
        pytest.fail(f"it was to die, and returned {program(store)}")
    store._scheduler.close()
    declare_dead(made.scheduler, "worker", 1)


def survive(made, calls, program):
    """Run a program as worker 0 of 2, whose other one dies before a call; return its result."""

    def stay():
        with shoal.connect(made.address, workers=2, rank=0, threads=1, timeout=TIMEOUT) as store:
            return program(store)

    with ThreadPoolExecutor(2) as pool:
        dead, living = pool.submit(die_after, made, calls, program), pool.submit(stay)
        dead.result(TIMEOUT)
        return living.result(TIMEOUT)


@pytest.mark.parametrize("begun", [True, False], ids=["died in the fit", "left before"])
def test_files_that_only_a_gone_worker_had_are_not_looked_for_in_those_of_others(begun, tmp_path):
    """Each has a file of its own, which is no split of one."""

    def program(store):
        path = tmp_path / f"{store.rank}.libsvm"
        path.write_text("".join(f"1 {1000 * store.rank + number}:1\n" for number in range(120)))
        with shoal.LogisticRegression(shoal.FTRL(), store=store, warm_up=False) as model:
            model.fit(shoal.read_libsvm(path, batch_size=8), progress=False)
            return model.examples, model.history.passes[0].repeated

    with cluster(slots=16) as made:
        examples, repeated = survive(made, 60 if begun else 1, program)
    assert 120 < examples < 240 if begun else examples == 120
    assert repeated == 0


def test_batches_that_only_a_dead_worker_had_are_missed_and_said_so(caplog):
    with cluster(slots=16) as made:
        examples = survive(made, 30, fitted)
    assert 24 <= examples < 56
    assert "1 worker ended within pass 1: what was left of their batches" in caplog.text


SOLVER = shoal.models.DBPG(l1=0.5, blocks=4, tolerance=0, passes=30)


def solved(store):
    with shoal.LogisticRegression(store=store, solver=SOLVER) as model:
        model.fit(batches(store.rank), progress=False)
        return model.solved.passes


def test_a_solver_does_not_find_the_optimum_of_fewer_workers():
    """A worker dies in the second pass: without its gradients the others would fit their own examples alone."""

    def program(store):
        with pytest.raises(WorkerLostError, match=r"worker 1 was lost.*start the fit again"):
            solved(store)
        return store.clock

    with cluster(slots=16) as made:
        assert survive(made, 60, program) < 30 * SOLVER.blocks


@pytest.mark.slow
def test_workers_that_leave_at_once_after_a_solver_has_ended_disturb_nobody():
    with cluster(slots=16) as made:
        assert one_by_one(made.address, 3, solved) == [30, 30, 30]


def optimum(store, delay):
    solver = shoal.models.DBPG(l1=1.0, blocks=4, tolerance=1e-5, passes=300, delay=delay)
    with shoal.LogisticRegression(store=store, solver=solver) as model:
        model.fit(batches(store.rank), progress=False)
        store.barrier()
        keys = np.arange(50, dtype=np.uint64)
        return model.solved.converged, model.table.pull(keys)[:, 0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("part", "delay"), long_after(1, [(1.0, 2), (0.1, 0), (0.1, 2), (1.0, 0)]))
def test_a_replaced_worker_of_a_solver_finds_the_optimum(part, delay):
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    whole = run(2, {}, lambda store: optimum(store, delay))
    deaths = {rank: draw.randrange(1, int(whole[rank][1] * part)) for rank in draw.choice([[0], [1], [0, 1]])}
    for (converged, weights), _ in run(2, deaths, lambda store: optimum(store, delay)):
        assert converged, deaths
        np.testing.assert_allclose(weights, whole[0][0][1], atol=1e-3, err_msg=str(deaths))
