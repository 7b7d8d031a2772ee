"""Takeover: a worker that continues the fit of one that died, where its last counted batch ended.

Every few seconds, and at the beginning of each pass, a worker publishes its state to the servers
(worker_messages.py): the record of the model, its `FitState`, and how many clocks, barriers and exchanges lie behind
it. A replacement begins with the last published state and repeats the steps of its predecessor since then:

    predecessor    published at clock 40     batch 41 ... batch 57 counted    batch 58    killed
    replacement    state of clock 40         batch 41 ... batch 57 skipped    batch 58 ...

Batches whose clock has counted are read and skipped, barriers that are past do not wait, exchanges that are past return
the messages that are there. The fit is a function of its data and these messages, so the replacement meets the others
where its predecessor would have. What is lost is the metrics of the skipped batches, whose predictions the predecessor
made: `WorkerState.unmeasured` counts their examples.

What a batch changes outside of tables, such as the random numbers of a dropout, cannot be made again from the data. A
model that has such a state publishes it in each clock that changes it, before the clock ends.

If the number of workers changes, each hands over such a state after a clock, and the workers of the next job divide
what all have left of the pass (docs/decisions/0038-changing-workers.md). Of a worker that died they take the last state
that it has published, and each of them skips the batches that have counted since before it divides the rest.

Threads: the one that fits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from typing import NoReturn

import msgspec
from msgspec import structs

from shoal.base.decoders import msgpack_decoder
from shoal.base.plural import counted
from shoal.errors import WorkerLostError, WorkersChangedError
from shoal.models.history import Fit, Pass, Point
from shoal.models.learner import FitState, Learner
from shoal.models.pass_coordinator import START_AGAIN, PassCoordinator, Position
from shoal.models.pass_reader import PassReader
from shoal.models.plan import FitInput
from shoal.models.shares import Share, WorkerState, divided

log = logging.getLogger(__name__)

_SECONDS = 5.0  # between two states that are published within a pass


class _Model(msgspec.Struct, frozen=True):
    """One model of a worker; ``common`` is `Learner.common_state` of the one that hands it over for all."""

    own: bytes
    common: bytes
    points: tuple[Point, ...]
    passes: list[Pass]
    fits: list[Fit]
    best_pass: int | None
    examples: int
    format: str | None
    schema: dict[str, object]
    classes: tuple[object, ...] | None
    columns: int | None


class _Published(msgspec.Struct, frozen=True):
    """The state of one worker; without ``fit_states``, one of each model, its fit is over."""

    position: Position
    fit_states: list[FitState] | None
    models: list[_Model]


_published = msgpack_decoder(_Published)
_own = msgpack_decoder(list[bytes])


class Publisher:
    """Publishes the state of a fit, if others continue that of a worker that dies."""

    def __init__(self, models: Sequence[Learner], coordinator: PassCoordinator) -> None:
        self._models = models
        self._coordinator = coordinator
        self._next = 0.0
        self._own: list[bytes] | None = None  # what is published

    def is_due(self) -> bool:
        """Whether a state is to be published after this clock."""
        return self._coordinator.publishes and time.monotonic() >= self._next

    def publish(self, fit_states: Sequence[FitState] | None) -> None:
        """Publish the states of all models after a clock, or before the first one of a pass; None: the fit is over."""
        if not self._coordinator.publishes or self._coordinator.is_behind:
            return
        self._next = time.monotonic() + _SECONDS
        self._own = [model.local_state() for model in self._models]
        state = _Published(
            self._coordinator.position(),
            None if fit_states is None else list(fit_states),
            [_described(model, own, b"") for model, own in zip(self._models, self._own, strict=True)],
        )
        self._coordinator.publish(msgspec.msgpack.encode(state))

    def end(self) -> None:
        """Publish that the fit is over, after all that its workers do in it."""
        if self._coordinator.may_lose:
            self._coordinator.wait_for_all()  # until then all of it may have to be repeated
        self.publish(None)

    def publish_changes(self) -> None:
        """Publish what the batch of the clock that is about to end has changed outside of tables."""
        if not self._coordinator.can_replace:
            return
        own = [model.local_state() for model in self._models]
        if own != self._own:
            self._own = own
            self._coordinator.publish_change(msgspec.msgpack.encode(own))

    def take_changes(self) -> None:
        """Take what the predecessor has published of its last counted clock, after the batches up to it are skipped."""
        change, self._coordinator.change = self._coordinator.change, None
        if change is not None:
            self._own = _own.decode(change)
            for model, own in zip(self._models, self._own, strict=True):
                model.set_local_state(own)


def hand_over(
    models: Sequence[Learner], coordinator: PassCoordinator, fit_states: Sequence[FitState], *, leaves: bool
) -> NoReturn:
    """Hand over the states of a worker within a pass to the job that continues its own."""
    described = [
        _described(model, model.local_state(), b"" if coordinator.rank else model.common_state()) for model in models
    ]
    state = _Published(coordinator.position(), list(fit_states), described)
    coordinator.hand_over(msgspec.msgpack.encode(state), returns=not leaves)
    examples = models[0].examples
    if leaves:
        text = f"this worker leaves the fit after {examples:,} examples, and the others continue from its position"
    else:
        text = f"the number of workers changes after {examples:,} examples of this worker's"
    raise WorkersChangedError(text, leaves=leaves)


def _described(model: Learner, own: bytes, common: bytes) -> _Model:
    record = model.record
    return _Model(
        own,
        common,
        record.curve.points,
        record.passes,
        record.fits,
        record.best_pass,
        record.examples,
        record.format,
        record.schema,
        record.classes,
        record.columns,
    )


def taken_over(
    models: Sequence[Learner], coordinator: PassCoordinator, given: FitInput
) -> tuple[bool, list[FitState] | None]:
    """Return whether others have begun this fit, and the states to continue from, one of each model.

    Others are the predecessor of this worker, or the workers of the job that this one continues: what they had left of
    the pass is divided. The records of the models are theirs then. Without states the fit is over.
    """
    if coordinator.continued:
        return _continued(models, coordinator, given)
    content = coordinator.published()
    if content is None:
        return False, None
    state = _published.decode(content)
    if state.position.fit < coordinator.fit:
        return False, None
    _restore(models, state, state.models)
    if state.position.fit > coordinator.fit:
        return True, None
    coordinator.continue_from(state.position)
    return True, state.fit_states


def _continued(
    models: Sequence[Learner], coordinator: PassCoordinator, given: FitInput
) -> tuple[bool, list[FitState] | None]:
    published = coordinator.handed_over()
    ends = {
        rank: _published.decode(its[0]) for rank, its in enumerate(published) if its and rank not in coordinator.lost
    }
    first = next(iter(ends.values()), None)
    if first is None or first.position.fit < coordinator.fit:
        return False, None  # none of them had begun it
    if missing := len(published) - len(ends) - len(coordinator.lost):
        raise WorkerLostError(
            f"{missing} of {len(published)} workers ended before they had handed over what was left of their shares, "
            f"when the number of workers changed: {START_AGAIN}"
        )
    rank, workers = coordinator.rank, models[0].store.num_workers
    if first.position.fit > coordinator.fit or first.fit_states is None:
        _restore(models, first, ends[list(ends)[rank % len(ends)]].models)
        Publisher(models, coordinator).publish(None)  # for the next job, should this one end as well
        return True, None
    _restore(models, first, ends[list(ends)[rank % len(ends)]].models)
    learning = [number for number, one in enumerate(first.fit_states) if one.workers]
    found = {
        at: _left_by_lost(at, published, models, coordinator, given, first.fit_states[learning[0]], learning)
        for at in coordinator.lost
        if learning
    }
    for at, one in ends.items():
        found[at] = {number: one.fit_states[number].workers[0] for number in learning if one.fit_states}
    fit_states = list(first.fit_states)
    for number in learning:
        left = [its[number] for _, its in sorted(found.items()) if its]
        fit_states[number] = structs.replace(fit_states[number], workers=(divided(left, workers)[rank],))
    return True, fit_states


def _left_by_lost(
    rank: int,
    published: Sequence[Sequence[bytes]],
    models: Sequence[Learner],
    coordinator: PassCoordinator,
    given: FitInput,
    at: FitState,
    learning: Sequence[int],
) -> dict[int, WorkerState]:
    """Return what a worker that died, or left early, had left of the pass ``at``, of each model that is ``learning``.

    It begins with the last state that the worker has published in this pass, or with the whole of its split. If that is
    not the last one at all, the worker waited for the next pass to begin; otherwise the one before may be incomplete.
    """
    clock, repeats = coordinator.lost[rank]
    for state in map(_published.decode, published[rank]):
        its = [state.fit_states[number] for number in learning] if state.fit_states else []
        if state.position.fit == coordinator.fit and its and its[0].epoch == at.epoch:
            break
    else:
        raise WorkerLostError(
            f"worker {rank} of {len(published)} has died or ended the fit early, and there is no state of it from "
            f"which the others could continue: {START_AGAIN}"
        )
    whole = (Share(rank=rank, workers=len(published)),)
    states = [
        one.workers[0] if one.workers else WorkerState(shares=whole, seen=models[number].accumulator().to_dict())
        for number, one in zip(learning, its, strict=True)
    ]
    data = PassReader(
        given.reader,
        given.plan,
        structs.replace(at, workers=(states[0],)),
        rank=coordinator.rank,
        workers=models[0].store.num_workers,
        follow=given.plan.keeps_batches,
    )
    features = examples = 0
    with closing(iter(data)) as batches:
        for batch in islice(batches, max(0, clock - state.position.clock)):
            features, examples = features + batch.nnz, examples + len(batch)
            data.learned()
        left = data.left()
        repeated = sum(len(batch) for batch in islice(batches, repeats))
    if not coordinator.rank:
        log.warning(
            "worker %d of %d has died or ended the fit early: the others continue at its last counted batch; %s that "
            "it had learned from are not in the metrics of the pass, and up to %d are learned from twice",
            rank,
            len(published),
            counted(examples, "example"),
            repeated,
        )
    return {
        number: structs.replace(
            its,
            shares=left,
            features=its.features + features,
            unmeasured=its.unmeasured + examples,
            repeated=its.repeated + repeated,
        )
        for number, its in zip(learning, states, strict=True)
    }


def _restore(models: Sequence[Learner], state: _Published, own: Sequence[_Model]) -> None:
    """Give models the records of a state, and the own states of one."""
    for model, its, one in zip(models, state.models, own, strict=True):
        record = model.record
        record.restore(
            points=its.points, passes=its.passes, fits=its.fits, best_pass=its.best_pass, examples=its.examples
        )
        record.format, record.schema = its.format, dict(its.schema)
        record.classes, record.columns = its.classes, its.columns
        if its.common:
            model.set_common_state(its.common)
        model.set_local_state(one.own)
