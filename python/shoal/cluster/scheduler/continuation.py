"""What the next job continues, when the number of workers has changed or one of them has died.

    job    worker 0 hands over, leaves    worker 1 dies: it is fenced and dismissed    worker 2 hands over, leaves
    next   begins then: which pushes of all three count is known, and no other ones follow

If no worker of a job has begun to learn, the next one continues what this one had continued.

Threads: one.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.base.plural import counted
from shoal.cluster.protocol.messages import OrderReply
from shoal.cluster.scheduler.state import Continuation, Job


def least_clock(fenced: Iterable[OrderReply]) -> int:
    """Return the least clock that a fenced worker has reached at any endpoint."""
    results = list(fenced)
    last = max(done.result for done in results)
    return min((done.least for done in results if done.least is not None), default=last)


def continuation_of(job: Job, *, until: float) -> Continuation:
    """Return what the next job continues, after one whose workers have handed over their states."""
    expected = min(job.most, sum(job.handed_over.values()) + job.coming)
    return Continuation(job=job.number if job.begun else job.continues, expected=expected, until=until)


def why_over(job: Job) -> str:
    """Return the message for a worker that has waited to take part in a job that no worker continues."""
    text = "the job that this worker waited to take part in has ended"
    if len(job.dead) == job.size:
        text += (
            f": all of its {counted(job.size, 'worker')} have died, and none has handed over its state; start the "
            "program again, with resume=True (--resume) if its fit writes checkpoints"
        )
    return text
