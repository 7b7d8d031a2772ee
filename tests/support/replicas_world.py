"""A membership of servers with copies, and its orders."""

from __future__ import annotations

import itertools
import random

from membership_world import Process, World
from memberships import new_membership
from shoal.cluster.protocol.messages import (
    ArcStamp,
    Assign,
    Assigned,
    CloseStreams,
    Dismiss,
    Join,
    JoinReply,
    Leave,
    Order,
    OrderReply,
    ReportMetrics,
    ReportStream,
    Request,
    StreamsClosed,
)
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.scheduler.state import COPY_RATE


class Arc:
    """What an endpoint has of an arc: the writes and the orders, in their sequence."""

    def __init__(self) -> None:
        self.writes: list[int] = []
        self.orders: list[object] = []

    def copy(self) -> Arc:
        other = Arc()
        other.writes, other.orders = list(self.writes), list(self.orders)
        return other

    def apply(self, kind: str, what: object) -> None:
        if kind == "write":
            self.writes.append(what)
        elif not self.orders or self.orders[-1] != what:  # to execute an order again changes nothing
            self.orders.append(what)

    @property
    def content(self) -> object:
        return self.writes, [repr(order) for order in self.orders]


class Stream:
    """The primary's end of a stream: what is not delivered yet."""

    def __init__(self) -> None:
        self.queue: list[tuple[str, int, object]] = []
        self.arcs: set[int] = set()  # in sync, or being copied


