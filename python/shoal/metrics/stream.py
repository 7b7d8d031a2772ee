"""StreamMetrics: what the accumulators of two and of several classes have in common.

    accumulator.py    Accumulator: labels 0 and 1, a margin for each example
    multiclass.py     MulticlassAccumulator: numbers of classes, a margin for each example and class

Merging adds exact sums: the result does not depend on which worker counted what, nor on the order.

An accumulator is also two vectors of int64 that add up as accumulators merge, in any order, modulo 2^64, so workers may
push the differences to a table (`totals`, `histogram`, `take`):

    totals      examples, for each sum the five integers of `ExactSum.whole`; of two classes also whether it is
                weighted (0 or 1), and last the examples that are in its histogram
    histogram   of two classes: whole parts of the counts, then their fractions in units of 2^-40

Threads: an accumulator belongs to one thread at a time.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.exact_sum import ExactSum
from shoal.metrics.exact import Metrics, ratio

REMEDY = "pass what to_dict returned"

Integers = npt.NDArray[np.int64]


class StreamMetrics(ABC):
    """Metrics of a stream of examples, mergeable, in constant memory.

    Attributes
    ----------
    examples : int
        How many examples were counted.
    unplaced : int
        How many of them the histogram lacks, as `take` may find.
    kind : str
        Of its descriptions.
    quality_name : str
        Name of `quality`.
    relative_name, constant : str
        Name of `relative_loss`, and of the predictions that it compares with.
    """

    __slots__ = ("_loss", "_weight", "examples", "unplaced")

    kind: ClassVar[str]
    quality_name: ClassVar[str]
    relative_name: ClassVar[str]
    constant: ClassVar[str]

    def __init__(self) -> None:
        self.examples = 0
        self.unplaced = 0
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
        pool: _core.ThreadPool | None = None,
    ) -> float:
        """Count a batch of examples; return the weighted sum of their losses."""

    @abstractmethod
    def _check_mergeable(self, other: Self) -> None:
        """Raise ValueError if ``other`` counts something else."""

    @abstractmethod
    def _sums(self) -> Sequence[ExactSum]:
        """Return the exact sums, in the order that all of a kind have."""

    @abstractmethod
    def _set_sums(self, sums: Sequence[ExactSum]) -> None:
        """Replace the exact sums by others, in the order of `_sums`."""

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

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.result()}>"

    def __copy__(self) -> Self:
        """Copy the sums and counts as well: they change in place."""
        return copy.deepcopy(self)

    def merge(self, other: Self) -> None:
        """Add what ``other`` counted, as if its examples had been counted here.

        Raises
        ------
        ValueError
            It has another number of classes, or a histogram with other bins. Nothing has been added.
        TypeError
            It is an accumulator of another kind, or none.
        """
        if type(other) is not type(self):
            raise TypeError(
                f"{type(self).__name__} merges another one, got {type(other).__name__}: pass an accumulator"
            )
        self._check_mergeable(other)
        self.examples += other.examples
        self.unplaced += other.unplaced
        for mine, theirs in zip(self._sums(), other._sums(), strict=True):
            mine.merge(theirs)

    def totals(self) -> Integers:
        """Return what the module calls totals: int64, as many for all of a kind, 26 at most."""
        return np.array(self._totals(), np.int64)

    def _totals(self) -> list[int]:
        values = [self.examples]
        for exact in self._sums():
            values += exact.whole()
        return values

    def histogram(self) -> Integers:
        """Return what the module calls the histogram: int64, empty of several classes."""
        return np.empty(0, np.int64)

    @property
    def bins(self) -> range:
        """The bins of each class in use: all others of `histogram` are 0."""
        return range(0)

    def take(self, totals: Integers, histogram: Integers) -> None:
        """Become the merge of the accumulators whose totals and histograms were added.

        Equal to the bit to what `merge` gives, if the sums of each are multiples of 2^-64, as those of batches are that
        are 2^-12 or more, below 2^63, and the weights are multiples of 2^-40, without rounding so far. Else sums are
        less by up to 2^-64 for each accumulator, counts of a bin by up to 2^-40.

        Parameters
        ----------
        totals : int64[n]
            Numbers after them are ignored.
        histogram : int64[m]
            It may lack examples that totals have, see `unplaced`: then AUC and curves are of those that it has.

        Raises
        ------
        ValueError
            They are of another kind, or of a histogram with other bins. Nothing was changed.
        """
        for what, given in (("totals", totals), ("histogram", histogram)):
            if not isinstance(given, np.ndarray) or given.dtype != np.int64 or given.ndim != 1:
                got = getattr(given, "dtype", type(given).__name__)
                raise TypeError(f"the {what} must be int64[n], got {got}: pass a sum of those of accumulators")
        sums = self._sums()
        if len(totals) < len(self._totals()) or histogram.shape != self.histogram().shape:
            raise ValueError(
                f"totals {totals.shape} and histogram {histogram.shape}: pass those of accumulators like this one"
            )
        values = totals.tolist()
        self.examples = values[0]
        begins = range(1, 1 + ExactSum.INTEGERS * len(sums), ExactSum.INTEGERS)
        self._set_sums([ExactSum.of_whole(values[begin : begin + ExactSum.INTEGERS]) for begin in begins])

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
