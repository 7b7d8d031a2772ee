"""Key lists by digest while slots move: test_schedules.py has the rest of what filters meet in a network."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from requests_by_hand import counts_of
from shoal import _core
from shoal._core import Status
from shoal.cluster.worker.filters import Filters
from sim import model
from sim.schedules import run, violations
from simulated_plans import MODES, MOVES, plan_of

EXACT = Filters(key_caching=True, zeros=True)


class Listing(model.Endpoint):
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
            self.reply(peer, message, Status.UNKNOWN_KEY_LIST)
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


@pytest.mark.slow
@pytest.mark.combined
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", MOVES)
def test_lists_that_are_named_where_their_slots_have_gone_break_no_promise(plan, mode):
    counts: Counter[str] = Counter()
    for seed in range(4):
        cluster = run(seed, plan_of(mode, MOVES[plan] | {"filters": EXACT}), Listing)
        assert violations(cluster) == [], f"seed {seed}"
        for client in cluster.clients:
            counts += counts_of(client.filter)
    assert counts["lists_named"] > 0
    assert counts["lists_lost"] > 0
