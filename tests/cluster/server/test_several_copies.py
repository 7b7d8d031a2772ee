"""Several copies without sockets: what some lack when their primary dies reaches them, in any order of what is sent."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from endpoint_peer import Worker, deliver
from replicated import ARCS, NEWEST, SLOTS, Cluster, Driver, Faults, Link, Range, equal, random_script
from shoal import _core
from shoal._core import Op
from table_specs import native_spec

MODES = [("bsp", 0), ("ssp", 1), ("asp", 0)]
TABLES = {0: 1, 1: 4}


def prepare(endpoint: Any, mode: str, staleness: int = 0) -> None:
    """The orders that begin a job of three workers."""
    for id, dim in TABLES.items():
        endpoint.add_table(id, native_spec(dim))
    endpoint.start_job(1, mode, staleness)
    for rank in range(3):
        endpoint.admit(rank, 1, 0)


def same(one: Any, other: Any, arcs: Sequence[Range] = ARCS) -> bool:
    """Whether the whole state is equal."""
    return all(one.save_arc(*arc) == other.save_arc(*arc) for arc in arcs)


class Several(Cluster):
    """A primary with several backups, each of which may become the next primary."""

    def __init__(self, backups: int) -> None:
        super().__init__(backups)
        self.living = self.endpoints[1:]
        self.unassigned: list[tuple[_core.Endpoint, Any]] = []

    def step(self, ms: int = 25) -> list[Any]:
        rng = self.faults.rng if self.faults is not None else None
        if self.unassigned and (rng is None or rng.random() < 0.3):
            endpoint, incoming = self.unassigned.pop()
            endpoint.assign(self.epoch, [], [], incoming)
        return super().step(ms)

    def lose_primary(self, rng: random.Random) -> None:
        """The copy with the greatest stamps serves; the others are assigned before or after its records arrive."""
        for link in self.links:
            link.backup.close_incoming([link.stream])
        stamps = {k: endpoint.stamps() for k, endpoint in enumerate(self.living)}
        most = max(stamps, key=lambda k: sorted(stamps[k].items()))
        for one in stamps.values():
            assert one.keys() == {first for first, _ in ARCS}
            assert all(one[first] <= stamps[most][first] for first in one)
        self.epoch += 1
        self.primary = self.living.pop(most)
        first = 10 * self.epoch
        self.links = [Link(first + k, self.primary, backup) for k, backup in enumerate(self.living)]
        self.primary.on_time(self.now)
        self.primary.assign(
            self.epoch, ARCS, [(link.stream, f"backup {link.stream}", "", ARCS, []) for link in self.links]
        )
        self.unassigned = [(link.backup, [(link.stream, ARCS)]) for link in self.links]
        rng.shuffle(self.unassigned)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("mode", "staleness"), MODES)
def test_after_as_many_deaths_as_copies_the_results_are_those_of_an_undisturbed_run(
    mode: str, staleness: int, seed: int
) -> None:
    script = random_script(random.Random(seed), tables=TABLES, clocks=8, bsp=mode == "bsp")
    # No digests: the reply that a list is unknown is held until all have acknowledged what came before.
    script = [dataclasses.replace(call, frames=call.plain or call.frames) for call in script]
    reference = _core.Endpoint(SLOTS, ARCS)
    reference.set_map(1, ARCS)
    prepare(reference, mode, staleness)
    undisturbed = Driver(script)
    undisturbed.run(lambda frames, peer: deliver(reference, frames, peer))

    rng = random.Random(1000 + seed)
    cluster = Several(3)
    prepare(cluster.primary, mode, staleness)
    cluster.faults = Faults(rng, cut=0.3, double=0.1, swap=0.1, lose_reply=0.3)
    driver = Driver(script)
    moments = sorted(rng.sample(range(1, len(script)), 2))
    moments.append(moments[1] + rng.choice([0, 1, 5]))  # perhaps before what the second one sent has arrived
    while driver.begin(cluster.send):
        for _ in range(rng.choice([0, 0, 1, 2])):
            driver.take(cluster.step())
        while moments and moments[0] <= driver.begun:
            del moments[0]
            cluster.lose_primary(rng)
            driver.again(cluster.send)
            for _ in range(rng.choice([0, 1, 3])):
                driver.take(cluster.step())
    driver.take(cluster.settle())
    assert not driver.waiting
    assert equal(reference, cluster.primary)
    for link in cluster.links:
        assert same(cluster.primary, link.backup.replica(link.stream))
    assert {name: reply.status for name, reply in driver.answers.items()} == {
        name: reply.status for name, reply in undisturbed.answers.items()
    }


def pushed(cluster: Cluster, sequence: int) -> None:
    hashes = [(slot * 2**60) + 1 for slot in range(SLOTS)]
    cluster.send(Worker(epoch=NEWEST).push(hashes, [1.0] * SLOTS, sequence=sequence))


def carry(links: Sequence[Link], times: int = 20) -> None:
    for now in range(times):
        for link in links:
            link.primary.on_time(1000 + 30 * now)
            link.carry()


def test_a_copy_gets_what_it_lacks_from_the_one_that_serves_next() -> None:
    cluster = Cluster(backups=2)
    p, n, b = cluster.endpoints
    prepare(p, "asp")
    cluster.settle()
    cluster.links[1].is_down = True  # b receives nothing more
    pushed(cluster, 1)
    pushed(cluster, 2)
    for _ in range(3):
        cluster.step()
    n.close_incoming([1])
    b.close_incoming([2])
    assert all(n.stamps()[first] > b.stamps()[first] for first, _ in ARCS)
    n.assign(2, ARCS, [(3, "b", "", ARCS, [])])
    link = Link(3, n, b)
    carry([link], 3)  # b does not know the stream yet
    b.assign(2, [], [], [(3, ARCS)])
    carry([link])
    assert n.committed(n.position())
    assert same(n, b.replica(3))
    pulled = n.handle(b"w", Worker(epoch=NEWEST).pull([1]))
    assert len(pulled) == 1


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_save_ends_in_all_copies_when_its_primary_dies(is_behind: bool) -> None:
    """The worker's request to end it may be refused, and then reaches no copy."""
    cluster = Cluster(backups=2)
    p, n, b = cluster.endpoints
    prepare(p, "asp")
    pushed(cluster, 1)
    cluster.settle()
    cluster.links[1].is_down = is_behind  # b does not learn that the save has begun
    base = 1 << 32  # of the saved table
    cluster.send(Worker(epoch=NEWEST).numbers(Op.SAVE_BEGIN, [0, 0, 0, 0, base], sequence=2))
    pushed(cluster, 3)
    for _ in range(3):
        cluster.step()
    n.close_incoming([1])
    b.close_incoming([2])
    n.assign(2, ARCS, [(3, "b", "", ARCS, [])])
    b.assign(2, [], [], [(3, ARCS)])
    carry([Link(3, n, b)])
    assert n.committed(n.position())
    assert same(n, b.replica(3))


