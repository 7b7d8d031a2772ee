"""Control messages between the scheduler and the other processes of a cluster.

Two frames: a preamble and one message in MessagePack, with its checksum.

    preamble   "SHOALCTL" and the version, u16 little-endian
    message    CRC-32 of the rest, u32 little-endian; then an array: a tag and the fields of a class of `Message`

    peer -> scheduler    Request(sender, number, body, ..)  answered by Reply(number, body) of the same number
                         Heartbeat(sender, seen, clock) answered by Events that the peer has not seen
                         OrderReply(sender, number, ...)      the result of an order
                         Assigned(sender, epoch, ..)    a server does what the map of this epoch says
    scheduler -> peer    Order(number, body)            to servers: execute in the order of the numbers, once
                         Assign(map, pending, ..)       to servers: the newest counts, older ones need not be executed
                         Events(first, events)            also unasked, when something happens

What the scheduler sends has its generation: 0 without a journal, else a number that rises with each start. A message of
an older generation than one received before is dropped, so a scheduler that was replaced has no effect any more.

A sender is 16 random bytes that a process chooses for its life, so a connection that was cut and made again is the same
peer. Anything may be sent again: the numbers identify what was received. A message of another version is answered by a
refusal in the form that all versions read: preamble, an empty frame, a text in UTF-8. A damaged message is dropped, as
if it were lost.

Every field has its bounds here, and a message that violates one is refused on arrival, before it has any effect: a
request by ErrorReply("input"), with the name of the field. What depends on the state of the cluster, such as whether a
rank is free, membership checks.

The version changes whenever a message does: all processes of a cluster run one version of shoal.

Over 600 lines: the definitions of all messages are one table.

Threads: messages are immutable.
"""

from __future__ import annotations

import contextlib
import re
import struct
import zlib
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, get_args

import msgspec
from msgspec import Meta, field

from shoal.base.decoders import msgpack_decoder
from shoal.base.defaults import MAX_WORKERS
from shoal.cluster.protocol.records import Command, Event, OrderBody, Record, ReplyBody, RequestBody, union_of
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.protocol.status import MAX_FITS, FitStatus, GetStatus, StatusReply  # noqa: F401 - kinds of messages
from shoal.consistency import Consistency
from shoal.errors import ProtocolError
from shoal.table.spec import TableRecord

VERSION = 8
GRACE_SECONDS = 60.0  # that a process continues while the scheduler is silent, unless it is started otherwise
_BALANCED = ("slots", "rows", "bytes", "load")
MAX_OPEN_REQUESTS = 1024  # unanswered requests of a process
_MAGIC = b"SHOALCTL"
_PREAMBLE = _MAGIC + struct.pack("<H", VERSION)
_LONGEST = 1 << 24  # bytes of a message; the longest ones carry a map or the tables of a store

_Sender: TypeAlias = Annotated[bytes, Meta(min_length=1, max_length=16)]
_Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Number: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 62)]  # of requests and orders
_Small: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]  # ranks, incarnations, clocks: 32 bits on the wire
_Word: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Stream: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 53)]
_Tables: TypeAlias = Annotated[tuple[_Word, ...], Meta(max_length=1 << 20)]
_Status: TypeAlias = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
_Name: TypeAlias = Annotated[str, Meta(max_length=1024)]
_JobName: TypeAlias = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9._-]*\Z")]  # empty: default
_FigureName: TypeAlias = Annotated[str, Meta(max_length=1088)]  # a key and the name of a table, with a prefix
_Text: TypeAlias = Annotated[str, Meta(max_length=1 << 20)]


