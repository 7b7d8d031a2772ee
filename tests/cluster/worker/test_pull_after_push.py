"""A pull that follows a push sees its effect, however the push arrives."""

import random

import numpy as np
import pytest

from maps import map_of
from requests_by_hand import MAP, SLOTS, A, B, Op, Status, make_filter, pull, push, requests, taken
from shoal import _core
from shoal._core import ClientDefect, Policy, Requests
from shoal.cluster.worker.filters import Filters
from shoal.errors import DeadlineExceededError, ProtocolError
from table_specs import native_spec

FILTERS = [None, Filters(key_caching=True)]


def answer(r, asked, now=0.1, value=1.0):
    for one in asked:
        r.receive(one.address, one.rows(value) if one.message.op == Op.PULL else one.answer(), now)


def ops(asked):
    return [one.message.op for one in asked]


def test_a_pull_leaves_behind_its_push_and_is_done_with_it():
    r = requests()
    pushed = push(r)
    pulled = pull(r, follows=pushed)
    asked = taken(r)
    assert [(one.address, one.message.op) for one in asked] == [(A, Op.PUSH), (B, Op.PUSH), (A, Op.PULL), (B, Op.PULL)]
    answer(r, asked[2:])
    assert not pulled.done()
    answer(r, asked[:2])
    assert pushed.done()
    assert (pulled.get() == 1).all()
    assert not taken(r)
    assert r.next_time() is None


@pytest.mark.parametrize("is_last", [False, True], ids=["the pull is answered last", "the push is answered last"])
def test_a_pull_is_asked_again_when_anything_was_repeated_since_its_push(is_last):
    r = requests(resend_after=1.0)
    pushed = push(r)
    pulled = pull(r, follows=pushed)
    asked = taken(r)
    answer(r, asked[1:2])
    answer(r, asked[3:])
    r.on_time(r.next_time())  # A's part of the push was lost
    (again,) = taken(r)[:1]
    assert again.frames == asked[0].frames
    answer(r, [asked[2], again] if is_last else [again, asked[2]], 1.1, value=7.0)  # without the push
    assert pushed.done()
    assert not pulled.done()
    repeated = taken(r)
    assert ops(repeated) == [Op.PULL, Op.PULL]
    answer(r, repeated, 1.2, value=2.0)
    assert (pulled.get() == 2).all()


def test_a_pull_that_was_asked_again_takes_any_answer():
    """Its push had arrived before it left: repetitions since change nothing."""
    r = requests(resend_after=1.0)
    pushed = push(r)
    pulled = pull(r, follows=pushed)
    asked = taken(r)
    r.on_time(1.001)
    taken(r)
    answer(r, asked, 1.1)
    assert pushed.done()
    repeated = taken(r)
    r.on_time(2.2)
    assert len(taken(r)) == 2
    answer(r, repeated, 2.3, value=3.0)
    assert (pulled.get() == 3).all()


def test_a_pull_after_a_push_that_has_arrived_leaves_once_unless_there_was_a_repetition():
    r = requests(resend_after=1.0)
    pushed = push(r)
    answer(r, taken(r))
    pulled = pull(r, follows=pushed, now=0.2)
    answer(r, taken(r), 0.3)
    assert pulled.done()
    assert not taken(r)


def test_with_a_filter_a_pull_leaves_when_its_push_has_arrived():
    r = requests(resend_after=1.0)
    filter = make_filter(FILTERS[1])
    pushed = push(r, filter=filter)
    pulled = pull(r, filter=filter, follows=pushed)
    tick = r.tick(0, [1], 0.0, 60.0)
    asked = taken(r)
    assert ops(asked) == [Op.PUSH, Op.PUSH]
    answer(r, asked[:1])
    assert not taken(r)
    r.on_time(r.next_time())
    answer(r, taken(r), 1.1)
    pulls = taken(r)
    assert ops(pulls) == [Op.PULL, Op.PULL]
    answer(r, pulls, 1.2)
    assert (pulled.get() == 1).all()
    answer(r, taken(r), 1.3)
    assert tick.done()


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("is_answered", [False, True])
def test_a_pull_fails_with_its_push(filters, is_answered):
    r = requests()
    filter = filters and make_filter(filters)
    pushed = push(r, filter=filter)
    pulled = pull(r, filter=filter, follows=pushed)
    asked = taken(r)
    if is_answered:
        answer(r, [one for one in asked if one.message.op == Op.PULL])
    r.receive(A, asked[0].answer(Status.NO_TABLE), 0.1)
    if not is_answered:
        answer(r, [one for one in asked if one.message.op == Op.PULL], 0.2)
    for call in (pushed, pulled, pull(r, filter=filter, follows=pushed, now=0.3)):
        for one in taken(r):
            answer(r, [one], 0.4)
        with pytest.raises(ProtocolError, match=r"refused the push of table 1 at clock 0: it has no such table"):
            call.get()
    assert r.next_time() is None


@pytest.mark.parametrize("filters", FILTERS)
def test_a_pull_is_asked_again_where_its_slots_have_gone(filters):
    r = requests()
    filter = filters and make_filter(filters)
    pushed = push(r, filter=filter)
    pulled = pull(r, filter=filter, follows=pushed)
    asked = taken(r)
    answer(r, [one for one in asked if one.message.op == Op.PULL])
    r.set_map(map_of(2, (0, SLOTS, B, 1)), 0.2)
    moved = taken(r)
    assert ops(moved) == [Op.PUSH]
    assert {one.address for one in moved} == {B}
    answer(r, [asked[1], *moved], 0.3)
    assert pushed.done()
    assert not pulled.done()
    answer(r, taken(r), 0.4, value=4.0)
    assert (pulled.get() == 4).all()


