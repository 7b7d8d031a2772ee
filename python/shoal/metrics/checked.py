"""Checks of the arguments of metrics: labels, scores and weights, as float64 arrays of one length."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def checked(
    labels: npt.ArrayLike, scores: npt.ArrayLike, weights: npt.ArrayLike | None, what: str
) -> tuple[Floats, Floats, Floats | None]:
    """Return all as float64[n], or raise an error that names the wrong one and its position."""
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
    return y.astype(np.float64), s, None if weights is None else checked_weights(weights, len(y))


def checked_weights(weights: npt.ArrayLike, n: int) -> Floats:
    """Return weights of ``n`` examples as float64[n]."""
    w = np.asarray(weights, np.float64)
    if w.shape != (n,):
        raise ValueError(f"labels ({n},) and weights {w.shape}: pass one weight for each example, or None")
    wrong = np.flatnonzero(~((w >= 0) & (w < np.inf)))
    if len(wrong):
        raise ValueError(
            f"weight {float(w[wrong[0]])!r} at {wrong[0]} ({len(wrong)} of {n}): weights are finite and not negative"
        )
    return w
