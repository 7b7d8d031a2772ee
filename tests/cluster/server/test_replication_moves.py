"""Arcs that move to a backup or are copied to a server, without sockets, under writes, saves and deaths."""

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
    digest_of,
    equal,
    prepare,
    random_faults,
    random_script,
    same_arcs,
)
from shoal import _core
from shoal._core import Op, Status
from table_specs import native_spec

# --- arcs that move ----------------------------------------------------------------------------------------------


def test_an_arc_moves_to_its_backup_and_the_other_streams_follow() -> None:
    # p serves four arcs; n and b hold replicas of them. The first arc moves to n; b takes its replica along.
    cluster = Cluster(backups=2)
    p, n, b = cluster.endpoints
    prepare(p, "asp", 0)
    moved, rest = ARCS[:1], ARCS[1:]
    worker = Worker(epoch=1)
    hashes = np.array([1, 5 << 60], np.uint64)  # in the moved arc, and in another
    cluster.send(worker.push(hashes, [1, 1], sequence=1))
    cluster.settle()

    streams = [(1, "n", "", rest, []), (2, "b", "", rest, [])]
    p.assign(2, rest, streams, [])
    assert not p.retired()  # the backups do not know yet where the arc's records end
    refused = [Reply.of(*reply) for reply in p.handle(b"w", worker.push(hashes, [1, 1], sequence=2))]
    for reply in refused + cluster.settle():
        assert (reply.status, reply.slots) == (Status.WRONG_EPOCH, (0,))
    assert p.retired()
    n.assign(2, moved, [(3, "b", "", moved, [])], [(1, rest)])
    b.assign(2, [], [], [(2, rest), (3, moved)])
    cluster.links.append(Link(3, n, b))
    n.handle(b"w", worker.push(hashes[:1], [1], sequence=2))
    for now in range(10):
        n.on_time(now)
        for link in cluster.links:
            link.carry()
    assert n.replication()["held"] == 0
    assert n.committed(n.position())
    assert equal(n, b.replica(3), moved)
    assert equal(p, n.replica(1), rest)
    assert equal(p, b.replica(2), rest)
    pulled = [Reply.of(*reply) for reply in n.handle(b"w", worker.pull(hashes[:1]))]
    assert pulled[0].values.ravel().tolist() == [-2.0]
    assert digest_of(p, 0, rest) == digest_of(b.replica(2), 0, rest)


def test_a_released_arc_executes_nothing_more_at_the_backup() -> None:
    cluster = Cluster()
    p, n = cluster.endpoints
    prepare(p, "asp", 0)
    cluster.send(Worker(epoch=NEWEST).push([1], [1], sequence=1))
    cluster.settle()
    state = p.save_arc(*ARCS[0])
    p.assign(2, ARCS[1:], [(1, "n", "", ARCS[1:], [])])
    for rank in range(3):
        cluster.send(Worker(rank, epoch=NEWEST).tick(0, sequence=2))  # without keys: executed in all arcs of p
    cluster.settle()
    assert p.retired()
    n.assign(2, ARCS[:1], [], [(1, ARCS[1:])])
    assert n.save_arc(*ARCS[0]) == state
    assert same_arcs(p, n.replica(1), ARCS[1:])


# --- copies ------------------------------------------------------------------------------------------------------


class Copying(Cluster):
    """A primary alone, and a newcomer to which its arcs are copied one after the other."""

    def __init__(self, **how: int) -> None:
        super().__init__(backups=0, **how)
        self.newcomer = _core.Endpoint(SLOTS)
        self.endpoints.append(self.newcomer)
        self.in_sync: list[Any] = []
        self.copy_rate = 0

    def begin(self) -> None:
        """The first assignment with the stream."""
        self.links.append(Link(1, self.primary, self.newcomer))
        self.assign_next()

    def assign_next(self, *, arriving: bool = True) -> None:
        left = [arc for arc in ARCS if arc not in self.in_sync]
        self.epoch += 1
        wanted = left[:1] if arriving else []
        self.primary.assign(self.epoch, ARCS, [(1, "n", "", self.in_sync, wanted)], copy_rate=self.copy_rate)
        self.newcomer.assign(self.epoch, [], [], [(1, self.in_sync)])

    def watch(self) -> bool:
        """What the scheduler does when an arc has arrived: it lists it, and the next one. True when all have."""
        stream = self.primary.replication()["streams"][0]
        assert stream["fault"] == ""
        if stream["arrived"]:
            self.in_sync += stream["arrived"]
            self.assign_next()
        return len(self.in_sync) == len(ARCS)


