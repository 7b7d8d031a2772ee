"""ClickPredictor: what a click model computes for batches, of one task or several; click_model.py has its learning.

Threads: as torch's modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from shoal.base.scalars import whole
from shoal.data import Batch, Reader
from shoal.metrics import Metrics
from shoal.models.features import Features
from shoal.models.inputs import prediction_data
from shoal.models.learner import Floats
from shoal.models.plan import Learning
from shoal.models.saved_predictor import SavedPredictor
from shoal.store.base import Store
from shoal.torch import task_metrics
from shoal.torch.inputs import Inputs, inputs
from shoal.torch.model import LABEL, Model, by_task, counted_in
from shoal.torch.task_metrics import RegressionMetrics


class ClickPredictor(SavedPredictor):
    """The predictions of a module over tables of a store, and their metrics."""

    def __init__(self, module: nn.Module, features: Features | int | None, store: Store, learning: Learning) -> None:
        super().__init__(store, learning, is_own=False)
        self.module = module
        self.features = _features_of(module, features)

    def refresh(self) -> None:
        """Make the module's parameters the newest ones."""

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        """Give the module the averages of its parameters within the block, if it has any."""
        return contextlib.nullcontext()

    def prepare(self, batch: Batch) -> Inputs:
        """Return a batch as `Inputs` of the module."""
        return self.module.inputs(batch) if isinstance(self.module, Model) else inputs(batch, self.features)

    @property
    def _described(self) -> Features | None:
        return self.features if isinstance(self.features, Features) else None

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks, the first one that of the batch's label; empty: there is one, without a name."""
        return () if self._described is None else self._described.tasks

    @property
    def has_own_metrics(self) -> bool:
        """Whether `evaluate_tasks` has metrics of the module's own (`Model.metrics`)."""
        return isinstance(self.module, Model) and type(self.module).metrics is not Model.metrics

    def _labels_of(self, batch: Batch, prepared: Inputs) -> dict[str, torch.Tensor]:
        """Return the labels by task, NaN where an example has none."""
        first, *_ = self.tasks or (LABEL,)
        return {first: torch.from_numpy(batch.labels), **prepared.labels}

    def _outputs(self, prepared: Inputs) -> dict[str, Floats]:
        """Compute what the module returns, by task."""
        self.module.eval()
        with torch.no_grad(), self._averaged():
            outputs = by_task(self.module(prepared), self._described)
        return {name: one.double().numpy() for name, one in outputs.items()}

    def predict_tasks(self, data: Any) -> dict[str, Floats]:
        """Compute what every task predicts of each example.

        Parameters
        ----------
        data : Batch, Reader, iterable of Batch, array, sparse matrix or frame

        Returns
        -------
        dict of float64[n]
            By task, also those of the module's outputs that have no label: probabilities of label 1, or the mean of a
            task whose loss is mse or poisson. `calibrate` does not change them.

        Raises
        ------
        ValueError
            The model has not learned from anything yet, or learned from data with other features.
        """
        found: dict[str, list[Floats]] = {}
        labels = {} if self._described is None else self._described.labels
        for _, prepared in self._batches_of(data, labelled=False):
            for name, outputs in self._outputs(prepared).items():
                found.setdefault(name, []).append(task_metrics.predicted(labels.get(name), outputs))
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def evaluate_tasks(self, data: Any) -> dict[str, Metrics | RegressionMetrics | float]:
        """Measure every task that has a label; nothing is learned.

        Parameters
        ----------
        data : Batch, Reader, iterable of Batch, array, sparse matrix or frame

        Returns
        -------
        dict of Metrics, RegressionMetrics or float
            By task: of the examples that count for it (`shoal.config.Task`), exact and by weight; and the numbers of
            `Model.metrics` by their names.

        Raises
        ------
        ValueError
            The model has not learned from anything yet, or learned from data with other features.
        """
        parts: dict[str, list[Any]] = {name: [] for name in self.tasks or (LABEL,)}
        whole: list[tuple[Any, Any, Any]] = []
        for batch, prepared in self._batches_of(data, labelled=True):
            outputs, labels = self._outputs(prepared), self._labels_of(batch, prepared)
            if self.has_own_metrics:
                whole.append((outputs, {name: one.numpy() for name, one in labels.items()}, batch.weights))
            for name in parts.keys() & outputs.keys():
                counted = counted_in(self._described, name, labels)
                at = slice(None) if counted is None else counted.numpy()
                weights = None if batch.weights is None else batch.weights[at]
                parts[name].append((outputs[name][at], labels[name].numpy()[at], weights))
        labels_of = {} if self._described is None else self._described.labels
        found: dict[str, Metrics | RegressionMetrics | float] = {
            name: task_metrics.measured(labels_of.get(name), some) for name, some in parts.items() if some
        }
        return {**found, **self._own_metrics(whole)}

    def _own_metrics(self, whole: list[tuple[Any, Any, Any]]) -> dict[str, float]:
        """Compute the metrics of the module's own, of batches of outputs, labels and weights."""
        if not whole:
            return {}
        outputs = {name: np.concatenate([its[name] for its, _, _ in whole]) for name in whole[0][0]}
        labels = {name: np.concatenate([its[name] for _, its, _ in whole]) for name in whole[0][1]}
        weights = None
        if any(its is not None for _, _, its in whole):
            some = [np.ones(len(next(iter(one.values()))), np.float32) if its is None else its for _, one, its in whole]
            weights = np.concatenate(some)
        module: Any = self.module
        return {name: float(number) for name, number in module.metrics(outputs, labels, weights).items()}

    def _batches_of(self, data: Any, *, labelled: bool) -> Iterator[tuple[Batch, Inputs]]:
        self.check_fitted()
        self.refresh()
        found = prediction_data(self._record, data, labelled=labelled, classes=2)
        found = self.reading(found.unlabelled() if isinstance(found, Reader) and not labelled else found)
        self.check_format(found)
        for batch in [found] if isinstance(found, Batch) else found:
            yield batch, self.prepare(batch)

    def _margins(self, batch: Batch, prepared: Inputs) -> Floats:
        return next(iter(self._outputs(prepared).values()))

    def groups(self, batch: Batch) -> npt.NDArray[np.uint64] | None:
        """Return the group of each example, if the fields name one."""
        return self.features.groups(batch) if isinstance(self.features, Features) and self.is_grouped else None

    @property
    def is_grouped(self) -> bool:
        """Whether the features name the group of an example."""
        return self._described is not None and self._described.group is not None

    def has_groups(self, groups: npt.NDArray[np.uint64]) -> bool:
        """Whether any of the examples has a group; ``groups`` as from `groups`."""
        return isinstance(self.features, int) or self.features.has_groups(groups)

    def check_groups(self, groups: npt.NDArray[np.uint64]) -> None:
        """Raise ValueError if none of the examples has a group; ``groups`` as from `groups`."""
        if isinstance(self.features, Features) and not self.features.has_groups(groups):
            raise ValueError(
                f"group is {self.features.group!r}, and no example has a feature of that field: name a field that the "
                f"data has"
            )

    def check_fitted(self) -> None:
        """Raise ValueError if the model has not learned from any data."""
        if self.examples == 0:
            raise ValueError("this model is not trained yet: call fit, or load one")

    def reading(self, data: Any) -> Any:
        """Return a reader whose batches have fields, if the module takes them by fields.

        Raises
        ------
        ValueError
            The reader has no such column, or no fields.
        """
        data = super().reading(data)
        if not (isinstance(data, Reader) and isinstance(self.features, Features)):
            return data
        self.features.check_columns(data.schema)
        return data.with_fields()


def _features_of(module: nn.Module, features: Features | int | None) -> Features | int:
    """Return the features that are given, or those of the module."""
    if isinstance(module, Model) and features is not None:
        raise TypeError(f"{type(module).__name__} has its features: leave features= out, and pass them to it")
    if features is not None:
        return features if isinstance(features, Features) else whole("features", features, 1)
    if not isinstance(module, Model):
        raise TypeError(f"{type(module).__name__} is no shoal.torch.Model, which has its features: pass features=")
    return len(module.features) if module.is_numbered else module.features
