"""Orders: what all servers execute, in the same sequence (state machine replication with one leader).

An operation is a generator that yields an order, which goes to every server, and receives the results. One operation
runs at a time, the others wait in a queue, so all servers see the same orders in the same order. An order is sent again
until it is acknowledged; the next one is sent after that.

If a server dies, those that adopt its arcs execute the order in progress on the copies, and their outcome replaces its
result.

Invariant: I3 of membership.py. Threads: one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from typing import TypeAlias

from shoal.cluster.protocol.messages import (
    AddTable,
    ErrorReply,
    Order,
    OrderReply,
    ReportMetrics,
    StartJob,
)
from shoal.cluster.protocol.records import OrderBody
from shoal.cluster.scheduler.peers import Peers
from shoal.cluster.scheduler.state import ServerPeer, State

Operation: TypeAlias = Generator[OrderBody, list[OrderReply], None]


class Orders:
    """The operations, and the order in progress."""

    def __init__(self, state: State, peers: Peers) -> None:
        self._state = state
        self._peers = peers
        self._operations: deque[Operation] = deque()
        self._operation: Operation | None = None
        self._body: OrderBody | None = None
        self._awaited: set[int] = set()  # ranks, and -1 - rank for the outcome at copies that a server has adopted
        self._results: dict[int, OrderReply] = {}
        self._is_paused = False
        self._is_stepping = False

    @property
    def at_rest(self) -> bool:
        """Whether no operation is in progress."""
        return self._operation is None and not self._operations

    def begin(self, operation: Operation) -> None:
        """Run an operation after those that wait."""
        self._operations.append(operation)
        self._continue()

    def cancel(self) -> None:
        """End all operations."""
        operations, self._operations = self._operations, deque()
        if self._operation is not None:
            operations.appendleft(self._operation)
            self._operation = self._body = None
            self._results, self._awaited = {}, set()
        for operation in operations:
            operation.close()

    def pause(self, is_paused: bool) -> None:
        """Begin no further order, or go on: none is executed while it is open which server has an arc."""
        self._is_paused = is_paused
        self._continue()

    def _continue(self) -> None:
        """Take the next step of the operations that none waits for."""
        while not self._is_paused and not self._is_stepping:
            if self._operation is None and self._operations:
                self._operation = self._operations.popleft()
                self._step(None)
            elif self._operation is not None and not self._awaited:
                self._step([self._results[key] for key in sorted(self._results)])
            else:
                return

    def _step(self, results: list[OrderReply] | None) -> None:
        assert self._operation is not None
        self._is_stepping = True  # it may begin others
        try:
            self._body = next(self._operation) if results is None else self._operation.send(results)
        except StopIteration:
            self._operation = self._body = None
            self._results = {}
            return
        finally:
            self._is_stepping = False
        self._state.steps += 1
        members = [server for server in self._peers.servers.values() if server.member]
        self._results, self._awaited = {}, {server.rank for server in members}
        for server in members:
            server.orders += 1
            server.order = Order(server.orders, self._body)
            self.send(server)

    def send(self, server: ServerPeer, *, again: bool = False) -> None:
        """Send a server its order."""
        assert server.order is not None
        server.link.order.sent(self._state.now, again=again)
        self._peers.out.append((server.link.route, server.order))

    def resend(self) -> None:
        """Send the orders that were not acknowledged in time again."""
        for server in self._peers.servers.values():
            is_due = server.link.order.at <= self._state.now and server.link.disconnected_at is None
            if server.order is not None and is_due:
                self.send(server, again=True)

    def done(self, server: ServerPeer, done: OrderReply) -> str:
        """Process the result of a server's order; returns its fault, after which it cannot be used."""
        order = server.order
        assert order is not None
        server.order = None
        return self._keep(server.rank, order.body, done)

    def adopted(self, server: ServerPeer, done: OrderReply) -> str:
        """Process the outcome of the order in progress at the copies that a server has adopted, as in :meth:`done`."""
        return "" if self._body is None else self._keep(-1 - server.rank, self._body, done)

    def _keep(self, key: int, body: OrderBody, done: OrderReply) -> str:
        fault = done.fault
        if done.refused is not None and not isinstance(body, AddTable | StartJob):
            fault = fault or f"it refused {type(body).__name__}: {done.refused.text}"
        if fault:
            return f"it failed to execute an order: {fault}"
        if key in self._awaited:
            self._awaited.discard(key)
            self._results[key] = done
            self._continue()
        return ""

    def replace(self, server: ServerPeer, adopters: Iterable[ServerPeer]) -> None:
        """Wait no longer for a dead server: those that adopt its arcs execute the order in progress on the copies.

        To be called before the adopters receive their assignments.
        """
        keys = {server.rank, -1 - server.rank} & self._awaited
        if self._operation is None or self._body is None or not keys:
            return
        self._awaited -= keys
        if not isinstance(self._body, ReportMetrics):
            for adopter in adopters:
                adopter.pending = Order(self._state.steps, self._body)
                self._awaited.add(-1 - adopter.rank)
        self._continue()

    def refusal(self, results: list[OrderReply], what: str) -> ErrorReply | None:
        """Return the refusal of the first server that refused an order, with its name."""
        for done in results:
            if done.refused is not None:
                server = self._peers.known.get(done.sender)
                where = "a server"
                if isinstance(server, ServerPeer):
                    where = f"server {server.rank} at {', '.join(server.addresses)} ({server.about})"
                text = f"{where} {what}: {done.refused.text}"
                self._peers.notes.append(text)
                return ErrorReply(done.refused.kind, text)
        return None
