"""The scheduler and its links over real sockets, with servers that only acknowledge."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import shoal
from cluster_fakes import TIMEOUT, FakeServer, scheduler
from shoal.cluster.link import Link
from shoal.rpc.messages import AddTable, AskTable, Barrier, Dismiss, Passed, StartJob, TableForm, TableIs


def test_servers_and_workers_join_agree_on_a_table_meet_at_a_barrier_and_leave():
    form = TableForm.of(shoal.local().table("x", dim=3).spec)
    with (
        scheduler(2) as cluster,
        FakeServer(cluster.address, rank=1) as second,
        FakeServer(cluster.address, rank=0) as first,
        Link(cluster.address, "worker") as one,
        Link(cluster.address, "worker") as two,
        ThreadPoolExecutor(2) as pool,
    ):
        both = [
            pool.submit(link.join, timeout=TIMEOUT, workers=2, rank=rank, consistency=shoal.SSP(3))
            for link, rank in ((one, 1), (two, 0))
        ]
        joined = [waiting.result() for waiting in both]
        assert [place.rank for place in joined] == [1, 0]
        assert joined[0].map == joined[1].map
        assert joined[0].job == joined[1].job
        assert [(e.first_slot, e.end_slot, e.server) for e in joined[0].map.endpoints] == [(0, 512, 0), (512, 1024, 1)]
        table = one.call(AskTable(form), TableIs, timeout=TIMEOUT, doing="making a table")
        assert table == TableIs(0, form)
        assert two.call(AskTable(form), TableIs, timeout=TIMEOUT, doing="making a table") == table
        waiting = pool.submit(one.call, Barrier("end"), Passed, timeout=TIMEOUT, doing="a barrier")
        assert not waiting.done()
        two.call(Barrier("end"), Passed, timeout=TIMEOUT, doing="a barrier")
        waiting.result()
        one.leave(timeout=TIMEOUT)
        two.leave(timeout=TIMEOUT)
    orders = [order.body for order in first.orders]
    assert [type(order) for order in orders] == [StartJob, AddTable, Dismiss, Dismiss]
    assert orders[0].incarnations == (1, 1)
    assert second.orders == first.orders


def test_who_misses_others_at_the_deadline_is_told_which_ones():
    with scheduler(2) as cluster, FakeServer(cluster.address), Link(cluster.address, "worker") as link:
        with pytest.raises(shoal.errors.DeadlineExceeded, match="1 of 2 servers have joined"):
            link.join(timeout=1.5, consistency=shoal.BSP())
        with FakeServer(cluster.address) as other:
            assert other.joined.wait(TIMEOUT)