class JobConsistency(Record, frozen=True):
    """A job's consistency: ``mode``, ``waits`` and ``mean`` of :class:`shoal.consistency.Consistency`."""

    mode: Annotated[str, Meta(pattern="^(bsp|ssp|asp)$")]
    waits: _Small
    mean: bool

    def __post_init__(self) -> None:
        if (self.waits and self.mode != "ssp") or (self.mean and self.mode != "bsp"):
            raise ValueError(f"{self.mode} takes neither waits={self.waits} nor mean={self.mean}")

    @classmethod
    def of(cls, consistency: Consistency) -> JobConsistency:
        """Return that of a worker."""
        return cls(consistency.mode, consistency.waits, consistency.mean)

    def __str__(self) -> str:
        if self.mode == "bsp":
            return f"BSP(reduce={'mean' if self.mean else 'sum'!r})"
        return f"SSP(staleness={self.waits})" if self.mode == "ssp" else "ASP()"


# --- requests and replies ----------------------------------------------------------------------------------------


class Hello(RequestBody, frozen=True, tag="hello"):
    """The first request of every peer. ``about`` names the process in messages.

    ``role`` is "server", "worker", "reader" (of tables, and part of no job) or "launcher": the process that starts a
    worker's program and waits for its end.
    """

    doing: ClassVar[str] = "connecting to the scheduler"
    role: Annotated[str, Meta(max_length=16)]
    about: _Name


class HelloReply(ReplyBody, frozen=True, tag="welcome"):
    """What a peer needs before it can join. ``host`` is the address that its connection comes from.

    ``grace`` is how long it continues while the scheduler is silent, ``replicas`` the number of copies of each slot.
    """

    cluster: str
    host: str
    slots: Annotated[int, Meta(ge=1, le=1 << 14)]
    heartbeat: Annotated[float, Meta(gt=0, le=1e9)]  # seconds
    dead_after: Annotated[float, Meta(gt=0, le=1e9)]  # seconds of silence
    seen: _Count  # number of earlier events, which do not concern it
    grace: Annotated[float, Meta(gt=0, le=1e9)]  # seconds
    replicas: _Small = 0


class Join(RequestBody, frozen=True, tag="join"):
    """A peer is ready. The reply follows when the others have joined; until then it is PendingReply.

    A server passes the addresses of its endpoints (tcp://host:port; an empty host or 0.0.0.0 stands for the host of its
    connection) and the name of its node, a worker its settings of the job. No slots move to a ``spare`` server because
    it joins. With ``most`` the number of workers may change, from ``workers`` to ``most``. ``job`` is the name of a
    worker's job.
    """

    doing: ClassVar[str] = "joining the cluster"
    rank: _Small | None = None
    addresses: Annotated[tuple[Annotated[str, Meta(max_length=300)], ...], Meta(max_length=1 << 14)] = ()
    workers: _Small | None = None
    rules: JobConsistency | None = None
    node: Annotated[str, Meta(max_length=253)] = ""
    spare: bool = False
    most: _Small = 0
    job: _JobName = ""


class JoinReply(ReplyBody, frozen=True, tag="joined"):
    """A peer has joined. ``incarnation``, ``job`` and ``clock`` are for workers: their initial values.

    ``replacement_seconds`` is how long the job waits for a replacement of a worker that died. A worker that is one has
    ``replaces``; its predecessor has passed so many barriers of each name. A job whose number of workers has changed
    ``continues`` the one of that number. ``gone`` are the ranks of those that have died or ended early, in order.
    """

    rank: _Small
    map: ClusterMap
    tables: tuple[TableReply, ...]
    incarnation: _Word = 0
    job: _Word = 0
    clock: _Word = 0
    num_workers: _Small = 0
    replacement_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    replaces: bool = False
    passed: dict[_Name, _Word] = field(default_factory=dict)
    continues: _Word = 0
    gone: tuple[_Small, ...] = ()


class GetMap(RequestBody, frozen=True, tag="ask-map"):
    """Request for the slot map."""

    doing: ClassVar[str] = "asking for the map of slots"


class GetMapReply(ReplyBody, frozen=True, tag="map"):
    """The map."""

    map: ClusterMap


class CreateTable(RequestBody, frozen=True, tag="ask-table"):
    """Create a table of this description, unless one of its name exists."""

    doing: ClassVar[str] = "making table {0.form.name!r}"
    form: TableRecord


