"""The pending requests of a worker: cut by endpoint, sent, sent again, answered or given up. Without I/O or a clock.

A *call* is one operation that the user requested; it is cut into *parts*, one message each, along the map's runs of
slots (calls.py, cutting.py). The owner of the sockets sends what is in :attr:`Requests.outgoing` and passes
in what arrives; the time is an argument everywhere. So the same code runs over ZeroMQ and in a simulated network.
Together with the servers' windows of accepted sequences it gives exactly-once writes over at-least-once messages.

    submit -> queued --credit, window--> sent --answer-------------------------> done
                                         |  ^--no answer, or refused for now: again, later
                                         |--deferred: it arrived, the answer follows
                                         '--wrong epoch: its refused slots wait for a newer map, then are queued again

A call that comes after others (held_calls.py) is held until these have succeeded, and is cut then.

A part is identified by (address, sequence, part number), which every reply repeats. All parts of a write carry the
sequence of their call, so that a slot, which remembers the sequences that it has accepted, takes each call once
wherever and however often its part arrives. Reads and ticks may be repeated; each of their parts has its own sequence,
from 2^63 up.

Invariants
    I1  A write's sequence is less than 64 above the lowest unsettled one, or the write waits: that is how many a slot
        remembers.
    I2  Bytes in flight to an endpoint, requests and the answers that they cause, are at most `credit`, except for one
        part alone and parts that are sent again. A part that is deferred or refused for now is not in flight.
    I3  Parts are sent to an endpoint in the order in which they were submitted; only repetitions overtake.
    I4  A settled call is never written to: a late answer is ignored.
    I5  A tick is sent to an endpoint after the pushes of its clock, when the reads of its clock there have been
        answered (repeated later, they could see too much), also functions and sweeps of all rows, and while no slot of
        its clock is refused anywhere. Where
        clocks are atomic and there are several endpoints, it also waits until all have acknowledged the pushes of its
        clock and the tick before: an endpoint that has taken a tick proves that every endpoint has the pushes of its
        clock, so if this worker dies the clock can still end everywhere, and endpoints differ by one tick at most.
        A tick is not sent anywhere before the held calls of its clock have begun, and these are queued before it.
    I6  Every unsettled call has a time at which `on_time` acts on it: its deadline at the latest.

Over 600 lines: the methods that keep these invariants share all of the state, and are read together.

Threads: one at a time; the owner locks. Arrays are sliced, not copied: the caller leaves them unchanged until the call
is settled.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal import _core
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.worker.call_errors import (
    deadline_error,
    dependency_error,
    held_error,
    refusal_error,
    server_lost_error,
)
from shoal.cluster.worker.calls import (
    HEADER_BYTES,
    Call,
    CallTrace,
    EndpointState,
    Frames,
    MisroutedSlots,
    Policy,
    RequestPart,
    WorkerIdentity,
    new_call,
)
from shoal.cluster.worker.cutting import cut, row_bytes
from shoal.cluster.worker.encoding import answer_buffer, encode, in_slot_order, store_answer
from shoal.cluster.worker.held_calls import HeldCalls
from shoal.cluster.worker.timers import Timers
from shoal.errors import (
    FencedError,
    ProtocolError,
    ServerLostError,
    ShoalError,
)

Op = _core.Op
Status = _core.Status
Dtype = _core.WireDtype

WINDOW = 64  # sequences that a slot remembers
_MAX_KEY_LISTS = 4096  # of an endpoint, whose digests are remembered here
_FIRST_READ_SEQUENCE = 2**63
_OTHER_VERSION = "version "  # begins the error of a whole header of another version of the wire format
_MAX_BAD_REQUESTS = 4  # a refusal as bad may be due to damage on the way: the request is sent again as often

_WRITES = frozenset(
    {Op.PUSH, Op.ASSIGN, Op.ERASE, Op.LOAD_BEGIN, Op.LOAD_ROWS, Op.LOAD_FILTER, Op.LOAD_END, Op.SAVE_BEGIN, Op.SAVE_END}
)
_PER_ENDPOINT = frozenset({Op.STATS, Op.REDUCE, Op.SWEEP, Op.SAVE_BEGIN})  # results are lists of the endpoints' answers
_APPLIED_AT_CLOCK_END = frozenset({Op.PUSH, Op.SWEEP})
_OF_ALL_ROWS = frozenset({Op.REDUCE, Op.SWEEP})
_REFUSED_FOR_NOW = frozenset({Status.RETRY, Status.OVERLOADED, Status.NOT_ADMITTED})


class Requests:
    """The requests of one worker."""

    def __init__(
        self, worker: WorkerIdentity, map: ClusterMap, policy: Policy | None = None, *, atomic_clocks: bool = True
    ) -> None:
        self.worker = worker
        self.map = map
        self.policy = policy or Policy()
        self._atomic_clocks = atomic_clocks
        self._ticks: dict[Call, None] = {}  # not settled, in their order
        self._kept: Counter[int] = Counter()  # by clock: parts, not answered, of what servers keep for its end
        # To be sent, in order. What cannot be sent may be dropped: it is treated as lost, and sent again.
        self.outgoing: deque[tuple[str, Frames]] = deque()
        # sent, resent, answers, strays (late or unknown), garbled, deferred, refused (slots), retry, overloaded,
        # not_admitted, bad_request, reconnected, moved (parts that a newer map has sent elsewhere).
        self.counts: Counter[str] = Counter()
        self._peers: dict[str, EndpointState] = {}
        self._parts: dict[tuple[str, int, int], RequestPart] = {}  # sent, not answered
        self._calls: dict[Call, None] = {}  # not settled, in the order of the calls
        self._open: dict[int, Call] = {}  # writes that are not settled, by sequence, ascending
        self._refused: list[MisroutedSlots] = []
        self._held = HeldCalls()
        self._follows_up = False
        self._lost: dict[str, str] = {}  # address -> why
        self._closed: ShoalError | None = None
        self._write = 0  # last sequences
        self._read = _FIRST_READ_SEQUENCE - 1
        self._timers = Timers()
        self._begun = 0

    # --- calls --------------------------------------------------------------------------------------------------

    def submit(
        self,
        op: int,
        table: int,
        clock: int,
        now: float,
        deadline: float,
        *,
        write: bool | None = None,
        after: Sequence[Call] = (),
        **what: Any,
    ) -> Call:
        """Start a call."""
        call = new_call(op, table, clock, now, deadline, self.map.slots, **what)
        self._begun += 1
        call.serial = self._begun
        is_write = op in _WRITES if write is None else write
        pending = [other for other in after if not other.done] if after else ()
        failed = next((other for other in after if other.error is not None), None) if after else None
        if failed is not None:
            return self._settle(call, now, dependency_error(call, failed))
        if not pending or self._closed is not None:
            return self._begin(call, is_write, now)
        self._held.hold(call, pending, is_write=is_write)
        call.was_held = True
        self._timers.add(call.deadline, call)
        return call

    def tick(
        self,
        clock: int,
        tables: Sequence[int],
        now: float,
        deadline: float,
        *,
        on_done: Callable[[Call], None] | None = None,
        trace: CallTrace | None = None,
    ) -> Call:
        """End a clock: send every endpoint the list of its pushes."""
        call = Call(Op.TICK, 0, clock, now, deadline)
        call.on_done = on_done
        call.trace = trace
        call.tables = np.unique(np.asarray(tables, np.uint32))
        self._ticks[call] = None
        self._begun += 1
        call.serial = self._begun
        return self._begin(call, False, now)

    def _begin(self, call: Call, write: bool, now: float) -> Call:
        if self._closed is not None:
            return self._settle(call, now, self._closed)
        parts = list(cut(call, self.map, self.policy, 0, self.map.slots))
        for part in parts:
            if part.address in self._lost:
                return self._settle(call, now, self._lost_error(part, now))
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
        self._calls[call] = None
        self._timers.add(call.deadline, call)
        for part in parts:
            self._queue(part, now)
        return call

    def _listed(self, tick: RequestPart) -> list[RequestPart]:
        """Return the parts of pushes that a tick names: of its clock, at its endpoint, not acknowledged.

        At most 64 pushes have such parts. Acknowledged ones have arrived.
        """
        return [
            part
            for push in self._open.values()
            if push.op == Op.PUSH and push.clock == tick.call.clock
            for part in push.parts
            if part.address == tick.address
        ]

    def ids_of(self, call: Call) -> dict[str, Any]:
        """Return the numbers of a call in log events (:mod:`shoal.base.logs`)."""
        return {
            "worker": self.worker.rank,
            "incarnation": self.worker.incarnation,
            "job": self.worker.job,
            "call": call.serial,
            "sequence": call.sequence or None,
            "op": Op(call.op).name.lower(),
            "table": call.table,
            "clock": call.clock,
        }

    # --- sending ------------------------------------------------------------------------------------------------

    def _queue(self, part: RequestPart, now: float) -> None:
        """Put a new part into the queue of its endpoint, and send what may be sent."""
        self._name(part)
        peer = self._peer(part)
        place = len(peer.queue)
        if part.call.was_held:  # its tick may be in the queue
            for index, queued in enumerate(peer.queue):
                if queued.call.op == Op.TICK and queued.call.clock >= part.call.clock:
                    place = index
                    break
        peer.queue.insert(place, part)
        self._pump(peer, now)

    def _name(self, part: RequestPart) -> None:
        """Add a new part to its call, under a unique name."""
        call = part.call
        call.parts[part] = None
        if call.sequence:
            part.sequence = call.sequence
            part.number = call.next_number.get(part.address, 0)
            call.next_number[part.address] = part.number + 1 & 0xFF
            if call.op in _APPLIED_AT_CLOCK_END:
                self._kept[call.clock] += 1
        else:
            self._read += 1
            part.sequence = self._read
        if _precedes_tick(call):
            self._peer(part).reads[call.clock] += 1
        part.key = (part.address, part.sequence, part.number)
        rows = part.end - part.begin
        part.bytes = 2 * HEADER_BYTES + rows * row_bytes(call)
        if call.payload:
            part.bytes += sum(memoryview(frame).nbytes for frame in call.payload)

    def _peer(self, part: RequestPart) -> EndpointState:
        peer = self._peers.get(part.address)
        if peer is None:
            peer = self._peers[part.address] = EndpointState(part.address, part.server)
        return peer

    def _pump(self, peer: EndpointState, now: float) -> None:
        """Send from the front of an endpoint's queue while window and credit permit."""
        queue = peer.queue
        while queue and self._closed is None:
            part = queue[0]
            if part not in part.call.parts:  # its call was settled, or it was cut anew
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

    def _may_tick(self, tick: RequestPart, peer: EndpointState) -> bool:
        """Return whether a tick may be sent (I5)."""
        clock = tick.call.clock
        if peer.reads[clock] or self._held.clocks[clock] or any(run.call.clock == clock for run in self._refused):
            return False
        if not self._atomic_clocks or len(self.map.owners) == 1:
            return True
        return not self._kept[clock] and next(iter(self._ticks)) is tick.call

    def waits_for_pushes(self, tick: Call) -> bool:
        """Return whether a tick is unsent at some endpoint, only because pushes are unacknowledged at others."""
        return self._atomic_clocks and any(
            part.message is None and not self._peer(part).reads[tick.clock] for part in tick.parts
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
        if first or part.call.op == Op.TICK:  # the parts that a tick names may have been cut again
            pushes = self._listed(part) if part.call.op == Op.TICK else []
            part.message = encode(part, self.worker, self.map, peer.lists, pushes)
        self._parts[part.key] = part
        if not part.charged:
            part.charged = True
            peer.bytes += part.bytes
        part.sent = now
        if peer.first_sent != peer.first_sent:
            peer.first_sent = now
        policy = self.policy
        wait = policy.resend_after * policy.backoff**part.tries + peer.bytes / policy.bytes_per_second
        part.tries += 1
        self._again(part, now + min(wait, policy.longest))
        assert part.message is not None
        if part.call.trace is not None:
            part.call.trace.note(part, "sent", now, part.message)
        self.outgoing.append((part.address, part.message))

    def _again(self, part: RequestPart, due: float) -> None:
        part.due = due
        self._timers.add(due, part)

    def _discharge(self, part: RequestPart) -> None:
        if part.charged:
            part.charged = False
            self._peers[part.address].bytes -= part.bytes

    def _pause(self, pauses: int) -> float:
        return min(self.policy.pause * self.policy.backoff ** min(pauses, 60), self.policy.longest_pause)

    # --- replies ------------------------------------------------------------------------------------------------

    def receive(self, address: str, frames: Sequence[Any] | _core.ReceivedMessage, now: float) -> bool:
        """Process a message from an endpoint. Raises nothing, whatever the message contains."""
        name = _core.peek(frames)
        part = None if name is None else self._parts.get((address, *name))
        try:
            # A wrong answer may be decoded into the buffer too; the right one settles the part, and comes last.
            reply = _core.decode(frames, into=None if part is None else answer_buffer(part))
        except ValueError as error:
            self.counts["garbled"] += 1
            if part is None or not str(error).startswith(_OTHER_VERSION):
                return False
            text = f"{part.label} answered the {part.call.name} with {error}"
            self._settle(part.call, now, ProtocolError(text))
            return True
        worker = self.worker
        if (
            part is None
            or reply.op != part.call.op
            or (reply.worker, reply.incarnation, reply.job) != (worker.rank, worker.incarnation, worker.job)
        ):
            self.counts["strays"] += 1
            return True
        peer = self._peers[address]
        peer.last_reply = now
        self._discharge(part)
        status = part.last = Status(reply.status)
        if part.call.trace is not None and status != Status.OK:
            part.call.trace.note(part, status.name.lower().replace("_", " "), now)
        if part.sent_as is not None and status in (Status.OK, Status.DEFERRED):
            self._list_is_known(part, peer)
        if status == Status.OK and part.call.op == Op.STATS and reply.epoch > self.map.epoch:
            self._refuse(part, reply, now)  # of the slots that the endpoint has by a newer map, perhaps fewer
        elif status == Status.OK:
            self.counts["answers"] += 1
            self._answer(part, reply, now)
        elif status == Status.DEFERRED:
            self.counts["deferred"] += 1
            wait = self.policy.deferred_after * self.policy.backoff ** min(part.pauses, 60)
            part.pauses += 1
            part.tries = 0
            self._again(part, now + min(wait, self.policy.longest))
        elif status in _REFUSED_FOR_NOW or (status == Status.BAD_REQUEST and part.doubts < _MAX_BAD_REQUESTS):
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
                    f"worker {worker.rank} (incarnation {worker.incarnation}) was declared dead and replaced: "
                    f"{part.label} refused the {part.call.name}; end this process, or connect again"
                ),
                now,
            )
        else:
            self._settle(part.call, now, refusal_error(part, reply))
        self._pump(peer, now)
        return True

    @staticmethod
    def _list_is_known(part: RequestPart, peer: EndpointState) -> None:
        """Remember that an endpoint has a key list."""
        assert part.sent_as is not None
        if part.sent_as.digest:
            peer.lists[part.sent_as.digest] = None
            peer.lists.move_to_end(part.sent_as.digest)
            if len(peer.lists) > _MAX_KEY_LISTS:
                peer.lists.popitem(last=False)

    def _send_list(self, part: RequestPart, peer: EndpointState, now: float) -> None:
        """Send a part with its key list, which the endpoint turned out not to have."""
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
            self.counts["resent"] += 1  # in the order of repetitions: what came after it may have been executed
        self._send(part, now)

    def _answer(self, part: RequestPart, reply: Any, now: float) -> None:
        call = part.call
        if call.trace is not None:
            call.trace.note(part, "answered", now, reply)
        try:
            store_answer(part, reply)
            self._forget(part, now)
            self._finish(call, now)
        except ValueError as error:
            self._settle(
                call,
                now,
                ProtocolError(
                    f"{part.label} answered the {call.name} with {error}: install one version of shoal on all machines"
                ),
            )

    def _finish(self, call: Call, now: float) -> None:
        """Settle a call if all of it has been answered."""
        if not call.done and not call.parts and not call.misrouted:
            if call.op in _PER_ENDPOINT:
                call.result = in_slot_order(call, self.map)
            self._settle(call, now, None if call.find_error is None else call.find_error(call.result))

    def _forget(self, part: RequestPart, now: float) -> None:
        call = part.call
        self._discharge(part)
        self._parts.pop(part.key, None)
        if part in call.parts:
            del call.parts[part]
            if _precedes_tick(call):
                _count_down(self._peer(part).reads, call.clock)
            if call.sequence and call.op in _APPLIED_AT_CLOCK_END:
                _count_down(self._kept, call.clock)
        part.due = math.nan
        if call.trace is not None:
            call.trace.note(part, "ended", now)

    def _hurry(self, tick: RequestPart, now: float) -> None:
        """Send again at once the pushes that a tick found missing: sent before it, and not answered."""
        for part in self._listed(tick):
            if part.charged and part.sent < tick.sent:
                part.tries = 0
                self._send(part, now)

    # --- maps ---------------------------------------------------------------------------------------------------

    def _refuse(self, part: RequestPart, reply: Any, now: float) -> None:
        """Store the slots that an endpoint refused; the rest of a write is done, a read is repeated as a whole."""
        call = part.call
        runs = [(part.first_slot, part.end_slot)]
        slots = np.unique(reply.slots).astype(np.int64)
        slots = slots[(slots >= part.first_slot) & (slots < part.end_slot)]
        begins = call.begins
        if call.sequence and begins is not None and len(slots):
            # A part that is refused as a whole is not split: a pending tick names it by slots of it.
            if int((begins[slots + 1] - begins[slots]).sum()) < part.end - part.begin:
                gaps = np.flatnonzero(np.diff(slots) > 1) + 1
                runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(slots, gaps)]
            call.total += reply.aux if call.op == Op.ERASE else 0
        self.counts["refused"] += len(slots)
        self._forget(part, now)
        call.misrouted += len(runs)
        refused = [MisroutedSlots(call, first, end, part.pauses) for first, end in runs]
        if reply.epoch < self.map.epoch:
            self._retry(refused, now, wait=True)  # the endpoint has an older map
        else:
            self._refused += refused

    def _retry(self, refused: list[MisroutedSlots], now: float, *, wait: bool) -> None:
        """Cut refused slots again, in the order of submission; send after a pause if the map is unchanged."""
        for run in sorted(refused, key=lambda run: run.call.serial):
            call = run.call
            if call.done:
                continue
            call.misrouted -= 1
            has_it = {part.address for part in call.parts} | call.answers.keys() if _is_everywhere(call) else ()
            for part in cut(call, self.map, self.policy, run.first_slot, run.end_slot):
                if part.address in has_it:
                    continue
                if part.address in self._lost:
                    self._settle(call, now, self._lost_error(part, now))
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
        """Whether a newer map is needed: pass the scheduler's map to :meth:`set_map`, even if it is the same."""
        return bool(self._refused)

    def set_map(self, map: ClusterMap, now: float) -> None:
        """Use another map.

        Parts in flight stay at their endpoint if it still owns their slots. Everything else is cut again: refused
        slots, unsent parts, and parts at endpoints that have changed. A call to every endpoint begins again as a whole:
        an answer of an endpoint is for the slots that it had. A map that is not newer only makes refused slots be sent
        again after a pause.
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
        for call in self._calls:
            everywhere = _is_everywhere(call)
            moved = [part for part in call.parts if everywhere or not self._stays(part)]
            if everywhere:
                refused = [run for run in refused if run.call is not call]
                refused.append(MisroutedSlots(call, 0, map.slots, 0))
                call.misrouted = 1
                call.answers.clear()
            else:
                refused += [MisroutedSlots(call, part.first_slot, part.end_slot, 0) for part in moved]
                call.misrouted += len(moved)
            self.counts["moved"] += len(moved)
            for part in moved:
                self._forget(part, now)
        living = {endpoint.address for endpoint in map.endpoints}
        for address in self._peers.keys() - living:
            del self._peers[address]
        self._lost.clear()  # a newer map is of living endpoints
        kept = [entry for entry in self.outgoing if entry[0] in living]
        self.outgoing.clear()
        self.outgoing.extend(kept)
        self._retry(refused, now, wait=False)
        self._pump_all(now)

    def _stays(self, part: RequestPart) -> bool:
        run = self.map.run_of(part.first_slot)
        return part.message is not None and run.endpoint.address == part.address and part.end_slot <= run.end_slot

    # --- endings ------------------------------------------------------------------------------------------------

    def lose(self, server: int, reason: str, now: float) -> None:
        """Treat a server as lost: calls that wait for it, and later ones that need it under the present map, fail."""
        for endpoint in self.map.endpoints:
            if endpoint.server == server:
                self._lost[endpoint.address] = reason
        for call in list(self._calls):
            for part in call.parts:
                if part.address in self._lost:
                    # Nothing is sent until all have failed: a tick would leave as soon as its pushes have.
                    self._settle(call, now, self._lost_error(part, now), pump=False)
                    break
        self._pump_all(now)

    def close(self, error: ShoalError, now: float) -> None:
        """Settle every call, also later ones, with this error. Nothing is sent any more."""
        self._closed = self._closed or error
        for call in [*self._held.calls(), *self._calls]:
            self._settle(call, now, self._closed)

    def on_time(self, now: float) -> None:
        """Send unanswered parts again, and settle calls that have passed their deadline."""
        for what, due in self._timers.take_due(now):
            if isinstance(what, Call):
                if what.done:
                    continue
                if what.op == Op.TICK and any(part.message is None and not part.pauses for part in what.parts):
                    self._restart(what, now)
                if what.deadline > now:
                    self._timers.add(what.deadline, what)
                elif what in self._held:
                    self._settle(what, now, held_error(what, self._held.blocker(what)))
                else:
                    self._settle(what, now, deadline_error(what, self._peers, self.map.epoch, now))
            elif what.due == due:
                self._send(what, now)

    def reconnected(self, address: str, reason: str, now: float) -> None:
        """Send again at once, in order, what an endpoint has not answered, after its connection was replaced."""
        peer = self._peers.get(address)
        if peer is None:
            return
        self.counts["reconnected"] += 1
        peer.ends += 1
        peer.ended = reason
        others = [entry for entry in self.outgoing if entry[0] != address]
        self.outgoing.clear()
        self.outgoing.extend(others)
        # Parts refused for now keep their pause. Answers to deferred parts would go to the former connection.
        lost = [
            part
            for part in self._parts.values()
            if part.address == address and (part.charged or part.last == Status.DEFERRED)
        ]
        for part in sorted(lost, key=lambda part: part.call.serial):
            part.tries = 0
            self._send(part, now)

    @staticmethod
    def _restart(tick: Call, now: float) -> None:
        """Restart the time of a tick: while it waits for other calls, their deadlines apply."""
        tick.started, tick.deadline = now, now + tick.deadline - tick.started

    def next_time(self) -> float | None:
        """Return when :meth:`on_time` is next due; None if no call is pending."""
        return self._timers.next_time(len(self._parts) + len(self._calls) + len(self._held))

    def _lost_error(self, part: RequestPart, now: float) -> ServerLostError:
        return server_lost_error(part, self._peer(part), self._lost[part.address], now)

    def _settle(self, call: Call, now: float, error: ShoalError | None = None, *, pump: bool = True) -> Call:
        if call.done:
            return call
        call.done = True
        call.error = error
        if error is not None:
            call.result = None
        self._calls.pop(call, None)
        if call in self._held:
            self._held.release(call)
        for part in list(call.parts):
            self._forget(part, now)
        if call.trace is not None:
            call.trace.end(error, now)
            call.trace = None
        if call.misrouted:
            self._refused = [run for run in self._refused if run.call is not call]
        # Release the arrays, even if the call itself is still referenced.
        call.hashes = call.begins = call.values = call.counts = call.out = call.tables = None
        call.payload, call.answers = [], {}
        if call.sequence:
            del self._open[call.sequence]
        self._ticks.pop(call, None)
        if call.op == Op.TICK and error is not None:
            self.close(error, now)  # the clock cannot end: later pushes would have no effect
        self._held.settled(call)
        self._follow_up(now)
        if pump:
            self._pump_all(now)
        if call.on_done is not None:
            call.on_done(call)
        return call

    def _follow_up(self, now: float) -> None:
        """Begin or fail the held calls that are due, and those that are due then: not one within the other."""
        if self._follows_up:
            return
        self._follows_up = True
        try:
            while (due := self._held.take_due()) is not None:
                call, failed = due
                if failed is not None:
                    self._settle(call, now, dependency_error(call, failed))
                else:
                    self._begin(call, self._held.release(call), now)
        finally:
            self._follows_up = False


def _is_everywhere(call: Call) -> bool:
    """Whether a call goes once to each endpoint that serves slots."""
    return call.begins is None and call.slot is None


def _precedes_tick(call: Call) -> bool:
    """Return whether the tick of its clock waits for the answer."""
    is_keyed_read = not call.sequence and call.begins is not None and call.op != Op.PREFETCH
    return call.op in _OF_ALL_ROWS or is_keyed_read


def _count_down(counter: Counter[int], clock: int) -> None:
    counter[clock] -= 1
    if not counter[clock]:
        del counter[clock]
