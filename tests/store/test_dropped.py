"""Stores and models that are dropped without `close` give their memory back at once: a search makes many."""

from __future__ import annotations

import numpy as np
import pytest

import shoal
from dropped import kept

KEYS = np.arange(5, dtype=np.uint64)


def store():
    made = shoal.local()
    table = made.table("x", dim=2)
    table.push(KEYS, np.ones((5, 2), np.float32)).result()
    made.tick()
    return made, table, table.shard


def model():
    learner = shoal.LogisticRegression(shoal.FTRL())
    ones = np.ones(5, np.float32)
    learner.partial_fit(shoal.Batch(labels=ones, indptr=np.arange(6), keys=KEYS, values=ones))
    return learner, learner.store, learner.table, learner.table.shard


@pytest.mark.parametrize("make", [store, model])
def test_nothing_keeps_what_is_dropped(make):
    assert kept(make) == []


@pytest.mark.parametrize("shuffle", [False, True])
def test_nothing_keeps_a_model_after_its_fit(tmp_path, shuffle):
    (tmp_path / "log").write_text("".join(f"{n % 2} {n % 7}:1\n" for n in range(40)))

    def fitted():
        reader = shoal.read_libsvm(tmp_path / "log", batch_size=8)
        learner = shoal.LogisticRegression(shoal.FTRL())
        learner.fit(reader, valid=reader, epochs=2, shuffle=shuffle, progress=False)
        learner.save(tmp_path / "model", overwrite=True)
        return learner, learner.store, learner.table, learner.table.shard, reader

    assert kept(fitted) == []


def test_a_table_outlives_its_dropped_store():
    table = shoal.local().table("x", dim=1, optimizer=shoal.SGD(lr=1.0))
    table.push(KEYS, np.ones((5, 1), np.float32)).result()
    assert table.pull(KEYS)[:, 0].tolist() == [-1.0] * 5
    assert table.clock == 0
