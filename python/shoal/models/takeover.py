"""Takeover: a worker that continues the fit of one that died, where its last counted batch ended.

Every few seconds, and at the beginning of each pass, a worker publishes its state to the servers
(worker_messages.py): the record of the model, its `FitState`, and how many clocks, barriers and exchanges lie behind
it. A replacement begins with the last published state and repeats the steps of its predecessor since then:

    predecessor    published at clock 40     batch 41 ... batch 57 counted    batch 58    killed
    replacement    state of clock 40         batch 41 ... batch 57 skipped    batch 58 ...

Batches whose clock has counted are read and skipped, barriers that are past do not wait, exchanges that are past return
the messages that are there. The fit is a function of its data and these messages, so the replacement meets the others
where its predecessor would have. What is lost is the metrics of the skipped batches, whose predictions the predecessor
made: `WorkerState.unmeasured` counts their examples.

Threads: the one that fits.
"""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

from shoal.models.history import Fit, Pass, Point, Record
from shoal.models.learner import FitState
from shoal.models.pass_coordinator import PassCoordinator, Position

__all__ = ["Publisher", "taken_over"]

_SECONDS = 5.0  # between two states that are published within a pass


class _Recorded(Protocol):
    """A model with a record."""

    @property
    def record(self) -> Record:
        """Of the data and the passes learned from."""


class _Published(msgspec.Struct, frozen=True):
    """The state of one worker; without a ``fit_state`` its fit is over."""

    position: Position
    fit_state: FitState | None
    points: tuple[Point, ...]
    passes: list[Pass]
    fits: list[Fit]
    best_pass: int | None
    examples: int
    format: str | None
    schema: dict[str, object]
    classes: tuple[object, object] | None
    columns: int | None


# Made here: msgspec crashes where several threads are the first to decode a type.
_published = msgspec.msgpack.Decoder(_Published)


class Publisher:
    """Publishes the state of a fit, if workers of the job are replaced.

    Parameters
    ----------
    model : Model
    coordinator : PassCoordinator
    """

    def __init__(self, model: _Recorded, coordinator: PassCoordinator) -> None:
        self._model = model
        self._coordinator = coordinator
        self._next = 0.0

    def is_due(self) -> bool:
        """Whether a state is to be published after this clock."""
        return self._coordinator.can_replace and time.monotonic() >= self._next

    def publish(self, fit_state: FitState | None) -> None:
        """Publish a state after a clock, or before the first one of a pass; None: the fit is over."""
        if not self._coordinator.can_replace or self._coordinator.is_behind:
            return
        self._next = time.monotonic() + _SECONDS
        record = self._model.record
        state = _Published(
            self._coordinator.position(),
            fit_state,
            record.curve.points,
            record.passes,
            record.fits,
            record.best_pass,
            record.examples,
            record.format,
            record.schema,
            record.classes,
            record.columns,
        )
        self._coordinator.publish(msgspec.msgpack.encode(state))


def taken_over(model: _Recorded, coordinator: PassCoordinator) -> tuple[bool, FitState | None]:
    """Return whether the predecessor of this worker has begun this fit, and the state to continue from.

    The record of the model is that of the predecessor then. Without a state the fit is over.
    """
    content = coordinator.published()
    if content is None:
        return False, None
    state = _published.decode(content)
    if state.position.fit < coordinator.fit:
        return False, None
    record = model.record
    record.restore(
        points=state.points,
        passes=state.passes,
        fits=state.fits,
        best_pass=state.best_pass,
        examples=state.examples,
    )
    record.format, record.schema = state.format, dict(state.schema)
    record.classes, record.columns = state.classes, state.columns
    if state.position.fit > coordinator.fit:
        return True, None
    coordinator.continue_from(state.position)
    return True, state.fit_state
