"""Columns of vectors: a feature for each number of a cell, with the key of a numeric column."""

from __future__ import annotations

import datetime as dt
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal import cli
from shoal.data.readers import field_number

HOW = {"label": "click", "numeric": ["price"], "vectors": ["dwell"]}
TEXT = 'click,ad,dwell,price\n1,7,0.5|2|-3e1,0.5\n0,8,,2\n1,NA," 7 ||NA|12",NA\n0,9,|,1\n1,a,NA,3\n'


def key(column: str, text: str = "") -> int:
    return int(shoal.hash_strings([text], field_number("csv", column))[0])


def rows(reader) -> list[tuple[list[int], list[int], list[float]]]:
    """Keys, fields and values of each example."""
    return [
        tuple(array[begin:end].tolist() for array in (batch.keys, batch.fields, batch.values))
        for batch in reader.with_fields()
        for begin, end in zip(batch.indptr[:-1], batch.indptr[1:], strict=True)
    ]


def csv(text: str, **how):
    return shoal.read_csv(io.BytesIO(text.encode()), **{**HOW, **how})


def vectors_of(reader, column: str = "dwell") -> list[list[float]]:
    """The values of a column in each example."""
    field = field_number("csv", column)
    return [
        [value for value, one in zip(values, fields, strict=True) if one == field] for _, fields, values in rows(reader)
    ]


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_each_number_is_a_feature_with_the_key_of_a_numeric_column(batch_size):
    ad, dwell, price = (field_number("csv", name) for name in ("ad", "dwell", "price"))
    number, cost = key("dwell"), key("price")
    assert rows(csv(TEXT, batch_size=batch_size)) == [
        ([key("ad", "7"), *[number] * 3, cost], [ad, *[dwell] * 3, price], [1, 0.5, 2, -30, 0.5]),
        ([key("ad", "8"), cost], [ad, price], [1, 2]),
        ([number] * 4, [dwell] * 4, [7, 0, 0, 12]),
        ([key("ad", "9"), number, number, cost], [ad, dwell, dwell, price], [1, 0, 0, 1]),
        ([key("ad", "a"), cost], [ad, price], [1, 3]),
    ]
    (numeric,) = rows(csv("click,ad,dwell,price\n1,7,3,0.5\n", vectors=[], numeric=["dwell", "price"]))
    assert rows(csv("click,ad,dwell,price\n1,7,3,0.5\n")) == [numeric]


def test_values_are_there_though_no_column_is_numeric():
    (batch,) = csv("click,dwell\n1,\n0,\n", numeric=[])
    assert batch.values.tolist() == []
    assert vectors_of(csv("click,ad,dwell\n1,x,3|4\n0,x,\n", numeric=[])) == [[3, 4], []]


def test_which_items_are_missing_is_asked_as_of_a_cell():
    text = "click,dwell\n1,?|1\n0,-999|2|\n1,?\n0,\n"
    assert vectors_of(csv(text, numeric=[], na_values=["?", -999])) == [[0, 1], [0, 2, 0], [], []]
    plain = "click,dwell\n1,1||2\n0,\n"
    assert vectors_of(csv(plain, numeric=[], keep_default_na=False)) == [[1, 0, 2], []]
    with pytest.raises(ValueError, match=r"line 2, column 5.*a value is not a finite decimal number"):
        list(csv("click,dwell\n1,1|NA\n", numeric=[], keep_default_na=False))


def test_an_item_that_is_no_number_is_named_by_its_place(tmp_path):
    path = tmp_path / "ads.csv"
    for item, place, says in (("x", 9, "not a finite decimal"), ("1e39", 9, "too large"), (" ", 9, "not a finite")):
        for text in (f'1,7,"0|2|{item}|4",1', f"1,77,0|2|{item}|4,1"):
            path.write_text(f"click,ad,dwell,price\n0,6,1|2,3\n{text}\n0,8,5,1\n")
            with pytest.raises(ValueError, match=rf"ads\.csv, line 3, column {place + 1} .*a value is {says}"):
                list(shoal.read_csv(path, **HOW))
            reader = shoal.read_csv(path, **HOW, on_error="skip")
            assert ([batch.values.tolist() for batch in reader], reader.skipped) == ([[1, 1, 2, 3, 1, 5, 1]], 1)


def test_vectors_in_quotes_with_another_separator_and_in_lines_that_end_otherwise():
    text = 'click,ad,dwell\r\n1,a,"1,5;2"\r\n0,"b""",1;2\r\n1,c,"3;;4"\r\n0,d,0.25\r\n'
    (first, *others) = vectors_of(csv(text.replace("1,5", "1.5"), numeric=[], list_separator=";"))
    assert [first, *others] == [[1.5, 2], [1, 2], [3, 0, 4], [0.25]]
    with pytest.raises(ValueError, match="line 2"):
        list(csv(text, numeric=[], list_separator=";"))
    assert vectors_of(csv("click\tdwell\n1\t1 2  3\n", numeric=[], sep="\t", list_separator=" ")) == [[1, 2, 0, 3]]


