"""The columns that a model has learned from are part of it: data without them is refused, by name."""

import io
from pathlib import Path

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

import shoal  # noqa: E402
from shoal import LogisticRegression, cli  # noqa: E402
from shoal.data.columns import Columns  # noqa: E402

HOW = {"label": "click", "numeric": ["price"]}
COLUMNS = ["site", "user"]


@pytest.fixture
def ads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(3)
    frame = pd.DataFrame(
        {
            "click": random.integers(0, 2, 300),
            "site": [f"s{i}" for i in random.integers(0, 5, 300)],
            "price": random.random(300),
            "user": [f"u{i}" for i in random.integers(0, 9, 300)],
        }
    )
    renamed = frame.rename(columns={"site": "place", "user": "person"})
    for name, one in (("ads", frame), ("renamed", renamed), ("more", frame.assign(extra="x"))):
        one.to_csv(f"{name}.csv", index=False)
        one.to_parquet(f"{name}.parquet")
    frame[["user", "price", "click", "site"]].to_csv("turned.csv", index=False)
    return frame


def readers(name, frame):
    """The same data by every kind of reader, those that can be read once among them."""
    yield lambda: shoal.read_csv(f"{name}.csv", **HOW)
    yield lambda: shoal.read_csv(io.BytesIO(Path(f"{name}.csv").read_bytes()), **HOW)
    yield lambda: shoal.read_parquet(f"{name}.parquet", **HOW)
    yield lambda: shoal.read_arrow(frame, **HOW)
    yield lambda: shoal.read_arrow(table_stream(frame), **HOW)


def table_stream(frame):
    import pyarrow as pa

    table = pa.Table.from_pandas(frame, preserve_index=False)
    return pa.RecordBatchReader.from_batches(table.schema, table.to_batches())


def test_a_reader_of_all_columns_makes_a_model_that_names_them(ads):
    for make in readers("ads", ads):
        with LogisticRegression() as model:
            model.fit(make(), progress=False)
            assert sorted(model.schema["categorical"]) == COLUMNS
            model.fit(make(), progress=False)  # again, also from a stream
            for other in readers("ads", ads):
                assert model.evaluate(other()).examples == 300


def test_renamed_columns_are_an_error_that_names_them(ads):
    renamed = ads.rename(columns={"site": "place", "user": "person"})
    with LogisticRegression() as model:
        model.fit(shoal.read_csv("ads.csv", **HOW), progress=False)
        before = model.table.digest()
        for make in readers("renamed", renamed):
            for call in (model.evaluate, model.probabilities, lambda data: model.fit(data, progress=False)):
                with pytest.raises(ValueError, match=r"column '(site|user)' is not there: the columns are"):
                    call(make())
        assert model.table.digest() == before


def test_a_frame_that_lacks_a_column_is_refused(ads):
    with LogisticRegression() as model:
        model.fit(ads.drop(columns="click"), ads["click"], progress=False, epochs=1)
        assert model.schema == {"numeric": ["price"], "categorical": COLUMNS}
        for name in ("site", "price"):
            with pytest.raises(ValueError, match=f"column '{name}' is not there") as error:
                model.predict(ads.drop(columns=[name, "click"]))
            assert "label" not in str(error.value)  # a column that was added to the frame
        assert len(model.predict(ads.drop(columns="click"))) == 300
        assert len(model.predict(ads.assign(extra="x"))) == 300  # what the model does not know is passed over


def test_the_order_of_columns_does_not_matter_and_more_columns_are_passed_over(ads):
    with LogisticRegression() as model:
        model.fit(shoal.read_csv("ads.csv", **HOW), progress=False)
        expected = model.evaluate(shoal.read_csv("ads.csv", **HOW))
        for name in ("turned.csv", "more.csv"):
            assert model.evaluate(shoal.read_csv(name, **HOW)) == expected
        model.fit(shoal.read_csv("turned.csv", categorical=["user", "site"], **HOW), progress=False)


def test_all_files_have_the_columns_of_the_first_one(ads):
    with LogisticRegression() as model, pytest.raises(ValueError, match=r"renamed\.csv.*column 'site' is not there"):
        model.fit(shoal.read_csv(["ads.csv", "renamed.csv"], **HOW), progress=False)
    with LogisticRegression() as model:
        model.fit(shoal.read_csv(["ads.csv", "more.csv"], **HOW), progress=False)
        assert model.schema["categorical"] == COLUMNS


def test_the_reader_of_the_caller_counts_the_passes(ads):
    with open("ads.csv", "a") as file:
        file.write("1,too few\n")
    reader = shoal.read_csv("ads.csv", **HOW, on_error="skip")
    with LogisticRegression() as model:
        model.fit(reader, progress=False)
        assert (reader.skipped, reader.progress()) == (1, 1.0)
        assert "categorical" not in reader.schema
        model.probabilities(reader)
        assert reader.skipped == 1


def test_an_interaction_with_a_list_stays_one_when_the_columns_are_known():
    columns = Columns(label="y", lists={"seen": "ad"}, interactions=[("ad", "seen")])
    names = ["y", "ad", "seen", "ad"]
    assert columns.resolved(["y", "ad", "seen"]) == ["ad"]
    explicit = Columns(label="y", categorical=["ad"], lists={"seen": "ad"}, interactions=[("ad", "seen")])
    assert explicit.kinds_of(names[:3]) == columns.kinds_of(names[:3])


@pytest.mark.slow
@pytest.mark.parametrize("source", ["ads.csv", "-"])
def test_commands_refuse_renamed_columns(source, ads, capsys, monkeypatch):
    if source == "-":
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path("ads.csv").read_bytes())))
    train = ["train", "lr", "--data", source, "--format", "csv", "--label", "click", "--output", "m", "--quiet"]
    assert cli.main(train) == 0
    for words in (["evaluate", "m"], ["predict", "m", "--output", "p", "--overwrite"], ["report", "m"]):
        assert cli.main([*words, "--data", "ads.csv", "--quiet"]) == 0
        assert cli.main([*words, "--data", "renamed.csv", "--quiet"]) == 2
        assert "column 'site' is not there: the columns are 'click', 'place', 'price'" in capsys.readouterr().err
