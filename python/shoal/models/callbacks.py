"""Callbacks: user code that runs during a fit.

    fit_begins   before the first batch
    batch_done   after each batch
    stream_idle  while nothing arrives of a stream
    pass_done    after each pass, measured on valid
    fit_ends     after the last pass, with the weights that are kept; or after an error

A fit calls the callbacks in their order. ``fit_ends`` of a callback follows if its ``fit_begins`` returned.

Threads: called by the thread that fits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from msgspec import structs

from shoal.base.suggest import nearest
from shoal.metrics import GroupedAUC, Metrics, StreamMetrics
from shoal.models.learner import FitObserver, FitState

_log = logging.getLogger(__name__)


class FitProgress:
    """The progress of a fit; valid while the callback runs.

    Attributes
    ----------
    model : Model or ClickModel
        The model, which may be read, saved and evaluated. Its tables have the state after the last batch.
    pass_number : int
        From 1, over all fits of the model; 0 before the first pass.
    batches : int
        Batches that were learned from since the fit began, or was resumed.
    """

    def __init__(
        self,
        model: Any,
        pass_number: int,
        batches: int,
        seen: StreamMetrics | None,
        fit_state: Callable[[], FitState] | None = None,
    ) -> None:
        self.model = model
        self.pass_number = pass_number
        self.batches = batches
        self._seen = seen
        self._fit_state = fit_state

    @property
    def examples(self) -> int:
        """Examples that the model has learned from, over all its fits."""
        return int(self.model.examples)

    def examples_of_all(self) -> int:
        """Return the examples that all workers have learned from; for the worker that leads, within a pass."""
        if self._fit_state is None or self.model.store.num_workers == 1:
            return self.examples
        return self._fit_state().examples

    @property
    def metrics(self) -> Metrics:
        """Progressive metrics of the pass so far: each batch predicted before it was learned from.

        Raises
        ------
        ValueError
            Before the first pass.
        """
        if self._seen is None and not self.model.history.passes:
            raise ValueError("the model has made no pass: there are metrics after a batch or a pass")
        done: Metrics = self.model.history.passes[-1].metrics if self._seen is None else self._seen.result()
        return done

    @property
    def valid(self) -> Metrics | None:
        """Metrics of the validation data; None within a pass, and without such data."""
        if self._seen is not None or not self.model.history.passes:
            return None
        measured: Metrics | None = self.model.history.passes[-1].valid
        return measured

    @property
    def grouped(self) -> GroupedAUC | None:
        """AUC within groups of the validation data; None within a pass, and without groups."""
        if self._seen is not None or not self.model.history.passes:
            return None
        measured: GroupedAUC | None = self.model.history.passes[-1].grouped
        return measured

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the model and of this fit: names such as ``lr.alpha`` and ``epochs``, and plain values."""
        found: dict[str, Any] = {"kind": self.model.kind}
        if (module := getattr(self.model, "module", None)) is not None:
            found["module"] = type(module).__name__
        found |= getattr(self.model, "kind_settings", {})
        for table in self.model.tables:
            found[f"{table.name}.dim"] = table.dim
            found[f"{table.name}.optimizer"] = type(table.optimizer).__name__
            found |= {f"{table.name}.{one.name}": getattr(table.optimizer, one.name) for one in fields(table.optimizer)}
        fit = self.model.history.fits[-1]
        found |= {one.name: getattr(fit.plan, one.name) for one in structs.fields(fit.plan)}
        found |= {name: getattr(fit, name) for name in ("data", "valid", "batch_size", "threads")}
        listed = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in found.items()}
        return {name: value for name, value in listed.items() if found[name] is not None}


class Callback:
    """Base class of callbacks; override the methods you need. A function of one argument is used as `pass_done`.

    An exception ends the fit and reaches the caller of `fit`; the model is consistent, as after Ctrl-C.
    """

    def fit_begins(self, progress: FitProgress) -> None:
        """Run before the first batch of a fit, or of one that is resumed."""

    def batch_done(self, progress: FitProgress) -> None:
        """Run after each batch."""

    def stream_idle(self, progress: FitProgress) -> None:
        """Run while nothing arrives of a stream, some twenty times a second."""

    def pass_done(self, progress: FitProgress) -> None:
        """Run after each pass and its validation."""

    def fit_ends(self, progress: FitProgress, error: BaseException | None) -> None:
        """Run at the end of the fit, with the final weights; ``error`` is the exception that ended it, or None."""


