"""Files that exist: no command writes over its input, a model, or any file without ``--overwrite``."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal import cli, export
from shoal.checkpoint.format import MANIFEST
from shoal.models import files
from shoal.storage.output import MANIFESTS
from shoal.tools import convert

DATA = "1 3:1 5:1\n0 4:1\n1 3:1\n0 4:1 5:1\n" * 50


@pytest.fixture(autouse=True)
def in_a_folder_with_data_and_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in.libsvm").write_text(DATA)
    assert run("train", "lr", "--data", "in.libsvm", "--format", "libsvm", "--output", "m", "--quiet") == 0


def run(*words):
    """Run one command in this process; argparse leaves by SystemExit."""
    try:
        return cli.main([str(word) for word in words])
    except SystemExit as end:
        return end.code


def contents(folder="."):
    """Return a digest of each file below a folder."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def predict(output, *more, data="in.libsvm"):
    return run("predict", "m", "--data", data, "--output", output, *more)


def test_every_kind_of_manifest_protects_its_directory():
    assert set(MANIFESTS) == {MANIFEST, export.manifest.MANIFEST, files.MODEL_FILE}


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
@pytest.mark.parametrize("output", ["in.libsvm", "./in.libsvm", "link", "hard", "~/in.libsvm"])
def test_no_command_writes_over_the_data_that_it_reads(output, more, capsys, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("fonts")))  # else kept at home when first needed
    monkeypatch.setenv("HOME", os.getcwd())
    os.symlink("in.libsvm", "link")
    os.link("in.libsvm", "hard")
    before = contents()
    for words in (["predict", "m"], ["report", "m"]):
        assert run(*words, "--data", "*.libsvm", "--output", output, *more) == 2
        assert f"{output} is one of the files that are read" in capsys.readouterr().err
    assert contents() == before


@pytest.mark.parametrize("scheme", ["file://", "local://", "simplecache::file://"])
def test_data_that_a_url_names_is_not_written_over(scheme, capsys):
    pytest.importorskip("fsspec")
    before = contents()
    for data in ("in.libsvm", "*.libsvm"):
        for words in (["predict", "m"], ["report", "m"]):
            assert run(*words, "--data", f"{scheme}{os.getcwd()}/{data}", "--output", "in.libsvm", "--overwrite") == 2
            assert "in.libsvm is one of the files that are read" in capsys.readouterr().err
    assert contents() == before


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_no_command_writes_over_a_file_of_a_model(more, capsys):
    assert run("export", "m", "--output", "e", "--quiet") == 0
    os.symlink(next(Path("m").glob("checkpoint-*/*.slots")), "rows")
    before = contents()
    inside = [str(next(Path("m").glob("checkpoint-*/manifest.json"))), str(next(Path("e").glob("????????-*")))]
    for output in ["m/model.json", "e/manifest.json", "rows", *inside]:
        for words in (["predict", "m", "--data", "in.libsvm"], ["report", "m"]):
            assert run(*words, "--output", output, *more) == 2
            assert f"{output} is in the directory of a model" in capsys.readouterr().err
    assert contents() == before


@pytest.mark.slow
@pytest.mark.parametrize("words", [["predict", "m", "--data", "in.libsvm"], ["report", "m"]])
def test_a_file_is_replaced_only_on_request(words, capsys):
    Path("out").write_text("precious")
    assert run(*words, "--output", "out", "--quiet") == 2
    assert "out exists already: pass --overwrite, or name another file" in capsys.readouterr().err
    assert Path("out").read_text() == "precious"
    assert run(*words, "--output", "out", "--quiet", "--overwrite") == 0
    assert Path("out").read_text() != "precious"


@pytest.mark.slow
def test_a_report_in_its_model_replaces_the_one_before():
    assert run("report", "m", "--quiet") == run("report", "m", "--quiet") == 0


