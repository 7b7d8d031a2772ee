"""The servers, and the map: who owns which slots.

    forming    servers join, in any order; their ranks are 0..S-1
    map        the last server has joined: the slots are divided evenly among all endpoints, in the order of the ranks
    growing    further servers join; slots move to them
    broken     a server was lost, and rows with it

Threads: one.
"""

from __future__ import annotations

import itertools

from shoal.cluster.protocol.address import check, complete
from shoal.cluster.protocol.messages import (
    EndpointMetrics,
    ErrorReply,
    GetMetrics,
    Join,
    JoinReply,
    MetricsReply,
    ReportMetrics,
    ServerGone,
)
from shoal.cluster.protocol.records import ReplyBody
from shoal.cluster.scheduler.assignments import Assignments
from shoal.cluster.scheduler.handlers import handles
from shoal.cluster.scheduler.inputs import Probed, RefusalsCounted
from shoal.cluster.scheduler.orders import Operation, Orders
from shoal.cluster.scheduler.peers import AddressProbe, Peers
from shoal.cluster.scheduler.replicas import Replicas
from shoal.cluster.scheduler.state import ServerPeer, State, WorkerPeer


class Servers:
    """The servers that have joined."""

    def __init__(
        self, state: State, peers: Peers, orders: Orders, assignments: Assignments, replicas: Replicas
    ) -> None:
        self._state = state
        self._peers = peers
        self._orders = orders
        self._assignments = assignments
        self._replicas = replicas

    # --- joining ----------------------------------------------------------------------------------------------

    def join(self, server: ServerPeer, number: int, join: Join) -> ReplyBody | None:
        """Process the request of a server to join: its addresses are probed first."""
        fault = self._error(server, join)
        if fault:
            return ErrorReply("input", fault)
        free = (rank for rank in itertools.count() if rank not in self._peers.servers)
        server.rank = next(free) if join.rank is None else join.rank
        server.addresses = tuple(complete(address, server.host) for address in join.addresses)
        server.node = join.node
        server.spare = join.spare
        server.join = number
        self._peers.servers[server.rank] = server
        server.waiting[number] = "its addresses to be probed"
        self._peers.probes.append(AddressProbe(server.sender, number, server.addresses))
        return None

    def _error(self, server: ServerPeer, join: Join) -> str:
        servers, size, slots = self._peers.servers, self._state.settings.servers, self._state.settings.slots
        if server.rank >= 0:
            return f"{server} has joined already"
        is_formed = self._state.newest is not None
        if join.spare and not is_formed:
            return f"a spare server joins a cluster that has formed, but {self.missing()}: start it when all have"
        if len(servers) == size and not is_formed:
            return f"the cluster has all of its {size} servers: pass a larger --servers to the scheduler"
        if join.rank is not None and not 0 <= join.rank < size and not is_formed:
            return f"rank {join.rank} is out of range for {size} servers: ranks start at 0"
        if join.rank is not None and join.rank in servers:
            return f"{servers[join.rank]} has that rank: give every server its own rank, or none"
        if not join.addresses:
            return "a server needs at least one address"
        try:
            addresses = [complete(address, server.host) for address in join.addresses]
            for address in addresses:
                check(address)
        except ValueError as error:
            return str(error)
        taken = {address for other in servers.values() for address in other.addresses}
        if len(set(addresses)) < len(addresses) or taken & set(addresses):
            return f"two endpoints have the same address among {', '.join(addresses)}: give each server its own --bind"
        if len(taken) + len(addresses) > slots:
            return f"{slots} slots are too few for more than {len(taken)} endpoints: use fewer --threads"
        return ""

    @handles(Probed)
    def apply_probe(self, entry: Probed) -> None:
        """Process the result of an address probe: with the last of the servers the map is made."""
        server = self._peers.server(entry.sender)
        if entry.fault is None:
            server.inside = True
            server.waiting[server.join] = "other servers"
            if self._state.newest is None:
                self._form()
            else:
                self._orders.begin(self._admit(server))
            return
        address, what = entry.fault
        text = (
            f"{server} cannot be reached at {address} ({what}): pass --advertise HOST, a name or address of "
            "its machine that the scheduler and all workers can reach"
        )
        self._peers.servers.pop(server.rank, None)
        self._peers.refused.append(("unreachable", text))
        self._peers.reply(server, server.join, ErrorReply("input", text))
        server.rank = -1

    def _form(self) -> None:
        ready = [self._peers.servers[rank] for rank in sorted(self._peers.servers)]
        if len(ready) < self._state.settings.servers or not all(server.inside for server in ready):
            return
        self._replicas.form(ready)
        map = self._state.newest
        assert map is not None
        addresses = ", ".join(endpoint.address for endpoint in map.endpoints)
        self._peers.notes.append(f"all servers have joined: {addresses}")
        for server in ready:
            self._peers.reply(server, server.join, JoinReply(server.rank, map, ()))

    def _admit(self, server: ServerPeer) -> Operation:
        """Let a server join a formed cluster, between two orders: it executes those that follow."""
        if self._peers.servers.get(server.rank) is server:
            map = self._replicas.admit(server)
            where = ", ".join(server.addresses)
            what = "it is a spare, which serves no slots yet" if server.spare else "slots move to it"
            self._peers.notes.append(f"server {server.rank} has joined: {where}; {what}")
            self._peers.reply(server, server.join, JoinReply(server.rank, map, tuple(self._state.tables.values())))
        yield from ()

    def missing(self) -> str:
        """Return how many servers have joined."""
        inside = sum(server.inside for server in self._peers.servers.values())
        return f"{inside} of {self._state.settings.servers} servers have joined"

    # --- the end of a server ----------------------------------------------------------------------------------

    def lose(self, server: ServerPeer, why: str, silent: float) -> bool:
        """Process the end of a server; returns whether rows were lost with it."""
        del self._peers.servers[server.rank]
        if self._state.broken:
            return False
        text, reason = self._replicas.lose(server, why, silent)
        if not text:
            return False
        self._state.broken = text
        self._peers.notes.append(text)
        self._peers.publish(ServerGone(server.rank, text, reason))
        return True

    # --- requests ---------------------------------------------------------------------------------------------

    @handles(GetMetrics)
    def report_metrics(self, worker: WorkerPeer, number: int, ask: GetMetrics) -> None:
        """Process a request for the metrics."""
        worker.waiting[number] = "the servers to report their metrics"
        self._orders.begin(self._gather_metrics(worker, number))

    def _gather_metrics(self, worker: WorkerPeer, number: int) -> Operation:
        results = yield ReportMetrics()
        map = self._state.published
        assert map is not None
        if worker.sender in self._peers.known:
            endpoints = []
            for done in results:
                server = self._peers.known.get(done.sender)
                for where, figures in zip(map.of_server(server.rank) if server else (), done.figures, strict=False):
                    endpoints.append(EndpointMetrics(where.server, where.address, figures))
            self._peers.reply(worker, number, MetricsReply(tuple(endpoints), self._state.refused))

    @handles(RefusalsCounted)
    def count_refusals(self, counted: RefusalsCounted) -> None:
        """Keep the scheduler's own metrics."""
        self._state.refused = counted.counts
