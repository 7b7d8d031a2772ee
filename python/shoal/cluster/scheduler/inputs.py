"""The inputs of the scheduler's state machine, and its whole state, as records that can be stored.

:class:`.Membership` changes by the inputs of this module alone: two memberships with the same state that receive the
same inputs have the same state afterwards, and send the same messages (state machine replication). What it decides from
the time, such as that a peer is dead, is therefore an input too. Heartbeats, routes and the times of the last messages
are no inputs: they are known again a moment after a restart.

Threads: records are immutable.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from shoal.cluster.protocol.messages import (
    MAX_WORKERS,
    Assigned,
    Event,
    JobConsistency,
    Join,
    LostWorker,
    Order,
    OrderReply,
    ReplyBody,
    Request,
    StreamsClosed,
    TableReply,
)
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.protocol.status import Outcome


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


# --- inputs -----------------------------------------------------------------------------------------------------------


class Asked(_Record, frozen=True, tag="asked"):
    """A request that is new, or that confirms replies. ``host`` is the address of its connection's other end."""

    now: float
    host: str
    request: Request


class Obeyed(_Record, frozen=True, tag="obeyed"):
    """A server has executed its order. ``counts`` are the scheduler's own metrics, if the order was to report them."""

    now: float
    done: OrderReply
    counts: dict[str, int] = {}


class Confirmed(_Record, frozen=True, tag="confirmed"):
    """A server does what its assignment says."""

    now: float
    done: Assigned


class Stamped(_Record, frozen=True, tag="stamped"):
    """A server has closed the streams of dead primaries, and reports how far its copies are."""

    now: float
    closed: StreamsClosed


class Planned(_Record, frozen=True, tag="planned"):
    """It was time to plan: some arcs may lack copies or have to move."""

    now: float


class DrainRequested(_Record, frozen=True, tag="drain"):
    """A tool requested, by its request of this number, that a server is drained and ends."""

    now: float
    sender: bytes
    number: int
    server: int


class RebalanceRequested(_Record, frozen=True, tag="rebalance"):
    """A tool requested equal sums of these weights, one for each arc, at all endpoints; none: equal numbers of arcs."""

    now: float
    sender: bytes
    number: int
    weights: tuple[int, ...] = ()


class Probed(_Record, frozen=True, tag="probed"):
    """The addresses of a server were probed, for its request of this number: the one that failed, and why."""

    now: float
    sender: bytes
    number: int
    fault: tuple[str, str] | None


class Died(_Record, frozen=True, tag="died"):
    """A peer is declared dead, ``silent`` seconds after its last sign of life, as far as this is known."""

    now: float
    sender: bytes
    why: str
    silent: float = 0.0


class MembersSilent(_Record, frozen=True, tag="silent"):
    """Whether some worker of the job of this name may be dead: it has missed heartbeats, or is disconnected."""

    now: float
    silent: bool
    job: str = ""


class ReplacementOverdue(_Record, frozen=True, tag="overdue"):
    """No worker has come in time to replace the dead worker of this rank."""

    now: float
    rank: int
    job: str = ""


class FormingOverdue(_Record, frozen=True, tag="forming-overdue"):
    """Not all workers that the next job waits for have come in time."""

    now: float
    job: str = ""


class EventsSeen(_Record, frozen=True, tag="seen"):
    """All peers have received this many events."""

    now: float
    events: int


class Bound(_Record, frozen=True, tag="bound"):
    """The scheduler listens at this address."""

    now: float
    address: str


class Restarted(_Record, frozen=True, tag="restarted"):
    """The scheduler was started again. Each start has its own generation, which rises."""

    now: float
    generation: int


class Ended(_Record, frozen=True, tag="ended"):
    """The cluster was asked to end."""

    now: float


Input: TypeAlias = (
    Asked
    | Obeyed
    | Confirmed
    | Stamped
    | Planned
    | DrainRequested
    | RebalanceRequested
    | Probed
    | Died
    | MembersSilent
    | ReplacementOverdue
    | FormingOverdue
    | EventsSeen
    | Bound
    | Restarted
    | Ended
)


# --- the state --------------------------------------------------------------------------------------------------------


