"""Checkpoints of a fit: a directory that holds, at any moment, a model and the state of its fit after a batch.

    fit --batch, batch, ... pass--> FitCheckpointer --save--> DIR: tables, record, FitState     replaced atomically
    killed; later, with resume: DIR --restore--> the model, its record, the FitState --> the same fit continues

A resumed fit is bit-identical to an uninterrupted one: the checkpoint has the tables with the state of optimizers and
rules, the record with its metrics so far, and the exact position in the data. A learner itself saves any other state,
such as a dense part in torch.

With several workers a checkpoint is one of all of them, at one clock of the pass: every worker sends its state to
worker 0, which writes them with the model. Under SSP and ASP the others wait until it is written; under BSP no push of
theirs is applied before worker 0 continues, so they do not.

    worker 0    batch k ... ticked   all-gather of states   save: tables, FitState.workers   batch k + 1 ...
    worker 1    batch k ... ticked   all-gather of states                                    batch k + 1 ...

Threads: that of the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import structs

from shoal.base.decoders import msgpack_decoder
from shoal.base.scalars import make_plain
from shoal.data import Reader
from shoal.errors import ShoalError
from shoal.metrics import StreamMetrics, accumulator_from_dict
from shoal.models import files, sources
from shoal.models.history import Fit, History, Windows
from shoal.models.learner import FitObserver, FitState, Learner
from shoal.models.pass_coordinator import PassCoordinator
from shoal.models.plan import FitInput, Plan
from shoal.models.shares import Share, WorkerState, divided
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.open import open_dir

_ENDED = 1  # flag of a worker that has no batch left
_worker_state = msgpack_decoder(WorkerState)

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
    resume : bool or "appended"
        Resume the fit whose checkpoint is in ``directory``; the result is bit-identical to that of an uninterrupted
        fit. Pass the same data and settings (``epochs`` may be larger). Without a checkpoint a fit begins. "appended"
        allows that files have grown and that files were added at the end of the list.
    overwrite : bool
        Whether to replace a model that is in ``directory``.
    storage_options : mapping, optional
        Options of the file system of a URL: see `shoal.Store.save`.

    Raises
    ------
    ValueError
        ``every`` is below 1, or ``resume`` is another word.
    """

    directory: StoragePath
    every: int | None = field(default=None, kw_only=True)
    resume: Resume = field(default=False, kw_only=True)
    overwrite: bool = field(default=False, kw_only=True)
    storage_options: Mapping[str, Any] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        make_plain(self)
        if self.every is not None and self.every < 1:
            raise ValueError(f"every is {self.every}: pass the batches between two checkpoints, 1 or more")
        if self.resume not in (False, True, "appended"):
            raise ValueError(f"resume is {self.resume!r}: pass True, False or 'appended'")


