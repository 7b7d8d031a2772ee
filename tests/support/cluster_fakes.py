"""Processes of a cluster as the control plane sees them: a scheduler in a thread, servers without rows."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import zmq

from shoal.cluster.protocol.messages import Assign, Assigned, Join, Order, OrderReply
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.scheduler.scheduler import Scheduler
from shoal.config import SchedulerConfig

TIMEOUT = 120.0  # of what is expected to happen at once; a machine may be busy
HEARTBEAT = 20.0  # seconds: no process is declared dead while a test runs, except by `declare_dead`


@contextlib.contextmanager
def scheduler(
    servers: int, *, heartbeat: float = HEARTBEAT, bind: str = "tcp://127.0.0.1:*", **settings: object
) -> Iterator[Scheduler]:
    """Run a scheduler in a thread."""
    with Scheduler(SchedulerConfig(bind=bind, servers=servers, heartbeat=heartbeat, **settings)) as made:
        thread = threading.Thread(target=made.run)
        thread.start()
        try:
            yield made
        finally:
            made.stop()
            thread.join(TIMEOUT)
            assert not thread.is_alive()


class HeldPort(socket.socket):
    """A port of 127.0.0.1 that the system gives to nobody else while this object is open.

    It is bound, and nobody listens: connections are refused. A process that sets SO_REUSEADDR, as all servers here do,
    can listen at it meanwhile. (A port that was bound and released may be taken by any other process.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(("127.0.0.1", 0))
        self.port: int = self.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"


def declare_dead(scheduler: Scheduler, role: str, rank: int) -> None:
    """Have the scheduler declare a silent server or worker dead at once, instead of after five heartbeats.

    The living ones keep long heartbeats, which a busy machine does not delay for so long. Returns when it is done.
    """
    membership = scheduler.membership
    known = membership.state.peers
    peer = membership._peers.servers.get(rank)
    if role == "worker":
        peer = known.get(membership.state.jobs[""].job.members.get(rank))
    deadline = time.monotonic() + TIMEOUT
    while peer is not None and peer.sender in known:
        assert time.monotonic() < deadline, f"{role} {rank} is not silent"
        peer.link.last_heard = -math.inf  # again, since a message that it had sent may have arrived
        scheduler._wake()
        time.sleep(0.01)


class FakeServer:
    """A server that acknowledges every order, and remembers it. Joins in its own thread."""

    def __init__(self, address: str, *, rank: int | None = None, clock: int = 0, host: str = "127.0.0.1") -> None:
        self.orders: list[Order] = []
        self.clock = clock
        self.error: Exception | None = None
        self.joined = threading.Event()
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.link = SchedulerClient(address, "server")
        self._rank = rank
        self._addresses = (f"tcp://{host}:{port}",)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.map = self.link.join(Join(rank=self._rank, addresses=self._addresses), TIMEOUT).map
            self.joined.set()
            while not self._stop.is_set():
                order = self.link.next_order(0.02)
                if isinstance(order, Assign):
                    self.map = order.map
                    self.link.report(Assigned(self.link.sender, order.map.epoch))
                elif order is not None:
                    self.orders.append(order)
                    self.link.report(OrderReply(self.link.sender, order.number, result=self.clock))
        except Exception as error:
            self.error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.die()

    def die(self) -> None:
        """End without leaving the cluster."""
        self._stop.set()
        self.link.close()
        self._thread.join(TIMEOUT)
        self._socket.close(0)
        self._context.term()


class Wire:
    """A connection to an address that can be cut without notifying either side."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._cut = threading.Event()
        self.dropped = 0  # bytes
        self._lock = threading.Lock()  # guards _sockets, _closed
        self._closed = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                with self._lock:
                    self._sockets += [near, far]
                    if self._closed:
                        near.close()
                        far.close()
                        return
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._cut.is_set():
                    self.dropped += len(data)
                else:
                    target.sendall(data)

    def cut(self) -> None:
        """Stop forwarding."""
        self._cut.set()

    def mend(self) -> None:
        """Forward again."""
        self._cut.clear()

    def break_off(self) -> None:
        """End all connections; new ones are forwarded."""
        for opened in self._sockets:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it: further connections are refused."""
        with contextlib.suppress(OSError):  # it was ended before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            self._closed = True
            for opened in self._sockets:
                opened.close()
