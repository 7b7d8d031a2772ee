"""Columns: which named columns are the label, the weight and the features; for CSV as for Arrow.

A column is a field: its number is `shoal.hash_strings` of its name, so that the order of columns does not matter, nor
columns that were not asked for.

    categorical   key(field, text of the cell), value 1; docs/readers.md has the text of a cell with any value
    numeric       key(field, no text), value the cell's number
    list          for each text of the cell: key(field it shares, text), value 1
    vector        for each number of the cell: key(field, no text), value the number
    missing       not a feature; in a list, the key of `hashing.MISSING_TEXT`, and in a vector the value 0, so that the
                  others keep their places
"""

from __future__ import annotations

import contextlib
import numbers
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from shoal import _core, _reader
from shoal.data.hashing import texts_of_numbers
from shoal.data.interactions import Field, Interactions, Pairs, field_of, named_pairs, pairs_of

PASSED_OVER, LABEL, WEIGHT, NUMERIC, CATEGORICAL, LIST, VECTOR = range(7)  # as csrc/text/csv.h has them

PLACE = "\ue000"  # begins the names of columns that a reader adds to a table

MISSING = _core.MISSING_TEXTS  # cells that hold nothing, as in pandas

# Texts, or values that stand for theirs.
Texts = Sequence[str | float]


def text_of(value: object) -> str:
    """Return the text of a cell with a value."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return texts_of_numbers([float(value)])[0]
    raise TypeError(f"{value!r} is neither a text nor a number")


def texts_of(values: Texts) -> tuple[str, ...]:
    """Return the texts of ``na_values``."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"na_values is {values!r}: pass a list of texts or numbers, ['...']")
    try:
        return tuple(dict.fromkeys(map(text_of, values)))
    except TypeError as error:
        raise TypeError(f"na_values: {error}: pass texts or numbers") from None


