"""Examples written as text and read back: every format, whatever the blocks, the batches and the threads."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.text import integer_token, token_key
from shoal.data.files import LocalFile
from shoal.data.fill import TextSource, fill
from shoal.data.rows import CRITEO, LIBFFM, LIBSVM, VW
from shoal.data.source import Lines

KEYS = st.integers(0, 2**64 - 1)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
FACTORS = st.floats(-(2.0**60), 2.0**60, width=32)  # of which two can be multiplied
LABELS = st.sampled_from([(b"1", 1), (b"+1", 1), (b"1.0", 1), (b"0", 0), (b"-1", 0), (b"-1e0", 0)])
BLANKS = st.sampled_from([b" ", b" ", b" ", b"  ", b"\t", b" \r\t "])
NAMES = st.binary(max_size=20).map(lambda name: name.translate(None, b" \t\r\n:|"))
PASS = {"block": st.integers(1, 300), "size": st.integers(1, 5), "threads": st.sampled_from([1, 1, 2])}

# Shortest, nine digits, all digits.
SPELLINGS = st.sampled_from([lambda v: str(v), lambda v: f"{v:.9g}", lambda v: f"{Decimal(float(v)):f}"])


@st.composite
def numbers(draw, values=FLOATS):
    """A number as text, and the float32 that it is."""
    value = np.float32(draw(values))
    return draw(SPELLINGS)(value).encode(), value


def read_back(folder, form, lines, block, size, threads):
    """Write the lines, and read (label, weight, [(key, bits of the value), ...]) of each."""
    path = folder.mktemp("text") / "x"
    path.write_bytes(b"".join(lines))
    source = Lines(LocalFile(str(path)), block_bytes=block)
    parts = fill([TextSource(0, source)], form, size, skip=False, reader_threads=threads)
    rows = []
    for batch in (batch for part in parts if part for batch, _ in part.batches):
        values = np.ones(batch.nnz, np.float32) if batch.values is None else batch.values
        features = list(zip(batch.keys.tolist(), values.view(np.uint32).tolist(), strict=True))
        weights = np.ones(len(batch), np.float32) if batch.weights is None else batch.weights
        for i, (a, b) in enumerate(zip(batch.indptr[:-1], batch.indptr[1:], strict=True)):
            rows.append((batch.labels[i], weights[i], features[a:b]))
    return rows


def bits(value):
    return int(np.float32(value).view(np.uint32))


@st.composite
def libsvm_lines(draw):
    text, label = draw(LABELS)
    features = draw(st.lists(st.tuples(KEYS, numbers()), max_size=8))
    for key, (spelled, _) in features:
        text += draw(BLANKS) + b"%d:%s" % (key, spelled)
    text += draw(st.sampled_from([b"\n", b"\r\n", b" # 3:4\n", b"\n\n#\n"]))
    return text, (label, 1, [(key, bits(value)) for key, (_, value) in features])


@given(lines=st.lists(libsvm_lines()), **PASS)
def test_libsvm(tmp_path_factory, lines, block, size, threads):
    got = read_back(tmp_path_factory, LIBSVM, [text for text, _ in lines], block, size, threads)
    assert got == [row for _, row in lines]


@st.composite
def libffm_lines(draw):
    text, label = draw(LABELS)
    features = draw(st.lists(st.tuples(KEYS, KEYS, numbers()), max_size=8))
    for field, key, (spelled, _) in features:
        text += draw(BLANKS) + b"%d:%d:%s" % (field, key, spelled)
    text += draw(st.sampled_from([b"\n", b"\r\n", b"# 1:3:4\n", b"\n \n"]))
    return text, (label, 1, [(key, bits(value)) for _, key, (_, value) in features])


@pytest.mark.slow
@given(lines=st.lists(libffm_lines()), **PASS)
def test_libffm(tmp_path_factory, lines, block, size, threads):
    got = read_back(tmp_path_factory, LIBFFM, [text for text, _ in lines], block, size, threads)
    assert got == [row for _, row in lines]


@st.composite
def vw_lines(draw):
    text, label = draw(LABELS)
    weight = np.float32(1)
    if draw(st.booleans()):
        spelled, weight = draw(numbers(st.floats(0, 1000, width=32)))
        text += draw(BLANKS) + spelled
    text += draw(BLANKS) + draw(st.sampled_from([b"", b"", b"tag", b"'tag", b"'tag "]))
    features = []
    for name in draw(st.lists(NAMES, min_size=1, max_size=3)):
        scale, spelled = np.float32(1), b""
        if name and draw(st.booleans()):
            spelled, scale = draw(numbers(FACTORS))
            spelled = b":" + spelled
        text += b"|" + name + spelled
        field = token_key(0, name)
        for token, number in draw(st.lists(st.tuples(NAMES, st.none() | numbers(FACTORS)), max_size=4)):
            if number is not None:
                text += draw(BLANKS) + token + b":" + number[0]
            elif token:
                text += draw(BLANKS) + token
            else:
                continue
            with np.errstate(under="ignore"):
                value = scale if number is None else number[1] * scale
            features.append((token_key(field, token), bits(value)))
        text += draw(st.sampled_from([b"", b" ", b"\r"]))
    return text + draw(st.sampled_from([b"\n", b" \r\n", b"\n\n"])), (label, weight, features)


@pytest.mark.slow
@given(lines=st.lists(vw_lines()), **PASS)
def test_vowpal_wabbit(tmp_path_factory, lines, block, size, threads):
    got = read_back(tmp_path_factory, VW, [text for text, _ in lines], block, size, threads)
    assert got == [row for _, row in lines]


TOKENS = st.binary(max_size=20).map(lambda token: token.translate(None, b"\t\r\n"))
WHOLE = st.none() | st.integers(-9, 9) | st.integers(1 - 2**63, 2**63 - 1)


@st.composite
def criteo_lines(draw):
    text, label = draw(LABELS)
    features = []
    for column, v in enumerate(draw(st.lists(WHOLE, min_size=13, max_size=13)), 1):
        text += b"\t" + (b"" if v is None else draw(st.sampled_from([b"%d", b"%+d", b"%020d"])) % v)
        if v is not None:
            features.append((token_key(column, integer_token(v)), bits(1)))
    for column, token in enumerate(draw(st.lists(TOKENS, min_size=26, max_size=26)), 14):
        text += b"\t" + token
        if token:
            features.append((token_key(column, token), bits(1)))
    return text + draw(st.sampled_from([b"\n", b"\r\n", b"\n\n"])), (label, 1, features)


@pytest.mark.slow
@given(lines=st.lists(criteo_lines(), max_size=5), **PASS)
def test_criteo(tmp_path_factory, lines, block, size, threads):
    got = read_back(tmp_path_factory, CRITEO, [text for text, _ in lines], block, size, threads)
    assert got == [row for _, row in lines]
