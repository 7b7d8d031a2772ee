"""ModelTrainer: one model while it learns, with the metrics of its pass and its early stopping."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from msgspec import structs

from shoal.data import Batch, Reader
from shoal.errors import ShoalError
from shoal.metrics import Accumulator, StreamMetrics, accumulator_from_dict
from shoal.models.history import Pass
from shoal.models.learner import FitState, Floats, Learner, Prepared
from shoal.models.measured import Evaluation
from shoal.models.plan import Plan
from shoal.models.sources import feature_name
from shoal.storage.base import StorageDir
from shoal.storage.open import open_dir

log = logging.getLogger(__name__)

BEGINNING = FitState()

# Constant predictions have a relative loss of 1; early in a pass a model may be above it, but not by this much, and not
# over so many examples.
_EXPLODED = 3.0
_ENOUGH_EXAMPLES = 10_000


_LARGE_VALUE = 10.0


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
        at: FitState = BEGINNING,
    ) -> None:
        self.model = model
        self.seen = model.accumulator()
        self.stopped = False
        self._plan = plan
        self._stack = stack
        self._number = len(model.record.passes)
        self._features = 0
        self.unmeasured = 0
        self.repeated = 0
        self._largest = (1.0, 0)  # size of a value, and the key of its feature
        self._warned = False
        self._begin = 0.0
        self._dropped = 0
        self._temporary: StorageDir | None = None
        self._best_folder = best_folder
        self._best_gain = -math.inf if at.best_gain is None else at.best_gain
        self._best_pass = at.best_pass
        self._best_examples = at.best_examples
        self._folder: StorageDir | None = best_folder(at.best_pass) if at.best_pass else None  # holds the best weights
        if at.best_pass and self._folder is None:
            raise ShoalError(
                f"the best weights so far, of pass {at.best_pass}, were in a temporary folder of a worker that died: "
                "begin the fit again, with checkpoint= where it can be passed"
            )
        self._update_stopped()
        if at is not BEGINNING:
            model.record.curve.windows = at.workers[0].windows if at.workers else at.windows

    def begin(self, at: FitState = BEGINNING) -> None:
        """Begin a pass, or resume one."""
        seen, self._features = at.seen, at.features
        self.unmeasured, self.repeated = at.unmeasured, at.repeated
        if at.workers:
            (own,) = at.workers
            seen, self._features = own.seen, own.features
            self.unmeasured, self.repeated = own.unmeasured, own.repeated
        self.seen = self.model.accumulator() if seen is None else accumulator_from_dict(seen)
        if at.workers:
            self.model.record.examples = at.known + self.seen.examples + self.unmeasured
            self.model.set_random_state(at.workers[0].random)
        self._number = len(self.model.record.passes) + 1
        self._largest = (1.0, 0)
        self._dropped = self.model.nonfinite_rows()
        self._begin = time.perf_counter() - at.seconds

    def fit_state(self, data: FitState, *, between: bool = False) -> FitState:
        """Return the state of the fit: ``data`` has the position in the pass; ``between``: between two passes."""
        best = structs.replace(
            data,
            windows=self.model.record.curve.windows,
            best_gain=None if self._best_gain == -math.inf else self._best_gain,
            best_pass=self._best_pass,
            best_examples=self._best_examples,
        )
        if between:
            return best
        seconds = time.perf_counter() - self._begin
        return structs.replace(
            best,
            seen=self.seen.to_dict(),
            features=self._features,
            seconds=seconds,
            unmeasured=self.unmeasured,
            repeated=self.repeated,
        )

    def skip(self, batch: Batch) -> None:
        """Record a batch that the predecessor of this worker has learned from."""
        self._features += batch.nnz
        self.unmeasured += len(batch)
        self.model.record.examples += len(batch)

    def measure(self) -> tuple[float, float | None]:
        """Return loss and AUC of the pass so far; None for an AUC that is not defined yet."""
        auc = self.seen.auc
        return self.seen.logloss, None if math.isnan(auc) else auc

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

    def end(self, *, skipped: int, complete: bool, reader: object = None) -> None:
        """Record the pass over a reader."""
        self._warn_of_scale(reader)
        record = self.model.record
        if isinstance(reader, Reader):
            self.model.record_format(reader)  # with the columns of a stream, which were not known before
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
                unmeasured=self.unmeasured,
                repeated=self.repeated,
            )
        )
        if dropped := self.model.nonfinite_rows() - self._dropped:
            log.warning("%d gradients were not finite and changed nothing: check the data for huge values", dropped)

    def merge(self, seen: StreamMetrics, *, features: int, skipped: int, unmeasured: int, repeated: int) -> None:
        """Make the pass that has ended that of all workers, with their metrics and sums."""
        record = self.model.record
        record.examples += seen.examples - self.seen.examples + unmeasured - self.unmeasured
        self.seen = seen
        record.passes[-1] = structs.replace(
            record.passes[-1],
            metrics=seen.result(),
            auc_error=seen.auc_error,
            features=features,
            skipped=skipped,
            unmeasured=unmeasured,
            repeated=repeated,
        )
        if unmeasured or repeated:
            log.warning(
                "pass %d: workers have died; %d examples that they had learned from are not in the metrics of the "
                "pass, and %d may have been learned from twice",
                self._number,
                unmeasured,
                repeated,
            )

    def record_validation(self, found: Evaluation, *, last: bool) -> None:
        """Record the metrics of validation; stop the model if it has not improved for ``patience`` passes."""
        passes = self.model.record.passes
        passes[-1] = structs.replace(passes[-1], valid=found.metrics, curves=found.curves, grouped=found.grouped)
        if self._plan.patience is None:
            return
        gain = self._plan.gain(found.metrics)
        if self._best_pass == 0 or gain > self._best_gain + self._plan.min_delta:
            self._best_gain, self._best_pass, self._best_examples = gain, self._number, self.model.examples
            if not last:  # otherwise the model has the best weights already
                self._save_best()
        self._update_stopped()

    def _update_stopped(self) -> None:
        patience = self._plan.patience
        self.stopped = patience is not None and 0 < self._best_pass <= self._number - patience

    def finish(self) -> None:
        """Restore the weights of the model's best pass."""
        if self._best_pass == 0:
            return
        self.model.record.best_pass = self._best_pass
        if self._best_pass == self._number:
            return
        assert self._folder is not None
        self.model.restore_weights(self._folder)
        self.model.record.examples = self._best_examples
        log.info("pass %d was the best of %d: the model has its weights", self._best_pass, self._number)

    def _save_best(self) -> None:
        folder = self._best_folder(self._best_pass)
        if folder is not None:
            self._folder = folder
            # A replacement of worker 0 keeps what its predecessor has written: the weights may have changed since.
            if self.model.store.rank == 0 and not self.model.store.member.is_past():
                folder.clear()  # of a fit that was killed
                self.model.save_weights(folder)
            return
        if self._temporary is None:
            self._temporary = open_dir(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-best-")))
        before = self._temporary.subdirectories()
        self._folder = self._temporary.child(str(self._best_pass))
        self.model.save_weights(self._folder)
        for old in before:
            self._temporary.child(old).clear()
