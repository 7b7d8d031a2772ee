"""The scheduler's truth on random schedules: messages are lost, doubled and late, processes die, pause, come and go.

Time and network are simulated, so a schedule of minutes takes milliseconds; a seed gives the same one again.
"""

from __future__ import annotations

import random
import re
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membership_world import (
    BSP,
    FORM,
    World,
    joined,
    renamed,
    together,
)
from memberships import new_membership
from shoal.base.defaults import MAX_WORKERS
from shoal.cluster.protocol import messages
from shoal.cluster.protocol.messages import (
    AcceptedReply,
    AddTable,
    Admit,
    Barrier,
    BarrierReply,
    CreateTable,
    Dismiss,
    DropTable,
    ErrorReply,
    Fence,
    GetMap,
    GetMapReply,
    GetMetrics,
    HandOver,
    Heartbeat,
    Hello,
    Hold,
    JobConsistency,
    Join,
    Leave,
    MalformedMessageError,
    Order,
    OrderReply,
    PendingReply,
    Reply,
    Request,
    ServerGone,
    SplitReply,
    StartJob,
    TableRecord,
    TableReply,
    TakeSplit,
    decode,
)
from shoal.cluster.protocol.status import GetStatus
from shoal.cluster.scheduler import membership as membership_module
from shoal.cluster.scheduler import tables as tables_module
from shoal.cluster.scheduler.inputs import InputBody
from shoal.table.spec import MAX_TABLES
from tiers import rounds


@pytest.mark.slow
@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.1, 0.3]),
    st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=rounds(80), deadline=None)
def test_invariants_hold_on_random_schedules_and_everybody_is_answered_once_it_is_quiet(
    seed, servers, workers, loss, refusals
):
    world = World(seed, servers=servers, workers=workers, loss=loss, refusals=refusals)
    for _ in range(world.rng.randrange(3, 25)):
        world.disturb()
        world.go(world.rng.choice([0.2, 1.0, 3.0]))
    # Quiet: nothing is lost, nobody dies. All that are in leave; then a whole job starts anew.
    world.loss = 0.0
    world.go(8.0)
    assert not world.membership.broken
    for worker in world.those("worker"):
        worker.asked.clear()
        worker.ask(Leave())
    world.go(8.0)
    assert not world.those("worker") or all(worker.fenced for worker in world.those("worker"))
    assert not world.membership.workers
    fresh = [world.start_worker() for _ in range(workers)]
    world.go(4.0)
    assert sorted(worker.place.rank for worker in fresh) == list(range(workers))
    assert {worker.place.clock for worker in fresh} == {0}
    barriers = [worker.ask(Barrier("end")) for worker in fresh]
    world.go(3.0)
    assert [worker.replies[number] for worker, number in zip(fresh, barriers, strict=True)] == [
        BarrierReply()
    ] * workers


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=rounds(30), deadline=None)
def test_a_lost_server_ends_every_wait_and_is_named_to_all_that_ask_after_it(seed, leaves):
    world = World(seed, servers=2, workers=2, loss=0.1)
    world.start_worker()
    world.start_worker()
    for _ in range(world.rng.randrange(6)):
        world.disturb()
        world.go(1.0)
    world.go(4.0)
    lost = world.those("server")[world.rng.randrange(2)]
    for worker in world.those("worker"):
        if worker.place is not None and not worker.fenced:
            worker.ask(Barrier("never"))
            break
    if leaves:
        lost.ask(Leave())
    else:
        lost.alive = False
    world.loss = 0.0
    world.go(10.0)
    assert "is lost with its rows" in world.membership.broken
    assert lost.place.map.of_server(lost.place.rank)[0].address in world.membership.broken
    late = world.start_worker()
    world.go(2.0)
    for worker in world.those("worker"):
        assert not worker.asked
        if worker.place is not None and not worker.fenced:
            assert any(isinstance(event, ServerGone) for event in worker.gone)
    assert late.replies[2].kind == "server-lost"


