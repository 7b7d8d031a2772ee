"""The history of a model: a learning curve of bounded length, a summary of every pass and every fit.

    batches      |  |  |  |  |  |  |  |  |  |  |  |
    points       |-----|-----|-----|-----|-----|--|      one window each; all windows of a pass but its last have one
    length

A window starts out as one batch. When there are more than ``MOST_POINTS`` points, neighbours are merged and windows
are twice as long from then on: a curve has between half as many and as many points, for data of any length.

Threads: a ``Curve`` belongs to the thread that fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.metrics import Accumulator, Curves, GroupedAUC, Metrics
from shoal.metrics.exact import ratio
from shoal.models.plan import Plan

MOST_POINTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The learning curve at the end of a window of examples.

    Attributes
    ----------
    examples : int
        Examples that the model had learned from by then, in all its life.
    pass_number : int
        The pass over the data that the window lies in, from 1, in all the model's life.
    window_examples : int
        Examples of the window.
    window_logloss : float
        Mean loss of the window's examples by their weights, each predicted before it was learned from.
    logloss : float
        The same of all examples of the pass so far.
    auc : float
        AUC of all examples of the pass so far, within `shoal.metrics.Accumulator.auc_error`; NaN with one class only.
    window_weight : float or None
        Sum of the weights of the window's examples; None where each weighs 1.
    """

    examples: int
    pass_number: int
    window_examples: int
    window_logloss: float
    logloss: float
    auc: float
    window_weight: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass over the data.

    Attributes
    ----------
    number : int
        From 1, in all the model's life.
    metrics : Metrics
        Of each batch as predicted before it was learned from. In the first pass that is an honest estimate
        (progressive validation); later passes have seen the examples before.
    auc_error : float
        The most that ``metrics.auc`` is off.
    seconds : float
        Wall-clock time, reading included, validation not.
    skipped : int
        Malformed lines that the reader left out.
    complete : bool
        False if the pass was interrupted.
    valid : Metrics or None
        Of the validation data after the pass.
    curves : Curves or None
        Calibration by decile and ROC curve of the validation data after the pass: what `shoal.report` draws.
    features : int
        Features of the pass's examples, all together; 0 of models that were saved before this was counted.
    grouped : GroupedAUC or None
        AUC within groups of the validation data, where there are groups.
    """

    number: int
    metrics: Metrics
    auc_error: float
    seconds: float
    skipped: int
    complete: bool
    valid: Metrics | None
    curves: Curves | None = None
    features: int = 0
    grouped: GroupedAUC | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A call of `fit`: from what a model learned, and how.

    Attributes
    ----------
    first_pass : int
        Number of its first pass; the next fit's first pass is behind its last one.
    plan : Plan
        Epochs, shuffling, sampling, early stopping.
    data, valid : str or None
        The files, of a reader.
    batch_size : int or None
        Examples of a batch, of a reader.
    threads : int
        Of the store. They change no result.
    source, valid_source : dict or None
        `shoal.Reader.fingerprint` of the readers, in a fit with checkpoints.
    """

    first_pass: int
    plan: Plan
    data: str | None
    valid: str | None
    batch_size: int | None
    threads: int
    source: dict[str, Any] | None = None
    valid_source: dict[str, Any] | None = None

    def settings(self) -> list[tuple[str, str]]:
        """Return the settings as names and values to be printed; files are not among them."""
        size = "unknown" if self.batch_size is None else f"{self.batch_size:,} examples"
        return [("batch size", size), *self.plan.settings(), ("threads", f"{self.threads:,}")]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All that a model recorded while it learned.

    Attributes
    ----------
    points : tuple of Point
        The learning curve.
    passes : tuple of Pass
    best_pass : int or None
        Where the last `fit` stopped early: the pass whose weights the model has. Later passes are in the history all
        the same.
    fits : tuple of Fit
        The settings of each `fit`; none of models that were saved before they were tracked.
    """

    points: tuple[Point, ...] = ()
    passes: tuple[Pass, ...] = ()
    best_pass: int | None = None
    fits: tuple[Fit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """How long windows are, in batches, and what is in the current one."""

    batches_per_window: int = 1
    batches: int = 0
    examples: int = 0
    weight: float = 0.0
    loss: float = 0.0


class Curve:
    """The learning curve of one model while it grows."""

    def __init__(self, points: tuple[Point, ...]) -> None:
        self._points = list(points)
        self.windows = Windows()

    @property
    def windows(self) -> Windows:
        """The state of the current window; set when a fit is resumed within it."""
        return Windows(
            batches_per_window=self._batches_per_window,
            batches=self._batches,
            examples=self._examples,
            weight=self._weight,
            loss=self._loss,
        )

    @windows.setter
    def windows(self, windows: Windows) -> None:
        self._batches_per_window = windows.batches_per_window
        self._batches = windows.batches
        self._examples = windows.examples
        self._weight = windows.weight
        self._loss = windows.loss

    @property
    def points(self) -> tuple[Point, ...]:
        """The points so far."""
        return tuple(self._points)

    def add(
        self, examples: int, weight: float, loss: float, *, total: int, pass_number: int, progress: Accumulator
    ) -> None:
        """Count a batch with these sums of weights and of losses; ``progress`` is the pass's, the batch included."""
        self._batches += 1
        self._examples += examples
        self._weight += weight
        self._loss += loss
        if self._batches == self._batches_per_window:
            self.close_window(total=total, pass_number=pass_number, progress=progress)

    def close_window(self, *, total: int, pass_number: int, progress: Accumulator) -> None:
        """End the current window, if there is anything in it."""
        if self._examples > 0:
            self._points.append(
                Point(
                    examples=total,
                    pass_number=pass_number,
                    window_examples=self._examples,
                    window_logloss=ratio(self._loss, self._weight),
                    logloss=progress.logloss,
                    auc=progress.auc,
                    window_weight=None if self._weight == self._examples else self._weight,
                )
            )
        self.windows = Windows(batches_per_window=self._batches_per_window)
        if len(self._points) > MOST_POINTS:
            self._points = merged(self._points)
            self._batches_per_window *= 2


