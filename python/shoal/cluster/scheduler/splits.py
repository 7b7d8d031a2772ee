"""Parts: which pieces of the data have been trained on, by whom, and which are still to be given out.

A pass cuts the data into numbered parts. A worker takes one, trains on it, and says so when it takes the next.

    free -> taken -> finished
      ^_______|  its worker died, or left

Whoever asks while every part is taken is told to wait: one of them may come back. If it is so agreed, a part that takes
much longer than the others did is given to a second worker meanwhile, once; the first to finish counts.

Invariants
  P1  While no worker dies and no part is given out twice on purpose, every part is taken exactly once.
  P2  The pass is over when every part was finished, by a worker that was alive then.

Threads: one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

__all__ = ["Parts"]

_ENOUGH = 3  # parts that have to be finished before it is known how long one takes


class Parts:
    """The parts of one pass.

    Parameters
    ----------
    count : int
        How many there are.
    """

    def __init__(self, count: int) -> None:
        if count < 0:
            raise ValueError(f"a pass of {count} parts")
        self.count = count
        self._untouched = 0  # this part and those behind it were never given out
        self._back: deque[int] = deque()  # given out, and given back
        self._taken: dict[int, dict[Hashable, float]] = {}  # part: its workers, and since when
        self._twice: set[int] = set()
        self._finished = 0
        self._seconds = 0.0  # of all parts that were finished

    @property
    def over(self) -> bool:
        """Whether every part is finished."""
        return self._finished == self.count

    @property
    def finished(self) -> int:
        """How many parts are finished."""
        return self._finished

    def take(self, worker: Hashable, now: float, *, reissue: float = 0.0) -> int | None:
        """Give out a part.

        Parameters
        ----------
        worker : hashable
        now : float
            Seconds.
        reissue : float
            A part that takes longer than this many times the mean is given out again; 0 for none.

        Returns
        -------
        int or None
            None if there is none at present.
        """
        part: int | None
        if self._back:
            part = self._back.popleft()
        elif self._untouched < self.count:
            part, self._untouched = self._untouched, self._untouched + 1
        else:
            part = self._slow(worker, now, reissue)
        if part is not None:
            self._taken.setdefault(part, {})[worker] = now
        return part

    def _slow(self, worker: Hashable, now: float, reissue: float) -> int | None:
        if reissue <= 0 or self._finished < _ENOUGH:
            return None
        limit = reissue * self._seconds / self._finished
        slow = [
            (min(since.values()), part)
            for part, since in self._taken.items()
            if part not in self._twice and worker not in since and now - min(since.values()) > limit
        ]
        if not slow:
            return None
        part = min(slow)[1]
        self._twice.add(part)
        return part

    def finish(self, worker: Hashable, part: int, now: float) -> bool:
        """Note that a worker has trained on a part; returns whether it was its to finish, and the first time."""
        since = self._taken.get(part, {}).get(worker)
        if since is None:
            return False
        del self._taken[part]
        self._finished += 1
        self._seconds += now - since
        return True

    def release(self, worker: Hashable) -> list[int]:
        """Take back the parts of a worker that is gone; returns those that are free again, first to be given out."""
        back = []
        for part, since in list(self._taken.items()):
            if since.pop(worker, None) is not None and not since:
                del self._taken[part]
                self._twice.discard(part)
                back.append(part)
        self._back.extendleft(sorted(back, reverse=True))
        return sorted(back)
