"""The status of a cluster: a request that any process may send to the scheduler, and the reply.

The request changes nothing: it is answered also if its sender is not a member, or a server was lost. Threads: records
are immutable.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from shoal.cluster.protocol.records import Record, ReplyBody, RequestBody

MAX_FITS = 64
MAX_MODELS = 16  # of a fit

_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]

Outcome = Literal["", "unfinished", "moving", "finished"]  # of the last job whose number of workers may change


class GetStatus(RequestBody, frozen=True, tag="ask-status"):
    """Request for the status of the cluster."""

    doing: ClassVar[str] = "asking for the status of the cluster"


class EndpointStatus(Record, frozen=True):
    """An endpoint of a server, and its slots: ranges from a first slot up to, and without, an end."""

    address: str
    slots: tuple[tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]], ...]


class ServerStatus(Record, frozen=True):
    """A server. It has endpoints when all servers have joined. ``node`` is the name of its machine."""

    rank: Annotated[int, Meta(ge=0)]
    about: str  # names its process
    host: str
    endpoints: tuple[EndpointStatus, ...]
    is_connected: bool
    heard_seconds: float  # since its last message
    node: str = ""


class WorkerStatus(Record, frozen=True):
    """A worker of the job, or one that waits for a place and has no rank. ``clock`` is that of its last heartbeat."""

    rank: int | None
    about: str
    host: str
    incarnation: Annotated[int, Meta(ge=0)]
    clock: Annotated[int, Meta(ge=0)]
    is_connected: bool
    heard_seconds: float
    job: str = ""  # the name of its job; empty: the default job


class LauncherStatus(Record, frozen=True):
    """A process that starts a worker's program."""

    about: str
    host: str
    is_connected: bool
    heard_seconds: float


class AwaitedStatus(Record, frozen=True):
    """A worker that has died, whose replacement the job awaits for so long. ``why`` is how its death was found."""

    rank: Annotated[int, Meta(ge=0)]
    why: str
    seconds: float


class JobStatus(Record, frozen=True):
    """A job. ``vacant`` are the ranks of dead workers, which others may take; it waits for ``awaited`` ones.

    The default job has an empty ``name``.
    """

    number: Annotated[int, Meta(ge=0)]
    consistency: str
    size: Annotated[int, Meta(ge=0)]
    vacant: tuple[int, ...]
    awaited: tuple[AwaitedStatus, ...] = ()
    name: str = ""


class ArcStatus(Record, frozen=True):
    """A range of slots that moves as one. ``term`` is the epoch at which its server or its copies last changed.

    ``rows``, their ``bytes`` and their ``load`` are as of its server's last heartbeat. The load is the number of rows
    that were read or changed, of which each heartbeat forgets a twentieth.
    """

    first_slot: Annotated[int, Meta(ge=0)]
    end_slot: Annotated[int, Meta(ge=0)]
    server: Annotated[int, Meta(ge=0)]  # rank of the one that serves it
    address: str
    term: Annotated[int, Meta(ge=0)]
    copies: tuple[Annotated[int, Meta(ge=0)], ...]  # ranks of the servers that have copies in sync
    rows: Annotated[int, Meta(ge=0)] = 0
    bytes: Annotated[int, Meta(ge=0)] = 0
    load: Annotated[int, Meta(ge=0)] = 0


class StreamStatus(Record, frozen=True):
    """What an endpoint sends to one that has copies of its slots.

    ``copies`` is the number of arcs in sync. ``lag_records`` and ``lag_bytes`` are not acknowledged, as of the last
    heartbeat; ``arriving`` has the slots that are being copied, ``copied_bytes`` of ``total_bytes`` so far.
    """

    source: str
    target: str
    copies: Annotated[int, Meta(ge=0)]
    lag_records: Annotated[int, Meta(ge=0)]
    lag_bytes: Annotated[int, Meta(ge=0)]
    arriving: tuple[tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]], ...]
    copied_bytes: Annotated[int, Meta(ge=0)]
    total_bytes: Annotated[int, Meta(ge=0)]


