"""A click log in csv, a file for each day."""

from collections.abc import Callable
from pathlib import Path

import numpy as np


def write_days(folder: Path, days: int, rows: int, user: Callable[[np.random.Generator, int, int], int]) -> list[str]:
    """Write files of columns click, user, ad and price; ``user`` takes the day and the row."""
    random = np.random.default_rng(7)
    for day in range(days):
        lines = ["click,user,ad,price"]
        for row in range(rows):
            who, ad = user(random, day, row), int(random.integers(0, 9))
            lines.append(f"{int(random.random() < 0.2 + 0.05 * ad)},u{who},a{ad},{random.random():.3f}")
        (folder / f"day_{day}.csv").write_text("\n".join(lines) + "\n")
    return [str(folder / f"day_{day}.csv") for day in range(days)]
