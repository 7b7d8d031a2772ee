"""A user's mistake at the shell is one line that names the thing and the remedy, with a status, for every command."""

import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal import cli
from shoal.cli.answers import in_options
from shoal.models import Checkpointing
from shoal.storage.base import remove_if_failed
from shoal.storage.open import open_dir

CSV = "click,site,price\n" + "1,a,0.5\n0,b,0.2\n" * 20
CONFIG = '[data]\nformat = "csv"\ndata = ["ads.csv"]\nlabel = "click"\ncategorical = ["site"]\n[model]\nname = "lr"\n'
LR = ["train", "lr", "--data"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model ``m``, an export ``e`` of it, and files of several kinds."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "good").write_text("1 3:1\n0 4:1\n" * 50)
    (folder / "ads.csv").write_text(CSV)
    (folder / "yes.csv").write_text(CSV.replace("\n1", "\nyes").replace("\n0", "\nno"))
    (folder / "torn.csv").write_text(CSV + "1,a\n")
    (folder / "bytes").write_bytes(bytes(range(256)) * 10)
    (folder / "c.toml").write_text(CONFIG)
    (folder / "torn.toml").write_text("[data\n")
    with shoal.LogisticRegression() as model:
        model.fit(shoal.read_libsvm(folder / "good"), progress=False)
        model.save(folder / "m")
    assert cli.main(["export", str(folder / "m"), "--output", str(folder / "e"), "--quiet"]) == 0
    return folder


@pytest.fixture(autouse=True)
def there(made, monkeypatch):
    monkeypatch.chdir(made)


def run(arguments):
    """Run a command in this process: its status; whatever is raised else is a traceback at the shell."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


MISTAKES = [
    # misspelled
    (["traim"], "did you mean train?"),
    (["evaluat"], "did you mean evaluate?"),
    (["train", "ctrl"], "did you mean ctr?"),
    ([*LR, "good", "--format", "libsvn", "--output", "x"], "did you mean libsvm?"),
    ([*LR, "good", "--format", "libsvm", "--output", "x", "--epoch", "2"], "did you mean --epochs?"),
    (["serve", "e", "--prot", "80"], "did you mean --port?"),
    ([*LR, "good", "--format", "libsvm", "--output", "x", "--lr", "2"], "did you mean --alpha?"),
    ([*LR, "good", "--format", "libsvm", "--output", "x", "--learning-rate", "2"], "did you mean --alpha?"),
    ([*LR, "good", "--format", "libsvm", "--output", "x", "--model", "2"], "unrecognized arguments: --model 2; see"),
    (["train"], "KIND"),
    (["launch"], "PROGRAM"),
    # missing, or of another kind
    ([*LR, "ads.csv", "--format", "csv", "--output", "x"], "--label"),
    ([*LR, "yes.csv", "--format", "csv", "--label", "click", "--output", "x"], "--positive names the text that is 1"),
    (
        [*LR, "torn.csv", "--format", "csv", "--label", "click", "--output", "x"],
        "--on-error skip leaves such lines out",
    ),
    ([*LR, "good", "--format", "libsvm", "--output", "m"], "m holds a model already: pass --overwrite, or"),
    ([*LR, "good", "--format", "parquet", "--label", "y", "--output", "x"], "good is not a Parquet file"),
    ([*LR, "ads.csv", "--format", "csv", "--label", "click", "--interactions", "site", "--output", "x"], "two or more"),
    ([*LR, "s3://nobody/x", "--format", "libsvm", "--output", "x"], "s3://nobody/x cannot be found"),
    (["train", "ctr", "--config", "no"], "no: No such file"),
    (["train", "ctr", "--config", "torn.toml"], "torn.toml"),
    (["train", "ctr", "--config", "bytes"], "bytes"),
    (["train", "ctr", "--config", "c.toml"], "--output DIR"),
    (["train", "ctr", "--config", "c.toml", "--output", "x", "--set", "model.name=lrr"], "did you mean 'lr'"),
    (
        ["evaluate", "m", "--data", "ads.csv", "--format", "csv"],
        "csv requires the column of the label",
    ),
    (["report", "m", "--data", "ads.csv", "--format", "csv"], "csv requires the column of the label"),
    (["evaluate", "e", "--data", "good"], "the directory is a checkpoint or an export, not a model"),
    (["predict", "m", "--data", "good", "--output", "no/such/p"], "there is no directory no/such"),
    (["predict", "m", "--data", "good", "--output", ""], "--output is empty"),
    (["report", "no"], "no: there is no such model"),
    (["inspect", "no"], "no: there is no such"),
    (["compact", "no", "--output", "x"], "no: there is no such checkpoint"),
    (["export", "no", "--output", "x"], "no: there is no such"),
    (
        ["export", "e", "--output", "x"],
        "e/manifest.json is that of a shoal export, not of a shoal checkpoint: name a checkpoint or",
    ),
    (["export", "m", "--output", "x", "--since", "no"], "no: there is no such export"),
    (["export", "m", "--output", "x", "--table", "user"], "has no table 'user'"),
    (["convert", "no", "--output", "x"], "no: there is no such"),
    (["convert", "good", "--output", "x", "--from", "rows"], "good is not a Parquet file"),
    (["convert", "good", "--output", "x", "--from", "parquet"], "good is not a Parquet file"),
    (["serve", "m", "--port", "0"], "m is a model, not an export: write one with `shoal export m --output DIR`"),
    (["serve", "no", "--port", "0"], "no: there is no such export"),
    (["estimate", "--keys", "9", "--dir", "no/such"], "no/such: there is no such directory"),
    (["doctor", "--dir", "no/such"], "no/such: there is no such directory"),
    (["cluster", "10.0.0.1", "status"], "10.0.0.1"),
    (["estimate", "--keys", "9", "--rates", "bytes"], "bytes has no rates"),
    (["keygen", "--output", "good"], "good: File exists"),
    (["completion", "fish"], "choose from 'bash', 'zsh', 'tcsh'"),
    (["scheduler"], "--servers N"),
    (["server"], "--scheduler tcp://HOST:PORT"),
    (["cluster", "nonsense", "status"], "'nonsense' is not an address: write tcp://HOST:PORT"),
    (["cluster", "status", "nonsense"], "'nonsense' is not an address: write tcp://HOST:PORT"),
    (["cluster", "tcp://127.0.0.1:1", "statsu"], "'statsu' is none of status, drain, rebalance, stop: did you mean st"),
    # absurd
    ([*LR, "good", "--format", "libsvm", "--output", "x", "--checkpoint-every", "-3"], "--checkpoint-every is -3"),
    ([*LR, "good", "--format", "libsvm", "--output", "x", "--reader-threads", "0"], "--reader-threads is 0"),
    ([*LR, "good", "--format", "libsvm", "--output", "x", "--progress", "x"], "'x' is not a number"),
    ([*LR, "good", "--format", "libsvm", "--output", "x", "--threads", "99999999999"], "threads"),
    ([*LR, "good", "--format", "libsvm", "--output", "x", "--seed", "-1"], "seed"),
    ([*LR, "good", "--format", "libsvm", "--output", "x", "--alpha", "nan"], "alpha"),
    (["train", "ctr", "--config", "c.toml", "--output", "x", "--threads", "-1"], "--threads is -1"),
    (["train", "ctr", "--config", "c.toml", "--output", "x", "--seed", str(1 << 70)], "seed"),
    (["audit", "--data", "good", "--format", "libsvm", "--bits", "x"], "'x' is not a whole number"),
    (["audit", "--data", "good", "--format", "libsvm", "--examples", "-1"], "--examples is -1"),
    (["diff", "none", "m"], "none"),
    (["explain", "none", "ad=a3"], "none"),
    (["explain", "m", "3"], "train with --keep-checkpoints"),
    (["forget", "m", "--where", "3", "--output", "o"], "train with --keep-checkpoints"),
    (["forget", "m", "--output", "o"], "say what is to be forgotten: --where FEATURE, --examples FILE or --files GLOB"),
    (["forget", "m", "--examples", "none", "--output", "o"], "none"),
    ([*LR, "good", "--without-examples", "good", "--output", "o"], "'1 3:1' is in none of the 1 files of the data"),
    (["bisect", "--good", "none", "--bad", "m", "--test", "true {}"], "train with --keep-checkpoints"),
    (["bisect", "--good", "m", "--bad", "m", "--test", "true"], "has no {}"),
    (["replay", "none", "--output", "o"], "there is no such record of a fit"),
    (["replay", "m", "--output", "o"], "m is not the record of a fit"),
    (["replay", "m"], "--output"),
    ([*LR, "good", "--format", "libsvm", "--output", "x", "--record", "r"], "leave out record (--record)"),
    (["importance", "none", "--data", "good"], "none"),
    (["estimate", "--keys", "1e30", "--no-measure"], "pass 0 to 1000000000000000"),
    (["estimate", "--keys", "inf"], "'inf' is not a whole number: pass 0 to"),
    (["serve", "e", "--port", "99999"], "--port is 99999: pass 0 to 65535"),
    (["serve", "e", "--watch", "nan"], "--watch is nan: pass a number above 0"),
    (
        ["scheduler", "--bind", "tcp://127.0.0.1:*", "--servers", "1", "--heartbeat", "nan"],
        "--heartbeat is nan: pass a number above 0",
    ),
    (["server", "--scheduler", "tcp://127.0.0.1:1", "--timeout", "0"], "--timeout is 0.0: pass a number above 0"),
    (["launch", "--servers", "0", "x.py"], "--servers is 0: pass 1 or more"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_is_one_line_with_the_remedy(arguments, says, capsys):
    if arguments[:2] == ["train", "ctr"]:
        pytest.importorskip("torch", reason="torch is an extra")
    if any("s3://" in word for word in arguments):
        # Another test may have left one that is connected to its server.
        pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    quiet = ["--quiet"] if len(arguments) > 2 and arguments[0] in ("train", "export") else []
    assert run([*arguments, *quiet]) in (1, 2)
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("shoal")
    assert says in line
    assert not re.search(r"\[Errno|=True|on_error", line)
    assert not Path("x").exists(), "a command that fails leaves no directory behind"


def test_every_command_has_a_mistake_above():
    from argparse import _SubParsersAction

    (commands,) = [action for action in cli.parser()._actions if isinstance(action, _SubParsersAction)]
    assert {arguments[0] for arguments, _ in MISTAKES if arguments} >= set(commands.choices)


EXTRAS = {
    "torch": ["train", "ctr", "--config", "c.toml", "--output", "x"],
    "tensorboard": [*LR, "good", "--format", "libsvm", "--output", "x", "--tensorboard", "runs"],
    "mlflow": [*LR, "good", "--format", "libsvm", "--output", "x", "--mlflow", "runs"],
    "pyarrow": [*LR, "ads.parquet", "--format", "parquet", "--label", "click", "--output", "x"],
    "fsspec": [*LR, "s3://nobody/x", "--format", "libsvm", "--output", "x"],
    "backports.zstd": [*LR, "good.zst", "--format", "libsvm", "--output", "x"],
}


@pytest.mark.slow
@pytest.mark.parametrize("missing", EXTRAS)
def test_an_extra_that_is_missing_is_named_with_how_to_install_it(missing):
    if missing == "backports.zstd" and sys.version_info >= (3, 14):
        pytest.skip("the standard library reads Zstandard")
    Path("good.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    Path("ads.parquet").write_bytes(b"PAR1")
    # The list of modules is not called by its full name, so that a fork may run this: no fork has an extra before.
    code = (
        f"import sys; vars(sys)['modules'][{missing!r}] = None; from shoal import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *EXTRAS[missing], "--quiet"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.search(r"pip install 'shoal\[\w+\]'", line), line


@pytest.mark.slow
def test_a_full_disk_names_the_file(monkeypatch, capsys):
    if Path("/dev/full").exists():
        assert run(["predict", "m", "--data", "good", "--output", "/dev/full"]) == 1
        assert capsys.readouterr().err == "shoal: /dev/full: No space left on device\n"

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for arguments, name in (
        (["predict", "m", "--data", "good", "--output", "p"], "p"),
        ([*LR, "good", "--format", "libsvm", "--output", "full", "--quiet"], "full"),
        (["report", "m", "--output", "page.html"], "page.html"),
        (["export", "m", "--output", "exported", "--quiet"], "exported"),
        (["convert", "m", "--output", "converted", "--quiet"], "converted"),
        (["keygen", "--output", "secrets"], "secrets"),
    ):
        assert run(arguments) in (0, 1), arguments  # 0: nothing of it is forced to the disk
        said = capsys.readouterr()
        if said.err:
            assert name in said.err
            assert "[Errno" not in said.err
            assert said.err.count("\n") == 1


def test_a_port_that_is_taken_is_named(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["serve", "e", "--port", port]) == 1
        assert capsys.readouterr().err == f"shoal: 127.0.0.1:{port}: Address already in use\n"
        assert run(["serve", "e", "--host", "nowhere.invalid", "--port", port]) == 1
        assert re.fullmatch(rf"shoal: nowhere.invalid:{port}: .*not found.*\n", capsys.readouterr().err)
        assert run(["scheduler", "--bind", f"tcp://127.0.0.1:{port}", "--servers", "1"]) == 1
        said = capsys.readouterr().err
        assert f"cannot listen at tcp://127.0.0.1:{port}: Address already in use" in said
        assert "choose another address" in said


def test_keywords_become_options_and_nothing_else_does():
    options = {"on_error", "overwrite", "curve", "checkpoint_every", "alpha", "positive", "sep", "insecure"}
    for text, said in {
        "x; on_error='skip' leaves such lines out": "x; --on-error skip leaves such lines out",
        "pass overwrite=True (--overwrite), or choose": "pass --overwrite, or choose",
        "pass sep=';' (--sep)": "pass --sep ';'",
        "pass --curve DIR (curve=), or --insecure (insecure=True) there": "pass --curve DIR, or --insecure there",
        "does it want keys (curve=)?": "does it want keys (--curve)?",
        "checkpoint_every is 0: pass 1 or more": "--checkpoint-every is 0: pass 1 or more",
        "write it as alpha=0.05,0.1": "write it as alpha=0.05,0.1",
        "pass since='x'": "pass since='x'",
        "everyone is here": "everyone is here",
    }.items():
        assert in_options(text, options) == said
        assert in_options(text, set()) == text


def test_a_warning_is_marked_as_those_of_other_commands(made, tmp_path, capsys):
    (tmp_path / "lists.csv").write_text("click,genres\n" + "1,a|b\n0,c\n" * 50)
    train = [*LR, tmp_path / "lists.csv", "--label", "click", "--output", tmp_path / "m"]
    assert run(train) == 0
    capsys.readouterr()
    assert run(["evaluate", tmp_path / "m", "--data", tmp_path / "lists.csv"]) == 0
    assert capsys.readouterr().err.startswith("shoal: column 'genres' looks like lists")


def test_a_fit_or_a_save_that_fails_leaves_no_empty_directory(tmp_path):
    (tmp_path / "torn").write_text("oops\n")
    with shoal.LogisticRegression() as model, pytest.raises(ValueError, match="not a number"):
        model.fit(
            shoal.read_libsvm(tmp_path / "torn"),
            progress=False,
            checkpoint=Checkpointing(tmp_path / "deep" / "er" / "m"),
        )
    arguments = [*LR, tmp_path / "torn", "--format", "libsvm", "--quiet", "--output", tmp_path / "there" / "m"]
    (tmp_path / "there").mkdir()
    assert run([*arguments, "--checkpoint-every", 1]) == 2
    assert run(arguments) == 2
    with contextlib.suppress(KeyError), remove_if_failed(open_dir(tmp_path / "full" / "m")):
        (tmp_path / "full" / "m").mkdir(parents=True)
        (tmp_path / "full" / "kept").touch()
        raise KeyError
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "full",
        "full/kept",
        "there",
        "torn",
    ]


# ---- what the package itself says ------------------------------------------------------------------------------------


def test_a_path_that_is_not_there_is_no_damage(tmp_path):
    for read, *more in (
        (shoal.LogisticRegression.load,),
        (shoal.export.open,),
        (shoal.export.compact, tmp_path / "out"),
        (shoal.checkpoint.compact, tmp_path / "out"),
    ):
        with pytest.raises(FileNotFoundError, match="there is no such") as caught:
            read(tmp_path / "no", *more)
        assert str(tmp_path / "no") in str(caught.value)
    with shoal.local() as store, pytest.raises(FileNotFoundError, match="no such checkpoint"):
        store.load(tmp_path / "no")
    (tmp_path / "empty").mkdir()
    with pytest.raises(shoal.CorruptionError, match="is missing"):
        shoal.LogisticRegression.load(tmp_path / "empty")


@pytest.mark.parametrize("where", ["data", "pattern", "output"])
def test_a_name_that_is_no_text_is_refused_before_a_fit(where, tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / os.fsdecode(b"a\xff.csv")).write_text("y,a\n1,x\n0,z\n")
    (tmp_path / "b.csv").write_text("y,a\n1,x\n0,z\n")
    data = {"data": folder / os.fsdecode(b"a\xff.csv"), "pattern": folder / "*"}.get(where, tmp_path / "b.csv")
    output = tmp_path / (os.fsdecode(b"m\xff") if where == "output" else "m")
    assert cli.main(["train", "lr", "--data", str(data), "--label", "y", "--output", str(output)]) == 2
    assert re.search(r"the name b'.*\\xff.*' of a file is not utf-8: rename the file\n$", capsys.readouterr().err)
    assert not output.exists()


def test_labels_that_are_texts_have_a_remedy_for_labels():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"click": ["yes", "no"], "site": ["a", "b"]})
    with pytest.raises(ValueError, match="this is the label, pass positive="):
        list(shoal.read_arrow(frame, label="click"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_named_with_its_example_and_key(value):
    values = np.array([1, 2, value, 1], np.float32)
    batch = shoal.Batch(
        np.array([1, 0, 1], np.float32), np.array([0, 2, 3, 4]), np.array([7, 8, 9, 7], np.uint64), values
    )
    with shoal.LogisticRegression() as model:
        with pytest.raises(ValueError, match=r"example 1 of a batch has the value -?(nan|inf) for key 9 \(1 of 4"):
            model.fit([batch], progress=False)
        with pytest.raises(ValueError, match="for key 9"):
            model.partial_fit(batch)
        assert len(model.table) == 0


def test_keys_that_are_no_tensor_have_a_remedy_that_works():
    torch = pytest.importorskip("torch", reason="torch is an extra")
    with shoal.local() as store:
        layer = shoal.torch.Embedding(store.table("t", dim=2))
        with pytest.raises(TypeError, match=r"got ndarray: pass torch\.from_numpy\(keys\)"):
            layer(np.array([1, 2]))
        with pytest.raises(TypeError, match=r"got list: pass torch\.tensor\(keys\)"):
            layer([1, 2])
        with pytest.raises(TypeError, match=r"got torch\.float32: pass keys\.long\(\)"):
            layer(torch.ones(2))
        assert layer(torch.from_numpy(np.array([1, 2]))).shape == (2, 2)


def test_the_command_alone_prints_its_help(capsys):
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("usage: shoal")
    assert "train" in out
    assert err == ""
