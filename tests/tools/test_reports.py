"""Reports: one HTML file that is well formed, loads nothing and escapes all; its pictures show the numbers."""

import base64
import itertools
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

import shoal
from shoal import Batch, LogisticRegression, cli, models
from shoal.models import EarlyStopping
from shoal.models.evaluation import measure
from shoal.tools.reports import charts

pytest.importorskip("matplotlib", reason="reports need matplotlib: pip install shoal[plot]")

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """All elements as (name, attributes, text), with a check that every one is closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements = []
        self._open = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append([tag, dict(attrs), ""])
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag, attrs):
        self.elements.append([tag, dict(attrs), ""])

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> closes nothing"
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data):
        for i in self._open:
            self.elements[i][2] += data

    def of(self, tag, kind=None):
        return [e for e in self.elements if e[0] == tag and (kind is None or e[1].get("class") == kind)]

    def texts(self, tag, kind=None):
        return [e[2] for e in self.of(tag, kind)]


def make_batch(rng, n=400, keys=40):
    k = rng.integers(0, keys, (n, 3))
    labels = (rng.random(n) < 1 / (1 + np.exp(-np.sin(k).sum(axis=1)))).astype(np.float32)
    return Batch(labels, np.arange(0, 3 * n + 1, 3), k.reshape(-1).astype(np.uint64), None)


@pytest.fixture
def train(rng):
    return [make_batch(rng) for _ in range(20)]


@pytest.fixture
def saved(rng, train, tmp_path):
    with LogisticRegression(shoal.FTRL(alpha=0.3)) as model:
        model.fit(train, epochs=2, valid=[make_batch(rng)], progress=False)
        return model.save(tmp_path / "ctr")


def read(path):
    page = Page(path.read_text(encoding="utf-8"))
    # Nothing that a browser would fetch or run, and a policy that forbids it.
    policy = [e[1].get("content") for e in page.of("meta") if e[1].get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert {e[0] for e in page.elements}.isdisjoint(
        {"script", "link", "iframe", "object", "embed", "base", "image", "use", "a", "form", "video", "audio"}
    )
    for tag, attributes, _ in page.elements:
        assert not [name for name in attributes if name in ("href", "srcset", "action") or name.startswith("on")]
        kind, _, data = (attributes.get("src") or "").partition(",")
        assert (kind == "data:image/svg+xml;base64" and tag == "img" and attributes["alt"]) or not data
        assert not data or b"</svg>" in base64.b64decode(data, validate=True)
    assert not re.search(r"@import|url\(|https?:", "".join(page.texts("style")))
    return page


@pytest.fixture
def drawn(monkeypatch):
    """The axes of the charts that reports draw, by the label of their y axis; none is written, which takes long."""
    seen = {}

    def svg(draw, **how):
        _, (axes,) = charts.figure()
        draw(axes)
        seen[axes.get_ylabel()] = axes
        return b"<svg></svg>"

    monkeypatch.setattr(charts, "svg", svg)
    return seen


LOSS, SHARE, TPR = "log-loss, nats per example", "share of positives", "true positive rate"


def curves(axes, width=2):
    """The lines of a chart that are that wide."""
    return [line.get_xydata() for line in axes.lines if line.get_linewidth() == width and line.get_linestyle() == "-"]


def dots(axes):
    return [line.get_xydata() for line in axes.lines if line.get_color() == charts.ORANGE]


# ---- the pictures ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_learning_curve_shows_the_history(saved, drawn):
    page = read(shoal.tools.report(saved))
    assert len(page.of("img")) == 4
    with LogisticRegression.load(saved) as model:
        history = model.history
    for name, value in [(LOSS, "logloss"), ("AUC", "auc")]:
        shown = curves(drawn[name])
        assert len(shown) == 2
        for number, curve in enumerate(shown, 1):
            points = [(p.examples, getattr(p, value)) for p in history.points if p.pass_number == number]
            np.testing.assert_array_equal(curve, points)
        checks = [(8000.0 * done.number, getattr(done.valid, value)) for done in history.passes]
        np.testing.assert_array_equal(dots(drawn[name]), [checks])
    windows = np.concatenate(curves(drawn[LOSS], width=1.2))
    middles = [(p.examples - p.window_examples / 2, p.window_logloss) for p in history.points]
    np.testing.assert_array_equal(windows, middles)


@pytest.mark.slow
def test_calibration_and_roc_show_the_held_out_data(saved, rng, tmp_path, drawn):
    held = make_batch(rng)
    page = read(shoal.tools.report(saved, tmp_path / "r.html", [held]))
    with LogisticRegression.load(saved) as model:
        found = measure([model], held)[0]
        metrics, measured = found.metrics, found.curves
    np.testing.assert_array_equal(curves(drawn[TPR]), [np.column_stack([measured.fpr, measured.tpr])])
    deciles = [(d.mean_probability, d.mean_label) for d in measured.deciles]
    np.testing.assert_array_equal(curves(drawn[SHARE]), [deciles])
    tiles = page.texts("div", "tile")
    assert any(f"{metrics.auc:.4f}" in tile and "AUC" in tile for tile in tiles)
    assert any("On held out, 400 examples" in note for note in page.texts("p", "note"))
    rows = [row for row in page.texts("tr") if " to " in row]
    assert [f"{d.mean_label:.5f}" in row for d, row in zip(measured.deciles, rows, strict=True)] == [True] * len(rows)


@pytest.mark.slow
def test_held_out_examples_count_by_their_weights(saved, rng, tmp_path, drawn):
    held = make_batch(rng)
    weighted = Batch(held.labels, held.indptr, held.keys, None, np.where(held.labels > 0, 3, 0.5).astype(np.float32))
    page = read(shoal.tools.report(saved, tmp_path / "r.html", [weighted]))
    with LogisticRegression.load(saved) as model:
        margins = model.decision_function(held)
    expected = shoal.metrics.curves(held.labels, margins, weighted.weights)
    deciles = [(d.mean_probability, d.mean_label) for d in expected.deciles]
    np.testing.assert_allclose(curves(drawn[SHARE]), [deciles], rtol=1e-12)
    assert any(f"400 examples of weight {weighted.weights.sum():,.6g}." in note for note in page.texts("p", "note"))


def test_without_data_the_last_validation_is_shown(saved, drawn):
    page = read(shoal.tools.report(saved))
    with LogisticRegression.load(saved) as model:
        done = model.history.passes[-1]
    np.testing.assert_array_equal(curves(drawn[TPR]), [np.column_stack([done.curves.fpr, done.curves.tpr])])
    assert any("On validation after pass 2" in note for note in page.texts("p", "note"))


@pytest.mark.slow
def test_after_early_stopping_the_validation_of_the_kept_pass_is_shown(rng, train, tmp_path):
    with LogisticRegression(shoal.FTRL(alpha=3.0)) as model:
        model.fit(train[:2], epochs=9, valid=[make_batch(rng)], progress=False, early_stopping=EarlyStopping(2))
        best, passes = model.history.best_pass, model.history.passes
        assert best < len(passes)
        model.save(tmp_path / "m")
    page = read(shoal.tools.report(tmp_path / "m"))
    assert any(f"On validation after pass {best}," in note for note in page.texts("p", "note"))
    assert [row for row in page.texts("td") if "kept" in row] == [f"{best}, kept"]


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_the_largest_weights_come_first_under_their_names(saved):
    with LogisticRegression.load(saved) as model:
        keys, weights = model.weights()
    order = np.argsort(-np.abs(weights))[:7]
    page = read(shoal.tools.report(saved, names={int(keys[order[0]]): "carrier=AA"}, top=7))
    assert page.texts("td", "feature") == ["carrier=AA", *(str(keys[i]) for i in order[1:])]
    text = " ".join(page.texts("tr"))
    assert all(f"{weights[i]:+.4f}" in text for i in order)
    assert read(shoal.tools.report(saved, top=0)).texts("td", "feature") == []
    assert len(read(shoal.tools.report(saved, top=10**9)).texts("td", "feature")) == len(keys)


@pytest.mark.slow
def test_a_calibrated_model_is_not_shown_with_figures_from_before_without_a_word(rng, tmp_path, drawn):
    held = make_batch(rng)
    with LogisticRegression() as model:
        model.fit([make_batch(rng)], valid=[held], progress=False)
        model.save(tmp_path / "plain")
        model.calibrate(held, "platt").save(tmp_path / "m")
        calibrated = measure([model], held)[0].curves.deciles
    note = "measured before the model was calibrated"
    assert note not in shoal.tools.report(tmp_path / "plain").read_text()
    text = shoal.tools.report(tmp_path / "m").read_text()
    assert note in text
    assert ", not calibrated</span>" in text
    path = shoal.tools.report(tmp_path / "m", data=[held])
    assert note not in path.read_text()
    assert "with calibrated probabilities (" in path.read_text()
    deciles = [(d.mean_probability, d.mean_label) for d in calibrated]
    np.testing.assert_array_equal(curves(drawn[SHARE]), [deciles])


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_the_settings_of_the_fit_and_its_data_are_told(rng, tmp_path):
    def write(name, lines):
        (tmp_path / name).write_text("".join(f"{a % 2} {a}:1 {b}:1\n" for a, b in rng.integers(1, 9, (lines, 2))))
        return shoal.read_libsvm(tmp_path / name, batch_size=50)

    with LogisticRegression(shoal.FTRL(alpha=0.3), seed=9, negative_rate=0.5) as model:
        first, second, held = write("hour-0", 200), write("hour-1", 100), write("held", 60)
        model.fit(first, progress=False)
        model.fit(second, valid=held, epochs=4, shuffle=3, progress=False, early_stopping=EarlyStopping(4))
        model.calibrate(held, "platt").save(tmp_path / "m")
        threads, calibration = model.store.threads, str(model.calibration)
    page = read(shoal.tools.report(tmp_path / "m"))
    cells = page.texts("td")
    reported = dict(itertools.pairwise(cells))
    expected = {
        "file": str(tmp_path / "hour-1"),
        "validation data": str(tmp_path / "held"),
        "batch size": "50 examples",
        "epochs": "4 at most, stopping after 4 without progress in held-out log-loss",
        "shuffle": "among 3 batches",
        "negatives": "50 %, reweighted",
        "seed of the order and the choice": "9",
        "threads": f"{threads}",
        "calibration": calibration,
        "fits before this one": "1, 1 with other settings",
        "features per example": "2.0",
    }
    assert {name: reported.get(name) for name in expected} == expected
    assert {("1", "hour-0"), ("2", "hour-1")} <= set(itertools.pairwise(cells))


@pytest.mark.usefixtures("drawn")
def test_columns_and_interactions_are_told(tmp_path, capsys):
    (tmp_path / "t.tsv").write_text("y\ta\tb\tc\n1\tx\tz\t2\n0\ty\tz\t1\n")
    how = {"label": "y", "categorical": ["a", "b"], "numeric": ["c"], "interactions": ["a", "b", "c"], "sep": "\t"}
    with LogisticRegression() as model:
        model.fit(shoal.read_csv(tmp_path / "t.tsv", **how), progress=False).save(tmp_path / "m")
    cells = read(shoal.tools.report(tmp_path / "m")).texts("td")
    assert cli.main(["inspect", str(tmp_path / "m")]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, value in [
        ("label", "y"),
        ("categorical", "a, b"),
        ("numeric", "c"),
        ("interactions", "a * b, a * c, b * c"),
        ("sep", r"'\t'"),
    ]:
        assert (name, value) in itertools.pairwise(cells)
        assert f"    {name:<11} {value}" in lines


def test_of_many_passes_the_latest_are_told_and_each_is_a_point(train, tmp_path, drawn):
    with LogisticRegression() as model:
        for _ in range(45):
            model.fit(train[:1], progress=False)
        model.save(tmp_path / "m")
        passes = model.history.passes
    page = read(shoal.tools.report(tmp_path / "m"))
    expected = [(400.0 * done.number, done.metrics.logloss) for done in passes]
    np.testing.assert_allclose(curves(drawn[LOSS]), [expected], rtol=1e-12)
    assert curves(drawn[LOSS], width=1.2) == []
    notes = " ".join(page.texts("p", "note"))
    assert "The latest 40 of 45." in notes
    assert "have seen" not in notes  # each fit began with examples that may be new
    cells = page.texts("td")
    assert [cell for cell, following in itertools.pairwise(cells) if following == "learned from"] == [
        str(number) for number in range(6, 46)
    ]
    assert "44, with the same settings" in cells


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_names_that_were_saved_with_the_model_are_shown(saved):
    with LogisticRegression.load(saved) as model:
        keys, _ = model.top(3)
        names = shoal.data.FeatureNames()
        names.add(keys[:1], ["<carrier>=AA"])
        model.save(saved, names=names, overwrite=True)
    assert read(shoal.tools.report(saved, top=2)).texts("td", "feature") == ["<carrier>=AA", str(keys[1])]
    assert read(shoal.tools.report(saved, names={}, top=1)).texts("td", "feature") == [str(keys[0])]


# ---- awkward models --------------------------------------------------------------------------------------------------


def test_a_model_without_history_has_a_report(train, tmp_path):
    with LogisticRegression(bias=False) as model:
        model.partial_fit(train[0])
        model.save(tmp_path / "m")
    page = read(shoal.tools.report(tmp_path / "m"))
    notes = " ".join(page.texts("p", "note"))
    assert "no history" in notes
    assert "Not measured" in notes
    assert page.of("img") == []


@pytest.mark.slow
def test_one_class_no_examples_and_a_model_that_predicts_one_number(train, tmp_path, drawn):
    positive = Batch(np.ones(4, np.float32), np.arange(5), np.arange(4, dtype=np.uint64), None)
    with LogisticRegression() as model:
        model.fit([positive], progress=False).save(tmp_path / "m")
    page = read(shoal.tools.report(tmp_path / "m", data=[positive]))
    assert any("no ROC curve" in note for note in page.texts("p", "note"))
    assert "nan" not in " ".join(page.texts("main"))
    with pytest.raises(ValueError, match="the data has no examples"):
        shoal.tools.report(tmp_path / "m", data=[])
    empty = Batch(np.array([0, 1], np.float32), np.zeros(3, np.int64), np.empty(0, np.uint64), None)
    read(shoal.tools.report(tmp_path / "m", data=[empty]))
    assert [len(line) for line in curves(drawn[SHARE])] == [1]


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>", "\"><img src=x onerror='alert(1)'>", "a&amp;b</title>"]
)
def test_hostile_names_are_text(train, tmp_path, hostile):
    name = hostile.replace("/", "\N{DIVISION SLASH}")
    with LogisticRegression(table=name) as model:
        model.fit(train[:2], progress=False)
        keys, _ = model.weights()
        model.save(tmp_path / name)
    names = {int(key): hostile for key in keys}
    page = read(shoal.tools.report(tmp_path / name, tmp_path / "r.html", train[:1], data_name=hostile, names=names))
    assert page.texts("h1") == [name]
    assert page.texts("title")[0] == name
    assert set(page.texts("td", "feature")) == {hostile}
    assert any(hostile in text for text in page.texts("p", "note"))


# ---- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_the_page_lies_in_the_model_which_can_be_replaced_and_reported_again(saved, train):
    first = shoal.tools.report(saved)
    assert first == saved / "report.html"
    with LogisticRegression.load(saved) as model:
        model.fit(train[:1], progress=False)
        model.save(saved, overwrite=True)
    second = shoal.tools.report(saved).read_text()
    assert "16,400 examples in 3 passes" in second
    assert second == shoal.tools.report(saved).read_text()
    checkpoint = models.files.read(saved).checkpoint
    assert sorted(p.name for p in saved.iterdir()) == [checkpoint, "model.json", "report.html"]


def test_what_is_wrong_is_named_and_nothing_is_written(saved, tmp_path, train):
    with pytest.raises(ValueError, match="is a directory: name a file"):
        shoal.tools.report(saved, tmp_path)
    with pytest.raises(ValueError, match="top is -1"):
        shoal.tools.report(saved, top=-1)
    with pytest.raises(TypeError, match="data is a path"):
        shoal.tools.report(saved, data="day_1.tsv")
    with pytest.raises(shoal.CorruptionError, match="is not a model"):
        shoal.tools.report(tmp_path)
    assert not (saved / "report.html").exists()


@pytest.mark.slow
def test_the_command_writes_the_page(tmp_path, capsys, rng):
    lines = [f"{int(rng.random() < 0.4)} {a}:1 {b}:0.5" for a, b in rng.integers(1, 9, (300, 2)) if a < b]
    (tmp_path / "a.libsvm").write_text("\n".join(lines) + "\n")
    data, model = str(tmp_path / "a.libsvm"), str(tmp_path / "m")
    assert cli.main(["train", "lr", "--data", data, "--format", "libsvm", "--output", model, "--quiet"]) == 0
    capsys.readouterr()
    assert cli.main(["report", model]) == 0
    assert capsys.readouterr().out.split() == ["report", str(tmp_path / "m" / "report.html")]
    out = str(tmp_path / "held.html")
    assert cli.main(["report", model, "--data", data, "--output", out, "--top", "3", "--json"]) == 0
    assert f'"report":"{out}"' in capsys.readouterr().out
    page = read(tmp_path / "held.html")
    assert any("On a.libsvm" in note for note in page.texts("p", "note"))
    assert len(page.texts("td", "feature")) == 3
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert "there is no such model" in capsys.readouterr().err


# ---- charts ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_charts_are_the_same_bytes_each_time_and_show_what_is_in_the_picture():
    def draw(axes):
        axes.plot([0, 1], [1, 0], label="a line")

    assert charts.svg(draw) == charts.svg(draw)
    assert b">a line<" in charts.svg(draw)


def test_without_matplotlib_a_report_names_the_extra_and_writes_nothing(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'shoal\[plot\]'"):
        shoal.tools.report(saved)
    assert not (saved / "report.html").exists()
