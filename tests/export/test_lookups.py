"""Exports: what is written, beside a slow reader of the format; lookups, beside the store that was exported."""

from __future__ import annotations

import pickle
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import shoal
from oracle import export as oracle
from shoal import _core
from shoal.export.cache import Cache
from shoal.export.read import Export
from shoal.storage import transaction
from shoal.storage.open import open_dir
from stores import KINDS, opened
from table_specs import native_spec
from tiers import long_after, rounds

EDGES = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
DTYPES = ("float32", "float16", "bfloat16", "int8")
INITS = {"zeros": shoal.Zeros(), "normal": shoal.Normal(0.1, seed=3)}


def make(store, name="t", *, dim=1, rows=3000, init=INITS["zeros"], seed=5, scale=1.0):
    """A table with rows under random keys and the edges; some of them zeros."""
    table = store.table(name, dim=dim, optimizer=shoal.SGD(lr=1.0), init=init)
    rng = np.random.default_rng(seed)
    keys = np.unique(np.concatenate([rng.integers(0, 2**64, rows, np.uint64), EDGES]))
    weights = (rng.standard_normal((len(keys), dim)) * scale).astype(np.float32)
    weights[::7] = 0
    table.assign(keys, weights)
    return table, keys


def as_dtype(weights, dtype):
    return weights if dtype == "float32" else oracle.rounded(weights, dtype)


@pytest.mark.slow
@pytest.mark.combined(2)
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", long_after(2, [1, 16, 2, 3]))
def test_lookups_read_what_the_store_reads_rounded_to_the_nearest(tmp_path, dim, dtype, init):
    with shoal.local(slots=16) as store:
        table, keys = make(store, dim=dim, init=INITS[init])
        reported = store.export(tmp_path, dtype=dtype)
        absent = np.random.default_rng(8).integers(0, 2**64, 2000, np.uint64)
        asked = np.random.default_rng(9).permutation(np.concatenate([keys, absent, keys[:100]]))
        want = table.pull(asked)
        there = table.contains(asked)
        dropped = (want == 0).all(axis=1) if init == "zeros" else np.zeros(len(asked), bool)
    with shoal.export.open(tmp_path) as export:
        reader = export.table("t")
        got = reader.pull(asked)
        np.testing.assert_array_equal(reader.contains(asked), there & ~dropped)
        np.testing.assert_array_equal(got[~there], want[~there])  # initial rows are not rounded
        assert len(reader) == reported.tables["t"].rows == len(keys) - reported.tables["t"].dropped
        errors = np.abs(got.astype(np.float64) - want)[there]
        if dtype != "int8":
            np.testing.assert_array_equal(got[there], as_dtype(want[there], dtype))
        elif dim == 1:
            assert (errors <= np.abs(want).max() / 127 * 0.51).all()
        else:
            assert (errors <= np.abs(want[there]).max(axis=1, keepdims=True) / 127 * 0.51).all()
        assert (
            reader.largest_error == reported.tables["t"].largest_error == pytest.approx(errors.max(), rel=1e-6, abs=0)
        )
        once = np.unique(asked[there], return_index=True)[1]
        assert reader.rms_error == pytest.approx(np.sqrt((errors[once] ** 2).mean()), rel=1e-6, abs=0)
        keys_read = np.concatenate([some for some, _ in reader.items()])
        np.testing.assert_array_equal(reader.pull(keys_read), np.concatenate([rows for _, rows in reader.items()]))
        assert len(np.unique(keys_read)) == len(reader)
    rows = oracle.rows_of(tmp_path, "t")
    assert len(rows) == len(reader)
    for key, row in zip(asked.tolist(), got, strict=True):
        if key in rows:
            np.testing.assert_array_equal(rows[key], row)


