"""The state of the scheduler: the objects that :class:`.Membership` changes are those that its journal stores.

It changes by the inputs of inputs.py alone: two memberships in the same state that receive the same inputs are in the
same state afterwards, and have sent the same messages (state machine replication). Each object is in it once; others
name a peer by its sender.

What a process knows for the moment is no part of it: a peer's `Link` (its route, its last heartbeat), and the operation
in progress (orders.py). The state is stored when there is none.

Threads: one.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import msgspec

from shoal.base.sizes import memory_bytes
from shoal.cluster.protocol.messages import (
    GRACE_SECONDS,
    AnyEvent,
    AnyReply,
    Heartbeat,
    JobConsistency,
    Join,
    Order,
    Request,
    TableReply,
)
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.protocol.status import Outcome
from shoal.cluster.scheduler.splits import SplitTracker
from shoal.config import ClusterConfig, check_cluster

COPY_RATE = 1 << 25  # bytes per second: a tenth of a core, at 2.4 ns per byte of rows of dim 1
DEAD_AFTER = 5  # heartbeats missed
JOURNAL_GRACE_SECONDS = 600.0  # long enough to start the scheduler again by hand
_MAX_OLD_ROUTES = 8
_RESEND_SECONDS = 0.1
_MAX_RESEND_SECONDS = 1.0


class _State(msgspec.Struct, forbid_unknown_fields=True):
    pass


# --- peers ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Resend:
    """When a message is sent again that is not acknowledged: each time after twice as long as before."""

    at: float = 0.0
    seconds: float = _RESEND_SECONDS

    def sent(self, now: float, *, again: bool) -> None:
        """Note that the message is sent now, for the first time or ``again``."""
        self.seconds = min(2 * self.seconds, _MAX_RESEND_SECONDS) if again else _RESEND_SECONDS
        self.at = now + self.seconds


@dataclass(slots=True)
class Link:
    """What this process of the scheduler knows of a peer; it is not stored."""

    route: bytes = b""
    old_routes: deque[bytes] = field(default_factory=lambda: deque(maxlen=_MAX_OLD_ROUTES))
    last_heard: float = 0.0
    seen: int = 0  # events
    heartbeat: Heartbeat | None = None  # the last one, and when it came
    beat_at: float = 0.0
    disconnected_at: float | None = None  # counted as `Peers.running`; None: it is connected
    was_silent: bool = False  # before its connection ended, which then does not show that its process has
    # Of a server:
    order: Resend = field(default_factory=Resend)
    assignment: Resend = field(default_factory=Resend)
    offered_at: float = 0.0  # since when it has an assignment that it has not confirmed; counted as `Peers.running`
    probe: int = 0  # number of the last LivenessProbe
    probe_at: float | None = None  # when to probe next; None: a probe is under way
    waited_for_at: float = -math.inf  # when it was last noted that it is silent and has the last copy of slots


class Peer(_State, dict=True, tag_field="role"):
    """A process that has sent Hello."""

    sender: bytes
    about: str
    host: str
    rank: int = -1
    inside: bool = False
    join: int = 0  # number of its request to join
    replies: dict[int, AnyReply] = {}  # that it may not have received
    latest: int = 0  # the greatest number of its requests
    open: frozenset[int] = frozenset()  # numbers up to that whose replies it waits for
    waiting: dict[int, str] = {}  # requests without a reply, and what they wait for

    @cached_property
    def link(self) -> Link:
        """What is known of it for the moment; not stored."""
        return Link()

    @property
    def role(self) -> str:
        """Its role in messages."""
        return str(self.__struct_config__.tag)

    def __str__(self) -> str:
        return f"{self.role} {self.rank} ({self.about})" if self.rank >= 0 else f"a {self.role} ({self.about})"

    def is_new(self, ask: Request) -> bool:
        """Whether a request is to be executed."""
        latest, open = (ask.latest, ask.open) if self.settles(ask) else (self.latest, self.open)
        is_answered = ask.number in self.replies or ask.number in self.waiting
        return not is_answered and (ask.number > latest or ask.number in open)

    def settles(self, ask: Request) -> bool:
        """Whether a request confirms replies that no earlier one confirmed. Messages may arrive out of order."""
        return (ask.latest, -len(ask.open)) > (self.latest, -len(self.open))

    def settle(self, ask: Request) -> None:
        """Remove the replies that the process has received or no longer waits for."""
        self.latest, self.open = ask.latest, frozenset(ask.open)
        for number in [number for number in self.replies if number <= self.latest and number not in self.open]:
            del self.replies[number]


class ServerPeer(Peer, tag="server"):
    """A server."""

    addresses: tuple[str, ...] = ()
    node: str = ""  # the machine that it runs on
    spare: bool = False  # no slots move to it because it joins
    member: bool = False  # of the formed cluster: it executes orders
    orders: int = 0  # sent so far
    order: Order | None = None  # not acknowledged
    confirmed_epoch: int = 0  # of the last assignment that it has confirmed
    offered_epoch: int = 0  # of the last one that it was sent
    serves: set[int] = set()  # arcs, as far as it has confirmed
    may_serve: set[int] = set()  # arcs that it has or may have
    pending: Order | None = None  # what it has to execute on the copies that become primary


class WorkerPeer(Peer, tag="worker"):
    """A worker."""

    incarnation: int = 0
    wants: Join = Join()

    @property
    def job(self) -> str:
        """Name of its job; empty: the default job."""
        return self.wants.job

    def __str__(self) -> str:
        job = f" of job {self.job!r}" if self.job else ""
        return f"worker {self.rank}{job} ({self.about})" if self.rank >= 0 else f"a worker{job} ({self.about})"


class LauncherPeer(Peer, tag="launcher"):
    """The launcher of a worker's program."""


