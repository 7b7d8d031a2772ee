"""Tracker: the base of callbacks that write the metrics of a fit.

    progressive/logloss, auc, calibration, examples_per_second    every log_every batches, over examples learned from
    pass/logloss, auc, calibration, normalized_entropy            after every pass, over its examples
    valid/logloss, auc, calibration, normalized_entropy, gauc     after every pass, over the validation data
    rows/NAME                                                     rows of each table, after every pass

Of several classes there is accuracy in place of auc, calibration and normalized_entropy.

The step of every number is the count of examples that the model has learned from. Numbers that are not finite are left
out. Of several workers, worker 0 writes.

Threads: a tracker belongs to the thread that fits.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Self

from shoal.base.scalars import whole
from shoal.metrics import GroupedAUC, Metrics
from shoal.models.callbacks import Callback, FitProgress
from shoal.models.history import Point
from shoal.storage.base import StoragePath

_NAMES = ("logloss", "auc", "calibration", "normalized_entropy", "accuracy")


class Tracker(Callback):
    """Base class of callbacks that write metrics; a subclass defines where they are written.

    A run begins with a fit and ends with it. In a ``with`` block the run ends with the block instead: several fits of
    one model, or a fit and its calibration, make one run.

    Parameters
    ----------
    log_every : int
        Batches between two points of the progressive metrics.
    settings : mapping, optional
        Settings to write in addition to those of the model and the fit.

    Raises
    ------
    ValueError
        ``log_every`` is below 1.
    """

    def __init__(self, log_every: int = 100, settings: Mapping[str, Any] | None = None) -> None:
        self._every = whole("log_every", log_every, 1, "the batches between two points, 1 or more")
        self._more = dict(settings or {})
        self._is_open = False
        self._is_block = False
        self._last: FitProgress | None = None  # of the last fit that ended without an error
        self._saved: StoragePath | None = None
        self._error: BaseException | None = None  # of the last fit

    # ---- defined by a kind of tracker --------------------------------------------------------------------------------

    @abstractmethod
    def begin_run(self, settings: Mapping[str, Any]) -> None:
        """Begin a run, of a fit with these settings."""

    @abstractmethod
    def write(self, examples: int, numbers: Mapping[str, float]) -> None:
        """Write metrics, all finite, after ``examples`` examples."""

    @abstractmethod
    def end_run(self, model: Any, saved: StoragePath | None, error: BaseException | None) -> None:
        """End the run: ``error`` is what has ended its fit, or ``model`` is fitted, and saved in ``saved`` if given."""

    # ---- the run -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._is_block = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_block = False
        self._end(error or self._error)

    def log_fitted(self, model: Any, saved: StoragePath | None = None) -> None:
        """Write a whole run of a model that is fitted already, from its history.

        Parameters
        ----------
        model : Model or ClickModel
        saved : path or URL, optional
            The directory of the model; without it, a tracker that stores models saves the model again.

        Raises
        ------
        ValueError
            The model has no fit in its history.
        """
        if not hasattr(model, "history"):
            raise TypeError(f"model is a {type(model).__name__}: pass the fitted model; shoal.load reads one")
        if not model.history.fits:
            raise ValueError("this model is not fitted yet: call fit")
        progress = FitProgress(model, len(model.history.passes), 0, None)
        self.begin_run({**progress.settings, **self._more})
        for point in model.history.points:
            self._write(point.examples, _named("progressive", point, ("logloss", "auc", "accuracy")))
        examples = 0
        for done in model.history.passes:
            examples += done.metrics.examples
            self._write(examples, _numbers_of(done.metrics, done.valid, done.grouped))
        self._write(model.examples, _rows_of(model))
        self.end_run(model, saved, None)

    def model_saved(self, directory: StoragePath) -> None:
        """Name the directory of the fitted model, so that its files need not be written again; in a ``with`` block."""
        self._saved = directory

    def _end(self, error: BaseException | None) -> None:
        if self._is_open:
            self._is_open = False
            last, saved, self._last, self._saved, self._error = self._last, self._saved, None, None, None
            self.end_run(None if last is None else last.model, saved, error)

    # ---- a fit -------------------------------------------------------------------------------------------------------

    def fit_begins(self, progress: FitProgress) -> None:
        """Begin a run, unless one is open."""
        self._batches = 0
        self._examples, self._time = progress.examples, time.perf_counter()
        self._error = None
        if progress.model.store.rank == 0 and not self._is_open:
            self.begin_run({**progress.settings, **self._more})
            self._is_open = True

    def batch_done(self, progress: FitProgress) -> None:
        """Write the progressive metrics, if they are due."""
        self._batches += 1
        if self._batches % self._every or not self._is_open:
            return
        now = time.perf_counter()
        rate = (progress.examples - self._examples) / max(now - self._time, 1e-9)
        self._examples, self._time = progress.examples, now
        numbers = _named("progressive", progress.metrics, ("logloss", "auc", "calibration", "accuracy"))
        self._write(progress.examples, {**numbers, "progressive/examples_per_second": rate})

    def pass_done(self, progress: FitProgress) -> None:
        """Write the metrics of the pass, and the numbers of rows."""
        if not self._is_open:
            return
        numbers = _numbers_of(progress.metrics, progress.valid, progress.grouped)
        self._write(progress.examples, numbers | _rows_of(progress.model))
        self._examples, self._time = progress.examples, time.perf_counter()

    def fit_ends(self, progress: FitProgress, error: BaseException | None) -> None:
        """End the run, unless it is that of a ``with`` block."""
        self._error = error
        self._last = progress if error is None else None
        if not self._is_block:
            self._end(error)

    def _write(self, examples: int, numbers: Mapping[str, float]) -> None:
        self.write(examples, {name: number for name, number in numbers.items() if math.isfinite(number)})


def _numbers_of(metrics: Metrics, valid: Metrics | None, grouped: GroupedAUC | None) -> dict[str, float]:
    numbers = _named("pass", metrics, _NAMES)
    if valid is not None:
        numbers |= _named("valid", valid, _NAMES)
    if grouped is not None:
        numbers["valid/gauc"] = grouped.gauc
    return numbers


def _named(group: str, metrics: Metrics | Point, names: Iterable[str]) -> dict[str, float]:
    """Return numbers of metrics by the names under which they are written; those that it has."""
    found = {f"{group}/{name}": getattr(metrics, name) for name in names}
    return {name: float(value) for name, value in found.items() if value is not None}


def _rows_of(model: Any) -> dict[str, float]:
    return {f"rows/{table.name}": float(len(table)) for table in model.tables}
