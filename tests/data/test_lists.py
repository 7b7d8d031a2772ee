"""Columns of lists: a feature for each text of a cell, with the keys of another column."""

import io
import re

import numpy as np
import pytest

import shoal
from shoal.data.readers import field_number


def key(column: str, text: str) -> int:
    return int(shoal.hash_strings([text], field_number("csv", column))[0])


def rows(reader) -> list[tuple[list[int], list[int], list[float] | None]]:
    """Keys, fields and values of each example."""
    out = []
    for batch in reader.with_fields():
        for begin, end in zip(batch.indptr[:-1], batch.indptr[1:], strict=True):
            some = slice(begin, end)
            values = None if batch.values is None else batch.values[some].tolist()
            out.append((batch.keys[some].tolist(), batch.fields[some].tolist(), values))
    return out


def csv(text: str, **how):
    usual = {"label": "click", "lists": {"seen": "ad"}, "numeric": ["price"]}
    return shoal.read_csv(io.BytesIO(text.encode()), **{**usual, **how})


TEXT = "click,ad,seen,price\n1,7,8|9|7,0.5\n0,8,,2\n1,NA,7||NA|12,NA\n0,9,|,1\n"


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_texts_of_a_list_have_the_keys_of_the_column_they_share(batch_size):
    ad, seen, price = (field_number("csv", name) for name in ("ad", "seen", "price"))
    number, nothing = key("price", ""), key("ad", "\0missing")
    # A stream has one pass.
    assert rows(csv(TEXT, batch_size=batch_size)) == [
        (
            [key("ad", "7"), key("ad", "8"), key("ad", "9"), key("ad", "7"), number],
            [ad, *[seen] * 3, price],
            [1] * 4 + [0.5],
        ),
        ([key("ad", "8"), number], [ad, price], [1, 2]),
        ([key("ad", "7"), nothing, nothing, key("ad", "12")], [seen] * 4, [1] * 4),
        ([key("ad", "9"), nothing, nothing, number], [ad, seen, seen, price], [1] * 4),
    ]


def test_a_list_may_have_keys_of_its_own():
    (keys, _, _), *_ = rows(csv(TEXT, lists={"seen": "seen"}))
    assert keys[1:4] == [key("seen", text) for text in "897"]


def test_arrow_lists_are_the_lists_of_csv(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for kind in (arrow.list_(arrow.string()), arrow.large_list(arrow.int32())):
        items = [["8", "9", "7"], None, ["7", None, None, "12"], [None, None]]
        if kind.value_type != arrow.string():
            items = [None if some is None else [None if x is None else int(x) for x in some] for some in items]
        table = arrow.table(
            {
                "click": [1, 0, 1, 0],
                "ad": ["7", "8", None, "9"],
                "seen": arrow.array(items, kind),
                "price": [0.5, 2, None, 1],
            }
        )
        parquet.write_table(table, tmp_path / "ads.parquet")
        how = {"label": "click", "lists": {"seen": "ad"}, "numeric": ["price"]}
        expected = rows(csv(TEXT))
        for batch_size in (1, 3, 100):
            assert rows(shoal.read_arrow(table, **how, batch_size=batch_size)) == expected
            assert rows(shoal.read_arrow(table.slice(1), **how, batch_size=batch_size)) == expected[1:]
            assert rows(shoal.read_parquet(tmp_path / "ads.parquet", **how, batch_size=batch_size)) == expected


def test_long_lists_make_room_for_themselves():
    many = [str(i) for i in range(70_000)]  # more than the arrays hold at first
    text = f"click,ad,seen,price\n1,7,{'|'.join(many)},0.5\n0,8,9,2\n"
    first, second = rows(csv(text))
    ad = field_number("csv", "ad")
    assert first[0][1:-1] == shoal.hash_strings(many, ad).tolist()
    assert second[0] == [key("ad", "8"), key("ad", "9"), key("price", "")]


def test_a_list_in_quotes_and_another_separator():
    text = 'click,ad,seen,price\n1,7,"8;""a"";b,c",1\n'
    ((keys, _, _),) = rows(csv(text, list_separator=";"))
    assert keys[1:4] == [key("ad", text) for text in ("8", '"a"', "b,c")]


def test_a_list_is_named_by_the_column_it_shares():
    names = shoal.data.FeatureNames()
    for _ in csv(TEXT, names=names):
        pass
    assert sorted(names.values()) == ["ad=", "ad=12", "ad=7", "ad=8", "ad=9", "price"]


def test_models_remember_lists(tmp_path):
    path = tmp_path / "ads.csv"
    path.write_text(TEXT)
    reader = shoal.read_csv(path, label="click", lists={"seen": "ad"}, numeric=["price"])
    assert reader.schema["lists"] == {"seen": "ad"}
    with shoal.LogisticRegression() as model:
        model.fit(reader, progress=False)
        with pytest.raises(ValueError, match="lists="):
            model.evaluate(shoal.read_csv(path, label="click", numeric=["price"]))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"lists": {"ad": "ad"}, "categorical": ["ad"]}, "column 'ad' has two roles"),
        ({"list_separator": ","}, "list_separator is ','"),
        ({"list_separator": "ab"}, "list_separator is 'ab'"),
    ],
)
def test_lists_that_make_no_sense_are_told(how, says):
    with pytest.raises(ValueError, match=says):
        csv(TEXT, **how)


