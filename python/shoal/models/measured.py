"""What the metrics of models need of the examples that they have predicted.

    Margins          of two classes: the margins, labels, weights and groups of all examples, for exact metrics
    ClassMetrics     of several classes: exact sums, in constant memory

The examples of several workers are merged from their bytes.

Threads: those of the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.base.decoders import msgpack_decoder
from shoal.data import Batch
from shoal.data.rebatch import joined_or_none
from shoal.metrics import Curves, GroupedAUC, Metrics, MulticlassAccumulator, gauc, measure_with_curves
from shoal.metrics.checked import Floats


class Evaluation(NamedTuple):
    """The metrics of a learner's predictions; ``grouped`` is None without groups, ``curves`` of several classes."""

    metrics: Metrics
    curves: Curves | None
    grouped: GroupedAUC | None


class Predictions(NamedTuple):
    """Labels, weights (None: each is 1) and groups (None: there are none) of examples; margins of each learner."""

    labels: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32] | None
    groups: npt.NDArray[np.uint64] | None
    margins: list[Floats]


class MeasuredExamples(ABC):
    """What the metrics of one or several models need of the examples that they have predicted."""

    @abstractmethod
    def add(self, batch: Batch, groups: npt.NDArray[np.uint64] | None, margins: Sequence[Floats]) -> None:
        """Add a batch, its groups, and the margins of each model."""

    @abstractmethod
    def encode(self) -> bytes:
        """Return all of it as bytes."""

    @abstractmethod
    def merge(self, encoded: Sequence[bytes]) -> None:
        """Add the examples of others."""

    @abstractmethod
    def evaluations(self) -> list[Evaluation]:
        """Return the metrics of each model's predictions."""

    @property
    @abstractmethod
    def examples(self) -> int:
        """Number of examples."""

    @property
    @abstractmethod
    def lacks_positives(self) -> bool:
        """Whether no label of two classes is 1."""


class _Part(msgspec.Struct, frozen=True):
    """The predictions of one worker, as the bytes of arrays."""

    labels: bytes
    weights: bytes | None
    groups: bytes | None
    margins: list[bytes]


_part = msgpack_decoder(_Part)
_described = msgpack_decoder(list[dict[str, Any]])


class Margins(MeasuredExamples):
    """All margins of ``models`` models of two classes; ``check_groups`` raises an error if no example has a group."""

    def __init__(self, models: int, check_groups: Callable[[npt.NDArray[np.uint64]], None]) -> None:
        self._check_groups = check_groups
        self._labels: list[npt.NDArray[np.float32]] = []
        self._weights: list[npt.NDArray[np.float32] | None] = []
        self._groups: list[npt.NDArray[np.uint64]] = []
        self._margins: list[list[Floats]] = [[] for _ in range(models)]

    def add(self, batch: Batch, groups: npt.NDArray[np.uint64] | None, margins: Sequence[Floats]) -> None:
        """Add a batch, its groups, and the margins of each model."""
        self._add(batch.labels, batch.weights, groups, margins)

    def _add(
        self,
        labels: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
        groups: npt.NDArray[np.uint64] | None,
        margins: Sequence[Floats],
    ) -> None:
        self._labels.append(labels)
        self._weights.append(weights)
        if groups is not None:
            self._groups.append(groups)
        for one, found in zip(margins, self._margins, strict=True):
            found.append(one)

    def encode(self) -> bytes:
        """Return all of it as bytes."""
        found = self.joined()
        part = _Part(
            found.labels.tobytes(),
            None if found.weights is None else found.weights.tobytes(),
            None if found.groups is None else found.groups.tobytes(),
            [margins.tobytes() for margins in found.margins],
        )
        return msgspec.msgpack.encode(part)

    def merge(self, encoded: Sequence[bytes]) -> None:
        """Add the examples of others."""
        for one in encoded:
            part = _part.decode(one)
            self._add(
                np.frombuffer(part.labels, np.float32),
                None if part.weights is None else np.frombuffer(part.weights, np.float32),
                None if part.groups is None else np.frombuffer(part.groups, np.uint64),
                [np.frombuffer(margins, np.float64) for margins in part.margins],
            )

    def joined(self) -> Predictions:
        """Return the arrays of all examples."""
        return Predictions(
            np.concatenate([np.empty(0, np.float32), *self._labels]),
            joined_or_none(self._weights, [len(some) for some in self._labels]),
            np.concatenate(self._groups) if self._groups else None,
            [np.concatenate(found) if found else np.empty(0) for found in self._margins],
        )

    @property
    def examples(self) -> int:
        """Number of examples."""
        return sum(len(labels) for labels in self._labels)

    @property
    def lacks_positives(self) -> bool:
        """Whether no label is 1."""
        return not any(np.any(labels) for labels in self._labels)

    def evaluations(self) -> list[Evaluation]:
        """Return the metrics of each model's predictions."""
        found = self.joined()
        if found.groups is not None:
            self._check_groups(found.groups)
        return [
            Evaluation(
                *measure_with_curves(found.labels, margins, found.weights),
                None if found.groups is None else gauc(found.labels, margins, found.groups, found.weights),
            )
            for margins in found.margins
        ]


class ClassMetrics(MeasuredExamples):
    """The metrics of ``models`` models of several classes, whose margins ``log_probabilities`` turns into such."""

    def __init__(self, models: int, classes: int, log_probabilities: Callable[[Floats], Floats]) -> None:
        self._seen = [MulticlassAccumulator(classes) for _ in range(models)]
        self._log_probabilities = log_probabilities

    def add(self, batch: Batch, groups: npt.NDArray[np.uint64] | None, margins: Sequence[Floats]) -> None:
        """Add a batch, and the margins of each model; there are no groups."""
        for seen, one in zip(self._seen, margins, strict=True):
            seen.update(batch.labels, self._log_probabilities(one), batch.weights)

    def encode(self) -> bytes:
        """Return all of it as bytes."""
        return msgspec.msgpack.encode([seen.to_dict() for seen in self._seen])

    def merge(self, encoded: Sequence[bytes]) -> None:
        """Add the examples of others."""
        for one in encoded:
            for seen, described in zip(self._seen, _described.decode(one), strict=True):
                seen.merge(MulticlassAccumulator.from_dict(described))

    @property
    def examples(self) -> int:
        """Number of examples."""
        return self._seen[0].examples

    @property
    def lacks_positives(self) -> bool:
        """Return False: there are more than two classes."""
        return False

    def evaluations(self) -> list[Evaluation]:
        """Return the metrics of each model's predictions."""
        return [Evaluation(seen.result(), None, None) for seen in self._seen]
