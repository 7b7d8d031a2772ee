"""``shoal.connect``: its defaults come from the environment of the process.

Threads: any.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Literal, overload

from shoal.base.logs import configure_logging, find_log_format
from shoal.cluster.protocol.environment import (
    find_keys,
    find_metrics_port,
    find_scheduler,
    find_tracing,
    find_worker,
    find_worker_range,
)
from shoal.cluster.worker.cache import Cache
from shoal.cluster.worker.cluster_store import ClusterStore
from shoal.cluster.worker.filters import Filters
from shoal.cluster.worker.reader_store import ReaderStore
from shoal.consistency import BSP, Consistency

_BSP = BSP()


@overload
def connect(
    address: str | None = None,
    *,
    job: str | None = None,
    consistency: Consistency | str = ...,
    workers: int | tuple[int, int] | None = None,
    rank: int | None = None,
    timeout: float = 60.0,
    threads: int | None = None,
    curve: str | os.PathLike[str] | None = None,
    filters: Filters | Mapping[str, Filters] | None = None,
    cache: Cache | Mapping[str, Cache] | None = None,
    shared_storage: bool = True,
    metrics_port: int | str | None = None,
    tracing: bool | None = None,
    mode: Literal["train"] = "train",
) -> ClusterStore: ...


@overload
def connect(
    address: str | None = None,
    *,
    mode: Literal["read"],
    timeout: float = 60.0,
    threads: int | None = None,
    curve: str | os.PathLike[str] | None = None,
    metrics_port: int | str | None = None,
    tracing: bool | None = None,
) -> ReaderStore: ...


def connect(
    address: str | None = None,
    *,
    job: str | None = None,
    consistency: Consistency | str = _BSP,
    workers: int | tuple[int, int] | None = None,
    rank: int | None = None,
    timeout: float = 60.0,
    threads: int | None = None,
    curve: str | os.PathLike[str] | None = None,
    filters: Filters | Mapping[str, Filters] | None = None,
    cache: Cache | Mapping[str, Cache] | None = None,
    shared_storage: bool = True,
    metrics_port: int | str | None = None,
    tracing: bool | None = None,
    mode: Literal["train", "read"] = "train",
) -> ClusterStore | ReaderStore:
    """Join a cluster as a worker, or connect to it as a reader; the rows of the store are on the cluster's servers.

    Returns when all servers and all workers of the job have joined. The job ends when its last worker has closed its
    store; the tables are kept.

    Parameters
    ----------
    address : str, optional
        Address of the scheduler, ``tcp://host:port`` or ``ipc:///path``; default: that of ``shoal launch`` or of the
        environment.
    job : str, optional
        Name of the job: up to 64 letters, digits, dots, dashes and underscores. Jobs of different names run on a
        cluster at the same time, each with its own workers, ranks, clocks and consistency, on tables of their own or on
        the same ones (``docs/cluster.md``). The first worker that passes a name begins the job, and the name is free
        again when its last worker has left. Default: the job without a name.
    consistency : Consistency or str
        What a pull may see of other workers' pushes: ``shoal.BSP()``, ``shoal.SSP(staleness)`` or ``shoal.ASP()``,
        or ``"ssp:4"`` as on the command line; the same for all workers of the job.
    workers : int or (int, int), optional
        Number of workers of the job, the same for all; default: from the environment (``docs/cluster.md``), or from the
        scheduler. A named job needs one number, or the environment's. A pair is the least and the greatest number,
        between which workers may join and leave while a model is fitted (``docs/training.md``).
    rank : int, optional
        Rank of this worker, from 0; default: from the environment, or any free one.
    timeout : float
        Seconds after which a call of the store raises :class:`shoal.DeadlineExceededError`; also for this call.
    threads : int, optional
        Threads that sort and sum this worker's batches; default: the cores that this process may use.
    curve : path, optional
        Directory of the cluster's keys, made by ``shoal keygen``; default: from the environment, or none.
    filters : Filters, or one for each table's name, optional
        Compression of messages; default: none. Each worker may have its own.
    cache : Cache, or one for each table's name, optional
        Rows that this worker keeps for some clocks, while it holds back what it pushes to them (``docs/cache.md``);
        default: none. All workers should have the same. Not used under BSP, nor for tables of integers.
    shared_storage : bool
        Whether the servers see the directories that this worker saves to and loads from, by the same paths. If so, each
        server writes its own rows, while pushes continue, and reads them in a load. Object stores are visible to all.
        False: this worker receives all rows and writes them while its pushes wait, and there are no deltas. The rows of
        a load are sent by worker 0; the setting of worker 0 applies.
    metrics_port : int or str, optional
        ``PORT`` or ``HOST:PORT`` at which HTTP requests for ``/healthz``, ``/readyz`` and ``/metrics`` are answered,
        for as long as the store is open (``docs/cluster.md``). Default host: 127.0.0.1. Default port: from the
        environment, or none.
    tracing : bool, optional
        Whether the calls of the store are traced by OpenTelemetry, with the program's tracer provider
        (``docs/monitoring.md``). Default: False, or from the environment: SHOAL_TRACING=1 turns tracing on, and sets up
        the SDK of OpenTelemetry if the program has not.
    mode : {"train", "read"}
        "read": the store reads the tables that workers make, at any time, while they train. It is part of no job, and
        no worker waits for it. `connect` then returns when all servers have joined; calls that change rows raise
        ValueError. The arguments that describe a worker are not allowed.

    Returns
    -------
    ClusterStore or ReaderStore
        A :class:`shoal.Store`; a context manager that leaves the cluster.

    Raises
    ------
    NotConnectedError
        No scheduler answers at the address, or a server cannot be reached from here.
    DeadlineExceededError
        Servers or workers are missing: the message has their number.
    ValueError
        The other workers of the job have joined with other settings, or the metrics port is in use.
    ImportError
        Traces are wanted, and OpenTelemetry is not installed (extra ``otel``).

    Notes
    -----
    Blocks. The store may be used from any thread; a forked child must make its own connection. If SHOAL_LOG_FORMAT is
    set and the program has not set up `logging`, it is set up as by :func:`shoal.tools.configure_logging`.
    """
    address = address or find_scheduler(os.environ)
    if address is None:
        raise ValueError(
            "the scheduler's address is unknown: pass it, tcp://HOST:PORT or ipc:///PATH, or start this program with "
            "shoal launch"
        )
    form = find_log_format(os.environ)
    if form is not None and not logging.getLogger().handlers:
        configure_logging(form)
    port = find_metrics_port(os.environ) if metrics_port is None else str(metrics_port)
    is_traced = traces(tracing)
    if mode == "read":
        given = {
            "job": job is not None,
            "consistency": consistency is not _BSP,
            "workers": workers is not None,
            "rank": rank is not None,
        }
        given |= {
            "filters": filters is not None,
            "cache": cache is not None,
            "shared_storage": shared_storage is not True,
        }
        for name in (name for name, is_given in given.items() if is_given):
            raise ValueError(f"{name} describes a worker, and mode='read' connects a reader: drop one of them")
        keys = curve or find_keys(os.environ)
        return ReaderStore(address, timeout=timeout, threads=threads, curve=keys, metrics_port=port, tracing=is_traced)
    if mode != "train":
        raise ValueError(f"mode is 'train' or 'read', got {mode!r}")
    process = find_worker(os.environ)
    if workers is None and rank is None:
        workers = find_worker_range(os.environ)
    if process is not None and workers in (None, process.size):
        workers = process.size
        rank = process.rank if rank is None else rank
    return ClusterStore(
        address,
        job=job,
        consistency=consistency,
        workers=workers,
        rank=rank,
        timeout=timeout,
        threads=threads,
        curve=curve or find_keys(os.environ),
        filters=filters,
        cache=cache,
        shared_storage=shared_storage,
        metrics_port=port,
        tracing=is_traced,
    )


def traces(tracing: bool | None) -> bool:
    """Return whether calls are traced; set up the SDK of OpenTelemetry if the environment wants it."""
    if tracing is not None:
        if not isinstance(tracing, bool):
            raise TypeError(f"tracing is True or False, got {tracing!r}")
        return tracing
    if not find_tracing(os.environ):
        return False
    from shoal.cluster.worker.tracing import set_up_exporter  # opentelemetry is optional

    set_up_exporter(os.environ)
    return True
