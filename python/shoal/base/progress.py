"""Progress of reading and writing rows: a bar on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def rows_bar(title: str, total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar of rows within a block, which gets the function that adds to it.

    Parameters
    ----------
    title : str
    total : int
        Number of rows, 0 if it is unknown.
    show : bool
        Without it nothing is displayed, and the library of the bar is not imported: that takes a sixth of a
        process's start.
    """
    if not show:
        yield _show_nothing
        return
    from tqdm import tqdm

    with tqdm(total=total or None, desc=title, unit=" rows", unit_scale=True) as bar:

        def add(rows: int) -> None:
            bar.update(rows)

        yield add


def _show_nothing(rows: int) -> None:
    """Take a number of rows."""
