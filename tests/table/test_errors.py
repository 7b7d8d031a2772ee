"""Bad input is a ValueError or a TypeError that names the thing, the number and the remedy, and changes nothing."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import shoal

KEYS = np.array([1, 2, 3], np.uint64)
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def store():
    with shoal.local(threads=1, slots=4) as opened:
        yield opened


@pytest.fixture
def table(store):
    made = store.table("user", dim=4, optimizer=shoal.SGD(lr=1.0), init=shoal.Constant(0.5))
    made.assign(KEYS, ROWS)
    return made


def assert_unchanged(table):
    assert len(table) == 3
    assert table.stats().step == 0
    np.testing.assert_array_equal(table.pull(KEYS), ROWS)


BAD_KEYS = {
    "float64": (np.array([1.0, 2.0, 3.0]), "float64"),
    "bool": (np.array([True, False, True]), "bool"),
    "object": (np.array([1, 2, 3], object), "object"),
    "two dimensions": (np.array([[1, 2, 3]], np.uint64), r"one dimension.*\(1, 3\)"),
    "no dimension": (np.array(7, np.uint64), r"one dimension.*\(\)"),
    "a list of floats": ([1.0, 2.0, 3.0], "float64"),
    "a list of numbers beyond 64 bits": ([2**64, 1, 2], "object"),
    "None": (None, "object"),
    "text": ("keys", "<U4"),
}
each_bad_key = pytest.mark.parametrize(("keys", "words"), BAD_KEYS.values(), ids=BAD_KEYS.keys())
CALLS = {
    "pull": lambda table, keys: table.pull(keys),
    "push": lambda table, keys: table.push(keys, ROWS),
    "assign": lambda table, keys: table.assign(keys, ROWS),
    "erase": lambda table, keys: table.erase(keys),
    "contains": lambda table, keys: table.contains(keys),
    "state": lambda table, keys: table.state(keys),
}


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", ">u8", ">i4"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_keys_of_narrower_integers_are_those_of_int64_and_uint64(table, call, dtype):
    wide = np.int64 if np.dtype(dtype).kind == "i" else np.uint64
    keys = np.array([1, 2, 3 if wide is np.uint64 else -3]).astype(dtype)
    reported = []
    for given in (keys, keys.astype(wide)):
        with shoal.local() as store:
            made = store.table("user", dim=4, optimizer=shoal.SGD(1.0), init=shoal.Constant(0.5))
            made.assign(KEYS, ROWS)
            found = call(made, given)
            reported.append((made.digest(), None if isinstance(found, shoal.Future) else pickle.dumps(found)))
    assert reported[0] == reported[1]
    assert len(table.pull([])) == 0


@each_bad_key
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_keys_of_another_kind_are_refused(table, call, keys, words):
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        call(table, keys)
    assert str(caught.value).startswith("keys must ")
    assert ": " in str(caught.value)  # the remedy
    assert_unchanged(table)


BAD_ROWS = {
    "float64": (ROWS.astype(np.float64), "float64"),
    "float16": (ROWS.astype(np.float16), "float16"),
    "int32": (ROWS.astype(np.int32), "int32"),
    "too few": (ROWS[:2], r"\(2, 4\)|2"),
    "too many": (np.zeros((4, 4), np.float32), r"\(4, 4\)|4"),
    "too narrow": (ROWS[:, :3].copy(), r"\(3, 3\)|3"),
    "flat": (ROWS.ravel(), r"\(12,\)|12"),
    "three dimensions": (ROWS[None], r"\(1, 3, 4\)|3"),
    "a list": (ROWS.tolist(), "float64"),
    "None": (None, "object"),
}


@pytest.mark.parametrize(("rows", "words"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
@pytest.mark.parametrize("call", ["push", "assign"])
def test_rows_of_another_kind_are_refused(table, call, rows, words):
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        getattr(table, call)(KEYS, rows)
    assert "float32" in str(caught.value)
    assert_unchanged(table)


def test_the_error_of_a_wrong_shape_names_table_dim_shape_and_remedy(table):
    with pytest.raises(ValueError, match="user") as caught:
        table.push(KEYS, ROWS[:, :3].copy())
    text = str(caught.value)
    assert "(3, 3)" in text
    assert "float32[3, 4]" in text


def test_a_flat_array_of_the_wrong_length_is_refused_at_dim_one(store):
    table = store.table("one")
    with pytest.raises(ValueError, match="2"):
        table.push(KEYS, np.zeros(2, np.float32))
    assert len(table) == 0


def test_strided_inputs_are_read_right_or_refused_never_misread(table):
    """What is not contiguous may be copied or refused, but the numbers must be the caller's."""
    wide = np.arange(6, dtype=np.uint64)
    keys = wide[1::2]
    rows = np.zeros((3, 8), np.float32)
    rows[:, ::2] = ROWS
    try:
        pulled = table.pull(keys)
    except (TypeError, ValueError) as error:
        assert "contiguous" in str(error)  # noqa: PT017
    else:
        np.testing.assert_array_equal(pulled, table.pull(keys.copy()))
    try:
        table.assign(KEYS + np.uint64(10), rows[:, ::2])
    except (TypeError, ValueError) as error:
        assert "contiguous" in str(error)  # noqa: PT017
        assert_unchanged(table)
    else:
        np.testing.assert_array_equal(table.pull(KEYS + np.uint64(10)), ROWS)
    fortran = np.asfortranarray(ROWS)
    try:
        table.push(KEYS, fortran).result()
    except (TypeError, ValueError) as error:
        assert "contiguous" in str(error)  # noqa: PT017
    else:
        np.testing.assert_array_equal(table.pull(KEYS), np.zeros((3, 4)))


