"""Merging: the metrics of a pass, and of validation, over all workers of a fit.

    pass         each worker's accumulators --all-gather--> each worker merges them: exact sums and histograms
    validation   each worker's labels, margins, groups --gather--> worker 0 measures --broadcast--> all

So the metrics are those of one worker with all of the data: those of validation the same bits up to the order of sums.

Threads: the one that fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shoal.data import Batch
from shoal.data.rebatch import joined_or_none
from shoal.errors import ShoalError
from shoal.metrics import Accumulator
from shoal.models.evaluation import Evaluation, Predictions, check_data, evaluate, measure, predictions
from shoal.models.learner import Learner
from shoal.models.model_trainer import ModelTrainer
from shoal.models.pass_coordinator import PassCoordinator

__all__ = ["MergedPass", "measure_together", "merge_pass"]

_FAILED = 1  # flag of a message that is an error's


class _WorkerPass(msgspec.Struct, frozen=True):
    """The pass of one worker: one accumulator, and one number of features, for each model."""

    seen: list[dict[str, Any]]
    features: list[int]
    skipped: int
    has_valid: bool
    unmeasured: int = 0
    repeated: int = 0


class _Part(msgspec.Struct, frozen=True):
    """The predictions of one worker, as the bytes of arrays."""

    labels: bytes
    weights: bytes | None
    groups: bytes | None
    margins: list[bytes]


# Made here: msgspec crashes where several threads are the first to decode a type.
_pass = msgspec.msgpack.Decoder(_WorkerPass)
_part = msgspec.msgpack.Decoder(_Part)
_evaluations = msgspec.msgpack.Decoder(list[Evaluation])


class MergedPass(NamedTuple):
    """``any_valid``: whether any worker has validation data."""

    any_valid: bool


def merge_pass(coordinator: PassCoordinator, trainers: Sequence[ModelTrainer], *, has_valid: bool) -> MergedPass:
    """Make the metrics of the pass that has ended those of all workers."""
    if coordinator.is_alone:
        return MergedPass(has_valid)
    mine = _WorkerPass(
        [trainer.seen.to_dict() for trainer in trainers],
        [trainer.model.record.passes[-1].features for trainer in trainers],
        trainers[0].model.record.passes[-1].skipped,
        has_valid,
        trainers[0].unmeasured,
        trainers[0].repeated,
    )
    messages = coordinator.exchange(msgspec.msgpack.encode(mine)).messages
    passes = [_pass.decode(one) for one in messages if one is not None]
    for number, trainer in enumerate(trainers):
        seen = Accumulator()
        for one in passes:
            seen.merge(Accumulator.from_dict(one.seen[number]))
        trainer.merge(
            seen,
            features=sum(one.features[number] for one in passes),
            skipped=sum(one.skipped for one in passes),
            unmeasured=sum(one.unmeasured for one in passes),
            repeated=sum(one.repeated for one in passes),
        )
    return MergedPass(any(one.has_valid for one in passes))


def measure_together(
    coordinator: PassCoordinator, models: Sequence[Learner], data: Iterable[Batch] | None
) -> list[Evaluation]:
    """Measure models on the data of all workers.

    Raises
    ------
    ShoalError
        Worker 0 cannot measure; the message has its error.
    ValueError
        As `shoal.models.evaluation.measure`.
    """
    if coordinator.is_alone:
        assert data is not None
        return measure(models, data)
    batches = [] if data is None else data
    mine = b"" if coordinator.is_past else _predicted(models, data, batches)
    messages = coordinator.exchange(mine, to=0).messages
    answer, failed = b"", None
    if coordinator.rank == 0 and not coordinator.is_past:
        try:
            whole = _joined([_part.decode(one) for one in messages if one is not None])
            answer = msgspec.msgpack.encode(evaluate(models, whole, batches))
        except ValueError as error:
            failed, answer = error, str(error).encode()
    flags, answers, _ = coordinator.exchange(answer, flag=_FAILED if failed is not None else 0)
    if failed is not None:
        raise failed
    if answers[0] is None:
        raise ShoalError("worker 0, which measures the validation data of all workers, was lost")
    if flags[0] == _FAILED:
        raise ShoalError(f"worker 0 could not measure the validation data: {answers[0].decode()}")
    return _evaluations.decode(answers[0])


def _predicted(models: Sequence[Learner], data: Iterable[Batch] | None, batches: Iterable[Batch]) -> bytes:
    if data is not None:
        check_data(models, data)
    found = predictions(models, batches)
    mine = _Part(
        found.labels.tobytes(),
        None if found.weights is None else found.weights.tobytes(),
        None if found.groups is None else found.groups.tobytes(),
        [margins.tobytes() for margins in found.margins],
    )
    return msgspec.msgpack.encode(mine)


def _joined(parts: Sequence[_Part]) -> Predictions:
    labels = [np.frombuffer(part.labels, np.float32) for part in parts]
    weights = [None if part.weights is None else np.frombuffer(part.weights, np.float32) for part in parts]
    groups = [np.frombuffer(part.groups, np.uint64) for part in parts if part.groups is not None]
    margins = zip(*[[np.frombuffer(one, np.float64) for one in part.margins] for part in parts], strict=True)
    return Predictions(
        np.concatenate(labels),
        joined_or_none(weights, [len(some) for some in labels]),
        np.concatenate(groups) if groups else None,
        [np.concatenate(one) for one in margins],
    )
