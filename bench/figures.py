"""Shared by the benchmarks: formatting of figures, checks of their results, and what processes have used."""

import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["check", "conditions", "cpu_seconds", "resident_bytes", "spread", "thread_seconds"]


def spread(figures: Sequence[float], digits: int = 0) -> str:
    """Format median (minimum-maximum), of rounds or of [median, minimum, maximum]."""
    return f"{statistics.median(figures):,.{digits}f} ({min(figures):,.{digits}f}-{max(figures):,.{digits}f})"


def check(condition: bool, what: str) -> None:
    """Stop if the result of a benchmark is wrong."""
    if not condition:
        raise SystemExit(f"the benchmark's own check failed: {what}")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of the living threads of a process, to the nanosecond."""
    return sum(thread_seconds(pid).values())


def thread_seconds(pid: int) -> dict[int, float]:
    """Return the CPU time of each living thread of a process, by its id (``/proc/PID/task/*/schedstat``)."""
    found = {}
    for task in Path("/proc", str(pid), "task").glob("*/schedstat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found[int(task.parent.name)] = int(task.read_text().split()[0]) * 1e-9
    return found


def resident_bytes(pid: int) -> int:
    """Return the resident set of a process."""
    return int(psutil.Process(pid).memory_info().rss)


def conditions() -> str:
    """Describe the machine's load, which a figure is printed with."""
    return f"load averages {', '.join(f'{one:.1f}' for one in os.getloadavg())}, {os.cpu_count()} cores"
