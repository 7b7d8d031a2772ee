"""The scheduler's pings: the real detector and real PING messages, on the simulated network."""

import math
import random

from shoal.cluster.protocol.ping import encode_ping, ping_number
from shoal.cluster.scheduler.silence import SilenceDetector

CUT_SECONDS = 0.75  # of a detector's: without a sign of life, a connection has ended


class Pings:
    """Pings the endpoints of a cluster, and suspects the servers that are silent.

    Parameters
    ----------
    world : Replicated
    speed : float
        Of the detector's timers, which are made for real networks.

    Attributes
    ----------
    suspected : int
        Servers that were declared dead for their silence.
    """

    def __init__(self, world, speed):
        self.world, self.speed = world, speed
        self.suspected = 0
        self._random = random.Random(f"pings {world.seed}")
        self._start()

    def _start(self):
        self._detector = SilenceDetector()
        self._heard = {}  # by address: when the connection last carried something, both ways

    def turn(self):
        """Ping if it is time; returns what the scheduler sends then."""
        world, now = self.world, self.world.network.now * self.speed
        map, outgoing = world.membership.map, []
        watched = {} if map is None or world.membership.broken else {one.address: one.server for one in map.endpoints}
        self._detector.watch(watched, now)
        for address in watched:
            if self._is_open(world.process_of[address]):
                self._heard[address] = now
        while self._detector.next_time <= now:
            connected = {address for address in watched if now - self._heard.get(address, -math.inf) < CUT_SECONDS}
            pings, silent = self._detector.begin_round(now, connected)
            for address, number in pings.items():
                self._after_a_while(self._arrive, address, number)
            for rank, why, seconds in silent:
                self.suspected += 1
                outgoing += world.membership.suspect(rank, why, seconds / self.speed, world.network.now)
        return outgoing

    def restarted(self):
        """The scheduler was started again: it knows nothing."""
        self._start()

    def _is_open(self, server):
        world = self.world
        is_cut = world.is_cut(None, server) or world.is_cut(server, None)
        return server.alive and server.stopped_until <= world.network.now and not is_cut

    def _after_a_while(self, what, *arguments):
        weather = self.world.network.weather
        if self._random.random() >= weather.loss:  # else its connection ends before it is sent again
            self.world.network.after(weather.base + self._random.expovariate(1.0) * weather.jitter, what, *arguments)

    def _arrive(self, address, number):
        """A server receives a PING, once it runs; its answer goes back."""
        world = self.world
        server = world.process_of[address]
        if not world.is_cut(None, server) and world.runs(server, self._arrive, address, number):
            for _, frames in world.services[address].handle(b"scheduler", [encode_ping(number)]):
                if not world.is_cut(server, None):
                    self._after_a_while(self._answered, address, ping_number(frames))

    def _answered(self, address, number):
        if self.world.is_down:
            return
        if number is None:
            self.world.monitor.report(f"{address} has answered a PING with something else")
        else:
            self._detector.answered(address, number, self.world.network.now * self.speed)
