"""The training loop: one or several models learn from one reader, which is parsed and prepared once for all of them.

    reader --> preprocessing (sample, shuffle, sort ahead) --> each batch: model 1 learns, model 2 learns, ...
                                                               each pass:  validation, early stopping

A single model is a list of one. What a model learns depends on the batches only, so it is bit-identical alone and among
others. Any `Learner` can be trained.

Early stopping. A model whose validation metric has not improved for ``patience`` passes stops, and the weights of its
best pass are restored. They are written to a folder, a temporary one (``TMPDIR``) unless an observer names one: as many
bytes as the rows have, after each pass, except the last, that is better than all before; they are read once.

Resuming. The fit of one learner can be stopped after any batch and resumed later from its weights, its record and a
`FitState`. If a pass's batches are those of the reader, the reader resumes; otherwise the pass is read again and the
batches that were learned from are skipped.

On a cluster every batch is a clock of the store. Each worker learns from its split and predicts its own validation
data; a pass ends for all workers together (pass_coordinator.py), and its metrics are those of all (merging.py).

Invariants
    I1  All models have learned from the same batches whenever the loop ends, also by an error of the reader or the
        first Ctrl-C or SIGTERM. A second one, or an error while a model learns, may leave one batch that only some have
        learned from.
    I2  A model's table, history and counts are consistent after every batch.
    I3  A resumed fit learns from the same batches, in the same order, as an uninterrupted one.

Threads: the caller's; a helper prepares ahead (preprocessing.py). The models' store distributes each call over its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing

from shoal.base.interrupts import Terminated, at_boundaries
from shoal.base.scalars import plain
from shoal.data import Batch, Reader
from shoal.errors import ShoalError
from shoal.models.history import Fit
from shoal.models.learner import FitObserver, FitState, Learner, Prepared
from shoal.models.merging import measure_together, merge_pass
from shoal.models.model_trainer import BEGINNING, ModelTrainer
from shoal.models.pass_coordinator import PassCoordinator, WorkersMoveError
from shoal.models.pass_reader import PassReader
from shoal.models.plan import FitInput
from shoal.models.progress import show_progress
from shoal.models.room import RoomForRows
from shoal.models.shares import share_of
from shoal.models.sources import check_iterable, check_stream, check_valid, fingerprint, path_of, why_empty
from shoal.models.takeover import Publisher, hand_over
from shoal.storage.base import StorageDir
from shoal.store.base import Store

_Ready = tuple[Batch, Prepared]


def train(
    models: Sequence[Learner],
    given: FitInput,
    *,
    progress: bool | float,
    coordinator: PassCoordinator,
    observers: Sequence[FitObserver],
    fit_states: Sequence[FitState] | None,
    publisher: Publisher,
) -> None:
    """Train all models; see `shoal.models.Model.fit`. They share their prepared batches, and on a cluster a store.

    With ``fit_states``, one of each, the models continue the last fit of their records. The ``coordinator`` has begun
    the fit.
    """
    first, (reader, valid, plan) = models[0], given
    first.check_plan(plan)
    check_iterable(reader, "reader", passes=plan.epochs)
    if valid is not None:
        check_iterable(valid, "valid", passes=plan.epochs)
    elif plan.patience is not None:
        raise ValueError("early stopping needs something to measure after each pass: pass valid=")
    if plan.patience is not None and first.store.num_workers > 1 and not any(one.best_folder(1) for one in observers):
        raise ValueError(
            f"early stopping keeps the best weights in a directory that all {first.store.num_workers} workers see: "
            "pass checkpoint=Checkpointing(directory), or train with one worker"
        )
    if fit_states is None:
        begin_fit(models, given, fingerprints=bool(observers))
    run = _TrainingRun(models, given, coordinator, progress, observers, publisher)
    try:
        for observer in observers:
            observer.fit_began()
        with coordinator.handing_over(run.is_told_to_leave):
            run.passes([BEGINNING] * len(models) if fit_states is None else fit_states)
    except BaseException as error:
        for observer in observers:
            observer.fit_ended(error)
        raise
    for observer in observers:
        observer.fit_ended(None)


class _TrainingRun:
    """One call of `train`."""

    def __init__(
        self,
        models: Sequence[Learner],
        given: FitInput,
        coordinator: PassCoordinator,
        progress: bool | float,
        observers: Sequence[FitObserver],
        publisher: Publisher,
    ) -> None:
        self._models = models
        self._stores = list(dict.fromkeys(model.store for model in models))
        self._reader, self._valid, self._plan = given
        self._coordinator = coordinator
        self._progress = progress
        self._observers = observers
        self._publisher = publisher
        self._stack = ExitStack()
        self._trainers: list[ModelTrainer] = []
        self._interrupted: Callable[[], KeyboardInterrupt | None] | None = None  # of the whole fit

    def passes(self, begins: Sequence[FitState]) -> None:
        plan, first = self._plan, begins[0].epoch
        with self._stack:
            if self._coordinator.may_change:
                self._interrupted = self._stack.enter_context(at_boundaries())
            self._trainers = trainers = [
                ModelTrainer(model, plan, self._stack, self._best_folder, begin)
                for model, begin in zip(self._models, begins, strict=True)
            ]
            for epoch in range(first, plan.epochs):
                learning = [trainer for trainer in trainers if not trainer.stopped]
                if not learning:
                    break
                title = f"pass {epoch + 1}/{plan.epochs}" if plan.epochs > 1 else "train"
                known = min(trainer.model.examples for trainer in learning)
                at = [begin for trainer, begin in zip(trainers, begins, strict=True) if not trainer.stopped]
                is_within = epoch == first and bool(at[0].batches or at[0].workers)
                if not is_within:
                    at = [FitState(epoch=epoch, known=known)] * len(learning)
                if not self._coordinator.is_behind:
                    if not is_within:
                        self._coordinator.begin_pass()
                    self._publisher.publish(
                        begins if is_within else [trainer.fit_state(at[0], between=True) for trainer in trainers]
                    )
                self._coordinator.begin_learning()
                self._one_pass(learning, at, title)
                merged = merge_pass(self._coordinator, learning, has_valid=self._valid is not None)
                is_whole = not self._coordinator.is_alone or learning[0].model.store.num_workers == 1
                if learning[0].model.examples == 0 and is_whole:
                    raise ValueError(f"{why_empty(self._reader)}: nothing was learned")
                if epoch == first and learning[0].seen.base_rate == 0:
                    check_stream(self._reader)
                try:
                    self._sweep()
                    if merged.any_valid:
                        measured = measure_together(
                            self._coordinator, [trainer.model for trainer in learning], self._valid
                        )
                        for trainer, found in zip(learning, measured, strict=True):
                            trainer.record_validation(found, last=epoch + 1 == plan.epochs)
                    self._coordinator.wait_for_all()
                except KeyboardInterrupt:  # the learned weights are kept; the pass is not measured
                    for observer in self._observers:
                        observer.interrupted(learning[0].fit_state(FitState(epoch=epoch + 1), between=True))
                    raise
                with at_boundaries() as interrupted:
                    for observer in self._observers:
                        observer.pass_done(learning[0].fit_state(FitState(epoch=epoch + 1), between=True))
                    if (interrupt := interrupted()) is not None and not self._leaves():
                        raise interrupt
            self._finish(FitState(epoch=plan.epochs))
            if self._interrupted is not None and (interrupt := self._interrupted()) is not None:
                raise interrupt

    def _finish(self, end: FitState) -> None:
        """Restore the weights of the best passes, if some are kept."""
        self._publish_together([trainer.fit_state(end, between=True) for trainer in self._trainers])
        try:
            for trainer in self._trainers:
                trainer.finish()
        except ShoalError:
            if self._coordinator.has_lost:
                raise WorkersMoveError from None
            raise
        self._publish_together([end] * len(self._trainers))  # the best weights may be removed now

    def _publish_together(self, states: Sequence[FitState]) -> None:
        """Publish states outside of a pass, all workers together, if others continue them when one dies."""
        if self._coordinator.may_lose:
            self._publisher.publish(states)
            self._coordinator.begin_learning()

    def _sweep(self) -> None:
        """Drop the rows that the tables' expiry rules select: all workers are at one clock, and end it."""
        for store in self._stores:
            if any(table.spec.has_rules for table in store.tables.values()):
                if store.rank == 0 and not self._coordinator.is_behind:
                    store.sweep()
                self._tick_one(store)

    def _tick_one(self, store: Store) -> None:
        if self._coordinator.is_behind:
            self._coordinator.repeat_clock()
        else:
            store.tick()

    def _best_folder(self, number: int) -> StorageDir | None:
        found = [folder for observer in self._observers if (folder := observer.best_folder(number)) is not None]
        return found[0] if found else None

    def _one_pass(self, trainers: Sequence[ModelTrainer], at: Sequence[FitState], title: str) -> None:
        first = trainers[0].model
        for trainer, its in zip(trainers, at, strict=True):
            trainer.begin(its)
        publishes = self._coordinator.publishes or self._coordinator.may_change
        follow = (bool(self._observers) or publishes) and self._plan.keeps_batches
        rank, workers = first.store.rank, first.store.num_workers
        data = PassReader(
            self._reader, self._plan, at[0], rank=rank, workers=workers, follow=follow, in_parts=publishes
        )
        fit_state = functools.partial(_fit_state, trainers[0], data)
        progress = self._progress if self._coordinator.is_alone or self._coordinator.rank == 0 else False
        complete = False
        try:
            with (
                show_progress(title, data, [trainer.seen for trainer in trainers], progress) as bar,
                at_boundaries() as interrupted,
                closing(iter(data)) as batches,
                ExitStack() as stack,
            ):
                interrupted = self._interrupted or interrupted
                self._check_change()
                self._skip(batches, trainers, data, fit_state)
                repeats = first.store.member.repeats if first.store.clock == first.store.member.joined_at else 0
                ready = stack.enter_context(closing(first.prepared(batches)))
                room = RoomForRows(self._stores, data)
                try:
                    for batch, prepared in self._until_the_data_fails(ready, fit_state):
                        for trainer in trainers:
                            trainer.learn(batch, prepared)
                        room.learned(len(batch))
                        self._publisher.publish_changes()
                        for store in self._stores:
                            store.tick()
                            store.activity.learned(len(batch), trainers[0].measure)
                        data.learned()
                        if repeats:
                            repeats -= 1
                            trainers[0].repeated += len(batch)
                        for observer in self._observers:
                            observer.batch_done([trainer.seen for trainer in trainers], fit_state)
                        if self._publisher.is_due():
                            self._publisher.publish([_fit_state(trainer, data) for trainer in self._trainers])
                        bar.update()
                        self._check_change()
                        if (interrupt := interrupted()) is not None and not self._leaves():
                            for observer in self._observers:
                                observer.interrupted(fit_state())
                            raise interrupt
                except ShoalError as error:  # another worker may have ended at the same signal before
                    if (interrupt := interrupted()) is not None:
                        raise interrupt from error
                    raise
            self._end_pass(first, fit_state)
            if self._coordinator.may_lose:
                self._publisher.publish([_fit_state(trainer, data) for trainer in self._trainers])
            complete = True
        except WorkersMoveError:
            states = [_fit_state(trainer, data) for trainer in self._trainers]
            hand_over(self._models, self._coordinator, states, leaves=self.is_told_to_leave())
        finally:
            for trainer in trainers:
                trainer.end(skipped=data.skipped, complete=complete, reader=data.last)

    def _until_the_data_fails(self, ready: Iterator[_Ready], fit_state: Callable[[], FitState]) -> Iterator[_Ready]:
        """Yield the batches of a pass; an error of the data ends the fit like Ctrl-C, after the batches before it."""
        has_learned = False
        try:
            for one in ready:
                yield one
                has_learned = True
        except Exception:
            if has_learned:
                for observer in self._observers:
                    observer.interrupted(fit_state())
            raise

    def is_told_to_leave(self) -> bool:
        """Whether this worker was asked to end, in a job whose number of workers may change."""
        return self._interrupted is not None and isinstance(self._interrupted(), Terminated)

    def _leaves(self) -> bool:
        """Whether this worker was asked to end, and the others are enough to continue."""
        store = self._stores[0]
        if store.member.workers_range is None:
            return False
        return self.is_told_to_leave() and store.num_workers > store.member.workers_range[0]

    def _check_change(self) -> None:
        """Raise WorkersMoveError if this worker is to hand over its state.

        Only before it has marked the end of its pass: after that others may have seen that all have ended theirs.
        """
        wants = self._leaves() or self._coordinator.workers_change
        if self._models[0].agree_on_move(wants):
            raise WorkersMoveError

    def _skip(
        self,
        batches: Iterator[Batch],
        trainers: Sequence[ModelTrainer],
        data: PassReader,
        fit_state: Callable[[], FitState],
    ) -> None:
        """Skip the batches that the predecessor of this worker has learned from."""
        while self._coordinator.is_behind and (batch := next(batches, None)) is not None:
            for trainer in trainers:
                trainer.skip(batch)
            self._coordinator.repeat_clock()
            data.learned()
            for observer in self._observers:
                observer.clock_done(fit_state)
        self._publisher.take_changes()

    def _end_pass(self, first: Learner, fit_state: Callable[[], FitState]) -> None:
        """Take part in the clocks of workers that have not ended their pass."""

        def empty_clock() -> None:
            for observer in self._observers:
                observer.clock_done(fit_state)

        def meet() -> bool:
            have_ended = [observer.meet(fit_state) for observer in self._observers]
            return all(have_ended)

        while first.step_without_batch():
            self._coordinator.tick()
            empty_clock()
            self._check_change()
        self._coordinator.end_pass(empty_clock, meet)


