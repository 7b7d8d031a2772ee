"""A body of text differs from a file in nothing but where its bytes come from."""

from __future__ import annotations

import io

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import shoal

pa = pytest.importorskip("pyarrow")
pytest.importorskip("starlette")

from shoal.serve.bodies import ARROW, CSV, JSON, TEXT, examples  # noqa: E402
from shoal.serve.inputs import InputSpec  # noqa: E402
from shoal.serve.limits import Account, Budget, Limits, RequestError  # noqa: E402

ASKED = {"label": "y", "categorical": ["site"], "numeric": ["price"], "lists": {"seen": "site"}}
HEADER = b"site,price,seen\n"


@pytest.fixture(scope="module")
def of_parquet():
    """A model of a table, whose format has no missing texts of its own."""
    table = pa.table({"y": [1, 0], "site": ["a", "b"], "price": [0.5, 1], "seen": [["a"], ["b"]]})
    with shoal.LogisticRegression() as model:
        model.fit(shoal.read_arrow(table, **ASKED), progress=False)
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


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(head=st.sampled_from([HEADER, b"\xef\xbb\xbf" + HEADER, b"price,site,seen,y\r\n"]), lines=st.lists(PIECES))
@example(head=HEADER, lines=["a\u2028b,1,", "\x85,,x|y", "\x0b,NA,\x0c"])
@example(head=b"\xef\xbb\xbf" + HEADER, lines=["a,,", "", "b,NA,a||b", "\r"])
@example(head=HEADER, lines=["a" * 200_000 + ",1,b", '"x, ""y""",2,"p|q"'])
@example(head=HEADER, lines=["a,", "a,1,b,c", '"a,1,b'])
def test_a_body_of_csv_is_read_as_the_file(of_parquet, head, lines):
    body = head + "\n".join(lines).encode()
    assert agree(of_body(body, CSV, of_parquet), of_file(shoal.read_csv, body, **ASKED))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.sampled_from([*ODD, "|a ", "|b", "x", ":2", "1 "]), max_size=9).map("".join)))
@example(["|a x\u2028y", "", "1 |b y:2"])
def test_a_body_of_lines_is_read_as_the_file(of_lines, lines):
    body = "\n".join(lines).encode()
    assert agree(of_body(body, TEXT, of_lines), of_file(shoal.read_vw, body))


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
