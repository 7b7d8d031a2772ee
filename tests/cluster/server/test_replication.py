"""A primary and its backups without sockets: equal state, commits, promotion, and what a divergence does."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from endpoint_peer import Reply, Worker, deliver
from replicated import (
    ARCS,
    MODES,
    NEWEST,
    SLOTS,
    TABLES,
    Cluster,
    Driver,
    Link,
    alone,
    equal,
    prepare,
    random_faults,
    random_script,
    same_arcs,
    script_of,
)
from shoal import _core
from shoal._core import Op, Status
from table_specs import native_spec

# --- equal state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("mode", "staleness"), MODES)
def test_a_replica_equals_its_primary_after_each_acknowledged_position(mode: str, staleness: int, seed: int) -> None:
    cluster = Cluster()
    prepare(cluster.primary, mode, staleness)
    cluster.faults = random_faults(random.Random(seed))
    driver = Driver(script_of(seed, mode))
    replica = cluster.endpoints[1].replica(1)
    compared = 0
    while driver.begin(cluster.send):
        driver.take(cluster.step())
        if cluster.primary.committed(cluster.primary.position()):
            compared += 1
            assert equal(cluster.primary, replica)
    driver.take(cluster.settle())
    assert equal(cluster.primary, replica)
    assert not driver.waiting
    assert compared > 5
    status = cluster.endpoints[1].replication()["replicas"][0]
    assert status["fault"] == ""
    assert status["position"] == cluster.primary.replication()["streams"][0]["acknowledged"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("mode", "staleness"), MODES)
def test_after_a_promotion_at_any_moment_the_results_are_those_of_an_undisturbed_run(
    mode: str, staleness: int, seed: int
) -> None:
    script = script_of(100 + seed, mode)
    undisturbed = Driver(script)
    reference = alone(mode, staleness)
    undisturbed.run(lambda frames, peer: deliver(reference, frames, peer))

    rng = random.Random(seed)
    cluster = Cluster()
    prepare(cluster.primary, mode, staleness)
    cluster.faults = random_faults(rng)
    driver = Driver(script)
    until = rng.randrange(len(script))
    # What the primary accepted in its last moments has reached the backup in part, or not at all.
    while driver.begun < until and driver.begin(cluster.send):
        if rng.random() < 0.5:
            driver.take(cluster.step())
    cluster.promote()
    driver.again(cluster.send)
    while driver.begin(cluster.send):
        pass
    assert not driver.waiting
    assert equal(reference, cluster.primary)
    assert driver.answers.keys() == undisturbed.answers.keys()
    for name, reply in driver.answers.items():
        other = undisturbed.answers[name]
        assert (reply.status, reply.text) == (other.status, other.text), name
        if reply.op in (Op.PULL, Op.SWEEP):
            np.testing.assert_array_equal(reply.values, other.values)
        if reply.op == Op.ERASE:
            assert reply.aux == other.aux


@pytest.mark.parametrize("seed", range(3))
def test_a_replica_of_tables_with_a_memory_budget_equals_its_primary(seed: int) -> None:
    memory = 8 << 10  # bytes a slot: some pushes exceed it
    script = random_script(random.Random(seed), tables=TABLES, counted=[2], keys=3000, clocks=3, bsp=False)
    cluster = Cluster()
    prepare(cluster.primary, "asp", 0, memory=memory)
    driver = Driver(script, final=[Status.RETRY])  # a tick whose push had no room
    while driver.begin(cluster.send):
        driver.take(cluster.step())
    driver.take(cluster.settle())
    replica = cluster.endpoints[1].replica(1)
    assert cluster.endpoints[1].replication()["replicas"][0]["fault"] == ""
    assert equal(cluster.primary, replica)
    assert any(reply.status == Status.RESOURCE_EXHAUSTED for reply in driver.answers.values())


def test_every_acknowledged_push_is_applied_once_after_a_promotion() -> None:
    rng = random.Random(5)
    cluster = Cluster()
    prepare(cluster.primary, "asp", 0)
    cluster.faults = random_faults(rng)
    key, worker = 7 << 60, Worker(0)
    waiting: dict[int, Any] = {}

    def take(replies: list[Reply]) -> None:
        for reply in replies:
            assert reply.status == Status.OK
            waiting.pop(reply.sequence, None)

    total = 0
    for sequence in range(1, 61):
        total += sequence
        waiting[sequence] = worker.push([key], [-sequence], sequence=sequence)
        take(cluster.send(waiting[sequence]))
        if sequence % 3 == 0:
            take(cluster.step())
        if sequence == 40:
            cluster.promote()
            for frames in list(waiting.values()):
                take(cluster.send(frames))
    assert not waiting
    reply = cluster.send(worker.pull([key]))[0]
    assert reply.values.ravel().tolist() == [float(total)]


def test_two_backups_equal_the_primary_and_each_may_be_promoted() -> None:
    for number in (1, 2):
        script = script_of(9, "bsp")
        reference = alone("bsp", 0)
        Driver(script).run(lambda frames, peer, on=reference: deliver(on, frames, peer))
        cluster = Cluster(backups=2)
        prepare(cluster.primary, "bsp", 0)
        driver = Driver(script)
        while driver.begun < len(script) // 2 and driver.begin(cluster.send):
            driver.take(cluster.step())
        cluster.promote(number)
        driver.again(cluster.send)
        while driver.begin(cluster.send):
            pass
        assert not driver.waiting
        assert equal(reference, cluster.primary)


@pytest.mark.parametrize("order", ["dismiss", "resume"])
def test_a_sweep_that_an_order_lets_go_on_is_executed_by_the_backup_too(order: str) -> None:
    cluster = Cluster()
    p, replica = cluster.primary, cluster.endpoints[1].replica(1)
    prepare(p, "bsp", 0)
    if order == "resume":
        p.hold()
    for rank in range(3 if order == "resume" else 2):
        cluster.send(Worker(rank, epoch=NEWEST).tick(0, sequence=1))
    sweep = Worker(0, epoch=NEWEST).sweep([], table=2, clock=1, sequence=1)
    cluster.send(sweep)
    assert not [reply for reply in cluster.settle() if reply.op == Op.SWEEP and reply.status == Status.OK]
    if order == "resume":
        p.resume()
    else:
        p.dismiss(2, 1)
    assert p.released() == []  # the backup has not executed it
    answers = [reply for reply in cluster.settle() if reply.op == Op.SWEEP]
    assert [reply.status for reply in answers] == [Status.OK]
    assert same_arcs(p, replica)
    cluster.promote()
    (again,) = cluster.send(sweep)
    assert again.status == Status.OK
    np.testing.assert_array_equal(again.values, answers[0].values)


def test_a_deferred_sweep_of_a_worker_that_is_fenced_acts_nowhere() -> None:
    cluster = Cluster()
    p, replica = cluster.primary, cluster.endpoints[1].replica(1)
    prepare(p, "bsp", 0)
    for rank in range(2):
        cluster.send(Worker(rank, epoch=NEWEST).tick(0, sequence=1))
    cluster.send(Worker(0, epoch=NEWEST).sweep([], table=2, clock=1, sequence=1))
    p.fence(0, 1)
    cluster.send(Worker(2, epoch=NEWEST).tick(0, sequence=1))  # the sweep's clock has come
    answers = [reply.status for reply in cluster.settle() if reply.op == Op.SWEEP]
    assert answers == [Status.DEFERRED, Status.FENCED]
    assert cluster.endpoints[1].replication()["replicas"][0]["fault"] == ""
    assert same_arcs(p, replica)


# --- commits -----------------------------------------------------------------------------------------------------


def test_no_reply_leaves_before_every_backup_has_acknowledged_what_it_saw() -> None:
    cluster = Cluster(backups=2)
    prepare(cluster.primary, "asp", 0)
    cluster.settle()
    worker = Worker()
    first, second = cluster.links
    second.is_down = True
    assert cluster.send(worker.push([5], [1], sequence=1)) == []
    assert cluster.send(worker.pull([5])) == []  # it would read what is not committed
    assert cluster.step() == []
    assert not cluster.primary.committed(cluster.primary.position())
    second.is_down = False
    cluster.primary.reconnected(second.stream)
    replies = cluster.settle()
    assert [reply.op for reply in replies] == [Op.PUSH, Op.PULL]
    assert first.primary is second.primary


@pytest.mark.parametrize("slow", [0, 1])
def test_the_backup_that_is_behind_decides_what_is_committed(slow: int) -> None:
    cluster = Cluster(backups=2)
    prepare(cluster.primary, "asp", 0)
    cluster.settle()
    worker = Worker(epoch=NEWEST)
    cluster.links[slow].is_down = True
    assert cluster.send(worker.push([5], [1], sequence=1)) == []
    assert cluster.step() == []
    cluster.links[1 - slow].is_down = True
    assert cluster.send(worker.push([5], [1], sequence=2)) == []
    # One backup has the first push, none has the second one.
    assert cluster.step() == []
    assert not cluster.primary.committed(cluster.primary.position() - 1)


def test_reads_leave_at_once_while_nothing_waits_for_a_commit() -> None:
    cluster = Cluster()
    prepare(cluster.primary, "asp", 0)
    cluster.settle()
    assert [reply.op for reply in cluster.send(Worker().pull([5]))] == [Op.PULL]


def test_a_primary_that_has_not_heard_of_its_backup_for_a_while_answers_nobody() -> None:
    cluster = Cluster()
    prepare(cluster.primary, "asp", 0)
    cluster.settle()
    cluster.links[0].is_down = True
    for _ in range(24):
        cluster.step()
    assert cluster.send(Worker().pull([5])) == []
    cluster.links[0].is_down = False
    assert [reply.op for reply in cluster.settle()] == [Op.PULL]


def test_an_idle_stream_is_kept_alive_and_a_lost_record_is_sent_again() -> None:
    cluster = Cluster()
    prepare(cluster.primary, "asp", 0)
    cluster.settle()
    acknowledged = cluster.primary.replication()["streams"][0]["acknowledged"]
    for _ in range(100):
        cluster.step()
        assert cluster.primary.replication()["streams"][0]["silent"] < 0.5
    assert cluster.primary.replication()["streams"][0]["acknowledged"] == acknowledged
    assert cluster.send(Worker().push([5], [1], sequence=1)) == []
    assert cluster.primary.next_message(1) is not None  # lost
    assert [reply.op for reply in cluster.settle()] == [Op.PUSH]


def test_an_order_is_committed_once_the_backup_has_executed_it() -> None:
    cluster = Cluster()
    cluster.primary.add_table(0, native_spec())
    position = cluster.primary.position()
    assert not cluster.primary.committed(position)
    cluster.step()
    assert cluster.primary.committed(position)
    assert cluster.endpoints[1].replica(1).tables() == [0]


@pytest.mark.parametrize("frame", [0, 1, 2], ids=["message", "request", "keys"])
def test_a_record_that_was_damaged_on_its_way_is_sent_again(frame: int) -> None:
    cluster = Cluster()
    p, backup = cluster.primary, cluster.endpoints[1]
    prepare(p, "asp", 0)
    cluster.settle()
    worker = Worker(epoch=NEWEST)
    assert cluster.send(worker.push([5], [1], sequence=1)) == []
    message = p.next_message(1)
    assert message is not None
    damaged = bytearray(message[frame])
    damaged[-1] ^= 1
    answers = backup.handle(b"link", [*message[:frame], bytes(damaged), *message[frame + 1 :]]) + backup.acknowledge()
    for _, frames in answers:
        assert p.handle_backup(1, frames) == []
    assert not p.committed(p.position())
    assert [reply.status for reply in cluster.settle()] == [Status.OK]
    assert backup.replication()["replicas"][0]["fault"] == ""
    assert same_arcs(p, backup.replica(1))


def test_a_refusal_of_a_damaged_order_acknowledges_nothing() -> None:
    cluster = Cluster()
    p, backup = cluster.primary, cluster.endpoints[1]
    cluster.settle()
    p.add_table(0, native_spec())
    message = p.next_message(1)
    assert message is not None
    damaged = bytearray(message[1])
    damaged[-1] ^= 1
    ((_, frames),) = backup.handle(b"link", [message[0], bytes(damaged)])
    reply = Reply.of(b"", frames)
    assert (reply.status, reply.sequence) == (Status.BAD_REQUEST, p.position())
    assert p.handle_backup(1, frames) == []
    assert not p.committed(p.position())
    cluster.settle()
    assert backup.replica(1).tables() == [0]


def test_a_load_stops_the_streams_and_is_answered_once_they_are_closed() -> None:
    cluster = Cluster()
    p = cluster.primary
    prepare(p, "asp", 0)
    cluster.settle()
    worker = Worker(epoch=NEWEST)
    assert cluster.send(worker.numbers(Op.LOAD_BEGIN, [1] * SLOTS, sequence=1)) == []
    for _ in range(10):
        assert cluster.step() == []
    assert p.replication()["streams"][0]["fault"] == "a load"
    p.assign(2, ARCS)
    assert [Reply.of(*reply).status for reply in p.released()] == [Status.OK]


# --- fencing -----------------------------------------------------------------------------------------------------


def test_of_two_primaries_only_the_newer_one_answers() -> None:
    cluster = Cluster()
    prepare(cluster.primary, "asp", 0)
    cluster.settle()
    link = cluster.links[0]
    old = cluster.promote()
    worker = Worker()
    assert [reply.status for reply in cluster.send(worker.push([5], [1], sequence=1))] == [Status.OK]
    assert deliver(old, worker.push([5], [2], sequence=2)) == []
    assert deliver(old, worker.pull([5])) == []
    for now in range(0, 5000, 50):
        assert old.on_time(cluster.now + now) == []
        assert link.carry() == []
    assert old.replication()["streams"][0]["fenced"]
    assert old.replication()["held"] == 2
    assert deliver(old, worker.pull([5])) == []
    assert cluster.send(worker.pull([5]))[0].values.ravel().tolist() == [-1.0]


def test_a_primary_that_was_fenced_while_nothing_was_under_way_answers_no_read() -> None:
    cluster = Cluster()
    prepare(cluster.primary, "asp", 0)
    cluster.settle()
    link = cluster.links[0]
    old = cluster.promote()
    old.on_time(cluster.now + 200)  # a keep-alive message is due
    assert link.carry() == []
    stream = old.replication()["streams"][0]
    assert (stream["fenced"], stream["bytes"], stream["silent"]) == (True, 0, 0.0)
    assert deliver(old, Worker().pull([5])) == []
    assert old.replication()["held"] == 1


def test_records_that_arrive_before_the_assignment_wait_for_it() -> None:
    primary, backup = _core.Endpoint(SLOTS), _core.Endpoint(SLOTS)
    primary.assign(1, ARCS, [(9, "b", "", ARCS, [])])
    cluster = Cluster()
    cluster.primary, cluster.endpoints = primary, [primary, backup]
    cluster.links = [Link(9, primary, backup)]
    prepare(primary, "asp", 0)
    primary.handle(b"worker", Worker().push([5], [1], sequence=1))
    for _ in range(10):
        assert cluster.step() == []
    backup.assign(1, [], [], [(9, ARCS)])
    assert [reply.op for reply in cluster.settle()] == [Op.PUSH]
    assert equal(primary, backup.replica(9))


def test_a_gap_that_is_reported_twice_in_a_row_is_filled_soon_without_a_third_report() -> None:
    primary, backup = _core.Endpoint(SLOTS), _core.Endpoint(SLOTS)
    primary.assign(1, ARCS, [(9, "b", "", ARCS, [])])
    cluster = Cluster()
    cluster.primary, cluster.endpoints, cluster.now = primary, [primary, backup], 1000
    cluster.links = [Link(9, primary, backup)]
    primary.on_time(cluster.now)
    prepare(primary, "asp", 0)
    primary.handle(b"worker", Worker().push([5], [1], sequence=1))
    for _ in range(3):  # the backup does not know the stream yet
        assert cluster.step(2) == []
    backup.assign(1, [], [], [(9, ARCS)])
    begun = cluster.now
    while not cluster.step(1):
        assert cluster.now < begun + 50, "it waits for a keep-alive"


def test_an_older_assignment_has_no_effect() -> None:
    cluster = Cluster()
    cluster.promote()
    cluster.primary.assign(1, [], [], [(1, ARCS)])
    assert cluster.primary.replication()["replicas"] == []
    prepare(cluster.primary, "asp", 0)
    assert cluster.send(Worker().pull([5]))[0].status == Status.OK


# --- divergence --------------------------------------------------------------------------------------------------


def test_a_diverged_replica_is_reported_and_never_promoted() -> None:
    cluster = Cluster()
    prepare(cluster.primary, "asp", 0)
    cluster.settle()
    cluster.endpoints[1].replica(1).drop_table(1)  # what a broken backup could do
    worker = Worker()
    assert cluster.send(worker.push([5], [[1, 1, 1, 1]], sequence=1, table=1)) == []
    for _ in range(10):
        assert cluster.step() == []
    fault = cluster.primary.replication()["streams"][0]["fault"]
    assert 'its status is "no table", the primary\'s is "ok"' in fault
    with pytest.raises(ValueError, match=r"the replica of the slots \[0, 4\) has diverged"):
        cluster.endpoints[1].assign(2, ARCS)
    # The assignment without the stream: the primary goes on alone.
    cluster.primary.assign(2, ARCS)
    assert [Reply.of(*reply).op for reply in cluster.primary.released()] == [Op.PUSH]


def test_a_replica_whose_clock_was_not_applied_has_diverged() -> None:
    cluster = Cluster()
    prepare(cluster.primary, "bsp", 0)
    cluster.settle()
    cluster.endpoints[1].replica(1).hold()  # nothing is applied beyond this clock
    for rank in range(3):
        cluster.send(Worker(rank, epoch=1).tick(0, sequence=1))
    cluster.step()
    for rank in range(3):
        cluster.send(Worker(rank, epoch=1).tick(1, sequence=2))
    for _ in range(5):
        cluster.step()
    assert "the clocks applied add up to" in cluster.primary.replication()["streams"][0]["fault"]
