"""The peers of the scheduler, and the jobs of its workers: what :class:`.Membership` keeps of each.

Threads: one.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from msgspec import structs

from shoal.base.plural import counted
from shoal.cluster.protocol.messages import (
    MAX_WORKERS,
    ArcLoad,
    Figures,
    JobConsistency,
    Join,
    LostWorker,
    Message,
    Order,
    ReplyBody,
    Request,
    StreamProgress,
)
from shoal.cluster.scheduler.inputs import ContinuationState, JobState, PassState, PeerState, VacancyState
from shoal.cluster.scheduler.splits import SplitTracker

_MAX_OLD_ROUTES = 8

Outgoing: TypeAlias = list[tuple[bytes, Message]]  # messages to send, each with its route


class AddressProbe(NamedTuple):
    """Addresses to probe before a server joins; the result goes to :meth:`.Membership.probed`."""

    sender: bytes
    number: int
    addresses: tuple[str, ...]


class LivenessProbe(NamedTuple):
    """Addresses of a disconnected server: do all of them refuse connections? See :meth:`.Membership.liveness`."""

    sender: bytes
    number: int
    addresses: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Peer:
    """A process that has sent Hello."""

    sender: bytes
    role: str
    about: str
    host: str
    route: bytes
    last_heard: float
    seen: int  # events
    rank: int = -1
    inside: bool = False
    replies: dict[int, ReplyBody] = field(default_factory=dict)  # that it may not have received
    latest: int = 0  # the greatest number of its requests
    open: frozenset[int] = frozenset()  # numbers up to that whose replies it waits for
    waiting: dict[int, str] = field(default_factory=dict)  # requests without a reply, and what they wait for
    old_routes: deque[bytes] = field(default_factory=lambda: deque(maxlen=_MAX_OLD_ROUTES), kw_only=True)
    disconnected_at: float | None = field(default=None, kw_only=True)  # None: it is connected
    figures: Figures | None = field(default=None, kw_only=True)  # of its last heartbeat
    figures_at: float = field(default=0.0, kw_only=True)
    # Before its connection ended, which then does not show that its process has.
    was_silent: bool = field(default=False, kw_only=True)
    # Seconds from its last sign of life to its being declared dead.
    died_after: float = field(default=0.0, kw_only=True)

    def __str__(self) -> str:
        return f"{self.role} {self.rank} ({self.about})" if self.rank >= 0 else f"a {self.role} ({self.about})"

    @property
    def job(self) -> str:
        """Name of a worker's job."""
        return ""

    def is_new(self, ask: Request) -> bool:
        """Whether a request is to be executed."""
        settled = (ask.latest, frozenset(ask.open)) if self.settles(ask) else (self.latest, self.open)
        answered = ask.number in self.replies or ask.number in self.waiting
        return not answered and (ask.number > settled[0] or ask.number in settled[1])

    def settles(self, ask: Request) -> bool:
        """Whether a request confirms replies that no earlier one confirmed. Messages may arrive out of order."""
        return (ask.latest, -len(ask.open)) > (self.latest, -len(self.open))

    def settle(self, ask: Request) -> None:
        """Remove the replies that the process has received or no longer waits for."""
        self.latest, self.open = ask.latest, frozenset(ask.open)
        for number in [number for number in self.replies if number <= self.latest and number not in self.open]:
            del self.replies[number]

    def save(self) -> PeerState:
        """Return the state, without the connection."""
        return PeerState(
            sender=self.sender,
            role=self.role,
            about=self.about,
            host=self.host,
            rank=self.rank,
            inside=self.inside,
            replies=dict(self.replies),
            latest=self.latest,
            open=sorted(self.open),
            waiting=dict(self.waiting),
        )


