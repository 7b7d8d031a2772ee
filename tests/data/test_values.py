"""One value, one key: whatever column type, file format, frame library or request carries it."""

from __future__ import annotations

import csv
import datetime as dt
import io
import itertools
import json
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle.text
import shoal
from shoal import _reader, cli, hash_strings
from shoal.data.hashing import hash_cells
from tiers import rounds

pa = pytest.importorskip("pyarrow")
pa_csv = pytest.importorskip("pyarrow.csv")
pq = pytest.importorskip("pyarrow.parquet")
pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")

from shoal.serve.bodies import ARROW, JSON, examples  # noqa: E402
from shoal.serve.inputs import InputSpec  # noqa: E402
from shoal.serve.limits import Account, Budget, Limits  # noqa: E402

FIELD = int(hash_strings(["c"])[0])


def key(text):
    return int(hash_strings([text], FIELD)[0])


def keys_of(reader):
    return [int(key) for batch in reader for key in batch.keys]


# ---- sources: each returns the keys of a column of cells -----------------------------------------------------------


@pytest.fixture(scope="module")
def spec():
    with shoal.LogisticRegression() as model:
        model.fit(shoal.read_arrow(pa.table({"y": [1, 0], "c": ["a", "b"]}), label="y", categorical=["c"]),
                  progress=False)  # fmt: skip
        yield InputSpec(model)


def of_body(body, kind, spec):
    with Account(Budget(Limits())) as account:
        return examples(body, kind, spec, account).keys.tolist()


def of_text(folder, text, sep=","):
    (folder / "x").write_text(text)
    return keys_of(shoal.read_csv(folder / "x", label=None, categorical=["c"], sep=sep))


def of_table(table):
    return keys_of(shoal.read_arrow(table, label=None, categorical=["c"]))


def of_parquet(folder, table):
    pq.write_table(table, folder / "x.parquet")
    return keys_of(shoal.read_parquet(folder / "x.parquet", label=None, categorical=["c"]))


def arrow_body(table):
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def arrays_of(value):
    """The Arrow columns that can hold a value."""
    kinds = []
    if isinstance(value, bool):
        kinds = [pa.bool_()]
    elif isinstance(value, int | float | Decimal):
        kinds = [pa.float64(), pa.decimal128(38, 12), pa.decimal256(60, 20)]
        if float(value).is_integer() and -(2**63) <= value < 2**63:
            kinds.append(pa.int64())
            value = int(value)
        if float(value) == float(np.float32(float(value))):
            kinds.append(pa.float32())
    elif isinstance(value, dt.datetime):
        kinds = [pa.timestamp(unit, zone) for unit in ("ms", "us", "ns") for zone in (None, "UTC", "Asia/Tokyo")]
        if not value.microsecond:
            kinds.append(pa.timestamp("s"))
        if value.time() == dt.time():
            kinds += [pa.date32(), pa.date64()]
    else:
        kinds = [pa.string(), pa.large_string(), pa.string_view()]
    for kind in kinds:
        cell = value
        if pa.types.is_decimal(kind):
            cell = Decimal(repr(value) if isinstance(value, float) else value)
            if -cell.as_tuple().exponent > kind.scale:
                continue
        elif pa.types.is_floating(kind):
            cell = float(value)
            if isinstance(value, int) and int(cell) != value:
                continue
        elif pa.types.is_timestamp(kind):
            plain = pa.array([value, None], pa.timestamp("us")).cast(pa.timestamp(kind.unit))
            yield plain.view(kind)
            continue
        elif pa.types.is_date(kind):
            cell = value.date()
        yield pa.array([cell, None], kind)


def csv_texts(value, frame):
    """The texts of a value in csv files of pandas, polars and pyarrow, and their own."""
    yield frame.to_csv(index=False)
    yield pl.DataFrame({"c": [value, None]}, strict=False).write_csv()
    if not isinstance(value, Decimal):
        sink = io.BytesIO()
        pa_csv.write_csv(pa.table({"c": [value]}), sink)
        yield sink.getvalue().decode()


