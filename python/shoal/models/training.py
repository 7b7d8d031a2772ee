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

On a cluster every batch is a clock of the store. Each worker learns from its shares and predicts its own validation
data; a pass ends for all workers together (team.py), and what is done once then, by the one that leads: metrics of all,
validation, the best weights, a checkpoint.

Invariants
    I1  All models have learned from the same batches whenever the loop ends, also by an error of the reader or the
        first Ctrl-C or SIGTERM. A second one, or an error while a model learns, may leave one batch that only some have
        learned from.
    I2  A model's table, history and counts are consistent after every batch.
    I3  A resumed fit learns from the same batches, in the same order, as an uninterrupted one.

Threads: the caller's; a helper prepares ahead (preprocessing.py). The models' store distributes each call over its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from itertools import islice

from shoal.base.interrupts import Terminated, at_boundaries
from shoal.base.scalars import plain
from shoal.data import Batch, Reader
from shoal.data.stream import follows_files, is_endless, is_live
from shoal.errors import ShoalError
from shoal.models.evaluation import begun_early, check_data, evaluate, measure, predicted
from shoal.models.history import Best, Fit
from shoal.models.learner import FitObserver, FitState, Learner, Prepared, consistency_of, why_inexact
from shoal.models.measured import Evaluation
from shoal.models.model_trainer import ModelTrainer
from shoal.models.pass_reader import PassReader
from shoal.models.plan import FitInput
from shoal.models.progress import Progress
from shoal.models.progress_bar import show_progress
from shoal.models.room import RoomForRows
from shoal.models.shares import share_of
from shoal.models.sources import (
    check_endless,
    check_iterable,
    check_stream,
    check_valid,
    fingerprint,
    path_of,
    why_empty,
)
from shoal.models.team import Team, WorkersMoveError
from shoal.storage.base import StorageDir
from shoal.store.base import Store

_LOOK_SECONDS = 1.0  # after which a worker asks whether another one has ended their stream

_Ready = tuple[Batch, Prepared]