def test_a_scheduler_that_was_itself_stopped_takes_nobody_for_dead():
    world, (one, two) = together(workers=2)
    world.now += 1000.0
    world.route(world.membership.on_time(world.now))
    world.go(3.0)
    assert set(world.membership.workers) == {0, 1}
    two.alive = False
    world.go(7.0)
    assert set(world.membership.workers) == {0}
    assert [event.rank for event in one.gone] == [1]
    assert "silent for 5." in one.gone[0].text


def test_a_worker_that_takes_the_place_of_a_dead_one_begins_at_the_greatest_clock_and_the_dead_one_is_fenced():
    world, (_, two) = together(workers=2, servers=2)
    two.paused = True
    world.go(7.0)
    world.clock = 17
    again = world.start_worker(1)
    world.go(3.0)
    assert (again.place.rank, again.place.incarnation, again.place.clock) == (1, 2, 17)
    kinds = [type(order) for order in world.processes[0].executed]
    assert kinds == [StartJob, Fence, Dismiss, Hold, Admit]
    two.paused = False
    world.go(2.0)
    assert two.fenced
    assert again.place.job == two.place.job


def test_all_servers_dismiss_a_worker_at_the_greatest_clock_that_any_tells_and_with_its_tables():
    world, (_, two) = together(workers=2, servers=3)
    world.clock = 17
    two.alive = False
    world.go(7.0)
    for rank in range(3):  # server k tells clock 17 - k, and that as the table
        assert world.processes[rank].executed[-1] == Dismiss(1, 1, 17, (17,))


def test_a_job_is_told_how_many_clocks_the_one_before_had():
    world, (one, two) = together(workers=2, servers=2)
    world.clock = 17
    for worker in (one, two):
        worker.ask(Leave())
    world.go(3.0)
    for rank in range(2):
        world.start_worker(rank)
    world.go(3.0)
    for server in world.processes[:2]:
        assert [order.before for order in server.executed if isinstance(order, StartJob)] == [0, 17]


def test_a_rank_that_is_taken_is_waited_for_until_its_worker_is_dead():
    world, (one, _) = together(workers=2)
    again = world.start_worker(0)
    world.go(3.0)
    assert again.place is None
    one.alive = False
    world.go(8.0)
    assert (again.place.rank, again.place.incarnation) == (0, 2)


def test_one_who_came_to_a_barrier_and_died_does_not_stand_in_for_the_one_who_takes_its_place():
    world, (one, two) = together(workers=2)
    two.ask(Barrier("b"))
    world.go(1.0)
    two.alive = False
    again = world.start_worker(1)
    world.go(8.0)
    assert again.place.incarnation == 2
    number = one.ask(Barrier("b"))
    world.go(2.0)
    assert number not in one.replies
    again.ask(Barrier("b"))
    world.go(2.0)
    assert one.replies[number] == BarrierReply()


def test_a_barrier_tells_all_alike_who_has_not_come_to_it():
    world, (one, two, three, four) = together(workers=4)
    first = one.ask(Barrier("b"))
    four.ask(Barrier("b"))
    three.ask(Leave())
    world.go(1.0)
    four.alive = False  # it had come, and is not there any more
    world.go(7.0)
    assert first not in one.replies
    second = two.ask(Barrier("b"))
    world.go(1.0)
    assert one.replies[first] == two.replies[second] == BarrierReply((2, 3))


def test_who_ends_its_work_early_is_told_to_all_and_nobody_takes_its_place():
    world, (one, two, three) = together(workers=3)
    two.ask(Leave(1))
    three.ask(Leave())
    again = world.start_worker(1)
    world.go(2.0)
    assert not two.alive
    assert [(event.rank, event.job) for event in one.gone] == [(1, one.place.job)]
    assert re.fullmatch(r"worker 1 \(worker [0-9a-f]{4}\) has ended its fit early", one.gone[0].text)
    assert again.place is None
    assert set(world.membership.workers) == {0}


