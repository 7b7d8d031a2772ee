"""Line plots as SVG text for HTML: axes, ticks, lines, dots, tooltips. Colours are those of the style sheet.

    +-- width ------------------------------------+
    | TOP                                         |
    |      +------------------------------------+ |
    | LEFT |  the area: x from low to high,     | | RIGHT
    |      |  y from low (below) to high        | |
    |      +------------------------------------+ |
    |        tick labels, the axis' name   BOTTOM |
    +---------------------------------------------+

Why not matplotlib: a report needs no library besides those of the models, and its charts follow the light or dark
setting of the browser and have tooltips without scripts. matplotlib 3.11 takes 35 MB, and 0.6 s of CPU time to import
what draws an SVG, where this module takes 12 ms (bench/README.md, "Charts of reports").

Every mark has a class, whose colours the page's style sheet defines for light and dark. A coordinate is
written with two digits, so a drawn point is within 0.005 of a pixel of where it belongs. Marks outside of the area are
cut off at its edge. All text is escaped.

Threads: a ``Plot`` belongs to the thread that draws.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence

LEFT, RIGHT, TOP, BOTTOM = 66.0, 24.0, 12.0, 42.0
WIDTH, HEIGHT = 520.0, 300.0

Point = tuple[float, float]


class Plot:
    """A picture with two axes, to be filled with marks and rendered."""

    def __init__(
        self,
        name: str,
        what: str,
        *,
        x: Point,
        y: Point,
        x_label: str,
        y_label: str,
        x_text: Callable[[float], str] | None = None,
        y_text: Callable[[float], str] | None = None,
        width: float = WIDTH,
        height: float = HEIGHT,
    ) -> None:
        self._name = name
        self._what = what
        self._x, self._y = widened(*x), widened(*y)
        self._labels = x_label, y_label
        self._texts = x_text, y_text
        self._width, self._height = width, height
        self._marks: list[str] = []

    def at(self, x: float, y: float) -> Point:
        """Return where a point is drawn, in pixels from the top left."""
        across = (x - self._x[0]) / (self._x[1] - self._x[0])
        up = (y - self._y[0]) / (self._y[1] - self._y[0])
        return (
            LEFT + across * (self._width - LEFT - RIGHT),
            self._height - BOTTOM - up * (self._height - TOP - BOTTOM),
        )

    def line(self, points: Iterable[Point], kind: str) -> None:
        """Connect points; one that is not finite interrupts the line. A lone point shows as a dot of the same class."""
        run: list[str] = []
        for x, y in [*points, (math.nan, math.nan)]:
            if math.isfinite(x) and math.isfinite(y):
                px, py = self.at(x, y)
                run.append(f"{_number(px)},{_number(py)}")
            elif run:
                self._marks.append(_run(run, kind))
                run = []

    def area(self, points: Sequence[Point], kind: str) -> None:
        """Fill what lies between points and the bottom of the plot."""
        if not points:
            return
        low = self._y[0]
        corners = [(points[0][0], low), *points, (points[-1][0], low)]
        shown = " ".join(",".join(map(_number, self.at(x, y))) for x, y in corners)
        self._marks.append(f'<polygon class="{kind}" points="{shown}"/>')

    def dots(self, points: Iterable[tuple[float, float, str]], kind: str, radius: float = 4.0) -> None:
        """Draw dots, each with a text that shows when it is pointed at."""
        for x, y, text in points:
            if math.isfinite(x) and math.isfinite(y):
                px, py = self.at(x, y)
                self._marks.append(
                    f'<circle class="{kind}" cx="{_number(px)}" cy="{_number(py)}" r="{_number(radius)}">'
                    f"<title>{html.escape(text)}</title></circle>"
                )

    def level(self, y: float, kind: str, text: str) -> None:
        """Draw a horizontal line through the whole area."""
        if math.isfinite(y):
            (x1, y1), (x2, _) = self.at(self._x[0], y), self.at(self._x[1], y)
            self._rule(x1, y1, x2, y1, kind, text)

    def upright(self, x: float, kind: str, text: str) -> None:
        """Draw a vertical line through the whole area."""
        (x1, y1), (_, y2) = self.at(x, self._y[0]), self.at(x, self._y[1])
        self._rule(x1, y1, x1, y2, kind, text)

    def spans(self, lines: Iterable[tuple[float, float, float]], kind: str) -> None:
        """Draw vertical lines (x, from, to)."""
        for x, low, high in lines:
            (x1, y1), (_, y2) = self.at(x, low), self.at(x, high)
            self._rule(x1, y1, x1, y2, kind)

    def _rule(self, x1: float, y1: float, x2: float, y2: float, kind: str, text: str = "") -> None:
        ends = f'x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}"'
        title = f"<title>{html.escape(text)}</title>" if text else ""
        self._marks.append(f'<line class="{kind}" {ends}>{title}</line>')

    def render(self) -> str:
        """Return the picture as one ``<svg>`` element."""
        left, bottom = self.at(self._x[0], self._y[0])
        right, top = self.at(self._x[1], self._y[1])
        frame: list[str] = []
        x_values, x_decimals = ticks(*self._x, about=(right - left) / 80)
        y_values, y_decimals = ticks(*self._y, about=(bottom - top) / 45)
        x_text, y_text = self._texts
        for value in x_values:
            at = _number(self.at(value, self._y[0])[0])
            label = html.escape(x_text(value) if x_text else f"{value:.{x_decimals}f}")
            frame.append(f'<line class="tick" x1="{at}" y1="{_number(bottom)}" x2="{at}" y2="{_number(bottom + 4)}"/>')
            frame.append(f'<text class="tick-x" x="{at}" y="{_number(bottom + 17)}">{label}</text>')
        for value in y_values:
            at = _number(self.at(self._x[0], value)[1])
            label = html.escape(y_text(value) if y_text else f"{value:.{y_decimals}f}")
            frame.append(f'<line class="grid" x1="{_number(left)}" y1="{at}" x2="{_number(right)}" y2="{at}"/>')
            frame.append(f'<text class="tick-y" x="{_number(left - 8)}" y="{at}">{label}</text>')
        frame.append(
            f'<line class="axis" x1="{_number(left)}" y1="{_number(bottom)}" x2="{_number(right)}" '
            f'y2="{_number(bottom)}"/>'
        )
        x_name, y_name = map(html.escape, self._labels)
        middle_x, middle_y = _number((left + right) / 2), _number((top + bottom) / 2)
        frame.append(f'<text class="name" x="{middle_x}" y="{_number(self._height - 6)}">{x_name}</text>')
        frame.append(f'<text class="name" transform="translate(13 {middle_y}) rotate(-90)">{y_name}</text>')
        clip = (
            f'<clipPath id="{self._name}"><rect x="{_number(left - 6)}" y="{_number(top - 6)}" '
            f'width="{_number(right - left + 12)}" height="{_number(bottom - top + 12)}"/></clipPath>'
        )
        what = html.escape(self._what)
        return (
            f'<svg viewBox="0 0 {_number(self._width)} {_number(self._height)}" role="img" aria-label="{what}">'
            f'{clip}{"".join(frame)}<g clip-path="url(#{self._name})">{"".join(self._marks)}</g></svg>'
        )


def ticks(low: float, high: float, about: float) -> tuple[list[float], int]:
    """Choose round values from ``low`` to ``high``, 1, 2 or 5 times a power of ten apart."""
    step = (high - low) / max(about, 1.0)
    power = math.floor(math.log10(step))
    step = next(m * 10.0**power for m in (1, 2, 5, 10) if m * 10.0**power >= step * (1 - 1e-9))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [round(i * step, decimals) + 0.0 for i in range(first, last + 1)]  # + 0.0: avoids minus zero
    return values or [low], decimals


def widened(low: float, high: float) -> Point:
    """Return a range that is finite and not empty."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        room = abs(low) / 10 or 0.5
        return low - room, high + room
    return low, high


def short(x: float) -> str:
    """Write a count in a few characters: 1500 is "1.5 k"."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(x) >= size:
            return f"{x / size:g}{unit}"
    return f"{x:g}"


def _run(points: list[str], kind: str) -> str:
    if len(points) > 1:
        return f'<polyline class="{kind}" points="{" ".join(points)}"/>'
    x, y = points[0].split(",")
    return f'<circle class="lone {kind}" cx="{x}" cy="{y}" r="2"/>'


def _number(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")