@pytest.mark.parametrize("memory", [None, 12 << 10])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("mode", "staleness"), MODES)
def test_a_copy_under_writes_equals_its_source_and_may_be_promoted(
    mode: str, staleness: int, seed: int, memory: int | None
) -> None:
    script = random_script(
        random.Random(200 + seed), tables=TABLES, counted=[2], clocks=10, keys=60 if memory is None else 600,
        bsp=mode == "bsp",
    )  # fmt: skip
    reference = alone(mode, staleness, memory=memory)
    undisturbed = Driver(script, final=[Status.RETRY])
    undisturbed.run(lambda frames, peer: deliver(reference, frames, peer))

    cluster = Copying()
    prepare(cluster.primary, mode, staleness, memory=memory)
    rng = random.Random(seed)
    cluster.copy_rate = rng.choice([0, 200_000])
    driver = Driver(script, final=[Status.RETRY])
    begins, promoted = rng.randrange(10, 30), False
    while driver.begin(cluster.send):
        if driver.begun == begins:
            cluster.begin()
            cluster.faults = random_faults(rng)
        if driver.begun > begins and not promoted:
            driver.take(cluster.step(10))
            if cluster.watch() and cluster.primary.committed(cluster.primary.position()):
                assert same_arcs(cluster.primary, cluster.newcomer.replica(1))
                if rng.random() < 0.1:
                    cluster.promote()
                    driver.again(cluster.send)
                    promoted = True
    if not promoted:
        for _ in range(2000):
            driver.take(cluster.step(10))
            if cluster.watch():
                break
        driver.take(cluster.settle())
        assert same_arcs(cluster.primary, cluster.newcomer.replica(1))
    assert not driver.waiting
    assert equal(reference, cluster.primary)
    assert {name: reply.status for name, reply in driver.answers.items()} == {
        name: reply.status for name, reply in undisturbed.answers.items()
    }


def pushed(cluster: Cluster, count: int, first: int = 1) -> None:
    rng = random.Random(first)
    for sequence in range(first, first + count):
        keys = np.array(sorted(rng.randrange(2**64) for _ in range(100)), np.uint64)
        cluster.send(Worker(epoch=1000).push(keys, np.ones((100, 4)), sequence=sequence, table=1))


def test_a_copy_is_no_faster_than_its_rate_and_replies_do_not_wait_for_it() -> None:
    cluster = Copying()
    prepare(cluster.primary, "asp", 0)
    pushed(cluster, 40)
    cluster.copy_rate = 100_000
    cluster.begin()
    copied = []
    for turn in range(40):
        cluster.step(10)
        arriving = cluster.primary.replication()["streams"][0]["arriving"]
        if arriving is None:
            break
        copied.append(arriving["bytes"])
        assert [reply.op for reply in cluster.send(Worker(epoch=1000).pull([turn]))] == [Op.PULL]
    # A chunk may exceed what is allowed; it is made up for before the next one.
    chunk = 128 << 10
    assert all(bytes_ <= 100_000 * 0.01 * (i + 1) + chunk for i, bytes_ in enumerate(copied))


