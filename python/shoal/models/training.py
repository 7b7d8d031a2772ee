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

On a cluster every batch is a clock of the store. Each worker learns from its split and measures its own validation
data; a pass ends for all workers together (pass_coordinator.py).

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
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from typing import Any

from shoal.base.interrupts import at_boundaries
from shoal.data import Batch, Reader
from shoal.metrics import Accumulator
from shoal.models.evaluation import measure
from shoal.models.history import Fit
from shoal.models.learner import FitObserver, FitState, Learner
from shoal.models.model_trainer import BEGINNING, ModelTrainer
from shoal.models.pass_coordinator import PassCoordinator
from shoal.models.plan import Plan
from shoal.models.progress import show_progress
from shoal.models.sources import check_iterable, check_stream, check_valid, fingerprint, path_of, why_empty
from shoal.storage.base import StorageDir
from shoal.store.base import Store


def train(
    models: Sequence[Learner],
    reader: Iterable[Batch],
    valid: Iterable[Batch] | None,
    plan: Plan,
    *,
    progress: bool | float,
    observers: Sequence[FitObserver] = (),
    fit_state: FitState | None = None,
) -> None:
    """Train all models; see `shoal.models.Model.fit`. They share a store and their prepared batches.

    With ``fit_state`` the one model continues the last fit of its record.
    """
    check_iterable(reader, "reader", passes=plan.epochs)
    if valid is not None:
        check_iterable(valid, "valid", passes=plan.epochs)
    elif plan.patience is not None:
        raise ValueError("patience needs something to measure after each pass: pass valid=")
    first = models[0]
    coordinator = PassCoordinator(first.store, first.name)
    if plan.patience is not None and first.store.num_workers > 1:
        raise ValueError(
            f"patience keeps the best weights in a file of this process, and the store has {first.store.num_workers} "
            f"workers: leave it out, or train with one worker"
        )
    if fit_state is None:
        begin_fit(models, reader, valid, plan, fingerprints=bool(observers))
    coordinator.begin()
    try:
        _TrainingRun(models, reader, valid, plan, coordinator, progress, observers).passes(fit_state or BEGINNING)
    except BaseException:
        coordinator.abandon()
        raise


class _TrainingRun:
    """One call of `train`."""

    def __init__(
        self,
        models: Sequence[Learner],
        reader: Iterable[Batch],
        valid: Iterable[Batch] | None,
        plan: Plan,
        coordinator: PassCoordinator,
        progress: bool | float,
        observers: Sequence[FitObserver],
    ) -> None:
        self._models = models
        self._reader = reader
        self._valid = valid
        self._plan = plan
        self._coordinator = coordinator
        self._progress = progress
        self._observers = observers
        self._stack = ExitStack()

    def passes(self, begin: FitState) -> None:
        plan, valid = self._plan, self._valid
        with self._stack:
            trainers = [ModelTrainer(model, plan, self._stack, self._best_folder, begin) for model in self._models]
            for epoch in range(begin.epoch, plan.epochs):
                learning = [trainer for trainer in trainers if not trainer.stopped]
                if not learning:
                    break
                title = f"pass {epoch + 1}/{plan.epochs}" if plan.epochs > 1 else "train"
                known = min(trainer.model.examples for trainer in learning)
                at = begin if epoch == begin.epoch and begin.batches else FitState(epoch=epoch, known=known)
                self._one_pass(learning, at, title)
                if learning[0].model.examples == 0 and learning[0].model.store.num_workers == 1:
                    raise ValueError(f"{why_empty(self._reader)}: nothing was learned")
                if epoch == begin.epoch and learning[0].seen.base_rate == 0:
                    check_stream(self._reader)
                try:
                    self._coordinator.end_pass()
                    self._sweep(learning[0].model.store)
                    if valid is not None:
                        measured = measure([trainer.model for trainer in learning], valid)
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
                    if (interrupt := interrupted()) is not None:
                        raise interrupt
            for trainer in trainers:
                trainer.finish()

    @staticmethod
    def _sweep(store: Store) -> None:
        """Drop the rows that the tables' expiry rules select: all workers are at one clock, and end it."""
        if any(table.spec.has_rules for table in store.tables.values()):
            if store.rank == 0:
                store.sweep()
            store.tick()

    def _best_folder(self, number: int) -> StorageDir | None:
        found = [folder for observer in self._observers if (folder := observer.best_folder(number)) is not None]
        return found[0] if found else None

    def _batches(self, at: FitState, source: Iterable[Batch]) -> Iterable[Batch]:
        """Return the batches of a pass that were not learned from yet."""
        if at.position is not None:
            return self._plan.batches(source, at.epoch, at.known, at.read)
        batches = self._plan.batches(source, at.epoch, at.known)
        return (
            batches if at.seen is None else _skip_learned(batches, at.batches, Accumulator.from_dict(at.seen).examples)
        )

    def _one_pass(self, trainers: Sequence[ModelTrainer], at: FitState, title: str) -> None:
        first = trainers[0].model
        for trainer in trainers:
            trainer.begin(at)
        source = self._plan.source(self._reader, at.epoch)
        if at.position is not None:
            if not isinstance(source, Reader):
                raise TypeError(f"the fit is within a reader, and this is a {type(source).__name__}: pass a reader")
            source = source.resume(at.position)
        tracked = _TrackedReader(source, at, follow=bool(self._observers) and self._plan.keeps_batches)
        complete = False
        try:
            with (
                show_progress(title, source, [trainer.seen for trainer in trainers], self._progress) as bar,
                at_boundaries() as interrupted,
                closing(first.prepared(self._batches(at, tracked))) as ready,
            ):
                for batch, prepared in ready:
                    for trainer in trainers:
                        trainer.learn(batch, prepared)
                    first.store.tick()
                    tracked.learned()
                    fit_state = functools.partial(_fit_state, trainers[0], tracked)
                    for observer in self._observers:
                        observer.batch_done([trainer.seen for trainer in trainers], fit_state)
                    bar.update()
                    if (interrupt := interrupted()) is not None:
                        for observer in self._observers:
                            observer.interrupted(fit_state())
                        raise interrupt
            complete = True
        finally:
            for trainer in trainers:
                trainer.end(skipped=int(getattr(source, "skipped", 0)), complete=complete, reader=source)


