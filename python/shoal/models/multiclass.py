"""MulticlassRegression: logistic regression over any number of classes, whose weights are one table with a column each.

    margins        a_k = b_k + sum of w_jk x_j, float64[n, K]
    multinomial    p_k = e^(a_k - log sum_l e^a_l)                   loss of an example of class y: -log p_y
    ovr            p_k = s_k / sum_l s_l, s_k = 1 / (1 + e^-a_k)     loss: that of K binary regressions, summed

The gradient of a batch is a sum over its examples, each times its weight, one optimizer step per unique key, as in
logistic.py, whose kernels compute each column. One pull and one push serve all classes.

Labels of a batch are numbers of classes: 0, 1, ..., K - 1. A directory holds a model as files.py describes it, without
a history.

Threads: learning belongs to one thread at a time. Predictions may run at the same time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.interrupts import at_boundaries
from shoal.base.machine import cores
from shoal.data import Batch, Reader
from shoal.models import files, preprocessing
from shoal.models.history import History
from shoal.models.learner import Floats
from shoal.models.linear_weights import BIAS_KEY
from shoal.models.multiclass_metrics import MulticlassMetrics, MulticlassPass, MulticlassSums, multinomial_losses
from shoal.models.plan import Plan
from shoal.models.predictor import check_same_features
from shoal.models.progress import ProgressBar
from shoal.models.saved_predictor import StoreOwner
from shoal.models.sources import check_iterable, why_empty
from shoal.optim import FTRL, Optimizer
from shoal.storage.base import StoragePath
from shoal.storage.open import open_dir
from shoal.store.base import Store
from shoal.store.local import LocalStore, local
from shoal.table.key_batch import KeyBatch
from shoal.table.table import Table

__all__ = ["MultiClass", "MulticlassRegression"]

MultiClass = Literal["multinomial", "ovr"]


class MulticlassRegression(StoreOwner):
    """Logistic regression of two or more classes: multinomial (softmax), or one binary regression for each class.

    Parameters
    ----------
    classes : int
        Number of classes, 2 to 4096.
    optimizer : Optimizer
        The update rule of the weights; default: ``FTRL()``.
    store : Store, optional
        The store of the table. Without one the model makes a local store of its own and closes it in `close`.
    bias : bool
        Whether every example has a constant feature.
    loss : {"multinomial", "ovr"}
        Cross-entropy of softmax; or a binary regression for each class against the others.
    table : str
        Name of the table in the store.
    seed : int
        Seed of the table.

    Raises
    ------
    ValueError
        There are fewer than two classes or more than 4096, or no such loss.

    Notes
    -----
    A key takes ``classes`` times the memory and the time of `LogisticRegression`.

    Examples
    --------
    >>> import numpy as np
    >>> from shoal import FTRL, Batch
    >>> from shoal.models import MulticlassRegression
    >>> batch = Batch(np.array([0, 1, 2], np.float32), np.arange(4), np.array([7, 8, 9], np.uint64), None)
    >>> with MulticlassRegression(3, FTRL(alpha=0.5)) as model:
    ...     for _ in range(20):
    ...         _ = model.partial_fit(batch)
    ...     model.predict(batch).tolist()
    [0, 1, 2]
    """

    def __init__(
        self,
        classes: int,
        optimizer: Optimizer | None = None,
        store: Store | None = None,
        bias: bool = True,
        *,
        loss: MultiClass = "multinomial",
        table: str = "multiclass",
        seed: int = 0,
    ) -> None:
        if not 2 <= classes <= _MOST_CLASSES:
            raise ValueError(f"classes is {classes}: pass 2 to {_MOST_CLASSES}")
        if loss not in get_args(MultiClass):
            raise ValueError(f"loss is {loss!r}: pass 'multinomial' or 'ovr'")
        super().__init__(local() if store is None else store, is_own=store is None)
        self.loss = loss
        self._has_bias = bool(bias)
        self._describe(0, None, {})
        try:
            self.table = self._store.table(table, dim=classes, optimizer=optimizer or FTRL(), seed=seed)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"MulticlassRegression({self.classes}, {self.table.optimizer!r}, loss={self.loss!r})"

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.table.dim

    @property
    def tables(self) -> tuple[Table, ...]:
        """The table of the weights."""
        return (self.table,)

    def _describe(self, examples: int, form: str | None, schema: Mapping[str, Any]) -> None:
        self.examples = examples  # learned from so far; an example counts once for each pass
        self.format = form  # of the data
        self.schema = dict(schema)
        self.passes: list[MulticlassPass] = []  # of the last `fit`

    # ---- learning ----------------------------------------------------------------------------------------------------

    def partial_fit(self, batch: Batch) -> float:
        """Predict a batch, then learn from it: one optimizer step per unique key. Ends a clock of the store.

        Parameters
        ----------
        batch : Batch
            Labels are numbers of classes. Loss and gradient of an example are multiplied by its weight.

        Returns
        -------
        float
            Mean loss of the batch before it was learned from, in nats, by weight; NaN of an empty batch.

        Raises
        ------
        ValueError
            A label is not the number of a class, or a weight is negative or not finite. Nothing was learned.
        """
        return self._learn(batch, None)

    def _learn(self, batch: Batch, seen: MulticlassSums | None) -> float:
        classes = self._classes_of(batch)
        weights = batch.weights
        if weights is not None and len(bad := np.flatnonzero(~((weights >= 0) & np.isfinite(weights)))):
            raise ValueError(f"weight {weights[bad[0]]} at {bad[0]}: weights are finite, 0 or more")
        keys = self._sort(batch)
        margins = self._margins(batch, keys)
        if seen is not None:
            seen.add(self._log_probabilities(margins), classes, weights)
        if self.loss == "multinomial":
            loss, slopes = multinomial_losses(margins, classes, weights)
        else:
            found = [
                _core.logistic_losses(
                    np.ascontiguousarray(margins[:, k]),
                    (classes == k).astype(np.float32),
                    weights,
                    self._store.workers,
                )
                for k in range(self.classes)
            ]
            loss, slopes = sum(one for one, _ in found), np.stack([slope for _, slope in found], axis=1)
        gradients = [
            _core.logistic_gradient(
                batch.indptr,
                batch.values,
                keys.native,
                self._has_bias,
                np.ascontiguousarray(slopes[:, k]),
                self._store.workers,
            )
            for k in range(self.classes)
        ]
        self.table.push_unique(keys, np.stack([one.reshape(-1) for one in gradients], axis=1), copy=False)
        self._store.tick()
        self.examples += len(batch)
        total = float(len(batch)) if weights is None else float(np.sum(weights, dtype=np.float64))
        return loss / total if total > 0 else float("nan")

    def fit(
        self,
        reader: Iterable[Batch],
        *,
        valid: Iterable[Batch] | None = None,
        epochs: int = 1,
        shuffle: bool | int = False,
        warm_up: bool = True,
        seed: int = 0,
        progress: bool = True,
    ) -> Self:
        """Learn from all examples, after what was learned before.

        Parameters
        ----------
        reader : Reader or iterable of Batch
            Iterated once for each pass. Labels are numbers of classes, also of a reader's files.
        valid : Reader or iterable of Batch, optional
            Measured after every pass.
        epochs, shuffle, warm_up, seed
            As `shoal.models.Model.fit`.
        progress : bool
            Whether a bar on standard error shows it.

        Returns
        -------
        MulticlassRegression
            Itself; `passes` has the metrics.

        Raises
        ------
        ValueError
            A setting is invalid, a label is not the number of a class, or the data has other features than before.
        KeyboardInterrupt
            Ctrl-C or SIGTERM, at the end of the current batch.
        """
        plan = Plan(epochs=epochs, shuffle=shuffle, warm_up=warm_up, seed=seed)
        check_iterable(reader, "reader", passes=epochs)
        if valid is not None:
            check_iterable(valid, "valid", passes=epochs)
        self.check_format(reader)
        reader = self.reading(reader)
        self._describe(
            self.examples,
            getattr(reader, "format", None) or self.format,
            getattr(reader, "schema", None) or self.schema,
        )
        with at_boundaries() as interrupted:
            for epoch in range(epochs):
                self._pass(plan, reader, valid, epoch, progress, interrupted)
        return self

    def _pass(
        self,
        plan: Plan,
        reader: Iterable[Batch],
        valid: Iterable[Batch] | None,
        epoch: int,
        progress: bool,
        interrupted: Any,
    ) -> None:
        seen, began, complete = MulticlassSums(), time.perf_counter(), False
        source = plan.source(reader, epoch)
        measured = None
        try:
            with ProgressBar(
                f"pass {epoch + 1}", source, [seen], show=progress, quality=lambda one: f"accuracy {one.accuracy:.4f}"
            ) as bar:
                for batch in plan.batches(source, epoch, self.examples):
                    self._learn(batch, seen)
                    bar.update()
                    if (interrupt := interrupted()) is not None:
                        raise interrupt
            complete = True
            seconds = time.perf_counter() - began
            measured = None if valid is None else self.evaluate(valid)
        finally:
            self.passes.append(
                MulticlassPass(
                    number=epoch + 1,
                    metrics=seen.metrics(),
                    seconds=seconds if complete else time.perf_counter() - began,
                    skipped=int(getattr(source, "skipped", 0)),
                    complete=complete,
                    valid=measured,
                )
            )

    def evaluate(self, data: Iterable[Batch] | Batch) -> MulticlassMetrics:
        """Measure the predictions of labelled examples; nothing is learned.

        Parameters
        ----------
        data : Batch, Reader or iterable of Batch

        Returns
        -------
        MulticlassMetrics

        Raises
        ------
        ValueError
            There are no examples, the model has not learned from anything yet, or from data with other features.
        """
        self.check_format(data)
        seen = MulticlassSums()
        for batch in preprocessing.examples_of([data] if isinstance(data, Batch) else self.reading(data)):
            seen.add(self._log_probabilities(self.decision_function(batch)), self._classes_of(batch), batch.weights)
        if seen.examples == 0:
            raise ValueError(f"{why_empty(data)}: nothing was measured")
        return seen.metrics()

    def reading(self, data: Any) -> Any:
        """Return a reader for labels that are numbers of classes; other data as they are."""
        return data.with_classes(self.classes) if isinstance(data, Reader) else data

    def check_format(self, data: object) -> None:
        """Raise ValueError if the keys of ``data`` stand for other features than those that were learned."""
        check_same_features(self.format, self.schema, data)

    def _classes_of(self, batch: Batch) -> npt.NDArray[np.intp]:
        labels = batch.labels
        known = (labels >= 0) & (labels < self.classes) & (labels == np.floor(labels))
        if len(bad := np.flatnonzero(~known)):
            raise ValueError(
                f"label {labels[bad[0]]} at {bad[0]}: labels are numbers of classes, 0 to {self.classes - 1}"
            )
        return labels.astype(np.intp)

    def _sort(self, batch: Batch) -> KeyBatch:
        return self._store.key_batch(batch.keys, last=BIAS_KEY if self._has_bias else None)

    # ---- predicting --------------------------------------------------------------------------------------------------

    def _margins(self, batch: Batch, keys: KeyBatch) -> Floats:
        rows = self.table.pull_unique(keys)
        columns = [
            _core.logistic_margins(
                batch.indptr,
                batch.values,
                keys.native,
                self._has_bias,
                np.ascontiguousarray(rows[:, k]),
                self._store.workers,
            )
            for k in range(self.classes)
        ]
        return np.stack(columns, axis=1)

    def decision_function(self, batch: Batch) -> Floats:
        """Compute the margins of all classes, float64[n, K].

        Raises
        ------
        ValueError
            The model has not learned from anything yet.
        """
        if len(self.table) == 0:
            raise ValueError("this model is not fitted yet: call fit or partial_fit, or MulticlassRegression.load")
        return self._margins(batch, self._sort(batch))

    def _log_probabilities(self, margins: Floats) -> Floats:
        """Return the logarithms of the probabilities, up to a constant of each example."""
        # log s_k: the ratios hold where all s_k underflow
        return margins if self.loss == "multinomial" else -np.logaddexp(0.0, -margins)

    def predict_proba(self, batch: Batch) -> Floats:
        """Compute the probabilities of all classes, float64[n, K]; those of an example sum to 1."""
        margins = self._log_probabilities(self.decision_function(batch))
        shifted = np.exp(margins - margins.max(axis=1, keepdims=True))
        p: Floats = shifted / shifted.sum(axis=1, keepdims=True)
        return p

    def predict(self, batch: Batch) -> npt.NDArray[np.intp]:
        """Return the number of the likeliest class of each example."""
        chosen: npt.NDArray[np.intp] = self.decision_function(batch).argmax(axis=1)
        return chosen

    def weights(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
        """Read the weights of keys, float32[n, K]."""
        return self.table.pull(keys)

    @property
    def bias(self) -> Floats:
        """Weights of the constant feature, float64[K]; 0 in a model without one."""
        if not self._has_bias:
            return np.zeros(self.classes)
        bias: Floats = self.table.pull(np.array([BIAS_KEY], np.uint64))[0].astype(np.float64)
        return bias

    # ---- saving and loading ------------------------------------------------------------------------------------------

    def save(
        self,
        directory: StoragePath,
        *,
        overwrite: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Path | str:
        """Write the model; an interrupted save leaves the earlier model unchanged.

        Parameters
        ----------
        directory, overwrite, storage_options
            As `shoal.models.Model.save`.

        Returns
        -------
        Path or str
            The directory, or its URL.

        Raises
        ------
        ValueError
            There is a model and ``overwrite`` is False, or there are other files, which are never replaced.
        StorageError
            A file cannot be written: the message names it. The earlier model stays.
        """
        where = open_dir(directory, storage_options)
        optimizer = self.table.optimizer
        described = files.ModelFile(
            model=files.MULTICLASS,
            table=self.table.name,
            bias=self._has_bias,
            optimizer=type(optimizer).__name__,
            params=optimizer.params(),
            seed=self.table.seed,
            examples=self.examples,
            format=self.format,
            schema=self.schema,
            history=History(),
            multiclass={"classes": self.classes, "loss": self.loss},
        )
        files.save(where, described, self._store, [self.table], overwrite=overwrite)
        return where.location

    @classmethod
    def load(
        cls, directory: StoragePath, *, store: Store | None = None, storage_options: Mapping[str, Any] | None = None
    ) -> Self:
        """Read a model; it predicts, bit for bit, as the saved one, and can learn further.

        Parameters
        ----------
        directory, store, storage_options
            As `shoal.models.Model.load`.

        Returns
        -------
        MulticlassRegression

        Raises
        ------
        CorruptionError
            A file is missing, cut short or changed: the message names it.
        ValueError
            It is a model of another kind, or the store has a table of its name already.
        """
        where = open_dir(directory, storage_options)
        if (found := files.read(where).model) != files.MULTICLASS:
            raise ValueError(f"{where} is a {found}, not a {files.MULTICLASS}: load it with shoal.load")
        target = local() if store is None else store
        try:
            model = cls.exported(files.describe(files.load(where, target)), target)
        except BaseException:
            if store is None:
                target.close()
            raise
        model._owns_store = store is None
        return model

    @classmethod
    def exported(cls, description: Mapping[str, Any], store: Store) -> Self:
        """Make the model of a description (`files.describe`), over its table, which is in the store."""
        model = cls.__new__(cls)
        StoreOwner.__init__(model, store, is_own=False)
        model.table = store.tables[description["table"]]
        if (classes := description["multiclass"]["classes"]) != model.classes:
            raise ValueError(
                f"table {model.table.name!r} has {model.classes} weights in a row: the model has {classes}"
            )
        model.loss, model._has_bias = description["multiclass"]["loss"], description["bias"]
        model._describe(description["examples"], description["format"], description["schema"])
        return model

    # ---- pickling ----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a pickle or a copy, with the rows as the files of a checkpoint.

        Raises
        ------
        TypeError
            The rows are on a cluster.
        """
        if not isinstance(self._store, LocalStore):
            raise TypeError("the rows of this MulticlassRegression are on a cluster and cannot be pickled")
        with tempfile.TemporaryDirectory(prefix="shoal-model-") as folder:
            checkpoint = Path(folder, "checkpoint")
            self._store.save(checkpoint, tables=[self.table.name], durable=False)
            return {
                "loss": self.loss,
                "described": (self.examples, self.format, self.schema),
                "bias": self._has_bias,
                "table": self.table.name,
                "threads": self._store.threads,
                "slots": self._store.slots,
                "memory": self._store.memory,
                "files": {path.name: path.read_bytes() for path in checkpoint.iterdir()},
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the model in a local store of its own."""
        self.loss, self._has_bias = state["loss"], state["bias"]
        self._describe(*state["described"])
        self._store = local(threads=min(state["threads"], cores()), slots=state["slots"], memory=state["memory"])
        self._owns_store = True
        with tempfile.TemporaryDirectory(prefix="shoal-model-") as folder:
            for name, content in state["files"].items():
                Path(folder, name).write_bytes(content)
            self._store.load(folder)
        self.table = self._store.tables[state["table"]]


_MOST_CLASSES = 4096  # weights of a row
