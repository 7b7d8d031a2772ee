"""CSV by names of columns: roles, missing cells, quotes, headers; the same rows whatever the order of the columns."""

from __future__ import annotations

import csv
import gzip
import io
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.text import cell_text
from shoal import hash_strings, read_csv


def field(column):
    return int(hash_strings([column])[0])


def key(column, text=""):
    return int(hash_strings([text], field=field(column))[0])


@pytest.fixture
def file(tmp_path):
    """A function from the text of a file to its path."""

    def write(text, name="x.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def only(reader):
    (batch,) = reader
    return batch


ADS = "click,site,price,user\n1,a.com,0.5,17\n0,b.com,NA,18\n-1,,2,\n"


def test_columns_have_roles(file):
    batch = only(read_csv(file(ADS), label="click", categorical=["site"], numeric=["price"]))
    assert batch.labels.tolist() == [1, 0, 0]
    assert batch.keys.tolist() == [key("site", "a.com"), key("price"), key("site", "b.com"), key("price")]
    assert batch.values.tolist() == [1, 0.5, 1, 2]
    assert batch.indptr.tolist() == [0, 2, 3, 4]
    assert batch.weights is None


def test_without_a_list_all_other_columns_are_categorical(file):
    batch = only(read_csv(file(ADS), label="click"))
    assert batch.values is None
    assert batch.keys[:3].tolist() == [key("site", "a.com"), key("price", "0.5"), key("user", "17")]
    assert batch.nnz == 3 + 2 + 1


def test_a_weight_is_a_column_too(file):
    batch = only(read_csv(file("y,w,c\n1,0.5,a\n0,2,b\n"), label="y", weight="w"))
    assert batch.weights.tolist() == [0.5, 2]
    assert batch.keys.tolist() == [key("c", "a"), key("c", "b")]
    assert only(read_csv(file("y,w,c\n1,1,a\n"), label="y", weight="w")).weights is None


def test_a_label_may_be_text(file):
    text = "y,c\nyes,a\nno,b\nYES,c\n"
    assert only(read_csv(file(text), label="y", positive="yes")).labels.tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match=r"line 2, column 1 .*: the label is not a number"):
        list(read_csv(file(text), label="y"))


@pytest.mark.parametrize("threads", [1, 2])
def test_each_file_has_its_own_header_with_the_columns_in_any_order(file, threads):
    paths = [file("y,a,b\n1,p,q\n", "1.csv"), file("b,unused,a,y\nq,z,p,1\n", "2.csv")]
    first, second = read_csv(paths, label="y", categorical=["a", "b"], batch_size=1, reader_threads=threads)
    assert first.keys.tolist() == [key("a", "p"), key("b", "q")]
    assert sorted(second.keys) == sorted(first.keys)


def test_files_without_a_header_have_names(file):
    batch = only(read_csv(file("1\ta\n0\tb\n"), label="y", columns=["y", "c"], sep="\t"))
    assert batch.labels.tolist() == [1, 0]
    assert batch.keys.tolist() == [key("c", "a"), key("c", "b")]


@pytest.mark.combined
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("threads", [1, 2])
def test_splits_positions_and_streams_know_the_header(file, pack, threads):
    lines = b"".join(b"%d,%d\n" % (i % 2, i) for i in range(80_000))
    path = file(pack(b"y,n\r\n" + lines))
    reader = read_csv(path, label="y", numeric=["n"], batch_size=9000, reader_threads=threads)
    want = list(range(80_000))
    assert np.concatenate([batch.values for batch in reader]).tolist() == want
    parts = [batch.values.tolist() for rank in range(3) for batch in reader.split(rank, 3)]
    assert sorted(value for part in parts for value in part) == want
    batches = iter(reader)
    next(batches), next(batches)
    resumed = reader.resume(reader.position())
    assert np.concatenate([batch.values for batch in resumed]).tolist() == want[18_000:]
    stream = read_csv(io.BytesIO(path.read_bytes()), label="y", numeric=["n"], reader_threads=threads)
    assert np.concatenate([batch.values for batch in stream]).tolist() == want
    stream = read_csv(io.BytesIO(path.read_bytes()), label="y", numeric=["n"])
    stream = stream.resume(reader.position() | {"files": stream.position()["files"]})
    assert np.concatenate([batch.values for batch in stream]).tolist() == want[18_000:]


def test_a_byte_order_mark_quotes_and_returns_are_no_part_of_names_and_cells(file):
    text = '\ufeff"y","a, ""b""",c\r\n1,"x, ""y""",z\r\n'
    batch = only(read_csv(file(text), label="y"))
    assert batch.keys.tolist() == [key('a, "b"', 'x, "y"'), key("c", "z")]


def test_missing_cells_make_no_feature(file):
    text = "y,c,n\n1,null,nan\n1,?,3\n1,N/A,\n"
    assert only(read_csv(file(text), label="y", numeric=["n"])).keys.tolist() == [key("c", "?"), key("n")]
    batch = only(read_csv(file(text), label="y", numeric=["n"], na_values=["?"]))
    assert batch.keys.tolist() == [key("n")]
    kept = only(read_csv(file("y,c\n1,null\n1,\n"), label="y", keep_default_na=False))
    assert kept.keys.tolist() == [key("c", "null"), key("c", "")]


