"""Grid: one model for each of several settings, trained in one pass that parses and sorts every batch once.

    grid {"alpha": [0.05, 0.1], "l1": [0, 1]}      --> 4 models: alpha 0.05 l1 0, alpha 0.05 l1 1, ...
    batch --> KeyBatch, once --> each model's own table pulls, learns, pushes

Each model is bit-identical to one that is trained alone. Memory: one table for each model. Time of a pass: one parse,
one sort, and for each model a pull, a gradient and a push.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any, Generic, Self, TypeVar

import msgspec

from shoal.base.scalars import plain
from shoal.data import Batch
from shoal.metrics import GroupedAUC, Metrics
from shoal.models import fitting
from shoal.models.logistic import LogisticRegression
from shoal.models.plan import EarlyStopping, FitInput, Learning, Metric, Plan, gain_of
from shoal.models.predictor import Predictor
from shoal.optim import FTRL, Optimizer
from shoal.store.base import Store
from shoal.store.local import local

M = TypeVar("M", bound=Predictor)


class GridResult(msgspec.Struct, Generic[M], frozen=True, kw_only=True):
    """The result of one combination of settings.

    Attributes
    ----------
    settings : dict of str to value
        By name, in the order of the grid.
    model : LogisticRegression or ClickModel
        Open as long as the grid is.
    progressive : Metrics
        Of the first pass, each batch predicted before it was learned from.
    valid : Metrics or None
        Of the validation data after the pass whose weights the model has.
    grouped : GroupedAUC or None
        Of the same data, if they have groups.
    """

    settings: dict[str, Any]
    model: M
    progressive: Metrics
    valid: Metrics | None
    grouped: GroupedAUC | None = None

    @property
    def measured(self) -> Metrics:
        """The metrics by which settings are compared: ``valid`` if there are any, else ``progressive``."""
        return self.progressive if self.valid is None else self.valid


class Grid(Generic[M]):
    """Models of all combinations of some settings, trained in the same passes; a context manager."""

    def __init__(self, grid: Mapping[str, Sequence[Any]]) -> None:
        _check_values(grid)
        self._settings: list[dict[str, Any]] = [
            dict(zip(grid, map(plain, values), strict=True)) for values in itertools.product(*grid.values())
        ]
        self._models: list[M] = []
        self._stores = ExitStack()

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self._models)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the stores that the grid has made."""
        self._stores.close()

    @property
    def models(self) -> tuple[M, ...]:
        """The models, in the order of the grid: its last name changes fastest."""
        return tuple(self._models)

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The settings of each model, in the same order."""
        return [dict(settings) for settings in self._settings]

    @property
    def examples(self) -> int:
        """Greatest number of examples that a model has learned from; others may have stopped early."""
        return max(model.examples for model in self._models)

    def results(self, metric: Metric = "logloss") -> list[GridResult[M]]:
        """Return the results of the settings, the best first.

        Parameters
        ----------
        metric : {"logloss", "auc", "gauc"}
            Of the validation data if `fit` had some, else progressive; "gauc" of validation data with groups.

        Returns
        -------
        list of GridResult

        Raises
        ------
        ValueError
            The grid was not fitted yet, or nothing has a GAUC.
        """
        if metric not in ("logloss", "auc", "gauc"):
            raise ValueError(f"metric is {metric!r}: pass 'logloss', 'auc' or, with groups, 'gauc'")
        if any(not model.history.passes for model in self._models):
            raise ValueError("this grid is not fitted yet: call fit")
        results = [_result(given, model) for given, model in zip(self.settings, self._models, strict=True)]
        if metric == "gauc" and any(one.grouped is None for one in results):
            raise ValueError("metric is 'gauc', which is of validation data with groups: pass 'logloss' or 'auc'")

        def order(result: GridResult[M]) -> tuple[bool, float]:
            value = -gain_of(metric, result.measured, result.grouped)
            return math.isnan(value), value

        return sorted(results, key=order)  # stable: equal results stay in the order of the grid

    def best(self, metric: Metric = "logloss") -> M:
        """Return the model of the best settings."""
        return self.results(metric)[0].model


class LogisticRegressionGrid(Grid[LogisticRegression]):
    """Logistic regressions of all combinations of some settings of the optimizer, trained in the same passes.

    Parameters
    ----------
    grid : mapping of str to sequence of float
        Settings of the optimizer by name, and the values to try; every combination is a model.
    optimizer : Optimizer
        All other settings; default: ``FTRL()``.
    store : Store, optional
        The store of the tables "lr-0", "lr-1", ... Without one the grid makes its own and closes it in `close`.
    bias : bool
        Whether every example has a constant feature.
    seed : int
        Seed of all tables, and of the shuffle and the sampling of `fit`.
    normalized, negative_rate, warm_up
        Of all models, as for `LogisticRegression`.

    Raises
    ------
    ValueError
        The grid is empty, has a name that is not a setting of the optimizer, or a value twice or out of range.

    Notes
    -----
    Memory: as many tables as there are combinations.

    Examples
    --------
    >>> import numpy as np
    >>> from shoal import Batch
    >>> from shoal.models import LogisticRegressionGrid
    >>> batch = Batch(np.array([1, 0], np.float32), np.array([0, 1, 2]), np.array([7, 9], np.uint64), None)
    >>> with LogisticRegressionGrid({"alpha": [0.01, 0.5]}) as grid:
    ...     grid.fit([batch] * 10, progress=False).results()[0].settings
    {'alpha': 0.5}
    """

    def __init__(
        self,
        grid: Mapping[str, Sequence[float]],
        *,
        optimizer: Optimizer | None = None,
        store: Store | None = None,
        bias: bool = True,
        seed: int = 0,
        normalized: bool = False,
        negative_rate: float = 1.0,
        warm_up: bool = True,
    ) -> None:
        base = FTRL() if optimizer is None else optimizer
        _check_settings(grid, base)
        super().__init__(grid)
        optimizers = [replace(base, **settings) for settings in self._settings]
        self._learning = Learning(negative_rate=negative_rate, warm_up=warm_up, seed=seed)
        with ExitStack() as failed:
            failed.callback(self.close)
            shared = self._stores.enter_context(local()) if store is None else store
            self._models = [
                LogisticRegression(
                    one,
                    store=shared,
                    bias=bias,
                    table=f"lr-{number}",
                    seed=seed,
                    normalized=normalized,
                    negative_rate=negative_rate,
                    warm_up=warm_up,
                )
                for number, one in enumerate(optimizers)
            ]
            failed.pop_all()

    def fit(
        self,
        reader: Iterable[Batch],
        *,
        valid: Iterable[Batch] | None = None,
        epochs: int = 1,
        shuffle: bool | int = False,
        progress: bool | float = True,
        early_stopping: EarlyStopping | None = None,
    ) -> Self:
        """Learn from all batches of a reader, all models at once.

        Parameters are those of `LogisticRegression.fit`; each model stops early by itself.

        Returns
        -------
        LogisticRegressionGrid
            Itself.
        """
        first = self._models[0]
        plan = Plan.of(self._learning, epochs, shuffle, early_stopping)
        held_out = None if valid is None else first.reading(valid)
        fitting.fit(self._models, FitInput(first.reading(reader), held_out, plan), progress=progress)
        return self


def _result(settings: dict[str, Any], model: M) -> GridResult[M]:
    history = model.history
    kept = history.passes[-1] if history.best_pass is None else history.passes[history.best_pass - 1]
    progressive = history.passes[0].metrics
    return GridResult(settings=settings, model=model, progressive=progressive, valid=kept.valid, grouped=kept.grouped)


def _check_values(grid: Mapping[str, Sequence[Any]]) -> None:
    """Raise ValueError if a grid is empty, or has no value for a setting, or one twice."""
    if not grid:
        raise ValueError('the grid is empty: pass settings and the values to try, such as {"alpha": [0.05, 0.1]}')
    for name, values in grid.items():
        if len(values) == 0:
            raise ValueError(f"the grid has no value for {name!r}: pass one or more")
        if any(value in values[:i] for i, value in enumerate(values)):
            raise ValueError(f"the grid has a value for {name!r} twice: {', '.join(map(str, values))}")


def _check_settings(grid: Mapping[str, Sequence[float]], optimizer: Optimizer) -> None:
    known = [field.name for field in fields(optimizer)]
    for name in grid:
        if name not in known:
            raise ValueError(f"{type(optimizer).__name__} has no setting {name!r}: choose from {', '.join(known)}")