def test_an_item_in_a_cell_with_quotes_ends_where_the_cell_does():
    text = 'click,dwell\n1,"1|x""y|2345"\n0,"1|x""y|2"\n1,"1|2|x""y"\n'
    assert vectors_of(csv(text, numeric=[], na_values=['x"y'])) == [[1, 0, 2345], [1, 0, 2], [1, 2, 0]]


def test_long_vectors_make_room_for_themselves():
    many = np.arange(70_000) / 8  # more than the arrays hold at first
    text = f"click,ad,dwell,price\n1,7,{'|'.join(map(str, many.tolist()))},0.5\n0,8,9,2\n"
    assert vectors_of(csv(text)) == [many.tolist(), [9]]


def test_without_a_header_and_without_labels():
    how = {"columns": ["click", "dwell"], "numeric": []}
    assert vectors_of(csv("1,2|3\n0,4\n", **how)) == [[2, 3], [4]]
    assert vectors_of(csv("2|3\n4\n", **how).unlabelled()) == [[2, 3], [4]]
    assert vectors_of(csv("click,dwell\n,2|3\n", numeric=[], label=None, categorical=[])) == [[2, 3]]


# ---- blocks, threads and splits ----


@pytest.fixture
def large(tmp_path, rng):
    """A file of more than a block, and the vectors in it."""
    path = tmp_path / "large.csv"
    vectors = [(rng.integers(-50, 50, rng.integers(0, 40)) / 4).tolist() for _ in range(20_000)]
    lines = [f"{i % 2},{i % 7},{'|'.join(map(str, some))},{i}\n" for i, some in enumerate(vectors)]
    path.write_text("click,ad,dwell,price\n" + "".join(lines))
    assert path.stat().st_size > 1 << 20
    return path, vectors


@pytest.mark.slow
def test_blocks_threads_and_splits_change_nothing(large):
    path, vectors = large
    for threads in (1, 3):
        assert vectors_of(shoal.read_csv(path, **HOW, reader_threads=threads, batch_size=333)) == vectors
    reader = shoal.read_csv(path, **HOW)
    assert [one for rank in range(3) for one in vectors_of(reader.split(rank, 3))] == vectors


# ---- Arrow ----

NUMBERS = st.one_of(
    st.none(),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.integers(-(10**6), 10**6).map(float),
    st.sampled_from([0.1, 16777217.0, 1e-46, -0.0]),
)
CELLS = st.none() | st.lists(NUMBERS, max_size=5).filter(lambda some: some != [None])  # "" is no item


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(["a", None]), CELLS, CELLS, NUMBERS), min_size=1, max_size=9), st.data())
def test_arrow_and_csv_have_the_same_batches(table, data):
    pa = pytest.importorskip("pyarrow")
    kinds = st.sampled_from([pa.list_, pa.large_list, pa.list_view, pa.large_list_view])
    how = {"label": None, "categorical": ["ad"], "numeric": ["price"], "vectors": ["w", "dwell"]}

    def cell(value):
        return "" if value is None else "|".join(map(cell, value)) if isinstance(value, list) else repr(value)

    names = ("ad", "dwell", "w", "price")
    text = ",".join(names) + "\n" + "".join(",".join([ad or "", *map(cell, some)]) + "\n" for ad, *some in table)
    columns = [pa.array([row[0] for row in table], pa.string())]
    for i in (1, 2):
        values = [row[i] for row in table]
        if data.draw(st.booleans()):
            values = [some and [None if x is None else repr(x) for x in some] for some in values]
        kind = pa.string() if any(isinstance(x, str) for some in values if some for x in some) else pa.float64()
        columns.append(pa.array(values, data.draw(kinds)(kind)))
    columns.append(pa.array([row[3] for row in table], pa.float64()))
    size, first = data.draw(st.integers(1, 10)), data.draw(st.integers(0, len(table) - 1))
    arrow = shoal.read_arrow(pa.table(columns, names).slice(first), **how, batch_size=size).with_fields()
    other = shoal.read_csv(io.BytesIO(text.encode()), **how, batch_size=size).with_fields()
    want = rows(other)[first:]
    assert repr(rows(arrow)) == repr(want)  # -0.0 is not 0.0


