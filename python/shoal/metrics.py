"""How good predictions are: log-loss, AUC, calibration, exact and as running sums.

Everything is computed from *margins* (log-odds) in float64: a float32 probability is 1 from a margin of 17 on, where
its logarithm is lost and different margins become ties.

    margin a, label y in {0, 1}         p = 1 / (1 + e^-a)

    logloss      mean of max(a, 0) - a y + log1p(e^-|a|)                     nats per example, 0 is perfect
    auc          P(a positive's margin > a negative's), ties count 1/2       1 is perfect, 0.5 is a coin
    calibration  sum y / sum p                                               1 is right, above it p is too low
    NE           logloss / H(mean y), H(q) = -q ln q - (1 - q) ln(1 - q)     1 is the best constant prediction

``auc`` and ``measure`` are exact and need all margins at once. ``Progress`` keeps running sums and a histogram of
margins instead: constant memory, mergeable, its AUC with a bound on its error.

Sources. AUC by mid-ranks is the Mann-Whitney statistic (Hanley, McNeil: "The meaning and use of the area under a ROC
curve", Radiology 143, 1982). NE and calibration as in He et al., "Practical lessons from predicting clicks on ads at
Facebook", ADKDD 2014. A loss on examples not yet learned from is progressive validation (Blum, Kalai, Langford:
"Beating the hold-out", COLT 1999; McMahan et al., KDD 2013, section 5.1).

Threads: functions are pure; one ``Progress`` belongs to one thread at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Metrics", "Progress", "auc", "calibration", "logloss", "measure", "probabilities"]

Floats = npt.NDArray[np.float64]

# The histogram of Progress: bins of equal width on [-LIMIT, LIMIT), whatever lies outside counts in the last ones.
_LIMIT = 16.0
_BINS_PER_UNIT = 256
_BINS = int(2 * _LIMIT) * _BINS_PER_UNIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """How good a model's predictions are on a set of examples.

    Attributes
    ----------
    logloss : float
        Mean negative log-likelihood in nats per example.
    auc : float
        Area under the ROC curve; NaN if the examples are all of one class.
    calibration : float
        Sum of labels over sum of predicted probabilities.
    examples : int
        How many examples were measured. With none, the other numbers are NaN.
    base_rate : float
        Share of positive labels.

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

    @property
    def normalized_entropy(self) -> float:
        """Log-loss over that of always predicting the base rate; NaN with one class only."""
        base = _entropy(self.base_rate)
        return self.logloss / base if base > 0 else math.nan

    def __str__(self) -> str:
        return (
            f"logloss {self.logloss:.6f}  AUC {self.auc:.6f}  calibration {self.calibration:.4f}  "
            f"NE {self.normalized_entropy:.4f}  ({self.examples:,} examples, {self.base_rate:.2%} positive)"
        ).replace("%", " %")


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
    a = np.asarray(margins, np.float64)
    small = np.exp(-np.abs(a))
    return np.where(a >= 0, 1.0, small) / (1.0 + small)


def logloss(labels: npt.ArrayLike, margins: npt.ArrayLike) -> float:
    """Mean log-loss of margins: max(a, 0) - a y + log1p(e^-|a|).

    Parameters
    ----------
    labels : float[n], 0 or 1
    margins : float[n]
        Log-odds, not probabilities.

    Returns
    -------
    float
        Nats per example; NaN of no examples.

    Examples
    --------
    >>> round(logloss([1], [2.0]), 6)
    0.126928
    """
    y, a = _checked(labels, margins, "margins")
    return float(np.mean(_losses(y, a))) if len(y) else math.nan


def calibration(labels: npt.ArrayLike, margins: npt.ArrayLike) -> float:
    """Sum of labels over sum of predicted probabilities (COPC: clicks over predicted clicks).

    Parameters
    ----------
    labels : float[n], 0 or 1
    margins : float[n]
        Log-odds, not probabilities.

    Returns
    -------
    float
        1 is right, 2 means that twice as many were positive as predicted; NaN of no examples.

    Examples
    --------
    >>> calibration([1, 0, 0, 0], [0.0, 0.0, 0.0, 0.0])
    0.5
    """
    y, a = _checked(labels, margins, "margins")
    return _ratio(float(np.sum(y)), float(np.sum(probabilities(a))))


