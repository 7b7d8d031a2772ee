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
import logging
import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.base.interrupts import at_boundaries
from shoal.data import Batch, Reader, hash_strings
from shoal.data.interactions import field_of
from shoal.data.rebatch import joined_or_none
from shoal.metrics import Accumulator, Curves, GroupedAUC, Metrics, gauc, measure_with_curves
from shoal.models import preprocessing as feed
from shoal.models.history import Fit, Pass
from shoal.models.learner import Learner, Predicts, Prepared, Standing, Watcher
from shoal.models.pass_coordinator import Team
from shoal.models.plan import Plan
from shoal.models.progress import watch
from shoal.storage.base import Place, place_of
from shoal.store.local import Store

if TYPE_CHECKING:
    from shoal.models.predictor import Floats

log = logging.getLogger(__name__)

_BEGINNING = Standing()

# A normalized entropy of 1 is that of the base rate alone; early in a pass a model may well be above it, not so far.
_EXPLODED = 3.0
_LARGE_VALUE = 10.0


class Measured(NamedTuple):
    """How good a learner's predictions are; ``grouped`` is None where nothing tells groups."""

    metrics: Metrics
    curves: Curves
    grouped: GroupedAUC | None


class Predictions(NamedTuple):
    """Labels, weights (None: each is 1) and groups (None: nothing tells them) of examples; margins of each learner."""

    labels: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32] | None
    groups: npt.NDArray[np.uint64] | None
    margins: list[Floats]


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
        _Run(models, reader, valid, plan, team, progress, watchers).passes(standing or _BEGINNING)
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
                    _check_stream(self._reader)
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

    def _best_folder(self, number: int) -> Place | None:
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
        _check_valid(models[0], valid)
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


def fingerprint(data: object) -> dict[str, Any] | None:
    """Describe the data of a reader; None of anything else."""
    return data.fingerprint() if isinstance(data, Reader) else None


def path_of(data: object) -> str | None:
    """Name the files of a reader; None of anything else."""
    path = getattr(data, "path", None)
    return None if path is None else os.fspath(path)


def _feature_name(reader: object, key: int) -> str:
    """Name a feature as well as a reader can: by the names it collects, as a numeric column, or by its key."""
    names = getattr(reader, "names", None) or {}
    if key in names:
        return str(names[key])
    for column in getattr(reader, "schema", {}).get("numeric", ()):
        if int(hash_strings([""], field_of(column))[0]) == key:
            return repr(column)
    return str(key)


def _nowhere(number: int) -> None:
    """Name no folder: the best weights go to a temporary one."""


