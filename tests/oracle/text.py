"""The slow, obvious readers: bytes to rows with split, regular expressions and fractions."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np

NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
WHOLE = re.compile(rb"[0-9]+")
INTEGER = re.compile(rb"[+-]?[0-9]+")
FLOAT32_OVERFLOW = Fraction(2) ** 128 - Fraction(2) ** 103  # from here on the nearest float32 is infinite
LARGEST = float(np.finfo(np.float32).max)
MASK = (1 << 64) - 1
GOLDEN_RATIO = 0x9E3779B97F4A7C15


class Malformed(Exception):
    """A line that no row comes of."""


def nearest_float32(text: bytes) -> np.float32:
    """Round the decimal number to the nearest float32, ties to the even one, by exact arithmetic."""
    if not NUMBER.fullmatch(text):
        raise Malformed("number")
    digits, _, exponent = text.lower().partition(b"e")
    far = 400 + len(digits)  # so far from 0 that a power of ten more or less changes nothing
    exact = Fraction(Decimal(digits.decode())) * Fraction(10) ** max(-far, min(far, int(exponent or 0)))
    if abs(exact) >= FLOAT32_OVERFLOW:
        raise Malformed("range")
    with np.errstate(over="ignore"):
        guess = np.float32(min(max(float(exact), -LARGEST), LARGEST))
        near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    finite = [x for x in near if np.isfinite(x)]
    best = min(finite, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))
    return np.float32(math.copysign(abs(best), -1.0 if text.startswith(b"-") else 1.0))


def label_of(text: bytes) -> float:
    y = nearest_float32(text)
    if y not in (-1.0, 0.0, 1.0):
        raise Malformed("label")
    return 1.0 if y == 1.0 else 0.0


def whole(text: bytes) -> int:
    if not WHOLE.fullmatch(text) or int(text) > MASK:
        raise Malformed("key")
    return int(text)


def lines_of(data: bytes) -> list[bytes]:
    """Split at newlines; the last line may lack its own."""
    lines = data.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def libsvm_row(line: bytes):
    """(label, [(key, value), ...]) of a line, or None of a blank one."""
    tokens = re.findall(rb"[^ \t\r]+", line.split(b"#")[0])
    if not tokens:
        return None
    label = label_of(tokens[0])
    features = []
    for token in tokens[1:]:
        key, colon, value = token.partition(b":")
        if key == b"qid" and colon:
            whole(value)
            continue
        if not colon:
            raise Malformed("feature")
        features.append((whole(key), nearest_float32(value)))
    return label, features


def libffm_row(line: bytes):
    """(label, [(key, value, field), ...]) of a line, or None of a blank one."""
    tokens = re.findall(rb"[^ \t\r]+", line.split(b"#")[0])
    if not tokens:
        return None
    label = label_of(tokens[0])
    features = []
    for token in tokens[1:]:
        parts = token.split(b":")
        if len(parts) != 3:
            raise Malformed("feature")
        features.append((whole(parts[1]), nearest_float32(parts[2]), whole(parts[0])))
    return label, features


def vw_row(line: bytes):
    """((label, weight), [(key, value, field), ...]) of a line, or None of a blank one."""
    head, bar, body = line.partition(b"|")
    words = re.findall(rb"[^ \t\r]+", head)
    if not bar:
        if not words:
            return None
        raise Malformed("bar")
    if words and (head[-1:] not in b" \t\r" or words[-1].startswith(b"'")):
        words.pop()
    if any(word.startswith(b"'") for word in words):
        raise Malformed("tag")
    if not words:
        raise Malformed("label")
    label = label_of(words[0])
    weight = nearest_float32(words[1]) if len(words) > 1 else np.float32(1)
    if weight < 0 or len(words) > 3 or (len(words) == 3 and nearest_float32(words[2]) != 0):
        raise Malformed("head")
    features = []
    for space in body.split(b"|"):
        name, scale, words = b"", np.float32(1), re.findall(rb"[^ \t\r]+", space)
        if space[:1] not in (b" ", b"\t", b"\r", b""):
            name, colon, text = words.pop(0).partition(b":")
            scale = nearest_float32(text) if colon else scale
        field = token_key(0, name)
        for word in words:
            token, colon, text = word.partition(b":")
            if not word.strip(b":") and not colon:
                raise Malformed("name")
            with np.errstate(over="ignore", under="ignore"):
                value = (nearest_float32(text) if colon else np.float32(1)) * scale
            if not np.isfinite(value):
                raise Malformed("value")
            features.append((token_key(field, token), value, field))
    return (label, float(weight)), features


def scramble(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def token_key(field: int, token: bytes) -> int:
    """The key of (field, token) as docs/readers.md defines it."""
    n = len(token)
    h = (scramble((field + GOLDEN_RATIO) & MASK) + n * GOLDEN_RATIO) & MASK
    words = [token[i : i + 8] for i in range(0, n - 8, 8)] + [token[-8:]]
    for word in words:
        h = scramble(h ^ int.from_bytes(word, "little"))
    return h


def integer_token(v: int) -> bytes:
    """The customary rule, as it is customarily written."""
    return str(int(math.log(float(v)) ** 2)).encode() if v > 2 else b"SP%d" % v


def criteo_row(line: bytes):
    """(label, [(key, 1), ...]) of a line, or None of a blank one."""
    line = line.removesuffix(b"\r")
    if not line:
        return None
    columns = line.split(b"\t")
    label = label_of(columns[0])
    if len(columns) != 40:
        raise Malformed("columns")
    features = []
    for i, text in enumerate(columns[1:14], 1):
        if text:
            if not INTEGER.fullmatch(text) or abs(int(text)) >= 1 << 63:
                raise Malformed("integer")
            features.append((token_key(i, integer_token(int(text))), np.float32(1)))
    for i, text in enumerate(columns[14:], 14):
        if text:
            features.append((token_key(i, text), np.float32(1)))
    return label, features


def csv_cells(line: bytes, separator: bytes) -> list[bytes]:
    """The cells of a line, out of their quotes."""
    line = line.removesuffix(b"\r")
    cells, at = [], 0
    while True:
        if line[at : at + 1] == b'"':
            quoted = re.compile(rb'"((?:[^"]|"")*)"').match(line, at)
            if not quoted:
                raise Malformed("quote")
            cells.append(quoted[1].replace(b'""', b'"'))
            at = quoted.end()
            if line[at : at + 1] not in (separator, b""):
                raise Malformed("behind a quote")
        else:
            cells.append(line[at:].split(separator)[0])
            at += len(cells[-1])
        if at == len(line):
            return cells
        at += 1


def csv_row(line: bytes, kinds: list[str], fields: list[int], separator=b",", missing=(b"", b"NA"), positive=None):
    """((label, weight), [(key, value, field), ...]) of a line, or None of a blank one; kinds by their first letters."""
    if line in (b"", b"\r"):
        return None
    cells = csv_cells(line, separator)
    if len(cells) != len(kinds):
        raise Malformed("cells")
    label, weight, features = None, np.float32(1), []
    for cell, kind, field in zip(cells, kinds, fields, strict=True):
        number = cell.strip(b" \t\r")
        if kind == "-":
            continue
        if cell in missing:
            if kind in "lw":
                raise Malformed("missing")
        elif kind == "l":
            label = label_of(number) if positive is None else float(cell == positive)
        elif kind == "w":
            weight = nearest_float32(number)
            if weight < 0:
                raise Malformed("weight")
        elif kind == "n":
            features.append((token_key(field, b""), nearest_float32(number), field))
        else:
            features.append((token_key(field, cell), np.float32(1), field))
    return (label, float(weight)), features


def interacting(features, pairs):
    """Features (key, value, field) of a row, and behind them those of pairs of fields, as (key, value)."""
    made = [feature[:2] for feature in features]
    for first, second in pairs:
        for i, (a, x, f) in enumerate(features):
            for j, (b, y, g) in enumerate(features):
                if (f, g) == (first, second) and (first != second or i < j):
                    low, high = sorted((a, b)) if first == second else (a, b)
                    with np.errstate(over="ignore", under="ignore"):
                        product = np.float32(x) * np.float32(y)
                    made.append((token_key(low, high.to_bytes(8, "little")), np.clip(product, -LARGEST, LARGEST)))
    return made


def rows_of(data: bytes, row):
    """All rows of a text, the malformed lines left out, and how many those are."""
    rows, malformed = [], 0
    for line in lines_of(data):
        try:
            if (got := row(line)) is not None:
                rows.append(got)
        except Malformed:
            malformed += 1
    return rows, malformed


def rows_of_batch(batch):
    """A batch in the same shape."""
    values = np.ones(batch.nnz, np.float32) if batch.values is None else batch.values
    return [
        (float(batch.labels[i]), list(zip(batch.keys[a:b].tolist(), values[a:b], strict=True)))
        for i, (a, b) in enumerate(zip(batch.indptr[:-1], batch.indptr[1:], strict=True))
    ]


def bits(rows):
    """Rows with their values as bits, so that -0 is not 0."""
    return [
        (label, [(key, int(value.view(np.uint32)), *field) for key, value, *field in features])
        for label, features in rows
    ]
