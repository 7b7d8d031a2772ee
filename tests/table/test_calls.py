"""A table: what pull, push, assign, erase, contains, state and items promise."""

from __future__ import annotations

import numpy as np
import pytest

import shoal
from oracle.hashing import LAST_KEY, keys_of, mix, neighbours, one_per_slot, one_slot
from stores import KINDS, opened

EDGES = np.array([0, LAST_KEY, 1, 2**63, 2**63 - 1, LAST_KEY - 1], np.uint64)
NONE = np.empty(0, np.uint64)


@pytest.fixture(params=KINDS)
def store(request):
    with opened(request.param, slots=16) as one:
        yield one


def sgd(store, dim=2, name="t", init=None, **more):
    """Return a table whose rows are minus the sum of their gradients, exactly for small integers."""
    return store.table(name, dim=dim, optimizer=shoal.SGD(lr=1.0), init=init or shoal.Zeros(), **more)


def numbers(n, dim=2):
    """Different small integers."""
    return np.arange(1, n * dim + 1, dtype=np.float32).reshape(n, dim)


def test_an_unseen_key_reads_its_initial_row_and_is_not_created(store):
    table = sgd(store, init=shoal.Constant(0.5))
    np.testing.assert_array_equal(table.pull(EDGES), np.full((6, 2), 0.5))
    assert len(table) == 0
    assert not table.contains(EDGES).any()
    assert table.stats().rows == 0


def test_push_creates_and_every_key_of_64_bits_is_legal(store):
    table = sgd(store)
    table.push(EDGES, numbers(6)).result()
    np.testing.assert_array_equal(table.pull(EDGES), -numbers(6))
    assert len(table) == 6
    assert table.contains(EDGES).all()


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 17, 64, 385, 4096])
def test_rows_of_every_width_come_back(store, dim, rng):
    table = sgd(store, dim=dim)
    keys = np.unique(rng.integers(0, 2**64, 300, np.uint64))
    rows = rng.standard_normal((len(keys), dim)).astype(np.float32)
    table.push(keys, rows).result()
    np.testing.assert_array_equal(table.pull(keys), -rows)
    found = dict(zip(*(a.tolist() for a in collect(table)), strict=True))
    assert set(found) == set(keys.tolist())
    assert all(found[k] == (-row).tolist() for k, row in zip(keys.tolist(), rows, strict=True))


def collect(table, batch_size=65536):
    parts = list(table.items(batch_size=batch_size))
    keys = np.concatenate([k for k, _ in parts]) if parts else NONE
    return keys, np.concatenate([r for _, r in parts]) if parts else np.empty((0, table.dim), np.float32)


def test_int64_keys_are_taken_bit_for_bit(store):
    table = sgd(store)
    signed = np.array([-1, -(2**63), 5, 0], np.int64)
    table.push(signed, numbers(4)).result()
    np.testing.assert_array_equal(table.pull(np.array([LAST_KEY, 2**63, 5, 0], np.uint64)), -numbers(4))
    np.testing.assert_array_equal(table.pull(signed), -numbers(4))
    assert table.contains(signed).all()
    assert table.erase(signed) == 4


def test_duplicates_in_a_pull_read_the_same_row_each_time(store):
    table = sgd(store)
    table.push(np.array([7, 8], np.uint64), numbers(2)).result()
    rows = table.pull(np.array([8, 7, 8, 9, 8], np.uint64))
    np.testing.assert_array_equal(rows, [[-3, -4], [-1, -2], [-3, -4], [0, 0], [-3, -4]])


def test_duplicates_in_a_push_are_one_step(store):
    table = sgd(store)
    table.push(np.array([7, 8, 7], np.uint64), numbers(3)).result()
    np.testing.assert_array_equal(table.pull(np.array([7, 8], np.uint64)), [[-6, -8], [-3, -4]])
    assert len(table) == 2


def test_the_sum_of_duplicates_is_rounded_once(store):
    table = sgd(store, dim=1)
    grads = np.array([1, 2**-25, 2**-25, 2**-25, 2**-25], np.float32)
    table.push(np.full(5, 3, np.uint64), grads).result()
    assert table.pull(np.array([3], np.uint64))[0, 0] == -np.float32(1 + 2**-23)


