"""Calls of a worker, the parts that they are cut into, and the state of the endpoints that the parts go to.

A *call* is one operation that the user requested. A *part* is one message of a call, to one endpoint.

Threads: one at a time; the owner locks.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.cluster.worker.filters import EncodedPayload, Filter
from shoal.errors import ShoalError

Op = _core.Op
Status = _core.Status
Dtype = _core.WireDtype

Hashes: TypeAlias = npt.NDArray[np.uint64]
Frames: TypeAlias = list[Any]  # buffers: bytes, arrays, memoryviews, zmq.Frames

HEADER_BYTES = 64
OPS_WITHOUT_TABLE = frozenset({Op.TICK, Op.SAVE_BEGIN, Op.SAVE_POLL, Op.SAVE_END})
_KEYED = frozenset({Op.PULL, Op.PUSH, Op.ASSIGN, Op.ERASE, Op.CONTAINS, Op.STATE, Op.PREFETCH})
_ONE_SLOT = frozenset({Op.SLOT, Op.SECTION, Op.LOAD_ROWS, Op.LOAD_FILTER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When to send again, and how much at a time. Times are in seconds."""

    # Time without an answer after which a part is sent again.
    resend_after: float = 1.0
    # Factor by which each further wait is longer.
    backoff: float = 2.0
    # Upper bound of these waits.
    longest: float = 30.0
    # Assumed lower bound of a connection's throughput: the bytes in flight add their share to `resend_after`.
    bytes_per_second: float = 10e6
    # As `resend_after`, for a part that the server has deferred: its answer may have been lost with a connection.
    deferred_after: float = 5.0
    # After "not now" (retry, overloaded, not admitted yet, a server whose map is older), growing by `backoff`,
    pause: float = 0.02
    # but no longer than this.
    longest_pause: float = 1.0
    # Bytes in flight to one endpoint.
    credit: int = 64 << 20
    # Payload of one message, request or answer. Larger parts are cut, so that both sides compute on some while others
    # are transferred.
    message_bytes: int = 1 << 20
    # Bytes that a server accepts.
    largest_message: int = 64 << 20


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The numbers by which servers know a worker; the scheduler assigns them when the worker joins."""

    rank: int
    incarnation: int
    job: int


@dataclass(slots=True, eq=False)
class RequestPart:
    """One message of a call."""

    call: Call
    address: str
    server: int
    first_slot: int
    end_slot: int
    begin: int  # index into the call's hashes
    end: int
    sequence: int = 0
    number: int = 0
    key: tuple[str, int, int] = ("", 0, 0)
    message: Frames | None = None  # encoded when it is first sent
    sent_as: EncodedPayload | None = None  # None without a filter
    counted: bool = False  # whether its last frame has counts
    bytes: int = 0  # of request and answer
    charged: bool = False
    last: Status = Status.OK  # of the last reply that did not settle the part
    sent: float = math.nan
    due: float = math.nan
    tries: int = 0
    pauses: int = 0
    doubts: int = 0

    @property
    def label(self) -> str:
        """The endpoint in messages to users."""
        return f"server {self.server} at {self.address}"


@dataclass(slots=True, eq=False)
class MisroutedSlots:
    """Slots of a call that an endpoint has refused, and that wait for a newer map."""

    call: Call
    first_slot: int
    end_slot: int
    pauses: int


@dataclass(slots=True, eq=False)
class EndpointState:
    """The state that this worker keeps of one endpoint."""

    address: str
    server: int
    queue: deque[RequestPart] = field(default_factory=deque)
    reads: Counter[int] = field(default_factory=Counter)  # unanswered parts, by clock
    lists: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # digests of key lists that it has received
    bytes: int = 0  # in flight
    first_sent: float = math.nan
    last_reply: float = math.nan
    ends: int = 0  # number of ended connections
    ended: str = ""  # reason of the last end

    def silence(self, now: float) -> str:
        """Describe, in messages to users, when the endpoint last answered."""
        times = "once" if self.ends == 1 else f"{self.ends} times, last"
        ends = f"; its connection has ended {times}: {self.ended}" if self.ends else ""
        if self.last_reply == self.last_reply:
            return f"last answer {now - self.last_reply:.1f} s ago{ends}"
        if self.first_sent == self.first_sent:
            return f"no answer in the {now - self.first_sent:.1f} s since the first request{ends}"
        return "nothing sent yet: other requests come first"


class CallTrace(Protocol):
    """Records what happens to a call."""

    def note(self, part: RequestPart, what: str, now: float, detail: Any = None) -> None:
        """Note what happened to a request: see :meth:`.Trace.note`."""

    def end(self, error: BaseException | None, now: float) -> None:
        """Note that the call is settled."""


@dataclass(slots=True, eq=False)
class Call:
    """One request of the user."""

    op: int
    table: int
    clock: int
    started: float
    deadline: float
    # Of a write; 0 of others.
    sequence: int = 0
    # Order of submission, also of parts that are cut again.
    serial: int = 0
    # Whether it began later than it was submitted.
    was_held: bool = False
    # Settled, with a result or an error.
    done: bool = False
    error: ShoalError | None = None
    # Of a pull and a state `out`; contains uint8[n]; erase the rows erased; prefetch how many answers said that the
    # servers have rows on disk; slot (hashes, rows); section (rows, bytes, bytes of the filter after them); save poll
    # (whether it was known, bytes); stats, reduce, sweep and save begin one array for each endpoint, in slot order;
    # others None.
    result: Any = None
    on_done: Callable[[Call], None] | None = None
    callbacks: tuple[Callable[[], object], ...] = ()  # called after it is settled, without a lock
    find_error: Callable[[Any], ShoalError | None] | None = None
    trace: CallTrace | None = None  # of a call that is traced
    hashes: Hashes | None = None
    begins: npt.NDArray[np.uint64] | None = None
    values: npt.NDArray[Any] | None = None
    counts: npt.NDArray[np.uint32] | None = None
    out: npt.NDArray[Any] | None = None
    slot: int | None = None
    tables: npt.NDArray[np.uint32] | None = None
    dtype: int = Dtype.NONE
    dim: int = 0
    aux: int = 0
    count: int = 0
    payload: Frames = field(default_factory=list)
    filter: Filter | None = None
    ahead: int = 0  # clocks by which a pull is for a later one: it waits as a pull of that clock does
    dated: bool = False  # whether the answers shall say which clocks they include
    whole: bool = False  # whether values are whole rows, or what local steps have changed in them
    included: int | None = None  # clocks that all answers of a dated pull include
    parts: dict[RequestPart, None] = field(default_factory=dict)  # queued or sent, not answered
    misrouted: int = 0  # runs of slots that wait for a map
    next_number: dict[str, int] = field(default_factory=dict)  # address -> number of its next part
    answers: dict[str, Any] = field(default_factory=dict)  # of a call to every endpoint: by address
    total: int = 0

    def get(self) -> Any:
        """Return the result of a settled call, or raise its error."""
        if self.error is not None:
            raise self.error
        return self.result

    @property
    def name(self) -> str:
        """The call in messages to users."""
        what = f" of table {self.table}" if self.op not in OPS_WITHOUT_TABLE else ""
        return f"{Op(self.op).name.lower().replace('_', ' ')}{what} at clock {self.clock}"


def new_call(
    op: int,
    table: int,
    clock: int,
    now: float,
    deadline: float,
    slots: int,
    *,
    hashes: Hashes | None = None,
    begins: npt.NDArray[np.uint64] | None = None,
    values: npt.NDArray[Any] | None = None,
    counts: npt.NDArray[np.uint32] | None = None,
    out: npt.NDArray[Any] | None = None,
    dim: int = 0,
    aux: int = 0,
    slot: int | None = None,
    payload: Sequence[Any] = (),
    count: int = 0,
    dtype: int | None = None,
    filter: Filter | None = None,
    on_done: Callable[[Call], None] | None = None,
    ahead: int = 0,
    dated: bool = False,
    whole: bool = False,
    find_error: Callable[[Any], ShoalError | None] | None = None,
    trace: CallTrace | None = None,
) -> Call:
    """Describe a call."""
    call = Call(op, table, clock, now, deadline)
    call.on_done = on_done
    call.find_error = find_error
    call.trace = trace
    call.ahead, call.dated, call.whole = ahead, dated, whole
    call.filter = filter if op in (Op.PULL, Op.PUSH, Op.PREFETCH) else None
    call.hashes, call.begins, call.values, call.out = hashes, begins, values, out
    call.counts = counts
    call.dim, call.aux, call.count, call.payload = dim, aux, count, list(payload)
    if op in _KEYED:
        if hashes is None or begins is None or len(begins) != slots + 1:
            raise ValueError(f"a {Op(op).name.lower()} needs hashes, and begins of {slots} slots")
        if (out is None) == (op in (Op.PULL, Op.CONTAINS, Op.STATE)):
            raise ValueError(f"a {Op(op).name.lower()} {'needs' if out is None else 'has no'} out")
        call.dtype = Dtype.FLOAT32 if op in (Op.PULL, Op.PUSH, Op.ASSIGN) else Dtype.NONE
    elif op in _ONE_SLOT:
        if slot is None:
            raise ValueError(f"a {Op(op).name.lower()} needs a slot")
        call.slot = slot
        if op not in (Op.LOAD_ROWS, Op.LOAD_FILTER):
            call.aux = slot
    elif op in (Op.SAVE_POLL, Op.SAVE_END):
        call.slot = slot
    if dtype is not None:
        call.dtype = Dtype(dtype)
    elif op in (Op.LOAD_ROWS, Op.LOAD_FILTER, Op.SAVE_POLL):
        call.dtype = Dtype.UINT8
    elif op in (Op.REDUCE, Op.SWEEP):
        call.dtype = Dtype.FLOAT64
    return call
