"""A worker's requests by hand: what leaves, what an answer does, what happens in silence."""

import numpy as np
import pytest
from msgspec import structs

from maps import map_of
from oracle import wire
from requests_by_hand import (
    MAP,
    SLOTS,
    THREAD,
    WINDOW,
    A,
    B,
    Dtype,
    Op,
    Status,
    batch,
    make_filter,
    pull,
    push,
    requests,
    taken,
)
from shoal import _core
from shoal._core import Policy, Requests
from shoal.cluster.protocol.slot_map import cut_evenly
from shoal.cluster.worker.filters import Filters
from shoal.errors import (
    DeadlineExceededError,
    FencedError,
    NotConnectedError,
    ProtocolError,
    ServerLostError,
    ShoalError,
)
from shoal.table.reductions import Function


def test_each_endpoint_is_asked_for_its_slots_and_the_rows_come_together():
    r = requests()
    settled = []
    call = pull(r, on_done=settled.append)
    first, second = taken(r)
    assert (first.address, second.address) == (A, B)
    assert max(first.slots()) < 8 <= min(second.slots())
    assert first.message.count + second.message.count == 40
    assert (first.message.worker, first.message.incarnation, first.message.job) == (3, 2, 77)
    r.receive(B, second.rows(2), 0.1)
    assert not call.done()
    r.receive(A, first.rows(1), 0.2)
    assert call.done()
    assert settled == [call]
    assert call.get().sum() == 2 * (first.message.count + 2 * second.message.count)
    assert r.next_time() is None