class TableReply(ReplyBody, frozen=True, tag="table"):
    """A table that all servers have. Its description may differ from the requested one: the first one counts."""

    id: _Word
    form: TableRecord


class ListTables(RequestBody, frozen=True, tag="ask-tables"):
    """Request for all tables."""

    doing: ClassVar[str] = "asking for the tables"


class ListTablesReply(ReplyBody, frozen=True, tag="tables"):
    """All tables."""

    tables: tuple[TableReply, ...]


class Barrier(RequestBody, frozen=True, tag="barrier"):
    """A worker has reached a barrier."""

    doing: ClassVar[str] = "waiting for all workers at the {0.name}"
    name: _Name


class BarrierReply(ReplyBody, frozen=True, tag="passed"):
    """All workers of the job have reached the barrier, except the ``absent`` ranks, in order: all receive the same."""

    absent: tuple[_Small, ...] = ()


class TakeSplit(RequestBody, frozen=True, tag="take-part"):
    """Request for a split of the data, in the worker's ``pass_number``-th pass; ``finished`` is the last split or -1.

    All workers cut the data in the same way: ``count`` splits, of files with this ``digest``. ``clock`` is its own.
    """

    doing: ClassVar[str] = "requesting a split of the data"
    pass_number: _Small
    count: _Count
    digest: _Name
    finished: Annotated[int, Meta(ge=-1, lt=1 << 31)]
    reissue: _Seconds
    clock: _Word


class SplitReply(ReplyBody, frozen=True, tag="part"):
    """The split to train on, None if none is free now; or the clock at which the pass ends for all workers."""

    split: _Small | None
    end: _Count | None


class GetMetrics(RequestBody, frozen=True, tag="ask-figures"):
    """Request for the metrics of servers and scheduler."""

    doing: ClassVar[str] = "asking the servers for their metrics"


class EndpointMetrics(Record, frozen=True):
    """The metrics of an endpoint."""

    server: _Small
    address: str
    figures: dict[str, Any]


class MetricsReply(ReplyBody, frozen=True, tag="figures"):
    """The metrics of all endpoints, in the order of their slots, and of the scheduler."""

    endpoints: tuple[EndpointMetrics, ...]
    scheduler: dict[str, _Count] = field(default_factory=dict)


class HandOver(RequestBody, frozen=True, tag="hand-over"):
    """A worker has put its state on the servers for the job that continues this one; ``returns``: it joins that too.

    Without ``begun`` it had not begun: the next job begins as this one did.
    """

    doing: ClassVar[str] = "handing over the state of this worker"
    returns: bool
    begun: bool = True


class Leave(RequestBody, frozen=True, tag="leave"):
    """A peer leaves. ``status`` is the exit status of a launcher's program; of a worker 1 if it ends its work early."""

    doing: ClassVar[str] = "leaving the cluster"
    status: _Status = 0


class LeaveReply(ReplyBody, frozen=True, tag="left"):
    """The peer is removed: no other waits for it."""


class PendingReply(ReplyBody, frozen=True, tag="waiting"):
    """The reply follows later; ``text`` describes what it waits for."""

    text: str


class ReportStream(RequestBody, frozen=True, tag="report-stream"):
    """The server of a stream's primary reports the state of the stream.

    ``state`` is "arrived": the backup has a copy of this arc in sync; "diverged": the backup's copies differ and are of
    no use; "stalled": the backup acknowledges nothing; "load": rows are loaded that the stream does not carry. ``arc``
    is -1 unless it has arrived; ``text`` gives the reason of any other state.
    """

    doing: ClassVar[str] = "reporting a stream"
    stream: Annotated[int, Meta(ge=1, lt=1 << 53)]
    arc: Annotated[int, Meta(ge=-1, lt=1 << 14)]
    state: Annotated[str, Meta(pattern="^(arrived|diverged|stalled|load)$")]
    text: _Text = ""


