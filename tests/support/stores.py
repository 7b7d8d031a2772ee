"""Stores of every kind, for tests of their common contract."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import shoal
from cluster_fakes import TIMEOUT
from cluster_standin import cluster

KINDS = ("local", "connected")


@contextlib.contextmanager
def opened(kind: str, *, slots: int = 64) -> Iterator[shoal.Store]:
    """Open an empty store whose pushes are seen as they are made: of one process, or with four data loops."""
    if kind == "local":
        with shoal.local(threads=2, slots=slots) as store:
            yield store
    else:
        with (
            cluster(2, 2, slots=slots) as made,
            shoal.connect(made.address, consistency=shoal.ASP(), threads=2, timeout=TIMEOUT) as store,
        ):
            yield store


@contextlib.contextmanager
def joined(address: str, workers: int, **how: Any) -> Iterator[list[shoal.Store]]:
    """Connect all workers of a job, each with the store that a process of its own would have."""
    how = {"timeout": TIMEOUT, "threads": 1} | how

    def connect(rank: int) -> shoal.Store:
        return shoal.connect(address, workers=workers, rank=rank, **how)

    with ThreadPoolExecutor(workers) as pool, contextlib.ExitStack() as stack:
        stores = list(pool.map(connect, range(workers)))
        for store in stores:
            stack.enter_context(store)
        yield stores


def together(address: str, workers: int, work: Callable[[shoal.Store], Any], **how: Any) -> list[Any]:
    """Run a function as all workers of a job, each in a thread; return the results by rank."""
    with joined(address, workers, **how) as stores, ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, stores))


def one_by_one(address: str, workers: int, work: Callable[[shoal.Store], Any], **how: Any) -> list[Any]:
    """Run a function as all workers of a job, each of which leaves when it is done; return the results by rank."""
    how = {"timeout": TIMEOUT, "threads": 1} | how

    def one(rank: int) -> Any:
        with shoal.connect(address, workers=workers, rank=rank, **how) as store:
            return work(store)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, range(workers)))