@dataclass(slots=True, eq=False)
class ServerPeer(Peer):
    """A server."""

    addresses: tuple[str, ...] = ()
    join: int = 0  # the number of the request
    orders: int = 0  # sent so far
    # When it was last noted that it is silent and has the last copy of slots.
    waited_for_at: float = field(default=-math.inf, kw_only=True)
    order: Order | None = None  # not acknowledged
    resend_at: float = 0.0
    resend_seconds: float = 0.0  # from the last time that it was sent
    member: bool = False  # of the formed cluster: it executes orders
    node: str = ""  # the machine that it runs on
    spare: bool = False  # no slots move to it because it joins
    confirmed_epoch: int = 0  # of the last assignment that it has confirmed
    offered_epoch: int = 0  # of the last one that it was sent
    offered_at: float = 0.0  # since when it has one that it has not confirmed; counted as `Peers.running`
    serves: set[int] = field(default_factory=set)  # arcs, as far as it has confirmed
    may_serve: set[int] = field(default_factory=set)  # arcs that it has or may have
    pending: Order | None = None  # what it has to execute on the copies that become primary
    assign_at: float = 0.0  # when to send the assignment again
    assign_seconds: float = 0.0  # from the last time that it was sent
    streams: tuple[StreamProgress, ...] = ()  # of its last heartbeat
    arcs: tuple[ArcLoad, ...] = ()  # likewise
    probe: int = 0  # number of the last LivenessProbe
    probe_at: float | None = None  # when to probe next; None: a probe is under way

    def save(self) -> PeerState:
        """As :meth:`Peer.save`."""
        return structs.replace(
            Peer.save(self),
            join=self.join,
            addresses=self.addresses,
            orders=self.orders,
            order=self.order,
            member=self.member,
            node=self.node,
            spare=self.spare,
        )


@dataclass(slots=True, eq=False)
class WorkerPeer(Peer):
    """A worker."""

    incarnation: int = 0
    clock: int = field(default=0, kw_only=True)  # of its last heartbeat
    join: int = 0
    wants: Join = field(default_factory=Join)

    @property
    def job(self) -> str:
        """Name of its job; empty: the default job."""
        return self.wants.job

    def __str__(self) -> str:
        job = f" of job {self.job!r}" if self.job else ""
        return f"worker {self.rank}{job} ({self.about})" if self.rank >= 0 else f"a worker{job} ({self.about})"

    def save(self) -> PeerState:
        """As :meth:`Peer.save`."""
        return structs.replace(Peer.save(self), join=self.join, incarnation=self.incarnation, wants=self.wants)


def why_refused(worker: WorkerPeer, join: Join, size: int, *, is_over: bool) -> str:
    """Return why a worker cannot join any job as it asks to, or one that is over; empty: it can."""
    if worker.join:
        return f"{worker} has joined already"
    if not 1 <= size <= MAX_WORKERS:
        return f"a job has from 1 to {MAX_WORKERS} workers, got workers={size}"
    if join.most and not size <= join.most <= MAX_WORKERS:
        return f"a job has {size} to {MAX_WORKERS} workers, got {join.most} as the greatest number"
    if join.most and join.rank is not None:
        return f"the number of workers may change, and ranks with it: leave out rank={join.rank}"
    if join.rank is not None and not 0 <= join.rank < size:
        return f"rank {join.rank} is out of range for {counted(size, 'worker')}: ranks start at 0"
    if join.rules is None:
        return "a worker that joins has to pass its consistency"
    if join.most and is_over:
        return (
            "a job whose number of workers may change has finished its fit here, and this worker would learn from all "
            f"data again: to train further, pass one number of workers ({size} instead of {size}:{join.most}), or "
            "use a new cluster"
        )
    return ""


def disagreement(job: str, worker: WorkerPeer, numbers: tuple[int, int], rules: JobConsistency) -> str:
    """Return why a worker cannot take part in a job of these numbers of workers and this consistency; empty: it can."""
    assert worker.wants.workers is not None
    own = (worker.wants.workers, worker.wants.most)
    if own != numbers:
        has, asks = (
            counted(least, "worker") if not most else f"{least} to {most} workers" for least, most in (numbers, own)
        )
        return f"{job} has {has}, and {worker.about} asks for {asks}: pass the same everywhere"
    if worker.wants.rules != rules:
        return f"{job} has {rules}, and {worker.about} asks for {worker.wants.rules}: pass the same everywhere"
    return ""


@dataclass(slots=True, eq=False)
class LauncherPeer(Peer):
    """The launcher of a worker's program."""


@dataclass(slots=True, eq=False)
class ReaderPeer(Peer):
    """A process that reads tables and is part of no job."""


