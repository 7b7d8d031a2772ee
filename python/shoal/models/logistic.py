"""Logistic regression over sparse features.

A margin is a = b + sum of w_k x_k over the example's features, the probability 1 / (1 + e^-a). The gradient of a batch
is a *sum* over its examples, each times its weight, one optimizer step per unique key; with batches of one example this
is the textbook online algorithm (McMahan et al., KDD 2013, Algorithm 1).

With ``solver="dbpg"`` it minimizes the sum of all losses and an L1 penalty instead, over examples in memory (dbpg.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from msgspec import structs

from shoal import _core
from shoal.data import Batch
from shoal.lifecycle import Admission, Expiry
from shoal.metrics import StreamMetrics
from shoal.models import dbpg, files
from shoal.models.callbacks import Callbacks
from shoal.models.dbpg import DBPG, SolverResult
from shoal.models.fit_checkpoints import Checkpointing
from shoal.models.fitting import OfCallbacks
from shoal.models.learner import Floats
from shoal.models.model import Model
from shoal.models.plan import FitInput, Learning
from shoal.optim import FTRL, Optimizer, Proximal
from shoal.store.base import Store
from shoal.table.arrays import Rows
from shoal.table.key_batch import KeyBatch
from shoal.table.table import Table


class LogisticRegression(Model):
    """Logistic regression whose weights are a table of a store.

    Parameters
    ----------
    optimizer : Optimizer
        The update rule of the weights; default: ``FTRL()``.
    store : Store, optional
        The store of the table. Without one the model makes a local store of its own and closes it in `close`.
    bias : bool
        Whether every example has a constant feature.
    table : str
        Name of the table in the store. Two models in one store need two names.
    seed : int
        Seed of the rounding of the table's accumulators, and of the shuffle and the sampling of `fit`.
    solver : {"online", "dbpg"} or DBPG
        "online": one optimizer step for each batch. "dbpg", or a `DBPG` with its settings: the weights that minimize
        the sum of all losses and an L1 penalty, by the delayed block proximal gradient method; ``optimizer`` must be
        omitted. `fit` then reads all examples once, holds them in memory, and continues from the current weights. It
        refuses ``epochs``, ``shuffle``, ``early_stopping``, ``callbacks`` and ``checkpoint``, does not warm up, and
        logs its progress instead of showing a bar; ``valid`` is measured at the end, and `solved` has the result.
    admit : Admission, optional
        Which keys get a row, such as ``shoal.AfterCount(2)``; default: all.
    expire : Expiry or several of them, optional
        Which rows are dropped at the end of a pass, such as ``shoal.TimeToLive(1000)``: a clock is a batch. Default:
        none.
    normalized : bool
        Divide each value by the root mean square of its feature, which the model learns together with its weights.
        Then the unit of a column, such as cents or dollars, makes no difference (docs/training.md).
    class_weight : dict or "balanced", optional
        How much an example of each class weighs, as in ``{0: 1.0, 1: 5.0}``; "balanced", for arrays and frames, gives
        all classes the same total weight. Multiplies other weights, also in the metrics of the pass.
    negative_rate : float
        Fraction of the negatives that `fit` learns from, above 0, at most 1; their weight is multiplied by 1 / rate.
    warm_up : bool
        Whether `fit` cuts batches into smaller ones, of 32 examples at first, until they are at most a tenth of all
        examples that the model has learned from.

    Raises
    ------
    ValueError
        The store has a table of that name with another description, or there is no such solver.

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
        *,
        store: Store | None = None,
        bias: bool = True,
        table: str = "lr",
        seed: int = 0,
        solver: str | DBPG = "online",
        admit: Admission | None = None,
        expire: Expiry | Iterable[Expiry] = (),
        normalized: bool = False,
        class_weight: Mapping[Any, float] | str | None = None,
        negative_rate: float = 1.0,
        warm_up: bool = True,
    ) -> None:
        learning = Learning(negative_rate=negative_rate, warm_up=warm_up, seed=seed, class_weight=class_weight)
        if solver not in ("online", "dbpg") and not isinstance(solver, DBPG):
            raise ValueError(f'solver is {solver!r}: pass "online", "dbpg" or shoal.models.DBPG(...)')
        self._solver = DBPG() if solver == "dbpg" else solver if isinstance(solver, DBPG) else None
        self._solved: SolverResult | None = None
        if self._solver is not None:
            if optimizer is not None:
                raise ValueError(f"solver {solver!r} has its own update rule: leave out optimizer={optimizer!r}")
            optimizer = Proximal(lr=self._solver.lr, l1=self._solver.l1)
        rules = (expire,) if isinstance(expire, Expiry) else tuple(expire)
        if self._solver is not None and (admit is not None or rules):
            raise ValueError(f"solver {solver!r} uses all examples at once and does not support admit and expire")
        if self._solver is not None and normalized:
            raise ValueError(f"solver {solver!r} bounds the step of each feature itself: leave out normalized")
        self._described = table, FTRL() if optimizer is None else optimizer, seed, admit, rules
        super().__init__(store, bias, normalized, learning)

    @property
    def solver(self) -> DBPG | None:
        """The settings of the solver; None: the model learns online."""
        return self._solver

    @property
    def solved(self) -> SolverResult | None:
        """The result of the solver's last `fit`; None for a model that learns online, and before the first fit."""
        return self._solved

    @property
    def can_normalize(self) -> bool:
        """Whether a model of this kind can be made that divides values by their scales."""
        return self._solver is None

    def _make_tables(self) -> Sequence[Table]:
        name, optimizer, seed, admit, expire = self._described
        dim = 1 if self._solver is None else 2  # a weight, and its gradient
        return [self._store.table(name, dim=dim, optimizer=optimizer, seed=seed, admit=admit, expire=expire)]

    def _fit(
        self, given: FitInput, *, progress: bool | float, checkpoint: Checkpointing | None, callbacks: OfCallbacks
    ) -> None:
        if self._solver is None:
            super()._fit(given, progress=progress, checkpoint=checkpoint, callbacks=callbacks)
            return
        if checkpoint is not None:
            raise ValueError('solver "dbpg" writes no checkpoints: leave out checkpoint')
        if Callbacks(self, callbacks):
            raise ValueError('solver "dbpg" learns from all batches at once: leave out callbacks')
        self._calibration = None
        plan = structs.replace(given.plan, warm_up=False)
        self._solved = dbpg.fit(self, self._solver, given._replace(plan=plan))

    @property
    def _passes_of_tables(self) -> int:
        return super()._passes_of_tables if self._solver is None else 1

    def learn(self, batch: Batch, keys: KeyBatch, seen: StreamMetrics | None) -> float:
        """Predict, count into ``seen``, push; see `Model.learn`."""
        if self._solver is not None:
            raise ValueError('solver "dbpg" learns from all examples at once: call fit, or make a model without it')
        return super().learn(batch, keys, seen)

    def _forward(self, batch: Batch, keys: KeyBatch, rows: Sequence[Rows]) -> tuple[Floats, Any]:
        weights = np.ascontiguousarray(rows[0][:, 0])
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
        spec = store.tables[described.table].spec
        optimizer = spec.optimizer
        more: dict[str, Any] = {"table": described.table, "seed": described.seed}
        if isinstance(optimizer, Proximal):
            return cls(store=store, bias=described.bias, solver=DBPG(lr=optimizer.lr, l1=optimizer.l1), **more)
        more |= {"admit": spec.admit, "expire": spec.expire, "normalized": described.normalized}
        return cls(optimizer, store=store, bias=described.bias, **more)
