"""Streams: parts of data that may never end, read side by side.

    a pipe       one part
    a folder     a range of each file for each worker      (folder.py)
    a topic      its partitions                            (kafka.py)

Each part is cut into batches by itself, so its position is a `Cursor`. A batch leaves at its size, or as it is after
the reader's ``max_delay``.

Threads: an iteration belongs to one; what it reads ahead of itself, to others.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import msgspec

from shoal.data.batch import Batch
from shoal.data.rebatch import Cursor


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a stream, from a position on."""

    # rank, num_splits: Which part of how many.
    rank: int = 0
    num_splits: int = 1
    begin: Cursor = Cursor()
    # Of a topic: the offset that it is read up to; -1: it has no end.
    end: int = -1
    # Batches before `begin`: of parts that end, the one with the fewest is next.
    blocks: int = 0
    # The latest event before `begin`, in milliseconds since 1970; 0: none is known.
    newest: int = 0
    # Of a folder: the digests of the names of files, up to that of `begin`.
    files: tuple[int, ...] = ()


class Events(NamedTuple):
    """The times of events of a batch."""

    # In milliseconds since 1970; 0: none is known.
    newest: int = 0
    # Examples that were older than the latest before them by more than the lateness that is allowed.
    late: int = 0


class Arrived(NamedTuple):
    """A batch of a part, its position behind it, and the digests of files that were begun up to there."""

    part: int
    batch: Batch
    cursor: Cursor
    events: Events = Events()
    files: tuple[int, ...] = ()


Arrivals = Generator[Arrived | None]
