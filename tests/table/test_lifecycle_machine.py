"""Admission and expiry against dicts, by random sequences of calls (Hypothesis shrinks what breaks).

Keys are the awkward ones of the table's own machine: the ends of the key space, neighbours, keys that share a slot.
"""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import shoal
from oracle.hashing import LAST_KEY, keys_of, neighbours, one_slot
from oracle.lifecycle import LivingTable
from oracle.optimizers import rule_of
from tiers import long_but, rounds

POOL = np.unique(
    np.concatenate([np.array([0, 1, LAST_KEY, 2**63], np.uint64), neighbours(10), one_slot(8), keys_of([0, 2**64 - 1])])
)
batches = st.lists(st.integers(0, len(POOL) - 1), max_size=24).map(lambda picks: POOL[np.array(picks, np.int64)])
DIM = 2


class LifecycleMachine(RuleBasedStateMachine):
    """Both tables get the same calls; after each they must have the same rows, and know the same of them."""

    def __init__(self, slots, admit, expire):
        super().__init__()
        self.slots = slots
        self.rules = {"admit": admit, "expire": expire}
        self.description = {"dim": DIM, "optimizer": shoal.SGD(lr=0.5), "init": shoal.Constant(1.0)} | self.rules

    @initialize(threads=st.sampled_from([1, 2, 4]))
    def open(self, threads):
        self.store = shoal.local(threads=threads, slots=self.slots)
        self.table = self.store.table("t", **self.description)
        self.oracle = LivingTable(
            DIM,
            rule_of(self.description["optimizer"]),
            lambda key: np.ones(DIM, np.float32),
            slots=self.slots,
            **self.rules,
        )

    def grads(self, data, n):
        return np.random.default_rng(data.draw(st.integers(0, 9))).integers(-2, 3, (n, DIM)).astype(np.float32)

    @rule(keys=batches, data=st.data())
    def push(self, keys, data):
        grads = self.grads(data, len(keys))
        self.table.push(keys, grads).result()
        self.oracle.push(keys, grads)

    @rule(keys=batches)
    def push_what_is_not_finite(self, keys):
        grads = np.full((len(keys), DIM), np.nan, np.float32)
        self.table.push(keys, grads).result()
        self.oracle.push(keys, grads)

    @rule(keys=batches, data=st.data())
    def push_counted(self, keys, data):
        batch = self.store.key_batch(keys)
        grads = self.grads(data, len(batch))
        counts = np.random.default_rng(data.draw(st.integers(0, 9))).integers(1, 4, len(batch)).astype(np.uint32)
        self.table.push_unique(batch, grads, counts=counts).result()
        self.oracle.push(batch.keys, grads, dict(zip(map(int, batch.keys), map(int, counts), strict=True)))

    @rule(keys=batches, data=st.data())
    def push_and_pull(self, keys, data):
        grads = self.grads(data, len(keys))
        rows = self.table.push_pull(keys, grads).result()
        self.oracle.push(keys, grads)
        assert rows.tolist() == self.oracle.pull(keys).tolist()

    @rule(keys=batches, data=st.data())
    def assign(self, keys, data):
        keys = np.unique(keys)
        rows = self.grads(data, len(keys))
        self.table.assign(keys, rows)
        self.oracle.assign(keys, rows)

    @rule(keys=batches)
    def erase(self, keys):
        assert self.table.erase(keys) == self.oracle.erase(keys)

    @rule(clocks=st.sampled_from([1, 1, 2, 5]))
    def tick(self, clocks):
        for _ in range(clocks):
            self.store.tick()
        self.oracle.clock += clocks

    @rule()
    def sweep(self):
        dry = self.store.sweep(dry_run=True).tables[0]
        wet = self.store.sweep().tables[0]
        assert [dropped.rows for dropped in dry.dropped] == [dropped.rows for dropped in wet.dropped]
        assert [dropped.rows for dropped in wet.dropped] == self.oracle.sweep()

    @rule(slots=st.sampled_from([2, 8]))
    def move_into_other_slots_and_back(self, slots):
        """What a checkpoint keeps of rows and of waiting keys is exact, whatever the slots were."""
        if getattr(self.rules["admit"], "capacity", None) is not None:
            slots = self.slots  # each slot has its share of a capacity: another cut may hold fewer keys
        before = self.parts(self.table)
        with shoal.local(slots=slots) as other, shoal.local(slots=self.slots) as third:
            there = other.table("t", **self.description)
            self.copy(self.table, self.slots, there)
            assert there.shard.verify() == ""
            back = third.table("t", **self.description)
            self.copy(there, slots, back)
            assert self.parts(back) == before

    @staticmethod
    def copy(table, slots, into):
        for slot in range(slots):
            rows, section, *_ = table.shard.section(slot)
            into.shard.restore(rows, section)
            into.shard.restore_filter(slots, slot, table.shard.filter(slot))

    def parts(self, table):
        shard = table.shard
        return [(shard.section(slot)[1].tobytes(), shard.filter(slot).tobytes()) for slot in range(self.slots)]

    @invariant()
    def both_are_the_same(self):
        if not hasattr(self, "oracle"):
            return
        assert self.table.shard.verify() == ""
        assert self.table.contains(POOL).tolist() == self.oracle.contains(POOL)
        assert len(self.table) == len(self.oracle)
        assert self.table.pull(POOL).tolist() == self.oracle.pull(POOL).tolist()
        stats = self.table.stats()
        assert stats.refused == self.oracle.refused
        assert stats.waiting == len(self.oracle.waiting)
        assert stats.expired == self.oracle.expired
        assert stats.nonfinite_rows == self.oracle.nonfinite_rows

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()


MACHINES = {
    "third occurrence": (4, shoal.AfterCount(3), ()),
    "third occurrence soon, few waiting, two clocks to live": (
        2,
        shoal.AfterCount(3, within=2, capacity=6),
        (shoal.TimeToLive(2),),
    ),
    "by chance, a score": (4, shoal.WithProbability(0.3, seed=5), (shoal.DecayedScore(0.5, floor=0.75),)),
    "few rows, the recent": (2, None, (shoal.MaxRows(10),)),
    "few rows, the frequent": (4, None, (shoal.MaxRows(12, keep="frequent"),)),
    "all of them": (
        2,
        shoal.AfterCount(2),
        (
            shoal.MinNorm(1.0),
            shoal.TimeToLive(3),
            shoal.DecayedScore(0.5, floor=0.3),
            shoal.MaxRows(14, keep="frequent"),
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.rounds
@pytest.mark.parametrize(
    "arguments", long_but(["all of them", "third occurrence soon, few waiting, two clocks to live"], MACHINES)
)
def test_a_table_with_rules_is_a_dict_of_rows_with_rules(arguments):
    run_state_machine_as_test(
        lambda: LifecycleMachine(*arguments), settings=settings(max_examples=rounds(30), stateful_step_count=25)
    )
