"""Servers in this process: the scheduler and the orders in threads, the data loops and services the real ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import zmq

import shoal
from cluster_fakes import TIMEOUT, scheduler
from shoal import _core
from shoal.cluster.link import Link
from shoal.rpc.loop import start_loop
from shoal.rpc.messages import AddTable, Admit, Dismiss, Hold, OrderBody, StartJob


class Server:
    """A server of some data loops."""

    def __init__(self, address: str, endpoints: int, slots: int) -> None:
        self.error: Exception | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._services = [_core.Service(slots, 0, 0) for _ in range(endpoints)]
        self._loops = [start_loop(service, self._context, "tcp://127.0.0.1:0") for service in self._services]
        self._link = Link(address, "server")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            joined = self._link.join(timeout=TIMEOUT, addresses=tuple(loop.address for loop in self._loops))
            for loop, service in zip(self._loops, self._services, strict=True):
                for endpoint in joined.map.endpoints:
                    if endpoint.address == loop.address:
                        service.set_map(joined.map.epoch, endpoint.first_slot, endpoint.end_slot)
            while not self._stop.is_set():
                order = self._link.next_order(0.02)
                if order is not None:
                    done = [self._obey(service, order.body) for service in self._services]
                    self._link.done(order, result=max(done))
        except Exception as error:
            self.error = error

    @staticmethod
    def _obey(service: _core.Service, order: OrderBody) -> int:
        match order:
            case StartJob(job, rules, incarnations):
                service.start_job(job, rules.mode, rules.waits, rules.mean)
                for rank, incarnation in enumerate(incarnations):
                    service.admit(rank, incarnation, 0)
            case Admit(rank, incarnation, clock):
                service.admit(rank, incarnation, clock)
            case Dismiss(rank, incarnation):
                service.dismiss(rank, incarnation)
            case Hold():
                return service.hold()
            case AddTable(number, form):
                spec = form.spec()
                service.add_table(
                    number,
                    dim=spec.dim,
                    dtype=spec.dtype,
                    optimizer=type(spec.optimizer).__name__,
                    params=spec.optimizer.params(),
                    init=type(spec.init).__name__,
                    init_parameter=spec.init.parameter,
                    init_seed=spec.init.init_seed,
                    seed=spec.seed,
                )
        return 0

    def close(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT)
        self._link.close()
        for loop in self._loops:
            loop.stop()
        self._context.term()
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def served(servers: int = 1, endpoints: int = 1, *, slots: int = 1024) -> Iterator[str]:
    """Serve: the scheduler's address."""
    with scheduler(servers, slots=slots) as made, contextlib.ExitStack() as stack:
        for _ in range(servers):
            stack.enter_context(contextlib.closing(Server(made.address, endpoints, slots)))
        yield made.address


def together(address: str, workers: int, work: Callable[[shoal.Store], Any], **settings: Any) -> list[Any]:
    """Let some workers, each in a thread, connect and do the same: what they return, by rank."""
    results: list[Any] = [None] * workers
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            with shoal.connect(address, workers=workers, rank=rank, threads=1, timeout=TIMEOUT, **settings) as store:
                results[rank] = work(store)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results
