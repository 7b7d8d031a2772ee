"""Learner: the interface of the training loop to models. FitState: the state of a fit between two batches.

`Model` is one kind of learner, over tables alone; `shoal.torch.ClickModel`, with a module of PyTorch, is another. A
learner may prepare a batch ahead of time, for example as a `KeyBatch`; the loop passes the result back to it unchanged.

Threads: a learner belongs to the thread that fits; a `FitState` is immutable.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.data import Batch
from shoal.metrics import StreamMetrics
from shoal.models.history import Best, Record, Windows
from shoal.models.measured import MeasuredExamples
from shoal.models.plan import Plan, Plateau
from shoal.models.team import Team, Tolerance
from shoal.storage.base import StorageDir, StoragePath
from shoal.store.base import Store
from shoal.table.table import Table

Floats = npt.NDArray[np.float64]
Prepared = Any  # a batch as a learner has prepared it


class Evaluable(Protocol):
    """A model that the loop can measure."""

    def check_fitted(self) -> None:
        """Raise ValueError if the model has not learned from any data."""

    def check_format(self, data: object) -> None:
        """Raise ValueError if the keys of ``data`` stand for other features than those that were learned."""

    def refresh(self) -> None:
        """Make what it predicts with the newest, apart from rows, which each prediction reads."""
        return

    def prepared(self, batches: Iterable[Batch]) -> Generator[tuple[Batch, Prepared]]:
        """Prepare each batch, ahead where it is faster; an error of ``batches`` is raised after all earlier batches."""

    def may_begin(self, batch: Batch, *, learns: bool) -> bool:
        """Whether `begin` may be called before the batch ahead is learned from, or was predicted."""

    def begin(self, prepared: Prepared, clocks: int) -> None:
        """Begin what `margins` or `learn` waits for, in the order of the batches, at so many clocks before its own."""

    def forget(self, prepared: Prepared) -> None:
        """Drop what was begun of a batch, if it was not used."""

    def margins(self, batch: Batch, prepared: Prepared) -> Floats:
        """Predict: float64[n], or float64[n, K] of several classes."""

    def examples_to_measure(self, models: int) -> MeasuredExamples:
        """Return an empty object for the examples that this kind of model, in all ``models``, is measured on."""

    def groups(self, batch: Batch) -> npt.NDArray[np.uint64] | None:
        """Return the group of each example, uint64[n]; None without groups."""

    def has_groups(self, groups: npt.NDArray[np.uint64]) -> bool:
        """Whether any of the examples has a group; ``groups`` as from `groups`."""

    def check_groups(self, groups: npt.NDArray[np.uint64]) -> None:
        """Raise ValueError if none of the examples has a group; ``groups`` as from `groups`."""


class Learner(Evaluable, Protocol):
    """A model that the loop can train; by default all that learning changes is in tables."""

    @property
    def name(self) -> str:
        """A name that is unique in the store."""

    @property
    def store(self) -> Store:
        """The store of the tables."""

    @property
    def tables(self) -> Sequence[Table]:
        """Its tables."""

    @property
    def pushed_tables(self) -> Sequence[Table]:
        """All tables that it pushes to, once it has joined a fit."""
        return self.tables

    @property
    def tolerance(self) -> Tolerance:
        """What a fit of it withstands."""

    @property
    def common_settings(self) -> dict[str, Any]:
        """The settings that all workers of a fit need to have in common, besides those of the plan."""

    def prepare_to_join(self, team: Team) -> bytes:
        """Return what all workers need to `join`: of the leader alone, before any of them does."""
        return b""

    def join(self, team: Team, meeting: bytes) -> None:
        """Begin a fit, or continue one, all workers together: ``meeting`` is from `prepare_to_join`."""
        return

    def come_late(self) -> None:
        """Take what a fit of others, which is over, has left on the servers besides the tables."""
        return

    def leave(self) -> None:
        """Close the connections that `join` made."""
        return

    @property
    def record(self) -> Record:
        """The record that the loop writes."""

    @property
    def examples(self) -> int:
        """Examples learned from so far."""

    @property
    def is_normalized(self) -> bool:
        """Whether values are divided by their scales."""

    @property
    def can_normalize(self) -> bool:
        """Whether a model of this kind can be made that divides values by their scales."""

    @property
    def has_order(self) -> bool:
        """Whether workers learn the same where their pulls and pushes have the same order, also in one process."""
        return True

    def check_plan(self, plan: Plan) -> None:
        """Raise ValueError if a plan has a setting that this kind of model does not support."""

    def record_format(self, data: object) -> None:
        """Record the format of the data that is learned from."""

    def nonfinite_rows(self) -> int:
        """Count the gradients that were dropped because they were not finite."""

    def accumulator(self) -> StreamMetrics:
        """Return an empty accumulator for the metrics of a pass."""

    def learn(self, batch: Batch, prepared: Prepared, seen: StreamMetrics) -> float:
        """Predict, count into ``seen``, learn; return the sum of the losses by weight."""

    def step_without_batch(self) -> bool:
        """Take part in a step of the other workers without a batch; False if they need none, or all have ended."""
        return False

    def agree_on_move(self, wants: bool) -> bool:
        """Return whether all workers hand over their states after this step; ``wants``: this one is to do so."""
        return wants

    def begin_batch(self, epoch: int, place: tuple[int, int, int]) -> None:
        """Prepare to learn from the batch of this place in the pass: random numbers are a function of both."""
        return

    def local_state(self) -> bytes:
        """Return what learning changes on this worker alone, of a fixed length. Empty if all is in tables."""
        return b""

    def set_local_state(self, state: bytes) -> None:
        """Restore `local_state`."""
        return

    def common_state(self) -> bytes:
        """Return what learning changes in all workers alike, and not in tables. Empty if there is nothing."""
        return b""

    def set_common_state(self, state: bytes) -> None:
        """Restore `common_state`."""
        return

    def scale_rates(self, scale: float, plateau: Plateau | None) -> None:
        """Make the learning rates those of the settings times ``scale``, by the rule of a plan."""
        return

    def save_weights(self, folder: StorageDir) -> None:
        """Write the weights into a new folder, without waiting for the disk."""

    def restore_weights(self, folder: StorageDir) -> None:
        """Restore the weights that `save_weights` wrote."""

    def save(self, directory: StoragePath, *, overwrite: bool = False, fit_state: FitState | None = None) -> Path | str:
        """Write the model."""

    def restore(self, directory: StoragePath, *, resume: bool = False) -> FitState | None:
        """Restore a saved model."""


def consistency_of(store: Store) -> str:
    """Return the consistency of a cluster, as text; empty: it is none."""
    return store.consistency.text if store.member.job else ""


def why_inexact(model: Learner) -> str:
    """Return why what workers send is not what servers get; empty: it is."""
    is_exact = all(model.store.sends_exactly(table.name) for table in model.tables)
    return "" if is_exact else "filters have rounded or dropped what was sent"


class FitState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a fit that is not over: with its tables, all that is needed to continue as if it had never stopped.

    What is left of the pass, and its metrics, are rows of a table (progress.py).
    """

    # Of the rows.
    table: str
    # Whether any batch of the pass was learned from.
    is_within: bool
    # Examples that all workers have learned from.
    examples: int
    # Clocks of the pass so far.
    clocks: int = 0
    # That the pass has taken so far.
    seconds: float = 0.0
    # Of the learning curve.
    windows: Windows = msgspec.field(default_factory=Windows)
    best: Best = msgspec.field(default_factory=Best)
    # Id of the record that the fit writes (order_record.py); empty: none.
    record: str = ""


