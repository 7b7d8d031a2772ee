"""ModelTrainer: one model while it learns, with the metrics of its pass and its early stopping."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
from msgspec import structs

from shoal.base.fit_rows import AUC_EXAMPLES, AUC_SUM, AUC_UNIT, DIM, TOTALS
from shoal.base.machine import temporary_root
from shoal.data import Batch
from shoal.errors import ShoalError
from shoal.metrics import Accumulator, StreamMetrics
from shoal.models.history import Best, Pass, Record
from shoal.models.learner import Floats, Learner, Prepared
from shoal.models.measured import Evaluation
from shoal.models.plan import Plan, gain_of
from shoal.models.sources import feature_name
from shoal.storage.base import StorageDir
from shoal.storage.open import open_dir

log = logging.getLogger(__name__)

# Constant predictions have a relative loss of 1; early in a pass a model may be above it, but not by this much, and not
# over so many examples.
_EXPLODED = 3.0
_ENOUGH_EXAMPLES = 10_000


_LARGE_VALUE = 10.0
_AUC_SECONDS = 1.0  # between two of those that others see while the pass is under way


def _temporary_folder(number: int) -> None:
    """Return None: the best weights are written to a temporary folder."""


class ModelTrainer:
    """A model while it learns: the metrics of its pass, and whether they still improve."""

    def __init__(
        self,
        model: Learner,
        plan: Plan,
        stack: ExitStack,
        best_folder: Callable[[int], StorageDir | None] = _temporary_folder,
    ) -> None:
        self.model = model
        self.seen = model.accumulator()
        self.stopped = False
        # Malformed lines, and examples that may count twice, of this pass.
        self.skipped = 0
        self.repeated = 0
        # Late examples of a stream, of this pass.
        self.late = 0
        # Examples that the model had learned from when the pass began.
        self.known = model.examples
        self._plan = plan
        self._stack = stack
        self._number = len(model.record.passes)
        self._features = 0
        self._sums = np.zeros(DIM, np.int64)  # that others know of
        self._counts: tuple[npt.NDArray[np.int64], slice] | None = None
        self._counted, self._has_counts = 0, False
        self._auc, self._auc_due = (0, 0), 0.0  # for who watches: examples, and AUC x examples x AUC_UNIT
        self._largest = (1.0, 0)  # size of a value, and the key of its feature
        self._warned = False
        self._begin = 0.0
        self._dropped = 0
        self._temporary: StorageDir | None = None
        self._best_folder = best_folder
        self._scale: float | None = None  # of the learning rates
        best = model.record.best.number
        self._folder: StorageDir | None = best_folder(best) if best else None  # holds the best weights
        if best and self._folder is None:
            raise ShoalError(
                f"the best weights so far, of pass {best}, were in a temporary folder of a worker that died: begin the "
                "fit again, with checkpoint= where it can be passed"
            )
        self.update_stopped()

    def begin(self, seen: StreamMetrics | None = None, sums: npt.NDArray[np.int64] | None = None) -> None:
        """Begin a pass, or a part of one; ``seen`` and ``sums``: the metrics of the one that this worker resumes."""
        self.seen = self.model.accumulator() if seen is None else seen
        before = [0] * TOTALS if sums is None else sums[:TOTALS].tolist()
        self._features, self.skipped, self.repeated, self.late = before
        self._sums = np.zeros(DIM, np.int64)
        self._counts, self._counted, self._auc, self._auc_due = None, 0, (0, 0), 0.0
        self._has_counts = len(self.seen.histogram()) > 0
        self._number = len(self.model.record.passes) + 1
        self._largest = (1.0, 0)
        self._dropped = self.model.nonfinite_rows()
        self._begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the pass began here."""
        return time.perf_counter() - self._begin

    def add_seconds(self, seconds: float) -> None:
        """Count the time that the pass had taken before."""
        self._begin -= seconds

    # ---- its metrics as whole numbers that add up --------------------------------------------------------------------

    def sums(self) -> npt.NDArray[np.int64]:
        """Return the row of SUMS of what was learned from here."""
        row = np.zeros(DIM, np.int64)
        row[:TOTALS] = self._features, self.skipped, self.repeated, self.late
        totals = self.seen.totals()
        row[TOTALS : TOTALS + len(totals)] = totals
        if self._has_counts:
            row[TOTALS + len(totals) - 1] = self._counted
            row[AUC_EXAMPLES], row[AUC_SUM] = self._auc
        return row

    def take_sums(self) -> npt.NDArray[np.int64]:
        """Return what `sums` have grown by since the last call, with an AUC that is about a second old."""
        if self._has_counts and time.perf_counter() >= self._auc_due:
            self._auc_due = time.perf_counter() + _AUC_SECONDS
            if not math.isnan(auc := self.seen.quality):
                self._auc = self.seen.examples, round(auc * self.seen.examples * AUC_UNIT)
        before, self._sums = self._sums, self.sums()
        return self._sums - before

    @property
    def uncounted(self) -> int:
        """Examples whose counts were not taken yet."""
        return self.seen.examples - self._counted

    def take_counts(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Return what the histogram has grown by since the last call: numbers of blocks, and the blocks."""
        if not self._has_counts:
            return np.empty(0, np.uint64), np.empty((0, DIM), np.int64)
        self._counted = self.seen.examples
        counts = self.seen.histogram()
        planes = counts.reshape(-1, 1 << self.seen.bits if isinstance(self.seen, Accumulator) else len(counts))
        used = slice(self.seen.bins.start // DIM, -(-self.seen.bins.stop // DIM))  # few bins are, and they are many
        now = planes.reshape(len(planes), -1, DIM)[:, used].copy()
        grown = now.copy()
        if self._counts is not None:
            before, its = self._counts
            grown[:, its.start - used.start : its.stop - used.start] -= before
        self._counts = now, used
        plane, block = np.nonzero(grown.any(axis=2))
        return (plane * (planes.shape[1] // DIM) + block + used.start).astype(np.uint64), grown[plane, block]

    # ---- a pass ------------------------------------------------------------------------------------------------------

    def learn(self, batch: Batch, prepared: Prepared) -> None:
        """Learn from one batch and record it."""
        self._record_values(batch)  # before what may fail by them
        weight, loss = self.seen.weight, self.model.learn(batch, prepared, self.seen)
        self._features += batch.nnz
        self.model.record.curve.add(
            len(batch),
            self.seen.weight - weight if batch.weights is not None else len(batch),
            loss,
            total=self.model.examples,
            pass_number=self._number,
            progress=self.seen,
        )

    def _record_values(self, batch: Batch) -> None:
        values = batch.values
        if values is None or len(values) == 0:
            return
        size = max(float(values.max()), -float(values.min()))
        if size > self._largest[0]:
            self._largest = size, int(batch.keys[np.abs(values).argmax()])

    def _warn_of_scale(self, reader: object) -> None:
        """Warn if the pass's predictions were worse than constant ones."""
        loss = self.seen.relative_loss
        if self._warned or not loss > (1.0 if self.seen.examples >= _ENOUGH_EXAMPLES else _EXPLODED):
            return
        self._warned = True
        size, key = self._largest
        which = "steps are too long:"
        if size > _LARGE_VALUE and not self.model.is_normalized:
            remedy = " train with normalized=True (--normalized)," if self.model.can_normalize else ""
            feature = feature_name(reader, key)
            which = f"values reach {size:.3g} (feature {feature}): scale numeric features to about 1,{remedy} or"
        log.warning(
            "%s %.4g: the predictions of pass %d are %sworse than %s; %s use a smaller learning rate",
            self.seen.relative_name,
            loss,
            self._number,
            "far " if loss > _EXPLODED else "",
            self.seen.constant,
            which,
        )

    def record_examples(self, whole: Batch, margins: Floats) -> None:
        """Record that the model has learned from all examples at once, and its predictions for them now."""
        record = self.model.record
        assert isinstance(self.seen, Accumulator)
        self.seen.update_with(self.model.store.workers, whole.labels, margins, whole.weights)
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

    def end(self, *, complete: bool, reader: object = None) -> None:
        """Record the pass over a reader."""
        self._warn_of_scale(reader)
        record = self.model.record
        record.curve.close_window(total=self.model.examples, pass_number=self._number, progress=self.seen)
        record.passes.append(
            Pass(
                number=self._number,
                metrics=self.seen.result(),
                auc_error=self.seen.auc_error,
                seconds=self.seconds,
                skipped=self.skipped,
                complete=complete,
                valid=None,
                features=self._features,
                unmeasured=self.seen.unplaced,
                repeated=self.repeated,
                late=self.late,
            )
        )
        if dropped := self.model.nonfinite_rows() - self._dropped:
            log.warning("%d gradients were not finite and changed nothing: check the data for huge values", dropped)

    def merge(self, seen: StreamMetrics, sums: npt.NDArray[np.int64]) -> None:
        """Make the pass that is about to end that of all workers, by their metrics and sums."""
        self.seen = seen
        self._features, self.skipped, self.repeated, self.late = sums[:TOTALS].tolist()
        self.model.record.examples = self.known + seen.examples
        if seen.unplaced or self.repeated:
            log.warning(
                "pass %d: workers have died; %d examples that they had predicted are not in its AUC, and %d may have "
                "been learned from twice",
                self._number,
                seen.unplaced,
                self.repeated,
            )

    def record_validation(self, found: Evaluation, *, last: bool) -> None:
        """Record the metrics of validation; stop the model if it has not improved for ``patience`` passes."""
        passes = self.model.record.passes
        passes[-1] = structs.replace(passes[-1], valid=found.metrics, curves=found.curves, grouped=found.grouped)
        if self._plan.patience is None:
            return
        gain, best = gain_of(self._plan.metric, found.metrics, found.grouped), self.model.record.best
        if best.gain is None or gain > best.gain + self._plan.min_delta:
            self.model.record.best = Best(gain=gain, number=self._number, examples=self.model.examples)
            if not last:  # otherwise the model has the best weights already
                self._save_best()

    def update_stopped(self) -> None:
        """Stop, if the passes that are recorded have not improved for long enough, or lower the rates."""
        record, patience = self.model.record, self._plan.patience
        self._scale_rates(self._scale_after(record))
        self.stopped = patience is not None and 0 < record.best.number <= len(record.passes) - patience
        if record.best.number:
            self._folder = self._best_folder(record.best.number) or self._folder

    def _scale_after(self, record: Record) -> float:
        """Return the factor of the rates after the passes of this fit."""
        plateau = self._plan.plateau
        if plateau is None or not record.fits:
            return 1.0
        done = [one for one in record.passes if one.number >= record.fits[-1].first_pass]
        return plateau.scale(gain_of(plateau.metric, one.valid, one.grouped) for one in done if one.valid is not None)

    def _scale_rates(self, scale: float) -> None:
        if scale == self._scale:
            return
        if self._scale is not None and scale < self._scale:
            log.info("pass %d has not improved: the learning rates are times %.3g", self._number, scale)
        self._scale = scale
        self.model.scale_rates(scale, self._plan.plateau)

    def finish(self) -> None:
        """Restore the weights of the model's best pass, and the rates."""
        self._scale_rates(1.0)
        record = self.model.record
        if record.best.number == 0:
            return
        record.best_pass = record.best.number
        if record.best.number == len(record.passes):
            return
        assert self._folder is not None
        self.model.restore_weights(self._folder)
        record.examples = record.best.examples
        log.info("pass %d was the best of %d: the model has its weights", record.best_pass, len(record.passes))

    def _save_best(self) -> None:
        number = self.model.record.best.number
        folder = self._best_folder(number)
        if folder is not None:
            self._folder = folder
            folder.clear()  # of a fit that was killed
            self.model.save_weights(folder)
            return
        if self._temporary is None:
            made = tempfile.TemporaryDirectory(prefix="shoal-best-", dir=temporary_root())
            self._temporary = open_dir(self._stack.enter_context(made))
        before = self._temporary.subdirectories()
        self._folder = self._temporary.child(str(number))
        self.model.save_weights(self._folder)
        for old in before:
            self._temporary.child(old).clear()
