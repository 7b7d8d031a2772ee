"""MulticlassRegression: logistic regression over any number of classes, whose weights are one table with a column each.

    margins        a_k = b_k + sum of w_jk x_j, float64[n, K]
    multinomial    p_k = e^(a_k - log sum_l e^a_l)                   loss of an example of class y: -log p_y
    ovr            p_k = s_k / sum_l s_l, s_k = 1 / (1 + e^-a_k)     loss: that of K binary regressions, summed

The log-loss of metrics is -log p_y in both cases. The gradient of a batch is a sum over its examples, each times its
weight, one optimizer step per unique key, as in logistic.py, whose kernels compute each column. One pull and one push
serve all classes.

Labels of a batch are numbers of classes: 0, 1, ..., K - 1.

Threads: those of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.data import Batch, Reader
from shoal.lifecycle import Admission, Expiry
from shoal.metrics import MulticlassAccumulator, StreamMetrics
from shoal.metrics.checked import checked_weights
from shoal.metrics.multiclass import checked_classes, multinomial_losses
from shoal.models import files
from shoal.models.learner import Floats
from shoal.models.measured import ClassMetrics, MeasuredExamples
from shoal.models.model import Model
from shoal.models.plan import Learning, Plan
from shoal.models.predictor import Method
from shoal.optim import FTRL, Optimizer
from shoal.store.base import Store
from shoal.table.arrays import Rows
from shoal.table.key_batch import KeyBatch
from shoal.table.table import Table

MultiClass = Literal["multinomial", "ovr"]
T = TypeVar("T", np.float32, np.float64)

_MOST_CLASSES = 4096  # weights of a row


class MulticlassRegression(Model):
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
        Name of the table in the store. Two models in one store need two names.
    seed : int
        Seed of the table, and of the shuffle of `fit`.
    admit : Admission, optional
        Which keys get a row; default: all.
    expire : Expiry or several of them, optional
        Which rows are dropped at the end of a pass; default: none.
    normalized : bool
        Divide each value by the root mean square of its feature; see `LogisticRegression`.
    class_weight, warm_up
        As for `LogisticRegression`.

    Raises
    ------
    ValueError
        There are fewer than two classes or more than 4096, no such loss, or the store has a table of that name with
        another description.

    Notes
    -----
    A key takes ``classes`` times the memory and the time of `LogisticRegression`. There is no ``negative_rate`` and no
    ``metric="auc"``, and there is no `calibrate`: these are for two classes.

    Examples
    --------
    >>> import numpy as np
    >>> from shoal import FTRL, Batch
    >>> from shoal.models import MulticlassRegression
    >>> batch = Batch(np.array([0, 1, 2], np.float32), np.arange(4), np.array([7, 8, 9], np.uint64), None)
    >>> with MulticlassRegression(3, optimizer=FTRL(alpha=0.5)) as model:
    ...     for _ in range(20):
    ...         _ = model.partial_fit(batch)
    ...     model.predict(batch).tolist()
    [0, 1, 2]
    """

    kind: ClassVar[str] = files.MULTICLASS

    def __init__(
        self,
        classes: int,
        *,
        optimizer: Optimizer | None = None,
        store: Store | None = None,
        bias: bool = True,
        loss: MultiClass = "multinomial",
        table: str = "multiclass",
        seed: int = 0,
        admit: Admission | None = None,
        expire: Expiry | Iterable[Expiry] = (),
        normalized: bool = False,
        class_weight: Mapping[Any, float] | str | None = None,
        warm_up: bool = True,
    ) -> None:
        if not 2 <= classes <= _MOST_CLASSES:
            raise ValueError(f"classes is {classes}: pass 2 to {_MOST_CLASSES}")
        if loss not in get_args(MultiClass):
            raise ValueError(f"loss is {loss!r}: pass 'multinomial' or 'ovr'")
        self.loss = loss
        rules = (expire,) if isinstance(expire, Expiry) else tuple(expire)
        self._described = table, classes, FTRL() if optimizer is None else optimizer, seed, admit, rules
        learning = Learning(warm_up=warm_up, seed=seed, class_weight=class_weight)
        super().__init__(store, bias, normalized, learning)

    def __repr__(self) -> str:
        return f"MulticlassRegression({self.classes}, {self.optimizer!r}, loss={self.loss!r}, examples={self.examples})"

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.table.dim

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.classes

    @property
    def is_multiclass(self) -> bool:
        """Whether the model computes a margin and a probability for each class: it does, also of two."""
        return True

    def _make_tables(self) -> Sequence[Table]:
        name, classes, optimizer, seed, admit, expire = self._described
        return [self._store.table(name, dim=classes, optimizer=optimizer, seed=seed, admit=admit, expire=expire)]

    @property
    def kind_settings(self) -> dict[str, Any]:
        """The number of classes, and the loss."""
        return {"classes": self.classes, "loss": self.loss}

    @classmethod
    def _from_file(cls, described: files.ModelFile, store: Store) -> Self:
        settings, spec = described.multiclass, store.tables[described.table].spec
        if settings is None or settings["classes"] != spec.dim:
            classes = None if settings is None else settings["classes"]
            raise ValueError(f"table {described.table!r} has {spec.dim} weights in a row: the model has {classes}")
        return cls(
            settings["classes"],
            optimizer=spec.optimizer,
            store=store,
            bias=described.bias,
            loss=settings["loss"],
            table=described.table,
            seed=described.seed,
            admit=spec.admit,
            expire=spec.expire,
            normalized=described.normalized,
        )

    # ---- learning ----------------------------------------------------------------------------------------------------

    def reading(self, data: Any) -> Any:
        """Return a reader for labels that are numbers of classes; other data as they are."""
        data = super().reading(data)
        return data.with_classes(self.classes) if isinstance(data, Reader) else data

    def check_plan(self, plan: Plan) -> None:
        """Raise ValueError if a plan has a setting that this kind of model does not support."""
        for metric in plan.metrics & {"auc", "gauc"}:
            raise ValueError(f"metric is {metric!r}, which is of two classes: pass 'logloss' or 'accuracy'")

    def accumulator(self) -> StreamMetrics:
        """Return an empty accumulator for the metrics of a pass."""
        return MulticlassAccumulator(self.classes)

    def _batch_accumulator(self) -> StreamMetrics | None:
        return None  # `_loss` checks the batch itself

    def examples_to_measure(self, models: int) -> MeasuredExamples:
        """Return an empty object for the examples that this kind of model, in all ``models``, is measured on."""
        return ClassMetrics(models, self.classes, self._log_probabilities)

    def _forward(self, batch: Batch, keys: KeyBatch, rows: Sequence[Rows]) -> tuple[Floats, Any]:
        margins = _columns(
            _core.logistic_margins(
                batch.indptr, batch.values, keys.native, self._has_bias, weights, self._store.workers
            )
            for weights in np.ascontiguousarray(rows[0].T)
        )
        return margins, None

    def _loss(self, batch: Batch, margins: Floats, seen: StreamMetrics | None) -> tuple[float, Floats]:
        classes = checked_classes(batch.labels, self.classes)
        weights = None if batch.weights is None else checked_weights(batch.weights, len(batch))
        if self.loss == "multinomial":
            loss, slopes = multinomial_losses(margins, classes, weights)
            if seen is not None:
                seen.update(classes, margins, weights, sums=(loss,))
            return loss, slopes
        found = [
            _core.logistic_losses(column, (classes == k).astype(np.float32), batch.weights, self._store.workers)
            for k, column in enumerate(np.ascontiguousarray(margins.T))
        ]
        if seen is None:
            loss = sum(one for one, _ in found)
        else:
            loss = seen.update(classes, self._log_probabilities(margins), weights)
        return loss, _columns(slopes for _, slopes in found)

    def _backward(
        self, batch: Batch, keys: KeyBatch, rows: Sequence[Rows], slopes: Floats, known: Any
    ) -> Sequence[Rows]:
        gradient = _columns(
            _core.logistic_gradient(
                batch.indptr, batch.values, keys.native, self._has_bias, column, self._store.workers
            ).reshape(-1)
            for column in np.ascontiguousarray(slopes.T)
        )
        return [np.ascontiguousarray(gradient)]

    # ---- predicting --------------------------------------------------------------------------------------------------

    def _log_probabilities(self, margins: Floats) -> Floats:
        """Return the logarithms of the probabilities, up to a constant of each example."""
        if self.loss == "multinomial":
            return margins
        # log s_k: the ratios hold where all s_k underflow. np.logaddexp takes twice as long.
        logs: Floats = np.minimum(margins, 0.0) - np.log1p(np.exp(-np.abs(margins)))
        return logs

    def decision_function(self, data: Any) -> Floats:
        """Compute the margins of all classes.

        Parameters
        ----------
        data : Batch, Reader, iterable of Batch, array, sparse matrix or frame
            As for `shoal.models.Model.decision_function`.

        Returns
        -------
        float64[n, K]

        Raises
        ------
        ValueError
            The model has not learned from anything yet, or learned from data with other features.
        """
        return super().decision_function(data).reshape(-1, self.classes)

    def probabilities(self, data: Any) -> Floats:
        """Compute the probabilities of all classes; those of an example sum to 1.

        Parameters
        ----------
        data : Batch, Reader, iterable of Batch, array, sparse matrix or frame

        Returns
        -------
        float64[n, K]
            A column for each of `classes_`.

        Raises
        ------
        ValueError
            The model has not learned from anything yet, or learned from data with other features.
        """
        margins = np.ascontiguousarray(self.decision_function(data))
        return _core.class_probabilities(margins, self.loss == "ovr")

    def predict(self, data: Any) -> npt.NDArray[Any]:
        """Return the likeliest class of each example.

        Parameters
        ----------
        data : Batch, Reader, iterable of Batch, array, sparse matrix or frame

        Returns
        -------
        array of shape (n,)
            Values of `classes_`: of a reader or batches the numbers of the classes.
        """
        chosen: npt.NDArray[Any] = self.classes_[self.decision_function(data).argmax(axis=1)]
        return chosen

    def score(self, data: Any, y: Any = None, *, sample_weight: Any = None) -> float:
        """Compute the accuracy: the fraction of examples, by weight, whose class is predicted correctly.

        Parameters
        ----------
        data, y, sample_weight
            As for `evaluate`.

        Returns
        -------
        float
        """
        accuracy = self.evaluate(data, y, sample_weight=sample_weight).accuracy
        assert accuracy is not None
        return accuracy

    def calibrate(self, data: Any, method: Method = "isotonic", *, y: Any = None, sample_weight: Any = None) -> Self:
        """Raise ValueError: there are maps from margins to probabilities for two classes only."""
        raise ValueError(
            f"calibration is of two classes, and this model has {self.classes}: for each class, calibrate a "
            "LogisticRegression of this class against the others"
        )

    @property
    def bias(self) -> Floats:  # type: ignore[override]  # of each class
        """Weights of the constant feature, float64[K]; 0 in a model without one."""
        return self._bias_row().astype(np.float64)

    def _weights_in(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return rows


def _columns(columns: Iterable[npt.NDArray[T]]) -> npt.NDArray[T]:
    """Return arrays of n as the columns of an array [n, K], each contiguous: sums over classes run along examples."""
    found = list(columns)
    return np.concatenate(found).reshape(len(found), -1).T
