"""A report as one HTML file: no script, no network, no other file. ``page.html`` is its template.

An empty section is left out, or says why it is empty. Every text is escaped; the page's content security policy forbids
it to load anything but the charts in it.

Threads: functions are pure.
"""

from __future__ import annotations

import base64
import functools
import html
import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.metrics import Curves, Metrics
from shoal.metrics.exact import entropy
from shoal.models import History, Pass
from shoal.models.segments import Segment, title
from shoal.tools.reports import charts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NONE = "\N{EN DASH}"
_LINES = 40  # passes in the table
_SQUARE = 5.4  # inches high: a chart whose area is as high as wide


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions of labelled examples: a name for the data, metrics and curves."""

    name: str
    metrics: Metrics
    curves: Curves | None
    calibrated: bool = False
    segments: Mapping[str, Sequence[Segment]] = {}  # by column


class Facts(msgspec.Struct, frozen=True, kw_only=True):
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
    """Write the report, the whole file."""
    shown = facts.held_out or _validation(facts.history)
    template = string.Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(facts.title),
        subtitle=html.escape(facts.subtitle),
        tiles=_tiles(facts, shown),
        learning=_learning(facts.history, shown, facts.classes),
        predictions=_predictions(shown, facts.calibration) if facts.classes is None else "",
        segments="" if shown is None else _segments(shown),
        passes=_passes(facts.history, facts.classes),
        settings=_pairs(facts.settings),
        data=_pairs(facts.data),
        weights=_weights(facts.weights, facts.nonzero, facts.classes),
        version=html.escape(facts.version),
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
    return "".join(
        f'<div class="tile"><span>{html.escape(name)}</span><b>{html.escape(value)}</b>'
        f"<span>{html.escape(note)}</span></div>"
        for value, name, note in tiles
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
        return _section("Learning curve", "The model has no history: it was not fitted on a reader.")
    ends = {p.pass_number: p.examples for p in points}
    checks = [(ends.get(done.number, 0), done.valid) for done in history.passes if done.valid is not None]
    held_out = "validation"
    if shown is not None and not checks:
        checks, held_out = [(points[-1].examples, shown.metrics)], shown.name
    if classes is None:
        which, called = "auc", "AUC"
        base = (
            "always the base rate",
            entropy(_progressive(history).metrics.base_rate) if history.passes else math.nan,
        )
    else:
        which, called = "accuracy", "accuracy"
        base = ("equal probabilities", math.log(classes))
    figures = [
        _chart(
            f"Progressive {title} over {points[-1].examples:,} examples",
            functools.partial(
                charts.learning,
                history=history,
                which=name,
                levels=[(*base, charts.GREEN)] if name == "logloss" else [],
                checks=[(at, _quality(m, name)) for at, m in checks],
                held_out=held_out,
            ),
        )
        for name, title in (("logloss", "log-loss"), (which, called))
    ]
    begins = {1, *(fit.first_pass for fit in history.fits)}
    again = any(done.number not in begins for done in history.passes)
    note = "Progressive: each batch is predicted before it is learned from. Each pass starts its mean anew."
    note += " Later passes of a fit have seen its examples before." if again else ""
    return _section("Learning curve", note, f'<div class="pair">{"".join(figures)}</div>')


def _quality(measured: Metrics, which: str) -> float:
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
    title = "Calibration and ROC"
    if shown is None or shown.curves is None:
        return _section(
            title,
            "Not measured: pass held-out data to the report (shoal report --data FILE), or to the training "
            "(--valid FILE).",
        )
    m, curves = shown.metrics, shown.curves
    weight = "" if m.weight == m.examples else f" of weight {m.weight:,.6g}"
    where = html.escape(f"{shown.name}, {m.examples:,} examples{weight}")
    by_decile = _chart(
        "Share of positives over mean predicted probability, in ten parts of equal weight",
        functools.partial(charts.calibration, curves=curves),
        height=_SQUARE,
    )
    roc = (
        _chart(f"ROC curve, AUC {m.auc:.4f}", functools.partial(charts.roc, curves=curves, auc=m.auc), height=_SQUARE)
        if curves.fpr
        else '<p class="note">All examples are of one class: there is no ROC curve.</p>'
    )
    return _section(
        title,
        f"On {where}{_calibrated(shown, calibration)}.",
        f'<div class="pair">{by_decile}{roc}</div>{_deciles(curves)}',
    )


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
    return f'<div class="card">{_table(head, rows)}</div>'


def _segments(shown: HeldOut) -> str:
    """Return the metrics of segments, a table for each column."""
    head = ("examples", "positive", "log-loss", "NE", "AUC", "calibration")
    return "".join(
        _section(
            f"By {html.escape(column)}",
            f"On {html.escape(shown.name)}, the largest segments.",
            f'<div class="card">{_table(("", *head), [(title(one), *_cells(one.metrics)) for one in segments])}</div>',
        )
        for column, segments in shown.segments.items()
    )


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
    note = f"The latest {_LINES} of {len(history.passes):,}." if earlier > 0 else ""
    return _section("Passes", note, f'<div class="card">{_table(head, rows)}</div>')


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
    return _section(
        "Largest weights",
        f"{len(weights):,} of {nonzero:,} that are not zero, {size}. "
        f"A feature of value 1 multiplies the odds{odds} by the exponential of its weight.",
        '<div class="card"><table><thead><tr><th>feature</th><th>weight</th><th>odds</th><th></th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>",
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


def _section(title: str, note: str, body: str = "") -> str:
    shown = f'<p class="note">{note}</p>' if note else ""
    return f"<section><h2>{title}</h2>{shown}{body}</section>"


def _chart(what: str, draw: Callable[[Axes], None], height: float = 3.3) -> str:
    """Return a chart as an image in the page, with one sentence for screen readers."""
    data = base64.b64encode(charts.svg(draw, height=height)).decode()
    return f'<div class="card"><img alt="{html.escape(what)}" src="data:image/svg+xml;base64,{data}"></div>'


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _figure(x: float, digits: int) -> str:
    return f"{x:.{digits}f}" if math.isfinite(x) else NONE


def _percent(x: float) -> str:
    return f"{100 * x:.2f} %" if math.isfinite(x) else NONE
