"""What every kind of store promises: in this process, launched with processes of its own, connected to a cluster.

One store of each kind serves all tests here, each of which has a table of its own.
"""

from __future__ import annotations

import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT
from cluster_standin import cluster
from forks import in_child

KINDS = ("local", "launched", "connected")
KEYS = np.array([7, 3, 7, 0, 2**64 - 1], np.uint64)
NAN = np.full((1, 2), np.nan, np.float32)


def grads():
    return np.array([[1, 2], [3, 4], [3, 4], [4, 5], [5, 6]], np.float32)


@pytest.fixture(scope="module", params=KINDS)
def store(request, tmp_path_factory):
    roots = [tmp_path_factory.getbasetemp()]
    if request.param == "local":
        with shoal.local(threads=2) as one:
            yield one
    elif request.param == "launched":
        how = {"consistency": shoal.ASP(), "timeout": TIMEOUT, "storage_roots": roots}
        with shoal.launch(servers=2, server_threads=2, threads=2, **how) as one:
            yield one
    else:
        with (
            cluster(3, 1) as made,
            shoal.connect(made.address, threads=2, consistency=shoal.ASP(), timeout=TIMEOUT) as one,
        ):
            yield one


@pytest.fixture
def name(request):
    return re.sub(r"\W+", " ", request.node.name)


@pytest.fixture
def table(store, name):
    return store.table(name, dim=2, optimizer=shoal.SGD(lr=1.0))


@pytest.fixture
def filled(table):
    """A push of four keys, one of them twice."""
    table.push(KEYS, grads()).result()
    return table


def test_calls_come_after_others(store, table, name):
    ones = np.ones((5, 2), np.float32)
    keys = np.arange(5, dtype=np.uint64)
    dense = store.dense(f"{name} dense", shape=(3,), optimizer=shoal.SGD(lr=1.0))
    first = table.push(keys, ones)
    both = table.push_pull(keys, ones, after=first)
    pushed = dense.push(np.ones(3, np.float32), after=[first, both])
    assert table.pull_async(keys, after=pushed).result().tolist() == [[-2.0, -2.0]] * 5
    assert dense.push_pull(np.ones(3, np.float32), after=pushed).result().tolist() == [-2.0] * 3
    assert both.result().tolist() == [[-2.0, -2.0]] * 5
    for wrong in (7, [None], [both, first.result]):
        with pytest.raises(TypeError, match="after takes futures of push, pull_async and push_pull"):
            table.push(keys, ones, after=wrong)
    assert table.pull(keys).tolist() == [[-2.0, -2.0]] * 5


def test_pull_reads_what_push_made_for_any_keys(filled):
    np.testing.assert_array_equal(filled.pull(KEYS), [[-4, -6], [-3, -4], [-4, -6], [-4, -5], [-5, -6]])
    np.testing.assert_array_equal(filled.pull(KEYS.view(np.int64)), filled.pull(KEYS))
    assert not filled.pull(np.array([8], np.uint64)).any()
    out = np.empty((5, 2), np.float32)
    assert filled.pull(KEYS, out=out) is out
    assert len(filled) == 4


def test_handles_are_waited_for_in_any_order(table):
    pushes = [table.push(KEYS + np.uint64(10 * k), grads()) for k in range(20)]
    for pushed in reversed(pushes):
        assert pushed.result(TIMEOUT) is None
        assert pushed.done()
    pulls = [table.pull_async(KEYS + np.uint64(10 * k)) for k in range(20)]
    for pulled in reversed(pulls):
        np.testing.assert_array_equal(pulled.result(TIMEOUT)[0], [-4, -6])
        assert pulled.done()


def test_push_pull_reads_behind_the_push(filled):
    for _ in range(10):
        before = filled.pull(KEYS)
        after = filled.push_pull(KEYS, grads()).result()
        np.testing.assert_array_equal(after - before, [[-4, -6], [-3, -4], [-4, -6], [-4, -5], [-5, -6]])


def test_unique_rows_of_one_batch_serve_all_tables(store, filled, name):
    other = store.table(f"{name} other", dim=3, optimizer=shoal.SGD(lr=1.0))
    batch = store.key_batch(KEYS)
    other.push_unique(batch, np.ones((4, 3), np.float32)).result()
    other.push_unique(batch, np.ones((4, 3), np.float32), copy=False).result()
    assert np.all(other.pull_unique(batch) == -2)
    np.testing.assert_array_equal(filled.pull_unique(batch)[batch.inverse], filled.pull(KEYS))


