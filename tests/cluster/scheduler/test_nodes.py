"""Copies on servers of different nodes: the first map, and what the planner makes of later ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping

import pytest

from shoal.cluster.protocol.slot_map import ClusterMap, Endpoint, cut_evenly
from shoal.cluster.scheduler.planner import Layout, Wishes, plan, ring
from tiers import long_after

FOUR = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c", 6: "d", 7: "d"}


class Cluster:
    """A map that servers leave and join, and that the planner then brings to rest; all copies arrive."""

    def __init__(self, nodes: Mapping[int, str], replicas: int, *, threads: int = 1) -> None:
        self.nodes = dict(nodes)
        self.replicas = replicas
        self.numbers = itertools.count(1)
        self.arrived = 0  # copies that were made
        loops = [(f"tcp://h:{server}{k}", server) for server in sorted(nodes) for k in range(threads)]
        self.map = ring(cut_evenly(1, 64, loops), replicas, self.draw, nodes)

    def draw(self) -> int:
        return next(self.numbers)

    def layout(self) -> Layout:
        return Layout(self.map, self.draw, self.nodes)

    def change(self, layout: Layout, added: Collection[Endpoint] = ()) -> None:
        self.map = layout.to_map(self.map.epoch + 1, added)

    def die(self, servers: Collection[int]) -> list[int]:
        layout = self.layout()
        lost = layout.remove_endpoints([one.id for one in self.map.endpoints if one.server in servers], ())
        if not lost:
            self.change(layout)
        return lost

    def join(self, server: int, node: str) -> None:
        self.nodes[server] = node
        id = max(one.id for one in self.map.endpoints) + 100
        self.change(self.layout(), [Endpoint(id, f"tcp://h:{id}", server)])

    def settle(self, draining: Collection[int] = (), balance: bool = True) -> None:
        for _ in range(500):
            layout = self.layout()
            changed = plan(layout, Wishes(self.replicas, draining, balance), may_move=True)
            changed |= layout.tidy()
            self.change(layout)
            for stream in self.map.streams:
                for arc in stream.arriving:
                    changed = True
                    self.arrived += 1
                    layout = self.layout()
                    layout.arrive(arc, stream.backup)
                    self.change(layout)
            if not changed:
                return
        raise AssertionError("the planner does not come to rest")

    def holders(self) -> list[list[int]]:
        """Of each arc, the servers that have it."""
        found = [[self.map.endpoint(arc.primary).server] for arc in self.map.arcs]
        for stream in self.map.streams:
            for arc in stream.arcs:
                found[arc].append(self.map.endpoint(stream.backup).server)
        return found

    def together(self) -> int:
        """How many arcs have two copies on one node."""
        return sum(len({self.nodes[server] for server in held}) < len(held) for held in self.holders())

    def backups(self) -> dict[int, int]:
        """How many copies each server has."""
        counts = dict.fromkeys({one.server for one in self.map.endpoints}, 0)
        for _, *copies in self.holders():
            for server in copies:
                counts[server] += 1
        return counts


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_copies_are_on_different_nodes_and_even(replicas, threads):
    cluster = Cluster(FOUR, replicas, threads=threads)
    assert cluster.together() == 0
    assert len(set(cluster.backups().values())) == 1
    for node in "abcd":
        assert not Cluster(FOUR, replicas, threads=threads).die([one for one in FOUR if FOUR[one] == node])


@pytest.mark.parametrize("replicas", [1, 2])
def test_servers_that_all_have_their_own_node_or_share_one_make_a_plain_ring(replicas):
    maps: list[ClusterMap] = [
        Cluster(nodes, replicas).map
        for nodes in ({0: "a", 1: "b", 2: "c", 3: "d"}, dict.fromkeys(range(4), "a"), dict.fromkeys(range(4), ""))
    ]
    assert maps[0] == maps[1] == maps[2]
    for at, *copies in Cluster(dict.fromkeys(range(4), "a"), replicas).holders():
        assert sorted(copies) == sorted((at + step) % 4 for step in range(1, replicas + 1))


@pytest.mark.parametrize("seed", range(10))
def test_a_lost_copy_is_made_once_on_another_node(seed):
    rng = random.Random(seed)
    names = [FOUR[server] for server in FOUR]
    rng.shuffle(names)
    cluster = Cluster(dict(enumerate(names)), 1)
    assert not cluster.die([rng.randrange(8)])
    missing = sum(len(held) < 2 for held in cluster.holders())
    cluster.settle(balance=False)
    assert cluster.arrived == missing
    assert cluster.together() == 0


def test_more_servers_on_one_node_than_on_all_others_still_have_a_copy_elsewhere():
    cluster = Cluster({0: "a", 1: "a", 2: "a", 3: "b"}, 1)
    assert cluster.together() == 0
    assert Cluster({0: "a", 1: "a"}, 1).together() == len(Cluster({0: "a", 1: "a"}, 1).map.arcs)


def test_a_node_dies_and_another_joins_and_the_copies_are_spread_again():
    cluster = Cluster(FOUR, 1)
    assert not cluster.die([2, 3])
    cluster.settle()
    assert cluster.together() == 0
    cluster.join(8, "e")
    cluster.join(9, "e")
    cluster.settle()
    assert cluster.together() == 0
    served = [held[0] for held in cluster.holders()]
    assert {8, 9} <= set(served)
    assert not cluster.die([8, 9])


def test_copies_that_had_to_share_a_node_leave_it_when_another_joins():
    cluster = Cluster({0: "a", 1: "a", 2: "b", 3: "b"}, 1)
    assert not cluster.die([2, 3])
    cluster.settle()
    assert cluster.together() == len(cluster.map.arcs)
    assert all(len(held) == 2 for held in cluster.holders())
    cluster.join(4, "b")
    cluster.settle(balance=False)
    assert cluster.together() == 0
    assert all(len(held) == 2 for held in cluster.holders())
    assert not cluster.die([0, 1])


@pytest.mark.parametrize("own_nodes", [True, False])
def test_servers_that_are_drained_at_the_same_time_lose_their_copies_before_others(own_nodes):
    cluster = Cluster({server: str(server * own_nodes) for server in range(5)}, 2)
    cluster.settle({3, 4}, balance=False)
    assert {server for held in cluster.holders() for server in held} == {0, 1, 2}
    assert all(len(held) == 3 for held in cluster.holders())


def test_a_server_is_drained_onto_other_nodes():
    cluster = Cluster(FOUR, 1)
    cluster.settle(draining=[0])
    assert all(0 not in held and len(held) == 2 for held in cluster.holders())
    assert cluster.together() == 0


@pytest.mark.parametrize("seed", long_after(10, range(40)))
def test_a_copy_is_on_another_node_whatever_joins_dies_and_is_drained(seed):
    rng = random.Random(seed)
    replicas = rng.choice([1, 2])
    nodes = {server: rng.choice("abcd") for server in range(rng.randrange(4, 9))}
    cluster = Cluster(nodes, replicas, threads=rng.choice([1, 2]))
    spare = 100
    for _ in range(6):
        living = sorted({one.server for one in cluster.map.endpoints})
        roll = rng.random()
        if roll < 0.4 or len(living) <= replicas + 2:
            spare += 1
            cluster.join(spare, rng.choice("abcd"))
            cluster.settle()
        elif roll < 0.7:
            assert not cluster.die([rng.choice(living)])
            cluster.settle()
        else:
            gone = rng.choice(living)
            cluster.settle(draining=[gone])
            layout = cluster.layout()
            for one in [one for one in cluster.map.endpoints if one.server == gone]:
                assert layout.is_free(one.id)
                del layout.endpoints[one.id]
            cluster.change(layout)
        there = {cluster.nodes[one.server] for one in cluster.map.endpoints}
        for held in cluster.holders():
            assert len(held) == replicas + 1
            assert len({cluster.nodes[server] for server in held}) == min(replicas + 1, len(there)), (seed, held)
