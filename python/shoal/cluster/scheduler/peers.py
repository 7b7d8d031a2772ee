"""The processes that the scheduler knows: where they are, when they were heard, and what was sent to them.

    known         by sender: every process that has sent Hello and has neither left nor died
    servers       by rank: those that have joined
    routes        destinations of replies; a process that connects again has another one
    events        those that some process has not seen, in one numbered sequence
    out           messages to send

What is declared here is no input by itself: `find_dead` yields the deaths, which :class:`.Membership` records.

Invariants: I7, I8 and I10 of membership.py.

Threads: one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

from shoal.cluster.protocol.messages import (
    ErrorReply,
    Event,
    Events,
    Heartbeat,
    Hello,
    HelloReply,
    Message,
    Reply,
    ReplyBody,
)
from shoal.cluster.protocol.reports import ServerDied, WorkerDied
from shoal.cluster.scheduler.inputs import Died, MembershipState, Settings
from shoal.cluster.scheduler.members import (
    AddressProbe,
    LauncherPeer,
    LivenessProbe,
    Outgoing,
    Peer,
    ReaderPeer,
    ServerPeer,
    WorkerPeer,
    restore_peer,
)
from shoal.cluster.scheduler.monitor import MemberFigures

DEAD_AFTER = 5  # heartbeats missed
_MAX_FORMER = 4096  # senders that are remembered after they have left
_RECONNECT_SECONDS = 1.0  # in which a peer whose connection has ended connects again, and at least half a heartbeat
_PROBE_AFTER_SECONDS = 0.02  # from the end of a server's connection until its addresses are probed
_MAX_PROBE_SECONDS = 1.0  # between two probes
_MAX_STEP_SECONDS = 0.25  # that counts as time without a connection between two inputs
_HEARTBEATS_TO_CLOSE = 1.25  # of silence: libzmq ends a silent connection after 1.5, a process its own at once

ROLES: dict[str, type[Peer]] = {
    "server": ServerPeer,
    "worker": WorkerPeer,
    "reader": ReaderPeer,
    "launcher": LauncherPeer,
}


class Peers:
    """The known processes."""

    def __init__(self, settings: Settings, now: float) -> None:
        self._settings = settings
        self._reconnect_seconds = max(_RECONNECT_SECONDS, settings.heartbeat / 2)
        self.dead_after = DEAD_AFTER * settings.heartbeat
        self.now = now
        self.running = 0.0  # seconds that this state machine was seen to run
        self.known: dict[bytes, Peer] = {}
        self.servers: dict[int, ServerPeer] = {}
        self.out: Outgoing = []
        # Events for the log; the caller removes them.
        self.notes: deque[str] = deque()
        self.deaths: deque[ServerDied | WorkerDied] = deque()  # for a supervisor; the caller removes them
        # Reason and text of each refusal; the caller removes them.
        self.refused: deque[tuple[str, str]] = deque()
        # Addresses to probe; the caller removes them.
        self.probes: deque[AddressProbe | LivenessProbe] = deque()
        self._by_route: dict[bytes, Peer] = {}
        self._disconnected: dict[bytes, Peer] = {}  # by sender
        self._former: OrderedDict[bytes, ReplyBody] = OrderedDict()
        self._events: list[Event] = []
        self._events_dropped = 0  # number of earlier ones

    # --- the state as a record --------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """Return the fields of :class:`.MembershipState` that are kept here."""
        return {
            "now": self.now,
            "peers": [peer.save() for peer in self.known.values()],
            "former": list(self._former.items()),
            "servers": [server.sender for server in self.servers.values()],
            "events": list(self._events),
            "events_dropped": self._events_dropped,
        }

    def restore(self, state: MembershipState) -> None:
        """Take a saved state. Processes have no routes until they are heard again."""
        self._events, self._events_dropped = list(state.events), state.events_dropped
        self.known = {peer.sender: restore_peer(peer, state.now, state.events_dropped) for peer in state.peers}
        self._former = OrderedDict(state.former)
        for server in map(self.known.__getitem__, state.servers):
            assert isinstance(server, ServerPeer)
            self.servers[server.rank] = server

    # --- time -------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Continue at this time."""
        # More than a heartbeat since the last call is not silence of the peers: this process was stopped, and their
        # messages are still in its sockets.
        missed = now - self.now - self._settings.heartbeat
        if missed > 0:
            for peer in self.known.values():
                peer.last_heard += missed
        self.running += min(max(0.0, now - self.now), _MAX_STEP_SECONDS)
        self.now = max(now, self.now)

    # --- connections ------------------------------------------------------------------------------------------

    @property
    def has_disconnected(self) -> bool:
        """Whether a peer is disconnected."""
        return bool(self._disconnected)

    def hear(self, sender: bytes, route: bytes) -> tuple[Peer | None, bool]:
        """Note that a process was heard; returns it, None if it is unknown, and whether its route is new."""
        peer = self.known.get(sender)
        if peer is None:
            return None, False
        # Messages of an earlier connection may be received after those of the present one.
        reconnected = route != peer.route and route not in peer.old_routes
        if reconnected:
            if peer.route:
                peer.old_routes.append(peer.route)
            self._by_route.pop(peer.route, None)
            self._by_route[route] = peer
            peer.route = route
            self._mark_connected(peer)
        peer.last_heard = self.now
        return peer, reconnected

    def _mark_connected(self, peer: Peer) -> None:
        peer.disconnected_at = None
        self._disconnected.pop(peer.sender, None)

    def disconnect(self, route: bytes) -> None:
        """Process the end of a connection."""
        peer = self._by_route.pop(route, None)
        if peer is not None and peer.route == route:
            peer.disconnected_at = self.running
            peer.was_silent = self.now - peer.last_heard > _HEARTBEATS_TO_CLOSE * self._settings.heartbeat
            self._disconnected[peer.sender] = peer
            if isinstance(peer, ServerPeer):
                peer.probe_at = self.running + _PROBE_AFTER_SECONDS

    def check_liveness(self, probe: LivenessProbe, is_refused: bool) -> Died | None:
        """Process the result of a liveness probe: whether all addresses refuse connections. Returns the death."""
        server = self._disconnected.get(probe.sender)
        if not isinstance(server, ServerPeer) or probe.number != server.probe or server.probe_at is not None:
            return None
        assert server.disconnected_at is not None
        if is_refused:
            count = "ports refuse" if len(server.addresses) > 1 else "port refuses"
            why = f"its process has ended: its connection closed and its {count} connections"
            return Died(self.now, server.sender, why, self.running - server.disconnected_at)
        seconds = max(_PROBE_AFTER_SECONDS, (self.running - server.disconnected_at) / 2)
        server.probe_at = self.running + min(seconds, _MAX_PROBE_SECONDS)
        return None

    def find_dead(self) -> Iterator[Died]:
        """Yield the deaths that are known by the time alone."""
        for peer in list(self.known.values()):
            silent = self.now - peer.last_heard
            if silent > self.dead_after and peer.sender in self.known:
                yield Died(self.now, peer.sender, f"it has been silent for {silent:.1f} s", silent)
        for peer in list(self._disconnected.values()):
            if peer.sender in self._disconnected and (why := self._check_disconnected(peer)):
                yield Died(self.now, peer.sender, why)

    def _check_disconnected(self, peer: Peer) -> str:
        """Return why a disconnected peer is dead; an empty string if it is not, or if that is not known yet."""
        assert peer.disconnected_at is not None
        seconds = self.running - peer.disconnected_at
        if isinstance(peer, ServerPeer) and peer.addresses:
            if peer.probe_at is not None and peer.probe_at <= self.running:
                peer.probe += 1
                peer.probe_at = None
                self.probes.append(LivenessProbe(peer.sender, peer.probe, peer.addresses))
        elif seconds > self._reconnect_seconds and not peer.was_silent:
            why = f"its connection closed, and it has not connected again for {seconds:.1f} s: its process has ended"
            return f"{why}, or the network has failed"
        return ""

    def forget_connections(self) -> None:
        """Forget the routes of all peers, and probe all servers: for the first time, or whether they are alive."""
        self._by_route.clear()
        self._disconnected.clear()
        for peer in self.known.values():
            peer.route, peer.last_heard, peer.disconnected_at = b"", self.now, None
            peer.old_routes.clear()
            if isinstance(peer, ServerPeer) and peer.inside:
                peer.disconnected_at = self.running
                peer.probe_at = self.running + _PROBE_AFTER_SECONDS
                self._disconnected[peer.sender] = peer
        self.probes.clear()
        for server in self.servers.values():
            if not server.inside:
                self.probes.append(AddressProbe(server.sender, server.join, server.addresses))

    # --- who is known -----------------------------------------------------------------------------------------

    def add(self, route: bytes, host: str, sender: bytes, hello: Hello) -> Peer:
        """Add a process that has sent Hello."""
        # It is printed in logs and on terminals.
        about = "".join(letter if letter.isprintable() else "?" for letter in hello.about)
        peer = ROLES[hello.role](sender, hello.role, about, host, route, self.now, self.num_events)
        self.known[sender] = peer
        if route:
            self._by_route[route] = peer
        return peer

    def forget(self, peer: Peer, last: ReplyBody) -> None:
        """Remove a peer; each further request of it has this reply."""
        del self.known[peer.sender]
        self._by_route.pop(peer.route, None)
        self._disconnected.pop(peer.sender, None)
        self._former[peer.sender] = last
        while len(self._former) > _MAX_FORMER:
            self._former.popitem(last=False)

    def is_former(self, sender: bytes) -> bool:
        """Whether a process was known before."""
        return sender in self._former

    def unknown_sender(self, sender: bytes, host: str) -> ReplyBody:
        """Return the reply to a process that is not known."""
        known = self._former.get(sender)
        if known is not None:
            return known
        self.refused.append(
            (
                "unknown",
                f"{host}: a request from a process that this scheduler does not know. Unless it belongs to another "
                "cluster, the scheduler was restarted while servers and workers kept running: they serve each other, "
                "but no new process. End them, and start the whole cluster again",
            )
        )
        text = "the scheduler does not know this process: it was restarted since. Start the whole cluster again"
        return ErrorReply("not-connected", text)

    # --- replies and events -----------------------------------------------------------------------------------

    def welcome(self, peer: Peer, cluster: str) -> HelloReply:
        """Return the reply to Hello."""
        its = self._settings
        return HelloReply(
            cluster, peer.host, its.slots, its.heartbeat, self.dead_after, self.num_events, its.grace, its.replicas
        )

    def reply(self, peer: Peer, number: int, body: ReplyBody) -> None:
        """Send the reply to a request, and keep it until it is confirmed."""
        peer.waiting.pop(number, None)
        peer.replies[number] = body
        self.out.append((peer.route, Reply(number, body)))

    @property
    def num_events(self) -> int:
        """Number of events so far."""
        return self._events_dropped + len(self._events)

    @property
    def has_events(self) -> bool:
        """Whether some events are kept."""
        return bool(self._events)

    def publish(self, event: Event) -> None:
        """Send an event to all peers."""
        first = self.num_events
        self._events.append(event)
        self.out += [(peer.route, Events(first, (event,))) for peer in self.known.values()]

    def beat(self, peer: Peer, message: Heartbeat) -> Message:
        """Process a heartbeat; returns the events that the peer has not seen."""
        if message.figures is not None:
            peer.figures, peer.figures_at = message.figures, self.now
        seen = min(max(message.seen, peer.seen), self.num_events)
        peer.seen = seen
        if isinstance(peer, WorkerPeer):
            peer.clock = message.clock
        elif isinstance(peer, ServerPeer):
            peer.streams, peer.arcs = message.streams, message.arcs
        return Events(seen, tuple(self._events[seen - self._events_dropped :]))

    def figures(self) -> list[MemberFigures]:
        """Return what servers and workers have reported of themselves."""
        return [
            MemberFigures(sender, peer.role, peer.rank, peer.figures_at, peer.figures, peer.job)
            for sender, peer in self.known.items()
            if isinstance(peer, ServerPeer | WorkerPeer) and peer.rank >= 0 and peer.figures is not None
        ]

    def seen_by_all(self) -> int:
        """Return how many events all peers have seen; 0 if these are dropped already."""
        seen = min((peer.seen for peer in self.known.values()), default=self.num_events)
        return seen if seen > self._events_dropped else 0

    def drop_events(self, seen: int) -> None:
        """Remove the events that all peers have seen, by their number."""
        del self._events[: seen - self._events_dropped]
        self._events_dropped = seen
        for peer in self.known.values():
            peer.seen = max(peer.seen, seen)