@pytest.mark.parametrize("filters", [None, Filters(key_caching=True, zeros=True, gradients="bfloat16", threshold=9.0)])
def test_counts_go_with_their_rows_and_only_where_some_are_more_than_one(filters):
    r = requests()
    b = batch(90)
    half = int(b.offsets[SLOTS // 2])
    counts = np.ones(90, np.uint32)
    counts[[0, half - 1]] = 7, 700  # all of the rows at B occurred once
    filter = filters and make_filter(filters)
    push(r, 90, counts=counts, filter=filter)
    at_a, at_b = taken(r)
    assert at_a.message.counts.tolist() == counts[:half].tolist()
    assert at_b.message.counts.size == 0
    assert filters or (len(at_a.frames), len(at_b.frames)) == (4, 3)
    assert at_a.message.hashes.tolist() == b.hashes[:half].tolist()
    r.receive(A, at_a.answer(), 0.1)
    r.receive(B, at_b.answer(), 0.1)
    if filters is not None:  # by digest, which the server has lost
        again = push(r, 90, counts=counts, filter=filter)
        named, _ = taken(r)
        assert named.message.digest
        assert named.message.counts.tolist() == counts[:half].tolist()
        r.receive(A, named.answer(Status.UNKNOWN_KEY_LIST), 0.2)
        (whole,) = taken(r)
        assert whole.message.hashes.tolist() == b.hashes[:half].tolist()
        assert whole.message.counts.tolist() == counts[:half].tolist()
        assert not again.done()


def test_an_endpoint_without_keys_is_not_asked():
    r = requests()
    b = batch(1)
    call = r.submit(Op.ERASE, 1, 0, 0.0, 9.0, hashes=b.hashes, begins=b.offsets)
    (asked,) = taken(r)
    r.receive(asked.address, asked.answer(aux=1), 0.1)
    assert call.get() == 1


def test_nothing_to_ask_is_settled_at_once():
    r = requests()
    assert pull(r, 0).get().shape == (0, 2)
    b = batch(0)
    assert r.submit(Op.ERASE, 1, 0, 0.0, 9.0, hashes=b.hashes, begins=b.offsets).get() == 0
    assert push(r, 0).done
    assert not taken(r)


def test_silence_sends_the_same_bytes_again_later_and_later():
    r = requests(resend_after=1.0, backoff=2.0, longest=3.0)
    push(r)
    first = taken(r)
    times = []
    for _ in range(8):
        times.append(r.next_time())
        r.on_time(times[-1])
    again = taken(r)
    assert [a.frames for a in again[:2]] == [a.frames for a in first]
    gaps = np.diff([0.0, *times[::2]])
    assert np.allclose(gaps, [1, 2, 3, 3], atol=0.01)
    assert r.counts["resent"] == 8


def test_an_answer_that_comes_twice_or_to_nobody_changes_nothing():
    r = requests()
    call = pull(r)
    asked = taken(r)
    for _ in range(2):
        r.receive(asked[0].address, asked[0].rows(1), 0.1)
    assert not call.done()
    r.receive(B, asked[0].rows(9), 0.1)  # the right answer from the wrong address
    r.receive(
        asked[1].address, asked[1].answer(payload=[np.zeros((1, 2), np.float32)], count=1, dim=2, dtype=1, job=5), 0.1
    )
    assert not call.done()
    r.receive(asked[1].address, asked[1].rows(1), 0.2)
    result = call.get()
    r.receive(asked[1].address, asked[1].rows(5), 0.3)
    assert (result == 1).all()
    assert r.counts["strays"] == 4


@pytest.mark.parametrize("damage", [[], [b""], [b"x" * 64], [b"x" * 63, b""]])
def test_garbage_is_counted_and_forgotten(damage):
    r = requests()
    pull(r)
    r.receive(A, damage, 0.1)
    assert r.counts["garbled"] == 1


def test_any_flipped_bit_of_an_answer_is_garbage():
    r = requests()
    call = pull(r)
    asked = taken(r)
    frames = asked[0].rows(1)
    for which in range(2):
        for byte in range(0, len(bytes(frames[which])), 7):
            damaged = [bytearray(bytes(frame)) for frame in frames]
            damaged[which][byte] ^= 16
            r.receive(A, damaged, 0.1)
    assert r.counts["garbled"] + r.counts["strays"] > 10
    assert not call.done()
    assert r.next_time() < 1.1


def test_rows_come_into_the_array_that_was_given():
    r = requests()
    b = batch(40)
    out = np.full((40, 2), np.nan, np.float32)
    call = r.submit(Op.PULL, 1, 0, 0.0, 60.0, hashes=b.hashes, begins=b.offsets, out=out, dim=2)
    for number, asked in enumerate(taken(r)):
        r.receive(asked.address, asked.rows(number), 0.1)
    assert call.get() is out
    assert set(out.ravel().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    "out", [np.zeros((40, 2), np.float32, order="F"), np.zeros((40, 4), np.float32)[:, ::2]], ids=["columns", "halves"]
)
def test_an_array_with_gaps_is_refused(out):
    r = requests()
    b = batch(40)
    with pytest.raises(ValueError, match="out must be contiguous"):
        r.submit(Op.PULL, 1, 0, 0.0, 60.0, hashes=b.hashes, begins=b.offsets, out=out, dim=2)
    assert not taken(r)


def test_a_damaged_or_foreign_answer_leaves_no_trace_in_the_end():
    r = requests()
    call = pull(r)
    asked = taken(r)
    damaged = [bytearray(bytes(frame)) for frame in asked[0].rows(7)]
    damaged[1][-1] ^= 1
    r.receive(asked[0].address, damaged, 0.1)
    foreign = np.full((asked[0].message.count, 2), 8, np.float32)
    r.receive(
        asked[0].address, asked[0].answer(payload=[foreign], count=len(foreign), dim=2, dtype=1, incarnation=9), 0.2
    )
    assert (r.counts["garbled"], r.counts["strays"]) == (1, 1)
    assert not call.done()
    for each in asked:
        r.receive(each.address, each.rows(1), 0.3)
    assert (call.get() == 1).all()


def test_rows_of_another_shape_are_a_protocol_error():
    r = requests()
    call = pull(r)
    asked = taken(r)[0]
    wrong = np.zeros((asked.message.count, 3), np.float32)
    r.receive(A, asked.answer(payload=[wrong], count=len(wrong), dim=3, dtype=1), 0.1)
    with pytest.raises(ProtocolError, match=r"server 0 at tcp://a:1 answered the pull of table 1 .* was asked for"):
        call.get()


def test_a_parked_pull_is_asked_again_after_a_while_only():
    r = requests(resend_after=1.0, deferred_after=5.0)
    pull(r)
    for asked in taken(r):
        r.receive(asked.address, asked.answer(Status.DEFERRED), 0.5)
    assert r.next_time() == pytest.approx(5.5)
    r.on_time(5.5)
    assert len(taken(r)) == 2


@pytest.mark.parametrize("status", [Status.OVERLOADED, Status.NOT_ADMITTED, Status.RETRY])
def test_not_now_is_asked_again_after_growing_pauses(status):
    r = requests(pause=0.1, longest_pause=0.4)
    call = push(r, 1)
    gaps, now = [], 0.0
    for _ in range(5):
        (asked,) = taken(r)
        r.receive(asked.address, asked.answer(status), now)
        gaps.append(r.next_time() - now)
        now = r.next_time()
        r.on_time(now)
    assert np.allclose(gaps, [0.1, 0.2, 0.4, 0.4, 0.4])
    (asked,) = taken(r)
    r.receive(asked.address, asked.answer(), now)
    assert call.done()
    assert call.error is None


def test_all_parts_of_a_write_have_its_sequence_and_reads_one_each():
    r = requests()
    first, second = push(r), push(r)
    pull(r)
    sequences = [asked.message.sequence for asked in taken(r)]
    assert sequences[:4] == [1, 1, 2, 2]
    assert (first.sequence, second.sequence) == (1, 2)
    assert len(set(sequences[4:])) == 2
    assert min(sequences[4:]) >= 2**63


def test_the_65th_write_waits_for_the_first():
    r = requests()
    calls = [push(r, 1) for _ in range(WINDOW + 6)]
    asked = taken(r)
    assert len(asked) == WINDOW
    r.receive(asked[1].address, asked[1].answer(), 0.1)
    assert not taken(r)  # the first is still open
    r.receive(asked[0].address, asked[0].answer(), 0.1)
    assert len(taken(r)) == 2  # 65 and 66
    assert sum(call.done() for call in calls) == 2


def test_a_write_that_was_given_up_opens_the_window():
    r = requests(resend_after=100.0)
    push(r, 1, deadline=1.0)
    for _ in range(WINDOW):
        push(r, 1)
    assert len(taken(r)) == WINDOW
    r.on_time(1.0)
    assert len(taken(r)) == 1


def test_bytes_on_the_wire_are_bounded_for_each_endpoint():
    r = requests(credit=3000)
    calls = [push(r, 40) for _ in range(10)]
    asked = taken(r)
    assert 2 <= len(asked) < 14
    done = 0
    while asked:
        one = asked.pop(0)
        r.receive(one.address, one.answer(), 0.1)
        asked += taken(r)
        done += 1
    assert done == 20
    assert all(call.done() for call in calls)


def test_one_part_may_be_larger_than_the_credit():
    r = requests(credit=10)
    push(r)
    assert len(taken(r)) == 2


def test_a_parked_pull_is_not_on_the_wire():
    r = requests(credit=500)
    pull(r)
    waiting = pull(r)
    for asked in taken(r):
        r.receive(asked.address, asked.answer(Status.DEFERRED), 0.1)
    assert len(taken(r)) == 2
    assert not waiting.done()


def test_large_calls_are_cut_between_slots():
    r = requests(message_bytes=200)
    call = push(r, 100)
    asked = taken(r)
    assert len(asked) > 8
    names = [(one.address, one.message.sequence, one.message.part) for one in asked]
    assert len(set(names)) == len(names)
    assert {name[1] for name in names} == {1}
    slots = [slot for one in asked for slot in one.slots()]
    assert len(slots) == len(set(slots))
    rows = np.concatenate([one.message.values for one in asked])
    assert rows.tolist() == np.arange(200).tolist()
    for one in reversed(asked):
        assert not call.done()
        r.receive(one.address, one.answer(), 0.1)
    assert call.done()


def test_a_call_has_at_most_128_parts_at_an_endpoint():
    where = cut_evenly(1, 1024, [(A, 0)])
    r = Requests((0, 1, 77), where, Policy(message_bytes=100))
    b = _core.KeyBatch(np.arange(20_000, dtype=np.uint64), 1024, THREAD)
    values = np.zeros((len(b), 1), np.float32)
    r.submit(Op.PUSH, 1, 0, 0.0, 9.0, hashes=b.hashes, begins=b.offsets, values=values, dim=1)
    numbers = [_core.decode(frames, replies=False).part for _, frames in r.take_outgoing()]
    assert 100 < len(numbers) == len(set(numbers)) <= 160


@pytest.mark.parametrize("is_held", [False, True])
def test_rows_of_one_slot_that_no_server_takes_are_refused_at_once(is_held):
    r = requests(largest_message=400)
    first = r.tick(0, [], 0.0, 60.0)
    with pytest.raises(ValueError, match=r"rows of slots .* pass fewer keys at a time"):
        push(r, 2000, clock=1, after=[first] if is_held else [])
    ticks = taken(r)
    assert [asked.message.op for asked in ticks] == [Op.TICK, Op.TICK]
    for asked in ticks:
        r.receive(asked.address, asked.answer(), 0.1)
    assert not taken(r)
    assert push(r, 20).sequence == 1


def test_a_count_of_zero_is_refused_at_once():
    r = requests()
    with pytest.raises(ValueError, match="counts are at least 1: number 7 is 0"):
        push(r, 40, counts=np.where(np.arange(40) == 7, 0, 1).astype(np.uint32))
    assert push(r, 40, counts=np.ones(40, np.uint32)).sequence == 1


def test_an_endpoint_that_has_taken_a_tick_is_not_asked_again_because_another_one_refused_it():
    r = requests(pause=0.1)
    r.set_map(cut_evenly(5, SLOTS, [(A, 0), (B, 1)]), 0.0)
    tick = r.tick(0, [], 0.0, 9.0)
    a, b = taken(r)
    r.receive(A, a.answer(epoch=5), 0.1)
    r.receive(B, b.answer(Status.WRONG_EPOCH, [np.zeros(0, np.uint16)], epoch=4), 0.1)
    r.on_time(r.next_time())
    (again,) = taken(r)
    assert again.address == B
    r.receive(B, again.answer(epoch=5), 0.3)
    assert tick.done()
    assert tick.error is None


def test_erased_rows_are_counted_whatever_dim_says():
    r = requests()
    b = batch(40)
    call = r.submit(Op.ERASE, 1, 0, 0.0, 9.0, hashes=b.hashes, begins=b.offsets, dim=3)
    for asked in taken(r):
        r.receive(asked.address, asked.answer(aux=2), 0.1)
    assert call.get() == 4


def test_a_tick_follows_the_pushes_and_names_those_without_an_answer():
    r = requests(atomic_clocks=False)
    push(r, 40, clock=4)
    push(r, 40, clock=4)
    for asked in taken(r)[:2]:
        r.receive(asked.address, asked.answer(), 0.1)
    r.tick(4, [7, 1, 7], 0.2, 9.0)
    ticks = taken(r)
    assert [(t.address, t.message.op, t.message.clock) for t in ticks] == [(A, Op.TICK, 4), (B, Op.TICK, 4)]
    assert ticks[0].message.tables.tolist() == [1, 7]
    for tick, first in zip(ticks, (0, 8), strict=True):
        slots, sequences = zip(*(divmod(number, 2**48) for number in tick.message.numbers.tolist()), strict=True)
        assert set(sequences) == {2}
        assert first < min(slots) <= max(slots) <= first + 8


def test_a_tick_names_a_push_once_for_each_arc_in_which_it_has_rows():
    """An endpoint may have executed it in one arc, and have got the other one since."""
    map = map_of(1, (0, 2, A, 0), (2, 4, A, 0), (4, 8, A, 0), (8, 12, B, 1), (12, 16, B, 1))
    r = Requests((3, 2, 77), map, atomic_clocks=False)
    push(r, 40, clock=4)
    begins = batch(40).offsets.astype(int)
    r.tick(4, [1], 0.2, 9.0)
    (a,) = [asked for asked in taken(r) if asked.address == A and asked.message.op == Op.TICK]
    named = [divmod(number, 2**48) for number in a.message.numbers.tolist()]
    filled = np.flatnonzero(np.diff(begins))
    lasts = [max(slot for slot in filled if first <= slot < end) for first, end in ((0, 2), (2, 4), (4, 8))]
    assert named == [(slot + 1, 1) for slot in lasts]


def test_an_atomic_tick_leaves_once_all_endpoints_have_its_pushes_and_the_tick_before():
    r = requests()
    push(r, 40, clock=4)
    first, second = taken(r)
    r.tick(4, [1], 0.2, 9.0)
    r.tick(5, [], 0.2, 9.0)
    push(r, 40, clock=6)
    r.receive(A, first.answer(), 0.3)
    assert not taken(r)
    r.receive(B, second.answer(), 0.3)
    for clock in (4, 5):
        a, b = (asked for asked in taken(r) if asked.message.op == Op.TICK)
        assert [(tick.address, tick.message.clock) for tick in (a, b)] == [(A, clock), (B, clock)]
        r.receive(A, a.answer(), 0.4)
        assert not any(asked.message.op == Op.TICK for asked in taken(r))
        r.receive(B, b.answer(), 0.4)


def test_an_atomic_tick_waits_for_nothing_where_there_is_one_endpoint():
    r = Requests((3, 2, 77), map_of(1, (0, SLOTS, A, 0)))
    push(r, clock=4)
    r.tick(4, [1], 0.0, 9.0)
    r.tick(5, [], 0.0, 9.0)
    assert [(asked.message.op, asked.message.clock) for asked in taken(r)] == [(Op.PUSH, 4), (Op.TICK, 4), (Op.TICK, 5)]


def test_a_tick_waits_for_the_reads_of_its_clock_at_each_endpoint():
    r = requests()
    pull(r, clock=1)
    reads = taken(r)
    r.tick(1, [1], 0.0, 9.0)
    pull(r, clock=2)
    assert not taken(r)
    r.receive(A, reads[0].rows(0), 0.1)
    assert [(asked.address, asked.message.op) for asked in taken(r)] == [(A, Op.TICK), (A, Op.PULL)]


@pytest.mark.parametrize(("op", "write"), [(Op.SWEEP, True), (Op.SWEEP, False), (Op.REDUCE, True), (Op.REDUCE, False)])
def test_a_tick_waits_for_what_is_done_with_all_rows(op, write):
    """Its message may be lost, and come after the end of its clock."""
    r = Requests((3, 2, 77), map_of(1, (0, SLOTS, A, 0)))
    r.submit(op, 1, 4, 0.0, 9.0, aux=Function.NORM, payload=[np.array([1.0])], count=1, write=write)
    (asked,) = taken(r)
    r.tick(4, [1], 0.0, 9.0)
    assert not taken(r)
    numbers = {"dtype": Dtype.FLOAT64} if op == Op.REDUCE else {}  # words of a sweep have the same bytes
    r.receive(A, asked.answer(payload=[np.zeros(SLOTS, np.uint64)], count=SLOTS, **numbers), 0.1)
    assert [(sent.message.op, sent.message.clock) for sent in taken(r)] == [(Op.TICK, 4)]


def test_a_tick_that_fails_ends_everything():
    r = requests()
    tick = r.tick(0, [1], 0.0, 5.0)
    waiting = pull(r, clock=1)
    r.on_time(5.0)
    for call in (tick, waiting, push(r, clock=1)):
        with pytest.raises(DeadlineExceededError, match=r"the tick at clock 0 was not done within 5\.0 s"):
            call.get()


def test_a_tick_that_waits_for_a_read_is_not_late():
    r = requests()
    slow = pull(r, clock=1, deadline=10.0)
    for asked in taken(r):
        r.receive(asked.address, asked.answer(Status.DEFERRED), 0.1)
    tick = r.tick(1, [1], 0.0, 10.0)
    for _ in range(100):
        time = r.next_time()
        if slow.done() or time is None:
            break
        r.on_time(time)
        taken(r)
    assert isinstance(slow.error, DeadlineExceededError)
    assert not tick.done()
    r.on_time(r.next_time())
    assert push(r, 1, clock=2, now=11.0).error is None
    for asked in taken(r):
        r.receive(asked.address, asked.answer(), 11.0)
    assert tick.error is None


def test_early_sends_at_once_what_was_lost():
    r = requests(atomic_clocks=False)
    push(r, 40, now=0.0)
    lost = taken(r)
    r.tick(0, [1], 0.1, 9.0)
    tick = taken(r)[0]
    r.receive(A, tick.answer(Status.RETRY), 0.2)
    (again,) = taken(r)
    assert again.frames == lost[0].frames


def test_a_new_connection_sends_at_once_and_in_order_what_the_former_one_left_unanswered():
    r = requests()
    pushed, pulled, waiting = push(r), pull(r), pull(r, 10, clock=3)
    first = [asked for asked in taken(r) if asked.address == A]
    r.receive(A, first[0].answer(), 0.1)
    r.receive(A, first[1].answer(Status.DEFERRED), 0.1)  # its answer would go to the former connection
    r.receive(A, first[2].answer(Status.OVERLOADED), 0.1)  # it comes again later, as it was told to
    again = push(r, now=0.1)
    r.reconnected(A, "it was cut", 0.11)
    sent = taken(r)
    assert next(asked.frames for asked in sent if asked.address == A) == first[1].frames
    assert [(asked.address, asked.message.op) for asked in sent] == [(B, Op.PUSH), (A, Op.PULL), (A, Op.PUSH)]
    assert r.counts["reconnected"] == 1
    assert not any(call.done() for call in (pushed, pulled, waiting, again))
    r.reconnected("tcp://nobody:1", "it was cut", 0.2)
    assert not taken(r)
    r.receive(B, next(asked for asked in sent if asked.address == B).answer(), 0.3)
    r.on_time(99.0)
    assert "its connection has ended once: it was cut" in str(again.error)


def test_only_the_refused_slots_of_a_push_go_elsewhere():
    r = requests()
    call = push(r)
    a, b = taken(r)
    moved = np.array([slot for slot in a.slots() if slot >= 6], np.uint16)
    r.receive(A, a.answer(Status.WRONG_EPOCH, [moved], count=len(moved), epoch=2), 0.1)
    assert r.wants_map
    assert not taken(r)
    r.set_map(cut_evenly(1, SLOTS, [(A, 0), (B, 1)]), 0.2)  # not newer: try again, later
    assert not r.wants_map
    assert not taken(r)
    newer = map_of(2, (0, 6, A, 0), (6, 16, B, 1))
    r.set_map(newer, 0.3)
    (again,) = taken(r)
    assert again.address == B
    assert again.slots() == moved.tolist()
    assert (again.message.sequence, again.message.part) == (1, 1)  # the same call, another part than the one at B
    assert again.message.epoch == 2
    r.receive(B, b.answer(), 0.4)
    assert not call.done()
    r.receive(B, again.answer(), 0.4)
    assert call.done()
    assert call.error is None


def test_a_refused_pull_is_asked_as_a_whole():
    r = requests()
    call = pull(r)
    a, b = taken(r)
    r.receive(B, b.rows(1), 0.1)
    r.receive(A, a.answer(Status.WRONG_EPOCH, [np.array([3], np.uint16)], count=1, epoch=3), 0.1)
    moved = cut_evenly(3, SLOTS, [("tcp://c:1", 2), (A, 0), (B, 1)])
    r.set_map(moved, 0.2)
    asked = taken(r)
    assert [one.address for one in asked] == ["tcp://c:1", A]
    for one in asked:
        r.receive(one.address, one.rows(1), 0.3)
    assert (call.get() == 1).all()


def test_an_endpoint_with_an_older_map_is_asked_again_without_a_new_map():
    r = requests(pause=0.1)
    r.set_map(cut_evenly(5, SLOTS, [(A, 0), (B, 1)]), 0.0)
    call = push(r)
    a, b = taken(r)
    r.receive(B, b.answer(), 0.1)
    refused = np.array(a.slots(), np.uint16)
    r.receive(A, a.answer(Status.WRONG_EPOCH, [refused], count=len(refused), epoch=4), 0.1)
    assert not r.wants_map
    r.on_time(r.next_time())
    (again,) = taken(r)
    assert (again.address, again.slots()) == (A, a.slots())
    r.receive(A, again.answer(epoch=5), 0.3)
    assert call.done()


def test_what_is_refused_as_a_whole_stays_one_part_and_a_tick_names_what_is_missing_now():
    r = requests(atomic_clocks=False, pause=0.1)
    b = _core.KeyBatch(np.arange(5, dtype=np.uint64), SLOTS, THREAD)  # slots without rows lie between
    values = np.ones((5, 2), np.float32)
    r.submit(Op.PUSH, 1, 0, 0.0, 9.0, hashes=b.hashes, begins=b.offsets, values=values, dim=2)
    r.tick(0, [1], 0.0, 9.0)
    push_a = taken(r)[0]
    slots = push_a.slots()
    assert max(np.diff(slots)) > 1
    refused = np.array(slots, np.uint16)
    r.receive(A, push_a.answer(Status.WRONG_EPOCH, [refused], count=len(refused), epoch=0), 0.1)
    r.on_time(0.2)
    (again,) = taken(r)
    assert (again.slots(), again.message.part) == (slots, 1)
    some = np.array(slots[:1], np.uint16)
    r.receive(A, again.answer(Status.WRONG_EPOCH, [some], count=1, epoch=0), 0.3)
    r.on_time(2.0)
    tick = next(asked for asked in taken(r) if asked.address == A and asked.message.op == Op.TICK)
    assert [number >> 48 for number in tick.message.numbers.tolist()] == [slots[0] + 1]


def test_a_newer_map_moves_what_was_under_way_to_endpoints_that_have_gone():
    r = requests()
    calls = [push(r), pull(r)]
    tick = r.tick(0, [1], 0.0, 9.0)
    taken(r)
    r.set_map(cut_evenly(2, SLOTS, [(A, 0), ("tcp://c:1", 1)]), 0.1)
    moved = taken(r)
    assert {asked.address for asked in moved} == {"tcp://c:1"}
    assert [asked.message.op for asked in moved] == [Op.PUSH, Op.PULL]
    assert not any(call.done() for call in [*calls, tick])


def test_a_map_of_other_slots_is_refused():
    with pytest.raises(ValueError, match="has 8 slots, the store has 16"):
        requests().set_map(cut_evenly(2, 8, [(A, 0)]), 0.0)


def test_the_deadline_names_the_peer_the_operation_and_the_silence():
    r = requests()
    call = pull(r, clock=3, deadline=10.0)
    asked = taken(r)
    r.receive(B, asked[1].rows(0), 4.0)
    r.on_time(10.0)
    with pytest.raises(
        DeadlineExceededError,
        match=r"pull of table 1 at clock 3 was not done within 10.0 s: server 0 at tcp://a:1 did not answer "
        r"\(no answer in the 10.0 s since the first request\)",
    ):
        call.get()
    again = pull(r, now=10.0, deadline=12.0)
    for one in taken(r)[-2:]:
        r.receive(one.address, one.answer(Status.DEFERRED), 10.5)
    r.on_time(12.0)
    with pytest.raises(
        DeadlineExceededError, match=r"waits for a slower worker \(last answer 1.5 s ago\); check whether one"
    ):
        again.get()


def test_the_deadline_of_a_save_that_may_not_begin_names_what_it_waits_for():
    r = requests()
    save = r.submit(Op.SAVE_BEGIN, 0, 0, 0.0, 9.0, payload=[np.zeros(5, np.uint64)], count=5)
    for asked in taken(r):
        r.receive(asked.address, asked.answer(Status.OVERLOADED), 1.0)
    r.on_time(9.0)
    with pytest.raises(DeadlineExceededError, match="copies slots to another server, or ends another save, first"):
        save.get()


def test_slots_without_an_owner_end_at_the_deadline_too():
    r = requests()
    call = push(r, deadline=5.0)
    for asked in taken(r):
        slots = np.array(asked.slots(), np.uint16)
        r.receive(asked.address, asked.answer(Status.WRONG_EPOCH, [slots], count=len(slots), epoch=9), 0.1)
    r.on_time(5.0)
    with pytest.raises(DeadlineExceededError, match="no map newer than epoch 1 arrived; is the scheduler running"):
        call.get()
    assert not r.wants_map


def test_a_lost_server_fails_its_calls_and_no_others():
    r = requests()
    both = pull(r)
    one = push(r, 1)
    r.lose(1, "silent for 10.2 s", 20.0)
    with pytest.raises(ServerLostError, match=r"server 1 at tcp://b:1 is lost \(silent for 10.2 s; no answer in"):
        both.get()
    survivors = [call for call in (one, push(r, 1, now=20.0)) if not call.done()]
    owner = batch(1).offsets[8]  # 1 where the one key is with server 0
    assert len(survivors) == (2 if owner else 0)
    with pytest.raises(ServerLostError):
        pull(r, now=21.0).get()


def test_a_stale_worker_is_fenced_and_everything_ends():
    r = requests()
    calls = [push(r), pull(r)]
    asked = taken(r)[0]
    r.receive(A, asked.answer(Status.FENCED), 0.1)
    for call in [*calls, pull(r)]:
        with pytest.raises(FencedError, match=r"worker 3 \(incarnation 2\) was declared dead"):
            call.get()
    assert not taken(r)
    assert r.next_time() is None


@pytest.mark.parametrize("ends", ["fenced", "lost", "closed"])
def test_a_tick_does_not_leave_because_its_pushes_have_failed(ends):
    r = requests()
    failed = push(r)
    asked = taken(r)[0]
    tick = r.tick(0, [1], 0.0, 9.0)
    assert not taken(r)
    if ends == "fenced":
        r.receive(A, asked.answer(Status.FENCED), 0.1)
    elif ends == "lost":
        r.lose(0, "silent for 10.2 s", 0.1)
    else:
        r.close(NotConnectedError("over"), 0.1)
    assert failed.error is not None
    assert tick.error is not None
    r.on_time(5.0)
    assert not taken(r)  # B would count a clock without the push


@pytest.mark.parametrize(
    ("status", "text", "kind", "match"),
    [
        (Status.WRONG_JOB, None, NotConnectedError, "serves another job"),
        (Status.NO_TABLE, None, ProtocolError, "no such table"),
        (Status.VERSION, None, ProtocolError, "another protocol version"),
        (
            Status.BAD_REQUEST,
            b"dim is 3, got 2",
            ProtocolError,
            "refused the push of table 1 at clock 0: dim is 3, got 2",
        ),
        (Status.INTERNAL, b"no memory", ShoalError, "no memory"),
    ],
)
def test_refusals_for_good_become_typed_errors(status, text, kind, match):
    r = requests()
    call = push(r)
    asked = taken(r)[0]
    for now in (0.1, 0.2, 0.3, 0.35, 0.37):  # a bad request may have been damaged on its way: it is sent again
        r.receive(A, asked.answer(status, [text] if text else [], count=len(text or b"")), now)
    with pytest.raises(kind, match=match):
        call.get()
    r.receive(B, asked.answer(), 0.4)
    assert r.next_time() is None


def test_an_answer_of_another_version_of_the_wire_format_fails_the_call():
    r = requests()
    call = push(r)
    asked = taken(r)[0]
    flags = asked.message.part << 8 | wire.REPLY
    reply = wire.encode([], version=1, op=Op.PUSH, flags=flags, sequence=asked.message.sequence)
    assert _core.peek(reply) == _core.peek(asked.frames)
    damaged = [reply[0][:40] + bytes([reply[0][40] ^ 1]) + reply[0][41:]]
    assert not r.receive(A, damaged, 0.1)
    assert not call.done()
    assert r.receive(A, reply, 0.2)
    with pytest.raises(
        ProtocolError, match=r"answered the push.* with version 1 of the wire format, this side speaks 2"
    ):
        call.get()


def test_what_is_asked_of_every_endpoint_answers_in_slot_order():
    r = requests()
    call = r.submit(Op.STATS, 1, 0, 0.0, 9.0)
    for asked in reversed(taken(r)):
        number = np.array([ord(asked.address[6])] * 11, np.uint64)
        r.receive(asked.address, asked.answer(payload=[number], count=11), 0.1)
    assert [numbers[0] for numbers in call.get()] == [ord("a"), ord("b")]


def test_an_endpoint_that_has_a_newer_map_is_asked_for_its_rows_again_when_this_side_has_it():
    r = requests()
    call = r.submit(Op.STATS, 1, 0, 0.0, 9.0)
    rows = [np.full(11, 100, np.uint64)]
    for asked in taken(r):
        epoch = 2 if asked.address == A else 1
        r.receive(asked.address, asked.answer(payload=rows, count=11, epoch=epoch), 0.1)
    assert not call.done()
    assert r.wants_map
    r.set_map(structs.replace(MAP, epoch=2), 0.2)
    again = taken(r)
    assert {asked.address for asked in again} == {A, B}
    for asked in again:
        r.receive(asked.address, asked.answer(payload=rows, count=11, epoch=2), 0.3)
    assert [numbers[0] for numbers in call.get()] == [100, 100]


def test_one_slot_is_asked_of_its_owner():
    r = requests()
    call = r.submit(Op.SECTION, 1, 0, 0.0, 9.0, slot=9)
    (asked,) = taken(r)
    assert (asked.address, asked.message.aux) == (B, 9)
    section = np.arange(64, dtype=np.uint8)
    r.receive(B, asked.answer(payload=[section], count=5, dtype=Dtype.UINT8, aux=9), 0.1)
    rows, values, filter = call.get()
    assert (rows, values.tolist(), filter) == (5, section.tolist(), 9)


def test_timers_do_not_pile_up():
    r = requests()
    for k in range(2000):
        call = pull(r, 3, now=float(k), deadline=k + 1e6)
        for asked in taken(r):
            r.receive(asked.address, asked.rows(0), k + 0.1)
        assert call.done()
        r.next_time()
    assert r.timers == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"op": Op.PULL}, "needs hashes, and begins of slots"),
        ({"op": Op.ERASE, "hashes": batch(3).hashes, "begins": batch(3).offsets[:9]}, "and begins of 16 slots"),
        ({"op": Op.SLOT}, "needs a slot"),
        ({"op": Op.PULL, "hashes": batch(3).hashes, "begins": batch(3).offsets}, "a pull needs out"),
    ],
)
def test_bad_calls_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        requests().submit(arguments.pop("op"), 1, 0, 0.0, 9.0, **arguments)


