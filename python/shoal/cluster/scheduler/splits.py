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

from collections import deque
from typing import Self

from shoal.cluster.scheduler.inputs import SplitState

_MIN_FINISHED = 3  # splits, before their mean time is used


class SplitTracker:
    """The splits of one pass."""

    def __init__(self, count: int) -> None:
        if count < 0:
            raise ValueError(f"a pass of {count} splits")
        self.count = count
        self._untouched = 0  # this split and later ones were never assigned
        self._back: deque[int] = deque()  # splits that are free again
        self._taken: dict[int, dict[bytes, float]] = {}  # split: its workers, and since when
        self._twice: set[int] = set()
        self._finished = 0
        self._seconds = 0.0  # of all finished splits

    @property
    def over(self) -> bool:
        """Whether every split is finished."""
        return self._finished == self.count

    @property
    def finished(self) -> int:
        """Number of finished splits."""
        return self._finished

    def take(self, worker: bytes, now: float, *, reissue: float = 0.0) -> int | None:
        """Assign a split."""
        split: int | None
        if self._back:
            split = self._back.popleft()
        elif self._untouched < self.count:
            split, self._untouched = self._untouched, self._untouched + 1
        else:
            split = self._slow(worker, now, reissue)
        if split is not None:
            self._taken.setdefault(split, {})[worker] = now
        return split

    def _slow(self, worker: bytes, now: float, reissue: float) -> int | None:
        if reissue <= 0 or self._finished < _MIN_FINISHED:
            return None
        limit = reissue * self._seconds / self._finished
        slow = [
            (min(since.values()), split)
            for split, since in self._taken.items()
            if split not in self._twice and worker not in since and now - min(since.values()) > limit
        ]
        if not slow:
            return None
        split = min(slow)[1]
        self._twice.add(split)
        return split

    def finish(self, worker: bytes, split: int, now: float) -> bool:
        """Mark a split as finished by a worker; returns whether the worker had it and no other was first."""
        since = self._taken.get(split, {}).get(worker)
        if since is None:
            return False
        del self._taken[split]
        self._finished += 1
        self._seconds += now - since
        return True

    def release(self, worker: bytes) -> list[int]:
        """Free the splits of a worker; returns those that are free again, which are assigned first."""
        back = []
        for split, since in list(self._taken.items()):
            if since.pop(worker, None) is not None and not since:
                del self._taken[split]
                self._twice.discard(split)
                back.append(split)
        self._back.extendleft(sorted(back, reverse=True))
        return sorted(back)

    def save(self) -> SplitState:
        """Return the state."""
        return SplitState(
            count=self.count,
            untouched=self._untouched,
            back=list(self._back),
            taken=[(split, list(since.items())) for split, since in self._taken.items()],
            twice=sorted(self._twice),
            finished=self._finished,
            seconds=self._seconds,
        )

    @classmethod
    def restore(cls, state: SplitState) -> Self:
        """Return a tracker in a saved state."""
        made = cls(state.count)
        made._untouched, made._finished, made._seconds = state.untouched, state.finished, state.seconds
        made._back.extend(state.back)
        made._taken = {split: dict(since) for split, since in state.taken}
        made._twice = set(state.twice)
        return made
