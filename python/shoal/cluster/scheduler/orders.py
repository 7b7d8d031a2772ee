"""Orders: what all servers execute, in the same sequence (state machine replication with one leader).

An operation is a generator that yields an order, which goes to every server, and receives the results. One operation
runs at a time, the others wait in a queue, so all servers see the same orders in the same order. An order is sent again
until it is acknowledged; the next one is sent after that.

Invariant: I3 of membership.py. Threads: one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TypeAlias

from shoal.cluster.protocol.messages import AddTable, ErrorReply, Order, OrderBody, OrderReply, StartJob
from shoal.cluster.scheduler.members import ServerPeer
from shoal.cluster.scheduler.peers import Peers

__all__ = ["Operation", "Orders"]

_RESEND_SECONDS = 0.1  # until an order is sent again; each time twice as long as before
_MAX_RESEND_SECONDS = 1.0

Operation: TypeAlias = Generator[OrderBody, list[OrderReply], None]


class Orders:
    """The operations, and the order in progress."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._operations: deque[Operation] = deque()
        self._operation: Operation | None = None
        self._results: dict[int, OrderReply] = {}

    @property
    def at_rest(self) -> bool:
        """Whether no operation is in progress."""
        return self._operation is None and not self._operations

    def begin(self, operation: Operation) -> None:
        """Run an operation after those that wait."""
        self._operations.append(operation)
        if self._operation is None:
            self._next_operation()

    def cancel(self) -> None:
        """End all operations."""
        operations, self._operations = self._operations, deque()
        if self._operation is not None:
            operations.appendleft(self._operation)
            self._operation = None
        for operation in operations:
            operation.close()

    def _next_operation(self) -> None:
        while self._operation is None and self._operations:
            self._operation = self._operations.popleft()
            self._step(lambda operation: next(operation))

    def _step(self, go: Callable[[Operation], OrderBody]) -> None:
        assert self._operation is not None
        try:
            body = go(self._operation)
        except StopIteration:
            self._operation = None
            return
        self._results = {}
        for server in self._peers.servers.values():
            server.orders += 1
            server.order = Order(server.orders, body)
            self.send(server)

    def send(self, server: ServerPeer, *, again: bool = False) -> None:
        """Send a server its order."""
        assert server.order is not None
        longer = min(2 * server.resend_seconds, _MAX_RESEND_SECONDS)
        server.resend_seconds = longer if again else _RESEND_SECONDS
        server.resend_at = self._peers.now + server.resend_seconds
        self._peers.out.append((server.route, server.order))

    def resend(self) -> None:
        """Send the orders that were not acknowledged in time again."""
        for server in self._peers.servers.values():
            if server.order is not None and server.resend_at <= self._peers.now and server.disconnected_at is None:
                self.send(server, again=True)

    def done(self, server: ServerPeer, done: OrderReply) -> str:
        """Process the result of a server's order; returns its fault, after which it cannot be used."""
        order = server.order
        assert order is not None
        server.order = None
        fault = done.fault
        if done.refused is not None and not isinstance(order.body, AddTable | StartJob):
            fault = fault or f"it refused {type(order.body).__name__}: {done.refused.text}"
        if fault:
            return f"it failed to execute an order: {fault}"
        self._results[server.rank] = done
        if len(self._results) == len(self._peers.servers) and self._operation is not None:
            results = [self._results[rank] for rank in sorted(self._results)]
            self._step(lambda operation: operation.send(results))
            self._next_operation()
        return ""

    def refusal(self, results: list[OrderReply], what: str) -> ErrorReply | None:
        """Return the refusal of the first server that refused an order, with its name."""
        servers = (self._peers.servers[rank] for rank in sorted(self._peers.servers))
        for server, done in zip(servers, results, strict=True):
            if done.refused is not None:
                where = f"server {server.rank} at {', '.join(server.addresses)} ({server.about})"
                text = f"{where} {what}: {done.refused.text}"
                self._peers.notes.append(text)
                return ErrorReply(done.refused.kind, text)
        return None
