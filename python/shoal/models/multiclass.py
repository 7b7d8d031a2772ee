"""MulticlassRegression: logistic regression over any number of classes, whose weights are one table with a column each.

    margins        a_k = b_k + sum of w_jk x_j, float64[n, K]
    multinomial    p_k = e^(a_k - log sum_l e^a_l)                   loss of an example of class y: -log p_y
    ovr            p_k = s_k / sum_l s_l, s_k = 1 / (1 + e^-a_k)     loss: that of K binary regressions, summed

The gradient of a batch is a sum over its examples, each times its weight, one optimizer step per unique key, as in
logistic.py, whose kernels compute each column. One pull and one push serve all classes.

Labels of a batch are numbers of classes: 0, 1, ..., K - 1.

Threads: learning belongs to one thread at a time. Predictions may run at the same time.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.machine import cores
from shoal.data import Batch
from shoal.models.learner import Floats
from shoal.models.linear_weights import BIAS_KEY
from shoal.models.saved_predictor import StoreOwner
from shoal.optim import FTRL, Optimizer
from shoal.store.base import Store
from shoal.store.local import LocalStore, local
from shoal.table.key_batch import KeyBatch

__all__ = ["MultiClass", "MulticlassRegression", "multinomial_losses"]

MultiClass = Literal["multinomial", "ovr"]


def multinomial_losses(
    margins: Floats, classes: npt.NDArray[np.intp], weights: npt.NDArray[np.float32] | None = None
) -> tuple[float, Floats]:
    """Compute the cross-entropy of softmax, and its gradient by the margins.

    Parameters
    ----------
    margins : float64[n, K]
    classes : int[n]
        The class of each example.
    weights : float32[n], optional
        Of the examples; default: each is 1.

    Returns
    -------
    float
        Sum of the losses by weight, in nats.
    float64[n, K]
        Each is weight times (p_k - 1 if k is the class, else p_k). That of the class is computed as minus the sum of
        the others, since p_k - 1 would lose it near 1.
    """
    n = len(classes)
    own = margins[np.arange(n), classes]
    # log sum_l e^a_l - a_y = log(1 + sum of others' e^(a_l - a_y)); the largest exponent is taken out first.
    above = margins - own[:, None]
    above[np.arange(n), classes] = -np.inf
    most = np.maximum(above.max(axis=1, initial=-np.inf), 0.0)
    others = np.exp(above - most[:, None])
    rest = others.sum(axis=1)
    whole = np.exp(-most) + rest
    losses = np.where(most > 0, most + np.log(whole), np.log1p(rest))
    slopes: Floats = others / whole[:, None]
    slopes[np.arange(n), classes] = -slopes.sum(axis=1)
    if weights is None:
        return float(losses.sum()), slopes
    return float(losses @ weights.astype(np.float64)), slopes * weights[:, None]


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
        classes = self._classes_of(batch)
        weights = batch.weights
        if weights is not None and len(bad := np.flatnonzero(~((weights >= 0) & np.isfinite(weights)))):
            raise ValueError(f"weight {weights[bad[0]]} at {bad[0]}: weights are finite, 0 or more")
        keys = self._sort(batch)
        margins = self._margins(batch, keys)
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
        total = float(len(batch)) if weights is None else float(np.sum(weights, dtype=np.float64))
        return loss / total if total > 0 else float("nan")

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
        """Compute the margins of all classes, float64[n, K]."""
        return self._margins(batch, self._sort(batch))

    def predict_proba(self, batch: Batch) -> Floats:
        """Compute the probabilities of all classes, float64[n, K]; those of an example sum to 1."""
        margins = self.decision_function(batch)
        if self.loss == "ovr":
            margins = -np.logaddexp(0.0, -margins)  # log s_k: the ratios hold where all s_k underflow
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
        self._store = local(threads=min(state["threads"], cores()), slots=state["slots"], memory=state["memory"])
        self._owns_store = True
        with tempfile.TemporaryDirectory(prefix="shoal-model-") as folder:
            for name, content in state["files"].items():
                Path(folder, name).write_bytes(content)
            self._store.load(folder)
        self.table = self._store.tables[state["table"]]


_MOST_CLASSES = 4096  # weights of a row