@pytest.mark.slow
@settings(max_examples=rounds(60))
@given(
    hashes=st.sets(
        st.one_of(
            st.integers(0, 2**64 - 1),
            st.integers(0, 300),  # close together: one home for all of them
            st.integers(2**63 - 40, 2**63 + 40),
            st.integers(2**64 - 200, 2**64 - 1),
        ),
        max_size=120,
    ),
    others=st.lists(st.integers(0, 2**64 - 1), max_size=30),
    slots=st.sampled_from([2, 64, 1024]),
    dim=st.sampled_from([1, 5]),
    dtype=st.sampled_from(DTYPES),
)
def test_every_set_of_keys_is_found_and_no_other(tmp_path_factory, hashes, others, slots, dim, dtype):
    folder = tmp_path_factory.mktemp("e")
    keys = shoal.data.unmix(np.array(sorted(hashes), np.uint64))
    with shoal.local(slots=slots, threads=1) as store:
        table = store.table("t", dim=dim)
        if len(keys):
            table.assign(keys, np.repeat(np.arange(1, len(keys) + 1, dtype=np.float32)[:, None], dim, axis=1))
        store.export(folder, dtype={"t": dtype})
        asked = np.concatenate([keys, shoal.data.unmix(np.array(others, np.uint64)), EDGES])
        want = table.pull(asked)
        there = table.contains(asked)
    with shoal.export.open(folder, threads=1) as export:
        np.testing.assert_array_equal(export.table("t").contains(asked), there)
        tolerance = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3, "int8": 1.0 if dim == 1 else 4e-3}[dtype]
        np.testing.assert_allclose(export.table("t").pull(asked), want, rtol=tolerance)
        assert len(export.table("t")) == len(keys)
    assert set(oracle.rows_of(folder, "t")) == set(keys.tolist())


def test_keys_chosen_to_have_one_home_are_found_beyond_254_lines(tmp_path):
    keys = shoal.data.unmix(np.arange(6000, dtype=np.uint64))
    with shoal.local(slots=2) as store:
        store.table("t").assign(keys, np.arange(1, 6001, dtype=np.float32))
        store.export(tmp_path)
    assert max(section[7] for section in oracle.body(tmp_path)["tables"][0]["sections"]) > 254
    with shoal.export.open(tmp_path) as export:
        np.testing.assert_allclose(export.table("t").pull(keys).ravel(), np.arange(1, 6001), rtol=1e-6)
        assert not export.table("t").contains(shoal.data.unmix(np.arange(6000, 6100, dtype=np.uint64))).any()
        assert len(export.table("t")) == 6000


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_store_exports_the_same(kind, tmp_path):
    with opened(kind, slots=16) as store, shoal.local(slots=16) as same:
        make(store, dim=4, rows=500)
        make(same, dim=4, rows=500)
        store.export(tmp_path / "a", dtype="bfloat16")
        same.export(tmp_path / "b", dtype="bfloat16")
    for folder in ("a", "b"):
        assert oracle.body(tmp_path / folder)["tables"][0]["rows"] > 0
    a, b = (oracle.rows_of(tmp_path / folder, "t") for folder in ("a", "b"))
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_array_equal(a[key], b[key])


def test_weights_of_ftrl_are_exported_and_not_their_state(tmp_path):
    with shoal.local() as store:
        table = store.table("t", optimizer=shoal.FTRL(l1=2.0))
        keys = np.arange(1000, dtype=np.uint64)
        for _ in range(3):
            table.push(keys, np.random.default_rng(3).standard_normal((1000, 1)).astype(np.float32)).result()
        reported = store.export(tmp_path)
        want = table.pull(keys)
    assert reported.tables["t"].dropped == (want == 0).sum() > 0
    with shoal.export.open(tmp_path) as export:
        np.testing.assert_array_equal(export.table("t").pull(keys), want)
        assert (reported.tables["t"].largest_error, reported.tables["t"].rms_error) == (0.0, 0.0)


def test_a_number_beyond_float16_becomes_its_largest_and_the_error_says_so(tmp_path):
    with shoal.local() as store:
        store.table("t", optimizer=shoal.SGD()).assign(np.array([7], np.uint64), np.array([1e6], np.float32))
        reported = store.export(tmp_path, dtype="float16")
    assert reported.tables["t"].largest_error == 1e6 - 65504
    with shoal.export.open(tmp_path) as export:
        assert export.table("t").pull(np.array([7], np.uint64)).tolist() == [[65504.0]]


def test_float16_is_rounded_as_numpy_rounds_it_subnormal_numbers_and_ties_too(tmp_path):
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[:-1] + halves[1:]) / 2
    numbers = np.concatenate([halves, between, np.nextafter(between, 1e9), -np.nextafter(between, 0)]).astype(
        np.float32
    )
    keys = np.arange(len(numbers), dtype=np.uint64)
    with shoal.local() as store:
        store.table("t", optimizer=shoal.SGD()).assign(keys, numbers)
        store.export(tmp_path, dtype="float16")
    with shoal.export.open(tmp_path) as export:
        got = export.table("t").pull(keys).ravel()
    np.testing.assert_array_equal(got, oracle.rounded(numbers, "float16"))