def test_a_table_of_dim_one_takes_flat_gradients(store):
    table = sgd(store, dim=1)
    keys = np.array([1, 2], np.uint64)
    table.push(keys, np.array([1, 2], np.float32)).result()
    table.push(keys, np.array([[1], [2]], np.float32)).result()
    np.testing.assert_array_equal(table.pull(keys), [[-2], [-4]])
    assert table.pull(keys).shape == (2, 1)


def test_empty_batches_are_legal_everywhere(store):
    table = sgd(store)
    assert table.pull(NONE).shape == (0, 2)
    assert table.pull(NONE).dtype == np.float32
    table.push(NONE, np.empty((0, 2), np.float32)).result()
    table.assign(NONE, np.empty((0, 2), np.float32))
    assert table.erase(NONE) == 0
    assert table.contains(NONE).shape == (0,)
    assert table.state(NONE)["w"].shape == (0, 2)
    assert list(table.items()) == []
    assert len(table) == 0


def test_pull_fills_the_array_it_is_given_and_returns_it(store):
    table = sgd(store, init=shoal.Constant(2.0))
    out = np.zeros((3, 2), np.float32)
    assert table.pull(np.array([1, 2, 3], np.uint64), out=out) is out
    assert np.all(out == 2)


def test_assign_creates_and_overwrites(store):
    table = sgd(store)
    table.push(EDGES[:3], numbers(3)).result()
    table.assign(EDGES, 10 * numbers(6))
    np.testing.assert_array_equal(table.pull(EDGES), 10 * numbers(6))
    assert len(table) == 6
    assert table.stats().step == 1  # an assignment is no step


@pytest.mark.parametrize(
    "optimizer",
    [shoal.FTRL(l1=0.3, l2=0.2), shoal.GroupFTRL(l1=0.1, l21=0.2), shoal.Adagrad(), shoal.Adam(), shoal.Momentum()],
    ids=lambda x: type(x).__name__,
)
def test_assign_is_read_back_under_every_optimizer(store, optimizer, rng):
    table = store.table("t", dim=3, optimizer=optimizer)
    keys = np.arange(50, dtype=np.uint64)
    for _ in range(3):  # fresh rows, then rows with a history
        rows = rng.standard_normal((50, 3)).astype(np.float32)
        rows[::7] = 0
        table.assign(keys, rows)
        np.testing.assert_allclose(table.pull(keys), rows, rtol=1e-5, atol=1e-6)
        assert np.all(table.pull(keys)[::7] == 0)
        table.push(keys, rng.standard_normal((50, 3)).astype(np.float32)).result()


def test_assign_refuses_a_key_given_twice(store):
    table = sgd(store)
    with pytest.raises(ValueError, match=r"(?i)duplicate|twice|unique|once"):
        table.assign(np.array([1, 2, 1], np.uint64), numbers(3))
    assert len(table) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_assign_refuses_a_row_that_is_not_finite(store, bad):
    table = sgd(store)
    rows = numbers(3)
    rows[1, 1] = bad
    with pytest.raises(ValueError, match="finite"):
        table.assign(np.array([1, 2, 3], np.uint64), rows)
    assert len(table) == 0


def test_room_for_rows_changes_no_row(store, rng):
    keys = rng.integers(0, 2**64, 3000, np.uint64)
    tables = [sgd(store, name=name) for name in ("reserved", "grown")]
    tables[0].reserve(len(keys))
    for begin in range(0, len(keys), 500):
        for table in tables:
            table.push(keys[begin : begin + 500], numbers(500)).result()
    assert len(tables[0]) == len(np.unique(keys))
    assert tables[0].digest() == tables[1].digest()
    with pytest.raises(ValueError, match="rows is -1: pass the number of rows"):
        tables[0].reserve(-1)