def test_a_closed_stream_changes_nothing_more() -> None:
    cluster = Cluster(backups=1)
    p, n = cluster.endpoints
    prepare(p, "asp")
    cluster.settle()
    n.close_incoming([1])
    before = n.stamps()
    pushed(cluster, 1)
    for _ in range(5):
        cluster.step()
    assert n.stamps() == before
    assert p.replication()["streams"][0]["fenced"]


def test_an_order_that_was_under_way_reaches_all_copies_of_arcs_that_different_servers_serve() -> None:
    cluster = Cluster(backups=2)
    p, n, b = cluster.endpoints
    prepare(p, "bsp")
    cluster.settle()
    n.close_incoming([1])
    b.close_incoming([2])
    some, rest = ARCS[:2], ARCS[2:]
    assert n.replica(1, some).hold() == 0
    assert b.replica(2, rest).hold() == 0
    n.assign(2, some, [(3, "b", "", some, [])], [(4, rest)])
    b.assign(2, rest, [(4, "n", "", rest, [])], [(3, some)])
    carry([Link(3, n, b), Link(4, b, n)])
    for primary, backup, stream, arcs in ((n, b, 3, some), (b, n, 4, rest)):
        assert backup.replication()["replicas"][0]["fault"] == ""
        assert primary.committed(primary.position())
        assert same(primary, backup.replica(stream), arcs)
    held = _core.Endpoint(SLOTS, ARCS)
    held.set_map(1, ARCS)
    prepare(held, "bsp")
    held.hold()
    assert same(held, n, some)
    assert same(held, b, rest)


