"""Draw the tables of docs/benchmarks.md as pictures beside the page: one for each table with a column `ratio`.

    python bench/draw_benchmarks.py

A figure is written once, in the table: `2.04 (1.98-2.11)`, a median and its range, is a bar with a line across it. The
picture that follows a table names its file.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.tools.reports import charts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_RATIO = re.compile(r"([\d.]+)(?: \(([\d.]+)-([\d.]+)\))?$")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class Bar(NamedTuple):
    """A row of a table."""

    name: str
    ratio: float
    low: float
    high: float


def tables(page: str) -> dict[str, list[Bar]]:
    """Return the rows of each table that a picture follows, by the name of the picture."""
    found = {}
    for table, picture in re.findall(r"((?:^\|.*\n)+)\n!\[[^\]]*\]\((\S+\.svg)\)", page, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip(" |\n").split(" | ")] for line in table.splitlines())
        named, at = head.index("peer") if "peer" in head else 0, head.index("ratio")
        found[picture] = [_bar(f"{row[0]}: {row[named]}" if named else row[0], row[at]) for row in rows]
    return found


def _bar(name: str, ratio: str) -> Bar:
    match = _RATIO.match(ratio)
    if match is None:
        raise SystemExit(f"{name}: {ratio!r} is no ratio such as 2.04 (1.98-2.11)")
    median, low, high = match[1], match[2] or match[1], match[3] or match[1]
    return Bar(_LINK.sub(r"\1", name).replace("`", ""), float(median), float(low), float(high))


def draw(axes: "Axes", bars: list[Bar]) -> None:
    """Draw ratios on a logarithmic axis, from 1: what is better lies on the right, what is worse on the left."""
    places = range(len(bars), 0, -1)
    names = {True: "1 and more", False: "less than 1"}  # each once in the legend
    for place, bar in zip(places, bars, strict=True):
        good = bar.ratio >= 1
        color, name = charts.BLUE if good else charts.ORANGE, names.pop(good, None)
        axes.barh(place, bar.ratio - 1, left=1, height=0.6, color=color, label=name)
        axes.plot([bar.low, bar.high], [place, place], color=charts.GREY, linewidth=1)
        axes.text(max(bar.high, 1) * 1.04, place, f"{bar.ratio:g}", va="center", fontsize=8, color=charts.GREY)
    axes.axvline(1, color=charts.GREY, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(list(places), [bar.name for bar in bars])
    axes.grid(visible=False, axis="y")


def main() -> None:
    """Draw all pictures."""
    for picture, bars in tables(PAGE.read_text(encoding="utf-8")).items():
        figure, (axes,) = charts.figure(width=9, height=0.6 + 0.26 * len(bars))
        draw(axes, bars)
        charts.save_svg(figure, [axes], PAGE.parent / picture)
        print(f"{picture}: {len(bars)} bars")


if __name__ == "__main__":
    main()
