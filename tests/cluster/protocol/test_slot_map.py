"""The map of slots: complete, in order, found by slot; its arcs, runs and streams."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maps import map_of
from shoal.cluster.protocol.slot_map import Arc, ClusterMap, Endpoint, Stream, cut_evenly

A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"


@given(st.integers(1, 40), st.integers(40, 2048))
def test_an_even_cut_gives_every_slot_one_owner_and_no_endpoint_two_slots_more_than_another(count, slots):
    where = cut_evenly(3, slots, [(f"tcp://h:{k}", k // 2) for k in range(count)])
    widths = [end - first for first, end, _, _ in where.runs]
    assert where.slots == slots
    assert sum(widths) == slots
    assert max(widths) - min(widths) <= 1
    assert where.owners == where.endpoints
    for k, (first, end, endpoint, siblings) in enumerate(where.runs):
        assert (endpoint.address, endpoint.id, siblings) == (f"tcp://h:{k}", k, 1)
        assert where.run_ranges(k) == [(first, end)]
        arcs = where.arc_ranges(k)
        assert len(arcs) in (1, 2, 4, 8, 16)
        assert len(arcs) == len(where.arcs) // count
        assert [first, *(arc_end for _, arc_end in arcs)] == [*(begin for begin, _ in arcs), end]
    assert len(where.arcs) >= min(4 * count, 16) or 2 * len(where.arcs) > slots
    assert where.servers == (count + 1) // 2
    assert where.of_server(0) == where.endpoints[:2]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(where), type=ClusterMap) == where


@pytest.mark.parametrize(
    ("epoch", "ranges"),
    [(0, [(0, 4)]), (1, []), (1, [(1, 4)]), (1, [(0, 2), (3, 4)]), (1, [(0, 2), (1, 4)]), (1, [(0, 0)])],
)
def test_a_map_with_a_gap_an_overlap_or_no_arc_is_refused_also_when_it_is_received(epoch, ranges):
    with pytest.raises(ValueError, match=r"map|slots"):
        map_of(epoch, *((first, end, A, 0) for first, end in ranges))
    raw = msgspec.msgpack.encode([epoch, [[0, A, 0]], [[first, end, 0, 1] for first, end in ranges]])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=ClusterMap)


@given(st.integers(0, 2**32))
def test_an_endpoint_may_have_several_runs_and_adjacent_arcs_are_one(seed):
    rng = random.Random(seed)
    primaries = [rng.randrange(3) for _ in range(16)]
    addresses = (A, B, C)
    where = map_of(1, *((4 * k, 4 * k + 4, addresses[one], one) for k, one in enumerate(primaries)))
    assert where.servers == len(set(primaries))
    covered = []
    for before, run in zip([None, *where.runs], where.runs, strict=False):
        assert before is None or before.endpoint != run.endpoint
        covered += [run.endpoint.address] * (run.end_slot - run.first_slot)
        assert run.siblings == sum(other.endpoint == run.endpoint for other in where.runs)
    assert covered == [addresses[primaries[slot // 4]] for slot in range(64)]
    assert [endpoint.address for endpoint in where.owners] == list(dict.fromkeys(covered))
    for endpoint in where.owners:
        mine = [slot for slot in range(64) if covered[slot] == endpoint.address]
        for ranges in (where.arc_ranges(endpoint.id), where.run_ranges(endpoint.id)):
            assert [slot for first, end in ranges for slot in range(first, end)] == mine


def test_an_endpoint_without_arcs_is_in_the_map_and_owns_nothing():
    where = ClusterMap(2, (Endpoint(0, A, 0), Endpoint(4, B, 1)), (Arc(0, 8, 4, 2),))
    assert where.owners == (where.endpoint(4),)
    assert where.arc_ranges(0) == where.run_ranges(0) == []
    with pytest.raises(KeyError):
        where.endpoint(1)


@pytest.mark.parametrize(
    ("endpoints", "primary", "match"),
    [
        ([(1, A), (0, B)], 0, "order of their ids"),
        ([(0, A), (0, B)], 0, "each once"),
        ([(0, A), (1, A)], 0, "same address"),
        ([(0, A), (1, B)], 2, "no endpoint with id 2"),
    ],
)
def test_ids_and_addresses_name_one_endpoint(endpoints, primary, match):
    with pytest.raises(ValueError, match=match):
        ClusterMap(1, tuple(Endpoint(id, address, 0) for id, address in endpoints), (Arc(0, 8, primary, 1),))


@pytest.mark.parametrize(
    ("streams", "match"),
    [
        ([Stream(7, 0, 1, (0, 1)), Stream(8, 1, 0, (2,), (3,))], None),
        ([Stream(7, 0, 0, ())], "from endpoint 0 to endpoint 0"),
        ([Stream(7, 0, 5, ())], "to endpoint 5"),
        ([Stream(7, 0, 1, (1, 0))], "has arcs"),
        ([Stream(7, 0, 1, (0,), (0,))], "arriving"),
        ([Stream(7, 0, 1, (2,))], "has arc 2"),
        ([Stream(7, 0, 1, (), (9,))], "has arc 9"),
        ([Stream(7, 0, 1, ()), Stream(7, 1, 0, ())], "the same id"),
        ([Stream(7, 0, 1, ()), Stream(8, 0, 1, ())], "the same endpoints"),
    ],
)
def test_a_stream_is_between_two_endpoints_and_has_arcs_of_its_primary(streams, match):
    endpoints = (Endpoint(0, A, 0), Endpoint(1, B, 1))
    arcs = tuple(Arc(k, k + 1, k // 2, 1) for k in range(4))
    if match is None:
        where = ClusterMap(1, endpoints, arcs, tuple(streams))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(where), type=ClusterMap) == where
        return
    with pytest.raises(ValueError, match=match):
        ClusterMap(1, endpoints, arcs, tuple(streams))


def test_more_endpoints_than_slots_are_refused():
    with pytest.raises(ValueError, match="2 slots do not reach for 3"):
        cut_evenly(1, 2, [(f"tcp://h:{k}", 0) for k in range(3)])
