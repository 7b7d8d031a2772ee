"""Learner: the interface of the training loop to models. FitState: the state of a fit between two batches.

`Model` is one kind of learner, over tables alone; a click model in PyTorch is another (shoal.torch.trainer). What a
learner makes of a batch ahead of time, a `KeyBatch` say, the loop hands back to it and does not look into.

Threads: a learner belongs to the thread that fits; a fit_state is immutable.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shoal.data import Batch
from shoal.metrics import Accumulator
from shoal.models.history import Record, Windows
from shoal.storage.base import StorageDir
from shoal.store.base import Store

Floats = npt.NDArray[np.float64]
Prepared = Any  # what a learner made of a batch ahead


class Evaluable(Protocol):
    """What the loop measures."""

    def check_fitted(self) -> None:
        """Raise ValueError if there is nothing to predict with."""

    def check_format(self, data: object) -> None:
        """Raise ValueError if the keys of ``data`` mean something else than those that were learned."""

    def prepared(self, batches: Iterable[Batch]) -> Generator[tuple[Batch, Prepared]]:
        """Prepare each batch, ahead where it pays; an error of ``batches`` comes after all before it."""

    def margins(self, batch: Batch, prepared: Prepared) -> npt.NDArray[np.float64]:
        """Predict: float64[n]."""

    def groups(self, batch: Batch) -> npt.NDArray[np.uint64] | None:
        """Return the group of each example, uint64[n]; None without groups."""

    def has_groups(self, groups: npt.NDArray[np.uint64]) -> bool:
        """Whether any of the examples has a group; ``groups`` as from `groups`."""

    def check_groups(self, groups: npt.NDArray[np.uint64]) -> None:
        """Raise ValueError if none of the examples has a group; ``groups`` as from `groups`."""


class Learner(Evaluable, Protocol):
    """What the loop trains."""

    @property
    def name(self) -> str:
        """A name of its own in the store."""

    @property
    def store(self) -> Store:
        """The store of the tables."""

    @property
    def record(self) -> Record:
        """What the loop notes down."""

    @property
    def examples(self) -> int:
        """Examples learned from so far."""

    @property
    def is_normalized(self) -> bool:
        """Whether values are divided by their scales."""

    @property
    def can_normalize(self) -> bool:
        """Whether a model of this kind can be made that divides values by their scales."""

    def record_format(self, data: object) -> None:
        """Remember the format of what is learned from."""

    def nonfinite_rows(self) -> int:
        """Count the gradients that were dropped because they were not finite."""

    def learn(self, batch: Batch, prepared: Prepared, seen: Accumulator) -> float:
        """Predict, count into ``seen``, learn; return the sum of the losses by weight."""

    def save_weights(self, folder: StorageDir) -> None:
        """Write the weights into a folder that is not there, without waiting for the disk."""

    def restore_weights(self, folder: StorageDir) -> None:
        """Take the weights that `save_weights` wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitState:
    """Where a fit stands: all that is needed, besides the weights, to continue as if it had never stopped.

    Attributes
    ----------
    epoch : int
        The pass under way, from 0; or the one to come.
    batches : int
        Learned from in this pass.
    read : int
        Examples that the reader gave for them.
    known : int
        Examples that the learner had learned from when the pass began.
    position : dict or None
        Of the reader behind the last batch; None: the pass is read from its beginning, and ``batches`` passed over.
    seen : dict or None
        `shoal.metrics.Accumulator` of the pass; None between passes.
    features : int
        Of the pass so far.
    seconds : float
        That the pass has taken so far.
    windows : Windows
        Of the learning curve.
    best_gain : float or None
        What early stopping has seen as the most; None before the first pass.
    best_pass, best_examples : int
        When that was; 0 before.
    """

    epoch: int = 0
    batches: int = 0
    read: int = 0
    known: int = 0
    position: dict[str, Any] | None = None
    seen: dict[str, Any] | None = None
    features: int = 0
    seconds: float = 0.0
    windows: Windows = field(default_factory=Windows)
    best_gain: float | None = None
    best_pass: int = 0
    best_examples: int = 0


class FitObserver(Protocol):
    """What is called during a fit: checkpoints, logs, callbacks.

    It is called by the thread that fits, between two batches. ``fit_state`` costs some milliseconds to ask for.
    """

    def batch_done(self, seen: Sequence[Accumulator], fit_state: Callable[[], FitState]) -> None:
        """React to a batch that was learned from; ``seen`` has the metrics of the pass so far, of each learner."""

    def pass_done(self, fit_state: FitState) -> None:
        """React to the end of a pass, which was measured if there is validation data."""

    def interrupted(self, fit_state: FitState) -> None:
        """React to Ctrl-C or SIGTERM: the fit ends behind a batch, or between two passes."""

    def best_folder(self, pass_number: int) -> StorageDir | None:
        """Return the folder for the weights of the best pass; None: a temporary one."""