class ReaderPeer(Peer, tag="reader"):
    """A process that reads tables and is part of no job."""


AnyPeer: TypeAlias = ServerPeer | WorkerPeer | LauncherPeer | ReaderPeer
ROLES: dict[str, type[AnyPeer]] = {
    "server": ServerPeer,
    "worker": WorkerPeer,
    "reader": ReaderPeer,
    "launcher": LauncherPeer,
}


# --- jobs -------------------------------------------------------------------------------------------------------------


class DataPass(_State):
    """A pass over the data."""

    splits: SplitTracker
    digest: str
    clocks: dict[int, int] = {}  # of the workers that have reached its end, by rank
    end: int | None = None


class Vacancy(_State):
    """The place of a dead worker that another one may take, while the others wait ``until`` a time.

    ``clock`` is the greatest that it reached at any endpoint, -1 until all servers have fenced it; ``least`` is the
    least one, ``tables`` are those of its last tick.
    """

    incarnation: int
    about: str
    until: float
    clock: int = -1
    least: int = 0
    tables: tuple[int, ...] = ()


class Continuation(_State):
    """A job that has ended for another number of workers, and the next one continues it.

    ``job`` is its number (0: nothing had begun). The next one has ``expected`` workers, or those that have come
    ``until`` a time.
    """

    job: int
    expected: int
    until: float


class Job(_State):
    """The workers of a job, and what they have agreed on."""

    number: int
    name: str  # empty: the default job
    consistency: JobConsistency
    size: int
    members: dict[int, bytes]  # senders, by rank
    dead: set[int] = set()  # ranks that another worker may take
    early: set[int] = set()  # ranks of workers that have ended their work early
    gone: list[int] = []  # ranks of all that were announced as lost, in that order
    vacant: dict[int, Vacancy] = {}  # by rank
    barriers: dict[str, dict[int, int]] = {}  # by name: rank -> number of its request
    passed: dict[str, int] = {}  # barriers that all have passed, by name
    passes: dict[int, DataPass] = {}
    first_pass: int = 0  # earlier ones are over for all workers, and removed
    passes_end: int = 0  # the greatest clock at which one of them ended
    reached: dict[int, int] = {}  # the latest pass of each rank
    clock: int = 0  # the greatest that servers reported
    # Where the number of workers may change:
    least: int = 0  # workers that it may have; 0: their number does not change
    most: int = 0
    continues: int = 0  # the number of the job that it continues
    changes: bool = False  # its workers hand over their states, for another number of workers
    handed_over: dict[int, bool] = {}  # by rank: whether the worker joins the next job too
    coming: int = 0  # workers that waited when the first one had handed over its state
    begun: bool = False  # whether one of its workers has handed over a state
    dismissed: set[int] = set()  # ranks of workers that all servers have dismissed

    def has(self, worker: WorkerPeer) -> bool:
        """Whether a worker is a member."""
        return self.members.get(worker.rank) == worker.sender

    def forget_passes(self) -> None:
        """Remove the passes that all workers have finished."""
        slowest = min(self.reached.get(rank, -1) for rank in self.members)
        while self.first_pass < slowest and (one := self.passes.get(self.first_pass)) is not None and one.splits.over:
            self.passes_end = max(self.passes_end, one.end or 0)
            del self.passes[self.first_pass]
            self.first_pass += 1


class JobLine(_State):
    """The jobs of a name: the one that runs, the one that forms, and the workers that wait."""

    name: str = ""  # empty: the default job
    job: Job | None = None
    forming: dict[bytes, int | None] = {}  # workers of the next job, by sender: the rank that each asks for
    queue: dict[bytes, None] = {}  # workers that wait for the end of the job or for a rank
    continuation: Continuation | None = None  # until the next job begins
    last_outcome: Outcome = ""
    incarnations: dict[int, int] = {}  # by rank: the last one
    clocks_before: int = 0  # of the last job
    members_silent: bool = False  # whether a member of the job may be dead

    @property
    def about(self) -> str:
        """Its job in messages."""
        return f"job {self.name!r}" if self.name else "the job"

    def raise_incarnation(self, rank: int) -> int:
        """Return the number of the next worker of a rank."""
        self.incarnations[rank] = self.incarnations.get(rank, 0) + 1
        return self.incarnations[rank]

    def assign_ranks(self) -> dict[int, bytes]:
        """Return the next job's workers by rank; who asked for none gets a remaining one, in the order of arrival."""
        placed = {rank: sender for sender, rank in self.forming.items() if rank is not None}
        free = (rank for rank in range(len(self.forming)) if rank not in placed)
        placed |= {next(free): sender for sender, rank in self.forming.items() if rank is None}
        return dict(sorted(placed.items()))

    @property
    def outcome(self) -> Outcome:
        """Of the last job whose number of workers may change; see `.StatusReply`."""
        return "moving" if self.continuation is not None and self.continuation.expected else self.last_outcome


