"""Logistic regression over sparse features.

A margin is a = b + sum of w_k x_k over the example's features, the probability 1 / (1 + e^-a). The gradient of a batch
is a *sum* over its examples, each times its weight, one optimizer step per unique key; with batches of one example this
is the textbook online algorithm (McMahan et al., KDD 2013, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

from shoal import _core
from shoal.data import Batch
from shoal.models import files
from shoal.models.model import Floats, Model
from shoal.optim import FTRL, Optimizer
from shoal.store import Store
from shoal.table import KeyBatch, Rows, Table


class LogisticRegression(Model):
    """Logistic regression whose weights are a table of a store.

    Parameters
    ----------
    optimizer : Optimizer
        The update rule of the weights; FTRL with its defaults if not given.
    store : Store, optional
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

    kind: ClassVar[str] = files.LOGISTIC

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        store: Store | None = None,
        bias: bool = True,
        *,
        table: str = "lr",
        seed: int = 0,
    ) -> None:
        self._described = table, optimizer or FTRL(), seed
        super().__init__(store, bias)

    def _make_tables(self) -> Sequence[Table]:
        name, optimizer, seed = self._described
        return [self._store.table(name, dim=1, optimizer=optimizer, seed=seed)]

    def _forward(self, batch: Batch, keys: KeyBatch, rows: Sequence[Rows]) -> tuple[Floats, Any]:
        weights = rows[0].reshape(-1)
        margins = _core.logistic_margins(
            batch.indptr, batch.values, keys.native, self._has_bias, weights, self._store.workers
        )
        return margins, None

    def _backward(
        self, batch: Batch, keys: KeyBatch, rows: Sequence[Rows], slopes: Floats, known: Any
    ) -> Sequence[Rows]:
        return [
            _core.logistic_gradient(
                batch.indptr, batch.values, keys.native, self._has_bias, slopes, self._store.workers
            )
        ]

    @classmethod
    def _from_file(cls, described: files.ModelFile, store: Store) -> Self:
        optimizer = store.tables[described.table].optimizer
        return cls(optimizer, store, described.bias, table=described.table, seed=described.seed)
