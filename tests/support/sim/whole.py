"""The whole cluster in memory: the real scheduler's membership, endpoints and requests, on one bad network.

Servers join, workers join and receive their ranks, all send heartbeats; a silent process is declared dead and
dismissed, a new one is admitted under a hold of the clock. This file has only the loops around these state machines.
"""

import random

import msgspec

from memberships import new_membership, restored
from shoal.cluster.protocol import messages as m
from shoal.cluster.scheduler.state import DEAD_AFTER
from shoal.cluster.server.assignment import obey
from shoal.errors import FencedError
from sim.cluster import Client, Cluster

HEARTBEAT = 0.05


class Process:
    """A scheduler's client: repeats its requests until they are answered, and sends heartbeats."""

    def __init__(self, world, role, about):
        self.world = world
        self.sender = world.random.randbytes(16)
        world.processes[self.sender] = self
        self.alive = True
        self.number = 0
        self.asked = {}
        self.seen = None
        self.fault = None
        self.generation = 0  # of the scheduler: the greatest that was received
        self.ask(m.Hello(role, about))
        world.network.after(HEARTBEAT * world.random.random(), self.speak)

    def ask(self, body):
        self.number += 1
        self.asked[self.number] = body
        self.send(m.Request(self.sender, self.number, body))

    def send(self, message):
        self.world.send_up(self, message)

    def speak(self):
        if self.alive and self.fault is None:
            for number, body in self.asked.items():
                self.send(m.Request(self.sender, number, body))
            if self.seen is not None:
                self.send(m.Heartbeat(self.sender, self.seen))
            if not self.world.over:
                self.world.network.after(HEARTBEAT, self.speak)

    def hear(self, message):
        if not self.alive or self.fault is not None or self.is_outdated(message):
            return
        if isinstance(message, m.Reply):
            if isinstance(message.body, m.ErrorReply) and message.body.kind == "memory":
                if self.asked.pop(message.number, None) is not None:
                    self.answered(message.body)
            elif isinstance(message.body, m.ErrorReply) and (message.number in self.asked or not message.number):
                self.fault = message.body
                self.ended()
            elif message.number in self.asked and not isinstance(message.body, m.PendingReply):
                del self.asked[message.number]
                if isinstance(message.body, m.HelloReply):
                    self.seen = message.body.seen
                self.answered(message.body)
        elif isinstance(message, m.Events) and self.seen is not None and message.first <= self.seen:
            for event in message.events[self.seen - message.first :]:
                self.seen += 1
                self.reported(event)
        elif isinstance(message, m.Order):
            self.execute(message)

    def is_outdated(self, message):
        """Whether a message comes from a scheduler that another one has replaced (as in scheduler_client.py)."""
        is_error = isinstance(message, m.Reply) and isinstance(message.body, m.ErrorReply)
        if message.generation == 0 and (is_error or (isinstance(message, m.Events) and not message.events)):
            return False
        if message.generation < self.generation:
            return True
        self.generation = message.generation
        return False

    def answered(self, body):
        pass

    def reported(self, event):
        pass

    def ended(self):
        pass


class ServerProcess(Process):
    def __init__(self, world, rank, endpoints, service):
        self.rank, self.service, self.taken, self.last = rank, service, 0, None
        self.placed = False  # whether its place in the map has come
        self.waiting = []  # orders that came before it
        self.addresses = tuple(f"tcp://10.0.0.{rank + 1}:{5000 + k}" for k in range(endpoints))
        super().__init__(world, "server", f"server {rank}")

    def answered(self, body):
        if isinstance(body, m.HelloReply):
            for address in self.addresses:
                self.world.serve(self.service, address, [])
            self.ask(m.Join(self.rank, self.addresses))
        elif isinstance(body, m.JoinReply):
            self.world.map = body.map
            for endpoint in body.map.of_server(self.rank):
                self.world.services[endpoint.address].set_map(body.map.epoch, body.map.arc_ranges(endpoint.id))
            self.placed = True
            for order in self.waiting:
                self.execute(order)

    def execute(self, order):
        if not self.placed:  # as a Server, which executes orders once it has joined
            self.waiting.append(order)
            return
        if order.number == self.taken + 1:
            self.taken += 1
            services = self.endpoints()
            outcome = obey(services, order.body)
            for address, service in zip(self.addresses, services, strict=True):
                self.world.reply(address, service.released())
            self.last = m.OrderReply(self.sender, order.number, **outcome._asdict())
        if self.last is not None and order.number == self.last.number:
            self.send(self.last)

    def endpoints(self):
        return [self.world.services[address] for address in self.addresses]

    def crash(self):
        self.alive = False


