"""GlooGroup: the workers of a fit, connected to each other by gloo: sums over all of them.

    worker 0    open_meeting --place--> the others: enter_meeting       all: wait_for_all, then connect to all

It is not torch's default group, which belongs to the user's program. When a worker ends, its connections end, and the
sum fails at the others at once. A worker that does not come is waited for, since it may be slow: twice a second `check`
says whether to go on. A sum that is given up cannot be taken back from gloo, whose thread keeps it until it times out;
a thread of its own then waits for that, so that no other thread does.

Threads: the one that trains, and the one of a sum that was given up.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shoal.store.base import Store

_CHECK_SECONDS = 0.5  # between two calls of `check`
_ATTEMPT_SECONDS = 2.0  # of one attempt to enter, in which nothing else is seen
_POLL_SECONDS = 0.01  # between two looks at who has come

_torch: Any = dist  # whose stubs lack some names


def open_meeting(store: Store, seconds: float) -> tuple[Any, str]:
    """Open the place at which workers find each other: return it, and where it is."""
    timeout = datetime.timedelta(seconds=seconds)
    meeting = _torch.TCPStore(store.host, 0, store.num_workers, is_master=True, timeout=timeout, wait_for_workers=False)
    return meeting, f"{store.host} {meeting.port}"


def enter_meeting(store: Store, place: str, seconds: float, check: Callable[[], None]) -> Any:
    """Enter the place that another worker has opened; ``check`` raises an error to give that up.

    RuntimeError: it cannot be reached; ValueError: it is none.
    """
    host, _, port = place.rpartition(" ")
    deadline = time.monotonic() + seconds
    attempt = datetime.timedelta(seconds=_ATTEMPT_SECONDS)
    while True:
        check()
        try:
            meeting = _torch.TCPStore(host, int(port), store.num_workers, timeout=attempt, wait_for_workers=False)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        else:
            meeting.set_timeout(datetime.timedelta(seconds=seconds))
            return meeting


def wait_for_all(store: Store, meeting: Any, seconds: float, check: Callable[[], None]) -> None:
    """Wait until all workers have entered; ``check`` raises an error to give that up, which gloo could not.

    RuntimeError: one does not come in time, or the place has ended.
    """
    meeting.set(f"worker {store.rank}", "is here")
    deadline, come = time.monotonic() + seconds, 0
    while come < store.num_workers:
        if meeting.check([f"worker {come}"]):
            come += 1
            continue
        check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"worker {come} did not come within {seconds:g} s")
        time.sleep(_POLL_SECONDS)


class GlooGroup:
    """The connections of a worker to all others, which are made, and sum, within a number of seconds."""

    def __init__(self, store: Store, meeting: Any, connect_seconds: float, sum_seconds: float) -> None:
        self._meeting = meeting
        self._options = _torch.AllreduceOptions()
        self._options.timeout = datetime.timedelta(seconds=sum_seconds)
        timeout = datetime.timedelta(seconds=connect_seconds)
        self._group = _torch.ProcessGroupGloo(meeting, store.rank, store.num_workers, timeout)

    def all_reduce(self, numbers: torch.Tensor, check: Callable[[], None]) -> None:
        """Sum numbers over all workers, in place; ``check`` raises an error to give the sum up.

        RuntimeError: a connection has ended, or a worker did not come in time. The numbers are then not to be used.
        """
        work = self._group.allreduce([numbers], self._options)
        slice_of_time = datetime.timedelta(seconds=_CHECK_SECONDS)
        while True:
            try:
                work.wait(slice_of_time)
                return
            except RuntimeError:  # the slice of time is over, or the sum has failed
                if work.is_completed():
                    work.wait()  # its own error; none if it has ended since
                    return
            try:
                check()
            except BaseException:
                threading.Thread(target=_wait_for_end, args=(work, self._group), daemon=True).start()
                raise


def _wait_for_end(work: Any, group: Any) -> None:
    """Keep a group until its last sum has ended, since its end waits for that."""
    try:
        work.wait()
    except RuntimeError:
        del group
