"""Control messages: what the scheduler and the other processes of a cluster tell each other.

Two frames: a preamble and one message in MessagePack.

    preamble   "SHOALCTL" and the version, u16 little-endian
    message    an array: a tag, then the fields, of one of the classes of `Message`

    peer -> scheduler    Ask(sender, number, body)      answered by Reply(number, body) of the same number
                         Heartbeat(sender, seen)        answered by News: what the peer has not seen
                         Done(sender, number, ...)      what came of an order
    scheduler -> peer    Order(number, body)            to servers: execute in the order of the numbers, once
                         News(first, events)            also unasked, when something happens

A sender is 16 random bytes that a process chooses for its life, so a connection that was cut and made again is the same
peer. Anything may be sent again: numbers tell what was seen. Nobody answers what is no message of this version, except
by a refusal in the form that all versions read: preamble, an empty frame, a text in UTF-8.

The version changes whenever a message does: all processes of a cluster run one version of shoal.

Threads: messages are immutable.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import msgspec

from shoal.errors import ProtocolError
from shoal.rpc.map import ClusterMap
from shoal.table import TableForm

__all__ = [
    "VERSION",
    "AddTable",
    "Admit",
    "Ask",
    "AskBody",
    "AskFigures",
    "AskMap",
    "AskTable",
    "AskTables",
    "Barrier",
    "Dismiss",
    "Done",
    "DropTable",
    "EndpointFigures",
    "Event",
    "Fault",
    "FiguresAre",
    "Heartbeat",
    "Hello",
    "Hold",
    "Join",
    "Joined",
    "Leave",
    "Left",
    "MapIs",
    "Message",
    "News",
    "Order",
    "OrderBody",
    "PartIs",
    "Passed",
    "Refused",
    "Reply",
    "ReplyBody",
    "Rules",
    "SchedulerStopped",
    "ServerGone",
    "StartJob",
    "TableForm",
    "TableIs",
    "TablesAre",
    "TakePart",
    "TellFigures",
    "Waiting",
    "Welcome",
    "WorkerGone",
    "decode",
    "encode",
    "refusal",
]

VERSION = 3
_MAGIC = b"SHOALCTL"
_PREAMBLE = _MAGIC + struct.pack("<H", VERSION)
_LONGEST = 1 << 24  # bytes of a message; the longest ones carry a map or the tables of a store


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Rules(_Message, frozen=True):
    """A job's consistency: ``mode``, ``waits`` and ``mean`` of :class:`shoal.consistency.Consistency`."""

    mode: str
    waits: int
    mean: bool

    def __str__(self) -> str:
        if self.mode == "bsp":
            return f"BSP(reduce={'mean' if self.mean else 'sum'!r})"
        return f"SSP(staleness={self.waits})" if self.mode == "ssp" else "ASP()"


