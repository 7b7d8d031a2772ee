"""The processes that the scheduler knows: their routes, and the replies and events that are sent to them.

    known         by sender: every process that has sent Hello and has neither left nor died
    servers       by rank: those that have joined
    routes        destinations of replies; a process that connects again has another one
    events        those that some process has not seen, in one numbered sequence
    out           messages to send

Which of them are dead: failure_detector.py. Invariant: I8 of membership.py. Threads: one.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

from shoal.cluster.protocol.messages import (
    GRACE_SECONDS,
    ErrorReply,
    Events,
    Heartbeat,
    Hello,
    HelloReply,
    Message,
    Reply,
)
from shoal.cluster.protocol.records import Event, ReplyBody
from shoal.cluster.protocol.reports import ServerDied, WorkerDied
from shoal.cluster.scheduler.handlers import handles
from shoal.cluster.scheduler.inputs import EventsSeen
from shoal.cluster.scheduler.monitor import MemberFigures
from shoal.cluster.scheduler.state import ROLES, AnyPeer, Link, Peer, ServerPeer, State, WorkerPeer

_MAX_FORMER = 4096  # senders that are remembered after they have left
_MAX_STEP_SECONDS = 0.25  # that counts as time without a connection between two inputs

Outgoing: TypeAlias = list[tuple[bytes, Message]]  # messages to send, each with its route


class AddressProbe(NamedTuple):
    """Addresses to probe before a server joins; the result goes to :meth:`.Membership.probed`."""

    sender: bytes
    number: int
    addresses: tuple[str, ...]


class LivenessProbe(NamedTuple):
    """Addresses of a disconnected server: do all of them refuse connections? See :meth:`.Membership.liveness`."""

    sender: bytes
    number: int
    addresses: tuple[str, ...]


class Peers:
    """The known processes.

    The caller removes ``notes``, for the log, ``deaths``, for a supervisor, ``refused``, reasons and texts, and
    ``probes``: addresses to probe.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.running = 0.0  # seconds that this state machine was seen to run
        self.known = state.peers
        self.servers: dict[int, ServerPeer] = {server.rank: server for server in state.servers()}
        for peer in self.known.values():  # they have no routes until they are heard again
            peer.link = Link(last_heard=state.now, seen=state.events_dropped)
        self.out: Outgoing = []
        self.notes: deque[str] = deque()
        self.deaths: deque[ServerDied | WorkerDied] = deque()
        self.refused: deque[tuple[str, str]] = deque()
        self.probes: deque[AddressProbe | LivenessProbe] = deque()
        self._by_route: dict[bytes, Peer] = {}

    # --- time and connections ---------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Continue at this time."""
        # More than a heartbeat since the last call is not silence of the peers: this process was stopped, and their
        # messages are still in its sockets.
        state = self._state
        missed = now - state.now - state.settings.heartbeat
        if missed > 0:
            for peer in self.known.values():
                peer.link.last_heard += missed
        self.running += min(max(0.0, now - state.now), _MAX_STEP_SECONDS)
        state.now = max(now, state.now)

    def hear(self, sender: bytes, route: bytes) -> tuple[AnyPeer | None, bool]:
        """Note that a process was heard; returns it, None if it is unknown, and whether its route is new."""
        peer = self.known.get(sender)
        if peer is None:
            return None, False
        link = peer.link
        # Messages of an earlier connection may be received after those of the present one.
        reconnected = route != link.route and route not in link.old_routes
        if reconnected:
            if link.route:
                link.old_routes.append(link.route)
            self._by_route.pop(link.route, None)
            self._by_route[route] = peer
            link.route = route
            self._mark_connected(link)
        link.last_heard = self._state.now
        return peer, reconnected

    def _mark_connected(self, link: Link) -> None:
        link.disconnected_at = None

    def drop_route(self, route: bytes) -> Peer | None:
        """Return the peer whose connection has ended; None if it has another one, or is not known."""
        peer = self._by_route.pop(route, None)
        return peer if peer is not None and peer.link.route == route else None

    def forget_connections(self) -> None:
        """Forget the routes of all peers."""
        self._by_route.clear()
        for peer in self.known.values():
            peer.link.route, peer.link.last_heard, peer.link.disconnected_at = b"", self._state.now, None
            peer.link.old_routes.clear()

    # --- who is known -----------------------------------------------------------------------------------------

    def server(self, sender: bytes) -> ServerPeer:
        """Return a server that is known."""
        server = self.known[sender]
        assert isinstance(server, ServerPeer)
        return server

    def add(self, host: str, sender: bytes, hello: Hello) -> AnyPeer:
        """Add a process that has sent Hello."""
        # It is printed in logs and on terminals.
        about = "".join(letter if letter.isprintable() else "?" for letter in hello.about)
        peer = self.known[sender] = ROLES[hello.role](sender=sender, about=about, host=host)
        peer.link = Link(last_heard=self._state.now, seen=self.num_events)
        return peer

    def forget(self, peer: Peer, last: ReplyBody) -> None:
        """Remove a peer; each further request of it has this reply."""
        del self.known[peer.sender]
        self._by_route.pop(peer.link.route, None)
        former = self._state.former
        former[peer.sender] = last
        while len(former) > _MAX_FORMER:
            del former[next(iter(former))]

    def unknown_sender(self, sender: bytes, host: str) -> ReplyBody:
        """Return the reply to a process that is not known."""
        known = self._state.former.get(sender)
        if known is not None:
            return known
        text = (
            f"{host}: a request from a process that this scheduler does not know. Unless it belongs to another "
            "cluster, the scheduler was restarted while servers and workers kept running: they serve each other, "
            "but no new process. End them, and start the whole cluster again"
        )
        self.refused.append(("unknown", text))
        text = "the scheduler does not know this process: it was restarted since. Start the whole cluster again"
        return ErrorReply("not-connected", text)

    # --- replies and events -----------------------------------------------------------------------------------

    @handles(Hello, of_all=True)
    def welcome(self, peer: Peer, number: int, hello: Hello) -> ReplyBody:
        """Return the reply to Hello."""
        state, settings = self._state, self._state.settings
        return HelloReply(
            state.cluster,
            peer.host,
            settings.slots,
            settings.heartbeat,
            state.dead_after,
            self.num_events,
            settings.grace or GRACE_SECONDS,
            settings.replicas,
        )

    def reply(self, peer: Peer, number: int, body: ReplyBody) -> None:
        """Send the reply to a request, and keep it until it is confirmed."""
        peer.waiting.pop(number, None)
        peer.replies[number] = body
        self.out.append((peer.link.route, Reply(number, body)))

    @property
    def num_events(self) -> int:
        """Number of events so far."""
        return self._state.events_dropped + len(self._state.events)

    def publish(self, event: Event) -> None:
        """Send an event to all peers."""
        first = self.num_events
        self._state.events.append(event)
        self.out += [(peer.link.route, Events(first, (event,))) for peer in self.known.values()]

    def beat(self, peer: Peer, message: Heartbeat) -> Message:
        """Process a heartbeat; returns the events that the peer has not seen."""
        link = peer.link
        link.heartbeat, link.beat_at = message, self._state.now
        link.seen = min(max(message.seen, link.seen), self.num_events)
        return Events(link.seen, tuple(self._state.events[link.seen - self._state.events_dropped :]))

    def figures(self) -> list[MemberFigures]:
        """Return what servers and workers have reported of themselves."""
        return [
            MemberFigures(sender, peer.role, peer.rank, peer.link.beat_at, beat.figures, getattr(peer, "job", ""))
            for sender, peer in self.known.items()
            if isinstance(peer, ServerPeer | WorkerPeer) and peer.rank >= 0
            if (beat := peer.link.heartbeat) is not None and beat.figures is not None
        ]

    def find_seen(self) -> EventsSeen | None:
        """Return how many events all peers have seen; None if these are dropped already."""
        seen = min((peer.link.seen for peer in self.known.values()), default=self.num_events)
        return EventsSeen(seen) if seen > self._state.events_dropped else None

    @handles(EventsSeen)
    def drop_events(self, seen: EventsSeen) -> None:
        """Remove the events that all peers have seen."""
        state = self._state
        del state.events[: seen.events - state.events_dropped]
        state.events_dropped = seen.events
        for peer in self.known.values():
            peer.link.seen = max(peer.link.seen, seen.events)
