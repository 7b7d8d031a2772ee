"""The training loop: one or several models learn from one reader, which is parsed and prepared once for all of them.

    reader --> feed (sample, shuffle, prepare ahead) --> each batch: model 1 learns, model 2 learns, ...
                                                         each pass:  measured on the validation data, stopped or not

A model alone is a list of one: there is no second loop. What a model learns depends on the batches alone, so it is the
same to the bit alone and among others. Whatever has the calls of a `Learner` can be trained.

Early stopping. A model whose validation has not become better for ``patience`` passes learns no more, and gets back the
weights of its best pass. They wait in a folder, temporary (``TMPDIR``) if the watcher names none: as many bytes as the
rows take, written after each pass that is better than all before it, but for the last, read once.

Going on. A fit of one learner can be left behind any batch and gone on with later: its weights and its record, which
are the learner's to keep, and a `Standing` are all that it takes. Where a pass's batches are the reader's, one for one,
the reader resumes; else the pass is read anew and what was learned from is passed over.

On a cluster every batch is a clock of the store. Each worker learns from its share and measures what it is given; a
pass ends for all together (team.py).

Invariants
    I1  All models have learned from the same batches whenever the loop is left, by an error of the reader or the first
        Ctrl-C or SIGTERM too. A second one, or an error while a model learns, may leave one batch that some have
        learned from.
    I2  A model's table, history and counts belong together after every batch.
    I3  A fit that goes on from a standing learns from the same batches, in the same order, as one that was never left.

Threads: the caller's; a helper prepares ahead (feed.py). The models' store spreads each call over its own.
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
from shoal.models.learner import Learner, Standing, Watcher
from shoal.models.model_trainer import BEGINNING, Student
from shoal.models.pass_coordinator import Team
from shoal.models.plan import Plan
from shoal.models.progress import watch
from shoal.models.sources import check_iterable, check_stream, check_valid, fingerprint, path_of, why_empty
from shoal.storage.base import StorageDir
from shoal.store.local import Store


def train(
    models: Sequence[Learner],
    reader: Iterable[Batch],
    valid: Iterable[Batch] | None,
    plan: Plan,
    *,
    progress: bool | float,
    watchers: Sequence[Watcher] = (),
    standing: Standing | None = None,
) -> None:
    """Let all models learn; see `shoal.models.Model.fit`. They share a store, and what they prepare of a batch.

    With ``standing`` the one model goes on with the fit that its record tells of last.
    """
    check_iterable(reader, "reader", passes=plan.epochs)
    if valid is not None:
        check_iterable(valid, "valid", passes=plan.epochs)
    elif plan.patience is not None:
        raise ValueError("patience needs something to measure after each pass: pass valid=")
    first = models[0]
    team = Team(first.store, first.name)
    if plan.patience is not None and first.store.num_workers > 1:
        raise ValueError(
            f"patience keeps the best weights in a file of this process, and the store has {first.store.num_workers} "
            f"workers: leave it out, or let one worker learn"
        )
    if standing is None:
        begin_fit(models, reader, valid, plan, fingerprints=bool(watchers))
    team.begin()
    try:
        _Run(models, reader, valid, plan, team, progress, watchers).passes(standing or BEGINNING)
    except BaseException:
        team.give_up()
        raise


class _Run:
    """One call of `train`."""

    def __init__(
        self,
        models: Sequence[Learner],
        reader: Iterable[Batch],
        valid: Iterable[Batch] | None,
        plan: Plan,
        team: Team,
        progress: bool | float,
        watchers: Sequence[Watcher],
    ) -> None:
        self._models = models
        self._reader = reader
        self._valid = valid
        self._plan = plan
        self._team = team
        self._progress = progress
        self._watchers = watchers
        self._stack = ExitStack()

    def passes(self, begin: Standing) -> None:
        plan, valid = self._plan, self._valid
        with self._stack:
            students = [Student(model, plan, self._stack, self._best_folder, begin) for model in self._models]
            for epoch in range(begin.epoch, plan.epochs):
                learning = [student for student in students if not student.stopped]
                if not learning:
                    break
                title = f"pass {epoch + 1}/{plan.epochs}" if plan.epochs > 1 else "train"
                known = min(student.model.examples for student in learning)
                at = begin if epoch == begin.epoch and begin.batches else Standing(epoch=epoch, known=known)
                self._one_pass(learning, at, title)
                if learning[0].model.examples == 0 and learning[0].model.store.num_workers == 1:
                    raise ValueError(f"{why_empty(self._reader)}: nothing was learned")
                if epoch == begin.epoch and learning[0].seen.base_rate == 0:
                    check_stream(self._reader)
                try:
                    self._team.end_pass()
                    self._sweep(learning[0].model.store)
                    if valid is not None:
                        measured = measure([student.model for student in learning], valid)
                        for student, found in zip(learning, measured, strict=True):
                            student.note_validation(found, last=epoch + 1 == plan.epochs)
                    self._team.meet()
                except KeyboardInterrupt:  # what was learned is kept; the pass stays unmeasured
                    for watcher in self._watchers:
                        watcher.interrupted(learning[0].standing(Standing(epoch=epoch + 1), between=True))
                    raise
                with at_boundaries() as interrupted:
                    for watcher in self._watchers:
                        watcher.pass_done(learning[0].standing(Standing(epoch=epoch + 1), between=True))
                    if (interrupt := interrupted()) is not None:
                        raise interrupt
            for student in students:
                student.finish()

    @staticmethod
    def _sweep(store: Store) -> None:
        """Let the rows go that the tables' rules name: all workers are at one clock, and end it."""
        if any(table.spec.has_rules for table in store.tables.values()):
            if store.rank == 0:
                store.sweep()
            store.tick()

    def _best_folder(self, number: int) -> StorageDir | None:
        found = [folder for watcher in self._watchers if (folder := watcher.best_folder(number)) is not None]
        return found[0] if found else None

    def _batches(self, at: Standing, source: Iterable[Batch]) -> Iterable[Batch]:
        """Return the batches of a pass that are still to be learned from."""
        if at.position is not None:
            return self._plan.batches(source, at.epoch, at.known, at.read)
        batches = self._plan.batches(source, at.epoch, at.known)
        return (
            batches if at.seen is None else _passed_over(batches, at.batches, Accumulator.from_dict(at.seen).examples)
        )

    def _one_pass(self, students: Sequence[Student], at: Standing, title: str) -> None:
        first = students[0].model
        for student in students:
            student.begin(at)
        source = self._plan.source(self._reader, at.epoch)
        if at.position is not None:
            if not isinstance(source, Reader):
                raise TypeError(f"the fit stands within a reader, and this is a {type(source).__name__}: pass a reader")
            source = source.resume(at.position)
        noted = _Noted(source, at, follow=bool(self._watchers) and self._plan.keeps_batches)
        complete = False
        try:
            with (
                watch(title, source, [student.seen for student in students], self._progress) as bar,
                at_boundaries() as interrupted,
                closing(first.prepared(self._batches(at, noted))) as ready,
            ):
                for batch, prepared in ready:
                    for student in students:
                        student.learn(batch, prepared)
                    first.store.tick()
                    noted.learned()
                    standing = functools.partial(_standing, students[0], noted)
                    for watcher in self._watchers:
                        watcher.batch_done([student.seen for student in students], standing)
                    bar.update()
                    if (interrupt := interrupted()) is not None:
                        for watcher in self._watchers:
                            watcher.interrupted(standing())
                        raise interrupt
            complete = True
        finally:
            for student in students:
                student.end(skipped=int(getattr(source, "skipped", 0)), complete=complete, reader=source)


