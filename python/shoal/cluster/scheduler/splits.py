"""The assignment of the splits of one pass over the data to workers.

A pass cuts the data into numbered splits. A worker takes one, trains on it, and reports it finished when it takes the
next.

    free -> taken -> finished
      ^_______|  its worker died, or left

A worker that asks while all splits are taken waits, since one of them may become free again. If the job allows it, a
split that takes much longer than the others is assigned to a second worker too, once (a backup task, as in MapReduce);
the first worker to finish counts.

Invariants
  P1  While no worker dies and no split is assigned twice on purpose, every split is taken exactly once.
  P2  The pass is over when every split was finished, by a worker that was alive then.

Threads: one.
"""

from __future__ import annotations

import msgspec

_MIN_FINISHED = 3  # splits, before their mean time is used


class SplitTracker(msgspec.Struct, forbid_unknown_fields=True):
    """The splits of one pass."""

    count: int
    untouched: int = 0  # this split and later ones were never assigned
    back: list[int] = []  # splits that are free again; the first is assigned next
    taken: dict[int, dict[bytes, float]] = {}  # split: its workers, and since when
    twice: set[int] = set()  # splits that were assigned to a second worker
    finished: int = 0  # number of them
    seconds: float = 0.0  # of all finished splits

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"a pass of {self.count} splits")

    @property
    def over(self) -> bool:
        """Whether every split is finished."""
        return self.finished == self.count

    def take(self, worker: bytes, now: float, *, reissue: float = 0.0) -> int | None:
        """Assign a split."""
        split: int | None
        if self.back:
            split = self.back.pop(0)
        elif self.untouched < self.count:
            split, self.untouched = self.untouched, self.untouched + 1
        else:
            split = self._slow(worker, now, reissue)
        if split is not None:
            self.taken.setdefault(split, {})[worker] = now
        return split

    def _slow(self, worker: bytes, now: float, reissue: float) -> int | None:
        if reissue <= 0 or self.finished < _MIN_FINISHED:
            return None
        limit = reissue * self.seconds / self.finished
        slow = [
            (min(since.values()), split)
            for split, since in self.taken.items()
            if split not in self.twice and worker not in since and now - min(since.values()) > limit
        ]
        if not slow:
            return None
        split = min(slow)[1]
        self.twice.add(split)
        return split

    def finish(self, worker: bytes, split: int, now: float) -> bool:
        """Mark a split as finished by a worker; returns whether the worker had it and no other was first."""
        since = self.taken.get(split, {}).get(worker)
        if since is None:
            return False
        del self.taken[split]
        self.finished += 1
        self.seconds += now - since
        return True

    def release(self, worker: bytes) -> list[int]:
        """Free the splits of a worker; returns those that are free again, which are assigned first."""
        back = []
        for split, since in list(self.taken.items()):
            if since.pop(worker, None) is not None and not since:
                del self.taken[split]
                self.twice.discard(split)
                back.append(split)
        self.back[:0] = sorted(back)
        return sorted(back)
