"""Bodies of text, read as the files that they would be: lines of the training data's format, and rows of csv.

Threads: pure functions.
"""

from __future__ import annotations

import csv
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from shoal.data import Batch
from shoal.data.csv import header_names
from shoal.data.fill import MalformedLineError, parse_text
from shoal.serve.inputs import CRITEO_COLUMNS, MOST_COLUMNS, Examples, InputSpec, to_batch
from shoal.serve.limits import Account, RequestError

_EXCERPT = 80
# Of a feature: the arrays of a batch, which double as they grow.
_FEATURE_BYTES = 2 * 28


def decode_lines(body: bytes | bytearray, spec: InputSpec, account: Account) -> Batch:
    """Make a batch of a body of lines of text."""
    if spec.lines is None:
        raise RequestError(f"lines of text: {spec}")
    examples = of_lines(bytes(body), spec, account)
    return to_batch([examples], len(examples.instances))


def of_lines(text: bytes, spec: InputSpec, account: Account, numbers: npt.NDArray[np.int64] | None = None) -> Examples:
    """Make examples of lines of the training data's format; ``numbers``: of their instances, an example each."""
    assert spec.lines is not None
    account.decoded(2 * len(text) + _FEATURE_BYTES * (len(text) // 3))  # a feature has three bytes of text or more
    try:
        batch = parse_text(spec.lines, text)
    except MalformedLineError as error:
        number = error.number if numbers is None else int(numbers[error.number])
        column = ""
        if spec.is_criteo and 0 < (tabs := error.line[: error.at].count(b"\t")) <= len(CRITEO_COLUMNS):
            column = f", column {CRITEO_COLUMNS[tabs - 1]!r}"
        _raise(error, f"instance {number}{column}", str(spec.format))
    if batch is None:
        raise RequestError("no instances: send at least one line")
    if numbers is not None and len(batch) != len(numbers):
        raise RequestError("a line without an example: leave out blank lines")
    instances = np.arange(len(batch)) if numbers is None else numbers
    examples = Examples(instances, batch.indptr, batch.keys, batch.values, batch.fields)
    return spec.batch(examples, account, crossed=False)


def decode_csv(body: bytes | bytearray, spec: InputSpec, account: Account, unknown: set[str]) -> Batch:
    """Make a batch of rows of csv, with the header, the separators and the missing cells of the training data.

    The columns that the model does not know are added to ``unknown``.
    """
    form = spec.csv()
    if form is None:
        raise RequestError(f"this model has no columns: {spec}")
    header = body.partition(b"\n")[0]
    if spec.header is None and (count := 1 + header.count(spec.separator.encode())) > MOST_COLUMNS:
        raise RequestError(f"{count} columns: at most {MOST_COLUMNS} are accepted")
    cells = body.count(spec.separator.encode()) + body.count(b"\n") + body.count(spec.list_separator.encode())
    account.decoded(3 * len(body) + _FEATURE_BYTES * (1 + cells))
    try:
        batch = parse_text(form, bytes(body))
    except MalformedLineError as error:
        names = header_names(bytes(header), spec.separator) if spec.header is None else spec.header
        column = _column_at(error.line, error.at, names, spec)
        _raise(error, f"instance {error.number}{column}", "csv")
    if batch is None:
        below = "" if spec.header is not None else " below the header"
        raise RequestError(f"no instances: send at least one row{below}")
    names = header_names(bytes(header), spec.separator) if spec.header is None else spec.header
    unknown.update(spec.unknown(names))
    examples = Examples(np.arange(len(batch)), batch.indptr, batch.keys, batch.values, batch.fields)
    return to_batch([spec.batch(examples, account, crossed=False)], len(batch))


def _column_at(line: bytes, at: int, names: list[str], spec: InputSpec) -> str:
    """Name the column of the cell that begins at a byte of a line, if its cells are as many as the columns."""
    try:
        (cells,) = csv.reader([line.decode("utf-8", "replace").rstrip("\r")], delimiter=spec.separator)
        before = next(csv.reader([line[:at].decode("utf-8", "replace")], delimiter=spec.separator), [""])
    except csv.Error:
        return ""
    label = None if spec.columns is None else spec.columns.label
    if len(cells) == len(names) - 1:
        names = [name for name in names if name != label]
    return f", column {names[len(before) - 1]!r}" if len(cells) == len(names) else ""


def _raise(error: MalformedLineError, where: str, form: str) -> NoReturn:
    line, at = error.line, error.at
    begin = max(0, at - _EXCERPT // 2)
    shown = line[begin : begin + _EXCERPT].decode("utf-8", "backslashreplace")
    raise RequestError(f"{where}: {error} at byte {at} of the {form} line: {shown!r}") from None
