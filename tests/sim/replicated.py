"""A cluster with replicas in memory: the real scheduler, servers' control, endpoints, streams and requests.

Servers are killed, stopped for a while, and cut off from others in one direction; the scheduler dies and comes back
from its inputs; servers join, are drained, and arcs move, all at random moments from one seed. This file has only the
loops around the state machines.
"""

import random

import msgspec

from shoal import _core
from shoal.cluster.protocol import messages as m
from shoal.cluster.scheduler.membership import Membership
from shoal.cluster.server.assignment import ServerControl
from sim.whole import HEARTBEAT, Process, Whole, WorkerProcess

TURN = 0.004  # between two looks of a server at its streams, in seconds
SPEED = 5  # of the timers of a server, which are made for real networks


class StreamEnd:
    """The primary's end of a stream, to which replies come back."""

    def __init__(self, server, address, stream):
        self.server, self.address, self.stream = server, address, stream

    def hear(self, _, frames):
        world = self.server.world
        if world.runs(self.server, self.hear, _, frames):
            world.reply(self.address, world.services[self.address].handle_backup(self.stream, frames))


class ReplicatedServer(Process):
    """A server: its control, and its endpoints with their streams."""

    def __init__(self, world, rank, endpoints):
        self.rank = None
        self.control = None
        self.taken, self.last = 0, None
        self.waiting = []
        self.stopped_until = 0.0
        self.gone = False
        self.addresses = tuple(f"tcp://10.0.0.{rank + 1}:{5000 + k}" for k in range(endpoints))
        super().__init__(world, "server", f"server {rank}")

    # --- the scheduler's side ---

    def answered(self, body):
        if isinstance(body, m.HelloReply):
            for address in self.addresses:
                self.world.services[address] = _core.Service(self.world.slots, [])
            self.ask(m.Join(None, self.addresses))
        elif isinstance(body, m.JoinReply):
            self.rank = body.rank
            services = {address: self.world.services[address] for address in self.addresses}
            self.control = ServerControl(services, self.sender)
            self.control.set_map(body.map)
            for address in self.addresses:
                if any(body.map.arc_ranges(one.id) for one in self.control.endpoints if one.address == address):
                    for table, spec in self.world.tables.items():
                        services[address].add_table(table, **spec)
            for message in self.waiting:
                self.hear(message)
            self.turn()
        elif isinstance(body, m.LeaveReply):
            self.alive = False

    def hear(self, message):
        if not self.world.runs(self, self.hear, message):
            return
        if not isinstance(message, m.Order | m.Assign):
            super().hear(message)
        elif self.control is None:
            self.waiting.append(message)
        elif self.fault is None:
            if isinstance(message, m.Assign):
                self.control.assign(message)
            elif message.number == self.taken + 1:
                self.taken += 1
                self.control.order(message)
            elif self.last is not None and message.number == self.last.number:
                self.send(self.last)
            self.look()

    def speak(self):
        if self.world.runs(self, self.speak):
            super().speak()

    def ended(self):
        self.alive = False  # as a Server, whose fault ends its process

    # --- the streams ---

    def look(self):
        """Send what follows from what has happened."""
        for out in self.control.poll(self.world.network.now * SPEED):
            if isinstance(out, m.ReportStream):
                self.ask(out)
            else:
                if isinstance(out, m.OrderReply):
                    self.last = out
                self.send(out)
        if self.control.is_drained and not self.gone:
            self.gone = True
            self.ask(m.Leave())

    def turn(self):
        if not self.world.runs(self, self.turn) or self.world.over:
            return
        world = self.world
        for address in self.addresses:
            service = world.services[address]
            world.reply(address, service.on_time(int(world.network.now * 1000 * SPEED)))
            self.carry(address)
            world.reply(address, service.acknowledge())
            world.reply(address, service.released())
        self.look()
        world.network.after(TURN, self.turn)

    def carry(self, address):
        """Send the messages of an endpoint's streams."""
        world = self.world
        service = world.services[address]
        for stream, to, _ in service.targets():
            link = f"{address}~{stream}>{to}"
            world.links.setdefault(link, StreamEnd(self, address, stream))
            while (frames := service.next_message(stream)) is not None:
                if not world.is_cut(self, world.process_of.get(to)):
                    world.network.send(
                        link,
                        frames,
                        lambda peer, frames, to=to: world.arrive(to, peer, frames),
                        back=False,
                        ordered=True,
                    )

    def kill(self):
        """End, and with it what was under way to the backups."""
        self.alive = False
        for link in self.world.links:
            if any(link.startswith(f"{address}~") for address in self.addresses):
                self.world.network.break_connection(link)

    def stop(self, seconds):
        """Execute nothing for a while; then go on as if nothing had happened."""
        self.stopped_until = self.world.network.now + seconds


