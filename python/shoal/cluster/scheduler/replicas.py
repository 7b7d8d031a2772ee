"""Replicas: which endpoint serves each arc and which ones have copies of it, from the first map on.

    forming     each endpoint has backups on other servers, of other nodes where possible: at the same place of the next
                ones (a ring)
    death       each arc of the dead server is served from a copy; without one, the rows are lost and the cluster broken
    report      a copy has arrived, or a stream is of no use and is closed
    plan        copies what lacks a backup, empties servers that are drained, evens out: see planner.py

The death of a server is for ever: its endpoints and streams have numbers that are not used again, and a backup refuses
what comes over a stream that its assignment does not list. So a server that was declared dead and is alive can
acknowledge nothing.

Invariants (tests/cluster/scheduler/test_replicas.py tests them on random schedules)
  R1  An arc has at most one primary in each epoch, and one that is not the first had it in sync.
  R2  After the death of a server each of its arcs that has a copy is served again.
  R3  In the end every arc has as many copies as there are other servers for them, at most `replicas`.

Threads: one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from shoal.base.plural import counted
from shoal.cluster.protocol.messages import (
    AcceptedReply,
    Drain,
    ErrorReply,
    Rebalance,
    ReportStream,
    StreamsClosed,
)
from shoal.cluster.protocol.records import ReplyBody
from shoal.cluster.protocol.reports import ServerDied
from shoal.cluster.protocol.slot_map import ClusterMap, Endpoint, cut_evenly
from shoal.cluster.scheduler.assignments import Assignments
from shoal.cluster.scheduler.handlers import handles
from shoal.cluster.scheduler.inputs import PlanDue
from shoal.cluster.scheduler.orders import Orders
from shoal.cluster.scheduler.peers import Peers
from shoal.cluster.scheduler.planner import Layout, Wishes, describe_slots, find_uneven, owned, plan, ring
from shoal.cluster.scheduler.stamps import Stamps
from shoal.cluster.scheduler.state import Failover, Peer, ServerPeer, State

_AVOID_SECONDS = 5.0  # in which a stream that was closed is not opened again
_ORDER_SECONDS = 0.05  # until a move is planned again that an operation is in the way of
_MOVE_BYTES = 8 << 20  # that an arc counts at least when it moves: its requests wait for some milliseconds meanwhile
_MAX_PAUSE_SECONDS = 0.25  # between two moves
_SHORT_SECONDS = 0.001  # a pause between two moves that is not worth a wait
_MAX_FAILOVERS = 16  # that are remembered


class _Dead(NamedTuple):
    """A server that has died: when, how long after its last sign of life, and what it had or may have had."""

    server: ServerPeer
    why: str
    at: float
    silent: float
    arcs: set[int]
    unsure: set[int]
    endpoints: set[int]


class Replicas:
    """Arcs, copies and streams."""

    def __init__(self, state: State, peers: Peers, orders: Orders, assignments: Assignments) -> None:
        self._state = state
        self._peers = peers
        self._orders = orders
        self._assignments = assignments
        self._dead: dict[int, _Dead] = {}  # servers whose arcs are not assigned yet, by rank
        self.stamps = Stamps(state, peers)
        self.num_failovers = 0  # of this process

    # --- joining ----------------------------------------------------------------------------------------------

    def form(self, servers: Iterable[ServerPeer]) -> None:
        """Make the first map, of these servers in the order of their ranks."""
        ready = list(servers)
        loops = [(address, server.rank) for server in ready for address in server.addresses]
        map = cut_evenly(1, self._state.settings.slots, loops)
        self._state.next_endpoint = len(loops)
        for server in ready:
            server.member = True
        if self._state.settings.replicas:
            self._assignments.change(ring(map, self._state.settings.replicas, self._draw, self._nodes()))
            return
        self._state.newest = map
        for server in ready:
            self._assignments.take_as_given(server)
        self._assignments.carry_out()

    def admit(self, server: ServerPeer) -> ClusterMap:
        """Add the endpoints of a server, without arcs, and move some there unless it is a spare; returns the map."""
        first = self._state.next_endpoint
        self._state.next_endpoint += len(server.addresses)
        endpoints = [Endpoint(first + k, address, server.rank) for k, address in enumerate(server.addresses)]
        server.member = True
        self._state.drained.discard(server.rank)
        if not server.spare:
            self._state.balance, self._state.weights = True, ()
        layout, map = self._layout()
        self._state.newest = layout.to_map(map.epoch + 1, endpoints)
        self._assignments.take_as_given(server)
        self._change(self._state.newest)
        return self._state.newest

    # --- the end of a server ----------------------------------------------------------------------------------

    def lose(self, server: ServerPeer, why: str, silent: float) -> tuple[str, str]:
        """Serve the arcs of a server that has died from their copies."""
        map = self._state.newest
        if map is None:
            return "", ""
        self._state.draining.discard(server.rank)
        self._keep_enough()
        self.stamps.forget(server)
        own = owned(map).get(server.rank, set())
        gone = {endpoint.id for endpoint in map.of_server(server.rank)}
        if not gone:  # it was drained, or was not admitted yet
            self._orders.replace(server, ())
            if self._dead and not self.stamps.are_awaited:
                self._replace_dead()
            self._assignments.carry_out()
            return "", ""
        self._dead[server.rank] = _Dead(server, why, self._state.now, silent, own, server.may_serve - own, gone)
        lost = self._layout()[0].remove_endpoints(self._gone, self._unsure)
        if lost:
            return self._describe_loss(server, why, map, lost)
        # No order begins before the new map is carried out: the dead one's is executed on the copies first.
        self._orders.pause(True)
        if self._have_several_copies(own | self._unsure):
            self._assignments.is_held = True
            self.stamps.request(map, gone)
        if not self.stamps.are_awaited:
            self._replace_dead()
        return "", ""

    def has_last_copy(self, server: ServerPeer) -> bool:
        """Whether slots would be lost with a server, though the cluster has replicas."""
        map = self._state.newest
        if map is None or not self._state.settings.replicas:
            return False
        gone = {endpoint.id for endpoint in map.of_server(server.rank)}
        own = owned(map).get(server.rank, set())
        return bool(self._layout()[0].remove_endpoints(self._gone | gone, self._unsure | (server.may_serve - own)))

    @property
    def _gone(self) -> set[int]:
        """The endpoints that have died."""
        return {id for dead in self._dead.values() for id in dead.endpoints}

    @property
    def _unsure(self) -> set[int]:
        """The arcs that dead servers may have served although the map has them elsewhere."""
        return {arc for dead in self._dead.values() for arc in dead.unsure}

    def _have_several_copies(self, arcs: set[int]) -> bool:
        layout, _ = self._layout()
        return any(len(layout.holders(arc, self._gone)) > 1 for arc in arcs)

    @handles(StreamsClosed)
    def stamped(self, closed: StreamsClosed) -> None:
        """Process how far the copies on a server are; with the last of them, serve the arcs of dead servers."""
        self.stamps.report(closed)
        if self._dead and not self.stamps.are_awaited:
            self._replace_dead()

    def _replace_dead(self) -> None:
        """Serve the arcs of the servers that have died from their copies."""
        layout, map = self._layout()
        layout.remove_endpoints(self._gone, self._unsure, self.stamps.known)
        for rank, dead in self._dead.items():
            server, slots = dead.server, describe_slots(map, dead.arcs)
            ranks = {layout.server(layout.primaries[arc]) for arc in dead.arcs | dead.unsure}
            adopters = [self._peers.servers[rank] for rank in sorted(ranks)]
            text = f"server {rank} at {', '.join(server.addresses)} ({server.about}) is dead, {dead.why}"
            if dead.arcs:
                names = ", ".join(f"server {adopter.rank}" for adopter in adopters)
                self._peers.notes.append(f"{text}: {names} will serve its slots {slots} from copies")
                self.num_failovers += 1
                self._state.failovers.append(
                    Failover(
                        server=rank,
                        about=server.about,
                        why=dead.why,
                        slots=slots,
                        at=dead.at,
                        silent=dead.silent,
                    )
                )
            else:
                self._peers.notes.append(f"{text}: it served no slots")
            self._peers.deaths.append(ServerDied(server.about))
            self._orders.replace(server, adopters)
        del self._state.failovers[:-_MAX_FAILOVERS]
        self._dead.clear()
        self.stamps.clear()
        self._assignments.is_held = False
        self._change(layout.to_map(map.epoch + 1))

    def _keep_enough(self) -> None:
        """Drain no server that the others need for their copies."""
        draining, replicas = self._state.draining, self._state.settings.replicas
        members = {server.rank for server in self._peers.servers.values() if server.member}
        if draining and len(members - draining) <= replicas:
            ranks = ", ".join(f"server {rank}" for rank in sorted(draining))
            self._peers.notes.append(f"{ranks} stays: the others are too few for replicas={replicas}")
            draining.clear()

    def _describe_loss(self, server: ServerPeer, why: str, map: ClusterMap, lost: list[int]) -> tuple[str, str]:
        where = f"server {server.rank} at {', '.join(server.addresses)} ({server.about})"
        reason = why
        if self._state.settings.replicas:
            slots = describe_slots(map, lost)
            where = f"{where}, which had the last copy of slots {slots},"
            reason = f"{why}; it had the last copy of slots {slots}"
            self._peers.deaths.append(ServerDied(server.about, slots))
        return f"{where} is lost with its rows, {why}: start the cluster again and load a checkpoint", reason

    # --- requests ---------------------------------------------------------------------------------------------

    @handles(ReportStream, of_all=True)
    def report(self, server: Peer, number: int, report: ReportStream) -> ReplyBody:
        """Process what a server reports of a stream of one of its endpoints."""
        if not isinstance(server, ServerPeer) or not server.member:
            return ErrorReply("protocol", f"{server} is not a server of the cluster and sent ReportStream")
        layout, map = self._layout()
        stream = next((stream for stream in map.streams if stream.id == report.stream), None)
        if stream is None or layout.server(stream.primary) != server.rank:
            return AcceptedReply("the stream is closed")
        if report.state == "arrived":
            if report.arc in stream.arriving:
                layout.arrive(report.arc, stream.backup)
                self._change(layout.to_map(map.epoch + 1))
            return AcceptedReply()
        # Arcs that the map has elsewhere, and that this server may have changed since the last acknowledgement.
        given = server.may_serve - owned(map).get(server.rank, set())
        if report.state == "stalled" and any(layout.primaries[arc] == stream.backup for arc in given):
            return AcceptedReply("the stream has what its backup needs to serve the slots")
        layout.close(stream.primary, stream.backup)
        for arc in given:
            layout.copies[arc].discard(stream.backup)
        self._state.avoid[stream.primary, stream.backup] = self._state.now + _AVOID_SECONDS
        to = layout.endpoints[stream.backup].label
        slots = describe_slots(map, stream.arcs) or "none"
        self._peers.notes.append(f"the copies of slots {slots} at {to} are given up, {report.state}: {report.text}")
        self._change(layout.to_map(map.epoch + 1))
        return AcceptedReply("the stream is closed")

    @handles(Drain)
    def drain(self, drain: Drain) -> ReplyBody:
        """Begin to empty a server."""
        rank, state = drain.server, self._state
        if rank in state.drained:
            return AcceptedReply(f"server {rank} was drained: other servers have all of its slots")
        fault = self._drain_error(rank)
        if fault:
            return ErrorReply("input", fault)
        if rank not in state.draining:
            state.draining.add(rank)
            state.plan_at = state.now
            self._peers.notes.append(f"server {rank} is drained: its slots move to other servers, then it ends")
        return AcceptedReply(f"server {rank} ends when other servers have all of its slots")

    def _drain_error(self, rank: int) -> str:
        server = self._peers.servers.get(rank)
        if server is None or not server.member:
            return f"the cluster has no server {rank}"
        left = sum(one.member and one.rank not in {*self._state.draining, rank} for one in self._peers.servers.values())
        needed = self._state.settings.replicas + 1
        if left < needed:
            return (
                f"without server {rank} the cluster has {counted(left, 'server')}, and replicas="
                f"{self._state.settings.replicas} needs {needed}: start another server first"
            )
        return ""

    @handles(Rebalance)
    def rebalance(self, rebalance: Rebalance) -> ReplyBody:
        """Begin to move arcs until all endpoints have equal sums of weights, or equally many arcs."""
        weights, map, state = rebalance.weights, self._state.newest, self._state
        if map is None:
            return ErrorReply("input", "not all servers have joined yet: there are no slots to move")
        if weights and len(weights) != len(map.arcs):
            return ErrorReply("input", f"{len(weights)} weights were given for {len(map.arcs)} arcs: give one for each")
        state.balance, state.weights, state.plan_at = True, weights, state.now
        return AcceptedReply(f"slots move until all endpoints have equal{' sums of weights' if weights else 'ly many'}")

    # --- planning ---------------------------------------------------------------------------------------------

    @property
    def plan_at(self) -> float | None:
        """When to plan again: arcs may lack copies or have to move; None: nothing has changed since the last plan."""
        return self._state.plan_at if self._assignments.are_confirmed else None

    @handles(PlanDue)
    def plan(self, _: PlanDue | None = None) -> None:
        """Change the map toward the goals of the planner."""
        layout, map = self._layout()
        state, settings, now = self._state, self._state.settings, self._state.now
        pause = min(_MOVE_BYTES / state.copy_rate, _MAX_PAUSE_SECONDS)
        most_moves = len(map.arcs) if pause < _SHORT_SECONDS else int(now >= state.move_at)
        state.plan_at = None
        state.avoid = {pair: until for pair, until in state.avoid.items() if until > now}
        wishes = Wishes(settings.replicas, state.draining, state.balance, state.avoid.keys(), state.weights, most_moves)
        may_move = self._orders.at_rest
        changed = plan(layout, wishes, may_move=may_move)
        changed |= layout.tidy()
        if may_move and not changed:
            changed = self._release_drained(layout)
        if layout.moves_begun:
            state.move_at = now + pause
        times = [*state.avoid.values()]
        wants_moves = bool(state.draining) or state.balance
        if wants_moves and now < state.move_at:
            times.append(state.move_at)
        if times:
            state.plan_at = min(times)
        if wants_moves and not may_move:
            state.plan_at = now + _ORDER_SECONDS
        if changed:
            self._change(layout.to_map(map.epoch + 1))
        elif state.balance and find_uneven(layout, wishes) is None:
            state.balance = False
            state.plan_at = now  # copies that it has made and are not needed

    def _release_drained(self, layout: Layout) -> bool:
        """Take the endpoints of empty servers out of the map, which ends them; returns whether there are any."""
        released = False
        for rank in sorted(self._state.draining):
            ids = [id for id, endpoint in layout.endpoints.items() if endpoint.server == rank]
            server = self._peers.servers.get(rank)
            if ids and server is not None and all(layout.is_free(id) for id in ids):
                for id in ids:
                    del layout.endpoints[id]
                server.member = False
                self._state.drained.add(rank)
                self._peers.notes.append(f"server {rank} is empty: it ends")
                released = True
        return released

    def note_carried_out(self) -> None:
        """Note that all arcs are served again after a failover, and later that they have all copies."""
        state = self._state
        map = state.published
        if map is None or map is not state.newest or map.epoch == state.noted_epoch:
            return
        state.noted_epoch = map.epoch
        copies = Counter(arc for stream in map.streams for arc in stream.arcs)
        is_copied = all(copies[arc] >= state.settings.replicas for arc in range(len(map.arcs)))
        for one in state.failovers:
            seconds = state.now - one.at
            if one.served_at is None:
                one.served_at = state.now
                self._peers.notes.append(
                    f"slots {one.slots} of dead server {one.server} are served again, {seconds:.3f} s after it was "
                    f"declared dead and {seconds + one.silent:.3f} s after its last sign of life: epoch {map.epoch}"
                )
            if one.copied_at is None and is_copied:
                one.copied_at = state.now
                self._peers.notes.append(
                    f"all slots have their copies again, {seconds:.3f} s after server {one.server} was declared dead: "
                    f"epoch {map.epoch}"
                )

    def _layout(self) -> tuple[Layout, ClusterMap]:
        map = self._state.newest
        assert map is not None
        return Layout(map, self._draw, self._nodes()), map

    def _nodes(self) -> dict[int, str]:
        return {rank: server.node for rank, server in self._peers.servers.items()}

    def _change(self, map: ClusterMap) -> None:
        self._state.plan_at = self._state.now
        self._assignments.change(map)

    def _draw(self) -> int:
        return self._state.draw(52) + 1
