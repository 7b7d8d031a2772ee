"""The jobs of a cluster by name: the default job, whose name is empty, and any number of named ones.

Each has workers, ranks, barriers and passes of its own (jobs.py), so a worker of one is never waited for by another. A
name is free again when the last worker of its job has left or died, and no other waits for it.

Threads: one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from shoal.cluster.protocol.messages import ErrorReply, Join
from shoal.cluster.scheduler.inputs import JobLineState, MembershipState
from shoal.cluster.scheduler.jobs import Jobs
from shoal.cluster.scheduler.members import WorkerPeer
from shoal.cluster.scheduler.peers import Peers

_MAX_NAMES = 64  # of jobs at the same time


class NamedJobs:
    """The default job and the named ones."""

    def __init__(self, peers: Peers, make: Callable[[str], Jobs]) -> None:
        self._peers = peers
        self._make = make
        self.default = make("")
        self._named: dict[str, Jobs] = {}  # in the order in which they began

    @property
    def all(self) -> list[Jobs]:
        """The jobs, the default one first."""
        return [self.default, *self._named.values()]

    @property
    def named(self) -> dict[str, Jobs]:
        """The named jobs, in the order in which their first workers came."""
        return self._named

    def save(self) -> dict[str, Any]:
        """Return the fields of :class:`.MembershipState` that are kept here."""
        named = {name: JobLineState(**jobs.save()) for name, jobs in self._named.items()}
        return {**self.default.save(), "named": named}

    def restore(self, state: MembershipState) -> None:
        """Take a saved state."""
        kept = {name: getattr(state, name) for name in JobLineState.__struct_fields__}
        self.default.restore(JobLineState(**kept))
        for name, line in state.named.items():
            self._named[name] = self._make(name)
            self._named[name].restore(line)

    def of(self, worker: WorkerPeer) -> Jobs:
        """Return the jobs of the name that a worker has asked for."""
        return self._named.get(worker.wants.job, self.default)

    def by_name(self, name: str) -> Jobs:
        """Return the jobs of a name that is in use."""
        return self._named[name] if name else self.default

    def join(self, worker: WorkerPeer, number: int, join: Join) -> None:
        """Process the request of a worker to join."""
        name = join.job
        if worker.join or not name:
            self.of(worker).join(worker, number, structs.replace(join, job=worker.wants.job))
            return
        fault = ""
        if name not in self._named and len(self._named) >= _MAX_NAMES:
            fault = f"there are {len(self._named)} named jobs, the maximum: job {name!r} can begin when one has ended"
        elif join.workers is None:
            fault = f"job {name!r} needs its number of workers: pass workers=N, the same for each of its workers"
        elif join.most:
            fault = (
                f"the number of workers of job {name!r} cannot change, got {join.workers} to {join.most}: pass one "
                "number, or join the job without a name"
            )
        if fault:
            self._peers.reply(worker, number, ErrorReply("input", fault))
            return
        self._named.setdefault(name, self._make(name)).join(worker, number, join)

    def forget_ended(self) -> None:
        """Free the names that no worker uses or waits for."""
        for name in [name for name, jobs in self._named.items() if jobs.is_unused]:
            del self._named[name]