def test_a_copy_is_not_served_by_one_that_lacks_its_records() -> None:
    cluster = Cluster(backups=2)
    p, n, b = cluster.endpoints
    prepare(p, "asp")
    cluster.settle()
    cluster.links[1].is_down = True
    pushed(cluster, 1)
    cluster.step()
    n.close_incoming([1])
    b.close_incoming([2])
    b.assign(2, ARCS, [(3, "n", "", ARCS, [])])  # the wrong one
    n.assign(2, [], [], [(3, ARCS)])
    carry([Link(3, b, n)])
    (replica,) = n.replication()["replicas"]
    assert "have records that the new primary lacks" in replica["fault"]
    n.assign(3, [], [], [(3, ARCS)])  # an assignment that comes before it is given up changes nothing


def test_an_arc_retires_although_another_stream_has_no_backup_yet() -> None:
    cluster = Cluster(backups=1)
    p, _ = cluster.endpoints
    prepare(p, "asp")
    cluster.settle()
    p.assign(2, ARCS[1:], [(1, "n", "", ARCS[1:], []), (5, "c", "", ARCS[1:], [])])
    assert not p.retired()
    for _ in range(5):
        cluster.step()
    assert p.retired()
    assert not p.committed(p.position())  # c knows nothing of its stream


@pytest.mark.parametrize("is_assigned_first", [False, True])
def test_a_copy_that_is_not_wanted_any_more_is_dropped(is_assigned_first: bool) -> None:
    cluster = Cluster(backups=1)
    p, n = cluster.endpoints
    prepare(p, "asp")
    cluster.settle()
    assert len(n.stamps()) == len(ARCS)
    if is_assigned_first:
        n.assign(2, [], [], [(1, ARCS[1:])])
    p.assign(2, ARCS, [(1, "n", "", ARCS[1:], [])])
    cluster.settle()
    n.assign(2, [], [], [(1, ARCS[1:])])
    assert list(n.stamps()) == [first for first, _ in ARCS[1:]]


def test_an_old_copy_is_not_taken_for_a_newer_one() -> None:
    # b has a copy of p's arc, which p releases; n then copies the arc to b once more.
    cluster = Cluster(backups=2)
    p, n, b = cluster.endpoints
    prepare(p, "asp")
    cluster.settle()
    moved, rest = ARCS[:1], ARCS[1:]
    p.assign(2, rest, [(1, "n", "", rest, []), (2, "b", "", rest, [])])
    cluster.settle()
    n.assign(2, moved, [(3, "b", "", [], moved)], [(1, rest)])
    pushed_at = Worker(epoch=NEWEST).push([1], [1.0], sequence=9)
    n.handle(b"w", pushed_at)
    link = Link(3, n, b)
    # b learns of stream 3 late, and still has its old copy.
    carry([link], 3)
    b.assign(3, [], [], [(2, rest), (3, [])])
    carry([link])
    assert n.replication()["streams"][0]["arrived"] == moved
    b.assign(4, [], [], [(2, rest), (3, moved)])
    assert same(n, b.replica(3), moved)
    b.close_incoming([3])
    b.assign(5, moved, [], [(2, rest)])
    assert same(n, b, moved)


def test_a_copy_arrives_when_all_backups_have_what_was_sent_before_it_began() -> None:
    cluster = Cluster(backups=1)
    p, n = cluster.endpoints
    c = _core.Endpoint(SLOTS)
    prepare(p, "asp")
    cluster.settle()
    cluster.links[0].is_down = True
    pushed(cluster, 1)
    p.assign(2, ARCS, [(1, "n", "", ARCS, []), (2, "c", "", [], ARCS[:1])])
    c.assign(2, [], [], [(2, [])])
    cluster.links.append(Link(2, p, c))

    def arrived() -> Any:
        return next(one for one in p.replication()["streams"] if one["stream"] == 2)["arrived"]

    for _ in range(40):
        cluster.step()
    assert c.replication()["replicas"][0]["in_sync"] == ARCS[:1]
    assert arrived() == []
    cluster.links[0].is_down = False
    p.reconnected(1)
    for _ in range(40):
        cluster.step()
    assert arrived() == ARCS[:1]
    assert same(p, c.replica(2), ARCS[:1])
    assert n.replication()["replicas"][0]["fault"] == ""