class Server(Process):
    """A server with endpoints."""

    def __init__(self, world: ReplicaWorld, role: str, join: Join) -> None:
        self.map: ClusterMap | None = None
        self.arcs: dict[int, dict[int, Arc]] = {}  # by endpoint
        self.retired: dict[int, dict[int, Arc]] = {}
        self.replicas: dict[int, dict[int, Arc]] = {}  # by stream
        self.streams: dict[int, Stream] = {}
        self.ends_of: dict[int, tuple[int, int]] = {}
        self.known_streams: set[int] = set()
        self.unconfirmed: Assign | None = None
        self.outcomes: dict[int, OrderReply] = {}
        self.reported: dict[tuple[int, int], int] = {}
        self.closed: set[int] = set()  # streams
        self.arriving: set[tuple[int, int]] = set()  # streams and arcs that are copied, as far as the map says
        super().__init__(world, role, join)

    def hear(self, message: object) -> None:
        if isinstance(message, Assign | Order | CloseStreams) and self.place is None:
            return  # it has overtaken the reply to Join, and comes again
        if isinstance(message, CloseStreams):
            self.closed.update(message.streams)
            backups = {stream.id: stream.backup for stream in self.map.streams}
            copies = [
                (backups[id], arc, copy)
                for id, replica in self.replicas.items()
                for arc, copy in replica.items()
                if (id, arc) not in self.arriving
            ]
            copies += [(id, arc, copy) for id, retired in self.retired.items() for arc, copy in retired.items()]
            stamps = [
                ArcStamp(id, self.map.arcs[arc].first_slot, len(copy.writes) + len(copy.orders))
                for id, arc, copy in copies
            ]
            self.world.send_up(self, StreamsClosed(self.sender, message.streams, tuple(stamps)))
        elif isinstance(message, Assign):
            if self.map is None or message.map.epoch > self.map.epoch:
                self.assign(message.map, message)
            elif message.map.epoch == self.map.epoch and self.unconfirmed is None:
                self.confirm(message)
        else:
            before = self.place
            super().hear(message)
            if before is None and self.place is not None:
                self.tables = {table.id: table.form.name for table in self.place.tables}
                self.assign(self.place.map, None)

    def own(self) -> list[int]:
        return [endpoint.id for endpoint in self.map.endpoints if endpoint.server == self.place.rank]

    def assign(self, map: object, message: Assign | None) -> None:
        is_first, self.map = self.map is None, map
        own = self.own()
        if message is not None and message.pending is not None and message.pending.number not in self.outcomes:
            for id in own:
                for arc, it in enumerate(map.arcs):
                    replica = self.find_replica(arc)
                    if it.primary == id and arc not in self.arcs.get(id, {}) and replica is not None:
                        replica.apply("order", message.pending.body)
            self.outcomes[message.pending.number] = OrderReply(self.sender, message.pending.number, self.world.clock)
        for id in own:
            served = self.arcs.setdefault(id, {})
            retired = self.retired.setdefault(id, {})
            for arc, it in enumerate(map.arcs):
                if it.primary == id and arc not in served:
                    found = retired.pop(arc, None) or self.take_replica(arc)
                    if found is None:
                        assert map.epoch == 1, f"server {self.place.rank} never had arc {arc} in sync (R1)"
                        found = Arc()
                    served[arc] = found
                elif it.primary != id and arc in served:
                    retired[arc] = served.pop(arc)
        outgoing = {stream.id: stream for stream in map.streams if stream.primary in own}
        for id in [id for id in self.streams if id not in outgoing]:
            del self.streams[id]
        for id, stream in outgoing.items():
            known = self.streams.setdefault(id, Stream())
            self.ends_of[id] = (stream.primary, stream.backup)
            known.arcs = {arc for arc in known.arcs if arc in stream.arcs or arc in stream.arriving}
            for arc in sorted(set(stream.arcs) - known.arcs):  # the copy may lack what a former primary has sent last
                known.queue.append(("catch up", arc, self.arcs[stream.primary][arc].copy()))
            known.arcs |= set(stream.arcs)
            for arc in stream.arriving:
                if arc not in known.arcs:
                    known.arcs.add(arc)
                    known.queue.append(("copy", arc, self.arcs[stream.primary][arc].copy()))
        incoming = {stream.id: stream for stream in map.streams if stream.backup in own}
        self.arriving = {(stream.id, arc) for stream in incoming.values() for arc in stream.arriving}
        for id, stream in incoming.items():
            replica = self.replicas.setdefault(id, {})
            for arc in stream.arcs:
                if arc not in replica:
                    found = self.take_replica(arc)
                    if found is not None:
                        replica[arc] = found
                    elif is_first and map.epoch == 1:
                        replica[arc] = Arc()
        for id, replica in list(self.replicas.items()):
            kept = set() if id not in incoming else {*incoming[id].arcs, *incoming[id].arriving}
            for arc in [arc for arc in replica if arc not in kept]:
                del replica[arc]
            if id not in incoming:
                del self.replicas[id]
        self.unconfirmed = message
        self.go_on()

    def find_replica(self, arc: int) -> Arc | None:
        return next((replica[arc] for replica in self.replicas.values() if arc in replica), None)

    def take_replica(self, arc: int) -> Arc | None:
        # A retired arc becomes a copy only when everyone has committed it: see `go_on`.
        return next((replica.pop(arc) for replica in self.replicas.values() if arc in replica), None)

    def go_on(self) -> None:
        """Deliver what streams carry, confirm, and report copies that have arrived."""
        for id, stream in list(self.streams.items()):
            if self.world.rng.random() < 0.5:
                self.deliver(id, stream)
        if self.unconfirmed is not None and (
            not any(self.retired.values()) or not any(stream.queue for stream in self.streams.values())
        ):
            for stream in self.map.streams:
                if stream.backup in self.retired:
                    for arc in stream.arcs:
                        found = self.retired[stream.backup].pop(arc, None)
                        if found is not None:
                            self.replicas.setdefault(stream.id, {}).setdefault(arc, found)
            for retired in self.retired.values():
                retired.clear()
            message, self.unconfirmed = self.unconfirmed, None
            self.confirm(message)
        if self.map is not None and not self.own():  # drained
            self.ask(Leave())

    def confirm(self, message: Assign) -> None:
        pending = message.pending
        outcome = None if pending is None else self.outcomes.get(pending.number)
        self.world.send_up(self, Assigned(self.sender, message.map.epoch, outcome))

    def deliver(self, id: int, stream: Stream) -> None:
        backup = self.world.server_of(self.ends_of[id][1])
        while stream.queue and backup is not None and backup.running and id in backup.replicas:
            kind, arc, what = stream.queue[0]
            replica = backup.replicas[id]
            if id in backup.closed or (kind == "catch up" and arc not in replica):
                return
            del stream.queue[0]
            if kind == "copy":
                replica[arc] = what
                self.report(ReportStream(id, arc, "arrived"))
            elif kind == "catch up":
                has = replica[arc]
                assert what.writes[: len(has.writes)] == has.writes, f"arc {arc} is served by a copy that lacks writes"
                has.writes, has.orders = what.writes, what.orders
            elif kind == "order":
                for one in replica.values():
                    one.apply("order", what)
            elif arc in replica:
                replica[arc].apply(kind, what)

    def report(self, report: ReportStream) -> None:
        self.ask(report)

    def execute(self, order: Order) -> None:
        if isinstance(order.body, Dismiss):  # one that has joined later does not know the job
            self.admitted.setdefault(order.body.rank, order.body.incarnation)
        super().execute(order)
        if isinstance(order.body, ReportMetrics):
            return
        for id, served in self.arcs.items():
            for arc in served.values():
                arc.apply("order", order.body)
            for number, stream in self.streams.items():
                if self.ends_of[number][0] == id:
                    stream.queue.append(("order", -1, order.body))
        self.go_on()

    def write(self, arc: int, number: int) -> list[Stream] | None:
        """Accept a write; returns the streams that have to deliver it before it is committed."""
        for id, served in self.arcs.items():
            if arc in served:
                served[arc].apply("write", number)
                streams = [
                    stream for key, stream in self.streams.items() if self.ends_of[key][0] == id and arc in stream.arcs
                ]
                for stream in streams:
                    stream.queue.append(("write", arc, number))
                return streams
        return None


