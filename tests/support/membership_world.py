"""A scheduler's membership in a world of lost, doubled and late messages."""

from __future__ import annotations

import random
from collections import defaultdict

import msgspec

import shoal
from memberships import new_membership
from shoal.cluster.protocol.messages import (
    AddTable,
    Admit,
    Barrier,
    BarrierReply,
    CreateTable,
    Dismiss,
    DropTable,
    ErrorReply,
    Events,
    Fence,
    Heartbeat,
    Hello,
    Hold,
    JobConsistency,
    Join,
    JoinReply,
    Leave,
    LeaveReply,
    Order,
    OrderReply,
    PendingReply,
    Reply,
    ReportMetrics,
    Request,
    StartJob,
    TableRecord,
    TableReply,
    WorkerGone,
    decode,
    encode,
)
from shoal.cluster.scheduler.membership import Membership

BSP = JobConsistency("bsp", 0, False)


FORM = TableRecord.of(shoal.local().table("t").spec)


class Process:
    """What a link does, without sockets: asks are sent again, orders are taken in the order of their numbers."""

    def __init__(self, world: World, role: str, join: Join) -> None:
        self.world, self.role, self.join = world, role, join
        self.sender = world.rng.randbytes(16)
        self.number = 0
        self.asked: dict[int, object] = {}
        self.came: set[str] = set()  # barriers that it has not passed
        self.replies: dict[int, object] = {}
        self.alive, self.paused, self.fenced = True, False, False
        self.place: JoinReply | None = None
        self.connection = 0
        self.connects_at = self.speaks_at = 0.0
        self.seen = 0
        self.gone: list[object] = []
        self.taken = 0
        self.executed: list[object] = []
        self.done: OrderReply | None = None
        self.admitted: dict[int, int] = {}
        self.tables: dict[int, str] = {}  # of a server
        self.ask(Hello(role, f"{role} {self.sender.hex()[:4]}"))

    @property
    def running(self) -> bool:
        return self.alive and not self.paused

    @property
    def route(self) -> bytes:
        return self.sender + bytes([self.connection] if self.connection else [])

    def ask(self, body: object) -> int:
        self.number += 1
        self.asked[self.number] = body
        if isinstance(body, Barrier):
            self.came.add(body.name)
        return self.number

    def waits_at(self, name: str) -> bool:
        return name in self.came

    def speak(self) -> None:
        for number, body in self.asked.items():
            self.world.send_up(self, Request(self.sender, number, body, self.number, tuple(self.asked)))
        if 1 in self.replies:
            self.world.send_up(self, Heartbeat(self.sender, self.seen))

    def hear(self, message: object) -> None:
        if isinstance(message, Reply):
            self.replied(message)
        elif isinstance(message, Events):
            for event in message.events[self.seen - message.first :] if message.first <= self.seen else ():
                self.seen += 1
                self.gone.append(event)
        elif isinstance(message, Order):
            if message.number == self.taken + 1:
                self.taken += 1
                self.execute(message)
            elif message.number <= self.taken:
                assert self.executed[message.number - 1] == message.body
            if self.done is not None and message.number == self.done.number:
                self.world.send_up(self, self.done)

    def execute(self, order: Order) -> None:
        self.executed.append(order.body)
        if isinstance(order.body, StartJob):
            self.admitted = dict(enumerate(order.body.incarnations))
        elif isinstance(order.body, Admit):
            assert order.body.rank not in self.admitted, "two workers of one rank on a server"
            self.admitted[order.body.rank] = order.body.incarnation
        elif isinstance(order.body, Dismiss):
            assert self.admitted.pop(order.body.rank) == order.body.incarnation
        refused = None
        if isinstance(order.body, AddTable):
            assert order.body.id not in self.tables
            if self.world.rng.random() < self.world.refusals:
                refused = ErrorReply("memory", "no room")
            else:
                self.tables[order.body.id] = order.body.form.name
        elif isinstance(order.body, DropTable):
            self.tables.pop(order.body.id, None)
        asks_clock = isinstance(order.body, (Hold, Fence, Dismiss))
        clock = max(0, self.world.clock - (self.join.rank or 0)) if asks_clock else 0
        tables = (clock,) if isinstance(order.body, Fence) else ()
        reported = isinstance(order.body, ReportMetrics)
        figures = tuple({"loop": k} for k in range(len(self.join.addresses))) if reported else ()
        self.done = OrderReply(self.sender, order.number, clock, "", figures, refused, tables)

    def replied(self, reply: Reply) -> None:
        if isinstance(reply.body, ErrorReply) and reply.body.kind in ("fenced", "not-connected"):
            self.fenced = True
            self.asked.clear()
        if reply.number not in self.asked or isinstance(reply.body, PendingReply):
            return
        body = self.asked.pop(reply.number)
        self.replies[reply.number] = reply.body
        if isinstance(reply.body, BarrierReply):
            self.came.discard(body.name)
        if isinstance(body, Hello):
            self.seen = reply.body.seen
            self.ask(self.join)
        elif isinstance(reply.body, JoinReply):
            self.place = reply.body
        elif isinstance(reply.body, LeaveReply):
            self.alive = False


