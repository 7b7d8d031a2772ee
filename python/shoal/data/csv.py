"""CSV and TSV with named columns: the header, and the format that it makes."""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from shoal import _reader
from shoal.data.columns import MISSING, Bound, Columns
from shoal.data.rows import Format, Parse, Rows

_NO_SEPARATORS = '"\r\n+-.'
_BOM = "\ufeff"


@dataclass(frozen=True, slots=True)
class _Header:
    """Finds the columns in the first line of a file."""

    columns: Columns
    separator: str
    missing: tuple[str, ...]

    def __call__(self, line: bytes) -> Parse:
        """Return what parses the other lines."""
        try:
            text = line.decode().removeprefix(_BOM).rstrip("\r")
        except UnicodeDecodeError as error:
            raise ValueError(f"the header is no UTF-8 ({error}): is this CSV?") from None
        (names,) = csv.reader([text], delimiter=self.separator) if text else ([],)
        return self.of(names)

    def of(self, names: Sequence[str]) -> Parse:
        """Return what parses lines with these columns."""
        return functools.partial(_parse, self.columns.bind(names, self.separator, self.missing))


def _parse(columns: Bound, text: memoryview, start: int, rows: Rows, skip: bool) -> tuple[int, int, int, int, int, int]:
    return _reader.parse_csv(text, start, rows, columns, skip)


def csv_format(
    columns: Columns,
    *,
    sep: str = ",",
    names: Sequence[str] | None = None,
    na_values: Sequence[str] = (),
    keep_default_na: bool = True,
) -> Format:
    """Make the format of CSV files with these columns; the parameters are those of `shoal.read_csv`."""
    if len(sep) != 1 or not sep.isascii() or sep.isalnum() or sep in _NO_SEPARATORS:
        raise ValueError(f"sep is {sep!r}: pass one sign that is neither letter, digit, quote, nor part of a number")
    if isinstance(na_values, str) or isinstance(names, str):
        raise TypeError("names and na_values are lists of text: pass ['...']")
    missing = tuple(dict.fromkeys([*(MISSING if keep_default_na else ()), *na_values]))
    header = _Header(columns, sep, missing)
    schema = columns.schema()
    if sep != ",":
        schema["sep"] = sep
    if names is not None:
        schema["names"] = list(names)
    if na_values:
        schema["na_values"] = list(na_values)
    if not keep_default_na:
        schema["keep_default_na"] = False
    return Format(
        "csv",
        None if names is None else header.of(names),
        valued=bool(columns.numeric),
        weighted=columns.weight is not None,
        header=header if names is None else None,
        pairs=columns.pairs,
        schema=schema,
    )