RUNS = map_of(2, (0, 4, A, 0), (4, 8, B, 1), (8, 12, A, 0), (12, 16, B, 1))  # each endpoint has two runs of slots


def test_a_keyed_call_needs_a_message_for_each_run_of_slots_and_any_other_call_one_for_each_endpoint():
    r = requests()
    r.set_map(RUNS, 0.0)
    call = pull(r)
    asked = taken(r)
    assert [one.address for one in asked] == [A, B, A, B]
    for k, one in enumerate(asked):
        assert all(4 * k <= slot < 4 * k + 4 for slot in one.slots())
    for one in reversed(asked):
        r.receive(one.address, one.rows(ord(one.address[6])), 0.1)
    assert call.get().sum() == 2 * sum(one.message.count * ord(one.address[6]) for one in asked)
    pushed = push(r)
    parts = taken(r)
    assert len({(one.address, one.message.sequence, one.message.part) for one in parts}) == 4
    for one in parts:
        assert not pushed.done()
        r.receive(one.address, one.answer(), 0.2)
    assert pushed.done()
    r.tick(0, [1], 0.3, 9.0)
    assert [(one.address, one.message.op) for one in taken(r)] == [(A, Op.TICK), (B, Op.TICK)]


def test_numbers_of_slots_come_in_slot_order_from_endpoints_that_have_several_runs():
    r = requests()
    r.set_map(RUNS, 0.0)
    call = r.submit(Op.REDUCE, 1, 0, 0.0, 9.0, aux=Function.NORM, payload=[np.array([1.0])], count=1, per_slot=True)
    ranges = {A: [*range(4), *range(8, 12)], B: [*range(4, 8), *range(12, 16)]}
    for one in taken(r):
        numbers = np.array([[slot, -slot] for slot in ranges[one.address]], np.float64).ravel()
        r.receive(one.address, one.answer(0, [numbers], count=len(numbers), dtype=Dtype.FLOAT64), 0.1)
    assert np.concatenate(call.get()).tolist() == [sign * slot for slot in range(16) for sign in (1, -1)]
    top = r.submit(Op.REDUCE, 1, 0, 0.0, 9.0, aux=Function.TOPK, payload=[np.array([1.0])], count=1)
    for one in taken(r):
        numbers = np.arange(6, dtype=np.float64)  # for all slots together
        r.receive(one.address, one.answer(0, [numbers], count=6, dtype=Dtype.FLOAT64), 0.1)
    assert [len(numbers) for numbers in top.get()] == [6, 6]
    odd = r.submit(Op.REDUCE, 1, 0, 0.0, 9.0, aux=Function.NORM, payload=[np.array([1.0])], count=1, per_slot=True)
    for one in taken(r):
        r.receive(one.address, one.answer(0, [np.ones(9)], count=9, dtype=Dtype.FLOAT64), 0.1)
    with pytest.raises(ProtocolError, match="with 9 numbers for 8 slots"):
        odd.get()