def test_lists_is_a_mapping_of_names():
    with pytest.raises(TypeError, match="lists is"):
        csv(TEXT, lists=["seen"])
    with pytest.raises(ValueError, match="column 'gone' is not there"):
        list(csv(TEXT, lists={"gone": "ad"}))


def test_a_column_that_holds_no_lists_is_told():
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"click": [1], "seen": ["a|b"]})
    with pytest.raises(ValueError, match="column 'seen' holds string, not lists"):
        list(shoal.read_arrow(table, label="click", lists={"seen": "seen"}))


def test_random_lists_come_back(rng):
    texts = [[str(x) for x in rng.integers(0, 99, rng.integers(0, 6))] for _ in range(200)]
    body = "".join(f"{i % 2},x,{'|'.join(some)},{i}\n" for i, some in enumerate(texts))
    got = rows(csv("click,ad,seen,price\n" + body, batch_size=17))
    for (keys, _, values), some, i in zip(got, texts, range(200), strict=True):
        assert keys[1:-1] == shoal.hash_strings(some, field_number("csv", "ad")).tolist()
        assert values == [1.0] * (1 + len(some)) + [np.float32(i)]


def test_parallel_lists_keep_their_alignment():
    pytest.importorskip("pyarrow")
    text = "click,ads,shops\n1,a3|a4||a5,s1||s2|s3\n0,|a1,NA|s4\n1,,\n"
    lists = {"ads": "ads", "shops": "shops"}
    ads, shops = (field_number("csv", name) for name in lists)
    for (keys, fields, _), count in zip(rows(csv(text, lists=lists, numeric=[])), (4, 2, 0), strict=True):
        assert fields == [ads] * count + [shops] * count
        if count == 4:
            assert keys[3] == key("ads", "a5")
            assert keys[7] == key("shops", "s3")


def test_a_categorical_column_of_lists_is_warned_of_once(tmp_path, caplog):
    path = tmp_path / "films.csv"
    path.write_text("click,genres,ad\n" + "1,a|b,x\n0,c,y\n" * 50)
    reader = shoal.read_csv(path, label="click")
    for _ in range(2):
        list(reader)
    list(shoal.read_csv(path, label="click", lists={"genres": "genres"}))
    (record,) = caplog.records
    assert record.getMessage() == (
        "column 'genres' looks like lists: 50 of its first 100 cells have '|' in them, and each cell is one feature; "
        "lists={'genres': 'genres'}, or a feature of type list for shoal train ctr, makes one of each item"
    )


def test_fixed_size_lists_and_views_are_lists_too():
    arrow = pytest.importorskip("pyarrow")
    items = [["7", "8"], None, ["9", None], ["8", "7"]]
    how = {"label": "click", "lists": {"seen": "seen"}}
    tables = [
        arrow.table({"click": [1, 0, 1, 0], "seen": arrow.array(items, kind)})
        for kind in (
            arrow.list_(arrow.string()),
            arrow.list_(arrow.string(), 2),
            arrow.list_view(arrow.string()),
            arrow.large_list_view(arrow.string()),
        )
    ]
    want = rows(shoal.read_arrow(tables[0], **how))
    for table in tables:
        assert rows(shoal.read_arrow(table, **how)) == want
        assert rows(shoal.read_arrow(table.slice(1), **how)) == want[1:]