def test_assign_erase_and_contains(filled):
    keys = KEYS[1:]
    filled.assign(keys, np.full((4, 2), 9, np.float32))
    assert np.all(filled.pull(keys) == 9)
    assert filled.erase(np.array([7, 7, 12345], np.uint64)) == 1
    assert filled.contains(np.array([7, 3, 7, 12345], np.uint64)).tolist() == [False, True, False, False]
    assert len(filled) == 3


def test_state_is_that_of_the_rule(store, name):
    table = store.table(name, dim=2, optimizer=shoal.FTRL(alpha=0.1, l1=0.0))
    table.push(KEYS, grads()).result()
    state = table.state(KEYS[:2])
    assert list(state) == ["z", "n"]
    np.testing.assert_array_equal(state["n"], [[16, 36], [9, 16]])


def test_items_len_and_stats_tell_of_all_rows(table):
    keys = np.arange(5000, dtype=np.uint64)
    table.push(keys, np.ones((5000, 2), np.float32)).result()
    pieces = list(table.items(batch_size=700))
    assert max(len(some) for some, _ in pieces) <= 700
    walked = np.concatenate([some for some, _ in pieces])
    assert np.all(np.diff(shoal.data.mix(walked)) > 0)
    np.testing.assert_array_equal(np.sort(walked), keys)
    assert all(np.all(rows == -1) for _, rows in pieces)
    stats = table.stats()
    assert (len(table), stats.rows, stats.rows_created, stats.keys_pushed) == (5000, 5000, 5000, 5000)
    assert 0 < stats.load <= 1 < stats.bytes_per_row
    assert table.stats().step == 1


def test_functions_are_answered_where_the_rows_are(filled):
    assert filled.sum().tolist() == [-16, -21]
    assert filled.norm(1) == 37
    assert filled.count(above=7.5) == 1
    keys, norms = filled.topk(2)
    assert keys.tolist() == [2**64 - 1, 7]
    np.testing.assert_allclose(norms, np.sqrt([61, 52]))
    filled.decay(0.5)
    assert filled.sum().tolist() == [-8, -10.5]


def test_the_rate_of_later_pushes_is_scaled(store, name):
    table = store.table(name, optimizer=shoal.Adagrad(lr=0.5, n0=1.0))
    slow = store.table(f"{name}-slow", optimizer=shoal.Adagrad(lr=0.25, n0=1.0))
    keys = np.arange(20, dtype=np.uint64)
    slopes = np.linspace(-1, 1, 20, dtype=np.float32)[:, None]
    for one in (table, slow):
        one.assign(keys, slopes)
    table.scale_rate(0.125)
    table.scale_rate(0.5)
    for one in (table, slow):
        one.push(keys, slopes).result()
        store.tick()
    assert table.digest() == slow.digest()
    table.scale_rate(1.0)
    table.push(keys, slopes).result()
    slow.push(keys, slopes).result()
    store.tick()
    assert table.digest() != slow.digest()
    for factor in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="the factor of a rate must be finite and above 0"):
            table.scale_rate(factor)
    with pytest.raises(ValueError, match="FTRL has no learning rate that can change"):
        store.table(f"{name}-ftrl", optimizer=shoal.FTRL()).scale_rate(0.5)


def test_rules_say_which_keys_have_rows(store, name):
    table = store.table(name, dim=2, optimizer=shoal.SGD(lr=1.0), admit=shoal.AfterCount(2), expire=shoal.TimeToLive(3))
    table.push(KEYS, grads()).result()  # 7 twice
    assert table.contains(KEYS).tolist() == [True, False, True, False, False]
    assert table.stats().refused == 3
    table.push(KEYS[1:2], grads()[1:2]).result()
    np.testing.assert_array_equal(table.pull(KEYS[:2]), [[-4, -6], [-3, -4]])
    for _ in range(4):
        store.tick()
    table.push(KEYS[:1], grads()[:1]).result()
    forecast = store.sweep(dry_run=True)
    assert (forecast.dry_run, forecast.rows_dropped, len(table)) == (True, 1, 2)
    assert store.sweep().rows_dropped == 1
    assert table.contains(KEYS[:2]).tolist() == [True, False]
    assert store.sweep().rows_dropped == 0


