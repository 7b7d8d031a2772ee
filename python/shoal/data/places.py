"""Places of examples in files, as texts: what `shoal.data.Reader.without` and ``shoal forget`` leave out.

    day_1.csv:7       the example of line 7; of a table (Parquet) that of row 7, counted from 1
    day_1.csv:7-12    those of lines 7 to 12
    day_1.csv:7-      those from line 7 on
    day_*.csv         all of the files of that name or pattern

Spans are the same as numbers, by file: first and last lines, ascending, each line in at most one span.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from shoal.data.files import files_of

Spans = Sequence[Sequence[int]]

_LINES = re.compile(r"(.+):([0-9]{1,18})(-([0-9]{0,18}))?", re.DOTALL)
_EXCERPT = 100
_END = sys.maxsize  # the last line of a span that goes to the end of the file


def spans_of(places: Iterable[str], files: Sequence[str], known: Mapping[str, Spans] | None = None) -> dict[str, Spans]:
    """Return the spans of places in files of these names, and those that are ``known`` already."""
    if isinstance(places, str):
        raise TypeError(f"examples are {places!r}: pass a list of places such as ['day_1.csv:7']")
    found: dict[str, list[Sequence[int]]] = {name: list(spans) for name, spans in (known or {}).items()}
    names = set(files)
    for place in places:
        lines = _LINES.fullmatch(place)
        if lines is not None and lines[1] in names:
            matching, span = [lines[1]], _span(place, lines)
        else:
            matching, span = [name for name in names if name == place or _matches(name, place)], [1, _END]
        if not matching:
            raise ValueError(
                f"{place[:_EXCERPT]!r} is in none of the {len(names):,} files of the data, {files[0]} to {files[-1]}: "
                "pass FILE:LINE, FILE:FIRST-LAST, or a name or pattern of files, with names as the data was given"
            )
        for name in matching:
            found.setdefault(name, []).append(span)
    return {name: _merged(spans) for name, spans in sorted(found.items())}


def _matches(name: str, pattern: str) -> bool:
    return bool(PurePath(pattern).parts) and PurePath(name).match(pattern)


def _span(place: str, lines: re.Match[str]) -> list[int]:
    first = int(lines[2])
    last = first if lines[3] is None else int(lines[4]) if lines[4] else _END
    if not 1 <= first <= last:
        raise ValueError(f"{place!r} names lines {lines[2]}{lines[3] or ''}: lines count from 1, and ascend")
    return [first, last]


def _merged(spans: Iterable[Sequence[int]]) -> Spans:
    merged: list[list[int]] = []
    for first, last in sorted((first, last) for first, last in spans):
        if merged and first <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    return merged


def places_of(spans: Mapping[str, Spans]) -> list[str]:
    """Return spans as places, one each."""
    return [
        f"{name}:{first}" if first == last else f"{name}:{first}-{'' if last == _END else last}"
        for name, of_file in spans.items()
        for first, last in of_file
    ]


def lines_in(spans: Spans) -> int | None:
    """Return how many lines spans have; None: one goes to the end of the file."""
    return None if spans[-1][1] == _END else sum(last - first + 1 for first, last in spans)


def read_places(where: Any) -> list[str]:
    """Read a file of places, one a line; empty lines are none."""
    with files_of(where)[0].open() as file:
        text = file.read() or b""
    lines = text.decode("utf-8", "surrogateescape").split("\n")
    return [place for line in lines if (place := line.removesuffix("\r"))]