class Training:
    """One call of `train`: what is called by the fit."""

    def __init__(
        self,
        models: Sequence[Learner],
        given: FitInput,
        run: Progress,
        team: Team,
        progress: bool | float,
        observers: Sequence[FitObserver],
        interrupted: Callable[[], KeyboardInterrupt | None] | None,
    ) -> None:
        self._models = models
        self._stores = list(dict.fromkeys(model.store for model in models))
        self._reader, self._valid, self._plan = given
        self._run = run
        self._team = team
        self._progress = progress
        self._observers = observers
        self._interrupted = interrupted  # of the whole fit
        self._stack = ExitStack()
        self._trainers: list[ModelTrainer] = []
        self._order = models[0].store.order  # of what is recorded, or made again
        self._last: object = self._reader  # that was read last
        self._is_within = False  # whether any batch of the pass was learned from
        self._stops = False  # whether a stream of several workers ends
        self._look_at = 0.0  # when this is asked next

    def train(self, resumed: FitState | None) -> None:
        """Train all models; see `shoal.models.Model.fit`. They share their prepared batches, and on a cluster a store.

        `Progress` has the pass and what is left of it; ``resumed``: a checkpoint of it was restored.
        """
        try:
            for observer in self._observers:
                observer.fit_began()
            with self._stack:
                self._passes(resumed)
        except BaseException as error:
            for observer in self._observers:
                observer.fit_ended(error)
            raise
        for observer in self._observers:
            observer.fit_ended(None)

    def _passes(self, resumed: FitState | None) -> None:
        plan, run = self._plan, self._run
        best_folder = partial(_best_folder, self._observers)
        self._trainers = [ModelTrainer(model, plan, self._stack, best_folder) for model in self._models]
        for observer in self._observers:
            observer.ready(self._fit_state)
        self._meet_after_checkpoint()
        while run.header.epoch < plan.epochs:
            learning = [trainer for trainer in self._trainers if not trainer.stopped]
            if not learning:
                break
            epoch = run.header.epoch
            self._one_pass(learning, resumed, f"pass {epoch + 1}/{plan.epochs}" if plan.epochs > 1 else "train")
            resumed = None
            before = [list(trainer.model.record.passes) for trainer in learning]
            try:
                self._sweep()
                self._end_pass(learning)
            except KeyboardInterrupt:  # the learned weights are kept; a fit that resumes measures the pass
                if run.header.epoch > epoch:  # half of the next one has begun: the checkpoint before is whole
                    raise
                now = [trainer.model.record.passes for trainer in learning]
                for trainer, passes in zip(learning, before, strict=True):
                    trainer.model.record.passes = passes
                for observer in self._observers:
                    observer.interrupted(self._fit_state)
                for trainer, passes in zip(learning, now, strict=True):
                    trainer.model.record.passes = passes
                raise
            with at_boundaries() as interrupted:
                for observer in self._observers:
                    observer.pass_done(self._fit_state)
                self._meet_after_checkpoint()
                if (interrupt := interrupted()) is not None and not self._leaves():
                    raise interrupt
        self._finish()
        if self._interrupted is not None and (interrupt := self._interrupted()) is not None:
            raise interrupt

    def _end_pass(self, learning: Sequence[ModelTrainer]) -> None:
        """Measure the pass, which all have ended, and begin the next one."""
        if self._run.any_valid and not self._team.is_alone:
            self._run.predict(lambda: self._predicted([trainer.model for trainer in learning]))
        epoch = self._run.header.epoch

        def measure_pass() -> None:
            for trainer in learning:
                if self._run.writes:
                    trainer.merge(*self._run.work.seen(trainer))
                trainer.end(complete=True, reader=self._last)
            is_whole = not self._team.is_alone or learning[0].model.store.num_workers == 1
            if learning[0].model.examples == 0 and is_whole:
                raise ValueError(f"{why_empty(self._reader)}: nothing was learned")
            if len(learning[0].model.record.passes) == 1 and learning[0].seen.base_rate == 0:
                check_stream(self._reader)
            if self._run.any_valid:
                for trainer, one in zip(learning, self._evaluated(learning), strict=True):
                    trainer.record_validation(one, last=epoch + 1 == self._plan.epochs)

        self._run.end_pass(measure_pass)
        self._is_within = False
        for trainer in learning:
            trainer.update_stopped()
            trainer.begin()

    def _predicted(self, models: Sequence[Learner]) -> bytes:
        """Return what this worker predicts for its validation data."""
        if self._valid is not None:
            check_data(models, self._valid)
        batches = [] if self._valid is None else self._valid
        return predicted(models, batches, models[0].examples_to_measure(len(models))).encode()

    def _evaluated(self, learning: Sequence[ModelTrainer]) -> list[Evaluation]:
        """Measure what all workers have predicted."""
        models = [trainer.model for trainer in learning]
        if self._team.is_alone:
            return measure(models, self._valid)
        whole = models[0].examples_to_measure(len(models))
        whole.merge(self._run.predictions())
        return evaluate(whole, [] if self._valid is None else self._valid)

    def _finish(self) -> None:
        """Restore the weights of the best passes, if some are kept."""
        try:
            for trainer in self._trainers:
                trainer.finish()
        except ShoalError:
            if self._team.may_change and self._team.store.member.lost_workers:
                raise WorkersMoveError from None
            raise

    def _sweep(self) -> None:
        """Drop the rows that the tables' expiry rules select: all workers are at one clock, and end it."""
        for store in self._stores_with_rules():
            self._team.sweep(self._run.header.division, store)

    def _stores_with_rules(self) -> list[Store]:
        return [store for store in self._stores if any(table.spec.has_rules for table in store.tables.values())]

    # ---- the batches of a pass ---------------------------------------------------------------------------------------

    def _one_pass(self, trainers: Sequence[ModelTrainer], resumed: FitState | None, title: str) -> None:
        """Learn from the shares of this worker until all shares are done, by whom ever."""
        run = self._run
        for trainer in trainers:
            trainer.known = trainer.model.examples if resumed is None else run.header.known
            if resumed is not None and not run.writes:
                trainer.begin(*run.work.seen(trainer))
                trainer.model.record.examples = trainer.known + trainer.seen.examples
            else:
                trainer.begin()
            if resumed is not None:
                trainer.add_seconds(resumed.seconds)
        while True:
            complete = False
            try:
                # The workers of a stream end it together: a signal of one that is about to changes nothing.
                with at_boundaries() if is_live(self._reader) else nullcontext():
                    self._learn(trainers, title)
                complete = True
            finally:
                if not complete:
                    for trainer in trainers:
                        trainer.end(complete=False, reader=self._last)
            for trainer in trainers:
                trainer.model.record.examples = trainer.known
            if not run.divide_rest(is_paused=self._order is not None and self._order.has_meetings):
                break
            if self._order is not None and self._order.has_meetings:
                for observer in self._observers:
                    observer.paused(self._fit_state)
                self._meet_after_checkpoint()
            for trainer in trainers:
                seconds = trainer.seconds
                trainer.begin()
                trainer.add_seconds(seconds)
        for trainer in trainers:
            learned = run.work.examples(trainer.model) if run.writes else trainer.seen.examples
            trainer.model.record.examples = trainer.known + learned

    def _learn(self, trainers: Sequence[ModelTrainer], title: str) -> None:
        """Learn from what this worker has of the present division, and take part in the clocks of the others."""
        first, run = trainers[0].model, self._run
        store, header = first.store, run.header
        data = PassReader(
            self._reader,
            self._plan,
            run.work.shares,
            epoch=header.epoch,
            known=header.known,
            rank=store.rank,
            workers=store.num_workers,
            files=[run.work.files(share) for share in run.work.shares] if follows_files(self._reader) else (),
        )
        order = self._order
        if order is not None:
            order.begin(header.division)
        self._last = data.last
        progress = self._progress if self._team.leads else False
        with (
            show_progress(title, data, [trainer.seen for trainer in trainers], progress) as bar,
            at_boundaries() as interrupted,
        ):
            interrupted = self._interrupted or interrupted
            self._check_change()
            is_paused = self._learn_batches(trainers, data, bar.update, interrupted)
            if interrupted() is not None and not self._stops:  # it came after the last batch
                is_paused = self._is_told(interrupted) or is_paused
        self._last = data.last
        run.work.ended(data, trainers, is_over=not is_paused)
        while first.step_without_batch():
            run.work.tick()
            self._clock_done()
            self._check_change()
        if order is not None:
            order.end()
        self._team.end_clocks(header.division, self._clock_done)
        if order is not None:
            order.met()
        if self._stops:
            self._stop(trainers, interrupted() or Terminated())

    def _learn_batches(
        self,
        trainers: Sequence[ModelTrainer],
        data: PassReader,
        shown: Callable[[], None],
        interrupted: Callable[[], KeyboardInterrupt | None],
    ) -> bool:
        """Learn until the data ends, or return True: the clocks of all workers end before it."""
        first, run = trainers[0].model, self._run
        models = [trainer.model for trainer in trainers]
        is_paused = False
        batches_left = None if self._order is None else self._order.every
        with (
            closing(iter(data)) as batches,
            closing(begun_early(first.prepared(islice(batches, batches_left)), models, learns=True)) as ready,
        ):
            room = RoomForRows(self._stores, data)
            try:
                for batch, prepared in self._until_the_data_fails(ready):
                    if data.is_live and not len(batch):
                        self._idle()
                        if is_paused := self._is_told(interrupted):
                            break
                        continue
                    run.work.begin_batch(data.index)
                    for observer in self._observers:
                        observer.batch_begins(batch)
                    for trainer in trainers:
                        trainer.model.begin_batch(run.header.epoch, data.number)
                        trainer.learn(batch, prepared)
                        trainer.model.record_format(data.last)  # a stream's columns are known once it is read
                    self._is_within = True
                    self._last = data.last
                    room.learned(len(batch))
                    run.work.learned(data, len(batch), trainers)
                    self._sweep_stream()
                    for store in self._stores:
                        store.tick()
                        store.activity.learned(len(batch))
                    if batches_left is not None:
                        batches_left -= 1
                        is_paused = not batches_left
                    for observer in self._observers:
                        observer.batch_done([trainer.seen for trainer in trainers], self._fit_state)
                    shown()
                    if self._is_told(interrupted):
                        is_paused = True
                        break
            except ShoalError as error:  # another worker may have ended at the same signal before
                if (interrupt := interrupted()) is not None:
                    raise interrupt from error
                raise
        return is_paused

    def _meet_after_checkpoint(self) -> None:
        """Wait for the leader to have written a checkpoint, if what is recorded begins anew there."""
        if self._order is not None and self._order.has_meetings:
            self._order.rest(self._run.header.known + self._run.work.examples(self._models[0]))
            self._team.meet()

    def _is_told(self, interrupted: Callable[[], KeyboardInterrupt | None]) -> bool:
        """End the fit, or leave the job, if this process was told to, or if the job has other workers.

        Of a stream of several workers return whether they end their clocks here.
        """
        self._check_change()
        if is_live(self._reader) and not (self._team.is_alone or self._plan.shuffles) and self._team.can_continue:
            return self._pauses(interrupted)
        if (interrupt := interrupted()) is not None and not self._leaves():
            self._run.work.leave()
            for observer in self._observers:
                observer.interrupted(self._fit_state)
            raise interrupt
        return False

    # ---- streams -----------------------------------------------------------------------------------------------------

    def _idle(self) -> None:
        """Let the clocks of the others go on while nothing arrives."""
        for observer in self._observers:
            observer.idle(self._fit_state)
        # What has an end is there already, and is waited for: then batches and clocks do not depend on the time.
        if is_endless(self._reader) and not self._team.is_alone and self._team.can_continue:
            self._sweep_stream()
            self._run.work.tick()
            self._clock_done()
            self._look_at = 0.0  # the pull waits for the others, so that this worker is not clocks ahead

    def _sweep_stream(self) -> None:
        """Drop expired rows in a clock before a checkpoint: a stream without an end comes to no end of a pass."""
        if is_endless(self._reader) and self._run.work.is_due and self._team.leads:
            for store in self._stores_with_rules():
                store.sweep()

    def _pauses(self, interrupted: Callable[[], KeyboardInterrupt | None]) -> bool:
        """Whether all workers end their clocks here: one is told to end, or has gone and the others take its parts."""
        team, work = self._team, self._run.work
        if interrupted() is not None and not self._stops and not self._leaves():
            work.stop()
            self._stops = True
        elif not self._stops and (now := time.monotonic()) >= self._look_at:
            self._stops, self._look_at = work.is_stopped(), now + _LOOK_SECONDS
        return self._stops or any(rank in team.present for rank in team.store.member.lost_workers)

    def _stop(self, trainers: Sequence[ModelTrainer], interrupt: KeyboardInterrupt) -> None:
        """End the fit, of which all workers have ended the same clock."""
        for observer in self._observers:
            observer.stopped(self._fit_state)
        for trainer in trainers:
            trainer.merge(*self._run.work.seen(trainer))
        self._team.meet()  # nobody ends while another one writes
        raise interrupt

    # ------------------------------------------------------------------------------------------------------------------

    def _clock_done(self) -> None:
        for observer in self._observers:
            observer.clock_done(self._fit_state)

    def _until_the_data_fails(self, ready: Iterator[_Ready]) -> Iterator[_Ready]:
        """Yield the batches of a pass; an error of the data ends the fit like Ctrl-C, after the batches before it."""
        has_learned = False
        try:
            for one in ready:
                yield one
                has_learned = True
        except Exception:
            if has_learned:
                for observer in self._observers:
                    observer.interrupted(self._fit_state)
            raise

    def _fit_state(self) -> FitState:
        """Make the rows those of this moment, and return what a checkpoint of them needs in addition."""
        first = self._trainers[0]
        record = first.model.record
        table = self._run.work.save_point(self._trainers)
        examples, is_within = record.examples, self._is_within
        if self._run.writes:  # maybe by others: this worker may have replaced one, and have had no batch since
            learned = self._run.work.examples(first.model)
            examples, is_within = self._run.header.known + learned, learned > 0
        return FitState(
            table=table,
            is_within=is_within,
            examples=examples,
            clocks=self._run.work.clocks if is_within else 0,
            seconds=first.seconds if is_within else 0.0,
            windows=record.curve.windows,
            best=record.best,
            record="" if self._order is None else self._order.id,
        )

    # ---- another number of workers -----------------------------------------------------------------------------------

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
        """Raise WorkersMoveError if this worker is to leave the job, which another one continues."""
        if self._models[0].agree_on_move(self._leaves() or self._team.workers_change):
            raise WorkersMoveError