class _State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Settings(_State, frozen=True):
    """The settings of a cluster; constant as long as it exists."""

    servers: Annotated[int, msgspec.Meta(ge=1)]
    workers: Annotated[int, msgspec.Meta(ge=1)]
    slots: Annotated[int, msgspec.Meta(ge=2)]
    heartbeat: Annotated[float, msgspec.Meta(gt=0)]
    grace: Annotated[float, msgspec.Meta(gt=0)]
    replicas: Annotated[int, msgspec.Meta(ge=0)]
    copy_rate: Annotated[int, msgspec.Meta(ge=1)]  # bytes per second
    replacement_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        if self.servers < 1 or self.workers < 1:
            raise ValueError(f"a cluster needs a server and a worker at least, got {self.servers} and {self.workers}")
        if self.workers > MAX_WORKERS:
            raise ValueError(f"a job has {MAX_WORKERS} workers at most, got {self.workers}")
        if self.slots not in {1 << bits for bits in range(1, 15)}:
            raise ValueError(f"slots must be a power of two from 2 to 16384, got {self.slots}")
        if self.heartbeat <= 0:
            raise ValueError(f"heartbeat must be a number of seconds above 0, got {self.heartbeat}")
        if self.grace <= 0:
            raise ValueError(f"grace must be a number of seconds above 0, got {self.grace}")
        if not 0 <= self.replicas < self.servers:
            raise ValueError(
                f"replicas must be a number from 0 to {self.servers - 1}, since each copy is on another of the "
                f"{self.servers} servers, got {self.replicas}: start more servers, or keep fewer copies"
            )
        if self.copy_rate < 1:
            raise ValueError(f"copy_rate must be a number of bytes per second above 0, got {self.copy_rate}")
        if not 0 <= self.replacement_seconds < 1e9:
            raise ValueError(
                f"replacement_seconds must be a number of seconds, 0 or more, got {self.replacement_seconds}"
            )


class PeerState(_State, frozen=True):
    """A peer; fields that its role does not have keep their defaults."""

    sender: bytes
    role: str
    about: str
    host: str
    rank: int
    inside: bool
    replies: dict[int, ReplyBody]
    latest: int
    open: list[int]
    waiting: dict[int, str]
    join: int = 0
    addresses: tuple[str, ...] = ()
    orders: int = 0
    order: Order | None = None
    member: bool = False
    node: str = ""
    spare: bool = False
    incarnation: int = 0
    wants: Join = Join()


class SplitState(_State, frozen=True):
    """The splits of a pass. ``taken`` has, for each split in work, its workers and since when."""

    count: int
    untouched: int
    back: list[int]
    taken: list[tuple[int, list[tuple[bytes, float]]]]
    twice: list[int]
    finished: int
    seconds: float


class PassState(_State, frozen=True):
    """A pass over the data."""

    splits: SplitState
    digest: str
    clocks: dict[int, int]
    end: int | None


class VacancyState(_State, frozen=True):
    """The place of a dead worker that another one may take: see `.members.Vacancy`."""

    incarnation: int
    about: str
    until: float
    clock: int
    least: int
    tables: tuple[int, ...]


class JobState(_State, frozen=True):
    """A job. Its members are named by their senders."""

    number: int
    consistency: JobConsistency
    size: int
    members: dict[int, bytes]
    dead: list[int]
    barriers: dict[str, dict[int, int]]
    passes: dict[int, PassState]
    first_pass: int
    passes_end: int
    reached: dict[int, int]
    clock: int
    vacant: dict[int, VacancyState] = {}
    passed: dict[str, int] = {}
    least: int = 0
    most: int = 0
    continues: int = 0
    continued: int = 0
    changes: bool = False
    handed_over: dict[int, bool] = {}
    coming: int = 0
    name: str = ""
    begun: bool = False
    early: list[int] = []
    lost: tuple[LostWorker, ...] = ()
    continued_lost: tuple[LostWorker, ...] = ()


class ContinuationState(_State, frozen=True):
    """A job that continues another one: see `.members.Continuation`."""

    job: int
    size: int
    expected: int
    until: float
    lost: tuple[LostWorker, ...] = ()


class JobLineState(_State, frozen=True):
    """The jobs of a name: the one that runs, the one that forms, and the workers that wait."""

    incarnations: dict[int, int]
    clocks_before: int
    job: JobState | None
    forming: list[bytes]
    queue: list[bytes]
    silent: bool
    continuation: ContinuationState | None = None
    outcome: Outcome = ""


class FailoverState(_State, frozen=True):
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


class MembershipState(_State, frozen=True):
    """The state of a membership between two operations. Peers are named by their senders.

    The default job has the fields of :class:`JobLineState`; ``named`` has those of the named jobs.
    """

    settings: Settings
    cluster: str
    seed: bytes
    drawn: int
    now: float
    generation: int
    address: str
    ended: bool
    peers: list[PeerState]
    former: list[tuple[bytes, ReplyBody]]
    servers: list[bytes]
    map: ClusterMap | None
    next_endpoint: int
    steps: int
    draining: list[int]
    drained: list[int]
    commands: list[tuple[bytes, int, ReplyBody]]
    balance: bool
    weights: tuple[int, ...]
    avoid: list[tuple[int, int, float]]
    plan_at: float | None
    move_at: float
    failovers: list[FailoverState]
    broken: str
    events: list[Event]
    events_dropped: int
    tables: list[TableReply]
    launchers_done: int
    failed: str
    status: int
    incarnations: dict[int, int]
    clocks_before: int
    job: JobState | None
    forming: list[bytes]
    queue: list[bytes]
    silent: bool
    continuation: ContinuationState | None = None
    outcome: Outcome = ""
    named: dict[str, JobLineState] = {}
