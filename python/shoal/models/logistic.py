"""Logistic regression over sparse features, learned batch by batch.

    batch --> KeyBatch (sort, unique) --> pull --> margins --> loss, gradient per unique key --> push
                                           |  the weights stay as they are within a batch  |

A margin is a = b + sum of w_k x_k over the example's features, the probability 1 / (1 + e^-a). The gradient of a batch
is a *sum* over its examples, one optimizer step per unique key; with batches of one example this is the textbook
online algorithm. The bias b is a row like any other, under ``BIAS_KEY``: every example has it once, with value 1.

    model directory
        model.json           what the model is and which checkpoint holds its weights; replaced atomically
        checkpoint-000001/   the table, as `LocalStore.save` writes it

Invariants
    I1  Every example is predicted before it is learned from, so the losses of a first pass are progressive.
    I2  Predicting creates no rows and changes nothing.
    I3  After every batch, and so after Ctrl-C, table, history and counts belong together and may be saved.

Threads: `fit` and `partial_fit` belong to one thread at a time. Predictions may run beside them; they see each slot as
it was at some batch boundary.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.data import Batch
from shoal.metrics import Accumulator, Curves, Metrics, measure_with_curves, probabilities
from shoal.models import files
from shoal.models.history import Curve, History, Pass
from shoal.models.watch import closing, interrupts_at_boundaries, watch
from shoal.optim import FTRL, Optimizer
from shoal.store import LocalStore, local
from shoal.table import KeyBatch, Table

Floats = npt.NDArray[np.float64]

# The key of the bias: the first eight bytes of SHA-256 of "shoal bias". Any key would do; a small or a round one would
# be more likely to be somebody's feature, which would then share its row.
BIAS_KEY = 0x1208DA918DB99F36

log = logging.getLogger(__name__)


class LogisticRegression:
    """Logistic regression whose weights are a table of a store.

    Parameters
    ----------
    optimizer : Optimizer
        The update rule of the weights; FTRL with its defaults if not given.
    store : LocalStore, optional
        Where the table lives. Without one the model makes a local store of its own and closes it in `close`.
    bias : bool
        Whether every example has a constant feature.
    table : str
        Name of the table in the store. Two models in one store need two names.
    seed : int
        Seed of the table: of the rounding of its accumulators.

    Raises
    ------
    ValueError
        The store has a table of that name with another description.

    Examples
    --------
    >>> import numpy as np
    >>> from shoal import FTRL, Batch, LogisticRegression
    >>> batch = Batch(np.array([1, 0], np.float32), np.array([0, 1, 2]), np.array([7, 9], np.uint64), None)
    >>> with LogisticRegression(FTRL(alpha=0.5)) as model:
    ...     round(model.partial_fit(batch), 4), bool(model.partial_fit(batch) < 0.69)
    (0.6931, True)
    """

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        store: LocalStore | None = None,
        bias: bool = True,
        *,
        table: str = "lr",
        seed: int = 0,
    ) -> None:
        if store is not None and not isinstance(store, LocalStore):
            raise TypeError(
                f"store is a {type(store).__name__}: pass shoal.local(...), or nothing for a store of its own"
            )
        self._owns_store = store is None
        self._store = local() if store is None else store
        try:
            self._table = self._store.table(table, dim=1, optimizer=optimizer or FTRL(), seed=seed)
        except BaseException:
            self.close()
            raise
        self._has_bias = bool(bias)
        self._examples = 0
        self._format: str | None = None
        self._curve = Curve(())
        self._passes: list[Pass] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LogisticRegression({self.optimizer!r}, bias={self._has_bias}, examples={self._examples})"

    def close(self) -> None:
        """Close the store if it is the model's own; a store that was passed in stays open."""
        if self._owns_store:
            self._store.close()

    # ---- what it is -------------------------------------------------------------------------------------------------

    @property
    def store(self) -> LocalStore:
        """The store of the weights."""
        return self._store

    @property
    def table(self) -> Table:
        """The table of the weights: one row per key, of dim 1."""
        return self._table

    @property
    def optimizer(self) -> Optimizer:
        """The update rule."""
        return self._table.optimizer

    @property
    def examples(self) -> int:
        """Examples learned from so far; an example counts once for each pass."""
        return self._examples

    @property
    def format(self) -> str | None:
        """Name of the format that the model was fitted on ("libsvm", "criteo"), if a reader told."""
        return self._format

    @property
    def history(self) -> History:
        """Learning curve and summary of the passes of `fit`."""
        return History(points=self._curve.points, passes=tuple(self._passes))

    @property
    def has_bias(self) -> bool:
        """Whether every example has a constant feature."""
        return self._has_bias

    @property
    def bias(self) -> float:
        """Weight of the constant feature; 0 in a model without one."""
        if not self._has_bias:
            return 0.0
        return float(self._table.pull(np.array([BIAS_KEY], np.uint64))[0, 0])

    def weights(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]:
        """Read all weights that are not zero, the bias left out.

        Returns
        -------
        keys : uint64[k]
            In hash order.
        weights : float32[k]

        Notes
        -----
        Takes 12 bytes a weight. With l1 > 0 most rows read zero: their state is kept for what may come.
        """
        keys: list[npt.NDArray[np.uint64]] = []
        weights: list[npt.NDArray[np.float32]] = []
        for some_keys, rows in self._table.items():
            w = rows[:, 0]
            kept = w != 0
            if self._has_bias:
                kept &= some_keys != np.uint64(BIAS_KEY)
            keys.append(some_keys[kept])
            weights.append(w[kept])
        if not keys:
            return np.empty(0, np.uint64), np.empty(0, np.float32)
        return np.concatenate(keys), np.concatenate(weights)

    # ---- learning ---------------------------------------------------------------------------------------------------

    def partial_fit(self, batch: Batch) -> float:
        """Predict a batch, then learn from it: one optimizer step per unique key.

        Parameters
        ----------
        batch : Batch

        Returns
        -------
        float
            Mean loss of the batch before it was learned from, in nats; NaN of an empty batch.
        """
        _check_batch(batch)
        progress = Accumulator(bits=1)  # asked for the loss alone
        self._learn(batch, progress)
        return progress.logloss

    def fit(
        self,
        reader: Iterable[Batch],
        *,
        epochs: int = 1,
        valid: Iterable[Batch] | None = None,
        progress: bool | float = True,
    ) -> Self:
        """Learn from all batches of a reader. A model that has learned before learns on.

        Parameters
        ----------
        reader : Reader or iterable of Batch
            Iterated once for each pass.
        epochs : int
            Passes over the data. One is customary for click logs.
        valid : Reader or iterable of Batch, optional
            Measured after every pass; the result is in ``history.passes``.
        progress : bool, int or float
            True shows a bar on standard error: share of the bytes, examples/s, progressive log-loss and AUC. A number
            writes lines instead, as Vowpal Wabbit does, with the mean loss since the start of the pass and since the
            line before: an int every so many examples, a float whenever there are so many times as many (2.0: at the
            powers of two).

        Returns
        -------
        LogisticRegression
            Itself.

        Raises
        ------
        KeyboardInterrupt
            Ctrl-C, at the end of the batch at hand: the model is whole, may be used, saved and fitted on. A second
            Ctrl-C does not wait for the batch.
        ValueError
            A malformed line, unless the reader skips them. The batches before it have been learned from.
        """
        _check_iterable(reader, "reader", passes=epochs)
        if valid is not None:
            _check_iterable(valid, "valid", passes=epochs)
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}: pass 1 or more")
        self._check_format(reader)
        self._format = getattr(reader, "format", None) or self._format
        for number in range(1, epochs + 1):
            self._fit_pass(reader, valid, f"pass {number}/{epochs}" if epochs > 1 else "train", progress)
        return self

    def _fit_pass(
        self, reader: Iterable[Batch], valid: Iterable[Batch] | None, title: str, progress: bool | float
    ) -> None:
        number = len(self._passes) + 1
        seen = Accumulator()
        dropped = self._table.stats().nonfinite_rows
        begin = time.perf_counter()
        complete = False
        try:
            with watch(title, reader, seen, progress) as bar, interrupts_at_boundaries() as interrupted:
                for batch in closing(reader):
                    _check_batch(batch)
                    loss = self._learn(batch, seen)
                    self._curve.add(len(batch), loss, total=self._examples, pass_number=number, progress=seen)
                    bar.update()
                    if interrupted():
                        raise KeyboardInterrupt
            complete = True
        finally:
            self._curve.close_window(total=self._examples, pass_number=number, progress=seen)
            summary = Pass(
                number=number,
                metrics=seen.result(),
                auc_error=seen.auc_error,
                seconds=time.perf_counter() - begin,
                skipped=int(getattr(reader, "skipped", 0)),
                complete=complete,
                valid=None,
            )
            self._passes.append(summary)
        if valid is not None:
            metrics, curves = self.measure(valid)
            self._passes[-1] = replace(summary, valid=metrics, curves=curves)
        if dropped := self._table.stats().nonfinite_rows - dropped:
            log.warning("%d gradients were not finite and changed nothing: look for huge values in the data", dropped)

    def _learn(self, batch: Batch, progress: Accumulator) -> float:
        """Predict, count into ``progress``, push; returns the sum of losses."""
        keys = self._key_batch(batch)
        margins = self._margins(batch, keys)
        workers = self._store.workers
        loss, slopes = _core.logistic_losses(margins, batch.labels, None, workers)
        # A slope is p - y, so these sums are known; what is wrong with a label is said before anything has changed.
        progress.update(
            batch.labels, margins, sums=(loss, float(np.sum(slopes) + np.sum(batch.labels, dtype=np.float64)))
        )
        gradient = _core.logistic_gradient(batch.indptr, batch.values, keys.native, self._has_bias, slopes, workers)
        self._table.push_unique(keys, gradient).wait()
        self._examples += len(batch)
        return loss

    def _margins(self, batch: Batch, keys: KeyBatch) -> Floats:
        weights = self._table.pull_unique(keys).reshape(-1)
        return _core.logistic_margins(
            batch.indptr, batch.values, keys.native, self._has_bias, weights, self._store.workers
        )

    def _key_batch(self, batch: Batch) -> KeyBatch:
        return self._store.key_batch(np.append(batch.keys, np.uint64(BIAS_KEY)) if self._has_bias else batch.keys)

    # ---- predicting -------------------------------------------------------------------------------------------------

    def decision_function(self, data: Batch | Iterable[Batch]) -> Floats:
        """Compute the margins (log-odds) of examples.

        Parameters
        ----------
        data : Batch, Reader or iterable of Batch

        Returns
        -------
        float64[n]

        Raises
        ------
        ValueError
            The model has not learned from anything yet.
        """
        if isinstance(data, Batch):
            self._check_fitted()
            return self._predict(data)
        _check_iterable(data, "data", passes=1)
        self._check_fitted()
        self._check_format(data)
        parts = [self._predict(batch) for batch in closing(data)]
        return np.concatenate(parts) if parts else np.empty(0)

    def predict_proba(self, data: Batch | Iterable[Batch]) -> Floats:
        """Compute the probabilities of label 1.

        Parameters
        ----------
        data : Batch, Reader or iterable of Batch

        Returns
        -------
        float64[n]
            One number per example, not one per class.

        Raises
        ------
        ValueError
            The model has not learned from anything yet.
        """
        return probabilities(self.decision_function(data))

    def evaluate(self, data: Batch | Iterable[Batch]) -> Metrics:
        """Measure the predictions of labelled examples; nothing is learned.

        Parameters
        ----------
        data : Batch, Reader or iterable of Batch

        Returns
        -------
        Metrics
            Exact: all margins and labels are held, 12 bytes an example, and about 60 more while the AUC sorts them.

        Raises
        ------
        ValueError
            The model has not learned from anything yet.
        """
        return self.measure(data)[0]

    def measure(self, data: Batch | Iterable[Batch]) -> tuple[Metrics, Curves]:
        """Measure as `evaluate` does, with the calibration by decile and the ROC curve.

        Parameters
        ----------
        data : Batch, Reader or iterable of Batch

        Returns
        -------
        Metrics
        Curves

        Raises
        ------
        ValueError
            The model has not learned from anything yet.
        """
        batches = [data] if isinstance(data, Batch) else data
        _check_iterable(batches, "data", passes=1)
        self._check_fitted()
        self._check_format(data)
        labels: list[npt.NDArray[np.float32]] = []
        margins: list[Floats] = []
        for batch in closing(batches):
            margins.append(self._predict(batch))
            labels.append(batch.labels)
        if not labels:
            return measure_with_curves([], [])
        return measure_with_curves(np.concatenate(labels), np.concatenate(margins))

    def _predict(self, batch: Batch) -> Floats:
        _check_batch(batch)
        return self._margins(batch, self._key_batch(batch))

    def _check_fitted(self) -> None:
        if len(self._table) == 0:
            raise ValueError("this model has learned nothing yet: call fit or partial_fit, or LogisticRegression.load")

    def _check_format(self, data: object) -> None:
        form = getattr(data, "format", None)
        if form is not None and self._format not in (None, form):
            raise ValueError(
                f"this model learned from {self._format} data, its keys mean nothing for {form}: pass a reader of "
                f"{self._format} data"
            )

    # ---- keeping ----------------------------------------------------------------------------------------------------

    def save(self, directory: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
        """Write the model; a save that is cut off leaves the model that was there before.

        Parameters
        ----------
        directory : path
            Made if it is not there.
        overwrite : bool
            Whether to replace a model that is there.

        Returns
        -------
        Path
            The directory.

        Raises
        ------
        ValueError
            There is a model and ``overwrite`` is False, or there is something else: that is never replaced.
        OSError
            It cannot be written.

        Notes
        -----
        Needs room for the old and the new weights. One writer at a time.
        """
        described = files.ModelFile(
            table=self._table.name,
            bias=self._has_bias,
            optimizer=type(self.optimizer).__name__,
            params=self.optimizer.params(),
            seed=self._table.seed,
            examples=self._examples,
            format=self._format,
            history=self.history,
        )
        return files.save(Path(directory), described, self._store, self._table, overwrite=overwrite)

    @classmethod
    def load(cls, directory: str | os.PathLike[str], *, store: LocalStore | None = None) -> Self:
        """Read a model; it predicts, bit for bit, as the one that was saved, and may learn on.

        Parameters
        ----------
        directory : path
            As written by `save`.
        store : LocalStore, optional
            Where the table goes; without one into a new local store, closed by the model's `close`.

        Returns
        -------
        LogisticRegression

        Raises
        ------
        CorruptionError
            A file is missing, cut short or changed: the message names it.
        ValueError
            The store has a table of the model's name already.
        """
        target = local() if store is None else store
        try:
            described = files.load(Path(directory), target)
            optimizer = target.tables[described.table].optimizer
            model = cls(optimizer, target, described.bias, table=described.table, seed=described.seed)
        except BaseException:
            if store is None:
                target.close()
            raise
        model._owns_store = store is None
        model._examples = described.examples
        model._format = described.format
        model._curve = Curve(described.history.points)
        model._passes = list(described.history.passes)
        return model


def _check_batch(batch: object) -> None:
    if not isinstance(batch, Batch):
        raise TypeError(f"a batch is a {type(batch).__name__}: pass a shoal.Batch, or iterate a reader")


def _check_iterable(data: object, what: str, passes: int) -> None:
    """Say what to pass instead, where ``data`` cannot be iterated ``passes`` times as batches."""
    if isinstance(data, str | os.PathLike):
        raise TypeError(f"{what} is a path: pass shoal.read_libsvm({os.fspath(data)!r}) or shoal.read_criteo(...)")
    if isinstance(data, Batch):
        raise TypeError(f"{what} is a Batch: pass a reader or a list of batches, or call partial_fit(batch)")
    if not isinstance(data, Iterable):
        raise TypeError(f"{what} is a {type(data).__name__}: pass a reader or another iterable of shoal.Batch")
    if passes > 1 and iter(data) is data:
        raise ValueError(
            f"{what} is an iterator and ends after one pass of {passes}: pass a reader or a list of batches"
        )