def restore_peer(state: PeerState, now: float, seen: int) -> Peer:
    """Return a peer in a saved state; it was heard just now, and has no route."""
    common = (state.sender, state.role, state.about, state.host, b"", now, seen, state.rank, state.inside)
    kept = (dict(state.replies), state.latest, frozenset(state.open), dict(state.waiting))
    if state.role == "server":
        own = (state.addresses, state.join, state.orders, state.order)
        return ServerPeer(*common, *kept, *own, member=state.member, node=state.node, spare=state.spare)
    if state.role == "worker":
        return WorkerPeer(*common, *kept, state.incarnation, state.join, state.wants)
    return (ReaderPeer if state.role == "reader" else LauncherPeer)(*common, *kept)


@dataclass(slots=True, eq=False)
class DataPass:
    """A pass over the data."""

    splits: SplitTracker
    digest: str
    clocks: dict[int, int] = field(default_factory=dict)  # of the workers that have reached its end, by rank
    end: int | None = None

    def save(self) -> PassState:
        """Return the state."""
        return PassState(splits=self.splits.save(), digest=self.digest, clocks=dict(self.clocks), end=self.end)


@dataclass(slots=True, eq=False)
class Vacancy:
    """The place of a dead worker that another one may take, while the others wait.

    ``clock`` is the greatest that it reached at any endpoint, -1 until all servers have fenced it; ``least`` is the
    least one, ``tables`` are those of its last tick.
    """

    incarnation: int
    about: str
    until: float
    clock: int = -1
    least: int = 0
    tables: tuple[int, ...] = ()

    def save(self) -> VacancyState:
        """Return the state."""
        return VacancyState(
            incarnation=self.incarnation,
            about=self.about,
            until=self.until,
            clock=self.clock,
            least=self.least,
            tables=self.tables,
        )


@dataclass(slots=True, eq=False)
class Continuation:
    """A job that has ended for another number of workers, and the next one continues it.

    ``job`` and ``size`` are its own (0: nothing had begun), and so are the workers that were ``lost`` without having
    handed over a state. The next one has ``expected`` workers, or those that have come ``until`` a time.
    """

    job: int
    size: int
    expected: int
    until: float
    lost: tuple[LostWorker, ...] = ()

    def save(self) -> ContinuationState:
        """Return the state."""
        return ContinuationState(job=self.job, size=self.size, expected=self.expected, until=self.until, lost=self.lost)


@dataclass(slots=True, eq=False)
class Job:
    """The workers of a job, and what they have agreed on."""

    number: int
    consistency: JobConsistency
    size: int
    members: dict[int, WorkerPeer]
    dead: set[int] = field(default_factory=set)  # ranks that another worker may take
    barriers: dict[str, dict[int, int]] = field(default_factory=dict)  # by name: rank -> number of its request
    passes: dict[int, DataPass] = field(default_factory=dict)
    first_pass: int = 0  # earlier ones are over for all workers, and removed
    passes_end: int = 0  # the greatest clock at which one of them ended
    reached: dict[int, int] = field(default_factory=lambda: defaultdict(lambda: -1))  # the latest pass of each rank
    clock: int = 0  # the greatest that servers reported
    vacant: dict[int, Vacancy] = field(default_factory=dict)  # by rank
    passed: dict[str, int] = field(default_factory=dict)  # barriers that all have passed, by name
    least: int = 0  # workers that it may have, if their number may change; else 0, as the next
    most: int = 0
    continues: int = 0  # the number of the job that it continues
    continued: int = 0  # workers of that one
    changes: bool = False  # its workers hand over their states, for another number of workers
    handed_over: dict[int, bool] = field(default_factory=dict)  # by rank: whether the worker joins the next job too
    coming: int = 0  # workers that waited when the first one had handed over its state
    name: str = ""  # empty: the default job
    begun: bool = False  # whether one of its workers has handed over a state
    early: set[int] = field(default_factory=set)  # ranks of workers that have left it early, if their number may change
    lost: tuple[LostWorker, ...] = ()  # workers that died or have left early, if their number may change
    continued_lost: tuple[LostWorker, ...] = ()  # those of the job that it continues

    def forget_passes(self) -> None:
        """Remove the passes that all workers have finished."""
        slowest = min(self.reached[rank] for rank in self.members)
        while self.first_pass < slowest and (one := self.passes.get(self.first_pass)) is not None and one.splits.over:
            self.passes_end = max(self.passes_end, one.end or 0)
            del self.passes[self.first_pass]
            self.first_pass += 1

    def save(self) -> JobState:
        """Return the state."""
        return JobState(
            number=self.number,
            consistency=self.consistency,
            size=self.size,
            members={rank: member.sender for rank, member in self.members.items()},
            dead=sorted(self.dead),
            barriers={name: dict(came) for name, came in self.barriers.items()},
            passes={number: one.save() for number, one in self.passes.items()},
            first_pass=self.first_pass,
            passes_end=self.passes_end,
            reached=dict(self.reached),
            clock=self.clock,
            vacant={rank: one.save() for rank, one in self.vacant.items()},
            passed=dict(self.passed),
            least=self.least,
            most=self.most,
            continues=self.continues,
            continued=self.continued,
            changes=self.changes,
            handed_over=dict(self.handed_over),
            coming=self.coming,
            name=self.name,
            begun=self.begun,
            early=sorted(self.early),
            lost=self.lost,
            continued_lost=self.continued_lost,
        )