def test_an_empty_store_and_an_empty_table_are_exported(tmp_path):
    with shoal.local() as store:
        store.export(tmp_path / "none")
        store.table("t", dim=3, init=shoal.Constant(0.5))
        store.export(tmp_path / "empty")
    with shoal.export.open(tmp_path / "none") as export:
        assert not export.tables
    with shoal.export.open(tmp_path / "empty") as export:
        table = export.table("t")
        assert table.pull(EDGES).tolist() == [[0.5] * 3] * 4
        assert table.pull(np.zeros(0, np.uint64)).shape == (0, 3)
        assert len(table) == table.nbytes == 0


def test_some_tables_are_exported_each_with_its_dtype(tmp_path):
    with shoal.local() as store:
        for name in ("a", "b", "c"):
            make(store, name, rows=50)
        store.export(tmp_path, tables=["a", "b"], dtype={"b": "int8"})
        with pytest.raises(ValueError, match="no table 'd' to export"):
            store.export(tmp_path, tables=["d"], overwrite=True)
        with pytest.raises(ValueError, match="dtype names a table 'c'"):
            store.export(tmp_path, tables=["a"], dtype={"c": "int8"}, overwrite=True)
        with pytest.raises(ValueError, match="dtype must be one of"):
            store.export(tmp_path, dtype="int4", overwrite=True)
        with pytest.raises(ValueError, match="version must be"):
            store.export(tmp_path, version=-1)
    with shoal.export.open(tmp_path) as export:
        assert {name: table.form.dtype for name, table in export.tables.items()} == {"a": "float32", "b": "int8"}
        with pytest.raises(ValueError, match="has no table 'c'"):
            export.table("c")


def test_an_export_is_replaced_at_the_end_and_numbers_rise(tmp_path):
    folder = tmp_path / "e"
    with shoal.local() as store:
        table, keys = make(store, rows=100)
        assert store.export(folder).version == 1
        with shoal.export.open(folder) as old:
            before = table.pull(keys)
            table.push(keys, np.ones((len(keys), 1), np.float32)).result()
            assert store.export(folder, overwrite=True).version == 2
            np.testing.assert_array_equal(old.table("t").pull(keys), before)  # its files are gone, its pages are not
            assert old.version == 1
        with shoal.export.open(folder) as new:
            np.testing.assert_array_equal(new.table("t").pull(keys), table.pull(keys))
    assert len(list(folder.glob("*.frozen"))) == 1


@pytest.mark.parametrize("since", [False, True])
def test_what_is_pushed_while_an_export_is_written_is_not_in_it(tmp_path, monkeypatch, since):
    with shoal.local(slots=8, threads=1) as store:
        tables = [store.table(name, dim=dim, optimizer=shoal.SGD(lr=1.0)) for name, dim in (("a", 1), ("b", 5))]
        keys = np.arange(900, dtype=np.uint64)

        def push(value):
            for table in tables:
                table.push(keys, np.full((900, table.dim), -value, np.float32)).result()

        push(1)
        if since:
            store.export(tmp_path / "base")
            push(1)
        real = transaction.DataFileWriter.append

        def append(writer, data):
            push(1)
            for table in tables:
                table.erase(keys[:100])
            return real(writer, data)

        monkeypatch.setattr(transaction.DataFileWriter, "append", append)
        store.export(tmp_path / "x", since=tmp_path / "base" if since else None)
        assert tables[0].pull(keys[100:101]).item() > 10
        with shoal.export.open(tmp_path / "x") as export:
            for name in ("a", "b"):
                assert np.all(export.table(name).pull(keys) == (2 if since else 1))
        store.save(tmp_path / "c", track=True)  # an export changes nothing of what saves remember
        store.export(tmp_path / "y")
        store.save(tmp_path / "d", since=tmp_path / "c")


def test_a_batch_of_unique_keys_reads_in_hash_order(tmp_path):
    with shoal.local(slots=8) as store:
        table, keys = make(store, dim=2, rows=300)
        store.export(tmp_path)
        batch = store.key_batch(np.concatenate([keys, keys[:9]]))
        want = table.pull_unique(batch)
    with shoal.export.open(tmp_path) as export:
        np.testing.assert_array_equal(export.table("t").pull_unique(batch), want)
        again = export.table("t").key_batch(keys)
        np.testing.assert_array_equal(again.hashes, batch.hashes)


