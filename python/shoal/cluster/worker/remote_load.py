"""Loads in which a worker sends the rows of a checkpoint to the servers.

Servers take the rows of one slot in a message. A section of a checkpoint that was written with another number of slots
is cut again here, by an empty shard of the engine.

Threads: one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.cluster.protocol.tasks import digest_words
from shoal.cluster.worker.channel import Channel
from shoal.table.shard import LocalShard
from shoal.table.spec import TableSpec

Op = _core.Op

_MAX_SECTION_BYTES = 16 << 20  # of rows in one message


class RemoteLoadTarget:
    """New rows of a table, which replace the existing ones at :meth:`finish`.

    The servers read the rows themselves (load.py); where no storage is shared, this object sends them.
    """

    def __init__(self, channel: Channel, table: int, spec: TableSpec, slots: int, base: str) -> None:
        self._channel = channel
        self._base = digest_words(base) if base else []  # that later deltas refer to
        self.number = table  # the number of the table on the servers
        self._spec = spec
        self._slots = slots
        self._sent: list[_core.Call] = []
        self.step = 0
        self._clock = 0

    def reserve(self, rows: list[int], /) -> None:
        """Begin a load with this many rows in each slot of the checkpoint."""
        given = np.asarray(rows, np.uint64)
        if len(given) >= self._slots:
            room = given.reshape(self._slots, -1).sum(axis=1, dtype=np.uint64)
        else:
            share = self._slots // len(given)
            room = np.repeat((given + np.uint64(share - 1)) // np.uint64(share), share)
        self._begin(Op.LOAD_BEGIN, [room], count=len(room)).result()

    def restore(self, rows: int, section: npt.NDArray[np.uint8], /) -> int:
        """Send the rows of a section; return their number without waiting for the servers."""
        hashes = section[: 8 * rows].view(np.uint64)
        shift = np.uint64(64 - self._slots.bit_length() + 1)
        first, last = (hashes[[0, -1]] >> shift).tolist()
        if first == last and section.nbytes <= _MAX_SECTION_BYTES:
            self._send(first, rows, section)
            return rows
        for slot, rows_of_slot, bytes_of_slot in _cut_again(self._spec, rows, section, self._slots):
            self._send(slot, rows_of_slot, bytes_of_slot)
        return rows

    def restore_filter(self, slots: int, slot: int, filter: npt.NDArray[np.uint8], /) -> None:
        """Send the admission filter of a slot, cut into ``slots`` slots; returns without waiting."""
        cut = _cut_for(self._slots, slots, filter.nbytes)
        if cut <= slots:
            self._send_filter(slots, slot, filter)
            return
        scratch = LocalShard.of(self._spec, cut, _core.ThreadPool(1))
        scratch.restore_filter(slots, slot, filter)
        for mine in range(slot * cut // slots, (slot + 1) * cut // slots):
            _, _, piece = scratch.section(mine)
            if len(piece):
                self._send_filter(cut, mine, piece)

    def set_clock(self, table_clock: int, store_clock: int, /) -> None:
        """Set the table's clock, which counts from this worker's clock at the end of the load."""
        self._clock = table_clock

    def _send_filter(self, cut: int, slot: int, filter: npt.NDArray[np.uint8]) -> None:
        at = slot * self._slots // cut
        self._add(self._begin(Op.LOAD_FILTER, [filter], count=cut, slot=at, aux=slot))

    def _send(self, slot: int, rows: int, section: npt.NDArray[np.uint8]) -> None:
        self._add(self._begin(Op.LOAD_ROWS, [section], count=rows, slot=slot))

    def _add(self, future: _core.Call) -> None:
        for call in [call for call in self._sent if call.done()]:
            call.result()  # raises its error
            self._sent.remove(call)
        self._sent.append(future)

    def _begin(self, op: int, payload: list[Any], **what: Any) -> _core.Call:
        return self._channel.begin(op, self.number, payload=payload, **what)

    def finish(self) -> None:
        """Replace the existing rows."""
        for call in self._sent:
            call.result()
        numbers = [self.step, self._clock, *self._base]
        self._begin(Op.LOAD_END, [np.array(numbers, np.uint64)], count=len(numbers)).result()


def _cut_for(own: int, slots: int, size: int) -> int:
    """Return into how many slots to cut data of ``size`` bytes in one of ``slots`` slots: ``own`` or more."""
    finest = 1 << 14
    cut = own
    while cut < finest and size * slots > _MAX_SECTION_BYTES * cut:
        cut *= 2
    return cut


def _cut_again(
    spec: TableSpec, rows: int, section: npt.NDArray[np.uint8], slots: int
) -> list[tuple[int, int, npt.NDArray[np.uint8]]]:
    """Cut a section at the borders of ``slots`` slots, and finer where it would be too long for a message."""
    cut = _cut_for(slots, slots, section.nbytes)
    scratch = LocalShard.of(spec, cut, _core.ThreadPool(1))
    hashes = section[: 8 * rows].view(np.uint64)
    mine = (hashes >> np.uint64(64 - cut.bit_length() + 1)).astype(np.int64)
    scratch.reserve(np.bincount(mine, minlength=cut).tolist())
    scratch.restore(rows, section)
    sections = ((int(slot) * slots // cut, *scratch.section(int(slot))[:2]) for slot in np.unique(mine))
    return list(sections)