_METHODS = ("fit_begins", "batch_done", "stream_idle", "pass_done", "fit_ends")


def _check_methods(callback: Callback) -> None:
    """Raise TypeError for a method that looks like one of a callback, and that nobody calls, or if there is none."""
    kind = type(callback).__name__
    for name in dir(callback):
        is_alien = name.startswith("on_") and callable(getattr(callback, name))
        if is_alien or (name not in _METHODS and not name.startswith("_") and nearest(name, _METHODS) is not None):
            raise TypeError(f"{kind}.{name} is never called: a callback has {', '.join(_METHODS)}")
    if all(getattr(getattr(callback, name), "__func__", None) is getattr(Callback, name) for name in _METHODS):
        raise TypeError(f"{kind} has no method that is called: a callback has {', '.join(_METHODS)}")


class Callbacks(FitObserver):
    """The callbacks of one fit: a `FitObserver`."""

    def __init__(self, model: Any, callbacks: Callback | Callable[..., None] | Iterable[Any]) -> None:
        if not (isinstance(callbacks, Callback | Iterable) or callable(callbacks)):
            raise TypeError(f"callbacks is {callbacks!r:.80}: pass a list of callbacks, empty for none")
        listed = [callbacks] if isinstance(callbacks, Callback) or callable(callbacks) else list(callbacks)
        for one in listed:
            if not (isinstance(one, Callback) or (callable(one) and not isinstance(one, type))):
                raise TypeError(f"a callback is {one!r}: pass a function of one argument, or a shoal.models.Callback()")
            if isinstance(one, Callback):
                _check_methods(one)
            elif found := [name for name in _METHODS if hasattr(one, name)]:
                kind = type(one).__name__
                raise TypeError(f"{kind}.{found[0]} is never called: derive {kind} from shoal.models.Callback")
        self._model = model
        self._listed = [one for one in listed if isinstance(one, Callback)]
        self._begun: list[Callback] = []
        self._on_batch = [one.batch_done for one in self._listed if type(one).batch_done is not Callback.batch_done]
        self._on_idle = [one.stream_idle for one in self._listed if type(one).stream_idle is not Callback.stream_idle]
        self._on_pass = [one.pass_done if isinstance(one, Callback) else one for one in listed]
        self._batches = 0

    def __bool__(self) -> bool:
        """Whether there are callbacks."""
        return bool(self._on_pass)

    def fit_began(self) -> None:
        """Pass it on."""
        progress = FitProgress(self._model, len(self._model.history.passes), 0, None)
        for one in self._listed:
            one.fit_begins(progress)
            self._begun.append(one)

    def fit_ended(self, error: BaseException | None) -> None:
        """Pass it on, to those that have begun; an error of one is raised unless the fit itself has failed."""
        progress = FitProgress(self._model, len(self._model.history.passes), self._batches, None)
        failed: Exception | None = None
        for one in self._begun:
            try:
                one.fit_ends(progress, error)
            except Exception as raised:
                failed = failed or raised
                if error is not None:
                    _log.warning("%s.fit_ends: %s", type(one).__name__, raised)
        self._begun = []
        if failed is not None and error is None:
            raise failed

    def batch_done(self, seen: Sequence[StreamMetrics], fit_state: Callable[[], FitState]) -> None:
        """Pass it on."""
        self._batches += 1
        number = len(self._model.history.passes) + 1 if self._on_batch else 0
        for call in self._on_batch:
            call(FitProgress(self._model, number, self._batches, seen[0], fit_state))

    def idle(self, fit_state: Callable[[], FitState]) -> None:
        """Pass it on."""
        for call in self._on_idle:
            call(FitProgress(self._model, len(self._model.history.passes) + 1, self._batches, None, fit_state))

    def pass_done(self, fit_state: Callable[[], FitState]) -> None:
        """Pass it on."""
        for call in self._on_pass:
            call(FitProgress(self._model, len(self._model.history.passes), self._batches, None))
