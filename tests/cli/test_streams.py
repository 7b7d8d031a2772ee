"""Trouble with standard streams, signals and data in the middle of a pass: what was learned is kept."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal import LogisticRegression, cli
from shoal.base.progress import rows_bar
from shoal.base.streams import write_stderr
from shoal.cli.answers import WorkerOutput

GOOD = "1 3:1 4:1\n0 4:1 7:1\n" * 5000
TRAIN = ["train", "lr", "--data", "good.libsvm", "--format", "libsvm", "--output", "m", "--batch-size", "64"]
SHOAL = f"{sys.executable} -W error -m shoal"


@pytest.fixture(autouse=True)
def in_a_folder_with_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("good.libsvm").write_text(GOOD)
    Path("torn.libsvm").write_text("1 3:1\n0 4:oops\n")


class Full(io.StringIO):
    """A stream of a disk that is full."""

    def write(self, text):
        raise OSError(28, "No space left on device")


class Closed(io.StringIO):
    """A stream whose other end has gone."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


class Torn(io.StringIO):
    """A stream of a disk that is full for a while."""

    def write(self, text):
        if "second" in text or "third" in text:
            raise OSError(28, "No space left on device")
        return super().write(text)


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


def examples(place="m"):
    with LogisticRegression.load(place) as model:
        return model.examples


@pytest.mark.parametrize("make", [Full, Closed, closed, lambda: None], ids=["full", "broken", "closed", "none"])
@pytest.mark.parametrize("progress", [True, 2.0])
def test_a_fit_goes_on_when_standard_error_fails(make, progress, monkeypatch):
    monkeypatch.setattr(sys, "stderr", make())
    with LogisticRegression() as model:
        model.fit(shoal.read_libsvm("good.libsvm", batch_size=64), progress=progress)
        assert model.examples == 10_000
    with rows_bar("rows", 10, show=True) as add:
        for _ in range(10):
            add(1)
    write_stderr("lost")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "status"),
    [
        ("2>/dev/full", 0),
        ("2>/dev/full --progress 2.0", 0),
        ("2>&-", 0),
        ("<&- 2>&- >&-", 0),
        ("2>&1 >/dev/null | head -c 20 >head", 0),
        (">/dev/full", 1),  # the model is saved; its summary is what cannot be written
    ],
)
def test_a_model_is_saved_whatever_the_standard_streams_take(streams, status):
    command = f"{SHOAL} {' '.join(TRAIN)} {streams}; echo ${{PIPESTATUS[0]}} >status"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert Path("status").read_text().split() == [str(status)], done
    assert "Traceback" not in done.stderr
    assert examples() == 10_000
    if status:
        assert "shoal: standard output: No space left on device\n" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "status", "message"),
    [(">/dev/full", 1, "shoal: standard output: No space left on device\n"), ("| true", 1, ""), (">&-", 0, "")],
)
def test_a_version_that_cannot_be_printed_is_no_traceback(streams, status, message):
    command = f"(sleep 0.2; exec {SHOAL} --version) {streams}; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{status}\n", message)


def test_output_of_workers_that_cannot_be_written_is_dropped_with_one_warning(monkeypatch, capsys):
    for made, loss in ((Torn(), 1), (Closed(), 0)):  # a reader that has closed the pipe needs no word
        monkeypatch.setattr(sys, "stdout", made)
        output = WorkerOutput()
        assert output.status(0) == 0
        for line in ("first", "second", "third", "fourth"):
            output.print_output(line)
        assert (output.status(0), output.status(143)) == (1, 143)
        assert made.getvalue() == ("first\nfourth\n" if loss else "")
        lost = "shoal: standard output: No space left on device: output of the workers is lost\n"
        assert capsys.readouterr().err == lost * loss


@pytest.mark.slow
@pytest.mark.parametrize("stream", [">/dev/full", "| true"])
def test_workers_continue_when_the_output_of_their_launch_fails(stream):
    train = " ".join([*TRAIN, "--cluster"])
    command = f"{SHOAL} launch bash -c 'seq 100; sleep 1; seq 100 && shoal {train}' {stream}; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-1:] == ["1"], done
    assert "Traceback" not in done.stderr
    assert examples() == 10_000


