"""Planted bugs in clusters with two jobs: what mixes up the workers or the orders of both.

name -> (cluster, faults, part of the violation)
"""

import types

from shoal import _core
from shoal.cluster.protocol import messages as m
from shoal.cluster.scheduler.jobs import Jobs
from sim.jobs import TwoJobs


class _Changed:
    """An endpoint of which some calls are others."""

    def __init__(self, slots, arcs):
        self._service = _core.Endpoint(slots, arcs)

    def __getattr__(self, name):
        return getattr(self._service, name)


class _FencesByRank(_Changed):
    def fence(self, rank, incarnation, job=0):
        return self._service.fence(rank, incarnation)


class _StartsOneJob(_Changed):
    def start_job(self, job, mode, staleness=0, mean=False, before=0, is_named=False):
        self._service.start_job(job, mode, staleness, mean, before)


class _WithService(TwoJobs):
    service_kind = _Changed

    def new_service(self, address):
        return self.service_kind(self.slots, [])


class FencesByRank(_WithService):
    """The worker of the same rank in the other job is fenced."""

    service_kind = _FencesByRank


class StartsOneJob(_WithService):
    """A named job replaces the one without a name."""

    service_kind = _StartsOneJob


class _WithJobs(TwoJobs):
    """Changes the jobs of each membership, also of those that are restored."""

    @property
    def membership(self):
        return self._membership

    @membership.setter
    def membership(self, membership):
        self._membership = membership
        self.change(membership._jobs)

    def change(self, jobs):
        raise NotImplementedError  # each bug has its own


class OrdersWithoutNumber(_WithJobs):
    """Orders about workers of a named job have no number, so they are about the other job."""

    def change(self, jobs):
        jobs._number = lambda job: 0


class EndsWithTheFirst(_WithJobs):
    """A named job is ended when its first worker has left."""

    def change(self, jobs):
        def dismiss(self, line, job, rank, incarnation):
            yield from Jobs._dismiss(self, line, job, rank, incarnation)
            if line.job is job and job.name:
                yield m.EndJob(job.number)

        jobs._dismiss = types.MethodType(dismiss, jobs)


PLANTED = {
    "a fence hits the same rank of the other job": (FencesByRank, ("worker", "worker"), "progress"),
    "a named job replaces the one without a name": (StartsOneJob, (), "progress"),
    "orders of a named job have no number": (OrdersWithoutNumber, ("worker", "worker"), "progress"),
    "a named job ends with its first worker": (EndsWithTheFirst, (), "progress"),
}
