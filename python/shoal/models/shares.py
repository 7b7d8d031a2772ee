"""Shares: what each worker of a fit has left of a pass, and its division among another number of workers.

    share    batches of one split of the data, (rank, workers), as the plan makes them from the reader's

    numbers of the split    0 1 2 3 4 5 6 7 8 9 ...
                                  ^ next, and then every step-th     a share of 2 workers: next 3 and 4, step 2

A part of a stream is a share too, of which a worker may have several at a time; it is never read by two.

A fit that continues with as many workers gives each its own shares. With fewer, a worker gets the shares of several,
one after another. With more, several workers read the same share, and each learns from every k-th batch that is left.

Invariants
    I1  The shares of all workers have every batch of the pass that was not learned from, each once.

Threads: all of this is immutable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import msgspec
from msgspec import structs

from shoal.data import Reader


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker has left of one split of the data; all of it is whole numbers.

    A *block* is what a plan makes batches of by itself: one batch of the reader, or those that it shuffles together.
    """

    # rank, workers: The split: `shoal.data.Reader.split`.
    rank: int = 0
    workers: int = 1
    # next, step: Number of the next batch of this worker, and the distance from one of its batches to the next.
    next: int = 0
    step: int = 1
    # Examples of all batches of the split before `next`; of one that other workers read too: that were read here.
    examples: int = 0
    # file, offset, rows, skipped: `shoal.data.Cursor` of the reader at the beginning of a block.
    file: int = 0
    offset: int = 0
    rows: int = 0
    skipped: int = 0
    # block, first: The block's number, and that of its first batch.
    block: int = 0
    first: int = 0
    # read, learned: Examples of the reader, and of the batches, before the block.
    read: int = 0
    learned: int = 0
    # end, newest: Of a part of a stream (`shoal.data.live.Part`): what it is read up to, and its latest event.
    end: int = -1
    newest: int = 0
    # Whether malformed lines count, of several workers that read the same.
    counts: bool = True
    # Batches from `next` on that may have been learned from already.
    repeats: int = 0

    def to_row(self) -> list[int]:
        """Return all of it."""
        return [int(value) for value in structs.astuple(self)]

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Self:
        """Return the share of `to_row`."""
        *values, counts, repeats = row
        return cls(**dict(zip(cls.__struct_fields__, values, strict=False)), counts=bool(counts), repeats=repeats)


ROW = len(Share.__struct_fields__)


def divided(lists: Sequence[Sequence[Share]], workers: int, *, is_live: bool = False) -> list[list[Share]]:
    """Divide what workers have left of a pass, a list each, among ``workers``; ``is_live``: shares are whole."""
    if is_live and workers > len(lists):
        shares = [share for its in lists for share in its]
        return [shares[rank::workers] for rank in range(workers)]
    if workers <= len(lists) or not lists:
        return [[share for shares in lists[rank::workers] for share in shares] for rank in range(workers)]
    divisions = []
    for rank in range(workers):
        origin, number = rank % len(lists), rank // len(lists)
        readers = len(range(origin, workers, len(lists)))
        divisions.append([_part_of(share, number, readers) for share in lists[origin]])
    return divisions


def _part_of(share: Share, number: int, readers: int) -> Share:
    """Return what reader ``number`` of a share learns from."""
    return structs.replace(
        share,
        next=share.next + number * share.step,
        step=share.step * readers,
        counts=share.counts and number == 0,
        repeats=len(range(number, share.repeats, readers)),
    )


def share_of(reader: Reader, rank: int, workers: int) -> Reader:
    """Return a split of all of a reader's data, also of a reader that is a split itself."""
    return reader.resume({**reader.position(), "shard": [rank, workers], "place": [0, 0, 0, 0]})
