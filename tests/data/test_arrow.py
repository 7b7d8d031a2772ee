"""Parquet and Arrow: the keys of a CSV of the same table, whatever the types; rows, splits and positions; damage."""

from __future__ import annotations

import datetime
import io
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from oracle.text import bits, interacting, rows_of_batch
from shoal import hash_strings, read_arrow, read_csv, read_parquet

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pd = pytest.importorskip("pandas")


def field(column):
    return int(hash_strings([column])[0])


def key(column, text=""):
    return int(hash_strings([text], field=field(column))[0])


def rows(batches):
    return bits([row for batch in batches for row in rows_of_batch(batch)])


def only(reader):
    (batch,) = reader
    return batch


@pytest.fixture
def file(tmp_path):
    """A function from a table to a Parquet file of small row groups."""

    def write(table, name="x.parquet"):
        path = tmp_path / name
        pq.write_table(table, path, row_group_size=1000)
        return path

    return write


def numbered(count):
    return pa.table({"y": [i % 2 for i in range(count)], "n": [float(i) for i in range(count)]})


# ---- cells ----

WHEN = datetime.date(2013, 5, 17)
TYPES = [
    (pa.array(["a", None, "bc", "longer than eight"]), ["a", None, "bc", "longer than eight"]),
    (pa.array(["a", None, "", "a"], pa.large_string()), ["a", None, "", "a"]),
    (pa.array([b"a", None, b"\xff", b""]), [b"a", None, b"\xff", b""]),
    (pa.array([1, None, -17, 2**63 - 1]), ["1", None, "-17", str(2**63 - 1)]),
    (pa.array([1, None, 17, 2**64 - 1], pa.uint64()), ["1", None, "17", str(2**64 - 1)]),
    (pa.array([1.0, None, float("nan"), 0.5]), ["1", None, None, "0.5"]),
    (pa.array([True, None, False, True]), ["true", None, "false", "true"]),
    (pa.array(["a", None, "b", "a"]).dictionary_encode(), ["a", None, "b", "a"]),
    (pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0]), pa.array(["a", None])), ["a", None, None, "a"]),
    (pa.array([5, None, 7, 5]).dictionary_encode(), ["5", None, "7", "5"]),
    (pa.nulls(4, pa.dictionary(pa.int8(), pa.string())), [None] * 4),
    (pa.nulls(4), [None] * 4),
    (pa.array([WHEN, None, WHEN, WHEN]), ["2013-05-17", None, "2013-05-17", "2013-05-17"]),
]


@pytest.mark.parametrize(("column", "texts"), TYPES, ids=[str(column.type) for column, _ in TYPES])
@pytest.mark.parametrize("offset", [0, 3])
def test_a_column_of_any_type_has_the_keys_of_its_text(column, texts, offset):
    table = pa.table({"y": [0] * 4, "c": column}).slice(offset)
    want = [key("c", text) for text in texts[offset:] if text is not None]
    assert [k for batch in read_arrow(table, label="y") for k in batch.keys.tolist()] == want


def test_columns_have_roles_and_missing_cells_make_no_feature():
    table = pa.table(
        {
            "x": ["unasked"] * 3,
            "price": [0.5, None, float("nan")],
            "y": [True, False, True],
            "w": [1, 2.5, 0],
            "site": ["a", "b", None],
            "many": pa.array([7, 8, None], pa.int8()),
        }
    )
    batch = only(read_arrow(table, label="y", categorical=["site"], numeric=["price", "many"], weight="w"))
    assert batch.labels.tolist() == [1, 0, 1]
    assert batch.weights.tolist() == [1, 2.5, 0]
    assert batch.keys.tolist() == [key("price"), key("site", "a"), key("many"), key("site", "b"), key("many")]
    assert batch.values.tolist() == [0.5, 1, 7, 1, 8]
    assert batch.indptr.tolist() == [0, 3, 5, 5]


CELLS = st.sampled_from([None, "a", "b", "c,d", 'e"f', "longer than eight"])
NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.none()
TABLE = st.lists(st.tuples(st.sampled_from([0, 1]), CELLS, CELLS, st.integers(0, 9), NUMBERS), max_size=30)


@pytest.mark.slow
@given(table=TABLE, size=st.integers(1, 12))
def test_a_table_gives_what_a_csv_of_it_gives(tmp_path_factory, table, size):
    columns = [list(column) for column in zip(*table, strict=True)] or [[]] * 5
    types = [pa.int8(), pa.string(), pa.string(), pa.int64(), pa.float32()]
    arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
    made = pa.table(arrays, names=["y", "a", "b", "i", "x"])
    folder = tmp_path_factory.mktemp("table")
    made.to_pandas(integer_object_nulls=True).to_csv(folder / "x.csv", index=False)
    pq.write_table(made, folder / "x.parquet", row_group_size=7)
    asked = {"label": "y", "numeric": ["x"], "interactions": [("a", "b"), ("x", "a")], "batch_size": size}
    want = list(read_csv(folder / "x.csv", **asked))
    for reader in (read_arrow(made, **asked), read_parquet(folder / "x.parquet", **asked)):
        got = list(reader)
        assert list(map(len, got)) == list(map(len, want))
        assert rows(got) == rows(want)


