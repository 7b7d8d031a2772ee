"""A cluster with replicas in memory: the real scheduler, servers' control, endpoints, streams and requests.

Servers are killed, stopped for a while, and cut off from others in one direction; the scheduler dies and comes back
from table_specs import native
from its journal, whose disk may be slow; servers join, are drained, and arcs move, all at random moments from one seed.
This file has the loops around the state machines; scenarios.py has what happens, invariants.py what must hold.
"""

import contextlib
import random

import msgspec

from memberships import new_membership, restored
from shoal import _core
from shoal.cluster.protocol import messages as m
from shoal.cluster.scheduler.inputs import Died
from shoal.cluster.server.assignment import ServerControl
from sim.invariants import Monitor, map_copies
from sim.pings import Pings
from sim.saves import Saver, Saves, ServerTask, Snapshots, simulated_saves
from sim.whole import HEARTBEAT, Process, Whole, WorkerProcess
from table_specs import native

SPEED = 5  # of the timers of a server, which are made for real networks
POLL = 0.02  # seconds after which a server looks at its streams at the latest
LEAST_POLL = 0.002
REST = 0.3  # seconds without work after which a run ends
JOIN_SECONDS = 1.5  # for a worker to be admitted
LIMIT = 24.0  # seconds in which a cluster without work comes to rest: a plan that failed is tried again after 5 s


class StreamEnd:
    """The primary's end of a stream, to which replies come back."""

    def __init__(self, server, address, stream, to):
        self.server, self.address, self.stream, self.to = server, address, stream, to

    def hear(self, _, frames):
        server, world = self.server, self.server.world
        if world.runs(server, self.hear, _, frames):
            world.reply(self.address, world.services[self.address].handle_backup(self.stream, frames))
            world.monitor.acknowledged(self)
            server.carry(self.address)
            server.poll_if_pending()


class ReplicatedServer(Process):
    """A server: its control, and its endpoints with their streams."""

    def __init__(self, world, number, endpoints):
        self.rank = None
        self.control = None
        self.taken, self.last = 0, None
        self.waiting = []
        self.stopped_until = 0.0
        self.gone = False
        self.tasks = []  # of saves
        self.addresses = tuple(f"tcp://10.0.0.{number + 1}:{5000 + k}" for k in range(endpoints))
        super().__init__(world, "server", f"server {number}")

    # --- the scheduler's side ---

    def answered(self, body):
        world = self.world
        if isinstance(body, m.HelloReply):
            for address in self.addresses:
                world.services[address] = world.new_service(address)
            self.ask(m.Join(None, self.addresses))
        elif isinstance(body, m.JoinReply):
            self.rank = body.rank
            services = {address: world.services[address] for address in self.addresses}
            self.control = ServerControl(services, self.sender)
            self.control.set_map(body.map)
            for service in services.values():
                if world.slot_bytes:
                    service.set_memory(world.slot_bytes)
            for address in self.addresses:
                if any(body.map.arc_ranges(one.id) for one in self.control.endpoints if one.address == address):
                    for table, spec in world.tables.items():
                        services[address].add_table(table, native(spec))
            for message in self.waiting:
                self.hear(message)
            self.turn()
        elif isinstance(body, m.LeaveReply):
            self.alive = False

    def hear(self, message):
        if not self.world.runs(self, self.hear, message):
            return
        if not isinstance(message, m.Order | m.Assign | m.CloseStreams):
            super().hear(message)
        elif self.control is None:
            self.waiting.append(message)
        elif self.fault is None and not self.is_outdated(message):
            self.world.monitor.ordered(self, message)
            if isinstance(message, m.CloseStreams):
                self.send(self.control.close_streams(message))
            elif isinstance(message, m.Assign):
                self.control.assign(message)
                self.world.monitor.assigned(self)
            elif message.number == self.taken + 1:
                self.taken += 1
                self.control.order(message)
            elif self.last is not None and message.number == self.last.number:
                self.send(self.last)
            for address in self.addresses:
                self.world.reply(address, self.world.services[address].released())
                self.carry(address)
                self.run_tasks(address)
            self.poll()

    def speak(self):
        if self.world.runs(self, self.speak):
            super().speak()

    def ended(self):
        self.alive = False  # as a Server, whose fault ends its process

    # --- the streams ---

    def poll(self):
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

    def poll_if_pending(self):
        if self.control.has_pending:
            self.poll()

    def turn(self):
        if not self.world.runs(self, self.turn) or self.world.over:
            return
        world = self.world
        now = world.network.now
        due = now + POLL
        for address in self.addresses:
            service = world.services[address]
            world.reply(address, service.on_time(int(now * 1000 * SPEED)))
            self.carry(address)
            world.reply(address, service.acknowledge())
            world.reply(address, service.released())
            self.run_tasks(address)
            due = min(due, service.next_time() / (1000 * SPEED))
        self.poll()
        world.network.at(max(due, now + LEAST_POLL), self.turn)

    def run_tasks(self, address):
        """Run the threads of an endpoint that write saves, as far as they get."""
        if self.world.saves is None:
            return
        while (session := self.world.services[address].next_session(0.0)) is not None:
            task = self.world.task_kind(self, address, session)
            self.tasks.append(task)
            self.world.saves.sessions.append(task)
        for task in self.tasks:
            task.go()
        self.tasks = [task for task in self.tasks if not task.fiber.done]

    def carry(self, address):
        """Send the messages of an endpoint's streams."""
        world = self.world
        service = world.services[address]
        for stream, to, _ in service.targets():
            link = f"{address}~{stream}>{to}"
            if link not in world.links:
                world.links[link] = StreamEnd(self, address, stream, to)
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
    def answered(self, body):
        if isinstance(body, m.TableReply):
            self.world.dims[body.id] = body.form.dim
            self.world.created = body.id
        else:
            newest = self.world.map
            super().answered(body)
            if newest is not None:
                self.world.note_map(newest)  # a reply may be older than an event

    def reported(self, event):
        if isinstance(event, m.MapChanged):
            self.world.note_map(event.map)
            if self.client is not None:
                self.client.set_map(event.map)
                self.client.go()
        else:
            super().reported(event)


