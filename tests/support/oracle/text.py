"""The slow, obvious readers: bytes to rows with split, regular expressions and fractions."""

from __future__ import annotations

import datetime as dt
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
    """A line that no row comes of: what is wrong, and the first byte of the word where, and the one behind it."""

    def __init__(self, what: str, begin: int = 0, end: int = 0) -> None:
        super().__init__(what)
        self.what, self.begin, self.end = what, begin, end


def nearest_float32(text: bytes) -> np.float32:
    """Round the decimal number to the nearest float32, ties to the even one, by exact arithmetic."""
    if not NUMBER.fullmatch(text):
        raise Malformed("number")
    digits, _, exponent = text.lower().partition(b"e")
    far = 60 + len(digits)  # so far from 0 that a power of ten more or less changes nothing
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


def words_of(text: bytes, begin: int = 0) -> list[tuple[int, bytes]]:
    """What stands between blanks, and where, `begin` being the place of the text."""
    return [(begin + match.start(), match[0]) for match in re.finditer(rb"[^ \t\r]+", text)]


def take(read, text: bytes, what: str, begin: int, size: int):
    """Read a text that belongs to the word of `size` bytes at `begin`."""
    try:
        return read(text)
    except Malformed:
        raise Malformed(what, begin, begin + size) from None


def libsvm_row(line: bytes):
    """(label, [(key, value), ...]) of a line, or None of a blank one."""
    words = words_of(line.split(b"#")[0])
    if not words:
        return None
    label = take(label_of, words[0][1], "label", words[0][0], len(words[0][1]))
    features = []
    for at, word in words[1:]:
        key, colon, value = word.partition(b":")
        if key == b"qid" and colon:
            take(whole, value, "key", at, len(word))
            continue
        number = take(whole, key, "key", at, len(word))
        if not colon:
            raise Malformed("no value", at, at + len(word))
        features.append((number, take(nearest_float32, value, "value", at, len(word))))
    return label, features


def libffm_row(line: bytes):
    """(label, [(key, value, field), ...]) of a line, or None of a blank one."""
    words = words_of(line.split(b"#")[0])
    if not words:
        return None
    label = take(label_of, words[0][1], "label", words[0][0], len(words[0][1]))
    features = []
    for at, word in words[1:]:
        parts = word.split(b":", 2)
        field = take(whole, parts[0], "field", at, len(word))
        if len(parts) == 1:
            raise Malformed("field", at, at + len(word))
        key = take(whole, parts[1], "field", at, len(word))
        if len(parts) == 2:
            raise Malformed("no value", at, at + len(word))
        features.append((key, take(nearest_float32, parts[2], "value", at, len(word)), field))
    return label, features


def vw_head(head: bytes, bar: bool):
    """(label, weight) of what stands before the first bar; None of blanks without a bar."""
    words = words_of(head)
    if not words and not bar:
        return None
    if words and bar and head[-1:] not in b" \t\r":
        words.pop()  # the tag
    quote = next((i for i, (_, word) in enumerate(words) if word.startswith(b"'")), len(words))
    behind = words[quote + 1][0] if quote + 1 < len(words) else None
    if quote + 1 == len(words) and bar and head[-1:] not in b" \t\r":
        behind = words_of(head)[-1][0]  # a second tag
    numbers = words[:quote]
    label, weight = None, np.float32(1)
    for i, (at, word) in enumerate(numbers):
        if i == 0:
            label = take(label_of, word, "label", at, len(word))
        elif i == 1:
            weight = take(nearest_float32, word, "importance", at, len(word))
            if weight < 0:
                raise Malformed("importance", at, at + len(word))
        elif i > 2 or take(nearest_float32, word, "initial", at, len(word)) != 0:
            raise Malformed("initial", at, at + len(word))
    if behind is not None or not bar:
        at = len(head) if behind is None else behind
        raise Malformed("bar", at, at)
    if label is None:
        raise Malformed("no label", len(head), len(head))
    return label, float(weight)


def vw_row(line: bytes):
    """((label, weight), [(key, value, field), ...]) of a line, or None of a blank one."""
    head, bar, body = line.partition(b"|")
    about = vw_head(head, bool(bar))
    if about is None:
        return None
    features = []
    begin = len(head) + 1
    for space in body.split(b"|"):
        name, scale, words = b"", np.float32(1), words_of(space, begin)
        if space[:1] not in (b" ", b"\t", b"\r", b""):
            at, word = words.pop(0)
            name, colon, text = word.partition(b":")
            scale = take(nearest_float32, text, "value", at, len(word)) if colon else scale
        field = token_key(0, name)
        for at, word in words:
            token, colon, text = word.partition(b":")
            value = take(nearest_float32, text, "value", at, len(word)) if colon else np.float32(1)
            with np.errstate(over="ignore", under="ignore"):
                value = value * scale
            if not np.isfinite(value):
                raise Malformed("value", at, at + len(word))
            features.append((token_key(field, token), value, field))
        begin += len(space) + 1
    return about, features


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
    """(label, [(key, 1, column), ...]) of a line, or None of a blank one."""
    line = line.removesuffix(b"\r")
    if not line:
        return None
    columns = line.split(b"\t")
    label = take(label_of, columns[0], "first column", 0, len(columns[0]))
    features = []
    begin = len(columns[0]) + 1
    for i, text in enumerate(columns[1:40], 1):
        if text and i < 14 and (not INTEGER.fullmatch(text) or abs(int(text)) >= 1 << 63):
            raise Malformed("integer", begin, begin + len(text))
        if text:
            token = integer_token(int(text)) if i < 14 else text
            features.append((token_key(i, token), np.float32(1), i))
        begin += len(text) + 1
    if len(columns) != 40:
        raise Malformed("columns", begin - 1, begin)
    return label, features


