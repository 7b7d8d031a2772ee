"""Checkpoints of a fit: a directory that holds, at any moment, a model and the rows of its fit after a batch.

    fit --batch, batch, ... pass--> FitCheckpointer --save--> DIR: tables, record, FitState     replaced atomically
    killed; later, with resume: DIR --restore--> the model, its record, the rows --> the same fit continues

A resumed fit is bit-identical to an uninterrupted one: the checkpoint has the tables with the state of optimizers and
rules, among them the rows of progress.py with positions and metrics, and the record. A learner itself saves any other
state, such as a dense part in torch.

Of several workers the one that leads writes a checkpoint, between two of its clocks; the others do not wait. Under BSP
no push of a later clock is applied before it continues; under SSP and ASP the positions are those before the save.

Threads: that of the fit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import structs

from shoal.base.plural import counted
from shoal.base.scalars import make_plain
from shoal.data import Reader
from shoal.errors import FitFinishedError
from shoal.metrics import StreamMetrics
from shoal.models import files, sources
from shoal.models.history import Fit, History
from shoal.models.learner import FitObserver, FitState, Learner, consistency_of, why_inexact
from shoal.models.plan import FitInput, Plan
from shoal.models.recording import Recorder
from shoal.models.team import Team
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.open import open_dir

_log = logging.getLogger(__name__)

_HELD_SECONDS = 30.0  # without checkpoints after a death

Resume = bool | Literal["appended"]


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Where and how often a fit writes checkpoints, and whether it continues from the one that is there.

    Checkpoints are written after each pass and after Ctrl-C or SIGTERM; at the end the directory has the model. Its
    contents are complete at any moment, even if the process is killed.

    Parameters
    ----------
    directory : path or URL
        ``"s3://bucket/model"`` and other URLs that fsspec opens are allowed (extra: fsspec).
    every : int, optional
        Batches between two checkpoints, in addition to one after each pass.
    keep : bool
        Whether the checkpoints of the fit are kept, the one before its first batch too, as models in ``directory``
        that are named by the examples they have learned from: ``kept-000000080000``. With them a fit can be made again
        in parts (`shoal.lineage`). They share what they can with the model's own files, and take the room of one each.
    resume : bool or "appended"
        Resume the fit whose checkpoint is in ``directory``; the result is bit-identical to that of an uninterrupted
        fit. Pass the same data and settings (``epochs`` may be larger). Without a checkpoint a fit begins. "appended"
        allows that files have grown and that files were added at the end of the list.
    overwrite : bool
        Whether to replace a model that is in ``directory``, and a record.
    record : path or URL, optional
        Directory, which all workers see, of a record of the order of all pulls and pushes under SSP or ASP, from which
        `shoal.lineage.replay` makes the same bits again. All workers then wait for each checkpoint. A fit that resumes
        records what follows in a directory of its own there, such as ``from-000000080000``.
    storage_options : mapping, optional
        Options of the file system of a URL: see `shoal.Store.save`.

    Raises
    ------
    ValueError
        ``every`` is below 1, or ``resume`` is another word.
    """

    directory: StoragePath
    every: int | None = field(default=None, kw_only=True)
    keep: bool = field(default=False, kw_only=True)
    resume: Resume = field(default=False, kw_only=True)
    overwrite: bool = field(default=False, kw_only=True)
    record: StoragePath | None = field(default=None, kw_only=True)
    storage_options: Mapping[str, Any] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        make_plain(self)
        if self.every is not None and self.every < 1:
            raise ValueError(f"every is {self.every}: pass the batches between two checkpoints, 1 or more")
        if self.resume not in (False, True, "appended"):
            raise ValueError(f"resume is {self.resume!r}: pass True, False or 'appended'")


