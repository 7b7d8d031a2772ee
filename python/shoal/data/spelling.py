"""Spelling: how the text of features becomes their names, many at a time.

A name is a head, which most features of a field share, and the text of the feature: "C14=" and "68fd1e64". What has no
such text, as a bucket of integers, is a head alone.

Threads: no state.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal import _reader
from shoal.data.criteo import CATEGORY_COLUMNS, INTEGER_COLUMNS, buckets

Block = memoryview | bytes
# UTF-8, one text after the other, and where each of them ends.
Texts = tuple[NDArray[np.uint8], NDArray[np.uint64]]
# The names of features from the block they are in, the spans int64[n, 2] of their texts, and their fields uint64[n].
Spell = Callable[[Block, NDArray[np.int64], NDArray[np.uint64]], Texts]

_CELL_BYTES = 128  # of the text of a cell that is not the one given: csrc/text/cell.h
_ENDS_NAME = re.compile(rb"[ \t\r:]")


def decoded(text: bytes | memoryview) -> str:
    """Decode bytes of a file as text, valid UTF-8 or not."""
    return bytes(text).decode("utf-8", "backslashreplace")


def encoded(texts: Sequence[str | bytes]) -> Texts:
    """Write texts one after the other."""
    parts = [text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace") for text in texts]
    return np.frombuffer(b"".join(parts), np.uint8), np.cumsum([len(part) for part in parts], dtype=np.uint64)


def text_at(texts: Texts, i: int) -> str:
    """Decode one of the texts."""
    joined, ends = texts
    return decoded(joined[int(ends[i - 1]) if i else 0 : int(ends[i])].tobytes())


def joined(
    text: Block,
    spans: NDArray[np.int64],
    heads: Sequence[str | bytes],
    head_of: NDArray[np.int64],
    *,
    numbers: bool = False,
    cells: bool = False,
) -> Texts:
    """Join each feature's head and text.

    ``numbers``: the text is numbers, which lose their leading zeros. ``cells``: it is that of a cell, and becomes the
    text of its value (docs/readers.md).
    """
    return _join(np.frombuffer(text, np.uint8), spans, encoded(heads), head_of, numbers=numbers, cells=cells)


def paired(first: Texts, second: Texts) -> Texts:
    """Name features that are made of two: ``first * second``."""
    each = np.arange(len(first[1]))
    heads = _join(np.frombuffer(b" * ", np.uint8), np.broadcast_to(np.array([0, 3]), (len(each), 2)), first, each)
    ends = second[1].astype(np.int64)
    return _join(second[0], np.column_stack([np.append(0, ends[:-1]), ends]), heads, each)


def _join(
    text: NDArray[np.uint8],
    spans: NDArray[np.int64],
    heads: Texts,
    head_of: NDArray[np.int64],
    *,
    numbers: bool = False,
    cells: bool = False,
) -> Texts:
    head_bytes, head_ends = heads
    lengths = np.diff(head_ends, prepend=np.uint64(0)).astype(np.int64)
    room = int(lengths[head_of].sum() + (spans[:, 1] - spans[:, 0]).sum()) + (_CELL_BYTES * len(spans) if cells else 0)
    names, ends = np.empty(room, np.uint8), np.empty(len(spans), np.uint64)
    used = _reader.join_names(
        text, np.ascontiguousarray(spans), head_bytes, head_ends, head_of, numbers, cells, names, ends
    )
    return names[:used], ends


def of_column(name: str, text: Block, spans: NDArray[np.int64], fields: NDArray[np.uint64]) -> Texts:
    """Name the texts of one column."""
    return joined(text, spans, [f"{name}="], np.zeros(len(spans), np.int64), cells=True)


def of_numbers(text: Block, spans: NDArray[np.int64], fields: NDArray[np.uint64]) -> Texts:
    """Name features of libsvm or libffm: the numbers before their values, without zeros in front."""
    return joined(text, spans, [b""], np.zeros(len(spans), np.int64), numbers=True)


def of_vw(text: Block, spans: NDArray[np.int64], fields: NDArray[np.uint64]) -> Texts:
    """Name features of Vowpal Wabbit's text: namespace^name, or the name alone in the nameless one."""
    _, first, head_of = np.unique(fields, return_index=True, return_inverse=True)
    heads = [_namespace(text, int(spans[i, 0])) for i in first.tolist()]
    return joined(text, spans, heads, head_of.astype(np.int64))


