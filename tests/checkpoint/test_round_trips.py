"""Checkpoints: what is saved is loaded, bit for bit, into any number of slots and threads."""

from __future__ import annotations

import os
import pickle

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import shoal
from oracle.hashing import LAST_KEY, neighbours, one_slot
from tiers import rounds

OPTIMIZERS = {
    "sgd": shoal.SGD(lr=0.1, weight_decay=0.01),
    "momentum": shoal.Momentum(mu=0.7, nesterov=True),
    "adagrad": shoal.Adagrad(n0=0.1, clip_norm=2.0),
    "rowwise": shoal.RowWiseAdagrad(weight_decay=0.1, decoupled=True),
    "ftrl": shoal.FTRL(l1=0.1, l2=0.2, clip_value=1.5),
    "group ftrl": shoal.GroupFTRL(l21=0.1),
    "adam": shoal.Adam(b1=0.8),
    "adam per row": shoal.Adam(per_row_step=True),
    "adamw": shoal.AdamW(weight_decay=0.1),
}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
KEYS = np.concatenate([np.arange(400, dtype=np.uint64), neighbours(50), one_slot(50), np.array([LAST_KEY], np.uint64)])
UNSEEN = np.arange(10**6, 10**6 + 20, dtype=np.uint64)


def trained(store, rng, optimizer, dim=3, dtype="float32", name="t", init=None):
    table = store.table(name, dim=dim, optimizer=optimizer, init=init or shoal.Normal(0.1, seed=4), dtype=dtype, seed=9)
    for _ in range(3):
        table.push(KEYS, rng.standard_normal((len(KEYS), dim)).astype(np.float32)).result()
    return table


def bits(table):
    """Everything that a table is, to be compared bit for bit."""
    keys = np.concatenate([KEYS, UNSEEN])
    found = list(table.items())
    state = {name: column.copy().view(np.uint32) for name, column in table.state(keys).items()}
    return {
        "spec": table.spec,
        "step": table.stats().step,
        "rows": len(table),
        "pull": table.pull(keys).view(np.uint32),
        "keys": np.concatenate([k for k, _ in found] or [np.empty(0, np.uint64)]),
        "items": np.concatenate([r for _, r in found] or [np.empty((0, table.dim), np.float32)]).view(np.uint32),
        "there": table.contains(keys),
    } | state


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.combined
@each_optimizer
@pytest.mark.parametrize("dim", [1, 2, 17])
def test_every_optimizer_comes_back_bit_for_bit_into_any_cut(optimizer, dim, rng, tmp_path):
    with shoal.local(threads=2, slots=64) as store:
        expected = bits(trained(store, rng, optimizer, dim))
        store.save(tmp_path / "c")
    for threads, slots in ((1, 64), (2, 2), (4, 1024), (1, 16384)):
        with shoal.local(threads=threads, slots=slots) as store:
            store.load(tmp_path / "c")
            assert_same(bits(store.tables["t"]), expected)
            assert store.tables["t"].shard.verify() == ""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [2, 3, 16])
def test_sixteen_bit_weights_come_back_bit_for_bit(dtype, dim, rng, tmp_path):
    with shoal.local(slots=16) as store:
        expected = bits(trained(store, rng, shoal.Adagrad(), dim, dtype))
        store.save(tmp_path / "c")
    with shoal.local(slots=128) as store:
        store.load(tmp_path / "c")
        assert_same(bits(store.tables["t"]), expected)


@each_optimizer
def test_training_goes_on_as_if_nothing_had_happened(optimizer, rng, tmp_path):
    """The step number is part of a checkpoint: Adam's bias correction and the rounding bits depend on it."""
    grads = rng.standard_normal((3, len(KEYS), 3)).astype(np.float32)
    with shoal.local(slots=64) as store:
        table = trained(store, rng, optimizer)
        store.save(tmp_path / "c")
        for g in grads:
            table.push(KEYS, g).result()
        expected = bits(table)
    with shoal.local(slots=8) as store:
        store.load(tmp_path / "c")
        table = store.tables["t"]
        for g in grads:
            table.push(KEYS, g).result()
        assert_same(bits(table), expected)


@pytest.mark.parametrize(
    "init", [shoal.Zeros(), shoal.Constant(-0.25), shoal.Uniform(0.3, seed=2**64 - 1), shoal.Normal(0.1, seed=7)]
)
def test_unseen_keys_read_the_same_initial_rows_after_a_load(init, rng, tmp_path):
    with shoal.local() as store:
        table = trained(store, rng, shoal.SGD(), init=init)
        expected = table.pull(UNSEEN)
        store.save(tmp_path / "c")
    with shoal.local() as store:
        store.load(tmp_path / "c")
        assert store.tables["t"].init == init
        np.testing.assert_array_equal(store.tables["t"].pull(UNSEEN), expected)