def test_interactions_follow_the_rule():
    table = pa.table({"y": [1, 0], "a": ["p", "q"], "b": [3, None], "n": [0.5, 2.0]})
    asked = {"label": "y", "numeric": ["n"]}
    plain = rows_of_batch(only(read_arrow(table, **asked)))
    fields = {key("a", "p"): field("a"), key("a", "q"): field("a"), key("b", "3"): field("b"), key("n"): field("n")}
    pairs = [(field("a"), field("b")), (field("n"), field("a"))]
    want = [(y, interacting([(k, v, fields[k]) for k, v in features], pairs)) for y, features in plain]
    crossed = read_arrow(table, **asked, interactions=[("a", "b"), ("n", "a")])
    assert rows(crossed) == bits(want)


@pytest.mark.parametrize(
    ("column", "asked", "complaint"),
    [
        ([1, None, 1], {"label": "x"}, "row 1, column 'x': the label or the weight is missing"),
        ([1, 0, 2], {"label": "x"}, "row 2, column 'x': the label is 2, neither 0/1 nor -1"),
        ([1, 1, -0.5], {"weight": "x"}, "row 2, column 'x': the weight is -0.5: it must be 0 or more"),
        ([1, float("nan"), 1], {"weight": "x"}, "row 1, column 'x': the weight is nan"),
        ([1, 1e39, 1], {"numeric": ["x"]}, r"row 1, column 'x': 1e\+39 is not a finite float32 number"),
        ([float("-inf"), 1, 1], {"numeric": ["x"]}, "row 0, column 'x': -inf is not a finite"),
        (["1", "b", "c"], {"numeric": ["x"]}, "row 1, column 'x': 'b' is not a number: name the column as categorical"),
        (["1", "1e39", ""], {"numeric": ["x"]}, "row 1, column 'x': '1e39' is not finite as float32: name"),
        ([[1], [2], [3]], {"categorical": ["x"]}, "column 'x' holds list<.*>, which has no text: name it as a list"),
        ([1, 2, 3], {"numeric": ["z"]}, "column 'z' is not there: the columns are 'y', 'x'"),
    ],
)
def test_cells_that_do_not_fit_are_an_error_that_names_them(file, column, asked, complaint):
    table = pa.table({"y": [1, 0, 1], "x": column})
    asked = {"label": "y", **asked}
    with pytest.raises(ValueError, match=f"pyarrow Table.*{complaint}"):
        list(read_arrow(table, **asked))
    with pytest.raises(ValueError, match=f"x.parquet.*{complaint}"):
        list(read_parquet(file(table), **asked))


def test_numbers_of_a_dictionary_are_those_of_its_values():
    def column(indices, values, kind="int8"):
        return pa.DictionaryArray.from_arrays(pa.array(indices, kind), pa.array(values))

    def numbers(some, **how):
        table = pa.table({"y": [1] * len(some), "x": some})
        return [only(read_arrow(table.slice(i), label="y", numeric=["x"], **how)).values.tolist() for i in (0, 1)]

    assert numbers(column([2, None, 0, 1, 2], ["1", "2", "3"])) == [[3, 1, 2, 3], [1, 2, 3]]
    assert numbers(column([1, 2, 1], ["x", "2", None], "uint32")) == [[2, 2], [2]]  # "x" does not occur
    assert numbers(column([1, 0, 1], ["?", "4"]), na_values=["?"]) == [[4, 4], [4]]
    assert numbers(column([0, 1, 0], [1.5, float("nan")])) == [[1.5, 1.5], [1.5]]
    assert numbers(column([None, None], pa.array([], pa.string()))) == [[], []]
    for values, says in ((["a", "2", "b"], "row 2, column 'x': 'b' is not"), ([9e99, 2, -9e99], "row 2, .*-9e")):
        with pytest.raises(ValueError, match=says):
            numbers(column([None, 1, 2, 0], values))


def test_a_long_text_of_a_dictionary_is_not_repeated():
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int8()), pa.array(["0" * 400_000 + "7"]))
    batch = only(read_arrow(pa.table({"y": [1] * 2000, "x": texts}), label="y", numeric=["x"]))
    assert batch.values.tolist() == [7] * 2000
    assert pa.default_memory_pool().max_memory() < 500 << 20


def test_missing_texts_of_a_view_are_missing_numbers():
    table = pa.table({"y": [1, 0], "x": pa.array(["?", "3"], pa.string_view())})
    assert only(read_arrow(table, label="y", numeric=["x"], na_values=["?"])).values.tolist() == [3]


def test_a_label_may_be_text():
    table = pa.table({"y": pa.array(["yes", "no", "yes"]).dictionary_encode(), "c": [1, 2, 3]})
    assert only(read_arrow(table, label="y", positive="yes")).labels.tolist() == [1, 0, 1]


# ---- rows, splits, positions ----


