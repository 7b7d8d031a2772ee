"""Membership: what a worker knows of its place in its job."""

from collections.abc import Mapping
from dataclasses import dataclass, field

BARRIER = "barrier"  # the name of those of `Store.barrier`


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """A worker's place in its job; by default that of one that works alone. Read by any thread.

    Attributes
    ----------
    job : int
        Number of the job.
    job_name : str
        Empty: it has none.
    joined_at : int
        Clock at which this worker joined: above 0 if it replaced a worker that had died.
    is_replacement : bool
        Whether this worker replaces one that died, and continues after its last counted clock, `joined_at`. Barriers
        that its predecessor has passed do not wait: a program that begins anew reaches the other workers at the barrier
        at which its predecessor would have.
    replacement_seconds : float
        How long the other workers wait for the replacement of one that died; 0: not at all.
    workers_range : (int, int), optional
        The least and the greatest number of workers, if workers may join and leave while a model is fitted.
    continued : int, optional
        Number of the job whose workers have handed over their states to this one.
    barriers : dict of int
        How many barriers of each name this worker has passed; set by a replacement that begins at a later one.
    past_barriers : mapping of int
        How many its predecessor, and so all others, had passed.
    leaves_early : bool
        Whether a fit was ended early here: others continue it, if their number may change.
    splits_loops : int
        Loops over `Store.splits` under way, in which workers may do different numbers of steps.
    gone : dict of (int, int)
        Job and rank of workers that were declared dead, or have ended their work early, in the order in which all of
        the job learn of it.
    changing : set of int
        Jobs of which a worker waits to join, or has left or died: each hands over its state, and leaves the job.
    """

    job: int = 0
    job_name: str = ""
    joined_at: int = 0
    is_replacement: bool = False
    replacement_seconds: float = 0.0
    workers_range: tuple[int, int] | None = None
    continued: int | None = None
    barriers: dict[str, int] = field(default_factory=dict)
    past_barriers: Mapping[str, int] = field(default_factory=dict)
    leaves_early: bool = False
    splits_loops: int = 0
    gone: dict[tuple[int, int], None] = field(default_factory=dict)
    changing: set[int] = field(default_factory=set)

    @property
    def gone_in_order(self) -> list[int]:
        """Ranks of workers of the job that have died or ended their work early, the first one first."""
        return [rank for job, rank in list(self.gone) if job == self.job]  # it grows in another thread

    @property
    def lost_workers(self) -> frozenset[int]:
        """Ranks of workers of the job that have died or ended their work early."""
        return frozenset(self.gone_in_order)

    @property
    def workers_change(self) -> bool:
        """Whether all workers of the job are to hand over their states, and to leave it."""
        return self.job in self.changing

    @property
    def takes_splits(self) -> bool:
        """Whether this worker is in a loop over `Store.splits`."""
        return self.splits_loops > 0

    def is_past(self, barrier: str = BARRIER) -> bool:
        """Whether all others have passed the barrier of this name that comes next."""
        return self.barriers.get(barrier, 0) < self.past_barriers.get(barrier, 0)

    def passed(self, barrier: str) -> None:
        """Count a barrier that this worker has passed."""
        self.barriers[barrier] = self.barriers.get(barrier, 0) + 1
