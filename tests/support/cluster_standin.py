"""Servers in threads of the test: the data loops of real ones, their work on checkpoints, the scheduler's orders."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from cluster_fakes import TIMEOUT, scheduler
from shoal import _core
from shoal.cluster.protocol.messages import Join, Order, ReportStream
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.scheduler.scheduler import Scheduler
from shoal.cluster.server.assignment import ServerControl
from shoal.cluster.server.data_loop import start_loop
from shoal.cluster.server.tasks import TaskRunner


class Server:
    """A server whose control plane is a thread of the test, and whose data loops are the real ones."""

    def __init__(self, address: str, endpoints: int, rank: int | None, slot_memory: int | None = None) -> None:
        self.error: Exception | None = None
        self._context = zmq.Context()
        self._link = SchedulerClient(address, "server")
        slots = self._link.hello(TIMEOUT).slots
        self.services = [_core.Endpoint(slots) for _ in range(endpoints)]
        for service in self.services if slot_memory is not None else ():
            service.set_memory(slot_memory)
        self._loops = [start_loop(service, self._context, "tcp://127.0.0.1:0") for service in self.services]
        self._working = [TaskRunner(service) for service in self.services]
        self._rank = rank
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            addresses = tuple(loop.address for loop in self._loops)
            where = self._link.join(Join(rank=self._rank, addresses=addresses), TIMEOUT).map
            control = ServerControl(dict(zip(addresses, self.services, strict=True)), self._link.sender)
            control.set_map(where)
            while not self._stop.is_set():
                message = self._link.next_order(0.001 if control.has_pending else 0.01)
                if isinstance(message, Order):
                    control.order(message)
                elif message is not None:
                    control.assign(message)
                for out in control.poll(time.monotonic()):
                    if isinstance(out, ReportStream):
                        self._link.ask(out)
                    else:
                        self._link.report(out)
        except Exception as error:
            self.error = error

    def close(self) -> None:
        """End without leaving the cluster."""
        self._stop.set()
        self._thread.join(TIMEOUT)
        self._link.close()
        for loop in self._loops:
            loop.stop()
        for working in self._working:
            working.stop()
        self._context.term()
        if self.error is not None:
            raise self.error


@dataclass
class Cluster:
    """The running scheduler and servers."""

    scheduler: Scheduler
    servers: list[Server]

    @property
    def address(self) -> str:
        return self.scheduler.address


@contextlib.contextmanager
def cluster(
    servers: int = 1, endpoints: int = 1, slot_memory: Sequence[int | None] = (), **settings: Any
) -> Iterator[Cluster]:
    """Run a scheduler and servers in threads. ``slot_memory`` is that of each server."""
    with scheduler(servers, **{"slots": 64, **settings}) as one, contextlib.ExitStack() as stack:
        made = Cluster(one, [])
        for rank in range(servers):
            memory = slot_memory[rank] if slot_memory else None
            made.servers.append(stack.enter_context(contextlib.closing(Server(one.address, endpoints, rank, memory))))
        yield made
