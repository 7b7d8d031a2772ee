"""What the benchmarks share: how figures are told, and where a wrong result ends them."""

import statistics
from collections.abc import Sequence

__all__ = ["check", "spread"]


def spread(figures: Sequence[float], digits: int = 0) -> str:
    """Write median (least-most), of rounds or of [median, least, most]."""
    return f"{statistics.median(figures):,.{digits}f} ({min(figures):,.{digits}f}-{max(figures):,.{digits}f})"


def check(condition: bool, what: str) -> None:
    """Stop where a benchmark's own result is wrong."""
    if not condition:
        raise SystemExit(f"the benchmark's own check failed: {what}")
