"""Evaluation: one pass over data, which predicts with one or several models that share a store.

    batches --> prepared once --> each model's margins --> MeasuredExamples --> metrics and curves of each model

Threads: the caller's; batches are prepared ahead by a second thread (preprocessing.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from typing import TypeVar

from shoal.data import Batch, Reader
from shoal.models import preprocessing
from shoal.models.learner import Evaluable, Prepared
from shoal.models.measured import Evaluation, Margins, MeasuredExamples, Predictions
from shoal.models.sources import check_iterable, why_empty

Examples = TypeVar("Examples", bound=MeasuredExamples)
_Ready = tuple[Batch, Prepared]


def measure(models: Sequence[Evaluable], data: Batch | Iterable[Batch]) -> list[Evaluation]:
    """Measure models, which share a store and their prepared batches, in one pass over the data."""
    check_data(models, data)
    batches = [data] if isinstance(data, Batch) else data
    return evaluate(predicted(models, batches, models[0].examples_to_measure(len(models))), data)


def measure_with_predictions(model: Evaluable, data: Batch | Iterable[Batch]) -> tuple[Evaluation, Predictions]:
    """Measure a model of two classes; return its predictions too."""
    check_data([model], data)
    found = predicted([model], [data] if isinstance(data, Batch) else data, Margins(1, model.check_groups))
    return evaluate(found, data)[0], found.joined()


def check_data(models: Sequence[Evaluable], data: Batch | Iterable[Batch]) -> None:
    """Check that the models can be measured on the data."""
    check_iterable([data] if isinstance(data, Batch) else data, "data", passes=1)
    for model in models:
        model.check_fitted()
        model.check_format(data)


def evaluate(found: MeasuredExamples, data: Batch | Iterable[Batch]) -> list[Evaluation]:
    """Return the metrics of each model's predictions; ``data`` is described in errors."""
    if found.examples == 0:
        raise ValueError(f"{why_empty(data)}: nothing was measured")
    if isinstance(data, Reader) and found.lacks_positives:
        data.check_positive(alone=True)
    return found.evaluations()


def predicted(models: Sequence[Evaluable], batches: Iterable[Batch], found: Examples) -> Examples:
    """Predict all examples with each model, and add them to ``found``, which is returned."""
    first = models[0]
    for model in models:
        model.refresh()
    batches = preprocessing.examples_of(batches)
    with closing(begun_early(first.prepared(batches), models, learns=False)) as ready:
        for batch, prepared in ready:
            found.add(batch, first.groups(batch), [model.margins(batch, prepared) for model in models])
    return found


def begun_early(ready: Generator[_Ready], models: Sequence[Evaluable], *, learns: bool) -> Generator[_Ready]:
    """Begin what a batch waits for before the one ahead of it is used, where it may; each learned from is a clock."""
    waiting: deque[_Ready] = deque()
    used: list[_Ready] = []  # the last one
    failed: Exception | None = None
    with closing(ready):
        try:
            while True:
                try:
                    one = next(ready)
                except StopIteration:
                    break
                except Exception as error:  # of the data: after the batches before it
                    failed = error
                    break
                is_early = all(model.may_begin(one[0], learns=learns) for model in models)
                if is_early:
                    for model in models:
                        model.begin(one[1], len(waiting) if learns else 0)
                waiting.append(one)
                while len(waiting) > is_early:
                    used = [waiting.popleft()]
                    yield used[0]
            while waiting:
                used = [waiting.popleft()]
                yield used[0]
            if failed is not None:
                raise failed
        finally:
            for _, prepared in [*used, *waiting]:
                for model in models:
                    model.forget(prepared)


def predictions(models: Sequence[Evaluable], batches: Iterable[Batch]) -> Predictions:
    """Return labels, weights, groups and each model's margins of all examples."""
    return predicted(models, batches, Margins(len(models), models[0].check_groups)).joined()
