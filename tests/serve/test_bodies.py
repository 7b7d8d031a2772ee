"""A body of text differs from a file in nothing but where its bytes come from."""

from __future__ import annotations

import contextlib
import io
import itertools
import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import shoal
from tiers import rounds

pa = pytest.importorskip("pyarrow")

from shoal.serve.bodies import ARROW, JSON, examples  # noqa: E402
from shoal.serve.inputs import InputSpec  # noqa: E402
from shoal.serve.limits import Account, Budget, Limits, RequestError  # noqa: E402

TEXT = "text/plain"
CSV = "text/csv"
ASKED = {"label": "y", "categorical": ["site"], "numeric": ["price"], "lists": {"seen": "site"}}
HEADER = b"site,price,seen\n"
WITH_VECTORS = {"label": "y", "categorical": ["site"], "vectors": ["dwell"]}


@pytest.fixture(scope="module")
def of_parquet():
    """A model of a table, whose format has no missing texts of its own."""
    table = pa.table({"y": [1, 0], "site": ["a", "b"], "price": [0.5, 1], "seen": [["a"], ["b"]]})
    with shoal.LogisticRegression() as model:
        model.fit(shoal.read_arrow(table, **ASKED), progress=False)
        yield InputSpec(model)


@pytest.fixture(scope="module")
def of_vectors():
    """A model of a table with a column of vectors."""
    table = pa.table({"y": [1, 0], "site": ["a", "b"], "dwell": [[0.5, 1], [2]]})
    with shoal.LogisticRegression() as model:
        model.fit(shoal.read_arrow(table, **WITH_VECTORS), progress=False)
        yield InputSpec(model)


@pytest.fixture(scope="module")
def of_lines():
    with shoal.LogisticRegression() as model:
        model.fit(shoal.read_vw(io.BytesIO(b"1 |a x |b y\n")), progress=False)
        yield InputSpec(model)


def rows(batch):
    return (batch.indptr.tolist(), batch.keys.tolist(), None if batch.values is None else batch.values.tolist())


def of_body(body, kind, spec):
    try:
        with Account(Budget(Limits())) as account:
            return rows(examples(body, kind, spec, account))
    except RequestError as error:
        return str(error)


def of_file(read, body, **how):
    try:
        batches = list(read(io.BytesIO(body), batch_size=1 << 20, **how).unlabelled())
    except ValueError as error:
        return str(error)
    return rows(batches[0]) if batches else "nothing"


def agree(got, want):
    """Whether both are the same examples, or both are refused."""
    return got == want if isinstance(want, tuple) else isinstance(got, str)


ODD = ["\u2028", "\x85", "\x0b", "\x0c", "\x1c", "\ufeff", "\r", "\n", "\r\n", "\t", ",", '"', '""', "|", " ", "\0"]
PIECES = st.lists(
    st.sampled_from([*ODD, "a", "NA", "nan", "1", "0.5", "-1e3", "True", "1.0", "+", "é", ",,", "null", "2024-05-01"]),
    max_size=12,
).map("".join)


@pytest.mark.slow
@settings(max_examples=rounds(400), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(head=st.sampled_from([HEADER, b"\xef\xbb\xbf" + HEADER, b"price,site,seen,y\r\n"]), lines=st.lists(PIECES))
@example(head=HEADER, lines=["a\u2028b,1,", "\x85,,x|y", "\x0b,NA,\x0c"])
@example(head=b"\xef\xbb\xbf" + HEADER, lines=["a,,", "", "b,NA,a||b", "\r"])
@example(head=HEADER, lines=["a" * 200_000 + ",1,b", '"x, ""y""",2,"p|q"'])
@example(head=HEADER, lines=["a,", "a,1,b,c", '"a,1,b'])
def test_a_body_of_csv_is_read_as_the_file(of_parquet, head, lines):
    body = head + "\n".join(lines).encode()
    assert agree(of_body(body, CSV, of_parquet), of_file(shoal.read_csv, body, **ASKED))


VECTORS = st.lists(st.none() | st.sampled_from([0.5, -3.0, 1e-46, -0.0, 16777217.0]), max_size=4) | st.none()


@settings(max_examples=rounds(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["a", "c", None]), VECTORS), min_size=1, max_size=5))
def test_vectors_in_every_body_are_those_of_the_readers(of_vectors, cells):
    table = pa.Table.from_pylist(
        [{"dwell": dwell, "site": site} for site, dwell in cells],
        pa.schema({"dwell": pa.list_(pa.float64()), "site": pa.string()}),
    )
    (batch,) = shoal.read_arrow(table, **WITH_VECTORS).unlabelled()
    want = repr(rows(batch))  # -0.0 is not 0.0
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert repr(of_body(sink.getvalue(), ARROW, of_vectors)) == want
    assert repr(of_body(json.dumps({"instances": table.to_pylist()}).encode(), JSON, of_vectors)) == want
    texts = [["" if x is None else repr(x) for x in dwell or ()] for _, dwell in cells]
    if [""] not in texts:  # in csv an empty cell
        lines = [f"{'|'.join(some)},{site or ''}\n" for some, (site, _) in zip(texts, cells, strict=True)]
        assert repr(of_body(("dwell,site\n" + "".join(lines)).encode(), CSV, of_vectors)) == want


