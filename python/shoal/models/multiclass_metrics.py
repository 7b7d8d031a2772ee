"""The loss of several classes, and the metrics of models of several classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.metrics.exact import ratio
from shoal.models.learner import Floats

__all__ = ["MulticlassMetrics", "MulticlassPass", "MulticlassSums", "multinomial_losses"]


def multinomial_losses(
    margins: Floats, classes: npt.NDArray[np.intp], weights: npt.NDArray[np.float32] | None = None
) -> tuple[float, Floats]:
    """Compute the cross-entropy of softmax, and its gradient by the margins.

    Parameters
    ----------
    margins : float64[n, K]
    classes : int[n]
        The class of each example.
    weights : float32[n], optional
        Of the examples; default: each is 1.

    Returns
    -------
    float
        Sum of the losses by weight, in nats.
    float64[n, K]
        Each is weight times (p_k - 1 if k is the class, else p_k). That of the class is computed as minus the sum of
        the others, since p_k - 1 would lose it near 1.
    """
    n = len(classes)
    own = margins[np.arange(n), classes]
    # log sum_l e^a_l - a_y = log(1 + sum of others' e^(a_l - a_y)); the largest exponent is taken out first.
    above = margins - own[:, None]
    above[np.arange(n), classes] = -np.inf
    most = np.maximum(above.max(axis=1, initial=-np.inf), 0.0)
    others = np.exp(above - most[:, None])
    rest = others.sum(axis=1)
    whole = np.exp(-most) + rest
    losses = np.where(most > 0, most + np.log(whole), np.log1p(rest))
    slopes: Floats = others / whole[:, None]
    slopes[np.arange(n), classes] = -slopes.sum(axis=1)
    if weights is None:
        return float(losses.sum()), slopes
    return float(losses @ weights.astype(np.float64)), slopes * weights[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MulticlassMetrics:
    """How good the predictions of a model of several classes are.

    Attributes
    ----------
    logloss : float
        Mean of -log p of the examples' classes, in nats, by weight.
    accuracy : float
        Share of the examples whose likeliest class is their own, by weight.
    examples : int
        With none, the other numbers are NaN.
    weight : float
        Sum of the examples' weights.

    Examples
    --------
    >>> print(MulticlassMetrics(logloss=0.3, accuracy=0.9, examples=1000, weight=1000.0))
    logloss 0.300000  accuracy 0.900000  (1,000 examples)
    """

    logloss: float
    accuracy: float
    examples: int
    weight: float

    def __str__(self) -> str:
        return f"logloss {self.logloss:.6f}  accuracy {self.accuracy:.6f}  ({self.examples:,} examples)"


@dataclass(frozen=True, slots=True, kw_only=True)
class MulticlassPass:
    """A pass over the data.

    Attributes
    ----------
    number : int
        From 1, in this fit.
    metrics : MulticlassMetrics
        Of each batch before it was learned from.
    seconds : float
        Wall-clock time without validation.
    skipped : int
        Malformed lines that the reader skipped.
    complete : bool
        False if the pass was interrupted.
    valid : MulticlassMetrics or None
        Of the validation data after the pass.
    """

    number: int
    metrics: MulticlassMetrics
    seconds: float
    skipped: int
    complete: bool
    valid: MulticlassMetrics | None


class MulticlassSums:
    """Sums over examples, of which metrics are made."""

    def __init__(self) -> None:
        self.examples = 0
        self.weight = self._losses = self._right = 0.0

    def add(self, margins: Floats, classes: npt.NDArray[np.intp], weights: npt.NDArray[np.float32] | None) -> None:
        """Count examples whose margins are log-probabilities up to a constant of each example."""
        loss, _ = multinomial_losses(margins, classes, weights)
        right = margins.argmax(axis=1) == classes
        self.examples += len(classes)
        self.weight += float(len(classes)) if weights is None else float(weights.sum(dtype=np.float64))
        self._losses += loss
        self._right += float(np.count_nonzero(right)) if weights is None else float(right @ weights.astype(np.float64))

    @property
    def logloss(self) -> float:
        """Mean loss by weight."""
        return ratio(self._losses, self.weight)

    @property
    def accuracy(self) -> float:
        """Share of right predictions by weight."""
        return ratio(self._right, self.weight)

    def metrics(self) -> MulticlassMetrics:
        """Return the metrics."""
        return MulticlassMetrics(
            logloss=self.logloss, accuracy=self.accuracy, examples=self.examples, weight=self.weight
        )
