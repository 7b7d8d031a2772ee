"""Caches over sockets: what a cluster's workers read, hold back and send."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

import shoal
from cluster_standin import cluster
from stores import together

KEYS = np.arange(400, dtype=np.uint64)
ONES = np.ones((400, 1), np.float32)
CACHE = shoal.Cache(rows=4000, staleness=3)


def alone(work, **how):
    how = {"consistency": shoal.SSP(6), "cache": CACHE} | how
    with cluster(2, 1) as made:
        return together(made.address, 1, work, **how)[0]


def table_of(store, **what):
    return store.table("counts", **{"optimizer": shoal.SGD(lr=1.0), **what})


@pytest.mark.combined(2)
@pytest.mark.parametrize("local_steps", [False, True])
@pytest.mark.parametrize("consistency", [shoal.SSP(6), shoal.ASP()])
@pytest.mark.parametrize("filters", [None, shoal.Filters(key_caching=True, zeros=True)])
def test_sums_are_exact_rows_never_go_back_and_no_push_is_later_than_its_bound(consistency, filters, local_steps):
    def work(store):
        table = table_of(store, dim=2)
        rng = np.random.default_rng(store.rank)
        own = np.zeros((40, 400))  # by clock
        seen = np.zeros((400, 2))
        for clock in range(40):
            keys = rng.choice(400, 150, replace=False)
            rows = table.pull(keys.astype(np.uint64))
            assert (rows >= seen[keys]).all()
            seen[keys] = rows
            must = own[: clock if local_steps else max(0, clock - 3)].sum(axis=0)
            assert (rows[:, store.rank] >= must[keys]).all()
            amounts = rng.integers(0, 4, 150)
            own[clock, keys] = amounts
            grads = np.zeros((150, 2), np.float32)
            grads[:, store.rank] = -amounts
            table.push(keys.astype(np.uint64), grads)
            store.tick()
        store.barrier()
        rows = table.pull(KEYS)
        assert rows[:, store.rank].tolist() == own.sum(axis=0).tolist()
        store.barrier()
        return rows, store.cache_metrics()["counts"]

    with cluster(2, 1) as made:
        (one, counts), (other, _) = together(
            made.address,
            2,
            work,
            consistency=consistency,
            cache=replace(CACHE, local_steps=local_steps),
            filters=filters,
        )
    assert (one == other).all()
    assert counts["hits"] > 0
    assert counts["sent"] < counts["added"]
    assert counts["held"] == 0


def test_rows_that_are_used_in_every_clock_travel_once_in_staleness_plus_one_clocks():
    def work(store):
        table = table_of(store)
        for _ in range(40):
            table.pull(KEYS)
            table.push(KEYS, ONES).result()
            store.tick()
        return store.cache_metrics()["counts"]

    counts = alone(work)
    assert (counts["fetched"], counts["sent"]) == (400 * 10, 400 * 10)
    assert counts["hits"] == 400 * 30


OPTIMIZERS = [
    shoal.SGD(lr=0.3),
    shoal.Adagrad(lr=0.3, clip_norm=2.0),
    shoal.RowWiseAdagrad(lr=0.3),
    shoal.FTRL(alpha=0.3, l1=0.01),
    shoal.GroupFTRL(alpha=0.3, l1=0.01, l21=0.01),
]


def learn(store, optimizer, *, others=False):
    """Pull weights towards numbers of their keys, for 24 clocks; return what was pulled and the state in the end."""
    table = store.table("learned", dim=3, optimizer=optimizer, init=shoal.Uniform(0.1, seed=1))
    rng = np.random.default_rng(store.rank if others else 0)
    pulled = []
    for _ in range(24):
        keys = rng.choice(400, 120, replace=False).astype(np.uint64)
        pulled.append(table.pull(keys))
        wanted = np.sin(keys[:, None] * np.arange(1.0, 4.0))
        table.push(keys, (pulled[-1] - wanted).astype(np.float32))
        store.tick()
    store.barrier()
    return pulled, table.state(KEYS), table.pull(KEYS)


@pytest.mark.combined
@pytest.mark.parametrize("filters", [None, shoal.Filters(gradients="bfloat16", weights="bfloat16")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.rule)
def test_one_worker_with_local_steps_learns_what_it_learns_without_servers(optimizer, filters):
    with shoal.local(threads=1) as store:
        pulled, state, weights = learn(store, optimizer)
    near, near_state, near_weights = alone(lambda store: learn(store, optimizer), filters=filters)
    bound = 1e-4 if filters is None else 0.1
    for ours, theirs in zip(near, pulled, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=bound)
    np.testing.assert_allclose(near_weights, weights, atol=bound)
    for name, column in state.items():
        np.testing.assert_allclose(near_state[name], column, atol=bound, rtol=bound)


def test_several_workers_with_local_steps_learn_what_they_learn_without_a_cache():
    def error(**how):
        with cluster(2, 1) as made:
            found = together(
                made.address, 2, lambda store: learn(store, OPTIMIZERS[3], others=True), consistency=shoal.SSP(6), **how
            )
        return np.abs(found[0][2] - np.sin(KEYS[:, None] * np.arange(1.0, 4.0))).mean()

    plain, cached = error(), error(cache=CACHE)
    assert cached < 1.05 * plain


@pytest.mark.parametrize(
    "optimizer", [shoal.Momentum(), shoal.Adam(), shoal.SGD(schedule=shoal.schedules.Cosine(100))], ids=str
)
def test_optimizers_whose_steps_do_not_add_up_get_sums_of_gradients(optimizer):
    assert not CACHE.makes_steps(optimizer, 3)
    assert CACHE.makes_steps(shoal.FTRL(), 3)
    assert not CACHE.makes_steps(shoal.FTRL(), 3000)  # too long for a message
    _, _, weights = alone(lambda store: learn(store, optimizer))
    assert np.isfinite(weights).all()


def test_a_gradient_that_is_not_finite_stays_out_of_rows_and_copies():
    def work(store):
        table = table_of(store)
        table.pull(KEYS)
        table.push(KEYS, np.full((400, 1), np.nan, np.float32))
        table.push(KEYS, -ONES)
        seen = table.pull(KEYS)
        store.flush()
        assert store.cache_metrics()["counts"]["dropped"] == 400
        return seen.sum(), table.pull(KEYS[:5]).sum()

    assert alone(work) == (400, 5)


def test_calls_are_done_without_anyone_asking_for_them():
    def work(store):
        table = table_of(store)
        done = [threading.Event() for _ in range(3)]
        some = [KEYS, KEYS[:300], KEYS[100:]]  # the second and the third wait for what the first one fetches
        for event, keys in zip(done, some, strict=True):
            table.pull_async(keys).add_done_callback(lambda _, event=event: event.set())
        assert all(event.wait(60) for event in done)
        push = table.push(KEYS, -ONES)  # held back
        assert push.done()
        pulls = [table.pull_async(keys) for keys in some]
        assert all(pull.done() for pull in pulls)
        assert [pull.result().sum() for pull in pulls] == [400, 300, 300]
        store.flush()
        return store.cache_metrics()["counts"]

    counts = alone(work)
    assert (counts["fetched"], counts["hits"]) == (400, 1600)


def test_bsp_has_the_same_bits_with_a_cache():
    def work(store):
        table = table_of(store, optimizer=shoal.FTRL(l1=0.1))
        rng = np.random.default_rng(store.rank)
        for _ in range(8):
            table.pull(KEYS)
            table.push(KEYS, rng.normal(size=(400, 1)).astype(np.float32))
            store.tick()
        assert store.cache_metrics() == {}
        return table.digest()

    found = []
    for cache in (None, CACHE):
        with cluster(2, 1) as made:
            found.append(together(made.address, 2, work, cache=cache))
    assert found[0] == found[1]


def test_reads_other_than_pulls_saves_and_small_calls_include_what_was_held_back(tmp_path):
    def held(store):
        return store.cache_metrics()["counts"]["held"]

    def work(store):
        table = table_of(store)

        def push():
            table.pull(KEYS)
            table.push(KEYS, -ONES)
            assert held(store) == 400

        push()
        assert len(table) == 400
        assert held(store) == 0
        push()
        assert table.sum() == 800
        push()
        assert table.state(KEYS)["w"].sum() == 1200
        push()
        assert table.pull(KEYS[:5]).sum() == 20  # goes to the servers, and sends these five
        assert held(store) == 395
        push_pulled = table.push_pull(KEYS, -ONES).result()
        assert push_pulled.sum() == 2000
        push()
        table.assign(KEYS, 7 * ONES)
        assert (table.pull(KEYS) == 7).all()
        push()
        assert table.erase(KEYS[:100]) == 100
        assert table.pull(KEYS)[:100].sum() == 0
        table.push(KEYS, -ONES)
        table.decay(0.5)
        assert table.pull(KEYS)[300] == 4.5
        with pytest.raises(ValueError, match="the cache of this worker makes the steps of its rows"):
            table.scale_rate(0.5)
        table.push(KEYS, -ONES, after=table.pull_async(KEYS[:5]))
        assert held(store) == 0
        assert table.push(KEYS[:100], -ONES[:100]).result() is None
        assert table.pull_async(KEYS, after=table.push(KEYS, -ONES)).result()[300] == 6.5
        push()
        store.save(tmp_path / "saved")
        push()
        store.load(tmp_path / "saved")
        return table.pull(KEYS)[300]

    assert alone(work) == 7.5


def test_what_is_held_back_leaves_with_a_worker_that_closes_its_store():
    def work(store):
        table = table_of(store)
        table.pull(KEYS)
        table.push(KEYS, -ONES)

    with cluster(2, 1) as made:
        together(made.address, 1, work, consistency=shoal.ASP(), cache=CACHE)
        assert together(made.address, 1, lambda store: table_of(store).sum()[0], consistency=shoal.ASP()) == [400]


def test_flush_sends_what_is_held_back():
    data = [shoal.Batch(np.ones(50, np.float32), np.arange(51), KEYS[:50], None) for _ in range(4)]

    def work(store):
        table = table_of(store)
        for batch in data:
            table.pull(batch.keys)
            table.push(batch.keys, -ONES[:50])
            store.tick()
        store.flush()
        return store.cache_metrics()["counts"]["held"], table.pull(KEYS[:50]).sum()

    assert alone(work) == (0, 200)


def test_tables_that_count_occurrences_get_all_of_them():
    def work(store):
        table = table_of(store, admit=shoal.AfterCount(4))
        twice = np.concatenate([KEYS, KEYS])
        table.pull(KEYS)
        for clock in range(2):
            table.push(twice, np.ones((800, 1), np.float32))
            assert len(table) == (0 if clock == 0 else 400)
            table.pull(KEYS)
            store.tick()
        return True

    assert alone(work)


def test_tables_of_integers_and_tables_that_are_not_named_have_no_cache():
    def work(store):
        store.table("plain", optimizer=shoal.SGD(lr=1.0))
        store.table("cached", optimizer=shoal.SGD(lr=1.0))
        store.table("whole", optimizer=shoal.Add(), dtype="int64")
        return sorted(store.cache_metrics())

    assert alone(work, cache={"cached": CACHE, "whole": CACHE}) == ["cached"]


def test_a_cache_that_makes_no_sense_is_refused_before_anything_is_connected():
    with pytest.raises(ValueError, match="holds gradients back for longer"):
        shoal.connect("tcp://127.0.0.1:1", consistency=shoal.SSP(2), cache=CACHE, timeout=1)
    with pytest.raises(TypeError, match=r"cache is a shoal\.Cache, or one for each table's name, got 5"):
        shoal.connect("tcp://127.0.0.1:1", consistency=shoal.SSP(9), cache=5, timeout=1)
    with pytest.raises(ValueError, match="cache describes a worker"):
        shoal.connect("tcp://127.0.0.1:1", mode="read", cache=CACHE)
