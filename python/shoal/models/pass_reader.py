"""PassReader: the batches of a pass that one worker has not learned from, and its position among them.

    shares --> each: reader at the beginning of a block --> plan (sample, shuffle, warm up) --> own batches, in order
                                                                                     `learned` follows behind

    stream --> parts side by side --> whichever has a batch, or nothing for a while --> plan --> own batches

The reader is read ahead of learning: the place of each batch waits until that batch was learned from. A reader resumes
at the beginning of a block, whose batches that were learned from are skipped; other data is read again from its
beginning. Blocks of a stream may be cut elsewhere when they are read again, so there examples are skipped.

Threads: batches belong to the thread that iterates, all else to the one that learns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from shoal.data import Batch, Reader
from shoal.data.live import Arrived, Events, Part
from shoal.data.rebatch import Cursor, rows_of
from shoal.data.stream import is_live, no_examples, side_by_side
from shoal.models.plan import Plan
from shoal.models.shares import Share

if TYPE_CHECKING:
    from collections.abc import Generator

_BEGINNING = Cursor()


class _Begin(NamedTuple):
    """Where a block begins: the reader's cursor, the block's number, that of its first batch, examples before it."""

    cursor: Cursor
    number: int
    first: int
    read: int
    learned: int


class _Place(NamedTuple):
    """A batch: the index of its share, its number in the split, examples of the split up to it, its block."""

    share: int
    number: int
    examples: int
    block: _Begin
    events: Events = Events()
    files: tuple[int, ...] = ()


class PassReader:
    """The batches of a pass, an iterable for one iteration."""

    def __init__(
        self,
        reader: Iterable[Batch],
        plan: Plan,
        shares: Sequence[Share],
        *,
        epoch: int,
        known: int,
        rank: int,
        workers: int,
        files: Sequence[Sequence[int]] = (),
    ) -> None:
        self._plan = plan
        self._epoch = epoch
        self._known = known
        self._whole = plan.source(reader, epoch)
        self._own = (rank, workers)
        # Whether shares are parts of a stream.
        self.is_live = is_live(reader) and not plan.shuffles
        self._files = files  # of a folder: `Part.files` of each share
        self._position: dict[str, Any] = {}
        if isinstance(self._whole, Reader):
            self._position = self._whole.position()
            self._own = cast("tuple[int, int]", tuple(self._position["shard"]))
        self._shares = list(shares)
        # The reader that was read last.
        self.last: object = self._whole
        # late: Late examples of the batch that was learned from last. files_begun: digests of files up to its end.
        self.late = 0
        self.files_begun: tuple[int, ...] = ()
        self._sources: list[Iterable[Batch]] = []
        for share in () if self.is_live else self._shares:
            self._sources.append(self._open(share))
        self._ahead: deque[_Place] = deque()
        parts: list[Callable[[], float]] = [source.progress for source in self._sources if hasattr(source, "progress")]
        if parts:
            self.progress: Callable[[], float] = lambda: sum(done() for done in parts) / len(parts)

    def _open(self, share: Share) -> Iterable[Batch]:
        is_own = (share.rank, share.workers) == self._own
        if isinstance(self._whole, Reader):
            place = [share.file, share.offset, share.rows, share.skipped]
            # Its passes count lines and progress for one share each.
            if is_own and place == [*_BEGINNING] and self._whole not in self._sources:
                return self._whole
            return self._whole.resume({**self._position, "shard": [share.rank, share.workers], "place": place})
        if share.block:
            raise TypeError(f"the fit is within a reader, and this is a {type(self._whole).__name__}: pass a reader")
        if not is_own:
            raise ValueError(
                f"the fit was begun with {share.workers} workers, and only data of a reader can be divided again: "
                f"resume with {share.workers} workers, or pass a reader"
            )
        return self._whole

    # ---- reading -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Batch]:
        """Return the batches that were not learned from yet; of a stream one without examples when nothing arrives."""
        if self.is_live:
            yield from self._arriving()
            return
        for index, share in enumerate(self._shares):
            self.last = source = self._sources[index]
            is_reader = isinstance(source, Reader)
            batches = self._plan.batches(
                source,
                self._epoch,
                self._known,
                block=share.block,
                read=share.read,
                learned=share.learned,
                workers=share.workers,
            )
            cursor = Cursor(share.file, share.offset, share.rows, share.skipped)
            block = _Begin(cursor, share.block, share.first, share.read, share.learned)
            number, examples, next_one = share.first, share.learned, share.next
            with closing(batches):
                for batch, origin in batches:
                    if is_reader and origin.number != block.number:
                        block = _Begin(origin.cursor, origin.number, number, origin.read, examples)
                    examples += len(batch)
                    if number == next_one:
                        if number == share.next:
                            self._check(share, examples - len(batch))
                        self._ahead.append(_Place(index, number, examples, block))
                        next_one += share.step
                        yield batch
                    number += 1
            if share.next >= number:
                self._check(share, examples)

    def _arriving(self) -> Generator[Batch]:
        assert isinstance(self._whole, Reader), "a stream is one"
        nothing = no_examples(self._whole)
        files = self._files or [()] * len(self._shares)
        parts = [_LivePart(index, share, files[index]) for index, share in enumerate(self._shares)]
        with closing(side_by_side(self._whole, [one.part for one in parts])) as arrivals:
            for got in arrivals:
                if got is None:
                    yield nothing
                    continue
                for batch, place in parts[got.part].take(got, self._plan, self._epoch, self._known):
                    self._ahead.append(place)
                    yield batch

    @staticmethod
    def _check(share: Share, found: int) -> None:
        """Check the number of examples that were skipped."""
        if share.step == 1 and found != share.examples:
            raise ValueError(
                f"the fit had learned from {share.examples:,} examples of this pass in {share.next:,} batches, and "
                f"these have {found:,} now: the data has changed, or was appended to after an incomplete batch"
            )

    # ---- the position ------------------------------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """Of the share of the oldest batch that was returned and is not learned from yet."""
        return self._ahead[0].share

    @property
    def number(self) -> tuple[int, int, int]:
        """Its split, (rank, workers), and its number there."""
        place = self._ahead[0]
        share = self._shares[place.share]
        return share.rank, share.workers, place.number

    def learned(self) -> tuple[int, Share]:
        """Record that it was learned from; return the index of its share, and what is left of that.

        `late` and `files_begun` are then those of this batch.
        """
        index, number, examples, block, events, files = self._ahead.popleft()
        share = self._shares[index]
        cursor = block.cursor
        left = Share(
            rank=share.rank,
            workers=share.workers,
            next=number + share.step,
            step=share.step,
            examples=examples,
            file=cursor.file,
            offset=cursor.offset,
            rows=cursor.rows,
            skipped=cursor.skipped,
            block=block.number,
            first=block.first,
            read=block.read,
            learned=block.learned,
            end=share.end,
            newest=events.newest or share.newest,
            counts=share.counts,
            repeats=share.repeats,
        )
        self.late, self.files_begun = events.late, files
        return index, left

    def skipped_in(self, index: int) -> int:
        """Return how many malformed lines of a share were skipped, if this worker counts them."""
        if self.is_live:
            return 0  # they count with the batches behind them
        return int(getattr(self._sources[index], "skipped", 0)) if self._shares[index].counts else 0


class _LivePart:
    """A part of a stream that is read: the block that comes next."""

    def __init__(self, index: int, share: Share, files: Sequence[int]) -> None:
        begin = Cursor(share.file, share.offset, share.rows, share.skipped)
        self.part = Part(
            rank=share.rank,
            num_splits=share.workers,
            begin=begin,
            end=share.end,
            blocks=share.block,
            newest=share.newest,
            files=tuple(files),
        )
        self._index = index
        self._block = _Begin(begin, share.block, share.first, share.read, share.learned)
        self._number = share.next
        self._drop = share.examples - share.learned  # that were learned from
        self._late = 0
        self._files: tuple[int, ...] = ()
        self._newest = share.newest

    def take(self, got: Arrived, plan: Plan, epoch: int, known: int) -> list[tuple[Batch, _Place]]:
        """Make what arrived a block: return the batches of it that were not learned from, and their places."""
        block, examples, number = self._block, self._block.learned, self._number
        made: list[tuple[Batch, _Place]] = []
        batches = plan.batches(
            [got.batch],
            epoch,
            known,
            block=block.number,
            read=block.read,
            learned=block.learned,
            workers=self.part.num_splits,
        )
        before = self._newest
        for batch, _ in batches:
            first = min(self._drop, len(batch))
            self._drop -= first
            examples += len(batch)
            if first < len(batch):
                rest = rows_of(batch, first, len(batch))
                made.append((rest, _Place(self._index, number, examples, block, Events(before, 0))))
                number += 1
        self._late, self._files = self._late + got.events.late, (*self._files, *got.files)
        self._newest = got.events.newest or before
        self._number = number
        self._block = _Begin(got.cursor, block.number + 1, number, block.read + len(got.batch), examples)
        if made:  # the last one leaves nothing of the block
            batch, place = made[-1]
            events = Events(self._newest, self._late)
            made[-1] = batch, place._replace(block=self._block, events=events, files=self._files)
            self._late, self._files = 0, ()
        return made