class ReplicaWorld(World):
    """A world whose servers have arcs, and whose clients write to them."""

    def __init__(
        self,
        seed: int,
        *,
        servers: int = 3,
        workers: int = 1,
        replicas: int = 1,
        loss: float = 0.0,
        copy_rate: int = COPY_RATE,
    ) -> None:
        self.rng = random.Random(seed)
        super().__init__(seed, servers=servers, workers=workers, loss=loss)
        self.replicas = replicas
        self.membership = new_membership(
            servers=servers,
            workers=workers,
            slots=16,
            rng=self.rng,
            now=0.0,
            heartbeat=1.0,
            replicas=replicas,
            copy_rate=copy_rate,
        )
        self.writes = 0
        self.committed: dict[int, list[int]] = {}
        self.waiting: list[tuple[int, int, Server, list[Stream]]] = []
        self.ports = 7000

    def start(self, role: str, join: Join) -> Process:
        self.processes.append((Server if role == "server" else Process)(self, role, join))
        return self.processes[-1]

    def those(self, role: str) -> list[Process]:
        known = self.membership._peers.known
        return [
            one
            for one in super().those(role)
            if role != "server" or (one.place is not None and one.sender in known and known[one.sender].member)
        ]

    def servers(self) -> list[Server]:
        return [one for one in self.processes if isinstance(one, Server)]

    def server_of(self, endpoint: int) -> Server | None:
        for server in self.servers():
            if server.map is not None and endpoint in server.arcs:
                return server
        return None

    def join_server(self, *, spare: bool = False) -> Server:
        self.ports += 10
        addresses = tuple(f"tcp://0.0.0.0:{self.ports + k}" for k in range(2))
        return self.start("server", Join(None, addresses, spare=spare))

    def go(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            super().go(0.05)
            map = self.membership.map
            if map is not None:
                self.clients(map)
            for server in self.servers():
                if server.running and server.map is not None:
                    server.go_on()

    def check_joined(self, process: Process, joined: JoinReply) -> None:
        """As above: arcs have executed the admission, whichever server has them."""

    def check_servers(self) -> None:
        """A server that joins later executes the orders from then on: arcs have the whole sequence instead."""

    def clients(self, map: object) -> None:
        for server in self.servers():  # those of other maps may have clients too
            if server.running and self.rng.random() < 0.3:
                arc = self.rng.randrange(len(map.arcs))
                self.writes += 1
                streams = server.write(arc, self.writes)
                if streams is not None:
                    self.waiting.append((arc, self.writes, server, streams))
        still = []
        for arc, number, server, streams in self.waiting:
            if not server.alive:
                continue
            undelivered = any(
                ("write", arc, number) in stream.queue for stream in streams if stream in server.streams.values()
            )
            if undelivered or not server.running:
                still.append((arc, number, server, streams))
            else:
                self.committed.setdefault(arc, []).append(number)
        self.waiting = still

    def living(self) -> list[Server]:
        ranks = {endpoint.server for endpoint in self.membership.map.endpoints}
        return [
            server
            for server in self.servers()
            if server.running and not server.fenced and server.place is not None and server.place.rank in ranks
        ]

    def check_committed(self) -> None:
        """All that was acknowledged is at the primaries, once."""
        map = self.membership.map
        for arc, numbers in self.committed.items():
            server = self.server_of(map.arcs[arc].primary)
            content = server.arcs[map.arcs[arc].primary][arc].writes
            assert set(numbers) <= set(content), f"an acknowledged write of arc {arc} is lost"
            assert len(content) == len(set(content)), f"a write of arc {arc} counts twice"

    def check_copies(self) -> None:
        """Every arc has its copies, and they are equal."""
        map = self.membership.map
        servers = len({endpoint.server for endpoint in map.endpoints})
        for arc, it in enumerate(map.arcs):
            streams = [stream for stream in map.streams if arc in stream.arcs]
            assert len(streams) == min(self.replicas, servers - 1), f"arc {arc} has {len(streams)} copies (R3)"
            content = self.server_of(it.primary).arcs[it.primary][arc].content
            for stream in streams:
                assert map.endpoint(stream.backup).server != map.endpoint(stream.primary).server
                copy = self.server_of(stream.backup).replicas[stream.id][arc].content
                assert copy == content, f"the copy of arc {arc} differs: {copy} and {content}"
        orders = {repr(self.server_of(it.primary).arcs[it.primary][k].orders) for k, it in enumerate(map.arcs)}
        assert len(orders) == 1, "arcs have executed different orders (I3)"

    def settle(self, seconds: float = 20.0) -> None:
        self.loss = 0.0
        self.go(seconds)

    def quiet(self) -> None:
        """Let everything in flight end, without further writes."""
        self.clients = lambda map: None
        self.go(5.0)


def started(seed: int, **of: object) -> ReplicaWorld:
    world = ReplicaWorld(seed, **of)
    for rank in range(world.workers_wanted):
        world.start_worker(rank)
    world.go(5.0 if not world.loss else 15.0)
    assert world.membership.map is not None
    assert len(world.membership.workers) == world.workers_wanted
    return world


def declare_dead(world: ReplicaWorld, server: Server) -> None:
    world.route(world.membership.suspect(server.place.rank, "it does not answer", 1.25, world.now))


_numbers = itertools.count(1)


def command(world: ReplicaWorld, body: object, number: int | None = None) -> object:
    """What a tool is answered; a request of the same number is a repeated one."""
    tool = Request(b"tool", next(_numbers) if number is None else number, body)
    ((_, reply),) = [
        (route, message)
        for route, message in world.membership.handle(b"tool", "h", tool, world.now)
        if route == b"tool"
    ]
    return reply.body
