"""Fits whose number of workers changes at a chosen batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from cluster_fakes import TIMEOUT
from cluster_standin import Cluster
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