def test_a_call_to_every_endpoint_begins_again_as_a_whole_under_a_newer_map():
    r = requests()
    call = r.submit(Op.SWEEP, 1, 0, 0.0, 9.0, payload=[np.array([1.0])], count=1, write=True)
    a, b = taken(r)
    r.receive(A, a.answer(0, [np.array([100], np.uint64)], count=1), 0.1)
    r.set_map(map_of(2, (0, 4, A, 0), (4, 16, B, 1)), 0.2)  # what B answers from now on has slots that A answered for
    again = taken(r)
    assert [one.address for one in again] == [A, B]
    assert {one.message.sequence for one in (a, b, *again)} == {call.sequence}
    for one, rows in zip(again, (30, 50), strict=True):
        r.receive(one.address, one.answer(0, [np.array([rows], np.uint64)], count=1), 0.3)
    assert [numbers.tolist() for numbers in call.get()] == [[30], [50]]


def test_an_endpoint_that_refuses_a_call_to_every_endpoint_is_asked_again_and_no_other_one():
    r = requests(pause=0.1)
    r.set_map(RUNS, 0.0)
    call = r.submit(Op.STATS, 1, 0, 0.0, 9.0)
    a, b = taken(r)
    r.receive(A, a.answer(Status.WRONG_EPOCH, [np.array([0], np.uint16)], count=1, epoch=1), 0.1)
    r.on_time(0.3)
    (again,) = taken(r)
    assert again.address == A
    for one in (b, again):
        r.receive(one.address, one.answer(0, [np.array([7], np.uint64)], count=1), 0.4)
    assert len(call.get()) == 2


