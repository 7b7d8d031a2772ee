"""The recorded inputs of a membership give its state again, and a scheduler that replays them goes on as if it had not
stopped.

Schedules are those of test_membership.py. A restart loses what was recorded and not yet stored, and all messages that
depend on it: the network here delivers nothing before it is stored.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from shoal.cluster.protocol.messages import (
    Barrier,
    BarrierReply,
    CreateTable,
    GetMetrics,
    Leave,
    MalformedMessageError,
    Order,
    Request,
    TakeSplit,
)
from shoal.cluster.scheduler.inputs import (
    Asked,
    Died,
    EventsSeen,
    Input,
    MembershipState,
    MembersSilent,
    Obeyed,
    Probed,
    Restarted,
)
from shoal.cluster.scheduler.jobs import Jobs
from shoal.cluster.scheduler.members import Job, Peer
from shoal.cluster.scheduler.membership import Membership
from shoal.cluster.scheduler.orders import Orders
from shoal.cluster.scheduler.servers import Servers
from shoal.cluster.scheduler.tables import Tables
from test_membership import FORM, Process, World, renamed


def shown(value: object) -> object:
    """What a local variable of an operation says, without the identity of objects."""
    if isinstance(value, Peer):
        return value.sender
    if isinstance(value, Job):
        return value.number
    if isinstance(value, Jobs | Orders | Servers | Tables):
        return None
    if isinstance(value, (list, tuple)):
        return [shown(one) for one in value]
    return repr(value)


def described(membership: Membership) -> list[object]:
    """All of the state, also in the middle of operations."""
    running = [one for one in (membership._orders._operation, *membership._orders._operations) if one is not None]
    state = structs.replace(membership._state(), now=0.0)
    frames = [
        (one.gi_code.co_name, one.gi_frame.f_lineno, {name: shown(it) for name, it in one.gi_frame.f_locals.items()})
        for one in running
        if one.gi_frame is not None
    ]
    wanted = {name: [(worker.sender, number) for worker, number in them] for name, them in kept_tables(membership)}
    admitting = membership._jobs._admitting and membership._jobs._admitting.sender
    results = sorted(membership._orders._results.items()) if running else []
    changes = [
        (server.confirmed_epoch, sorted(server.serves), server.pending) for server in membership._peers.servers.values()
    ]
    return [msgspec.msgpack.encode(state), changes, frames, wanted, admitting, results, membership._jobs._vacant]


def kept_tables(membership: Membership) -> list[tuple[str, list[tuple[Peer, int]]]]:
    return list(membership._tables._wanted.items())


def copied(entry: Input) -> Input:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=Input)


def saved(membership: Membership) -> bytes:
    return msgspec.msgpack.encode(membership.save())


def restored(state: bytes, entries: list[Input], **of: object) -> Membership:
    membership = Membership.restore(msgspec.msgpack.decode(state, type=MembershipState), **of)
    for entry in entries:
        membership.replay(copied(entry))
    return membership


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
        self.membership = restored(state, self.entries[number:], record=self.record)
        self.now += missed
        self.flying = [flying for flying in self.flying if not flying[3]]
        self.membership.restarted(self.now)
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


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 0.2]))
@settings(max_examples=25, deadline=None)
def test_a_replay_that_is_cut_at_any_input_has_the_state_that_there_was(seed, servers, workers, loss):
    world = RecordedWorld(seed, servers=servers, workers=workers, loss=loss, refusals=0.3)
    play(world, world.rng.randrange(3, 15))
    check_replays(world)


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 0.2]))
@settings(max_examples=25, deadline=None)
def test_a_scheduler_that_is_started_again_at_any_moment_keeps_all_that_it_has_said(seed, servers, workers, loss):
    world = RecordedWorld(seed, servers=servers, workers=workers, loss=loss, refusals=0.3)
    play(world, world.rng.randrange(3, 15), restarts=True)
    check_replays(world)
    assert world.membership.generation == world.restarts
    # Quiet: all leave, and a whole job starts anew.
    world.loss = 0.0
    world.go(8.0)
    assert not world.membership.broken
    for worker in world.those("worker"):
        worker.asked.clear()
        worker.ask(Leave())
    world.go(8.0)
    assert not world.membership.workers
    fresh = [world.start_worker() for _ in range(workers)]
    world.go(4.0)
    world.recover(missed=600.0)
    world.go(4.0)
    assert sorted(worker.place.rank for worker in fresh) == list(range(workers))
    barriers = [worker.ask(Barrier("end")) for worker in fresh]
    world.go(3.0)
    assert [worker.replies[number] for worker, number in zip(fresh, barriers, strict=True)] == [
        BarrierReply()
    ] * workers


def test_the_schedules_contain_every_kind_of_input():
    kinds = set()
    for seed in range(30):
        world = RecordedWorld(seed, servers=2, workers=2, loss=0.1, refusals=0.3)
        play(world, 12, restarts=True)
        kinds |= {type(entry) for entry in world.entries}
    assert kinds >= {Asked, Obeyed, Probed, Died, MembersSilent, EventsSeen, Restarted}


def fails(schedule, seeds: int = 40) -> None:
    """Assert that some schedule shows a planted bug."""
    for seed in range(seeds):
        try:
            schedule(seed)
        except (AssertionError, KeyError, ValueError, MalformedMessageError):
            return
    pytest.fail("no schedule shows it")


def disturbed(seed: int, change=lambda world: None) -> None:
    world = RecordedWorld(seed, servers=2, workers=2, loss=0.1)
    change(world)
    play(world, 10, restarts=True)
    check_replays(world)
    world.loss = 0.0
    world.go(8.0)


def test_the_schedules_for_planted_bugs_are_clean_without_them():
    for seed in range(10):
        disturbed(seed)


def test_planted_a_reply_that_is_sent_before_its_input_is_stored_is_found():
    class Hasty(RecordedWorld):
        def lose_step(self):
            for worker in self.those("worker"):
                if worker.place is not None and not worker.fenced:
                    number = worker.ask(TakeSplit(0, 50, "d", -1, 0.0, 0))
                    ask = Request(worker.sender, number, worker.asked[number], number, tuple(worker.asked))
                    World.route(self, self.membership.handle(worker.sender, "h", ask, self.now))
            self.recover()

    def schedule(seed):
        world = Hasty(seed, servers=1, workers=2, loss=0.2)
        play(world, 12, restarts=True)
        world.loss = 0.0
        world.go(5.0)

    fails(schedule, seeds=300)  # 1 of 20 shows it


@pytest.mark.parametrize("kind", [Asked, Obeyed, Probed, Died, MembersSilent])
def test_planted_an_input_that_is_not_recorded_is_found(kind):
    def lose(world):
        record = world.record

        def forgetful(entry):
            if not isinstance(entry, kind) or world.rng.random() < 0.5:
                record(entry)

        world.record = forgetful
        world.membership._record = forgetful

    fails(lambda seed: disturbed(seed, lose))


def test_planted_an_order_number_that_is_used_twice_is_found(monkeypatch):
    replay = Membership.replay

    def back(membership, entry):
        replay(membership, entry)
        for server in membership._peers.servers.values():
            if isinstance(entry, Obeyed) and server.order is not None:
                server.orders -= 1
                server.order = Order(server.orders, server.order.body)

    monkeypatch.setattr(Membership, "replay", back)
    fails(disturbed)


def test_planted_a_saved_state_without_the_latest_number_of_a_request_is_found(monkeypatch):
    save = Membership.save

    def forgetful(membership):
        state = save(membership)
        return structs.replace(state, peers=[structs.replace(peer, latest=0) for peer in state.peers])

    fails(disturbed_with(monkeypatch, forgetful))


def disturbed_with(monkeypatch, save):
    def schedule(seed):
        monkeypatch.setattr(f"{__name__}.saved", lambda membership: msgspec.msgpack.encode(save(membership)))
        disturbed(seed)

    return schedule


def test_a_state_in_the_middle_of_an_operation_is_not_saved():
    world = RecordedWorld(1, servers=1, workers=1, loss=0.0)
    world.those("server")[0].paused = False
    world.start_worker()
    while world.membership.at_rest:
        world.go(0.05)
    with pytest.raises(RuntimeError, match="an operation is in progress"):
        world.membership.save()


def test_time_that_passes_while_the_scheduler_is_down_is_not_silence():
    world = RecordedWorld(2, servers=2, workers=2, loss=0.0)
    for _ in range(2):
        world.start_worker()
    world.go(3.0)
    world.recover(missed=3600.0)
    world.go(10.0)
    assert len(world.membership.workers) == 2
    assert not world.membership.broken


def test_numbers_are_drawn_from_the_seed_and_differ_between_clusters():
    of = {"servers": 1, "now": 0.0}
    one, same, other = (Membership(**of, rng=random.Random(seed)) for seed in (1, 1, 2))
    assert one.cluster == same.cluster != other.cluster
    assert Membership.restore(one.save())._numbers.draw(64) == same._numbers.draw(64) != one._numbers.draw(32)
