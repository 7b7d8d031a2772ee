"""A scheduler and servers on this machine, as child processes.

    running      for the length of a ``with`` block
    launch       the same, with a store that ends them when it is closed

They listen at sockets in a private directory (cluster/protocol/private.py), unless there is no place for one, or an
address is given, or keys are, with which processes of other users take part.
The processes check from their start whether the process that started them still exists.

Threads: objects of this module are used by one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import structs

from shoal.base.interrupts import held_back
from shoal.base.logs import forward
from shoal.base.machine import cores
from shoal.base.scalars import whole
from shoal.cluster.launch.child import ChildProcess, Notify, Process
from shoal.cluster.launch.roles import Start
from shoal.cluster.launch.supervisor import Supervisor, slot_memory
from shoal.cluster.launch.workers import start_worker, worker_environment
from shoal.cluster.protocol.environment import find_keys
from shoal.cluster.protocol.private import make_private, remove_private
from shoal.config import ClusterConfig, SchedulerConfig, ServerConfig, check_cluster
from shoal.consistency import BSP, Consistency

if TYPE_CHECKING:
    from shoal.cluster.worker.cache import Cache
    from shoal.cluster.worker.cluster_store import ClusterStore
    from shoal.cluster.worker.filters import Filters
    from shoal.table.tiered import Tiered

_BSP = BSP()
_MOST_THREADS = 8  # of a server, if their number is not given
# Where the scheduler and the servers of a launch listen by default: sockets in a directory that `LocalCluster` makes.
PRIVATE = "ipc://*"


def start_role(
    name: str, config: SchedulerConfig | ServerConfig, notify: Notify, directory: str | None = None
) -> ChildProcess:
    """Start a scheduler or a server, which ends with this process, and then removes this process's directory."""
    made = _start_unconfigured(name, isinstance(config, SchedulerConfig), notify, directory)
    made.tell(config)
    return made


def _start_unconfigured(name: str, is_scheduler: bool, notify: Notify, directory: str | None) -> ChildProcess:
    """Start a scheduler or a server, which waits for its configuration."""
    start = Start(is_scheduler=is_scheduler, parent=os.getpid(), directory=directory)
    command = [sys.executable, "-m", "shoal", "role", "scheduler" if is_scheduler else "server"]
    return ChildProcess(name, command, {}, notify, forward, start=start)


class LocalCluster(Supervisor):
    """The processes of a cluster on this machine."""

    def __init__(self) -> None:
        super().__init__()
        self._directory: str | None = None  # private: of sockets and the journal
        self._ahead: dict[str, ChildProcess] = {}  # servers that wait for their configuration, by name

    def begin(self, scheduler: SchedulerConfig, server: ServerConfig, *, timeout: float, spares: int = 0) -> None:
        """See `Supervisor`. By default the processes listen at sockets that no other user can reach."""
        if scheduler.bind == PRIVATE or scheduler.journal is None:
            with held_back():
                self._directory = make_private()
                if self._directory is not None:
                    self._closing.callback(remove_private, self._directory)
        directory = self._directory
        if scheduler.bind == PRIVATE:
            if directory is None:
                bind = "tcp://127.0.0.1:*"
            else:  # in which nobody else listens, so workers may know it before the scheduler listens there
                bind = self.address = f"ipc://{directory}/scheduler"
            scheduler = structs.replace(scheduler, bind=bind)
        super().begin(scheduler, server, timeout=timeout, spares=spares)

    def _make_journal(self) -> str:
        return super()._make_journal() if self._directory is None else os.path.join(self._directory, "journal")

    def _start_ahead(self, names: Sequence[str]) -> None:
        for name in names:
            with held_back():
                self._ahead[name] = _start_unconfigured(name, False, self.notify, self._directory)

    def _start(self, name: str, config: SchedulerConfig | ServerConfig, former: Process | None = None) -> Process:
        ahead = self._ahead.pop(name, None)
        if ahead is None:
            return start_role(name, config, self.notify, self._directory)
        ahead.tell(config)
        return ahead

    def stop(self) -> None:
        """See `Supervisor`."""
        try:
            for process in self._ahead.values():
                process.end(0.0)
        finally:
            super().stop()

    def prepare_workers(self, count: int) -> None:
        """Do nothing: this machine has a place for any number."""

    def start_worker(
        self,
        rank: int,
        command: Sequence[str],
        workers: int | tuple[int, int],
        emit: Callable[[str], None],
        emit_error: Callable[[str], None],
    ) -> Process:
        """See `Supervisor`."""
        environment = worker_environment(self.address, rank, workers, self.curve)
        return start_worker(rank, command, workers, environment, self.ended, emit, emit_error)


