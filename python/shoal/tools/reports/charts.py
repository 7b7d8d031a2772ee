"""Charts of fits and predictions, drawn by matplotlib (the extra ``plot``): learning curves, calibration, ROC.

Each function draws into axes that it is given. Colours show on light and dark pages alike, since backgrounds are
transparent. pyplot, whose state is global, is not used: any thread may draw.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from shoal.metrics import Curves
from shoal.models import History, Point
from shoal.models.history import merged

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#3a7fc9", "#d9731a", "#2f9a66", "#77818e"
_WINDOWS = 64  # of a pass in the picture: more of them show noise
_CURVES = 20  # passes drawn as a curve each; with more passes, each is one point


def require() -> None:
    """Raise ImportError that names the extra if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("charts require matplotlib: pip install 'shoal[plot]'") from error


def figure(rows: int = 1, columns: int = 1, *, width: float = 5.4, height: float = 3.3) -> tuple[Figure, list[Axes]]:
    """Return a figure without state outside of it, and its axes, row by row; those of a column share their x axis."""
    require()
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    axes = made.subplots(rows, columns, sharex="col", squeeze=False).ravel().tolist()
    for each in axes:
        each.grid(axis="y", color=GREY, alpha=0.2)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
        each.spines[:].set_color(GREY)
        each.tick_params(colors=GREY, labelsize=8)
        each.patch.set_visible(False)
    return made, axes


def svg(draw: Callable[[Axes], None], *, height: float = 3.3) -> bytes:
    """Return what a function draws as an SVG file, the same bytes each time."""
    made, axes = figure(height=height)
    draw(axes[0])
    out = io.BytesIO()
    save_svg(made, axes, out)
    return out.getvalue()


def save_svg(made: Figure, axes: Sequence[Axes], out: BinaryIO | Path) -> None:
    """Write a figure with its legends as SVG; text stays text."""
    import matplotlib

    for each in axes:
        each.xaxis.label.set(color=GREY, size=9)
        each.yaxis.label.set(color=GREY, size=9)
        each.legend(frameon=False, fontsize=8, labelcolor=GREY)
    with matplotlib.rc_context({"svg.hashsalt": "shoal", "svg.fonttype": "none"}):
        made.savefig(out, format="svg", transparent=True, metadata={"Date": None})


def learning(
    axes: Axes,
    history: History,
    which: str,
    *,
    levels: Sequence[tuple[str, float, str]] = (),
    checks: Sequence[tuple[int, float]] = (),
    held_out: str = "held out",
) -> None:
    """Draw ``logloss``, ``auc`` or ``accuracy`` of examples that were predicted before they were learned from.

    ``levels`` are horizontal lines (label, value, colour), ``checks`` validations (examples learned from, value).
    """
    from matplotlib.ticker import EngFormatter

    points = [p for p in history.points if p.window_examples > 0]
    curves = {number: list(some) for number, some in groupby(points, key=lambda p: p.pass_number)}
    many = len(curves) > _CURVES
    if many:
        curves = {0: [curve[-1] for curve in curves.values()]}
    shown: list[float] = []
    for number, curve in curves.items():
        first = number == min(curves)
        values = [_value(p, which) for p in curve]
        if not first:
            axes.axvline(curve[0].examples - curve[0].window_examples, color=GREY, alpha=0.4, ls=":", lw=1)
        if which == "logloss" and not many:
            wide = widened(curve)
            middles = [p.examples - p.window_examples / 2 for p in wide]
            windows = [p.window_logloss for p in wide]
            axes.plot(middles, windows, color=BLUE, alpha=0.45, lw=1.2, label="in a window" if first else None)
            shown += _inner(windows)
        label = ("a pass" if many else "so far") if first else None
        marker = "o" if len(curve) == 1 else None
        axes.plot([p.examples for p in curve], values, color=BLUE, lw=2, marker=marker, ms=3, label=label)
        shown += [*_inner(values), values[-1]]
    for text, value, colour in levels:
        if math.isfinite(value):
            axes.axhline(value, color=colour, ls="--", lw=1.4, label=f"{text}: {value:.4f}")
    if checks:
        label = f"{held_out}: {checks[-1][1]:.4f}"
        axes.plot(
            *zip(*checks, strict=True), "o", color=ORANGE, ms=3 if many else 6, zorder=5, clip_on=False, label=label
        )
    shown += [*(value for _, value, _ in levels), *(value for _, value in checks)]
    axes.set_ylim(*_limits(shown, most=math.inf if which == "logloss" else 1.0))
    axes.set_xlim(0, max(points[-1].examples, 1))
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.set(xlabel="examples learned from", ylabel=_NAMES[which])


_NAMES = {"logloss": "log-loss, nats per example", "auc": "AUC", "accuracy": "accuracy"}


def calibration(axes: Axes, curves: Curves) -> None:
    """Draw the share of positives over the mean predicted probability, in ten parts of equal weight."""
    predicted = [d.mean_probability for d in curves.deciles]
    observed = [d.mean_label for d in curves.deciles]
    most = min(1.0, 1.06 * max([*predicted, *observed], default=1.0)) or 1.0
    axes.plot([0, most], [0, most], color=GREY, ls="--", lw=1.2, label="as predicted")
    bounds = [_interval(d.mean_label, d.weight) for d in curves.deciles]
    axes.vlines(predicted, *zip(*bounds, strict=True), color=BLUE, alpha=0.5, label="95 %")
    axes.plot(predicted, observed, color=BLUE, lw=2, marker="o", ms=4, label="observed")
    axes.set(xlim=(0, most), ylim=(0, most), xlabel="mean predicted probability", ylabel="share of positives")
    axes.set_aspect("equal")


def roc(axes: Axes, curves: Curves, auc: float) -> None:
    """Draw the true positive rate over the false positive rate."""
    axes.fill_between(curves.fpr, curves.tpr, color=BLUE, alpha=0.1)
    axes.plot([0, 1], [0, 1], color=GREY, ls="--", lw=1.2, label="a coin: 0.5")
    axes.plot(curves.fpr, curves.tpr, color=BLUE, lw=2, label=f"AUC {auc:.4f}")
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="false positive rate", ylabel="true positive rate")
    axes.set_aspect("equal")


def widened(points: Sequence[Point], most: int = _WINDOWS) -> list[Point]:
    """Merge the windows of a learning curve until there are at most ``most``."""
    wide = list(points)
    while len(wide) > most:
        wide = merged(wide)
    return wide


def _value(point: Point, which: str) -> float:
    value = getattr(point, which)
    return math.nan if value is None else float(value)


def _interval(share: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (JASA 22, 1927); weights are taken as counts."""
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return middle - half, middle + half


def _inner(values: Sequence[float]) -> Iterator[float]:
    """Yield the least and the largest value without the highest and lowest twentieth; the first windows vary most."""
    there = sorted(v for v in values if math.isfinite(v))
    if there:
        cut = len(there) // 20
        yield there[cut]
        yield there[-1 - cut]


def _limits(values: Iterable[float], most: float) -> tuple[float, float]:
    there = [v for v in values if math.isfinite(v)]
    if not there:
        return 0.0, 1.0
    low, high = min(there), max(there)
    room = 0.08 * (high - low) or 0.02
    return low - room, max(high, min(high + room, most))