EXPONENTIAL = re.compile(r"-?[0-9]+(\.[0-9]*)?e[+-][0-9]{2}")
WITH_ZEROS = re.compile(r"(-?(?:0|[1-9][0-9]*))\.0+")
TIME = re.compile(r"([0-9]{2}:[0-9]{2}:[0-9]{2})\.([0-9]*0)")
MOMENT = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[T ]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}(?::?[0-9]{2})?)?"
)


def cell_text(text: bytes) -> bytes:
    """The text of a cell that has this text in a file."""
    try:
        cell = text.decode("ascii")
    except UnicodeDecodeError:
        return text
    if cell in ("True", "TRUE", "False", "FALSE"):
        cell = cell.lower()
    elif found := WITH_ZEROS.fullmatch(cell):
        cell = found[1]
    elif EXPONENTIAL.fullmatch(cell) and math.isfinite(number := float(cell)):
        whole = number.is_integer() and abs(number) < 2**64
        if number == 0 and Decimal(cell) != 0:
            return text  # too small for a double
        plain = str(int(number)) if whole else format(Decimal(repr(number)), "f").removesuffix(".0")
        cell = plain if len(plain) <= 128 else cell
    elif (found := TIME.fullmatch(cell)) and len(cell) > 9:
        cell = f"{found[1]}.{found[2]}".rstrip("0").rstrip(".")
    elif found := MOMENT.fullmatch(cell):
        day, clock, fraction, zone = found.groups()
        hours, minutes = (int(zone[1:3]), int(zone[3:].replace(":", "") or 0)) if zone not in (None, "Z") else (0, 0)
        try:
            moment = dt.datetime.fromisoformat(f"{day} {clock}")
            if hours > 23 or minutes > 59:
                raise ValueError
            ahead = dt.timedelta(hours=hours, minutes=minutes)
            moment += ahead if zone is not None and zone[0] == "-" else -ahead
        except (ValueError, OverflowError):
            return text
        cell = f"{moment}.{fraction or ''}".rstrip("0" if fraction else "").rstrip(".").removesuffix(" 00:00:00")
    return b"0" if cell == "-0" else cell.encode()


def csv_cells(line: bytes, separator: bytes):
    """Yield the cells of a line, out of their quotes, each behind the bytes that it stands between."""
    line = line.removesuffix(b"\r")
    at = 0
    while True:
        begin = at
        if line[at : at + 1] == b'"':
            quoted = re.compile(rb'"((?:[^"]|"")*+)"').match(line, at)
            if not quoted:
                raise Malformed("quote", begin, begin)
            at = quoted.end()
            if line[at : at + 1] not in (separator, b""):
                raise Malformed("behind a quote", at, at)
            yield begin, at, quoted[1].replace(b'""', b'"')
        else:
            cell = line[at:].split(separator)[0]
            at += len(cell)
            yield begin, at, cell
        if at == len(line):
            return
        at += 1


def csv_row(line: bytes, kinds: str, fields: list[int], separator=b",", missing=(b"", b"NA"), positive=None):
    """((label, weight), [(key, value, field), ...]) of a line, or None of a blank one; kinds by their first letters.

    Without a column of weights (label, [...]).
    """
    if line in (b"", b"\r"):
        return None
    label, weight, features, end, count = None, np.float32(1), [], 0, 0
    for kind, field, (begin, end, cell) in zip(kinds, fields, csv_cells(line, separator), strict=False):
        count += 1
        size = end - begin
        number = cell.strip(b" \t\r")
        if kind == "-":
            continue
        if cell in missing:
            if kind in "lw":
                raise Malformed("missing", begin, end)
        elif kind == "l":
            label = (
                float(cell_text(cell) == positive)
                if positive is not None
                else take(label_of, number, "label", begin, size)
            )
        elif kind == "w":
            weight = take(nearest_float32, number, "importance", begin, size)
            if weight < 0:
                raise Malformed("importance", begin, end)
        elif kind == "n":
            value = take(nearest_float32, number, "value", begin, size)
            features.append((token_key(field, b""), value, field))
        elif kind == "v":
            quoted = line.startswith(b'"', begin)
            at, in_place = begin + quoted, size == len(cell) + 2 * quoted
            for item in cell.split(b"|") if cell else []:
                value = np.float32(0)
                if item and item not in missing:
                    where = (at, len(item)) if in_place else (begin, size)
                    value = take(nearest_float32, item.strip(b" \t\r"), "value", *where)
                features.append((token_key(field, b""), value, field))
                at += len(item) + 1
        else:
            features.append((token_key(field, cell_text(cell)), np.float32(1), field))
    if count < len(kinds) or end < len(line.removesuffix(b"\r")):
        raise Malformed("cells", end, len(line) if count < len(kinds) else end)
    return (label, float(weight)) if "w" in kinds else label, features


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
    """A batch in the shape of libsvm's rows."""
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
