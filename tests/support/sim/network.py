"""A network and its clock. Everything random comes from one seed, so a schedule that fails can be run again."""

import random
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush


@dataclass(frozen=True, kw_only=True)
class Weather:
    """The faults of a network. Probabilities are per message; times in seconds."""

    base: float = 0.0002  # least delay of a message
    jitter: float = 0.002  # mean of what is added: much more than base means disorder
    ordered: bool = False  # messages of one connection stay in order, as TCP keeps them
    loss: float = 0.0
    most_lost: int = field(default=1 << 30, repr=False)  # messages in a row of one direction of a link
    copies: float = 0.0  # another copy arrives, some time soon
    ghosts: float = 0.0  # another copy arrives long after
    ghost_delay: float = 2.0  # mean
    damage: float = 0.0  # one byte changes on the way
    reconnects: float = 0.0  # the connection breaks: what is on the wire is lost, the peer gets a new name


CALM = Weather()
ROUGH = Weather(loss=0.08, copies=0.08, ghosts=0.02, damage=0.01, reconnects=0.01)
ROUGH_IN_ORDER = replace(ROUGH, ordered=True)


class Network:
    """Events in the order of their times; those of one time in the order in which they were planned."""

    def __init__(self, seed: int, weather: Weather):
        self.random = random.Random(seed)
        self.weather = weather
        self.now = 0.0
        self.delivered = 0
        self.trace = None  # hashes of all that is sent, and without the records of streams, if they are wanted
        self._events = []
        self._planned = 0
        self._connections = {}  # link -> number of its connection
        self._peers = {}  # link -> name of its connection
        self._last = {}  # link -> when its last message arrives
        self._lost = {}  # link -> messages that were lost in a row

    def at(self, time, what, *arguments):
        """Plan an event."""
        self._planned += 1
        heappush(self._events, (max(time, self.now), self._planned, what, arguments))

    def after(self, delay, what, *arguments):
        self.at(self.now + delay, what, *arguments)

    def run(self, done, limit):
        """Run until done() or nothing is planned; returns whether it was done before the time limit."""
        while not done():
            if not self.step(limit):
                return False
        return True

    def step(self, limit):
        """Let the next event happen; returns whether there was one before the time limit."""
        if not self._events or self._events[0][0] > limit:
            return False
        self.now, _, what, arguments = heappop(self._events)
        what(*arguments)
        return True

    def delay(self):
        return self.weather.base + self.random.expovariate(1.0) * self.weather.jitter

    def peer(self, link):
        """Name of a link's present connection, as a ROUTER would make one up."""
        peer = self._peers.get(link)
        if peer is None:
            peer = self._peers[link] = b"%s/%d" % (link.encode(), self._connections.get(link, 0))
        return peer

    def break_connection(self, link):
        """Lose what is on its way over a link; the next message makes another connection."""
        self._connections[link] = self._connections.get(link, 0) + 1
        self._peers.pop(link, None)

    def send(self, link, frames, deliver, *, back, checked=True, ordered=False):
        """Carry a message: ``deliver(peer, frames)`` for each copy that arrives on the connection it left by.

        A message that its receiver does not check (``checked``) is not damaged. ``ordered`` messages of a connection
        stay in order in any weather.
        """
        weather, chance = self.weather, self.random.random
        if weather.reconnects and chance() < weather.reconnects:
            self.break_connection(link)
        frames = [bytes(frame) for frame in frames]  # the sender's arrays may change; the wire has them as they were
        if self.trace is not None:
            sent = repr((link, back, frames)).encode()
            for trace in self.trace if back or "~" not in link else self.trace[:1]:
                trace.update(sent)
        lost = self._lost.get((link, back), 0)
        is_lost = chance() < weather.loss and lost < weather.most_lost
        self._lost[link, back] = lost + 1 if is_lost else 0
        delays = [] if is_lost else [self.delay()]
        if chance() < weather.copies:
            delays.append(self.delay() + self.delay())
        peer = self.peer(link)
        if chance() < weather.ghosts:
            # A delayed copy: it arrives even if the connection has ended since.
            self.after(self.random.expovariate(1.0) * weather.ghost_delay, deliver, peer, frames)
        for delay in delays:
            time = self.now + delay
            if weather.ordered or ordered:
                time = self._last[link, back] = max(time, self._last.get((link, back), 0.0))
            carried = frames
            if checked and chance() < weather.damage:
                carried = list(frames)
                which = self.random.randrange(len(carried))
                if carried[which]:
                    damaged = bytearray(carried[which])
                    damaged[self.random.randrange(len(damaged))] ^= 1 << self.random.randrange(8)
                    carried[which] = bytes(damaged)
            self.at(time, self._arrive, link, peer, carried, deliver)

    def _arrive(self, link, peer, frames, deliver):
        if peer == self.peer(link):
            self.delivered += 1
            deliver(peer, frames)
