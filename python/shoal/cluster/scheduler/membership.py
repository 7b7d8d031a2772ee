"""Membership: the state of the scheduler, as a state machine without sockets, clocks or randomness of its own.

Its input is messages and the time, its output is messages. So thousands of schedules of joins, deaths, repetitions and
losses can be tested in a second.

The state changes by the inputs of inputs.py alone. Each is passed to `record` before it has any effect; `replay`
applies recorded ones again, without clock or network, and ends in the same state. So a scheduler that stores its inputs
can be started again.

    forming    servers join, in any order; their ranks are 0..S-1
    map        the last server has joined: the slots are divided evenly among all endpoints, in the order of the ranks
    job        W workers have joined; those that asked for no rank get the remaining ones. All servers start the job,
               then all workers receive JoinReply; it ends when the last worker has left or died, and the next join
               begins another
    broken     a server was lost, and its rows with it: every request is refused with its name

Everything that must be the same on all servers is an operation: a generator that yields an order, which goes to every
server, and receives the results. One operation runs at a time, the others wait in a queue, so all servers see the same
orders in the same order (state machine replication with one leader). An order is sent again until it is acknowledged;
the next one is sent after that.

Invariants (tests/test_membership.py tests them on random schedules):
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

Over 600 lines: the handlers of one state machine share its state and invariants. What it keeps of each peer and job is
in members.py, the assignment of splits in splits.py.

Threads: one.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from typing import Self, TypeAlias

from msgspec import structs

from shoal.base.plural import counted
from shoal.cluster.protocol.address import complete, split
from shoal.cluster.protocol.messages import (
    MAX_OPEN_REQUESTS,
    MAX_WORKERS,
    AddTable,
    Admit,
    Barrier,
    BarrierReply,
    CreateTable,
    Dismiss,
    DropTable,
    EndpointMetrics,
    ErrorReply,
    Event,
    Events,
    Fence,
    GetMap,
    GetMapReply,
    GetMetrics,
    Heartbeat,
    Hello,
    HelloReply,
    Hold,
    JobConsistency,
    Join,
    JoinReply,
    Leave,
    LeaveReply,
    ListTables,
    ListTablesReply,
    Message,
    MetricsReply,
    Order,
    OrderBody,
    OrderReply,
    PendingReply,
    Reply,
    ReplyBody,
    ReportMetrics,
    Request,
    RequestBody,
    SchedulerStopped,
    ServerGone,
    SplitReply,
    StartJob,
    TableRecord,
    TableReply,
    TakeSplit,
    WorkerGone,
    form_bytes,
)
from shoal.cluster.protocol.slot_map import ClusterMap, cut_evenly
from shoal.cluster.protocol.status import GetStatus, StatusReply
from shoal.cluster.scheduler.inputs import (
    Asked,
    Bound,
    Died,
    Ended,
    EventsSeen,
    Input,
    MembershipState,
    MembersSilent,
    Obeyed,
    Probed,
    Restarted,
    Settings,
)
from shoal.cluster.scheduler.members import (
    AddressProbe,
    DataPass,
    FormingJob,
    Job,
    LauncherPeer,
    LivenessProbe,
    Peer,
    ServerPeer,
    WorkerPeer,
    restore_job,
    restore_peer,
)
from shoal.cluster.scheduler.splits import SplitTracker
from shoal.cluster.scheduler.status import status_of

__all__ = ["DEAD_AFTER", "AddressProbe", "LivenessProbe", "Membership"]

DEAD_AFTER = 5  # heartbeats missed
_MAY_BE_DEAD_AFTER = 2  # heartbeats missed
_MAX_FORMER = 4096  # senders that are remembered after they have left
_MAX_PEERS = 1 << 15  # further ones wait until others have left
_MAX_WAITING = 1024  # requests of a peer
_MAX_SPLITS = 1 << 24
_MAX_PASSES = 1024  # unfinished ones
_MAX_TABLES_BYTES = 1 << 23  # of the descriptions of all tables, which are sent in one message
_MAX_NAME_LENGTH = 1024  # characters of a table's name
_RESEND_SECONDS = 0.1  # until an order is sent again; each time twice as long as before
_MAX_RESEND_SECONDS = 1.0
_RECONNECT_SECONDS = 1.0  # in which a peer whose connection has ended connects again, and at least half a heartbeat
_PROBE_AFTER_SECONDS = 0.1  # from the end of a server's connection until its addresses are probed
_MAX_PROBE_SECONDS = 1.0  # between two probes
_DISCONNECTED_CHECK_SECONDS = 0.01
_CHECK_SECONDS = 0.5
_MAX_STEP_SECONDS = 0.25  # that counts as time without a connection between two inputs
_HEARTBEATS_TO_CLOSE = 1.25  # of silence: libzmq ends a silent connection after 1.5, a process its own at once

_TOO_MANY = f"more than {MAX_OPEN_REQUESTS} replies are not confirmed: a request names those that its sender awaits"

_KINDS: dict[str, type[Peer]] = {"server": ServerPeer, "worker": WorkerPeer, "launcher": LauncherPeer}

Outgoing: TypeAlias = list[tuple[bytes, Message]]
Operation: TypeAlias = Generator[OrderBody, list[OrderReply], None]


class Membership:
    """The members of the cluster, and what they have agreed on.

    Parameters
    ----------
    servers : int
        Number of servers of the cluster.
    workers : int
        Number of workers of a job, unless the workers pass it.
    slots : int
        Number of slots of the hash space.
    heartbeat : float
        Seconds between heartbeats. A peer is dead after 5 without one.
    grace : float
        Seconds that the other processes continue while the scheduler is silent.
    rng : random.Random
        Makes the seed of the numbers of the cluster and of jobs.
    now : float
        The time, in seconds from any origin; it never decreases.
    counts : callable
        Returns how often something was refused, by reason; part of the metrics that workers request.
    record : callable
        Called with each input before it has an effect.

    Attributes
    ----------
    refused : deque of (str, str)
        Reason and text of each refusal; the caller removes them.
    """

    def __init__(
        self,
        *,
        servers: int,
        workers: int = 1,
        slots: int = 1024,
        heartbeat: float = 2.0,
        grace: float = 60.0,
        rng: random.Random,
        now: float,
        counts: Callable[[], dict[str, int]] = dict,
        record: Callable[[Input], None] = lambda _: None,
    ) -> None:
        if servers < 1 or workers < 1:
            raise ValueError(f"a cluster needs a server and a worker at least, got {servers} and {workers}")
        if workers > MAX_WORKERS:
            raise ValueError(f"a job has {MAX_WORKERS} workers at most, got {workers}")
        if slots not in {1 << bits for bits in range(1, 15)}:
            raise ValueError(f"slots must be a power of two from 2 to 16384, got {slots}")
        if heartbeat <= 0:
            raise ValueError(f"heartbeat must be a number of seconds above 0, got {heartbeat}")
        if grace <= 0:
            raise ValueError(f"grace must be a number of seconds above 0, got {grace}")
        self.settings = Settings(servers=servers, workers=workers, slots=slots, heartbeat=heartbeat, grace=grace)
        self._num_servers = servers
        self._num_workers = workers
        self._slots = slots
        self._heartbeat = heartbeat
        self._grace = grace
        self._dead_after = DEAD_AFTER * heartbeat
        self._reconnect_seconds = max(_RECONNECT_SECONDS, heartbeat / 2)
        self._record = record
        self._seed = rng.randbytes(16)
        self._drawn = 0
        self._now = now
        self._started_at = now
        self._running = 0.0  # seconds that this state machine was seen to run
        self.generation = 0
        self.address = ""
        self.ended = False
        self.cluster = f"{self._draw(64):016x}"
        self.probes: deque[AddressProbe | LivenessProbe] = deque()
        self.notes: deque[str] = deque()  # events for the log; the caller removes them
        self.refused: deque[tuple[str, str]] = deque()
        self._counts = counts
        self._reported_counts: dict[str, int] = {}
        self._peers: dict[bytes, Peer] = {}
        self._by_route: dict[bytes, Peer] = {}
        self._disconnected: dict[bytes, Peer] = {}  # by sender
        self._former: OrderedDict[bytes, ReplyBody] = OrderedDict()
        self._servers: dict[int, ServerPeer] = {}
        self._map: ClusterMap | None = None
        self._broken = ""
        self._events: list[Event] = []  # those that some peer has not seen
        self._events_dropped = 0  # number of earlier ones
        self._tables: dict[str, TableReply] = {}
        self._tables_bytes = 0
        self._launchers_done = 0
        self._failed = ""
        self._status = 0
        self._wanted_tables: dict[str, list[tuple[Peer, int]]] = {}
        self._incarnations: dict[int, int] = {}
        self._clocks_before = 0  # of the last job
        self._job: Job | None = None
        self._forming = FormingJob()
        self._admitting: WorkerPeer | None = None
        self._queue: dict[bytes, WorkerPeer] = {}  # workers, by sender, that wait for the end of the job or for a rank
        self._vacant = False  # whether one of them may get a place
        self._members_silent = False  # whether a member of the job may be dead
        self._operations: deque[Operation] = deque()
        self._operation: Operation | None = None
        self._results: dict[int, OrderReply] = {}
        self._out: Outgoing = []

    # --- input ----------------------------------------------------------------------------------------------

    def handle(self, route: bytes, host: str, message: Message, now: float) -> Outgoing:
        """Process a message.

        Parameters
        ----------
        route : bytes
            Destination of replies; a peer may change it.
        host : str
            Address of the connection's other end.
        message : Message
        now : float
            Seconds.

        Returns
        -------
        list of (route, message)
            Messages to send.
        """
        self._advance(now)
        if isinstance(message, Request):
            self._ask(route, host, message)
        elif isinstance(message, Heartbeat):
            peer = self._known(message.sender, route)
            if peer is None:
                self._out.append((route, Reply(0, self._unknown_sender(message.sender, host))))
            else:
                seen = min(max(message.seen, peer.seen), self._events_dropped + len(self._events))
                peer.seen = seen
                if isinstance(peer, WorkerPeer):
                    peer.clock = message.clock
                self._out.append((route, Events(seen, tuple(self._events[seen - self._events_dropped :]))))
        elif isinstance(message, OrderReply):
            peer = self._known(message.sender, route)
            if isinstance(peer, ServerPeer) and peer.order is not None and peer.order.number == message.number:
                counts = self._counts() if isinstance(peer.order.body, ReportMetrics) else {}
                self._accept(Obeyed(self._now, message, counts))
        return self._flush()

    def probed(self, probe: AddressProbe, fault: tuple[str, str] | None, now: float) -> Outgoing:
        """Process the result of an address probe: None, or the address that failed and why."""
        self._advance(now)
        server = self._peers.get(probe.sender)
        if isinstance(server, ServerPeer) and not server.inside and probe.number in server.waiting:
            self._accept(Probed(self._now, probe.sender, probe.number, fault))
        return self._flush()

    def disconnected(self, route: bytes, now: float) -> Outgoing:
        """Process the end of a connection.

        A peer is not declared dead for it alone (I10): the network or libzmq may have closed the connection, and then
        the peer connects again at once.
        """
        self._advance(now)
        peer = self._by_route.pop(route, None)
        if peer is not None and peer.route == route:
            peer.disconnected_at = self._running
            peer.was_silent = now - peer.last_heard > _HEARTBEATS_TO_CLOSE * self._heartbeat
            self._disconnected[peer.sender] = peer
            if isinstance(peer, ServerPeer):
                peer.probe_at = self._running + _PROBE_AFTER_SECONDS
        return self._flush()

    def liveness(self, probe: LivenessProbe, is_refused: bool, now: float) -> Outgoing:
        """Process the result of a liveness probe: whether all addresses refuse connections."""
        self._advance(now)
        server = self._disconnected.get(probe.sender)
        if isinstance(server, ServerPeer) and probe.number == server.probe and server.probe_at is None:
            assert server.disconnected_at is not None
            if is_refused:
                count = "ports refuse" if len(server.addresses) > 1 else "port refuses"
                why = f"its process has ended: its connection closed and its {count} connections"
                self._accept(Died(self._now, server.sender, why))
            else:
                seconds = max(_PROBE_AFTER_SECONDS, (self._running - server.disconnected_at) / 2)
                server.probe_at = self._running + min(seconds, _MAX_PROBE_SECONDS)
        return self._flush()

    def on_time(self, now: float) -> Outgoing:
        """Process timeouts: declare silent peers dead, send unacknowledged orders again.

        Call it when no message is left to process, and at least once per heartbeat.
        """
        self._advance(now)
        for peer in list(self._peers.values()):
            silent = now - peer.last_heard
            if silent > self._dead_after and peer.sender in self._peers:
                self._accept(Died(self._now, peer.sender, f"it has been silent for {silent:.1f} s"))
        for peer in list(self._disconnected.values()):
            if peer.sender in self._disconnected:
                self._check_disconnected(peer)
        if self._events:
            all_events = self._events_dropped + len(self._events)
            seen = min((peer.seen for peer in self._peers.values()), default=all_events)
            if seen > self._events_dropped:
                self._accept(EventsSeen(self._now, seen))
        members_silent = self._job is not None and any(
            member.disconnected_at is not None or self._now - member.last_heard > _MAY_BE_DEAD_AFTER * self._heartbeat
            for member in self._job.members.values()
        )
        if members_silent != self._members_silent:
            self._accept(MembersSilent(self._now, members_silent))
        for server in self._servers.values():
            if server.order is not None and server.resend_at <= now and server.disconnected_at is None:
                self._send_order(server, again=True)
        return self._flush()

    def bound(self, address: str, now: float) -> Outgoing:
        """Keep the address that the scheduler listens at."""
        self._advance(now)
        if address != self.address:
            self._accept(Bound(self._now, address))
        return self._flush()

    def restarted(self, now: float) -> Outgoing:
        """Begin another generation of the scheduler, without connections: no peer counts as silent meanwhile."""
        self._now = max(now, self._now)
        self._started_at = self._now
        self._accept(Restarted(self._now, self.generation + 1))
        return self._flush()

    def stop(self, now: float) -> Outgoing:
        """End the cluster: send the event to all peers."""
        self._advance(now)
        self._accept(Ended(self._now))
        return self._flush()

    # --- recorded inputs --------------------------------------------------------------------------------------

    def replay(self, entry: Input) -> None:
        """Apply a recorded input again. Nothing is sent or logged."""
        try:
            self._now = max(entry.now, self._now)
            self._apply(entry, b"")
        finally:
            self._out.clear()
            self.notes.clear()
            self.refused.clear()

    def _accept(self, entry: Input, route: bytes = b"") -> None:
        self._record(entry)
        self._apply(entry, route)

    def _apply(self, entry: Input, route: bytes) -> None:
        """Change the state by an input; all that it depends on is the state and the input."""
        if isinstance(entry, Asked):
            self._apply_request(entry, route)
        elif isinstance(entry, Obeyed):
            server = self._peers[entry.done.sender]
            assert isinstance(server, ServerPeer)
            self._reported_counts = entry.counts
            self._done(server, entry.done)
        elif isinstance(entry, Probed):
            self._apply_probe(entry)
        elif isinstance(entry, Died):
            self._remove(self._peers[entry.sender], entry.why)
        elif isinstance(entry, MembersSilent):
            self._members_silent = entry.silent
            self._vacant = not entry.silent
        elif isinstance(entry, EventsSeen):
            del self._events[: entry.events - self._events_dropped]
            self._events_dropped = entry.events
            for peer in self._peers.values():
                peer.seen = max(peer.seen, entry.events)
        elif isinstance(entry, Bound):
            self.address = entry.address
        elif isinstance(entry, Restarted):
            self.generation = entry.generation
            self._forget_connections()
        else:
            self.ended = True
            self._publish(SchedulerStopped())
        if self._vacant:
            self._vacant = False
            self._seat()

    def _apply_probe(self, entry: Probed) -> None:
        server = self._peers[entry.sender]
        assert isinstance(server, ServerPeer)
        if entry.fault is None:
            server.inside = True
            server.waiting[server.join] = "other servers"
            self._form()
            return
        address, what = entry.fault
        text = (
            f"{server} cannot be reached at {address} ({what}): pass --advertise HOST, a name or address of "
            "its machine that the scheduler and all workers can reach"
        )
        self._servers.pop(server.rank, None)
        self.refused.append(("unreachable", text))
        self._reply(server, server.join, ErrorReply("input", text))
        server.rank = -1

    def _forget_connections(self) -> None:
        """Forget the routes of all peers, and probe all servers: for the first time, or whether they are alive."""
        self._by_route.clear()
        self._disconnected.clear()
        for peer in self._peers.values():
            peer.route, peer.last_heard, peer.disconnected_at = b"", self._now, None
            peer.old_routes.clear()
            if isinstance(peer, ServerPeer) and peer.inside:
                peer.disconnected_at = self._running
                peer.probe_at = self._running + _PROBE_AFTER_SECONDS
                self._disconnected[peer.sender] = peer
        self.probes.clear()
        for server in self._servers.values():
            if not server.inside:
                self.probes.append(AddressProbe(server.sender, server.join, server.addresses))

    # --- the state as a record --------------------------------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """Whether no operation is in progress: only then can the state be saved."""
        return self._operation is None and not self._operations

    def save(self) -> MembershipState:
        """Return the whole state."""
        if not self.at_rest:
            raise RuntimeError("an operation is in progress: save the state when there is none")
        return MembershipState(
            settings=self.settings,
            cluster=self.cluster,
            seed=self._seed,
            drawn=self._drawn,
            now=self._now,
            generation=self.generation,
            address=self.address,
            ended=self.ended,
            peers=[peer.save() for peer in self._peers.values()],
            former=list(self._former.items()),
            servers=[server.sender for server in self._servers.values()],
            map=self._map,
            broken=self._broken,
            events=list(self._events),
            events_dropped=self._events_dropped,
            tables=list(self._tables.values()),
            launchers_done=self._launchers_done,
            failed=self._failed,
            status=self._status,
            incarnations=dict(self._incarnations),
            clocks_before=self._clocks_before,
            job=None if self._job is None else self._job.save(),
            forming=list(self._forming.workers),
            queue=list(self._queue),
            silent=self._members_silent,
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
        its = state.settings
        made = cls(
            servers=its.servers,
            workers=its.workers,
            slots=its.slots,
            heartbeat=its.heartbeat,
            grace=its.grace,
            rng=random.Random(0),
            now=state.now,
            counts=counts,
            record=record,
        )
        made.cluster, made._seed, made._drawn = state.cluster, state.seed, state.drawn
        made.generation, made.address, made.ended = state.generation, state.address, state.ended
        made._events, made._events_dropped = list(state.events), state.events_dropped
        made._peers = {peer.sender: restore_peer(peer, state.now, state.events_dropped) for peer in state.peers}
        made._former = OrderedDict(state.former)
        for server in map(made._peers.__getitem__, state.servers):
            assert isinstance(server, ServerPeer)
            made._servers[server.rank] = server
        made._map, made._broken = state.map, state.broken
        made._tables = {table.form.name: table for table in state.tables}
        made._tables_bytes = sum(form_bytes(table.form) for table in state.tables)
        made._launchers_done, made._failed, made._status = state.launchers_done, state.failed, state.status
        made._incarnations, made._clocks_before = dict(state.incarnations), state.clocks_before
        made._members_silent = state.silent
        workers = {sender: peer for sender, peer in made._peers.items() if isinstance(peer, WorkerPeer)}
        made._job = None if state.job is None else restore_job(state.job, workers)
        for sender in state.forming:
            made._forming.add(workers[sender])
        made._queue = {sender: workers[sender] for sender in state.queue}
        return made

    # --- properties -----------------------------------------------------------------------------------------

    @property
    def map(self) -> ClusterMap | None:
        """The map, None before all servers have joined."""
        return self._map

    @property
    def broken(self) -> str:
        """Description of the lost server; empty while none was lost."""
        return self._broken

    @property
    def workers(self) -> dict[int, int]:
        """The incarnations of the job's workers, by rank."""
        return {rank: worker.incarnation for rank, worker in self._job.members.items()} if self._job else {}

    @property
    def launchers_done(self) -> int:
        """Number of launchers whose program ended with status 0."""
        return self._launchers_done

    @property
    def failed(self) -> str:
        """Description of the launcher whose program failed first, or that was lost; empty while there is none."""
        return self._failed

    @property
    def status(self) -> int:
        """Exit status of that program; 1 for one that was lost."""
        return self._status

    @property
    def now(self) -> float:
        """The time of the last call; of the last input after :meth:`replay`."""
        return self._now

    @property
    def has_disconnected(self) -> bool:
        """Whether a peer is disconnected."""
        return bool(self._disconnected)

    @property
    def next_time(self) -> float:
        """When to call :meth:`on_time`, which may also be called earlier."""
        if self._disconnected:
            return self._now + _DISCONNECTED_CHECK_SECONDS
        resends = (server.resend_at for server in self._servers.values() if server.order is not None)
        return min([self._now + min(_CHECK_SECONDS, self._heartbeat / 4), *resends])

    @property
    def heartbeat(self) -> float:
        """Seconds between heartbeats."""
        return self._heartbeat

    # --- time -------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        # More than a heartbeat since the last call is not silence of the peers: this process was stopped, and their
        # messages are still in its sockets.
        missed = now - self._now - self._heartbeat
        if missed > 0:
            for peer in self._peers.values():
                peer.last_heard += missed
        self._running += min(max(0.0, now - self._now), _MAX_STEP_SECONDS)
        self._now = max(now, self._now)

    # --- requests ---------------------------------------------------------------------------------------------

    def _known(self, sender: bytes, route: bytes) -> Peer | None:
        peer = self._peers.get(sender)
        if peer is not None:
            reconnected = route != peer.route and route not in peer.old_routes
            if reconnected:  # messages of an earlier connection may be received after those of the present one
                if peer.route:
                    peer.old_routes.append(peer.route)
                self._by_route.pop(peer.route, None)
                self._by_route[route] = peer
                peer.route = route
                self._mark_connected(peer)
            peer.last_heard = self._now
            if reconnected and isinstance(peer, ServerPeer) and peer.order is not None:
                self._send_order(peer)
        return peer

    def _mark_connected(self, peer: Peer) -> None:
        peer.disconnected_at = None
        self._disconnected.pop(peer.sender, None)

    def _check_disconnected(self, peer: Peer) -> None:
        assert peer.disconnected_at is not None
        seconds = self._running - peer.disconnected_at
        if isinstance(peer, ServerPeer) and peer.addresses:
            if peer.probe_at is not None and peer.probe_at <= self._running:
                peer.probe += 1
                peer.probe_at = None
                self.probes.append(LivenessProbe(peer.sender, peer.probe, peer.addresses))
        elif seconds > self._reconnect_seconds and not peer.was_silent:
            why = f"its connection closed, and it has not connected again for {seconds:.1f} s: its process has ended"
            self._accept(Died(self._now, peer.sender, f"{why}, or the network has failed"))

    def _unknown_sender(self, sender: bytes, host: str) -> ReplyBody:
        known = self._former.get(sender)
        if known is not None:
            return known
        self.refused.append(
            (
                "unknown",
                f"{host}: a request from a process that this scheduler does not know. Unless it belongs to another "
                "cluster, the scheduler was restarted while servers and workers kept running: they serve each other, "
                "but no new process. End them, and start the whole cluster again",
            )
        )
        text = "the scheduler does not know this process: it was restarted since. Start the whole cluster again"
        return ErrorReply("not-connected", text)

    def _ask(self, route: bytes, host: str, ask: Request) -> None:
        peer = self._known(ask.sender, route)
        if isinstance(ask.body, GetStatus):  # it changes nothing, so it is no input
            self._out.append((route, Reply(ask.number, self._cluster_status())))
        elif peer is None:
            is_hello = isinstance(ask.body, Hello) and ask.sender not in self._former
            if is_hello and isinstance(ask.body, Hello) and ask.body.role in _KINDS:
                if len(self._peers) >= _MAX_PEERS:
                    full = PendingReply(f"{len(self._peers)} processes are connected, the maximum")
                    self._out.append((route, Reply(ask.number, full)))
                else:
                    self._accept(Asked(self._now, host, ask), route)
                return
            wrong = ErrorReply(
                "protocol", f"a peer that is not a server, worker or launcher sent {type(ask.body).__name__}"
            )
            answer = wrong if isinstance(ask.body, Hello) else self._unknown_sender(ask.sender, host)
            self._out.append((route, Reply(ask.number, answer)))
        elif self._settles(peer, ask) or self._is_new(peer, ask):
            self._accept(Asked(self._now, "", ask), route)
        else:
            self._repeat(peer, ask.number)

    def _cluster_status(self) -> StatusReply:
        return status_of(
            self._peers.values(),
            self._job,
            self._map,
            now=self._now,
            cluster=self.cluster,
            generation=self.generation,
            uptime=self._now - self._started_at,
            settings=self.settings,
            dead_after=self._dead_after,
            lost=self._broken,
            tables=self._tables,
        )

    def _apply_request(self, entry: Asked, route: bytes) -> None:
        ask = entry.request
        peer = self._peers.get(ask.sender)
        if peer is None:
            assert isinstance(ask.body, Hello)
            peer = self._welcome(route, entry.host, ask.sender, ask.body)
        is_new = self._is_new(peer, ask)
        if self._settles(peer, ask):
            self._settle(peer, ask)
        if not is_new:
            self._repeat(peer, ask.number)
        elif len(peer.replies) >= MAX_OPEN_REQUESTS:  # no process of shoal does this
            self._out.append((peer.route, Reply(ask.number, ErrorReply("protocol", _TOO_MANY))))
        else:
            self._execute(peer, ask.number, ask.body)

    def _repeat(self, peer: Peer, number: int) -> None:
        """Repeat the reply to a request; one that is no longer waited for has none."""
        if number in peer.replies:
            self._out.append((peer.route, Reply(number, peer.replies[number])))
        elif number in peer.waiting:
            self._out.append((peer.route, Reply(number, PendingReply(self._why(peer, number)))))

    @staticmethod
    def _is_new(peer: Peer, ask: Request) -> bool:
        """Whether a request is to be executed."""
        settled = (ask.latest, frozenset(ask.open)) if Membership._settles(peer, ask) else (peer.latest, peer.open)
        answered = ask.number in peer.replies or ask.number in peer.waiting
        return not answered and (ask.number > settled[0] or ask.number in settled[1])

    @staticmethod
    def _settles(peer: Peer, ask: Request) -> bool:
        """Whether a request confirms replies that no earlier one confirmed. Messages may arrive out of order."""
        return (ask.latest, -len(ask.open)) > (peer.latest, -len(peer.open))

    @staticmethod
    def _settle(peer: Peer, ask: Request) -> None:
        """Remove the replies that a peer has received or no longer waits for."""
        peer.latest, peer.open = ask.latest, frozenset(ask.open)
        for number in [number for number in peer.replies if number <= peer.latest and number not in peer.open]:
            del peer.replies[number]

    def _welcome(self, route: bytes, host: str, sender: bytes, hello: Hello) -> Peer:
        # It is printed in logs and on terminals.
        about = "".join(letter if letter.isprintable() else "?" for letter in hello.about)
        seen = self._events_dropped + len(self._events)
        peer = _KINDS[hello.role](sender, hello.role, about, host, route, self._now, seen)
        self._peers[sender] = peer
        if route:
            self._by_route[route] = peer
        return peer

    def _execute(self, peer: Peer, number: int, body: RequestBody) -> None:
        if isinstance(body, Hello):
            seen = self._events_dropped + len(self._events)
            welcome = HelloReply(
                self.cluster, peer.host, self._slots, self._heartbeat, self._dead_after, seen, self._grace
            )
            self._reply(peer, number, welcome)
        elif isinstance(body, Leave):
            self._leave(peer, number, body.status)
        elif self._broken:
            self._reply(peer, number, ErrorReply("server-lost", self._broken))
        elif len(peer.waiting) >= _MAX_WAITING:
            self._reply(
                peer, number, ErrorReply("input", f"{peer} has {len(peer.waiting)} waiting requests, the maximum")
            )
        elif isinstance(body, Join):
            if isinstance(peer, ServerPeer):
                self._join_server(peer, number, body)
            elif isinstance(peer, WorkerPeer):
                self._join_worker(peer, number, body)
        elif isinstance(body, GetMap) and self._map is not None:
            self._reply(peer, number, GetMapReply(self._map))
        elif isinstance(body, ListTables):
            self._reply(peer, number, ListTablesReply(tuple(self._tables.values())))
        elif not isinstance(peer, WorkerPeer) or not peer.inside:
            self._reply(
                peer, number, ErrorReply("protocol", f"{peer} is not part of a job and sent {type(body).__name__}")
            )
        elif isinstance(body, CreateTable):
            self._ask_table(peer, number, body)
        elif isinstance(body, Barrier):
            self._barrier(peer, number, body.name)
        elif isinstance(body, GetMetrics):
            self._wait(peer, number, "the servers to report their metrics")
            self._begin(self._gather_figures(peer, number))
        elif isinstance(body, TakeSplit):
            self._reply(peer, number, self._take_split(peer, body))

    def _reply(self, peer: Peer, number: int, body: ReplyBody) -> None:
        peer.waiting.pop(number, None)
        peer.replies[number] = body
        self._out.append((peer.route, Reply(number, body)))

    def _wait(self, peer: Peer, number: int, what: str) -> None:
        peer.waiting[number] = what
        self._out.append((peer.route, Reply(number, PendingReply(self._why(peer, number)))))

    def _why(self, peer: Peer, number: int) -> str:
        inside = sum(server.inside for server in self._servers.values())
        if self._map is None:
            return f"{inside} of {self._num_servers} servers have joined"
        if isinstance(peer, WorkerPeer) and number == peer.join and not peer.inside:
            if peer.sender in self._queue:
                return self._why_queue(peer)
            return f"{len(self._forming)} of {peer.wants.workers} workers have joined"
        return f"waiting for {peer.waiting[number]}"

    # --- servers ----------------------------------------------------------------------------------------------

    def _join_server(self, server: ServerPeer, number: int, join: Join) -> None:
        fault = self._server_error(server, join)
        if fault:
            self._reply(server, number, ErrorReply("input", fault))
            return
        free = (rank for rank in range(self._num_servers) if rank not in self._servers)
        server.rank = next(free) if join.rank is None else join.rank
        server.addresses = tuple(complete(address, server.host) for address in join.addresses)
        server.join = number
        self._servers[server.rank] = server
        self._wait(server, number, "its addresses to be probed")
        self.probes.append(AddressProbe(server.sender, number, server.addresses))

    def _server_error(self, server: ServerPeer, join: Join) -> str:
        if server.rank >= 0:
            return f"{server} has joined already"
        if len(self._servers) == self._num_servers:
            return f"the cluster has all of its {self._num_servers} servers: pass a larger --servers to the scheduler"
        if join.rank is not None and not 0 <= join.rank < self._num_servers:
            return f"rank {join.rank} is out of range for {self._num_servers} servers: ranks start at 0"
        if join.rank is not None and join.rank in self._servers:
            return f"{self._servers[join.rank]} has that rank: give every server its own rank, or none"
        if not join.addresses:
            return "a server needs at least one address"
        try:
            addresses = [complete(address, server.host) for address in join.addresses]
            for address in addresses:
                split(address)
        except ValueError as error:
            return str(error)
        taken = {address for other in self._servers.values() for address in other.addresses}
        if len(set(addresses)) < len(addresses) or taken & set(addresses):
            return f"two endpoints have the same address among {', '.join(addresses)}: give each server its own --bind"
        if len(taken) + len(addresses) > self._slots:
            return f"{self._slots} slots are too few for more than {len(taken)} endpoints: use fewer --threads"
        return ""

    def _form(self) -> None:
        ready = [self._servers[rank] for rank in sorted(self._servers)]
        if len(ready) < self._num_servers or not all(server.inside for server in ready):
            return
        loops = [(address, server.rank) for server in ready for address in server.addresses]
        self._map = cut_evenly(1, self._slots, loops)
        self.notes.append(f"all servers have joined: {', '.join(address for address, _ in loops)}")
        for server in ready:
            self._reply(server, server.join, JoinReply(server.rank, self._map, ()))
        self._start_if_complete()

    def _lose_server(self, server: ServerPeer, why: str) -> None:
        del self._servers[server.rank]
        if self._map is None:
            return  # it had no rows: another may replace it
        where = ", ".join(server.addresses)
        text = (
            f"server {server.rank} at {where} ({server.about}) is lost with its rows, {why}: "
            "start the cluster again and load a checkpoint"
        )
        self._broken = self._broken or text
        self.notes.append(text)
        self._publish(ServerGone(server.rank, text, why))
        operations, self._operations = self._operations, deque()
        if self._operation is not None:
            operations.appendleft(self._operation)
            self._operation = None
        for operation in operations:
            operation.close()
        for peer in list(self._peers.values()):
            for number in list(peer.waiting):
                self._reply(peer, number, ErrorReply("server-lost", self._broken))
        self._forming.clear()
        self._queue.clear()
        self._admitting = None

    # --- orders and operations --------------------------------------------------------------------------------

    def _begin(self, operation: Operation) -> None:
        self._operations.append(operation)
        if self._operation is None:
            self._next_operation()

    def _next_operation(self) -> None:
        while self._operation is None and self._operations:
            self._operation = self._operations.popleft()
            self._step(lambda operation: next(operation))

    def _step(self, go: Callable[[Operation], OrderBody]) -> None:
        assert self._operation is not None
        try:
            body = go(self._operation)
        except StopIteration:
            self._operation = None
            return
        self._results = {}
        for server in self._servers.values():
            server.orders += 1
            server.order = Order(server.orders, body)
            self._send_order(server)

    def _send_order(self, server: ServerPeer, *, again: bool = False) -> None:
        assert server.order is not None
        longer = min(2 * server.resend_seconds, _MAX_RESEND_SECONDS)
        server.resend_seconds = longer if again else _RESEND_SECONDS
        server.resend_at = self._now + server.resend_seconds
        self._out.append((server.route, server.order))

    def _done(self, server: ServerPeer, done: OrderReply) -> None:
        order = server.order
        assert order is not None
        server.order = None
        fault = done.fault
        if done.refused is not None and not isinstance(order.body, AddTable | StartJob):
            fault = fault or f"it refused {type(order.body).__name__}: {done.refused.text}"
        if fault:
            self._remove(server, f"it failed to execute an order: {fault}")
            return
        self._results[server.rank] = done
        if len(self._results) == len(self._servers) and self._operation is not None:
            results = [self._results[rank] for rank in sorted(self._results)]
            self._step(lambda operation: operation.send(results))
            self._next_operation()

    # --- workers and jobs -------------------------------------------------------------------------------------

    def _join_worker(self, worker: WorkerPeer, number: int, join: Join) -> None:
        size = join.workers if join.workers is not None else self._num_workers
        fault = ""
        if worker.join:
            fault = f"{worker} has joined already"
        elif not 1 <= size <= MAX_WORKERS:
            fault = f"a job has from 1 to {MAX_WORKERS} workers, got workers={size}"
        elif join.rank is not None and not 0 <= join.rank < size:
            fault = f"rank {join.rank} is out of range for {counted(size, 'worker')}: ranks start at 0"
        elif join.rules is None:
            fault = "a worker that joins has to pass its consistency"
        if fault:
            self._reply(worker, number, ErrorReply("input", fault))
            return
        worker.join = number
        worker.wants = Join(join.rank, (), size, join.rules)
        worker.waiting[number] = "the other workers"
        self._queue[worker.sender] = worker
        self._seat()
        if number in worker.waiting:
            self._out.append((worker.route, Reply(number, PendingReply(self._why(worker, number)))))

    def _seat(self) -> None:
        """Assign places to waiting workers, in the order of their arrival."""
        line, self._queue = self._queue, {}
        for worker in line.values():
            fault = self._place_in_job(worker) if self._job is not None else self._place_in_forming(worker)
            if fault:
                self._reply(worker, worker.join, ErrorReply("input", fault))
                worker.join = 0
            elif fault is None:
                self._queue[worker.sender] = worker
        self._start_if_complete()

    def _place_in_job(self, worker: WorkerPeer) -> str | None:
        """Admit a worker: returns an empty string, the reason for a refusal, or None if it has to wait."""
        job = self._job
        assert job is not None
        # If members are silent, perhaps all have died, and the waiting workers begin a new job.
        if self._admitting is not None or not job.dead or not job.members or self._members_silent:
            return None
        rank = min(job.dead) if worker.wants.rank is None else worker.wants.rank
        if rank not in job.dead:
            return None
        fault = self._disagrees(worker, job.size, job.consistency)
        if not fault:
            self._admitting = worker
            job.dead.discard(rank)
            self._begin(self._admit(job, rank, worker))
        return fault

    def _place_in_forming(self, worker: WorkerPeer) -> str | None:
        """As `_place_in_job`."""
        first = self._forming.first
        if first is not None:
            assert first.wants.workers is not None
            assert first.wants.rules is not None
            fault = self._disagrees(worker, first.wants.workers, first.wants.rules)
            if fault:
                return fault
        if not self._forming.takes(worker):
            return None
        self._forming.add(worker)
        return ""

    @staticmethod
    def _disagrees(worker: WorkerPeer, size: int, rules: JobConsistency) -> str:
        if worker.wants.workers != size:
            has = counted(size, "worker")
            return f"the job has {has}, and {worker.about} asks for {worker.wants.workers}: pass the same everywhere"
        if worker.wants.rules != rules:
            return f"the job has {rules}, and {worker.about} asks for {worker.wants.rules}: pass the same everywhere"
        return ""

    def _why_queue(self, worker: WorkerPeer) -> str:
        rank = worker.wants.rank
        holders = self._job.members if self._job is not None else self._forming.ranked
        if rank is not None and rank in holders:
            holder = holders[rank]
            return f"rank {rank} belongs to {holder.about}, last heartbeat {self._now - holder.last_heard:.1f} s ago"
        if self._job is not None:
            size, left = counted(self._job.size, "worker"), len(self._job.members)
            return f"the job of {size} continues with {left}; the next one begins after it"
        return f"the next job has all of its {counted(len(self._forming), 'worker')}"

    def _start_if_complete(self) -> None:
        first = self._forming.first
        if self._map is None or self._job is not None or self._broken or first is None:
            return
        assert first.wants.rules is not None
        if len(self._forming) < self._forming.size:
            return
        members = self._forming.assign_ranks()
        self._forming.clear()
        for rank, worker in members.items():
            worker.rank = rank
            worker.incarnation = self._raise_incarnation(rank)
            worker.waiting[worker.join] = "the servers to start the job"
        number = self._draw(32) or 1
        self._job = Job(number, first.wants.rules, len(members), members)
        self.notes.append(f"a job of {counted(len(members), 'worker')} begins, under {first.wants.rules}")
        self._begin(self._start(self._job, list(members.values())))

    def _draw(self, bits: int) -> int:
        """Draw a number that depends on the seed and on how many were drawn before."""
        self._drawn += 1
        return random.Random(self._seed + self._drawn.to_bytes(8, "little")).getrandbits(bits)

    def _raise_incarnation(self, rank: int) -> int:
        self._incarnations[rank] = self._incarnations.get(rank, 0) + 1
        return self._incarnations[rank]

    def _start(self, job: Job, workers: list[WorkerPeer]) -> Operation:
        incarnations = tuple(worker.incarnation for worker in workers)
        results = yield StartJob(job.number, job.consistency, incarnations, self._clocks_before)
        refused = self._refusal(results, f"cannot begin a job of {counted(job.size, 'worker')}")
        if refused is not None:
            self._job = None
            for worker in workers:
                if worker.sender in self._peers and worker.join in worker.waiting:
                    self._reply(worker, worker.join, refused)
                    worker.join, worker.rank = 0, -1
            self._seat()
            return
        for worker in workers:
            self._reply_joined(job, worker, 0)

    def _admit(self, job: Job, rank: int, worker: WorkerPeer) -> Operation:
        clock = max(done.result for done in (yield Hold()))
        worker.incarnation = self._raise_incarnation(rank)
        yield Admit(rank, worker.incarnation, clock)
        self._admitting = None
        if worker.sender in self._peers:
            worker.rank = rank
            job.members[rank] = worker
            self.notes.append(f"{worker} replaces a dead worker, at clock {clock}")
            self._reply_joined(job, worker, clock)
        else:  # it has died meanwhile
            job.dead.add(rank)
            yield from self._dismiss(worker, rank)
        self._seat()

    def _reply_joined(self, job: Job, worker: WorkerPeer, clock: int) -> None:
        if worker.sender not in self._peers or worker.join not in worker.waiting:
            return
        assert self._map is not None
        worker.inside = True
        tables = tuple(self._tables.values())
        joined = JoinReply(worker.rank, self._map, tables, worker.incarnation, job.number, clock, job.size)
        self._reply(worker, worker.join, joined)

    def _end_job_if_over(self) -> None:
        if self._job is not None and not self._job.members and self._admitting is None:
            self.notes.append("the job has ended")
            self._clocks_before = self._job.clock
            self._job = None
            self._seat()

    def _leave(self, peer: Peer, number: int, status: int) -> None:
        if isinstance(peer, ServerPeer):
            self._reply(peer, number, LeaveReply())
            self._remove(peer, "it was terminated", LeaveReply())
        elif isinstance(peer, LauncherPeer):
            self._reply(peer, number, LeaveReply())
            self._forget(peer, LeaveReply())
            self._launchers_done += status == 0
            if status:
                self._fail(f"{peer.about} ended with status {status}", status)
        elif isinstance(peer, WorkerPeer) and not self._broken and self._is_member(peer):
            peer.waiting = {number: "the servers to dismiss it"}
            self._take_out(peer)
            self._begin(self._dismiss_leaving(peer, number))
        else:
            self._reply(peer, number, LeaveReply())
            self._remove(peer, "it left", LeaveReply())

    def _fail(self, text: str, status: int) -> None:
        if not self._failed:
            self._failed, self._status = text, status

    def _is_member(self, worker: WorkerPeer) -> bool:
        return self._job is not None and self._job.members.get(worker.rank) is worker

    def _take_out(self, worker: WorkerPeer) -> None:
        assert self._job is not None
        del self._job.members[worker.rank]
        for came in self._job.barriers.values():
            came.pop(worker.rank, None)
        for one in self._job.passes.values():
            one.splits.release(worker.sender)
            one.clocks.pop(worker.rank, None)
        self._job.reached.pop(worker.rank, None)
        self._check_barriers()

    def _dismiss_leaving(self, worker: WorkerPeer, number: int) -> Operation:
        yield from self._dismiss(worker, worker.rank)
        if worker.sender in self._peers:
            self._reply(worker, number, LeaveReply())
            self._forget(worker, LeaveReply())

    def _dismiss(self, worker: WorkerPeer, rank: int) -> Operation:
        # Its last tick may have reached some endpoints and not others: all end its clocks up to the greatest.
        results = yield Fence(rank, worker.incarnation)
        last = max(results, key=lambda done: done.result)
        reached = [done.result for done in (yield Dismiss(rank, worker.incarnation, last.result, last.tables))]
        if self._job is not None:
            self._job.clock = max(self._job.clock, *reached)
        self._end_job_if_over()

    # --- the end of a peer ------------------------------------------------------------------------------------

    def _remove(self, peer: Peer, why: str, last: ReplyBody | None = None) -> None:
        """Remove a peer that died, left before it had joined, or failed."""
        text = f"{peer} was declared dead, {why}: its requests are refused from now on. Start it again"
        self._forget(peer, last or ErrorReply("fenced", text))
        if isinstance(peer, ServerPeer):
            if self._servers.get(peer.rank) is peer:
                self._lose_server(peer, why)
        elif isinstance(peer, LauncherPeer):
            self._fail(f"{peer.about} is lost, {why}", 1)
        elif isinstance(peer, WorkerPeer):
            self._queue.pop(peer.sender, None)
            if self._forming.remove(peer):
                self._vacant = True
            elif self._is_member(peer):
                assert self._job is not None
                self.notes.append(f"{peer} is dead, {why}")
                self._publish(WorkerGone(peer.rank, peer.incarnation, self.notes[-1]))
                self._job.dead.add(peer.rank)
                self._take_out(peer)
                if not self._broken:
                    self._begin(self._dismiss(peer, peer.rank))
                self._vacant = True

    def _forget(self, peer: Peer, last: ReplyBody) -> None:
        del self._peers[peer.sender]
        self._by_route.pop(peer.route, None)
        self._disconnected.pop(peer.sender, None)
        self._former[peer.sender] = last
        while len(self._former) > _MAX_FORMER:
            self._former.popitem(last=False)

    # --- tables and barriers ----------------------------------------------------------------------------------

    def _ask_table(self, worker: WorkerPeer, number: int, ask: CreateTable) -> None:
        name = ask.form.name
        if name in self._tables:
            self._reply(worker, number, self._tables[name])
            return
        fault = self._table_error(ask.form)
        if fault:
            self._reply(worker, number, ErrorReply("input", fault))
            return
        self._wait(worker, number, f"the servers to create table {name!r}")
        waiting = self._wanted_tables.setdefault(name, [])
        waiting.append((worker, number))
        if len(waiting) == 1:
            self._begin(self._make_table(ask))

    def _table_error(self, form: TableRecord) -> str:
        try:
            again = TableRecord.of(form.spec())
        except (ValueError, TypeError, OverflowError) as error:
            return str(error)
        # Servers do not check fields that have no effect on their table.
        for name in form.differing(again):
            wrong, right = getattr(form, name), getattr(again, name)
            return f"table {form.name[:80]!r} is described with {name} = {wrong!r:.80} instead of {right!r:.80}"
        if len(form.name) > _MAX_NAME_LENGTH:
            return f"a table's name has {_MAX_NAME_LENGTH} characters at most, got {len(form.name)}"
        if self._tables_bytes + form_bytes(form) > _MAX_TABLES_BYTES:
            return f"the descriptions of {len(self._tables)} tables take {self._tables_bytes} bytes, the maximum"
        return ""

    def _refusal(self, results: list[OrderReply], what: str) -> ErrorReply | None:
        """Return the refusal of the first server that refused an order, with its name."""
        for server, done in zip((self._servers[rank] for rank in sorted(self._servers)), results, strict=True):
            if done.refused is not None:
                where = f"server {server.rank} at {', '.join(server.addresses)} ({server.about})"
                text = f"{where} {what}: {done.refused.text}"
                self.notes.append(text)
                return ErrorReply(done.refused.kind, text)
        return None

    def _make_table(self, ask: CreateTable) -> Operation:
        table = TableReply(len(self._tables), ask.form)
        results = yield AddTable(table.id, table.form)
        refused = self._refusal(results, f"cannot create table {ask.form.name!r}")
        answer: ReplyBody = table if refused is None else refused
        if refused is not None:
            yield DropTable(table.id)
        else:
            self._tables[ask.form.name] = table
            self._tables_bytes += form_bytes(ask.form)
        for worker, number in self._wanted_tables.pop(ask.form.name):
            if worker.sender in self._peers:
                self._reply(worker, number, answer)

    def _barrier(self, worker: WorkerPeer, number: int, name: str) -> None:
        if self._job is None or not self._is_member(worker):
            self._reply(worker, number, ErrorReply("protocol", f"{worker} has left the job and sent a barrier"))
            return
        self._wait(worker, number, f"the others at barrier {name!r}")
        came = self._job.barriers.setdefault(name, {})
        before = came.get(worker.rank)
        if before is not None:
            worker.waiting.pop(before, None)  # its wait timed out, and it came again
        came[worker.rank] = number
        self._check_barriers()

    def _check_barriers(self) -> None:
        assert self._job is not None
        for name, came in list(self._job.barriers.items()):
            if self._job.members.keys() <= came.keys():
                del self._job.barriers[name]
                for rank, number in came.items():
                    worker = self._job.members.get(rank)
                    if worker is not None and number in worker.waiting:
                        self._reply(worker, number, BarrierReply())

    def _gather_figures(self, worker: WorkerPeer, number: int) -> Operation:
        results = yield ReportMetrics()
        assert self._map is not None
        if worker.sender in self._peers:
            figures = (one for done in results for one in done.figures)
            pairs = zip(self._map.endpoints, figures, strict=False)
            endpoints = tuple(EndpointMetrics(where.server, where.address, one) for where, one in pairs)
            self._reply(worker, number, MetricsReply(endpoints, self._reported_counts))

    # --- splits of the data -----------------------------------------------------------------------------------

    def _take_split(self, worker: WorkerPeer, take: TakeSplit) -> ReplyBody:
        job = self._job
        if job is None or not self._is_member(worker):
            return ErrorReply("protocol", f"{worker} has left the job and requested data")
        if take.pass_number < job.first_pass:
            return SplitReply(None, take.clock if job.consistency.mode == "asp" else job.passes_end)
        if take.pass_number not in job.passes:
            if not 0 <= take.count < _MAX_SPLITS:
                return ErrorReply("input", f"a pass of {take.count} splits: cut the data into larger ones")
            if len(job.passes) >= _MAX_PASSES:
                return ErrorReply(
                    "input", f"{len(job.passes)} passes over the data are unfinished: finish one of them first"
                )
            job.passes[take.pass_number] = DataPass(SplitTracker(take.count), take.digest)
        one = job.passes[take.pass_number]
        if (take.count, take.digest) != (one.splits.count, one.digest):
            text = (
                f"{worker} cuts the data of pass {take.pass_number} into other splits than the worker that began it: "
                "let all workers read the same files, of the same sizes, with the same split_bytes"
            )
            return ErrorReply("input", text)
        job.reached[worker.rank] = max(job.reached[worker.rank], take.pass_number)
        job.forget_passes()
        if take.finished >= 0:
            one.splits.finish(worker.sender, take.finished, self._now)
        for other in job.passes.values():  # a worker has one split at a time: an unfinished one is free again
            other.splits.release(worker.sender)
        if not one.splits.over:
            return SplitReply(one.splits.take(worker.sender, self._now, reissue=take.reissue), None)
        one.clocks[worker.rank] = take.clock
        if one.end is None and all(rank in one.clocks or job.reached[rank] > take.pass_number for rank in job.members):
            # A worker has ticked once at most since it reported its clock.
            one.end = max(one.clocks.values()) + (len(job.members) > 1)
        return SplitReply(None, take.clock if job.consistency.mode == "asp" else one.end)

    # --- output -----------------------------------------------------------------------------------------------

    def _publish(self, event: Event) -> None:
        first = self._events_dropped + len(self._events)
        self._events.append(event)
        self._out += [(peer.route, Events(first, (event,))) for peer in self._peers.values()]

    def _flush(self) -> Outgoing:
        out, self._out = self._out, []
        return [(route, self._stamp(message)) for route, message in out if route]

    def _stamp(self, message: Message) -> Message:
        if self.generation and isinstance(message, Reply | Order | Events):
            return structs.replace(message, generation=self.generation)
        return message