def _passed_over(batches: Iterable[Batch], count: int, examples: int) -> Iterator[Batch]:
    """Leave out the batches that were learned from, and check that they are those."""
    iterator = iter(batches)
    found = sum(len(batch) for batch in islice(iterator, count))
    if found != examples:
        raise ValueError(
            f"the fit had learned from {examples:,} examples of this pass in {count:,} batches, and these have "
            f"{found:,} now: the data is not what it was, or was appended to behind a last batch that was not full"
        )
    yield from iterator


class _Noted:
    """A pass's reader, which is read ahead; where it stood behind the batch that was learned from last."""

    def __init__(self, source: Iterable[Batch], at: Standing, *, follow: bool) -> None:
        self._source = source
        self._reader = source if follow and isinstance(source, Reader) else None
        self._ahead: deque[tuple[Any, int]] = deque()  # behind each batch that was read: the place, and its examples
        self._place: Any = None
        self._standing = at

    def __iter__(self) -> Iterator[Batch]:
        iterator = iter(self._source)
        try:
            for batch in iterator:
                if self._reader is not None:
                    self._ahead.append((self._reader.place, len(batch)))
                yield batch
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def learned(self) -> None:
        """Note that one more batch was learned from."""
        read = self._standing.read
        if self._reader is not None:
            self._place, examples = self._ahead.popleft()
            read += examples
        self._standing = replace(self._standing, batches=self._standing.batches + 1, read=read)

    @property
    def standing(self) -> Standing:
        """Where the pass stands, as far as the data goes."""
        if self._reader is None:
            return self._standing
        return replace(self._standing, position=self._reader.position(self._place))


def _standing(student: Student, noted: _Noted) -> Standing:
    return student.standing(noted.standing)


def begin_fit(
    models: Sequence[Learner],
    reader: Iterable[Batch],
    valid: Iterable[Batch] | None,
    plan: Plan,
    *,
    fingerprints: bool = False,
) -> None:
    """Note down from what the models learn, and how; with fingerprints of the data if the fit may be resumed."""
    if valid is not None:
        check_valid(models[0], valid)
    if isinstance(reader, Reader):
        reader.check_positive()
    if isinstance(valid, Reader):
        valid.check_positive(alone=True)
    sources = (fingerprint(reader), fingerprint(valid)) if fingerprints else (None, None)
    for model in models:
        model.check_format(reader)
        model.note_format(reader)
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
