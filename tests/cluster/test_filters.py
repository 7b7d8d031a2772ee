"""Filters over sockets: what a cluster's workers learn with them, and what they saved."""

from __future__ import annotations

import numpy as np
import pytest

import shoal
from cluster_standin import cluster
from stores import together

KEYS = np.arange(600, dtype=np.uint64)


def batches(rank: int) -> list[shoal.Batch]:
    """A worker's part of a planted click log."""
    planted = np.random.default_rng(5).normal(size=100)
    random = np.random.default_rng(rank)
    made = []
    for _ in range(6):
        columns = random.integers(0, 100, size=(250, 6))
        labels = (random.random(250) < 1 / (1 + np.exp(-planted[columns].sum(axis=1)))).astype(np.float32)
        keys = (columns * 6 + np.arange(6)).astype(np.uint64).ravel()
        made.append(shoal.Batch(labels, np.arange(0, 6 * 250 + 1, 6), keys, None))
    return made


def learn(store):
    """Two passes over the worker's part: the rows, the loss of the last pass, and what the filters counted."""
    with shoal.LogisticRegression(shoal.FTRL(alpha=0.3, l1=1.0), store=store) as model:
        model.fit(batches(store.rank), epochs=2, progress=False)
        store.barrier()
        (table,) = model.tables
        rows = [column.tobytes() for column in table.state(KEYS).values()]
        loss = model.history.passes[-1].metrics.logloss
        return rows, loss, store.filter_metrics().get(table.spec.name, {}), store.metrics()


def learned(filters, **how):
    with cluster(2, 1) as made:
        return together(made.address, 2, learn, filters=filters, **how)


@pytest.fixture(scope="module")
def unfiltered():
    return learned(None)


@pytest.mark.slow
def test_exact_filters_give_the_same_bits_for_fewer_bytes(unfiltered):
    found = learned(shoal.Filters(key_caching=True, zeros=True))
    for (rows, loss, counts, metrics), (plain_rows, plain_loss, nothing, plain_metrics) in zip(
        found, unfiltered, strict=True
    ):
        assert rows == plain_rows
        assert loss == plain_loss
        assert nothing == {}
        assert counts["lists_named"] >= counts["lists_sent"] > 0  # every push names the list of its pull
        assert counts.get("lists_lost", 0) == 0
        assert counts["gradient_error"] == counts["largest_error"] == 0
        assert metrics["bytes_sent"] < 0.75 * plain_metrics["bytes_sent"]  # with the states that the workers exchange


@pytest.mark.slow
def test_unbiased_filters_learn_nearly_the_same(unfiltered):
    found = learned(shoal.Filters(gradients="bfloat16", weights="bfloat16", zeros=True, key_caching=True))
    for (rows, loss, counts, _), (plain_rows, plain_loss, _, _) in zip(found, unfiltered, strict=True):
        assert rows != plain_rows
        assert loss == pytest.approx(plain_loss, abs=0.003)
        assert counts["gradient_error"] > 0
        assert counts["weight_bytes_saved"] > 0


def test_filters_of_one_table_leave_the_others_alone():
    def work(store):
        wide = store.table("wide", optimizer=shoal.SGD(lr=1.0))
        deep = store.table("deep", dim=3, optimizer=shoal.SGD(lr=1.0))
        for table in (wide, deep):
            table.push(KEYS, np.ones((600, table.dim), np.float32)).result()
        store.tick()
        assert (wide.pull(KEYS) == -1).all()
        assert (deep.pull(KEYS) == -1).all()
        return store.filter_metrics()

    with cluster(1, 2) as made:
        (counts,) = together(made.address, 1, work, filters={"deep": shoal.Filters(key_caching=True)})
    assert list(counts) == ["deep"]
    assert counts["deep"]["pushes"] == counts["deep"]["pulls"] == 2


def test_what_is_no_filter_is_refused_before_anything_is_joined():
    with pytest.raises(TypeError, match=r"filters are a shoal\.Filters"):
        shoal.connect("tcp://127.0.0.1:1", filters="zeros", timeout=5)