class FitCheckpointer(FitObserver):
    """Keeps checkpoints of a fit in a directory; a `FitObserver`.

    With several workers all of them make one, of the same directory, which all of them see. Ctrl-C then leaves the
    last checkpoint, since it may reach them at different batches.
    """

    def __init__(self, model: Learner, checkpointing: Checkpointing) -> None:
        self.directory = open_dir(checkpointing.directory, checkpointing.storage_options)
        self.overwrite = checkpointing.overwrite
        self.resume = checkpointing.resume
        self._model = model
        self._every = checkpointing.every
        self._clocks = 0  # of the pass: batches, of this worker or of others
        self._coordinator: PassCoordinator | None = None
        self._is_behind: Callable[[], bool] = lambda: False  # whether this worker repeats clocks that have counted

    def begin(self, coordinator: PassCoordinator) -> None:
        """Begin the fit, or resume it."""
        if coordinator.is_alone and self._model.store.num_workers > 1:
            raise ValueError(
                "a loop over store.splits fits each split by itself: leave checkpoint out, or pass each worker "
                "reader.split(store.rank, store.num_workers)"
            )
        self._coordinator = None if coordinator.is_alone else coordinator
        self._clocks = coordinator.clocks_of_pass
        self._is_behind = lambda: coordinator.is_behind
        coordinator.needs_all = True
        if coordinator.continued and coordinator.rank == 0:
            files.make_target(self.directory)  # a fit that ends by an error removes a new one

    def batch_done(self, seen: Sequence[StreamMetrics], fit_state: Callable[[], FitState]) -> None:
        """Write a checkpoint, if one is due."""
        self.clock_done(fit_state)

    def clock_done(self, fit_state: Callable[[], FitState]) -> None:
        """Write a checkpoint, if one is due."""
        self._clocks += 1
        if self._every is None or self._clocks % self._every:
            return
        if self._coordinator is None:
            if not self._is_behind():
                self._model.save(self.directory, overwrite=True, fit_state=fit_state())
        else:
            self._save_together(self._coordinator, fit_state(), has_ended=False)

    def meet(self, fit_state: Callable[[], FitState]) -> bool:
        """Take part in the next checkpoint of workers that have not ended the pass; return whether all have."""
        if self._every is None or self._coordinator is None:
            return True
        return self._save_together(self._coordinator, fit_state(), has_ended=True)

    def _save_together(self, coordinator: PassCoordinator, fit_state: FitState, *, has_ended: bool) -> bool:
        """Write a checkpoint of all workers within a pass, unless all have ended it, which is returned."""
        (mine,) = fit_state.workers
        found = coordinator.exchange(msgspec.msgpack.encode(mine), flag=_ENDED if has_ended else 0, to=0)
        if all(flag == _ENDED for flag in found.flags):
            return True
        if coordinator.rank == 0 and not found.is_past:
            states = [_worker_state.decode(one) for one in found.messages if one is not None]
            record = self._model.record
            mine_only = record.examples
            record.examples = fit_state.known + sum(
                accumulator_from_dict(one.seen).examples + one.unmeasured for one in states
            )
            try:
                self._model.save(
                    self.directory, overwrite=True, fit_state=structs.replace(fit_state, workers=tuple(states))
                )
            finally:
                record.examples = mine_only
        if not self._model.store.consistency.is_bulk:
            coordinator.wait_for_all()
        return False

    def pass_done(self, fit_state: FitState) -> None:
        """Write a checkpoint."""
        self._clocks = 0
        if self._coordinator is None or not self._coordinator.is_past:
            self.save(fit_state)
        if self._coordinator is not None:
            self._coordinator.wait_for_all()

    def save(self, fit_state: FitState | None = None) -> None:
        """Write the model, on worker 0; without the state of a fit, which is then over."""
        if self._coordinator is None or self._coordinator.rank == 0:
            self._model.save(self.directory, overwrite=True, fit_state=fit_state)

    def interrupted(self, fit_state: FitState) -> None:
        """Write a checkpoint; of several workers, none, since they may have ended at different batches."""
        if self._coordinator is None:
            self._model.save(self.directory, overwrite=True, fit_state=fit_state)

    def best_folder(self, pass_number: int) -> StorageDir | None:
        """Return a folder of the directory, which the next checkpoint will name."""
        return self.directory.child(files.best_folder(pass_number))


class FitFinishedError(ValueError):
    """The fit to be resumed has finished, by the settings of this call; the model has its weights."""


def begin_or_resume(
    model: Learner, given: FitInput, checkpointer: FitCheckpointer | None, coordinator: PassCoordinator
) -> FitState | None:
    """Restore the state of the fit in a checkpointer's directory, or check that a fit may begin there.

    Of several workers worker 0 makes the directory, and all of them restore the fit, or none does.
    """
    if checkpointer is None:
        return None
    described, failed = None, None
    try:
        described = _described(model, given, checkpointer, is_first=coordinator.rank == 0)
    except Exception as error:
        failed = error
    _agree(coordinator, failed, has_model=described is not None)
    fit_state = None
    if described is not None:
        fit_state = _restored(model, given, checkpointer, described)
        if model.store.num_workers > 1 or len(fit_state.workers) > 1:
            fit_state = _of_worker(fit_state, model.store.rank, model.store.num_workers)
    checkpointer.begin(coordinator)
    return fit_state