@pytest.mark.parametrize("dim", [1, 8])
def test_a_table_with_room_does_not_grow(dim, rng):
    keys = rng.integers(0, 2**64, 400_000, np.uint64)
    with shoal.local(slots=64, threads=1) as store:
        table = store.table("t", dim=dim, optimizer=shoal.SGD(lr=1.0))
        empty = table.stats().bytes
        table.reserve(len(keys))
        assert len(table) == 0
        before = table.stats().bytes
        assert before > empty + len(keys) * 4 * dim
        for begin in range(0, len(keys), 50_000):
            table.push(keys[begin : begin + 50_000], np.ones((50_000, dim), np.float32))
            assert table.stats().bytes <= 1.02 * before  # one of 64 slots may have more rows than expected
        table.reserve(10)  # there is room already
        assert table.stats().bytes <= 1.02 * before


def test_room_for_more_rows_than_memory_is_refused():
    with shoal.local(slots=16, threads=1) as store:
        table = store.table("t", dim=64)
        before = table.stats().bytes
        with pytest.raises(ValueError, match=r"room for 1,000,\d+,\d+ rows takes .* GiB are free: expect fewer rows"):
            table.reserve(1_000_000_000)
        assert table.stats().bytes == before


def test_room_beyond_the_memory_budget_is_refused(rng):
    with shoal.local(slots=16, threads=1, memory=4 << 20) as store:
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        before = table.stats().bytes
        with pytest.raises(shoal.MemoryBudgetExceededError):
            table.reserve(10_000_000)
        assert table.stats().bytes == before
        table.push(rng.integers(0, 2**64, 100, np.uint64), np.ones((100, 1), np.float32))
        assert len(table) == 100


def test_erase_counts_what_was_there_and_forgets_it(store):
    table = sgd(store)
    table.push(EDGES, numbers(6)).result()
    assert table.erase(np.array([0, 0, 99, LAST_KEY], np.uint64)) == 2
    assert table.erase(np.array([0], np.uint64)) == 0
    assert len(table) == 4
    np.testing.assert_array_equal(table.contains(EDGES), [False, False, True, True, True, True])
    np.testing.assert_array_equal(table.pull(EDGES[:2]), np.zeros((2, 2)))
    np.testing.assert_array_equal(table.pull(EDGES[2:]), -numbers(6)[2:])
    table.push(EDGES[:1], np.ones((1, 2), np.float32)).result()
    np.testing.assert_array_equal(table.pull(EDGES[:1]), [[-1, -1]])


def test_erase_forgets_the_state_too(store):
    table = store.table("t", optimizer=shoal.Adagrad(lr=1.0))
    key = np.array([4], np.uint64)
    table.push(key, np.ones(1, np.float32)).result()
    table.erase(key)
    table.push(key, np.ones(1, np.float32)).result()
    assert table.state(key)["n"][0, 0] == 1


def test_contains_answers_each_key_in_the_order_asked(store):
    table = sgd(store)
    table.push(np.array([3, 5], np.uint64), numbers(2)).result()
    got = table.contains(np.array([5, 4, 3, 5, 0], np.uint64))
    assert got.dtype == np.bool_
    np.testing.assert_array_equal(got, [True, False, True, True, False])


STATES = {
    shoal.SGD(): {"w": 3},
    shoal.Momentum(): {"w": 3, "v": 3},
    shoal.Adagrad(): {"w": 3, "n": 3},
    shoal.RowWiseAdagrad(): {"w": 3, "m": 1},
    shoal.FTRL(): {"z": 3, "n": 3},
    shoal.GroupFTRL(): {"z": 3, "n": 3},
    shoal.Adam(): {"w": 3, "m": 3, "v": 3},
    shoal.Adam(per_row_step=True): {"w": 3, "m": 3, "v": 3, "t": 1},
    shoal.AdamW(): {"w": 3, "m": 3, "v": 3},
}