@pytest.mark.slow
def test_every_type_of_numbers_is_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    items = [[1, 2], None, [3, None], [4, 5]]
    kinds = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]
    kinds += [pa.float16(), pa.float32(), pa.float64(), pa.decimal128(9, 2), pa.decimal256(9, 2)]
    kinds += [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
    want = [[1, 2], [], [3, 0], [4, 5]]
    for kind in kinds:
        texts = pa.types.is_dictionary(kind) or "string" in str(kind)
        some = [some and [str(x) if texts and x is not None else x for x in some] for some in items]
        if pa.types.is_float16(kind):
            some = [some and [None if x is None else np.float16(x) for x in some] for some in some]
        for outer in (pa.list_(kind), pa.large_list(kind), pa.list_(kind, 2)):
            table = pa.table({"click": [1, 0, 1, 0], "dwell": pa.array(some, outer)})
            for begin in (0, 1):
                reader = shoal.read_arrow(table.slice(begin), label="click", vectors=["dwell"], batch_size=3)
                assert vectors_of(reader) == want[begin:], outer
            parquet.write_table(table, tmp_path / "x.parquet")
            got = vectors_of(shoal.read_parquet(tmp_path / "x.parquet", label="click", vectors=["dwell"]))
            assert got == want, outer
    truth = pa.table({"click": [1, 0], "dwell": [[True, False], [None]]})
    assert vectors_of(shoal.read_arrow(truth, label="click", vectors=["dwell"])) == [[1, 0], [0]]
    nothing = pa.table({"click": [1, 0], "dwell": pa.array([[None, None], []], pa.list_(pa.null()))})
    assert vectors_of(shoal.read_arrow(nothing, label="click", vectors=["dwell"])) == [[0, 0], []]


def test_missing_items_of_arrow_are_null_nan_and_the_texts_that_are_named():
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"click": [1, 0], "dwell": [[float("nan"), 1.0, -999.0], [None]]})
    how = {"label": "click", "vectors": ["dwell"]}
    assert vectors_of(shoal.read_arrow(table, **how)) == [[0, 1, -999], [0]]
    assert vectors_of(shoal.read_arrow(table, **how, na_values=[-999])) == [[0, 1, 0], [0]]
    texts = pa.table({"click": [1], "dwell": [["?", "", " 3 "]]})
    assert vectors_of(shoal.read_arrow(texts, **how, na_values=["?"])) == [[0, 0, 3]]


def test_frames_of_polars_and_pandas_with_arrays_are_read():
    pandas = pytest.importorskip("pandas")
    polars = pytest.importorskip("polars")
    pytest.importorskip("pyarrow")
    how = {"label": "click", "vectors": ["v"]}
    frame = pandas.DataFrame({"click": [1, 0], "v": [np.arange(3, dtype=np.float32), np.ones(2, np.float32)]})
    assert vectors_of(shoal.read_arrow(frame, **how), "v") == [[0, 1, 2], [1, 1]]
    sized = polars.DataFrame({"click": [1, 0], "v": [[1.0, 2.0], [3.0, None]]}).cast({"v": polars.Array(float, 2)})
    assert vectors_of(shoal.read_arrow(sized, **how), "v") == [[1, 2], [3, 0]]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([[1.0], None, [2.0, float("inf")]], r"row 2, column 'x': inf is not a finite float32 number"),
        ([[1.0], [], [1e39]], r"row 2, column 'x': 1e\+39 is not a finite float32 number"),
        ([["1"], ["2", "x"]], r"row 1, column 'x': 'x' is not a number: name it as a list, lists={'x': 'x'}"),
        ([1.0], "column 'x' holds double, not lists: name it as numeric"),
        (["1|2"], "column 'x' holds string, not lists: name it as numeric"),
        ([{"a": 1}], "column 'x' holds struct<a: int64>, not lists: leave it out"),
        ([[[1]]], "column 'x' holds list<.*: list<.*: int64>>, not lists of texts or numbers: leave it out"),
        ([[dt.date(2024, 1, 1)]], "column 'x' holds date32.*, not numbers: name it as a list, lists="),
    ],
)
def test_what_is_no_vector_is_told(tmp_path, values, says):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"click": [1] * len(values), "x": values}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=rf"x\.parquet(:|,) {says}"):
        list(shoal.read_parquet(tmp_path / "x.parquet", label="click", vectors=["x"]))


# ---- roles, names, models ----


