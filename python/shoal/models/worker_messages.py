"""WorkerMessages: an all-gather of bytes among the workers of a store, by way of its servers.

    each worker    assign its rows    barrier    pull the rows of the others    barrier

Rows, in a table of the model's name and "-messages"
    rank 2^32 + slot 2^24 + i    the i-th block of what is in a slot of the worker: a number, a flag, a length, bytes

Each number of a row holds one byte, 0 to 255, which every filter of values transfers exactly.

If workers are replaced, message k stays in slot k mod 4 until message k + 4: a replacement repeats the calls since the
last state that its predecessor has published, and receives the messages that it has missed. Slots 4 and 5 hold such
states in turns, so that one of them is complete at any moment; slots 6 and 7 likewise what a clock has changed outside
of tables. A job that continues another one reads the states of that, and writes its own in slots 8 and 9: so those that
it has begun with stay until the next job has its own. Slot 10 holds the settings with which a worker has begun its last
fit.

Invariants
    M1  A call is one of all workers, at the same clock. The k-th call of a worker exchanges the k-th messages.
    M2  The message of a worker that was lost or has left is None: its rows have another number.
    M3  A call that the predecessor of this worker has begun with all others changes no message.
    M4  Rows of another job are not read, except the states of the one that this job continues.
    M5  States and changes are numbered through all fits of a model in a store: the last one has the greatest number.

Threads: the one that fits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.optim import SGD
from shoal.store.base import Store

_BLOCK = 1024  # bytes
_HEAD = struct.Struct("<QQQ")  # number of the call, flag, length
_RANK_BITS = 32
_SLOT_BITS = 24
_SLOTS = 4  # for messages: one more than the calls between two passes
_STATES = 2  # slots for states, and as many for what clocks have changed
_CHANGES = _SLOTS + _STATES
_OTHER_STATES = _CHANGES + _STATES
_SETTINGS = _OTHER_STATES + _STATES
_CALL_BITS = 24  # of numbers of calls, below the number of the job


class _Written(msgspec.Struct):
    """What this worker has written in all fits of a model: states, changes, and the blocks in each slot."""

    published: int = 0
    states: int = _SLOTS  # the first slot for them
    changes: int = 0
    blocks: dict[int, int] = msgspec.field(default_factory=dict)


_written: WeakKeyDictionary[Store, dict[str, _Written]] = WeakKeyDictionary()  # in each store, by name of the model


class Exchanged(NamedTuple):
    """The messages of all workers by rank, None of one that sent none; ``flags`` likewise.

    ``is_past``: the predecessor of this worker has completed the call. A message that was replaced since is None too.
    """

    flags: list[int | None]
    messages: list[bytes | None]
    is_past: bool = False


class WorkerMessages:
    """Messages among the workers of a store that fit a model together."""

    def __init__(self, store: Store, name: str, barrier: Callable[[], None]) -> None:
        # Ranks of workers that take no part; what they had put before is ignored.
        self.absent: frozenset[int] = frozenset()
        self._store = store
        self._barrier = barrier
        self._table = store.table(f"{name}-messages", dim=_BLOCK, optimizer=SGD(lr=1.0))
        self._slots = _SLOTS if store.member.replacement_seconds else 1
        self._written = _written.setdefault(store, {}).setdefault(name, _Written())
        # Of the last message.
        self.number = store.member.job << _CALL_BITS

    def exchange(self, message: bytes = b"", *, flag: int = 0, to: int | None = None) -> Exchanged:
        """Send a message to all workers, or to the worker ``to``; return those of all."""
        self.number += 1
        slot = self.number % self._slots
        if not self._store.member.is_past():
            self._put(slot, self.number, flag, message)
        self._barrier()
        is_past = self._store.member.is_past()
        flags: list[int | None] = []
        messages: list[bytes | None] = []
        for rank in range(self._store.num_workers):
            first = self._pull(rank, slot, 0, 1)
            number, its_flag, length = _HEAD.unpack_from(first)
            if number != self.number or rank in self._store.member.lost_workers or rank in self.absent:
                flags.append(None)
                messages.append(None)
                continue
            flags.append(its_flag)
            is_mine = to in (None, self._store.rank)
            messages.append(self._content(rank, slot, first, length) if is_mine else b"")
        self._barrier()
        if self._slots == 1:
            self._drop_tail(slot)
        return Exchanged(flags, messages, is_past)

    def publish(self, state: bytes) -> None:
        """Publish a state of this worker for others to continue; the calls before have taken effect everywhere."""
        self._written.published += 1
        self._store.flush()
        slot = self._written.states + self._written.published % _STATES
        self._put(slot, self._written.published, self._store.member.job, state)

    def published(self) -> bytes | None:
        """Return the last state that this worker's predecessor has published; None: there is none."""
        found = self._own(_SLOTS)
        if not found:
            return None
        self._written.published, slot, length, first = max(found)
        return self._content(self._store.rank, slot, first, length)

    def publish_change(self, clock: int, change: bytes) -> None:
        """Publish what the clock that is about to end has changed outside of tables."""
        self._written.changes += 1
        self._put(_CHANGES + self._written.changes % _STATES, clock + 1, self._store.member.job, change)

    def published_change(self, begin: int, end: int) -> bytes | None:
        """Return what the last of the clocks from ``begin`` to ``end`` - 1 that changed anything has published."""
        found = [one for one in self._own(_CHANGES) if begin < one[0] <= end]
        if not found:
            return None
        _, slot, length, first = max(found)
        self._written.changes = slot - _CHANGES  # the next one leaves it as it is
        return self._content(self._store.rank, slot, first, length)

    def _own(self, first_slot: int) -> list[tuple[int, int, int, bytes]]:
        """Return the number, slot, length and first block of what the predecessor has in two slots."""
        found: list[tuple[int, int, int, bytes]] = []
        for slot in range(first_slot, first_slot + _STATES):
            first = self._pull(self._store.rank, slot, 0, 1)
            number, job, length = _HEAD.unpack_from(first)
            if number and job == self._store.member.job:
                found.append((number, slot, length, first))
            self._written.blocks[slot] = -(-(_HEAD.size + length) // _BLOCK)
        return found

    def published_in(self, job: int, workers: int) -> list[list[bytes]]:
        """Return the last two states that each worker of a job has published, by rank, the later one first."""
        published: list[list[bytes]] = []
        for rank in range(workers):
            found: list[tuple[int, bytes]] = []
            for states, others in ((_SLOTS, _OTHER_STATES), (_OTHER_STATES, _SLOTS)):
                for slot in range(states, states + _STATES):
                    first = self._pull(rank, slot, 0, 1)
                    number, its_job, length = _HEAD.unpack_from(first)
                    if number and its_job == job:
                        found.append((number, self._content(rank, slot, first, length)))
                        self._written.states = others
            published.append([content for _, content in sorted(found, reverse=True)])
        return published

    def publish_settings(self, fit: int, settings: bytes) -> None:
        """Publish the settings with which this worker begins a fit."""
        self._put(_SETTINGS, self._store.member.job, fit, settings)

    def settings(self, fit: int) -> dict[int, bytes]:
        """Return the settings with which the workers have begun a fit, by rank; nothing of one that has not."""
        found = {}
        for rank in range(self._store.num_workers):
            first = self._pull(rank, _SETTINGS, 0, 1)
            number, its_fit, length = _HEAD.unpack_from(first)
            if (number, its_fit) == (self._store.member.job, fit):
                found[rank] = self._content(rank, _SETTINGS, first, length)
        return found

    def _put(self, slot: int, number: int, flag: int, content: bytes) -> None:
        """Replace what this worker has in a slot, its first block last."""
        content = _HEAD.pack(number, flag, len(content)) + content
        blocks = -(-len(content) // _BLOCK)
        rows = np.zeros((blocks, _BLOCK), np.float32)
        rows.reshape(-1)[: len(content)] = np.frombuffer(content, np.uint8)
        if blocks > 1:
            self._table.assign(self._keys(self._store.rank, slot, 1, blocks), rows[1:])
        self._table.assign(self._keys(self._store.rank, slot, 0, 1), rows[:1])
        before = self._written.blocks.get(slot, 0)
        if before > blocks:
            self._table.erase(self._keys(self._store.rank, slot, blocks, before))
        self._written.blocks[slot] = blocks

    def _drop_tail(self, slot: int) -> None:
        """Drop all blocks of this worker's slot but the first."""
        if self._written.blocks.get(slot, 0) > 1:
            self._table.erase(self._keys(self._store.rank, slot, 1, self._written.blocks[slot]))
            self._written.blocks[slot] = 1

    def _content(self, rank: int, slot: int, first: bytes, length: int) -> bytes:
        blocks = -(-(_HEAD.size + length) // _BLOCK)
        content = first + (self._pull(rank, slot, 1, blocks) if blocks > 1 else b"")
        return content[_HEAD.size : _HEAD.size + length]

    def _pull(self, rank: int, slot: int, begin: int, end: int) -> bytes:
        rows = self._table.pull(self._keys(rank, slot, begin, end))
        return rows.astype(np.uint8).tobytes()

    @staticmethod
    def _keys(rank: int, slot: int, begin: int, end: int) -> npt.NDArray[np.uint64]:
        first = np.uint64((rank << _RANK_BITS) + (slot << _SLOT_BITS))
        return np.arange(begin, end, dtype=np.uint64) + first
