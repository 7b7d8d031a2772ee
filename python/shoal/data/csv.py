"""CSV and TSV with named columns: the header, and the parser that it selects."""

from __future__ import annotations

import csv
import functools
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import structs

from shoal import _reader
from shoal.data.columns import CATEGORICAL, LIST, MISSING, NUMERIC, VECTOR, BoundColumns, Columns, Texts, texts_of
from shoal.data.rows import Format, Parse, RowBuffer
from shoal.data.spelling import of_cells

_log = logging.getLogger(__name__)

_NO_SEPARATORS = '"\r\n+-.'
_BOM = "\ufeff"
_LOOKED_BYTES = 1 << 16
_LOOKED_LISTS = 20
_SEPARATORS = ",;\t|"  # that a file of another separator has, most likely
CR_ALONE = (
    "a carriage return (CR) stands within the first line: if lines end with it alone, write newlines, as "
    "tr '\\r' '\\n' does"
)


class _Header(msgspec.Struct, frozen=True):
    """Finds the columns in the first line of a file."""

    columns: Columns
    separator: str
    list_separator: str
    missing: tuple[str, ...]
    numeric: dict[int, str] = msgspec.field(default_factory=dict)  # names of the columns that were found, by number
    categorical: dict[int, str] = msgspec.field(default_factory=dict)
    looked: set[str] = msgspec.field(default_factory=set)  # names of columns that were looked at for lists

    def __call__(self, line: bytes, labelled: bool) -> Parse:
        """Return what parses the other lines, which need a label if ``labelled``."""
        return self._parser(self._bind(header_names(line, self.separator), labelled=labelled))

    def of(self, names: Sequence[str]) -> Parse:
        """Return what parses lines with these columns, in files without a header; some may lack the label."""
        bound = self._bind(names, labelled=self.columns.label is not None)
        others = [name for name in names if name != self.columns.label]
        if others and len(others) < len(names):
            bound = structs.replace(bound, unlabelled=self._bind(others, labelled=False))
        return self._parser(bound)

    def _bind(self, names: Sequence[str], *, labelled: bool) -> BoundColumns:
        return self.columns.bind(names, self.separator, self.list_separator, self.missing, labelled=labelled)

    def _parser(self, bound: BoundColumns) -> Parse:
        names = bound.names
        for name, number, kind in zip(names, bound.fields.tolist(), bound.kinds.tolist(), strict=True):
            if kind == LIST:
                self.categorical[number] = self.columns.lists[name]
            elif kind in (NUMERIC, CATEGORICAL, VECTOR):
                (self.categorical if kind == CATEGORICAL else self.numeric)[number] = name
        return functools.partial(_parse, bound, self.looked)


