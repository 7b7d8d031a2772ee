"""A world whose inputs to the membership are recorded and replayed."""

from __future__ import annotations

import msgspec

from membership_world import FORM, Process, World, renamed
from memberships import copied_state, restored
from shoal.cluster.protocol.messages import (
    CreateTable,
    GetMetrics,
    Request,
    TakeSplit,
)
from shoal.cluster.scheduler.inputs import Input
from shoal.cluster.scheduler.jobs import Jobs
from shoal.cluster.scheduler.membership import Membership
from shoal.cluster.scheduler.orders import Orders
from shoal.cluster.scheduler.servers import Servers
from shoal.cluster.scheduler.state import Job, JobLine, Peer
from shoal.cluster.scheduler.tables import Tables


def shown(value: object) -> object:
    """What a local variable of an operation says, without the identity of objects."""
    if isinstance(value, Peer):
        return value.sender
    if isinstance(value, Job):
        return value.number
    if isinstance(value, JobLine):
        return value.name
    if isinstance(value, Jobs | Orders | Servers | Tables):
        return None
    if isinstance(value, (list, tuple)):
        return [shown(one) for one in value]
    return repr(value)


def described(membership: Membership) -> list[object]:
    """All of the state, also in the middle of operations."""
    orders, jobs = membership._orders, membership._jobs
    running = [one for one in (orders._operation, *orders._operations) if one is not None]
    state = membership.state
    frames = [
        (one.gi_code.co_name, one.gi_frame.f_lineno, {name: shown(it) for name, it in one.gi_frame.f_locals.items()})
        for one in running
        if one.gi_frame is not None
    ]
    wanted = {name: [(worker.sender, number) for worker, number in them] for name, them in kept_tables(membership)}
    results = sorted(orders._results.items()) if running else []
    in_order = [list(state.peers), [(list(line.queue), list(line.forming)) for line in state.jobs.values()]]
    return [
        copied_state(membership),
        in_order,
        frames,
        wanted,
        sorted(jobs._admitting),
        results,
        sorted(jobs._has_place),
    ]


def kept_tables(membership: Membership) -> list[tuple[str, list[tuple[Peer, int]]]]:
    return list(membership._tables._wanted.items())


def copied(entry: Input) -> Input:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=Input)


def saved(membership: Membership) -> bytes:
    return msgspec.msgpack.encode(membership.save())


class RecordedWorld(World):
    """A world whose scheduler stores its inputs after each message, and can be started again."""

    def __init__(self, seed: int, **of: object) -> None:
        self.entries: list[Input] = []
        self.states: list[list[object]] = []
        self.starts: list[tuple[int, bytes]] = []  # states that were saved, each with the number of inputs before it
        self.restarts = 0
        self.kept = 0  # inputs that are stored
        super().__init__(seed, **of)
        self.membership._record = self.record
        self.starts.append((0, saved(self.membership)))

    def record(self, entry: Input) -> None:
        self.states.append(described(self.membership))
        self.entries.append(entry)

    def route(self, outgoing: list[tuple[bytes, object]]) -> None:
        self.kept = len(self.entries)
        super().route(outgoing)
        if self.membership.at_rest and self.rng.random() < 0.02:
            self.starts.append((self.kept, saved(self.membership)))

    def recover(self, *, missed: float = 0.0) -> None:
        """Start the scheduler again ``missed`` seconds later."""
        self.restarts += 1
        del self.entries[self.kept :], self.states[self.kept :]
        number, state = self.rng.choice(self.starts[-3:])
        self.membership = restored(state, map(msgspec.msgpack.encode, self.entries[number:]), record=self.record)
        self.now += missed
        self.flying = [flying for flying in self.flying if not flying[3]]
        self.membership.restarted("", self.now)
        self.kept = len(self.entries)

    def lose_step(self) -> None:
        """Process something, and stop before it is stored: what would have been sent is lost."""
        workers = [worker for worker in self.those("worker") if worker.place is not None and not worker.fenced]
        if workers:
            worker = self.rng.choice(workers)
            ask = self.request(worker)
            self.membership.handle(worker.sender, "10.0.0.9", ask, self.now)
        if self.rng.random() < 0.3:  # one that is unknown after the restart asks again
            newcomer = self.start_worker()
            hello = Request(newcomer.sender, 1, newcomer.asked[1], 1, (1,))
            self.membership.handle(newcomer.sender, "10.0.0.9", hello, self.now)
        self.recover()

    def request(self, worker: Process) -> Request:
        number = worker.ask(CreateTable(renamed(FORM, f"t{self.rng.randrange(3)}")))
        return Request(worker.sender, number, worker.asked[number], number, tuple(worker.asked))


def play(world: RecordedWorld, steps: int, *, restarts: bool = False) -> None:
    for _ in range(steps):
        world.disturb()
        workers = [worker for worker in world.those("worker") if worker.place is not None and not worker.fenced]
        if workers and world.rng.random() < 0.4:
            asked = world.rng.choice([GetMetrics(), TakeSplit(0, 50, "d", -1, 1.5, 0), TakeSplit(1, 9, "d", 3, 0.0, 2)])
            world.rng.choice(workers).ask(asked)
        world.go(world.rng.choice([0.2, 1.0, 3.0]))
        if restarts and world.rng.random() < 0.5:
            world.recover(missed=world.rng.choice([0.0, 0.5, 60.0])) if world.rng.random() < 0.5 else world.lose_step()


def check_replays(world: RecordedWorld) -> None:
    """Replay all inputs from the start, and after each saved state those that follow; every state is compared."""
    ends = described(world.membership)
    for number, state in world.starts:
        membership = restored(state, [])
        for k in range(number, len(world.entries)):
            assert described(membership) == world.states[k], f"a difference before input {k}: {world.entries[k]}"
            membership.replay(copied(world.entries[k]))
        assert described(membership) == ends
