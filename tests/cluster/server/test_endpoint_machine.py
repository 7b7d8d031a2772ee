"""Long random histories of a Service, against what each reply must be, worked out the slow way.

Workers push small integers with SGD at lr 1: a weight is minus the sum of what was applied, in any order, exactly.
Messages wait in a bag: they are delivered in any order, again and again, also when their worker has gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from endpoint_peer import Frames, Reply, Worker, deliver, part_named, released
from shoal import _core
from shoal._core import Op, Status
from table_specs import native_spec
from tiers import rounds

SLOTS = 8
WIDTH = 1 << 61
KEYS = [slot * WIDTH + number for slot in range(SLOTS) for number in range(2)]
RANKS = 3
READS = 1 << 63


def slot_of(key: int) -> int:
    return key // WIDTH


Grads = dict[int, int]  # key -> gradient


@dataclass
class Member:
    """A worker as the endpoint must see it (``clock``, ``seen``), and as it sees itself."""

    worker: Worker
    clock: int
    seen: set[tuple[int, int]] = field(default_factory=set)  # (slot, sequence)
    erased: dict[tuple[int, int], int] = field(default_factory=dict)  # (sequence, slot) -> rows
    own_clock: int = 0
    sequence: int = 0
    reads: int = READS
    pushed: list[tuple[int, int]] = field(default_factory=list)  # in its own clock: (slot of the last row, sequence)


@dataclass(frozen=True)
class Message:
    op: int
    frames: Frames
    rank: int
    incarnation: int
    clock: int
    sequence: int
    grads: tuple[tuple[int, int], ...] = ()
    named: tuple[tuple[int, int], ...] = ()


class Histories(RuleBasedStateMachine):
    """The rules are what may happen; ``expected`` is what must come back, and to whom."""

    @initialize(
        mode=st.sampled_from(["bsp", "ssp", "asp"]),
        staleness=st.integers(0, 2),
        mean=st.booleans(),
        cuts=st.sets(st.integers(1, SLOTS - 1)),
    )
    def begin(self, mode: str, staleness: int, mean: bool, cuts: set[int]) -> None:
        bounds = sorted({0, SLOTS, *cuts})
        self.endpoint = _core.Endpoint(SLOTS, list(pairwise(bounds)))
        self.endpoint.add_table(0, native_spec())
        self.endpoint.start_job(1, mode, staleness, mean)
        self.mode = "bsp" if (mode, staleness) == ("ssp", 0) else mode
        self.staleness, self.mean = staleness, mean and self.mode == "bsp"
        self.first, self.end = 0, SLOTS
        self.weights: dict[int, float] = {}
        self.members: dict[int, Member] = {}
        self.incarnations = dict.fromkeys(range(RANKS), 0)
        self.fenced = dict.fromkeys(range(RANKS), 0)
        self.greatest = self.applied = self.steps = 0
        self.hold: int | None = None
        self.kept: list[Message] = []  # one a message, with the rows of the slots that took it
        self.ticks: dict[int, int] = {}  # clock -> workers
        self.waiting: list[Message] = []
        self.bag: list[Message] = []
        for rank in range(RANKS):
            self.join(rank, 0)

    # --- what must be ---

    def floor(self) -> int:
        clocks = [member.clock for member in self.members.values()]
        slowest = min(clocks) if clocks else self.greatest
        return slowest if self.hold is None else min(slowest, self.hold)

    def may_go(self, clock: int) -> bool:
        if self.mode == "bsp":
            return clock <= self.applied
        return self.mode == "asp" or clock - self.floor() <= self.staleness

    def apply(self, grads: Grads, divisor: int = 1) -> None:
        for key, grad in grads.items():
            self.weights[key] = float(np.float32(self.weights.get(key, 0.0)) - np.float32(grad / divisor))

    def go_on(self) -> list[tuple[int, int, list[float] | None]]:
        """What goes to those who wait: (incarnation and rank, read, weights), clock by clock."""
        answers = []
        while True:
            for message in sorted(self.waiting, key=lambda m: (m.clock, m.rank, m.sequence)):
                if self.may_go(message.clock):
                    self.waiting.remove(message)
                    answers.append((message.rank, message.sequence, self.read(message)))
            if self.mode != "bsp" or self.applied >= self.floor():
                return answers
            total: Grads = {}
            for message in self.kept:
                if message.clock == self.applied:
                    for key, grad in message.grads:
                        total[key] = total.get(key, 0) + grad
            ticked = self.ticks.get(self.applied, 0)
            if ticked or total:
                self.apply(total, ticked if self.mean else 1)
                self.steps += 1
            self.kept = [message for message in self.kept if message.clock > self.applied]
            self.applied += 1

    def read(self, message: Message) -> list[float] | None:
        keys = [key for key, _ in message.grads]
        if any(not self.first <= slot_of(key) < self.end for key in keys):
            return None
        return [self.weights.get(key, 0.0) for key in keys]

    def expect(self, replies: list[Reply], to_others: list[tuple[int, int, list[float] | None]]) -> None:
        got = [
            (int(reply.peer), reply.sequence, None if reply.slots else reply.values.ravel().tolist())
            for reply in replies
        ]
        assert got == to_others

    # --- workers come and go ---

    def join(self, rank: int, clock: int) -> None:
        self.incarnations[rank] += 1
        incarnation = self.incarnations[rank]
        self.endpoint.admit(rank, incarnation, clock)
        self.members[rank] = Member(Worker(rank, incarnation), clock, own_clock=clock)
        self.greatest = max(self.greatest, clock)
        self.hold = None
        self.expect(released(self.endpoint), self.go_on())

    @rule(rank=st.integers(0, RANKS - 1))
    def dismiss(self, rank: int) -> None:
        self.endpoint.dismiss(rank, self.incarnations[rank])
        self.fenced[rank] = self.incarnations[rank]
        member = self.members.pop(rank, None)
        replies = released(self.endpoint)
        if member is None:
            assert replies == []
            return
        fenced = [m for m in self.waiting if m.rank == rank]
        self.waiting = [m for m in self.waiting if m.rank != rank]
        reported, others = replies[: len(fenced)], replies[len(fenced) :]
        assert all(reply.status == Status.FENCED for reply in reported)
        assert sorted(reply.sequence for reply in reported) == sorted(m.sequence for m in fenced)
        self.kept = [m for m in self.kept if m.rank != rank or m.clock < member.clock]
        self.expect(others, self.go_on())

    @rule()
    def stop(self) -> None:
        hold = self.endpoint.hold()
        if self.hold is None:
            self.hold = self.greatest
        assert hold == self.hold

    @rule(rank=st.integers(0, RANKS - 1), later=st.integers(0, 1))
    def come_back(self, rank: int, later: int) -> None:
        """Join where somebody may: not before the greatest clock under a hold."""
        if rank in self.members:
            self.endpoint.resume()
            self.hold = None
            self.expect(released(self.endpoint), self.go_on())
        else:
            self.stop()
            self.join(rank, self.hold + later)

    @rule(first=st.integers(0, SLOTS), count=st.integers(0, SLOTS))
    def move(self, first: int, count: int) -> None:
        self.first, self.end = first, min(first + count, SLOTS)
        self.endpoint.set_map(0, [(self.first, self.end)])
        refused = [m for m in self.waiting if self.read(m) is None]
        self.waiting = [m for m in self.waiting if self.read(m) is not None]
        order = sorted(refused, key=lambda m: (m.clock, m.rank, m.sequence))
        self.expect(released(self.endpoint), [(m.rank, m.sequence, None) for m in order])

    @rule()
    def own_all(self) -> None:
        self.move(0, SLOTS)

    # --- what workers send ---

    @precondition(lambda self: self.members)
    @rule(data=st.data(), keys=st.sets(st.sampled_from(KEYS), min_size=1), ahead=st.booleans())
    def push(self, data: st.DataObject, keys: set[int], ahead: bool) -> None:
        member = self.members[data.draw(st.sampled_from(sorted(self.members)))]
        member.sequence += 1
        grads = tuple((key, data.draw(st.integers(-3, 3)) * 4) for key in sorted(keys))
        edges = [i for i in range(1, len(grads)) if slot_of(grads[i][0]) != slot_of(grads[i - 1][0])]
        cut = data.draw(st.sampled_from([0, *edges]))
        for part in (grads[:cut], grads[cut:]):
            if part:
                frames = member.worker.push(
                    [key for key, _ in part],
                    [grad for _, grad in part],
                    sequence=member.sequence,
                    clock=member.own_clock,
                )
                self.send(Message(Op.PUSH, frames, *self.header(member, member.sequence), part), ahead)
                member.pushed.append((slot_of(part[-1][0]), member.sequence))

    @precondition(lambda self: self.members)
    @rule(data=st.data(), keys=st.sets(st.sampled_from(KEYS), min_size=1), ahead=st.booleans())
    def erase(self, data: st.DataObject, keys: set[int], ahead: bool) -> None:
        member = self.members[data.draw(st.sampled_from(sorted(self.members)))]
        member.sequence += 1
        frames = member.worker.keys(Op.ERASE, sorted(keys), sequence=member.sequence, clock=member.own_clock)
        self.send(
            Message(Op.ERASE, frames, *self.header(member, member.sequence), tuple((key, 0) for key in sorted(keys))),
            ahead,
        )

    @precondition(lambda self: self.members)
    @rule(data=st.data(), keys=st.sets(st.sampled_from(KEYS)), ahead=st.booleans())
    def pull(self, data: st.DataObject, keys: set[int], ahead: bool) -> None:
        member = self.members[data.draw(st.sampled_from(sorted(self.members)))]
        member.reads += 1
        frames = member.worker.pull(sorted(keys), clock=member.own_clock, sequence=member.reads)
        self.send(
            Message(Op.PULL, frames, *self.header(member, member.reads), tuple((key, 0) for key in sorted(keys))),
            ahead,
        )

    @precondition(lambda self: self.members)
    @rule(data=st.data(), ahead=st.booleans())
    def tick(self, data: st.DataObject, ahead: bool) -> None:
        member = self.members[data.draw(st.sampled_from(sorted(self.members)))]
        member.reads += 1
        named = tuple(member.pushed)
        frames = member.worker.tick(member.own_clock, [part_named(*part) for part in named], sequence=member.reads)
        message = Message(Op.TICK, frames, *self.header(member, member.reads), named=named)
        member.own_clock += 1
        member.pushed = []
        self.send(message, ahead)

    def header(self, member: Member, sequence: int) -> tuple[int, int, int, int]:
        return member.worker.rank, member.worker.incarnation, member.own_clock, sequence

    def send(self, message: Message, now: bool) -> None:
        self.bag.append(message)
        if now:
            self.arrive(message)

    @precondition(lambda self: self.bag)
    @rule(data=st.data())
    def arrive_late_or_again(self, data: st.DataObject) -> None:
        self.arrive(data.draw(st.sampled_from(self.bag)))

    @rule()
    def everything_arrives(self) -> None:
        for message in list(self.bag):
            self.arrive(message)

    # --- what must come back ---

    def arrive(self, message: Message) -> None:
        replies = deliver(self.endpoint, message.frames, b"%d" % message.rank)
        reply, others = replies[0], replies[1:]
        assert (int(reply.peer), reply.sequence) == (message.rank, message.sequence)
        member = self.members.get(message.rank)
        if member is None or message.incarnation < member.worker.incarnation:
            assert reply.status == Status.FENCED
        elif message.op == Op.PULL:
            self.pulled(message, reply)
        elif message.op == Op.TICK:
            self.ticked(message, member, reply)
        else:
            self.written(message, member, reply)
        self.expect(others, self.go_on())

    def pulled(self, message: Message, reply: Reply) -> None:
        weights = self.read(message)
        if weights is None:
            assert reply.status == Status.WRONG_EPOCH
        elif self.mode == "bsp" and message.grads and message.clock < self.applied:  # without keys it reads no arc
            assert reply.status == Status.BAD_REQUEST
        elif not self.may_go(message.clock):
            assert reply.status == Status.DEFERRED
            self.waiting = [m for m in self.waiting if (m.rank, m.sequence) != (message.rank, message.sequence)]
            self.waiting.append(message)
        else:
            assert reply.status == Status.OK
            assert reply.values.ravel().tolist() == weights

    def ticked(self, message: Message, member: Member, reply: Reply) -> None:
        if message.clock < member.clock:
            assert reply.status == Status.OK
        elif message.clock > member.clock or not all(part in member.seen for part in message.named):
            assert reply.status == Status.RETRY
        else:
            assert reply.status == Status.OK
            member.clock += 1
            self.greatest = max(self.greatest, member.clock)
            self.ticks[message.clock] = self.ticks.get(message.clock, 0) + 1

    def written(self, message: Message, member: Member, reply: Reply) -> None:
        here = [(key, x) for key, x in message.grads if self.first <= slot_of(key) < self.end]
        fresh = [(key, x) for key, x in here if (slot_of(key), message.sequence) not in member.seen]
        elsewhere = {slot_of(key) for key, _ in message.grads} - {slot_of(key) for key, _ in here}
        if message.op == Op.PUSH and fresh and message.clock < member.clock:
            assert reply.status == Status.BAD_REQUEST
            return
        if message.op == Op.ERASE:
            for key, _ in fresh:
                name = (message.sequence, slot_of(key))
                member.erased[name] = member.erased.get(name, 0) + (self.weights.pop(key, None) is not None)
            assert reply.aux == sum(member.erased[message.sequence, slot] for slot in {slot_of(key) for key, _ in here})
        elif self.mode == "bsp":
            self.kept.append(Message(**{**message.__dict__, "grads": tuple(fresh)}))
        else:
            self.apply(dict(fresh))
        member.seen |= {(slot_of(key), message.sequence) for key, _ in fresh}
        assert reply.status == (Status.WRONG_EPOCH if elsewhere else Status.OK)
        assert set(reply.slots) == elsewhere

    @invariant()
    def the_table_is_what_was_applied(self) -> None:
        if not hasattr(self, "endpoint"):
            return
        metrics = self.endpoint.metrics()
        assert metrics["clocks"] == {rank: member.clock for rank, member in sorted(self.members.items())}
        assert metrics["deferred_reads"] == len(self.waiting)
        if self.mode == "bsp":
            assert metrics["applied"] == self.applied
            assert self.endpoint.shard(0).step == self.steps

    def teardown(self) -> None:
        if hasattr(self, "endpoint"):
            self.own_all()
            rows = deliver(self.endpoint, Worker(0xFFFFFFFF).pull(KEYS))[0].values.ravel().tolist()
            assert rows == [self.weights.get(key, 0.0) for key in KEYS]
            assert len(self.endpoint.shard(0)) == len(self.weights)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=rounds(150), stateful_step_count=60)
TestHistories.pytestmark = [pytest.mark.rounds]