def test_the_next_number_of_workers_begins_once_all_that_are_lost_are_dismissed():
    world = World(1, servers=1, workers=2, loss=0.0)
    wants = Join(None, (), 2, BSP, most=3)
    one, two = (world.start("worker", wants) for _ in range(2))
    world.go(2.0)
    handed_over = one.ask(HandOver(returns=True))
    world.go(1.0)
    assert one.replies[handed_over] == AcceptedReply()
    server = world.processes[0]
    server.paused = True
    one.ask(Leave())
    two.ask(Leave(1))
    again = [world.start("worker", wants) for _ in range(2)]
    world.go(2.0)
    server.paused = False
    while not isinstance(server.executed[-1], Dismiss):
        world.go(0.05)
    server.paused = True
    world.go(1.0)
    job = world.membership.state.jobs[""].job
    assert (job.number, job.early, job.dismissed, job.members) == (one.place.job, {1}, {0}, {})
    server.paused = False
    world.go(2.0)
    assert [(worker.place.continues, worker.place.num_workers) for worker in again] == [(one.place.job, 2)] * 2
    assert [type(order) for order in server.executed] == [StartJob, *[Fence, Dismiss] * 2, StartJob]


def test_one_who_goes_while_it_is_let_in_is_dismissed_and_its_rank_is_free_again():
    world, (_, two) = together(workers=2)
    two.alive = False
    world.go(7.0)
    server = world.processes[0]
    server.paused = True
    again = world.start_worker()
    world.go(1.0)
    again.ask(Leave())
    world.go(1.0)
    server.paused = False
    world.go(2.0)
    assert [type(order) for order in server.executed] == [StartJob, Fence, Dismiss, Hold, Admit, Fence, Dismiss]
    third = world.start_worker()
    world.go(2.0)
    assert (third.place.rank, third.place.incarnation) == (1, 3)


def test_a_pass_over_the_data_ends_for_all_at_one_clock_once_all_have_come_to_its_end():
    world, (one, two) = together(workers=2)

    def take(worker, clock, finished=-1, *, number=0, count=2, digest="d"):
        asked = worker.ask(TakeSplit(number, count, digest, finished, 0.0, clock))
        world.go(1.0)
        return worker.replies[asked]

    assert take(one, 5) == SplitReply(0, None)
    assert take(two, 5) == SplitReply(1, None)
    assert take(one, 9, 0) == SplitReply(None, None)  # the other split may come back
    assert take(two, 7, 1) == SplitReply(None, None)  # all is done, but one may not know
    assert take(one, 10) == SplitReply(None, 11)  # 10 may have become 11 since
    assert take(two, 8) == SplitReply(None, 11)
    assert take(one, 11, number=1, count=0) == SplitReply(None, None)
    two.alive = False
    world.go(7.0)
    assert take(one, 12, number=1, count=0) == SplitReply(None, 12)
    assert "other splits than the worker that began it" in take(one, 12, number=1, count=3).text
    assert "other splits than the worker that began it" in take(one, 12, number=1, digest="e").text
    assert "cut the data into larger ones" in take(one, 12, number=2, count=2**24).text
    two = world.start_worker(1)
    world.go(2.0)
    assert take(two, 0) == SplitReply(None, 11)  # that pass is over
    assert take(two, 0, number=2) == SplitReply(0, None)
    two.alive = False
    world.go(7.0)
    assert take(one, 12, number=2) == SplitReply(0, None)


