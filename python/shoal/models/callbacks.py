"""Callbacks: user code that runs during a fit, after a batch or a pass.

    batch learned --> batch_done(progress)        pass learned, and measured on valid --> pass_done(progress)

Threads: called by the thread that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shoal.metrics import Accumulator, Metrics
from shoal.models.learner import FitState
from shoal.storage.base import StorageDir

__all__ = ["Callback", "Callbacks", "FitProgress"]


class FitProgress:
    """The progress of a fit; valid while the callback runs.

    Attributes
    ----------
    model : Model
        It may be read, saved and evaluated. Its tables are those after the last batch.
    pass_number : int
        From 1, over all fits of the model.
    batches : int
        Batches that were learned from since the fit began, or was resumed.
    """

    def __init__(self, model: Any, pass_number: int, batches: int, seen: Accumulator | None) -> None:
        self.model = model
        self.pass_number = pass_number
        self.batches = batches
        self._seen = seen

    @property
    def examples(self) -> int:
        """Examples that the model has learned from, over all its fits."""
        return int(self.model.examples)

    @property
    def metrics(self) -> Metrics:
        """Progressive metrics of the pass so far: each batch predicted before it was learned from."""
        done: Metrics = self.model.history.passes[-1].metrics if self._seen is None else self._seen.result()
        return done

    @property
    def valid(self) -> Metrics | None:
        """Metrics of the validation data; None within a pass, and without such data."""
        measured: Metrics | None = None if self._seen is not None else self.model.history.passes[-1].valid
        return measured


class Callback:
    """Base class of callbacks; override the methods you need. A function of one argument is used as `pass_done`.

    An exception ends the fit and reaches the caller of `fit`; the model is consistent, as after Ctrl-C.
    """

    def batch_done(self, progress: FitProgress) -> None:
        """Run after each batch."""

    def pass_done(self, progress: FitProgress) -> None:
        """Run after each pass and its validation."""


class Callbacks:
    """The callbacks of one fit: a `FitObserver`.

    Raises
    ------
    TypeError
        One is neither a `Callback` nor callable.
    """

    def __init__(self, model: Any, callbacks: Callback | Callable[..., None] | Iterable[Any]) -> None:
        listed = [callbacks] if isinstance(callbacks, Callback) or callable(callbacks) else list(callbacks)
        for one in listed:
            if not (isinstance(one, Callback) or (callable(one) and not isinstance(one, type))):
                raise TypeError(f"a callback is {one!r}: pass a function of one argument, or a shoal.models.Callback()")
        self._model = model
        self._on_batch = [one.batch_done for one in listed if isinstance(one, Callback)]
        self._on_pass = [one.pass_done if isinstance(one, Callback) else one for one in listed]
        self._batches = 0

    def __bool__(self) -> bool:
        """Whether there are callbacks."""
        return bool(self._on_pass)

    def batch_done(self, seen: Sequence[Accumulator], fit_state: Callable[[], FitState]) -> None:
        """Pass it on."""
        self._batches += 1
        number = len(self._model.history.passes) + 1 if self._on_batch else 0
        for call in self._on_batch:
            call(FitProgress(self._model, number, self._batches, seen[0]))

    def clock_done(self, fit_state: Callable[[], FitState]) -> None:
        """Do nothing: there was no batch."""

    def meet(self, fit_state: Callable[[], FitState]) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    def pass_done(self, fit_state: FitState) -> None:
        """Pass it on."""
        for call in self._on_pass:
            call(FitProgress(self._model, len(self._model.history.passes), self._batches, None))

    def interrupted(self, fit_state: FitState) -> None:
        """Do nothing: KeyboardInterrupt reaches the caller."""

    def best_folder(self, pass_number: int) -> StorageDir | None:
        """Return None: there is no folder."""
        return None