def test_vectors_of_texts_are_those_of_numbers(of_vectors):
    numbers, texts = [[1, None, 2, None], [-3]], [["1", "", " 2 ", None], ["-3e0"]]
    want = of_body(json.dumps({"instances": [{"dwell": some} for some in numbers]}).encode(), JSON, of_vectors)
    assert want[2] == [1, 0, 2, 0, -3]
    sink = io.BytesIO()
    table = pa.table({"site": pa.nulls(2, pa.string()), "dwell": texts})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert of_body(sink.getvalue(), ARROW, of_vectors) == want
    assert of_body(json.dumps({"instances": [{"dwell": some} for some in texts]}).encode(), JSON, of_vectors) == want


def test_a_body_of_csv_with_what_is_no_number_of_a_vector_is_refused(of_vectors):
    for cell in ("1|x|2", '"1|x|2"'):
        got = of_body(f"site,dwell\na,1|2\nb,{cell}\n".encode(), CSV, of_vectors)
        assert got.startswith("instance 1, column 'dwell': a value is not a finite decimal number at byte ")


def test_vectors_are_described(of_vectors):
    assert of_vectors.describe()["columns"] == {"site": "text", "dwell": "list of numbers"}


@pytest.mark.slow
@settings(max_examples=rounds(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.sampled_from([*ODD, "|a ", "|b", "x", ":2", "1 "]), max_size=9).map("".join)))
@example(["|a x\u2028y", "", "1 |b y:2"])
def test_a_body_of_lines_is_read_as_the_file(of_lines, lines):
    body = "\n".join(lines).encode()
    assert agree(of_body(body, TEXT, of_lines), of_file(shoal.read_vw, body))


