"""A cluster's table against a dict, by random sequences of every call: the machine of test_table_machine, under BSP.

Each push is a clock of its own, so even the number of the step is that of the dict.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from cluster_standin import cluster
from oracle.hashing import keys_of
from shoal.cluster.worker.remote_shard import RemoteShard
from stores import joined
from table_machine import MACHINES, TableMachine, batches
from tiers import long_after


class ClusterMachine(TableMachine):
    """Of one store, which outlives the machine; each has a table of its own."""

    numbers = itertools.count()

    def __init__(self, made, store, *arguments):
        super().__init__(*arguments)
        self.made = made
        self.store = store

    @initialize()
    def open(self):
        self.make(f"t{next(self.numbers)}")

    def verify(self):
        number = self.table.shard.number
        wrong = [service.shard(number).verify() for server in self.made.servers for service in server.services]
        return "".join(wrong)

    @rule(keys=batches, data=st.data())
    def push_pull(self, keys, data):
        """Under BSP the pull is of this clock and does not see the push."""
        grads = self.rows(data, len(keys))
        expected = self.oracle.pull(keys)
        self.same(self.table.push_pull(keys, grads).result(), expected)
        self.oracle.push(keys, grads)
        self.store.tick()

    @rule(keys=batches, data=st.data())
    def two_pushes_of_a_clock_are_one_step(self, keys, data):
        batch = self.store.key_batch(keys)
        first, second = (self.rows(data, len(batch)) for _ in range(2))
        self.table.push_unique(batch, first)
        self.table.push_unique(batch, second)
        self.store.tick()
        self.oracle.push(keys_of(batch.hashes), first + second)

    @rule(keys=batches, data=st.data())
    def save_and_load_into_another_store(self, keys, data):
        self.saved += 1
        folder = Path(self.folder.name) / str(self.saved)
        self.store.save(folder, tables=[self.table.name])
        dropped = self.table.stats().nonfinite_rows
        self.table.push(keys, self.rows(data, len(keys)))
        self.store.tick()
        self.store.load(folder)
        self.oracle.nonfinite_rows -= dropped  # what was loaded counts anew

    def teardown(self):
        self.folder.cleanup()


def run(name, **how):
    with cluster(2, 2, slots=16) as made, joined(made.address, 1) as (store,):
        run_state_machine_as_test(
            lambda: ClusterMachine(made, store, *MACHINES[name]),
            settings=settings(max_examples=8, stateful_step_count=20, **how),
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", long_after(1, ["ftrl of dim 1", "sgd of dim 3"]))
def test_a_clusters_table_is_a_dict_of_rows(name):
    run(name)


@pytest.mark.slow
def test_the_machine_would_find_a_push_that_is_lost(monkeypatch):
    real = RemoteShard.push
    monkeypatch.setattr(
        RemoteShard,
        "push",
        lambda shard, batch, grads, *more: real(shard, batch, grads * np.float32(len(batch) != 5), *more),
    )
    with pytest.raises(AssertionError):
        run("sgd of dim 3", phases=[Phase.generate])
