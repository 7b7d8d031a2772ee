"""The scripts of examples/ as a user starts them, each in a process and a folder of its own."""

import glob
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import c_library
import shoal
from paths import ROOT
from shoal.serve.served import make_model
from shoal.tools.planted import PlantedModel, write_log

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(script, *arguments):
    """Start a script, all warnings errors; returns its standard output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def figures(table):
    """Read a table of the hourly loop: a row of strings for each hour."""
    return [line.split() for line in table.splitlines()[1:]]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_it_is_started(script, monkeypatch, capsys):
    """In this process, which imports torch once for all of them."""
    assert len(script.read_text().splitlines()) <= 90 or script.name == "demo.py"  # which is not there to copy
    if "\nimport torch\n" in script.read_text():
        pytest.importorskip("torch", reason="torch is an extra")
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert f"python examples/{script.name}" in shown
    assert f"examples/{script.name})" in (ROOT / "docs" / "quick-start.md").read_text()


def test_search_optuna_prunes_trials_and_finds_a_better_setting():
    out = run("search_optuna.py", "--trials", 8, "--epochs", 3)
    loss, alpha = re.search(r"^best +(0\.\d+) with .'alpha': ([\d.]+)", out, re.MULTILINE).groups()
    assert float(loss) < 0.57
    assert 0.005 <= float(alpha) <= 2
    trials, pruned = map(int, re.search(r"^trials +(\d+), (\d+) pruned$", out, re.MULTILINE).groups())
    assert trials == 8
    assert 1 <= pruned < 8


def test_ctr_deepfm_trains_stops_early_and_keeps_the_best(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="torch is an extra")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = run("ctr_deepfm.py", "--epochs", 2)
    assert re.search(r"^best +pass \d of \d, [\d,]+ rows$", out, re.MULTILINE)
    assert float(re.search(r"AUC (0\.\d+)", out)[1]) > 0.6
    assert len(re.search(r"^predicted +(.+)$", out, re.MULTILINE)[1].split()) == 5
    assert (tmp_path / "clicks" / "model.json").is_file()


@pytest.mark.long
def test_lda_recovers_the_topics_and_is_as_good_as_scikit_learn():
    out = run("lda.py", "--sweeps", 25)
    found = re.findall(r"^(\S+) +perplexity ([\d.]+), (\d+) of 10 topics recovered$", out, re.MULTILINE)
    (_, truth, _), (_, ours, topics), (_, peer, _) = found
    assert [name for name, *_ in found] == ["truth", "shoal", "scikit-learn"]
    assert topics == "10"
    assert float(ours) < float(truth) * 1.01
    assert float(ours) < float(peer) * 1.005


@pytest.mark.long
def test_killed_comes_to_the_same_bits():
    out = run("killed.py", "--kills", 2, "--examples", 5000)
    assert re.match(r"kill 1: .+, seed \d+\n", out)
    assert out.endswith("the same bits\n")


def test_replicas_loses_no_push():
    out = run("replicas.py", "--servers", 3, "--kills", 2, "--keys", 1000)
    assert len(re.findall(r"^clock \d+: server \d+ killed, seed \d+$", out, re.MULTILINE)) == 2
    assert re.search(r"gradients in \d+ clocks: all rows are exact; slowest clock \d+\.\d+ s$", out.strip())


@pytest.mark.slow  # a minute of compiling
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_cpp_worker_pushes_and_pulls_without_python(tmp_path):
    """By the command on the top of the file, without optimization; where the engine is compiled, that is linked."""
    command = re.search(r"^//   (g\+\+ .+)$", (ROOT / "examples" / "cpp_worker.cc").read_text(), re.MULTILINE)[1]
    command = command.replace("-O2", "-O0").replace("-o cpp_worker", f"-o {tmp_path}/cpp_worker")
    assert all(glob.glob(sources, root_dir=ROOT) for sources in re.findall(r"csrc/\w+/\*\.cc", command))
    if compiled := sorted(ROOT.glob("build/cp*/libshoal_core.a"), key=lambda path: path.stat().st_mtime):
        first, *_ = re.findall(r"csrc/\w+/\*\.cc", command)
        command = re.sub(r"csrc/\w+/\*\.cc ?", "", command.replace(first, shlex.quote(str(compiled[-1])), 1))
    subprocess.run(["sh", "-c", command], cwd=ROOT, check=True, timeout=900)
    out = run("cpp_worker.py", tmp_path / "cpp_worker")
    assert out == "".join(f"clock {clock}: 1000 rows are -{clock}\n" for clock in range(1, 6))


@pytest.mark.skipif(not c_library.PATH.exists(), reason=f"{c_library.PATH} was not built")
@pytest.mark.parametrize(("name", "compiler"), [("predict.c", "cc"), ("predict.cc", "c++"), ("predict.rs", "rustc")])
def test_predictions_in_other_languages_are_those_of_python(tmp_path, name, compiler):
    """Each is built by the command on its top."""
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    source = (ROOT / "examples" / name).read_text()
    command = re.search(rf"{re.escape(compiler)} .*examples/{re.escape(name)} .+$", source, re.MULTILINE)
    config = f"{shlex.quote(sys.executable)} -m shoal.cli.build_flags"
    built = command[0].replace("shoal-config", config).replace("-o predict", f"-o {tmp_path}/predict")
    subprocess.run(["sh", "-c", built], cwd=ROOT, check=True, timeout=300)
    export = ROOT / "tests" / "golden" / "predictions" / "lr"
    asked = ['{"instances": [{"keys": [17, 4]}]}'] if name == "predict.cc" else ["17", "4"]
    out = subprocess.run(
        [tmp_path / "predict", export, *asked], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    with shoal.export.open(export) as opened:
        model = make_model(opened.now, 1).predictor
        batch = shoal.Batch(np.zeros(1, np.float32), np.array([0, 2]), np.array([17, 4], np.uint64), None)
        assert float(out) == pytest.approx(model.probabilities(batch)[0], rel=1e-8)
    if name == "predict.c":  # with the header, as a file has it
        rows = "site,user,price,seen,dwell\n17,0.50,2,,1|2.5\n,a.com,0.5,,\n"
        columns = ROOT / "tests" / "golden" / "predictions" / "columns"
        with shoal.export.open(columns) as opened:
            model = make_model(opened.now, 1).predictor
            (tmp_path / "rows.csv").write_text(rows)
            read = shoal.read_csv(tmp_path / "rows.csv", **{**model.schema, "label": None})
            expected = model.probabilities(read)
        lines = subprocess.run(
            [tmp_path / "predict", columns], input=rows, check=True, capture_output=True, text=True, timeout=60
        ).stdout
        assert [float(line) for line in lines.split()] == pytest.approx(expected, rel=1e-8)
    refused = subprocess.run([tmp_path / "predict", tmp_path, *asked], capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    assert "is not an export" in refused.stderr


def test_from_criteo_trains_measures_saves_loads_and_predicts(tmp_path):
    planted = PlantedModel(seed=1)
    write_log(tmp_path / "day_0.tsv", planted, 20_000, 0)
    write_log(tmp_path / "day_1.tsv", planted, 5_000, 1 << 40)
    out = run("from_criteo.py", "--data", "day_0.tsv", "--valid", "day_1.tsv", "--output", "ctr", "--show", 3)
    with shoal.LogisticRegression.load("ctr") as model:
        assert model.examples == 20_000
        measured = model.evaluate(shoal.read_criteo("day_1.tsv"))
    assert measured.auc > 0.7
    assert f"validation      {measured}" in out
    assert len(re.findall(r"% likely, (?:not )?clicked$", out, re.MULTILINE)) == 3


def test_from_pandas_learns_what_was_planted_and_says_it_by_name():
    out = run("from_pandas.py", "--output", "ads")
    names = shoal.models.load_names("ads")
    with shoal.LogisticRegression.load("ads") as model:
        assert model.schema["interactions"] == [["site", "device"]]
        texts, weights = model.top(5, names=names)
    assert [line.strip() for line in out.splitlines()[1:6]] == [
        f"{w:+7.3f} {text}".strip() for w, text in zip(weights, texts, strict=True)
    ]
    assert all(re.fullmatch(r"site=site-\d+\.com( \* device=[a-z]+)?", text) for text in texts)
    measured = re.search(r"validation +logloss ([\d.]+)  AUC ([\d.]+)", out)
    assert float(measured[2]) > 0.74
    assert len(out.splitlines()) == 13
    assert out.splitlines()[7].split() == ["site", "device", "price", "probability"]


def test_from_pandas_takes_a_frame_of_the_users(tmp_path):
    lines = [f"{i % 3 % 2},{'ab'[i % 3 % 2]}{i % 2},{i % 7}" for i in range(3000)]
    (tmp_path / "t.csv").write_text("late,carrier,distance\n" + "\n".join(lines) + "\n")
    out = run("from_pandas.py", "--data", "t.csv", "--label", "late", "--numeric", "distance", "--pairs", "")
    assert "AUC 1.000000" in out.splitlines()[-7]
    assert out.splitlines()[-6].split() == ["carrier", "distance", "probability"]


def test_a_topic_is_learned_from_once_over_a_stop():
    pytest.importorskip("confluent_kafka", reason="the client of Kafka is an extra")
    pytest.importorskip("pyarrow", reason="JSON needs it")
    assert run("stream_kafka.py").splitlines() == ["stopped after 10,000 examples", "stopped after 20,000 examples"]


def test_the_hourly_loop_gets_better_while_the_world_moves():
    hours = figures(run("hourly.py"))
    assert [row[0] for row in hours] == [f"hour-{hour:02}" for hour in range(8)]
    entropies = [float(row[4]) for row in hours]
    assert max(entropies[4:]) < min(entropies[:2])
    assert list(Path.cwd().iterdir()) == []


def test_the_hourly_loop_in_two_runs_learns_what_it_learns_in_one(tmp_path):
    planted = PlantedModel(seed=2)
    names = [f"hour-{hour}.tsv" for hour in range(3)]
    for hour, name in enumerate(names):
        write_log(tmp_path / name, planted, 2000, hour << 20)
    whole = run("hourly.py", "--format", "criteo", "--output", "whole", *names)
    first = run("hourly.py", "--format", "criteo", "--output", "parts", *names[:2])
    second = run("hourly.py", "--format", "criteo", "--output", "parts", names[2])
    assert figures(first) + figures(second) == figures(whole)
    with shoal.LogisticRegression.load("whole") as one, shoal.LogisticRegression.load("parts") as other:
        assert one.examples == other.examples == 6000
        for these, those in zip(one.weights(), other.weights(), strict=True):
            assert these.tolist() == those.tolist()


def digits():
    return runpy.run_path(str(ROOT / "examples" / "digits_cnn.py"))


def plain_sgd(example, epochs):
    """The example's losses by plain SGD on whole mini-batches: of all examples, in each epoch."""
    images, labels = example["load_digits"](return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    weights = {name: example["start"](name) for name in example["SHAPES"]}
    losses = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(images))
        total = 0.0
        for begin in range(0, len(order), example["BATCH"]):
            batch = order[begin : begin + example["BATCH"]]
            loss, gradients = example["backward"](weights, images[batch], labels[batch])
            for name, weight in weights.items():
                weight -= np.float32(example["LR"]) * (gradients[name] / np.float32(len(batch)))
            total += loss
        losses.append(total / len(order))
    return losses


