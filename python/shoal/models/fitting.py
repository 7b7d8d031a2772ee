"""A whole fit: the workers agree, a fit that has begun continues, models learn, checkpoints and callbacks follow.

    Progress --> found on the servers, resumed from a checkpoint, or begun --> training --> the last checkpoint

Threads: the caller's; see training.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from shoal.base.interrupts import at_boundaries
from shoal.models import files, training
from shoal.models.callbacks import Callback, Callbacks, FitProgress
from shoal.models.fit_checkpoints import Checkpointing, FitCheckpointer
from shoal.models.learner import FitObserver, FitState, Learner
from shoal.models.plan import FitInput
from shoal.models.progress import Progress
from shoal.models.team import Team
from shoal.storage.base import remove_if_failed

OfCallbacks = Callback | Callable[[FitProgress], None] | Iterable[Any]


def fit(
    models: Sequence[Learner],
    given: FitInput,
    *,
    progress: bool | float = True,
    checkpoint: Checkpointing | None = None,
    callbacks: OfCallbacks = (),
    observers: Sequence[FitObserver] = (),
) -> None:
    """Fit models to the same batches; a checkpoint, callbacks and observers are those of the only one."""
    first, plan = models[0], given.plan
    watching = Callbacks(first, callbacks)
    checkpointer = None
    with ExitStack() as leaving:
        if checkpoint is not None:
            if not isinstance(checkpoint, Checkpointing):
                raise TypeError(f"checkpoint is {checkpoint!r}: pass shoal.models.Checkpointing(directory)")
            checkpointer = FitCheckpointer(first, checkpoint)
            leaving.enter_context(remove_if_failed(checkpointer.directory))
        team = Team(first.store, first.name, first.tolerance)
        run = Progress(models, team, plan, None if checkpointer is None else checkpointer.every, given.reader)
        observers = [*observers] if checkpointer is None else [*observers, checkpointer]
        if watching:
            observers.append(watching)
        interrupted = leaving.enter_context(at_boundaries()) if team.may_change else None
        if checkpointer is not None and checkpointer.recorder is not None:
            leaving.enter_context(checkpointer.recorder.recording())
        one = training.Training(models, given, run, team, progress, observers, interrupted)
        leaving.enter_context(team.fitting(run.hand_over, one.is_told_to_leave))
        for model in models:
            leaving.callback(model.leave)
        if run.find() and run.is_over:
            run.take_result()
            return
        resumed = _begin(models, given, run, team, checkpointer)
        if checkpointer is not None:
            checkpointer.begin(team, lambda: run.work.clocks)
        one.train(resumed)
        run.end(lambda: None if checkpointer is None else checkpointer.save())


def _begin(
    models: Sequence[Learner],
    given: FitInput,
    run: Progress,
    team: Team,
    checkpointer: FitCheckpointer | None,
) -> FitState | None:
    """Begin the fit, resume one from a checkpoint, or continue that of others; return the checkpoint's state."""
    first, has_begun, resumed = models[0], run.has_found, None
    if not run.is_in_place:
        described, failed = None, None
        try:
            training.check_fit(models, given, has_best_folder=checkpointer is not None)
            if checkpointer is not None and checkpointer.recorder is not None:
                resumes = bool(checkpointer.resume) and files.is_model(checkpointer.directory)
                checkpointer.recorder.check(given, team, resumes=resumes)
            if checkpointer is not None and not has_begun:
                described = checkpointer.look(given, team)
        except Exception as error:
            failed = error
        settings = (
            first.common_settings
            | given.plan.common
            | {
                "checkpoint every": run.work.every,
                "record": checkpointer is not None and checkpointer.recorder is not None,
            }
        )
        run.agree(settings, given, failed, has_model=described is not None)
        if described is not None and checkpointer is not None:
            resumed = checkpointer.restore(given, described)
        elif not has_begun:
            training.begin_fit(models, given, fingerprints=checkpointer is not None)
        if team.leads:
            run.meeting = b"".join(model.prepare_to_join(team) for model in models)
        run.begin(resumed, has_begun=has_begun)
    for model in models:
        model.join(team, run.meeting)
    return resumed