def threads_of_each(servers: int) -> int:
    """Return the threads of each server on this machine, whose cores workers leave idle while they wait."""
    return max(1, min(_MOST_THREADS, cores() // servers))


def configurations(
    servers: int,
    *,
    memory: int | str | None = None,
    tier: Tiered | str | None = None,
    storage_roots: Sequence[str | os.PathLike[str]] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    allow_code: Sequence[str | os.PathLike[str]] = (),
    journal: str | os.PathLike[str] | None = None,
    curve: str | None = None,
    metrics_port: int | str | None = None,
    address: str | None = None,
    **settings: Any,
) -> tuple[SchedulerConfig, ServerConfig]:
    """Return the configurations of the scheduler and of each server of a cluster on this machine, checked.

    ``memory`` is that of all servers together, ``address`` the scheduler's. Other settings are those of
    :class:`shoal.config.ClusterConfig`, and otherwise of the servers.
    """
    if memory is not None and tier is not None:
        raise ValueError("servers have a memory budget or a tier: leave memory= or tier= out")
    # Checked here where they are given: a launcher starts without the modules of servers.
    if storage_roots is not None or storage_options is not None:
        from shoal.storage.roots import StorageRoots

        StorageRoots(storage_roots, storage_options)
    if allow_code:
        from shoal.cluster.server.code import AllowedCode

        AllowedCode(allow_code)
    of_cluster = {name: settings.pop(name) for name in ClusterConfig.__struct_fields__ if name in settings}
    scheduler = SchedulerConfig(
        bind=address or (PRIVATE if curve is None else "tcp://127.0.0.1:*"),
        servers=servers,
        journal=None if journal is None else os.path.abspath(journal),
        curve=curve,
        metrics_port=metrics_port,
        **of_cluster,
    )
    check_cluster(scheduler)
    return scheduler, ServerConfig(
        scheduler="tcp://127.0.0.1:1",  # known when it has joined
        slot_memory=slot_memory(memory, scheduler.slots),
        tier=tier if tier is None or isinstance(tier, str) else f"{os.path.abspath(tier.path)}:{tier.memory_bytes}",
        storage_roots=None if storage_roots is None else tuple(os.fspath(root) for root in storage_roots),
        storage_options=None if storage_options is None else dict(storage_options),
        allow_code=tuple(os.fspath(one) for one in allow_code),
        curve=curve,
        metrics_port=metrics_port,
        **settings,
    )


@contextmanager
def running(servers: int = 1, *, timeout: float = 60.0, **settings: Any) -> Iterator[LocalCluster]:
    """Run a scheduler and servers on this machine for the length of a ``with`` block: see `configurations`."""
    with LocalCluster() as cluster:
        cluster.start(*configurations(servers, timeout=timeout, **settings), timeout=timeout)
        yield cluster


def launch(
    servers: int = 1,
    *,
    consistency: Consistency | str = _BSP,
    threads: int | None = None,
    server_threads: int | None = None,
    memory: int | str | None = None,
    tier: Tiered | None = None,
    slots: int = 1024,
    timeout: float = 60.0,
    filters: Filters | Mapping[str, Filters] | None = None,
    cache: Cache | Mapping[str, Cache] | None = None,
    storage_roots: Sequence[str | os.PathLike[str]] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    allow_code: Sequence[str | os.PathLike[str]] = (),
    journal: str | os.PathLike[str] | None = None,
    replicas: int = 0,
    copy_rate: int | None = None,
    tracing: bool | None = None,
) -> ClusterStore:
    """Start a cluster on this machine, with this process as its one worker.

    Parameters
    ----------
    servers : int
        Number of server processes.
    consistency : Consistency or str
    threads : int, optional
        Threads that sort and sum this worker's batches; default: the cores that this process may use.
    server_threads : int, optional
        Threads of each server; default: the cores that this process may use, divided by the servers, at most 8.
    memory : int or str, optional
        Bytes that the rows of all servers together may use, an equal share for each slot; default: no limit. If they
        would use more, the expiry rules drop rows, or :class:`shoal.MemoryBudgetExceededError` is raised.
    tier : Tiered, optional
        Keep the rows of each server that do not fit in ``tier.memory`` in a directory of its own below ``tier.path``:
        tables larger than memory, with the same results. Not with ``memory``. Default: all rows are in memory.
    slots : int
        Number of slots of the hash space: a power of two from 2 to 16384.
    timeout : float
        Seconds for all processes to join, and the deadline of the store's calls.
    filters : Filters, or one for each table's name, optional
        As in :func:`shoal.connect`.
    cache : Cache, or one for each table's name, optional
        As in :func:`shoal.connect`.
    storage_roots : sequence of path or URL, optional
        Directories and URLs below which the servers may read and write the files of ``save`` and ``load``; a save or
        load elsewhere raises `StorageError`. Default: all paths, since only processes of this user, or with keys,
        whose directory the environment names, can request a save (``docs/security.md``). If there is no place for
        sockets that other users cannot reach, the current directory.
    storage_options : mapping, optional
        Options of the file systems of URLs among ``storage_roots``, such as ``{"endpoint_url": ...}``.
    allow_code : sequence of str or path
        Directories and names of modules from which the servers may import and run the optimizers of tables
        (`shoal.UserOptimizer`) and functions of rows; ``"source"`` allows functions that are sent as their source
        (`shoal.by_source`). Default: none.
    journal : path, optional
        Directory of the scheduler's journal, from which it continues if it dies and is started again; an earlier
        journal there is removed. Default: a temporary directory.
    replicas : int
        Copies of each slot on other servers, fewer than ``servers``. If a server dies, another one that has a copy
        serves its slots, without losing a push, and a new server is started. Default: the loss of a server ends the
        job (``docs/replication.md``).
    copy_rate : int, optional
        Bytes per second that each thread of a server sends at most to make a new copy; default: 32 MiB.
    tracing : bool, optional
        Whether the calls of the store are traced by OpenTelemetry, as in :func:`shoal.connect`.

    Returns
    -------
    ClusterStore
        A context manager: the processes end with it, and also when this process ends, for whatever reason.

    Examples
    --------
    >>> import numpy as np
    >>> import shoal
    >>> with shoal.launch(servers=2) as store:
    ...     table = store.table("user", dim=2, optimizer=shoal.SGD(lr=1.0))
    ...     table.push(np.array([7], np.uint64), np.ones((1, 2), np.float32)).result()
    ...     store.tick()
    ...     table.pull(np.array([7], np.uint64)).tolist()
    [[-1.0, -1.0]]
    """
    servers = whole("servers", servers, 1)
    cluster = LocalCluster()
    curve = find_keys(os.environ)
    try:
        cluster.begin(
            *configurations(
                servers,
                threads=whole(
                    "server_threads", threads_of_each(servers) if server_threads is None else server_threads, 1
                ),
                memory=memory,
                tier=tier,
                slots=whole("slots", slots),
                replicas=whole("replicas", replicas),
                copy_rate=copy_rate,
                curve=curve,
                storage_roots=storage_roots,
                storage_options=storage_options,
                allow_code=allow_code,
                journal=journal,
                timeout=timeout,
            ),
            timeout=timeout,
        )
        # While the other processes start.
        from shoal.cluster.worker.cluster_store import ClusterStore
        from shoal.cluster.worker.connect import traces

        is_traced = traces(tracing)
        cluster.complete()
    except BaseException:
        cluster.stop()
        raise
    return ClusterStore(
        cluster.address,
        consistency=consistency,
        workers=1,
        rank=0,
        timeout=timeout,
        threads=threads,
        curve=curve,
        filters=filters,
        cache=cache,
        tracing=is_traced,
        on_close=cluster.stop,
        supervise=cluster.supervise,
    )