def every_source(value, folder, spec):
    """The keys of a column with the value, and a missing cell where a source has them, from all sources."""
    for array in arrays_of(value):
        table = pa.table({"c": array})
        name = str(array.type)
        yield f"Arrow {name}", of_table(table)
        yield f"Arrow body {name}", of_body(arrow_body(table), ARROW, spec)
        yield f"Arrow dictionary {name}", of_table(pa.table({"c": array.dictionary_encode()}))
        yield f"lists of {name}", [
            int(hash) for batch in shoal.read_arrow(
                pa.table({"c": pa.ListArray.from_arrays([0, 1], array)}), label=None, categorical=[], lists={"c": "c"}
            ) for hash in batch.keys
        ]  # fmt: skip
        yield f"Parquet {name}", of_parquet(folder, table)
        if array.type != pa.date64() and not pa.types.is_decimal256(array.type):
            yield f"polars {name}", of_table(pl.from_arrow(table))
    frame = pd.DataFrame({"c": [value, None]})
    yield "pandas", of_table(frame)
    for text in csv_texts(value, frame):
        yield f"csv {text!r}", of_text(folder, text)
        yield f"body of csv {text!r}", of_body(text.encode(), "text/csv", spec)
        rows = list(csv.reader(io.StringIO(text)))
        lines = "".join("\t".join(row) + "\n" for row in rows)
        yield f"tsv {text!r}", of_text(folder, lines, "\t")
        quoted = "".join('"' + '","'.join(row) + '"\n' for row in rows)
        yield f"quoted {text!r}", of_text(folder, quoted)
        yield (
            f"JSON text {rows[1][0]!r}",
            of_body(json.dumps({"instances": [{"c": rows[1][0]}, {"c": None}]}).encode(), JSON, spec),
        )
    if isinstance(value, bool | int | float | str):
        yield "JSON", of_body(json.dumps({"instances": [{"c": value}, {"c": None}, {}]}).encode(), JSON, spec)


VALUES = [
    (20240501123456, "20240501123456"), (20240501123456.0, "20240501123456"), (0, "0"), (-0.0, "0"), (-17, "-17"),
    (2.0, "2"), (Decimal("2.00"), "2"), (0.5, "0.5"), (-1.25, "-1.25"), (2**53, str(2**53)),
    (2.0**60, str(2**60)), (10**15, str(10**15)),
    (True, "true"), (False, "false"),
    (dt.datetime(2024, 5, 1, 12, 34, 56), "2024-05-01 12:34:56"),
    (dt.datetime(2024, 5, 1, 12, 34, 56, 500_000), "2024-05-01 12:34:56.5"),
    (dt.datetime(2024, 5, 1), "2024-05-01"), (dt.datetime(1969, 12, 31, 23, 59, 59), "1969-12-31 23:59:59"),
    ("a", "a"), ("True", "true"), ("17.0", "17"), ("1.10", "1.10"), ("007", "007"), ("1e5", "1e5"), ("é", "é"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), VALUES, ids=[repr(value) for value, _ in VALUES])
def test_a_value_has_one_key_from_every_source(tmp_path, spec, value, text):
    found = dict(every_source(value, tmp_path, spec))
    assert len(found) > 10
    assert {source: keys for source, keys in found.items() if keys != [key(text)]} == {}


