"""Membership: the state of the scheduler, as a state machine without sockets, clocks or randomness of its own.

Its input is messages and the time, its output is messages. So thousands of schedules of joins, deaths, repetitions and
losses can be tested in a second.

The state changes by the inputs of inputs.py alone. Each is passed to `record` before it has any effect; `replay`
applies recorded ones again, without clock or network, and ends in the same state. So a scheduler that stores its inputs
can be started again.

    forming    servers join, in any order; their ranks are 0..S-1
    map        the last server has joined: the slots are divided evenly among all endpoints, in the order of the ranks
    job        W workers of its name have joined; those that asked for no rank get the remaining ones. All servers start
               the job, then all workers receive JoinReply; it ends when the last worker has left or died, and the next
               join begins another
    broken     a server was lost, and rows of which there is no copy with it: every request is refused with its name

Everything that must be the same on all servers is an operation: a generator that yields an order, which goes to every
server, and receives the results. One operation runs at a time, the others wait in a queue, so all servers see the same
orders in the same order (state machine replication with one leader). An order is sent again until it is acknowledged;
the next one is sent after that.

Invariants (tests/cluster/scheduler/test_membership.py tests them on random schedules):
  I1  A rank has at most one worker that was not declared dead, and its incarnation rises with every admission.
  I2  A worker receives JoinReply after every server has admitted it. No other gets its rank before it left or was
      declared dead and every server has dismissed it.
  I3  All servers execute one sequence of orders, each order once.
  I4  A request is executed once, however often it comes; its reply is repeated.
  I5  A barrier lets no worker pass before every worker of the job, except dead or departed ones, has reached it.
  I6  A table in a reply is on all servers; one that a server refused is on none, and its number is free, before any
      reply says so.
  I7  Silence, and the time without a connection, count only while the scheduler was running: one that was itself
      stopped declares no peer dead.
  I8  What is kept for a peer is bounded, and the work to answer each of its requests as well.
  I9  A membership that replays the inputs of another one, from its beginning or from a state that it saved, has the
      same state and repeats the same replies and orders.
  I10 A peer whose connection has ended is declared dead before it counts as silent only if it is confirmed: a server
      when all its addresses refuse connections, another peer when it has not connected again in time.

Over 600 lines: every input is received, recorded and passed on here, and the state is saved here as a whole.

This module receives inputs and passes each to the part that handles it. The parts keep the state, and use only those
above them in this list:

    peers.py        which processes are known, their connections, replies and events
    orders.py       operations
    assignments.py  the map, and which servers have carried it out
    stamps.py       how far the copies of dead servers' arcs are
    replicas.py     deaths, copies, moves: the next map, which planner.py makes
    tables.py       the tables
    servers.py      servers that join, the end of one, metrics
    jobs.py         workers, jobs of a name, barriers, passes over the data
    named_jobs.py   the default job and the named ones
    launchers.py    what has become of workers' programs

Threads: one.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from msgspec import structs

from shoal.cluster.protocol.messages import (
    GRACE_SECONDS,
    MAX_OPEN_REQUESTS,
    AcceptedReply,
    Assign,
    Assigned,
    Barrier,
    CloseStreams,
    CreateTable,
    Drain,
    ErrorReply,
    Events,
    GetMap,
    GetMapReply,
    GetMetrics,
    HandOver,
    Heartbeat,
    Hello,
    Join,
    Leave,
    LeaveReply,
    ListTables,
    ListTablesReply,
    Message,
    Order,
    OrderReply,
    PendingReply,
    Rebalance,
    Reply,
    ReplyBody,
    ReportMetrics,
    ReportStream,
    Request,
    RequestBody,
    SchedulerStopped,
    StopCluster,
    StreamsClosed,
    TakeSplit,
)
from shoal.cluster.protocol.metrics import Values
from shoal.cluster.protocol.reports import ServerDied, WorkerDied
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.protocol.status import GetStatus, StatusReply
from shoal.cluster.scheduler.assignments import Assignments
from shoal.cluster.scheduler.inputs import (
    Asked,
    Bound,
    Confirmed,
    Died,
    DrainRequested,
    Ended,
    EventsSeen,
    FormingOverdue,
    Input,
    MembershipState,
    MembersSilent,
    Obeyed,
    Planned,
    Probed,
    RebalanceRequested,
    ReplacementOverdue,
    Restarted,
    Settings,
    Stamped,
)
from shoal.cluster.scheduler.jobs import Jobs
from shoal.cluster.scheduler.launchers import Launchers
from shoal.cluster.scheduler.members import (
    AddressProbe,
    LauncherPeer,
    LivenessProbe,
    Outgoing,
    Peer,
    ReaderPeer,
    ServerPeer,
    WorkerPeer,
)
from shoal.cluster.scheduler.monitor import Monitor
from shoal.cluster.scheduler.named_jobs import NamedJobs
from shoal.cluster.scheduler.numbers import NumberSource
from shoal.cluster.scheduler.orders import Orders
from shoal.cluster.scheduler.peers import ROLES, Peers
from shoal.cluster.scheduler.replicas import Replicas
from shoal.cluster.scheduler.servers import Servers
from shoal.cluster.scheduler.status import label_of, status_of
from shoal.cluster.scheduler.tables import Tables

_MAX_PEERS = 1 << 15  # further ones wait until others have left
_MAX_WAITING = 1024  # requests of a peer
_DISCONNECTED_CHECK_SECONDS = 0.01
_LAST_COPY_SECONDS = 60.0  # of silence of a server that has the last copy of slots: its death ends the cluster
_CHECK_SECONDS = 0.5
COPY_RATE = 1 << 25  # bytes per second: a tenth of a core, at 2.4 ns per byte of rows of dim 1

_TOO_MANY = f"more than {MAX_OPEN_REQUESTS} replies are not confirmed: a request names those that its sender awaits"


class Membership:
    """The members of the cluster, and what they have agreed on."""

    def __init__(
        self,
        *,
        servers: int,
        workers: int = 1,
        slots: int = 1024,
        heartbeat: float = 2.0,
        grace: float = GRACE_SECONDS,
        replicas: int = 0,
        copy_rate: int = COPY_RATE,
        replacement_seconds: float = 0.0,
        rng: random.Random,
        now: float,
        counts: Callable[[], dict[str, int]] = dict,
        record: Callable[[Input], None] = lambda _: None,
    ) -> None:
        settings = Settings(
            servers=servers,
            workers=workers,
            slots=slots,
            heartbeat=heartbeat,
            grace=grace,
            replicas=replicas,
            copy_rate=copy_rate,
            replacement_seconds=replacement_seconds,
        )
        self.settings = settings
        self._record = record
        self._counts = counts
        self._numbers = NumberSource(rng.randbytes(16))
        self._started_at = now
        self.generation = 0
        self.address = ""
        self.ended = False
        self.cluster = f"{self._numbers.draw(64):016x}"
        self.launchers = Launchers()
        self._peers = Peers(settings, now)
        self._monitor = Monitor()
        self._orders = Orders(self._peers)
        self._assignments = Assignments(settings, self._peers, self._orders)
        self._replicas = Replicas(settings, self._peers, self._orders, self._assignments, self._numbers)
        self._tables = Tables(self._peers, self._orders)
        self._servers = Servers(settings, self._peers, self._orders, self._assignments, self._replicas, self._tables)
        own = (settings, self._peers, self._orders, self._servers, self._tables, self._numbers)
        self._named = NamedJobs(self._peers, lambda name: Jobs(name, *own))
        self._jobs = self._named.default

    # --- input ----------------------------------------------------------------------------------------------

    def handle(self, route: bytes, host: str, message: Message, now: float) -> Outgoing:
        """Process a message."""
        peers = self._peers
        peers.advance(now)
        if isinstance(message, Request):
            self._ask(route, host, message)
        elif isinstance(message, Heartbeat):
            peer = self._hear(message.sender, route)
            answer = Reply(0, peers.unknown_sender(message.sender, host)) if peer is None else peers.beat(peer, message)
            peers.out.append((route, answer))
        elif isinstance(message, OrderReply):
            peer = self._hear(message.sender, route)
            if isinstance(peer, ServerPeer) and peer.order is not None and peer.order.number == message.number:
                counts = self._counts() if isinstance(peer.order.body, ReportMetrics) else {}
                self._accept(Obeyed(peers.now, message, counts))
        elif isinstance(message, Assigned):
            peer = self._hear(message.sender, route)
            is_current = isinstance(peer, ServerPeer) and message.epoch == peer.offered_epoch
            if isinstance(peer, ServerPeer) and is_current and self._assignments.is_awaited(peer):
                self._accept(Confirmed(peers.now, message))
        elif isinstance(message, StreamsClosed):
            self._hear(message.sender, route)
            if self._replicas.stamps.is_awaited(message.sender):
                self._accept(Stamped(peers.now, message))
        return self._flush()

    def probed(self, probe: AddressProbe, fault: tuple[str, str] | None, now: float) -> Outgoing:
        """Process the result of an address probe: None, or the address that failed and why."""
        self._peers.advance(now)
        server = self._peers.known.get(probe.sender)
        if isinstance(server, ServerPeer) and not server.inside and probe.number in server.waiting:
            self._accept(Probed(self._peers.now, probe.sender, probe.number, fault))
        return self._flush()

    def disconnected(self, route: bytes, now: float) -> Outgoing:
        """Process the end of a connection.

        A peer is not declared dead for it alone (I10): the network or libzmq may have closed the connection, and then
        the peer connects again at once.
        """
        self._peers.advance(now)
        self._peers.disconnect(route)
        return self._flush()

    def liveness(self, probe: LivenessProbe, is_refused: bool, now: float) -> Outgoing:
        """Process the result of a liveness probe: whether all addresses refuse connections."""
        self._peers.advance(now)
        death = self._peers.check_liveness(probe, is_refused)
        if death is not None:
            self._accept(death)
        return self._flush()

    def on_time(self, now: float) -> Outgoing:
        """Process timeouts: declare silent peers dead, send unacknowledged orders again.

        Call it when no message is left to process, and at least once per heartbeat.
        """
        peers = self._peers
        peers.advance(now)
        slow = itertools.chain(self._assignments.find_dead(), self._replicas.stamps.find_dead())
        for death in itertools.chain(peers.find_dead(), slow):
            if death.sender in peers.known and not self._waits_for(peers.known[death.sender], death.silent):
                self._accept(death)
        if seen := peers.seen_by_all():
            self._accept(EventsSeen(peers.now, seen))
        for jobs in self._named.all:
            silent = jobs.members_may_be_dead()
            if silent != jobs.members_silent:
                self._accept(MembersSilent(peers.now, silent, jobs.name))
            while (late := jobs.replacement_overdue()) is not None and not self.broken:
                self._accept(ReplacementOverdue(peers.now, late, jobs.name))
            if jobs.forming_overdue() and not self.broken:
                self._accept(FormingOverdue(peers.now, jobs.name))
        plan_at = self._replicas.plan_at
        if plan_at is not None and plan_at <= peers.now and not self.broken:
            self._accept(Planned(peers.now))
        self._orders.resend()
        self._assignments.resend()
        self._replicas.stamps.resend()
        return self._flush()

    def suspect(self, rank: int, why: str, silent: float, now: float) -> Outgoing:
        """Declare a server dead that has not answered for ``silent`` seconds.

        If it is alive, it is fenced: a false suspicion costs time. A server that has the last copy of slots is waited
        for: its death costs their rows.
        """
        self._peers.advance(now)
        server = self._peers.servers.get(rank)
        if server is not None and server.member and not self._waits_for(server, silent):
            self._accept(Died(self._peers.now, server.sender, why, silent))
        return self._flush()

    def _waits_for(self, peer: Peer, silent: float) -> bool:
        """Whether a peer that has been silent so long is given more time: it may only be stopped or cut off."""
        if not isinstance(peer, ServerPeer) or not 0 < silent <= _LAST_COPY_SECONDS:
            return False
        waits = self._replicas.has_last_copy(peer)
        if waits and self._peers.now - peer.waited_for_at > _LAST_COPY_SECONDS:
            peer.waited_for_at = self._peers.now
            self._peers.notes.append(
                f"server {peer.rank} ({peer.about}) has been silent for {silent:.1f} s. It has the last copy of slots, "
                f"and is declared dead after {_LAST_COPY_SECONDS:g} s, or when its process has ended"
            )
        return waits

    def bound(self, address: str, now: float) -> Outgoing:
        """Keep the address that the scheduler listens at."""
        self._peers.advance(now)
        if address != self.address:
            self._accept(Bound(self._peers.now, address))
        return self._flush()

    def restarted(self, now: float) -> Outgoing:
        """Begin another generation of the scheduler, without connections: no peer counts as silent meanwhile."""
        self._peers.now = self._started_at = max(now, self._peers.now)
        self._accept(Restarted(self._peers.now, self.generation + 1))
        return self._flush()

    def stop(self, now: float) -> Outgoing:
        """End the cluster: send the event to all peers."""
        self._peers.advance(now)
        if not self.ended:
            self._accept(Ended(self._peers.now))
        return self._flush()

    # --- recorded inputs --------------------------------------------------------------------------------------

    def replay(self, entry: Input) -> None:
        """Apply a recorded input again. Nothing is sent or logged."""
        peers = self._peers
        try:
            peers.now = max(entry.now, peers.now)
            self._apply(entry, b"")
        finally:
            peers.out.clear()
            peers.notes.clear()
            peers.deaths.clear()
            peers.refused.clear()

    def _accept(self, entry: Input, route: bytes = b"") -> None:
        self._record(entry)
        self._apply(entry, route)

    def _apply(self, entry: Input, route: bytes) -> None:
        """Change the state by an input; all that it depends on is the state and the input."""
        if isinstance(entry, Asked):
            self._apply_request(entry, route)
        elif isinstance(entry, Obeyed):
            server = self._peers.known[entry.done.sender]
            assert isinstance(server, ServerPeer)
            self._servers.counts = entry.counts
            fault = self._orders.done(server, entry.done)
            if fault:
                self._remove(server, fault)
        elif isinstance(entry, Confirmed):
            self._apply_confirmation(entry.done)
        elif isinstance(entry, Stamped):
            self._replicas.stamped(entry.closed)
        elif isinstance(entry, Planned):
            self._replicas.plan()
        elif isinstance(entry, DrainRequested):
            self._replicas.drain(entry)
        elif isinstance(entry, RebalanceRequested):
            self._replicas.rebalance(entry)
        elif isinstance(entry, Probed):
            self._servers.apply_probe(entry)
        elif isinstance(entry, Died):
            peer = self._peers.known[entry.sender]
            peer.died_after = entry.silent
            self._remove(peer, entry.why)
        elif isinstance(entry, MembersSilent):
            self._named.by_name(entry.job).set_members_silent(entry.silent)
        elif isinstance(entry, ReplacementOverdue):
            self._named.by_name(entry.job).give_up(entry.rank)
        elif isinstance(entry, FormingOverdue):
            self._named.by_name(entry.job).expect_no_more()
        elif isinstance(entry, EventsSeen):
            self._peers.drop_events(entry.events)
        elif isinstance(entry, Bound):
            self.address = entry.address
        elif isinstance(entry, Restarted):
            self.generation = entry.generation
            self._peers.forget_connections()
            for jobs in self._named.all:
                jobs.restarted()
        else:
            self.ended = True
            self._peers.publish(SchedulerStopped())
        self._replicas.carried_out()
        for jobs in self._named.all:
            jobs.fill_vacancies()
            jobs.start_if_complete()
        self._named.forget_ended()

    def _apply_confirmation(self, done: Assigned) -> None:
        server = self._peers.known[done.sender]
        assert isinstance(server, ServerPeer)
        fault = f"it failed to carry out its assignment: {done.fault}" if done.fault else ""
        if done.outcome is not None and server.pending is not None and server.pending.number == done.outcome.number:
            server.pending = None
            fault = fault or self._orders.adopted(server, done.outcome)
        if fault:
            self._remove(server, fault)
        else:
            self._assignments.confirm(server, done)

    # --- the state as a record --------------------------------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """Whether no operation and no change of the map is in progress: only then can the state be saved."""
        return self._orders.at_rest and (self._assignments.are_confirmed or bool(self.broken))

    def save(self) -> MembershipState:
        """Return the whole state."""
        if not self.at_rest:
            raise RuntimeError("an operation is in progress: save the state when there is none")
        return self._state()

    def _state(self) -> MembershipState:
        return MembershipState(
            settings=self.settings,
            cluster=self.cluster,
            seed=self._numbers.seed,
            drawn=self._numbers.drawn,
            generation=self.generation,
            address=self.address,
            ended=self.ended,
            tables=list(self._tables.all),
            **self.launchers.save(),
            steps=self._orders.steps,
            **self._peers.save(),
            **self._replicas.save(),
            **self._servers.save(),
            **self._named.save(),
        )

    @classmethod
    def restore(
        cls,
        state: MembershipState,
        *,
        counts: Callable[[], dict[str, int]] = dict,
        record: Callable[[Input], None] = lambda _: None,
    ) -> Self:
        """Return a membership in this state. Peers have no routes until they are heard again."""
        made = cls(**structs.asdict(state.settings), rng=random.Random(0), now=state.now, counts=counts, record=record)
        made.cluster, made._numbers.seed, made._numbers.drawn = state.cluster, state.seed, state.drawn
        made.generation, made.address, made.ended = state.generation, state.address, state.ended
        made.launchers.restore(state)
        made._peers.restore(state)
        made._orders.steps = state.steps
        made._assignments.restore(state.map)
        made._replicas.restore(state)
        made._servers.restore(state)
        made._tables.restore(state.tables)
        made._named.restore(state)
        return made

    # --- properties -----------------------------------------------------------------------------------------

    @property
    def map(self) -> ClusterMap | None:
        """The map, None before all servers have joined."""
        return self._servers.map

    @property
    def broken(self) -> str:
        """Description of the lost server; empty while none was lost."""
        return self._servers.broken

    @property
    def missing_servers(self) -> str:
        """How many servers have joined; empty when all have."""
        return "" if self.map is not None else self._servers.missing()

    @property
    def workers(self) -> dict[int, int]:
        """The incarnations of the default job's workers, by rank."""
        job = self._jobs.job
        return {rank: worker.incarnation for rank, worker in job.members.items()} if job else {}

    @property
    def num_workers(self) -> int:
        """Number of workers of all jobs that have joined."""
        return sum(len(jobs.job.members) for jobs in self._named.all if jobs.job is not None)

    @property
    def named_jobs(self) -> list[str]:
        """The names of the named jobs that run, or whose workers have begun to join."""
        return list(self._named.named)

    @property
    def now(self) -> float:
        """The time of the last call; of the last input after :meth:`replay`."""
        return self._peers.now

    @property
    def probes(self) -> deque[AddressProbe | LivenessProbe]:
        """Addresses to probe; the caller removes them."""
        return self._peers.probes

    @property
    def notes(self) -> deque[str]:
        """Events for the log; the caller removes them."""
        return self._peers.notes

    @property
    def deaths(self) -> deque[ServerDied | WorkerDied]:
        """Processes that were declared dead, for their supervisor; the caller removes them."""
        return self._peers.deaths

    @property
    def refused(self) -> deque[tuple[str, str]]:
        """Reason and text of each refusal; the caller removes them."""
        return self._peers.refused

    @property
    def has_disconnected(self) -> bool:
        """Whether a peer is disconnected."""
        return self._peers.has_disconnected

    @property
    def next_time(self) -> float:
        """When to call :meth:`on_time`, which may also be called earlier."""
        if self._peers.has_disconnected:
            return self.now + _DISCONNECTED_CHECK_SECONDS
        times = [self.now + min(_CHECK_SECONDS, self.settings.heartbeat / 4)]
        if self._replicas.stamps.are_awaited:
            times.append(self._replicas.stamps.next_time)
        if self._replicas.plan_at is not None and not self.broken:
            times.append(self._replicas.plan_at)
        for server in self._peers.servers.values():
            if server.order is not None:
                times.append(server.resend_at)
            if self._assignments.is_awaited(server):
                times.append(server.assign_at)
        return min(times)

    # --- requests ---------------------------------------------------------------------------------------------

    def _hear(self, sender: bytes, route: bytes) -> Peer | None:
        peer, reconnected = self._peers.hear(sender, route)
        if reconnected and isinstance(peer, ServerPeer):
            if peer.order is not None:
                self._orders.send(peer)
            if self._assignments.is_awaited(peer):
                self._assignments.send(peer)
        return peer

    def _ask(self, route: bytes, host: str, ask: Request) -> None:
        peers, body = self._peers, ask.body
        peer = self._hear(ask.sender, route)
        if isinstance(body, GetStatus):  # it changes nothing, so it is no input
            peers.out.append((route, Reply(ask.number, self._cluster_status())))
        elif isinstance(body, Drain | Rebalance | StopCluster):  # from any process; to repeat it changes nothing
            peers.out.append((route, Reply(ask.number, self._command(ask.sender, ask.number, body))))
        elif peer is not None:
            if peer.settles(ask) or peer.is_new(ask):
                self._accept(Asked(peers.now, "", ask), route)
            else:
                self._repeat(peer, ask.number)
        elif not isinstance(body, Hello) or peers.is_former(ask.sender):
            peers.out.append((route, Reply(ask.number, peers.unknown_sender(ask.sender, host))))
        elif body.role not in ROLES:
            text = f"a peer that is not a server, worker, reader or launcher sent {type(body).__name__}"
            peers.out.append((route, Reply(ask.number, ErrorReply("protocol", text))))
        elif len(peers.known) >= _MAX_PEERS:
            full = PendingReply(f"{len(peers.known)} processes are connected, the maximum")
            peers.out.append((route, Reply(ask.number, full)))
        else:
            self._accept(Asked(peers.now, host, ask), route)

    def _command(self, sender: bytes, number: int, body: Drain | Rebalance | StopCluster) -> ReplyBody:
        if isinstance(body, StopCluster):
            if not self.ended:
                self._accept(Ended(self._peers.now))
            return AcceptedReply("the cluster ends")
        if self.broken:
            return ErrorReply("server-lost", self.broken)
        if (sender, number) not in self._replicas.commands:
            now = self._peers.now
            if isinstance(body, Drain):
                self._accept(DrainRequested(now, sender, number, body.server))
            else:
                self._accept(RebalanceRequested(now, sender, number, body.weights))
        return self._replicas.commands[sender, number]

    def metrics(self) -> Values:
        """Return the values of most metrics ``shoal.cluster.protocol.metrics.SCHEDULER``."""
        status = self._cluster_status()
        self._monitor.observe(status, self._peers.figures(), self.now)
        slots = {arc.first_slot: arc.end_slot - arc.first_slot for arc in status.arcs}
        lacking = (slots[arc.first_slot] for arc in status.arcs if len(arc.copies) < status.replicas)
        workers = [one for one in status.workers if one.rank is not None]
        return {
            "failovers": self._replicas.num_failovers,
            "rows_lost": bool(self.broken),
            "slots_without_copies": sum(lacking),
            "slots_under_way": sum(end - first for one in status.streams for first, end in one.arriving),
            "worker_clock": {label_of(one): one.clock for one in workers},
            "worker_silent_seconds": {label_of(one): one.heard_seconds for one in workers},
            "server_silent_seconds": {str(one.rank): one.heard_seconds for one in status.servers},
        }

    def view(self) -> dict[str, Any]:
        """Return what the page of the metrics port displays, as of the last call of :meth:`metrics`."""
        return self._monitor.view

    def _cluster_status(self) -> StatusReply:
        return status_of(
            self._peers.known.values(),
            [jobs.job for jobs in self._named.all],
            self.map,
            self._assignments.newest,
            now=self.now,
            cluster=self.cluster,
            generation=self.generation,
            uptime=self.now - self._started_at,
            settings=self.settings,
            dead_after=self._peers.dead_after,
            lost=self.broken,
            tables=[table.form.name for table in self._tables.all],
            draining=self._replicas.draining,
            failovers=self._replicas.failovers,
            outcome=self._named.default.outcome,
        )

    def _apply_request(self, entry: Asked, route: bytes) -> None:
        ask = entry.request
        peer = self._peers.known.get(ask.sender)
        if peer is None:
            assert isinstance(ask.body, Hello)
            peer = self._peers.add(route, entry.host, ask.sender, ask.body)
        is_new = peer.is_new(ask)
        if peer.settles(ask):
            peer.settle(ask)
        if not is_new:
            self._repeat(peer, ask.number)
        elif len(peer.replies) >= MAX_OPEN_REQUESTS:  # no process of shoal does this
            self._peers.out.append((peer.route, Reply(ask.number, ErrorReply("protocol", _TOO_MANY))))
        else:
            self._execute(peer, ask.number, ask.body)
            if ask.number in peer.waiting:
                self._repeat(peer, ask.number)

    def _repeat(self, peer: Peer, number: int) -> None:
        """Repeat the reply to a request; one that is no longer waited for has none."""
        if number in peer.replies:
            self._peers.out.append((peer.route, Reply(number, peer.replies[number])))
        elif number in peer.waiting:
            self._peers.out.append((peer.route, Reply(number, PendingReply(self._why(peer, number)))))

    def _why(self, peer: Peer, number: int) -> str:
        if self.map is None:
            return self._servers.missing()
        if isinstance(peer, WorkerPeer) and number == peer.join and not peer.inside:
            return self._named.of(peer).missing(peer)
        return f"waiting for {peer.waiting[number]}"

    def _execute(self, peer: Peer, number: int, body: RequestBody) -> None:
        """Execute a request: reply to it, or keep in `peer.waiting` what it waits for."""
        reply = self._peers.reply
        if isinstance(body, Hello):
            reply(peer, number, self._peers.welcome(peer, self.cluster))
        elif isinstance(body, Leave):
            self._leave(peer, number, body.status)
        elif self.broken:
            reply(peer, number, ErrorReply("server-lost", self.broken))
        elif len(peer.waiting) >= _MAX_WAITING:
            reply(peer, number, ErrorReply("input", f"{peer} has {len(peer.waiting)} waiting requests, the maximum"))
        elif isinstance(body, Join):
            if isinstance(peer, ServerPeer):
                self._servers.join(peer, number, body)
            elif isinstance(peer, WorkerPeer):
                self._named.join(peer, number, body)
        elif isinstance(body, GetMap) and self.map is not None:
            reply(peer, number, GetMapReply(self.map))
        elif isinstance(body, GetMap) and isinstance(peer, ReaderPeer):
            peer.waiting[number] = "the servers to join"
        elif isinstance(body, ReportStream) and isinstance(peer, ServerPeer) and peer.member:
            reply(peer, number, self._replicas.report(peer, body))
        elif isinstance(body, ListTables):
            reply(peer, number, ListTablesReply(self._tables.all))
        elif not isinstance(peer, WorkerPeer) or not peer.inside:
            reply(peer, number, ErrorReply("protocol", f"{peer} is not part of a job and sent {type(body).__name__}"))
        elif isinstance(body, CreateTable):
            self._tables.create(peer, number, body)
        elif isinstance(body, Barrier):
            self._named.of(peer).barrier(peer, number, body.name)
        elif isinstance(body, HandOver):
            self._named.of(peer).hand_over(peer, number, returns=body.returns, begun=body.begun)
        elif isinstance(body, GetMetrics):
            self._servers.report_metrics(peer, number)
        elif isinstance(body, TakeSplit):
            reply(peer, number, self._named.of(peer).take_split(peer, body))

    # --- the end of a peer ------------------------------------------------------------------------------------

    def _leave(self, peer: Peer, number: int, status: int) -> None:
        if isinstance(peer, WorkerPeer) and not self.broken and self._named.of(peer).is_member(peer):
            self._named.of(peer).leave(peer, number, status)
            return
        self._peers.reply(peer, number, LeaveReply())
        if isinstance(peer, LauncherPeer):
            self._peers.forget(peer, LeaveReply())
            self.launchers.leave(peer.about, status)
        else:
            why = "it was terminated" if isinstance(peer, ServerPeer) else "it left"
            self._remove(peer, why, LeaveReply())

    def _remove(self, peer: Peer, why: str, last: ReplyBody | None = None) -> None:
        """Remove a peer that died, left before it had joined, or failed."""
        text = f"{peer} was declared dead, {why}: its requests are refused from now on. Start it again"
        self._peers.forget(peer, last or ErrorReply("fenced", text))
        if isinstance(peer, ServerPeer):
            if self._peers.servers.get(peer.rank) is peer and self._servers.lose(peer, why):
                self._end_all_waits()
        elif isinstance(peer, LauncherPeer):
            self.launchers.fail(f"{peer.about} is lost, {why}", 1)
        elif isinstance(peer, WorkerPeer):
            self._named.of(peer).lose(peer, why)

    def _end_all_waits(self) -> None:
        """Refuse all that waits: the cluster is broken."""
        self._orders.cancel()
        for peer in list(self._peers.known.values()):
            for number in list(peer.waiting):
                self._peers.reply(peer, number, ErrorReply("server-lost", self.broken))
        for jobs in self._named.all:
            jobs.cancel()

    # --- output -----------------------------------------------------------------------------------------------

    def _flush(self) -> Outgoing:
        out = self._peers.out
        self._peers.out = []
        return [(route, self._stamp(message)) for route, message in out if route]

    def _stamp(self, message: Message) -> Message:
        if self.generation and isinstance(message, Reply | Order | Assign | CloseStreams | Events):
            return structs.replace(message, generation=self.generation)
        return message