# --- what a peer asks, and the replies ----------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    """The first words of every peer. ``about`` names the process in messages.

    ``role`` is "server", "worker", or "launcher": who starts a worker's program, and waits for its end.
    """

    role: str
    about: str


class Welcome(_Message, frozen=True, tag="welcome"):
    """What a peer needs before it can join. ``host`` is where its connection comes from."""

    cluster: str
    host: str
    slots: int
    heartbeat: float  # seconds
    dead_after: float  # seconds of silence
    seen: int  # events so far, which do not concern it


class Join(_Message, frozen=True, tag="join"):
    """A peer is ready. The reply may take as long as others need to join; until then it is Waiting.

    A server says where its endpoints are (tcp://host:port; an empty host or 0.0.0.0 stands for where the connection
    comes from), a worker what it takes for granted of the job.
    """

    rank: int | None = None
    addresses: tuple[str, ...] = ()
    workers: int | None = None
    rules: Rules | None = None


class Joined(_Message, frozen=True, tag="joined"):
    """A peer is in. ``incarnation``, ``job`` and ``clock`` are for workers: where they begin."""

    rank: int
    map: ClusterMap
    tables: tuple[TableIs, ...]
    incarnation: int = 0
    job: int = 0
    clock: int = 0
    num_workers: int = 0


class AskMap(_Message, frozen=True, tag="ask-map"):
    """Which endpoint owns which slots?"""  # noqa: D400


class MapIs(_Message, frozen=True, tag="map"):
    """The map."""

    map: ClusterMap


class AskTable(_Message, frozen=True, tag="ask-table"):
    """A table of this description is to be there."""

    form: TableForm


class TableIs(_Message, frozen=True, tag="table"):
    """A table that all servers have. Its description may not be the one that was asked for: the first one counts."""

    id: int
    form: TableForm


class AskTables(_Message, frozen=True, tag="ask-tables"):
    """Which tables are there?"""  # noqa: D400


class TablesAre(_Message, frozen=True, tag="tables"):
    """All tables."""

    tables: tuple[TableIs, ...]


class Barrier(_Message, frozen=True, tag="barrier"):
    """A worker has come to a barrier."""

    name: str


class Passed(_Message, frozen=True, tag="passed"):
    """All workers of the job that are alive have come to the barrier."""


class TakePart(_Message, frozen=True, tag="take-part"):
    """A worker wants a part of the data, in its ``pass_number``-th pass, and has finished another, -1 for none.

    All workers cut the data alike: ``count`` parts, of files that ``digest`` stands for. ``clock`` is the worker's.
    """

    pass_number: int
    count: int
    digest: str
    finished: int
    reissue: float
    clock: int


class PartIs(_Message, frozen=True, tag="part"):
    """The part to train on, None if there is none at present; or the clock at which the pass is over for all."""

    part: int | None
    end: int | None


class AskFigures(_Message, frozen=True, tag="ask-figures"):
    """What have the servers counted?"""  # noqa: D400


class EndpointFigures(_Message, frozen=True):
    """What an endpoint has counted."""

    server: int
    address: str
    figures: dict[str, Any]


class FiguresAre(_Message, frozen=True, tag="figures"):
    """What all endpoints have counted, in the order of their slots."""

    endpoints: tuple[EndpointFigures, ...]


class Leave(_Message, frozen=True, tag="leave"):
    """A peer goes, on purpose. ``status`` is what a launcher's program ended with."""

    status: int = 0


class Left(_Message, frozen=True, tag="left"):
    """It is forgotten: nobody waits for it."""


class Waiting(_Message, frozen=True, tag="waiting"):
    """The reply will come later; ``text`` says what it waits for."""

    text: str


class Refused(_Message, frozen=True, tag="refused"):
    """It will not be done. ``kind``: "input", "memory", "protocol", "not-connected", "server-lost" or "fenced"."""

    kind: str
    text: str


# --- what the scheduler orders servers to do ----------------------------------------------------------------------


class StartJob(_Message, frozen=True, tag="start-job"):
    """Begin a job: clocks at 0, the workers' ranks 0..n-1 admitted with these incarnations.

    ``before`` is how many clocks the last job had: the tables' own clocks go on behind them.
    """

    job: int
    rules: Rules
    incarnations: tuple[int, ...]
    before: int = 0


class Hold(_Message, frozen=True, tag="hold"):
    """Advance no clock past the greatest that any worker has reached here, and say which that is."""


class Admit(_Message, frozen=True, tag="admit"):
    """Let a worker in, at a clock; this ends a hold."""

    rank: int
    incarnation: int
    clock: int


class Dismiss(_Message, frozen=True, tag="dismiss"):
    """A worker is gone: wait for it no more, and take nothing from it. Say which clock any worker has reached."""

    rank: int
    incarnation: int


class AddTable(_Message, frozen=True, tag="add-table"):
    """Make an empty table. A server that has no room for it refuses, and is as it was before."""

    id: int
    form: TableForm


class DropTable(_Message, frozen=True, tag="drop-table"):
    """Have no such table: another server refused it."""

    id: int


class TellFigures(_Message, frozen=True, tag="tell-figures"):
    """Say what your endpoints have counted."""