@pytest.mark.parametrize(
    ("line", "complaint", "column"),
    [
        ("1,a", "more or fewer cells than columns", 4),
        ("1,a,2,b", "more or fewer cells than columns", 6),
        ('1,"a,2', "no closing quote on its line", 3),
        ('1,"a"b,2', "something stands between a closing quote and the end", 6),
        ("1,a,x", "a value is not a finite decimal number", 5),
        ("1,a,1e39", "a value is too large for float32", 5),
        ("2,a,1", "the label is neither", 1),
        (",a,1", "the label or the weight is missing", 1),
    ],
)
def test_what_is_malformed_is_named_with_its_place(file, line, complaint, column):
    path = file(f"y,c,n\n1,ok,1\n{line}\n")
    with pytest.raises(ValueError, match=f"x.csv, line 3, column {column} .the line begins at byte 13.: .*{complaint}"):
        list(read_csv(path, label="y", numeric=["n"]))
    reader = read_csv(path, label="y", numeric=["n"], on_error="skip")
    assert (sum(map(len, reader)), reader.skipped) == (1, 1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"label": "z"}, r"x.csv, line 1: column 'z' is not there: the columns are 'y', 'a', 'b', 'b'"),
        ({"numeric": ["a", "z"]}, "column 'z' is not there"),
        ({"categorical": ["b"]}, "column 'b' is there 2 times"),
        ({"interactions": ["a", "z"]}, "column 'z' is not there"),
    ],
)
def test_columns_that_are_not_in_a_file_are_an_error_of_the_pass(file, change, complaint):
    reader = read_csv(file("y,a,b,b\n1,2,3,4\n"), **{"label": "y", **change})
    with pytest.raises(ValueError, match=complaint):
        list(reader)


@pytest.mark.parametrize(
    ("change", "error", "complaint"),
    [
        ({"sep": ""}, ValueError, "sep is ''"),
        ({"sep": "::"}, ValueError, "sep is '::'"),
        ({"sep": "."}, ValueError, "pass one character that is not"),
        ({"sep": "x"}, ValueError, "pass one character that is not"),
        ({"categorical": "a"}, TypeError, "categorical is 'a': pass a list"),
        ({"numeric": [1]}, TypeError, r"numeric is \[1\]: pass a list"),
        ({"na_values": "x"}, TypeError, "na_values is 'x': pass a list"),
        ({"na_values": [None]}, TypeError, "na_values: None is neither a text nor a number"),
        ({"numeric": ["y"]}, ValueError, "column 'y' has two roles"),
        ({"weight": "y"}, ValueError, "column 'y' has two roles"),
        (
            {"categorical": ["a"], "interactions": ["a", "b"]},
            ValueError,
            "'b' of an interaction is not a feature",
        ),
        ({"interactions": [("a", "y")]}, ValueError, "column 'y' of an interaction is not a feature"),
        ({"interactions": [("a", 1)]}, TypeError, "holds 1: pass names of columns"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_at_once(file, change, error, complaint):
    with pytest.raises(error, match=complaint):
        read_csv(file("y,a\n1,2\n"), **{"label": "y", **change})


def test_an_empty_file_and_one_with_only_a_header_have_no_rows(file):
    for text in ("", "y,a\n", "y,a"):
        assert list(read_csv(file(text), label="y")) == []
    with pytest.raises(ValueError, match="line 1: column 'y' is not there: the columns are"):
        list(read_csv(file("\n1\n"), label="y"))
    with pytest.raises(ValueError, match="line 1: the header is not UTF-8"):
        list(read_csv(file(b"\xff\n1\n"), label="y"))


@pytest.mark.parametrize("header", [b"y,a\rb", b"y,a\r1,2\r0,3\r", b'y,"a', b'y,"a"b', b"y," + b"a" * 200_000])
def test_a_header_that_is_no_row_is_an_error_with_its_file(file, header):
    with pytest.raises(ValueError, match=r"line 1: (the header is not a row of column names|a carriage return)"):
        list(read_csv(file(header + b"\n1,2\n"), label="y"))


def test_a_reader_tells_what_was_asked_of_it_and_can_be_pickled(file):
    asked = {"label": "click", "numeric": ["price"], "interactions": [["site", "user"]], "na_values": ["?"]}
    reader = read_csv(file(ADS), **asked)
    assert reader.schema == asked
    again = pickle.loads(pickle.dumps(read_csv(reader.path, **reader.schema)))
    assert only(again).keys.tolist() == only(reader).keys.tolist()
    assert read_csv(file(ADS), label="click", interactions=["site", "user"]).schema["interactions"] == [
        ["site", "user"]
    ]


TEXTS = st.text(st.characters(blacklist_characters="\n\r\0", blacklist_categories=["Cs"]), max_size=12)

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.slow
@given(
    rows=st.lists(
        st.tuples(st.booleans(), TEXTS, TEXTS, st.floats(width=32, allow_nan=False, allow_infinity=False)), max_size=20
    ),
    separator=st.sampled_from([",", ";", "\t"]),
    size=st.integers(1, 9),
)
def test_what_the_csv_module_writes_is_read_back(tmp_path_factory, rows, separator, size):
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, delimiter=separator, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(["y", "a", "b", "x"])
        writer.writerows([int(label), a, b, x] for label, a, b, x in rows)
    reader = read_csv(path, label="y", numeric=["x"], sep=separator, keep_default_na=False, batch_size=size)
    batches = list(reader)
    keys = [one for batch in batches for one in batch.keys.tolist()]

    def read(cell):
        return cell_text(cell.encode()).decode()

    assert [label for batch in batches for label in batch.labels.tolist()] == [float(label) for label, *_ in rows]
    assert keys == [k for _, a, b, _ in rows for k in (key("a", read(a)), key("b", read(b)), key("x"))]
    values = np.concatenate([np.zeros(0, np.float32), *(batch.values for batch in batches)])
    assert values.tolist() == [v for *_, x in rows for v in (1, 1, np.float32(x))]