@pytest.mark.slow
def test_passes_that_all_workers_have_gone_beyond_are_forgotten_and_over_for_who_comes_late():
    world, (one, two) = together(workers=2)
    kept = []

    def take(worker, number, clock, finished=-1):
        out = world.membership.handle(
            worker.sender,
            "h",
            Request(
                worker.sender,
                worker.ask(None),
                TakeSplit(number, 1, "d", finished, 0.0, clock),
                worker.number,
                tuple(worker.asked),
            ),
            world.now,
        )
        del worker.asked[worker.number]
        kept.append(len(world.membership.state.jobs[""].job.passes))
        return out[-1][1].body

    for number in range(300):
        assert take(one, number, number) == SplitReply(0, None)
        assert take(one, number, number, 0) == SplitReply(None, None)
        assert take(two, number, number) == SplitReply(None, number + 1)
        assert take(one, number, number) == SplitReply(None, number + 1)
    assert max(kept) <= 2
    assert take(two, 5, 300) == SplitReply(None, 299)
    two.alive = False
    world.go(7.0)
    late = world.start_worker(1)
    world.go(2.0)
    assert take(late, 0, 300) == SplitReply(None, 299)
    for number in range(300, 1323):  # begun, and not gone beyond by all
        assert take(one, number, 300) == SplitReply(0, None)
    assert "1024 passes over the data are unfinished" in take(one, 1323, 300).text


def test_a_worker_that_asks_for_another_part_gives_back_the_one_that_it_did_not_finish():
    world, (one, two) = together(workers=2)
    first = one.ask(TakeSplit(0, 1, "d", -1, 0.0, 0))
    world.go(1.0)
    assert one.replies[first] == SplitReply(0, None)
    one.ask(TakeSplit(1, 5, "d", -1, 0.0, 0))
    world.go(1.0)
    again = two.ask(TakeSplit(0, 1, "d", -1, 0.0, 0))
    world.go(1.0)
    assert two.replies[again] == SplitReply(0, None)
    done = two.ask(TakeSplit(0, 1, "d", 0, 0.0, 3))
    world.go(1.0)
    assert two.replies[done] == SplitReply(None, 4)  # the other went on to the next pass


def test_what_the_servers_have_counted_is_told_endpoint_by_endpoint():
    world, (one,) = together(servers=2)
    asked = one.ask(GetMetrics())
    world.go(2.0)
    reported = [(endpoint.server, endpoint.address, endpoint.figures) for endpoint in one.replies[asked].endpoints]
    assert reported == [
        (0, "tcp://10.0.0.9:5000", {"loop": 0}),
        (1, "tcp://10.0.0.9:5010", {"loop": 0}),
        (1, "tcp://10.0.0.9:5011", {"loop": 1}),
    ]


def test_when_all_workers_die_at_once_those_who_wait_for_their_ranks_begin_a_job_of_their_own():
    world, (one, two) = together(workers=2)
    world.clock = 9
    one.alive = two.alive = False
    again = [world.start_worker(1), world.start_worker(0)]
    world.go(8.0)
    assert [(worker.place.rank, worker.place.incarnation, worker.place.clock) for worker in again] == [
        (1, 2, 0),
        (0, 2, 0),
    ]
    assert again[0].place.job == again[1].place.job != one.place.job


def test_who_comes_after_a_job_is_complete_waits_for_the_next_one_which_starts_at_clock_0():
    world, (one, two) = together(workers=2)
    late = [world.start_worker(), world.start_worker()]
    one.ask(Leave())
    world.go(2.0)
    assert [worker.place for worker in late] == [None, None]
    two.ask(Leave())
    world.go(2.0)
    assert sorted((worker.place.rank, worker.place.clock, worker.place.incarnation) for worker in late) == [
        (0, 0, 2),
        (1, 0, 2),
    ]
    assert late[0].place.job == late[1].place.job != one.place.job


