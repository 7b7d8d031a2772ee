"""Calls that begin when others are done, for ``after=``. Without I/O or a clock.

    hold(call, [a, b]) -> held --a and b have succeeded--> due: it begins, as if it were submitted then
                               '--one of them has failed-> due: it fails too

Invariants
    H1  A call waits only for calls that were submitted before it: none waits for itself.
    H2  Calls that wait for the same calls become due in the order in which they were submitted.
    H3  `clocks` counts all that is held: the tick of a clock is not sent before its calls have begun or failed.

Threads: one at a time; the owner locks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from shoal.cluster.worker.calls import Call


class _Hold(NamedTuple):
    is_write: bool
    waits_for: dict[Call, None]


class HeldCalls:
    """The calls of a worker that wait for other calls."""

    def __init__(self) -> None:
        # Number of held calls, by clock.
        self.clocks: Counter[int] = Counter()
        self._holds: dict[Call, _Hold] = {}  # in the order of the calls
        self._followers: dict[Call, dict[Call, None]] = {}
        self._due: deque[tuple[Call, Call | None]] = deque()

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, call: Call) -> bool:
        return call in self._holds

    def calls(self) -> list[Call]:
        """Return what is held, in the order of the calls."""
        return list(self._holds)

    def blocker(self, call: Call) -> Call | None:
        """Return the first call that a held one waits for; None: it is due."""
        return next(iter(self._holds[call].waits_for), None)

    def hold(self, call: Call, after: Sequence[Call], *, is_write: bool) -> None:
        """Hold a call until others, one or more that are not settled, have succeeded."""
        waits_for = dict.fromkeys(after)
        self._holds[call] = _Hold(is_write, waits_for)
        self.clocks[call.clock] += 1
        for other in waits_for:
            self._followers.setdefault(other, {})[call] = None

    def release(self, call: Call) -> bool:
        """Hold a call no longer, since it begins or is settled; return ``is_write``."""
        is_write, waits_for = self._holds.pop(call)
        self.clocks[call.clock] -= 1
        if not self.clocks[call.clock]:
            del self.clocks[call.clock]
        for other in waits_for:
            del self._followers[other][call]
        return is_write

    def settled(self, call: Call) -> None:
        """Make due what has waited for a call that is settled now."""
        for follower in self._followers.pop(call, ()):
            waits_for = self._holds[follower].waits_for
            del waits_for[call]
            if call.error is not None:
                self._due.append((follower, call))
            elif not waits_for:
                self._due.append((follower, None))

    def take_due(self) -> tuple[Call, Call | None] | None:
        """Return a held call that is to begin, or to fail because of the second one; None: no call is due."""
        while self._due:
            due = self._due.popleft()
            if due[0] in self._holds:
                return due
        return None