@pytest.mark.combined
@pytest.mark.parametrize(("optimizer", "columns"), STATES.items(), ids=lambda x: type(x).__name__)
def test_state_names_the_columns_of_the_rule(store, optimizer, columns, rng):
    table = store.table("t", dim=3, optimizer=optimizer)
    keys = np.array([5, 6, 7, 6], np.uint64)
    table.push(keys[:3], rng.standard_normal((3, 3)).astype(np.float32)).result()
    state = table.state(keys)
    assert {name: column.shape for name, column in state.items()} == {n: (4, wide) for n, wide in columns.items()}
    assert all(column.dtype == np.float32 for column in state.values())
    for column in state.values():
        np.testing.assert_array_equal(column[1], column[3])
    if "w" in state:
        np.testing.assert_array_equal(state["w"], table.pull(keys))


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [(one, "float32") for one in STATES] + [(shoal.RowWiseAdagrad(), "bfloat16"), (shoal.Adam(), "float16")],
    ids=lambda x: x if isinstance(x, str) else repr(x),
)
def test_rows_restored_with_their_state_go_on_alike(optimizer, dtype, rng):
    how = {"dim": 3, "optimizer": optimizer, "dtype": dtype, "init": shoal.Uniform(0.1, seed=1)}
    how |= {"admit": shoal.AfterCount(1), "expire": shoal.TimeToLive(9)}
    keys = np.unique(rng.integers(0, 2**64, 300, np.uint64))
    grads = rng.standard_normal((2, len(keys), 3)).astype(np.float32)
    with shoal.local(slots=16, threads=1) as store, shoal.local(slots=4, threads=1) as other:
        table, again = store.table("t", **how), other.table("t", **how)
        table.push(keys, grads[0]).result()
        again.restore(keys, table.state(keys), step=table.stats().step)
        for one in (table, again):
            one.push(keys, grads[1]).result()
        assert again.digest() == table.digest()


