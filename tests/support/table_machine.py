"""A table beside a dict, by random sequences of every call."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import shoal
from oracle.hashing import LAST_KEY, keys_of, mix, neighbours, one_slot
from oracle.optimizers import rule_of
from oracle.table import DictTable

POOL = np.unique(
    np.concatenate(
        [
            np.array([0, 1, 2, LAST_KEY, LAST_KEY - 1, 2**63], np.uint64),
            neighbours(12),
            one_slot(8),
            keys_of([0, 1, 2**64 - 1, 2**64 - 2, 2**63, 2**63 - 1]),
        ]
    )
)


batches = st.lists(st.integers(0, len(POOL) - 1), max_size=40).map(lambda picks: POOL[np.array(picks, np.int64)])


seeds = st.integers(0, 2**16)


class TableMachine(RuleBasedStateMachine):
    """Both tables get the same calls; after each the whole pool must read the same."""

    def __init__(self, dim, optimizer, init, dtype, tolerance):
        super().__init__()
        self.description = {"dim": dim, "optimizer": optimizer, "init": init, "dtype": dtype, "seed": 3}
        self.dim = dim
        self.tolerance = tolerance
        self.folder = tempfile.TemporaryDirectory()
        self.saved = 0

    @initialize(threads=st.sampled_from([1, 2]), slots=st.sampled_from([2, 4, 64]))
    def open(self, threads, slots):
        self.store = shoal.local(threads=threads, slots=slots)
        self.make("t")

    def make(self, name):
        self.table = self.store.table(name, **self.description)
        initial = dict(zip(map(int, POOL), self.table.pull(POOL), strict=True))
        self.oracle = DictTable(self.dim, rule_of(self.description["optimizer"]), initial.__getitem__)

    def rows(self, data, n):
        """Small integers, zero rows among them, from one drawn seed: what matters is which keys meet."""
        rng = np.random.default_rng(data.draw(seeds))
        return (rng.integers(-4, 5, (n, self.dim)) * rng.integers(0, 4, (n, 1)).clip(0, 1)).astype(np.float32)

    def verify(self):
        return self.table.shard.verify()

    def same(self, got, expected):
        np.testing.assert_allclose(got, expected, rtol=self.tolerance, atol=self.tolerance)

    @rule(keys=batches, data=st.data())
    def push(self, keys, data):
        grads = self.rows(data, len(keys))
        self.table.push(keys, grads).result()
        self.oracle.push(keys, grads)
        self.store.tick()

    @rule(keys=batches, data=st.data(), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
    def push_what_is_not_finite(self, keys, data, bad):
        grads = self.rows(data, len(keys))
        grads[::3, -1] = bad
        self.table.push(keys, grads).result()
        with np.errstate(invalid="ignore"):
            self.oracle.push(keys, grads)
        self.store.tick()

    @rule(keys=batches, data=st.data())
    def push_unique(self, keys, data):
        batch = self.store.key_batch(keys)
        grads = self.rows(data, len(batch))
        self.table.push_unique(batch, grads).result()
        self.oracle.push(keys_of(batch.hashes), grads)
        self.store.tick()

    @rule(keys=batches)
    def pull(self, keys):
        self.same(self.table.pull(keys), self.oracle.pull(keys))

    @rule(keys=batches)
    def pull_unique(self, keys):
        batch = self.store.key_batch(keys)
        self.same(self.table.pull_unique(batch)[batch.inverse], self.oracle.pull(keys))

    @rule(keys=batches, data=st.data())
    def assign(self, keys, data):
        keys = np.unique(keys)
        rows = self.rows(data, len(keys))
        self.table.assign(keys, rows)
        self.oracle.assign(keys, rows)

    @rule(keys=batches)
    def erase(self, keys):
        assert self.table.erase(keys) == self.oracle.erase(keys)

    @rule(keys=batches)
    def contains(self, keys):
        assert self.table.contains(keys).tolist() == self.oracle.contains(keys)

    @rule(keys=batches)
    def state(self, keys):
        for name, column in self.table.state(keys).items():
            expected = [self.oracle.state(int(key))[name] for key in keys]
            self.same(column, np.reshape(expected, column.shape))

    @rule(batch_size=st.sampled_from([1, 3, 65536]))
    def items(self, batch_size):
        found = [
            (int(k), row) for keys, rows in self.table.items(batch_size) for k, row in zip(keys, rows, strict=True)
        ]
        keys = [k for k, _ in found]
        assert keys == sorted(self.oracle.rows, key=mix)
        self.same(np.array([row for _, row in found]).reshape(-1, self.dim), self.oracle.pull(keys))

    @rule(threads=st.sampled_from([1, 2]), slots=st.sampled_from([2, 16, 256]))
    def save_and_load_into_another_store(self, threads, slots):
        self.saved += 1
        folder = Path(self.folder.name) / str(self.saved)
        self.store.save(folder)
        dropped = self.table.stats().nonfinite_rows
        self.store.close()
        self.store = shoal.local(threads=threads, slots=slots)
        self.table = self.store.table("t", **self.description)
        self.store.load(folder)
        self.oracle.nonfinite_rows -= dropped  # a new store counts anew

    @invariant()
    def both_are_the_same(self):
        if not hasattr(self, "oracle"):
            return
        assert self.verify() == ""
        assert len(self.table) == len(self.oracle) == self.table.stats().rows
        assert self.table.stats().step == self.oracle.step
        assert self.table.stats().nonfinite_rows == self.oracle.nonfinite_rows
        self.same(self.table.pull(POOL), self.oracle.pull(POOL))

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
        self.folder.cleanup()


MACHINES = {
    "sgd of dim 1": (1, shoal.SGD(lr=0.5), shoal.Constant(2.0), "float32", 0),
    "sgd of dim 3": (3, shoal.SGD(lr=0.5), shoal.Zeros(), "float32", 0),
    "sgd of dim 2 in bfloat16": (2, shoal.SGD(lr=1.0), shoal.Constant(-3.0), "bfloat16", 0.25),
    "momentum of dim 2": (2, shoal.Momentum(lr=0.5, mu=0.5), shoal.Uniform(0.1), "float32", 1e-4),
    "ftrl of dim 1": (1, shoal.FTRL(l1=0.5, l2=0.1), shoal.Zeros(), "float32", 1e-4),
    "group ftrl of dim 3": (3, shoal.GroupFTRL(l1=0.2, l21=0.5), shoal.Uniform(0.5), "float32", 1e-4),
    "adagrad of dim 5": (5, shoal.Adagrad(lr=0.1, weight_decay=0.01), shoal.Normal(0.1), "float32", 1e-4),
    "rowwise of dim 17": (17, shoal.RowWiseAdagrad(lr=0.1), shoal.Normal(0.1), "float32", 1e-4),
    "adam per row of dim 2": (2, shoal.Adam(per_row_step=True), shoal.Zeros(), "float32", 1e-4),
    "adamw of dim 1": (1, shoal.AdamW(weight_decay=0.1), shoal.Constant(1.0), "float32", 1e-4),
}
