"""Servers in threads of the test: ROUTERs in Python before the engine's services, and the orders of the scheduler."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq

import shoal
from cluster_fakes import TIMEOUT, scheduler
from shoal import _core
from shoal.cluster.link import Link
from shoal.cluster.scheduler import Scheduler
from shoal.rpc.messages import AddTable, Admit, Dismiss, Hold, OrderBody, StartJob


class Server:
    """A server whose data loops and control plane share one thread of Python."""

    def __init__(self, address: str, endpoints: int, rank: int) -> None:
        self.error: Exception | None = None
        self.services: dict[zmq.Socket[bytes], _core.Service] = {}
        self.pause = threading.Event()  # answers no message while set, and is alive all the same
        self._link = Link(address, "server")
        self._context = zmq.Context()
        self._sockets = {}
        for _ in range(endpoints):
            opened = self._context.socket(zmq.ROUTER)
            self._sockets[f"tcp://127.0.0.1:{opened.bind_to_random_port('tcp://127.0.0.1')}"] = opened
        self._rank = rank
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            joined = self._link.join(timeout=TIMEOUT, rank=self._rank, addresses=tuple(self._sockets))
            poller = zmq.Poller()
            for endpoint in joined.map.endpoints:
                opened = self._sockets.get(endpoint.address)
                if opened is not None:
                    poller.register(opened, zmq.POLLIN)
                    service = _core.Service(joined.map.slots, endpoint.first_slot, endpoint.end_slot)
                    service.set_map(joined.map.epoch, endpoint.first_slot, endpoint.end_slot)
                    self.services[opened] = service
            while not self._stop.is_set():
                order = self._link.next_order(0)
                if order is not None:
                    self._link.done(order, result=self._obey(order.body))
                if self.pause.is_set():
                    time.sleep(0.002)
                    continue
                for opened, _ in poller.poll(2):
                    peer, *frames = opened.recv_multipart()
                    self._reply(opened, self.services[opened].handle(peer, frames))
        except Exception as error:
            self.error = error

    def _reply(self, opened: zmq.Socket[bytes], replies: list[tuple[bytes, list[bytes]]]) -> None:
        for peer, frames in replies:
            opened.send_multipart([peer, *frames])

    def _obey(self, order: OrderBody) -> int:
        results = []
        for opened, service in self.services.items():
            results.append(obey(service, order))
            self._reply(opened, service.released())
        return max(results)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT)
        self._link.close()
        for opened in self._sockets.values():
            opened.close(0)
        self._context.term()
        if self.error is not None:
            raise self.error


def obey(service: _core.Service, order: OrderBody) -> int:
    """Do what the scheduler orders."""
    match order:
        case StartJob(job, rules, incarnations):
            service.start_job(job, rules.mode, rules.waits, rules.mean)
            for rank, incarnation in enumerate(incarnations):
                service.admit(rank, incarnation, 0)
        case Hold():
            return service.hold()
        case Admit(rank, incarnation, clock):
            service.admit(rank, incarnation, clock)
        case Dismiss(rank, incarnation):
            service.dismiss(rank, incarnation)
        case AddTable(number, form):
            service.add_table(number, **described(form.spec()))
    return 0


def described(spec: shoal.TableSpec) -> dict[str, Any]:
    """A table as the engine takes it."""
    return {
        "dim": spec.dim,
        "dtype": spec.dtype,
        "optimizer": type(spec.optimizer).__name__,
        "params": spec.optimizer.params(),
        "init": type(spec.init).__name__,
        "init_parameter": spec.init.parameter,
        "init_seed": spec.init.init_seed,
        "seed": spec.seed,
    }


@dataclass
class Cluster:
    """What runs."""

    scheduler: Scheduler
    servers: list[Server]

    @property
    def address(self) -> str:
        return self.scheduler.address


@contextlib.contextmanager
def cluster(servers: int = 1, endpoints: int = 1, **settings: Any) -> Iterator[Cluster]:
    """Run a scheduler and servers in threads."""
    with scheduler(servers, **settings) as one, contextlib.ExitStack() as stack:
        made = Cluster(one, [])
        for rank in range(servers):
            made.servers.append(stack.enter_context(contextlib.closing(Server(one.address, endpoints, rank))))
        yield made