def auc(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Area under the ROC curve, exactly: the share of (positive, negative) pairs in the right order, ties half.

    Parameters
    ----------
    labels : float[n], 0 or 1
    scores : float[n]
        Anything that rises with the probability; infinities are fine, NaN is not.

    Returns
    -------
    float
        Never flipped: below 0.5 the scores order the wrong way round. NaN if all labels are equal.

    Notes
    -----
    (R - P(P+1)/2) / (P N) with R the sum of the positives' mid-ranks, in integers up to the one division.
    O(n log n) time, about 40 bytes an example.

    Examples
    --------
    >>> auc([0, 0, 1, 1], [0.1, 0.4, 0.4, 0.8])
    0.875
    """
    y, s = _checked(labels, scores, "scores")
    positives = int(np.count_nonzero(y))
    negatives = len(y) - positives
    if positives == 0 or negatives == 0:
        return math.nan
    order = np.argsort(s)
    s = s[order]
    begins = np.flatnonzero(np.concatenate(([True], s[1:] != s[:-1])))  # of the groups of equal scores
    ends = np.append(begins[1:], len(s))
    in_group = np.add.reduceat(y[order].astype(np.int64), begins)
    # Ranks begin + 1 .. end have the middle (begin + 1 + end) / 2; twice that is whole. Below 2^63 up to 2^31 examples.
    twice_ranks = int(np.sum(in_group * (begins + 1 + ends)))
    return (twice_ranks - positives * (positives + 1)) / (2 * positives * negatives)


def measure(labels: npt.ArrayLike, margins: npt.ArrayLike) -> Metrics:
    """All metrics of margins against labels, exactly.

    Parameters
    ----------
    labels : float[n], 0 or 1
    margins : float[n]
        Log-odds, not probabilities.

    Returns
    -------
    Metrics

    Examples
    --------
    >>> measure([0, 0, 1, 1], [-2.0, 0.0, 0.0, 2.0]).auc
    0.875
    """
    y, a = _checked(labels, margins, "margins")
    return Metrics(
        logloss=logloss(y, a),
        auc=auc(y, a),
        calibration=calibration(y, a),
        examples=len(y),
        base_rate=float(np.mean(y)) if len(y) else math.nan,
    )


class Progress:
    """Metrics of a stream, in constant memory: float64 sums and a histogram of margins per class.

    Examples of a histogram bin count as ties, so the AUC is off by at most ``auc_error``:

        sum over bins of P_b N_b / (2 P N)

    because only the P_b N_b pairs inside a bin may be ordered either way. The bins are 1/256 wide on margins
    from -16 to 16; two accumulators of parts of a stream merge into the accumulator of the whole.

    Examples
    --------
    >>> seen = Progress()
    >>> loss = seen.add([0, 0, 1, 1], [-2.0, 0.0, 0.0, 2.0])
    >>> seen.auc, seen.examples
    (0.875, 4)
    """

    __slots__ = ("_counts", "examples", "loss_sum", "positives", "probability_sum")

    def __init__(self) -> None:
        self.examples = 0
        self.positives = 0
        self.loss_sum = 0.0
        self.probability_sum = 0.0
        self._counts = np.zeros(2 * _BINS, np.int64)  # negatives, then positives

    def add(self, labels: npt.ArrayLike, margins: npt.ArrayLike, *, sums: tuple[float, float] | None = None) -> float:
        """Count a batch of examples.

        Parameters
        ----------
        labels : float[n], 0 or 1
        margins : float[n]
            As predicted before the batch was learned from, if the result is to be progressive.
        sums : (float, float), optional
            The sums of the batch's losses and of its probabilities, where they are known already.

        Returns
        -------
        float
            The sum of the batch's losses.
        """
        y, a = _checked(labels, margins, "margins")
        loss, probability = sums or (float(np.sum(_losses(y, a))), float(np.sum(probabilities(a))))
        bins = np.clip((a + _LIMIT) * _BINS_PER_UNIT, 0, _BINS - 1).astype(np.int64)
        self._counts += np.bincount(bins + _BINS * y.astype(np.int64), minlength=2 * _BINS)
        self.examples += len(y)
        self.positives += int(np.count_nonzero(y))
        self.loss_sum += loss
        self.probability_sum += probability
        return loss

    def merge(self, other: Progress) -> None:
        """Add what ``other`` counted, as if its examples had been added here."""
        self.examples += other.examples
        self.positives += other.positives
        self.loss_sum += other.loss_sum
        self.probability_sum += other.probability_sum
        self._counts += other._counts

    @property
    def logloss(self) -> float:
        """Mean loss so far; NaN before the first example."""
        return _ratio(self.loss_sum, self.examples)

    @property
    def calibration(self) -> float:
        """Sum of labels over sum of predicted probabilities so far."""
        return _ratio(self.positives, self.probability_sum)

    @property
    def auc(self) -> float:
        """AUC with the examples of a bin as ties; NaN while there is one class only."""
        pairs = self.positives * (self.examples - self.positives)
        negative, positive = self._counts[:_BINS], self._counts[_BINS:]
        below = np.cumsum(negative) - negative
        return _ratio(float(np.sum(positive * (below + 0.5 * negative))), pairs)

    @property
    def auc_error(self) -> float:
        """The most that ``auc`` differs from the exact one."""
        pairs = self.positives * (self.examples - self.positives)
        return _ratio(float(np.sum(0.5 * self._counts[:_BINS] * self._counts[_BINS:])), pairs)

    def metrics(self) -> Metrics:
        """Return the numbers so far; the AUC is the one within ``auc_error``."""
        return Metrics(
            logloss=self.logloss,
            auc=self.auc,
            calibration=self.calibration,
            examples=self.examples,
            base_rate=_ratio(self.positives, self.examples),
        )


def _losses(y: Floats, a: Floats) -> Floats:
    # max(a, 0) - a y without its inf - inf: the margin towards the wrong class, if it points there.
    return np.asarray(np.maximum(np.where(y != 0, -a, a), 0.0) + np.log1p(np.exp(-np.abs(a))))


def _entropy(q: float) -> float:
    return -q * math.log(q) - (1 - q) * math.log1p(-q) if 0 < q < 1 else 0.0


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def _checked(labels: npt.ArrayLike, scores: npt.ArrayLike, what: str) -> tuple[Floats, Floats]:
    """Return both as float64[n], or say which of them is wrong and where."""
    y: npt.NDArray[Any] = np.asarray(labels)
    s = np.asarray(scores, np.float64)
    if y.ndim != 1 or s.shape != y.shape:
        raise ValueError(f"labels {y.shape} and {what} {s.shape}: pass two one-dimensional arrays of one length")
    wrong = np.flatnonzero((y != 0) & (y != 1))
    if len(wrong):
        raise ValueError(f"label {y[wrong[0]]!r} at {wrong[0]} ({len(wrong)} of {len(y)}): labels are 0 or 1")
    missing = np.flatnonzero(np.isnan(s))
    if len(missing):
        raise ValueError(f"{what} at {missing[0]} is NaN ({len(missing)} of {len(s)}): NaN has no order")
    return y.astype(np.float64), s