def _fit_state(trainer: ModelTrainer, data: PassReader) -> FitState:
    if trainer.stopped:
        return trainer.fit_state(data.begin, between=True)
    return data.state_in(trainer.fit_state(data.begin), trainer.model.random_state)


def begin_fit(models: Sequence[Learner], given: FitInput, *, fingerprints: bool = False) -> None:
    """Record the data and the settings of the fit; with fingerprints of the data if the fit may be resumed."""
    reader, valid, plan = given
    if valid is not None:
        together = models[0].store.num_workers > 1 and isinstance(valid, Reader)  # a split may be empty
        check_valid(models[0], share_of(valid, 0, 1) if together and isinstance(valid, Reader) else valid)
    if isinstance(reader, Reader):
        reader.check_positive()
    if isinstance(valid, Reader):
        valid.check_positive(alone=True)
    sources = (fingerprint(reader), fingerprint(valid)) if fingerprints else (None, None)
    for model in models:
        model.check_format(reader)
        model.record_format(reader)
        model.record.best_pass = None
        fit = Fit(
            first_pass=len(model.record.passes) + 1,
            plan=plan,
            data=path_of(reader),
            valid=path_of(valid),
            batch_size=plain(getattr(reader, "batch_size", None)),
            threads=model.store.threads,
            source=sources[0],
            valid_source=sources[1],
        )
        model.record.fits.append(fit)