@pytest.mark.parametrize("size", [2, 30, 3000])
def test_workers_that_ask_for_a_rank_get_it_whenever_they_come_and_the_others_share_what_is_left(size):
    rng = random.Random(size)
    for trial in range(1 if size > 100 else 20):
        ranked = rng.sample(range(size), size // 2)
        wanted = [*ranked, *[None] * (size - len(ranked))]
        rng.shuffle(wanted)
        if trial == 0:
            wanted.sort(key=lambda rank: rank is not None)  # all that hold no rank come first
        places = joined(new_membership(servers=1, workers=1, slots=16, rng=rng, now=0.0), wanted, size)
        got = [place.rank for place in places]
        assert sorted(got) == list(range(size))
        assert all(rank in (None, place) for rank, place in zip(wanted, got, strict=True))
        others = [place for rank, place in zip(wanted, got, strict=True) if rank is None]
        assert others == sorted(others), "in the order in which they came"


def test_the_greatest_job_assembles_and_one_of_more_workers_is_refused_at_once():
    membership = new_membership(servers=1, workers=1, slots=16, rng=random.Random(0), now=0.0)
    size = MAX_WORKERS
    places = joined(membership, [size - 1, None], size)
    assert places == [None, None]
    ask = Request(b"x", 1, Hello("worker", "w"))
    membership.handle(b"x", "h", ask, 0.0)
    waiting = membership.handle(b"x", "h", Request(b"x", 2, Join(None, (), size, BSP)), 0.0)
    assert waiting[0][1].body == PendingReply(f"3 of {size} workers have joined")
    membership.handle(b"y", "h", Request(b"y", 1, Hello("worker", "w")), 0.0)
    for number, workers in enumerate([size + 1, 10**8, 0], 2):
        refused = membership.handle(b"y", "h", Request(b"y", number, Join(None, (), workers, BSP)), 0.0)[0][1].body
        assert refused == ErrorReply("input", f"a job has from 1 to {size} workers, got workers={workers}")


def test_events_are_kept_until_all_peers_have_seen_them_and_no_longer():
    world, (one, two) = together(workers=2)
    for incarnation in range(1, 4):
        two.alive = False
        world.go(4.0)
        one.paused = True  # it misses the news, but is not dead yet
        world.go(2.0)
        one.paused = False
        world.go(1.5)
        assert [event.incarnation for event in one.gone] == list(range(1, incarnation + 1))
        two = world.start_worker(1)
        world.go(2.0)
        assert two.place.incarnation == incarnation + 1
        assert two.gone == []
        world.go(1.0)
        assert world.membership.state.events == []
    assert world.membership.state.events_dropped == 3


def test_a_peer_with_too_many_requests_that_wait_and_a_scheduler_with_too_many_peers_take_no_more(monkeypatch):
    world, (worker, _) = together(workers=2)
    for number in range(3, 3 + membership_module._MAX_WAITING + 1):
        ask = Request(worker.sender, number, Barrier(f"b{number}"))
        answer = world.membership.handle(worker.sender, "h", ask, world.now)[0][1].body
    assert "has 1024 waiting requests, the maximum" in answer.text
    monkeypatch.setattr(membership_module, "_MAX_PEERS", len(world.membership._peers.known))
    hello = Request(b"new", 1, Hello("worker", "w"))
    assert world.membership.handle(b"new", "h", hello, world.now)[0][1].body == PendingReply(
        "3 processes are connected, the maximum"
    )
    worker.alive = False
    world.go(7.0)
    assert not isinstance(world.membership.handle(b"new", "h", hello, world.now)[0][1].body, PendingReply)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"init_seed": -1}, "init_seed = -1 instead of 0"),
        ({"init_parameter": 0.5}, "init_parameter = 0.5 instead of 0.0"),
        ({"init": "Uniform", "init_parameter": 0.1, "init_seed": -1}, "seed"),
        ({"init": "Uniform", "init_parameter": float("nan")}, "finite"),
        ({"seed": -1}, "seed"),
        ({"dim": 2**40}, "dim from 1 to 4096"),
        ({"dtype": "int8"}, "dtype"),
        ({"optimizer": "Nothing"}, "Nothing"),
        ({"params": {"lr": "x"}}, "cannot be read"),
        ({"params": {"lr": float("inf")}}, "lr"),
        ({"params": {"alpha": 1.0, "beta": 1.0, "l1": 0.0, "l2": 0.0, "more": 1.0}}, "more"),
        ({"name": ""}, "name"),
        ({"name": "x" * 1025}, "1024 characters at most, got 1025"),
    ],
)
def test_a_table_that_no_client_describes_so_is_refused_before_any_server_hears_of_it(changed, text):
    world, (worker,) = together()
    fields = {field: getattr(FORM, field) for field in FORM.__struct_fields__}
    number = worker.ask(CreateTable(TableRecord(**{**fields, **changed})))
    if text == "cannot be read":
        with pytest.raises(MalformedMessageError, match=r"Expected `float`, got `str`") as caught:
            world.go(0.5)
        assert decode(caught.value.reply).body.kind == "input"
        return
    world.go(1.0)
    assert worker.replies[number].kind == "input"
    assert text in worker.replies[number].text
    assert not any(isinstance(order, AddTable) for order in world.processes[0].executed)


