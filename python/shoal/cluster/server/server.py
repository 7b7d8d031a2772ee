"""The process of a server: endpoints that serve rows, and the connection to the scheduler.

Each endpoint is a Service and a data loop of its own, in C++ threads that share nothing. This module creates them,
registers their addresses with the scheduler, and executes the scheduler's orders on all of them. No request passes
through Python. Threads of Python write and read the files of saves and loads (server/tasks.py).

A server ends when it is stopped, when the scheduler is stopped or silent for too long, or when the process that started
it has ended.

Threads: `run` in one; `stop` from any, or from a signal handler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import zmq

from shoal import _core
from shoal.cluster.protocol.address import bindable, check_bind, is_loopback, join_address, split
from shoal.cluster.protocol.curve import Guard, Keys
from shoal.cluster.protocol.descriptors import SPENT, are_spent, raise_limit
from shoal.cluster.protocol.messages import (
    AddTable,
    Admit,
    Dismiss,
    DropTable,
    ErrorReply,
    Fence,
    Hold,
    Order,
    OrderBody,
    ReportMetrics,
    StartJob,
)
from shoal.cluster.protocol.refusals import Refusals
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.slot_map import Endpoint
from shoal.cluster.server.data_loop import start_loop
from shoal.cluster.server.tasks import TaskRunner
from shoal.errors import MemoryBudgetExceededError, ShoalError
from shoal.storage.roots import StorageRoots
from shoal.store.description import make_budget

__all__ = ["Outcome", "Server", "obey"]

_log = logging.getLogger("shoal.server")

_WRONG = (ValueError, TypeError, OverflowError)  # what the engine raises for invalid input of an order
_POLL_SECONDS = 0.2  # between two checks whether to continue
_DESCRIPTOR_CHECK_SECONDS = 1.0  # between two checks whether it can still open files
_LEAVE_SECONDS = 2.0


class Outcome(NamedTuple):
    """The result of an order: the maximum over all endpoints.

    ``refused`` is the refusal, if no endpoint has changed anything; ``tables`` are those that the last tick of a fenced
    worker named.
    """

    result: int = 0
    refused: ErrorReply | None = None
    tables: tuple[int, ...] = ()


def obey(services: Sequence[_core.Service], order: OrderBody) -> Outcome:
    """Execute an order on all endpoints of a server."""
    if isinstance(order, AddTable):
        return Outcome(refused=_add_table(services, order))
    if isinstance(order, Fence):
        clock, tables = max(service.fence(order.rank, order.incarnation) for service in services)
        return Outcome(clock, tables=tuple(tables))
    if isinstance(order, StartJob):
        try:
            return Outcome(max(_obey(service, order) for service in services))
        except _WRONG as error:  # harmless: the next job starts from its own settings
            return Outcome(refused=ErrorReply("input", str(error)))
    return Outcome(max(_obey(service, order) for service in services))


def _obey(service: _core.Service, order: OrderBody) -> int:
    if isinstance(order, StartJob):
        service.start_job(order.job, order.rules.mode, order.rules.waits, order.rules.mean, order.before)
        for rank, incarnation in enumerate(order.incarnations):
            service.admit(rank, incarnation, 0)
    elif isinstance(order, Hold):
        return service.hold()
    elif isinstance(order, Admit):
        service.admit(order.rank, order.incarnation, order.clock)
    elif isinstance(order, Dismiss):
        return service.dismiss(order.rank, order.incarnation, order.clock, order.tables)
    elif isinstance(order, DropTable) and order.id in service.tables():
        service.drop_table(order.id)
    return 0


def _add_table(services: Sequence[_core.Service], order: AddTable) -> ErrorReply | None:
    if any(order.id in service.tables() for service in services):
        raise RuntimeError(f"table {order.id} exists already")
    made = []
    try:
        for service in services:
            service.add_table(order.id, **order.form.native())
            made.append(service)
    except (MemoryBudgetExceededError, MemoryError, *_WRONG) as error:
        for service in made:
            service.drop_table(order.id)
        if isinstance(error, MemoryError):
            return ErrorReply("memory", "its machine has no memory left: make the table smaller, or start more servers")
        return ErrorReply("input" if isinstance(error, _WRONG) else "memory", str(error))
    return None


class Server:
    """A server. A context manager that closes itself.

    Parameters
    ----------
    scheduler : str
        Address of the scheduler.
    bind : str, optional
        Where to listen, ``tcp://host:port``; several threads use this port and the following ones, unless it is 0 or
        ``*``, any that is free. Default: any port, of the loopback interface if the scheduler is on it, else of all
        interfaces.
    advertise : str, optional
        Name or address of this machine as the scheduler and all workers reach it; default: the source address of its
        connection to the scheduler.
    threads : int
        Number of endpoints, each with its own thread.
    memory : int, optional
        Bytes that the rows of all tables may use here, an equal share for each of its slots; default: no limit.
    slot_memory : int, optional
        The share of a slot, in place of `memory`.
    rank : int, optional
        The rank to take; default: the first free one.
    timeout : float
        Seconds to wait for the scheduler and for the other servers.
    grace : float, optional
        Seconds of silence of the scheduler after which the server ends; default: what the scheduler says.
    keys : Keys, optional
        Accept only peers that have keys of this cluster.
    insecure : bool
        Allow listening without keys on an address that other machines can reach: `ValueError` otherwise.
    storage_roots : sequence of path or URL, optional
        Where the files of saves and loads may be, which workers name; default: with keys anywhere, without keys in the
        current directory. See :class:`shoal.storage.roots.StorageRoots`.
    storage_options : mapping, optional
        Options of the file system that opens URLs below them, such as ``{"endpoint_url": ...}``: if it is omitted,
        workers may pass nothing but credentials.
    """

    def __init__(
        self,
        scheduler: str,
        *,
        bind: str | None = None,
        advertise: str | None = None,
        threads: int = 1,
        memory: int | None = None,
        slot_memory: int | None = None,
        rank: int | None = None,
        timeout: float = 60.0,
        grace: float | None = None,
        keys: Keys | None = None,
        insecure: bool = False,
        storage_roots: Sequence[str | os.PathLike[str]] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if threads < 1:
            raise ValueError(f"a server needs at least one thread, got threads={threads}")
        default = "127.0.0.1" if is_loopback(split(scheduler)[0]) else "0.0.0.0"
        host, port = split(bind, wildcard=True) if bind is not None else (default, 0)
        check_bind(join_address(host, port), secured=keys is not None, insecure=insecure)
        anywhere = keys is not None and storage_roots is None
        if anywhere and storage_options:
            raise ValueError(
                "storage_options go with storage_roots: with keys and without roots workers pass their own"
            )
        roots = None if anywhere else StorageRoots(storage_roots, storage_options)
        _core.keep_freed_memory()  # else each large request is received into new pages
        self._stopping = False
        self._services: list[_core.Service] = []
        with contextlib.ExitStack() as undo:
            context: zmq.Context[Any] = zmq.Context()
            undo.callback(context.term)
            if keys is not None:
                undo.callback(Guard(context, keys).stop)
            self._scheduler = undo.enter_context(
                SchedulerClient(scheduler, "server", grace=grace, context=context, keys=keys)
            )
            welcome = self._scheduler.hello(timeout=timeout)
            if slot_memory is not None:
                make_budget(slot_memory * welcome.slots, welcome.slots)
            elif memory is not None:
                make_budget(memory, welcome.slots)
            addresses = []
            for k in range(threads):
                service = _core.Service(welcome.slots)
                loop = start_loop(
                    service,
                    context,
                    join_address(bindable(host), port + k if port else 0),
                    keys=keys,
                    heartbeat=welcome.heartbeat,
                )
                undo.callback(loop.stop)
                undo.callback(TaskRunner(service, roots).stop)
                self._services.append(service)
                reached = advertise or ("" if host in ("", "*") else host)
                addresses.append(join_address(reached, split(loop.address, wildcard=True)[1]))
            joined = self._scheduler.join(timeout=timeout, rank=rank, addresses=tuple(addresses))
            self.rank = joined.rank
            self.endpoints = joined.map.of_server(joined.rank)
            self._map = joined.map
            for service, endpoint in zip(self._services, self.endpoints, strict=True):
                service.set_map(joined.map.epoch, joined.map.arc_ranges(endpoint.id))
            own = sum(end - first for endpoint in self.endpoints for first, end in joined.map.run_ranges(endpoint.id))
            share = memory // max(own, 1) if memory is not None else slot_memory
            if share is not None:
                for service in self._services:
                    service.set_memory(share)
            self._closing = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def slots(self, endpoint: Endpoint) -> list[tuple[int, int]]:
        """Return the slots that an endpoint serves: first and end of each run."""
        return self._map.run_ranges(endpoint.id)

    def stop(self) -> None:
        """Make :meth:`run` return."""
        self._stopping = True

    def run(self, going: Callable[[], bool] = lambda: True) -> None:
        """Execute orders until :meth:`stop` is called, ``going`` returns False, or the scheduler ends.

        Parameters
        ----------
        going : callable
            Called repeatedly.

        Raises
        ------
        NotConnectedError
            The scheduler was silent for too long.
        FencedError
            The scheduler has declared this server dead.
        """
        raise_limit()
        refusals = Refusals(_log)
        checked_at = time.monotonic()
        while not self._stopping and going():
            if time.monotonic() - checked_at > _DESCRIPTOR_CHECK_SECONDS:
                checked_at = time.monotonic()
                if are_spent():
                    refusals.add("descriptors", SPENT, level=logging.ERROR)
            order = self._scheduler.next_order(_POLL_SECONDS)
            if order is not None:
                self._execute(order)
            elif self._scheduler.fault is not None:
                if self._scheduler.stopped:
                    return
                raise self._scheduler.fault
        with contextlib.suppress(ShoalError):
            self._scheduler.leave(timeout=_LEAVE_SECONDS)

    def _execute(self, order: Order) -> None:
        try:
            outcome = obey(self._services, order.body)
            figures = tuple(self.metrics()) if isinstance(order.body, ReportMetrics) else ()
        except Exception as error:  # any error: the cluster cannot continue with a server that misses an order
            _log.exception("order %d failed: %s", order.number, order.body)
            self._scheduler.done(order, fault=f"{type(error).__name__}: {error}")
        else:
            self._scheduler.done(order, **outcome._asdict(), figures=figures)

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the metrics of each endpoint."""
        for service in self._services:
            yield service.metrics()

    def close(self) -> None:
        """End without leaving the cluster, which :meth:`run` does."""
        self._closing.close()
