"""A whole fit: the workers agree, a fit that has begun continues, models learn, checkpoints and callbacks follow.

    PassCoordinator --> taken over, or resumed from a checkpoint, or begun --> training.train --> the last checkpoint

Threads: the caller's; see training.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from shoal.models import training
from shoal.models.callbacks import Callback, Callbacks, FitProgress
from shoal.models.fit_checkpoints import Checkpointing, FitCheckpointer, begin_or_resume
from shoal.models.learner import FitObserver, Learner
from shoal.models.pass_coordinator import PassCoordinator
from shoal.models.plan import FitInput
from shoal.models.takeover import Publisher, taken_over
from shoal.storage.base import remove_if_failed

OfCallbacks = Callback | Callable[[FitProgress], None] | Iterable[Any]


def fit(
    models: Sequence[Learner],
    given: FitInput,
    *,
    progress: bool | float = True,
    checkpoint: Checkpointing | None = None,
    callbacks: OfCallbacks = (),
) -> None:
    """Fit models to the same batches; a checkpoint and callbacks are those of the only one."""
    first = models[0]
    watching = Callbacks(first, callbacks)
    checkpointer = None
    with ExitStack() as leaving:
        if checkpoint is not None:
            if not isinstance(checkpoint, Checkpointing):
                raise TypeError(f"checkpoint is {checkpoint!r}: pass shoal.models.Checkpointing(directory)")
            checkpointer = FitCheckpointer(first, checkpoint)
            leaving.enter_context(remove_if_failed(checkpointer.directory))
        made = PassCoordinator(first.store, first.name, first.tolerance)
        coordinator = leaving.enter_context(made.fitting(first.common_settings | given.plan.common))
        for model in models:
            leaving.callback(model.leave)
        has_begun, fit_states = taken_over(models, coordinator, given)
        if not has_begun:
            resumed = begin_or_resume(first, given, checkpointer, coordinator)
            fit_states = None if resumed is None else [resumed]
        elif fit_states is not None and checkpointer is not None:
            checkpointer.begin(coordinator)
        is_over = has_begun and fit_states is None
        for model in models:
            model.join(coordinator, has_begun=has_begun, is_over=is_over)
        if is_over:
            return
        publisher = Publisher(models, coordinator)
        observers: list[FitObserver] = [] if checkpointer is None else [checkpointer]
        if watching:
            observers.append(watching)
        training.train(
            models,
            given,
            progress=progress,
            coordinator=coordinator,
            observers=observers,
            fit_states=fit_states,
            publisher=publisher,
        )
        if checkpointer is not None:
            checkpointer.save()
        publisher.end()