class FitObserver:
    """An observer of a fit, such as checkpoints, logs and callbacks; by default it does nothing.

    It is called by the thread that fits, between two batches. ``fit_state`` is for the worker that leads, and takes
    some milliseconds: it makes rows those of this moment.
    """

    def fit_began(self) -> None:
        """React to the beginning of the fit, or of the rest of one that is resumed; its settings are recorded."""

    def fit_ended(self, error: BaseException | None) -> None:
        """React to the end of the fit: the kept weights are restored, or an error has ended it."""

    def ready(self, fit_state: Callable[[], FitState]) -> None:
        """React to the moment before the first batch, when all that a checkpoint needs is there."""

    def batch_begins(self, batch: Batch) -> None:
        """React to a batch that is about to be learned from."""

    def batch_done(self, seen: Sequence[StreamMetrics], fit_state: Callable[[], FitState]) -> None:
        """React to a batch that was learned from; ``seen`` has the metrics of the pass so far, of each learner."""

    def clock_done(self, fit_state: Callable[[], FitState]) -> None:
        """React to a clock in which this worker of several had no batch, since it has ended the pass."""

    def idle(self, fit_state: Callable[[], FitState]) -> None:
        """React to a stream of which nothing arrives; called some twenty times a second."""

    def pass_done(self, fit_state: Callable[[], FitState]) -> None:
        """React to the end of a pass, which was measured if there is validation data."""

    def paused(self, fit_state: Callable[[], FitState]) -> None:
        """React to a moment within a pass at which all workers wait for a checkpoint."""

    def interrupted(self, fit_state: Callable[[], FitState]) -> None:
        """React to Ctrl-C, SIGTERM or an error of the data: the fit ends after a batch, or between two passes."""

    def stopped(self, fit_state: Callable[[], FitState]) -> None:
        """React to the end of a stream by Ctrl-C or SIGTERM, where all workers have ended the same clock."""
        self.interrupted(fit_state)

    def best_folder(self, pass_number: int) -> StorageDir | None:
        """Return the folder for the weights of the best pass; None: a temporary one."""
        return None
