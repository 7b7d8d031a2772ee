"""Endpoints that replicate to each other without sockets: streams that lose, double and reorder messages.

A link delivers in order until it is cut; then what was under way is lost, and the stream is sent again. Between cuts
the messages of a faulty link may also arrive twice or in another order: more than a socket does.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import shoal
from endpoint_peer import Frames, Reply, Worker
from shoal import _core
from shoal._core import Op, Status, WireDtype
from table_specs import native_spec

SLOTS = 16
ARCS = [(first, first + 4) for first in range(0, SLOTS, 4)]
Range = tuple[int, int]


def digest_of(endpoint: _core.Endpoint | _core.Replica, table: int, arcs: Iterable[Range] = ARCS) -> tuple[Any, ...]:
    """The step of a table, and everything stored in its rows and filters, of these arcs."""
    shard = endpoint.shard(table)
    parts = []
    for first, end in arcs:
        for slot in range(first, end):
            rows, section, admission = shard.section(slot)
            parts.append((rows, section.tobytes(), admission.tobytes()))
    return shard.step, tuple(parts)


def equal(
    one: _core.Endpoint | _core.Replica, other: _core.Endpoint | _core.Replica, arcs: Iterable[Range] = ARCS
) -> bool:
    arcs = list(arcs)
    assert one.tables() == other.tables()
    return all(digest_of(one, table, arcs) == digest_of(other, table, arcs) for table in one.tables())


def same_arcs(one: Any, other: Any, arcs: Iterable[Range] = ARCS) -> bool:
    """Whether the whole state is equal, also windows and what waits."""
    return all(one.save_arc(*arc) == other.save_arc(*arc) for arc in arcs)


@dataclass
class Faults:
    """How often a link cuts, doubles and swaps."""

    rng: random.Random
    cut: float = 0.0
    double: float = 0.0
    swap: float = 0.0
    lose_reply: float = 0.0


@dataclass
class Link:
    stream: int
    primary: _core.Endpoint
    backup: _core.Endpoint
    is_down: bool = False
    replies: list[tuple[bytes, list[bytes]]] = field(default_factory=list)

    def carry(self, faults: Faults | None = None) -> list[Reply]:
        """Deliver what there is to deliver, both ways; the replies that the primary releases."""
        messages = []
        while (message := self.primary.next_message(self.stream)) is not None:
            messages.append(message)
        if self.is_down:
            return []
        if faults is not None:
            messages = self._damage(messages, faults)
        name = b"link %d" % self.stream
        answers = []
        for message in messages:
            answers += self.backup.handle(name, message)
        answers += self.backup.acknowledge()
        released = []
        for to, frames in answers:
            assert to == name
            if faults is None or faults.rng.random() >= faults.lose_reply:
                released += self.primary.handle_backup(self.stream, frames)
        if faults is not None and faults.rng.random() < faults.cut:
            self.primary.reconnected(self.stream)
        return [Reply.of(to, frames) for to, frames in released]

    def _damage(self, messages: list[list[bytes]], faults: Faults) -> list[list[bytes]]:
        rng = faults.rng
        if messages and rng.random() < faults.cut:
            messages = messages[: rng.randrange(len(messages))]
        damaged = []
        for message in messages:
            damaged += [message] * (1 + (rng.random() < faults.double))
        for i in range(1, len(damaged)):
            if rng.random() < faults.swap:
                damaged[i - 1], damaged[i] = damaged[i], damaged[i - 1]
        return damaged


class Cluster:
    """One primary and its backups; ``promote()`` replaces it."""

    def __init__(self, backups: int = 1, *, slots: int = SLOTS, arcs: Sequence[Range] = ARCS, **limits: int) -> None:
        self.arcs = list(arcs)
        self.epoch = 1
        self.now = 0
        self.endpoints = [_core.Endpoint(slots, **limits) for _ in range(backups + 1)]
        self.primary = self.endpoints[0]
        self.links = [Link(i, self.primary, backup) for i, backup in enumerate(self.endpoints[1:], 1)]
        self.faults: Faults | None = None
        self.assign()

    def assign(self) -> None:
        outgoing = [(link.stream, f"backup {link.stream}", "", self.arcs, []) for link in self.links]
        self.primary.assign(self.epoch, self.arcs, outgoing)
        for link in self.links:
            link.backup.assign(self.epoch, [], [], [(link.stream, self.arcs)])

    def send(self, frames: Frames, peer: bytes = b"worker") -> list[Reply]:
        return [Reply.of(to, answer) for to, answer in self.primary.handle(peer, frames)]

    def step(self, ms: int = 25) -> list[Reply]:
        self.now += ms
        replies = [Reply.of(to, answer) for to, answer in self.primary.on_time(self.now)]
        for link in self.links:
            replies += link.carry(self.faults)
        return replies + [Reply.of(to, answer) for to, answer in self.primary.released()]

    def settle(self) -> list[Reply]:
        """Until everything is committed, without faults."""
        self.faults = None
        replies = []
        for _ in range(200):
            replies += self.step()
            if self.primary.committed(self.primary.position()) and self.primary.replication()["held"] == 0:
                return replies
        raise AssertionError(f"not committed: {self.primary.replication()}")

    def promote(self, number: int = 1) -> _core.Endpoint:
        """The primary is dead: a backup takes its arcs. Returns the former primary."""
        dead = self.primary
        self.epoch += 1
        link = next(link for link in self.links if link.stream == number)
        self.primary = link.backup
        self.links = []
        self.primary.on_time(self.now)
        self.primary.assign(self.epoch, self.arcs)
        return dead


# --- what workers do ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One request of a script; ``sequence`` is its own among the requests of its worker."""

    rank: int
    sequence: int
    frames: Frames
    plain: Frames | None = None  # without the digest of its key list

    @property
    def name(self) -> tuple[int, int]:
        return self.rank, self.sequence


