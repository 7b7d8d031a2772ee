"""Two jobs on one cluster with replicas: the job without a name and a named one, each with its own consistency.

The workers of both count, in a table of their own or in one that both have. A shared table has columns for the workers
of each job, so the checkers of history.py judge each job alone: what it sees of its own pushes, and that each push
counted once, whatever the other one does meanwhile.
"""

import numpy as np
from msgspec import structs

from sim.cluster import SUM, Client
from sim.history import CHECKERS, History
from sim.replicated import Replicated, ReplicatedWorker
from sim.schedules import KEYS

NAME = "other"
OWN, OTHER = 1, 7  # tables


class JobClient(Client):
    """A worker whose pushes and pulls are of the columns of its job in the job's table."""

    def pull(self, keys, table=None):
        return super().pull(keys, self.cluster.table)

    def push(self, keys, grads, table=None, **arguments):
        side = self.cluster
        wide = np.zeros((len(keys), side.dims[side.table]), np.float32)
        wide[:, side.columns] = grads
        return super().push(keys, wide, side.table, **arguments)


class JobHistory(History):
    """The history of one job, without the columns of the other one."""

    columns = slice(None)

    def push(self, client, table, keys, grads):
        return super().push(client, table, keys, grads[:, self.columns])

    def answered(self, event, rows):
        super().answered(event, rows[:, self.columns])


class JobWorker(ReplicatedWorker):
    make_client = JobClient


class JobSide:
    """A job as its workers see the cluster: its own settings and history, and all else of the world."""

    _OWN = frozenset(
        {"world", "job_name", "job", "mode", "staleness", "workers", "history", "table", "columns", "first_label"}
    )

    def __init__(self, world, job_name, mode, staleness, workers, table, columns):
        self.world, self.job_name, self.job = world, job_name, 0
        self.mode, self.staleness, self.workers = mode, staleness, workers
        self.table, self.columns = table, columns
        self.history = JobHistory(mode, staleness, workers)
        self.history.columns = columns
        self.first_label = 100 if job_name else 0

    def __getattr__(self, name):
        return getattr(self.world, name)

    def __setattr__(self, name, value):
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.world, name, value)

    def join(self, program):
        self.world.worker_processes.append(JobWorker(self, program))


class TwoJobs(Replicated):
    """As `Replicated`, with a second job.

    Parameters
    ----------
    other : (str, int) or None
        Mode and staleness of the named job; None: there is none.
    shared : bool
        Whether both jobs use one table.
    """

    def __init__(self, seed, *, mode, staleness, other, shared, workers, tables=None, **arguments):
        width = 2 * workers
        tables = {OWN: structs.replace(SUM, dim=2 * width)}
        if not shared:
            tables = {table: structs.replace(SUM, dim=width) for table in (OWN, OTHER)}
        self.shared = shared
        jobs = 1 if other is None else 2
        super().__init__(seed, mode=mode, staleness=staleness, workers=jobs * workers, tables=tables, **arguments)
        self.sides = [JobSide(self, "", mode, staleness, workers, OWN, slice(0, width))]
        if other is not None:
            columns = slice(width, 2 * width) if shared else slice(0, width)
            self.sides.append(JobSide(self, NAME, *other, workers, OWN if shared else OTHER, columns))

    def start(self, programs):
        for side in self.sides:
            for program in programs:
                side.join(program)

    def note_end(self, history, clients, tables):
        for side in self.sides:
            own = [client for client in clients if client.cluster is side]
            super().note_end(side.history, own, () if self.shared else (side.table,))


def find_violations_of_jobs(cluster):
    """Return sentences about everything that must not have happened in either job."""
    found = []
    for side in cluster.sides:
        rows = {key: row[side.columns] for key, row in enumerate(cluster.rows(list(range(KEYS)), side.table))}
        name = side.job_name or "without a name"
        for checker, check in CHECKERS.items():
            found += [f"job {name}: {checker}: {text}" for text in check(side.history, rows)]
    return found
