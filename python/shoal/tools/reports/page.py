"""A report as one HTML file: no script, no network, no other file.

    title, kind of model
    tiles             log-loss, NE, AUC, calibration, examples, rows; of several classes accuracy
    learning curve    progressive log-loss and AUC, or accuracy, over examples
    predictions       of two classes: calibration by decile, ROC curve, the deciles as a table
    passes            a line each
    settings, data    what it was trained with and on
    weights           the largest

An empty section is left out, or says why it is empty. Every text is escaped; the page's content security policy forbids
it to load anything. The style sheet is ``style.css``, light or dark as the system is set.

Threads: functions are pure.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from shoal.metrics import Curves, Metrics
from shoal.metrics.exact import entropy
from shoal.models import History, Pass
from shoal.models import Point as CurvePoint
from shoal.models.history import merged
from shoal.tools.reports.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Plot, Point, short

NONE = "\N{EN DASH}"
_WINDOWS = 64  # of a pass in the picture: more of them show noise
_CURVES = 20  # passes drawn as a curve each; with more passes, each is one point
_LINES = 40  # passes in the table
_SQUARE = WIDTH - LEFT - RIGHT + TOP + BOTTOM  # a height that makes the area of a plot as high as wide


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Predictions of labelled examples: a name for the data, metrics and curves."""

    name: str
    metrics: Metrics
    curves: Curves | None
    calibrated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The contents of a report."""

    # title, subtitle: What was trained.
    title: str
    subtitle: str
    # Of the table.
    rows: int
    # How many linear weights are not zero; None of a model that has more than those.
    nonzero: int | None
    # May be empty.
    history: History
    # Measured for the report; without it the last validation of the history is shown.
    held_out: HeldOut | None
    # settings, data: Names and values.
    settings: Sequence[tuple[str, str]]
    data: Sequence[tuple[str, str]]
    # The largest, in the order to be shown.
    weights: Sequence[tuple[str, float]]
    # Of shoal.
    version: str
    # How the model is calibrated, which what was measured while it learned is not; None: it is not.
    calibration: str | None = None
    # Number of classes; None of a model of log-odds.
    classes: int | None = None


def page(facts: Facts) -> str:
    """Write the report."""
    shown = facts.held_out or _validation(facts.history)
    title = html.escape(facts.title)
    body = "".join(
        [
            f'<header><p class="eyebrow">shoal report</p><h1>{title}</h1><p>{html.escape(facts.subtitle)}</p></header>',
            _tiles(facts, shown),
            _learning(facts.history, shown, facts.classes),
            _predictions(shown, facts.calibration) if facts.classes is None else "",
            _passes(facts.history, facts.classes),
            '<div class="pair"><section><h2>Settings</h2>',
            _pairs(facts.settings),
            "</section><section><h2>Data and table</h2>",
            _pairs(facts.data),
            "</section></div>",
            _weights(facts.weights, facts.nonzero, facts.classes),
            f"<footer>Written by shoal {html.escape(facts.version)}. docs/metrics.md defines every number.</footer>",
        ]
    )
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>{body}</main>\n</body>\n</html>\n"
    )


def _validation(history: History) -> HeldOut | None:
    # After early stopping the model has the weights of its best pass, else those of its last.
    for done in sorted(history.passes, key=lambda done: (done.number == history.best_pass, done.number), reverse=True):
        if done.valid is not None:
            return HeldOut(name=f"validation after pass {done.number}", metrics=done.valid, curves=done.curves)
    return None


def _progressive(history: History) -> Pass:
    """Return the latest pass over examples that the model had not seen before: the first one of the last fit."""
    first = history.fits[-1].first_pass if history.fits else 1
    return next((done for done in history.passes if done.number == first), history.passes[0])


# ---- tiles -----------------------------------------------------------------------------------------------------------


def _tiles(facts: Facts, shown: HeldOut | None) -> str:
    passes = facts.history.passes
    tiles: list[tuple[str, str, str]] = []
    if shown is not None:
        before = facts.calibration is not None and not shown.calibrated
        tiles = _tiles_of(shown.metrics, f"{shown.name}, not calibrated" if before else shown.name)
    elif passes:
        of = _progressive(facts.history)
        tiles = _tiles_of(of.metrics, "progressive" if len(passes) == 1 else f"progressive, pass {of.number}")
    tiles += [
        (f"{facts.rows:,}", "rows", "" if facts.nonzero is None else f"{facts.nonzero:,} not zero"),
    ]
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><span>{html.escape(name)}</span><b>{html.escape(value)}</b>'
            f"<span>{html.escape(note)}</span></div>"
            for value, name, note in tiles
        )
        + "</div>"
    )


def _tiles_of(m: Metrics, name: str) -> list[tuple[str, str, str]]:
    if m.accuracy is not None:
        return [
            (_figure(m.logloss, 4), "log-loss", name),
            (_figure(m.accuracy, 4), "accuracy", name),
            (f"{m.examples:,}", "examples measured", ""),
        ]
    return [
        (_figure(m.logloss, 4), "log-loss", name),
        (_figure(m.normalized_entropy, 4), "normalized entropy", "base rate alone: 1"),
        (_figure(m.auc, 4), "AUC", name),
        (_figure(m.calibration, 3), "calibration", "positives / predicted"),
        (f"{m.examples:,}", "examples measured", f"{_percent(m.base_rate)} positive"),
    ]


# ---- the learning curve ----------------------------------------------------------------------------------------------


def _learning(history: History, shown: HeldOut | None, classes: int | None) -> str:
    points = [p for p in history.points if p.window_examples > 0]
    if not points:
        return (
            '<section><h2>Learning curve</h2><p class="note">The model has no history: it was not fitted on a reader.'
            "</p></section>"
        )
    last = points[-1].examples
    ends = {
        done.number: max((p.examples for p in points if p.pass_number == done.number), default=0)
        for done in history.passes
    }
    checks = [(ends[done.number], done.valid, done.number) for done in history.passes if done.valid is not None]
    if shown is not None and not checks:
        checks = [(last, shown.metrics, 0)]
    which, called = ("auc", "AUC") if classes is None else ("accuracy", "accuracy")
    if classes is not None:
        base, constant = math.log(classes), "equal probabilities"
    else:
        base = entropy(_progressive(history).metrics.base_rate) if history.passes else math.nan
        constant = "base rate"
    curves = {number: list(some) for number, some in groupby(points, key=lambda p: p.pass_number)}
    many = len(curves) > _CURVES
    if many:
        points = [curve[-1] for curve in curves.values()]
        curves = {0: points}

    so_far = [p.logloss for p in points]
    loss_range = _range(
        [
            *_inner([] if many else [p.window_logloss for p in points]),
            *_inner(so_far),
            so_far[-1],
            base,
            *(m.logloss for _, m, _ in checks),
        ]
    )
    loss = Plot(
        "clip-loss",
        f"Progressive log-loss over {last:,} examples, {so_far[-1]:.4f} at the end",
        x=(0, last),
        y=loss_range,
        x_label="examples learned from",
        y_label="log-loss, nats per example",
        x_text=short,
    )
    so_good = [_quality(p, which) for p in points]
    quality = Plot(
        f"clip-{which}",
        f"Progressive {called} over {last:,} examples, {so_good[-1]:.4f} at the end",
        x=(0, last),
        y=_range([*_inner(so_good), so_good[-1], *(_quality(m, which) for _, m, _ in checks)], most=1.0),
        x_label="examples learned from",
        y_label=called,
        x_text=short,
    )
    article = "the " if classes is None else ""
    loss.level(base, "base", f"always predicting {article}{constant}: {base:.4f}")
    for number, curve in curves.items():
        if number > min(curves):
            begin = curve[0].examples - curve[0].window_examples
            for plot in (loss, quality):
                plot.upright(begin, "pass", f"pass {number} begins")
        if not many:
            wide = list(curve)  # of one pass: windows of different passes are not merged
            while len(wide) > _WINDOWS:
                wide = merged(wide)
            loss.line([(p.examples - p.window_examples / 2, p.window_logloss) for p in wide], "thin")
        loss.line([(p.examples, p.logloss) for p in curve], "main")
        quality.line([(p.examples, _quality(p, which)) for p in curve], "main")
    loss.dots(
        [
            (
                p.examples,
                p.logloss,
                f"pass {p.pass_number}, {p.examples:,} examples: {p.logloss:.4f}"
                + ("" if many else f" so far, {p.window_logloss:.4f} in the window"),
            )
            for p in points
        ],
        "hit",
        6.0,
    )
    quality.dots(
        [
            (
                p.examples,
                good,
                f"pass {p.pass_number}, {p.examples:,} examples: {good:.4f}{'' if many else ' so far'}",
            )
            for p, good in zip(points, so_good, strict=True)
        ],
        "hit",
        6.0,
    )
    for plot, number_of in ((loss, "logloss"), (quality, which)):
        plot.dots(
            [
                (at, value, f"{shown.name if shown and not number else f'validation after pass {number}'}: {value:.4f}")
                for at, m, number in checks
                for value in [_quality(m, number_of)]
            ],
            "valid",
            2.5 if many else 5.0,
        )
    held = [("valid", "held out")] if checks else []
    begins = {1, *(fit.first_pass for fit in history.fits)}
    again = " Later passes of a fit have seen its examples before."
    note = (
        f"Progressive: each batch is predicted before it is learned from. "
        f"{'Each point is a pass.' if many else 'Each pass starts its mean anew.'}"
        f"{again if any(done.number not in begins for done in history.passes) else ''}"
    )
    main = ("main", "a pass" if many else "so far")
    windows = [] if many else [("thin", "in a window")]
    return (
        f'<section><h2>Learning curve</h2><p class="note">{note}</p><div class="pair">'
        + _figure_of("Log-loss", loss, [main, *windows, ("base", constant), *held])
        + _figure_of(called if classes is None else called.capitalize(), quality, [main, *held])
        + "</div></section>"
    )


def _quality(measured: Metrics | CurvePoint, which: str) -> float:
    """Return a number of metrics; NaN where there is none."""
    value = getattr(measured, which)
    return math.nan if value is None else float(value)


# ---- predictions -----------------------------------------------------------------------------------------------------


def _calibrated(shown: HeldOut, calibration: str | None) -> str:
    """Return whether the measured predictions are those of the calibrated model."""
    if calibration is None:
        return ""
    name = html.escape(calibration)
    if shown.calibrated:
        return f", with calibrated probabilities ({name})"
    return (
        f", measured before the model was calibrated ({name}): its predictions now differ from these. For those, pass "
        "held-out data that it was not calibrated on (shoal report --data FILE)"
    )


def _predictions(shown: HeldOut | None, calibration: str | None) -> str:
    if shown is None or shown.curves is None:
        return (
            '<section><h2>Calibration and ROC</h2><p class="note">Not measured: pass held-out data to the report '
            "(shoal report --data FILE), or to the training (--valid FILE).</p></section>"
        )
    m, curves = shown.metrics, shown.curves
    weight = "" if m.weight == m.examples else f" of weight {m.weight:,.6g}"
    where = html.escape(f"{shown.name}, {m.examples:,} examples{weight}")
    roc = (
        _figure_of("ROC curve", _roc(curves, m.auc), [("main", f"AUC {m.auc:.4f}"), ("ideal", "a coin: 0.5")])
        if curves.fpr
        else '<p class="note">All examples are of one class: there is no ROC curve.</p>'
    )
    return (
        f'<section><h2>Calibration and ROC</h2><p class="note">On {where}{_calibrated(shown, calibration)}.</p>'
        '<div class="pair">'
        + _figure_of(
            "Calibration by decile",
            _calibration(curves),
            [("main", "observed"), ("bar", "95 %"), ("ideal", "as predicted")],
        )
        + roc
        + "</div>"
        + _deciles(curves)
        + "</section>"
    )


def _calibration(curves: Curves) -> Plot:
    points = [(d.mean_probability, d.mean_label) for d in curves.deciles]
    most = min(1.0, 1.06 * max((max(p) for p in points), default=1.0)) or 1.0
    plot = Plot(
        "clip-calibration",
        "Share of positives over mean predicted probability, in ten parts of equal weight",
        x=(0, most),
        y=(0, most),
        x_label="mean predicted probability",
        y_label="share of positives",
        height=_SQUARE,
    )
    plot.line([(0, 0), (most, most)], "ideal")
    plot.spans([(d.mean_probability, *_interval(d.mean_label, d.weight)) for d in curves.deciles], "bar")
    plot.line(points, "main")
    plot.dots(
        [
            (
                d.mean_probability,
                d.mean_label,
                f"predicted {d.mean_probability:.4g}, observed {d.mean_label:.4g}, {d.weight:,.6g} examples",
            )
            for d in curves.deciles
        ],
        "dot",
    )
    return plot


def _interval(share: float, n: float, z: float = 1.96) -> Point:
    """Wilson's 95 % interval of a share (JASA 22, 1927); weights are taken as counts."""
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return middle - half, middle + half


