"""Bars of progress on standard error. A bar that cannot be shown any more gives up; the work goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shoal.base.streams import TROUBLE


class Bar:
    """A bar of tqdm, until standard error fails."""

    def __init__(self, *, show: bool, **options: Any) -> None:
        self._bar: Any = None
        if show and sys.stderr is not None:
            from tqdm import tqdm

            with self._until_it_fails():
                self._bar = tqdm(**options, delay=1e-9)  # it shows nothing yet

    def add(self, amount: float) -> None:
        """Add to what is done."""
        if self._bar is not None:
            with self._until_it_fails():
                self._bar.update(amount)

    def show(self, done: float, text: Callable[[Callable[[float], str]], str]) -> None:
        """Show how much is done, and a text, which is made with a function that abbreviates numbers."""
        if self._bar is not None:
            with self._until_it_fails():
                self._bar.n = done
                self._bar.set_postfix_str(text(self._bar.format_sizeof))

    def close(self) -> None:
        """Leave the bar as it was shown last."""
        if self._bar is not None:
            with self._until_it_fails():
                self._bar.close()
        self._bar = None

    @contextmanager
    def _until_it_fails(self) -> Iterator[None]:
        try:
            yield
        except TROUBLE:
            if self._bar is not None:
                self._bar.disable = True  # it would write again when it is deleted
            self._bar = None


@contextmanager
def rows_bar(title: str, total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar of rows within a block, which gets the function that adds to it; ``total`` is 0 if unknown."""
    bar = Bar(show=show, total=total or None, desc=title, unit=" rows", unit_scale=True)
    try:
        yield bar.add
    finally:
        bar.close()
