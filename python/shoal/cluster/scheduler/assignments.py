"""Assignments: each server carries out the newest map, in an order in which no arc ever has two primaries.

What servers have to do is declared. An assignment is the whole map; the newest counts, and a server that has missed
some needs nothing else. A map is carried out in four stages, each of which begins when the one before it is confirmed:

    givers    servers that may serve arcs which the map has elsewhere: they retire them
    backups   servers with copies of arcs that have another primary: they expect them over its stream
    takers    servers that the map gives arcs
    others    all other servers; the map is published to workers

No order begins before the last stage, so an order is executed on each arc once.

Invariants
  A1  An arc is assigned to a server only after each other one that may serve it has confirmed that it does not, or is
      dead: then its streams are fenced.
  A2  A primary serves an arc only after the backups that have it in sync expect its stream.
  A3  A published map is confirmed by all servers that serve arcs by it.

Threads: one.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.cluster.protocol.messages import Assign, Assigned, GetMapReply, MapChanged
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.scheduler.orders import Orders
from shoal.cluster.scheduler.peers import Peers
from shoal.cluster.scheduler.planner import owned
from shoal.cluster.scheduler.state import ReaderPeer, ServerPeer, State


class Assignments:
    """The map, and which servers have carried it out."""

    def __init__(self, state: State, peers: Peers, orders: Orders) -> None:
        self._state = state
        self._peers = peers
        self._orders = orders
        # Whether no assignment is sent: it is open which copies of a dead server's arcs serve next.
        self.is_held = False

    @property
    def are_confirmed(self) -> bool:
        """Whether all servers have carried out the newest map."""
        return self._state.published is self._state.newest and not self.is_held and not any(self._late())

    def change(self, map: ClusterMap) -> None:
        """Carry out another map."""
        self._state.newest = map
        self.carry_out()

    def take_as_given(self, server: ServerPeer) -> None:
        """Count the newest map as confirmed by a server that has received it in the reply to its request to join."""
        assert self._state.newest is not None
        server.offered_epoch = self._state.newest.epoch
        self._note_confirmed(server, self._state.newest)

    def confirm(self, server: ServerPeer, done: Assigned) -> None:
        """Process that a server has carried out the map of an epoch."""
        newest = self._state.newest
        if newest is not None and done.epoch == newest.epoch != server.confirmed_epoch:
            server.pending = None
            self._note_confirmed(server, newest)
            self.carry_out()

    def _note_confirmed(self, server: ServerPeer, map: ClusterMap) -> None:
        server.confirmed_epoch = map.epoch
        server.serves = set(owned(map).get(server.rank, ()))
        server.may_serve = set(server.serves)

    def _late(self) -> Iterator[ServerPeer]:
        """Yield the servers that have not confirmed the newest map, also those that were drained."""
        newest = self._state.newest
        if newest is not None:
            for server in self._peers.servers.values():
                is_served = server.member or server.confirmed_epoch > 0
                if server.inside and is_served and server.confirmed_epoch < newest.epoch:
                    yield server

    def carry_out(self) -> None:
        """Begin the stages whose turn it is."""
        map = self._state.newest
        if map is None or self.is_held:
            return
        own = owned(map)
        late = list(self._late())
        givers = [server for server in late if server.may_serve - own.get(server.rank, set())]
        takers = [server for server in late if own.get(server.rank, set()) - server.serves]
        gained = {arc for server in takers for arc in own[server.rank] - server.serves}
        ranks = {map.endpoint(one.backup).server for one in map.streams if not gained.isdisjoint(one.arcs)}
        backups = [server for server in late if server.rank in ranks and server not in takers]
        for server in givers or backups or takers or late:
            if server.offered_epoch < map.epoch:
                if server.offered_epoch == server.confirmed_epoch:
                    server.link.offered_at = self._peers.running
                server.offered_epoch = map.epoch
                server.may_serve |= own.get(server.rank, set())
                server.serves &= own.get(server.rank, set())  # it may retire the others from now on
                self.send(server)
        if not givers and not takers and self._state.published is not map:
            was_published, self._state.published = self._state.published is not None, map
            if was_published:
                self._peers.publish(MapChanged(map))
            else:
                self._reply_to_readers(map)
        self._orders.pause(bool(givers or takers))

    def _reply_to_readers(self, map: ClusterMap) -> None:
        """Send the first map to the readers that wait for it."""
        for peer in self._peers.known.values():
            if isinstance(peer, ReaderPeer):
                for number in list(peer.waiting):
                    self._peers.reply(peer, number, GetMapReply(map))

    # --- messages ---------------------------------------------------------------------------------------------

    def is_awaited(self, server: ServerPeer) -> bool:
        """Whether a server was sent an assignment that it has not confirmed."""
        newest = self._state.newest
        return newest is not None and server.confirmed_epoch < server.offered_epoch == newest.epoch

    def send(self, server: ServerPeer, *, again: bool = False) -> None:
        """Send a server the newest map."""
        state, link = self._state, server.link
        assert state.newest is not None
        link.assignment.sent(state.now, again=again)
        self._peers.out.append((link.route, Assign(state.newest, server.pending, state.copy_rate)))

    def resend(self) -> None:
        """Send the assignments that were not confirmed in time again."""
        for server in self._peers.servers.values():
            is_due = server.link.assignment.at <= self._state.now and server.link.disconnected_at is None
            if is_due and self.is_awaited(server):
                self.send(server, again=True)
