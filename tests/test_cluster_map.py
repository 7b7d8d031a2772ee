"""The map of slots: complete, in order, found by slot."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.protocol.slot_map import ClusterMap, Endpoint, cut_evenly


@given(st.integers(1, 40), st.integers(40, 2048))
def test_an_even_cut_gives_every_slot_one_owner_and_no_endpoint_two_slots_more_than_another(count, slots):
    where = cut_evenly(3, slots, [(f"tcp://h:{k}", k // 2) for k in range(count)])
    widths = [e.end_slot - e.first_slot for e in where.endpoints]
    assert where.slots == slots
    assert sum(widths) == slots
    assert max(widths) - min(widths) <= 1
    for k, endpoint in enumerate(where.endpoints):
        assert where.of_slot(endpoint.first_slot) == endpoint
        assert where.of_slot(endpoint.end_slot - 1) == endpoint
        assert endpoint.address == f"tcp://h:{k}"
    assert where.servers == (count + 1) // 2
    assert where.of_server(0) == where.endpoints[:2]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(where), type=ClusterMap) == where


@pytest.mark.parametrize(
    ("epoch", "ranges"),
    [(0, [(0, 4)]), (1, []), (1, [(1, 4)]), (1, [(0, 2), (3, 4)]), (1, [(0, 2), (1, 4)]), (1, [(0, 0)])],
)
def test_a_map_with_a_gap_an_overlap_or_no_endpoint_is_refused_also_when_it_is_received(epoch, ranges):
    with pytest.raises(ValueError, match=r"map|slots"):
        ClusterMap(epoch, tuple(Endpoint(first, end, "tcp://h:1", 0) for first, end in ranges))
    raw = msgspec.msgpack.encode([epoch, [[first, end, "tcp://h:1", 0] for first, end in ranges]])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=ClusterMap)


def test_more_endpoints_than_slots_and_slots_outside_are_refused():
    with pytest.raises(ValueError, match="2 slots do not reach for 3"):
        cut_evenly(1, 2, [("tcp://h:1", 0)] * 3)
    with pytest.raises(IndexError, match="slot 2 of 2"):
        cut_evenly(1, 2, [("tcp://h:1", 0)]).of_slot(2)
