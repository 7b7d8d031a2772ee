"""What the next job continues, when the number of workers has changed or one of them has died.

    job    worker 0 hands over, leaves    worker 1 dies: it is fenced, its counted clock is known    worker 2 hands over
    next   states of 0 and 2 as they are; of 1 the last one that it has published, and what has counted since

All members of a job learn at the same barrier that one of them has died, or within their pass. If that is before any of
them has begun to learn, the next job continues what this one had continued.

Threads: one.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.base.plural import counted
from shoal.cluster.protocol.messages import LostWorker, OrderReply
from shoal.cluster.scheduler.state import Continuation, Job


def least_clock(fenced: Iterable[OrderReply]) -> int:
    """Return the least clock that a fenced worker has reached at any endpoint."""
    results = list(fenced)
    last = max(done.result for done in results)
    return min((done.least for done in results if done.least is not None), default=last)


def lost_worker(job: Job, rank: int, fenced: Iterable[OrderReply]) -> LostWorker:
    """Return from which clock on another worker repeats what a dead one did, which all servers have fenced."""
    results = list(fenced)
    last = max(done.result for done in results)
    if job.consistency.mode == "bsp":
        return LostWorker(rank, last)
    least = least_clock(results)
    return LostWorker(rank, least, last - least + 1)


def lost_ranks(job: Job) -> tuple[int, ...]:
    """Return the ranks of workers that died before they had handed over their states, if their number may change."""
    return tuple(sorted(job.dead - job.handed_over.keys())) if job.most else ()


def continuation_of(job: Job, *, until: float) -> Continuation:
    """Return what the next job continues, after one whose workers have handed over their states."""
    number, size, lost = job.continues, job.continued, job.continued_lost
    if job.begun:
        number, size = job.number, job.size
        lost = tuple(one for one in job.lost if one.rank not in job.handed_over)
    expected = min(job.most, sum(job.handed_over.values()) + job.coming)
    return Continuation(job=number, size=size, expected=expected, until=until, lost=lost)


def why_over(job: Job) -> str:
    """Return the message for a worker that has waited to take part in a job that no worker continues."""
    text = "the job that this worker waited to take part in has ended"
    if len(job.dead) == job.size:
        text += (
            f": all of its {counted(job.size, 'worker')} have died, and none has handed over its state; start the "
            "program again, with resume=True (--resume) if its fit writes checkpoints"
        )
    return text