class Student:
    """A model while it learns: the metrics of its pass, and whether it still gets better."""

    def __init__(
        self,
        model: Learner,
        plan: Plan,
        stack: ExitStack,
        best_folder: Callable[[int], Place | None] = _nowhere,
        at: Standing = _BEGINNING,
    ) -> None:
        self.model = model
        self.seen = Accumulator()
        self.stopped = False
        self._plan = plan
        self._stack = stack
        self._number = len(model.record.passes)
        self._features = 0
        self._largest = (1.0, 0)  # size of a value, and the key of its feature
        self._warned = False
        self._begin = 0.0
        self._dropped = 0
        self._temporary: Place | None = None
        self._best_folder = best_folder
        self._best_gain = -math.inf if at.best_gain is None else at.best_gain
        self._best_pass = at.best_pass
        self._best_examples = at.best_examples
        self._folder: Place | None = best_folder(at.best_pass) if at.best_pass else None  # holds the best weights
        self._look_whether_stopped()
        if at is not _BEGINNING:
            model.record.curve.windows = at.windows

    def begin(self, at: Standing = _BEGINNING) -> None:
        """Begin a pass, or go on with one."""
        self.seen = Accumulator() if at.seen is None else Accumulator.from_dict(at.seen)
        self._number = len(self.model.record.passes) + 1
        self._features = at.features
        self._largest = (1.0, 0)
        self._dropped = self.model.nonfinite_rows()
        self._begin = time.perf_counter() - at.seconds

    def standing(self, data: Standing, *, between: bool = False) -> Standing:
        """Tell where the fit stands, of which ``data`` tells how far the pass has come; or ``between`` two passes."""
        best = replace(
            data,
            windows=self.model.record.curve.windows,
            best_gain=None if self._best_gain == -math.inf else self._best_gain,
            best_pass=self._best_pass,
            best_examples=self._best_examples,
        )
        if between:
            return best
        seconds = time.perf_counter() - self._begin
        return replace(best, seen=self.seen.to_dict(), features=self._features, seconds=seconds)

    def learn(self, batch: Batch, prepared: Prepared) -> None:
        """Learn from one batch and record it."""
        weight, loss = self.seen.weight, self.model.learn(batch, prepared, self.seen)
        self._features += batch.nnz
        self._note_values(batch)
        self.model.record.curve.add(
            len(batch),
            self.seen.weight - weight if batch.weights is not None else len(batch),
            loss,
            total=self.model.examples,
            pass_number=self._number,
            progress=self.seen,
        )

    def _note_values(self, batch: Batch) -> None:
        values = batch.values
        if values is None or len(values) == 0:
            return
        at = max(int(np.argmax(values)), int(np.argmin(values)), key=lambda i: abs(float(values[i])))
        size = abs(float(values[at]))
        if size > self._largest[0]:
            self._largest = size, int(batch.keys[at])

    def _warn_of_scale(self, reader: object) -> None:
        """Say so if the pass's predictions were far worse than the base rate alone."""
        entropy = self.seen.result().normalized_entropy
        if self._warned or not entropy > _EXPLODED:
            return
        self._warned = True
        size, key = self._largest
        which = "steps are too long:"
        if size > _LARGE_VALUE and not self.model.is_normalized:
            remedy = " train with normalized=True (--normalized)," if self.model.can_normalize else ""
            feature = _feature_name(reader, key)
            which = f"values reach {size:.3g} (feature {feature}): scale numeric features to about 1,{remedy} or"
        log.warning(
            "normalized entropy %.4g: the predictions of pass %d are far worse than the base rate alone; %s take a "
            "smaller learning rate",
            entropy,
            self._number,
            which,
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

    def end(self, *, skipped: int, complete: bool, reader: object = None) -> None:
        """Record the pass over a reader."""
        self._warn_of_scale(reader)
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

    def note_validation(self, found: Measured, *, last: bool) -> None:
        """Record how good the model is now; stop it if it has not become better for long enough."""
        passes = self.model.record.passes
        passes[-1] = replace(passes[-1], valid=found.metrics, curves=found.curves, grouped=found.grouped)
        if self._plan.patience is None:
            return
        gain = self._plan.gain(found.metrics)
        if self._best_pass == 0 or gain > self._best_gain + self._plan.min_delta:
            self._best_gain, self._best_pass, self._best_examples = gain, self._number, self.model.examples
            if not last:  # else the best weights are those that are there
                self._keep()
        self._look_whether_stopped()

    def _look_whether_stopped(self) -> None:
        patience = self._plan.patience
        self.stopped = patience is not None and 0 < self._best_pass <= self._number - patience

    def finish(self) -> None:
        """Give the model the weights of its best pass."""
        if self._best_pass == 0:
            return
        self.model.record.best_pass = self._best_pass
        if self._best_pass == self._number:
            return
        assert self._folder is not None
        self.model.restore(self._folder)
        self.model.record.examples = self._best_examples
        log.info("pass %d was the best of %d: the model has its weights", self._best_pass, self._number)

    def _keep(self) -> None:
        folder = self._best_folder(self._best_pass)
        if folder is not None:
            self._folder = folder
            folder.clear()  # of a fit that was killed
            self.model.keep(folder)
            return
        if self._temporary is None:
            self._temporary = place_of(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-best-")))
        before = self._temporary.inner()
        self._folder = self._temporary.inside(str(self._best_pass))
        self.model.keep(self._folder)
        for old in before:
            self._temporary.inside(old).clear()


def measure(models: Sequence[Predicts], data: Batch | Iterable[Batch]) -> list[Measured]:
    """Measure models, which share a store and what they prepare of a batch, in one pass over the data."""
    batches = [data] if isinstance(data, Batch) else data
    check_iterable(batches, "data", passes=1)
    for model in models:
        model.check_fitted()
        model.check_format(data)
    found = predictions(models, batches)
    if len(found.labels) == 0:
        raise ValueError(f"{why_empty(data)}: nothing was measured")
    if isinstance(data, Reader) and not np.any(found.labels):
        data.check_positive(alone=True)
    if found.groups is not None:
        models[0].check_groups(found.groups)
    return [
        Measured(
            *measure_with_curves(found.labels, margins, found.weights),
            None if found.groups is None else gauc(found.labels, margins, found.groups, found.weights),
        )
        for margins in found.margins
    ]


def predictions(models: Sequence[Predicts], batches: Iterable[Batch]) -> Predictions:
    """Return labels, weights, groups and each model's margins of all examples."""
    first = models[0]
    labels: list[npt.NDArray[np.float32]] = []
    weights: list[npt.NDArray[np.float32] | None] = []
    groups: list[npt.NDArray[np.uint64]] = []
    margins: list[list[Floats]] = [[] for _ in models]
    with closing(first.prepared(feed.examples_of(batches))) as ready:
        for batch, prepared in ready:
            labels.append(batch.labels)
            weights.append(batch.weights)
            if (told := first.groups(batch)) is not None:
                groups.append(told)
            for model, found in zip(models, margins, strict=True):
                found.append(model.margins(batch, prepared))
    empty = np.empty(0)
    return Predictions(
        np.concatenate([np.empty(0, np.float32), *labels]),
        joined_or_none(weights, [len(some) for some in labels]),
        np.concatenate(groups) if groups else None,
        [np.concatenate([empty, *found]) for found in margins],
    )


def why_empty(data: object) -> str:
    """Explain why data had no examples."""
    return data.why_empty() if isinstance(data, Reader) else "the data has no examples"


def _check_stream(data: object) -> None:
    """Raise ValueError if a stream, of which a pass has found no positives, was to have a certain text as label 1."""
    if isinstance(data, Reader) and not data.repeatable and (positive := data.schema.get("positive")) is not None:
        raise ValueError(f"no label of {data.path} is {positive!r}, which positive (--positive) names")


def _check_valid(model: Predicts, valid: Iterable[Batch]) -> None:
    """Check before hours of training that there is something to measure, by the groups that the model wants.

    One batch is read, or those up to the first one with a group; data that can be read only once is not touched.
    """
    if not (isinstance(valid, Sequence) or (isinstance(valid, Reader) and valid.repeatable)):
        return
    examples = 0
    groups: npt.NDArray[np.uint64] | None = None
    for batch in valid:
        examples += len(batch)
        groups = model.groups(batch)
        if len(batch) and (groups is None or model.has_groups(groups)):
            return
    if examples == 0:
        raise ValueError(f"valid: {why_empty(valid)}, so nothing can be measured")
    if groups is not None:
        model.check_groups(groups)


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