class FitCheckpointer(FitObserver):
    """Keeps checkpoints of a fit in a directory; a `FitObserver`.

    Of several workers all see the directory, and the one that leads writes it. Ctrl-C then leaves the last checkpoint,
    since it may reach them at different batches.
    """

    def __init__(self, model: Learner, checkpointing: Checkpointing) -> None:
        self.directory = open_dir(checkpointing.directory, checkpointing.storage_options)
        self.overwrite = checkpointing.overwrite
        self.resume = checkpointing.resume
        self.every = checkpointing.every
        self.keep = checkpointing.keep
        self.recorder: Recorder | None = None
        if checkpointing.record is not None:
            self.recorder = Recorder(model, checkpointing.record, self.every, overwrite=self.overwrite)
        self._model = model
        self._team: Team | None = None
        self._clocks: Callable[[], int] = lambda: 0
        self._has_resumed = False
        self._gone, self._held_until = 0, 0.0  # workers, and when checkpoints are written again

    def begin(self, team: Team, clocks: Callable[[], int]) -> None:
        """Begin the fit, or continue it; ``clocks`` returns those of the pass."""
        self._team, self._clocks = team, clocks
        if team.leads:
            files.make_target(self.directory)  # a fit that ends by an error removes a new one

    def ready(self, fit_state: Callable[[], FitState]) -> None:
        """Write the checkpoint before the first batch, if checkpoints are kept."""
        if self.keep and not self._has_resumed and (self._team is None or self._team.leads):
            files.drop_kept(self.directory)  # of the model that was there
            self._save(fit_state())
        if self.recorder is not None and self._team is not None:
            self.recorder.start(self._team, lambda place: self._save_to(place, fit_state()))

    def batch_done(self, seen: Sequence[StreamMetrics], fit_state: Callable[[], FitState]) -> None:
        """Write a checkpoint, if one is due."""
        self.clock_done(fit_state)

    def clock_done(self, fit_state: Callable[[], FitState]) -> None:
        """Write a checkpoint, if one is due."""
        if self.every is not None and self.recorder is None and self._clocks() % self.every == 0:
            self.pass_done(fit_state)

    def paused(self, fit_state: Callable[[], FitState]) -> None:
        """Write a checkpoint."""
        self.pass_done(fit_state)

    def pass_done(self, fit_state: Callable[[], FitState]) -> None:
        """Write a checkpoint."""
        if self._team is None or (self._team.leads and not self._is_held(self._team)):
            self._save(fit_state())

    def _is_held(self, team: Team) -> bool:
        """Whether a worker has just gone: who starts all of them again resumes from what they had learned together.

        When all are ended at once, the last one may have learned a few batches without the others.
        """
        if not (team.is_alone or team.store.hear_of_losses()):
            _log.warning("no checkpoint is written: the scheduler does not answer whether a worker was lost")
            return True
        gone = len(team.store.member.gone_in_order)
        if gone != self._gone:
            self._gone, self._held_until = gone, time.monotonic() + _HELD_SECONDS
        return time.monotonic() < self._held_until

    def interrupted(self, fit_state: Callable[[], FitState]) -> None:
        """Write a checkpoint; of several workers, none, since they may have ended at different batches."""
        if self._team is None or self._team.is_alone:
            self._save(fit_state())

    def stopped(self, fit_state: Callable[[], FitState]) -> None:
        """Write a checkpoint."""
        self.pass_done(fit_state)

    def _save(self, fit_state: FitState) -> None:
        """Write the model with the state of its fit."""
        self._save_to(self.directory, fit_state)
        if self.keep:
            files.keep(self.directory)

    def _save_to(self, directory: StorageDir, fit_state: FitState) -> None:
        """Write the model with the state of its fit, whose examples are those of all workers."""
        record = self._model.record
        record.examples, mine = fit_state.examples, record.examples
        try:
            self._model.save(directory, overwrite=True, fit_state=fit_state)
        finally:
            record.examples = mine

    def save(self) -> None:
        """Write the model, without the state of a fit, which is over."""
        self._model.save(self.directory, overwrite=True)
        if self.recorder is not None:
            self.recorder.complete()

    def best_folder(self, pass_number: int) -> StorageDir | None:
        """Return a folder of the directory, which the next checkpoint will name."""
        return self.directory.child(files.best_folder(pass_number))

    # ---- resuming ----------------------------------------------------------------------------------------------------

    def look(self, given: FitInput, team: Team) -> files.ModelFile | None:
        """Read the fit to resume, after all checks that change nothing; None: there is none, and one may begin."""
        model, directory, resume = self._model, self.directory, self.resume
        if team.is_alone and model.store.num_workers > 1:
            raise ValueError(
                "a loop over store.splits fits each split by itself: leave checkpoint out, or pass each worker "
                "reader.split(store.rank, store.num_workers)"
            )
        if not (resume and files.is_model(directory)):
            if team.leads:
                # The predecessor of a worker that replaces it may have written a model.
                files.check_target(directory, overwrite=self.overwrite or model.store.member.is_replacement)
                files.make_target(directory)
                model.store.check_storage(directory)
            return None
        described = files.read(directory)
        fit = described.history.fits[-1] if described.history.fits else None
        source = None if fit is None else fit.source
        apart = model.store.num_workers > 1 or (source is not None and source["shard"][1] > 1)
        fit_state = described.fit_state
        if fit_state is None:
            _check_over(directory, described.history, given, divided=apart)
            return described
        if fit is None:
            raise ValueError(f"{directory} does not describe how its fit was begun: begin another one")
        _check_same(fit.plan, given.plan)
        _check_data(directory, fit, given, appended=resume == "appended", divided=apart)
        if _has_grown(fit, given.reader, resume) and fit_state.is_within:
            if given.plan.shuffles:
                raise ValueError(
                    f"the fit in {directory} is within a shuffled pass, whose order more data would change: "
                    f"pass the data that it was begun with, and append between two passes"
                )
            if apart:
                raise ValueError(
                    f"the fit in {directory} is within a pass of several workers, whose splits more data "
                    f"would change: pass the data that it was begun with, and append between two passes"
                )
        model.check_format(given.reader)
        return described

    def restore(self, given: FitInput, described: files.ModelFile) -> FitState:
        """Restore a fit that was looked at, all workers together."""
        directory, reader, model = self.directory, given.reader, self._model
        self._has_resumed = True
        if self.recorder is not None:
            self.recorder.resume(described.examples)
        taken = model.restore(directory, resume=True)
        if described.fit_state is None:
            raise FitFinishedError(f"the fit in {directory} has finished: begin another one in another directory")
        fit_state, fit = described.fit_state, described.history.fits[-1]
        if taken is None or taken != fit_state:
            raise ValueError(f"the fit in {directory} was just saved by another process too: train in one process")
        record = model.record
        record.curve.windows, record.best = fit_state.windows, fit_state.best
        fits = record.fits
        now = consistency_of(model.store)
        fits[-1] = structs.replace(
            fits[-1], plan=given.plan, consistency=now or fit.consistency, irregular=self._why_irregular(fit, now)
        )
        if isinstance(reader, Reader) and fit.source is not None:
            source, held_out = reader.fingerprint(), sources.fingerprint(given.valid)
            fits[-1] = structs.replace(fits[-1], data=sources.path_of(reader), source=source, valid_source=held_out)
        return fit_state

    def _why_irregular(self, fit: Fit, consistency: str) -> str:
        """Return why a fit that is resumed here is no function of its data and settings; empty: nothing is known."""
        workers = self._model.store.num_workers
        if fit.source is not None and fit.source["shard"][1] != workers:
            return fit.irregular or f"it was resumed by {counted(workers, 'worker')}"
        if fit.consistency and consistency and fit.consistency != consistency:
            return fit.irregular or f"it was resumed under {consistency}"
        return fit.irregular or why_inexact(self._model)