def test_batches_are_of_the_size_asked_for_and_run_on_from_file_to_file(file):
    paths = [file(numbered(2500), "a.parquet"), file(numbered(10), "b.parquet")]
    reader = read_parquet(paths, label="y", numeric=["n"], batch_size=900)
    assert [len(batch) for batch in reader] == [900, 900, 710]
    want = [*range(2500), *range(10)]
    assert np.concatenate([batch.values for batch in reader]).tolist() == want
    assert reader.progress() == 1.0


@pytest.mark.slow
def test_splits_hold_each_row_once(file):
    path = file(numbered(40_000))
    for whole in (read_parquet(path, label="y", numeric=["n"]), read_arrow(numbered(40_000), label="y", numeric=["n"])):
        for n in (1, 2, 3, 7):
            parts = [np.concatenate([b.values for b in whole.split(rank, n)]).tolist() for rank in range(n)]
            assert [value for part in parts for value in part] == list(range(40_000))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.slow
def test_a_position_goes_on_with_the_very_next_row(file):
    paths = [file(numbered(20_000), "a.parquet"), file(numbered(3000), "b.parquet")]
    memory = numbered(23_000)
    for make in (
        lambda: read_parquet(paths, label="y", numeric=["n"], batch_size=1700),
        lambda: read_parquet(paths, label="y", numeric=["n"], batch_size=1700).split(1, 3),
        lambda: read_arrow(memory, label="y", numeric=["n"], batch_size=1700),
    ):
        reader = make()
        batches = [batch.values.tolist() for batch in reader]
        reader = make()
        positions = [json.loads(json.dumps(reader.position())) for _ in reader]
        for i, position in enumerate(positions):
            got = [value for batch in make().resume(position) for value in batch.values.tolist()]
            assert got == [value for batch in batches[i + 1 :] for value in batch]


def test_a_stream_has_one_pass_and_is_not_cut():
    reader = read_arrow(numbered(100).to_reader(), label="y")
    assert sum(map(len, reader)) == 100
    with pytest.raises(ValueError, match="RecordBatchReader was read already, and a stream has one pass"):
        list(reader)
    with pytest.raises(ValueError, match="is a stream, which is read once"):
        reader.split(0, 2)


def test_what_has_no_rows_has_no_batches(file):
    assert list(read_arrow(numbered(0), label="y")) == []
    assert list(read_parquet(file(numbered(0)), label="y")) == []


def test_readers_tell_what_was_asked_of_them_and_can_be_pickled(file):
    path = file(numbered(10))
    reader = read_parquet(path, label="y", numeric=["n"], batch_size=3)
    assert (reader.format, reader.path, reader.batch_size) == ("parquet", str(path), 3)
    assert reader.schema == {"label": "y", "numeric": ["n"]}
    assert rows(pickle.loads(pickle.dumps(reader))) == rows(reader)
    assert read_arrow(numbered(1), label="y").path == "pyarrow Table"


# ---- what is no table ----


def test_what_is_no_table_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"list is not an Arrow stream .it lacks __arrow_c_stream__.: pass a frame"):
        read_arrow([1, 2], label="y")
    for column in (pa.chunked_array([[1, 2]]), pd.Series([1, 2])):
        with pytest.raises(TypeError, match=f"a {type(column).__name__} is one column, not a table: pass a frame"):
            list(read_arrow(column, label="y"))
    for values in (["x", 3], [2**70, 1], np.ones(2) * 1j, np.ones(2, np.longdouble), pd.arrays.SparseArray([0, 1])):
        with pytest.raises(ValueError, match=r"^column 'a' cannot be read \(.+\): .* as in frame.astype\({'a': str}\)"):
            list(read_arrow(pd.DataFrame({"y": [1, 0], "a": values}), label="y"))
    with pytest.raises(FileNotFoundError):
        read_parquet(tmp_path / "missing", label="y")
    with pytest.raises(ValueError, match="Parquet is read from its end: write the data to a file"):
        read_parquet(io.BytesIO(b""), label="y")


def test_damage_is_an_error_that_names_the_file(file):
    path = file(numbered(5000))
    data = path.read_bytes()
    for bad in (b"", b"no table", data[:-20], data[:100] + bytes(3000) + data[3100:]):
        path.write_bytes(bad)
        with pytest.raises(shoal.CorruptionError, match=r"x\.parquet is not a Parquet file, or is damaged"):
            list(read_parquet(path, label="y", numeric=["n"]))


def test_texts_of_offsets_that_do_not_fit_are_refused():
    from shoal import _reader

    data, keys = np.zeros(4, np.uint8), np.zeros(1, np.uint64)
    for offsets, complaint in (
        ([0, 1, 2], "1 cells need 2 offsets, got 3"),
        ([2, 1], "offsets fall from 2 to 1"),
        ([0, 5], "offsets run from 0 to 5, of 4 bytes"),
        ([-1, 1], "offsets run from -1 to 1"),
    ):
        with pytest.raises(ValueError, match=complaint):
            _reader.hash_cells(data, np.array(offsets), 0, keys)
