"""Copies, failovers and moves on random schedules: servers die, are declared dead and live on, join, are drained.

The servers here carry out their assignments in a few lines: arcs are logs of writes and orders, streams are queues.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster.protocol.messages import (
    AcceptedReply,
    AddTable,
    ArcStamp,
    Assign,
    Assigned,
    CloseStreams,
    CreateTable,
    Dismiss,
    Drain,
    ErrorReply,
    GetMetrics,
    Join,
    JoinReply,
    Leave,
    MapChanged,
    Order,
    OrderReply,
    Rebalance,
    ReportMetrics,
    ReportStream,
    Request,
    ServerGone,
    StartJob,
    StreamsClosed,
    TableReply,
)
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.scheduler import replicas
from shoal.cluster.scheduler.assignments import Assignments
from shoal.cluster.scheduler.membership import COPY_RATE, Membership
from shoal.cluster.scheduler.planner import Layout, owned
from test_membership import FORM, Process, World, renamed
from test_replay import RecordedWorld, check_replays


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
        self.membership = Membership(
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


def disturb(world: ReplicaWorld) -> None:
    """One death at a time, so that a copy is left; and whatever else may happen with it."""
    rng = world.rng
    living = world.living()
    roll = rng.random()
    if roll < 0.3 and len(living) > world.replicas + 1:
        victim = rng.choice(living)
        if rng.random() < 0.5:
            victim.alive = False
        for worker in world.those("worker"):
            if worker.place is not None and not worker.fenced:
                worker.ask(CreateTable(renamed(FORM, f"t{rng.randrange(100)}")))
        world.go(rng.choice([0.0, 0.05, 0.1]))
        declare_dead(world, victim)
    elif roll < 0.5:
        world.join_server()
    elif roll < 0.65:
        ranks = [server.place.rank for server in living]
        command(world, Drain(rng.choice(ranks)))
    elif roll < 0.75:
        arcs = world.membership.map.arcs
        command(world, Rebalance(tuple(rng.randrange(50) for _ in arcs) if rng.random() < 0.5 else ()))
    else:
        for worker in world.those("worker"):
            if worker.place is not None and not worker.fenced:
                worker.ask(GetMetrics())
    if rng.random() < 0.3:
        World.disturb(world)


def check_schedule(seed: int, *, servers: int = 3, replicas: int = 1, loss: float = 0.0) -> ReplicaWorld:
    world = started(seed, servers=servers, replicas=replicas, loss=loss)
    for _ in range(world.rng.randrange(2, 7)):
        disturb(world)
        world.go(world.rng.choice([0.1, 0.5, 2.0]))
        if not world.membership._assignments.are_confirmed or any(
            len({stream.backup for stream in world.membership.map.streams if arc in stream.arcs}) < 1
            for arc in range(len(world.membership.map.arcs))
        ):  # no second death before all arcs have copies again
            world.go(5.0)
    world.settle()
    world.quiet()
    assert not world.membership.broken
    assert world.membership.at_rest, "something waits for ever"
    world.check_committed()
    world.check_copies()
    return world


@given(st.integers(0, 2**32), st.sampled_from([2, 3, 4]), st.sampled_from([0.0, 0.2]))
@settings(max_examples=25, deadline=None)
def test_no_acknowledged_write_is_lost_and_all_arcs_have_copies_in_the_end(seed, servers, loss):
    check_schedule(seed, servers=servers, loss=loss)


@given(st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_two_copies_survive_two_deaths_after_each_other(seed):
    check_schedule(seed, servers=4, replicas=2)


def check_two_deaths(seed: int) -> ReplicaWorld:
    """Two servers die at once, or one after the other before its arcs have all of their copies again."""
    world = started(seed, servers=5, replicas=2, loss=world_loss(seed))
    world.go(world.rng.choice([0.0, 1.0]))
    for victim in world.rng.sample(world.living(), 2):
        victim.alive = world.rng.random() < 0.3
        declare_dead(world, victim)
        world.go(world.rng.choice([0.0, 0.05, 0.1, 0.3]))
    world.settle()
    world.quiet()
    assert not world.membership.broken
    assert world.membership.at_rest, "something waits for ever"
    world.check_committed()
    world.check_copies()
    return world


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_two_copies_survive_two_deaths_at_once(seed):
    check_two_deaths(seed)


def test_the_copy_that_has_most_serves_and_the_others_stay():
    for seed in range(10):
        world = started(seed, servers=3, replicas=2)
        before = {arc for server in world.living() for arcs in server.arcs.values() for arc in arcs}
        declare_dead(world, world.servers()[0])
        while not world.membership._assignments.are_confirmed:
            world.go(0.05)
        map = world.membership.map
        copied = {arc for stream in map.streams for arc in stream.arcs}
        assert copied == before == set(range(len(map.arcs)))
        assert not any(stream.arriving for stream in map.streams)


def check_moves_without_copies(seed: int) -> None:
    """With no replicas, servers join and are drained, and slots move, without a death."""
    world = started(seed, servers=2, replicas=0, loss=world_loss(seed))
    for _ in range(world.rng.randrange(1, 5)):
        roll = world.rng.random()
        living = world.living()
        if roll < 0.4:
            world.join_server()
        elif roll < 0.7 and len(living) > 1:
            command(world, Drain(world.rng.choice(living).place.rank))
        else:
            world.those("worker")[0].ask(GetMetrics())
        world.go(world.rng.choice([0.1, 1.0, 5.0]))
    world.settle()
    world.quiet()
    assert not world.membership.broken
    world.check_committed()
    served = [len(arcs) for server in world.living() for arcs in server.arcs.values()]
    assert sum(served) == len(world.membership.map.arcs)
    world.check_copies()


def world_loss(seed: int) -> float:
    return 0.2 if seed % 2 else 0.0


@given(st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_slots_move_to_servers_that_join_and_from_those_that_are_drained_without_replicas_too(seed):
    check_moves_without_copies(seed)


def begun_moves(world: ReplicaWorld, seconds: float) -> list[float]:
    """The times at which copies began while all arcs had theirs."""
    times, arriving = [], set()
    for _ in range(round(seconds / 0.05)):
        world.go(0.05)
        now = {(arc, one.backup) for one in world.membership.map.streams for arc in one.arriving}
        times += [world.now] * len(now - arriving)
        arriving = now
    return times


def test_arcs_that_move_begin_one_after_the_other_as_fast_as_the_copy_rate_allows(monkeypatch):
    monkeypatch.setattr(replicas, "_MAX_PAUSE_SECONDS", 4.0)
    for copy_rate, pause in ((2 << 20, 4.0), (1 << 10, 4.0), (1 << 40, 0.0)):
        world = started(2, servers=2, replicas=0, copy_rate=copy_rate)
        world.join_server()
        times = begun_moves(world, 20.0)
        assert len(times) == len(world.membership.map.arcs) // 3
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert min(gaps) >= pause - 0.051  # a tick of the simulation
        assert max(gaps) <= pause + 2.0


def test_a_spare_server_gets_copies_that_are_lost_and_slots_at_the_next_rebalance():
    world = started(1, servers=2)
    spare = world.join_server(spare=True)
    world.go(10.0)
    assert not any(spare.arcs.values())
    assert (
        "server 2 has joined: tcp://10.0.0.9:7010, tcp://10.0.0.9:7011; it is a spare, which serves no slots yet"
        in (world.membership.notes)
    )
    declare_dead(world, world.servers()[0])
    world.go(10.0)
    assert not any(spare.arcs.values())
    world.check_copies()
    assert {stream.backup for stream in world.membership.map.streams} == set(spare.own())
    command(world, Rebalance())
    world.settle()
    assert sum(map(len, spare.arcs.values())) == len(world.membership.map.arcs) // 2
    world.quiet()
    world.check_committed()


def test_without_replicas_a_lost_server_breaks_the_cluster_with_the_same_text_as_ever():
    world = started(1, servers=2, replicas=0)
    server = world.servers()[1]
    declare_dead(world, server)
    assert world.membership.broken == (
        f"server 1 at tcp://10.0.0.9:5010, tcp://10.0.0.9:5011 ({(server.asked and '') or server.role} "
        f"{server.sender.hex()[:4]}) is lost with its rows, it does not answer: "
        "start the cluster again and load a checkpoint"
    )


def test_the_loss_of_the_last_copy_names_its_slots_and_the_remedy():
    world = started(1, servers=2)
    first, second = world.servers()
    declare_dead(world, first)
    world.go(2.0)
    assert not world.membership.broken
    worker = world.those("worker")[0]
    world.route(world.membership.suspect(second.place.rank, "it does not answer", 60.25, world.now))
    world.go(1.0)
    broken = world.membership.broken
    assert "which had the last copy of slots 0 to 15, is lost with its rows" in broken
    assert "start the cluster again and load a checkpoint" in broken
    assert any(isinstance(event, ServerGone) and event.text == broken for event in worker.gone)


def test_a_silent_server_with_the_last_copy_of_slots_is_waited_for():
    world = started(5, servers=2)
    first, last = world.living()
    first.alive = False
    declare_dead(world, first)
    world.go(2.0)
    last.alive = False  # stopped, for all that is known
    declare_dead(world, last)
    world.go(30.0)
    assert not world.membership.broken
    notes = [note for note in world.membership.notes if "It has the last copy of slots" in note]
    assert len(notes) == 1
    last.alive = True
    world.settle()
    assert not world.membership.broken
    last.alive = False
    world.go(59.0)
    assert not world.membership.broken
    world.go(4.0)
    assert "which had the last copy of slots 0 to 15, is lost" in world.membership.broken


def test_workers_learn_of_a_new_map_after_its_primaries_have_confirmed_it():
    world = started(3, servers=3)
    worker = world.those("worker")[0]
    first, second = world.servers()[:2]
    second.paused = True  # it will serve the slots of the first
    declare_dead(world, first)
    world.go(1.0)
    assert not any(isinstance(event, MapChanged) for event in worker.gone)
    second.paused = False
    world.go(3.0)
    events = [event for event in worker.gone if isinstance(event, MapChanged)]
    assert {endpoint.server for endpoint in events[0].map.endpoints} == {1, 2}


def test_copies_that_a_death_has_taken_are_missing_before_the_new_map_is_carried_out():
    world = started(3, servers=3)
    assert world.membership.metrics()["slots_without_copies"] == 0
    first, second = world.servers()[:2]
    second.paused = True  # it will serve the slots of the first
    declare_dead(world, first)
    world.go(1.0)
    map = world.membership.map  # of before
    gone = {endpoint.id for endpoint in map.of_server(first.place.rank)}
    served = {k for k, arc in enumerate(map.arcs) if arc.primary in gone}
    copied = {k for stream in map.streams if stream.backup in gone for k in stream.arcs}
    slots = sum(map.arcs[k].end_slot - map.arcs[k].first_slot for k in served | copied)
    assert served
    assert copied
    assert world.membership.metrics()["slots_without_copies"] == slots
    second.paused = False
    world.settle()
    world.quiet()
    assert world.membership.metrics()["slots_without_copies"] == 0


def test_an_order_that_the_dead_server_has_not_executed_is_executed_on_the_copies():
    world = started(4, servers=3)
    first = world.servers()[0]
    first.paused = True
    worker = world.those("worker")[0]
    number = worker.ask(CreateTable(FORM))
    world.go(1.0)
    assert number not in worker.replies
    declare_dead(world, first)
    world.settle()
    world.quiet()
    assert isinstance(worker.replies[number], TableReply)
    world.check_copies()
    for server in world.living():
        for arcs in server.arcs.values():
            assert all([type(order) for order in arc.orders] == [StartJob, AddTable] for arc in arcs.values())


def test_a_stream_that_is_of_no_use_is_closed_and_its_copies_are_made_again():
    world = started(5, servers=3)
    map = world.membership.map
    stream = map.streams[0]
    world.server_of(stream.primary).report(ReportStream(stream.id, -1, "diverged", "a status differs"))
    world.go(1.0)
    assert stream.id not in {one.id for one in world.membership.map.streams}
    to = map.endpoint(stream.backup).label
    assert any(note.endswith(f" at {to} are given up, diverged: a status differs") for note in world.membership.notes)
    world.settle()
    world.quiet()
    world.check_copies()


def test_a_drained_server_gives_all_away_and_leaves():
    world = started(6, servers=3)
    assert isinstance(command(world, Drain(1)), AcceptedReply)
    world.settle()
    world.quiet()
    assert not world.servers()[1].alive
    assert {endpoint.server for endpoint in world.membership.map.endpoints} == {0, 2}
    world.check_copies()
    refused = command(world, Drain(0))
    assert isinstance(refused, ErrorReply)
    assert (
        "without server 0 the cluster has 1 server, and replicas=1 needs 2: start another server first" in refused.text
    )
    assert "no server 7" in command(world, Drain(7)).text


def test_a_drain_whose_reply_was_lost_is_answered_the_same_when_it_is_repeated():
    world = started_recorded(6)
    reply = command(world, Drain(1), 0)
    assert isinstance(reply, AcceptedReply)
    world.settle()
    world.quiet()
    assert not world.servers()[1].alive
    assert command(world, Drain(1), 0) == reply
    done = command(world, Drain(1))  # of another tool
    assert done == AcceptedReply("server 1 was drained: other servers have all of its slots")
    world.recover()
    assert command(world, Drain(1), 0) == reply
    assert command(world, Drain(1)) == done
    world.join_server()
    world.settle()
    world.quiet()
    assert 1 in world.membership._peers.servers  # another server has the rank
    assert command(world, Drain(1), 0) == reply
    assert world.membership._replicas.draining == set()
    check_replays(world)
    assert isinstance(command(world, Drain(1)), AcceptedReply)
    assert world.membership._replicas.draining == {1}


def test_replies_to_tools_are_kept_for_the_last_requests():
    world = started(6, servers=3)
    for _ in range(300):
        command(world, Rebalance())
    assert len(world.membership._replicas.commands) == 256


def test_a_map_that_returns_arcs_is_published_after_their_server_has_confirmed_it():
    """The server may have retired them by the map before, which it has not confirmed."""
    world = started(4, servers=3)
    assignments = world.membership._assignments
    giver = world.servers()[0]
    rank, arcs = giver.place.rank, assignments.newest.arcs
    before = owned(assignments.newest)[rank]
    (backup,) = {stream.backup for stream in assignments.newest.streams if before & set(stream.arcs)}
    weights = {giver.own()[0]: 9, backup: 1}
    confirm, giver.confirm = giver.confirm, lambda message: None
    command(world, Rebalance(tuple(weights.get(arc.primary, 5) for arc in arcs)))
    world.go(1.0)
    assert before - owned(giver.map)[rank]
    declare_dead(world, world.server_of(backup))
    world.go(5.0)
    assert giver.map == assignments.newest
    assert before == owned(assignments.newest)[rank]
    assert assignments.published is not assignments.newest
    giver.confirm = confirm
    world.settle()
    world.quiet()
    assert assignments.published is assignments.newest
    world.check_committed()
    world.check_copies()


def test_a_server_that_does_not_carry_out_its_assignment_is_dead_in_the_end():
    world = started(7, servers=3)
    first, second = world.servers()[:2]
    second.confirm = lambda message: None
    declare_dead(world, first)
    world.go(29.0)
    assert not world.membership.broken
    world.go(3.0)
    assert "has not carried out its assignment of epoch 2 for 30." in world.membership.broken


def test_replicas_that_the_servers_do_not_reach_for_are_refused():
    with pytest.raises(ValueError, match=r"replicas must be a number from 0 to 1, .* got 2: start more servers"):
        Membership(servers=2, replicas=2, rng=random.Random(1), now=0.0)


# --- replay ---------------------------------------------------------------------------------------------------------


class RecordedReplicaWorld(RecordedWorld, ReplicaWorld):
    """A world with replicas whose scheduler stores its inputs."""


def check_recorded(seed: int) -> None:
    world = started_recorded(seed)
    for _ in range(world.rng.randrange(2, 6)):
        disturb(world)
        world.go(world.rng.choice([0.1, 0.5, 2.0]))
        if world.rng.random() < 0.4:
            world.recover(missed=world.rng.choice([0.0, 0.5, 60.0]))
        world.go(5.0)
    world.settle()
    world.quiet()
    check_replays(world)
    assert not world.membership.broken
    world.check_committed()
    world.check_copies()


def started_recorded(seed: int) -> RecordedReplicaWorld:
    world = RecordedReplicaWorld(seed, servers=3, workers=1, replicas=1, loss=world_loss(seed))
    world.start_worker(0)
    world.go(15.0)
    return world


@given(st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_a_scheduler_that_is_started_again_in_a_failover_or_a_move_completes_it(seed):
    check_recorded(seed)


# --- planted bugs ---------------------------------------------------------------------------------------------------


def fails(check, seeds: int = 60) -> None:
    for seed in range(seeds):
        try:
            check(seed)
        except Exception:
            return
    pytest.fail("no schedule shows it")


def all_at_once(monkeypatch):
    carry_out = Assignments.carry_out

    def hasty(self):
        for server in self._late():
            if server.offered_epoch < self.newest.epoch:
                server.offered_epoch = self.newest.epoch
                self.send(server)
        carry_out(self)

    monkeypatch.setattr(Assignments, "carry_out", hasty)


def keeps_other_copies(monkeypatch):
    remove = Layout.remove_endpoints

    def keep(self, gone, unsure):
        before = [set(copies) for copies in self.copies]
        lost = remove(self, gone, unsure)
        for arc, copies in enumerate(before):
            self.copies[arc] = copies - set(gone) - {self.primaries[arc]}
        return lost

    monkeypatch.setattr(Layout, "remove_endpoints", keep)


def promotes_arriving_copies(monkeypatch):
    init = Layout.__init__

    def eager(self, *of):
        init(self, *of)
        for copies, arriving in zip(self.copies, self.arriving, strict=True):
            copies |= arriving
            arriving.clear()

    monkeypatch.setattr(Layout, "__init__", eager)


def forgets_the_order(monkeypatch):
    monkeypatch.setattr("shoal.cluster.scheduler.orders.Orders.replace", lambda self, server, adopters: None)


def orders_go_on(monkeypatch):
    monkeypatch.setattr("shoal.cluster.scheduler.orders.Orders.pause", lambda self, is_paused: self._continue())


@pytest.mark.long
@pytest.mark.parametrize(
    "plant", [all_at_once, keeps_other_copies, promotes_arriving_copies, forgets_the_order, orders_go_on]
)
def test_planted_bugs_of_replicas_are_found(monkeypatch, plant):
    plant(monkeypatch)
    fails(lambda seed: check_schedule(seed, servers=[3, 4][seed % 2], replicas=1 + seed % 2, loss=world_loss(seed)))
