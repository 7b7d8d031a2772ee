"""Notebook representation of objects: names and values in an HTML table."""

import html
from collections.abc import Iterable


def table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """Format names and values; all text is escaped.

    Examples
    --------
    >>> table("a < b", [("examples", "1,000")])
    '<table><caption>a &lt; b</caption><tr><th>examples</th><td>1,000</td></tr></table>'
    """
    lines = [f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows]
    return f"<table><caption>{html.escape(title)}</caption>{''.join(lines)}</table>"