READS = 1 << 62
NEWEST = 1000  # an epoch that no endpoint is ahead of
ADAGRAD = native_spec(
    4, shoal.Adagrad(lr=0.1, eps=1e-8, n0=0.1), init=shoal.Uniform(0.1, seed=3), dtype="float16", seed=11
)


def random_script(
    rng: random.Random,
    *,
    workers: int = 3,
    clocks: int = 6,
    tables: dict[int, int],
    counted: Sequence[int] = (),
    keys: int = 60,
    bsp: bool = True,
) -> list[Call]:
    """Calls of some workers in lockstep: all end a clock before one begins the next but one."""
    pool = np.array(sorted({0, 2**64 - 1, *(rng.randrange(2**64) for _ in range(keys))}), np.uint64)
    numbers = [0] * workers
    reads = [READS] * workers
    script: list[Call] = []

    def some() -> np.ndarray[Any, Any]:
        return np.array(sorted(rng.sample(pool.tolist(), rng.randrange(len(pool) // 2))), np.uint64)

    def values_of(hashes: np.ndarray[Any, Any], dim: int) -> np.ndarray[Any, Any]:
        made = [rng.randrange(-4, 5) if rng.random() < 0.7 else 0 for _ in range(len(hashes) * dim)]
        return np.array(made, np.float32).reshape(len(hashes), dim)

    for clock in range(clocks):
        ticks = []
        for rank in rng.sample(range(workers), workers):
            worker = Worker(rank, epoch=NEWEST)
            named = []
            used = set()

            def add(frames: Frames, sequence: int, plain: Frames | None = None, rank: int = rank) -> None:
                script.append(Call(rank, sequence, frames, plain))

            def next_number(rank: int = rank) -> int:
                numbers[rank] += 1
                return numbers[rank]

            def next_read(rank: int = rank) -> int:
                reads[rank] += 1
                return reads[rank]

            for _ in range(rng.randrange(1, 5)):
                table = rng.choice(list(tables))
                hashes = some()
                act = rng.random()
                if act < 0.6:
                    sequence = next_number()
                    grads = values_of(hashes, tables[table])
                    fields: dict[str, Any] = {}
                    payload: Frames = [hashes, grads]
                    if rng.random() < 0.3 and len(hashes):
                        # The key list was pulled with `keep`, and its digest stands for it.
                        keep = worker._message(
                            Op.PULL, [hashes], dtype=WireDtype.FLOAT32, table=table, clock=clock, sequence=next_read(),
                            count=len(hashes), keep=True,
                        )  # fmt: skip
                        add(keep, reads[rank])
                        payload[0] = _core.digest(hashes, 1)
                        fields["digest"] = True
                    if rng.random() < 0.3 and (packed := _core.pack(grads.ravel())) is not None:
                        payload[1:] = list(packed)
                        fields["packed"] = True
                    if table in counted and len(hashes) and rng.random() < 0.7:
                        counts = np.array([rng.randrange(1, 4) for _ in hashes], np.uint32)
                        if (short := _core.pack_counts(counts)) is not None:
                            payload.append(short)
                            fields["counted"] = True
                    about = {
                        "dtype": WireDtype.FLOAT32,
                        "dim": tables[table],
                        "count": len(hashes),
                        "table": table,
                        "clock": clock,
                        "sequence": sequence,
                    }
                    frames = worker._message(Op.PUSH, payload, **about, **fields)
                    fields.pop("digest", None)
                    plain = worker._message(Op.PUSH, [hashes, *payload[1:]], **about, **fields)
                    add(frames, sequence, plain)
                    used.add(table)
                    last = int(hashes[-1]) // (2**64 // SLOTS) + 1 if len(hashes) else 0
                    named.append(last << 48 | sequence)
                elif act < 0.7:
                    sequence = next_number()
                    rows = values_of(hashes, tables[table])
                    if len(hashes):
                        about = {"sequence": sequence, "table": table, "clock": clock}
                        add(worker.assign(hashes, rows, **about), sequence)
                    else:
                        add(worker.keys(Op.ERASE, hashes, sequence=sequence, table=table, clock=clock), sequence)
                elif act < 0.8:
                    sequence = next_number()
                    add(worker.keys(Op.ERASE, hashes, sequence=sequence, table=table, clock=clock), sequence)
                elif act < 0.9:
                    add(worker.pull(hashes, table=table, clock=clock, sequence=next_read()), reads[rank])
                else:
                    add(worker.bare(Op.STATS, table=table, clock=clock, sequence=next_read()), reads[rank])
            ticks.append((rank, named, sorted(used)))
        for rank, named, used_tables in ticks:
            worker = Worker(rank, epoch=NEWEST)
            reads[rank] += 1
            script.append(Call(rank, reads[rank], worker.tick(clock, named, used_tables, sequence=reads[rank])))
            if bsp and rng.random() < 0.3:
                # Waits until the others have ended the clock.
                numbers[rank] += 1
                rules = worker.sweep(
                    [], table=rng.choice(list(counted) or list(tables)), clock=clock + 1, sequence=numbers[rank]
                )
                script.append(Call(rank, numbers[rank], rules))
    return script


class Driver:
    """Sends a script call by call; a call is done once it has an answer that is not DEFERRED."""

    def __init__(self, script: Sequence[Call], *, final: Iterable[int] = ()) -> None:
        self.script = list(script)
        self.final = {Status.OK, Status.BAD_REQUEST, Status.RESOURCE_EXHAUSTED, *final}  # statuses that end a call
        self.begun = 0
        self.waiting: dict[tuple[int, int], Call] = {}
        self.answers: dict[tuple[int, int], Reply] = {}

    def take(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            name = (int(reply.peer), reply.sequence)
            if reply.status == Status.DEFERRED or name not in self.waiting:
                continue
            assert reply.status in self.final, reply
            self.answers[name] = reply
            del self.waiting[name]

    def begin(self, send: Any) -> bool:
        """Send the next call; False if there is none."""
        if self.begun == len(self.script):
            return False
        call = self.script[self.begun]
        self.begun += 1
        self.waiting[call.name] = call
        self._send(call, send)
        return True

    def _send(self, call: Call, send: Any) -> None:
        peer = str(call.rank).encode()
        replies = send(call.frames, peer)
        if any(reply.status == Status.UNKNOWN_KEY_LIST for reply in replies):
            replies = send(call.plain, peer)
        self.take(replies)

    def again(self, send: Any) -> None:
        """As clients do: everything without an answer, in order."""
        for call in list(self.waiting.values()):
            self._send(call, send)

    def run(self, send: Any) -> None:
        while self.begin(send):
            pass
        assert not self.waiting


# A job of three workers and three tables, of which one counts and expires keys.
ADMITTED = native_spec(admit=shoal.AfterCount(2), expire=(shoal.TimeToLive(2),))
TABLES = {0: 1, 1: 4, 2: 1}
MODES = [("bsp", 0), ("ssp", 1), ("asp", 0)]


def prepare(endpoint: Any, mode: str, staleness: int, *, memory: int | None = None) -> None:
    """The orders that begin a job of three workers."""
    if memory is not None:
        endpoint.set_memory(memory)
    endpoint.add_table(0, native_spec())
    endpoint.add_table(1, ADAGRAD)
    endpoint.add_table(2, ADMITTED)
    endpoint.start_job(1, mode, staleness)
    for rank in range(3):
        endpoint.admit(rank, 1, 0)


def alone(mode: str, staleness: int, **how: Any) -> _core.Endpoint:
    endpoint = _core.Endpoint(SLOTS, ARCS)
    endpoint.set_map(1, ARCS)
    prepare(endpoint, mode, staleness, **how)
    return endpoint


def random_faults(rng: random.Random) -> Faults:
    return Faults(rng, cut=0.2, double=0.1, swap=0.1, lose_reply=0.2)


def script_of(seed: int, mode: str) -> list[Any]:
    return random_script(random.Random(seed), tables=TABLES, counted=[2], bsp=mode == "bsp")
