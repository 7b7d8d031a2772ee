"""Forks of a store: what a child changes is its own, what it returns comes back, and nothing waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.errors import DeadlineExceededError, ShoalError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are of Linux")

KEYS = np.arange(20_000, dtype=np.uint64)  # enough for a batch to be shared between threads
ONES = np.ones((20_000, 2), np.float32)
PATIENCE = 120.0


def made(store: shoal.Store) -> shoal.Table:
    table = store.table("t", dim=2, optimizer=shoal.SGD(lr=1.0))
    table.push(KEYS, ONES).result()
    return table


def own_bytes() -> int:
    """Memory of this process that no other one shares."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


@pytest.mark.slow
def test_forks_begin_with_the_rows_and_change_their_own() -> None:
    with shoal.local(threads=2) as store:
        table = made(store)

        def step(size: float) -> tuple[float, str]:
            table.push(KEYS, size * ONES).result()
            table.push(KEYS + 100_000, ONES).result()
            store.tick()
            return float(table.pull(KEYS)[5, 1]), table.digest()

        futures = [store.fork(lambda size=size: step(size)) for size in (1.0, 2.0, 1.0)]  # type: ignore[misc]
        before = table.digest()
        results = [future.result(PATIENCE) for future in futures]
        assert [weight for weight, _ in results] == [-2.0, -3.0, -2.0]
        assert results[0] == results[2] != results[1]
        assert table.digest() == before
        assert step(1.0) == results[0], "the same bits as without a fork"


def test_models_of_several_settings_from_one_state() -> None:
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 500, (4000, 5)).astype(np.uint64)
    indptr = np.arange(0, keys.size + 1, 5)
    labels = (rng.random(4000) < 0.3).astype(np.float32)
    batch = shoal.Batch(labels, indptr, keys.ravel(), None)
    with shoal.local(threads=2) as store, shoal.LogisticRegression(shoal.FTRL(alpha=0.1), store=store) as model:
        model.fit([batch], progress=False)

        def go_on(passes: int) -> str:
            return model.fit([batch], epochs=passes, progress=False).table.digest()

        forked = [store.fork(lambda passes=passes: go_on(passes)) for passes in (1, 2)]  # type: ignore[misc]
        digests = [future.result(PATIENCE) for future in forked]
        assert digests[0] != digests[1]
        assert go_on(2) == digests[1]


@pytest.mark.slow
def test_a_fork_takes_the_memory_that_it_changes() -> None:
    with shoal.local(threads=1) as store:
        table = store.table("t", dim=16, optimizer=shoal.SGD(lr=1.0))
        keys = np.arange(500_000, dtype=np.uint64)
        table.push(keys, np.ones((len(keys), 16), np.float32)).result()
        size = table.stats().bytes

        def grown(count: int) -> int:
            before = own_bytes()
            if count:
                table.push(keys[:count], np.ones((count, 16), np.float32)).result()
            return own_bytes() - before

        few, all_rows = (store.fork(lambda count=count: grown(count)) for count in (10, len(keys)))  # type: ignore[misc]
        assert few.result(PATIENCE) < size // 4
        assert all_rows.result(PATIENCE) > size // 2