def test_the_small_cnn_has_the_losses_of_plain_sgd_to_the_bit():
    example = digits()
    with shoal.local() as store:
        losses = example["train"](store, 3)
    assert losses == plain_sgd(example, 3)
    assert losses[2] < 0.7 < losses[0]


def test_the_gradients_of_the_small_cnn_are_those_of_its_losses():
    example = digits()
    random = np.random.default_rng(3)
    weights = {name: random.normal(size=shape) for name, shape in example["SHAPES"].items()}
    images, labels = random.normal(size=(5, 8, 8)), np.array([0, 1, 2, 3, 9])
    gradients = example["backward"](weights, images, labels)[1]
    for name, weight in weights.items():
        direction = random.normal(size=weight.shape)
        losses = [
            example["backward"](weights | {name: weight + h * direction}, images, labels)[0] for h in (1e-6, -1e-6)
        ]
        assert np.sum(gradients[name] * direction) == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5)


def launched(script, *arguments, servers, workers):
    """Run a script as the workers of a cluster of its own: its lines, without the ranks before them, in order."""
    command = ["launch", "--servers", servers, "--workers", workers, ROOT / "examples" / script, *arguments]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "shoal", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines())


def test_logistic_regression_on_a_cluster_has_the_bits_of_a_local_store():
    planted = PlantedModel(seed=1)
    write_log(Path("train.tsv"), planted, 20_000, 0)
    out = run("cluster_lr.py", "--output", "ctr")
    with shoal.LogisticRegression(shoal.FTRL(alpha=0.1, beta=1.0, l1=0.5)) as local:
        train = shoal.read_criteo("train.tsv", batch_size=512)
        local.fit(train, progress=False)
        assert f"worker 0 of 1: {local.history.passes[-1].metrics}" in out
        with shoal.LogisticRegression.load("ctr") as found:
            assert found.probabilities(train).tobytes() == local.probabilities(train).tobytes()
            assert len(found.table) == len(local.table)


def test_the_small_cnn_of_two_workers_has_the_losses_of_plain_sgd():
    lines = launched("digits_cnn.py", "--epochs", 2, servers=1, workers=2)
    losses = np.array([float(line.rsplit(maxsplit=1)[1]) for line in lines]).reshape(2, 2)  # workers, epochs
    expected = plain_sgd(digits(), 2)
    sizes = np.array([64 * 14 + 3, 64 * 14 + 2])  # 28 batches of 64, the last of 5
    assert sizes.sum() == 1797
    np.testing.assert_allclose(sizes @ losses / sizes.sum(), expected, rtol=2e-5)


@pytest.mark.long
def test_a_click_model_with_its_tower_on_the_servers_is_learned_by_two_workers():
    pytest.importorskip("torch", reason="torch is an extra")
    lines = launched("torch_dense.py", "--optimizer", "adagrad", servers=1, workers=2)
    found = [re.fullmatch(r"worker (\d) of 2: .*AUC ([\d.]+) .*\(([\d,]+) examples.*", line) for line in lines]
    assert [one[1] for one in found] == ["0", "1"]
    assert sum(int(one[3].replace(",", "")) for one in found) == 20_000
    assert min(float(one[2]) for one in found) > 0.6
