"""ScoreGroups: examples in the order of their scores, those of equal score as one group.

    scores      s_0 < s_1 < ... < s_(g-1)      one for each group
    positive    sum of the weights of the group's positives      int64 where nothing is weighted, else float64
    negative    the same of its negatives

AUC, the ROC curve and the deciles depend on nothing else, whether a group is one score (exact) or one bin of a
histogram (`Accumulator`). No group of weight 0 is kept.

Threads: immutable.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.metrics.checked import Floats

# int64 or float64: counts or weights.
Sums = npt.NDArray[Any]

# Twice the pairs of fewer examples than this fit int64.
_MOST_EXACT = 1 << 31

DECILES = 10

# The points that a stored ROC curve has at most.
ROC_POINTS = 128


class Decile(msgspec.Struct, frozen=True, kw_only=True):
    """A tenth of the examples, by predicted probability.

    Attributes
    ----------
    low, high : float
        The least and the largest probability predicted in it.
    weight : float
        Sum of the examples' weights: their number without weights.
    mean_probability : float
        Mean predicted probability.
    mean_label : float
        Share of positives.
    """

    low: float
    high: float
    weight: float
    mean_probability: float
    mean_label: float


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """The curves of a report: deciles and ROC curve.

    Attributes
    ----------
    deciles : tuple of Decile
        In ascending order. Equal predictions are never separated, so there may be fewer than ten.
    fpr, tpr : tuple of float
        The ROC curve from (0, 0) to (1, 1): shares of the negatives and of the positives with a score above a falling
        threshold. Empty with one class only. At most 129 points, each on the exact curve, and no point of the exact
        curve is farther than 1/64 from the line through them (sum of both
        coordinates).
    """

    deciles: tuple[Decile, ...] = ()
    fpr: tuple[float, ...] = ()
    tpr: tuple[float, ...] = ()


class ScoreGroups(msgspec.Struct, frozen=True):
    """Groups of equal score, ascending."""

    scores: Floats
    positive: Sums
    negative: Sums

    @classmethod
    def of(cls, labels: Floats, scores: Floats, weights: Floats | None) -> ScoreGroups:
        """Sort examples: O(n log n) time, about 40 bytes an example."""
        if weights is not None and not np.all(weights > 0):
            there = np.flatnonzero(weights)
            labels, scores, weights = labels[there], scores[there], weights[there]
        order = np.argsort(scores)
        scores = scores[order]
        begins = begins_of_runs(scores)
        if len(begins) == 0:
            return cls(scores, np.empty(0, np.int64), np.empty(0, np.int64))
        positive: Sums
        negative: Sums
        if weights is None:
            positive = np.add.reduceat(labels[order].astype(np.int64), begins)
            negative = np.diff(np.append(begins, len(scores))) - positive
        else:
            weights = weights[order]
            positive = np.add.reduceat(np.where(labels[order] != 0, weights, 0.0), begins)
            negative = np.add.reduceat(np.where(labels[order] != 0, 0.0, weights), begins)
        return cls(scores[begins], positive, negative)

    def auc(self) -> tuple[float, float, float]:
        """Return `auc_bounds`."""
        return auc_bounds(self.positive, self.negative)

    def roc(self, most: int = ROC_POINTS) -> tuple[Floats, Floats]:
        """Compute the ROC curve: fpr and tpr, both from 0 to 1, ``most + 1`` points at most; empty of one class.

        The first corner of the exact curve in each of ``most`` steps of fpr + tpr is kept, and the last corner.
        """
        positives, negatives = float(self.positive.sum()), float(self.negative.sum())
        if not (positives > 0 and negatives > 0):
            return np.empty(0), np.empty(0)
        tpr = np.concatenate(([0.0], np.cumsum(self.positive[::-1]) / positives))
        fpr = np.concatenate(([0.0], np.cumsum(self.negative[::-1]) / negatives))
        tpr[-1] = fpr[-1] = 1.0
        np.minimum(tpr, 1.0, out=tpr)
        np.minimum(fpr, 1.0, out=fpr)
        step = np.minimum((fpr + tpr) * (most / 2), most - 1).astype(np.int64)
        kept = begins_of_runs(step)
        kept = kept if kept[-1] == len(step) - 1 else np.append(kept, len(step) - 1)
        return fpr[kept], tpr[kept]

    def deciles(self, probabilities: Floats, count: int = DECILES) -> tuple[Decile, ...]:
        """Cut the groups, each by its middle, into ``count`` parts of about equal weight; none is empty."""
        weight = (self.positive + self.negative).astype(np.float64)
        total = weight.sum()
        if not total > 0:
            return ()
        middle = (np.cumsum(weight) - weight / 2) / total
        begins = begins_of_runs(np.minimum(middle * count, count - 1).astype(np.int64))
        ends = np.append(begins[1:], len(weight)) - 1
        weights = np.add.reduceat(weight, begins)
        predicted = np.add.reduceat(weight * probabilities, begins) / weights
        came = np.add.reduceat(self.positive.astype(np.float64), begins) / weights
        columns = (probabilities[begins], probabilities[ends], weights, predicted, came)
        return tuple(
            Decile(low=low, high=high, weight=w, mean_probability=p, mean_label=y)
            for low, high, w, p, y in zip(*(column.tolist() for column in columns), strict=True)
        )

    def curves(self, probabilities: Floats) -> Curves:
        """Compute what a report draws; ``probabilities`` are those of the groups."""
        fpr, tpr = self.roc()
        return Curves(deciles=self.deciles(probabilities), fpr=tuple(fpr.tolist()), tpr=tuple(tpr.tolist()))


def auc_bounds(positive: Sums, negative: Sums) -> tuple[float, float, float]:
    """Return (the least, the middle, the most) AUC that any order within groups can give; NaN of one class.

    The groups are ascending, some may be empty. With exact groups the middle one is the AUC, ties counting half.
    Integers up to the one division, where nothing is weighted and there are less than 2^31 examples.
    """
    if positive.dtype == np.int64:
        if (positive.sum() + negative.sum()).item() >= _MOST_EXACT:
            return auc_bounds(positive.astype(np.float64), negative.astype(np.float64))
        pairs, won, tied = _core.ordered_pairs(positive, negative)
    else:
        pairs = positive.sum().item() * negative.sum().item()
        won = np.sum(positive * (np.cumsum(negative) - negative)).item()
        tied = np.sum(positive * negative).item()
    if not pairs > 0:
        return math.nan, math.nan, math.nan
    # Float sums may end an ulp above the pairs.
    return min(won / pairs, 1.0), min((2 * won + tied) / (2 * pairs), 1.0), min((won + tied) / pairs, 1.0)


def begins_of_runs(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return where runs of equal values begin."""
    if len(values) == 0:
        return np.empty(0, np.int64)
    return np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
