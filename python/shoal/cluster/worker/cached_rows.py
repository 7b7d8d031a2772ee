"""The rows of one table that a worker keeps, and the gradients that it holds back. Without I/O or a clock.

``_core.RowCache`` has the rows; this module decides what is sent, in which order, and what an answer may become. It is
used by :mod:`shoal.cluster.worker.cached_shard`, and by a simulated cluster.

    pull   the copies that are new enough; the others from the servers, after their own sums were sent
    push   added up where the row has an entry, or with local steps where it has a copy; otherwise sent
    tick   sums that began `staleness` clocks before, or earlier, are sent before the clock ends

What a pull sees. Let s be the staleness of the cache, and S that of the job.

    SSP    A push of clock k is sent before the tick of clock k + s. So a row that includes f clocks of the servers
           includes all pushes that workers made in clocks below f - s. A pull at clock c has to see those of clocks
           below c - S: it may use rows that include c + s - S clocks. What it fetches waits until the servers have as
           many and some more, as a pull of a later clock does (`ahead`), and the answer says how many they are
           (`included`).
    ASP    A pull at clock c uses rows that were fetched at clock c - s or later.

Invariants
    I1  A copy includes all pushes of its key that this worker has sent: what is sent removes the copy, or with local
        steps is in it; an answer becomes one only if all pushes that were sent before it had been acknowledged, or none
        was sent again.
    I2  One worker never sees an older row after a newer one (invariant I4 of csrc/cache/row_cache.h).
    I3  After `end_clock` at clock c no sum is left that began in clock c - s or before.

Threads: any; a lock orders them. Calls are submitted under it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.errors import ShoalError
from shoal.table.arrays import Counts, Rows

Op = _core.Op

_ANY_CLOCK = 2**32 - 1
_READERS = 2**32 - 1  # numbers of pulls are 1 to this


Submit = Callable[..., _core.Call]  # submits a pull or a push of the table


class CachedPull:
    """A pull that some rows of are here. Made by :class:`CachedRows`."""

    __slots__ = (
        "_fetched",
        "_joined",
        "_owner",
        "_readers",
        "_rest",
        "call",
        "clock",
        "error",
        "mark",
        "reader",
        "rows",
    )

    def __init__(self, owner: CachedRows, reader: int, clock: int, rows: Rows) -> None:
        self._owner = owner
        self.reader = reader
        self.clock = clock
        self.rows = rows
        self.mark: tuple[int, list[_core.Call]] | None = (
            None  # repetitions before pushes that are not acknowledged, and these
        )
        self.call: _core.Call | None = None  # what is fetched
        self.error: ShoalError | None = None
        # Positions, None if the answer is all rows; hashes, their begins of slots, the array for the answer, and
        # whether it is of whole rows.
        self._fetched: tuple[_Positions, npt.NDArray[np.uint64], npt.NDArray[np.uint64], Rows, bool] | None = None
        self._joined: tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]] | None = None
        self._readers: list[int] = []
        self._rest: CachedPull | None = None  # the joined rows that another pull has not brought

    @property
    def done(self) -> bool:
        """Whether all rows are there, or it has failed. Never blocks."""
        return self.advance() is None

    @property
    def calls(self) -> list[_core.Call]:
        """Calls of this pull and of those that it waits for."""
        with self._owner.lock:
            others = [self._owner.pulls[reader] for reader in self._readers if reader in self._owner.pulls]
            return [pull.call for pull in (self, *others) if pull.call is not None]

    def advance(self) -> _core.Call | None:
        """Do what can be done; return a call that this pull waits for, or None if it is done."""
        with self._owner.lock:
            return self._owner.advance(self)


class CachedRows:
    """The rows that a worker keeps of a table."""

    def __init__(
        self,
        cache: _core.RowCache,
        *,
        dim: int,
        slots: int,
        local_steps: bool = False,
        staleness: int,
        waits: int | None,
        submit: Submit,
        clock: Callable[[], int],
        repetitions: Callable[[], int],
    ) -> None:
        self._cache = cache
        self._dim = dim
        self._width = cache.width
        self._slots = slots
        self._local_steps = local_steps
        self._staleness = staleness
        self._waits = waits
        # What is fetched waits for a newer row than it needs, so that the copy can be used for some clocks.
        self._ahead = 0 if waits is None else staleness + min(staleness, (waits - staleness) // 2)
        self._submit = submit
        self._clock = clock
        self._repetitions = repetitions
        self._reader = 0
        self._unacknowledged: list[_core.Call] = []  # pushes
        self._mark = 0  # repetitions before the first of them
        # May be held while the clock ends.
        self.lock = threading.RLock()
        # Pulls that have not brought their rows, by their numbers.
        self.pulls: dict[int, CachedPull] = {}

    # --- pulls ------------------------------------------------------------------------------------------------------

    def pull(self, hashes: npt.NDArray[np.uint64], rows: Rows) -> CachedPull:
        """Read rows, here where they are new enough."""
        with self.lock:
            return self._read(hashes, rows, self._clock(), may_join=True)

    def pull_from_servers(
        self,
        hashes: npt.NDArray[np.uint64],
        begins: npt.NDArray[np.uint64],
        rows: Rows,
        after: Sequence[_core.Call] = (),
    ) -> CachedPull:
        """Read rows from the servers, with all pushes of this worker."""
        with self.lock:
            self._send_sums(self._cache.send_rows(hashes, self._slots))
            pull = self._begin(self._clock(), rows)
            self._fetch(pull, None, hashes, begins, rows, after)
            return pull

    def _begin(self, clock: int, rows: Rows) -> CachedPull:
        for pull in list(self.pulls.values()):
            if pull.call is not None and pull.call.done():
                self._finish(pull)  # perhaps the caller never waits for it
        self._reader = self._reader % _READERS + 1
        return CachedPull(self, self._reader, clock, rows)

    def _read(self, hashes: npt.NDArray[np.uint64], rows: Rows, clock: int, *, may_join: bool) -> CachedPull:
        pull = self._begin(clock, rows)
        fetched, some, begins, joined, pull._readers, sums = self._cache.read(
            hashes, self._needed(clock), pull.reader, may_join, rows, self._slots
        )
        if len(joined):
            pull._joined = (joined, hashes[joined])
        self._send_sums(sums)  # before what is fetched: the copies will include them
        if len(fetched):
            is_all = len(fetched) == len(hashes)
            whole = self._local_steps
            out = rows if is_all and not whole else np.empty((len(fetched), self._width), np.float32)
            self._fetch(pull, None if out is rows else fetched, some, begins, out, (), whole=whole)
        return pull

    def _needed(self, clock: int) -> int:
        """Return how many clocks a row has to include for a pull of this clock."""
        return max(0, clock - self._staleness if self._waits is None else clock + self._staleness - self._waits)

    def _fetch(
        self,
        pull: CachedPull,
        positions: _Positions,
        hashes: npt.NDArray[np.uint64],
        begins: npt.NDArray[np.uint64],
        out: Rows,
        after: Sequence[_core.Call],
        *,
        whole: bool = False,
    ) -> None:
        self._unacknowledged = [call for call in self._unacknowledged if not call.done()]
        if self._unacknowledged:
            pull.mark = self._mark, list(self._unacknowledged)
        is_dated = self._waits is not None
        pull._fetched = positions, hashes, begins, out, whole
        self.pulls[pull.reader] = pull
        try:
            pull.call = self._submit(
                Op.PULL,
                hashes=hashes,
                begins=begins,
                out=out,
                dim=out.shape[1],
                ahead=self._ahead,
                dated=is_dated,
                whole=whole,
                after=after,
            )
        except BaseException:
            self._cache.fill(hashes, pull.reader, 0, False, _NOTHING)
            del self.pulls[pull.reader]
            raise

    def _finish(self, pull: CachedPull) -> None:
        """Take the answer to what a pull has fetched."""
        call, fetched = pull.call, pull._fetched
        assert call is not None
        assert fetched is not None
        positions, hashes, begins, out, whole = fetched
        pull._fetched = None
        pull.error = call.error
        del self.pulls[pull.reader]
        in_order = self._came_in_order(pull)
        if self._local_steps and call.error is None and not in_order:
            # It may lack a change that the worker has seen in its copy: ask again once that has arrived.
            self._cache.fill(hashes, pull.reader, 0, False, _NOTHING)
            self._fetch(pull, positions, hashes, begins, out, self._unacknowledged, whole=whole)
            pull.mark = None
            return
        is_kept = call.error is None and in_order and whole == self._local_steps
        self._cache.fill(hashes, pull.reader, self._included(pull), is_kept, out if is_kept else _NOTHING)
        if call.error is not None:
            return
        if whole:
            assert positions is not None
            self._cache.copy_weights_of(out, positions, pull.rows)
        elif positions is not None:
            _core.scatter_rows(positions, out, pull.rows, self._dim)

    def _included(self, pull: CachedPull) -> int:
        """Return how many clocks the rows that a pull has fetched include."""
        assert pull.call is not None
        return pull.clock if self._waits is None else pull.call.included or 0

    def _came_in_order(self, pull: CachedPull) -> bool:
        """Whether an answer includes all pushes that were sent before its request."""
        if pull.mark is None:
            return True
        repetitions, pushes = pull.mark
        return repetitions == self._repetitions() and all(call.done() for call in pushes)

    def advance(self, pull: CachedPull) -> _core.Call | None:
        """Do what can be done of a pull; return a call that it waits for, or None if it is done."""
        while pull._fetched is not None:
            assert pull.call is not None
            if not pull.call.done():
                return pull.call
            self._finish(pull)
        if pull.error is not None:
            return None
        while pull._readers:
            other = self.pulls.get(pull._readers[-1])
            if other is not None and other.call is not None:
                if not other.call.done():
                    return other.call
                self._finish(other)
            pull._readers.pop()
        if pull._joined is not None:
            positions, hashes = pull._joined
            if pull._rest is None:
                rows = np.empty((len(hashes), self._dim), np.float32)
                pull._rest = self._read(hashes, rows, pull.clock, may_join=False)
            waits_for = self.advance(pull._rest)
            if waits_for is not None:
                return waits_for
            pull.error = pull._rest.error
            if pull.error is None:
                _core.scatter_rows(positions, pull._rest.rows, pull.rows, self._dim)
            pull._joined = None
        return None

    # --- pushes -----------------------------------------------------------------------------------------------------

    def push(self, hashes: npt.NDArray[np.uint64], grads: Rows, counts: Counts | None) -> _core.Call | None:
        """Hold gradients back where their rows have an entry, and send the others."""
        with self.lock:
            return self._send(self._cache.add(hashes, grads, counts, self._clock(), self._slots))

    def push_to_servers(
        self, hashes: npt.NDArray[np.uint64], grads: Rows, counts: Counts | None, after: Sequence[_core.Call] = ()
    ) -> list[_core.Call]:
        """Send gradients with those that were held back of the same rows."""
        with self.lock:
            passed = self._cache.add(hashes, grads, counts, self._clock(), self._slots)
            sums = self._cache.send_rows(hashes, self._slots)
            return [call for call in (self._send(passed, after), self._send_sums(sums, after)) if call is not None]

    def end_clock(self) -> None:
        """Send what may be held back no longer, before the worker ticks."""
        with self.lock:
            first = self._clock() - self._staleness
            if first >= 0 and self._cache.sums:
                self._send_sums(self._cache.send_older(first, self._slots))

    def flush(self) -> list[_core.Call]:
        """Send all that is held back; return its push, if there is one, and those that are not acknowledged yet."""
        with self.lock:
            self._send_sums(self._cache.send_older(_ANY_CLOCK, self._slots))
            self._unacknowledged = [call for call in self._unacknowledged if not call.done()]
            return list(self._unacknowledged)

    def forget(self) -> None:
        """Send all that is held back, and keep no row: the next pulls read from the servers."""
        with self.lock:
            self.flush()
            self._cache.forget()

    def _send_sums(self, sums: _core._Sums | None, after: Sequence[_core.Call] = ()) -> _core.Call | None:
        return self._send(sums, after, whole=self._local_steps)

    def _send(
        self, sums: _core._Sums | None, after: Sequence[_core.Call] = (), *, whole: bool = False
    ) -> _core.Call | None:
        if sums is None:
            return None
        hashes, begins, grads, counts = sums
        self._unacknowledged = [call for call in self._unacknowledged if not call.done()]
        if not self._unacknowledged:
            self._mark = self._repetitions()
        call = self._submit(
            Op.PUSH,
            hashes=hashes,
            begins=begins,
            values=grads,
            counts=counts,
            dim=grads.shape[1],
            after=after,
            whole=whole,
        )
        self._unacknowledged.append(call)
        return call

    def metrics(self) -> dict[str, int]:
        """Return the counts of the cache, by name: see `docs/cache.md`."""
        with self.lock:
            return self._cache.stats()


_Positions = npt.NDArray[np.uint32] | None
_NOTHING = np.empty((0, 1), np.float32)