# --- what happened ------------------------------------------------------------------------------------------------


class ServerGone(_Message, frozen=True, tag="server-gone"):
    """A server is lost, and its rows with it. ``text`` says which one, and ``why``; each stands alone."""

    rank: int
    text: str
    why: str


class WorkerGone(_Message, frozen=True, tag="worker-gone"):
    """A worker was taken for dead. ``text`` says which one, and why."""

    rank: int
    incarnation: int
    text: str


class SchedulerStopped(_Message, frozen=True, tag="scheduler-stopped"):
    """The scheduler was told to end, and the cluster ends with it."""


AskBody: TypeAlias = Hello | Join | AskMap | AskTable | AskTables | Barrier | TakePart | AskFigures | Leave
ReplyBody: TypeAlias = (
    Welcome | Joined | MapIs | TableIs | TablesAre | Passed | PartIs | FiguresAre | Left | Waiting | Refused
)
OrderBody: TypeAlias = StartJob | Hold | Admit | Dismiss | AddTable | DropTable | TellFigures
Event: TypeAlias = ServerGone | WorkerGone | SchedulerStopped


# --- envelopes ----------------------------------------------------------------------------------------------------


class Ask(_Message, frozen=True, tag="ask"):
    """A request. Numbers of a sender start at 1 and rise."""

    sender: bytes
    number: int
    body: AskBody


class Reply(_Message, frozen=True, tag="reply"):
    """The answer to a request."""

    number: int
    body: ReplyBody


class Order(_Message, frozen=True, tag="order"):
    """Something to do. Numbers start at 1 and rise by 1."""

    number: int
    body: OrderBody


class Done(_Message, frozen=True, tag="done"):
    """An order is executed: what came of it, or a fault, a text, after which the server is of no use.

    ``figures`` are those of each endpoint. A server that has ``refused`` an order is as it was before it.
    """

    sender: bytes
    number: int
    result: int = 0
    fault: str = ""
    figures: tuple[dict[str, Any], ...] = ()
    refused: Refused | None = None


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
    """The sender is alive, and has seen that many events."""

    sender: bytes
    seen: int


class News(_Message, frozen=True, tag="news"):
    """Events, the first of which is number ``first`` (from 0)."""

    first: int
    events: tuple[Event, ...]


Message: TypeAlias = Ask | Reply | Order | Done | Heartbeat | News

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Fault(ProtocolError):
    """What came is no message. ``reply`` is what to tell the other side, None if it is not to be answered."""

    def __init__(self, text: str, reply: list[bytes] | None = None) -> None:
        super().__init__(text)
        self.reply = reply


def encode(message: Message) -> list[bytes]:
    """Make the frames of a message."""
    return [_PREAMBLE, _encoder.encode(message)]


def refusal(text: str) -> list[bytes]:
    """Make the frames of a refusal, which all versions read."""
    return [_PREAMBLE, b"", text.encode()]


def decode(frames: list[bytes]) -> Message:
    """Read the frames of a message.

    Raises
    ------
    Fault
        They are none; or they are a refusal, whose text the error has.
    """
    if not frames or len(frames[0]) != len(_PREAMBLE) or not frames[0].startswith(_MAGIC):
        raise Fault("what came is no control message of shoal: is the address that of a scheduler?")
    if len(frames) == 3 and not frames[1]:
        raise Fault(f"the other side refuses: {frames[2][:4096].decode(errors='replace')}")
    (version,) = struct.unpack_from("<H", frames[0], len(_MAGIC))
    if version != VERSION:
        text = f"control messages of version {version} meet version {VERSION}: install one shoal on all machines"
        raise Fault(text, refusal(text))
    if len(frames) != 2 or len(frames[1]) > _LONGEST:
        raise Fault(f"a control message of {len(frames)} frames, or longer than {_LONGEST} bytes")
    try:
        return _decoder.decode(frames[1])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        text = f"a control message that cannot be read ({error}): install one shoal on all machines"
        raise Fault(text, refusal(text)) from None