NUMBERS = st.one_of(
    st.integers(-(2**53), 2**53), st.integers(-(10**15), 10**15).map(float), st.floats(-2048, 2048, width=16),
    st.integers(-(10**9), 10**9).map(lambda number: number / 64),
)  # fmt: skip
MOMENTS = st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2250, 1, 1)).map(
    lambda moment: moment.replace(microsecond=moment.microsecond // 1000 * 1000)
)


@pytest.mark.slow
@settings(max_examples=rounds(60), deadline=None)
@given(value=st.one_of(NUMBERS, MOMENTS, st.booleans()))
def test_any_pair_of_sources_agrees_on_any_value(tmp_path_factory, spec, value):
    folder = tmp_path_factory.mktemp("values")
    if isinstance(value, float) and not value.is_integer() and abs(value) < 1e-3:
        value = 0.0  # writers of csv differ in their exponents, which are text
    found = dict(every_source(value, folder, spec))
    for (a, some), (b, others) in itertools.pairwise(found.items()):
        assert some == others, (value, a, b)


def test_one_missing_cell_does_not_change_the_keys_of_a_column_of_whole_numbers():
    whole = pd.DataFrame({"c": [20240501123456, 7]})
    holed = pd.DataFrame({"c": [20240501123456, None, 7]})
    assert holed["c"].dtype == np.float64
    assert of_table(holed) == of_table(whole) == [key("20240501123456"), key("7")]


def rounded(kind, example, name="c"):
    least = {"halffloat": 2**11, "float": 2**24, "double": 2**53}[kind]
    return (
        f"column {name!r} holds {kind}, such as {example}: from {least} on, these cannot hold every whole number, so "
        f"ids were probably rounded, and their keys differ from those of the same ids as integers or text; read the "
        f"column as integers or text (pandas: dtype={{{name!r}: 'Int64'}}, pyarrow: "
        f"column_types={{{name!r}: pyarrow.int64()}})"
    )


def test_ids_that_a_column_of_floats_has_rounded_are_warned_of_once(tmp_path, spec, caplog):
    frame = pd.DataFrame({"c": [7, None, 2**53 + 1, 2**60]})
    assert frame["c"].dtype == np.float64
    table = pa.Table.from_pandas(frame)
    pq.write_table(table, tmp_path / "x.parquet")
    for reader in (
        shoal.read_arrow(frame, label=None),
        shoal.read_arrow(frame, label=None).with_columns(),
        shoal.read_arrow(frame.astype("category"), label=None),
        shoal.read_parquet(tmp_path / "x.parquet", label=None, batch_size=2),
    ):
        caplog.clear()
        assert keys_of(reader) == keys_of(reader.unlabelled())
        assert [record.getMessage() for record in caplog.records] == [rounded("double", 2**53)]
    caplog.clear()
    spec.rounded.clear()
    for _ in range(2):
        of_body(arrow_body(table), ARROW, spec)
    assert [record.getMessage() for record in caplog.records] == [rounded("double", 2**53)]


@pytest.mark.parametrize(("kind", "bits"), [("float16", 11), ("float32", 24), ("float64", 53)])
def test_floats_are_warned_of_from_the_magnitude_at_which_whole_numbers_are_missing(caplog, kind, bits):
    dtype = np.dtype(kind)
    of_table(pa.table({"c": np.array([2**bits - 1, 1 - 2**bits, 0.5, np.nan, np.inf], dtype)}))
    of_table(pa.table({"c": pa.array([2**bits, 2**bits + 1, None])}))
    list(shoal.read_arrow(pa.table({"c": np.array([2**bits], dtype)}), label=None, numeric=["c"]))
    assert caplog.records == []
    of_table(pa.table({"c": np.array([0, -(2**bits)], dtype)}))
    name = {"float16": "halffloat", "float32": "float", "float64": "double"}[kind]
    assert [record.getMessage() for record in caplog.records] == [rounded(name, -(2**bits))]


def test_a_list_is_named_in_messages_of_its_items_not_the_column_whose_keys_it_shares(caplog):
    table = pa.table({"c": ["7"], "seen": pa.array([[2.0**60, None]])})
    how = {"label": None, "categorical": ["c"], "lists": {"seen": "c"}}
    keys_of(shoal.read_arrow(table, **how))
    assert [record.getMessage() for record in caplog.records] == [rounded("double", 2**60, "seen")]
    with pytest.raises(ValueError, match=r"column 'seen' holds list<.*struct<a: int64>>, not lists of texts"):
        keys_of(shoal.read_arrow(table.set_column(1, "seen", pa.array([[{"a": 1}]])), **how))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("TRUE", "true"), ("tRUE", "tRUE"), ("Trues", "Trues"), ("17.00", "17"), ("-3.0", "-3"), ("-0.0", "0"),
        ("-0", "0"), ("007.0", "007.0"), ("1.10", "1.10"), ("v1.0", "v1.0"), ("2.5e+13", "25000000000000"),
        ("1e+05x", "1e+05x"), ("1e5", "1e5"), ("-1e-03", "-0.001"), ("e+12", "e+12"), ("12345e67", "12345e67"),
        ("1.0.0", "1.0.0"), (".0", ".0"),
        ("100", "100"), ("2024-05-01T12:00:00Z", "2024-05-01 12:00:00"), ("2024-05-01 00:00:00", "2024-05-01"),
        ("2024-05-01T01:30:00+02:00", "2024-04-30 23:30:00"), ("2024-12-31 23:30:00-0100", "2025-01-01 00:30:00"),
        ("2024-02-30 00:00:00", "2024-02-30 00:00:00"), ("2024-05-01 25:00:00", "2024-05-01 25:00:00"),
        ("2024-05-01 12:00:00 or so", "2024-05-01 12:00:00 or so"), ("12:34:56.000", "12:34:56"), ("0", "0"), ("", ""),
    ],
)  # fmt: skip
def test_texts_are_their_own_but_for_other_spellings_of_a_value(tmp_path, text, want):
    assert _reader.cell_text(text.encode()) == want.encode()
    assert hash_cells([text], FIELD).tolist() == [key(want)]
    if text:
        # Once by the scan of whole lines, which needs bytes behind them, and once byte by byte.
        lines = "c\n" + f"{text}\n" * 40
        assert of_text(tmp_path, lines) == [key(want)] * 40


