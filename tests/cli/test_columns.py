"""What becomes of the columns of a file: the commands say it, warn of useless ones, and scale the numeric ones."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal import cli

ROWS = 12_000


@pytest.fixture(autouse=True)
def in_a_folder_with_ads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(5)
    lines = ["click,site,price,age,time"]
    for i in range(ROWS):
        click = int(random.random() < 0.2 + 0.06 * (i % 7))
        lines.append(f"{click},s{i % 7},{100 * random.random():.2f},{int(80 * random.random())},{1_700_000_000 + i}")
    Path("ads.csv").write_text("\n".join(lines) + "\n")


def train(*more, data="ads.csv", kind="lr"):
    words = ["train", kind, "--data", data, "--format", "csv", "--label", "click", "--output", "m", "--overwrite"]
    try:
        return cli.main([*words, *more])
    except SystemExit as end:
        return end.code


@pytest.mark.slow
def test_the_columns_are_said_and_one_that_is_nearly_unique_is_warned_of(capsys):
    assert train("--numeric", "price,age") == 0
    err = capsys.readouterr().err
    assert "shoal: columns: label click; categorical site, time; numeric price, age\n" in err
    assert "column 'time' has 8,192 different texts in the first 8,192 examples" in err
    assert "leave it out with --ignore time" in err
    assert "'site'" not in err
    assert train("--numeric", "price,age", "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_ignored_columns_are_no_features(capsys):
    assert train("--numeric", "price,age", "--ignore", "time") == 0
    assert "time" not in capsys.readouterr().err
    with shoal.load("m") as model:
        assert model.schema["categorical"] == ["site"]
        assert len(model.table) == 10
        with_all = model.evaluate(shoal.read_csv("ads.csv", label="click", numeric=["price", "age"]))
    assert cli.main(["evaluate", "m", "--data", "ads.csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["logloss"] == with_all.logloss
    words = [
        "audit",
        "--data",
        "ads.csv",
        "--format",
        "csv",
        "--label",
        "click",
        "--ignore",
        "time,price,age",
        "--json",
    ]
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == 7


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--ignore", "tme"], "--ignore tme: there is no such column, or it has a role; the others are site, price"),
        (["--ignore", "click"], "--ignore click: there is no such column, or it has a role"),
        (["--ignore", "time", "--categorical", "site"], "--categorical names them: leave it out"),
    ],
)
def test_what_cannot_be_ignored_is_refused(more, says, capsys):
    assert train(*more) == 2
    assert says in capsys.readouterr().err


def test_columns_of_a_stream_are_not_known_beforehand(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path("ads.csv").read_bytes())))
    assert train("--ignore", "time", data="-") == 2
    assert "the columns of a stream are not known before it is read" in capsys.readouterr().err
    assert train(data="-") == 0
    Path("l.libsvm").write_text("1 3:1\n")
    assert cli.main(["train", "lr", "--data", "l.libsvm", "--format", "libsvm", "--output", "l", "--ignore", "a"]) == 2
    assert "--ignore applies to csv, tsv, parquet, json, not to libsvm" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lr", "fm"])
def test_numeric_columns_are_normalized_unless_that_is_turned_off(kind, capsys):
    measured = {}
    for more in ([], ["--no-normalized"], ["--normalized"]):
        assert train("--numeric", "price,age", "--ignore", "time", "--json", *more, kind=kind) == 0
        out, err = capsys.readouterr()
        entropy = json.loads(out)["passes"][0]["metrics"]
        with shoal.load("m") as model:
            assert model.is_normalized is (more != ["--no-normalized"])
        measured[" ".join(more)] = entropy["logloss"]
        assert ("worse than the base rate alone; values reach 100" in err) is (more == ["--no-normalized"])
    assert measured[""] == measured["--normalized"] < 0.7 < measured["--no-normalized"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--numeric", "price", "--solver", "dbpg", "--ignore", "time"]])
def test_models_without_numeric_columns_and_of_the_batch_solver_are_not_normalized(more):
    assert train("--quiet", *more) == 0
    with shoal.load("m") as model:
        assert not model.is_normalized


def test_interactions_do_not_keep_columns_from_being_said(capsys):
    assert train("--interactions", "site,age") == 0
    assert "columns: label click; categorical site, price, age, time" in capsys.readouterr().err


# ---- metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--interactions", "site,age"]])
def test_gauc_is_measured_by_any_column(more, capsys):
    assert train("--numeric", "price", "--ignore", "time", "--quiet", *more) == 0
    frame = [line.split(",") for line in Path("ads.csv").read_text().splitlines()[1:]]
    with shoal.load("m") as model:
        margins = model.decision_function(shoal.read_csv("ads.csv", **model.schema))
    labels = np.array([int(row[0]) for row in frame])
    for column, name in ((1, "site"), (3, "age")):
        expected = shoal.metrics.gauc(labels, margins, [row[column] for row in frame])
        assert cli.main(["evaluate", "m", "--data", "ads.csv", "--group", name]) == 0
        text = capsys.readouterr().out
        assert f"GAUC {expected.gauc:.6f}  ({expected.groups:,} groups, {expected.left_out:,} with one" in text
        assert cli.main(["evaluate", "m", "--data", "ads.csv", "--group", name, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["gauc"] == pytest.approx(expected.gauc, abs=1e-12)


def test_gauc_of_other_formats_is_by_their_fields(capsys):
    Path("d.vw").write_text("1 |user ann |ad a\n-1 |user ann |ad b\n1 |user bob |ad b\n-1 |user bob |ad a\n1 |ad a\n")
    assert cli.main(["train", "lr", "--data", "d.vw", "--format", "vw", "--output", "v", "--quiet"]) == 0
    assert cli.main(["evaluate", "v", "--data", "d.vw", "--group", "user"]) == 0
    assert "(2 groups, 1 with one class skipped)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--group", "nope"], "column 'nope' is not there"),
        (["--group", "site", "--on-error", "skip"], "--group reads the data twice"),
    ],
)
def test_groups_that_cannot_be_read_are_refused(more, says, capsys):
    assert train("--quiet") == 0
    assert cli.main(["evaluate", "m", "--data", "ads.csv", *more]) == 2
    assert says in capsys.readouterr().err


def test_passes_over_examples_that_were_seen_before_are_labelled(capsys):
    assert train("--ignore", "time,price,age", "--epochs", "2") == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if "logloss" in line)
    assert first.startswith("progressive ")
    assert "seen before" not in first
    assert second.startswith("pass 2 ")
    assert ", of examples seen before, " in second
    assert cli.main(["inspect", "m"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("    pass ")]
    assert [", of examples seen before" in line for line in shown] == [False, True]
