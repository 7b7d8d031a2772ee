"""Checkpoints of a fit: a directory that holds, at any moment, a model and the state of its fit after a batch.

    fit --batch, batch, ... pass--> FitCheckpointer --save--> DIR: tables, record, FitState     replaced atomically
    killed; later, with resume: DIR --restore--> the model, its record, the FitState --> the same fit continues

A resumed fit is bit-identical to an uninterrupted one: the checkpoint has the tables with the state of optimizers and
rules, the record with its metrics so far, and the exact position in the data. A learner itself saves any other state,
such as a dense part in torch.

Threads: that of the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

from shoal.data import Reader
from shoal.metrics import Accumulator
from shoal.models import files, sources
from shoal.models.history import Fit, History, Record
from shoal.models.learner import FitState
from shoal.models.plan import Plan
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.open import open_dir
from shoal.store.base import Store

__all__ = ["FitCheckpointer", "Resume", "begin_or_resume"]


class Checkpointed(Protocol):
    """A model that a checkpointer can save."""

    @property
    def store(self) -> Store:
        """Of its tables."""

    @property
    def record(self) -> Record:
        """The record of the data and the passes learned from."""

    def check_format(self, data: object) -> None:
        """Raise ValueError if the keys of ``data`` stand for other features than those that were learned."""

    def save(self, directory: StoragePath, *, overwrite: bool = True, fit_state: FitState | None = None) -> Path | str:
        """Write the model."""

    def restore(self, directory: StoragePath, *, resume: bool = False) -> FitState | None:
        """Restore a saved model."""


class FitCheckpointer:
    """Keeps checkpoints of a fit in a directory; a `FitObserver`.

    Parameters
    ----------
    model : Model or ClickModel
    directory : path, URL or StorageDir
    checkpoint_every : int or None
        Batches between two checkpoints of a pass; None: one after each pass.
    overwrite : bool
        Whether the first checkpoint may replace an existing model.

    Raises
    ------
    ValueError
        ``checkpoint_every`` is below 1, or the store has several workers, of which a checkpoint would know one.
    """

    def __init__(
        self,
        model: Checkpointed,
        directory: StoragePath,
        checkpoint_every: int | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        if checkpoint_every is not None and checkpoint_every < 1:
            raise ValueError(
                f"checkpoint_every is {checkpoint_every}: pass the batches between two checkpoints, 1 or more"
            )
        if model.store.num_workers > 1:
            raise ValueError(
                f"a checkpoint of a fit has the position of one worker in its data, and the store has "
                f"{model.store.num_workers}: train with one worker, or leave directory out"
            )
        self.directory = open_dir(directory)
        self.overwrite = overwrite
        self._model = model
        self._every = checkpoint_every
        self._batches = 0

    def batch_done(self, seen: Sequence[Accumulator], fit_state: Callable[[], FitState]) -> None:
        """Write a checkpoint, if one is due."""
        self._batches += 1
        if self._every is not None and self._batches % self._every == 0:
            self._model.save(self.directory, fit_state=fit_state())

    def pass_done(self, fit_state: FitState) -> None:
        """Write a checkpoint."""
        self._batches = 0
        self._model.save(self.directory, fit_state=fit_state)

    def interrupted(self, fit_state: FitState) -> None:
        """Write a checkpoint."""
        self._model.save(self.directory, fit_state=fit_state)

    def best_folder(self, pass_number: int) -> StorageDir | None:
        """Return a folder of the directory, which the next checkpoint will name."""
        return self.directory.child(files.best_folder(pass_number))


class FitFinishedError(ValueError):
    """The fit to be resumed has finished, by the settings of this call; the model has its weights."""


Resume = bool | Literal["appended"]


def begin_or_resume(
    model: Checkpointed, reader: Any, valid: Any, plan: Plan, checkpointer: FitCheckpointer | None, *, resume: Resume
) -> FitState | None:
    """Restore the state of the fit in a checkpointer's directory, or check that a fit may begin there.

    Returns
    -------
    FitState or None
        None: the fit begins.

    Raises
    ------
    CorruptionError
        A file is missing, cut short or changed.
    FitFinishedError
        The fit there has finished.
    StorageError
        No files can be written there.
    ValueError
        The fit there was begun with other settings or data; or there is a model that may not be replaced.
    """
    if resume not in (False, True, "appended"):
        raise ValueError(f"resume is {resume!r}: pass True, False or 'appended'")
    if checkpointer is None:
        if resume:
            raise ValueError("resume continues the fit of a directory: pass directory=")
        return None
    if not (resume and files.is_model(checkpointer.directory)):
        files.check_target(checkpointer.directory, overwrite=checkpointer.overwrite)
        files.make_target(checkpointer.directory)
        model.store.check_storage(checkpointer.directory)
        return None
    described = files.read(checkpointer.directory)
    fit = described.history.fits[-1] if described.history.fits else None
    if described.fit_state is None:
        _check_over(checkpointer.directory, described.history, reader, valid, plan)
        model.restore(checkpointer.directory, resume=True)
        raise FitFinishedError(
            f"the fit in {checkpointer.directory} has finished: begin another one in another directory"
        )
    if fit is None:
        raise ValueError(f"{checkpointer.directory} does not describe how its fit was begun: begin another one")
    _check_same(fit.plan, plan)
    appended = resume == "appended"
    _check_data(checkpointer.directory, fit, reader, valid, appended=appended)
    fit_state = described.fit_state
    grown = appended and fit.source is not None and fit.source != sources.fingerprint(reader)
    if grown and fit_state.batches and plan.shuffles:
        raise ValueError(
            f"the fit in {checkpointer.directory} is within a shuffled pass, whose order more data would change: "
            f"pass the data that it was begun with, and append between two passes"
        )
    model.check_format(reader)
    taken = model.restore(checkpointer.directory, resume=True)
    if taken is None or taken != fit_state:
        raise ValueError(
            f"the fit in {checkpointer.directory} was just saved by another process too: train in one process"
        )
    if grown and fit_state.position is not None:
        fit_state = replace(fit_state, position={**fit_state.position, "files": reader.position()["files"]})
    fits = model.record.fits
    fits[-1] = replace(fits[-1], plan=plan)
    if isinstance(reader, Reader) and fit.source is not None:
        source, held_out = reader.fingerprint(), sources.fingerprint(valid)
        fits[-1] = replace(fits[-1], data=sources.path_of(reader), source=source, valid_source=held_out)
    return fit_state


def _check_over(directory: StorageDir, history: History, reader: Any, valid: Any, plan: Plan) -> None:
    """Check that a finished fit is the requested one, and was completed."""
    fit = history.fits[-1] if history.fits else None
    done = history.passes[-1] if history.passes else None
    if fit is not None and done is not None and not done.complete:
        raise ValueError(
            f"the fit in {directory} was interrupted in pass {done.number - fit.first_pass + 1} and wrote no "
            f"checkpoint to resume from: begin it again with checkpoints (checkpoint_every=, --checkpoint-every)"
        )
    if fit is None or _has_ended(history, plan):
        if fit is not None:
            _check_data(directory, fit, reader, valid, over=True)
        return
    changed = [
        f"{name}={getattr(fit.plan, name)!r}, now it is {getattr(plan, name)!r}"
        for name in (*_SETTINGS, "epochs")
        if getattr(fit.plan, name) != getattr(plan, name)
    ]
    how = f", and was begun with {changed[0]}" if changed else ""
    raise ValueError(f"the fit in {directory} has finished{how}: begin another one in another directory")


def _check_data(
    directory: StorageDir, fit: Fit, reader: Any, valid: Any, *, appended: bool = False, over: bool = False
) -> None:
    """Raise ValueError if a fit was begun with other data; if it is unfinished, appended data may be allowed."""
    for what, then, now in (("", fit.source, reader), ("valid: ", fit.valid_source, valid)):
        if then is None or now is None:  # begun with batches or by an older version, or no validation data now
            continue
        if not isinstance(now, Reader):
            raise ValueError(f"{what}the fit in {directory} was begun with a reader of files: pass it to resume")
        # The batch size of held-out data has no effect on the fit.
        then = then if not what else {**then, "batch_size": now.batch_size}
        if (changed := now.changes(then, appended=appended)) is None:
            continue
        grown = not appended and now.changes(then, appended=True) is None
        remedy = (
            "pass resume='appended' (--allow-appended) to learn from what was appended too"
            if grown
            else "pass the same data to resume, or begin another fit"
        )
        if over:
            remedy = "it has finished without this data: begin another one in another directory"
        raise ValueError(f"{what}the fit in {directory} was begun with other data: {changed}: {remedy}")


def _has_ended(history: History, plan: Plan) -> bool:
    """Return whether the last fit was by ``plan`` and has finished."""
    if not history.fits or history.fits[-1].plan != plan:
        return False
    passes = [done for done in history.passes if done.number >= history.fits[-1].first_pass]
    return bool(passes) and passes[-1].complete and (len(passes) == plan.epochs or plan.patience is not None)


_SETTINGS = ("shuffle", "negative_rate", "warm_up", "seed", "patience", "min_delta", "metric", "class_weight")


def _check_same(fit: Plan, plan: Plan) -> None:
    """Raise ValueError if a fit was begun by another plan; it may have more epochs now."""
    for name in _SETTINGS:
        before, now = getattr(fit, name), getattr(plan, name)
        if before != now:
            raise ValueError(f"the fit was begun with {name}={before!r}, now it is {now!r}: pass the same to resume")