def restore_job(state: JobState, workers: Mapping[bytes, WorkerPeer]) -> Job:
    """Return a job in a saved state, of these workers by sender."""
    job = Job(
        state.number,
        state.consistency,
        state.size,
        {rank: workers[sender] for rank, sender in state.members.items()},
        set(state.dead),
        {name: dict(came) for name, came in state.barriers.items()},
        first_pass=state.first_pass,
        passes_end=state.passes_end,
        clock=state.clock,
        name=state.name,
    )
    for number, one in state.passes.items():
        job.passes[number] = DataPass(SplitTracker.restore(one.splits), one.digest, dict(one.clocks), one.end)
    job.reached.update(state.reached)
    job.vacant = {rank: Vacancy(**structs.asdict(one)) for rank, one in state.vacant.items()}
    job.passed = dict(state.passed)
    job.least, job.most, job.continues, job.continued = state.least, state.most, state.continues, state.continued
    job.changes, job.handed_over, job.coming = state.changes, dict(state.handed_over), state.coming
    job.begun, job.early, job.lost, job.continued_lost = state.begun, set(state.early), state.lost, state.continued_lost
    return job


class FormingJob:
    """Workers that wait for a job to be complete.

    A worker that asked for a rank holds it; the others get the remaining ranks, in the order of their arrival, when the
    job is complete.
    """

    def __init__(self) -> None:
        self.workers: dict[bytes, WorkerPeer] = {}  # by sender
        self.ranked: dict[int, WorkerPeer] = {}

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def first(self) -> WorkerPeer | None:
        """The worker that joined first."""
        return next(iter(self.workers.values()), None)

    @property
    def size(self) -> int:
        """Number of workers of the job, or the least one; 0 while none has joined."""
        return self.first.wants.workers or 0 if self.first is not None else 0

    @property
    def most(self) -> int:
        """The greatest number of workers of the job; 0 while none has joined."""
        return max(self.size, self.first.wants.most) if self.first is not None else 0

    def takes(self, worker: WorkerPeer) -> bool:
        """Whether there is a free place for this worker."""
        return not self.workers or (len(self) < self.most and worker.wants.rank not in self.ranked)

    def add(self, worker: WorkerPeer) -> None:
        """Add a worker."""
        self.workers[worker.sender] = worker
        if worker.wants.rank is not None:
            self.ranked[worker.wants.rank] = worker

    def remove(self, worker: WorkerPeer) -> bool:
        """Remove a worker; returns whether it was there."""
        if self.workers.pop(worker.sender, None) is None:
            return False
        if worker.wants.rank is not None:
            del self.ranked[worker.wants.rank]
        return True

    def assign_ranks(self) -> dict[int, WorkerPeer]:
        """Return the workers by rank."""
        free = (rank for rank in range(len(self)) if rank not in self.ranked)
        placed = dict(self.ranked)
        placed.update((next(free), worker) for worker in self.workers.values() if worker.wants.rank is None)
        return dict(sorted(placed.items()))

    def clear(self) -> None:
        """Remove all workers."""
        self.workers.clear()
        self.ranked.clear()
