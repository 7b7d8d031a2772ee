"""Stamps: how far the copies of a dead server's arcs are, so that the most advanced copy becomes the primary.

The backups of a primary that has died have acknowledged different records. Each server with some of them closes the
primary's streams, so that nothing more arrives, and reports the stamp of the last record that each arc has executed. As
the new view of Viewstamped Replication (Oki and Liskov, PODC'88): the greatest stamp wins.

Threads: one.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.cluster.protocol.messages import CloseStreams, StreamsClosed
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.scheduler.peers import Peers
from shoal.cluster.scheduler.state import ServerPeer, State

_RESEND_SECONDS = 0.1


class Stamps:
    """The stamps that servers have reported since the first death, and those that are awaited."""

    def __init__(self, state: State, peers: Peers) -> None:
        self._state = state
        self._peers = peers
        self._awaited: dict[bytes, set[int]] = {}  # streams, by the server that is to close them
        self._since: dict[bytes, float] = {}  # counted as `Peers.running`
        self._send_at = 0.0
        # By endpoint and first slot.
        self.known: dict[tuple[int, int], int] = {}

    @property
    def are_awaited(self) -> bool:
        """Whether a server has not answered."""
        return bool(self._awaited)

    @property
    def next_time(self) -> float:
        """When to call :meth:`resend`."""
        return self._send_at

    def request(self, map: ClusterMap, dead: Iterable[int]) -> None:
        """Close the streams of these endpoints; living servers report the stamps of what they have of them."""
        gone = set(dead)
        for stream in map.streams:
            server = self._peers.servers.get(map.endpoint(stream.backup).server)
            if stream.primary in gone and stream.backup not in gone and server is not None:
                self._awaited.setdefault(server.sender, set()).add(stream.id)
                self._since.setdefault(server.sender, self._peers.running)
        self._send()

    def forget(self, server: ServerPeer) -> None:
        """Await nothing of a server that has died."""
        self._awaited.pop(server.sender, None)
        self._since.pop(server.sender, None)

    def clear(self) -> None:
        """Forget the reported stamps: the arcs are served again."""
        self.known.clear()

    def awaited_since(self, server: ServerPeer) -> float | None:
        """Return since when a server has to report stamps, counted as `Peers.running`; None if it has not."""
        return self._since.get(server.sender)

    def report(self, closed: StreamsClosed) -> None:
        """Keep what a server has reported."""
        for one in closed.stamps:
            self.known[one.endpoint, one.first_slot] = one.stamp
        left = self._awaited.get(closed.sender, set()) - set(closed.streams)
        if left:
            self._awaited[closed.sender] = left
        else:
            self._awaited.pop(closed.sender, None)
            self._since.pop(closed.sender, None)

    def resend(self) -> None:
        """Repeat the requests that are not answered."""
        if self._awaited and self._send_at <= self._state.now:
            self._send()

    def _send(self) -> None:
        self._send_at = self._state.now + _RESEND_SECONDS
        for sender, streams in self._awaited.items():
            self._peers.out.append((self._peers.known[sender].link.route, CloseStreams(tuple(sorted(streams)))))