def test_a_restore_that_does_not_fit_changes_nothing(request, store):
    kind = request.node.callspec.params["store"]
    table = store.table("t", dim=2, optimizer=shoal.Adagrad())
    state = {"w": numbers(2), "n": numbers(2)}
    if kind != "local":
        with pytest.raises(ValueError, match="are on servers"):
            table.restore(EDGES[:2], state)
        return
    table.restore(EDGES[:2], state)
    before = table.digest()
    for keys, wrong, message in [
        (EDGES[1:3], state, "occurs twice or has a row"),
        (EDGES[[4, 4]], state, "occurs twice or has a row"),
        (EDGES[3:5], {"w": numbers(2)}, "the columns w, n, got w"),
        (EDGES[3:5], state | {"m": numbers(2)}, "the columns w, n, got w, n, m"),
        (EDGES[3:5], state | {"n": numbers(3)}, r"'n' of table 't' is float32\[2, 2\], got float32\[3, 2\]"),
        (EDGES[3:5], state | {"n": numbers(2).astype(np.float64)}, "got float64"),
        (EDGES[3:5], state | {"w": numbers(2) * np.float32(np.inf)}, "table 't': a weight is not finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            table.restore(keys, wrong)
    assert table.digest() == before
    with pytest.raises(ValueError, match="use assign"):
        store.table("n", dtype="int64").restore(EDGES[:1], {"w": np.zeros((1, 1), np.int64)})


@pytest.mark.parametrize("batch_size", [1, 7, 64, 65536])
def test_items_walk_every_row_once_in_hash_order(store, batch_size, rng):
    table = sgd(store)
    keys = np.unique(rng.integers(0, 2**64, 500, np.uint64))
    rows = rng.standard_normal((len(keys), 2)).astype(np.float32)
    table.push(keys, rows).result()
    sizes = [len(k) for k, _ in table.items(batch_size=batch_size)]
    assert max(sizes) <= batch_size
    got_keys, got_rows = collect(table, batch_size)
    assert got_keys.dtype == np.uint64
    hashes = [mix(int(k)) for k in got_keys]
    assert hashes == sorted(hashes)
    assert set(got_keys.tolist()) == set(keys.tolist())
    np.testing.assert_array_equal(got_rows, table.pull(got_keys))


def test_items_survive_pushes_between_two_batches(store, rng):
    table = sgd(store)
    keys = np.unique(rng.integers(0, 2**64, 1000, np.uint64))
    table.push(keys, np.ones((len(keys), 2), np.float32)).result()
    seen = []
    for some, _ in table.items(batch_size=50):  # noqa: PERF102
        seen.extend(some.tolist())
        table.push(rng.integers(0, 2**64, 200, np.uint64), np.ones((200, 2), np.float32)).result()
    assert set(keys.tolist()) <= set(seen)
    assert len(seen) == len(set(seen))


def test_items_refuse_a_batch_size_of_nothing(store):
    table = sgd(store)
    with pytest.raises(ValueError, match="0"):
        list(table.items(batch_size=0))


ADVERSARIAL = {
    "consecutive hashes": neighbours(3000),
    "the highest hashes": keys_of(2**64 - 1 - i for i in range(3000)),
    "the lowest hashes": keys_of(range(3000)),
    "one slot": one_slot(3000),
    "the border of each slot": np.unique(np.concatenate([one_per_slot(4096), one_per_slot(4096) - np.uint64(1)])),
    "consecutive keys": np.arange(3000, dtype=np.uint64),
    "multiples of a power of two": np.arange(3000, dtype=np.uint64) << np.uint64(48),
}


@pytest.mark.parametrize("keys", ADVERSARIAL.values(), ids=ADVERSARIAL.keys())
@pytest.mark.parametrize("dim", [1, 3])
def test_keys_that_meet_in_one_place_are_still_kept_apart(keys, dim, rng):
    with shoal.local(threads=2, slots=64) as store:
        table = sgd(store, dim=dim)
        rows = rng.standard_normal((len(keys), dim)).astype(np.float32)
        order = rng.permutation(len(keys))
        for part in np.array_split(order, 7):
            table.push(keys[part], rows[part]).result()
            assert table.shard.verify() == ""
        np.testing.assert_array_equal(table.pull(keys), -rows)
        assert len(table) == len(keys)
        gone = order[::2]
        assert table.erase(keys[gone]) == len(gone)
        assert table.shard.verify() == ""
        kept = order[1::2]
        np.testing.assert_array_equal(table.pull(keys[kept]), -rows[kept])
        assert not table.contains(keys[gone]).any()
        assert np.all(table.pull(keys[gone]) == 0)
        assert sorted(collect(table)[0].tolist()) == sorted(keys[kept].tolist())
        table.push(keys[gone], rows[gone]).result()
        np.testing.assert_array_equal(table.pull(keys), -rows)


def test_stats_count_what_happened(store):
    table = sgd(store)
    empty = table.stats()
    assert (empty.rows, empty.pulls, empty.pushes, empty.nonfinite_rows) == (0, 0, 0, 0)
    keys = np.array([1, 2, 1], np.uint64)
    table.push(keys, numbers(3)).result()
    table.pull(keys)
    table.pull(keys)
    stats = table.stats()
    assert stats.rows == 2
    assert 2 <= stats.pulls <= 4  # each of two data loops counts what concerns it
    assert 1 <= stats.pushes <= 2
    assert stats.keys_pulled in (4, 6)  # before or after duplicates are dropped
    assert stats.keys_pushed in (2, 3)
    assert stats.bytes > 0
    assert 0 < stats.load <= 1
    assert stats.bytes_per_row == pytest.approx(stats.bytes / stats.rows)


def test_tables_of_one_store_do_not_mix(store):
    one, two = sgd(store, name="one"), sgd(store, name="two")
    one.push(EDGES, numbers(6)).result()
    assert len(two) == 0
    two.push(EDGES[:1], np.ones((1, 2), np.float32)).result()
    np.testing.assert_array_equal(one.pull(EDGES), -numbers(6))
    assert one.erase(EDGES) == 6
    assert len(two) == 1


@pytest.mark.parametrize(
    "optimizer",
    [shoal.FTRL(l1=0.1), shoal.Adagrad(), shoal.RowWiseAdagrad(), shoal.Adam(), shoal.GroupFTRL(l21=0.1)],
    ids=lambda x: type(x).__name__,
)
def test_neither_threads_nor_slots_change_a_bit(optimizer, rng):
    batches = []
    for _ in range(6):
        keys = rng.integers(0, 2000, 1500).astype(np.uint64)
        batches.append((keys, rng.standard_normal((1500, 3)).astype(np.float32)))
    pool = np.arange(2000, dtype=np.uint64)

    def bits(threads, slots):
        with shoal.local(threads=threads, slots=slots) as store:
            table = store.table("t", dim=3, optimizer=optimizer, init=shoal.Uniform(0.1), seed=9)
            for keys, grads in batches:
                table.push(keys, grads).result()
            items = collect(table)
            return [table.pull(pool), *table.state(pool).values(), *items]

    first = bits(1, 2)
    for threads, slots in ((2, 2), (1, 16), (4, 64), (2, 1024), (1, 4096), (4, 16384)):
        for a, b in zip(first, bits(threads, slots), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_hundred_thousand_rows_arrive_in_one_push(rng):
    with shoal.local(threads=2) as store:
        table = sgd(store, dim=4)
        keys = rng.integers(0, 2**64, 100_000, np.uint64)
        keys[50_000:60_000] = keys[:10_000]
        grads = rng.integers(-8, 8, (100_000, 4)).astype(np.float32)
        table.push(keys, grads).result()
        unique, inverse = np.unique(keys, return_inverse=True)
        total = np.zeros((len(unique), 4))
        np.add.at(total, inverse, grads)
        np.testing.assert_array_equal(table.pull(unique), -total)
        np.testing.assert_array_equal(table.pull(keys), -total[inverse])
        assert len(table) == len(unique)


class PullRecorder:
    """A reader that records which calls a table makes."""

    is_remote = False

    def __init__(self, reader):
        self._reader = reader
        self.calls = []

    def pull(self, batch, rows, *more):
        self.calls.append("pull")
        return self._reader.pull(batch, rows, *more)

    def pull_per_key(self, batch, rows, *more):
        self.calls.append("pull_per_key")
        return self._reader.pull_per_key(batch, rows, *more)


@pytest.mark.parametrize(
    ("dim", "repeated", "call"),
    [(1, 0, "pull"), (31, 0, "pull"), (32, 0, "pull_per_key"), (33, 100, "pull_per_key"), (64, 101, "pull")],
)
def test_a_pull_of_wide_rows_with_few_duplicates_needs_no_buffer(dim, repeated, call):
    keys = np.arange(600, dtype=np.uint64)
    keys[600 - repeated :] = keys[:repeated]
    keys = np.random.default_rng(1).permutation(keys)
    with shoal.local(slots=16, threads=2) as store:
        table = store.table("t", dim=dim, init=shoal.Uniform(0.5, seed=3))
        batch = table.key_batch(keys)
        want = batch.expand(table.pull_unique(batch))
        recorder = PullRecorder(table.reader)
        table.replace_shard(recorder)
        np.testing.assert_array_equal(table.pull(keys), want)
        assert recorder.calls == [call]


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (np.float32, "float32"),
        (np.dtype("<f2"), "float16"),
        ("f4", "float32"),
        ("bfloat16", "bfloat16"),
        (np.int64, "int64"),
    ],
)
def test_a_dtype_is_one_of_numpy_or_a_name_and_that_of_a_table_is_the_type_of_its_rows(dtype, stored):
    with shoal.local() as store:
        made = (
            store.table("t", dim=2, dtype=dtype)
            if stored == "int64"
            else store.table("t", dim=2, dtype=dtype, optimizer=shoal.SGD())
        )
        assert (made.spec.dtype, made.dtype) == (stored, np.dtype("int64" if stored == "int64" else "float32"))
        assert made.pull(np.arange(3)).dtype == made.dtype
        assert store.table("t", dim=2, dtype=stored, optimizer=made.optimizer) is made


def test_a_table_without_rows_is_true_also_when_its_store_was_closed():
    with shoal.local() as store:
        table = store.table("t")
        assert len(table) == 0
        assert table
    assert table