def _roc(curves: Curves, auc: float) -> Plot:
    plot = Plot(
        "clip-roc",
        f"ROC curve: true positive rate over false positive rate, the area below is {auc:.4f}",
        x=(0, 1),
        y=(0, 1),
        x_label="false positive rate",
        y_label="true positive rate",
        height=_SQUARE,
    )
    points = list(zip(curves.fpr, curves.tpr, strict=True))
    plot.area(points, "wash")
    plot.line([(0, 0), (1, 1)], "ideal")
    plot.line(points, "main")
    plot.dots([(x, y, f"{y:.1%} of the positives, {x:.1%} of the negatives") for x, y in points], "hit", 5.0)
    return plot


def _deciles(curves: Curves) -> str:
    rows = [
        (
            f"{d.low:.4g} to {d.high:.4g}",
            f"{d.weight:,.6g}",
            f"{d.mean_probability:.5f}",
            f"{d.mean_label:.5f}",
            _figure(d.mean_label / d.mean_probability if d.mean_probability > 0 else math.nan, 3),
        )
        for d in curves.deciles
    ]
    head = ("predicted probability", "examples (weight)", "mean predicted", "share of positives", "calibration")
    return f'<div class="card" style="margin-top:16px">{_table(head, rows)}</div>'


# ---- tables ----------------------------------------------------------------------------------------------------------