class Drain(Command, frozen=True, tag="drain"):
    """Request to move all arcs and copies away from a server, and to end it then."""

    doing: ClassVar[str] = "asking the scheduler to drain server {0.server}"
    server: _Small


class Rebalance(Command, frozen=True, tag="rebalance"):
    """Request to move arcs until the endpoints have equal sums of ``weights``, one for each arc; none: equally many."""

    doing: ClassVar[str] = "asking the scheduler to even out the slots"
    weights: Annotated[tuple[_Count, ...], Meta(max_length=1 << 16)] = ()

    @classmethod
    def of(cls, by: str, status: StatusReply) -> Rebalance:
        """Return the request for equal sums of the "slots", "rows", "bytes" or "load" of the arcs."""
        if by not in _BALANCED:
            raise ValueError(f"slots are not evened out by {by!r}: pass one of {', '.join(_BALANCED)}")
        return cls(() if by == "slots" else tuple(getattr(arc, by) for arc in status.arcs))


class StopCluster(Command, frozen=True, tag="stop-cluster"):
    """Request to end the cluster: the servers and the scheduler end."""

    doing: ClassVar[str] = "asking the scheduler to end the cluster"


class AcceptedReply(ReplyBody, frozen=True, tag="accepted"):
    """The request has been accepted; ``text`` describes what follows."""

    text: str = ""


class ErrorReply(ReplyBody, frozen=True, tag="refused"):
    """The request is refused. ``kind``: "input", "memory", "protocol", "not-connected", "server-lost" or "fenced"."""

    kind: Annotated[str, Meta(max_length=16)]
    text: _Text


# --- orders of the scheduler to servers ---------------------------------------------------------------------------


class StartJob(OrderBody, frozen=True, tag="start-job"):
    """Begin a job: clocks at 0, the workers' ranks 0..n-1 admitted with these incarnations.

    ``before`` is the number of clocks of the last job: the tables' own clocks continue from there. A job that is
    ``named`` begins in addition to the others; the default job replaces the last one.
    """

    job: Annotated[int, Meta(ge=1, lt=1 << 32)]
    rules: JobConsistency
    incarnations: Annotated[tuple[_Word, ...], Meta(max_length=MAX_WORKERS)]
    before: _Word = 0
    named: bool = False


class EndJob(OrderBody, frozen=True, tag="end-job"):
    """End a named job, which has no workers any more: its number is refused from now on."""

    job: Annotated[int, Meta(ge=1, lt=1 << 32)]


class Hold(OrderBody, frozen=True, tag="hold"):
    """Advance no clock past the greatest that any worker of the job has reached here, and report that clock.

    ``job`` is the number of a named job, and 0 for the default job, also in the orders that follow.
    """

    job: _Word = 0


class Admit(OrderBody, frozen=True, tag="admit"):
    """Admit a worker at a clock; this ends a hold of the clock."""

    rank: _Small
    incarnation: _Word
    clock: _Word
    job: _Word = 0


class Fence(OrderBody, frozen=True, tag="fence"):
    """Accept nothing more from a worker. Report the clock that it has reached, and the tables of its last tick."""

    rank: _Small
    incarnation: _Word
    job: _Word = 0


class Dismiss(OrderBody, frozen=True, tag="dismiss"):
    """Wait no longer for a fenced worker. Report the greatest clock that any worker of its job has reached.

    ``clock`` is the greatest that it reached at any endpoint, ``tables`` are those of the tick that took it there: an
    endpoint that has not seen this tick does as if it had.
    """

    rank: _Small
    incarnation: _Word
    clock: _Word
    tables: _Tables
    job: _Word = 0


class AddTable(OrderBody, frozen=True, tag="add-table"):
    """Make an empty table. A server that has no room for it refuses, and is unchanged."""

    id: _Word
    form: TableRecord


class DropTable(OrderBody, frozen=True, tag="drop-table"):
    """Remove a table that another server has refused."""

    id: _Word