def _has_grown(fit: Fit, reader: Any, resume: Resume) -> bool:
    if resume != "appended" or fit.source is None or not isinstance(reader, Reader):
        return False
    return bool(fit.source["files"] != reader.fingerprint()["files"])


def _check_over(directory: StorageDir, history: History, given: FitInput, *, divided: bool) -> None:
    """Check that a finished fit is the requested one, and was completed."""
    fit = history.fits[-1] if history.fits else None
    done = history.passes[-1] if history.passes else None
    if fit is not None and done is not None and not done.complete:
        raise ValueError(
            f"the fit in {directory} was interrupted in pass {done.number - fit.first_pass + 1} and wrote no "
            f"checkpoint to resume from: begin it again with checkpoints (Checkpointing(every=), --checkpoint-every)"
        )
    plan = given.plan
    if fit is None or _has_ended(history, plan):
        if fit is not None:
            _check_data(directory, fit, given, over=True, divided=divided)
        return
    changed = [
        f"{name}={getattr(fit.plan, name)!r}, now it is {getattr(plan, name)!r}"
        for name in (*_SETTINGS, "epochs")
        if getattr(fit.plan, name) != getattr(plan, name)
    ]
    how = f", and was begun with {changed[0]}" if changed else ""
    raise ValueError(f"the fit in {directory} has finished{how}: begin another one in another directory")


def _check_data(
    directory: StorageDir,
    fit: Fit,
    given: FitInput,
    *,
    appended: bool = False,
    over: bool = False,
    divided: bool = False,
) -> None:
    """Raise ValueError if a fit was begun with other data; if it is unfinished, appended data may be allowed.

    With ``divided`` data other splits of the same data are allowed.
    """
    for what, then, now in (("", fit.source, given.reader), ("valid: ", fit.valid_source, given.valid)):
        if then is None or now is None:  # begun with batches or by an older version, or no validation data now
            continue
        if not isinstance(now, Reader):
            raise ValueError(f"{what}the fit in {directory} was begun with a reader of files: pass it to resume")
        # The batch size of held-out data has no effect on the fit.
        then = then if not what else {**then, "batch_size": now.batch_size}
        then = then if not divided else {**then, "shard": now.position()["shard"]}
        if (changed := now.changes(then, appended=appended)) is None:
            continue
        grown = not appended and now.changes(then, appended=True) is None
        remedy = (
            "pass resume='appended' to learn from what was appended too"
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


_SETTINGS = (
    "shuffle",
    "negative_rate",
    "warm_up",
    "seed",
    "patience",
    "min_delta",
    "metric",
    "class_weight",
    "plateau",
)


def _check_same(fit: Plan, plan: Plan) -> None:
    """Raise ValueError if a fit was begun by another plan; it may have more epochs now."""
    for name in _SETTINGS:
        before, now = getattr(fit, name), getattr(plan, name)
        if before != now:
            raise ValueError(f"the fit was begun with {name}={before!r}, now it is {now!r}: pass the same to resume")
