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

__all__ = [
    "Call",
    "CallTrace",
    "EndpointState",
    "Frames",
    "MisroutedSlots",
    "Policy",
    "RequestPart",
    "WorkerIdentity",
    "new_call",
]

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
    """When to send again, and how much at a time. Times are in seconds.

    Parameters
    ----------
    resend_after : float
        Time without an answer after which a part is sent again.
    backoff : float
        Factor by which each further wait is longer.
    longest : float
        Upper bound of these waits.
    bytes_per_second : float
        Assumed lower bound of a connection's throughput: the bytes in flight add their share to `resend_after`.
    deferred_after : float
        As `resend_after`, for a part that the server has deferred: its answer may have been lost with a connection.
    pause : float
        After "not now" (retry, overloaded, not admitted yet, a server whose map is older), growing by `backoff`,
    longest_pause : float
        but no longer than this.
    credit : int
        Bytes in flight to one endpoint.
    message_bytes : int
        Payload of one message, request or answer. Larger parts are cut, so that both sides compute on some while others
        are transferred.
    largest_message : int
        Bytes that a server accepts.
    """

    resend_after: float = 1.0
    backoff: float = 2.0
    longest: float = 30.0
    bytes_per_second: float = 10e6
    deferred_after: float = 5.0
    pause: float = 0.02
    longest_pause: float = 1.0
    credit: int = 64 << 20
    message_bytes: int = 1 << 20
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
    timed: bool = False  # whether the answer shall have the server's times
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

    def sent(self, part: RequestPart) -> None:
        """Record that a request was sent: for the first time, or again."""

    def replied(self, part: RequestPart, status: Status) -> None:
        """Record a reply that is not the answer."""

    def answered(self, part: RequestPart, reply: Any) -> None:
        """Record the answer."""

    def given_up(self, part: RequestPart) -> None:
        """Record that no answer is awaited any more, unless there was one."""

    def settled(self, error: BaseException | None) -> None:
        """Record the end of the call. Further calls have no effect."""


@dataclass(slots=True, eq=False)
class Call:
    """One request of the user.

    Attributes
    ----------
    op, table, clock : int
    sequence : int
        Of a write; 0 of others.
    serial : int
        Order of submission, also of parts that are cut again.
    was_held : bool
        Whether it began later than it was submitted.
    done : bool
        Settled, with a result or an error.
    error : ShoalError or None
    result : object
        Of a pull and a state ``out``; contains uint8[n]; erase the rows erased; prefetch how many answers said that
        the servers have rows on disk; slot (hashes, rows); section
        (rows, bytes, bytes of the filter after them); save poll (whether it was known, bytes); stats, reduce, sweep
        and save begin one array for each endpoint, in slot order; others None.
    """

    op: int
    table: int
    clock: int
    started: float
    deadline: float
    sequence: int = 0
    serial: int = 0
    was_held: bool = False
    done: bool = False
    error: ShoalError | None = None
    result: Any = None
    on_done: Callable[[Call], None] | None = None
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
    """Describe a call.

    Parameters
    ----------
    op, table, clock : int
    now, deadline : float
        Seconds; the call is settled at the deadline at the latest.
    slots : int
        Of the store.
    hashes : uint64[m], optional
        Strictly ascending, with `begins`: uint64[slots + 1], slot s is ``hashes[begins[s]:begins[s + 1]]``. For
        pull, push, assign, erase, contains, state, prefetch; each endpoint gets its own hashes, none if it has none.
    values : float32[m, dim], optional
        Of push and assign.
    counts : uint32[m], optional
        Of push, 1 or more: how often each hash occurred, for tables that count. None: each once.
    out : array, optional
        Where answers are written: float32[m, dim] of pull, uint8[m] of contains, float32[m, width] of state.
    dim, aux : int
        As the op has them in its header; for a state, `dim` is that of the answer, 0 if unknown.
    slot : int, optional
        For slot, section, load rows and load filter: selects the endpoint, and is the default of `aux`.
        For save poll and save end: any slot of the endpoint.
    payload : sequence of buffers
        Of loads, saves, reduce and sweep, with `count` and `dtype`: the same for every endpoint.
    filter : Filter, optional
        Applied to a pull, a push or a prefetch.
    on_done : callable, optional
        Called with the call when it is settled, from the method that settles it (also from this one).
    ahead : int
        Clocks by which a pull is for a later one than `clock`: it waits as a pull of that clock does.
    dated : bool
        Whether the answers to a pull shall say which clocks they include: `Call.included`.
    whole : bool
        Whether the values of a pull or a push are whole rows, or changes of them; `dim` is their number of numbers.
    find_error : callable, optional
        Called with the answers of all endpoints: returns the error that they report, or None.
    trace : CallTrace, optional
        Records the call (:mod:`shoal.cluster.worker.tracing`).

    Raises
    ------
    ValueError
        An argument that the op needs is missing, or one that it does not have is present.
    """
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
