"""Activity: what this process does with a store, for its metrics: training and checkpoints.

Threads: any. Each number is written by one thread at a time, and read by others as it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_MEASURE_SECONDS = 1.0  # between two computations of loss and AUC


class Activity:
    """Progress of training, and the last checkpoint, of one store."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Learned from.
        self.examples = 0
        # Of these, of a stream: those that were late.
        self.late_examples = 0
        # loss, auc: The newest ones that were reported; None before.
        self.loss: float | None = None
        self.auc: float | None = None
        self._measure_at = -math.inf
        self._saved_at: float | None = None
        self._save_seconds = 0.0

    def learned(self, examples: int, measure: Callable[[], tuple[float, float | None]] | None = None) -> None:
        """Count examples; about once per second, call a function, if there is one, that returns loss and AUC."""
        self.examples += examples
        if measure is not None and self._clock() >= self._measure_at:
            self.loss, self.auc = measure()
            self._measure_at = self._clock() + _MEASURE_SECONDS

    def saved(self, begun_at: float) -> None:
        """Note that a checkpoint that was begun at a time of the clock is complete."""
        self._saved_at = self._clock()
        self._save_seconds = self._saved_at - begun_at

    def now(self) -> float:
        """Return the time of the clock."""
        return self._clock()

    def values(self) -> dict[str, float]:
        """Return what is known, by the names of the metrics of workers."""
        found: dict[str, float] = {"examples": self.examples, "late_examples": self.late_examples}
        if self.loss is not None:
            found["loss"] = self.loss
        if self.auc is not None:
            found["auc"] = self.auc
        if self._saved_at is not None:
            found["checkpoint_age"] = self._clock() - self._saved_at
            found["checkpoint_duration"] = self._save_seconds
        return found
