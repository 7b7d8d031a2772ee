"""ProgressRows: the rows of a fit in their table, written within clocks or at once.

    add, set   this clock's differences, which `push` sends with the gradients that they account for
    assign     takes effect at once: between two meetings of the workers (team.py)
    notes      bytes, in blocks; the first one is written last

A row is *set* within a clock by pushing its difference, modulo 2^64, to what it was: only one worker sets a row.

Under BSP a clock counts on all servers or on none, with its rows. Under SSP and ASP a push takes effect when it
arrives: there the rows of a clock are sent after all servers have its gradients, so a position may lie behind what
counts, and is never ahead of it.

Threads: the one that fits.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.fit_rows import DIM, NOTE, SUFFIX, is_together, place
from shoal.store.base import Store
from shoal.table.table import Table

Row = npt.NDArray[np.int64]  # [DIM], or [n, DIM] of several
Keys = npt.NDArray[np.uint64]

_BYTES = DIM * 8  # of a row


@functools.lru_cache(1 << 12)
def key(kind: int, first: int = 0, second: int = 0) -> int:
    """Return the key of a row that is alone in its place."""
    return int(keys_of(kind, first, second, 1)[0])


def keys_of(kind: int, first: int, second: int, count: int, begin: int = 0) -> Keys:
    """Return the keys of the blocks from ``begin`` on of a place."""
    places = np.arange(begin, begin + count, dtype=np.uint64) + np.uint64(place(kind, first, second))
    return _core.unmix(places) if is_together(kind) else places


@functools.lru_cache(1 << 8)
def _array_of(keys: tuple[int, ...]) -> Keys:
    """Return keys as an array: those of one clock are those of the next one, too."""
    return np.array(keys, np.uint64)


class ProgressRows:
    """The rows of the fits of one model in a store."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        # Of the table.
        self.name = name + SUFFIX
        self._lags = store.num_workers > 1 and not store.consistency.is_bulk
        self._known: dict[int, Row] = {}  # what this worker has set
        self._single: dict[int, Row] = {}  # differences of this clock
        self._several: list[tuple[Keys, Row]] = []
        self._waiting: deque[tuple[int, Keys, Row]] = deque()  # differences of clocks that servers may not have yet

    @property
    def lags(self) -> bool:
        """Whether rows follow behind what they account for."""
        return self._lags

    @functools.cached_property
    def table(self) -> Table:
        """The table, made when it is first needed."""
        return self._store.table(self.name, dim=DIM, dtype="int64")

    # ---- within clocks -----------------------------------------------------------------------------------------------

    def set(self, at: int, row: Row) -> None:
        """Set a row within this clock."""
        before = self._known.get(at)
        self._known[at] = row
        self.add(at, row if before is None else row - before)

    def add(self, at: int, difference: Row) -> None:
        """Add to a row within this clock."""
        mine = self._single.get(at)
        self._single[at] = difference if mine is None else mine + difference

    def add_all(self, keys: Keys, differences: Row) -> None:
        """Add to several rows within this clock."""
        if len(keys):
            self._several.append((keys, differences))

    def knows(self, at: int, row: Row) -> None:
        """Record what a row is that this worker sets from now on."""
        self._known[at] = row

    def known(self, at: int) -> Row:
        """Return a row that this worker sets."""
        return self._known[at]

    def push(self) -> None:
        """Send the rows of the clock that is about to end."""
        if not (self._single or self._several):
            return
        keys = _array_of(tuple(self._single))
        rows = np.concatenate([*self._single.values(), *(its.reshape(-1) for _, its in self._several)]).reshape(-1, DIM)
        if self._several:
            keys = np.concatenate([keys, *(its for its, _ in self._several)])
        self._single, self._several = {}, []
        if not self._lags:
            self.table.push(keys, rows)
            return
        self._waiting.append((self._store.clock, keys, rows))
        counted = self._store.counted_clock
        while self._waiting and self._waiting[0][0] < counted:
            self.table.push(*self._waiting.popleft()[1:])

    def add_now(self, at: int, difference: Row) -> None:
        """Add to a row without waiting for the gradients of this clock."""
        self.table.push(np.array([at], np.uint64), difference[None])

    def settle(self) -> None:
        """Wait until the rows of all clocks so far have arrived."""
        if self._lags:
            self._store.flush()
            for _, keys, rows in self._waiting:
                self.table.push(keys, rows)
            self._waiting.clear()
            self._store.flush()

    # ---- at once -----------------------------------------------------------------------------------------------------

    def pull(self, keys: Keys | Sequence[int]) -> Row:
        """Return rows."""
        found: Row = self.table.pull(np.asarray(keys, np.uint64))
        return found

    def assign(self, keys: Keys | Sequence[int], rows: Row) -> None:
        """Write rows."""
        if len(keys):
            self.table.assign(np.asarray(keys, np.uint64), rows)

    def erase(self, keys: Keys) -> None:
        """Erase rows; those that are not there are ignored."""
        if len(keys):
            self.table.erase(keys)

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def put_note(self, what: int, rank: int, content: bytes, tag: int = 0) -> None:
        """Write a note, in place of the one before it, which stays until this one is complete."""
        head = self.pull([key(NOTE, what, rank)])[0]
        version = int(head[3]) + 1
        blocks = -(-len(content) // _BYTES)
        rows = np.zeros((blocks, DIM), np.int64)
        rows.reshape(-1).view(np.uint8)[: len(content)] = np.frombuffer(content, np.uint8)
        self.assign(self._note_keys(what, rank, version, blocks), rows)
        first = np.zeros((1, DIM), np.int64)
        first[0, :4] = tag, len(content), _core.crc32c(content), version
        self.assign([key(NOTE, what, rank)], first)
        self.erase(self._note_keys(what, rank, version - 1, -(-int(head[1]) // _BYTES)))

    def note(self, what: int, rank: int, tag: int) -> bytes | None:
        """Return a note; None: there is none with this tag."""
        found, length, checksum, version = self.pull([key(NOTE, what, rank)])[0, :4].tolist()
        if not version or found != tag:
            return None
        rows = self.pull(self._note_keys(what, rank, version, -(-length // _BYTES)))
        content = rows.tobytes()[:length]
        return content if _core.crc32c(content) == checksum else None

    def drop_notes(self, what: int, ranks: Iterable[int]) -> None:
        """Erase notes."""
        for rank in ranks:
            _, length, _, version = self.pull([key(NOTE, what, rank)])[0, :4].tolist()
            self.erase(self._note_keys(what, rank, version, -(-length // _BYTES)))
            self.erase(np.array([key(NOTE, what, rank)], np.uint64))

    @staticmethod
    def _note_keys(what: int, rank: int, version: int, blocks: int) -> Keys:
        """Return the keys of a note's blocks, which are in one of two places in turns."""
        return keys_of(NOTE, what, rank, blocks, begin=1 + (version % 2 << 23))
