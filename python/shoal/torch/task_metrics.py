"""The tasks of a click model measured one by one: those of labels 0 and 1 as all models are, others by their errors.

Threads: no state.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.base.plural import counted
from shoal.config import Task
from shoal.metrics import Metrics
from shoal.metrics.exact import measure, probabilities, ratio
from shoal.models.learner import Floats
from shoal.torch.losses import OF_NUMBERS, name_of


class RegressionMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The errors of predictions of a number.

    Attributes
    ----------
    mse, mae : float
        Means of the squared and of the absolute errors, by weight.
    calibration : float
        Sum of labels over sum of predictions.
    mean : float
        Mean of the labels.
    examples : int
        Number of measured examples. With none, the other numbers are NaN.
    weight : float
        Sum of their weights.
    """

    mse: float
    mae: float
    calibration: float
    mean: float
    examples: int
    weight: float

    def __str__(self) -> str:
        return (
            f"MSE {self.mse:.6g}  MAE {self.mae:.6g}  calibration {self.calibration:.4f}  "
            f"({counted(self.examples, 'example')}, mean {self.mean:.6g})"
        )


def predicted(task: Task | None, outputs: Floats) -> Floats:
    """Return what a task predicts: probabilities of label 1, or means."""
    name = "bce" if task is None else name_of(task.loss)
    if name in OF_NUMBERS:
        return outputs if name == "mse" else np.exp(outputs)
    return probabilities(outputs)


def measured(
    task: Task | None, parts: Iterable[tuple[Floats, npt.NDArray[np.float32], npt.NDArray[np.float32] | None]]
) -> Metrics | RegressionMetrics:
    """Measure a task on batches of outputs, labels and weights."""
    some = list(parts)
    outputs = np.concatenate([one for one, _, _ in some] or [np.empty(0)])
    labels = np.concatenate([one for _, one, _ in some] or [np.empty(0, np.float32)]).astype(np.float64)
    weighted = any(one is not None for _, _, one in some)
    ones = [np.ones(len(one), np.float32) if weights is None else weights for one, _, weights in some]
    weights = np.concatenate(ones).astype(np.float64) if weighted else np.ones(len(labels))
    if task is None or name_of(task.loss) not in OF_NUMBERS:
        return measure(labels, outputs, weights if weighted else None)
    means = predicted(task, outputs)
    total = float(weights.sum())
    errors = means - labels
    return RegressionMetrics(
        mse=ratio(float(weights @ errors**2), total),
        mae=ratio(float(weights @ np.abs(errors)), total),
        calibration=ratio(float(weights @ labels), float(weights @ means)),
        mean=ratio(float(weights @ labels), total),
        examples=len(labels),
        weight=total,
    )