@pytest.mark.slow
@settings(max_examples=rounds(1500))
@given(
    st.text("0123456789-:.T eE+ZTrueFalsRUEFALS", max_size=30)
    | st.from_regex(r"-?[0-9]{1,3}(\.[0-9]{0,3})?(e[+-][0-9]{1,3})?", fullmatch=True)
    | st.from_regex(r"20[0-9]{2}-[01][0-9]-[0-3][0-9][T ][0-2][0-9]:[0-5][0-9]:[0-6]0(\.[0-9]+)?(Z|[+-][0-9:]{2,5})?")
    | st.from_regex(r"[0-2][0-9]:[0-5][0-9]:[0-5][0-9]\.[0-9]{0,4}0*", fullmatch=True)
)
def test_the_text_of_any_text_is_what_the_slow_rule_says(text):
    assert _reader.cell_text(text.encode()) == oracle.text.cell_text(text.encode())


@settings(max_examples=rounds(300))
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_text_of_a_number_is_read_as_the_number(number):
    ends = np.empty(2, np.int64)
    text = _reader.number_texts(np.array([number]), ends).decode()
    assert ends.tolist() == [0, len(text)]
    read = float(text)
    assert read == number
    assert "e" not in text
    assert text == "0" or "." not in text or not text.endswith("0")


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**30), max_value=10**30))
def test_the_text_of_a_decimal_is_the_decimal(number):
    given = str(number).encode()
    ends = np.empty(2, np.int64)
    text = _reader.plain_texts(np.frombuffer(given, np.uint8), np.array([0, len(given)]), ends).decode()
    if len(text) < 390:
        assert Decimal(text) == number
        assert "e" not in text.lower() or text == given.decode()


@pytest.mark.slow
@settings(max_examples=rounds(300))
@given(st.datetimes(), st.integers(-23 * 60, 23 * 60), st.sampled_from("T "))
def test_the_text_of_a_moment_is_in_utc(moment, minutes, between):
    zone = dt.timezone(dt.timedelta(minutes=minutes))
    text = moment.replace(tzinfo=zone).isoformat(between)
    try:
        utc = moment.replace(tzinfo=zone).astimezone(dt.UTC).replace(tzinfo=None)
    except OverflowError:
        return
    want = str(utc.date()) if utc.time() == dt.time() else utc.isoformat(" ")
    want = want.rstrip("0") if "." in want else want
    assert _reader.cell_text(text.encode()).decode() == want