class ReportMetrics(OrderBody, frozen=True, tag="tell-figures"):
    """Report the metrics of the endpoints."""


# --- events -----------------------------------------------------------------------------------------------------


class ServerGone(Event, frozen=True, tag="server-gone"):
    """A server is lost, and its rows with it. ``text`` names it and the reason, ``why`` has the reason alone."""

    rank: _Small
    text: _Text
    why: _Text


class WorkerGone(Event, frozen=True, tag="worker-gone"):
    """A worker was declared dead, or has ended its work early. ``text`` says which; ``job`` is its job's number."""

    rank: _Small
    incarnation: _Word
    text: _Text
    job: _Word = 0


class WorkersChange(Event, frozen=True, tag="workers-change"):
    """The number of workers of a job is to change: they hand over their states and leave it."""

    job: _Word


class MapChanged(Event, frozen=True, tag="map-changed"):
    """The map has changed: endpoints of it serve what it says."""

    map: ClusterMap


class SchedulerStopped(Event, frozen=True, tag="scheduler-stopped"):
    """The scheduler was stopped: the cluster ends."""


# Fields of envelopes are of these unions; a type checker takes their base.
if TYPE_CHECKING:
    AnyRequest = RequestBody
    AnyReply = ReplyBody
    AnyOrder = OrderBody
    AnyEvent = Event
else:
    AnyRequest = union_of(RequestBody)
    AnyReply = union_of(ReplyBody)
    AnyOrder = union_of(OrderBody)
    AnyEvent = union_of(Event)


# --- envelopes ----------------------------------------------------------------------------------------------------


class Request(Record, frozen=True, tag="ask"):
    """A request. Numbers of a sender start at 1 and rise.

    ``latest`` is the greatest number that the sender has used, ``open`` are those whose replies it still waits for: the
    replies to all others need not be kept.
    """

    sender: _Sender
    number: _Number
    body: AnyRequest
    latest: _Count = 0
    open: Annotated[tuple[_Number, ...], Meta(max_length=MAX_OPEN_REQUESTS)] = ()


class Reply(Record, frozen=True, tag="reply"):
    """The answer to a request."""

    number: _Count
    body: AnyReply
    generation: _Word = 0


class Order(Record, frozen=True, tag="order"):
    """An order. Numbers start at 1 and rise by 1."""

    number: _Number
    body: AnyOrder
    generation: _Word = 0


class OrderReply(Record, frozen=True, tag="done"):
    """The result of an order, or a fault, a text, after which the server cannot be used.

    ``figures`` are those of each endpoint, ``tables`` those that the last tick of a fenced worker named, ``least`` is
    the least of its clocks at endpoints. A server that has ``refused`` an order is unchanged by it.
    """

    sender: _Sender
    number: _Number
    result: _Word = 0
    fault: _Text = ""
    figures: Annotated[tuple[dict[str, Any], ...], Meta(max_length=1 << 14)] = ()
    refused: ErrorReply | None = None
    tables: _Tables = ()
    least: _Word | None = None


class Assign(Record, frozen=True, tag="assign"):
    """The newest map: what a server's endpoints have to serve, send and receive from now on.

    ``pending`` is an order that a dead server may not have executed: the server executes it on the copies that become
    primary, before they do, once for each number, and states the outcome. ``copy_rate`` is in bytes per second.
    """

    map: ClusterMap
    pending: Order | None
    copy_rate: _Count
    generation: _Word = 0


class Assigned(Record, frozen=True, tag="assigned"):
    """A server has carried out the map of this epoch; changes of arcs that it has given up are on all copies.

    ``outcome`` is that of the pending order; ``fault`` a text, after which the server cannot be used.
    """

    sender: _Sender
    epoch: _Count
    outcome: OrderReply | None = None
    fault: _Text = ""