@pytest.mark.parametrize("kind", [pa.binary(1), pa.binary(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_texts_of_every_type_of_arrow_are_read_as_the_table(of_parquet, kind):
    sites = pa.array(["a", None, "7"])
    texts = sites.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else pa.array(sites.to_pylist(), kind)
    lists = pa.ListArray.from_arrays([0, 2, 2, 3], texts)
    table = pa.table({"seen": lists, "price": [1, 2, 3], "site": texts})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (batch,) = shoal.read_arrow(table, **ASKED).unlabelled()
    got = of_body(sink.getvalue(), ARROW, of_parquet)
    assert got == rows(batch)
    strings = table.set_column(0, "seen", pa.ListArray.from_arrays([0, 2, 2, 3], sites)).set_column(2, "site", sites)
    assert got == rows(next(iter(shoal.read_arrow(strings, **ASKED).unlabelled())))


def test_a_body_of_arrow_is_read_as_the_table(of_parquet):
    table = pa.table(
        {
            "seen": pa.array([["a", None, "1.0"], None, [], ["True"]]),
            "price": ["1", " 2 ", None, "-0.5e1"],
            "more": [1, 2, 3, 4],
            "site": pa.array([1.0, None, 3.5, 20240501123456.0]),
        }
    )
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    (batch,) = shoal.read_arrow(table, **ASKED).unlabelled()
    assert of_body(sink.getvalue(), ARROW, of_parquet) == rows(batch)


NUMBERS = ["0", "7", "07", "1234567", "12345678", "123456789", "9" * 19, f"{2**64 - 1}", f"{2**64}", "-1", "1.0", "1e3"]
MARKS = [",", ",", ",", ", ", ", ", ",  ", " ", "\n", "\t\r", "]", "[", '"5"', "null", "x"]


@pytest.mark.slow
@settings(max_examples=rounds(1000))
@given(st.lists(st.tuples(st.sampled_from(NUMBERS), st.sampled_from(MARKS)).map("".join), max_size=8).map("".join))
@example(",".join(["123456"] * 200))
@example(", ".join(["0", "7", "1234567", "12345678", "123456789"] * 30))
@example("1, 07, 5, 6, 7, 8, 9")
@example("1, 0, 00, 6, 7, 8, 9")
@example("1,2, , 3, 4, 5, 6, 7")
@example("1, 2.5, 3, 4, 5, 6, 7")
@example("1 2")
@example("1,")
@example(",".join(["1"] * 64))
def test_a_list_of_keys_in_json_is_read_as_python_reads_it(of_lines, text):
    body = '{"instances": [{"keys": [5]}, {"keys":[' + text + "]}]}"
    try:
        keys = json.loads(body)["instances"][1]["keys"]
    except (ValueError, TypeError):
        keys = None
    found = of_body(body.encode(), JSON, of_lines)
    if keys is not None and all(type(key) is int and 0 <= key < 2**64 for key in keys):
        assert found == ([0, 1, 1 + len(keys)], [5, *keys], None)
    else:
        assert isinstance(found, str)
        assert not ("malformed" in found and keys is not None)


BETWEEN = ["]", "}", ",", "{", '"keys"', ":", "[", " ", "\n", '"values":[1]', '"other"', "null", "3", "]},{"]


@pytest.mark.slow
@settings(max_examples=rounds(1000))
@given(st.lists(st.sampled_from(BETWEEN), max_size=12).map("".join))
@example(']},{"keys":[')
@example(' ] } ,\n{ "keys" : [ ')
@example(']},{"keys":[]},{"keys":[')
@example('],"values":[1]},{"keys":[')
@example(']},{"keys":[3,')
@example(']},{"keys":[3],"keys":[')
@example(']},{"keys":[[')
@example(']},{},{"keys":[')
def test_what_lies_between_lists_of_keys_in_json_is_read_as_python_reads_it(of_lines, text):
    body = '{"instances": [{"keys": [5' + text + "7]}]}"
    pairs = None
    with contextlib.suppress(ValueError, TypeError):
        pairs = json.loads(body, object_pairs_hook=list)[0][1]
    found = of_body(body.encode(), JSON, of_lines)
    if pairs is not None and all(is_instance_of_keys(one) for one in pairs):
        lists = [dict(one) for one in pairs]
        keys = [key for one in lists for key in one["keys"]]
        values = [value for one in lists for value in one.get("values", [1.0] * len(one["keys"]))]
        offsets = [0, *itertools.accumulate(len(one["keys"]) for one in lists)]
        assert found == (offsets, keys, values if any(value != 1 for value in values) else None)
    else:
        assert isinstance(found, str)


def is_instance_of_keys(pairs):
    """Whether the members of an object are keys and maybe values, of one length."""
    if not isinstance(pairs, list) or not all(isinstance(one, tuple) for one in pairs):
        return False
    lists, names = dict(pairs), [name for name, _ in pairs]
    if "keys" not in lists or not set(names) <= {"keys", "values"} or len(set(names)) < len(names):
        return False
    numbers = [one for its in lists.values() for one in (its if isinstance(its, list) else [None])]
    return all(type(one) is int for one in numbers) and len({len(its) for its in lists.values()}) == 1


def test_a_body_that_ends_within_a_list_of_keys_is_refused(of_lines):
    body = b'{"instances": [{"keys": [5, 66, 777]},{"keys":[8, 9'
    for size in range(len(body) + 1):
        assert isinstance(of_body(body[:size], JSON, of_lines), str)


NAN = "JSON is malformed (byte {}): syntax error: JSON has no {}, send null for a cell that is missing"


@pytest.mark.parametrize(
    ("cell", "at", "constant"),
    [("NaN", 35, "NaN"), ("Infinity", 35, "Infinity"), ("-Infinity", 36, "Infinity"), ("nan", 36, None)],
)
def test_json_without_a_number_for_nan_is_refused_at_its_position(of_parquet, cell, at, constant):
    for body in (
        '{"instances":[{"price":1},{"price":%s}]}',
        '{"instances":[{"price":1},{"other":%s}]}',
        '{"instances":[{"site":"a"},{"seen":[%s]}]}',
    ):
        where = at + body.index("%s") - 35
        got = of_body((body % cell).encode(), JSON, of_parquet)
        if constant:
            assert got == NAN.format(where, constant)
        else:
            assert got.startswith("JSON is malformed")


@pytest.mark.parametrize("cell", ["1e999", "-1e999", "4e38"])
def test_json_numbers_that_are_not_finite_are_refused(of_parquet, cell):
    got = of_body(b'{"instances":[{"price":1},{"price":%s}]}' % cell.encode(), JSON, of_parquet)
    assert isinstance(got, str)
    assert got.startswith("instance 1")


def test_the_columns_of_a_body_that_the_model_does_not_know_are_collected(of_parquet):
    def unknown(body, kind, spec=of_parquet):
        found = set()
        with Account(Budget(Limits())) as account:
            examples(body, kind, spec, account, found)
        return found

    known = {"site": "a", "price": 1, "seen": ["a"], "y": 1}
    assert unknown(json.dumps({"instances": [known, {}, {"keys": [1]}]}).encode(), JSON) == set()
    rows = [{**known, "a\nb": None}, {"Site": "a", "a\nb": 2}, {"more": [{}]}]
    assert unknown(json.dumps({"instances": rows}).encode(), JSON) == {"a\nb", "Site", "more"}
    assert unknown(b'site,"a,b",price,seen,y\na,2,1,a|b,1\n', CSV) == {"a,b"}
    table = pa.table({"site": ["a"], "price": [1.0], "seen": [["a"]], "y": [1], "other": [None]})
    keys = pa.table({"keys": pa.array([[1]], pa.list_(pa.uint64())), "site": ["a"], "other": [None]})
    for one in (table, keys):
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, one.schema) as writer:
            writer.write_table(one)
        assert unknown(sink.getvalue(), ARROW) == {"other"}
    with shoal.LogisticRegression() as model:  # the columns of files without a header are those that were named
        how = {"label": "y", "categorical": ["site"], "columns": ["y", "at", "site"]}
        model.fit(shoal.read_csv(io.BytesIO(b"1,2,a\n0,3,b\n"), **how), progress=False)
        spec = InputSpec(model)
    assert unknown(b"1,2,a\n", CSV, spec) == set()
    assert unknown(b'{"instances":[{"site":"a","at":2,"sites":"a"}]}', JSON, spec) == {"sites"}


def test_a_table_without_a_column_of_the_model_is_refused_as_a_file_is(of_parquet):
    what = "column 'price' is not there: the columns are 'site', 'seen', 'zone'"
    assert of_body(b"site,seen,zone\na,b,c\n", CSV, of_parquet) == what
    sink = io.BytesIO()
    table = pa.table({"site": ["a"], "seen": [["b"]], "zone": ["c"]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert of_body(sink.getvalue(), ARROW, of_parquet) == what


@pytest.mark.parametrize(
    "text", ["1", "-0.5", " 2 ", "1e3", ".5", "5.", "1e39", "nan", "inf", "0x1", "1_0", " ", "²", "1e", "1e400"]
)
def test_numbers_of_text_are_those_of_csv(of_parquet, text):
    got = of_body(f'{{"instances": [{{"price": "{text}"}}]}}'.encode(), JSON, of_parquet)
    asked = {"label": None, "categorical": [], "numeric": ["price"], "keep_default_na": False}
    want = of_file(shoal.read_csv, f"price\n{text}\n".encode(), **asked)
    assert isinstance(got, str) if isinstance(want, str) else got[2] == want[2]
