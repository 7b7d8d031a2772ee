"""When a worker, a server or another process is dead: all rules, in one place.

    silent         nothing was heard of it for 5 heartbeats
    disconnected   its connection has ended, and: of a server, all its ports refuse connections; of another process, it
                   has not connected again in a second, or half a heartbeat
    pings          a server of a cluster with replicas answers no ping, and its connection has ended (silence.py)
    late           a server has not carried out its assignment, or reported its copies, in 30 seconds
    fault          a server has failed to execute an order or an assignment (membership.py)

A server that is silent and has the last copy of slots is waited for: its death costs their rows. What a living process
does that was declared dead is refused (FENCED), so a false suspicion costs time alone.

A death is an input: what is decided here from the time is applied, and stored, by :class:`.Membership`.

Invariants: I7 and I10 of membership.py. Threads: one.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.cluster.scheduler.assignments import Assignments
from shoal.cluster.scheduler.inputs import Died
from shoal.cluster.scheduler.peers import AddressProbe, LivenessProbe, Peers
from shoal.cluster.scheduler.replicas import Replicas
from shoal.cluster.scheduler.state import Peer, ServerPeer, State

_RECONNECT_SECONDS = 1.0  # in which a peer whose connection has ended connects again, and at least half a heartbeat
_PROBE_AFTER_SECONDS = 0.02  # from the end of a server's connection until its addresses are probed
_MAX_PROBE_SECONDS = 1.0  # between two probes
_HEARTBEATS_TO_CLOSE = 1.25  # of silence: libzmq ends a silent connection after 1.5, a process its own at once
_MAX_SECONDS = 30.0  # in which a server that is alive carries out its assignment, or reports its copies
_LAST_COPY_SECONDS = 60.0  # of silence of a server that has the last copy of slots: its death ends the cluster


class FailureDetector:
    """Finds the dead."""

    def __init__(self, state: State, peers: Peers, assignments: Assignments, replicas: Replicas) -> None:
        self._state = state
        self._peers = peers
        self._assignments = assignments
        self._replicas = replicas
        self._reconnect_seconds = max(_RECONNECT_SECONDS, state.settings.heartbeat / 2)
        self._disconnected: dict[bytes, Peer] = {}  # by sender

    def find_dead(self) -> Iterator[Died]:
        """Yield the deaths that are known by the time alone."""
        now = self._state.now
        for peer in list(self._peers.known.values()):
            silent = now - peer.link.last_heard
            is_silent = silent > self._state.dead_after and self._is_known(peer)
            if is_silent and not self._is_waited_for(peer, silent):
                yield Died(peer.sender, f"it has been silent for {silent:.1f} s", silent)
        for sender, disconnected in list(self._disconnected.items()):
            if not self._is_disconnected(disconnected):
                self._disconnected.pop(sender, None)
            elif why := self._check_disconnected(disconnected):
                yield Died(sender, why)
        for server in list(self._peers.servers.values()):
            if self._is_known(server) and (why := self._check_late(server)):
                yield Died(server.sender, why)

    def _is_known(self, peer: Peer) -> bool:
        return self._peers.known.get(peer.sender) is peer

    def _check_late(self, server: ServerPeer) -> str:
        """Return why a server that answers is of no use; an empty string if it is."""
        seconds = self._peers.running - server.link.offered_at
        if seconds > _MAX_SECONDS and self._assignments.is_awaited(server):
            return f"it has not carried out its assignment of epoch {server.offered_epoch} for {seconds:.1f} s"
        since = self._replicas.stamps.awaited_since(server)
        if since is not None and self._peers.running - since > _MAX_SECONDS:
            return f"it has not reported its copies for {self._peers.running - since:.1f} s"
        return ""

    def find_silent(self, rank: int, why: str, silent: float) -> Died | None:
        """Return the death of a server that has answered no ping for ``silent`` seconds."""
        server = self._peers.servers.get(rank)
        if server is None or not server.member or self._is_waited_for(server, silent):
            return None
        return Died(server.sender, why, silent)

    def _is_waited_for(self, peer: Peer, silent: float) -> bool:
        """Whether a peer that has been silent so long is given more time: it may only be stopped or cut off."""
        if not isinstance(peer, ServerPeer) or not 0 < silent <= _LAST_COPY_SECONDS:
            return False
        waits = self._replicas.has_last_copy(peer)
        if waits and self._state.now - peer.link.waited_for_at > _LAST_COPY_SECONDS:
            peer.link.waited_for_at = self._state.now
            self._peers.notes.append(
                f"server {peer.rank} ({peer.about}) has been silent for {silent:.1f} s. It has the last copy of slots, "
                f"and is declared dead after {_LAST_COPY_SECONDS:g} s, or when its process has ended"
            )
        return waits

    # --- connections that have ended --------------------------------------------------------------------------

    @property
    def has_disconnected(self) -> bool:
        """Whether a peer is disconnected."""
        return any(map(self._is_disconnected, self._disconnected.values()))

    def _is_disconnected(self, peer: Peer) -> bool:
        return self._is_known(peer) and peer.link.disconnected_at is not None

    def disconnect(self, route: bytes) -> None:
        """Process the end of a connection: the peer is not dead for it alone (I10)."""
        peer = self._peers.drop_route(route)
        if peer is not None:
            silent = self._state.now - peer.link.last_heard
            peer.link.was_silent = silent > _HEARTBEATS_TO_CLOSE * self._state.settings.heartbeat
            self._mark_disconnected(peer)

    def _mark_disconnected(self, peer: Peer) -> None:
        peer.link.disconnected_at = self._peers.running
        peer.link.probe_at = self._peers.running + _PROBE_AFTER_SECONDS
        self._disconnected[peer.sender] = peer

    def _check_disconnected(self, peer: Peer) -> str:
        """Return why a disconnected peer is dead; an empty string if it is not, or if that is not known yet."""
        link = peer.link
        assert link.disconnected_at is not None
        seconds = self._peers.running - link.disconnected_at
        if isinstance(peer, ServerPeer) and peer.addresses:
            if link.probe_at is not None and link.probe_at <= self._peers.running:
                link.probe += 1
                link.probe_at = None
                self._peers.probes.append(LivenessProbe(peer.sender, link.probe, peer.addresses))
        elif seconds > self._reconnect_seconds and not link.was_silent:
            why = f"its connection closed, and it has not connected again for {seconds:.1f} s: its process has ended"
            return f"{why}, or the network has failed"
        return ""

    def check_liveness(self, probe: LivenessProbe, is_refused: bool) -> Died | None:
        """Process the result of a liveness probe: whether all addresses refuse connections. Returns the death."""
        server = self._disconnected.get(probe.sender)
        if not isinstance(server, ServerPeer) or not self._is_disconnected(server):
            return None
        link = server.link
        if probe.number != link.probe or link.probe_at is not None or link.disconnected_at is None:
            return None
        seconds = self._peers.running - link.disconnected_at
        if is_refused:
            count = "ports refuse" if len(server.addresses) > 1 else "port refuses"
            why = f"its process has ended: its connection closed and its {count} connections"
            return Died(server.sender, why, seconds)
        link.probe_at = self._peers.running + min(max(_PROBE_AFTER_SECONDS, seconds / 2), _MAX_PROBE_SECONDS)
        return None

    def probe_again(self) -> None:
        """Probe all servers, for the first time or whether they are alive: the scheduler was started again."""
        self._disconnected.clear()
        self._peers.probes.clear()
        for server in self._peers.servers.values():
            if server.inside:
                self._mark_disconnected(server)
            else:
                self._peers.probes.append(AddressProbe(server.sender, server.join, server.addresses))