def test_while_no_request_waits_a_copy_goes_on_without_waiting_for_its_time() -> None:
    cluster = Copying()
    prepare(cluster.primary, "asp", 0)
    pushed(cluster, 40)
    assert not cluster.primary.use_idle_time()  # nothing is copied
    cluster.begin()
    turns = 0
    while cluster.primary.use_idle_time():
        cluster.links[0].carry()
        turns += 1
    assert turns > 0
    assert cluster.primary.replication()["streams"][0]["arrived"] == ARCS[:1]
    assert same_arcs(cluster.primary, cluster.newcomer.replica(1), ARCS[:1])


def test_idle_time_takes_no_more_of_a_copy_than_its_rate_lets_leave() -> None:
    cluster = Copying()
    prepare(cluster.primary, "asp", 0)
    pushed(cluster, 40)
    cluster.copy_rate = 1
    cluster.begin()
    turns = 0
    while cluster.primary.use_idle_time():
        turns += 1
        assert turns < 100
    assert cluster.primary.replication()["streams"][0]["arrived"] == []


@pytest.mark.parametrize("is_copied", [False, True], ids=["in sync", "arriving"])
def test_a_push_that_fails_in_an_arc_that_the_backup_lacks_reaches_no_later_arc_there(is_copied: bool) -> None:
    cluster = Copying()
    p = cluster.primary
    first, last = ARCS[0], ARCS[3]  # the push fails in ARCS[1]
    early, late = ([first], [last]) if is_copied else ([first, last], [])
    cluster.links.append(Link(1, p, cluster.newcomer))
    p.assign(2, ARCS, [(1, "n", "", early, [])])
    cluster.newcomer.assign(2, [], [], [(1, early)])
    prepare(p, "asp", 0, memory=8 << 10)
    p.assign(3, ARCS, [(1, "n", "", early, late)], copy_rate=100)
    for _ in range(5):
        cluster.step()
    if is_copied:
        assert cluster.newcomer.replication()["replicas"][0]["arriving"]["first"] == last[0]
    quarter = 1 << 62
    hashes = np.array([1, *(quarter + (k << 46) for k in range(40_000)), 3 * quarter + 1], np.uint64)
    worker = Worker(epoch=NEWEST)
    cluster.send(worker.push(hashes, np.ones(len(hashes)), sequence=1))
    p.assign(4, ARCS, [(1, "n", "", early, late)])  # the rest of the copy at any rate
    replies = [reply for _ in range(50) for reply in cluster.step()]
    assert [reply.status for reply in replies] == [Status.RESOURCE_EXHAUSTED]
    status = p.replication()["streams"][0]
    assert (status["fault"], status["arriving"], status["in_sync"]) == ("", None, [first, last])
    assert same_arcs(p, cluster.newcomer.replica(1), [first, last])
    (reply,) = cluster.send(worker.pull([1, 3 * quarter + 1]))
    assert reply.values.ravel().tolist() == [-1.0, 0.0]


def test_an_arrived_arc_stays_although_the_next_assignment_does_not_list_it_yet() -> None:
    cluster = Copying()
    prepare(cluster.primary, "asp", 0)
    pushed(cluster, 5)
    cluster.begin()
    for _ in range(20):
        cluster.step()
    assert cluster.primary.replication()["streams"][0]["arrived"] == ARCS[:1]
    cluster.assign_next()  # made before the scheduler heard of it
    assert cluster.primary.replication()["streams"][0]["in_sync"] == ARCS[:1]
    pushed(cluster, 5, first=6)
    cluster.settle()
    assert same_arcs(cluster.primary, cluster.newcomer.replica(1), ARCS[:1])


def test_a_copy_that_is_given_up_may_begin_again() -> None:
    cluster = Copying()
    prepare(cluster.primary, "asp", 0)
    pushed(cluster, 40)
    cluster.copy_rate = 1
    cluster.begin()
    for _ in range(5):
        cluster.step()
    assert cluster.newcomer.replication()["replicas"][0]["arriving"]["first"] == 0
    cluster.assign_next(arriving=False)
    cluster.step()
    assert cluster.newcomer.replication()["replicas"][0]["arriving"] is None
    pushed(cluster, 3, first=41)
    cluster.copy_rate = 0
    cluster.assign_next()
    for _ in range(200):
        cluster.step()
        if cluster.watch():
            break
    cluster.settle()
    assert same_arcs(cluster.primary, cluster.newcomer.replica(1))