# --- the whole --------------------------------------------------------------------------------------------------------


class Failover(_State):
    """A server that has died, and whose arcs others have.

    It was declared dead ``at`` a time, ``silent`` seconds after its last sign of life. ``served_at`` is None until the
    others serve, and ``copied_at`` until every arc has all of its copies.
    """

    server: int
    about: str
    why: str
    slots: str
    at: float
    silent: float
    served_at: float | None = None
    copied_at: float | None = None


class Launchers(_State):
    """How the programs of workers have ended, as their launchers report it."""

    done: int = 0  # with status 0
    failed: str = ""  # the first one that failed, or whose launcher was lost
    status: int = 0  # exit status of that program; 1 for one that was lost

    def fail(self, text: str, status: int) -> None:
        """Keep the first failure."""
        if not self.failed:
            self.failed, self.status = text, status


class State(_State):
    """The state of a cluster: see `new_state`."""

    settings: ClusterConfig
    seed: bytes  # of the numbers of the cluster, of jobs and of streams
    drawn: int = 0  # how many of them
    now: float = 0.0  # of the last input; seconds from any origin
    cluster: str = ""
    generation: int = 0
    address: str = ""  # of the scheduler
    ended: bool = False
    broken: str = ""  # description of the server that was lost with its rows
    # peers.py
    peers: dict[bytes, AnyPeer] = {}  # by sender: all that have neither left nor died
    former: dict[bytes, AnyReply] = {}  # by sender: the last reply to one that has
    events: list[AnyEvent] = []
    events_dropped: int = 0  # number of earlier ones
    # orders.py, assignments.py
    steps: int = 0  # orders so far
    newest: ClusterMap | None = None  # None before all servers have joined
    published: ClusterMap | None = None  # the newest map that workers know
    # replicas.py
    next_endpoint: int = 0
    draining: set[int] = set()  # ranks of servers that are to have no arcs and copies
    drained: set[int] = set()  # ranks of servers that were emptied, unless another server has the rank now
    commands: dict[tuple[bytes, int], AnyReply] = {}  # replies to the last requests of tools, by sender and number
    balance: bool = False  # whether arcs move until all endpoints have equal sums of `weights`, or equally many arcs
    weights: tuple[int, ...] = ()
    avoid: dict[tuple[int, int], float] = {}  # primary and backup between which no stream is opened, until when
    plan_at: float | None = None
    move_at: float = 0.0  # before which no copy of an arc that has to move begins
    noted_epoch: int = 0  # of the last map of which was noted that it is carried out
    failovers: list[Failover] = []  # the last ones
    # tables.py, jobs.py, and the launchers
    tables: dict[str, TableReply] = {}
    jobs: dict[str, JobLine] = msgspec.field(default_factory=lambda: {"": JobLine()})  # the default job is the first
    launchers: Launchers = msgspec.field(default_factory=Launchers)
    refused: dict[str, int] = {}  # counts of refusals, as they were when the servers last reported their metrics

    def __post_init__(self) -> None:
        if not self.cluster:
            self.cluster = f"{self.draw(64):016x}"
        if self.published == self.newest:
            self.published = self.newest  # one object, as before it was stored

    @property
    def dead_after(self) -> float:
        """Seconds of silence after which a process is dead: see failure_detector.py."""
        return DEAD_AFTER * self.settings.heartbeat

    @property
    def copy_rate(self) -> int:
        """Bytes per second that each endpoint sends at most to make a new copy."""
        rate = self.settings.copy_rate
        return COPY_RATE if rate is None else memory_bytes(rate)

    def draw(self, bits: int) -> int:
        """Return the next random number, which depends on the seed and on how many were drawn alone."""
        self.drawn += 1
        return random.Random(self.seed + self.drawn.to_bytes(8, "little")).getrandbits(bits)

    def servers(self) -> Iterator[ServerPeer]:
        """Yield the servers that have joined or have asked to, in the order in which they came."""
        return (peer for peer in self.peers.values() if isinstance(peer, ServerPeer) and peer.rank >= 0)


def new_state(config: ClusterConfig, seed: bytes) -> State:
    """Return the state of a new cluster; the seed is 16 random bytes."""
    check_cluster(config)
    kept = {name: getattr(config, name) for name in ClusterConfig.__struct_fields__}
    grace = config.grace or (GRACE_SECONDS if config.journal is None else JOURNAL_GRACE_SECONDS)
    return State(ClusterConfig(**{**kept, "grace": grace, "journal": None}), seed)
