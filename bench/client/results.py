"""Figures of turns: collected, printed as Markdown, saved as JSON, and compared with those of another build.

A figure is a list with a number for each turn. Its mode, case and system name it, and its unit is part of its own name:
"p50 us".
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

from figures import spread

Name = tuple[str, str, str]  # mode, case, system


def digits(numbers: Iterable[float]) -> int:
    """Return how many digits behind the point leave three significant ones."""
    size = abs(statistics.median(numbers))
    return 0 if size >= 100 else 1 if size >= 10 else 2


class Results:
    """Figures by name."""

    def __init__(self) -> None:
        self._rows: dict[Name, dict[str, list[float]]] = {}

    def add(self, mode: str, case: str, system: str, **figures: float) -> None:
        """Add the figures of a turn; underscores in their names are spaces, "per" is a slash."""
        row = self._rows.setdefault((mode, case, system), {})
        for name, figure in figures.items():
            row.setdefault(name.replace("_per_", "/").replace("_", " "), []).append(float(figure))

    def last(self, mode: str, case: str, system: str) -> dict[str, float]:
        """Return the figures of the latest turn."""
        return {name: turns[-1] for name, turns in self._rows[mode, case, system].items()}

    def show(self, mode: str) -> None:
        """Print a table of a mode: medians (minima-maxima) of the turns."""
        rows = {name[1:]: row for name, row in self._rows.items() if name[0] == mode}
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        print(f"\n| {mode} | | {' | '.join(columns)} |\n|{'---|' * (2 + len(columns))}")
        for (case, system), row in rows.items():
            cells = [spread(row[column], digits(row[column])) if column in row else "" for column in columns]
            print(f"| {case} | {system} | {' | '.join(cells)} |", flush=True)

    def save(self, path: Path, about: str) -> None:
        """Write them as JSON."""
        rows = [
            {"mode": mode, "case": case, "system": system, "figures": row}
            for (mode, case, system), row in self._rows.items()
        ]
        path.write_text(json.dumps({"about": about, "rows": rows}, indent=1))

    def load(self, path: Path) -> None:
        """Add the turns that were written as JSON."""
        for read in json.loads(path.read_text())["rows"]:
            row = self._rows.setdefault((read["mode"], read["case"], read["system"]), {})
            for name, turns in read["figures"].items():
                row.setdefault(name, []).extend(turns)

    def compare(self, other: Results) -> None:
        """Print the medians of another build, of this one, and what this one has of the other, pair by pair."""
        print("\n| mode | case | | | other build | this build | this / other |\n|---|---|---|---|---|---|---|")
        for (mode, case, system), row in self._rows.items():
            for column, here in row.items():
                there = other._rows.get((mode, case, system), {}).get(column, [])
                if not there:
                    continue
                cells = [spread(numbers, digits(numbers)) for numbers in (there, here)]
                pairs = [a / b for a, b in zip(here, there, strict=False) if b]
                cells.append(spread(pairs, 2) if pairs else "")
                print(f"| {mode} | {case} | {system} | {column} | {' | '.join(cells)} |", flush=True)
