"""The loss and the metrics of several classes.

    margins a_k       logarithms of probabilities, up to a constant of each example
    logloss           sum v (log sum_k e^a_k - a_y) / sum v      y the example's class, v its weight; nats
    accuracy          sum v [y = argmax_k a_k] / sum v

Threads: functions are pure; an accumulator belongs to one thread at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.exact_sum import ExactSum
from shoal.base.scalars import whole
from shoal.metrics.checked import Floats, as_floats, as_labels, checked_weights
from shoal.metrics.exact import Metrics, ratio, weighted_sum
from shoal.metrics.stream import REMEDY, StreamMetrics, check_described, whole_number

_VERSION = 1
_SUMS = ("weight", "loss", "right")


def checked_classes(labels: npt.ArrayLike, classes: int) -> npt.NDArray[np.intp]:
    """Return labels as numbers of classes, int[n]."""
    y = as_labels(labels)
    if y.ndim != 1 or y.dtype.kind not in "biuf":
        raise ValueError(f"labels {y.shape} of {y.dtype}: pass a one-dimensional array of numbers")
    whole = y.dtype.kind in "iu" or bool(np.all(y == np.floor(y)))
    if len(y) and not (whole and y.min() >= 0 and y.max() < classes):
        bad = np.flatnonzero(~((y >= 0) & (y < classes) & (y == np.floor(y))))
        raise ValueError(
            f"label {y[bad[0]]} at {bad[0]} ({len(bad)} of {len(y)}): labels are numbers of classes, 0 to {classes - 1}"
        )
    return y.astype(np.intp)


def multinomial_losses(
    margins: Floats, classes: npt.NDArray[np.intp], weights: Floats | None = None
) -> tuple[float, Floats]:
    """Compute the cross-entropy of softmax, and its gradient by the margins."""
    losses, others, whole = _losses(margins, classes)
    slopes: Floats = others / whole[:, None]
    slopes[np.arange(len(classes)), classes] = -slopes.sum(axis=1)
    if weights is None:
        return float(np.sum(losses)), slopes
    return weighted_sum(losses, weights), slopes * weights[:, None]


def _losses(margins: Floats, classes: npt.NDArray[np.intp]) -> tuple[Floats, Floats, Floats]:
    """Compute the loss of each example, and e^a_k of the other classes and of all, over a common factor."""
    each = np.arange(len(classes))
    # log sum_l e^a_l - a_y = log(1 + sum of others' e^(a_l - a_y)); the largest exponent is taken out first.
    above = margins - margins[each, classes][:, None]
    above[each, classes] = -np.inf
    most = np.maximum(above.max(axis=1, initial=-np.inf), 0.0)
    others = np.exp(above - most[:, None])
    rest = others.sum(axis=1)
    whole = np.exp(-most) + rest
    return np.where(most > 0, most + np.log(whole), np.log1p(rest)), others, whole


def _checked_losses(margins: Floats, classes: npt.NDArray[np.intp]) -> Floats:
    """Compute the loss of each example: infinite where its class has margin -inf, which is probability 0."""
    own = margins[np.arange(len(classes)), classes]
    bad = np.flatnonzero(
        np.isnan(margins).any(axis=1) | (margins == np.inf).any(axis=1) | ~np.isfinite(margins).any(axis=1)
    )
    if len(bad):
        raise ValueError(
            f"margins {margins[bad[0]].tolist()} at {bad[0]} ({len(bad)} of {len(classes)}) have no softmax: pass "
            "numbers or -inf, not all -inf"
        )
    possible = own > -np.inf
    losses: Floats = np.full(len(classes), np.inf)
    losses[possible] = _losses(margins[possible], classes[possible])[0]
    return losses


def _is_right(margins: Floats, classes: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Return whether the first class of the greatest margin is the example's own."""
    best = margins.max(axis=1)
    own: npt.NDArray[np.bool_] = margins[np.arange(len(classes)), classes] == best
    if np.count_nonzero(margins == best[:, None]) == len(classes):  # no ties; `argmax` along short rows is slow
        return own
    return np.asarray(margins.argmax(axis=1) == classes)