def test_roles_that_make_no_sense_are_told():
    with pytest.raises(TypeError, match="vectors is 'dwell': pass a list of names"):
        csv(TEXT, vectors="dwell")
    for role in ({"numeric": ["dwell"]}, {"lists": {"dwell": "dwell"}}, {"categorical": ["dwell"]}):
        with pytest.raises(ValueError, match="column 'dwell' has two roles"):
            csv(TEXT, **role)
    for others in (None, ["ad"]):
        with pytest.raises(ValueError, match=r"column 'dwell' of an interaction is a vector, .*: leave it out of the"):
            csv(TEXT, categorical=others, interactions=[("ad", "dwell")])
    with pytest.raises(ValueError, match="column 'gone' is not there"):
        list(csv(TEXT, vectors=["gone"]))
    for separator in ("e", "0", ".", "-", "+"):
        with pytest.raises(ValueError, match=r"list_separator is .*, which may be part of a number of a vector"):
            csv(TEXT, list_separator=separator)
    with pytest.raises(ValueError, match="list_separator is ',', as sep is"):
        csv(TEXT, list_separator=",")


def test_other_columns_still_interact():
    (keys, values), *_ = [
        (batch.keys[:6].tolist(), batch.values[:6].tolist()) for batch in csv(TEXT, interactions=[("ad", "price")])
    ]
    assert values == [1, 0.5, 2, -30, 0.5, 0.5]
    assert keys[:5] == rows(csv(TEXT))[0][0]


def test_a_vector_is_named_by_its_column():
    pa = pytest.importorskip("pyarrow")
    for read in (
        lambda names: csv(TEXT, names=names),
        lambda names: shoal.read_arrow(
            pa.table({"click": [1], "ad": ["7"], "dwell": [[1, 2]], "price": [1]}), **HOW, names=names
        ),
    ):
        names = shoal.data.FeatureNames()
        list(read(names))
        assert names[key("dwell")] == "dwell"
        assert names[key("ad", "7")] == "ad=7"


def test_the_schema_has_the_vectors():
    reader = csv(TEXT, list_separator=";")
    assert reader.schema == {"label": "click", "numeric": ["price"], "vectors": ["dwell"], "list_separator": ";"}
    json.dumps(reader.schema)
    assert shoal.read_csv(io.BytesIO(TEXT.encode()), **csv(TEXT).schema).schema == csv(TEXT).schema


def test_columns_of_which_nothing_is_said_are_not_the_vectors(tmp_path):
    path = tmp_path / "ads.csv"
    path.write_text(TEXT)
    reader = shoal.read_csv(path, **HOW).with_columns()
    assert reader.schema["categorical"] == ["ad"]
    assert rows(reader) == rows(csv(TEXT))


def test_models_carry_vectors_to_the_command_line_and_to_frames(tmp_path, capsys):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rng = np.random.default_rng(2)
    dwell = [rng.normal(size=n).round(3).tolist() for n in rng.integers(0, 4, 400)]
    clicks = [int(sum(some) > 0) for some in dwell]
    ads = rng.integers(0, 9, 400).astype(str).tolist()
    lines = [f"{y},{ad},{'|'.join(map(str, some))}\n" for y, ad, some in zip(clicks, ads, dwell, strict=True)]
    (tmp_path / "ads.csv").write_text("click,ad,dwell\n" + "".join(lines))
    table = pa.table({"click": clicks, "ad": ads, "dwell": pa.array(dwell, pa.list_(pa.float64()))})
    parquet.write_table(table, tmp_path / "ads.parquet")
    reader = shoal.read_csv(tmp_path / "ads.csv", label="click", vectors=["dwell"])
    with shoal.LogisticRegression(optimizer=shoal.Adagrad(lr=0.5)) as model:
        model.fit(reader, epochs=3, progress=False)
        model.save(tmp_path / "m")
        metrics = model.evaluate(reader)
        assert metrics.auc > 0.95
        want = model.probabilities(reader)
        np.testing.assert_array_equal(model.probabilities(table), want)
        np.testing.assert_array_equal(model.probabilities(table.to_pandas()), want)
        assert model.evaluate(table.drop(["click"]), np.array(clicks)).auc == metrics.auc
        with pytest.raises(ValueError, match="vectors="):
            model.evaluate(shoal.read_csv(tmp_path / "ads.csv", label="click"))
    for name in ("ads.csv", "ads.parquet"):
        assert cli.main(["evaluate", str(tmp_path / "m"), "--data", str(tmp_path / name), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["auc"] == metrics.auc
        words = ["predict", str(tmp_path / "m"), "--data", str(tmp_path / name), "--output", str(tmp_path / "p")]
        assert cli.main([*words, "--overwrite", "--quiet"]) == 0
        np.testing.assert_allclose(np.loadtxt(tmp_path / "p"), want, rtol=1e-5)
        words = ["evaluate", str(tmp_path / "m"), "--data", str(tmp_path / name), "--group", "ad", "--json"]
        assert cli.main(words) == 0
        assert "gauc" in json.loads(capsys.readouterr().out)
    assert cli.main(["inspect", str(tmp_path / "m")]) == 0
    assert "vectors     dwell" in capsys.readouterr().out
