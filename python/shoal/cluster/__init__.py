"""The processes of a cluster, and what they know of each other.

    address.py      addresses: checked, completed, tried out
    membership.py   the scheduler's truth, without sockets or clocks
    scheduler.py    its process
    link.py         every other process's connection to it
    client.py       a worker's store

The modules are imported when they are used: ``import shoal`` needs neither them nor ZeroMQ.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.consistency import BSP, Consistency

if TYPE_CHECKING:
    from shoal.cluster.client import ClusterStore
    from shoal.rpc.filters import Filters

__all__ = ["connect"]

_BSP = BSP()


def connect(
    address: str,
    *,
    consistency: Consistency = _BSP,
    workers: int | None = None,
    rank: int | None = None,
    timeout: float = 60.0,
    threads: int | None = None,
    curve: str | os.PathLike[str] | None = None,
    filters: Filters | Mapping[str, Filters] | None = None,
) -> ClusterStore:
    """Join a cluster as a worker: a store whose rows are on servers.

    Returns when all servers and all workers of the job are there. The job ends when its last worker has closed its
    store; tables live on.

    Parameters
    ----------
    address : str
        The scheduler's, ``tcp://host:port``.
    consistency : Consistency
        What a pull may see of other workers' pushes: ``shoal.BSP()``, ``shoal.SSP(staleness)`` or ``shoal.ASP()``; the
        same for all workers.
    workers : int, optional
        How many workers the job has; default: what the scheduler was told. The same for all.
    rank : int, optional
        The place of this one, from 0; default: any that is free.
    timeout : float
        Seconds in which every call of the store is done, or raises :class:`shoal.DeadlineExceeded`; this one too.
    threads : int, optional
        Threads that sort and sum this worker's batches; default: the cores that this process may use.
    curve : path, optional
        Directory of the cluster's keys, made by ``shoal keygen``.
    filters : Filters, or one for each table's name, optional
        What may be done to send fewer bytes; default: nothing. Each worker chooses for itself.

    Returns
    -------
    ClusterStore
        A :class:`shoal.Store`; a context manager that leaves the cluster.

    Raises
    ------
    NotConnected
        Nobody answers there, or a server cannot be reached from here.
    DeadlineExceeded
        Servers or workers are missing: the message says how many.
    ValueError
        The other workers want another job.

    Notes
    -----
    Blocks. The store is safe from any thread; a forked child connects anew.
    """
    from shoal.cluster import client

    return client.connect(
        address,
        consistency=consistency,
        workers=workers,
        rank=rank,
        timeout=timeout,
        threads=threads,
        curve=curve,
        filters=filters,
    )