class WorkerProcess(Process):
    make_client = Client

    def __init__(self, world, program):
        self.program, self.client = program, None
        self.tables = []  # what came of asking for some
        super().__init__(world, "worker", "a worker")

    def answered(self, body):
        world = self.world
        if isinstance(body, m.HelloReply):
            rules = m.JobConsistency(world.mode, world.staleness, False)
            self.ask(m.Join(None, (), world.workers, rules, job=world.job_name))
        elif isinstance(body, m.JoinReply):
            world.job, world.map = body.job, body.map
            self.client = self.make_client(world, body.rank, body.incarnation, body.clock, self.program)
            self.client.on_end = self.leave
            world.clients.append(self.client)
            world.history.joined(body.rank, body.incarnation, body.clock)
            self.client.go()
        elif isinstance(body, m.TableReply | m.ErrorReply):
            self.tables.append(body)
        elif isinstance(body, m.LeaveReply):
            self.alive = False

    def leave(self):
        if self.client.error is None:
            self.ask(m.Leave())

    def ended(self):
        """The scheduler refuses this worker: its calls fail, and another process starts in its place."""
        self.alive = False
        if self.client is not None:
            if self.client.finished and self.client.error is None:
                return  # it has not received the reply to its request to leave
            self.freeze()
            self.client.requests.close(FencedError(self.fault.text), self.world.network.now)
            self.client.go()
        self.world.replaced += 1
        self.world.join(self.program)

    def reported(self, event):
        if isinstance(event, m.ServerGone) and self.client is not None:
            self.client.requests.lose(event.rank, event.text, self.world.network.now)
            self.client.go()

    def die(self):
        """Crash: messages that it had sent still arrive."""
        self.alive = False
        if self.client is not None:
            self.world.history.died(self.client)
            self.client.alive = False
            self.client.finished = True

    def freeze(self):
        """Be silent for long enough to be declared dead, while its requests continue."""
        self.alive = False
        self.client.on_end = None
        self.world.history.died(self.client)
        self.world.clients.remove(self.client)
        self.world.zombies.append(self.client)


class Whole(Cluster):
    """As ``Cluster``; the membership determines which processes are alive."""

    job_name = ""  # the job of its workers has none

    def form(self, service, endpoints, mean):
        self.processes = {}
        self.over = False
        servers = max(1, endpoints // 2)
        self.membership = new_membership(
            servers=servers, workers=self.workers, slots=self.slots, heartbeat=HEARTBEAT,
            rng=random.Random(self.random.random()), now=0.0, record=self.record,
        )  # fmt: skip
        self.inputs, self.is_down = [], False
        self.saved = msgspec.msgpack.encode(self.membership.save())
        self.servers = [
            ServerProcess(self, rank, endpoints * (rank + 1) // servers - endpoints * rank // servers, service)
            for rank in range(servers)
        ]
        self.worker_processes = []
        self.replaced = 0
        self.network.after(HEARTBEAT, self.watch)

    def record(self, entry):
        self.inputs.append(msgspec.msgpack.encode(entry))

    def kill_scheduler(self, seconds):
        """The scheduler dies, and is started again later; no other process notices by itself."""
        if not self.is_down:
            self.is_down = True
            self.network.after(seconds, self.start_scheduler)

    def start_scheduler(self):
        self.membership = restored(self.saved, self.inputs, record=self.record)
        self.is_down = False
        self.route(self.membership.restarted("", self.network.now))

    def start(self, programs):
        for program in programs:
            self.join(program)

    def join(self, program):
        self.worker_processes.append(WorkerProcess(self, program))

    def once(self, clock, what, *arguments):
        """Do something when all workers are there and one has come to this clock."""
        if len(self.clients) >= self.workers and max(client.clock for client in self.clients) >= clock:
            what(*arguments)
        else:
            self.network.after(0.01, self.once, clock, what, *arguments)

    def watch(self):
        if not self.is_down:
            self.route(self.membership.on_time(self.network.now))
        while self.membership.probes and not self.is_down:
            self.route(self.membership.probed(self.membership.probes.popleft(), None, self.network.now))
        if not self.over:
            self.network.after(HEARTBEAT / 2, self.watch)

    def send_up(self, process, message):
        def arrive(_, frames):
            said = m.decode(frames)
            if self.is_down:
                return
            self.route(self.membership.handle(process.sender, "10.0.0.9", said, self.network.now))

        self.network.send(f"{process.sender.hex()}>", m.encode(message), arrive, back=False, checked=False)

    def route(self, outgoing):
        for sender, message in outgoing:
            process = self.processes[sender]

            def arrive(_, frames, process=process):
                process.hear(m.decode(frames))

            self.network.send(f"{sender.hex()}>", m.encode(message), arrive, back=True, checked=False)

    def arrive(self, address, peer, frames):
        if any(server.alive and address in server.addresses for server in self.servers):
            super().arrive(address, peer, frames)

    def replace_one(self, program, zombie):
        """A worker crashes, or is silent for long; another joins in its place."""
        running = [
            one for one in self.worker_processes if one.alive and one.client is not None and not one.client.finished
        ]
        if running:
            one = self.random.choice(running)
            one.freeze() if zombie else one.die()
            self.network.after(self.random.random() * 2 * DEAD_AFTER * HEARTBEAT, one.world.join, program)
            self.replaced += 1

    def run(self, until=None):
        quiet_since = [0.0]

        def done():
            planned = len(self.worker_processes) == self.workers + self.replaced
            if not planned or not self.clients or any(one.alive and one.client for one in self.worker_processes):
                quiet_since[0] = self.network.now
            self.over = self.network.now - quiet_since[0] > 3.0  # waiting for a finished job does not end
            return self.over

        return super().run(until or done)