def test_a_copy_that_is_given_up_before_its_primary_hears_that_it_has_arrived_leaves_nothing() -> None:
    cluster = Copying()
    prepare(cluster.primary, "asp", 0)
    pushed(cluster, 5)
    cluster.begin()
    for _ in range(20):
        cluster.now += 25
        cluster.primary.on_time(cluster.now)
        while (frames := cluster.primary.next_message(1)) is not None:
            cluster.newcomer.handle(b"primary", frames)
        cluster.newcomer.acknowledge()  # its reply is lost
    assert cluster.newcomer.replication()["replicas"][0]["in_sync"] == ARCS[:1]
    cluster.assign_next(arriving=False)
    cluster.settle()
    assert cluster.newcomer.replication()["replicas"][0]["in_sync"] == []
    pushed(cluster, 3, first=6)
    cluster.assign_next()
    for _ in range(200):
        cluster.step()
        if cluster.watch():
            break
    pushed(cluster, 3, first=9)
    cluster.settle()
    assert same_arcs(cluster.primary, cluster.newcomer.replica(1))


def test_orders_during_a_copy_are_executed_in_the_copied_arc_too() -> None:
    cluster = Copying()
    p = cluster.primary
    prepare(p, "asp", 0)
    pushed(cluster, 20)
    cluster.copy_rate = 1
    cluster.begin()
    for _ in range(5):
        cluster.step()
    assert p.replication()["streams"][0]["arriving"]["first"] == 0
    p.add_table(3, native_spec())
    p.drop_table(0)
    p.dismiss(2, 1)
    p.admit(3, 1, 0)
    cluster.send(Worker(3, epoch=NEWEST).push([5], [1], sequence=1, table=3))
    cluster.copy_rate = 0
    cluster.assign_next()
    for _ in range(200):
        cluster.step()
        if cluster.watch():
            break
    cluster.settle()
    assert cluster.newcomer.replica(1).tables() == [1, 2, 3]
    assert same_arcs(p, cluster.newcomer.replica(1))


def test_a_read_does_not_wait_for_a_copy_under_way() -> None:
    cluster = Copying()
    prepare(cluster.primary, "asp", 0)
    pushed(cluster, 20)
    cluster.begin()
    for _ in range(200):
        cluster.step()
        if cluster.primary.replication()["streams"][0]["arrived"]:
            break
    cluster.watch()
    cluster.settle()
    cluster.links[0].is_down = True
    cluster.watch()
    cluster.step()
    stream = cluster.primary.replication()["streams"][0]
    assert stream["arriving"] is not None
    assert stream["bytes"] > 0
    assert [reply.op for reply in cluster.send(Worker(epoch=NEWEST).pull([1]))] == [Op.PULL]


def test_a_copy_ends_with_the_death_of_either_side() -> None:
    for dead in ("primary", "newcomer"):
        cluster = Copying()
        prepare(cluster.primary, "asp", 0)
        pushed(cluster, 40)
        cluster.copy_rate = 1
        cluster.begin()
        for _ in range(5):
            cluster.step()
        cluster.send(Worker(epoch=1000).pull([1]))
        cluster.epoch += 1
        if dead == "primary":
            cluster.newcomer.assign(cluster.epoch, [])
            assert cluster.newcomer.replication()["replicas"] == []
            assert cluster.links[0].carry() == []
            assert cluster.primary.next_message(1) is None or not cluster.links[0].carry()
        else:
            cluster.primary.assign(cluster.epoch, ARCS)
            assert cluster.primary.replication()["streams"] == []
            pushed(cluster, 1, first=41)
            assert [reply.op for reply in cluster.send(Worker(epoch=1000).pull([1]))] == [Op.PULL]