@pytest.mark.parametrize(
    ("values", "role", "says"),
    [
        ([{"a": 1}], "lists", "holds struct<a: int64>, not lists: leave it out"),
        ([{"a": 1}], "numeric", "holds struct<a: int64>, not numbers: leave it out"),
        ([[1]], "numeric", r"holds list<.*>, not numbers: name it as a list, .*, or as a vector of numbers, vectors="),
        ([[[1]]], "lists", r"holds list<.*: list<.*: int64>>, not lists of texts or numbers: leave it out"),
        ([1], "lists", "holds int64, not lists: name it as categorical"),
    ],
)
def test_the_remedy_for_a_type_that_does_not_fit_is_one(tmp_path, values, role, says):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"click": [1], "x": values})
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=rf"x\.parquet: column 'x' {says}"):
        list(
            shoal.read_parquet(
                tmp_path / "x.parquet", label="click", **{role: {"x": "x"} if role == "lists" else ["x"]}
            )
        )


@pytest.mark.parametrize("how", [{}, {"categorical": ["x"]}], ids=["of all others", "named"])
def test_a_column_of_lists_is_no_category(tmp_path, how):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    as_list = "name it as a list, lists={'x': 'x'}"
    as_vector = f"{as_list}, or as a vector of numbers, vectors=['x']"
    kinds = [
        (arrow.list_(arrow.string()), as_list),
        (arrow.list_(arrow.bool_()), as_list),
        (arrow.list_(arrow.null()), as_list),
        (arrow.list_(arrow.dictionary(arrow.int8(), arrow.string())), as_list),
        (arrow.list_(arrow.int64()), as_vector),
        (arrow.large_list(arrow.float32()), as_vector),
        (arrow.list_(arrow.float64(), 2), as_vector),
        (arrow.list_view(arrow.decimal128(5, 2)), as_vector),
        (arrow.large_list_view(arrow.string()), as_list),
        (arrow.list_(arrow.list_(arrow.int64())), "leave it out, or convert it to text"),
        (arrow.map_(arrow.string(), arrow.int64()), "leave it out, or convert it to text"),
        (arrow.struct([("a", arrow.int64())]), "leave it out, or convert it to text"),
    ]
    for kind, remedy in kinds:
        # It is the type that decides, whatever the cells hold.
        table = arrow.table({"click": [1, 0], "x": arrow.array([None, None], kind)})
        says = f"column 'x' holds {kind}, which has no text: {remedy}"
        with pytest.raises(ValueError, match="^pyarrow Table: " + re.escape(says)):
            list(shoal.read_arrow(table, label="click", **how))
        if not str(kind).startswith(("list_view", "large_list_view")):  # which Parquet does not have
            parquet.write_table(table, tmp_path / "x.parquet")
            with pytest.raises(ValueError, match=r"x\.parquet: column 'x' holds .*" + re.escape(remedy)):
                list(shoal.read_parquet(tmp_path / "x.parquet", label="click", **how))


def test_columns_of_one_name_are_refused_if_they_are_read(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table([[1], [2], [3]], names=["click", "a", "a"])
    parquet.write_table(table, tmp_path / "x.parquet")
    (tmp_path / "x.csv").write_text("click,a,a\n1,2,3\n")
    for read in (
        lambda **how: shoal.read_csv(tmp_path / "x.csv", label="click", **how),
        lambda **how: shoal.read_parquet(tmp_path / "x.parquet", label="click", **how),
        lambda **how: shoal.read_arrow(table, label="click", **how),
    ):
        for how in ({}, {"categorical": ["a"]}):
            with pytest.raises(
                ValueError, match=r"(x\.|Table).*: column 'a' is there 2 times: the columns are 'click', 'a', 'a'"
            ):
                list(read(**how))
        assert sum(map(len, read(categorical=[]))) == 1
