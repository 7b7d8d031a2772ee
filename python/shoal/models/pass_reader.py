"""PassReader: the batches of a pass that one worker has not learned from, and its position among them.

    shares --> each: reader at its position --> plan (sample, shuffle, warm up) --> own batches, in order
                                                                                     `learned` follows behind

The reader is read ahead of learning: a record of each batch waits until that batch was learned from. If each batch of
the reader makes one of the pass, the reader resumes; otherwise the share is read again and its batches are skipped.

Threads: batches belong to the thread that iterates, all else to the one that learns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from msgspec import structs

from shoal.data import Batch, Reader
from shoal.metrics import accumulator_from_dict
from shoal.models.history import Windows
from shoal.models.learner import FitState
from shoal.models.plan import Plan
from shoal.models.shares import Share, WorkerState, share_of

if TYPE_CHECKING:
    from collections.abc import Generator


class _Place(NamedTuple):
    """Where a batch ends: which share, its batches, examples and examples read so far, the reader's cursor."""

    share: int
    batches: int
    examples: int
    read: int
    cursor: Any


class PassReader:
    """The batches of a pass, an iterable for one iteration."""

    def __init__(
        self,
        reader: Iterable[Batch],
        plan: Plan,
        at: FitState,
        *,
        rank: int,
        workers: int,
        follow: bool,
        in_parts: bool = False,
    ) -> None:
        # `at`.
        self.begin = at
        self._plan = plan
        self._whole = plan.source(reader, at.epoch)
        # The reader that was read last.
        self.last: object = self._whole
        self._own = (rank, workers)
        if isinstance(self._whole, Reader):
            rank, workers = self._own = cast("tuple[int, int]", tuple(self._whole.position()["shard"]))
        self._follow = follow
        self._in_parts = in_parts or workers > 1 or bool(at.workers)
        if at.workers:
            self._shares = at.workers[0].shares
        else:
            examples = 0 if at.seen is None else accumulator_from_dict(at.seen).examples
            own = Share(rank=rank, workers=workers, batches=at.batches, examples=examples, read=at.read)
            self._shares = (structs.replace(own, position=at.position),)
        self._sources = [self._open(share) for share in self._shares]
        self._ahead: deque[_Place] = deque()
        self._place: _Place | None = None
        self._parts_done: list[Callable[[], float]] = [
            source.progress for source in self._sources if hasattr(source, "progress")
        ]
        if self._parts_done:
            self.progress: Callable[[], float] = self._progress

    def _open(self, share: Share) -> Iterable[Batch]:
        if isinstance(self._whole, Reader):
            if share.position is not None:
                return self._whole.resume(share.position)
            is_own = (share.rank, share.workers) == self._own
            return self._whole if is_own else share_of(self._whole, share.rank, share.workers)
        if share.position is not None:
            raise TypeError(f"the fit is within a reader, and this is a {type(self._whole).__name__}: pass a reader")
        if (share.rank, share.workers) != self._own:
            raise ValueError(
                f"the fit was begun with {share.workers} workers, and only data of a reader can be divided again: "
                f"resume with {share.workers} workers, or pass a reader"
            )
        return self._whole

    # ---- reading -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Batch]:
        """Return the batches that were not learned from yet."""
        for number in range(len(self._shares)):
            self.last = self._sources[number]
            yield from self._batches_of(number)

    def _batches_of(self, number: int) -> Iterator[Batch]:
        share, source, at = self._shares[number], self._sources[number], self.begin
        counted = _Counted(source, share.read if share.position is not None else 0)
        read = share.read if share.position is not None else 0
        stream = iter(self._plan.batches(counted, at.epoch, at.known, read, share.workers))
        with closing(cast("Generator[Batch]", stream)):
            if share.position is None and share.batches:
                _skip(stream, share.batches, share.examples)
            batches, examples = share.batches, share.examples
            for i, batch in enumerate(stream):
                batches, examples = batches + 1, examples + len(batch)
                if i < share.skip or (i - share.skip) % share.step:
                    continue
                is_followed = self._follow and isinstance(source, Reader)
                cursor = source.cursor if is_followed and isinstance(source, Reader) else None
                self._ahead.append(_Place(number, batches, examples, counted.read, cursor))
                yield batch

    def _progress(self) -> float:
        return sum(done() for done in self._parts_done) / len(self._parts_done)

    # ---- the position ------------------------------------------------------------------------------------------------

    def learned(self) -> None:
        """Record that one more batch was learned from."""
        self._place = self._ahead.popleft()

    @property
    def skipped(self) -> int:
        """Malformed lines that were skipped."""
        return sum(int(getattr(source, "skipped", 0)) for source in self._sources)

    def left(self) -> tuple[Share, ...]:
        """Return what is left of the shares."""
        place = self._place
        if place is None:
            return self._shares
        share, source = self._shares[place.share], self._sources[place.share]
        position = source.position(place.cursor) if place.cursor is not None and isinstance(source, Reader) else None
        current = structs.replace(
            share,
            batches=place.batches,
            examples=place.examples,
            read=place.read if position is not None else 0,
            position=position,
            skip=share.step - 1,
        )
        return (current, *self._shares[place.share + 1 :])

    def state_in(self, state: FitState, random: Callable[[], bytes]) -> FitState:
        """Return the state of a fit with the position of this pass; ``state`` has all else."""
        left = self.left()
        if not self._in_parts:
            (share,) = left
            return structs.replace(state, batches=share.batches, read=share.read, position=share.position)
        assert state.seen is not None
        worker = WorkerState(
            shares=left,
            seen=state.seen,
            features=state.features,
            windows=state.windows,
            random=random(),
            unmeasured=state.unmeasured,
            repeated=state.repeated,
        )
        return structs.replace(
            state,
            batches=0,
            read=0,
            position=None,
            seen=None,
            features=0,
            windows=Windows(),
            unmeasured=0,
            repeated=0,
            workers=(worker,),
        )


class _Counted:
    """Batches of a source, whose examples are counted."""

    def __init__(self, source: Iterable[Batch], read: int) -> None:
        self._source = source
        self.read = read

    def __iter__(self) -> Iterator[Batch]:
        iterator = iter(self._source)
        try:
            for batch in iterator:
                self.read += len(batch) if isinstance(batch, Batch) else 0
                yield batch
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()


def _skip(stream: Iterator[Batch], count: int, examples: int) -> None:
    """Skip the batches that were learned from, and check their number of examples."""
    found = sum(len(batch) for batch in islice(stream, count))
    if found != examples:
        raise ValueError(
            f"the fit had learned from {examples:,} examples of this pass in {count:,} batches, and these have "
            f"{found:,} now: the data has changed, or was appended to after an incomplete batch"
        )