@pytest.mark.slow
def test_a_summary_is_escaped_where_the_encoding_lacks_a_character():
    command = [*SHOAL.split(), *TRAIN[:-4], "--output", "modèle", "--quiet"]
    assert subprocess.run(command, timeout=120).returncode == 0
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*SHOAL.split(), "inspect", "modèle"], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(r"mod\xe8le: logistic regression")


def test_nohup_ignores_sighup():
    code = (
        "import os, signal\n"
        "from shoal.base.interrupts import at_boundaries, terminable\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with terminable(), at_boundaries() as came:\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    assert came() is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---- data that fails in the middle of a pass -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_is_saved_as_trained_until_a_malformed_line(capsys):
    words = ["train", "lr", "--data", "good.libsvm", "torn.libsvm", "--format", "libsvm", "--batch-size", "64"]
    assert cli.main([*words, "--output", "m", "--quiet"]) == 2
    err = capsys.readouterr().err
    assert "the fit fails after 9,984 examples; the model as trained so far is in m" in err
    assert "torn.libsvm, line 2" in err
    with LogisticRegression.load("m") as model:
        assert model.examples == 9984
        assert not model.history.passes[-1].complete
    assert cli.main([*words, "--output", "g", "--grid", "alpha=0.1,0.2", "--save-all", "--quiet"]) == 2
    assert examples("g/alpha=0.1") == examples("g/alpha=0.2") == 9984


def test_a_model_that_was_there_is_not_replaced_by_a_fit_that_fails(capsys):
    assert cli.main([*TRAIN, "--quiet"]) == 0
    words = ["train", "lr", "--data", "good.libsvm", "torn.libsvm", "--format", "libsvm", "--batch-size", "32"]
    assert cli.main([*words, "--output", "m", "--overwrite", "--quiet"]) == 2
    assert "the model in m is the one that was there" in capsys.readouterr().err
    assert examples() == 10_000


@pytest.mark.slow
def test_a_fit_with_checkpoints_continues_behind_a_malformed_line(capsys):
    words = ["train", "lr", "--data", "good.libsvm", "torn.libsvm", "--format", "libsvm", "--batch-size", "64"]
    words += ["--output", "m", "--checkpoint-every", "1000", "--quiet"]
    assert cli.main(words) == 2
    assert "--resume continues from the checkpoint in m" in capsys.readouterr().err
    assert cli.main([*words, "--resume", "--on-error", "skip"]) == 0
    with LogisticRegression.load("m") as resumed, LogisticRegression() as whole:
        whole.fit(shoal.read_libsvm(["good.libsvm", "torn.libsvm"], batch_size=64, on_error="skip"), progress=False)
        assert resumed.examples == whole.examples == 10_001
        keys = np.array([3, 4, 7], np.uint64)
        assert resumed.table.pull(keys).tolist() == whole.table.pull(keys).tolist()


def test_what_fails_before_anything_was_learned_saves_nothing(capsys):
    assert cli.main(["train", "lr", "--data", "torn.libsvm", "--format", "libsvm", "--output", "m", "--quiet"]) == 2
    assert not Path("m").exists()
    assert "trained so far" not in capsys.readouterr().err


def test_expiry_of_a_stream_without_an_end_needs_checkpoints(capsys):
    Path("clicks").mkdir()
    train = ["train", "lr", "--data", "clicks", "--follow", "--format", "libsvm", "--output", "m"]
    assert cli.main([*train, "--expire", "rows:5000", "--expire", "ttl:3"]) == 2
    error = capsys.readouterr().err
    assert "--expire of table 'lr' has TimeToLive(clocks=3), which is applied" in error
    assert "the stream has no end: pass --checkpoint-every BATCHES, or --expire rows:N" in error


@pytest.mark.parametrize("role", ["--data", "--valid"])
def test_several_passes_over_a_stream_are_refused_before_the_first_one(role, capsys):
    files = {"--data": "good.libsvm", "--valid": "good.libsvm"} | {role: "-"}
    words = [word for pair in files.items() for word in pair]
    assert cli.main(["train", "lr", *words, "--format", "libsvm", "--epochs", "2", "--output", "m", "--quiet"]) == 2
    err = capsys.readouterr().err
    assert "a stream, which is read once, and there are to be 2 passes: write the data to a file" in err
    assert "trained so far" not in err
    assert not Path("m").exists()