def test_a_table_goes_on_with_its_rules_where_it_was_saved(store, name, tmp_path):
    def make(name):
        return store.table(name, dim=2, optimizer=shoal.SGD(lr=1.0), admit=shoal.AfterCount(3), expire=RULES)

    table = make(name)
    keys = np.arange(200, dtype=np.uint64)
    table.push(np.repeat(keys, 2), np.ones((400, 2), np.float32)).result()
    store.save(tmp_path / "c", tables=[name])
    table.push(keys[:100], np.ones((100, 2), np.float32)).result()
    store.load(tmp_path / "c")
    assert len(table) == 0
    table.push(keys[100:], np.ones((100, 2), np.float32)).result()
    assert table.contains(keys).tolist() == [False] * 100 + [True] * 100


RULES = (shoal.DecayedScore(0.5, 0.1), shoal.MaxRows(10**6, keep="frequent"))


def test_a_name_has_one_set_of_rules(store, name):
    store.table(name, admit=shoal.AfterCount(2))
    with pytest.raises(ValueError, match=r"admit AfterCount\(n=2"):
        store.table(name)


def test_a_dense_array_lives_in_a_table(store, name):
    array = store.dense(name, (30, 100), optimizer=shoal.SGD(lr=1.0))
    array.push(np.full((30, 100), 2, np.float32)).result()
    assert np.all(array.pull() == -2)


def test_many_threads_use_one_store(table):
    def work(number):
        keys = np.arange(100 * number, 100 * number + 60, dtype=np.uint64)
        for times in range(1, 16):
            table.push(keys, np.ones((60, 2), np.float32)).result()
            assert np.all(table.pull(keys) == -times)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert len(table) == 360


def test_a_large_batch_comes_back_bit_for_bit(store, name, rng):
    table = store.table(name, dim=7, optimizer=shoal.SGD(lr=1.0))
    keys = rng.integers(0, 2**64, 50_000, np.uint64)
    rows = rng.standard_normal((50_000, 7)).astype(np.float32)
    table.assign(keys, rows)
    np.testing.assert_array_equal(table.pull(keys), rows)
    order = rng.permutation(50_000)
    np.testing.assert_array_equal(table.pull(keys[order]), rows[order])


def test_what_was_saved_is_loaded_wherever(store, filled, name, tmp_path):
    store.save(tmp_path, tables=[name])
    expected = filled.pull(KEYS)
    filled.push(KEYS, grads()).result()
    store.load(tmp_path)
    np.testing.assert_array_equal(filled.pull(KEYS), expected)
    assert (len(filled), filled.stats().step) == (4, 1)
    with shoal.local(slots=8) as other:
        other.load(tmp_path)
        np.testing.assert_array_equal(other.tables[name].pull(KEYS), expected)
        other.save(tmp_path / "other")
    filled.erase(KEYS)
    store.load(tmp_path / "other")
    np.testing.assert_array_equal(filled.pull(KEYS), expected)
    with pytest.raises(ValueError, match="no table 'of no name'"):
        store.save(tmp_path / "nothing", tables=["of no name"])


def test_one_worker_meets_nobody(store):
    assert (store.rank, store.num_workers) == (0, 1)
    assert store.consistency == shoal.ASP()
    before = store.clock
    store.tick()
    store.barrier()
    store.barrier(timeout=TIMEOUT)
    assert [store.meet("a"), store.meet("a")] == [frozenset()] * 2
    assert store.member.barriers["a"] == 2
    store.flush()
    assert store.counted_clock == store.clock == before + 1


def test_a_table_is_found_again_and_another_description_is_refused(store, table, name):
    assert store.table(name, dim=2, optimizer=shoal.SGD(lr=1.0)) is table
    assert store.tables[name] is table
    with pytest.raises(ValueError, match="dim 2 instead of 3"):
        store.table(name, dim=3, optimizer=shoal.SGD(lr=1.0))


