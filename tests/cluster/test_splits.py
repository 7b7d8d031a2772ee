"""Data that the scheduler shares out, over real servers: every example once; after a death, none left out."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import shoal
from cluster_fakes import declare_dead
from processes import server_processes

LONG = 120.0
EXAMPLES = 600


@pytest.fixture(scope="module")
def cluster():
    with server_processes(2, workers=2) as made:
        yield made


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("splits")
    lines = [f"{k % 2} {k}:1\n" for k in range(EXAMPLES)]
    (folder / "a.txt").write_text("".join(lines[:400]))
    (folder / "b.txt").write_text("".join(lines[400:]))
    return [folder / "a.txt", folder / "b.txt"]


def train(cluster, data, name, consistency, *, rank=None, passes=1, clocks=None):
    """Push a gradient of 1 for each example; returns how many splits there were."""
    reader = shoal.read_libsvm(data, batch_size=7)
    splits = 0
    with shoal.connect(cluster.address, consistency=consistency, workers=2, rank=rank, timeout=LONG) as store:
        table = store.table(name, optimizer=shoal.SGD(lr=1.0))
        for _ in range(passes):
            for split in store.splits(reader, split_bytes=400):
                splits += 1
                for batch in split:
                    table.pull(batch.keys)
                    table.push(batch.keys, np.ones((len(batch.keys), 1), np.float32))
                    store.tick()
        if isinstance(consistency, shoal.BSP):  # all came out at one clock, and see the same
            store.barrier()
            assert (table.pull(np.arange(EXAMPLES, dtype=np.uint64)) < -0.5).all()
            clocks.append(store.clock)
    return splits


def weights(cluster, name):
    """Read the rows of all examples, in a job of its own."""
    with shoal.connect(cluster.address, workers=1, timeout=LONG) as store:
        return store.table(name, optimizer=shoal.SGD(lr=1.0)).pull(np.arange(EXAMPLES, dtype=np.uint64)).ravel()


@pytest.mark.slow
@pytest.mark.parametrize("consistency", [shoal.BSP(), shoal.SSP(2), shoal.ASP()], ids=str)
def test_while_nobody_dies_every_example_is_trained_on_exactly_once_a_pass(cluster, data, consistency):
    name = f"all {consistency}"
    clocks = []
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(train, cluster, data, name, consistency, passes=2, clocks=clocks) for _ in range(2)]
        counts = [one.result() for one in both]
    assert sum(counts) == 2 * sum(-(-path.stat().st_size // 400) for path in data)
    assert min(counts) > 0
    assert len(set(clocks)) <= 1
    assert weights(cluster, name).tolist() == [-2.0] * EXAMPLES


VICTIM = """
    import sys, time, numpy as np, shoal
    reader = shoal.read_libsvm(sys.argv[2:], batch_size=7)
    store = shoal.connect(sys.argv[1], consistency=shoal.BSP(), workers=2, rank=1)
    table = store.table("dies", optimizer=shoal.SGD(lr=1.0))
    for split in store.splits(reader, split_bytes=400):
        for batch in split:
            table.pull(batch.keys)
            table.push(batch.keys, np.ones((len(batch.keys), 1), np.float32))
            store.tick()
            table.pull(batch.keys)
            print(*batch.keys, flush=True)
            time.sleep(1000)
"""


@pytest.mark.slow
def test_the_split_of_a_worker_that_dies_goes_to_another_so_that_no_example_is_left_out(cluster, data):
    with (
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(VICTIM), cluster.address, *map(str, data)],
            stdout=subprocess.PIPE,
            text=True,
        ) as victim,
        ThreadPoolExecutor(1) as pool,
    ):
        survivor = pool.submit(train, cluster, data, "dies", shoal.BSP(), rank=0, clocks=[])
        try:
            once_more = [int(word) for word in victim.stdout.readline().split()]
        finally:
            victim.kill()
        declare_dead(cluster.scheduler, "worker", 1)
        survivor.result()
    expected = np.full(EXAMPLES, -1.0)
    expected[once_more] -= 1.0  # it had trained on them, and ticked; its split began anew
    assert once_more
    assert weights(cluster, "dies").tolist() == expected.tolist()


def test_a_split_that_was_given_up_is_finished_by_another(cluster, data):
    reader = shoal.read_libsvm(data)
    with shoal.connect(cluster.address, workers=1, consistency=shoal.ASP(), timeout=LONG) as store:
        first = next(iter(store.splits(reader, split_bytes=400)))  # and no more of this pass
        assert first.paths == (str(data[0]),)
        rest = list(store.splits(reader, split_bytes=400))
        assert len(rest) == sum(-(-path.stat().st_size // 400) for path in data)


def test_workers_that_cut_other_data_are_told_so(cluster, data):
    def take(which, split_bytes):
        with shoal.connect(cluster.address, workers=2, timeout=LONG) as store:
            taken = next(store.splits(shoal.read_libsvm(which), split_bytes=split_bytes), None)
            store.barrier()
            return taken

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(take, data, 400), pool.submit(take, data, 500)]
        errors = [waiting.exception() for waiting in both]
    assert sum("cuts the data of pass 0 into other splits" in str(error) for error in errors) == 1


def test_a_local_store_has_all_splits_to_itself(data):
    reader = shoal.read_libsvm(data)
    with shoal.local() as store:
        splits = list(store.splits(reader, split_bytes=1000))
        keys = [key for split in splits for batch in split for key in batch.keys.tolist()]
    assert keys == list(range(EXAMPLES))
    assert len(splits) == len(reader.splits(1000)) > 4