class World:
    """A scheduler, processes, and a network that loses, doubles and delays."""

    def __init__(self, seed: int, *, servers: int, workers: int, loss: float, refusals: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.workers_wanted, self.loss, self.refusals = workers, loss, refusals
        self.now, self.clock = 0.0, 0
        self.membership = new_membership(
            servers=servers, workers=workers, slots=16, rng=self.rng, now=0.0, heartbeat=1.0
        )
        self.flying: list[tuple[float, object, Process, bytes | None]] = []  # the route of those to the scheduler
        self.processes: list[Process] = []
        self.reported: dict[tuple[bytes, int], object] = {}
        self.inside: dict[int, Process] = {}
        self.incarnations: dict[int, int] = defaultdict(int)
        self.tables: set[tuple[int, str]] = set()
        self.refused = 0
        for rank in range(servers):
            addresses = tuple(f"tcp://0.0.0.0:{5000 + 10 * rank + k}" for k in range(1 + rank % 2))
            self.start("server", Join(rank, addresses))

    def start(self, role: str, join: Join) -> Process:
        self.processes.append(Process(self, role, join))
        return self.processes[-1]

    def start_worker(self, rank: int | None = None) -> Process:
        return self.start("worker", Join(rank, (), self.workers_wanted, BSP))

    def those(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role and process.running]

    def _fly(self, message: object, process: Process, up: bytes | None) -> None:
        while self.rng.random() >= self.loss:
            self.flying.append((self.now + self.rng.expovariate(20), message, process, up))
            if self.rng.random() >= self.loss:
                break

    def send_up(self, process: Process, message: object) -> None:
        self._fly(decode(encode(message)), process, process.route)

    def route(self, outgoing: list[tuple[bytes, object]]) -> None:
        by_sender = {process.sender: process for process in self.processes}
        passed = []
        for route, message in outgoing:
            process = by_sender[route[:16]]
            if isinstance(message, Events):
                for event in message.events:
                    if isinstance(event, WorkerGone):
                        self.leaves(event.rank, event.incarnation)
            if isinstance(message, Reply) and not isinstance(message.body, PendingReply) and message.number:
                first = (process.sender, message.number) not in self.reported
                known = self.reported.setdefault((process.sender, message.number), message.body)
                assert known == message.body or isinstance(message.body, ErrorReply | LeaveReply), "another answer (I4)"
                if isinstance(message.body, JoinReply) and process.role == "worker" and first:
                    self.check_joined(process, message.body)
                elif isinstance(message.body, BarrierReply) and first:
                    passed.append((process, message.number))
                elif isinstance(message.body, TableReply):
                    self.tables.add((message.body.id, message.body.form.name))
                    for server in self.those("server"):
                        assert server.tables[message.body.id] == message.body.form.name, "not on all servers (I6)"
                elif isinstance(message.body, ErrorReply) and message.body.kind == "memory" and first:
                    self.check_refused(process, process.asked.get(message.number))
            if route == process.route:
                self._fly(decode(encode(message)), process, None)
        for process, number in passed:
            name = process.asked[number].name if number in process.asked else "all"
            for rank, worker in self.inside.items():
                if rank in self.membership.workers:
                    assert worker.waits_at(name), f"the barrier lets go before worker {rank} comes (I5)"

    def leaves(self, rank: int, incarnation: int) -> None:
        worker = self.inside.get(rank)
        if worker is not None and self.incarnations[rank] == incarnation:
            del self.inside[rank]

    def check_joined(self, process: Process, joined: JoinReply) -> None:
        assert joined.rank not in self.inside, "two workers of one rank (I1)"
        assert joined.incarnation > self.incarnations[joined.rank], "an incarnation that does not rise (I1)"
        self.inside[joined.rank] = process
        self.incarnations[joined.rank] = joined.incarnation
        for server in self.processes:
            if server.role == "server" and server.executed:
                assert server.admitted.get(joined.rank) == joined.incarnation, "told before all servers know (I2)"

    def check_refused(self, process: Process, asked: CreateTable | None) -> None:
        self.refused += 1
        if asked is not None:
            for server in self.those("server"):
                assert asked.form.name not in server.tables.values(), "something is left of a refused table (I6)"

    def go(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            due = [flying for flying in self.flying if flying[0] <= self.now]
            self.flying = [flying for flying in self.flying if flying[0] > self.now]
            for _, message, process, up in due:
                if up is not None:
                    if (
                        isinstance(message, Request)
                        and isinstance(message.body, Leave)
                        and process in self.inside.values()
                    ):
                        del self.inside[next(rank for rank, inside in self.inside.items() if inside is process)]
                    self.route(self.membership.handle(up, "10.0.0.9", message, self.now))
                elif process.running:
                    process.hear(message)
            while self.membership.probes:
                self.route(self.membership.probed(self.membership.probes.popleft(), None, self.now))
            self.route(self.membership.on_time(self.now))
            if round(self.now / 0.05) % 5 == 0:
                for process in self.processes:
                    if process.running and not process.fenced and process.connects_at <= self.now:
                        process.speak()
        self.check_servers()

    def check_servers(self) -> None:
        logs = [process.executed for process in self.processes if process.role == "server"]
        longest = max(logs, key=len)
        assert all(log == longest[: len(log)] for log in logs), "servers execute different orders (I3)"
        assert len({name for _, name in self.tables}) == len(self.tables) == len({id_ for id_, _ in self.tables})

    def disturb(self) -> None:
        """Do something to a worker."""
        self.clock += self.rng.randrange(3)
        workers = self.those("worker")
        roll = self.rng.random()
        if len(workers) < self.workers_wanted + 1 and roll < 0.5:
            self.start_worker(self.rng.choice([None, self.rng.randrange(self.workers_wanted)]))
        elif workers:
            worker = self.rng.choice(workers)
            if roll < 0.65:
                worker.alive = False
            elif roll < 0.7:
                worker.paused = True
            elif worker.place is not None and not worker.fenced:
                if roll < 0.8:
                    worker.ask(Leave())
                elif roll < 0.9 and not worker.waits_at("all"):
                    worker.ask(Barrier("all"))
                else:
                    worker.ask(CreateTable(renamed(FORM, f"t{self.rng.randrange(3)}")))


def renamed(form: TableRecord, name: str) -> TableRecord:
    return msgspec.structs.replace(form, name=name)


def together(workers: int = 1, servers: int = 1) -> tuple[World, list[Process]]:
    world = World(1, servers=servers, workers=workers, loss=0.0)
    made = [world.start_worker(rank) for rank in range(workers)]
    world.go(2.0)
    return world, made


def joined(membership: Membership, wanted: list[int | None], size: int) -> list[JoinReply | None]:
    """Have workers join that want these ranks, in this order, in a cluster of one server that does all it is told."""
    server = b"server"
    reported: dict[bytes, JoinReply] = {}

    def say(sender: bytes, message: object) -> None:
        waiting = [(sender, message)]
        while waiting:
            sender, message = waiting.pop(0)
            for route, answer in membership.handle(sender, "10.0.0.9", decode(encode(message)), 0.0):
                if isinstance(answer, Order):
                    waiting.append((server, OrderReply(server, answer.number)))
                elif isinstance(answer.body, JoinReply):
                    reported[route] = answer.body

    say(server, Request(server, 1, Hello("server", "s")))
    say(server, Request(server, 2, Join(None, ("tcp://:7",))))
    membership.probed(membership.probes.popleft(), None, 0.0)
    senders = [b"%d" % k for k in range(len(wanted))]
    for sender, rank in zip(senders, wanted, strict=True):
        say(sender, Request(sender, 1, Hello("worker", "w")))
        say(sender, Request(sender, 2, Join(rank, (), size, BSP)))
    return [reported.get(sender) for sender in senders]
