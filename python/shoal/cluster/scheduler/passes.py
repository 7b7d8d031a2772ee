"""Passes over the data: which worker of a job gets which split. Threads: a function of its arguments."""

from __future__ import annotations

from shoal.cluster.protocol.messages import (
    ErrorReply,
    SplitReply,
    TakeSplit,
)
from shoal.cluster.protocol.records import ReplyBody
from shoal.cluster.scheduler.splits import SplitTracker
from shoal.cluster.scheduler.state import DataPass, Job, WorkerPeer

_MAX_SPLITS = 1 << 24
_MAX_PASSES = 1024  # unfinished ones


def take_split(job: Job, worker: WorkerPeer, take: TakeSplit, now: float) -> ReplyBody:
    """Return the reply to a member's request for a split of the data."""
    if take.pass_number < job.first_pass:
        return SplitReply(None, take.clock if job.consistency.mode == "asp" else job.passes_end)
    if take.pass_number not in job.passes:
        if not 0 <= take.count < _MAX_SPLITS:
            return ErrorReply("input", f"a pass of {take.count} splits: cut the data into larger ones")
        if len(job.passes) >= _MAX_PASSES:
            return ErrorReply(
                "input", f"{len(job.passes)} passes over the data are unfinished: finish one of them first"
            )
        job.passes[take.pass_number] = DataPass(splits=SplitTracker(take.count), digest=take.digest)
    one = job.passes[take.pass_number]
    if (take.count, take.digest) != (one.splits.count, one.digest):
        text = (
            f"{worker} cuts the data of pass {take.pass_number} into other splits than the worker that began it: "
            "let all workers read the same files, of the same sizes, with the same split_bytes"
        )
        return ErrorReply("input", text)
    job.reached[worker.rank] = max(job.reached.get(worker.rank, -1), take.pass_number)
    job.forget_passes()
    if take.finished >= 0:
        one.splits.finish(worker.sender, take.finished, now)
    for other in job.passes.values():  # a worker has one split at a time: an unfinished one is free again
        other.splits.release(worker.sender)
    if not one.splits.over:
        return SplitReply(one.splits.take(worker.sender, now, reissue=take.reissue), None)
    one.clocks[worker.rank] = take.clock
    if one.end is None and all(
        rank in one.clocks or job.reached.get(rank, -1) > take.pass_number for rank in job.members
    ):
        # A worker has ticked once at most since it reported its clock.
        one.end = max(one.clocks.values()) + (len(job.members) > 1)
    return SplitReply(None, take.clock if job.consistency.mode == "asp" else one.end)
