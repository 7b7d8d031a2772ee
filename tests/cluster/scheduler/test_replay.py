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

from membership_world import World
from memberships import new_state
from recorded_world import (
    RecordedWorld,
    check_replays,
    play,
)
from shoal.cluster.protocol.messages import (
    Barrier,
    BarrierReply,
    Leave,
    MalformedMessageError,
    Order,
    OrderReply,
    Request,
    TakeSplit,
)
from shoal.cluster.scheduler.inputs import (
    Died,
    EventsSeen,
    MembersSilent,
    Probed,
    Restarted,
)
from shoal.cluster.scheduler.membership import Membership
from tiers import rounds


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 0.2]))
@settings(max_examples=rounds(25), deadline=None)
def test_a_replay_that_is_cut_at_any_input_has_the_state_that_there_was(seed, servers, workers, loss):
    world = RecordedWorld(seed, servers=servers, workers=workers, loss=loss, refusals=0.3)
    play(world, world.rng.randrange(3, 15))
    check_replays(world)


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 0.2]))
@settings(max_examples=rounds(25), deadline=None)
def test_a_scheduler_that_is_started_again_at_any_moment_keeps_all_that_it_has_said(seed, servers, workers, loss):
    world = RecordedWorld(seed, servers=servers, workers=workers, loss=loss, refusals=0.3)
    play(world, world.rng.randrange(3, 15), restarts=True)
    check_replays(world)
    assert world.membership.state.generation == world.restarts
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


@pytest.mark.slow
def test_the_schedules_contain_every_kind_of_input():
    missing = {Request, OrderReply, Probed, Died, MembersSilent, EventsSeen, Restarted}
    for seed in range(30):
        world = RecordedWorld(seed, servers=2, workers=2, loss=0.1, refusals=0.3)
        play(world, 12, restarts=True)
        missing -= {type(entry.body) for entry in world.entries}
        if not missing:
            return
    pytest.fail(f"no schedule contains {missing}")


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


@pytest.mark.slow
def test_the_schedules_for_planted_bugs_are_clean_without_them():
    for seed in range(10):
        disturbed(seed)


@pytest.mark.long
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


@pytest.mark.parametrize("kind", [Request, OrderReply, Probed, Died, MembersSilent])
def test_planted_an_input_that_is_not_recorded_is_found(kind):
    def lose(world):
        record = world.record

        def forgetful(entry):
            if not isinstance(entry.body, kind) or world.rng.random() < 0.5:
                record(entry)

        world.record = forgetful
        world.membership._record = forgetful

    fails(lambda seed: disturbed(seed, lose))


def test_planted_an_order_number_that_is_used_twice_is_found(monkeypatch):
    replay = Membership.replay

    def back(membership, entry):
        replay(membership, entry)
        for server in membership._peers.servers.values():
            if isinstance(entry.body, OrderReply) and server.order is not None:
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
        monkeypatch.setattr("recorded_world.saved", lambda membership: msgspec.msgpack.encode(save(membership)))
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
    one, same, other = (new_state(random.Random(seed), servers=1) for seed in (1, 1, 2))
    assert one.cluster == same.cluster != other.cluster
    assert one.draw(64) == same.draw(64) != one.draw(32)