def header_names(line: bytes, separator: str) -> list[str]:
    """Return the names of the columns in the first line of a file."""
    try:
        text = line.decode().removeprefix(_BOM).rstrip("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"the header is not UTF-8 ({error}): is this CSV?") from None
    try:
        (names,) = csv.reader([text], delimiter=separator, strict=True) if text else ([],)
    except (csv.Error, ValueError) as error:
        if "\r" in text:
            raise ValueError(CR_ALONE) from None
        raise ValueError(f"the header is not a row of column names ({error}): is this CSV?") from None
    other = next((other for other in _SEPARATORS if other != separator and other in text), None)
    if len(names) == 1 and other is not None:
        raise ValueError(
            f"the header has no {separator!r}, and {text.count(other)} times {other!r}: pass sep={other!r} (--sep)"
        )
    return names


def _parse(
    columns: BoundColumns, looked: set[str], text: memoryview, start: int, rows: RowBuffer, skip: bool
) -> tuple[int, int, int, int, int, int]:
    if rows.labelled and not looked:
        looked.update(columns.names)
        _warn_of_lists(columns, bytes(text[start : start + _LOOKED_BYTES]))
    return _reader.parse_csv(text, start, rows, columns, skip)


def _warn_of_lists(columns: BoundColumns, text: bytes) -> None:
    """Warn of columns whose cells are lists, and are hashed as one text each."""
    separator, between = bytes([columns.separator]), bytes([columns.list_separator])
    rows = [line.split(separator) for line in text.split(b"\n")[:-1]]
    rows = [row for row in rows if len(row) == len(columns.names)]
    for i, (name, kind) in enumerate(zip(columns.names, columns.kinds.tolist(), strict=True)):
        lists = sum(between in row[i] for row in rows) if kind == CATEGORICAL else 0
        if lists >= _LOOKED_LISTS and lists * 5 >= len(rows):
            _log.warning(
                "column %r looks like lists: %d of its first %d cells have %r in them, and each cell is one feature; "
                "lists={%r: %r}, or a feature of type list for shoal train ctr, makes one of each item",
                *(name, lists, len(rows), between.decode(), name, name),
            )


def csv_format(
    columns: Columns,
    *,
    sep: str = ",",
    list_separator: str = "|",
    names: Sequence[str] | None = None,
    na_values: Texts = (),
    keep_default_na: bool = True,
) -> Format:
    """Make the format of CSV files; the parameters are those of `shoal.read_csv`, ``names`` being its ``columns``."""
    if len(sep) != 1 or not sep.isascii() or sep.isalnum() or sep in _NO_SEPARATORS:
        raise ValueError(f"sep is {sep!r}: pass one character that is not a letter, digit, quote or part of a number")
    if len(list_separator) != 1 or not list_separator.isascii() or list_separator in '"\r\n':
        raise ValueError(f"list_separator is {list_separator!r}: pass a character that is not a quote or a newline")
    has_lists = bool(columns.lists or columns.vectors)
    if columns.vectors and (list_separator.isalnum() or list_separator in _NO_SEPARATORS):
        raise ValueError(
            f"list_separator is {list_separator!r}, which may be part of a number of a vector: pass another character"
        )
    if has_lists and list_separator == sep:
        raise ValueError(f"list_separator is {list_separator!r}, as sep is: pass another character")
    if isinstance(names, str):
        raise TypeError("columns is a list of names: pass ['...']")
    na_texts = texts_of(na_values)
    missing = tuple(dict.fromkeys([*(MISSING if keep_default_na else ()), *na_texts]))
    header = _Header(columns, sep, list_separator, missing)
    schema = columns.schema()
    if sep != ",":
        schema["sep"] = sep
    if has_lists and list_separator != "|":
        schema["list_separator"] = list_separator
    if names is not None:
        schema["columns"] = list(names)
    if na_texts:
        schema["na_values"] = list(na_texts)
    if not keep_default_na:
        schema["keep_default_na"] = False

    return Format(
        "csv",
        None if names is None else header.of(names),
        valued=bool(columns.numeric or columns.vectors or columns.labels),
        weighted=columns.weight is not None,
        header=header if names is None else None,
        pairs=columns.pairs,
        spell=functools.partial(of_cells, header.categorical, header.numeric),
        schema=schema,
        labelled=columns.label is not None,
        of_labels=None
        if columns.label is None
        else functools.partial(
            csv_format,
            Columns(label=None, categorical=[str(columns.label)]),
            sep=sep,
            names=names,
            na_values=na_texts,
            keep_default_na=keep_default_na,
        ),
        others=None if columns.categorical is not None else functools.partial(_others, columns, header, names),
        with_columns=None
        if columns.categorical is not None
        else functools.partial(
            _with_columns,
            columns,
            sep=sep,
            list_separator=list_separator,
            names=names,
            na_values=na_texts,
            keep_default_na=keep_default_na,
        ),
    )


def _others(columns: Columns, header: _Header, names: Sequence[str] | None, line: bytes | None) -> list[str]:
    """Return the columns of which nothing is said."""
    found = names if names is not None else [] if line is None else header_names(line, header.separator)
    return columns.resolved(found)


def _with_columns(columns: Columns, categorical: Sequence[str], **how: Any) -> Format:
    """Make the format of files with these categorical columns."""
    return csv_format(structs.replace(columns, categorical=list(categorical)), **how)