def test_what_an_endpoint_has_not_answered_goes_to_its_backup_as_soon_as_the_map_says_so():
    r = requests(resend_after=30.0)
    pushed, pulled = push(r), pull(r)
    at_a = [one for one in taken(r) if one.address == A]
    r.receive(A, at_a[1].answer(Status.DEFERRED), 0.1)  # a read that the dead endpoint kept
    r.on_time(0.2)
    waiting = push(r, clock=0)  # not sent: nobody has taken it
    r.set_map(map_of(2, (0, SLOTS, B, 1)), 0.3)
    moved = taken(r)
    assert {one.address for one in moved} == {B}
    here = [one for one in moved if max(one.slots()) < 8]
    assert [(one.message.op, one.message.sequence) for one in here] == [
        (Op.PUSH, pushed.sequence),
        (Op.PULL, here[1].message.sequence),
        (Op.PUSH, waiting.sequence),
    ]
    assert r.counts["moved"] == 3
    assert not any(call.done() for call in (pushed, pulled, waiting))


def test_a_server_that_a_newer_map_lists_is_not_lost():
    r = requests()
    r.lose(0, "silent", 0.0)
    assert isinstance(pull(r).error, ServerLostError)
    r.set_map(map_of(2, (0, 8, A, 0), (8, 16, B, 1)), 0.1)
    assert pull(r).error is None


def test_a_tick_begins_again_under_a_newer_map_after_the_pushes_of_its_clock():
    r = requests()
    pushed = push(r)
    parts = taken(r)
    for one in parts:
        r.receive(one.address, one.answer(), 0.1)
    assert pushed.done()
    tick = r.tick(0, [1], 0.1, 9.0)
    at_a, at_b = taken(r)
    r.receive(A, at_a.answer(), 0.2)
    late = push(r, clock=1)
    taken(r)
    r.set_map(map_of(2, (0, 4, A, 0), (4, 16, B, 1)), 0.3)
    ticks = [one for one in taken(r) if one.message.op == Op.TICK]
    assert [(one.address, one.message.epoch, one.message.clock) for one in ticks] == [(A, 2, 0), (B, 2, 0)]
    for one in ticks:
        assert not tick.done()
        r.receive(one.address, one.answer(), 0.4)
    assert tick.done()
    assert not late.done()
    r.receive(B, at_b.answer(), 0.5)  # of the former map
    assert r.counts["strays"] == 1