BAD = {
    "keys of another kind": (lambda table: table.pull(np.zeros(2)), TypeError, "uint64"),
    "keys of two dimensions": (lambda table: table.pull(KEYS.reshape(1, -1)), ValueError, "one dimension"),
    "gradients of another kind": (lambda table: table.push(KEYS, np.zeros((5, 2))), TypeError, "float32"),
    "gradients of another shape": (lambda table: table.push(KEYS, grads()[1:]), ValueError, "dim 2"),
    "a place of another shape": (lambda table: table.pull(KEYS, out=grads()[1:]), ValueError, "out"),
    "one key twice": (lambda table: table.assign(KEYS, grads()), ValueError, "each key once"),
    "a weight that is none": (
        lambda table: table.assign(KEYS[:1], np.full((1, 2), np.nan, "f4")),
        ValueError,
        "finite",
    ),
    "an iteration by nothing": (lambda table: list(table.items(batch_size=0)), ValueError, "batch_size"),
}


@pytest.mark.parametrize(("call", "kind", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_and_changes_nothing(table, call, kind, words):
    with pytest.raises(kind, match=words):
        call(table)
    assert len(table) == table.stats().step == 0


def test_gradients_that_are_not_finite_leave_their_row_and_are_counted(filled):
    before = filled.pull(KEYS)
    filled.push(KEYS[3:], np.array([[np.nan, 1], [1, 1]], np.float32)).result()
    np.testing.assert_array_equal(filled.pull(KEYS)[:4], before[:4])
    assert filled.stats().nonfinite_rows == 1


def test_flush_waits_for_all_pushes(store, table):
    pushes = [table.push(KEYS, grads()) for _ in range(20)]
    store.flush(timeout=TIMEOUT)
    assert all(push.done() for push in pushes)
    assert table.stats().step == 20


def test_a_forked_child_is_told_whose_store_it_is(store, filled):
    def work():
        for call in (
            lambda: filled.pull(KEYS),
            lambda: filled.push(KEYS, grads()),
            store.tick,
            store.barrier,
            store.flush,
        ):
            with pytest.raises(shoal.errors.WrongProcessError, match="fork"):
                call()
        store.close()
        return "told"

    assert in_child(work) == "told"
    assert len(filled) == 4


def test_neither_a_store_nor_a_table_is_passed_to_another_process(store, table):
    for one in (store, table):
        with pytest.raises(TypeError, match="cannot be passed to another process"):
            pickle.dumps(one)


CLOSED = {
    "pull": lambda store, table, batch: table.pull(KEYS),
    "pull_async": lambda store, table, batch: table.pull_async(KEYS),
    "push": lambda store, table, batch: table.push(KEYS, grads()),
    "push_pull": lambda store, table, batch: table.push_pull(KEYS, grads()),
    "pull_unique": lambda store, table, batch: table.pull_unique(batch),
    "push_unique": lambda store, table, batch: table.push_unique(batch, np.ones((4, 2), np.float32)),
    "assign": lambda store, table, batch: table.assign(KEYS[1:], grads()[1:]),
    "erase": lambda store, table, batch: table.erase(KEYS),
    "contains": lambda store, table, batch: table.contains(KEYS),
    "state": lambda store, table, batch: table.state(KEYS),
    "items": lambda store, table, batch: list(table.items()),
    "len": lambda store, table, batch: len(table),
    "stats": lambda store, table, batch: table.stats(),
    "step": lambda store, table, batch: table.stats().step,
    "sum": lambda store, table, batch: table.sum(),
    "decay": lambda store, table, batch: table.decay(0.5),
    "scale_rate": lambda store, table, batch: table.scale_rate(0.5),
    "table": lambda store, table, batch: store.table("t"),
    "dense": lambda store, table, batch: store.dense("d", 3),
    "key_batch": lambda store, table, batch: store.key_batch(KEYS),
    "tick": lambda store, table, batch: store.tick(),
    "barrier": lambda store, table, batch: store.barrier(),
    "flush": lambda store, table, batch: store.flush(),
    "save": lambda store, table, batch: store.save("nowhere"),
    "load": lambda store, table, batch: store.load("nowhere"),
    "with": lambda store, table, batch: store.__enter__(),
}


# Behind all others: it closes the store.
def test_after_close_every_call_says_so(store, filled):
    batch = store.key_batch(KEYS)
    rows = filled.pull(KEYS)
    store.close()
    store.close()
    for name, call in CLOSED.items():
        print(name)
        with pytest.raises(shoal.errors.ClosedError, match="closed"):
            call(store, filled, batch)
    np.testing.assert_array_equal(rows[0], [-4, -6])
