"""The borrowed pool: modules' work runs in torch's OpenMP threads, with the bits that a store's own threads give."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys

import numpy as np
import pytest

import shoal

torch = pytest.importorskip("torch", reason="torch is an extra")

from shoal.torch import borrowed_pool  # noqa: E402

MEMBER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
TEAM = ctypes.CFUNCTYPE(None, MEMBER, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
KEYS = 1 << 17  # enough for several parts


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nothing_borrowed():
    yield
    shoal._core.set_thread_team(0, 0)


def learn():
    """Rows that two steps leave."""
    rng = np.random.default_rng(5)
    with shoal.local(threads=2) as store:
        table = store.table("rows", dim=4, optimizer=shoal.Adagrad(lr=0.1), init=shoal.Normal(0.1, seed=3))
        embedding = shoal.torch.Embedding(table)
        for _ in range(2):
            keys = torch.from_numpy(rng.integers(0, 50_000, KEYS))
            embedding(keys).square().mean().backward()
        return table.pull(np.arange(50_000))


@pytest.mark.usefixtures("threads", "nothing_borrowed")
def test_a_module_s_work_goes_to_the_team_of_the_thread_that_calls_it(monkeypatch):
    called = []

    @TEAM
    def lent(member, data, threads, flags):
        called.append((threads, flags))
        member(data)

    monkeypatch.setattr(borrowed_pool, "_parallel", ctypes.cast(lent, ctypes.c_void_p).value)
    with_team = learn()
    assert len(called) >= 4  # sorting, reading and stepping have runs of their own
    assert set(called) == {(0, 0)}
    monkeypatch.setattr(borrowed_pool, "_parallel", 0)
    called.clear()
    np.testing.assert_array_equal(learn(), with_team)
    assert not called


@pytest.mark.usefixtures("threads", "nothing_borrowed")
def test_the_team_of_gnu_s_openmp_gives_the_same_bits(monkeypatch):
    if not borrowed_pool._parallel:
        pytest.skip("this PyTorch does not compute with GNU's OpenMP")
    with_team = learn()
    monkeypatch.setattr(borrowed_pool, "_parallel", 0)
    np.testing.assert_array_equal(learn(), with_team)


def borrowed(pipe):
    pipe.send(borrowed_pool._parallel)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_forked_child_borrows_nothing():
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=borrowed, args=(theirs,))
    child.start()
    assert ours.poll(60)
    assert ours.recv() == 0
    child.join()
