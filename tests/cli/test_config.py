"""Files of settings: what a run prints, what comes before what, what all kinds of models share, what a model keeps."""

import json
import tomllib
from pathlib import Path

import pytest

from shoal.cli import main

LOG = "1 3:1 8:0.5\n0 4:1 8:2\n" * 200


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").write_text(LOG)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    """The configuration that a run prints."""
    assert main([*words, "--print-config"]) == 0
    return tomllib.loads(capsys.readouterr().out)


def test_a_run_prints_its_configuration_and_a_run_with_that_file_is_the_same(capsys) -> None:
    run = ["train", "lr", "--data", "log", "--format", "libsvm", "--alpha", "0.3", "--epochs", "2", "--no-warm-up"]
    run += ["--admit", "count:2", "--expire", "ttl:9", "--expire", "norm:0.1"]
    found = printed(capsys, *run, "--threads", "1")
    assert found["lr"]["alpha"] == 0.3
    assert found["train"]["warm_up"] is False
    assert found["tables"]["expire"] == ["ttl:9", "norm:0.1"]
    Path("run.toml").write_text(main_text(capsys, *run, "--threads", "1"))
    assert printed(capsys, "train", "lr", "--config", "run.toml") == found
    for output, words in (("a", [*run, "--threads", "1"]), ("b", ["train", "lr", "--config", "run.toml"])):
        assert main([*words, "--output", output, "--json", "--quiet"]) == 0
    one, other = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert one["passes"][-1]["metrics"] == other["passes"][-1]["metrics"]


def main_text(capsys, *words: str) -> str:
    assert main([*words, "--print-config"]) == 0
    return capsys.readouterr().out


def test_an_option_comes_before_set_and_that_before_the_file(capsys) -> None:
    Path("run.toml").write_text('threads = 3\n[data]\ndata = "log"\n[train]\nepochs = 5\nseed = 4\npatience = 2\n')
    found = printed(
        capsys,
        "train",
        "lr",
        "--config",
        "run.toml",
        "--set",
        "train.seed=6",
        "--set",
        "train.epochs=7",
        "--epochs",
        "8",
    )
    assert (found["threads"], found["data"]["data"]) == (3, ["log"])
    assert [found["train"][name] for name in ("epochs", "seed", "patience")] == [8, 6, 2]


def test_one_file_describes_models_of_all_kinds(capsys) -> None:
    Path("all.toml").write_text(
        '[data]\ndata = ["log"]\nformat = "libsvm"\n[lr]\nl1 = 0.5\n[fm]\ndim = 3\n[model]\nname = "deepfm"\ndim = 4\n'
        '[tables]\noptimizer = { name = "Adagrad", lr = 0.1 }\n[tables.rules.linear]\ndtype = "float16"\n'
        '[train]\nepochs = 2\n[output]\noutput = "m"\n'
    )
    of_kinds = [printed(capsys, "train", kind, "--config", "all.toml") for kind in ("lr", "fm", "ctr")]
    assert of_kinds[0] == of_kinds[1] == of_kinds[2]
    assert of_kinds[0]["tables"]["rules"] == {"linear": {"dtype": "float16"}}
    for kind in ("lr", "fm"):
        assert main(["train", kind, "--config", "all.toml", "--quiet", "--json", "--overwrite"]) == 0
        assert len(json.loads(capsys.readouterr().out)["passes"]) == 2


@pytest.mark.parametrize("kind", ["lr", "fm"])
def test_the_directory_of_a_model_keeps_the_configuration_of_its_run(capsys, kind: str) -> None:
    run = ["train", kind, "--data", "log", "--format", "libsvm", "--l1", "0.25", "--output", "m", "--quiet"]
    assert main(run) == 0
    kept = tomllib.loads(Path("m/config.toml").read_text())
    assert (kept[kind]["l1"], kept["output"]["output"]) == (0.25, "m")
    assert main(["train", kind, "--config", "m/config.toml", "--output", "again", "--json", "--quiet"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert main([*run, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passes"][0]["metrics"] == again["passes"][0]["metrics"]
    assert main(["inspect", "m"]) == 0


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ("[dta]\n", [], "the configuration has no key 'dta': did you mean 'data'"),
        ("[train]\nepoch = 3\n", [], "[train] has no key 'epoch': did you mean 'epochs'"),
        ("[train]\nepochs = 0\n", [], "[train] epochs is 0: pass 1 or more"),
        ("[train]\nema = 1\n", [], "[train] ema is 1.0: pass a number above 0 and below 1"),
        ("epochs = 3\n", [], "has no key 'epochs': did you mean train.epochs?"),
        ("\ufeff[train]\r\nepochs = 0\r\n", [], "[train] epochs is 0: pass 1 or more"),  # of an editor of Windows
        ("[train\n", [], "is not TOML: "),
        ("[cluster]\nconsistency = 'sps:2'\n", [], "[cluster] consistency: 'sps:2' is not a consistency"),
        ("[train]\nresume = true\n", [], "[train] has no key 'resume'"),
        ("", ["--epochs", "0"], "--epochs is 0: pass 1 or more"),
        ("", ["--set", "train.epoch=2"], "[train] has no key 'epoch'"),
        ("", ["--set", "threads.epoch=2"], "threads"),
        ("", ["--admit", "counts:2"], "--admit: 'counts:2' is not an admission rule"),
        ("", [], "pass --data FILE, or set data in [data]"),
    ],
)
def test_what_is_wrong_is_said_with_its_section_or_its_option(capsys, text: str, words: list[str], says: str) -> None:
    Path("run.toml").write_text(text)
    assert main(["train", "lr", "--config", "run.toml", "--output", "m", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not Path("m").exists()