class Tool(Process):
    """A command line tool: it sends one request until it is answered."""

    def __init__(self, world, body):
        self.world, self.body, self.reply = world, body, None
        self.sender = world.random.randbytes(16)
        world.processes[self.sender] = self
        self.alive = True
        self.fault = None
        self.speak()

    def speak(self):
        if self.reply is None and not self.world.over:
            self.send(m.Request(self.sender, 1, self.body))
            self.world.network.after(2 * HEARTBEAT, self.speak)

    def hear(self, message):
        if isinstance(message, m.Reply):
            self.reply = self.reply or message.body


class Replicated(Whole):
    """As `Whole`, with copies of all arcs.

    Parameters
    ----------
    replicas : int
    endpoints_each : int
        Of a server.
    disk : float
        Mean of the seconds that a commit of the scheduler's journal takes; 0: none. What is not committed is lost with
        the scheduler, and its messages are sent afterwards.
    slot_bytes : int
        Memory budget of a slot; 0: none.
    copy_rate : int
        Bytes per second that each endpoint sends to make a copy, by the clock of the servers.
    saves : bool
        Whether workers save.
    pings : bool
        Whether the scheduler pings the servers.
    """

    limit = 60.0
    server_kind = ReplicatedServer
    task_kind = ServerTask
    snapshot_kind = Snapshots
    saves = pings = None

    def __init__(
        self, seed, *, servers=3, replicas=1, endpoints_each=1, disk=0.0, slot_bytes=0, copy_rate=1 << 28, saves=False,
        pings=False, **arguments,
    ):  # fmt: skip
        self.seed = seed
        self.replicas, self.endpoints_each, self.disk, self.slot_bytes = replicas, endpoints_each, disk, slot_bytes
        self.copy_rate = copy_rate
        super().__init__(seed, _core.Endpoint, endpoints=servers, **arguments)
        if saves:
            self.saves = Saves(self)
        if pings:
            self.pings = Pings(self, SPEED)

    def form(self, service, endpoints, mean):
        self.processes = {}
        self.process_of = {}  # server by address
        self.over = False
        self.cuts = set()  # (from, to) of processes, None for the scheduler
        self.condemned = []  # servers that will be killed
        self.uncommitted, self.waiting_out, self.committing = [], [], False
        self.inputs, self.is_down = [], False
        self.is_forgetful = False  # the scheduler is down, and has not stored all of what made its newest map
        self.stalled_until = 0.0  # the scheduler does nothing
        self.monitor = Monitor(self)
        self.membership = new_membership(
            servers=endpoints, workers=self.workers, slots=self.slots, heartbeat=HEARTBEAT, replicas=self.replicas,
            copy_rate=self.copy_rate, rng=random.Random(self.random.random()), now=0.0, record=self.record,
        )  # fmt: skip
        self.saved = msgspec.msgpack.encode(self.membership.save())
        self.map = None
        self.servers = []
        self.tools = []
        self.created = None  # the table that a worker has requested
        for _ in range(endpoints):
            self.add_server()
        self.worker_processes = []
        self.replaced = 0
        self.restless = ""  # what did not come to rest
        self.network.after(HEARTBEAT, self.watch)
        self.network.after(HEARTBEAT, self.rest, 0.0, None)

    def make_saver(self, client):
        return None if self.saves is None else Saver(client)

    def new_service(self, address):
        return _core.Endpoint(self.slots, [])

    def add_server(self):
        server = self.server_kind(self, len(self.servers), self.endpoints_each)
        self.servers.append(server)
        for address in server.addresses:
            self.process_of[address] = server

    def join(self, program):
        self.worker_processes.append(ReplicatedWorker(self, program))

    def note_map(self, map):
        if self.map is None or map.epoch > self.map.epoch:
            self.map = map

    def create_table(self, form):
        """Let a worker request a table; a worker that dies meanwhile is followed by another one."""
        running = [one for one in self.worker_processes if one.alive and one.client and not one.client.finished]
        if self.created is None and running:
            one = self.random.choice(running)
            if not any(isinstance(body, m.CreateTable) for body in one.asked.values()):
                one.ask(m.CreateTable(form))
            self.network.after(4 * HEARTBEAT, self.create_table, form)

    def command(self, body):
        self.tools.append(Tool(self, body))

    # --- the scheduler and its journal ---

    def record(self, entry):
        self.uncommitted.append(msgspec.msgpack.encode(entry))
        if isinstance(entry.body, Died):
            process = self.processes[entry.body.sender]
            if isinstance(process, WorkerProcess) and process.client is not None:
                process.world.history.died(process.client)

    def route(self, outgoing):
        """Send messages of the scheduler, once what they depend on is stored."""
        outgoing = [(to, message) for to, message in outgoing if to in self.processes]
        if not self.disk:
            self.inputs += self.uncommitted
            self.uncommitted.clear()
            self.send_down(outgoing)
            return
        self.waiting_out += outgoing
        if (self.uncommitted or self.waiting_out) and not self.committing:
            self.committing = True
            batch, self.waiting_out = self.waiting_out, []
            seconds = self.random.expovariate(1.0 / self.disk)
            self.network.after(seconds, self.committed, self.membership, len(self.uncommitted), batch)

    def committed(self, membership, count, batch):
        if membership is self.membership and not self.is_down:
            self.inputs += self.uncommitted[:count]
            del self.uncommitted[:count]
            self.committing = False
            self.send_down(batch)
            self.route([])

    def send_down(self, outgoing):
        super().route([(to, message) for to, message in outgoing if not self.is_cut(None, self.processes[to])])

    def watch(self):
        if self.network.now < self.stalled_until:
            self.network.at(self.stalled_until, self.watch)
            return
        super().watch()
        if self.pings is not None and not self.is_down:
            self.route(self.pings.turn())
        if not self.is_down and not self.uncommitted and self.membership.at_rest and self.random.random() < 0.05:
            self.saved = msgspec.msgpack.encode(self.membership.save())
            self.inputs.clear()

    def kill_scheduler(self, seconds):
        if not self.is_down:
            written = self.random.randint(0, len(self.uncommitted))
            self.inputs += self.uncommitted[:written]
            self.monitor.scheduler_died(lost=len(self.uncommitted) - written)
            self.is_forgetful = len(self.uncommitted) > written
            self.uncommitted, self.waiting_out, self.committing = [], [], False
            super().kill_scheduler(seconds)

    def start_scheduler(self):
        self.membership = restored(self.saved, self.inputs, record=self.record)
        self.monitor.scheduler_restarted()
        self.is_down = self.is_forgetful = False
        if self.pings is not None:
            self.pings.restarted()
        self.route(self.membership.restarted("", self.network.now))

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
        """Lose all messages from one to another for a while: servers, ranks of workers, None for the scheduler."""
        self.cuts.add((one, other))
        self.network.after(seconds, self.cuts.discard, (one, other))

    def living(self):
        return [server for server in self.servers if server.alive and server.control is not None]

    def newest_map(self):
        """Return the scheduler's newest map, also while servers carry it out."""
        return self.membership.state.newest

    def members(self):
        """Return the servers in the newest map, in its order."""
        map = self.newest_map()
        return [] if map is None else list(dict.fromkeys(self.process_of[one.address] for one in map.endpoints))

    def redundant(self):
        """Whether each arc has all of its copies: as many servers may die, whatever is under way."""
        map = self.newest_map()
        if map is None or self.uncommitted or self.is_forgetful:
            return False
        if any(one.alive for one in self.condemned):
            return False
        if self.cuts or any(not one.alive or one.stopped_until > self.network.now for one in self.members()):
            return False  # one has died already, or may be declared dead
        return min(map_copies(map)) >= self.replicas

    def when_redundant(self, what, *arguments):
        """Do something as soon as servers may die."""
        if self.redundant():
            what(*arguments)
        elif not self.over:
            self.network.after(POLL, self.when_redundant, what, *arguments)

    # --- messages ---

    def send_up(self, process, message):
        if not self.is_cut(process, None):
            self.network.send(
                f"{process.sender.hex()}>",
                m.encode(message),
                lambda _, frames: self.ask_scheduler(process.sender, m.decode(frames)),
                back=False,
                checked=False,
            )

    def ask_scheduler(self, sender, message):
        if self.network.now < self.stalled_until:
            self.network.at(self.stalled_until, self.ask_scheduler, sender, message)
        elif not self.is_down:
            self.route(self.membership.handle(sender, "10.0.0.9", message, self.network.now))

    def send(self, client, address, frames):
        if not self.is_cut(client.rank, self.process_of.get(address)):
            super().send(client, address, frames)

    def arrive(self, address, peer, frames):
        server = self.process_of[address]
        if self.runs(server, self.arrive, address, peer, frames) and server.control is not None:
            service = self.services[address]
            self.reply(address, service.handle(peer, frames))
            self.reply(address, service.acknowledge())
            if b"~" in peer:
                self.monitor.received(address, peer)
            server.carry(address)
            server.run_tasks(address)
            server.poll_if_pending()

    def reply(self, address, replies):
        server = self.process_of[address]
        if self.cuts:
            replies = [(peer, frames) for peer, frames in replies if not self.is_cut(server, self._rank_of(peer))]
        if replies and server.alive:
            super().reply(address, replies)

    def _rank_of(self, peer):
        """Return the rank of the worker that a reply is for; -1 for the primary of a stream."""
        name = bytes(peer).partition(b".")[0]
        return int(name) if name.isdigit() else -1

    # --- running ---

    def rest(self, since, worked_until):
        """End the run once there is no work, and all that follows from the faults has been done."""
        now = self.network.now
        awaited = [one for one in self.worker_processes if one.alive and one.client]
        joining = [one for one in self.worker_processes if one.alive and not one.client]
        everybody = len(self.worker_processes) == self.workers + self.replaced and self.clients
        if awaited or not everybody or (joining and now - (worked_until or now) < JOIN_SECONDS):
            since = now
            if awaited or not everybody:
                worked_until = now
        restless = self.monitor.restless()
        if restless and now - worked_until < LIMIT:
            since = now
        if now - since > REST:
            self.over = True
            self.restless = restless
            self.monitor.ended()
        else:
            self.network.after(POLL, self.rest, since, worked_until)

    def run(self, until=None):
        with contextlib.ExitStack() as undo:
            if self.saves is not None:
                undo.callback(self.saves.finish)
                undo.enter_context(simulated_saves())
            history = super().run(until or (lambda: self.over))
        map = self.membership.map
        if map is not None:
            self.map = map
        return history

    def steps(self, table):
        """Return the steps of a table at the endpoints that serve it."""
        map = self.map = self.membership.map
        return [] if map is None else [self.services[one.address].shard(table).step for one in map.owners]
