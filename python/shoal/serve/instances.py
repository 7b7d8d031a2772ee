"""JSON instances to examples.

    {"instances": [{"keys": [17, 4711], "values": [1, 0.5]},       by keys
                   {"site": "a.com", "price": 0.5},                by columns
                   "0 17:1 4711:0.5"]}                             a line as in the training data

Every instance is decoded by itself, so that its features depend on it alone. The cells of a
column are collected over all instances and hashed at once: time and memory are linear in the cells that were sent.

Threads: pure functions.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.base.decoders import json_decoder
from shoal.data import Batch, hash_strings
from shoal.data.columns import CATEGORICAL, LABEL, LIST, NUMERIC, PASSED_OVER, VECTOR, missing_numbers
from shoal.data.criteo import INTEGER_COLUMNS
from shoal.data.hashing import MISSING_TEXT, hash_cells, number_of_text, texts_of_numbers
from shoal.data.readers import field_number
from shoal.serve.inputs import CRITEO_COLUMNS, Examples, InputSpec, criteo_column, to_batch
from shoal.serve.limits import Account, RequestError
from shoal.serve.lines import of_lines

_VALUE_BYTES = 96  # of a JSON value as a Python object, with its entry in a dictionary
_EXCERPT = 80
_WHOLE = re.compile(r"[+-]?\d{1,24}", re.ASCII)
_LARGEST = float(np.finfo(np.float32).max)
_POSITION = re.compile(r"\(byte (\d+)\)$")  # in the errors of msgspec
_CONSTANT = re.compile(rb"NaN|nan|Infinity|Inf|inf")  # as json.dumps and others write floats
_LINE_ENDS = re.compile(r"[\t\r\n]")


class _Sparse(msgspec.Struct, forbid_unknown_fields=True):
    """An instance by its keys."""

    keys: list[int]
    values: list[float] | None = None
    fields: list[int | str] | None = None


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    """A body."""

    instances: list[msgspec.Raw]


_REQUEST = json_decoder(_Request)
_SPARSE = json_decoder(_Sparse)
_ANY = json_decoder(Any)


def decode_json(body: bytes | bytearray, spec: InputSpec, account: Account, unknown: set[str]) -> Batch:
    """Make a batch of a body of JSON, and add the columns that the model does not know to ``unknown``."""
    account.decoded(json_bytes(body))
    try:
        raws = _REQUEST.decode(body).instances
    except RecursionError:
        raise RequestError("the body is nested too deeply: an instance is a flat object, or a line of text") from None
    except msgspec.DecodeError as error:
        raise RequestError(_malformed(body, str(error))) from None
    return decode_instances(raws, spec, account, unknown)


def json_bytes(body: bytes | bytearray) -> int:
    """Return an upper bound of the memory of a body of JSON, decoded."""
    return _VALUE_BYTES * (1 + body.count(b",") + body.count(b"[") + body.count(b"{"))


def decode_instances(instances: Sequence[Any], spec: InputSpec, account: Account, unknown: set[str]) -> Batch:
    """Make a batch of instances, each as JSON (`msgspec.Raw`) or decoded."""
    if not instances:
        raise RequestError("no instances: send at least one")
    sparse, named, lines = _SparseRows(spec), _NamedRows(spec, unknown), _LineRows(spec)
    for number, instance in enumerate(instances):
        try:
            _add(number, instance, sparse, named, lines)
        except RequestError as error:
            place = "," if isinstance(error, _ColumnError) else ":"
            raise RequestError(f"instance {number}{place} {error}") from None
        except RecursionError:
            raise RequestError(f"instance {number}: nested too deeply: an instance is a flat object") from None
        except msgspec.MsgspecError as error:
            raise RequestError(f"instance {number}: {error}") from None
    parts = [*sparse.examples(account), *named.examples(account), *lines.examples(account)]
    return to_batch(parts, len(instances))


def _add(number: int, given: Any, sparse: _SparseRows, named: _NamedRows, lines: _LineRows) -> None:
    """Decode one instance by its form."""
    spec = sparse.spec
    if spec.columns is None and not spec.is_criteo:
        try:
            is_json = isinstance(given, msgspec.Raw)
            sparse.add(number, _SPARSE.decode(given) if is_json else msgspec.convert(given, _Sparse))
            return
        except msgspec.ValidationError as error:
            fault = str(error)
    else:
        fault = ""
    instance = _ANY.decode(given) if isinstance(given, msgspec.Raw) else given
    if isinstance(instance, str):
        lines.add(number, instance.encode())
    elif not isinstance(instance, dict):
        raise RequestError(f"an instance is an object or a line of text, got {_excerpt(instance)}: {spec}")
    elif isinstance(instance.get("keys"), list) and spec.role("keys") in (PASSED_OVER, LABEL, spec.others):
        sparse.add(number, msgspec.convert(instance, _Sparse))
    elif spec.columns is not None:
        named.add(number, instance)
    elif spec.is_criteo:
        lines.add(number, _criteo_line(instance))
    else:
        raise RequestError(f"{fault}: {spec}")


class _ColumnError(RequestError):
    """A cell that cannot be used: the message begins with the position of the column."""

    def __init__(self, column: str, what: str) -> None:
        super().__init__(f"column {_excerpt(column)}: {what}")


class _SparseRows:
    """Instances by their keys."""

    def __init__(self, spec: InputSpec) -> None:
        self.spec = spec
        self._numbers: list[int] = []
        self._lengths: list[int] = []
        self._keys = array("Q")
        self._values: array[float] | None = None
        self._fields = array("Q")
        self._known: dict[int | str, int] = {}

    def add(self, number: int, one: _Sparse) -> None:
        count = len(one.keys)
        for name, given in (("values", one.values), ("fields", one.fields)):
            if given is not None and len(given) != count:
                raise RequestError(f"{count} keys and {len(given)} {name}: send one for each key")
        before = len(self._keys)
        try:
            self._keys.extend(one.keys)
        except OverflowError:
            bad = next(key for key in one.keys if not 0 <= key < 1 << 64)
            raise RequestError(f"{bad} is not a key: keys are whole numbers from 0 to 2^64 - 1") from None
        if one.values is not None and self._values is None:
            self._values = array("f", bytes(4 * before))
            np.frombuffer(self._values, np.float32)[:] = 1
        if self._values is not None:
            self._values.extend([1.0] * count if one.values is None else one.values)
        if one.values is not None and any(not -_LARGEST <= value <= _LARGEST for value in one.values):
            raise RequestError("values must be finite as float32")
        self._add_fields(one)
        self._numbers.append(number)
        self._lengths.append(count)

    def _add_fields(self, one: _Sparse) -> None:
        form = self.spec.fields_of
        if form is None:
            if one.fields is not None:
                raise RequestError("this model takes no fields: send keys and values alone")
            return
        if one.fields is None:
            raise RequestError(f"no fields, and this model needs the field of each key: {self.spec}")
        for name in one.fields:
            if name not in self._known:
                try:
                    self._known[name] = int(np.uint64(field_number(form, name)))
                except (ValueError, OverflowError) as error:
                    raise RequestError(f"{_excerpt(name)} is not a field: {error}") from None
        self._fields.extend([self._known[name] for name in one.fields])

    def examples(self, account: Account) -> Iterator[Examples]:
        if self._numbers:
            made = Examples(
                np.array(self._numbers, np.int64),
                _indptr(self._lengths),
                np.frombuffer(self._keys, np.uint64),
                None if self._values is None else np.frombuffer(self._values, np.float32),
                np.frombuffer(self._fields, np.uint64) if self.spec.needs_fields else None,
            )
            yield self.spec.batch(made, account)


class _Column:
    """The cells of one column: the feature of each, and its text."""

    __slots__ = ("places", "texts")

    def __init__(self) -> None:
        self.places: list[int] = []
        self.texts: list[str] = []


class _NamedRows:
    """Instances by columns of csv, Parquet or Arrow."""

    def __init__(self, spec: InputSpec, unknown: set[str]) -> None:
        self.spec = spec
        self._unknown = unknown
        self._numbers: list[int] = []
        self._lengths: list[int] = []
        self._columns: dict[str, _Column] = {}
        self._count = 0
        self._missing_numbers = frozenset(missing_numbers(spec.missing))
        self._numeric: list[tuple[int, float]] = []  # features, and their values
        self._floats: list[tuple[list[str], int, float]] = []  # texts that become numbers, all at once

    def add(self, number: int, instance: dict[str, Any]) -> None:
        before, spec, columns, missing = self._count, self.spec, self._columns, self.spec.missing
        for name, cell in instance.items():
            role = spec.role(name)
            if role == CATEGORICAL and type(cell) is str and name in columns:  # the usual case, at once
                if cell not in missing:
                    column = columns[name]
                    column.texts.append(cell)
                    column.places.append(self._count)
                    self._count += 1
                continue
            if role == PASSED_OVER:
                self._unknown.update(spec.unknown([name]))
                continue
            if cell is None or role == LABEL:
                continue
            if self._is_missing(cell):
                continue
            if role == NUMERIC:
                self._put_number(name, _number(name, cell))
            elif role in (LIST, VECTOR):
                self._add_list(name, cell, role)
            else:
                self._put(name, cell)
        self._numbers.append(number)
        self._lengths.append(self._count - before)

    def _is_missing(self, cell: Any) -> bool:
        if isinstance(cell, str):
            return cell in self.spec.missing
        return isinstance(cell, int | float) and not isinstance(cell, bool) and cell in self._missing_numbers

    def _add_list(self, name: str, cells: Any, role: int) -> None:
        if not isinstance(cells, list):
            raise _ColumnError(name, f"{_excerpt(cells)} is not a list, and this column holds lists")
        for cell in cells:
            # In csv an item of no bytes is missing; elsewhere it is a text, but no number.
            empty_is_missing = self.spec.format == "csv" or role == VECTOR
            missing = cell is None or self._is_missing(cell) or (cell == "" and empty_is_missing)
            if role == VECTOR:
                self._put_number(name, 0.0 if missing else _number(name, cell))
            else:
                self._put(name, MISSING_TEXT if missing else cell)

    def _put_number(self, name: str, number: float) -> None:
        """Add a feature of a column of numbers."""
        self._numeric.append((self._count, number))
        self._put(name, "")

    def _put(self, name: str, cell: Any) -> None:
        """Add a feature."""
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = _Column()
        if isinstance(cell, str):
            text = cell
        elif cell is True or cell is False:
            text = "true" if cell else "false"
        elif isinstance(cell, int):
            text = str(cell)
        elif isinstance(cell, float):
            text = ""
            self._floats.append((column.texts, len(column.texts), cell))
        else:
            raise _ColumnError(name, f"{_excerpt(cell)} is not a cell: send text, a number, true, false or null")
        column.texts.append(text)
        column.places.append(self._count)
        self._count += 1

    def examples(self, account: Account) -> Iterator[Examples]:
        if not self._numbers:
            return
        if self._floats:
            texts = texts_of_numbers([number for _, _, number in self._floats])
            for (column, i, _), text in zip(self._floats, texts, strict=True):
                column[i] = text
        assert self.spec.columns is not None
        shared = self.spec.columns.lists
        columns = self._columns.values()
        fields = hash_strings(list(self._columns))
        hashed = hash_strings([shared.get(name, name) for name in self._columns]) if shared else fields
        hashes = [hash_cells(one.texts, field) for one, field in zip(columns, hashed.tolist(), strict=True)]
        places = [place for one in columns for place in one.places]
        keys, of = np.empty(self._count, np.uint64), np.empty(self._count, np.uint64)
        if places:
            keys[places] = np.concatenate(hashes)
            of[places] = np.repeat(fields, [len(one.places) for one in columns])
        values = None
        if self.spec.columns.numeric or self.spec.columns.vectors:
            values = np.ones(self._count, np.float32)
            if self._numeric:
                values[[place for place, _ in self._numeric]] = [number for _, number in self._numeric]
        made = Examples(np.array(self._numbers, np.int64), _indptr(self._lengths), keys, values, of)
        yield self.spec.batch(made, account, crossed=False)


class _LineRows:
    """Instances that are lines, read by the parser that read the training data."""

    def __init__(self, spec: InputSpec) -> None:
        self.spec = spec
        self._numbers: list[int] = []
        self._lines: list[bytes] = []

    def add(self, number: int, line: bytes) -> None:
        if self.spec.lines is None:
            raise RequestError(f"a line of text, {_excerpt(line.decode('utf-8', 'backslashreplace'))}: {self.spec}")
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if b"\n" in line:
            raise RequestError("a line break within a line: send an instance for each line")
        if not line.strip():
            raise RequestError("a blank line, which holds no example")
        self._lines.append(line)
        self._numbers.append(number)

    def examples(self, account: Account) -> Iterator[Examples]:
        if self._lines:
            numbers = np.array(self._numbers, np.int64)
            yield of_lines(b"\n".join([*self._lines, b""]), self.spec, account, numbers)


def _criteo_line(instance: dict[str, Any]) -> bytes:
    """Write these cells as a line of Criteo's logs."""
    cells = [b"0", *[b""] * len(CRITEO_COLUMNS)]
    seen: dict[int, str] = {}
    for name, cell in instance.items():
        try:
            column = criteo_column(name)
        except ValueError:
            raise _ColumnError(
                name, "no column of Criteo's logs: they are 1 to 39, or I1 to I13 and C1 to C26"
            ) from None
        if column == 0:
            continue
        if column in seen:
            raise _ColumnError(name, f"sent twice, as {seen[column]!r} too")
        seen[column] = name
        if cell is None:
            continue
        if isinstance(cell, float) and cell.is_integer():
            cell = int(cell)
        if isinstance(cell, bool) or not isinstance(cell, str | int):
            raise _ColumnError(name, f"{_excerpt(cell)} is not a cell: send text, a whole number or null")
        text = str(cell)
        if column <= INTEGER_COLUMNS and text and not (_WHOLE.fullmatch(text) and abs(int(text)) < 1 << 63):
            raise _ColumnError(name, f"{_excerpt(cell)} is not a whole number below 2^63")
        if _LINE_ENDS.search(text):
            raise _ColumnError(
                name, f"{_excerpt(cell)} has a tab or an end of line, which a cell of Criteo's cannot have"
            )
        cells[column] = text.encode()
    return b"\t".join(cells)


def _malformed(body: bytes | bytearray, what: str) -> str:
    """Describe malformed JSON; ``what`` ends with the position."""
    position = _POSITION.search(what)
    if position and (constant := _CONSTANT.match(body, int(position[1]))):
        return f"{what}: JSON has no {constant[0].decode()}, send null for a cell that is missing"
    return what


def _number(name: str, cell: Any) -> float:
    """Return the number of a cell."""
    if isinstance(cell, str):
        try:
            return number_of_text(cell)
        except ValueError as error:
            raise _ColumnError(name, f"{_excerpt(cell)} {error}") from None
    if not isinstance(cell, int | float):
        raise _ColumnError(name, f"{_excerpt(cell)} is not a number")
    number = float(cell)
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(number)):
            raise _ColumnError(name, f"{_excerpt(cell)} is not finite as float32")
    return number


def _indptr(lengths: list[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _excerpt(cell: object) -> str:
    if isinstance(cell, list | dict):
        return "a list" if isinstance(cell, list) else "an object"
    text = repr(cell) if not isinstance(cell, str) or len(cell) <= _EXCERPT else repr(cell[:_EXCERPT]) + "..."
    return text if not isinstance(cell, bool) else text.lower()
