"""Metrics by segment: of the examples that have the same text in a column.

    a pass over the columns --> Segmentation: the text of each example --+--> by_segment: metrics of each text
    a pass of the model     --> Predictions                            --+

Threads: no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.data import Batch, FeatureNames, Reader, hash_strings
from shoal.data.readers import field_number
from shoal.metrics import Metrics, measure
from shoal.models.measured import Predictions

SEGMENTS = 20  # to measure; the others together


class Segmentation(NamedTuple):
    """The text of each example in a column: None where there is none, or where it is not known."""

    texts: Sequence[str | None]
    number: npt.NDArray[np.int64]  # of each example's text


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of the examples of one text; of ``others`` texts together, if that is not 0."""

    text: str | None
    others: int = 0
    metrics: Metrics


def read_segments(reader: Reader, columns: Sequence[str]) -> dict[str, Segmentation]:
    """Read the texts of columns, in a pass over examples.

    Raises
    ------
    ValueError
        A column is not there, or an example has several features of it.
    """
    names = FeatureNames()
    numbers = {column: field_number(reader.format, column) for column in columns}
    keys: dict[str, list[npt.NDArray[np.uint64]]] = {column: [] for column in columns}
    for batch in reader.with_names(names).unlabelled().with_fields():
        for column, found in keys.items():
            found.append(_keys_in(batch, numbers[column], column))
    segmentations = {}
    for column, found in keys.items():
        unique, number = np.unique(np.concatenate([np.empty(0, np.uint64), *found]), return_inverse=True)
        missing = int(_missing(numbers[column]))
        texts = [None if key == missing else _text(names.get(key), key, column) for key in unique.tolist()]
        segmentations[column] = Segmentation(texts, number)
    return segmentations


def _text(name: str | None, key: int, column: str) -> str:
    """Return the text in the name of a feature; without a name the key."""
    if name is None:
        return str(key)
    return name.removeprefix(f"{column}=").removeprefix(f"{column}^")


def _missing(number: int) -> np.uint64:
    return np.uint64(hash_strings([""], number)[0])


def _keys_in(batch: Batch, number: int, column: str) -> npt.NDArray[np.uint64]:
    """Return the key of each example in a field; examples without one share a key."""
    assert batch.fields is not None
    mine = np.flatnonzero(batch.fields == np.uint64(number))
    example = np.repeat(np.arange(len(batch)), np.diff(batch.indptr))[mine]
    if len(np.unique(example)) < len(example):
        raise ValueError(f"an example has several features of {column!r}, and is in one group or segment")
    found = np.full(len(batch), _missing(number))
    found[example] = batch.keys[mine]
    return found


def by_segment(by: Segmentation, found: Predictions, most: int = SEGMENTS) -> list[Segment]:
    """Measure the ``most`` segments of the most examples, exactly, and all others together."""
    if len(by.number) != len(found.labels):
        raise ValueError(f"{len(by.number):,} examples have a segment, and {len(found.labels):,} a prediction")
    counts = np.bincount(by.number, minlength=len(by.texts))
    largest = np.argsort(-counts, kind="stable")
    rank = np.empty(len(largest), np.int64)
    rank[largest] = np.arange(len(largest))
    place = np.minimum(rank[by.number], most)
    order = np.argsort(place, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(place, minlength=most + 1))[:-1])
    segments = []
    for i, at in enumerate(parts):
        if len(at):
            weights = None if found.weights is None else found.weights[at]
            metrics = measure(found.labels[at], found.margins[0][at], weights)
            others = len(largest) - most if i == most else 0
            segments.append(Segment(text=None if others else by.texts[largest[i]], others=others, metrics=metrics))
    return segments


def title(segment: Segment) -> str:
    """Return what a table calls a segment."""
    if segment.others:
        return f"{segment.others:,} others"
    return "(none)" if segment.text is None else segment.text