def _passes(history: History, classes: int | None) -> str:
    if not history.passes:
        return ""
    files = {fit.first_pass: "learned from" if fit.data is None else Path(fit.data).name for fit in history.fits}
    several = len(set(files.values())) > 1
    earlier = len(history.passes) - _LINES
    learned = "learned from"
    grouped = any(done.grouped is not None for done in history.passes)
    rows: list[tuple[str, ...]] = []
    for i, done in enumerate(history.passes):
        learned = files.get(done.number, learned) if several else learned
        kept = done.number == history.best_pass
        if i < earlier and not kept:
            continue
        name = f"{done.number}{'' if done.complete else ', interrupted'}{', kept' if kept else ''}"
        rate = done.metrics.examples / done.seconds if done.seconds > 0 else math.nan
        last = ("",) if grouped else ()
        rows.append((name, learned, *_cells(done.metrics), f"{done.seconds:,.1f} s", f"{rate:,.0f}", *last))
        if done.valid is not None:
            last = (NONE if done.grouped is None else _figure(done.grouped.gauc, 5),) if grouped else ()
            rows.append(("", "validation", *_cells(done.valid), "", "", *last))
    measured = ["positive", "log-loss", "NE", "AUC", "calibration"] if classes is None else ["log-loss", "accuracy"]
    head = ["pass", "", "examples", *measured, "time", "examples/s"]
    head += ["GAUC"] if grouped else []
    note = f'<p class="note">The latest {_LINES} of {len(history.passes):,}.</p>' if earlier > 0 else ""
    return f'<section><h2>Passes</h2>{note}<div class="card">{_table(head, rows)}</div></section>'


