"""Functions on all rows of a table against plain float64 over the rows as they are read one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from oracle.optimizers import divided, rule_of
from shoal.table import reductions

OPTIMIZERS = {
    "SGD": shoal.SGD(lr=0.5),
    "Momentum": shoal.Momentum(lr=0.1),
    "Adagrad": shoal.Adagrad(lr=0.3),
    "RowWiseAdagrad": shoal.RowWiseAdagrad(lr=0.2),
    "FTRL": shoal.FTRL(alpha=0.3, beta=0.5, l1=0.4, l2=0.1, n0=0.01),
    "GroupFTRL": shoal.GroupFTRL(alpha=0.3, beta=0.5, l1=0.2, l2=0.1, l21=0.3),
    "Adam": shoal.Adam(lr=0.05),
    "AdamW": shoal.AdamW(lr=0.05, weight_decay=0.1),
}
U = 2.0**-24


def filled(store, optimizer, dim, *, rows=500, pushes=4, seed=0, **more):
    """A table that some random pushes have filled, and its keys."""
    random = np.random.default_rng(seed)
    table = store.table("t", dim=dim, optimizer=optimizer, **more)
    keys = random.integers(2**64, size=rows, dtype=np.uint64)
    for _ in range(pushes):
        some = random.choice(keys, size=rows // 2)
        table.push(some, random.normal(size=(len(some), dim)).astype(np.float32)).wait()
    return table


def all_rows(table):
    keys, rows = zip(*table.items(), strict=True)
    return np.concatenate(keys), np.concatenate(rows)


@pytest.mark.parametrize("dim", [1, 3, 16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_questions_are_answered_as_by_reading_every_row(name, dim):
    with shoal.local(threads=2, slots=16) as store:
        table = filled(store, OPTIMIZERS[name], dim)
        keys, rows = all_rows(table)
        exact = rows.astype(np.float64)
        sizes = np.array([math.sqrt(math.fsum(row * row)) for row in exact])
        for e in range(dim):
            assert table.sum()[e] == pytest.approx(math.fsum(exact[:, e]), rel=1e-12, abs=1e-12)
        assert table.norm(1) == pytest.approx(math.fsum(np.abs(exact).ravel()), rel=1e-12)
        assert table.norm() == pytest.approx(math.sqrt(math.fsum((exact**2).ravel())), rel=1e-12)
        assert table.norm(math.inf) == np.abs(exact).max()
        assert table.count() == np.count_nonzero(np.any(rows != 0, axis=1))
        middle = float(np.median(sizes)) + 1e-9
        assert table.count(above=middle) == np.count_nonzero(sizes > middle)
        order = np.lexsort((keys, -sizes))
        found, norms = table.topk(7)
        assert found.tolist() == keys[order[:7]].tolist()
        np.testing.assert_allclose(norms, sizes[order[:7]], rtol=1e-12)
        assert len(table.topk(2**20)[0]) == len(table)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_do_not_depend_on_threads(name):
    answers = []
    for threads in (1, 3):
        with shoal.local(threads=threads) as store:
            table = filled(store, OPTIMIZERS[name], 3, rows=5000)
            table.decay(0.37)
            table.shrink(0.01)
            state = table.state(all_rows(table)[0])
            answers.append(
                [table.sum().tobytes(), table.norm(1), table.norm(2), *(part.tobytes() for part in table.topk(50))]
                + [column.tobytes() for column in state.values()]
            )
    assert answers[0] == answers[1]


def test_answers_of_parts_of_the_slots_put_together_are_those_of_all():
    class Parts:
        """Two servers: topk answers with a list of each, the other functions with a number a slot."""

        def __init__(self, *shards):
            self.shards = shards

        def reduce(self, function, parameters):
            answers = [shard.reduce(function, parameters).reshape(16, -1) for shard in self.shards]
            return np.concatenate([answers[0][:8].ravel(), answers[1][8:].ravel()])

    with shoal.local(slots=16) as whole, shoal.local(slots=16) as low, shoal.local(slots=16) as high:
        table = filled(whole, shoal.SGD(), 3)
        keys, rows = all_rows(table)
        is_low = shoal.mix(keys) < 2**63
        for store, some in ((low, is_low), (high, ~is_low)):
            store.table("t", dim=3, optimizer=shoal.SGD()).assign(keys[some], rows[some])
        parts = Parts(low.tables["t"].shard, high.tables["t"].shard)
        assert reductions.total(parts, 16).tobytes() == table.sum().tobytes()
        for order in (1, 2, np.inf):
            assert reductions.norm(parts, order) == table.norm(order)
        assert reductions.count(parts, 0.01) == table.count(above=0.01)
        assert reductions.digest(parts, 16) == table.digest()

        class Both:
            def reduce(self, function, parameters):
                return np.concatenate([one.tables["t"].shard.reduce(function, parameters) for one in (high, low)])

        for mine, theirs in zip(reductions.topk(Both(), 10), table.topk(10), strict=True):
            assert mine.tobytes() == theirs.tobytes()


def plain_digest(table, bits):
    """The digest by its definition, from the rows as they are read; weights are stored in so many bits."""
    keys = all_rows(table)[0]
    columns = []
    for number, column in enumerate(table.state(keys).values()):
        words = column.view(np.uint32).astype(np.uint64)
        if number == 0 and bits == 16:
            halves = np.zeros((len(keys), -(-words.shape[1] // 2) * 2), np.uint64)
            halves[:, : words.shape[1]] = words >> np.uint64(16)
            words = halves[:, ::2] | halves[:, 1::2] << np.uint64(16)
        columns.append(words)
    sums = []
    for mixed in (shoal.mix(shoal.mix(keys)), shoal.mix(~shoal.mix(keys))):
        for column in columns:
            for word in column.T:
                mixed = shoal.mix(mixed ^ word)
        sums.append(int(mixed.sum(dtype=np.uint64)))
    return f"{sums[0]:016x}{sums[1]:016x}"


@pytest.mark.parametrize(
    ("optimizer", "dim", "dtype"),
    [
        (shoal.FTRL(), 1, "float32"),
        (shoal.Adam(), 3, "float32"),
        (shoal.Adam(per_row_step=True), 1, "float32"),
        (shoal.RowWiseAdagrad(), 3, "bfloat16"),
        (shoal.RowWiseAdagrad(), 16, "bfloat16"),
        (shoal.SGD(), 5, "bfloat16"),
    ],
)
def test_a_digest_is_that_of_all_that_is_stored(optimizer, dim, dtype):
    with shoal.local(slots=16) as store:
        table = store.table("t", dim=dim, optimizer=optimizer, dtype=dtype)
        assert table.digest() == "0" * 32
        table = filled(store, optimizer, dim, dtype=dtype)
        assert table.digest() == plain_digest(table, 32 if dtype == "float32" else 16)


def test_a_digest_stays_with_the_rows_and_changes_with_any_bit(tmp_path):
    with shoal.local(slots=16) as store, shoal.local(slots=64, threads=3) as other:
        table = filled(store, shoal.Adagrad(), 2)
        digest = table.digest()
        store.save(tmp_path)
        other.load(tmp_path)
        copy = other.tables["t"]
        assert copy.digest() == digest
        key, row = all_rows(copy)[0][:1], all_rows(copy)[1][:1]
        copy.assign(key, np.nextafter(row, np.float32(9)))
        assert copy.digest() != digest
        copy.assign(key, row)
        assert copy.digest() == digest
        more = np.array([0, 2**64 - 1], np.uint64)
        copy.assign(more, np.zeros((2, 2), np.float32))
        assert copy.digest() != digest
        copy.erase(more)
        assert copy.digest() == digest
        state = copy.state(key)
        copy.push(key, np.ones((1, 2), np.float32)).wait()
        copy.assign(key, row)
        assert copy.digest() != digest  # the weights are what they were, n is not
        assert copy.state(key)["n"].tolist() != state["n"].tolist()


def test_growing_is_counted_and_changes_no_row():
    keys = np.arange(400_000, dtype=np.uint64)
    with shoal.local(slots=2) as store:  # 4 MB each: they grow through pages of 2 MiB
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        for some in np.array_split(keys, 40):
            table.push(some, -(some % 1000).astype(np.float32)).wait()
        figures = table.shard.stats()
        assert figures["growths"] > 20
        assert 0 < figures["longest_move_ns"] <= figures["growing_moving_ns"]
        assert figures["growing_memory_ns"] > 0
        assert table.shard.verify() == ""
        np.testing.assert_array_equal(table.pull(keys)[:, 0], keys % 1000)


def expected_weights(table, keys, target, before, wanted):
    """The weights after a change, and how far float32 may be from them."""
    if "z" not in before:
        return wanted, 0.5 * np.spacing(np.abs(wanted).astype(np.float32)).astype(np.float64)
    rule = rule_of(table.optimizer)
    stiff = rule.denominator(before["n"].astype(np.float64))
    # w, w', the pull w' D and z are each rounded; near |z| = l1 it is z that counts.
    z = np.abs(before["z"].astype(np.float64)) + rule.l1
    return wanted, 16 * U * (np.abs(target) + divided(z, stiff))


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("change", ["decay", "shrink"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_change_moves_weights_as_in_float64_and_nothing_else(name, change, dim):
    with shoal.local(threads=2, slots=16) as store:
        table = filled(store, OPTIMIZERS[name], dim)
        keys, rows = all_rows(table)
        old = rows.astype(np.float64)
        before = table.state(keys)
        if change == "decay":
            moved, wanted = table.decay(0.3), 0.3 * old
        else:
            amount = float(np.median(np.abs(old)))
            moved, wanted = table.shrink(amount), np.sign(old) * np.maximum(np.abs(old) - amount, 0)
        after, now = table.state(keys), table.pull(keys)
        wanted, bound = expected_weights(table, keys, wanted, before, wanted)
        assert np.all(np.abs(now - wanted) <= bound)
        assert np.array_equal(now == 0, wanted == 0)
        assert moved == np.count_nonzero(np.any(wanted != old, axis=1))
        for column in before:
            if column not in ("w", "z"):
                assert before[column].tobytes() == after[column].tobytes()
        if "z" in before:
            zero = old == 0
            assert before["z"][zero].tobytes() == after["z"][zero].tobytes()
            left = (wanted == 0) & ~zero
            assert np.all(np.abs(after["z"][left]) <= np.float32(table.optimizer.l1))
            assert np.all(np.sign(after["z"][left]) == np.sign(before["z"][left]))
        # What is 0 for good: the same change leaves every bit of rows that it does not move.
        assert table.decay(1.0) == 0
        assert table.shrink(0.0) == 0
        for column, bits in table.state(keys).items():
            assert bits.tobytes() == after[column].tobytes()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12),
    st.sampled_from(["SGD", "FTRL", "GroupFTRL"]),
    st.floats(0.001, 1.0),
    st.floats(0, 50),
)
def test_any_assigned_weights_decay_and_shrink(weights, name, factor, amount):
    given_rows = np.array(weights, np.float32)
    keys = np.arange(len(weights), dtype=np.uint64)
    with shoal.local(threads=1, slots=2) as store:
        table = store.table("t", optimizer=OPTIMIZERS[name])
        table.assign(keys, given_rows)
        start = table.pull(keys).astype(np.float64)
        table.decay(factor)
        decayed = table.pull(keys).astype(np.float64)
        size = 16 * U * (np.abs(start) + 1.0) + 1e-44
        assert np.all(np.abs(decayed - factor * start) <= size)
        table.shrink(amount)
        wanted = np.sign(decayed) * np.maximum(np.abs(decayed) - amount, 0)
        assert np.all(np.abs(table.pull(keys) - wanted) <= 16 * U * (np.abs(decayed) + 1.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_16_bits_decay_in_the_mean(dtype):
    keys = np.arange(20_000, dtype=np.uint64)
    with shoal.local(slots=16) as store:
        table = store.table("t", dim=2, optimizer=shoal.SGD(), dtype=dtype)
        table.assign(keys, np.ones((len(keys), 2), np.float32))
        table.decay(0.999)  # less than half a step of the grid of either
        w = table.pull(keys).astype(np.float64)
        step = 1 - w.min()
        assert 0 < step <= 2.0**-8
        assert abs(w.mean() - 0.999) <= 5 * step / (2 * math.sqrt(w.size))


def test_every_push_tosses_new_coins_for_weights_of_16_bits():
    keys = np.arange(4000, dtype=np.uint64)
    with shoal.local(slots=16) as store:
        table = store.table("t", dim=2, optimizer=shoal.SGD(), dtype="bfloat16")
        table.assign(keys, np.ones((len(keys), 2), np.float32))
        for _ in range(20):
            table.decay(0.9995)
            table.push(keys[:1], np.zeros((1, 2), np.float32)).wait()
        assert table.pull(keys).mean(dtype=np.float64) == pytest.approx(0.9995**20, abs=3e-4)


def test_of_equal_norms_the_smaller_keys_come_first():
    keys = np.random.default_rng(1).permutation(1000).astype(np.uint64)
    with shoal.local(slots=16) as store:
        table = store.table("t", optimizer=shoal.SGD())
        table.assign(keys, np.where(keys % 2 == 0, 1, -1).astype(np.float32))
        assert table.topk(30)[0].tolist() == list(range(30))


def test_an_empty_table_has_answers():
    with shoal.local() as store:
        table = store.table("t", dim=3)
        assert table.sum().tolist() == [0.0, 0.0, 0.0]
        assert (table.norm(), table.norm(1), table.norm(math.inf), table.count()) == (0.0, 0.0, 0.0, 0)
        assert [len(part) for part in table.topk(3)] == [0, 0]
        assert (table.decay(0.5), table.shrink(1.0), len(table)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda table: table.norm(3), "1, 2 or infinity"),
        (lambda table: table.norm(math.nan), "1, 2 or infinity"),
        (lambda table: table.count(above=-1.0), "0 or more"),
        (lambda table: table.topk(0), "whole number from 1"),
        (lambda table: table.topk(1.5), "whole number from 1"),
        (lambda table: table.topk(2**20 + 1), "whole number from 1 to 1048576"),
        (lambda table: table.decay(0.0), "above 0 and at most 1"),
        (lambda table: table.decay(1.1), "above 0 and at most 1"),
        (lambda table: table.decay(math.nan), "above 0 and at most 1"),
        (lambda table: table.shrink(-0.1), "not negative"),
        (lambda table: table.shrink(math.inf), "finite"),
        (lambda table: table.shard.reduce(8, np.empty(0)), "no function 8"),
        (lambda table: table.shard.reduce(0, np.empty(0)), "no function 0"),
        (lambda table: table.shard.reduce(1, np.ones(1)), "takes 0 parameters, got 1"),
        (lambda table: table.shard.reduce(7, np.ones(1)), "takes 0 parameters, got 1"),
        (lambda table: table.shard.reduce(5, np.empty(0)), "takes 1 parameters, got 0"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(ask, told):
    with shoal.local() as store:
        table = filled(store, shoal.SGD(), 2)
        rows = all_rows(table)[1]
        with pytest.raises(ValueError, match=told):
            ask(table)
        assert all_rows(table)[1].tobytes() == rows.tobytes()


def test_a_closed_store_says_so():
    with shoal.local() as store:
        table = filled(store, shoal.SGD(), 2)
    for ask in (table.sum, table.norm, table.count, table.digest, lambda: table.topk(1), lambda: table.decay(0.5)):
        with pytest.raises(shoal.ClosedError):
            ask()


def test_the_next_push_goes_on_from_the_decayed_weight():
    with shoal.local() as store:
        keys = np.array([5], np.uint64)
        table = store.table("t", optimizer=shoal.FTRL(alpha=1.0, beta=1.0))
        table.push(keys, np.array([2.0], np.float32)).wait()  # n 4, z 2, D 3, w -2/3
        table.decay(0.5)  # z 1, w -1/3
        table.push(keys, np.array([1.5], np.float32)).wait()  # n 6.25, sigma .5: z 1 + 1.5 + 1/6, D 3.5
        assert table.pull(keys)[0, 0] == pytest.approx(-(2.5 + 1 / 6) / 3.5, rel=1e-6)
