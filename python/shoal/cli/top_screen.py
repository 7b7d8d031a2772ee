"""The screen of ``shoal top``: curves and tables that are refreshed, scrolled and sorted.

Threads: the scheduler is asked by a thread of Textual's, since an answer may take until its deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer, Sparkline, Static, TabbedContent, TabPane

from shoal.cli.top_view import CURVES, Section, sections, summary
from shoal.errors import ShoalError

__all__ = ["TopScreen"]

_UNITS = {" B": 1.0, " KiB": 2.0**10, " MiB": 2.0**20, " GiB": 2.0**30, " TiB": 2.0**40, " µs": 1e-6, " ms": 1e-3}
_UNITS |= {" s": 1.0, " k": 1e3, " M": 1e6, " G": 1e9, " %": 1.0}


def sort_key(cell: str) -> tuple[int, float, str]:
    """Return by what a cell is sorted: numbers by their size with their unit, then text.

    Examples
    --------
    >>> sorted(["1.5 MiB", "-", "900 B", "2.0 KiB"], key=sort_key)
    ['900 B', '2.0 KiB', '1.5 MiB', '-']
    """
    number, unit = cell, 1.0
    for name, size in _UNITS.items():
        if cell.endswith(name):
            number, unit = cell.removesuffix(name), size
            break
    try:
        return (0, float(number) * unit, cell)
    except ValueError:
        return (1, 0.0, cell)


class TopScreen(App[None]):
    """Displays views of a cluster until the user ends it.

    Parameters
    ----------
    ask : callable
        Returns a new view, or raises a ShoalError. Called by another thread, one call at a time.
    view : dict
        The first view.
    interval : float
        Seconds between two calls.
    cancel : callable, optional
        Called when the screen ends: makes a pending call of ``ask`` raise its error at once.

    Attributes
    ----------
    view : dict
        The last view.
    """

    TITLE = "shoal top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("s", "sort", "Sort"),
        Binding("d", "turn_dark", "Dark or light"),
    ]
    CSS = """
    Screen { overflow: hidden; }
    TabbedContent { height: 1fr; }
    #summary { height: auto; padding: 0 1; }
    #trouble { height: auto; padding: 0 1; color: $text-error; display: none; }
    #curves { height: 5; padding: 0 1; }
    .curve { width: 1fr; margin-right: 2; }
    .curve Static { height: 1; color: $text-muted; }
    .curve Sparkline { height: 3; }
    DataTable { height: 1fr; }
    """

    def __init__(
        self,
        ask: Callable[[], dict[str, Any]],
        view: dict[str, Any],
        interval: float,
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.view = view
        self._ask = ask
        self._cancel = cancel
        self._interval = interval
        self._is_ending = False
        self._is_asking = False
        self._is_paused = False
        self._sorted: dict[int, tuple[int, bool]] = {}  # by table: a column, and whether the greatest come first

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield Static(id="summary", markup=False)
        yield Static(id="trouble", markup=False)
        with Horizontal(id="curves"):
            for name in CURVES:
                with Vertical(classes="curve"):
                    yield Static(id=f"name-{name}", markup=False)
                    yield Sparkline(id=f"curve-{name}", summary_function=max)
        with TabbedContent():
            for number, section in enumerate(sections(self.view)):
                with TabPane(section.title, id=f"tab-{number}"):
                    table: DataTable[Text] = DataTable(id=f"table-{number}", zebra_stripes=True)
                    table.add_columns(*(Text(head, justify="right") for head in section.heads))
                    yield table
        yield Footer()

    def on_mount(self) -> None:
        """Show the first view, and begin to ask for others."""
        self.show(self.view)
        self.set_interval(self._interval, self.refresh_view)

    def refresh_view(self) -> None:
        """Ask for a view, unless paused."""
        if not self._is_paused and not self._is_asking and not self._is_ending:
            self._is_asking = True
            self._fetch()

    @work(thread=True)
    def _fetch(self) -> None:
        try:
            view = self._ask()
        except ShoalError as error:
            if not self._is_ending:
                self.call_from_thread(self._complain, str(error))
        else:
            if not self._is_paused and not self._is_ending:
                self.call_from_thread(self.show, view)
        finally:
            self._is_asking = False

    def exit(self, *arguments: Any, **options: Any) -> None:
        """End the screen, and what it waits for."""
        self._is_ending = True
        super().exit(*arguments, **options)
        self._cancel()

    def _complain(self, text: str) -> None:
        trouble = self.query_one("#trouble", Static)
        trouble.update(text)
        trouble.display = bool(text)

    def show(self, view: dict[str, Any]) -> None:
        """Display a view."""
        self.view = view
        self._complain("")
        self.query_one("#summary", Static).update("\n".join(summary(view)))
        for name, (title, write) in CURVES.items():
            values = [value for value in view["history"][name] if value is not None and math.isfinite(value)]
            self.query_one(f"#curve-{name}", Sparkline).data = values
            span = f" {write(min(values))} to {write(max(values))}" if values else ""
            self.query_one(f"#name-{name}", Static).update(f"{title}{span}")
        for number, section in enumerate(sections(view)):
            self._fill(number, section)

    def _fill(self, number: int, section: Section) -> None:
        table = self.query_one(f"#table-{number}", DataTable)
        rows = section.rows
        if number in self._sorted:
            column, is_descending = self._sorted[number]
            rows = sorted(rows, key=lambda row: sort_key(row[column]), reverse=is_descending)
        cursor, scroll = table.cursor_coordinate, table.scroll_offset
        table.clear()
        table.add_rows([Text(cell, justify="right") for cell in row] for row in rows)
        table.cursor_coordinate = cursor  # held within the rows by the table
        table.scroll_to(scroll.x, scroll.y, animate=False)
        pane = self.query_one(TabbedContent).get_tab(f"tab-{number}")
        pane.label = f"{section.title} {len(rows)}" if rows else section.title

    def action_pause(self) -> None:
        """Keep the view that is displayed, or go on."""
        self._is_paused = not self._is_paused
        self._complain("paused: p goes on" if self._is_paused else "")

    def action_sort(self) -> None:
        """Sort the displayed table by the column of the cursor; a second time, the other way round."""
        active = self.query_one(TabbedContent).active
        number = int(active.removeprefix("tab-"))
        column = self.query_one(f"#table-{number}", DataTable).cursor_coordinate.column
        known, is_descending = self._sorted.get(number, (-1, False))
        self._sorted[number] = (column, not is_descending if known == column else True)
        self._fill(number, sections(self.view)[number])

    def action_turn_dark(self) -> None:
        """Change between the dark and the light theme."""
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"
