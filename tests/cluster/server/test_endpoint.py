"""What a data loop's engine does with requests, one rule at a time. test_endpoint_machine.py has the long histories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shoal
from endpoint_peer import Reply, Worker, deliver, part_named, released
from shoal import _core
from shoal._core import Op, Status, WireDtype
from table_specs import native_spec

SLOTS = 16
WIDTH = 1 << 60  # hashes of a slot


def hash_in(slot: int, number: int = 0) -> int:
    return slot * WIDTH + number


def served(
    mode: str = "asp", *, workers: int = 1, staleness: int = 0, mean: bool = False, dim: int = 1, **limits: int
) -> _core.Endpoint:
    """All slots, one table, ``workers`` admitted at clock 0."""
    endpoint = _core.Endpoint(SLOTS, [(0, SLOTS)], **limits)
    endpoint.add_table(0, native_spec(dim))
    endpoint.start_job(1, mode, staleness, mean)
    for rank in range(workers):
        endpoint.admit(rank, 1, 0)
    return endpoint


def one(replies: list[Reply]) -> Reply:
    assert len(replies) == 1
    return replies[0]


def statuses(replies: list[Reply]) -> list[int]:
    return [reply.status for reply in replies]


def weights(endpoint: _core.Endpoint, hashes: list[int], worker: Worker | None = None, table: int = 0) -> list[float]:
    """Read by nobody in particular: never waits."""
    reader = worker or Worker(rank=0xFFFFFFFF)
    return one(deliver(endpoint, reader.pull(hashes, table=table))).values.ravel().tolist()  # type: ignore[no-any-return]


# --- who is served -----------------------------------------------------------------------------------------------


def test_a_shard_is_asked_for_by_a_number_and_anything_else_is_an_error():
    endpoint = _core.Endpoint(16, [(0, 16)])
    with pytest.raises(TypeError):
        endpoint.shard("one")
    with pytest.raises(ValueError, match="no table 1"):
        endpoint.shard(1)


def test_a_worker_is_served_once_admitted_and_fenced_once_replaced() -> None:
    endpoint = _core.Endpoint(SLOTS, [(0, SLOTS)])
    endpoint.add_table(0, native_spec())
    old, new = Worker(), Worker(incarnation=2)
    assert one(deliver(endpoint, old.pull([5]))).status == Status.NOT_ADMITTED  # no job yet
    endpoint.start_job(1, "asp")
    assert one(deliver(endpoint, old.pull([5]))).status == Status.NOT_ADMITTED
    endpoint.admit(0, 1, 0)
    assert one(deliver(endpoint, old.pull([5]))).status == Status.OK
    assert one(deliver(endpoint, new.pull([5]))).status == Status.NOT_ADMITTED
    endpoint.dismiss(0, 1)
    assert one(deliver(endpoint, old.push([5], [1], sequence=1))).status == Status.FENCED
    endpoint.admit(0, 2, 0)
    assert one(deliver(endpoint, new.pull([5]))).status == Status.OK
    assert one(deliver(endpoint, old.pull([5]))).status == Status.FENCED
    assert one(deliver(endpoint, Worker(job=2, incarnation=2).pull([5]))).status == Status.WRONG_JOB
    assert endpoint.metrics()["statuses"] == {"ok": 2, "not admitted": 3, "fenced": 2, "wrong job": 1}


def test_a_ping_is_answered_without_a_job_or_a_worker() -> None:
    endpoint = _core.Endpoint(16, [(0, 16)])
    for fields in ({"worker": 0xFFFFFFFF}, {"worker": 5, "incarnation": 3, "job": 9, "epoch": 7}):
        ping = _core.encode_header(op=Op.PING, sequence=12, **fields)
        (answer,) = deliver(endpoint, [ping])
        assert (answer.status, answer.op, answer.sequence) == (Status.OK, Op.PING, 12)
    assert endpoint.metrics()["requests"] == {"ping": 2}


def test_whole_rows_are_read_and_changed_only_where_that_makes_sense() -> None:
    endpoint = served(dim=2)
    adam = shoal.Adam(lr=1.0, b1=0.5, b2=0.5, eps=0.0)
    endpoint.add_table(1, native_spec(2, shoal.Adagrad(lr=1.0, eps=0.0)))
    endpoint.add_table(2, native_spec(2, adam))
    worker = Worker()

    def whole(table: int) -> Reply:
        return one(deliver(endpoint, worker.pull([5], table=table, whole=True)))

    assert whole(0).values.tolist() == [[0, 0]]
    assert one(deliver(endpoint, worker.push([5], [1, 2, 9, 16], sequence=1, table=1, whole=True))).status == Status.OK
    assert whole(1).values.tolist() == [[1, 2, 9, 16]]
    again = worker.push([5], [1, 2, 9, 16], sequence=1, table=1, whole=True)
    assert one(deliver(endpoint, again)).status == Status.OK  # once
    assert one(deliver(endpoint, worker.push([5], [3, 4], sequence=2, table=1))).status == Status.OK
    assert whole(1).values[0, 2:].tolist() == [18, 32]
    for reply in (whole(2), one(deliver(endpoint, worker.push([5], [1] * 6, sequence=3, table=2, whole=True)))):
        assert reply.status == Status.BAD_REQUEST
        assert "Adam" in reply.text
        assert "push gradients" in reply.text
    wrong = one(deliver(endpoint, worker.push([5], [1, 2], sequence=4, table=1, whole=True)))
    assert wrong.status == Status.BAD_REQUEST
    assert "rows of 4 numbers, got float32 rows of 2" in wrong.text
    endpoint = served("bsp")
    for frames in (worker.pull([5], whole=True), worker.push([5], [1], sequence=1, whole=True)):
        reply = one(deliver(endpoint, frames))
        assert reply.status == Status.BAD_REQUEST
        assert "BSP" in reply.text


def test_nobody_may_read_but_not_write() -> None:
    endpoint = served("bsp", workers=2)
    nobody = Worker(rank=0xFFFFFFFF, incarnation=0, job=99)
    assert one(deliver(endpoint, nobody.pull([5], clock=7))).values.tolist() == [[0]]
    refused = one(deliver(endpoint, nobody.push([5], [1], sequence=1)))
    assert refused.status == Status.BAD_REQUEST
    assert "a push needs a worker" in refused.text


def test_a_new_job_forgets_workers_and_pushes_and_keeps_tables() -> None:
    endpoint = served("bsp", workers=2)
    a = Worker()
    deliver(endpoint, a.assign([5], [3], sequence=1))
    deliver(endpoint, a.push([5], [1], sequence=2))
    assert endpoint.metrics()["pending_bytes"] > 0
    endpoint.start_job(1, "asp")  # the same: nothing happens
    assert endpoint.metrics()["pending_bytes"] > 0
    endpoint.start_job(2, "asp")
    assert endpoint.metrics()["pending_bytes"] == 0
    assert endpoint.metrics()["clocks"] == {}
    assert weights(endpoint, [5]) == [3]
    assert endpoint.tables() == [0]


def test_control_calls_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"no slots \[3, 17\) of 16"):
        _core.Endpoint(SLOTS, [(3, 17)])
    endpoint = served()
    with pytest.raises(ValueError, match=r"no slots"):
        endpoint.set_map(1, [(9, 8)])
    with pytest.raises(ValueError, match="no mode bulk"):
        endpoint.start_job(3, "bulk")
    with pytest.raises(ValueError, match="incarnation 0"):
        endpoint.admit(0, 0, 0)
    with pytest.raises(ValueError, match="at most 65536 workers"):
        endpoint.admit(1 << 20, 1, 0)
    with pytest.raises(ValueError, match="a table 0 already"):
        endpoint.add_table(0, native_spec(2))
    endpoint.drop_table(4)  # without effect
    with pytest.raises(ValueError, match="no table 4"):
        endpoint.shard(4)


# --- slots that are elsewhere ------------------------------------------------------------------------------------


def test_slots_that_are_elsewhere_are_told_and_the_rest_is_done_once() -> None:
    endpoint = served()
    endpoint.set_map(7, [(4, 8)])
    a = Worker()
    keys = [hash_in(0), hash_in(0, 1), hash_in(4), hash_in(7), hash_in(8), hash_in(15)]
    refused = one(deliver(endpoint, a.push(keys, [1] * 6, sequence=1)))
    assert (refused.status, refused.slots) == (Status.WRONG_EPOCH, (0, 8, 15))
    assert _core.decode(endpoint.handle(b"", a.push(keys, [1] * 6, sequence=1))[0][1]).epoch == 7
    assert weights(endpoint, keys[2:4]) == [-1, -1]
    # A pull returns only the refusal.
    assert one(deliver(endpoint, a.pull(keys))).slots == (0, 8, 15)
    # The slots come here; the same call is sent again, and only they take it.
    endpoint.set_map(8, [(0, 16)])
    assert one(deliver(endpoint, a.push(keys, [1] * 6, sequence=1))).status == Status.OK
    assert weights(endpoint, keys) == [-1] * 6
    erased = one(deliver(endpoint, a.keys(Op.ERASE, keys[:3], sequence=2)))
    assert (erased.status, erased.aux) == (Status.OK, 3)


def test_a_parked_read_is_refused_when_its_slots_move_away() -> None:
    endpoint = served("bsp", workers=2)
    a = Worker()
    deliver(endpoint, a.tick(0))
    assert one(deliver(endpoint, a.pull([hash_in(3)], clock=1), b"a")).status == Status.DEFERRED
    assert (
        one(deliver(endpoint, a.bare(Op.SLOT, aux=3, clock=1, sequence=(1 << 63) + 1), b"a")).status == Status.DEFERRED
    )
    assert one(deliver(endpoint, a.pull([hash_in(9)], clock=1, sequence=(1 << 63) + 2))).status == Status.DEFERRED
    endpoint.set_map(2, [(8, 16)])
    assert [(r.peer, r.status, r.slots) for r in released(endpoint)] == [(b"a", Status.WRONG_EPOCH, (3,))] * 2
    assert endpoint.metrics()["deferred_reads"] == 1


def test_a_function_that_waits_while_the_map_changes_is_refused() -> None:
    endpoint = served("bsp", workers=2)
    deliver(endpoint, Worker(0).tick(0, [], []))
    assert one(deliver(endpoint, Worker(0).reduce(1, clock=1, sequence=1 << 63))).status == Status.DEFERRED
    endpoint.set_map(1, [(0, 8)])
    assert released(endpoint) == []
    replies = deliver(endpoint, Worker(1, epoch=1).tick(0, [], []))
    assert [(r.status, r.slots) for r in replies] == [(Status.OK, ()), (Status.WRONG_EPOCH, ())]


def test_a_tick_by_an_old_map_is_refused() -> None:
    endpoint = served("bsp")
    endpoint.set_map(2, [(0, 16)])
    reply = one(deliver(endpoint, Worker(epoch=1).tick(0)))
    assert (reply.status, reply.slots) == (Status.WRONG_EPOCH, ())
    assert one(deliver(endpoint, Worker(epoch=2).tick(0))).status == Status.OK


def test_a_repeated_tick_by_an_old_map_is_refused() -> None:
    """The endpoint may have other arcs by now, which have the tick, while those of the old map lack it."""
    endpoint = served("asp")
    assert one(deliver(endpoint, Worker(epoch=1).tick(0))).status == Status.OK
    assert one(deliver(endpoint, Worker(epoch=1).tick(0, sequence=2))).status == Status.OK
    endpoint.set_map(2, [(0, 16)])
    assert one(deliver(endpoint, Worker(epoch=1).tick(0, sequence=2))).status == Status.WRONG_EPOCH
    assert one(deliver(endpoint, Worker(epoch=2).tick(0, sequence=3))).status == Status.OK


# --- exactly once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["asp", "bsp"])
def test_a_push_that_comes_again_changes_nothing(mode: str) -> None:
    endpoint = served(mode)
    a = Worker()
    message = a.push([hash_in(1), hash_in(2)], [1, 2], sequence=1)
    for _ in range(3):
        assert one(deliver(endpoint, message)).status == Status.OK
    deliver(endpoint, a.tick(0, [1]))
    assert one(deliver(endpoint, message)).status == Status.OK
    assert weights(endpoint, [hash_in(1), hash_in(2)]) == [-1, -2]
    assert endpoint.metrics()["duplicates"] == 3


def test_a_part_that_overlaps_what_was_done_is_done_where_it_was_not() -> None:
    endpoint = served()
    a = Worker()
    deliver(endpoint, a.push([hash_in(1), hash_in(3)], [1, 1], sequence=5))
    deliver(endpoint, a.push([hash_in(1), hash_in(2), hash_in(2, 9), hash_in(3)], [1, 1, 1, 1], sequence=5))
    assert weights(endpoint, [hash_in(1), hash_in(2), hash_in(2, 9), hash_in(3)]) == [-1, -1, -1, -1]


def test_sequences_64_below_the_greatest_count_as_seen() -> None:
    endpoint = served()
    a = Worker()
    deliver(endpoint, a.push([5], [1], sequence=100))
    deliver(endpoint, a.push([5], [1], sequence=37))
    assert weights(endpoint, [5]) == [-2]
    deliver(endpoint, a.push([5], [1], sequence=36))
    assert weights(endpoint, [5]) == [-2]
    deliver(endpoint, a.push([hash_in(9)], [1], sequence=36))  # another slot has not
    assert weights(endpoint, [hash_in(9)]) == [-1]


def test_an_erase_that_comes_again_is_answered_the_same() -> None:
    endpoint = served()
    a = Worker()
    keys = [hash_in(s) for s in range(8)]
    deliver(endpoint, a.push(keys, [1] * 8, sequence=1))
    assert one(deliver(endpoint, a.keys(Op.ERASE, keys[:5], sequence=2))).aux == 5
    assert one(deliver(endpoint, a.keys(Op.ERASE, keys[:5], sequence=2))).aux == 5
    assert one(deliver(endpoint, a.keys(Op.ERASE, keys, sequence=3))).aux == 3
    assert one(deliver(endpoint, a.keys(Op.ERASE, keys[:5], sequence=2))).aux == 5
    for sequence in range(4, 80):
        deliver(endpoint, a.keys(Op.ERASE, [], sequence=sequence))
    assert one(deliver(endpoint, a.keys(Op.ERASE, keys, sequence=79))).aux == 0


def test_messages_of_one_erase_report_the_rows_of_their_own_slots() -> None:
    endpoint = served()
    a = Worker()
    keys = [hash_in(s) for s in range(8)]
    deliver(endpoint, a.push(keys, [1] * 8, sequence=1))
    for _ in range(2):
        assert one(deliver(endpoint, a.keys(Op.ERASE, keys[:3], sequence=2))).aux == 3
        assert one(deliver(endpoint, a.keys(Op.ERASE, keys[3:], sequence=2))).aux == 5
    # Cut along other slots, as under another map.
    assert one(deliver(endpoint, a.keys(Op.ERASE, keys[2:6], sequence=2))).aux == 4


def test_a_replaced_worker_counts_its_calls_anew() -> None:
    endpoint = served()
    deliver(endpoint, Worker().push([5], [1], sequence=1))
    endpoint.admit(0, 2, 0)
    deliver(endpoint, Worker(incarnation=2).push([5], [1], sequence=1))
    assert weights(endpoint, [5]) == [-2]


# --- clocks ------------------------------------------------------------------------------------------------------


def test_a_tick_waits_for_every_message_that_it_names() -> None:
    endpoint = served("bsp")
    a = Worker()
    first, second = (
        a.push([hash_in(1), hash_in(2)], [1, 1], sequence=1),
        a.push([hash_in(5), hash_in(6)], [1, 1], sequence=1),
    )
    tick = a.tick(0, [part_named(2, 1), part_named(6, 1)])
    assert one(deliver(endpoint, tick)).status == Status.RETRY
    deliver(endpoint, first)
    assert one(deliver(endpoint, tick)).status == Status.RETRY
    deliver(endpoint, second)
    assert one(deliver(endpoint, tick)).status == Status.OK
    assert weights(endpoint, [hash_in(1), hash_in(6)]) == [-1, -1]
    assert one(deliver(endpoint, tick)).status == Status.OK  # again
    assert one(deliver(endpoint, a.tick(2))).status == Status.RETRY  # out of order
    assert one(deliver(endpoint, a.tick(1, [part_named(99, 1)]))).status == Status.RETRY  # no such slot
    assert endpoint.metrics()["clocks"] == {0: 1}


def test_under_bsp_a_clock_is_one_step_in_rank_order_seen_by_pulls_of_the_next() -> None:
    endpoint = served("bsp", workers=3)
    workers = [Worker(rank) for rank in range(3)]
    # 1e30 - 1e30 + 1 is 1; in another order, that of arrival or of the calls' numbers, it is 0.
    pushes = {0: [(7, 1e30)], 1: [(5, -1e30)], 2: [(2, 0.25), (3, 0.75)]}
    for rank in (2, 0, 1):
        for sequence, grad in reversed(pushes[rank]):
            deliver(endpoint, workers[rank].push([5], [grad], sequence=sequence))
        assert one(deliver(endpoint, workers[rank].pull([5]))).values.tolist() == [[0]]
    assert statuses(deliver(endpoint, workers[1].tick(0, [5]))) == [Status.OK]
    assert one(deliver(endpoint, workers[1].pull([5], clock=1), b"early")).status == Status.DEFERRED
    assert statuses(deliver(endpoint, workers[0].tick(0, [7]))) == [Status.OK]
    last = deliver(endpoint, workers[2].tick(0, [2, 3]), b"last")
    assert [(r.peer, r.status) for r in last] == [(b"last", Status.OK), (b"early", Status.OK)]
    assert last[1].values.tolist() == [[-1]]
    assert endpoint.shard(0).step == 1


def test_under_bsp_a_mean_divides_by_all_who_ticked() -> None:
    endpoint = served("bsp", workers=4, mean=True)
    workers = [Worker(rank) for rank in range(4)]
    deliver(endpoint, workers[0].push([5], [6], sequence=1))
    deliver(endpoint, workers[2].push([5, hash_in(3)], [2, 4], sequence=1))
    deliver(endpoint, workers[0].tick(0, [1]))
    endpoint.dismiss(0, 1)  # counts nevertheless
    for worker in workers[1:]:
        deliver(endpoint, worker.tick(0, [], [0] if worker.rank == 2 else []))
    assert weights(endpoint, [5, hash_in(3)]) == [-2, -1]


def test_under_bsp_every_table_that_anybody_pushed_to_takes_a_step() -> None:
    endpoint = served("bsp", workers=2)
    endpoint.add_table(3, native_spec(2))
    deliver(endpoint, Worker(0).tick(0, [], [3]))
    deliver(endpoint, Worker(1).tick(0, [], []))
    assert (endpoint.shard(0).step, endpoint.shard(3).step) == (0, 1)
    deliver(endpoint, Worker(0).tick(1, [], [0, 3]))
    deliver(endpoint, Worker(1).tick(1, [], [3]))
    assert (endpoint.shard(0).step, endpoint.shard(3).step) == (1, 2)


def test_under_bsp_a_fast_worker_goes_ahead_and_each_clock_stays_one_step() -> None:
    endpoint = served("bsp", workers=2)
    fast, slow = Worker(0), Worker(1)
    for clock in range(3):
        deliver(endpoint, fast.push([5], [1 << clock], sequence=clock + 1, clock=clock))
        deliver(endpoint, fast.tick(clock, [clock + 1]))
    for clock in (2, 1, 3):
        pull = fast.pull([5], clock=clock, sequence=(1 << 63) + clock)
        assert one(deliver(endpoint, pull, b"%d" % clock)).status == Status.DEFERRED
    seen = []
    for clock in range(3):
        replies = deliver(endpoint, slow.tick(clock, [], []))
        seen += [(r.peer, r.values.item()) for r in replies if r.op == Op.PULL]
    assert seen == [(b"1", -1), (b"2", -3), (b"3", -7)]
    assert endpoint.shard(0).step == 3
    late = one(deliver(endpoint, fast.pull([5], clock=2)))
    assert late.status == Status.BAD_REQUEST
    assert "a pull at clock 2 came after the pushes of clock 2 were applied" in late.text
    forgotten = one(deliver(endpoint, fast.push([5], [1], sequence=9, clock=1)))
    assert forgotten.status == Status.BAD_REQUEST
    assert "a push of clock 1 came after the tick to clock 3" in forgotten.text


def test_ssp_lets_a_worker_run_ahead_by_the_staleness() -> None:
    endpoint = served("ssp", workers=2, staleness=2)
    fast, slow = Worker(0), Worker(1)
    for clock in range(3):
        deliver(endpoint, fast.push([5], [1], sequence=clock + 1, clock=clock))
        assert one(deliver(endpoint, fast.pull([5], clock=clock))).values.item() == -clock - 1
        deliver(endpoint, fast.tick(clock, [clock + 1]))
    assert one(deliver(endpoint, fast.pull([5], clock=3), b"f")).status == Status.DEFERRED
    deliver(endpoint, slow.push([5], [10], sequence=1))
    replies = deliver(endpoint, slow.tick(0, [1]))
    assert [(r.peer, r.status) for r in replies] == [(b"peer", Status.OK), (b"f", Status.OK)]
    assert replies[1].values.item() == -13
    assert endpoint.metrics()["pull_staleness"] == {0: 1, 1: 1, 2: 2}


def test_ssp_without_slack_is_bsp_and_asp_never_waits() -> None:
    endpoint = served("ssp", workers=2, staleness=0)
    deliver(endpoint, Worker(0).push([5], [1], sequence=1))
    assert weights(endpoint, [5]) == [0]
    endpoint = served("asp", workers=2)
    deliver(endpoint, Worker(0).push([5], [1], sequence=1))
    assert one(deliver(endpoint, Worker(0).pull([5], clock=50))).values.item() == -1


def test_push_staleness_counts_others_pushes_since_the_pull() -> None:
    endpoint = served("asp", workers=2)
    a, b = Worker(0), Worker(1)
    deliver(endpoint, a.pull([5]))
    for sequence in (1, 2, 3):
        deliver(endpoint, b.push([5], [1], sequence=sequence))
    deliver(endpoint, a.push([5], [1], sequence=1))  # 3 of b since
    deliver(endpoint, a.push([5], [1], sequence=2))  # its own do not count
    deliver(endpoint, b.push([5], [1], sequence=4))  # b never pulled: the 2 of a
    assert endpoint.metrics()["push_staleness"] == {0: 3, 3: 2, 2: 1} or endpoint.metrics()["push_staleness"] == {
        0: 3,
        2: 1,
        3: 2,
    }


def test_a_repeated_read_takes_the_place_of_the_one_that_waits() -> None:
    endpoint = served("bsp", workers=2)
    a, b = Worker(0), Worker(1)
    deliver(endpoint, a.tick(0, [], []))
    for peer in (b"one", b"two"):
        assert one(deliver(endpoint, a.pull([5], clock=1), peer)).status == Status.DEFERRED
    replies = deliver(endpoint, b.tick(0, [], []))
    assert [r.peer for r in replies] == [b"peer", b"two"]


def test_all_reads_of_a_worker_wait_for_its_clock() -> None:
    endpoint = served("bsp", workers=2)
    a, b = Worker(0), Worker(1)
    deliver(endpoint, b.push([hash_in(1)], [4], sequence=1))
    deliver(endpoint, a.tick(0, [], []))
    top = 1 << 63
    reads = [
        a.keys(Op.CONTAINS, [hash_in(1), hash_in(2)], clock=1, sequence=top),
        a.keys(Op.STATE, [hash_in(1)], clock=1, sequence=top + 1),
        a.bare(Op.SLOT, aux=1, clock=1, sequence=top + 2),
        a.bare(Op.SECTION, aux=1, clock=1, sequence=top + 3),
        a.bare(Op.STATS, clock=1, sequence=top + 4),
        a.reduce(1, clock=1, sequence=top + 5),
    ]
    for read in reads:
        assert one(deliver(endpoint, read)).status == Status.DEFERRED
    contains, state, slot, section, stats, total = deliver(endpoint, b.tick(0, [1]))[1:]
    assert contains.values.tolist() == [1, 0]
    assert state.values.tolist() == [[-4]]
    assert slot.values[0].tolist() == [hash_in(1)]
    assert slot.values[1].tolist() == [[-4]]
    assert len(section.values) == 128
    assert stats.values[:2] == [1, 1]
    assert total.values.sum() == -4


# --- workers that come and go -------------------------------------------------------------------------------------


def test_a_dismissed_worker_releases_its_clock_and_takes_unticked_pushes_along() -> None:
    endpoint = served("bsp", workers=2)
    a, b = Worker(0), Worker(1)
    deliver(endpoint, b.push([5], [1], sequence=1))
    deliver(endpoint, b.tick(0, [1]))
    deliver(endpoint, b.push([5], [10], sequence=2, clock=1))  # not ticked
    assert one(deliver(endpoint, b.pull([5], clock=1), b"b")).status == Status.DEFERRED
    deliver(endpoint, a.push([5], [100], sequence=1))
    deliver(endpoint, a.tick(0, [1]))
    # b's pull was answered by a's tick; once more, now to be fenced.
    assert one(deliver(endpoint, b.pull([5], clock=2), b"b")).status == Status.DEFERRED
    assert one(deliver(endpoint, a.pull([5], clock=1))).values.item() == -101
    deliver(endpoint, a.tick(1, [], []))
    assert one(deliver(endpoint, a.pull([5], clock=2), b"a")).status == Status.DEFERRED
    endpoint.dismiss(1, 1)
    assert [(r.peer, r.status) for r in released(endpoint)] == [(b"b", Status.FENCED), (b"a", Status.OK)]
    assert weights(endpoint, [5]) == [-101]
    assert endpoint.metrics()["dropped_pushes"] == 1


def test_a_fenced_worker_is_refused_and_holds_the_others_back_until_it_is_dismissed() -> None:
    endpoint = served("bsp", workers=2)
    a, b = Worker(0), Worker(1)
    deliver(endpoint, b.push([5], [10], sequence=1))
    deliver(endpoint, b.tick(0, [1], [0]))
    deliver(endpoint, b.push([5], [20], sequence=2, clock=1))
    assert endpoint.fence(1, 1) == (1, [0])
    assert endpoint.fence(1, 1) == (1, [0])
    assert endpoint.fence(1, 2) == endpoint.fence(7, 1) == (0, [])  # who is not in
    assert statuses(deliver(endpoint, b.tick(1, [2]))) == [Status.FENCED]
    for clock in (0, 1):
        deliver(endpoint, a.tick(clock, [], []))
    assert one(deliver(endpoint, a.pull([5], clock=1))).values.item() == -10
    assert one(deliver(endpoint, a.pull([5], clock=2))).status == Status.DEFERRED
    assert endpoint.dismiss(1, 1, 1, [0]) == 2
    assert one(released(endpoint)).values.item() == -10
    assert endpoint.shard(0).step == 1


def test_a_tick_that_came_to_another_endpoint_alone_counts_here_with_its_pushes_and_tables() -> None:
    endpoint = served("bsp", workers=2, mean=True)
    endpoint.add_table(3, native_spec(2))
    a, b = Worker(0), Worker(1)
    deliver(endpoint, b.push([5], [10], sequence=1))
    deliver(endpoint, b.push([5], [1000], sequence=2, clock=1))
    for clock in (0, 1):
        deliver(endpoint, a.tick(clock, [], []))
    assert endpoint.fence(1, 1) == (0, [])
    endpoint.dismiss(1, 1, 1, [0, 3, 77])  # 77: a table that is not here
    assert weights(endpoint, [5]) == [-5]  # of two workers
    assert (endpoint.shard(0).step, endpoint.shard(3).step) == (1, 1)
    assert endpoint.metrics()["dropped_pushes"] == 1
    assert endpoint.metrics()["pending_bytes"] == 0


def test_what_was_ticked_before_the_last_worker_went_is_applied() -> None:
    endpoint = served("bsp", workers=2)
    a, b = Worker(0), Worker(1)
    for clock in (0, 1):
        deliver(endpoint, a.push([5], [1], sequence=clock + 1, clock=clock))
        deliver(endpoint, a.tick(clock, [clock + 1]))
    endpoint.dismiss(0, 1)
    assert weights(endpoint, [5]) == [0]
    deliver(endpoint, b.push([5], [100], sequence=1))
    endpoint.dismiss(1, 1)
    assert weights(endpoint, [5]) == [-2]
    assert endpoint.metrics()["pending_bytes"] == 0


def test_a_hold_stops_clocks_where_somebody_can_join() -> None:
    endpoint = served("bsp", workers=2)
    a, b = Worker(0), Worker(1)
    deliver(endpoint, a.push([5], [1], sequence=1))
    deliver(endpoint, a.tick(0, [1]))
    assert endpoint.hold() == 1
    deliver(endpoint, b.tick(0, [], []))  # clock 0 is complete: below the hold
    assert weights(endpoint, [5]) == [-1]
    for clock in (1, 2):
        for rank, worker in enumerate((a, b)):
            deliver(endpoint, worker.push([5], [1], sequence=clock + 1, clock=clock))
            deliver(endpoint, worker.tick(clock, [clock + 1]))
            assert rank in endpoint.metrics()["clocks"]
    assert endpoint.hold() == 1  # still
    assert weights(endpoint, [5]) == [-1]
    assert endpoint.metrics()["applied"] == 1
    endpoint.admit(2, 1, 2)
    assert weights(endpoint, [5]) == [-3]  # clock 1 went on; clock 2 waits for the new one
    assert one(deliver(endpoint, Worker(2).pull([5], clock=2))).values.item() == -3
    deliver(endpoint, Worker(2).tick(2, [], []))
    assert weights(endpoint, [5]) == [-5]
    endpoint.hold()
    endpoint.resume()
    for worker in (a, b, Worker(2)):
        deliver(endpoint, worker.tick(3, [], [0]))
    assert endpoint.metrics()["applied"] == 4


def test_nobody_joins_at_a_clock_that_was_applied() -> None:
    endpoint = served("bsp")
    deliver(endpoint, Worker().tick(0))
    with pytest.raises(ValueError, match="rank 1 cannot join at clock 0: the clocks before 1 are applied"):
        endpoint.admit(1, 1, 0)
    endpoint.admit(0, 1, 0)  # is in already
    endpoint.admit(1, 1, 1)
    assert endpoint.metrics()["clocks"] == {0: 1, 1: 1}


def test_a_hold_stops_ssp_reads_as_well() -> None:
    endpoint = served("ssp", workers=1, staleness=1)
    a = Worker()
    assert endpoint.hold() == 0
    deliver(endpoint, a.tick(0, [], []))
    deliver(endpoint, a.tick(1, [], []))
    assert one(deliver(endpoint, a.pull([5], clock=2), b"a")).status == Status.DEFERRED
    endpoint.admit(1, 1, 2)
    assert [(r.peer, r.status) for r in released(endpoint)] == [(b"a", Status.OK)]


# --- bounds ------------------------------------------------------------------------------------------------------


def test_reads_that_wait_are_bounded_and_a_repeated_one_keeps_its_place() -> None:
    endpoint = served("bsp", workers=2, deferred_reads=2)
    a = Worker()
    deliver(endpoint, a.tick(0, [], []))
    got = [one(deliver(endpoint, a.pull([5], clock=1, sequence=(1 << 63) + i))).status for i in (0, 1, 2, 1)]
    assert got == [Status.DEFERRED, Status.DEFERRED, Status.OVERLOADED, Status.DEFERRED]
    assert endpoint.metrics()["deferred_peak"] == 2
    endpoint = served("bsp", workers=2, deferred_bytes=2000)
    deliver(endpoint, a.tick(0, [], []))
    assert one(deliver(endpoint, a.pull(range(1000), clock=1))).status == Status.OVERLOADED
    assert endpoint.metrics()["deferred_bytes"] == 0


def test_pushes_ahead_take_half_of_the_room_and_those_of_the_next_clock_never_wait_for_it() -> None:
    endpoint = served("bsp", workers=2, pending_bytes=100_000)
    fast, slow = Worker(0), Worker(1)
    keys = [hash_in(1, i) for i in range(1000)]
    deliver(endpoint, fast.tick(0, [], []))
    ahead = [fast.push(keys, [1] * 1000, sequence=sequence, clock=1) for sequence in range(1, 7)]
    got = [one(deliver(endpoint, message)).status for message in ahead]
    assert got == [Status.OK] * 4 + [Status.OVERLOADED] * 2
    for sequence in range(1, 9):
        message = slow.push(keys, [1] * 1000, sequence=sequence)
        assert one(deliver(endpoint, message)).status == Status.OK
    full = one(deliver(endpoint, slow.push(keys, [1] * 1000, sequence=9)))
    assert full.status == Status.BAD_REQUEST
    assert "the pushes of clock 0 hold 110304 bytes here, and the limit is 100000" in full.text
    assert "push less in a clock" in full.text
    deliver(endpoint, slow.tick(0, list(range(1, 9))))
    assert weights(endpoint, keys[:1]) == [-8]
    assert one(deliver(endpoint, fast.push(keys, [1] * 1000, sequence=5, clock=1))).status == Status.OK


def test_ticks_ahead_are_bounded_as_pushes_are() -> None:
    endpoint = served("bsp", workers=2, pending_bytes=100_000)
    got = [one(deliver(endpoint, Worker(0).tick(clock, [], []))).status for clock in range(300)]
    assert got.index(Status.OVERLOADED) == 197  # 256 bytes each
    assert set(got[197:]) == {Status.OVERLOADED, Status.RETRY}
    for clock in range(197):
        deliver(endpoint, Worker(1).tick(clock, [], []))
    assert endpoint.metrics()["pending_bytes"] == 0
    assert one(deliver(endpoint, Worker(0).tick(197, [], []))).status == Status.OK


def test_a_reply_that_would_be_too_large_is_refused_before_it_is_made() -> None:
    endpoint = served(reply_bytes=1000)
    a = Worker()
    refused = one(deliver(endpoint, a.pull(range(251))))
    assert refused.status == Status.BAD_REQUEST
    assert "the reply would have 1004 bytes, at most 1000 are sent" in refused.text
    assert one(deliver(endpoint, a.pull(range(250)))).status == Status.OK
    deliver(endpoint, a.push([hash_in(2, i) for i in range(100)], [1] * 100, sequence=1))
    assert "slot 2 has 1200 bytes" in one(deliver(endpoint, a.bare(Op.SLOT, aux=2))).text
    assert "the section of slot 2 has 1280 bytes" in one(deliver(endpoint, a.bare(Op.SECTION, aux=2))).text


# --- requests that make no sense ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Worker().push([5], [[1, 2]], sequence=1), "table 0 has dim 1, got float32 rows of 2"),
        (Worker().assign([5], [np.inf], sequence=1), "weights must be finite"),
        (Worker().keys(Op.STATE, [5], aux=3, sequence=1), "there is no such column"),
        (Worker().bare(Op.SLOT, aux=16, sequence=1), "there is no slot 16 of 16"),
        (Worker().bare(Op.SECTION, aux=1 << 31, sequence=1), "there is no slot 2147483648 of 16"),
        (Worker().numbers(Op.LOAD_BEGIN, [1, 2], sequence=1), "names the rows of 16 slots, got 2"),
        (Worker().numbers(Op.LOAD_BEGIN, [1 << 62] * 16, sequence=1), "no machine has memory for"),
        (Worker().numbers(Op.LOAD_END, [1], sequence=1), "no load of this worker is under way"),
        (
            Worker().numbers(Op.LOAD_END, [1, 2, 3], sequence=1),
            "step, clock and base, got 3",
        ),
        (Worker().section(0, np.zeros(0, np.uint8), sequence=1), "no load of this worker is under way"),
        (Worker().reduce(77, sequence=1), "77"),
        ([b"junk"], "a header has 64 bytes, got 4"),
        ([], "a message has"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong_and_changes_nothing(message: list[Any], text: str) -> None:
    endpoint = served()
    reply = one(deliver(endpoint, message))
    assert reply.status == Status.BAD_REQUEST
    assert text in reply.text
    assert len(endpoint.shard(0)) == 0
    assert one(deliver(endpoint, Worker().push([5], [1], sequence=1))).status == Status.OK
    assert weights(endpoint, [5]) == [-1]


@pytest.mark.parametrize("mode", ["asp", "bsp"])
@pytest.mark.parametrize("dtype", [WireDtype.FLOAT16, WireDtype.BFLOAT16])
def test_rows_of_integers_in_16_bits_are_refused_and_change_nothing(dtype: WireDtype, mode: str) -> None:
    endpoint = _core.Endpoint(SLOTS, [(0, SLOTS)])
    endpoint.add_table(0, native_spec(optimizer=shoal.Add(), dtype="int64"))
    endpoint.add_table(1, native_spec(2))
    endpoint.start_job(1, mode, 0, False)
    endpoint.admit(0, 1, 0)
    hashes, halves, a = np.array([5], np.uint64), np.ones((1, 2), np.uint16), Worker()

    def push(op: Op, table: int) -> Reply:
        frames = a._message(op, [hashes, halves], dtype=dtype, dim=2, count=1, table=table, sequence=1)
        return one(deliver(endpoint, frames))

    def pull(table: int) -> Reply:
        return one(
            deliver(endpoint, a._message(Op.PULL, [hashes], dtype=dtype, count=1, table=table, sequence=1 << 63))
        )

    name = dtype.name.lower()
    for reply in (push(Op.PUSH, 0), push(Op.ASSIGN, 0), pull(0)):
        assert reply.status == Status.BAD_REQUEST
        assert f"table 0 has int64, got {name} as the type of its rows: an integer is" in reply.text
    assert len(endpoint.shard(0)) == 0
    assert pull(1).status == push(Op.PUSH, 1).status == Status.OK


def test_a_table_that_is_not_there_is_told_also_to_those_who_wait() -> None:
    endpoint = served("bsp", workers=2)
    a = Worker()
    assert one(deliver(endpoint, a.pull([5], table=9))).status == Status.NO_TABLE
    deliver(endpoint, a.push([5], [1], sequence=1))
    deliver(endpoint, a.tick(0, [1]))
    assert one(deliver(endpoint, a.pull([5], clock=1))).status == Status.DEFERRED
    endpoint.drop_table(0)
    assert statuses(released(endpoint)) == [Status.NO_TABLE]
    assert statuses(deliver(endpoint, Worker(1).tick(0, [], [0]))) == [Status.OK]
    assert endpoint.metrics()["applied"] == 1
    assert endpoint.metrics()["pending_bytes"] == 0


# --- loads -------------------------------------------------------------------------------------------------------


def test_a_load_takes_the_tables_place_when_it_ends() -> None:
    endpoint = served()
    a = Worker()
    keys = [hash_in(s, 7) for s in range(SLOTS)]
    deliver(endpoint, a.push(keys, list(range(SLOTS)), sequence=1))
    rows = [0] * SLOTS
    sections = []
    for slot in (3, 9):
        reply = one(deliver(endpoint, a.bare(Op.SECTION, aux=slot)))
        sections.append(reply.values)
        rows[slot] = 1
    deliver(endpoint, a.push(keys, [1] * SLOTS, sequence=2))
    messages = [
        a.numbers(Op.LOAD_BEGIN, rows, sequence=3),
        a.section(1, sections[0], sequence=4),
        a.section(1, sections[1], sequence=5),
        a.numbers(Op.LOAD_END, [41], sequence=6),
    ]
    for message in messages:
        assert one(deliver(endpoint, message)).status == Status.OK
        assert one(deliver(endpoint, message)).status == Status.OK  # and again
    assert endpoint.shard(0).step == 41
    assert len(endpoint.shard(0)) == 2
    assert weights(endpoint, keys) == [-3 if s == 3 else -9 if s == 9 else 0 for s in range(SLOTS)]


def test_a_load_of_rows_that_belong_elsewhere_or_are_damaged_is_refused() -> None:
    endpoint = served(workers=2)
    a = Worker()
    deliver(endpoint, a.push([hash_in(3), hash_in(9)], [1, 1], sequence=1))
    section = one(deliver(endpoint, a.bare(Op.SECTION, aux=9))).values
    deliver(endpoint, a.numbers(Op.LOAD_BEGIN, [1] * SLOTS, sequence=2))
    endpoint.set_map(3, [(0, 8)])
    assert one(deliver(endpoint, a.section(1, section, sequence=3))).slots == (9,)
    endpoint.set_map(4, [(0, 16)])
    assert "does not hold 9 rows" in one(deliver(endpoint, a.section(9, section, sequence=4))).text
    other = one(deliver(endpoint, Worker(1).section(1, section, sequence=1)))
    assert "no load of this worker is under way" in other.text
    assert one(deliver(endpoint, a.section(1, section, sequence=5))).status == Status.OK
    assert "in the table already" in one(deliver(endpoint, a.section(1, section, sequence=6))).text
    endpoint.dismiss(0, 1)  # the load goes with its worker
    endpoint.admit(0, 2, 0)
    assert "no load" in one(deliver(endpoint, Worker(incarnation=2).numbers(Op.LOAD_END, [1], sequence=7))).text
    assert weights(endpoint, [hash_in(3), hash_in(9)]) == [-1, -1]


# --- functions ---------------------------------------------------------------------------------------------------


def test_a_function_that_changes_rows_does_so_once_and_answers_the_same_again() -> None:
    endpoint = served()
    a = Worker()
    decay = 5
    deliver(endpoint, a.assign([hash_in(1), hash_in(2)], [8, 4], sequence=1))
    first = one(deliver(endpoint, a.reduce(decay, [0.5], sequence=2)))
    again = one(deliver(endpoint, a.reduce(decay, [0.5], sequence=2)))
    assert first.values.tolist() == again.values.tolist()
    assert first.values.sum() == 2
    assert weights(endpoint, [hash_in(1), hash_in(2)]) == [4, 2]
    assert one(deliver(endpoint, a.reduce(1, sequence=1 << 63))).values.tolist()[1:3] == [4, 2]
    endpoint.set_map(1, [(0, 4)])
    assert one(deliver(endpoint, a.reduce(1, sequence=1 << 63))).status == Status.WRONG_EPOCH
    assert len(one(deliver(endpoint, a.reduce(1, sequence=1 << 63, epoch=1))).values) == 4


def test_a_function_that_comes_again_is_not_computed_again() -> None:
    endpoint = served("asp")
    a = Worker()
    total = 1

    def ask(sequence: int, worker: Worker = a, *, epoch: int = 0) -> float:
        return float(one(deliver(endpoint, worker.reduce(total, sequence=sequence, epoch=epoch))).values.sum())

    deliver(endpoint, a.assign([hash_in(1)], [8], sequence=1))
    assert [ask(1 << 63), ask(1 << 63, Worker(0xFFFFFFFF))] == [8, 8]
    deliver(endpoint, a.assign([hash_in(1)], [4], sequence=2))
    assert ask(1 << 63) == 8
    assert ask((1 << 63) + 1) == 4  # another call
    assert ask(1 << 63, Worker(0xFFFFFFFF)) == 4  # readers share their number
    deliver(endpoint, a.assign([hash_in(1)], [2], sequence=3))
    assert ask((1 << 63) + 1) == 4
    endpoint.set_map(1, [(0, 4)])
    assert ask((1 << 63) + 1, epoch=1) == 2  # of other slots perhaps


def test_a_dry_run_of_a_sweep_that_comes_again_is_not_counted_again() -> None:
    endpoint = served("asp")
    a = Worker()
    deliver(endpoint, a.assign([hash_in(1)], [0.25], sequence=1))
    weak = [3, 0.5, 0]  # rows whose norm is below a half
    first = one(deliver(endpoint, a.sweep(weak, dry_run=True, sequence=1 << 63))).values
    deliver(endpoint, a.assign([hash_in(1)], [1], sequence=2))
    assert one(deliver(endpoint, a.sweep(weak, dry_run=True, sequence=1 << 63))).values == first
    assert one(deliver(endpoint, a.sweep(weak, dry_run=True, sequence=(1 << 63) + 1))).values != first


# --- the same bits as one process --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        (shoal.SGD(lr=0.1), "bfloat16"),
        (shoal.Momentum(lr=0.1), "float32"),
        (shoal.Adagrad(lr=0.1), "float16"),
        (shoal.RowWiseAdagrad(lr=0.1), "float32"),
        (shoal.Adam(lr=0.1), "bfloat16"),
        (shoal.FTRL(l1=0.5), "float32"),
        (shoal.GroupFTRL(l1=0.5), "float32"),
    ],
    ids=lambda case: case if isinstance(case, str) else type(case).__name__,
)
def test_bsp_on_two_endpoints_has_the_bits_of_one_shard(
    optimizer: shoal.optim.Optimizer, dtype: str, rng: np.random.Generator
) -> None:
    dim, workers, clocks = 3, 3, 4
    spec = native_spec(dim, optimizer, dtype=dtype, init=shoal.Uniform(0.5, seed=3), seed=4)
    crew = _core.ThreadPool(1)
    local = _core.Shard(spec, SLOTS, crew)
    halves = [_core.Endpoint(SLOTS, [(0, 5)]), _core.Endpoint(SLOTS, [(5, SLOTS)])]
    for endpoint in halves:
        endpoint.add_table(0, spec)
        endpoint.start_job(1, "bsp")
        for rank in range(workers):
            endpoint.admit(rank, 1, 0)
    for clock in range(clocks):
        lists = []
        for _ in range(workers):
            batch = _core.KeyBatch(rng.integers(0, 300, 200, np.uint64), SLOTS, crew)
            grads = (rng.standard_normal((len(batch), dim)) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
            lists.append((batch.hashes, grads))
        hashes, summed = _core.merge(lists, dim, crew)
        local.push(_core.KeyBatch(_core.unmix(hashes), SLOTS, crew), summed)
        for rank in rng.permutation(workers).tolist():
            worker, (keys, grads) = Worker(rank), lists[rank]
            cut = int(np.searchsorted(keys, np.uint64(5 << 60)))
            for endpoint, part in zip(halves, (slice(0, cut), slice(cut, None)), strict=True):
                deliver(endpoint, worker.push(keys[part], grads[part], sequence=clock + 1, clock=clock))
                last = part_named(int(keys[part][-1]) >> 60, clock + 1)
                deliver(endpoint, worker.tick(clock, [last]))
    for slot in range(SLOTS):
        here = halves[0 if slot < 5 else 1].shard(0)
        assert here.section(slot)[0] == local.section(slot)[0]
        assert here.section(slot)[1].tobytes() == local.section(slot)[1].tobytes()
    assert [endpoint.shard(0).step for endpoint in halves] == [local.step] * 2 == [clocks] * 2


def test_bsp_with_one_worker_and_one_push_a_clock_is_the_local_store(rng: np.random.Generator) -> None:
    spec = native_spec(2, shoal.Adam(lr=0.1), dtype="float16", seed=9)
    crew = _core.ThreadPool(1)
    local = _core.Shard(spec, SLOTS, crew)
    endpoint = _core.Endpoint(SLOTS, [(0, SLOTS)])
    endpoint.add_table(0, spec)
    endpoint.start_job(1, "bsp", mean=True)
    endpoint.admit(0, 1, 0)
    for clock in range(5):
        batch = _core.KeyBatch(rng.integers(0, 99, 50, np.uint64), SLOTS, crew)
        grads = rng.standard_normal((len(batch), 2)).astype(np.float32)
        local.push(batch, grads)
        deliver(endpoint, Worker().push(batch.hashes, grads, sequence=clock + 1, clock=clock))
        deliver(endpoint, Worker().tick(clock))
        rows = np.empty((len(batch), 2), np.float32)
        local.pull(batch, rows)
        pulled = one(deliver(endpoint, Worker().pull(batch.hashes, clock=clock + 1))).values
        assert pulled.tobytes() == rows.tobytes()


# --- positions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["asp", "ssp"])
def test_replies_have_the_numbers_of_pushes_that_are_applied_at_once(mode: str) -> None:
    endpoint = served(mode, workers=2, staleness=2)
    a, b = Worker(), Worker(1)
    keys = [hash_in(s) for s in range(3)]

    def position(message: Any) -> int:
        reply = one(deliver(endpoint, message))
        assert reply.status == Status.OK
        return reply.aux

    assert position(a.pull(keys)) == 0
    assert position(a.push(keys, [1] * 3, sequence=1)) == 1
    assert position(b.push(keys[:1], [1], sequence=1)) == 2
    assert position(a.pull(keys[2:])) == 2
    assert position(a.push(keys, [1] * 3, sequence=1)) == 0  # it was applied before
    assert position(b.push(keys, [1] * 3, sequence=2)) == 3
    assert position(a.pull(keys)) == position(b.pull(keys)) == 3


def test_pushes_that_wait_for_their_clock_have_no_numbers() -> None:
    endpoint = served("bsp")
    a = Worker()
    assert one(deliver(endpoint, a.push([5], [1], sequence=1))).aux == 0
    deliver(endpoint, a.tick(0))
    assert one(deliver(endpoint, a.pull([5], clock=1))).aux == 0