def test_empty_stores_and_empty_tables_are_checkpoints_too(tmp_path):
    with shoal.local() as store:
        store.save(tmp_path / "nothing")
        store.table("empty", dim=5)
        store.save(tmp_path / "empty")
    with shoal.local() as store:
        store.load(tmp_path / "nothing")
        assert not store.tables
        store.load(tmp_path / "empty")
        assert len(store.tables["empty"]) == 0
        assert store.tables["empty"].dim == 5


NAMES = [
    "a/b",
    "..",
    ".",
    "../../up",
    "manifest.json",
    "ünï çødé 鱼",
    " ",
    "line\nbreak",
    "x" * 500,
    'a"b\\',
    "\x00",
    "CON",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_no_file_could_have_comes_back(name, rng, tmp_path):
    with shoal.local() as store:
        expected = bits(trained(store, rng, shoal.SGD(), name=name))
        store.save(tmp_path / "c")
    assert {p.name for p in tmp_path.iterdir()} == {"c"}
    with shoal.local() as store:
        store.load(tmp_path / "c")
        assert_same(bits(store.tables[name]), expected)


def test_many_tables_come_back_each_to_its_name(rng, tmp_path):
    with shoal.local() as store:
        expected = {
            name: bits(trained(store, rng, optimizer, dim, name=name))
            for dim, (name, optimizer) in enumerate(OPTIMIZERS.items(), 1)
        }
        store.save(tmp_path / "c")
    with shoal.local() as store:
        store.load(tmp_path / "c")
        assert set(store.tables) == set(expected)
        for name, table in store.tables.items():
            assert_same(bits(table), expected[name])


def test_some_tables_may_be_saved_and_a_name_that_is_none_is_refused(rng, tmp_path):
    with shoal.local() as store:
        expected = {name: bits(trained(store, rng, shoal.SGD(), name=name)) for name in ("a", "b", "c")}
        store.save(tmp_path / "c", tables=["c", "a", "c"])
        with pytest.raises(ValueError, match=r"no table 'x' to save: it has .*'a', 'b', 'c'"):
            store.save(tmp_path / "x", tables=["a", "x"])
        store.save(tmp_path / "none", tables=[])
    assert not (tmp_path / "x").exists()
    with shoal.local() as store:
        store.load(tmp_path / "none")
        assert not store.tables
        store.load(tmp_path / "c")
        assert set(store.tables) == {"a", "c"}
        for name, table in store.tables.items():
            assert_same(bits(table), expected[name])


def test_a_load_takes_the_place_of_rows_and_keeps_the_users_table(rng, tmp_path):
    with shoal.local() as store:
        table = trained(store, rng, shoal.Adagrad())
        expected = bits(table)
        store.save(tmp_path / "c")
        table.push(KEYS, np.ones((len(KEYS), 3), np.float32)).result()
        table.push(UNSEEN, np.ones((len(UNSEEN), 3), np.float32)).result()
        store.load(tmp_path / "c")
        assert store.tables["t"] is table
        assert_same(bits(table), expected)


def test_tables_that_a_checkpoint_does_not_name_stay(rng, tmp_path):
    with shoal.local() as store:
        trained(store, rng, shoal.SGD())
        store.save(tmp_path / "c")
    with shoal.local() as store:
        other = trained(store, rng, shoal.Adagrad(), name="other")
        expected = bits(other)
        store.load(tmp_path / "c")
        assert set(store.tables) == {"t", "other"}
        assert_same(bits(other), expected)


@pytest.mark.parametrize(
    "change",
    [{"dim": 4}, {"optimizer": shoal.SGD(lr=0.2)}, {"init": shoal.Zeros()}, {"dtype": "float16"}, {"seed": 1}],
    ids=lambda change: next(iter(change)),
)
def test_a_table_with_another_description_is_refused_and_nothing_is_loaded(change, rng, tmp_path):
    with shoal.local() as store:
        trained(store, rng, shoal.SGD(lr=0.1), name="a")
        trained(store, rng, shoal.SGD(lr=0.1), name="t")
        store.save(tmp_path / "c")
    with shoal.local() as store:
        description = {"dim": 3, "optimizer": shoal.SGD(lr=0.1), "init": shoal.Normal(0.1, seed=4), "seed": 9}
        table = store.table("t", **(description | change))
        table.push(KEYS[:5], np.ones((5, table.dim), np.float32)).result()
        with pytest.raises(ValueError, match=next(iter(change))) as caught:
            store.load(tmp_path / "c")
        assert "'t'" in str(caught.value)
        assert set(store.tables) == {"t"}
        assert len(table) == 5
        assert table.stats().step == 1


def test_a_second_save_replaces_the_first_and_leaves_no_litter(rng, tmp_path):
    with shoal.local() as store:
        table = trained(store, rng, shoal.Adagrad())
        store.save(tmp_path / "c")
        files = len(list((tmp_path / "c").iterdir()))
        table.push(KEYS, np.ones((len(KEYS), 3), np.float32)).result()
        expected = bits(table)
        store.save(tmp_path / "c", overwrite=True)
        assert len(list((tmp_path / "c").iterdir())) == files
    with shoal.local() as store:
        store.load(tmp_path / "c")
        assert_same(bits(store.tables["t"]), expected)


def test_a_save_makes_its_directory_and_takes_text_or_a_path(rng, tmp_path):
    with shoal.local() as store:
        expected = bits(trained(store, rng, shoal.SGD()))
        store.save(str(tmp_path / "deep" / "er" / "c"))
    with shoal.local() as store:
        store.load(tmp_path / "deep" / "er" / "c")
        assert_same(bits(store.tables["t"]), expected)


def test_a_checkpoint_may_be_moved(rng, tmp_path):
    with shoal.local() as store:
        expected = bits(trained(store, rng, shoal.SGD()))
        store.save(tmp_path / "here")
    os.rename(tmp_path / "here", tmp_path / "there")
    with shoal.local() as store:
        store.load(tmp_path / "there")
        assert_same(bits(store.tables["t"]), expected)


def test_a_read_only_checkpoint_is_loaded(rng, tmp_path):
    with shoal.local() as store:
        expected = bits(trained(store, rng, shoal.SGD()))
        store.save(tmp_path / "c")
    for path in (tmp_path / "c").iterdir():
        path.chmod(0o444)
    (tmp_path / "c").chmod(0o555)
    try:
        with shoal.local() as store:
            store.load(tmp_path / "c")
            assert_same(bits(store.tables["t"]), expected)
    finally:
        (tmp_path / "c").chmod(0o755)


def test_saving_twice_gives_the_same_rows_in_the_same_bytes(rng, tmp_path):
    """Sections depend on the rows alone: the order in which rows came does not show."""
    rows = rng.standard_normal((len(KEYS), 3)).astype(np.float32)
    sizes = []
    contents = []
    for name, order in (("a", np.arange(len(KEYS))), ("b", rng.permutation(len(KEYS)))):
        with shoal.local(slots=16) as store:
            table = store.table("t", dim=3, optimizer=shoal.SGD())
            table.assign(KEYS[order], rows[order])
            store.save(tmp_path / name)
        files = sorted(p for p in (tmp_path / name).iterdir() if p.suffix != ".json")
        sizes.append([p.stat().st_size for p in files])
        contents.append([p.read_bytes() for p in files])
    assert sizes[0] == sizes[1]
    assert contents[0] == contents[1]


def test_a_load_reserves_for_the_rows_it_brings(tmp_path):
    """Filling a small table in hash order would be quadratic: a load must not do it, nor leave much empty."""
    keys = np.arange(400_000, dtype=np.uint64)
    with shoal.local(slots=16) as store:
        table = store.table("t")
        table.push(keys, np.ones(len(keys), np.float32)).result()
        store.save(tmp_path / "c")
    for slots in (16, 4, 256):
        with shoal.local(slots=slots) as store:
            store.load(tmp_path / "c")
            stats = store.tables["t"].stats()
            assert stats.rows == 400_000
            assert stats.load > 0.6
            assert stats.bytes_per_row < 26
            assert store.tables["t"].shard.verify() == ""


def test_counters_start_anew_with_a_load(rng, tmp_path):
    with shoal.local() as store:
        trained(store, rng, shoal.SGD())
        store.save(tmp_path / "c")
        store.load(tmp_path / "c")
        stats = store.tables["t"].stats()
        assert (stats.pushes, stats.pulls, stats.nonfinite_rows) == (0, 0, 0)
        assert store.tables["t"].stats().step == 3


def test_descriptions_can_be_pickled(rng):
    with shoal.local() as store:
        spec = trained(store, rng, shoal.AdamW(weight_decay=0.1)).spec
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.slow
@given(
    keys=st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 8), max_size=50, unique=True),
    dim=st.integers(1, 5),
    optimizer=st.sampled_from(list(OPTIMIZERS.values())),
    slots=st.tuples(st.sampled_from([2, 8, 1024]), st.sampled_from([2, 8, 1024])),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=rounds(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_table_comes_back(keys, dim, optimizer, slots, seed, tmp_path):
    keys = np.array(keys, np.uint64)
    grads = np.random.default_rng(seed).standard_normal((len(keys), dim)).astype(np.float32)
    with shoal.local(slots=slots[0]) as store:
        table = store.table("t", dim=dim, optimizer=optimizer, seed=seed)
        table.push(keys, grads).result()
        expected = bits(table)
        store.save(tmp_path / "c", overwrite=True)
    with shoal.local(slots=slots[1]) as store:
        store.load(tmp_path / "c")
        assert_same(bits(store.tables["t"]), expected)
