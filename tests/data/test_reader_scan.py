"""Lines whose cells are found 64 bytes at a time (csrc/text/scanned_lines.h) come to what the slow parser says.

Wherever their separators are in these 64 bytes, however long their cells, wherever the block is in memory or ends; and
lines that are unusual, of which one cell is read in another way, or all of them.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing.arrays import Arrays
from fuzzing.compare import TWINS, check, compare, csv_twin, slowly
from shoal.data.rows import CRITEO
from tiers import long_after

SCANNED = 8192  # bytes at a time; a longer line is read byte by byte

LABELS = [b"0", b"1", b"-1", b"+1", b"1.0", b"0e0"]
INTEGERS = [b"", b"0", b"7", b"12", b"999", b"1000", b"0042", b"10000", b"12345678", b"123456789", b"1" * 19]
SIGNED = [b"-1", b"-0", b"+5", b"-12345", b"00000000000000000000000000005"]
MALFORMED = [b"x", b"5.0", b"1 ", b"-", b"1-", b":", b"/", b"12a", b"a123", b"1\r", b"9" * 20, b"\xb0", b"1\x809"]
NUMBERS = [b"", b"NA", b"0", b"42", b"9999", b"10000", b"0.5", b"-3.25", b"1e3", b" 7 ", b"3.14159", b"1" * 20, b"007"]
NO_NUMBERS = [b"x", b"1e39", b"5:", b"-", b"1 2", b"0x1", b"\xb1", b"1\r", b'""', b"."]
TEXTS = [b"", b"NA", b"a", b"68fd1e64", b"123456789", b'"q"', b'"a,b"', b'"a""b"', b'x"y', b" a ", b"a\r", b"NAN"]
# Those that have another text in a key, and some that look as if.
SPELLED = (
    b"1e-05 -2e-07 0e-00 1.5e-07 1e+13 -0 -0.0 17.0 0.10 100 True FALSE a-05 2024-05-01T12:00:00Z 2024-05-01".split()
)
SPELLED += b"12:00:00.50 12:00:00.500 12:00:00.000 12:00:00".split()
NO_TEXTS = [b'"', b'"x', b'"x"y', b"x,y"]
LETTERS = bytes(set(range(256)) - {9, 10})


def criteo_line(rng: random.Random, ending: bytes = b"\n") -> bytes:
    """A line of Criteo, mostly as usual: seldom a cell that is malformed, or a column too many or too few."""
    integers = [rng.choice(INTEGERS if rng.random() < 0.9 else SIGNED) for _ in range(13)]
    if rng.random() < 0.1:
        integers[rng.randrange(13)] = rng.choice(MALFORMED)
    usual = rng.random() < 0.5
    categories = [
        b"" if rng.random() < 0.2 else rng.randbytes(4).hex().encode() if usual else cell(rng) for _ in range(26)
    ]
    cells = [rng.choice(LABELS), *integers, *categories]
    if rng.random() < 0.05:
        cells = cells[:-1] if rng.random() < 0.5 else [*cells, b"x"]
    return b"\t".join(cells) + ending


def cell(rng: random.Random) -> bytes:
    return bytes(rng.choice(LETTERS) for _ in range(rng.randrange(21)))


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), lines=st.integers(1, 12), blank=st.integers(0, 70))
def test_random_lines_come_to_what_the_slow_parser_says(seed, lines, blank):
    rng = random.Random(seed)
    endings = [b"\n", b"\n", b"\r\n", b"\n\n", b"\n\r\n\n"]
    text = b"".join(criteo_line(rng, rng.choice(endings)) for _ in range(lines))
    check("criteo", b"\n" * blank + text)


def csv_line(rng: random.Random, kinds: str) -> bytes:
    """A line of CSV with such columns, mostly as usual: seldom a malformed cell, or a cell too many or too few."""
    cells = []
    for kind in kinds:
        malformed = rng.random() < 0.02
        if kind == "l":
            cells.append(rng.choice([b"2", b"", b"x"] if malformed else [b"0", b"1", b"-1", b"1.0", b'"1"']))
        elif kind == "w":
            cells.append(rng.choice([b"-1", b"", b"x"] if malformed else [b"1", b"0.5", b"20"]))
        elif kind == "n":
            cells.append(rng.choice(NO_NUMBERS if malformed else NUMBERS))
        elif malformed:
            cells.append(rng.choice(NO_TEXTS))
        else:
            cells.append(rng.choice(TEXTS) if rng.random() < 0.8 else cell(rng).replace(b",", b""))
    if rng.random() < 0.05:
        cells = cells[:-1] if rng.random() < 0.5 else [*cells, b"x"]
    return b",".join(cells)


@pytest.mark.parametrize("spelled", SPELLED)
def test_a_cell_has_one_key_wherever_it_is_in_a_text(spelled):
    compare(csv_twin("cl"), (spelled + b",1\n") * 20)


@pytest.mark.slow
@given(spelled=st.text("0123456789.+-e: TFalseZ", max_size=26), lines=st.integers(1, 20), beside=st.sampled_from("a.-"))
def test_random_spellings_come_to_what_the_slow_parser_says(spelled, lines, beside):
    cells = [spelled, beside, spelled, "1"]
    compare(csv_twin("cccl"), b"\n".join([",".join(cells).encode(), b"a,b,c,0"] * lines))


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32),
    lines=st.integers(1, 12),
    kinds=st.sampled_from(["lnc", "l" + "n" * 13 + "c" * 26, "cc-ncwl", "ccccccl"]),
    missing=st.sampled_from([(b"", b"NA"), (), (b"a", b'x"y'), (b"",)]),
    positive=st.sampled_from([None, b"1"]),
)
def test_random_lines_of_csv_come_to_what_the_slow_parser_says(seed, lines, kinds, missing, positive):
    rng = random.Random(seed)
    endings = [b"\n", b"\n", b"\r\n", b"\n\n"]
    text = b"".join(csv_line(rng, kinds) + rng.choice(endings) for _ in range(lines))
    compare(csv_twin(kinds, b",", missing, positive), text)


def test_a_text_of_csv_that_ends_at_any_byte_comes_to_what_the_slow_parser_says():
    twin = csv_twin("lnncccw")
    text = b"1,42,0.5,68fd1e64,,x,2\r\n0,,7,a,123456789,,1\n" * 2
    for end in range(len(text) + 1):
        compare(twin, text[:end])


@pytest.mark.parametrize("offset", range(64))
def test_cells_of_any_length_are_read_at_every_position_of_the_scan_and_of_memory(offset):
    twin = TWINS["criteo"]
    rng = random.Random(offset)
    lines = [criteo_line(rng) for _ in range(20)]
    text = b"\n" * offset + b"".join(lines)
    expected = slowly(twin, text)
    memory = np.empty(len(text) + 64, np.uint8)
    begin = (offset * 37 - memory.ctypes.data) % 64
    block = memory[begin : begin + len(text)]
    block[:] = np.frombuffer(text, np.uint8)
    arrays = Arrays(len(text), 39 * len(lines), valued=False, weighted=False)
    got = arrays.parse(twin.parse, block, skip=True)
    assert got[:5] == (len(text), len(expected.begins) - 1, len(expected.rows), len(expected.faults), 0)
    want = [key for _, features in expected.rows for key, *_ in features]
    assert arrays.keys[: arrays.indptr[arrays.row]].tolist() == want


@pytest.mark.slow
@pytest.mark.parametrize("ending", long_after(1, [b"\r\n", b"\n"]))
def test_a_text_that_ends_at_any_byte_comes_to_what_the_slow_parser_says(ending):
    rng = random.Random(5)
    line = b"\t".join([b"1", *[b"42", b""] * 6, b"7", *[b"68fd1e64", b"", b"a"] * 8, b"x", b"12345678"]) + ending
    text = line + criteo_line(rng, ending)
    for end in range(len(text) + 1):
        check("criteo", text[:end])


@pytest.mark.slow
@pytest.mark.parametrize("length", long_after(2, [SCANNED, SCANNED + 1, SCANNED - 1, SCANNED - 2, 2 * SCANNED]))
def test_lines_about_as_long_as_a_scan_come_to_what_the_slow_parser_says(length):
    usual = b"\t".join([b"1", *[b"5"] * 13, *[b"68fd1e64"] * 26]) + b"\n"
    long = usual[:-1].ljust(length, b"x") + b"\n"
    check("criteo", usual * 3 + long + usual * 40 + long * 2 + usual)


def test_every_integer_of_up_to_five_digits_has_the_key_that_it_has_at_the_end_of_a_block():
    text = b"".join(b"0\t" + b"\t" * 6 + b"%d" % v + b"\t" * 32 + b"\n" for v in range(100_000))
    scanned = Arrays(100_000, 100_039, valued=False, weighted=False)
    assert scanned.parse(CRITEO.parse, text)[:3] == (len(text), 100_000, 100_000)
    alone = Arrays(1, 39, valued=False, weighted=False)
    for v in [*range(2000), *range(2000, 100_000, 97)]:
        alone.row = 0
        alone.parse(CRITEO.parse, b"0\t" + b"\t" * 6 + b"%d" % v + b"\t" * 32 + b"\n")
        assert alone.keys[0] == scanned.keys[v]


def test_lines_without_labels_have_the_keys_that_they_have_with_labels():
    rng = random.Random(7)
    lines = [criteo_line(rng) for _ in range(300)]
    twin = TWINS["criteo"]
    lines = [line for line in lines if not slowly(twin, line).faults]
    arrays = [
        Arrays(300, 300 * 39, valued=False, weighted=False, labelled=labelled) for labelled in (True, False, False)
    ]
    for into, text in zip(arrays, (lines, lines, [line.partition(b"\t")[2] for line in lines]), strict=True):
        spaced = b"".join(line + b"\n" * rng.randrange(3) for line in text)
        assert into.parse(twin.parse, spaced)[2:5] == (len(lines), 0, 0)
    labelled, ignored, missing = arrays
    for other in (ignored, missing):
        assert other.indptr[: other.row + 1].tolist() == labelled.indptr[: other.row + 1].tolist()
        assert other.keys[: other.indptr[other.row]].tolist() == labelled.keys[: other.indptr[other.row]].tolist()
        assert other.fields[: other.indptr[other.row]].tolist() == labelled.fields[: other.indptr[other.row]].tolist()
        assert np.isnan(other.labels[: other.row]).all()


def test_labels_of_several_classes_are_read_as_numbers():
    lines = [label + b"\t" * 39 + b"\n" for label in (b"0", b"1", b"2", b"11", b"3.0", b"1")]
    arrays = Arrays(9, 39 * 9, valued=False, weighted=False)
    arrays.classes = 12
    assert arrays.parse(CRITEO.parse, b"".join(lines))[2:5] == (6, 0, 0)
    assert arrays.labels[:6].tolist() == [0, 1, 2, 11, 3, 1]
    arrays.row, arrays.classes = 0, 11
    assert arrays.parse(CRITEO.parse, b"".join(lines))[2] == 3
