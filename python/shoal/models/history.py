"""The history of a model: a learning curve of bounded length, a summary of every pass and every fit.

    batches      |  |  |  |  |  |  |  |  |  |  |  |
    points       |-----|-----|-----|-----|-----|--|      one window each; all windows of a pass but its last have one
    length

A window is one batch at first. When there are more than ``MOST_POINTS`` points, neighbours are merged and later windows
are twice as long: a curve has between ``MOST_POINTS / 2`` and ``MOST_POINTS`` points, for data of any length.

Threads: a ``Curve`` belongs to the thread that fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from shoal.metrics import Curves, GroupedAUC, Metrics, StreamMetrics
from shoal.metrics.exact import ratio
from shoal.models.plan import Plan

MOST_POINTS = 256
_LONGEST_WINDOW = 1 << 40  # batches


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The learning curve at the end of a window of examples.

    Attributes
    ----------
    examples : int
        Examples that the model had learned from by then, over all its fits.
    pass_number : int
        The pass over the data that the window lies in, from 1, over all its fits.
    window_examples : int
        Examples of the window.
    window_logloss : float
        Mean loss of the window's examples by their weights, each predicted before it was learned from.
    logloss : float
        The same of all examples of the pass so far.
    auc : float
        AUC of all examples of the pass so far, within `shoal.metrics.Accumulator.auc_error`; NaN with one class only,
        and of several classes.
    window_weight : float or None
        Sum of the weights of the window's examples; None if each weighs 1.
    accuracy : float or None
        Of several classes: share of right predictions among all examples of the pass so far.
    """

    examples: int
    pass_number: int
    window_examples: int
    window_logloss: float
    logloss: float
    auc: float
    window_weight: float | None = None
    accuracy: float | None = None


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over the data.

    Attributes
    ----------
    number : int
        From 1, over all fits of the model.
    metrics : Metrics
        Metrics of each batch, predicted before it was learned from. In the first pass this is an unbiased estimate
        (progressive validation); in later passes the model has already learned from the examples.
    auc_error : float
        Upper bound of the error of ``metrics.auc``; NaN of several classes.
    seconds : float
        Wall-clock time, including reading, without validation.
    skipped : int
        Malformed lines that the reader skipped.
    complete : bool
        False if the pass was interrupted.
    valid : Metrics or None
        Of the validation data after the pass.
    curves : Curves or None
        Calibration by decile and ROC curve of the validation data after the pass, as `shoal.tools.report` draws them;
        None of several classes.
    features : int
        Total number of features of the pass's examples; 0 of models that were saved before this was counted.
    grouped : GroupedAUC or None
        AUC within groups of the validation data, if it has groups.
    unmeasured : int
        Examples that ``metrics.auc`` lacks: a worker that had predicted them died before it had sent its histogram.
    repeated : int
        Examples that the model may have learned from twice, under SSP and ASP: they were in flight when a worker died,
        or when the checkpoint was written that the fit was resumed from.
    late : int
        Examples of a topic whose events were older than the latest one before them in their partition by more than the
        ``lateness`` of the reader. They are learned from all the same.
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
    unmeasured: int = 0
    repeated: int = 0
    late: int = 0


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A call of `fit`: the data that a model learned from, and the settings.

    Attributes
    ----------
    first_pass : int
        Number of its first pass; the next fit's first pass follows its last one.
    plan : Plan
        Epochs, shuffling, sampling, early stopping.
    data, valid : str or None
        The files, of a reader.
    batch_size : int or None
        Examples of a batch, of a reader.
    threads : int
        Number of threads of the store, which does not affect results.
    source, valid_source : dict or None
        `shoal.data.Reader.fingerprint` of the readers, in a fit with checkpoints.
    consistency : str
        Of the cluster, as `shoal.connect` takes it; empty in one process, and before it was recorded.
    irregular : str
        Why the fit is no function of its data and its settings: a worker was lost, say; empty: nothing is known.
    """

    first_pass: int
    plan: Plan
    data: str | None
    valid: str | None
    batch_size: int | None
    threads: int
    source: dict[str, Any] | None = None
    valid_source: dict[str, Any] | None = None
    consistency: str = ""
    irregular: str = ""

    def settings(self) -> list[tuple[str, str]]:
        """Return the settings as names and values to be printed; files are not among them."""
        size = "unknown" if self.batch_size is None else f"{self.batch_size:,} examples"
        return [("batch size", size), *self.plan.settings(), ("threads", f"{self.threads:,}")]


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a model's training.

    Attributes
    ----------
    points : tuple of Point
        The learning curve.
    passes : tuple of Pass
    best_pass : int or None
        If the last `fit` stopped early: the pass whose weights the model has. Later passes stay in the history.
    fits : tuple of Fit
        The settings of each `fit`; none of models that were saved before they were tracked.
    """

    points: tuple[Point, ...] = ()
    passes: tuple[Pass, ...] = ()
    best_pass: int | None = None
    fits: tuple[Fit, ...] = ()


