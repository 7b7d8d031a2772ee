"""Factorization machine of second order: logistic regression in which every pair of features interacts.

A margin is a = b + sum of w_k x_k + sum over pairs of features of <v_k, v_l> x_k x_l: a key has a weight w_k and a
vector v_k of a few factors. A pair of keys that never occurred together also has an interaction, learned from other
pairs of the two keys (Rendle, Factorization Machines, ICDM 2010).

    table NAME           dim 1     w_k, the bias among them
    table NAME-factors   dim d     v_k, starting at small random numbers

Both tables are pulled and pushed by one sort of the batch's keys. So the bias's key has a row of factors too, which
keeps its initial values: the bias does not interact.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

from shoal import _core
from shoal.base.dtypes import Dtype
from shoal.data import Batch
from shoal.lifecycle import Admission, Expiry
from shoal.models import files
from shoal.models.learner import Floats
from shoal.models.model import Model
from shoal.models.plan import Learning
from shoal.optim import FTRL, Adagrad, Init, Normal, Optimizer, Zeros
from shoal.store.base import Store
from shoal.table.arrays import Rows
from shoal.table.key_batch import KeyBatch
from shoal.table.table import Table

_MORE = "-factors"  # suffix to the name of the linear weights' table


class FactorizationMachine(Model):
    """Factorization machine whose weights and factors are two tables of a store.

    Parameters
    ----------
    dim : int
        Factors of a key, 1 to 4096; 4 to 16 are customary.
    optimizer : Optimizer
        The update rule of the linear weights; default: ``FTRL()``.
    factors : Optimizer
        The update rule of the factors; default: ``Adagrad(lr=0.02, n0=1.0)``.
    init : Init
        Initial values of the factors; default: ``Normal(0.01)``. Factors that start at 0 would stay there.
    store : Store, optional
        The store of the tables. Without one the model makes a local store of its own and closes it in `close`.
    bias : bool
        Whether every example has a constant feature, which has a weight and no factors.
    table : str
        Name of the table of linear weights; the table of the factors has that name with the suffix "-factors". Two
        models in one store need different names.
    dtype : {"float32", "float16", "bfloat16"}
        How factors are stored; 16-bit types need dim 2 or more.
    seed : int
        Seed of the rounding of accumulators and of 16-bit factors, and of the shuffle and the sampling of `fit`.
    admit : Admission, optional
        Which keys get rows, such as ``shoal.AfterCount(2)``; default: all.
    expire : Expiry or several of them, optional
        Which rows are dropped at the end of a pass, such as ``shoal.TimeToLive(1000)``: a clock is a batch. Default:
        none.
    normalized : bool
        Divide each value by the root mean square of its feature, which the model learns together with its weights.
        Then the unit of a column, such as cents or dollars, makes no difference (docs/training.md).
    class_weight, negative_rate, warm_up
        As for `LogisticRegression`.

    Raises
    ------
    ValueError
        The factors start at 0, or the store has a table of one of those names with another description.

    Notes
    -----
    Each occurrence of a key is a feature: a key that an example has twice interacts with itself. A gradient is a sum
    over the batch, as in `LogisticRegression`. ``weight_decay`` of the factors' optimizer shrinks them towards 0.

    Examples
    --------
    >>> import numpy as np
    >>> from shoal import Adagrad, Batch, FactorizationMachine
    >>> pairs = np.array([0, 2, 0, 3, 1, 2, 1, 3], np.uint64)  # label 1 where the two have the same parity
    >>> batch = Batch(np.array([1, 0, 0, 1], np.float32), np.arange(0, 9, 2), pairs, None)
    >>> with FactorizationMachine(dim=4, factors=Adagrad(lr=0.2)) as model:
    ...     _ = model.fit([batch], epochs=100, progress=False)
    ...     model.probabilities(batch).round().tolist()
    [1.0, 0.0, 0.0, 1.0]
    """

    kind: ClassVar[str] = files.FACTORIZATION

    def __init__(
        self,
        dim: int = 8,
        *,
        optimizer: Optimizer | None = None,
        factors: Optimizer | None = None,
        init: Init | None = None,
        store: Store | None = None,
        bias: bool = True,
        table: str = "fm",
        dtype: Dtype = "float32",
        seed: int = 0,
        admit: Admission | None = None,
        expire: Expiry | Iterable[Expiry] = (),
        normalized: bool = False,
        class_weight: Mapping[Any, float] | str | None = None,
        negative_rate: float = 1.0,
        warm_up: bool = True,
    ) -> None:
        if isinstance(init, Zeros):
            raise ValueError("the factors start at 0, where they have no gradient: pass init=shoal.Normal(0.01)")
        self._described = (
            table,
            dim,
            FTRL() if optimizer is None else optimizer,
            Adagrad(lr=0.02, n0=1.0) if factors is None else factors,
            Normal(0.01) if init is None else init,
            dtype,
            seed,
        )
        self._rules = admit, (expire,) if isinstance(expire, Expiry) else tuple(expire)
        learning = Learning(negative_rate=negative_rate, warm_up=warm_up, seed=seed, class_weight=class_weight)
        super().__init__(store, bias, normalized, learning)

    def _make_tables(self) -> Sequence[Table]:
        name, dim, optimizer, factors, init, dtype, seed = self._described
        admit, expire = self._rules
        make = functools.partial(self._store.table, seed=seed, admit=admit, expire=expire)
        return [
            make(name, dim=1, optimizer=optimizer),
            make(name + _MORE, dim=dim, optimizer=factors, init=init, dtype=dtype),
        ]

    @property
    def factors(self) -> Table:
        """The table of the factors: one row per key, of the model's dim."""
        return self.tables[1]

    @property
    def dim(self) -> int:
        """Factors of a key."""
        return self.factors.dim

    def _forward(self, batch: Batch, keys: KeyBatch, rows: Sequence[Rows]) -> tuple[Floats, Any]:
        weights, factors = rows
        return _core.fm_margins(
            batch.indptr,
            batch.values,
            keys.native,
            self.has_bias,
            weights.reshape(-1),
            factors,
            self.store.workers,
        )

    def _backward(
        self, batch: Batch, keys: KeyBatch, rows: Sequence[Rows], slopes: Floats, known: Any
    ) -> Sequence[Rows]:
        examples = batch.indptr, batch.values, keys.native, self.has_bias
        workers = self.store.workers
        return [
            _core.logistic_gradient(*examples, slopes, workers),
            _core.fm_gradient(*examples, rows[1], known, slopes, workers),
        ]

    @classmethod
    def _from_file(cls, described: files.ModelFile, store: Store) -> Self:
        weights, factors = (store.tables[name] for name in (described.table, described.table + _MORE))
        return cls(
            factors.dim,
            optimizer=weights.optimizer,
            factors=factors.optimizer,
            init=factors.init,
            store=store,
            bias=described.bias,
            table=weights.name,
            dtype=factors.spec.dtype,
            seed=weights.seed,
            admit=weights.spec.admit,
            expire=weights.spec.expire,
            normalized=described.normalized,
        )
