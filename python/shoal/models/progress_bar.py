"""Progress of a pass over the data: a bar or lines on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from shoal.base.progress import Bar
from shoal.base.streams import stderr_is_terminal, write_stderr
from shoal.metrics import Progressive, ProgressiveLine, StreamMetrics

_TERMINAL_SECONDS = 0.1  # between two updates of a bar
_FILE_SECONDS = 10.0  # if standard error is not a terminal, where every update is a line


class ProgressBar:
    """A bar on standard error: fraction of the data, examples/s, progressive log-loss, and AUC or accuracy."""

    def __init__(self, title: str, reader: object, seen: Sequence[StreamMetrics], *, show: bool) -> None:
        self._share: Callable[[], float] | None = getattr(reader, "progress", None)
        self._seen = seen
        self._begin = self._next = time.perf_counter()
        self._every = _TERMINAL_SECONDS if stderr_is_terminal() else _FILE_SECONDS
        shares = "{percentage:3.0f}% |{bar}| " if self._share else ""
        rest = "<{remaining}" if self._share else ""
        form = f"{{desc}} {shares}{{elapsed}}{rest}{{postfix}}"
        self._bar = Bar(show=show, total=1.0, desc=title, bar_format=form)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._refresh()
        self._bar.close()

    def update(self) -> None:
        """Update the bar, if enough time has passed since the last update."""
        if time.perf_counter() >= self._next:
            self._refresh()
            self._next = time.perf_counter() + self._every

    def _refresh(self) -> None:
        if self._seen[0].examples:
            self._bar.show(self._share() if self._share else 0.0, self._text)

    def _text(self, short: Callable[[float], str]) -> str:
        seen = min(self._seen, key=lambda one: one.logloss)
        rate = seen.examples / max(time.perf_counter() - self._begin, 1e-9)
        # Short enough for 80 columns.
        models = f"{len(self._seen)} models, best " if len(self._seen) > 1 else ""
        return (
            f"{short(seen.examples)} examples, {short(rate)}/s, {models}logloss {seen.logloss:.4f}, "
            f"{seen.quality_name} {seen.quality:.4f}"
        )


class ProgressLines:
    """Lines on standard error as Vowpal Wabbit prints them: mean loss since the start and since the line before."""

    def __init__(self, title: str, seen: StreamMetrics, every: float) -> None:
        self._title = title
        self._seen = seen
        self._due = Progressive(every)

    def __enter__(self) -> Self:
        write_stderr(f"{self._title}\n{Progressive.header(self._seen)}\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write(self._due.finish(self._seen))

    def update(self) -> None:
        """Write a line, if one is due."""
        self._write(self._due.update(self._seen))

    @staticmethod
    def _write(line: ProgressiveLine | None) -> None:
        if line is not None:
            write_stderr(f"{line}\n")


def show_progress(
    title: str, reader: object, seen: Sequence[StreamMetrics], progress: bool | float
) -> ProgressBar | ProgressLines:
    """Show the progress of a pass as a bar (True), not at all (False), or as lines (a number: see `ProgressLines`).

    ``seen`` has one accumulator for each model; lines show the first.
    """
    if isinstance(progress, bool):
        return ProgressBar(title, reader, seen, show=progress)
    return ProgressLines(title, seen[0], progress)
