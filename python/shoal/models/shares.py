"""Shares: what each worker of a fit has left of a pass, and its division among another number of workers.

    share    the batches of one split of the data, (rank, workers), as the plan makes them from the reader's

    batches of the share    0 1 2 3 4 5 6 7 8 9 ...
                            learned | skip, then every step-th         a share of 2 workers: step 2, skip 0 and 1

A fit that resumes with as many workers gives each its own shares. With fewer, a worker gets the shares of several, one
after another. With more, several workers read the same share, and each learns from every k-th batch of what is left.

Invariants
    I1  The shares of all workers have every batch of the pass that was not learned from, each once.

Threads: all of this is immutable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import structs

from shoal.data import Reader
from shoal.metrics import accumulator_from_dict
from shoal.models.history import Windows


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of one split of the data."""

    # rank, workers: The split: `shoal.data.Reader.split`.
    rank: int = 0
    workers: int = 1
    # batches, examples: Batches of the plan up to the position, and their examples.
    batches: int = 0
    examples: int = 0
    # Examples that the reader returned for them.
    read: int = 0
    # Of the reader after them; None: the split is read from its beginning, and `batches` are skipped.
    position: dict[str, Any] | None = None
    # Batches after the position that other workers learn from.
    skip: int = 0
    # Distance from one batch of this worker to the next.
    step: int = 1


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one worker within a pass."""

    # What it has left of the pass; the first one may be in part learned from.
    shares: tuple[Share, ...]
    # `shoal.models.learner.Learner.accumulator` of the pass.
    seen: dict[str, Any]
    # Of the pass so far.
    features: int = 0
    # Of the learning curve.
    windows: Windows = msgspec.field(default_factory=Windows)
    # Of a learner that draws random numbers: their state.
    random: bytes = b""
    # unmeasured, repeated: As those of `shoal.models.history.Pass`.
    unmeasured: int = 0
    repeated: int = 0


def divided(states: Sequence[WorkerState], workers: int) -> list[WorkerState]:
    """Divide what workers have left of a pass among ``workers``; the first one takes over the metrics of those gone."""
    if workers == len(states):
        return list(states)
    seen = accumulator_from_dict(states[0].seen)
    empty = seen.empty().to_dict()
    shares: list[list[Share]] = [[] for _ in range(workers)]
    for state in states[1:]:
        seen.merge(accumulator_from_dict(state.seen))
    if workers < len(states):
        for number, state in enumerate(states):
            shares[number % workers] += state.shares
    else:
        for rank in range(workers):
            state = states[rank % len(states)]
            readers = len(range(rank % len(states), workers, len(states)))
            shares[rank] += [
                structs.replace(share, skip=share.skip + rank // len(states) * share.step, step=share.step * readers)
                for share in state.shares
            ]
    return [
        WorkerState(
            shares=tuple(shares[rank]),
            seen=empty if rank else seen.to_dict(),
            features=0 if rank else sum(state.features for state in states),
            windows=Windows() if rank else states[0].windows,
            unmeasured=0 if rank else sum(state.unmeasured for state in states),
            repeated=0 if rank else sum(state.repeated for state in states),
        )
        for rank in range(workers)
    ]


def share_of(reader: Reader, rank: int, workers: int) -> Reader:
    """Return a split of all of a reader's data, also of a reader that is a split itself."""
    return reader.resume({**reader.position(), "shard": [rank, workers], "place": [0, 0, 0, 0]})
