"""Compare the fast parser of a format with its slow reference on one text.

    whole      one block, room for everything, malformed lines skipped; each span is the text of its key
    stopping   one block, every malformed line is an error: its position, its fault, and continuing after it
    creeping   a block for each line; arrays start empty and grow in small steps
    cut        two blocks, the cut between two lines
    batches    `Rows`, taken in batches of a few rows

A text is one test: its parameters (the position of the cut, the size of the batches) are derived from its bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fuzzing.arrays import Arrays
from oracle.text import (
    Malformed,
    bits,
    cell_text,
    criteo_row,
    csv_row,
    integer_token,
    libffm_row,
    libsvm_row,
    lines_of,
    token_key,
    vw_row,
)
from shoal import _reader
from shoal.data.columns import CATEGORICAL, LABEL, NUMERIC, PASSED_OVER, VECTOR, WEIGHT, BoundColumns
from shoal.data.rebatch import BatchQueue
from shoal.data.rows import CRITEO, Parse, RowBuffer

# The faults of the slow parsers, and the beginnings of the corresponding messages.
SAYS = {
    "label": ("the label is n",),
    "first column": ("the label is n", "40 columns"),
    "no label": ("there is no label",),
    "bar": ('there is no "|"',),
    "importance": ("the importance",),
    "initial": ("a third number",),
    "key": ('a feature is not "key:value"', "a key is larger"),
    "field": ('a feature is not "field:key:value"', "a key is larger"),
    "no value": ('a feature has no ":value"',),
    "value": ("a value is",),
    "integer": ("an integer column", "40 columns"),
    "columns": ("40 columns", "an integer column"),
    "cells": ("there are more or fewer cells",),
    "quote": ("a cell in quotes",),
    "behind a quote": ("something stands",),
    "missing": ("the label or the weight",),
}


class Twin(NamedTuple):
    """The parser of a format, and the slow parser of one line."""

    parse: Parse
    row: Callable[[bytes], tuple | None]
    key: Callable[[int, bytes], int]  # of a feature, from its field and its text
    valued: bool = True
    weighted: bool = False
    fielded: bool = True  # whether the slow parser returns fields
    step: int = 1  # features for which a line may need room at once


def _criteo_key(column: int, text: bytes) -> int:
    return token_key(column, integer_token(int(text)) if column < 14 else text)


def _pair_key(field: int, text: bytes) -> int:
    assert int(text.split(b":")[0]) == field
    return int(text.split(b":")[1])


TWINS = {
    "libsvm": Twin(_reader.parse_libsvm, libsvm_row, lambda _, text: int(text), fielded=False),
    "libffm": Twin(_reader.parse_libffm, libffm_row, _pair_key),
    "vw": Twin(_reader.parse_vw, vw_row, token_key, weighted=True),
    "criteo": Twin(CRITEO.parse, criteo_row, _criteo_key, valued=False, step=39),
}

FORMATS = (*TWINS, "csv")

KINDS = {"-": PASSED_OVER, "l": LABEL, "w": WEIGHT, "n": NUMERIC, "c": CATEGORICAL, "v": VECTOR}


def csv_columns(
    kinds: str, separator: bytes = b",", missing: Sequence[bytes] = (b"", b"NA"), positive: bytes | None = None
) -> BoundColumns:
    """Make columns of these kinds, by their first letters, in fields of any numbers."""
    numbers = np.array([KINDS[kind] for kind in kinds], np.uint8)
    fields = np.arange(len(kinds), dtype=np.uint64) * np.uint64(7)
    return BoundColumns((), numbers, fields, fields, separator[0], ord("|"), tuple(missing), positive)


def csv_twin(kinds: str, *columns) -> Twin:
    """Make the twin of CSV with such columns; the parameters are those of `csv_columns`."""
    bound = csv_columns(kinds, *columns)

    def parse(block, start, arrays, skip):
        return _reader.parse_csv(block, start, arrays, bound, skip)

    def row(line):
        return csv_row(line, kinds, bound.fields.tolist(), *columns)

    def key(field, text):
        if kinds[field // 7] in "nv":
            return token_key(field, b"")
        return token_key(field, cell_text(text[1:-1].replace(b'""', b'"') if text.startswith(b'"') else text))

    return Twin(parse, row, key, weighted="w" in kinds, step=len(kinds))


def _csv_of(text: bytes) -> tuple[Twin, bytes]:
    """Read the columns from the first line: a separator, a code of the missing and positive texts, and the kinds."""
    first, _, rest = text.partition(b"\n")
    first = (first + b",-").ljust(2, b"-")
    separator = first[:1] if first[:1] in b",;\t| " else b","
    missing = [(b"", b"NA"), (), (b"a", b"longer_than_eight", b'x"y')][first[1] % 3]
    positive = [None, b"a", b"1"][first[1] // 3 % 3]
    letters = first[2:8].decode("latin-1").replace("l", "c")
    kinds = "".join(letter if letter in KINDS else "" for letter in letters)
    return csv_twin("l" + kinds if first[1] & 128 else kinds + "l", separator, missing, positive), rest


class Expected(NamedTuple):
    """The result of parsing a text."""

    rows: list  # with values as bits
    faults: list[tuple[int, Malformed]]  # of the malformed lines: the offset of the line, and the fault
    begins: list[int]  # offsets of all lines, and the end


def slowly(twin: Twin, text: bytes) -> Expected:
    """Read a text with the slow parser."""
    rows, faults, begins = [], [], [0]
    for line in lines_of(text):
        try:
            if (row := twin.row(line)) is not None:
                rows.append(row)
        except Malformed as wrong:
            faults.append((begins[-1], wrong))
        begins.append(begins[-1] + len(line) + 1)
    return Expected(bits(rows), faults, begins)


def check(name: str, text: bytes) -> Expected:
    """Compare all ways to read a text in a format; the first line of a CSV text defines its columns."""
    return compare(*(_csv_of(text) if name == "csv" else (TWINS[name], text)))


def compare(twin: Twin, text: bytes) -> Expected:
    """Compare all ways to read a text; AssertionError if they do not agree.

    Parameters
    ----------
    twin : Twin
        How.
    text : bytes
        Its last line may lack the newline, which is added.

    Returns
    -------
    Expected
        What they agree on.
    """
    text += b"" if text.endswith(b"\n") or not text else b"\n"
    expected = slowly(twin, text)
    bare = [(head, [feature[:2] for feature in features]) for head, features in expected.rows]
    choice = zlib.crc32(text)
    lines = [text[a:b] for a, b in zip(expected.begins[:-1], expected.begins[1:], strict=True)]
    cut = expected.begins[choice % len(expected.begins)]

    assert _whole(twin, text, expected) == expected.rows
    assert _stopping(twin, text, expected) == expected.rows
    assert _creeping(twin, lines, len(expected.faults), fielded=twin.fielded, room=0) == expected.rows
    assert _creeping(twin, [text[:cut], text[cut:]], len(expected.faults), fielded=False, room=choice % 64) == bare
    assert _batches(twin, text, 1 + choice % 3) == bare
    return expected


def _block(text: bytes) -> np.ndarray:
    """Copy a text into memory of exactly its size, so that the address sanitizer detects reads beyond its end."""
    return np.frombuffer(text, np.uint8).copy()


def _arrays(twin: Twin, rows: int, nnz: int, *, fielded: bool, spanned: bool = False) -> Arrays:
    return Arrays(rows, nnz, valued=twin.valued, weighted=twin.weighted, fielded=fielded, spanned=spanned)


def _whole(twin: Twin, text: bytes, expected: Expected) -> list:
    arrays = _arrays(twin, len(text), len(text) * twin.step, fielded=twin.fielded, spanned=True)
    got = arrays.parse(twin.parse, _block(text), skip=True)
    assert got[:5] == (len(text), len(expected.begins) - 1, len(expected.rows), len(expected.faults), 0)
    rows = arrays.rows()
    features = (feature for _, features in rows for feature in features)
    for (key, _, *field), (begin, end) in zip(features, arrays.spans.tolist(), strict=False):
        assert key == twin.key(field[0] if field else 0, text[begin:end])
    return bits(rows)


def _stopping(twin: Twin, text: bytes, expected: Expected) -> list:
    block = _block(text)
    arrays = _arrays(twin, len(text), len(text) * twin.step, fielded=twin.fielded)
    begin, lines = 0, 0
    for at, wrong in expected.faults:
        end, count, _, skipped, fault, place = arrays.parse(twin.parse, block, begin)
        assert (end, skipped) == (at, 0), wrong
        says = _reader.FAULTS[fault]
        assert says.startswith(SAYS[wrong.what]), (says, wrong)
        assert at + wrong.begin <= place <= at + wrong.end, (place - at, wrong.begin, wrong.end, says)
        begin = text.index(b"\n", end) + 1
        lines += count + 1
    end, count, row, skipped, fault, _ = arrays.parse(twin.parse, block, begin)
    assert (end, lines + count) == (len(text), len(expected.begins) - 1)
    assert (row, skipped, fault) == (len(expected.rows), 0, 0)
    return bits(arrays.rows())


def _creeping(twin: Twin, blocks: list[bytes], malformed: int, *, fielded: bool, room: int) -> list:
    arrays = _arrays(twin, room, room, fielded=fielded)
    for text in blocks:
        block = _block(text)
        end = 0
        while end < len(text):
            end, _, row, skipped, fault, _ = arrays.parse(twin.parse, block, end, skip=True)
            malformed -= skipped
            assert fault == 0
            assert text[end - 1 : end] in (b"\n", b"")
            if end < len(text):
                full = row == len(arrays.labels)
                arrays = arrays.larger(1 if full else 0, 0 if full else twin.step + len(arrays.keys) // 4)
    assert malformed == 0
    return bits(arrays.rows())


def _batches(twin: Twin, text: bytes, size: int) -> list:
    rows, queue = RowBuffer(valued=twin.valued, weighted=twin.weighted), BatchQueue(size)
    view = memoryview(text)
    end = 0
    while end < len(text):
        end, _, rows.row, _, _, _ = twin.parse(view, end, rows, True)
        if end < len(text):
            rows.grow()
    batches = [batch for batch, _ in queue.add(rows.batch())]
    rest = queue.rest()
    return bits(
        [row for batch in [*batches, *([rest] if rest else [])] for row in _rows_of(batch, weighted=twin.weighted)]
    )


def _rows_of(batch, *, weighted: bool) -> list:
    assert batch.weights is None or weighted
    labels = batch.labels.tolist()
    weights = np.ones(len(batch), np.float32) if batch.weights is None else batch.weights
    values = np.ones(batch.nnz, np.float32) if batch.values is None else batch.values
    ends = batch.indptr.tolist()
    return [
        (
            (labels[i], float(weights[i])) if weighted else labels[i],
            list(zip(batch.keys[ends[i] : ends[i + 1]].tolist(), values[ends[i] : ends[i + 1]], strict=True)),
        )
        for i in range(len(batch))
    ]
