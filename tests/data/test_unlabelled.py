"""Data without labels, for predictions: every format, labels that are missing, blank or anything."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import cli

ROWS = 300
COLUMNS = {"label": "click", "weight": "importance", "categorical": ["site", "user"], "numeric": ["price"]}


def lines(form: str, label: Callable[[int], str | None]) -> str:
    """A file of a format, whose labels are what ``label`` tells; None: it has none."""
    rng = random.Random(4)
    rows = []
    for i in range(ROWS):
        a, b, price = rng.randrange(9), rng.randrange(40), rng.randrange(1, 100) / 8
        text = label(i)
        given = [] if text is None else [text]
        if form == "libsvm":
            rows.append(" ".join([*given, f"{a}:1", f"{100 + b}:{price}"]))
        elif form == "libffm":
            rows.append(" ".join([*given, f"0:{a}:1", f"1:{100 + b}:{price}"]))
        elif form == "vw":
            rows.append(" ".join([*given, f"|site s{a} |user u{b}:{price}"]))
        elif form == "criteo":
            integers = ["" if rng.random() < 0.3 else str(rng.randrange(-2, 500)) for _ in range(13)]
            categories = ["" if rng.random() < 0.3 else f"{rng.randrange(50):08x}" for _ in range(26)]
            rows.append("\t".join([*given, *integers, *categories]))
        else:
            sep = "\t" if form == "tsv" else ","
            cells = [f"s{a}", f"u{b}", f"{price}"]
            rows.append(sep.join([*cells[:1], *given, *cells[1:]]))
    if form in ("csv", "tsv"):
        names = ["site", *([] if label(0) is None else ["click"]), "user", "price"]
        rows.insert(0, ("\t" if form == "tsv" else ",").join(names))
    return "".join(f"{row}\n" for row in rows)


def reader(form: str, path: Path, **how: Any) -> shoal.data.Reader:
    if form in ("csv", "tsv"):
        schema = {name: value for name, value in COLUMNS.items() if name != "weight"}
        return shoal.read_csv(path, sep="\t" if form == "tsv" else ",", **schema, **how)
    made: shoal.Reader = getattr(shoal, f"read_{form}")(path, **how)
    return made


FORMATS = ("libsvm", "libffm", "vw", "criteo", "csv", "tsv")
MISSING: dict[str, Callable[[int], str | None]] = {"missing": lambda i: None, "nonsense": lambda i: "n/a?"}


def labelled(i: int) -> str:
    return "1" if i % 3 == 0 else "0"


def contents(batches: Any) -> list[Any]:
    return [
        (batch.indptr.tolist(), batch.keys.tolist(), None if batch.values is None else batch.values.tolist())
        for batch in batches
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_unlabelled_data_has_the_features_of_labelled_data_and_is_predicted_so(form: str, tmp_path: Path) -> None:
    train = tmp_path / "train"
    train.write_text(lines(form, labelled))
    expected = contents(reader(form, train, batch_size=70))
    with shoal.LogisticRegression() as model:
        model.fit(reader(form, train, batch_size=70), progress=False)
        probabilities = model.probabilities(reader(form, train)).tobytes()
        blank = {"blank": lambda i: "", "blank or not": lambda i: "" if i % 2 else "1"}
        for what, label in {**MISSING, **(blank if form in ("criteo", "csv", "tsv") else {})}.items():
            path = tmp_path / what
            path.write_text(lines(form, label))
            for threads in (1, 3):
                data = reader(form, path, batch_size=70, reader_threads=threads)
                assert contents(data.unlabelled()) == expected, what
                assert model.probabilities(data).tobytes() == probabilities
                assert all(np.isnan(batch.labels).all() for batch in data.unlabelled())
                assert data.skipped == 0
            with pytest.raises(ValueError, match=r"label|columns are needed|not there"):
                list(reader(form, path))
        with pytest.raises(ValueError, match=r"labels must be 0 or 1, got nan|label nan"):
            model.partial_fit(next(iter(reader(form, tmp_path / "missing").unlabelled())))
        with pytest.raises(ValueError, match="label"):
            model.evaluate(reader(form, tmp_path / "missing").unlabelled())


@pytest.mark.parametrize("form", [*FORMATS, "parquet"])
def test_the_command_predicts_what_has_no_labels(form: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    text = "csv" if form == "parquet" else form
    for name, label in (("train", labelled), ("new", MISSING["missing"])):
        Path(name).write_text(lines(text, label))
        if form == "parquet":
            arrow = pytest.importorskip("pyarrow.csv")
            pytest.importorskip("pyarrow.parquet").write_table(arrow.read_csv(name), name)
    more = ["--label", "click", "--numeric", "price"] if form in ("csv", "tsv", "parquet") else []
    assert cli.main(["train", "lr", "--data", "train", "--format", form, "--output", "m", "--quiet", *more]) == 0
    outputs = []
    for name in ("train", "new"):
        assert cli.main(["predict", "m", "--data", name, "--output", f"p-{name}"]) == 0
        outputs.append(Path(f"p-{name}").read_text())
    assert outputs[0] == outputs[1]
    assert outputs[0].count("\n") == ROWS
    assert cli.main(["evaluate", "m", "--data", "new"]) == 2
    assert re.search(r"label|column .click. is not there", capsys.readouterr().err)


def test_malformed_lines_are_malformed_without_labels_too_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with shoal.LogisticRegression() as model:
        for form, bad in (
            ("libsvm", "3:1 x"),
            ("libffm", "3:1"),
            ("vw", "1 no bar"),
            ("criteo", "\t".join("1" * 38)),
            ("criteo", "\t".join("1" * 41)),
            ("csv", "s1"),
        ):
            path.write_text(lines(form, labelled) + bad + "\n")
            data = reader(form, path, on_error="skip")
            if form == "libsvm":
                model.fit(data, progress=False)
                assert len(model.probabilities(data)) == ROWS
                assert data.skipped == 1
            unlabelled = data.unlabelled()
            assert sum(map(len, unlabelled)) == ROWS, form
            assert (data.skipped, unlabelled.skipped) == (1, 1)
            with pytest.raises(ValueError, match=rf"line {ROWS + 1 + (form == 'csv')}, column"):
                list(reader(form, path).unlabelled())


def test_of_files_without_a_header_each_line_may_have_the_label_or_not(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('1,a,2.5,3\na,2.5,3\n,"b",NA,4\n"b",,4\nyes,c,1,5\n')
    how: dict[str, Any] = {"label": "y", "columns": ["y", "site", "price", "day"], "numeric": ["price"]}
    (batch,) = shoal.read_csv(path, categorical=["site"], **how).unlabelled()
    assert batch.indptr.tolist() == [0, 2, 4, 5, 6, 8]
    assert batch.keys[:2].tolist() == batch.keys[2:4].tolist()
    assert batch.keys[4] == batch.keys[5]
    path.write_text("a,2.5\n")
    with pytest.raises(ValueError, match="more or fewer cells"):
        list(shoal.read_csv(path, **how).unlabelled())


def test_a_position_and_splits_hold_without_labels(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(lines("csv", MISSING["missing"]))
    data = reader("csv", path, batch_size=64).unlabelled()
    whole = contents(data)
    passing = iter(data)
    first = contents([next(passing), next(passing)])
    position = json.loads(json.dumps(data.position()))
    passing.close()
    assert first + contents(reader("csv", path, batch_size=64).unlabelled().resume(position)) == whole
    assert sum(len(batch) for rank in range(3) for batch in data.split(rank, 3)) == ROWS


def test_a_reader_of_no_label_column_takes_all_others_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(lines("csv", MISSING["missing"]))
    (batch,) = shoal.read_csv(path, label=None, numeric=["price"])
    assert np.isnan(batch.labels).all()
    assert batch.nnz == 3 * ROWS