def _namespace(text: Block, begin: int) -> bytes:
    reach = 128
    while b"|" not in (before := bytes(text[max(0, begin - reach) : begin])) and reach < begin:
        reach *= 2
    namespace: bytes = _ENDS_NAME.split(before.rpartition(b"|")[2], maxsplit=1)[0]
    return namespace + b"^" if namespace else b""


def of_criteo(text: Block, spans: NDArray[np.int64], fields: NDArray[np.uint64]) -> Texts:
    """Name features of Criteo's logs: their column, I1 to C26, and the category or the integers of its bucket."""
    heads = [f"C{field - INTEGER_COLUMNS}=" for field in range(INTEGER_COLUMNS + CATEGORY_COLUMNS + 1)]
    head_of = fields.astype(np.int64)
    integers = np.flatnonzero(head_of <= INTEGER_COLUMNS)
    named: dict[str, int] = {}
    for i, (begin, end), field in zip(
        integers.tolist(), spans[integers].tolist(), fields[integers].tolist(), strict=True
    ):
        digits = bytes(text[begin:end]).lstrip(b"+-0")
        name = _bucket(field, digits, text[begin] == ord("-"))
        head_of[i] = named.setdefault(name, len(heads) + len(named))
    return joined(text, _without_text(spans, integers), [*heads, *named], head_of)


@functools.lru_cache(1 << 14)
def _bucket(field: int, digits: bytes, is_negative: bool) -> str:
    number = int(digits or b"0")
    if number and is_negative:
        return f"I{field}={-number}"
    floors = _floors()
    bucket = bisect.bisect_right(floors, number) - 1
    low, high = floors[bucket], min(floors[bucket + 1], 1 << 63) - 1
    return f"I{field}={low}" if low == high else f"I{field}={low}..{high}"


def _without_text(spans: NDArray[np.int64], which: NDArray[np.intp]) -> NDArray[np.int64]:
    if len(which):
        spans = spans.copy()
        spans[which] = 0
    return spans


def of_cells(
    categorical: dict[int, str],
    numeric: dict[int, str],
    text: Block,
    spans: NDArray[np.int64],
    fields: NDArray[np.uint64],
) -> Texts:
    """Name features of CSV: a numeric column, or a column and the text of a cell. Columns by their fields."""
    unique, head_of = np.unique(fields, return_inverse=True)
    heads: list[str | bytes] = [
        numeric[field] if field in numeric else f"{categorical[field]}=" for field in unique.tolist()
    ]
    head_of = head_of.astype(np.int64)
    of_column_alone = np.array([field in numeric for field in unique.tolist()], np.bool_)[head_of]
    quoted = (spans[:, 1] > spans[:, 0]) & ~of_column_alone
    quoted[quoted] = np.frombuffer(text, np.uint8)[spans[quoted, 0]] == ord('"')
    for i in np.flatnonzero(quoted).tolist():
        begin, end = spans[i].tolist()
        cell = bytes(text[begin:end]).removesuffix(b"\r")[1:-1].replace(b'""', b'"')
        heads.append(categorical[int(fields[i])].encode() + b"=" + _reader.cell_text(cell))
        head_of[i] = len(heads) - 1
    return joined(text, _without_text(spans, np.flatnonzero(of_column_alone | quoted)), heads, head_of, cells=True)


@functools.cache
def _floors() -> list[int]:
    return [int(floor) for floor in buckets().floors]