def _skip_learned(batches: Iterable[Batch], count: int, examples: int) -> Iterator[Batch]:
    """Skip the batches that were learned from, and check their number of examples."""
    iterator = iter(batches)
    found = sum(len(batch) for batch in islice(iterator, count))
    if found != examples:
        raise ValueError(
            f"the fit had learned from {examples:,} examples of this pass in {count:,} batches, and these have "
            f"{found:,} now: the data has changed, or was appended to after an incomplete batch"
        )
    yield from iterator


class _TrackedReader:
    """The reader of a pass, which is read ahead, and its position after the batch that was learned from last."""

    def __init__(self, source: Iterable[Batch], at: FitState, *, follow: bool) -> None:
        self._source = source
        self._reader = source if follow and isinstance(source, Reader) else None
        self._ahead: deque[tuple[Any, int]] = deque()  # cursor after each batch read, and its examples
        self._cursor: Any = None
        self._state = at

    def __iter__(self) -> Iterator[Batch]:
        iterator = iter(self._source)
        try:
            for batch in iterator:
                if self._reader is not None:
                    self._ahead.append((self._reader.cursor, len(batch)))
                yield batch
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def learned(self) -> None:
        """Record that one more batch was learned from."""
        read = self._state.read
        if self._reader is not None:
            self._cursor, examples = self._ahead.popleft()
            read += examples
        self._state = replace(self._state, batches=self._state.batches + 1, read=read)

    @property
    def fit_state(self) -> FitState:
        """The state of the pass, as far as it depends on the data."""
        if self._reader is None:
            return self._state
        return replace(self._state, position=self._reader.position(self._cursor))


def _fit_state(trainer: ModelTrainer, tracked: _TrackedReader) -> FitState:
    return trainer.fit_state(tracked.fit_state)


def begin_fit(
    models: Sequence[Learner],
    reader: Iterable[Batch],
    valid: Iterable[Batch] | None,
    plan: Plan,
    *,
    fingerprints: bool = False,
) -> None:
    """Record the data and the settings of the fit; with fingerprints of the data if the fit may be resumed."""
    if valid is not None:
        check_valid(models[0], valid)
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
            batch_size=getattr(reader, "batch_size", None),
            threads=model.store.threads,
            source=sources[0],
            valid_source=sources[1],
        )
        model.record.fits.append(fit)
