"""Checks of the arguments of metrics: labels, scores and weights, as float64 arrays of one length."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def as_floats(values: npt.ArrayLike, what: str) -> Floats:
    """Return numbers as float64, or raise TypeError, which names the argument."""
    try:
        given: npt.NDArray[Any] = np.asarray(values)
        if given.dtype.kind in "biufO":
            return np.asarray(given, np.float64)
        got = f"an array of {given.dtype}"
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        got = f"{type(values).__name__} ({error})"
    raise TypeError(f"{what} are {got}: pass real numbers; of a tensor of torch, tensor.detach().float().numpy()")


def as_labels(labels: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return labels as an array, or raise TypeError."""
    try:
        return np.asarray(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"labels are {type(labels).__name__} ({error}): pass a one-dimensional array") from None


def checked(
    labels: npt.ArrayLike, scores: npt.ArrayLike, weights: npt.ArrayLike | None, what: str
) -> tuple[Floats, Floats, Floats | None]:
    """Return all as float64[n], or raise an error that names the wrong one and its position."""
    y, s = as_labels(labels), as_floats(scores, what)
    if y.ndim != 1 or s.shape != y.shape:
        raise ValueError(f"labels {y.shape} and {what} {s.shape}: pass two one-dimensional arrays of one length")
    wrong = np.flatnonzero((y != 0) & (y != 1))
    if len(wrong):
        first = y[wrong[:1]].tolist()[0]
        raise ValueError(f"label {first!r} at {wrong[0]} ({len(wrong)} of {len(y)}): labels are 0 or 1")
    missing = np.flatnonzero(np.isnan(s))
    if len(missing):
        raise ValueError(f"{what} at {missing[0]} is NaN ({len(missing)} of {len(s)}): NaN has no order")
    return y.astype(np.float64), s, None if weights is None else checked_weights(weights, len(y))


def checked_weights(weights: npt.ArrayLike, n: int) -> Floats:
    """Return weights of ``n`` examples as float64[n]."""
    w = as_floats(weights, "weights")
    if w.shape != (n,):
        raise ValueError(f"labels ({n},) and weights {w.shape}: pass one weight for each example, or None")
    wrong = np.flatnonzero(~((w >= 0) & (w < np.inf)))
    if len(wrong):
        raise ValueError(
            f"weight {float(w[wrong[0]])!r} at {wrong[0]} ({len(wrong)} of {n}): weights are finite and not negative"
        )
    return w