def missing_texts(form: str | None, schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts that hold nothing in data of this format and schema."""
    usual = MISSING if form == "csv" and schema.get("keep_default_na", True) else ()
    return tuple(dict.fromkeys([*usual, *schema.get("na_values", ())]))


def missing_numbers(texts: Iterable[str]) -> list[float]:
    """Return the numbers whose texts hold nothing."""
    found = []
    for text in texts:
        with contextlib.suppress(ValueError):
            found.append(float(text))
    return found


class BoundColumns(msgspec.Struct, frozen=True):
    """Columns found in a file: what `shoal._reader.parse_csv` calls ``columns``."""

    # Of all columns of the file, in its order.
    names: tuple[str, ...]
    # PASSED_OVER, LABEL, WEIGHT, NUMERIC, CATEGORICAL, LIST or VECTOR.
    kinds: NDArray[np.uint8]
    fields: NDArray[np.uint64]
    # The field that a column's texts are hashed in: its own, but for a list that shares another's.
    hashed: NDArray[np.uint64]
    # The byte between cells.
    separator: int
    # The byte between the items of a list or a vector.
    list_separator: int
    # Cells that hold nothing.
    missing: tuple[bytes, ...]
    # The label that counts as 1; None: labels are numbers.
    positive: bytes | None
    # Columns of a line that lacks the label, where labels are not read and there is no header that names one.
    unlabelled: BoundColumns | None = None


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """The requested columns: the parameters of `shoal.read_csv` and other readers that name columns."""

    label: str | None
    categorical: Sequence[str] | None = None
    numeric: Sequence[str] = ()
    weight: str | None = None
    positive: str | float | None = None
    lists: Mapping[str, str] = msgspec.field(default_factory=dict)
    vectors: Sequence[str] = ()
    labels: Sequence[str] = ()
    interactions: Interactions = ()

    def __post_init__(self) -> None:
        if self.positive is not None:
            structs.force_setattr(self, "positive", text_of(self.positive))
        for name, given in (
            ("categorical", self.categorical),
            ("numeric", self.numeric),
            ("vectors", self.vectors),
            ("labels", self.labels),
        ):
            if isinstance(given, str) or not all(isinstance(column, str) for column in given or ()):
                raise TypeError(f"{name} is {given!r}: pass a list of names of columns")
        texts = self.lists.items() if isinstance(self.lists, Mapping) else [("", None)]
        if not all(isinstance(name, str) and isinstance(shared, str) for name, shared in texts):
            raise TypeError(f'lists is {self.lists!r}: pass {{"column": "column whose keys it shares"}}')
        roles = [*self.numeric, *(self.categorical or ()), *self.lists, *self.vectors, *self.labels]
        roles += [] if self.label is None else [self.label]
        roles += [] if self.weight is None else [self.weight]
        for column in roles:
            if roles.count(column) > 1:
                raise ValueError(
                    f"column {column!r} has two roles: it can be label, weight, category, number, list or vector"
                )
        for column in self._interacting():
            if column in self.vectors:
                raise ValueError(
                    f"column {column!r} of an interaction is a vector, and the numbers of a vector are combined with "
                    "nothing: leave it out of the interactions"
                )
            known = self.categorical is None or column in (*self.categorical, *self.numeric, *self.lists)
            if not known or column in (self.label, self.weight):
                raise ValueError(
                    f"column {column!r} of an interaction is not a feature: name it as categorical, numeric or a list"
                )

    def _interacting(self) -> list[str]:
        names = [name for pair in named_pairs(self.interactions) for name in pair]
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"interactions holds {name!r}: pass names of columns")
        return [str(name) for name in names]

    @property
    def pairs(self) -> Pairs:
        """The numbers of the fields that interact."""
        return pairs_of(self.interactions, _number)

    def schema(self) -> dict[str, Any]:
        """Return the options that differ from the defaults, as JSON."""
        schema: dict[str, Any] = {} if self.label is None else {"label": self.label}
        if self.categorical is not None:
            schema["categorical"] = list(self.categorical)
        if self.numeric:
            schema["numeric"] = list(self.numeric)
        if self.weight is not None:
            schema["weight"] = self.weight
        if self.positive is not None:
            schema["positive"] = self.positive
        if self.lists:
            schema["lists"] = dict(self.lists)
        if self.vectors:
            schema["vectors"] = list(self.vectors)
        if self.labels:
            schema["labels"] = list(self.labels)
        if pairs := named_pairs(self.interactions):
            schema["interactions"] = [list(pair) for pair in pairs]
        return schema

    def resolved(self, names: Sequence[str]) -> list[str]:
        """Return the categorical columns of a file with these columns."""
        kinds = self.kinds_of(names, labelled=False)
        return list(dict.fromkeys(name for name, kind in zip(names, kinds, strict=True) if kind == CATEGORICAL))

    def kinds_of(self, names: Sequence[str], *, labelled: bool = True) -> list[int]:
        """Return the role of each column of a file."""
        roles: Mapping[str, int] = {
            **dict.fromkeys(self.categorical or (), CATEGORICAL),
            **dict.fromkeys(self.numeric, NUMERIC),
            **dict.fromkeys(self.lists, LIST),
            **dict.fromkeys(self.vectors, VECTOR),
        }
        answers = {
            **({} if self.weight is None else {self.weight: WEIGHT}),
            **({} if self.label is None else {self.label: LABEL}),
            **dict.fromkeys(self.labels, NUMERIC),
        }
        roles = {**roles, **answers} if labelled else roles
        others = CATEGORICAL if self.categorical is None else PASSED_OVER
        passed_over = {**dict.fromkeys(answers, PASSED_OVER), **roles}
        kinds = [passed_over.get(name, others) for name in names]
        counts = Counter(names)
        used = [name for name, kind in zip(names, kinds, strict=True) if kind != PASSED_OVER]
        for column in dict.fromkeys([*roles, *self._interacting(), *used]):
            if counts[column] != 1:
                count = f"there {counts[column]} times" if column in counts else "not there"
                raise ValueError(f"column {column!r} is {count}: the columns are {listed(names)}")
        return kinds

    def bind(
        self, names: Sequence[str], separator: str, list_separator: str, missing: Iterable[str], *, labelled: bool
    ) -> BoundColumns:
        """Find the columns in a file of text."""
        return BoundColumns(
            tuple(names),
            np.array(self.kinds_of(names, labelled=labelled), np.uint8),
            np.array([field_of(name) for name in names], np.uint64),
            np.array([field_of(self.lists.get(name, name)) for name in names], np.uint64),
            ord(separator),
            ord(list_separator),
            tuple(cell.encode() for cell in missing),
            None if self.positive is None else _reader.cell_text(str(self.positive).encode()),
        )


def schema_items(schema: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the options of the function that made a reader, as names and values to be printed."""
    lines = []
    for name, value in schema.items():
        items = value if isinstance(value, list) else [value]
        texts = [" * ".join(map(str, item)) if isinstance(item, list | tuple) else str(item) for item in items]
        lines.append((name.replace("_", " "), ", ".join(repr(t) if t.strip() != t or not t else t for t in texts)))
    return lines


def _number(name: Field) -> int:
    return field_of(str(name))


def listed(names: Sequence[str], most: int = 40) -> str:
    """Return names of columns for a message."""
    names = [name for name in names if not name.startswith(PLACE)]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more