def _best_folder(observers: Sequence[FitObserver], number: int) -> StorageDir | None:
    found = [folder for observer in observers if (folder := observer.best_folder(number)) is not None]
    return found[0] if found else None


def check_fit(models: Sequence[Learner], given: FitInput, *, has_best_folder: bool) -> None:
    """Check what a fit is given, before anything is changed."""
    first, (reader, valid, plan) = models[0], given
    first.check_plan(plan)
    check_iterable(reader, "reader", passes=plan.epochs)
    check_endless(reader, valid, shuffles=plan.shuffles)
    if is_live(reader) and first.store.num_workers > 1 and not first.tolerance.loss:
        raise ValueError(
            f"a stream of several workers has clocks without batches, and this kind of fit has none"
            f"{first.tolerance.remedy}: train with one worker"
        )
    if valid is not None:
        check_iterable(valid, "valid", passes=plan.epochs)
    elif plan.patience is not None or plan.plateau is not None:
        what = "early stopping" if plan.patience is not None else "a plateau"
        raise ValueError(f"{what} needs something to measure after each pass: pass valid=")
    if plan.patience is not None and first.store.num_workers > 1 and not has_best_folder:
        raise ValueError(
            f"early stopping keeps the best weights in a directory that all {first.store.num_workers} workers see: "
            "pass checkpoint=Checkpointing(directory), or train with one worker"
        )


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
        model.record.best_pass, model.record.best = None, Best()
        fit = Fit(
            first_pass=len(model.record.passes) + 1,
            plan=plan,
            data=path_of(reader),
            valid=path_of(valid),
            batch_size=plain(getattr(reader, "batch_size", None)),
            threads=model.store.threads,
            source=sources[0],
            valid_source=sources[1],
            consistency=consistency_of(model.store),
            irregular=why_inexact(model),
        )
        model.record.fits.append(fit)
