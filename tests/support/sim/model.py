"""The reference of an endpoint in few lines: the twin of ``_core.Endpoint``, with the same interface.

It remembers every sequence forever instead of a window, and checks its whole state at each event.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from shoal import _core
from sim.history import RATE

Op, Status, Dtype = _core.Op, _core.Status, _core.WireDtype
WINDOW = 64
THREAD = _core.ThreadPool(1)


@dataclass
class Member:
    incarnation: int
    clock: int
    fenced: bool = False
    tables: tuple = ()  # of its last tick
    seen: dict = field(default_factory=lambda: defaultdict(set))  # slot -> sequences
    erased: dict = field(default_factory=dict)  # (slot, sequence) -> rows


@dataclass(eq=False)
class Push:
    clock: int
    table: int
    rank: int
    sequence: int
    hashes: np.ndarray
    grads: np.ndarray
    counts: np.ndarray

    def part(self, pick):
        """Return the same of some rows."""
        kept = (self.hashes[pick], self.grads[pick], self.counts[pick])
        return Push(self.clock, self.table, self.rank, self.sequence, *kept)


class Endpoint:
    def __init__(self, slots, arcs):
        self.slots = slots
        self.first, self.end = (arcs[0][0], arcs[-1][1]) if arcs else (0, 0)
        self.epoch = 1
        self.job, self.mode, self.staleness, self.mean = 0, "asp", 0, False
        self.tables = {}
        self.counting = set()
        self.members = {}
        self.latest = {}  # rank -> incarnation that was dismissed last
        self.applied = 0
        self.greatest = 0  # greatest clock that a worker has reached
        self.cap = None
        self.pending = []
        self.ticked = defaultdict(dict)  # clock -> rank -> tables
        self.deferred = {}  # (rank, sequence) -> (peer, message)
        self.out = []
        self.counts = Counter()

    # --- control ---

    def set_map(self, epoch, arcs):
        self.epoch = epoch
        self.first, self.end = arcs[0][0], arcs[-1][1]  # it has one run of slots

    def start_job(self, job, mode, staleness, mean, before=0):
        self.job, self.mode, self.staleness, self.mean = job, mode, staleness, mean
        if mode == "ssp" and staleness == 0:
            self.mode = "bsp"
        self.members, self.latest, self.pending, self.deferred = {}, {}, [], {}
        self.ticked.clear()
        self.applied, self.greatest, self.cap = 0, 0, None
        for shard in self.tables.values():
            shard.set_clock(shard.table_clock(before), 0)

    def admit(self, rank, incarnation, clock):
        self.members[rank] = Member(incarnation, clock)
        self.greatest = max(self.greatest, clock)
        self.cap = None
        self.go_on()

    def fence(self, rank, incarnation):
        member = self.members.get(rank)
        if member is None or member.incarnation != incarnation:
            return 0, ()
        member.fenced = True
        return member.clock, member.tables

    def dismiss(self, rank, incarnation, clock=0, tables=()):
        self.latest[rank] = max(incarnation, self.latest.get(rank, 0))
        member = self.members.get(rank)
        if member is None or member.incarnation != incarnation:
            return
        while member.clock < clock:
            self.end_clock(rank, tables if member.clock + 1 == clock else ())
        del self.members[rank]
        self.pending = [push for push in self.pending if push.rank != rank or push.clock < member.clock]
        self.deferred = {key: value for key, value in self.deferred.items() if key[0] != rank}
        self.go_on()

    def hold(self):
        self.cap = self.greatest
        return self.cap

    def add_table(self, table, spec):
        self.tables[table] = _core.Shard(spec, self.slots, THREAD)
        if spec.needs_counts:
            self.counting.add(table)

    def shard(self, table):
        return self.tables[table]

    def released(self):
        out, self.out = self.out, []
        return out

    def metrics(self):
        return {**self.counts, "deferred_reads": len(self.deferred), "pending": len(self.pending)}

    # --- rules ---

    def slowest(self):
        if not self.members:
            return self.applied
        clock = min(member.clock for member in self.members.values())
        return clock if self.cap is None else min(clock, self.cap)

    def included(self):
        """Return how many clocks all rows include."""
        return self.applied if self.mode == "bsp" else self.slowest()

    def go_on(self):
        """Merge the clocks that are complete, then answer the pulls that may be answered."""
        while self.mode == "bsp" and self.applied < self.slowest():
            ticks = self.ticked.pop(self.applied, {})
            for table in sorted(set().union(*ticks.values())):
                pushes = [push for push in self.pending if (push.clock, push.table) == (self.applied, table)]
                self.merge(table, sorted(pushes, key=lambda push: (push.rank, push.sequence)), len(ticks))
            self.pending = [push for push in self.pending if push.clock > self.applied]
            self.applied += 1
        for key, (peer, message) in list(self.deferred.items()):
            if self.may_see(message):
                del self.deferred[key]
                self.pull(peer, message)

    def merge(self, table, pushes, workers):
        sums, counts = {}, Counter()
        for push in pushes:
            for key, row in zip(push.hashes.tolist(), push.grads.astype(np.float64), strict=True):
                sums[key] = sums[key] + row if key in sums else row
            counts.update(dict(zip(push.hashes.tolist(), push.counts.tolist(), strict=True)))
        hashes = np.array(sorted(sums), np.uint64)
        dim = pushes[0].grads.shape[1] if pushes else 1
        grads = np.array([sums[key] for key in hashes.tolist()], np.float64).reshape(len(hashes), dim)
        if self.mean:
            grads /= workers
        counts = np.array([counts[key] for key in hashes.tolist()], np.uint32)
        self.step(table, hashes, grads.astype(np.float32), counts, self.applied)

    def step(self, table, hashes, grads, counts, clock):
        self.tables[table].push(self.batch(hashes), grads, counts if table in self.counting else None, clock)

    def batch(self, hashes):
        return _core.KeyBatch(_core.unmix(hashes), self.slots, THREAD)

    def may_see(self, message):
        if self.mode == "bsp":
            return self.applied >= message.clock
        return self.mode == "asp" or message.clock - self.slowest() <= self.staleness

    def has_seen(self, member, slot, sequence):
        seen = member.seen[slot]
        return sequence in seen or (seen and sequence <= max(seen) - WINDOW)

    def has_seen_mark(self, member, mark):
        slot, sequence = (mark >> 48) - 1, mark & (1 << 48) - 1
        return self.has_seen(member, slot, sequence)

    def is_done(self, member, slot, sequence):
        return self.has_seen(member, slot, sequence)

    # --- messages ---

    def handle(self, peer, frames):
        try:
            message = _core.decode(frames, replies=False)
        except ValueError as error:
            self.counts["bad"] += 1
            text = str(error).encode()
            self.out.append((peer, [_core.encode_header(op=0, status=Status.BAD_REQUEST, reply=True, payload=[text],
                                                        count=len(text)), text]))  # fmt: skip
            return self.released()
        status = self.refusal(message)
        if status is None:
            getattr(self, Op(message.op).name.lower())(peer, message)
        else:
            self.reply(peer, message, status=status)
        self.go_on()
        return self.released()

    def refusal(self, message):
        if message.job != self.job:
            return Status.WRONG_JOB
        member = self.members.get(message.worker)
        newest = member.incarnation + member.fenced if member else self.latest.get(message.worker, 0) + 1
        if message.incarnation < newest:
            return Status.FENCED
        if member is None or message.incarnation > newest:
            return Status.NOT_ADMITTED
        if message.op != Op.TICK and message.table not in self.tables:
            return Status.NO_TABLE
        return None

    def reply(self, peer, message, status=Status.OK, payload=(), **fields):
        header = _core.encode_header(
            op=message.op, status=status, reply=True, payload=payload, table=message.table, worker=message.worker,
            incarnation=message.incarnation, sequence=message.sequence, epoch=self.epoch,
            job=self.job, part=message.part, **{"clock": message.clock, **fields},
        )  # fmt: skip
        self.out.append((peer, [header, *payload]))
        self.counts[Status(status).name.lower()] += 1

    def slots_of(self, hashes):
        return [hash * self.slots >> 64 for hash in hashes.tolist()]

    def refused(self, slots):
        return np.array(sorted({slot for slot in slots if not self.first <= slot < self.end}), np.uint16)

    def defer(self, peer, message):
        self.deferred[message.worker, message.sequence] = (peer, message)
        self.reply(peer, message, Status.DEFERRED)

    def pull(self, peer, message):
        refused = self.refused(self.slots_of(message.hashes))
        if len(refused):
            self.reply(peer, message, Status.WRONG_EPOCH, [refused], count=len(refused))
        elif not self.may_see(message):
            self.defer(peer, message)
        else:
            rows = np.empty((message.count, message.dim), np.float32)
            self.tables[message.table].pull(self.batch(message.hashes), rows)
            flags = {"dated": True, "clock": self.included()} if message.dated else {}
            flags["whole"] = message.whole
            self.reply(
                peer, message, payload=[rows], count=message.count, dim=message.dim, dtype=Dtype.FLOAT32, **flags
            )

    def write(self, peer, message, take):
        """Do ``take(places)`` for the rows of the slots that are here and have not seen this sequence."""
        member = self.members[message.worker]
        slots = self.slots_of(message.hashes)
        refused = self.refused(slots)
        mine = [i for i, slot in enumerate(slots) if self.first <= slot < self.end]
        places = [i for i in mine if not self.is_done(member, slots[i], message.sequence)]
        self.counts["duplicates"] += bool(mine) and not places
        if places:
            take(np.array(places))
        for i in places:
            member.seen[slots[i]].add(message.sequence)
        erased = sum(member.erased.get((slot, message.sequence), 0) for slot in {slots[i] for i in mine})
        if len(refused):
            self.reply(peer, message, Status.WRONG_EPOCH, [refused], count=len(refused), aux=erased)
        else:
            self.reply(peer, message, aux=erased)

    def push(self, peer, message):
        def take(places):
            hashes, grads = message.hashes[places], message.values.reshape(message.count, -1)[places]
            if message.whole:  # what steps of SGD have changed elsewhere
                grads = grads / -RATE
            counts = (message.counts if message.counts.size else np.ones(message.count, np.uint32))[places]
            if self.mode != "bsp":
                self.step(message.table, hashes, grads, counts, message.clock)
            elif message.clock >= self.members[message.worker].clock:
                push = Push(message.clock, message.table, message.worker, message.sequence, hashes, grads, counts)
                self.pending.append(push)

        self.write(peer, message, take)

    def assign(self, peer, message):
        rows = message.values.reshape(message.count, -1)
        self.write(
            peer, message, lambda at: self.tables[message.table].assign(self.batch(message.hashes[at]), rows[at])
        )

    def erase(self, peer, message):
        member = self.members[message.worker]
        slots = np.array(self.slots_of(message.hashes), np.int64)

        def take(places):
            for slot in np.unique(slots[places]).tolist():
                batch = self.batch(message.hashes[places[slots[places] == slot]])
                member.erased[slot, message.sequence] = self.tables[message.table].erase(batch)

        self.write(peer, message, take)

    def contains(self, peer, message):
        refused = self.refused(self.slots_of(message.hashes))
        if len(refused):
            self.reply(peer, message, Status.WRONG_EPOCH, [refused], count=len(refused))
        else:
            there = self.tables[message.table].contains(self.batch(message.hashes))
            self.reply(peer, message, payload=[there], count=message.count, dtype=Dtype.UINT8)

    def tick(self, peer, message):
        member = self.members[message.worker]
        if message.epoch < self.epoch:
            none = np.empty(0, np.uint16)
            self.reply(peer, message, Status.WRONG_EPOCH, [none])
        elif message.clock < member.clock:
            self.reply(peer, message)
        elif message.clock > member.clock or not all(
            self.has_seen_mark(member, mark) for mark in message.numbers.tolist()
        ):
            self.reply(peer, message, Status.RETRY)
        else:
            self.end_clock(message.worker, tuple(message.tables.tolist()))
            self.reply(peer, message)

    def end_clock(self, rank, tables):
        member = self.members[rank]
        self.ticked[member.clock][rank] = member.tables = tables
        member.clock += 1
        self.greatest = max(self.greatest, member.clock)

    # --- moving slots with their state: only in the model ---

    def give(self, other, first, end, epoch):
        """Move slots [first, end), the last or first ones here, to a neighbour."""
        for table, shard in self.tables.items():
            for slot in range(first, end):
                rows, section, filter = shard.section(slot)
                other.tables[table].restore_filter(self.slots, slot, filter)
                if rows:
                    hashes, _ = shard.read_slot(slot)
                    other.tables[table].restore(rows, section)
                    shard.erase(self.batch(hashes))
        for rank, member in self.members.items():
            theirs = other.members[rank]
            for slot in range(first, end):
                theirs.seen[slot] |= member.seen.pop(slot, set())
            theirs.erased |= {key: rows for key, rows in member.erased.items() if first <= key[0] < end}
        kept = []
        for push in self.pending:
            slots = np.array(self.slots_of(push.hashes))
            moves = (first <= slots) & (slots < end)
            for where, pick in ((other.pending, moves), (kept, ~moves)):
                if pick.any():
                    where.append(push.part(pick))
        self.pending = kept
        self.set_map(epoch, [(self.first if first > self.first else end, first if first > self.first else self.end)])
        other.set_map(epoch, [(min(other.first, first), max(other.end, end))])
        deferred, self.deferred = self.deferred, {}
        for peer, message in deferred.values():
            self.pull(peer, message)  # refused, or deferred anew
