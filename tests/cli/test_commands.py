"""The command ``shoal`` as a user meets it: real processes for signals and pipes, ``main`` in this one for the rest."""

import argparse
import gzip
import io
import itertools
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import shoal
from paths import SUPPORT
from shoal import LogisticRegression, cli
from shoal.tools.planted import PlantedModel, write_log

SHOAL = [sys.executable, "-W", "error", "-m", "shoal"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def logs(tmp_path_factory):
    """A folder with the files that the examples of the help name."""
    folder = tmp_path_factory.mktemp("logs")
    planted = PlantedModel(seed=1)
    write_log(folder / "day_0.tsv", planted, 6000, 0)
    write_log(folder / "day_1.tsv", planted, 3000, 1 << 40)
    rng = np.random.default_rng(7)
    for name, n in [("train.libsvm", 2000), ("test.libsvm", 500)]:
        keys = rng.integers(1, 50, (n, 5))
        labels = rng.random(n) < 1 / (1 + np.exp(-np.sin(keys).sum(1)))
        rows = [
            f"{int(y)} " + " ".join(f"{k}:1" for k in sorted(set(row))) for y, row in zip(labels, keys, strict=True)
        ]
        (folder / name).write_text("\n".join(rows) + "\n")

    (folder / "stars.csv").write_text("stars,kind\n" + "".join(f"{i % 5},k{i % 7}\n" for i in range(200)))
    for name in ("ads_0.csv", "ads_1.csv"):
        sites, users, prices = rng.integers(0, 9, 800), rng.integers(0, 40, 800), rng.random(800)
        clicks = (rng.random(800) < 1 / (1 + np.exp(-np.sin(sites * users)))).astype(int)
        rows = zip(clicks, sites, users, prices, strict=True)
        lines = [f"{click},site-{site},{user},{price:.3f}" for click, site, user, price in rows]
        (folder / name).write_text("\n".join(["click,site,user,price", *lines]) + "\n")

    (folder / "train.libsvm.gz").write_bytes(gzip.compress((folder / "train.libsvm").read_bytes()))
    return folder


def run(*arguments):
    """Run one command in this process; argparse leaves by SystemExit."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


def train(logs, model, *more):
    return run("train", "lr", "--data", logs / "train.libsvm", "--format", "libsvm", "--output", model, *more)


@pytest.fixture
def model(logs, tmp_path):
    assert train(logs, tmp_path / "small", "--quiet", "--batch-size", 64) == 0
    return tmp_path / "small"


# ---- help ------------------------------------------------------------------------------------------------------------


# Runs commands in forks of a process that has imported the package: its own, since it may have no threads.
SHELL = """\
import json, subprocess, sys
from preloaded import preloaded

with preloaded(["shoal.cli", "shoal.models", *sys.argv[1:]]):
    for command in json.load(sys.stdin):
        done = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        print(json.dumps([command, done.returncode, done.stdout, done.stderr]))
"""


@pytest.mark.long
def test_each_example_of_each_help_runs(logs, tmp_path, capsys):
    for path in logs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    commands = []
    for words in (["train", "lr"], ["train", "fm"], ["predict"], ["evaluate"], ["inspect"], ["train"], []):
        assert run(*words, "--help") == 0
        found = re.findall(r"^  \$ ((?:.+\\\n)*.+)$", capsys.readouterr().out, re.MULTILINE)
        assert found, f"the help of {words} has no examples"
        for command in found:
            if words == ["train"] or not words:
                command = command.replace("--output ctr", "--output ctr --overwrite") if "train" in command else command
            commands.append(re.sub(r"\s+# .*", "", command))
    commands = list(dict.fromkeys(commands))
    assert len(commands) >= 19
    shell = [sys.executable, "-c", SHELL]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(shell, input=json.dumps(commands), env=env, stdout=subprocess.PIPE, text=True, check=True)
    ran = [json.loads(line) for line in done.stdout.splitlines()]
    assert [command for command, *_ in ran] == commands
    for command, status, out, err in ran:
        assert status == 0, f"{command}\n{out}\n{err}"
        assert "Traceback" not in err, err


@pytest.mark.slow
def test_help_does_not_wait_for_heavy_imports():
    heavy = ("matplotlib", "numpy", "sklearn", "torch", "tqdm", "zmq", "importlib.metadata")
    code = f"import sys, shoal.cli; shoal.cli.parser(); print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_command_is_added_alone_as_it_is_among_all(monkeypatch):
    def helps(parser: argparse.ArgumentParser) -> dict[str, str]:
        (commands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        return {name: command.format_help() for name, command in commands.choices.items()}

    everything = helps(shoal.cli.parser())
    for name in everything.keys() - {"completion"}:
        alone = helps(shoal.cli.parser(name))
        assert alone == {other: everything[other] for other in alone}
        assert name in alone


def test_a_command_imports_no_other():
    code = "import sys, shoal.cli; shoal.cli.parser('server'); print([m for m in sys.modules if 'shoal.cli.' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "shoal.cli.cluster" in done.stdout
    assert not any(f"shoal.cli.{other}'" in done.stdout for other in ("train", "doctor", "predict"))


def test_the_version_names_the_build_and_the_processor():
    done = subprocess.run([*SHOAL, "--version"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == f"shoal {shoal.__version__}"
    assert [line.split()[0] for line in lines[1:]] == ["build", "CPU", "runtime"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_all_commands_and_options(shell, capsys):
    assert run("completion", shell) == 0
    script = capsys.readouterr().out
    for word in ("train", "evaluate", "launch", "completion", "checkpoint-every"):
        assert word in script
    if shell == "bash" and shutil.which("bash"):
        asked = f'{script}\nCOMP_WORDS=(shoal train lr --check); COMP_CWORD=3; _shtab_shoal; echo "${{COMPREPLY[@]}}"'
        found = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=120)
        assert found.stdout.split() == ["--checkpoint-every"], found.stderr


# ---- train, predict, evaluate ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_is_trained_evaluated_and_predicts(logs, model, capsys):
    assert run("evaluate", model, "--data", logs / "test.libsvm", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["examples"] == 500
    assert facts["auc"] > 0.7
    assert run("predict", model, "--data", logs / "test.libsvm", "--output", "p.txt") == 0
    assert "500 probabilities in p.txt" in capsys.readouterr().out
    written = [float(line) for line in Path("p.txt").read_text().splitlines()]
    with LogisticRegression.load(model) as loaded:
        np.testing.assert_array_equal(written, loaded.probabilities(shoal.read_libsvm(logs / "test.libsvm")))
    assert set(os.listdir()) == {"p.txt", "small"}


def test_the_summary_names_what_people_want_to_know(logs, capsys):
    assert train(logs, "m", "--epochs", 2, "--valid", logs / "test.libsvm") == 0
    said = capsys.readouterr()
    for word in (
        "progressive",
        "pass 2",
        "valid",
        "logloss",
        "AUC",
        "calibration",
        "examples/s",
        "bytes in all",
        "not zero",
    ):
        assert word in said.out
    assert "2.00k examples, " in said.err


def test_json_is_one_object_and_nothing_else(logs, capsys):
    assert train(logs, "m", "--json", "--valid", logs / "test.libsvm", "--epochs", 2) == 0
    out = capsys.readouterr().out
    facts = json.loads(out)
    assert out.count("\n") == 1
    assert (facts["examples"], facts["interrupted"], facts["model"]) == (4000, False, "m")
    assert facts["passes"][1]["valid"]["examples"] == 500
    assert run("inspect", "m", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["verified"] is True
    assert facts["trained_on"] == "libsvm"
    (table,) = facts["tables"]
    assert (table["optimizer"], table["dim"], table["rows"]) == ("FTRL", 1, 50)


def test_quiet_says_nothing(logs, capsys):
    assert train(logs, "m", "--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_json_of_one_class_has_null_for_what_is_not_a_number(capsys):
    Path("ones.libsvm").write_text("1 1:1\n1 2:1\n")
    assert run("train", "lr", "--data", "ones.libsvm", "--format", "libsvm", "--output", "m", "--json") == 0
    assert json.loads(capsys.readouterr().out)["passes"][0]["metrics"]["auc"] is None


def test_all_settings_reach_the_model(logs):
    settings = ["--alpha", 0.3, "--beta", 2, "--l1", 0.5, "--l2", 0.25, "--seed", 9, "--threads", 1, "--slots", 64]
    assert train(logs, "m", "--quiet", *settings) == 0
    with LogisticRegression.load("m") as model:
        assert model.optimizer == shoal.FTRL(alpha=0.3, beta=2.0, l1=0.5, l2=0.25)
        assert model.table.seed == 9


def test_threads_and_slots_give_the_same_bytes(logs):
    settings = [(1, 1024), (2, 1024), (2, 16)]
    for i, (threads, slots) in enumerate(settings):
        assert train(logs, f"m{i}", "--quiet", "--threads", threads, "--slots", slots) == 0
        arguments = [f"m{i}", "--data", logs / "test.libsvm", "--threads", threads]
        assert run("predict", *arguments, "--output", f"p{i}", "--quiet") == 0
    assert len({Path(f"p{i}").read_bytes() for i in range(len(settings))}) == 1


def test_skipped_lines_are_counted_and_said(logs, model, capsys):
    Path("torn.libsvm").write_text("1 3:1\n1 3:oops\n0 4:1\n")
    assert run("evaluate", model, "--data", "torn.libsvm", "--on-error", "skip") == 0
    assert "1 malformed line skipped" in capsys.readouterr().out
    assert run("predict", model, "--data", "torn.libsvm", "--on-error", "skip", "--output", "-") == 0
    said = capsys.readouterr()
    assert said.out.count("\n") == 2
    assert "1 malformed line skipped, without output" in said.err
    assert run("train", "lr", "--data", "torn.libsvm", "--format", "libsvm", "--output", "m", "--on-error", "skip") == 0
    assert "1 malformed line" in capsys.readouterr().out


def test_predictions_replace_a_file_only_when_they_are_complete(logs, model):
    Path("p.txt").write_text("old")
    Path("torn.libsvm").write_text("1 3:1\n" * 3000 + "1 oops\n")
    assert run("predict", model, "--data", "torn.libsvm", "--output", "p.txt", "--overwrite") == 2
    assert Path("p.txt").read_text() == "old"
    assert {path.name for path in Path().iterdir()} == {"p.txt", "small", "torn.libsvm"}


@pytest.mark.slow
def test_a_reader_that_leaves_early_ends_predict_without_a_word(logs, model):
    long = Path("long.libsvm")
    long.write_text("1 3:1\n" * 200_000)
    command = f"'{sys.executable}' -m shoal predict small --data long.libsvm --output - | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


# ---- what is in the way ----------------------------------------------------------------------------------------------


def test_a_model_is_replaced_only_on_request_and_then_as_one(logs, model, capsys):
    before = {path: path.stat().st_mtime_ns for path in model.rglob("*")}
    assert train(logs, model) == 2
    assert "small holds a model already: pass --overwrite" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in model.rglob("*")} == before
    assert train(logs, model, "--overwrite", "--alpha", 0.7, "--quiet") == 0
    with LogisticRegression.load(model) as loaded:
        assert loaded.optimizer == shoal.FTRL(alpha=0.7)


def test_a_directory_that_is_no_model_is_refused_even_with_overwrite(logs, tmp_path, capsys):
    Path("thesis").mkdir()
    Path("thesis/chapter").write_text("x")
    assert train(logs, "thesis", "--overwrite") == 2
    assert "neither empty nor a model" in capsys.readouterr().err
    assert os.listdir("thesis") == ["chapter"]


GOOD = ["train", "lr", "--data", "good", "--format", "libsvm", "--output", "m"]
TABLE = ["train", "lr", "--data", "good", "--format", "parquet", "--label", "y", "--output", "m"]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["train", "lr", "--data", "no.libsvm", "--format", "libsvm", "--output", "m"], 2, "no.libsvm: No such file"),
        (
            ["train", "lr", "--data", ".", "--format", "libsvm", "--output", "m"],
            2,
            "'.' is a directory: name its files, as in './*'",
        ),
        (["train", "lr", "--data", "torn", "--format", "libsvm", "--output", "m"], 2, "torn, line 2"),
        (["train", "lr", "--data", "empty", "--format", "libsvm", "--output", "m"], 2, "empty has no examples"),
        (["train", "lr", "--data", "good", "--format", "libsvm", "--output", "m", "--alpha", "-1"], 2, "alpha > 0"),
        (["train", "lr", "--data", "good", "--format", "libsvm", "--output", "m", "--threads", "0"], 2, "threads"),
        (["train", "lr", "--data", "good", "--format", "libsvm", "--output", "m", "--slots", "3"], 2, "power of two"),
        (["train", "lr", "--data", "good", "--format", "libsvm", "--output", "m", "--epochs", "0"], 2, "epochs is 0"),
        (
            ["train", "lr", "--data", "good", "--format", "libsvm", "--output", "m", "--batch-size", "0"],
            2,
            "--batch-size is 0",
        ),
        (["train", "lr", "--data", "good", "--format", "libsvm", "--output", "good/m"], 2, "good"),
        ([*GOOD, "--valid", "empty"], 2, "valid: empty has no examples, so nothing can be measured"),
        ([*GOOD, "--patience", "2"], 2, "--patience requires --valid"),
        ([*GOOD, "--negative-rate", "0"], 2, "--negative-rate is 0"),
        ([*GOOD, "--shuffle", "-1"], 2, "shuffle is -1"),
        ([*GOOD, "--save-all"], 2, "--save-all requires --grid"),
        ([*GOOD, "--label", "y"], 2, "--label applies to csv, tsv, parquet, json, not to libsvm"),
        ([*GOOD, "--interactions", "a,b"], 2, "libsvm has no fields"),
        (["train", "lr", "--data", "good", "--format", "csv", "--output", "m"], 2, "csv requires --label"),
        (["train", "lr", "--data", "good", "--format", "tsv", "--output", "m", "--label", "y"], 2, "'y' is not there"),
        ([*GOOD, "--reader-threads", "0"], 2, "--reader-threads is 0"),
        ([*TABLE, "--on-error", "skip"], 2, "--on-error skip applies to lines of text, not to parquet: leave it out"),
        ([*TABLE, "--reader-threads", "2"], 2, "--reader-threads applies to lines of text, not to parquet"),
        (
            [*GOOD, "--data", "kafka://h:9092/t", "--reader-threads", "2"],
            2,
            "--reader-threads applies to files, not to a topic: leave it out",
        ),
        ([*GOOD, "--grid", "alfa=1"], 2, "no setting 'alfa'"),
        ([*GOOD, "--grid", "alpha=1", "--grid", "alpha=2"], 2, "twice"),
        ([*GOOD, "--grid", "alpha=1,1"], 2, "'alpha' twice"),
        (["predict", "no", "--data", "good", "--output", "-"], 2, "no: there is no such model"),
        (["predict", "small", "--data", "no", "--output", "-"], 2, "no: No such file"),
        (["predict", "small", "--data", "good", "--output", "."], 2, "is a directory"),
        (["predict", "small", "--data", "good", "--output", "-", "--json"], 2, "both use standard output"),
        (["predict", "small", "--data", "good", "--format", "criteo", "--output", "-"], 2, "from libsvm"),
        (["evaluate", "here", "--data", "good"], 1, "model.json is missing"),
        (["evaluate", "small", "--data", "empty"], 2, "empty has no examples: nothing was measured"),
        (
            ["evaluate", "small", "--data", "wrong", "--on-error", "skip"],
            2,
            "wrong has no examples: all of its 2 lines are malformed, and were skipped; the first is wrong, line 1",
        ),
        (
            ["train", "lr", "--data", "wrong", "--format", "libsvm", "--output", "m", "--on-error", "skip"],
            2,
            "all of its 2 lines are malformed, and were skipped; the first is wrong, line 1, column 1 (the line",
        ),
        (["inspect", "no"], 2, "there is no such directory"),
        (["inspect", "here"], 1, "model.json is missing"),
    ],
)
def test_errors_are_one_line_with_a_status_and_no_traceback(model, capsys, arguments, status, says):
    Path("torn").write_text("1 3:1\noops\n")
    Path("empty").write_text("")
    Path("wrong").write_text("yes 3:1\nno 4:1\n")
    Path("good").write_text("1 3:1\n0 4:1\n")
    Path("here").mkdir()
    assert run(*arguments, "--quiet") == status
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("shoal: ")
    assert says in said.err


def test_shoal_alone_prints_its_help(capsys):
    assert run() == 2
    reported = capsys.readouterr()
    assert reported.out.startswith("usage: shoal ")
    assert not reported.err


@pytest.mark.parametrize(
    "arguments", [["train"], ["fly"], ["predict"], ["train", "lr", "--format", "cvs"], [*GOOD, "--epochs", "x"]]
)
def test_wrong_arguments_end_with_status_2_and_say_where_the_usage_is(arguments, capsys):
    assert run(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "; see shoal" in line


# ---- columns and several files ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_remembers_the_columns_and_the_interactions_that_it_was_trained_on(logs, capsys):
    files = [logs / "ads_0.csv", logs / "ads_1.csv"]
    asked = ["--format", "csv", "--label", "click", "--numeric", "price", "--quiet"]
    pairs = ["--interactions", "site,user", "--epochs", 5, "--alpha", 0.5, "--reader-threads", 2]
    assert run("train", "lr", "--data", *files, *asked, "--output", "plain") == 0
    assert run("train", "lr", "--data", *files, *asked, *pairs, "--output", "pairs") == 0
    plain, crossed = (evaluated(model, files[1], capsys) for model in ("plain", "pairs"))
    assert plain["examples"] == crossed["examples"] == 800
    assert crossed["auc"] > plain["auc"] + 0.1  # the clicks are a matter of site and user together
    assert run("report", "pairs", "--data", *files, "--quiet") == 0
    model = shoal.models.load("pairs")
    assert model.schema == {
        "label": "click",
        "categorical": ["site", "user"],
        "numeric": ["price"],
        "interactions": [["site", "user"]],
    }
    assert model.evaluate(shoal.read_csv(files[1], **model.schema)).auc == crossed["auc"]
    with pytest.raises(ValueError, match=r"interactions=\[\['site', 'user'\]\], and this reader has None"):
        model.evaluate(shoal.read_csv(files[1], label="click", numeric=["price"]))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_positive_label_that_the_data_does_not_have_is_said_with_those_that_it_has(form, capsys):
    labels = ["yes", "no", "no", "maybe,not"] * 50
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"y": labels, "site": range(200)})
    sorted_table = table.sort_values("y", ascending=True)  # the positives come last
    for name, some in (("log", sorted_table), ("no", table[table.y == "no"]), ("others", table[table.y != "yes"])):
        some.to_csv(name, index=False) if form == "csv" else some.to_parquet(name, index=False)
    command = ["train", "lr", "--format", form, "--label", "y", "--quiet", "--batch-size", 64, "--output"]
    says = "is 'YES', which positive (--positive) names: column 'y' holds 'no' (100), 'maybe,not' (50), 'yes' (50)"
    assert run(*command, "m", "--data", "log", "--positive", "YES") == 2
    assert f"no label of log {says}" in capsys.readouterr().err
    assert not Path("m/model.json").exists()
    assert run(*command, "m", "--data", "no", "--positive", "yes", "--overwrite") == 2
    assert "column 'y' holds 'no' (100)" in capsys.readouterr().err
    assert run(*command, "m", "--data", "log", "--valid", "others", "--positive", "yes", "--overwrite") == 2
    assert "no label of others is 'yes'" in capsys.readouterr().err
    assert run(*command, "m", "--data", "log", "--valid", "no", "--positive", "yes", "--overwrite") == 0
    with LogisticRegression.load("m") as model:
        assert model.history.passes[0].metrics.base_rate == 0.25
    if form == "csv":
        stream = shoal.read_csv(io.BytesIO(Path("log").read_bytes()), label="y", positive="YES")
        with LogisticRegression() as model, pytest.raises(ValueError, match=r"no label of .* is 'YES'"):
            model.fit(stream, progress=False)
    assert run("evaluate", "m", "--data", "no") == 0  # of one class alone
    assert run("evaluate", "m", "--data", "others") == 2
    assert "no label of others is 'yes'" in capsys.readouterr().err


@pytest.mark.slow
def test_tab_separated_text_is_the_same_but_for_its_separator(logs, capsys):
    for name in ("ads_0", "ads_1"):
        Path(f"{name}.tsv").write_text((logs / f"{name}.csv").read_text().replace(",", "\t"))
    for form, folder in (("csv", logs), ("tsv", Path())):
        files = [folder / f"ads_0.{form}", folder / f"ads_1.{form}"]
        asked = ["--format", form, "--label", "click", "--quiet", "--output", form]
        assert run("train", "lr", "--data", *files, *asked) == 0
    assert evaluated("csv", logs / "ads_1.csv", capsys)["logloss"] == evaluated("tsv", "ads_1.tsv", capsys)["logloss"]


@pytest.mark.slow
def test_a_model_of_a_table_is_used_on_parquet_too(logs, capsys):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(logs / "ads_1.csv")
    frame.to_parquet("ads_1.parquet")
    asked = ["--label", "click", "--numeric", "price", "--quiet", "--batch-size", "64"]
    assert run("train", "lr", "--data", logs / "ads_1.csv", "--format", "csv", *asked, "--output", "text") == 0
    assert run("train", "lr", "--data", "ads_1.parquet", "--format", "parquet", *asked, "--output", "table") == 0
    models = [shoal.models.load(name) for name in ("text", "table")]
    assert len({model.weights()[1].tobytes() for model in models}) == 1
    wanted = evaluated("text", logs / "ads_1.csv", capsys)["logloss"]
    assert run("evaluate", "text", "--data", "ads_1.parquet", "--format", "parquet", "--json") == 0
    assert json.loads(capsys.readouterr().out)["logloss"] == wanted
    model = shoal.LogisticRegression().fit(shoal.read_arrow(frame, label="click", numeric=["price"]), progress=False)
    assert model.evaluate(shoal.read_csv(logs / "ads_1.csv", label="click", numeric=["price"])).examples == 800
    model.save("frame")
    # Without --format the files decide which of the formats with columns they have.
    Path("ads_1.tsv").write_text((logs / "ads_1.csv").read_text().replace(",", "\t"))
    for name, data in itertools.product(("text", "table", "frame"), (logs / "ads_1.csv", "ads_1.parquet")):
        assert evaluated(name, data, capsys)["examples"] == 800
        assert evaluated("text", data, capsys)["logloss"] == wanted
    assert evaluated("table", "ads_1.tsv", capsys)["logloss"] == wanted
    with (logs / "ads_1.csv").open() as file:
        command = [sys.executable, "-m", "shoal", "evaluate", "frame", "--data", "-"]
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pass --format csv, tsv or parquet" in done.stderr


@pytest.mark.slow
def test_several_files_patterns_and_standard_input_are_read_as_one(logs):
    (logs / "train.libsvm").read_text()
    half = (logs / "train.libsvm").read_text().splitlines(keepends=True)
    Path("part_0").write_text("".join(half[:1000]))
    Path("part_1").write_text("".join(half[1000:]))
    asked = ["--format", "libsvm", "--quiet", "--batch-size", "64"]
    assert train(logs, "whole", *asked[2:]) == 0
    assert run("train", "lr", "--data", "part_0", "part_1", *asked, "--output", "list") == 0
    assert run("train", "lr", "--data", "part_*", *asked, "--output", "pattern") == 0
    command = [*SHOAL, "train", "lr", "--data", "-", *asked, "--output", "stream"]
    subprocess.run(command, input=(logs / "train.libsvm").read_bytes(), check=True)
    models = [shoal.models.load(name) for name in ("whole", "list", "pattern", "stream")]
    assert len({model.weights()[1].tobytes() for model in models}) == 1


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.combined
@pytest.mark.parametrize("how", ["flipped", "cut short", "missing"])
@pytest.mark.parametrize("which", ["model.json", "checkpoint-*/manifest.json", "checkpoint-*/*.slots"])
def test_a_damaged_file_is_named_by_every_command(logs, model, capsys, which, how):
    (path,) = model.glob(which)
    whole = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(whole[:-8] if how == "cut short" else whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    for command in (
        ["inspect", model],
        ["evaluate", model, "--data", logs / "test.libsvm"],
        ["predict", model, "--data", logs / "test.libsvm", "--output", "p"],
    ):
        assert run(*command) == 1
        said = capsys.readouterr()
        assert path.name in said.err
        assert said.err.count("\n") == 1
        assert not Path("p").exists()


def test_a_checkpoint_of_a_store_is_inspected_too(capsys):
    with shoal.local(threads=1, slots=16) as store:
        store.table("user", dim=4, optimizer=shoal.Adagrad(lr=0.5)).push(
            np.arange(9, dtype=np.uint64), np.ones((9, 4), "f4")
        )
        store.table("none", dim=2)
        store.save("ckpt")
    assert run("inspect", "ckpt") == 0
    out = capsys.readouterr().out
    assert "checkpoint of 2 tables in 16 slots" in out
    assert "table 'user': 9 rows, dim 4" in out
    assert "Adagrad(" in out
    assert "every checksum matches" in out


def test_inspect_tells_the_latest_fit_and_the_latest_passes(logs, capsys):
    assert train(logs, "m", "--epochs", "12", "--shuffle", "3", "--valid", logs / "test.libsvm") == 0
    capsys.readouterr()
    assert run("inspect", "m") == 0
    out = capsys.readouterr().out
    assert f"data        {logs / 'train.libsvm'}, held out {logs / 'test.libsvm'}" in out
    assert "epochs 12, shuffle among 3 batches" in out
    assert "12, the latest:" in out
    assert [int(n) for n in re.findall(r"^    pass (\d+) ", out, re.MULTILINE)] == list(range(3, 13))
    assert run("inspect", "m", "--json") == 0
    reported = json.loads(capsys.readouterr().out)
    assert len(reported["passes"]) == 12
    assert [fit["plan"]["shuffle"] for fit in reported["fits"]] == [3]


@pytest.mark.slow
def test_names_are_kept_with_the_model_and_shown(logs, capsys):
    assert train(logs, "m", "--names") == 0
    names = shoal.models.load_names("m")
    assert f"names        {len(names):,} features" in capsys.readouterr().out
    with LogisticRegression.load("m") as model:
        keys, weights = model.top(5)
    assert [names.get(key) for key in keys.tolist()] == [str(key) for key in keys.tolist()]
    assert run("inspect", "m", "--top", 5) == 0
    reported = capsys.readouterr().out.splitlines()
    at = reported.index(f"    names       {len(names):,} features")
    assert [line.split() for line in reported[at + 1 : at + 6]] == [
        [f"{w:+.4f}", str(key)] for key, w in zip(keys.tolist(), weights, strict=True)
    ]
    assert run("inspect", "m", "--top", 1, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["names"] == len(names)
    assert facts["top"] == [{"key": int(keys[0]), "name": str(keys[0]), "weight": pytest.approx(float(weights[0]))}]
    day = logs / "day_1.tsv"
    grid = ["--grid", "l1=0,1", "--save-all", "--names", "--json"]
    assert run("train", "lr", "--data", day, "--format", "criteo", "--output", "g", *grid) == 0
    assert json.loads(capsys.readouterr().out)["names"] == len(shoal.models.load_names("g/l1=0"))
    assert shoal.models.load_names("g/l1=1") == shoal.models.load_names("g/l1=0")
    assert run("inspect", "g/l1=1", "--top", 3) == 0
    assert len(re.findall(r"^    [+-]\d\.\d{4} +[IC]\d+=", capsys.readouterr().out, re.MULTILINE)) == 3
    assert run("inspect", "m", "--top", -1) == 2
    assert "--top is -1: pass 0 or more" in capsys.readouterr().err


# ---- weights, samples, order, stopping, grids ------------------------------------------------------------------------


def test_a_grid_tells_all_settings_the_best_first_and_saves_the_best(logs, capsys):
    grid = ["--grid", "alpha=0.001,0.5", "--grid", "l1=0,2", "--valid", logs / "test.libsvm"]
    assert train(logs, "m", *grid) == 0
    said = capsys.readouterr()
    rows = [line.split() for line in said.out.splitlines()[:5]]
    assert rows[0] == ["alpha", "l1", "logloss", "AUC", "valid", "logloss", "valid", "AUC", "weights"]
    assert sorted(row[:2] for row in rows[1:]) == [["0.001", "0"], ["0.001", "2"], ["0.5", "0"], ["0.5", "2"]]
    assert [float(row[4]) for row in rows[1:]] == sorted(float(row[4]) for row in rows[1:])
    assert "4 models, best logloss" in said.err
    with LogisticRegression.load("m") as model:
        assert (f"{model.optimizer.alpha:g}", f"{model.optimizer.l1:g}") == tuple(rows[1][:2])
        assert round(model.history.passes[0].valid.logloss, 6) == float(rows[1][4])
        best = model.decision_function(shoal.read_libsvm(logs / "test.libsvm"))
    assert train(logs, "alone", "--quiet", "--alpha", rows[1][0], "--l1", rows[1][1]) == 0
    with LogisticRegression.load("alone") as model:
        np.testing.assert_array_equal(model.decision_function(shoal.read_libsvm(logs / "test.libsvm")), best)


def test_all_models_of_a_grid_are_saved_on_request(logs, capsys):
    assert train(logs, "all", "--grid", "alpha=0.05,0.5", "--save-all", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert sorted(os.listdir("all")) == ["alpha=0.05", "alpha=0.5"]
    assert [one["settings"] for one in facts["grid"]] in (
        [{"alpha": 0.05}, {"alpha": 0.5}],
        [{"alpha": 0.5}, {"alpha": 0.05}],
    )
    for one in facts["grid"]:
        with LogisticRegression.load(one["model"]) as model:
            assert model.optimizer.alpha == one["settings"]["alpha"]
            assert model.history.passes[0].metrics.logloss == one["progressive"]["logloss"]
    assert train(logs, "all", "--grid", "alpha=0.05,0.7", "--save-all") == 2
    assert "holds a model already" in capsys.readouterr().err
    assert sorted(os.listdir("all")) == ["alpha=0.05", "alpha=0.5"]


@pytest.mark.slow
def test_early_stopping_says_which_pass_was_kept(logs, capsys):
    settings = ["--epochs", 40, "--patience", 2, "--min-delta", 0.001, "--valid", logs / "test.libsvm"]
    assert train(logs, "m", *settings) == 0
    kept = re.search(r"kept +the weights of pass (\d+) of (\d+)", capsys.readouterr().out)
    assert kept
    assert int(kept[2]) < 40
    with LogisticRegression.load("m") as model:
        assert model.history.best_pass == int(kept[1]) == int(kept[2]) - 2
        assert model.evaluate(shoal.read_libsvm(logs / "test.libsvm")) == model.history.passes[int(kept[1]) - 1].valid


@pytest.mark.slow
def test_order_and_sample_reach_the_training(logs):
    settings = {"a": [], "b": ["--shuffle"], "c": ["--shuffle", 2], "d": ["--negative-rate", 0.5]}
    weights = set()
    for name, some in settings.items():
        assert train(logs, name, "--quiet", "--batch-size", 64, *some) == 0
        with LogisticRegression.load(name) as model:
            weights.add(model.weights()[1].tobytes())
            assert (model.examples < 2000) == (name == "d")
    assert len(weights) == 4


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_ctrl_c_sigterm_and_sighup_leave_a_model_that_loads_and_a_status_of_their_own(logs, number, status):
    endless = ["--batch-size", "64", "--epochs", "1000000", "--json"]
    data = ["--data", str(logs / "train.libsvm"), "--format", "libsvm", "--output", "m"]
    process = subprocess.Popen(
        [*SHOAL, "train", "lr", *data, *endless],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        shown = ""
        while shown.count("2.00k examples") < 5:
            some = process.stderr.read(64)
            assert some, shown
            shown += some  # by the bar: whole passes
        process.send_signal(number)
        if number == signal.SIGTERM:  # as `timeout` does: once to the process, once to its group
            time.sleep(0.01)
            process.send_signal(number)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, err
    assert "Traceback" not in err
    facts = json.loads(out)
    assert facts["interrupted"] is True
    assert re.search(r"interrupted after [\d,]+ examples; the model as trained so far is in m; with --resume", err)
    with LogisticRegression.load("m") as model:
        assert model.examples == facts["examples"] > 0
        assert not model.history.passes[-1].complete or len(model.history.passes) > 1
        assert model.evaluate(shoal.read_libsvm(logs / "test.libsvm")).auc > 0.7


@pytest.mark.parametrize("name", ["calibrate", "save"])
def test_ctrl_c_after_the_last_batch_does_not_lose_what_was_learned(logs, monkeypatch, capsys, name):
    called = getattr(LogisticRegression, name)

    def pressed(*arguments, **settings):
        signal.raise_signal(signal.SIGINT)
        return called(*arguments, **settings)

    monkeypatch.setattr(LogisticRegression, name, pressed)
    assert train(logs, "m", "--valid", str(logs / "test.libsvm"), "--calibrate", "platt") == 130
    with LogisticRegression.load("m") as model:
        assert model.history.passes[-1].complete
        assert (model.calibration is None) is (name == "calibrate")


def test_ctrl_c_before_anything_was_learned_saves_nothing(logs, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(LogisticRegression, "fit", interrupted)
    assert train(logs, "m") == 130
    assert capsys.readouterr().err == "shoal: interrupted\n"
    assert not Path("m").exists()


# ---- real data -------------------------------------------------------------------------------------------------------


@pytest.fixture
def libsvm(shoal_data):
    folder = shoal_data / "libsvm"
    if not folder.is_dir():
        pytest.skip("SHOAL_DATA has no folder libsvm")
    return folder


def evaluated(model, data, capsys):
    capsys.readouterr()
    assert run("evaluate", model, "--data", data, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_a9a_reaches_the_reference(libsvm, capsys):
    # The settings were chosen on the training file alone: its last fifth, after learning from the first four.
    settings = ["--alpha", 0.1, "--batch-size", 32, "--epochs", 2]
    arguments = ["--data", libsvm / "a9a.xz", "--format", "libsvm", "--output", "a9a", "--quiet"]
    assert run("train", "lr", *arguments, *settings) == 0
    facts = evaluated("a9a", libsvm / "a9a.t.xz", capsys)
    assert facts["examples"] == 16_281
    assert facts["auc"] >= 0.9015
    assert facts["logloss"] <= 0.3255
    assert abs(facts["calibration"] - 1) < 0.02


@pytest.mark.slow
def test_agaricus_is_learned_in_full(libsvm, capsys):
    arguments = ["--data", libsvm / "agaricus.txt.train.xz", "--format", "libsvm", "--output", "mushrooms", "--quiet"]
    assert run("train", "lr", *arguments, "--alpha", 1, "--batch-size", 32, "--epochs", 10) == 0
    assert evaluated("mushrooms", libsvm / "agaricus.txt.test.xz", capsys)["auc"] == 1.0


def test_a_compressed_file_is_read_as_it_is(libsvm, capsys):
    plain = Path("agaricus.test")
    plain.write_bytes(lzma.decompress((libsvm / "agaricus.txt.test.xz").read_bytes()))
    arguments = ["--data", libsvm / "agaricus.txt.train.xz", "--format", "libsvm", "--output", "m", "--quiet"]
    assert run("train", "lr", *arguments) == 0
    assert evaluated("m", plain, capsys)["auc"] == evaluated("m", libsvm / "agaricus.txt.test.xz", capsys)["auc"]


def test_lines_of_threads_do_not_meet_where_output_is_not_buffered() -> None:
    program = """
import threading
from shoal.cli.answers import log_line

def work(rank):
    for _ in range(1000):
        log_line(f"[{rank}] loss {rank}.5")

threads = [threading.Thread(target=work, args=[rank]) for rank in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    done = subprocess.run(
        [sys.executable, "-u", "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4000
    assert set(lines) == {f"[{rank}] loss {rank}.5" for rank in range(4)}


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        ("train", {}, ["16", "10000"]),
        ("train", {"OMP_WAIT_POLICY": "active"}, ["16", None]),
        ("serve", {"GOMP_SPINCOUNT": "7", "OPENBLAS_THREAD_TIMEOUT": "9"}, ["9", "7"]),
        ("launch", {}, [None, None]),
    ],
)
def test_idle_threads_sleep_soon_in_every_process_but_those_of_users(command, given, expected) -> None:
    program = f"""
import json, os, sys
from shoal import cli

assert "numpy" not in sys.modules and "torch" not in sys.modules  # they would have read their variables
sys.argv[1:] = [{command!r}]
cli.main = lambda: print(json.dumps([os.environ.get(name) for name in ("OPENBLAS_THREAD_TIMEOUT", "GOMP_SPINCOUNT")]))
cli.run()
"""
    names = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OPENBLAS_THREAD_TIMEOUT"}
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == expected