class ReplicatedWorker(WorkerProcess):
    def told(self, event):
        if isinstance(event, m.MapChanged):
            self.world.note_map(event.map)
            if self.client is not None:
                self.client.requests.set_map(event.map, self.world.network.now)
                self.client.go()
        else:
            super().told(event)


class Replicated(Whole):
    """As `Whole`, with copies of all arcs."""

    replicas = 1
    endpoints_each = 1

    def form(self, service, endpoints, mean):
        self.processes = {}
        self.process_of = {}  # server by address
        self.over = False
        self.cuts = set()  # (from, to) of processes, None for the scheduler
        self.membership = Membership(
            servers=endpoints, workers=self.workers, slots=self.slots, heartbeat=HEARTBEAT, replicas=self.replicas,
            rng=random.Random(self.random.random()), now=0.0, record=self.record,
        )  # fmt: skip
        self.inputs, self.is_down = [], False
        self.saved = msgspec.msgpack.encode(self.membership.save())
        self.map = None
        self.servers = []
        for _ in range(endpoints):
            self.add_server()
        self.worker_processes = []
        self.replaced = 0
        self.network.after(HEARTBEAT, self.watch)

    def add_server(self):
        server = ReplicatedServer(self, len(self.servers), self.endpoints_each)
        self.servers.append(server)
        for address in server.addresses:
            self.process_of[address] = server

    def join(self, program):
        self.worker_processes.append(ReplicatedWorker(self, program))

    def note_map(self, map):
        if self.map is None or map.epoch > self.map.epoch:
            self.map = map

    # --- faults ---

    def runs(self, server, what, *arguments):
        """Whether a server executes anything now; what comes while it is stopped, comes when it goes on."""
        if not server.alive:
            return False
        if self.network.now < server.stopped_until:
            self.network.at(server.stopped_until, what, *arguments)
            return False
        return True

    def is_cut(self, one, other):
        return (one, other) in self.cuts

    def cut(self, one, other, seconds):
        """Lose all messages from one process to another for a while; None is the scheduler."""
        self.cuts.add((one, other))
        self.network.after(seconds, self.cuts.discard, (one, other))

    def living(self):
        return [server for server in self.servers if server.alive and server.control is not None]

    def redundant(self):
        """Whether each arc has all of its copies, confirmed by all: one more server may die."""
        map = self.membership.map
        if map is None or self.is_down:
            return False
        servers = [self.process_of[endpoint.address] for endpoint in map.endpoints]
        if self.cuts or any(not one.alive or one.stopped_until > self.network.now for one in servers):
            return False  # one has died already, or may be declared dead
        copies = dict.fromkeys(range(len(map.arcs)), 0)
        for stream in map.streams:
            for arc in stream.arcs:
                copies[arc] += 1
        return min(copies.values()) >= self.replicas and self.membership.at_rest

    def when_redundant(self, what, *arguments):
        """Do something as soon as one more server may die."""
        if self.over:
            return
        if self.redundant():
            what(*arguments)
        else:
            self.network.after(0.01, self.when_redundant, what, *arguments)

    # --- messages ---

    def send_up(self, process, message):
        if not self.is_cut(process, None):
            super().send_up(process, message)

    def route(self, outgoing):
        super().route([(to, message) for to, message in outgoing if not self.is_cut(None, self.processes[to])])

    def arrive(self, address, peer, frames):
        server = self.process_of[address]
        if self.runs(server, self.arrive, address, peer, frames) and server.control is not None:
            self.reply(address, self.services[address].handle(peer, frames))
            self.reply(address, self.services[address].acknowledge())
            server.carry(address)
            server.look()

    def reply(self, address, replies):
        if self.process_of[address].alive:
            super().reply(address, replies)

    # --- results ---

    def run(self, until=None):
        history = super().run(until)
        map = self.membership.map
        if map is not None:
            self.map = map
        return history

    def steps(self, table):
        """Return the steps of a table at the endpoints that serve it."""
        self.map = self.membership.map
        return [self.services[endpoint.address].shard(table).step for endpoint in self.map.owners]

    def unequal(self):
        """Return what differs between the primaries and their copies, when nothing is under way."""
        found = []
        for stream in self.map.streams:
            one = self.services[self.map.endpoint(stream.primary).address]
            other = self.services[self.map.endpoint(stream.backup).address].replica(stream.id)
            for table in self.tables:
                for arc in stream.arcs:
                    for slot in range(self.map.arcs[arc].first_slot, self.map.arcs[arc].end_slot):
                        a, b = (
                            (rows, bytes(section), bytes(admission))
                            for rows, section, admission in (its.shard(table).section(slot) for its in (one, other))
                        )
                        if a != b:
                            found.append(f"slot {slot} of table {table}: stream {stream.id}")
        return found


__all__ = ["Replicated", "ReplicatedServer"]