class MulticlassAccumulator(StreamMetrics):
    """Metrics of a stream of examples of several classes, mergeable, in constant memory.

    Parameters
    ----------
    classes : int
        Number of classes, 2 or more. Only accumulators of equally many classes merge.

    Attributes
    ----------
    examples : int
        How many examples were counted.
    classes : int

    Examples
    --------
    >>> left, right = MulticlassAccumulator(3), MulticlassAccumulator(3)
    >>> loss = left.update([0, 1], [[2.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    >>> loss = right.update([2, 2], [[0.0, 0.0, 1.0], [0.0, 0.0, 3.0]])
    >>> left.merge(right)
    >>> left.accuracy, left.result().examples
    (0.75, 4)
    """

    __slots__ = ("_right", "classes")

    kind: ClassVar[str] = "shoal metrics of several classes"
    quality_name: ClassVar[str] = "accuracy"
    relative_name: ClassVar[str] = "relative log-loss"
    constant: ClassVar[str] = "equal probabilities"

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = whole("classes", classes, 2)
        self._right = ExactSum()

    def update(
        self,
        labels: npt.ArrayLike,
        margins: npt.ArrayLike,
        weights: npt.ArrayLike | None = None,
        *,
        sums: tuple[float, ...] | None = None,
        pool: _core.ThreadPool | None = None,
    ) -> float:
        """Count a batch of examples.

        Parameters
        ----------
        labels : int or float[n]
            Numbers of classes, 0, 1, ...
        margins : float[n, classes]
            Logarithms of probabilities, up to a constant of each example.
        weights : float[n], optional
            Importance of each example, 0 or more; all 1 if not given.
        sums : (float,), optional
            The weighted sum of the batch's losses, where it is known already.
        pool : ThreadPool, optional
            As for `Accumulator`; not used.

        Returns
        -------
        float
            The weighted sum of the batch's losses.

        Raises
        ------
        ValueError
            Lengths differ, a label is not the number of a class, a margin is NaN, a weight is negative or not finite.
            Nothing was counted.
        """
        y, a = checked_classes(labels, self.classes), as_floats(margins, "margins")
        if a.shape != (len(y), self.classes):
            raise ValueError(f"margins {a.shape}: pass float64[{len(y)}, {self.classes}]")
        w = None if weights is None else checked_weights(weights, len(y))
        (loss,) = sums if sums is not None else (weighted_sum(_checked_losses(a, y), w),)
        if math.isnan(loss):
            raise ValueError("the margins of the batch are not numbers (NaN): NaN has no order")
        right = _is_right(a, y)
        self.examples += len(y)
        self._loss.add(loss)
        if w is None:
            self._weight.add(float(len(y)))
            self._right.add(float(np.count_nonzero(right)))
        else:
            self._weight.add(float(np.sum(w)))
            self._right.add(weighted_sum(right.astype(np.float64), w))
        return loss

    def _check_mergeable(self, other: Self) -> None:
        if other.classes != self.classes:
            raise ValueError(
                f"classes are {self.classes} and {other.classes}: only metrics of equally many classes merge"
            )

    def empty(self) -> Self:
        """Return an accumulator that has counted nothing and merges with this one."""
        return type(self)(self.classes)

    @property
    def accuracy(self) -> float:
        """Share of the examples, by weight, whose likeliest class is their own."""
        return ratio(float(self._right), float(self._weight))

    @property
    def quality(self) -> float:
        """The accuracy."""
        return self.accuracy

    @property
    def relative_loss(self) -> float:
        """Log-loss over that of equal probabilities of all classes."""
        return self.logloss / math.log(self.classes)

    def result(self) -> Metrics:
        """Return the metrics so far."""
        return Metrics(
            logloss=self.logloss,
            auc=math.nan,
            calibration=math.nan,
            examples=self.examples,
            base_rate=math.nan,
            weight=self.weight,
            accuracy=self.accuracy,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a JSON value."""
        return {
            "kind": self.kind,
            "version": _VERSION,
            "classes": self.classes,
            "examples": self.examples,
            "sums": {name: exact.to_text() for name, exact in zip(_SUMS, self._sums(), strict=True)},
        }

    @classmethod
    def from_dict(cls, described: dict[str, Any]) -> Self:
        """Make the accumulator that `to_dict` described; equal to the bit.

        Raises
        ------
        ValueError
            It is not a description of such an accumulator, or has an unknown version.
        """
        check_described(described, cls.kind, _VERSION)
        try:
            out = cls(whole_number(described["classes"], "classes"))
            out.examples = whole_number(described["examples"], "examples")
            out._set_sums([ExactSum.from_text(described["sums"][name]) for name in _SUMS])
        except (KeyError, TypeError) as error:
            raise ValueError(f"this description of {cls.kind} lacks something ({error!r}): {REMEDY}") from None
        return out

    def _sums(self) -> tuple[ExactSum, ...]:
        return self._weight, self._loss, self._right

    def _set_sums(self, sums: Sequence[ExactSum]) -> None:
        self._weight, self._loss, self._right = sums