def test_missing_values_and_the_positive_label_may_be_numbers(tmp_path):
    (tmp_path / "x.csv").write_text("y,c,n\n1,-999,-999\n0,5,2\n2,6,1\n")
    table = pa.table({"y": [1.0, 0.0, 2.0], "c": [-999, 5, 6], "n": [-999.0, 2.0, 1.0]})
    asked = {"label": "y", "numeric": ["n"], "positive": 1, "na_values": [-999]}
    read = [shoal.read_csv(tmp_path / "x.csv", **asked), shoal.read_arrow(table, **asked)]
    read.append(shoal.read_arrow(table, **{**asked, "positive": np.int64(1), "na_values": np.array([-999.0])}))
    for reader in read:
        (batch,) = reader
        assert batch.labels.tolist() == [1, 0, 0]
        assert batch.indptr.tolist() == [0, 0, 2, 4]
        assert json.loads(json.dumps(reader.schema))["na_values"] == ["-999"]
        reader.check_positive()


def test_the_name_of_a_feature_has_the_text_of_its_value(tmp_path):
    (tmp_path / "x.csv").write_text('y,c,n\n1,True,1.0|NA|2\n0,true,1||2.00\n1,"TRUE",x\n0,1e+20,2024-05-01T00:00:00\n')
    asked = {"label": "y", "lists": {"n": "n"}}
    names = shoal.data.FeatureNames()
    list(shoal.read_csv(tmp_path / "x.csv", **asked, names=names))
    assert sorted(names.values()) == ["c=100000000000000000000", "c=true", "n=", "n=1", "n=2", "n=2024-05-01", "n=x"]
    audit = shoal.data.audit(shoal.read_csv(tmp_path / "x.csv", **asked))
    assert (audit.texts, audit.keys, audit.shared) == (7, 7, {})
    table = pa.table({"y": [1, 0], "c": ["True", "1.0"], "n": [2.0, 1e22]})
    names = shoal.data.FeatureNames()
    list(shoal.read_arrow(table, label="y", names=names))
    assert sorted(names.values()) == ["c=1", "c=true", "n=10000000000000000000000", "n=2"]


def test_numbers_of_numpy_make_readers_that_are_json():
    data = b"1 0:1:1 1:2:1\n"
    pairs = [(np.int64(0), np.int64(1))]
    reader = shoal.read_libffm(io.BytesIO(data), interactions=pairs, batch_size=np.int64(2), reader_threads=np.int32(2))
    assert json.loads(json.dumps(reader.schema)) == {"interactions": [[0, 1]]}
    assert json.loads(json.dumps(reader.fingerprint()))["batch_size"] == 2
    assert sum(batch.nnz for batch in reader) == 3


def test_texts_that_csv_has_for_missing_cells_are_missing_in_tables_that_its_model_predicts(tmp_path):
    (tmp_path / "x.csv").write_text("y,c,n\n" + "1,a,2\n0,NA,\n1,?,1\n" * 20)
    table = pa.table({"c": ["a", "NA", "?"], "n": ["2", "", "1"]})
    pq.write_table(table.append_column("y", pa.array([1, 0, 1])), tmp_path / "x.parquet")
    with shoal.FactorizationMachine(dim=4) as model:  # whose unseen keys are not 0
        reader = shoal.read_csv(tmp_path / "x.csv", label="y", numeric=["n"], na_values=["?"])
        model.fit(reader, progress=False)
        want = model.probabilities(reader)[:3].tolist()
        assert model.predict_proba(table)[:, 1].tolist() == want
        assert model.predict_proba(table.to_pandas())[:, 1].tolist() == want
        model.save(tmp_path / "m")
    out = tmp_path / "p.txt"
    command = ["predict", str(tmp_path / "m"), "--data", str(tmp_path / "x.parquet"), "--output", str(out), "--quiet"]
    assert cli.main(command) == 0
    np.testing.assert_allclose(np.loadtxt(out), want, rtol=1e-6)
