"""Fits whose number of workers changes at a chosen batch, or by deaths at chosen calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT, declare_dead
from cluster_standin import Cluster, cluster
from killed_workers import SERVERS, Calls, KilledError
from shoal.models.callbacks import Callback


class Pace(Callback):
    """Calls a function after each batch of a worker, in the worker's thread."""

    def __init__(self, react: Callable[[int], None]) -> None:
        self._react = react
        self._batches = 0

    def batch_done(self, progress: Any) -> None:
        self._batches += 1
        self._react(self._batches)


def first_pace(made: Cluster, joined: threading.Event, batch: int, others: int) -> Callable[[int], None]:
    """Let others join after some batches, and go on when they wait; slowly, so that the fit does not end before."""
    arrived = threading.Event()

    def react(batches: int) -> None:
        if batches < batch:
            return
        joined.set()
        line = made.scheduler.membership.state.jobs[""]
        deadline = time.monotonic() + TIMEOUT
        while not arrived.is_set() and len(line.queue) < others and time.monotonic() < deadline:
            time.sleep(0.005)
        arrived.set()
        time.sleep(0.01)

    return react


class CountedRegression(shoal.LogisticRegression):
    """The rule adds 1 to the row of a key for each gradient of 1, which each of its examples pushes."""

    def _backward(self, *arguments: Any) -> Any:
        return [np.full(gradient.shape, -1.0, np.float32) for gradient in super()._backward(*arguments)]


Program = Callable[[shoal.Store, list[int]], Any]
Span = int | tuple[int, int]  # of the number of workers


def work(made: Cluster, last: int | None, program: Program, mode: Any, span: Span, returns: bool) -> tuple[Any, int]:
    """Run a program as a worker, again whenever the number of workers has changed; it dies before a call of its first.

    Returns
    -------
    (result, calls)
        Of one that has died and not come back, or has left, None, and the calls of its first job.
    """
    sizes: list[int] = []
    counted = None
    while True:
        store = shoal.connect(made.address, workers=span, threads=1, timeout=TIMEOUT, consistency=mode)
        calls = Calls(store, last if counted is None else None)
        counted = counted or calls
        sizes.append(store.num_workers)
        try:
            with store:
                return program(store, sizes), counted.count
        except shoal.errors.WorkersChangedError as change:
            if change.leaves:
                return None, counted.count
        except KilledError:
            rank = store.rank
            store._scheduler.close()
            declare_dead(made.scheduler, "worker", rank)
            if not returns:
                return None, counted.count


def run(
    workers: int, deaths: dict[int, int], program: Program, mode: Any, span: Span, *, returns: bool = False
) -> list[tuple[Any, int]]:
    with cluster(SERVERS, 1) as made, ThreadPoolExecutor(workers) as pool:
        ends = [pool.submit(work, made, deaths.get(one), program, mode, span, returns) for one in range(workers)]
        errors = [error for end in ends if (error := end.exception(2 * TIMEOUT)) is not None]
        if errors and all("workers have died, and none has handed over its state" in str(error) for error in errors):
            pytest.skip("all workers of the first job have died before the others came")
        if errors:  # all of them: one of the workers has failed first
            raise BaseExceptionGroup(str(deaths), errors)
        return [end.result() for end in ends]
