"""Copies, failovers and moves on random schedules: servers die, are declared dead and live on, join, are drained.

The servers here carry out their assignments in a few lines: arcs are logs of writes and orders, streams are queues.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membership_world import FORM, World, renamed
from memberships import new_membership
from recorded_world import RecordedWorld, check_replays
from replicas_world import (
    ReplicaWorld,
    command,
    declare_dead,
    started,
)
from shoal.cluster.protocol.messages import (
    AcceptedReply,
    AddTable,
    CreateTable,
    Drain,
    ErrorReply,
    GetMetrics,
    MapChanged,
    Rebalance,
    ReportStream,
    ServerGone,
    StartJob,
    TableReply,
)
from shoal.cluster.scheduler import replicas
from shoal.cluster.scheduler.assignments import Assignments
from shoal.cluster.scheduler.planner import Layout, owned
from tiers import rounds


def disturb(world: ReplicaWorld) -> None:
    """One death at a time, so that a copy is left; and whatever else may happen with it."""
    rng = world.rng
    living = world.living()
    roll = rng.random()
    if roll < 0.3 and len(living) > world.replicas + 1:
        victim = rng.choice(living)
        if rng.random() < 0.5:
            victim.alive = False
        for worker in world.those("worker"):
            if worker.place is not None and not worker.fenced:
                worker.ask(CreateTable(renamed(FORM, f"t{rng.randrange(100)}")))
        world.go(rng.choice([0.0, 0.05, 0.1]))
        declare_dead(world, victim)
    elif roll < 0.5:
        world.join_server()
    elif roll < 0.65:
        ranks = [server.place.rank for server in living]
        command(world, Drain(rng.choice(ranks)))
    elif roll < 0.75:
        arcs = world.membership.map.arcs
        command(world, Rebalance(tuple(rng.randrange(50) for _ in arcs) if rng.random() < 0.5 else ()))
    else:
        for worker in world.those("worker"):
            if worker.place is not None and not worker.fenced:
                worker.ask(GetMetrics())
    if rng.random() < 0.3:
        World.disturb(world)


def check_schedule(seed: int, *, servers: int = 3, replicas: int = 1, loss: float = 0.0) -> ReplicaWorld:
    world = started(seed, servers=servers, replicas=replicas, loss=loss)
    for _ in range(world.rng.randrange(2, 7)):
        disturb(world)
        world.go(world.rng.choice([0.1, 0.5, 2.0]))
        if not world.membership._assignments.are_confirmed or any(
            len({stream.backup for stream in world.membership.map.streams if arc in stream.arcs}) < 1
            for arc in range(len(world.membership.map.arcs))
        ):  # no second death before all arcs have copies again
            world.go(5.0)
    world.settle()
    world.quiet()
    assert not world.membership.broken
    assert world.membership.at_rest, "something waits for ever"
    world.check_committed()
    world.check_copies()
    return world


@pytest.mark.slow
@given(st.integers(0, 2**32), st.sampled_from([2, 3, 4]), st.sampled_from([0.0, 0.2]))
@settings(max_examples=rounds(25), deadline=None)
def test_no_acknowledged_write_is_lost_and_all_arcs_have_copies_in_the_end(seed, servers, loss):
    check_schedule(seed, servers=servers, loss=loss)


@pytest.mark.slow
@given(st.integers(0, 2**32))
@settings(max_examples=rounds(12), deadline=None)
def test_two_copies_survive_two_deaths_after_each_other(seed):
    check_schedule(seed, servers=4, replicas=2)


def check_two_deaths(seed: int) -> ReplicaWorld:
    """Two servers die at once, or one after the other before its arcs have all of their copies again."""
    world = started(seed, servers=5, replicas=2, loss=world_loss(seed))
    world.go(world.rng.choice([0.0, 1.0]))
    for victim in world.rng.sample(world.living(), 2):
        victim.alive = world.rng.random() < 0.3
        declare_dead(world, victim)
        world.go(world.rng.choice([0.0, 0.05, 0.1, 0.3]))
    world.settle()
    world.quiet()
    assert not world.membership.broken
    assert world.membership.at_rest, "something waits for ever"
    world.check_committed()
    world.check_copies()
    return world


@pytest.mark.slow
@given(st.integers(0, 2**32))
@settings(max_examples=rounds(40), deadline=None)
def test_two_copies_survive_two_deaths_at_once(seed):
    check_two_deaths(seed)


def test_the_copy_that_has_most_serves_and_the_others_stay():
    for seed in range(10):
        world = started(seed, servers=3, replicas=2)
        before = {arc for server in world.living() for arcs in server.arcs.values() for arc in arcs}
        declare_dead(world, world.servers()[0])
        while not world.membership._assignments.are_confirmed:
            world.go(0.05)
        map = world.membership.map
        copied = {arc for stream in map.streams for arc in stream.arcs}
        assert copied == before == set(range(len(map.arcs)))
        assert not any(stream.arriving for stream in map.streams)


def check_moves_without_copies(seed: int) -> None:
    """With no replicas, servers join and are drained, and slots move, without a death."""
    world = started(seed, servers=2, replicas=0, loss=world_loss(seed))
    for _ in range(world.rng.randrange(1, 5)):
        roll = world.rng.random()
        living = world.living()
        if roll < 0.4:
            world.join_server()
        elif roll < 0.7 and len(living) > 1:
            command(world, Drain(world.rng.choice(living).place.rank))
        else:
            world.those("worker")[0].ask(GetMetrics())
        world.go(world.rng.choice([0.1, 1.0, 5.0]))
    world.settle()
    world.quiet()
    assert not world.membership.broken
    world.check_committed()
    served = [len(arcs) for server in world.living() for arcs in server.arcs.values()]
    assert sum(served) == len(world.membership.map.arcs)
    world.check_copies()


def world_loss(seed: int) -> float:
    return 0.2 if seed % 2 else 0.0


@pytest.mark.slow
@given(st.integers(0, 2**32))
@settings(max_examples=rounds(15), deadline=None)
def test_slots_move_to_servers_that_join_and_from_those_that_are_drained_without_replicas_too(seed):
    check_moves_without_copies(seed)


def begun_moves(world: ReplicaWorld, seconds: float) -> list[float]:
    """The times at which copies began while all arcs had theirs."""
    times, arriving = [], set()
    for _ in range(round(seconds / 0.05)):
        world.go(0.05)
        now = {(arc, one.backup) for one in world.membership.map.streams for arc in one.arriving}
        times += [world.now] * len(now - arriving)
        arriving = now
    return times


def test_arcs_that_move_begin_one_after_the_other_as_fast_as_the_copy_rate_allows(monkeypatch):
    monkeypatch.setattr(replicas, "_MAX_PAUSE_SECONDS", 4.0)
    for copy_rate, pause in ((2 << 20, 4.0), (1 << 10, 4.0), (1 << 40, 0.0)):
        world = started(2, servers=2, replicas=0, copy_rate=copy_rate)
        world.join_server()
        times = begun_moves(world, 20.0)
        assert len(times) == len(world.membership.map.arcs) // 3
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert min(gaps) >= pause - 0.051  # a tick of the simulation
        assert max(gaps) <= pause + 2.0


def test_a_spare_server_gets_copies_that_are_lost_and_slots_at_the_next_rebalance():
    world = started(1, servers=2)
    spare = world.join_server(spare=True)
    world.go(10.0)
    assert not any(spare.arcs.values())
    assert (
        "server 2 has joined: tcp://10.0.0.9:7010, tcp://10.0.0.9:7011; it is a spare, which serves no slots yet"
        in (world.membership.notes)
    )
    declare_dead(world, world.servers()[0])
    world.go(10.0)
    assert not any(spare.arcs.values())
    world.check_copies()
    assert {stream.backup for stream in world.membership.map.streams} == set(spare.own())
    command(world, Rebalance())
    world.settle()
    assert sum(map(len, spare.arcs.values())) == len(world.membership.map.arcs) // 2
    world.quiet()
    world.check_committed()


def test_without_replicas_a_lost_server_breaks_the_cluster_with_the_same_text_as_ever():
    world = started(1, servers=2, replicas=0)
    server = world.servers()[1]
    declare_dead(world, server)
    assert world.membership.broken == (
        f"server 1 at tcp://10.0.0.9:5010, tcp://10.0.0.9:5011 ({(server.asked and '') or server.role} "
        f"{server.sender.hex()[:4]}) is lost with its rows, it does not answer: "
        "start the cluster again and load a checkpoint"
    )


def test_the_loss_of_the_last_copy_names_its_slots_and_the_remedy():
    world = started(1, servers=2)
    first, second = world.servers()
    declare_dead(world, first)
    world.go(2.0)
    assert not world.membership.broken
    worker = world.those("worker")[0]
    world.route(world.membership.suspect(second.place.rank, "it does not answer", 60.25, world.now))
    world.go(1.0)
    broken = world.membership.broken
    assert "which had the last copy of slots 0 to 15, is lost with its rows" in broken
    assert "start the cluster again and load a checkpoint" in broken
    assert any(isinstance(event, ServerGone) and event.text == broken for event in worker.gone)


def test_a_silent_server_with_the_last_copy_of_slots_is_waited_for():
    world = started(5, servers=2)
    first, last = world.living()
    first.alive = False
    declare_dead(world, first)
    world.go(2.0)
    last.alive = False  # stopped, for all that is known
    declare_dead(world, last)
    world.go(30.0)
    assert not world.membership.broken
    notes = [note for note in world.membership.notes if "It has the last copy of slots" in note]
    assert len(notes) == 1
    last.alive = True
    world.settle()
    assert not world.membership.broken
    last.alive = False
    world.go(59.0)
    assert not world.membership.broken
    world.go(4.0)
    assert "which had the last copy of slots 0 to 15, is lost" in world.membership.broken


def test_workers_learn_of_a_new_map_after_its_primaries_have_confirmed_it():
    world = started(3, servers=3)
    worker = world.those("worker")[0]
    first, second = world.servers()[:2]
    second.paused = True  # it will serve the slots of the first
    declare_dead(world, first)
    world.go(1.0)
    assert not any(isinstance(event, MapChanged) for event in worker.gone)
    second.paused = False
    world.go(3.0)
    events = [event for event in worker.gone if isinstance(event, MapChanged)]
    assert {endpoint.server for endpoint in events[0].map.endpoints} == {1, 2}


def test_copies_that_a_death_has_taken_are_missing_before_the_new_map_is_carried_out():
    world = started(3, servers=3)
    assert world.membership.metrics()["slots_without_copies"] == 0
    first, second = world.servers()[:2]
    second.paused = True  # it will serve the slots of the first
    declare_dead(world, first)
    world.go(1.0)
    map = world.membership.map  # of before
    gone = {endpoint.id for endpoint in map.of_server(first.place.rank)}
    served = {k for k, arc in enumerate(map.arcs) if arc.primary in gone}
    copied = {k for stream in map.streams if stream.backup in gone for k in stream.arcs}
    slots = sum(map.arcs[k].end_slot - map.arcs[k].first_slot for k in served | copied)
    assert served
    assert copied
    assert world.membership.metrics()["slots_without_copies"] == slots
    second.paused = False
    world.settle()
    world.quiet()
    assert world.membership.metrics()["slots_without_copies"] == 0


def test_an_order_that_the_dead_server_has_not_executed_is_executed_on_the_copies():
    world = started(4, servers=3)
    first = world.servers()[0]
    first.paused = True
    worker = world.those("worker")[0]
    number = worker.ask(CreateTable(FORM))
    world.go(1.0)
    assert number not in worker.replies
    declare_dead(world, first)
    world.settle()
    world.quiet()
    assert isinstance(worker.replies[number], TableReply)
    world.check_copies()
    for server in world.living():
        for arcs in server.arcs.values():
            assert all([type(order) for order in arc.orders] == [StartJob, AddTable] for arc in arcs.values())


def test_a_stream_that_is_of_no_use_is_closed_and_its_copies_are_made_again():
    world = started(5, servers=3)
    map = world.membership.map
    stream = map.streams[0]
    world.server_of(stream.primary).report(ReportStream(stream.id, -1, "diverged", "a status differs"))
    world.go(1.0)
    assert stream.id not in {one.id for one in world.membership.map.streams}
    to = map.endpoint(stream.backup).label
    assert any(note.endswith(f" at {to} are given up, diverged: a status differs") for note in world.membership.notes)
    world.settle()
    world.quiet()
    world.check_copies()


def test_a_drained_server_gives_all_away_and_leaves():
    world = started(6, servers=3)
    assert isinstance(command(world, Drain(1)), AcceptedReply)
    world.settle()
    world.quiet()
    assert not world.servers()[1].alive
    assert {endpoint.server for endpoint in world.membership.map.endpoints} == {0, 2}
    world.check_copies()
    refused = command(world, Drain(0))
    assert isinstance(refused, ErrorReply)
    assert (
        "without server 0 the cluster has 1 server, and replicas=1 needs 2: start another server first" in refused.text
    )
    assert "no server 7" in command(world, Drain(7)).text


@pytest.mark.slow
def test_a_drain_whose_reply_was_lost_is_answered_the_same_when_it_is_repeated():
    world, repeated = started_recorded(6), 1 << 40  # the number of a request
    reply = command(world, Drain(1), repeated)
    assert isinstance(reply, AcceptedReply)
    world.settle()
    world.quiet()
    assert not world.servers()[1].alive
    assert command(world, Drain(1), repeated) == reply
    done = command(world, Drain(1))  # of another tool
    assert done == AcceptedReply("server 1 was drained: other servers have all of its slots")
    world.recover()
    assert command(world, Drain(1), repeated) == reply
    assert command(world, Drain(1)) == done
    world.join_server()
    world.settle()
    world.quiet()
    assert 1 in world.membership._peers.servers  # another server has the rank
    assert command(world, Drain(1), repeated) == reply
    assert world.membership.state.draining == set()
    check_replays(world)
    assert isinstance(command(world, Drain(1)), AcceptedReply)
    assert world.membership.state.draining == {1}


def test_replies_to_tools_are_kept_for_the_last_requests():
    world = started(6, servers=3)
    for _ in range(300):
        command(world, Rebalance())
    assert len(world.membership.state.commands) == 256


def test_a_map_that_returns_arcs_is_published_after_their_server_has_confirmed_it():
    """The server may have retired them by the map before, which it has not confirmed."""
    world = started(4, servers=3)
    state = world.membership.state
    giver = world.servers()[0]
    rank, arcs = giver.place.rank, state.newest.arcs
    before = owned(state.newest)[rank]
    (backup,) = {stream.backup for stream in state.newest.streams if before & set(stream.arcs)}
    weights = {giver.own()[0]: 9, backup: 1}
    confirm, giver.confirm = giver.confirm, lambda message: None
    command(world, Rebalance(tuple(weights.get(arc.primary, 5) for arc in arcs)))
    world.go(1.0)
    assert before - owned(giver.map)[rank]
    declare_dead(world, world.server_of(backup))
    world.go(5.0)
    assert giver.map == state.newest
    assert before == owned(state.newest)[rank]
    assert state.published is not state.newest
    giver.confirm = confirm
    world.settle()
    world.quiet()
    assert state.published is state.newest
    world.check_committed()
    world.check_copies()


def test_a_server_that_does_not_carry_out_its_assignment_is_dead_in_the_end():
    world = started(7, servers=3)
    first, second = world.servers()[:2]
    second.confirm = lambda message: None
    declare_dead(world, first)
    world.go(29.0)
    assert not world.membership.broken
    world.go(3.0)
    assert "has not carried out its assignment of epoch 2 for 30." in world.membership.broken


def test_replicas_that_the_servers_do_not_reach_for_are_refused():
    with pytest.raises(ValueError, match=r"replicas must be a number from 0 to 1, .* got 2: start more servers"):
        new_membership(servers=2, replicas=2, rng=random.Random(1), now=0.0)


# --- replay ---------------------------------------------------------------------------------------------------------


class RecordedReplicaWorld(RecordedWorld, ReplicaWorld):
    """A world with replicas whose scheduler stores its inputs."""


def check_recorded(seed: int) -> None:
    world = started_recorded(seed)
    for _ in range(world.rng.randrange(2, 6)):
        disturb(world)
        world.go(world.rng.choice([0.1, 0.5, 2.0]))
        if world.rng.random() < 0.4:
            world.recover(missed=world.rng.choice([0.0, 0.5, 60.0]))
        world.go(5.0)
    world.settle()
    world.quiet()
    check_replays(world)
    assert not world.membership.broken
    world.check_committed()
    world.check_copies()


def started_recorded(seed: int) -> RecordedReplicaWorld:
    world = RecordedReplicaWorld(seed, servers=3, workers=1, replicas=1, loss=world_loss(seed))
    world.start_worker(0)
    world.go(15.0)
    return world


@pytest.mark.slow
@given(st.integers(0, 2**32))
@settings(max_examples=rounds(10), deadline=None)
def test_a_scheduler_that_is_started_again_in_a_failover_or_a_move_completes_it(seed):
    check_recorded(seed)


# --- planted bugs ---------------------------------------------------------------------------------------------------


def fails(check, seeds: int = 60) -> None:
    for seed in range(seeds):
        try:
            check(seed)
        except (AssertionError, KeyError):
            return
    pytest.fail("no schedule shows it")


def all_at_once(monkeypatch):
    carry_out = Assignments.carry_out

    def hasty(self):
        for server in self._late():
            if server.offered_epoch < self._state.newest.epoch:
                server.offered_epoch = self._state.newest.epoch
                self.send(server)
        carry_out(self)

    monkeypatch.setattr(Assignments, "carry_out", hasty)


def promotes_arriving_copies(monkeypatch):
    init = Layout.__init__

    def eager(self, *of):
        init(self, *of)
        for copies, arriving in zip(self.copies, self.arriving, strict=True):
            copies |= arriving
            arriving.clear()

    monkeypatch.setattr(Layout, "__init__", eager)


def forgets_the_order(monkeypatch):
    monkeypatch.setattr("shoal.cluster.scheduler.orders.Orders.replace", lambda self, server, adopters: None)


def orders_go_on(monkeypatch):
    monkeypatch.setattr("shoal.cluster.scheduler.orders.Orders.pause", lambda self, is_paused: self._continue())


@pytest.mark.long
@pytest.mark.parametrize("plant", [all_at_once, promotes_arriving_copies, forgets_the_order, orders_go_on])
def test_planted_bugs_of_replicas_are_found(monkeypatch, plant):
    plant(monkeypatch)
    fails(lambda seed: check_schedule(seed, servers=[3, 4][seed % 2], replicas=1 + seed % 2, loss=world_loss(seed)))