class FailoverStatus(Record, frozen=True):
    """A server that has died and whose slots others serve.

    It was declared dead ``silent_seconds`` after its last sign of life, as far as this is known. ``seconds`` later
    others served its slots, and ``copied_seconds`` later every slot had all of its copies; None: not yet. So no server
    served the slots for ``silent_seconds + seconds``.
    """

    server: Annotated[int, Meta(ge=0)]
    about: str
    why: str
    slots: str
    ago_seconds: float
    seconds: float | None
    silent_seconds: float
    copied_seconds: float | None


class FitModelStatus(Record, frozen=True):
    """A model of a fit in its pass: see `shoal.base.fit_rows.PassMetrics`."""

    examples: _Count
    repeated: _Count
    loss: float | None
    auc: float | None
    accuracy: float | None


class FitStatus(Record, frozen=True):
    """A fit, as of the rows that its workers write, which the last heartbeat of a server reported.

    ``name`` is that of the model, and ``job`` the number of the job that wrote the rows. ``known`` examples had been
    learned from when the pass began. A fit has ``stopped`` if its job has ended and it is not over. There are
    ``num_models``, the first `MAX_MODELS` of which are in ``models``.
    """

    name: str
    job: _Count
    fit: _Count  # its number among those of the model in that job
    state: Literal["running", "stopped", "over"]
    pass_number: Annotated[int, Meta(ge=1)]
    passes: _Count
    known: _Count
    num_models: _Count
    models: Annotated[tuple[FitModelStatus, ...], Meta(min_length=1, max_length=MAX_MODELS)]


class StatusReply(ReplyBody, frozen=True, tag="status"):
    """The status. ``epoch`` is 0 until all servers have joined; ``lost`` describes a server that was lost.

    ``job`` is the default job, ``jobs`` are the named ones. ``outcome`` is that of the last job whose number of workers
    may change: it has finished if one of its workers has left it after its work, and is moving between two jobs while
    some are expected to return.
    """

    cluster: str
    generation: Annotated[int, Meta(ge=0)]  # of the scheduler
    uptime_seconds: float  # of the scheduler
    heartbeat_seconds: float
    dead_after_seconds: float
    epoch: Annotated[int, Meta(ge=0)]
    slots: Annotated[int, Meta(ge=0)]
    num_servers: Annotated[int, Meta(ge=0)]
    lost: str
    tables: tuple[str, ...]
    job: JobStatus | None
    servers: tuple[ServerStatus, ...]
    workers: tuple[WorkerStatus, ...]
    launchers: tuple[LauncherStatus, ...]
    replicas: Annotated[int, Meta(ge=0)] = 0
    draining: tuple[int, ...] = ()  # ranks
    arcs: tuple[ArcStatus, ...] = ()
    streams: tuple[StreamStatus, ...] = ()
    failovers: tuple[FailoverStatus, ...] = ()  # the last ones
    jobs: tuple[JobStatus, ...] = ()
    outcome: Outcome = ""
    fits: tuple[FitStatus, ...] = ()


def running_first(fits: Iterable[FitStatus]) -> tuple[FitStatus, ...]:
    """Return fits in the order of their names, those that run before the others."""
    return tuple(sorted(fits, key=lambda fit: (fit.state != "running", fit.name)))


def as_dict(record: msgspec.Struct) -> dict[str, Any]:
    """Return a record, and those in it, as dicts.

    Examples
    --------
    >>> as_dict(EndpointStatus("tcp://h:1", ((0, 512),)))
    {'address': 'tcp://h:1', 'slots': [[0, 512]]}
    """
    return {name: _plain(getattr(record, name)) for name in record.__struct_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return as_dict(value)
    return [_plain(one) for one in value] if isinstance(value, tuple) else value