def test_an_arc_joins_a_new_server_and_keeps_exactly_once() -> None:
    cluster = Copying()
    p, n = cluster.primary, cluster.newcomer
    prepare(p, "asp", 0)
    worker = Worker(epoch=1000)
    cluster.send(worker.push([1], [5], sequence=1))
    cluster.begin()
    for _ in range(20):
        cluster.step()
    assert p.replication()["streams"][0]["arrived"] == ARCS[:1]
    p.assign(3, ARCS[1:], [(1, "n", "", [], [])])
    cluster.settle()
    assert p.retired()
    n.assign(3, ARCS[:1], [], [(1, [])])
    again = [Reply.of(*reply) for reply in n.handle(b"w", worker.push([1], [5], sequence=1))]
    assert [reply.status for reply in again] == [Status.OK]
    pulled = [Reply.of(*reply) for reply in n.handle(b"w", worker.pull([1]))]
    assert pulled[0].values.ravel().tolist() == [-5.0]
    assert [reply.status for reply in cluster.send(worker.pull([1]))] == [Status.WRONG_EPOCH]


def many(worker: Worker, sequence: int, rows: int = 160_000) -> list[Any]:
    """A push of many rows of table 1: an arc takes several turns to copy."""
    hashes = np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(2**64 // (rows + 1))
    return worker.push(hashes, np.ones((rows, 4)), sequence=sequence, table=1)


def test_an_arc_is_copied_over_several_turns_and_equals_its_source_of_one_moment() -> None:
    cluster = Copying()
    prepare(cluster.primary, "asp", 0)
    worker = Worker(epoch=NEWEST)
    cluster.send(many(worker, 1))
    cluster.begin()
    turns = 0
    while not cluster.primary.replication()["streams"][0]["arrived"]:
        cluster.step(5)
        turns += 1
        assert turns < 200
        # All rows change while some of them are not copied yet.
        cluster.send(many(worker, 1 + turns))
    assert turns > 2
    cluster.watch()
    cluster.settle()
    assert same_arcs(cluster.primary, cluster.newcomer.replica(1), ARCS[:1])


def save_message(op: Op, numbers: list[int], sequence: int) -> list[Any]:
    return Worker(epoch=NEWEST).numbers(op, numbers, sequence=sequence)


def test_a_save_during_a_copy_begins_at_once_and_the_copy_is_made_after_it() -> None:
    cluster = Copying()
    p = cluster.primary
    prepare(p, "asp", 0)
    worker = Worker(epoch=NEWEST)
    cluster.send(many(worker, 1))
    cluster.begin()
    cluster.step(5)
    assert p.replication()["streams"][0]["arriving"] is not None
    # All tables, plain.
    (begun,) = cluster.send(save_message(Op.SAVE_BEGIN, [0, 0, 0, 0, 0, 1, 2], 2)) or cluster.settle()
    assert begun.status == Status.OK
    saved = p.next_session()
    assert saved is not None
    for _ in range(20):
        cluster.step()
    assert p.replication()["streams"][0]["arrived"] == []
    cluster.send(many(worker, 3))
    assert sum(saved.section(1, slot)[0] for slot in saved.slots) == 160_000
    cluster.send(save_message(Op.SAVE_END, [2], 4))
    for _ in range(200):
        cluster.step()
        if cluster.watch():
            break
    cluster.settle()
    assert same_arcs(p, cluster.newcomer.replica(1))


def test_copies_are_made_although_one_save_follows_another_and_saves_although_copies_are_due() -> None:
    cluster = Copying()
    cluster.copy_rate = 1 << 16  # it would take a minute to copy the arcs
    p = cluster.primary
    prepare(p, "asp", 0)
    cluster.send(many(Worker(epoch=NEWEST), 1))
    cluster.begin()
    saves, since, sequence, refusals = 0, 0, 2, 0
    while not cluster.watch():
        (begun,) = cluster.send(save_message(Op.SAVE_BEGIN, [0, 0, 0, 0, 0, 1, 2], sequence)) or cluster.settle()
        if begun.status == Status.OVERLOADED:
            refusals += 1
            since += 1
            assert since < 50, "no save begins"
            cluster.step()
            continue
        assert begun.status == Status.OK
        saves, since = saves + 1, 0
        assert saves < 4 * len(ARCS), "no arc is copied"
        saved = p.next_session()
        assert saved is not None
        assert sum(saved.section(1, slot)[0] for slot in saved.slots) == 160_000
        cluster.step()
        # No time passes from the end of a save to the beginning of the next one.
        (ended,) = cluster.send(save_message(Op.SAVE_END, [sequence], sequence + 1)) or cluster.settle()
        assert ended.status == Status.OK
        del saved
        sequence += 2
    assert refusals
    cluster.settle()
    assert same_arcs(p, cluster.newcomer.replica(1))


def test_a_write_that_waited_before_a_stream_was_opened_is_not_in_it() -> None:
    cluster = Copying()
    p = cluster.primary
    prepare(p, "bsp", 0)
    p.assign(2, ARCS, [(9, "n", "", [], ARCS[:1])])  # a stream of the past
    p.assign(3, ARCS)
    cluster.epoch = 3
    workers = [Worker(rank, epoch=NEWEST) for rank in range(3)]
    deliver(p, workers[0].numbers(Op.SAVE_BEGIN, [0, 0, 0, 0, 1], sequence=1, clock=1))
    for worker in workers:
        deliver(p, worker.tick(0))
    assert p.next_session() is not None  # the save has begun: the ticks have released it
    deliver(p, workers[0].numbers(Op.SAVE_END, [1], sequence=2, clock=1))
    p.dismiss(0, 1, *p.fence(0, 1))
    cluster.begin()
    while not cluster.watch():
        cluster.step()
    assert p.replication()["position"] == 0
    keys = np.arange(1, 9, dtype=np.uint64) << np.uint64(60)
    cluster.send(workers[1].push(keys, np.ones((8, 4)), sequence=1, table=1, clock=1))
    cluster.settle()
    assert p.replication()["position"] == 1
    assert same_arcs(p, cluster.newcomer.replica(1))


NAME = [7, 8, 9, 10]  # of a written checkpoint
BASE_SAVE, DELTA_SAVE = 1, 2


def bases(cluster: Cluster, kind: int, sequence: int, base: list[int]) -> int:
    """Begin a save of table 1 on the primary; returns the status."""
    replies = cluster.send(save_message(Op.SAVE_BEGIN, [*base, kind << 32 | 1], sequence))
    (reply,) = [reply for reply in replies or cluster.settle() if reply.op == Op.SAVE_BEGIN]
    return reply.status if len(reply.values) > 2 else Status.NO_TABLE  # else no session begins


@pytest.mark.parametrize("how", ["failover", "move"])
@pytest.mark.parametrize("written", [True, False])
def test_changes_since_a_save_are_known_after_a_failover_and_a_move(how: str, written: bool) -> None:
    cluster: Cluster = Copying() if how == "move" else Cluster()
    prepare(cluster.primary, "asp", 0)
    worker = Worker(epoch=NEWEST)
    keys = np.arange(1, 1001, dtype=np.uint64) * np.uint64(2**64 // 1001)
    cluster.send(worker.push(keys, np.ones((1000, 4)), sequence=1, table=1))
    cluster.settle()
    assert bases(cluster, BASE_SAVE, 2, [0] * 4) == Status.OK
    cluster.send(worker.push(keys[:3], np.ones((3, 4)), sequence=3, table=1))
    cluster.send(save_message(Op.SAVE_END, [2, *NAME], 4))
    cluster.settle()
    cluster.send(worker.push(keys[500:502], np.ones((2, 4)), sequence=5, table=1))
    if not written:  # a second one fails, with the changes before and during it
        assert bases(cluster, DELTA_SAVE, 6, NAME) == Status.OK
        cluster.send(worker.push(keys[900:901], np.ones((1, 4)), sequence=7, table=1))
        cluster.settle()
        if how == "move":
            cluster.send(save_message(Op.SAVE_END, [6], 8))
    cluster.settle()
    if isinstance(cluster, Copying):
        cluster.begin()
        for _ in range(200):
            cluster.step()
            if cluster.watch():
                break
        cluster.settle()
    cluster.promote()
    assert bases(cluster, DELTA_SAVE, 9, [1, 2, 3, 4]) == Status.NO_TABLE
    assert bases(cluster, DELTA_SAVE, 10, NAME) == Status.OK
    saved = cluster.primary.next_session()
    assert saved is not None
    hashes = []
    for slot in saved.slots:
        rows, section, *_ = saved.changes(0, slot)
        hashes += section[: 8 * rows].view(np.uint64).tolist()
    wanted = {*keys[:3].tolist(), *keys[500:502].tolist(), *([] if written else keys[900:901].tolist())}
    assert wanted <= set(hashes)
    assert len(hashes) < 200


def test_a_stream_that_opens_late_needs_no_orders_of_the_past() -> None:
    cluster = Copying()
    p = cluster.primary
    prepare(p, "asp", 0, memory=1 << 20)
    pushed(cluster, 5)
    cluster.begin()
    p.add_table(3, native_spec())
    cluster.send(Worker(epoch=NEWEST).push([5], [1], sequence=6, table=3))
    for _ in range(200):
        cluster.step()
        if cluster.watch():
            break
    cluster.settle()
    assert same_arcs(p, cluster.newcomer.replica(1))
    cluster.promote()
    cluster.primary.add_table(4, native_spec())
    cluster.send(Worker(epoch=NEWEST).push([6], [1], sequence=7, table=4))
    (reply,) = cluster.send(Worker(epoch=NEWEST).pull([6], table=4)) or cluster.settle()
    assert reply.values.ravel().tolist() == [-1.0]


def test_a_copy_replaces_what_a_released_arc_has_left() -> None:
    cluster = Cluster()
    p, (link,) = cluster.primary, cluster.links
    prepare(p, "asp", 0)
    pushed(cluster, 5)
    cluster.settle()
    # The backup gives up an arc, which changes, and gets it again.
    for in_sync, arriving in ((ARCS[1:], []), (ARCS[1:], ARCS[:1])):
        cluster.epoch += 1
        p.assign(cluster.epoch, ARCS, [(1, "backup 1", "", in_sync, arriving)])
        link.backup.assign(cluster.epoch, [], [], [(1, in_sync)])
        cluster.settle()
        pushed(cluster, 5, first=6 + 5 * len(arriving))
    for _ in range(100):
        cluster.step()
        if p.replication()["streams"][0]["arrived"]:
            break
    cluster.settle()
    assert same_arcs(p, link.backup.replica(1))
    dead = cluster.promote()
    assert equal(dead, cluster.primary)


@pytest.mark.slow
def test_no_more_than_a_limit_is_sent_without_an_acknowledgement() -> None:
    cluster = Cluster()
    prepare(cluster.primary, "asp", 0)
    rows = 1 << 18
    hashes = np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(2**64 // (rows + 1))
    worker = Worker(epoch=NEWEST)
    for sequence in range(1, 16):
        cluster.send(worker.push(hashes, np.ones((rows, 4)), sequence=sequence, table=1))
    sent = 0
    while (message := cluster.primary.next_message(1)) is not None:
        sent += sum(len(bytes(frame)) for frame in message)
    assert 64 << 20 < sent < (64 << 20) + (8 << 20)
    # From the first one on, and then the others.
    cluster.primary.reconnected(1)
    cluster.settle()
    assert equal(cluster.primary, cluster.links[0].backup.replica(1))
