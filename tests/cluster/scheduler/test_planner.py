"""Where arcs move: plans of one map after the other, without servers."""

from __future__ import annotations

import itertools
import random

import pytest

from shoal.cluster.protocol.slot_map import ClusterMap, cut_evenly
from shoal.cluster.scheduler.planner import Layout, Wishes, find_uneven, plan, ring

NODES = {rank: f"node {rank}" for rank in range(3)}


def carried_out(
    map: ClusterMap, wishes: Wishes, most: int = 500, nodes: dict[int, str] | None = None
) -> tuple[Layout, int]:
    """Plan until nothing changes, where copies arrive at once; returns the number of moves too."""
    numbers = itertools.count(1000)
    moves = 0
    for _ in range(most):
        layout = Layout(map, lambda: next(numbers), NODES if nodes is None else nodes)
        for arc, arriving in enumerate(layout.arriving):
            for id in sorted(arriving):
                layout.arrive(arc, id)
        before = list(layout.primaries)
        changed = plan(layout, wishes, may_move=True)
        moves += sum(a != b for a, b in zip(before, layout.primaries, strict=True))
        settled = layout.to_map(map.epoch + 1)
        if not changed and not any(stream.arriving for stream in settled.streams):
            return layout, moves
        map = settled
    raise AssertionError(f"the plans do not end: {map}")


def sums_of(layout: Layout, weights: list[int]) -> dict[int, int]:
    return {
        id: sum(weight for weight, own in zip(weights, layout.primaries, strict=True) if own == id)
        for id in layout.endpoints
    }


@pytest.mark.combined
@pytest.mark.parametrize("replicas", [0, 1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_a_rebalance_evens_out_weights_and_ends(seed: int, replicas: int) -> None:
    rng = random.Random(seed)
    loops = [(f"tcp://h:{k}", k // 2) for k in range(6)]
    map = cut_evenly(1, 1024, loops)
    numbers = itertools.count(1)
    if replicas:
        map = ring(map, replicas, lambda: next(numbers), NODES)
    weights = [rng.choice([0, 1, 5, 20, 100]) * rng.randrange(1, 50) for _ in map.arcs]
    layout, moves = carried_out(map, Wishes(replicas, balance=True, weights=weights))
    sums = sums_of(layout, weights)
    before = sums_of(Layout(map, lambda: 0, NODES), weights)
    mean = sum(weights) / len(sums)
    assert max(sums.values()) <= max(before.values())
    assert moves <= len(weights)
    for giver, taker in itertools.permutations(layout.endpoints, 2):
        if layout.server(giver) != layout.server(taker):
            own = [weight for weight, id in zip(weights, layout.primaries, strict=True) if id == giver]
            # No single move would help by 2 % of the mean.
            assert all(min(w, sums[giver] - sums[taker] - w) <= mean / 50 for w in own)
    assert all(len(copies) == replicas for copies in layout.copies)


def test_without_weights_endpoints_come_to_serve_equally_many_arcs() -> None:
    map = cut_evenly(1, 64, [("tcp://a:1", 0), ("tcp://b:1", 1)])
    wishes = Wishes(0, balance=True)
    empty = Layout(map, lambda: 1, NODES)
    assert find_uneven(empty, wishes) is None
    half = len(map.arcs) // 2
    weights = [100] * half + [1] * half
    assert find_uneven(empty, Wishes(0, weights=weights)) is None  # it is not asked to
    assert find_uneven(empty, Wishes(0, balance=True, weights=weights)) == (0, 1, list(range(half)))


def test_equal_weights_move_nothing() -> None:
    map = cut_evenly(1, 64, [("tcp://a:1", 0), ("tcp://b:1", 1)])
    for weight in (0, 3):
        _, moves = carried_out(map, Wishes(0, balance=True, weights=[weight] * len(map.arcs)))
        assert moves == 0


def test_of_two_copies_on_one_server_one_serves_and_the_other_is_given_up() -> None:
    loops = [(f"tcp://h:{k}", k // 2) for k in range(6)]
    numbers = itertools.count(1)
    map = ring(cut_evenly(1, 64, loops), 1, lambda: next(numbers), NODES)
    layout = Layout(map, lambda: next(numbers), NODES)
    for arc, primary in enumerate(layout.primaries):
        if layout.server(primary) == 0:
            layout.copies[arc] = {2, 3}  # of server 1: it is about to move
    stamps = {(id, arc.first_slot): 1 for arc in map.arcs for id in (2, 3, 4, 5)}
    assert layout.remove_endpoints({0, 1}, set(), stamps) == []
    for primary, copies in zip(layout.primaries, layout.copies, strict=True):
        assert layout.server(primary) not in {layout.server(id) for id in copies}


def test_copies_that_share_a_server_are_made_elsewhere_and_dropped() -> None:
    loops = [(f"tcp://h:{k}", k // 2) for k in range(6)]
    numbers = itertools.count(1)
    one = dict.fromkeys(range(3), "one")  # node, as on one machine
    layout = Layout(ring(cut_evenly(1, 64, loops), 1, lambda: next(numbers), one), lambda: next(numbers), one)
    for arc, primary in enumerate(layout.primaries):
        layout.copies[arc] = {primary ^ 1}  # the other endpoint of its server
    layout, _ = carried_out(layout.to_map(2), Wishes(1), nodes=one)
    for primary, copies in zip(layout.primaries, layout.copies, strict=True):
        assert [layout.server(id) for id in copies] != [layout.server(primary)]
        assert len(copies) == 1
