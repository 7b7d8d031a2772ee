"""The demonstration: its log is what it claims to be, and the trainer comes near the truth that it hides."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paths import ROOT
from shoal import cli
from shoal.data import hash_strings, read_criteo, read_libsvm
from shoal.metrics import measure, probabilities
from shoal.tools.planted import PlantedModel, buckets, criteo_text

SPEC = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
demo = sys.modules["demo"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(demo)

draws = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="the picture needs matplotlib: pip install shoal[plot]"
)


@pytest.fixture(scope="module")
def drawn():
    return PlantedModel(seed=3).draw(3000, 0)


def test_the_text_is_what_was_drawn(drawn):
    lines = criteo_text(drawn).decode().split("\n")
    assert lines.pop() == ""
    assert len(lines) == 3000
    for i in (0, 1, 17, 2999):
        label, *columns = lines[i].split("\t")
        assert label == str(drawn.labels[i])
        assert columns[:13] == ["" if v < 0 else str(v) for v in drawn.integers[i]]
        tokens = [f"{token:08x}" for token in drawn.tokens[i]]
        assert columns[13:] == ["" if gone else t for t, gone in zip(tokens, drawn.missing[i], strict=True)]


def test_the_reader_sees_every_field_of_the_text(drawn, tmp_path):
    path = tmp_path / "log.tsv"
    path.write_bytes(criteo_text(drawn))
    (batch,) = read_criteo(path, batch_size=4000)
    np.testing.assert_array_equal(batch.labels, drawn.labels)
    present = (drawn.integers >= 0).sum(1) + (~drawn.missing).sum(1)
    np.testing.assert_array_equal(np.diff(batch.indptr), present)


def test_the_buckets_of_the_truth_are_those_of_the_reader(tmp_path):
    v = np.unique(np.concatenate([np.arange(2000), (1.1 ** np.arange(190)).astype(np.int64)]))
    path = tmp_path / "log.tsv"
    path.write_text("".join(f"1\t{x}" + "\t" * 38 + "\n" for x in v))
    (batch,) = read_criteo(path, batch_size=len(v))
    mine = [f"SP{x}" if x <= 2 else str(int(b) - 3) for x, b in zip(v, buckets(v), strict=True)]
    np.testing.assert_array_equal(batch.keys, hash_strings(mine, field=1))


@pytest.mark.slow
def test_the_log_looks_like_a_click_log():
    drawn = PlantedModel(seed=0).draw(30_000, 5)
    assert drawn.labels.mean() == pytest.approx(0.256, abs=0.015)
    assert drawn.missing.mean() == pytest.approx(0.0875, abs=0.02)
    counts = np.sort(np.unique(drawn.tokens[:, 2], return_counts=True)[1])[::-1]
    assert counts[0] > 2000
    assert np.sum(counts == 1) > 1000  # Zipf: a few categories everywhere, most of them once


def test_the_labels_are_drawn_from_the_planted_probabilities():
    drawn = PlantedModel(seed=2).draw(30_000, 0)
    m = measure(drawn.labels, drawn.margins)
    assert m.calibration == pytest.approx(1, abs=0.03)
    assert m.logloss == pytest.approx(demo._entropy(drawn.margins), abs=0.01)
    p = probabilities(drawn.margins)
    assert demo._entropy(drawn.margins) == pytest.approx(-np.mean(p * np.log(p) + (1 - p) * np.log(1 - p)), rel=1e-12)


@pytest.mark.slow
def test_the_same_seed_draws_the_same_log_and_another_seed_another():
    texts = [criteo_text(PlantedModel(seed).draw(500, 0)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert criteo_text(PlantedModel(1).draw(500, 1)) != texts[0]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    lines = []
    report = demo.run(out, examples=60_000, progress=False, log_line=lines.append)
    return out, report, "\n".join(lines)


@pytest.mark.slow
def test_the_model_comes_near_the_truth_and_never_beats_it(shown):
    _, report, _ = shown
    assert report.best is not None
    gap = report.held_out.logloss - report.best.logloss
    always = report.held_out.logloss / report.held_out.normalized_entropy
    assert 0 < gap < 0.25 * (always - report.best.logloss)
    assert report.held_out.auc > report.best.auc - 0.03
    assert report.held_out.calibration == pytest.approx(1, abs=0.05)
    assert report.best.logloss == pytest.approx(report.entropy, abs=0.02)


@pytest.mark.slow
def test_the_account_tells_all_that_was_promised(shown):
    out, report, text = shown
    for word in (
        "progressive",
        "reached",
        "best reachable",
        "gap",
        "examples/s",
        "bytes a key",
        "MB at most",
        "try next",
    ):
        assert word in text
    assert f"{report.rows:,} rows" in text
    assert str(out / "model") in text
    assert report.examples_per_second > 1000
    assert report.peak_rss_bytes > 1e7


@draws
def test_there_is_a_picture_and_a_model_that_reproduces_the_numbers(shown, capsys):
    out, report, _ = shown
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    arguments = ["evaluate", report.model, "--data", str(out / "planted_test.tsv"), "--json"]
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["logloss"] == report.held_out.logloss


@pytest.mark.slow
@draws
def test_it_may_replace_what_it_made_in_the_same_place(shown):
    out, report, _ = shown
    lines = []
    again = demo.run(out, examples=2000, seed=1, overwrite=True, progress=False, log_line=lines.append)
    assert again.model == report.model
    assert sorted(os.listdir(out)) == ["learning_curve.png", "model", "planted_test.tsv", "planted_train.tsv"]


@pytest.mark.slow
def test_a_real_file_is_cut_and_the_last_tenth_held_out(tmp_path, drawn):
    log = tmp_path / "mine.tsv"
    log.write_bytes(criteo_text(PlantedModel(4).draw(30_000, 0)))
    lines = []
    report = demo.run(tmp_path / "out", data=str(log), data_format="criteo", progress=False, log_line=lines.append)
    assert report.best is None
    assert report.train.examples + report.held_out.examples == 30_000
    assert 0.09 < report.held_out.examples / 30_000 < 0.13
    assert any("holding out the last 3,3" in line for line in lines)
    all_labels = np.concatenate([batch.labels for batch in read_criteo(log)])
    assert report.held_out.base_rate == pytest.approx(all_labels[-report.held_out.examples :].mean())


@pytest.mark.slow
def test_a_held_out_file_may_be_given(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a.libsvm", "b.libsvm"):
        keys = rng.integers(1, 20, 3000)
        (tmp_path / name).write_text("".join(f"{int(k < 10)} {k}:1\n" for k in keys))
    lines = []
    report = demo.run(
        tmp_path / "out",
        data=str(tmp_path / "a.libsvm"),
        data_format="libsvm",
        valid=str(tmp_path / "b.libsvm"),
        progress=False,
        log_line=lines.append,
    )
    assert report.held_out.examples == 3000
    assert report.held_out.auc == 1.0
    assert sum(map(len, read_libsvm(tmp_path / "a.libsvm"))) == report.train.examples


def run(*arguments, before=""):
    """Run the program as `make demo` does; returns its status, its standard output and the end of its errors."""
    code = f"import runpy, sys; {before}sys.argv[:1] = []; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-W", "error", "-c", code, ROOT / "examples" / "demo.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_without_matplotlib_it_says_how_to_get_a_picture(tmp_path):
    out = tmp_path / "out"
    status, reported, _ = run("--output", out, "--examples", "2000", before="sys.modules['matplotlib.figure'] = None; ")
    assert status == 0
    assert "pip install shoal[plot]" in reported
    assert "best reachable" in reported
    assert sorted(os.listdir(out)) == ["model", "planted_test.tsv", "planted_train.tsv"]


@pytest.mark.slow
def test_it_replaces_nothing_without_being_asked(tmp_path):
    out = tmp_path / "out"
    (out / "model").mkdir(parents=True)
    words = ["--output", out, "--examples", "1024"]
    (out / "planted_train.tsv").write_text("precious")
    status, reported, error = run(*words)
    assert (status, reported) == (1, "")
    assert "planted_train.tsv exists already: pass overwrite=True (--overwrite)" in error
    assert (out / "planted_train.tsv").read_text() == "precious"
    assert run(*words, "--overwrite")[0] == run(*words, "--overwrite")[0] == 0
    status, _, error = run(*words)
    assert status == 1
    assert "holds a model already: pass overwrite=True (--overwrite)" in error


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--data", "good"], 2, "--data requires --format"),
        (["--valid", "good"], 2, "--valid requires --data"),
        (["--seed", "-1"], 2, "--seed is -1"),
        (["--examples", "3"], 1, "draw 1024 or more"),
        (["--data", "good", "--format", "libsvm"], 1, "needs more than 1024"),
    ],
)
def test_errors_of_the_demonstration_are_one_line(tmp_path, monkeypatch, arguments, status, says):
    monkeypatch.chdir(tmp_path)
    Path("good").write_text("1 7:1\n0 8:1\n")
    ended, reported, error = run("--output", "d", *arguments)
    assert (ended, reported) == (status, "")
    assert says in error
    assert "Traceback" not in error
