"""Model: the base of all models over tables of one store, which learn from batches and predict.

    batch --> KeyBatch (sort, unique) --> pull --> forward --> loss, slopes --> backward --> push
                                           |     the weights do not change within a batch      |

A kind of model defines how the rows of a batch's unique keys become a margin for each example (`_forward`), and how
the slopes dloss/dmargin become a gradient for each row (`_backward`). All tables are pulled and pushed by one KeyBatch.
The loss is logistic, unless the kind defines another one (`_loss`): labels are 0 or 1, a margin is a log-odds.

The bias is an ordinary row, under ``BIAS_KEY``: every example has it once, with value 1, after its batch's keys.

Invariants
    I1  Every example is predicted before it is learned from, so the losses of a first pass are progressive.
    I2  Predicting creates no rows and changes nothing.
    I3  After every batch, and so after Ctrl-C, tables, history and counts belong together and may be saved.

Threads: `fit` and `partial_fit` belong to one thread at a time. Predictions may run at the same time; they see each
slot as it was at some batch boundary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Self

import numpy as np

from shoal import _core
from shoal.base import notebook
from shoal.base.plural import counted
from shoal.data import Batch
from shoal.data.rebatch import joined
from shoal.metrics import Accumulator, StreamMetrics
from shoal.metrics.exact import ratio
from shoal.models import fitting, inputs, preprocessing
from shoal.models.fit_checkpoints import Checkpointing
from shoal.models.fitting import OfCallbacks
from shoal.models.learner import Floats, Learner
from shoal.models.linear_weights import BIAS_KEY, LinearWeights
from shoal.models.plan import EarlyStopping, FitInput, Learning, Plan
from shoal.models.saved_model import SavedModel
from shoal.models.scales import Sums, make_table
from shoal.models.team import Tolerance
from shoal.optim import Optimizer
from shoal.storage.base import StorageDir
from shoal.store.base import Store
from shoal.store.local import local
from shoal.table.arrays import Rows
from shoal.table.future import Future
from shoal.table.key_batch import KeyBatch
from shoal.table.table import Table

# Under SSP and ASP a pull may miss the push of the batch ahead where all workers' batches are at most this fraction of
# the examples learned from (docs/decisions/0053-early-pulls.md).
EARLY_SHARE = 1 / 128


class Model(LinearWeights, SavedModel, Learner):
    """A model whose weights are tables of a store.

    The first table holds the linear weights, the bias among them. A model of a local store can be pickled
    and copied; the copy has a store of its own. A model loaded from a pickle continues to learn with the same bits.

    Parameters
    ----------
    store : Store or None
        The store of the tables. Without one the model makes a local store of its own and closes it in `close`.
    bias : bool
        Whether every example has a constant feature.
    normalized : bool
        Whether the model learns from values divided by their scales (scales.py).
    """

    def __init__(self, store: Store | None, bias: bool, normalized: bool, learning: Learning) -> None:
        if store is not None and not isinstance(store, Store):
            raise TypeError(
                f"store is a {type(store).__name__}: pass shoal.local(...), or nothing for a store of its own"
            )
        super().__init__(local() if store is None else store, learning, is_own=store is None)
        self._has_bias = bool(bias)
        self._is_normalized = bool(normalized)
        # For the thread that sorts ahead: the store's own are in use by the thread that learns.
        self._sorters = _core.ThreadPool(max(1, self._store.threads // 4))
        self._begun: dict[int, tuple[KeyBatch, list[Future[Rows]]]] = {}  # by the identity of the batch's keys
        try:
            self._tables = tuple(self._make_tables())
            if self._is_normalized:
                self._tables += (make_table(self._store, self.table.name, self.table.seed),)
        except BaseException:
            self.close()
            raise

    # ---- what a kind of model defines --------------------------------------------------------------------------------

    @abstractmethod
    def _make_tables(self) -> Sequence[Table]:
        """Make the tables in the store, that of the linear weights first."""

    @abstractmethod
    def _forward(self, batch: Batch, keys: KeyBatch, rows: Sequence[Rows]) -> tuple[Floats, Any]:
        """Compute the margins, float64[n] or [n, K], from each table's rows float32[m, dim]; return a state too."""

    @abstractmethod
    def _backward(
        self, batch: Batch, keys: KeyBatch, rows: Sequence[Rows], slopes: Floats, known: Any
    ) -> Sequence[Rows]:
        """Compute each table's gradient, float32[m, dim] or [m] at dim 1, from the slopes dloss/dmargin."""

    def _loss(self, batch: Batch, margins: Floats, seen: StreamMetrics | None) -> tuple[float, Floats]:
        """Compute the sum of the losses by weight, and the slopes dloss/dmargin; count the batch into ``seen``.

        An invalid label or weight raises an error before any change.
        """
        loss, slopes = _core.logistic_losses(margins, batch.labels, batch.weights, self._store.workers)
        # A slope is v (p - y), so these sums are known.
        positives = batch.labels if batch.weights is None else batch.weights[batch.labels == 1]
        sums = loss, float(slopes.sum() + positives.sum(dtype=np.float64))
        if seen is not None:
            seen.update(batch.labels, margins, batch.weights, sums=sums, pool=self._store.workers)
        return loss, slopes

    def _batch_accumulator(self) -> StreamMetrics | None:
        """Return what `partial_fit` counts its batch into, of which only the checks are used; None: nothing."""
        return Accumulator(bits=1)

    # ---- what it is --------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        normalized = ", normalized=True" if self._is_normalized else ""
        return f"{type(self).__name__}({self.optimizer!r}, bias={self._has_bias}{normalized}, examples={self.examples})"

    def _repr_html_(self) -> str:
        passes = self.history.passes
        last = [] if not passes else [(f"pass {passes[-1].number}", passes[-1].metrics)]
        if passes and passes[-1].valid is not None:
            last.append(("validation", passes[-1].valid))
        return notebook.table(
            type(self).__name__,
            [
                *(
                    (table.name, f"{counted(len(table), 'row')} of {table.dim}, {table.optimizer}")
                    for table in self._tables
                ),
                ("examples", f"{self.examples:,}"),
                ("format", self.format or "unknown"),
                *last,
            ],
        )

    @property
    def name(self) -> str:
        """The name of the linear weights' table."""
        return self.table.name

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables of the model, that of the linear weights first, that of the scales last."""
        return self._tables

    @property
    def optimizer(self) -> Optimizer:
        """The update rule of the linear weights."""
        return self.table.optimizer

    @property
    def has_bias(self) -> bool:
        """Whether every example has a constant feature."""
        return self._has_bias

    @property
    def is_normalized(self) -> bool:
        """Whether values are divided by their scales."""
        return self._is_normalized

    @property
    def can_normalize(self) -> bool:
        """Whether a model of this kind can be made that divides values by their scales."""
        return True

    # ---- learning ----------------------------------------------------------------------------------------------------

    def partial_fit(self, data: Any, y: Any = None, *, sample_weight: Any = None) -> float:
        """Predict a batch, then learn from it: one optimizer step per unique key. Ends a clock of the store.

        Parameters
        ----------
        data : Batch, array, sparse matrix or frame
            Loss and gradient of an example are multiplied by its weight. All rows of an array make one step.
        y, sample_weight
            Of an array or a frame, as for `fit`. If the model does not know its classes yet, ``y`` determines them.

        Returns
        -------
        float
            Mean loss of the batch before it was learned from, in nats, by weight; NaN of an empty batch.
        """
        batch = data
        inputs.check_data(data)
        if inputs.is_table(data):
            size = max(1, data.shape[0] if hasattr(data, "shape") else len(data))
            given = self._given(data, y, sample_weight=sample_weight, batch_size=size)
            batch = joined(list(given.data))
            self._record_input(given)
        preprocessing.check_batch(batch)
        loss = self.learn(batch, self.sort(batch), self._batch_accumulator())
        self._store.tick()
        return ratio(
            loss, float(len(batch)) if batch.weights is None else float(np.sum(batch.weights, dtype=np.float64))
        )

    def fit(
        self,
        data: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        valid: Any = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        shuffle: bool | int | None = None,
        callbacks: OfCallbacks = (),
        progress: bool | float = True,
        checkpoint: Checkpointing | None = None,
        early_stopping: EarlyStopping | None = None,
    ) -> Self:
        """Learn from all examples. A fitted model continues from its weights.

        On a cluster every worker calls it, either with a fixed split of the data,
        ``reader.split(store.rank, store.num_workers)``, and returns when all have ended, or once for each split of a
        loop over ``store.splits(reader)``. Each batch is a clock. Metrics are those of all workers: pass each of them
        its split of ``valid`` too. The learning curve is that of the worker's own data.

        Parameters
        ----------
        data : Reader, iterable of Batch, array, sparse matrix or frame
            Batches are iterated once for each pass. In an array or a sparse matrix of shape (n, columns) the number of
            a column is its key, as in libsvm text. A frame of pandas or polars, or any object with an Arrow stream, has
            the keys of `shoal.read_arrow`: its columns of floating-point numbers are numeric and all others categories,
            or as the model has learned before. With other roles, or its labels in a column, pass the reader that
            `shoal.read_arrow` makes of it.
        y : array-like of shape (n,), optional
            Labels of an array, or of a frame: of as many classes as the model has, which `classes_` remembers.
        sample_weight : array-like of shape (n,), optional
            Weight of each row of an array or a frame, 0 or more.
        valid : Reader, iterable of Batch, or pair of X and y, optional
            Held-out examples, evaluated after every pass; the result is in ``history.passes``.
        epochs : int, optional
            Maximum number of passes over the data. Default: 1, as is customary for click logs; 10 for an array or a
            frame.
        batch_size : int, optional
            Examples of a step on an array or a frame; default: 8192.
        shuffle : bool or int, optional
            Number of batches in the shuffle buffer, whose examples are permuted differently in each pass; True is 16,
            False keeps the order. Takes the memory of two buffers. If a `Reader` has several files, each pass reads
            them in another order. Default: False; True for an array or a frame.
        callbacks : function, Callback, or list of them, optional
            A function is called with a `shoal.models.FitProgress` after each pass; a `shoal.models.Callback` after each
            batch too. An exception ends the fit; the model stays consistent.
        progress : bool, int or float
            True shows a bar on standard error: fraction of the bytes, examples/s, progressive log-loss and AUC (of
            several classes accuracy). A number prints lines instead, as Vowpal Wabbit does, with the mean loss since
            the start of the pass and since the previous line: an int n prints a line every n examples, a float f
            whenever the number of examples has grown by the factor f (2.0: at the powers of two).
        checkpoint : Checkpointing, optional
            Where checkpoints are written, and whether to continue from the one that is there.
        early_stopping : EarlyStopping, optional
            Stop when ``valid`` improves no more, and restore the weights of the best pass. Default: make all passes,
            and keep the last weights.

        Returns
        -------
        Model
            Itself.

        Raises
        ------
        KeyboardInterrupt
            Ctrl-C or SIGTERM, at the end of the current batch: the model is consistent and may be used, saved and
            fitted further. A second signal interrupts the batch. SIGTERM is handled in the main thread, if the program
            has no handler for it; if the error is not caught, the process ends with status 143.
        ImportError
            The data is a frame, and pyarrow is not installed (extra ``arrow``).
        TypeError, ValueError
            Labels are missing or not of the model's classes, lengths differ, a number is not finite.
        ValueError
            A line is malformed and the reader does not skip it: the batches before it have been learned from. Or the
            fit of ``checkpoint`` has finished, or was begun with other settings or data; or there is a model.
        CorruptionError
            A file of ``checkpoint`` is missing, cut short or changed.
        SaveConflictError
            Another process wrote to the directory while a checkpoint was written. Its checkpoint stays.
        StorageError
            A file cannot be written or read: the message names it. The checkpoint before it stays.

        Notes
        -----
        ``early_stopping`` writes the best weights to the directory of ``checkpoint``, or to a temporary one
        (``TMPDIR``), as many bytes as the rows have, after each pass, except the last, that is better than all before.

        Examples
        --------
        >>> import numpy as np
        >>> from shoal import LogisticRegression
        >>> X, y = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.2], [0.1, 1.0]]), ["no", "yes", "no", "yes"]
        >>> with LogisticRegression() as model:
        ...     model.fit(X, y, progress=False).predict([[0.0, 2.0]]).tolist()
        ['yes']
        """
        given = self._given(data, y, sample_weight=sample_weight, batch_size=batch_size)
        known, weights = given.classes or self._record.classes, self._learning.class_weight
        plan = Plan.of(
            self._learning,
            epochs if epochs is not None else self._passes_of_tables if given.is_table else 1,
            given.is_table and self._passes_of_tables > 1 if shuffle is None else shuffle,
            early_stopping,
            inputs.class_weights(weights, known, given.labels, self.num_classes),
        )
        self.check_plan(plan)
        record = self._record
        before = record.classes, record.columns, record.format, record.schema
        self._record_input(given)
        try:
            task = FitInput(self.reading(given.data), self._valid(valid), plan)
            self._fit(task, progress=progress, checkpoint=checkpoint, callbacks=callbacks)
        except BaseException:
            if self.examples == 0:
                record.classes, record.columns, record.format, record.schema = before
            raise
        return self

    def _given(self, data: Any, y: Any, *, sample_weight: Any, batch_size: int | None) -> inputs.TrainingData:
        return inputs.training_data(
            self._record, data, y, sample_weight=sample_weight, batch_size=batch_size, classes=self.num_classes
        )

    def _record_input(self, given: inputs.TrainingData) -> None:
        if given.is_table:
            self.check_format(given.data)
            self.record_format(given.data)
            self._record.classes = given.classes
            self._record.columns = given.columns if given.columns is not None else self._record.columns

    def _valid(self, valid: Any) -> Any:
        """Return the batches of validation data."""
        if isinstance(valid, tuple) and len(valid) == 2 and inputs.is_table(valid[0]):
            return self._to_measure(*valid)
        return None if valid is None else self._to_measure(valid)

    @property
    def _passes_of_tables(self) -> int:
        """Passes over an array or a frame by default."""
        return inputs.EPOCHS_OF_ARRAYS

    def _fit(
        self, given: FitInput, *, progress: bool | float, checkpoint: Checkpointing | None, callbacks: OfCallbacks
    ) -> None:
        """Learn from batches by a plan: the part of `fit` after its arguments are resolved."""
        fitting.fit([self], given, progress=progress, checkpoint=checkpoint, callbacks=callbacks)

    @property
    def tolerance(self) -> Tolerance:
        """What a fit withstands: all that its workers have is on the servers."""
        return Tolerance()

    @property
    def common_settings(self) -> dict[str, Any]:
        """The settings that all workers of a fit need to have in common, besides those of the plan."""
        return self.kind_settings | {"bias": self._has_bias, "normalized": self._is_normalized}

    def learn(self, batch: Batch, keys: KeyBatch, seen: StreamMetrics | None) -> float:
        """Predict, count into ``seen``, push; the caller ends the store's clock.

        Parameters
        ----------
        batch : Batch
        keys : KeyBatch
            Of `sort`.
        seen : StreamMetrics or None
            Of `accumulator`; None: the batch is not counted.

        Returns
        -------
        float
            Sum of the losses, by weight.
        """
        scales = self._scales
        rows = self._pulled(keys)
        added: Sums | None = None
        if scales is not None:
            batch, added = scales.learn(batch, keys, rows.pop())
        margins, known = self._forward(batch, keys, rows)
        self._calibration = None
        loss, slopes = self._loss(batch, margins, seen)
        gradients = self._backward(batch, keys, rows, slopes, known)
        for table, gradient in zip(self._learned_tables, gradients, strict=True):
            table.push_unique(keys, gradient, copy=False)  # the tick raises its error
        if scales is not None and added is not None:
            scales.push(keys, added)
        self._record.examples += len(batch)
        return loss

    def _margins(self, batch: Batch, prepared: KeyBatch) -> Floats:
        rows = self._pulled(prepared)
        if self._scales is not None:
            batch = self._scales.normalized(batch, prepared, rows.pop())
        return self._forward(batch, prepared, rows)[0]

    def may_begin(self, batch: Batch, *, learns: bool) -> bool:
        """Whether the rows are on servers and, while it learns, what an early pull misses matters little."""
        if not learns:
            return all(table.reader.is_remote for table in self._tables)
        is_small = len(batch) * self._store.num_workers <= EARLY_SHARE * self.examples
        return is_small and all(table.shard.pulls_early for table in self._tables)

    def begin(self, prepared: KeyBatch, clocks: int) -> None:
        """Begin the pulls of a batch."""
        pulls = [table.begin_pull(prepared, ahead=clocks) for table in self._tables]
        self._begun[id(prepared)] = prepared, pulls

    def forget(self, prepared: KeyBatch) -> None:
        """Drop the pulls of a batch."""
        self._begun.pop(id(prepared), None)

    def _pulled(self, keys: KeyBatch) -> list[Rows]:
        """Return the rows of each table."""
        if id(keys) not in self._begun:
            self.begin(keys, clocks=0)
        return [pull.result() for pull in self._begun.pop(id(keys))[1]]

    @property
    def _learned_tables(self) -> tuple[Table, ...]:
        """The tables that gradients are pushed to."""
        return self._tables[:-1] if self._is_normalized else self._tables

    def prepare(self, batch: Batch) -> KeyBatch:
        """Sort the keys of a batch and the bias's."""
        return self.sort(batch)

    def sort(self, batch: Batch) -> KeyBatch:
        """Sort the keys of a batch and the bias's."""
        return self._store.key_batch(batch.keys, last=self._last)

    def sort_ahead(self, batch: Batch) -> KeyBatch:
        """As `sort`, in a thread other than the one that learns; begin to read their rows that are on disk."""
        keys = KeyBatch(batch.keys, self._store.slots, self._sorters, self._last)
        for table in self._tables:
            table.prefetch(keys)
        return keys

    def prepared(self, batches: Iterable[Batch]) -> Generator[tuple[Batch, KeyBatch]]:
        """Sort the keys of each batch, ahead where it is faster, or where rows are on disk."""
        return preprocessing.sorted_ahead(
            batches,
            self.sort,
            self.sort_ahead,
            overlap=self._store.threads > 1 or self.table.reader.is_remote,
            always=any(table.reader.reads_ahead() for table in self._tables),
        )

    def save_weights(self, folder: StorageDir) -> None:
        """Write the tables into a new folder, without waiting for the disk."""
        self._store.save(folder, tables=[table.name for table in self._tables], durable=False)

    def restore_weights(self, folder: StorageDir) -> None:
        """Restore the rows that `save_weights` wrote."""
        self._store.load(folder)

    @property
    def _last(self) -> int | None:
        """The key that follows those of a batch."""
        return BIAS_KEY if self._has_bias else None

    def check_fitted(self) -> None:
        """Raise ValueError if the model has not learned from any data."""
        if len(self.table) == 0:
            raise ValueError(f"this model is not fitted yet: call fit or partial_fit, or {type(self).__name__}.load")
