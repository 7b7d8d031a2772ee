"""Exact filters on networks that lose, double and reorder, with deaths and moving slots: every promise still holds."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shoal import _core
from shoal._core import Status
from shoal.rpc import filters
from shoal.rpc.filters import Filter, Filters
from shoal.rpc.requests import Requests
from sim import model
from sim.schedules import Plan, run, violations
from test_simulated import MODES, MOVES, PLANS, plan_of

COUNTS: Counter[str] = Counter()


class Filtered(Requests):
    """Requests whose pulls and pushes all go through one filter."""

    def __init__(self, worker, map, policy):
        super().__init__(worker, map, policy)
        self.filter = Filter(Filters(key_caching=True, zeros=True), worker.rank, worker.incarnation, worker.job)

    def submit(self, *what, **more):
        return super().submit(*what, filter=self.filter, **more)

    def receive(self, address, frames, now):
        before = Counter(self.filter.counts)
        super().receive(address, frames, now)
        COUNTS.update(self.filter.counts - before)


def native(slots, first, end):
    return _core.Service(slots, first, end, list_bytes=600)  # room for two or three lists


class Listing(model.Service):
    """The slow endpoint, which remembers lists now and then, before anything else looks at the message."""

    def __init__(self, *where):
        super().__init__(*where)
        self.lists = {}
        self.random = random.Random(0)

    def handle(self, peer, frames):
        try:
            message = _core.decode(frames, replies=False)
        except ValueError:
            return super().handle(peer, frames)
        if message.keep and self.random.random() < 0.8:
            self.lists[_core.digest(message.hashes, message.job)] = message.hashes.copy()
        if not message.digest or self.refusal(message) is not None:
            return super().handle(peer, frames)
        if self.random.random() < 0.2:
            self.lists.pop(message.digest, None)
        if message.digest not in self.lists:
            self.reply(peer, message, Status.NO_LIST)
            return self.released()
        payload = [self.lists[message.digest]]
        if message.op == _core.Op.PUSH:
            payload.append(message.values)
        header = _core.encode_header(
            op=message.op, payload=payload, dtype=_core.WireDtype.FLOAT32, dim=message.dim, table=message.table,
            worker=message.worker, incarnation=message.incarnation, sequence=message.sequence, epoch=message.epoch,
            clock=message.clock, count=message.count, job=message.job, part=message.part,
        )  # fmt: skip
        return super().handle(peer, [header, *payload])


@pytest.fixture(autouse=True)
def _short_lists(monkeypatch):
    monkeypatch.setattr(filters, "_FEWEST", 1)
    COUNTS.clear()


def keeps_its_promises(plan: Plan, service, seeds: int) -> None:
    for seed in range(seeds):
        assert violations(run(seed, plan, service, Filtered)) == [], f"seed {seed}"
    assert COUNTS["lists_lost"] > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", PLANS)
def test_every_schedule_keeps_every_promise_with_filters(plan, mode):
    keeps_its_promises(plan_of(mode, PLANS[plan]), native, 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", MOVES)
def test_slots_that_move_keep_every_promise_with_filters(plan, mode):
    keeps_its_promises(plan_of(mode, MOVES[plan]), Listing, 4)
