"""Tables of integers, compared with dicts of Python's integers: in this process and on a cluster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from cluster_fakes import TIMEOUT
from cluster_standin import cluster
from paths import GOLDEN
from shoal.cluster.launch.local_cluster import running
from stores import KINDS, joined, opened, together
from tiers import rounds

LEAST, MOST = -(2**63), 2**63 - 1
EDGES = [0, 1, -1, LEAST, MOST, 2**31, 0x7FA00001, 0x7F800000 << 32, -(2**63) + 2**31]
numbers = st.sampled_from(EDGES) | st.integers(LEAST, MOST)
keys_of = st.sampled_from([0, 2**64 - 1, 7, 2**63]) | st.integers(0, 40)
pushes = st.lists(st.lists(st.tuples(keys_of, numbers, numbers), max_size=12), max_size=6)


def wrapped(number):
    """A number modulo 2^64, as int64 has it."""
    return (number + 2**63) % 2**64 - 2**63


def arrays(batch):
    keys = np.array([key for key, *_ in batch], np.uint64)
    return keys, np.array([row for _, *row in batch], np.int64).reshape(-1, 2)


def random_rows(n, dim, seed):
    random = np.random.default_rng(seed)
    rows = random.integers(LEAST, MOST, (n, dim), endpoint=True)
    return np.where(random.random((n, dim)) < 0.5, random.choice(EDGES, (n, dim)), rows)


@pytest.fixture(scope="module", params=KINDS)
def store(request):
    with opened(request.param, slots=16) as made:
        yield made


@pytest.fixture
def table(store, request):
    return store.table(request.node.name, dim=2, dtype="int64")


@settings(max_examples=rounds(25), deadline=None)
@given(pushes)
def test_sums_are_those_of_a_dict_modulo_2_to_the_64(store, given_pushes):
    table = store.table("property", dim=2, dtype="int64")
    table.erase(np.array(sorted({key for batch in given_pushes for key, *_ in batch}), np.uint64))
    expected = {}
    for number, batch in enumerate(given_pushes):
        for key, *row in batch:
            before = expected.get(key, [0, 0])
            expected[key] = [wrapped(a + b) for a, b in zip(before, row, strict=True)]
        keys, rows = arrays(batch)
        if number % 3 == 0:
            table.push(keys, rows).result()
        elif number % 3 == 1:
            got = table.push_pull(keys, rows).result()
            assert got.tolist() == [expected[key] for key in keys.tolist()]
        else:
            many = store.key_batch(keys)
            table.push_unique(many, many.sum(rows)).result()
    keys = np.array([*expected, 10**9], np.uint64)
    assert table.pull(keys).tolist() == [*expected.values(), [0, 0]]
    assert table.contains(keys).tolist() == [True] * len(expected) + [False]
    total = [wrapped(sum(column)) for column in zip([0, 0], *expected.values(), strict=True)]
    assert table.sum().tolist() == total
    if expected:
        found = {
            key: row for some, rows in table.items(3) for key, row in zip(some.tolist(), rows.tolist(), strict=True)
        }
        assert {key: found[key] for key in expected} == expected
    table.erase(keys)


def test_every_call_has_int64_and_its_bits(store, table):
    keys = np.array([5, 9, 0, 2**64 - 1], np.uint64)
    rows = random_rows(4, 2, 1)
    table.assign(keys, rows)
    out = np.empty((4, 2), np.int64)
    assert table.pull(keys, out=out) is out
    assert out.dtype == np.int64
    np.testing.assert_array_equal(out, rows)
    np.testing.assert_array_equal(table.state(keys)["w"], rows)
    batch = store.key_batch(np.tile(keys, 3))
    table.push_per_key(batch, np.tile(rows, (3, 1))).result()
    np.testing.assert_array_equal(table.pull_unique(batch)[batch.inverse[:4]], 4 * rows)
    np.testing.assert_array_equal(table.pull_async(keys).result(), 4 * rows)
    assert table.pull(keys[:0]).shape == (0, 2)
    assert table.optimizer == shoal.Add()
    assert table.stats().nonfinite_rows == 0
    assert table.erase(keys) == 4


def test_a_wide_row_is_added_in_place_and_read_in_one_pass(store):
    table = store.table("wide", dim=37, dtype="int64")
    keys = np.arange(300, dtype=np.uint64)
    rows = random_rows(300, 37, 2)
    for _ in range(3):
        table.push(keys, rows).result()
    np.testing.assert_array_equal(table.pull(keys), 3 * rows)


def test_norms_and_the_largest_rows_are_those_of_float64(table):
    keys = np.arange(4, dtype=np.uint64)
    table.assign(keys, np.array([[3, 4], [0, 0], [LEAST, 0], [-6, 8]], np.int64))
    assert table.count() == 3
    assert table.count(above=6) == 2
    top, norms = table.topk(2)
    assert (top.tolist(), norms.tolist()) == ([2, 3], [2.0**63, 10.0])
    assert table.norm(np.inf) == 2.0**63
    for call in (table.decay, table.shrink):
        with pytest.raises(ValueError, match=r"this table has int64: use apply\(\)"):
            call(0.5)


def test_wrong_types_are_refused_with_the_remedy_and_change_nothing(store, table):
    keys = np.arange(2, dtype=np.uint64)
    for wrong in (
        np.ones((2, 2), np.float32),
        np.ones((2, 2), np.int32),
        np.ones((2, 2), np.uint64),
        [[1.5, 1], [1, 1]],
    ):
        with pytest.raises(TypeError, match=r"takes amounts as int64, got .*: pass amounts.astype\(np.int64\)"):
            table.push(keys, wrong)
    with pytest.raises(ValueError, match=r"has dim 2, got amounts \(2, 3\) for 2 keys: pass int64\[2, 2\]"):
        table.push(keys, np.ones((2, 3), np.int64))
    with pytest.raises(TypeError, match="takes rows as int64, got float64"):
        table.assign(keys, np.ones((2, 2)))
    with pytest.raises(TypeError, match="out must be a int64 array, got float32"):
        table.pull(keys, out=np.empty((2, 2), np.float32))
    with pytest.raises(TypeError, match="takes grads as float32, got int64"):
        store.table("floats").push(keys, np.ones((2, 1), np.int64))
    assert len(table) == 0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"optimizer": shoal.SGD()}, r"its optimizer is Add\(\), not SGD"),
        ({"optimizer": shoal.Add(), "dtype": "float32"}, r"Add is for dtype='int64': choose SGD\(\)"),
        ({"dim": 2049}, "dim from 1 to 2048, got 2049"),
        ({"init": shoal.Constant(1.0)}, r"starts with shoal.Zeros\(\)"),
        ({"expire": shoal.MinNorm(0.5)}, "has no MinNorm: use TimeToLive"),
        ({"dtype": "int32"}, "float32, float16, bfloat16, int64, got 'int32'"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(how, message):
    with shoal.local() as store, pytest.raises(ValueError, match=message):
        store.table("t", **{"dtype": "int64"} | how)
    with pytest.raises(ValueError, match="takes no clip_value or clip_norm"):
        shoal.Add(clip_norm=1.0)


def test_rules_count_occurrences_and_clocks_as_ever():
    with shoal.local() as store:
        table = store.table("t", dtype="int64", admit=shoal.AfterCount(2), expire=shoal.TimeToLive(1))
        keys = np.array([7, 7, 9], np.uint64)
        table.push(keys, np.array([1, 2, 4])).result()
        assert table.pull(keys).ravel().tolist() == [3, 3, 0]
        for _ in range(3):
            store.tick()
        assert store.sweep().rows_dropped == 1


def test_dense_arrays_of_integers_are_added_to(store):
    counts = store.dense("dense", (3, 700), dtype="int64")
    amounts = random_rows(3, 700, 4)
    counts += amounts
    counts.push(amounts).result()
    assert counts.dtype == np.int64
    np.testing.assert_array_equal(np.asarray(counts), 2 * amounts)
    np.testing.assert_array_equal(counts[1:, 5:], 2 * amounts[1:, 5:])
    with pytest.raises(TypeError, match="takes grad as int64, got float32"):
        counts.push(amounts.astype(np.float32))
    counts.assign(amounts)
    np.testing.assert_array_equal(counts.pull(), amounts)


def test_functions_of_rows_get_int64_and_may_leave_any():
    def invert(keys, rows, state):
        assert (rows.dtype, state) == (np.int64, {})
        rows[:] = ~rows

    def least(keys, rows, state):
        return rows.min(axis=0)

    with shoal.local(slots=16) as store:
        table = store.table("t", dim=2, dtype="int64")
        keys, rows = np.arange(50, dtype=np.uint64), random_rows(50, 2, 5)
        table.push(keys, rows).result()
        assert table.apply(invert).result() == 50
        np.testing.assert_array_equal(table.pull(keys), ~rows)
        assert table.reduce(least, np.minimum).tolist() == (~rows).min(axis=0).tolist()
        assert table.stats().nonfinite_rows == 0


def test_checkpoints_and_their_deltas_keep_every_bit(tmp_path):
    keys, rows = np.arange(200, dtype=np.uint64), random_rows(200, 3, 6)
    with shoal.local(slots=16) as store:
        table = store.table("t", dim=3, dtype="int64")
        table.push(keys, rows).result()
        store.save(tmp_path / "full", track=True)
        table.push(keys[:9], rows[:9]).result()
        table.erase(keys[-3:])
        store.save(tmp_path / "delta", since=tmp_path / "full")
        digest = table.digest()
    for slots in (8, 64):
        with shoal.local(slots=slots) as other:
            other.load(tmp_path / "delta")
            table = other.tables["t"]
            assert (table.digest(), table.dtype) == (digest, "int64")
            np.testing.assert_array_equal(table.pull(keys[:9]), 2 * rows[:9])
    with cluster(2, 1, slots=16) as made, shoal.connect(made.address, timeout=TIMEOUT, threads=1) as other:
        other.load(tmp_path / "delta")
        table = other.tables["t"]
        assert table.digest() == digest
        np.testing.assert_array_equal(
            table.pull(keys), np.vstack([2 * rows[:9], rows[9:-3], np.zeros((3, 3), np.int64)])
        )


def test_a_checkpoint_of_int64_reads_as_it_was_written():
    with shoal.local(slots=8) as store:
        store.load(GOLDEN / "checkpoint-int64")
        table = store.tables["counts"]
        keys = np.array([0, 1, 7, 2**64 - 1, 9], np.uint64)
        assert table.pull(keys).tolist() == [[1, LEAST], [MOST, -1], [2**31, 0x7FA00001], [-(2**40), 6], [0, 0]]
        assert (table.digest(), table.stats().step) == ("e0431b479b7d86cba63a66e71f0238e7", 2)


def test_exports_and_parquet_files_refuse_integers(tmp_path):
    with shoal.local() as store:
        table = store.table("t", dtype="int64")
        floats = store.table("floats")
        with pytest.raises(ValueError, match=r"table 't' has int64, and exports have weights: name .*--table"):
            store.export(tmp_path / "e")
        store.export(tmp_path / "e", tables=[floats.name])
        from shoal.tools import convert

        with pytest.raises(ValueError, match=r"table 't' has int64, and these files have float32"):
            convert.write_parquet(table, tmp_path / "t.parquet")


@pytest.mark.parametrize("consistency", [shoal.BSP(), shoal.BSP(reduce="mean"), shoal.SSP(1), shoal.ASP()])
def test_workers_add_exactly_under_every_consistency(consistency):
    keys = np.arange(64, dtype=np.uint64)
    rows = [random_rows(64, 2, rank) for rank in range(3)]

    def work(store):
        table = store.table("t", dim=2, dtype="int64")
        for clock in range(2):
            table.push(keys[clock:], rows[store.rank][clock:]).result()
            store.tick()
        store.barrier()
        return table.pull(keys)

    with cluster(2, 2, slots=16) as made:
        found = together(made.address, 3, work, consistency=consistency)
    expected = sum(rows) * np.where(keys == 0, 1, 2)[:, None]
    np.testing.assert_array_equal(found, [expected] * 3)


def test_filters_of_a_table_of_integers_are_exact():
    lossy = shoal.Filters(key_caching=True, zeros=True, gradients="bfloat16", weights="float16", threshold=0.5)
    keys = np.arange(64, dtype=np.uint64)
    rows = random_rows(64, 2, 8)
    how = {"consistency": shoal.ASP(), "timeout": TIMEOUT, "threads": 1, "filters": lossy}
    with cluster(2, 1, slots=16) as made, shoal.connect(made.address, **how) as store:
        table = store.table("t", dim=2, dtype="int64")
        for _ in range(2):
            table.push(keys, rows).result()
        np.testing.assert_array_equal(table.pull(keys), 2 * rows)
        assert store.filter_metrics()["t"]["gradient_error"] == 0


def test_readers_see_integers():
    with cluster(1, 1, slots=16) as made, joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        table = store.table("t", dtype="int64")
        table.push(np.array([7]), np.array([LEAST])).result()
        with shoal.connect(made.address, mode="read", timeout=TIMEOUT, threads=1) as live:
            assert live.table("t").pull(np.array([7])).tolist() == [[LEAST]]


@pytest.mark.slow
def test_copies_take_over_with_every_count():
    keys, rows = np.arange(500, dtype=np.uint64), random_rows(500, 2, 9)
    with (
        running(2, replicas=1, slots=16) as made,
        shoal.connect(made.address, consistency=shoal.ASP(), workers=1, timeout=TIMEOUT) as store,
    ):
        table = store.table("t", dim=2, dtype="int64")
        table.push(keys, rows).result()
        made.servers[0].process.kill()
        table.push(keys, rows).result()
        np.testing.assert_array_equal(table.pull(keys), 2 * rows)
