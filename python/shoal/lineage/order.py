"""RecordedOrder: the calls of all workers of a recorded fit, read from the files of its record.

    files of all workers --> each division: whole, of one fit, all pushes numbered without a gap --> up to where it ends

    stream    the messages to one endpoint about one table: a push of number n comes after that of n - 1, and after all
              pulls whose rows include n - 1 pushes

Threads: immutable once read, but for the calls, which a replay takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shoal.errors import CorruptionError
from shoal.models import order_record
from shoal.models.order_record import Division, Messages, Numbers, Record, Segment
from shoal.storage.base import StorageDir


class Message(NamedTuple):
    """A part of a call: its slots, the stream that it is in, and its number there, from that of the first push."""

    first: int
    end: int
    stream: int
    number: int


def slots_of(place: StorageDir) -> int:
    """Return the number of slots of the fit that a record is of."""
    record = order_record.read(place)
    name = order_record.file_of(record.divisions[0].number if record.divisions else 1, 0)
    try:
        segment, _ = order_record.decode(place.read(name), place.address(name))
    except FileNotFoundError:
        raise CorruptionError(f"{place.address(name)} is missing: the record is incomplete") from None
    return segment.slots


class RecordedOrder:
    """The recorded calls from a division on.

    Attributes
    ----------
    tables : list of str
    slots : int
    arcs : list of (int, int)
        First slot and end of each.
    pulls : list of int64[pushes + 1]
        Of each stream, how many pulls include so many of its pushes.
    divisions : list of Division
        Those that can be made again.
    messages : int
    why : str
        Why it ends there.
    """

    def __init__(self, place: StorageDir, record: Record, start: int) -> None:
        self._place = place
        self._record = record
        self.tables: list[str] = []
        self.slots = 0
        self.arcs: list[tuple[int, int]] = []
        self.pulls: list[Numbers] = []
        self.divisions: list[Division] = []
        self.messages = 0
        self.why = record.why or ("" if record.is_complete else "the fit had not ended, or was killed")
        # By rank, table and whether it is a push.
        self._calls: dict[tuple[int, int, bool], deque[tuple[Message, ...]]] = {}
        self._streams: dict[tuple[int, int], int] = {}  # by table and endpoint
        self._pushes: list[int] = []  # of each stream so far
        first: Segment | None = None
        for division in record.divisions:
            if division.number < start:
                continue
            files = [self._read(division, rank) for rank in range(record.workers)]
            broken = [segment.broken for segment, _ in files if segment.broken]
            if broken:
                self.why = broken[0]
                break
            first = files[0][0] if first is None else first
            for segment, _ in files:
                if (segment.tables, segment.slots, segment.arcs) != (first.tables, first.slots, first.arcs):
                    raise CorruptionError(f"the files of {place} are not of one fit: their tables or arcs differ")
            if sorted(division.steps) != sorted(first.tables) or any(
                len(its) != len(first.arcs) for its in division.steps.values()
            ):
                raise CorruptionError(f"{place} does not have the steps of all arcs at division {division.number}")
            self._add(files)
            self.divisions.append(division)
        if first is not None:
            self.tables, self.slots = first.tables, first.slots
            self.arcs = [(begin, end) for begin, end, _ in first.arcs]

    def take(self, rank: int, table: int, *, is_push: bool) -> tuple[Message, ...] | None:
        """Return the next pull or push of a worker in a table; None: the record has no further one."""
        calls = self._calls.get((rank, table, is_push))
        return calls.popleft() if calls else None

    def steps(self) -> dict[str, list[int]]:
        """Return the steps of each arc before the first call, by table."""
        return {name: list(steps) for name, steps in self.divisions[0].steps.items()}

    @property
    def calls_left(self) -> int:
        """How many were not taken."""
        return sum(map(len, self._calls.values()))

    def _read(self, division: Division, rank: int) -> tuple[Segment, Messages]:
        name = order_record.file_of(division.number, rank)
        address = self._place.address(name)
        try:
            segment, messages = order_record.decode(self._place.read(name), address)
        except FileNotFoundError:
            raise CorruptionError(f"{address} is missing: the record is incomplete") from None
        its = segment.record, segment.division, segment.rank, segment.workers
        if its != (self._record.id, division.number, rank, self._record.workers):
            raise CorruptionError(
                f"{address} is of another record: of worker {segment.rank} of {segment.workers} in division "
                f"{segment.division}"
            )
        return segment, messages

    def _add(self, files: Sequence[tuple[Segment, Messages]]) -> None:
        """Add the messages of all workers in a division."""
        endpoints = [order_record.endpoint_of(segment, messages) for segment, messages in files]
        streams = []
        for (_, messages), endpoint in zip(files, endpoints, strict=True):
            pairs, index = np.unique(np.stack([messages.table, endpoint]), axis=1, return_inverse=True)
            known = [self._stream(int(table), int(of)) for table, of in pairs.T]
            streams.append(np.array(known, np.int64)[index.reshape(-1)])
        stream = np.concatenate(streams)
        number = np.concatenate([messages.number for _, messages in files])
        is_push = np.concatenate([messages.is_push for _, messages in files])
        for one in np.unique(stream):
            its = np.flatnonzero(stream == one)
            number[its] = self._numbered(int(one), number[its], is_push[its])
        begin = 0
        for rank, (_, messages) in enumerate(files):
            end = begin + len(messages.number)
            self._add_calls(rank, messages, stream[begin:end], number[begin:end])
            begin = end
        self.messages += len(number)

    def _stream(self, table: int, endpoint: int) -> int:
        known = self._streams.setdefault((table, endpoint), len(self._streams))
        if known == len(self.pulls):
            self.pulls.append(np.zeros(1, np.int64))
            self._pushes.append(0)
        return known

    def _numbered(self, stream: int, number: Numbers, is_push: np.ndarray) -> Numbers:
        """Return numbers in the stream, after checking that all pushes are there; they were modulo 2^32."""
        near = ((number - number[0] + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
        pushes = np.sort(near[is_push])
        least = int(pushes[0]) - 1 if len(pushes) else int(near.min())
        is_whole = np.array_equal(pushes, np.arange(least + 1, least + 1 + len(pushes)))
        if not is_whole or near.min() < least or near.max() > least + len(pushes):
            raise CorruptionError(
                f"the record in {self._place} lacks pushes, or has some twice: others than the workers of the fit have "
                "pushed to its tables, or files of different fits are mixed"
            )
        found: Numbers = near - least + self._pushes[stream]
        self._pushes[stream] += len(pushes)
        counts = np.bincount(found[~is_push], minlength=self._pushes[stream] + 1)
        counts[: len(self.pulls[stream])] += self.pulls[stream]
        self.pulls[stream] = counts
        return found

    def _add_calls(self, rank: int, messages: Messages, stream: Numbers, number: Numbers) -> None:
        begins = np.flatnonzero(messages.begins).tolist()
        parts = [
            Message(*one)
            for one in zip(
                messages.first.tolist(), messages.end.tolist(), stream.tolist(), number.tolist(), strict=True
            )
        ]
        table, is_push = messages.table.tolist(), messages.is_push.tolist()
        for begin, end in zip(begins, [*begins[1:], len(parts)], strict=True):
            calls = self._calls.setdefault((rank, table[begin], is_push[begin]), deque())
            calls.append(tuple(parts[begin:end]))
