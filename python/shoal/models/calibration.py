"""Calibration: from the margins of a model to probabilities that match observed frequencies.

    held-out margins, labels, weights --> platt(...) or isotonic(...) --> apply(margins) --> probabilities

Platt scaling is a logistic curve with a slope and an intercept: smooth, suited to little data.
Isotonic regression is the best non-decreasing function (pool adjacent violators): for much data.

    isotonic, linear between blocks, level within them and beyond the ends

      p |                    o------o......
        |          o---o....'
        |   ..o---'
        +------------------------------------ margin

Calibrate on examples that the model has not learned from. An example of weight v counts as v examples.

Threads: calibrations are immutable. Fitting blocks: O(n log n) time for the sort, about 60 bytes an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.metrics import probabilities

Floats = npt.NDArray[np.float64]

_NEWTON_STEPS = 100  # about ten suffice; a line search may halve some
_DAMPING = 1e-12  # of the Hessian's diagonal, as in Lin, Lin & Weng: margins that are all equal leave it singular
_SUFFICIENT = 1e-4  # share of the decrease that the slope predicts (Armijo)
_SHORTEST_STEP = 1e-10
_FLAT = 1e-12  # a gradient this small, for each unit of weight, is 0

# While a pass over all blocks pools this share of them, passes are faster; the remaining blocks are pooled by a stack.
_WORTH_A_PASS = 0.1


class Platt(msgspec.Struct, frozen=True):
    """Probability 1 / (1 + e^-(slope x margin + intercept)).

    Examples
    --------
    >>> import numpy as np
    >>> Platt(0.5, 0.0).apply(np.array([0.0, 2.0])).round(4).tolist()
    [0.5, 0.7311]
    """

    # slope, intercept: Finite. A slope of 1 and an intercept of 0 change nothing.
    slope: float
    intercept: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.slope) and np.isfinite(self.intercept)):
            raise ValueError(f"slope is {self.slope}, intercept {self.intercept}: pass finite numbers")

    def margins(self, margins: Floats) -> Floats:
        """Compute calibrated margins (log-odds) float64[n] from a model's margins float64[n]."""
        return self.slope * np.asarray(margins, np.float64) + self.intercept

    def apply(self, margins: Floats) -> Floats:
        """Compute probabilities float64[n] from a model's margins float64[n]."""
        return probabilities(self.margins(margins))

    def __str__(self) -> str:
        return f"Platt scaling, slope {self.slope:.4f}, intercept {self.intercept:.4f}"

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads; JSON keeps every bit of it."""
        return {"kind": "platt", "slope": self.slope, "intercept": self.intercept}


class Isotonic(msgspec.Struct, frozen=True, eq=False):
    """A non-decreasing function of the margin: linear between its points, constant beyond the first and the last.

    Examples
    --------
    >>> import numpy as np
    >>> Isotonic(np.array([-1.0, 1.0]), np.array([0.2, 0.6])).apply(np.array([-9.0, 0.0, 9.0])).round(4).tolist()
    [0.2, 0.4, 0.6]
    """

    # Margins of the points, strictly ascending; at least one.
    at: Floats
    # Non-decreasing, above 0 and below 1.
    probabilities: Floats

    def __post_init__(self) -> None:
        at, p = self.at, self.probabilities
        if at.ndim != 1 or at.shape != p.shape or len(at) == 0:
            raise ValueError(f"got {at.shape} margins and {p.shape} probabilities: pass as many of each, at least one")
        if not (np.all(np.isfinite(at)) and np.all(at[1:] > at[:-1])):
            raise ValueError("the margins of the points are not finite numbers that ascend strictly: sort them")
        if not (np.all((p > 0) & (p < 1)) and np.all(p[1:] >= p[:-1])):
            raise ValueError("the probabilities of the points leave (0, 1) or fall: fit them with isotonic()")

    def margins(self, margins: Floats) -> Floats:
        """Compute calibrated margins (log-odds) float64[n] from a model's margins float64[n]."""
        return _core.isotonic_margins(np.ascontiguousarray(margins, np.float64), self.at, self.probabilities)

    def apply(self, margins: Floats) -> Floats:
        """Compute probabilities float64[n] from a model's margins float64[n]."""
        return probabilities(self.margins(margins))

    def __str__(self) -> str:
        return f"isotonic regression of {len(self.at):,} points"

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads; JSON keeps every bit of it."""
        return {"kind": "isotonic", "at": self.at.tolist(), "probabilities": self.probabilities.tolist()}


Calibration = Platt | Isotonic


def from_dict(described: Mapping[str, Any]) -> Calibration:
    """Make the calibration that `Platt.to_dict` or `Isotonic.to_dict` described."""
    kind = described.get("kind")
    try:
        if kind == "platt":
            return Platt(float(described["slope"]), float(described["intercept"]))
        if kind == "isotonic":
            return Isotonic(
                np.array(described["at"], np.float64, ndmin=1),
                np.array(described["probabilities"], np.float64, ndmin=1),
            )
    except (KeyError, TypeError) as error:
        raise ValueError(f"this {kind} calibration cannot be read: {error!r}") from None
    raise ValueError(f"calibration {kind!r} is not known: it is 'platt' or 'isotonic'")


def platt(margins: Floats, labels: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> Platt:
    """Fit slope and intercept by maximum likelihood, with Platt's targets instead of 1 and 0.

    Targets are (N1 + 1) / (N1 + 2) for label 1 and 1 / (N0 + 2) for label 0, N the weight of a label: Platt,
    Probabilistic outputs for support vector machines, 1999. Newton's method with a line search, as in Lin, Lin & Weng,
    A note on Platt's probabilistic outputs, Machine Learning 68, 2007, on centred and scaled margins.
    """
    a, positive, v = _checked(margins, labels, weights)
    n1 = float(np.sum(v[positive]))
    n0 = float(np.sum(v[~positive]))
    target = np.where(positive, (n1 + 1) / (n1 + 2), 1 / (n0 + 2))
    total = n0 + n1
    # Halves first: neither the center nor the half-width overflows at the largest floats.
    center = float(a.min() / 2 + a.max() / 2)
    half_width = float(np.max(np.abs(a / 2 - center / 2))) * 2
    z = (a - center) / half_width if np.isfinite(half_width) and half_width > 0 else np.zeros_like(a)
    slope, intercept = 0.0, float(np.log((n1 + 1) / (n0 + 1)))

    def loss_at(s: float, c: float) -> float:
        m = s * z + c
        return float(np.sum(v * (np.maximum(m, 0) - m * target + np.log1p(np.exp(-np.abs(m))))))

    loss = loss_at(slope, intercept)
    for _ in range(_NEWTON_STEPS):
        p = probabilities(slope * z + intercept)
        residual = v * (p - target)
        gs, gc = float(np.sum(residual * z)), float(np.sum(residual))
        if max(abs(gs), abs(gc)) <= _FLAT * total:
            break
        curve = v * p * (1 - p)
        damping = _DAMPING * total
        hss = float(np.sum(curve * z * z)) + damping
        hcc = float(np.sum(curve)) + damping
        hsc = float(np.sum(curve * z))
        det = hss * hcc - hsc * hsc
        ds, dc = -(hcc * gs - hsc * gc) / det, -(hss * gc - hsc * gs) / det
        promised = gs * ds + gc * dc
        step = 1.0
        while step >= _SHORTEST_STEP:
            tried = loss_at(slope + step * ds, intercept + step * dc)
            if tried <= loss + _SUFFICIENT * step * promised:
                break
            step /= 2
        else:
            break  # the remaining decrease is within rounding
        slope, intercept, loss = slope + step * ds, intercept + step * dc, tried
    if half_width == 0 or not np.isfinite(half_width):
        return Platt(0.0, intercept)
    return Platt(slope / half_width, intercept - slope * (center / half_width))


def isotonic(margins: Floats, labels: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> Isotonic:
    """Fit the non-decreasing function of least weighted squared error.

    Pool adjacent violators: Ayer et al., Annals of Mathematical Statistics 26, 1955; for calibration Zadrozny & Elkan,
    KDD 2002. Linear after the sort.
    """
    a, positive, v = _checked(margins, labels, weights)
    order = np.argsort(a, kind="stable")
    a, v = a[order], v[order]
    starts = np.flatnonzero(np.concatenate([[True], a[1:] != a[:-1]]))
    at = a[starts]
    total, ones = np.add.reduceat(v, starts), np.add.reduceat(v * positive[order], starts)
    begins, p = _pooled(total, ones)
    ends = np.append(begins[1:], len(at)) - 1
    least = 1.0 / (float(np.sum(v)) + 2.0)
    p = np.clip(p, least, min(1.0 - least, float(np.nextafter(1.0, 0.0))))
    # A block of one margin is one point.
    both = np.stack([begins, ends], axis=1)
    kept = np.stack([np.ones(len(begins), bool), ends > begins], axis=1)
    return Isotonic(at[both[kept]], np.repeat(p, 2)[kept.reshape(-1)])


def _pooled(total: Floats, ones: Floats) -> tuple[npt.NDArray[np.intp], Floats]:
    """Pool neighbours until the means ``ones / total`` rise strictly; return the starts of the blocks, and the means.

    Neighbours whose means do not rise end in one block, in whatever order blocks are pooled, so whole runs of them are
    pooled in one pass. A pass may still pool few (one low mean after a long rise is pooled with one block in each
    pass): then a stack finishes the work, which pools each block once.
    """
    begins = np.arange(len(total))
    while True:
        means = ones / total
        rises = np.concatenate([[True], means[1:] > means[:-1]])
        if rises.all():
            return begins, means
        before = len(begins)
        starts = np.flatnonzero(rises)
        begins, total, ones = begins[starts], np.add.reduceat(total, starts), np.add.reduceat(ones, starts)
        if before - len(begins) < _WORTH_A_PASS * before:
            break
    stack: list[tuple[int, float, float]] = []
    for begin, t, o in zip(begins.tolist(), total.tolist(), ones.tolist(), strict=True):
        while stack and stack[-1][2] / stack[-1][1] >= o / t:
            begin, t, o = stack[-1][0], stack[-1][1] + t, stack[-1][2] + o
            stack.pop()
        stack.append((begin, t, o))
    return np.array([b for b, _, _ in stack], np.intp), np.array([o / t for _, t, o in stack])


def _checked(
    margins: Floats, labels: npt.ArrayLike, weights: npt.ArrayLike | None
) -> tuple[Floats, npt.NDArray[np.bool_], Floats]:
    """Return the margins, a mask of the labels that are 1, and the weights, of examples with a weight above 0."""
    a = np.asarray(margins, np.float64)
    y = np.asarray(labels)
    v = np.ones(a.shape) if weights is None else np.asarray(weights, np.float64)
    if a.ndim != 1 or y.shape != a.shape or v.shape != a.shape:
        raise ValueError(f"margins are {a.shape}, labels {y.shape}, weights {v.shape}: pass one of each for an example")
    _check_all(np.isfinite(a), a, "margins", "finite numbers")
    _check_all((y == 0) | (y == 1), y, "labels", "0 or 1")
    _check_all(np.isfinite(v) & (v >= 0), v, "weights", "finite numbers, 0 or more")
    counts = v > 0
    total = float(np.sum(v))
    if not 0 < total < np.inf:
        raise ValueError(f"{len(a)} examples weigh {total} together: pass held-out examples of some finite weight")
    return a[counts], (y == 1)[counts], v[counts]


def _check_all(good: npt.NDArray[np.bool_], numbers: npt.NDArray[Any], name: str, want: str) -> None:
    if not good.all():
        i = int(np.argmin(good))
        raise ValueError(f"{name} has {numbers[i]} at position {i}: pass {want}")
