"""Numbers in text: every value is the float32 nearest to it, every key is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.text import Malformed, nearest_float32
from shoal import _reader
from shoal.data.rows import RowBuffer


def parse(line: bytes, *, room: int = 64):
    rows = RowBuffer(valued=True)
    rows.keys, rows.values = np.empty(room, np.uint64), np.empty(room, np.float32)
    _, _, row, _, fault, _ = _reader.parse_libsvm(line + b"\n", 0, rows, False)
    nnz = rows.indptr[row]
    return fault, rows.keys[:nnz], rows.values[:nnz]


def check_value(text: bytes) -> None:
    fault, _, values = parse(b"1 5:" + text)
    try:
        want = nearest_float32(text)
    except Malformed:
        assert fault != 0, text
    else:
        assert fault == 0, text
        assert values.view(np.uint32)[0] == want.view(np.uint32), text


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-0",
        "+0",
        "1",
        "-1",
        "+1",
        "1.",
        ".5",
        "-.5",
        "0.1",
        "0.3",
        "1e5",
        "1E5",
        "1e+5",
        "1e-5",
        "00012.500",
        "123456789",
        "16777217",
        "16777219",
        "0.50000002980232238",
        "9007199254740993",
        "18446744073709551615",
        "18446744073709551616",
        "99999999999999999999",
        "1234567890123456789012345678901",
        "3.4028234e38",
        "3.4028235e38",
        "3.4028235677973366e38",
        "3.4028235677973365e38",
        "340282356779733661637539395458142568447",
        "1e38",
        "1e39",
        "1e400",
        "-1e39",
        "1e-37",
        "1.17549435e-38",
        "1e-38",
        "1e-45",
        "1.401298464e-45",
        "0.7e-45",
        "0.8e-45",
        "1e-46",
        "1e-400",
        "-1e-400",
        "0e999",
        "0e-999",
        "1e0000000000000000000000000005",
        "0.0000000000000000000000000000000001",
        "1.00000005960464477539",
        "1.000000059604644775390625",
        "1.0000000596046447753906250000001",
        "1.00000017881393432617187",
        "1.000000178813934326171875",
        "8388608.5",
        "8388609.5",
        "4194304.25",
        "0.1e1",
        "100000000000000000000000e-23",
        "9999999999999999999e10",
        "9999999999999999999e11",
        "9999999999999999999e20",
        "-9999999999999999999e22",
    ],
)
def test_a_value_is_the_nearest_float32(text):
    check_value(text.encode())


@pytest.mark.parametrize(
    "text", ["0." + "0" * 500 + "1", "1" + "0" * 500, "1" + "0" * 500 + "e-490", "0." + "0" * 50 + "1e60"]
)
def test_a_value_of_hundreds_of_digits_is_the_nearest_float32(text):
    check_value(text.encode())


def test_a_power_beyond_all_bounds_is_too_large_or_nothing():
    for text in (b"1e99999999999999999999", b"1e18446744073709551617"):  # the latter is 1e1 to who counts in 64 bits
        assert _reader.FAULTS[parse(b"1 5:" + text)[0]] == "a value is too large for float32"
    for text in (b"1e-99999999999999999999", b"0e99999999999999999999"):
        fault, _, values = parse(b"1 5:" + text)
        assert (fault, values.tolist()) == (0, [0.0])


@pytest.mark.slow
@given(st.decimals(allow_nan=False, allow_infinity=False, places=None, min_value=-(10**12), max_value=10**12))
def test_any_decimal_is_the_nearest_float32(number):
    if number == 0 or abs(number.adjusted()) < 100:
        check_value(str(number).encode())


@given(st.integers(0, 10**21), st.integers(-60, 40), st.sampled_from([b"", b"-", b"+"]))
def test_any_digits_and_power_are_the_nearest_float32(digits, power, sign):
    check_value(sign + b"%de%d" % (digits, power))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(-3, 3))
def test_a_number_next_to_the_middle_of_two_floats_falls_on_the_right_side(x, step):
    x = np.float32(x)
    with np.errstate(over="ignore"):
        after = np.nextafter(x, np.float32(np.inf))
    if np.isfinite(after):
        middle = (float(x) + float(after)) / 2
        for _ in range(abs(step)):
            middle = np.nextafter(middle, np.sign(step) * np.inf)
        check_value(f"{middle!r}".replace("np.float64(", "").rstrip(")").encode())
        check_value(f"{float(middle):.60f}".encode())


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_what_numpy_prints_is_read_back_bit_for_bit(x):
    x = np.float32(x)
    fault, _, values = parse(b"1 5:" + str(x).encode())
    assert fault == 0
    assert values.view(np.uint32)[0] == x.view(np.uint32)


@pytest.mark.parametrize(
    "text", [*b"nan NaN inf -inf infinity 1e 1e+ e5 . -. +. - + -- --1 +-1 1.2.3 0x10 1_0 1,5 1a".split(), b""]
)
def test_what_is_not_a_finite_decimal_number_is_refused(text):
    fault, _, _ = parse(b"1 5:" + text)
    assert _reader.FAULTS[fault] == "a value is not a finite decimal number"


@pytest.mark.parametrize("key", [0, 1, 2**32, 2**63 - 1, 2**63, 10**19 - 1, 10**19, 2**64 - 1])
@pytest.mark.parametrize("zeros", [0, 1, 30])
def test_a_key_has_64_bits_and_any_number_of_leading_zeros(key, zeros):
    fault, keys, _ = parse(b"1 " + b"0" * zeros + b"%d:1" % key)
    assert (fault, keys.tolist()) == (0, [key])


@given(st.integers(0, 2**66))
def test_a_key_is_exact_or_out_of_range(key):
    fault, keys, _ = parse(b"1 %d:1" % key)
    if key < 2**64:
        assert (fault, keys.tolist()) == (0, [key])
    else:
        assert _reader.FAULTS[fault] == "a key is larger than 2^64 - 1"


def test_a_key_that_wraps_around_more_than_once_is_out_of_range():
    for key in (2**64, 2**64 + 5, 2**65 + 7, 10**20, 10**21 + 1, 10**60):
        fault, _, _ = parse(b"1 %d:1" % key)
        assert _reader.FAULTS[fault] == "a key is larger than 2^64 - 1"
