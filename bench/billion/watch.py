"""Measurement of a run: peak memory of each step, the times of many calls, and the raw limit of memory.

``peak`` needs Linux: it resets and reads the peak of the resident set in /proc.
"""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

PROGRAM = Path(__file__).parents[2] / "build" / "release" / "bench" / "cpp" / "raw_probe"


def resident() -> int:
    """Return the resident bytes of this process."""
    return _status("VmRSS")


@contextmanager
def step(figures: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Fill ``figures[name]`` with seconds, peak memory and page faults of a step, in addition to its own figures."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    results: dict[str, Any] = {}
    yield results
    after = resource.getrusage(resource.RUSAGE_SELF)
    figures[name] = {
        "seconds": time.perf_counter() - began,
        "peak_bytes": _status("VmHWM"),
        "resident_bytes": resident(),
        "minor_faults": after.ru_minflt - before.ru_minflt,
        "major_faults": after.ru_majflt - before.ru_majflt,
        "user_seconds": after.ru_utime - before.ru_utime,
        "system_seconds": after.ru_stime - before.ru_stime,
        **results,
    }


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def distribution(values: np.ndarray, scale: float = 1e3) -> dict[str, float]:
    """Return the distribution of values, in milliseconds if they are seconds."""
    if not len(values):
        return {}
    points = np.percentile(values, [50, 90, 99, 99.9]) * scale
    names = ("p50", "p90", "p99", "p99.9")
    return {name: round(float(x), 3) for name, x in zip(names, points, strict=True)} | {
        "max": round(float(values.max()) * scale, 3)
    }


class Growth:
    """The cost of growth for each push: times, milliseconds of moving cells and of getting memory from the system.

    The latter two are sums over the store's threads, which grow slots in parallel: a push was delayed by at most that.
    """

    def __init__(self, read: Callable[[], dict[str, int]]) -> None:
        self._read = read
        self._last = read()
        self.seconds: list[float] = []
        self.rows: list[tuple[int, float, float]] = []

    def pushed(self, seconds: float) -> None:
        """Record a push."""
        now = self._read()
        before, self._last = self._last, now
        self.seconds.append(seconds)
        self.rows.append(
            (
                now["growths"] - before["growths"],
                (now["growing_moving_ns"] - before["growing_moving_ns"]) * 1e-9,
                (now["growing_memory_ns"] - before["growing_memory_ns"]) * 1e-9,
            )
        )

    def summary(self) -> dict[str, Any]:
        """Tell the distributions, and the ten slowest pushes."""
        seconds, rows = np.array(self.seconds), np.array(self.rows).reshape(-1, 3)
        slowest = np.argsort(seconds)[::-1][:10]
        return {
            "push_ms": distribution(seconds),
            "growths": int(rows[:, 0].sum()),
            "growing_ms": distribution(rows[:, 1]),
            "memory_ms": distribution(rows[:, 2]),
            "growing_seconds": float(rows[:, 1].sum()),
            "memory_seconds": float(rows[:, 2].sum()),
            "longest_move_ms": self._last["longest_move_ns"] * 1e-6,
            "slowest": [
                {
                    "push_ms": round(float(seconds[i]) * 1e3, 2),
                    "growths": int(rows[i, 0]),
                    "growing_ms": round(float(rows[i, 1]) * 1e3, 2),
                    "memory_ms": round(float(rows[i, 2]) * 1e3, 2),
                }
                for i in slowest
            ],
        }


class Raw:
    """Random cache lines a second, in regions of another process, whose memory is separate from this one's.

    Without the program, or without regions, it measures nothing.
    """

    def __init__(self, threads: int, regions: list[int]) -> None:
        self.regions = regions
        self.touch_gb_per_second = float("nan")
        self._process: subprocess.Popen[str] | None = None
        if regions:
            self._process = subprocess.Popen(
                [str(PROGRAM), str(threads), *map(str, regions)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.touch_gb_per_second = float(self._line())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate()  # it ends when its input ends

    def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{PROGRAM} ended: it takes {sum(self.regions) / 1e9:.1f} GB of memory")
        return line

    def rates(self) -> list[tuple[float, float]]:
        """Measure now: for each region millions of lines read, and read and written, a second."""
        if self._process is None:
            return []
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        numbers = [float(x) for x in self._line().split()]
        return list(zip(numbers[::2], numbers[1::2], strict=True))
