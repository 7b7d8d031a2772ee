"""A worker's requests under way: cut by endpoint, sent, sent again, answered or given up. No I/O, no clock of its own.

Idea. A *call* is what the user asked for; it is cut into *parts*, one message each, along the slots of the map's
endpoints. Whoever owns the sockets sends what is in :attr:`Requests.outgoing` and hands in what arrives; the time is an
argument everywhere. So the same code runs over ZeroMQ and in a simulated network, and everything that makes a write
happen exactly once on the worker's side is in this file and nowhere else.

    submit -> queued --credit, window--> sent --answer-----------------------> done
                                         |  ^--silence, "not now": again, later
                                         |--deferred: it arrived, the answer follows
                                         '--wrong epoch: its refused slots wait for a newer map, then are queued again

What names a part is (address, sequence, part number), and every reply repeats it. All parts of a write carry the
sequence of their call, so that a slot, which remembers the sequences that it has seen, takes each call once wherever
and however often its part arrives. Reads and ticks may be repeated at will; each of their parts has a sequence of its
own, from 2^63 up.

Invariants
    I1  A write's sequence is less than 64 above the lowest one that is not settled, or the write waits: that is as far
        back as a slot remembers.
    I2  Bytes on the wire to an endpoint, requests and the answers they ask for, are at most `credit`, but for one part
        alone, and parts that are sent again. A part that is deferred, or was told to come again, is not on the wire.
    I3  Parts leave for an endpoint in the order in which they were submitted; only repetitions overtake.
    I4  A settled call is never written to: an answer that comes late finds nobody.
    I5  A tick leaves for an endpoint behind the pushes of its clock, when the reads of its clock there have been
        answered (asked again later, they could see too much), and while no slot of its clock is refused anywhere.
        Where clocks are atomic, and there are several endpoints, it also waits until all have acknowledged the pushes
        of its clock and the tick before: an endpoint that has taken a tick proves that every endpoint has the pushes of
        its clock, so if this worker dies the clock can still end everywhere, and no two endpoints are more than a tick
        apart.
    I6  Every call that is not settled has a time at which `on_time` does something about it: its deadline, at last.

Threads: one at a time; the owner locks. Arrays are sliced, not copied: whoever submits leaves them as they are until
the call is settled.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.cluster.protocol.slot_map import ClusterMap, Endpoint
from shoal.cluster.worker.filters import EncodedPayload, Filter
from shoal.errors import (
    DeadlineExceededError,
    FencedError,
    MemoryBudgetExceededError,
    NotConnectedError,
    ProtocolError,
    ServerLostError,
    ShoalError,
)

__all__ = ["Call", "Policy", "Requests", "WorkerIdentity"]

Op = _core.Op
Status = _core.Status
Dtype = _core.WireDtype

Hashes: TypeAlias = npt.NDArray[np.uint64]
Frames: TypeAlias = list[Any]  # of what lends its bytes: bytes, arrays, memoryviews, zmq.Frames

WINDOW = 64
_MOST_LISTS = 4096  # of an endpoint's whose digests are remembered here
_READS = 2**63  # their first sequence
_HEADER = 64
_MOST_PARTS = 128  # of a call at one endpoint: a part's number is a byte, and a newer map may need some more
_DOUBTS = 4  # a request that is told to be bad may have been damaged on its way: it is sent again as often

_KEYED = frozenset({Op.PULL, Op.PUSH, Op.ASSIGN, Op.ERASE, Op.CONTAINS, Op.STATE})
_ONE_SLOT = frozenset({Op.SLOT, Op.SECTION, Op.LOAD_ROWS, Op.LOAD_FILTER})
_WRITES = frozenset(
    {Op.PUSH, Op.ASSIGN, Op.ERASE, Op.LOAD_BEGIN, Op.LOAD_ROWS, Op.LOAD_FILTER, Op.LOAD_END, Op.SAVE_BEGIN, Op.SAVE_END}
)
_NUMBERS = frozenset({Op.STATS, Op.REDUCE, Op.SWEEP, Op.SAVE_BEGIN})  # whose answers are a list of the endpoints'
_OF_NO_TABLE = frozenset({Op.TICK, Op.SAVE_BEGIN, Op.SAVE_POLL, Op.SAVE_END})
_OF_A_CLOCK = frozenset({Op.PUSH, Op.SWEEP})  # the writes that servers keep for the end of their clock
_NOT_NOW = frozenset({Status.RETRY, Status.OVERLOADED, Status.NOT_ADMITTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When to send again, and how much at a time. Times in seconds.

    Parameters
    ----------
    resend_after : float
        Silence after which a part is sent again.
    backoff : float
        Each further time waits as many times longer,
    longest : float
        but no longer than this.
    bytes_per_second : float
        A link is taken to move at least as much: what is on the wire already adds its share to `resend_after`.
    deferred_after : float
        As `resend_after`, for a part that the server has deferred: its answer may have been lost with a connection.
    pause : float
        After "not now" (retry, overloaded, not admitted yet, a server whose map is older), growing by `backoff`,
    longest_pause : float
        but no longer than this.
    credit : int
        Bytes under way at one endpoint.
    message_bytes : int
        Of the payload of one message, request or answer; larger parts are cut, so that both sides work on some while
        others are on the wire. Parts of 1 to 4 MiB took a third to a half of the time of one part of 6 or 25 MiB.
    largest_message : int
        What a server takes.
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
    """Who asks: given by the scheduler when the worker joins."""

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
    begin: int  # of the call's hashes
    end: int
    sequence: int = 0
    number: int = 0
    key: tuple[str, int, int] = ("", 0, 0)
    serial: int = 0  # in the order of submission
    message: Frames | None = None  # made when it is first sent
    sent_as: EncodedPayload | None = None  # where it went through a filter
    counted: bool = False  # its last frame is of counts
    bytes: int = 0  # of request and answer
    charged: bool = False
    last: Status = Status.OK  # of the last reply that did not settle it
    sent: float = math.nan
    due: float = math.nan
    tries: int = 0
    pauses: int = 0
    doubts: int = 0


@dataclass(slots=True, eq=False)
class MisroutedSlots:
    """Slots of a call that wait for a newer map."""

    serial: int
    call: Call
    first_slot: int
    end_slot: int
    pauses: int


@dataclass(slots=True, eq=False)
class _Peer:
    """What is known of one endpoint."""

    address: str
    server: int
    queue: deque[RequestPart] = field(default_factory=deque)
    reads: Counter[int] = field(default_factory=Counter)  # by clock: parts that are not answered
    lists: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # digests of key lists that it was given
    bytes: int = 0  # on the wire
    asked: float = math.nan  # first
    heard: float = math.nan  # last
    ends: int = 0  # of connections
    ended: str = ""  # why the last one did

    def silence(self, now: float) -> str:
        ends = f"; its connection ended {self.ends} times, last time: {self.ended}" if self.ends else ""
        if self.heard == self.heard:
            return f"last heard of {now - self.heard:.1f} s ago{ends}"
        if self.asked == self.asked:
            return f"never heard of in the {now - self.asked:.1f} s since it was first asked{ends}"
        return "never asked, for others were before this"


@dataclass(slots=True, eq=False)
class Call:
    """One request of the user.

    Attributes
    ----------
    op, table, clock : int
    sequence : int
        Of a write; 0 of others.
    done : bool
        Settled, with a result or an error.
    error : ShoalError or None
    result : object
        Of a pull and a state ``out``; contains uint8[n]; erase the rows erased; slot (hashes, rows); section
        (rows, bytes, bytes of the filter behind them); save poll (whether it was known, bytes); stats, reduce, sweep
        and save begin one array for each endpoint, in slot order; others None.
    """

    op: int
    table: int
    clock: int
    started: float
    deadline: float
    sequence: int = 0
    done: bool = False
    error: ShoalError | None = None
    result: Any = None
    on_done: Callable[[Call], None] | None = None
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
    _parts: dict[RequestPart, None] = field(default_factory=dict)  # queued or sent, not answered
    _refused: int = 0  # runs of slots that wait for a map
    _numbers: dict[str, int] = field(default_factory=dict)  # address -> number of its next part
    _order: dict[int, tuple[str, Any]] = field(default_factory=dict)  # first slot -> who answered what, where all do
    _total: int = 0

    def get(self) -> Any:
        """Return the result of a settled call, or raise its error."""
        if self.error is not None:
            raise self.error
        return self.result

    @property
    def name(self) -> str:
        """What it is, in a message to the user."""
        what = f" of table {self.table}" if self.op not in _OF_NO_TABLE else ""
        return f"{Op(self.op).name.lower().replace('_', ' ')}{what} at clock {self.clock}"


class Requests:
    """The requests of one worker.

    Parameters
    ----------
    worker : WorkerIdentity
    map : ClusterMap
    policy : Policy, optional
    atomic_clocks : bool
        Whether a clock has to end everywhere or nowhere, even if this worker dies: where pushes act at the end of their
        clock (BSP). Where there are several
        endpoints, it costs each clock a round trip.

    Attributes
    ----------
    outgoing : deque of (address, frames)
        To be sent, in order. What cannot be sent may be dropped: it is taken for lost, and comes again.
    counts : Counter
        sent, resent, answers, strays (of nobody, or late), garbled, deferred, refused (slots), retry, overloaded,
        not_admitted, bad_request, reconnected.
    """

    def __init__(
        self, worker: WorkerIdentity, map: ClusterMap, policy: Policy | None = None, *, atomic_clocks: bool = True
    ) -> None:
        self.worker = worker
        self.map = map
        self.policy = policy or Policy()
        self._atomic_clocks = atomic_clocks
        self._ticks: dict[Call, None] = {}  # not settled, in their order
        self._kept: Counter[int] = Counter()  # by clock: parts, not answered, of what servers keep for its end
        self.outgoing: deque[tuple[str, Frames]] = deque()
        self.counts: Counter[str] = Counter()
        self._peers: dict[str, _Peer] = {}
        self._parts: dict[tuple[str, int, int], RequestPart] = {}  # sent, not answered
        self._calls: set[Call] = set()  # not settled
        self._open: dict[int, Call] = {}  # writes that are not settled, by sequence, ascending
        self._refused: list[MisroutedSlots] = []
        self._lost: dict[str, str] = {}  # address -> why
        self._closed: ShoalError | None = None
        self._write = 0  # last sequences
        self._read = _READS - 1
        self._times: list[tuple[float, int, RequestPart | Call]] = []  # a heap; stale entries are passed over
        self._made = 0

    # --- asking -------------------------------------------------------------------------------------------------

    def submit(
        self,
        op: int,
        table: int,
        clock: int,
        now: float,
        deadline: float,
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
        write: bool | None = None,
        filter: Filter | None = None,
        on_done: Callable[[Call], None] | None = None,
    ) -> Call:
        """Begin a call.

        Parameters
        ----------
        op, table, clock : int
        now, deadline : float
            Seconds; the call is settled at the deadline at the latest.
        hashes : uint64[m], optional
            Ascending strictly, with `begins`: uint64[slots + 1], slot s is ``hashes[begins[s]:begins[s + 1]]``. Of
            pull, push, assign, erase, contains, state; each endpoint gets what is its own, and one without any nothing.
        values : float32[m, dim], optional
            Of push and assign.
        counts : uint32[m], optional
            Of push, 1 or more: how often each hash occurred, for tables that count. None: each once.
        out : array, optional
            Where answers are written: float32[m, dim] of pull, uint8[m] of contains, float32[m, width] of state.
        dim, aux : int
            As the op has them in its header; for a state `dim` is what the answer has, where it is known (0: it tells).
        slot : int, optional
            Of slot, section, load rows and load filter: whose endpoint is asked. `aux` is the slot, then, unless given.
            Of save poll and save end: any slot of the endpoint that is asked.
        payload : sequence of buffers
            Of loads, saves, reduce and sweep, with `count` and `dtype`: the same to every endpoint asked.
        write : bool, optional
            Whether it must happen exactly once, where the op alone does not tell (reduce, sweep).
        filter : Filter, optional
            Through which a pull or a push goes.
        on_done : callable, optional
            Called with the call when it is settled, from whatever method settles it (also from this one).

        Returns
        -------
        Call
            Settled at once where nothing is to be asked, a server is lost, or the requests are closed.

        Raises
        ------
        ValueError
            One slot's rows do not fit into a message.
        """
        call = Call(op, table, clock, now, deadline)
        call.on_done = on_done
        call.filter = filter if op in (Op.PULL, Op.PUSH) else None
        call.hashes, call.begins, call.values, call.out = hashes, begins, values, out
        call.counts = counts
        call.dim, call.aux, call.count, call.payload = dim, aux, count, list(payload)
        if op in _KEYED:
            if hashes is None or begins is None or len(begins) != self.map.slots + 1:
                raise ValueError(f"a {Op(op).name.lower()} needs hashes, and begins of {self.map.slots} slots")
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
        return self._begin(call, op in _WRITES if write is None else write, now)

    def tick(
        self,
        clock: int,
        tables: Sequence[int],
        now: float,
        deadline: float,
        *,
        on_done: Callable[[Call], None] | None = None,
    ) -> Call:
        """End a clock: tell every endpoint which pushes of it there were.

        Parameters
        ----------
        clock : int
            The clock that ends. The pushes that were submitted with it, and did not fail, are listed.
        tables : sequence of int
            Tables that this worker pushed to in this clock.
        now, deadline : float
            The time that it has begins when it is sent, behind the reads of its clock.

        Returns
        -------
        Call
            Settled when every endpoint has taken it. Nothing needs to wait for that: if it fails, all that is
            submitted afterwards fails with its error.
        """
        call = Call(Op.TICK, 0, clock, now, deadline)
        call.on_done = on_done
        call.tables = np.unique(np.asarray(tables, np.uint32))
        self._ticks[call] = None
        return self._begin(call, False, now)

    def _begin(self, call: Call, write: bool, now: float) -> Call:
        if self._closed is not None:
            return self._settle(call, now, self._closed)
        parts = list(self._cut(call, 0, self.map.slots))
        for part in parts:
            if part.address in self._lost:
                return self._settle(call, now, self._server_lost(part, now))
        if not parts:
            if call.op == Op.ERASE:
                call.result = 0
            elif call.out is not None:
                call.result = call.out
            return self._settle(call, now)
        if write:
            self._write += 1
            call.sequence = self._write
            self._open[call.sequence] = call
        self._calls.add(call)
        self._later(call.deadline, call)
        for part in parts:
            self._queue(part, now)
        return call

    # --- cutting ------------------------------------------------------------------------------------------------

    def _cut(self, call: Call, first: int, end: int) -> Iterator[RequestPart]:
        """Yield a part for each message that slots [first, end) of a call need, by the present map."""
        for endpoint in self._endpoints(call, first, end):
            low, high = max(first, endpoint.first_slot), min(end, endpoint.end_slot)
            begins = call.begins
            if begins is None:
                yield RequestPart(call, endpoint.address, endpoint.server, low, high, 0, 0)
                continue
            fewest = -(-int(begins[high] - begins[low]) // _MOST_PARTS)
            rows = max(fewest, self.policy.message_bytes // self._row_bytes(call), 1)
            # Between slots only: a slot takes a sequence once.
            while low < high and begins[low] < begins[high]:
                cut = high
                if begins[high] - begins[low] > rows:
                    cut = max(int(np.searchsorted(begins, begins[low] + np.uint64(rows), "right")) - 1, low + 1)
                begin, stop = int(begins[low]), int(begins[cut])
                if stop > begin:
                    self._check_fits(call, low, cut, stop - begin)
                    yield RequestPart(call, endpoint.address, endpoint.server, low, cut, begin, stop)
                low = cut

    def _check_fits(self, call: Call, first: int, end: int, rows: int) -> None:
        size = rows * (8 + (0 if call.values is None else call.values.itemsize * call.dim))
        size += 0 if call.counts is None else -(-rows // 8) + 5 * rows
        if size > self.policy.largest_message:
            raise ValueError(
                f"{rows} rows of slots {first} to {end} are {size} bytes of a {Op(call.op).name.lower()}, and a server "
                f"takes at most {self.policy.largest_message} in a message: pass fewer keys at a time"
            )

    def _endpoints(self, call: Call, first: int, end: int) -> Sequence[Endpoint]:
        if call.slot is not None:
            return [self.map.of_slot(call.slot)]
        endpoints = self.map.endpoints
        if first == 0 and end == self.map.slots:
            return endpoints
        at = bisect_right(endpoints, first, key=lambda endpoint: endpoint.end_slot)
        return [endpoint for endpoint in endpoints[at:] if endpoint.first_slot < end]

    def _row_bytes(self, call: Call) -> int:
        """Return the bytes of a row in the larger of request and answer."""
        return 8 + (4 * call.dim if call.op in (Op.PULL, Op.PUSH, Op.ASSIGN, Op.STATE) else 0)

    def _payload(self, part: RequestPart) -> Frames:
        call = part.call
        if call.op == Op.TICK:
            assert call.tables is not None
            return [np.array([self._mark(push) for push in self._listed(part)], np.uint64), call.tables]
        if call.hashes is None:
            return call.payload
        hashes = call.hashes[part.begin : part.end]
        if call.filter is not None:
            known = self._peer(part).lists
            if part.sent_as is not None:  # made before: another list stands in front
                return part.sent_as.frames
            if call.values is None:
                part.sent_as = call.filter.pull(hashes, known)
            else:
                part.sent_as = call.filter.push(hashes, call.values[part.begin : part.end], part.sequence, known)
                part.sent_as.frames += self._counts(part)
            return part.sent_as.frames
        frames: Frames = [hashes]
        if call.values is not None:
            frames.append(call.values[part.begin : part.end])
        return frames + self._counts(part)

    @staticmethod
    def _counts(part: RequestPart) -> Frames:
        """Say how often each row occurred, where not all did once; note it for the header."""
        counts = part.call.counts
        packed = None if counts is None else _core.pack_counts(counts[part.begin : part.end])
        part.counted = packed is not None
        return [] if packed is None else [packed]

    def _listed(self, tick: RequestPart) -> list[RequestPart]:
        """Return the parts of pushes that a tick asks for: of its clock, at its endpoint, not acknowledged.

        At most 64 pushes have such parts. Those that are acknowledged have been seen, and need not be asked for.
        """
        return [
            part
            for push in self._open.values()
            if push.op == Op.PUSH and push.clock == tick.call.clock
            for part in push._parts
            if part.address == tick.address
        ]

    @staticmethod
    def _mark(part: RequestPart) -> int:
        """Return how a tick names a part of a push: by the slot of its last row, and its sequence."""
        assert part.call.begins is not None
        slot = int(np.searchsorted(part.call.begins, part.end, "left")) - 1
        return (slot + 1 << 48) | part.sequence

    # --- sending ------------------------------------------------------------------------------------------------

    def _queue(self, part: RequestPart, now: float) -> None:
        """Put a new part behind the others of its endpoint, and send what may go."""
        self._name(part)
        peer = self._peer(part)
        peer.queue.append(part)
        self._pump(peer, now)

    def _name(self, part: RequestPart) -> None:
        """Make a new part one of its call's, with a name of its own."""
        call = part.call
        self._made += 1
        part.serial = self._made
        call._parts[part] = None
        if call.sequence:
            part.sequence = call.sequence
            part.number = call._numbers.get(part.address, 0)
            call._numbers[part.address] = part.number + 1 & 0xFF
            if call.op in _OF_A_CLOCK:
                self._kept[call.clock] += 1
        else:
            self._read += 1
            part.sequence = self._read
            if call.begins is not None:
                self._peer(part).reads[call.clock] += 1
        part.key = (part.address, part.sequence, part.number)
        rows = part.end - part.begin
        part.bytes = (
            2 * _HEADER + rows * self._row_bytes(call) + sum(memoryview(frame).nbytes for frame in call.payload)
        )

    def _peer(self, part: RequestPart) -> _Peer:
        peer = self._peers.get(part.address)
        if peer is None:
            peer = self._peers[part.address] = _Peer(part.address, part.server)
        return peer

    def _pump(self, peer: _Peer, now: float) -> None:
        """Send from the front of an endpoint's queue while window and credit let it go."""
        queue = peer.queue
        while queue:
            part = queue[0]
            if part not in part.call._parts:  # its call was settled, or it was cut anew
                queue.popleft()
                continue
            if part.call.sequence and part.call.sequence - next(iter(self._open)) >= WINDOW:
                return
            if part.call.op == Op.TICK:
                if not self._may_tick(part, peer):
                    return
            elif peer.bytes and peer.bytes + part.bytes > self.policy.credit:
                return
            queue.popleft()
            self._send(part, now)

    def _may_tick(self, tick: RequestPart, peer: _Peer) -> bool:
        """Tell whether I5 lets a tick go."""
        clock = tick.call.clock
        if peer.reads[clock] or any(run.call.clock == clock for run in self._refused):
            return False
        if not self._atomic_clocks or len(self.map.endpoints) == 1:
            return True
        return not self._kept[clock] and next(iter(self._ticks)) is tick.call

    def waits_for_pushes(self, tick: Call) -> bool:
        """Tell whether a tick has not left for some endpoint, and only since pushes are not acknowledged elsewhere."""
        return self._atomic_clocks and any(
            part.message is None and not self._peer(part).reads[tick.clock] for part in tick._parts
        )

    def _pump_all(self, now: float) -> None:
        for peer in self._peers.values():
            if peer.queue:
                self._pump(peer, now)

    def _send(self, part: RequestPart, now: float) -> None:
        peer = self._peer(part)
        first = part.message is None
        self.counts["sent" if first else "resent"] += 1
        if part.call.op == Op.TICK and first and not part.pauses:
            self._restart(part.call, now)
        if first or part.call.op == Op.TICK:  # what a tick lists may have been cut anew since
            part.message = self._message(part)
        self._parts[part.key] = part
        if not part.charged:
            part.charged = True
            peer.bytes += part.bytes
        part.sent = now
        if peer.asked != peer.asked:
            peer.asked = now
        policy = self.policy
        wait = policy.resend_after * policy.backoff**part.tries + peer.bytes / policy.bytes_per_second
        part.tries += 1
        self._again(part, now + min(wait, policy.longest))
        assert part.message is not None
        self.outgoing.append((part.address, part.message))

    def _message(self, part: RequestPart) -> Frames:
        """Make the frames of a part, the header first."""
        call = part.call
        payload = self._payload(part)
        count = part.end - part.begin
        aux = call.aux
        if call.op == Op.TICK:
            count, aux = len(payload[0]), len(payload[1])
        elif call.hashes is None:
            count = call.count
        sent_as = part.sent_as or EncodedPayload(payload, call.dtype)
        header = _core.encode_header(
            op=call.op,
            payload=payload,
            dtype=sent_as.dtype,
            packed=sent_as.packed,
            keep=sent_as.keep,
            digest=bool(sent_as.digest) and not sent_as.keep,
            counted=part.counted,
            dim=call.dim if call.op in (Op.PULL, Op.PUSH, Op.ASSIGN) else 0,
            table=call.table,
            worker=self.worker.rank,
            incarnation=self.worker.incarnation,
            sequence=part.sequence,
            epoch=self.map.epoch,
            clock=call.clock,
            count=count,
            aux=aux,
            job=self.worker.job,
            part=part.number,
        )
        return [header, *payload]

    def _again(self, part: RequestPart, due: float) -> None:
        part.due = due
        self._later(due, part)

    def _later(self, time: float, what: RequestPart | Call) -> None:
        self._made += 1
        heappush(self._times, (time, self._made, what))

    def _discharge(self, part: RequestPart) -> None:
        if part.charged:
            part.charged = False
            self._peers[part.address].bytes -= part.bytes

    def _pause(self, pauses: int) -> float:
        return min(self.policy.pause * self.policy.backoff ** min(pauses, 60), self.policy.longest_pause)

    # --- hearing ------------------------------------------------------------------------------------------------

    def receive(self, address: str, frames: Sequence[Any] | _core.ReceivedMessage, now: float) -> bool:
        """Take a message that came from an endpoint. Whatever it holds, nothing is raised.

        Returns
        -------
        bool
            False: it is damaged. So may be all that follows it over the same connection.
        """
        name = _core.peek(frames)
        part = None if name is None else self._parts.get((address, *name))
        try:
            # Whatever puts its values into the answer's place, only the true answer settles the part: it comes last.
            reply = _core.decode(frames, into=None if part is None else self._room(part))
        except ValueError:
            self.counts["garbled"] += 1
            return False
        worker = self.worker
        if (
            part is None
            or reply.op != part.call.op
            or (reply.worker, reply.incarnation, reply.job) != (worker.rank, worker.incarnation, worker.job)
        ):
            self.counts["strays"] += 1
            return True
        peer = self._peers[address]
        peer.heard = now
        self._discharge(part)
        status = part.last = Status(reply.status)
        if part.sent_as is not None and status in (Status.OK, Status.DEFERRED):
            self._list_is_known(part, peer)
        if status == Status.OK:
            self.counts["answers"] += 1
            self._answer(part, reply, now)
        elif status == Status.DEFERRED:
            self.counts["deferred"] += 1
            wait = self.policy.deferred_after * self.policy.backoff ** min(part.pauses, 60)
            part.pauses += 1
            part.tries = 0
            self._again(part, now + min(wait, self.policy.longest))
        elif status in _NOT_NOW or (status == Status.BAD_REQUEST and part.doubts < _DOUBTS):
            self.counts[status.name.lower()] += 1
            self._again(part, now + self._pause(part.pauses))
            part.pauses += 1
            part.doubts += status == Status.BAD_REQUEST
            part.tries = 0
            if status == Status.RETRY:
                self._hurry(part, now)
        elif status == Status.WRONG_EPOCH:
            self._refuse(part, reply, now)
        elif status == Status.UNKNOWN_KEY_LIST and part.sent_as is not None:
            self._send_list(part, peer, now)
        elif status == Status.FENCED:
            self.close(
                FencedError(
                    f"worker {worker.rank} (incarnation {worker.incarnation}) was declared dead and its place given "
                    f"away: {self._who(part)} refused the {part.call.name}; end this process, or connect again"
                ),
                now,
            )
        else:
            self._settle(part.call, now, self._refusal(part, reply))
        self._pump(peer, now)
        return True

    @staticmethod
    def _room(part: RequestPart) -> npt.NDArray[Any] | None:
        """Return where the values of an answer may be put while they are checked."""
        out = part.call.out
        if out is None or not out.flags.carray:
            return None
        return out[part.begin : part.end]

    @staticmethod
    def _list_is_known(part: RequestPart, peer: _Peer) -> None:
        """Note that an endpoint has taken a key list."""
        assert part.sent_as is not None
        if part.sent_as.digest:
            peer.lists[part.sent_as.digest] = None
            peer.lists.move_to_end(part.sent_as.digest)
            if len(peer.lists) > _MOST_LISTS:
                peer.lists.popitem(last=False)

    def _send_list(self, part: RequestPart, peer: _Peer, now: float) -> None:
        """Send a part with its key list, which was taken to be known."""
        assert part.sent_as is not None
        assert part.call.filter is not None
        assert part.call.hashes is not None
        if not part.sent_as.keep:
            hashes = part.call.hashes[part.begin : part.end]
            part.call.filter.lost(hashes)
            peer.lists.pop(part.sent_as.digest, None)
            part.sent_as.frames[0] = hashes
            part.sent_as.keep = True
            part.message = None
        self._send(part, now)

    def _answer(self, part: RequestPart, reply: Any, now: float) -> None:
        call = part.call
        try:
            self._keep(part, reply)
        except ValueError as error:
            self._settle(
                call,
                now,
                ProtocolError(
                    f"{self._who(part)} answered the {call.name} with {error}: run the same shoal everywhere"
                ),
            )
            return
        self._forget(part)
        self._finish(call, now)

    def _finish(self, call: Call, now: float) -> None:
        """Settle a call of which everything has been answered."""
        if not call.done and not call._parts and not call._refused:
            if call.op in _NUMBERS:
                call.result = [call._order[slot][1] for slot in sorted(call._order)]
            self._settle(call, now)

    def _keep(self, part: RequestPart, reply: Any) -> None:
        """Put an answer where its call wants it; a ValueError says what does not fit."""
        call = part.call
        if call.out is not None:
            target = call.out[part.begin : part.end]
            if not reply.in_place:
                values = reply.values
                if values.size != target.size or values.dtype != target.dtype:
                    raise ValueError(f"{values.dtype}[{values.size}] where {target.dtype}[{target.size}] was asked for")
                target[...] = values.reshape(target.shape)
            call.result = call.out
            if call.filter is not None:
                call.filter.pulled(target.nbytes, reply.payload_bytes)
        elif call.op == Op.ERASE:
            call._total += reply.aux
            call.result = call._total
        elif call.op == Op.SLOT:
            call.result = (reply.hashes, reply.values.reshape(reply.count, reply.dim))
        elif call.op == Op.SAVE_POLL:
            call.result = (bool(reply.count), reply.values.tobytes())
        elif call.op == Op.SECTION:
            call.result = (reply.count, reply.values, reply.aux)
        elif call.slot is None and call.begins is None:
            call._order[part.first_slot] = (part.address, reply.values if call.op == Op.REDUCE else reply.numbers)

    def _forget(self, part: RequestPart) -> None:
        call = part.call
        self._discharge(part)
        self._parts.pop(part.key, None)
        if part in call._parts:
            del call._parts[part]
            if not call.sequence and call.begins is not None:
                _count_down(self._peer(part).reads, call.clock)
            elif call.sequence and call.op in _OF_A_CLOCK:
                _count_down(self._kept, call.clock)
        part.due = math.nan

    def _hurry(self, tick: RequestPart, now: float) -> None:
        """Send at once what a tick found missing: pushes that left before it and have not been answered."""
        for part in self._listed(tick):
            if part.charged and part.sent < tick.sent:
                part.tries = 0
                self._send(part, now)

    @staticmethod
    def _who(part: RequestPart) -> str:
        return f"server {part.server} at {part.address}"

    def _refusal(self, part: RequestPart, reply: Any) -> ShoalError:
        text = f"{self._who(part)} refused the {part.call.name}: "
        if part.last == Status.WRONG_JOB:
            return NotConnectedError(text + "it serves another job than this worker's; connect again")
        if part.last == Status.NO_TABLE:
            return ProtocolError(text + "it has no such table; make the table first")
        if part.last == Status.VERSION:
            return ProtocolError(text + "it speaks another version; run the same shoal everywhere")
        if part.last == Status.BAD_REQUEST:
            return ProtocolError(text + reply.text)
        if part.last == Status.RESOURCE_EXHAUSTED:
            return MemoryBudgetExceededError(text + reply.text)
        return ShoalError(text + reply.text)

    # --- maps ---------------------------------------------------------------------------------------------------

    def _refuse(self, part: RequestPart, reply: Any, now: float) -> None:
        """Keep what an endpoint would not take; the rest of a write is done, of a read nothing is."""
        call = part.call
        runs = [(part.first_slot, part.end_slot)]
        slots = np.unique(reply.slots).astype(np.int64)
        slots = slots[(slots >= part.first_slot) & (slots < part.end_slot)]
        begins = call.begins
        if call.sequence and begins is not None and len(slots):
            # A part that is refused as a whole stays one: a tick that is under way names it by its last slot.
            if int((begins[slots + 1] - begins[slots]).sum()) < part.end - part.begin:
                gaps = np.flatnonzero(np.diff(slots) > 1) + 1
                runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(slots, gaps)]
            call._total += reply.aux if call.op == Op.ERASE else 0
        self.counts["refused"] += len(slots)
        self._forget(part)
        call._refused += len(runs)
        refused = [MisroutedSlots(part.serial, call, first, end, part.pauses) for first, end in runs]
        if reply.epoch < self.map.epoch:
            self._retry(refused, now, wait=True)  # the endpoint has not heard of our map yet
        else:
            self._refused += refused

    def _retry(self, refused: list[MisroutedSlots], now: float, *, wait: bool) -> None:
        """Cut anew what was refused, in the order of submission; after a pause, where nothing has changed since."""
        for run in sorted(refused, key=lambda run: run.serial):
            call = run.call
            if call.done:
                continue
            call._refused -= 1
            answered = {address for address, _ in call._order.values()}
            for part in self._cut(call, run.first_slot, run.end_slot):
                if part.address in answered:
                    continue
                if part.address in self._lost:
                    self._settle(call, now, self._server_lost(part, now))
                    break
                if wait:
                    part.pauses = run.pauses + 1
                    self._name(part)
                    self._again(part, now + self._pause(run.pauses))
                else:
                    self._queue(part, now)
            self._finish(call, now)

    @property
    def wants_map(self) -> bool:
        """Whether a newer map is needed: ask the scheduler for it and give it to :meth:`set_map`, whatever it is."""
        return bool(self._refused)

    def set_map(self, map: ClusterMap, now: float) -> None:
        """Go on with this map.

        What is under way stays where it is if its slots still belong there. All else is cut anew: refused slots, what
        was not sent yet, what went to endpoints that have changed, and what asks every endpoint, of those that have not
        answered. A map that is not newer only makes refused slots try again after a pause.

        Parameters
        ----------
        map : ClusterMap
            Of as many slots.
        now : float
        """
        if self._closed is not None:
            return
        if map.slots != self.map.slots:
            raise ValueError(f"the map of epoch {map.epoch} has {map.slots} slots, the store has {self.map.slots}")
        refused, self._refused = self._refused, []
        if map.epoch <= self.map.epoch:
            self._retry(refused, now, wait=True)
            return
        self.map = map
        owners = {endpoint.address: endpoint for endpoint in map.endpoints}
        for call in self._calls:
            everywhere = call.begins is None and call.slot is None
            moved = [part for part in call._parts if everywhere or not self._stays(part, owners.get(part.address))]
            if everywhere:
                # Once, whatever of it was asked so far.
                serials = [part.serial for part in moved] + [run.serial for run in refused if run.call is call]
                refused = [run for run in refused if run.call is not call]
                refused.append(MisroutedSlots(min(serials), call, 0, map.slots, 0))
                call._refused = 1
            else:
                refused += [MisroutedSlots(part.serial, call, part.first_slot, part.end_slot, 0) for part in moved]
                call._refused += len(moved)
            for part in moved:
                self._forget(part)
        for address in self._peers.keys() - owners.keys():
            del self._peers[address]
        self._retry(refused, now, wait=False)
        self._pump_all(now)

    @staticmethod
    def _stays(part: RequestPart, owner: Endpoint | None) -> bool:
        if part.message is None or owner is None:
            return False
        return owner.first_slot <= part.first_slot and part.end_slot <= owner.end_slot

    # --- endings ------------------------------------------------------------------------------------------------

    def lose(self, server: int, reason: str, now: float) -> None:
        """Take a server for lost: what waits for it fails, and so does what would be sent there by the present map.

        Parameters
        ----------
        server : int
            Its rank.
        reason : str
            As in "silent for 10.2 s"; it becomes part of the error.
        now : float
        """
        for endpoint in self.map.endpoints:
            if endpoint.server == server:
                self._lost[endpoint.address] = reason
        for call in list(self._calls):
            for part in call._parts:
                if part.address in self._lost:
                    self._settle(call, now, self._server_lost(part, now))
                    break

    def close(self, error: ShoalError, now: float) -> None:
        """Settle every call, and all that will be submitted, with this error."""
        self._closed = self._closed or error
        for call in list(self._calls):
            self._settle(call, now, self._closed)

    def on_time(self, now: float) -> None:
        """Do what is due: send again what was not answered, give up what has passed its deadline."""
        while self._times and self._times[0][0] <= now:
            time, _, what = heappop(self._times)
            if isinstance(what, Call):
                if what.done:
                    continue
                if what.op == Op.TICK and any(part.message is None and not part.pauses for part in what._parts):
                    self._restart(what, now)
                if what.deadline > now:
                    self._later(what.deadline, what)
                else:
                    self._settle(what, now, self._too_late(what, now))
            elif what.due == time:
                self._send(what, now)

    def reconnected(self, address: str, reason: str, now: float) -> None:
        """Send again at once, in its order, what an endpoint has not answered: the connection to it is a new one.

        Parameters
        ----------
        address : str
        reason : str
            Why the former connection ended; it becomes part of errors.
        now : float
        """
        peer = self._peers.get(address)
        if peer is None:
            return
        self.counts["reconnected"] += 1
        peer.ends += 1
        peer.ended = reason
        others = [entry for entry in self.outgoing if entry[0] != address]
        self.outgoing.clear()
        self.outgoing.extend(others)
        # What was told to come again later does so. The answer to what is deferred would go to the former connection.
        lost = [
            part
            for part in self._parts.values()
            if part.address == address and (part.charged or part.last == Status.DEFERRED)
        ]
        for part in sorted(lost, key=lambda part: part.serial):
            part.tries = 0
            self._send(part, now)

    @staticmethod
    def _restart(tick: Call, now: float) -> None:
        """Begin a tick's time anew: as long as it waits for others, they have deadlines of their own."""
        tick.started, tick.deadline = now, now + tick.deadline - tick.started

    def next_time(self) -> float | None:
        """Return when :meth:`on_time` next has something to do; None where nothing is under way."""
        if len(self._times) > 64 + 2 * (len(self._parts) + len(self._calls)):
            self._times = [entry for entry in self._times if self._stands(entry)]
            heapify(self._times)
        while self._times and not self._stands(self._times[0]):
            heappop(self._times)
        return self._times[0][0] if self._times else None

    @staticmethod
    def _stands(entry: tuple[float, int, RequestPart | Call]) -> bool:
        time, _, what = entry
        return not what.done if isinstance(what, Call) else what.due == time

    def _settle(self, call: Call, now: float, error: ShoalError | None = None) -> Call:
        if call.done:
            return call
        call.done = True
        call.error = error
        if error is not None:
            call.result = None
        self._calls.discard(call)
        for part in list(call._parts):
            self._forget(part)
        if call._refused:
            self._refused = [run for run in self._refused if run.call is not call]
        # What it was made of may go, whoever still holds the call.
        call.hashes = call.begins = call.values = call.counts = call.out = call.tables = None
        call.payload, call._order = [], {}
        if call.sequence:
            del self._open[call.sequence]
        self._ticks.pop(call, None)
        if call.op == Op.TICK and error is not None:
            self.close(error, now)  # a clock that cannot end: nothing after it would be seen, nor could others go on
        self._pump_all(now)
        if call.on_done is not None:
            call.on_done(call)
        return call

    def _server_lost(self, part: RequestPart, now: float) -> ServerLostError:
        peer = self._peer(part)
        return ServerLostError(
            f"{self._who(part)} is lost ({self._lost[part.address]}; {peer.silence(now)}), and its rows with it: "
            f"the {part.call.name} cannot be done; start the cluster again and load the last checkpoint"
        )

    def _too_late(self, call: Call, now: float) -> DeadlineExceededError:
        seconds = f"{call.deadline - call.started:.1f} s"
        if not call._parts:
            return DeadlineExceededError(
                f"the {call.name} was not done within {seconds}: its slots were refused, and no map newer than epoch "
                f"{self.map.epoch} came; is the scheduler running?"
            )
        part = max(call._parts, key=lambda part: now - self._heard(part))
        peer = self._peer(part)
        why, remedy = {
            Status.OK: ("did not answer", "is it running and reachable? If it is only slow, raise timeout"),
            Status.DEFERRED: (
                "waits for a slower worker",
                "look for one that is stuck or does not tick, or raise timeout",
            ),
            Status.OVERLOADED: ("has no room for it", "raise the server's limits, or timeout"),
            Status.NOT_ADMITTED: ("does not know this worker yet", "is the scheduler running, and connected to it?"),
            Status.RETRY: ("misses pushes of this clock", "their own errors say more"),
            Status.BAD_REQUEST: ("refused it as damaged", "something between here and there changes bytes"),
        }[part.last]
        if part.message is None:
            why, remedy = f"has {peer.bytes} bytes to take before", "raise timeout, or push less at once"
        return DeadlineExceededError(
            f"the {call.name} was not done within {seconds}: {self._who(part)} {why} ({peer.silence(now)}); {remedy}"
        )

    def _heard(self, part: RequestPart) -> float:
        heard = self._peer(part).heard
        return heard if heard == heard else -math.inf


def _count_down(counter: Counter[int], clock: int) -> None:
    counter[clock] -= 1
    if not counter[clock]:
        del counter[clock]