class CloseStreams(Record, frozen=True, tag="close"):
    """The primaries of these streams have died: a server takes no more of their records, and reports how far it is."""

    streams: Annotated[tuple[_Stream, ...], Meta(max_length=1 << 14)]
    generation: _Word = 0


class ArcStamp(Record, frozen=True):
    """The stamp of the last record that the copy of an arc at an endpoint has executed."""

    endpoint: _Count
    first_slot: _Count
    stamp: _Count


class StreamsClosed(Record, frozen=True, tag="closed"):
    """A server has closed these streams. ``stamps`` are those of all its copies, apart from incomplete ones."""

    sender: _Sender
    streams: Annotated[tuple[_Stream, ...], Meta(max_length=1 << 14)]
    stamps: Annotated[tuple[ArcStamp, ...], Meta(max_length=1 << 18)] = ()


class StreamProgress(Record, frozen=True):
    """How far a stream's backup is behind, and how much of the arriving arc is copied."""

    stream: _Stream
    lag_records: _Count
    lag_bytes: _Count
    copied_bytes: _Count = 0
    total_bytes: _Count = 0


class ArcLoad(Record, frozen=True):
    """The load of an arc that a server serves: rows, their bytes, and how much they were used recently.

    ``load`` is the number of rows that were read or changed, of which each heartbeat forgets a twentieth.
    """

    first_slot: _Count
    rows: _Count
    bytes: _Count
    load: _Count


class Figures(Record, frozen=True):
    """Figures that a server or a worker reports for displays.

    Numbers, histograms by lower bounds of buckets, and the fits whose rows a server has.
    """

    numbers: Annotated[dict[_FigureName, float], Meta(max_length=1 << 14)] = field(default_factory=dict)
    histograms: Annotated[
        dict[_Name, Annotated[dict[_Count, _Count], Meta(max_length=1 << 10)]], Meta(max_length=1 << 8)
    ] = field(default_factory=dict)
    fits: Annotated[tuple[FitStatus, ...], Meta(max_length=MAX_FITS)] = ()


class Heartbeat(Record, frozen=True, tag="heartbeat"):
    """The sender is alive and has received this many events.

    ``clock`` is that of a worker; ``streams`` and ``arcs`` are a server's; both report ``figures``.
    """

    sender: _Sender
    seen: _Count
    clock: _Word = 0
    streams: Annotated[tuple[StreamProgress, ...], Meta(max_length=1 << 14)] = ()
    arcs: Annotated[tuple[ArcLoad, ...], Meta(max_length=1 << 16)] = ()
    figures: Figures | None = None


class Events(Record, frozen=True, tag="news"):
    """Events, the first of which is number ``first`` (from 0)."""

    first: _Count
    events: tuple[AnyEvent, ...]
    generation: _Word = 0


Message: TypeAlias = (
    Request | Reply | Order | OrderReply | Assign | Assigned | CloseStreams | StreamsClosed | Heartbeat | Events
)

_CHECKSUM = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgpack_decoder(Message)
_body_decoder: msgspec.msgpack.Decoder[RequestBody] = msgpack_decoder(AnyRequest)
_figures_decoder: msgspec.msgpack.Decoder[Figures | None] = msgpack_decoder(Figures | None)


class MalformedMessageError(ProtocolError):
    """The received frames are not a message. ``reply`` has the frames of the answer, None for no answer."""

    def __init__(self, text: str, reply: list[bytes] | None = None) -> None:
        super().__init__(text)
        self.reply = reply


class PeerRefusedError(MalformedMessageError):
    """The peer refuses the messages of this process, whose version it does not read."""


def encode(message: Message) -> list[bytes]:
    """Return the frames of a message."""
    return framed(_encoder.encode(message))


def framed(message: bytes) -> list[bytes]:
    """Return the frames around an encoded message."""
    return [_PREAMBLE, _CHECKSUM.pack(zlib.crc32(message)) + message]


def form_bytes(form: TableRecord) -> int:
    """Return how many bytes the description of a table takes in a message."""
    return len(_encoder.encode(form))


