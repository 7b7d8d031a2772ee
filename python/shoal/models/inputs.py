"""Inputs: the data of a fit or a prediction, as batches.

    Reader, Batch, iterable of Batch    stays as it is
    array, sparse matrix, frame         data/arrays.py; a frame by the columns that the model has learned from

Threads: no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.base.defaults import BATCH_SIZE
from shoal.base.scalars import plain
from shoal.data import read_arrow
from shoal.data.arrays import (
    Classes,
    FrameReader,
    MatrixReader,
    class_labels,
    column_of_frame,
    float_columns,
    is_array,
    is_frame,
    sample_weights,
)
from shoal.data.arrow import table_of
from shoal.data.columns import missing_texts
from shoal.models.history import Record

# Passes over an array or a frame by default. Such data is small: one pass has too few steps.
EPOCHS_OF_ARRAYS = 10

_OF_ARROW = ("label", "categorical", "numeric", "weight", "positive", "lists", "vectors", "labels", "interactions")
_FEATURES = ("categorical", "numeric", "lists", "vectors", "interactions")


class TrainingData(NamedTuple):
    """The data to learn from; ``classes``, ``columns`` and ``labels`` are None for a reader or batches."""

    data: Any
    classes: Classes | None
    columns: int | None
    labels: npt.NDArray[np.float32] | None

    @property
    def is_table(self) -> bool:
        """Whether it was an array or a frame, held in memory."""
        return self.labels is not None


def check_data(data: object) -> None:
    """Raise TypeError, with the remedy, for data of other libraries that has to be converted first."""
    name = type(data).__name__
    if hasattr(data, "detach") and hasattr(data, "numpy"):
        raise TypeError(f"the data is a {name}: pass an array, as {name}.numpy(force=True) makes it")
    if hasattr(data, "collect") and hasattr(data, "collect_schema"):
        raise TypeError(f"the data is a {name}, whose rows are not computed yet: pass {name}.collect()")


def is_table(data: object) -> bool:
    """Return whether this is an ``X`` of scikit-learn: an array, a sparse matrix or a frame."""
    return is_frame(data) or is_array(data)


def training_data(
    record: Record,
    data: Any,
    y: Any,
    *,
    sample_weight: Any,
    batch_size: int | None,
    classes: int = 2,
) -> TrainingData:
    """Return batches to learn from; see `shoal.models.Model.fit`."""
    check_data(data)
    if not is_table(data):
        given = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} is for arrays and frames: a reader, or a batch, has its own; leave it out")
        return TrainingData(data, None, None, None)
    size = BATCH_SIZE if batch_size is None else batch_size
    weights = None if sample_weight is None else sample_weights(sample_weight)
    if not is_frame(data):
        if y is None:
            raise ValueError("an array has no labels: pass them too, as in fit(X, y)")
        labels, known = class_labels(y, record.classes, classes)
        rows = MatrixReader(data, labels, weights, size)
        _check_columns(record, rows.columns)
        return TrainingData(rows, known, rows.columns, labels)
    if y is None or isinstance(y, str):
        raise ValueError(
            'a frame needs labels: pass them, as in fit(X, y), or fit(shoal.read_arrow(frame, label="click")) if they '
            "are a column of it"
        )
    schema: dict[str, Any] = {}
    if record.format is not None:
        schema |= {name: record.schema[name] for name in _FEATURES if name in record.schema}
    elif numeric := float_columns(data, []):
        schema["numeric"] = numeric
    labels, known = class_labels(y, record.classes, classes)
    missing = missing_texts(record.format, record.schema)
    return TrainingData(FrameReader(data, labels, weights, schema, size, missing).with_columns(), known, None, labels)


def prediction_data(
    record: Record, data: Any, y: Any = None, sample_weight: Any = None, *, labelled: bool, classes: int = 2
) -> Any:
    """Return batches to predict, or to measure if ``labelled``; labels are of ``classes`` classes."""
    check_data(data)
    if not is_table(data):
        for name, value in (("y", y), ("sample_weight", sample_weight)):
            if value is not None:
                raise ValueError(f"{name} is for arrays and frames: a reader, or a batch, has its own; leave it out")
        return data
    weights = None if sample_weight is None else sample_weights(sample_weight)
    if not is_frame(data):
        if labelled and y is None:
            raise ValueError("an array has no labels: pass them too, as in evaluate(X, y)")
        if record.format not in (None, MatrixReader.format):
            raise ValueError(
                f"this model learned from {record.format} data, whose columns have names: pass a frame or a reader"
            )
        labels = None if y is None else class_labels(y, record.classes, classes)[0]
        rows = MatrixReader(data, labels, weights)
        _check_columns(record, rows.columns)
        return rows
    if record.format not in (None, "csv", "parquet", "arrow"):
        raise ValueError(
            f"this model learned from {record.format} data, whose features have no names: pass an array, as "
            f"frame.to_numpy() makes it, or a reader"
        )
    schema = record.schema
    missing = missing_texts(record.format, schema)
    if y is None and labelled:
        label = schema.get("label")
        if label is None:
            raise ValueError("the model was fitted on a frame with separate labels: pass them too, as y")
        if record.classes is None and sample_weight is None:
            options = {name: schema[name] for name in _OF_ARROW if name in schema}
            return read_arrow(table_of(data), **options, na_values=missing)
        y = column_of_frame(data, label)
    labels = None if y is None else class_labels(y, record.classes, classes)[0]
    return FrameReader(data, labels, weights, schema, na_values=missing)


def _check_columns(record: Record, columns: int) -> None:
    if record.columns is not None and record.columns != columns:
        raise ValueError(f"X has {columns:,} columns, and this model learned from {record.columns:,}: pass the same")


def class_weights(
    asked: Mapping[Any, float] | str | None,
    known: Classes | None,
    labels: npt.NDArray[np.float32] | None,
    classes: int = 2,
) -> tuple[float, ...] | None:
    """Return the weight of an example of each class; None: all 1."""
    if asked is None:
        return None
    known = tuple(range(classes)) if known is None else known
    example = f"{{{known[0]!r}: 1.0, {known[1]!r}: 5.0}}"
    if isinstance(asked, str):
        if asked != "balanced":
            raise ValueError(f"class_weight is {asked!r}: pass 'balanced' or a dict, such as {example}")
        if labels is None:
            raise ValueError(
                "class_weight='balanced' counts the labels before the first batch, which takes an array or a frame: "
                f"pass a dict for a reader, such as {example}"
            )
        counts = np.bincount(labels.astype(np.intp), minlength=classes)
        if not counts.all():
            which = "there is only one" if classes == 2 else f"there is none of {known[int(counts.argmin())]!r}"
            raise ValueError(f"class_weight='balanced' needs examples of {_all_of(classes)} classes: {which}")
        return tuple(len(labels) / (classes * count) for count in counts.tolist())
    if not isinstance(asked, Mapping):
        raise TypeError(f"class_weight is {asked!r}: pass 'balanced' or a dict, such as {example}")
    for label, weight in ((label, plain(weight)) for label, weight in asked.items()):
        if label not in known:
            which = " and ".join(map(repr, known)) if classes == 2 else f"{known[0]!r}, ..., {known[-1]!r}"
            raise ValueError(f"class_weight names the class {label!r}: the classes are {which}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < np.inf:
            raise ValueError(f"class_weight of {label!r} is {weight!r}: pass a finite number, 0 or more")
    return tuple(float(asked.get(label, 1.0)) for label in known)


def _all_of(classes: int) -> str:
    return "both" if classes == 2 else f"all {classes:,}"