def merged(points: list[Point]) -> list[Point]:
    """Merge neighbours two by two; windows of different passes stay apart."""
    out: list[Point] = []
    alone = False  # whether the last point of `out` waits for a neighbour
    for point in points:
        if alone and out[-1].pass_number == point.pass_number:
            first = out.pop()
            examples = first.window_examples + point.window_examples
            weights = [_weight(first), _weight(point)]
            # A window of no weight has no loss of its own (NaN).
            losses = [one.window_logloss * w for one, w in zip((first, point), weights, strict=True) if w > 0]
            out.append(
                Point(
                    examples=point.examples,
                    pass_number=point.pass_number,
                    window_examples=examples,
                    window_logloss=ratio(sum(losses), sum(weights)),
                    logloss=point.logloss,
                    auc=point.auc,
                    window_weight=None if sum(weights) == examples else sum(weights),
                )
            )
            alone = False
        else:
            out.append(point)
            alone = True
    return out


def _weight(point: Point) -> float:
    return point.window_examples if point.window_weight is None else point.window_weight


class Record:
    """What a model notes down while it learns."""

    def __init__(
        self,
        history: History | None = None,
        examples: int = 0,
        form: str | None = None,
        schema: Mapping[str, Any] | None = None,
        classes: tuple[Any, Any] | None = None,
        columns: int | None = None,
    ) -> None:
        history = history or History()
        self.curve = Curve(history.points)
        self.passes = list(history.passes)
        self.fits = list(history.fits)
        self.best_pass = history.best_pass
        self.examples = examples
        self.format = form
        self.schema = dict(schema or {})
        self.classes = classes  # what the labels 0 and 1 were called in y
        self.columns = columns  # of the array that was learned from

    @property
    def history(self) -> History:
        """The current history."""
        return History(
            points=self.curve.points, passes=tuple(self.passes), best_pass=self.best_pass, fits=tuple(self.fits)
        )