def read_only(shape):
    out = np.zeros(shape, np.float32)
    out.flags.writeable = False
    return out


BAD_OUTS = {
    "float64": (np.zeros((3, 4)), "float64"),
    "too small": (np.zeros((2, 4), np.float32), r"\(2, 4\)"),
    "too narrow": (np.zeros((3, 3), np.float32), r"\(3, 3\)"),
    "flat": (np.zeros(12, np.float32), r"\(12,\)"),
    "read-only": (read_only((3, 4)), "read-only|writ"),
    "columns first": (np.zeros((4, 3), np.float32).T, "contiguous|stride"),
    "every other column": (np.zeros((3, 8), np.float32)[:, ::2], "contiguous|stride"),
    "a list": ([[0.0] * 4] * 3, "list"),
}


@pytest.mark.parametrize(("out", "words"), BAD_OUTS.values(), ids=BAD_OUTS.keys())
def test_an_out_that_cannot_be_filled_in_place_is_refused(table, out, words):
    before = np.array(out)
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        table.pull(KEYS, out=out)
    assert "out" in str(caught.value)
    np.testing.assert_array_equal(np.array(out), before)


def test_read_only_inputs_are_fine(table):
    keys, rows = KEYS.copy(), ROWS.copy()
    keys.flags.writeable = rows.flags.writeable = False
    np.testing.assert_array_equal(table.pull(keys), ROWS)
    table.push(keys, rows).result()
    assert np.all(table.pull(keys) == 0)


def test_a_push_may_be_given_what_a_pull_returned(table):
    rows = table.pull(KEYS)
    table.push(KEYS, rows).result()
    np.testing.assert_array_equal(rows, ROWS)
    assert np.all(table.pull(KEYS) == 0)


def test_arrays_may_change_after_a_push_returned(table):
    keys, rows = KEYS.copy(), ROWS.copy()
    handle = table.push(keys, rows)
    keys[:] = 99
    rows[:] = 1e9
    handle.result()
    assert np.all(table.pull(KEYS) == 0)
    assert not table.contains(keys).any()


BAD_OPTIMIZERS = {
    "lr 0": (lambda: shoal.SGD(lr=0.0), "lr"),
    "lr negative": (lambda: shoal.Adagrad(lr=-0.1), "lr"),
    "lr nan": (lambda: shoal.Adam(lr=float("nan")), "lr"),
    "lr inf": (lambda: shoal.Momentum(lr=float("inf")), "lr"),
    "mu 1": (lambda: shoal.Momentum(mu=1.0), "mu"),
    "eps negative": (lambda: shoal.Adagrad(eps=-1e-8), "eps"),
    "n0 negative": (lambda: shoal.Adagrad(n0=-1.0), "n0"),
    "alpha 0": (lambda: shoal.FTRL(alpha=0.0), "alpha"),
    "beta negative": (lambda: shoal.FTRL(beta=-1.0), "beta"),
    "l1 negative": (lambda: shoal.FTRL(l1=-1.0), "l1"),
    "l2 nan": (lambda: shoal.GroupFTRL(l2=float("nan")), "l2"),
    "l21 negative": (lambda: shoal.GroupFTRL(l21=-1.0), "l21"),
    "b1 1": (lambda: shoal.Adam(b1=1.0), "b1"),
    "b2 negative": (lambda: shoal.AdamW(b2=-0.1), "b2"),
    "weight_decay negative": (lambda: shoal.SGD(weight_decay=-0.1), "weight_decay"),
    "clip_value 0": (lambda: shoal.SGD(clip_value=0.0), "clip_value"),
    "clip_norm negative": (lambda: shoal.FTRL(clip_norm=-1.0), "clip_norm"),
    "clip_norm nan": (lambda: shoal.FTRL(clip_norm=float("nan")), "clip_norm"),
}


@pytest.mark.parametrize(("make", "words"), BAD_OPTIMIZERS.values(), ids=BAD_OPTIMIZERS.keys())
def test_a_hyper_parameter_out_of_range_is_refused_by_name(store, make, words):
    with pytest.raises(ValueError, match=words):
        store.table("bad", optimizer=make())
    assert "bad" not in store.tables


@pytest.mark.parametrize("dim", [0, -1, 4097, 2**40])
def test_a_dim_out_of_range_is_refused(store, dim):
    with pytest.raises(ValueError, match=str(dim)):
        store.table("bad", dim=dim)
    assert "bad" not in store.tables


@pytest.mark.parametrize("dim", [1.5, "4", None])
def test_a_dim_that_is_no_integer_is_refused(store, dim):
    with pytest.raises((TypeError, ValueError), match="dim"):
        store.table("bad", dim=dim)
    assert "bad" not in store.tables


@pytest.mark.parametrize("optimizer", ["adagrad", shoal.FTRL, 0.1])
def test_an_optimizer_that_is_no_description_is_refused(store, optimizer):
    with pytest.raises((TypeError, ValueError), match="optimizer"):
        store.table("bad", optimizer=optimizer)
    assert "bad" not in store.tables


def test_an_initializer_that_is_no_description_is_refused(store):
    with pytest.raises((TypeError, ValueError), match="init"):
        store.table("bad", init=0.5)
    assert "bad" not in store.tables


def test_descriptions_are_frozen_hashable_and_keyword_only():
    optimizer = shoal.FTRL(l1=1.0)
    assert {optimizer: 1}[shoal.FTRL(l1=1.0)] == 1
    assert optimizer != shoal.FTRL(l1=2.0)
    with pytest.raises(AttributeError):
        optimizer.l1 = 2.0
    with pytest.raises(TypeError):
        shoal.FTRL(0.1, 1.0)  # the learning rate alone may stand first