def test_tables_whose_descriptions_would_not_fit_into_one_message_are_refused():
    world, (worker,) = together()
    world.membership._tables._bytes = tables_module._MAX_TABLES_BYTES - 10
    number = worker.ask(CreateTable(FORM))
    world.go(1.0)
    assert "the descriptions of 0 tables take" in worker.replies[number].text


def test_a_cluster_has_a_bounded_number_of_tables():
    world, (worker,) = together()
    tables = world.membership.state
    tables.tables = {f"t{number}": None for number in range(MAX_TABLES - 1)}
    names = ["last", "another", "last"]
    numbers = [worker.ask(CreateTable(msgspec.structs.replace(FORM, name=name))) for name in names]
    world.go(1.0)
    made, refused, same = (worker.replies[number] for number in numbers)
    assert refused.text.startswith(f"{MAX_TABLES + 1} tables: a store has at most {MAX_TABLES}")
    assert made == same
    assert made.form.name == "last"


def test_a_job_that_a_server_refuses_to_begin_is_an_answer_to_its_workers_and_not_a_loss():
    world = World(1, servers=2, workers=2, loss=0.0)
    first = world.processes[0]
    execute = first.execute

    def refuse(order):
        execute(order)
        if isinstance(order.body, StartJob):
            first.done = OrderReply(first.sender, order.number, refused=ErrorReply("input", "no such mode"))

    first.execute = refuse
    workers = [world.start_worker(rank) for rank in range(2)]
    world.go(2.0)
    for worker in workers:
        assert worker.replies[2].kind == "input"
        assert "cannot begin a job of 2 workers: no such mode" in worker.replies[2].text
    assert not world.membership.broken
    assert world.membership.workers == {}
    first.execute = execute
    for server in world.processes[:2]:
        server.admitted.clear()
    for rank, worker in enumerate(workers):
        worker.ask(Join(rank, (), 2, BSP))
    world.go(2.0)
    assert [worker.place.rank for worker in workers] == [0, 1]


@pytest.mark.parametrize(
    ("join", "text"),
    [
        (Join(None, (), 3, BSP), "the job has 2 workers, and worker .* asks for 3"),
        (
            Join(None, (), 2, JobConsistency("ssp", 4, False)),
            r"has BSP\(reduce='sum'\), and .* SSP\(staleness=4\)",
        ),
        (Join(5, (), 2, BSP), "rank 5 is out of range for 2 workers"),
        (Join(None, (), 0, BSP), "got workers=0"),
        (Join(None, (), 2, None), "has to pass its consistency"),
    ],
)
def test_a_worker_that_wants_another_job_than_the_others_is_refused_at_once_and_may_ask_again(join, text):
    world = World(1, servers=1, workers=2, loss=0.0)
    first = world.start_worker()
    world.go(2.0)
    other = world.start("worker", join)
    world.go(2.0)
    with pytest.raises(ValueError, match=text):
        raise ValueError(other.replies[2].text)
    other.ask(Join(1, (), 2, BSP))
    world.go(1.0)
    assert (first.place.rank, other.place.rank) == (0, 1)


