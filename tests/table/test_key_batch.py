"""KeyBatch: the keys of a batch in hash order, each once, cut by slot; and mix, the order itself."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis.extra import numpy as hnp

import shoal
from oracle.hashing import LAST_KEY, keys_of, mix, neighbours, one_per_slot, unmix
from shoal import _core

EDGES = np.array([0, 1, 2**63 - 1, 2**63, LAST_KEY - 1, LAST_KEY], np.uint64)
any_keys = hnp.arrays(np.uint64, st.integers(0, 60), elements=st.integers(0, LAST_KEY))
few_keys = hnp.arrays(np.uint64, st.integers(0, 60), elements=st.integers(0, 5))


def assert_is_the_batch_of(batch, keys, slots):
    hashes, inverse, begins = batch.hashes, batch.inverse, batch.offsets
    assert (hashes.dtype, inverse.dtype, begins.dtype) == (np.uint64, np.uint32, np.uint64)
    expected = sorted({mix(int(k)) for k in keys})
    assert hashes.tolist() == expected
    assert len(batch) == len(expected)
    assert [int(hashes[i]) for i in inverse] == [mix(int(k)) for k in keys]
    width = 2**64 // slots
    assert begins.tolist() == [sum(h < s * width for h in expected) for s in range(slots)] + [len(expected)]


@given(keys=any_keys | few_keys, slots=st.sampled_from([2, 4, 32]), threads=st.sampled_from([1, 2]))
@example(keys=EDGES, slots=2, threads=1)
@example(keys=np.repeat(EDGES, 3), slots=16, threads=2)
@example(keys=np.empty(0, np.uint64), slots=2, threads=2)
def test_a_batch_is_sorted_unique_and_cut_by_slot(keys, slots, threads):
    with shoal.local(threads=threads, slots=slots) as store:
        assert_is_the_batch_of(store.key_batch(keys), keys, slots)


@given(keys=any_keys | few_keys, slots=st.sampled_from([2, 4, 32]), last=st.none() | st.integers(0, 5))
def test_unique_keys_are_those_of_a_batch(keys, slots, last):
    unique = _core.UniqueKeys(keys, slots, _core.ThreadPool(2), last)
    assert_is_the_batch_of(unique, keys if last is None else np.append(keys, np.uint64(last)), slots)


def test_unique_keys_are_of_uint64():
    with pytest.raises(TypeError):
        _core.UniqueKeys(np.zeros(3, np.int32), 4, _core.ThreadPool(1))
    with pytest.raises(ValueError, match="slots must be a power of two"):
        _core.UniqueKeys(np.zeros(3, np.uint64), 5, _core.ThreadPool(1))


@given(keys=any_keys | few_keys, last=st.integers(0, LAST_KEY) | st.integers(0, 5), threads=st.sampled_from([1, 2]))
def test_one_key_more_stands_behind_the_others(keys, last, threads):
    with shoal.local(threads=threads, slots=4) as store:
        assert_is_the_batch_of(store.key_batch(keys, last=last), [*keys.tolist(), last], 4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [511, 512, 513, 32_767, 32_768, 65_535, 200_000])
def test_one_key_more_is_the_batch_of_them_all_for_blocks_and_threads_of_any_size(n, threads, rng):
    keys = rng.integers(0, n, n).astype(np.uint64)
    with shoal.local(threads=threads) as store:
        one, all_of_them = store.key_batch(keys, last=7), store.key_batch(np.append(keys, np.uint64(7)))
        for name in ("hashes", "inverse", "offsets"):
            assert np.array_equal(getattr(one, name), getattr(all_of_them, name))
        with pytest.raises(TypeError):
            store.key_batch(keys, last=-1)


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 4095, 4096, 4097, 100_000])
@pytest.mark.parametrize("distinct", [1, 1000, 2**64 - 1])
def test_batches_of_every_size_are_what_numpy_makes_of_them(n, distinct, rng):
    keys = rng.integers(0, distinct, n, np.uint64, endpoint=distinct > 1)
    hashes, inverse = np.unique(shoal.data.mix(keys), return_inverse=True)
    for threads, slots in ((1, 1024), (2, 2), (2, 16384)):
        with shoal.local(threads=threads, slots=slots) as store:
            batch = store.key_batch(keys)
            np.testing.assert_array_equal(batch.hashes, hashes)
            np.testing.assert_array_equal(batch.inverse, inverse)
            firsts = np.arange(slots, dtype=np.uint64) * np.uint64(2**64 // slots)
            np.testing.assert_array_equal(batch.offsets[:-1], np.searchsorted(hashes, firsts))
            assert batch.offsets[-1] == len(hashes)


@pytest.mark.parametrize(
    "keys", [neighbours(5000), one_per_slot(4096), keys_of(range(5000))], ids=["neighbours", "borders", "lowest"]
)
def test_adversarial_batches_are_sorted_too(keys, rng):
    keys = rng.permutation(np.concatenate([keys, keys[::3]]))
    with shoal.local(threads=2) as store:
        batch = store.key_batch(keys)
        hashes, inverse = np.unique(shoal.data.mix(keys), return_inverse=True)
        np.testing.assert_array_equal(batch.hashes, hashes)
        np.testing.assert_array_equal(batch.inverse, inverse)


def test_int64_keys_make_the_same_batch():
    keys = np.array([-1, 5, -(2**63), 5], np.int64)
    with shoal.local(slots=4) as store:
        np.testing.assert_array_equal(store.key_batch(keys).hashes, store.key_batch(keys.view(np.uint64)).hashes)


@pytest.mark.parametrize("dim", [1, 2, 3, 16, 17])
def test_gradients_are_summed_in_order_of_occurrence_and_rounded_once(dim, rng):
    keys = rng.integers(0, 300, 3000).astype(np.uint64)
    grads = (rng.standard_normal((3000, dim)) * 10.0 ** rng.uniform(-6, 6, (3000, 1))).astype(np.float32)
    with shoal.local(threads=2) as store:
        batch = store.key_batch(keys)
        total = np.zeros((len(batch), dim))
        for i, g in zip(batch.inverse, grads.astype(np.float64), strict=True):
            total[i] += g
        np.testing.assert_array_equal(batch.sum(grads), total.astype(np.float32))


def test_a_flat_gradient_is_summed_at_dim_one():
    with shoal.local() as store:
        batch = store.key_batch(np.array([3, 4, 3], np.uint64))
        total = batch.sum(np.array([[1], [2], [4]], np.float32))
        assert sorted(total.ravel().tolist()) == [2, 5]


def test_sums_do_not_depend_on_threads_or_slots(rng):
    keys = rng.integers(0, 5000, 60_000).astype(np.uint64)
    grads = rng.standard_normal((60_000, 3)).astype(np.float32)
    with shoal.local(threads=1, slots=2) as store:
        first = store.key_batch(keys).sum(grads)
    for threads, slots in ((2, 1024), (4, 16384)):
        with shoal.local(threads=threads, slots=slots) as store:
            np.testing.assert_array_equal(store.key_batch(keys).sum(grads), first)


@pytest.mark.parametrize("optimizer", [shoal.FTRL(l1=0.1), shoal.Adagrad()], ids=lambda x: type(x).__name__)
def test_one_sort_for_pull_and_push_equals_two(optimizer, rng):
    keys = rng.integers(0, 500, 2000).astype(np.uint64)
    grads = rng.standard_normal((2000, 3)).astype(np.float32)
    with shoal.local(threads=2) as store:
        plain = store.table("plain", dim=3, optimizer=optimizer, init=shoal.Uniform(0.1))
        batched = store.table("batched", dim=3, optimizer=optimizer, init=shoal.Uniform(0.1))
        for _ in range(3):
            batch = store.key_batch(keys)
            np.testing.assert_array_equal(batched.pull_unique(batch)[batch.inverse], plain.pull(keys))
            plain.push(keys, grads).result()
            batched.push_unique(batch, batch.sum(grads)).result()
        for name, column in plain.state(keys).items():
            np.testing.assert_array_equal(batched.state(keys)[name], column)
        assert batched.stats().step == plain.stats().step == 3


def test_pull_unique_fills_the_array_it_is_given():
    with shoal.local() as store:
        table = store.table("t", dim=2, init=shoal.Constant(0.0))
        batch = store.key_batch(np.array([1, 2, 1], np.uint64))
        out = np.ones((2, 2), np.float32)
        assert table.pull_unique(batch, out=out) is out
        assert np.all(out == 0)
        with pytest.raises((TypeError, ValueError), match="out"):
            table.pull_unique(batch, out=np.ones((3, 2), np.float32))


def test_a_batch_outlives_pulls_and_pushes_and_cannot_be_written(rng):
    with shoal.local() as store:
        table = store.table("t", dim=1, optimizer=shoal.SGD(lr=1.0))
        batch = store.key_batch(np.array([1, 2, 1], np.uint64))
        hashes = batch.hashes
        for _ in range(3):
            table.push_unique(batch, np.ones((2, 1), np.float32)).result()
        np.testing.assert_array_equal(table.pull_unique(batch), [[-3], [-3]])
        with pytest.raises(ValueError, match="read-only"):
            hashes[0] = 0
        kept = hashes.copy()
        del batch
        np.testing.assert_array_equal(hashes, kept)  # the arrays hold their batch


def test_a_batch_of_another_cut_is_refused_and_nothing_changes():
    with shoal.local(slots=4) as store, shoal.local(slots=8) as other:
        table = store.table("t", optimizer=shoal.SGD())
        batch = other.key_batch(np.array([1, 2], np.uint64))
        with pytest.raises(ValueError, match="slots"):
            table.push_unique(batch, np.ones((2, 1), np.float32))
        with pytest.raises(ValueError, match="slots"):
            table.pull_unique(batch)
        assert len(table) == 0
        assert table.stats().step == 0
        assert table.stats().pushes == 0


@pytest.mark.parametrize(
    ("grads", "words"),
    [
        (np.ones((3, 2), np.float64), "float64"),
        (np.ones((2, 2), np.float32), r"\(2, 2\)|3"),
        (np.ones((3, 2, 1), np.float32), r"\(3, 2, 1\)|dim"),
        (np.ones((4, 2), np.float32), r"\(4, 2\)|3"),
    ],
    ids=["float64", "too few", "three dimensions", "too many"],
)
def test_a_sum_of_other_gradients_is_refused(grads, words):
    with shoal.local() as store:
        batch = store.key_batch(np.array([1, 2, 1], np.uint64))
        with pytest.raises((TypeError, ValueError), match=words):
            batch.sum(grads)


@pytest.mark.parametrize("keys", [np.array([1.0]), np.array([True]), np.array([[1]], np.uint64), [1.0]])
def test_keys_of_another_kind_are_refused(keys):
    with shoal.local() as store, pytest.raises((TypeError, ValueError), match="keys"):
        store.key_batch(keys)


@given(keys=any_keys)
@example(keys=EDGES)
def test_mix_is_a_bijection_and_unmix_its_inverse(keys):
    hashes = shoal.data.mix(keys)
    assert hashes.tolist() == [mix(int(k)) for k in keys]
    np.testing.assert_array_equal(shoal.data.unmix(hashes), keys)
    assert shoal.data.unmix(keys).tolist() == [unmix(int(h)) for h in keys]


def test_mix_is_pinned_by_golden_numbers():
    golden = {
        0: 0xE220A8397B1DCDAF,
        1: 0x910A2DEC89025CC1,
        42: 0xBDD732262FEB6E95,
        2**63: 0x481EC0A212A9F3DB,
        LAST_KEY: 0xE4D971771B652C20,
    }
    got = shoal.data.mix(np.array(list(golden), np.uint64))
    assert {k: hex(int(h)) for k, h in zip(golden, got, strict=True)} == {k: hex(h) for k, h in golden.items()}


def test_mix_takes_int64_bit_for_bit():
    np.testing.assert_array_equal(
        shoal.data.mix(np.array([-1], np.int64)), shoal.data.mix(np.array([LAST_KEY], np.uint64))
    )