def test_lookups_by_many_threads_give_what_one_gives(tmp_path):
    with shoal.local() as store:
        _, keys = make(store, dim=4, rows=20000)
        store.export(tmp_path, dtype="int8")
    with shoal.export.open(tmp_path, threads=1) as one, shoal.export.open(tmp_path, threads=4) as four:
        want = one.table("t").pull(keys)
        results = [None] * 6

        def read(k):
            results[k] = four.table("t").pull(keys)

        threads = [threading.Thread(target=read, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for got in results:
            np.testing.assert_array_equal(got, want)


def test_calls_are_checked(tmp_path):
    with shoal.local() as store:
        make(store, dim=2, rows=20)
        store.export(tmp_path, version=1)
    with pytest.raises(ValueError, match="threads must be at least 1"):
        shoal.export.open(tmp_path, threads=0)
    with shoal.export.open(tmp_path) as export:
        table = export.table("t")
        with pytest.raises(TypeError, match="keys must be integers"):
            table.pull(np.array([1.0]))
        with pytest.raises(ValueError, match="out must be"):
            table.pull(EDGES, out=np.zeros((4, 3), np.float32))
        readonly = np.zeros((4, 2), np.float32)
        readonly.setflags(write=False)
        with pytest.raises(ValueError, match="read-only"):
            table.pull(EDGES, out=readonly)
        for thing in (export, table):
            with pytest.raises(TypeError, match="cannot be passed to another process"):
                pickle.dumps(thing)
        assert "t" in repr(table)
        assert "version=1" in repr(export)
    with pytest.raises(shoal.errors.ClosedError, match="was closed"):
        export.table("t")
    assert table.pull(EDGES).shape == (4, 2)  # who holds a table goes on reading


def test_the_engine_refuses_shapes_that_do_not_fit():
    reader = _core.ExportReader(native_spec(), "float32", 4)
    with pytest.raises(ValueError, match="there is no such slot"):
        reader.add(np.zeros(64, np.uint8), np.array([[0, 0, 64, 1, 1, 1, 0, 8]], np.uint64))
    reader.add_layer()
    data = np.zeros(256 + 64, np.uint8)
    data = data[-data.ctypes.data % 64 :][:256]
    for words, message in [
        ([4, 0, 64, 1, 1, 1, 0, 8], "no slot 4"),
        ([0, 64, 256, 1, 4, 4, 0, 8], "outside of its file"),
        ([0, 0, 64, 1, 1, 1, 0, 4], "hashes of 4 bytes"),
        ([0, 0, 64, 1, 0, 1, 0, 8], "are not"),
        ([0, 0, 64, 1, 2, 1, 0, 8], "are not"),
        ([0, 0, 64, 1, 1, 2, 0, 8], "are not"),
        ([0, 0, 64, 1, 1, 1, 1, 8], "are not"),
        ([0, 0, 64, 1, 2**60, 2**60, 0, 8], "are not"),
        ([0, 32, 64, 1, 1, 1, 0, 8], "cache line"),
        ([0, 0, 64, 1, 1, 1, 0, 5], "do not distinguish"),
    ]:
        with pytest.raises(ValueError, match=message):
            reader.add(data, np.array([words], np.uint64))
    reader.add(data, np.array([[0, 0, 256, 1, 4, 4, 0, 8]], np.uint64))
    with pytest.raises(ValueError, match="no slot 9"):
        reader.read_slot(9)
    with pytest.raises(ValueError, match="ascend"):
        reader.pack(0, np.array([5, 5], np.uint64), np.ones((2, 1), np.float32))
    with pytest.raises(ValueError, match="len\\(hashes\\) x dim"):
        reader.pack(0, np.array([5], np.uint64), np.ones((2, 1), np.float32))
    for keys, rows in [(np.zeros(2, np.int32), np.zeros((2, 1), np.float32)), (EDGES, np.zeros((4, 1)))]:
        with pytest.raises(TypeError):
            reader.pull(keys, rows, _core.ThreadPool(1))


def test_an_export_that_is_closed_while_it_is_refreshed_stays_closed(tmp_path):
    class Racing(Export):
        closing = None

        def __setattr__(self, name, value):
            if name == "_now" and value is not None and self.closing is None and hasattr(self, "_now"):
                self.closing = threading.Thread(target=self.close)
                self.closing.start()
                self.closing.join(0.2)
            super().__setattr__(name, value)

    with shoal.local(slots=4) as store:
        store.table("t").assign(np.arange(9, dtype=np.uint64), np.ones(9, np.float32))
        store.export(tmp_path / "1")
        export = Racing(open_dir(tmp_path), threads=1, verify=True, cache=Cache())
        store.export(tmp_path / "2")
    export.refresh()
    export.closing.join()
    with pytest.raises(shoal.errors.ClosedError):
        _ = export.now