@pytest.mark.parametrize(
    ("join", "text"),
    [
        (Join(None, ()), "at least one address"),
        (Join(None, ("tcp://:7",), spare=True), "has formed, but 1 of 2 servers have joined: start it when all have"),
        (Join(4, ("tcp://:7",)), "rank 4 is out of range for 2 servers"),
        (Join(0, ("tcp://:7",)), r"server 0 \(server .*\) has that rank"),
        (Join(None, ("ipc://x",)), "'ipc://x' is not an address"),
        (Join(None, ("tcp://:0",)), "cannot be connected to"),
        (Join(None, ("tcp://:5000",)), "two endpoints have the same address"),
        (Join(None, tuple(f"tcp://:{port}" for port in range(6000, 6017))), "16 slots are too few"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_with_the_reason(join, text):
    world = World(0, servers=2, workers=1, loss=0.0)
    world.processes.pop()
    world.go(2.0)
    other = world.start("server", join)
    world.go(2.0)
    with pytest.raises(ValueError, match=text):
        raise ValueError(other.replies[2].text)


def test_a_server_that_comes_while_the_others_are_probed_is_refused():
    membership = new_membership(servers=1, workers=1, slots=16, rng=random.Random(0), now=0.0)
    for sender in (b"one", b"two"):
        membership.handle(sender, "h", Request(sender, 1, Hello("server", "s")), 0.0)
        join = Request(sender, 2, Join(None, (f"tcp://h:{len(sender) + sender[0]}",)))
        (_, reply), *_ = membership.handle(sender, "h", join, 0.0)
    assert "the cluster has all of its 1 servers" in reply.body.text


def test_a_server_that_cannot_be_reached_is_told_what_to_pass_and_its_place_stays_free():
    world = World(0, servers=1, workers=1, loss=0.0)
    server = world.processes[0]
    world.route(
        world.membership.handle(server.sender, "10.0.0.9", Request(server.sender, 1, Hello("server", "s")), 0.0)
    )
    join = Request(server.sender, 2, Join(None, ("tcp://nowhere:7",)))
    world.route(world.membership.handle(server.sender, "10.0.0.9", join, 0.0))
    found = world.membership.probed(world.membership.probes.popleft(), ("tcp://nowhere:7", "no answer in 5 s"), 1.0)
    assert "tcp://nowhere:7 (no answer in 5 s): pass --advertise HOST" in found[0][1].body.text
    again = world.membership.handle(server.sender, "10.0.0.9", Request(server.sender, 3, Join(0, ("tcp://:7",))), 1.0)
    assert isinstance(again[0][1].body, PendingReply)
    joined = world.membership.probed(world.membership.probes.popleft(), None, 1.0)
    assert joined[0][1].body.map.endpoints[0].address == "tcp://10.0.0.9:7"


def test_strangers_and_requests_out_of_place_are_refused_and_change_nothing():
    world = World(0, servers=1, workers=1, loss=0.0)
    world.go(1.0)
    ask = lambda body, sender=b"x" * 16, number=1: world.membership.handle(  # noqa: E731
        b"r", "h", Request(sender, number, body), world.now
    )
    assert ask(GetMap())[0][1].body.kind == "not-connected"
    assert world.membership.handle(b"r", "h", Heartbeat(b"y" * 16, 0), world.now)[0][1].body.kind == "not-connected"
    assert ask(Hello("poet", "p"))[0][1].body.kind == "protocol"
    ask(Hello("worker", "w"))
    assert ask(Barrier("b"), number=2)[0][1].body.kind == "protocol"
    assert isinstance(ask(GetMap(), number=3)[0][1].body, GetMapReply)
    bad = msgspec.structs.replace(FORM, params={"lr": -1.0}, optimizer="SGD")
    worker = world.start_worker()
    world.go(1.0)
    worker.ask(CreateTable(bad))
    world.go(1.0)
    assert worker.replies[3].kind == "input"
    assert not any(isinstance(order, AddTable) for order in world.processes[0].executed)


def test_a_table_that_a_server_refuses_is_dropped_by_all_and_all_that_wait_for_it_are_told():
    world, (one, two) = together(workers=2, servers=2)
    first, second = world.processes[:2]
    world.refusals = 1.0
    numbers = [worker.ask(CreateTable(FORM)) for worker in (one, two)]
    world.go(3.0)
    for worker, number in zip((one, two), numbers, strict=True):
        refused = worker.replies[number]
        assert refused.kind == "memory"
        assert refused.text.startswith("server 0 at tcp://10.0.0.9:5000 (server ")
        assert refused.text.endswith("cannot create table 't': no room")
    assert [type(order) for order in first.executed[1:]] == [AddTable, DropTable]
    assert first.executed == second.executed
    assert first.tables == second.tables == {}
    world.refusals = 0.0
    number = two.ask(CreateTable(renamed(FORM, "smaller")))
    world.go(1.0)
    again = one.ask(CreateTable(FORM))
    world.go(3.0)
    assert two.replies[number] == TableReply(0, renamed(FORM, "smaller"))
    assert one.replies[again] == TableReply(1, FORM)
    assert first.tables == second.tables == {0: "smaller", 1: "t"}
    assert not world.membership.broken


def test_a_server_that_fails_at_an_order_is_lost_with_its_reason():
    world, (worker,) = together()
    server = world.processes[0]
    order = Order(2, AddTable(0, FORM))
    world.membership.handle(worker.sender, "h", Request(worker.sender, 3, CreateTable(FORM)), world.now)
    out = world.membership.handle(
        server.sender, "h", OrderReply(server.sender, order.number, 0, "out of memory"), world.now
    )
    refused = [message.body for _, message in out if isinstance(message, Reply)]
    assert [body.kind for body in refused] == ["server-lost"]
    assert "failed to execute an order: out of memory" in refused[0].text


@pytest.mark.parametrize(
    "settings_",
    [{"servers": 0}, {"servers": 1, "workers": 0}, {"servers": 1, "slots": 3}, {"servers": 1, "heartbeat": 0.0}],
)
def test_a_cluster_that_cannot_be_is_refused(settings_):
    with pytest.raises(ValueError, match=r"got|is 0"):
        new_membership(**settings_, rng=random.Random(0), now=0.0)


def test_an_order_is_sent_again_soon_then_more_rarely_and_at_once_over_a_new_connection():
    world, _ = together()
    server = world.processes[0]
    server.paused = True
    sent = []
    route = world.route
    world.route = lambda out: (sent.extend(world.now for _, one in out if isinstance(one, Order)), route(out))
    world.those("worker")[0].ask(GetMetrics())
    world.go(3.2)
    gaps = np.diff(sent).round(2)
    assert ((gaps >= [0.1, 0.2, 0.4, 0.8, 1.0]) & (gaps <= [0.16, 0.26, 0.46, 0.86, 1.06])).all()
    assert world.membership.next_time <= world.now + 1.0
    route(world.membership.disconnected(server.route, world.now))
    count = len(sent)
    world.go(0.5)
    assert len(sent) == count  # there is no connection
    server.connection += 1
    world.route(world.membership.handle(server.route, "h", Heartbeat(server.sender, 0), world.now))
    assert len(sent) == count + 1


def test_every_kind_of_input_and_request_has_a_method():
    kinds = {*get_args(InputBody), *get_args(messages.AnyRequest)} - {Request, GetStatus}  # which changes nothing
    assert kinds == set(new_membership(servers=1, rng=random.Random(0))._handle._methods)