def refusal(text: str) -> list[bytes]:
    """Return the frames of a refusal, which all versions read."""
    return [_PREAMBLE, b"", text.encode()]


def checked(body: RequestBody) -> RequestBody:
    """Return a request as it arrives."""
    try:
        sent = _encoder.encode(body)
    except (OverflowError, UnicodeEncodeError) as error:
        raise ValueError(f"{ascii(body)[:200]} cannot be sent to the scheduler: {error}") from None
    try:
        return _body_decoder.decode(sent)
    except msgspec.ValidationError as error:
        raise ValueError(f"the scheduler does not take this: {_named(msgspec.msgpack.decode(sent), error)}") from None


def checked_figures(figures: Figures | None) -> Figures | None:
    """Return figures as they arrive."""
    return _figures_decoder.decode(_encoder.encode(figures))


def decode(frames: list[bytes]) -> Message:
    """Read the frames of a message."""
    if not frames or len(frames[0]) != len(_PREAMBLE) or not frames[0].startswith(_MAGIC):
        raise MalformedMessageError("this is not a control message of shoal: is it the address of a scheduler?")
    if len(frames) == 3 and not frames[1]:
        raise PeerRefusedError(f"the other side refuses: {frames[2][:4096].decode(errors='replace')}")
    (version,) = struct.unpack_from("<H", frames[0], len(_MAGIC))
    if version != VERSION:
        text = f"control messages of version {version} meet version {VERSION}: install one shoal on all machines"
        raise MalformedMessageError(text, refusal(text))
    if len(frames) != 2 or len(frames[1]) > _LONGEST:
        raise MalformedMessageError(f"a control message of {len(frames)} frames, or longer than {_LONGEST} bytes")
    message = frames[1][_CHECKSUM.size :]
    if frames[1][: _CHECKSUM.size] != _CHECKSUM.pack(zlib.crc32(message)):
        raise MalformedMessageError("a control message that was damaged on its way")
    try:
        return _decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        fault = _fault(message, error)
    raise fault


def _fault(message: bytes, error: Exception) -> MalformedMessageError:
    raw = None
    if isinstance(error, msgspec.ValidationError):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError):
            raw = msgspec.msgpack.decode(message)
    what = _named(raw, error) if isinstance(error, msgspec.ValidationError) else str(error)
    text = f"a control message that cannot be read ({what})"
    return MalformedMessageError(text, _answer(raw, text))


def _answer(raw: Any, text: str) -> list[bytes]:
    """Make the frames that answer a message with a field out of bounds: those of a reply, if it was a request."""
    if isinstance(raw, list) and len(raw) >= 3 and raw[0] == "ask":
        number = raw[2]
        if isinstance(number, int) and not isinstance(number, bool) and 1 <= number < 1 << 62:
            return encode(Reply(number, ErrorReply("input", text)))
    return refusal(text)


_KINDS: dict[Any, type[Record]] = {
    kind.__struct_config__.tag: kind
    for union in (Message, AnyRequest, AnyReply, AnyOrder, AnyEvent)
    for kind in get_args(union)
}
_STEP = re.compile(r"\[(\d+)\]")


def _named(raw: Any, error: msgspec.ValidationError) -> str:
    """Describe which field of a message is wrong, by its name instead of its position."""
    what, _, path = str(error).partition(" - at ")
    names: list[str] = []
    at: Any = raw
    for step in map(int, _STEP.findall(path)):
        kind = _KINDS.get(at[0]) if isinstance(at, list) and at and isinstance(at[0], str) else None
        fields = () if kind is None else kind.__struct_fields__
        names.append(fields[step - 1] if 1 <= step <= len(fields) else str(step))
        at = at[step] if isinstance(at, list) and step < len(at) else None
    while names and names[0] == "body":
        del names[0]
    got = repr(at)[:80] if names else ""
    where = f"{'.'.join(names)} = {got}: " if names else ""
    return where + what
