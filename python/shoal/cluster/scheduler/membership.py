"""Membership: the scheduler as a state machine without sockets, clocks or randomness of its own.

Its input is messages and the time, its output is messages. So thousands of schedules of joins, deaths, repetitions and
losses can be tested in a second.

Its state (state.py) changes by the inputs of inputs.py alone. Each is passed to `record` before it has any effect;
`replay` applies recorded ones again, without clock or network, and ends in the same state. So a scheduler that stores
its inputs can be started again.

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

This module receives inputs, and passes each to the method that handles it (handlers.py), of one of these parts. Each
uses only those above it:

    peers.py               which processes are known, their routes, replies and events
    orders.py              operations
    assignments.py         the map, and which servers have carried it out
    stamps.py              how far the copies of dead servers' arcs are
    replicas.py            deaths, copies, moves: the next map, which planner.py makes
    tables.py              the tables
    servers.py             servers that join, the end of one, metrics
    jobs.py                workers, jobs of a name, barriers, passes over the data
    failure_detector.py    which processes are dead

Threads: one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from shoal.cluster.protocol.messages import (
    MAX_OPEN_REQUESTS,
    AcceptedReply,
    Assign,
    Assigned,
    CloseStreams,
    ErrorReply,
    Events,
    GetMap,
    GetMapReply,
    Heartbeat,
    Hello,
    Join,
    Leave,
    LeaveReply,
    Message,
    Order,
    OrderReply,
    PendingReply,
    Reply,
    ReportMetrics,
    Request,
    SchedulerStopped,
    StopCluster,
    StreamsClosed,
)
from shoal.cluster.protocol.metrics import Values
from shoal.cluster.protocol.records import Command, ReplyBody, RequestBody
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.protocol.status import GetStatus, StatusReply
from shoal.cluster.scheduler.assignments import Assignments
from shoal.cluster.scheduler.failure_detector import FailureDetector
from shoal.cluster.scheduler.handlers import Handlers, handles, is_taken_of_all
from shoal.cluster.scheduler.inputs import (
    Died,
    Ended,
    Input,
    InputBody,
    PlanDue,
    Probed,
    RefusalsCounted,
    Restarted,
)
from shoal.cluster.scheduler.jobs import Jobs
from shoal.cluster.scheduler.monitor import Monitor
from shoal.cluster.scheduler.orders import Orders
from shoal.cluster.scheduler.peers import AddressProbe, LivenessProbe, Outgoing, Peers
from shoal.cluster.scheduler.replicas import Replicas
from shoal.cluster.scheduler.servers import Servers
from shoal.cluster.scheduler.state import ROLES, LauncherPeer, Peer, ReaderPeer, ServerPeer, State, WorkerPeer
from shoal.cluster.scheduler.status import label_of, metrics_of_fits, status_of
from shoal.cluster.scheduler.tables import Tables

_MAX_PEERS = 1 << 15  # further ones wait until others have left
_MAX_WAITING = 1024  # requests of a peer
_MAX_COMMANDS = 256  # whose replies are kept
_DISCONNECTED_CHECK_SECONDS = 0.01
_CHECK_SECONDS = 0.5

_TOO_MANY = f"more than {MAX_OPEN_REQUESTS} replies are not confirmed: a request names those that its sender awaits"


class Membership:
    """The members of the cluster, and what they have agreed on.

    The state is a new one, or one that was stored. ``counts`` returns how often something was refused, by reason; it is
    part of the metrics that workers request. ``record`` is called with each input before it has an effect.
    """

    def __init__(
        self,
        state: State,
        *,
        counts: Callable[[], dict[str, int]] = dict,
        record: Callable[[Input], None] = lambda _: None,
    ) -> None:
        self.state = state
        self.settings = state.settings
        self._record = record
        self._counts = counts
        self._started_at = state.now
        self._peers = Peers(state)
        self.probes, self.notes, self.refused = self._peers.probes, self._peers.notes, self._peers.refused
        self.deaths = self._peers.deaths
        self._monitor = Monitor()
        self._orders = Orders(state, self._peers)
        self._assignments = Assignments(state, self._peers, self._orders)
        self._replicas = Replicas(state, self._peers, self._orders, self._assignments)
        self._tables = Tables(state, self._peers, self._orders)
        self._servers = Servers(state, self._peers, self._orders, self._assignments, self._replicas)
        self._jobs = Jobs(state, self._peers, self._orders)
        self._detector = FailureDetector(state, self._peers, self._assignments, self._replicas)
        self._handle = Handlers(self, self._peers, self._replicas, self._tables, self._servers, self._jobs)

    # --- what comes -------------------------------------------------------------------------------------------

    def handle(self, route: bytes, host: str, message: Message, now: float) -> Outgoing:
        """Process a message, which came over a route from an address; returns the messages to send, with routes."""
        self._peers.advance(now)
        if isinstance(message, Request):
            self._receive_request(route, host, message)
        elif isinstance(message, Heartbeat):
            peer = self._hear(message.sender, route)
            if peer is None:
                answer: Message = Reply(0, self._peers.unknown_sender(message.sender, host))
            else:
                answer = self._peers.beat(peer, message)
            self._peers.out.append((route, answer))
        elif isinstance(message, OrderReply | Assigned | StreamsClosed):
            server = self._hear(message.sender, route)
            if isinstance(server, ServerPeer) and self._is_awaited(server, message):
                order = server.order if isinstance(message, OrderReply) else None
                if order is not None and isinstance(order.body, ReportMetrics):
                    self._accept(RefusalsCounted(self._counts()))
                self._accept(message)
        return self._flush()

    def _is_awaited(self, server: ServerPeer, message: OrderReply | Assigned | StreamsClosed) -> bool:
        """Whether a message of a server is the first of its kind; it is sent until that is known."""
        if isinstance(message, OrderReply):
            return server.order is not None and server.order.number == message.number
        if isinstance(message, Assigned):
            return message.epoch == server.offered_epoch and self._assignments.is_awaited(server)
        return self._replicas.stamps.awaited_since(server) is not None

    def probed(self, probe: AddressProbe, fault: tuple[str, str] | None, now: float) -> Outgoing:
        """Process the result of an address probe: None, or the address that failed and why."""
        self._peers.advance(now)
        server = self._peers.known.get(probe.sender)
        if isinstance(server, ServerPeer) and not server.inside and probe.number in server.waiting:
            self._accept(Probed(probe.sender, probe.number, fault))
        return self._flush()

    def disconnected(self, route: bytes, now: float) -> Outgoing:
        """Process the end of a connection."""
        self._peers.advance(now)
        self._detector.disconnect(route)
        return self._flush()

    def liveness(self, probe: LivenessProbe, is_refused: bool, now: float) -> Outgoing:
        """Process the result of a liveness probe: whether all addresses refuse connections."""
        self._peers.advance(now)
        death = self._detector.check_liveness(probe, is_refused)
        if death is not None:
            self._accept(death)
        return self._flush()

    def suspect(self, rank: int, why: str, silent: float, now: float) -> Outgoing:
        """Process that a server has not answered pings for ``silent`` seconds."""
        self._peers.advance(now)
        death = self._detector.find_silent(rank, why, silent)
        if death is not None:
            self._accept(death)
        return self._flush()

    def on_time(self, now: float) -> Outgoing:
        """Process what is due: call it when no message is left to process, and at least once per heartbeat."""
        self._peers.advance(now)
        for death in self._detector.find_dead():
            self._accept(death)
        if seen := self._peers.find_seen():
            self._accept(seen)
        for due in self._jobs.find_due():
            self._accept(due)
        plan_at = self._replicas.plan_at
        if plan_at is not None and plan_at <= now and not self.broken:
            self._accept(PlanDue())
        self._orders.resend()
        self._assignments.resend()
        self._replicas.stamps.resend()
        return self._flush()

    def restarted(self, address: str, now: float) -> Outgoing:
        """Begin another generation of the scheduler, without connections: no peer counts as silent meanwhile."""
        self.state.now = self._started_at = max(now, self.state.now)
        self._accept(Restarted(self.state.generation + 1, address))
        return self._flush()

    def stop(self, now: float) -> Outgoing:
        """End the cluster: send the event to all peers."""
        self._peers.advance(now)
        if not self.state.ended:
            self._accept(Ended())
        return self._flush()

    # --- inputs -----------------------------------------------------------------------------------------------

    def _accept(self, body: InputBody, host: str = "") -> None:
        self._record(Input(self.state.now, body, host))
        self._apply(body, host)

    def replay(self, entry: Input) -> None:
        """Apply a recorded input again. Nothing is sent or logged."""
        try:
            self.state.now = max(entry.now, self.state.now)
            self._apply(entry.body, entry.host)
        finally:
            for unsent in (self._peers.out, self.notes, self.deaths, self.refused):
                unsent.clear()

    def _apply(self, body: InputBody, host: str) -> None:
        """Change the state by an input; all that it depends on is the state and the input."""
        if isinstance(body, Request):
            self._execute(body, host)
        else:
            self._handle(body)
        self._replicas.note_carried_out()
        self._jobs.settle()

    @handles(OrderReply)
    def _end_order(self, done: OrderReply) -> None:
        server = self._peers.server(done.sender)
        fault = self._orders.done(server, done)
        if fault:
            self._remove(server, fault)

    @handles(Assigned)
    def _confirm_assignment(self, done: Assigned) -> None:
        server = self._peers.server(done.sender)
        fault = f"it failed to carry out its assignment: {done.fault}" if done.fault else ""
        if done.outcome is not None and server.pending is not None and server.pending.number == done.outcome.number:
            server.pending = None
            fault = fault or self._orders.adopted(server, done.outcome)
        if fault:
            self._remove(server, fault)
        else:
            self._assignments.confirm(server, done)

    @handles(Died)
    def _remove_dead(self, death: Died) -> None:
        self._remove(self._peers.known[death.sender], death.why, silent=death.silent)

    @handles(Restarted)
    def _begin_generation(self, restarted: Restarted) -> None:
        self.state.generation, self.state.address = restarted.generation, restarted.address
        self._peers.forget_connections()
        self._detector.probe_again()
        self._jobs.restarted()

    @handles(Ended)
    def _end(self, _: Ended | None = None) -> None:
        if not self.state.ended:
            self.state.ended = True
            self._peers.publish(SchedulerStopped())

    # --- requests ---------------------------------------------------------------------------------------------

    def _hear(self, sender: bytes, route: bytes) -> Peer | None:
        peer, reconnected = self._peers.hear(sender, route)
        if reconnected and isinstance(peer, ServerPeer):
            if peer.order is not None:
                self._orders.send(peer)
            if self._assignments.is_awaited(peer):
                self._assignments.send(peer)
        return peer

    def _receive_request(self, route: bytes, host: str, ask: Request) -> None:
        peers, body, number = self._peers, ask.body, ask.number
        peer = self._hear(ask.sender, route)
        reply: ReplyBody | None = None
        if isinstance(body, GetStatus):  # it changes nothing, so it is no input
            reply = self._cluster_status()
        elif isinstance(body, Command):
            reply = self._receive_command(ask)
        elif peer is not None:
            if peer.settles(ask) or peer.is_new(ask):
                self._accept(ask)
            else:
                self._repeat(peer, number)
        elif not isinstance(body, Hello) or ask.sender in self.state.former:
            reply = peers.unknown_sender(ask.sender, host)
        elif body.role not in ROLES:
            text = f"a peer that is not a server, worker, reader or launcher sent {type(body).__name__}"
            reply = ErrorReply("protocol", text)
        elif len(peers.known) >= _MAX_PEERS:
            reply = PendingReply(f"{len(peers.known)} processes are connected, the maximum")
        else:
            self._accept(ask, host)
            newcomer = self._hear(ask.sender, route)  # it had no route before
            if newcomer is not None:
                self._repeat(newcomer, number)
        if reply is not None:
            peers.out.append((route, Reply(number, reply)))

    def _receive_command(self, ask: Request) -> ReplyBody:
        """Execute a command of any process; to repeat it changes nothing."""
        if self.broken and not isinstance(ask.body, StopCluster):
            return ErrorReply("server-lost", self.broken)
        if (ask.sender, ask.number) not in self.state.commands:
            self._accept(ask)
        return self.state.commands[ask.sender, ask.number]

    def _execute(self, ask: Request, host: str) -> None:
        """Execute a request: reply to it, or keep in `peer.waiting` what it waits for."""
        if isinstance(ask.body, Command):
            commands = self.state.commands
            commands[ask.sender, ask.number] = self._handle(ask.body)
            if len(commands) > _MAX_COMMANDS:
                del commands[next(iter(commands))]
            return
        peer: Peer | None = self._peers.known.get(ask.sender)
        if peer is None:
            assert isinstance(ask.body, Hello)
            peer = self._peers.add(host, ask.sender, ask.body)
        is_new = peer.is_new(ask)
        if peer.settles(ask):
            peer.settle(ask)
        if not is_new:
            self._repeat(peer, ask.number)
        elif len(peer.replies) >= MAX_OPEN_REQUESTS:  # no process of shoal does this
            self._peers.out.append((peer.link.route, Reply(ask.number, ErrorReply("protocol", _TOO_MANY))))
        else:
            reply = self._refusal(peer, ask.body) or self._handle(ask.body, peer, ask.number)
            if reply is not None:
                self._peers.reply(peer, ask.number, reply)
            elif ask.number in peer.waiting:
                self._repeat(peer, ask.number)

    def _refusal(self, peer: Peer, body: RequestBody) -> ReplyBody | None:
        """Return why a request is not executed, whatever it is."""
        if isinstance(body, Hello | Leave):
            return None
        if self.broken:
            return ErrorReply("server-lost", self.broken)
        if len(peer.waiting) >= _MAX_WAITING:
            return ErrorReply("input", f"{peer} has {len(peer.waiting)} waiting requests, the maximum")
        if not is_taken_of_all(body) and not (isinstance(peer, WorkerPeer) and peer.inside):
            return ErrorReply("protocol", f"{peer} is not part of a job and sent {type(body).__name__}")
        return None

    def _repeat(self, peer: Peer, number: int) -> None:
        """Repeat the reply to a request; one that is no longer waited for has none."""
        if number in peer.replies:
            self._peers.out.append((peer.link.route, Reply(number, peer.replies[number])))
        elif number in peer.waiting:
            self._peers.out.append((peer.link.route, Reply(number, PendingReply(self._why(peer, number)))))

    def _why(self, peer: Peer, number: int) -> str:
        if self.map is None:
            return self._servers.missing()
        if isinstance(peer, WorkerPeer) and number == peer.join and not peer.inside:
            return self._jobs.missing(peer)
        return f"waiting for {peer.waiting[number]}"

    @handles(Join, of_all=True)
    def _join(self, peer: Peer, number: int, join: Join) -> ReplyBody | None:
        if isinstance(peer, ServerPeer):
            return self._servers.join(peer, number, join)
        if isinstance(peer, WorkerPeer):
            return self._jobs.join(peer, number, join)
        return ErrorReply("protocol", f"{peer} does not join")

    @handles(GetMap, of_all=True)
    def _get_map(self, peer: Peer, number: int, _: GetMap) -> ReplyBody | None:
        if self.map is not None:
            return GetMapReply(self.map)
        if not isinstance(peer, ReaderPeer):
            return ErrorReply("protocol", f"{peer} is not part of a job and sent GetMap")
        peer.waiting[number] = "the servers to join"
        return None

    @handles(StopCluster)
    def _stop_cluster(self, _: StopCluster) -> ReplyBody:
        self._end()
        return AcceptedReply("the cluster ends")

    # --- the end of a peer ------------------------------------------------------------------------------------

    @handles(Leave, of_all=True)
    def _leave(self, peer: Peer, number: int, leave: Leave) -> None:
        if isinstance(peer, WorkerPeer) and not self.broken and self._jobs.leave(peer, number, leave.status):
            return
        self._peers.reply(peer, number, LeaveReply())
        if isinstance(peer, LauncherPeer):
            self._peers.forget(peer, LeaveReply())
            self.state.launchers.done += leave.status == 0
            if leave.status:
                self.state.launchers.fail(f"{peer.about} ended with status {leave.status}", leave.status)
        else:
            self._remove(peer, "it was terminated" if isinstance(peer, ServerPeer) else "it left", LeaveReply())

    def _remove(self, peer: Peer, why: str, last: ReplyBody | None = None, *, silent: float = 0.0) -> None:
        """Remove a peer that died, left before it had joined, or failed."""
        text = f"{peer} was declared dead, {why}: its requests are refused from now on. Start it again"
        self._peers.forget(peer, last or ErrorReply("fenced", text))
        if isinstance(peer, ServerPeer):
            if self._peers.servers.get(peer.rank) is peer and self._servers.lose(peer, why, silent):
                self._end_all_waits()
        elif isinstance(peer, LauncherPeer):
            self.state.launchers.fail(f"{peer.about} is lost, {why}", 1)
        elif isinstance(peer, WorkerPeer):
            self._jobs.lose(peer, why)

    def _end_all_waits(self) -> None:
        """Refuse all that waits: the cluster is broken."""
        self._orders.cancel()
        for peer in list(self._peers.known.values()):
            for number in list(peer.waiting):
                self._peers.reply(peer, number, ErrorReply("server-lost", self.broken))
        self._jobs.cancel()

    # --- output -----------------------------------------------------------------------------------------------

    def _flush(self) -> Outgoing:
        out = self._peers.out
        self._peers.out = []
        return [(route, self._stamp(message)) for route, message in out if route]

    def _stamp(self, message: Message) -> Message:
        if self.state.generation and isinstance(message, Reply | Order | Assign | CloseStreams | Events):
            return structs.replace(message, generation=self.state.generation)
        return message

    # --- what there is ----------------------------------------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """Whether no operation and no change of the map is in progress: only then can the state be stored."""
        return self._orders.at_rest and (self._assignments.are_confirmed or bool(self.broken))

    def save(self) -> State:
        """Return the state, to be stored."""
        if not self.at_rest:
            raise RuntimeError("an operation is in progress: save the state when there is none")
        return self.state

    @property
    def map(self) -> ClusterMap | None:
        """The map that workers use, None before all servers have joined."""
        return self.state.published

    @property
    def broken(self) -> str:
        """Description of the lost server; empty while none was lost."""
        return self.state.broken

    @property
    def missing_servers(self) -> str:
        """How many servers have joined; empty when all have."""
        return "" if self.map is not None else self._servers.missing()

    @property
    def workers(self) -> dict[int, int]:
        """The incarnations of the default job's workers, by rank."""
        job, peers = self.state.jobs[""].job, self.state.peers.values()
        members = [peer for peer in peers if isinstance(peer, WorkerPeer) and job is not None and job.has(peer)]
        return {worker.rank: worker.incarnation for worker in members}

    @property
    def num_workers(self) -> int:
        """Number of workers of all jobs that have joined."""
        return sum(len(line.job.members) for line in self.state.jobs.values() if line.job is not None)

    @property
    def named_jobs(self) -> list[str]:
        """The names of the named jobs that run, or whose workers have begun to join."""
        return [name for name in self.state.jobs if name]

    @property
    def next_time(self) -> float:
        """When to call :meth:`on_time`, which may also be called earlier."""
        now = self.state.now
        if self._detector.has_disconnected:
            return now + _DISCONNECTED_CHECK_SECONDS
        times = [now + min(_CHECK_SECONDS, self.settings.heartbeat / 4)]
        if self._replicas.stamps.are_awaited:
            times.append(self._replicas.stamps.next_time)
        if self._replicas.plan_at is not None and not self.broken:
            times.append(self._replicas.plan_at)
        for server in self._peers.servers.values():
            if server.order is not None:
                times.append(server.link.order.at)
            if self._assignments.is_awaited(server):
                times.append(server.link.assignment.at)
        return min(times)

    def metrics(self) -> Values:
        """Return the values of most metrics ``shoal.cluster.protocol.metrics.SCHEDULER``."""
        status = self._cluster_status()
        self._monitor.observe(status, self._peers.figures(), self.state.now)
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
            **metrics_of_fits(status.fits),
        }

    def view(self) -> dict[str, Any]:
        """Return what the page of the metrics port displays, as of the last call of :meth:`metrics`."""
        return self._monitor.view

    def _cluster_status(self) -> StatusReply:
        return status_of(self.state, uptime=self.state.now - self._started_at)