def _cells(m: Metrics) -> tuple[str, ...]:
    examples = f"{m.examples:,}" + ("" if m.weight == m.examples else f" of weight {m.weight:,.6g}")
    if m.accuracy is not None:
        return examples, _figure(m.logloss, 5), _figure(m.accuracy, 5)
    return (
        examples,
        _percent(m.base_rate),
        _figure(m.logloss, 5),
        _figure(m.normalized_entropy, 4),
        _figure(m.auc, 5),
        _figure(m.calibration, 4),
    )


def _weights(weights: Sequence[tuple[str, float]], nonzero: int | None, classes: int | None) -> str:
    if not weights or nonzero is None:
        return ""
    most = max(abs(w) for _, w in weights)
    rows = "".join(
        f'<tr><td class="feature">{html.escape(name)}</td><td>{w:+.4f}</td><td>&times; {_odds(w)}</td>'
        f'<td class="weigh"><div><i class="{"up" if w > 0 else "down"}" style="width:{50 * abs(w) / most:.1f}%">'
        "</i></div></td></tr>"
        for name, w in weights
    )
    several = classes is not None
    size = "of each feature the largest, by size" if several else "by size"
    odds = " of its class, against a class without weight for it," if several else ""
    return (
        f'<section><h2>Largest weights</h2><p class="note">{len(weights):,} of {nonzero:,} that are not zero, {size}. '
        f"A feature of value 1 multiplies the odds{odds} by the exponential of its weight.</p>"
        '<div class="card"><table><thead><tr><th>feature</th><th>weight</th><th>odds</th><th></th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _odds(w: float) -> str:
    return f"{math.exp(min(w, 700.0)):.3g}"


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in pairs)
    return f'<div class="card"><table class="facts"><tbody>{rows}</tbody></table></div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"


