"""StreamMetrics: what the accumulators of two and of several classes have in common.

    accumulator.py    Accumulator: labels 0 and 1, a margin for each example
    multiclass.py     MulticlassAccumulator: numbers of classes, a margin for each example and class

Merging adds exact sums: the result does not depend on which worker counted what, nor on the order.

Threads: an accumulator belongs to one thread at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy.typing as npt

from shoal.metrics.exact import Metrics, ratio
from shoal.metrics.exact_sum import ExactSum

REMEDY = "pass what to_dict returned"


class StreamMetrics(ABC):
    """Metrics of a stream of examples, mergeable, in constant memory.

    Attributes
    ----------
    examples : int
        How many examples were counted.
    kind : str
        Of its descriptions.
    quality_name : str
        Name of `quality`.
    relative_name, constant : str
        Name of `relative_loss`, and of the predictions that it compares with.
    """

    __slots__ = ("_loss", "_weight", "examples")

    kind: ClassVar[str]
    quality_name: ClassVar[str]
    relative_name: ClassVar[str]
    constant: ClassVar[str]

    def __init__(self) -> None:
        self.examples = 0
        self._weight = ExactSum()
        self._loss = ExactSum()

    # ---- defined by a kind of accumulator ----------------------------------------------------------------------------

    @abstractmethod
    def update(
        self,
        labels: npt.ArrayLike,
        margins: npt.ArrayLike,
        weights: npt.ArrayLike | None = None,
        *,
        sums: tuple[float, ...] | None = None,
    ) -> float:
        """Count a batch of examples; return the weighted sum of their losses."""

    @abstractmethod
    def _check_mergeable(self, other: Self) -> None:
        """Raise ValueError if ``other`` counts something else."""

    @abstractmethod
    def _sums(self) -> Sequence[ExactSum]:
        """Return the exact sums, in the order that all of a kind have."""

    @abstractmethod
    def empty(self) -> Self:
        """Return an accumulator that has counted nothing and merges with this one."""

    @abstractmethod
    def result(self) -> Metrics:
        """Return the metrics so far."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the state as a JSON value."""

    @property
    @abstractmethod
    def quality(self) -> float:
        """The number that is shown besides the log-loss."""

    @property
    @abstractmethod
    def relative_loss(self) -> float:
        """Log-loss over that of ``constant``; NaN where it has none."""

    # ---- what all have -----------------------------------------------------------------------------------------------

    def merge(self, other: Self) -> None:
        """Add what ``other`` counted, as if its examples had been counted here.

        Raises
        ------
        ValueError
            It has another number of classes, or a histogram with other bins. Nothing has been added.
        """
        self._check_mergeable(other)
        self.examples += other.examples
        for mine, theirs in zip(self._sums(), other._sums(), strict=True):
            mine.merge(theirs)

    @property
    def weight(self) -> float:
        """Sum of the weights so far; ``examples`` where nothing is weighted."""
        return float(self._weight)

    @property
    def loss_sum(self) -> float:
        """Weighted sum of the losses so far."""
        return float(self._loss)

    @property
    def logloss(self) -> float:
        """Mean loss so far; NaN before the first example."""
        return ratio(float(self._loss), float(self._weight))

    @property
    def auc(self) -> float:
        """AUC; NaN of several classes, and while there is one class only."""
        return math.nan

    @property
    def auc_error(self) -> float:
        """Maximum error of ``auc``."""
        return math.nan

    @property
    def base_rate(self) -> float:
        """Share of positive labels so far; NaN of several classes."""
        return math.nan

    @property
    def accuracy(self) -> float | None:
        """Share of the examples, by weight, whose likeliest class is their own; None of two classes."""
        return None


def check_described(described: object, kind: str, version: int) -> None:
    """Raise ValueError unless this is the description of an accumulator of a kind and a version."""
    if not isinstance(described, dict) or described.get("kind") != kind or described.get("version") != version:
        raise ValueError(f"this is not a {kind} of version {version}: {REMEDY}")


def whole_number(value: object, name: str) -> int:
    """Return a whole number, 0 or more, of a description."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}: pass a whole number, 0 or more")
    return value