@pytest.mark.parametrize("filters", FILTERS)
def test_the_deadline_of_a_pull_holds_while_its_push_is_under_way(filters):
    r = requests()
    filter = filters and make_filter(filters)
    pushed = push(r, filter=filter, deadline=60.0)
    pulled = pull(r, filter=filter, follows=pushed, deadline=5.0)
    answer(r, [one for one in taken(r) if one.message.op == Op.PULL])
    while not pulled.done():
        r.on_time(r.next_time())
        taken(r)
    assert isinstance(pulled.error, DeadlineExceededError)
    assert not pushed.done()


def test_what_comes_after_such_a_pull_waits_for_the_rows_that_count():
    r = requests(resend_after=1.0)
    pushed = push(r)
    pulled = pull(r, follows=pushed)
    last = push(r, after=[pulled])
    asked = taken(r)
    r.on_time(1.001)
    taken(r)
    answer(r, asked, 1.1)
    repeated = taken(r)
    assert ops(repeated) == [Op.PULL, Op.PULL]
    answer(r, repeated, 1.2)
    assert ops(taken(r)) == [Op.PUSH, Op.PUSH]
    assert not last.done()


@pytest.mark.parametrize("is_same", [False, True], ids=["the push alone is held", "both are held"])
def test_a_pull_sees_a_push_that_was_held(is_same):
    r = requests()
    first = pull(r)
    asked = taken(r)
    pushed = push(r, after=[first])
    pulled = pull(r, follows=pushed, after=[first] if is_same else [])
    early = taken(r)
    assert ops(early) == ([] if is_same else [Op.PULL, Op.PULL])
    answer(r, [*asked, *early], value=3.0)
    behind = taken(r)
    assert ops(behind) == ([Op.PUSH, Op.PUSH, Op.PULL, Op.PULL] if is_same else [Op.PUSH, Op.PUSH])
    answer(r, behind, 0.2)
    answer(r, taken(r), 0.3)
    assert (pulled.get() == 1).all()


# --- on a network that loses, doubles and reorders messages ---


class Network:
    """A worker and two endpoints that apply pushes as they arrive; the model is a dict."""

    def __init__(self, seed, filters, defect):
        self.random = random.Random(seed)
        self.filter = filters and make_filter(filters, 0, 1, 77)
        self.endpoints = {A: self.serve(0, 8), B: self.serve(8, SLOTS)}
        self.wire = []
        self.now = 0.0
        policy = Policy(resend_after=0.1, longest=0.2, pause=0.01)
        self.requests = Requests((0, 1, 77), MAP, policy, atomic_clocks=False, defect=defect)

    def serve(self, first, end):
        endpoint = _core.Endpoint(SLOTS, [(first, end)], key_list_bytes=600)  # room for some lists
        endpoint.set_map(1, [(first, end)])
        endpoint.start_job(77, "asp", 0, False)
        endpoint.add_table(0, native_spec())
        endpoint.admit(0, 1, 0)
        return endpoint

    def step(self):
        """Let one thing happen."""
        self.wire += [(True, *one) for one in self.requests.take_outgoing()]
        if not self.wire:
            self.now = max(self.now, self.requests.next_time())
            self.requests.on_time(self.now)
            return
        self.now += 0.001
        back, address, frames = self.wire.pop(0)  # connections keep the order of what they do not lose
        chance = self.random.random()
        if chance < 0.15:
            return
        if chance < 0.25:
            self.wire.append((back, address, frames))
        if back:
            self.wire += [(False, address, reply) for _, reply in self.endpoints[address].handle(b"peer", frames)]
        else:
            self.requests.receive(address, frames, self.now)

    def run(self, turns):
        """Push, and pull behind it; return how often rows lacked the push."""
        wrong, rows = 0, dict.fromkeys(range(60), 0.0)
        lists = [self.random.sample(range(60), 40) for _ in range(3)]
        for _ in range(turns):
            keys = np.array(self.random.choice(lists), np.uint64)
            batch = _core.KeyBatch(keys, SLOTS, _core.ThreadPool(1))
            where = {"hashes": batch.hashes, "begins": batch.offsets, "dim": 1, "filter": self.filter}
            grads, out = np.ones((40, 1), np.float32), np.full((40, 1), np.nan, np.float32)
            pushed = self.requests.submit(Op.PUSH, 0, 0, self.now, self.now + 1000, values=grads, **where)
            pulled = self.requests.submit(Op.PULL, 0, 0, self.now, self.now + 1000, out=out, follows=pushed, **where)
            while not pulled.done():
                self.step()
                assert self.requests.verify() == ""
            for key in keys.tolist():
                rows[key] -= 1.0
            found = np.empty((40, 1), np.float32)
            batch.expand(pulled.get(), 1, found, _core.ThreadPool(1))
            wrong += found[:, 0].tolist() != [rows[key] for key in keys.tolist()]
        return wrong


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("seed", range(5))
def test_a_pull_sees_its_push_on_any_network(seed, filters):
    assert Network(seed, filters, ClientDefect.NONE).run(40) == 0


@pytest.mark.parametrize(
    ("filters", "defect"),
    [
        (FILTERS[0], ClientDefect.TAKES_ROWS_BEHIND_A_REPEATED_PUSH),
        (FILTERS[1], ClientDefect.LEAVES_BEFORE_A_FILTERED_PUSH),
    ],
)
def test_a_planted_bug_shows_as_rows_without_the_push(filters, defect):
    assert any(Network(seed, filters, defect).run(40) for seed in range(5))
