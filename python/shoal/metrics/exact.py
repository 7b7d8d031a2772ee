"""Metrics that are exact and need all labels and margins at once; `shoal.metrics` has the formulas.

Threads: all functions are pure.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from shoal import _core
from shoal.base import notebook
from shoal.base.plural import counted
from shoal.metrics.checked import Floats, as_floats, checked
from shoal.metrics.ordered import Curves, ScoreGroups, begins_of_runs

_CALLER = _core.ThreadPool(1)  # computes in the calling thread


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """The quality of a model's predictions on a set of examples.

    Attributes
    ----------
    logloss : float
        Mean negative log-likelihood in nats per example.
    auc : float
        Area under the ROC curve; NaN if the examples are all of one class.
    calibration : float
        Sum of labels over sum of predicted probabilities.
    examples : int
        Number of measured examples. With none, the other numbers are NaN.
    base_rate : float
        Share of positive labels.
    weight : float
        Sum of the examples' weights, by which all means and shares are weighted; without weights, ``examples``.
    accuracy : float or None
        Of several classes: share of the examples whose likeliest class is their own. Then ``auc``, ``calibration`` and
        ``base_rate``, which are of two classes, are NaN.

    Examples
    --------
    >>> print(Metrics(logloss=0.3, auc=0.9, calibration=1.01, examples=1000, base_rate=0.25))
    logloss 0.300000  AUC 0.900000  calibration 1.0100  NE 0.5335  (1,000 examples, 25.00 % positive)
    """

    logloss: float
    auc: float
    calibration: float
    examples: int
    base_rate: float
    weight: float = math.nan
    accuracy: float | None = None

    def __post_init__(self) -> None:
        if math.isnan(self.weight):
            structs.force_setattr(self, "weight", float(self.examples))
        if self.accuracy is not None:
            for name in ("auc", "calibration", "base_rate"):  # the same object, so that equal metrics compare equal
                structs.force_setattr(self, name, math.nan)

    @property
    def normalized_entropy(self) -> float:
        """Log-loss over that of always predicting the base rate; NaN with one class only."""
        base = entropy(self.base_rate)
        return self.logloss / base if base > 0 else math.nan

    def __str__(self) -> str:
        weight = "" if self.weight == self.examples else f" of weight {self.weight:,.6g}"
        if self.accuracy is not None:
            measured = f"{counted(self.examples, 'example')}{weight}"
            return f"logloss {self.logloss:.6f}  accuracy {self.accuracy:.6f}  ({measured})"
        return (
            f"logloss {self.logloss:.6f}  AUC {self.auc:.6f}  calibration {self.calibration:.4f}  "
            f"NE {self.normalized_entropy:.4f}  ({counted(self.examples, 'example')}{weight}, "
            f"{self.base_rate:.2%} positive)"
        ).replace("%", " %")

    def _repr_html_(self) -> str:
        if self.accuracy is not None:
            return notebook.table(
                counted(self.examples, "example"),
                [("log-loss", f"{self.logloss:.6f}"), ("accuracy", f"{self.accuracy:.6f}")],
            )
        return notebook.table(
            f"{counted(self.examples, 'example')}, {100 * self.base_rate:.2f} % positive",
            [
                ("log-loss", f"{self.logloss:.6f}"),
                ("AUC", f"{self.auc:.6f}"),
                ("calibration", f"{self.calibration:.4f}"),
                ("normalized entropy", f"{self.normalized_entropy:.4f}"),
            ],
        )


class GroupedAUC(msgspec.Struct, frozen=True, kw_only=True):
    """AUC within groups, averaged.

    Attributes
    ----------
    gauc : float
        Mean of the groups' AUC, each weighted by its examples (the sum of their weights); NaN without any.
    groups : int
        Groups with both classes: those that the mean is over.
    left_out : int
        Groups of one class, which have no AUC.
    examples : int
        Of the groups with both classes.
    """

    gauc: float
    groups: int
    left_out: int
    examples: int


def probabilities(margins: npt.ArrayLike) -> Floats:
    """Turn margins into probabilities: 1 / (1 + e^-a), from whichever side does not overflow.

    Parameters
    ----------
    margins : float[n]

    Returns
    -------
    float64[n]

    Examples
    --------
    >>> probabilities([0.0, 2.0, -1000.0])
    array([0.5       , 0.88079708, 0.        ])
    """
    a = np.ascontiguousarray(as_floats(margins, "margins"))
    return _core.logistic_probabilities(a.reshape(-1), _CALLER).reshape(np.shape(margins))


def logit(probabilities: npt.ArrayLike) -> Floats:
    """Turn probabilities into margins: ln p - ln(1 - p), for metrics of what only gives probabilities.

    Parameters
    ----------
    probabilities : float[n], 0 to 1

    Returns
    -------
    float64[n]
        -inf of 0 and inf of 1.

    Raises
    ------
    ValueError
        One is below 0, above 1, or NaN.

    Examples
    --------
    >>> logit([0.5, 0.0]).tolist()
    [0.0, -inf]
    """
    p = as_floats(probabilities, "probabilities")
    wrong = np.flatnonzero(~((p >= 0) & (p <= 1)))
    if len(wrong):
        raise ValueError(f"probability {float(p.flat[wrong[0]])!r} at {wrong[0]}: probabilities are 0 to 1")
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(p) - np.log1p(-p))


def logloss(labels: npt.ArrayLike, margins: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> float:
    """Mean log-loss of margins: ``max(a, 0) - a y + log1p(e^-|a|)``.

    Parameters
    ----------
    labels : float[n], 0 or 1
    margins : float[n]
        Log-odds, not probabilities.
    weights : float[n], optional
        Importance of each example, 0 or more; all 1 if not given.

    Returns
    -------
    float
        Nats per example; NaN of no examples, or none with a weight.

    Examples
    --------
    >>> round(logloss([1], [2.0]), 6)
    0.126928
    """
    y, a, w = checked(labels, margins, weights, "margins")
    return ratio(weighted_sum(losses(y, a), w), len(y) if w is None else float(np.sum(w)))


def calibration(labels: npt.ArrayLike, margins: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> float:
    """Sum of labels over sum of predicted probabilities (COPC: clicks over predicted clicks).

    Parameters
    ----------
    labels : float[n], 0 or 1
    margins : float[n]
        Log-odds, not probabilities.
    weights : float[n], optional
        Importance of each example, 0 or more; all 1 if not given.

    Returns
    -------
    float
        1 is perfect; 2 means twice as many positives as predicted; NaN without examples.

    Examples
    --------
    >>> calibration([1, 0, 0, 0], [0.0, 0.0, 0.0, 0.0])
    0.5
    """
    y, a, w = checked(labels, margins, weights, "margins")
    return ratio(weighted_sum(y, w), weighted_sum(probabilities(a), w))


def auc(labels: npt.ArrayLike, scores: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> float:
    """Area under the ROC curve, exactly: the share of (positive, negative) pairs in the right order, ties half.

    Parameters
    ----------
    labels : float[n], 0 or 1
    scores : float[n]
        Anything that rises with the probability; infinities are fine, NaN is not.
    weights : float[n], optional
        Importance of each example, 0 or more; all 1 if not given. A pair counts with the product of its weights.

    Returns
    -------
    float
        Never flipped: below 0.5 the scores order the pairs the wrong way round. NaN if all labels are equal.

    Notes
    -----
    The Mann-Whitney statistic over P N, in integers up to the one division; with weights in float64, whose rounding is
    below n 2^-52. O(n log n) time, about 40 bytes an example.

    Examples
    --------
    >>> auc([0, 0, 1, 1], [0.1, 0.4, 0.4, 0.8])
    0.875
    >>> auc([0, 0, 1, 1], [0.1, 0.4, 0.4, 0.8], weights=[1, 3, 1, 1])
    0.8125
    """
    y, s, w = checked(labels, scores, weights, "scores")
    return ScoreGroups.of(y, s, w).auc()[1]


def gauc(
    labels: npt.ArrayLike, scores: npt.ArrayLike, groups: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> GroupedAUC:
    """Mean of the AUC within groups, weighted by their examples: how well each user's list is ordered.

    Parameters
    ----------
    labels : float[n], 0 or 1
    scores : float[n]
        As for `auc`.
    groups : any[n]
        Values that can be sorted: user ids, names.
    weights : float[n], optional
        Importance of each example, 0 or more; all 1 if not given. Examples of weight 0 are left out.

    Returns
    -------
    GroupedAUC

    Notes
    -----
    Sum of n_u AUC_u over sum of n_u (Zhu et al., "Optimized cost per click in Taobao display advertising", KDD 2017),
    over the groups that have both classes. Exact as `auc` is; one sort, O(n log n).

    Examples
    --------
    >>> gauc([1, 0, 1, 0, 1], [0.9, 0.1, 0.2, 0.2, 0.5], ["ann", "ann", "bob", "bob", "eve"])
    GroupedAUC(gauc=0.75, groups=2, left_out=1, examples=4)
    """
    y, s, w = checked(labels, scores, weights, "scores")
    g: npt.NDArray[Any] = np.asarray(groups)
    if g.shape != y.shape:
        raise ValueError(f"labels {y.shape} and groups {g.shape}: pass one group for each example")
    if w is not None and not np.all(w > 0):
        there = np.flatnonzero(w)
        y, s, g, w = y[there], s[there], g[there], w[there]
    if len(y) == 0:
        return GroupedAUC(gauc=math.nan, groups=0, left_out=0, examples=0)
    try:
        number = np.unique(g, return_inverse=True)[1].reshape(-1)
    except TypeError as error:
        raise TypeError(f"groups cannot be sorted ({error}): pass values of one type, without None") from None
    order = np.lexsort((s, number))
    y, s, number = y[order], s[order], number[order]
    begins = begins_of_runs(number)
    examples = np.diff(np.append(begins, len(y)))
    # Each group's weights add up to 1 below, so that no group's sums drown in those of the groups before it.
    mass: npt.NDArray[Any] = examples if w is None else np.add.reduceat(w[order], begins)
    one: npt.NDArray[Any] = np.ones(len(y), np.int64) if w is None else w[order] / np.repeat(mass, examples)

    ties = np.flatnonzero(np.concatenate(([True], (s[1:] != s[:-1]) | (number[1:] != number[:-1]))))
    positive = np.add.reduceat(np.where(y != 0, one, 0), ties)
    negative = np.add.reduceat(np.where(y != 0, 0, one), ties)
    first = np.searchsorted(ties, begins)  # the tie that each group begins with
    ties_of = np.diff(np.append(first, len(ties)))
    before = np.cumsum(negative) - negative
    below = before - np.repeat(before[first], ties_of)  # negatives of the same group with a lower score
    twice_won = np.add.reduceat(positive * (2 * below + negative), first)
    pairs = np.add.reduceat(positive, first) * np.add.reduceat(negative, first)
    both = pairs > 0
    if not np.any(both):
        return GroupedAUC(gauc=math.nan, groups=0, left_out=len(begins), examples=0)
    each = np.clip(twice_won[both] / (2.0 * pairs[both]), 0.0, 1.0)
    return GroupedAUC(
        gauc=float(np.sum(each * mass[both]) / np.sum(mass[both])),
        groups=int(np.count_nonzero(both)),
        left_out=int(np.count_nonzero(~both)),
        examples=int(np.sum(examples[both])),
    )


def curves(labels: npt.ArrayLike, margins: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> Curves:
    """Calibration by decile and ROC curve, exactly.

    Parameters
    ----------
    labels : float[n], 0 or 1
    margins : float[n]
        Log-odds, not probabilities.
    weights : float[n], optional
        Importance of each example, 0 or more; all 1 if not given.

    Returns
    -------
    Curves

    Examples
    --------
    >>> found = curves([0, 1, 0, 1], [-2.0, -1.0, 1.0, 2.0])
    >>> found.fpr, found.tpr
    ((0.0, 0.0, 0.5, 0.5, 1.0), (0.0, 0.5, 0.5, 1.0, 1.0))
    >>> [round(decile.mean_probability, 2) for decile in found.deciles]
    [0.12, 0.27, 0.73, 0.88]
    """
    return measure_with_curves(labels, margins, weights)[1]


def measure(labels: npt.ArrayLike, margins: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> Metrics:
    """All metrics of margins against labels, exactly.

    Parameters
    ----------
    labels : float[n], 0 or 1
    margins : float[n]
        Log-odds, not probabilities.
    weights : float[n], optional
        Importance of each example, 0 or more; all 1 if not given.

    Returns
    -------
    Metrics

    Examples
    --------
    >>> measure([0, 0, 1, 1], [-2.0, 0.0, 0.0, 2.0]).auc
    0.875
    """
    return measure_with_curves(labels, margins, weights)[0]


def measure_with_curves(
    labels: npt.ArrayLike, margins: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> tuple[Metrics, Curves]:
    """All metrics and the curves, from one sort: see `measure` and `curves`."""
    y, a, w = checked(labels, margins, weights, "margins")
    ordered = ScoreGroups.of(y, a, w)
    total = float(len(y)) if w is None else float(np.sum(w))
    positive = weighted_sum(y, w)
    metrics = Metrics(
        logloss=ratio(weighted_sum(losses(y, a), w), total),
        auc=ordered.auc()[1],
        calibration=ratio(positive, weighted_sum(probabilities(a), w)),
        examples=len(y),
        base_rate=ratio(positive, total),
        weight=total,
    )
    return metrics, ordered.curves(probabilities(ordered.scores))


def losses(y: Floats, a: Floats) -> Floats:
    """Compute the log-loss of each example."""
    # max(a, 0) - a y without its inf - inf: the margin towards the wrong class, if it points there.
    return np.asarray(np.maximum(np.where(y != 0, -a, a), 0.0) + np.log1p(np.exp(-np.abs(a))))


def weighted_sum(values: Floats, w: Floats | None) -> float:
    """Sum values by numpy's pairwise float64 sum; what has weight 0 is not there, infinite or not."""
    with np.errstate(over="ignore"):  # a sum beyond all floats is infinite
        return float(np.sum(values if w is None else np.multiply(values, w, out=np.zeros_like(w), where=w > 0)))


def entropy(q: float) -> float:
    """Entropy of a coin with probability q, in nats."""
    return -q * math.log(q) - (1 - q) * math.log1p(-q) if 0 < q < 1 else 0.0


def ratio(a: float, b: float) -> float:
    """Divide; NaN by zero."""
    return a / b if b else math.nan
