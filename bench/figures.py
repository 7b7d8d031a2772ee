"""Shared by the benchmarks: formatting of figures, and checks of their results."""

import statistics
from collections.abc import Sequence

__all__ = ["check", "spread"]


def spread(figures: Sequence[float], digits: int = 0) -> str:
    """Format median (minimum-maximum), of rounds or of [median, minimum, maximum]."""
    return f"{statistics.median(figures):,.{digits}f} ({min(figures):,.{digits}f}-{max(figures):,.{digits}f})"


def check(condition: bool, what: str) -> None:
    """Stop if the result of a benchmark is wrong."""
    if not condition:
        raise SystemExit(f"the benchmark's own check failed: {what}")