@pytest.mark.slow
def test_what_the_work_raises_is_raised_here() -> None:
    class Local(Exception):
        """Of a class that cannot be pickled, as it has no name in a module."""

    def fail(error: BaseException) -> None:
        raise error

    with shoal.local() as store:
        table = made(store)
        with pytest.raises(ZeroDivisionError) as caught:
            store.fork(lambda: 1 // 0).result(PATIENCE)
        assert "test_branches.py" in caught.value.__notes__[0]
        with pytest.raises(ShoalError, match="Local: of mine"):
            store.fork(lambda: fail(Local("of mine"))).result(PATIENCE)
        with pytest.raises(SystemExit):
            store.fork(lambda: sys.exit(3)).result(PATIENCE)
        with pytest.raises((TypeError, AttributeError), match=r"pickle|local object|lambda"):
            store.fork(lambda: lambda: 1).result(PATIENCE)
        with pytest.raises(TypeError, match="pass a function without arguments"):
            store.fork(3)  # type: ignore[arg-type]
        with pytest.raises(ShoalError, match="ended without a result: by SIGKILL"):
            store.fork(lambda: os.kill(os.getpid(), signal.SIGKILL)).result(PATIENCE)
        with pytest.raises(ShoalError, match="ended without a result: with status 7"):
            store.fork(lambda: os._exit(7)).result(PATIENCE)
        assert np.all(table.pull(KEYS) == -1)


@pytest.mark.slow
def test_a_large_result_and_a_late_one() -> None:
    with shoal.local() as store:
        made(store)
        large = store.fork(lambda: np.arange(5_000_000)).result(PATIENCE)
        assert large[-1] == 4_999_999
        late = store.fork(lambda: time.sleep(1.0) or 5)
        assert not late.done()
        with pytest.raises(DeadlineExceededError):
            late.result(0.05)
        assert late.result(PATIENCE) == 5


@pytest.mark.slow
def test_a_fork_of_a_fork_and_stores_of_its_own(tmp_path: Path) -> None:
    with shoal.local(threads=2) as store:
        table = made(store)

        def inner() -> float:
            table.push(KEYS, ONES).result()
            return float(table.pull(KEYS)[0, 0])

        def outer() -> tuple[float, float]:
            table.push(KEYS, ONES).result()
            store.save(tmp_path / "saved")
            with shoal.local() as other:
                other.load(tmp_path / "saved")
                assert np.all(other.tables["t"].pull(KEYS) == -2)
            return store.fork(inner).result(PATIENCE), float(table.pull(KEYS)[0, 0])

        assert store.fork(outer).result(PATIENCE) == (-3.0, -2.0)
        store.load(tmp_path / "saved")
        assert np.all(table.pull(KEYS) == -2)


@pytest.mark.slow
def test_forks_in_the_midst_of_other_threads_calls_never_hang() -> None:
    with shoal.local(threads=2, slots=4) as store:
        table = made(store)
        counted = store.table("c", optimizer=shoal.SGD(lr=1.0))
        stop = threading.Event()

        def busy(seed: int) -> None:
            rng = np.random.default_rng(seed)
            while not stop.is_set():
                keys = rng.integers(1 << 32, 2**63, 20_000, np.uint64)
                table.push(keys, ONES)
                table.pull(keys)
                counted.push(keys[:1000], ONES[:1000, 0])
                table.erase(keys)
                table.stats()
                store.tick()

        def work() -> bool:
            table.push(KEYS, ONES).result()
            counted.push(KEYS, ONES[:, 0]).result()
            len(table), table.stats(), store.tick()
            return bool(np.all(table.pull(KEYS) == -2))

        threads = [threading.Thread(target=busy, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(8):
                assert store.fork(work).result(PATIENCE)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert np.all(table.pull(KEYS) == -1)


@pytest.mark.slow
def test_within_a_memory_budget() -> None:
    with shoal.local(memory="64 MiB", slots=2) as store:
        table = made(store)
        other = store.table("other")

        def work() -> int:
            other.push(KEYS, ONES[:, 0]).result()
            with pytest.raises(shoal.errors.MemoryBudgetExceededError):
                table.push(np.arange(10_000_000, dtype=np.uint64), np.ones((10_000_000, 2), np.float32)).result()
            return len(table)

        assert store.fork(work).result(PATIENCE) == len(KEYS)
        assert len(other) == 0


def test_a_table_on_a_disk_and_one_that_is_being_saved_are_refused(tmp_path: Path) -> None:
    with shoal.local() as store:
        store.table("tiered", storage=shoal.Tiered(tmp_path / "rows", memory="16 MiB"))
        with pytest.raises(ValueError, match="'tiered' has rows on a disk"):
            store.fork(lambda: 1)
    with shoal.local() as store:
        table = made(store)
        snapshot = table.shard.snapshot()  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="'t' is being saved"):
            store.fork(lambda: 1)
        del snapshot
        assert store.fork(lambda: len(table)).result(PATIENCE) == len(KEYS)
    with pytest.raises(ShoalError, match="closed"):
        store.fork(lambda: 1)


def test_what_is_printed_is_printed_once(tmp_path: Path) -> None:
    code = """
import shoal
print("before")
with shoal.local() as store:
    store.table("t")
    store.fork(lambda: print("in the fork")).result()
print("after")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.split("\n") == ["before", "in the fork", "after", ""]


@pytest.mark.slow
def test_a_fork_ends_with_its_parent(tmp_path: Path) -> None:
    code = """
import os, sys, time, shoal
with shoal.local() as store:
    store.table("t")
    def work():
        print(os.getpid(), flush=True)
        time.sleep(600)
    store.fork(work)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        end = time.monotonic() + PATIENCE
        while Path(f"/proc/{child}/stat").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split(")")[1]:
            assert time.monotonic() < end, "the child goes on without its parent"
            time.sleep(0.02)


@pytest.mark.slow
def test_a_fork_outlives_the_thread_that_began_it() -> None:
    with shoal.local() as store:
        made(store)
        futures: list[shoal.Future[int]] = []
        thread = threading.Thread(target=lambda: futures.append(store.fork(lambda: time.sleep(1.0) or 5)))  # type: ignore[arg-type]
        thread.start()
        thread.join()
        assert futures[0].result(PATIENCE) == 5