def _described(
    model: Learner, given: FitInput, checkpointer: FitCheckpointer, *, is_first: bool
) -> files.ModelFile | None:
    """Read the fit to resume, after all checks that change nothing; None: there is none, and one may begin."""
    directory, resume = checkpointer.directory, checkpointer.resume
    if not (resume and files.is_model(directory)):
        if is_first:
            # The predecessor of a worker that replaces it may have written a model.
            files.check_target(directory, overwrite=checkpointer.overwrite or model.store.member.is_replacement)
            files.make_target(directory)
            model.store.check_storage(directory)
        return None
    described = files.read(directory)
    fit = described.history.fits[-1] if described.history.fits else None
    apart = model.store.num_workers > 1 or (described.fit_state is not None and bool(described.fit_state.workers))
    if described.fit_state is None:
        _check_over(directory, described.history, given, divided=apart)
        return described
    if fit is None:
        raise ValueError(f"{directory} does not describe how its fit was begun: begin another one")
    _check_same(fit.plan, given.plan)
    _check_data(directory, fit, given, appended=resume == "appended", divided=apart)
    fit_state = described.fit_state
    if _has_grown(fit, given.reader, resume) and (fit_state.batches or fit_state.workers):
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


def _agree(coordinator: PassCoordinator, failed: Exception | None, *, has_model: bool) -> None:
    """Raise the error of this worker or of another one: either all of them go on, or none does."""
    message = b"" if failed is None else str(failed).encode()
    flags, messages, _ = coordinator.exchange(message, flag=2 if failed is not None else int(has_model))
    if failed is not None:
        raise failed
    for rank, (flag, its) in enumerate(zip(flags, messages, strict=True)):
        if flag == 2 and its is not None:
            raise ShoalError(f"worker {rank} cannot begin the fit: {its.decode()}")
        if flag is not None and flag != int(has_model):
            raise ShoalError(
                f"worker {rank} and worker {coordinator.rank} do not see the same checkpoint: the directory must be on "
                "storage that all workers share"
            )


def _has_grown(fit: Fit, reader: Any, resume: Resume) -> bool:
    if resume != "appended" or fit.source is None or not isinstance(reader, Reader):
        return False
    return bool(fit.source["files"] != reader.fingerprint()["files"])


def _restored(model: Learner, given: FitInput, checkpointer: FitCheckpointer, described: files.ModelFile) -> FitState:
    """Restore a fit that was checked."""
    directory, reader = checkpointer.directory, given.reader
    taken = model.restore(directory, resume=True)
    if described.fit_state is None:
        raise FitFinishedError(f"the fit in {directory} has finished: begin another one in another directory")
    fit_state, fit = described.fit_state, described.history.fits[-1]
    if taken is None or taken != fit_state:
        raise ValueError(f"the fit in {directory} was just saved by another process too: train in one process")
    if _has_grown(fit, reader, checkpointer.resume) and fit_state.position is not None:
        fit_state = structs.replace(fit_state, position={**fit_state.position, "files": reader.position()["files"]})
    fits = model.record.fits
    fits[-1] = structs.replace(fits[-1], plan=given.plan)
    if isinstance(reader, Reader) and fit.source is not None:
        source, held_out = reader.fingerprint(), sources.fingerprint(given.valid)
        fits[-1] = structs.replace(fits[-1], data=sources.path_of(reader), source=source, valid_source=held_out)
    return fit_state


def _of_worker(fit_state: FitState, rank: int, workers: int) -> FitState:
    """Return the state of one of ``workers``, among which what is left of the pass is divided."""
    states = fit_state.workers
    if not states:
        if fit_state.seen is None:  # between two passes
            return fit_state
        split = (0, 1) if fit_state.position is None else fit_state.position["shard"]
        alone = Share(
            rank=split[0],
            workers=split[1],
            batches=fit_state.batches,
            examples=accumulator_from_dict(fit_state.seen).examples,
            read=fit_state.read,
            position=fit_state.position,
        )
        states = (
            WorkerState(shares=(alone,), seen=fit_state.seen, features=fit_state.features, windows=fit_state.windows),
        )
    mine = divided(states, workers)[rank]
    return structs.replace(
        fit_state, batches=0, read=0, position=None, seen=None, features=0, windows=Windows(), workers=(mine,)
    )


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


_SETTINGS = ("shuffle", "negative_rate", "warm_up", "seed", "patience", "min_delta", "metric", "class_weight")


def _check_same(fit: Plan, plan: Plan) -> None:
    """Raise ValueError if a fit was begun by another plan; it may have more epochs now."""
    for name in _SETTINGS:
        before, now = getattr(fit, name), getattr(plan, name)
        if before != now:
            raise ValueError(f"the fit was begun with {name}={before!r}, now it is {now!r}: pass the same to resume")
