"""Merging: the metrics of a pass, and of validation, over all workers of a fit.

    pass         each worker's accumulators --all-gather--> each worker merges them: exact sums and histograms
    validation   each worker's labels, margins, groups --gather--> worker 0 measures --broadcast--> all
                 of several classes its exact sums

So the metrics are those of one worker with all of the data: those of validation the same bits up to the order of sums.

Threads: the one that fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from shoal.base.decoders import msgpack_decoder
from shoal.data import Batch
from shoal.errors import ShoalError
from shoal.metrics import accumulator_from_dict
from shoal.models.evaluation import check_data, evaluate, measure, predicted
from shoal.models.learner import Learner
from shoal.models.measured import Evaluation
from shoal.models.model_trainer import ModelTrainer
from shoal.models.pass_coordinator import PassCoordinator

_FAILED = 1  # flag of a message that is an error's


class _WorkerPass(msgspec.Struct, frozen=True):
    """The pass of one worker: one accumulator, and one number of features, for each model."""

    seen: list[dict[str, Any]]
    features: list[int]
    skipped: int
    has_valid: bool
    unmeasured: int = 0
    repeated: int = 0


_pass = msgpack_decoder(_WorkerPass)
_evaluations = msgpack_decoder(list[Evaluation])


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
        seen = trainer.model.accumulator()
        for one in passes:
            seen.merge(accumulator_from_dict(one.seen[number]))
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
    """Measure models on the data of all workers."""
    if coordinator.is_alone:
        assert data is not None
        return measure(models, data)
    batches = [] if data is None else data
    mine = b""
    if not coordinator.is_past:
        if data is not None:
            check_data(models, data)
        mine = predicted(models, batches, models[0].examples_to_measure(len(models))).encode()
    messages = coordinator.exchange(mine, to=0).messages
    answer, failed = b"", None
    if coordinator.rank == 0 and not coordinator.is_past:
        try:
            whole = models[0].examples_to_measure(len(models))
            whole.merge([one for one in messages if one is not None])
            answer = msgspec.msgpack.encode(evaluate(whole, batches))
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