def test_rows_replace_nothing_without_being_asked(capsys):
    pytest.importorskip("pyarrow")
    assert run("convert", "m", "--output", "rows", "--quiet") == 0
    Path("rows/lr.parquet").write_text("precious")
    before = contents()
    assert run("convert", "m", "--output", "rows") == 2
    assert "rows/lr.parquet exists already: pass --overwrite" in capsys.readouterr().err
    assert contents() == before
    assert run("convert", "m", "--output", "rows", "--overwrite", "--quiet") == 0
    with shoal.local() as store:
        table = store.table("t", dim=1, optimizer=shoal.SGD(lr=1.0))
        with pytest.raises(ValueError, match=r"lr\.parquet exists already: pass overwrite=True"):
            convert.write_parquet(table, "rows/lr.parquet")


def test_a_checkpoint_of_rows_and_a_model_of_weights_replace_nothing_without_being_asked(capsys):
    pytest.importorskip("pyarrow")
    assert run("convert", "m", "--output", "rows", "--quiet") == 0
    np.savez("w.npz", keys=np.arange(3, dtype=np.uint64), weights=np.ones(3, np.float32))
    for words in (["rows", "--from", "rows", "--output", "c"], ["w.npz", "--from", "npz", "--output", "w"]):
        assert run("convert", *words, "--quiet") == 0
        before = contents()
        assert run("convert", *words) == 2
        assert "already: pass --overwrite" in capsys.readouterr().err
        assert contents() == before
        assert run("convert", *words, "--overwrite", "--quiet") == 0


def test_a_link_of_a_chain_is_never_the_result_of_merging_it(capsys):
    assert run("export", "m", "--output", "e/1", "--quiet") == 0
    assert run("train", "lr", "--data", "in.libsvm", "--format", "libsvm", "--output", "n", "--quiet") == 0
    assert run("export", "n", "--output", "e/2", "--since", "e/1", "--quiet") == 0
    before = contents("e")
    for output in ("e/1", "e/2"):
        assert run("compact", "e/2", "--output", output, "--overwrite") == 2
        assert "is part of the chain" in capsys.readouterr().err
    for output in ("e/1", "e/../e/1"):
        assert run("export", "n", "--output", output, "--since", "e/1", "--overwrite") == 2
    assert contents("e") == before


def test_a_prediction_that_is_not_finite_is_an_error_and_no_file(monkeypatch, capsys):
    def overflowing(model, batch):
        return np.where(np.arange(len(batch)) == 3, np.nan, 0.5)

    monkeypatch.setattr(shoal.LogisticRegression, "probabilities", overflowing)
    before = contents()
    assert predict("p") == 2
    assert "the prediction of example 3 (the first is 0) is not finite" in capsys.readouterr().err
    assert contents() == before


def test_a_symbolic_link_stays_and_the_file_that_it_names_is_replaced():
    Path("there").mkdir()
    Path("there/p").touch()
    for link in ("p", "new"):
        os.symlink(f"there/{link}", link)
    assert predict("p", "--overwrite") == predict("new") == predict("plain") == 0
    assert all(Path(link).is_symlink() for link in ("p", "new"))
    assert Path("there/p").read_bytes() == Path("there/new").read_bytes() == Path("plain").read_bytes()
    assert sorted(os.listdir("there")) == ["new", "p"]


@pytest.mark.slow
def test_a_report_goes_through_a_symbolic_link():
    Path("there").touch()
    os.symlink("there", "page")
    assert run("report", "m", "--output", "page", "--overwrite") == 0
    assert Path("page").is_symlink()
    assert Path("there").read_text().startswith("<!DOCTYPE html>")


def test_a_file_that_is_replaced_keeps_its_permissions_and_may_have_a_long_name():
    name = "p" * 255
    Path(name).touch(0o600)
    assert predict(name, "--overwrite") == 0
    assert os.stat(name).st_mode & 0o777 == 0o600
    assert len(Path(name).read_text().splitlines()) == 200


def test_what_cannot_be_written_is_named_as_it_was_given(capsys):
    os.symlink("missing/p", "link")
    for output, said in (
        ("link", "link cannot be written: No such file or directory; there is no such directory or bucket: make it"),
        ("folder/", "folder/ is a directory: name a file"),
    ):
        assert predict(output) == 2
        assert capsys.readouterr().err == f"shoal: {said}\n"


def test_a_pipe_and_a_device_are_written_to():
    assert predict("/dev/null") == 0
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert predict("pipe", "--quiet") == 0
        assert os.read(reader, 1 << 20).count(b"\n") == 200
    finally:
        os.close(reader)
