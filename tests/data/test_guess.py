"""The command line without --format; --sep; ``~`` wherever a path is taken."""

from __future__ import annotations

import gzip
import io
import sys
from typing import get_args

import numpy as np
import pytest

import shoal
from shoal import config
from shoal.cli import main
from shoal.data.guess import guess_format
from shoal.data.readers import READERS

CRITEO = "1\t20" + "\t" * 12 + "\t68fd1e64" + "\t" * 25 + "\n"
LINES = {
    "libsvm": "1 3:1 7:0.5\n-1 2:1e-3\n",
    "libffm": "0 1:3:1 2:7:0.5\n",
    "vw": "1 2.0 'tag|user ann |price:0.5 :3\n",
    "criteo": CRITEO,
    "csv": "click,site\n1,a.com\n",
    "tsv": "click\tsite\n1\ta,b.com\n",
}


@pytest.mark.parametrize("form", LINES)
def test_a_format_is_guessed_from_the_first_line_whatever_the_name(form, tmp_path):
    for name in ("data", "data.txt", "data.log"):
        (tmp_path / name).write_text(LINES[form])
        assert guess_format(tmp_path / name) == form
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b"\n\n" + LINES[form].encode()))
        assert guess_format([tmp_path / f"{name}.gz", tmp_path / "data"]) == form


def test_a_name_decides_where_a_line_fits_several_formats(tmp_path):
    for name, text, form in [
        ("a.libsvm", "1\n", "libsvm"),
        ("a.csv", "click;site|x\n", "csv"),
        ("a.vw.gz", "1 |a b,c\n", "vw"),
        ("day_0.tsv", CRITEO, "criteo"),
        ("a.tsv", "click\n", "tsv"),
    ]:
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
        assert guess_format(tmp_path / name) == form
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert guess_format(tmp_path / "a.parquet") == "parquet"
    for name, data in [("empty", b""), ("words", b"hello world\n"), ("bytes", bytes(range(256)))]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match="has no recognizable format"):
            guess_format(tmp_path / name)
    with pytest.raises(ValueError, match="is a stream"):
        guess_format(io.BytesIO(b"1 3:1\n"))
    assert set(LINES) - {"tsv"} | {"parquet"} == set(READERS)


def test_the_command_line_has_the_formats_that_have_readers():
    named = {name for one in get_args(get_args(config.Format)[0]) for name in get_args(one)}
    assert named == {*READERS, "tsv", "json"}  # csv with another separator, and messages of a topic


def test_the_command_line_guesses_the_format_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    (tmp_path / "train.txt").write_text("".join(f"{k % 2} {k % 2}:1 {rng.integers(9) + 2}:1\n" for k in range(99)))
    assert main(["train", "lr", "--data", "train.txt", "--output", "m"]) == 0
    assert "shoal: detected format libsvm; pass --format to choose another one" in capsys.readouterr().err
    assert main(["train", "lr", "--data", "train.txt", "--output", "q", "--quiet", "--format", "libsvm"]) == 0
    assert capsys.readouterr().err == ""
    with shoal.load("m") as model, shoal.load("q") as other:
        assert model.format == "libsvm"
        assert model.table.digest() == other.table.digest()
    (tmp_path / "words").write_text("hello world\n")
    assert main(["train", "lr", "--data", "words", "--output", "w"]) == 2
    assert "words has no recognizable format, neither by its first line nor by its name: name it, as in --format" in (
        capsys.readouterr().err
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1 3:1\n")))
    assert main(["train", "lr", "--data", "-", "--output", "w"]) == 2
    assert "is a stream" in capsys.readouterr().err


def test_a_separator_is_named_remembered_and_checked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ads.csv").write_text("click;site\n" + "1;a,b\n0;c\n" * 20)
    (tmp_path / "ads.txt").write_text((tmp_path / "ads.csv").read_text().replace(";", "\t"))
    how = ["train", "lr", "--label", "click", "--format", "csv", "--quiet"]
    assert main([*how, "--data", "ads.csv", "--sep", ";", "--output", "m"]) == 0
    assert main([*how, "--data", "ads.txt", "--sep", "tab", "--output", "t"]) == 0
    with shoal.load("m") as model, shoal.load("t") as other:
        assert (model.schema["sep"], other.schema["sep"]) == (";", "\t")
        assert model.table.digest() == other.table.digest()
        assert len(model.table) == 3
    assert main(["evaluate", "m", "--data", "ads.csv", "--quiet"]) == 0
    for more, said in [(["--sep", ";;"], "pass one character, or tab"), (["--sep", "a"], "sep is 'a'")]:
        try:
            status = main([*how, "--data", "ads.csv", "--output", "x", *more])
        except SystemExit as exit:
            status = exit.code
        assert status == 2
        assert said in capsys.readouterr().err
    wrong = ["train", "lr", "--data", "ads.csv", "--format", "libsvm", "--sep", ";", "--output", "x"]
    assert main(wrong) == 2
    assert "--sep applies to csv" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tilde_is_the_home_directory_wherever_a_path_is_taken(tmp_path, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))  # its own files, in the home
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.libsvm").write_text("1 3:1\n0 4:1\n")
    names = shoal.data.FeatureNames()
    with shoal.LogisticRegression() as model:
        model.fit(shoal.read_libsvm("~/a.libsvm", names=names), progress=False)
        model.fit(shoal.read_libsvm("~/*.libsvm"), progress=False)
        model.save("~/model")
        model.store.save("~/ckpt")
        model.store.export("~/export")
        names.save("~/names.json")
        shoal.tools.report("~/model", "~/report.html")
        with shoal.load("~/model") as loaded, shoal.export.open("~/export") as export, shoal.local() as store:
            assert loaded.table.digest() == model.table.digest()
            assert len(export.tables["lr"]) == 2  # the bias is 0
            store.load("~/ckpt")
            assert len(store.tables["lr"]) == 3
    assert len(shoal.data.FeatureNames.load("~/names.json")) == 2
    assert main(["predict", "~/model", "--data", "~/a.libsvm", "--output", "~/p", "--quiet"]) == 0
    made = {"a.libsvm", "model", "ckpt", "export", "names.json", "report.html", "p"}
    assert {path.name for path in tmp_path.iterdir()} == made