def _figure_of(title: str, plot: Plot, keys: Sequence[tuple[str, str]]) -> str:
    legend = "".join(
        f'<span class="key"><i class="c-{kind}{" dot" if kind == "valid" else ""}"></i>{html.escape(text)}</span>'
        for kind, text in keys
    )
    return (
        f'<figure class="card"><figcaption><strong>{html.escape(title)}</strong>{legend}</figcaption>'
        f"{plot.render()}</figure>"
    )


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _figure(x: float, digits: int) -> str:
    return f"{x:.{digits}f}" if math.isfinite(x) else NONE


def _percent(x: float) -> str:
    return f"{100 * x:.2f} %" if math.isfinite(x) else NONE


def _inner(values: Sequence[float]) -> Iterator[float]:
    """Yield the least and the largest value without the highest and lowest twentieth; the first windows vary most."""
    there = sorted(v for v in values if math.isfinite(v))
    if there:
        cut = len(there) // 20
        yield there[cut]
        yield there[-1 - cut]


def _range(values: Iterable[float], most: float = math.inf) -> Point:
    there = [v for v in values if math.isfinite(v)]
    if not there:
        return 0.0, 1.0
    low, high = min(there), max(there)
    room = 0.08 * (high - low) or 0.02
    return low - room, min(high + room, most) if high < most else high + 0.0