class Windows(msgspec.Struct, frozen=True, kw_only=True):
    """The length of windows, in batches, and the sums of the current one."""

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
        self, examples: int, weight: float, loss: float, *, total: int, pass_number: int, progress: StreamMetrics
    ) -> None:
        """Count a batch with these sums of weights and of losses; ``progress`` is the pass's, including the batch."""
        self._batches += 1
        self._examples += examples
        self._weight += weight
        self._loss += loss
        if self._batches == self._batches_per_window:
            self.close_window(total=total, pass_number=pass_number, progress=progress)

    def close_window(self, *, total: int, pass_number: int, progress: StreamMetrics) -> None:
        """End the current window, unless it is empty."""
        if self._examples > 0:
            self._points.append(
                Point(
                    examples=total,
                    pass_number=pass_number,
                    window_examples=self._examples,
                    window_logloss=ratio(self._loss, self._weight),
                    logloss=progress.logloss,
                    auc=progress.auc,
                    accuracy=progress.accuracy,
                    window_weight=None if self._weight == self._examples else self._weight,
                )
            )
        self.windows = Windows(batches_per_window=self._batches_per_window)
        if len(self._points) > MOST_POINTS:
            self._points = merged(self._points)
            # One of a pass never merges with others: with more passes than points windows grow no further.
            self._batches_per_window = min(2 * self._batches_per_window, _LONGEST_WINDOW)


def merged(points: list[Point]) -> list[Point]:
    """Merge neighbours two by two; windows of different passes stay apart."""
    out: list[Point] = []
    alone = False  # whether the last point of `out` waits for a neighbour
    for point in points:
        if alone and out[-1].pass_number == point.pass_number:
            first = out.pop()
            examples = first.window_examples + point.window_examples
            weights = [_weight(first), _weight(point)]
            # The loss of a window of weight 0 is NaN.
            losses = [one.window_logloss * w for one, w in zip((first, point), weights, strict=True) if w > 0]
            out.append(
                Point(
                    examples=point.examples,
                    pass_number=point.pass_number,
                    window_examples=examples,
                    window_logloss=ratio(sum(losses), sum(weights)),
                    logloss=point.logloss,
                    auc=point.auc,
                    accuracy=point.accuracy,
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


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """The best pass of a fit with early stopping so far.

    ``gain`` is `Plan.gain`, None before the first pass; ``number`` that of the pass, ``examples`` those learned from.
    """

    gain: float | None = None
    number: int = 0
    examples: int = 0


class Record:
    """The mutable record of a model while it learns."""

    def __init__(
        self,
        history: History | None = None,
        examples: int = 0,
        form: str | None = None,
        schema: Mapping[str, Any] | None = None,
        classes: tuple[Any, ...] | None = None,
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
        self.classes = classes  # the labels of y that are 0, 1, ...
        self.columns = columns  # of the array that the model has learned from
        self.best = Best()  # of the fit that is under way
        self.event_time = 0  # of the latest event of a topic, in milliseconds since 1970; 0: none is known

    @property
    def history(self) -> History:
        """The current history."""
        return History(
            points=self.curve.points, passes=tuple(self.passes), best_pass=self.best_pass, fits=tuple(self.fits)
        )


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A record between two batches, for other processes."""

    history: History
    windows: Windows
    best: Best
    examples: int
    format: str | None
    schema: dict[str, Any]
    classes: tuple[Any, ...] | None
    columns: int | None

    @classmethod
    def of(cls, record: Record) -> Self:
        """Describe a record."""
        return cls(
            history=record.history,
            windows=record.curve.windows,
            best=record.best,
            examples=record.examples,
            format=record.format,
            schema=record.schema,
            classes=record.classes,
            columns=record.columns,
        )

    def give(self, record: Record) -> None:
        """Make a record this one."""
        self.give_curve(record)
        history = self.history
        record.passes, record.fits, record.best_pass = list(history.passes), list(history.fits), history.best_pass
        record.best, record.examples = self.best, self.examples
        record.format, record.schema = self.format, dict(self.schema)
        record.classes, record.columns = self.classes, self.columns

    def give_curve(self, record: Record) -> None:
        """Make the curve of a record this one's."""
        record.curve = Curve(self.history.points)
        record.curve.windows = self.windows
