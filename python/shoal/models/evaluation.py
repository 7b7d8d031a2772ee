"""Evaluation: one pass over data, which predicts with one or several models that share a store.

    batches --> prepared once --> each model's margins, labels, weights, groups --> metrics and curves of each model

Threads: the caller's; batches are prepared ahead by a second thread (preprocessing.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.data import Batch, Reader
from shoal.data.rebatch import joined_or_none
from shoal.metrics import Curves, GroupedAUC, Metrics, gauc, measure_with_curves
from shoal.models import preprocessing
from shoal.models.learner import Evaluable, Floats
from shoal.models.sources import check_iterable, why_empty

__all__ = ["Evaluation", "Predictions", "check_data", "evaluate", "measure", "predictions"]


class Evaluation(NamedTuple):
    """The metrics of a learner's predictions; ``grouped`` is None without groups."""

    metrics: Metrics
    curves: Curves
    grouped: GroupedAUC | None


class Predictions(NamedTuple):
    """Labels, weights (None: each is 1) and groups (None: there are none) of examples; margins of each learner."""

    labels: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32] | None
    groups: npt.NDArray[np.uint64] | None
    margins: list[Floats]


def measure(models: Sequence[Evaluable], data: Batch | Iterable[Batch]) -> list[Evaluation]:
    """Measure models, which share a store and their prepared batches, in one pass over the data."""
    check_data(models, data)
    batches = [data] if isinstance(data, Batch) else data
    return evaluate(models, predictions(models, batches), data)


def check_data(models: Sequence[Evaluable], data: Batch | Iterable[Batch]) -> None:
    """Check that the models can be measured on the data."""
    check_iterable([data] if isinstance(data, Batch) else data, "data", passes=1)
    for model in models:
        model.check_fitted()
        model.check_format(data)


def evaluate(models: Sequence[Evaluable], found: Predictions, data: Batch | Iterable[Batch]) -> list[Evaluation]:
    """Return the metrics of each model's predictions; ``data`` is described in errors."""
    if len(found.labels) == 0:
        raise ValueError(f"{why_empty(data)}: nothing was measured")
    if isinstance(data, Reader) and not np.any(found.labels):
        data.check_positive(alone=True)
    if found.groups is not None:
        models[0].check_groups(found.groups)
    return [
        Evaluation(
            *measure_with_curves(found.labels, margins, found.weights),
            None if found.groups is None else gauc(found.labels, margins, found.groups, found.weights),
        )
        for margins in found.margins
    ]


def predictions(models: Sequence[Evaluable], batches: Iterable[Batch]) -> Predictions:
    """Return labels, weights, groups and each model's margins of all examples."""
    first = models[0]
    labels: list[npt.NDArray[np.float32]] = []
    weights: list[npt.NDArray[np.float32] | None] = []
    groups: list[npt.NDArray[np.uint64]] = []
    margins: list[list[Floats]] = [[] for _ in models]
    with closing(first.prepared(preprocessing.examples_of(batches))) as ready:
        for batch, prepared in ready:
            labels.append(batch.labels)
            weights.append(batch.weights)
            if (some_groups := first.groups(batch)) is not None:
                groups.append(some_groups)
            for model, found in zip(models, margins, strict=True):
                found.append(model.margins(batch, prepared))
    empty = np.empty(0)
    return Predictions(
        np.concatenate([np.empty(0, np.float32), *labels]),
        joined_or_none(weights, [len(some) for some in labels]),
        np.concatenate(groups) if groups else None,
        [np.concatenate([empty, *found]) for found in margins],
    )
