"""The training loop: one or several models learn from one reader, which is parsed and sorted once for all of them.

    reader --> feed (sample, shuffle, sort ahead) --> each batch: model 1 learns, model 2 learns, ...
                                                      each pass:  measured on the validation data, stopped or not

A model alone is a list of one: there is no second loop. What a model learns depends on the batches alone, so it is the
same to the bit alone and among others.

Early stopping. A model whose validation has not become better for ``patience`` passes learns no more, and gets back the
weights of its best pass. They wait in a checkpoint in a temporary directory (``TMPDIR``): as many bytes as the rows
take, written after each pass that is better than all before it, but for the last, read once.

On a cluster every batch is a clock of the store. Each worker learns from its share and measures what it is given; a
pass ends for all together (team.py).

Invariants
    I1  All models have learned from the same batches whenever the loop is left, by an error of the reader or the first
        Ctrl-C too. A second Ctrl-C, or an error while a model learns, may leave one batch that some have learned from.
    I2  A model's table, history and counts belong together after every batch.

Threads: the caller's; a helper sorts ahead (feed.py). The models' store spreads each call over its own.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shoal import checkpoint
from shoal.data import Batch
from shoal.data.pieces import joined_or_none
from shoal.metrics import Accumulator, Curves, Metrics, measure_with_curves
from shoal.models import feed
from shoal.models.history import Fit, Pass
from shoal.models.plan import Plan
from shoal.models.team import Team
from shoal.models.watch import interrupts_at_boundaries, watch
from shoal.table import KeyBatch

if TYPE_CHECKING:
    from shoal.models.model import Floats, Model

log = logging.getLogger(__name__)


def train(
    models: Sequence[Model],
    reader: Iterable[Batch],
    valid: Iterable[Batch] | None,
    plan: Plan,
    *,
    progress: bool | float,
) -> None:
    """Let all models learn; see `shoal.models.Model.fit`. They share a store, and what they sort of a batch."""
    check_iterable(reader, "reader", passes=plan.epochs)
    if valid is not None:
        check_iterable(valid, "valid", passes=plan.epochs)
    elif plan.patience is not None:
        raise ValueError("patience needs something to measure after each pass: pass valid=")
    first = models[0]
    team = Team(first.store, first.table.name)
    if plan.patience is not None and first.store.num_workers > 1:
        raise ValueError(
            f"patience keeps the best weights in a file of this process, and the store has {first.store.num_workers} "
            f"workers: leave it out, or let one worker learn"
        )
    begin_fit(models, reader, valid, plan)
    team.begin()
    try:
        _passes(models, reader, valid, plan, team, progress=progress)
    except BaseException:
        team.give_up()
        raise


def _passes(
    models: Sequence[Model],
    reader: Iterable[Batch],
    valid: Iterable[Batch] | None,
    plan: Plan,
    team: Team,
    *,
    progress: bool | float,
) -> None:
    with ExitStack() as stack:
        students = [Student(model, plan, stack) for model in models]
        for epoch in range(plan.epochs):
            learning = [student for student in students if not student.stopped]
            if not learning:
                break
            title = f"pass {epoch + 1}/{plan.epochs}" if plan.epochs > 1 else "train"
            source = plan.source(reader, epoch)
            known = min(student.model.examples for student in learning)
            _one_pass(learning, plan.batches(source, epoch, known), source, title, progress)
            team.end_pass()
            if valid is not None:
                measured = measure([student.model for student in learning], valid)
                for student, (metrics, curves) in zip(learning, measured, strict=True):
                    student.note_validation(metrics, curves, last=epoch + 1 == plan.epochs)
            team.meet()
        for student in students:
            student.finish()


def begin_fit(models: Sequence[Model], reader: Iterable[Batch], valid: Iterable[Batch] | None, plan: Plan) -> None:
    """Note down from what the models learn, and how."""
    for model in models:
        model.check_format(reader)
        model.note_format(reader)
        model.record.best_pass = None
        model.record.fits.append(_fit(model, reader, valid, plan))


def _fit(model: Model, reader: Iterable[Batch], valid: Iterable[Batch] | None, plan: Plan) -> Fit:
    return Fit(
        first_pass=len(model.record.passes) + 1,
        plan=plan,
        data=_path(reader),
        valid=_path(valid),
        batch_size=getattr(reader, "batch_size", None),
        threads=model.store.threads,
    )


def _path(data: object) -> str | None:
    path = getattr(data, "path", None)
    return None if path is None else os.fspath(path)


class Student:
    """A model while it learns: the metrics of its pass, and whether it still gets better."""

    def __init__(self, model: Model, plan: Plan, stack: ExitStack) -> None:
        self.model = model
        self.seen = Accumulator()
        self.stopped = False
        self._plan = plan
        self._stack = stack
        self._number = 0
        self._features = 0
        self._begin = 0.0
        self._dropped = 0
        self._folder: Path | None = None  # holds the best weights
        self._best_gain = -math.inf
        self._best_pass = 0
        self._best_examples = 0

    def begin(self) -> None:
        """Begin a pass."""
        self.seen = Accumulator()
        self._number = len(self.model.record.passes) + 1
        self._features = 0
        self._dropped = self.model.nonfinite_rows()
        self._begin = time.perf_counter()

    def learn(self, batch: Batch, keys: KeyBatch) -> None:
        """Learn from one batch and record it."""
        weight, loss = self.seen.weight, self.model.learn(batch, keys, self.seen)
        self._features += batch.nnz
        self.model.record.curve.add(
            len(batch),
            self.seen.weight - weight if batch.weights is not None else len(batch),
            loss,
            total=self.model.examples,
            pass_number=self._number,
            progress=self.seen,
        )

    def note(self, whole: Batch, margins: Floats) -> None:
        """Record that the model has learned from all examples at once, and what it makes of them now."""
        record = self.model.record
        self.seen.update(whole.labels, margins, whole.weights)
        self._features += whole.nnz
        record.examples += len(whole)
        record.curve.add(
            len(whole),
            self.seen.weight,
            self.seen.loss_sum,
            total=record.examples,
            pass_number=self._number,
            progress=self.seen,
        )

    def end(self, *, skipped: int, complete: bool) -> None:
        """Record the pass."""
        record = self.model.record
        record.curve.close_window(total=self.model.examples, pass_number=self._number, progress=self.seen)
        record.passes.append(
            Pass(
                number=self._number,
                metrics=self.seen.result(),
                auc_error=self.seen.auc_error,
                seconds=time.perf_counter() - self._begin,
                skipped=skipped,
                complete=complete,
                valid=None,
                features=self._features,
            )
        )
        if dropped := self.model.nonfinite_rows() - self._dropped:
            log.warning("%d gradients were not finite and changed nothing: look for huge values in the data", dropped)

    def note_validation(self, metrics: Metrics, curves: Curves, *, last: bool) -> None:
        """Record how good the model is now; stop it if it has not become better for long enough."""
        passes = self.model.record.passes
        passes[-1] = replace(passes[-1], valid=metrics, curves=curves)
        if self._plan.patience is None:
            return
        gain = self._plan.gain(metrics)
        if self._best_pass == 0 or gain > self._best_gain + self._plan.min_delta:
            self._best_gain, self._best_pass, self._best_examples = gain, self._number, self.model.examples
            if not last:  # else the best weights are those that are there
                self._keep()
        elif self._number - self._best_pass >= self._plan.patience:
            self.stopped = True

    def finish(self) -> None:
        """Give the model the weights of its best pass."""
        if self._best_pass == 0:
            return
        self.model.record.best_pass = self._best_pass
        if self._best_pass == self._number:
            return
        assert self._folder is not None
        self.model.store.load(self._folder / str(self._best_pass))
        self.model.record.examples = self._best_examples
        log.info("pass %d was the best of %d: the model has its weights", self._best_pass, self._number)

    def _keep(self) -> None:
        if self._folder is None:
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-best-")))
        before = list(self._folder.iterdir())
        store, folder = self.model.store, self._folder / str(self._best_pass)
        folder.mkdir()
        checkpoint.save(folder, list(self.model.tables), store.slots, store.threads, durable=False)
        for old in before:
            shutil.rmtree(old)


def _one_pass(
    students: Sequence[Student], batches: Iterable[Batch], reader: Iterable[Batch], title: str, progress: bool | float
) -> None:
    first = students[0].model
    for student in students:
        student.begin()
    complete = False
    try:
        with (
            watch(title, reader, [student.seen for student in students], progress) as bar,
            interrupts_at_boundaries() as interrupted,
            closing(feed.sorted_ahead(batches, first.sort, first.sort_ahead, overlap=first.store.threads > 1)) as ready,
        ):
            for batch, keys in ready:
                for student in students:
                    student.learn(batch, keys)
                first.store.tick()
                bar.update()
                if interrupted():
                    raise KeyboardInterrupt
        complete = True
    finally:
        for student in students:
            student.end(skipped=int(getattr(reader, "skipped", 0)), complete=complete)


def measure(models: Sequence[Model], data: Batch | Iterable[Batch]) -> list[tuple[Metrics, Curves]]:
    """Measure models, which share a store and what they sort of a batch, in one pass over the data."""
    batches = [data] if isinstance(data, Batch) else data
    check_iterable(batches, "data", passes=1)
    for model in models:
        model.check_fitted()
        model.check_format(data)
    labels, weights, margins = predictions(models, batches)
    return [measure_with_curves(labels, a, weights) for a in margins]


def predictions(
    models: Sequence[Model], batches: Iterable[Batch]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None, list[Floats]]:
    """Return labels, weights (None: each is 1) and each model's margins of all examples."""
    first = models[0]
    labels: list[npt.NDArray[np.float32]] = []
    weights: list[npt.NDArray[np.float32] | None] = []
    margins: list[list[Floats]] = [[] for _ in models]
    ready = feed.sorted_ahead(feed.examples_of(batches), first.sort, first.sort_ahead, overlap=first.store.threads > 1)
    with closing(ready):
        for batch, keys in ready:
            labels.append(batch.labels)
            weights.append(batch.weights)
            for model, found in zip(models, margins, strict=True):
                found.append(model.margins(batch, keys))
    empty = np.empty(0)
    return (
        np.concatenate([np.empty(0, np.float32), *labels]),
        joined_or_none(weights, [len(some) for some in labels]),
        [np.concatenate([empty, *found]) for found in margins],
    )


def check_iterable(data: object, what: str, passes: int) -> None:
    """Say what to pass instead, where ``data`` cannot be iterated ``passes`` times as batches."""
    if isinstance(data, str | os.PathLike):
        raise TypeError(f"{what} is a path: pass a reader of it, such as shoal.read_libsvm({os.fspath(data)!r})")
    if isinstance(data, Batch):
        raise TypeError(f"{what} is a Batch: pass a reader or a list of batches, or call partial_fit(batch)")
    if not isinstance(data, Iterable):
        raise TypeError(f"{what} is a {type(data).__name__}: pass a reader or another iterable of shoal.Batch")
    if passes > 1 and iter(data) is data:
        raise ValueError(
            f"{what} is an iterator and ends after one pass of {passes}: pass a reader or a list of batches"
        )
